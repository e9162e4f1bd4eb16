"""Directories that Spark's file sink writes streams to, and the micro-batches that it takes there for done.

::

    DIRECTORY/_spark_metadata/7, 9.compact   the files of each micro-batch; Spark reads those that are listed alone
    DIRECTORY/.flintmq-sink.lock             held by the pipeline that writes there
    CHECKPOINT/offsets/8, commits/7          the micro-batches that a query has planned, and those that it has done

Spark leaves out a micro-batch whose number the directory has already, and goes on as if it had written it. That is
right for the one that a killed query has written and not noted as done. Of every other number it loses rows in silence:
when another query has written there, or the checkpoint was removed.

The rules of this file: what is asked goes through Spark's own file systems, so a directory may be a URL; the directory
is looked at before the checkpoint, as a query that runs plans before it writes; when something was planned and written
is read in what Spark noted, as a copy has modification times of its own.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flintmq.errors import UNREADABLE_JSON
from flintmq.pipeline.files import DirectoryError, held

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

METADATA = "_spark_metadata"
LOCK = ".flintmq-sink.lock"
UNDER_WAY = "_temporary"  # of batches; a stream has none
CLOCKS_MS = 60_000  # a mounted disk may have a clock of its own
_NOTE_BYTES_MAX = 1 << 20  # of a file of Spark's logs; one of the files that a micro-batch has is enough
_COMPACT = ".compact"
_OF_THE_KERNEL = ("/proc", "/sys")  # where root may write, as far as access(2) tells, and can make nothing
_LOCAL = "file:"
_LOCAL_URL = re.compile(r"file:(//[^/]*)?(?=/)")


class SinkError(DirectoryError):
    """A directory cannot be written to by a stream, or beside one."""

    kind = "directory"


def directory_of(spark: SparkSession, path: str) -> str:
    """Return the one name of a directory, however it is written: ``file:/data/x``, or a URL."""
    place = _path(spark, path)
    whole = _system(spark, place).makeQualified(place)
    is_local = whole.toUri().getScheme() == "file"
    return f"{_LOCAL}{os.path.realpath(whole.toUri().getPath())}" if is_local else str(whole.toString())


def local_name(path: str) -> str:
    """Return a path as Python has it, where it is written ``file:/data/x``; others as they are. Asks no Spark."""
    return _LOCAL_URL.sub("", path, count=1)


def local_directory(directory: str) -> Path | None:
    """Return a directory that is local or mounted; None for any other.

    Args:
        directory: as :func:`directory_of` returns it.
    """
    return Path(directory.removeprefix(_LOCAL)) if directory.startswith(_LOCAL) else None


def obstacle(directory: Path) -> str:
    """Return why a directory is none, or cannot be written to or made; "": nothing is known. Makes nothing."""
    try:
        there = next(each for each in (directory, *directory.parents) if os.path.lexists(each))
        if there.is_symlink() and not there.exists():
            return f"{there} is a link that leads nowhere"
        if not there.is_dir():
            return f"{there} is a file"
        if there.stat().st_dev in {os.stat(place).st_dev for place in _OF_THE_KERNEL if os.path.ismount(place)}:
            return f"{there} is of the kernel, which has no files made there"
    except OSError as error:
        return f"{directory} cannot be looked at: {error.strerror}"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written to"


def is_there(spark: SparkSession, directory: str) -> bool:
    """Return whether there is anything of that name."""
    place = _path(spark, directory)
    return bool(_system(spark, place).exists(place))


def has_metadata(spark: SparkSession, directory: str) -> bool:
    """Return whether a stream of Spark's file sink has written to a directory."""
    place = _path(spark, directory, METADATA)
    return bool(_system(spark, place).exists(place))


def check_readable(directory: Path) -> None:
    """See that Spark would read files that it has not written itself in a directory.

    Raises:
        SinkError: a stream of its own has written there.
    """
    if (directory / METADATA).exists():
        why = f"Spark's own sink of files has written to it, and Spark reads the files alone that {METADATA} lists"
        raise SinkError(directory, f"{why}: name another one")


def unlisted(spark: SparkSession, directory: str) -> str:
    """Return something in a directory that Spark would not read any more once a stream writes there; else "".

    What Spark takes for hidden is none of it. ``_temporary`` is: a batch that runs will put its files there.
    """
    place = _path(spark, directory)
    files = _system(spark, place)
    if has_metadata(spark, directory) or not files.exists(place) or not files.getFileStatus(place).isDirectory():
        return ""
    found = files.listStatusIterator(place)
    while found.hasNext():
        name = str(found.next().getPath().getName())
        is_hidden = name.startswith(".") or (name.startswith("_") and "=" not in name)
        if not is_hidden or name == UNDER_WAY:
            return name
    return ""


def foreign_batch(spark: SparkSession, directory: str, checkpoint: str) -> int:
    """Return the last micro-batch in a directory, if Spark would leave out one of this checkpoint for it; else -1.

    Args:
        checkpoint: of the query that is to write there.
    """
    written, its_files = _last(spark, directory, METADATA)
    planned, its_plan = _last(spark, checkpoint, "offsets")
    done, _ = _last(spark, checkpoint, "commits")
    if written == planned > done:
        # the number of the one that is repeated may be that of another query's, which is older than our plan of it
        is_foreign = _written_ms(spark, its_files) + CLOCKS_MS < _planned_ms(spark, its_plan)
    else:
        is_foreign = written > planned
    return written if is_foreign else -1


def _last(spark: SparkSession, directory: str, name: str) -> tuple[int, Any]:
    """Return the last number in a log of Spark's, -1 for none, and its file as a Hadoop ``FileStatus``."""
    place = _path(spark, directory, name)
    files = _system(spark, place)
    if not files.exists(place):
        return -1, None
    found = [(each.getPath().getName().removesuffix(_COMPACT), each) for each in files.listStatus(place)]
    numbered = {int(number): each for number, each in found if number.isdecimal()}
    last = max(numbered, default=-1)
    return last, numbered.get(last)


def _planned_ms(spark: SparkSession, file: Any) -> int:
    """Return when a micro-batch was planned, in ms since the epoch."""
    return _noted_ms(spark, file, lambda lines: int(json.loads(lines[1])["batchTimestampMs"]))


def _written_ms(spark: SparkSession, file: Any) -> int:
    """Return when the files of a micro-batch were written, in ms since the epoch."""
    if file.getPath().getName().endswith(_COMPACT):  # it has those of all others, too
        return int(file.getModificationTime())
    return _noted_ms(spark, file, lambda lines: int(json.loads(lines[1])["modificationTime"]))


def _noted_ms(spark: SparkSession, file: Any, find: Callable[[list[str]], int]) -> int:
    """Return a time that a file of Spark's logs tells; that of the file where there is none in it."""
    stream = _system(spark, file.getPath()).open(file.getPath())
    try:
        lines = bytes(stream.readNBytes(_NOTE_BYTES_MAX)).decode().splitlines()
        return find(lines)
    except (*UNREADABLE_JSON, KeyError, IndexError, TypeError):
        return int(file.getModificationTime())
    finally:
        stream.close()


def _path(spark: SparkSession, *names: str) -> Any:
    jvm: Any = spark.sparkContext._jvm
    return jvm.org.apache.hadoop.fs.Path(*names)


def _system(spark: SparkSession, place: Any) -> Any:
    return place.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())


def sink_held(directory: str) -> AbstractContextManager[None]:
    """Keep other pipelines from writing to a directory, as far as it is local or mounted.

    Args:
        directory: as :func:`directory_of` returns it.

    Raises:
        SinkError: one does, or it cannot be written.
    """
    local = local_directory(directory)
    return nullcontext() if local is None else held(local, LOCK, "another pipeline writes to it", SinkError)


def batch_held(directory: str) -> AbstractContextManager[None]:
    """Do the same for a batch, and make nothing: where no directory is, no stream writes, and some batches want none.

    A batch that overwrites removes the lock with all the rest. Until it is done ``_temporary`` keeps streams away,
    see :func:`unlisted`.

    Args:
        directory: as :func:`directory_of` returns it.

    Raises:
        SinkError: another pipeline writes there, or it cannot be written.
    """
    local = local_directory(directory)
    return sink_held(directory) if local is not None and local.is_dir() else nullcontext()


__all__ = [
    "METADATA",
    "UNDER_WAY",
    "SinkError",
    "batch_held",
    "check_readable",
    "directory_of",
    "foreign_batch",
    "has_metadata",
    "is_there",
    "local_directory",
    "local_name",
    "obstacle",
    "sink_held",
    "unlisted",
]
