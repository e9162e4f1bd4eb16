"""The limits of one channel in one partition: attempts with dead letters, age, and what overflows.

A message that is given up::

    queued again, or about to be delivered, with its last attempt behind it
        -> withdrawn: 253 in the window, or spilled and neither in line nor held
        -> published to the dead-letter topic, at most one part at a time
        -> stored as the durability policy says: finished here; failed: again in a while

After a crash it is queued again with its attempts, so it may reach the dead letters twice, and is never lost.

Rules of this file: what can be long is done in parts, and the channel is marked for the rest.

Source: NSQ's issues (bounds, time to live, dead letters).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from itertools import islice

from flintmq.batch import Batch
from flintmq.broker.backlog import ByteCount, unfinished_count
from flintmq.broker.channel import Channel
from flintmq.broker.dead_letters import DeadLetters, Elsewhere, GivenUp, dead_letter
from flintmq.broker.partition import Ended, Partition
from flintmq.broker.state import Message
from flintmq.broker.subscription import Subscription
from flintmq.errors import FlintError, StorageError
from flintmq.settings import DROP_OLDEST, Limits

_SEND_COUNT_MAX = 256  # messages given up at once, and
_SEND_BYTES_MAX = 1024 * 1024
_READY_MAX = 2048  # spilled messages that are looked at in one sweep
_RETRY_NS, _RETRY_NS_MAX = 1_000_000_000, 60_000_000_000
_LOOK_NS = 1_000_000_000  # between two looks for what is too old, when nothing is
_BATCHES_MAX = 512  # passed over in one turn, and
_BATCHES_BYTES_MAX = 4 * 1024 * 1024


class ChannelLimiter:
    """Owner of what a channel's limits need.

    Attributes:
        limits: in force.
        wall_ns: the clock of due times, as of the last :meth:`Channel.pump`.
        retry_ns: monotonic time at which dead letters are published again; None when nothing has failed.
        expired_count: messages that were too old to be delivered.
        dropped_count: messages dropped because there were too many.
        dead_letter_count: messages that reached the dead letters.
    """

    __slots__ = (
        "_byte_count",
        "_channel",
        "_dead_letters",
        "_failure_count",
        "_giving_up",
        "_has_failed",
        "_look_ns",
        "_partition",
        "_sending",
        "_ttl_ns",
        "_waiting",
        "_window",
        "dead_letter_count",
        "dropped_count",
        "expired_count",
        "is_dropping",
        "limits",
        "retry_ns",
        "wall_ns",
    )

    def __init__(self, channel: Channel, partition: Partition, dead_letters: DeadLetters, limits: Limits) -> None:
        self._channel = channel
        self._window = channel.window
        self._partition = partition
        self._dead_letters = dead_letters
        self._byte_count = ByteCount(channel)
        self._giving_up: dict[int, GivenUp] = {}
        self._waiting: deque[int] = deque()
        self._sending: _Sending | None = None
        self._has_failed = False
        self._look_ns = 0
        self._failure_count = 0
        self.wall_ns = 0
        self.retry_ns: int | None = None
        self.expired_count = 0
        self.dropped_count = 0
        self.dead_letter_count = 0
        self.change(limits)

    def change(self, limits: Limits) -> None:
        """Put other limits into force, also for what waits already."""
        self._look_ns = 0
        self.limits = limits
        self._ttl_ns = limits.ttl_ns
        self.is_dropping = limits.is_bounded and limits.overflow == DROP_OLDEST
        self._take_back()
        if limits.max_attempts:
            self._channel.gather_waiting()
            for message in self._window.queued_messages():
                if self._is_used_up(message.attempts):
                    self._give_up(message)
            self._window.tidy_line()

    # -- attempts --------------------------------------------------------------------------------------------------

    @property
    def giving_up_count(self) -> int:
        """Messages on their way to the dead letters."""
        return len(self._giving_up)

    def _is_used_up(self, delivery_count: int) -> bool:
        most = self.limits.max_attempts
        return most > 0 and delivery_count >= most

    def is_last_attempt(self, message: Message) -> bool:
        """Whether a message in flight is given up when it comes back."""
        return self._is_used_up(message.attempts)

    def gives_up(self, message: Message) -> bool:
        """Give up a message that comes back, if that was its last attempt; False: the caller puts it in line."""
        if not self._is_used_up(message.attempts):
            return False
        self._give_up(message)
        return True

    def withholds(self, message: Message, batch: Batch | None) -> bool:
        """Whether a message that was to be delivered again is not, and leaves its line: given up, or too old.

        Args:
            batch: that it is in, if that has been read.
        """
        if self._is_used_up(message.attempts):
            self._give_up(message)
        elif self._has_expired_message(message, batch):
            self._window.finish(message)
            self._expired(message.sequence, message.sequence + 1)
        else:
            return False
        return True

    def _give_up(self, message: Message) -> None:
        client = "" if message.owner is None else _address_of(message.owner)
        self._window.withdraw(message)
        known = self._giving_up.get(message.sequence)
        if known is not None and message.is_spilled:
            known.message = message  # it was spilled on its way
            return
        self._giving_up[message.sequence] = GivenUp(message, client)
        self._waiting.append(message.sequence)
        self._dead_letters.mark(self._channel)

    def _take_back(self) -> None:
        """Queue again what has not been published and is not to be; forget what is no longer there."""
        waiting, self._waiting = self._waiting, deque()
        for sequence in waiting:
            given_up = self._giving_up.get(sequence)
            if given_up is None:
                continue
            is_there = self._window.is_withdrawn(given_up.message)
            if is_there and self._is_used_up(given_up.message.attempts):
                self._waiting.append(sequence)
                continue
            del self._giving_up[sequence]
            if is_there:
                self._window.requeue(given_up.message)

    def forget(self) -> None:
        """The window is being emptied: what of it was on its way is not finished when it arrives."""
        self._giving_up = {s: each for s, each in self._giving_up.items() if each.message.is_spilled}
        self._look_ns = 0

    # -- dead letters ----------------------------------------------------------------------------------------------

    def after_pump(self, now_ns: int, wall_ns: int) -> None:
        """Publish what is given up, and drop what is too much, both in parts; the end of a channel's turn."""
        if self._waiting and self._sending is None:
            self._send_when_due(now_ns, wall_ns)
        if self.is_dropping:
            self._drop(wall_ns)

    def _send_when_due(self, now_ns: int, wall_ns: int) -> None:
        if self._has_failed:
            self._has_failed = False
            self.retry_ns = now_ns + min(_RETRY_NS << min(self._failure_count - 1, 10), _RETRY_NS_MAX)
        if self.retry_ns is not None:
            if now_ns < self.retry_ns:
                return
            self.retry_ns = None
        sending = _Sending(self)
        try:
            name = self.limits.dead_letter_topic
            elsewhere = self._dead_letters.elsewhere(name, self._partition)
            if isinstance(elsewhere, Ended):  # the topic is being made
                self._wait_for(sending, elsewhere)
                return
            if elsewhere is not None:
                if bodies := list(self._bodies(elsewhere, sending)):
                    self._wait_for(sending, elsewhere.publish(bodies))
                return
            target = self._dead_letters.topic(name, wall_ns).next_partition()
            bodies = list(self._bodies(target, sending))
            if bodies:
                self._wait_for(sending, self._dead_letters.publish(target, bodies))
        except FlintError as error:
            self._failed(sending, error)

    def _wait_for(self, sending: _Sending, source: Ended) -> None:
        self._sending = sending
        sending.wait_for(source)

    def _bodies(self, target: Partition | Elsewhere, sending: _Sending) -> Iterator[bytes]:
        """Build what is published of the next messages on their way."""
        size = 0
        for given_up, frame in self._next():
            sending.given_up.append(given_up)
            body = dead_letter(self._partition, self._channel.name, target, given_up, frame)
            size += len(body)
            yield body
            if len(sending.given_up) >= _SEND_COUNT_MAX or size >= _SEND_BYTES_MAX:
                break

    def _next(self) -> Iterator[tuple[GivenUp, bytes | memoryview]]:
        """Messages on their way and their frames; they leave the line."""
        log = self._channel.log
        while self._waiting:
            sequence = self._waiting[0]
            given_up = self._giving_up.get(sequence)
            batch = log.read(sequence)  # first: when the log cannot be read, it is tried again
            self._waiting.popleft()
            if given_up is None:
                continue
            if not self._window.is_withdrawn(given_up.message):
                del self._giving_up[sequence]  # unless it was spilled on its way, and is met there again
            elif given_up.message.frame is not None:
                yield given_up, given_up.message.frame
            elif batch is None or batch.first > sequence:
                self._finish(given_up)  # damaged on disk; the log has reported and set it aside
            else:
                yield given_up, batch.frames(sequence, sequence + 1)

    def sent(self, sending: _Sending, error: BaseException | None) -> None:
        """Dead letters are stored, or could not be."""
        self._sending = None
        if error is not None:
            self._failed(sending, error)
        else:
            self._failure_count = 0
            for given_up in sending.given_up:
                self.dead_letter_count += 1
                if self._channel.events is not None:
                    self._channel.events.given_up(given_up.sequence, given_up.client)
                if self._giving_up.get(given_up.sequence) is given_up:
                    self._finish(given_up)
        self._dead_letters.mark(self._channel)

    def _finish(self, given_up: GivenUp) -> None:
        del self._giving_up[given_up.sequence]
        self._window.finish_withdrawn(given_up.message)

    def _failed(self, sending: _Sending, error: BaseException) -> None:
        self._waiting.extendleft(each.sequence for each in reversed(sending.given_up))
        self._take_back()
        self._has_failed = True
        self._failure_count += 1
        where = f"{self._partition.topic_name}:{self._channel.name} to {self.limits.dead_letter_topic}"
        self._dead_letters.report(StorageError(f"cannot publish dead letters of {where}: {error}; trying again"))
        self._dead_letters.mark(self._channel)

    # -- age -------------------------------------------------------------------------------------------------------

    def _has_expired(self, batch: Batch) -> bool:
        return self._ttl_ns > 0 and self._born_ns(batch) + self._ttl_ns <= self.wall_ns

    def _born_ns(self, batch: Batch) -> int:
        """Find when a message's age began, on the clock of due times."""
        return max(self._channel.due_times.of(batch), self._dead_letters.clock_steps.stored_ns(batch.timestamp_ns))

    def _has_expired_message(self, message: Message, batch: Batch | None) -> bool:
        """Whether it is too old; when the log has it no more, it is not known when it was due first."""
        if not self._ttl_ns:
            return False
        if batch is None:
            batch = self._channel.log.read(message.sequence)
        return batch is not None and batch.first <= message.sequence and self._has_expired(batch)

    def skips(self, batch: Batch) -> bool:
        """Pass over what is too old at the cursor; False when it is to be delivered."""
        if not self._has_expired(batch):
            return False
        first = self._channel.next
        self._pass(min(batch.end, self._channel.end))
        self._expired(first, self._channel.next)
        return True

    def _expired(self, first: int, end: int) -> None:
        """Count what was too old."""
        self.expired_count += end - first
        if self._channel.events is not None:
            self._channel.events.expired(first, end)

    def _pass(self, end: int) -> int:
        """Move the cursor, but not over messages that the channel leaves out; return how many it passed."""
        window = self._window
        end = window.before_hole(end)
        count = end - window.next
        window.skip_to(end)
        return count

    def sweep(self, wall_ns: int) -> bool:
        """Pass over what is too old though nobody consumes, oldest first; whether anything has changed."""
        self.wall_ns = wall_ns
        before = self.expired_count + len(self._giving_up)
        is_time = self._ttl_ns > 0 and wall_ns >= self._look_ns
        if is_time:
            self._look_ns = wall_ns + _LOOK_NS
        try:
            self._sweep_spilled(is_time)
            if is_time:
                self._sweep_window()
                self._sweep_cursor()
        except StorageError:
            return False  # whoever delivers meets it as well, and reports it
        has_changed = self.expired_count + len(self._giving_up) != before
        if has_changed:
            self._look_ns = wall_ns  # there may be more
        return has_changed

    def _keeps(self, batch: Batch) -> bool:
        """Whether a message is young enough to stay; the next look is when it no longer is."""
        self._look_ns = min(self._look_ns, self._born_ns(batch) + self._ttl_ns)
        return not self._has_expired(batch)

    def _sweep_cursor(self) -> None:
        for batch in self._at_cursor():
            if self._keeps(batch):
                return
            self.skips(batch)

    def _sweep_spilled(self, is_time: bool) -> None:
        """Give up and finish what is in line; it is in the order of due times, so the first to be kept ends it."""
        taken: set[int] = set()
        for message in list(islice(self._window.ready_messages(), _READY_MAX)):
            if is_time or self._is_used_up(message.attempts):
                if self.withholds(message, None):
                    taken.add(message.sequence)
                else:
                    is_time = False
        if taken:
            self._channel.spilled.leave_line(taken)

    def _sweep_window(self) -> None:
        """Finish what is queued again and too old, up to the first that is not."""
        window = self._window
        at, has_found = window.floor, False
        for _ in range(_BATCHES_MAX):
            sequence = window.queued_from(at)
            if sequence is None:
                break
            batch = self._channel.log.read(sequence)
            if batch is None or batch.first > sequence or self._keeps(batch):
                break
            at = min(batch.end, window.next)
            for each in range(sequence, at):
                if window.is_queued(each):
                    window.finish(Message(each, window.attempts_of(each)))
                    self._expired(each, each + 1)
                    has_found = True
            at = max(at, window.floor)
        if has_found:
            self._channel.gather_waiting()
            window.tidy_line()

    def _at_cursor(self) -> Iterator[Batch]:
        """The batches at the cursor, which the caller moves over them; a bounded number, and none that is deferred."""
        channel, window = self._channel, self._window
        size = 0
        for _ in range(_BATCHES_MAX):
            if window.next >= channel.end or size > _BATCHES_BYTES_MAX:
                return
            if window.skip_hole():
                continue
            if window.is_full:
                return
            batch = channel.log.read(window.next)
            if batch is None:
                return
            size += batch.size
            if batch.first > window.next:
                window.skip_to(min(batch.first, channel.end))
            elif channel.due_times.of(batch) > self.wall_ns:
                is_in_the_way = channel.keep_floor is not None and len(window) > 0
                if is_in_the_way or not channel.defer_batch(batch, self.wall_ns):
                    return
            else:
                yield batch

    # -- overflow --------------------------------------------------------------------------------------------------

    def unfinished_bytes(self) -> int:
        """Bytes of what the channel has not finished, see :mod:`flintmq.broker.backlog`."""
        return self._byte_count.unfinished_bytes()

    def _drop(self, wall_ns: int) -> None:
        """Finish the oldest messages that wait, until no more are there than may be."""
        limits, channel = self.limits, self._channel
        count = unfinished_count(channel)
        size = self._byte_count.unfinished_bytes() if limits.max_bytes else 0
        excess = _Excess(
            count - limits.max_messages if limits.max_messages else 0,
            size - limits.max_bytes if limits.max_bytes else 0,
        )
        if not excess:
            return
        self.wall_ns = wall_ns
        if self._window.is_full:
            channel.spill()
        average = size // max(1, count)
        self._drop_spilled(excess, average)
        self._drop_queued(excess, average)
        try:
            self._drop_new(excess)
        except StorageError:
            pass  # whoever delivers meets it as well, and reports it
        if excess.dropped:
            self.dropped_count += excess.dropped
            channel.mark_changed()
            self._dead_letters.mark(channel)  # for the rest

    def _drop_spilled(self, excess: _Excess, average: int) -> None:
        ready = self._channel.spilled.ready
        while excess and ready:
            message = self._channel.spilled.ready_message(ready[0])
            self._window.leave_line(is_spilled=True)
            if message is not None:
                self._window.finish(message)
                excess.drop(1, average)

    def _drop_queued(self, excess: _Excess, average: int) -> None:
        if not excess:
            return
        self._channel.gather_waiting()
        for message in sorted(self._window.queued_messages(), key=_sequence_of):
            if not excess:
                break
            self._window.finish(message)
            excess.drop(1, average)
        self._window.tidy_line()

    def _drop_new(self, excess: _Excess) -> None:
        channel = self._channel
        if not excess:
            return
        for batch in self._at_cursor():
            start = channel.next
            count = max(excess.count, excess.messages_of(batch, start))
            self._pass(min(batch.end, channel.end, start + count))
            excess.drop(channel.next - start, _size_of(batch, start, channel.next) // max(1, channel.next - start))
            if not excess:
                return


class _Excess:
    """The excess that is to be dropped: so many messages and so many bytes, whichever is more."""

    __slots__ = ("count", "dropped", "size_bytes")

    def __init__(self, count: int, size_bytes: int) -> None:
        self.count = max(0, count)
        self.size_bytes = max(0, size_bytes)
        self.dropped = 0

    def __bool__(self) -> bool:
        return self.count > 0 or self.size_bytes > 0

    def drop(self, count: int, average: int) -> None:
        """Some were dropped, of so many bytes each."""
        self.dropped += count
        self.count -= count
        self.size_bytes -= count * average

    def messages_of(self, batch: Batch, start: int) -> int:
        """Count the messages of a batch that are enough for the bytes."""
        if self.size_bytes <= 0:
            return 0
        positions, index = batch.positions(), start - batch.first
        return bisect_left(positions, positions[index] + self.size_bytes, index) - index


def _size_of(batch: Batch, start: int, end: int) -> int:
    positions = batch.positions()
    return positions[end - batch.first] - positions[start - batch.first]


class _Sending:
    """Messages given up that are being published."""

    __slots__ = ("_group", "_limiter", "given_up")

    def __init__(self, limiter: ChannelLimiter) -> None:
        self._limiter = limiter
        self._group: Ended | None = None
        self.given_up: list[GivenUp] = []

    def wait_for(self, group: Ended) -> None:
        self._group = group
        group.waiters.append(self)
        if group.ended:
            self.publish_ended()

    def publish_ended(self) -> None:
        assert self._group is not None, "only who waits is told"
        self._limiter.sent(self, self._group.error)


def _sequence_of(message: Message) -> int:
    return message.sequence


def _address_of(subscription: Subscription) -> str:
    return str(getattr(subscription.owner, "peer", ""))
