"""Requests and responses by themselves."""

from __future__ import annotations

import pytest

from flintmq.net.http_messages import (
    EMPTY,
    HttpError,
    PendingResponse,
    Request,
    Response,
    error_response,
    json_response,
    parse_query,
    plain_response,
    redirect_response,
    text_response,
)


@pytest.mark.parametrize(
    ("raw", "values"),
    [
        (b"", {}),
        (b"a", {"a": ""}),
        (b"a=", {"a": ""}),
        (b"a=1&a=2", {"a": "1"}),
        (b"&&a=1&", {"a": "1"}),
        (b"a=b=c", {"a": "b=c"}),
        (b"a=%3B%26", {"a": ";&"}),
        (b"a+b=c+d", {"a b": "c d"}),
        (b"%74opic=x%23ephemeral", {"topic": "x#ephemeral"}),
        (b"a=%ff", {"a": "\ufffd"}),
        (b"=1", {"": "1"}),
        (b"a=" + b"x" * 1000, {"a": "x" * 1000}),
    ],
)
def test_query(raw, values):
    assert dict(parse_query(raw)) == values


@pytest.mark.parametrize(
    "raw", [b";", b"a;b", b"a=1;b=2", b"%", b"a=%2", b"a=%gg", b"%%20", b"a=" + b"x" * 1000 + b";"]
)
def test_bad_query(raw):
    for _ in range(2):
        with pytest.raises(HttpError, match="400 INVALID_REQUEST"):
            parse_query(raw)


def test_a_query_cannot_be_changed_for_the_next_request():
    with pytest.raises(TypeError):
        parse_query(b"a=1")["a"] = "2"  # type: ignore[index]


def test_heads():
    assert EMPTY.head == b"HTTP/1.1 200 OK\r\nX-NSQ-Content-Type: nsq; version=1.0\r\nContent-Length: 0\r\n"
    assert plain_response("OK").head == (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: 2\r\n"
    )
    assert b"X-NSQ-Content-Type: nsq; version=1.0\r\n" in text_response("OK").head
    assert b"HTTP/1.1 413 " in error_response(413, "MSG_TOO_BIG").head
    assert b"HTTP/1.1 299 Unknown\r\n" in Response(299).head


def test_bodies():
    assert json_response({"a": [1, None]}).body == b'{"a":[1,null]}'
    assert error_response(404, "NOT_FOUND").body == b'{"message":"NOT_FOUND"}'
    assert error_response(404, "NOT_FOUND", plain=True).body == b"NOT_FOUND"
    assert text_response("\udcff").body == b"\\udcff"


def test_no_line_break_gets_into_a_head():
    with pytest.raises(AssertionError):
        Response(200, b"", (("Location", "/a\r\nEvil: yes"),))


def test_redirect_escapes_what_it_shows():
    assert b"&lt;&quot;" in redirect_response('/a?<"', "GET").body
    assert redirect_response("/a", "POST").body == b""


def test_request_shows_itself():
    request = Request(b"GET", b"/a", b"b=\xff", {}, "1.2.3.4:5")
    assert repr(request) == "<Request GET /a?b=\udcff of 1.2.3.4:5>"
    assert repr(Response(200, b"x")) == "<Response 200 b'x'>"


def test_a_pending_response_is_answered_once():
    answer = PendingResponse()
    answer.complete(EMPTY)
    with pytest.raises(AssertionError, match="twice"):
        answer.fail(HttpError(500, "X"))
