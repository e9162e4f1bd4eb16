"""What comes again and what is new take turns, so that neither holds the other up."""

import random

import pytest
from tests.unit.broker.spill_disk import AsideDisk
from tests.unit.broker.test_channel import SECOND, TIMEOUT, make_channel, make_log, publish, received, subscribe
from tests.unit.broker.world import BrokerWorld

from flintmq.broker import peek
from flintmq.broker.channel import ChannelState
from flintmq.broker.spilled import SpilledStore
from flintmq.broker.tagged import TaggedChannel
from flintmq.errors import StorageError
from flintmq.message import extended_body
from flintmq.storage.memory_log import MemoryLog
from flintmq.topic_meta import TopicMeta

POISON = b"poison"


def log_of(*bodies):
    log = MemoryLog(0, 1_000_000)
    log.append(list(bodies), 1000)
    log.advance_committed(log.next_sequence)
    return log


def good(count):
    return [b"good%d" % number for number in range(count)]


def handle(channel, consumer, is_good, count_max, now=0):
    """Let a consumer handle so many messages one at a time, as they come; those that are not good are given back.

    Returns:
        Sequences as they were handled.
    """
    handled: list[int] = []
    waiting: list[tuple[int, int, bytes]] = []
    while len(handled) < count_max:
        channel.pump(now, now)
        waiting += received(consumer)
        if not waiting:
            break
        sequence, _, body = waiting.pop(0)
        handled.append(sequence)
        if is_good(sequence, body):
            assert channel.finish(consumer, (sequence,)) == []
        else:
            assert channel.requeue(consumer, sequence, 0, now)
    return handled


# -- a live consumer that gives back ---------------------------------------------------------------------------------


def test_a_message_that_is_always_given_back_takes_turns_with_what_is_new():
    channel = make_channel(make_log(300))
    consumer = subscribe(channel, rdy=1)
    handled = handle(channel, consumer, lambda sequence, _: sequence != 1, 60)
    assert handled == [each for number in range(2, 32) for each in (1, number)]


def test_several_of_them_take_turns_with_what_is_new_as_if_they_were_one():
    channel = make_channel(make_log(303))
    consumer = subscribe(channel, rdy=3)
    handled = handle(channel, consumer, lambda sequence, _: sequence > 3, 603)
    assert [each for each in handled if each > 3] == list(range(4, 304))
    assert max(handled.count(each) for each in (1, 2, 3)) - min(handled.count(each) for each in (1, 2, 3)) <= 1
    assert handled.count(1) >= 100, "and what is new does not hold them up"


def test_a_backlog_does_not_hold_up_what_was_given_back():
    channel = make_channel(make_log(100_000, batch=10_000))
    consumer = subscribe(channel, rdy=1)
    channel.pump(0, 0)
    ((first, _, _),) = received(consumer)
    assert channel.requeue(consumer, first, 0, 0)
    assert handle(channel, consumer, lambda *_: True, 3) == [2, 1, 3]


def test_with_a_large_rdy_turns_are_runs_and_still_one_for_one():
    log = make_log(5000, batch=1000)
    channel = make_channel(log)
    first = subscribe(channel, rdy=1000)
    channel.pump(0, 0)
    channel.remove(first)
    consumer = subscribe(channel, rdy=400)
    channel.pump(0, 0)
    kinds = ["again" if attempts > 1 else "new" for _, attempts, _ in received(consumer)]
    assert kinds.count("again") in range(190, 241)
    turns = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]
    assert turns == ["new", "again"] * (len(turns) // 2) + ["new"] * (len(turns) % 2)
    assert len(turns) > 10


def test_alone_each_has_all_there_is():
    channel = make_channel(make_log(1000, batch=500))
    first = subscribe(channel, rdy=1000)
    channel.pump(0, 0)
    assert len(received(first)) == 1000
    channel.remove(first)
    consumer = subscribe(channel, rdy=1000)
    channel.pump(0, 0)
    assert len(received(consumer)) == 1000


def give_back(channel, consumer, sequence):
    assert channel.requeue(consumer, sequence, 0, 0)


def let_time_out(channel, _consumer, _sequence):
    assert channel.handle_deadlines(TIMEOUT, 0)


def lose(channel, consumer, _sequence):
    channel.remove(consumer)
    channel.add(consumer)


@pytest.mark.parametrize("come_back", [give_back, let_time_out, lose])
def test_what_comes_back_waits_behind_one_that_is_there(come_back):
    channel = make_channel(make_log(3))
    consumer = subscribe(channel, rdy=1)
    channel.pump(0, 0)
    assert [sequence for sequence, _, _ in received(consumer)] == [1]
    come_back(channel, consumer, 1)
    channel.paused = True  # others could not take anything either
    channel.pump(0, 0)
    channel.paused = False
    assert handle(channel, consumer, lambda *_: True, 9) == [2, 1, 3]


@pytest.mark.parametrize("come_back", [give_back, let_time_out, lose])
def test_what_comes_back_alone_does_not_wait_for_what_is_published_later(come_back):
    log = make_log(1)
    channel = make_channel(log)
    consumer = subscribe(channel, rdy=1)
    channel.pump(0, 0)
    received(consumer)
    consumer.rdy_count = 0
    come_back(channel, consumer, 1)
    publish(log, 2)
    consumer.rdy_count = 1
    assert handle(channel, consumer, lambda *_: True, 9) == [1, 2, 3]


def test_only_the_first_that_comes_back_waits():
    """Those behind it would otherwise let two pass for each of them."""
    channel = make_channel(make_log(6))
    consumer = subscribe(channel, rdy=3)
    channel.pump(0, 0)
    received(consumer)
    consumer.rdy_count = 0
    for sequence in (1, 2, 3):
        give_back(channel, consumer, sequence)
    consumer.rdy_count = 1
    assert handle(channel, consumer, lambda *_: True, 9) == [4, 1, 5, 2, 6, 3]


def test_what_was_set_aside_and_is_given_back_waits_behind_one_that_is_there():
    channel = delayed(1, 4)
    consumer = subscribe(channel, rdy=1)
    assert handle(channel, consumer, lambda _sequence, _body: False, 1, 100 * SECOND) == [1]
    assert handle(channel, consumer, lambda *_: True, 9, 100 * SECOND) == [2, 1, 3, 4]


@pytest.mark.parametrize("come_back", [give_back, let_time_out, lose])
@pytest.mark.parametrize("tag", ["", "a"])
def test_also_within_a_tag(come_back, tag):
    log = MemoryLog(0, 1000)
    log.layout = 4
    bodies = [extended_body(b'{"##client_dispatch_tag":"%s"}' % each, b"x") for each in (tag.encode(), b"b") * 3]
    log.append(bodies, 1)
    log.advance_committed(log.next_sequence)
    channel = TaggedChannel("c", 0, log, ChannelState(1), SpilledStore(), random.Random(1))
    consumer, other = subscribe_tagged(channel, 1, tag), subscribe_tagged(channel, 0, "b")
    channel.pump(0, 0)
    assert [sequence for sequence, _, _ in received(consumer)] == [1]
    come_back(channel, consumer, 1)
    assert handle(channel, consumer, lambda *_: True, 9) == [3, 1, 5]
    other.rdy_count = 1
    assert handle(channel, other, lambda *_: True, 9) == [2, 4, 6]


@pytest.mark.parametrize("tag", ["", "a"])
def test_also_within_a_tag_those_that_came_again_come_when_every_new_message_kills(tag):
    log = MemoryLog(0, 1000)
    log.layout = 4
    log.append([extended_body(b'{"##client_dispatch_tag":"%s"}' % tag.encode(), b"x")] * 100, 1)
    log.advance_committed(log.next_sequence)
    channel = TaggedChannel("c", 0, log, ChannelState(1, bytes(20)), SpilledStore(), random.Random(1))
    subscribe_tagged(channel, 0, "b")
    done: set[int] = set()
    crashes = 0
    while len(done) < 20:
        assert crashes <= 40, channel.describe()
        consumer = subscribe_tagged(channel, 1, tag)
        while len(done) < 20:
            channel.pump(0, 0)
            ((sequence, _, _),) = received(consumer)
            if sequence > 20:
                crashes += 1
                break
            assert channel.finish(consumer, (sequence,)) == []
            done.add(sequence)
        channel.remove(consumer)


def test_what_is_published_while_there_was_nothing_else_has_the_next_turn():
    log = make_log(1)
    channel = make_channel(log)
    consumer = subscribe(channel, rdy=1)
    assert handle(channel, consumer, lambda *_: False, 5) == [1] * 5
    channel.pump(0, 0)
    publish(log, 2)
    assert channel.requeue(consumer, 1, 0, 0)
    received(consumer)
    assert handle(channel, consumer, lambda sequence, _: sequence > 1, 4) == [2, 1, 3, 1]


def test_the_first_that_came_back_is_the_first_that_comes_again():
    channel = make_channel(make_log(4))
    consumer = subscribe(channel, rdy=4)
    channel.pump(0, 0)
    received(consumer)
    consumer.rdy_count = 0
    for sequence in (3, 1, 4, 2):
        assert channel.requeue(consumer, sequence, 0, 0)
    consumer.rdy_count = 1
    assert handle(channel, consumer, lambda *_: True, 4) == [3, 1, 4, 2]


def test_timeouts_take_turns_with_what_is_new():
    channel = make_channel(make_log(6))
    consumer = subscribe(channel, rdy=1)
    got = []
    for turn in range(1, 8):
        channel.pump(turn * TIMEOUT, 0)
        ((sequence, _, _),) = received(consumer)
        got.append(sequence)
        if sequence == 1:
            assert channel.handle_deadlines((turn + 1) * TIMEOUT, 0)
        else:
            channel.finish(consumer, (sequence,))
    assert got == [1, 2, 1, 3, 1, 4, 1]


def test_what_comes_due_takes_turns_with_what_is_new():
    channel = make_channel(make_log(20))
    consumer = subscribe(channel, rdy=6)
    channel.pump(0, 0)
    for sequence, _, _ in received(consumer):
        assert channel.requeue(consumer, sequence, SECOND, 0)
    consumer.rdy_count = 1
    channel.handle_deadlines(SECOND, SECOND)
    handled = handle(channel, consumer, lambda *_: True, 12, SECOND)
    assert sorted(handled) == list(range(1, 13))
    assert sum(a > 6 for a in handled[:6]) == 3


def delayed(count, total):
    """A channel whose first so many messages were set aside and have come due, and the rest are new."""
    log = make_log(0)
    publish(log, count, batch=count, due_ns=100 * SECOND)
    publish(log, total - count)
    channel = make_channel(log)
    AsideDisk()
    disk = AsideDisk()
    channel.paused = True
    channel.pump(0, 0)
    disk.flush(channel, 100 * SECOND)
    channel.paused = False
    assert len(channel.spilled.ready) == count
    return channel


def test_what_was_set_aside_and_came_due_takes_turns_with_what_is_new():
    channel = delayed(50, 100)
    consumer = subscribe(channel, rdy=1)
    handled = handle(channel, consumer, lambda *_: True, 40, 100 * SECOND)
    assert sum(sequence > 50 for sequence in handled) == 20
    assert handled == [each for pair in zip(range(1, 21), range(51, 71), strict=True) for each in pair]


def test_what_always_comes_back_does_not_hold_up_what_was_set_aside():
    channel = delayed(50, 60)
    consumer = subscribe(channel, rdy=1)
    poison = 51
    handled = handle(channel, consumer, lambda sequence, _: sequence != poison, 180, 100 * SECOND)
    assert set(range(1, 61)) <= set(handled)


def test_what_was_set_aside_does_not_hold_up_what_comes_back():
    channel = delayed(50, 100)
    consumer = subscribe(channel, rdy=1)
    handled = handle(channel, consumer, lambda sequence, _: sequence != 51, 40, 100 * SECOND)
    assert handled.count(51) >= 8


def test_a_message_that_always_comes_back_does_not_fill_the_window_and_keeps_its_attempts():
    log = make_log(5000, batch=100)
    channel = make_channel(log, window_max=100)
    consumer = subscribe(channel, rdy=1)
    seen, last = set(), 0
    for _ in range(10_000):
        channel.pump(0, 0)
        ((sequence, attempts, _),) = received(consumer)
        seen.add(sequence)
        if sequence == 1:
            assert attempts == last + 1
            last = attempts
            assert channel.requeue(consumer, 1, 0, 0)
        else:
            assert channel.finish(consumer, (sequence,)) == []
    assert seen == set(range(1, 5001))
    assert (channel.floor, channel.spilled.count) == (5001, 1)
    assert last > 4000


# -- consumers that die ----------------------------------------------------------------------------------------------


def crash_loop(channel, rdy, is_poison, wanted, now=0, poison_count=1):
    """Consumers that handle one message at a time in the order received, FIN it, and die of the first poison.

    Returns:
        How many died before all wanted messages were finished.
    """
    done: set[int] = set()
    crashes = 0
    while not wanted <= done:
        assert crashes <= 2 * poison_count * len(wanted), (
            f"{crashes} crashes, {sorted(done)} done: {channel.describe()}"
        )
        consumer, waiting = subscribe(channel, rdy), []
        while True:
            channel.pump(now, now)
            waiting += received(consumer)
            if not waiting or wanted <= done:
                break
            sequence, _, body = waiting.pop(0)
            if is_poison(sequence, body):
                crashes += 1
                break
            assert channel.finish(consumer, (sequence,)) == []
            done.add(sequence)
        channel.remove(consumer)
    return crashes


@pytest.mark.parametrize("rdy", [1, 2, 3, 4, 7, 20, 2500])
@pytest.mark.parametrize("place", [1, 2, 10, 21])
def test_all_good_messages_are_through_after_at_most_twice_as_many_crashes(rdy, place):
    channel = make_channel(make_log(21))
    crashes = crash_loop(channel, rdy, lambda sequence, _: sequence == place, set(range(1, 22)) - {place})
    assert crashes <= 40


@pytest.mark.parametrize("rdy", [1, 3, 5, 30])
def test_also_when_all_of_them_came_back_from_a_restart(rdy):
    channel = make_channel(make_log(21), ChannelState(1, bytes(21), attempts=[(s, 0) for s in range(2, 22)]))
    assert crash_loop(channel, rdy, lambda sequence, _: sequence == 1, set(range(2, 22))) <= 40


@pytest.mark.parametrize("rdy", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("poison", [1, 15, 30])
def test_also_when_they_were_set_aside(rdy, poison):
    channel = delayed(15, 30)
    good = set(range(1, 31)) - {poison}
    assert crash_loop(channel, rdy, lambda sequence, _: sequence == poison, good, 100 * SECOND) <= 2 * len(good)


@pytest.mark.parametrize("rdy", [1, 3, 10])
def test_also_with_several_of_them(rdy):
    channel = make_channel(make_log(24))
    poison = {1, 2, 9, 24}
    crash_loop(channel, rdy, lambda sequence, _: sequence in poison, {*range(1, 25)} - poison, poison_count=4)


@pytest.mark.parametrize("rdy", [1, 2, 3, 10])
def test_also_when_consumers_share_a_slot(rdy):
    channel = make_channel(make_log(21))
    for _ in range(251):
        subscribe(channel, rdy=0)
    assert crash_loop(channel, rdy, lambda sequence, _: sequence == 1, set(range(2, 22))) <= 40


def test_when_every_new_message_kills_those_that_came_again_still_come():
    log = make_log(200)
    state = ChannelState(1, bytes(20))
    channel = make_channel(log, state)
    assert crash_loop(channel, 1, lambda sequence, _: sequence > 20, set(range(1, 21))) <= 40


@pytest.mark.parametrize("rdy", [1, 2, 3])
@pytest.mark.parametrize("tag", [b"", b"a"])
@pytest.mark.parametrize("is_there_another", [False, True])
def test_also_with_tags(rdy, tag, is_there_another):
    headers = b'{"##client_dispatch_tag":"%s"}' % tag
    log = MemoryLog(0, 1000)
    log.layout = 4
    log.append([extended_body(headers, b"m%d" % number) for number in range(21)], 1)
    log.advance_committed(log.next_sequence)
    channel = TaggedChannel("c", 0, log, ChannelState(1), SpilledStore(), random.Random(1))
    other = subscribe(channel, rdy=0)
    channel.remove(other)
    if is_there_another:
        other.tag = "b"
        channel.add(other)
    done: set[int] = set()
    crashes = 0
    while len(done) < 20:
        assert crashes <= 40, channel.describe()
        consumer, waiting = subscribe_tagged(channel, rdy, tag.decode()), []
        while len(done) < 20:
            channel.pump(0, 0)
            waiting += received(consumer)
            sequence = waiting.pop(0)[0]
            if sequence == 1:
                crashes += 1
                break
            assert channel.finish(consumer, (sequence,)) == []
            done.add(sequence)
        channel.remove(consumer)


def subscribe_tagged(channel, rdy, tag):
    consumer = subscribe(channel, rdy=0)
    channel.remove(consumer)
    consumer.tag = tag
    channel.add(consumer)
    consumer.rdy_count = rdy
    return consumer


def test_within_a_tag_what_comes_again_and_what_is_new_take_turns():
    log = MemoryLog(0, 1000)
    log.layout = 4
    bodies = [extended_body(b'{"##client_dispatch_tag":"%s"}' % (b"a", b"b")[n % 2], b"x") for n in range(100)]
    log.append(bodies, 1)
    log.advance_committed(log.next_sequence)
    channel = TaggedChannel("c", 0, log, ChannelState(1), SpilledStore(), random.Random(1))
    a, b = subscribe_tagged(channel, 1, "a"), subscribe_tagged(channel, 1, "b")
    channel.pump(0, 0)
    got: dict[object, list[int]] = {a: [], b: []}
    for _ in range(20):
        for consumer in (a, b):
            channel.pump(0, 0)
            for sequence, _, _ in received(consumer):
                got[consumer].append(sequence)
                if sequence == 1:
                    assert channel.requeue(consumer, 1, 0, 0)
                else:
                    assert channel.finish(consumer, (sequence,)) == []
    assert got[a][:9] == [1, 3, 1, 5, 1, 7, 1, 9, 1]
    assert got[b][:5] == [2, 4, 6, 8, 10]


def test_also_of_a_consumer_of_several_partitions():
    world = BrokerWorld()
    world.create("t", TopicMeta(partition_num=3))
    world.create_channel("t", "c")
    world.publish("t", [POISON], partition=1)
    for number in range(3):
        world.publish("t", good(7), partition=number)
    done: set[int] = set()
    crashes = 0
    while len(done) < 21:
        assert crashes <= 42
        consumer, waiting = world.subscribe("t", "c"), []
        consumer.ready(1)
        while len(done) < 21:
            waiting += consumer.received()
            message = waiting.pop(0)
            if message.body == POISON:
                crashes += 1
                break
            assert consumer.finish([message.internal]) == []
            done.add(message.internal)
        world.leave(consumer)


def test_a_lost_connection_gives_back_what_it_held_longest_last():
    channel = make_channel(make_log(5))
    one = subscribe(channel, rdy=5)
    channel.pump(0, 0)
    received(one)
    assert channel.requeue(one, 1, 0, 0)
    assert channel.requeue(one, 2, 0, 0)
    channel.pump(0, 0)
    received(one)
    assert channel.touch(one, 3, 0)
    assert channel.finish(one, (4,)) == []
    channel.remove(one)
    two = subscribe(channel, rdy=1)
    handled = handle(channel, two, lambda *_: True, 20)
    assert handled == [1, 2, 5, 3], "1 and 2 keep their place, 3 was delivered first of what was in flight"


# -- what cannot be read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unreadable", [1, 3])
def test_what_cannot_be_read_now_holds_up_neither_what_comes_again_nor_what_is_new(monkeypatch, unreadable):
    log = make_log(6, batch=1)
    channel = make_channel(log)
    consumer = subscribe(channel, rdy=2)
    channel.pump(0, 0)
    received(consumer)
    for sequence in (1, 2):
        assert channel.requeue(consumer, sequence, 0, 0)
    honest = log.read

    def read(sequence):
        if sequence == unreadable:
            raise StorageError("cannot be read now")
        return honest(sequence)

    got, failures = [], 0
    with monkeypatch.context() as patch:
        patch.setattr(channel.log, "read", read)
        for _ in range(10):
            try:
                channel.pump(0, 0)
            except StorageError:
                failures += 1
            for sequence, _, _ in received(consumer):
                got.append(sequence)
                assert channel.finish(consumer, (sequence,)) == []
    assert failures > 0
    assert sorted(got) == ([2, 3, 4, 5, 6] if unreadable == 1 else [1, 2])
    assert sorted(got + handle(channel, consumer, lambda *_: True, 9)) == [1, 2, 3, 4, 5, 6]


def test_a_look_shows_turns():
    channel = make_channel(make_log(6))
    consumer = subscribe(channel, rdy=2)
    channel.pump(0, 0)
    received(consumer)
    consumer.rdy_count = 0
    for sequence in (1, 2):
        assert channel.requeue(consumer, sequence, 0, 0)
    looked = [each.sequence for each in peek.next_messages(channel, 9, 9, 0)]
    consumer.rdy_count = 1
    assert looked == handle(channel, consumer, lambda *_: True, 9) == [3, 1, 4, 2, 5, 6]


def test_in_order_nothing_takes_turns():
    channel = make_channel(make_log(3))
    channel.deliver_in_order(lambda _floor: None)
    consumer = subscribe(channel, rdy=1)
    assert handle(channel, consumer, lambda *_: False, 5) == [1] * 5


def test_what_came_back_in_order_is_first_when_there_is_no_order_any_more():
    channel = make_channel(make_log(3))
    channel.deliver_in_order(lambda _floor: None)
    consumer = subscribe(channel, rdy=1)
    channel.pump(0, 0)
    assert [sequence for sequence, _, _ in received(consumer)] == [1]
    channel.remove(consumer)
    channel.deliver_in_order(None)
    assert handle(channel, subscribe(channel, rdy=1), lambda *_: True, 9) == [1, 2, 3]
