"""nsqlookupds of a cluster in the simulation, with nsqds that keep nothing: topics, elections, and what is told."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from tests.cluster_nodes import HTTP, PEER, TCP, FakeNode
from tests.sim.loop import Node, Simulation

from flintmq.cluster.keys import Keys
from flintmq.cluster.state import LEASE_TTL_S, NodeRecord, PartitionState, decode
from flintmq.cluster.store import Delete, Events, KeyValue, Put, StoreError, Txn, follow
from flintmq.env import Env
from flintmq.errors import ConnectionFailed
from flintmq.net.etcd import EtcdOptions, EtcdStore
from flintmq.net.http_client import ask
from flintmq.nsqlookupd import server
from flintmq.nsqlookupd.options import NsqlookupdOptions

LOOKUP_TCP, LOOKUP_HTTP = 4160, 4161
KEYS = Keys("default")
NAMES = "abc"


class World:
    """Two nsqlookupds, of which ``one`` keeps the store, and three nodes on three machines."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.lookups = {name: sim.node(name) for name in ("one", "two")}
        self.machines = {name: sim.node(name) for name in NAMES}
        self.nodes: dict[str, FakeNode] = {}
        self.starts = dict.fromkeys(NAMES, 0)
        self.driver = EtcdStore(Env(random=random.Random(1)), EtcdOptions([f"http://one:{LOOKUP_HTTP}"]))

    def start(self) -> None:
        for name in self.lookups:
            self.start_lookup(name)
        for name in self.machines:
            self.start_node(name)

    def start_lookup(self, name: str, **flags: Any) -> None:
        node = self.lookups[name]
        options = NsqlookupdOptions(
            tcp_address=f"0.0.0.0:{LOOKUP_TCP}",
            http_address=f"0.0.0.0:{LOOKUP_HTTP}",
            broadcast_address=name,
            **{**({"store_path": "given"} if name == "one" else {}), **flags},
            cluster_store=("own",) if name == "one" else (f"one:{LOOKUP_HTTP}",),
        )
        files = (lambda: node.files) if name == "one" else (lambda: None)
        node.start(lambda: server.main(node.env, options, files=files()))

    def start_node(self, name: str, **fields: object) -> None:
        machine: Node = self.machines[name]
        self.starts[name] += 1
        record = NodeRecord(name, f"{name}{self.starts[name]}", f"boot {name}", False, name, TCP, HTTP, PEER, name)
        record = msgspec.structs.replace(record, **fields)

        async def run() -> None:
            store = EtcdStore(machine.env, EtcdOptions([f"http://one:{LOOKUP_HTTP}"]))
            self.nodes[name] = FakeNode(machine.env, store, KEYS, record)
            await self.nodes[name].run()

        machine.start(run)

    async def ask(self, lookup: str, method: str, target: str) -> tuple[int, Any]:
        status, body = await ask(method, lookup, LOOKUP_HTTP, target, connect_timeout_s=1.0, request_timeout_s=60.0)
        return status, msgspec.json.decode(body) if body else None

    async def get(self, lookup: str, target: str) -> Any:
        status, answer = await self.ask(lookup, "GET", target)
        assert status == 200, answer
        return answer

    async def until(self, what: Callable[[], Awaitable[bool]], within_s: float = 30.0) -> float:
        """Wait until something is so; return how long it took."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.timeout(within_s):
            while True:
                try:
                    if await what():
                        return loop.time() - began
                except ConnectionFailed:
                    pass
                await asyncio.sleep(0.02)

    async def until_whole(self) -> None:
        """Wait until all are there."""

        async def whole() -> bool:
            for name in self.lookups:
                status = await self.get(name, "/cluster/status")
                if len(status["nodes"]) < len(NAMES) or len(status["lookupds"]) < 2 or not status["master"]:
                    return False
            return all(len(node.connections) == 2 for node in self.nodes.values())

        await self.until(whole)

    async def leaders(self, lookup: str, topic: str, access: str = "r") -> dict[str, str]:
        found = await self.get(lookup, f"/lookup?topic={topic}&access={access}&metainfo=true")
        return {number: peer["broadcast_address"] for number, peer in found.get("partitions", {}).items()}

    async def master(self) -> str:
        return str((await self.get("one", "/listlookup"))["lookupdleader"]["NodeIP"])


Scenario = Callable[[World], Awaitable[None]]


def run(scenario: Scenario, seed: int = 1) -> str:
    with Simulation(seed) as sim:
        world = World(sim)
        world.start()

        async def main() -> None:
            await world.until_whole()
            await scenario(world)
            await world.driver.close()

        sim.run(main())
        return sim.trace_hash


async def created(world: World, lookup: str, query: str) -> None:
    status, answer = await world.ask(lookup, "POST", f"/topic/create?{query}")
    assert status == 200, answer


# -- topics ------------------------------------------------------------------------------------------------------------


def test_a_topic_made_at_either_nsqlookupd_is_told_by_both():
    async def scenario(world: World) -> None:
        assert {await world.master()} < {"one", "two"}
        for lookup, topic in (("one", "t"), ("two", "u")):
            query = f"topic={topic}&partition_num=6&replicator=3&orderedmulti=true&retention=2"
            await created(world, lookup, query)
            for other in ("one", "two"):
                await world.until(lambda at=other, of=topic: _has_all(world, at, of, 6))  # type: ignore[misc]
                assert sorted((await world.leaders(other, topic)).values()) == list("aabbcc")
                found = await world.get(other, f"/lookup?topic={topic}&access=w&metainfo=1")
                assert found["meta"] | {"partition_num": 6, "replica": 3, "ordered": True} == found["meta"]
                assert found["partitions"]["0"]["distributed_id"]
            await created(world, lookup, query)
            status, answer = await world.ask(lookup, "POST", f"/topic/create?topic={topic}&partition_num=5")
            assert status == 400 and "6 partitions of 3 copies" in answer["message"]
        assert (await world.get("two", "/topics"))["topics"] == ["t", "u"]
        rows = (await world.get("one", "/topics?metaInfo=true"))["meta_info"]
        assert [row["ordered"] for row in rows] == [True, True]
        (status,) = (await world.get("two", "/cluster/status?topic=t"))["topics"]
        assert status["replicator"] == 3 and status["min_in_sync"] == 2
        for row in status["partitions"]:
            assert row["epoch"] == 1 and sorted(row["in_sync"]) == list(NAMES) and row["is_ready"] and not row["reason"]
        listed = await world.get("two", "/listlookup")
        assert sorted(row["NodeIP"] for row in listed["lookupdnodes"]) == ["one", "two"]
        nodes = (await world.get("one", "/nodes"))["producers"]
        assert sorted(node["broadcast_address"] for node in nodes) == list(NAMES)
        assert all(len(node["partitions"]["t"]) == 2 for node in nodes)

    assert run(scenario) == run(scenario), "the same seed is the same run"


async def _has_all(world: World, lookup: str, topic: str, count: int) -> bool:
    return len(await world.leaders(lookup, topic)) == count


def test_a_plain_topic_is_led_by_every_node():
    async def scenario(world: World) -> None:
        await created(world, "two", "topic=plain")
        await created(world, "one", "topic=plain")
        found = await world.get("two", "/lookup?topic=plain")
        assert sorted(row["broadcast_address"] for row in found["producers"]) == list(NAMES)
        assert "partitions" not in await world.get("two", "/lookup?topic=plain&access=w")
        (status,) = (await world.get("one", "/cluster/status?topic=plain"))["topics"]
        assert status["partition_num"] == 3 and status["replicator"] == 3
        assert status["meta"]["partition_num"] == 0, "ids are NSQ's"

    run(scenario)


def test_a_plain_topic_is_as_the_options_say():
    async def scenario(world: World) -> None:
        for name in world.lookups:
            world.lookups[name].kill()
            world.start_lookup(name, default_partitions=2, default_replicator=1)
        await world.until_whole()
        await world.until(lambda: _can_create_plain(world))
        (status,) = (await world.get("one", "/cluster/status?topic=plain"))["topics"]
        assert status["partition_num"] == 2 and status["replicator"] == 1

    run(scenario)


async def _can_create_plain(world: World) -> bool:
    return (await world.ask("one", "POST", "/topic/create?topic=plain"))[0] == 200


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("replicator=4", "3 nsqds on 3 machines; start more"),
        ("replicator=6", "INVALID_ARG_TOPIC_REPLICATOR"),
        ("partition_num=0", "INVALID_ARG_TOPIC_PARTITION_NUM"),
        ("partition_num=2&orderedmulti=maybe", "it must be true or false"),
    ],
)
def test_a_topic_that_cannot_be_is_refused_at_either(query: str, words: str):
    async def scenario(world: World) -> None:
        for lookup in ("one", "two"):
            status, answer = await world.ask(lookup, "POST", f"/topic/create?topic=t&{query}")
            assert status == 400 and words in answer["message"]
        assert (await world.get("one", "/topics"))["topics"] == []

    run(scenario)


def test_a_topic_that_nobody_becomes_ready_for_is_taken_back():
    async def scenario(world: World) -> None:
        for node in world.nodes.values():
            node.says_ready = False
        status, answer = await world.ask("two", "POST", "/topic/create?topic=t&partition_num=2")
        assert status == 503 and "was not created" in answer["message"] and "has not said" in answer["message"]
        await world.until(lambda: _topics_are(world, []))
        world.nodes["a"].says_ready = True
        status, answer = await world.ask("one", "POST", "/topic/create?topic=t&partition_num=3")
        assert status == 503 and "is there, and cannot be written to completely yet" in answer["message"]
        assert await world.leaders("one", "t") == {"0": "a"}, "somebody may have been answered OK there"
        assert len(await world.leaders("one", "t", "w")) == 3
        for node in world.nodes.values():
            node.says_ready = True
            node.tell()
        await created(world, "one", "topic=t&partition_num=3")

    run(scenario)


async def _topics_are(world: World, topics: list[str]) -> bool:
    answers = [(await world.get(name, "/topics"))["topics"] for name in world.lookups]
    return answers == [topics, topics]


def test_a_topic_goes_everywhere_and_can_be_made_anew():
    async def scenario(world: World) -> None:
        for lookup in ("one", "two"):
            await created(world, lookup, "topic=t&partition_num=4&replicator=2")
            assert (await world.ask(lookup, "POST", "/topic/delete?topic=t&partition=1"))[0] == 400
            status, answer = await world.ask(lookup, "POST", "/topic/delete?topic=t&partition=**")
            assert status == 200, answer
            assert (await world.ask(lookup, "GET", "/lookup?topic=t"))[0] == 404
            await world.until(lambda: _topics_are(world, []))
            assert not (await world.driver.range(KEYS.partitions())).found
        status, _ = await world.ask("two", "POST", "/topic/delete?topic=none&partition=**")
        assert status == 500

    run(scenario)


def test_who_hears_late_of_a_deletion_leaves_nothing_behind():
    async def scenario(world: World) -> None:
        await created(world, "one", "topic=t&partition_num=3")
        late = world.nodes["a"]
        held = (
            late.view.topics["t"],
            dict(late.view.partitions),
            {key: dict(each) for key, each in late.view.led.items()},
        )
        status, _ = await world.ask("one", "POST", "/topic/delete?topic=t&partition=**")
        assert status == 200
        await world.until(lambda: _topics_are(world, []))
        late.view.topics["t"], late.view.partitions, late.view.led = held
        late.tell()
        await world.until(lambda: _topics_are(world, ["t"]))
        late.view.led = {}
        late.tell()
        await world.until(lambda: _topics_are(world, []))
        assert (await world.ask("two", "GET", "/lookup?topic=t"))[0] == 404

    run(scenario)


def test_a_topic_is_changed_in_the_store():
    async def scenario(world: World) -> None:
        await created(world, "one", "topic=t&partition_num=1")
        for lookup, days in (("one", 3), ("two", 4)):
            status, answer = await world.ask(lookup, "POST", f"/topic/meta/update?topic=t&retention={days}")
            assert status == 200, answer
            await world.until(lambda n=days: _retention_is(world, n))  # type: ignore[misc]
        status, answer = await world.ask("two", "POST", "/topic/meta/update?topic=t&retention=x")
        assert status == 400 and "RETENTION" in answer["message"]

    run(scenario)


async def _retention_is(world: World, days: int) -> bool:
    return all(node.view.topics["t"].meta.retention_days == days for node in world.nodes.values())


def test_an_ephemeral_topic_is_one_nodes():
    async def scenario(world: World) -> None:
        status, _ = await world.ask("one", "POST", "/topic/create?topic=t%23ephemeral")
        assert status == 200
        assert not (await world.driver.range(KEYS.topics)).found

    run(scenario)


# -- nodes come and go -------------------------------------------------------------------------------------------------


def test_a_killed_leader_costs_less_than_its_lease():
    async def scenario(world: World) -> None:
        await created(world, "one", "topic=t&partition_num=3&replicator=3")
        world.machines["a"].kill()
        for lookup in ("one", "two"):
            took_s = await world.until(lambda at=lookup: _is_led_without(world, at, "a"))  # type: ignore[misc]
            assert took_s < 1.0 < LEASE_TTL_S
        rows = (await world.get("one", "/cluster/status?topic=t"))["topics"][0]["partitions"]
        assert sorted(row["epoch"] for row in rows) == [1, 1, 2]
        world.start_node("a")
        await world.until(lambda: _nodes_are(world, 3))

    run(scenario)


async def _is_led_without(world: World, lookup: str, name: str) -> bool:
    for access in "rw":
        leaders = await world.leaders(lookup, "t", access)
        if len(leaders) != 3 or name in leaders.values():
            return False
    return True


async def _nodes_are(world: World, count: int) -> bool:
    found = [await world.get(name, "/cluster/status") for name in world.lookups]
    return all(len(status["nodes"]) == count for status in found)


def test_a_stopped_leader_costs_its_lease():
    async def scenario(world: World) -> None:
        await created(world, "one", "topic=t&partition_num=3&replicator=2")
        world.machines["a"].pause()
        took_s = await world.until(lambda: _is_led_without(world, "two", "a"))
        assert took_s < LEASE_TTL_S + 1.5
        world.machines["a"].resume()
        await world.until(lambda: _nodes_are(world, 3))

    run(scenario)


def test_a_connection_that_breaks_alone_changes_nothing():
    async def scenario(world: World) -> None:
        await created(world, "one", "topic=t&partition_num=3&replicator=2")
        before = (await world.get("one", "/cluster/status?topic=t"))["topics"]
        for name in world.lookups:
            world.sim.network.reset("a", name)
        await asyncio.sleep(2.0)
        await world.until(lambda: _has_all(world, "one", "t", 3))
        assert (await world.get("one", "/cluster/status?topic=t"))["topics"] == before

    run(scenario)


def test_for_how_long_a_leader_has_not_said_that_it_is_ready():
    async def scenario(world: World) -> None:
        await created(world, "one", "topic=t&partition_num=1&replicator=3")

        async def row() -> Any:
            (topic,) = (await world.get("two", "/cluster/status?topic=t"))["topics"]
            return topic["partitions"][0]

        async def is_ready() -> bool:
            return bool((await row())["is_ready"])

        async def is_unready() -> bool:
            return not (await row())["is_ready"]

        await world.until(is_ready)
        await asyncio.sleep(60)
        found = await row()
        assert found["unready_s"] == 0
        for node in world.nodes.values():
            node.says_ready = False
            node.tell()
        await world.until(is_unready)
        assert (await row())["unready_s"] < 1, "it said so until now"
        await asyncio.sleep(20)
        assert 20 <= (await row())["unready_s"] < 22
        world.sim.network.reset(found["leader"], "two")
        await asyncio.sleep(5)
        assert 4 <= (await row())["unready_s"] < 6, "it comes again, and has to say it anew"
        world.machines[found["leader"]].kill()

        async def has_moved() -> bool:
            return (await row())["leader"] not in ("", found["leader"])

        await world.until(has_moved)
        assert (await row())["unready_s"] < 1, "it was elected a moment ago"
        await asyncio.sleep(15)
        assert 15 <= (await row())["unready_s"] < 17
        for node in world.nodes.values():
            node.says_ready = True
            node.tell()
        await world.until(is_ready)
        assert (await row())["unready_s"] == 0

    run(scenario)


def test_a_node_that_drains_gives_its_partitions_away_and_gets_none():
    async def scenario(world: World) -> None:
        await created(world, "one", "topic=t&partition_num=3&replicator=2")
        node = world.nodes["b"]
        await node.drain(msgspec.structs.replace(node.record, is_draining=True))
        await world.until(lambda: _is_led_without(world, "one", "b"))
        status, answer = await world.ask("two", "POST", "/topic/create?topic=u&partition_num=4&replicator=3")
        assert status == 400 and "2 nsqds on 2 machines" in answer["message"]
        await created(world, "two", "topic=u&partition_num=4&replicator=2")
        assert set((await world.leaders("one", "u")).values()) == {"a", "c"}

    run(scenario)


def test_an_operator_decides_when_nobody_has_everything():
    async def scenario(world: World) -> None:
        await created(world, "one", "topic=t&partition_num=1&replicator=2")
        (row,) = (await world.get("one", "/cluster/status?topic=t"))["topics"][0]["partitions"]
        first, second = row["replicas"]
        target = f"/cluster/partition/elect?topic=t&partition=0&node={second}"
        status, answer = await world.ask("two", "POST", target)
        assert status == 400 and f"is led by node {first}" in answer["message"]
        for count, name in ((2, second), (1, first)):
            world.machines[name].kill()
            await world.until(lambda n=count: _nodes_are(world, n))  # type: ignore[misc]
        (row,) = (await world.get("two", "/cluster/status?topic=t"))["topics"][0]["partitions"]
        assert row["leader"] == "" and "no replica that has everything is alive" in row["reason"]
        world.start_node(second, boot_id="another")
        await world.until(lambda: _nodes_are(world, 2))
        for bad, words in (("x", "INVALID_ARG_PARTITION"), ("7", "has partitions 0 to 0, and no 7")):
            status, answer = await world.ask("two", "POST", target.replace("partition=0", f"partition={bad}"))
            assert status == 400 and words in answer["message"]
        status, answer = await world.ask("two", "POST", target)
        assert status == 200, answer
        await world.until(lambda: _has_all(world, "two", "t", 1))
        assert (await world.get("two", "/cluster/status?topic=t"))["topics"][0]["partitions"][0]["in_sync"] == [second]

    run(scenario)


# -- masters come and go -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_whoever_is_killed_topics_are_made_afterwards(seed: int):
    async def scenario(world: World) -> None:
        await created(world, "one", "topic=t0&partition_num=3&replicator=3")
        for number, name in enumerate(("one", "two", "one"), 1):
            world.lookups[name].kill()
            other = "two" if name == "one" else "one"
            if name == "one":
                assert len(await world.leaders(other, "t0", "w")) == 3, "as it was last known"
            await asyncio.sleep(world.sim.random.uniform(0.0, 8.0))
            if name == "two":
                await world.until(lambda: _can_create(world, "one", "without"))
                status, _ = await world.ask("one", "POST", "/topic/delete?topic=without")
                assert status == 200
            world.start_lookup(name)
            await world.until_whole()
            for lookup in ("one", "two"):
                topic = f"{lookup}{number}"
                await world.until(lambda at=lookup, of=topic: _can_create(world, at, of))  # type: ignore[misc]
                await world.until(lambda at=lookup: _has_all(world, at, "t0", 3))  # type: ignore[misc]
        names = (await world.get("two", "/topics"))["topics"]
        assert names == ["one1", "one2", "one3", "t0", "two1", "two2", "two3"]

    run(scenario, seed)


async def _can_create(world: World, lookup: str, topic: str) -> bool:
    status, answer = await world.ask(lookup, "POST", f"/topic/create?topic={topic}&partition_num=2&replicator=2")
    assert status in (200, 503), answer
    return status == 200


def test_without_a_master_there_is_a_clear_answer():
    async def scenario(world: World) -> None:
        assert (await world.get("two", "/cluster/status"))["master"]["host"] == "one"
        world.lookups["one"].kill()
        status, answer = await world.ask("two", "POST", "/topic/create?topic=t&partition_num=1")
        assert status == 503 and "is away, and nothing was changed" in answer["message"]
        assert "coordination store" not in answer["message"], "it may be the process alone"
        await asyncio.sleep(2 * LEASE_TTL_S)
        status, answer = await world.ask("two", "POST", "/topic/create?topic=t&partition_num=1")
        assert status == 503 and "The coordination store does not answer this nsqlookupd since" in answer["message"]

    run(scenario)


def test_a_store_that_is_away_for_longer_than_a_lease_is_told_and_a_hiccup_is_not():
    async def scenario(world: World) -> None:
        async def is_away() -> bool:
            return (await world.get("two", "/cluster/status"))["store_away_since"] is not None

        for pause_s in (0.5, LEASE_TTL_S / 2):
            world.lookups["one"].pause()
            for _ in range(round(pause_s / 0.1)):
                await asyncio.sleep(0.1)
                assert not await is_away()
            world.lookups["one"].resume()
            await asyncio.sleep(LEASE_TTL_S)
            assert not await is_away()
        world.lookups["one"].pause()
        since_s, wall_s = await world.until(is_away), world.lookups["two"].env.clock.wall_ns() / 1e9
        assert LEASE_TTL_S / 2 < since_s < 2 * LEASE_TTL_S
        status = await world.get("two", "/cluster/status")
        assert status["master"] is None and len(status["nodes"]) == len(NAMES), "the rest is as it was last known"
        assert abs(wall_s - status["store_away_since"] - LEASE_TTL_S) < 1
        world.lookups["one"].resume()

        async def is_back() -> bool:
            return not await is_away() and (await world.get("two", "/cluster/status"))["master"] is not None

        await world.until(is_back)
        await world.until_whole()

    run(scenario)


class Chaos:
    """Requests and faults at random, and what the store was seen to be told meanwhile."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.random = world.sim.random
        self.made: set[str] = set()
        self.deleted: set[str] = set()
        self.states: dict[str, PartitionState] = {}
        self.election_count = 0

    async def watch(self) -> None:
        while True:
            try:
                async with aclosing(follow(self.world.driver, KEYS.partitions())) as following:
                    async for told in following:
                        if isinstance(told, Events):
                            for event in told.events:
                                self.take(event.key, event.now, is_step=True)
                        else:
                            self.states = {}
                            for pair in told.found:
                                self.take(pair.key, pair, is_step=False)
            except StoreError:
                await asyncio.sleep(0.1)

    def take(self, key: str, pair: KeyValue | None, is_step: bool) -> None:
        before = self.states.pop(key, None)
        if pair is None:
            return
        now = self.states[key] = decode(key, pair.value, PartitionState)
        if not is_step or before is None:
            return
        assert now.log_id == before.log_id and now.in_sync
        is_new_leader = (now.leader, now.incarnation) != (before.leader, before.incarnation) and bool(now.leader)
        assert now.epoch == before.epoch + is_new_leader, (before, now)
        assert set(now.in_sync_nodes) <= set(before.in_sync_nodes)
        self.election_count += is_new_leader

    async def ask(self) -> None:
        for number in range(60):
            await asyncio.sleep(self.random.uniform(0.0, 1.0))
            lookup = self.random.choice(sorted(self.world.lookups))
            topic = f"t{number}"
            try:
                status, _ = await self.world.ask(
                    lookup, "POST", f"/topic/create?topic={topic}&partition_num=2&replicator={number % 3 + 1}"
                )
                if status == 200:
                    self.made.add(topic)
                if self.made and self.random.random() < 0.3:
                    topic = self.random.choice(sorted(self.made))
                    self.made.discard(topic)  # whatever the answer is
                    if (await self.world.ask(lookup, "POST", f"/topic/delete?topic={topic}&partition=**"))[0] == 200:
                        self.deleted.add(topic)
            except ConnectionFailed:
                continue

    async def break_things(self) -> None:
        world, rng = self.world, self.random
        while True:
            await asyncio.sleep(rng.uniform(0.5, 4.0))
            name = rng.choice([*world.lookups, *world.machines])
            node = world.lookups.get(name) or world.machines[name]
            fault = rng.randrange(4)
            if fault == 0:
                node.kill()
                await asyncio.sleep(rng.uniform(0.0, 5.0))
                self.start(name)
            elif fault == 1:
                node.pause()
                await asyncio.sleep(rng.uniform(0.1, 6.0))
                node.resume()
            elif fault == 2:
                world.sim.network.isolate(name)
                await asyncio.sleep(rng.uniform(0.1, 6.0))
                world.sim.network.heal()
            else:
                world.lookups["one"].freeze_disk(rng.uniform(0.1, 3.0))

    def start(self, name: str) -> None:
        if name in self.world.lookups:
            self.world.start_lookup(name)
        else:
            self.world.start_node(name)

    async def is_settled(self) -> bool:
        for lookup in self.world.lookups:
            known = set((await self.world.get(lookup, "/topics"))["topics"])
            assert self.made <= known, "a topic that was answered OK is gone"
            if self.deleted & known:
                return False
            for topic in sorted(known):
                for access in "rw":
                    if len(await self.world.leaders(lookup, topic, access)) != 2:
                        return False
        return True


@pytest.mark.parametrize("seed", range(6))
def test_while_everything_breaks(seed: int):
    async def scenario(world: World) -> None:
        chaos = Chaos(world)
        watching = asyncio.ensure_future(chaos.watch())
        breaking = asyncio.ensure_future(chaos.break_things())
        await chaos.ask()
        breaking.cancel()
        world.sim.network.heal()
        for name, node in (world.lookups | world.machines).items():
            if node.process is None or not node.process.is_alive:
                chaos.start(name)
            elif not node.process.is_scheduled:
                node.resume()
        await world.until_whole()
        await world.until(chaos.is_settled, 60.0)
        watching.cancel()
        await asyncio.wait({watching, breaking})
        for task in (watching, breaking):
            assert task.cancelled(), task.exception()
        assert chaos.made and chaos.election_count

    run(scenario, seed)


# -- other clusters ----------------------------------------------------------------------------------------------------


def test_an_emptied_store_is_no_cluster_of_ours():
    async def scenario(world: World) -> None:
        await created(world, "one", "topic=t&partition_num=1")
        await world.driver.txn(Txn((), (Put(KEYS.record, b'{"cluster_id":"another"}'),)))
        for name in world.lookups:
            await world.until(lambda at=name: _has_problem(world, at, "cluster another"))  # type: ignore[misc]
            status, answer = await world.ask(name, "POST", "/topic/create?topic=u&partition_num=1")
            assert status == 503 and "emptied or exchanged" in answer["message"]

    run(scenario)


async def _has_problem(world: World, lookup: str, words: str) -> bool:
    status = await world.get(lookup, "/cluster/status")
    return words in status["problem"] and not status["is_master"]


def test_a_store_of_another_version_is_left_alone():
    async def scenario(world: World) -> None:
        world.lookups["two"].kill()
        await world.driver.txn(Txn((), (Put(KEYS.record, b'{"cluster_id":"c","version":2}'), Delete(KEYS.master))))
        world.start_lookup("two")
        await world.until(lambda: _has_problem(world, "two", "values of version 2"))

    run(scenario)


def test_a_node_of_another_cluster_is_refused():
    async def scenario(world: World) -> None:
        node = world.nodes["a"]
        node.cluster_id = "another"
        for name in world.lookups:
            world.sim.network.reset("a", name)

        async def refused() -> bool:
            return all(b"IDENTIFY of cluster another" in each.received for each in node.connections.values())

        await world.until(refused)

    run(scenario)
