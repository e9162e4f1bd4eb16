"""The settings of ``flintmq.spark.session``, what a session without them pays, and the versions of PySpark that do.

The rules of this file: nothing of ours that needs pyspark is imported, as ``pyspark_nsq`` asks here first.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flintmq.spark.errors import SetupError
from flintmq.spark.java import cache_directory

QUICK = "quick"
THROUGHPUT = "throughput"
SPARK_VERSIONS = ((4, 2), (4, 3))
"""The versions of PySpark that the tests have seen; its data source API is no promise, so others are refused."""
# starts several seconds sooner; what it compiles runs at about half the speed, which counts in jobs of minutes
QUICK_JVM_FLAGS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_FS_CHECKPOINTS = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
JVM_FLAGS = "spark.driver.extraJavaOptions"
SOCKETS = "spark.python.unix.domain.socket.enabled"
PARQUET_TIMES = "spark.sql.parquet.outputTimestampType"
COSTS = {
    SOCKETS: "a Python task costs 70 ms instead of 25",
    "spark.sql.streaming.checkpointFileManagerClass": "each micro-batch forks processes for its checkpoint, some 60 ms",
    "spark.sql.session.timeZone": "times are shown and parsed in another zone",
    PARQUET_TIMES: "times in Parquet files are without their zone, and move where others read them",
}
"""Settings of :func:`session`, and what a session without them pays."""
STREAM_ENVIRONMENT = {
    "SPARK_AUTH_SOCKET_TIMEOUT": "15",
    "SPARK_BUFFER_SIZE": "65536",
    "SPARK_LOCAL_DIRS": "/tmp",
    "SPARK_PYTHON_RUNTIME": "PYTHON_WORKER",
}
"""Names that Spark adds to the environment of a source when a stream starts, with values that hold until then."""
EXTRA = "pip install 'flintmq[spark]'"

log = logging.getLogger("flintmq.spark")
_told: set[str] = set()


def settings(master: str, jvm: str = QUICK) -> dict[str, str]:
    """Return the Spark settings of :func:`session`."""
    chosen = {
        SOCKETS: "true",
        "spark.sql.session.timeZone": "UTC",
        PARQUET_TIMES: "TIMESTAMP_MICROS",  # the default is INT96, which has no zone
        "spark.ui.showConsoleProgress": "false",
    }
    cores = local_cores(master)
    if cores is not None:
        chosen["spark.sql.shuffle.partitions"] = str(cores)
        # local disks rename atomically; the default forks a shell for every file where native Hadoop is absent
        chosen["spark.sql.streaming.checkpointFileManagerClass"] = _FS_CHECKPOINTS
    if jvm == QUICK:
        chosen[JVM_FLAGS] = QUICK_JVM_FLAGS
    return chosen


def local_cores(master: str) -> int | None:
    """Return the cores of a local master, None for a cluster."""
    match = re.fullmatch(r"local(?:\[(\*|\d+)(?:,\d+)?\])?", master)
    if match is None:
        return None
    if match[1] == "*":
        return os.cpu_count() or 1
    return int(match[1] or 1)


def with_archive(flags: str, java_home: Path, environment: Mapping[str, str]) -> str:
    """Return JVM flags with the class archive of ``flintmq pipeline warm``, if this Java and this Spark have one.

    Args:
        flags: of any JVM that runs classes of Spark; they may be empty.
        environment: that Spark is started with; its SPARK_HOME counts.
    """
    archive = class_archive(java_home, environment)
    if not is_whole(archive):
        return flags
    # One that does not fit is passed over by the JVM, and what it says of that helps nobody. So is one that is damaged,
    # if the JVM is to verify it, for a fiftieth of what it saves; else it crashes.
    return f"{flags} {shlex.quote(f'-XX:SharedArchiveFile={archive}')} -XX:+VerifySharedSpaces -Xlog:cds*=off".lstrip()


def is_whole(archive: Path) -> bool:
    """Return whether a class archive is there in the length that ``warm`` noted: a JVM crashes over a shorter one."""
    try:
        return archive.stat().st_size == int(length_note(archive).read_text())
    except (OSError, ValueError):
        return False


def length_note(archive: Path) -> Path:
    """Return the file beside a class archive that says how many bytes it has, as a decimal number."""
    return archive.with_suffix(".length")


def class_archive(java_home: Path, environment: Mapping[str, str]) -> Path:
    """Return where the class archive of this Java and this Spark is, or would be.

    It belongs to the jars, by whichever link they are reached: a JVM takes it as long as they are the same files.
    """
    import pyspark

    release = java_home / "release"
    spark_home = Path(environment.get("SPARK_HOME") or Path(pyspark.__file__).parent)
    jars = (spark_home / "jars").resolve()
    made_of = [str(java_home), release.read_text() if release.is_file() else "", pyspark.__version__, str(jars)]
    changed_ns = jars.stat().st_mtime_ns if jars.is_dir() else 0  # Spark itself says what is wrong with a SPARK_HOME
    digest = hashlib.sha256("\0".join([*made_of, str(changed_ns)]).encode()).hexdigest()[:16]
    return cache_directory(environment) / f"spark-{pyspark.__version__}-{digest}.jsa"


def warn_of_tasks(environment: Mapping[str, str]) -> None:
    """Log, once in a process of Spark's Python, that its tasks are slow for want of a setting.

    Args:
        environment: of the process; Spark says there how it talks to it.
    """
    if SOCKETS not in _told and environment.get("PYTHON_UNIX_DOMAIN_ENABLED", "").lower() != "true":
        _told.add(SOCKETS)
        log.warning("this session is without %s=true: %s; flintmq.spark.session sets it", SOCKETS, COSTS[SOCKETS])


def unfit_pyspark(have: str) -> str:
    """Return why this version of PySpark is refused, in one line; empty for one that does."""
    tested = " and ".join(f"{major}.{minor}" for major, minor in SPARK_VERSIONS)
    numbers = tuple(int(part) for part in re.findall(r"\d+", have)[:2])
    if numbers in SPARK_VERSIONS:
        return ""
    word = "too old" if numbers < SPARK_VERSIONS[0] else "too new" if numbers > SPARK_VERSIONS[-1] else "not known"
    return f"pyspark {have} is {word}, flintmq works with {tested}"


def refused_source(why: str) -> Any:
    """Return a data source ``nsq`` that says why it does not work, in one line, to whoever uses it."""
    from pyspark.sql.datasource import DataSource

    class Refused(DataSource):  # type: ignore[misc, unused-ignore]
        def __init__(self, options: Mapping[str, str]) -> None:
            raise SetupError(why, EXTRA)

        @classmethod
        def name(cls) -> str:
            return "nsq"

    return Refused
