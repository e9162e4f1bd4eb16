"""The short way for one PUB per read: it takes a read whole or not at all, and then gives what the long way gives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flintmq.wire import commands
from flintmq.wire.server import Publish, ServerConnection, ServerLimits

LIMITS = ServerLimits(max_msg_size=100, max_body_size=400)
PUB = commands.pub("t", b"first")


def after_a_pub(first=PUB):
    parser = ServerConnection(LIMITS)
    assert [type(event) for event in parser.receive_data(b"  V2" + first)] == [Publish]
    return parser


def test_the_first_pub_is_looked_at_closely():
    parser = ServerConnection(LIMITS)
    assert parser.repeated_pub(b"  V2" + PUB) is None
    parser.receive_data(b"  V2")
    assert parser.repeated_pub(PUB) is None
    assert parser.pub_topic == ""


@pytest.mark.parametrize("first", [PUB, b"PUB t\r\n\0\0\0\1a", b"PUB t extra\n\0\0\0\1a"])
def test_the_next_one_is_taken(first):
    parser = after_a_pub(first)
    assert parser.pub_topic == "t"
    line = first[: first.index(b"\n") + 1]
    for body in (b"a", b"b" * 100, b"PUB t\n\0\0\0\1a"):
        assert parser.repeated_pub(line + len(body).to_bytes(4, "big") + body) == body


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PUB t",
        b"PUB t\n",
        b"PUB t\n\0\0\0",
        b"PUB t\n\0\0\0\0",
        b"PUB t\n\0\0\0\2a",
        b"PUB t\n\0\0\0\1ab",
        b"PUB t\n\xff\xff\xff\xffa",
        b"PUB t\n\0\0\0\x65" + bytes(101),
        b"PUB t2\n\0\0\0\1a",
        b"PUB \n\0\0\0\1a",
        b"pub t\n\0\0\0\1a",
        b"MPUB t\n\0\0\0\1a",
        b"DPUB t 1\n\0\0\0\1a",
        PUB + PUB,
        PUB + b"N",
    ],
)
def test_anything_else_is_left_to_the_long_way(data):
    parser = after_a_pub()
    assert parser.repeated_pub(data) is None
    assert parser.receive_data(data) == after_a_pub().receive_data(data)


def test_a_pub_behind_a_part_of_a_command_belongs_to_it():
    parser = after_a_pub()
    assert parser.receive_data(b"PUB t\n" + len(PUB).to_bytes(4, "big")) == []
    assert parser.repeated_pub(PUB) is None
    assert parser.receive_data(PUB) == [Publish("PUB", "t", [PUB], 1)]
    assert parser.repeated_pub(PUB) == b"first"


def test_while_identify_is_not_answered():
    parser = after_a_pub()
    parser.receive_data(b"IDENTIFY\n\0\0\0\2{}")
    assert parser.repeated_pub(PUB) is None
    assert parser.receive_data(PUB) == []
    assert parser.resume() == [Publish("PUB", "t", [b"first"], 1)]


def test_nothing_after_a_fatal_error():
    parser = after_a_pub()
    parser.receive_data(b"nonsense\n")
    assert parser.repeated_pub(PUB) is None
    assert parser.receive_data(PUB) == []


def test_the_topic_is_that_of_the_last_pub():
    parser = after_a_pub()
    parser.receive_data(commands.mpub("other", [b"a"]))
    assert parser.repeated_pub(PUB) == b"first"
    parser.receive_data(commands.pub("u", b"a") + commands.pub("v", b"a"))
    assert parser.pub_topic == "v"
    assert parser.repeated_pub(PUB) is None
    assert parser.repeated_pub(commands.pub("v", b"b")) == b"b"


pieces = st.one_of(
    st.binary(min_size=1, max_size=12).map(lambda body: commands.pub("t", body)),
    st.binary(min_size=1, max_size=12).map(lambda body: commands.pub("u", body)),
    st.sampled_from([b"NOP\n", commands.mpub("t", [b"a", b"b"]), b"PUB t\n", b"\0\0\0\1", b"a"]),
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(reads=st.lists(st.lists(pieces, min_size=1, max_size=3).map(b"".join), max_size=12))
def test_both_ways_publish_the_same(reads):
    """However commands fall into reads, the short way before the long one changes nothing."""
    short, long = ServerConnection(LIMITS), ServerConnection(LIMITS)
    for parser in (short, long):
        parser.receive_data(b"  V2")
    for data in reads:
        expected = long.receive_data(data)
        body = short.repeated_pub(data)
        found = short.receive_data(data) if body is None else [Publish("PUB", short.pub_topic, [body], 1)]
        assert found == expected
