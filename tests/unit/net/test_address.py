"""Addresses as flags spell them."""

from __future__ import annotations

import asyncio

import pytest

from flintmq.addresses import format_address
from flintmq.net.address import (
    ListenFailed,
    bind_host,
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
