"""The log of an ephemeral topic: the same reads and appends as a partition log, in memory and bounded.

As in nsqd, an ephemeral topic keeps at most ``count_max`` messages; what is published beyond them is dropped although
the publisher gets its ``OK``. So is what the memory budget has no room for. Nothing survives the process.

Source: NSQ's TCP protocol "Ephemeral".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from flintmq.batch import Batch, decode_batch, decode_header, encode_batch
from flintmq.budget import Budget
from flintmq.message import FRAME_OVERHEAD_BYTES, internal_id
from flintmq.storage.producers import ProducerMemory

BATCH_OVERHEAD_BYTES = 128  # of a batch beside its messages, at most
MESSAGE_OVERHEAD_BYTES = FRAME_OVERHEAD_BYTES + 4  # and its place in the batch


class MemoryLog:
    """Log of one partition of an ephemeral topic; attributes as :class:`flintmq.storage.PartitionLog`.

    Args:
        budget: what it holds counts in; None: without a limit.
        log_id: its identity, which tells it from the same topic's log elsewhere, or before; wall time in ns will do.

    Attributes:
        dropped_count: messages that were dropped because there was no room for them.
    """

    epoch = 0
    is_created = True
    failed: str | None = None
    synced_sequence = 0

    def __init__(self, partition: int, count_max: int, budget: Budget | None = None, log_id: int = 0) -> None:
        self.partition = partition
        self.log_id = log_id
        self.start_sequence = 1
        self.next_sequence = 1
        self.committed_sequence = 1
        self.end_offset_bytes = 0
        self.size_bytes = 0
        self.dropped_count = 0
        self.layout = 0
        self.producers = ProducerMemory()
        self._count_max = max(1, count_max)
        self._budget = budget if budget is not None else Budget()
        self._batches: list[Batch] = []
        self._firsts: list[int] = []

    def append(
        self,
        bodies: Sequence[bytes],
        timestamp_ns: int,
        due_ns: int = 0,
        producer: tuple[bytes, int] | None = None,
    ) -> int:
        """Keep as many of ``bodies`` as there is room for; return the first sequence."""
        first = self.next_sequence
        if producer is not None:
            self.producers.table.note(*producer, producer[1] + len(bodies) - 1)
        room = self._count_max - (first - self.start_sequence)
        kept = bodies if len(bodies) <= room else bodies[: max(0, room)]
        room_bytes = self._budget.ephemeral_room(self.size_bytes) - BATCH_OVERHEAD_BYTES
        if sum(map(len, kept)) + len(kept) * MESSAGE_OVERHEAD_BYTES > room_bytes:
            ends = list(accumulate(len(body) + MESSAGE_OVERHEAD_BYTES for body in kept))
            kept = kept[: bisect_right(ends, room_bytes)]
        self.dropped_count += len(bodies) - len(kept)
        if kept:
            data = encode_batch(
                internal_id(self.partition, first),
                self.end_offset_bytes,
                timestamp_ns,
                kept,
                due_ns=due_ns,
                layout=self.layout,
            )
            self._batches.append(decode_batch(data))
            self._firsts.append(first)
            self.next_sequence += len(kept)
            self.end_offset_bytes += len(data)
            self.size_bytes += len(data)
            self._budget.ephemeral_bytes += len(data)
        return first

    def append_batch(self, data: bytes, *, is_verified: bool = False) -> int:
        """Keep a whole batch that follows what is here, whatever the bounds of :meth:`append`; its first sequence.

        It stays in memory, so its CRC is not looked at, with ``is_verified`` or without.
        """
        batch = Batch(data, decode_header(data))
        first = self.next_sequence
        assert batch.first == first, "it follows"
        self._batches.append(batch)
        self._firsts.append(first)
        self.next_sequence = batch.end
        self.end_offset_bytes += len(data)
        self.size_bytes += len(data)
        self._budget.ephemeral_bytes += len(data)
        return first

    def advance_committed(self, sequence: int) -> None:
        self.committed_sequence = max(self.committed_sequence, sequence)

    def begin_sync(self) -> None:
        """There is nothing to sync."""

    def read(self, sequence: int) -> Batch | None:
        """The batch that holds ``sequence``, or the next one."""
        index = max(0, bisect_right(self._firsts, sequence) - 1)
        while index < len(self._batches):
            if self._batches[index].end > sequence:
                return self._batches[index]
            index += 1
        return None

    def fetch(self, start: int, end: int, bytes_max: int) -> tuple[bytes, int]:
        """Whole batches that overlap ``start`` to ``end``, and the next sequence to ask for."""
        parts: list[bytes | memoryview] = []
        size = 0
        while start < end and (batch := self.read(start)) is not None and batch.first < end:
            if parts and size + batch.size > bytes_max:
                break
            parts.append(batch.data)
            size += batch.size
            start = batch.end
        return b"".join(parts), start

    fetch_unverified = fetch

    @property
    def timestamp_max(self) -> int:
        """The latest timestamp of the messages that are kept, in ns, 0 when there is none."""
        return max((batch.timestamp_ns for batch in self._batches), default=0)

    def sequence_at(self, timestamp_ns: int) -> int:
        """First sequence with a timestamp at or after ``timestamp_ns``."""
        for batch in self._batches:
            if batch.timestamp_ns >= timestamp_ns:
                return batch.first
        return self.next_sequence

    def sequence_at_offset(self, offset_bytes: int) -> int:
        """The sequence of the message whose frame contains a virtual offset, or the first one behind it."""
        for batch in self._batches:
            into = offset_bytes - batch.header.offset_bytes
            if into < batch.positions()[-1]:
                return batch.first + max(bisect_right(batch.positions(), into) - 1, 0)
        return self.next_sequence

    def drop_before(self, sequence: int) -> int:
        """Forget whole batches below ``sequence``; return the bytes freed."""
        count = 0
        freed = 0
        while count < len(self._batches) and self._batches[count].end <= sequence:
            freed += self._batches[count].size
            self.start_sequence = self._batches[count].end
            count += 1
        del self._batches[:count], self._firsts[:count]
        self.size_bytes -= freed
        self._budget.ephemeral_bytes -= freed
        return freed

    def close(self) -> None:
        """Nothing is held open; what it holds counts no more."""
        self._budget.ephemeral_bytes -= self.size_bytes
        self.size_bytes = 0
        self._batches.clear()
        self._firsts.clear()

    def delete(self) -> None:
        """Nothing is on disk."""

    def describe(self) -> str:
        return f"memory log {self.start_sequence}..{self.next_sequence} batches={len(self._batches)}"
