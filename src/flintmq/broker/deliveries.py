"""Channels that are looked at in a turn, and the times at which others are.

Rules of this file: no clock; iteration only over dicts and lists; a channel that fails does not keep the others from
their turn.

Source: docs/decisions/0002.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import TypeVar

from flintmq.broker.channel import Channel
from flintmq.broker.channels import Channels
from flintmq.broker.topic import Topic
from flintmq.errors import StorageError

Waiting = TypeVar("Waiting")

_RETRY_NS = 1_000_000_000
_PUMPED_MAX = 128  # channels looked at in one turn, and
_PUMPED_LATE_MAX = 64  # as many more of those that earlier turns left over


def share_turn(new: dict[Waiting, None], late: dict[Waiting, None], new_max: int, late_max: int) -> dict[Waiting, None]:
    """Choose of very many those of this turn: first what is new, so that it waits for no backlog.

    Args:
        late: those that earlier turns left; changed to what this one leaves.
    """
    now = dict.fromkeys(islice(new, new_max))
    late |= dict.fromkeys(islice(new, new_max, None))
    now |= dict.fromkeys(islice(late, late_max))
    for each in now:
        late.pop(each, None)
    return now


class Deliveries:
    """Owner of the marked channels and of all deadlines.

    Args:
        topics: all there are, by name.
        report: told what could not be read.
        on_defect: told what was being done, and an exception that nobody expected there.

    Attributes:
        marked: channels to be looked at at the end of the turn.
        late: those of earlier turns that had too many; :meth:`pump` has something to do while there are some of either.
    """

    __slots__ = ("_armed", "_armed_count", "_channels", "_deadlines", "_on_defect", "_report",
                 "_topics", "late", "marked")  # fmt: skip

    def __init__(
        self,
        topics: Mapping[str, Topic],
        channels: Channels,
        report: Callable[[StorageError], None],
        on_defect: Callable[[str, Exception], None],
    ) -> None:
        self._topics = topics
        self._channels = channels
        self._report = report
        self._on_defect = on_defect
        self.marked: dict[Channel, None] = {}
        self.late: dict[Channel, None] = {}
        self._armed: dict[Channel, int] = {}
        self._armed_count = 0
        self._deadlines: list[tuple[int, int, Channel]] = []

    # -- a turn --------------------------------------------------------------------------------------------------

    def mark(self, channel: Channel) -> None:
        """Look at this channel at the end of the turn."""
        self.marked[channel] = None

    def mark_in_turn(self, channels: Iterable[Channel]) -> None:
        """As :meth:`mark`, in this order, whatever was marked before."""
        for channel in channels:
            self.marked.pop(channel, None)
            self.marked[channel] = None

    def mark_parts(self, channel: Channel) -> None:
        """Look at a channel in all partitions: a consumer of several of them may have room again."""
        topic = self._topics[self._channels.partition(channel).topic_name]
        for part in topic.channels(channel.name):
            self.marked[part] = None

    def mark_waiting(self, channels: Iterable[Channel]) -> None:
        """Look at those of the channels that would do something with what has just been stored."""
        for channel in channels:
            if not channel.is_idle:
                self.marked[channel] = None

    def pump(self, now_ns: int, wall_ns: int) -> list[Channel]:
        """Deliver from the marked channels; return them, so that their consumers' output can be written.

        When there are very many, the rest comes with the next turns.
        """
        channels = self._channels
        marked, self.marked = self.marked, {}
        if self.late or len(marked) > _PUMPED_MAX:
            marked = share_turn(marked, self.late, _PUMPED_MAX, _PUMPED_LATE_MAX)
        for channel in marked:
            if channel not in channels:
                continue  # it went, and a consumer that left it after that marked it again
            try:
                try:
                    channel.pump(now_ns, wall_ns)
                    if channel.limiter is not None:
                        channel.limiter.after_pump(now_ns, wall_ns)
                except StorageError as error:
                    # a file that cannot be opened now says nothing about its content; the other channels go on
                    self._report(error)
                    self.arm(channel, now_ns + _RETRY_NS)
                if channel.wants_turn:
                    self.marked[channel] = None
                deadline = channel.next_deadline_ns(now_ns, wall_ns)
                if deadline is not None:
                    self.arm(channel, deadline)
                if (channel.is_changed or channel.spilled.needs_flush) and channel in channels:
                    channels.changed[channel] = None
                    if channel.spilled.is_crowded or channel.spilled.is_pressing(wall_ns):
                        channels.is_urgent = True  # the channel goes on behind the flush
            except Exception as defect:  # noqa: BLE001 - on_defect tells it; the other channels go on
                self._failed("delivering from", channel, defect, now_ns)
        return list(marked)

    def forget(self, channel: Channel) -> None:
        """Drop a channel that is deleted."""
        self.marked.pop(channel, None)
        self.late.pop(channel, None)
        self._armed.pop(channel, None)

    # -- time ----------------------------------------------------------------------------------------------------

    def arm(self, channel: Channel, deadline_ns: int) -> None:
        """Look at a channel at this monotonic time, unless that is done earlier anyway."""
        armed = self._armed.get(channel)
        if armed is None or deadline_ns < armed:
            self._armed[channel] = deadline_ns
            self._armed_count += 1
            heapq.heappush(self._deadlines, (deadline_ns, self._armed_count, channel))

    @property
    def next_deadline_ns(self) -> int | None:
        """Monotonic time at which :meth:`handle_deadlines` is to be called; None when never."""
        heap = self._deadlines
        while heap and self._armed.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def handle_deadlines(self, now_ns: int, wall_ns: int) -> None:
        """Handle every timeout and due message up to now; the channels concerned are marked."""
        heap = self._deadlines
        while heap and heap[0][0] <= now_ns:
            deadline_ns, _, channel = heapq.heappop(heap)
            if self._armed.get(channel) != deadline_ns:
                continue
            del self._armed[channel]
            if channel not in self._channels:
                continue
            try:
                channel.handle_deadlines(now_ns, wall_ns)
                self.mark_parts(channel)
            except Exception as defect:  # noqa: BLE001 - on_defect tells it; the other channels go on
                self._failed("looking at the deadlines of", channel, defect, now_ns)

    def _failed(self, what: str, channel: Channel, defect: Exception, now_ns: int) -> None:
        """Tell of a defect, and look at the channel again in a while."""
        is_there = channel in self._channels
        topic_name = self._channels.partition(channel).topic_name if is_there else ""
        self._on_defect(f"{what} topic {topic_name} channel {channel.name}", defect)
        if is_there:
            self.arm(channel, now_ns + _RETRY_NS)
