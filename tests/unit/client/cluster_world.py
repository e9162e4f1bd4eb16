"""A simulated redesigned NSQ and the client on the driver: :mod:`tests.unit.client.fake_cluster` in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

from tests.sim.loop import Simulation
from tests.unit.client.blocking_client import ASYNCIO, new_consumer, new_producer, threads_of
from tests.unit.client.fake_cluster import Cluster


class ClusterWorld:
    """Nodes by name, each on a machine of its own.

    Args:
        client: ``asyncio`` or ``sync``: whose producers and consumers these are.
    """

    def __init__(self, *names: str, seed: int = 0, client: str = ASYNCIO) -> None:
        self.sim = Simulation(seed)
        self._client = client
        self._stack = ExitStack()
        self.cluster = Cluster(*(names or ("a", "b", "c")))

    def __enter__(self) -> ClusterWorld:
        self._stack.enter_context(self.sim)
        self.threads = self._stack.enter_context(threads_of(self.sim, self._client))
        for name in self.cluster.nodes:
            self.start(name)
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            violations = [violation for node in self.cluster.nodes.values() for violation in node.violations]
            assert violations == []
        self._stack.__exit__(*error)

    def start(self, name: str) -> None:
        self.sim.node(name).start(self.cluster.nodes[name].main)

    def kill(self, name: str) -> None:
        self.sim.node(name).kill()
        self.cluster.nodes[name].crash()

    def producer(self, **options: Any) -> Any:
        """A producer of the client that the world is for; each shell is called alike."""
        options.setdefault("nsqlookupd_http_addresses", self.cluster.lookups[0])
        return new_producer(self.threads, env=self.sim.driver.env, fetch=self.cluster, **options)

    def consumer(self, topic: str = "t", channel: str = "ch", **options: Any) -> Any:
        """A consumer of the client that the world is for; each shell is called alike."""
        options.setdefault("nsqlookupd_http_addresses", self.cluster.lookups[0])
        env = self.sim.driver.env
        return new_consumer(self.threads, topic, channel, env=env, fetch=self.cluster, **options)

    @property
    def now(self) -> float:
        return self.sim.now_s


def play(
    scenario: Callable[[ClusterWorld], Coroutine[Any, Any, None]], *names: str, seed: int = 0, client: str = ASYNCIO
) -> None:
    """Run a scenario in a world of its own."""
    with ClusterWorld(*names, seed=seed, client=client) as world:
        world.sim.run(scenario(world), 3600.0)


class PlainLookup:
    """A nsqlookupd of NSQ's own, which lists nsqd ``a`` for every topic."""

    async def __call__(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        if "/lookup?" not in url:
            return 404, b'{"message":"NOT_FOUND"}'
        return 200, b'{"producers":[{"broadcast_address":"a","tcp_port":4150}]}'

    async def close(self) -> None:
        """Nothing is open."""
