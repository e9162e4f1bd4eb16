"""The names under which a sink's tasks publish, so that a task that is run again is stored once.

::

    sink:573b3fdc625747d9ac4103d6:7k:3.2.0.9f2c51d08a77
         |                        |  | | | digest of a segment's messages
         |                        |  | | segment of the task
         |                        |  | partitions of the topic as the first try found them
         |                        |  task (Spark's partition)
         |                        epoch (Spark's micro-batch)
         query, or writeId

A segment is what a task has gathered before it publishes, some megabytes. Its digest is in its name, because nsqd
compares sequences and not messages: rows that come in another order when the task is run again (after a shuffle) have
another name and are stored a second time, and none of them is ever taken for another one.

The rules of this file: no IO; numbers are to base 36, so that a name fits into nsqd's 64 characters.

Source: docs/idempotent.md, docs/decisions/0027.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

QUERY_ID_PROPERTY = "sql.streaming.queryId"
EPOCH_PROPERTY = "streaming.sql.batchId"
NAME_SIZE_MAX = 24
_DIGEST_BYTES = 6
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class TaskIdentity:
    """One task of one epoch of one sink, the same in every attempt.

    Args:
        name: of the query or the write.
        epoch: number of the micro-batch; 0 of a batch write.
        task: Spark's number of the partition.
        offset: of the partition whose turn it is; from the name of a batch write, so that writes of a single task do
            not all go to the same one.
    """

    name: str
    epoch: int
    task: int
    offset: int = 0

    @property
    def turn(self) -> int:
        """The number that takes rows without a place of their own to all partitions in turn."""
        return self.task + self.epoch + self.offset

    @property
    def prefix(self) -> str:
        """The beginning of the names of all its producers."""
        return f"sink:{self.name}:{base36(self.epoch)}:{base36(self.task)}."

    def producer_id(self, partition_count: int, segment: int, messages: Iterable[bytes | memoryview]) -> str:
        """Name the producer of one segment.

        Args:
            messages: all of it, in its order.
        """
        digest = hashlib.sha256()
        for part in messages:
            digest.update(part)
        shown = digest.hexdigest()[: 2 * _DIGEST_BYTES]
        return f"{self.prefix}{base36(partition_count)}.{base36(segment)}.{shown}"

    def partition_count_in(self, producer_id: str) -> int | None:
        """Return the number of partitions that the first try found, out of the name of one of its producers."""
        parts = producer_id.removeprefix(self.prefix).split(".")
        try:
            return int(parts[0], 36) if len(parts) == 3 else None
        except ValueError:
            return None


def query_name(query_id: str) -> str:
    """Return the name of a query: the first digits of its id, by which people find it."""
    return query_id.replace("-", "")[:NAME_SIZE_MAX]


def base36(number: int) -> str:
    """Write a number that is not negative to base 36."""
    digits = ""
    while True:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
        if not number:
            return digits
