"""A channel in one partition alone: paused, skipped, emptied and deleted there, and as it is after a restart."""

import pytest

from flintmq.broker.broker import ChannelNotFound, PartitionNotFound
from flintmq.storage import channel_store, create_logs
from flintmq.topic_meta import TopicMeta

META = TopicMeta(partition_num=3)
NUMBERS = (0, 1, 2)


@pytest.fixture
def topic(disk):
    return create(disk)


def create(disk):
    broker = disk.broker
    topic = broker.create_partitions("t", META, NUMBERS, 1)
    disk.flush()
    while created := broker.take_creations():
        create_logs([creation for new in created for creation in new.creations], True)
        broker.creations_ended(created)
    broker.channel(topic, "c")
    broker.channel(topic, "other")
    publish(disk, topic)
    return topic


def publish(disk, topic):
    for partition in topic.partitions.values():
        disk.broker.publish_to(partition, [b"x"] * (partition.number + 1))
    disk.broker.commit_groups(disk.broker.write_pending(1))


def restart(disk):
    disk.flush()
    disk.die()
    return disk.open().topics["t"]


def state(topic, what, name="c"):
    return {number: getattr(p.channels[name], what) for number, p in topic.partitions.items() if name in p.channels}


@pytest.mark.parametrize("what", ["pause", "skip"])
def test_one_part_is_paused_or_skipped_and_stays_so(disk, topic, what):
    change = getattr(disk.broker, f"{what}_channel")
    attribute = {"pause": "paused", "skip": "skipped"}[what]
    change(topic, "c", True, partition=1)
    assert state(topic, attribute) == {0: False, 1: True, 2: False}
    assert topic.channel_names["c"] is False
    topic = restart(disk)
    assert state(topic, attribute) == {0: False, 1: True, 2: False}
    assert state(topic, attribute, "other") == dict.fromkeys(NUMBERS, False)
    change = getattr(disk.broker, f"{what}_channel")
    change(topic, "c", True)
    assert topic.channel_names == {"c": what == "pause", "other": False}
    change(topic, "c", False, 2)
    topic = restart(disk)
    assert state(topic, attribute) == {0: True, 1: True, 2: False}
    assert topic.channel_names["c"] is False


def test_one_part_is_emptied(disk, topic):
    disk.broker.empty_channel(topic, "c", 1)
    assert state(topic, "depth") == {0: 1, 1: 0, 2: 3}
    assert state(restart(disk), "depth") == {0: 1, 1: 0, 2: 3}


def test_one_part_is_deleted_and_the_others_stay(disk, topic):
    disk.flush()
    there = topic.partitions[1].channels["c"]
    mine = topic.partitions[1].channels["c"].subscriptions
    sentinel = object()
    mine[sentinel] = None
    changes = []
    disk.broker.on_topic_change = lambda *change: changes.append(change)
    assert disk.broker.delete_channel(topic, "c", 1) == [sentinel]
    assert not disk.broker.has(there)
    assert state(topic, "depth") == {0: 1, 2: 3}
    assert state(topic, "depth", "other") == {0: 1, 1: 2, 2: 3}
    assert changes == [("t", "c", True)], "the channel is still to be found"
    publish(disk, topic)
    topic = restart(disk)
    assert state(topic, "depth") == {0: 2, 2: 6}
    disk.broker.channel(topic, "c", numbers=[0])
    assert 1 not in state(topic, "depth"), "who asks for another partition makes no part in this one"
    _, is_new = disk.broker.channel(topic, "c", numbers=[1])
    assert not is_new
    publish(disk, topic)
    assert state(topic, "depth") == {0: 3, 1: 2, 2: 9}, "it begins where it was made again"
    assert state(restart(disk), "depth") == {0: 3, 1: 2, 2: 9}


def test_with_its_last_part_the_channel_is_gone(disk, topic):
    for number in NUMBERS:
        assert "c" in topic.channel_names
        disk.broker.delete_channel(topic, "c", number)
    assert list(topic.channel_names) == ["other"]
    with pytest.raises(ChannelNotFound):
        disk.broker.parts(topic, "c")
    assert list(restart(disk).channel_names) == ["other"]


def test_what_is_not_there_is_refused(disk, topic):
    broker = disk.broker
    broker.delete_channel(topic, "c", 1)
    calls = (
        lambda *where: broker.pause_channel(topic, where[0], True, *where[1:]),
        lambda *where: broker.skip_channel(topic, where[0], True, *where[1:]),
        lambda *where: broker.empty_channel(topic, *where),
        lambda *where: broker.delete_channel(topic, *where),
        lambda *where: broker.parts(topic, *where),
    )
    for call in calls:
        with pytest.raises(PartitionNotFound):
            call("other", 9)
        with pytest.raises(ChannelNotFound):
            call("c", 1)
        with pytest.raises(ChannelNotFound):
            call("nobody")
        with pytest.raises(ChannelNotFound):
            call("nobody", 1)
    assert state(topic, "paused") == {0: False, 2: False}


def test_the_progress_of_a_deleted_part_is_gone(disk, topic):
    channels = disk.broker._channels
    (identity,) = [
        channels.cursor(channel) for channel in topic.channels("c") if channels.partition(channel).number == 1
    ]
    disk.flush()
    disk.broker.delete_channel(topic, "c", 1)
    disk.flush()
    query = disk.broker._store._database.query
    assert not query("SELECT 1 FROM cursor WHERE id = ?", (identity,))
    assert query("SELECT COUNT(*) FROM channel WHERE name = 'c'") == [(2,)]


def test_numbers_of_cursors_are_never_given_to_two_channels(disk):
    """Not even when the row of the first is lost: what else stands under its number would be the second's."""
    broker = disk.broker
    topic = broker.topic("t", 1)
    broker.channel(topic, "ordered")
    broker.order_channel(topic, "ordered", True)
    (channel,) = topic.channels("ordered")
    disk.publish(topic, 5)
    disk.flush()
    channel.window.floor, channel.window.next = 4, 4
    channel.keep_floor(4)
    identity = broker._channels.cursor(channel)
    broker._store.run_transaction(
        [channel_store.delete_channel("t", 0, "ordered"), *channel_store.delete_cursor(identity)], False
    )
    disk.die()
    broker = disk.open()
    topic = broker.topics["t"]
    for number in (1, 2, 3):
        broker.channel(topic, f"c{number}")
    disk.flush()
    disk.die()
    topic = disk.open().topics["t"]
    assert {name: topic.channels(name)[0].floor for name in ("c1", "c2", "c3")} == {"c1": 1, "c2": 6, "c3": 6}
