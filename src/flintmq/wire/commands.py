"""Commands from client to server: the table, and how each is put on the wire.

Serialisers only build bytes; they check what the protocol would refuse and raise :class:`LocalProtocolError`, so that
nothing illegal is sent. What the server parses from these bytes is in :mod:`flintmq.wire.server`.

Source: reference/nsq.md 1.4, seed 004; OFFSETS, FETCH and CURSOR: docs/reference/protocol.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Literal

from flintmq.errors import LocalProtocolError
from flintmq.limits import MESSAGE_ID_SIZE
from flintmq.names import is_valid_name
from flintmq.wire.frames import UINT32

MAGIC_V2 = b"  V2"
FETCH_BODY = Struct(">QQII")
NOP = b"NOP\n"
CLS = b"CLS\n"


@dataclass(frozen=True, slots=True)
class Command:
    """One row of the command table.

    Attributes:
        form: the line as documented.
        reply: what success answers with; empty for commands that are not answered.
        states: where it is legal: any of ``init``, ``subscribed``, ``closing``.
    """

    name: str
    form: str
    reply: str
    states: tuple[str, ...]
    origin: Literal["nsq", "youzan", "flintmq"]
    about: str


_INIT = ("init",)
_CONSUMING = ("subscribed", "closing")
_ANY = ("init", "subscribed", "closing")
_IN_ORDER = " <topic> <channel> <partition>\\n"
_ADVANCED_FORM = "SUB_ADVANCED <topic> <channel> [<partition> [<start>]]\\n"
_MPUB_FORM = "MPUB <topic> [<partition>]\\n[4 size][4 count]{[4 size][body]}"
_DPUB_FORM = "DPUB <topic> <defer_ms> [<partition>]\\n[4 size][body]"
_MDPUB_FORM = "MDPUB <topic> <defer_ms> [<partition>]\\n[4 size][4 count]{[4 size][body]}"
_PUB_ONCE_FORM = "PUB_ONCE <topic> <partition|-> <producer_id> <sequence>\\n[4 size][body]"
_MPUB_ONCE_FORM = "MPUB_ONCE <topic> <partition|-> <producer_id> <first_sequence>\\n[4 size][4 count]{[4 size][body]}"
_PUB_TRACE_FORM = "PUB_TRACE <topic> <partition>\\n[4 size][8 trace id][body]"
_PUB_EXT_FORM = "PUB_EXT <topic> <partition>\\n[4 size][2 size][JSON][body]"
_MPUB_TRACE_FORM = "MPUB_TRACE <topic> <partition>\\n[4 size][4 count]{[4 size][8 trace id][body]}"
_MPUB_EXT_FORM = "MPUB_EXT <topic> <partition>\\n[4 size][4 count]{[4 size][2 size][JSON][body]}"
_STORED = "OK and 28 bytes"
_FETCH_FORM = "FETCH <topic> <partition>\\n[8 start][8 end][4 bytes_max][4 epoch]"
_CURSOR_FORM = "CURSOR <topic> <channel> <partition> <sequence>\\n"
_ROWS = (
    Command("IDENTIFY", "IDENTIFY\\n[4 size][JSON]", "OK or JSON", _INIT, "nsq", "describe the client, negotiate"),
    Command("AUTH", "AUTH\\n[4 size][secret]", "JSON", _INIT, "nsq", "authorise the connection"),
    Command("SUB", "SUB <topic> <channel> [<partition>]\\n", "OK", _INIT, "nsq", "subscribe to a channel"),
    Command("SUB_ORDER", f"SUB_ORDER{_IN_ORDER}", "OK", _INIT, "youzan", "subscribe to a partition, in its order"),
    Command("SUB_ORDERED", f"SUB_ORDERED{_IN_ORDER}", "OK", _INIT, "youzan", "SUB_ORDER under its older name"),
    Command("SUB_ADVANCED", _ADVANCED_FORM, "OK", _INIT, "youzan", "subscribe, and the first one says from where"),
    Command("PUB", "PUB <topic> [<partition>]\\n[4 size][body]", "OK", _ANY, "nsq", "publish one message"),
    Command("MPUB", _MPUB_FORM, "OK", _ANY, "nsq", "publish several messages"),
    Command("DPUB", _DPUB_FORM, "OK", _ANY, "nsq", "publish for later delivery"),
    Command("MDPUB", _MDPUB_FORM, "OK", _ANY, "flintmq", "publish several messages for later delivery"),
    Command("PUB_ONCE", _PUB_ONCE_FORM, "OK", _ANY, "flintmq", "publish one message, unless it was before"),
    Command("MPUB_ONCE", _MPUB_ONCE_FORM, "OK", _ANY, "flintmq", "publish several messages, unless they were before"),
    Command("PUB_TRACE", _PUB_TRACE_FORM, _STORED, _ANY, "youzan", "publish one message with a trace id"),
    Command("MPUB_TRACE", _MPUB_TRACE_FORM, _STORED, _ANY, "youzan", "publish several messages with trace ids"),
    Command("PUB_EXT", _PUB_EXT_FORM, f"OK, or {_STORED}", _ANY, "youzan", "publish one message with headers"),
    Command("MPUB_EXT", _MPUB_EXT_FORM, "OK", _ANY, "youzan", "publish several messages with headers"),
    Command("RDY", "RDY <count>\\n", "", _CONSUMING, "nsq", "how many messages may be in flight"),
    Command("FIN", "FIN <id>\\n", "", _CONSUMING, "nsq", "finish a message"),
    Command("REQ", "REQ <id> <timeout_ms>\\n", "", _CONSUMING, "nsq", "give a message back"),
    Command("TOUCH", "TOUCH <id>\\n", "", _CONSUMING, "nsq", "restart a message's timeout"),
    Command("CLS", "CLS\\n", "CLOSE_WAIT", ("subscribed",), "nsq", "ask for no more messages"),
    Command("NOP", "NOP\\n", "", _ANY, "nsq", "answer a heartbeat"),
    Command("OFFSETS", "OFFSETS <topic> [<timestamp_ns>]\\n", "JSON", _ANY, "flintmq", "where partitions begin, end"),
    Command("FETCH", _FETCH_FORM, "[8 next][batches]", _ANY, "flintmq", "read stored batches"),
    Command("CURSOR", _CURSOR_FORM, "JSON", _ANY, "flintmq", "create a channel at a position, or confirm up to it"),
)
COMMANDS = {row.name: row for row in _ROWS}


def _topic(name: str) -> bytes:
    if not is_valid_name(name):
        raise LocalProtocolError(
            "E_BAD_TOPIC", f"topic name {name!r} is not valid: 1 to 64 of [.a-zA-Z0-9_-], optionally #ephemeral"
        )
    return name.encode()


def partition_bytes(partition: int | None) -> bytes:
    """A partition as it ends a command's line: behind a space; empty when none is named."""
    if partition is None:
        return b""
    if partition < 0:
        raise LocalProtocolError("E_BAD_PARTITION", f"partition {partition} is negative")
    return b" %d" % partition


def target(topic: str, partition: int | None = None) -> bytes:
    """A topic, or one of its partitions, as a command names it."""
    return _topic(topic) if partition is None else _topic(topic) + partition_bytes(partition)


def channel_bytes(name: str) -> bytes:
    """A channel as a command names it."""
    if not is_valid_name(name):
        raise LocalProtocolError(
            "E_BAD_CHANNEL", f"channel name {name!r} is not valid: 1 to 64 of [.a-zA-Z0-9_-], optionally #ephemeral"
        )
    return name.encode()


def identify(body: bytes) -> bytes:
    """``IDENTIFY`` with a JSON body."""
    return b"IDENTIFY\n" + UINT32.pack(len(body)) + body


def auth(secret: bytes) -> bytes:
    """``AUTH`` with a secret."""
    return b"AUTH\n" + UINT32.pack(len(secret)) + secret


def sub(topic: str, channel: str, partition: int | None = None) -> bytes:
    """``SUB``, to one partition of a redesigned NSQ if it is named."""
    return b"SUB %s %s%s\n" % (_topic(topic), channel_bytes(channel), partition_bytes(partition))


def pub(topic: str, body: bytes, partition: int | None = None) -> bytes:
    """``PUB``, to one partition of a redesigned NSQ if it is named; the body must not be empty."""
    if not body:
        raise LocalProtocolError("E_BAD_MESSAGE", "PUB of an empty body; nsqd accepts 1 byte or more")
    return b"".join((b"PUB ", target(topic, partition), b"\n", UINT32.pack(len(body)), body))


def mpub(topic: str, bodies: Sequence[bytes], partition: int | None = None) -> bytes:
    """``MPUB``, to one partition of a redesigned NSQ if it is named; at least one body, none empty."""
    return several(b"MPUB " + target(topic, partition), bodies)


def several(line: bytes, bodies: Sequence[bytes]) -> bytes:
    """A command of several bodies: at least one, none empty."""
    if not bodies or not all(bodies):
        command = line.split(b" ", 1)[0].decode()
        raise LocalProtocolError("E_BAD_MESSAGE", f"{command} needs at least one body and none may be empty")
    size = 4 + 4 * len(bodies) + sum(map(len, bodies))
    parts: list[bytes] = [line, b"\n", UINT32.pack(size), UINT32.pack(len(bodies))]
    fields: list[bytes] = [b""] * (2 * len(bodies))
    fields[0::2] = map(UINT32.pack, map(len, bodies))
    fields[1::2] = bodies
    return b"".join(parts + fields)


def dpub(topic: str, defer_ms: int, body: bytes, partition: int | None = None) -> bytes:
    """``DPUB``: deliver not before ``defer_ms`` milliseconds from now.

    Args:
        partition: behind the delay, as only our nsqd has it.
    """
    if not body:
        raise LocalProtocolError("E_BAD_MESSAGE", "DPUB of an empty body; nsqd accepts 1 byte or more")
    line = _deferring_line(b"DPUB", topic, defer_ms, partition)
    return b"".join((line, b"\n", UINT32.pack(len(body)), body))


def mdpub(topic: str, defer_ms: int, bodies: Sequence[bytes], partition: int | None = None) -> bytes:
    """``MDPUB``: several messages, delivered not before ``defer_ms`` milliseconds from now; only our nsqd has it."""
    return several(_deferring_line(b"MDPUB", topic, defer_ms, partition), bodies)


def _deferring_line(command: bytes, topic: str, defer_ms: int, partition: int | None) -> bytes:
    if defer_ms < 0:
        raise LocalProtocolError("E_INVALID", f"{command.decode()} delay {defer_ms} ms is negative")
    return b"%s %s %d%s" % (command, _topic(topic), defer_ms, partition_bytes(partition))


def rdy(count: int) -> bytes:
    """``RDY``."""
    if count < 0:
        raise LocalProtocolError("E_INVALID", f"RDY count {count} is negative")
    return b"RDY %d\n" % count


def _message_id(message_id: bytes) -> bytes:
    if len(message_id) != MESSAGE_ID_SIZE:
        raise LocalProtocolError("E_INVALID", f"message id {message_id!r} has {len(message_id)} bytes, not 16")
    return message_id


def fin(message_id: bytes) -> bytes:
    """``FIN``."""
    return b"FIN " + _message_id(message_id) + b"\n"


def fins(message_ids: Iterable[bytes]) -> bytes:
    """A run of ``FIN`` as one write; ids are taken as they came from the wire."""
    joined = b"\nFIN ".join(message_ids)
    return b"FIN " + joined + b"\n" if joined else b""


def req(message_id: bytes, timeout_ms: int) -> bytes:
    """``REQ``: give the message back, to be delivered again after ``timeout_ms``."""
    if timeout_ms < 0:
        raise LocalProtocolError("E_INVALID", f"REQ timeout {timeout_ms} ms is negative")
    return b"REQ %s %d\n" % (_message_id(message_id), timeout_ms)


def touch(message_id: bytes) -> bytes:
    """``TOUCH``."""
    return b"TOUCH " + _message_id(message_id) + b"\n"


def offsets(topic: str, timestamp_ns: int | None = None) -> bytes:
    """``OFFSETS``; with a timestamp the answer also says where the first message at or after it is."""
    return (
        b"OFFSETS %s\n" % _topic(topic) if timestamp_ns is None else b"OFFSETS %s %d\n" % (_topic(topic), timestamp_ns)
    )


def fetch(topic: str, partition: int, start: int, end: int, bytes_max: int, epoch: int = 0) -> bytes:
    """``FETCH``: the stored batches that overlap sequences ``start`` to ``end`` (exclusive)."""
    return b"FETCH %s %d\n" % (_topic(topic), partition) + FETCH_BODY.pack(start, end, bytes_max, epoch)


def cursor(topic: str, channel: str, partition: int, sequence: int) -> bytes:
    """``CURSOR``: create the channel at ``sequence`` (-1 latest, -2 earliest), or confirm everything below it."""
    return b"CURSOR %s %s %d %d\n" % (_topic(topic), channel_bytes(channel), partition, sequence)
