"""A Spark session with the settings under which ``format("nsq")`` is quick, and with clear words when it cannot start.

The rules of this file: a setting the caller gives wins over ours; nothing is set that changes results, but the time
zone of the session, which is UTC.

Source: docs/decisions/0006.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from typing import TYPE_CHECKING

from flintmq.errors import OptionError
from flintmq.spark.errors import SetupError
from flintmq.spark.java import find_java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUICK = "quick"
THROUGHPUT = "throughput"
# starts several seconds sooner; what it compiles runs at about half the speed, which counts in jobs of minutes
QUICK_JVM_FLAGS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_FS_CHECKPOINTS = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"


def session(app: str, master: str = "local[*]", jvm: str = QUICK, **conf: str) -> SparkSession:
    """Start (or get) a Spark session in which ``format("nsq")`` is registered.

    Args:
        master: ``local[*]``, ``local[4,3]`` (4 cores, 3 attempts per task), ``spark://host:7077``, ...
        jvm: ``quick`` starts soon, ``throughput`` compiles thoroughly, for jobs of more than a minute.
        conf: Spark settings, as ``session("app", **{"spark.driver.memory": "4g"})``; they win over the ones set here.

    Raises:
        SetupError: pyspark, pyarrow or Java is missing or too old.
        OptionError: a setting's name does not begin with ``spark.``, or ``jvm`` is another word.
    """
    if jvm not in (QUICK, THROUGHPUT):
        raise OptionError("jvm", jvm, f"say {QUICK} or {THROUGHPUT}", "flintmq.spark.session")
    for name in conf:
        if not name.startswith("spark."):
            raise OptionError(name, conf[name], "names of Spark settings begin with spark.", "flintmq.spark.session")
    _require("pyspark", (4, 2))
    _require("pyarrow", (18, 0))
    _require("numpy", (1, 26))
    _prepare_environment(master)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app).master(master)
    for name, value in {**settings(master, jvm), **conf}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    _register(spark)
    return spark


def _prepare_environment(master: str) -> None:
    """Make the settings that Spark reads from the environment only; what the caller has set stays."""
    os.environ["JAVA_HOME"] = str(find_java_home(os.environ))
    if _local_cores(master) is not None:
        # else the workers run whichever python3 is first on the PATH, which may have none of our packages
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        # a host name that does not resolve keeps Spark from starting, and nobody else needs to reach this one
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


def _register(spark: SparkSession) -> None:
    """Register the data source, unless Spark found it by itself: doing both makes it warn."""
    from py4j.protocol import Py4JError

    from flintmq.spark.source import NsqDataSource

    try:
        is_known = spark._jsparkSession.sessionState().dataSourceManager().dataSourceExists(NsqDataSource.name())
    except Py4JError:  # not a public interface
        is_known = False
    if not is_known:
        spark.dataSource.register(NsqDataSource)


def settings(master: str, jvm: str = QUICK) -> dict[str, str]:
    """Return the Spark settings of :func:`session`."""
    chosen = {
        # a Python task costs 25 ms instead of 70
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.showConsoleProgress": "false",
    }
    cores = _local_cores(master)
    if cores is not None:
        chosen["spark.sql.shuffle.partitions"] = str(cores)
        # local disks rename atomically; the default forks a shell for every file where native Hadoop is absent
        chosen["spark.sql.streaming.checkpointFileManagerClass"] = _FS_CHECKPOINTS
    if jvm == QUICK:
        chosen["spark.driver.extraJavaOptions"] = QUICK_JVM_FLAGS
    return chosen


def _local_cores(master: str) -> int | None:
    """Return the cores of a local master, None for a cluster."""
    match = re.fullmatch(r"local(?:\[(\*|\d+)(?:,\d+)?\])?", master)
    if match is None:
        return None
    if match[1] == "*":
        return os.cpu_count() or 1
    return int(match[1] or 1)


def _require(package: str, least: tuple[int, int]) -> None:
    remedy = "pip install 'flintmq[spark]'"
    if importlib.util.find_spec(package) is None:
        raise SetupError(f"the Python package {package} is missing", remedy)
    from importlib.metadata import version

    have = version(package)
    if tuple(int(part) for part in re.findall(r"\d+", have)[:2]) < least:
        raise SetupError(f"{package} {have} is too old, {least[0]}.{least[1]} or later is needed", remedy)
