"""Trace ids and headers over HTTP: /pubtrace, /pub_ext, and what looks at messages (Youzan's HTTP API)."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest
from tests.conformance.conftest import is_ours
from tests.conformance.protocol_helpers import consumer
from tests.conformance.redesigned_helpers import (
    BARE,
    consumer_of_all,
    create,
    extended,
    headed,
    one,
    placed,
    pub_to,
    traced,
)
from tests.integration.daemons import Connection, Daemons, Nsqd, Nsqlookupd, mpub_body, pub, req, wait_until
from tests.parameters import filled

pytestmark = pytest.mark.skipif(not is_ours("nsqd"), reason="NSQ has neither trace ids nor headers")

OLD = {"Accept": "application/json"}

BEYOND = "E_INVALID_JSON_HEADER: beyond a limit: "


@pytest.fixture
def headered(nsqd: Nsqd, topic: str) -> str:
    """A topic with one partition whose messages have headers."""
    return create(nsqd, topic, 1, extend="true")


def pub_ext(
    nsqd: Nsqd, topic: str, ext: object, body: bytes = b"x", headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """Status and answer of a /pub_ext that wants no envelope; text as it is."""
    text = ext if isinstance(ext, str) else json.dumps(ext)
    answer = nsqd.request("POST", f"/pub_ext?topic={topic}&ext={quote(text)}", body, BARE | (headers or {}))
    is_json = "json" in answer.headers["Content-Type"]
    return answer.status, answer.json if is_json else answer.text


# -- publishing --------------------------------------------------------------------------------------------------------


def test_pubtrace(nsqd: Nsqd, topic: str):
    create(nsqd, topic, 2)
    first = nsqd.post(f"/pubtrace?topic={topic}&partition=1&trace_id=555", b"hello")
    assert first.body == b'{"status":"OK","id":%d,"trace_id":"555","queue_offset":0,"rawsize":39}' % (1 << 50 | 1)
    second = nsqd.post(f"/pubtrace?topic={topic}&partition=1&trace_id=18446744073709551615", b"x").json
    assert (second["id"], second["trace_id"], second["queue_offset"]) == (1 << 50 | 2, str(2**64 - 1), 39)
    with consumer_of_all(nsqd, topic, rdy_count=9) as waiting:
        assert [placed(each)[:3] for each in waiting.messages(2)] == [(1, 1, 555), (1, 2, 2**64 - 1)]


def test_pubtrace_to_a_topic_with_headers(nsqd: Nsqd, headered: str):
    assert nsqd.post(f"/pubtrace?topic={headered}&trace_id=1", b"hello").json["rawsize"] == 40
    with consumer(nsqd, headered, extend_support=True) as waiting:
        assert extended(waiting.message().body) == (0, b"", b"hello")


@pytest.mark.parametrize(
    ("query", "body", "error"),
    [
        ("topic={topic}&trace_id=1", b"", (406, "MSG_EMPTY")),
        ("topic={topic}&trace_id=1", 1024 * 1024 + 1, (413, "MSG_TOO_BIG")),
        ("trace_id=1", b"x", (400, "MISSING_ARG_TOPIC")),
        ("topic=a!b&trace_id=1", b"x", (400, "INVALID_TOPIC")),
        ("topic={topic}", b"x", (400, "INVALID_TRACE_ID")),
        ("topic={topic}&trace_id=", b"x", (400, "INVALID_TRACE_ID")),
        ("topic={topic}&trace_id=-1", b"x", (400, "INVALID_TRACE_ID")),
        ("topic={topic}&trace_id=18446744073709551616", b"x", (400, "INVALID_TRACE_ID")),
        ("topic={topic}-unknown&trace_id=1", b"x", (404, "E_TOPIC_NOT_EXIST")),
        ("topic={topic}&partition=1&trace_id=1", b"x", (404, "E_TOPIC_NOT_EXIST")),
        ("topic={topic}&partition=x&trace_id=1", b"x", (400, "E_BAD_PARTITION")),
    ],
)
def test_pubtrace_refused(nsqd: Nsqd, headered: str, query: str, body: bytes | int, error: tuple[int, str]):
    assert nsqd.request("POST", "/pubtrace?" + query.format(topic=headered), filled(body)).error == error


def test_pubtrace_to_a_plain_topic(nsqd: Nsqd, topic: str):
    nsqd.publish(topic, b"x")
    error = (400, "E_EXT_NOT_SUPPORT")
    assert nsqd.request("POST", f"/pubtrace?topic={topic}&trace_id=1", b"x").error == error


def test_pub_ext(nsqd: Nsqd, headered: str):
    given = '{"k":"v", "n": 18446744073709551999.5}'
    assert pub_ext(nsqd, headered, given, b"body") == (200, "OK")
    with consumer(nsqd, headered, extend_support=True) as waiting:
        assert extended(waiting.message().body) == (4, given.encode(), b"body")


def test_pub_ext_with_a_trace_id(nsqd: Nsqd, headered: str):
    headers = {"##trace_id": "5"}
    size = 4 + 4 + 26 + 3 + len(json.dumps(headers)) + 1
    expected = {"status": "OK", "id": 1, "trace_id": "5", "queue_offset": 0, "rawsize": size}
    assert pub_ext(nsqd, headered, headers) == (200, expected)


def test_pub_ext_takes_http_headers(nsqd: Nsqd, headered: str):
    more = {"X-Nsqext-Color": "red", "X-NSQEXT-Shop-Id": "7", "X-Nsqext-k": "not taken", "X-Other": "no"}
    assert pub_ext(nsqd, headered, {"k": "v", "n": 5}, headers=more) == (200, "OK")
    with consumer(nsqd, headered, extend_support=True) as waiting:
        headers = json.loads(extended(waiting.message().body).headers)
    assert headers == {"k": "v", "n": 5, "color": "red", "shop-id": "7"}
    traced_by_header = pub_ext(nsqd, headered, {}, headers={"X-Nsqext-##trace_id": "9"})
    assert traced_by_header[1]["trace_id"] == "9"


def test_pub_ext_to_a_plain_topic_with_headers(nsqd: Nsqd, topic: str):
    nsqd.post(f"/topic/create?topic={topic}&extend=true")
    assert pub_ext(nsqd, topic, {"k": "v"}) == (200, "OK")
    nsqd.post(f"/mpub?topic={topic}", b"a\nb")
    nsqd.post(f"/mpub?topic={topic}&binary=true", mpub_body([b"c"]))
    with consumer(nsqd, topic, rdy_count=9, extend_support=True) as waiting:
        assert [extended(each.body)[1:] for each in waiting.messages(4)] == [
            (b'{"k": "v"}', b"x"),
            (b"", b"a"),
            (b"", b"b"),
            (b"", b"c"),
        ]


@pytest.mark.parametrize(
    ("ext", "body", "error"),
    [
        ({}, b"", (406, "MSG_EMPTY")),
        ({}, 1024 * 1024 + 1, (413, "MSG_TOO_BIG")),
        ("", b"x", (400, "E_INVALID_JSON_HEADER")),
        ("{", b"x", (400, "E_INVALID_JSON_HEADER")),
        ("[1]", b"x", (400, "E_INVALID_JSON_HEADER")),
        ('{"k":' + "[" * 64 + "]" * 64 + "}", b"x", (400, f"{BEYOND}nested deeper than 64")),
        ('{"k":"\\ud800"}', b"x", (400, f"{BEYOND}half of a surrogate pair in a text")),
        (
            '{"k":1e999}',
            b"x",
            (400, f"{BEYOND}a number out of range: integers of at most 4300 digits, others up to 1.79e308"),
        ),
        ({"##trace_id": 5}, b"x", (400, "INVALID_TRACE_ID")),
        ({"##trace_id": "x"}, b"x", (400, "INVALID_TRACE_ID")),
    ],
)
def test_pub_ext_refused(nsqd: Nsqd, headered: str, ext: object, body: bytes | int, error: tuple[int, str]):
    status, answer = pub_ext(nsqd, headered, ext, filled(body))
    assert (status, answer["message"]) == error


def test_pub_ext_to_topics_that_take_none(nsqd: Nsqd, topic: str):
    assert pub_ext(nsqd, topic, {}) == (404, {"message": "E_TOPIC_NOT_EXIST"})
    nsqd.publish(topic, b"x")
    assert pub_ext(nsqd, topic, {}) == (400, {"message": "E_EXT_NOT_SUPPORT"})


@pytest.mark.parametrize("headers", [{}, OLD, {"Accept": "application/vnd.nsq; version=0.9"}])
def test_pub_ext_in_an_envelope(nsqd: Nsqd, headered: str, headers: dict[str, str]):
    """As the redesigned NSQ answers whoever does not ask for bare JSON: errors have the status 500."""

    def answer(ext: str) -> tuple[int, Any]:
        found = nsqd.request("POST", f"/pub_ext?topic={headered}&ext={quote(ext)}", b"x", headers)
        return found.status, found.text if found.text == "OK" else found.json

    assert answer("{}") == (200, "OK")
    status, found = answer('{"##trace_id":"5"}')
    assert (status, found["status_code"], found["status_txt"]) == (200, 200, "OK")
    assert (found["data"]["status"], found["data"]["id"], found["data"]["trace_id"]) == ("OK", 2, "5")
    assert answer("{") == (500, {"status_code": 500, "status_txt": "E_INVALID_JSON_HEADER", "data": None})


def test_while_draining(daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os")
    create(nsqd, "t", 1, extend="true")
    with nsqd.connect() as connection:
        connection.ok(pub_to("t", 0, b"keeps it from ending") + one("PUB_EXT", "t", 0, headed({}, b"x")), count=2)
        nsqd.post("/channel/create?topic=t&channel=c")
        nsqd.post("/drain")
        assert nsqd.request("POST", "/pubtrace?topic=t&trace_id=1", b"x").error == (503, "DRAINING")
        assert pub_ext(nsqd, "t", {}) == (503, {"message": "DRAINING"})
        assert nsqd.request("POST", "/topic/create?topic=x&extend=true", b"").error == (503, "DRAINING")
        connection.send(one("PUB_EXT", "t", 0, headed({}, b"x")) * 3 + one("PUB_TRACE", "t", 0, traced(1, b"x")))
        for command in ["PUB_EXT"] * 3 + ["PUB_TRACE"]:
            assert connection.error() == f"E_FAILED_ON_NOT_WRITABLE {command} topic t: draining"
        connection.send(pub_to("t", 0, b"x") * 3)
        for _ in range(3):
            assert connection.error() == "E_FAILED_ON_NOT_WRITABLE PUB topic t: draining"


# -- looking at messages -----------------------------------------------------------------------------------------------


def test_message_get(nsqd: Nsqd, connection: Connection, headered: str):
    connection.send(one("PUB_EXT", headered, 0, headed({"##trace_id": "5"}, b"body")))
    connection.response()
    connection.ok(pub_to(headered, 0, b"plain"))
    query = f"/message/get?topic={headered}&partition=0&search_mode=id"
    row = nsqd.get(f"{query}&search_pos=1&needext=true")
    assert (row["id"], row["trace_id"], row["body"], row["ext"]) == (1, 5, "body", '{"##trace_id": "5"}')
    assert nsqd.get(f"{query}&search_pos=1")["ext"] == ""
    row = nsqd.get(f"{query}&search_pos=2&needext=true")
    assert (row["id"], row["trace_id"], row["body"], row["ext"]) == (2, 0, "plain", "")


@pytest.mark.parametrize("what", ["next", "in_flight", "deferred"])
def test_peek(nsqd: Nsqd, connection: Connection, headered: str, what: str):
    """Headers of any size do not count as the body, however little of it is asked for."""
    headers = {"k": "v" * 30_000}
    connection.ok(one("PUB_EXT", headered, 0, headed(headers, b"a long body")))
    nsqd.post(f"/channel/create?topic={headered}&channel=c")
    with consumer(nsqd, headered, rdy_count=0 if what == "next" else 1, extend_support=True) as waiting:
        if what != "next":
            message = waiting.message()
        if what == "deferred":
            waiting.rdy(0)
            waiting.send(req(message.id, 60_000))
            wait_until(lambda: nsqd.stats(headered, "c")["deferred_count"] == 1)
        query = f"/channel/peek?topic={headered}&channel=c&what={what}&max_body=6"
        (row,) = nsqd.get(query)["messages"]
    assert (row["body"], row["body_size"], json.loads(row["ext"])) == ("a long", 11, headers)


def test_who_says_that_a_topic_has_headers(shared_daemons: Daemons, nsqlookupd: Nsqlookupd, topic: str):
    nsqd = shared_daemons.nsqd("--durability=os", f"--lookupd-tcp-address={nsqlookupd.tcp[0]}:{nsqlookupd.tcp[1]}")
    for name, query in (("with", "&partition_num=1&extend=true"), ("without", "&partition_num=1"), ("plain", "")):
        nsqd.post(f"/topic/create?topic={topic}-{name}{query}")
    names = [f"{topic}-plain", f"{topic}-with", f"{topic}-without"]
    wait_until(lambda: set(names) <= set(nsqlookupd.get("/topics")["topics"]))
    answer = nsqlookupd.request("GET", "/topics?metaInfo=true", headers=BARE).json
    rows = {row["topic_name"]: row["extend_support"] for row in answer["meta_info"]}
    assert [rows[name] for name in names] == [False, True, False]
    assert [nsqd.stats(name).get("extend_support") for name in names] == [None, True, False]


def test_an_unknown_client_sees_plain_answers(nsqd: Nsqd, topic: str):
    """``/topic/create`` and ``/stats`` of a plain topic say nothing of headers."""
    nsqd.post(f"/topic/create?topic={topic}")
    with nsqd.connect() as connection:
        connection.ok(pub(topic, b"x"))
    assert "extend_support" not in nsqd.stats(topic)
