"""A received message, and what can be done with it.

Rules of this file:

- ``finish``, ``requeue`` and ``touch`` are plain calls: nothing is waited for. What they ask for is gathered and sent
  as one write per connection when the loop turn ends.
- They may be called in any thread, and are checked and noted there. A FIN is gathered there as well, because that is
  what nearly every message gets; all else travels to the thread that the consumer belongs to
  (:meth:`Owner.call_in_loop`), which is at once where this is it.
- A message is answered once; a second answer is the application's mistake and raises.
- An answer for a message that is not ours any more (its connection broke, its time is over) is not an error: nsqd gives
  the message to somebody else. :attr:`Message.is_lost` tells. A FIN is sent all the same, because the work is done. A
  REQ or TOUCH is not: nsqd knows messages by their id only, so it would hit a later delivery of the message to us.

Source: NSQ's client guide, "Message Handling", NSQ's TCP protocol.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol

import msgspec

from flintmq.client.core.cancelling import failure_of
from flintmq.client.core.of_one_process import OfOneProcess
from flintmq.client.options import DELAY_MAX_S, MS_PER_S, Seconds, seconds
from flintmq.errors import UNREADABLE_JSON, BodyError, LocalProtocolError, OptionError, TouchFailed
from flintmq.message import JSON, TAG, TAG_HEADER
from flintmq.wire.client import Record
from flintmq.wire.extended import Extension, split_body, split_id

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # a default for one: the standard library has it from Python 3.13

    from flintmq.client.core.link import Link

    Value = TypeVar("Value", default=bytes)
else:
    from typing import TypeVar

    Value = TypeVar("Value")

log = logging.getLogger("flintmq.client")

OPEN, FINISHED, REQUEUED = 0, 1, 2
_FIRST_HEX_DIGIT = ord("0")


class Requeue(Exception):
    """Raise it in a handler to give the message back without a backoff.

    Args:
        delay: until it is delivered again, seconds or a timedelta; None: in proportion to its attempts.

    Raises:
        OptionError: the delay is not a duration.
    """

    delay: Seconds | None = None  # of a subclass that does not call this __init__, too

    def __init__(self, delay: Seconds | None = None) -> None:
        super().__init__(delay)
        if delay is not None:
            seconds(delay, "delay", maximum=DELAY_MAX_S)
        self.delay = delay


class Discard(Exception):
    """Raise it in a handler to finish a message that cannot be processed.

    Args:
        reason: goes to the log.
    """

    reason = ""  # of a subclass that does not call this __init__, too

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Owner(Protocol):
    """A consumer as far as its messages need it."""

    def time(self) -> float: ...
    def requeue_delay_s(self, attempts: int) -> float: ...
    def message_failed(self) -> None: ...
    def decode(self, body: bytes) -> Any: ...
    def unreadable(self, message: Message[Any], error: BodyError) -> None: ...
    def note_returned_false(self) -> None: ...
    def not_handled(self, records: Sequence[Record]) -> None:
        """Messages were delivered for nothing: no handler had them, so that it was no attempt."""

    def call_in_loop(self, function: Callable[[], object], /) -> object:
        """Call it in the thread that the consumer belongs to: now, if this is it."""


class Hold(Protocol):
    """The tie of a message to its turn, in order; see :mod:`flintmq.client.core.gate`."""

    is_kept: bool
    is_passed: bool

    @property
    def turn(self) -> object: ...
    def answered(self, is_finished: bool) -> None: ...
    def ended(self, is_finished: bool) -> None: ...


class Delivery:
    """The messages of one read, and what they have in common.

    Attributes:
        partition: they are of; None: NSQ's own ids, no partition.
        extensions: what stood in front of their bodies, by message id; None: nothing does.
        frames: the messages as they came, whatever was taken off the bodies in ``records``; empty unless asked for.
        failed: told of the attempts of one whose handler failed, instead of the owner.
        hold: in order: what keeps the next message of the partition back; None: nothing does.
    """

    __slots__ = (
        "link", "owner", "received_at", "expires_at", "records", "partition", "extensions", "frames", "failed", "hold",
    )  # fmt: skip

    def __init__(self, link: Link, owner: Owner, received_at: float, records: Sequence[Record]) -> None:
        self.link = link
        self.owner = owner
        self.received_at = received_at
        self.expires_at = received_at + link.msg_timeout_s
        self.records = records
        self.partition: int | None = None
        self.extensions: dict[bytes, Extension] | None = None
        self.frames = b""
        self.failed: Callable[[int], None] | None = None
        self.hold: Hold | None = None

    def note_failure(self, attempts: int) -> None:
        """Tell that the handler of one of its messages failed."""
        if self.failed is None:
            self.owner.message_failed()
        else:
            self.failed(attempts)

    def with_records(self, records: Sequence[Record]) -> Delivery:
        """The same with other messages, and without their frames."""
        other = Delivery(self.link, self.owner, self.received_at, records)
        other.partition = self.partition
        other.extensions = self.extensions
        other.failed = self.failed
        other.expires_at = self.expires_at
        other.hold = self.hold
        return other


def is_hex(message_id: bytes) -> bool:
    """Whether an id is NSQ's own, 16 hex digits; those of partitions are bytes of which the first is 3 at most."""
    return message_id[0] >= _FIRST_HEX_DIGIT


def split_any_id(message_id: bytes) -> tuple[int | None, int | None]:
    """Internal id and trace id of a message of a partition; of one with NSQ's own id no trace id.

    Such an id is no number where nsqd does not keep to what it promises.
    """
    if not is_hex(message_id):
        return split_id(message_id)
    try:
        return int(message_id, 16), None
    except ValueError:
        return None, None


def take_apart(
    records: Sequence[Record], is_extended: bool, is_located: bool
) -> tuple[list[Record], dict[bytes, Extension]]:
    """Take what stands in front of bodies away from them.

    Raises:
        RemoteProtocolError: a message is shorter than it says.
    """
    taken: list[Record] = []
    extensions: dict[bytes, Extension] = {}
    for timestamp_ns, attempts, message_id, data in records:
        extensions[message_id], body = split_body(data, is_extended, is_located)
        taken.append((timestamp_ns, attempts, message_id, body))
    return taken, extensions


class Message(OfOneProcess, Generic[Value]):
    """One message.

    ``async with message:`` (``with message:`` in :mod:`flintmq.sync`) finishes it at the end of the block. An exception
    in the block is logged, requeues the message and makes the consumer back off; it does not leave the block, so that
    one bad message does not end the loop over all of them. :class:`Requeue` and :class:`Discard` do what they say, also
    where an exception group has nothing else in it, as that of an ``asyncio.TaskGroup``. What is not an Exception (a
    cancelled task, Ctrl-C) requeues the message at once and goes on its way. A message whose body cannot be read
    (:class:`BodyError`) goes to the consumer's ``dead_letter`` topic at once; without one it is requeued like every
    other that failed.

    Attributes:
        id: 16 bytes.
        body: what was published.
        attempts: 1 for the first delivery.
        timestamp_ns: when nsqd accepted it, nanoseconds since the Unix epoch.
    """

    __slots__ = ("timestamp_ns", "attempts", "id", "body", "_delivery", "_answer", "_touched_at", "_value")
    _instead = "it is answered here, over its connection; hand on its body"

    def __init__(self, delivery: Delivery, record: Record) -> None:
        self.timestamp_ns, self.attempts, self.id, self.body = record
        self._delivery = delivery
        self._answer = OPEN
        self._touched_at: float | None = None

    def __repr__(self) -> str:
        state = ("open", "finished", "requeued")[self._answer]
        return f"<Message {self.id!r} attempts={self.attempts} {len(self.body)} bytes from {self.nsqd}, {state}>"

    @property
    def value(self) -> Value:
        """The body as the consumer's ``type`` or ``decode`` says; the bytes if it says nothing.

        Raises:
            BodyError: it cannot be read as that.
        """
        try:
            return self._value
        except AttributeError:
            self._value: Value = self._delivery.owner.decode(self.body)
            return self._value

    @property
    def partition(self) -> int | None:
        """The partition it is of; None on a topic without partitions, as for the next two.

        With ``start`` it is that of the log in which a cluster keeps such a topic, too; only the trace id is None then.
        """
        return self._delivery.partition

    @property
    def internal_id(self) -> int | None:
        """``partition << 50 | sequence``: what nsqd calls it, apart from the trace id."""
        return None if self._delivery.partition is None else split_any_id(self.id)[0]

    @property
    def trace_id(self) -> int | None:
        """The trace id that it was published with; 0 if it was not."""
        return None if self._delivery.partition is None else split_any_id(self.id)[1]

    @property
    def offset(self) -> int | None:
        """Bytes of the partition's log before it; only when consumed in order, or with ``start``."""
        extension = self._extension
        return None if extension is None or extension.offset < 0 else extension.offset

    @property
    def raw_size(self) -> int | None:
        """Bytes it takes there; likewise."""
        extension = self._extension
        return None if extension is None or extension.offset < 0 else extension.raw_size

    @property
    def headers(self) -> dict[str, Any]:
        """The headers it was published with; empty if there are none.

        Raises:
            BodyError: they are not a JSON object.
        """
        extension = self._extension
        if extension is None or extension.version != JSON or not extension.headers:
            return {}
        try:
            return msgspec.json.decode(extension.headers, type=dict[str, Any])
        except UNREADABLE_JSON as error:
            raise BodyError("headers in JSON", str(error)) from error

    @property
    def tag(self) -> str:
        """The dispatch tag it was published with; empty if there is none."""
        extension = self._extension
        if extension is not None and extension.version == TAG:
            return extension.headers.decode("utf-8", "backslashreplace")
        return str(self.headers.get(TAG_HEADER, ""))

    @property
    def _extension(self) -> Extension | None:
        extensions = self._delivery.extensions
        return None if extensions is None else extensions.get(self.id)

    @property
    def nsqd(self) -> str:
        """``host:port`` of the nsqd it came from."""
        return self._delivery.link.address

    @property
    def is_answered(self) -> bool:
        """Whether it was finished or requeued."""
        return self._answer != OPEN

    @property
    def is_lost(self) -> bool:
        """Whether nsqd gives it, or gave it, to somebody else: the connection broke, or its time is over."""
        return self._delivery.link.is_lost or self.time_left <= 0.0

    @property
    def time_left(self) -> float:
        """Seconds until nsqd takes the message back; negative when it did. :meth:`touch` gives more."""
        delivery = self._delivery
        link = delivery.link
        if self._touched_at is None:
            deadline = delivery.expires_at
        else:
            deadline = min(self._touched_at + link.msg_timeout_s, delivery.received_at + link.max_msg_timeout_s)
        return deadline - delivery.owner.time()

    def finish(self) -> None:
        """Tell nsqd that the message is done.

        Raises:
            LocalProtocolError: it was answered before.
        """
        if self._answer:
            raise self._answered("FIN")
        self._answer = FINISHED
        self._send_finish()

    def _send_finish(self) -> None:
        if self._touched_at is not None:
            self._delivery.link.forget_touched(self.id)
        self._delivery.link.finish(self.id)
        if self._delivery.hold is not None:
            self._delivery.hold.answered(is_finished=True)

    def requeue(self, delay: Seconds | None = None, *, backoff: bool = False) -> None:
        """Give the message back.

        Args:
            delay: until it is delivered again; None: in proportion to its attempts (``requeue_delay`` of the consumer).
            backoff: count it as a failure, so that the consumer slows down.

        Raises:
            LocalProtocolError: it was answered before.
            OptionError: the delay is not a duration.
        """
        if self._answer:
            raise self._answered("REQ")
        owner = self._delivery.owner
        delay_s = (
            owner.requeue_delay_s(self.attempts) if delay is None else seconds(delay, "delay", maximum=DELAY_MAX_S)
        )
        self._answer = REQUEUED
        owner.call_in_loop(partial(self._requeue_now, delay_s, backoff))

    def _requeue_now(self, delay_s: float, backoff: bool) -> None:
        if self._touched_at is not None:
            self._delivery.link.forget_touched(self.id)
        if backoff:
            # first, so that its RDY 0 finds nsqd before it can deliver the message again
            self._delivery.note_failure(self.attempts)
        if self.time_left > 0.0:
            self._delivery.link.requeue(self.id, round(delay_s * MS_PER_S))
        else:
            self._delivery.link.drop()
        if self._delivery.hold is not None:
            self._delivery.hold.answered(is_finished=False)

    def touch(self) -> None:
        """Ask for another message timeout from now on, up to nsqd's ``max_msg_timeout`` since the delivery.

        Raises:
            LocalProtocolError: it was answered before.
        """
        if self._answer:
            raise self._answered("TOUCH")
        if self.time_left <= 0.0:
            log.warning("message %r is touched after its time was over", self.id)
            return
        self._touched_at = self._delivery.owner.time()
        self._delivery.owner.call_in_loop(self._touch_now)

    def _touch_now(self) -> None:
        if not self._answer:  # in another thread, meanwhile
            self._delivery.link.touch(self.id, self._touch_failed)

    def __enter__(self) -> Message[Value]:
        self._begin_block()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is not None:
            error = failure_of(error)
        settle(self, error)
        return isinstance(error, Exception)

    async def __aenter__(self) -> Message[Value]:
        self._begin_block()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        settle(self, error)
        return isinstance(error, Exception)

    def _begin_block(self) -> None:
        """In order, nothing else of the partition is handed out before the block ends."""
        if self._delivery.hold is not None and not self._answer:
            self._delivery.hold.is_kept = True

    def _touch_failed(self, error: TouchFailed) -> None:
        log.warning("message %r is not ours any more: %s", self.id, error)
        self._touched_at = self._delivery.received_at - self._delivery.link.msg_timeout_s  # time_left <= 0: is_lost

    def _answered(self, command: str) -> LocalProtocolError:
        done = "finished" if self._answer == FINISHED else "requeued"
        return LocalProtocolError("E_INVALID", f"cannot {command} message {self.id!r}: it is {done} already")


# -- for consumers, in any thread --------------------------------------------------------------------------------------


def pass_by(messages: Iterable[Message[Any]]) -> None:
    """Note, in order, that the loop which was given these asks for more, answered or not."""
    for message in messages:
        if message._delivery.hold is not None:
            message._delivery.hold.is_passed = True


def settle(message: Message[Any], error: BaseException | None, *, is_given_up: bool = False) -> None:
    """Answer a message by how its handler ended, unless the handler answered it itself.

    Args:
        is_given_up: what ended is what is done with a message that is given up: there is no other way left.
    """
    try:
        _settle(message, error, is_given_up)
    finally:
        if message._delivery.hold is not None:
            message._delivery.hold.ended(message._answer == FINISHED)


def meaning_of(error: BaseException | None) -> BaseException | None:
    """Return what the end of a handler says of its message: a group of wishes is one of them, as from a TaskGroup.

    Of nothing but :class:`Discard` it is the first. With a :class:`Requeue` among them, which loses nothing, it is the
    one with the longest delay that was given. A group in which anything else is, and any other error, is itself; where
    one of the delays is none, the OptionError that says so is returned.
    """
    if not isinstance(error, ExceptionGroup):
        return error
    within = list(_within(error))
    if not all(isinstance(each, Requeue | Discard) for each in within):
        return error
    again = [each for each in within if isinstance(each, Requeue)]
    if not again:
        return within[0]
    given = [each for each in again if each.delay is not None]
    try:
        return max(given, key=_delay_s, default=again[0])
    except OptionError as wrong:  # the delay was set to what is none, by a subclass say
        return wrong


def _within(group: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    """Yield what a group is made of, however deep; groups that are nested deeply need no deep stack."""
    waiting: list[BaseException] = [group]
    while waiting:
        each = waiting.pop()
        if isinstance(each, BaseExceptionGroup):
            waiting.extend(reversed(each.exceptions))
        else:
            yield each


def _delay_s(wish: Requeue) -> float:
    """Return the delay that was given.

    Raises:
        OptionError: it is none.
    """
    assert wish.delay is not None
    return seconds(wish.delay, "delay", maximum=DELAY_MAX_S)


def _settle(message: Message[Any], error: BaseException | None, is_given_up: bool) -> None:
    error = meaning_of(error)
    if isinstance(error, Discard):
        log.info("message %r of %s discarded: %s", message.id, message.nsqd, error.reason)
    elif isinstance(error, BodyError) and not message._answer and not is_given_up:
        owner = message._delivery.owner
        owner.call_in_loop(partial(owner.unreadable, message, error))
        return
    elif isinstance(error, Exception) and not isinstance(error, Requeue):
        log.warning("message %r of %s failed, attempts %d", message.id, message.nsqd, message.attempts, exc_info=error)
        if message._answer:
            message._delivery.owner.call_in_loop(partial(message._delivery.note_failure, message.attempts))
        else:
            requeue_failed(message)
    if message._answer:
        return
    if error is None or isinstance(error, Discard):
        mark_finished(message)
        message._delivery.link.finish(message.id)
    elif isinstance(error, Requeue):
        try:
            message.requeue(error.delay)
        except OptionError as wrong:  # the delay was set to what is none, by a subclass say
            _settle(message, wrong, is_given_up)
    else:
        message.requeue(0)


def requeue_failed(message: Message[Any]) -> None:
    """Requeue a message as one whose handler failed."""
    message.requeue(backoff=True)


def was_lost(message: Message[Any], now: float) -> bool:
    """:attr:`Message.is_lost` of a message that no handler was called with, for who asks of each: it costs a third."""
    delivery = message._delivery
    return now >= delivery.expires_at or delivery.link.is_lost


def let_go(message: Message[Any]) -> None:
    """Let a message go that was lost before the handler could be called with it."""
    link = message._delivery.link
    if not link.is_lost:  # else the loss is logged
        late = "message %r of %s dropped: its handler was not called within %g s"
        log.warning(late, message.id, link.address, link.msg_timeout_s)
    give_back((message,))


def give_back(messages: Sequence[Message[Any]]) -> None:
    """Give messages back that were taken, and that neither a handler nor a loop ever had."""
    for delivery in taken_apart(messages):
        delivery.owner.not_handled(delivery.records)
    for message in messages:
        message.requeue(0)


def taken_apart(messages: Sequence[Message[Any]]) -> list[Delivery]:
    """Return messages as they were before they were handed out; none of them may have been answered."""
    return [
        delivery.with_records([(each.timestamp_ns, each.attempts, each.id, each.body) for each in some])
        for delivery, some in groupby(messages, attrgetter("_delivery"))
    ]


def mark_finished(message: Message[Any]) -> bool:
    """Note that the caller sends the FIN itself; False if the message was answered before."""
    if message._answer:
        return False
    message._answer = FINISHED
    if message._touched_at is not None:
        message._delivery.link.forget_touched(message.id)
    return True


def are_bare(messages: Sequence[Message[Any]]) -> bool:
    """Whether messages are of no partition, and nothing stood in front of their bodies."""
    return all(
        delivery.partition is None and delivery.extensions is None for delivery in {each._delivery for each in messages}
    )


def finish_all(messages: Sequence[Message[Any]]) -> None:
    """Finish several messages at once; one that was answered before stays as it is."""
    finished: dict[Link, list[bytes]] = {}
    last: Delivery | None = None
    ids: list[bytes] = []
    for message in messages:
        if message._delivery is not last:
            last = message._delivery
            ids = finished.setdefault(last.link, [])
        if mark_finished(message):
            ids.append(message.id)
    for link, each in finished.items():
        if each:
            link.finish_all(each)
    for message in messages:
        if message._delivery.hold is not None:
            message._delivery.hold.answered(message._answer == FINISHED)
