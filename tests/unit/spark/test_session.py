"""The settings of a session, and what it says when something is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.spark.processes import environment

from flintmq.errors import OptionError
from flintmq.spark import SetupError, session
from flintmq.spark.session import THROUGHPUT, settings


def test_settings_of_a_local_session():
    chosen = settings("local[3]")
    assert chosen["spark.sql.shuffle.partitions"] == "3"
    assert chosen["spark.python.unix.domain.socket.enabled"] == "true"
    assert chosen["spark.sql.session.timeZone"] == "UTC"
    assert "FileSystemBased" in chosen["spark.sql.streaming.checkpointFileManagerClass"]
    assert "SerialGC" in chosen["spark.driver.extraJavaOptions"]
    assert settings("local")["spark.sql.shuffle.partitions"] == "1"
    assert settings("local[2,4]")["spark.sql.shuffle.partitions"] == "2"
    assert int(settings("local[*]")["spark.sql.shuffle.partitions"]) >= 1
    assert "spark.driver.extraJavaOptions" not in settings("local[3]", THROUGHPUT)


def test_a_cluster_keeps_its_own_checkpoints_and_partitions():
    chosen = settings("spark://host:7077")
    assert "spark.sql.shuffle.partitions" not in chosen
    assert "spark.sql.streaming.checkpointFileManagerClass" not in chosen


def test_names_of_settings():
    with pytest.raises(OptionError, match=r"spark\."):
        session("app", master="local[1]", driver_memory="1g")


def test_the_jvm_is_one_of_two():
    with pytest.raises(OptionError, match="quick or throughput"):
        session("app", jvm="fast")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pyarrow" else object())
    with pytest.raises(SetupError, match=r"pyarrow is missing.*flintmq\[spark\]"):
        session("app")


def test_an_old_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.1.4" if name == "pyspark" else "99.0")
    with pytest.raises(SetupError, match=r"pyspark 4\.1\.4 is too old, 4\.2"):
        session("app")


def test_the_auto_registered_module_is_lazy():
    for name in [name for name in sys.modules if name == "pyspark_nsq"]:
        del sys.modules[name]
    import pyspark_nsq

    assert "DefaultSource" not in vars(pyspark_nsq)
    assert pyspark_nsq.DefaultSource.name() == "nsq"
    assert not hasattr(pyspark_nsq, "OtherSource")


def test_the_auto_registered_module_hides_what_is_missing(monkeypatch):
    """Spark asks with hasattr(); any other error would hide the data sources of everybody else."""
    import pyspark_nsq

    monkeypatch.setitem(sys.modules, "flintmq.spark.source", None)
    assert not hasattr(pyspark_nsq, "DefaultSource")


def test_the_source_needs_no_numpy_until_it_reads():
    """Spark imports it in a new process for every query; numpy and pyarrow would cost it 0.15 s each time."""
    code = "import sys, flintmq.spark.source; print(sorted({'numpy', 'pyarrow', 'asyncio'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
