"""A SPARK_HOME of links: what it has, and when it is done without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from flintmq.spark.home import driver_environment, driver_home, linked_home, named
from flintmq.spark.session_settings import class_archive, length_note, with_archive

PACKAGE = Path(pyspark.__file__).parent


@pytest.mark.slow
def test_a_worker_finds_the_installed_modules_there(tmp_path: Path):
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    home = linked_home(environment)
    assert home is not None and linked_home(environment) == home
    assert [path.name for path in (tmp_path / "flintmq").iterdir()] == [home.name], "nothing is left beside it"
    for name in ("bin/spark-submit", "jars", "python/pyspark/shell.py"):
        assert (home / name).resolve() == (PACKAGE / name).resolve()
    on_path = [str(home / "python" / "lib" / path.name) for path in sorted((PACKAGE / "python" / "lib").iterdir())]
    code = "import os, py4j, pyspark.daemon; print(pyspark.__file__, py4j.__file__, os.path.isfile(pyspark.__file__))"
    found = subprocess.run(
        [sys.executable, "-S", "-c", code],  # without the packages of this Python, which would do as well
        env={**os.environ, "PYTHONPATH": os.pathsep.join(on_path)}, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert found[0] == str(home / "python/lib/pyspark.zip/pyspark/__init__.py")
    assert found[1].startswith(str(home / "python/lib/py4j-")) and found[2] == "True"


def test_drivers_have_it_where_spark_sends_no_zips(tmp_path: Path):
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    home = linked_home(environment)
    assert home is not None
    for master in ("local", "local[2,4]", "local[*]", "spark://h:7077", "spark://h:7077,i:7077"):
        assert driver_home(master, environment) == home
    for master in ("yarn", "k8s://https://h:6443"):
        assert driver_home(master, environment) is None


def test_a_driver_has_the_class_archive_beside_other_options(tmp_path: Path):
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    home = {"SPARK_HOME": str(linked_home(environment))}
    assert driver_environment("local", tmp_path, environment, has_flags=False) == home
    archive = class_archive(tmp_path, environment)
    archive.touch()
    length_note(archive).write_text("0")
    flags = with_archive("", tmp_path, environment)
    assert str(archive) in flags
    assert driver_environment("local", tmp_path, environment, has_flags=True) == home
    assert driver_environment("local", tmp_path, environment, has_flags=False) == home | {"SPARK_SUBMIT_OPTS": flags}
    assert driver_environment("yarn", tmp_path, environment, has_flags=False) == {"SPARK_SUBMIT_OPTS": flags}
    environment["SPARK_SUBMIT_OPTS"] = "-Xms64m"
    found = driver_environment("yarn", tmp_path, environment, has_flags=False)
    assert found == {"SPARK_SUBMIT_OPTS": f"-Xms64m {flags}"}


def test_another_home_is_kept(tmp_path: Path):
    assert linked_home({"XDG_CACHE_HOME": str(tmp_path), "SPARK_HOME": "/opt/spark"}) is None
    assert not list(tmp_path.iterdir())


def test_it_is_done_without_where_nothing_can_be_written(tmp_path: Path):
    (tmp_path / "flintmq").write_text("a file")
    assert linked_home({"XDG_CACHE_HOME": str(tmp_path)}) is None


def test_it_is_named_only_while_spark_is_started(monkeypatch, tmp_path: Path):
    monkeypatch.delenv("SPARK_HOME", raising=False)
    with named({"SPARK_HOME": str(tmp_path)}):
        assert os.environ["SPARK_HOME"] == str(tmp_path)
    assert "SPARK_HOME" not in os.environ
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    with named({}):
        assert os.environ["SPARK_HOME"] == "/opt/spark"
    with named({"SPARK_HOME": "/opt/other"}):
        assert os.environ["SPARK_HOME"] == "/opt/other"
    assert os.environ["SPARK_HOME"] == "/opt/spark"
