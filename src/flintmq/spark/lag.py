"""The lag of a query: what is stored and it has not read, in messages and in seconds, by partition log.

Seconds are the age of the oldest message that it has not read: how long that has been waiting. They are asked of nsqd
with one FETCH for each log that has something unread, of one batch.

The rules of this file: it imports neither pyspark nor pyarrow; what an nsqd does not tell is None, not 0; a checkpoint
is only read, and only what Spark has committed of it counts.

Source: docs/decisions/0006.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flintmq.batch import BatchError, decode_header
from flintmq.errors import UNREADABLE_JSON, FlintError
from flintmq.spark.broker import POOL, BatchBuffer, PartitionLog
from flintmq.spark.errors import BadCheckpoint
from flintmq.spark.offsets import LOG_KEY, MODE_KEY, VERSION, Offsets, PartitionKey, from_json
from flintmq.spark.options import OFFSET, SourceOptions
from flintmq.spark.survey import Survey

ASKED_MAX = 64  # logs whose oldest unread message is asked for at a time
CHECKPOINT_FILE_MAX = 16 << 20
_FORM = "v1"
_RESTORE = "Restore it from a copy, or begin with another checkpointLocation and the offsets to start from"
_UNFINISHED = re.compile(r"\.+\d+\.[0-9a-f-]+\.tmp(\.crc)?")  # as Spark names what it writes and then renames

log = logging.getLogger("flintmq.spark")


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """The lag in one partition log.

    Attributes:
        nsqd: who serves it; empty when nobody does now.
        read: the next message to read.
        end: the next message to be stored; None when nobody tells.
        messages: between the two.
        seconds: since the oldest of them was stored; 0 when there is none, None when nobody tells.
    """

    key: PartitionKey
    nsqd: str
    read: int
    end: int | None
    messages: int | None
    seconds: float | None

    @property
    def figures(self) -> dict[str, Any]:
        """The two numbers, as they stand in a progress."""
        return {"messages": self.messages, "seconds": self.seconds}


def measure(read: Offsets, survey: Survey, options: SourceOptions, wall_ns: int) -> list[PartitionLag]:
    """Compare positions with what there is; a log that has no position yet is unread from its beginning.

    Args:
        wall_ns: now.
    """
    lags: list[PartitionLag] = []
    asked = 0
    for key in sorted(read.keys() | survey.logs.keys()):
        entry = survey.logs.get(key)
        if entry is None:
            lags.append(PartitionLag(key, "", read[key], None, None, None))
            continue
        position = read.get(key, entry.start)
        messages = max(0, entry.end - max(position, entry.start))
        seconds: float | None = 0.0
        if messages:
            asked += 1
            stored_ns = _stored_ns(key, entry, max(position, entry.start), options) if asked <= ASKED_MAX else None
            seconds = None if stored_ns is None else round(max(0, wall_ns - stored_ns) / 1e9, 3)
        lags.append(PartitionLag(key, entry.nsqd, position, entry.end, messages, seconds))
    return lags


def _stored_ns(key: PartitionKey, entry: PartitionLog, position: int, options: SourceOptions) -> int | None:
    """Ask when a message was stored."""
    buffer = BatchBuffer(options.fetch_max_bytes)
    try:
        with POOL.lend(entry.nsqd, options.connect_timeout, options.fetch_timeout, options.link) as connection:
            connection.send_fetch(key.topic, key.partition, position, position + 1, 1, entry.epoch)
            _, size = connection.receive_fetch_head(1)
            connection.receive_batches(size, buffer)
        return decode_header(buffer.batches).timestamp_min if size else None
    except (FlintError, BatchError) as error:
        log.warning("when %s %d of topic %s was stored is not to be had: %s", key.label, position, key.topic, error)
        return None


def to_json(lags: Iterable[PartitionLag]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return figures by topic and label, as a progress has them."""
    result: dict[str, dict[str, dict[str, Any]]] = {}
    for each in lags:
        result.setdefault(each.key.topic, {})[each.key.label] = each.figures
    return result


def committed_offsets(checkpoint: Path) -> dict[str, Offsets]:
    """Return how far the last committed micro-batch of a query has read, over all its sources of format nsq.

    Returns:
        By ``mode``: the logs of ``offset`` are nsqd's, those of ``spool`` and ``direct`` a spool's. Not empty.

    Args:
        checkpoint: its ``checkpointLocation``, in a local directory.

    Raises:
        NoCheckpoint: it is none, or no micro-batch of it is committed.
        BadCheckpoint: it is of another format.
    """
    numbers = [int(path.name) for path in _listed(checkpoint / "commits") if path.name.isdecimal()]
    if not numbers:
        raise NoCheckpoint(checkpoint, "no micro-batch is committed there")
    path = checkpoint / "offsets" / str(max(numbers))
    form, values = read_noted(checkpoint, path)
    if form != _FORM:
        raise BadCheckpoint(f"{path} begins with {form}", VERSION)
    found: dict[str, Offsets] = {}
    for value in values[1:]:
        if isinstance(value, Mapping) and LOG_KEY in value:  # else it is of another source
            found.setdefault(str(value.get(MODE_KEY, OFFSET)), {}).update(from_json(value))
    if not any(found.values()):
        raise NoCheckpoint(checkpoint, "its query reads nothing of format nsq")
    return found


def unfinished(place: Path) -> list[Path]:
    """Return the files of a first micro-batch that was not planned to its end, where there is no other."""
    offsets = place / "offsets"
    found = list(offsets.iterdir()) if offsets.is_dir() else []
    return found if all(_UNFINISHED.fullmatch(path.name) for path in found) else []


def check_noted(checkpoint: Path) -> None:
    """Look whether Spark can read what it has noted last in a checkpoint: the micro-batch it planned, and committed.

    Raises:
        NoCheckpoint: it cannot.
    """
    for name in ("offsets", "commits"):
        if (directory := checkpoint / name).is_dir():
            numbers = [int(path.name) for path in _listed(directory) if path.name.isdecimal()]
            if numbers:
                read_noted(checkpoint, directory / str(max(numbers)))


def read_noted(checkpoint: Path, path: Path) -> tuple[str, list[object]]:
    """Read a file of ``offsets`` or ``commits``: a line with its form, then lines of JSON; None for other lines.

    Raises:
        NoCheckpoint: it cannot be read, or something of it is missing.
    """
    try:
        with path.open(encoding="utf-8") as file:
            form, *lines = file.read(CHECKPOINT_FILE_MAX).splitlines() or [""]
        values = [json.loads(line) if line.startswith("{") else None for line in lines]
    except (OSError, UnicodeDecodeError, *UNREADABLE_JSON) as error:
        raise NoCheckpoint(checkpoint, f"{path} cannot be read: {error}. {_RESTORE}") from error
    if not form or (form == _FORM and len(lines) < (1 if path.parent.name == "commits" else 2)):
        raise NoCheckpoint(checkpoint, f"{path} is {'cut off' if form else 'empty'}. {_RESTORE}")
    return form, values


def _listed(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError as error:
        raise NoCheckpoint(directory.parent, f"{directory} cannot be listed: {error.strerror}") from error


class NoCheckpoint(FlintError):
    """A directory is no checkpoint that says how far a query is.

    Args:
        directory: it.
        reason: what it lacks.
    """

    def __init__(self, directory: Path, reason: str) -> None:
        super().__init__(directory, reason)
        self.directory = directory
        self.reason = reason

    def __str__(self) -> str:
        return f"checkpoint {self.directory}: {self.reason}"
