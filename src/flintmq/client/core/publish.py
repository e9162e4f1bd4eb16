"""A publish on its way: who waits for it, until when, and what is known of its outcome.

What this room needs of a connection and of whoever waits is said here as protocols: :class:`Carrier`, :class:`Waiter`.

Rules of this file:

- A waiter ends once: with None, :class:`PublishRefused` (definitely not stored) or :class:`PublishUnknown` (may be
  stored). What is not answered is unknown from the moment it was sent, and stays so when a later attempt is refused.
- Gathered publishes are those of one turn to one topic; each has its own waiter and its own outcome when nsqd finds
  fault with one of them. An ``mpub`` is one publish with one waiter and stays whole.
- One that has to keep its order carries its keys and stands in a line (:mod:`.lanes`).
- Traced ones and those with headers are never gathered: nsqd says of each where it is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast

from flintmq.client.core.backoff import jittered_s
from flintmq.client.core.bodies import encoded, is_model
from flintmq.client.core.envelope import wrap
from flintmq.client.options import SOURCE, whole
from flintmq.errors import (
    FlintError,
    LocalProtocolError,
    NsqdError,
    OptionError,
    PublishError,
    PublishRefused,
    PublishUnknown,
    RemoteProtocolError,
)
from flintmq.message import HEADERS_SIZE_MAX, TRACE_ID_HEADER
from flintmq.names import is_valid_name, why_invalid
from flintmq.wire.codes import CODES
from flintmq.wire.extended import TRACE_ID_MAX, Stored, parse_stored

if TYPE_CHECKING:
    from flintmq.client.core.link import Answered
    from flintmq.client.core.once import Writer
    from flintmq.client.core.sharding import ShardingId

TRIES_MAX = 3
RETRY_BASE_S = 0.02
RETRY_MAX_S = 1.0
RETRY_JITTER = 0.5
STALLED_SHARE = 0.9
TOPIC_COUNT_MAX = 10_000
LOOKUP_JITTER = 0.3

MESSAGE_OVERHEAD_BYTES = 64
"""Cost of a message beside its body while it is on its way; bounds the number of tiny ones."""

DEADLINE_GRAIN_S = 0.05
"""Publishes whose deadlines differ by less are gathered; the earlier deadline holds for all."""

BAD_MESSAGE_CODES = ("E_BAD_MESSAGE", "E_BAD_BODY")
CONGESTED_CODE = "E_PUB_TOO_MUCH_WAITING"
CONGESTED_FACTOR = 10

Body: TypeAlias = Any
"""A body: bytes, or a value that msgspec writes as JSON (Struct, dataclass, dict, list, number); not text."""


CallSoon: TypeAlias = Callable[..., object]
"""``call_soon(callback, *args)``: have it called behind what is being done now, before anything is waited for."""


class Waiter(Protocol):
    """The caller, who is told once how a publish ended; an :class:`asyncio.Future` is one.

    Not a callback: whoever does not wait any more (:meth:`done`) is not published for.
    """

    def done(self) -> bool: ...
    def set_result(self, result: Published | None, /) -> object: ...
    def set_exception(self, exception: PublishError, /) -> object: ...


class Carrier(Protocol):
    """A connection as far as publishing needs one: a :class:`flintmq.client.core.link.Link` with its transport.

    Each ``answered`` is called once, whatever happens.

    Attributes:
        address: ``host:port``.
        is_write_paused: nsqd takes bytes more slowly than they are sent.
    """

    address: str
    is_write_paused: bool

    def publish(
        self,
        topic: str,
        bodies: Sequence[bytes],
        answered: Answered,
        partition: int | None,
        defer_ms: int | None,
        trace_ids: Sequence[int] | None,
        headers: Sequence[bytes] | None,
        producer_id: str | None,
        sequence: int,
        /,
    ) -> None: ...
    def describe(self) -> str:
        """Say in one line where the connection stands."""

    def flush(self) -> None:
        """Write what was published."""

    def flush_soon(self) -> None:
        """Write it at the end of the turn."""

    def abort(self, reason: str, /) -> None:
        """Give the connection up at once."""

    def close(self) -> None:
        """Write what was published and close."""


@dataclass(frozen=True, slots=True)
class Published:
    """The place where a traced message is stored; of several, that of the first.

    Attributes:
        nsqd: ``host:port``.
        internal_id, offset, raw_size: its id without the trace id, the bytes of the partition's log before it, and what
            it takes there; None if nsqd answered a plain OK.
    """

    nsqd: str
    partition: int
    internal_id: int | None
    trace_id: int
    offset: int | None
    raw_size: int | None


@dataclass(frozen=True, slots=True)
class Context:
    """Headers that carry the context of a span, as long as it is not known whether the topic has headers.

    Attributes:
        values: names and values, for envelopes.
        headers: JSON objects with them, one for each body; None: no header can go with these messages.
        has_envelope: they go in an envelope where the topic has no headers.
    """

    values: Mapping[str, str]
    headers: list[bytes] | None
    has_envelope: bool


class Publish:
    """One or more messages to one topic that travel as one command.

    Attributes:
        waiters: one for all bodies, or one for each body of a gathered publish.
        deadline: seconds on the producer's clock.
        look_at: when to look how it is going, at the latest at the deadline.
        defer_ms: DPUB, or MDPUB of several, when not None.
        cost: bytes it counts for in the back-pressure.
        tries: how often nsqd refused it.
        is_unknown: it may have been stored by an attempt that was not answered.
        connection: where it waits for an answer, since ``sent_at``, of ``partition`` if that is not None.
        error: why the last attempt failed.
        keys: what must stay in order: one for each body of a gathered publish, otherwise one; None: nothing.
        sharding_id: decides the partition, as soon as their number is known.
        is_in_line: it stands in the line of its partition, or is what that line waits for.
        trace_ids: one for each body: they are sent traced where there are partitions.
        is_trace_asked: its waiter wants to know where it was stored.
        headers: JSON objects, one for each body.
        context: that of a span, until it is known how it goes with the messages; see :meth:`settle_context`.
        needs_partition: it can be published only where there are partitions.
        writer: that it is published with, if that is to be idempotent; until its outcome is known it goes nowhere else.
        learned_count: lookups of its topic that had said something when its partition was none of those known;
            None: it was not.
        is_out_of_sequence: nsqd expects another sequence of its writer than the one it has.
    """

    # Most publishes never change these: they stand at the class, so that making one is cheap.
    is_unknown = False
    is_done = False
    tries = 0
    error: FlintError | None = None
    partition: int | None = None
    keys: list[object] | None = None
    sharding_id: ShardingId | None = None
    is_in_line = False
    trace_ids: list[int] | None = None
    is_trace_asked = False
    headers: list[bytes] | None = None
    context: Context | None = None
    needs_partition = False
    writer: Writer | None = None
    is_out_of_sequence = False
    learned_count: int | None = None

    def __init__(
        self,
        topic: str,
        bodies: list[bytes],
        waiters: list[Waiter],
        deadline: float,
        cost: int,
        *,
        defer_ms: int | None = None,
        is_gathered: bool = False,
    ) -> None:
        self.topic = topic
        self.bodies = bodies
        self.waiters = waiters
        self.deadline = deadline
        self.cost = cost
        self.defer_ms = defer_ms
        self.is_gathered = is_gathered
        self.connection: Carrier | None = None
        self.sent_at = 0.0
        self.look_at = 0.0

    def describe(self) -> str:
        """Say in one line what it is and where it is."""
        where = f"sent to {self.connection.address}" if self.connection else "waiting to be sent"
        return f"{len(self.bodies)} to {self.topic}, {where}, tries={self.tries} unknown={self.is_unknown}"

    def drop_cancelled(self) -> bool:
        """Leave out what nobody waits for any more; False when nothing is left to send."""
        for waiter in self.waiters:
            if waiter.done():
                break
        else:
            return True
        if self.writer is not None:
            return not all(waiter.done() for waiter in self.waiters)  # its sequences are those of all bodies
        if self.is_gathered:
            kept = [index for index, waiter in enumerate(self.waiters) if not waiter.done()]
            self.bodies = [self.bodies[index] for index in kept]
            self.waiters = [self.waiters[index] for index in kept]
            if self.keys is not None:
                self.keys = [self.keys[index] for index in kept]
            return bool(kept)
        return False

    def split(self) -> list[Publish]:
        """Each message as a publish of its own."""
        parts = [
            Publish(self.topic, [body], [waiter], self.deadline, message_cost(body), is_gathered=True)
            for body, waiter in zip(self.bodies, self.waiters, strict=True)
        ]
        for index, part in enumerate(parts):
            part.is_unknown = self.is_unknown
            if self.keys is not None:
                part.partition = self.partition
                part.keys = [self.keys[index]]
                part.needs_partition = True
        return parts

    def absorb(self, other: Publish) -> None:
        """Take in the messages of another gathered publish of the same line."""
        self.bodies += other.bodies
        self.waiters += other.waiters
        self.cost += other.cost
        if self.keys is not None and other.keys is not None:
            self.keys += other.keys

    def take_out(self, marks: Sequence[bool]) -> Publish:
        """Take the marked messages out, as a publish that costs nothing; some must stay."""
        assert self.keys is not None
        kept, taken = ([index for index, mark in enumerate(marks) if mark is wanted] for wanted in (False, True))
        part = Publish(
            self.topic,
            [self.bodies[index] for index in taken],
            [self.waiters[index] for index in taken],
            self.deadline,
            0,
            is_gathered=True,
        )
        part.is_unknown = self.is_unknown
        part.keys = [self.keys[index] for index in taken]
        self.bodies = [self.bodies[index] for index in kept]
        self.waiters = [self.waiters[index] for index in kept]
        self.keys = [self.keys[index] for index in kept]
        return part

    def settle_context(self, is_extended: bool) -> None:
        """Have the context of its span go in headers or in envelopes, for good; without either it is left out.

        Args:
            is_extended: messages of its topic may carry headers.
        """
        context, self.context = self.context, None
        if context is None:
            return
        if is_extended:
            self.headers = context.headers
        if context.has_envelope:
            self.bodies = in_envelopes({} if is_extended else context.values, self.bodies)

    def send(self, connection: Carrier, partition: int | None, answered: Answered) -> None:
        """Put it on a connection, to this partition if it names one."""
        self.connection = connection
        if partition is not None or self.partition is not None:
            self.partition = partition
        writer = self.writer
        if self.defer_ms is not None and len(self.bodies) == 1 and not self.needs_partition and writer is None:
            partition = None  # NSQ's DPUB knows none
        connection.publish(
            self.topic,
            self.bodies,
            answered,
            partition,
            self.defer_ms,
            None if partition is None or self.headers is not None else self.trace_ids,  # headers have them in JSON
            self.headers,
            None if writer is None else writer.producer_id,
            0 if writer is None else writer.sequence,
        )

    def read_answer(self, answer: bytes) -> Stored | None:
        """Return where nsqd says that it is stored; None for a plain OK.

        Raises:
            RemoteProtocolError: it is no answer to this.
        """
        if answer == b"OK":
            return None
        if self.trace_ids is None:
            raise RemoteProtocolError("E_INVALID", f"answer {answer[:32]!r} to a publish")
        return parse_stored(answer)

    def published(self, nsqd: str, stored: Stored | None) -> Published | None:
        """Return where it is stored, if its caller wants to know."""
        if not self.is_trace_asked:
            return None
        assert self.trace_ids is not None
        assert self.partition is not None
        where = (None, None, None) if stored is None else (stored.internal_id, stored.offset, stored.raw_size)
        return Published(nsqd, self.partition, where[0], self.trace_ids[0], *where[1:])

    def succeed(self, nsqd: str = "", stored: Stored | None = None) -> None:
        """Tell everybody who waits."""
        published = self.published(nsqd, stored) if self.is_trace_asked else None
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(published)

    def fail(self, failure: Failure) -> None:
        """Tell everybody who waits; each is given an exception of its own, because tracebacks grow on them."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(self.exception(failure))

    def exception(self, failure: Failure) -> PublishError:
        """The exception that says what is known: :class:`PublishUnknown` or :class:`PublishRefused`."""
        kind = PublishUnknown if self.is_unknown else PublishRefused
        error = kind(failure.code, failure.detail, failure.nsqd, failure.retryable)
        error.__cause__ = bare(self.error)
        return error


class Failure(NamedTuple):
    """A publish has failed: what its caller is told."""

    code: str
    detail: str
    nsqd: str = ""
    retryable: bool = True


class Gather:
    """Collects the publishes of one turn, by topic.

    Args:
        call_soon: ends the turn.
        send: is handed each publish when the turn ends or it is full.
        turn_ended: called behind the last of a turn.
        count_max: messages of one MPUB.
        bytes_max: bytes of the bodies of one MPUB.
    """

    __slots__ = ("_call_soon", "_send", "_turn_ended", "_count_max", "_bytes_max", "_open", "_is_due")

    def __init__(
        self,
        call_soon: CallSoon,
        send: Callable[[Publish], None],
        turn_ended: Callable[[], None],
        count_max: int,
        bytes_max: int,
    ) -> None:
        self._call_soon = call_soon
        self._send = send
        self._turn_ended = turn_ended
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._open: dict[str, Publish] = {}
        self._is_due = False

    def add(self, topic: str, body: bytes, waiter: Waiter, deadline: float, cost: int) -> None:
        """Add a message; its waiter is told how it ended."""
        publish = self._open.get(topic)
        if publish is not None and self._fits(publish, cost, deadline):
            publish.bodies.append(body)
            publish.waiters.append(waiter)
            publish.cost += cost
            if deadline < publish.deadline:
                publish.deadline = deadline
            return
        if publish is not None:
            self._send(publish)
        self._open[topic] = Publish(topic, [body], [waiter], deadline, cost, is_gathered=True)
        if not self._is_due:
            self._is_due = True
            self._call_soon(self.flush)

    def _fits(self, publish: Publish, cost: int, deadline: float) -> bool:
        return (
            len(publish.bodies) < self._count_max
            and publish.cost + cost <= self._bytes_max
            and -DEADLINE_GRAIN_S < deadline - publish.deadline < DEADLINE_GRAIN_S
        )

    def flush(self) -> None:
        """Hand over everything that was gathered."""
        self._is_due = False
        collected, self._open = self._open, {}
        for publish in collected.values():
            self._send(publish)
        self._turn_ended()


def message_cost(body: bytes) -> int:
    """Bytes a message counts for in the back-pressure."""
    return len(body) + MESSAGE_OVERHEAD_BYTES


def messages_cost(bodies: Sequence[bytes]) -> int:
    """Bytes several messages count for in the back-pressure."""
    return sum(map(len, bodies)) + MESSAGE_OVERHEAD_BYTES * len(bodies)


@lru_cache(maxsize=4096)
def check_topic(topic: str) -> None:
    """Raise LocalProtocolError unless a topic can have this name."""
    if not is_valid_name(topic):
        raise LocalProtocolError("E_BAD_TOPIC", why_invalid("topic", topic))


def checked_body(body: Any) -> bytes:
    """Take a body as bytes; a value that is none becomes JSON.

    Raises:
        TypeError: it is text, which must be encoded, or nothing that JSON can say.
        LocalProtocolError: it is empty, which nsqd refuses.
    """
    if isinstance(body, bytes):
        data = body
    else:
        data = bytes(body) if isinstance(body, bytearray | memoryview) else encoded(body)
    if not data:
        raise LocalProtocolError("E_BAD_MESSAGE", "a body is empty; nsqd accepts 1 byte or more")
    return data


def checked_bodies(bodies: Iterable[Any]) -> list[bytes]:
    """Take several bodies as bytes.

    Raises:
        TypeError: it is one body, of which the parts would be published; or as :func:`checked_body`.
        LocalProtocolError: there is none; or as :func:`checked_body`.
    """
    is_one = isinstance(cast(object, bodies), bytes | bytearray | memoryview | str | Mapping) or is_model(bodies)
    if is_one or not hasattr(bodies, "__iter__"):
        kind = type(bodies).__name__
        raise TypeError(f"several bodies are a list of them, not {kind}; pub() publishes one")
    listed = list(bodies)
    if not listed:
        raise LocalProtocolError("E_BAD_MESSAGE", "MPUB of no message; at least one is needed")
    if set(map(type, listed)) == {bytes} and all(listed):
        return cast(list[bytes], listed)  # the common case, checked without a call per body
    return [checked_body(body) for body in listed]


def checked_headers(headers: Mapping[str, object], trace_id: int | None) -> bytes:
    """Headers as they travel, the trace id among them.

    Raises:
        TypeError: JSON cannot say one of them.
        LocalProtocolError: together they are too large, or one has a name that is nsqd's own.
    """
    if TRACE_ID_HEADER in headers:
        raise LocalProtocolError("E_INVALID_JSON_HEADER", f"header {TRACE_ID_HEADER} is nsqd's own: pass trace_id")
    found = dict(headers) if trace_id is None else {**headers, TRACE_ID_HEADER: str(trace_id)}
    data = encoded(found, "headers are names and values for JSON")
    if len(data) > HEADERS_SIZE_MAX:
        raise LocalProtocolError("E_BAD_EXT", f"headers of {len(data)} bytes, at most {HEADERS_SIZE_MAX}")
    return data


def checked_trace_ids(trace_id: int | Sequence[int] | None, count: int) -> list[int] | None:
    """The trace ids of so many messages: one for all, or one for each; None: none are asked for.

    Raises:
        OptionError: one is out of range, or there are not as many as messages.
    """
    if trace_id is None:
        return None
    if isinstance(trace_id, list | tuple):
        _check_count("trace_id", len(trace_id), count)
        return [whole(each, "trace_id", 0, TRACE_ID_MAX) for each in trace_id]
    return [whole(cast(int, trace_id), "trace_id", 0, TRACE_ID_MAX)] * count


def headers_of_all(
    headers: Mapping[str, object] | Sequence[Mapping[str, object]], count: int, trace_ids: Sequence[int] | None
) -> list[bytes]:
    """The headers of so many messages as they travel: one object for all, or one for each.

    Raises:
        TypeError: they are no mapping from names, or JSON cannot say one.
        OptionError: there are not as many as messages.
        LocalProtocolError: as :func:`checked_headers`.
    """
    if not isinstance(headers, Mapping):
        if not isinstance(headers, list | tuple) or not all(isinstance(each, Mapping) for each in headers):
            raise TypeError("headers are a mapping from names to values, or a list of such, one for each message")
        _check_count("headers", len(headers), count)
        return [*map(checked_headers, headers, [None] * count if trace_ids is None else trace_ids)]
    if trace_ids is None:
        return [checked_headers(headers, None)] * count  # most often, and said in JSON once
    return [checked_headers(headers, trace_id) for trace_id in trace_ids]


def with_carried(
    headers: Mapping[str, object] | Sequence[Mapping[str, object]] | None, carried: Mapping[str, object]
) -> Mapping[str, object] | Sequence[Mapping[str, object]]:
    """Headers, and those that carry the context of a span."""
    if headers is None or isinstance(headers, Mapping):
        return {**(headers or {}), **carried}
    return [{**each, **carried} for each in headers]


def in_envelopes(values: Mapping[str, str], bodies: Sequence[bytes]) -> list[bytes]:
    """Bodies in envelopes with these headers; without any only what could be taken for an envelope is in one.

    Raises:
        LocalProtocolError: the headers are too large.
    """
    return [wrap(values, body) for body in bodies]


def _check_count(option: str, found: int, count: int) -> None:
    if found != count:
        raise OptionError(option, f"{found} of them", f"one for all messages, or one for each of the {count}", SOURCE)


def refreshes_lookup(error: NsqdError) -> bool:
    """Whether the nsqlookupd may know by now where to publish instead (Youzan's smart client)."""
    row = CODES.get(error.code)
    return row is None or row.action == "refresh_then_retry"


def is_bad_message(error: NsqdError, bodies: Sequence[bytes]) -> bool:
    """Whether nsqd refused several messages because of one of them."""
    return error.code in BAD_MESSAGE_CODES and len(bodies) > 1


def is_delay_too_long(publish: Publish, error: NsqdError) -> bool:
    """Whether nsqd refused a publish because its delay is longer than it allows, which no try can change.

    Other reasons for the same code can pass. The words are those of NSQ's nsqd too.
    """
    return publish.defer_ms is not None and error.code == "E_INVALID" and " out of range 0-" in error.detail


def leaves_open(error: NsqdError) -> bool:
    """Whether a publish with this answer may have been stored."""
    row = CODES.get(error.code)
    return row is not None and row.unknown_outcome and not is_draining(error)


def is_draining(error: NsqdError) -> bool:
    """Whether an nsqd refused because it drains: nothing is stored, and another nsqd will take it."""
    return error.detail.endswith(" failed draining")


def retry_delay_s(tries: int, chance: float) -> float:
    """Return how long a publish that was refused so often waits for its next try."""
    return jittered_s(min(RETRY_MAX_S, RETRY_BASE_S * 2.0 ** min(tries, 16)), RETRY_JITTER, chance)


def bare(cause: FlintError | None) -> FlintError | None:
    """An exception as the cause of one that a caller gets: one line, for where it was raised tells a caller nothing."""
    if cause is None:
        return None
    cause.__cause__ = None
    cause.__suppress_context__ = True
    return cause.with_traceback(None)


def closed_error() -> PublishRefused:
    """Return what a call to a producer that was closed raises."""
    return PublishRefused("CLOSED", "the producer is closed", retryable=False)
