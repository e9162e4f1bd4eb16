"""Dispatch by tag: who may get a message, what waits for whom, and a state machine over all of it."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.broker.spill_disk import CURSOR, AsideDisk
from tests.unit.broker.test_channel import (
    SECOND,
    TIMEOUT,
    ChannelMachine,
    MachineSubscription,
    received,
)

from flintmq.batch import EXTENDED
from flintmq.broker import peek, seek
from flintmq.broker.broker import Broker, BrokerOptions
from flintmq.broker.channel import Channel, ChannelState
from flintmq.broker.shared_subscription import PartSubscription, SharedSubscription
from flintmq.broker.spilled import SpilledStore
from flintmq.broker.subscription import Locality, Subscription
from flintmq.broker.tagged import TaggedChannel, tag_at
from flintmq.errors import StorageError
from flintmq.message import TAG, extended_body
from flintmq.storage import ChannelStore
from flintmq.storage.memory_log import MemoryLog
from flintmq.testing.files import MemoryDisk
from flintmq.topic_meta import TopicMeta


def stored(tag, body, version=4):
    """What is stored of a message: with its tag in JSON headers, as headers, or without headers."""
    if not tag:
        return extended_body(b'{"k":"v"}' if version == 2 else b"", body)
    if version == TAG:
        return extended_body(tag.encode(), body, TAG)
    return extended_body(b'{"k":"v","##client_dispatch_tag":"%s"}' % tag.encode(), body)


def make_log(*tags):
    log = MemoryLog(0, 1_000_000)
    log.layout = EXTENDED
    publish(log, *tags)
    return log


def publish(log, *tags, due_ns=0):
    """Publish one batch, a message for each tag; every other one has its tag as version 2."""
    if tags:
        first = log.next_sequence
        log.append([stored(tag, b"m%d" % (first + i), 4 - 2 * (i % 2)) for i, tag in enumerate(tags)], 1000, due_ns)
    log.advance_committed(log.next_sequence)


def make_channel(log, state=None, aside=None, **options):
    return TaggedChannel("c", 0, log, state or ChannelState(1), aside or SpilledStore(), random.Random(1), **options)


def subscribe(channel, tag="", rdy=100, sample_rate=0, locality=Locality.GLOBAL):
    consumer = Subscription([], TIMEOUT, 15 * TIMEOUT, sample_rate, locality=locality)
    consumer.tag = tag
    consumer.rdy_count = rdy
    consumer.is_open = True
    channel.add(consumer)
    return consumer


def got(consumer):
    """Take the sequences that were put out."""
    return [sequence for sequence, _, _ in received(consumer)]


def pumped(channel, *consumers, now=0):
    channel.pump(now, now)
    return [got(consumer) for consumer in consumers]


# -- tags --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "tag"),
    [
        (extended_body(b"", b"x"), ""),
        (extended_body(b"blue", b"x", TAG), "blue"),
        (extended_body(b'{"##client_dispatch_tag":"blue"}', b"x"), "blue"),
        (extended_body(b'{"a":{"##client_dispatch_tag":"blue"}}', b"x"), ""),
        (extended_body(rb'{"\u0023#client_dispatch_tag":"blue"}', b"x"), "blue"),
        (extended_body(b'{"a":"##client_dispatch_tag"}', b"x"), ""),
        (extended_body(b'{"##client_dispatch_tag":7}', b"x"), ""),
        (extended_body(b'["##client_dispatch_tag"]', b"x"), ""),
        (extended_body(b'{"##client_dispatch_tag":', b"x"), ""),
        (extended_body(b"blue", b"x", 3), ""),
        (extended_body(b"\xff\xfe", b"x", TAG), "\xff\xfe"),
    ],
)
def test_the_tag_of_a_message(body, tag):
    log = MemoryLog(0, 10)
    log.layout = EXTENDED
    log.append([body], 1)
    batch = log.read(1)
    assert batch is not None
    frame = batch.frames(1, 2)
    assert tag_at(frame) == tag_at(memoryview(frame)) == tag_at(b"xyz" + frame, 3) == tag


# -- who gets what -----------------------------------------------------------------------------------------------------


def test_a_tagged_message_goes_to_who_desires_it_and_others_to_the_untagged():
    channel = make_channel(make_log("a", "", "b", "a", "x", ""))
    blank, a, b = subscribe(channel), subscribe(channel, "a"), subscribe(channel, "b")
    assert pumped(channel, blank, a, b) == [[2, 5, 6], [1, 4], [3]]
    assert channel.in_flight_count == 6


def test_without_a_consumer_of_its_tag_a_message_goes_to_the_untagged():
    channel = make_channel(make_log("a", "b", ""))
    blank = subscribe(channel)
    assert pumped(channel, blank) == [[1, 2, 3]]


def test_tagged_consumers_get_nothing_that_is_not_theirs():
    channel = make_channel(make_log("", "b", "a", ""))
    a = subscribe(channel, "a")
    assert pumped(channel, a) == [[3]]
    assert (channel.depth, channel.in_flight_count) == (3, 1)
    channel.finish(a, (3,))
    assert pumped(channel, a) == [[]]
    blank = subscribe(channel)
    assert pumped(channel, a, blank) == [[], [1, 2, 4]]


def test_a_group_that_is_not_ready_does_not_hold_up_the_others():
    channel = make_channel(make_log(*["a", ""] * 50))
    a, blank = subscribe(channel, "a", rdy=1), subscribe(channel)
    assert pumped(channel, a, blank) == [[1], list(range(2, 101, 2))]
    assert channel.depth == 49
    for sequence in range(1, 98, 2):
        channel.finish(a, (sequence,))
        assert pumped(channel, a) == [[sequence + 2]]
    assert channel.finish(a, (99,)) == []
    assert (channel.depth, channel.in_flight_count) == (0, 50)


def test_several_groups_become_ready_in_one_turn():
    channel = make_channel(make_log("a", "b", "", "a", "b"))
    a, b, blank = subscribe(channel, "a", rdy=0), subscribe(channel, "b", rdy=0), subscribe(channel)
    assert pumped(channel, a, b, blank) == [[], [], [3]]
    a.rdy_count = b.rdy_count = 5
    assert pumped(channel, a, b, blank) == [[1, 4], [2, 5], []]


def test_what_waits_is_tried_again_when_the_log_could_not_be_read(monkeypatch):
    channel = make_channel(make_log("a", ""))
    a, blank = subscribe(channel, "a", rdy=0), subscribe(channel)
    assert pumped(channel, a, blank) == [[], [2]]
    a.rdy_count = 1

    def fail(_sequence):
        raise StorageError("cannot be read now")

    with monkeypatch.context() as patch:
        patch.setattr(channel.log, "read", fail)
        with pytest.raises(StorageError):
            channel.pump(0, 0)
    assert pumped(channel, a, blank) == [[1], []]


def test_first_deliveries_have_attempts_1_whether_they_waited_or_not():
    channel = make_channel(make_log("a", "a", "", "a"))
    a, blank = subscribe(channel, "a", rdy=0), subscribe(channel)
    assert pumped(channel, a, blank) == [[], [3]]
    a.rdy_count = 10
    channel.pump(0, 0)
    assert received(a) == [
        (1, 1, stored("a", b"m1", 4)),
        (2, 1, stored("a", b"m2", 2)),
        (4, 1, stored("a", b"m4", 2)),
    ]


def test_consumers_of_one_tag_share_its_messages():
    channel = make_channel(make_log(*["a"] * 10))
    consumers = [subscribe(channel, "a") for _ in range(5)]
    assert sorted(len(each) for each in pumped(channel, *consumers))[-1] <= 4
    assert sum(consumer.in_flight_count for consumer in consumers) == 10


def test_the_nearest_consumer_of_a_tag_is_served_first():
    channel = make_channel(make_log("a", "a", "a"))
    far = subscribe(channel, "a")
    near = subscribe(channel, "a", rdy=2, locality=Locality.ZONE)
    assert pumped(channel, near, far) == [[1, 2], [3]]


# -- coming and going --------------------------------------------------------------------------------------------------


def test_what_waits_for_a_tag_falls_to_the_untagged_when_its_last_consumer_leaves():
    channel = make_channel(make_log("a", "", "a", "b"))
    blank, one, two, b = (subscribe(channel, tag, rdy) for tag, rdy in (("", 9), ("a", 0), ("a", 0), ("b", 0)))
    assert pumped(channel, blank, one, two, b) == [[2], [], [], []]
    channel.remove(one)
    assert pumped(channel, blank, two, b) == [[], [], []]
    channel.remove(two)
    assert pumped(channel, blank, b) == [[1, 3], []]
    channel.remove(b)
    assert pumped(channel, blank) == [[4]]


def test_what_waits_for_the_untagged_goes_to_who_comes_for_its_tag():
    channel = make_channel(make_log("a", "", "b", "a"))
    b, blank = subscribe(channel, "b"), subscribe(channel, rdy=0)
    assert pumped(channel, b, blank) == [[3], []]
    a = subscribe(channel, "a")
    assert pumped(channel, a, b, blank) == [[1, 4], [], []]
    blank.rdy_count = 5
    assert pumped(channel, a, b, blank) == [[], [], [2]]


def test_what_a_consumer_of_a_tag_held_goes_to_another_one_or_to_the_untagged():
    channel = make_channel(make_log("a", "a"))
    one, two, blank = subscribe(channel, "a"), subscribe(channel, "a", rdy=0), subscribe(channel)
    assert pumped(channel, one, two, blank) == [[1, 2], [], []]
    channel.remove(one)
    assert pumped(channel, two, blank) == [[], []]
    two.rdy_count = 1
    channel.pump(0, 0)
    assert [(sequence, attempts) for sequence, attempts, _ in received(two)] == [(2, 2)], "1 may be what it died of"
    channel.remove(two)
    channel.pump(0, 0)
    assert [(sequence, attempts) for sequence, attempts, _ in received(blank)] == [(1, 2), (2, 3)]


def test_what_the_untagged_held_goes_to_a_tag_that_came_meanwhile():
    channel = make_channel(make_log("a", ""))
    blank = subscribe(channel)
    assert pumped(channel, blank) == [[1, 2]]
    a = subscribe(channel, "a")
    assert channel.requeue(blank, 1, 0, 0)
    assert channel.requeue(blank, 2, 0, 0)
    assert pumped(channel, blank, a) == [[2], [1]]


def test_more_consumers_than_slots():
    channel = make_channel(make_log(*["a", ""] * 300))
    for number in range(300):
        subscribe(channel, "a" if number % 2 else "", rdy=0)
    a, blank = subscribe(channel, "a", 1000), subscribe(channel, "", 1000)
    assert pumped(channel, a, blank) == [list(range(1, 601, 2)), list(range(2, 601, 2))]
    channel.remove(a)
    assert pumped(channel, blank) == [[]], "others desire the tag"
    assert channel.finish(blank, tuple(range(2, 601, 2))) == []
    assert channel.depth == 300


# -- timeouts, delays, sampling ----------------------------------------------------------------------------------------


def test_timeouts_and_requeues_come_back_to_their_tag():
    channel = make_channel(make_log("a", "", "a"))
    a, blank = subscribe(channel, "a"), subscribe(channel)
    assert pumped(channel, a, blank) == [[1, 3], [2]]
    assert channel.requeue(a, 3, 5 * SECOND, 0)
    assert channel.finish(blank, (2,)) == []
    channel.handle_deadlines(61 * SECOND, 61 * SECOND)
    assert pumped(channel, a, blank, now=61 * SECOND) == [[1, 3], []]
    assert channel.timeout_count == 1


def test_delayed_messages_go_by_their_tag_when_they_come_due():
    log = make_log()
    publish(log, "a", "", due_ns=10 * SECOND)
    publish(log, "", "a")
    channel = make_channel(log)
    a, blank = subscribe(channel, "a", rdy=1), subscribe(channel)
    assert pumped(channel, a, blank) == [[4], [3]]
    channel.handle_deadlines(10 * SECOND, 10 * SECOND)
    assert pumped(channel, a, blank, now=10 * SECOND) == [[], [2]]
    channel.finish(a, (4,))
    assert pumped(channel, a, blank, now=10 * SECOND) == [[1], []]


def test_what_was_set_aside_goes_by_its_tag():
    channel = make_channel(make_log(*["a", ""] * 8), window_max=8)
    channel.waiting_max = 3
    a, blank = subscribe(channel, "a", rdy=0), subscribe(channel)
    assert pumped(channel, a, blank) == [[], [2, 4, 6]], "three wait, and one more does not fit"
    channel.finish(blank, (2, 4, 6))
    a.rdy_count = 1
    assert pumped(channel, a, blank) == [[1], [8]]
    a.rdy_count = 100
    assert [sorted(each) for each in pumped(channel, a, blank)] == [[3, 5, 7, 9, 11, 13, 15], [10, 12, 14, 16]]
    assert channel.spilled.count > 0, "a full window was spilled"
    AsideDisk().flush(channel, 0)
    assert channel.finish(a, tuple(range(1, 16, 2))) == []
    assert channel.finish(blank, tuple(range(8, 17, 2))) == []
    assert (channel.floor, channel.spilled.count, channel.depth) == (17, 0, 0)


def test_sampling_drops_only_what_the_sampled_consumer_was_to_get():
    channel = make_channel(make_log(*["a", ""] * 500))
    a, blank = subscribe(channel, "a", rdy=1000, sample_rate=20), subscribe(channel, rdy=1000)
    mine, others = pumped(channel, a, blank)
    assert others == list(range(2, 1001, 2))
    assert 50 < len(mine) < 160
    assert all(sequence % 2 for sequence in mine)
    assert (channel.depth, channel.in_flight_count) == (0, 500 + len(mine))


# -- the bound ---------------------------------------------------------------------------------------------------------


def test_so_many_wait_and_then_the_cursor_stops():
    channel = make_channel(make_log(*["a"] * 10, ""))
    channel.waiting_max = 10
    a, blank = subscribe(channel, "a", rdy=0), subscribe(channel)
    assert pumped(channel, a, blank) == [[], [11]], "ten may wait"
    publish(channel.log, "a", "", "")
    assert pumped(channel, a, blank) == [[], []], "the eleventh may not, and those behind it wait for it"
    assert (channel.next, channel.depth) == (12, 13)
    a.rdy_count = 1
    assert pumped(channel, a, blank) == [[1], [13, 14]]


def test_what_comes_again_waits_within_the_same_bound():
    channel = make_channel(make_log(*["a"] * 6))
    channel.waiting_max = 4
    one, two = subscribe(channel, "a"), subscribe(channel, "a", rdy=0)
    blank = subscribe(channel)
    assert pumped(channel, one, two, blank) == [[1, 2, 3, 4, 5, 6], [], []]
    channel.remove(one)
    publish(channel.log, "")
    assert pumped(channel, two, blank) == [[], []], "beyond the bound what is new waits, too"
    assert (channel.window.waiting_count, channel.depth) == (2, 7)
    two.rdy_count = 2
    assert pumped(channel, two, blank) == [[2, 3], [7]]


# -- what operators do -------------------------------------------------------------------------------------------------


def waiting_channel():
    """Two wait for ``a``, one for the untagged, one is in flight at ``b``."""
    channel = make_channel(make_log("a", "", "b", "a"))
    consumers = [subscribe(channel, "a", rdy=0), subscribe(channel, rdy=0), subscribe(channel, "b")]
    assert pumped(channel, *consumers) == [[], [], [3]]
    assert channel.depth == 3
    return channel, *consumers


def test_a_look_sees_what_waits_and_changes_nothing():
    channel, a, blank, b = waiting_channel()
    assert [each.sequence for each in peek.next_messages(channel, 10, 10, 0)] == [1, 2, 4]
    a.rdy_count = blank.rdy_count = 10
    assert pumped(channel, a, blank, b) == [[1, 4], [2], []]


def test_a_message_that_waits_can_be_dropped():
    channel, a, blank, b = waiting_channel()
    assert seek.drop(channel, 1) is True
    assert seek.drop(channel, 2) is True
    assert seek.drop(channel, 1) is False
    assert channel.depth == 1
    a.rdy_count = blank.rdy_count = 10
    assert pumped(channel, a, blank, b) == [[4], [], []]


def test_empty_drops_what_waits():
    channel, a, blank, b = waiting_channel()
    channel.empty()
    assert (channel.depth, channel.in_flight_count) == (0, 0)
    a.rdy_count = blank.rdy_count = 10
    assert pumped(channel, a, blank, b) == [[], [], []]


def test_skipping_finishes_what_waits():
    channel, _a, _blank, b = waiting_channel()
    channel.skipped = True
    channel.pump(0, 0)
    assert (channel.depth, channel.in_flight_count, b.in_flight_count) == (0, 1, 1)


def test_a_confirmed_range_holds_nothing_that_waits():
    channel, a, _blank, _b = waiting_channel()
    channel.confirm(4)
    a.rdy_count = 10
    assert pumped(channel, a) == [[4]]
    assert (channel.floor, channel.depth) == (3, 0)


def test_a_replay_begins_anew():
    channel, a, blank, b = waiting_channel()
    seek.seek(channel, seek.parse_place("msgcount:0"), 1)
    a.rdy_count = blank.rdy_count = 10
    assert pumped(channel, a, blank, b) == [[1, 4], [2], [3]]


def test_a_paused_channel_delivers_nothing_that_waits():
    channel, a, blank, b = waiting_channel()
    channel.paused = True
    a.rdy_count = blank.rdy_count = 10
    assert pumped(channel, a, blank, b) == [[], [], []]
    channel.paused = False
    assert pumped(channel, a, blank, b) == [[1, 4], [2], []]


def test_a_restart_brings_what_waited_for_the_first_time():
    channel, a, blank, b = waiting_channel()
    restarted = make_channel(channel.log, channel.state())
    a, blank, b = subscribe(restarted, "a"), subscribe(restarted), subscribe(restarted, "b")
    restarted.pump(0, 0)
    found = [[(sequence, attempts) for sequence, attempts, _ in received(each)] for each in (a, blank, b)]
    assert found == [[(1, 1), (4, 1)], [(2, 1)], [(3, 2)]]


# -- in order ----------------------------------------------------------------------------------------------------------


def ordered(*tags):
    channel = make_channel(make_log(*tags))
    channel.deliver_in_order(lambda _floor: None)
    return channel


def test_in_order_a_message_waits_for_its_consumer_and_those_behind_it_for_the_message():
    channel = ordered("", "a", "", "b")
    blank, a = subscribe(channel), subscribe(channel, "a", rdy=0)
    assert pumped(channel, blank, a) == [[1], []]
    assert channel.finish(blank, (1,)) == []
    assert pumped(channel, blank, a) == [[], []]
    assert len(channel.window) == 0
    a.rdy_count = 1
    assert pumped(channel, blank, a) == [[], [2]]
    assert channel.requeue(a, 2, 0, 0)
    a.rdy_count = 0
    assert pumped(channel, blank, a) == [[], []]
    channel.remove(a)
    assert pumped(channel, blank) == [[2]]
    channel.finish(blank, (2,))
    assert pumped(channel, blank) == [[3]]
    channel.finish(blank, (3,))
    assert pumped(channel, blank) == [[4]]


def test_what_waits_when_order_is_demanded_comes_in_order():
    channel, a, blank, b = waiting_channel()
    channel.deliver_in_order(lambda _floor: None)
    a.rdy_count = blank.rdy_count = 10
    assert pumped(channel, a, blank, b) == [[], [], []], "one is in flight"
    channel.finish(b, (3,))
    for holder, sequence in ((a, 1), (blank, 2), (a, 4)):
        assert [got for got in pumped(channel, a, blank, b) if got] == [[sequence]]
        assert channel.finish(holder, (sequence,)) == []


# -- several partitions, broker ----------------------------------------------------------------------------------------


def test_a_consumer_of_several_partitions_gets_its_tag_of_each():
    channels = {}
    for number in range(2):
        log = MemoryLog(number, 100)
        log.layout = EXTENDED
        publish(log, "a", "", "a")
        channels[number] = TaggedChannel("c", number, log, ChannelState(1), SpilledStore(), random.Random(1))
    consumers = []
    for tag, rdy in (("a", 3), ("", 1)):
        parts = [PartSubscription([], TIMEOUT, 15 * TIMEOUT) for _ in channels]
        shared = SharedSubscription(parts)
        for part, channel in zip(parts, channels.values(), strict=True):
            part.tag = tag
            channel.add(part)
        shared.rdy_count = rdy
        shared.is_open = True
        consumers.append(shared)
    for _ in range(2):
        for channel in channels.values():
            channel.pump(0, 0)
    a, blank = consumers
    assert [part.in_flight_count for part in a.parts] == [2, 1]
    assert [part.in_flight_count for part in blank.parts] == [1, 0]
    assert channels[0].finish(blank.parts[0], (2,)) == []
    assert channels[0].finish(a.parts[0], (1,)) == []
    channels[1].pump(0, 0)
    assert [part.in_flight_count for part in a.parts] == [1, 2]
    assert [part.in_flight_count for part in blank.parts] == [0, 1]


def test_the_broker_makes_such_channels_for_extended_topics_alone():
    files = MemoryDisk(rng=random.Random(1)).attach()
    broker = Broker(files, ChannelStore(files), BrokerOptions(), random.Random(1), print)
    broker.open(1)
    topics = [
        (broker.topic("plain", 1), Channel),
        (broker.create_partitions("parts", TopicMeta(partition_num=2), [0, 1], 1), Channel),
        (broker.create_partitions("tags", TopicMeta(partition_num=2, extend_support=True), [0, 1], 1), TaggedChannel),
        (broker.extended_topic("headers", 1), TaggedChannel),
        (broker.extended_topic("headers#ephemeral", 1), TaggedChannel),
    ]
    for topic, kind in topics:
        assert {type(channel) for channel in broker.channel(topic, "c")[0]} == {kind}, topic.name


def test_without_tagged_consumers_all_is_as_in_any_channel():
    log = make_log(*["a", "", "b"] * 30)
    kinds = (Channel, TaggedChannel)
    channels = [kind("c", 0, log, ChannelState(1), SpilledStore(), random.Random(1)) for kind in kinds]
    pairs = [[subscribe(channel, rdy=7), subscribe(channel, rdy=40)] for channel in channels]
    for turn in range(20):
        plain, tagged = (pumped(channel, *pair) for channel, pair in zip(channels, pairs, strict=True))
        assert plain == tagged
        for channel, pair in zip(channels, pairs, strict=True):
            for consumer, sequences in zip(pair, plain, strict=True):
                if sequences[1:]:
                    assert channel.finish(consumer, tuple(sequences[1:])) == []
                if sequences and turn < 5:
                    assert channel.requeue(consumer, sequences[0], 0, 0)
                elif sequences:
                    assert channel.finish(consumer, (sequences[0],)) == []
    assert channels[0].floor == channels[1].floor == 91


# -- everything at once ------------------------------------------------------------------------------------------------

TAGS = ("", "a", "b")
tags = st.sampled_from(TAGS)


def subscribe_for_machine(channel, rdy, tag):
    consumer = MachineSubscription([], TIMEOUT, 15 * TIMEOUT)
    consumer.tag = tag
    consumer.rdy_count = rdy
    consumer.is_open = True
    consumer.room_bytes = 1 << 40
    channel.add(consumer)
    return consumer


class TaggedMachine(ChannelMachine):
    """The machine of a plain channel with tags: nobody gets what is not his, and nothing waits for who is ready."""

    @initialize(window_max=st.sampled_from([8, 40, 1000]), waiting_max=st.sampled_from([2, 5, 1000]))
    def begin(self, window_max, waiting_max=1000):
        super().begin(window_max)
        self.waiting_max = waiting_max
        self.log.layout = EXTENDED
        self.tags = {}
        self.channel = self.new_channel()

    def new_channel(self, state=None, aside=None):
        channel = make_channel(self.log, state, aside, window_max=self.window_max)
        channel.waiting_max = self.waiting_max
        return channel

    def allowed_tag(self, sequence):
        """Of the consumers that may get a message."""
        tag = self.tags[sequence]
        return tag if any(consumer.tag == tag for consumer in self.consumers) else ""

    def pump(self):
        self.flush()
        self.channel.pump(self.now, self.now)
        for consumer in self.consumers:
            for sequence, attempts, body in received(consumer):
                assert body.endswith(b"m%d" % sequence)
                assert consumer.tag == self.allowed_tag(sequence), "not for this consumer"
                assert sequence not in self.finished, "delivered after FIN"
                assert sequence not in self.held, "in flight twice"
                assert attempts == self.attempts.get(sequence, 0) + 1
                assert self.due.pop(sequence, 0) <= self.now, "delivered early"
                self.attempts[sequence] = attempts
                self.held[sequence] = consumer
            assert consumer.in_flight_count <= max(consumer.rdy_count, 0) + consumer.over
            assert consumer.in_flight_count == sum(owner is consumer for owner in self.held.values())
        self.check_that_nothing_is_stuck()

    def is_waiting(self, sequence):
        """Whether a message could be delivered now, as far as the channel has it in memory."""
        channel = self.channel
        if sequence in self.held or sequence in self.finished:
            return False
        aside = channel.spilled.loaded.get(sequence)
        if aside is not None:
            return aside.owner is None
        if sequence >= channel.next:
            return self.due.get(sequence, 0) <= self.now
        return channel.window.is_queued(sequence)

    def check_that_nothing_is_stuck(self):
        ready = {consumer.tag for consumer in self.consumers if consumer.capacity > 0}
        waiting = [sequence for sequence in self.tags if self.is_waiting(sequence)]
        stuck = [sequence for sequence in waiting if self.allowed_tag(sequence) in ready]
        groups = self.channel._groups
        everyone = {"": groups.untagged, **groups.groups}
        if max(group.waiting_count for group in everyone.values()) < self.waiting_max:
            assert not stuck, self.channel.describe()
        else:
            assert not any(everyone[tag].waiting_count for tag in ready), self.channel.describe()
        assert set(everyone) - {""} == {consumer.tag for consumer in self.consumers} - {""}

    @rule(published=st.lists(tags, min_size=1, max_size=20))
    def publish(self, published):
        self.take(published)
        publish(self.log, *published)
        self.pump()

    @rule(delay=st.integers(1, 200), tag=tags)
    def publish_deferred(self, delay, tag):
        self.due[self.log.next_sequence] = self.now + delay * SECOND
        self.take([tag])
        publish(self.log, tag, due_ns=self.now + delay * SECOND)
        self.pump()

    def take(self, published):
        for tag in published:
            self.published += 1
            self.tags[self.published] = tag

    @rule(rdy=st.integers(0, 15), tag=tags)
    @precondition(lambda self: len(self.consumers) < 6)
    def connect(self, rdy, tag):
        self.consumers.append(subscribe_for_machine(self.channel, rdy, tag))
        self.pump()

    @rule(data=st.data())
    @precondition(lambda self: len(self.finished) < self.published)
    def drop(self, data):
        left = [sequence for sequence in self.tags if sequence not in self.finished]
        sequence = data.draw(st.sampled_from(left))
        self.flush()
        if seek.drop(self.channel, sequence) is None:
            pack = self.disk.store.find_spilled(CURSOR, sequence)
            assert pack is not None
            assert seek.drop_spilled(self.channel, sequence, pack, self.channel.spilled.generation)
        self.held.pop(sequence, None)
        self.due.pop(sequence, None)
        self.finished.add(sequence)
        self.pump()

    @rule()
    def look(self):
        self.pump()
        found = [each.sequence for each in peek.next_messages(self.channel, 1000, 10, self.now)]
        assert len(found) == len(set(found))
        assert set(found) == {sequence for sequence in self.tags if self.is_waiting(sequence)}
        self.pump()

    @rule()
    def restart(self):
        self.flush()
        state = self.channel.state()
        self.channel = self.new_channel(state, self.disk.open())
        for sequence, (_, attempts, _) in self.disk.rows().items():
            self.attempts[sequence] = attempts
        self.held.clear()
        self.consumers.clear()

    def teardown(self):
        """Everything published is delivered in the end, to untagged consumers when there are no others."""
        if not hasattr(self, "channel"):
            return
        for consumer in list(self.consumers):
            self.channel.remove(consumer)
        self.consumers.clear()
        self.held.clear()
        consumer = subscribe_for_machine(self.channel, 1000, "")
        self.consumers.append(consumer)
        for _ in range(60):
            self.now += 70 * SECOND
            self.channel.handle_deadlines(self.now, self.now)
            self.held = {s: c for s, c in self.held.items() if self.owner_of(s, 0) is c}
            self.pump()
            mine = list(self.held)
            assert not mine or self.channel.finish(consumer, tuple(mine)) == []
            self.held.clear()
            self.finished.update(mine)
        assert len(self.finished) == self.published, self.channel.describe()


class OrderedTaggedMachine(RuleBasedStateMachine):
    """In order: one in flight, the oldest that is not finished, at a consumer that may have it, if one is ready."""

    @initialize()
    def begin(self):
        self.log = make_log()
        self.now = 0
        self.tags = []
        self.done = 0
        self.blocked_until = 0
        self.consumers = []
        self.holder = None
        self.channel = make_channel(self.log)
        self.kept = 1
        self.channel.deliver_in_order(self.keep)

    def keep(self, floor):
        self.kept = floor

    def pump(self):
        self.channel.pump(self.now, self.now)
        head = self.done + 1
        there = {consumer.tag for consumer in self.consumers}
        allowed = None
        if head <= len(self.tags):
            allowed = self.tags[head - 1] if self.tags[head - 1] in there else ""
        for consumer in self.consumers:
            for sequence in got(consumer):
                assert self.holder is None, "two in flight"
                assert sequence == head, "not in order"
                assert consumer.tag == allowed
                assert self.kept == self.channel.floor == head
                assert self.blocked_until <= self.now
                self.holder = consumer
        if self.holder is None and allowed is not None and self.blocked_until <= self.now:
            assert not any(consumer.tag == allowed and consumer.capacity > 0 for consumer in self.consumers)

    @rule(published=st.lists(tags, min_size=1, max_size=5))
    def publish(self, published):
        self.tags += published
        publish(self.log, *published)
        self.pump()

    @rule(rdy=st.integers(0, 2), tag=tags)
    @precondition(lambda self: len(self.consumers) < 5)
    def connect(self, rdy, tag):
        self.consumers.append(subscribe_for_machine(self.channel, rdy, tag))
        self.pump()

    @rule(data=st.data(), rdy=st.integers(0, 2))
    @precondition(lambda self: self.consumers)
    def change_rdy(self, data, rdy):
        data.draw(st.sampled_from(self.consumers)).rdy_count = rdy
        self.pump()

    @rule(data=st.data())
    @precondition(lambda self: self.consumers)
    def disconnect(self, data):
        consumer = data.draw(st.sampled_from(self.consumers))
        self.channel.remove(consumer)
        self.consumers.remove(consumer)
        if self.holder is consumer:
            self.holder = None
        self.pump()

    @rule()
    @precondition(lambda self: self.holder)
    def finish(self):
        assert self.channel.finish(self.holder, (self.done + 1,)) == []
        self.done += 1
        self.holder = None
        self.pump()

    @rule(delay=st.sampled_from([0, 1, 100]))
    @precondition(lambda self: self.holder)
    def requeue(self, delay):
        assert self.channel.requeue(self.holder, self.done + 1, delay * SECOND, self.now)
        self.holder = None
        self.blocked_until = self.now + delay * SECOND
        self.pump()

    @rule(seconds=st.sampled_from([5, 61, 130]))
    def time_passes(self, seconds):
        self.now += seconds * SECOND
        self.channel.handle_deadlines(self.now, self.now)
        if self.channel.in_flight_count == 0:
            self.holder = None
        self.pump()

    @rule()
    def restart(self):
        self.channel = make_channel(self.log, self.channel.state())
        self.channel.deliver_in_order(self.keep)
        self.consumers.clear()
        self.holder = None

    @invariant()
    def one_in_flight(self):
        assert self.channel.in_flight_count == (self.holder is not None)
        assert self.channel.floor == self.done + 1


TestTaggedMachine = pytest.mark.slow(TaggedMachine.TestCase)
TestTaggedMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestOrderedTaggedMachine = pytest.mark.slow(OrderedTaggedMachine.TestCase)
TestOrderedTaggedMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
