"""DPUB: when a delayed message comes, and what holds while it waits (NSQ's TCP protocol)."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from tests.conformance.conftest import quick_flags
from tests.conformance.protocol_helpers import consumer, counts, goes_on, quickest, wait_for_counts
from tests.integration.daemons import Connection, Daemons, Nsqd, dpub, pub, req, wait_until


@pytest.fixture
def producer(nsqd: Nsqd) -> Iterator[Connection]:
    """Who publishes, while somebody else consumes: a message may be due before its publisher is answered."""
    with nsqd.connect() as producer:
        yield producer


def test_dpub_comes_after_its_delay(connection: Connection, producer: Connection, topic: str):
    connection.subscribe(topic, "c", 1)
    begun = time.monotonic()
    producer.ok(dpub(topic, 300, b"x"))
    message = connection.message()
    assert time.monotonic() - begun >= 0.3
    assert (message.body, message.attempts) == (b"x", 1)


def test_dpub_timestamp_is_that_of_its_publishing(connection: Connection, producer: Connection, topic: str):
    connection.subscribe(topic, "c", 1)
    before_ns = time.time_ns()
    producer.ok(dpub(topic, 200, b"x"))
    after_ns = time.time_ns()
    assert before_ns <= connection.message().timestamp_ns <= after_ns


@pytest.mark.improvement
def test_dpub_comes_within_100_ms_of_its_time(connection: Connection, producer: Connection, topic: str):
    """Upstream looks at random channels every 100 ms, and at new ones every 5 s."""
    connection.subscribe(topic, "c", 1)

    def measure() -> float:
        begun = time.monotonic()
        producer.ok(dpub(topic, 150, b"x"))
        connection.finish(connection.message())
        return time.monotonic() - begun

    assert 0.15 <= quickest(measure, 0.25) < 0.25


def test_dpub_0_comes_at_once(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic) as connection, nsqd.connect() as producer:
        producer.ok(dpub(topic, 0, b"x"))
        assert connection.message().body == b"x"


def test_dpub_is_counted_as_deferred_not_as_depth(nsqd: Nsqd, connection: Connection, topic: str):
    connection.subscribe(topic, "c")
    connection.ok(dpub(topic, 60_000, b"x") + pub(topic, b"y"), count=2)
    wait_for_counts(nsqd, topic, (1, 0, 1))
    assert nsqd.stats(topic, "c")["message_count"] == 2


def test_dpub_is_counted_as_depth_once_it_is_due(nsqd: Nsqd, connection: Connection, topic: str):
    connection.subscribe(topic, "c")
    connection.ok(dpub(topic, 100, b"x"))
    wait_for_counts(nsqd, topic, (1, 0, 0))


def test_dpub_does_not_hold_up_others(connection: Connection, producer: Connection, topic: str):
    connection.subscribe(topic, "c", 1)
    producer.ok(dpub(topic, 1000, b"late") + pub(topic, b"at once"), count=2)
    message = connection.message()
    assert message.body == b"at once"
    connection.finish(message)
    assert connection.message().body == b"late"


def test_dpubs_come_in_the_order_of_their_times(connection: Connection, producer: Connection, topic: str):
    connection.subscribe(topic, "c", 3)
    producer.ok(dpub(topic, 300, b"3") + dpub(topic, 100, b"1") + dpub(topic, 200, b"2"), count=3)
    assert [message.body for message in connection.messages(3)] == [b"1", b"2", b"3"]


def test_dpub_in_every_channel(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic, "a") as one, consumer(nsqd, topic, "b") as other, nsqd.connect() as producer:
        begun = time.monotonic()
        producer.ok(dpub(topic, 200, b"x"))
        received = one.message(), other.message()
        assert time.monotonic() - begun >= 0.2
        assert received[0].id == received[1].id


def test_dpub_waits_for_a_consumer_that_is_ready(nsqd: Nsqd, connection: Connection, topic: str):
    connection.subscribe(topic, "c")
    connection.ok(dpub(topic, 100, b"x"))
    wait_for_counts(nsqd, topic, (1, 0, 0))
    connection.nothing_comes()
    connection.rdy(1)
    assert connection.message().body == b"x"


def test_dpub_in_a_paused_channel(nsqd: Nsqd, connection: Connection, topic: str):
    connection.subscribe(topic, "c", 1)
    nsqd.post(f"/channel/pause?topic={topic}&channel=c")
    connection.ok(dpub(topic, 100, b"x"))
    wait_for_counts(nsqd, topic, (1, 0, 0))
    connection.nothing_comes()
    nsqd.post(f"/channel/unpause?topic={topic}&channel=c")
    assert connection.message().body == b"x"


def test_emptying_a_channel_drops_what_is_deferred(
    nsqd: Nsqd, connection: Connection, producer: Connection, topic: str
):
    connection.subscribe(topic, "c")
    producer.ok(dpub(topic, 300, b"x"))
    wait_until(lambda: sum(counts(nsqd, topic)) == 1, "the message in the channel")
    nsqd.post(f"/channel/empty?topic={topic}&channel=c")
    assert counts(nsqd, topic) == (0, 0, 0)
    connection.rdy(1)
    producer.ok(dpub(topic, 300, b"behind it"))
    assert connection.message().body == b"behind it"


@pytest.mark.improvement
def test_dpub_to_a_topic_without_channel_counts_from_its_publishing(nsqd: Nsqd, topic: str):
    """Upstream's delay begins when the topic hands the message to a channel."""
    with nsqd.connect() as producer:
        producer.ok(dpub(topic, 800, b"counted from its publishing"))
        time.sleep(0.8)
        with consumer(nsqd, topic, rdy_count=2) as connection:
            producer.ok(dpub(topic, 400, b"later"))
            assert [message.body for message in connection.messages(2)] == [b"counted from its publishing", b"later"]


@pytest.mark.improvement
def test_dpub_keeps_its_delay_beyond_the_memory_queue(shared_daemons: Daemons, topic: str):
    """Upstream delivers at once what does not fit into the memory queue."""
    nsqd = shared_daemons.nsqd(*quick_flags(), "--mem-queue-size=1")
    with nsqd.connect() as producer:
        begun = time.monotonic()
        producer.ok(b"".join(dpub(topic, 400, b"x") for _ in range(20)), count=20)
    with consumer(nsqd, topic, rdy_count=20) as connection:
        connection.messages(20)
        assert time.monotonic() - begun >= 0.4
    nsqd.stop()


DELAY_MS = 2000


@pytest.fixture(scope="module")
def restarted(shared_daemons: Daemons) -> tuple[Nsqd, float]:
    """An nsqd behind a clean restart with a delayed message in each of two topics, and when they were delayed."""
    nsqd = shared_daemons.nsqd(*quick_flags())
    nsqd.publish("REQ", b"x")
    with consumer(nsqd, "DPUB") as connection, consumer(nsqd, "REQ") as other:
        delayed_at = time.monotonic()
        connection.ok(dpub("DPUB", DELAY_MS, b"x"))
        goes_on(other, req(other.message().id, DELAY_MS))
        wait_for_counts(nsqd, "DPUB", (0, 0, 1))
    nsqd.restart()
    return nsqd, delayed_at


@pytest.mark.improvement
@pytest.mark.parametrize("command", ["DPUB", "REQ"])
def test_a_delay_survives_a_restart(restarted: tuple[Nsqd, float], command: str):
    """Upstream writes what is deferred to disk without its delay and delivers it at once."""
    nsqd, delayed_at = restarted
    with consumer(nsqd, command) as connection:
        message = connection.message()
        assert time.monotonic() - delayed_at >= DELAY_MS / 1000
        assert message.attempts == (1 if command == "DPUB" else 2)
