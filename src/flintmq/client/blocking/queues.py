"""The calls that publish to one partition in order: one at a time, the others wait behind it.

Rules of this file:

- All methods are called with the owner's lock held; nothing waits here.
- A call that failed is not overtaken: those of the same key that stand behind it fail with it, because whoever made
  them did not know. The key is the sharding id, or the partition where that was named.

- Whoever stands there long after its deadline was interrupted at the wrong instruction and never left: it is passed by.

Source: seed 000 "Production in ordered message scenario".
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

FORGOTTEN_S = 1.0


class Ordered(Protocol):
    """A call that keeps its order.

    Attributes:
        deadline: when it ends at the latest.
        key: what must stay in order.
        overtook: why an earlier call of the same key failed; empty: it did not.
    """

    deadline: float
    key: object
    overtook: str


Call = TypeVar("Call", bound=Ordered)


class Queues(Generic[Call]):
    """The calls to partitions, by topic and partition."""

    def __init__(self) -> None:
        self._queues: dict[tuple[str, int], deque[Call]] = {}

    def __len__(self) -> int:
        """Partitions that calls are on their way to."""
        return len(self._queues)

    def enter(self, topic: str, partition: int, call: Call, now: float) -> bool:
        """Stand in the queue of a partition, at its end unless it stands there already; True when it is its turn."""
        queue = self._queues.get((topic, partition))
        if queue is None:
            queue = self._queues[topic, partition] = deque()
        if call not in queue:
            queue.append(call)
        while queue[0] is not call and queue[0].deadline + FORGOTTEN_S < now:
            queue.popleft()
        return queue[0] is call

    def leave(self, topic: str, partition: int, call: Call, failed: str = "") -> bool:
        """Leave a queue; True when somebody who stood behind has to look again.

        Args:
            failed: the code of the error it ended with.
        """
        queue = self._queues.get((topic, partition))
        if queue is None or call not in queue:
            return False
        behind = [*queue][queue.index(call) + 1 :]
        queue.remove(call)
        if not queue:
            del self._queues[topic, partition]
        if failed:
            for other in behind:
                if other.key == call.key:
                    other.overtook = failed
        return bool(behind)
