"""Two ways to one nsqd or nsqlookupd."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from flintmq.client.aio.peers import Peer
from flintmq.tools import loops
from flintmq.tools.loops import KNOWN_S, LoopFound, LoopGuard, lookup_place, nsqd_place
from flintmq.tools.nsq_to_nsq import ToNsqOptions


def nsqs(*addresses: str) -> list[Peer]:
    """Nsqd that do not say who they are."""
    return [Peer(each, "") for each in addresses]


def test_an_address_is_the_same_however_it_is_written() -> None:
    same = ["127.0.0.1", "localhost", "LocalHost.", "localhost:4150", "[::1]:4150", "[::ffff:127.0.0.1]:4150"]
    assert {nsqd_place(each) for each in same} == {("127.0.0.1", 4150)}
    assert nsqd_place("127.0.0.2:4150") != nsqd_place("127.0.0.1:4150") != nsqd_place("127.0.0.1:4152")
    same = ["a.example:80", "http://A.example", "http://a.example:80/", "http://a.example./"]
    assert {lookup_place(each) for each in same} == {("a.example", 80, "")}
    assert lookup_place("https://a.example") == ("a.example", 443, "")
    assert lookup_place("http://a.example/dc1/") == lookup_place("http://a.example:80/dc1/lookup")
    assert lookup_place("http://a.example/dc1") != lookup_place("http://a.example/dc2")


async def test_who_says_who_it_is_is_compared_by_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "_is_here", lambda host: host == "203.0.113.1")
    guard = LoopGuard()
    with pytest.raises(LoopFound, match=r"^nsqd 127\.0\.1\.1:1, which is 203\.0\.113\.2:7, would get again"):
        await guard.check([Peer("127.0.1.1:1", "one")], [Peer("203.0.113.2:7", "one")])
    await guard.check([Peer("127.0.0.1:1", "one")], [Peer("203.0.113.1:1", "two")])
    await guard.check([Peer("127.0.0.1:1", "one")], [Peer("203.0.113.1:1", "")])
    with pytest.raises(LoopFound):  # it was started again, or another one has the port now
        await guard.check([Peer("127.0.0.1:1", "three")], [Peer("203.0.113.1:1", "three")])
    with pytest.raises(LoopFound):
        await guard.check([Peer("localhost:1", "one")], [Peer("127.0.0.1:1", "before")])


async def test_names_are_resolved_and_each_pair_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    known = {"here": "203.0.113.1", "alias": "203.0.113.1", "other": "203.0.113.2"}

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        if host not in known:
            raise UnicodeError("too long") if host == "long" else socket.gaierror("unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[host], port))]

    now = 1000.0
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
    monkeypatch.setattr(loops, "monotonic", lambda: now)
    guard = LoopGuard()
    for _ in range(2):
        await guard.check(nsqs("here:1", "unknown:1", "long:1"), nsqs("other:1", "alias:2"))
    assert sorted(asked) == ["alias", "here", "long", "other", "unknown"]
    with pytest.raises(LoopFound, match=r"^nsqd here:1, which is alias:1, would get again"):
        await guard.check(nsqs("here:1"), nsqs("alias:1"))
    with pytest.raises(LoopFound, match="nsqd unknown:1 would get again"):
        await guard.check(nsqs("unknown:1"), nsqs("unknown:1"))
    known["unknown"], now = known["other"], now + KNOWN_S
    await guard.check(nsqs("unknown:1"), nsqs("other:1"))
    while guard._resolving:
        await asyncio.sleep(0)
    with pytest.raises(LoopFound, match="nsqd unknown:1, which is other:1,"):
        await guard.check(nsqs("unknown:1"), nsqs("other:1"))


async def test_an_address_of_this_machine_is_its_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "_is_here", lambda host: host == "203.0.113.1")
    guard = LoopGuard()
    await guard.check(nsqs("127.0.0.1:1"), nsqs("203.0.113.2:1", "203.0.113.1:2"))
    for pair in ("127.0.0.1:1", "203.0.113.1:1"), ("203.0.113.1:1", "127.0.0.1:1"):
        with pytest.raises(LoopFound):
            await guard.check(nsqs(pair[0]), nsqs(pair[1]))


@pytest.mark.parametrize(
    ("topics", "to", "circle"),
    [
        ("a", "", "a"),
        ("a b", "", "a b"),
        ("a b", "c", ""),
        ("a b", "b", "b"),
        ("a:b b:c", "", ""),
        ("a:b b:c c:b", "", "b c"),
        ("a:b b:c c:a d:d", "", "a b c d"),
    ],
)
def test_only_topics_that_lead_to_themselves_can_come_back(topics: str, to: str, circle: str) -> None:
    options = ToNsqOptions(topic=tuple(topics.split()), destination_topic=to)
    assert options.circle == set(circle.split())
