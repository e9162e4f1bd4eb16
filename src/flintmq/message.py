"""The V2 message frame: what a consumer receives, and exactly what the log stores.

Byte picture (big-endian)::

    0        4        8                16        18               34
    +--------+--------+----------------+---------+----------------+------
    | size   | type=2 | timestamp_ns   | attempts| message id     | body
    +--------+--------+----------------+---------+----------------+------
    size counts everything after itself: 30 + len(body)

The message id of a plain topic is the internal id as 16 lower-case hex characters, because some clients treat it as
text; of a topic with partitions it is 8 bytes internal id and 8 bytes trace id, big-endian;
internal id = ``partition << 50 | sequence``. A consumer that subscribes as with NSQ, without a partition, is sent the
former in any case.

Messages of an extended topic carry headers in front of the body, stored as they are sent::

    ... | message id     | version=0 | body                          no headers
    ... | message id     | version   | size (2) | headers | body     2: a dispatch tag, 4: a JSON object

A consumer that is told where each message is in its partition gets 12 bytes more in front of the body (behind the
headers), and such frames are made one by one::

    ... | message id     | offset_bytes   | raw_size | body
    raw_size is what offsets grow by: all of the stored frame, so that offset_bytes + raw_size is the next one's offset

Source: NSQ's TCP protocol, docs/decisions/0017.
"""

from __future__ import annotations

from struct import Struct

from flintmq.limits import ATTEMPTS_MAX, MESSAGE_ID_SIZE, SEQUENCE_BITS, SEQUENCE_MAX

FRAME_HEADER = Struct(">II")
MESSAGE_HEADER = Struct(">IIQH16s")
ATTEMPTS = Struct(">H")
TRACE_ID = Struct(">Q")
TRACE_ID_SIZE = TRACE_ID.size
RAW_ID = Struct(">QQ")
_SIZE_AND_INTERNAL_ID = Struct(">I14xQ")
_SIZE = Struct(">I")
FRAME_TYPE_MESSAGE = 2
FRAME_OVERHEAD_BYTES = MESSAGE_HEADER.size  # what a stored frame adds to its body
SIZE_FIELD_BYTES = 4
ATTEMPTS_POSITION = 16
ID_POSITION = 18

NO_HEADERS, TAG, JSON = 0, 2, 4
"""Versions of the headers in front of a body: none, a dispatch tag, a JSON object."""
EMPTY_HEADERS = bytes((NO_HEADERS,))
HEADERS = Struct(">BH")
HEADERS_SIZE_MAX = 2**16 - 1
HEADERS_DEPTH_MAX = 64
"""Arrays and objects within each other in JSON headers, the outermost counted."""
TAG_HEADER, TRACE_ID_HEADER = "##client_dispatch_tag", "##trace_id"
"""Headers that nsqd reads."""

LOCATION = Struct(">QI")
"""Virtual offset and raw size of a message, in front of its body."""

assert FRAME_OVERHEAD_BYTES == 34
assert ID_POSITION + MESSAGE_ID_SIZE == FRAME_OVERHEAD_BYTES


def internal_id(partition: int, sequence: int) -> int:
    """Combine a partition number and the sequence of a message in it."""
    return partition << SEQUENCE_BITS | sequence


def sequence_of(internal: int) -> int:
    """Return the message sequence (the offset Spark sees) in an internal id."""
    return internal & SEQUENCE_MAX


def partition_of(internal: int) -> int:
    """Return the partition number in an internal id."""
    return internal >> SEQUENCE_BITS


def hex_id(internal: int) -> bytes:
    """Return the 16 bytes that stand for an internal id on the wire of a plain topic."""
    return b"%016x" % internal


def with_hex_ids(frames: bytes | memoryview, offset_bytes: int = 0) -> bytes:
    """Copy message frames of a topic with partitions, each behind the one before, with ids as of a plain topic."""
    found = bytearray(frames)
    at, end = 0, len(found)
    while at < end:
        size, internal = _SIZE_AND_INTERNAL_ID.unpack_from(found, at)
        found[at + ID_POSITION : at + FRAME_OVERHEAD_BYTES] = b"%016x" % internal
        at += SIZE_FIELD_BYTES + size
    return bytes(found)


def raw_id(internal: int, trace_id: int = 0) -> bytes:
    """Return the 16 bytes that stand for an internal id on the wire of a topic with partitions."""
    return RAW_ID.pack(internal, trace_id)


def extended_body(headers: bytes, body: bytes, version: int = JSON) -> bytes:
    """Return what is stored behind the id of a message of an extended topic.

    Args:
        headers: at most :data:`HEADERS_SIZE_MAX` bytes; empty for none.
    """
    return HEADERS.pack(version, len(headers)) + headers + body if headers else b"\0" + body


def body_position(frame: bytes | memoryview) -> int:
    """Return where the body begins in a stored message frame of an extended topic."""
    if frame[FRAME_OVERHEAD_BYTES] == NO_HEADERS:
        return FRAME_OVERHEAD_BYTES + 1
    size: int = HEADERS.unpack_from(frame, FRAME_OVERHEAD_BYTES)[1]
    return FRAME_OVERHEAD_BYTES + HEADERS.size + size


def headers_of(frame: bytes | memoryview) -> tuple[int, bytes]:
    """Return version and bytes of the headers in a stored message frame of an extended topic."""
    return headers_at(frame, 0)


def headers_at(data: bytes | memoryview, position: int) -> tuple[int, bytes]:
    """Return the same as :func:`headers_of`, of the frame that begins at a position."""
    position += FRAME_OVERHEAD_BYTES
    if data[position] == NO_HEADERS:
        return NO_HEADERS, b""
    version, size = HEADERS.unpack_from(data, position)
    position += HEADERS.size
    return version, bytes(data[position : position + size])


def equal_frames(data: bytes, position: int, size: int, count_max: int) -> int:
    """Count the complete frames that follow each other from ``position`` and begin as the first of them does.

    Args:
        size: bytes of the first frame, its size field included; at least :data:`FRAME_HEADER`'s.
        count_max: no more are looked at; at least 1.

    Returns:
        How many frames of this size and one type there are, 0 when not even the first is complete.
    """
    stop = position + size
    if data[stop : stop + FRAME_HEADER.size] != data[position : position + FRAME_HEADER.size]:
        return 1 if stop <= len(data) else 0
    count = min((len(data) - position) // size, count_max)
    # all first bytes of their headers, then all second ones, and so on: a step of C for each frame, and none of Python
    for at in range(position, position + FRAME_HEADER.size):
        column, byte = data[at : position + count * size : size], data[at : at + 1]
        if column.count(byte) != count:
            count -= len(column.lstrip(byte))
    return count


def frame_sizes(frames: bytes) -> list[int]:
    """Return the bytes of each message frame, size fields included, of complete frames one behind the other."""
    sizes: list[int] = []
    position, end = 0, len(frames)
    while position < end:
        size = SIZE_FIELD_BYTES + _SIZE.unpack_from(frames, position)[0]
        if not sizes and (count := equal_frames(frames, 0, size, end)) * size == end:
            return [size] * count
        sizes.append(size)
        position += size
    return sizes


def without_headers(frame: bytes | memoryview, offset_bytes: int = 0) -> bytes:
    """Copy one stored message frame of an extended topic for a consumer that knows no headers."""
    view = memoryview(frame)
    body = view[body_position(frame) :]
    size = _SIZE.pack(FRAME_OVERHEAD_BYTES - SIZE_FIELD_BYTES + len(body))
    return b"".join((size, view[SIZE_FIELD_BYTES:FRAME_OVERHEAD_BYTES], body))


def with_empty_headers(frame: bytes | memoryview, offset_bytes: int = 0) -> bytes:
    """Copy one message frame that was stored without headers for a consumer that expects them."""
    view = memoryview(frame)
    size = _SIZE.pack(len(frame) - SIZE_FIELD_BYTES + 1)
    return b"".join((size, view[SIZE_FIELD_BYTES:FRAME_OVERHEAD_BYTES], EMPTY_HEADERS, view[FRAME_OVERHEAD_BYTES:]))


def with_location(frame: bytes | memoryview, offset_bytes: int) -> bytes:
    """Copy one stored message frame with its place in the partition in front of the body."""
    return _located(frame, offset_bytes, FRAME_OVERHEAD_BYTES)


def with_location_behind_headers(frame: bytes | memoryview, offset_bytes: int) -> bytes:
    """Add a location as :func:`with_location`, to a message of an extended topic."""
    return _located(frame, offset_bytes, body_position(frame))


def _located(frame: bytes | memoryview, offset_bytes: int, at: int) -> bytes:
    size = len(frame)
    location = LOCATION.pack(offset_bytes, size)
    new_size = _SIZE.pack(size - SIZE_FIELD_BYTES + LOCATION.size)
    view = memoryview(frame)
    return b"".join((new_size, view[SIZE_FIELD_BYTES:at], location, view[at:]))


def with_attempts(frame: bytes | memoryview, delivery_count: int) -> bytes:
    """Copy one stored message frame for its n-th delivery from this log; attempts stay at 65535 once reached.

    A frame is stored with the attempts of its first delivery: 1, or more when another nsqd had delivered it before.
    """
    copy = bytearray(frame)
    (first,) = ATTEMPTS.unpack_from(copy, ATTEMPTS_POSITION)
    ATTEMPTS.pack_into(copy, ATTEMPTS_POSITION, min(first + delivery_count - 1, ATTEMPTS_MAX))
    return bytes(copy)
