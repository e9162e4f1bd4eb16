"""A topic that is there gets headers: what was published before, what is under way, what was set aside, a restart."""

import random

import msgspec
import pytest
from tests.unit.broker.world import SECOND, BrokerWorld

from flintmq.batch import EXTENDED, RAW_IDS
from flintmq.broker.broker import TopicConflict
from flintmq.broker.channel import Channel
from flintmq.broker.dead_letters import GivenUp, dead_letter
from flintmq.broker.partition import Partition
from flintmq.broker.spilled import SpilledStore
from flintmq.broker.state import ChannelState, Message
from flintmq.broker.subscription import Subscription
from flintmq.broker.tagged import TaggedChannel
from flintmq.broker.topic import Topic
from flintmq.errors import StorageError
from flintmq.message import EMPTY_HEADERS, TAG, extended_body, with_empty_headers, without_headers
from flintmq.nsqd.extended import go_on, layout_of, older_layout_of
from flintmq.nsqd.pending_reply import PendingReply, Receipt
from flintmq.storage import MemoryLog
from flintmq.topic_meta import EXTENDED_PLAIN, PLAIN, TopicMeta

PARTED = TopicMeta(partition_num=2)
LIKE_A_TAG = b"\x02\x00\x01bdy"
HOUR = 3600 * SECOND


def upgraded(meta):
    return msgspec.structs.replace(meta, extend_support=True, version=meta.version + 1)


def new_world(meta=None, **options):
    world = BrokerWorld(**options)
    world.create("t", meta)
    world.create_channel("t", "c")
    return world, world.broker.topics["t"]


def frame_at(log, sequence):
    """A stored message."""
    batch = log.read(sequence)
    assert batch is not None
    return bytes(batch.frames(sequence, sequence + 1))


def bodies(log, first=1):
    """Stored messages from a sequence on, each with whether it has headers."""
    found = []
    for sequence in range(first, log.next_sequence):
        batch = log.read(sequence)
        has_headers = bool(batch.header.flags & EXTENDED)
        found.append((bytes(batch.frames(sequence, sequence + 1))[34:], has_headers))
    return found


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("meta", [None, PARTED])
def test_nothing_is_written_before_the_database_knows(meta):
    world, topic = new_world(meta)
    partition = topic.first_partition
    world.publish("t", [b"old"], partition.number)
    under_way = world.broker.publish_to(partition, [b"under way", b"2"])
    assert world.broker.change_meta(topic, upgraded(topic.meta))
    behind = world.broker.publish_to(partition, [b"behind"])
    assert behind is not under_way
    assert world.broker.write_pending(1) == []
    assert partition.log.next_sequence == 2 and not partition.is_writable
    world.flush()
    groups = world.broker.write_pending(1)
    assert groups == [under_way, behind] and partition.is_writable
    assert bodies(partition.log) == [
        (b"old", False),
        (b"\0under way", True),
        (b"\x002", True),
        (b"\0behind", True),
    ]
    assert [partition.has_headers(sequence) for sequence in (1, 2, 3)] == [False, True, True]
    assert [part.headers_from for part in topic.partitions.values()][1:] == ([1] if meta else [])


@pytest.mark.parametrize("power_loss", [False, True])
@pytest.mark.parametrize("meta", [None, PARTED])
def test_a_restart_knows_from_where_on(meta, power_loss):
    world, topic = new_world(meta)
    number = topic.first_partition.number
    world.publish("t", [b"one", b"two"], number)
    world.broker.change_meta(topic, upgraded(topic.meta))
    world.flush()
    world.publish("t", [b"three"], number)
    for _ in range(2):
        world.die(power_loss)
        topic = world.broker.topics["t"]
        partition = topic.partitions[number]
        assert topic.meta == upgraded(meta or PLAIN)
        assert partition.headers_from == 3
        assert bodies(partition.log)[:3] == [(b"one", False), (b"two", False), (b"\0three", True)]
        channel = partition.channels["c"]
        assert isinstance(channel, TaggedChannel) and channel.headers_from == 3
        world.publish("t", [b"four"], number)
        assert bodies(partition.log)[-1] == (b"\0four", True)
        world.broker.change_meta(
            topic, msgspec.structs.replace(topic.meta, retention_days=1, version=topic.meta.version)
        )


def test_a_later_change_and_a_later_partition_keep_it():
    world = BrokerWorld()
    world.create("t", TopicMeta(partition_num=1))
    topic = world.broker.topics["t"]
    world.publish("t", [b"one"], 0)
    world.broker.change_meta(topic, upgraded(topic.meta))
    world.flush()
    world.broker.change_meta(topic, msgspec.structs.replace(topic.meta, retention_days=3, version=9))
    world.flush()
    world.broker.create_partitions("t", topic.meta, [1], 1)
    world.flush()
    world.restart()
    parts = world.broker.topics["t"].partitions
    assert {number: part.headers_from for number, part in parts.items()} == {0: 2, 1: 0}
    assert world.broker.topics["t"].meta.retention_days == 3


def test_a_death_before_the_database_knows():
    """The topic is as it was, and nothing with headers is in its log."""
    world, topic = new_world()
    world.publish("t", [b"one"])
    world.broker.change_meta(topic, upgraded(PLAIN))
    world.broker.publish(topic, [b"never answered"])
    assert world.broker.write_pending(1) == []
    world.die(False)
    topic = world.broker.topics["t"]
    assert topic.meta == PLAIN and type(world.channel("t", "c")) is Channel
    world.publish("t", [b"two"])
    assert bodies(topic.first_partition.log) == [(b"one", False), (b"two", False)]


def test_publishes_fail_while_the_database_cannot_take_it():
    world, topic = new_world()
    world.broker.change_meta(topic, upgraded(PLAIN))
    for _ in range(2):
        group = world.broker.publish(topic, [b"refused"])
        assert world.broker.write_pending(1) == []
        world.end_flush(world.take_flush(), [], OSError("disk"))
        assert isinstance(group.error, StorageError) and "cannot give topic t headers: disk" in str(group.error)
        assert not topic.first_partition.is_writable
    group = world.broker.publish(topic, [b"taken"])
    world.flush()
    world.broker.write_pending(1)
    assert bodies(topic.first_partition.log) == [(b"\0taken", True)]


def test_a_log_that_lost_its_end_uses_no_sequence_again():
    """After a power loss: messages below the border are without headers, whatever is published."""
    world, topic = new_world()
    partition = topic.first_partition
    partition.publish([b"not synced"] * 5, 0)
    partition.write_pending(1)
    world.broker.change_meta(topic, upgraded(PLAIN))
    world.flush()
    assert partition.headers_from == 6
    world.die(True)
    partition = world.broker.topics["t"].first_partition
    assert partition.headers_from == 6
    first = partition.log.next_sequence
    world.publish("t", [b"new"])
    assert first >= 6 and bodies(partition.log, first) == [(b"\0new", True)]


def test_headers_are_for_life():
    world, topic = new_world()
    world.broker.change_meta(topic, upgraded(PLAIN))
    with pytest.raises(TopicConflict, match="has headers, and keeps them"):
        world.broker.change_meta(topic, TopicMeta(version=7))


def test_a_topic_deleted_meanwhile_is_left_alone():
    world, topic = new_world()
    world.broker.change_meta(topic, upgraded(PLAIN))
    flush = world.take_flush()
    answers = world.run_flush(flush)
    world.broker.delete_topic("t")
    world.end_flush(flush, answers)
    assert topic.first_partition.is_held and topic.first_partition.is_deleted


def test_an_ephemeral_topic():
    world = BrokerWorld()
    topic = world.broker.topic("t#ephemeral", 1)
    world.broker.channel(topic, "c")
    world.broker.publish(topic, [b"one"])
    world.broker.write_pending(1)
    world.broker.change_meta(topic, upgraded(PLAIN))
    world.broker.publish(topic, [b"two"])
    world.broker.write_pending(1)
    assert bodies(topic.first_partition.log) == [(b"one", False), (b"\0two", True)]


def test_of_two_states_of_one_version_the_one_with_headers_is_in_force():
    bare, headed = TopicMeta(version=2, retention_days=9), TopicMeta(version=2, extend_support=True)
    assert TopicMeta(version=3).rank > headed.rank > bare.rank


# -- answers that say where messages are -------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [0, 1, 2])
def test_answers_of_what_was_under_way(written):
    """Some of it may be in the log already, the rest gets longer by a byte each."""
    _, topic = new_world(PARTED)
    partition = topic.first_partition
    log = partition.log
    pieces = [[bytes(8) + b"x" * (10 * each + number) for number in range(100)] for each in range(3)]
    slots = []
    for piece in pieces:
        group = partition.publish(piece, 0, is_stored_form=True)
        slots.append(PendingReply(group, "MPUB_TRACE", receipt=Receipt(group, [bytes(8)] * 100, piece, True)))
        slots.append(PendingReply(group, "PUB_TRACE", 100, receipt=Receipt(group, [bytes(8)] * 100, piece, False)))
    for _ in range(written):
        assert partition.write_pending(1, 1) is None
    partition.add_headers(TopicMeta(partition_num=1, extend_support=True))
    assert partition.write_pending(1) is group
    assert log.layout == RAW_IDS | EXTENDED
    for number, slot in enumerate(slots):
        first = 1 + 100 * (number // 2)
        assert slot.receipt is not None
        found = slot.receipt.stored()
        assert found is not None
        frames = [log.read(each).frames(each, each + 1) for each in range(first, first + 100)]
        size = sum(map(len, frames)) if number % 2 == 0 else len(frames[0])
        assert (found.offset, found.raw_size) == (log.read(first).offset_of(first), size)
        assert slot.receipt.stored() == found
        assert partition.has_headers(first) == (number // 2 >= written)
    # the answers of a run follow each other
    data = slots[-1].frames()
    places = [data[at + 26 : at + 34] for at in range(0, len(data), len(data) // 100)]
    assert places == [log.read(each).offset_of(each).to_bytes(8, "big") for each in range(201, 301)]


# -- channels that are there -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_restarted", [False, True])
def test_what_was_set_aside_is_told_by_its_sequence(is_restarted):
    """An old body that looks like a tag goes to who desires none; a frame with headers goes by its tag."""
    world, topic = new_world(window_max=8)
    world.publish("t", [LIKE_A_TAG] * 4, delay_ns=HOUR)
    world.publish("t", [LIKE_A_TAG] * 4)
    consumer = world.subscribe("t", "c", 0)
    consumer.ready(4)
    for delivery in consumer.received():
        assert consumer.requeue(delivery.internal, HOUR)
    world.flush()
    world.broker.change_meta(topic, upgraded(PLAIN))
    world.flush()
    world.broker.publish_to(
        topic.first_partition, [extended_body(b"b", b"tagged", TAG)], world.due_clock_ns + HOUR, True
    )
    world.publish("t", [b"plain"], delay_ns=HOUR)
    world.flush()
    world.leave(consumer)
    if is_restarted:
        world.die(False)
    partition = world.broker.topics["t"].first_partition
    channel = partition.channels["c"]
    untagged, tagged = (Subscription([], 9 * HOUR, 9 * HOUR) for _ in range(2))
    tagged.tag = "b"
    for each in (untagged, tagged):
        go_on(each, partition)
        each.rdy_count, each.is_open = 100, True
        channel.add(each)
    for _ in range(20):
        world.pass_time(HOUR // 8)
        world.flush()
    assert [len(tagged.out), tagged.in_flight_count, untagged.in_flight_count] == [1, 1, 9]
    sent = sorted(bytes(part)[34:] for part in split(untagged.out))
    assert sent == sorted([LIKE_A_TAG] * 8 + [b"plain"])
    assert [bytes(part)[34:] for part in split(tagged.out)] == [b"tagged"]


def split(out):
    data = b"".join(map(bytes, out))
    while data:
        size = 4 + int.from_bytes(data[:4], "big")
        yield data[:size]
        data = data[size:]


def test_a_channel_is_taken_over_with_its_consumers():
    log = MemoryLog(0, 10**9)
    channel = Channel("c", 0, log, ChannelState(1), SpilledStore(), random.Random(1))
    consumers = [Subscription([], HOUR, HOUR) for _ in range(2)]
    for consumer in consumers:
        channel.add(consumer)
        consumer.rdy_count, consumer.is_open = 1, True
    log.append([b"1"], 1)
    log.advance_committed(2)
    channel.pump(0, 0)
    held, free = sorted(consumers, key=lambda each: -each.in_flight_count)
    TaggedChannel.take_over(channel, 2)
    log.layout = EXTENDED
    log.append([b"\x002"], 1)
    log.advance_committed(3)
    channel.pump(0, 0)
    assert (held.in_flight_count, free.in_flight_count) == (1, 1)
    free.rdy_count = 2
    channel.remove(held)
    channel.pump(0, 0)
    assert free.in_flight_count == 2 and channel.in_flight_count == 2
    assert channel.finish(free, (1, 2)) == []
    assert (channel.depth, channel.floor) == (0, 3)
    channel.remove(free)
    assert not channel.subscriptions


def test_dead_letters_keep_the_whole_old_body():
    source = Partition("t", 0, MemoryLog(0, 10**9))
    Topic("t", {0: source})
    source.publish([LIKE_A_TAG], 0)
    source.write_pending(1)
    source.add_headers(EXTENDED_PLAIN)
    source.publish([extended_body(b'{"k":"v"}', b"new")], 0, is_stored_form=True)
    source.write_pending(1)
    target = Partition("d", 0, MemoryLog(0, 10**9))
    Topic("d", {0: target})
    frames = [frame_at(source.log, sequence) for sequence in (1, 2)]
    found = [
        dead_letter(source, "c", target, GivenUp(Message(number, 1)), frame) for number, frame in enumerate(frames, 1)
    ]
    assert found == [LIKE_A_TAG, b"new"]


@pytest.mark.parametrize("is_located", [False, True])
@pytest.mark.parametrize("knows_headers", [False, True])
def test_layouts_of_messages_from_before(is_located, knows_headers):
    log = MemoryLog(0, 10**9)
    log.append([LIKE_A_TAG], 1)
    frame = frame_at(log, 1)
    layout = older_layout_of(is_located, knows_headers)
    sent = frame if layout is None else bytes(layout(frame, 77))
    place = (77).to_bytes(8, "big") + len(frame).to_bytes(4, "big") if is_located else b""
    front = (EMPTY_HEADERS if knows_headers else b"") + place
    assert sent == (len(frame) - 4 + len(front)).to_bytes(4, "big") + frame[4:34] + front + LIKE_A_TAG


def test_a_consumer_goes_on_with_either_kind():
    partition = Partition("t", 0, MemoryLog(0, 10**9))
    Topic("t", {0: partition})
    partition.publish([b"old"], 0)
    partition.write_pending(1)
    subscription = Subscription([], HOUR, HOUR)
    partition.add_headers(EXTENDED_PLAIN)
    go_on(subscription, partition)
    assert subscription.layout_at(1) is None and subscription.layout_at(2) is without_headers
    assert without_headers(with_empty_headers(frame := frame_at(partition.log, 1))) == frame
    assert layout_of(EXTENDED_PLAIN, False, False) is without_headers
