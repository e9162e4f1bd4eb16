"""The embedded store as its own process uses it: the suite of stores, and its answers when its disk gives none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.sim.loop import Node, Simulation
from tests.store_cases import CASES, put

from flintmq.cluster.store import OutcomeUnknown, Span, StoreFull, StoreUnavailable
from flintmq.nsqlookupd.own_store import OwnStore
from flintmq.nsqlookupd.store import EmbeddedStore


def run(scenario: Callable[[Node, OwnStore], Awaitable[None]], seed: int = 1) -> str:
    with Simulation(seed) as sim:
        node = sim.node("lookup")
        done = asyncio.Event()

        async def process() -> None:
            embedded = EmbeddedStore(node.env, node.files)
            await node.env.run_blocking(embedded.open)
            embedded.start()
            await scenario(node, OwnStore(embedded, node.env))
            await embedded.close()
            done.set()

        async def main() -> None:
            node.start(process)
            await done.wait()

        sim.run(main())
        return sim.trace_hash


@pytest.mark.parametrize("name", CASES)
def test_it_does_what_every_store_does(name: str):
    run(lambda _, store: CASES[name](store, "/case/"))


def test_what_the_disk_does_not_take_is_unknown():
    async def scenario(node: Node, store: OwnStore) -> None:
        await put(store, "/a")
        node.freeze_disk(10.0)
        with pytest.raises(OutcomeUnknown, match="not known to be durable"):
            await put(store, "/b")
        with pytest.raises(StoreUnavailable, match="not written within"):
            await store.get("/b")
        await asyncio.sleep(10.0)
        assert await store.get("/b") is not None, "it was written in the end"

    run(scenario)


def test_while_its_disk_fails_a_change_is_refused_and_is_not_made_later():
    async def scenario(node: Node, store: OwnStore) -> None:
        await put(store, "/a")
        node.disk.fail("commit", times=3)
        with pytest.raises(OutcomeUnknown):
            await put(store, "/b")
        with pytest.raises(StoreFull, match="the store cannot be written"):
            await put(store, "/c")
        while True:
            try:
                found = await store.range(Span.of_prefix("/"))
                break
            except StoreFull:
                await asyncio.sleep(0.1)
        assert [pair.key for pair in found.found] == ["/a", "/b"]

    run(scenario)


def test_a_watch_tells_nothing_before_it_is_durable():
    async def scenario(node: Node, store: OwnStore) -> None:
        revision = await put(store, "/a")
        async with store.watch(Span.of_prefix("/"), revision) as watched:
            node.freeze_disk(2.0)
            writing = asyncio.ensure_future(put(store, "/b"))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await anext(watched)
            events = await anext(watched)
            assert [event.key for event in events.events] == ["/b"]
            await writing

    run(scenario)
