"""Directories of a topic that no row tells of, such as copies that were set aside: what the topic is, is found out."""

import msgspec
import pytest
from tests.unit.broker.world import SECOND, BrokerWorld

from flintmq.message import EMPTY_HEADERS
from flintmq.topic_meta import PLAIN, TopicMeta

PARTED = TopicMeta(partition_num=3)
EXTENDED = TopicMeta(partition_num=3, extend_support=True)


def moved(source, numbers, world=None):
    """Put partitions of a topic into another data directory, as an operator does, and start on it."""
    world = world or BrokerWorld()
    world.broker.close()
    world.files.close()
    read, write = source.files, world.disk.attach()
    for number in numbers:
        directory = f"topics/t-t/p-{number:04d}"
        for name in ("topics", "topics/t-t", directory):
            write.make_directory(name)
        for name in read.list(directory):
            data = read.open(f"{directory}/{name}")
            copy = write.open(f"{directory}/{name}", create=True)
            copy.write_at(0, data.read_at(0, data.size()))
            copy.sync()
    write.close()
    world.open()
    world.flush()
    return world


def filled(meta, counts=(5, 4, 3)):
    world = BrokerWorld()
    world.create("t", meta)
    for number, count in enumerate(counts):
        world.publish("t", [b"%d-%d" % (number, each) for each in range(count)], number)
    world.restart()
    return world


def drained(world):
    """Start the topic, and consume all of it; bodies with what is in front of them."""
    topic = world.broker.topics["t"]
    world.create_channel("t", "back")
    world.broker.start_topic(topic)
    world.flush()
    consumer = world.subscribe("t", "back")
    consumer.ready(100)
    found = consumer.received()
    assert consumer.finish(each.internal for each in found) == []
    assert consumer.received() == [] and not sum(each.depth for each in topic.channels("back"))
    return sorted(each.body for each in found)


@pytest.mark.parametrize("numbers", [(0, 1, 2), (2,), (0, 2)])
@pytest.mark.parametrize("meta", [PARTED, EXTENDED])
def test_partitions_that_were_put_here_are_drained_once(meta, numbers):
    world = moved(filled(meta), numbers)
    for _ in range(2):  # what was found out is written down
        topic = world.broker.topics["t"]
        assert list(topic.partitions) == list(numbers)
        assert topic.meta == msgspec.structs.replace(meta, partition_num=numbers[-1] + 1)
        world.restart()
    front = EMPTY_HEADERS if meta.extend_support else b""
    expected = [front + b"%d-%d" % (number, each) for number in numbers for each in range(5 - number)]
    assert drained(world) == sorted(expected)


def test_a_plain_topic_that_was_put_here_is_plain():
    source = BrokerWorld()
    source.create("t")
    source.publish("t", [b"1", b"2"])
    source.restart()
    world = moved(source, [0])
    assert world.broker.topics["t"].meta == PLAIN
    assert drained(world) == [b"1", b"2"]


@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("later", [0, 1, 4])
def test_it_is_found_out_from_where_on_there_are_headers(count, later):
    source = BrokerWorld()
    topic = source.create("t", PARTED)
    for each in range(count):
        source.publish("t", [b"%d" % each], 0)
    source.broker.change_meta(topic, msgspec.structs.replace(PARTED, extend_support=True, version=1))
    source.flush()
    for each in range(later):
        source.publish("t", [b"%d" % each], 0)
    source.publish("t", [b"other"], 1)
    source.restart()
    world = moved(source, [0, 1])
    for _ in range(2):
        topic = world.broker.topics["t"]
        assert topic.meta.extend_support
        assert [part.headers_from for part in topic.partitions.values()] == [count + 1, 0]
        world.restart()


def test_what_does_not_fit_the_topic_is_told_of_and_not_delivered():
    """The nsqd was started with its topic before: a plain one, of which a row tells."""
    world = BrokerWorld()
    world.create("t")
    world.create_channel("t", "back")
    world.restart()
    for name in world.files.list("topics/t-t/p-0000"):
        world.files.remove(f"topics/t-t/p-0000/{name}")
    world = moved(filled(PARTED), [0], world)
    assert world.broker.topics["t"].meta == PLAIN
    consumer = world.subscribe("t", "back")
    consumer.ready(100)
    world.pass_time(5 * SECOND)
    assert consumer.received() == []
    assert world.channel("t", "back").depth == 5
    text = str(world.problems[0])
    assert "topics/t-t/p-0000: messages from sequence 1 on are those of a topic with partitions" in text
    assert "a plain topic" in text and "data directory that is empty" in text
