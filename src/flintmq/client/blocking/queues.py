"""The publishes to one partition in order: one at a time, the others wait behind it.

Rules of this file:

- Those whose partition is not known yet wait by topic, in the order of the calls, and stand in their queues in that
  order when it is.
- All methods are called with the owner's lock held; nothing waits here. Whose turn it is, and who fails with whom,
  :class:`flintmq.client.core.lanes.Lane` says; here each publish has a thread that comes and asks.
- Whoever stands there long after its deadline was interrupted at the wrong instruction and never left: it is passed by.
"""

from __future__ import annotations

from collections.abc import Callable

from flintmq.client.core.lanes import Lane
from flintmq.client.core.publish import Publish

FORGOTTEN_S = 1.0


class Queues:
    """The publishes to partitions, by topic and partition."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._unplaced: dict[str, dict[Publish, None]] = {}
        self._overtaken: dict[Publish, str] = {}

    def __len__(self) -> int:
        """Partitions that publishes are on their way to."""
        return len(self._lanes)

    def place(self, publish: Publish, find: Callable[[Publish], bool], now: float) -> bool:
        """Have it stand in the queue of its partition, behind those of its topic that came before; False: not yet.

        Args:
            find: finds out the partition of a publish, if that can be known.
        """
        waiting = self._unplaced.setdefault(publish.topic, {})
        waiting[publish] = None  # where it stands already, if it does
        for each in [*waiting]:
            if not find(each):
                return False
            del waiting[each]
            self.enter(each, now)
        del self._unplaced[publish.topic]
        return True

    def enter(self, publish: Publish, now: float) -> bool:
        """Stand in the queue of its partition, at its end unless it stands there already; True when it is its turn."""
        assert publish.partition is not None
        key = publish.topic, publish.partition
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(*key)
        queue = lane.queue
        if publish not in queue:
            lane.push(publish, 1, 0)
        while queue[0] is not publish and queue[0].deadline + FORGOTTEN_S < now:
            queue.popleft()
        return queue[0] is publish

    def overtook(self, publish: Publish) -> str:
        """The code of the error that an earlier one of the same key ended with; empty: none did."""
        return self._overtaken.pop(publish, "")

    def leave(self, publish: Publish, failed: str = "") -> bool:
        """Leave a queue; True when somebody who stood behind has to look again.

        Args:
            failed: the code of the error it ended with.
        """
        self._overtaken.pop(publish, None)
        if publish.partition is None:
            return self._leave_unplaced(publish, failed)
        key = publish.topic, publish.partition
        lane = self._lanes.get(key)
        if lane is None or publish not in lane.queue:
            return False
        has_others = lane.queue[-1] is not publish
        for follower in lane.take_followers(publish) if failed else ():
            self._overtaken[follower] = failed
        lane.remove(publish)
        if lane.is_empty:
            del self._lanes[key]
        return has_others

    def _leave_unplaced(self, publish: Publish, failed: str) -> bool:
        waiting = self._unplaced.get(publish.topic, {})
        if publish not in waiting:
            return False
        behind = [*waiting][[*waiting].index(publish) + 1 :]
        for follower in behind if failed else ():
            if follower.keys == publish.keys:
                del waiting[follower]
                self._overtaken[follower] = failed
        del waiting[publish]
        if not waiting:
            del self._unplaced[publish.topic]
        return bool(behind)
