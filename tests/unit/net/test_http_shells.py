"""One suite for both shells of an HTTP request, asyncio and blocking, against sockets that answer what a test wants."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Certificates
from tests.parameters import filled

from flintmq.net import http_blocking
from flintmq.net.http_client import HttpClient
from flintmq.net.http_exchange import Answer, NoAnswer, Request
from flintmq.net.tls import client_context

PATIENCE_S = 30.0
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"
REDIRECT = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"

Serve = Callable[[socket.socket], object]
Ask = Callable[..., Awaitable[Answer]]


async def on_asyncio(request: Request, *, timeout_s: float = PATIENCE_S, **options: Any) -> Answer:
    """In a loop of its own, so that a test may wait for its server's threads."""
    return await asyncio.to_thread(asyncio.run, HttpClient().ask(request, timeout_s=timeout_s, **options))


async def on_blocking(request: Request, *, timeout_s: float = PATIENCE_S, **options: Any) -> Answer:
    return await asyncio.to_thread(http_blocking.ask, request, timeout_s=timeout_s, time=time.monotonic, **options)


@pytest.fixture(params=[on_asyncio, on_blocking], ids=["asyncio", "blocking"])
def ask(request: pytest.FixtureRequest) -> Ask:
    return request.param


@contextmanager
def serving(serve: Serve, on: socket.socket | None = None) -> Iterator[str]:
    """Serve each connection in a thread of its own; gives the URL."""
    threads: list[threading.Thread] = []

    def handle(connection: socket.socket) -> None:
        with connection:
            connection.settimeout(PATIENCE_S)
            try:
                serve(connection)
            except OSError:
                pass  # the client has left

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=handle, args=(connection,), daemon=True))
            threads[-1].start()

    listening = on or socket.create_server(("127.0.0.1", 0))
    with listening:
        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        name = listening.getsockname()
        try:
            yield f"http://{name[0]}:{name[1]}" if isinstance(name, tuple) else "http://localhost"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            accepting.join(PATIENCE_S)
            for thread in threads:
                thread.join(PATIENCE_S)


def read_request(connection: socket.socket) -> bytes:
    received = b""
    while b"\r\n\r\n" not in received:
        if not (data := connection.recv(65536)):
            raise ConnectionResetError
        received += data
    return received


def answering(answer: bytes, requests: list[bytes] | None = None, body_bytes: int = 0) -> Serve:
    def serve(connection: socket.socket) -> None:
        received = read_request(connection)
        if requests is not None:
            requests.append(received)
        connection.sendall(answer + filled(body_bytes))

    return serve


def silent(connection: socket.socket) -> None:
    """Say nothing until the client leaves."""
    while connection.recv(65536):
        pass


def dripping(connection: socket.socket) -> None:
    """Send a byte of a body now and then, so that no single wait is long."""
    read_request(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while True:
        connection.sendall(b"x")
        time.sleep(0.01)


# -- answers -----------------------------------------------------------------------------------------------------------


async def test_an_answer(ask: Ask):
    requests: list[bytes] = []
    with serving(answering(OK, requests)) as url:
        status, headers, body = await ask(Request.to("POST", f"{url}/a?b=c", body=b"xyz"))
    assert (status, headers["content-length"], body) == (200, "3", b"abc")
    assert requests[0].startswith(b"POST /a?b=c HTTP/1.1\r\nHost: 127.0.0.1:")
    assert requests[0].endswith(b"\r\n\r\nxyz")


async def test_any_status_is_an_answer_and_a_redirect_is_not_followed(ask: Ask):
    with serving(answering(REDIRECT)) as url:
        assert (await ask(Request.to("GET", url))).status == 302


async def test_a_body_until_the_end(ask: Ask):
    with serving(answering(b"HTTP/1.1 404 No\r\n\r\nabc")) as url:
        assert (await ask(Request.to("GET", url)))[::2] == (404, b"abc")


async def test_a_large_request_and_a_large_answer(ask: Ask):
    sent, body = os.urandom(3_000_000), os.urandom(3_000_000)

    def serve(connection: socket.socket) -> None:
        received = 0
        while received < len(sent):
            received += len(connection.recv(1 << 20))
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 3000000\r\n\r\n" + body)
        silent(connection)

    with serving(serve) as url:
        assert (await ask(Request.to("POST", url, body=sent), body_bytes_max=3_000_000)).body == body
        with pytest.raises(NoAnswer, match="larger than 2999999 bytes"):
            await ask(Request.to("POST", url, body=sent), body_bytes_max=2_999_999)


async def test_proxies_of_the_environment_are_not_used(ask: Ask, monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with serving(answering(OK)) as url:
        assert (await ask(Request.to("GET", url))).status == 200


# -- none --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("serve", "reason"),
    [
        (answering(b""), "closed before the answer was complete"),
        (lambda connection: None, "closed before the answer was complete"),
        (lambda connection: connection.sendall(b"220 mail\r\n"), "the answer is not HTTP|closed before the answer"),
        (answering(OK[:-1]), "closed before the answer was complete"),
        (answering(b"220 mail\r\n"), "the answer is not HTTP"),
        (answering(b"\0\0\0\x0eE_BAD_PROTOCOL"), "it is of NSQ's TCP protocol: name the HTTP port, 4161"),
        (answering(b"HTTP/1.1 101 X\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n"), "changes to another protocol"),
        (answering(b"HTTP/1.1 200 OK\r\nX: ", body_bytes=200_000), "head of the answer is larger than 65536 bytes"),
        (answering(b"HTTP/1.1 200 OK\r\n\r\n", body_bytes=1024 * 1024 + 1), "larger than 1048576 bytes"),
    ],
    ids=["nothing", "leaves", "speaks first", "cut", "mail", "NSQ", "upgrade", "head", "body"],
)
async def test_what_is_no_answer(ask: Ask, serve: Serve, reason: str):
    with serving(serve) as url, pytest.raises(NoAnswer, match=reason) as caught:
        await ask(Request.to("GET", url))
    assert url.endswith(caught.value.address)


@pytest.mark.parametrize("serve", [silent, dripping])
async def test_the_deadline_is_for_all_of_it(ask: Ask, serve: Serve):
    began = time.monotonic()
    with serving(serve) as url, pytest.raises(NoAnswer, match=r"no answer within 0\.2 s"):
        await ask(Request.to("GET", url), timeout_s=0.2)
    assert 0.2 <= time.monotonic() - began < PATIENCE_S / 2, "the server was left alone, and so it ended"


async def test_a_status_that_came_in_time_is_told_with_what_did_not(ask: Ask):
    with serving(dripping) as url, pytest.raises(NoAnswer, match="no answer within 2 s") as caught:
        await ask(Request.to("GET", url), timeout_s=2)
    assert caught.value.status == 200


async def test_a_peer_that_takes_nothing(ask: Ask):
    release = threading.Event()
    with serving(lambda _: release.wait(PATIENCE_S)) as url:
        with pytest.raises(NoAnswer, match=r"no answer within 0\.2 s"):
            await ask(Request.to("POST", url, body=bytes(20_000_000)), timeout_s=0.2)
        release.set()


async def test_nobody_there(ask: Ask):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(NoAnswer, match=f"127.0.0.1:{port} failed: Connection refused") as caught:
        await ask(Request.to("GET", f"http://127.0.0.1:{port}/"))
    assert isinstance(caught.value.error, ConnectionRefusedError)


async def test_a_name_that_is_none(ask: Ask, monkeypatch: pytest.MonkeyPatch):
    def unknown(host: str, *_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(NoAnswer, match="Name or service not known") as caught:
        await ask(Request.to("GET", "http://no.such.host.invalid/"))
    assert isinstance(caught.value.error, socket.gaierror)


async def test_every_address_of_a_name_is_tried(ask: Ask, monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        dead = unused.getsockname()[1]
    with serving(answering(OK)) as url:
        port = int(url.rpartition(":")[2])
        real = socket.getaddrinfo
        found = [*real("127.0.0.2", port, type=socket.SOCK_STREAM), *real("127.0.0.1", port, type=socket.SOCK_STREAM)]
        monkeypatch.setattr(
            socket,
            "getaddrinfo",
            lambda host, *args, **options: found if host == "two" else real(host, *args, **options),
        )
        assert (await ask(Request.to("GET", f"http://two:{port}/"))).status == 200
        found[:] = [(*each[:4], (each[4][0], dead)) for each in found]
        with pytest.raises(NoAnswer, match=r"two:.* failed: Connection refused"):
            await ask(Request.to("GET", f"http://two:{dead}/"))


async def test_a_unix_socket(ask: Ask, tmp_path: Path):
    path = str(tmp_path / "s")
    requests: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        with serving(answering(OK, requests), listening) as url:
            request = Request.to("GET", f"{url}/ping")
            request = Request("GET", request.endpoint._replace(unix_path=path), request.target)
            assert (await ask(request)).status == 200
    assert requests[0].startswith(b"GET /ping HTTP/1.1\r\nHost: localhost:80\r\n")
    with pytest.raises(NoAnswer, match=f"{path} failed: Connection refused"):
        await ask(request)


# -- TLS ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def secured(certificates: Certificates, serve: Serve, says_goodbye: bool = True) -> Serve:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server.cert, certificates.server.key)

    def serve_secured(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True, suppress_ragged_eofs=True) as wrapped:
            serve(wrapped)
            if says_goodbye:
                wrapped.unwrap()

    return serve_secured


async def test_tls(ask: Ask, certificates: Certificates):
    trusting = client_context(certificates.ca)
    with serving(secured(certificates, answering(OK))) as url:
        url = url.replace("http://127.0.0.1", "https://localhost")
        assert (await ask(Request.to("GET", url), context=trusting)).body == b"abc"
        with pytest.raises(NoAnswer, match="certificate verify failed") as caught:
            await ask(Request.to("GET", url), context=client_context())
        assert caught.value.tls_name == "localhost"
        with pytest.raises(NoAnswer, match="certificate verify failed"):
            await ask(Request.to("GET", url))
    with serving(lambda connection: connection.sendall(OK)) as url, pytest.raises(NoAnswer) as caught:
        await ask(Request.to("GET", url.replace("http", "https")), context=trusting)
    assert caught.value.tls_name == "127.0.0.1"


async def test_a_handshake_has_the_same_deadline(ask: Ask, certificates: Certificates):
    with serving(silent) as url, pytest.raises(NoAnswer, match=r"no answer within 0\.2 s"):
        await ask(
            Request.to("GET", url.replace("http", "https")), timeout_s=0.2, context=client_context(certificates.ca)
        )


async def test_a_body_that_somebody_cut_is_none(certificates: Certificates):
    """Without a length only TLS's own word says that a body has ended."""
    cut = secured(certificates, answering(b"HTTP/1.1 200 OK\r\n\r\nabc"), says_goodbye=False)
    with serving(cut) as url, pytest.raises(NoAnswer, match="closed before the answer was complete"):
        request = Request.to("GET", url.replace("http://127.0.0.1", "https://localhost"))
        await on_blocking(request, context=client_context(certificates.ca))


# -- asyncio alone -----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def keeping(answer: bytes = OK, closes_after: int = 10_000) -> AsyncIterator[tuple[str, list[int]]]:
    """A server that keeps connections for so many requests; gives its URL, and the requests of each connection."""
    counts: list[int] = []
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(counts)
        counts.append(0)
        writers.append(writer)
        try:
            while counts[number] < closes_after:
                await reader.readuntil(b"\r\n\r\n")
                counts[number] += 1
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", counts
    finally:
        server.close()
        for writer in writers:
            writer.close()


async def test_connections_are_kept_for_gets_alone():
    client = HttpClient(idle_max=2)
    async with keeping() as (url, counts):
        for _ in range(5):
            await client.ask(Request.to("GET", url), timeout_s=PATIENCE_S)
        assert counts == [5]
        await client.ask(Request.to("POST", url), timeout_s=PATIENCE_S)
        assert counts == [5, 1], "a POST is not asked twice, so it has no connection that may be closed already"
        many = [client.ask(Request.to("GET", url), timeout_s=PATIENCE_S) for _ in range(4)]
        await asyncio.gather(*many)
        assert len(client._idle) == 2
        await client.close()
        assert not client._idle
        await client.ask(Request.to("GET", url), timeout_s=PATIENCE_S)
        await client.close()


async def test_a_kept_connection_that_the_server_closed_meanwhile():
    client = HttpClient(idle_max=2)
    async with keeping(closes_after=1) as (url, counts):
        for _ in range(5):
            assert (await client.ask(Request.to("GET", url), timeout_s=PATIENCE_S)).body == b"abc"
    assert counts == [1] * 5
    await client.close()


@pytest.mark.parametrize("extra", [b"x", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong"])
async def test_what_stands_behind_an_answer_is_not_the_next_one(extra: bytes):
    client = HttpClient(idle_max=2)
    async with keeping(OK + extra) as (url, _):
        for _ in range(3):
            assert (await client.ask(Request.to("GET", url), timeout_s=PATIENCE_S)).body == b"abc"
    await client.close()


async def test_an_idle_connection_is_not_kept_for_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flintmq.net.http_client.IDLE_S_MAX", 0.05)
    client = HttpClient(idle_max=2)
    async with keeping() as (url, _):
        await client.ask(Request.to("GET", url), timeout_s=PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            while client._idle:
                await asyncio.sleep(0.01)


async def test_the_connection_has_a_deadline_of_its_own(monkeypatch: pytest.MonkeyPatch):
    async def never(*_: object, **__: object) -> None:
        await asyncio.sleep(PATIENCE_S)

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", never, raising=False)
    request = Request.to("GET", "http://127.0.0.1:1")
    with pytest.raises(NoAnswer, match=r"no connection within 0\.05 s"):
        await HttpClient().ask(request, timeout_s=PATIENCE_S, connect_timeout_s=0.05)
    with pytest.raises(NoAnswer, match=r"no answer within 0\.05 s"):
        await HttpClient().ask(request, timeout_s=0.05)


async def test_who_gives_up_leaves_no_connection():
    left = asyncio.Event()
    came = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        came.set()
        try:
            await reader.read()
        except ConnectionError:
            pass
        left.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    task = asyncio.ensure_future(HttpClient(idle_max=2).ask(Request.to("GET", url), timeout_s=PATIENCE_S))
    async with asyncio.timeout(PATIENCE_S):
        await came.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await left.wait()
    server.close()


# -- streams -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def streaming(*pieces: bytes | asyncio.Event) -> AsyncIterator[str]:
    """A server that sends pieces, and waits for events between them."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                if isinstance(piece, bytes):
                    writer.write(piece)
                    await writer.drain()
                else:
                    await piece.wait()
        except ConnectionError:
            pass
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_a_stream_is_read_while_it_comes():
    more = asyncio.Event()
    async with streaming(HEAD, b"1\r\na\r\n", more, b"2\r\nbc\r\n", b"0\r\n\r\n") as url:
        async with asyncio.timeout(PATIENCE_S):
            async with HttpClient().stream(Request.to("POST", url, body=b"{}"), timeout_s=PATIENCE_S) as stream:
                assert stream.status == 200
                assert stream.headers["transfer-encoding"] == "chunked"
                pieces = aiter(stream)
                assert await anext(pieces) == b"a"
                more.set()
                assert b"".join([piece async for piece in pieces]) == b"bc"


async def test_a_slow_reader_of_a_stream_slows_the_server_down():
    size, count = 64 * 1024, 400
    async with streaming(HEAD, *[b"10000\r\n" + bytes(size) + b"\r\n"] * count, b"0\r\n\r\n") as url:
        async with asyncio.timeout(PATIENCE_S):
            async with HttpClient().stream(Request.to("GET", url), timeout_s=PATIENCE_S) as stream:
                received, largest = 0, 0
                async for piece in stream:
                    received += len(piece)
                    largest = max(largest, len(piece))
                    await asyncio.sleep(0.001)
    assert received == size * count
    assert largest < 2 * 1024 * 1024


async def test_a_stream_that_breaks():
    async with (
        asyncio.timeout(PATIENCE_S),
        streaming(HEAD, b"3\r\nabc\r\n") as url,
        HttpClient().stream(Request.to("GET", url), timeout_s=PATIENCE_S) as stream,
    ):
        pieces = aiter(stream)
        assert await anext(pieces) == b"abc"
        with pytest.raises(NoAnswer, match="closed before the answer was complete"):
            await anext(pieces)


async def test_a_stream_whose_head_does_not_come():
    never = asyncio.Event()
    async with streaming(b"HTTP/1.1 200 OK\r\n", never) as url:
        with pytest.raises(NoAnswer, match=r"no answer within 0\.05 s"):
            async with HttpClient().stream(Request.to("GET", url), timeout_s=0.05):
                pass
        never.set()


async def test_a_stream_may_be_left_and_may_end_with_the_connection():
    never = asyncio.Event()
    async with streaming(b"HTTP/1.1 200 OK\r\n\r\nabc", never) as url, asyncio.timeout(PATIENCE_S):
        async with HttpClient().stream(Request.to("GET", url), timeout_s=PATIENCE_S) as stream:
            assert await anext(aiter(stream)) == b"abc"
        never.set()
    async with (
        asyncio.timeout(PATIENCE_S),
        streaming(b"HTTP/1.1 200 OK\r\n\r\nabc") as url,
        HttpClient().stream(Request.to("GET", url), timeout_s=PATIENCE_S) as stream,
    ):
        assert [piece async for piece in stream] == [b"abc"]


# -- blocking alone ----------------------------------------------------------------------------------------------------


def test_a_child_has_no_connection_of_its_parent():
    """A thread of the parent asks while another one forks: the child tells nobody anything and holds nothing open."""
    watched: list[http_blocking.Forkable] = []
    asked = threading.Event()
    release = threading.Event()

    def serve(connection: socket.socket) -> None:
        read_request(connection)
        asked.set()
        release.wait(PATIENCE_S)
        connection.sendall(OK)

    answers: list[Answer] = []

    def work(url: str) -> None:
        answers.append(
            http_blocking.ask(Request.to("GET", url), timeout_s=PATIENCE_S, time=time.monotonic, watch=watched.append)
        )

    with serving(serve) as url:
        thread = threading.Thread(target=work, args=(url,))
        thread.start()
        assert asked.wait(PATIENCE_S)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                gc.disable()  # what other tests left open is not closed meanwhile
                before = len(os.listdir("/proc/self/fd"))
                watched[0].after_fork()
                code = 0 if len(os.listdir("/proc/self/fd")) == before - 1 else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        release.set()
        thread.join(PATIENCE_S)
    assert answers[0].body == b"abc"
