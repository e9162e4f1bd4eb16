"""A simulated redesigned NSQ and the client on the driver: :mod:`tests.unit.client.fake_cluster` in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from tests.sim.loop import Simulation
from tests.unit.client.fake_cluster import Cluster

from flintmq import Consumer, Producer


class ClusterWorld:
    """Nodes by name, each on a machine of its own."""

    def __init__(self, *names: str, seed: int = 0) -> None:
        self.sim = Simulation(seed)
        self.cluster = Cluster(*(names or ("a", "b", "c")))

    def __enter__(self) -> ClusterWorld:
        self.sim.__enter__()
        for name in self.cluster.nodes:
            self.start(name)
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            violations = [violation for node in self.cluster.nodes.values() for violation in node.violations]
            assert violations == []
        self.sim.__exit__(*error)

    def start(self, name: str) -> None:
        self.sim.node(name).start(self.cluster.nodes[name].main)

    def kill(self, name: str) -> None:
        self.sim.node(name).kill()
        self.cluster.nodes[name].crash()

    def producer(self, **options: Any) -> Producer:
        options.setdefault("nsqlookupd_http_addresses", self.cluster.lookups[0])
        return Producer(env=self.sim.driver.env, fetch=self.cluster, **options)

    def consumer(self, topic: str = "t", channel: str = "ch", **options: Any) -> Consumer:
        options.setdefault("nsqlookupd_http_addresses", self.cluster.lookups[0])
        return Consumer(topic, channel, env=self.sim.driver.env, fetch=self.cluster, **options)

    @property
    def now(self) -> float:
        return self.sim.now_s


def play(scenario: Callable[[ClusterWorld], Coroutine[Any, Any, None]], *names: str, seed: int = 0) -> None:
    """Run a scenario in a world of its own."""
    with ClusterWorld(*names, seed=seed) as world:
        world.sim.run(scenario(world), 3600.0)


class PlainLookup:
    """A nsqlookupd of NSQ's own, which lists nsqd ``a`` for every topic."""

    async def __call__(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        if "/lookup?" not in url:
            return 404, b'{"message":"NOT_FOUND"}'
        return 200, b'{"producers":[{"broadcast_address":"a","tcp_port":4150}]}'

    async def close(self) -> None:
        """Nothing is open."""
