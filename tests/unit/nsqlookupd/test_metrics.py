"""Figures of a cluster, as a nsqlookupd counts them."""

from __future__ import annotations

from typing import Any, cast

from tests.unit.cluster.models import KEYS, World, node

from flintmq.cluster.registration import RegistrationDatabase
from flintmq.cluster.state import DrainRecord
from flintmq.cluster.store import Store
from flintmq.env import Env
from flintmq.net.metrics import exposition
from flintmq.nsqlookupd.coordinator import Coordinator
from flintmq.nsqlookupd.metrics import collect_cluster


async def figures(world: World) -> dict[str, float]:
    coordinator = Coordinator(Env(), cast(Store, None), KEYS, RegistrationDatabase(0, 0))  # which it asks nothing
    coordinator.view.feed(world.store.range(KEYS.all))
    text = cast(Any, exposition(await collect_cluster(coordinator))).body.decode()
    rows = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in rows}


async def test_each_node_that_drains_is_counted_once():
    world = World()
    world.nodes("ab")
    world.node(node("c", is_draining=True))
    assert (await figures(world))["flintmq_nsqlookupd_cluster_draining_nodes"] == 1, "c drains by itself"
    for name, is_removal in (("b", False), ("c", True), ("away", True)):
        world.put(KEYS.drain(name), DrainRecord(name, is_removal))
    found = await figures(world)
    assert found["flintmq_nsqlookupd_cluster_draining_nodes"] == 3 and found["flintmq_nsqlookupd_cluster_nodes"] == 3
