"""Commands from client to server: the table that both sides read, and what puts each on the wire.

A row says in which states a command may be used, which words its line has and which body stands behind it, what it is
answered with, and what may go wrong. The server's parser (:mod:`flintmq.wire.server`) looks its handlers up by the
rows, the client (:mod:`flintmq.wire.client`) checks and builds by them. To publish in a new way takes a row here; what
is stored of it is decided in :mod:`flintmq.nsqd.publishing`.

Rules of this file: serialisers only build bytes; they check what the protocol would refuse and raise
:class:`LocalProtocolError`, so that nothing illegal is sent.

Source: NSQ's TCP protocol; OFFSETS, FETCH and CURSOR: docs/reference/protocol.md; Youzan's TCP protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from struct import Struct
from typing import Any, Literal

from flintmq.errors import LocalProtocolError
from flintmq.limits import PRODUCER_SEQUENCE_MAX
from flintmq.wire.bodies import HEADED, PLAIN, TRACED, Body, Kind
from flintmq.wire.codes import is_fatal
from flintmq.wire.frames import UINT32
from flintmq.wire.params import (
    ONLY_PARTITION,
    Channel,
    Delay,
    FirstSequence,
    MessageId,
    NoStart,
    Number,
    Partition,
    ProducerId,
    Reader,
    Start,
    Switch,
    Topic,
    Word,
)
from flintmq.wire.refusals import Refused

MAGIC_V2 = b"  V2"
FETCH_BODY = Struct(">QQII")
FETCH_UNVERIFIED = 1 << 31
"""Added to ``bytes_max`` of FETCH by who verifies the batches. An nsqd before it takes this for a large number."""
NOP = b"NOP\n"
CLS = b"CLS\n"

INIT, SUBSCRIBED, CLOSING, BROKEN = "init", "subscribed", "closing", "broken"
"""The states of a connection, on both sides."""

_PUBLISH_FIELDS = {"topic": "", "partition": None, "defer_ms": 0, "producer_id": None, "sequence": 0}
"""The fields that the words of a publish fill, and their values where a command has no word for one."""
_DEFAULTS = tuple(_PUBLISH_FIELDS.values())
_RUN_FIELDS = {"topic", "partition", "producer_id", "sequence"}
"""The fields of commands that may form a run: two of them must agree in these. A delay is not among them."""


@dataclass(frozen=True, slots=True, eq=False)
class Command:
    """One row of the command table.

    Attributes:
        reply: what success answers with; empty for commands that are not answered.
        states: where it is legal: any of ``init``, ``subscribed``, ``closing``.
        then: the state behind it; empty when it stays.
        ignored_in: a state in which it is taken and does nothing.
        pauses: its answer decides how the bytes behind it are to be read.
        needs_heartbeats: it is refused on a connection without them.
        is_exact: words too many are refused; else they are ignored.
        lack: what is said when words are missing.
        family: the command in whose name it is told that the broker did not do it; its own unless said otherwise.
        failure: the code of that.
        refusals: codes it can be answered with, beside those of its words, its body, its state and ``failure``.
        closing: codes that close the connection behind it, although they do not everywhere.
        head: its name as it stands on the line.
        least: how many words it needs.
        is_constant: none of its words varies.
        is_run: commands of it to one place that follow one another are one publish.
        is_place_alone: its words name a topic and a partition, and say nothing else.
        publish_values: the values of its words as (topic, partition, defer_ms, producer_id, sequence); None when it
            publishes nothing.
        line_values: the inverse: the values of its words out of these; of others as they are.
    """

    name: str
    words: tuple[Word, ...]
    body: Body
    reply: str
    states: tuple[str, ...]
    origin: Literal["nsq", "youzan", "flintmq"]
    about: str
    then: str = ""
    ignored_in: str = ""
    pauses: bool = False
    needs_heartbeats: bool = False
    is_exact: bool = False
    lack: str = "insufficient number of parameters"
    family: str = ""
    failure: str = ""
    refusals: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
    head: bytes = field(init=False)
    least: int = field(init=False)
    is_constant: bool = field(init=False)
    is_run: bool = field(init=False)
    is_place_alone: bool = field(init=False)
    publish_values: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = field(init=False)
    line_values: Callable[[tuple[Any, ...]], tuple[Any, ...]] = field(init=False)

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("head", self.name.encode())
        put("least", sum(not word.is_optional for word in self.words))
        put("is_constant", not any(word.varies for word in self.words))
        put("family", self.family or self.name)
        is_publish = self.body.kind in (Kind.MESSAGE, Kind.MESSAGES)
        fields = tuple(word.field for word in self.words)
        names = tuple(_PUBLISH_FIELDS)
        put("publish_values", _picker((*fields, *names), names) if is_publish else None)
        put("is_run", self.body.kind is Kind.MESSAGE and _RUN_FIELDS.issuperset(fields))
        put("is_place_alone", fields == ("topic", "partition"))
        put("line_values", _picker(names, fields) if is_publish else tuple)
        if is_publish:
            put("failure", f"E_{self.family}_FAILED")

    @property
    def is_publish(self) -> bool:
        """Whether it publishes messages."""
        return self.publish_values is not None

    @property
    def form(self) -> str:
        """The line and the body as documented."""
        line, end = self.name, ""
        for word in self.words:
            if word.is_shown and word.is_optional:
                line, end = f"{line} [<{word.name}>", end + "]"
            elif word.is_shown:
                line += f" <{word.name}>"
        return f"{line}{end}\\n{self.body.form}"

    @property
    def errors(self) -> tuple[str, ...]:
        """The codes that it can be answered with, what has to do with AUTH apart."""
        of_words = (code for word in self.words for code in word.errors)
        failure = (self.failure,) if self.failure else ()
        return tuple(dict.fromkeys(("E_INVALID", *of_words, *self.body.errors, *self.refusals, *failure)))

    def closes(self, code: str) -> bool:
        """Whether a server closes the connection behind this error to this command, on a plain topic."""
        return code in self.closing or is_fatal(code)

    def read(self, reader: Reader, line: Sequence[bytes]) -> tuple[Any, ...]:
        """Return the values of the words of a line, its name in front.

        Raises:
            Refused: words are missing, or cannot be.
        """
        count = len(line) - 1
        name = self.name
        if count < self.least:
            raise Refused("E_INVALID", f"{name} {self.lack}")
        if self.is_exact and count > len(self.words):
            raise Refused("E_INVALID", f"{name} invalid number of parameters")
        values = [
            word.read(reader, name, line, index) if index <= count else word.absent
            for index, word in enumerate(self.words, 1)
        ]
        return tuple(values) if self.publish_values is None else self.publish_values((*values, *_DEFAULTS))

    def line(self, *values: Any) -> bytes:
        """Write a line, with its end, of the values of its words; the inverse of :meth:`read`.

        Raises:
            LocalProtocolError: a word would be refused.
        """
        name = self.name
        words = [self.head, *[word.write(name, value) for word, value in zip(self.words, values, strict=True)]]
        return b" ".join(words if words[-1] else filter(None, words)) + b"\n"  # only what is last may be left out


def reader_of(row: Command) -> Callable[[Reader, Sequence[bytes]], tuple[Any, ...]]:
    """Return :meth:`Command.read` with as little as possible to decide for each line; for words that must be there."""
    name, reads = row.name, [word.read for word in row.words]
    assert row.least == len(reads) > 0 and not row.is_exact

    def one(reader: Reader, line: Sequence[bytes]) -> tuple[Any, ...]:
        return (first(reader, name, line, 1),) if len(line) > 1 else row.read(reader, line)

    def two(reader: Reader, line: Sequence[bytes]) -> tuple[Any, ...]:
        if len(line) > 2:
            return first(reader, name, line, 1), second(reader, name, line, 2)
        return row.read(reader, line)

    if row.is_publish or len(reads) > 2:
        return row.read
    first, second = reads[0], reads[-1]
    return one if len(reads) == 1 else two


def _picker(given: Sequence[str], wanted: Sequence[str]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function that picks the values of some fields out of those of others; of two with one name the first."""
    return itemgetter(*map(given.index, wanted))


_INIT = (INIT,)
_CONSUMING = (SUBSCRIBED, CLOSING)
_ANY = (INIT, SUBSCRIBED, CLOSING)
_NOTHING, _MESSAGE, _MESSAGES = Body(), Body(Kind.MESSAGE), Body(Kind.MESSAGES)
_TRACED, _TRACED_MESSAGES = Body(Kind.MESSAGE, front=TRACED), Body(Kind.MESSAGES, front=TRACED)
_HEADED, _HEADED_MESSAGES = Body(Kind.MESSAGE, front=HEADED), Body(Kind.MESSAGES, front=HEADED)
_JSON, _SECRET = Body(Kind.SIZED, "[4 size][JSON]"), Body(Kind.SIZED, "[4 size][secret]")
_RANGE = Body(Kind.FIXED, "[8 start][8 end][4 bytes_max][4 epoch]", fields=FETCH_BODY)
_TOPIC, _CHANNEL, _PARTITION, _DELAY, _ID = Topic(), Channel("channel"), Partition(), Delay(), MessageId("id")
_TO = (_TOPIC, _PARTITION)
_LATER = (_TOPIC, _DELAY, _PARTITION)
_ONLY = Partition("partition|-", ..., ONLY_PARTITION)
_ONCE = (_TOPIC, _ONLY, ProducerId("producer_id"), FirstSequence("sequence"))
_ONCE_SEVERAL = (*_ONCE[:3], FirstSequence("first_sequence"))
_ONCE_LATER = (_TOPIC, _DELAY, *_ONCE_SEVERAL[1:])
_FROM = (_TOPIC, _CHANNEL, _PARTITION)
_IN_ORDER = (*_FROM, NoStart("start", None))
_COUNT = Number("count", "count ", absent=1, limit="max_rdy_count")
_TIMEOUT = Number("timeout_ms", "timeout ", unit=" ms")
_TIMESTAMP = Number("timestamp_ns", "timestamp ", absent=None)
_NUMBER = Number("partition", "partition ")
_AT = (Number("partition", "", span=(0, 2)), Number("sequence", "", span=(-1, 1), special=(-1, -2)))
_EXTENDED = Switch("extend", False, "E_BAD_EXT")
_STORED = "OK and 28 bytes"
_PLACE = ("E_TOPIC_NOT_EXIST", "E_BAD_PARTITION", "E_FAILED_ON_NOT_WRITABLE")
_SUB_REFUSALS = ("E_TOPIC_NOT_EXIST", "E_SUB_ORDER_IS_MUST", "E_SUB_CHANNEL_NOT_REGISTERED", "E_SUB_EXTEND_NEED",
                 "E_SUB_EXTEND_FORBIDDON")  # fmt: skip
_CLOSING: dict[str, Any] = {"closing": ("E_TOPIC_NOT_EXIST",)}
_PUB: dict[str, Any] = {"refusals": _PLACE, **_CLOSING}
_AS_PUB, _AS_MPUB = {**_PUB, "family": "PUB"}, {**_PUB, "family": "MPUB"}
_GAPS: dict[str, Any] = {"refusals": (*_PLACE, "E_SEQUENCE_GAP"), **_CLOSING}
_AS_MPUB_ONCE = {**_GAPS, "family": "MPUB_ONCE"}
_SUB: dict[str, Any] = {
    "then": SUBSCRIBED, "needs_heartbeats": True, "failure": "E_SUB_FAILED", "refusals": _SUB_REFUSALS, **_CLOSING,
}  # fmt: skip
_OF_ID: dict[str, Any] = {"lack": "insufficient number of params"}
_UPGRADE: dict[str, Any] = {"pauses": True, "failure": "E_IDENTIFY_FAILED"}
_PASS: dict[str, Any] = {"pauses": True, "is_exact": True, "failure": "E_AUTH_FAILED"}
_WHERE: dict[str, Any] = {"refusals": ("E_TOPIC_NOT_EXIST",)}
_READ: dict[str, Any] = {
    "refusals": ("E_TOPIC_NOT_EXIST", "E_OFFSET_OUT_OF_RANGE", "E_STALE_EPOCH"), "failure": "E_FETCH_FAILED",
}  # fmt: skip
_CREATE: dict[str, Any] = {"failure": "E_CREATE_TOPIC_FAILED"}
_CURSOR: dict[str, Any] = {"refusals": ("E_TOPIC_NOT_EXIST",), "failure": "E_SUB_FAILED"}
_ROWS = (
    Command("IDENTIFY", (), _JSON, "OK or JSON", _INIT, "nsq", "describe the client, negotiate", **_UPGRADE),
    Command("AUTH", (), _SECRET, "JSON", _INIT, "nsq", "authorise the connection", **_PASS),
    Command("SUB", _FROM, _NOTHING, "OK", _INIT, "nsq", "subscribe to a channel", **_SUB),
    Command("SUB_ORDER", _IN_ORDER, _NOTHING, "OK", _INIT, "youzan", "subscribe to a partition, in its order", **_SUB),
    Command("SUB_ORDERED", _IN_ORDER, _NOTHING, "OK", _INIT, "youzan", "SUB_ORDER under its older name", **_SUB),
    Command("SUB_ADVANCED", (*_FROM, Start("start", None)), _NOTHING, "OK", _INIT, "youzan",
            "subscribe, and the first one says from where", **_SUB),
    Command("PUB", _TO, _MESSAGE, "OK", _ANY, "nsq", "publish one message", **_PUB),
    Command("MPUB", (Topic(twice=True), _PARTITION), _MESSAGES, "OK", _ANY, "nsq", "publish several messages", **_PUB),
    Command("DPUB", _LATER, _MESSAGE, "OK", _ANY, "nsq", "publish for later delivery", **_PUB),
    Command("MDPUB", _LATER, _MESSAGES, "OK", _ANY, "flintmq", "publish several messages for later delivery", **_PUB),
    Command("PUB_ONCE", _ONCE, _MESSAGE, "OK", _ANY, "flintmq", "publish one message, unless it was before", **_GAPS),
    Command("MPUB_ONCE", _ONCE_SEVERAL, _MESSAGES, "OK", _ANY, "flintmq",
            "publish several messages, unless they were before", **_GAPS),
    Command("MDPUB_ONCE", _ONCE_LATER, _MESSAGES, "OK", _ANY, "flintmq",
            "publish several messages for later delivery, unless they were before", **_AS_MPUB_ONCE),
    Command("MPUB_TRACE_ONCE", _ONCE_SEVERAL, _TRACED_MESSAGES, "OK", _ANY, "flintmq",
            "publish several messages with trace ids, unless they were before", **_AS_MPUB_ONCE),
    Command("MPUB_EXT_ONCE", _ONCE_SEVERAL, _HEADED_MESSAGES, "OK", _ANY, "flintmq",
            "publish several messages with headers, unless they were before", **_AS_MPUB_ONCE),
    Command("PUB_TRACE", _TO, _TRACED, _STORED, _ANY, "youzan", "publish one message with a trace id", **_AS_PUB),
    Command("MPUB_TRACE", _TO, _TRACED_MESSAGES, _STORED, _ANY, "youzan", "publish several messages with trace ids",
            **_AS_MPUB),
    Command("PUB_EXT", _TO, _HEADED, f"OK, or {_STORED}", _ANY, "youzan", "publish one message with headers",
            **_AS_PUB),
    Command("MPUB_EXT", _TO, _HEADED_MESSAGES, "OK", _ANY, "youzan", "publish several messages with headers",
            **_AS_MPUB),
    Command("INTERNAL_CREATE_TOPIC", (_TOPIC, Partition("partition", ...), _EXTENDED), _NOTHING, "OK", _ANY, "youzan",
            "create a partition of a topic, on an nsqd that belongs to no cluster", **_CREATE),
    Command("RDY", (_COUNT,), _NOTHING, "", _CONSUMING, "nsq", "how many messages may be in flight",
            ignored_in=CLOSING),
    Command("FIN", (_ID,), _NOTHING, "", _CONSUMING, "nsq", "finish a message", failure="E_FIN_FAILED", **_OF_ID),
    Command("REQ", (_ID, _TIMEOUT), _NOTHING, "", _CONSUMING, "nsq", "give a message back", failure="E_REQ_FAILED",
            **_OF_ID),
    Command("TOUCH", (_ID,), _NOTHING, "", _CONSUMING, "nsq", "restart a message's timeout",
            failure="E_TOUCH_FAILED", **_OF_ID),
    Command("CLS", (), _NOTHING, "CLOSE_WAIT", (SUBSCRIBED,), "nsq", "ask for no more messages", then=CLOSING),
    Command("NOP", (), _NOTHING, "", _ANY, "nsq", "answer a heartbeat"),
    Command("PRODUCERS", (_TOPIC, ProducerId("prefix")), _NOTHING, "JSON", _ANY, "flintmq",
            "where partitions are, and how far producers whose ids begin like this are with them", **_WHERE),
    Command("OFFSETS", (_TOPIC, _TIMESTAMP), _NOTHING, "JSON", _ANY, "flintmq", "where partitions begin, end",
            **_WHERE),
    Command("FETCH", (_TOPIC, _NUMBER), _RANGE, "[8 next][batches]", _ANY, "flintmq", "read stored batches", **_READ),
    Command("CURSOR", (_TOPIC, _CHANNEL, *_AT), _NOTHING, "JSON", _ANY, "flintmq",
            "create a channel at a position, or confirm up to it", **_CURSOR),
)  # fmt: skip
COMMANDS = {row.name: row for row in _ROWS}
PUBLISHING = {row.name: row for row in _ROWS if row.is_publish}
_BY_FIELDS = {(row.body.kind, row.body.front, frozenset(word.field for word in row.words)): row for row in
              PUBLISHING.values()}  # fmt: skip
assert len(_BY_FIELDS) == len(PUBLISHING), "two commands say the same"


# -- publishing --------------------------------------------------------------------------------------------------------


def publish(
    row: Command,
    topic: str,
    bodies: Sequence[bytes],
    partition: int | None = None,
    defer_ms: int = 0,
    fronts: Sequence[Any] | None = None,
    producer_id: str | None = None,
    sequence: int = 0,
) -> bytes:
    """Return a command that publishes.

    Args:
        bodies: one for a command of one message.
        fronts: trace ids as numbers, or headers as bytes; one for each body, None for a command without.
        sequence: of the first body, from 1 on.

    Raises:
        LocalProtocolError: a server would refuse it.
    """
    if row.is_place_alone:
        line = _line_to(row, topic, partition)
    else:
        line = row.line(*row.line_values((topic, partition, defer_ms, producer_id, sequence)))
        count = len(bodies)
        if producer_id is not None and not 0 < sequence <= PRODUCER_SEQUENCE_MAX - count + 1:
            what = f"sequence {sequence} of {count} messages is not within 1 and 2^63-1"
            raise LocalProtocolError("E_INVALID", what)
    return b"".join((line, *row.body.write(row.name, bodies, fronts)))


@lru_cache(maxsize=4096)
def _line_to(row: Command, topic: str, partition: int | None) -> bytes:
    """Return a line that names a place and nothing else."""
    return row.line(topic, partition)


@lru_cache
def publish_row(is_one: bool, is_delayed: bool, is_traced: bool, has_headers: bool, is_once: bool) -> Command:
    """Return the command that publishes one message or several in this way; one message may need that for several.

    Raises:
        LocalProtocolError: there is none that can do all of it at once.
    """
    fields = {"topic", "partition"}
    if is_delayed:
        fields.add("defer_ms")
    if is_once:
        fields |= {"producer_id", "sequence"}
    kind = Kind.MESSAGE if is_one else Kind.MESSAGES
    front = HEADED if has_headers else TRACED if is_traced else PLAIN
    row = _BY_FIELDS.get((kind, front, frozenset(fields)))
    if row is None and is_once:  # there is no PUB of its own for what is rarely published one by one
        row = _BY_FIELDS.get((Kind.MESSAGES, front, frozenset(fields)))
    if row is None or (has_headers and is_traced):
        asked = {"a delay": is_delayed, "trace ids": is_traced, "headers": has_headers, "a sequence": is_once}
        what = " and ".join(name for name, is_asked in asked.items() if is_asked)
        raise LocalProtocolError("E_INVALID", f"no command publishes with {what}")
    return row


def pub(topic: str, body: bytes, partition: int | None = None) -> bytes:
    """Encode ``PUB``, to one partition of a redesigned NSQ if it is named; the body must not be empty."""
    return publish(COMMANDS["PUB"], topic, (body,), partition)


def mpub(topic: str, bodies: Sequence[bytes], partition: int | None = None) -> bytes:
    """Encode ``MPUB``, to one partition of a redesigned NSQ if it is named; at least one body, none empty."""
    return publish(COMMANDS["MPUB"], topic, bodies, partition)


def dpub(topic: str, defer_ms: int, body: bytes, partition: int | None = None) -> bytes:
    """Encode ``DPUB``: deliver not before ``defer_ms`` milliseconds from now.

    Args:
        partition: behind the delay, as only our nsqd has it.
    """
    return publish(COMMANDS["DPUB"], topic, (body,), partition, defer_ms)


def mdpub(topic: str, defer_ms: int, bodies: Sequence[bytes], partition: int | None = None) -> bytes:
    """Encode ``MDPUB``: deliver them not before ``defer_ms`` milliseconds from now; only our nsqd has it."""
    return publish(COMMANDS["MDPUB"], topic, bodies, partition, defer_ms)


# -- the others --------------------------------------------------------------------------------------------------------


def identify(body: bytes) -> bytes:
    """Encode ``IDENTIFY`` with a JSON body."""
    return b"IDENTIFY\n" + UINT32.pack(len(body)) + body


def auth(secret: bytes) -> bytes:
    """Encode ``AUTH`` with a secret."""
    return b"AUTH\n" + UINT32.pack(len(secret)) + secret


def sub(topic: str, channel: str, partition: int | None = None) -> bytes:
    """Encode ``SUB``, to one partition of a redesigned NSQ if it is named."""
    return COMMANDS["SUB"].line(topic, channel, partition)


def rdy(count: int) -> bytes:
    """Encode ``RDY``."""
    return COMMANDS["RDY"].line(count)


def fin(message_id: bytes) -> bytes:
    """Encode ``FIN``."""
    return COMMANDS["FIN"].line(message_id)


def fins(message_ids: Iterable[bytes]) -> bytes:
    """Return a run of ``FIN`` as one write; ids are taken as they came from the wire."""
    joined = b"\nFIN ".join(message_ids)
    return b"FIN " + joined + b"\n" if joined else b""


def req(message_id: bytes, timeout_ms: int) -> bytes:
    """Encode ``REQ``: give the message back, to be delivered again after ``timeout_ms``."""
    return COMMANDS["REQ"].line(message_id, timeout_ms)


def touch(message_id: bytes) -> bytes:
    """Encode ``TOUCH``."""
    return COMMANDS["TOUCH"].line(message_id)


def offsets(topic: str, timestamp_ns: int | None = None) -> bytes:
    """Encode ``OFFSETS``; with a timestamp the answer also says where the first message at or after it is."""
    return COMMANDS["OFFSETS"].line(topic, timestamp_ns)


def producers(topic: str, prefix: str) -> bytes:
    """Encode ``PRODUCERS``: where partitions are, and the last sequences of producers whose ids begin with a prefix."""
    return COMMANDS["PRODUCERS"].line(topic, prefix)


def fetch(
    topic: str, partition: int, start: int, end: int, bytes_max: int, epoch: int = 0, is_verified: bool = True
) -> bytes:
    """Encode ``FETCH``: the stored batches that overlap sequences ``start`` to ``end`` (exclusive).

    Args:
        is_verified: nsqd verifies them; else it need not, and the caller has to.
    """
    if not is_verified:
        bytes_max |= FETCH_UNVERIFIED
    return _line_to(COMMANDS["FETCH"], topic, partition) + FETCH_BODY.pack(start, end, bytes_max, epoch)


def cursor(topic: str, channel: str, partition: int, sequence: int) -> bytes:
    """Encode ``CURSOR``: create the channel at ``sequence`` (-1 latest, -2 earliest), or confirm all below it."""
    return COMMANDS["CURSOR"].line(topic, channel, partition, sequence)
