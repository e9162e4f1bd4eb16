"""The server's side of protocol V2: bytes in, commands out.

Rules of this file:

- Commands are emitted in the order they arrived, and runs of the same kind are one event: a run of FINs is one
  :class:`FinishRun`, the PUBs of one read to one topic are one :class:`Publish` with the bodies of all.
- A :class:`Violation` is the last event of a connection when it is fatal: nothing after it is parsed.
- Transitions are taken as soon as a command is parsed (SUB -> subscribed): a SUB that the server then refuses is fatal,
  so what was parsed after it is dropped with the connection.
- After IDENTIFY and AUTH the parser stops, because the answer decides how the following bytes are to be read; the
  caller goes on with :meth:`ServerConnection.resume`.
- A word where a redesigned NSQ has the partition is read as one; what is no number is :data:`NOT_A_NUMBER`, which NSQ
  ignores, so the caller decides by the topic.
- Ids are lines of text on a plain topic. On one with partitions (``raw_ids``) they are 16 bytes that may hold line
  ends, so these lines are parsed by length.
- No body is gathered beyond the limit that its size field was checked against, and numbers are ASCII digits only.
- An MPUB ends behind its last message, whatever its size says; its messages are held against the limits as they come.
- One call parses at most :data:`COMMANDS_MAX` commands, so that the caller can let others go first; what is left is
  parsed by :meth:`ServerConnection.more` while :attr:`ServerConnection.has_more`.

Source: reference/nsq.md 1.1, 1.3 and 1.4; reference/youzan.md 1.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct

from flintmq.limits import COMMAND_LINE_SIZE_MAX, MESSAGE_ID_SIZE
from flintmq.names import is_valid_name
from flintmq.topic_meta import parse_partition
from flintmq.wire import server_extended, server_once
from flintmq.wire.commands import FETCH_BODY, MAGIC_V2
from flintmq.wire.frames import INT32
from flintmq.wire.refusals import Incomplete as _Incomplete
from flintmq.wire.refusals import Refused as _Refused
from flintmq.wire.server_extended import PublishExtended as PublishExtended
from flintmq.wire.server_once import PublishOnce as PublishOnce
from flintmq.wire.size_walk import SizeWalk, uniform_run

INIT, SUBSCRIBED, CLOSING, BROKEN = "init", "subscribed", "closing", "broken"

NOT_A_NUMBER = -1
"""A partition that is not the number of one."""
NO_PARTITION = b"-1"
"""How clients of the redesigned NSQ say that they name none."""

COMMANDS_MAX = 512
"""Parsed by one call: under a millisecond. A run of FINs counts as one."""
FINISH_RUN_MAX = 2048
"""FINs of one :class:`FinishRun`; also what bounds the formats that are kept."""

_ID_LINE_BYTES = MESSAGE_ID_SIZE + 5  # "FIN " + id + "\n"
_NUMBER_DIGITS_MAX = 19
_FIN_COLUMNS = ((20, b"\n"), (0, b"F"), (1, b"I"), (2, b"N"), (3, b" "))  # a single line's first four are checked
_COUNT_BYTES = 4
_NO_LINE = b"\0"  # begins no command
_read_size = INT32.unpack_from


@dataclass(slots=True)
class Identify:
    """IDENTIFY with its undecoded JSON body."""

    body: bytes


@dataclass(slots=True)
class Auth:
    """AUTH with its secret."""

    secret: bytes


@dataclass(slots=True)
class Subscribe:
    """SUB, SUB_ORDER under either of its names, or SUB_ADVANCED.

    Attributes:
        partition: None when none was named, :data:`NOT_A_NUMBER` when the word is something else.
        command: as it was sent.
        start: the place at which the channel's first consumer wants to begin; None where it is.
    """

    topic: str
    channel: str
    partition: int | None = None
    command: str = "SUB"
    start: str | None = None

    @property
    def is_ordered(self) -> bool:
        """Whether one message at a time is wanted, in the order of the partition."""
        return self.command in ("SUB_ORDER", "SUB_ORDERED")

    @property
    def is_located(self) -> bool:
        """Whether messages are to come with their place in the partition."""
        return self.command != "SUB"


@dataclass(slots=True)
class Publish:
    """One MPUB, DPUB or MDPUB, or a run of PUBs to one topic.

    Attributes:
        command: ``PUB``, ``MPUB``, ``DPUB`` or ``MDPUB``.
        replies: how many ``OK`` the client expects.
        defer_ms: delay before delivery, 0 for none.
        partition: None when none was named, :data:`NOT_A_NUMBER` when the word is something else.
    """

    command: str
    topic: str
    bodies: Sequence[bytes]
    replies: int
    defer_ms: int = 0
    partition: int | None = None


@dataclass(slots=True)
class Ready:
    """RDY."""

    count: int


@dataclass(slots=True)
class FinishRun:
    """Consecutive FINs as internal ids in their order; on a plain topic only ids of 16 hex digits."""

    ids: Sequence[int]


@dataclass(slots=True)
class Finish:
    """A single FIN, the id as it came."""

    message_id: bytes


@dataclass(slots=True)
class Requeue:
    """REQ; ``timeout_ms`` is not limited yet."""

    message_id: bytes
    timeout_ms: int


@dataclass(slots=True)
class Touch:
    """TOUCH."""

    message_id: bytes


@dataclass(slots=True)
class Close:
    """CLS."""


@dataclass(slots=True)
class Nop:
    """NOP."""


@dataclass(slots=True)
class Offsets:
    """OFFSETS; ``timestamp_ns`` is None when it was not given."""

    topic: str
    timestamp_ns: int | None


@dataclass(slots=True)
class Fetch:
    """FETCH."""

    topic: str
    partition: int
    start: int
    end: int
    bytes_max: int
    epoch: int


@dataclass(slots=True)
class Cursor:
    """CURSOR; sequence -1 is latest, -2 earliest."""

    topic: str
    channel: str
    partition: int
    sequence: int


@dataclass(slots=True)
class Violation:
    """The client broke the protocol.

    Attributes:
        code: error code; empty when nsqd closes without an error frame.
    """

    code: str
    detail: str


Event = (
    Identify | Auth | Subscribe | Publish | Ready | FinishRun | Finish | Requeue | Touch | Close | Nop
    | Offsets | Fetch | Cursor | PublishExtended | PublishOnce | Violation
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds the parser enforces; sizes in bytes, times in milliseconds."""

    max_msg_size: int = 1024 * 1024
    max_body_size: int = 5 * 1024 * 1024
    max_rdy_count: int = 2500
    max_req_timeout_ms: int = 3_600_000


def go_quote(text: bytes) -> str:
    """Quote as Go's %q does, because clients compare error texts."""
    parts = ['"']
    escapes = {0x07: "\\a", 0x08: "\\b", 0x0C: "\\f", 0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t", 0x0B: "\\v"}
    for character in text.decode("utf-8", "surrogateescape"):
        point = ord(character)
        if character in '"\\':
            parts.append("\\" + character)
        elif point in escapes:
            parts.append(escapes[point])
        elif 0xDC80 <= point <= 0xDCFF:  # a byte that is not UTF-8
            parts.append(f"\\x{point - 0xDC00:02x}")
        elif character.isprintable():
            parts.append(character)
        elif point < 0x80:
            parts.append(f"\\x{point:02x}")
        else:
            parts.append(f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}")
    parts.append('"')
    return "".join(parts)


def _shown(text: bytes) -> str:
    return text.decode("utf-8", "surrogateescape")


def _number(text: bytes) -> int | None:
    """Parse ASCII digits; empty counts as 0, as in nsqd; None when it is not a number."""
    if not text:
        return 0
    if text.isdigit() and len(text.lstrip(b"0")) <= _NUMBER_DIGITS_MAX:
        return int(text.lstrip(b"0") or b"0")
    return None


def decode_ids(lines: bytes) -> tuple[int, ...] | None:
    """Decode a run of whole ``FIN <16 hex digits>\\n`` lines; None when an id is not 16 lower-case hex digits."""
    count = len(lines) // _ID_LINE_BYTES
    digits = lines.replace(b"FIN ", b"")
    if digits != digits.lower():
        return None  # an id is these 16 bytes, not the number they spell
    try:
        # fromhex skips white space, so the newlines need not be removed; a space inside an id shortens the result
        raw = bytes.fromhex(digits.decode("ascii"))
    except ValueError:
        return None
    return _ids_struct(count).unpack(raw) if len(raw) == 8 * count else None


@lru_cache(maxsize=512)
def _raw_ids_struct(count: int) -> Struct:
    return Struct(">" + "4xQ9x" * count)  # "FIN ", internal id, trace id, line end


@lru_cache(maxsize=512)
def _ids_struct(count: int) -> Struct:
    return Struct(f">{count}Q")


@lru_cache(maxsize=64)
def _uniform_struct(count: int, size: int) -> Struct:
    return Struct(f"4x{size}s" * count)


_UNIFORM_COUNT_MAX = 2048  # bounds the memory of cached formats


def split_bodies(
    data: bytes, start: int, count: int, limits: ServerLimits, added: int = 0
) -> tuple[Sequence[bytes], int] | None:
    """Split ``count`` size-prefixed bodies out of ``data`` from ``start`` on; also where they end.

    None when something is wrong with them or ``data`` ends before they do: a :class:`SizeWalk` says what.

    Args:
        added: what a body may have beside the message; checking the message is then the caller's.
    """
    size_max = limits.max_msg_size + added
    stop = min(len(data), start - _COUNT_BYTES + limits.max_body_size)
    unpack = INT32.unpack_from
    if count > 1 and uniform_run(data, start, count) == count:
        # equal sizes are the common case: cut in few calls
        size = unpack(data, start)[0]
        end = start + (size + 4) * count
        return (_split_uniform(data, start, count, size), end) if size <= size_max and end <= stop else None
    bodies: list[bytes] = []
    position = start
    last = stop - 4
    for _ in range(count):
        if position > last:
            return None
        size = unpack(data, position)[0]
        position += 4
        end = position + size
        if not 0 < size <= size_max or end > stop:
            return None
        bodies.append(data[position:end])
        position = end
    return bodies, position


def _split_uniform(data: bytes, start: int, count: int, size: int) -> Sequence[bytes]:
    if count <= _UNIFORM_COUNT_MAX:
        return _uniform_struct(count, size).unpack_from(data, start)
    bodies: list[bytes] = []
    for first in range(0, count, _UNIFORM_COUNT_MAX):
        unpack = _uniform_struct(min(_UNIFORM_COUNT_MAX, count - first), size).unpack_from
        bodies += unpack(data, start + first * (size + 4))
    return bodies


def parse_mpub_body(data: bytes, limits: ServerLimits) -> Sequence[bytes]:
    """Parse the binary form of HTTP /mpub: what stands behind the size of an MPUB, and nothing else.

    Raises:
        RefusedBody: with the code and text of the error frame.
    """
    try:
        count = _mpub_count(data, 0, limits)
        split = split_bodies(data, _COUNT_BYTES, count, limits)
        if split is None:
            walk = _size_walk(count, limits)
            walk.advance(data, _COUNT_BYTES)
            raise _Refused(*walk.lack)
    except _Refused as refused:
        raise RefusedBody(*refused.args) from None
    bodies, end = split
    if end != len(data):  # which would be lost in silence here; on a connection it is the next command
        raise RefusedBody("E_BAD_BODY", f"MPUB body has {len(data) - end} bytes after its {count} messages")
    return bodies


class RefusedBody(ValueError):
    """A body that MPUB refuses; args are code and detail."""


def _mpub_count(data: bytes, start: int, limits: ServerLimits) -> int:
    if len(data) - start < _COUNT_BYTES:
        raise _Refused("E_BAD_BODY", "MPUB failed to read message count")
    count: int = INT32.unpack_from(data, start)[0]
    if count <= 0 or count > (limits.max_body_size - _COUNT_BYTES) // 5:
        raise _Refused("E_BAD_BODY", f"MPUB invalid message count {count}")
    return count


def _size_walk(count: int, limits: ServerLimits, added: int = 0) -> SizeWalk:
    return SizeWalk(count, limits.max_msg_size, added, limits.max_body_size)


class ServerConnection:
    """Parses what one client sends.

    Attributes:
        state: ``init``, ``subscribed``, ``closing`` or ``broken``.
        tls_missing: set by the owner while TLS is required and not there yet; then only IDENTIFY is legal.
        heartbeats_disabled: set by the owner when the client wants no heartbeats; then it cannot subscribe.
        refusal_of: set by the owner when clients need permission: code and detail of the error for a command and a
            topic, None when it may go on. Asked before the body of an MPUB is read.
        pub_topic: topic of the last PUB; empty before the first.
        pub_partition: that it named.
        raw_ids: set by the owner on subscribing to a topic with partitions: ids are 16 bytes of any value.
        has_more: whether :meth:`more` has something to parse.
        finish_run_max: FINs of one event; an owner that has much to do for each sets it lower.
    """

    __slots__ = (
        "_held",
        "_held_bytes",
        "_is_ended",
        "_magic",
        "_needed",
        "_paused",
        "_pub_line",
        "_rest",
        "_rest_at",
        "_topic",
        "_walk",
        "finish_run_max",
        "has_more",
        "heartbeats_disabled",
        "limits",
        "pub_partition",
        "pub_topic",
        "raw_ids",
        "refusal_of",
        "state",
        "tls_missing",
    )

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self.state = INIT
        self.tls_missing = False
        self.heartbeats_disabled = False
        self.refusal_of: Callable[[str, str], tuple[str, str] | None] | None = None
        self._magic = False
        self._is_ended = False
        self._held: list[bytes] = []
        self._held_bytes = 0
        self.has_more = False
        self._rest = b""  # what one call left over, to be parsed from
        self._rest_at = 0
        self.finish_run_max = FINISH_RUN_MAX
        self._needed = len(MAGIC_V2)
        self._paused = False
        self._topic: tuple[bytes | None, str] = (None, "")
        self._pub_line = _NO_LINE
        self._walk: SizeWalk | None = None  # over the messages of an MPUB that is not all there
        self.pub_topic = ""
        self.pub_partition: int | None = None
        self.raw_ids = False

    @property
    def magic_received(self) -> bool:
        """Whether the protocol magic has been read."""
        return self._magic

    @property
    def held_bytes(self) -> int:
        """Bytes received and not yet parsed."""
        return self._held_bytes + len(self._rest) - self._rest_at

    def repeated_pub(self, data: bytes) -> bytes | None:
        """The body when ``data`` is one whole PUB to ``pub_topic``; None otherwise, and then nothing has been taken.

        This is what every read gives where many producers publish one by one; it costs no event.
        """
        line = self._pub_line
        if not data.startswith(line) or self._held or self._paused or self.has_more:
            return None
        at = len(line) + 4
        size = len(data) - at
        if 0 < size <= self.limits.max_msg_size and _read_size(data, at - 4)[0] == size:
            return data[at:]
        return None

    def receive_data(self, data: bytes) -> list[Event]:
        """Take bytes from the socket and return the first commands that are complete, in order."""
        if self.has_more:
            self._hold(data, 0)
            return []
        if self._held:
            self._held.append(data)
            self._held_bytes += len(data)
            if self._walk is not None and self._held_bytes - len(data) < self._needed <= self._held_bytes:
                self._walk = None  # as much as was declared: an honest client's is all of it
            elif self._walk is not None:
                try:
                    if not self._walk.advance(data):
                        return []
                except _Refused as refused:
                    self._held.clear()
                    self._held_bytes = 0
                    return [self._violation(refused)]
            elif self._paused or self._held_bytes < self._needed:
                return []
            data = b"".join(self._held)
            self._held.clear()
            self._held_bytes = 0
        elif self._paused:
            self._hold(data, 0)
            return []
        return self._parse(data)

    def resume(self) -> list[Event]:
        """Go on after the caller has answered IDENTIFY or AUTH."""
        self._paused = False
        data = self.take_held()
        return self._parse(data) if data else []

    def more(self) -> list[Event]:
        """Go on where the last call stopped because there was much to parse; what came meanwhile is behind it."""
        assert self.has_more
        rest, position = self._rest, self._rest_at
        self._rest, self._rest_at, self.has_more = b"", 0, False
        if self._held:
            rest, position = rest[position:] + self.take_held(), 0
        return self._parse(rest, position)

    def receive_eof(self) -> list[Event]:
        """Take the end of the client's stream: a body that lacks bytes is a violation, half a line means nothing."""
        self._is_ended = True
        return [] if self._paused else self.resume()

    def take_held(self) -> bytes:
        """Hand over what is not parsed: behind an IDENTIFY that upgrades the connection it is the new layer's."""
        data = b"".join(self._held)
        self._held.clear()
        self._held_bytes = 0
        return data

    def _hold(self, data: bytes, position: int) -> None:
        rest = data[position:] if position else data
        if rest:
            self._held.append(rest)
            self._held_bytes += len(rest)

    def _parse(self, data: bytes, position: int = 0) -> list[Event]:
        events: list[Event] = []
        if self.state == BROKEN:
            return events
        size = len(data)
        try:
            if not self._magic:
                if size < 4:
                    raise _Incomplete(4)
                if data[:4] != MAGIC_V2:
                    raise _Refused("E_BAD_PROTOCOL", "")
                self._magic = True
                position = 4
            for _ in range(COMMANDS_MAX):
                if position >= size or self._paused:
                    break
                if data.startswith(b"FIN ", position) and size - position >= _ID_LINE_BYTES:
                    end = self._finish_run(data, position, events)
                    if end != position:
                        position = end
                        continue
                position = self._command(data, position, events)
            else:
                if position < size and not self._paused:
                    self._rest, self._rest_at, self.has_more = data, position, True
                    return events
        except _Incomplete as incomplete:
            self._needed, *missing = incomplete.args
            if self._is_ended and missing:
                self.state = BROKEN
                events.append(Violation(*missing))
                return events
        except _Refused as refused:
            events.append(self._violation(refused))
            return events
        self._hold(data, position)
        return events

    def _violation(self, refused: _Refused) -> Violation:
        self.state = BROKEN
        self._pub_line = _NO_LINE
        return Violation(*refused.args)

    def _finish_run(self, data: bytes, position: int, events: list[Event]) -> int:
        """Parse as many whole FIN lines as stand at ``position``; return where they end, ``position`` if none."""
        if self.state not in (SUBSCRIBED, CLOSING) or self.tls_missing:
            return position
        count = min((len(data) - position) // _ID_LINE_BYTES, self.finish_run_max)
        for offset, character in _FIN_COLUMNS if count > 1 else _FIN_COLUMNS[:1]:
            column = data[position + offset : position + count * _ID_LINE_BYTES : _ID_LINE_BYTES]
            count -= len(column.lstrip(character))
            if not count:
                return position
        end = position + count * _ID_LINE_BYTES
        ids = _raw_ids_struct(count).unpack_from(data, position) if self.raw_ids else decode_ids(data[position:end])
        if ids is None:
            return position
        events.append(FinishRun(ids))
        return end

    def _command(self, data: bytes, position: int, events: list[Event]) -> int:
        raw_id_end = self._raw_id_end(data, position) if self.raw_ids else 0
        end = data.find(b"\n", raw_id_end or position, position + COMMAND_LINE_SIZE_MAX + 1)
        if end < 0:
            if len(data) - position > COMMAND_LINE_SIZE_MAX:
                raise _Refused("", f"command line longer than {COMMAND_LINE_SIZE_MAX} bytes")
            raise _Incomplete(len(data) - position + 1)
        # the last byte of a raw id may look like half a line end
        has_return = data[end - 1 : end] == b"\r" and end > (raw_id_end or position)
        line = data[position : end - 1] if has_return else data[position:end]
        parameters = line.split(b" ")
        if raw_id_end:
            parameters = self._raw_id_parameters(line, raw_id_end - position)
        parser = _PARSERS.get(parameters[0])
        if self.tls_missing and parameters[0] != b"IDENTIFY":
            raise _Refused("E_INVALID", f"cannot {_shown(parameters[0])} in current state (TLS required)")
        if parser is None:
            raise _Refused("E_INVALID", f"invalid command {_shown(parameters[0])}")
        return parser(self, data, position, end + 1, parameters, events)

    @staticmethod
    def _raw_id_end(data: bytes, position: int) -> int:
        """Where the id ends of a command that begins with one; 0 for another command."""
        for name in _ID_COMMANDS:
            if data.startswith(name, position):
                end = position + len(name) + MESSAGE_ID_SIZE
                if len(data) <= end:
                    raise _Incomplete(end + 1 - position)
                return end
        return 0

    @staticmethod
    def _raw_id_parameters(line: bytes, id_end: int) -> list[bytes]:
        if len(line) > id_end and line[id_end : id_end + 1] != b" ":
            raise _Refused("E_INVALID", "invalid message ID")
        name = line[: id_end - MESSAGE_ID_SIZE - 1]
        return [name, line[id_end - MESSAGE_ID_SIZE : id_end], *line[id_end:].split(b" ")[1:]]

    def _require(self, command: str, *states: str) -> None:
        if self.state not in states:
            raise _Refused("E_INVALID", f"cannot {command} in current state")

    def topic_name(self, command: str, raw: bytes) -> str:
        """Read a topic's name; for the parsers of commands, as :meth:`several_bodies` is."""
        if raw == self._topic[0]:
            return self._topic[1]
        name = raw.decode("utf-8", "surrogateescape")
        if not is_valid_name(name):
            raise _Refused("E_BAD_TOPIC", f"{command} topic name {go_quote(raw)} is not valid")
        self._topic = (raw, name)
        return name

    @staticmethod
    def partition_word(parameters: list[bytes], index: int) -> int | None:
        """The partition that stands at ``index``, where NSQ has nothing; None also for -1."""
        if len(parameters) <= index:
            return None
        word = parameters[index]
        if word == NO_PARTITION:
            return None
        number = parse_partition(word.decode("ascii", "replace"))
        return NOT_A_NUMBER if number is None else number

    def _body(self, data: bytes, line_start: int, position: int, command: str) -> tuple[bytes, int]:
        """The size-prefixed body of IDENTIFY or AUTH."""
        if len(data) - position < 4:
            raise _Incomplete(position - line_start + 4, "E_BAD_BODY", f"{command} failed to read body size")
        size = INT32.unpack_from(data, position)[0]
        if size > self.limits.max_body_size:
            raise _Refused("E_BAD_BODY", f"{command} body too big {size} > {self.limits.max_body_size}")
        if size <= 0:
            raise _Refused("E_BAD_BODY", f"{command} invalid body size {size}")
        end = position + 4 + size
        if len(data) < end:
            raise _Incomplete(end - line_start, "E_BAD_BODY", f"{command} failed to read body")
        return data[position + 4 : end], end

    def _identify(self, data: bytes, start: int, at: int, parameters: list[bytes], events: list[Event]) -> int:
        self._require("IDENTIFY", INIT)
        body, end = self._body(data, start, at, "IDENTIFY")
        events.append(Identify(body))
        self._paused = True
        return end

    def _auth(self, data: bytes, start: int, at: int, parameters: list[bytes], events: list[Event]) -> int:
        self._require("AUTH", INIT)
        if len(parameters) != 1:
            raise _Refused("E_INVALID", "AUTH invalid number of parameters")
        secret, end = self._body(data, start, at, "AUTH")
        events.append(Auth(secret))
        self._paused = True
        return end

    def _sub(self, data: bytes, start: int, at: int, parameters: list[bytes], events: list[Event]) -> int:
        command = parameters[0].decode("ascii")
        self._require(command, INIT)
        if self.heartbeats_disabled:
            raise _Refused("E_INVALID", f"cannot {command} with heartbeats disabled")
        if len(parameters) < 3:
            raise _Refused("E_INVALID", f"{command} insufficient number of parameters")
        topic = self.topic_name(command, parameters[1])
        channel = parameters[2].decode("utf-8", "surrogateescape")
        if not is_valid_name(channel):
            raise _Refused("E_BAD_CHANNEL", f"{command} channel name {go_quote(parameters[2])} is not valid")
        place = _shown(parameters[4]) if command != "SUB" and len(parameters) > 4 else None
        event = Subscribe(topic, channel, self.partition_word(parameters, 3), command, place)
        if event.is_ordered and place is not None:
            raise _Refused("E_INVALID", f"{command} takes no place to begin at, which is {place}: SUB_ADVANCED does")
        self.state = SUBSCRIBED
        events.append(event)
        return at

    def message_body(self, data: bytes, start: int, at: int, command: str) -> tuple[bytes, int]:
        """The message of a PUB or its like, and where it ends."""
        if len(data) - at < 4:
            raise _Incomplete(at - start + 4, "E_BAD_MESSAGE", f"{command} failed to read message body size")
        size = INT32.unpack_from(data, at)[0]
        if size <= 0:
            raise _Refused("E_BAD_MESSAGE", f"{command} invalid message body size {size}")
        if size > self.limits.max_msg_size:
            raise _Refused("E_BAD_MESSAGE", f"{command} message too big {size} > {self.limits.max_msg_size}")
        end = at + 4 + size
        if len(data) < end:
            raise _Incomplete(end - start, "E_BAD_MESSAGE", f"{command} failed to read message body")
        return data[at + 4 : end], end

    def _pub(self, data: bytes, start: int, at: int, parameters: list[bytes], events: list[Event]) -> int:
        if len(parameters) < 2:
            raise _Refused("E_INVALID", "PUB insufficient number of parameters")
        topic = self.topic_name("PUB", parameters[1])
        body, end = self.message_body(data, start, at, "PUB")
        partition = None if len(parameters) < 3 else self.partition_word(parameters, 2)
        if topic is not self.pub_topic or partition != self.pub_partition:
            self._pub_line, self.pub_topic, self.pub_partition = data[start:at], topic, partition
        last = events[-1] if events else None
        is_same = type(last) is Publish and last.command == "PUB" and last.topic == topic
        if is_same and last.partition == partition:  # type: ignore[union-attr]
            last.bodies.append(body)  # type: ignore[union-attr]  # the list made below
            last.replies += 1  # type: ignore[union-attr]
        else:
            events.append(Publish("PUB", topic, [body], 1, 0, partition))
        return end

    def _mpub(self, data: bytes, start: int, at: int, parameters: list[bytes], events: list[Event]) -> int:
        if len(parameters) < 2:
            raise _Refused("E_INVALID", "MPUB insufficient number of parameters")
        if parameters[1] != self._topic[0] and not is_valid_name(_shown(parameters[1])):
            # nsqd says the code twice here, and clients that compare texts know it so
            raise _Refused("E_BAD_TOPIC", f"E_BAD_TOPIC MPUB topic name {go_quote(parameters[1])} is not valid")
        topic = self.topic_name("MPUB", parameters[1])
        bodies, end = self.several_bodies(data, start, at, "MPUB", topic)
        events.append(Publish("MPUB", topic, bodies, 1, 0, self.partition_word(parameters, 2)))
        return end

    def several_bodies(
        self, data: bytes, begin: int, at: int, command: str, topic: str, added: int = 0
    ) -> tuple[Sequence[bytes], int]:
        """The messages of an MPUB or its like, and where they end; permission is asked before they are gathered.

        They end behind the last one that the count announces. The size is only bounded, as it is by NSQ: there are
        clients that count themselves in, or forget the count, and nothing follows for which nsqd could wait.

        Args:
            added: as in :func:`split_bodies`.
        """
        if self.refusal_of is not None and (refusal := self.refusal_of(command, topic)) is not None:
            raise _Refused(*refusal)
        if len(data) - at < 4:
            raise _Incomplete(at - begin + 4, "E_BAD_BODY", "MPUB failed to read body size")
        size: int = INT32.unpack_from(data, at)[0]
        if size <= 0:
            raise _Refused("E_BAD_BODY", f"MPUB invalid body size {size}")
        if size > self.limits.max_body_size:
            raise _Refused("E_BAD_BODY", f"MPUB body too big {size} > {self.limits.max_body_size}")
        start = at + 4
        if len(data) - start < _COUNT_BYTES:
            raise _Incomplete(start - begin + _COUNT_BYTES, "E_BAD_BODY", "MPUB failed to read message count")
        count = _mpub_count(data, start, self.limits)
        start += _COUNT_BYTES
        walk = self._walk
        if walk is None:
            # the size is where honest clients end; before that, trying would be in vain
            if len(data) - start + _COUNT_BYTES >= size:
                split = split_bodies(data, start, count, self.limits, added)
                if split is not None:
                    return split
            walk = _size_walk(count, self.limits, added)
            walk.advance(data, start)
        if not walk.is_done:
            self._walk = walk
            raise _Incomplete(start - begin - _COUNT_BYTES + size, *walk.lack)
        self._walk = None
        split = split_bodies(data, start, count, self.limits, added)
        assert split is not None  # the walk has been there
        return split

    def _dpub(self, data: bytes, start: int, at: int, parameters: list[bytes], events: list[Event]) -> int:
        if len(parameters) < 3:
            raise _Refused("E_INVALID", "DPUB insufficient number of parameters")
        topic = self.topic_name("DPUB", parameters[1])
        defer_ms = self._defer_ms("DPUB", parameters[2])
        body, end = self.message_body(data, start, at, "DPUB")
        events.append(Publish("DPUB", topic, [body], 1, defer_ms, self.partition_word(parameters, 3)))
        return end

    def _defer_ms(self, command: str, text: bytes) -> int:
        defer_ms = _number(text)
        if defer_ms is None:
            raise _Refused("E_INVALID", f"{command} could not parse timeout {_shown(text)}")
        if defer_ms > self.limits.max_req_timeout_ms:
            raise _Refused("E_INVALID", f"{command} timeout {defer_ms} out of range 0-{self.limits.max_req_timeout_ms}")
        return defer_ms

    def _mdpub(self, data: bytes, start: int, at: int, parameters: list[bytes], events: list[Event]) -> int:
        if len(parameters) < 3:
            raise _Refused("E_INVALID", "MDPUB insufficient number of parameters")
        topic = self.topic_name("MDPUB", parameters[1])
        defer_ms = self._defer_ms("MDPUB", parameters[2])
        bodies, end = self.several_bodies(data, start, at, "MDPUB", topic)
        events.append(Publish("MDPUB", topic, bodies, 1, defer_ms, self.partition_word(parameters, 3)))
        return end

    def _rdy(self, data: bytes, start: int, at: int, parameters: list[bytes], events: list[Event]) -> int:
        if self.state == CLOSING:
            return at
        self._require("RDY", SUBSCRIBED)
        text = parameters[1] if len(parameters) > 1 else b"1"
        count = _number(text)
        if count is None:
            raise _Refused("E_INVALID", f"RDY could not parse count {_shown(text)}")
        if count > self.limits.max_rdy_count:
            raise _Refused("E_INVALID", f"RDY count {count} out of range 0-{self.limits.max_rdy_count}")
        events.append(Ready(count))
        return at

    def _message_id(self, command: str, parameters: list[bytes], wanted: int) -> bytes:
        self._require(command, SUBSCRIBED, CLOSING)
        if len(parameters) < wanted:
            raise _Refused("E_INVALID", f"{command} insufficient number of params")
        if len(parameters[1]) != MESSAGE_ID_SIZE:
            raise _Refused("E_INVALID", "invalid message ID")
        return parameters[1]

    def _fin(self, data: bytes, start: int, at: int, parameters: list[bytes], events: list[Event]) -> int:
        message_id = self._message_id("FIN", parameters, 2)
        if self.raw_ids:
            events.append(FinishRun((int.from_bytes(message_id[:8], "big"),)))
            return at
        ids = decode_ids(b"FIN " + message_id + b"\n")
        events.append(Finish(message_id) if ids is None else FinishRun(ids))
        return at

    def _req(self, data: bytes, start: int, at: int, parameters: list[bytes], events: list[Event]) -> int:
        message_id = self._message_id("REQ", parameters, 3)
        timeout_ms = _number(parameters[2])
        if timeout_ms is None:
            raise _Refused("E_INVALID", f"REQ could not parse timeout {_shown(parameters[2])}")
        events.append(Requeue(message_id, timeout_ms))
        return at

    def _touch(self, data: bytes, start: int, at: int, parameters: list[bytes], events: list[Event]) -> int:
        events.append(Touch(self._message_id("TOUCH", parameters, 2)))
        return at

    def _cls(self, data: bytes, start: int, at: int, parameters: list[bytes], events: list[Event]) -> int:
        self._require("CLS", SUBSCRIBED)
        self.state = CLOSING
        events.append(Close())
        return at

    def _nop(self, data: bytes, start: int, at: int, parameters: list[bytes], events: list[Event]) -> int:
        events.append(Nop())
        return at

    def _offsets(self, data: bytes, start: int, at: int, parameters: list[bytes], events: list[Event]) -> int:
        if len(parameters) < 2:
            raise _Refused("E_INVALID", "OFFSETS insufficient number of parameters")
        topic = self.topic_name("OFFSETS", parameters[1])
        timestamp_ns = None
        if len(parameters) > 2:
            timestamp_ns = _number(parameters[2])
            if timestamp_ns is None:
                raise _Refused("E_INVALID", f"OFFSETS could not parse timestamp {_shown(parameters[2])}")
        events.append(Offsets(topic, timestamp_ns))
        return at

    def _fetch(self, data: bytes, start: int, at: int, parameters: list[bytes], events: list[Event]) -> int:
        if len(parameters) < 3:
            raise _Refused("E_INVALID", "FETCH insufficient number of parameters")
        topic = self.topic_name("FETCH", parameters[1])
        partition = _number(parameters[2])
        if partition is None:
            raise _Refused("E_INVALID", f"FETCH could not parse partition {_shown(parameters[2])}")
        end = at + FETCH_BODY.size
        if len(data) < end:
            raise _Incomplete(end - start)
        events.append(Fetch(topic, partition, *FETCH_BODY.unpack_from(data, at)))
        return end

    def _cursor(self, data: bytes, start: int, at: int, parameters: list[bytes], events: list[Event]) -> int:
        if len(parameters) < 5:
            raise _Refused("E_INVALID", "CURSOR insufficient number of parameters")
        topic = self.topic_name("CURSOR", parameters[1])
        channel = _shown(parameters[2])
        if not is_valid_name(channel):
            raise _Refused("E_BAD_CHANNEL", f"CURSOR channel name {go_quote(parameters[2])} is not valid")
        partition = _number(parameters[3])
        special = {b"-1": -1, b"-2": -2}.get(parameters[4])
        sequence = _number(parameters[4]) if special is None else special
        if partition is None or sequence is None:
            raise _Refused("E_INVALID", f"CURSOR could not parse {_shown(b' '.join(parameters[3:5]))}")
        events.append(Cursor(topic, channel, partition, sequence))
        return at


_ID_COMMANDS = (b"FIN ", b"REQ ", b"TOUCH ")


_PARSERS = {
    b"IDENTIFY": ServerConnection._identify,
    b"AUTH": ServerConnection._auth,
    b"SUB": ServerConnection._sub,
    b"SUB_ORDER": ServerConnection._sub,
    b"SUB_ORDERED": ServerConnection._sub,
    b"SUB_ADVANCED": ServerConnection._sub,
    b"PUB": ServerConnection._pub,
    b"MPUB": ServerConnection._mpub,
    b"DPUB": ServerConnection._dpub,
    b"MDPUB": ServerConnection._mdpub,
    b"RDY": ServerConnection._rdy,
    b"FIN": ServerConnection._fin,
    b"REQ": ServerConnection._req,
    b"TOUCH": ServerConnection._touch,
    b"CLS": ServerConnection._cls,
    b"NOP": ServerConnection._nop,
    b"OFFSETS": ServerConnection._offsets,
    b"FETCH": ServerConnection._fetch,
    b"CURSOR": ServerConnection._cursor,
    **server_extended.PARSERS,
    **server_once.PARSERS,
}
