"""The layered transport over real sockets, on both event loops: bytes, order, bounds, pauses, ends."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop
from tests.certificates import Certificates

from flintmq.limits import WRITE_BUFFER_HIGH_BYTES
from flintmq.net import layers as layers_module
from flintmq.net.layers import PULL_BYTES_MAX, LayeredTransport, SecureTransport
from flintmq.net.tls import ServerTls
from flintmq.net.tls_engine import NewEngine, TlsFailed
from flintmq.wire.codec import Deflate, Snappy

PATIENCE_S = 10.0
LOOPS: list[Any] = [asyncio.new_event_loop, uvloop.new_event_loop]

Work = Callable[[], Awaitable[None]]
Run = Callable[[Work], None]


@pytest.fixture(params=LOOPS, ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    def run_in_loop(work: Work) -> None:
        async def within() -> None:
            async with asyncio.timeout(PATIENCE_S):
                await work()

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(within())

    return run_in_loop


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def new_tls(certificates: Certificates) -> NewEngine:
    return ServerTls(certificates.server.cert, certificates.server.key).engines()


class Server(asyncio.Protocol):
    """Puts layers in when it reads ``GO\\n`` in clear; what follows is kept in ``received``.

    Args:
        new_tls: None for no TLS.
        codec: what to compress with behind it.
    """

    def __init__(self, new_tls: NewEngine | None = None, codec: Any = None) -> None:
        self._new_tls = new_tls
        self._codec = codec
        self.received = bytearray()
        self.pieces: list[int] = []
        self.events: list[str] = []
        self.failure: TlsFailed | None = None
        self.layers: LayeredTransport | None = None
        self.transport: Any = None
        self.gone = asyncio.get_running_loop().create_future()
        self.keeps_open_after_eof = False
        self.closes_after_failure = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append("lost")
        self.gone.set_result(exc)

    def data_received(self, data: bytes) -> None:
        self.pieces.append(len(data))
        self.received += data
        if self.layers is None and self.received[:3] == b"GO\n":
            first = bytes(self.received[3:])
            self.received.clear()
            self.layers = LayeredTransport(self, asyncio.get_running_loop())
            self.layers.take_over(self.transport)
            self.transport.write(b"YES\n")
            self.transport = self.layers
            if self._new_tls is not None:
                self.layers.start_tls(self._new_tls(), first, self._secured, deadline_s=0.3)
            else:
                self.layers.start_codec(self._codec(), first)
                self.layers.write(b"OK\n")

    def _secured(self, failure: TlsFailed | None) -> None:
        self.failure = failure
        assert self.layers is not None
        if failure is not None:
            self.layers.write(f"E {failure}\n".encode())
            if self.closes_after_failure:
                self.layers.close()
            return
        self.layers.write(b"OK\n")
        if self._codec is not None:
            self.layers.start_codec(self._codec())
            self.layers.write(b"OK\n")

    def eof_received(self) -> bool:
        self.events.append("eof")
        return self.keeps_open_after_eof

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")


class Plain(asyncio.Protocol):
    """A protocol behind a listener."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.gone = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.events.append("made")
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(b"<" + data + b">")  # type: ignore[attr-defined]

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append("lost")


async def started(server: Any) -> tuple[Any, socket.socket]:
    """``server`` connected to a blocking client socket."""
    loop = asyncio.get_running_loop()
    accepted = asyncio.Event()

    def accept() -> Any:
        accepted.set()
        return server

    listener = await loop.create_server(accept, "127.0.0.1", 0)
    client = socket.create_connection(listener.sockets[0].getsockname())
    await accepted.wait()
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client.settimeout(PATIENCE_S)
    listener.close()
    return server, client


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, function, *args)


def read_exactly(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = client.recv(size - len(data))
        if not piece:
            break
        data += piece
    return data


def read_to_end(client: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(65536):
            data += piece
    return data


def secure(certificates: Certificates, client: socket.socket) -> ssl.SSLSocket:
    secured = certificates.client_context().wrap_socket(client, server_hostname="localhost")
    assert read_exactly(secured, 3) == b"OK\n"
    return secured


# -- upgrades ----------------------------------------------------------------------------------------------------------


def test_tls(run: Run, certificates: Certificates, new_tls: NewEngine):
    async def work() -> None:
        server, client = await started(Server(new_tls))
        client.sendall(b"GO\n")
        assert await in_thread(read_exactly, client, 4) == b"YES\n"
        secured = await in_thread(secure, certificates, client)
        assert server.layers.tls.session().version == "TLS1.3"
        await in_thread(secured.sendall, b"x" * 100_000)
        await until(lambda: len(server.received) == 100_000)
        server.transport.write(b"y" * 3_000_000)
        assert await in_thread(read_exactly, secured, 3_000_000) == b"y" * 3_000_000
        secured.close()
        await server.gone
        assert server.events.count("lost") == 1

    run(work)


@pytest.mark.parametrize("codec", [Deflate, Snappy])
def test_tls_with_compression(run: Run, certificates: Certificates, new_tls: NewEngine, codec: Any):
    async def work() -> None:
        server, client = await started(Server(new_tls, codec))
        client.sendall(b"GO\n")
        assert await in_thread(read_exactly, client, 4) == b"YES\n"
        secured = await in_thread(secure, certificates, client)
        own = codec()
        data = random.Random(1).randbytes(1000) * 500
        await in_thread(secured.sendall, own.write(data))
        await until(lambda: len(server.received) == len(data))
        assert server.received == data
        server.transport.write(data)
        out = b""
        while len(out) < len(data) + 3:
            own.receive(await in_thread(secured.recv, 65536))
            while piece := own.read():
                out += piece
        assert out == b"OK\n" + data
        secured.close()
        await server.gone

    run(work)


@pytest.mark.parametrize("codec", [Deflate, Snappy])
def test_first_bytes_of_the_new_layer_may_come_with_the_request(run: Run, codec: Any):
    """A client that does not wait for the answer: nothing of it is lost, whatever the cut."""

    async def work() -> None:
        for cut in (0, 1, 7, None):
            server, client = await started(Server(codec=codec))
            stream = codec().write(b"PUB t\n" * 10)
            split = len(stream) if cut is None else cut
            client.sendall(b"GO\n" + stream[:split])
            await asyncio.sleep(0.01)
            client.sendall(stream[split:])
            while len(server.received) < 60:
                await asyncio.sleep(0.001)
            assert server.received == b"PUB t\n" * 10
            client.close()
            await server.gone

    run(work)


def test_a_client_hello_may_come_with_the_request(run: Run, certificates: Certificates, new_tls: NewEngine):
    async def work() -> None:
        server, client = await started(Server(new_tls))
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        engine = certificates.client_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
        with pytest.raises(ssl.SSLWantReadError):
            engine.do_handshake()
        client.sendall(b"GO\n" + outgoing.read())
        assert await in_thread(read_exactly, client, 4) == b"YES\n"
        while True:
            try:
                engine.do_handshake()
                break
            except ssl.SSLWantReadError:
                incoming.write(await in_thread(client.recv, 65536))
        engine.write(b"with the last message of the handshake")
        client.sendall(outgoing.read())
        await until(lambda: server.received)
        assert server.received == b"with the last message of the handshake"
        client.close()
        await server.gone

    run(work)


def test_commands_in_clear_behind_the_request_are_never_read(run: Run, new_tls: NewEngine):
    """STARTTLS injection: what a man in the middle adds in clear must not be taken for what came through TLS."""

    async def work() -> None:
        server, client = await started(Server(new_tls))
        client.sendall(b"GO\nPUB t\n\0\0\0\1x" + b"PUB t\n\0\0\0\1x")
        answer = await in_thread(read_to_end, client)
        assert answer.startswith(b"YES\n")
        assert answer.endswith(b"E tls: wrong version number\n")
        assert server.received == b""
        await server.gone

    run(work)


def test_what_comes_after_a_failed_handshake_is_not_read_either(run: Run, new_tls: NewEngine):
    async def work() -> None:
        server, client = await started(Server(new_tls))
        server.closes_after_failure = False
        client.sendall(b"GO\nnot a handshake")
        await until(lambda: server.failure)
        client.sendall(b"PUB t\n\0\0\0\1x")
        client.shutdown(socket.SHUT_WR)
        await server.gone
        assert server.received == b""

    run(work)


@pytest.mark.parametrize("codec", [Deflate, Snappy])
def test_clear_bytes_in_a_compressed_stream_close_it(run: Run, codec: Any):
    async def work() -> None:
        server, client = await started(Server(codec=codec))
        client.sendall(b"GO\nPUB t\n\0\0\0\1x")
        await server.gone
        assert server.received == b""

    run(work)


@pytest.mark.slow
def test_a_handshake_has_a_deadline(run: Run, new_tls: NewEngine):
    async def work() -> None:
        server, client = await started(Server(new_tls))
        client.sendall(b"GO\n\x16\x03\x01")
        assert (await in_thread(read_to_end, client)) == b"YES\nE tls: the handshake took too long\n"
        await server.gone

    run(work)


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_client_that_leaves_during_the_handshake(run: Run, new_tls: NewEngine, is_reset: bool):
    async def work() -> None:
        server, client = await started(Server(new_tls))
        client.sendall(b"GO\n\x16\x03\x01")
        await until(lambda: server.layers)
        if is_reset:
            client.close()  # with the answer unread
            await server.gone
            assert server.failure is None  # nobody is left to be told
        else:
            client.shutdown(socket.SHUT_WR)
            await server.gone
            assert "closed" in str(server.failure)
        assert server.events == ["lost"]

    run(work)


# -- bounds ------------------------------------------------------------------------------------------------------------


def bomb(size: int) -> bytes:
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
    return compressor.compress(bytes(size)) + compressor.flush(zlib.Z_SYNC_FLUSH)


@pytest.mark.slow
def test_a_bomb_is_taken_piece_by_piece_and_others_have_their_turns(run: Run):
    async def work() -> None:
        size = 16 * 1024 * 1024
        data = bomb(size)
        server, client = await started(Server(codec=Deflate))
        client.sendall(b"GO\n")
        sending = asyncio.create_task(in_thread(client.sendall, data))
        turns = 0
        while len(server.received) < size:
            received = sum(server.pieces)
            await asyncio.sleep(0)
            turns += 1
            # everything that was ready had one turn: at most one socket read and one pull that was put off
            assert sum(server.pieces) - received <= 2 * (PULL_BYTES_MAX + 65536)
        await sending
        assert turns > size / PULL_BYTES_MAX / 4
        assert max(server.pieces) <= 65536
        client.close()
        await server.gone

    run(work)


def test_a_paused_protocol_gets_nothing_more_and_then_everything(run: Run):
    async def work() -> None:
        size = 8 * 1024 * 1024
        server, client = await started(Server(codec=Deflate))
        client.sendall(b"GO\n")
        await until(lambda: server.layers)
        server.transport.pause_reading()
        assert not server.transport.is_reading()
        client.sendall(bomb(size))
        await asyncio.sleep(0.05)
        assert server.received == b""
        server.transport.resume_reading()
        await until(lambda: len(server.received) == size)
        client.close()
        await server.gone

    run(work)


def test_the_end_comes_after_everything_before_it(run: Run):
    """The client has closed long before the protocol takes what it sent."""

    async def work() -> None:
        size = 4 * 1024 * 1024
        server, client = await started(Server(codec=Deflate))
        client.sendall(b"GO\n")
        await until(lambda: server.layers)
        server.transport.pause_reading()
        client.sendall(bomb(size))
        client.shutdown(socket.SHUT_WR)
        await asyncio.sleep(0.05)
        assert server.events == []
        server.transport.resume_reading()
        await server.gone
        assert len(server.received) == size
        assert server.events == ["eof", "lost"]

    run(work)


def test_output_to_compress_counts_as_buffered_and_others_have_their_turns(run: Run):
    async def work() -> None:
        server, client = await started(Server(codec=Deflate))
        client.sendall(b"GO\n")
        await until(lambda: server.layers)
        data = random.Random(1).randbytes(4 * WRITE_BUFFER_HIGH_BYTES)
        server.transport.write(data)
        assert server.transport.get_write_buffer_size() >= len(data)
        assert server.events == ["pause"]
        own = Deflate()
        out = await in_thread(read_exactly, client, 4)
        while len(out) < len(data) + 7:
            own.receive(await in_thread(client.recv, 1 << 20))
            while piece := own.read():
                out += piece
        assert out == b"YES\nOK\n" + data
        await until(lambda: "resume" in server.events)
        assert server.transport.get_write_buffer_size() == 0
        client.close()
        await server.gone

    run(work)


def test_a_client_that_does_not_read_pauses_the_writer(run: Run):
    async def work() -> None:
        server, client = await started(Server(codec=Snappy))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(b"GO\n")
        await until(lambda: server.layers)
        piece = random.Random(1).randbytes(256 * 1024)
        sent = 0
        while server.events[-1:] != ["pause"]:
            server.transport.write(piece)
            sent += len(piece)
            assert sent < 64 * 1024 * 1024
            await asyncio.sleep(0.01)  # what the kernel takes is gone after that
        assert server.transport.get_write_buffer_size() > 16 * 1024  # below that it would have been told to go on
        assert set(server.events) <= {"pause", "resume"}
        server.transport.abort()
        await server.gone

    run(work)


# -- ends --------------------------------------------------------------------------------------------------------------


def test_half_close_after_everything_written(run: Run, certificates: Certificates, new_tls: NewEngine):
    async def work() -> None:
        server, client = await started(Server(new_tls, Deflate))
        client.sendall(b"GO\n")
        await in_thread(read_exactly, client, 4)
        secured = await in_thread(secure, certificates, client)
        data = random.Random(2).randbytes(300_000)
        server.transport.write(data)
        server.transport.write_eof()
        server.transport.write(b"too late")
        own = Deflate()
        out = b""
        while piece := await in_thread(secured.recv, 65536):
            own.receive(piece)
            while plain := own.read():
                out += plain
        assert out == b"OK\n" + data
        await in_thread(secured.sendall, own.write(b"FIN\n"))
        await until(lambda: server.received == b"FIN\n")
        secured.close()
        await server.gone

    run(work)


@pytest.mark.parametrize("codec", [Deflate, Snappy])
def test_half_close_without_tls(run: Run, codec: Any):
    async def work() -> None:
        server, client = await started(Server(codec=codec))
        client.sendall(b"GO\n")
        await until(lambda: server.layers)
        data = random.Random(2).randbytes(300_000)
        server.transport.write(data)
        server.transport.write_eof()
        own = codec()
        own.receive((await in_thread(read_to_end, client))[4:])
        out = b""
        while plain := own.read():
            out += plain
        assert out == b"OK\n" + data
        client.sendall(own.write(b"FIN\n"))
        await until(lambda: server.received == b"FIN\n")
        client.close()
        await server.gone

    run(work)


def test_close_writes_everything_first(run: Run):
    async def work() -> None:
        server, client = await started(Server(codec=Snappy))
        client.sendall(b"GO\n")
        await until(lambda: server.layers)
        data = random.Random(2).randbytes(500_000)
        server.transport.write(data)
        server.transport.close()
        assert server.transport.is_closing()
        stream = await in_thread(read_to_end, client)
        own = Snappy()
        own.receive(stream[4:])
        out = b""
        while plain := own.read():
            out += plain
        assert out == b"OK\n" + data
        await server.gone
        assert server.events[-1] == "lost"

    run(work)


def test_an_end_inside_tls_may_be_one_sided(run: Run, certificates: Certificates, new_tls: NewEngine):
    async def work() -> None:
        server, client = await started(Server(new_tls))
        server.keeps_open_after_eof = True
        client.sendall(b"GO\n")
        await in_thread(read_exactly, client, 4)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        engine = certificates.client_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
        while True:
            try:
                engine.do_handshake()
                break
            except ssl.SSLWantReadError:
                client.sendall(outgoing.read())
                incoming.write(await in_thread(client.recv, 65536))
        engine.write(b"question")
        with pytest.raises(ssl.SSLWantReadError):
            engine.unwrap()
        client.sendall(outgoing.read())
        await until(lambda: "eof" in server.events)
        assert server.received == b"question"
        server.transport.write(b"answer")
        server.transport.close()
        incoming.write(await in_thread(read_to_end, client))
        assert engine.read(100) == b"OK\n"
        assert engine.read(100) == b"answer"
        await server.gone

    run(work)


def test_the_end_of_a_compressed_stream_is_the_end_of_input(run: Run):
    """Some clients end their stream before they close; what they are still to be told they are told."""

    async def work() -> None:
        for keeps_open in (True, False):
            server, client = await started(Server(codec=Deflate))
            server.keeps_open_after_eof = keeps_open
            compressor = zlib.compressobj(6, zlib.DEFLATED, -15)
            client.sendall(b"GO\n" + compressor.compress(b"FIN\n") + compressor.flush(zlib.Z_FINISH))
            await until(lambda server=server: "eof" in server.events)  # type: ignore[misc]
            assert server.received == b"FIN\n"
            if keeps_open:
                server.transport.write(b"answer")
                server.transport.close()
            own = Deflate()
            own.receive((await in_thread(read_to_end, client))[4:])
            assert own.read() == (b"OK\nanswer" if keeps_open else b"OK\n")
            await server.gone

    run(work)


def test_writing_to_a_connection_that_is_gone_does_nothing(run: Run):
    async def work() -> None:
        server, client = await started(Server(codec=Deflate))
        client.sendall(b"GO\n")
        await until(lambda: server.layers)
        client.close()
        await server.gone
        server.transport.write(b"x")
        server.transport.close()
        server.transport.abort()
        assert server.transport.is_closing()
        assert server.transport.get_extra_info("peername") is None

    run(work)


# -- listeners ---------------------------------------------------------------------------------------------------------


def test_a_listener_whose_clients_begin_with_tls(run: Run, certificates: Certificates, new_tls: NewEngine):
    async def work() -> None:
        protocol = Plain()
        _, client = await started(SecureTransport(protocol, new_tls(), asyncio.get_running_loop()))
        context = certificates.client_context()
        secured = await in_thread(lambda: context.wrap_socket(client, server_hostname="localhost"))
        await in_thread(secured.sendall, b"hello")
        assert await in_thread(read_exactly, secured, 7) == b"<hello>"
        secured.close()
        await until(lambda: protocol.events == ["made", "lost"])

    run(work)


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n\r\n", b""])
def test_a_failed_handshake_is_never_heard_of(
    run: Run, new_tls: NewEngine, first: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(layers_module.LayeredTransport.start_tls, "__defaults__", (0.2,))

    async def work() -> None:
        protocol = Plain()
        _, client = await started(SecureTransport(protocol, new_tls(), asyncio.get_running_loop()))
        client.sendall(first)
        await in_thread(read_to_end, client)
        assert protocol.events == []

    run(work)
