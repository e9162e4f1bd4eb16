"""Filters by header: what they take, and what a channel does with what a consumer does not take."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.broker.spill_disk import AsideDisk
from tests.unit.broker.test_channel import SECOND, received, subscribe

from flintmq.batch import EXTENDED
from flintmq.broker import channel as channel_module
from flintmq.broker.channel import Channel, ChannelState
from flintmq.broker.ext_filter import VALUE_SIZE_MAX, BadGlob, ExtFilter, regex_of_glob
from flintmq.broker.latency import Latency
from flintmq.broker.spilled import SpilledStore
from flintmq.broker.tagged import TaggedChannel
from flintmq.message import JSON, TAG, extended_body
from flintmq.storage.memory_log import MemoryLog
from flintmq.wire.identify import ExtFilterItem, ExtFilterRule


def search(text):
    return lambda value: re.search(text, value) is not None, 10


def make(kind=1, key="k", data="v", inverse=False, several=()):
    items = [ExtFilterItem(*pair) for pair in several]
    return ExtFilter(ExtFilterRule(kind, inverse, key, data, items), search)


def frame_of(headers, version=JSON):
    log = MemoryLog(0, 10)
    log.layout = EXTENDED
    log.append([extended_body(headers, b"body", version)], 1)
    batch = log.read(1)
    assert batch is not None
    return batch.frames(1, 2)


@pytest.mark.parametrize(
    ("rule", "headers", "takes"),
    [
        ({}, b'{"k":"v"}', True),
        ({}, b'{"k":"w"}', False),
        ({}, b'{"k":["v"]}', False),
        ({}, b'{"a":{"k":"v"}}', False),
        ({}, b"{}", False),
        ({"data": "1"}, b'{"k":1}', False),
        ({"data": "\u00e9\u00e8"}, '{"k":"\u00e9\u00e8"}'.encode(), True),
        ({"kind": 2, "data": "^v+$"}, b'{"k":"vvv"}', True),
        ({"kind": 2, "data": "b"}, b'{"k":"abc"}', True),
        ({"kind": 2, "data": "^v+$"}, b'{"k":"w"}', False),
        ({"kind": 2, "data": "^$"}, b'{"other":"v"}', True),
        ({"kind": 2, "data": "^$"}, b'{"k":7}', True),
        ({"kind": 2, "data": "v"}, b'{"k":"%s"}' % (b"v" * VALUE_SIZE_MAX), True),
        ({"kind": 2, "data": "v"}, b'{"k":"%s"}' % (b"v" * (VALUE_SIZE_MAX + 1)), False),
        ({"kind": 3, "data": "v*"}, b'{"k":"vision"}', True),
        ({"kind": 3, "data": "v*"}, b'{"k":"revision"}', False),
        ({"kind": 4, "key": "any", "several": [("a", "1"), ("b", "2")]}, b'{"b":"2"}', True),
        ({"kind": 4, "key": "any", "several": [("a", "1"), ("b", "2")]}, b'{"b":"1"}', False),
        ({"kind": 4, "key": "all", "several": [("a", "1"), ("b", "2")]}, b'{"a":"1","b":"2"}', True),
        ({"kind": 4, "key": "all", "several": [("a", "1"), ("b", "2")]}, b'{"a":"1"}', False),
        ({}, b"", False),
        ({}, b"not json", False),
    ],
)
def test_what_a_filter_takes(rule, headers, takes):
    frame = frame_of(headers)
    for _ in range(2):
        assert make(**rule).takes(frame) is takes
        assert make(**rule, inverse=True).takes(memoryview(frame)) is not takes


def test_headers_that_are_no_json_never_match():
    frame = frame_of(b'{"k":"v"}', TAG)
    assert (make().takes(frame), make(inverse=True).takes(frame)) == (False, True)


@pytest.mark.parametrize(
    ("glob", "matches", "differs"),
    [
        ("", [""], ["a"]),
        ("*", ["", "a/b", "a\nb"], []),
        ("**a", ["a", "ba"], ["ab"]),
        ("?", ["a", "\u00e9", "\n"], ["", "ab"]),
        ("a.c", ["a.c"], ["abc"]),
        ("[abc]x", ["ax", "cx"], ["dx", "x"]),
        ("[a-c]", ["b"], ["-", "d"]),
        ("[!a-c]", ["d", "-"], ["b", ""]),
        ("[!ab]", ["c"], ["a", "b"]),
        ("[a^]", ["^", "a"], ["b"]),
        ("[-a]", ["-", "a"], ["b"]),
        ("{ab,c*}x", ["abx", "cx", "cddx"], ["ax", "x"]),
        ("{a,{b,c}d}", ["a", "bd", "cd"], ["b", "ad"]),
        ("a,b}", ["a,b}"], ["a", "b"]),
        (r"\*\{", ["*{"], ["a{"]),
        ("(a|b)+$^", ["(a|b)+$^"], ["a"]),
    ],
)
def test_globs(glob, matches, differs):
    find = re.compile(regex_of_glob(glob).removesuffix("$") + r"\Z").search
    assert [text for text in matches if not find(text)] == []
    assert [text for text in differs if find(text)] == []


@pytest.mark.parametrize("glob", ["[", "[]", "[!]", "[z-a]", "{a", "a\\"])
def test_what_is_no_glob(glob):
    with pytest.raises(BadGlob):
        regex_of_glob(glob)


@given(st.text(alphabet="ab*?[]!-{},\\^$.", max_size=12))
def test_any_text_is_a_glob_or_refused(text):
    try:
        regex = regex_of_glob(text)
    except BadGlob:
        return
    re.compile(regex)


# -- in a channel ------------------------------------------------------------------------------------------------------


def log_of(*values):
    log = MemoryLog(0, 1_000_000)
    log.layout = EXTENDED
    publish(log, *values)
    return log


def publish(log, *values):
    log.append([extended_body(b'{"k":"%s"}' % value.encode(), b"x") for value in values], 1000)
    log.advance_committed(log.next_sequence)


def make_channel(log, kind=Channel, **options):
    return kind("c", 0, log, ChannelState(1), SpilledStore(), random.Random(1), **options)


def filtering(channel, rdy=100, **rule):
    consumer = subscribe(channel, rdy)
    consumer.ext_filter = make(**rule)
    return consumer


def got(consumer):
    return [sequence for sequence, _, _ in received(consumer)]


def pumped(channel, *consumers, now=0):
    channel.pump(now, now)
    while channel.wants_turn:
        channel.pump(now, now)
    return [got(consumer) for consumer in consumers]


def test_what_does_not_match_is_finished_for_the_channel():
    channel = make_channel(log_of(*"vwvvw"))
    consumer = filtering(channel)
    assert pumped(channel, consumer) == [[1, 3, 4]]
    assert (channel.in_flight_count, channel.depth, channel.filtered_count, consumer.filtered_count) == (3, 0, 2, 2)
    assert channel.finish(consumer, (1, 3, 4)) == []
    assert channel.floor == 6
    assert pumped(channel, subscribe(channel)) == [[]]


def test_it_does_not_count_as_held():
    channel = make_channel(log_of(*"wwwwvwwwwv"))
    consumer = filtering(channel, rdy=1)
    assert pumped(channel, consumer) == [[5]]
    assert channel.finish(consumer, (5,)) == []
    assert pumped(channel, consumer) == [[10]]


def test_what_comes_again_is_filtered_too():
    channel = make_channel(log_of(*"vw"))
    first = subscribe(channel)
    assert pumped(channel, first) == [[1, 2]]
    channel.remove(first)
    consumer = filtering(channel)
    assert pumped(channel, consumer) == [[1]]
    assert channel.finish(consumer, (1,)) == []
    assert (channel.floor, channel.filtered_count) == (3, 1)


def test_what_was_set_aside_is_filtered_too():
    channel = make_channel(log_of(*"vwvw"))
    first = subscribe(channel)
    assert pumped(channel, first) == [[1, 2, 3, 4]]
    for sequence in (1, 2, 3, 4):
        assert channel.requeue(first, sequence, 100 * SECOND, 0)
    channel.remove(first)
    AsideDisk().flush(channel, 100 * SECOND)
    consumer = filtering(channel)
    assert pumped(channel, consumer, now=100 * SECOND) == [[1, 3]]
    assert channel.finish(consumer, (1, 3)) == []
    assert (channel.spilled.count, channel.depth, channel.filtered_count) == (0, 0, 2)


def test_with_tags_a_consumer_is_asked_about_its_own_messages():
    log = MemoryLog(0, 100)
    log.layout = EXTENDED
    headers = [b'{"##client_dispatch_tag":"a","k":"v"}', b'{"##client_dispatch_tag":"a","k":"w"}', b'{"k":"w"}']
    log.append([extended_body(each, b"x") for each in headers], 1)
    log.advance_committed(log.next_sequence)
    channel = make_channel(log, TaggedChannel)
    blank, tagged = subscribe(channel, rdy=0), subscribe(channel, rdy=0)
    channel.remove(tagged)
    tagged.tag, tagged.ext_filter = "a", make()
    channel.add(tagged)
    blank.rdy_count = tagged.rdy_count = 10
    assert pumped(channel, blank, tagged) == [[3], [1]]
    assert channel.filtered_count == 1


def test_in_order_the_floor_is_kept_before_the_next_is_delivered():
    channel = make_channel(log_of(*"wwvwv"))
    kept: list[int] = []
    channel.deliver_in_order(kept.append)
    consumer = filtering(channel, rdy=1)
    channel.pump(0, 0)
    assert (got(consumer), channel.wants_turn) == ([], True)
    assert pumped(channel, consumer) == [[3]]
    assert kept[-1] == 3
    assert channel.finish(consumer, (3,)) == []
    assert pumped(channel, consumer) == [[5]]
    assert kept[-1] == 5


def test_a_turn_ends_when_much_has_been_looked_at(monkeypatch):
    monkeypatch.setattr(channel_module, "_LOOKED_COST_MAX", 100)
    log = log_of(*"w" * 1000, "v")
    channel = make_channel(log)
    channel.latency = Latency(SECOND)
    consumer = filtering(channel, rdy=1)
    turns = 0
    while not (sequences := got(consumer)):
        channel.pump(0, 0)
        turns += 1
        assert channel.wants_turn or turns > 10
        assert len(channel.window) <= 1
    assert (sequences, turns) == ([1001], 11)


def test_a_turn_ends_among_what_comes_again_as_well(monkeypatch):
    monkeypatch.setattr(channel_module, "_LOOKED_COST_MAX", 100)
    channel = make_channel(log_of(*"w" * 1000))
    first = subscribe(channel, rdy=1000)
    channel.pump(0, 0)
    channel.remove(first)
    filtering(channel, rdy=1)
    channel.pump(0, 0)
    assert (channel.wants_turn, channel.depth) == (True, 900)
    pumped(channel)
    assert (channel.depth, channel.floor) == (0, 1001)


def test_a_pattern_costs_more_than_a_comparison():
    frame = frame_of(b'{"k":"%s"}' % (b"x" * 2000))
    assert make().cost(frame) == 1
    assert make(kind=2).cost(frame) > 100


@pytest.mark.parametrize("inverse", [False, True])
def test_a_message_from_before_its_topic_had_headers_has_none(inverse):
    """Whatever its body looks like."""
    frame = frame_of(b'{"k":"v"}')
    assert make(inverse=inverse).takes(frame) is not inverse
    assert make(inverse=inverse).takes(frame, has_headers=False) is inverse
