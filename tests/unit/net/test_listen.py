"""Listening: one address per option, unix sockets that are taken from nobody and left to nobody."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from pathlib import Path

import pytest
import uvloop
from tests.ports import has_ipv6

from flintmq.net.address import ListenFailed
from flintmq.net.listen import Listener, listen


class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        transport.write(b"hello")
        transport.close()


async def greeting(listener: Listener) -> bytes:
    if listener.address is None:
        reader, writer = await asyncio.open_unix_connection(listener.name)
    else:
        reader, writer = await asyncio.open_connection(*listener.address)
    try:
        return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_tcp(host):
    listener = await listen(Echo, f"{host}:0")
    assert listener.address is not None
    port = listener.address[1]
    assert (listener.address, listener.name) == (("127.0.0.1", port), f"127.0.0.1:{port}")
    assert await greeting(listener) == b"hello"
    listener.close()
    with pytest.raises(OSError):
        await greeting(listener)


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize(("host", "shown"), [("", "0.0.0.0"), ("0.0.0.0", "0.0.0.0"), ("[::]", "::")])
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_every_interface_is_that_of_either_family(new_loop, host, shown):
    async def ask() -> None:
        listener = await listen(Echo, f"{host}:0")
        assert listener.address is not None
        assert listener.address[0] == shown
        port = listener.address[1]
        for place in ("127.0.0.1", "::1"):
            reader, writer = await asyncio.open_connection(place, port)
            assert await reader.read() == b"hello"
            writer.close()
        with pytest.raises(ListenFailed, match="in use"):
            await listen(Echo, f"{host}:{port}")
        listener.close()
        for place in ("127.0.0.1", "::1"):
            with pytest.raises(OSError):
                await asyncio.open_connection(place, port)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(ask())


@pytest.mark.parametrize("lacking", ["0.0.0.0", "::"])
async def test_every_interface_where_there_is_one_family(lacking, monkeypatch):
    loop = asyncio.get_running_loop()
    create_server = loop.create_server

    async def create(new_protocol, host, *args, **options):
        if host == lacking:
            raise OSError(errno.EADDRNOTAVAIL, "no address")
        return await create_server(new_protocol, host, *args, **options)

    monkeypatch.setattr(loop, "create_server", create)
    listener = await listen(Echo, ":0")
    assert listener.address is not None
    assert listener.address[0] == ({"0.0.0.0", "::"} - {lacking}).pop()
    listener.close()


async def test_a_free_port_is_free_of_both_families(monkeypatch):
    loop = asyncio.get_running_loop()
    create_server, refused = loop.create_server, list[int]()

    async def create(new_protocol, host, port, **options):
        if host == "::" and len(refused) < 3:
            refused.append(port)
            raise OSError(errno.EADDRINUSE, "in use")
        return await create_server(new_protocol, host, port, **options)

    monkeypatch.setattr(loop, "create_server", create)
    listener = await listen(Echo, ":0")
    assert len(refused) == 3 and len(listener.servers) == 2
    listener.close()


async def test_tcp_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        text = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ListenFailed, match="in use") as caught:
            await listen(Echo, text)
        assert caught.value.address == text


async def test_a_port_that_is_none():
    with pytest.raises(ListenFailed, match="99999"):
        await listen(Echo, "127.0.0.1:99999")


async def test_a_unix_socket_goes_with_its_listener(tmp_path: Path):
    path = str(tmp_path / "s")
    listener = await listen(Echo, path)
    assert (listener.address, listener.name) == (None, path)
    assert await greeting(listener) == b"hello"
    listener.close()
    assert not os.path.exists(path)


async def test_a_socket_of_the_dead_is_replaced(tmp_path: Path):
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
        dead.listen()
    listener = await listen(Echo, path)
    assert await greeting(listener) == b"hello"
    listener.close()


async def test_a_socket_of_the_living_is_not_taken(tmp_path: Path):
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(path)
        living.listen()
        with pytest.raises(ListenFailed, match="in use"):
            await listen(Echo, path)
        assert os.path.exists(path)


async def test_a_file_is_never_removed(tmp_path: Path):
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(ListenFailed):
        await listen(Echo, str(path))
    assert path.read_text() == "precious"


async def test_what_is_somebody_else_s_by_now_is_left_to_them(tmp_path: Path):
    path = tmp_path / "s"
    listener = await listen(Echo, str(path))
    path.unlink()
    path.write_text("theirs")
    listener.close()
    assert path.read_text() == "theirs"


@pytest.mark.parametrize("path", ["/no/such/directory/s", "x" * 200 + "/s"])
async def test_a_path_that_cannot_be(path):
    with pytest.raises(ListenFailed) as caught:
        await listen(Echo, path)
    assert caught.value.address == path
