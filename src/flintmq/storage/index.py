"""The sparse index of one segment: from a sequence, virtual offset or timestamp to a position; in memory and as a file.

An index file is a claim: "bytes up to ``data_size`` of the segment were walked or written by us and were good". It is
written when a segment is sealed, and as a checkpoint of the active one, so that recovery walks only what came later. It
is only ever a help: missing or damaged, it is rebuilt from the segment.

Byte picture (big-endian)::

    0      4        6         8        16      24    32          40                48
    +------+--------+---------+--------+-------+-----+-----------+-----------------+--
    | FMQI | version| flags   | log_id | first | end | data_size | end_offset_bytes|
    +------+--------+---------+--------+-------+-----+-----------+-----------------+--
     48              56                64      68            72           76
    +---------------+-----------------+-------+-------------+------------+--------
    | timestamp_max | synced_sequence | count | entries_crc | header_crc | entries
    +---------------+-----------------+-------+-------------+------------+--------

- ``first``, ``end`` and ``synced_sequence`` are sequences; ``end`` is one past the last.
- ``flags``: 1 when a batch of the segment has the flag PRODUCER (see batch.py), or some are damaged.
- the entries are four arrays of ``count`` u64, one after the other: sequences, positions, offsets, timestamps.

Invariants: I1 all four arrays ascend; I2 ``timestamps[i]`` is the latest timestamp of all batches of the segment before
``positions[i]``, so that the first batch with a timestamp of at least t lies behind the last entry with
``timestamps[i] < t``.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

from flintmq.checksum import crc32
from flintmq.limits import INDEX_ENTRIES_MAX, INDEX_INTERVAL_BYTES
from flintmq.storage.scan import Run, claim_at

MAGIC = b"FMQI"
VERSION = 1
_HAS_PRODUCERS = 1
_HEADER = Struct(">4sHHQQQQQQQII")
_CRC = Struct(">I")
_COUNT_AND_CRC = Struct(">II")
SUMMARY_BYTES = _HEADER.size + _CRC.size
_ENTRY_BYTES = 32
_OBJECT_BYTES = 600  # the four arrays and the object itself
INDEX_BYTES_MAX = SUMMARY_BYTES + INDEX_ENTRIES_MAX * _ENTRY_BYTES
assert SUMMARY_BYTES == 76


class Entry(NamedTuple):
    """A batch starts at ``position``: its first sequence and the virtual offset of its first frame."""

    sequence: int
    position: int
    offset_bytes: int


class SparseIndex:
    """One entry per stretch of a segment: ``INDEX_INTERVAL_BYTES``, more in a segment that would need too many.

    Memory is bounded: an index that reaches ``INDEX_ENTRIES_MAX`` drops every other entry and doubles its interval.

    Attributes:
        next_position: the first position worth another entry.
    """

    __slots__ = ("_interval_bytes", "next_position", "offsets", "positions", "sequences", "timestamps")

    def __init__(self) -> None:
        self.sequences = array("Q")
        self.positions = array("Q")
        self.offsets = array("Q")
        self.timestamps = array("Q")
        self._interval_bytes = INDEX_INTERVAL_BYTES
        self.next_position = 0

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def size_bytes(self) -> int:
        """Memory it takes, about."""
        return len(self.positions) * _ENTRY_BYTES + _OBJECT_BYTES

    def add(self, entry: Entry, timestamp_before: int) -> None:
        """Record a batch that starts at or after :attr:`next_position`.

        Args:
            timestamp_before: latest timestamp of all batches of the segment before it, 0 for the first.
        """
        if len(self.positions) >= INDEX_ENTRIES_MAX:
            self._thin()
            if entry.position < self.next_position:
                return
        self.sequences.append(entry.sequence)
        self.positions.append(entry.position)
        self.offsets.append(entry.offset_bytes)
        self.timestamps.append(timestamp_before)
        self.next_position = entry.position + self._interval_bytes

    def _thin(self) -> None:
        self.sequences = self.sequences[::2]
        self.positions = self.positions[::2]
        self.offsets = self.offsets[::2]
        self.timestamps = self.timestamps[::2]
        self._interval_bytes *= 2
        self.next_position = self.positions[-1] + self._interval_bytes

    def add_run(self, data: bytes, run: Run, data_position: int, id_base: int, timestamp_before: int) -> int:
        """Record those batches of a run that are worth an entry; the latest timestamp so far.

        Args:
            data: what the run was found in, read from ``data_position`` of the segment.
            timestamp_before: latest timestamp of all batches of the segment before the run.
        """
        positions, timestamps = run.positions, run.timestamps
        done = at = 0
        while (at := bisect_left(positions, self.next_position - data_position, at)) < len(positions):
            timestamp_before = max(timestamp_before, max(timestamps[done:at], default=0))
            done = at
            claim = claim_at(data, positions[at], data_position + positions[at], id_base)
            assert claim is not None, "a verified batch has a header"
            self.add(Entry(claim.first_id - id_base, claim.position, claim.offset_bytes), timestamp_before)
            at += 1
        return max(timestamp_before, max(timestamps[done:], default=0))

    def before_sequence(self, sequence: int) -> Entry | None:
        """The last entry at or before ``sequence``; None when there is none."""
        return self._entry(bisect_right(self.sequences, sequence) - 1)

    def before_offset(self, offset_bytes: int) -> Entry | None:
        """The last entry at or before a virtual offset, or the first one; None when there is none."""
        return self._entry(max(bisect_right(self.offsets, offset_bytes) - 1, 0))

    def before_timestamp(self, timestamp_ns: int) -> Entry | None:
        """An entry at or before the first batch with a timestamp of at least this; None when there is none."""
        return self._entry(max(bisect_left(self.timestamps, timestamp_ns) - 1, 0))

    def _entry(self, number: int) -> Entry | None:
        if not 0 <= number < len(self.positions):
            return None
        return Entry(self.sequences[number], self.positions[number], self.offsets[number])


@dataclass(slots=True, frozen=True)
class IndexSummary:
    """The header of an index file; see the picture above."""

    log_id: int
    first: int
    end: int
    data_size: int
    end_offset_bytes: int
    timestamp_max: int
    synced_sequence: int
    has_producers: bool = False


def _big_endian(values: array[int]) -> bytes:
    if sys.byteorder == "little":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def encode_index(summary: IndexSummary, index: SparseIndex) -> bytes:
    """Build an index file."""
    entries = b"".join(map(_big_endian, (index.sequences, index.positions, index.offsets, index.timestamps)))
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        _HAS_PRODUCERS if summary.has_producers else 0,
        summary.log_id,
        summary.first,
        summary.end,
        summary.data_size,
        summary.end_offset_bytes,
        summary.timestamp_max,
        summary.synced_sequence,
        len(index),
        crc32(entries),
    )
    return b"".join((header, _CRC.pack(crc32(header)), entries))


def decode_summary(data: bytes) -> IndexSummary | None:
    """Read and verify the header of an index file; None when it is not good."""
    if len(data) < SUMMARY_BYTES:
        return None
    magic, version, flags, *fields, _count, _entries_crc = _HEADER.unpack_from(data)
    (crc,) = _CRC.unpack_from(data, _HEADER.size)
    if magic != MAGIC or version != VERSION or flags & ~_HAS_PRODUCERS or crc != crc32(data[: _HEADER.size]):
        return None
    fields.append(flags == _HAS_PRODUCERS)
    return IndexSummary(*fields)


def decode_index(data: bytes) -> tuple[IndexSummary, SparseIndex] | None:
    """Read and verify a whole index file; None when it is not good."""
    summary = decode_summary(data)
    if summary is None:
        return None
    count, entries_crc = _COUNT_AND_CRC.unpack_from(data, _HEADER.size - _COUNT_AND_CRC.size)
    entries = data[SUMMARY_BYTES:]
    if not 0 < count <= INDEX_ENTRIES_MAX or len(entries) != count * _ENTRY_BYTES or crc32(entries) != entries_crc:
        return None
    columns = []
    for start in range(0, len(entries), count * 8):
        column = array("Q")
        column.frombytes(entries[start : start + count * 8])
        if sys.byteorder == "little":
            column.byteswap()
        columns.append(column)
    index = SparseIndex()
    index.sequences, index.positions, index.offsets, index.timestamps = columns
    while index.positions[-1] - index.positions[0] > index._interval_bytes * INDEX_ENTRIES_MAX:
        index._interval_bytes *= 2
    index.next_position = index.positions[-1] + index._interval_bytes
    return summary, index
