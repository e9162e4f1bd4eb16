"""Partition: how the publishes of a turn become batches."""

import pytest

from flintmq.broker.partition import Partition
from flintmq.errors import DiskFull
from flintmq.limits import BATCH_COUNT_MAX
from flintmq.storage.memory_log import MemoryLog

MIB = 1024 * 1024


class RecordingLog(MemoryLog):
    """Remembers the appends."""

    def __init__(self):
        super().__init__(0, 10**9)
        self.appends = []

    def append(self, bodies, timestamp_ns, due_ns=0, producer=None):
        self.appends.append((list(bodies), due_ns))
        return super().append(bodies, timestamp_ns, due_ns, producer)


@pytest.fixture
def partition():
    return Partition("t", 0, RecordingLog())


def publish_one(partition, body):
    """As a connection does that publishes one by one."""
    return partition.join(body) or partition.publish((body,), 0)


def sizes(partition):
    return [len(bodies) for bodies, _ in partition.log.appends]


def test_small_publishes_of_a_turn_are_one_batch(partition):
    groups = [
        partition.publish((b"a", b"b"), 0),
        publish_one(partition, b"c"),
        partition.publish([b"d"], 0),
        publish_one(partition, b"e"),
    ]
    group = partition.write_pending(1)
    assert all(each is group for each in groups)
    assert partition.log.appends == [([b"a", b"b", b"c", b"d", b"e"], 0)]
    assert group.end_sequence == 6
    assert partition.bytes_count == 5


def test_the_next_turn_has_a_group_of_its_own(partition):
    first = publish_one(partition, b"a")
    assert partition.write_pending(1) is first
    second = publish_one(partition, b"b")
    assert second is not first
    assert partition.write_pending(1) is second
    assert partition.log.appends == [([b"a"], 0), ([b"b"], 0)]
    assert partition.write_pending(1) is None


def test_the_callers_list_is_not_changed(partition):
    bodies = [b"a"]
    partition.publish(bodies, 0)
    publish_one(partition, b"b")
    assert bodies == [b"a"]


def test_what_a_single_message_can_join(partition):
    assert partition.join(b"a") is None
    partition.publish([b"a"] * 100, 0)
    assert partition.join(b"b") is None
    partition.publish((b"b",), 7)
    assert partition.join(b"c") is None
    group = partition.publish((b"c",), 0)
    assert partition.join(b"d") is group
    partition.write_pending(1)
    assert partition.join(b"e") is None
    assert [bodies for bodies, _ in partition.log.appends] == [[b"a"] * 100, [b"b"], [b"c", b"d"]]


def test_a_large_publish_keeps_its_place(partition):
    publish_one(partition, b"a")
    partition.publish([b"b"] * 100, 0)
    publish_one(partition, b"c")
    partition.write_pending(1)
    assert sizes(partition) == [1, 100, 1]


def test_delayed_messages_share_no_batch_with_others(partition):
    publish_one(partition, b"a")
    partition.publish([b"b"], 7)
    partition.publish([b"c"], 7)
    publish_one(partition, b"d")
    partition.publish([b"e"], 8)
    partition.write_pending(1)
    assert partition.log.appends == [([b"a"], 0), ([b"b", b"c"], 7), ([b"d"], 0), ([b"e"], 8)]


def test_what_is_too_much_for_a_batch_is_cut_between_bodies(partition):
    """Many connections with large messages in one turn."""
    bodies = [bytes([number]) * (MIB // 3) for number in range(10)] + [b"x" * (5 * MIB), b"y"]
    for body in bodies:
        publish_one(partition, body)
    group = partition.write_pending(1)
    assert [body for part, _ in partition.log.appends for body in part] == bodies
    assert all(len(part) == 1 or sum(map(len, part)) <= MIB for part, _ in partition.log.appends)
    assert len(partition.log.appends) == 6
    assert group.end_sequence == 1 + len(bodies)
    assert partition.bytes_count == sum(map(len, bodies))


@pytest.mark.parametrize("count", [BATCH_COUNT_MAX, BATCH_COUNT_MAX + 1, 2 * BATCH_COUNT_MAX, 2 * BATCH_COUNT_MAX + 1])
def test_no_batch_has_too_many_messages(partition, count):
    partition.publish([b"x"] * count, 0)
    partition.write_pending(1)
    assert sum(sizes(partition)) == count
    assert max(sizes(partition)) == BATCH_COUNT_MAX
    assert len(sizes(partition)) == -(-count // BATCH_COUNT_MAX)


def test_a_deleted_partition_ends_what_was_published(partition):
    group = publish_one(partition, b"a")
    partition.delete()
    assert group.ended
    assert group.error is None
    assert partition.write_pending(1) is None
    assert partition.log.appends == []


def test_what_was_stored_before_a_failure_is_delivered(partition, monkeypatch):
    """A restart would find it in the log, so it must not stay behind the committed end."""
    append = partition.log.append

    def fail_when_delayed(bodies, timestamp_ns, due_ns=0):
        if due_ns:
            raise DiskFull("t", 0, 1)
        return append(bodies, timestamp_ns, due_ns)

    monkeypatch.setattr(partition.log, "append", fail_when_delayed)
    group = publish_one(partition, b"a")
    partition.publish((b"b",), 7)
    stored = partition.write_pending(1)
    assert isinstance(group.error, DiskFull)
    assert stored is not group
    assert stored.end_sequence == 2
    assert not stored.ended
    group = partition.publish((b"b",), 7)
    assert partition.write_pending(1) is None
    assert isinstance(group.error, DiskFull)
