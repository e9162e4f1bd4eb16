"""The trace: what is chosen under load, which messages have a trace id, what events say, and who is traced at all."""

import asyncio
import random
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flintmq.batch import RAW_IDS, decode_batch, encode_batch
from flintmq.broker.broker import Broker, BrokerOptions
from flintmq.broker.channel import Channel, ChannelState
from flintmq.broker.spilled import SpilledStore
from flintmq.broker.subscription import Subscription
from flintmq.env import Env
from flintmq.errors import Exiting
from flintmq.message import TRACE_ID, internal_id
from flintmq.nsqd import tracing as tracing_module
from flintmq.nsqd.engine import Engine
from flintmq.nsqd.tracing import ChannelTrace, Event, Rate, Tracing, traced_in
from flintmq.settings import Settings
from flintmq.storage import ChannelStore, MemoryLog
from flintmq.testing import MemoryDisk
from flintmq.topic_meta import PLAIN, TopicMeta

SECOND = 1_000_000_000
TRACE_TOPIC = "nsqd_trace"


class Clock:
    """Time that passes when it is told to."""

    def __init__(self):
        self.now_ns = 5 * SECOND

    def monotonic_ns(self):
        return self.now_ns

    boottime_ns = monotonic_ns

    def wall_ns(self):
        return 1_700_000_000 * SECOND + self.now_ns


# -- how much is recorded ----------------------------------------------------------------------------------------------


def rate_of(most):
    clock = Clock()
    return Rate(clock.monotonic_ns, most), clock


def test_below_the_bound_everything_is_recorded():
    rate, clock = rate_of(1000)
    for _ in range(50):
        assert list(rate.choose(range(7, 17), 10, True)) == list(range(7, 17))
        clock.now_ns += SECOND // 100
    assert (rate.dropped_count, rate.stride) == (0, 1)


def test_a_burst_has_a_bound_of_its_own():
    rate, clock = rate_of(1000)
    assert list(rate.choose(range(1000), 1000, True)) == list(range(250))
    assert list(rate.choose([1, 2], 2, True)) == []
    clock.now_ns += SECOND // 100
    assert len(rate.choose(range(1000), 1000, True)) == 10
    assert rate.dropped_count == 750 + 2 + 990


@pytest.mark.parametrize("most", [1, 3, 1000, 20_000])
def test_a_flood_stays_below_the_bound_and_what_is_left_out_is_counted(most):
    rate, clock = rate_of(most)
    wanted = recorded = sequence = 0
    for _ in range(300):
        recorded += len(rate.choose(range(sequence, sequence + 1000), 1000, True))
        sequence += 1000
        wanted += 1000
        clock.now_ns += SECOND // 100
    assert recorded <= 3 * most + max(1, most // 4) + 1
    assert recorded >= most  # it is used, too
    assert rate.dropped_count == wanted - recorded


def test_under_load_the_same_messages_are_followed_through_all_of_their_events():
    rate, clock = rate_of(1000)
    chosen: dict[str, list[set[int]]] = {}
    for _ in range(400):
        # 30,000 a second
        for action in ("PUB", "START", "FIN"):
            chosen.setdefault(action, []).append(set(rate.choose(range(100, 200), 100, True)))
        clock.now_ns += SECOND // 100
    assert (rate.stride, rate.traced_stride) == (32, 1)
    settled = slice(100, 400)
    assert chosen["PUB"][settled] == chosen["START"][settled] == chosen["FIN"][settled]
    assert chosen["PUB"][settled][0] == {128, 160, 192}
    assert list(rate.choose([128, 129, 160], 3, True)) == [128, 160]
    clock.now_ns += 10 * SECOND
    assert list(rate.choose(range(100, 110), 10, True)) == list(range(100, 110)), (
        "and all of them when it is quiet again"
    )
    assert rate.stride == 1


def test_messages_with_a_trace_id_come_before_those_that_are_traced_because_all_are():
    rate, clock = rate_of(1000)
    recorded = {True: 0, False: 0}
    for number in range(400):
        for is_all, count in ((True, 500), (False, 7)):
            chosen = rate.choose(range(number * 500, number * 500 + count), count, is_all)
            if number >= 100:
                recorded[is_all] += len(chosen)
        clock.now_ns += SECOND // 100
    assert rate.traced_stride == 1
    assert recorded[False] == 300 * 7
    assert 0 < recorded[True] <= 300 * 3
    for _ in range(400):
        rate.choose(range(1000), 1000, False)
        clock.now_ns += SECOND // 100
    assert (rate.traced_stride, rate.stride) == (128, 1)


def test_a_pause_ends_a_flood():
    rate, clock = rate_of(1000)
    for _ in range(100):
        rate.choose(range(1000), 1000, True)
        clock.now_ns += SECOND // 100
    assert rate.stride == 128
    clock.now_ns += SECOND
    assert list(rate.choose(range(5), 5, True)) == list(range(5))


def test_what_was_left_out_before_counts_as_wanted():
    rate, _ = rate_of(1000)
    assert rate.choose((), 100, True) == ()
    assert rate.dropped_count == 100


# -- trace ids ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[5] * 9, [3, 5, 8, 1, 2, 9, 4, 4, 7]], ids=["one-size", "sizes"])
@pytest.mark.parametrize("traced", [set(), {0}, {8}, {3, 4}, set(range(9))])
@pytest.mark.parametrize("as_view", [False, True])
def test_messages_with_a_trace_id_are_found(sizes, traced, as_view):
    ids = [(1 << (7 * number)) % (1 << 64) or 1 if number in traced else 0 for number in range(9)]
    bodies = [TRACE_ID.pack(trace_id) + b"x" * size for trace_id, size in zip(ids, sizes, strict=True)]
    data = encode_batch(internal_id(2, 100), 0, 1, bodies, layout=RAW_IDS)
    batch = decode_batch(memoryview(data) if as_view else data)
    for first in range(100, 109):
        for end in range(first + 1, 110):
            assert list(traced_in(batch, first, end)) == [n for n in range(first, end) if n - 100 in traced]


# -- what an event says ------------------------------------------------------------------------------------------------


def test_an_event_leaves_out_what_it_does_not_know_and_keeps_zeros():
    event = Event(5, "PUB", "t", 7, 0, 0, offset=0)
    assert msgspec.json.encode(event) == (
        b'{"timestamp":5,"action":"PUB","topic":"t","msgid":7,"traceid":0,"partition":0,"offset":0}'
    )
    assert msgspec.json.encode(Event(5, "DROPPED", count=3)) == b'{"timestamp":5,"action":"DROPPED","count":3}'


# -- a broker that is traced -------------------------------------------------------------------------------------------


class Owner:
    """A consumer's connection."""

    def __init__(self, peer):
        self.peer = peer

    def flush(self):
        """There is nothing to write to."""


class World:
    """A broker, its engine and its trace; no sockets."""

    def __init__(self, rate_max=20_000, topic_name=TRACE_TOPIC, durability="os"):
        self.clock = Clock()
        files = MemoryDisk().attach()
        self.broker = Broker(files, ChannelStore(files), BrokerOptions(), random.Random(1), print)
        self.engine = Engine(
            Env(clock=self.clock), self.broker, durability=durability, sync_every=1, sync_timeout_ns=SECOND
        )
        self.looked_up_again = 0
        self.is_exiting = False
        self.tracing = Tracing(self.engine, topic_name, rate_max, self.create, self._look_up_again)
        self.tracing.node = "node:4150"
        self.broker.open(self.clock.wall_ns())
        self.tracing.start()
        self.broker.on_topic_change = lambda name, channel, _exists: self.tracing.changed(name, channel)

    def create(self, name):
        if self.is_exiting:
            raise Exiting
        return self.broker.topic(name, self.clock.wall_ns())

    def _look_up_again(self):
        self.looked_up_again += 1

    def switch(self, mode, topic="t", channel=None):
        own = msgspec.structs.replace(self.broker.own_settings(topic, channel), trace=mode)
        self.broker.change_settings(self.broker.topics[topic], channel, own)

    async def partitioned(self, name="p"):
        topic = self.broker.create_partitions(name, TopicMeta(partition_num=2), [0, 1], self.clock.wall_ns())
        self.engine.start()
        self.engine.schedule()
        while not all(partition.log.is_created for partition in topic.partitions.values()):
            await asyncio.sleep(0.001)
        return topic

    def channel(self, topic="t", name="c", number=0):
        self.broker.channel(self.broker.topics[topic], name)
        return self.broker.topics[topic].partitions[number].channels[name]

    def subscribe(self, channel, rdy_count=100, peer="10.0.0.1:5"):
        subscription = Subscription([], 60 * SECOND, 900 * SECOND, owner=Owner(peer))
        subscription.rdy_count = rdy_count
        subscription.is_open = True
        channel.add(subscription)
        self.broker.mark(channel)
        return subscription

    def publish(self, bodies, topic="t", peer="10.0.0.9:1", number=0, is_stored_form=False, due_ns=0):
        partition = self.broker.topics[topic].partitions[number]
        group = self.broker.publish_to(partition, bodies, due_ns, is_stored_form)
        if partition.events is not None:
            partition.events.publisher(group, peer)
        self.engine.schedule()
        return group

    def turn(self):
        self.engine._end_turns()

    def pump(self, channel):
        self.broker.mark(channel)
        self.engine._pump()

    def events(self, name=TRACE_TOPIC):
        """Everything that has been published to the trace."""
        self.tracing.flush()
        self.turn()
        topic = self.broker.topics.get(name)
        if topic is None:
            return []
        log, found = topic.first_partition.log, []
        sequence = log.start_sequence
        while sequence < log.committed_sequence:
            batch = log.read(sequence)
            assert batch is not None
            found += [bytes(batch.frames(s, s + 1))[34:] for s in range(batch.first, batch.end)]
            sequence = batch.end
        return [msgspec.json.decode(line, type=Event) for line in found]


def short(events):
    return [(event.action, event.msgid) for event in events]


@pytest.fixture
async def world():
    return World()


async def test_the_life_of_a_message(world):
    world.create("t")
    world.switch("all")
    channel = world.channel()
    consumer = world.subscribe(channel)
    world.publish([b"one", b"three"])
    world.turn()
    world.clock.now_ns += SECOND
    assert channel.touch(consumer, 2, world.clock.now_ns)
    assert channel.requeue(consumer, 2, 0, 0)
    world.pump(channel)
    channel.finish(consumer, (1,))
    assert channel.requeue(consumer, 2, 5 * SECOND, world.clock.now_ns)
    events = world.events()
    assert short(events) == [
        ("PUB", 1),
        ("PUB", 2),
        ("START", 1),
        ("START", 2),
        ("TOUCH", 2),
        ("REQ", 2),
        ("START", 2),
        ("FIN", 1),
        ("REQ_DEFER", 2),
    ]
    published, last = events[1], events[-1]
    assert published == Event(
        published.timestamp, "PUB", "t", 2, 0, 0, "", f"{2:016x}", 37, None, "10.0.0.9:1", "node:4150"
    )
    assert last == Event(
        last.timestamp, "REQ_DEFER", "t", 2, 0, 0, "c", f"{2:016x}", 37, 2, "10.0.0.1:5", "node:4150", 5000
    )
    assert [event.attempts for event in events if event.action == "START"] == [1, 1, 2]
    assert last.timestamp - published.timestamp == SECOND
    assert world.tracing.known_count == 1


async def test_who_published_is_told_of_each_and_a_duplicate_changes_nothing(world):
    topic = world.create("t")
    world.switch("all")
    for peer, count in (("a:1", 2), ("a:1", 1), ("b:2", 1), ("", 1), ("a:1", 1)):
        group = world.publish([b"x"] * count, peer=peer)
    events = topic.first_partition.events
    events.publisher(group, "late:3")
    assert group.notes == [(3, "a:1", False), (1, "b:2", False), (1, "", False), (1, "a:1", False)]
    world.turn()
    assert [event.client for event in world.events()] == ["a:1"] * 3 + ["b:2", "", "a:1"]


async def test_a_timeout_and_a_lost_connection_say_whose_they_were(world):
    world.create("t")
    world.switch("all")
    channel = world.channel()
    consumer = world.subscribe(channel, peer="10.0.0.1:6")
    world.publish([b"a", b"b"])
    world.turn()
    world.clock.now_ns += 61 * SECOND
    channel.handle_deadlines(world.clock.now_ns, 0)
    world.pump(channel)
    channel.remove(consumer)
    told = [(event.action, event.msgid, event.client) for event in world.events() if event.action[0] in "TD"]
    assert told == [(action, msgid, "10.0.0.1:6") for action in ("TIMEOUT", "DISCONNECT") for msgid in (1, 2)]


async def test_messages_of_partitions_say_their_trace_id_and_traced_means_only_those(world):
    topic = await world.partitioned()
    world.switch("traced", "p")
    channel = world.channel("p", number=1)
    consumer = world.subscribe(channel)
    with_id = [TRACE_ID.pack(77 if number == 1 else 0) + b"body" for number in range(3)]
    world.publish([b"plain"], "p", number=1)
    world.publish(with_id, "p", number=1, is_stored_form=True)
    world.turn()
    first = internal_id(1, 1)
    assert channel.touch(consumer, first, world.clock.now_ns)
    channel.finish(consumer, tuple(range(first, first + 4)))
    events = world.events()
    assert short(events) == [("PUB", first + 2), ("START", first + 2), ("FIN", first + 2)]
    assert {(e.traceid, e.message_id, e.partition) for e in events} == {(77, f"{first + 2:016x}{77:016x}", 1)}
    assert {e.offset for e in events} == {topic.partitions[1].log.read(1).offset_of(3)}
    assert world.tracing.rate.dropped_count == 0
    assert (world.tracing.known_count, world.tracing.recorded_count) == (0, 3)


async def test_messages_with_and_without_trace_ids_follow_each_other(world):
    topic = await world.partitioned()
    partition = topic.partitions[0]
    world.publish([TRACE_ID.pack(5) + b"before"], "p", is_stored_form=True)
    world.switch("traced", "p")  # while it waits to be written
    channel = world.channel("p")
    world.subscribe(channel, rdy_count=1000)
    expected, sequence, source = [1], 1, random.Random(3)
    for number in range(60):
        if number % 7 == 3:
            world.turn()
        count = source.randrange(1, 5)
        if source.random() < 0.6:
            world.publish([b"x" * number] * count, "p")
        else:
            ids = [source.choice((0, 9)) for _ in range(count)]
            world.publish([TRACE_ID.pack(each) + b"y" for each in ids], "p", is_stored_form=True)
            expected += [sequence + 1 + index for index, each in enumerate(ids) if each]
        sequence += count
    world.turn()
    events = world.events()
    for action in ("PUB", "START"):
        assert [event.msgid for event in events if event.action == action] == expected
    assert partition.events.untraced_from <= sequence + 1
    assert channel.in_flight_count == sequence


async def test_traced_costs_a_plain_topic_nothing_and_a_channel_goes_before_its_topic(world):
    topic = world.create("t")
    channel, other = world.channel(name="c"), world.channel(name="d")
    partition = topic.first_partition
    world.switch("traced")
    assert (partition.events, channel.events, other.events) == (None, None, None)
    world.switch("all", channel="c")
    assert (partition.events, other.events) == (None, None)
    assert channel.events is not None
    world.switch("all")
    world.switch("", channel="c")
    assert channel.events is None
    assert partition.events is not None
    assert other.events is not None
    assert world.looked_up_again == 1
    kept = other.events
    world.switch("all", channel="c")
    assert other.events is kept, "what it knows of messages in flight stays"
    world.switch("")
    assert (partition.events, other.events) == (None, None)


async def test_the_trace_is_not_traced_and_new_topics_and_channels_are(world):
    world.create(TRACE_TOPIC)
    world.switch("all", TRACE_TOPIC)
    mine = world.channel(TRACE_TOPIC)
    partition = world.broker.topics[TRACE_TOPIC].first_partition
    assert (partition.events, mine.events, partition.is_unwaited) == (None, None, True)
    world.create("t")
    world.switch("all")
    assert world.channel(name="new").events is not None
    world.publish([b"a"])
    world.turn()
    assert short(world.events()) == [("PUB", 1)]
    assert world.tracing.recorded_count == 1


async def test_what_was_delivered_before_tracing_began_is_looked_up(world):
    world.create("t")
    channel = world.channel()
    consumer = world.subscribe(channel)
    world.publish([b"a", b"b"])
    world.turn()
    world.switch("all")
    channel.finish(consumer, (1, 2))
    events = world.events()
    assert [(e.action, e.msgid, e.offset, e.attempts) for e in events] == [("FIN", 1, 0, None), ("FIN", 2, 35, None)]
    assert world.tracing.known_count == 0


async def test_deleted_and_switched_off_channels_keep_no_memory(world):
    world.create("t")
    world.switch("all")
    channel, other = world.channel(name="c"), world.channel(name="d")
    world.subscribe(channel)
    world.subscribe(other)
    world.publish([b"a", b"b"])
    world.turn()
    assert world.tracing.known_count == 4
    world.broker.delete_channel(world.broker.topics["t"], "c")
    assert world.tracing.known_count == 2
    world.switch("")
    assert world.tracing.known_count == 0


async def test_messages_in_flight_beyond_the_bound_are_forgotten_oldest_first(world, monkeypatch):
    monkeypatch.setattr(tracing_module, "_KNOWN_MAX", 3)
    world.create("t")
    world.switch("all")
    channel = world.channel()
    consumer = world.subscribe(channel)
    world.publish([b"a"] * 5)
    world.turn()
    channel.finish(consumer, (1, 2, 3, 4, 5))
    events = world.events()
    assert short(events)[-3:] == [("FIN", 3), ("FIN", 4), ("FIN", 5)]
    assert len(events) == 13
    assert (world.tracing.rate.dropped_count, world.tracing.known_count) == (2, 0)


async def test_more_than_the_rate_is_counted_and_told_by_one_event():
    world = World(rate_max=40)
    world.create("t")
    world.switch("all")
    world.publish([b"a"] * 25)
    world.turn()
    assert (world.tracing.recorded_count, world.tracing.rate.dropped_count) == (10, 15)
    world.tracing._tell_dropped()
    world.tracing._tell_dropped()
    dropped = [event for event in world.events() if event.action == "DROPPED"]
    assert [(event.count, event.node) for event in dropped] == [(15, "node:4150")]
    lines = [line for family in world.tracing.families() for line in family.lines]
    assert "flintmq_nsqd_trace_events_total 11\n" in lines
    assert "flintmq_nsqd_trace_events_dropped_total 15\n" in lines


async def test_what_the_disk_does_not_take_waits_within_a_bound(world, monkeypatch):
    monkeypatch.setattr(tracing_module, "_HELD_BYTES_MAX", 1000)
    world.create("t")
    world.switch("all")
    world.tracing._group = group = world.publish([b"stuck"], topic="t")  # of a topic whose files are not there yet
    world.engine._scheduled = True  # no turn ends
    for number in range(20):
        world.tracing.add(Event(number, "TOUCH", "t", number))
    world.tracing.flush()
    held = len(world.tracing._lines)
    assert 0 < held < 20
    assert world.tracing.rate.dropped_count == 20 - held
    group.end(None)
    world.tracing.flush()
    assert world.tracing._lines == []


async def test_events_that_could_not_be_stored_count_as_left_out(world):
    world.tracing._group, world.tracing._group_count = SimpleNamespace(ended=True, error=OSError("disk")), 7
    world.is_exiting = True
    world.tracing.add(Event(1, "TOUCH", "t", 1))
    world.tracing.flush()  # and this one has no topic to go to any more
    assert world.tracing.rate.dropped_count == 8


async def test_nobody_waits_for_the_sync_of_a_trace():
    world = World(durability="fsync")
    world.create(TRACE_TOPIC)
    partition = world.broker.topics[TRACE_TOPIC].first_partition
    own = world.broker.publish_to(partition, [b"{}"])
    world.engine._end_turn()
    assert own.ended
    assert partition.log.committed_sequence == 2
    assert partition.log.synced_sequence == 1
    stranger = world.broker.publish_to(partition, [b"{}"])
    stranger.waiters.append(SimpleNamespace(publish_ended=lambda: None))
    world.engine._end_turn()
    assert not stranger.ended, "whoever waits for an answer gets what --durability says"
    await world.engine.settle()
    assert stranger.ended


async def test_a_trace_topic_has_a_bound_unless_it_was_given_another_or_none(world):
    world.tracing.add(Event(1, "TOUCH", "t", 1))
    world.events()
    limits = world.broker.settings_of(TRACE_TOPIC)
    assert (limits.max_bytes, limits.overflow) == (1024 * 1024 * 1024, "drop_oldest")
    for given_one in (Settings(max_bytes=5000), Settings(max_bytes=0), Settings(max_messages=9)):
        other = World()
        topic = other.create(TRACE_TOPIC)
        other.broker.change_settings(topic, None, given_one)
        other.tracing.add(Event(1, "TOUCH", "t", 1))
        assert len(other.events()) == 1
        assert other.broker.own_settings(TRACE_TOPIC) == given_one


async def test_messages_set_aside_and_delivered_later_are_traced(world):
    world.create("t")
    world.switch("all")
    channel = world.channel()
    consumer = world.subscribe(channel)
    world.publish([b"a"])
    world.turn()
    channel.events.delivered_spilled(consumer, 1, bytes(channel.log.read(1).frames(1, 2)), 3)
    event = world.events()[-1]
    assert (event.action, event.attempts, event.offset) == ("START", 3, 0)


async def test_a_deferred_message_says_for_how_long(world):
    world.create("t")
    world.switch("all")
    world.publish([b"now"])
    world.publish([b"later"], due_ns=world.clock.wall_ns() + 5 * SECOND - 400_000)  # read a little before
    world.turn()
    assert [(event.action, event.delay_ms) for event in world.events()] == [("PUB", None), ("PUB", 5000)]


# -- any interleaving --------------------------------------------------------------------------------------------------


class Recorder:
    """A trace without a bound."""

    def __init__(self):
        self.known_count = 0
        self.events: list[Event] = []
        self.add = self.events.append

    def wall_ns(self):
        return 0

    def choose(self, sequences, count, is_all):
        assert is_all
        assert len(sequences) == count, "nothing is unknown"
        return sequences


STEPS = ["publish", "subscribe", "leave", "finish", "requeue", "defer", "touch", "wait"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 50)), max_size=40))
def test_the_events_of_every_message_are_a_life(steps):
    log = MemoryLog(0, 1_000_000)
    channel = Channel("c", 0, log, ChannelState(1), SpilledStore(), random.Random(1))
    recorder = Recorder()
    topic, partition = SimpleNamespace(name="t", meta=PLAIN), SimpleNamespace(number=0, log=log)
    channel.events = trace = ChannelTrace(recorder, topic, partition, channel, "all")  # type: ignore[arg-type]
    consumers: dict[str, Subscription] = {}
    holders: dict[int, Subscription] = {}  # of what is in flight, as the events tell
    now_ns = 0
    for step, number in steps:
        message = sorted(holders)[number % len(holders)] if holders else 0
        if step == "publish":
            log.append([b"x" * number] * (number % 7 + 1), 1)
            log.advance_committed(log.next_sequence)
        elif step == "subscribe" and len(channel.subscriptions) < 4:
            peer = f"consumer-{len(consumers)}"
            consumers[peer] = Subscription([], SECOND, 5 * SECOND, owner=Owner(peer))
            consumers[peer].rdy_count, consumers[peer].is_open = number % 9 + 1, True
            channel.add(consumers[peer])
        elif step == "leave" and channel.subscriptions:
            channel.remove(list(channel.subscriptions)[number % len(channel.subscriptions)])
        elif step == "wait":
            now_ns += number * SECOND // 10
            channel.handle_deadlines(now_ns, now_ns)
        elif message and step == "finish":
            assert channel.finish(holders[message], (message,)) == []
        elif message and step == "touch":
            assert channel.touch(holders[message], message, now_ns)
        elif message and step in ("requeue", "defer"):
            assert channel.requeue(holders[message], message, number if step == "defer" else 0, now_ns)
        channel.pump(now_ns, now_ns)
        holders = lived(recorder.events, consumers)
        assert channel.in_flight_count == len(holders)
        assert all(channel.is_in_flight(each) for each in holders)
    for event in recorder.events:
        batch = None if event.msgid is None else log.read(event.msgid)
        assert batch is not None
        assert event.offset == batch.offset_of(event.msgid or 0)
    assert recorder.known_count == len(trace._known) >= len(holders)


def lived(events, consumers):
    """Go through the events and see that each follows from those before; who holds what in the end."""
    holders: dict[int, Subscription] = {}
    attempts: dict[int, int] = {}
    finished = set()
    for event in events:
        assert event.msgid not in finished
        if event.action == "START":
            assert event.msgid not in holders
            holders[event.msgid] = consumers[event.client]
            attempts[event.msgid] = attempts.get(event.msgid, 0) + 1
        else:
            assert holders[event.msgid] is consumers[event.client]
            if event.action != "TOUCH":
                del holders[event.msgid]
            if event.action == "FIN":
                finished.add(event.msgid)
        assert event.attempts == attempts[event.msgid]
    return holders
