"""All clients together: how many there are, and that what one of them fails with is not felt by the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flintmq.nsqd.client import Client, Clients
from flintmq.testing import ManualClock


class Transport(asyncio.BaseTransport):
    """One that takes no descriptor."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


class Quiet(Client):
    """A connection that says nothing; it is gone once it is aborted."""

    state_number = 0
    codec_name = ""

    def __init__(self, clients: Clients) -> None:
        super().__init__(1, None)
        self.clients = clients
        self.done: list[str] = []

    def flush(self) -> None: ...

    def publish_ended(self) -> None: ...

    def limit_ready(self, limit: int) -> None: ...

    def look_up_again(self) -> None:
        self.done.append("look up again")

    def dismiss(self, code: str, detail: str) -> None: ...

    def drain(self) -> None:
        self.done.append("drain")

    def abort(self) -> None:
        self.done.append("abort")
        self.clients.forget(self)

    def describe(self) -> str:
        return ""


class Failing(Quiet):
    """One that cannot be drained."""

    def drain(self) -> None:
        raise ZeroDivisionError


def admitted(clients: Clients, count: int, kind: type[Quiet] = Quiet) -> list[Quiet]:
    made = [kind(clients) for _ in range(count)]
    return [client for client in made if clients.admit(client, Transport())]


def test_no_more_than_are_allowed(caplog: pytest.LogCaptureFixture):
    clients = Clients(2, ManualClock())
    first, second = admitted(clients, 3)
    assert list(clients) == [first, second] and len(clients) == 2
    assert "2 connections are the limit" in caplog.text
    assert len(admitted(clients, 50)) == 0
    assert len(caplog.messages) == 1, "who comes again and again does not fill the log"
    clients.forget(first)
    assert len(admitted(clients, 2)) == 1
    clients.forget(first)  # once more, as a connection that was refused does
    assert len(clients) == 2


def test_none_once_it_is_closed():
    clients = Clients(2, ManualClock())
    (first,) = admitted(clients, 1)
    clients.close()
    assert admitted(clients, 1) == []
    clients.look_up_again()
    assert first.done == ["look up again"]


async def test_one_that_fails_does_not_keep_the_others_from_their_end(caplog: pytest.LogCaptureFixture):
    clients = Clients(3, ManualClock())
    (failing,) = admitted(clients, 1, Failing)
    (other,) = admitted(clients, 1)
    clients.drain()
    assert other.done == ["drain"]
    assert "draining" in caplog.text and "ZeroDivisionError" in caplog.text
    await clients.abort(0.001)  # neither goes by itself
    assert failing.done == ["abort"] and other.done == ["drain", "abort"]
    assert len(clients) == 0


async def test_who_goes_by_itself_is_not_aborted():
    clients = Clients(1, ManualClock())
    (client,) = admitted(clients, 1)
    waiting = asyncio.create_task(clients.abort(600))
    await asyncio.sleep(0)
    clients.forget(client)
    await waiting
    assert client.done == []


def test_before_identify_a_client_has_said_nothing():
    client = Quiet(Clients(1, ManualClock()))
    assert (client.request.client_id, client.request.extend_support) == ("", False)
