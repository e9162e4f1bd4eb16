"""How a connection starts, command lines, frames, the end of a stream (NSQ's TCP protocol)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conformance.conftest import quick_flags
from tests.conformance.protocol_helpers import (
    COMMANDS,
    UnixNsqd,
    after_eof,
    consumer,
    counts,
    delivered,
    fatal,
    fatal_on,
    goes_on,
    only_client,
    producer,
    topics,
)
from tests.integration.daemons import (
    ERROR,
    RESPONSE,
    Connection,
    Frame,
    Nsqd,
    dpub,
    message_of,
    mpub,
    pub,
    sized,
    wait_until,
)

LINE_SIZE_MAX = 16384


# -- the first four bytes ----------------------------------------------------------------------------------------------


def test_magic_has_no_answer(nsqd: Nsqd):
    with nsqd.connect() as connection:
        connection.nothing_comes()
        goes_on(connection)


def test_magic_has_no_newline(nsqd: Nsqd):
    assert fatal(nsqd, b"\nNOP\n") == "E_INVALID invalid command "


def test_magic_may_come_byte_by_byte(nsqd: Nsqd):
    with nsqd.connect(b"") as connection:
        for byte in b"  V2":
            connection.send(bytes([byte]))
            time.sleep(0.002)
        goes_on(connection)


def test_magic_may_come_with_commands(nsqd: Nsqd, topic: str):
    with nsqd.connect(b"  V2" + pub(topic, b"x") + b"NOP\n") as connection:
        connection.ok()


BAD_MAGICS = {
    "V1": b"  V1",
    "V3": b"  V3",
    "lower-case": b"  v2",
    "no-spaces": b"V2\n\n",
    "newline-first": b"\n  V",
    "http": b"GET ",
    "zeros": bytes(4),
}


@pytest.mark.parametrize("magic", BAD_MAGICS.values(), ids=BAD_MAGICS)
def test_bad_magic_is_refused_and_closed(nsqd: Nsqd, magic: bytes):
    with nsqd.connect(magic) as connection:
        assert fatal_on(connection, b"") == "E_BAD_PROTOCOL"


def test_bad_magic_frame_has_no_text_behind_the_code(nsqd: Nsqd):
    with nsqd.connect(b"  V1") as connection:
        assert connection.socket.recv(100) == b"\x00\x00\x00\x12\x00\x00\x00\x01E_BAD_PROTOCOL"


def test_half_a_magic_at_the_end_of_the_stream_is_not_answered(nsqd: Nsqd):
    assert after_eof(nsqd, b"", magic=b"  ") == []


# -- lines -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [b"NOP\r\n", b"RDY 1\r\n"], ids=["NOP", "RDY"])
def test_one_carriage_return_is_stripped(nsqd: Nsqd, topic: str, line: bytes):
    with consumer(nsqd, topic, rdy_count=0) as connection:
        goes_on(connection, line)


def test_one_carriage_return_is_stripped_in_front_of_a_body(nsqd: Nsqd, topic: str):
    with nsqd.connect() as connection:
        connection.ok(b"PUB %s\r\n" % topic.encode() + sized(b"\r\nx"))
        connection.ok(b"SUB %s c\r\n" % topic.encode())
        connection.send(b"RDY 1\r\n")
        assert connection.message().body == b"\r\nx"


def test_of_two_carriage_returns_one_stays(nsqd: Nsqd):
    assert fatal(nsqd, b"NOP\r\r\n") == "E_INVALID invalid command NOP\r"


def test_a_carriage_return_inside_the_line_stays(nsqd: Nsqd):
    assert fatal(nsqd, b"PUB a\r b\n") == 'E_BAD_TOPIC PUB topic name "a\\r" is not valid'


EMPTY_PARAMETERS = {
    "SUB-topic": (b"SUB  a b\n", 'E_BAD_TOPIC SUB topic name "" is not valid'),
    "SUB-channel": (b"SUB a  b\n", 'E_BAD_CHANNEL SUB channel name "" is not valid'),
    "PUB-topic": (b"PUB  a\n", 'E_BAD_TOPIC PUB topic name "" is not valid'),
    "MPUB-topic": (b"MPUB  a\n", 'E_BAD_TOPIC E_BAD_TOPIC MPUB topic name "" is not valid'),
    "DPUB-topic": (b"DPUB  a 1\n", 'E_BAD_TOPIC DPUB topic name "" is not valid'),
    "trailing-space-PUB": (b"PUB \n", 'E_BAD_TOPIC PUB topic name "" is not valid'),
    "trailing-space-SUB": (b"SUB a \n", 'E_BAD_CHANNEL SUB channel name "" is not valid'),
    "leading-space": (b" NOP\n", "E_INVALID invalid command "),
    "only-a-space": (b" \n", "E_INVALID invalid command "),
    "tab-does-not-separate": (b"PUB\ta\n", "E_INVALID invalid command PUB\ta"),
}


@pytest.mark.parametrize(("line", "error"), EMPTY_PARAMETERS.values(), ids=EMPTY_PARAMETERS)
def test_every_single_space_separates(nsqd: Nsqd, line: bytes, error: str):
    assert fatal(nsqd, line) == error


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_case_sensitive(nsqd: Nsqd, command: str):
    line = COMMANDS[command].replace(command.encode(), command.lower().encode(), 1)
    assert fatal(nsqd, line) == f"E_INVALID invalid command {command.lower()}"


UNKNOWN = {
    "word": (b"FOO\n", b"FOO"),
    "only-the-first-word-is-said": (b"FOO bar baz\n", b"FOO"),
    "empty-line": (b"\n", b""),
    "carriage-return": (b"\r\n", b""),
    "capitalized": (b"Pub t\n", b"Pub"),
    "prefix-of-a-command": (b"PU t\n", b"PU"),
    "command-with-more-letters": (b"PUBX t\n", b"PUBX"),
    "bytes-as-they-came": (b"\xff\x00\xc3\xbc\n", b"\xff\x00\xc3\xbc"),
    "percent": (b"%s%d\n", b"%s%d"),
}


@pytest.mark.parametrize(("line", "word"), UNKNOWN.values(), ids=UNKNOWN)
def test_unknown_command(nsqd: Nsqd, line: bytes, word: bytes):
    expected = b"E_INVALID invalid command " + word
    assert fatal(nsqd, line).encode("utf-8", "surrogateescape") == expected


EXTRA = {
    "IDENTIFY": (b"IDENTIFY x y\n" + sized(b"{}"), 1),
    "SUB": (b"SUB %s d x y\n", 1),
    "PUB": (b"PUB %s x y\n" + sized(b"x"), 1),
    "MPUB": (b"MPUB %s x y\n" + mpub("", [b"x"])[len(b"MPUB \n") :], 1),
    "DPUB": (b"DPUB %s 0 x y\n" + sized(b"x"), 1),
    "NOP": (b"NOP x y\n", 0),
}


@pytest.mark.parametrize("command", EXTRA)
def test_extra_parameters_are_ignored(nsqd: Nsqd, topic: str, command: str):
    line, answers = EXTRA[command]
    with nsqd.connect() as connection:
        connection.ok(line.replace(b"%s", topic.encode()), count=answers)
        goes_on(connection)


def test_extra_parameters_are_ignored_by_RDY_and_TOUCH_and_REQ_and_FIN_and_CLS(nsqd: Nsqd, topic: str):
    nsqd.publish(topic, b"x")
    with consumer(nsqd, topic, rdy_count=0) as connection:
        connection.send(b"RDY 1 2 3\n")
        message = connection.message()
        connection.send(b"TOUCH %s x y\nREQ %s 0 x y\n" % (message.id, message.id))
        again = connection.message()
        assert (again.id, again.attempts) == (message.id, 2)
        connection.send(b"FIN %s x y\nCLS x y\n" % message.id)
        assert connection.response() == b"CLOSE_WAIT"
    assert counts(nsqd, topic) == (0, 0, 0)


def test_extra_parameters_are_refused_by_AUTH(nsqd: Nsqd):
    assert fatal(nsqd, b"AUTH x\n") == "E_INVALID AUTH invalid number of parameters"


def test_longest_line(nsqd: Nsqd):
    """16384 bytes with the newline: the read buffer is full."""
    with nsqd.connect() as connection:
        goes_on(connection, b"NOP " + b"x" * (LINE_SIZE_MAX - 5) + b"\n")


@pytest.mark.parametrize("size", [LINE_SIZE_MAX, LINE_SIZE_MAX + 1, 10 * LINE_SIZE_MAX])
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_too_long_line_is_closed_without_an_error(nsqd: Nsqd, size: int, end: bytes):
    with nsqd.connect() as connection:
        connection.send(b"N" * size + end)
        assert connection.wait_closed() == []


def test_too_long_line_behind_good_ones(nsqd: Nsqd, topic: str):
    with nsqd.connect() as connection:
        connection.ok(pub(topic, b"x"))
        connection.send(b"N" * (LINE_SIZE_MAX + 1))
        assert connection.wait_closed() == []
    assert nsqd.stats(topic)["message_count"] == 1


# -- pipelining --------------------------------------------------------------------------------------------------------


def whole_session(topic: str) -> bytes:
    """Six commands that are answered with OK, one with a message."""
    return (
        COMMANDS["IDENTIFY"]
        + pub(topic, b"1")
        + mpub(topic, [b"2", b"3"])
        + b"NOP\n"
        + dpub(topic, 0, b"4")
        + b"SUB %s c\nRDY 10\n" % topic.encode()
        + pub(topic, b"5")
    )


@pytest.mark.parametrize("step", [1 << 20, 1, 7], ids=["one-write", "byte-by-byte", "seven-bytes"])
def test_commands_may_be_sent_without_waiting(nsqd: Nsqd, topic: str, step: int):
    commands = whole_session(topic)
    with nsqd.connect() as connection:
        for at in range(0, len(commands), step):
            connection.send(commands[at : at + step])
        frames = [connection.frame() for _ in range(11)]
    assert [frame for frame in frames if frame.kind == RESPONSE] == [Frame(RESPONSE, b"OK")] * 6
    assert sorted(message_of(data).body for kind, data in frames if kind != RESPONSE) == [b"1", b"2", b"3", b"4", b"5"]


def test_answers_come_in_the_order_of_the_commands(nsqd: Nsqd, topic: str):
    with nsqd.connect() as connection:
        connection.send(
            pub(topic, b"x") + identify_with_answer() + pub(topic, b"y") + b"SUB %s c\nCLS\n" % topic.encode()
        )
        answers = [connection.response() for _ in range(5)]
    assert [answers[0], answers[2], answers[3], answers[4]] == [b"OK", b"OK", b"OK", b"CLOSE_WAIT"]
    assert answers[1].startswith(b'{"max_rdy_count":')


def identify_with_answer() -> bytes:
    return b"IDENTIFY\n" + sized(b'{"feature_negotiation":true}')


def test_nothing_behind_a_fatal_error_is_executed(nsqd: Nsqd, topic: str):
    with nsqd.connect() as connection:
        connection.send(pub(topic, b"1") + b"FOO\n" + pub(topic, b"2"))
        connection.ok()
        assert fatal_on(connection, b"") == "E_INVALID invalid command FOO"
    assert nsqd.stats(topic)["message_count"] == 1


def test_the_unread_body_behind_an_error_is_dropped(nsqd: Nsqd):
    error = fatal(nsqd, b"PUB bad/name\n" + sized(b"NOP\n" * 250_000))
    assert error == 'E_BAD_TOPIC PUB topic name "bad/name" is not valid'


# -- the end of the stream ---------------------------------------------------------------------------------------------


def test_eof_what_came_before_is_answered(nsqd: Nsqd, topic: str):
    frames = after_eof(nsqd, pub(topic, b"x") + mpub(topic, [b"y"]) + identify_with_answer())
    assert [frame.data[:5] for frame in frames] == [b"OK", b"OK", b'{"max']
    assert nsqd.stats(topic)["message_count"] == 2


@pytest.mark.parametrize("refused", [b"RDY\n", b"FOO\n", b"\n", b"FIN x\n", b"PUB bad/name\n" + sized(b"x")])
@pytest.mark.parametrize("count", [1, 3, 200])
@pytest.mark.parametrize("is_new", [True, False])
def test_eof_what_came_before_a_refused_command_is_answered(
    nsqd: Nsqd, topic: str, refused: bytes, count: int, is_new: bool
):
    if not is_new:
        nsqd.post(f"/topic/create?topic={topic}")
    frames = after_eof(nsqd, pub(topic, b"x") * count + refused)
    assert [frame.data for frame in frames[:-1]] == [b"OK"] * count
    assert frames[-1].kind == ERROR
    assert nsqd.stats(topic)["message_count"] == count


@pytest.mark.parametrize("line", [b"PUB", b"PUB t", b"NOP", b"FOO"])
def test_eof_half_a_line_is_not_executed(nsqd: Nsqd, line: bytes):
    assert after_eof(nsqd, line) == []


def test_eof_in_the_middle_of_nothing_is_no_error(nsqd: Nsqd):
    assert after_eof(nsqd, b"NOP\n") == []


def test_eof_of_a_consumer_ends_its_subscription(nsqd: Nsqd, topic: str):
    assert after_eof(nsqd, b"SUB %s c\n" % topic.encode()) == [Frame(RESPONSE, b"OK")]
    wait_until(lambda: nsqd.stats(topic, "c")["client_count"] == 0, "the consumer to be gone")


# -- frames ------------------------------------------------------------------------------------------------------------


def test_frame_of_a_response(nsqd: Nsqd, topic: str):
    with nsqd.connect() as connection:
        connection.send(pub(topic, b"x"))
        assert connection.socket.recv(100) == b"\x00\x00\x00\x06\x00\x00\x00\x00OK"


def test_frame_of_an_error(nsqd: Nsqd):
    with nsqd.connect() as connection:
        connection.send(b"FOO\n")
        text = b"E_INVALID invalid command FOO"
        assert connection.socket.recv(100) == b"\x00\x00\x00\x21\x00\x00\x00\x01" + text


def test_frame_of_a_message(nsqd: Nsqd, topic: str):
    before_ns = time.time_ns()
    nsqd.publish(topic, b"body")
    after_ns = time.time_ns()
    with nsqd.connect() as connection:
        connection.send(b"SUB %s c\nRDY 1\n" % topic.encode())
        data = b""
        while len(data) < 10 + 8 + 26 + 4:
            data += connection.socket.recv(1000)
    ok, message = data[:10], data[10:]
    assert ok == b"\x00\x00\x00\x06\x00\x00\x00\x00OK"
    assert message[:8] == b"\x00\x00\x00\x22\x00\x00\x00\x02"  # 4 of the type, 26 of the header, 4 of the body
    assert before_ns <= int.from_bytes(message[8:16], "big") <= after_ns
    assert message[16:18] == b"\x00\x01"
    assert set(message[18:34]) <= set(b"0123456789abcdef")
    assert message[34:] == b"body"


BODIES = {
    "one-byte": b"x",
    "zero-byte": b"\x00",
    "newlines": b"\n\r\n\n",
    "looks-like-commands": b"FIN 0123456789abcdef\nCLS\n",
    "all-bytes": bytes(range(256)),
    "64-KiB": bytes(65536),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_bodies_come_back_byte_for_byte(nsqd: Nsqd, topic: str, body: bytes):
    nsqd.publish(topic, body)
    with consumer(nsqd, topic) as connection:
        assert connection.message().body == body


def test_messages_may_stand_between_answers(nsqd: Nsqd, topic: str):
    with delivered(nsqd, topic) as (connection, message):
        connection.send(pub(topic, b"y") + b"FIN %s\n" % message.id + pub(f"{topic}-other", b"z"))
        kinds = sorted(connection.frame().kind for _ in range(3))
        assert kinds == [0, 0, 2]


# -- unix socket -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unix_nsqd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UnixNsqd]:
    nsqd = UnixNsqd(Path(tmp_path_factory.mktemp("unix")), *quick_flags())
    nsqd.start()
    try:
        yield nsqd
    finally:
        nsqd.discard()
    assert not nsqd.crashes()


def test_unix_socket_speaks_the_same_protocol(unix_nsqd: UnixNsqd, topic: str):
    unix_nsqd.publish(topic, b"x")
    with consumer(unix_nsqd, topic) as connection:
        message = connection.message()
        assert message.body == b"x"
        connection.finish(message)
        connection.settle()
    assert counts(unix_nsqd, topic) == (0, 0, 0)


def test_unix_socket_errors(unix_nsqd: UnixNsqd):
    assert fatal(unix_nsqd, b"FOO\n") == "E_INVALID invalid command FOO"
    assert [frame.data for frame in after_eof(unix_nsqd, b"PUB t\n")] == [
        b"E_BAD_MESSAGE PUB failed to read message body size"
    ]


# -- who is there ------------------------------------------------------------------------------------------------------


def test_stats_before_identify_name_the_remote_address(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic) as connection:
        row = only_client(nsqd, topic)
        assert (row["client_id"], row["hostname"], row["user_agent"]) == ("127.0.0.1", "127.0.0.1", "")
        assert row["remote_address"] == "{}:{}".format(*connection.socket.getsockname())
        assert row["version"] == "V2"


def test_stats_count_what_a_connection_published(nsqd: Nsqd, topic: str):
    with nsqd.connect() as connection:
        connection.ok(pub(topic, b"x") + mpub(topic, [b"y", b"z"]) + dpub(topic, 0, b"0"), count=3)
        assert producer(nsqd, topic)["pub_counts"] == [{"topic": topic, "count": 4}]


def test_a_refused_connection_leaves_nothing(nsqd: Nsqd, topic: str, connection: Connection):
    assert fatal_on(connection, b"PUB %s\n\x00\x00\x00\x00" % topic.encode()).startswith("E_BAD_MESSAGE")
    assert topic not in topics(nsqd)
