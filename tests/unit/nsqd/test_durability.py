"""When what was published is answered and delivered: the policies."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.nsqd.test_background import new_engine, until

from flintmq.broker.broker import Broker, BrokerOptions
from flintmq.broker.partition import PublishGroup
from flintmq.env import run_in_thread
from flintmq.errors import WriteFailed
from flintmq.nsqd.durability import Durability, FsyncDurability, IntervalDurability, durability_of
from flintmq.storage import ChannelStore
from flintmq.testing import MemoryDisk
from flintmq.topic_meta import TopicMeta

KINDS = ("fsync", "os", "interval")


async def test_nothing_overtakes_what_was_published_before_it():
    running = new_engine(run_in_thread, "os")
    partition = running.broker.topic("t", 1).first_partition
    first = running.broker.publish_to(partition, [b"x"])
    (written,) = running.broker.write_pending(1)
    written.add_condition()
    second = running.broker.publish_to(partition, [b"y"])
    running.schedule()
    await until(lambda: second.end_sequence)
    assert (first.ended, second.ended, partition.log.committed_sequence) == (False, False, 1)
    assert written.meet_condition()
    running.broker.commit_groups([written])
    assert (first.ended, second.ended, partition.log.committed_sequence) == (True, True, 3)
    await running.close()


async def test_a_sync_that_fails_is_answered_with_an_error():
    async def failing(function: Callable[..., Any], /, *args: Any) -> Any:
        if function.__name__ == "run_tickets":
            return [OSError(5, "Input/output error") for _ in args[0]]
        return await run_in_thread(function, *args)

    running = new_engine(failing, "fsync")
    partition = running.broker.topic("t", 1).first_partition
    group = running.broker.publish_to(partition, [b"x"])
    running.schedule()
    await until(lambda: group.ended)
    assert isinstance(group.error, WriteFailed)
    assert partition.log.committed_sequence == 1


def test_a_mark_set_from_outside_answers_what_is_below():
    files = MemoryDisk().attach()
    broker = Broker(files, ChannelStore(files), BrokerOptions(), random.Random(1), print)
    broker.open(1)
    partition = broker.topic("t", 1).first_partition
    groups = []
    for body in (b"a", b"b", b"c"):
        groups.append(broker.publish_to(partition, [body]))
        broker.write_pending(1)
    partition.commit_through(3)
    assert ([group.ended for group in groups], partition.log.committed_sequence) == ([True, True, False], 3)
    partition.commit_through(2)  # it never goes back
    assert partition.log.committed_sequence == 3


@pytest.mark.parametrize("name", KINDS)
def test_what_a_policy_syncs(name):
    policy = durability_of(name, 10)
    found = (policy.syncs_files, policy.syncs_progress, policy.waits_for_syncs)
    assert found == {"fsync": (True, True, True), "os": (False, False, False), "interval": (True, False, False)}[name]


def written_groups(meta: TopicMeta | None = None) -> tuple[Any, list[PublishGroup]]:
    files = MemoryDisk().attach()
    broker = Broker(files, ChannelStore(files), BrokerOptions(), random.Random(1), print)
    broker.open(1)
    partition = broker.topic("t", 1).first_partition
    if meta is not None:
        partition.meta = meta
    broker.publish_to(partition, [b"x"] * 4)
    return partition, broker.write_pending(1)


@pytest.mark.parametrize(("syncdisk", "waits", "due"), [(0, 0, 0), (1, 1, 0), (4, 0, 1), (5, 0, 0)])
def test_a_topic_may_want_more_than_the_node(syncdisk, waits, due):
    _, groups = written_groups(TopicMeta(partition_num=1, syncdisk=syncdisk))
    written = Durability().written(groups)
    assert (groups[0].conditions, written.syncing == groups, len(written.due)) == (waits, bool(waits), due)
    assert written.is_sync_due == bool(waits or due)


def test_what_nobody_waits_for_needs_no_sync_where_it_is_worth_none():
    partition, groups = written_groups()
    for is_unwaited, conditions in ((True, 0), (False, 1)):
        partition.is_unwaited = is_unwaited
        written = FsyncDurability().written(groups)
        assert (written.is_sync_due, len(written.syncing), groups[0].conditions) == (
            not is_unwaited,
            conditions,
            conditions,
        )


def test_who_waits_is_answered_by_a_sync_wherever_it_published():
    partition, groups = written_groups()
    partition.is_unwaited = True
    groups[0].waiters.append(Told())
    written = FsyncDurability().written(groups)
    assert (written.is_sync_due, written.syncing, groups[0].conditions) == (True, groups, 1)


class Told:
    def publish_ended(self) -> None:
        raise AssertionError("nothing has ended")


@pytest.mark.parametrize(("syncdisk", "due"), [(1, 0), (4, 1)])
def test_a_topic_that_wants_more_does_not_wait_for_the_end_of_the_interval(syncdisk, due):
    _, groups = written_groups(TopicMeta(partition_num=1, syncdisk=syncdisk))
    written = IntervalDurability(1000).written(groups)
    assert (written.is_sync_due, len(written.due), len(written.syncing)) == (True, due, 1 - due)


def test_now_and_then_all_is_synced():
    policy = IntervalDurability(8)
    _, groups = written_groups()
    results = [policy.written(groups) for _ in range(2)]
    policy.sync_begins()
    results.append(policy.written(groups))
    assert [(each.is_sync_due, each.is_sync_timed) for each in results] == [(False, True), (True, True), (False, True)]
    assert not groups[0].conditions
    assert policy.logs_to_sync([], [], ["a", "b"]) == ["a", "b"]
