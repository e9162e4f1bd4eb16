"""The trace of messages: what happens to them, as JSON objects in a topic of its own.

::

    {"timestamp":1760000000000000000,"action":"START","topic":"orders","msgid":1125899906842629,"traceid":77,
     "partition":1,"channel":"billing","message_id":"0004000000000005000000000000004d","offset":540,"attempts":1,
     "client":"10.0.0.7:51234","node":"nsqd-1:4150"}

A topic or a channel is traced when its setting ``trace`` says so: ``all`` messages, or the ``traced`` ones, which were
published with a trace id (and so only on topics with partitions).

What it may cost is bounded: ``--trace-max-rate`` events a second. When more happens, single messages are left out
rather than single events: every second, fourth, eighth ... message is still followed. What is left out is counted.

Rules of this file: who listens to nothing costs nothing; nobody waits for a trace, and no client's answer waits behind
one; events are published a few milliseconds after they happened, many at once; the trace is not traced.

Source: Youzan's message tracing.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from operator import or_

import msgspec
from msgspec.structs import replace

from flintmq.batch import Batch
from flintmq.broker.channel import Channel
from flintmq.broker.partition import Partition, PublishGroup
from flintmq.broker.state import Log
from flintmq.broker.subscription import Subscription
from flintmq.broker.topic import Topic
from flintmq.errors import FlintError, StorageError
from flintmq.limits import ATTEMPTS_MAX, SEQUENCE_MAX
from flintmq.message import ATTEMPTS, ATTEMPTS_POSITION, ID_POSITION, TRACE_ID, TRACE_ID_SIZE, internal_id
from flintmq.net.metrics import Family
from flintmq.nsqd.engine import Engine
from flintmq.settings import DROP_OLDEST

log = logging.getLogger(__name__)

OFF, TRACED, ALL = "", "traced", "all"
"""The messages that are traced: none, those with a trace id, all."""
PUB, START, FIN, REQ, REQ_DEFER = "PUB", "START", "FIN", "REQ", "REQ_DEFER"
TIMEOUT, TOUCH, DISCONNECT = "TIMEOUT", "TOUCH", "DISCONNECT"
DEAD_LETTER, EXPIRED, DROPPED = "DEAD_LETTER", "EXPIRED", "DROPPED"

_LINGER_S = 0.01  # from an event to its publishing, so that busy times make few and large batches
_SETTLE_LOOKS_MAX = 200
_TELL_S = 1.0  # between two events that say how many were left out
_BURST_MAX = 5000  # events recorded at once, about 15 ms of work
_TOPIC_BYTES_MAX = 1024 * 1024 * 1024  # of the trace that wait to be consumed, unless its settings say otherwise
_HELD_BYTES_MAX = 8 * 1024 * 1024  # of events that cannot be published yet
_KNOWN_MAX = 50_000  # messages in flight whose trace id and offset are kept, of all channels together
_SECOND_NS = 1_000_000_000
_ADAPT_NS = 250_000_000  # between two looks at how much happens
_NS_PER_MS = 1_000_000
_TRACE_POSITION = ID_POSITION + 8
_NO_TRACE = bytes(TRACE_ID_SIZE)
_NOT_ZERO = re.compile(rb"[^\x00]")
_NEVER = SEQUENCE_MAX + 1

_Known = tuple[int | None, int | None, int | None]
"""Trace id, virtual offset and attempts of a message in flight; None for what is not known."""


class Event(msgspec.Struct, omit_defaults=True, gc=False):
    """One thing that happened to a message; fields that say nothing are left out.

    Attributes:
        timestamp: wall time in ns.
        msgid: internal id.
        message_id: as clients see it: the 16 hex digits, or the 16 bytes of a topic with partitions in hex.
        offset: virtual offset of the message in its partition.
        attempts: as the consumer was told.
        client: address of who published or consumes.
        node: broadcast address and TCP port of this nsqd.
        delay_ms: of REQ_DEFER, and of PUB when the message is deferred.
        count: of DROPPED, events that were not recorded.
    """

    timestamp: int
    action: str
    topic: str = ""
    msgid: int | None = None
    traceid: int | None = None
    partition: int | None = None
    channel: str = ""
    message_id: str = ""
    offset: int | None = None
    attempts: int | None = None
    client: str = ""
    node: str = ""
    delay_ms: int | None = None
    count: int | None = None


_encode = msgspec.json.Encoder().encode


class Rate:
    """Decides what is recorded, so that it stays below a number of events a second.

    Of the messages that are traced because all are, one in so many is followed, the stride: a power of two, so that a
    larger one follows some of the same. Those with a trace id have a stride of their own, and come first.

    Args:
        now_ns: reads monotonic time.

    Attributes:
        stride, traced_stride: of all messages, and of those with a trace id.
        dropped_count: events that were not recorded.
    """

    def __init__(self, now_ns: Callable[[], int], rate_max: int) -> None:
        self.stride = self.traced_stride = 1
        self.dropped_count = 0
        self._now_ns = now_ns
        self._rate_max = rate_max
        self._burst = min(_BURST_MAX, max(1, rate_max // 4))
        self._tokens = float(self._burst)
        self._filled_ns = self._since_ns = now_ns()
        self._wanted_count = self._wanted_traced_count = 0

    def choose(self, sequences: Sequence[int], count: int, is_all: bool) -> Sequence[int]:
        """Return those of ``sequences`` to record an event of; ``count`` events were wanted.

        Args:
            is_all: they are traced because all messages are.
        """
        now_ns = self._now_ns()
        self._tokens = min(self._burst, self._tokens + (now_ns - self._filled_ns) * self._rate_max / _SECOND_NS)
        self._filled_ns = now_ns
        if now_ns - self._since_ns >= _ADAPT_NS:
            self._adapt(now_ns)
        if is_all:
            self._wanted_count += count
            stride = self.stride
        else:
            self._wanted_traced_count += count
            stride = self.traced_stride
        if stride > 1:
            if isinstance(sequences, range):
                sequences = range(sequences.start + -sequences.start % stride, sequences.stop, stride)
            else:
                sequences = [sequence for sequence in sequences if sequence % stride == 0]
        room = int(self._tokens)
        if len(sequences) > room:
            sequences = sequences[:room]
        self._tokens -= len(sequences)
        self.dropped_count += count - len(sequences)
        return sequences

    def _adapt(self, now_ns: int) -> None:
        elapsed_ns = now_ns - self._since_ns
        if elapsed_ns > 2 * _ADAPT_NS:  # there was a pause
            self._wanted_count = self._wanted_traced_count = 0
        traced = self._wanted_traced_count * _SECOND_NS / elapsed_ns
        self.traced_stride = _stride(traced, self._rate_max)
        room = max(self._rate_max / 4, self._rate_max - traced)
        self.stride = _stride(self._wanted_count * _SECOND_NS / elapsed_ns, room)
        self._since_ns, self._wanted_count, self._wanted_traced_count = now_ns, 0, 0


def _stride(wanted: float, most: float) -> int:
    stride = 1
    while wanted > most * stride:
        stride *= 2
    return stride


class Tracing:
    """Owner of the trace of one nsqd.

    Args:
        topic_name: where events are published.
        rate_max: events a second.
        create_topic: finds that topic, or creates it.
        look_up_again: called when publishes to some topic have to be looked at that had not to be before.

    Attributes:
        node: broadcast address and TCP port.
        recorded_count: events since the start.
    """

    def __init__(
        self,
        engine: Engine,
        topic_name: str,
        rate_max: int,
        create_topic: Callable[[str], Topic],
        look_up_again: Callable[[], None],
    ) -> None:
        clock = engine.env.clock
        self.topic_name = topic_name
        self.node = ""
        self.recorded_count = 0
        self.known_count = 0
        self.wall_ns = clock.wall_ns
        self.rate = Rate(clock.monotonic_ns, rate_max)
        self._engine = engine
        self._broker = engine.broker
        self._create_topic = create_topic
        self._look_up_again = look_up_again
        self._channels: dict[Channel, ChannelTrace] = {}
        self._lines: list[bytes] = []
        self._held_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._drop_timer: asyncio.TimerHandle | None = None
        self._told_count = 0  # of those that were left out
        self._group: PublishGroup | None = None  # the last that was published
        self._group_count = 0
        self._is_failing = False
        self._is_closed = False

    # -- who is traced -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Trace what the settings of the topics say, and follow their changes."""
        for topic in self._broker.topics.values():
            self._attach(topic)
        self._broker.on_settings_change.append(self.changed)

    def changed(self, name: str, channel: str | None) -> None:
        """A topic, or one of its channels, was created or deleted, or has other settings."""
        topic = self._broker.topics.get(name)
        if topic is not None and channel is None:
            self._attach(topic)
        elif topic is not None and channel in topic.channel_names:
            self._attach_channel(topic, channel)
        for gone in [each for each in self._channels if not self._broker.has(each)]:
            self._channels.pop(gone).close()

    def _attach(self, topic: Topic) -> None:
        mode = self._mode(topic, None)
        for partition in topic.partitions.values():
            partition.is_unwaited = topic.name == self.topic_name
            old = partition.events.mode if isinstance(partition.events, PartitionTrace) else OFF
            if mode != old:
                partition.events = PartitionTrace(self, topic, partition, mode) if mode else None
                if mode:
                    self._look_up_again()
        for name in topic.channel_names:
            self._attach_channel(topic, name)

    def _attach_channel(self, topic: Topic, name: str) -> None:
        mode = self._mode(topic, name)
        for partition in topic.partitions.values():
            channel = partition.channels.get(name)
            if channel is None:
                continue
            trace = self._channels.get(channel)
            if mode == (OFF if trace is None else trace.mode):
                continue
            if trace is not None:
                self._channels.pop(channel).close()
            if mode:
                channel.events = self._channels[channel] = ChannelTrace(self, topic, partition, channel, mode)

    def _mode(self, topic: Topic, channel: str | None) -> str:
        if topic.name == self.topic_name:
            return OFF
        mode = self._broker.own_settings(topic.name, channel).trace
        if mode is None:
            mode = self._broker.own_settings(topic.name).trace or OFF
        return OFF if mode == TRACED and not topic.meta.has_raw_ids else mode

    # -- events ------------------------------------------------------------------------------------------------------

    def choose(self, sequences: Sequence[int], count: int, is_all: bool) -> Sequence[int]:
        """See :meth:`Rate.choose`."""
        chosen = self.rate.choose(sequences, count, is_all)
        if self.rate.dropped_count != self._told_count and self._drop_timer is None:
            self._drop(0)
        return chosen

    def _drop(self, count: int) -> None:
        """Count events that are lost; they are told of in a while."""
        self.rate.dropped_count += count
        if self._drop_timer is None and not self._is_closed:
            self._drop_timer = self._engine.loop.call_later(_TELL_S, self._tell_dropped)

    def add(self, event: Event) -> None:
        """Record an event."""
        if self._held_bytes > _HELD_BYTES_MAX:
            self._drop(1)
            return
        event.node = self.node
        line = _encode(event)
        self._lines.append(line)
        self._held_bytes += len(line)
        self.recorded_count += 1
        if self._timer is None:
            self._timer = self._engine.loop.call_later(_LINGER_S, self.flush)

    def _tell_dropped(self) -> None:
        self._drop_timer = None
        count = self.rate.dropped_count - self._told_count
        self._told_count += count
        if count:
            self.add(Event(self.wall_ns(), DROPPED, count=count))

    def flush(self) -> None:
        """Publish what was recorded."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        group, lines = self._group, self._lines
        if not lines or (group is not None and not group.ended and not self._is_closed):
            if lines:  # the disk is slower than the events: they wait here, where they have a bound
                self._timer = self._engine.loop.call_later(_LINGER_S, self.flush)
            return
        if group is not None and group.error is not None:
            self._drop(self._group_count)
        self._lines, self._held_bytes = [], 0
        self._group, self._group_count = None, len(lines)
        try:
            self._group = self._broker.publish_to(self._own_topic().next_partition(), lines)
        except FlintError as error:
            self._drop(len(lines))
            if not self._is_failing:
                log.warning("events of the trace are lost, topic %s takes none: %s", self.topic_name, error)
            self._is_failing = True
            return
        self._is_failing = False
        self._engine.schedule()

    def _own_topic(self) -> Topic:
        """Find the topic of events; without a bound it is given one, because as a rule nobody consumes all of it."""
        topic = self._create_topic(self.topic_name)
        own = self._broker.own_settings(topic.name)
        if own.max_bytes is None and own.max_messages is None:
            bound = replace(own, max_bytes=_TOPIC_BYTES_MAX, overflow=own.overflow or DROP_OLDEST)
            self._broker.change_settings(topic, None, bound)
        return topic

    async def settle(self) -> None:
        """Publish what was recorded and wait until it can be read, but not for long."""
        self.flush()
        for _ in range(_SETTLE_LOOKS_MAX):
            if not self._lines and (self._group is None or self._group.ended):
                break
            await asyncio.sleep(_LINGER_S / 4)

    def close(self) -> None:
        """Publish what is left; the engine writes it."""
        if self._drop_timer is not None:
            self._drop_timer.cancel()
        self._tell_dropped()
        self._is_closed = True
        self.flush()

    def families(self) -> list[Family]:
        """Return the figures of the trace, for Prometheus."""
        recorded = Family("flintmq_nsqd_trace_events_total", "counter", "Events of the trace that were recorded")
        about = "Events of the trace that were left out: more than --trace-max-rate, or the disk did not take them"
        dropped = Family("flintmq_nsqd_trace_events_dropped_total", "counter", about)
        return [recorded.add(self.recorded_count), dropped.add(self.rate.dropped_count)]


class _Source:
    """One partition, or a channel's part of it, that is traced."""

    def __init__(self, tracing: Tracing, topic: Topic, partition: Partition, channel: str, mode: str) -> None:
        self.mode = mode
        self._tracing = tracing
        self._is_all = mode == ALL
        self._is_raw = topic.meta.has_raw_ids
        self._topic = topic.name
        self._number = partition.number
        self._channel = channel
        self._log: Log = partition.log

    def _event(self, timestamp: int, action: str, sequence: int, known: _Known | None, client: str) -> Event:
        trace_id, offset, attempts = known or (None if self._is_raw else 0, None, None)
        internal = internal_id(self._number, sequence)
        message_id = ""
        if not self._is_raw:
            message_id = f"{internal:016x}"
        elif trace_id is not None:
            message_id = f"{internal:016x}{trace_id:016x}"
        number, channel = self._number, self._channel
        return Event(
            timestamp, action, self._topic, internal, trace_id, number, channel, message_id, offset, attempts, client
        )

    def _look(self, batch: Batch, sequence: int, delivery_count: int = 0) -> _Known:
        at = batch.frames_at + batch.positions()[sequence - batch.first]
        attempts = _attempts(batch.data, at, delivery_count) if delivery_count else None
        return self._trace_id(batch.data, at), batch.offset_of(sequence), attempts

    def _trace_id(self, data: bytes | memoryview, at: int = 0) -> int:
        return int(TRACE_ID.unpack_from(data, at + _TRACE_POSITION)[0]) if self._is_raw else 0

    def _from_log(self, action: str, first: int, end: int, client: str) -> None:
        """Record what happened to messages as the log has them."""
        now_ns = self._tracing.wall_ns()
        try:
            for batch, start, stop in _batches(self._log, first, end):
                sequences: Sequence[int] = range(start, stop) if self._is_all else traced_in(batch, start, stop)
                if sequences:
                    delay_ms = (
                        round(max(0, batch.due_ns - batch.timestamp_ns) / _NS_PER_MS)
                        if batch.due_ns and action == PUB
                        else None
                    )
                    for sequence in self._tracing.choose(sequences, len(sequences), self._is_all):
                        event = self._event(now_ns, action, sequence, self._look(batch, sequence), client)
                        event.delay_ms = delay_ms
                        self._tracing.add(event)
        except StorageError as error:
            log.warning("topic %s: %s of messages %d to %d not traced: %s", self._topic, action, first, end, error)


class PartitionTrace(_Source):
    """Traces what is published to a partition; :class:`flintmq.broker.events.PartitionEvents`.

    Attributes:
        untraced_from: no message that may be delivered has a trace id from this sequence on.
    """

    def __init__(self, tracing: Tracing, topic: Topic, partition: Partition, mode: str) -> None:
        super().__init__(tracing, topic, partition, "", mode)
        self.untraced_from = _NEVER

    def publishing(self, group: PublishGroup, count: int, is_stored_form: bool) -> None:
        notes = group.notes
        if not isinstance(notes, list):
            notes = group.notes = []
        notes.append((count, "", is_stored_form))

    def publisher(self, group: PublishGroup, client: str) -> None:
        notes = group.notes
        if not isinstance(notes, list) or not notes or notes[-1][1]:
            return  # tracing began in between, or it is a duplicate that waits for the first
        count, _, is_stored_form = notes.pop()
        if len(notes) and notes[-1][1:] == (client, is_stored_form):
            count += notes.pop()[0]
        notes.append((count, client, is_stored_form))

    def published(self, group: PublishGroup) -> None:
        first, end = group.first_sequence, group.end_sequence
        notes = group.notes if isinstance(group.notes, list) else []
        if first < 0:
            self.untraced_from = end
            return  # of a turn that failed half-way
        if sum(count for count, _, _ in notes) < end - first:
            notes = [(end - first, "", True)]  # tracing began when some had been published
        if any(is_stored_form for _, _, is_stored_form in notes):
            self.untraced_from = end
        else:
            self.untraced_from = min(self.untraced_from, first)
        for count, client, is_stored_form in notes:
            stop = min(first + count, end)
            if (self._is_all or is_stored_form) and first < stop:
                self._from_log(PUB, first, stop, client)
            first = stop


class ChannelTrace(_Source):
    """Traces what happens in a channel; :class:`flintmq.broker.events.ChannelEvents`."""

    def __init__(self, tracing: Tracing, topic: Topic, partition: Partition, channel: Channel, mode: str) -> None:
        super().__init__(tracing, topic, partition, channel.name, mode)
        self._known: dict[int, _Known] = {}  # of what is in flight, as far as there is room
        self._begun_at = channel.next  # older messages may be in flight without being known
        self._attached = channel
        self._partition = partition

    def close(self) -> None:
        """Trace nothing more."""
        self._attached.events = None
        self._tracing.known_count -= len(self._known)
        self._known.clear()

    # delivery

    def delivered(self, subscription: Subscription, batch: Batch, first: int, end: int, delivery_count: int) -> None:
        sequences: Sequence[int] = range(first, end) if self._is_all else self._traced_in(batch, first, end)
        if not sequences:
            return
        chosen = self._tracing.choose(sequences, len(sequences), self._is_all)
        if not chosen:
            return
        now_ns, client = self._tracing.wall_ns(), _client(subscription)
        for sequence in chosen:
            known = self._look(batch, sequence, delivery_count)
            self._remember(sequence, known)
            self._tracing.add(self._event(now_ns, START, sequence, known, client))

    def _traced_in(self, batch: Batch, first: int, end: int) -> Sequence[int]:
        published = self._partition.events
        if isinstance(published, PartitionTrace) and first >= published.untraced_from:
            return ()
        return traced_in(batch, first, end)

    def delivered_spilled(self, subscription: Subscription, sequence: int, frame: bytes, delivery_count: int) -> None:
        trace_id = self._trace_id(frame)
        if not (self._is_all or trace_id) or not self._tracing.choose((sequence,), 1, self._is_all):
            return
        before = self._known.get(sequence)
        known = (trace_id, before and before[1], _attempts(frame, 0, delivery_count))
        self._remember(sequence, known)
        self._tracing.add(self._event(self._tracing.wall_ns(), START, sequence, known, _client(subscription)))

    def _remember(self, sequence: int, known: _Known) -> None:
        if sequence not in self._known:
            if self._tracing.known_count < _KNOWN_MAX:
                self._tracing.known_count += 1
            elif self._known:
                del self._known[next(iter(self._known))]
            else:
                return
        self._known[sequence] = known

    # what consumers do

    def finished(self, subscription: Subscription | None, first: int, end: int) -> None:
        client = "" if subscription is None else _client(subscription)
        self._tell(FIN, client, range(first, end), is_last=True)

    def requeued(self, subscription: Subscription, sequence: int, delay_ns: int) -> None:
        if delay_ns > 0:
            self._tell(REQ_DEFER, _client(subscription), (sequence,), delay_ns // _NS_PER_MS)
        else:
            self._tell(REQ, _client(subscription), (sequence,))

    def timed_out(self, subscription: Subscription, sequence: int) -> None:
        self._tell(TIMEOUT, _client(subscription), (sequence,))

    def touched(self, subscription: Subscription, sequence: int) -> None:
        self._tell(TOUCH, _client(subscription), (sequence,))

    def released(self, subscription: Subscription, sequences: Iterable[int]) -> None:
        self._tell(DISCONNECT, _client(subscription), list(sequences))

    def given_up(self, sequence: int, client: str) -> None:
        self._tell(DEAD_LETTER, client, (sequence,), is_last=True)

    def expired(self, first: int, end: int) -> None:
        self._from_log(EXPIRED, first, end, "")
        self._forget([sequence for sequence in self._known if first <= sequence < end])

    def _tell(
        self,
        action: str,
        client: str,
        sequences: Sequence[int],
        delay_ms: int | None = None,
        is_last: bool = False,
    ) -> None:
        known, tracing = self._known, self._tracing
        count = len(sequences)
        if count and sequences[0] < self._begun_at:
            self._recall(sequences)
        if isinstance(sequences, range) and len(known) < count:
            found = [sequence for sequence in known if sequence in sequences]
        else:
            found = [sequence for sequence in sequences if sequence in known]
        if not self._is_all:
            count = len(found)
        if count:
            now_ns = tracing.wall_ns()
            for sequence in tracing.choose(found, count, self._is_all):
                event = self._event(now_ns, action, sequence, known[sequence], client)
                event.delay_ms = delay_ms
                tracing.add(event)
        if is_last:
            self._forget(found)

    def _forget(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            del self._known[sequence]
            self._tracing.known_count -= 1

    def _recall(self, sequences: Iterable[int]) -> None:
        """Look up messages that were delivered before they were traced."""
        for sequence in sequences:
            if sequence >= self._begun_at or sequence in self._known:
                continue
            known = self._stored(sequence)
            if self._is_all or (known is not None and known[0]):
                self._remember(sequence, known or (None if self._is_raw else 0, None, None))

    def _stored(self, sequence: int) -> _Known | None:
        try:
            batch = self._log.read(sequence) if sequence >= self._log.start_sequence else None
        except StorageError:
            return None  # whoever has to read it is told
        if batch is None or not batch.first <= sequence < batch.end:
            return None
        return self._look(batch, sequence)


def traced_in(batch: Batch, first: int, end: int) -> Sequence[int]:
    """The sequences from ``first`` to ``end`` of a batch with binary ids whose messages have a trace id."""
    positions = batch.positions()
    data, at = batch.data, batch.frames_at + _TRACE_POSITION
    start, count = first - batch.first, end - first
    if isinstance(positions, range):  # frames of one size: the bytes of all trace ids stand in eight columns
        stride, zeros = positions.step, bytes(count)
        column = at + positions[start]
        stop = column + (count - 1) * stride + 1
        columns = [data[column + i : stop + i : stride] for i in range(TRACE_ID_SIZE)]
        used = [int.from_bytes(bytes(each), "big") for each in columns if each != zeros]
        if not used:
            return ()
        joined = reduce(or_, used).to_bytes(count, "big")
        return [first + found.start() for found in _NOT_ZERO.finditer(joined)]
    return [
        first + number
        for number, position in enumerate(positions[start : start + count])
        if data[at + position : at + position + TRACE_ID_SIZE] != _NO_TRACE
    ]


def _attempts(data: bytes | memoryview, at: int, delivery_count: int) -> int:
    (first,) = ATTEMPTS.unpack_from(data, at + ATTEMPTS_POSITION)
    return min(int(first) - 1 + delivery_count, ATTEMPTS_MAX)


def _batches(log: Log, first: int, end: int) -> Iterator[tuple[Batch, int, int]]:
    """The batches that hold messages of a range, and which of them."""
    while first < end:
        batch = log.read(first)
        if batch is None or batch.first >= end:
            return
        stop = min(batch.end, end)
        yield batch, max(first, batch.first), stop
        first = stop


def _client(subscription: Subscription) -> str:
    """The address of a consumer's connection."""
    return str(getattr(subscription.owner, "peer", ""))
