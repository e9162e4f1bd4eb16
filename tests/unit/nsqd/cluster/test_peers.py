"""Connections between nodes over real sockets: who gets in, and that what is wrong with one is no other's."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest
from tests.unit.cluster.models import node

from flintmq.cluster.following import Following
from flintmq.cluster.link import FollowerLink
from flintmq.cluster.state import NodeRecord
from flintmq.env import Env
from flintmq.nsqd.cluster import peers as peers_module
from flintmq.nsqd.cluster.peers import Peers
from flintmq.wire.peer import Farewell, Identity, Open, PeerReader, Refusal

SECRET = b"0123456789abcdef"
PATIENCE_S = 20.0


class End:
    """One node: what it listens for, what it was told."""

    def __init__(self, name: str, secret: bytes = SECRET, cluster: str = "c") -> None:
        self.name = name
        self.nodes: dict[str, NodeRecord] = {}
        self.refused: list[str] = []
        self.appended: list[FollowerLink] = []
        me = Identity(cluster, name, f"{name}1", f"boot {name}", False, 1)
        find, appended = self.nodes.get, self.appended.append
        self.peers = Peers(Env(), lambda: me, secret, self, find, appended, self._refused)
        self.port = 0

    def _refused(self, record: NodeRecord) -> None:
        self.refused.append(record.node)

    async def listen(self) -> End:
        self.port = (await self.peers.listen("127.0.0.1:0"))[1]
        return self

    def knows(self, other: End) -> None:
        self.nodes[other.name] = node(other.name, host="127.0.0.1", peer_port=other.port)
        self.peers.nodes_changed()

    def find(self, frame: Open, peer: Identity) -> Following | tuple[Refusal, int, str]:
        return Refusal.NOT_HERE, 0, ""


async def until(condition: Callable[[], object], what: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)
    assert condition(), what


async def test_a_node_is_dialled_as_soon_as_it_is_known() -> None:
    leader, follower = End("a"), await End("b").listen()
    link = leader.peers.link("b")
    await asyncio.sleep(0)
    assert not link.is_connected
    leader.knows(follower)
    await until(lambda: link.is_connected, "connected")
    link.tick(leader.peers.env.clock.monotonic_ns())
    await until(lambda: link.confirmed_ns is not None, "a ping is answered")
    await leader.peers.close()
    await follower.peers.close()
    await until(lambda: not link.is_connected, "the end of it is noticed")


async def test_a_node_that_comes_back_is_dialled_again(caplog: pytest.LogCaptureFixture) -> None:
    leader, follower = End("a"), await End("b").listen()
    leader.knows(follower)
    link = leader.peers.link("b")
    await until(lambda: link.is_connected, "connected")
    await follower.peers.close()
    await until(lambda: not link.is_connected and leader.refused, "nobody listens any more")
    assert set(leader.refused) == {"b"}
    again = await End("b").listen()
    leader.knows(again)
    await until(lambda: link.is_connected, "connected again")
    await leader.peers.close()
    await again.peers.close()


async def test_a_node_that_leaves_the_cluster_before_it_ends_is_not_waited_for() -> None:
    leader, follower = End("a"), await End("b").listen()
    leader.knows(follower)
    link = leader.peers.link("b")
    await until(lambda: link.is_connected, "connected")
    assert not link.is_silent
    del leader.nodes["b"]  # as it ends in good order: its record goes first
    leader.peers.nodes_changed()
    await follower.peers.close()
    await until(lambda: link.is_silent, "it is known to be dead though nothing is dialled that could refuse")
    await leader.peers.close()


@pytest.mark.parametrize(
    ("leader", "follower", "reason"),
    [
        (End, lambda name: End(name, b"another secret!!"), "secret"),
        (End, lambda name: End(name, b""), "secret"),
        (lambda name: End(name, b""), End, "secret"),
        (End, lambda name: End(name, cluster="other"), "cluster"),
    ],
)
async def test_who_does_not_belong_here_is_told_why(
    leader: Callable[[str], End],
    follower: Callable[[str], End],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, other = leader("a"), await follower("b").listen()
    one.knows(other)
    link = one.peers.link("b")
    await until(lambda: reason in caplog.text, "the reason is logged")
    assert not link.is_connected
    await one.peers.close()
    await other.peers.close()


async def _said(port: int, data: bytes) -> bytes:
    """Send bytes to a node; return what it answers until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x08\0\0\0\x04\x91\xcc\x01\x02", b"\xff" * 64])
async def test_a_stranger_is_sent_away_and_nobody_else_notices(data: bytes) -> None:
    leader, follower = End("a"), await End("b").listen()
    leader.knows(follower)
    link = leader.peers.link("b")
    await until(lambda: link.is_connected, "connected")
    reader = PeerReader()
    reader.receive(await _said(follower.port, data))
    found = reader.next_frame()
    assert found is not None and isinstance(found[0], Farewell)
    assert link.is_connected
    await leader.peers.close()
    await follower.peers.close()


async def test_who_says_nothing_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "HANDSHAKE_DEADLINE_S", 0.05)
    follower = await End("b").listen()
    answer = await _said(follower.port, b"")
    assert b"too long" in answer
    await follower.peers.close()


async def test_too_many_connections_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "INCOMING_MAX", 1)
    follower = await End("b").listen()
    with socket.create_connection(("127.0.0.1", follower.port)):
        await asyncio.sleep(0.01)
        assert b"too many" in await _said(follower.port, b"")
    await follower.peers.close()


async def test_a_node_that_connects_again_replaces_its_earlier_connection() -> None:
    follower = await End("b").listen()
    ends = [End("a"), End("a")]
    for end in ends:
        end.knows(follower)
        link = end.peers.link("b")
        await until(lambda link=link: link.is_connected, "connected")  # type: ignore[misc]
    await until(lambda: not ends[0].peers.link("b").is_connected, "the first one is over")
    for end in ends:
        await end.peers.close()
    await follower.peers.close()
