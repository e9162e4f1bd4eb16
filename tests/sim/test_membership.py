"""Members and candidates in the simulation: whatever fails, nobody acts on a place that somebody else has since.

Three nodes compete for one place while processes are killed and stopped, the network is cut, and the store comes and
goes. Each acts every 10 ms for as long as it may: an act of an earlier election after one of a later election is what
must never happen.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
from tests.sim.loop import Node, NodeClock, Simulation, beginning_with, first_failing_seed, seeds, share
from tests.sim.test_store import HTTP, start
from tests.store_cases import LEASE_TTL_S, Heard, delete, node

from flintmq.cluster.state import LookupdRecord, decode
from flintmq.cluster.store import Span, StoreUnavailable, Tenure
from flintmq.net import membership as module
from flintmq.net.etcd import EtcdOptions, EtcdStore
from flintmq.net.membership import Candidacy, Membership
from flintmq.storage import node_id

PLACE = "/place"
TTL_S = 3
ACT_S = 0.01


def store_of(host: Node) -> EtcdStore:
    return EtcdStore(host.env, EtcdOptions([f"http://lookup:{HTTP}"]))


@dataclass
class World:
    """Who acted, and how often."""

    last_term: int = 0
    acts: int = 0
    elections: dict[int, str] = field(default_factory=dict)

    def act(self, term: int, name: str) -> None:
        assert term >= self.last_term, f"{name} acts as of {term}, and {self.elections[self.last_term]} has since"
        self.last_term = term
        self.acts += 1
        assert self.elections.setdefault(term, name) == name, "two of one election"


async def compete(host: Node, world: World) -> None:
    """A daemon that does nothing but to be elected, and to act."""
    identity = node_id(host.files, host.env.random.randbytes)
    incarnation = f"{host.env.random.getrandbits(64):016x}"
    record = LookupdRecord(identity, incarnation, host.name, 4160, 4161)
    member = Membership(store_of(host), host.env.clock, f"/lookupd/{identity}", record, TTL_S)
    candidacy = Candidacy(member, PLACE)
    member.start()
    candidacy.start()
    while True:
        await asyncio.sleep(ACT_S)
        if candidacy.is_elected:
            assert candidacy.pair is not None
            world.act(candidacy.pair.mod_revision, f"{host.name} {incarnation}")


async def break_things(sim: Simulation, store_host: Node, hosts: list[Node], until_s: float) -> None:
    while sim.now_s < until_s:
        await asyncio.sleep(sim.random.uniform(0.2, 3.0))
        host = sim.random.choice(hosts)
        fault = sim.random.randrange(8)
        if fault == 0:
            host.restart(power_loss=bool(sim.random.getrandbits(1)))
        elif fault == 1:
            host.pause()
            await asyncio.sleep(sim.random.uniform(0.1, 8.0))
            host.resume()
        elif fault == 2:
            sim.network.partition(host.name, "lookup")
            await asyncio.sleep(sim.random.uniform(0.1, 8.0))
            sim.network.heal()
        elif fault == 3:
            one_way = (host.name, "lookup") if sim.random.getrandbits(1) else ("lookup", host.name)
            sim.network.cut(*one_way)
            await asyncio.sleep(sim.random.uniform(0.1, 8.0))
            sim.network.heal()
        elif fault == 4:
            store_host.restart(power_loss=bool(sim.random.getrandbits(1)))
        elif fault == 5:
            store_host.pause()
            await asyncio.sleep(sim.random.uniform(0.1, 5.0))
            store_host.resume()
        elif fault == 6:
            host.suspend()
            await asyncio.sleep(sim.random.uniform(0.1, 8.0))
            host.wake()
        else:
            store_host.freeze_disk(sim.random.uniform(0.1, 5.0))
    sim.network.heal()


def run(seed: int, seconds: float = 120.0) -> tuple[World, str]:
    world = World()
    with Simulation(seed) as sim:
        store_host = sim.node("lookup")
        start(store_host)
        hosts = [sim.node(name) for name in ("a", "b", "c")]
        for host in hosts:
            host.start(partial(compete, host, world))

        async def main() -> None:
            await break_things(sim, store_host, hosts, seconds)
            acts = world.acts
            await asyncio.sleep(30)  # everything is well again, so somebody has the place
            assert world.acts > acts + 100, "nobody acts"
            store = EtcdStore(sim.driver.env, EtcdOptions([f"http://lookup:{HTTP}"]))
            members = (await store.range(Span.of_prefix("/lookupd/"))).found
            assert len(members) == 3, "everybody is registered again"
            place = await store.get(PLACE)
            assert place is not None and place.mod_revision == world.last_term
            assert decode(PLACE, place.value, LookupdRecord).host in ("a", "b", "c")
            await store.close()

        sim.run(main())
        return world, sim.trace_hash


@pytest.mark.parametrize("seed", seeds(share(16)))
def test_an_earlier_election_never_acts_after_a_later_one(seed: int):
    world, _ = run(seed)
    assert world.acts > 1000


def test_the_same_seed_is_the_same_run():
    assert run(5, 30.0)[1] == run(5, 30.0)[1]


def _longer(tenure: Tenure) -> int:
    return tenure.sent_at_ns + 2 * tenure.ttl_ns - tenure.margin_ns


def test_a_tenure_that_is_longer_than_the_lease_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Tenure, "until_ns", property(_longer))
    assert first_failing_seed(run, beginning_with(0, range(50))) is not None


def test_a_lease_by_a_clock_that_stops_with_the_machine_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(NodeClock, "boottime_ns", _uncounted)
    monkeypatch.setattr(NodeClock, "monotonic_ns", _uncounted)
    assert first_failing_seed(run, beginning_with(0, range(50))) is not None


def _uncounted(clock: NodeClock) -> int:
    return round(clock._node.network.loop.time() * 1e9) - clock._node.suspended_ns


def in_a_world(scenario: Callable[[Simulation, Node, EtcdStore], object], seed: int = 1) -> None:
    with Simulation(seed) as sim:
        store_host = sim.node("lookup")
        start(store_host)

        async def main() -> None:
            store = EtcdStore(sim.driver.env, EtcdOptions([f"http://lookup:{HTTP}"]))
            while True:
                try:
                    await store.get("ready?")
                    break
                except StoreUnavailable:
                    await asyncio.sleep(0.1)
            await scenario(sim, store_host, store)  # type: ignore[misc]
            await store.close()

        sim.run(main())


def test_a_record_that_was_deleted_is_written_again_within_its_time():
    async def scenario(sim: Simulation, store_host: Node, store: EtcdStore) -> None:
        one = Heard(store, "/node/1", node(), ttl_s=LEASE_TTL_S)
        await one.until("held")
        await delete(store, "/node/1")
        begun_s = sim.now_s
        await one.until("held", 2)
        assert sim.now_s - begun_s < module.CHECK_S + 1 and one.told == ["held", "lost", "held"]
        assert await store.get("/node/1") == one.membership.pair
        await one.close()

    in_a_world(scenario)


def test_who_cannot_renew_is_told_in_time_and_again_when_it_can(caplog: pytest.LogCaptureFixture):
    async def scenario(sim: Simulation, store_host: Node, store: EtcdStore) -> None:
        one = Heard(store, "/node/1", node(), ttl_s=LEASE_TTL_S)
        await one.until("held")
        pair = one.membership.pair
        sim.network.partition("driver", "lookup")
        begun_s = sim.now_s
        await one.until("lost")
        assert sim.now_s - begun_s <= 2.0, "its lease is 2 s"
        assert not one.membership.is_held
        assert "the store has been asked for" in caplog.text and "held up" not in caplog.text
        store_host.pause()  # nobody hears of its end: it has its full time when the store is back
        sim.network.heal()
        await asyncio.sleep(20)
        store_host.resume()
        await one.until("held", 2)
        assert one.membership.pair == pair, "it was never gone"
        await one.close()

    in_a_world(scenario)


def test_a_process_that_stood_still_says_so(caplog: pytest.LogCaptureFixture):
    async def scenario(sim: Simulation, store_host: Node, store: EtcdStore) -> None:
        host = sim.node("member")
        members: list[Heard] = []

        async def live() -> None:
            members.append(Heard(store_of(host), "/node/1", node(), ttl_s=LEASE_TTL_S))
            await asyncio.Event().wait()

        host.start(live)
        while not members:
            await asyncio.sleep(0.01)
        await members[0].until("held")
        host.pause()
        await asyncio.sleep(2 * LEASE_TTL_S)
        host.resume()
        await members[0].until("lost")
        assert "its lease was not renewed in time: this process was held up" in caplog.text

    in_a_world(scenario)


def test_an_update_waits_for_a_store_that_is_away():
    async def scenario(sim: Simulation, store_host: Node, store: EtcdStore) -> None:
        one = Heard(store, "/node/1", node(), ttl_s=LEASE_TTL_S)
        await one.until("held")
        store_host.kill()
        first = asyncio.ensure_future(one.membership.update(node(zone="one")))
        await asyncio.sleep(1)
        second = asyncio.ensure_future(one.membership.update(node(zone="two")))
        await asyncio.sleep(random.Random(1).uniform(0, 5))
        start(store_host)
        await asyncio.gather(first, second)
        pair = await store.get("/node/1")
        assert pair is not None and b"two" in pair.value and pair == one.membership.pair
        await one.close()

    in_a_world(scenario)


def test_the_place_of_a_killed_process_is_free_when_it_is_back_not_when_its_lease_is_over():
    async def scenario(sim: Simulation, store_host: Node, store: EtcdStore) -> None:
        world = World()
        host = sim.node("a")
        host.start(lambda: compete(host, world))
        while not world.acts:
            await asyncio.sleep(ACT_S)
        killed_s, term = sim.now_s, world.last_term
        host.restart()
        while world.last_term == term:
            await asyncio.sleep(ACT_S)
        assert sim.now_s - killed_s < 1.0

    in_a_world(scenario)
