"""POST /pub and /mpub of nsqd, row by row (NSQ's HTTP API)."""

from __future__ import annotations

import gzip
import struct
import time

import pytest
from tests.conformance.conftest import is_ours, quick_flags
from tests.conformance.http_helpers import (
    RawHttp,
    assert_refused,
    assert_text,
    bodies_of,
    chunked,
    drain,
    exchange,
    topic_names,
)
from tests.integration.daemons import Daemons, Nsqd, mpub_body

MAX_MSG, MAX_BODY = 100, 1000
MAX_DEFER_MS = 3_600_000
COUNT_MAX = (MAX_BODY - 4) // 5


@pytest.fixture(scope="module")
def small(shared_daemons: Daemons) -> Nsqd:
    """An nsqd with small limits."""
    flags = (f"--max-msg-size={MAX_MSG}", f"--max-body-size={MAX_BODY}", "--max-req-timeout=2s")
    return shared_daemons.nsqd(*quick_flags(), *flags)


def pub(nsqd: Nsqd, query: str, body: bytes = b"x"):
    return nsqd.request("POST", f"/pub?{query}", body)


def mpub(nsqd: Nsqd, query: str, body: bytes = b"x"):
    return nsqd.request("POST", f"/mpub?{query}", body)


# -- /pub --------------------------------------------------------------------------------------------------------------


def test_pub_answers_ok(nsqd: Nsqd, topic: str):
    assert_text(pub(nsqd, f"topic={topic}"), "OK")


def test_pub_creates_the_topic(nsqd: Nsqd, topic: str):
    pub(nsqd, f"topic={topic}")
    assert nsqd.stats(topic)["message_count"] == 1


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"x", id="one byte"),
        pytest.param(b"\n", id="newline"),
        pytest.param(b"a\nb\n", id="lines stay together"),
        pytest.param(b"\0\xff\r\n", id="any byte"),
        pytest.param("zwölf".encode(), id="utf-8"),
        pytest.param(bytes(range(256)) * 300, id="76800 bytes"),
    ],
)
def test_pub_takes_the_body_as_it_is(nsqd: Nsqd, topic: str, body: bytes):
    pub(nsqd, f"topic={topic}", body)
    assert bodies_of(nsqd, topic, 1) == [body]


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_pub_does_not_parse_forms(nsqd: Nsqd, topic: str, content_type: str):
    nsqd.request("POST", f"/pub?topic={topic}", b"topic=other&a=%zz", {"Content-Type": content_type})
    assert bodies_of(nsqd, topic, 1) == [b"topic=other&a=%zz"]


@pytest.mark.parametrize("encoding", ["gzip", "identity", "deflate, br"])
def test_nothing_decodes_a_body(nsqd: Nsqd, topic: str, encoding: str):
    body = gzip.compress(b"hello") if encoding == "gzip" else b"hello"
    headers = {"Content-Encoding": encoding}
    assert_text(nsqd.request("POST", f"/pub?topic={topic}", body, headers), "OK")
    assert_text(nsqd.request("POST", f"/mpub?topic={topic}&binary=true", mpub_body([body, body]), headers), "OK")
    assert bodies_of(nsqd, topic, 3) == [body] * 3


def test_pub_makes_a_message_like_any_other(nsqd: Nsqd, topic: str):
    pub(nsqd, f"topic={topic}")
    (message,) = drain(nsqd, topic, 1)
    assert message.attempts == 1
    assert abs(message.timestamp_ns / 1e9 - time.time()) < 30


def test_pub_keeps_the_order_of_one_connection(nsqd: Nsqd, topic: str):
    for number in range(5):
        pub(nsqd, f"topic={topic}", b"%d" % number)
    assert bodies_of(nsqd, topic, 5) == [b"0", b"1", b"2", b"3", b"4"]


def test_pub_counts_bytes_of_bodies(nsqd: Nsqd, topic: str):
    pub(nsqd, f"topic={topic}", b"12345")
    pub(nsqd, f"topic={topic}", b"678")
    row = nsqd.stats(topic)
    assert (row["message_count"], row["message_bytes"], row["depth"]) == (2, 8, 2)


# names


@pytest.mark.parametrize(
    "name",
    ["a", "A.b_c-9", ".", "-", "_", "0", "n" * 64, "x%23ephemeral", "n" * 54 + "%23ephemeral"],
)
def test_pub_takes_a_valid_topic(nsqd: Nsqd, name: str):
    assert_text(pub(nsqd, f"topic={name}"), "OK")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "n" * 65,
        "n" * 55 + "%23ephemeral",
        "%23ephemeral",
        "x%23other",
        "x%23ephemeral%23ephemeral",
        "x%23ephemeralx",
        "a%20b",
        "a/b",
        "a:b",
        "a!",
        "a%0A",
        "%00",
        "%C3%A4",
        "%FF",
    ],
)
def test_pub_refuses_an_invalid_topic(nsqd: Nsqd, name: str):
    assert_refused(pub(nsqd, f"topic={name}"), 400, "INVALID_TOPIC")


# sizes


def test_pub_takes_a_body_of_max_msg_size(small: Nsqd, topic: str):
    assert_text(pub(small, f"topic={topic}", b"x" * MAX_MSG), "OK")


def test_pub_refuses_one_byte_more(small: Nsqd, topic: str):
    assert_refused(pub(small, f"topic={topic}", b"x" * (MAX_MSG + 1)), 413, "MSG_TOO_BIG")


def test_pub_takes_a_chunked_body_of_max_msg_size(small: Nsqd, topic: str):
    assert_text(exchange(small, chunked(f"/pub?topic={topic}", b"x" * 60, b"x" * 40)), "OK")


def test_pub_refuses_a_chunked_body_of_one_byte_more(small: Nsqd, topic: str):
    assert_refused(exchange(small, chunked(f"/pub?topic={topic}", b"x" * 60, b"x" * 41)), 413, "MSG_TOO_BIG")


def test_pub_refuses_what_is_too_big_before_its_body_came(small: Nsqd, topic: str):
    head = f"POST /pub?topic={topic} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {1 << 40}\r\n\r\n"
    assert_refused(exchange(small, head.encode()), 413, "MSG_TOO_BIG")


def test_max_msg_size_is_1_mib_by_default(nsqd: Nsqd, topic: str):
    assert_text(pub(nsqd, f"topic={topic}", b"x" * 1048576), "OK")
    assert_refused(pub(nsqd, f"topic={topic}", b"x" * 1048577), 413, "MSG_TOO_BIG")


@pytest.mark.parametrize("size", [0, MAX_MSG + 1])
def test_pub_of_a_refused_body_creates_no_topic(small: Nsqd, topic: str, size: int):
    assert pub(small, f"topic={topic}", b"x" * size).status in (400, 413)
    assert topic not in topic_names(small)


# errors and their order


@pytest.mark.parametrize(
    ("query", "size", "status", "text"),
    [
        pytest.param("topic=%zz", MAX_MSG + 1, 413, "MSG_TOO_BIG", id="MSG_TOO_BIG before INVALID_REQUEST"),
        pytest.param("", MAX_MSG + 1, 413, "MSG_TOO_BIG", id="MSG_TOO_BIG before MISSING_ARG_TOPIC"),
        pytest.param("topic=no!", MAX_MSG + 1, 413, "MSG_TOO_BIG", id="MSG_TOO_BIG before INVALID_TOPIC"),
        pytest.param("topic=%zz", 0, 400, "MSG_EMPTY", id="MSG_EMPTY before INVALID_REQUEST"),
        pytest.param("", 0, 400, "MSG_EMPTY", id="MSG_EMPTY before MISSING_ARG_TOPIC"),
        pytest.param("topic=t", 0, 400, "MSG_EMPTY", id="MSG_EMPTY"),
        pytest.param("x=%zz", 1, 400, "INVALID_REQUEST", id="INVALID_REQUEST before MISSING_ARG_TOPIC"),
        pytest.param("topic=no!&x=%zz", 1, 400, "INVALID_REQUEST", id="INVALID_REQUEST before INVALID_TOPIC"),
        pytest.param("", 1, 400, "MISSING_ARG_TOPIC", id="MISSING_ARG_TOPIC"),
        pytest.param("defer=x", 1, 400, "MISSING_ARG_TOPIC", id="MISSING_ARG_TOPIC before INVALID_DEFER"),
        pytest.param("topic=no!&defer=x", 1, 400, "INVALID_TOPIC", id="INVALID_TOPIC before INVALID_DEFER"),
        pytest.param("topic=t&defer=x", 1, 400, "INVALID_DEFER", id="INVALID_DEFER"),
    ],
)
def test_pub_checks_in_this_order(small: Nsqd, query: str, size: int, status: int, text: str):
    assert_refused(pub(small, query, b"x" * size), status, text)


# defer


@pytest.mark.parametrize("defer", ["0", "1", "3600000", "007", "%2B5", "-0"])
def test_defer_may_be(nsqd: Nsqd, topic: str, defer: str):
    assert_text(pub(nsqd, f"topic={topic}&defer={defer}"), "OK")


@pytest.mark.parametrize(
    "defer",
    [
        "",
        "-1",
        "3600001",
        "1.0",
        "1e3",
        "soon",
        "%201",
        "1%20",
        "0x10",
        "1s",
        "9223372036854775808",
        "9" * 30,
        "%D9%A1",
    ],
)
def test_defer_may_not_be(nsqd: Nsqd, topic: str, defer: str):
    assert_refused(pub(nsqd, f"topic={topic}&defer={defer}"), 400, "INVALID_DEFER")


def test_the_limit_of_defer_is_max_req_timeout(small: Nsqd, topic: str):
    assert_text(pub(small, f"topic={topic}&defer=2000"), "OK")
    assert_refused(pub(small, f"topic={topic}&defer=2001"), 400, "INVALID_DEFER")


def test_the_first_defer_wins(nsqd: Nsqd, topic: str):
    assert_refused(pub(nsqd, f"topic={topic}&defer=x&defer=1"), 400, "INVALID_DEFER")


def test_defer_0_is_delivered_at_once(nsqd: Nsqd, topic: str):
    pub(nsqd, f"topic={topic}&defer=0", b"now")
    assert bodies_of(nsqd, topic, 1) == [b"now"]


def test_defer_delays_every_channel_and_nothing_else(nsqd: Nsqd, topic: str):
    with nsqd.connect() as one, nsqd.connect() as two:
        one.subscribe(topic, "one", 2)
        two.subscribe(topic, "two", 2)
        begun = time.monotonic()
        pub(nsqd, f"topic={topic}&defer=300", b"later")
        pub(nsqd, f"topic={topic}&defer=60000", b"much later")
        pub(nsqd, f"topic={topic}", b"now")
        for consumer in (one, two):
            assert consumer.message().body == b"now"
        for consumer in (one, two):
            assert consumer.message().body == b"later"
        assert time.monotonic() - begun >= 0.3
        assert nsqd.stats(topic, "one")["deferred_count"] == 1


@pytest.mark.improvement
def test_a_deferral_survives_a_restart(daemons: Daemons):
    """Upstream forgets the delay: the message is delivered at once after the restart (nsqio/nsq#1375)."""
    nsqd = daemons.nsqd(*quick_flags())
    nsqd.post("/topic/create?topic=t")
    nsqd.post("/channel/create?topic=t&channel=c")
    pub(nsqd, "topic=t&defer=60000", b"later")
    nsqd.restart()
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 1)
        consumer.nothing_comes()
        assert nsqd.stats("t", "c")["deferred_count"] == 1


# -- /mpub, text -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(b"one", [b"one"], id="no newline"),
        pytest.param(b"one\n", [b"one"], id="newline at the end"),
        pytest.param(b"one\ntwo", [b"one", b"two"], id="two lines"),
        pytest.param(b"one\ntwo\n", [b"one", b"two"], id="two lines and newline"),
        pytest.param(b"\n\none\n\n\ntwo\n\n", [b"one", b"two"], id="empty lines are dropped"),
        pytest.param(b"one\r\ntwo\r\n", [b"one\r", b"two\r"], id="carriage returns stay"),
        pytest.param(b" \n\t", [b" ", b"\t"], id="blank lines are not empty"),
        pytest.param(b"a\0b\xff\nc", [b"a\0b\xff", b"c"], id="any byte"),
        pytest.param(b"", [], id="empty body"),
        pytest.param(b"\n", [], id="one newline"),
        pytest.param(b"\n\n\n", [], id="only newlines"),
    ],
)
def test_mpub_splits_text_at_newlines(nsqd: Nsqd, topic: str, body: bytes, expected: list[bytes]):
    assert_text(mpub(nsqd, f"topic={topic}", body), "OK")
    assert bodies_of(nsqd, topic, len(expected)) == expected


def test_mpub_keeps_the_order_of_lines(nsqd: Nsqd, topic: str):
    lines = [b"%d" % number for number in range(500)]
    mpub(nsqd, f"topic={topic}", b"\n".join(lines))
    assert bodies_of(nsqd, topic, 500) == lines


def test_mpub_counts_messages_and_bytes_of_bodies(nsqd: Nsqd, topic: str):
    mpub(nsqd, f"topic={topic}", b"123\n45\n")
    row = nsqd.stats(topic)
    assert (row["message_count"], row["message_bytes"]) == (2, 5)


def test_mpub_creates_the_topic_even_for_nothing(nsqd: Nsqd, topic: str):
    mpub(nsqd, f"topic={topic}", b"")
    assert nsqd.stats(topic)["message_count"] == 0


def test_mpub_takes_a_line_of_max_msg_size(small: Nsqd, topic: str):
    assert_text(mpub(small, f"topic={topic}", b"x" * MAX_MSG + b"\ny"), "OK")


def test_mpub_refuses_a_line_of_one_byte_more(small: Nsqd, topic: str):
    assert_refused(mpub(small, f"topic={topic}", b"y\n" + b"x" * (MAX_MSG + 1)), 413, "MSG_TOO_BIG")


def test_mpub_publishes_nothing_of_what_it_refuses(small: Nsqd, topic: str):
    mpub(small, f"topic={topic}", b"ok")
    mpub(small, f"topic={topic}", b"bad\n" + b"x" * (MAX_MSG + 1))
    assert bodies_of(small, topic, 1) == [b"ok"]


def test_mpub_takes_a_body_of_max_body_size(small: Nsqd, topic: str):
    assert_text(mpub(small, f"topic={topic}", (b"x" * 99 + b"\n") * 10), "OK")


def test_mpub_refuses_a_body_of_one_byte_more(small: Nsqd, topic: str):
    assert_refused(mpub(small, f"topic={topic}", (b"x" * 99 + b"\n") * 10 + b"y"), 413, "BODY_TOO_BIG")


def test_mpub_takes_a_chunked_body_of_max_body_size(small: Nsqd, topic: str):
    assert_text(exchange(small, chunked(f"/mpub?topic={topic}", *[b"x" * 99 + b"\n"] * 10)), "OK")


def test_mpub_refuses_a_chunked_body_of_one_byte_more(small: Nsqd, topic: str):
    body = chunked(f"/mpub?topic={topic}", *[b"x" * 99 + b"\n"] * 10, b"y")
    assert_refused(exchange(small, body), 413, "BODY_TOO_BIG")


def test_max_body_size_is_5_mib_by_default(nsqd: Nsqd, topic: str):
    body = (b"x" * 1023 + b"\n") * 5120
    assert_text(mpub(nsqd, f"topic={topic}", body), "OK")
    assert nsqd.stats(topic)["message_count"] == 5120
    assert_refused(mpub(nsqd, f"topic={topic}", body + b"y"), 413, "BODY_TOO_BIG")


@pytest.mark.parametrize("defer", ["60000", "soon", "-1"])
def test_mpub_has_no_defer(nsqd: Nsqd, topic: str, defer: str):
    assert_text(mpub(nsqd, f"topic={topic}&defer={defer}", b"now"), "OK")
    assert bodies_of(nsqd, topic, 1) == [b"now"]


@pytest.mark.parametrize(
    ("query", "body", "status", "text"),
    [
        pytest.param("x=%zz", b"x" * 1001, 413, "BODY_TOO_BIG", id="BODY_TOO_BIG before INVALID_REQUEST"),
        pytest.param("", b"x" * 1001, 413, "BODY_TOO_BIG", id="BODY_TOO_BIG before MISSING_ARG_TOPIC"),
        pytest.param("x=%zz", b"x", 400, "INVALID_REQUEST", id="INVALID_REQUEST before MISSING_ARG_TOPIC"),
        pytest.param("", b"x", 400, "MISSING_ARG_TOPIC", id="MISSING_ARG_TOPIC"),
        pytest.param("", b"", 400, "MISSING_ARG_TOPIC", id="MISSING_ARG_TOPIC of an empty body"),
        pytest.param("", b"x" * 101, 400, "MISSING_ARG_TOPIC", id="MISSING_ARG_TOPIC before MSG_TOO_BIG"),
        pytest.param("topic=no!", b"x", 400, "INVALID_TOPIC", id="INVALID_TOPIC"),
        pytest.param("topic=", b"x", 400, "INVALID_TOPIC", id="INVALID_TOPIC of an empty name"),
        pytest.param("topic=no!", b"x" * 101, 400, "INVALID_TOPIC", id="INVALID_TOPIC before MSG_TOO_BIG"),
        pytest.param("topic=no!&binary=1", b"", 400, "INVALID_TOPIC", id="INVALID_TOPIC before BAD_BODY"),
    ],
)
def test_mpub_checks_in_this_order(small: Nsqd, query: str, body: bytes, status: int, text: str):
    assert_refused(mpub(small, query, body), status, text)


# -- /mpub, binary -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("binary", ["true", "1", "", "yes", "TRUE", "False", "2", "%20false"])
def test_mpub_is_binary_with(nsqd: Nsqd, topic: str, binary: str):
    assert_text(mpub(nsqd, f"topic={topic}&binary={binary}", mpub_body([b"one\ntwo", b"\n"])), "OK")
    assert bodies_of(nsqd, topic, 2) == [b"one\ntwo", b"\n"]


def test_mpub_is_binary_with_a_bare_parameter(nsqd: Nsqd, topic: str):
    assert_text(mpub(nsqd, f"topic={topic}&binary", mpub_body([b"one\ntwo"])), "OK")
    assert bodies_of(nsqd, topic, 1) == [b"one\ntwo"]


@pytest.mark.parametrize("binary", ["false", "0"])
def test_mpub_is_text_with(nsqd: Nsqd, topic: str, binary: str):
    assert_text(mpub(nsqd, f"topic={topic}&binary={binary}", b"one\ntwo"), "OK")
    assert bodies_of(nsqd, topic, 2) == [b"one", b"two"]


def test_the_first_binary_wins(nsqd: Nsqd, topic: str):
    assert_text(mpub(nsqd, f"topic={topic}&binary=false&binary=true", b"one\ntwo"), "OK")
    assert bodies_of(nsqd, topic, 2) == [b"one", b"two"]


def test_binary_takes_a_message_of_max_msg_size(small: Nsqd, topic: str):
    assert_text(mpub(small, f"topic={topic}&binary=true", mpub_body([b"x" * MAX_MSG])), "OK")


def test_binary_takes_a_body_of_max_body_size(small: Nsqd, topic: str):
    body = mpub_body([b"x" * 100] * 9 + [b"x" * 56])
    assert len(body) == MAX_BODY
    assert_text(mpub(small, f"topic={topic}&binary=true", body), "OK")
    assert small.stats(topic)["message_count"] == 10


def test_binary_refuses_a_body_of_one_byte_more(small: Nsqd, topic: str):
    body = mpub_body([b"x" * 100] * 9 + [b"x" * 57])
    assert_refused(mpub(small, f"topic={topic}&binary=true", body), 413, "BODY_TOO_BIG")


def test_binary_takes_as_many_messages_as_fit(small: Nsqd, topic: str):
    assert_text(mpub(small, f"topic={topic}&binary=true", mpub_body([b"x"] * COUNT_MAX)), "OK")
    assert small.stats(topic)["message_count"] == COUNT_MAX


def test_binary_takes_a_chunked_body(nsqd: Nsqd, topic: str):
    body = mpub_body([b"one", b"two"])
    assert_text(exchange(nsqd, chunked(f"/mpub?topic={topic}&binary=true", body[:3], body[3:9], body[9:])), "OK")
    assert bodies_of(nsqd, topic, 2) == [b"one", b"two"]


@pytest.mark.improvement
def test_binary_refuses_what_stands_behind_the_last_message(nsqd: Nsqd, topic: str):
    """Upstream publishes the counted messages and drops the rest without a word."""
    assert_refused(mpub(nsqd, f"topic={topic}&binary=true", mpub_body([b"one"]) + b"more"), 413, "BAD_BODY")


def message(size: int, body: bytes = b"") -> bytes:
    return struct.pack(">i", size) + body


@pytest.mark.parametrize(
    ("body", "text"),
    [
        pytest.param(b"", "BAD_BODY", id="no count"),
        pytest.param(b"\0\0\1", "BAD_BODY", id="half a count"),
        pytest.param(b"\0\0\0\0", "BAD_BODY", id="count 0"),
        pytest.param(b"\xff\xff\xff\xff", "BAD_BODY", id="count -1"),
        pytest.param(struct.pack(">i", COUNT_MAX + 1), "BAD_BODY", id="count above what fits"),
        pytest.param(b"\x7f\xff\xff\xff", "BAD_BODY", id="huge count"),
        pytest.param(b"plain text\n", "BAD_BODY", id="text"),
        pytest.param(b"\0\0\0\1", "BAD_MESSAGE", id="no message"),
        pytest.param(b"\0\0\0\1\0\0", "BAD_MESSAGE", id="half a size"),
        pytest.param(b"\0\0\0\1" + message(0), "BAD_MESSAGE", id="size 0"),
        pytest.param(b"\0\0\0\1" + message(-1), "BAD_MESSAGE", id="size -1"),
        pytest.param(b"\0\0\0\1" + message(5, b"1234"), "BAD_MESSAGE", id="half a message"),
        pytest.param(b"\0\0\0\2" + message(1, b"x"), "BAD_MESSAGE", id="fewer than counted"),
        pytest.param(mpub_body([b"x" * (MAX_MSG + 1)]), "BAD_MESSAGE", id="message above max-msg-size"),
        pytest.param(mpub_body([b"x", b""]), "BAD_MESSAGE", id="empty message"),
    ],
)
def test_binary_refuses_with_413(small: Nsqd, topic: str, body: bytes, text: str):
    assert_refused(mpub(small, f"topic={topic}&binary=true", body), 413, text)


def test_binary_publishes_nothing_of_what_it_refuses(small: Nsqd, topic: str):
    mpub(small, f"topic={topic}&binary=true", mpub_body([b"ok"]))
    mpub(small, f"topic={topic}&binary=true", mpub_body([b"one", b"two", b""]))
    assert bodies_of(small, topic, 1) == [b"ok"]


# -- limits of the daemon ----------------------------------------------------------------------------------------------


def test_ephemeral_topics_can_be_published_to(nsqd: Nsqd, topic: str):
    with nsqd.connect() as consumer:
        consumer.subscribe(f"{topic}#ephemeral", "c", 1)
        assert_text(pub(nsqd, f"topic={topic}%23ephemeral", b"hi"), "OK")
        assert consumer.message().body == b"hi"


@pytest.mark.skipif(not is_ours("nsqd"), reason="Go's runtime dies of the signal that makes writes fail here")
def test_a_failed_put_is_503_exiting_and_ping_says_why(daemons: Daemons):
    flags = (*quick_flags(), "--mem-queue-size=0", "--sync-every=1")
    nsqd = daemons.nsqd(*flags, limits=("prlimit", "--fsize=400000"))
    assert_text(pub(nsqd, "topic=t", b"fits"), "OK")
    assert_refused(pub(nsqd, "topic=t", b"x" * 500_000), 503, "EXITING")
    assert_refused(mpub(nsqd, "topic=t", b"x" * 500_000), 503, "EXITING")
    answer = nsqd.request("GET", "/ping")
    assert answer.status == 500 and answer.text.startswith("NOK - ")
    assert nsqd.get("/stats?format=json")["health"] == answer.text


def test_a_keep_alive_connection_goes_on_behind_a_refused_publish(nsqd: Nsqd, topic: str):
    head = f"POST /mpub?topic={topic}&binary=true HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    with RawHttp(nsqd.http) as raw:
        assert raw.send((head % 3).encode() + b"abc").answer().status == 413
        body = mpub_body([b"good"])
        assert raw.send((head % len(body)).encode() + body).answer().body == b"OK"
    assert bodies_of(nsqd, topic, 1) == [b"good"]
