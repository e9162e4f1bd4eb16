"""What the redesigned NSQ adds to commands, answers and message frames: partitions, order, trace, headers.

Byte pictures (big-endian)::

    PUB_TRACE, PUB_EXT                  MPUB_TRACE, MPUB_EXT
    [4 size][8 trace id][body]          [4 total][4 count]{[4 size][8 trace id][body]}
    [4 size][2 size][JSON][body]        [4 total][4 count]{[4 size][2 size][JSON][body]}
    size counts everything behind it

    answer to a traced publish          "OK" [8 internal id][8 trace id][8 offset][4 raw size]

    message of a partition              message id = [8 internal id][8 trace id]
    body of a frame                     [1 version [2 size][headers]]   only on an extended topic; version 0 has no more
                                        [8 offset][4 raw size]          only with SUB_ORDER or SUB_ADVANCED
                                        [body]

Serialisers check what the protocol would refuse and raise :class:`LocalProtocolError`. ``SUB_ORDER`` is the seeds'
name of the command; Youzan's daemons know it as ``SUB_ORDERED``, which this module sends on request.

Source: seed 000 "Ordered Message Consumption" and "Message Tracing", reference/youzan.md 0 and 1.3.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

from flintmq.errors import LocalProtocolError, RemoteProtocolError
from flintmq.message import HEADERS_SIZE_MAX, LOCATION, NO_HEADERS, RAW_ID, TRACE_ID
from flintmq.wire.commands import channel_bytes, partition_bytes, target
from flintmq.wire.frames import UINT32

HEADERS_SIZE = Struct(">H")
STORED = Struct(">2sQQQI")
TRACE_ID_MAX = 2**64 - 1

_START = re.compile(r"(timestamp|virtual_queue|msgcount):[0-9]{1,18}|special:-1", re.ASCII)
SUB_ORDER, SUB_ORDERED = "SUB_ORDER", "SUB_ORDERED"


class Stored(NamedTuple):
    """Where a traced publish was stored.

    Attributes:
        internal_id: ``partition << 50 | sequence``.
        trace_id: as sent; 0 for several messages.
        offset: bytes of the partition's log before the message, which only grow.
        raw_size: bytes that it takes there.
    """

    internal_id: int
    trace_id: int
    offset: int
    raw_size: int


class Extension(NamedTuple):
    """What stands in front of a body.

    Attributes:
        version: of the headers: 0 none, 2 a tag, 4 JSON.
        headers: as they came.
        offset, raw_size: where the message is in its partition; -1 and 0 when not subscribed in order.
    """

    version: int
    headers: bytes
    offset: int
    raw_size: int


# -- commands ----------------------------------------------------------------------------------------------------------


def sub_order(topic: str, channel: str, partition: int, command: str = SUB_ORDER) -> bytes:
    """``SUB_ORDER``: one message at a time, in the order of the partition.

    Args:
        command: ``SUB_ORDER`` or ``SUB_ORDERED``; the same thing under another name.
    """
    return b"%s %s %s%s\n" % (command.encode(), target(topic), channel_bytes(channel), partition_bytes(partition))


def sub_advanced(topic: str, channel: str, partition: int | None = None, start: str | None = None) -> bytes:
    """``SUB_ADVANCED``: messages come as of ``SUB``, each with its place in the partition as of ``SUB_ORDER``.

    Args:
        partition: None for every one that the nsqd has.
        start: ``timestamp:<s>``, ``virtual_queue:<bytes>``, ``msgcount:<count>`` or ``special:-1``, in the partition:
            where the channel begins, if this is its first consumer.
    """
    line = b"SUB_ADVANCED %s %s%s" % (target(topic), channel_bytes(channel), partition_bytes(partition))
    if start is None:
        return line + b"\n"
    if partition is None:
        raise LocalProtocolError("E_BAD_PARTITION", f"start {start} without a partition; it is a place in one")
    if _START.fullmatch(start) is None:
        raise LocalProtocolError(
            "E_INVALID",
            f"start {start[:100]!r} is not timestamp:, virtual_queue: or msgcount: and digits, or special:-1",
        )
    return b"%s %s\n" % (line, start.encode())


def pub_trace(topic: str, partition: int, trace_id: int, body: bytes) -> bytes:
    """``PUB_TRACE``."""
    return b"".join((b"PUB_TRACE ", target(topic, partition), b"\n", *_traced(trace_id, body)))


def mpub_trace(topic: str, partition: int, messages: Sequence[tuple[int, bytes]]) -> bytes:
    """``MPUB_TRACE`` of (trace id, body); the answer says where the first is stored."""
    parts = [part for trace_id, body in messages for part in _traced(trace_id, body)]
    return _several(b"MPUB_TRACE ", topic, partition, len(messages), parts)


def pub_ext(topic: str, partition: int | None, headers: bytes, body: bytes) -> bytes:
    """``PUB_EXT``; ``headers`` is a JSON object. Without a partition: only our nsqd takes it."""
    return b"".join((b"PUB_EXT ", target(topic, partition), b"\n", *_with_headers(headers, body)))


def mpub_ext(topic: str, partition: int | None, messages: Sequence[tuple[bytes, bytes]]) -> bytes:
    """``MPUB_EXT`` of (headers, body). Without a partition: only our nsqd takes it."""
    parts = [part for headers, body in messages for part in _with_headers(headers, body)]
    return _several(b"MPUB_EXT ", topic, partition, len(messages), parts)


def _several(command: bytes, topic: str, partition: int | None, count: int, parts: list[bytes]) -> bytes:
    if not count:
        raise LocalProtocolError("E_BAD_MESSAGE", f"{command.decode().strip()} of no message; at least one is needed")
    total = UINT32.size + sum(map(len, parts))
    head = (command, target(topic, partition), b"\n", UINT32.pack(total), UINT32.pack(count))
    return b"".join((*head, *parts))


def _traced(trace_id: int, body: bytes) -> tuple[bytes, bytes, bytes]:
    if not 0 <= trace_id <= TRACE_ID_MAX:
        raise LocalProtocolError("INVALID_TRACE_ID", f"trace id {trace_id} is not within 0 and 2^64-1")
    return UINT32.pack(TRACE_ID.size + len(_not_empty(body))), TRACE_ID.pack(trace_id), body


def _with_headers(headers: bytes, body: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    if len(headers) > HEADERS_SIZE_MAX:
        raise LocalProtocolError("E_BAD_EXT", f"headers of {len(headers)} bytes, at most {HEADERS_SIZE_MAX}")
    size = HEADERS_SIZE.size + len(headers) + len(_not_empty(body))
    return UINT32.pack(size), HEADERS_SIZE.pack(len(headers)), headers, body


def _not_empty(body: bytes) -> bytes:
    if not body:
        raise LocalProtocolError("E_BAD_MESSAGE", "a body is empty; nsqd accepts 1 byte or more")
    return body


# -- answers and messages ----------------------------------------------------------------------------------------------


def parse_stored(data: bytes) -> Stored | None:
    """Read the answer to a traced publish; None for a plain OK, which an older nsqd gives.

    Raises:
        RemoteProtocolError: it is neither.
    """
    if data == b"OK":
        return None
    if len(data) != STORED.size or not data.startswith(b"OK"):
        raise RemoteProtocolError(
            "E_INVALID", f"answer {data[:32]!r} to a traced publish; OK and 28 bytes belong there"
        )
    return Stored(*STORED.unpack(data)[1:])


def stored_reply(stored: Stored) -> bytes:
    """The inverse of :func:`parse_stored`."""
    return STORED.pack(b"OK", *stored)


def split_body(data: bytes, is_extended: bool, is_ordered: bool) -> tuple[Extension, bytes]:
    """Take apart what a message frame carries behind its id.

    Args:
        is_extended: the topic has headers and the connection identified with ``extend_support``.
        is_ordered: the subscription is in order.

    Raises:
        RemoteProtocolError: it is shorter than it says.
    """
    version, headers, offset, raw_size, position = NO_HEADERS, b"", -1, 0, 0
    if is_extended:
        version = _byte_at(data, 0)
        position = 1
        if version != NO_HEADERS:
            size = _size_at(data, 1)
            position = 1 + HEADERS_SIZE.size + size
            headers = data[1 + HEADERS_SIZE.size : position]
    if is_ordered:
        if position + LOCATION.size > len(data):
            raise _too_short(data, position + LOCATION.size)
        offset, raw_size = LOCATION.unpack_from(data, position)
        position += LOCATION.size
    if position > len(data):
        raise _too_short(data, position)
    return Extension(version, headers, offset, raw_size), data[position:]


def joined_body(extension: Extension, body: bytes, is_extended: bool, is_ordered: bool) -> bytes:
    """The inverse of :func:`split_body`."""
    parts: list[bytes] = []
    if is_extended:
        parts.append(bytes((extension.version,)))
        if extension.version != NO_HEADERS:
            parts += (HEADERS_SIZE.pack(len(extension.headers)), extension.headers)
    if is_ordered:
        parts.append(LOCATION.pack(extension.offset, extension.raw_size))
    return b"".join((*parts, body))


def split_id(message_id: bytes) -> tuple[int, int]:
    """Internal id and trace id of a message of a partition."""
    internal_id, trace_id = RAW_ID.unpack(message_id)
    return internal_id, trace_id


def _byte_at(data: bytes, position: int) -> int:
    if position >= len(data):
        raise _too_short(data, position + 1)
    return data[position]


def _size_at(data: bytes, position: int) -> int:
    if position + HEADERS_SIZE.size > len(data):
        raise _too_short(data, position + HEADERS_SIZE.size)
    size: int = HEADERS_SIZE.unpack_from(data, position)[0]
    return size


def _too_short(data: bytes, needed: int) -> RemoteProtocolError:
    return RemoteProtocolError("E_INVALID", f"message of {len(data)} bytes says that it has {needed} of headers alone")
