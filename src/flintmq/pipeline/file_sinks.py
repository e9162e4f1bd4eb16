"""Directories that Spark's file sink writes streams to, and the micro-batches that it takes there for done.

::

    DIRECTORY/_spark_metadata/7, 9.compact   the files of each micro-batch; Spark reads those that are listed alone
    DIRECTORY/.flintmq-sink.lock             held by the pipeline that writes there
    CHECKPOINT/offsets/8, commits/7          the micro-batches that a query has planned, and those that it has done

Spark leaves out a micro-batch whose number the directory has already, and goes on as if it had written it. That is
right for the one that a killed query has written and not noted as done. Of every other number it loses rows in silence:
when another query has written there, or the checkpoint was removed.

The rules of this file: what is asked goes through Spark's own file systems, so a directory may be a URL; the directory
is looked at before the checkpoint, as a query that runs plans before it writes.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flintmq.pipeline.files import DirectoryError, held

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

METADATA = "_spark_metadata"
LOCK = ".flintmq-sink.lock"
CLOCKS_MS = 60_000  # a mounted disk may have a clock of its own
_COMPACT = ".compact"
_LOCAL = "file:"


class SinkError(DirectoryError):
    """A directory cannot be written to by a stream, or beside one."""

    kind = "directory"


def directory_of(spark: SparkSession, path: str) -> str:
    """Return the one name of a directory, however it is written: ``file:/data/x``, or a URL."""
    place = _path(spark, path)
    whole = _system(spark, place).makeQualified(place)
    is_local = whole.toUri().getScheme() == "file"
    return f"{_LOCAL}{os.path.realpath(whole.toUri().getPath())}" if is_local else str(whole.toString())


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


def foreign_batch(spark: SparkSession, directory: str, checkpoint: str) -> int:
    """Return the last micro-batch in a directory, if Spark would leave out one of this checkpoint for it; else -1.

    Args:
        checkpoint: of the query that is to write there.
    """
    written, written_ms = _last(spark, directory, METADATA)
    planned, planned_ms = _last(spark, checkpoint, "offsets")
    done, _ = _last(spark, checkpoint, "commits")
    # the number of the one that is repeated may be that of another query's, which is older than our plan of it
    is_older = written == planned > done and written_ms + CLOCKS_MS < planned_ms
    return written if written > planned or is_older else -1


def _last(spark: SparkSession, directory: str, name: str) -> tuple[int, int]:
    """Return the last number in a log of Spark's, -1 for none, and when it was written in ms since the epoch."""
    place = _path(spark, directory, name)
    files = _system(spark, place)
    if not files.exists(place):
        return -1, 0
    found = [(each.getPath().getName().removesuffix(_COMPACT), each) for each in files.listStatus(place)]
    numbered = {int(number): each for number, each in found if number.isdecimal()}
    last = max(numbered, default=-1)
    return last, int(numbered[last].getModificationTime()) if numbered else 0


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
    if not directory.startswith(_LOCAL):
        return nullcontext()
    return held(Path(directory.removeprefix(_LOCAL)), LOCK, "another pipeline writes to it", SinkError)


__all__ = ["METADATA", "SinkError", "check_readable", "directory_of", "foreign_batch", "has_metadata", "sink_held"]
