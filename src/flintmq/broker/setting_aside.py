"""What a channel does with messages outside of its window: they are put aside, come due, are delivered and finished.

Rules of this file: part of :class:`flintmq.broker.channel.Channel`, which has the rest, and of its invariants; what
came due goes out in runs.

Source: design/performance.md decision 8, reference/nsq.md 1.10.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from flintmq.batch import Batch
from flintmq.broker.deferred import Aside, AsideStore
from flintmq.broker.events import ChannelEvents
from flintmq.broker.latency import Latency
from flintmq.broker.state import DEFERRED, GIVING_UP, NOT_DONE, QUEUED, Held, Log, Policy
from flintmq.broker.subscription import Subscription
from flintmq.limits import DELIVERY_BYTES_MAX
from flintmq.message import with_attempts


class SettingAside(ABC):
    """The part of a channel that is about messages set aside."""

    aside: AsideStore
    dirty: bool
    events: ChannelEvents | None
    floor: int
    latency: Latency | None
    log: Log
    next: int
    policy: Policy | None
    _attempts: dict[int, int]
    _deferred: dict[int, int]
    _held: dict[int, Held]
    _holes: deque[tuple[int, int]]
    _id_base: int
    _not_deferred_at: int
    _requeued: deque[int]
    _window: bytearray
    _window_max: int

    @property
    @abstractmethod
    def end(self) -> int: ...

    @abstractmethod
    def _count_finished(self, subscription: Subscription, count: int) -> None: ...

    @abstractmethod
    def _defer_batch(self, batch: Batch, wall_ns: int) -> bool: ...

    @abstractmethod
    def _held_at(self, subscription: Subscription, sequence: int) -> Held: ...

    @abstractmethod
    def _is_queued(self, sequence: int) -> bool: ...

    @abstractmethod
    def _is_sampled_out(self, subscription: Subscription) -> bool: ...

    @abstractmethod
    def _is_taken(self, subscription: Subscription, sequence: int, frame: bytes | memoryview) -> bool: ...

    @abstractmethod
    def _leave_flight(self, subscription: Subscription) -> None: ...

    @abstractmethod
    def _mark_done(self, sequence: int) -> None: ...

    @abstractmethod
    def _owner(self, sequence: int) -> Subscription | None: ...

    @abstractmethod
    def _push_deadline(self, deadline_ns: int, sequence: int) -> None: ...

    @abstractmethod
    def _put(self, subscription: Subscription, frames: bytes | memoryview, count: int) -> None: ...

    @abstractmethod
    def _skip_hole(self) -> bool: ...

    # -- going aside ---------------------------------------------------------------------------------------------

    def _put_aside(self, sequence: int, due_ns: int) -> None:
        attempts = self._attempts.get(sequence, 1)
        batch = self.log.read(sequence)
        if batch is not None and batch.first <= sequence:
            self.aside.put(sequence, due_ns, attempts, bytes(batch.frames(sequence, sequence + 1)))
        # else: the log found the message damaged and reported it; there is nothing to keep
        self._mark_done(sequence)

    def _spill(self, now_ns: int) -> None:
        """Make room in a full window: move what is unfinished in its older half aside, so that the floor advances."""
        half = self._window[: len(self._window) // 2]
        floor = self.floor
        for match in NOT_DONE.finditer(half):
            sequence = floor + match.start()
            state = half[match.start()]
            if state == DEFERRED:
                self._put_aside(sequence, self._deferred[sequence])
                del self._deferred[sequence]
                continue
            batch = self.log.read(sequence)
            if batch is None or batch.first > sequence:
                self._drop_damaged(sequence, state)
                continue
            aside = Aside(sequence, self._attempts.get(sequence, 1), bytes(batch.frames(sequence, sequence + 1)))
            if state in (QUEUED, GIVING_UP):
                self.aside.put_ready(sequence, aside.attempts, aside.frame)
            else:
                owner = self._owner(sequence)
                assert owner is not None, "I3: a message in flight has an owner"
                held = self._held_at(owner, sequence)
                aside.owner, aside.number = owner, held.number
                aside.delivered_ns, aside.deadline_ns = held.delivered_ns, held.deadline_ns
                self.aside.put_loaded(aside)
                self._push_deadline(aside.deadline_ns, sequence)
            self._mark_done(sequence)
        if self._requeued:
            self._requeued = deque(s for s in self._requeued if s >= self.floor and self._is_queued(s))

    def _drop_damaged(self, sequence: int, state: int) -> None:
        owner = self._owner(sequence)
        if owner is not None:
            self._leave_flight(owner)
        self._mark_done(sequence)

    def _pass_deferred(self, wall_ns: int) -> None:
        """With nobody to deliver to, take delayed messages at the cursor for what they are: deferred, not waiting."""
        while self.next < self.end and self.next != self._not_deferred_at:
            if self._holes and self._skip_hole():
                continue
            batch = self.log.read(self.next)
            if batch is None or batch.first > self.next or batch.due_ns <= wall_ns:
                self._not_deferred_at = self.next  # looked at once, however often something is published behind it
                return
            if len(self._window) >= self._window_max or not self._defer_batch(batch, wall_ns):
                return

    # -- delivery ------------------------------------------------------------------------------------------------

    def _redeliver_asides(self, subscription: Subscription, count_max: int, now_ns: int) -> None:
        """Hand out a run of those in line that were set aside, with one put for all."""
        ready, loaded, policy = self.aside.ready, self.aside.loaded, self.policy
        is_choosy = subscription.sample_rate or subscription.ext_filter is not None
        is_laid_out = subscription.layout is not None or subscription.older_layout is not None
        if is_choosy or is_laid_out or self.events is not None or count_max == 1:
            self._redeliver_aside(subscription, ready[0], now_ns)
            ready.popleft()  # only now: when the log cannot be read, it is tried again
            return
        deadline_ns = now_ns + subscription.msg_timeout_ns
        frames: list[bytes] = []
        size = 0
        try:
            while ready and len(frames) < count_max and size < DELIVERY_BYTES_MAX:
                aside = loaded.get(ready[0])
                if aside is None or aside.owner is not None or (policy is not None and policy.takes_aside(aside)):
                    ready.popleft()  # only now: when the log cannot be read, it is tried again
                    continue
                ready.popleft()
                aside.attempts += 1
                aside.owner, aside.delivered_ns, aside.deadline_ns = subscription, now_ns, deadline_ns
                aside.number = subscription.message_count + len(frames)
                self._push_deadline(deadline_ns, aside.sequence)
                frames.append(aside.frame if aside.attempts == 1 else with_attempts(aside.frame, aside.attempts))
                size += len(frames[-1])
        finally:
            if frames:
                self._put(subscription, b"".join(frames), len(frames))
                subscription.served()

    def _redeliver_aside(self, subscription: Subscription, sequence: int, now_ns: int) -> None:
        aside = self.aside.loaded.get(sequence)
        if aside is None or aside.owner is not None or (self.policy is not None and self.policy.takes_aside(aside)):
            return
        is_sampled_out = aside.attempts == 0 and self._is_sampled_out(subscription)
        if is_sampled_out or not self._is_taken(subscription, sequence, aside.frame):
            self.aside.finish(sequence)
            self.dirty = True
            return
        batch = None if subscription.layout_at(sequence) is None else self.log.read(sequence)  # first: it may fail
        aside.attempts += 1
        aside.owner, aside.number = subscription, subscription.message_count
        aside.delivered_ns = now_ns
        aside.deadline_ns = now_ns + subscription.msg_timeout_ns
        self._push_deadline(aside.deadline_ns, sequence)
        self._put(subscription, subscription.one(with_attempts(aside.frame, aside.attempts), batch, sequence), 1)
        if self.events is not None:
            self.events.delivered_aside(subscription, sequence, aside.frame, aside.attempts)
        subscription.served()

    def _finish_asides(self, subscription: Subscription, ids: Sequence[int], wall_ns: int) -> Sequence[int]:
        """Finish those of these messages that are set aside; return the others."""
        finished, others = self.aside.finish_held(subscription, ids, self._id_base)
        for aside in finished if self.latency is not None or self.events is not None else ():
            if self.latency is not None:
                self.latency.finished_frame(aside.frame, wall_ns)
            if self.events is not None:
                self.events.finished(subscription, aside.sequence, aside.sequence + 1)
        if finished:
            self._count_finished(subscription, len(finished))
        return others
