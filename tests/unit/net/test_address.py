"""Addresses as flags spell them."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from flintmq.addresses import format_address
from flintmq.net.address import (
    ListenFailed,
    bind_host,
    connect,
    format_peer,
    listening_address,
    split_address,
)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:4150", ("127.0.0.1", 4150)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        (":4150", ("", 4150)),
        ("[::1]:4150", ("::1", 4150)),
        ("host.example:1", ("host.example", 1)),
        ("/run/nsqd.sock", None),
        ("/run/nsqd:1", None),
        ("nsqd.sock", None),
        ("host:", None),
        ("host:http", None),
        ("host:-1", None),
        ("host:٣", None),
        ("::1:4150", None),
        ("", None),
    ],
)
def test_split_address(text, address):
    assert split_address(text) == address


async def test_bind_host():
    assert await bind_host("", 0) == "0.0.0.0"
    assert await bind_host("127.0.0.1", 0) == "127.0.0.1"
    assert await bind_host("::1", 0) == "::1"
    assert await bind_host("localhost", 0) == "127.0.0.1"


async def test_listening_address():
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    host, port = listening_address(server, "127.0.0.1", 0)
    assert host == "127.0.0.1"
    assert port > 0
    server.close()


def test_listening_address_of_a_loop_without_sockets():
    assert listening_address(object(), "nsqd-1", 4150) == ("nsqd-1", 4150)  # type: ignore[arg-type]


def test_format():
    assert format_address("127.0.0.1", 1) == "127.0.0.1:1"
    assert format_address("::1", 1) == "[::1]:1"
    assert format_peer(("::1", 5, 0, 0)) == "[::1]:5"
    assert format_peer("") == "@"
    assert format_peer(None) == "@"


def test_listen_failed_says_where_and_why():
    assert str(ListenFailed("1.2.3.4:1", "no")) == "listen (1.2.3.4:1) failed - no"


class Addresses:
    """The addresses of a name, and what each does with a connection."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: OSError | str | None) -> None:
        self.answers = dict(enumerate(answers))
        self.tried: list[int] = []
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "getaddrinfo", self.getaddrinfo, raising=False)
        monkeypatch.setattr(loop, "create_connection", self.create_connection, raising=False)

    async def getaddrinfo(self, host: str, port: int, **_: Any) -> list[Any]:
        return [(None, None, 6, "", (f"192.0.2.{number}", port)) for number in self.answers]

    async def create_connection(self, factory: Any, host: str, port: int) -> None:
        number = int(host.rpartition(".")[2])
        self.tried.append(number)
        answer = self.answers[number]
        if isinstance(answer, OSError):
            raise answer
        if answer == "silent":
            await asyncio.get_running_loop().create_future()
        for _ in range(3):  # as every connection does, so that a deadline that is over ends it
            await asyncio.sleep(0)


REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
UNREACHABLE = OSError(errno.ENETUNREACH, "Network is unreachable")


async def test_an_address_that_swallows_everything_leaves_time_for_the_next(monkeypatch):
    addresses = Addresses(monkeypatch, "silent", *[REFUSED] * 9, None, None)
    async with asyncio.timeout(60):
        await connect(asyncio.Protocol, "nsqd.example", 4150, 4.0)
    assert addresses.tried == [*range(11)]


@pytest.mark.parametrize(
    ("answers", "kind", "text"),
    [
        ((REFUSED, REFUSED), ConnectionRefusedError, "refused"),
        ((UNREACHABLE, REFUSED), OSError, "unreachable"),
        ((REFUSED, UNREACHABLE), OSError, "refused"),
        (("silent", REFUSED), OSError, "refused"),
        (("silent", "silent"), TimeoutError, None),
        ((), OSError, "no address"),
    ],
)
async def test_why_no_address_takes_a_connection(answers, kind, text, monkeypatch):
    Addresses(monkeypatch, *answers)
    with pytest.raises(OSError, match=text) as raised:
        await connect(asyncio.Protocol, "nsqd.example", 4150, 0.05)
    assert type(raised.value) is kind, "refused only where all refuse"
