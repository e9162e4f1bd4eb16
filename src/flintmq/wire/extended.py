"""Additions of the redesigned NSQ to commands, answers and message frames: partitions, order, trace, headers.

Byte pictures of what publishes (trace ids and headers in front of bodies): :mod:`flintmq.wire.bodies`; of the rest
(big-endian)::

    answer to a traced publish          "OK" [8 internal id][8 trace id][8 offset][4 raw size]

    message of a partition              message id = [8 internal id][8 trace id]
    body of a frame                     [1 version [2 size][headers]]   only on an extended topic; version 0 has no more
                                        [8 offset][4 raw size]          only with SUB_ORDER or SUB_ADVANCED
                                        [body]

Serialisers check what the protocol would refuse and raise :class:`LocalProtocolError`. ``SUB_ORDER`` is the seeds'
name of the command; Youzan's daemons know it as ``SUB_ORDERED``, which this module sends on request.

Source: Youzan's smart client, "Ordered Message Consumption" and "Message Tracing", Youzan's NSQ, Youzan's TCP protocol.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from flintmq.errors import RemoteProtocolError
from flintmq.message import LOCATION, NO_HEADERS, RAW_ID
from flintmq.wire.bodies import HEADERS_SIZE as HEADERS_SIZE
from flintmq.wire.bodies import TRACE_ID_MAX as TRACE_ID_MAX
from flintmq.wire.commands import COMMANDS
from flintmq.wire.params import NO_PARTITION

STORED = Struct(">2sQQQI")

SUB_ORDER, SUB_ORDERED = "SUB_ORDER", "SUB_ORDERED"


class Stored(NamedTuple):
    """The place at which a traced publish was stored.

    Attributes:
        internal_id: ``partition << 50 | sequence``.
        trace_id: as sent; 0 for several messages.
        offset: bytes of the partition's log before the message, which only grow.
        raw_size: bytes that it takes there; of several messages all of theirs. ``offset + raw_size`` is the offset of
            what is published next.
    """

    internal_id: int
    trace_id: int
    offset: int
    raw_size: int


class Extension(NamedTuple):
    """The fields in front of a body.

    Attributes:
        version: of the headers: 0 none, 2 a tag, 4 JSON.
        headers: as they came.
        offset, raw_size: where the message is in its partition, the next one being at ``offset + raw_size``; -1 and 0
            when not subscribed in order.
    """

    version: int
    headers: bytes
    offset: int
    raw_size: int


# -- commands ----------------------------------------------------------------------------------------------------------


def sub_order(topic: str, channel: str, partition: int, command: str = SUB_ORDER) -> bytes:
    """Encode ``SUB_ORDER``: one message at a time, in the order of the partition.

    Args:
        command: ``SUB_ORDER`` or ``SUB_ORDERED``; the same thing under another name.
    """
    return COMMANDS[command].line(topic, channel, partition, None)


def sub_advanced(topic: str, channel: str, partition: int | None = None, start: str | None = None) -> bytes:
    """Encode ``SUB_ADVANCED``: messages come as of ``SUB``, each with its place in the partition as of ``SUB_ORDER``.

    Args:
        partition: None for every one that the nsqd has; with a start, for the only one of the topic.
        start: ``timestamp:<s>``, ``virtual_queue:<bytes>``, ``msgcount:<count>`` or ``special:-1``, in the partition:
            where the channel begins, if this is its first consumer.
    """
    command = COMMANDS["SUB_ADVANCED"]
    if start is None or partition is not None:
        return command.line(topic, channel, partition, start)
    written = command.line(topic, channel, 0, start).split(b" ")
    written[3] = NO_PARTITION
    return b" ".join(written)


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
    """Encode the answer to a traced publish; the inverse of :func:`parse_stored`."""
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


def split_id(message_id: bytes) -> tuple[int, int]:
    """Return internal id and trace id of a message of a partition."""
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
