"""The V2 message frame: what a consumer receives, and exactly what the log stores.

Byte picture (big-endian)::

    0        4        8                16        18               34
    +--------+--------+----------------+---------+----------------+------
    | size   | type=2 | timestamp_ns   | attempts| message id     | body
    +--------+--------+----------------+---------+----------------+------
    size counts everything after itself: 30 + len(body)

The message id of a plain topic is the internal id as 16 lower-case hex characters, because some clients treat it as
text; of a topic with partitions it is 8 bytes internal id and 8 bytes trace id, big-endian;
internal id = ``partition << 50 | sequence``.

A consumer that is told where each message is in its partition gets 12 bytes more in front of the body, and such frames
are made one by one::

    ... | message id     | offset_bytes   | raw_size | body
    raw_size counts what the redesigned NSQ would store: 4 (size), 8 + 2 (timestamp, attempts), 16 (id), the body

Source: reference/nsq.md 1.2, design/cluster.md "Decisions that go with it".
"""

from __future__ import annotations

from struct import Struct

from flintmq.limits import ATTEMPTS_MAX, MESSAGE_ID_SIZE, SEQUENCE_BITS, SEQUENCE_MAX

FRAME_HEADER = Struct(">II")
MESSAGE_HEADER = Struct(">IIQH16s")
ATTEMPTS = Struct(">H")
_RAW_ID = Struct(">QQ")
_SIZE = Struct(">I")
FRAME_TYPE_MESSAGE = 2
FRAME_OVERHEAD_BYTES = MESSAGE_HEADER.size  # what a stored frame adds to its body
SIZE_FIELD_BYTES = 4
ATTEMPTS_POSITION = 16
ID_POSITION = 18

LOCATION = Struct(">QI")
"""Virtual offset and raw size of a message, in front of its body."""

assert FRAME_OVERHEAD_BYTES == 34
assert ID_POSITION + MESSAGE_ID_SIZE == FRAME_OVERHEAD_BYTES


def internal_id(partition: int, sequence: int) -> int:
    """Combine a partition number and the sequence of a message in it."""
    return partition << SEQUENCE_BITS | sequence


def sequence_of(internal: int) -> int:
    """The message sequence (the offset Spark sees) in an internal id."""
    return internal & SEQUENCE_MAX


def partition_of(internal: int) -> int:
    """The partition number in an internal id."""
    return internal >> SEQUENCE_BITS


def hex_id(internal: int) -> bytes:
    """The 16 bytes that stand for an internal id on the wire of a plain topic."""
    return b"%016x" % internal


def raw_id(internal: int, trace_id: int = 0) -> bytes:
    """The 16 bytes that stand for an internal id on the wire of a topic with partitions."""
    return _RAW_ID.pack(internal, trace_id)


def with_location(frame: bytes | memoryview, offset_bytes: int) -> bytes:
    """Copy one stored message frame with its place in the partition in front of the body."""
    size = len(frame)
    location = LOCATION.pack(offset_bytes, size - SIZE_FIELD_BYTES)
    new_size = _SIZE.pack(size - SIZE_FIELD_BYTES + LOCATION.size)
    view = memoryview(frame)
    return b"".join((new_size, view[SIZE_FIELD_BYTES:FRAME_OVERHEAD_BYTES], location, view[FRAME_OVERHEAD_BYTES:]))


def with_attempts(frame: bytes | memoryview, delivery_count: int) -> bytes:
    """Copy one stored message frame for its n-th delivery from this log; attempts stay at 65535 once reached.

    A frame is stored with the attempts of its first delivery: 1, or more when another nsqd had delivered it before.
    """
    copy = bytearray(frame)
    (first,) = ATTEMPTS.unpack_from(copy, ATTEMPTS_POSITION)
    ATTEMPTS.pack_into(copy, ATTEMPTS_POSITION, min(first + delivery_count - 1, ATTEMPTS_MAX))
    return bytes(copy)
