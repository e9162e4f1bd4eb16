"""The proxy that the fault tests stand on: each fault does what it says, and nothing else does."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from tests.integration.daemons import wait_until
from tests.integration.proxy import Proxy

DATA = random.Random(1).randbytes(300_000)


class Echo(threading.Thread):
    """Answers every connection with what it sends."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self.socket.getsockname()
        self.accepted: list[socket.socket] = []
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted = self.socket.accept()[0]
                self.accepted.append(accepted)
                threading.Thread(target=self._echo, args=(accepted,), daemon=True).start()

    @staticmethod
    def _echo(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            while data := connection.recv(65536):
                connection.sendall(data)


@pytest.fixture(scope="module")
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.socket.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxy(echo.address, seed=3) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: Proxy) -> Iterator[socket.socket]:
    with socket.create_connection(proxy.address, timeout=10) as client:
        yield client


def exchange(client: socket.socket, data: bytes) -> bytes:
    """Send ``data`` and return the answer; fewer bytes than sent only at the end of the stream."""
    sender = threading.Thread(target=_send, args=(client, data))
    sender.start()
    received = bytearray()
    while len(received) < len(data) and (more := client.recv(65536)):
        received += more
    sender.join()
    return bytes(received)


def _send(client: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        client.sendall(data)


def test_everything_passes_and_is_counted(proxy: Proxy, client: socket.socket):
    assert exchange(client, DATA) == DATA
    assert (proxy.connection_count, proxy.open_count) == (1, 1)
    assert (proxy.up.byte_count, proxy.down.byte_count) == (len(DATA), len(DATA))
    client.close()
    wait_until(lambda: proxy.open_count == 0)


def test_pieces(proxy: Proxy, client: socket.socket):
    proxy.up.piece_bytes_max = proxy.down.piece_bytes_max = 7
    assert exchange(client, DATA[:5000]) == DATA[:5000]


def test_delay_and_bandwidth(proxy: Proxy, client: socket.socket):
    proxy.down.delay_s = 0.2
    began = time.monotonic()
    assert exchange(client, b"x") == b"x"
    assert time.monotonic() - began >= 0.2
    proxy.heal()
    proxy.up.bytes_per_s = 100_000
    began = time.monotonic()
    assert exchange(client, DATA[:20_000]) == DATA[:20_000]
    assert time.monotonic() - began >= 0.19


def test_cut_with_fin_behind_so_many_bytes(proxy: Proxy, client: socket.socket):
    proxy.down.cut_between, proxy.down.is_reset = (1000, 1000), False
    assert exchange(client, DATA[:5000]) == DATA[:1000]
    wait_until(lambda: proxy.cut_count == 1)


def test_cut_with_rst_counts_from_when_it_was_asked_for(proxy: Proxy, client: socket.socket):
    assert exchange(client, DATA[:500]) == DATA[:500]
    proxy.up.cut_between = (100, 100)
    with pytest.raises(ConnectionError):
        exchange(client, DATA[:5000])
    assert proxy.up.byte_count == 600


@pytest.mark.parametrize("is_reset", [True, False])
def test_cut_now(proxy: Proxy, client: socket.socket, is_reset: bool):
    assert exchange(client, b"x") == b"x"
    proxy.cut(is_reset=is_reset)
    if is_reset:
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    else:
        assert client.recv(1) == b""
    assert proxy.open_count == 0


def test_one_bit_is_flipped_in_each_connection(proxy: Proxy):
    proxy.down.corrupt_between = (10, 4000)
    for _ in range(2):
        with socket.create_connection(proxy.address, timeout=10) as client:
            answer = exchange(client, DATA[:5000])
        changed = [at for at in range(5000) if answer[at] != DATA[at]]
        assert len(changed) == 1
        assert 10 <= changed[0] <= 4000
        assert (answer[changed[0]] ^ DATA[changed[0]]).bit_count() == 1
    assert proxy.down.corrupted_count == 2


def test_a_stall_fills_the_sender_up_and_loses_nothing(proxy: Proxy, client: socket.socket):
    assert exchange(client, b"x") == b"x"
    proxy.up.is_stalled = True
    client.setblocking(False)
    sent = 0
    with pytest.raises(BlockingIOError):
        while True:
            sent += client.send(DATA)
    client.settimeout(10)
    proxy.heal()
    received = 0
    while received < sent:
        received += len(client.recv(65536))


def test_half_open(proxy: Proxy, client: socket.socket, echo: Echo):
    assert exchange(client, b"x") == b"x"
    proxy.up.is_dropped = proxy.down.is_dropped = True
    client.sendall(b"lost")
    echo.accepted[-1].close()
    client.settimeout(0.1)
    with pytest.raises(TimeoutError):
        client.recv(1)
    assert proxy.up.byte_count == 1


def test_refuse_and_accept_only(proxy: Proxy, echo: Echo):
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(proxy.address)
    proxy.accepts_only = True
    proxy.listen()
    count = len(echo.accepted)
    with socket.create_connection(proxy.address, timeout=10) as client:
        client.sendall(b"x")
        client.settimeout(0.05)
        with pytest.raises(TimeoutError):
            client.recv(1)
        assert len(echo.accepted) == count
        proxy.heal()
        client.settimeout(10)
        assert client.recv(1) == b"x"
