"""Answers of the HTTP server that come piece by piece: bounded by their reader, ended with it, and at a shutdown."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.net.test_http_server import HOST, Peer, request

from flintmq.net import http_server
from flintmq.net.http_messages import JSON_TYPE, StreamingResponse, plain_response
from flintmq.net.http_server import HttpServer, Request, Router
from flintmq.testing import ManualClock


class Source:
    """A stream of what is put into ``pieces``."""

    def __init__(self) -> None:
        self.pieces: list[bytes | Exception | None] = []
        self.closed_count = 0
        self.asked_count = 0
        self.response = StreamingResponse(self.next_piece, self.closed, (JSON_TYPE,))
        router = Router()
        router.add("POST", "/now", lambda _: self.response)
        router.add("POST", "/later", self.later)
        router.add("GET", "/ping", lambda _: plain_response("OK"))
        self.clock = ManualClock()
        self.server = HttpServer(router, clock=self.clock)

    def next_piece(self) -> bytes | None:
        self.asked_count += 1
        self.clock.advance(100_000)
        piece = self.pieces.pop(0) if self.pieces else b""
        if isinstance(piece, Exception):
            raise piece
        return piece

    def closed(self) -> None:
        self.closed_count += 1

    async def later(self, _request: Request) -> StreamingResponse:
        await asyncio.sleep(0)
        return self.response

    def say(self, *pieces: bytes | Exception | None) -> None:
        self.pieces.extend(pieces)
        self.response.wake()


def body_of(peer: Peer) -> bytes:
    head, _, body = peer.transport.written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\n")
    assert b"\r\nTransfer-Encoding: chunked\r\n" in head
    assert b"Connection: close" in head and b"Content-Length" not in head
    return body


@pytest.mark.parametrize("target", ["/now", "/later"])
async def test_pieces_are_sent_as_they_come(target: str):
    source = Source()
    source.pieces = [b"one"]
    peer = Peer(source.server).get(target, method="POST")
    await asyncio.sleep(0.01)
    assert body_of(peer) == b"3\r\none\r\n"
    source.say(b"x" * 20)
    assert body_of(peer).endswith(b"14\r\n" + b"x" * 20 + b"\r\n")
    source.say(b"end", None)
    assert body_of(peer).endswith(b"3\r\nend\r\n0\r\n\r\n")
    assert peer.transport.state == "closed" and source.closed_count == 1
    source.response.wake()  # too late, and no harm


async def test_nothing_gathers_for_a_reader_that_does_not_read():
    source = Source()
    peer = Peer(source.server, window=300).get("/now", method="POST")
    source.say(*[b"x" * 100] * 50)
    assert len(source.pieces) > 40, "it was asked for no more than fits"
    for _ in range(5):
        source.response.wake()
    assert len(source.pieces) > 40
    left = len(source.pieces)
    peer.transport.drain()
    await asyncio.sleep(0.01)
    assert not source.pieces and left
    assert body_of(peer).count(b"x" * 100) == 50


async def test_a_reader_that_never_reads_is_closed():
    source = Source()
    peer = Peer(source.server, window=300).get("/now", method="POST")
    source.say(*[b"x" * 100] * 50)
    for _ in range(int(http_server.WRITE_DEADLINE_S) + 1):
        source.server.on_tick()
    assert peer.transport.state == "aborted" and source.closed_count == 1


async def test_a_silent_stream_has_no_deadline():
    source = Source()
    peer = Peer(source.server).get("/now", method="POST")
    for _ in range(1000):
        source.server.on_tick()
    source.say(b"late")
    assert body_of(peer) == b"4\r\nlate\r\n"


async def test_a_long_stream_lets_others_go_first():
    source = Source()
    peer = Peer(source.server).get("/now", method="POST")
    source.say(*[b"x"] * 100)  # each takes a tenth of a slice
    assert 80 < len(source.pieces) < 100
    await asyncio.sleep(0.05)
    assert not source.pieces and body_of(peer).count(b"1\r\nx\r\n") == 100


@pytest.mark.parametrize("how", ["lost", "eof"])
async def test_whoever_leaves_is_forgotten(how: str):
    source = Source()
    peer = Peer(source.server).get("/now", method="POST")
    if how == "lost":
        peer.transport.abort()
    else:
        peer.eof()
    assert source.closed_count == 1
    source.say(b"nobody reads this")
    assert source.pieces


async def test_what_is_asked_behind_a_stream_waits_and_is_bounded():
    source = Source()
    peer = Peer(source.server).get("/now", method="POST")
    for _ in range(100):
        peer.get("/ping")
    assert peer.transport.is_paused
    assert body_of(peer) == b""
    source.say(None)
    assert body_of(peer) == b"0\r\n\r\n" and peer.transport.state == "closed"


async def test_an_error_cuts_the_answer_off(caplog: pytest.LogCaptureFixture):
    source = Source()
    peer = Peer(source.server).get("/now", method="POST")
    source.say(b"one", ValueError("planted"))
    assert peer.transport.state == "aborted" and source.closed_count == 1
    assert not body_of(peer).endswith(b"0\r\n\r\n"), "an end would say that this was all"
    assert "planted" in caplog.text


async def test_a_shutdown_ends_it():
    source = Source()
    peer = Peer(source.server).get("/now", method="POST")
    source.say(b"one")
    await asyncio.wait_for(source.server.close(), 30)
    assert body_of(peer) == b"3\r\none\r\n0\r\n\r\n"
    assert peer.transport.state == "closed" and source.closed_count == 1


async def test_http_1_0_has_no_chunks():
    source = Source()
    peer = Peer(source.server).send(b"POST /now HTTP/1.0\r\n" + HOST + b"\r\n")
    assert peer.answer.status == 505 and "HTTP/1.1" in peer.answer.message
    assert peer.transport.state == "closed" and source.closed_count == 1


async def test_a_coroutine_whose_client_left_begins_nothing():
    source = Source()
    peer = Peer(source.server).send(request("/later", method="POST"))
    peer.transport.abort()
    await asyncio.sleep(0.01)
    assert source.closed_count == 1 and source.asked_count == 0
