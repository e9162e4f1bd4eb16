"""Two addresses of one nsqd or nsqlookupd."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from flintmq.tools import loops
from flintmq.tools.loops import LoopFound, LoopGuard, lookup_place, nsqd_place


def test_an_address_is_the_same_however_it_is_written() -> None:
    same = ["127.0.0.1", "localhost", "LocalHost.", "localhost:4150", "[::1]:4150", "[::ffff:127.0.0.1]:4150"]
    assert {nsqd_place(each) for each in same} == {("127.0.0.1", 4150)}
    assert nsqd_place("127.0.0.2:4150") != nsqd_place("127.0.0.1:4150") != nsqd_place("127.0.0.1:4152")
    same = ["a.example:80", "http://A.example", "http://a.example:80/", "http://a.example./"]
    assert {lookup_place(each) for each in same} == {("a.example", 80)}
    assert lookup_place("https://a.example") == ("a.example", 443)


async def test_names_are_resolved_and_each_pair_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        if host not in (known := {"here": "203.0.113.1", "alias": "203.0.113.1", "other": "203.0.113.2"}):
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[host], port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
    guard = LoopGuard()
    for _ in range(2):
        await guard.check(["here:1", "unknown:1"], ["other:1", "alias:2"])
    assert sorted(asked) == ["alias", "here", "other", "unknown"]
    with pytest.raises(LoopFound, match=r"^nsqd here:1, which is alias:1, would get again"):
        await guard.check(["here:1"], ["alias:1"])
    with pytest.raises(LoopFound, match="nsqd unknown:1 would get again"):
        await guard.check(["unknown:1"], ["unknown:1"])


async def test_an_address_of_this_machine_is_its_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "_is_here", lambda host: host == "203.0.113.1")
    guard = LoopGuard()
    await guard.check(["127.0.0.1:1"], ["203.0.113.2:1", "203.0.113.1:2"])
    for pair in (["127.0.0.1:1"], ["203.0.113.1:1"]), (["203.0.113.1:1"], ["127.0.0.1:1"]):
        with pytest.raises(LoopFound):
            await guard.check(*pair)
