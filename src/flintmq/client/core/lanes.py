"""The ordered publishes to one partition: one command at a time, the rest in line behind it.

Rules of this file:

- What nsqd has not answered holds up what comes behind it, also when nobody waits for that answer any more: only an
  answer or the end of the connection proves that nothing of it will be executed later.
- What waits is gathered: consecutive single publishes become one MPUB, in their order.
- A publish that failed is not overtaken: those of the same key that stand behind it fail with it, because whoever
  published them did not know. The key is the sharding id, or the partition where that was named.

Source: Youzan's smart client, "Production in ordered message scenario".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from flintmq.client.core.publish import DEADLINE_GRAIN_S, Publish


class Lane:
    """One partition's line.

    Attributes:
        queue: what waits, oldest first.
        current: what nsqd has not answered.
        is_due: it will be looked at when the turn ends.
        is_paused: the oldest waits for its next try.
        is_stuck: nobody is known to take it, and it was looked up already.
    """

    __slots__ = ("topic", "partition", "queue", "current", "is_due", "is_paused", "is_stuck")

    def __init__(self, topic: str, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self.queue: deque[Publish] = deque()
        self.current: Publish | None = None
        self.is_due = False
        self.is_paused = False
        self.is_stuck = False

    def __repr__(self) -> str:
        return f"<Lane {self.topic}/{self.partition} waiting={len(self.queue)} current={self.current is not None}>"

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits and nothing is under way."""
        return not self.queue and self.current is None and not self.is_due and not self.is_paused

    def push(self, publish: Publish, count_max: int, bytes_max: int) -> bool:
        """Put a publish at the end of the line; True when the one before it took its message in."""
        if self.queue and fits(self.queue[-1], publish, count_max, bytes_max):
            self.queue[-1].absorb(publish)
            return True
        publish.is_in_line = True
        self.queue.append(publish)
        return False

    def put_back(self, *publishes: Publish) -> None:
        """Put publishes at the front, the first of them first."""
        for publish in reversed(publishes):
            publish.is_in_line = True
            self.queue.appendleft(publish)

    def remove(self, publish: Publish) -> None:
        """Take a publish out of the line, if it waits there."""
        if publish in self.queue:
            self.queue.remove(publish)

    def take_followers(self, publish: Publish) -> list[Publish]:
        """Take out what has a key of ``publish`` and stands behind it.

        What is taken out of a gathered publish comes as one of its own, whose cost stays with the other.
        """
        keys = frozenset(publish.keys or ())
        taken: list[Publish] = []
        is_behind = publish not in self.queue
        for each in [*self.queue]:
            if each is publish:
                is_behind = True
            elif is_behind and (part := _part(each, keys)) is not None:
                if part is each:
                    self.queue.remove(each)
                taken.append(part)
        return taken


def fits(last: Publish, publish: Publish, count_max: int, bytes_max: int) -> bool:
    """Whether the messages of a publish may travel with those of the one before it."""
    return (
        last.is_gathered
        and publish.is_gathered
        and not (last.tries or last.is_unknown)  # or the outcome of one would be said of the other
        and len(last.bodies) + len(publish.bodies) <= count_max
        and last.cost + publish.cost <= bytes_max
        and 0 <= publish.deadline - last.deadline < DEADLINE_GRAIN_S
    )


def _part(publish: Publish, keys: Collection[object]) -> Publish | None:
    assert publish.keys is not None
    hit = [key in keys for key in publish.keys]
    if not any(hit):
        return None
    return publish if all(hit) else publish.take_out(hit)
