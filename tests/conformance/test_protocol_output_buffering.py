"""When what nsqd has to say leaves it (NSQ's TCP protocol)."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.conformance.protocol_helpers import consumer, quickest
from tests.integration.daemons import Connection, Nsqd, pub

AT_ONCE_S = 15.0
"""Half of the longest timer, and enough for a busy machine."""
LONGEST: dict[str, Any] = {"output_buffer_size": 65_536, "output_buffer_timeout": 30_000}


@pytest.mark.parametrize(
    "fields",
    [LONGEST, {"output_buffer_size": 65_536, "output_buffer_timeout": -1}, {"output_buffer_size": -1}],
    ids=["longest", "no-timer", "unbuffered"],
)
def test_answers_and_errors_are_flushed_at_once(connection: Connection, topic: str, fields: dict[str, Any]):
    connection.identify(**fields)
    begun = time.monotonic()
    connection.ok(pub(topic, b"x") * 3, count=3)
    connection.subscribe(topic, "c")
    connection.send(b"CLS\n")
    assert connection.response() == b"CLOSE_WAIT"
    assert connection.error(b"FOO\n") == "E_INVALID invalid command FOO"
    assert time.monotonic() - begun < AT_ONCE_S


def test_answers_take_buffered_messages_with_them(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic, rdy_count=100, **LONGEST) as connection:
        nsqd.publish(topic, b"x")
        connection.send(b"CLS\n")
        kinds = [connection.frame(AT_ONCE_S).kind for _ in range(2)]
    assert sorted(kinds) == [0, 2]


def test_flushed_when_as_much_is_in_flight_as_RDY_allows(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic, rdy_count=3, **LONGEST) as connection:
        begun = time.monotonic()
        nsqd.publish(topic, *[b"x"] * 3)
        connection.messages(3)
        assert time.monotonic() - begun < AT_ONCE_S


def test_flushed_when_RDY_is_0(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic, rdy_count=100, **LONGEST) as connection:
        nsqd.publish(topic, b"x")
        connection.rdy(0)
        assert connection.message(AT_ONCE_S).body == b"x"


def test_flushed_when_the_channel_is_paused(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic, rdy_count=100, **LONGEST) as connection:
        nsqd.publish(topic, b"x")
        nsqd.post(f"/channel/pause?topic={topic}&channel=c")
        assert connection.message(AT_ONCE_S).body == b"x"


def test_flushed_when_the_buffer_is_full(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic, rdy_count=100, output_buffer_size=64, output_buffer_timeout=30_000) as connection:
        nsqd.publish(topic, *[bytes(100)] * 10)
        connection.messages(9, AT_ONCE_S)  # a last one may be in the buffer


def test_flushed_at_once_when_unbuffered(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic, rdy_count=100, output_buffer_size=-1) as connection:
        begun = time.monotonic()
        nsqd.publish(topic, b"x")
        connection.message()
        assert time.monotonic() - begun < AT_ONCE_S


@pytest.mark.parametrize("timeout_ms", [25, 100])
def test_flushed_when_the_timer_fires(nsqd: Nsqd, topic: str, timeout_ms: int):
    with consumer(nsqd, topic, rdy_count=100, output_buffer_timeout=timeout_ms) as connection:
        begun = time.monotonic()
        nsqd.publish(topic, b"x")
        connection.message()
        assert time.monotonic() - begun < timeout_ms / 1000 + AT_ONCE_S


@pytest.mark.improvement
@pytest.mark.parametrize(
    "fields",
    [{}, LONGEST, {"output_buffer_timeout": -1}],
    ids=["default", "longest", "no-timer"],
)
def test_messages_do_not_wait_for_a_timer(nsqd: Nsqd, topic: str, fields: dict[str, Any]):
    """Upstream keeps a message for 250 ms or what IDENTIFY says, and without end when the timer is off."""
    with consumer(nsqd, topic, rdy_count=100, **fields) as connection:

        def measure() -> float:
            begun = time.monotonic()
            nsqd.publish(topic, b"x")
            connection.message()
            return time.monotonic() - begun

        assert quickest(measure, 0.1) < 0.1


def test_messages_are_not_held_back_by_other_connections(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic, "a", 1) as one, consumer(nsqd, topic, "b", 1, **LONGEST) as other:
        nsqd.publish(topic, b"x")
        assert one.message(AT_ONCE_S).body == other.message(AT_ONCE_S).body == b"x"
