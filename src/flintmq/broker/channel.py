"""A channel of one partition: a cursor over the log, and one byte for each message between floor and cursor.

Picture::

    log       ... done | floor .................. next | not delivered yet ... | committed
    window             [ 0 3 3 3 0 255 7 7 254 ]
                         one byte per message: 0 done (or moved aside), 1..250 in flight at the subscription with that
                         slot, 251 in flight at a subscription without a slot of its own, 253 on its way to the dead
                         letters, 254 deferred, 255 queued again

Invariants:

- I1: every sequence below ``floor`` is finished or is in ``aside``.
- I2: ``len(window) == next - floor``; ``window`` never begins with 0.
- I3: a message is in flight at most once: its byte names the subscription that holds it.
- I4: ``attempts`` has an entry for a message in the window only if it was not delivered exactly once; ``held`` has the
  messages with a deadline of their own (redelivered or touched).
- I5: nothing at or beyond the log's committed sequence is delivered.
- I6: in order (``keep_floor`` is set) at most one message is in flight, the window holds nothing unfinished behind one
  that is not finished, and nothing is delivered before the floor has been kept.
- I7: a consumer stands in ``_ready`` exactly while it can take a message; one with runs has an entry in ``_deadlines``.

Turns: what comes again (``_requeued``, ``aside.ready``) and what is new are handed out one for one while both wait, so
that neither a message that always comes back nor a long backlog holds the other up. What is new begins, if some of it
waits when the first message is given back, times out or loses its connection. What came back first is first. Of what a
lost connection held, the message it had held longest is last, because it may be what the consumer died of, and what had
come again before keeps its place. In order nothing takes turns.

Rules of this file: monotonic ``now_ns`` for deadlines, ``wall_ns`` for due times (a wall clock that does not jump while
the process runs, as the caller provides it); runs of messages are handled by slices; only messages that were
redelivered, touched or deferred cost a dictionary entry; nothing that happens every turn looks at all consumers.

Source: design/performance.md decisions 3 and 8, reference/nsq.md 1.10.
"""

from __future__ import annotations

import heapq
import random
import re
from collections import deque
from collections.abc import Callable, Sequence

from flintmq.batch import Batch
from flintmq.broker.deferred import Aside, AsideStore
from flintmq.broker.delayed import DelayedAhead
from flintmq.broker.events import ChannelEvents
from flintmq.broker.latency import Latency
from flintmq.broker.ranges import add_range, forget_range, ranges_of
from flintmq.broker.ready import Line, ReadyLines, RunDeadlines
from flintmq.broker.setting_aside import SettingAside
from flintmq.broker.state import DEFERRED as DEFERRED
from flintmq.broker.state import DONE as DONE
from flintmq.broker.state import GIVING_UP as GIVING_UP
from flintmq.broker.state import NOT_DONE, SHARED, SLOT_MAX, Held, Log, Policy
from flintmq.broker.state import QUEUED as QUEUED
from flintmq.broker.state import ChannelState as ChannelState
from flintmq.broker.subscription import Locality, Run, Subscription
from flintmq.budget import Budget
from flintmq.errors import StorageError
from flintmq.limits import (
    CHANNEL_WINDOW_MAX,
    DEFER_IN_WINDOW_NS,
    DELIVERY_BYTES_MAX,
    WINDOW_DEFERRED_MAX,
)
from flintmq.message import internal_id
from flintmq.names import is_ephemeral

_RUN_JOIN_NS = 10_000_000  # deliveries closer together than this share one deadline
_STEP_SHARE = 8  # of what the next consumer can take, a turn of what comes again is this part, one message at least,
_STEP_MAX = 32  # and this many at most; what is new has as many then

_UNBOUNDED = 1 << 62
_LOOKED_COST_MAX = 4096  # of messages that filters are asked about in one turn, see ext_filter.py
_TO_DONE_BITS = bytes([1] + [0] * 255)


class Channel(SettingAside):
    """Owner of one channel's progress through one partition.

    Args:
        log: the partition's log.
        state: where to go on from.
        random_source: for sampling only.
        depth_max: for ephemeral channels, how many undelivered messages it keeps; newer ones are dropped.

    Attributes:
        subscriptions: every consumer, in the order of their coming.
        joined_count: consumers since the process started.
        filtered_count: messages finished because the consumer that was to get them does not take them.
        wants_turn: whether :meth:`pump` has stopped before the end, so that others have their turn.
        locality_counts: deliveries since the process started, by :class:`Locality` of who got them.
        skipped: whether messages are finished without being delivered.
        events: who wants to know what happens to messages, if anybody does.
        policy: what limits it has, if any.
        delayed: where in the log messages are that are not due, as far as is known.
        budget: what consumers have been given and not read counts in it; without a limit unless it is set.
        keep_floor: of a channel that is consumed in order: remembers the floor so that it outlives the process.
    """

    def __init__(
        self,
        name: str,
        partition: int,
        log: Log,
        state: ChannelState,
        aside: AsideStore,
        random_source: random.Random,
        depth_max: int | None = None,
        window_max: int = CHANNEL_WINDOW_MAX,
    ) -> None:
        self.name = name
        self.ephemeral = is_ephemeral(name)
        self.log = log
        self.budget = Budget()
        self.aside = aside
        self.paused = False
        self.skipped = False
        self.limit: int | None = None  # a paused topic: nothing from here on is delivered
        self.subscriptions: dict[Subscription, None] = {}
        self.joined_count = 0
        self.in_flight_count = 0
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
        self.policy: Policy | None = None
        self.delayed: DelayedAhead | None = None
        self.counted_from = log.committed_sequence
        self.dirty = True
        self.keep_floor: Callable[[int], None] | None = None
        self._kept_floor = -1
        self._id_base = internal_id(partition, 0)
        self._random = random_source
        self._depth_max = depth_max
        self._window_max = window_max
        self._admitted = log.committed_sequence
        self._ready = ReadyLines()
        self._deadlines = RunDeadlines()
        self._not_deferred_at = 0
        self._sent_to: dict[Subscription, None] = {}
        self._slots: list[Subscription | None] = [None] * (SLOT_MAX + 1)
        self._shared: dict[int, Subscription] = {}
        self._requeued: deque[int] = deque()
        self._owed_count = 0  # of what is new, for what has come again since, before more of it does
        self._is_turn_of_asides = False  # of what comes again
        self._attempts: dict[int, int] = dict(state.attempts)
        self._held: dict[int, Held] = {}
        self._held_heap: list[tuple[int, int]] = []
        self._deferred: dict[int, int] = {}
        self._deferred_heap: list[tuple[int, int]] = []
        self._holes: deque[tuple[int, int]] = deque(state.holes)
        self.floor = max(state.floor, log.start_sequence)
        self._window = bytearray()
        self._restore(state)
        self.next = self.floor + len(self._window)

    # -- restart -------------------------------------------------------------------------------------------------

    def _restore(self, state: ChannelState) -> None:
        done = state.window[self.floor - state.floor :] if state.floor < self.floor else state.window
        done = done[: max(0, self.log.next_sequence - self.floor)]
        self._window = bytearray(DONE if bit else QUEUED for bit in done)
        end = self.floor + len(self._window)
        for sequence, due_ns in state.deferred:
            if self.floor <= sequence < end:
                self._window[sequence - self.floor] = DEFERRED
                self._deferred[sequence] = due_ns
                self._deferred_heap.append((due_ns, sequence))
        heapq.heapify(self._deferred_heap)
        for match in re.finditer(rb"\xff", self._window):
            self._requeued.append(self.floor + match.start())
        for sequence in [s for s in self._attempts if not self.floor <= s < end]:
            del self._attempts[sequence]
        self._strip()

    def state(self) -> ChannelState:
        """What to write down now."""
        return ChannelState(
            self.floor,
            bytes(self._window.translate(_TO_DONE_BITS)),
            list(self._deferred.items()),
            list(self._attempts.items()),
            list(self._holes),
        )

    # -- counts --------------------------------------------------------------------------------------------------

    @property
    def end(self) -> int:
        """One past the last sequence this channel may deliver now."""
        committed = self.log.committed_sequence
        return committed if self.limit is None else min(committed, self.limit)

    @property
    def depth(self) -> int:
        """Messages waiting for a consumer; without those in flight and deferred."""
        waiting = max(0, self.end - self.next)
        for first, end in self._holes:
            waiting -= max(0, min(end, self.end) - max(first, self.next))
        return max(0, waiting - self._delayed_count) + len(self._requeued) + len(self.aside.ready)

    @property
    def _delayed_count(self) -> int:
        """Messages that the cursor has not reached and that are not due."""
        if not self.delayed:
            return 0
        count = self.delayed.count(self.next, self.end)
        for first, end in self._holes:
            count -= self.delayed.count(max(first, self.next), min(end, self.end))
        return count

    @property
    def message_count(self) -> int:
        """Messages the channel got since the process started."""
        return max(0, self.end - self.counted_from) - self.dropped_count

    @property
    def deferred_count(self) -> int:
        """Messages waiting for their due time."""
        return len(self._deferred) + self.aside.count - len(self.aside.loaded) + self._delayed_count

    @property
    def is_idle(self) -> bool:
        """Whether a new message changes nothing now: nobody can take one, and the one at the cursor simply waits."""
        is_at_rest = self._not_deferred_at == self.next and self._ready.nearest() is None
        is_simple = self._depth_max is None and not self.skipped
        return is_at_rest and is_simple and (self.policy is None or not self.policy.is_dropping)

    # -- subscriptions -------------------------------------------------------------------------------------------

    def add(self, subscription: Subscription) -> None:
        """Attach a consumer."""
        self.subscriptions[subscription] = None
        self.joined_count += 1
        try:
            slot = self._slots.index(None, 1)
        except ValueError:
            slot = SHARED
        else:
            self._slots[slot] = subscription
        subscription.slot = slot
        subscription.mark = bytes((slot,))
        self._ready.add(subscription)

    def remove(self, subscription: Subscription) -> None:
        """Detach a consumer; what it holds is queued again at once, attempts kept."""
        del self.subscriptions[subscription]
        self._ready.remove(subscription)
        if subscription.in_flight_count:
            held = self._held_by(subscription)
            if self.events is not None:
                self.events.let_go(subscription, held)
            self._take_back(subscription, held)
        subscription.runs.clear()
        if subscription.slot != SHARED:
            self._slots[subscription.slot] = None
        subscription.slot = 0
        self._deadlines.forget_detached(len(self.subscriptions))

    def _take_back(self, subscription: Subscription, held: list[int]) -> None:
        """Queue again what a lost connection held, given in the order of delivery.

        It may have died of the first: that one goes to the end, and what it was not taken from has the next turn. Of
        the others those that had come again keep their place in front, so that whatever consumers die of, the next
        ones begin with something else.
        """
        suspect, *others = held
        again = [sequence for sequence in others if self._has_come_again(sequence)]
        new = [sequence for sequence in others if not self._has_come_again(sequence)]
        if self._has_come_again(suspect):
            self._owed_count = max(1, self._owed_count)
        self._is_turn_of_asides = suspect not in self.aside.loaded
        for sequence in (*new, suspect):
            self._give_back(subscription, sequence)
        for sequence in reversed(again):
            self._give_back(subscription, sequence)
            for queue in (self._requeued, self.aside.ready):
                if queue and queue[-1] == sequence:  # it may have been given up instead
                    queue.rotate(1)

    def _has_come_again(self, sequence: int) -> bool:
        """Whether a message in flight was queued again, or came due, before its delivery."""
        return sequence in self._attempts or sequence in self.aside.loaded

    def _give_back(self, subscription: Subscription, sequence: int) -> None:
        aside = self.aside.loaded.get(sequence)
        if aside is None:
            self._queue_again(subscription, sequence)
        else:
            self._leave_flight(subscription)
            self._ready_again(aside)

    def _held_by(self, subscription: Subscription) -> list[int]:
        """What a consumer holds, in the order of delivery."""
        numbers = {each.sequence: each.number for each in self.aside.loaded.values() if each.owner is subscription}
        if subscription.slot == SHARED:
            mine = [sequence for sequence, owner in self._shared.items() if owner is subscription]
        else:
            floor = self.floor
            mine = [floor + match.start() for match in re.finditer(re.escape(subscription.mark), self._window)]
        by_place = sorted((run.first, run.end, run.number) for run in subscription.runs)
        at = 0
        for sequence in sorted(mine):
            held = self._held.get(sequence)
            if held is not None:
                numbers[sequence] = held.number
                continue
            while at < len(by_place) and by_place[at][1] <= sequence:
                at += 1
            assert at < len(by_place) and by_place[at][0] <= sequence, "what has no deadline of its own is in a run"
            numbers[sequence] = by_place[at][2] + sequence - by_place[at][0]
        return sorted(numbers, key=numbers.__getitem__)

    def _leave_flight(self, subscription: Subscription) -> None:
        subscription.in_flight_count -= 1
        self.in_flight_count -= 1
        if not subscription.in_flight_count:
            subscription.runs.clear()
        subscription.find_place()

    # -- finish, requeue, touch ----------------------------------------------------------------------------------

    def finish(self, subscription: Subscription, ids: Sequence[int], wall_ns: int = 0) -> list[int]:
        """Finish messages by internal id; return those that were not in flight here.

        Args:
            wall_ns: wall time, needed only where :attr:`latency` is kept.
        """
        failed: list[int] = []
        base = self._id_base
        if self.aside.loaded:
            ids = self._finish_asides(subscription, ids, wall_ns)
        for first, end in ranges_of(ids) if ids else ():
            if not self._finish_range(subscription, first - base, end - base, wall_ns):
                failed += [n for n in range(first, end) if not self._finish_one(subscription, n - base, wall_ns)]
        subscription.find_place()
        return failed

    def _finish_range(self, subscription: Subscription, first: int, end: int, wall_ns: int) -> bool:
        index = first - self.floor
        count = end - first
        window = self._window
        if index < 0 or subscription.slot == SHARED or window[index : index + count] != subscription.mark * count:
            return False
        if self._held:
            forget_range(self._held, first, end)
        if self._attempts:
            forget_range(self._attempts, first, end)
        if index == 0:
            del window[:count]
            self.floor = end
            self._strip()
        else:
            window[index : index + count] = bytes(count)
        if self.latency is not None:
            self.latency.finished(first, end, wall_ns, self.floor, self.log.read)
        self._finished(subscription, count, first)
        runs, floor = subscription.runs, self.floor
        while runs and runs[0].end <= floor:
            runs.popleft()
        return True

    def _finished(self, subscription: Subscription, count: int, first: int) -> None:
        if self.events is not None:
            self.events.finished(subscription, first, first + count)
        self._count_finished(subscription, count)

    def _count_finished(self, subscription: Subscription, count: int) -> None:
        self.dirty = True
        self.finish_count += count
        self.in_flight_count -= count
        subscription.finish_count += count
        subscription.in_flight_count -= count  # it finds its place in line behind the last of a run of FINs
        if not subscription.in_flight_count:
            subscription.runs.clear()

    def _finish_one(self, subscription: Subscription, sequence: int, wall_ns: int) -> bool:
        if self._owner(sequence) is subscription:
            self._mark_done(sequence)
            if self.latency is not None:
                self.latency.finished(sequence, sequence + 1, wall_ns, self.floor, self.log.read)
            self._finished(subscription, 1, sequence)
            return True
        return False

    def _owner(self, sequence: int) -> Subscription | None:
        """Who holds a message of the window."""
        index = sequence - self.floor
        if not 0 <= index < len(self._window):
            return None
        state = self._window[index]
        if state == SHARED:
            return self._shared.get(sequence)
        return self._slots[state] if 0 < state <= SLOT_MAX else None

    def is_in_flight(self, internal: int) -> bool:
        """Whether any consumer holds a message."""
        sequence = internal - self._id_base
        aside = self.aside.loaded.get(sequence)
        return self._owner(sequence) is not None or (aside is not None and aside.owner is not None)

    def _mark_done(self, sequence: int) -> None:
        self._attempts.pop(sequence, None)
        self._forget_flight(sequence)
        self._window[sequence - self.floor] = DONE
        if sequence == self.floor:
            self._strip()
        self.dirty = True

    def _forget_flight(self, sequence: int) -> None:
        self._held.pop(sequence, None)
        self._shared.pop(sequence, None)

    def _strip(self) -> None:
        """Restore I2: move the floor over what is done."""
        window = self._window
        if window and not window[0]:
            match = NOT_DONE.search(window)
            count = match.start() if match else len(window)
            del window[:count]
            self.floor += count

    def requeue(self, subscription: Subscription, internal: int, delay_ns: int, wall_ns: int) -> bool:
        """Give a message back, to be delivered again after ``delay_ns``; False when it is not in flight here."""
        sequence = internal - self._id_base
        if delay_ns > 0 and self.policy is not None and self.policy.is_last_attempt(sequence):
            delay_ns = 0
        aside = self.aside.loaded.get(sequence)
        if self._owner(sequence) is subscription:
            if delay_ns > 0:
                self._attempts.setdefault(sequence, 1)
                self._defer(sequence, wall_ns + delay_ns, wall_ns)  # first: when it fails, the message is in flight
                self._forget_flight(sequence)
                self._leave_flight(subscription)
            else:
                self._queue_again(subscription, sequence)
        elif aside is not None and aside.owner is subscription:
            self._leave_flight(subscription)
            if delay_ns > 0:
                aside.owner = None
                self.aside.defer(aside, wall_ns + delay_ns)
            else:
                self._ready_again(aside)
        else:
            return False
        self.dirty = True
        self.requeue_count += 1
        subscription.requeue_count += 1
        if self.events is not None:
            self.events.requeued(subscription, sequence, delay_ns)
        return True

    def _queue_again(self, subscription: Subscription, sequence: int) -> None:
        self._forget_flight(sequence)
        self._leave_flight(subscription)
        self._attempts.setdefault(sequence, 1)
        self.dirty = True  # the attempt that ended here counts after a restart too
        if self.policy is not None and self.policy.gives_up(sequence, subscription):
            return
        self._begin_turns(subscription)
        self._window[sequence - self.floor] = QUEUED
        self._requeued.append(sequence)

    def _ready_again(self, aside: Aside) -> None:
        if self.policy is None or not self.policy.gives_up_aside(aside):
            self._begin_turns(aside.owner)
            self.aside.make_ready(aside)

    def _begin_turns(self, _subscription: Subscription | None) -> None:
        """Before a message is queued again: let the first one that is wait behind one that is there already."""
        if not self._requeued and not self.aside.ready and self.next < self.end:
            self._owed_count = max(1, self._owed_count)

    def touch(self, subscription: Subscription, internal: int, now_ns: int) -> bool:
        """Restart a message's timeout, up to the longest allowed since its delivery; False when not in flight here."""
        sequence = internal - self._id_base
        wanted = now_ns + subscription.msg_timeout_ns
        aside = self.aside.loaded.get(sequence)
        if self._owner(sequence) is subscription:
            held = self._held_at(subscription, sequence)
            deadline = min(wanted, held.delivered_ns + subscription.max_msg_timeout_ns)
            self._held[sequence] = Held(deadline, held.delivered_ns, held.number)
        elif aside is not None and aside.owner is subscription:
            deadline = min(wanted, aside.delivered_ns + subscription.max_msg_timeout_ns)
            aside.deadline_ns = deadline
        else:
            return False
        self._push_deadline(deadline, sequence)
        if self.events is not None:
            self.events.touched(subscription, sequence)
        return True

    def _push_deadline(self, deadline_ns: int, sequence: int) -> None:
        heap = self._held_heap
        heapq.heappush(heap, (deadline_ns, sequence))
        if len(heap) > 2 * (len(self._held) + len(self.aside.loaded)) + 1024:
            # entries of finished messages stay behind; rebuild before they outnumber the living
            heap[:] = [(held.deadline_ns, s) for s, held in self._held.items()]
            heap += [(a.deadline_ns, s) for s, a in self.aside.loaded.items() if a.owner is not None]
            heapq.heapify(heap)

    def _held_at(self, subscription: Subscription, sequence: int) -> Held:
        """When a message of the window that a consumer holds was delivered to it, and when it times out."""
        held = self._held.get(sequence)
        if held is None:
            run = next(run for run in subscription.runs if run.first <= sequence < run.end)
            delivered_ns = run.deadline_ns - subscription.msg_timeout_ns
            held = Held(run.deadline_ns, delivered_ns, run.number + sequence - run.first)
        return held

    # -- deferral ------------------------------------------------------------------------------------------------

    def _defer(self, sequence: int, due_ns: int, wall_ns: int) -> None:
        """Put a message of the window to sleep; in the window when short, in the database when long or many."""
        is_short = due_ns - wall_ns <= DEFER_IN_WINDOW_NS and len(self._deferred) < WINDOW_DEFERRED_MAX
        if is_short or self.keep_floor is not None:  # in order it stays where it is, in the way of those behind it
            self._window[sequence - self.floor] = DEFERRED
            self._deferred[sequence] = due_ns
            heapq.heappush(self._deferred_heap, (due_ns, sequence))
            self.dirty = True
        else:
            self._put_aside(sequence, due_ns)

    def _is_queued(self, sequence: int) -> bool:
        index = sequence - self.floor
        return 0 <= index < len(self._window) and self._window[index] == QUEUED

    # -- time ----------------------------------------------------------------------------------------------------

    def expire(self, now_ns: int, wall_ns: int) -> bool:
        """Queue again what has timed out and what has come due; True when something became deliverable."""
        before = len(self._requeued) + len(self.aside.ready)
        for subscription in self._deadlines.take_due(now_ns):
            runs = subscription.runs
            while runs and runs[0].deadline_ns <= now_ns:
                run = runs.popleft()
                self._time_out_run(subscription, run)
            if runs:
                self._deadlines.watch(subscription, runs[0].deadline_ns)
        heap = self._held_heap
        while heap and heap[0][0] <= now_ns:
            deadline_ns, sequence = heapq.heappop(heap)
            self._time_out_held(deadline_ns, sequence)
        due = self._deferred_heap
        while due and due[0][0] <= wall_ns:
            due_ns, sequence = heapq.heappop(due)
            if self._deferred.get(sequence) == due_ns:
                del self._deferred[sequence]
                self._window[sequence - self.floor] = QUEUED
                self._requeued.append(sequence)
                self.dirty = True
        self.aside.come_due(wall_ns)
        return len(self._requeued) + len(self.aside.ready) > before

    def _time_out_run(self, subscription: Subscription, run: Run) -> None:
        floor, slot = self.floor, subscription.slot
        first = max(run.first, floor)
        part = self._window[first - floor : run.end - floor] if run.end > first else b""
        pattern = re.escape(subscription.mark)
        for match in re.finditer(pattern, part):
            sequence = first + match.start()
            if sequence in self._held or (slot == SHARED and self._shared.get(sequence) is not subscription):
                continue
            self._timed_out(subscription, sequence)

    def _timed_out(self, subscription: Subscription, sequence: int) -> None:
        self.timeout_count += 1
        self.dirty = True
        if self.events is not None:
            self.events.timed_out(subscription, sequence)
        self._queue_again(subscription, sequence)

    def _time_out_held(self, deadline_ns: int, sequence: int) -> None:
        held = self._held.get(sequence)
        if held is not None:
            owner = self._owner(sequence)
            if held.deadline_ns == deadline_ns and owner is not None:
                self._timed_out(owner, sequence)
            return
        aside = self.aside.loaded.get(sequence)
        if aside is not None and aside.owner is not None and aside.deadline_ns == deadline_ns:
            self.timeout_count += 1
            if self.events is not None:
                self.events.timed_out(aside.owner, sequence)
            self._leave_flight(aside.owner)
            self._ready_again(aside)

    def next_deadline_ns(self, now_ns: int, wall_ns: int) -> int | None:
        """Monotonic time at which :meth:`expire` may have something to do, never too late; None when never."""
        next_ns = self._deadlines.next_ns
        if self._held_heap and (next_ns is None or self._held_heap[0][0] < next_ns):
            next_ns = self._held_heap[0][0]
        soon_ns = self.aside.next_soon_ns
        if self._deferred_heap and (soon_ns is None or self._deferred_heap[0][0] < soon_ns):
            soon_ns = self._deferred_heap[0][0]
        if soon_ns is not None:
            due_ns = now_ns + max(0, soon_ns - wall_ns)
            next_ns = due_ns if next_ns is None else min(next_ns, due_ns)
        if self.policy is not None and self.policy.retry_ns is not None:
            next_ns = self.policy.retry_ns if next_ns is None else min(next_ns, self.policy.retry_ns)
        return next_ns

    # -- delivery ------------------------------------------------------------------------------------------------

    def pump(self, now_ns: int, wall_ns: int) -> None:
        """Hand out as many messages as the consumers can take, into their ``out``."""
        self.wants_turn = False
        self._looked_cost = 0
        if self._depth_max is not None:
            self._bound_depth()
        if self.policy is not None:
            self.policy.wall_ns = wall_ns
        if self.keep_floor is not None and self._kept_floor != self.floor:
            self.keep_floor(self.floor)
            self._kept_floor = self.floor
        if self.skipped and not self.paused:
            self._skip_waiting(now_ns)
            return
        if self.paused or self._ready.nearest() is None or self.aside.is_stuffed:
            if self.keep_floor is None:
                self._pass_deferred(wall_ns)
            return
        if self.keep_floor is not None and self.in_flight_count:
            return
        self._hand_out(now_ns, wall_ns)
        budget = self.budget
        if budget.output_bytes >= budget.output_max_bytes and self._ready.nearest() is not None:
            budget.waiting[self] = None

    def _hand_out(self, now_ns: int, wall_ns: int) -> None:
        if self._requeued or self.aside.ready:
            if self.keep_floor is None:
                self._take_turns(now_ns, wall_ns)
                return
            self._redeliver(now_ns)
        if self.next < self.end:
            self._owed_count = 0
            self._deliver_new(now_ns, wall_ns, self.end)

    def _take_turns(self, now_ns: int, wall_ns: int) -> None:
        """Hand out what comes again and what is new one for one while there is both, and then what is left.

        What cannot be read now holds up its own kind alone.
        """
        is_new_left = True
        failure: StorageError | None = None
        budget = self.budget
        while (
            (self._requeued or self.aside.ready)
            and not self.wants_turn
            and not budget.is_full
            and (line := self._ready.nearest())
        ):
            is_new_left = is_new_left and self.next < self.end
            if is_new_left and self._owed_count:
                try:
                    is_new_left = self._deliver_owed(now_ns, wall_ns)
                except StorageError as error:
                    is_new_left, failure = False, error
                continue
            step = min(_STEP_MAX, max(1, next(iter(line)).capacity // _STEP_SHARE)) if is_new_left else _UNBOUNDED
            before = self.in_flight_count
            try:
                self._redeliver(now_ns, step)
            except StorageError:
                if is_new_left:
                    self._deliver_new(now_ns, wall_ns, self.end)
                raise
            count = self.in_flight_count - before
            if is_new_left:
                self._owed_count += count
            elif count:
                self._owed_count = max(1, self._owed_count)  # what is published next goes before it comes once more
        if is_new_left and self.next < self.end and not self.wants_turn and self._ready.nearest():
            self._owed_count = 0
            self._deliver_new(now_ns, wall_ns, self.end)
        if failure is not None:
            raise failure

    def _deliver_owed(self, now_ns: int, wall_ns: int) -> bool:
        """Let what is new have its turn; False when nothing of it can be delivered now."""
        while self._owed_count and self.next < self.end and not self.wants_turn and self._ready.nearest():
            first, before = self.next, self.in_flight_count
            self._deliver_new(now_ns, wall_ns, min(self.end, first + self._owed_count))
            if self.next == first:
                return False
            self._owed_count = max(0, self._owed_count - max(0, self.in_flight_count - before))
        return True

    def gather_waiting(self) -> None:
        """Let everything that waits to be delivered again stand in the one queue for all consumers."""

    def deliver_in_order(self, keep_floor: Callable[[int], None] | None) -> None:
        """Deliver one message at a time from now on, each when the one before is finished; None: as they come."""
        self.keep_floor = keep_floor
        self._kept_floor = -1
        self._requeued = deque(sorted(self._requeued))

    def take_sent_to(self) -> dict[Subscription, None]:
        """The consumers that :meth:`pump` gave something to write."""
        sent_to, self._sent_to = self._sent_to, {}
        return sent_to

    def _deliver_new(self, now_ns: int, wall_ns: int, end: int) -> None:
        """Hand out what lies between the cursor and ``end``."""
        line = self._ready.nearest()
        is_ordered = self.keep_floor is not None
        budget = self.budget
        while self.next < end and line and budget.output_bytes < budget.output_max_bytes:
            if len(self._window) >= self._window_max:
                self._spill(now_ns)
                continue
            if is_ordered and (self._window or self.in_flight_count):
                return
            if self._holes and self._skip_hole():
                continue
            batch = self.log.read(self.next)
            if batch is None:
                return
            if batch.first > self.next:
                self._skip_to(min(batch.first, self.end))
                continue
            if batch.due_ns > wall_ns:
                if not self._defer_batch(batch, wall_ns):
                    return
                continue
            if self.policy is not None and self.policy.skips(batch):
                continue
            stop = min(batch.end, end, self._holes[0][0]) if self._holes else min(batch.end, end)
            if not self._hand_over(line, batch, stop, end, now_ns):
                return
            if not line:
                line = self._ready.nearest()

    def _hand_over(self, line: Line, batch: Batch, stop: int, end: int, now_ns: int) -> bool:
        """Give what is at the cursor, and what follows it below ``stop``, to who is first in line; False: not now."""
        subscription, budget = next(iter(line)), self.budget
        if budget.output_bytes > budget.output_short_bytes and self._is_held_back(subscription):
            return True
        share = 1 if self.keep_floor is not None else max(1, (end - self.next) // len(line))
        count = min(stop - self.next, subscription.capacity, share)
        if batch.size > DELIVERY_BYTES_MAX:
            count = min(count, batch.count_within(self.next, DELIVERY_BYTES_MAX))
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
        first = self.next
        end = first + count
        if subscription.sample_rate or subscription.ext_filter is not None:
            self._send_chosen(subscription, batch, first, end, now_ns)
            return
        if self.latency is not None:
            self.latency.delivered(first, end, batch.timestamp_ns, self.floor)
        self._window += subscription.mark * count
        self.next = end
        if subscription.slot == SHARED:
            for sequence in range(first, end):
                self._shared[sequence] = subscription
        is_as_stored = subscription.layout_at(first) is None  # of all: headers begin with a batch
        frames = batch.frames(first, end) if is_as_stored else subscription.laid_out(batch, first, end)
        self._put(subscription, frames, count)
        if self.events is not None:
            self.events.delivered(subscription, batch, first, end, 1)
        self._start_run(subscription, first, end, now_ns)

    def _put(self, subscription: Subscription, frames: bytes | memoryview, count: int) -> None:
        subscription.put(frames, count)
        budget = self.budget
        budget.output_bytes += len(frames)
        if budget.output_bytes > budget.output_short_bytes:
            subscription.had_one()
        self.in_flight_count += count
        self.locality_counts[subscription.locality] += count
        self._sent_to[subscription] = None

    def _start_run(self, subscription: Subscription, first: int, end: int, now_ns: int) -> None:
        deadline = now_ns + subscription.msg_timeout_ns
        runs = subscription.runs
        number = subscription.message_count - (end - first)
        if runs:
            last = runs[-1]
            is_next = last.end == first and number - last.number == first - last.first
            if is_next and deadline - last.deadline_ns < _RUN_JOIN_NS:
                last.end = end
                return
        runs.append(Run(deadline, first, end, number))
        if not subscription.is_watched:
            self._deadlines.watch(subscription, deadline)
        if len(runs) > 2 * subscription.in_flight_count + 64:
            self._forget_finished_runs(subscription)

    def _forget_finished_runs(self, subscription: Subscription) -> None:
        floor, mark = self.floor, subscription.mark
        subscription.runs = deque(
            run
            for run in subscription.runs
            if mark in self._window[max(0, run.first - floor) : max(0, run.end - floor)]
        )

    def _send_chosen(self, subscription: Subscription, batch: Batch, first: int, end: int, now_ns: int) -> None:
        for sequence in range(first, end):
            if self.wants_turn:
                return
            self.next = sequence + 1
            if self.latency is not None:
                self.latency.delivered(sequence, sequence + 1, batch.timestamp_ns, self.floor)
            if self._is_sampled_out(subscription) or not self._is_taken(
                subscription, sequence, batch.frames(sequence, sequence + 1)
            ):
                self._window.append(DONE)
                self._strip()
                self.dirty = True
                if self.keep_floor is not None:
                    self.wants_turn = True  # the floor is kept before the next is sent
                continue
            self._window += subscription.mark
            if subscription.slot == SHARED:
                self._shared[sequence] = subscription
            frame = batch.frames(sequence, sequence + 1)
            self._put(subscription, subscription.one(frame, batch, sequence), 1)
            if self.events is not None:
                self.events.delivered(subscription, batch, sequence, sequence + 1, 1)
            self._start_run(subscription, sequence, sequence + 1, now_ns)

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
        """Hand out what comes again, at most so many: what is in the window and what was set aside in turns."""
        end_count = self.in_flight_count + count_max
        budget = self.budget
        while (
            (self._requeued or self.aside.ready)
            and not self.wants_turn
            and not budget.is_full
            and (line := self._ready.nearest())
        ):
            left = end_count - self.in_flight_count
            if left <= 0:
                return
            if self.keep_floor is not None and (self.in_flight_count or not self._is_next_in_line()):
                return
            subscription = next(iter(line))
            if budget.is_short and self._is_held_back(subscription):
                continue
            queue = self._requeued
            if not queue or (self._is_turn_of_asides and self.aside.ready):
                queue = self.aside.ready
            try:
                if queue is self._requeued:
                    self._is_turn_of_asides = self.keep_floor is None
                    self._redeliver_window(subscription, queue[0], now_ns)
                    queue.popleft()  # only now: when the log cannot be read, it is tried again
                    continue
                self._is_turn_of_asides = False
                is_alone = self.keep_floor is None and not self._requeued
                share = max(1, len(queue) // len(line)) if is_alone else 1
                self._redeliver_asides(subscription, min(share, subscription.capacity, left), now_ns)
            except StorageError:
                if self.keep_floor is None:
                    queue.rotate(-1)  # behind those that may be readable
                raise

    def _is_next_in_line(self) -> bool:
        """In order: have the first message of the window at the front; False while its delay is not over."""
        if self._window and self._requeued and self._requeued[0] != self.floor:
            if not self._is_queued(self.floor):
                return False
            self._requeued.remove(self.floor)
            self._requeued.appendleft(self.floor)
        return True

    def _redeliver_window(self, subscription: Subscription, sequence: int, now_ns: int) -> None:
        if not self._is_queued(sequence):
            return
        batch = self.log.read(sequence)
        if batch is None or batch.first > sequence:
            self._mark_done(sequence)  # damaged on disk; the log has reported and set it aside
            return
        if self.policy is not None and self.policy.takes(sequence, batch):
            return
        attempts = self._attempts.get(sequence, 1) + 1
        is_sampled_out = attempts == 1 and self._is_sampled_out(subscription)
        is_filtered = subscription.ext_filter is not None
        if is_sampled_out or (
            is_filtered and not self._is_taken(subscription, sequence, batch.frames(sequence, sequence + 1))
        ):
            self._mark_done(sequence)
            if self.keep_floor is not None:
                self.wants_turn = True
            return
        self._attempts[sequence] = attempts
        self._window[sequence - self.floor] = subscription.slot
        if subscription.slot == SHARED:
            self._shared[sequence] = subscription
        deadline = now_ns + subscription.msg_timeout_ns
        self._held[sequence] = Held(deadline, now_ns, subscription.message_count)
        self._push_deadline(deadline, sequence)
        self._put(subscription, subscription.one(batch.redelivery(sequence, attempts), batch, sequence), 1)
        if self.events is not None:
            self.events.delivered(subscription, batch, sequence, sequence + 1, attempts)
        subscription.served()

    def _defer_batch(self, batch: Batch, wall_ns: int) -> bool:
        """Move the cursor over messages that are not due; False when the database has to catch up first."""
        if self.aside.is_full:
            return False
        if self.latency is not None:
            self.latency.delivered(self.next, min(batch.end, self.end), batch.timestamp_ns, self.floor)
        end = self.next + 1 if self.keep_floor is not None else min(batch.end, self.end)
        if self._holes:
            end = min(end, self._holes[0][0])
        room = WINDOW_DEFERRED_MAX - len(self._deferred) if batch.due_ns - wall_ns <= DEFER_IN_WINDOW_NS else 0
        for sequence in range(self.next, end if self.keep_floor is not None else min(end, self.next + room)):
            self._attempts[sequence] = 0
            self._window.append(QUEUED)
            self.next = sequence + 1
            self._defer(sequence, batch.due_ns, wall_ns)
        if self.next < end:
            self.aside.put_batch(batch, self.next, end)
            self._skip_to(end)
        return True

    def _skip_to(self, sequence: int) -> None:
        """Move the cursor over sequences that do not exist or are not for this channel."""
        if self._window:
            self._window += bytes(sequence - self.next)
        else:
            self.floor = sequence
        self.next = sequence
        self.dirty = True

    def _skip_hole(self) -> bool:
        first, end = self._holes[0]
        if first > self.next:
            return False
        self._holes.popleft()
        if end > self.next:
            self._skip_to(min(end, self.log.next_sequence))
        return True

    def _bound_depth(self) -> None:
        """Ephemeral: what arrives while ``depth_max`` messages wait is dropped, as nsqd's memory queue does."""
        assert self._depth_max is not None
        committed = self.log.committed_sequence
        if committed <= self._admitted:
            return
        waiting = max(0, self._admitted - self.next) - sum(end - max(first, self.next) for first, end in self._holes)
        room = max(0, self._depth_max - waiting)
        keep = min(committed, max(self._admitted, self.next) + room)
        if keep < committed:
            self.add_hole(keep, committed)
            self.dropped_count += committed - keep
        self._admitted = committed

    # -- administration ------------------------------------------------------------------------------------------

    def add_hole(self, first: int, end: int) -> None:
        """Leave sequences ``first`` to ``end`` out of this channel; they lie beyond the cursor."""
        first = max(first, self.next)
        if first < end:
            add_range(self._holes, first, end)
            self.dirty = True

    def _skip_waiting(self, now_ns: int) -> None:
        """Finish what waits to be delivered: what is new, and what was queued again or has come due."""
        for sequence in self._requeued:
            if self._is_queued(sequence):
                self._mark_done(sequence)
        self._requeued.clear()
        for sequence in self.aside.ready:
            self.aside.finish(sequence)
        self.aside.ready.clear()
        while self.next < self.end:
            room = self._window_max - len(self._window)
            if room <= 0:
                self._spill(now_ns)
            else:
                self._skip_to(min(self.end, self.next + room) if self._window else self.end)

    def empty(self) -> None:
        """Drop everything: waiting, in flight and deferred."""
        self.let_go()
        self._holes.clear()
        self.aside.clear()
        self.next = self.floor = max(self.end, self.next)
        self._admitted = max(self._admitted, self.next)
        self.dirty = True

    def let_go(self) -> None:
        """Forget what there is between floor and cursor, as if none of it had been delivered."""
        for subscription in self.subscriptions:
            subscription.in_flight_count = 0
            subscription.runs.clear()
            subscription.find_place()
        self.in_flight_count = 0
        for mapping in (self._shared, self._attempts, self._held, self._deferred):
            mapping.clear()
        self._held_heap.clear()
        self._deferred_heap.clear()
        self._requeued.clear()
        self._window.clear()
        self._not_deferred_at = 0
        if self.policy is not None:
            self.policy.forget()

    def confirm(self, sequence: int) -> None:
        """Finish everything below ``sequence`` that is not in flight (CURSOR); the cursor never goes back."""
        sequence = min(sequence, self.end)
        for current in range(self.floor, min(sequence, self.next)):
            index = current - self.floor
            if index >= 0 and self._window[index] in (QUEUED, DEFERRED):
                self._deferred.pop(current, None)
                self._mark_done(current)
        if sequence > self.next:
            self._skip_to(sequence)
        self.dirty = True

    def describe(self) -> str:
        """A picture of the state for humans and failing tests."""
        counts = {
            "in_flight": self.in_flight_count,
            "requeued": len(self._requeued),
            "deferred": len(self._deferred),
            "aside": self.aside.count,
            "held": len(self._held),
            "attempts": len(self._attempts),
        }
        shown = " ".join(f"{name}={count}" for name, count in counts.items() if count)
        window = bytes(self._window[:32]).hex(" ")
        more = "..." if len(self._window) > 32 else ""
        return (
            f"channel {self.name} floor={self.floor} next={self.next} end={self.end} window[{len(self._window)}]="
            f"[{window}{more}] {shown}"
        )
