"""Messages that are missing: which of them come again from the log, and what is told of the rest.

Rules of this file: what is not certain comes again; nothing that is gone is left untold.

Source: docs/decisions/0011.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from flintmq.broker.channel import Channel
from flintmq.broker.logs import log_directory
from flintmq.broker.partition import Partition
from flintmq.broker.seek import move
from flintmq.errors import StorageError
from flintmq.storage import Damage, packs
from flintmq.storage.channel_store import StoredCursor


class Losses:
    """Tells of messages that are missing.

    Args:
        on_damage: told what is.
        report: told what could not be read now.
    """

    __slots__ = ("_on_damage", "_report")

    def __init__(self, on_damage: Callable[[Damage], None], report: Callable[[StorageError], None]) -> None:
        self._on_damage = on_damage
        self._report = report

    def look(
        self, partition: Partition, channel: Channel, stored: StoredCursor, told: Iterable[tuple[int, int]] | None
    ) -> None:
        """Let a channel begin again of which something is missing, and tell what cannot come again.

        Args:
            told: what the log has told of, from first to end (exclusive); None when progress may be behind.
        """
        start = partition.log.start_sequence
        if stored.is_lost:
            if stored.spilled_count:
                channel.spilled.clear_from(start)  # it comes from the log
            return
        if stored.spilled_missing:
            move(channel, start, finish_older=False)
            self._tell(
                partition,
                channel,
                f"{stored.spilled_missing} messages that were set aside are missing; it begins again with sequence "
                f"{start}, so that those come again which are stored",
                is_more_possible=True,
            )
        gone = start - stored.row.floor
        if gone > 0 and told is not None:
            unfinished = gone - stored.window[:gone].count(1)
            unfinished -= _overlap([*stored.row.holes, *told], stored.row.floor, start)
            if unfinished > 0:
                self._tell_gone(partition, stored.row.floor, unfinished, channel)

    def look_without_channels(self, partition: Partition, backlog_start: int, told: Iterable[tuple[int, int]]) -> None:
        """Tell what is missing of the backlog of a partition that has no channel.

        Args:
            backlog_start: where it began.
            told: as for :meth:`look`.
        """
        start = partition.log.start_sequence
        gone = start - backlog_start - _overlap(told, backlog_start, start)
        if gone > 0:
            self._tell_gone(partition, backlog_start, gone)

    def pack_damaged(self, channel: Channel, partition: Partition, stored: packs.StoredPack) -> None:
        """Spilled messages cannot be read any more: what of them the log still has is taken from there."""
        found = stored.found
        assert found is not None, "it is damaged"
        count = channel.spilled.forget_damaged(stored)
        if not stored.pieces:
            start = max(found.first, partition.log.start_sequence)
            if start <= found.last:
                move(channel, start, finish_older=False)
            lost = min(count, max(0, partition.log.start_sequence - found.first))
            what = f"{count} messages that were set aside cannot be read; it begins again with sequence {start}"
            self._tell(partition, channel, what, found.first, found.last + 1, lost)
        else:
            gone = [each for piece in stored.pieces for each in self._read_again(channel, piece)]
            what = (
                f"{count} messages that were set aside cannot be read; {count - len(gone)} are taken from the log again"
            )
            first, end = (gone[0], gone[-1] + 1) if gone else (0, 0)
            self._tell(partition, channel, what, first, end, len(gone))

    def _read_again(self, channel: Channel, piece: packs.Piece) -> Iterator[int]:
        """Spill messages again as the log has them; those that it does not have."""
        for sequence in range(piece.first, piece.end):
            try:
                batch = channel.log.read(sequence)
            except StorageError as error:
                self._report(error)
                batch = None
            if batch is None or batch.first > sequence:
                yield sequence
            else:
                channel.spilled.put(sequence, piece.due_ns, piece.attempts, bytes(batch.frames(sequence, sequence + 1)))

    def _tell_gone(self, partition: Partition, first: int, lost: int, channel: Channel | None = None) -> None:
        what = "the oldest messages that it has not finished are stored nowhere"
        self._tell(partition, channel, what, first, partition.log.start_sequence, lost)

    def _tell(
        self,
        partition: Partition,
        channel: Channel | None,
        what: str,
        first: int = 0,
        end: int = 0,
        lost: int = 0,
        is_more_possible: bool = False,
    ) -> None:
        name = "" if channel is None else channel.name
        path = log_directory(partition.topic_name, partition.number)
        self._on_damage(
            Damage(path, what, partition.topic_name, partition.number, name, first, end, lost, is_more_possible)
        )


def _overlap(ranges: Iterable[tuple[int, int]], first: int, end: int) -> int:
    """Count the numbers from ``first`` to ``end`` (exclusive) that lie in one of the ranges at least."""
    count = 0
    for start, stop in sorted(ranges):
        count += max(0, min(stop, end) - max(start, first))
        first = max(first, min(stop, end))
    return count
