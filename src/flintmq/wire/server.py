"""The server's side of protocol V2: bytes in, commands out.

Rules of this file:

- Commands are emitted in the order they arrived, and runs of the same kind are one event: a run of FINs is one
  :class:`FinishRun`, the PUBs of one read to one topic are one :class:`Publish` with the bodies of all.
- A :class:`Violation` is the last event of a connection when it is fatal: nothing after it is parsed.
- Transitions are taken as soon as a command is parsed (SUB -> subscribed): a SUB that the server then refuses is fatal,
  so what was parsed after it is dropped with the connection.
- After IDENTIFY and AUTH the parser stops, because the answer decides how the following bytes are to be read; the
  caller goes on with :meth:`ServerConnection.resume`.
- What a command's line and body are, and where it is legal, say the rows of :mod:`flintmq.wire.commands`; here they
  are looked up by name. A line that was read before in this state is not read again; of a publish whose last word
  counts its messages that word alone is.
- A command of one message or of several is a :class:`Publish`, whatever else it says; the plain PUB whose line is that
  of the last one skips its line.
- Ids are lines of text on a plain topic. On one with partitions (``raw_ids``) they are 16 bytes that may hold line
  ends, so these lines are parsed by length.
- No body is gathered beyond the limit that its size field was checked against.
- An MPUB ends behind its last message, whatever its size says; its messages are held against the limits as they come.
- One call parses at most :data:`COMMANDS_MAX` commands, so that the caller can let others go first; what is left is
  parsed by :meth:`ServerConnection.more` while :attr:`ServerConnection.has_more`.

Source: NSQ's TCP protocol; Youzan's TCP protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple

from flintmq.limits import COMMAND_LINE_SIZE_MAX, MESSAGE_ID_SIZE, PRODUCER_SEQUENCE_MAX
from flintmq.wire.bodies import PLAIN, Front, Kind
from flintmq.wire.commands import BROKEN as BROKEN
from flintmq.wire.commands import CLOSING as CLOSING
from flintmq.wire.commands import COMMANDS, FETCH_BODY, MAGIC_V2, Command, reader_of
from flintmq.wire.commands import INIT as INIT
from flintmq.wire.commands import SUBSCRIBED as SUBSCRIBED
from flintmq.wire.frames import INT32
from flintmq.wire.magic import bad_magic
from flintmq.wire.params import NOT_A_NUMBER as NOT_A_NUMBER
from flintmq.wire.params import FirstSequence
from flintmq.wire.params import go_quote as go_quote
from flintmq.wire.params import shown as _shown
from flintmq.wire.refusals import Incomplete as _Incomplete
from flintmq.wire.refusals import Refused as _Refused
from flintmq.wire.size_walk import SizeWalk, uniform_run

COMMANDS_MAX = 512
"""Parsed by one call: under a millisecond. A run of FINs counts as one."""
FINISH_RUN_MAX = 2048
"""FINs of one :class:`FinishRun`; also what bounds the formats that are kept."""

_ID_LINE_BYTES = MESSAGE_ID_SIZE + 5  # "FIN " + id + "\n"
_FIN_COLUMNS = ((20, b"\n"), (0, b"F"), (1, b"I"), (2, b"N"), (3, b" "))  # a single line's first four are checked
_COUNT_BYTES = 4
_NO_LINE: tuple[bytes, ...] = ()  # nothing begins with it
_LINES_MAX = 16  # kept by one connection
_KEPT_LINE_BYTES_MAX = 128  # of each
_ONCE_RUN_MAX = 1024  # messages of a producer that counts: one of them that fails makes all of a run fail
_read_size = INT32.unpack_from
_TLS_HINT = "TLS from the first byte: a client asks for it with tls_v1 in IDENTIFY"
_OTHER_MAGICS = {b"  V1": "a nsqd that wants to register: this is no nsqlookupd"}


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
        names_partition: a word stood where that of the partition does, be it -1.
    """

    topic: str
    channel: str
    partition: int | None = None
    command: str = "SUB"
    start: str | None = None
    names_partition: bool = False

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
    """Messages to one place: one command, or a run of commands of one message each.

    Attributes:
        command: its name; the row of it is in :data:`flintmq.wire.commands.COMMANDS`.
        bodies: as they came behind their sizes, with ``front``.
        replies: how many answers the client expects.
        defer_ms: delay before delivery, 0 for none.
        partition: None when none was named, :data:`NOT_A_NUMBER` when the word is something else.
        front: what stands in front of each message: a trace id, or headers that fit.
        producer_id: who counts these messages, so that none is stored twice; None for who does not.
        sequence: that the first of them has then.
    """

    command: str
    topic: str
    bodies: Sequence[bytes]
    replies: int
    defer_ms: int = 0
    partition: int | None = None
    front: Front = PLAIN
    producer_id: bytes | None = None
    sequence: int = 0

    @property
    def last(self) -> int:
        """The sequence of the last body."""
        return self.sequence + len(self.bodies) - 1


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
class AskProducers:
    """PRODUCERS; ``prefix`` is how their ids begin."""

    topic: str
    prefix: bytes


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
class CreateTopic:
    """INTERNAL_CREATE_TOPIC; ``partition`` is None or negative when it is not the number of one."""

    topic: str
    partition: int | None
    is_extended: bool


@dataclass(slots=True)
class Violation:
    """The client broke the protocol.

    Attributes:
        code: error code; empty when nsqd closes without an error frame.
        note: for the log alone; the client is not told.
    """

    code: str
    detail: str
    note: str = ""


Event = (
    Identify | Auth | Subscribe | Publish | Ready | FinishRun | Finish | Requeue | Touch | Close | Nop
    | Offsets | AskProducers | Fetch | Cursor | CreateTopic | Violation
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds the parser enforces; sizes in bytes, times in milliseconds."""

    max_msg_size: int = 1024 * 1024
    max_body_size: int = 5 * 1024 * 1024
    max_rdy_count: int = 2500
    max_req_timeout_ms: int = 3_600_000


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
        last_topic: the name that was read last, as it came and decoded.
        pub_topic: topic of the last PUB; empty before the first.
        pub_partition: that it named.
        raw_ids: set by the owner on subscribing to a topic with partitions: ids are 16 bytes of any value.
        has_more: whether :meth:`more` has something to parse.
        finish_run_max: FINs of one event; an owner that has much to do for each sets it lower.
    """

    __slots__ = (
        "_heads",
        "_held",
        "_held_bytes",
        "_is_ended",
        "_lines",
        "_magic",
        "_needed",
        "_paused",
        "_pub_line",
        "_pub_values",
        "_rest",
        "_rest_at",
        "_routes",
        "_walk",
        "finish_run_max",
        "has_more",
        "heartbeats_disabled",
        "last_topic",
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
        self.last_topic: tuple[bytes | None, str] = (None, "")
        self._routes = _ROUTES[INIT]
        self._lines: dict[bytes, _Line] = {}  # read before in this state
        self._heads: dict[bytes, _Line] = {}  # of publishes whose last word varies, without that word
        self._pub_line: bytes | tuple[bytes, ...] = _NO_LINE  # of the last PUB, with its end
        self._pub_values: tuple[Any, ...] = ()
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
        return self._held_bytes + len(self._rest) - self._rest_at if self.has_more else self._held_bytes

    def repeated_pub(self, data: bytes) -> bytes | None:
        """Return the body when ``data`` is one whole PUB to ``pub_topic``; else None, and nothing has been taken.

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

    def forget(self) -> None:
        """Drop what is not parsed; nothing more is."""
        self.take_held()
        self._rest, self._rest_at, self.has_more, self._walk = b"", 0, False, None
        self.state = BROKEN

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
                    raise _Refused("E_BAD_PROTOCOL", "", bad_magic(data, _TLS_HINT, _OTHER_MAGICS))
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
                if data.startswith(self._pub_line, position):
                    at = position + len(self._pub_line)
                    position = self._message(_PUB, self._pub_values, data, position, at, events)
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
        end = data.find(b"\n", raw_id_end or position, position + COMMAND_LINE_SIZE_MAX)
        if end < 0:
            if len(data) - position >= COMMAND_LINE_SIZE_MAX:
                raise _Refused("", f"command line longer than {COMMAND_LINE_SIZE_MAX} bytes, its end included")
            raise _Incomplete(len(data) - position + 1)
        line = data[position:end]
        known = self._lines.get(line)
        if known is not None:
            row, take, values = known
            return take(self, row, values, data, position, end + 1, events)
        if self._heads and not line.endswith(b"\r"):
            head, _, last = line.rpartition(b" ")
            known = self._heads.get(head)
            if known is not None:
                row, take, values = known
                values = *values[:-1], row.words[-1].read(self, row.name, (last,), 0)
                return take(self, row, values, data, position, end + 1, events)
        bare = line
        if line.endswith(b"\r") and end > raw_id_end:
            bare = line[:-1]  # but the last byte of a raw id may look like half a line end
        words = self._raw_id_parameters(bare, raw_id_end - position) if raw_id_end else bare.split(b" ")
        route = self._routes.get(words[0])
        if route is None or self.tls_missing:
            route = self._route(words[0])
        row, take, read = route
        if read is None:
            values = self._read_line(row, take, line, words)
        else:
            values = read(self, words)
            if row.is_publish and bare is line and len(words) == len(row.words) + 1:
                self._keep(self._heads, line[: -len(words[-1]) - 1], _Line(row, take, values))
        return take(self, row, values, data, position, end + 1, events)

    def _route(self, name: bytes) -> _Route:
        """Return the route of a command that cannot be found at once.

        Raises:
            Refused: there is none, or not now.
        """
        if self.tls_missing and name != b"IDENTIFY":
            raise _Refused("E_INVALID", f"cannot {_shown(name)} in current state (TLS required)")
        route = self._routes.get(name)
        if route is None:
            what = f"cannot {_shown(name)} in current state" if name in _NAMES else f"invalid command {_shown(name)}"
            raise _Refused("E_INVALID", what)
        return route

    def _read_line(self, row: Command, take: _Take, line: bytes, words: list[bytes]) -> tuple[Any, ...]:
        """Read a line whose words do not vary, and keep it, unless it changes the state."""
        if row.needs_heartbeats and self.heartbeats_disabled:
            raise _Refused("E_INVALID", f"cannot {row.name} with heartbeats disabled")
        values = row.read(self, words)
        if row.then:
            self.state = row.then
            self._routes = _ROUTES[row.then]
            self._lines.clear()
        else:
            self._keep(self._lines, line, _Line(row, take, values))
        return values

    @staticmethod
    def _keep(lines: dict[bytes, _Line], line: bytes, read: _Line) -> None:
        if len(line) <= _KEPT_LINE_BYTES_MAX:
            if len(lines) >= _LINES_MAX:
                lines.clear()
            lines[line] = read

    @staticmethod
    def _raw_id_end(data: bytes, position: int) -> int:
        """Return where the id ends of a command that begins with one; 0 for another command."""
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

    def _body(self, data: bytes, line_start: int, position: int, command: str) -> tuple[bytes, int]:
        """Return the size-prefixed body of IDENTIFY or AUTH."""
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

    def _message(
        self, row: Command, values: tuple[Any, ...], data: bytes, start: int, at: int, events: list[Event]
    ) -> int:
        """Take a publish of one message; it joins the one before it where a run of them is one event."""
        front = row.body.front
        limit = self.limits.max_msg_size
        if len(data) - at < 4:
            what = f"{row.name} failed to read {front.size_of} size"
            raise _Incomplete(at - start + 4, front.size_code, what)
        size: int = _read_size(data, at)[0]
        if size <= front.least:
            what = f"{row.name} invalid {front.size_of} size {size}{front.suffix}"
            raise _Refused(front.size_code, what)
        if size > limit + front.most:
            raise _Refused("E_BAD_MESSAGE", f"{row.name} message too big {size - front.most} > {limit}")
        end = at + 4 + size
        if len(data) < end:
            raise _Incomplete(end - start, "E_BAD_MESSAGE", f"{row.name} failed to read message body")
        body = data[at + 4 : end]
        if front is not PLAIN:
            front.check(row.name, body, limit)
        topic, partition, defer_ms, producer_id, sequence = values
        if row is _PUB and values is not self._pub_values:
            self._pub_line, self._pub_values = data[start:at], values
            self.pub_topic, self.pub_partition = topic, partition
        last = events[-1] if events else None
        if type(last) is Publish and last.command == row.name and last.topic == topic and last.partition == partition:
            is_run = row.is_run
            if producer_id is not None:
                is_next = last.producer_id == producer_id and sequence == last.sequence + last.replies
                is_run = is_next and last.replies < _ONCE_RUN_MAX
            if is_run:
                last.bodies.append(body)  # type: ignore[attr-defined]  # the list made below
                last.replies += 1
                return end
        events.append(Publish(row.name, topic, [body], 1, defer_ms, partition, front, producer_id, sequence))
        return end

    def _messages(
        self, row: Command, values: tuple[Any, ...], data: bytes, start: int, at: int, events: list[Event]
    ) -> int:
        """Take a publish of several messages."""
        front = row.body.front
        topic, partition, defer_ms, producer_id, sequence = values
        bodies, end = self.several_bodies(data, start, at, row.name, topic, front.most)
        if front is not PLAIN:
            front.check_all(row.name, bodies, self.limits.max_msg_size)
        if sequence > PRODUCER_SEQUENCE_MAX - len(bodies) + 1:
            raise FirstSequence.refusal(row.name, b"%d" % sequence)
        events.append(Publish(row.name, topic, bodies, 1, defer_ms, partition, front, producer_id, sequence))
        return end

    def several_bodies(
        self, data: bytes, begin: int, at: int, command: str, topic: str, added: int = 0
    ) -> tuple[Sequence[bytes], int]:
        """Return the messages of an MPUB or its like, and where they end; permission is asked before they are gathered.

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

    def _fin(self, row: Command, values: tuple[Any, ...], data: bytes, start: int, at: int, events: list[Event]) -> int:
        (message_id,) = values
        if self.raw_ids:
            events.append(FinishRun((int.from_bytes(message_id[:8], "big"),)))
            return at
        ids = decode_ids(b"FIN " + message_id + b"\n")
        events.append(Finish(message_id) if ids is None else FinishRun(ids))
        return at

    def _fetch(
        self, row: Command, values: tuple[Any, ...], data: bytes, start: int, at: int, events: list[Event]
    ) -> int:
        end = at + FETCH_BODY.size
        if len(data) < end:
            raise _Incomplete(end - start)
        events.append(Fetch(*values, *FETCH_BODY.unpack_from(data, at)))
        return end


_Take = Callable[[ServerConnection, Command, tuple[Any, ...], bytes, int, int, list[Event]], int]


class _Line(NamedTuple):
    """A line that has been read: its command, what takes the body, and the values of its words."""

    row: Command
    take: _Take
    values: tuple[Any, ...]


def _ignore(
    _connection: ServerConnection, _row: Command, _values: tuple[Any, ...], _data: bytes, _start: int, at: int,
    _events: list[Event],
) -> int:  # fmt: skip
    return at


def _event(make: Callable[..., Event]) -> _Take:
    """Return the function that takes a command which is its line alone."""

    def take(
        _connection: ServerConnection, _row: Command, values: tuple[Any, ...], _data: bytes, _start: int, at: int,
        events: list[Event],
    ) -> int:  # fmt: skip
        events.append(make(*values))
        return at

    return take


def _sized(make: Callable[[bytes], Event]) -> _Take:
    """Return the function that takes a command with a sized body."""

    def take(
        connection: ServerConnection, row: Command, _values: tuple[Any, ...], data: bytes, start: int, at: int,
        events: list[Event],
    ) -> int:  # fmt: skip
        body, end = connection._body(data, start, at, row.name)
        events.append(make(body))
        connection._paused = row.pauses
        return end

    return take


def _subscribe(command: str) -> _Take:
    def take(
        connection: ServerConnection, row: Command, values: tuple[Any, ...], data: bytes, start: int, at: int,
        events: list[Event],
    ) -> int:  # fmt: skip
        topic, channel, partition, *place = values
        event = Subscribe(topic, channel, partition, command, place[0] if place else None)
        event.names_partition = data.count(b" ", start, at) >= len(("topic", "channel", "partition"))
        events.append(event)
        return at

    return take


class _Route(NamedTuple):
    """The parsing of a command in one state: its row, what takes the body, and what reads its words, if they vary."""

    row: Command
    take: _Take
    read: Callable[[ServerConnection, list[bytes]], tuple[Any, ...]] | None


def _routes(state: str) -> Iterator[tuple[bytes, _Route]]:
    for row in COMMANDS.values():
        take = _PUBLISHES.get(row.body.kind) or _OTHERS[row.name]
        if state == row.ignored_in:
            yield row.name.encode(), _Route(row, _ignore, lambda _connection, _words: ())
        elif state in row.states:
            yield row.name.encode(), _Route(row, take, None if row.is_constant else reader_of(row))


_PUB = COMMANDS["PUB"]
_ID_COMMANDS = (b"FIN ", b"REQ ", b"TOUCH ")
_PUBLISHES = {Kind.MESSAGE: ServerConnection._message, Kind.MESSAGES: ServerConnection._messages}
_OTHERS: dict[str, _Take] = {
    "IDENTIFY": _sized(Identify),
    "AUTH": _sized(Auth),
    **{name: _subscribe(name) for name in ("SUB", "SUB_ORDER", "SUB_ORDERED", "SUB_ADVANCED")},
    "RDY": _event(Ready),
    "FIN": ServerConnection._fin,
    "REQ": _event(Requeue),
    "TOUCH": _event(Touch),
    "CLS": _event(Close),
    "NOP": _event(Nop),
    "OFFSETS": _event(Offsets),
    "PRODUCERS": _event(AskProducers),
    "FETCH": ServerConnection._fetch,
    "CURSOR": _event(Cursor),
    "INTERNAL_CREATE_TOPIC": _event(CreateTopic),
}
_NAMES = {name.encode() for name in COMMANDS}
_ROUTES = {state: dict(_routes(state)) for state in (INIT, SUBSCRIBED, CLOSING)}
