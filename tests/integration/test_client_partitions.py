"""Our client and a redesigned NSQ over real sockets: a byte-exact imitation of Youzan's daemons, and our own processes.

The imitation is tests/unit/client/fake_cluster.py, with its own reading and writing of bytes. What can be asked of both
is asked of both; leaders move in the imitation only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

import msgspec
import pytest
from aiohttp import web
from tests.integration.daemons import PATIENCE_S, Daemons, Nsqd, Nsqlookupd, wait_until
from tests.unit.client.fake_cluster import Cluster

from flintmq import Consumer, Message, NsqdError, Producer, PublishRefused
from flintmq.client.core.sharding import partition_of
from flintmq.wire.commands import COMMANDS


class Peer(Protocol):
    """What a test needs of a redesigned NSQ with two nsqds."""

    @property
    def lookups(self) -> list[str]: ...
    async def create(self, topic: str, partitions: int, *, ordered: bool = False, extended: bool = False) -> None: ...
    def delivers_traces(self) -> bool: ...


class Youzan:
    """The imitation; its nsqlookupd answer in the envelope and list each other."""

    def __init__(self) -> None:
        self.cluster = Cluster("a", "b")
        self.cluster.is_enveloped = True
        self.cluster.lookups = []
        self.nodes = [*self.cluster.nodes.values()]
        for node in self.nodes:
            node.knows_sub_order = False

    @property
    def lookups(self) -> list[str]:
        return self.cluster.lookups[:1]

    async def create(self, topic: str, partitions: int, *, ordered: bool = False, extended: bool = False) -> None:
        self.cluster.create(topic, partitions, is_ordered=ordered, is_extended=extended)

    def delivers_traces(self) -> bool:
        return True

    async def answer(self, request: web.Request) -> web.Response:
        status, body = self.cluster.http(request.path, dict(request.query))
        return web.Response(status=status, body=body, content_type="application/json")


class Flintmq:
    """Our own daemons."""

    def __init__(self, lookup: Nsqlookupd, nsqds: list[Nsqd]) -> None:
        self._lookup = lookup
        self.nsqds = nsqds
        self.lookups = [f"http://{lookup.http[0]}:{lookup.http[1]}"]

    async def create(self, topic: str, partitions: int, *, ordered: bool = False, extended: bool = False) -> None:
        path = f"/topic/create?topic={topic}&partition_num={partitions}&replicator=1"
        path += "&orderedmulti=true" * ordered + "&extend=true" * extended
        answer = await asyncio.to_thread(self._lookup.request, "POST", path)
        assert answer.status == 200, answer

    def delivers_traces(self) -> bool:
        return "PUB_TRACE" in COMMANDS


@asynccontextmanager
async def youzan() -> AsyncIterator[Youzan]:
    peer = Youzan()
    async with AsyncExitStack() as stack:
        for node in peer.nodes:
            await node.listen()
            stack.callback(node.stop)
        for _ in range(2):
            app = web.Application()
            app.router.add_get("/{path:.*}", peer.answer)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            peer.cluster.lookups.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        yield peer


def flintmq(daemons: Daemons) -> Flintmq:
    lookup = daemons.nsqlookupd()
    flag = f"--lookupd-tcp-address={lookup.tcp[0]}:{lookup.tcp[1]}"
    nsqds = [daemons.nsqd("--durability=os", "--broadcast-address=127.0.0.1", flag) for _ in range(2)]
    wait_until(lambda: len(lookup.get("/nodes")["producers"]) == 2)
    return Flintmq(lookup, nsqds)


@pytest.fixture(params=["youzan", "flintmq"])
def play(request):
    """Runs a scenario against each."""

    def play(scenario: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            if request.param == "flintmq":
                peer = await asyncio.to_thread(flintmq, request.getfixturevalue("daemons"))
                await scenario(peer)
            else:
                async with youzan() as imitation:
                    await scenario(imitation)

        asyncio.run(main())

    return play


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def producer(peer: Peer, **options: Any) -> Producer:
    return Producer(nsqlookupd_http_addresses=peer.lookups, **options)


def consumer(peer: Peer, topic: str, **options: Any) -> Consumer:
    return Consumer(topic, "ch", nsqlookupd_http_addresses=peer.lookups, **options)


# --- both ---


def test_partitions_take_turns_and_are_all_consumed(play):
    async def scenario(peer: Peer) -> None:
        await peer.create("t", 3)
        seen: list[Message] = []
        async with (
            consumer(peer, "t", handler=seen.append, inline=True, max_in_flight=100) as consuming,
            producer(peer) as producing,
        ):
            assert [*consuming.partitions] == [0, 1, 2]
            for number in range(60):
                await producing.pub("t", b"%d" % number)
            await asyncio.gather(*(producing.pub("t", b"%d" % number) for number in range(60, 1000)))
            await until(lambda: len(seen) == 1000)
            assert sorted(int(message.body) for message in seen) == list(range(1000))
            assert {message.partition for message in seen} == {0, 1, 2}
            for message in seen:
                assert message.internal_id is not None
                assert message.internal_id >> 50 == message.partition
            await until(lambda: consuming.stats().finished == 1000)

    play(scenario)


def test_a_sharding_id_keeps_its_order_from_end_to_end(play):
    async def scenario(peer: Peer) -> None:
        await peer.create("orders", 3, ordered=True)
        seen: dict[str, list[int]] = {}
        failed: set[bytes] = set()

        def handle(message: Message) -> None:
            name, number = message.body.decode().split("/")
            if number == "7" and message.body not in failed:
                failed.add(message.body)
                raise ValueError("once")
            assert message.partition == partition_of(name, 3)
            assert message.offset is not None
            seen.setdefault(name, []).append(int(number))

        names = [f"customer-{number}" for number in range(20)]
        options = {"handler": handle, "inline": True, "ordered": True, "backoff": 0.01, "max_backoff": 0.02}
        async with consumer(peer, "orders", **options) as consuming, producer(peer) as producing:
            for number in range(20):
                await asyncio.gather(
                    *(producing.pub("orders", f"{name}/{number}".encode(), sharding_id=name) for name in names)
                )
            await until(lambda: sum(map(len, seen.values())) == 400)
            assert consuming.stats().order_violations == 0
        assert seen == {name: list(range(20)) for name in names}

    play(scenario)


def test_the_calls_of_one_id_may_be_made_at_once(play):
    async def scenario(peer: Peer) -> None:
        await peer.create("t", 2)
        seen: list[int] = []
        async with producer(peer) as producing:
            await asyncio.gather(*(producing.pub("t", b"%d" % number, sharding_id="x") for number in range(2000)))
            assert producing.stats().commands <= 12, "what waits for an answer is gathered"
        options = {"handler": lambda message: seen.append(int(message.body)), "inline": True, "ordered": True}
        async with consumer(peer, "t", **options):
            await until(lambda: len(seen) == 2000)
        assert seen == list(range(2000))

    play(scenario)


def test_a_topic_that_must_be_consumed_in_order(play):
    async def scenario(peer: Peer) -> None:
        await peer.create("t", 2, ordered=True)
        with pytest.raises(NsqdError, match="E_SUB_ORDER_IS_MUST"):
            async with consumer(peer, "t") as consuming:
                async for _ in consuming:
                    pass

    play(scenario)


def test_a_partition_that_is_none(play):
    async def scenario(peer: Peer) -> None:
        await peer.create("t", 2)
        async with producer(peer) as producing:
            await producing.pub("t", b"x", partition=1)
            with pytest.raises(PublishRefused, match="partitions 0 to 1, not 2"):
                await producing.pub("t", b"x", partition=2)

    play(scenario)


def test_trace_from_end_to_end(play, caplog):
    caplog.set_level(logging.INFO, "flintmq.trace")

    async def scenario(peer: Peer) -> None:
        if not peer.delivers_traces():
            pytest.skip("these daemons have no PUB_TRACE yet")
        await peer.create("t", 1)
        async with producer(peer) as producing:
            first = await producing.pub("t", b"first", trace_id=12345, partition=0)
            producing.trace("t")
            await producing.pub("t", b"second", partition=0)
        async with consumer(peer, "t", ordered=True, trace=True) as consuming:
            seen = []
            async for message in consuming:
                seen.append(message)
                message.finish()
                if len(seen) == 2:
                    break
        assert (seen[0].internal_id, seen[0].trace_id, seen[0].offset) == (first.internal_id, 12345, first.offset)
        lines = [msgspec.json.decode(record.message) for record in caplog.records if record.name == "flintmq.trace"]
        assert [line["event"] for line in lines] == ["publish", "receive", "receive"]
        published, _, received = lines
        for name in ("internal_id", "trace_id", "offset", "raw_size", "partition", "nsqd"):
            assert published[name] == received[name]
        assert received["local_ip"] == received["nsqd_ip"] == "127.0.0.1"

    play(scenario)


def test_headers_from_end_to_end(play):
    async def scenario(peer: Peer) -> None:
        if not peer.delivers_traces():
            pytest.skip("these daemons have no PUB_EXT yet")
        await peer.create("t", 1, extended=True)
        async with producer(peer) as producing:
            found = await producing.pub("t", b"body", headers={"color": "red"}, trace_id=99)
            assert found.trace_id == 99
        async with consumer(peer, "t") as consuming:
            async for message in consuming:
                assert (message.body, message.headers) == (b"body", {"color": "red", "##trace_id": "99"})
                assert message.trace_id == 99
                message.finish()
                break

    play(scenario)


# --- the imitation: leaders move ---


def test_a_leader_moves_while_messages_flow():
    async def main() -> None:
        async with youzan() as peer:
            await peer.create("t", 2, ordered=True)
            partitions = peer.cluster.topics["t"].partitions
            seen: dict[int, list[int]] = {0: [], 1: []}

            def handle(message: Message) -> None:
                assert message.partition is not None
                seen[message.partition].append(int(message.body))

            options = {"handler": handle, "inline": True, "ordered": True}
            async with consumer(peer, "t", **options) as consuming, producer(peer) as producing:
                for number in range(300):
                    if number in (100, 200):
                        peer.cluster.move("t", 0, "b" if number == 100 else "a", closes=number == 100)
                    await asyncio.gather(
                        *(producing.pub("t", b"%d" % number, partition=partition) for partition in (0, 1))
                    )
                await until(lambda: all(numbers and numbers[-1] == 299 for numbers in seen.values()))
                assert consuming.stats().order_violations == 0
            for partition, numbers in seen.items():
                assert list(dict.fromkeys(numbers)) == list(range(300))
                assert [int(body) for body in partitions[partition].bodies] == list(range(300))

    asyncio.run(main())


def test_what_youzans_daemons_see():
    """The command is SUB_ORDERED for them, at once, and they are told of nothing that they refuse."""

    async def main() -> None:
        async with youzan() as peer:
            await peer.create("t", 2, ordered=True)
            async with consumer(peer, "t", ordered=True) as consuming, producer(peer) as producing:
                await producing.pub("t", b"x", sharding_id="x")
                async for message in consuming:
                    message.finish()
                    break
            lines = sorted(line for node in peer.nodes for line in node.subscribed)
            assert lines == ["SUB_ORDERED t ch 0", "SUB_ORDERED t ch 1"]
            assert [violation for node in peer.nodes for violation in node.violations] == []
            assert all("extend_support" not in request for node in peer.nodes for request in node.identified)

    asyncio.run(main())


# --- our daemons: restarts ---


def test_order_through_a_kill_of_nsqd(daemons):
    """What was acknowledged is there, in order, after kill -9 under load."""

    async def main() -> None:
        peer = await asyncio.to_thread(flintmq, daemons)
        await peer.create("t", 2)
        acknowledged: list[int] = []
        async with producer(peer, timeout=PATIENCE_S) as producing:

            async def publish() -> None:
                for number in range(400):
                    await producing.pub("t", b"%d" % number, sharding_id="x")
                    acknowledged.append(number)

            task = asyncio.create_task(publish())
            await until(lambda: len(acknowledged) > 100)
            for nsqd in peer.nsqds:
                await asyncio.to_thread(nsqd.kill)
                await asyncio.to_thread(nsqd.start)
            await task
        seen: list[int] = []
        options = {"handler": lambda message: seen.append(int(message.body)), "inline": True, "ordered": True}
        async with consumer(peer, "t", **options) as consuming:
            await until(lambda: seen and seen[-1] == 399)
            assert consuming.stats().order_violations == 0
        assert list(dict.fromkeys(seen)) == list(range(400))

    asyncio.run(main())
