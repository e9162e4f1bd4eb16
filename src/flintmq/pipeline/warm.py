"""``flintmq pipeline warm``: an archive of Spark's classes, with which whatever starts Spark here does so sooner.

A JVM spends most of a short session on reading and verifying the classes of 460 MB of jars. It can write those it has
loaded into a file (class data sharing), and map that file into memory the next time. ``session``, ``submit`` and
``cluster up`` use the file when it is there; it belongs to one Java and one PySpark, and both are in its name.

The rules of this file: the archive is made in a session that does what sessions with format nsq do; it is written
beside its place and renamed when it is whole and on disk, behind a note of its length, as a JVM crashes over one that
lost its end.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from flintmq.clock import SystemClock
from flintmq.options import SECOND, Duration, Options, Switch, option, read_command, version_line
from flintmq.pipeline.options import SPARK
from flintmq.spark.durable import replace
from flintmq.spark.errors import SetupError
from flintmq.spark.java import find_java_home
from flintmq.spark.session import session
from flintmq.spark.session_settings import QUICK_JVM_FLAGS, class_archive, is_whole, length_note
from flintmq.version import __version__

ARCHIVE_BYTES = 200 << 20  # what one takes, and a little more
_SAID_MAX = 500
_OF_STACK = ("Traceback", "During handling of", "The above exception", "Caused by")

_clock = SystemClock()


@dataclass(frozen=True, kw_only=True)
class WarmOptions(Options):
    """The flags of flintmq pipeline warm."""

    program: ClassVar[str] = "flintmq pipeline warm"
    summary: ClassVar[str] = (
        "flintmq pipeline warm writes an archive of the classes that Spark loads, once for each Java and PySpark; "
        "sessions of flintmq.spark.session, flintmq pipeline submit and flintmq pipeline cluster then start sooner."
    )

    force: bool = option(Switch(), False, "write it anew, although it is there", group=SPARK)
    timeout_ns: int = option(Duration(SECOND), 600 * SECOND, "how long that may take", group=SPARK)
    json: bool = option(Switch(), False, "print the result as a line of JSON", group=SPARK)


@dataclass(frozen=True, slots=True)
class Warmed:
    """An archive of classes.

    Attributes:
        is_new: False: it was there already.
        seconds: that its making took.
    """

    path: Path
    is_new: bool
    size_bytes: int
    seconds: float


def warm(*, force: bool = False, timeout_s: float = 600.0) -> Warmed:
    """Write the class archive of this Java and this PySpark, unless it is there.

    Args:
        timeout_s: how long that may take.

    Raises:
        SetupError: Java or PySpark is missing, the session failed, the disk is full, or the file cannot be written.
    """
    java_home = find_java_home(os.environ)
    path = class_archive(java_home, os.environ)
    if is_whole(path) and not force:
        return Warmed(path, False, path.stat().st_size, 0.0)
    began_ns = _clock.monotonic_ns()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_space(path.parent)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".warm-") as scratch:
            staged = Path(scratch) / "classes.jsa"
            _make(staged, timeout_s)
            noted = Path(scratch) / "length"
            noted.write_text(str(staged.stat().st_size))
            replace(noted, length_note(path))
            replace(staged, path)
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error}", "set XDG_CACHE_HOME to a writable directory") from error
    return Warmed(path, True, path.stat().st_size, (_clock.monotonic_ns() - began_ns) / SECOND)


def _check_space(directory: Path, written_bytes: int = 0) -> None:
    """See that an archive has room in a directory.

    Args:
        written_bytes: of it that are there already.

    Raises:
        SetupError: it has not; in bytes.
    """
    free = shutil.disk_usage(directory).free + written_bytes
    if free < ARCHIVE_BYTES:
        raise SetupError(
            f"an archive takes {ARCHIVE_BYTES} bytes, and {directory} has {free} bytes free",
            "make room, or set XDG_CACHE_HOME to a directory that has it",
        )


def _make(staged: Path, timeout_s: float) -> None:
    """Have a process of its own start Spark and end it in an orderly way: the JVM writes the archive as it ends."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "flintmq.pipeline.warm", str(staged)],
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise SetupError(f"no archive was written within {timeout_s:g} s", "give --timeout") from error
    if done.returncode or not staged.is_file():
        _check_space(staged.parent, staged.stat().st_size if staged.is_file() else 0)
        said = _last_words(done.stderr) or _last_words(done.stdout) or "nothing"
        raise SetupError(f"no archive was written; Spark said: {said}", "see docs/spark.md, 'When it does not work'")


def _last_words(text: str) -> str:
    """Return the last line that is no part of a stack, with those of the JVM about the archive before it; at most
    500 characters.
    """
    lines = [
        line.strip() for line in text.splitlines() if line.strip() and not line[0].isspace()
        and not line.startswith(_OF_STACK)
    ]  # fmt: skip
    told = [line for line in lines[:-1] if "archive" in line.lower()]
    return "; ".join([*told, *lines[-1:]])[-_SAID_MAX:]


def load_classes(archive: Path, directory: Path) -> None:
    """Do in a session what sessions do, and have its JVM archive the classes that it took."""
    flags = f"{QUICK_JVM_FLAGS} -XX:ArchiveClassesAtExit={archive}"
    spark = session("warm", "local[1]", **{"spark.driver.extraJavaOptions": flags, "spark.log.level": "ERROR"})
    gateway: Any = spark.sparkContext._gateway
    spark.dataSource.register(_source())
    rows = spark.read.format("few").load()
    rows.selectExpr("n", "cast(body as string)").show(1)
    rows.groupBy("n").count().collect()
    rows.write.parquet(str(directory / "batch"))
    spark.read.parquet(str(directory / "batch")).createOrReplaceTempView("rows")
    spark.sql("SELECT count(*) FROM rows WHERE n > 1").collect()
    stream = spark.readStream.format("few").load().writeStream.format("parquet")
    stream = stream.option("checkpointLocation", str(directory / "checkpoint")).trigger(availableNow=True)
    stream.start(str(directory / "stream")).awaitTermination()
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()  # the JVM ends with that
    if code := gateway.proc.wait():
        sys.exit(f"the JVM ended with {code}, the archive may not be whole")


def _source() -> type[Any]:
    """Return a source in Python with a batch and a stream, as format nsq is one, that needs no nsqd."""
    import pyarrow as pa
    from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition

    schema = pa.schema([("n", pa.int64()), ("body", pa.binary())])

    def few() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch([[1, 2], [b"1", b"2"]], schema=schema)

    class Reader(DataSourceReader):  # type: ignore[misc, unused-ignore]
        def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
            return few()

    class StreamReader(DataSourceStreamReader):  # type: ignore[misc, unused-ignore]
        def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
            return {"n": 0}

        def latestOffset(self, *_: Any) -> dict[str, int]:  # noqa: N802 - Spark's name
            return {"n": 2}

        def partitions(self, start: Any, end: Any) -> list[InputPartition]:
            return [InputPartition(0)]

        def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
            return few()

    class Few(DataSource):  # type: ignore[misc, unused-ignore]
        @classmethod
        def name(cls) -> str:
            return "few"

        def schema(self) -> str:
            return "n bigint, body binary"

        def reader(self, schema: Any) -> DataSourceReader:
            return Reader()

        def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
            return StreamReader()

    return Few


def run(arguments: Sequence[str]) -> int:
    """Run ``flintmq pipeline warm``."""
    options = read_command(WarmOptions, arguments, WarmOptions.program, version_line("flintmq", __version__))
    if options is None:
        return 0
    made = warm(force=options.force, timeout_s=options.timeout_ns / SECOND)
    if options.json:
        print(json.dumps({"path": str(made.path), "is_new": made.is_new, "bytes": made.size_bytes}))
        return 0
    how = f"written in {made.seconds:.0f} s" if made.is_new else "is there already; --force writes it anew"
    print(f"{made.path} ({made.size_bytes >> 20} MiB) {how}")
    return 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="warm-") as place:
        load_classes(Path(sys.argv[1]), Path(place))

__all__ = ["WarmOptions", "Warmed", "load_classes", "run", "warm"]
