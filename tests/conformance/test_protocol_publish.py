"""PUB, MPUB and DPUB: answers, sizes, errors, what a refused one leaves (NSQ's TCP protocol)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.conformance.protocol_helpers import after_eof, consumer, counts, fatal, producer, topics
from tests.integration.daemons import ERROR, Connection, Frame, Nsqd, dpub, mpub, mpub_body, pub, sized

MAX_MSG, MAX_BODY = 1048576, 5242880


def int32(value: int) -> bytes:
    return value.to_bytes(4, "big", signed=True)


# -- success -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["PUB", "MPUB", "DPUB"])
def test_answer_is_one_OK(connection: Connection, topic: str, command: str):
    line = {"PUB": pub(topic, b"x"), "MPUB": mpub(topic, [b"x"] * 100), "DPUB": dpub(topic, 1, b"x")}[command]
    connection.ok(line)
    connection.nothing_comes()


@pytest.mark.parametrize("command", ["PUB", "MPUB", "DPUB"])
def test_topic_is_created(nsqd: Nsqd, connection: Connection, topic: str, command: str):
    line = {"PUB": pub(topic, b"x"), "MPUB": mpub(topic, [b"x"]), "DPUB": dpub(topic, 0, b"x")}[command]
    connection.ok(line)
    row = nsqd.stats(topic)
    assert (row["message_count"], row["message_bytes"], row["channels"]) == (1, 1, [])


def test_mpub_is_as_many_messages(nsqd: Nsqd, connection: Connection, topic: str):
    bodies = [b"%d" % number for number in range(50)]
    connection.ok(mpub(topic, bodies))
    connection.subscribe(topic, "c", 100)
    received = connection.messages(50)
    assert sorted(message.body for message in received) == sorted(bodies)
    assert len({message.id for message in received}) == 50
    assert nsqd.stats(topic)["message_count"] == 50


@pytest.mark.parametrize("size", [1, MAX_MSG - 1, MAX_MSG])
def test_pub_size_allowed(nsqd: Nsqd, connection: Connection, topic: str, size: int):
    connection.ok(pub(topic, bytes(size)))
    assert nsqd.stats(topic)["message_bytes"] == size


@pytest.mark.parametrize("size", [1, MAX_MSG])
def test_dpub_size_allowed(connection: Connection, topic: str, size: int):
    connection.ok(dpub(topic, 0, bytes(size)))


def test_mpub_message_size_allowed(connection: Connection, topic: str):
    connection.ok(mpub(topic, [b"x", bytes(MAX_MSG), bytes(MAX_MSG)]))


def test_mpub_body_size_allowed(nsqd: Nsqd, connection: Connection, topic: str):
    bodies = [bytes(MAX_MSG)] * 4 + [bytes(MAX_BODY - 4 - 4 * (4 + MAX_MSG) - 4)]
    assert len(mpub_body(bodies)) == MAX_BODY
    connection.ok(mpub(topic, bodies))
    assert nsqd.stats(topic)["message_count"] == 5


def test_messages_of_different_sizes(nsqd: Nsqd, connection: Connection, topic: str):
    bodies = [b"x" * size for size in (1, 2, 300, 1, 70_000, 5)]
    connection.ok(mpub(topic, bodies))
    connection.subscribe(topic, "c", 10)
    assert sorted(message.body for message in connection.messages(6)) == sorted(bodies)


def test_a_subscriber_may_publish(connection: Connection, topic: str):
    connection.subscribe(topic, "c")
    connection.ok(pub(topic, b"x") + mpub(topic, [b"y"]) + dpub(topic, 0, b"z"), count=3)


def test_pub_counts(nsqd: Nsqd, connection: Connection, topic: str):
    connection.ok(pub(topic, b"x") * 3 + mpub(topic, [b"y"] * 4), count=4)
    assert producer(nsqd, topic)["pub_counts"] == [{"topic": topic, "count": 7}]


@pytest.mark.improvement
def test_pub_counts_name_every_topic(nsqd: Nsqd, connection: Connection, topic: str):
    """Upstream shows one topic per connection."""
    other = f"{topic}-other"
    connection.ok(pub(topic, b"x") + pub(other, b"x"), count=2)
    expected = [{"topic": topic, "count": 1}, {"topic": other, "count": 1}]
    assert producer(nsqd, topic)["pub_counts"] == expected


# -- errors ------------------------------------------------------------------------------------------------------------

ERRORS: dict[str, tuple[bytes, str]] = {
    "PUB-no-topic": (b"PUB\n", "E_INVALID PUB insufficient number of parameters"),
    "PUB-size-zero": (b"PUB %s\n" + int32(0), "E_BAD_MESSAGE PUB invalid message body size 0"),
    "PUB-size-negative": (b"PUB %s\n" + int32(-1), "E_BAD_MESSAGE PUB invalid message body size -1"),
    "PUB-size-smallest": (b"PUB %s\n" + int32(-(2**31)), "E_BAD_MESSAGE PUB invalid message body size -2147483648"),
    "PUB-size-max-plus-one": (b"PUB %s\n" + int32(MAX_MSG + 1), "E_BAD_MESSAGE PUB message too big 1048577 > 1048576"),
    "PUB-size-biggest": (b"PUB %s\n" + int32(2**31 - 1), "E_BAD_MESSAGE PUB message too big 2147483647 > 1048576"),
    "MPUB-no-topic": (b"MPUB\n", "E_INVALID MPUB insufficient number of parameters"),
    "MPUB-size-zero": (b"MPUB %s\n" + int32(0), "E_BAD_BODY MPUB invalid body size 0"),
    "MPUB-size-negative": (b"MPUB %s\n" + int32(-1), "E_BAD_BODY MPUB invalid body size -1"),
    "MPUB-size-max-plus-one": (
        b"MPUB %s\n" + int32(MAX_BODY + 1),
        "E_BAD_BODY MPUB body too big 5242881 > 5242880",
    ),
    "MPUB-count-zero": (b"MPUB %s\n" + sized(int32(0)), "E_BAD_BODY MPUB invalid message count 0"),
    "MPUB-count-negative": (b"MPUB %s\n" + sized(int32(-1)), "E_BAD_BODY MPUB invalid message count -1"),
    "MPUB-count-max-plus-one": (
        b"MPUB %s\n" + sized(int32(1048576)),
        "E_BAD_BODY MPUB invalid message count 1048576",
    ),
    "MPUB-count-before-the-rest-is-there": (
        b"MPUB %s\n" + int32(1000) + int32(0),
        "E_BAD_BODY MPUB invalid message count 0",
    ),
    "MPUB-first-message-empty": (
        b"MPUB %s\n" + sized(mpub_body([b"", b"x"])),
        "E_BAD_MESSAGE MPUB invalid message(0) body size 0",
    ),
    "MPUB-last-message-empty": (
        b"MPUB %s\n" + sized(mpub_body([b"x", b"y", b""])),
        "E_BAD_MESSAGE MPUB invalid message(2) body size 0",
    ),
    "MPUB-message-size-negative": (
        b"MPUB %s\n" + sized(int32(2) + sized(b"x") + int32(-2)),
        "E_BAD_MESSAGE MPUB invalid message(1) body size -2",
    ),
    "MPUB-message-too-big": (
        b"MPUB %s\n" + sized(int32(2) + sized(b"x") + int32(MAX_MSG + 1)),
        "E_BAD_MESSAGE MPUB message too big 1048577 > 1048576",
    ),
    "DPUB-no-topic": (b"DPUB\n", "E_INVALID DPUB insufficient number of parameters"),
    "DPUB-no-delay": (b"DPUB %s\n", "E_INVALID DPUB insufficient number of parameters"),
    "DPUB-size-zero": (b"DPUB %s 0\n" + int32(0), "E_BAD_MESSAGE DPUB invalid message body size 0"),
    "DPUB-size-negative": (b"DPUB %s 0\n" + int32(-1), "E_BAD_MESSAGE DPUB invalid message body size -1"),
    "DPUB-size-max-plus-one": (
        b"DPUB %s 0\n" + int32(MAX_MSG + 1),
        "E_BAD_MESSAGE DPUB message too big 1048577 > 1048576",
    ),
    "DPUB-delay-a-word": (b"DPUB %s soon\n", "E_INVALID DPUB could not parse timeout soon"),
    "DPUB-delay-negative": (b"DPUB %s -1\n", "E_INVALID DPUB could not parse timeout -1"),
    "DPUB-delay-plus": (b"DPUB %s +1\n", "E_INVALID DPUB could not parse timeout +1"),
    "DPUB-delay-fraction": (b"DPUB %s 1.5\n", "E_INVALID DPUB could not parse timeout 1.5"),
    "DPUB-delay-hexadecimal": (b"DPUB %s 0x10\n", "E_INVALID DPUB could not parse timeout 0x10"),
    "DPUB-delay-max-plus-one": (b"DPUB %s 3600001\n", "E_INVALID DPUB timeout 3600001 out of range 0-3600000"),
    "DPUB-delay-before-the-body": (b"DPUB %s x\n" + sized(b""), "E_INVALID DPUB could not parse timeout x"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_refused_and_closed(nsqd: Nsqd, topic: str, case: str):
    commands, error = ERRORS[case]
    assert fatal(nsqd, commands.replace(b"%s", topic.encode(), 1)) == error


@pytest.mark.parametrize("case", [case for case in ERRORS if not case.startswith("MPUB")])
def test_refused_creates_no_topic(nsqd: Nsqd, topic: str, case: str):
    fatal(nsqd, ERRORS[case][0].replace(b"%s", topic.encode(), 1))
    assert topic not in topics(nsqd)


@pytest.mark.improvement
@pytest.mark.parametrize("case", [case for case in ERRORS if case.startswith("MPUB-")])
def test_refused_MPUB_creates_no_topic(nsqd: Nsqd, topic: str, case: str):
    """Upstream creates the topic of an MPUB before it looks at the body."""
    fatal(nsqd, ERRORS[case][0].replace(b"%s", topic.encode(), 1))
    assert topic not in topics(nsqd)


@pytest.mark.improvement
def test_dpub_delay_beyond_64_bits_is_refused(nsqd: Nsqd):
    """Upstream lets the number wrap around and takes what comes out."""
    error = fatal(nsqd, b"DPUB t 18446744073709551617\n")
    assert error == "E_INVALID DPUB could not parse timeout 18446744073709551617"


@pytest.mark.parametrize(
    "delay", ["0", "", "3600000", "007", "0" * 30], ids=["0", "empty", "max", "leading-zeros", "thirty-zeros"]
)
def test_dpub_delay_allowed(connection: Connection, topic: str, delay: str):
    connection.ok(b"DPUB %s %s\n" % (topic.encode(), delay.encode()) + sized(b"x"))


def test_the_doubled_code_of_MPUB_begins_with_E_BAD_TOPIC(nsqd: Nsqd):
    error = fatal(nsqd, b"MPUB a/b\n")
    assert error == 'E_BAD_TOPIC E_BAD_TOPIC MPUB topic name "a/b" is not valid'


# -- all or nothing ----------------------------------------------------------------------------------------------------


def test_a_bad_message_in_an_mpub_leaves_none_of_it(nsqd: Nsqd, connection: Connection, topic: str):
    connection.ok(pub(topic, b"before"))
    fatal(nsqd, mpub(topic, [b"a", b"b", b""]))
    assert nsqd.stats(topic)["message_count"] == 1


def test_publishes_before_a_fatal_one_stay(nsqd: Nsqd, topic: str):
    with nsqd.connect() as connection:
        connection.send(pub(topic, b"1") + pub(topic, b"2") + b"PUB %s\n" % topic.encode() + int32(0))
        connection.ok(count=2)
        assert connection.error() == "E_BAD_MESSAGE PUB invalid message body size 0"
        assert connection.wait_closed() == []
    with consumer(nsqd, topic, rdy_count=10) as connection:
        assert sorted(message.body for message in connection.messages(2)) == [b"1", b"2"]
    assert nsqd.stats(topic)["message_count"] == 2


# -- the declared size of an MPUB --------------------------------------------------------------------------------------

DECLARED: dict[str, Callable[[int, list[bytes]], int]] = {
    "exact": lambda size, bodies: size,
    "4-too-large": lambda size, bodies: size + 4,  # Youzan's Java SDK, which counts the size itself
    "as-large-as-may-be": lambda size, bodies: MAX_BODY,
    "1-too-small": lambda size, bodies: size - 1,
    "4-too-small": lambda size, bodies: size - 4,  # nsq-ruby, which forgets the count
    "of-the-bodies-alone": lambda size, bodies: sum(map(len, bodies)),  # segmentio/nsq-go
    "within-the-second": lambda size, bodies: 4 + 4 + len(bodies[0]) + 4 + 1,
    "one-byte": lambda size, bodies: 1,
}


def declaring(topic: str, bodies: list[bytes], case: str) -> bytes:
    """An MPUB of a size that some clients declare, or none does."""
    body = mpub_body(bodies)
    return b"MPUB %s\n" % topic.encode() + int32(DECLARED[case](len(body), bodies)) + body


@pytest.mark.parametrize("case", DECLARED)
def test_mpub_ends_behind_its_last_message_whatever_size_it_declares(
    nsqd: Nsqd, connection: Connection, topic: str, case: str
):
    connection.ok(declaring(topic, [b"x", b"yy", b"zzz"], case))  # nothing follows that it could wait for
    connection.ok(declaring(topic, [b"uniform"] * 50, case) + pub(topic, b"next"), count=2)
    with consumer(nsqd, topic, rdy_count=60) as consuming:
        bodies = sorted(message.body for message in consuming.messages(54))
    assert bodies == sorted([b"x", b"yy", b"zzz", b"next", *[b"uniform"] * 50])


@pytest.mark.parametrize("case", DECLARED)
@pytest.mark.parametrize("piece", [1, 3, 7])
def test_mpub_in_pieces_ends_behind_its_last_message(
    nsqd: Nsqd, connection: Connection, topic: str, case: str, piece: int
):
    commands = declaring(topic, [b"x", b"yy", b"zzz"], case) + pub(topic, b"next")
    for start in range(0, len(commands), piece):
        connection.send(commands[start : start + piece])
    connection.ok(count=2)
    assert nsqd.stats(topic)["message_count"] == 4


def test_large_mpub_of_a_small_declared_size(nsqd: Nsqd, connection: Connection, topic: str):
    bodies = [bytes(MAX_MSG), b"x", bytes(MAX_MSG), b"yy"]
    connection.ok(declaring(topic, bodies, "one-byte") + pub(topic, b"next"), count=2)
    assert nsqd.stats(topic)["message_bytes"] == sum(map(len, bodies)) + 4


@pytest.mark.improvement
def test_what_an_mpub_may_hold_is_bounded_whatever_size_it_declares(nsqd: Nsqd, topic: str):
    """Upstream reads as many messages as the count says, of the largest size each."""
    head = b"MPUB %s\n" % topic.encode() + int32(24) + int32(6)
    messages = sized(bytes(MAX_MSG)) * 4
    read = 4 + len(messages) + 4 + MAX_MSG
    error = f"E_BAD_BODY MPUB body too big {read} > {MAX_BODY}"
    assert fatal(nsqd, head + messages + int32(MAX_MSG)) == error  # before the bytes that are too many have come


@pytest.mark.parametrize("case", ["4-too-large", "4-too-small"])
def test_a_bad_message_in_an_mpub_of_a_wrong_size_leaves_none_of_it(
    nsqd: Nsqd, connection: Connection, topic: str, case: str
):
    connection.ok(pub(topic, b"before"))
    error = fatal(nsqd, declaring(topic, [b"a", b"b", b""], case))
    assert error == "E_BAD_MESSAGE MPUB invalid message(2) body size 0"
    assert nsqd.stats(topic)["message_count"] == 1


def test_what_stands_behind_the_messages_of_an_mpub_is_the_next_command(nsqd: Nsqd, topic: str):
    with nsqd.connect() as connection:
        body = mpub_body([b"x", b"y", b"z"])
        connection.send(b"MPUB %s\n" % topic.encode() + sized(int32(2) + body[4:]) + b"NOP\n")
        connection.ok()
        assert connection.error().startswith("E_INVALID invalid command ")
        connection.wait_closed()
    assert nsqd.stats(topic)["message_count"] == 2


# -- the end of the stream ---------------------------------------------------------------------------------------------

CUT: dict[str, tuple[bytes, str]] = {
    "PUB-no-size": (b"PUB t\n", "E_BAD_MESSAGE PUB failed to read message body size"),
    "PUB-half-a-size": (b"PUB t\n\x00\x00\x00", "E_BAD_MESSAGE PUB failed to read message body size"),
    "PUB-no-body": (b"PUB t\n" + int32(2), "E_BAD_MESSAGE PUB failed to read message body"),
    "PUB-half-a-body": (b"PUB t\n" + int32(2) + b"x", "E_BAD_MESSAGE PUB failed to read message body"),
    "DPUB-no-size": (b"DPUB t 1\n", "E_BAD_MESSAGE DPUB failed to read message body size"),
    "DPUB-half-a-body": (b"DPUB t 1\n" + int32(2) + b"x", "E_BAD_MESSAGE DPUB failed to read message body"),
    "MPUB-no-size": (b"MPUB t\n", "E_BAD_BODY MPUB failed to read body size"),
    "MPUB-no-count": (b"MPUB t\n" + int32(20), "E_BAD_BODY MPUB failed to read message count"),
    "MPUB-half-a-count": (b"MPUB t\n" + int32(20) + b"\x00\x00", "E_BAD_BODY MPUB failed to read message count"),
    "MPUB-no-message": (
        b"MPUB t\n" + int32(20) + int32(2),
        "E_BAD_MESSAGE MPUB failed to read message(0) body size",
    ),
    "MPUB-second-message": (
        b"MPUB t\n" + int32(20) + int32(2) + sized(b"x") + b"\x00",
        "E_BAD_MESSAGE MPUB failed to read message(1) body size",
    ),
    "MPUB-half-a-message": (
        b"MPUB t\n" + int32(20) + int32(2) + int32(2) + b"x",
        "E_BAD_MESSAGE MPUB failed to read message body",
    ),
}


@pytest.mark.parametrize("case", CUT)
def test_cut_short_by_the_end_of_the_stream(nsqd: Nsqd, case: str):
    commands, error = CUT[case]
    assert after_eof(nsqd, commands) == [Frame(ERROR, error.encode())]


def test_cut_short_leaves_nothing_in_the_topic(nsqd: Nsqd, connection: Connection, topic: str):
    connection.ok(pub(topic, b"x"))
    after_eof(nsqd, mpub(topic, [b"a", b"b"])[:-1])
    after_eof(nsqd, pub(topic, b"ab")[:-1])
    assert nsqd.stats(topic)["message_count"] == 1


def test_every_body_reaches_the_channel(nsqd: Nsqd, connection: Connection, topic: str):
    connection.subscribe(topic, "c")
    connection.ok(pub(topic, b"1") + mpub(topic, [b"2", b"3"]) + dpub(topic, 0, b"4"), count=3)
    assert counts(nsqd, topic) == (4, 0, 0)
