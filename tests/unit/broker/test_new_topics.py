"""A topic before its files are there: it takes messages and consumers, which wait for them, and nobody else does."""

import errno
import random

import pytest

from flintmq.broker.broker import TOPICS_DIRECTORY, Broker, BrokerOptions
from flintmq.errors import StorageError
from flintmq.storage import ChannelStore, OsFiles, create_logs


class Kit:
    """A broker on a real directory, and what its owner does between turns."""

    def __init__(self, path):
        self.path = path
        self.files = OsFiles(str(path))
        self.broker = Broker(self.files, ChannelStore(self.files), BrokerOptions(), random.Random(1), print)
        self.broker.open(1)

    def make(self, sync=False):
        taken = self.broker.take_creations()
        create_logs([creation for new in taken for creation in new.creations], sync)
        return taken

    def create(self):
        taken = self.make()
        self.broker.creations_ended(taken)
        return taken

    def turn(self):
        groups = self.broker.write_pending(1)
        self.broker.commit_groups(groups)
        return groups

    def flush(self):
        flush = self.broker.take_flush(0)
        self.broker.flush_ended(flush, self.broker.run_flush(flush, 0, False), None, 0)

    def directories(self):
        return sorted(path.name for path in (self.path / TOPICS_DIRECTORY).glob("*"))

    def close(self):
        self.broker.close()
        self.files.close()


@pytest.fixture
def kit(tmp_path):
    kit = Kit(tmp_path)
    yield kit
    kit.close()


def waiter(kit, topic=None):
    ended: list[object] = []
    assert kit.broker.when_metadata_durable(ended.append, topic)
    return ended


def full(*_):
    raise OSError(errno.ENOSPC, "no space left")


def test_a_publish_waits_for_the_files_of_its_topic_only(kit):
    old = kit.broker.topic("old", 1)
    new = kit.broker.topic("new", 1, later=True)
    waiting, other = kit.broker.publish(new, [b"a"]), kit.broker.publish(old, [b"x"])
    assert kit.turn() == [other]
    assert (other.ended, waiting.ended) == (True, False)
    assert not kit.broker.has_pending, "or the loop would turn and turn"
    later = kit.broker.publish(new, [b"b"])
    assert kit.turn() == []
    kit.create()
    assert kit.broker.has_pending
    assert kit.turn() == [waiting]
    assert later is waiting
    assert waiting.error is None
    assert new.first_partition.log.read(1).header.count == 2


def test_consumers_wait_and_get_what_was_published_before_them(kit):
    topic = kit.broker.topic("t", 1, later=True)
    kit.broker.publish(topic, [b"a", b"b"])
    kit.turn()
    (channel,), _ = kit.broker.channel(topic, "c")
    ended = waiter(kit, topic)
    kit.flush()
    assert ended == [], "its files are not there"
    kit.create()
    kit.turn()
    assert channel.depth == 2
    assert ended == [], "the database does not know it"
    kit.flush()
    assert ended == [None]


def test_it_is_there_after_a_kill(kit, tmp_path):
    topic = kit.broker.topic("t", 1, later=True)
    group = kit.broker.publish(topic, [b"a"])
    kit.create()
    kit.turn()
    assert group.ended
    kit.files.close()  # and nothing else is written
    again = Kit(tmp_path)
    assert again.broker.get_topic("t").depth == 1
    again.close()


def test_one_that_cannot_be_made_refuses_what_waits_and_can_be_tried_again(kit, monkeypatch):
    broker = kit.broker
    topic = broker.topic("t", 1, later=True)
    group = broker.publish(topic, [b"a"])
    broker.channel(topic, "c")
    ended = waiter(kit, topic)
    with monkeypatch.context() as patch:
        patch.setattr("flintmq.storage.creation.begin", full)
        kit.create()
    assert isinstance(group.error, StorageError)
    assert "cannot create topic t" in str(group.error)
    assert ended == [group.error]
    assert broker.write_error is group.error
    assert "t" not in broker.topics
    assert topic.first_partition.is_deleted
    again = broker.topic("t", 1, later=True)
    assert again is not topic
    stored = broker.publish(again, [b"b"])
    kit.create()
    kit.turn()
    assert stored.error is None
    kit.flush()
    assert again.channel_names == {}


def test_a_refusal_leaves_nothing_for_the_database(kit, monkeypatch):
    """Or the next SUB anywhere would wait for a database that may be full as well."""
    kit.flush()
    kit.broker.topic("t", 1, starting=True, later=True)
    monkeypatch.setattr("flintmq.storage.creation.begin", full)
    kit.create()
    assert not kit.broker.when_metadata_durable(print)


def test_what_a_failed_creation_left_is_used(kit, monkeypatch):
    topic = kit.broker.topic("t", 1, later=True)
    with monkeypatch.context() as patch:
        patch.setattr("flintmq.storage.segment.Segment.create", full)
        kit.create()
    assert "t" not in kit.broker.topics
    assert kit.directories() == ["t-t"]
    topic = kit.broker.topic("t", 1, later=True)
    group = kit.broker.publish(topic, [b"a"])
    kit.create()
    assert kit.turn() == [group]


def test_deleted_before_it_was_begun(kit):
    topic = kit.broker.topic("t", 1, later=True)
    group = kit.broker.publish(topic, [b"a"])
    kit.broker.delete_topic("t")
    assert (group.ended, group.error) == (True, None)
    assert not kit.broker.has_creations
    assert kit.directories() == []


def test_deleted_while_its_files_are_made(kit):
    """The answer waits until they are out of the way, and a new topic of that name begins with nothing."""
    topic = kit.broker.topic("t", 1, later=True)
    taken = kit.make()
    kit.broker.delete_topic("t")
    ended = waiter(kit)
    again = kit.broker.topic("t", 1, later=True)
    group = kit.broker.publish(again, [b"new"])
    kit.flush()
    assert ended == []
    kit.broker.creations_ended(taken)
    assert kit.directories() == ["deleted-1-t-t"]
    kit.flush()
    assert ended == [None]
    assert kit.directories() == []
    kit.create()
    assert kit.turn() == [group]
    assert again.first_partition.log.next_sequence == 2
    assert topic.first_partition.log.failed


def test_no_more_are_made_at_once_than_a_few(kit):
    for number in range(40):
        kit.broker.topic(f"t{number}", 1, later=True)
    counts = []
    while kit.broker.has_creations:
        counts.append(len(kit.create()))
    assert counts == [16, 16, 8]
    assert len(kit.directories()) == 40


def test_much_for_one_topic_is_written_over_several_turns(kit):
    """So that others have a turn in between; each publish ends when all of it is written."""
    topic = kit.broker.topic("t", 1)
    group = kit.broker.publish(topic, [bytes(1000)] * 5000)
    after = kit.broker.publish(topic, [b"after"])
    turns = 0
    while not group.ended:
        kit.turn()
        turns += 1
    assert turns >= 3
    while not after.ended:
        kit.turn()
    assert group.end_sequence == 5001
    assert topic.depth == 5001


def test_a_flood_does_not_wait_for_ever(kit):
    """Each turn brings more than is written in it at first; what waits stays within four times that."""
    topic = kit.broker.topic("t", 1)
    for _ in range(12):
        for _ in range(8):
            kit.broker.publish(topic, [bytes(100_000)] * 10)
        kit.turn()
        assert topic.first_partition.pending_weight < 5 * 8_100_000


def test_of_very_many_channels_new_ones_come_first(kit):
    broker = kit.broker
    topics = [broker.topic(f"t{number}#ephemeral", 1) for number in range(400)]
    channels = [broker.channel(topic, "c")[0][0] for topic in topics]
    first = broker.pump(0, 0)
    assert len(first) < 200
    broker.mark(channels[399])
    seen = broker.pump(0, 0)
    assert seen[0] is channels[399]
    seen += first
    while broker.has_marked:
        seen += broker.pump(0, 0)
    assert set(seen) == set(channels)
