"""A channel of an extended topic: messages with a dispatch tag go to the consumers that desire it.

::

    message with tag t     a consumer with ``desired_tag`` t, while one is connected; else an untagged consumer
    message without tag    an untagged consumer

Consumers fall into groups: one for each tag that somebody desires, and the untagged. A message that is to go to a group
in which nobody can take anything waits for that group, queued again in the channel's window, and what is behind it
flows on to the others. At most :data:`TAG_WAITING_MAX` messages wait for one group, and :data:`LOADED_BYTES_MAX` bytes
of spilled messages; then the cursor stops for all.

Within a group, what comes again and what is new take turns, as in any channel: what is new comes from those that wait
for the group, and from the cursor.

Rules of this file:

- While no consumer desires a tag, nothing waits for a group and all is as in :class:`Channel`.
- A message that waits for a group is nowhere else: it stands in neither line of the window. Whatever looks at those
  calls :meth:`TaggedChannel.gather_waiting` before.
- An entry of a group's queue is a hint: the message may have been finished meanwhile.
- A group in which somebody is ready has nothing waiting when a turn ends, or stands in ``to_serve``.
- Tags are read from the stored headers when a message is to be handed out, and kept only as the queue it waits in.
- In order nothing waits for a group: a message that nobody may take now is in the way of those behind it.

Source: Youzan's TCP protocol "Tag dispatch".
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any

import msgspec

from flintmq.batch import EXTENDED, Batch
from flintmq.broker.channel import Channel
from flintmq.broker.ready import Line, ReadyLines
from flintmq.broker.spilled import LOADED_BYTES_MAX
from flintmq.broker.state import Message
from flintmq.broker.subscription import Locality, Subscription
from flintmq.errors import UNREADABLE_JSON
from flintmq.limits import DELIVERY_BYTES_MAX, TAG_WAITING_MAX
from flintmq.message import JSON, TAG, TAG_HEADER, headers_at

_KEY_BYTES = TAG_HEADER.encode()
_KNOWN_SIZE_MAX = 256


class _Headers(msgspec.Struct):
    tag: Any = msgspec.field(name=TAG_HEADER, default="")


_decode = msgspec.json.Decoder(_Headers).decode


def tag_at(data: bytes | memoryview, position: int = 0) -> str:
    """The dispatch tag in a stored message frame of an extended topic; empty for none, and for what cannot be one."""
    version, headers = headers_at(data, position)
    if version == TAG:
        return headers.decode("latin-1")
    if version != JSON or (_KEY_BYTES not in headers and b"\\" not in headers):
        return ""
    return _tag_in(headers) if len(headers) > _KNOWN_SIZE_MAX else _known_tag_in(headers)


def _tag_in(headers: bytes) -> str:
    try:
        tag = _decode(headers).tag
    except UNREADABLE_JSON:
        return ""
    return tag if isinstance(tag, str) else ""


_known_tag_in = lru_cache(maxsize=256)(_tag_in)  # many messages have the same headers


class Group:
    """The consumers that desire one tag, or those that desire none, and what waits for them.

    Attributes:
        waiting: sequences of the window that are theirs and new.
        again: sequences, of the window or spilled, that are theirs and come again or have come due.
        is_owed: whether something new is next, when there is both.
        spilled_bytes: of the frames of those that were spilled, which are in memory.
    """

    __slots__ = ("again", "is_owed", "lines", "member_count", "spilled_bytes", "waiting")

    def __init__(self, lines: ReadyLines) -> None:
        self.lines = lines
        self.member_count = 0
        self.waiting: deque[int] = deque()
        self.again: deque[int] = deque()
        self.is_owed = False
        self.spilled_bytes = 0

    @property
    def waiting_count(self) -> int:
        """Messages that wait for them in all."""
        return len(self.waiting) + len(self.again)


class _TagLine(OrderedDict[Subscription, None]):
    """A line that tells when somebody joins it."""

    on_join: Callable[[], None]

    def __setitem__(self, subscription: Subscription, _: None) -> None:
        super().__setitem__(subscription, None)
        self.on_join()


class _TagLines(ReadyLines):
    __slots__ = ()

    def __init__(self, on_join: Callable[[], None]) -> None:
        lines = tuple(_TagLine() for _ in Locality)
        for line in lines:
            line.on_join = on_join
        self._lines = lines


class TaggedLines(ReadyLines):
    """The lines of all groups.

    Attributes:
        groups: those with a tag, by tag; only while they have consumers.
        untagged: the one without.
        to_serve: groups that have become ready while something waited for them.
    """

    __slots__ = ("_ready", "groups", "to_serve", "untagged")

    def __init__(self) -> None:
        super().__init__()
        self.untagged = Group(ReadyLines())
        self.groups: dict[str, Group] = {}
        self.to_serve: dict[Group, None] = {}
        self._ready: dict[Group, None] = {}  # every group with a tag in which somebody is ready, and some others

    def add(self, subscription: Subscription) -> None:
        """Let a consumer join and leave the line of its group by itself from now on."""
        group = self.untagged
        if subscription.tag:
            group = self.groups.get(subscription.tag) or self._new_group(subscription.tag)
        group.member_count += 1
        group.lines.add(subscription)

    def _new_group(self, tag: str) -> Group:
        def joined() -> None:
            self._ready[group] = None
            if group.waiting or group.again:
                self.to_serve[group] = None

        group = self.groups[tag] = Group(_TagLines(joined))
        return group

    def remove(self, subscription: Subscription) -> None:
        """Take a consumer out for good, and its group with it if it was the last that desired its tag."""
        group = self.group_of(subscription.tag)
        group.lines.remove(subscription)
        group.member_count -= 1
        if subscription.tag and not group.member_count:
            del self.groups[subscription.tag]
            self._ready.pop(group, None)
            self.to_serve.pop(group, None)

    def group_of(self, tag: str) -> Group:
        """The group that gets messages with a tag."""
        return self.groups.get(tag, self.untagged)

    def nearest(self) -> Line | None:
        """A line of any group in which somebody can take something; None when nobody can."""
        line = self.untagged.lines.nearest()
        while line is None and self._ready:
            group = next(iter(self._ready))
            line = group.lines.nearest()
            if line is None:
                del self._ready[group]
        return line


class TaggedChannel(Channel):
    """A channel that hands out messages by tag.

    Attributes:
        waiting_max: messages that wait for one group at most.
        headers_from: see :class:`flintmq.broker.partition.Partition`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._begin()

    @staticmethod
    def take_over(channel: Channel, headers_from: int) -> None:
        """Make a tagged channel of one whose topic gets headers, with all that it holds and all who consume it."""
        channel.__class__ = TaggedChannel
        assert isinstance(channel, TaggedChannel)
        channel.go_on_with_headers(headers_from)

    def go_on_with_headers(self, headers_from: int) -> None:
        """Do the part of :meth:`take_over` that is about consumers."""
        lines = self._ready
        self._begin()
        self.headers_from = headers_from
        self._groups.untagged.lines = lines  # nobody of them desires a tag, and each keeps the place in line
        self._groups.untagged.member_count = len(self.subscriptions)

    def _begin(self) -> None:
        self.headers_from = 0
        self.waiting_max = TAG_WAITING_MAX
        self._is_new_owed = False  # for what the last lost connection gave back
        self._ready = self._groups = TaggedLines()

    @property
    def depth(self) -> int:
        """Messages waiting for a consumer; without those in flight and deferred."""
        waiting_count = sum(group.waiting_count for group in self._groups.groups.values())
        return super().depth + self._groups.untagged.waiting_count + waiting_count

    # -- who there is ----------------------------------------------------------------------------------------------

    def add(self, subscription: Subscription) -> None:
        """Attach a consumer; the first that desires a tag gets what waits for the untagged and has it."""
        if subscription.tag and subscription.tag not in self._groups.groups:
            self._gather(self._groups.untagged)
            super().add(subscription)
            self._groups.groups[subscription.tag].is_owed = self._is_new_owed  # those before it may have died
            return
        super().add(subscription)

    def remove(self, subscription: Subscription) -> None:
        """Detach a consumer; what waits for the last that desires a tag falls to the untagged."""
        group = self._groups.group_of(subscription.tag)
        held_count = subscription.in_flight_count
        begins_turns = self._begins_turns(group) and not self._has_unsorted()
        if held_count or (group.member_count == 1 and subscription.tag):
            self._gather(group)  # also so that what it held gets its place among them
        super().remove(subscription)
        if held_count:
            self._is_new_owed = self._is_new_owed or begins_turns
            group.is_owed = self._is_new_owed
        if not self._groups.groups:
            self._gather(self._groups.untagged)

    def _take_back(self, held: list[Message]) -> None:
        self._is_new_owed = self.window.has_come_again(held[0])
        super()._take_back(held)

    def _begin_turns(self, subscription: Subscription | None) -> None:
        super()._begin_turns(subscription)
        if subscription is not None:
            group = self._groups.group_of(subscription.tag)
            group.is_owed = group.is_owed or self._begins_turns(group)

    def _begins_turns(self, group: Group) -> bool:
        """Whether what comes again for a group would be the first that does, and something new may be there for it."""
        return self.keep_floor is None and not group.again and (bool(group.waiting) or self.window.next < self.end)

    def deliver_in_order(self, keep_floor: Callable[[int], bool | None] | None) -> None:
        """Deliver one message at a time from now on, each when the one before is finished; None: as they come."""
        self.gather_waiting()
        super().deliver_in_order(keep_floor)

    # -- what waits for a group ------------------------------------------------------------------------------------

    def gather_waiting(self) -> None:
        """Let everything that waits to be delivered again stand in the one queue for all consumers."""
        self._gather(self._groups.untagged, *self._groups.groups.values())

    def _gather(self, *groups: Group) -> None:
        """Put what waits for groups back in front of what is to be sorted into groups."""
        again = [sequence for group in groups for sequence in group.again]
        again += sorted(sequence for group in groups for sequence in group.waiting)
        again.reverse()
        for group in groups:
            group.waiting.clear()
            group.again.clear()
            group.spilled_bytes = 0
        self.window.line_up(again)

    def _waiting_elsewhere(self) -> Collection[int]:
        groups = (self._groups.untagged, *self._groups.groups.values())
        return [sequence for group in groups for sequence in (*group.waiting, *group.again)]

    def _skip_waiting(self) -> None:
        self.gather_waiting()
        super()._skip_waiting()

    def spill(self) -> None:
        """Make room in a full window, see :meth:`Window.spill`."""
        self.gather_waiting()
        super().spill()

    # -- delivery --------------------------------------------------------------------------------------------------

    def _hand_out(self, now_ns: int, wall_ns: int) -> None:
        if not self._groups.groups:
            super()._hand_out(now_ns, wall_ns)
            return
        is_moving = True
        while is_moving and not self.wants_turn and not self.budget.is_full:
            self._serve_waiting(now_ns, is_cursor_done=False)
            self._sort(now_ns)
            has_served = self._serve_waiting(now_ns, is_cursor_done=False)  # what has just been sorted has turns, too
            if not self._has_unsorted() and self.window.next < self.end:
                self._deliver_new(now_ns, wall_ns, self.end)
                if self._has_unsorted():
                    continue  # a full window was spilled: the cursor goes on when what came out of it has been sorted
            is_moving = self._serve_waiting(now_ns, is_cursor_done=True) or has_served

    def _has_unsorted(self) -> bool:
        return self.window.waiting_count > 0

    def _serve_waiting(self, now_ns: int, is_cursor_done: bool) -> bool:
        """Hand out what waits for groups; whether there was something."""
        has_served = self._serve(self._groups.untagged, now_ns, is_cursor_done)
        to_serve = self._groups.to_serve
        for group in list(to_serve):
            has_served = self._serve(group, now_ns, is_cursor_done) or has_served
            if is_cursor_done and not self.wants_turn and not self.budget.is_full:
                del to_serve[group]  # only now: when the log cannot be read, it is tried again
        return has_served

    def _serve(self, group: Group, now_ns: int, is_cursor_done: bool) -> bool:
        """Hand out what waits for a group, in turns; whether there was something.

        Args:
            is_cursor_done: whether nothing new comes from the cursor now; else what comes again waits for its turn.
        """
        has_served = False
        budget = self.budget
        while not self.wants_turn and not budget.is_full and (line := group.lines.nearest()):
            if budget.is_short and self._is_held_back(next(iter(line))):
                continue
            if group.waiting and (group.is_owed or not group.again):
                queue = group.waiting
            elif group.again and (is_cursor_done or not group.is_owed):
                queue = group.again
            else:
                break
            has_served, before = True, self.window.in_flight_count
            self._hand_out_waiting(group, next(iter(line)), queue[0], now_ns)
            queue.popleft()
            if self.window.in_flight_count > before:
                group.is_owed = queue is group.again
        if not group.again:
            group.spilled_bytes = 0  # some may have been finished while they waited
        return has_served

    def _hand_out_waiting(self, group: Group, subscription: Subscription, sequence: int, now_ns: int) -> None:
        message = self.spilled.ready_message(sequence)
        self._redeliver_one(subscription, sequence, now_ns)
        if message is not None and message.frame is not None:
            group.spilled_bytes -= len(message.frame)

    def _sort(self, now_ns: int) -> None:
        """Let what comes again wait for its group, or, in order, go to a consumer that may have it and is ready."""
        window = self.window
        if self._is_turn_of_spilled:
            self._is_turn_of_spilled = False
            self._sort_line(now_ns, is_spilled=True)
        if self.keep_floor is None or not window.queued or window.bring_first_forward():
            self._sort_line(now_ns, is_spilled=False)
        if not window.queued:
            self._sort_line(now_ns, is_spilled=True)

    def _sort_line(self, now_ns: int, is_spilled: bool) -> None:
        window = self.window
        while (line := window.line_of(is_spilled)) and self._sort_one(line[0], now_ns):
            window.leave_line(is_spilled)
            if self.keep_floor is not None and not is_spilled and not window.bring_first_forward():
                return

    def _sort_one(self, sequence: int, now_ns: int) -> bool:
        """Find out where a message goes that comes again; False when it has to stay."""
        message = self.window.waiting_message(sequence)
        if message is None:
            return True
        frame = message.frame
        if frame is None:
            batch = self.log.read(sequence)
            if batch is None or batch.first > sequence:
                self.window.finish(message)  # damaged on disk; the log has reported and set it aside
                return True
            group = self._group_at(batch, sequence)
        else:
            group = self._groups.group_of(tag_at(frame) if sequence >= self.headers_from else "")
        if self.keep_floor is not None:
            line = self._line_in_order(group)
            if line is not None:
                self._redeliver_one(next(iter(line)), sequence, now_ns)
            return line is not None
        if frame is None:
            return self._wait_for(group, sequence, group.waiting if message.attempts == 0 else group.again)
        if group.spilled_bytes > LOADED_BYTES_MAX or not self._wait_for(group, sequence, group.again):
            return False
        group.spilled_bytes += len(frame)
        return True

    def _line_in_order(self, group: Group) -> Line | None:
        return None if self.window.in_flight_count else group.lines.nearest()

    def _wait_for(self, group: Group, sequence: int, queue: deque[int]) -> bool:
        if group.waiting_count >= self.waiting_max:
            return False
        queue.append(sequence)
        if group is not self._groups.untagged:
            self._groups.to_serve[group] = None
        return True

    def _group_at(self, batch: Batch, sequence: int) -> Group:
        if not batch.header.flags & EXTENDED:
            return self._groups.untagged
        tag = tag_at(batch.data, batch.frames_at + batch.positions()[sequence - batch.first])
        return self._groups.group_of(tag) if tag else self._groups.untagged

    def _hand_over(self, line: Line, batch: Batch, stop: int, end: int, now_ns: int) -> bool:
        if not self._groups.groups:
            return super()._hand_over(line, batch, stop, end, now_ns)
        if self._has_unsorted():
            return False
        first = self.window.next
        group = self._group_at(batch, first)
        own_line = group.lines.nearest()
        if own_line is None:
            return self._let_wait(group, batch, stop)
        if group.again:
            stop = first + 1  # and then those have their turn
        subscription = next(iter(own_line))
        share = 1 if self.keep_floor is not None else max(1, (end - first) // len(own_line))
        most = min(stop - first, subscription.capacity, share)
        if batch.size > DELIVERY_BYTES_MAX:
            most = min(most, batch.count_within(first, DELIVERY_BYTES_MAX))
        before = self.window.in_flight_count
        self._send_run(subscription, batch, self._run_length(group, batch, most), now_ns)
        subscription.served()
        if self.window.in_flight_count > before:
            group.is_owed = False
            if group.again:
                self._serve(group, now_ns, is_cursor_done=False)
        return not self.wants_turn

    def _run_length(self, group: Group, batch: Batch, most: int) -> int:
        """Count the messages from the cursor on that are for a group, at most so many; the first one is."""
        first, count = self.window.next, 1
        while count < most and self._group_at(batch, first + count) is group:
            count += 1
        return count

    def _let_wait(self, group: Group, batch: Batch, stop: int) -> bool:
        """Pass over messages for a group in which nobody can take anything; False when too many wait already."""
        first = self.window.next
        most = min(stop - first, self.waiting_max - group.waiting_count)
        if most <= 0 or self.keep_floor is not None:
            return False
        end = first + self._run_length(group, batch, most)
        if self.latency is not None:
            self.latency.delivered(first, end, batch.timestamp_ns, self.window.floor)
        self.window.queue_new(end)
        group.waiting.extend(range(first, end))
        return True

    def describe(self) -> str:
        """A picture of the state for humans and failing tests."""
        groups = {"": self._groups.untagged, **self._groups.groups}
        waiting = " ".join(f"{tag!r}:{group.waiting_count}" for tag, group in groups.items() if group.waiting_count)
        return f"{super().describe()} tags={list(self._groups.groups)} waiting={{{waiting}}}"
