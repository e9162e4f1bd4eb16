"""FIN, REQ and TOUCH: parameters, what is not in flight, deadlines (NSQ's TCP protocol)."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from tests.conformance.conftest import quick_flags
from tests.conformance.protocol_helpers import (
    SOME_ID,
    consumer,
    counts,
    delivered,
    fatal_on,
    goes_on,
    only_client,
    quickest,
    refused_but_open,
    wait_for_counts,
)
from tests.integration.daemons import (
    MESSAGE,
    PATIENCE_S,
    Connection,
    Daemons,
    Nsqd,
    fin,
    in_time,
    message_of,
    req,
    touch,
    wait_until,
)

NOT_IN_FLIGHT = "failed ID not in flight"
LINES: dict[str, Callable[[bytes], bytes]] = {
    "FIN": fin,
    "REQ": lambda message_id: req(message_id, 0),
    "TOUCH": touch,
}


# -- parameters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["FIN", "REQ", "REQ 0123456789abcdef", "TOUCH"])
def test_insufficient_params(connection: Connection, topic: str, line: str):
    connection.subscribe(topic, "c")
    error = fatal_on(connection, line.encode() + b"\n")
    assert error == f"E_INVALID {line.split()[0]} insufficient number of params"


IDS = {
    "empty": b"",
    "15-bytes": SOME_ID[:15],
    "17-bytes": SOME_ID + b"0",
    "one-byte": b"0",
    "1000-bytes": b"0" * 1000,
}


@pytest.mark.parametrize("command", LINES)
@pytest.mark.parametrize("message_id", IDS.values(), ids=IDS)
def test_invalid_message_id(connection: Connection, topic: str, command: str, message_id: bytes):
    connection.subscribe(topic, "c")
    assert fatal_on(connection, LINES[command](message_id)) == "E_INVALID invalid message ID"


def test_the_id_of_REQ_is_looked_at_before_its_timeout(connection: Connection, topic: str):
    connection.subscribe(topic, "c")
    assert fatal_on(connection, b"REQ 0 x\n") == "E_INVALID invalid message ID"


@pytest.mark.parametrize("text", ["x", "-1", "+1", "1.5", "1s", "0x1", "\t1"])
def test_req_timeout_that_cannot_be_parsed(connection: Connection, topic: str, text: str):
    connection.subscribe(topic, "c")
    error = fatal_on(connection, b"REQ %s %s\n" % (SOME_ID, text.encode()))
    assert error == f"E_INVALID REQ could not parse timeout {text}"


@pytest.mark.improvement
def test_req_timeout_beyond_64_bits_is_refused(connection: Connection, topic: str):
    """Upstream lets the number wrap around and takes what comes out."""
    connection.subscribe(topic, "c")
    error = fatal_on(connection, b"REQ %s 18446744073709551617\n" % SOME_ID)
    assert error == "E_INVALID REQ could not parse timeout 18446744073709551617"


# -- what is not in flight here ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", LINES)
@pytest.mark.parametrize(
    "message_id", [SOME_ID, b"0" * 16, b"f" * 16, b"not-hexadecimal!", b"ABCDEFABCDEFABCD", b"\xff" * 16]
)
def test_unknown_id(connection: Connection, topic: str, command: str, message_id: bytes):
    connection.subscribe(topic, "c", 1)
    connection.send(LINES[command](message_id))
    kind, data = connection.frame()
    assert (kind, data) == (
        1,
        b"E_%s_FAILED %s %s failed ID not in flight" % (command.encode(), command.encode(), message_id),
    )
    goes_on(connection)


@pytest.mark.parametrize("command", LINES)
def test_id_that_was_finished(nsqd: Nsqd, topic: str, command: str):
    with delivered(nsqd, topic) as (connection, message):
        goes_on(connection, fin(message.id))
        error = refused_but_open(connection, LINES[command](message.id))
        assert error == f"E_{command}_FAILED {command} {message.id.decode()} {NOT_IN_FLIGHT}"


@pytest.mark.parametrize("command", LINES)
def test_id_that_was_requeued(nsqd: Nsqd, topic: str, command: str):
    with delivered(nsqd, topic) as (connection, message):
        goes_on(connection, req(message.id, 60_000))
        error = refused_but_open(connection, LINES[command](message.id))
        assert error == f"E_{command}_FAILED {command} {message.id.decode()} {NOT_IN_FLIGHT}"
        assert counts(nsqd, topic) == (0, 0, 1)


@pytest.mark.parametrize("command", LINES)
def test_id_that_is_another_client_s_is_said_so(nsqd: Nsqd, topic: str, command: str):
    with delivered(nsqd, topic) as (_, message), consumer(nsqd, topic) as thief:
        error = refused_but_open(thief, LINES[command](message.id))
        assert error == f"E_{command}_FAILED {command} {message.id.decode()} failed client does not own message"


@pytest.mark.parametrize("command", LINES)
def test_id_that_is_another_client_s(nsqd: Nsqd, topic: str, command: str):
    with delivered(nsqd, topic) as (owner, message), consumer(nsqd, topic) as thief:
        error = refused_but_open(thief, LINES[command](message.id))
        assert error.startswith(f"E_{command}_FAILED {command} {message.id.decode()} failed ")
        assert counts(nsqd, topic) == (0, 1, 0)
        goes_on(owner, fin(message.id))
    assert counts(nsqd, topic) == (0, 0, 0)


@pytest.mark.parametrize("command", LINES)
def test_id_of_another_channel(nsqd: Nsqd, topic: str, command: str):
    with consumer(nsqd, topic, "a") as one, consumer(nsqd, topic, "b", rdy_count=0) as other:
        nsqd.publish(topic, b"x")
        message = one.message()
        error = refused_but_open(other, LINES[command](message.id))
        assert error.startswith(f"E_{command}_FAILED {command} {message.id.decode()} failed ")


def test_upper_case_digits_are_another_id(nsqd: Nsqd, topic: str):
    nsqd.publish(topic, *[b"x"] * 12)
    with consumer(nsqd, topic, rdy_count=12) as connection:
        odd = [each for each in connection.messages(12) if each.id != each.id.upper()]
        for message in odd[:1]:
            error = refused_but_open(connection, fin(message.id.upper()))
            assert error == f"E_FIN_FAILED FIN {message.id.upper().decode()} {NOT_IN_FLIGHT}"


# -- FIN ---------------------------------------------------------------------------------------------------------------


def test_fin_has_no_answer(nsqd: Nsqd, topic: str):
    with delivered(nsqd, topic) as (connection, message):
        connection.finish(message)
        connection.nothing_comes()
        assert counts(nsqd, topic) == (0, 0, 0)


def test_fin_in_any_order(nsqd: Nsqd, topic: str):
    nsqd.publish(topic, *[b"%d" % number for number in range(10)])
    with consumer(nsqd, topic, rdy_count=10) as connection:
        messages = connection.messages(10)
        for at in (9, 0, 5, 3, 4, 8, 1):
            connection.finish(messages[at])
        connection.settle()
        assert counts(nsqd, topic) == (0, 3, 0)
    with consumer(nsqd, topic, rdy_count=10) as connection:
        left = {message.body for message in connection.messages(3)}
    assert left == {b"2", b"6", b"7"}


def test_fin_is_per_channel(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic, "a") as one, consumer(nsqd, topic, "b") as other:
        nsqd.publish(topic, b"x")
        goes_on(one, fin(one.message().id))
        assert counts(nsqd, topic, "a") == (0, 0, 0)
        assert counts(nsqd, topic, "b") == (0, 1, 0)
        goes_on(other, fin(other.message().id))


def test_errors_between_good_FINs(nsqd: Nsqd, topic: str):
    nsqd.publish(topic, b"x", b"y")
    with consumer(nsqd, topic, rdy_count=2) as connection:
        one, other = connection.messages(2)
        connection.send(fin(one.id) + fin(one.id) + fin(other.id) + fin(SOME_ID))
        assert connection.error() == f"E_FIN_FAILED FIN {one.id.decode()} {NOT_IN_FLIGHT}"
        assert connection.error() == f"E_FIN_FAILED FIN {SOME_ID.decode()} {NOT_IN_FLIGHT}"
        connection.settle()
    assert counts(nsqd, topic) == (0, 0, 0)


# -- REQ ---------------------------------------------------------------------------------------------------------------


def test_req_0_delivers_again_at_once(nsqd: Nsqd, topic: str):
    with delivered(nsqd, topic) as (connection, message):
        connection.send(req(message.id, 0))
        again = connection.message()
        assert (again.id, again.timestamp_ns, again.body) == (message.id, message.timestamp_ns, message.body)
        assert (message.attempts, again.attempts) == (1, 2)


def test_req_empty_timeout_is_0(nsqd: Nsqd, topic: str):
    with delivered(nsqd, topic) as (connection, message):
        connection.send(b"REQ %s \n" % message.id)
        assert connection.message().attempts == 2


def test_req_0_goes_to_the_tail(nsqd: Nsqd, topic: str):
    nsqd.publish(topic, b"x")
    with consumer(nsqd, topic, rdy_count=1) as one:
        message = one.message()
        with consumer(nsqd, topic, rdy_count=0) as other:
            goes_on(one, b"RDY 0\n" + req(message.id, 0))
            assert counts(nsqd, topic) == (1, 0, 0)
            other.rdy(1)
            assert other.message().attempts == 2


def test_req_counts(nsqd: Nsqd, topic: str):
    with delivered(nsqd, topic) as (connection, message):
        for attempts in range(2, 6):
            connection.send(req(message.id, 0))
            assert connection.message().attempts == attempts
        row = nsqd.stats(topic, "c")
        assert (row["requeue_count"], row["timeout_count"], row["message_count"]) == (4, 0, 1)
        assert only_client(nsqd, topic)["requeue_count"] == 4


@in_time
def test_req_with_a_delay_is_deferred(nsqd: Nsqd, topic: str):
    with delivered(nsqd, topic) as (connection, message):
        begun = time.monotonic()
        connection.send(req(message.id, 300))
        connection.settle()
        assert counts(nsqd, topic) == (0, 0, 1)
        again = connection.message()
        assert time.monotonic() - begun >= 0.3
        assert (again.id, again.attempts, again.timestamp_ns) == (message.id, 2, message.timestamp_ns)
        assert counts(nsqd, topic) == (0, 1, 0)


def test_req_delays_end_in_their_own_order(nsqd: Nsqd, topic: str):
    nsqd.publish(topic, b"300", b"100", b"200")
    with consumer(nsqd, topic, rdy_count=3) as connection:
        connection.send(b"".join(req(message.id, int(message.body)) for message in connection.messages(3)))
        assert [message.body for message in connection.messages(3)] == [b"100", b"200", b"300"]


@pytest.mark.improvement
def test_req_delay_ends_within_100_ms(nsqd: Nsqd, topic: str):
    """Upstream looks at random channels every 100 ms, and at new ones every 5 s."""
    with delivered(nsqd, topic) as (connection, message):

        def measure() -> float:
            begun = time.monotonic()
            connection.send(req(message.id, 200))
            connection.message()
            return time.monotonic() - begun

        assert 0.2 <= quickest(measure, 0.3) < 0.3


# -- timeouts and TOUCH ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short(shared_daemons: Daemons) -> Nsqd:
    """An nsqd whose messages time out after 0.6 s, and after 1.2 s however often they are touched."""
    return shared_daemons.nsqd(*quick_flags(), "--msg-timeout=600ms", "--max-msg-timeout=1200ms")


@in_time
def test_timeout_delivers_again(short: Nsqd, topic: str):
    with delivered(short, topic) as (connection, message):
        begun = time.monotonic()
        again = connection.message()
        assert time.monotonic() - begun > 0.5
        assert (again.id, again.attempts, again.timestamp_ns) == (message.id, 2, message.timestamp_ns)
        row = short.stats(topic, "c")
        assert (row["timeout_count"], row["requeue_count"]) == (1, 0)
        error = connection.error(fin(SOME_ID))
        assert error == f"E_FIN_FAILED FIN {SOME_ID.decode()} {NOT_IN_FLIGHT}"


@pytest.mark.parametrize("command", LINES)
@in_time
def test_timeout_ends_the_flight(short: Nsqd, topic: str, command: str):
    with delivered(short, topic) as (connection, message):
        connection.rdy(0)
        wait_for_counts(short, topic, (1, 0, 0))
        assert only_client(short, topic)["in_flight_count"] == 0
        error = refused_but_open(connection, LINES[command](message.id))
        assert error == f"E_{command}_FAILED {command} {message.id.decode()} {NOT_IN_FLIGHT}"


@in_time
def test_timeout_to_another_consumer(short: Nsqd, topic: str):
    with delivered(short, topic) as (connection, message):
        connection.rdy(0)
        with consumer(short, topic) as other:
            again = other.message()
            assert (again.id, again.attempts) == (message.id, 2)


def test_timeout_of_the_connection_that_asked_for_it(short: Nsqd, topic: str):
    """msg_timeout of IDENTIFY counts for one connection, --msg-timeout for the others."""
    with delivered(short, topic, msg_timeout=1000) as (connection, _):
        begun = time.monotonic()
        assert connection.message().attempts == 2
        assert time.monotonic() - begun > 0.9


@pytest.mark.improvement
def test_timeout_of_the_last_of_two_IDENTIFYs(nsqd: Nsqd, topic: str):
    """Upstream's pump keeps the msg_timeout of the first."""
    nsqd.publish(topic, b"x")
    with nsqd.connect() as connection:
        connection.identify(msg_timeout=60_000)
        connection.identify(msg_timeout=1000)
        connection.subscribe(topic, "c", 1)
        connection.message()
        assert connection.message().attempts == 2


@pytest.mark.improvement
def test_timeout_comes_within_100_ms(short: Nsqd, topic: str):
    """Upstream looks at random channels every 100 ms, and at new ones every 5 s."""
    with delivered(short, topic) as (connection, _):

        def measure() -> float:
            begun = time.monotonic()
            connection.message()
            return time.monotonic() - begun

        assert quickest(measure, 0.7) < 0.7


def test_touch_has_no_answer_and_restarts_the_timeout(nsqd: Nsqd, topic: str):
    with delivered(nsqd, topic, msg_timeout=3000) as (connection, message):
        time.sleep(0.25)
        touched = time.monotonic()
        connection.send(touch(message.id))
        assert connection.message().attempts == 2
        assert time.monotonic() - touched >= 3


def test_touch_is_bounded_by_the_longest_timeout_since_the_delivery(short: Nsqd, topic: str):
    with delivered(short, topic) as (connection, message):
        begun = time.monotonic()
        frame = None
        while (frame is None or frame.kind != MESSAGE) and time.monotonic() - begun < PATIENCE_S:
            connection.send(touch(message.id))  # refused in the instant between timeout and delivery
            try:
                frame = connection.any_frame(0.05)
            except TimeoutError:
                frame = None
        assert frame is not None and frame.kind == MESSAGE
        assert message_of(frame.data).attempts == 2
        assert time.monotonic() - begun > 1.1


@in_time
def test_touched_message_can_be_finished_later(nsqd: Nsqd, topic: str):
    with delivered(nsqd, topic, msg_timeout=3000) as (connection, message):
        connection.silence(1.6)  # only time shows that the timeout runs, and then that it was moved
        goes_on(connection, touch(message.id))
        connection.silence(1.6)
        goes_on(connection, fin(message.id))
    assert counts(nsqd, topic) == (0, 0, 0)
    assert nsqd.stats(topic, "c")["timeout_count"] == 0


@in_time
def test_touch_only_concerns_one_message(nsqd: Nsqd, topic: str):
    nsqd.publish(topic, b"x", b"y")
    with consumer(nsqd, topic, rdy_count=2, msg_timeout=1000) as connection:
        one, other = connection.messages(2)
        connection.rdy(0)

        def is_other_timed_out() -> bool:
            connection.send(touch(one.id))
            time.sleep(0.1)
            return counts(nsqd, topic) == (1, 1, 0)

        wait_until(is_other_timed_out, "the other to time out")
        goes_on(connection, fin(one.id))
        error = refused_but_open(connection, fin(other.id))
        assert error == f"E_FIN_FAILED FIN {other.id.decode()} {NOT_IN_FLIGHT}"
