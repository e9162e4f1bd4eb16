"""nsqlookupd's coordination store in the simulation: its suite, and what becomes of it when nodes and networks fail."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial

import pytest
from tests.sim.loop import Node, Simulation
from tests.store_cases import CASES, put

from flintmq.cluster.store import (
    Events,
    Fate,
    LeaseNotFound,
    OutcomeUnknown,
    Put,
    Snapshot,
    Span,
    StoreError,
    StoreUnavailable,
    Txn,
    follow,
    swap,
)
from flintmq.env import Env
from flintmq.net import etcd_wire as wire
from flintmq.net.etcd import STEADY_S, WATCH_PAUSE_S, EtcdOptions, EtcdStore
from flintmq.net.http_client import HttpClient
from flintmq.net.http_exchange import Answer, Request
from flintmq.net.lease import holding
from flintmq.nsqlookupd import server
from flintmq.nsqlookupd.options import NsqlookupdOptions

HTTP = 4161
ALL = Span.of_prefix("")


def start(node: Node) -> None:
    options = NsqlookupdOptions(tcp_address="0.0.0.0:4160", http_address=f"0.0.0.0:{HTTP}", store_path="given")
    node.start(lambda: server.main(node.env, options, files=node.files))


def run(seed: int, scenario: Callable[[Simulation, Node, EtcdStore], Awaitable[None]]) -> str:
    """Run a scenario with one nsqlookupd; return the hash of what happened."""
    with Simulation(seed) as sim:
        node = sim.node("lookup")
        start(node)

        async def main() -> None:
            env = Env(clock=node.env.clock, random=random.Random(seed), has_threads=False)
            store = EtcdStore(env, EtcdOptions([f"http://lookup:{HTTP}"]))
            while True:
                try:
                    await store.get("ready?")
                    break
                except StoreUnavailable:
                    await asyncio.sleep(0.1)
            await scenario(sim, node, store)
            await store.close()

        sim.run(main())
        return sim.trace_hash


@pytest.mark.parametrize("name", CASES)
def test_it_does_what_every_store_does(name: str):
    async def scenario(sim: Simulation, node: Node, store: EtcdStore) -> None:
        await CASES[name](store, "/case/")

    assert run(1, scenario) == run(1, scenario), "the same seed is the same run"


async def _write_through_faults(sim: Simulation, node: Node, store: EtcdStore, *, steps: int) -> None:
    """Count in one value by compare-and-swap while everything breaks; a follower hears of it meanwhile."""
    heard: list[int] = []
    applied: list[int] = []

    async def listen() -> None:
        last_revision = 0
        while True:
            try:
                async for told in follow(store, Span.of_prefix("/count")):
                    assert told.revision >= last_revision, "time went back"
                    last_revision = told.revision
                    if isinstance(told, Snapshot):
                        heard.extend(int(pair.value) for pair in told.found)
                    else:
                        heard.extend(int(event.now.value) for event in told.events if event.now is not None)
            except StoreUnavailable:
                await asyncio.sleep(0.5)

    async def break_things() -> None:
        while True:
            await asyncio.sleep(sim.random.uniform(0.5, 4.0))
            fault = sim.random.randrange(5)
            if fault == 0:
                node.restart(power_loss=True)
            elif fault == 1:
                node.restart()
            elif fault == 2:
                node.pause()
                await asyncio.sleep(sim.random.uniform(0.1, 6.0))
                node.resume()
            elif fault == 3:
                sim.network.partition("driver", "lookup")
                await asyncio.sleep(sim.random.uniform(0.1, 6.0))
                sim.network.heal()
            else:
                node.freeze_disk(sim.random.uniform(0.1, 6.0))

    listening, breaking = asyncio.ensure_future(listen()), asyncio.ensure_future(break_things())
    number = 0
    while number < steps:
        try:
            before = await store.get("/count")
            if before is not None:
                assert int(before.value) >= (applied[-1] if applied else 0), "an applied change is gone"
            number = (0 if before is None else int(before.value)) + 1
            swapped = await swap(store, "/count", before, b"%d" % number)
        except OutcomeUnknown:
            continue  # reading again is what is done
        except StoreUnavailable:
            await asyncio.sleep(0.2)
            continue
        assert swapped.fate is Fate.APPLIED, "nobody else writes"
        applied.append(number)
        await asyncio.sleep(sim.random.uniform(0.0, 0.2))
    breaking.cancel()
    sim.network.heal()
    if node.process is not None and not node.process.is_scheduled:
        node.resume()
    while not heard or heard[-1] != number:
        await asyncio.sleep(0.1)
    listening.cancel()
    await asyncio.wait({listening, breaking})
    assert not breaking.done() or breaking.cancelled(), breaking.exception()
    assert applied == sorted(set(applied))
    # a snapshot may repeat what was heard, and pass over what is forgotten; events are every one, once
    assert heard == sorted(heard)


@pytest.mark.parametrize("seed", range(12))
def test_counting_while_everything_breaks(seed: int):
    run(seed, partial(_write_through_faults, steps=300))


def test_a_watch_goes_on_where_it_was_after_a_restart():
    async def scenario(sim: Simulation, node: Node, store: EtcdStore) -> None:
        revision = await put(store, "/a")
        async with store.watch(ALL, revision) as watched:
            one = await put(store, "/b")
            assert (await anext(watched)).revision == one
            node.restart(power_loss=True)
            two = await _until_put(store, "/c")
            events = await anext(watched)
            assert [(event.key, event.revision) for event in events.events] == [("/c", two)]

    run(3, scenario)


async def _until_put(store: EtcdStore, key: str) -> int:
    while True:
        try:
            swapped = await swap(store, key, None, b"x")
            return swapped.revision
        except StoreError:
            await asyncio.sleep(0.1)


def test_a_watcher_that_missed_something_forgotten_begins_again():
    async def scenario(sim: Simulation, node: Node, store: EtcdStore) -> None:
        await put(store, "/a")
        following = follow(store, ALL)
        assert isinstance(await anext(following), Snapshot)
        await put(store, "/b")
        told = await anext(following)
        assert isinstance(told, Events)
        await following.aclose()
        missed = await put(store, "/c")
        node.restart()
        revision = await _until_put(store, "/d")
        assert revision == missed + 1
        following = follow(store, ALL)
        snapshot = await anext(following)
        assert isinstance(snapshot, Snapshot)
        assert [pair.key for pair in snapshot.found] == ["/a", "/b", "/c", "/d"]
        await following.aclose()
        with pytest.raises(StoreError, match="begin again"):
            async with store.watch(ALL, told.revision) as watched:
                await anext(watched)

    run(4, scenario)


def test_a_store_that_comes_back_gives_every_lease_its_full_time():
    async def scenario(sim: Simulation, node: Node, store: EtcdStore) -> None:
        lease = await store.grant(3)
        await put(store, "/held", b"", lease.lease_id)
        for away in (node.kill, node.pause):
            await store.keepalive(lease.lease_id)
            away()
            await asyncio.sleep(10)
            if away == node.pause:
                node.resume()
            else:
                start(node)
            await asyncio.sleep(2)
            assert await store.keepalive(lease.lease_id) == 3, away
        await asyncio.sleep(4)
        with pytest.raises(LeaseNotFound):
            await store.keepalive(lease.lease_id)
        assert await store.get("/held") is None

    run(5, scenario)


def test_a_lease_is_held_until_its_holder_cannot_renew_it():
    async def scenario(sim: Simulation, node: Node, store: EtcdStore) -> None:
        clock = node.env.clock
        async with holding(store, "k", clock, 3, margin_ns=500_000_000) as held:
            await put(store, "/held", b"", held.lease_id)
            await asyncio.sleep(20)
            assert held.is_held and await store.get("/held") is not None
            sim.network.partition("driver", "lookup")
            cut_at_ns = clock.monotonic_ns()
            while held.is_held:
                await asyncio.sleep(0.01)
            over_at_ns = clock.monotonic_ns()
            assert held.tenure.sent_at_ns <= cut_at_ns, "a renewal without an answer does not count"
            assert over_at_ns - cut_at_ns <= 2_520_000_000
            await asyncio.sleep(10)
            sim.network.heal()
            await held.lost.wait()
            assert clock.monotonic_ns() > over_at_ns
        assert await store.get("/held") is None

    run(6, scenario)


def test_nothing_is_answered_that_could_not_be_written_and_it_is_tried_again():
    async def scenario(sim: Simulation, node: Node, store: EtcdStore) -> None:
        await put(store, "/a")
        node.disk.fail("commit", times=2)
        with pytest.raises(OutcomeUnknown):
            await put(store, "/b")
        while True:
            try:
                found = await store.range(ALL)
                break
            except StoreUnavailable as error:
                assert "cannot be written" in str(error)
        assert [pair.key for pair in found.found] == ["/a", "/b"]
        node.restart(power_loss=True)
        await _until_put(store, "/c")
        assert [pair.key for pair in (await store.range(ALL)).found] == ["/a", "/b", "/c"]

    run(7, scenario)


def test_a_change_that_was_not_answered_is_carried_out_later_and_found_out():
    async def scenario(sim: Simulation, node: Node, store: EtcdStore) -> None:
        node.pause()
        with pytest.raises(OutcomeUnknown):
            await store.txn(Txn((), (Put("/late", b"1"),)))
        node.resume()
        while await store.get("/late") is None:
            await asyncio.sleep(0.01)

    run(8, scenario)


def test_an_outage_is_told_once_and_tried_more_seldom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    asked: list[str] = []

    def told(text: str) -> list[str]:
        return [each for each in caplog.messages if text in each]

    async def scenario(sim: Simulation, node: Node, store: EtcdStore) -> None:
        heard: list[str] = []

        async def listen() -> None:
            async with aclosing(follow(store, ALL)) as following:
                async for each in following:
                    heard.extend(event.key for event in (each.events if isinstance(each, Events) else ()))

        listening = [asyncio.ensure_future(listen()) for _ in range(2)]
        await asyncio.sleep(5)
        for number in range(1, 4):
            asked.clear()
            node.kill()
            await asyncio.sleep(60)
            assert len(told("the watch is tried again at lookup:4161: ")) <= 2 * number
            assert len(told("Connection refused")) == number, "once for each outage, by one watch"
            assert told("elsewhere") == [], "there is no other place"
            assert asked.count(wire.WATCH) < 2 * 60 / (WATCH_PAUSE_S / 2) + 10
            start(node)
            await put(store, f"/{number}")
            began_s = sim.now_s
            while heard.count(f"/{number}") < 2:
                await asyncio.sleep(0.01)
            assert sim.now_s - began_s < 2 * WATCH_PAUSE_S, "the pauses have stayed short"
            assert len(told("lookup:4161 is watched again")) == number
            await asyncio.sleep(2 * STEADY_S)
        for task in listening:
            task.cancel()
        await asyncio.wait(listening)

    monkeypatch.setattr("flintmq.net.etcd.HttpClient", counting(asked))
    with caplog.at_level(logging.INFO, "flintmq.net.etcd"):
        run(10, scenario)


def test_with_another_address_it_is_tried_there_at_once(caplog: pytest.LogCaptureFixture):
    async def scenario(sim: Simulation, node: Node, store: EtcdStore) -> None:
        sim.node("nobody")
        both = EtcdStore(store._env, EtcdOptions([f"http://nobody:{HTTP}", f"http://lookup:{HTTP}"]))
        async with both.watch(ALL, await put(store, "/a")) as watched:
            began_s = sim.now_s
            await put(store, "/b")
            assert [event.key for event in (await anext(watched)).events] == ["/b"]
            assert sim.now_s - began_s < 1.0
        await both.close()
        assert f"watching goes on elsewhere than at nobody:{HTTP}: " in caplog.text

    with caplog.at_level(logging.INFO, "flintmq.net.etcd"):
        run(11, scenario)


def counting(asked: list[str]) -> type[HttpClient]:
    """A client that notes what is asked."""

    class Counting(HttpClient):
        async def ask(self, request: Request, **options: object) -> Answer:
            asked.append(request.target)
            return await super().ask(request, **options)  # type: ignore[arg-type]

        def stream(self, request: Request, **options: object) -> object:  # type: ignore[override]
            asked.append(request.target)
            return super().stream(request, **options)  # type: ignore[arg-type]

    return Counting


def test_an_idle_watch_asks_nothing_and_still_leaves_a_store_that_stands_still(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    async def scenario(sim: Simulation, node: Node, store: EtcdStore) -> None:
        revision = await put(store, "/a")
        count = 20
        heard: list[str] = []

        async def listen() -> None:
            async with store.watch(ALL, revision) as watched:
                async for events in watched:
                    heard.extend(event.key for event in events.events)

        listening = [asyncio.ensure_future(listen()) for _ in range(count)]
        await asyncio.sleep(5)
        asked.clear()
        await asyncio.sleep(60)
        assert asked == [], "every watch hears that the store lives"
        node.pause()
        await asyncio.sleep(3)
        assert 1 <= asked.count(wire.RANGE) <= 3, "one question for all of them"
        assert asked.count(wire.WATCH) >= count, "and they try to go on elsewhere"
        node.resume()
        await asyncio.sleep(3)
        await put(store, "/b")
        while len(heard) < count:
            await asyncio.sleep(0.1)
        assert heard == ["/b"] * count
        asked.clear()
        node.freeze_disk(10)
        writing = asyncio.ensure_future(_until_put(store, "/c"))
        await asyncio.sleep(5)
        assert wire.RANGE in asked, "a store that cannot write is not one that lives"
        await writing
        for task in listening:
            task.cancel()
        await asyncio.wait(listening)

    monkeypatch.setattr("flintmq.net.etcd.HttpClient", counting(asked))
    run(9, scenario)
