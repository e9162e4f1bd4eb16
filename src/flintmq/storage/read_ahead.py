"""Turning a run of stored batches into batches in memory: large ones as they are, neighbouring small ones joined (hot).

A topic that is published to one message at a time is stored as very many very small batches. Read back one by one, each
would cost its consumers as much as a batch of hundreds; joined, a backlog of them is delivered like any other.

Rules of this file: the input is verified; what comes out is a valid batch with the same frames in the same order;
deferred batches, batches of different epochs and batches far apart in time are not joined, because their headers say
something about all of their messages.
"""

from __future__ import annotations

from struct import Struct

from flintmq.batch import (
    DEFERRED,
    HEADER,
    HEADER_BYTES,
    LAYOUT_FLAGS,
    MAGIC,
    UNIFORM,
    VERSION,
    Batch,
    BatchHeader,
    decode_header,
)
from flintmq.checksum import crc32
from flintmq.limits import JOIN_SIZE_MAX, JOIN_TIME_NS
from flintmq.storage.scan import SIZE_TABLE_ENTRY_BYTES

# flags, prefix, payload_size, count, first_id, offset_bytes, timestamp_min, timestamp_max, synced_before, due_ns, epoch
_FIELDS = Struct(">5xBHIIQQQQQQI4x")
_CRC_POSITION = HEADER_BYTES - 4
_frame_size_field = Struct(">I").pack
assert _FIELDS.size == HEADER_BYTES


def decode_run(data: bytes, positions: list[int]) -> list[Batch]:
    """Batches for the verified stretch of ``data`` that begins at each position and ends at the next.

    Args:
        positions: where the batches start, and where the last one ends.
    """
    batches: list[Batch] = []
    joint = _Joint()
    for number in range(len(positions) - 1):
        start, end = positions[number], positions[number + 1]
        if end - start > JOIN_SIZE_MAX:
            joint.flush(batches)
            whole = data[start:end]
            batches.append(Batch(whole, decode_header(whole)))
        elif not joint.add(data, start, end):
            joint.flush(batches)
            joint.add(data, start, end)
    joint.flush(batches)
    return batches


class _Joint:
    """Small batches that become one."""

    __slots__ = (
        "_count",
        "_epoch",
        "_frame_size",
        "_frames",
        "_header",
        "_layout",
        "_table",
        "_timestamp_max",
        "_timestamp_min",
        "_whole",
    )

    def __init__(self) -> None:
        self._count = 0

    def add(self, data: bytes, start: int, end: int) -> bool:
        """Take one more batch in; False when it does not go together with those before."""
        fields = _FIELDS.unpack_from(data, start)
        flags, prefix_bytes, payload_size, count, _, _, timestamp_min, timestamp_max, _, _, epoch = fields
        payload_size -= prefix_bytes  # who published it is of no interest to consumers
        start_of_sizes = start + HEADER_BYTES + prefix_bytes
        if not self._count:
            self._header = fields
            self._epoch = -1 if flags & DEFERRED else epoch
            self._layout = flags & LAYOUT_FLAGS
            self._timestamp_min, self._timestamp_max = timestamp_min, timestamp_max
            self._whole = data[start:end]
            self._frames: list[bytes] = []
            self._table: list[bytes] = []
            self._frame_size = payload_size // count if flags & UNIFORM else 0
        else:
            is_alike = epoch == self._epoch and flags & (DEFERRED | LAYOUT_FLAGS) == self._layout
            if not is_alike or not self._widen(timestamp_min, timestamp_max):
                return False
        self._count += count
        if flags & UNIFORM:
            frame_size = payload_size // count
            if frame_size != self._frame_size:
                self._frame_size = 0
            self._frames.append(data[start_of_sizes:end])
            self._table.append(_frame_size_field(frame_size) * count)
        else:
            self._frame_size = 0
            frames_at = start_of_sizes + SIZE_TABLE_ENTRY_BYTES * count
            self._frames.append(data[frames_at:end])
            self._table.append(data[start_of_sizes:frames_at])
        return True

    def _widen(self, timestamp_min: int, timestamp_max: int) -> bool:
        if timestamp_min > self._timestamp_min:
            timestamp_min = self._timestamp_min
        if timestamp_max < self._timestamp_max:
            timestamp_max = self._timestamp_max
        if timestamp_max - timestamp_min > JOIN_TIME_NS:
            return False
        self._timestamp_min, self._timestamp_max = timestamp_min, timestamp_max
        return True

    def flush(self, batches: list[Batch]) -> None:
        """Append the batch that was joined, if there is one."""
        if not self._count:
            return
        if len(self._frames) == 1:
            batches.append(Batch(self._whole, decode_header(self._whole)))
        else:
            batches.append(self._join())
        self._count = 0

    def _join(self) -> Batch:
        is_uniform = self._frame_size > 0
        flags = self._layout | (UNIFORM if is_uniform else 0)
        payload = b"".join(self._frames if is_uniform else [*self._table, *self._frames])
        _, _, _, _, first_id, offset_bytes, _, _, synced_before, due_ns, epoch = self._header
        rest = (first_id, offset_bytes, self._timestamp_min, self._timestamp_max, synced_before, due_ns, epoch)
        header = HEADER.pack(MAGIC, VERSION, flags, 0, len(payload), self._count, *rest, 0)[:_CRC_POSITION]
        crc = crc32(payload, crc32(header))
        data = b"".join((header, _frame_size_field(crc), payload))
        return Batch(data, BatchHeader(flags, len(payload), self._count, *rest, crc))
