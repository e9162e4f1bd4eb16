"""A channel of an extended topic: messages with a dispatch tag go to the consumers that desire it.

::

    message with tag t     a consumer with ``desired_tag`` t, while one is connected; else an untagged consumer
    message without tag    an untagged consumer

Consumers fall into groups: one for each tag that somebody desires, and the untagged. A message that is to go to a group
in which nobody can take anything waits for that group, queued again in the channel's window, and what is behind it
flows on to the others. At most :data:`TAG_WAITING_MAX` messages wait for one group, and :data:`LOADED_BYTES_MAX` bytes
of messages that were set aside; then the cursor stops for all.

Rules of this file:

- While no consumer desires a tag, nothing waits for a group and all is as in :class:`Channel`.
- A message that waits for a group is nowhere else: neither in ``_requeued`` nor in ``aside.ready``. Whatever looks at
  those calls :meth:`TaggedChannel.gather_waiting` before.
- An entry of a group's queue is a hint: the message may have been finished meanwhile.
- A group in which somebody is ready has nothing waiting when a turn ends, or stands in ``to_serve``.
- Tags are read from the stored headers when a message is to be handed out, and kept only as the queue it waits in.
- In order nothing waits for a group: a message that nobody may take now is in the way of those behind it.

Source: reference/youzan.md 1.3 "Tag dispatch".
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec

from flintmq.batch import EXTENDED, Batch
from flintmq.broker.channel import QUEUED, Channel
from flintmq.broker.deferred import LOADED_BYTES_MAX
from flintmq.broker.ready import Line, ReadyLines
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
        waiting: sequences, of the window or set aside, that are theirs.
        aside_bytes: of the frames of those that were set aside, which are in memory.
    """

    __slots__ = ("aside_bytes", "lines", "member_count", "waiting")

    def __init__(self, lines: ReadyLines) -> None:
        self.lines = lines
        self.member_count = 0
        self.waiting: deque[int] = deque()
        self.aside_bytes = 0


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
            if group.waiting:
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
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._groups = TaggedLines()
        self.waiting_max = TAG_WAITING_MAX
        super().__init__(*args, **options)
        self._ready = self._groups

    @property
    def depth(self) -> int:
        """Messages waiting for a consumer; without those in flight and deferred."""
        return super().depth + len(self._groups.untagged.waiting) + self._tagged_waiting_count

    @property
    def _tagged_waiting_count(self) -> int:
        return sum(len(group.waiting) for group in self._groups.groups.values())

    # -- who there is ----------------------------------------------------------------------------------------------

    def add(self, subscription: Subscription) -> None:
        """Attach a consumer; the first that desires a tag gets what waits for the untagged and has it."""
        if subscription.tag and subscription.tag not in self._groups.groups:
            self._gather(self._groups.untagged)
        super().add(subscription)

    def remove(self, subscription: Subscription) -> None:
        """Detach a consumer; what waits for the last that desires a tag falls to the untagged."""
        group = self._groups.group_of(subscription.tag)
        if group.member_count == 1 and subscription.tag:
            self._gather(group)
        super().remove(subscription)
        if not self._groups.groups:
            self._gather(self._groups.untagged)

    def deliver_in_order(self, keep_floor: Callable[[int], None] | None) -> None:
        """Deliver one message at a time from now on, each when the one before is finished; None: as they come."""
        self.gather_waiting()
        super().deliver_in_order(keep_floor)

    # -- what waits for a group ------------------------------------------------------------------------------------

    def gather_waiting(self) -> None:
        """Let everything that waits to be delivered again stand in the one queue for all consumers."""
        self._gather(self._groups.untagged, *self._groups.groups.values())

    def _gather(self, *groups: Group) -> None:
        """Put what waits for groups back in front of what is to be sorted into groups."""
        waiting = sorted((sequence for group in groups for sequence in group.waiting), reverse=True)
        for group in groups:
            group.waiting.clear()
            group.aside_bytes = 0
        self._requeued.extendleft(s for s in waiting if self._is_queued(s))
        self.aside.ready.extendleft(s for s in waiting if self._is_ready_aside(s))

    def _is_ready_aside(self, sequence: int) -> bool:
        aside = self.aside.loaded.get(sequence)
        return aside is not None and aside.owner is None

    def let_go(self) -> None:
        """Forget what there is between floor and cursor, as if none of it had been delivered."""
        self.gather_waiting()
        super().let_go()

    def confirm(self, sequence: int) -> None:
        """Finish everything below ``sequence`` that is not in flight (CURSOR); the cursor never goes back."""
        self.gather_waiting()
        super().confirm(sequence)

    def _skip_waiting(self, now_ns: int) -> None:
        self.gather_waiting()
        super()._skip_waiting(now_ns)

    def _spill(self, now_ns: int) -> None:
        self.gather_waiting()
        super()._spill(now_ns)

    # -- delivery --------------------------------------------------------------------------------------------------

    def _hand_out(self, now_ns: int, wall_ns: int) -> None:
        if not self._groups.groups:
            super()._hand_out(now_ns, wall_ns)
            return
        self._serve_waiting(now_ns)
        while True:
            if self._has_unsorted:
                self._redeliver(now_ns)
            if self._has_unsorted or self.next >= self.end:
                return
            self._deliver_new(now_ns, wall_ns)
            if not self._has_unsorted:
                return
            # a full window was spilled: the cursor goes on when what came out of it has been sorted

    @property
    def _has_unsorted(self) -> bool:
        return bool(self._requeued or self.aside.ready)

    def _serve_waiting(self, now_ns: int) -> None:
        self._serve(self._groups.untagged, now_ns)
        to_serve = self._groups.to_serve
        while to_serve:
            group = next(iter(to_serve))
            self._serve(group, now_ns)
            del to_serve[group]  # only now: when the log cannot be read, it is tried again

    def _serve(self, group: Group, now_ns: int) -> None:
        waiting = group.waiting
        while waiting and (line := group.lines.nearest()):
            sequence = waiting[0]
            if self._is_queued(sequence):
                self._redeliver_window(next(iter(line)), sequence, now_ns)
            elif self._is_ready_aside(sequence):
                size = len(self.aside.loaded[sequence].frame)
                self._redeliver_aside(next(iter(line)), sequence, now_ns)
                group.aside_bytes -= size
            waiting.popleft()
        if not waiting:
            group.aside_bytes = 0  # some may have been finished while they waited

    def _redeliver(self, now_ns: int) -> None:
        """Sort what comes again: to a consumer that may have it and is ready, or to what waits for its group."""
        if not self._groups.groups:
            super()._redeliver(now_ns)
            return
        while self._requeued and (self.keep_floor is None or self._is_next_in_line()):
            if not self._sort_window(self._requeued[0], now_ns):
                break
            self._requeued.popleft()
        while self.aside.ready and not self._requeued and self._sort_aside(self.aside.ready[0], now_ns):
            self.aside.ready.popleft()

    def _sort_window(self, sequence: int, now_ns: int) -> bool:
        """Find out where a message of the window goes; False when it has to stay."""
        if not self._is_queued(sequence):
            return True
        batch = self.log.read(sequence)
        if batch is None or batch.first > sequence:
            self._mark_done(sequence)  # damaged on disk; the log has reported and set it aside
            return True
        group = self._group_at(batch, sequence)
        line = self._line_now(group)
        if line is None:
            return self._wait_for(group, sequence)
        self._redeliver_window(next(iter(line)), sequence, now_ns)
        return True

    def _sort_aside(self, sequence: int, now_ns: int) -> bool:
        """As :meth:`_sort_window`, for a message that was set aside."""
        aside = self.aside.loaded.get(sequence)
        if aside is None or aside.owner is not None:
            return True
        group = self._groups.group_of(tag_at(aside.frame))
        line = self._line_now(group)
        if line is None:
            if group.aside_bytes > LOADED_BYTES_MAX or not self._wait_for(group, sequence):
                return False
            group.aside_bytes += len(aside.frame)
            return True
        self._redeliver_aside(next(iter(line)), sequence, now_ns)
        return True

    def _line_now(self, group: Group) -> Line | None:
        return None if self.keep_floor is not None and self.in_flight_count else group.lines.nearest()

    def _wait_for(self, group: Group, sequence: int) -> bool:
        if self.keep_floor is not None or len(group.waiting) >= self.waiting_max:
            return False
        group.waiting.append(sequence)
        return True

    def _group_at(self, batch: Batch, sequence: int) -> Group:
        if not batch.header.flags & EXTENDED:
            return self._groups.untagged
        tag = tag_at(batch.data, batch.frames_at + batch.positions()[sequence - batch.first])
        return self._groups.group_of(tag) if tag else self._groups.untagged

    def _hand_over(self, line: Line, batch: Batch, stop: int, end: int, now_ns: int) -> bool:
        if not self._groups.groups:
            return super()._hand_over(line, batch, stop, end, now_ns)
        if self._has_unsorted:
            return False
        first = self.next
        group = self._group_at(batch, first)
        own_line = group.lines.nearest()
        if own_line is None:
            return self._let_wait(group, batch, stop)
        subscription = next(iter(own_line))
        share = 1 if self.keep_floor is not None else max(1, (end - first) // len(own_line))
        most = min(stop - first, subscription.capacity, share)
        if batch.size > DELIVERY_BYTES_MAX:
            most = min(most, batch.count_within(first, DELIVERY_BYTES_MAX))
        self._send_run(subscription, batch, self._run_length(group, batch, most), now_ns)
        subscription.served()
        return True

    def _run_length(self, group: Group, batch: Batch, most: int) -> int:
        """How many messages from the cursor on are for a group, at most so many; the first one is."""
        first, count = self.next, 1
        while count < most and self._group_at(batch, first + count) is group:
            count += 1
        return count

    def _let_wait(self, group: Group, batch: Batch, stop: int) -> bool:
        """Pass over messages for a group in which nobody can take anything; False when too many wait already."""
        first = self.next
        most = min(stop - first, self.waiting_max - len(group.waiting))
        if most <= 0 or self.keep_floor is not None:
            return False
        end = first + self._run_length(group, batch, most)
        if self.latency is not None:
            self.latency.delivered(first, end, batch.timestamp_ns, self.floor)
        self._attempts.update(dict.fromkeys(range(first, end), 0))
        self._window += bytes((QUEUED,)) * (end - first)
        self.next = end
        group.waiting.extend(range(first, end))
        self.dirty = True
        return True

    def describe(self) -> str:
        """A picture of the state for humans and failing tests."""
        groups = {"": self._groups.untagged, **self._groups.groups}
        waiting = " ".join(f"{tag!r}:{len(group.waiting)}" for tag, group in groups.items() if group.waiting)
        return f"{super().describe()} tags={list(self._groups.groups)} waiting={{{waiting}}}"
