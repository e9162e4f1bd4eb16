"""A channel of one partition: who gets which message of the log, and when.

What has been delivered and is not finished is in the channel's :class:`flintmq.broker.window.Window`, with its
invariants. Here is decided what is handed out next, and to whom.

Invariants, beside those:

- C1: nothing at or beyond the log's committed sequence is delivered.
- C2: in order (``keep_floor`` is set) at most one message is in flight, the window holds nothing unfinished behind one
  that is not finished, and nothing is delivered before the floor has been kept.
- C3: a consumer stands in ``_ready`` exactly while it can take a message.

Turns: what comes again, queued or spilled, and what is new are handed out one for one while both wait, so that neither
a message that always comes back nor a long backlog holds the other up. What is new begins, if some of it waits when the
first message is given back, times out or loses its connection. What came back first is first. Of what a lost connection
held, the message it had held longest is last, because it may be what the consumer died of, and what had come again
before keeps its place. In order nothing takes turns.

Rules of this file: monotonic ``now_ns`` for deadlines, ``wall_ns`` for due times (a wall clock that does not jump while
the process runs, as the caller provides it); runs of messages are handled by slices; nothing that happens every turn
looks at all consumers.

Source: docs/decisions/0001, docs/decisions/0003, NSQ's TCP protocol.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from itertools import islice

from flintmq.batch import Batch
from flintmq.broker.delayed import DelayedAhead, DelayedNotes
from flintmq.broker.due_times import DueTimes
from flintmq.broker.events import ChannelEvents
from flintmq.broker.latency import Latency
from flintmq.broker.ranges import ranges_of
from flintmq.broker.ready import Line, ReadyLines
from flintmq.broker.spilled import SpilledStore
from flintmq.broker.state import ChannelState as ChannelState
from flintmq.broker.state import Limiter, Log, Message
from flintmq.broker.subscription import Locality, Subscription
from flintmq.broker.window import Window
from flintmq.budget import Budget
from flintmq.errors import StorageError
from flintmq.limits import CHANNEL_WINDOW_MAX, DELIVERY_BYTES_MAX
from flintmq.message import internal_id, with_attempts
from flintmq.names import is_ephemeral

_STEP_SHARE = 8  # of what the next consumer can take, a turn of what comes again is this part, one message at least,
_STEP_MAX = 32  # and this many at most; what is new has as many then

_UNBOUNDED = 1 << 62
_LOOKED_COST_MAX = 4096  # of messages that filters are asked about in one turn, see ext_filter.py


class Channel:
    """Owner of one channel's progress through one partition.

    Args:
        log: the partition's log.
        state: where to go on from.
        random_source: for sampling only.
        depth_max: for ephemeral channels, how many undelivered messages it keeps; newer ones are dropped.

    Attributes:
        window: what has been delivered and is not finished.
        spilled: what of it is outside of memory, or was.
        subscriptions: every consumer, in the order of their coming.
        joined_count: consumers since the process started.
        dropped_count: messages that an ephemeral channel had no room for.
        filtered_count: messages finished because the consumer that was to get them does not take them.
        wants_turn: whether :meth:`pump` has stopped before the end, so that others have their turn.
        locality_counts: deliveries since the process started, by :class:`Locality` of who got them.
        skipped: whether messages are finished without being delivered.
        events: who wants to know what happens to messages, if anybody does.
        limiter: of its messages, if any.
        delayed: where in the log messages are that are not due, as far as is known.
        budget: what consumers have been given and not read counts in it; without a limit unless it is set.
        keep_floor: of a channel that is consumed in order: remembers the floor so that it outlives the process; False:
            that takes until :meth:`floor_is_kept`, and nothing is delivered before.
    """

    def __init__(
        self,
        name: str,
        partition: int,
        log: Log,
        state: ChannelState,
        spilled: SpilledStore,
        random_source: random.Random,
        depth_max: int | None = None,
        window_max: int = CHANNEL_WINDOW_MAX,
    ) -> None:
        self.name = name
        self.ephemeral = is_ephemeral(name)
        self.log = log
        self.budget = Budget()
        self.spilled = spilled
        self.window = Window(log, state, spilled, window_max)
        self.paused = False
        self.skipped = False
        self.limit: int | None = None  # a paused topic: nothing from here on is delivered
        self.subscriptions = self.window.consumers
        self.joined_count = 0
        self.requeue_count = 0
        self.timeout_count = 0
        self.dropped_count = 0
        self.finish_count = 0
        self.filtered_count = 0
        self.wants_turn = False
        self._looked_cost = 0
        self.locality_counts = [0] * len(Locality)
        self.latency: Latency | None = None  # set when percentiles were asked for
        self.events: ChannelEvents | None = None
        self.limiter: Limiter | None = None
        self.delayed: DelayedAhead | None = None
        self.due_times = DueTimes(DelayedNotes())
        self.counted_from = log.committed_sequence
        self.keep_floor: Callable[[int], bool | None] | None = None
        self._kept_floor = -1
        self._is_floor_awaited = False
        self._id_base = internal_id(partition, 0)
        self._random = random_source
        self._depth_max = depth_max
        self._admitted = log.committed_sequence
        self._ready = ReadyLines()
        self._not_deferred_at = 0
        self._sent_to: dict[Subscription, None] = {}
        self._owed_count = 0  # of what is new, for what has come again since, before more of it does
        self._is_turn_of_spilled = False  # of what comes again

    # -- progress ------------------------------------------------------------------------------------------------

    @property
    def floor(self) -> int:
        """Everything below is finished or spilled."""
        return self.window.floor

    @property
    def next(self) -> int:
        """The cursor: nothing from here on has been looked at."""
        return self.window.next

    @property
    def in_flight_count(self) -> int:
        """Messages that consumers hold."""
        return self.window.in_flight_count

    @property
    def is_changed(self) -> bool:
        """Whether there is progress that has not been written."""
        return self.window.is_changed

    def mark_changed(self) -> None:
        """Have progress written again."""
        self.window.mark_changed()

    def take_changed(self) -> bool:
        """Whether there is progress to be written; the caller does it."""
        return self.window.take_changed()

    def state(self) -> ChannelState:
        """Return what is to be written down now."""
        return self.window.state()

    # -- counts --------------------------------------------------------------------------------------------------

    @property
    def end(self) -> int:
        """One past the last sequence this channel may deliver now."""
        committed = self.log.committed_sequence
        return committed if self.limit is None else min(committed, self.limit)

    @property
    def depth(self) -> int:
        """Messages waiting for a consumer; without those in flight and deferred."""
        first, end = self.window.next, self.end
        waiting = max(0, end - first) - self.window.left_out_count(first, end)
        return max(0, waiting - self._delayed_count) + self.window.waiting_count

    @property
    def _delayed_count(self) -> int:
        """Messages that the cursor has not reached and that are not due."""
        if not self.delayed:
            return 0
        start = self.window.next
        count = self.delayed.count(start, self.end)
        for first, end in self.window.holes:
            count -= self.delayed.count(max(first, start), min(end, self.end))
        return count

    @property
    def message_count(self) -> int:
        """Messages the channel got since the process started; those that it had no room for are among them."""
        return max(0, self.end - self.counted_from)

    @property
    def deferred_count(self) -> int:
        """Messages waiting for their due time."""
        return self.window.deferred_count + self.spilled.count - len(self.spilled.loaded) + self._delayed_count

    @property
    def is_idle(self) -> bool:
        """Whether a new message changes nothing now: nobody can take one, and the one at the cursor simply waits."""
        is_at_rest = self._not_deferred_at == self.window.next and self._ready.nearest() is None
        is_simple = self._depth_max is None and not self.skipped
        return is_at_rest and is_simple and (self.limiter is None or not self.limiter.is_dropping)

    # -- subscriptions -------------------------------------------------------------------------------------------

    def add(self, subscription: Subscription) -> None:
        """Attach a consumer."""
        self.window.attach(subscription)
        self.joined_count += 1
        self._ready.add(subscription)

    def remove(self, subscription: Subscription) -> None:
        """Detach a consumer; what it holds is queued again at once, attempts kept."""
        self._ready.remove(subscription)
        if subscription.in_flight_count:
            held = self.window.held_by(subscription)
            self._tell_released(subscription, held)
            self._take_back(held)
        self.window.detach(subscription)

    def tell_all_released(self) -> None:
        """Tell who listens that no consumer will finish what it holds: the channel ends here and goes on elsewhere."""
        if self.events is None:
            return
        for subscription in self.subscriptions:
            if subscription.in_flight_count:
                self._tell_released(subscription, self.window.held_by(subscription))

    def _tell_released(self, subscription: Subscription, held: list[Message]) -> None:
        if self.events is not None:
            self.events.released(subscription, [message.sequence for message in held])

    def _take_back(self, held: list[Message]) -> None:
        """Queue again what a lost connection held, given in the order of delivery.

        It may have died of the first: that one goes to the end, and what it was not taken from has the next turn. Of
        the others those that had come again keep their place in front, so that whatever consumers die of, the next
        ones begin with something else.
        """
        window = self.window
        suspect, *others = held
        again = [message for message in others if window.has_come_again(message)]
        new = [message for message in others if not window.has_come_again(message)]
        if window.has_come_again(suspect):
            self._owed_count = max(1, self._owed_count)
        self._is_turn_of_spilled = not suspect.is_spilled
        for message in (*new, suspect):
            self._come_back(message)
        for message in reversed(again):
            self._come_back(message)
            window.come_first(message)

    # -- finish, requeue, touch ----------------------------------------------------------------------------------

    def finish(self, subscription: Subscription, ids: Sequence[int], wall_ns: int = 0) -> list[int]:
        """Finish messages by internal id; return those that were not in flight here.

        Args:
            wall_ns: wall time, needed only where :attr:`latency` is kept.
        """
        failed: list[int] = []
        window, base = self.window, self._id_base
        if self.spilled.loaded:
            ids = self._finish_spilled(subscription, ids, wall_ns)
        for first, end in ranges_of(ids) if ids else ():
            if window.finish_range(subscription, first - base, end - base):
                self._finished(subscription, first - base, end - base, wall_ns)
                continue
            for internal in range(first, end):
                sequence = internal - base
                if window.finish_one(subscription, sequence):
                    self._finished(subscription, sequence, sequence + 1, wall_ns)
                else:
                    failed.append(internal)
        subscription.find_place()
        return failed

    def _finished(self, subscription: Subscription, first: int, end: int, wall_ns: int) -> None:
        self.finish_count += end - first
        subscription.finish_count += end - first
        if self.latency is not None:
            self.latency.finished(first, end, wall_ns, self.window.floor, self.log.read)
        if self.events is not None:
            self.events.finished(subscription, first, end)

    def _finish_spilled(self, subscription: Subscription, ids: Sequence[int], wall_ns: int) -> Sequence[int]:
        """Finish those of these messages that were spilled; return the others."""
        finished, others = self.window.finish_spilled(subscription, ids, self._id_base)
        self.finish_count += len(finished)
        subscription.finish_count += len(finished)
        for message in finished if self.latency is not None or self.events is not None else ():
            if self.latency is not None and message.frame is not None:
                self.latency.finished_frame(message.frame, wall_ns)
            if self.events is not None:
                self.events.finished(subscription, message.sequence, message.sequence + 1)
        return others

    def is_in_flight(self, internal: int) -> bool:
        """Whether any consumer holds a message."""
        return self.window.held(internal - self._id_base) is not None

    def requeue(self, subscription: Subscription, internal: int, delay_ns: int, wall_ns: int) -> bool:
        """Give a message back, to be delivered again after ``delay_ns``; False when it is not in flight here."""
        sequence = internal - self._id_base
        message = self.window.held(sequence, by=subscription)
        if message is None:
            return False
        if delay_ns > 0 and not (self.limiter is not None and self.limiter.is_last_attempt(message)):
            self.window.defer(message, wall_ns + delay_ns, wall_ns)
        else:
            delay_ns = min(0, delay_ns)
            self._come_back(message)
        self.mark_changed()
        self.requeue_count += 1
        subscription.requeue_count += 1
        if self.events is not None:
            self.events.requeued(subscription, sequence, delay_ns)
        return True

    def _come_back(self, message: Message) -> None:
        """A message in flight was given back, timed out or lost its consumer: it comes again, or is given up."""
        if self.limiter is None or not self.limiter.gives_up(message):
            self._begin_turns(message.owner)
            self.window.requeue(message)

    def _begin_turns(self, _subscription: Subscription | None) -> None:
        """Before a message is queued again: let the first one that is wait behind one that is there already."""
        if self.keep_floor is None and not self.window.waiting_count and self.window.next < self.end:
            self._owed_count = max(1, self._owed_count)

    def touch(self, subscription: Subscription, internal: int, now_ns: int) -> bool:
        """Restart a message's timeout, up to the longest allowed since its delivery; False when not in flight here."""
        sequence = internal - self._id_base
        message = self.window.held(sequence, by=subscription)
        if message is None:
            return False
        self.window.touch(message, now_ns)
        if self.events is not None:
            self.events.touched(subscription, sequence)
        return True

    # -- time ----------------------------------------------------------------------------------------------------

    def handle_deadlines(self, now_ns: int, wall_ns: int) -> bool:
        """Queue again what has timed out and what has come due; True when something became deliverable."""
        window = self.window
        before = window.waiting_count
        for message in window.take_timed_out(now_ns):
            self.timeout_count += 1
            if self.events is not None and message.owner is not None:
                self.events.timed_out(message.owner, message.sequence)
            self._come_back(message)
        window.come_due(wall_ns)
        return window.waiting_count > before

    def next_deadline_ns(self, now_ns: int, wall_ns: int) -> int | None:
        """Monotonic time of the next :meth:`handle_deadlines` with something to do, never too late; None when never."""
        next_ns = self.window.next_deadline_ns(now_ns, wall_ns)
        if self.limiter is not None and self.limiter.retry_ns is not None:
            next_ns = self.limiter.retry_ns if next_ns is None else min(next_ns, self.limiter.retry_ns)
        return next_ns

    # -- delivery ------------------------------------------------------------------------------------------------

    def pump(self, now_ns: int, wall_ns: int) -> None:
        """Hand out as many messages as the consumers can take, into their ``out``."""
        self.wants_turn = False
        self._looked_cost = 0
        if self._depth_max is not None:
            self._bound_depth()
        if self.limiter is not None:
            self.limiter.wall_ns = wall_ns
        window = self.window
        if self.keep_floor is not None and self._kept_floor != window.floor:
            self._is_floor_awaited = self.keep_floor(window.floor) is False
            self._kept_floor = window.floor
        if self.skipped and not self.paused:
            self._skip_waiting()
            return
        if self.paused or self._ready.nearest() is None or self.spilled.is_stuffed:
            if self.keep_floor is None:
                self._pass_deferred(wall_ns)
            return
        if self.keep_floor is not None and (window.in_flight_count or self._is_floor_awaited):
            return
        self._hand_out(now_ns, wall_ns)
        budget = self.budget
        if budget.output_bytes >= budget.output_max_bytes and self._ready.nearest() is not None:
            budget.waiting[self] = None

    def _hand_out(self, now_ns: int, wall_ns: int) -> None:
        if self.window.waiting_count:
            if self.keep_floor is None:
                self._take_turns(now_ns, wall_ns)
                return
            self._redeliver(now_ns)
        if self.window.next < self.end:
            self._owed_count = 0
            self._deliver_new(now_ns, wall_ns, self.end)

    def _take_turns(self, now_ns: int, wall_ns: int) -> None:
        """Hand out what comes again and what is new one for one while there is both, and then what is left.

        What cannot be read now holds up its own kind alone.
        """
        is_new_left = True
        failure: StorageError | None = None
        budget, window = self.budget, self.window
        while window.waiting_count and not self.wants_turn and not budget.is_full and (line := self._ready.nearest()):
            is_new_left = is_new_left and window.next < self.end
            if is_new_left and self._owed_count:
                try:
                    is_new_left = self._deliver_owed(now_ns, wall_ns)
                except StorageError as error:
                    is_new_left, failure = False, error
                continue
            step = min(_STEP_MAX, max(1, next(iter(line)).capacity // _STEP_SHARE)) if is_new_left else _UNBOUNDED
            before = window.in_flight_count
            try:
                self._redeliver(now_ns, step)
            except StorageError:
                if is_new_left:
                    self._deliver_new(now_ns, wall_ns, self.end)
                raise
            count = window.in_flight_count - before
            if is_new_left:
                self._owed_count += count
            elif count:
                self._owed_count = max(1, self._owed_count)  # what is published next goes before it comes once more
        if is_new_left and window.next < self.end and not self.wants_turn and self._ready.nearest():
            self._owed_count = 0
            self._deliver_new(now_ns, wall_ns, self.end)
        if failure is not None:
            raise failure

    def _deliver_owed(self, now_ns: int, wall_ns: int) -> bool:
        """Let what is new have its turn; False when nothing of it can be delivered now."""
        window = self.window
        while self._owed_count and window.next < self.end and not self.wants_turn and self._ready.nearest():
            first, before = window.next, window.in_flight_count
            self._deliver_new(now_ns, wall_ns, min(self.end, first + self._owed_count))
            if window.next == first:
                return False
            self._owed_count = max(0, self._owed_count - max(0, window.in_flight_count - before))
        return True

    def gather_waiting(self) -> None:
        """Let everything that waits to be delivered again stand in the one queue for all consumers."""

    def deliver_in_order(self, keep_floor: Callable[[int], bool | None] | None) -> None:
        """Deliver one message at a time from now on, each when the one before is finished; None: as they come."""
        self.keep_floor = keep_floor
        self._kept_floor = -1
        self._is_floor_awaited = False
        self.window.keep_order(keep_floor is not None)

    def floor_is_kept(self, floor: int) -> None:
        """Go on behind a floor that :attr:`keep_floor` has brought elsewhere; it is pumped by the caller."""
        if floor == self._kept_floor:
            self._is_floor_awaited = False

    def take_sent_to(self) -> dict[Subscription, None]:
        """The consumers that :meth:`pump` gave something to write."""
        sent_to, self._sent_to = self._sent_to, {}
        return sent_to

    def _deliver_new(self, now_ns: int, wall_ns: int, end: int) -> None:
        """Hand out what lies between the cursor and ``end``."""
        line = self._ready.nearest()
        is_ordered = self.keep_floor is not None
        budget, window = self.budget, self.window
        while window.next < end and line and budget.output_bytes < budget.output_max_bytes:
            if window.is_full:
                self.spill()
                continue
            if is_ordered and (window.in_flight_count or len(window)):
                return
            if window.holes and window.skip_hole():
                continue
            batch = self.log.read(window.next)
            if batch is None or batch.first > window.next:  # nothing is stored there, or at the end of the log
                window.skip_to(self.end if batch is None else min(batch.first, self.end))
                continue
            if batch.due_ns and self.due_times.of(batch) > wall_ns:
                if not self.defer_batch(batch, wall_ns):
                    return
                continue
            if self.limiter is not None and self.limiter.skips(batch):
                continue
            stop = window.before_hole(min(batch.end, end))
            if not self._hand_over(line, batch, stop, end, now_ns):
                return
            if not line:
                line = self._ready.nearest()

    def _hand_over(self, line: Line, batch: Batch, stop: int, end: int, now_ns: int) -> bool:
        """Give what is at the cursor, and what follows it below ``stop``, to who is first in line; False: not now."""
        subscription, budget = next(iter(line)), self.budget
        if budget.output_bytes > budget.output_short_bytes and self._is_held_back(subscription):
            return True
        first = self.window.next
        share = 1 if self.keep_floor is not None else max(1, (end - first) // len(line))
        count = min(stop - first, subscription.capacity, share)
        if batch.size > DELIVERY_BYTES_MAX:
            count = min(count, batch.count_within(first, DELIVERY_BYTES_MAX))
        self._send_run(subscription, batch, count, now_ns)
        subscription.served()
        return not self.wants_turn

    def _is_held_back(self, subscription: Subscription) -> bool:
        """While memory is short: whether who is first in line has to wait, and is not in line any more."""
        if self.budget.gives(subscription, subscription.owner):
            return False
        subscription.hold_back()
        subscription.find_place()
        return True

    def _send_run(self, subscription: Subscription, batch: Batch, count: int, now_ns: int) -> None:
        window = self.window
        first = window.next
        end = first + count
        if subscription.sample_rate or subscription.ext_filter is not None:
            self._send_chosen(subscription, batch, first, end, now_ns)
            return
        if self.latency is not None:
            self.latency.delivered(first, end, batch.timestamp_ns, window.floor)
        is_as_stored = subscription.layout_at(first) is None  # of all: headers begin with a batch
        frames = batch.frames(first, end) if is_as_stored else subscription.laid_out(batch, first, end)
        self._put(subscription, frames, count)
        window.deliver_new(subscription, count, now_ns)
        if self.events is not None:
            self.events.delivered(subscription, batch, first, end, 1)

    def _put(self, subscription: Subscription, frames: bytes | memoryview, count: int) -> None:
        subscription.put(frames, count)
        budget = self.budget
        budget.output_bytes += len(frames)
        if budget.output_bytes > budget.output_short_bytes:
            subscription.had_one()
        self.locality_counts[subscription.locality] += count
        self._sent_to[subscription] = None

    def _send_chosen(self, subscription: Subscription, batch: Batch, first: int, end: int, now_ns: int) -> None:
        window = self.window
        for sequence in range(first, end):
            if self.wants_turn:
                return
            if self.latency is not None:
                self.latency.delivered(sequence, sequence + 1, batch.timestamp_ns, window.floor)
            frame = batch.frames(sequence, sequence + 1)
            if self._is_sampled_out(subscription) or not self._is_taken(subscription, sequence, frame):
                window.finish_new()
                if self.keep_floor is not None:
                    self.wants_turn = True  # the floor is kept before the next is sent
                continue
            self._put(subscription, subscription.one(frame, batch, sequence), 1)
            window.deliver_new(subscription, 1, now_ns)
            if self.events is not None:
                self.events.delivered(subscription, batch, sequence, sequence + 1, 1)

    def _is_taken(self, subscription: Subscription, sequence: int, frame: bytes | memoryview) -> bool:
        """Whether a consumer takes a message that it is to get; when not, it is to be finished."""
        ext_filter = subscription.ext_filter
        if ext_filter is None:
            return True
        self._looked_cost += ext_filter.cost(frame)
        if self._looked_cost >= _LOOKED_COST_MAX:
            self.wants_turn = True
        if ext_filter.takes(frame, has_headers=sequence >= subscription.headers_from):
            return True
        self.filtered_count += 1
        subscription.filtered_count += 1
        return False

    def _is_sampled_out(self, subscription: Subscription) -> bool:
        return bool(subscription.sample_rate) and self._random.randrange(100) >= subscription.sample_rate

    def _redeliver(self, now_ns: int, count_max: int = _UNBOUNDED) -> None:
        """Hand out what comes again, at most so many: what is in the window and what was spilled in turns."""
        budget, window, spilled = self.budget, self.window, self.spilled
        end_count = window.in_flight_count + count_max
        while (
            (window.queued or spilled.ready)
            and not self.wants_turn
            and not budget.is_full
            and (line := self._ready.nearest())
        ):
            left = end_count - window.in_flight_count
            if left <= 0:
                return
            if self.keep_floor is not None and (window.in_flight_count or not window.bring_first_forward()):
                return
            subscription = next(iter(line))
            if budget.is_short and self._is_held_back(subscription):
                continue
            is_spilled = not window.queued or (self._is_turn_of_spilled and bool(spilled.ready))
            self._is_turn_of_spilled = not is_spilled and self.keep_floor is None
            try:
                if is_spilled and self.keep_floor is None and not window.queued:
                    share = max(1, len(spilled.ready) // len(line))
                    self._redeliver_run(subscription, min(share, subscription.capacity, left), now_ns)
                else:
                    self._redeliver_one(subscription, window.line_of(is_spilled)[0], now_ns)
                    window.leave_line(is_spilled)  # only now: when the log cannot be read, it is tried again
            except StorageError:
                if self.keep_floor is None:
                    window.go_last(is_spilled)  # behind those that may be readable
                raise

    def _redeliver_run(self, subscription: Subscription, count_max: int, now_ns: int) -> None:
        """Hand out the first of the spilled messages in line, a run with one put for all if they go as they are."""
        window = self.window
        is_choosy = subscription.sample_rate or subscription.ext_filter is not None
        is_laid_out = subscription.layout is not None or subscription.older_layout is not None
        if is_choosy or is_laid_out or self.events is not None or count_max == 1:
            self._redeliver_one(subscription, self.spilled.ready[0], now_ns)
            window.leave_line(is_spilled=True)  # only now: when the log cannot be read, it is tried again
            return
        frames: list[bytes] = []
        withholds = None if self.limiter is None else self.limiter.withholds
        try:
            window.deliver_ready(subscription, frames, count_max, now_ns, withholds)
        finally:
            if frames:
                self._put(subscription, b"".join(frames), len(frames))
                subscription.served()

    def _redeliver_one(self, subscription: Subscription, sequence: int, now_ns: int) -> None:
        """Hand out a message that comes again, if it still waits and the consumer takes it."""
        window = self.window
        message = window.waiting_message(sequence)
        if message is None:
            return
        batch: Batch | None = None
        frame: bytes | memoryview
        if message.frame is None:
            batch = self.log.read(sequence)
            if batch is None or batch.first > sequence:
                window.finish(message)  # damaged on disk; the log has reported and set it aside
                return
            frame = batch.frames(sequence, sequence + 1)
        else:
            frame = message.frame
        if self.limiter is not None and self.limiter.withholds(message, batch):
            return
        is_sampled_out = message.attempts == 0 and self._is_sampled_out(subscription)
        if is_sampled_out or not self._is_taken(subscription, sequence, frame):
            window.finish(message)
            if self.keep_floor is not None:
                self.wants_turn = True  # the floor is kept before the next is sent
            return
        if batch is None and subscription.layout_at(sequence) is not None:
            batch = self.log.read(sequence)  # first: it may fail
        window.deliver_again(message, subscription, now_ns)
        sent = subscription.one(with_attempts(frame, message.attempts), batch, sequence)
        self._put(subscription, sent, 1)
        if self.events is not None:
            if message.frame is not None:
                self.events.delivered_spilled(subscription, sequence, message.frame, message.attempts)
            elif batch is not None:
                self.events.delivered(subscription, batch, sequence, sequence + 1, message.attempts)
        subscription.served()

    def defer_batch(self, batch: Batch, wall_ns: int) -> bool:
        """Move the cursor over messages that are not due; False when the database has to catch up first."""
        if self.spilled.is_full:
            return False
        window = self.window
        end = min(batch.end, self.end)
        if self.latency is not None:
            self.latency.delivered(window.next, end, batch.timestamp_ns, window.floor)
        window.defer_batch(batch, end, self.due_times.of(batch), wall_ns)
        return True

    def _pass_deferred(self, wall_ns: int) -> None:
        """With nobody to deliver to, take delayed messages at the cursor for what they are: deferred, not waiting."""
        window = self.window
        while window.next < self.end and window.next != self._not_deferred_at:
            if window.skip_hole():
                continue
            batch = self.log.read(window.next)
            if batch is None or batch.first > window.next or self.due_times.of(batch) <= wall_ns:
                self._not_deferred_at = window.next  # looked at once, however often something is published behind it
                return
            if window.is_full or not self.defer_batch(batch, wall_ns):
                return

    def spill(self) -> None:
        """Make room in a full window, see :meth:`Window.spill`."""
        self.window.spill()

    def _bound_depth(self) -> None:
        """Ephemeral: what arrives while ``depth_max`` messages wait is dropped, as nsqd's memory queue does."""
        assert self._depth_max is not None
        committed = self.log.committed_sequence
        if committed <= self._admitted:
            return
        first = self.window.next
        waiting = max(0, self._admitted - first) - self.window.left_out_count(first)
        room = max(0, self._depth_max - waiting)
        keep = min(committed, max(self._admitted, first) + room)
        if keep < committed:
            self.window.leave_out(keep, committed)
            self.dropped_count += committed - keep
        self._admitted = committed

    # -- looks ---------------------------------------------------------------------------------------------------

    def waiting_again(self, count: int) -> tuple[list[Message], list[Message]]:
        """List what comes again, so many of each kind at most: those whose turn is first, and the others; in order."""
        self.gather_waiting()  # which of several lines they stand in, nobody sees
        window = self.window
        queued, ready = list(islice(window.queued_messages(), count)), list(islice(window.ready_messages(), count))
        return (ready, queued) if self._is_turn_of_spilled and self.keep_floor is None else (queued, ready)

    @property
    def owed_count(self) -> int:
        """New messages to be delivered before more of what comes again."""
        return self._owed_count

    def check(self) -> None:
        """Raise with what is wrong; for tests, as it looks at everything.

        Raises:
            AssertionError: an invariant of this file or of the window does not hold.
        """
        self.window.check(self._waiting_elsewhere())
        for subscription in self.subscriptions:
            is_in_line = subscription.line is not None and subscription in subscription.line
            assert is_in_line == (subscription.capacity > 0), f"C3: {subscription.describe()}"

    def _waiting_elsewhere(self) -> Collection[int]:
        """Return what is to be delivered again and stands in neither of the window's lines."""
        return ()

    # -- administration ------------------------------------------------------------------------------------------

    def leave_out(self, first: int, end: int) -> None:
        """Never deliver sequences ``first`` to ``end``, which lie behind the cursor."""
        self.window.leave_out(first, end)

    def _skip_waiting(self) -> None:
        """Finish what waits to be delivered: what is new, and what was queued again or has come due."""
        window = self.window
        window.finish_waiting()
        while window.next < self.end:
            if window.is_full:
                self.spill()
            else:
                window.skip_to(min(self.end, window.next + window.size_max - len(window)) if len(window) else self.end)

    def empty(self) -> None:
        """Drop everything: waiting, in flight and deferred."""
        self._forget_delivered()
        self.window.empty(self.end)
        self._admitted = max(self._admitted, self.window.next)

    def restart_at(self, sequence: int, finish_older: bool) -> None:
        """Deliver what is stored from a sequence on as if it never had been; see :meth:`Window.restart_at`."""
        self._forget_delivered()
        self.window.restart_at(sequence, finish_older)
        if self.latency is not None:
            self.latency.restart()

    def cut_back_to(self, sequence: int) -> None:
        """The log is to end before ``sequence``; see :meth:`Window.cut_back_to`."""
        self.window.cut_back_to(sequence)
        self._not_deferred_at = 0
        self._kept_floor = -1
        self._admitted = min(self._admitted, sequence)
        self.counted_from = min(self.counted_from, sequence)
        if self.limit is not None:
            self.limit = min(self.limit, sequence)

    def _forget_delivered(self) -> None:
        """Forget what is kept of messages between floor and cursor, which are about to be forgotten."""
        self.gather_waiting()
        self._not_deferred_at = 0
        if self.limiter is not None:
            self.limiter.forget()

    def confirm(self, sequence: int) -> None:
        """Finish everything below ``sequence`` that is not in flight (CURSOR); the cursor never goes back."""
        self.gather_waiting()
        self.window.confirm(min(sequence, self.end))

    def drop(self, sequence: int) -> bool | None:
        """Finish a message below the cursor, though no consumer did; see :meth:`Window.drop`."""
        self.gather_waiting()
        return self.window.drop(sequence)

    def drop_deferred(self) -> None:
        """Finish everything that waits for its due time, though no consumer did; see :meth:`Window.drop_deferred`."""
        self.gather_waiting()
        self.window.drop_deferred()

    def describe(self) -> str:
        """A picture of the state for humans and failing tests."""
        window = self.window
        return f"channel {self.name} floor={window.floor} next={window.next} end={self.end} {window.describe()}"
