"""Connections between nodes over real sockets: who gets in, and that what is wrong with one is no other's."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop
from tests.certificates import Certificates, Files
from tests.unit.cluster.models import node

from flintmq.cluster.following import Following
from flintmq.cluster.link import FollowerLink, LeaderLink
from flintmq.cluster.state import LAG_NS_MAX, NodeRecord
from flintmq.env import Env
from flintmq.nsqd.cluster import peers as peers_module
from flintmq.nsqd.cluster.peer_tls import PeerFiles, PeerTls
from flintmq.nsqd.cluster.peers import Peers
from flintmq.wire.peer import Farewell, Identity, Open, PeerReader, Purpose, Refusal, encode_one

SECRET = b"0123456789abcdef"
PATIENCE_S = 20.0


class End:
    """One node: what it listens for, what it was told."""

    def __init__(
        self,
        name: str,
        secret: bytes = SECRET,
        cluster: str = "c",
        tls: PeerTls | None = None,
        version: int = 1,
        process: int = 1,
    ) -> None:
        self.name = name
        self.nodes: dict[str, NodeRecord] = {}
        self.refused: list[str] = []
        self.appended: list[FollowerLink] = []
        self.incarnation = f"{name}{process}"
        me = Identity(cluster, name, self.incarnation, f"boot {name}", False, version)
        find, appended = self.nodes.get, self.appended.append
        self.peers = Peers(Env(), lambda: me, secret, self, find, appended, self._refused, tls=tls)
        self.port = 0

    def _refused(self, record: NodeRecord) -> None:
        self.refused.append(record.node)

    async def listen(self) -> End:
        self.port = (await self.peers.listen("127.0.0.1:0"))[1]
        return self

    def knows(self, other: End) -> None:
        address = {"host": "127.0.0.1", "peer_port": other.port}
        self.nodes[other.name] = node(other.name, incarnation=other.incarnation, **address)
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


async def test_nodes_with_copies_of_the_same_are_connected_once_also_when_neither_leads() -> None:
    lower, higher = await End("a").listen(), await End("b").listen()
    for one, other in ((lower, higher), (higher, lower)):
        one.knows(other)
        one.peers.keep_in_touch([other.name])
        one.peers.leave_idle()
    await until(lambda: "a" in higher.peers._by_node, "the one with the lower id has dialled")
    assert not higher.peers.links() and not higher.peers.is_silent("a")
    higher.peers._by_node["a"].heard_ns -= LAG_NS_MAX
    assert higher.peers.is_silent("a")
    link = higher.peers.link("a")  # it begins to lead
    link.tick(higher.peers.env.clock.monotonic_ns())
    assert link.is_silent, "that was known before"
    await until(lambda: link.is_connected and not link.is_silent, "it is heard of again")
    await until(lambda: "b" in lower.peers._by_node, "connected both ways")
    lower.peers.leave_idle()
    assert not lower.peers.links(), "one connection is enough"
    await lower.peers.close()
    await higher.peers.close()


async def test_a_connection_over_which_nothing_comes_is_closed() -> None:
    leader, follower = End("a"), await End("b").listen()
    leader.knows(follower)
    link = leader.peers.link("b")
    await until(lambda: link.is_connected, "connected")
    await until(lambda: "a" in follower.peers._by_node, "accepted")
    first = follower.peers._by_node["a"]
    first.heard_ns -= peers_module.FORGET_NS
    follower.peers.tick(follower.peers.env.clock.monotonic_ns())
    await until(lambda: follower.peers._by_node.get("a") not in (None, first), "the other end has dialled again")
    await leader.peers.close()
    await follower.peers.close()


class Closed:
    """The transport of a socket that an event loop has closed without telling anybody."""

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_extra_info(self, name: str) -> tuple[str, int] | None:
        return ("127.0.0.1", 1) if name == "peername" else None

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        raise RuntimeError("the handler is closed")


async def test_a_connection_that_is_gone_unnoticed_is_forgotten() -> None:
    peers = End("a").peers
    incoming = peers_module._PlainIncoming(peers)
    incoming.connection_made(cast(Any, Closed()))
    assert list(peers._incoming) == [incoming]
    incoming.fail("the handshake took too long")
    assert not peers._incoming and incoming.closed.done()
    incoming.connection_lost(None)  # if it is told after all


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


# -- two processes of one node -----------------------------------------------------------------------------------------


async def test_a_process_is_sent_nothing_before_it_is_known_to_be_the_registered_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    leader, follower = End("a"), await End("b", process=2).listen()
    leader.nodes["b"] = node("b", host="127.0.0.1", peer_port=follower.port)  # of the process before
    link = leader.peers.link("b")
    await until(lambda: "incarnation b2 of the node answers there, and b1 is registered" in caplog.text, "refused")
    assert not link.is_connected and not leader.peers.is_registered("b")
    leader.knows(follower)
    await until(lambda: link.is_connected, "connected when this node has heard of it")
    assert leader.peers.is_registered("b") and link.incarnation == "b2"
    del leader.nodes["b"]
    leader.peers.nodes_changed()
    assert link.is_connected and not leader.peers.is_registered("b"), "it goes on without its lease, and joins nothing"
    await leader.peers.close()
    await follower.peers.close()


async def test_who_is_registered_is_dialled_at_once_however_long_the_pause_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "AGAIN_S", (2 * PATIENCE_S, 2 * PATIENCE_S))
    leader, first, second = End("a"), await End("b").listen(), await End("b", process=2).listen()
    leader.knows(first)
    await first.peers.close()
    link = leader.peers.link("b")
    await until(lambda: leader.refused, "nobody listens")
    leader.knows(second)
    await until(lambda: link.is_connected, "connected")
    await leader.peers.close()
    await second.peers.close()


async def test_a_process_is_left_when_another_one_registers_as_its_node() -> None:
    leader, first, second = End("a"), await End("b").listen(), await End("b", process=2).listen()
    leader.knows(first)
    link = leader.peers.link("b")
    await until(lambda: link.is_connected and "a" in first.peers._by_node, "connected")
    leader.knows(second)
    assert not link.is_connected, "at once, whatever is under way"
    await until(lambda: link.is_connected and "a" not in first.peers._by_node, "connected with the other one")
    assert link.incarnation == "b2"
    for end in (leader, first, second):
        await end.peers.close()


async def test_two_processes_of_a_node_do_not_take_its_place_from_each_other(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    follower, first, second = await End("b").listen(), await End("a").listen(), await End("a", process=2).listen()
    follower.knows(first)
    first.knows(follower)
    one = first.peers.link("b")
    await until(lambda: one.is_connected and "a" in follower.peers._by_node, "connected")
    accepted = follower.peers._by_node["a"]
    second.knows(follower)
    other = second.peers.link("b")
    refused: list[str] = []
    tell_refused = follower.peers._tell_refused

    def tell(incoming: Any) -> None:
        refused.append(incoming.reason)
        tell_refused(incoming)

    monkeypatch.setattr(follower.peers, "_tell_refused", tell)
    await until(lambda: len(refused) >= 5, "it has tried again and again")
    assert follower.peers._by_node["a"] is accepted and one.is_connected and not other.is_connected
    assert caplog.text.count("another process of node a is connected, and incarnation a2 is not registered") <= 2
    follower.knows(second)
    await until(lambda: other.is_connected and not one.is_connected, "the one that is registered has the place")
    await until(lambda: len(refused) >= 10, "now the first one tries again")
    assert other.is_connected and not one.is_connected
    assert caplog.text.count("node a is connected\n") == 2, "nobody is told each time"
    for end in (first, second, follower):
        await end.peers.close()


async def test_several_nodes_on_one_host_are_each_refused_once_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their reasons come in turn, as each has its own."""
    follower = await End("b", cluster="").listen()
    dialling = [End("a"), End("c")]
    refused: Counter[str] = Counter()
    tell_refused = follower.peers._tell_refused

    def tell(incoming: Any) -> None:
        refused[incoming.node] += 1
        tell_refused(incoming)

    monkeypatch.setattr(follower.peers, "_tell_refused", tell)
    for each in dialling:
        each.knows(follower)
        each.peers.link("b")
    await until(lambda: refused["a"] >= 4 and refused["c"] >= 4, "both have tried again and again")
    for name in "ac":
        assert caplog.text.count(f": refused: node {name} belongs to cluster c, and") == 1, caplog.text
    for end in (*dialling, follower):
        await end.peers.close()


async def test_a_process_that_is_silent_keeps_nobody_from_its_place() -> None:
    follower, first, second = await End("b").listen(), await End("a").listen(), await End("a", process=2).listen()
    follower.knows(first)
    first.knows(follower)
    link = first.peers.link("b")
    await until(lambda: link.is_connected and "a" in follower.peers._by_node, "connected")
    accepted = follower.peers._by_node["a"]
    accepted.heard_ns -= LAG_NS_MAX
    second.knows(follower)
    other = second.peers.link("b")
    await until(lambda: other.is_connected, "connected")
    for end in (first, second, follower):
        await end.peers.close()


async def test_who_takes_part_no_longer_has_no_connections_and_makes_none() -> None:
    one, other = await End("a").listen(), await End("b").listen()
    one.knows(other)
    other.knows(one)
    to_it, from_it = one.peers.link("b"), other.peers.link("a")
    await until(lambda: to_it.is_connected and from_it.is_connected, "connected both ways")
    await until(lambda: "a" in other.peers._by_node, "both know who has dialled")
    link = other.peers._by_node["a"].link
    assert link is not None
    other.peers.end("it takes part no longer")
    link.acknowledge(cast(Any, object()))
    assert not link.has_output, "what is synced by now is acknowledged to nobody"
    await until(lambda: not to_it.is_connected and not from_it.is_connected, "no connection is left")
    assert not other.peers.links()
    assert other.peers.link("a") is not from_it
    other.peers.leave("a")
    with pytest.raises(peers_module.PassageFailed, match="takes part no longer"):
        await other.peers.open_passage(other.nodes["a"], cast(Any, None))
    await until(lambda: one.refused, "nobody listens there")
    await one.peers.close()


# -- TLS ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def tls_of(certificates: Certificates, files: Files | None = None) -> PeerTls:
    """What a node with these files has; those of a node of the cluster unless they are given."""
    files = files or certificates.server
    return PeerTls(PeerFiles(files.cert, files.key, certificates.ca))


async def test_nodes_with_certificates_of_the_cluster_connect(certificates: Certificates) -> None:
    leader = End("a", tls=tls_of(certificates))
    follower = await End("b", tls=tls_of(certificates)).listen()
    leader.knows(follower)
    link = leader.peers.link("b")
    await until(lambda: link.is_connected, "connected")
    link.tick(leader.peers.env.clock.monotonic_ns())
    await until(lambda: link.confirmed_ns is not None, "a ping is answered")
    await leader.peers.close()
    await follower.peers.close()
    await until(lambda: not link.is_connected, "the end of it is noticed")


@pytest.mark.parametrize("kind", ["plain", "stranger", "self-signed", "expired"])
@pytest.mark.parametrize("who", ["leader", "follower"])
async def test_a_node_without_a_certificate_of_the_cluster_is_refused_and_both_ends_say_so(
    certificates: Certificates, kind: str, who: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = tls_of(certificates)
    bad = None if kind == "plain" else tls_of(certificates, certificates.client(kind))
    leader = End("a", tls=bad if who == "leader" else good)
    follower = await End("b", tls=bad if who == "follower" else good).listen()
    leader.knows(follower)
    link = leader.peers.link("b")

    def lines(what: str) -> list[str]:
        return [each.getMessage() for each in caplog.records if what in each.getMessage()]

    await until(lambda: lines("it is dialled again") and lines("refused: "), "both ends say it")
    for line in lines("it is dialled again") + lines("refused: "):
        assert "--cluster-tls-cert" in line or "certificate" in line or "closed" in line, line
    assert any("--cluster-tls-cert" in line for line in lines("PEER("))
    assert not link.is_connected
    count = len(lines("refused: "))
    attempts = len(leader.refused)
    assert count <= 2 and not attempts, "it is told once, and nobody is taken for dead"
    await leader.peers.close()
    await follower.peers.close()


async def test_a_node_whose_certificate_names_another_host_is_not_believed(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    leader = End("a", tls=tls_of(certificates))
    follower = await End("b", tls=tls_of(certificates, certificates.client("good"))).listen()
    leader.knows(follower)
    link = leader.peers.link("b")
    await until(lambda: "certificate verify failed" in caplog.text, "the reason is logged")
    assert not link.is_connected
    await leader.peers.close()
    await follower.peers.close()


async def test_a_renewed_certificate_is_used_and_a_broken_one_is_not(
    certificates: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger, good = certificates.client("stranger"), certificates.server
    cert, key = tmp_path / "node.pem", tmp_path / "node.key"

    def put(files: Files) -> None:
        for source, target in ((files.cert, cert), (files.key, key)):
            shutil.copy(source, tmp_path / "new")
            os.replace(tmp_path / "new", target)

    put(stranger)
    leader = End("a", tls=tls_of(certificates))
    follower = await End("b", tls=tls_of(certificates, Files(str(cert), str(key)))).listen()
    leader.knows(follower)
    link = leader.peers.link("b")
    await until(lambda: "certificate verify failed" in caplog.text, "the reason is logged")
    put(good)
    await until(lambda: link.is_connected, "the new one is used")
    cert.write_text("no certificate")
    follower.peers.tls.acceptor()  # type: ignore[union-attr]  # as for the next connection
    assert "are not used, those before stay" in caplog.text
    assert link.is_connected
    await leader.peers.close()
    await follower.peers.close()


async def test_a_node_of_the_next_version_is_let_in() -> None:
    leader, follower = End("a", version=2), await End("b").listen()
    leader.knows(follower)
    link = leader.peers.link("b")
    await until(lambda: link.is_connected, "connected")
    await leader.peers.close()
    await follower.peers.close()


async def test_thousands_of_copies_are_followed_over_many_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else the node has to do goes on in between; all of them come, and what is sent behind them."""
    monkeypatch.setattr(LeaderLink, "receive", lambda *_: None)  # it has no such streams
    count, turn = 10 * peers_module.OPENS_PER_TURN, 0
    opened: list[int] = []
    loop = asyncio.get_running_loop()

    def tick() -> None:
        nonlocal turn
        turn += 1
        if len(opened) < count:
            loop.call_soon(tick)

    class Copies(End):
        def find(self, frame: Open, peer: Identity) -> tuple[Refusal, int, str]:
            opened.append(turn)
            return Refusal.NOT_HERE, 0, ""

    leader, follower = End("a"), await Copies("b").listen()
    leader.knows(follower)
    link = leader.peers.link("b")
    await until(lambda: link.is_connected, "connected")
    (connection,) = [each.connection for each in leader.peers._dialled.values()]
    assert connection is not None
    tick()
    opens = [encode_one(Open(number, "t", 0, 7, 9, 5)) for number in range(count)]
    connection.write(b"".join(opens))
    await until(lambda: len(opened) == count, "all are opened")
    connection.write(encode_one(Open(count, "t", 0, 7, 9, 5)))
    await until(lambda: len(opened) == count + 1, "it reads on")
    assert max(Counter(opened).values()) <= peers_module.OPENS_PER_TURN
    await leader.peers.close()
    await follower.peers.close()


async def test_a_passage_that_is_given_up_while_its_answer_comes_is_closed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever opens it may be cancelled in the very turn in which the other node answers."""
    made: list[peers_module.Passage] = []
    greeted = peers_module.Passage.greeted

    def given_up(passage: peers_module.Passage, frame: Any) -> None:
        made.append(passage)
        opening.cancel()  # which is carried out a turn later, and `opened` is cancelled at once
        greeted(passage, frame)

    monkeypatch.setattr(peers_module.Passage, "greeted", given_up)
    dialer, acceptor = End("a"), await End("b").listen()
    record = node("b", host="127.0.0.1", peer_port=acceptor.port)
    opening = asyncio.create_task(dialer.peers.open_passage(record, cast(Any, None)))
    with pytest.raises(asyncio.CancelledError):
        await opening
    (passage,) = made
    assert passage.opened.cancelled()
    await until(lambda: not acceptor.peers._incoming, "the other end is closed")
    assert not [each for each in caplog.records if each.levelname == "ERROR"], caplog.text
    await acceptor.peers.close()


class Told:
    """Whoever wants a passage."""

    def __init__(self) -> None:
        self.said: list[bytes] = []
        self.reasons: list[str] = []

    def received(self, data: bytes) -> None:
        assert not self.reasons
        self.said.append(data)

    def lost(self, reason: str) -> None:
        self.reasons.append(reason)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_what_a_node_said_before_it_went_is_read_when_a_write_finds_out(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """Its last words came, and were not read yet: without them nobody knows what became of what it was sent."""

    async def run() -> None:
        told, here = Told(), End("a").peers
        with socket.create_server(("127.0.0.1", 0)) as listener:
            _, passage = await asyncio.get_running_loop().create_connection(
                lambda: peers_module.Passage(here, "b", told, Purpose.CLIENTS, None), *listener.getsockname()
            )
            end, _ = listener.accept()
        with end:
            while not end.recv(65536, socket.MSG_PEEK):
                pass
            passage.trusted()
            passage.opened.set_result(None)
            end.sendall(b"last words")
        # What it was sent is unread, so the kernel resets the connection: the write fails before anything is read.
        passage.write(b"one more")
        await until(lambda: told.reasons, "it is lost")
        assert b"".join(told.said) == b"last words"

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


@pytest.mark.parametrize("turns", range(12))
@pytest.mark.parametrize("kind", ["_Outgoing", "Passage"])
def test_no_connection_outlives_that_it_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, turns: int
) -> None:
    """uvloop closes it without a word to its protocol, though it may be connected, and greeted, in that very turn."""
    made: list[peers_module._Connection] = []
    connection_made = getattr(peers_module, kind).connection_made

    def noted(connection: peers_module._Connection, transport: asyncio.BaseTransport) -> None:
        made.append(connection)
        connection_made(connection, transport)

    monkeypatch.setattr(getattr(peers_module, kind), "connection_made", noted)

    async def run() -> None:
        dialer, acceptor = End("a"), await End("b").listen()
        record, told = node("b", host="127.0.0.1", peer_port=acceptor.port), Told()
        if kind == "Passage":
            dialling: asyncio.Task[Any] = asyncio.create_task(dialer.peers.open_passage(record, told))
        else:
            dialer.peers._dialled["b"] = peers_module._Dialling(LeaderLink("b", 0))
            dialling = asyncio.create_task(dialer.peers._connected("b", record))
        for _ in range(turns):
            await asyncio.sleep(0)
        if dialling.cancel():  # it is not over yet
            with pytest.raises(asyncio.CancelledError):
                await dialling
            assert not told.reasons
        else:  # it is open, and that node serves no clients
            await until(lambda: told.reasons, "closed")
        assert all(connection.closed.done() for connection in made)
        for connection in made:
            connection.schedule()
        await acceptor.peers.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    assert not [each for each in caplog.records if each.levelname == "ERROR"], caplog.text
