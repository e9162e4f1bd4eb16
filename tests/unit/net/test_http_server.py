"""The HTTP server's connections, driven without a socket: limits, order, errors, deadlines, shutdown."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.net import http_server
from flintmq.net.http_server import (
    HEADER_COUNT_MAX,
    HEADER_SIZE_MAX,
    QUEUE_COUNT_MAX,
    URL_SIZE_MAX,
    HttpError,
    HttpServer,
    PendingResponse,
    Request,
    Response,
    Router,
    json_response,
    plain_response,
    text_response,
)
from flintmq.net.origin import Origins
from flintmq.testing import ManualClock

HOST = b"Host: localhost\r\n"


class FakeTransport(asyncio.Transport):
    """Keeps what is written; ``window`` bytes fit before the writer is paused."""

    def __init__(self, protocol: asyncio.Protocol, window: int = 1 << 30, sockname: object = None) -> None:
        super().__init__()
        self.sockname = sockname
        self.protocol = protocol
        self.window = window
        self.written = b""
        self.write_count = 0
        self.is_paused = False
        self.has_sent_eof = False
        self.state = "open"

    def get_extra_info(self, name, default=None):
        return {"peername": ("10.0.0.9", 1234), "sockname": self.sockname}.get(name, default)

    def set_write_buffer_limits(self, high=None, low=None):
        self.high = high

    def write(self, data):
        assert self.state == "open" and not self.has_sent_eof
        self.written += data
        self.write_count += 1
        if len(self.written) > self.window:
            self.protocol.pause_writing()

    def get_write_buffer_size(self):
        return max(0, len(self.written) - self.window)

    def drain(self):
        self.window = 1 << 30
        self.protocol.resume_writing()

    def can_write_eof(self):
        return True

    def write_eof(self):
        self.has_sent_eof = True

    def is_closing(self):
        return self.state != "open"

    def close(self):
        if self.state == "open":
            self.state = "closed"
            self.protocol.connection_lost(None)

    def abort(self):
        if self.state == "open":
            self.state = "aborted"
            self.protocol.connection_lost(None)

    def pause_reading(self):
        assert not self.is_paused
        self.is_paused = True

    def resume_reading(self):
        assert self.is_paused
        self.is_paused = False


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def message(self) -> str:
        return msgspec.json.decode(self.body)["message"]


def answers(data: bytes, *, head_only: bool = False) -> list[Answer]:
    found = []
    while data:
        head, separator, data = data.partition(b"\r\n\r\n")
        assert separator, head
        first, *lines = head.decode().split("\r\n")
        version, status, _reason = first.split(" ", 2)
        assert version == "HTTP/1.1"
        headers = {}
        for line in lines:
            name, value = line.split(": ", 1)
            assert name not in headers
            headers[name] = value
        size = 0 if head_only or status == "100" else int(headers["Content-Length"])
        assert len(data) >= size
        found.append(Answer(int(status), headers, data[:size]))
        data = data[size:]
    return found


class Peer:
    """One connection to a server."""

    def __init__(self, server: HttpServer, window: int = 1 << 30, sockname: object = None) -> None:
        self.server = server
        self.protocol = server.new_connection(asyncio.get_running_loop())
        self.transport = FakeTransport(self.protocol, window, sockname)
        self.protocol.connection_made(self.transport)

    def send(self, data: bytes) -> Peer:
        self.protocol.data_received(data)
        return self

    def eof(self) -> None:
        if not self.protocol.eof_received():
            self.transport.close()

    def get(self, target: str, *headers: str, method: str = "GET", body: bytes = b"") -> Peer:
        return self.send(request(target, *headers, method=method, body=body))

    @property
    def answers(self) -> list[Answer]:
        return answers(self.transport.written)

    @property
    def answer(self) -> Answer:
        (found,) = self.answers
        return found

    @property
    def statuses(self) -> list[int]:
        return [found.status for found in self.answers]


def request(target: str, *headers: str, method: str = "GET", body: bytes = b"") -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", *headers]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chunked(target: str, *chunks: bytes, trailer: bytes = b"") -> bytes:
    head = f"POST {target} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in chunks) + b"0\r\n" + trailer + b"\r\n"


class App:
    """Routes that show what handlers see; ``pending`` and ``gate`` hold answers back."""

    def __init__(self) -> None:
        self.pending: list[PendingResponse] = []
        self.gate = asyncio.Event()
        self.seen: list[Request] = []
        self.cancelled = 0
        router = self.router = Router()
        router.add("GET", "/ping", lambda _: plain_response("OK"), plain=True)
        router.add("POST", "/echo", self.echo, body_limit_bytes=100, too_big="MSG_TOO_BIG", is_logged=False)
        router.add("GET", "/query", lambda r: json_response(dict(r.query)))
        router.add("GET", "/config/{opt}", lambda r: text_response(r.parameters["opt"]))
        router.add("PUT", "/config/{opt}", lambda r: text_response("put " + r.parameters["opt"]))
        router.add("GET", "/fail", self.fail)
        router.add("GET", "/plain/fail", self.fail, plain=True)
        router.add("GET", "/refuse", self.refuse)
        router.add("GET", "/plain/refuse", self.refuse, plain=True)
        router.add("GET", "/nothing", lambda _: None)  # type: ignore[arg-type]
        router.add("GET", "/slow", self.slow)
        router.add("GET", "/slow/look", self.slow, ends_with_client=True)
        router.add("GET", "/slow/fail", self.slow_fail)
        router.add("POST", "/pending", self.hold)
        router.add("GET", "/big", lambda _: text_response("x" * 30_000))

    def echo(self, request: Request) -> Response:
        self.seen.append(request)
        return text_response(request.body.decode())

    def fail(self, request: Request) -> Response:
        raise ZeroDivisionError("no\nway")

    def refuse(self, request: Request) -> Response:
        raise HttpError(400, "MISSING_ARG_TOPIC")

    async def slow(self, request: Request) -> Response:
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return text_response("slow")

    async def slow_fail(self, request: Request) -> Response:
        await asyncio.sleep(0)
        raise HttpError(503, "EXITING")

    def hold(self, request: Request) -> PendingResponse:
        answer = PendingResponse()
        self.pending.append(answer)
        return answer


@pytest.fixture
async def app():
    return App()


@pytest.fixture
async def server(app):
    return HttpServer(app.router, clock=ManualClock(), request_deadline_s=5, idle_deadline_s=10)


@pytest.fixture
async def peer(server):
    return Peer(server)


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


class TestAnswers:
    async def test_plain_text(self, peer):
        answer = peer.get("/ping").answer
        assert (answer.status, answer.body) == (200, b"OK")
        assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
        assert "X-NSQ-Content-Type" not in answer.headers
        assert "Connection" not in answer.headers
        assert answer.headers["Date"].endswith(" GMT")

    async def test_json(self, peer):
        answer = peer.get("/query?a=1&b=x%20y+z&a=2&c").answer
        assert msgspec.json.decode(answer.body) == {"a": "1", "b": "x y z", "c": ""}
        assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
        assert answer.headers["X-NSQ-Content-Type"] == "nsq; version=1.0"

    @pytest.mark.parametrize("query", ["a=1;b=2", "a=%zz", "%4", "ok=1&b=%", ";"])
    async def test_bad_query(self, peer, query):
        answer = peer.get("/query?" + query).answer
        assert (answer.status, answer.message) == (400, "INVALID_REQUEST")

    async def test_bad_query_does_not_matter_to_who_does_not_ask(self, peer):
        assert peer.get("/ping?%zz").answer.status == 200

    async def test_error(self, peer):
        answer = peer.get("/refuse").answer
        assert (answer.status, answer.body) == (400, b'{"message":"MISSING_ARG_TOPIC"}')
        assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
        assert answer.headers["X-NSQ-Content-Type"] == "nsq; version=1.0"

    async def test_error_of_a_plain_route_is_bare_text(self, peer):
        answer = peer.get("/plain/refuse").answer
        assert (answer.status, answer.body) == (400, b"MISSING_ARG_TOPIC")

    @pytest.mark.parametrize(
        ("path", "body"),
        [("/fail", b'{"message":"INTERNAL_ERROR"}'), ("/plain/fail", b"INTERNAL_ERROR")],
    )
    async def test_exception_is_logged_once_and_answered(self, peer, caplog, path, body):
        answer = peer.get(path).answer
        assert (answer.status, answer.body) == (500, body)
        errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert len(errors) == 1
        assert errors[0].exc_info and errors[0].exc_info[0] is ZeroDivisionError
        assert peer.get("/ping").statuses == [500, 200]

    async def test_a_handler_that_returns_nothing_is_an_internal_error(self, peer, caplog):
        assert peer.get("/nothing").answer.message == "INTERNAL_ERROR"
        assert "returned None" in caplog.text

    async def test_not_found(self, peer):
        answer = peer.get("/nope").answer
        assert (answer.status, answer.message) == (404, "NOT_FOUND")
        assert answer.headers["X-NSQ-Content-Type"] == "nsq; version=1.0"

    @pytest.mark.parametrize(
        ("method", "path", "allow"),
        [
            ("POST", "/ping", "GET, OPTIONS"),
            ("DELETE", "/config/x", "GET, OPTIONS, PUT"),
            ("GET", "/echo", "OPTIONS, POST"),
        ],
    )
    async def test_method_not_allowed(self, peer, method, path, allow):
        answer = peer.get(path, method=method).answer
        assert (answer.status, answer.message) == (405, "METHOD_NOT_ALLOWED")
        assert answer.headers["Allow"] == allow

    async def test_head_is_not_allowed_and_has_no_body(self, peer):
        peer.get("/ping", method="HEAD")
        (answer,) = answers(peer.transport.written, head_only=True)
        assert (answer.status, answer.body) == (405, b"")
        assert answer.headers["Allow"] == "GET, OPTIONS"
        assert peer.transport.state == "open"

    @pytest.mark.parametrize(("path", "allow"), [("/ping", "GET, OPTIONS"), ("/config/a", "GET, OPTIONS, PUT")])
    async def test_options(self, peer, path, allow):
        answer = peer.get(path, method="OPTIONS").answer
        assert (answer.status, answer.body, answer.headers["Allow"]) == (200, b"", allow)

    async def test_options_of_everything_and_of_nothing(self, peer):
        peer.get("*", method="OPTIONS").get("/nope", method="OPTIONS")
        assert peer.statuses == [200, 404]
        assert peer.answers[0].headers["Allow"] == "GET, OPTIONS, POST, PUT"

    @pytest.mark.parametrize(
        ("method", "target", "status", "location"),
        [
            ("GET", "/ping/", 301, "/ping"),
            ("GET", "/PING", 301, "/ping"),
            ("GET", "//Ping/?a=1&b=%20", 301, "/ping?a=1&b=%20"),
            ("GET", "/x/../ping", 301, "/ping"),
            ("POST", "/Echo", 308, "/echo"),
            ("PUT", "/CONFIG/A b".replace(" ", "%20"), 308, "/config/A%20b"),
        ],
    )
    async def test_redirects(self, peer, method, target, status, location):
        answer = peer.get(target, method=method).answer
        assert (answer.status, answer.headers["Location"]) == (status, location)
        assert (answer.body != b"") == (method == "GET")

    @pytest.mark.parametrize(
        ("method", "target"), [("POST", "/PING"), ("GET", "/ping/x"), ("GET", "/config/"), ("GET", "/")]
    )
    async def test_no_redirect(self, peer, method, target):
        assert peer.get(target, method=method).answer.status == 404

    async def test_suffix_parameter(self, peer):
        peer.get("/config/log_level").get("/config/a%20b").get("/config/x", method="PUT").get("/config/a%2Fb")
        assert [a.body for a in peer.answers[:3]] == [b"log_level", b"a b", b"put x"]
        assert peer.statuses[3] == 404

    async def test_escapes_in_the_path(self, peer):
        peer.get("/p%69ng").get("/ping%zz")
        assert peer.statuses == [200, 400]

    async def test_absolute_form(self, peer):
        peer.get("http://h:1/ping").get("http://h").get("http://h/ping/")
        assert peer.statuses == [200, 404, 301]

    async def test_what_a_handler_sees(self, peer, app):
        peer.get("/echo?a=b", "X-Thing: one", "x-thing: two", method="POST", body=b"hi")
        seen = app.seen[0]
        assert (seen.method, seen.path, seen.target, seen.body) == ("POST", "/echo", "/echo?a=b", b"hi")
        assert seen.header("X-Thing") == "one"
        assert seen.header("absent") == ""
        assert seen.remote_address == "10.0.0.9:1234"

    async def test_requests_are_logged_where_wanted(self, peer, caplog):
        caplog.set_level(logging.INFO)
        peer.get("/query?a=1").get("/echo", method="POST", body=b"x").get("/nope")
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == 2
        assert lines[0].startswith("200 GET /query?a=1 (10.0.0.9:1234) ")
        assert lines[1].startswith("404 GET /nope ")


class TestConnection:
    async def test_keep_alive_and_one_write_per_read(self, peer):
        peer.send(request("/ping") * 3)
        assert peer.statuses == [200] * 3
        assert peer.transport.write_count == 1
        assert peer.get("/ping").statuses == [200] * 4

    async def test_connection_close(self, peer):
        peer.send(request("/ping", "Connection: close") + request("/ping"))
        assert peer.answer.headers["Connection"] == "close"
        assert peer.transport.state == "closed"

    async def test_http_1_0(self, server):
        peer = Peer(server).send(b"GET /ping HTTP/1.0\r\n\r\n")
        assert peer.answer.headers["Connection"] == "close"
        assert peer.transport.state == "closed"
        peer = Peer(server).send(b"GET /ping HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert peer.answer.headers["Connection"] == "keep-alive"
        assert peer.transport.state == "open"

    @given(cuts=st.lists(st.integers(0, 10_000), max_size=12))
    def test_any_split_gives_the_same_answers(self, cuts):
        async def run():
            stream = (
                request("/ping")
                + request("/echo?x=1", method="POST", body=b"one")
                + chunked("/echo", b"t", b"wo", trailer=b"T: 1\r\n")
                + request("/echo", "Connection: Upgrade", "Upgrade: h2c", method="POST", body=b"three")
                + request("/nope")
                + request("/echo", "Expect: 200-ok", method="POST", body=b"four")
            )
            peer = Peer(HttpServer(App().router, clock=ManualClock()))
            places = sorted({cut % len(stream) for cut in cuts} | {0, len(stream)})
            for start, end in pairwise(places):
                peer.send(stream[start:end])
            assert peer.statuses == [200, 200, 200, 200, 404, 417]
            assert [answer.body for answer in peer.answers[1:4]] == [b"one", b"two", b"three"]

        asyncio.run(run())

    async def test_byte_by_byte(self, peer):
        for byte in request("/echo", method="POST", body=b"hello") + chunked("/echo", b"a", b"bc"):
            peer.send(bytes((byte,)))
        assert [answer.body for answer in peer.answers] == [b"hello", b"abc"]

    @given(data=st.binary(max_size=400))
    def test_garbage_is_answered_or_waited_for(self, data):
        async def run():
            peer = Peer(HttpServer(App().router, clock=ManualClock()))
            peer.send(data)
            peer.eof()
            assert all(status in (400, 404, 405, 414, 431) for status in peer.statuses)
            assert peer.transport.state == "closed"

        asyncio.run(run())

    async def test_garbage_is_a_bad_request(self, peer):
        peer.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        assert (peer.answer.status, peer.answer.body) == (400, b"400 Bad Request")
        assert peer.transport.has_sent_eof
        peer.send(b"more").eof()
        assert peer.transport.state == "closed"

    @pytest.mark.parametrize(
        "lines",
        [
            b"Content-Length: 1\r\nContent-Length: 1",
            b"Content-Length: 1\r\nTransfer-Encoding: chunked",
            b"Content-Length: -1",
            b"Content-Length: 99999999999999999999999",
            b"A: b\r\n folded",
            b" : b",
        ],
    )
    async def test_ambiguous_framing_is_refused(self, peer, lines):
        peer.send(b"POST /echo HTTP/1.1\r\n" + HOST + lines + b"\r\n\r\nxx")
        assert peer.statuses == [400]
        assert peer.transport.has_sent_eof

    @pytest.mark.parametrize(
        "lines",
        [
            b"Transfer-Encoding: gzip",
            b"Transfer-Encoding: gzip, chunked",
            b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked",
            b"Transfer-Encoding: identity, chunked",
        ],
    )
    async def test_a_transfer_encoding_that_nobody_decodes_is_refused(self, app, peer, lines):
        peer.send(b"POST /echo HTTP/1.1\r\n" + HOST + lines + b"\r\n\r\n1\r\nx\r\n0\r\n\r\n")
        assert peer.statuses == [501] and "only chunked" in peer.answer.message
        assert peer.transport.has_sent_eof and app.seen == []

    @pytest.mark.parametrize("other", [b", chunked", b"\r\nTransfer-Encoding: gzip", b"\r\nTransfer-Encoding: x"])
    async def test_a_transfer_encoding_counts_as_a_whole(self, app, peer, other):
        lines = b"Transfer-Encoding: chunked" + other
        peer.send(b"POST /echo HTTP/1.1\r\n" + HOST + lines + b"\r\n\r\n1\r\nx\r\n0\r\n\r\n")
        assert peer.statuses in ([400], [501])  # the parser may be first to refuse it
        assert app.seen == []

    async def test_chunked_is_spelled_in_any_case(self, peer):
        lines = b"Transfer-Encoding: Chunked"
        peer.send(b"POST /echo HTTP/1.1\r\n" + HOST + lines + b"\r\n\r\n1\r\nx\r\n0\r\n\r\n")
        assert peer.answer.body == b"x"

    async def test_an_encoded_body_is_taken_as_it_is(self, peer):
        peer.send(request("/echo", "Content-Encoding: gzip", method="POST", body=b"\x1f\x0b"))
        assert peer.answer.body == b"\x1f\x0b"

    async def test_host_is_required(self, peer):
        peer.send(b"GET /ping HTTP/1.1\r\n\r\n")
        assert peer.answer.body == b"400 Bad Request: missing required Host header"

    async def test_connect_is_refused(self, peer):
        peer.send(b"CONNECT h:80 HTTP/1.1\r\nHost: h\r\n\r\nxx")
        assert peer.statuses == [404]
        assert peer.transport.has_sent_eof

    async def test_an_offered_upgrade_is_declined_and_the_body_kept(self, peer, app):
        offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk", "X-Kept: yes")
        peer.send(request("/echo", *offer, method="POST", body=b"body") * 3 + request("/ping"))
        assert [answer.body for answer in peer.answers] == [b"body"] * 3 + [b"OK"]
        assert app.seen[0].header("x-kept") == "yes"

    async def test_an_upgrade_that_closes(self, peer):
        peer.send(request("/echo", "Connection: Upgrade, close", "Upgrade: h2c", method="POST", body=b"body"))
        assert peer.answer.body == b"body"
        assert peer.transport.state == "closed"

    async def test_eof_between_requests_closes(self, peer):
        peer.get("/ping").eof()
        assert peer.transport.state == "closed"

    async def test_half_closed_peer_gets_its_answers(self, peer, app):
        peer.send(request("/pending", method="POST") + request("/ping")).eof()
        assert peer.transport.state == "open"
        app.pending[0].complete(text_response("late"))
        assert [answer.body for answer in peer.answers] == [b"late", b"OK"]
        assert peer.transport.state == "closed"


class TestLimits:
    async def test_body_limit_by_content_length_before_the_body(self, peer):
        peer.send(b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Length: 101\r\n\r\n")
        answer = peer.answer
        assert (answer.status, answer.message) == (413, "MSG_TOO_BIG")
        assert answer.headers["Connection"] == "close"
        assert peer.transport.has_sent_eof
        peer.send(b"x" * 101)  # dropped, but read: closing now would reset the connection under the answer
        assert peer.statuses == [413]
        peer.eof()
        assert peer.transport.state == "closed"

    async def test_body_of_exactly_the_limit(self, peer):
        assert peer.get("/echo", method="POST", body=b"x" * 100).answer.body == b"x" * 100

    async def test_body_limit_of_a_chunked_body(self, peer):
        peer.send(chunked("/echo", b"x" * 60, b"x" * 40))
        assert peer.answer.body == b"x" * 100
        peer.send(chunked("/echo", b"x" * 60, b"x" * 41))
        assert peer.statuses == [200, 413]
        assert peer.transport.has_sent_eof

    async def test_default_body_limit(self, peer):
        peer.send(b"GET /ping HTTP/1.1\r\n" + HOST + b"Content-Length: 65537\r\n\r\n")
        assert (peer.answer.status, peer.answer.body) == (413, b"BODY_TOO_BIG")

    async def test_chunk_extensions_and_trailers_are_bounded(self, server):
        for junk in (b"1;" + b"e" * 60_000, b"0\r\nT: " + b"t" * 60_000):
            peer = Peer(server).send(b"POST /echo HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n" + junk)
            for _ in range(20):
                peer.send(b"z" * 60_000)
            assert peer.statuses == [413]

    async def test_trailers_are_not_headers(self, peer, app):
        peer.send(chunked("/echo", b"x", trailer=b"Host: evil\r\nX-Admin: yes\r\n"))
        assert app.seen[0].header("host") == "localhost"
        assert app.seen[0].header("x-admin") == ""

    async def test_url_limit(self, server):
        target = "/query?a=" + "x" * (URL_SIZE_MAX - len("/query?a="))
        assert Peer(server).get(target).answer.status == 200
        peer = Peer(server).get(target + "x")
        assert peer.statuses == [414]
        assert peer.transport.has_sent_eof

    async def test_header_size_limit(self, server):
        value = "x" * (HEADER_SIZE_MAX - 1)
        assert Peer(server).get("/ping", "a: " + value).answer.status == 200
        assert Peer(server).get("/ping", "a: x" + value).statuses == [431]

    async def test_header_count_limit(self, server):
        lines = [f"h{i}: x" for i in range(HEADER_COUNT_MAX - 1)]
        assert Peer(server).get("/ping", *lines).answer.status == 200
        assert Peer(server).get("/ping", *lines, "one: more").statuses == [431]

    @pytest.mark.parametrize("start", [b"GET /", b"GET /ping HTTP/1.1\r\nA: ", b"GET /ping HTTP/1.1\r\n" + HOST + b"A"])
    async def test_an_endless_head_is_cut_off(self, peer, start):
        peer.send(start)
        for _ in range(100):
            peer.send(b"x" * 10_000)
        assert peer.statuses in ([414], [431])
        assert peer.transport.has_sent_eof

    async def test_many_pipelined_requests_before_a_partial_one_are_no_long_head(self, peer):
        peer.send(request("/ping") * 5000 + b"GET /pi")
        peer.send(b"ng HTTP/1.1\r\n" + HOST + b"\r\n")
        assert peer.statuses == [200] * 5001

    async def test_connection_count(self, app):
        server = HttpServer(app.router, clock=ManualClock(), connections_max=2)
        first, _second, third = Peer(server), Peer(server), Peer(server)
        assert third.answer.status == 503
        assert third.transport.has_sent_eof
        third.eof()
        first.transport.close()
        assert Peer(server).get("/ping").statuses == [200]


class TestExpect:
    HEAD = b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n"

    async def test_the_body_is_invited(self, peer):
        peer.send(self.HEAD)
        assert peer.statuses == [100]
        peer.send(b"hi")
        assert peer.statuses == [100, 200]

    async def test_a_body_too_big_is_not_invited(self, peer):
        peer.send(self.HEAD.replace(b": 2", b": 200"))
        assert peer.statuses == [413]

    async def test_the_invitation_keeps_its_turn(self, peer, app):
        peer.send(request("/pending", method="POST") + self.HEAD)
        assert peer.statuses == []
        app.pending[0].complete(text_response("first"))
        assert peer.statuses == [200, 100]
        peer.send(b"hi")
        assert peer.statuses == [200, 100, 200]

    async def test_other_expectations(self, peer):
        peer.send(self.HEAD.replace(b"100-continue", b"more"))
        assert peer.statuses == [417]


class TestOrder:
    async def test_coroutine_then_function(self, peer, app):
        peer.send(request("/slow") + request("/ping"))
        await settle()
        assert peer.statuses == []
        app.gate.set()
        await settle()
        assert [answer.body for answer in peer.answers] == [b"slow", b"OK"]

    async def test_coroutine_errors(self, peer):
        peer.get("/slow/fail")
        await settle()
        assert (peer.answer.status, peer.answer.message) == (503, "EXITING")

    async def test_pending_response(self, peer, app):
        peer.get("/pending", method="POST").get("/pending", method="POST")
        assert len(app.pending) == 1  # one after the other
        app.pending[0].complete(text_response("a"))
        app.pending[1].fail(HttpError(503, "EXITING"))
        assert peer.statuses == [200, 503]

    async def test_pending_response_known_at_once(self, app):
        def known(_request):
            answer = PendingResponse()
            answer.complete(text_response("now"))
            return answer

        app.router.add("GET", "/known", known)
        peer = Peer(HttpServer(app.router, clock=ManualClock())).send(request("/known") * 3000)
        assert peer.statuses == [200] * 3000

    async def test_pending_response_fails_with_any_exception(self, peer, app, caplog):
        peer.get("/pending", method="POST")
        app.pending[0].fail(OSError("disk"))
        assert peer.answer.message == "INTERNAL_ERROR"
        assert "failed" in caplog.text

    async def test_answers_after_the_peer_left(self, peer, app):
        peer.get("/pending", method="POST").transport.abort()
        app.pending[0].complete(text_response("nobody there"))
        assert peer.transport.written == b""

    @pytest.mark.parametrize(("path", "cancelled"), [("/slow", 0), ("/slow/look", 1)])
    async def test_a_look_ends_when_the_peer_leaves(self, server, peer, app, path, cancelled):
        peer.get(path).get(path)
        await settle()
        peer.transport.abort()
        await settle()
        assert app.cancelled == cancelled
        app.gate.set()
        await settle()
        assert peer.transport.written == b""
        assert "tasks=0" in server.describe()

    async def test_a_refused_request_waits_for_its_turn(self, peer, app):
        peer.send(request("/pending", method="POST") + b"garbage\r\n\r\n")
        assert peer.statuses == []
        app.pending[0].complete(text_response("first"))
        assert peer.statuses == [200, 400]
        assert peer.transport.has_sent_eof

    async def test_the_queue_stops_reading(self, peer, app):
        peer.get("/pending", method="POST")
        for _ in range(QUEUE_COUNT_MAX):
            peer.get("/ping")
        assert not peer.transport.is_paused
        peer.get("/ping")
        assert peer.transport.is_paused
        app.pending[0].complete(text_response("first"))
        assert not peer.transport.is_paused
        assert len(peer.statuses) == QUEUE_COUNT_MAX + 2

    async def test_a_peer_that_does_not_read_stops_the_work(self, server):
        peer = Peer(server, window=100_000)
        peer.send(request("/big") * 50)
        # 64 KiB are gathered before a write, and one write may be on top of the window.
        assert 3 <= len(peer.answers) <= 8
        assert peer.transport.is_paused
        peer.transport.drain()
        assert peer.statuses == [200] * 50
        assert not peer.transport.is_paused


class TestBefore:
    async def test_it_answers_instead(self, app):
        blocked = Response(403, b'{"message": "TLS_REQUIRED", "https_port": 1}')
        server = HttpServer(
            app.router, clock=ManualClock(), before=lambda r: None if r.header("token") == "t" else blocked
        )
        peer = Peer(server)
        peer.get("/echo", method="POST", body=b"x" * 50).get("/nope").get("/ping", "Token: t")
        assert peer.statuses == [403, 403, 200]
        assert app.seen == []
        peer = Peer(server).send(b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Length: 9999999\r\n\r\n")
        assert peer.statuses == [403]
        assert peer.transport.has_sent_eof

    async def test_its_exceptions_are_answered(self, app, caplog):
        def before(_request):
            raise ZeroDivisionError

        assert Peer(HttpServer(app.router, clock=ManualClock(), before=before)).get("/ping").answer.status == 500
        assert "failed" in caplog.text


class TestDeadlines:
    def ticks(self, server, count):
        for _ in range(count):
            server.on_tick()

    async def test_silent_connection(self, server, peer):
        self.ticks(server, 5)
        assert peer.transport.state == "open"
        self.ticks(server, 1)
        assert peer.transport.state == "closed"

    async def test_slow_request(self, server, peer):
        peer.get("/ping").send(b"GET /pi")
        self.ticks(server, 5)
        peer.send(b"ng HTTP/1.1\r\n")  # a byte now and then does not help
        assert peer.statuses == [200]
        self.ticks(server, 1)
        assert peer.statuses == [200, 408]
        assert peer.transport.has_sent_eof

    async def test_slow_body(self, server, peer):
        peer.send(b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Length: 10\r\n\r\n123")
        self.ticks(server, 6)
        assert peer.statuses == [408]

    async def test_idle_connection(self, server, peer):
        peer.get("/ping")
        self.ticks(server, 10)
        assert peer.transport.state == "open"
        self.ticks(server, 1)
        assert peer.transport.state == "closed"

    async def test_running_handlers_are_waited_for(self, server, peer, app):
        peer.get("/pending", method="POST")
        self.ticks(server, 100)
        app.pending[0].complete(text_response("late"))
        assert peer.statuses == [200]
        self.ticks(server, 10)
        assert peer.transport.state == "open"

    async def test_peer_that_never_reads(self, server):
        peer = Peer(server, window=10)
        peer.get("/ping")
        self.ticks(server, 30)
        assert peer.transport.state == "open"
        self.ticks(server, 1)
        assert peer.transport.state == "aborted"

    async def test_peer_that_reads_slowly(self, server):
        peer = Peer(server, window=100_000)
        peer.send(request("/big") * 50)
        self.ticks(server, 20)
        peer.transport.window = 400_000
        peer.protocol.resume_writing()
        self.ticks(server, 30)
        assert peer.transport.state == "open"
        self.ticks(server, 1)
        assert peer.transport.state == "aborted"

    async def test_refused_peer_that_neither_reads_nor_closes(self, peer, monkeypatch):
        monkeypatch.setattr("flintmq.net.linger.LINGER_S", 0.01)
        peer.send(b"garbage\r\n\r\n")
        assert peer.transport.state == "open"
        await asyncio.sleep(0.05)
        assert peer.transport.state == "aborted"


class TestClose:
    async def test_idle_connections_are_closed_at_once(self, server, peer):
        peer.get("/ping")
        await server.close()
        assert peer.transport.state == "closed"
        assert server.connections == {}

    async def test_running_handlers_end(self, server, peer, app):
        peer.get("/slow")
        await settle()
        closing = asyncio.create_task(server.close())
        await settle()
        assert not closing.done()
        app.gate.set()
        await closing
        assert peer.answer.body == b"slow"
        assert peer.answer.headers["Connection"] == "close"

    async def test_what_waits_behind_the_last_answer_is_dropped(self, server, peer, app):
        peer.send(request("/pending", method="POST") + request("/echo", method="POST", body=b"x"))
        closing = asyncio.create_task(server.close())
        await settle()
        app.pending[0].complete(text_response("last"))
        await closing
        assert peer.answer.body == b"last"
        assert app.seen == []

    async def test_what_comes_with_the_last_request_is_dropped(self, server, peer, app):
        peer.send(b"GET /pi")
        closing = asyncio.create_task(server.close())
        await settle()
        peer.send(b"ng HTTP/1.1\r\nHost: h\r\n\r\n" + request("/echo", method="POST", body=b"x"))
        await closing
        assert peer.answer.headers["Connection"] == "close"
        assert app.seen == []

    async def test_handlers_that_do_not_end_are_cancelled(self, server, peer, app):
        peer.get("/slow")
        await settle()
        await server.close(deadline_s=0.01)
        await settle()
        assert app.cancelled == 1
        assert peer.transport.state == "aborted"

    async def test_a_handler_whose_peer_left_still_ends(self, server, peer, app):
        peer.get("/slow").transport.abort()
        closing = asyncio.create_task(server.close())
        await settle()
        assert not closing.done()
        app.gate.set()
        await closing
        assert app.cancelled == 0

    async def test_describe(self, server, peer, app):
        peer.get("/pending", method="POST")
        text = server.describe()
        assert "connections=1" in text
        assert "/pending" in text


class TestOrigins:
    """What the rule in test_origin.py says comes before everything else, and changes nothing for others."""

    ELSEWHERE = "Origin: https://evil.example"

    async def test_a_page_from_elsewhere_reaches_no_handler(self, app, peer):
        answer = peer.get("/echo", self.ELSEWHERE, method="POST", body=b"x").answer
        assert answer.status == 403 and "--http-allow-origin=https://evil.example" in answer.message
        assert answer.headers["Content-Type"].startswith("application/json")
        assert peer.get("/ping", self.ELSEWHERE).answers[1].body.startswith(b"FORBIDDEN_ORIGIN: Origin ")
        assert [each.status for each in peer.get("/nowhere", self.ELSEWHERE).answers] == [403] * 3
        assert app.seen == [] and peer.transport.state == "open"

    async def test_it_comes_before_the_other_checks(self, app):
        asked: list[Request] = []

        def asking(request: Request) -> None:
            asked.append(request)

        server = HttpServer(app.router, before=asking)
        peer = Peer(server).get("/ping", self.ELSEWHERE)
        assert peer.statuses == [403] and asked == []
        assert peer.get("/ping").statuses == [403, 200] and len(asked) == 1

    async def test_a_large_body_is_not_waited_for(self, app, peer):
        peer.send(b"POST /echo HTTP/1.1\r\n" + HOST + b"Origin: null\r\nContent-Length: 900000\r\n\r\n")
        assert peer.statuses == [403] and app.seen == []

    async def test_host_counts_where_only_this_host_can_reach(self, app, server):
        rebound = b"GET /ping HTTP/1.1\r\nHost: evil.example:4151\r\n\r\n"
        near: tuple[object, ...] = (("127.0.0.1", 4151), ("::1", 4151, 0, 0))
        far: tuple[object, ...] = (("10.0.0.1", 4151), "/run/nsqd.sock", None)
        for sockname in near:
            peer = Peer(server, sockname=sockname).get("/ping").send(rebound).get("/ping").send(rebound)
            assert peer.statuses == [200, 403, 200, 403]
        for sockname in far:
            assert Peer(server, sockname=sockname).send(rebound).statuses == [200]

    async def test_an_allowed_page_may_read_every_answer(self, app):
        server = HttpServer(app.router, origins=Origins(["https://wiki.example"]))
        peer = Peer(server).get("/ping", "Origin: https://wiki.example").get("/nowhere", "Origin: https://wiki.example")
        peer.get("/ping")
        first, second, other = peer.answers
        assert (first.status, second.status, other.status) == (200, 404, 200)
        for each in (first, second):
            assert each.headers["Access-Control-Allow-Origin"] == "https://wiki.example"
            assert each.headers["Vary"] == "Origin"
        assert "Access-Control-Allow-Origin" not in other.headers and "Vary" not in other.headers

    async def test_a_preflight_needs_no_token(self, app):
        server = HttpServer(
            app.router, before=lambda _: plain_response("who?", 401), origins=Origins(["https://wiki.example"])
        )
        lines = ["Origin: https://wiki.example", "Access-Control-Request-Method: PUT"]
        lines.append("Access-Control-Request-Headers: authorization,content-type")
        answer = Peer(server).get("/config/x", *lines, method="OPTIONS").answer
        assert answer.status == 200 and "PUT" in answer.headers["Access-Control-Allow-Methods"]
        assert answer.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        assert Peer(server).get("/config/x", lines[0], method="PUT").statuses == [401]
        assert Peer(server).get("/config/x", self.ELSEWHERE, *lines[1:], method="OPTIONS").statuses == [403]


async def test_over_tcp_with_keep_alive_and_port_zero(app):
    server = HttpServer(app.router)
    address = (await server.start("localhost:0")).address
    assert address is not None
    host, port = address
    assert host == "127.0.0.1"
    reader, writer = await asyncio.open_connection(host, port)
    for _ in range(2):
        writer.write(request("/ping"))
        assert b" 200 OK\r\n" in await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(2) == b"OK"
    await server.close()
    assert await reader.read() == b""
    writer.close()
    with pytest.raises(OSError):
        await asyncio.open_connection(host, port)


async def test_over_tcp_the_413_survives_a_body_still_being_sent(app):
    server = HttpServer(app.router)
    address = (await server.start("127.0.0.1:0")).address
    assert address is not None
    host, port = address
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Length: 3000000\r\n\r\n")
    for _ in range(30):
        writer.write(b"x" * 100_000)
        await asyncio.sleep(0)
    assert b"MSG_TOO_BIG" in await reader.read()
    writer.close()
    await server.close()


async def test_over_a_unix_socket(app, tmp_path):
    server = HttpServer(app.router)
    await server.start(str(tmp_path / "s"))
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
    writer.write(request("/echo", method="POST", body=b"x"))
    assert b" 200 OK\r\n" in await reader.readuntil(b"\r\n\r\n")
    assert app.seen[0].remote_address == "@"
    writer.close()
    await server.close()


def test_public_names():
    for name in http_server.__all__:
        assert hasattr(http_server, name)
