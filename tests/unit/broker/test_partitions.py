"""Topics with partitions in the broker: created, restored, refused; one consumer of all of them."""

import errno
import random
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.sim.disk import CrashingDisk
from tests.unit.broker.world import BrokerWorld

from flintmq.batch import RAW_IDS
from flintmq.broker.broker import TOPICS_DIRECTORY, Broker, BrokerOptions, TopicConflict
from flintmq.broker.retention import DAY_NS, Retention, drop_consumed
from flintmq.broker.seek import Place, seek
from flintmq.broker.shared_subscription import ChannelParts, PartSubscription, SharedSubscription
from flintmq.message import internal_id, partition_of
from flintmq.storage import ChannelStore, OsFiles, create_logs
from flintmq.storage.recovery import begin
from flintmq.topic_meta import PLAIN, TopicMeta

SECOND = 1_000_000_000
META = TopicMeta(partition_num=4, retention_days=2)


class Kit:
    """A broker on a real directory, and what its owner does between turns."""

    def __init__(self, path):
        self.path = path
        self.open()

    def open(self, **options):
        self.files = OsFiles(str(self.path))
        broker_options = BrokerOptions(**options)
        self.broker = Broker(self.files, ChannelStore(self.files), broker_options, random.Random(1), print)
        self.broker.open(1)

    def die(self):
        self.broker.close()
        self.files.close()

    def reopen(self):
        self.die()
        self.open()
        return self.broker

    def flush(self, error=None):
        flush = self.broker.take_flush(0)
        answers = [] if error else self.broker.run_flush(flush, 0, False)
        self.broker.flush_ended(flush, answers, error, 0)

    def make_files(self):
        taken = self.broker.take_creations()
        create_logs([creation for new in taken for creation in new.creations], False)
        self.broker.creations_ended(taken)
        return len(taken)

    def create(self, name="t", meta=META, numbers=(0, 2)):
        topic = self.broker.create_partitions(name, meta, numbers, 1)
        self.flush()
        self.make_files()
        self.flush()
        return topic

    def turn(self, now=1):
        self.broker.commit_groups(self.broker.write_pending(now))
        self.broker.pump(now, now)

    def directories(self):
        return sorted(path.name for path in (self.path / TOPICS_DIRECTORY).glob("*/*"))


@pytest.fixture
def kit(tmp_path):
    kit = Kit(tmp_path)
    yield kit
    kit.die()


def test_what_it_was_created_with_outlives_the_process(kit):
    kit.create()
    topic = kit.reopen().topics["t"]
    assert (topic.meta, list(topic.partitions)) == (META, [0, 2])
    assert all(partition.log.layout == RAW_IDS and partition.meta == META for partition in topic.partitions.values())


def test_a_plain_topic_has_none_of_it(kit):
    topic = kit.broker.topic("t", 1)
    assert (topic.meta, topic.first_partition.log.layout) == (PLAIN, 0)


def test_files_are_made_when_the_database_knows_what_they_are_for(kit):
    kit.broker.create_partitions("t", META, [0, 2], 1)
    assert not kit.broker.has_creations
    kit.flush()
    assert (kit.broker.has_creations, kit.directories()) == (True, [])
    kit.make_files()
    assert kit.directories() == ["p-0000", "p-0002"]


def test_killed_before_its_files_are_made_it_has_them_after_the_start(kit):
    kit.broker.create_partitions("t", META, [0, 2], 1)
    kit.flush()
    assert list(kit.reopen().topics["t"].partitions) == [0, 2]
    assert kit.directories() == ["p-0000", "p-0002"]


def test_killed_before_the_database_knew_it_never_was(kit):
    kit.broker.create_partitions("t", META, [0, 2], 1)
    assert "t" not in kit.reopen().topics


def test_a_database_that_does_not_take_it_refuses_the_topic(kit):
    topic = kit.broker.create_partitions("t", META, [0], 1)
    group = kit.broker.publish(topic, [b"x"])
    ended: list[object] = []
    kit.broker.when_metadata_durable(ended.append, topic)
    kit.flush(OSError(errno.EIO, "no"))
    assert "t" not in kit.broker.topics
    assert (group.ended, str(group.error), len(ended)) == (True, "cannot create topic t: [Errno 5] no", 1)
    kit.flush()
    assert "t" not in kit.reopen().topics


def test_files_that_cannot_all_be_made_leave_none(kit, monkeypatch):
    real = begin

    def one_only(home):
        if home.partition:
            raise OSError(errno.ENOSPC, "no space left")
        return real(home)

    monkeypatch.setattr("flintmq.storage.creation.begin", one_only)
    topic = kit.broker.create_partitions("t", META, [0, 1], 1)
    ended: list[object] = []
    kit.broker.when_metadata_durable(ended.append, topic)
    kit.flush()
    kit.make_files()
    assert "t" not in kit.broker.topics
    assert "disk full" in str(ended[0])
    monkeypatch.undo()
    kit.flush()
    assert (kit.directories(), "t" in kit.reopen().topics) == ([], False)
    assert list(kit.create(numbers=[0, 1]).partitions) == [0, 1], "the next who asks tries again"


def test_one_that_is_being_created_gets_no_further_partitions(kit):
    kit.broker.create_partitions("t", META, [0], 1)
    kit.broker.create_partitions("t", META, [0], 1)
    with pytest.raises(TopicConflict, match="being created"):
        kit.broker.create_partitions("t", META, [1], 1)


def test_what_it_was_created_with_survives_a_power_loss_whatever_the_policy():
    disk = CrashingDisk(rng=random.Random(1))
    files = disk.attach()
    broker = Broker(files, ChannelStore(files), BrokerOptions(), random.Random(1), print)
    broker.open(1)
    broker.create_partitions("t", META, [0, 2], 1)
    flush = broker.take_flush(0)
    broker.flush_ended(flush, broker.run_flush(flush, 0, False), None, 0)
    disk.crash(True, random.Random(1))
    files = disk.attach()
    broker = Broker(files, ChannelStore(files), BrokerOptions(), random.Random(1), print)
    broker.open(1)
    assert list(broker.topics["t"].partitions) == [0, 2]


def test_deleted_before_its_files_are_made(kit):
    kit.broker.create_partitions("t", META, [0, 1], 1)
    kit.broker.delete_topic("t")
    kit.flush()
    assert kit.make_files() == 0
    assert "t" not in kit.reopen().topics


def test_deleting_it_forgets_what_it_was(kit):
    kit.create()
    kit.broker.delete_topic("t")
    kit.flush()
    kit.broker.topic("t", 1)
    kit.flush()
    assert kit.reopen().topics["t"].meta == PLAIN


def test_the_same_again_changes_nothing(kit):
    assert kit.create() is kit.create()


@pytest.mark.parametrize("meta", [TopicMeta(partition_num=5), TopicMeta(partition_num=4, ordered=True)])
def test_another_one_of_that_name_is_refused(kit, meta):
    kit.create()
    with pytest.raises(TopicConflict, match="with other properties"):
        kit.broker.create_partitions("t", meta, [0], 1)


def test_a_plain_one_of_that_name_is_refused(kit):
    kit.broker.topic("t", 1)
    with pytest.raises(TopicConflict, match="without partitions"):
        kit.broker.create_partitions("t", META, [0], 1)


def test_partitions_that_are_added_have_the_channels_from_their_first_message_on(kit):
    topic = kit.create(numbers=[2])
    kit.broker.channel(topic, "c")
    kit.broker.create_partitions("t", META, [0, 2], 1)
    kit.broker.publish_to(topic.partitions[0], [b"x"])
    kit.turn()
    kit.flush()
    for found in (topic, kit.reopen().topics["t"]):
        assert list(found.partitions) == [0, 2]
        assert [channel.depth for channel in found.channels("c")] == [1, 0]


def test_publishes_go_round(kit):
    topic = kit.create(numbers=[0, 1, 3])
    for _ in range(6):
        kit.broker.publish(topic, [b"x"])
    kit.turn()
    assert [partition.message_count for partition in topic.partitions.values()] == [2, 2, 2]


def test_ids_on_the_wire_are_internal_id_and_trace_id(kit):
    topic = kit.create()
    kit.broker.publish_to(topic.partitions[2], [b"x", b"yy"])
    kit.turn()
    frames = bytes(topic.partitions[2].log.read(1).frames(1, 3))
    assert frames[18:34] == struct.pack(">QQ", internal_id(2, 1), 0)
    assert frames[35 + 18 : 35 + 34] == struct.pack(">QQ", internal_id(2, 2), 0)


def test_days_of_the_topic_come_before_the_time_of_the_node(tmp_path):
    kit = Kit(tmp_path)
    kit.die()
    kit.open(segment_bytes=1000, retention_time_ns=SECOND)
    partition = kit.create(numbers=[0]).partitions[0]
    kit.broker.channel(kit.broker.topics["t"], "c")
    for _ in range(5):
        kit.broker.publish_to(partition, [b"x" * 600])
        kit.turn(DAY_NS)
    partition.channels["c"].confirm(6)
    partition.durable_floor = 6
    drop_consumed(partition, Retention(SECOND, 0), 3 * DAY_NS)
    assert partition.log.start_sequence == 1, "two days old, not older"
    drop_consumed(partition, Retention(SECOND, 0), 3 * DAY_NS + 1)
    assert partition.log.start_sequence == 5
    kit.die()


class PartsMachine(RuleBasedStateMachine):
    """One consumer of three partitions and one of a single one, against a model of what each holds."""

    @initialize(rdy_count=st.integers(1, 4))
    def begin(self, rdy_count):
        self.directory = tempfile.TemporaryDirectory()
        self.kit = Kit(Path(self.directory.name))
        self.topic = self.kit.create(meta=TopicMeta(partition_num=3), numbers=[0, 1, 2])
        self.kit.broker.channel(self.topic, "c")
        self.published, self.finished, self.held = {}, set(), {}
        self.connect(rdy_count)

    def teardown(self):
        self.kit.die()
        self.directory.cleanup()

    def connect(self, rdy_count):
        channels = {number: partition.channels["c"] for number, partition in self.topic.partitions.items()}
        out: list[bytes | memoryview] = []
        parts = {number: PartSubscription(out, 60 * SECOND, 900 * SECOND) for number in channels}
        self.shared, self.channels = SharedSubscription(list(parts.values())), ChannelParts(channels, parts)
        self.parts, self.out = parts, out
        for number, channel in channels.items():
            channel.add(parts[number])
        self.shared.rdy_count = rdy_count
        self.shared.is_open = True
        self.look()

    def look(self):
        self.kit.broker.mark_in_turn(self.channels.in_turn())
        self.kit.turn()
        data = b"".join(bytes(part) for part in self.out)
        self.out.clear()
        while data:
            size, internal = struct.unpack_from(">I14xQ", data)
            assert internal not in self.held and internal not in self.finished
            self.held[internal] = True
            assert data[34 : size + 4] == self.published[internal]
            data = data[size + 4 :]
        assert self.shared.in_flight_count == len(self.held) <= max(self.shared.rdy_count, self.over)
        self.over = len(self.held)
        waiting = len(self.published) - len(self.finished) - len(self.held)
        assert not waiting or self.shared.capacity <= 0, "nothing waits while there is room"

    over = 0

    @rule(number=st.integers(0, 2), count=st.integers(1, 4))
    def publish(self, number, count):
        first = self.topic.partitions[number].log.next_sequence
        bodies = [b"%d-%d" % (number, first + i) for i in range(count)]
        self.published |= {internal_id(number, first + i): body for i, body in enumerate(bodies)}
        self.kit.broker.publish_to(self.topic.partitions[number], bodies)
        self.look()

    @rule(data=st.data())
    def finish(self, data):
        if self.held:
            some = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True, min_size=1))
            assert self.channels.finish(self.shared, tuple(some)) == []
            self.finished |= set(some)
            for internal in some:
                del self.held[internal]
            self.look()

    @rule(data=st.data())
    def finish_what_is_not_held(self, data):
        strange = data.draw(st.sampled_from([internal_id(7, 1), internal_id(0, 10_000), *sorted(self.finished)]))
        assert self.channels.finish(self.shared, (strange,)) == [strange]
        assert not self.channels.is_in_flight(strange)
        assert not self.channels.requeue(self.shared, strange, 0, 1)
        assert not self.channels.touch(self.shared, strange, 1)

    @rule(data=st.data())
    def requeue(self, data):
        if self.held:
            internal = data.draw(st.sampled_from(sorted(self.held)))
            assert self.channels.touch(self.shared, internal, 1)
            assert self.channels.is_in_flight(internal)
            assert self.channels.requeue(self.shared, internal, 0, 1)
            del self.held[internal]
            self.look()

    @rule(rdy_count=st.integers(0, 5))
    def ready(self, rdy_count):
        self.shared.rdy_count = rdy_count
        self.look()

    @rule()
    def has_no_room_for_a_while(self):
        self.shared.room_bytes = 0
        assert self.shared.capacity == 0
        self.shared.room_bytes = 1000
        self.look()

    @rule(rdy_count=st.integers(0, 5))
    def connect_again(self, rdy_count):
        for number, part in self.parts.items():
            self.topic.partitions[number].channels["c"].remove(part)
        self.held.clear()
        self.connect(rdy_count)


TestPartsMachine = pytest.mark.slow(PartsMachine.TestCase)
TestPartsMachine.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def test_a_busy_partition_does_not_keep_the_others_waiting(kit):
    topic = kit.create(meta=TopicMeta(partition_num=3), numbers=[0, 1, 2])
    kit.broker.channel(topic, "c")
    for number, count in ((0, 300), (1, 3), (2, 3)):
        kit.broker.publish_to(topic.partitions[number], [b"x"] * count)
    channels = {number: partition.channels["c"] for number, partition in topic.partitions.items()}
    out: list[bytes | memoryview] = []
    parts = {number: PartSubscription(out, 60 * SECOND, 900 * SECOND) for number in channels}
    shared, united = SharedSubscription(list(parts.values())), ChannelParts(channels, parts)
    for number, channel in channels.items():
        channel.add(parts[number])
    shared.rdy_count = 1
    shared.is_open = True
    order = []
    for _ in range(12):
        kit.broker.publish_to(topic.partitions[0], [b"x"])
        kit.broker.mark_in_turn(united.in_turn())
        kit.turn()
        (internal,) = struct.unpack_from(">Q", b"".join(bytes(part) for part in out), 18)
        out.clear()
        order.append(partition_of(internal))
        united.finish(shared, (internal,))
    assert (order.count(1), order.count(2)) == (3, 3)


@pytest.fixture
def crowded():
    """A consumer of both partitions with RDY 1 that holds a message of one, and another one that is ready there."""
    world = BrokerWorld()
    world.create("t", TopicMeta(partition_num=2))
    world.create_channel("t", "c")
    world.publish("t", [b"a"], 0)
    world.publish("t", [b"b"], 1)
    both = world.subscribe("t", "c", None, 10 * SECOND)
    both.ready(1)
    (held,) = both.received()
    single = world.subscribe("t", "c", held.partition)
    single.ready(1)
    return world, both, single, held


def test_a_timeout_in_one_partition_makes_room_for_another(crowded):
    world, both, single, held = crowded
    world.pass_time(10 * SECOND)
    assert [delivery.internal for delivery in single.received()] == [held.internal]
    assert [delivery.partition for delivery in both.received()] == [1 - held.partition]


def test_moving_the_channel_in_one_partition_makes_room_for_another(crowded):
    world, both, _, held = crowded
    channel = world.channel("t", "c", held.partition)
    seek(channel, Place("special", -1), channel.end)
    world.broker.was_changed(channel)
    world.pump()
    assert [delivery.partition for delivery in both.received()] == [1 - held.partition]
