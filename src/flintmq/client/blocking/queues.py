"""The publishes to one partition in order: one at a time, the others wait behind it.

Rules of this file:

- All methods are called with the owner's lock held; nothing waits here. Whose turn it is, and who fails with whom,
  :class:`flintmq.client.core.lanes.Lane` says; here each publish has a thread that comes and asks.
- Whoever stands there long after its deadline was interrupted at the wrong instruction and never left: it is passed by.
"""

from __future__ import annotations

from flintmq.client.core.lanes import Lane
from flintmq.client.core.publish import Publish

FORGOTTEN_S = 1.0


class Queues:
    """The publishes to partitions, by topic and partition."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._overtaken: dict[Publish, str] = {}

    def __len__(self) -> int:
        """Partitions that publishes are on their way to."""
        return len(self._lanes)

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
            return False
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
