"""A topic is held until the database knows a new channel, so that who subscribed to it can be answered before."""

import errno

import msgspec
import pytest
from tests.unit.broker.world import BrokerWorld

from flintmq.errors import StorageError
from flintmq.storage import create_logs
from flintmq.topic_meta import PLAIN, TopicMeta

DISK = OSError("disk")


def new_world(meta=None):
    world = BrokerWorld()
    topic = world.create("t", meta)
    world.create_channel("t", "old")
    return world, topic


def subscribe(world, topic, name):
    """Make a channel and hold the topic for it; what was told of its end."""
    told: list[object] = []
    world.broker.channel(topic, name)
    assert world.broker.hold_until_durable(topic, told.append)
    return told


def turn(world):
    groups = world.broker.write_pending(1)
    world.broker.commit_groups(groups)
    return groups


@pytest.mark.parametrize("meta", [None, TopicMeta(partition_num=2)])
def test_what_is_published_waits_for_the_channel(meta):
    world, topic = new_world(meta)
    told = subscribe(world, topic, "c")
    groups = [world.broker.publish_to(partition, [b"a"]) for partition in topic.partitions.values()]
    assert turn(world) == [] and told == []
    assert world.broker.has_held and not world.broker.has_pending, "or the loop would turn and turn"
    world.flush()
    assert told == [None] and not any(group.ended for group in groups)
    assert turn(world) == groups
    assert [group.error for group in groups] == [None] * len(groups)
    assert not world.broker.has_held
    assert all(partition.channels["c"].depth == 1 for partition in topic.partitions.values())
    world.die(False)
    assert all(each.depth == 1 for each in world.broker.topics["t"].channels("c"))


@pytest.mark.parametrize("power_loss", [False, True])
def test_a_death_while_it_is_held(power_loss):
    """The channel is not there, and nothing that was published after it is either."""
    world, topic = new_world()
    world.publish("t", [b"before"])
    subscribe(world, topic, "c")
    group = world.broker.publish(topic, [b"never answered"])
    assert turn(world) == [] and not group.ended
    world.die(power_loss)
    topic = world.broker.topics["t"]
    assert list(topic.channel_names) == ["old"]
    assert topic.first_partition.log.next_sequence == 2


def test_not_while_something_is_under_way():
    """It may be acknowledged before the channel is stored."""
    world, topic = new_world()
    partition = topic.first_partition
    world.broker.channel(topic, "c")
    group = world.broker.publish(topic, [b"a"])
    assert not world.broker.hold_until_durable(topic, print), "published"
    world.broker.write_pending(1)
    assert not world.broker.hold_until_durable(topic, print), "written"
    assert not partition.is_held
    world.broker.commit_groups([group])
    assert world.broker.hold_until_durable(topic, lambda _error: None) and partition.is_held
    world.broker.publish(topic, [b"b"])
    world.broker.channel(topic, "d")
    assert not world.broker.hold_until_durable(topic, print), "or new channels could hold it for ever"
    world.flush()
    assert not partition.is_held


def test_not_while_a_part_of_a_publish_is_written():
    world, topic = new_world()
    world.broker.publish(topic, [bytes(1000)] * 5000)
    world.broker.write_pending(1)
    assert world.broker.has_pending
    assert not world.broker.hold_until_durable(topic, print)


def test_several_channels_at_once():
    world, topic = new_world()
    first = subscribe(world, topic, "c")
    flush = world.take_flush()
    second = subscribe(world, topic, "d")
    group = world.broker.publish(topic, [b"a"])
    world.end_flush(flush, world.run_flush(flush))
    assert (first, second) == ([None], [])
    assert turn(world) == [], "the other one is not stored"
    world.flush()
    assert second == [None]
    assert turn(world) == [group]


@pytest.mark.parametrize("is_channel_first", [True, False])
def test_a_topic_that_gets_headers_at_the_same_time(is_channel_first):
    world, topic = new_world()
    upgraded = msgspec.structs.replace(PLAIN, extend_support=True, version=1)
    if is_channel_first:
        subscribe(world, topic, "c")
        flush = world.take_flush()
        world.broker.change_meta(topic, upgraded)
    else:
        world.broker.change_meta(topic, upgraded)
        flush = world.take_flush()
        subscribe(world, topic, "c")
    group = world.broker.publish(topic, [b"a"])
    world.end_flush(flush, world.run_flush(flush))
    assert turn(world) == [] and topic.first_partition.is_held
    world.flush()
    assert turn(world) == [group] and not topic.first_partition.is_held


def test_when_the_database_cannot_take_it():
    """Who was answered is told before anything that waits is stored; the topic goes on, the channel is tried again."""
    world, topic = new_world()
    told: list[object] = []

    def done(error):
        told.append(error)
        assert topic.first_partition.is_held and not group.ended

    world.broker.channel(topic, "c")
    assert world.broker.hold_until_durable(topic, done)
    group = world.broker.publish(topic, [b"a"])
    turn(world)
    world.end_flush(world.take_flush(), [], DISK)
    assert told == [DISK] and not topic.first_partition.is_held
    assert turn(world) == [group] and group.error is None
    world.flush()
    world.die(True)
    assert "c" in world.broker.topics["t"].channel_names


def test_headers_that_cannot_be_recorded_keep_their_hold():
    world, topic = new_world()
    told = subscribe(world, topic, "c")
    world.broker.change_meta(topic, msgspec.structs.replace(PLAIN, extend_support=True, version=1))
    group = world.broker.publish(topic, [b"a"])
    world.end_flush(world.take_flush(), [], DISK)
    assert told == [DISK] and isinstance(group.error, StorageError)
    assert topic.first_partition.is_held
    world.flush()
    assert not topic.first_partition.is_held and topic.first_partition.is_open


def test_who_fails_to_be_told_leaves_nothing_held(monkeypatch):
    world, topic = new_world()
    defects: list[str] = []
    monkeypatch.setattr(world.broker, "on_defect", lambda what, _error: defects.append(what))
    world.broker.channel(topic, "c")
    assert world.broker.hold_until_durable(topic, lambda _error: 1 // 0)
    world.flush()
    assert defects == ["telling that a change is stored"]
    assert not topic.first_partition.is_held


def test_a_channel_deleted_meanwhile():
    world, topic = new_world()
    told = subscribe(world, topic, "c")
    group = world.broker.publish(topic, [b"a"])
    world.broker.delete_channel(topic, "c")
    world.flush()
    assert told == [None] and turn(world) == [group]
    world.die(True)
    assert list(world.broker.topics["t"].channel_names) == ["old"]


def test_a_topic_deleted_meanwhile():
    """What waits counts as published before; a new topic of that name has nothing to do with it."""
    world, topic = new_world()
    told = subscribe(world, topic, "c")
    group = world.broker.publish(topic, [b"a"])
    world.broker.delete_topic("t")
    assert group.ended and group.error is None
    again = world.broker.topic("t", 1)
    world.flush()
    assert told == [None]
    assert not topic.first_partition.is_open and not again.first_partition.is_held and again.first_partition.is_open


def test_a_new_topic():
    """Held longer than its files are missing."""
    world = BrokerWorld()
    topic = world.broker.topic("t", 1, later=True)
    told = subscribe(world, topic, "c")
    group = world.broker.publish(topic, [b"a"])
    assert turn(world) == []
    taken = world.broker.take_creations()
    create_logs([creation for new in taken for creation in new.creations], True)
    world.broker.creations_ended(taken)
    assert turn(world) == [], "the channel is not stored"
    world.flush()
    assert told == [None] and turn(world) == [group]


def test_a_new_topic_that_cannot_be_made():
    world = BrokerWorld()
    topic = world.broker.topic("t", 1, later=True)
    told = subscribe(world, topic, "c")
    group = world.broker.publish(topic, [b"a"])
    taken = world.broker.take_creations()
    for new in taken:
        for creation in new.creations:
            creation.error = DISK
    world.broker.creations_ended(taken)
    assert isinstance(group.error, StorageError) and isinstance(told[0], StorageError) and len(told) == 1
    assert "t" not in world.broker.topics


def test_a_partition_that_is_added_meanwhile_is_held_too():
    meta = TopicMeta(partition_num=2)
    world = BrokerWorld()
    topic = world.broker.create_partitions("t", meta, [0], 1)
    world.flush()
    taken = world.broker.take_creations()
    create_logs([creation for new in taken for creation in new.creations], True)
    world.broker.creations_ended(taken)
    world.flush()
    told = subscribe(world, topic, "c")
    world.broker.create_partitions("t", meta, [1], 1)
    group = world.broker.publish_to(topic.partitions[1], [b"a"])
    assert turn(world) == []
    world.flush()
    assert told == [None]
    assert not any(partition.is_held for partition in topic.partitions.values())
    assert turn(world) == [group]


def test_nothing_is_held_when_all_is_stored_already():
    world, topic = new_world()
    told: list[object] = []
    assert world.broker.hold_until_durable(topic, told.append)
    assert told == [None] and not topic.first_partition.is_held


@pytest.mark.parametrize("error", [None, DISK])
def test_a_change_that_is_being_written_is_not_durable(error):
    """Whoever asks while its flush runs waits for the end of it."""
    world, topic = new_world()
    world.broker.channel(topic, "c")
    flush = world.take_flush()
    told: list[object] = []
    assert world.broker.when_metadata_durable(told.append)
    answers = world.run_flush(flush)
    assert told == []
    world.end_flush(flush, answers, error)
    assert told == [error]
    assert world.broker.when_metadata_durable(print) is (error is not None)


def test_a_partition_held_twice_is_open_when_both_have_let_go():
    world, topic = new_world()
    partition = topic.first_partition
    partition.hold()
    partition.hold()
    partition.release()
    assert partition.is_held and not partition.is_writable and not partition.is_open
    partition.release()
    assert partition.is_writable and partition.is_open
    partition.hold()
    world.broker.delete_topic("t")
    partition.release()
    assert not partition.is_open


def test_not_while_the_disk_fails():
    """It would be answered now and dismissed in a moment."""
    world, topic = new_world()
    world.disk.fail("write", times=1, error=errno.ENOSPC)
    world.broker.publish(topic, [b"a"])
    turn(world)
    assert world.broker.write_error is not None
    world.broker.channel(topic, "c")
    assert not world.broker.hold_until_durable(topic, print)
    new = world.broker.topic("new", world.clock.wall_ns(), later=True)
    world.broker.publish(new, [b"waits for the files of its topic"])
    turn(world)
    assert world.broker.write_error is not None, "nothing was stored since"
    world.publish("t", [b"b"])
    world.broker.channel(topic, "d")
    assert world.broker.hold_until_durable(topic, print)
