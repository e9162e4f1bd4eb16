"""The messages of a channel between its floor and its cursor, one byte each; and those spilled out of there.

Picture::

    log       ... done | floor .................. next | not delivered yet ... | committed
    window             [ 0 3 3 3 0 255 7 7 254 ]
                         one byte per message: 0 done (or spilled), 1..250 in flight at the subscription with that
                         slot, 251 in flight at a subscription without a slot of its own, 253 on its way to the dead
                         letters, 254 deferred, 255 queued again

Invariants, which :meth:`Window.check` looks at:

- W1: every sequence below ``floor`` is finished or is in ``spilled``.
- W2: there is a byte for each sequence from ``floor`` to ``next``, and the first of them is not 0.
- W3: a message is in flight at most once: its byte, or its record when it was spilled, names who holds it.
- W4: a message of the window for which no attempts are noted was delivered once; there is a record of it only if it is
  in flight with a deadline of its own (redelivered or touched).
- W5: every message in flight times out: with its record, or with a run of who holds it, which is watched.
- W6: a deferred message is known with its due time, and stands in the heap of those.
- W7: a queued message stands in ``queued`` once, or waits where the channel says. An entry of ``queued`` may be of a
  message that has been finished since.
- W8: a message is in the window or spilled, not both.

Rules of this file: nobody else writes what a :class:`Window` has, nor the runs, slot and mark of a subscription;
monotonic ``now_ns`` for deadlines, ``wall_ns`` for due times (a wall clock that does not jump while the process runs,
as the caller provides it); runs of messages are handled by slices; only messages that were redelivered, touched or
deferred cost a dictionary entry. What is done with one :class:`Message` is the same wherever it is.

Source: docs/decisions/0001, docs/decisions/0003, NSQ's TCP protocol.
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice

from flintmq.batch import Batch
from flintmq.broker.ranges import add_range, forget_range
from flintmq.broker.ready import RunDeadlines
from flintmq.broker.spilled import SpilledStore
from flintmq.broker.state import DEFERRED, DONE, GIVING_UP, QUEUED, SHARED, SLOT_MAX, ChannelState, Log, Message
from flintmq.broker.subscription import Run, Subscription
from flintmq.limits import DEFER_IN_WINDOW_NS, DELIVERY_BYTES_MAX, WINDOW_DEFERRED_MAX
from flintmq.message import with_attempts

_RUN_JOIN_NS = 10_000_000  # deliveries closer together than this share one deadline
_NOT_DONE = re.compile(rb"[^\x00]")
_IN_FLIGHT = re.compile(rb"[\x01-\xfb]")
_TO_DONE_BITS = bytes([1] + [0] * 255)
_QUEUED_BYTE = bytes((QUEUED,))
_UNBOUNDED = 1 << 62


class Window:
    """Owner of what a channel has begun with and not finished.

    Args:
        log: the partition's log.
        state: where to go on from.
        spilled: what the database has of the channel, and what is on its way there.
        size_max: how many messages there are between floor and cursor at most; see :attr:`is_full`.

    Attributes:
        floor: everything below is finished or spilled.
        next: the cursor: nothing from here on has been looked at.
        queued: sequences that are to be delivered again, in this order; some may have been finished since.
        holes: ascending ranges behind the cursor, ends exclusive, that the channel never gets.
        consumers: everybody who may hold something, in the order of their coming.
        in_flight_count: messages that consumers hold.
        is_ordered: whether what is deferred stays in the way of what is behind it.
    """

    __slots__ = ("_attempts", "_deadlines", "_deferred", "_due", "_held", "_is_changed", "_log", "_shared", "_slots",
                 "_states", "_timeouts", "consumers", "floor", "holes", "in_flight_count", "is_ordered", "next",
                 "queued", "size_max", "spilled")  # fmt: skip

    def __init__(self, log: Log, state: ChannelState, spilled: SpilledStore, size_max: int) -> None:
        self._log = log
        self.spilled = spilled
        self.size_max = size_max
        self.consumers: dict[Subscription, None] = {}
        self.in_flight_count = 0
        self.is_ordered = False
        self.queued: deque[int] = deque()
        self.holes: deque[tuple[int, int]] = deque(state.holes)
        self._is_changed = True
        self._slots: list[Subscription | None] = [None] * (SLOT_MAX + 1)
        self._shared: dict[int, Subscription] = {}
        self._attempts: dict[int, int] = dict(state.attempts)
        self._held: dict[int, Message] = {}
        self._timeouts: list[tuple[int, int]] = []  # of messages with a deadline of their own: deadline and sequence
        self._deadlines = RunDeadlines()
        self._deferred: dict[int, int] = {}
        self._due: list[tuple[int, int]] = []  # of deferred messages: due time and sequence
        self.floor = max(state.floor, log.start_sequence)
        self._states = bytearray()
        self._restore(state)
        self.next = self.floor + len(self._states)

    def _restore(self, state: ChannelState) -> None:
        done = state.window[self.floor - state.floor :] if state.floor < self.floor else state.window
        done = done[: max(0, self._log.next_sequence - self.floor)]
        self._states = bytearray(DONE if bit else QUEUED for bit in done)
        end = self.floor + len(self._states)
        for sequence, due_ns in state.deferred:
            if self.floor <= sequence < end:
                self._states[sequence - self.floor] = DEFERRED
                self._deferred[sequence] = due_ns
                self._due.append((due_ns, sequence))
        heapq.heapify(self._due)
        self.queued.extend(self._sequences_of(_QUEUED_BYTE))
        for sequence in [s for s in self._attempts if not self.floor <= s < end]:
            del self._attempts[sequence]
        self._strip()

    def state(self) -> ChannelState:
        """Return what is to be written down now."""
        return ChannelState(
            self.floor,
            bytes(self._states.translate(_TO_DONE_BITS)),
            list(self._deferred.items()),
            list(self._attempts.items()),
            list(self.holes),
        )

    @property
    def is_changed(self) -> bool:
        """Whether :meth:`state` is another than when :meth:`take_changed` was called last, or somebody says so."""
        return self._is_changed

    def mark_changed(self) -> None:
        """Have :meth:`state` written again."""
        self._is_changed = True

    def take_changed(self) -> bool:
        """Whether :meth:`state` has to be written; the caller does it."""
        is_changed, self._is_changed = self._is_changed, False
        return is_changed

    # -- counts and looks ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._states)

    @property
    def is_full(self) -> bool:
        """Whether the cursor has to wait until :meth:`spill` has made room."""
        return len(self._states) >= self.size_max

    @property
    def unfinished_count(self) -> int:
        """Messages between floor and cursor that are neither finished nor spilled."""
        return len(self._states) - self._states.count(DONE)

    @property
    def deferred_count(self) -> int:
        """Messages in the window that wait for their due time."""
        return len(self._deferred)

    @property
    def waiting_count(self) -> int:
        """Messages in line to be delivered again, in the window and spilled."""
        return len(self.queued) + len(self.spilled.ready)

    def is_queued(self, sequence: int) -> bool:
        """Whether a message of the window is to be delivered again."""
        index = sequence - self.floor
        return 0 <= index < len(self._states) and self._states[index] == QUEUED

    def attempts_of(self, sequence: int) -> int:
        """Count the deliveries of a message between floor and cursor."""
        return self._attempts.get(sequence, 1)

    def left_out_count(self, first: int, end: int = _UNBOUNDED) -> int:
        """Count the sequences from ``first`` to ``end`` (exclusive) that the channel never gets."""
        return sum(max(0, min(stop, end) - max(start, first)) for start, stop in self.holes)

    def _sequences_of(self, state: bytes) -> Iterator[int]:
        floor = self.floor
        return (floor + match.start() for match in re.finditer(re.escape(state), self._states))

    def queued_messages(self) -> Iterator[Message]:
        """List the messages of the window that are in line to be delivered again."""
        attempts = self._attempts
        return (Message(s, attempts.get(s, 1)) for s in self.queued if self.is_queued(s))

    def ready_messages(self) -> Iterator[Message]:
        """List the spilled messages that are in line."""
        found = map(self.spilled.ready_message, self.spilled.ready)
        return (message for message in found if message is not None)

    def queued_from(self, sequence: int) -> int | None:
        """The first message from ``sequence`` on that is to be delivered again; None without any."""
        index = self._states.find(_QUEUED_BYTE, max(0, sequence - self.floor))
        return None if index < 0 else self.floor + index

    def held_messages(self, count_max: int) -> list[Message]:
        """List what consumers hold, at most so many: spilled ones first, and each kind in the order of the log."""
        spilled = [each for _, each in sorted(self.spilled.loaded.items()) if each.owner is not None][:count_max]
        held: list[Message] = []
        runs: dict[Subscription, list[Run]] = {}
        for match in islice(_IN_FLIGHT.finditer(self._states), count_max):
            message = self.held(self.floor + match.start())
            if message is not None and message.owner is not None:
                if not message.deadline_ns:
                    its = runs.setdefault(message.owner, list(message.owner.runs))
                    message.deadline_ns = its[bisect_right(its, message.sequence, key=_first) - 1].deadline_ns
                held.append(message)
        return [*spilled, *held]

    def deferred_messages(self, count_max: int) -> list[tuple[int, Message]]:
        """Due times and messages that are deferred in the window, the next one first, at most so many."""
        found = heapq.nsmallest(count_max, ((due_ns, sequence) for sequence, due_ns in self._deferred.items()))
        return [(due_ns, Message(sequence, self.attempts_of(sequence))) for due_ns, sequence in found]

    # -- consumers -----------------------------------------------------------------------------------------------

    def attach(self, subscription: Subscription) -> None:
        """Let a consumer hold messages."""
        self.consumers[subscription] = None
        try:
            slot = self._slots.index(None, 1)
        except ValueError:
            slot = SHARED
        else:
            self._slots[slot] = subscription
        subscription.slot = slot
        subscription.mark = bytes((slot,))

    def detach(self, subscription: Subscription) -> None:
        """Let go of a consumer that holds nothing any more."""
        del self.consumers[subscription]
        subscription.runs.clear()
        if subscription.slot != SHARED:
            self._slots[subscription.slot] = None
        subscription.slot = 0
        self._deadlines.forget_detached(len(self.consumers))

    def held_by(self, subscription: Subscription) -> list[Message]:
        """List what a consumer holds, in the order of delivery."""
        found = [each for each in self.spilled.loaded.values() if each.owner is subscription]
        if subscription.slot == SHARED:
            mine = [sequence for sequence, owner in self._shared.items() if owner is subscription]
        else:
            mine = list(self._sequences_of(subscription.mark))
        by_place = sorted((run.first, run.end, run.number) for run in subscription.runs)
        at = 0
        for sequence in sorted(mine):
            message = self._held.get(sequence)
            if message is None:
                while at < len(by_place) and by_place[at][1] <= sequence:
                    at += 1
                assert at < len(by_place) and by_place[at][0] <= sequence, "W5: what has no record is in a run"
                message = self._in_run(subscription, sequence)
                message.number = by_place[at][2] + sequence - by_place[at][0]
            found.append(message)
        found.sort(key=_number)
        return found

    def _owner(self, sequence: int) -> Subscription | None:
        """Find who holds a message of the window."""
        index = sequence - self.floor
        if not 0 <= index < len(self._states):
            return None
        state = self._states[index]
        if state == SHARED:
            return self._shared.get(sequence)
        return self._slots[state] if 0 < state <= SLOT_MAX else None

    def held(self, sequence: int, by: Subscription | None = None) -> Message | None:
        """A message in flight; None when nobody holds it, or not ``by``."""
        message = self.spilled.loaded.get(sequence)
        if message is not None:
            owner = message.owner
        else:
            owner = self._owner(sequence)
            message = self._held.get(sequence)
        if owner is None or (by is not None and owner is not by):
            return None
        return self._in_run(owner, sequence) if message is None else message

    def _in_run(self, owner: Subscription, sequence: int) -> Message:
        message = Message(sequence, self._attempts.get(sequence, 1))
        message.owner = owner
        return message

    def has_come_again(self, message: Message) -> bool:
        """Whether a message in flight was queued again, or came due, before its delivery."""
        return message.is_spilled or message.sequence in self._attempts

    # -- delivery ------------------------------------------------------------------------------------------------

    def deliver_new(self, subscription: Subscription, count: int, now_ns: int) -> None:
        """So many messages at the cursor have been put out to a consumer, as its last ones."""
        first = self.next
        self.next = end = first + count
        self._states += subscription.mark * count
        self.in_flight_count += count
        if subscription.slot == SHARED:
            for sequence in range(first, end):
                self._shared[sequence] = subscription
        deadline_ns = now_ns + subscription.msg_timeout_ns
        runs = subscription.runs
        number = subscription.message_count - count
        if runs:
            last = runs[-1]
            is_next = last.end == first and number - last.number == first - last.first
            if is_next and deadline_ns - last.deadline_ns < _RUN_JOIN_NS:
                last.end = end
                return
        runs.append(Run(deadline_ns, first, end, number))
        if not subscription.is_watched:
            self._deadlines.watch(subscription, deadline_ns)
        if len(runs) > 2 * subscription.in_flight_count + 64:
            self._forget_finished_runs(subscription)

    def _forget_finished_runs(self, subscription: Subscription) -> None:
        floor, mark = self.floor, subscription.mark
        subscription.runs = deque(
            run
            for run in subscription.runs
            if mark in self._states[max(0, run.first - floor) : max(0, run.end - floor)]
        )

    def deliver_again(self, message: Message, subscription: Subscription, now_ns: int) -> None:
        """A message that was in line is about to be put out to a consumer, as its next one."""
        sequence = message.sequence
        message.attempts += 1
        message.owner, message.number = subscription, subscription.message_count
        message.delivered_ns = now_ns
        message.deadline_ns = now_ns + subscription.msg_timeout_ns
        if message.frame is None:
            self._attempts[sequence] = message.attempts
            self._states[sequence - self.floor] = subscription.slot
            if subscription.slot == SHARED:
                self._shared[sequence] = subscription
            self._held[sequence] = message
        self.in_flight_count += 1
        self._push_deadline(message.deadline_ns, sequence)

    def deliver_ready(
        self,
        subscription: Subscription,
        frames: list[bytes],
        count_max: int,
        now_ns: int,
        withholds: Callable[[Message, Batch | None], bool] | None,
    ) -> None:
        """Let a consumer have spilled messages that are in line, about :data:`DELIVERY_BYTES_MAX` at most.

        Args:
            frames: get what is to be put out, also when it ends with an error: the first is still in line then.
            withholds: whether a message is not to be delivered, and somebody else has seen to it.

        Raises:
            StorageError: the log cannot be read now, which ``withholds`` does.
        """
        spilled = self.spilled
        ready, loaded = spilled.ready, spilled.loaded
        deadline_ns = now_ns + subscription.msg_timeout_ns
        number = subscription.message_count
        size = 0
        while ready and len(frames) < count_max and size < DELIVERY_BYTES_MAX:
            message = loaded.get(ready[0])
            if message is None or message.owner is not None or (withholds is not None and withholds(message, None)):
                ready.popleft()  # only now: when the log cannot be read, it is tried again
                continue
            ready.popleft()
            message.attempts += 1
            message.owner, message.delivered_ns, message.deadline_ns = subscription, now_ns, deadline_ns
            message.number = number + len(frames)
            self.in_flight_count += 1
            self._push_deadline(deadline_ns, message.sequence)
            frame: bytes = message.frame  # type: ignore[assignment]
            frames.append(frame if message.attempts == 1 else with_attempts(frame, message.attempts))
            size += len(frames[-1])

    # -- finish --------------------------------------------------------------------------------------------------

    def finish_range(self, subscription: Subscription, first: int, end: int) -> bool:
        """Finish messages that a consumer holds, all of them in the window; else False, and nothing has changed."""
        index = first - self.floor
        count = end - first
        states = self._states
        if index < 0 or subscription.slot == SHARED or states[index : index + count] != subscription.mark * count:
            return False
        if self._held:
            forget_range(self._held, first, end)
        if self._attempts:
            forget_range(self._attempts, first, end)
        runs = subscription.runs
        if index == 0:
            del states[:count]
            self.floor = end
            if states and not states[0]:
                self._strip()
        else:
            states[index : index + count] = bytes(count)
        floor = self.floor
        while runs and runs[0].end <= floor:
            runs.popleft()
        self._is_changed = True
        self.in_flight_count -= count
        subscription.in_flight_count -= count  # it finds its place in line behind the last of a run of FINs
        if runs and not subscription.in_flight_count:
            runs.clear()
        return True

    def finish_one(self, subscription: Subscription, sequence: int) -> bool:
        """Finish a message of the window that a consumer holds; False when it does not."""
        if self._owner(sequence) is not subscription:
            return False
        self._mark_done(sequence)
        self._count_finished(subscription, 1)
        return True

    def finish_spilled(
        self, subscription: Subscription, ids: Sequence[int], base: int
    ) -> tuple[list[Message], Sequence[int]]:
        """Finish those of these messages that were spilled and a consumer holds; return them and the others' ids.

        Args:
            base: what an id has more than a sequence.
        """
        finished, others = self.spilled.finish_held(subscription, ids, base)
        if finished:
            self._count_finished(subscription, len(finished))
        return finished, others

    def _count_finished(self, subscription: Subscription, count: int) -> None:
        self._is_changed = True
        self.in_flight_count -= count
        subscription.in_flight_count -= count
        if not subscription.in_flight_count:
            subscription.runs.clear()

    def finish(self, message: Message) -> None:
        """Finish a message wherever it is, though no consumer did; its place in line is the caller's."""
        if message.owner is not None:
            self._leave_flight(message)
        if message.is_spilled:
            self.spilled.finish(message.sequence)
            self._is_changed = True
        else:
            self._deferred.pop(message.sequence, None)
            self._mark_done(message.sequence)

    def _mark_done(self, sequence: int) -> None:
        self._attempts.pop(sequence, None)
        self._held.pop(sequence, None)
        self._shared.pop(sequence, None)
        self._states[sequence - self.floor] = DONE
        if sequence == self.floor:
            self._strip()
        self._is_changed = True

    def _strip(self) -> None:
        """Restore W2: move the floor over what is done."""
        states = self._states
        if states and not states[0]:
            match = _NOT_DONE.search(states)
            count = match.start() if match else len(states)
            del states[:count]
            self.floor += count

    # -- one message comes back ----------------------------------------------------------------------------------

    def _leave_flight(self, message: Message) -> None:
        """A message's consumer does not hold it any more; what it becomes is to be said."""
        subscription = message.owner
        assert subscription is not None, "it is in flight"
        message.owner = None
        message.deadline_ns = message.delivered_ns = 0
        if not message.is_spilled:
            self._held.pop(message.sequence, None)
            self._shared.pop(message.sequence, None)
        subscription.in_flight_count -= 1
        self.in_flight_count -= 1
        if not subscription.in_flight_count:
            subscription.runs.clear()
        subscription.find_place()

    def requeue(self, message: Message) -> None:
        """Put a message in line to be delivered again; its attempts count after a restart, too."""
        self._come_back(message)
        if message.is_spilled:
            self.spilled.make_ready(message)
        else:
            self._states[message.sequence - self.floor] = QUEUED
            self.queued.append(message.sequence)

    def withdraw(self, message: Message) -> None:
        """Neither in flight nor in line: a message is on its way to the dead letters."""
        was_held = message.owner is not None
        self._come_back(message)
        if not message.is_spilled:
            self._states[message.sequence - self.floor] = GIVING_UP
        elif was_held:
            self.spilled.withdraw(message)

    def _come_back(self, message: Message) -> None:
        if message.owner is not None:
            self._leave_flight(message)
        if not message.is_spilled:
            self._attempts.setdefault(message.sequence, 1)
            self._is_changed = True

    def is_withdrawn(self, message: Message) -> bool:
        """Whether nobody has finished, spilled or forgotten a message that was withdrawn."""
        if message.is_spilled:
            return self.spilled.ready_message(message.sequence) is message
        index = message.sequence - self.floor
        return 0 <= index < len(self._states) and self._states[index] == GIVING_UP

    def finish_withdrawn(self, message: Message) -> None:
        """Finish a message that was withdrawn, unless somebody has meanwhile; it may have been spilled on its way."""
        if self.is_withdrawn(message):
            self.finish(message)
            return
        spilled = None if message.is_spilled else self.spilled.ready_message(message.sequence)
        if spilled is not None:
            if message.sequence in self.spilled.ready:
                self.spilled.ready.remove(message.sequence)
            self.finish(spilled)

    def defer(self, message: Message, due_ns: int, wall_ns: int) -> None:
        """Take a message from its consumer and let it wait for a due time.

        Raises:
            StorageError: the log cannot be read now; the message is still in flight.
        """
        if message.is_spilled:
            self._leave_flight(message)
            self.spilled.defer(message, due_ns)
            self._is_changed = True
            return
        self._attempts.setdefault(message.sequence, 1)
        self._sleep(message.sequence, due_ns, wall_ns)  # first: when it fails, the message is in flight
        self._leave_flight(message)

    def _sleep(self, sequence: int, due_ns: int, wall_ns: int) -> None:
        """Let a message of the window wait: there when for a short time, in the database when for long, or many do."""
        is_short = due_ns - wall_ns <= DEFER_IN_WINDOW_NS and len(self._deferred) < WINDOW_DEFERRED_MAX
        if is_short or self.is_ordered:  # in order it stays where it is, in the way of those behind it
            self._states[sequence - self.floor] = DEFERRED
            self._deferred[sequence] = due_ns
            heapq.heappush(self._due, (due_ns, sequence))
            self._is_changed = True
        else:
            self._spill_until(sequence, due_ns)

    def touch(self, message: Message, now_ns: int) -> None:
        """Restart the timeout of a message in flight, up to the longest allowed since its delivery."""
        owner = message.owner
        assert owner is not None, "it is in flight"
        self._find_times(message)
        deadline_ns = min(now_ns + owner.msg_timeout_ns, message.delivered_ns + owner.max_msg_timeout_ns)
        message.deadline_ns = deadline_ns
        if not message.is_spilled:
            self._held[message.sequence] = message
        self._push_deadline(deadline_ns, message.sequence)

    def _find_times(self, message: Message) -> None:
        """Note what the run says that a message was delivered with."""
        if message.deadline_ns or message.owner is None:
            return
        sequence = message.sequence
        run = next(run for run in message.owner.runs if run.first <= sequence < run.end)
        message.deadline_ns = run.deadline_ns
        message.delivered_ns = run.deadline_ns - message.owner.msg_timeout_ns
        message.number = run.number + sequence - run.first

    # -- the line of what comes again ----------------------------------------------------------------------------

    def line_of(self, is_spilled: bool) -> deque[int]:
        """Sequences in line; to be looked at."""
        return self.spilled.ready if is_spilled else self.queued

    def waiting_message(self, sequence: int) -> Message | None:
        """A message that is to be delivered again, from wherever; None when it has been finished or delivered."""
        states, index = self._states, sequence - self.floor
        if 0 <= index < len(states) and states[index] == QUEUED:
            return Message(sequence, self._attempts.get(sequence, 1))
        return self.spilled.ready_message(sequence)

    def leave_line(self, is_spilled: bool) -> None:
        """The first in line has been seen to."""
        (self.spilled.ready if is_spilled else self.queued).popleft()

    def go_last(self, is_spilled: bool) -> None:
        """Let the first in line go to its end."""
        self.line_of(is_spilled).rotate(-1)

    def come_first(self, message: Message) -> None:
        """Let a message that has just been put in line go to its front, unless it was given up instead."""
        line = self.line_of(message.is_spilled)
        if line and line[-1] == message.sequence:
            line.rotate(1)

    def line_up(self, sequences: Collection[int]) -> None:
        """Put messages in front, of which the last is to be the first; those that do not wait any more are left out."""
        self.queued.extendleft(s for s in sequences if self.is_queued(s))
        self.spilled.ready.extendleft(s for s in sequences if self.spilled.ready_message(s))

    def keep_order(self, is_ordered: bool) -> None:
        """Let what is deferred stay in the way of what is behind it, or no longer; what is queued, by the log."""
        self.is_ordered = is_ordered
        self.queued = deque(sorted(self.queued))

    def bring_first_forward(self) -> bool:
        """Have the first message of the window at the front of the line; False while it waits for its due time."""
        if self._states and self.queued and self.queued[0] != self.floor:
            if not self.is_queued(self.floor):
                return False
            self.queued.remove(self.floor)
            self.queued.appendleft(self.floor)
        return True

    def tidy_line(self) -> None:
        """Forget what stands in line and is not to be delivered again."""
        self.queued = deque(sequence for sequence in self.queued if self.is_queued(sequence))

    def finish_waiting(self) -> None:
        """Finish everything that stands in line."""
        for sequence in self.queued:
            if self.is_queued(sequence):
                self._mark_done(sequence)
        self.queued.clear()
        for sequence in self.spilled.ready:
            if self.spilled.ready_message(sequence) is not None:
                self.spilled.finish(sequence)
        self.spilled.ready.clear()

    # -- time ----------------------------------------------------------------------------------------------------

    def take_timed_out(self, now_ns: int) -> Iterator[Message]:
        """Messages whose time is over and that are in flight; each is to be taken from its consumer before the next."""
        for subscription in self._deadlines.take_due(now_ns):
            runs = subscription.runs
            while runs and runs[0].deadline_ns <= now_ns:
                yield from self._left_of(runs.popleft(), subscription)
            if runs:
                self._deadlines.watch(subscription, runs[0].deadline_ns)
        heap = self._timeouts
        while heap and heap[0][0] <= now_ns:
            deadline_ns, sequence = heapq.heappop(heap)
            message = self._held.get(sequence) or self.spilled.loaded.get(sequence)
            if message is not None and message.deadline_ns == deadline_ns and message.owner is not None:
                yield message

    def _left_of(self, run: Run, subscription: Subscription) -> Iterator[Message]:
        """List what a consumer still holds of a run and did not touch."""
        floor = self.floor
        first = max(run.first, floor)
        part = self._states[first - floor : run.end - floor] if run.end > first else b""
        is_shared = subscription.slot == SHARED
        for match in re.finditer(re.escape(subscription.mark), part):
            sequence = first + match.start()
            if sequence in self._held or (is_shared and self._shared.get(sequence) is not subscription):
                continue
            yield self._in_run(subscription, sequence)

    def come_due(self, wall_ns: int) -> None:
        """Put what has come due in line."""
        due = self._due
        while due and due[0][0] <= wall_ns:
            due_ns, sequence = heapq.heappop(due)
            if self._deferred.get(sequence) == due_ns:
                del self._deferred[sequence]
                self._states[sequence - self.floor] = QUEUED
                self.queued.append(sequence)
                self._is_changed = True
        self.spilled.come_due(wall_ns)

    def next_deadline_ns(self, now_ns: int, wall_ns: int) -> int | None:
        """Monotonic time of the next timeout or due message, never too late; None when there is none."""
        next_ns = self._deadlines.next_ns
        if self._timeouts and (next_ns is None or self._timeouts[0][0] < next_ns):
            next_ns = self._timeouts[0][0]
        soon_ns = self.spilled.next_soon_ns
        if self._due and (soon_ns is None or self._due[0][0] < soon_ns):
            soon_ns = self._due[0][0]
        if soon_ns is not None:
            due_ns = now_ns + max(0, soon_ns - wall_ns)
            next_ns = due_ns if next_ns is None else min(next_ns, due_ns)
        return next_ns

    def _push_deadline(self, deadline_ns: int, sequence: int) -> None:
        heap = self._timeouts
        heapq.heappush(heap, (deadline_ns, sequence))
        if len(heap) > 2 * (len(self._held) + len(self.spilled.loaded)) + 1024:
            # entries of finished messages stay behind; rebuild before they outnumber the living
            heap[:] = [(message.deadline_ns, s) for s, message in self._held.items()]
            heap += [(m.deadline_ns, s) for s, m in self.spilled.loaded.items() if m.owner is not None]
            heapq.heapify(heap)

    # -- the cursor ----------------------------------------------------------------------------------------------

    def before_hole(self, end: int) -> int:
        """``end``, or where the channel leaves something out before it."""
        return min(end, self.holes[0][0]) if self.holes else end

    def skip_to(self, sequence: int) -> None:
        """Move the cursor over sequences that do not exist or are not for this channel."""
        if self._states:
            self._states += bytes(sequence - self.next)
        else:
            self.floor = sequence
        self.next = sequence
        self._is_changed = True

    def skip_hole(self) -> bool:
        """Move the cursor over what the channel leaves out there; False when it is not there."""
        if not self.holes or self.holes[0][0] > self.next:
            return False
        _, end = self.holes.popleft()
        if end > self.next:
            self.skip_to(min(end, self._log.next_sequence))
        return True

    def leave_out(self, first: int, end: int) -> None:
        """Never get what lies from ``first`` to ``end`` behind the cursor."""
        first = max(first, self.next)
        if first < end:
            add_range(self.holes, first, end)
            self._is_changed = True

    def cut_back_to(self, sequence: int) -> None:
        """The log is to end before ``sequence``, which is not below what is committed: stand no further than that."""
        if self.next > sequence:
            cut = max(0, sequence - self.floor)
            assert not any(self._states[cut:]), "what is not committed has not been delivered"
            del self._states[cut:]
            self.floor = min(self.floor, sequence)
            self.next = sequence
        self.holes = deque((first, min(end, sequence)) for first, end in self.holes if first < sequence)
        self._is_changed = True

    def queue_new(self, end: int) -> None:
        """Move the cursor over messages that wait for somebody, and where they do so the caller knows."""
        self._attempts.update(dict.fromkeys(range(self.next, end), 0))
        self._states += _QUEUED_BYTE * (end - self.next)
        self.next = end
        self._is_changed = True

    def finish_new(self) -> None:
        """Finish the message at the cursor without delivering it."""
        self.next += 1
        self._states.append(DONE)
        self._strip()
        self._is_changed = True

    def defer_batch(self, batch: Batch, end: int, due_ns: int, wall_ns: int) -> None:
        """Move the cursor over messages that are not due; in order, over one.

        Args:
            due_ns: of the batch, on the clock of due times.
        """
        end = self.before_hole(self.next + 1 if self.is_ordered else end)
        room = WINDOW_DEFERRED_MAX - len(self._deferred) if due_ns - wall_ns <= DEFER_IN_WINDOW_NS else 0
        for sequence in range(self.next, end if self.is_ordered else min(end, self.next + room)):
            self._attempts[sequence] = 0
            self._states.append(QUEUED)
            self.next = sequence + 1
            self._sleep(sequence, due_ns, wall_ns)
        if self.next < end:
            self.spilled.put_batch(batch, self.next, end, due_ns)
            self.skip_to(end)

    # -- spilling ------------------------------------------------------------------------------------------------

    def _frame_of(self, sequence: int) -> bytes | None:
        """A message as the log has it; None when it is damaged there, which the log has reported."""
        batch = self._log.read(sequence)
        return None if batch is None or batch.first > sequence else bytes(batch.frames(sequence, sequence + 1))

    def _spill_until(self, sequence: int, due_ns: int) -> None:
        frame = self._frame_of(sequence)
        if frame is not None:
            self.spilled.put(sequence, due_ns, self.attempts_of(sequence), frame)
        self._mark_done(sequence)

    def spill(self) -> None:
        """Make room in a full window: spill what is unfinished in its older half, so that the floor advances.

        Raises:
            StorageError: the log cannot be read now; a part has been spilled.
        """
        half = self._states[: len(self._states) // 2]
        floor = self.floor
        for match in _NOT_DONE.finditer(half):
            sequence = floor + match.start()
            state = half[match.start()]
            if state == DEFERRED:
                self._spill_until(sequence, self._deferred[sequence])
                del self._deferred[sequence]
                continue
            frame = self._frame_of(sequence)
            message = self.held(sequence)
            if frame is None:
                if message is not None:
                    self._leave_flight(message)
            elif message is None:
                self.spilled.put_ready(sequence, self.attempts_of(sequence), frame)
            else:
                self._find_times(message)
                message.frame = frame
                self.spilled.put_loaded(message)
                self._push_deadline(message.deadline_ns, sequence)
            self._mark_done(sequence)
        if self.queued:
            self.tidy_line()

    # -- all of it -----------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        """Forget what there is between floor and cursor, and what is in flight of the spilled messages."""
        for subscription in self.consumers:
            subscription.in_flight_count = 0
            subscription.runs.clear()
            subscription.find_place()
        self.in_flight_count = 0
        for mapping in (self._shared, self._attempts, self._held, self._deferred):
            mapping.clear()
        self._timeouts.clear()
        self._due.clear()
        self.queued.clear()
        self._states.clear()
        self._is_changed = True

    def empty(self, end: int) -> None:
        """Forget everything below ``end``, wherever it is."""
        self._clear()
        self.holes.clear()
        self.spilled.clear()
        self.next = self.floor = max(end, self.next)

    def restart_at(self, sequence: int, finish_older: bool) -> None:
        """Set floor and cursor: what is stored from there on is new.

        Args:
            finish_older: whether older messages that were spilled count as finished; else they stay as they are.
        """
        self._clear()
        if finish_older:
            self.spilled.clear()
        else:
            self.spilled.clear_from(sequence)
        for message in self.spilled.loaded.values():
            if message.owner is not None:
                self.in_flight_count += 1
                message.owner.in_flight_count += 1
                message.owner.find_place()
                self._push_deadline(message.deadline_ns, message.sequence)
        self.next = self.floor = sequence
        self.holes.clear()

    def confirm(self, sequence: int) -> None:
        """Finish everything below ``sequence`` that is not in flight; the cursor never goes back."""
        for current in range(self.floor, min(sequence, self.next)):
            index = current - self.floor
            if index >= 0 and self._states[index] in (QUEUED, DEFERRED):
                self._deferred.pop(current, None)
                self._mark_done(current)
        if sequence > self.next:
            self.skip_to(sequence)

    def drop(self, sequence: int) -> bool | None:
        """Finish a message below the cursor wherever it is; False when it is not there, or finished before.

        Returns:
            None when it may be spilled, which only the database knows.
        """
        index = sequence - self.floor
        message = self.held(sequence)
        if index >= 0 and self._states[index] != DONE:
            if self.is_queued(sequence):
                self.queued.remove(sequence)
            self.finish(message or Message(sequence, self.attempts_of(sequence)))
            return True
        message = self.spilled.loaded.get(sequence)
        if message is not None:
            if message.owner is None:
                self.spilled.ready.remove(sequence)
            self.finish(message)
            return True
        dropped = self.spilled.drop(sequence)
        self._is_changed = self._is_changed or dropped is True
        return dropped

    def drop_stored(self, sequence: int, pack: int, generation: int) -> bool | None:
        """As :meth:`drop`, of a message that the database has in a pack."""
        dropped = self.spilled.drop_stored(sequence, pack, generation)
        self._is_changed = self._is_changed or dropped is True
        return dropped

    def drop_deferred(self) -> None:
        """Finish everything that waits for its due time; what is in flight or has come due stays."""
        for sequence in sorted(self._deferred):
            self._mark_done(sequence)
        self._deferred.clear()
        self._due.clear()
        self.spilled.drop_not_due()
        self._is_changed = True

    # -- what has to hold ----------------------------------------------------------------------------------------

    def check(self, elsewhere: Collection[int] = ()) -> None:
        """Raise with what is wrong; for tests, as it looks at everything.

        Args:
            elsewhere: queued or spilled messages that wait in another line.

        Raises:
            AssertionError: an invariant at the head of this file does not hold.
        """
        states, floor, loaded = self._states, self.floor, self.spilled.loaded
        assert self.next - floor == len(states), f"W2: {self.next - floor} sequences have {len(states)} bytes"
        assert not states or states[0], "W2: the window begins with what is done"
        numbered = [(floor + index, state) for index, state in enumerate(states) if state]
        held = {sequence: self._owner(sequence) for sequence, state in numbered if state <= SHARED}
        nobody = [sequence for sequence, owner in held.items() if owner not in self.consumers]
        assert not nobody, f"W3: in flight at nobody: {nobody}"
        shared = [sequence for sequence, state in numbered if state == SHARED]
        assert set(self._shared) == set(shared), f"W3: {self._shared} of {shared} are noted"
        counts = Counter(held.values())
        counts.update(message.owner for message in loaded.values() if message.owner is not None)
        for subscription in self.consumers:
            count = counts.pop(subscription, 0)
            assert subscription.in_flight_count == count, f"W3: {subscription.describe()} holds {count}"
            self._check_deadlines(subscription, [s for s, owner in held.items() if owner is subscription])
        assert not counts, f"W3: held by {counts}, who are not here"
        total = sum(subscription.in_flight_count for subscription in self.consumers)
        assert self.in_flight_count == total, f"W3: {total} are in flight, {self.in_flight_count} are counted"
        self._check_records(dict(numbered), held)
        deferred = [sequence for sequence, state in numbered if state == DEFERRED]
        assert sorted(self._deferred) == deferred, f"W6: {sorted(self._deferred)} are known, {deferred} are deferred"
        missing = {(due_ns, sequence) for sequence, due_ns in self._deferred.items()} - set(self._due)
        assert not missing, f"W6: never due: {missing}"
        lines = Counter(s for s in (*self.queued, *elsewhere) if self.is_queued(s))
        queued = {sequence: 1 for sequence, state in numbered if state == QUEUED}
        assert lines == queued, f"W7: in line are {dict(lines)}, queued are {list(queued)}"
        both = [s for s in loaded if s >= self.next or (s >= floor and states[s - floor])]
        assert not both, f"W8: spilled and in the window: {both}"
        at = self.next
        for first, end in self.holes:
            assert first < end and end > at, f"holes {list(self.holes)} behind {self.next}"
            at = end
        self.spilled.check()

    def _check_deadlines(self, subscription: Subscription, mine: list[int]) -> None:
        runs = subscription.runs
        loose = [s for s in mine if s not in self._held and not any(run.first <= s < run.end for run in runs)]
        assert not loose, f"W5: never time out: {loose}"
        if runs and subscription.in_flight_count:
            watched_ns = self._deadlines.watched_ns(subscription)
            assert watched_ns is not None and watched_ns <= runs[0].deadline_ns, (
                f"W5: looked at {watched_ns}, times out at {runs[0].deadline_ns}: {subscription.describe()}"
            )

    def _check_records(self, states: dict[int, int], held: dict[int, Subscription | None]) -> None:
        wrong = [s for s, message in self._held.items() if message.owner is not held.get(s) or message.is_spilled]
        assert not wrong, f"W4: records of what is not in flight, or elsewhere: {wrong}"
        wrong = [s for s, message in self._held.items() if message.attempts != self.attempts_of(s)]
        assert not wrong, f"W4: attempts of {wrong} are known twice"
        wrong = [sequence for sequence in self._attempts if sequence not in states]
        assert not wrong, f"W4: attempts of what is done: {wrong}"
        timed = dict(self._held) | {s: each for s, each in self.spilled.loaded.items() if each.owner is not None}
        late = {(message.deadline_ns, s) for s, message in timed.items()} - set(self._timeouts)
        assert not late, f"W5: never time out: {late}"

    def describe(self) -> str:
        """A picture of the state for humans and failing tests."""
        counts = {
            "in_flight": self.in_flight_count,
            "requeued": len(self.queued),
            "deferred": len(self._deferred),
            "aside": self.spilled.count,
            "held": len(self._held),
            "attempts": len(self._attempts),
        }
        shown = " ".join(f"{name}={count}" for name, count in counts.items() if count)
        window = bytes(self._states[:32]).hex(" ")
        more = "..." if len(self._states) > 32 else ""
        return f"window[{len(self._states)}]=[{window}{more}] {shown}"


def _first(run: Run) -> int:
    return run.first


def _number(message: Message) -> int:
    return message.number
