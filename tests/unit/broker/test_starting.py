"""A starting topic: it takes messages and hands out none until it is known which channels there must be."""

import pytest


def depths(topic):
    return {name: topic.channels(name)[0].depth for name in topic.channel_names}


def test_every_channel_begins_with_the_first_message(disk):
    broker = disk.broker
    topic = broker.topic("t", 1, starting=True)
    disk.publish(topic, 2)
    broker.channel(topic, "first")
    disk.publish(topic, 1)
    broker.channel(topic, "second")
    assert (topic.depth, depths(topic)) == (3, {"first": 0, "second": 0})
    broker.start_topic(topic)
    assert (topic.depth, depths(topic)) == (0, {"first": 3, "second": 3})
    broker.channel(topic, "late")
    disk.publish(topic, 1)
    assert depths(topic) == {"first": 4, "second": 4, "late": 1}
    assert broker.has_marked, "the channels are looked at"


def test_a_start_without_channels_leaves_the_backlog_to_the_first(disk):
    topic = disk.broker.topic("t", 1, starting=True)
    disk.publish(topic, 2)
    disk.broker.start_topic(topic)
    assert topic.depth == 2
    disk.broker.channel(topic, "c")
    assert depths(topic) == {"c": 2}


@pytest.mark.parametrize("flushed", [True, False])
def test_a_topic_that_dies_while_starting_is_starting_again(disk, flushed):
    topic = disk.broker.topic("t", 1, starting=True)
    disk.publish(topic, 2)
    if flushed:
        disk.broker.channel(topic, "first")
        disk.flush()
        disk.publish(topic, 1)
    disk.die()
    topic = disk.open().topics["t"]
    assert topic.is_starting
    disk.broker.channel(topic, "ahead")
    disk.broker.start_topic(topic)
    assert depths(topic) == ({"first": 3, "ahead": 3} if flushed else {"ahead": 2})
    disk.flush()
    disk.die()
    topic = disk.open().topics["t"]
    assert not topic.is_starting
    assert depths(topic) == ({"first": 3, "ahead": 3} if flushed else {"ahead": 2})


def test_paused_while_starting(disk):
    broker = disk.broker
    topic = broker.topic("t", 1, starting=True)
    disk.publish(topic, 2)
    broker.pause_topic(topic, True)
    broker.channel(topic, "c")
    broker.start_topic(topic)
    assert (topic.depth, depths(topic)) == (2, {"c": 0})
    disk.flush()
    disk.die()
    topic = disk.open().topics["t"]
    assert topic.paused and not topic.is_starting
    disk.broker.pause_topic(topic, False)
    assert (topic.depth, depths(topic)) == (0, {"c": 2})


def test_unpaused_while_starting_is_starting_still(disk):
    broker = disk.broker
    topic = broker.topic("t", 1, starting=True)
    broker.pause_topic(topic, True)
    broker.pause_topic(topic, False)
    disk.publish(topic, 2)
    broker.channel(topic, "c")
    assert depths(topic) == {"c": 0}
    broker.start_topic(topic)
    assert depths(topic) == {"c": 2}


def test_emptied_while_nothing_is_handed_out(disk):
    broker = disk.broker
    for topic in (broker.topic("starting", 1, starting=True), broker.topic("paused", 1)):
        broker.pause_topic(topic, topic.name == "paused")
        disk.publish(topic, 2)
        broker.empty_topic(topic)
        assert topic.depth == 0
        broker.channel(topic, "a")
        broker.channel(topic, "b")
        disk.publish(topic, 1)
        broker.start_topic(topic)
        broker.pause_topic(topic, False)
        assert depths(topic) == {"a": 1, "b": 1}


def test_the_last_channel_takes_along_only_what_it_was_given(disk):
    broker = disk.broker
    topic = broker.topic("t", 1)
    broker.channel(topic, "c")
    disk.publish(topic, 2)
    broker.pause_topic(topic, True)
    disk.publish(topic, 3)
    broker.delete_channel(topic, "c")
    assert topic.depth == 3
    broker.pause_topic(topic, False)
    broker.channel(topic, "d")
    assert depths(topic) == {"d": 3}


def test_a_topic_is_started_once(disk):
    topic = disk.broker.topic("t", 1)
    disk.broker.pause_topic(topic, True)
    disk.broker.start_topic(topic)
    assert topic.partitions[0].paused_at is not None, "a start does not end a pause"
    assert disk.broker.topic("t", 1, starting=True) is topic
    assert not topic.is_starting
