"""Planning: nothing twice, nothing left out, the same every time, and few tasks."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from flintmq.spark.offsets import PartitionKey
from flintmq.spark.plan import MESSAGES_PER_TASK_MIN, PIECE_MIN, Backlog, FetchRange, admit, plan_tasks


def one(start: int, end: int, topic: str = "t", nsqd: str = "a:1", partition: int = 0) -> FetchRange:
    return FetchRange(topic, nsqd, partition, start, end, "00000000000000a1")


@st.composite
def some_ranges(draw) -> list[FetchRange]:
    keys = draw(st.lists(st.tuples(st.sampled_from("tuv"), st.integers(0, 5)), unique=True, max_size=10))
    ranges = []
    for topic, partition in keys:
        start = draw(st.integers(1, 1000))
        ranges.append(one(start, start + draw(st.integers(0, 3_000_000)), topic, partition=partition))
    return ranges


def joined(tasks: Sequence[Sequence[FetchRange]]) -> dict[PartitionKey, tuple[int, int]]:
    """Pieces put together again; fails on a gap or an overlap."""
    whole: dict[PartitionKey, tuple[int, int]] = {}
    for task in tasks:
        for piece in task:
            assert piece.count > 0
            start, end = whole.get(piece.key, (piece.start, piece.start))
            assert piece.start == end
            whole[piece.key] = (start, piece.end)
    return whole


@given(some_ranges(), st.integers(1, 20), st.integers(1000, 2_000_000), st.randoms())
def test_every_message_is_in_exactly_one_task(ranges, min_partitions, messages_max, random):
    tasks = plan_tasks(ranges, min_partitions, messages_max)
    assert joined(tasks) == {r.key: (r.start, r.end) for r in ranges if r.count}
    assert all(sum(r.count for r in task) <= messages_max + PIECE_MIN for task in tasks)
    shuffled = list(ranges)
    random.shuffle(shuffled)
    assert plan_tasks(shuffled, min_partitions, messages_max) == tasks


def test_nothing_to_read_is_no_task():
    assert plan_tasks([], 4, 1000) == []
    assert plan_tasks([one(5, 5), one(9, 4, "u")], 4, 1000) == []


def test_small_ranges_share_a_task():
    ranges = [one(1, 501, topic) for topic in "abcd"]
    assert plan_tasks(ranges, 1, 500_000) == [tuple(ranges)]


def test_long_ranges_get_a_task_each():
    ranges = [one(1, 100_001, topic) for topic in "abcd"]
    assert plan_tasks(ranges, 1, 500_000) == [(r,) for r in ranges]


def test_a_long_range_is_split():
    tasks = plan_tasks([one(1, 2_000_001)], 1, 500_000)
    assert [(task[0].start, task[0].end) for task in tasks] == [
        (1, 500_001),
        (500_001, 1_000_001),
        (1_000_001, 1_500_001),
        (1_500_001, 2_000_001),
    ]


def test_min_partitions():
    assert len(plan_tasks([one(1, 1001)], 4, 500_000)) == 4
    assert len(plan_tasks([one(1, 3)], 4, 500_000)) == 2
    assert len(plan_tasks([one(1, 501, topic) for topic in "abcd"], 4, 500_000)) == 4


def test_no_task_for_less_than_it_costs():
    ranges = [one(1, MESSAGES_PER_TASK_MIN // 2 + 1, topic) for topic in "abcdefgh"]
    assert len(plan_tasks(ranges, 1, 500_000)) == 4


def test_where_a_log_is_makes_no_difference():
    """A micro-batch that is repeated after its log has moved is the same."""
    here, there = one(1, 60_000, "t", "a:1"), one(1, 60_000, "t", "b:1")
    assert here == there
    assert plan_tasks([one(1, 9, "u"), here], 2, 1000) == plan_tasks([there, one(1, 9, "u", "c:1")], 2, 1000)
    assert (here.label, one(1, 9, nsqd="").label) == ("a:1/0", "0/00000000000000a1")


def test_a_task_can_be_pickled():
    task = plan_tasks([one(1, 100)], 1, 1000)[0]
    assert pickle.loads(pickle.dumps(task)) == task


KEYS = [PartitionKey(topic, 0, "00000000000000a1") for topic in "abcde"]


@given(
    st.lists(st.tuples(st.integers(0, 100_000), st.floats(1, 1000)), min_size=1, max_size=5),
    st.integers(0, 100_000),
    st.integers(0, 10_000_000),
)
def test_a_micro_batch_keeps_to_its_limits(sizes, messages_max, bytes_max):
    backlogs = {key: Backlog(10, 10 + count, mean) for key, (count, mean) in zip(KEYS, sizes, strict=False)}
    ends = admit(backlogs, messages_max, bytes_max)
    taken = {key: ends[key] - 10 for key in backlogs}
    waiting = sum(1 for b in backlogs.values() if b.count)
    assert all(0 <= taken[key] <= backlogs[key].count for key in backlogs)
    # each partition that has something gets something, which is more than the limit where there are more of them
    assert all(taken[key] > 0 for key in backlogs if backlogs[key].count)
    if messages_max:
        assert sum(taken.values()) <= max(messages_max, waiting)
    if bytes_max:
        longest = max(b.message_bytes for b in backlogs.values())
        assert sum(taken[key] * backlogs[key].message_bytes for key in backlogs) <= bytes_max + waiting * longest
    if not messages_max and not bytes_max:
        assert taken == {key: b.count for key, b in backlogs.items()}


def test_a_short_backlog_is_not_starved():
    backlogs = {KEYS[0]: Backlog(1, 1_000_001, 200.0), KEYS[1]: Backlog(1, 11, 200.0)}
    ends = admit(backlogs, 1000, 0)
    assert ends[KEYS[1]] == 2
    assert 990 < ends[KEYS[0]] <= 1001


def test_short_backlogs_take_their_messages_from_the_longest():
    backlogs = {key: Backlog(1, 1 + count, 200.0) for key, count in zip(KEYS, (3, 4000, 2, 6000, 1), strict=True)}
    taken = {key: end - 1 for key, end in admit(backlogs, 100, 0).items()}
    assert sum(taken.values()) == 100
    assert [taken[KEYS[number]] for number in (0, 2, 4)] == [1, 1, 1]
    assert taken[KEYS[1]] == 39 and taken[KEYS[3]] == 58
    assert set(admit(backlogs, 2, 0).values()) == {2}, "one of each where there are more partitions than messages"


def test_a_backlog_that_is_none():
    assert admit({KEYS[0]: Backlog(9, 4, 1.0)}, 10, 0) == {KEYS[0]: 9}
