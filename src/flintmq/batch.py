"""The batch: the unit that is stored, fetched by Spark and replicated. Its frames are sent to consumers as they stand.

Byte picture (big-endian)::

    0      4  5     6        8             12      16         24            32              40             48
    +------+--+-----+--------+-------------+-------+----------+-------------+---------------+--------------+--
    | FMQB |v1|flags| prefix | payload_size| count | first_id | offset_bytes| timestamp_min | timestamp_max|
    +------+--+-----+--------+-------------+-------+----------+-------------+---------------+--------------+--
     48              56       64      68    72
    +---------------+--------+-------+-----+------------------------------+----------------------------------+
    | synced_before | due_ns | epoch | crc | u32 size of each frame       | message frames, see message.py   |
    |               |        |       |     | (absent when UNIFORM is set) |                                  |
    +---------------+--------+-------+-----+------------------------------+----------------------------------+

                                            1    1+n                      9+n
    with PRODUCER, between crc and sizes:  +-----+------------------------+
                                           | n   | producer id (n bytes)  | sequence (8)
                                           +-----+------------------------+

- ``prefix``: bytes between ``crc`` and the sizes: 9 + n with PRODUCER, otherwise 0.
- ``payload_size`` counts everything after the header; ``crc`` is CRC-32 of header bytes 0..68 and the payload.
- ``first_id`` is the internal id of the first message; the others follow without gaps.
- ``offset_bytes`` is the virtual position of the first frame: frame bytes since the birth of the partition.
- ``synced_before``: every sequence below it survived a power loss when this batch was written.
- ``due_ns`` (flag DEFERRED): wall time before which no message of the batch is delivered.
- PRODUCER: the messages were published with this producer's id; ``sequence`` is the number that it gave the first of
  them, the others follow without gaps.
- EXTENDED and RAW_IDS say how the frames are laid out, see message.py: with headers, with binary ids.

Rules of this file: no IO; one pass over the bodies; a batch is never turned into one object per message.

Source: docs/decisions/0001, docs/decisions/0002.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from struct import Struct, pack, unpack_from

from flintmq.checksum import crc32
from flintmq.limits import BATCH_SIZE_MAX, PRODUCER_ID_SIZE_MAX, SEQUENCE_MAX
from flintmq.message import (
    FRAME_OVERHEAD_BYTES,
    FRAME_TYPE_MESSAGE,
    SIZE_FIELD_BYTES,
    TRACE_ID_SIZE,
    with_attempts,
)

MAGIC = b"FMQB"
VERSION = 1
UNIFORM = 1
DEFERRED = 2
EXTENDED = 4
RAW_IDS = 8
PRODUCER = 16
KNOWN_FLAGS = UNIFORM | DEFERRED | EXTENDED | RAW_IDS | PRODUCER
LAYOUT_FLAGS = EXTENDED | RAW_IDS

HEADER = Struct(">4sBBHIIQQQQQQII")
HEADER_BYTES = HEADER.size
FLAGS_POSITION = 5
_CRC_POSITION = HEADER_BYTES - 4
_CRC = Struct(">I")
_TIMESTAMPS_POSITION = 32
_TIMESTAMPS = Struct(">QQ")
_STAMP_POSITION = 8  # in a message frame: timestamp and attempts
_STAMP = Struct(">QH")
_PRODUCER_SEQUENCE = Struct(">Q")
PREFIX_BYTES_MIN = 1 + 1 + _PRODUCER_SEQUENCE.size
PREFIX_BYTES_MAX = 1 + PRODUCER_ID_SIZE_MAX + _PRODUCER_SEQUENCE.size
assert HEADER_BYTES == 72

_FRAME_SIZE_ADDED = FRAME_OVERHEAD_BYTES - SIZE_FIELD_BYTES
_RAW_FRAME_SIZE_ADDED = _FRAME_SIZE_ADDED - TRACE_ID_SIZE
_TYPE_TIMESTAMP_ATTEMPTS = Struct(">IQH")
_LOW_DIGITS = [b"%03x" % low for low in range(4096)]
_size_field = Struct(">I").pack
_internal_id = Struct(">Q").pack


class BatchError(ValueError):
    """Bytes are not a batch; the text says which check failed."""


@dataclass(slots=True)  # not frozen: one is made for every append, and a frozen one takes three times as long
class BatchHeader:
    """The fields of a batch header, see the picture above; sizes in bytes, times in ns. Never changed."""

    flags: int
    payload_size: int
    count: int
    first_id: int
    offset_bytes: int
    timestamp_min: int
    timestamp_max: int
    synced_before: int
    due_ns: int
    epoch: int
    crc: int
    prefix_bytes: int = 0

    @property
    def first_sequence(self) -> int:
        return self.first_id & SEQUENCE_MAX

    @property
    def end_sequence(self) -> int:
        """One past the last sequence."""
        return (self.first_id & SEQUENCE_MAX) + self.count

    @property
    def size(self) -> int:
        """Bytes of the whole batch."""
        return HEADER_BYTES + self.payload_size


def encode_batch(
    first_id: int,
    offset_bytes: int,
    timestamp_ns: int,
    bodies: Sequence[bytes],
    *,
    synced_before: int = 0,
    due_ns: int = 0,
    epoch: int = 0,
    layout: int = 0,
    producer: tuple[bytes, int] | None = None,
) -> bytes:
    """Build the batch that stores ``bodies`` as message frames with attempts 1.

    Args:
        first_id: internal id of the first message; the following get the next ones.
        bodies: at least one; each may be any size the caller allows. With RAW_IDS each begins with its 8 bytes of trace
            id, with EXTENDED (behind that) with its headers.
        due_ns: wall time of earliest delivery, 0 for at once.
        layout: RAW_IDS: ids are 8 bytes internal id and 8 bytes trace id, and not 16 hex digits; EXTENDED.
        producer: id of 1 to ``PRODUCER_ID_SIZE_MAX`` bytes, and its sequence of the first message.
    """
    count = len(bodies)
    size = len(bodies[0])
    sizes = list(map(len, bodies))
    uniform = sizes.count(size) == count
    flags = (UNIFORM if uniform else 0) | (DEFERRED if due_ns else 0) | layout
    overhead = FRAME_OVERHEAD_BYTES
    after_size = _TYPE_TIMESTAMP_ATTEMPTS.pack(FRAME_TYPE_MESSAGE, timestamp_ns, 1)
    if layout & RAW_IDS:
        overhead -= TRACE_ID_SIZE
        parts = _frames_with_raw_ids(first_id, after_size, sizes, bodies)
    else:
        parts = _frames_with_hex_ids(first_id, after_size, sizes, bodies, uniform)
    prefix = b""
    if uniform:
        payload = b"".join(parts)
    else:
        table = pack(f">{count}I", *[n + overhead for n in sizes])
        payload = table + b"".join(parts)
    if producer is not None:
        prefix = _producer_prefix(*producer)
        flags |= PRODUCER
    header = HEADER.pack(
        MAGIC,
        VERSION,
        flags,
        len(prefix),
        len(prefix) + len(payload),
        count,
        first_id,
        offset_bytes,
        timestamp_ns,
        timestamp_ns,
        synced_before,
        due_ns,
        epoch,
        0,
    )[:_CRC_POSITION]
    crc = crc32(header)
    if prefix:
        crc = crc32(prefix, crc)
    return b"".join((header, _CRC.pack(crc32(payload, crc)), prefix, payload))


def encode_received(
    first_id: int,
    offset_bytes: int,
    frames: bytes,
    sizes: Sequence[int],
    timestamps: Sequence[int],
    *,
    synced_before: int = 0,
    layout: int = 0,
) -> bytes:
    """Build the batch that stores messages as another nsqd has delivered them: with its ids, timestamps and attempts.

    Nobody can consume such a batch, as its ids are not those of its sequences; it is read by sequence.

    Args:
        first_id: internal id of the first message, by which it is read; the following get the next ones.
        frames: complete message frames one behind the other, as they came; at least one.
        sizes: of each frame in bytes, see :func:`flintmq.message.frame_sizes`.
        timestamps: of each message in ns.
        layout: RAW_IDS: the second half of each id is a trace id; EXTENDED: each body begins with its headers.
    """
    count = len(sizes)
    uniform = sizes.count(sizes[0]) == count
    table = b"" if uniform else pack(f">{count}I", *sizes)
    header = HEADER.pack(
        MAGIC, VERSION, (UNIFORM if uniform else 0) | layout, 0, len(table) + len(frames), count, first_id,
        offset_bytes, min(timestamps), max(timestamps), synced_before, 0, 0, 0,
    )[:_CRC_POSITION]  # fmt: skip
    crc = crc32(frames, crc32(table, crc32(header)))
    return b"".join((header, _CRC.pack(crc), table, frames))


def _producer_prefix(producer_id: bytes, sequence: int) -> bytes:
    return bytes((len(producer_id),)) + producer_id + _PRODUCER_SEQUENCE.pack(sequence)


def producer_of(data: bytes | memoryview, position: int = 0) -> tuple[bytes, int] | None:
    """Return the producer of the verified batch at ``position`` and its sequence of the first message, or None."""
    if not data[position + FLAGS_POSITION] & PRODUCER:
        return None
    at = position + HEADER_BYTES
    end = at + 1 + data[at]
    (sequence,) = _PRODUCER_SEQUENCE.unpack_from(data, end)
    return bytes(data[at + 1 : end]), sequence


def is_possible_prefix(flags: int, prefix_bytes: int) -> bool:
    """Whether a writer puts a prefix of this size into a batch with these flags."""
    return PREFIX_BYTES_MIN <= prefix_bytes <= PREFIX_BYTES_MAX if flags & PRODUCER else not prefix_bytes


def _frames_with_hex_ids(
    first_id: int, after_size: bytes, sizes: Sequence[int], bodies: Sequence[bytes], uniform: bool
) -> list[bytes]:
    """Return the pieces of all frames; ``after_size`` is what stands between the size and the id of each."""
    count, size = len(bodies), sizes[0]
    parts: list[bytes] = []
    index = 0
    while index < count:
        # all ids of one block of 4096 share their 13 high digits, so a block needs no formatting per message
        high, low = divmod(first_id + index, 4096)
        run = min(count - index, 4096 - low)
        shared = after_size + b"%013x" % high
        if uniform:
            block: list[bytes] = [_size_field(size + _FRAME_SIZE_ADDED) + shared] * (3 * run)
            block[1::3] = _LOW_DIGITS[low : low + run]
            block[2::3] = bodies[index : index + run]
        else:
            block = [shared] * (4 * run)
            block[0::4] = [_size_field(n + _FRAME_SIZE_ADDED) for n in sizes[index : index + run]]
            block[2::4] = _LOW_DIGITS[low : low + run]
            block[3::4] = bodies[index : index + run]
        parts = block if not parts else parts + block
        index += run
    return parts


def _frames_with_raw_ids(
    first_id: int, after_size: bytes, sizes: Sequence[int], bodies: Sequence[bytes]
) -> list[bytes]:
    """Return the pieces as :func:`_frames_with_hex_ids`; the second half of an id is what its body begins with."""
    parts = [after_size] * (4 * len(bodies))
    parts[0::4] = [_size_field(n + _RAW_FRAME_SIZE_ADDED) for n in sizes]
    parts[2::4] = map(_internal_id, range(first_id, first_id + len(bodies)))
    parts[3::4] = bodies
    return parts


def with_stamps(data: bytes, stamps: Sequence[tuple[int, int]]) -> bytes:
    """Copy what :func:`encode_batch` made with ``(timestamp_ns, attempts)`` of each message replaced."""
    batch = Batch(data, decode_header(data))
    copy = bytearray(data)
    at = batch.frames_at + _STAMP_POSITION
    for (position, _end), (timestamp_ns, attempts) in zip(pairwise(batch.positions()), stamps, strict=True):
        _STAMP.pack_into(copy, at + position, timestamp_ns, attempts)
    timestamps = [timestamp_ns for timestamp_ns, _attempts in stamps]
    _TIMESTAMPS.pack_into(copy, _TIMESTAMPS_POSITION, min(timestamps), max(timestamps))
    view = memoryview(copy)
    _CRC.pack_into(copy, _CRC_POSITION, crc32(view[HEADER_BYTES:], crc32(view[:_CRC_POSITION])))
    return bytes(copy)


def decode_header(data: bytes | memoryview, position: int = 0) -> BatchHeader:
    """Read the header at ``position``.

    Raises:
        BatchError: fewer than 72 bytes, or a field that no writer of this version produces.
    """
    if len(data) - position < HEADER_BYTES:
        raise BatchError(f"{len(data) - position} bytes left, a batch header has {HEADER_BYTES}")
    magic, version, flags, prefix_bytes, payload_size, count, *rest = HEADER.unpack_from(data, position)
    if magic != MAGIC:
        raise BatchError(f"magic is {bytes(magic)!r}, not {MAGIC!r}")
    if version != VERSION:
        raise BatchError(f"batch version {version}; this release reads version {VERSION}")
    if flags & ~KNOWN_FLAGS or not is_possible_prefix(flags, prefix_bytes):
        raise BatchError(f"unknown flags {flags:#x} or a prefix of {prefix_bytes} bytes, which they do not have")
    frame_bytes_max = payload_size - prefix_bytes
    if not 0 < payload_size <= BATCH_SIZE_MAX or not 0 < count <= frame_bytes_max // FRAME_OVERHEAD_BYTES:
        raise BatchError(f"impossible sizes: {payload_size} bytes for {count} messages")
    rest.append(prefix_bytes)
    return BatchHeader(flags, payload_size, count, *rest)


def verify(data: bytes | memoryview, header: BatchHeader, position: int = 0) -> None:
    """Check the CRC of the batch at ``position``.

    Raises:
        BatchError: the batch is cut short or its bytes changed.
    """
    end = position + header.size
    if len(data) < end:
        raise BatchError(f"cut short: {len(data) - position} of {header.size} bytes")
    view = memoryview(data)
    crc = crc32(view[position + HEADER_BYTES : end], crc32(view[position : position + _CRC_POSITION]))
    if crc != header.crc:
        raise BatchError(f"CRC is {crc:#010x}, the header says {header.crc:#010x}")


@lru_cache(maxsize=512)
def _uniform_positions(count: int, frame_size: int) -> range:
    return range(0, (count + 1) * frame_size, frame_size)


class Batch:
    """A verified batch in memory, sliced without looking at single messages.

    Attributes:
        first: sequence of the first message.
        end: one past the sequence of the last.
        due_ns: wall time of earliest delivery, 0 for at once.
        timestamp_ns: the latest timestamp of its messages.
    """

    __slots__ = ("_positions", "data", "due_ns", "end", "first", "frames_at", "header", "timestamp_ns")

    def __init__(self, data: bytes | memoryview, header: BatchHeader) -> None:
        self.data = data
        self.header = header
        self.first = header.first_id & SEQUENCE_MAX
        self.end = self.first + header.count
        self.due_ns = header.due_ns
        self.timestamp_ns = header.timestamp_max
        frames_at = HEADER_BYTES if header.flags & UNIFORM else HEADER_BYTES + 4 * header.count
        self.frames_at = frames_at + header.prefix_bytes
        self._positions: Sequence[int] | None = None

    @property
    def size(self) -> int:
        """Bytes of the whole batch."""
        return len(self.data)

    def positions(self) -> Sequence[int]:
        """Return where each frame starts, counted from ``frames_at``; one more entry for the end of the last."""
        positions = self._positions
        if positions is None:
            header = self.header
            if header.flags & UNIFORM:
                frame_bytes = header.payload_size - header.prefix_bytes
                positions = _uniform_positions(header.count, frame_bytes // header.count)
            else:
                sizes = unpack_from(f">{header.count}I", self.data, HEADER_BYTES + header.prefix_bytes)
                positions = list(accumulate(sizes, initial=0))
            self._positions = positions
        return positions

    def frames(self, start: int, end: int) -> bytes | memoryview:
        """Return the frames of sequences ``start`` to ``end`` (exclusive) as one slice; both within the batch."""
        at = self.frames_at
        if start == self.first and end == self.end:
            return self.data[at:]
        positions = self.positions()
        return self.data[at + positions[start - self.first] : at + positions[end - self.first]]

    def offset_of(self, sequence: int) -> int:
        """Return the virtual position of one frame: frame bytes before it since the birth of the partition."""
        return self.header.offset_bytes + self.positions()[sequence - self.first]

    def redelivery(self, sequence: int, delivery_count: int) -> bytes:
        """Return one frame for its n-th delivery, see :func:`flintmq.message.with_attempts`."""
        return with_attempts(self.frames(sequence, sequence + 1), delivery_count)

    def count_within(self, start: int, bytes_max: int) -> int:
        """Return how many messages from ``start`` fit into ``bytes_max``; at least one."""
        positions = self.positions()
        index = start - self.first
        limit = positions[index] + bytes_max
        if positions[-1] <= limit:
            return self.end - start
        low, high = index + 1, len(positions) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if positions[middle] <= limit:
                low = middle
            else:
                high = middle - 1
        return low - index


def decode_batch(data: bytes | memoryview, position: int = 0) -> Batch:
    """Decode and verify the batch at ``position``.

    Raises:
        BatchError: it is cut short or damaged.
    """
    header = decode_header(data, position)
    verify(data, header, position)
    if position == 0 and len(data) == header.size:
        return Batch(data, header)
    return Batch(data[position : position + header.size], header)
