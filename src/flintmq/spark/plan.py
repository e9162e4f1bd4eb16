"""The plan of a micro-batch: how much it takes, and which Spark task reads what.

The rules of this file: pure functions of their arguments. The same offsets give the same tasks on every machine and in
every attempt, because Spark replays a micro-batch from its offsets; so the number of cores plays no part.

Why tasks are few: one Python task costs Spark about 25 ms, in which a running one reads some 50,000 messages.

Source: docs/decisions/0006 "Planning and split".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flintmq.spark.offsets import PartitionKey

MESSAGES_PER_TASK_MIN = 25_000
PIECE_MIN = 5_000  # a range is not cut for fewer messages than this


@dataclass(frozen=True, slots=True)
class FetchRange:
    """Messages ``start`` to ``end`` (exclusive) of one partition log.

    ``nsqd`` is where it was when the range was planned, empty when nobody knew; whoever reads looks for it if it is not
    there. So ranges are equal wherever their log is. When a range was planned, it was logged that the messages below
    ``told_end`` are lost; it is not cut short for that, as the tasks of a micro-batch follow from its offsets alone.
    """

    topic: str
    nsqd: str = field(compare=False)
    partition: int
    start: int
    end: int
    log_id: str
    told_end: int = field(default=0, compare=False)

    @property
    def key(self) -> PartitionKey:
        return PartitionKey(self.topic, self.partition, self.log_id)

    @property
    def count(self) -> int:
        """Messages in the range, counting gaps as messages."""
        return self.end - self.start

    @property
    def label(self) -> str:
        """Its log for people: ``<nsqd>/<partition>``, or by its id when nobody knows where it is."""
        return f"{self.nsqd}/{self.partition}" if self.nsqd else self.key.label


def plan_tasks(ranges: Iterable[FetchRange], min_partitions: int, messages_max: int) -> list[tuple[FetchRange, ...]]:
    """Pack ranges into tasks of about equal length.

    Args:
        min_partitions: least number of tasks, as far as there are messages.
        messages_max: most messages of one task, give or take ``PIECE_MIN``.
    """
    work = sorted((r for r in ranges if r.count > 0), key=lambda r: r.key)
    total = sum(r.count for r in work)
    if not total:
        return []
    wanted = max(len(work), -(-total // messages_max))
    task_count = max(min(wanted, -(-total // MESSAGES_PER_TASK_MIN)), -(-total // messages_max), min_partitions)
    return _pack(work, -(-total // task_count))


def _pack(work: Sequence[FetchRange], share: int) -> list[tuple[FetchRange, ...]]:
    piece_min = min(PIECE_MIN, share // 2)
    tasks: list[tuple[FetchRange, ...]] = []
    current: list[FetchRange] = []
    room = share
    for whole in work:
        rest = whole
        while rest.count > room + piece_min:
            if room > piece_min:
                current.append(replace(rest, end=rest.start + room))
                rest = replace(rest, start=rest.start + room)
            tasks.append(tuple(current))
            current, room = [], share
        current.append(rest)
        room -= rest.count
        if room <= 0:
            tasks.append(tuple(current))
            current, room = [], share
    if current:
        tasks.append(tuple(current))
    return tasks


@dataclass(frozen=True, slots=True)
class Backlog:
    """Unread messages of one partition: ``start`` to ``end`` (exclusive), and how long they are on average."""

    start: int
    end: int
    message_bytes: float

    @property
    def count(self) -> int:
        return max(0, self.end - self.start)


def admit(backlogs: Mapping[PartitionKey, Backlog], messages_max: int, bytes_max: int) -> dict[PartitionKey, int]:
    """Choose how far the next micro-batch reads each partition.

    Each partition gets its share of the limit in proportion to its backlog, and at least one message, so that a long
    backlog cannot starve a short one. What that is too much for the limit is taken from the longest.

    Args:
        messages_max: 0 for no limit; exceeded where more partitions than that have a backlog, by one message of each.
        bytes_max: 0 for no limit; compared with mean sizes.

    Returns:
        The end (exclusive) of each partition; its start where nothing is taken.
    """
    ratio = 1.0
    total = sum(b.count for b in backlogs.values())
    if messages_max and total > messages_max:
        ratio = messages_max / total
    total_bytes = sum(b.count * b.message_bytes for b in backlogs.values())
    if bytes_max and total_bytes > bytes_max:
        ratio = min(ratio, bytes_max / total_bytes)
    taken = {key: backlogs[key].count for key in sorted(backlogs)}
    if ratio != 1.0:
        taken = {key: min(count, max(1, int(count * ratio))) for key, count in taken.items()}
    excess = sum(taken.values()) - messages_max if messages_max else 0
    for key in sorted(taken, key=lambda key: (-taken[key], key)):
        if excess <= 0:
            break
        less = min(excess, max(0, taken[key] - 1))
        taken[key] -= less
        excess -= less
    return {key: backlogs[key].start + count for key, count in taken.items()}
