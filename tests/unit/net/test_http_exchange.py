"""One request as bytes, and what the bytes of an answer mean, however they are cut."""

from __future__ import annotations

import pytest

from flintmq.net.http_exchange import OVERHEAD_BYTES_MAX, Endpoint, Exchange, NoAnswer, Request

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 3\r\n\r\nabc"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\nX: y\r\n\r\n"


def read(*pieces: bytes, ends: bool = False, body_bytes_max: int = 1000) -> Exchange:
    exchange = Exchange("h:80", body_bytes_max)
    for piece in pieces:
        exchange.receive(piece)
    if ends:
        exchange.end()
    return exchange


def head(request: Request, keeps_connection: bool = False) -> list[str]:
    data = request.encode(keeps_connection)
    assert data.count(b"\r\n\r\n") == 1
    return data.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")


# -- the request -------------------------------------------------------------------------------------------------------


def test_a_get():
    lines = head(Request.to("GET", "http://host:4161/lookup?topic=t", {"Accept": "application/x"}))
    assert lines[:2] == ["GET /lookup?topic=t HTTP/1.1", "Host: host:4161"]
    assert {"Accept: application/x", "Accept-Encoding: identity", "Connection: close"} < set(lines)
    assert not any(line.startswith(("Content-Length", "Authorization")) for line in lines)
    assert "Connection: close" not in head(Request.to("GET", "http://host/"), keeps_connection=True)


def test_a_post_says_how_long_it_is():
    request = Request.to("POST", "http://host/a", body=b"abc")
    assert request.encode().endswith(b"\r\n\r\nabc")
    assert "Content-Length: 3" in head(request)
    assert "Content-Length: 0" in head(Request.to("POST", "http://host/a"))


@pytest.mark.parametrize(
    ("url", "endpoint", "host", "target"),
    [
        ("http://h", Endpoint("http", "h", 80), "h:80", "/"),
        ("https://h/a", Endpoint("https", "h", 443), "h:443", "/a"),
        ("http://h:1?a=b", Endpoint("http", "h", 1), "h:1", "/?a=b"),
        ("http://[::1]:1/", Endpoint("http", "::1", 1), "[::1]:1", "/"),
        ("http://H.example.:1/", Endpoint("http", "h.example.", 1), "h.example.:1", "/"),
        ("http://bücher.example:1/", Endpoint("http", "bücher.example", 1), "xn--bcher-kva.example:1", "/"),
        ("http://h:1/ä b?c=%20&d= ", Endpoint("http", "h", 1), "h:1", "/%C3%A4%20b?c=%20&d=%20"),
    ],
)
def test_urls(url: str, endpoint: Endpoint, host: str, target: str):
    request = Request.to("GET", url)
    assert request.endpoint == endpoint
    assert head(request)[:2] == [f"GET {target} HTTP/1.1", f"Host: {host}"]


def test_the_user_of_a_url_is_shown_and_in_no_text():
    request = Request.to("GET", "http://ann:p%40ss@h:1/")
    assert "Authorization: Basic YW5uOnBAc3M=" in head(request)
    assert head(request)[1] == "Host: h:1"
    assert "ann" not in repr(request)
    assert "Authorization: Bearer t" in head(Request.to("GET", "http://ann:x@h:1/", {"Authorization": "Bearer t"}))


@pytest.mark.parametrize(
    "url",
    ["", "h:4161", "gopher://h/secret", "http://", "http:///secret", "http://h:port-secret/", "http://h:99999/",
     "http://[::1/secret", "http://no host/secret", "http://h..x/", "http://.h/", f"http://{'l' * 64}/", "http://h:0/"],
)  # fmt: skip
def test_what_is_no_url(url: str):
    with pytest.raises(NoAnswer) as caught:
        Request.to("GET", url).encode()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "request_",
    [
        Request("GET", Endpoint("http", "h\r\nX: y", 1), "/"),
        Request("GET", Endpoint("http", "h/..", 1), "/"),
        Request("GET", Endpoint("http", "", 1), "/"),
        Request("GET", Endpoint("http", "h", 65536), "/"),
        Request("GET", Endpoint("http", "h", 1), "/ HTTP/1.1\r\nX: y"),
        Request("GET", Endpoint("http", "h", 1), "no-slash"),
        Request("GET X", Endpoint("http", "h", 1), "/"),
        Request("GET", Endpoint("http", "h", 1), "/", {"A": "b\r\nC: d"}),
        Request("GET", Endpoint("http", "h", 1), "/", {"A: b": "c"}),
        Request("GET", Endpoint("http", "h", 1), "/", {"A": "\u20ac"}),
    ],
)
def test_nothing_in_a_request_can_begin_another_line(request_: Request):
    with pytest.raises(NoAnswer, match="the request cannot be sent"):
        request_.encode()


# -- the answer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [LENGTH, CHUNKED, b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\n" + LENGTH])
@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_however_it_is_cut(answer: bytes, step: int):
    exchange = read(*[answer[at : at + step] for at in range(0, len(answer), step)])
    assert exchange.is_complete and exchange.is_reusable
    status, headers, body = exchange.answer()
    assert (status, body) == (200, b"abc")
    assert "x" not in headers, "neither of an interim answer nor of a trailer"


def test_fields():
    exchange = read(b"HTTP/1.1 404 No\r\nDate: d\r\nA: 1\r\na: 2\r\nContent-Length: 0\r\n\r\n")
    status, headers, body = exchange.answer()
    assert (status, body, headers["date"], headers["a"]) == (404, b"", "d", "1, 2")


def test_a_body_that_ends_with_the_connection():
    exchange = read(b"HTTP/1.1 200 OK\r\n\r\n", b"ab", b"c")
    assert not exchange.is_complete
    exchange.end()
    assert exchange.is_complete and not exchange.is_reusable
    assert exchange.answer().body == b"abc"


@pytest.mark.parametrize("status", [204, 304])
def test_a_status_without_a_body(status: int):
    assert read(b"HTTP/1.1 %d X\r\n\r\n" % status).is_complete


@pytest.mark.parametrize(
    "answer",
    [
        LENGTH.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n"),
        LENGTH.replace(b"1.1", b"1.0"),
        LENGTH + b"x",
        LENGTH + b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        LENGTH + b"HTTP/1.1 2",
    ],
)
def test_a_connection_that_is_not_used_again(answer: bytes):
    for pieces in ((answer,), (answer[: len(LENGTH)], answer[len(LENGTH) :])):
        exchange = read(*pieces)
        assert exchange.is_complete and not exchange.is_reusable
        assert exchange.answer()[::2] == (200, b"abc"), "what stands behind an answer is no part of it"


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n", b"x" * 1001], "larger than 1000 bytes"),
        ([b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 600, b"x" * 600], "larger than 1000 bytes"),
        ([b"HTTP/1.1 200 OK\r\nX: ", *[b"y" * 1000] * 100], f"head of the answer is larger than {OVERHEAD_BYTES_MAX}"),
        ([b"HTTP/1.1 100 C\r\n\r\n"] * 10_000, "head of the answer is larger"),
        ([CHUNKED[:-9], *[b"y" * 1000] * 100], "head of the answer is larger|not HTTP"),
        ([b"220 mail\r\n"], "not HTTP"),
        ([b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n"], "changes to another protocol"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"], "not HTTP"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"], "not HTTP"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"], "not HTTP"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"], "not HTTP"),
    ],
)
def test_what_is_no_answer(pieces: list[bytes], reason: str):
    with pytest.raises(NoAnswer, match=reason) as caught:
        read(*pieces)
    assert caught.value.address == "h:80"


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 2", b"HTTP/1.1 200 OK\r\nX: y\r\n", LENGTH[:-1], CHUNKED[:-2], b"HTTP/1.1 100 C\r\n\r\n"]
)
def test_what_ends_too_early(answer: bytes):
    with pytest.raises(NoAnswer, match="closed before the answer was complete"):
        read(answer, ends=True)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (LENGTH[:-1], 200),
        (CHUNKED[:-2], 200),
        (LENGTH.replace(b"\r\n", b"\n"), 200),
        (LENGTH.replace(b"\r\n\r\n", b"\r\nContent-Length: 3\r\n\r\n"), 200),
        (LENGTH.replace(b"\r\n\r\n", b"\r\nContent-Length: 4\r\n\r\n"), 200),
        (b"HTTP/1.1 200\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 200),
        (b"HTTP/1.1 404 No\r\nno field\r\n\r\n", 404),
        (b"HTTP/1.1 500 No\r\nX: y", 500),
        (b"HTTP/1.1 103 Hints\r\nX: y\r\n\r\nHTTP/1.1 204 No\nX: y\n\n", 204),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n" + b"x" * 1001, 200),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000, 200),
        (b"", 0),
        (b"HTTP/1.1 20", 0),
        (b"HTTP/1.1 200", 0),
        (b"HTTP/1.1 2000 OK\r\n\r\n", 0),
        (b"HTTP/1.1 200x\r\n\r\n", 0),
        (b"HTTP/1.1 100 C\r\n\r\n", 0),
        (b"HTTP/1.1 100 C\r\n\r\nHTTP/1.1 2", 0),
        (b"HTTP/1.1 101 S\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n", 0),
        (b"220 mail\r\n", 0),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 1_000_000])
def test_the_status_of_an_answer_that_is_not_whole(answer: bytes, status: int, step: int):
    with pytest.raises(NoAnswer) as caught:
        read(*(answer[at : at + step] for at in range(0, len(answer), step)), ends=True)
    assert caught.value.status == status


def test_a_broken_connection_is_no_end_of_a_body():
    with pytest.raises(NoAnswer, match="closed before the answer was complete: Connection reset by peer"):
        read(b"HTTP/1.1 200 OK\r\n\r\nabc").end(ConnectionResetError(104, "Connection reset by peer"))


def test_small_chunks_are_no_attack():
    exchange = read(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", body_bytes_max=100_000)
    for _ in range(100_000 // 500):
        exchange.receive(b"1\r\nx\r\n" * 500)
    exchange.receive(b"0\r\n\r\n")
    assert exchange.answer().body == b"x" * 100_000


def test_piece_by_piece():
    exchange = read(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", body_bytes_max=10)
    for _ in range(10):
        exchange.receive(b"3\r\nabc\r\n")
        assert exchange.unread_bytes == 3
        assert exchange.take_body() == b"abc"
    assert not exchange.is_complete
