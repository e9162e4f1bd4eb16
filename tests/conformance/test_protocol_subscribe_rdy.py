"""SUB and RDY: parameters, what RDY means, what it does to deliveries (NSQ's TCP protocol)."""

from __future__ import annotations

import pytest
from tests.conformance.protocol_helpers import channels, consumer, counts, fatal, fatal_on, goes_on, only_client, topics
from tests.integration.daemons import Connection, Nsqd, fin, pub, req

# -- SUB ---------------------------------------------------------------------------------------------------------------


def test_sub_is_answered_OK(connection: Connection, topic: str):
    connection.ok(b"SUB %s c\n" % topic.encode())


def test_sub_creates_topic_and_channel(nsqd: Nsqd, connection: Connection, topic: str):
    connection.subscribe(topic, "c")
    assert channels(nsqd, topic) == ["c"]
    assert nsqd.stats(topic, "c")["client_count"] == 1


@pytest.mark.parametrize("line", [b"SUB\n", b"SUB t\n"], ids=["none", "one"])
def test_sub_insufficient_parameters(nsqd: Nsqd, line: bytes):
    assert fatal(nsqd, line) == "E_INVALID SUB insufficient number of parameters"


def test_sub_refused_creates_nothing(nsqd: Nsqd, topic: str):
    fatal(nsqd, b"SUB %s\n" % topic.encode())
    assert topic not in topics(nsqd)


def test_sub_twice_is_fatal(connection: Connection, topic: str):
    connection.subscribe(topic, "c")
    assert fatal_on(connection, b"SUB %s d\n" % topic.encode()) == "E_INVALID cannot SUB in current state"


def test_sub_starts_with_RDY_0(nsqd: Nsqd, connection: Connection, topic: str):
    nsqd.publish(topic, b"x")
    connection.subscribe(topic, "c")
    connection.nothing_comes()
    assert only_client(nsqd, topic)["ready_count"] == 0


def test_consumers_of_one_channel_share_its_messages(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic, rdy_count=10) as one, consumer(nsqd, topic, rdy_count=10) as other:
        nsqd.publish(topic, *[b"%d" % number for number in range(20)])
        received = one.messages(10) + other.messages(10)
        one.nothing_comes()
    assert len({message.id for message in received}) == 20


def test_every_channel_gets_every_message(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic, "a", 5) as one, consumer(nsqd, topic, "b", 5) as other:
        nsqd.publish(topic, b"x", b"y")
        assert [message.body for message in one.messages(2)] == [message.body for message in other.messages(2)]


# -- RDY: its parameter ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "count"),
    [
        (b"RDY\n", 1),
        (b"RDY 0\n", 0),
        (b"RDY \n", 0),
        (b"RDY 1\n", 1),
        (b"RDY 007\n", 7),
        (b"RDY 2499\n", 2499),
        (b"RDY 2500\n", 2500),
    ],
    ids=["missing-is-1", "0", "empty-is-0", "1", "leading-zeros", "max-minus-one", "max"],
)
def test_rdy_count(nsqd: Nsqd, connection: Connection, topic: str, line: bytes, count: int):
    connection.subscribe(topic, "c", 3)
    goes_on(connection, line)
    assert only_client(nsqd, topic)["ready_count"] == count


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("2501", "count 2501 out of range 0-2500"),
        ("9223372036854775807", "count 9223372036854775807 out of range 0-2500"),
        ("-1", "could not parse count -1"),
        ("+1", "could not parse count +1"),
        ("1.5", "could not parse count 1.5"),
        ("1e3", "could not parse count 1e3"),
        ("0x1", "could not parse count 0x1"),
        ("many", "could not parse count many"),
        ("1\t", "could not parse count 1\t"),
        ("١", "could not parse count ١"),
    ],
)
def test_rdy_refused_and_closed(connection: Connection, topic: str, text: str, error: str):
    connection.subscribe(topic, "c", 3)
    assert fatal_on(connection, b"RDY %s\n" % text.encode()) == f"E_INVALID RDY {error}"


@pytest.mark.improvement
@pytest.mark.parametrize("count", [2**64 + 1, 10**30])
def test_rdy_beyond_64_bits_is_refused(connection: Connection, topic: str, count: int):
    """Upstream lets the number wrap around and takes what comes out."""
    connection.subscribe(topic, "c")
    assert fatal_on(connection, b"RDY %d\n" % count) == f"E_INVALID RDY could not parse count {count}"


# -- RDY: its meaning --------------------------------------------------------------------------------------------------


def test_rdy_has_no_answer(connection: Connection, topic: str):
    connection.subscribe(topic, "c", 1)
    connection.nothing_comes()


def test_rdy_bounds_what_is_in_flight(nsqd: Nsqd, connection: Connection, topic: str):
    nsqd.publish(topic, *[b"x"] * 10)
    connection.subscribe(topic, "c", 3)
    connection.messages(3)
    connection.nothing_comes()
    assert counts(nsqd, topic) == (7, 3, 0)


def test_rdy_is_a_level_not_a_credit(nsqd: Nsqd, connection: Connection, topic: str):
    """Each FIN makes room for one more; the count that was told stays."""
    nsqd.publish(topic, *[b"x"] * 10)
    connection.subscribe(topic, "c", 2)
    for message in connection.messages(2):
        connection.finish(message)
        connection.message()
    connection.nothing_comes()
    row = only_client(nsqd, topic)
    assert (row["ready_count"], row["in_flight_count"], row["message_count"]) == (2, 2, 4)


def test_rdy_repeated_adds_nothing(nsqd: Nsqd, connection: Connection, topic: str):
    nsqd.publish(topic, *[b"x"] * 10)
    connection.subscribe(topic, "c", 2)
    connection.messages(2)
    connection.send(b"RDY 2\n" * 5)
    connection.nothing_comes()


def test_rdy_raised_sends_the_difference(nsqd: Nsqd, connection: Connection, topic: str):
    nsqd.publish(topic, *[b"x"] * 10)
    connection.subscribe(topic, "c", 2)
    connection.messages(2)
    connection.rdy(5)
    connection.messages(3)
    connection.nothing_comes()


def test_rdy_lowered_waits_until_less_is_in_flight(nsqd: Nsqd, connection: Connection, topic: str):
    nsqd.publish(topic, *[b"x"] * 10)
    connection.subscribe(topic, "c", 3)
    first, second, third = connection.messages(3)
    connection.rdy(1)
    connection.finish(first, second)
    connection.nothing_comes()
    connection.finish(third)
    connection.message()
    connection.nothing_comes()


def test_rdy_0_pauses(nsqd: Nsqd, connection: Connection, topic: str):
    connection.subscribe(topic, "c", 5)
    goes_on(connection, b"RDY 0\n")
    nsqd.publish(topic, b"x")
    connection.nothing_comes()
    connection.rdy(1)
    assert connection.message().body == b"x"


def test_rdy_0_leaves_what_is_in_flight(nsqd: Nsqd, connection: Connection, topic: str):
    nsqd.publish(topic, b"x", b"y")
    connection.subscribe(topic, "c", 1)
    message = connection.message()
    goes_on(connection, b"RDY 0\n" + fin(message.id))
    assert counts(nsqd, topic) == (1, 0, 0)


def test_rdy_before_the_message(nsqd: Nsqd, connection: Connection, topic: str):
    connection.subscribe(topic, "c", 1)
    connection.nothing_comes()
    nsqd.publish(topic, b"x")
    assert connection.message().body == b"x"


def test_rdy_is_per_connection(nsqd: Nsqd, topic: str):
    nsqd.publish(topic, *[b"x"] * 10)
    with consumer(nsqd, topic, rdy_count=2) as one, consumer(nsqd, topic, rdy_count=3) as other:
        one.messages(2)
        other.messages(3)
        assert counts(nsqd, topic) == (5, 5, 0)


# -- bookkeeping -------------------------------------------------------------------------------------------------------


def test_in_flight_count_goes_up_with_a_delivery_and_down_with_FIN_and_REQ(
    nsqd: Nsqd, connection: Connection, topic: str
):
    def row() -> tuple[int, ...]:
        client = only_client(nsqd, topic)
        return tuple(client[f"{name}_count"] for name in ("in_flight", "message", "finish", "requeue"))

    nsqd.publish(topic, b"x", b"y")
    connection.subscribe(topic, "c", 2)
    first, second = connection.messages(2)
    assert row() == (2, 2, 0, 0)
    goes_on(connection, fin(first.id))
    assert row() == (1, 2, 1, 0)
    goes_on(connection, b"RDY 0\n" + req(second.id, 0))
    assert row() == (0, 2, 1, 1)
    connection.rdy(1)
    assert connection.message().attempts == 2
    assert row() == (1, 3, 1, 1)


def test_in_flight_count_is_0_when_the_channel_was_emptied(nsqd: Nsqd, connection: Connection, topic: str):
    nsqd.publish(topic, *[b"x"] * 5)
    connection.subscribe(topic, "c", 2)
    message, _ = connection.messages(2)
    nsqd.post(f"/channel/empty?topic={topic}&channel=c")
    assert counts(nsqd, topic) == (0, 0, 0)
    assert only_client(nsqd, topic)["in_flight_count"] == 0
    error = connection.error(fin(message.id))
    assert error == f"E_FIN_FAILED FIN {message.id.decode()} failed ID not in flight"
    nsqd.publish(topic, b"next")
    assert connection.message().body == b"next"


def test_message_count_of_the_channel(nsqd: Nsqd, connection: Connection, topic: str):
    connection.subscribe(topic, "c")
    connection.ok(pub(topic, b"x") * 4, count=4)
    row = nsqd.stats(topic, "c")
    assert (row["message_count"], row["depth"]) == (4, 4)
