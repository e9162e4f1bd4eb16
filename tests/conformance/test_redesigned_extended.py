"""Trace ids and headers over TCP: PUB_TRACE, PUB_EXT, their M forms, who may subscribe (Youzan's TCP protocol)."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator

import pytest
from tests.conformance.conftest import is_ours
from tests.conformance.protocol_helpers import after_eof, consumer, fatal, refused_but_open, topics
from tests.conformance.redesigned_helpers import (
    LOCATION,
    Stored,
    consumer_of_all,
    create,
    dpub_to,
    extended,
    headed,
    in_order,
    mpub_to,
    one,
    placed,
    pub_to,
    several,
    stored,
    sub_to,
    traced,
)
from tests.integration.daemons import ERROR, RESPONSE, Connection, Daemons, Nsqd, mpub, pub, req, sized, wait_until

pytestmark = pytest.mark.skipif(not is_ours("nsqd"), reason="NSQ has neither trace ids nor headers")

COMMANDS: dict[str, Callable[[str, object], bytes]] = {
    "PUB_TRACE": lambda topic, partition: one("PUB_TRACE", topic, partition, traced(5, b"x")),
    "PUB_EXT": lambda topic, partition: one("PUB_EXT", topic, partition, headed({"k": "v"}, b"x")),
    "MPUB_TRACE": lambda topic, partition: several("MPUB_TRACE", topic, partition, [traced(5, b"x")]),
    "MPUB_EXT": lambda topic, partition: several("MPUB_EXT", topic, partition, [headed({"k": "v"}, b"x")]),
}
MAX_MSG_SIZE = 1024 * 1024
RAW_SIZE = 4 + 4 + 26  # of an empty body: what offsets grow by


@pytest.fixture
def parted(nsqd: Nsqd, topic: str) -> str:
    """A topic with partitions 0 and 1, without headers."""
    return create(nsqd, topic, 2)


@pytest.fixture
def headered(nsqd: Nsqd, topic: str) -> str:
    """A topic with partitions 0 and 1 whose messages have headers."""
    return create(nsqd, topic, 2, extend="true")


@pytest.fixture
def plain(nsqd: Nsqd, topic: str) -> str:
    """A plain topic whose messages may have headers."""
    nsqd.post(f"/topic/create?topic={topic}&extend=true")
    return topic


@pytest.fixture
def knowing(nsqd: Nsqd) -> Iterator[Connection]:
    """A connection that knows headers."""
    with nsqd.connect() as connection:
        connection.identify(extend_support=True)
        yield connection


# -- trace ids ---------------------------------------------------------------------------------------------------------


def test_the_answer_says_where_it_is(connection: Connection, parted: str):
    connection.send(one("PUB_TRACE", parted, 1, traced(12345, b"traced")))
    assert stored(connection.response()) == (1, 1, 12345, 0, RAW_SIZE + 6)
    connection.send(one("PUB_TRACE", parted, 1, traced(2**64 - 1, b"x")))
    assert stored(connection.response()) == (1, 2, 2**64 - 1, RAW_SIZE + 6, RAW_SIZE + 1)


def test_a_message_has_its_trace_id(nsqd: Nsqd, connection: Connection, parted: str):
    connection.send(one("PUB_TRACE", parted, 0, traced(7, b"a")) + pub_to(parted, 0, b"b"))
    connection.response()
    connection.ok()
    with consumer_of_all(nsqd, parted, rdy_count=9) as waiting:
        assert [placed(each)[:5] for each in waiting.messages(2)] == [(0, 1, 7, 1, b"a"), (0, 2, 0, 1, b"b")]


def test_the_answer_is_where_order_says(nsqd: Nsqd, connection: Connection, parted: str):
    """Offset and raw size of the answer are those in front of an ordered message's body."""
    connection.ok(mpub_to(parted, 0, [b"one", b"three"]))
    connection.send(one("PUB_TRACE", parted, 0, traced(9, b"traced")))
    answer = stored(connection.response())
    with in_order(nsqd, parted) as waiting:
        for _ in range(2):
            waiting.finish(waiting.message())
        message = placed(waiting.message(), is_ordered=True)
    assert (message.trace_id, message.offset, message.raw_size) == (9, answer.offset, answer.raw_size)
    assert (message.partition, message.sequence) == (answer.partition, answer.sequence)


def test_mpub_trace_has_one_answer(nsqd: Nsqd, connection: Connection, parted: str):
    connection.ok(pub_to(parted, 1, b"before"))
    bodies = [traced(number, b"x" * number) for number in range(1, 4)]
    connection.send(several("MPUB_TRACE", parted, 1, bodies))
    assert stored(connection.response()) == (1, 2, 0, RAW_SIZE + 6, 3 * RAW_SIZE + 6)
    connection.send(one("PUB_TRACE", parted, 1, traced(4, b"behind")))
    assert stored(connection.response()).offset == RAW_SIZE + 6 + 3 * RAW_SIZE + 6
    with consumer_of_all(nsqd, parted, rdy_count=4) as waiting:
        found = [placed(each)[1:5] for each in waiting.messages(4)]
    assert found == [(1, 0, 1, b"before"), (2, 1, 1, b"x"), (3, 2, 1, b"xx"), (4, 3, 1, b"xxx")]


def test_a_run_of_traced_publishes_has_an_answer_each(connection: Connection, parted: str):
    connection.send(b"".join(one("PUB_TRACE", parted, 0, traced(n, b"x" * n)) for n in range(1, 200)))
    offset = 0
    for number in range(1, 200):
        assert stored(connection.response()) == (0, number, number, offset, RAW_SIZE + number)
        offset += RAW_SIZE + number


def test_a_message_keeps_its_trace_id_when_it_comes_again(nsqd: Nsqd, connection: Connection, parted: str):
    connection.send(one("PUB_TRACE", parted, 0, traced(7, b"a")))
    connection.response()
    with consumer_of_all(nsqd, parted) as waiting:
        for delay_ms in (0, 30, 100):
            message = waiting.message()
            assert placed(message).trace_id == 7
            waiting.send(req(message.id, delay_ms))
        assert placed(waiting.message()).trace_id == 7


@pytest.mark.parametrize("command", ["PUB_TRACE", "MPUB_TRACE"])
def test_a_plain_topic_has_no_room_for_a_trace_id(connection: Connection, topic: str, command: str):
    connection.ok(pub(topic, b"x"))
    error = refused_but_open(connection, COMMANDS[command](topic, None))
    expected = "has no partitions, so its message ids have no room for a trace id: create it with partition_num=1"
    assert error == f"E_EXT_NOT_SUPPORT {command} topic {topic} {expected}"


# -- headers -----------------------------------------------------------------------------------------------------------


def test_headers_are_kept_as_they_came(nsqd: Nsqd, connection: Connection, headered: str):
    given = '{ "k":"v",\t"n": 1.50, "ü" : ["x", {"y": null}] }'.encode()
    connection.ok(one("PUB_EXT", headered, 0, headed(given, b"body")))
    with consumer(nsqd, headered, extend_support=True) as waiting:
        message = waiting.message()
    assert extended(message.body) == (4, given, b"body")
    assert placed(message)[:3] == (0, 1, 0)


def test_a_message_without_headers_says_so(nsqd: Nsqd, connection: Connection, headered: str):
    connection.ok(pub_to(headered, 0, b"a") + mpub_to(headered, 0, [b"b"]) + dpub_to(headered, 0, 0, b"c"), count=3)
    connection.ok(one("PUB_EXT", headered, 0, headed(b"", b"d")))
    connection.ok(several("MPUB_EXT", headered, 0, [headed(b"", b"e"), headed({}, b"f")]))
    connection.send(one("PUB_TRACE", headered, 0, traced(8, b"g")))
    assert stored(connection.response()).trace_id == 8
    with consumer(nsqd, headered, rdy_count=9, extend_support=True) as waiting:
        found = [extended(each.body) for each in waiting.messages(7)]
    assert [each.body for each in found] == [b"a", b"b", b"c", b"d", b"e", b"f", b"g"]
    assert [each[:2] for each in found] == [(0, b"")] * 5 + [(4, b"{}"), (0, b"")]


def test_headers_with_a_trace_id(nsqd: Nsqd, connection: Connection, headered: str):
    headers = {"k": "v", "##trace_id": "18446744073709551615"}
    connection.send(one("PUB_EXT", headered, 1, headed(headers, b"body")))
    size = 1 + 2 + len(json.dumps(headers)) + 4
    assert stored(connection.response()) == (1, 1, 2**64 - 1, 0, RAW_SIZE + size)
    with consumer(nsqd, headered, extend_support=True) as waiting:
        message = waiting.message()
    assert placed(message).trace_id == 2**64 - 1
    assert json.loads(extended(message.body).headers) == headers


def test_mpub_ext_takes_the_trace_id_of_each(nsqd: Nsqd, connection: Connection, headered: str):
    bodies = [headed({"##trace_id": "5"}, b"a"), headed({"k": "v"}, b"b"), headed({"##trace_id": "007"}, b"c")]
    connection.ok(several("MPUB_EXT", headered, 0, bodies))
    with consumer(nsqd, headered, rdy_count=9, extend_support=True) as waiting:
        found = waiting.messages(3)
    assert [placed(each).trace_id for each in found] == [5, 0, 7]
    assert [extended(each.body).body for each in found] == [b"a", b"b", b"c"]


def test_many_messages_with_the_same_headers(nsqd: Nsqd, connection: Connection, headered: str):
    connection.ok(several("MPUB_EXT", headered, 0, [headed({"k": "v"}, b"%d" % n) for n in range(5000)]))
    with consumer(nsqd, headered, rdy_count=2500, extend_support=True) as waiting:
        for number in range(0, 5000, 2500):
            found = waiting.messages(2500)
            assert [extended(each.body) for each in found] == [
                (4, b'{"k": "v"}', b"%d" % n) for n in range(number, number + 2500)
            ]
            waiting.finish(*found)


def test_headers_of_an_ordered_message_stand_in_front_of_its_place(nsqd: Nsqd, connection: Connection, headered: str):
    connection.send(one("PUB_EXT", headered, 0, headed({"##trace_id": "3"}, b"body")))
    answer = stored(connection.response())
    with nsqd.connect() as waiting:
        waiting.identify(extend_support=True)
        waiting.ok(sub_to(headered, "c", 0, "SUB_ORDER"))
        waiting.rdy(1)
        for attempts in (1, 2, 3):
            message = waiting.message()
            version, headers, rest = extended(message.body)
            assert (version, headers, rest[LOCATION.size :]) == (4, b'{"##trace_id": "3"}', b"body")
            assert LOCATION.unpack_from(rest) == (answer.offset, answer.raw_size)
            assert message.attempts == attempts
            waiting.send(req(message.id, 0 if attempts == 1 else 30))


@pytest.mark.parametrize("command", ["PUB_EXT", "MPUB_EXT"])
def test_headers_for_a_topic_without(nsqd: Nsqd, connection: Connection, topic: str, command: str):
    for name in (create(nsqd, topic, 1), f"{topic}-plain"):
        if name != topic:
            connection.ok(pub(name, b"x"))
        error = refused_but_open(connection, COMMANDS[command](name, 0))
        what = "has no headers: create it with extend=true, or upgrade it with upgradeext=true"
        assert error == f"E_EXT_NOT_SUPPORT {command} topic {name} {what}"


@pytest.mark.parametrize(
    "headers", [b"{", b"x", b"[1]", b'"text"', b"1", b"null", b"{'k':'v'}", b'{"k":"\xff"}', b"{}x"]
)
def test_headers_that_are_no_json_object(connection: Connection, headered: str, headers: bytes):
    for command in (
        one("PUB_EXT", headered, 0, headed(headers, b"x")),
        several("MPUB_EXT", headered, 0, [headed({}, b"x"), headed(headers, b"x")]),
    ):
        assert refused_but_open(connection, command).startswith("E_INVALID_JSON_HEADER ")


def test_headers_nested_too_deep(connection: Connection, headered: str):
    nested = b'{"k":' + b"[" * 30_000 + b"]" * 30_000 + b"}"
    error = refused_but_open(connection, one("PUB_EXT", headered, 0, headed(nested, b"x")))
    assert error == "E_INVALID_JSON_HEADER PUB_EXT headers are beyond a limit: nested deeper than 64"


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        (b'{"k":' + b"[" * 64 + b"]" * 64 + b"}", "nested deeper than 64"),
        (b'{"k":' + b'[{"k":' * 32 + b"1" + b"}]" * 32 + b"}", "nested deeper than 64"),
        (b'{"k":1e999}', "a number out of range: integers of at most 4300 digits, others up to 1.79e308"),
        (
            b'{"k":1' + b"0" * 4300 + b"}",
            "a number out of range: integers of at most 4300 digits, others up to 1.79e308",
        ),
        (b'{"k":"\\ud800"}', "half of a surrogate pair in a text"),
        (b'{"\\\\\\udc00":1}', "half of a surrogate pair in a text"),
    ],
)
def test_headers_beyond_a_limit(connection: Connection, headered: str, headers: bytes, why: str):
    for name, command in (
        ("PUB_EXT", one("PUB_EXT", headered, 0, headed(headers, b"x"))),
        ("MPUB_EXT", several("MPUB_EXT", headered, 0, [headed({}, b"x"), headed(headers, b"x")])),
    ):
        error = refused_but_open(connection, command)
        assert error == f"E_INVALID_JSON_HEADER {name} headers are beyond a limit: {why}"


def test_what_is_taken_can_be_read_by_whoever_looks(nsqd: Nsqd, connection: Connection, headered: str):
    """The deepest headers that there are reach a filter and a tag, and are kept with the dead letters."""
    deep = b'{"city":"berlin","##client_dispatch_tag":"x","k":' + b"[" * 63 + b"]" * 63 + b"}"
    for channel in ("filtered", "tagged", "given-up"):
        nsqd.post(f"/channel/create?topic={headered}&channel={channel}")
    connection.ok(one("PUB_EXT", headered, 0, headed(deep, b"body")))
    wanted = {"type": 1, "filter_ext_key": "city", "filter_data": "berlin"}
    with consumer(nsqd, headered, "filtered", extend_support=True, ext_filter=wanted) as waiting:
        assert extended(waiting.message().body) == (4, deep, b"body")
    with consumer(nsqd, headered, "tagged", extend_support=True, desired_tag="x") as waiting:
        assert extended(waiting.message().body) == (4, deep, b"body")
    nsqd.post(f"/topic/settings?topic={headered}", b'{"max_attempts":1}')
    with consumer(nsqd, headered, "given-up", extend_support=True) as waiting:
        waiting.send(req(waiting.message().id, 0))
        waiting.settle()
        with consumer(nsqd, f"{headered}.dead", extend_support=True) as dead:
            found = json.loads(extended(dead.message().body).headers)
    assert found["##dead_letter_reason"] == "max_attempts"
    assert (found["city"], found["k"]) == ("berlin", json.loads(deep)["k"])


@pytest.mark.parametrize(
    "value", [5, "", "x", "-1", "+1", "1.0", " 1", "1_0", "0x10", "18446744073709551616", "٣", None, []]
)
def test_a_trace_id_that_is_none(connection: Connection, headered: str, value: object):
    body = headed({"##trace_id": value}, b"x")
    for command in (one("PUB_EXT", headered, 0, body), several("MPUB_EXT", headered, 0, [headed({}, b"x"), body])):
        assert refused_but_open(connection, command).startswith("INVALID_TRACE_ID ")


def test_of_a_refused_mpub_ext_nothing_is_stored(nsqd: Nsqd, connection: Connection, headered: str):
    refused_but_open(connection, several("MPUB_EXT", headered, 0, [headed({}, b"x"), headed(b"x", b"x")]))
    assert nsqd.stats(headered)["message_count"] == 0


# -- what any of them may be told --------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_a_partition_that_is_not_here_is_fatal(nsqd: Nsqd, headered: str, command: str):
    expected = f"E_TOPIC_NOT_EXIST {command} topic {headered} partition 2 is not on this nsqd"
    assert fatal(nsqd, COMMANDS[command](headered, 2)) == expected


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("partition", [None, 0])
def test_an_unknown_topic_is_fatal_and_not_created(nsqd: Nsqd, topic: str, command: str, partition: int | None):
    assert fatal(nsqd, COMMANDS[command](topic, partition)).startswith("E_TOPIC_NOT_EXIST ")
    assert topic not in topics(nsqd)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_partition_that_is_no_number_is_fatal(nsqd: Nsqd, headered: str, command: str):
    assert fatal(nsqd, COMMANDS[command](headered, "x")) == f"E_BAD_PARTITION {command} partition is not a number"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_topic_that_wants_a_partition(nsqd: Nsqd, topic: str, command: str):
    create(nsqd, topic, 2, extend="true", orderedmulti="true")
    assert fatal(nsqd, COMMANDS[command](topic, None)).startswith("E_BAD_PARTITION ")
    assert fatal(nsqd, COMMANDS[command](topic, -1)).startswith("E_BAD_PARTITION ")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_multipart_topic_takes_them_without_a_partition_or_with_minus_1(
    nsqd: Nsqd, connection: Connection, topic: str, command: str
):
    create(nsqd, topic, 2, extend="true", multipart="true")
    for partition in (None, -1, None):
        connection.send(COMMANDS[command](topic, partition))
        assert connection.response().startswith(b"OK")
    rows = nsqd.stats(topic)["partitions"]
    assert (rows[0]["message_count"] >= 3, rows[1]["message_count"]) == (True, 0)


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_partition_they_go_round(nsqd: Nsqd, connection: Connection, headered: str, command: str):
    for _ in range(4):
        connection.send(COMMANDS[command](headered, None))
        assert connection.response().startswith(b"OK")
    assert [row["message_count"] for row in nsqd.stats(headered)["partitions"]] == [2, 2]


@pytest.mark.parametrize("command", COMMANDS)
def test_bad_names_and_missing_words(nsqd: Nsqd, command: str):
    assert fatal(nsqd, COMMANDS[command]("a b", 0)).startswith("E_")
    assert fatal(nsqd, COMMANDS[command]("b!d", 0)) == f'E_BAD_TOPIC {command} topic name "b!d" is not valid'
    assert fatal(nsqd, f"{command}\n".encode()) == f"E_INVALID {command} insufficient number of parameters"


@pytest.mark.parametrize(
    ("command", "body"),
    [
        ("PUB_TRACE", b""),
        ("PUB_TRACE", traced(1, b"")),
        ("PUB_EXT", b""),
        ("PUB_EXT", b"\0\0"),
        ("PUB_EXT", headed({"k": "v"}, b"")),
        ("MPUB_TRACE", traced(1, b"")),
        ("MPUB_TRACE", b"x"),
        ("MPUB_EXT", b"x"),
        ("MPUB_EXT", b"\0\0"),
        ("MPUB_EXT", headed({"k": "v"}, b"")),
    ],
)
def test_a_body_without_a_message_is_fatal(nsqd: Nsqd, headered: str, command: str, body: bytes):
    make = one(command, headered, 0, body) if command[0] == "P" else several(command, headered, 0, [body])
    assert fatal(nsqd, make).startswith(f"E_BAD_BODY {command} ")


@pytest.mark.parametrize("command", ["PUB_EXT", "MPUB_EXT"])
def test_headers_longer_than_the_body_are_fatal(nsqd: Nsqd, headered: str, command: str):
    body = b"\xff\xffxyz"
    make = one(command, headered, 0, body) if command[0] == "P" else several(command, headered, 0, [body])
    assert fatal(nsqd, make) == f"E_BAD_EXT {command} headers of 65535 bytes in a body of 5"


def test_the_limit_counts_the_message_alone(nsqd: Nsqd, connection: Connection, headered: str):
    largest, headers = b"x" * MAX_MSG_SIZE, {"k": "v" * 65_000}
    for command in (
        one("PUB_TRACE", headered, 0, traced(1, largest)),
        one("PUB_EXT", headered, 0, headed(headers, largest)),
        several("MPUB_TRACE", headered, 0, [traced(1, largest)]),
        several("MPUB_EXT", headered, 0, [headed(headers, largest), headed(headers, b"x")]),
    ):
        connection.send(command)
        assert connection.response()[:2] == b"OK"
    with consumer(nsqd, headered, rdy_count=9, extend_support=True) as waiting:
        sizes = [len(extended(each.body).body) for each in waiting.messages(5)]
    assert sizes == [MAX_MSG_SIZE] * 4 + [1]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_larger_message_is_fatal(nsqd: Nsqd, headered: str, command: str):
    front = (1).to_bytes(8, "big") if command.endswith("TRACE") else headed({"k": "v"}, b"")
    body = front + b"x" * (MAX_MSG_SIZE + 1)
    make = one(command, headered, 0, body) if command[0] == "P" else several(command, headered, 0, [body])
    assert fatal(nsqd, make).endswith(f"message too big {MAX_MSG_SIZE + 1} > {MAX_MSG_SIZE}")


@pytest.mark.parametrize("size", [-1, 0, 2**31 - 1, MAX_MSG_SIZE + 2 + 65_535 + 1])
@pytest.mark.parametrize("command", ["PUB_TRACE", "PUB_EXT"])
def test_a_size_is_refused_before_it_is_gathered(nsqd: Nsqd, headered: str, command: str, size: int):
    line = f"{command} {headered} 0\n".encode() + size.to_bytes(4, "big", signed=True)
    assert fatal(nsqd, line).startswith("E_BAD_BODY " if size <= 0 else "E_BAD_MESSAGE ")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_stream_that_ends_within(nsqd: Nsqd, headered: str, command: str):
    whole = COMMANDS[command](headered, 0)
    for end in (len(whole) - 1, whole.index(b"\n") + 3):
        (frame,) = after_eof(nsqd, whole[:end])
        assert frame.kind == ERROR
        assert frame.data.startswith((b"E_BAD_BODY ", b"E_BAD_MESSAGE "))
    assert nsqd.stats(headered)["message_count"] == 0


def test_byte_by_byte(connection: Connection, headered: str):
    data = b"".join(COMMANDS[command](headered, 0) for command in COMMANDS)
    connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for at in range(len(data)):
        connection.send(data[at : at + 1])
    assert [len(connection.response()) for _ in COMMANDS] == [30, 2, 30, 2]


def test_one_burst_of_everything(nsqd: Nsqd, connection: Connection, headered: str):
    """Answers keep the order of their commands, also those of refused ones, and messages that of their publishes."""
    bad = one("PUB_EXT", headered, 0, headed(b"x", b"bad"))
    burst = [
        (pub_to(headered, 0, b"a"), 2),
        (one("PUB_TRACE", headered, 0, traced(1, b"b")), 30),
        (one("PUB_TRACE", headered, 0, traced(2, b"c")), 30),
        (one("PUB_EXT", headered, 0, headed({"k": "v"}, b"d")), 2),
        (bad, 0),
        (one("PUB_EXT", headered, 0, headed({"##trace_id": "3"}, b"e")), 30),
        (one("PUB_EXT", headered, 0, headed({"k": "v"}, b"f")), 2),
        (mpub_to(headered, 0, [b"g", b"h"]), 2),
        (several("MPUB_EXT", headered, 0, [headed({"##trace_id": "4"}, b"i")]), 2),
        (several("MPUB_TRACE", headered, 0, [traced(5, b"j"), traced(6, b"k")]), 30),
        (bad, 0),
        (pub_to(headered, 0, b"l"), 2),
    ]
    connection.send(b"".join(command for command, _ in burst) * 20)
    seen: list[Stored] = []
    for _ in range(20):
        for _, size in burst:
            kind, data = connection.frame()
            assert (kind, len(data)) == (RESPONSE, size) if size else kind == ERROR, (kind, data)
            if size == 30:
                seen.append(stored(data))
    assert [each.trace_id for each in seen] == [1, 2, 3, 0] * 20
    assert [each.sequence for each in seen[:4]] == [2, 3, 5, 10]
    assert seen == sorted(seen, key=lambda each: (each.sequence, each.offset))
    with consumer(nsqd, headered, rdy_count=2500, extend_support=True) as waiting:
        found = waiting.messages(12 * 20)
    assert [extended(each.body).body for each in found] == [bytes([each]) for each in b"abcdefghijkl"] * 20
    assert [placed(each).trace_id for each in found] == [0, 1, 2, 0, 3, 0, 0, 0, 4, 5, 6, 0] * 20
    by_sequence = {placed(each).sequence: placed(each) for each in found}
    assert all(by_sequence[each.sequence].trace_id == each.trace_id for each in seen if each.trace_id)


def test_every_refused_publish_of_a_burst_is_answered(connection: Connection, parted: str):
    connection.send(COMMANDS["PUB_EXT"](parted, 0) * 10 + COMMANDS["PUB_TRACE"](parted, 0))
    for _ in range(10):
        assert connection.error().startswith("E_EXT_NOT_SUPPORT ")
    assert stored(connection.response()).sequence == 1


# -- who may subscribe -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["SUB", "SUB_ORDER"])
def test_headers_have_to_be_known(nsqd: Nsqd, headered: str, command: str):
    error = fatal(nsqd, sub_to(headered, "c", 0, command))
    assert error.startswith(f"E_SUB_EXTEND_NEED {command} topic {headered}: ")
    assert fatal(nsqd, f"SUB {headered} c\n".encode()).startswith("E_SUB_EXTEND_NEED ")


@pytest.mark.parametrize("command", ["SUB", "SUB_ORDER"])
def test_headers_that_there_are_not(nsqd: Nsqd, knowing: Connection, parted: str, command: str):
    error = knowing.error(sub_to(parted, "c", 0, command))
    assert error.startswith(f"E_SUB_EXTEND_FORBIDDON {command} topic {parted}: ")
    assert knowing.wait_closed() == []


def test_headers_that_a_plain_topic_has_not(nsqd: Nsqd, knowing: Connection, topic: str):
    nsqd.post(f"/topic/create?topic={topic}")
    assert knowing.error(f"SUB {topic} c\n".encode()).startswith("E_SUB_EXTEND_FORBIDDON ")
    assert nsqd.stats(topic)["channels"] == []


def test_a_topic_begins_as_its_first_consumer_knows_it(nsqd: Nsqd, knowing: Connection, topic: str):
    """So that who waits for dead letters, which have headers, may be there before the first of them."""
    knowing.ok(f"SUB {topic} c\n".encode())
    assert nsqd.stats(topic)["extend_support"] is True
    with nsqd.connect() as plain:
        plain.subscribe(f"{topic}2", "c", 1)
    assert "extend_support" not in nsqd.stats(f"{topic}2")


def test_headers_of_two_partitions_at_once(nsqd: Nsqd, connection: Connection, headered: str):
    for partition in (0, 1):
        connection.ok(one("PUB_EXT", headered, partition, headed({"p": str(partition)}, b"x")))
    with consumer(nsqd, headered, rdy_count=9, extend_support=True) as waiting:
        found = sorted(extended(each.body).headers for each in waiting.messages(2))
    assert found == [b'{"p": "0"}', b'{"p": "1"}']


@pytest.mark.parametrize("tag", ["", "a", "A-z_09", "x" * 100])
def test_a_desired_tag_is_said_again(connection: Connection, tag: str):
    answer = connection.identify(extend_support=True, desired_tag=tag)
    assert answer.get("desired_tag") == (tag or None)


@pytest.mark.parametrize("tag", ["x" * 101, "a b", "ü", "a\n"])
def test_a_desired_tag_that_is_none(nsqd: Nsqd, tag: str):
    body = json.dumps({"feature_negotiation": True, "desired_tag": tag}).encode()
    assert fatal(nsqd, b"IDENTIFY\n" + sized(body)).startswith("E_BAD_BODY IDENTIFY desired tag ")


@pytest.mark.parametrize("fields", [{}, {"extend_support": False}, {"extend_support": False, "desired_tag": ""}])
def test_whoever_asks_for_nothing_sees_plain_nsq(nsqd: Nsqd, connection: Connection, topic: str, fields: dict):
    answer = connection.identify(**fields)
    assert "desired_tag" not in answer and "extend_support" not in answer
    connection.ok(pub(topic, b"x"))
    assert connection.subscribe(topic, "c", 1).message().body == b"x"


# -- topics that get headers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partition_num", [0, 2])
def test_headers_from_then_on(nsqd: Nsqd, connection: Connection, knowing: Connection, topic: str, partition_num: int):
    """One way, once; an old body stays what it is, even one that would be headers and a body."""
    update = f"/topic/meta/update?topic={topic}&upgradeext"
    old = b"\x02\x00\x01bdy"
    nsqd.post(f"/topic/create?topic={topic}{f'&partition_num={partition_num}' if partition_num else ''}")
    nsqd.post(f"/channel/create?topic={topic}&channel=c")
    connection.ok(pub_to(topic, 0, old) if partition_num else pub(topic, old))
    assert refused_but_open(connection, COMMANDS["PUB_EXT"](topic, 0)).startswith("E_EXT_NOT_SUPPORT ")
    for value in ("false", "true", "true", "false"):
        nsqd.post(f"{update}={value}")
    row = nsqd.stats(topic)
    assert (row["extend_support"], row["meta_version"]) == (True, 1)
    connection.ok(one("PUB_EXT", topic, 0, headed({"k": "v"}, b"new")))
    connection.ok(pub_to(topic, 0, b"bare") if partition_num else pub(topic, b"bare"))
    found = [extended(each.body) for each in knowing.subscribe(topic, "c", 9).messages(3)]
    assert found == [(0, b"", old), (4, b'{"k": "v"}', b"new"), (0, b"", b"bare")]


# -- plain topics with headers -----------------------------------------------------------------------------------------


def test_a_plain_topic_with_headers(nsqd: Nsqd, connection: Connection, plain: str):
    """Who knows headers gets them, who does not gets the bodies alone; ids are text for both."""
    connection.ok(one("PUB_EXT", plain, None, headed({"k": "v"}, b"a")) + pub(plain, b"b"), count=2)
    connection.ok(several("MPUB_EXT", plain, 0, [headed({"k": "v"}, b"c")]) + mpub(plain, [b"d"]), count=2)
    assert nsqd.stats(plain)["extend_support"] is True
    with consumer(nsqd, plain, "knows", rdy_count=9, extend_support=True) as waiting:
        found = waiting.messages(4)
        assert [extended(each.body) for each in found] == [
            (4, b'{"k": "v"}', b"a"),
            (0, b"", b"b"),
            (4, b'{"k": "v"}', b"c"),
            (0, b"", b"d"),
        ]
    connection.ok(one("PUB_EXT", plain, None, headed({"k": "v"}, b"e")) + pub(plain, b"f"), count=2)
    with consumer(nsqd, plain, "knows", rdy_count=9) as waiting:
        again = waiting.messages(6)
        assert sorted(each.body for each in again) == [b"a", b"b", b"c", b"d", b"e", b"f"]
        assert all(each.attempts == (2 if each.body in b"abcd" else 1) for each in again)
        assert all(set(each.id) <= set(b"0123456789abcdef") for each in again)
        waiting.finish(*again)
        wait_until(lambda: nsqd.unfinished(plain, "knows") == 0)


def test_bodies_alone_when_they_come_again(nsqd: Nsqd, connection: Connection, plain: str):
    connection.ok(one("PUB_EXT", plain, None, headed({"k": "v"}, b"body")))
    with consumer(nsqd, plain) as waiting:
        for delay_ms in (0, 30):
            message = waiting.message()
            assert message.body == b"body"
            waiting.send(req(message.id, delay_ms))
        assert waiting.message().body == b"body"
    for known in (False, True):
        with nsqd.connect() as ordered:
            ordered.identify(extend_support=known)
            ordered.ok(sub_to(plain, "c", 0, "SUB_ORDER"))
            ordered.rdy(1)
            body = ordered.message().body
            rest = extended(body).body if known else body
            assert LOCATION.unpack_from(rest) == (0, RAW_SIZE + 3 + len('{"k": "v"}') + 4)
            assert rest[LOCATION.size :] == b"body"


def test_a_trace_id_of_a_plain_topic_stays_in_the_headers(nsqd: Nsqd, connection: Connection, plain: str):
    connection.send(one("PUB_EXT", plain, None, headed({"##trace_id": "5"}, b"x")))
    assert stored(connection.response())[:4] == (0, 1, 5, 0)
    with consumer(nsqd, plain, extend_support=True) as waiting:
        message = waiting.message()
    assert message.id == b"0000000000000001"
    assert extended(message.body).headers == b'{"##trace_id": "5"}'


def test_creating_it_again(nsqd: Nsqd, plain: str, topic: str):
    nsqd.post(f"/topic/create?topic={plain}&extend=true")
    nsqd.post(f"/topic/create?topic={plain}")
    nsqd.publish(f"{topic}-plain", b"x")
    for name, what in ((f"{topic}-plain", "without headers"), (create(nsqd, f"{topic}-parted", 1), "with partitions")):
        answer = nsqd.request("POST", f"/topic/create?topic={name}&extend=true", b"")
        assert answer.error == (400, f"topic {name} is there already, {what}: delete it first, or take another name")


def test_an_ephemeral_topic_with_headers(nsqd: Nsqd, connection: Connection, topic: str):
    nsqd.post(f"/topic/create?topic={topic}%23ephemeral&extend=true")
    name = f"{topic}#ephemeral"
    with consumer(nsqd, name, extend_support=True) as waiting:
        connection.ok(one("PUB_EXT", name, None, headed({"k": "v"}, b"x")))
        assert extended(waiting.message().body) == (4, b'{"k": "v"}', b"x")


# -- kill -9 -----------------------------------------------------------------------------------------------------------


def test_kill_keeps_trace_ids_and_headers(daemons: Daemons):
    nsqd = daemons.nsqd()
    for name, parameters in (("parted", "&partition_num=1&extend=true"), ("plain", "&extend=true")):
        nsqd.post(f"/topic/create?topic={name}{parameters}")
        nsqd.post(f"/channel/create?topic={name}&channel=c")
    with nsqd.connect() as connection:
        connection.send(one("PUB_TRACE", "parted", 0, traced(1, b"a")))
        connection.send(one("PUB_EXT", "parted", 0, headed({"##trace_id": "2"}, b"b")))
        answers = [stored(connection.response()) for _ in range(2)]
        connection.ok(one("PUB_EXT", "plain", None, headed({"k": "v"}, b"c")))
    with consumer(nsqd, "plain") as waiting:
        waiting.send(req(waiting.message().id, 500))
        waiting.settle()
    nsqd.kill()
    nsqd.start()
    with consumer(nsqd, "parted", rdy_count=9, extend_support=True) as waiting:
        found = waiting.messages(2)
    assert [(placed(each).sequence, placed(each).trace_id) for each in found] == [
        (each.sequence, each.trace_id) for each in answers
    ]
    assert [extended(each.body) for each in found] == [(0, b"", b"a"), (4, b'{"##trace_id": "2"}', b"b")]
    with consumer(nsqd, "plain", extend_support=True) as waiting:
        assert extended(waiting.message().body) == (4, b'{"k": "v"}', b"c")
    with nsqd.connect() as connection:
        connection.send(one("PUB_TRACE", "parted", 0, traced(3, b"d")))
        again = stored(connection.response())
    assert again.offset == answers[1].offset + answers[1].raw_size
