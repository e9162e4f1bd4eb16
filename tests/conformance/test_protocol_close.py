"""CLS, and connections that end without it (NSQ's TCP protocol)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.conformance.conftest import quick_flags
from tests.conformance.protocol_helpers import (
    channels,
    clients,
    consumer,
    counts,
    delivered,
    fatal_on,
    goes_on,
    only_client,
    refused_but_open,
    wait_for_counts,
)
from tests.integration.daemons import Connection, Daemons, Message, Nsqd, fin, pub, req, touch, wait_until


@contextmanager
def closing(nsqd: Nsqd, topic: str) -> Iterator[tuple[Connection, Message]]:
    """A connection behind CLS with one message in flight."""
    with delivered(nsqd, topic) as (connection, message):
        connection.send(b"CLS\n")
        assert connection.response() == b"CLOSE_WAIT"
        yield connection, message


# -- CLS ---------------------------------------------------------------------------------------------------------------


def test_cls_is_answered_CLOSE_WAIT(connection: Connection, topic: str):
    connection.subscribe(topic, "c")
    connection.send(b"CLS\n")
    assert connection.response() == b"CLOSE_WAIT"


def test_cls_leaves_the_connection_open(nsqd: Nsqd, topic: str):
    with closing(nsqd, topic) as (connection, _):
        connection.nothing_comes()
        goes_on(connection)


def test_cls_leaves_the_connection_open_with_nothing_in_flight(connection: Connection, topic: str):
    connection.subscribe(topic, "c")
    connection.send(b"CLS\n")
    assert connection.response() == b"CLOSE_WAIT"
    connection.nothing_comes()
    goes_on(connection)


def test_cls_sends_no_more_messages(nsqd: Nsqd, connection: Connection, topic: str):
    connection.subscribe(topic, "c", 10)
    connection.send(b"CLS\n")
    assert connection.response() == b"CLOSE_WAIT"
    nsqd.publish(topic, b"x")
    connection.nothing_comes()
    assert counts(nsqd, topic) == (1, 0, 0)


def test_cls_sets_RDY_to_0(nsqd: Nsqd, topic: str):
    with closing(nsqd, topic):
        row = only_client(nsqd, topic)
        assert (row["ready_count"], row["in_flight_count"], row["state"]) == (0, 1, 4)


def test_cls_others_get_the_messages(nsqd: Nsqd, topic: str):
    with closing(nsqd, topic), consumer(nsqd, topic) as other:
        nsqd.publish(topic, b"y")
        assert other.message().body == b"y"


def test_cls_then_FIN(nsqd: Nsqd, topic: str):
    with closing(nsqd, topic) as (connection, message):
        goes_on(connection, fin(message.id))
        assert counts(nsqd, topic) == (0, 0, 0)


def test_cls_then_TOUCH(nsqd: Nsqd, topic: str):
    with closing(nsqd, topic) as (connection, message):
        goes_on(connection, touch(message.id))
        assert counts(nsqd, topic) == (0, 1, 0)


def test_cls_then_REQ_0(nsqd: Nsqd, topic: str):
    with closing(nsqd, topic) as (connection, message):
        goes_on(connection, req(message.id, 0))
        assert counts(nsqd, topic) == (1, 0, 0)
        connection.nothing_comes()


def test_cls_then_REQ_with_a_delay(nsqd: Nsqd, topic: str):
    with closing(nsqd, topic) as (connection, message):
        goes_on(connection, req(message.id, 60_000))
        assert counts(nsqd, topic) == (0, 0, 1)


def test_cls_then_FIN_of_what_is_not_in_flight(nsqd: Nsqd, topic: str):
    with closing(nsqd, topic) as (connection, message):
        goes_on(connection, fin(message.id))
        error = refused_but_open(connection, fin(message.id))
        assert error == f"E_FIN_FAILED FIN {message.id.decode()} failed ID not in flight"


def test_cls_then_PUB(nsqd: Nsqd, topic: str):
    with closing(nsqd, topic) as (connection, _):
        connection.ok(pub(topic, b"y"))


def test_cls_with_everything_in_one_write(nsqd: Nsqd, topic: str):
    with delivered(nsqd, topic) as (connection, message):
        connection.send(b"RDY 0\nCLS\n" + fin(message.id))
        assert connection.response() == b"CLOSE_WAIT"
        goes_on(connection)
        assert counts(nsqd, topic) == (0, 0, 0)


@pytest.fixture(scope="module")
def short(shared_daemons: Daemons) -> Nsqd:
    """An nsqd whose messages time out after 1 s."""
    return shared_daemons.nsqd(*quick_flags(), "--msg-timeout=1s")


def test_cls_timeouts_still_run(short: Nsqd, topic: str):
    with closing(short, topic) as (connection, message):
        wait_for_counts(short, topic, (1, 0, 0))
        connection.nothing_comes()
        error = refused_but_open(connection, fin(message.id))
        assert error == f"E_FIN_FAILED FIN {message.id.decode()} failed ID not in flight"


# -- without CLS -------------------------------------------------------------------------------------------------------


def test_a_closed_connection_is_no_client_any_more(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic):
        assert len(clients(nsqd, topic)) == 1
    wait_until(lambda: not clients(nsqd, topic), "the client to be gone")
    assert channels(nsqd, topic) == ["c"]


def test_a_closed_connection_gives_its_messages_back_in_the_end(short: Nsqd, topic: str):
    with delivered(short, topic) as (_, message):
        pass
    with consumer(short, topic) as other:
        again = other.message()
        assert (again.id, again.attempts, again.timestamp_ns) == (message.id, 2, message.timestamp_ns)


@pytest.mark.improvement
@pytest.mark.parametrize("how", ["closed", "closing", "fatal-error"])
def test_a_closed_connection_gives_its_messages_back_at_once(nsqd: Nsqd, topic: str, how: str):
    """Upstream leaves them in flight until their timeout."""
    with consumer(nsqd, topic, rdy_count=0) as other:
        with delivered(nsqd, topic) as (connection, message):
            if how == "closing":
                connection.send(b"CLS\n")
                assert connection.response() == b"CLOSE_WAIT"
            elif how == "fatal-error":
                fatal_on(connection, b"FOO\n")
        other.rdy(1)
        again = other.message()
        assert (again.id, again.attempts) == (message.id, 2)
        assert nsqd.stats(topic, "c")["timeout_count"] == 0


@pytest.mark.improvement
def test_attempts_grow_with_every_lost_connection(nsqd: Nsqd, topic: str):
    """Upstream leaves the message in flight until its timeout."""
    nsqd.publish(topic, b"x")
    for attempts in range(1, 5):
        with consumer(nsqd, topic) as connection:
            assert connection.message().attempts == attempts


def test_what_was_finished_before_the_end_is_finished(nsqd: Nsqd, topic: str):
    nsqd.publish(topic, *[b"x"] * 100)
    with consumer(nsqd, topic, rdy_count=100) as connection:
        connection.finish(*connection.messages(100))
    wait_for_counts(nsqd, topic, (0, 0, 0))


# -- the server ends it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target", ["/channel/delete?topic={}&channel=c", "/topic/delete?topic={}"], ids=["channel", "topic"]
)
def test_deleting_closes_the_consumers(nsqd: Nsqd, connection: Connection, topic: str, target: str):
    connection.subscribe(topic, "c", 1)
    nsqd.post(target.format(topic))
    assert connection.wait_closed() == []


def test_deleting_a_topic_leaves_its_producers(nsqd: Nsqd, connection: Connection, topic: str):
    connection.ok(pub(topic, b"x"))
    nsqd.post(f"/topic/delete?topic={topic}")
    connection.ok(pub(topic, b"y"))
    assert nsqd.stats(topic)["message_count"] == 1


def test_deleting_one_channel_leaves_the_others(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic, "a") as one, consumer(nsqd, topic, "b") as other:
        nsqd.post(f"/channel/delete?topic={topic}&channel=a")
        assert one.wait_closed() == []
        nsqd.publish(topic, b"x")
        assert other.message().body == b"x"


def test_shutting_down_closes_everybody(shared_daemons: Daemons, topic: str):
    nsqd = shared_daemons.nsqd(*quick_flags())
    with nsqd.connect() as producer, consumer(nsqd, topic) as waiting:
        producer.ok(pub(f"{topic}-other", b"x"))
        nsqd.stop()
        assert producer.wait_closed() == []
        assert waiting.wait_closed() == []
