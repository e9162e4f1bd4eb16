"""The ends of logs as the database has them, so that the next start can tell what is missing from what never was.

Rules of this file: a mark is no more than was true when it was taken.

Source: docs/decisions/0011.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Protocol

from flintmq.storage import MemoryLog, PartitionLog
from flintmq.storage.channel_store import StoredLog


class Marked(Hashable, Protocol):
    """A partition, or a replica of one, as far as its log is concerned."""

    number: int
    is_deleted: bool

    @property
    def topic_name(self) -> str: ...

    @property
    def log(self) -> PartitionLog | MemoryLog: ...


Marks = list[tuple[Marked, StoredLog]]


class LogMarks:
    """Owner of the marks of all partitions.

    Attributes:
        grown: partitions that are farther than the database has it, perhaps.
    """

    __slots__ = ("_limits", "_marks", "grown")

    def __init__(self) -> None:
        self._marks: dict[Marked, StoredLog] = {}
        self._limits: dict[Marked, int] = {}
        self.grown: dict[Marked, None] = {}

    def restore(self, partition: Marked, mark: StoredLog) -> None:
        """Begin with what the database has of a partition."""
        self._marks[partition] = mark
        self.grown[partition] = None

    def forget(self, partition: Marked) -> None:
        """Drop a partition that is deleted."""
        self._marks.pop(partition, None)
        self._limits.pop(partition, None)
        self.grown.pop(partition, None)

    def mark(self, partition: Marked) -> StoredLog:
        """Return what the database has of a log."""
        return self._marks[partition]

    def replace(self, partition: Marked, other: Marked) -> None:
        """Go on under another name with what the database has of a log."""
        mark = self._marks[partition]
        self.forget(partition)
        self.restore(other, mark)

    def limit(self, partition: Marked, sequence: int | None) -> None:
        """Have it written that a log ends before ``sequence``, although it does not yet; None: as far as it is."""
        if sequence is None:
            self._limits.pop(partition, None)
        else:
            self._limits[partition] = sequence
        self.grown[partition] = None

    def note_synced(self) -> None:
        """Some logs have been synced that nobody waited for: it is written down with the next flush."""
        for partition, mark in self._marks.items():
            if partition.log.synced_sequence != mark.synced:
                self.grown[partition] = None

    def take(self) -> Marks:
        """Hand over what the database does not have; :meth:`ended` says what became of it."""
        taken = []
        for partition in self.grown:
            log = partition.log
            if isinstance(log, PartitionLog) and log.is_created and not partition.is_deleted:
                mark = StoredLog(log.log_id, log.synced_sequence, log.next_sequence)
                if partition in self._limits:
                    end = self._limits[partition]
                    mark = StoredLog(log.log_id, min(end, mark.synced), min(end, mark.written))
                if self._marks.get(partition) != mark:
                    taken.append((partition, mark))
        self.grown.clear()
        return taken

    def ended(self, marks: Iterable[tuple[Marked, StoredLog]], is_written: bool) -> None:
        """Take note that marks are in the database, or are to be taken again."""
        if not is_written:
            self.grown |= dict.fromkeys(partition for partition, _ in marks)
            return
        for partition, mark in marks:
            if not partition.is_deleted:
                self._marks[partition] = mark
