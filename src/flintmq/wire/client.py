"""The client's side of protocol V2: calls in, bytes out; bytes in, events out.

Rules of this file:

- Every command that nsqd answers is given a *token* and stays in :attr:`ClientConnection.pending` until its answer
  comes; nsqd answers in the order of the commands, so the oldest pending command is the one that is answered.
- Consecutive message frames of one read are one :class:`Messages` event of plain tuples. Nothing else is made per
  message: this is the hot path of every consumer. Frames of one size that follow each other are taken at once.
- What a command is, and in which states it may be sent, say the rows of :mod:`flintmq.wire.commands`.
- States are taken as soon as a command is built (SUB -> subscribed): a SUB that is refused is fatal for the connection.
- A frame is not gathered beyond ``frame_size_max``, and what was received is joined once per frame, not once per read.
- :class:`Broken` is the last event of a connection.
- To a redesigned nsqd commands name a partition; it stays open after errors on which NSQ closes (``unknown_outcome``).

Source: Youzan's TCP protocol (partitions, order, trace, headers), NSQ's TCP protocol, NSQ's client guide.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from struct import Struct

import msgspec

from flintmq.errors import UNREADABLE_JSON, LocalProtocolError, RemoteProtocolError
from flintmq.limits import MESSAGE_ID_SIZE
from flintmq.message import FRAME_HEADER, FRAME_OVERHEAD_BYTES, MESSAGE_HEADER, SIZE_FIELD_BYTES, equal_frames
from flintmq.wire import commands, extended
from flintmq.wire.codes import CODES, is_fatal
from flintmq.wire.commands import BROKEN as BROKEN
from flintmq.wire.commands import CLOSING as CLOSING
from flintmq.wire.commands import COMMANDS, Command
from flintmq.wire.commands import INIT as INIT
from flintmq.wire.commands import SUBSCRIBED as SUBSCRIBED
from flintmq.wire.frames import ERROR, HEARTBEAT, MESSAGE, RESPONSE
from flintmq.wire.identify import IdentifyRequest

FRAME_SIZE_MAX_DEFAULT = 64 * 1024 * 1024
MESSAGE_SIZE_MIN = FRAME_OVERHEAD_BYTES - SIZE_FIELD_BYTES
EQUAL_FRAMES_MIN = 16
"""Fewer frames of one size are taken one by one."""
EQUAL_FRAMES_EVERY = 32
"""After so many that were taken one by one sizes are looked at again; where they differ that costs next to nothing."""
EQUAL_FRAMES_LOOKED_AT = 64
"""So many are looked at together first, then twice as many with each time that all were of one size."""
MESSAGE_CODES = {row.failure: row.name for row in COMMANDS.values() if row.failure and not row.reply}
"""Errors about one message, which answer no pending command, and the command that each is about."""
_HTTP = int.from_bytes(b"HTTP")  # in the place of a size
_PUB, _MPUB = COMMANDS["PUB"], COMMANDS["MPUB"]
Record = tuple[int, int, bytes, bytes]
"""A message as it came: timestamp in ns, attempts, message id, body."""


class Features(msgspec.Struct, kw_only=True):
    """nsqd's answer to IDENTIFY; what an older nsqd does not send has the value it had then.

    Times in milliseconds; ``max_rdy_count`` is 2500 for an nsqd that does not negotiate (NSQ's client guide).
    """

    max_rdy_count: int = 2500
    version: str = ""
    max_msg_timeout: int = 900_000
    msg_timeout: int = 60_000
    tls_v1: bool = False
    deflate: bool = False
    deflate_level: int = 6
    snappy: bool = False
    sample_rate: int = 0
    auth_required: bool = False
    producer_sequences: bool = False
    nsqd_run_id: str = ""


class Authorised(msgspec.Struct, kw_only=True):
    """nsqd's answer to AUTH: who its auth server says the client is."""

    identity: str = ""
    identity_url: str = ""
    permission_count: int = 0


@dataclass(slots=True)
class Messages:
    """One or more messages, in the order they came.

    Attributes:
        read: bytes that were read; the frames of these messages are those from ``begin`` to ``end``.
    """

    records: list[Record]
    read: bytes = field(default=b"", compare=False, repr=False)
    begin: int = field(default=0, compare=False)
    end: int = field(default=0, compare=False)

    @property
    def frames(self) -> bytes:
        """The messages as they came: one frame behind the other, a copy."""
        return self.read[self.begin : self.end]


@dataclass(slots=True)
class Reply:
    """The answer to the oldest pending command."""

    command: str
    token: object
    data: bytes


@dataclass(slots=True)
class Refused:
    """An error frame for the oldest pending command, or for none (``command`` empty)."""

    command: str
    token: object
    code: str
    detail: str
    is_fatal: bool


@dataclass(slots=True)
class MessageFailed:
    """FIN, REQ or TOUCH was too late; the connection goes on."""

    command: str
    code: str
    detail: str
    message_id: bytes


@dataclass(slots=True)
class Heartbeat:
    """nsqd wants a sign of life: answer with :meth:`ClientConnection.nop` unless something else is sent."""


@dataclass(slots=True)
class Broken:
    """nsqd sent what no nsqd sends; the connection is of no more use."""

    error: RemoteProtocolError


Event = Messages | Reply | Refused | MessageFailed | Heartbeat | Broken


@dataclass(slots=True)
class Unanswered:
    """A command whose answer never came.

    Attributes:
        maybe_executed: False only when nsqd certainly did not execute it, because it refused an earlier command and
            executes nothing after that.
    """

    command: str
    token: object
    maybe_executed: bool


class ClientConnection:
    """The protocol state of one connection: what may be sent, what is still to be answered, what was half received.

    Args:
        frame_size_max: largest frame accepted from nsqd, in bytes.
    """

    __slots__ = (
        "state", "pending", "_frame_size_max", "_chunks", "_held_bytes", "_needed_bytes", "_skips_rest",
        "_names_partitions",
    )  # fmt: skip

    def __init__(self, frame_size_max: int = FRAME_SIZE_MAX_DEFAULT) -> None:
        self.state = INIT
        self.pending: deque[tuple[str, object]] = deque()
        self._frame_size_max = frame_size_max
        self._chunks: list[bytes] = []
        self._held_bytes = 0
        self._needed_bytes = 0
        self._skips_rest = False
        self._names_partitions = False

    def describe(self) -> str:
        """Say in one line where the connection stands."""
        waiting = ",".join(name for name, _ in self.pending) or "-"
        return f"{self.state} pending={waiting} held_bytes={self._held_bytes}"

    # --- calls in, bytes out ---

    def _check(self, row: Command) -> None:
        if self.state not in row.states:
            raise LocalProtocolError("E_INVALID", f"cannot {row.name} in state {self.state}")

    def _send(self, row: Command, data: bytes, token: object, partition: int | None = None) -> bytes:
        """Note what is sent: what waits for an answer, and the state behind it."""
        self._check(row)
        if row.reply:
            self.pending.append((row.name, token))
        if row.then:
            self.state = row.then
        self._names_partitions |= partition is not None
        return data

    def open(self) -> bytes:
        """The first bytes of a connection."""
        return commands.MAGIC_V2

    def identify(self, request: IdentifyRequest, token: object = None) -> bytes:
        """Describe the client and ask for features."""
        return self._send(COMMANDS["IDENTIFY"], commands.identify(msgspec.json.encode(request)), token)

    def auth(self, secret: bytes, token: object = None) -> bytes:
        """Authorise the connection."""
        return self._send(COMMANDS["AUTH"], commands.auth(secret), token)

    def expect_layer(self, name: str) -> None:
        """Note that nsqd answers OK once both sides have put in a layer of this name; there is no command for it."""
        self.pending.append((name, None))

    def sub(self, topic: str, channel: str, token: object = None, partition: int | None = None) -> bytes:
        """Subscribe; nothing is delivered before :meth:`rdy`."""
        return self._send(COMMANDS["SUB"], commands.sub(topic, channel, partition), token, partition)

    def sub_order(
        self, topic: str, channel: str, partition: int, token: object = None, command: str = extended.SUB_ORDER
    ) -> bytes:
        """Subscribe in order; ``command`` is ``SUB_ORDER`` or ``SUB_ORDERED``."""
        data = extended.sub_order(topic, channel, partition, command)
        return self._send(COMMANDS[command], data, token, partition)

    def sub_advanced(
        self, topic: str, channel: str, token: object, partition: int | None = None, start: str | None = None
    ) -> bytes:
        """Subscribe, and say where the channel begins; messages come with their place in the partition."""
        data = extended.sub_advanced(topic, channel, partition, start)
        return self._send(COMMANDS["SUB_ADVANCED"], data, token, partition)

    def publish(
        self,
        topic: str,
        bodies: Sequence[bytes],
        token: object = None,
        partition: int | None = None,
        defer_ms: int | None = None,
        trace_ids: Sequence[int] | None = None,
        headers: Sequence[bytes] | None = None,
        producer_id: str | None = None,
        sequence: int = 0,
    ) -> bytes:
        """Publish one message, or several as one, with the command that says all of it.

        Args:
            partition: None where the server chooses; some servers want it with trace ids and headers.
            defer_ms: milliseconds before they are delivered; only FlintMQ's nsqd takes it with a partition.
            trace_ids: one for each body; the answer is for :func:`flintmq.wire.extended.parse_stored`.
            headers: JSON objects, one for each body.
            producer_id: who counts them, so that none is stored twice; only FlintMQ's nsqd knows it.
            sequence: of the first body then, from 1 on.

        Raises:
            LocalProtocolError: a server would refuse it, or there is no command that says all of it.
        """
        if defer_ms is None and trace_ids is None and headers is None and producer_id is None:
            row = _PUB if len(bodies) == 1 else _MPUB
            return self._send(row, commands.publish(row, topic, bodies, partition), token, partition)
        row = commands.publish_row(
            len(bodies) == 1, defer_ms is not None, trace_ids is not None, headers is not None, producer_id is not None
        )
        fronts: Sequence[object] | None = headers if trace_ids is None else trace_ids
        data = commands.publish(row, topic, bodies, partition, defer_ms or 0, fronts, producer_id, sequence)
        return self._send(row, data, token, partition)

    def cls(self, token: object = None) -> bytes:
        """Ask for no more messages; the answer proves that everything sent before was executed."""
        return self._send(COMMANDS["CLS"], commands.CLS, token)

    def rdy(self, count: int) -> bytes:
        """Say how many messages may be in flight."""
        self._check(COMMANDS["RDY"])
        return commands.rdy(count)

    def finish(self, message_ids: Sequence[bytes]) -> bytes:
        """Finish a run of messages."""
        self._check(COMMANDS["FIN"])
        return commands.fins(message_ids)

    def requeue(self, message_id: bytes, timeout_ms: int) -> bytes:
        """Give a message back, to be delivered again after ``timeout_ms``."""
        self._check(COMMANDS["REQ"])
        return commands.req(message_id, timeout_ms)

    def touch(self, message_id: bytes) -> bytes:
        """Restart a message's timeout."""
        self._check(COMMANDS["TOUCH"])
        return commands.touch(message_id)

    def nop(self) -> bytes:
        """Answer a heartbeat."""
        return commands.NOP

    def close(self) -> list[Unanswered]:
        """End the connection and return the commands that were never answered, oldest first."""
        self.state = BROKEN
        unanswered = [Unanswered(name, token, not self._skips_rest) for name, token in self.pending]
        self.pending.clear()
        self._chunks.clear()
        self._held_bytes = 0
        return unanswered

    # --- bytes in, events out ---

    def receive(self, data: bytes) -> list[Event]:
        """Take what was read from the connection.

        A fatal :class:`Refused` and a :class:`Broken` end the connection: bytes that follow are not looked at.
        """
        if self.state == BROKEN:
            return []
        if self._held_bytes:
            self._chunks.append(data)
            self._held_bytes += len(data)
            if self._held_bytes < self._needed_bytes:
                return []
            data = b"".join(self._chunks)
            self._chunks.clear()
            self._held_bytes = 0
        events: list[Event] = []
        position = self._parse(data, events)
        if self.state != BROKEN and position < len(data):
            self._chunks.append(data[position:] if position else data)
            self._held_bytes = len(data) - position
        return events

    def _parse(self, data: bytes, events: list[Event]) -> int:
        """Turn the complete frames of ``data`` into events; return where the first incomplete one begins."""
        position = 0
        end = len(data)
        while True:
            records: list[Record] = []
            begin, position = position, _take_messages(data, position, records)
            if records:
                events.append(Messages(records, data, begin, position))
            if end - position < FRAME_HEADER.size:
                self._needed_bytes = FRAME_HEADER.size
                return position
            size, frame_type = FRAME_HEADER.unpack_from(data, position)
            stop: int = position + SIZE_FIELD_BYTES + size
            if error := self._illegal(size, frame_type):
                self.state = BROKEN
                events.append(Broken(error))
                return position
            if stop > end:
                self._needed_bytes = stop - position
                return position
            event = self._control(frame_type, data[position + FRAME_HEADER.size : stop])
            events.append(event)
            position = stop
            if isinstance(event, Broken) or (isinstance(event, Refused) and event.is_fatal):
                self.state = BROKEN
                return position

    def _illegal(self, size: int, frame_type: int) -> RemoteProtocolError | None:
        if frame_type > MESSAGE and size == _HTTP:
            port = "name nsqd's TCP port, 4150 where nothing else is set"
            return RemoteProtocolError("E_INVALID", f"what answers speaks HTTP: not an nsqd? {port}")
        if frame_type > MESSAGE:
            return RemoteProtocolError("E_INVALID", f"frame of type {frame_type}; nsqd sends 0, 1 and 2: not an nsqd?")
        smallest = MESSAGE_SIZE_MIN if frame_type == MESSAGE else SIZE_FIELD_BYTES
        if size < smallest:
            return RemoteProtocolError("E_INVALID", f"frame of type {frame_type} and size {size}, at least {smallest}")
        if size > self._frame_size_max:
            return RemoteProtocolError(
                "E_INVALID",
                f"frame of {size} bytes, at most {self._frame_size_max}: raise frame_size_max for such messages",
            )
        return None

    def _control(self, frame_type: int, data: bytes) -> Event:
        if frame_type == ERROR:
            return self._error(data)
        assert frame_type == RESPONSE, "complete message frames are taken before"
        if data == HEARTBEAT:
            return Heartbeat()
        if not self.pending:
            return Broken(RemoteProtocolError("E_INVALID", f"answer {data[:32]!r} to no command"))
        name, token = self.pending.popleft()
        return Reply(name, token, data)

    def _error(self, data: bytes) -> Event:
        code_bytes, _, rest = data.partition(b" ")
        code = code_bytes.decode("utf-8", "backslashreplace")
        detail = rest.decode("utf-8", "backslashreplace")
        if command := MESSAGE_CODES.get(code):
            start = len(command) + 1  # the id may hold any bytes, also spaces: it is taken by position
            return MessageFailed(command, code, detail, rest[start : start + MESSAGE_ID_SIZE])
        row = CODES.get(code)
        fatal = is_fatal(code) and not (self._names_partitions and row is not None and row.unknown_outcome)
        # An nsqd that knows the code closes and executes nothing more. Only for codes that leave the outcome open
        # (Youzan's nsqd stays open after E_PUB_FAILED) the commands behind may have been executed.
        self._skips_rest = fatal and row is not None and not row.unknown_outcome
        name, token = self.pending.popleft() if self.pending else ("", None)
        return Refused(name, token, code, detail, fatal)


def _take_messages(data: bytes, position: int, records: list[Record]) -> int:
    """Append the run of complete message frames that starts at ``position``; return where it ends."""
    unpack = MESSAGE_HEADER.unpack_from
    append = records.append
    last = len(data) - FRAME_OVERHEAD_BYTES
    end = len(data)
    looks_at, most = position, EQUAL_FRAMES_LOOKED_AT
    stop: int
    while position <= last:
        size, frame_type, timestamp_ns, attempts, message_id = unpack(data, position)
        stop = position + 4 + size  # SIZE_FIELD_BYTES, as a constant of the loop
        if frame_type != 2 or stop > end or size < 30:  # MESSAGE, MESSAGE_SIZE_MIN
            break
        if position >= looks_at:
            size += 4
            looks_at = position + EQUAL_FRAMES_EVERY * size
            if end - position >= EQUAL_FRAMES_MIN * size:
                count = equal_frames(data, position, size, most)
                if count >= EQUAL_FRAMES_MIN:
                    stop = looks_at = position + count * size
                    records += _record_of(size).iter_unpack(memoryview(data)[position:stop])
                    position = stop
                    most = 2 * most if count == most else EQUAL_FRAMES_LOOKED_AT
                    continue
        append((timestamp_ns, attempts, message_id, data[position + 34 : stop]))  # FRAME_OVERHEAD_BYTES
        position = stop
    return position


@lru_cache(maxsize=256)
def _record_of(frame_size: int) -> Struct:
    """Return what takes a :data:`Record` out of a message frame of so many bytes."""
    return Struct(f">{FRAME_HEADER.size}xQH{MESSAGE_ID_SIZE}s{frame_size - FRAME_OVERHEAD_BYTES}s")


def parse_features(data: bytes) -> Features:
    """Decode the answer to IDENTIFY; a plain ``OK`` means that nothing was negotiated.

    Raises:
        RemoteProtocolError: neither ``OK`` nor a JSON object with fields of the right types.
    """
    if data == b"OK":
        return Features()
    try:
        return _FEATURES.decode(data)
    except UNREADABLE_JSON as error:
        raise RemoteProtocolError("E_INVALID", f"answer to IDENTIFY cannot be read: {error}") from error


# Made here, while one thread imports this: two threads that have msgspec learn one type at the same time crash the
# process.
_FEATURES = msgspec.json.Decoder(Features)
_AUTHORISED = msgspec.json.Decoder(Authorised)


def parse_authorised(data: bytes) -> Authorised:
    """Decode the answer to AUTH.

    Raises:
        RemoteProtocolError: not a JSON object with fields of the right types.
    """
    try:
        return _AUTHORISED.decode(data)
    except UNREADABLE_JSON as error:
        raise RemoteProtocolError("E_INVALID", f"answer to AUTH cannot be read: {error}") from error
