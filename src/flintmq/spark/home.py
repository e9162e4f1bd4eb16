"""A SPARK_HOME in which the Python processes of a driver, master or worker find PySpark compiled.

Spark puts ``SPARK_HOME/python/lib/pyspark.zip`` before all else on the path of its workers. Nothing keeps what is
compiled out of a zip, so each of these processes compiles PySpark anew: some 0.45 s of processor time, and a session
starts half a dozen before its first row. So ours is a directory of links, in which the zips are directories too, with
a link to the installed package; that was compiled when it was installed::

    CACHE/spark-4.3.0-5f3a9c01d2e4b677/jars                       -> PACKAGE/jars, and so on
                                      /python/lib/pyspark.zip/pyspark -> PACKAGE

The rules of this file: whoever names a SPARK_HOME keeps it; what cannot be made is done without; a directory is made
beside its place and renamed, because many processes may start at once.

Source: docs/decisions/0037.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from flintmq.spark.java import cache_directory
from flintmq.spark.session_settings import local_cores, with_archive

NAME = "SPARK_HOME"
OPTIONS = "SPARK_SUBMIT_OPTS"
"""Options of the JVM of a driver; those of the settings come behind them."""
_SAME = ("bin", "conf", "data", "examples", "jars", "licenses", "sbin")
"""Linked as it is; ``conf`` also while it is not there, as somebody may make it later."""


def linked_home(environment: Mapping[str, str]) -> Path | None:
    """Return the directory for this PySpark, made if need be; None where another one is named, or it cannot be made."""
    package, py4j = _package("pyspark"), _package("py4j")
    if environment.get(NAME) or package is None or py4j is None:
        return None
    zips = {"pyspark.zip": package, **{path.name: py4j for path in (package / "python/lib").glob("py4j-*.zip")}}
    if not (package / "jars").is_dir() or len(zips) != 2 or not (package / "python/lib/pyspark.zip").is_file():
        return None  # not as pip installs it
    from pyspark.version import __version__

    digest = hashlib.sha256("\0".join([str(package), str(py4j), *zips]).encode()).hexdigest()[:16]
    home = cache_directory(environment) / f"spark-{__version__}-{digest}"
    try:
        if not home.is_dir():
            _link(home, package, zips)
    except OSError:
        return None
    return home


def driver_home(master: str, environment: Mapping[str, str]) -> Path | None:
    """Return :func:`linked_home` for a driver that starts here; None where Spark sends the zips on, as to YARN."""
    if local_cores(master) is None and not master.startswith("spark://"):
        return None
    return linked_home(environment)


def driver_environment(master: str, java_home: Path, environment: Mapping[str, str], has_flags: bool) -> dict[str, str]:
    """Return what a driver that starts here has besides its environment: that home, and the class archive.

    The archive stands beside other options of the JVM, such as those of spark-defaults.conf, and takes nobody's place.

    Args:
        has_flags: the caller names all flags of the JVM, so the archive is none of them.
    """
    added = {}
    if (home := driver_home(master, environment)) is not None:
        added[NAME] = str(home)
    given = environment.get(OPTIONS, "")
    flags = given if has_flags else with_archive(given, java_home, environment)
    if flags != given:
        added[OPTIONS] = flags
    return added


@contextmanager
def named(variables: Mapping[str, str]) -> Iterator[None]:
    """Have Spark find these in its environment, while it is started."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _package(name: str) -> Path | None:
    found = importlib.util.find_spec(name)
    return None if found is None or found.origin is None else Path(found.origin).parent


def _link(home: Path, package: Path, zips: Mapping[str, Path]) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=home.parent, prefix=".spark-"))
    try:
        for name in _SAME:
            (draft / name).symlink_to(package / name)
        for name, modules in zips.items():
            directory = draft / "python" / "lib" / name
            directory.mkdir(parents=True)
            (directory / modules.name).symlink_to(modules)
        (draft / "python" / "pyspark").symlink_to(package / "python" / "pyspark")
        draft.chmod(0o755)
        draft.rename(home)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        if not home.is_dir():  # else somebody else was quicker
            raise


__all__ = ["driver_environment", "driver_home", "linked_home", "named"]
