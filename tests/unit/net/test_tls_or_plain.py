"""An HTTPS port and who asks there in clear: told to use TLS, whatever the pieces. Garbage is told nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from tests.certificates import Certificates

from flintmq.net import layers
from flintmq.net.http_client import HttpClient
from flintmq.net.http_exchange import Request, tls_port
from flintmq.net.http_server import HttpServer, Response, Router, plain_response
from flintmq.net.tls import ServerTls
from flintmq.net.tls_or_plain import tls_required

PATIENCE_S = 60
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


class Server:
    """An HTTPS server; ``asked`` counts the requests that reached it."""

    def __init__(self, certificates: Certificates) -> None:
        self.asked = 0
        router = Router()
        router.add("GET", "/ping", self._ping)
        self.http = HttpServer(router)
        self._tls = ServerTls(certificates.server.cert, certificates.server.key)

    def _ping(self, _request: object) -> Response:
        self.asked += 1
        return plain_response("OK")

    @contextlib.asynccontextmanager
    async def running(self, address: str = "127.0.0.1:0") -> AsyncIterator[tuple[str, int]]:
        async with asyncio.timeout(PATIENCE_S):
            listener = await self.http.start(address, self._tls.engines())
            try:
                yield listener.address or (listener.name, 0)
            finally:
                await self.http.close()


async def said(address: tuple[str, int], *pieces: bytes, is_unix: bool = False) -> bytes:
    """What is answered until the end of the stream."""
    connect = asyncio.open_unix_connection(address[0]) if is_unix else asyncio.open_connection(*address)
    reader, writer = await connect
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await reader.read()
    finally:
        writer.close()


def opened(data: bytes) -> tuple[bytes, dict[str, object]]:
    head, _, body = data.partition(b"\r\n\r\n")
    return head, msgspec.json.decode(body)


@pytest.mark.parametrize("method", METHODS)
async def test_a_request_in_clear_is_told_where_tls_is(certificates: Certificates, method: str):
    server = Server(certificates)
    async with server.running() as address:
        answer = await said(address, f"{method} /ping HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer x\r\n\r\n".encode())
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 403 Forbidden\r\n") and b"Connection: close" in head
        assert b"Content-Type: application/json; charset=utf-8" in head and b"X-NSQ-Content-Type: nsq" in head
        wanted = b'{"message": "TLS_REQUIRED", "https_port": %d}' % address[1]
        assert b"Content-Length: %d" % len(wanted) in head
        assert body == (b"" if method == "HEAD" else wanted)
        assert server.asked == 0 and not server.http.connections


async def test_our_clients_follow_it(certificates: Certificates):
    server, client = Server(certificates), HttpClient()
    async with server.running() as address:
        refused = await client.ask(Request.to("GET", f"http://127.0.0.1:{address[1]}/ping"), timeout_s=PATIENCE_S)
        assert (refused.status, tls_port(refused.body)) == (403, address[1])
        url, context = f"https://127.0.0.1:{tls_port(refused.body)}/ping", certificates.client_context()
        answer = await client.ask(Request.to("GET", url), timeout_s=PATIENCE_S, context=context)
        assert (answer.status, answer.body, server.asked) == (200, b"OK", 1)


async def test_it_may_come_in_pieces_and_with_a_body_that_nobody_reads(certificates: Certificates):
    server = Server(certificates)
    async with server.running() as address:
        pieces = [bytes([byte]) for byte in b"POST /pub HTTP/1.1\r\nHost: a\r\nContent-Length: 300000\r\n\r\n"]
        with contextlib.suppress(ConnectionError):  # what the answer does not wait for need not be taken
            head, body = opened(await said(address, *pieces, b"x" * 300_000))
            assert b" 403 " in head and body["https_port"] == address[1]
        assert opened(await said(address, b"P", b"OS", b"T /pub"))[1]["message"] == "TLS_REQUIRED"


async def test_at_a_unix_socket_there_is_no_port(certificates: Certificates, tmp_path: Path):
    server = Server(certificates)
    async with server.running(str(tmp_path / "https")) as address:
        answer = await said(address, b"GET /ping HTTP/1.1\r\n\r\n", is_unix=True)
        assert opened(answer)[1] == {"message": "TLS_REQUIRED", "https_port": 0}
        assert tls_port(tls_required(str(tmp_path)).body) == 0


@pytest.mark.parametrize(
    "data", [b"GET ping", b"get / HTTP/1.1\r\n\r\n", b"  V2", b"hello", b"\x00" * 9, b"PRI * HTTP/2.0"]
)
async def test_what_is_neither_is_told_nothing(
    certificates: Certificates, data: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(layers.LayeredTransport.start_tls, "__defaults__", (0.2,))
    server = Server(certificates)
    async with server.running() as address:
        with contextlib.suppress(ConnectionError):
            assert b"HTTP" not in await said(address, data)
        assert server.asked == 0


@pytest.mark.parametrize("data", [b"", b"G", b"POST"])
async def test_five_bytes_have_the_time_of_a_handshake(
    certificates: Certificates, data: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(layers.LayeredTransport.start_tls, "__defaults__", (0.2,))
    async with Server(certificates).running() as address:
        assert await said(address, data) == b""


@pytest.mark.parametrize("leave", [asyncio.StreamWriter.close, lambda writer: writer.transport.abort()])
async def test_who_leaves_at_once(
    certificates: Certificates, caplog: pytest.LogCaptureFixture, leave: Callable[[asyncio.StreamWriter], None]
):
    server = Server(certificates)
    async with server.running() as address:
        for data in (b"GE", b"GET / HTTP/1.1\r\n\r\n"):
            _, writer = await asyncio.open_connection(*address)
            writer.write(data)
            await writer.drain()
            leave(writer)
        assert opened(await said(address, b"GET / HTTP/1.1\r\n\r\n"))[1]["https_port"] == address[1]
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]
