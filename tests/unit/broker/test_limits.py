"""Limits of topics and channels: attempts with dead letters, age, bounds; against a broker on a real data directory."""

import json
import struct
from collections import Counter
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from hypothesis import strategies as st
from tests.unit.broker.conftest import Disk

from flintmq.broker.backlog import unfinished_count, waiting_count
from flintmq.broker.bounds import TopicFull
from flintmq.broker.subscription import Subscription
from flintmq.errors import DiskFull, StorageError
from flintmq.message import FRAME_OVERHEAD_BYTES, extended_body
from flintmq.settings import BadSetting, Settings
from flintmq.storage import create_logs
from flintmq.topic_meta import EXTENDED_PLAIN

SECOND = 1_000_000_000
MINUTE = 60 * SECOND


class Owner:
    peer = "127.0.0.1:5000"


class World:
    """A broker, its consumers and two clocks."""

    def __init__(self, disk):
        self.disk = disk
        self.now_ns = 1000 * SECOND
        self.problems = []
        self.start()

    def start(self):
        self.broker = self.disk.broker
        self.broker.on_problem = self.problems.append
        self.turn()

    def restart(self):
        self.disk.die()
        self.disk.open()
        self.start()

    def topic(self, name="t", channel="c", **limits):
        topic = self.broker.topic(name, self.now_ns)
        if channel:
            self.broker.channel(topic, channel)
        self.broker.change_settings(topic, None, Settings(**limits))
        return topic

    def channel(self, topic="t", name="c"):
        return self.broker.topics[topic].first_partition.channels[name]

    def publish(self, *bodies, topic="t", due_ns=0):
        group = self.broker.publish(self.broker.topics[topic], bodies, due_ns)
        self.turn()
        return group

    def turn(self):
        """Do everything there is to do now."""
        for _ in range(100):
            while self.broker.has_creations:
                taken = self.broker.take_creations()
                create_logs([creation for new in taken for creation in new.creations], False)
                self.broker.creations_ended(taken)
            self.broker.commit_groups(self.broker.write_pending(self.now_ns))
            if not self.broker.has_marked and not self.broker.has_pending and not self.broker.has_metadata:
                return
            self.broker.pump(self.now_ns, self.now_ns)
            if self.broker.has_metadata:
                self.flush()
        raise AssertionError("turns do not end")

    def flush(self, wall_ns=None):
        flush = self.broker.take_flush(wall_ns or self.now_ns)
        answers = self.broker.run_flush(flush, wall_ns or self.now_ns, False)
        self.broker.flush_ended(flush, answers, None, self.now_ns)

    def pass_time(self, ns):
        self.now_ns += ns
        self.broker.handle_deadlines(self.now_ns, self.now_ns)
        self.broker.sweep(self.now_ns)
        self.turn()

    def subscribe(self, topic="t", name="c", rdy=100):
        subscription = Subscription([], MINUTE, 15 * MINUTE, 0, Owner())
        channel = self.channel(topic, name)
        channel.add(subscription)
        subscription.rdy_count = rdy
        subscription.is_open = True
        self.broker.mark(channel)
        self.turn()
        return subscription

    def held_back(self):
        """What a paused topic keeps from its channel."""
        channel = self.channel()
        return 0 if channel.limit is None else waiting_count(channel) - max(0, channel.limit - channel.next)

    def stored(self, topic):
        """The stored bodies of a topic."""
        log = self.broker.topics[topic].first_partition.log
        sequence, found = log.start_sequence, []
        while (batch := log.read(sequence)) is not None:
            frames = [batch.frames(number, number + 1) for number in range(batch.first, batch.end)]
            found += [bytes(frame[FRAME_OVERHEAD_BYTES:]) for frame in frames]
            sequence = batch.end
        return found

    def dead(self, topic="t.dead"):
        """Headers and bodies of a topic of dead letters."""
        if topic not in self.broker.topics:
            return []
        return [headers_and_body(stored) for stored in self.stored(topic)]

    def dead_bodies(self, topic="t.dead"):
        return [body for _, body in self.dead(topic)]


def headers_and_body(stored):
    if not stored[0]:
        return {}, stored[1:]
    version, size = struct.unpack_from(">BH", stored)
    assert version == 4
    return json.loads(stored[3 : 3 + size]), stored[3 + size :]


def received(subscription):
    """Take what was put out as [(internal id, attempts, body)]."""
    data = b"".join(bytes(part) for part in subscription.out)
    subscription.out.clear()
    messages, position = [], 0
    while position < len(data):
        size, _, _, attempts, message_id = struct.unpack_from(">IIQH16s", data, position)
        messages.append((int(message_id, 16), attempts, data[position + 34 : position + 4 + size]))
        position += 4 + size
    return messages


@pytest.fixture
def world(disk):
    return World(disk)


# -- attempts ----------------------------------------------------------------------------------------------------------


def test_a_message_given_back_too_often_becomes_a_dead_letter_with_the_reason(world):
    world.topic(max_attempts=3)
    world.publish(b"bad", b"good")
    consumer = world.subscribe()
    for attempt in (1, 2, 3):
        messages = {body: (number, attempts) for number, attempts, body in received(consumer)}
        number, attempts = messages[b"bad"]
        assert attempts == attempt
        if b"good" in messages:
            world.channel().finish(consumer, [messages[b"good"][0]])
        assert world.channel().requeue(consumer, number, 0, world.now_ns)
        world.broker.mark(world.channel())
        world.turn()
    assert received(consumer) == []
    ((headers, body),) = world.dead()
    assert body == b"bad"
    timestamp = headers.pop("##dead_letter_timestamp")
    assert headers == {
        "##dead_letter_reason": "max_attempts",
        "##dead_letter_topic": "t",
        "##dead_letter_channel": "c",
        "##dead_letter_attempts": "3",
        "##dead_letter_id": f"{number:016x}",
        "##dead_letter_client": "127.0.0.1:5000",
    }
    assert int(timestamp) == world.now_ns
    channel = world.channel()
    assert (channel.floor, channel.depth, channel.in_flight_count) == (3, 0, 0)
    assert channel.limiter.dead_letter_count == 1
    assert world.broker.topics["t.dead"].meta == EXTENDED_PLAIN


@pytest.mark.parametrize("way", ["requeue", "long delay", "timeout", "disconnect"])
@pytest.mark.parametrize("is_aside", [False, True], ids=["window", "aside"])
def test_every_way_of_coming_back_counts(world, way, is_aside):
    world.topic(max_attempts=2)
    world.publish(b"bad")
    consumer = world.subscribe()
    ((number, _, _),) = received(consumer)
    world.channel().requeue(consumer, number, 600 * SECOND if is_aside else SECOND, world.now_ns)
    world.broker.mark(world.channel())
    world.turn()
    world.flush()
    world.pass_time(601 * SECOND if is_aside else 2 * SECOND)
    for _ in range(3):
        world.flush(world.now_ns)
        world.pass_time(SECOND)
    assert [attempts for _, attempts, _ in received(consumer)] == [2]
    assert world.dead() == []
    if way in ("requeue", "long delay"):
        delay_ns = 0 if way == "requeue" else 600 * SECOND
        assert world.channel().requeue(consumer, number, delay_ns, world.now_ns)
        world.broker.mark(world.channel())
        world.turn()
    elif way == "timeout":
        world.pass_time(2 * MINUTE)
    else:
        world.channel().remove(consumer)
        world.broker.mark(world.channel())
        world.turn()
    ((headers, body),) = world.dead()
    assert (body, headers["##dead_letter_attempts"]) == (b"bad", "2")
    assert headers["##dead_letter_client"] == "127.0.0.1:5000"
    assert (world.channel().depth, world.channel().deferred_count, world.channel().spilled.count) == (0, 0, 0)


def test_nothing_is_finished_before_the_dead_letter_is_stored(world):
    world.topic(max_attempts=1)
    world.publish(b"bad")
    consumer = world.subscribe()
    ((number, _, _),) = received(consumer)
    world.channel().requeue(consumer, number, 0, world.now_ns)
    world.broker.mark(world.channel())
    world.broker.pump(world.now_ns, world.now_ns)
    channel = world.channel()
    assert (channel.floor, channel.window.unfinished_count, channel.limiter.giving_up_count) == (1, 1, 1)
    assert channel.depth == channel.deferred_count == channel.in_flight_count == 0
    world.flush()
    world.restart()  # the dead letter was not written yet
    assert world.dead_bodies() == [b"bad"]
    assert world.channel().floor == 2


def test_a_crash_after_the_dead_letter_was_stored_may_store_it_twice_and_loses_nothing(world):
    world.topic(max_attempts=1)
    world.publish(b"bad")
    consumer = world.subscribe()
    ((number, _, _),) = received(consumer)
    world.flush()
    world.channel().requeue(consumer, number, 0, world.now_ns)
    world.broker.mark(world.channel())
    world.turn()
    assert world.dead_bodies() == [b"bad"]
    world.restart()
    assert set(world.dead_bodies()) == {b"bad"}
    assert world.channel().floor == 2


def test_dead_letters_that_cannot_be_stored_wait_and_are_tried_again_ever_less_often(world, monkeypatch):
    world.topic(max_attempts=1)
    world.publish(b"bad")
    topic = world.broker.extended_topic("t.dead", world.now_ns)
    world.turn()
    log = topic.first_partition.log
    failures = []

    def fail(*_args, **_named):
        failures.append(world.now_ns)
        raise DiskFull("x", 0, 1)

    with monkeypatch.context() as patched:
        patched.setattr(log, "append", fail)
        consumer = world.subscribe()
        ((number, _, _),) = received(consumer)
        world.channel().requeue(consumer, number, 0, world.now_ns)
        world.broker.mark(world.channel())
        for _ in range(100):
            world.turn()
            world.pass_time(SECOND)
        assert world.channel().floor == 1 and world.channel().limiter.giving_up_count == 1
    gaps = [(after - before) // SECOND for before, after in pairwise(failures)]
    assert gaps == [1, 2, 4, 8, 16, 32]
    assert "cannot publish dead letters of t:c to t.dead: disk full" in str(world.problems[0])
    world.pass_time(MINUTE)
    assert world.dead_bodies() == [b"bad"]
    assert world.channel().floor == 2


def test_dead_letters_do_not_die_again(world):
    world.topic(max_attempts=1, dead_letter_topic="graves")
    world.publish(b"bad")
    consumer = world.subscribe()
    ((number, _, _),) = received(consumer)
    world.channel().requeue(consumer, number, 0, world.now_ns)
    world.broker.mark(world.channel())
    world.turn()
    graves = world.broker.topics["graves"]
    world.broker.channel(graves, "look")
    with pytest.raises(BadSetting, match=r"INVALID_ARG_MAX_ATTEMPTS: .*graves holds dead letters"):
        world.broker.change_settings(graves, "look", Settings(max_attempts=1))
    assert world.broker.settings_of("graves", "look").max_attempts == 0
    assert world.broker.own_settings("graves").dead_letters
    world.restart()
    assert world.broker.own_settings("graves").dead_letters


def test_two_topics_that_are_each_other_s_dead_letters_do_not_play_ball(world):
    world.topic("a", max_attempts=1, dead_letter_topic="b")
    world.topic("b", max_attempts=1, dead_letter_topic="a")
    world.publish(b"x", topic="a")
    consumer = world.subscribe("a")
    ((number, _, _),) = received(consumer)
    world.channel("a").requeue(consumer, number, 0, world.now_ns)
    world.broker.mark(world.channel("a"))
    world.turn()
    assert world.stored("b") == [b"x"]  # it was there before, without headers
    other = world.subscribe("b")
    for attempt in (1, 2, 3):
        ((number, attempts, _),) = received(other)
        assert attempts == attempt
        world.channel("b").requeue(other, number, 0, world.now_ns)
        world.broker.mark(world.channel("b"))
        world.turn()
    assert world.stored("a") == [b"x"]


def test_headers_that_the_message_had_are_kept(world):
    topic = world.broker.extended_topic("t", world.now_ns)
    world.turn()
    world.broker.channel(topic, "c")
    world.broker.change_settings(topic, None, Settings(max_attempts=1))
    bodies = [
        extended_body(b'{"a": "1"}', b"json"),
        extended_body(b"blue", b"tag", version=2),
        extended_body(b"", b"none"),
        extended_body(b"\xff\xfe", b"broken"),
        extended_body(b'{"a": "' + b"1" * 65_300 + b'"}', b"long"),
    ]
    world.broker.publish_to(topic.first_partition, bodies, is_stored_form=True)
    world.turn()
    consumer = world.subscribe()
    world.channel().remove(consumer)
    world.broker.mark(world.channel())
    world.turn()
    found = {body: headers for headers, body in world.dead()}
    assert {body: headers.get("a") for body, headers in found.items()} == {
        b"json": "1",
        b"tag": None,
        b"none": None,
        b"broken": None,
        b"long": None,
    }
    assert found[b"tag"]["##client_dispatch_tag"] == "blue"
    assert all(headers["##dead_letter_reason"] == "max_attempts" for headers in found.values())


def test_in_order_giving_up_lets_the_next_message_go(world):
    topic = world.topic(max_attempts=2)
    world.broker.order_channel(topic, "c", True)
    world.publish(b"bad", b"good")
    consumer = world.subscribe()
    for _ in range(2):
        ((number, _, body),) = received(consumer)
        assert body == b"bad"
        world.channel().requeue(consumer, number, 0, world.now_ns)
        world.broker.mark(world.channel())
        world.turn()
    assert [body for _, _, body in received(consumer)] == [b"good"]
    assert world.dead_bodies() == [b"bad"]


def test_a_limit_that_is_lowered_holds_for_what_waits_and_one_that_is_raised_gives_it_back(world):
    topic = world.topic()
    world.publish(b"a", b"b")
    consumer = world.subscribe()
    for _ in range(3):
        for number, _, _ in received(consumer):
            world.channel().requeue(consumer, number, 0, world.now_ns)
        world.broker.mark(world.channel())
        world.turn()
    world.channel().remove(consumer)
    world.turn()
    world.broker.change_settings(topic, None, Settings(max_attempts=3))
    assert world.channel().limiter.giving_up_count == 2
    world.broker.change_settings(topic, None, Settings(max_attempts=9))
    world.turn()
    assert (world.channel().limiter.giving_up_count, world.channel().depth, world.dead()) == (0, 2, [])
    world.broker.change_settings(topic, "c", Settings(max_attempts=3))
    world.turn()
    assert world.dead_bodies() == [b"b", b"a"]


def test_what_an_operator_drops_on_its_way_is_not_missed(world):
    world.topic(max_attempts=1)
    world.publish(b"a", b"b")
    consumer = world.subscribe()
    received(consumer)
    world.channel().remove(consumer)
    assert world.channel().limiter.giving_up_count == 2
    world.broker.empty_channel(world.broker.topics["t"], "c")
    world.turn()
    assert (world.dead(), world.channel().depth, world.channel().limiter.giving_up_count) == ([], 0, 0)


def test_many_large_messages_die_in_parts(world):
    world.topic(max_attempts=1)
    for number in range(10):
        world.publish(*(b"%d-%d" % (number, each) + bytes(3000) for each in range(100)))
    consumer = world.subscribe(rdy=2500)
    consumer.room_bytes = 1 << 30
    world.broker.mark(world.channel())
    world.turn()
    assert len(received(consumer)) == 1000
    world.channel().remove(consumer)
    world.broker.mark(world.channel())
    world.turn()
    assert len(world.dead()) == 1000 == len(set(world.dead_bodies()))
    assert world.channel().floor == 1001


def test_a_message_moved_aside_on_its_way_dies_once(world):
    world.topic(max_attempts=1)
    world.publish(*(b"%d" % number for number in range(20)))
    consumer = world.subscribe(rdy=20)
    messages = received(consumer)
    channel = world.channel()
    for number, _, _ in messages[:5]:
        channel.requeue(consumer, number, 0, world.now_ns)
    world.broker.pump(world.now_ns, world.now_ns)  # published, not stored
    channel.spill()
    world.turn()
    assert sorted(world.dead_bodies()) == [b"0", b"1", b"2", b"3", b"4"]
    assert channel.spilled.count == 5  # those in flight that moved as well
    channel.finish(consumer, [number for number, _, _ in messages[5:]])
    assert (channel.spilled.count, channel.depth, channel.in_flight_count) == (0, 0, 0)
    world.pass_time(SECOND)
    assert len(world.dead()) == 5


def test_what_cannot_be_stored_is_moved_aside_in_a_full_window_and_dies_once(world, monkeypatch):
    world.topic(max_attempts=1)
    world.publish(*(b"%d" % number for number in range(20)))
    log = world.broker.extended_topic("t.dead", world.now_ns).first_partition.log
    world.turn()
    consumer = world.subscribe(rdy=20)
    channel = world.channel()
    with monkeypatch.context() as patched:
        patched.setattr(log, "append", lambda *_: (_ for _ in ()).throw(DiskFull("x", 0, 1)))
        for number, _, _ in received(consumer)[:12]:
            channel.requeue(consumer, number, 0, world.now_ns)
        world.broker.mark(channel)
        world.turn()
        channel.spill()
        world.flush()
        world.pass_time(5 * SECOND)
        assert (channel.limiter.giving_up_count, channel.floor, channel.depth) == (12, 11, 0)
    for _ in range(10):
        world.pass_time(10 * SECOND)
    assert Counter(world.dead_bodies()) == Counter(b"%d" % number for number in range(20))  # the others timed out
    assert (channel.limiter.giving_up_count, channel.spilled.count, channel.floor) == (0, 0, 21)


# -- age ---------------------------------------------------------------------------------------------------------------


def test_what_is_too_old_is_not_delivered(world):
    world.topic(ttl_ms=10_000)
    world.publish(b"old")
    world.now_ns += 11 * SECOND
    world.publish(b"new")
    consumer = world.subscribe()
    assert [body for _, _, body in received(consumer)] == [b"new"]
    assert world.channel().limiter.expired_count == 1


def test_what_is_too_old_goes_although_nobody_consumes_and_the_disk_follows(world):
    world.topic(ttl_ms=10_000)
    for _ in range(5):
        world.publish(b"x" * 100)
    assert world.channel().depth == 5
    world.pass_time(9 * SECOND)
    assert world.channel().depth == 5
    world.pass_time(2 * SECOND)
    assert (world.channel().depth, world.channel().floor, world.channel().limiter.expired_count) == (0, 6, 5)
    world.flush()
    assert world.broker.topics["t"].first_partition.durable_floor == 6


def test_a_topic_without_channels_forgets_what_is_too_old(world):
    topic = world.topic(channel="", ttl_ms=10_000)
    world.publish(b"a")
    world.publish(b"b")
    world.pass_time(11 * SECOND)
    assert (topic.depth, topic.first_partition.bounds.expired_count) == (0, 2)
    assert topic.first_partition.durable_floor == 3
    world.publish(b"c")
    world.restart()
    world.broker.channel(world.broker.topics["t"], "first")
    consumer = world.subscribe("t", "first")
    assert [body for _, _, body in received(consumer)] == [b"c"]


def test_what_comes_back_too_old_is_finished(world):
    world.topic(ttl_ms=10_000)
    world.publish(b"a", b"b")
    consumer = world.subscribe()
    (first, _, _), _ = received(consumer)
    world.channel().requeue(consumer, first, 30 * SECOND, world.now_ns)
    world.broker.mark(world.channel())
    world.turn()
    world.pass_time(31 * SECOND)
    assert received(consumer) == []
    assert world.channel().limiter.expired_count == 1
    world.channel().remove(consumer)
    world.pass_time(0)  # nobody consumes
    assert (world.channel().limiter.expired_count, world.channel().depth, world.channel().floor) == (2, 0, 3)


@pytest.mark.parametrize("delay_ns", [20 * SECOND, 600 * SECOND], ids=["window", "aside"])
def test_the_age_of_a_delayed_message_begins_when_it_is_due(world, delay_ns):
    world.topic(ttl_ms=10_000)
    world.publish(b"later", due_ns=world.now_ns + delay_ns)
    world.publish(b"too late", due_ns=world.now_ns + delay_ns - 20 * SECOND)
    for _ in range(3):
        world.flush(world.now_ns + delay_ns)
        world.turn()
    world.pass_time(delay_ns + SECOND)
    consumer = world.subscribe()
    assert [body for _, _, body in received(consumer)] == [b"later"]
    assert world.channel().limiter.expired_count == 1


def test_a_wall_clock_that_is_set_makes_nothing_old(world):
    world.topic(ttl_ms=10_000)
    world.broker.clock_moved(3600 * SECOND, world.now_ns)
    group = world.broker.publish(world.broker.topics["t"], [b"x"])
    world.broker.commit_groups(world.broker.write_pending(world.now_ns + 3600 * SECOND))
    assert group.ended
    world.pass_time(9 * SECOND)
    assert world.channel().depth == 1
    world.pass_time(2 * SECOND)
    assert world.channel().depth == 0


@pytest.mark.parametrize("has_channel", [True, False])
@pytest.mark.parametrize("step_ns", [-3600 * SECOND, 3600 * SECOND])
def test_what_is_there_when_the_wall_clock_is_set_gets_no_older(world, step_ns, has_channel):
    world.now_ns = 36_000 * SECOND
    topic = world.topic(ttl_ms=10_000, channel="c" if has_channel else "")
    world.publish(b"x")
    world.broker.clock_moved(step_ns, world.now_ns)
    world.pass_time(9 * SECOND)
    waiting = world.channel() if has_channel else topic
    assert waiting.depth == 1
    world.pass_time(abs(step_ns) + 2 * SECOND)
    assert waiting.depth == 0


@pytest.mark.parametrize("has_channel", [True, False])
@pytest.mark.parametrize("step_ns", [-3600 * SECOND, 3600 * SECOND])
def test_the_age_of_what_has_a_delay_begins_when_it_is_due_whatever_the_wall_clock_was_set_to(
    world, step_ns, has_channel
):
    world.now_ns = 36_000 * SECOND
    topic = world.topic(ttl_ms=10_000, channel="c" if has_channel else "")
    world.broker.clock_moved(step_ns, world.now_ns)
    group = world.broker.publish(topic, [b"x"], world.now_ns + 30 * SECOND)
    world.broker.commit_groups(world.broker.write_pending(world.now_ns + step_ns))
    assert group.ended
    world.turn()
    for _ in range(39):
        world.pass_time(SECOND)
        world.flush()
    counts = world.channel().limiter if has_channel else topic.first_partition.bounds
    assert counts.expired_count == 0
    world.pass_time(3 * SECOND)
    assert counts.expired_count == 1


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_a_full_topic_refuses_and_says_why(world):
    topic = world.topic(max_messages=3)
    world.publish(b"a", b"b")
    with pytest.raises(TopicFull) as caught:
        world.broker.publish(topic, [b"c", b"d"])
    assert caught.value.code == "E_PUB_FAILED" and caught.value.fatal
    assert caught.value.detail == (
        "topic t is full: channel c has 2 of max 3 messages; this publish has 2 more; raise the limit or consume, or "
        "publish fewer at once"
    )
    world.publish(b"c")
    consumer = world.subscribe(rdy=1)
    with pytest.raises(TopicFull, match="3 of max 3"):
        world.broker.publish(topic, [b"d"])  # in flight is not finished
    ((number, _, _),) = received(consumer)
    world.channel().finish(consumer, [number])
    world.publish(b"d")
    assert topic.first_partition.bounds.refused_count == 3
    assert world.stored("t") == [b"a", b"b", b"c", b"d"]


def test_what_the_turn_has_published_counts(world):
    topic = world.topic(max_messages=3)
    for _ in range(3):
        world.broker.publish(topic, [b"x"])
    with pytest.raises(TopicFull):
        world.broker.publish(topic, [b"x"])
    world.turn()
    assert world.channel().depth == 3


def test_a_publish_that_failed_does_not_count(world, monkeypatch):
    topic = world.topic(max_messages=3)
    with monkeypatch.context() as patched:
        patched.setattr(topic.first_partition.log, "append", lambda *_: (_ for _ in ()).throw(DiskFull("x", 0, 1)))
        assert isinstance(world.publish(b"a", b"b", b"c").error, StorageError)
    world.publish(b"a", b"b", b"c")
    assert world.channel().depth == 3


def test_a_topic_without_channels_refuses_by_its_backlog(world):
    topic = world.topic(channel="", max_messages=2)
    world.publish(b"a", b"b")
    with pytest.raises(TopicFull, match=r"^E_PUB_FAILED topic t is full: 2 of max 2 messages; "):
        world.broker.publish(topic, [b"c"])
    world.broker.channel(topic, "c")
    with pytest.raises(TopicFull, match="channel c has 2 of max 2"):
        world.broker.publish(topic, [b"c"])


def test_a_channel_s_own_bound_comes_first(world):
    topic = world.topic(max_messages=5)
    world.broker.change_settings(topic, "c", Settings(max_messages=1))
    world.broker.channel(topic, "free")
    world.broker.change_settings(topic, "free", Settings(max_messages=0))
    world.publish(b"a")
    with pytest.raises(TopicFull, match="channel c has 1 of max 1"):
        world.broker.publish(topic, [b"b"])
    world.broker.delete_channel(topic, "c")
    world.publish(*[b"x"] * 20)
    assert world.channel("t", "free").depth == 21


def test_bytes_are_those_of_the_log(world):
    size = 100 + FRAME_OVERHEAD_BYTES
    topic = world.topic(max_bytes=10 * size)
    world.publish(*[bytes(100)] * 9)
    full = f"channel c has {9 * size} of max {10 * size} bytes; this publish has "
    with pytest.raises(TopicFull, match=f"{full}{size + 1} more; raise the limit or consume"):
        world.broker.publish(topic, [bytes(101)])
    world.publish(bytes(100))
    consumer = world.subscribe(rdy=5)
    numbers = [number for number, _, _ in received(consumer)]
    world.channel().finish(consumer, numbers[1:3])
    assert world.channel().limiter.unfinished_bytes() == 8 * size
    world.publish(*[bytes(100)] * 2)


def test_the_oldest_are_dropped_but_not_those_in_flight(world):
    world.topic(max_messages=4, overflow="drop_oldest")
    world.publish(b"0", b"1")
    consumer = world.subscribe(rdy=2)
    held = received(consumer)
    world.publish(*(b"%d" % number for number in range(2, 10)))
    channel = world.channel()
    assert (channel.depth, channel.in_flight_count, channel.limiter.dropped_count) == (2, 2, 6)
    channel.finish(consumer, [number for number, _, _ in held])
    world.broker.mark(channel)
    world.turn()
    assert [body for _, _, body in received(consumer)] == [b"8", b"9"]


def test_what_a_consumer_can_take_at_once_is_delivered_and_not_dropped(world):
    world.topic(max_messages=4, overflow="drop_oldest")
    consumer = world.subscribe(rdy=100)
    world.publish(*[b"x"] * 50)
    assert len(received(consumer)) == 50
    assert world.channel().limiter.dropped_count == 0


def test_the_oldest_are_dropped_by_bytes_and_no_more_than_needed(world):
    size = 100 + FRAME_OVERHEAD_BYTES
    world.topic(max_bytes=10 * size, overflow="drop_oldest")
    world.publish(bytes(10 * size - FRAME_OVERHEAD_BYTES - 10))
    world.publish(*[bytes(100)] * 4)
    assert (world.channel().depth, world.channel().limiter.dropped_count) == (4, 1)
    world.publish(*[bytes(100)] * 7)
    assert (world.channel().depth, world.channel().limiter.dropped_count) == (10, 2)


def test_what_waits_again_is_dropped_first_and_what_is_deferred_stays(world):
    world.topic(max_messages=3, overflow="drop_oldest")
    world.publish(b"again", b"deferred", b"held")
    consumer = world.subscribe(rdy=3)
    numbers = {body: number for number, _, body in received(consumer)}
    consumer.rdy_count = 0
    world.channel().requeue(consumer, numbers[b"again"], 0, world.now_ns)
    world.channel().requeue(consumer, numbers[b"deferred"], 5 * SECOND, world.now_ns)
    world.publish(b"new")
    channel = world.channel()
    assert (channel.depth, channel.deferred_count, channel.in_flight_count) == (1, 1, 1)
    consumer.rdy_count = 10
    world.broker.mark(channel)
    world.turn()
    assert [body for _, _, body in received(consumer)] == [b"new"]


@pytest.mark.parametrize("limits", [{"max_messages": 3}, {"max_bytes": 3 * 44}], ids=["messages", "bytes"])
def test_a_topic_without_channels_drops_its_oldest(world, limits):
    topic = world.topic(channel="", overflow="drop_oldest", **limits)
    for number in range(10):
        world.publish(b"message %02d" % number)
    assert (topic.depth, topic.first_partition.bounds.dropped_count) == (3, 7)
    world.pass_time(0)
    assert topic.first_partition.durable_floor == 8
    world.restart()
    assert world.broker.topics["t"].depth == 3


def test_a_paused_topic_drops_its_oldest(world):
    topic = world.topic(max_messages=3, overflow="drop_oldest")
    world.publish(b"0", b"1")
    world.broker.pause_topic(topic, True)
    for number in range(2, 10):
        world.publish(b"%d" % number)
    assert topic.depth == 3
    world.broker.pause_topic(topic, False)
    consumer = world.subscribe()
    assert [body for _, _, body in received(consumer)] == [b"7", b"8", b"9"]


def test_a_bound_that_comes_late_is_reached_in_parts(world):
    topic = world.topic()
    for _ in range(1500):
        world.publish(b"x")
    world.broker.change_settings(topic, None, Settings(max_messages=10, overflow="drop_oldest"))
    world.turn()
    assert (world.channel().depth, world.channel().limiter.dropped_count) == (10, 1490)


# -- settings ----------------------------------------------------------------------------------------------------------


def test_settings_outlive_the_process_and_go_with_what_they_are_of(world):
    topic = world.topic(max_attempts=7, ttl_ms=5)
    world.broker.change_settings(topic, "c", Settings(trace="all", ttl_ms=0))
    world.flush()
    world.restart()
    assert world.broker.own_settings("t") == Settings(max_attempts=7, ttl_ms=5)
    assert world.broker.settings_of("t", "c").trace == "all"
    assert world.broker.settings_of("t", "c").ttl_ms == 0
    assert world.channel().limiter.limits.max_attempts == 7
    world.broker.delete_channel(world.broker.topics["t"], "c")
    assert world.broker.settings_of("t", "c").trace == ""
    world.broker.delete_topic("t")
    world.flush()
    world.restart()
    world.broker.topic("t", 1)
    assert world.broker.own_settings("t") == Settings()


def test_who_listens_is_told_of_changes(world):
    told = []
    world.broker.on_settings_change.append(lambda *names: told.append(names))
    topic = world.topic()
    world.broker.change_settings(topic, "c", Settings(trace="traced"))
    assert told == [("t", None), ("t", "c")]


def test_ephemeral_topics_have_settings_that_are_not_written(world):
    topic = world.topic("t#ephemeral", "c#ephemeral", max_attempts=1)
    assert not world.broker._metadata
    assert world.broker.settings_of("t#ephemeral").dead_letter_topic == "t.dead#ephemeral"
    world.publish(b"bad", topic="t#ephemeral")
    consumer = world.subscribe("t#ephemeral", "c#ephemeral")
    world.channel("t#ephemeral", "c#ephemeral").remove(consumer)
    world.broker.mark(world.channel("t#ephemeral", "c#ephemeral"))
    world.turn()
    assert world.dead_bodies("t.dead#ephemeral") == [b"bad"]
    assert topic.ephemeral


def test_a_plain_topic_has_neither_policy_nor_bounds(world):
    topic = world.broker.topic("plain", 1)
    world.broker.channel(topic, "c")
    assert topic.first_partition.bounds is None
    assert world.channel("plain").limiter is None
    world.topic("other", max_attempts=1, max_messages=4)
    assert topic.first_partition.bounds is None
    assert world.channel("plain").limiter is None


def test_partitions_share_the_bounds_of_their_topic(world):
    meta = msgspec.structs.replace(EXTENDED_PLAIN, partition_num=3, extend_support=False)
    topic = world.broker.create_partitions("p", meta, range(3), world.now_ns)
    world.turn()
    world.broker.channel(topic, "c")
    world.broker.change_settings(topic, None, Settings(max_messages=4))
    for _ in range(4):
        world.broker.publish(topic, [b"x"])
    with pytest.raises(TopicFull, match="4 of max 4") as caught:
        world.broker.publish(topic, [b"x"])
    assert not caught.value.fatal


# -- every message ends somewhere --------------------------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(1, 5)),
        st.tuples(st.just("finish"), st.integers(0, 9)),
        st.tuples(st.just("requeue"), st.integers(0, 9)),
        st.tuples(st.just("defer"), st.integers(0, 9)),
        st.tuples(st.just("leave"), st.just(0)),
        st.tuples(st.just("come"), st.integers(1, 10)),
        st.tuples(st.just("time"), st.sampled_from([1, 30, 70, 700])),
        st.tuples(st.just("flush"), st.just(0)),
    ),
    max_size=40,
)


@pytest.mark.slow
@profile(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, max_attempts=st.integers(1, 3), is_ordered=st.booleans())
def test_every_message_is_finished_or_dies_exactly_once(tmp_path_factory, steps, max_attempts, is_ordered):
    disk = Disk(tmp_path_factory.mktemp("data"))
    disk.open()
    world = World(disk)
    topic = world.topic(max_attempts=max_attempts)
    world.broker.order_channel(topic, "c", is_ordered)
    published: list[bytes] = []
    finished: Counter[Any] = Counter()
    deliveries: Counter[Any] = Counter()
    consumers: list[Any] = []
    held: dict[Any, Any] = {}

    def look():
        world.flush(world.now_ns)
        world.broker.mark(world.channel())
        world.turn()
        for consumer in consumers:
            for number, attempts, body in received(consumer):
                deliveries[body] += 1
                assert attempts == deliveries[body] <= max_attempts
                held[number] = (consumer, body)

    for step, value in steps:
        if step == "publish":
            bodies = [b"%d" % (len(published) + each) for each in range(value)]
            published += bodies
            world.publish(*bodies)
        elif step == "come":
            consumers.append(world.subscribe(rdy=value))
        elif step == "leave" and consumers:
            consumer = consumers.pop()
            world.channel().remove(consumer)
            held = {number: each for number, each in held.items() if each[0] is not consumer}
        elif step == "time":
            world.pass_time(value * SECOND)
            held = {number: each for number, each in held.items() if world.channel().is_in_flight(number)}
        elif step in ("finish", "requeue", "defer") and held:
            number = sorted(held)[value % len(held)]
            consumer, body = held.pop(number)
            if step == "finish":
                assert world.channel().finish(consumer, [number]) == []
                finished[body] += 1
            else:
                delay_ns = 0 if step == "requeue" else (5 if value % 2 else 300) * SECOND
                assert world.channel().requeue(consumer, number, delay_ns, world.now_ns)
        look()
    consumers.append(world.subscribe(rdy=100))
    for _ in range(60):
        look()
        for number, (consumer, _) in list(held.items()):
            world.channel().requeue(consumer, number, 0, world.now_ns)
        held.clear()
        world.pass_time(400 * SECOND)
    look()
    dead = Counter(world.dead_bodies())
    assert finished + dead == Counter(published)
    assert max((finished + dead).values(), default=1) == 1
    channel = world.channel()
    assert (channel.depth, channel.deferred_count, channel.in_flight_count) == (0, 0, 0)
    assert channel.limiter.dead_letter_count == sum(dead.values())
    disk.die()


# -- with dispatch tags ------------------------------------------------------------------------------------------------


def tagged(world, *tags, **limits):
    topic = world.broker.extended_topic("t", world.now_ns)
    world.turn()
    world.broker.channel(topic, "c")
    world.broker.change_settings(topic, None, Settings(**limits))
    if tags:
        publish_tagged(world, *tags)


def publish_tagged(world, *tags):
    bodies = [extended_body(tag.encode(), b"%d" % number, version=2) for number, tag in enumerate(tags)]
    world.broker.publish_to(world.broker.topics["t"].first_partition, bodies, is_stored_form=True)
    world.turn()


def subscribe_tagged(world, tag, rdy=100):
    subscription = Subscription([], MINUTE, 15 * MINUTE, 0, Owner())
    subscription.tag = tag
    channel = world.channel()
    channel.add(subscription)
    subscription.rdy_count = rdy
    subscription.is_open = True
    world.broker.mark(channel)
    world.turn()
    return subscription


def test_what_waits_for_a_tag_can_become_too_old_and_be_dropped(world):
    tagged(world, ttl_ms=10_000)
    blue, plain = subscribe_tagged(world, "blue", rdy=1), subscribe_tagged(world, "")
    publish_tagged(world, "blue", "blue", "", "blue")
    assert (len(received(blue)), len(received(plain)), world.channel().depth) == (1, 1, 2)
    world.pass_time(11 * SECOND)
    assert (world.channel().depth, world.channel().limiter.expired_count) == (0, 2)
    world.broker.change_settings(world.broker.topics["t"], None, Settings(max_messages=5, overflow="drop_oldest"))
    publish_tagged(world, "blue", "blue", "", "blue", "blue", "blue")
    channel = world.channel()
    assert (channel.in_flight_count, channel.depth, channel.limiter.dropped_count) == (3, 2, 3)
    blue.rdy_count = 100
    world.broker.mark(channel)
    world.turn()
    assert [body[-1:] for _, _, body in received(blue)] == [b"4", b"5"]


def test_messages_with_tags_become_dead_letters_with_them(world):
    tagged(world, "blue", "red", max_attempts=2)
    blue, red = subscribe_tagged(world, "blue"), subscribe_tagged(world, "red")
    for attempt in (1, 2):
        for consumer in (blue, red):
            ((number, attempts, _),) = received(consumer)
            assert attempts == attempt
            world.channel().requeue(consumer, number, 0, world.now_ns)
        world.broker.mark(world.channel())
        world.turn()
    found = {headers["##client_dispatch_tag"]: body for headers, body in world.dead()}
    assert found == {"blue": b"0", "red": b"1"}
    assert world.channel().depth == world.channel().in_flight_count == 0


# -- any interleaving --------------------------------------------------------------------------------------------------

BOUNDED = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(1, 8)),
        st.tuples(st.just("defer"), st.integers(1, 400)),
        st.tuples(st.just("finish"), st.integers(0, 9)),
        st.tuples(st.just("requeue"), st.integers(0, 9)),
        st.tuples(st.just("rdy"), st.integers(0, 6)),
        st.tuples(st.just("time"), st.sampled_from([1, 30, 70])),
        st.tuples(st.just("pause"), st.booleans()),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    max_size=40,
)


@pytest.mark.slow
@profile(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=BOUNDED, most=st.integers(1, 6), by_bytes=st.booleans(), ttl_s=st.sampled_from([0, 20]))
def test_a_bound_holds_and_nothing_is_delivered_that_was_dropped(tmp_path_factory, steps, most, by_bytes, ttl_s):
    disk = Disk(tmp_path_factory.mktemp("data"))
    disk.open()
    world = World(disk)
    bound = {"max_bytes": most * 40} if by_bytes else {"max_messages": most}
    topic = world.topic(overflow="drop_oldest", ttl_ms=ttl_s * 1000, **bound)
    held: list[Any] = []
    consumer, count = world.subscribe(rdy=0), 0
    for step, value in steps:
        topic, channel = world.broker.topics["t"], world.channel()
        if step == "publish":
            world.publish(*(b"%06d" % (count + each) for each in range(value)))
            count += value
        elif step == "defer":
            world.publish(b"%06d" % count, due_ns=world.now_ns + value * SECOND)
            count += 1
        elif step == "rdy":
            consumer.rdy_count = value
            world.broker.mark(channel)
            world.turn()
        elif step == "time":
            world.pass_time(value * SECOND)
            held = [number for number in held if channel.is_in_flight(number)]
        elif step == "pause":
            world.broker.pause_topic(topic, value)
            world.turn()
        elif step == "restart":
            world.flush()
            world.restart()
            consumer, held = world.subscribe(rdy=0), []
        elif held:
            number = held.pop(value % len(held))
            if step == "finish":
                assert channel.finish(consumer, [number]) == []
            else:
                channel.requeue(consumer, number, 0 if value % 2 else 30 * SECOND, world.now_ns)
            world.broker.mark(channel)
            world.turn()
        channel = world.channel()
        came = [number for number, _, _ in received(consumer)]
        assert step == "time" or not set(came) & set(held)
        held = list(dict.fromkeys(held + came))
        assert sorted(held) == [number for number in range(count + 2) if channel.is_in_flight(number)]
        waiting = channel.depth
        assert waiting == 0 or unfinished_count(channel) <= most or channel.limit is not None
        assert unfinished_count(channel) == waiting + len(held) + channel.deferred_count + world.held_back()
    disk.die()
