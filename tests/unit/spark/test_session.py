"""The settings of a session, and what it says when something is missing."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from tests.spark.processes import environment

from flintmq.errors import OptionError
from flintmq.spark import SetupError, session, session_settings
from flintmq.spark.session import _tell_if_away
from flintmq.spark.session_settings import THROUGHPUT, settings, unfit_pyspark


def test_settings_of_a_local_session():
    chosen = settings("local[3]")
    assert chosen["spark.sql.shuffle.partitions"] == "3"
    assert chosen["spark.python.unix.domain.socket.enabled"] == "true"
    assert chosen["spark.sql.session.timeZone"] == "UTC"
    assert chosen["spark.sql.parquet.outputTimestampType"] == "TIMESTAMP_MICROS"
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
    monkeypatch.setattr("importlib.metadata.version", lambda name: "17.0.1" if name == "pyarrow" else "99.0")
    with pytest.raises(SetupError, match=r"pyarrow 17\.0\.1 is too old, 18\.0"):
        session("app")


@pytest.mark.parametrize(
    ("have", "word"), [("4.1.4", "old"), ("3.5.7", "old"), ("4.4.0.dev1", "new"), ("5.0.0", "new")]
)
def test_other_versions_of_pyspark_are_refused_in_one_line(have, word, monkeypatch):
    """By session(), and by the source for whoever has a session of his own."""
    import pyspark_nsq

    monkeypatch.setattr("pyspark.version.__version__", have)
    refused = f"pyspark {have} is too {word}, flintmq works with 4.2 and 4.3; pip install 'flintmq[spark]'"
    with pytest.raises(SetupError, match=re.escape(refused)):
        session("app")
    source = pyspark_nsq.DefaultSource
    assert source.name() == "nsq"
    with pytest.raises(SetupError, match=re.escape(refused)):
        source({})


def test_tested_versions_of_pyspark():
    assert [unfit_pyspark(have) for have in ("4.2.0", "4.2.1", "4.3.0", "4.3.1")] == [""] * 4


def test_slow_tasks_are_told_once(caplog, monkeypatch):
    monkeypatch.setattr(session_settings, "_told", set())
    session_settings.warn_of_tasks({"PYTHON_UNIX_DOMAIN_ENABLED": "true"})
    assert not caplog.messages
    session_settings.warn_of_tasks({})
    session_settings.warn_of_tasks({})
    (message,) = caplog.messages
    assert "spark.python.unix.domain.socket.enabled=true" in message and "70 ms instead of 25" in message


def test_a_class_archive_is_used_once_it_is_there(tmp_path):
    """It is that of one Java and of the jars of one Spark, by whichever link they are reached."""
    environment = {"XDG_CACHE_HOME": str(tmp_path / "a cache")}
    java, linked, other = tmp_path / "java", tmp_path / "linked", tmp_path / "other"
    archive = session_settings.class_archive(java, environment)
    assert session_settings.with_archive("-Xx", java, environment) == "-Xx"
    assert session_settings.with_archive("", java, environment) == ""
    archive.parent.mkdir(parents=True)
    archive.write_bytes(b"classes")
    session_settings.length_note(archive).write_text("7")
    linked.mkdir()
    (linked / "jars").symlink_to(Path(pyspark.__file__).parent / "jars")
    taken = [f"-XX:SharedArchiveFile={archive}", "-XX:+VerifySharedSpaces", "-Xlog:cds*=off"]
    for each in (environment, {**environment, "SPARK_HOME": str(linked)}):
        assert shlex.split(session_settings.with_archive("-Xx", java, each)) == ["-Xx", *taken]
        assert shlex.split(session_settings.with_archive("", java, each)) == taken
    assert session_settings.with_archive("-Xx", other, environment) == "-Xx"
    environment["SPARK_HOME"] = str(other)
    assert session_settings.with_archive("-Xx", java, environment) == "-Xx", "no jars: Spark says so when it starts"
    (other / "jars").mkdir(parents=True)
    assert session_settings.with_archive("-Xx", java, environment) == "-Xx"


@pytest.mark.parametrize(("content", "noted"), [(b"classe", "7"), (b"classes", ""), (b"", "7"), (b"classes", None)])
def test_a_class_archive_whose_length_is_another_is_left_alone(tmp_path, content: bytes, noted: str | None):
    """A JVM of Java 17 crashes over one that lost its end."""
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    archive = session_settings.class_archive(tmp_path, environment)
    archive.parent.mkdir(parents=True, exist_ok=True)
    archive.write_bytes(content)
    if noted is not None:
        session_settings.length_note(archive).write_text(noted)
    assert session_settings.with_archive("-Xx", tmp_path, environment) == "-Xx"


def test_spark_connect_wants_its_packages(monkeypatch):
    from importlib.util import find_spec

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "grpc" else find_spec(name))
    with pytest.raises(
        SetupError, match=r"Spark Connect needs the Python package grpcio; pip install 'pyspark\[connect\]"
    ):
        session("app", "sc://127.0.0.1:1")


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


def test_a_server_of_spark_connect_that_is_not_there_is_told(caplog: pytest.LogCaptureFixture):
    """Spark itself tries again for minutes, and says nothing."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        remote = f"sc://127.0.0.1:{place.getsockname()[1]}/;token=x"
        _tell_if_away(remote)
        assert "no Spark Connect server answers at sc://127.0.0.1" in caplog.text and "token" not in caplog.text
        caplog.clear()
        place.listen()
        _tell_if_away(remote)
        _tell_if_away("local")
        assert not caplog.text
