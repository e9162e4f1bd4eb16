"""A simulated world for the client: scripted nsqds on their machines, the client on the driver, time that is virtual.

::

    with World("a", "b") as world:
        async def scenario():
            async with world.consumer("t", "c") as consumer: ...
        world.run(scenario())
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any, TypeVar

from tests.sim.loop import Simulation
from tests.unit.client.blocking_client import ASYNCIO, new_consumer, new_producer, threads_of
from tests.unit.client.fake_nsqd import PORT, FakeNsqd, Ledger

from flintmq.env import Env
from flintmq.wire.identify import ServerFeatures

T = TypeVar("T")


class World:
    """Scripted nsqds by name.

    Args:
        client: ``asyncio`` or ``sync``: whose producers and consumers these are.

    Attributes:
        ledger: what is in flight over all of them.
    """

    def __init__(
        self,
        *names: str,
        seed: int = 0,
        features: ServerFeatures | None = None,
        client: str = ASYNCIO,
    ) -> None:
        self.sim = Simulation(seed)
        self._client = client
        self._stack = ExitStack()
        self.ledger = Ledger()
        self.fakes = {name: FakeNsqd(features, self.ledger) for name in names or ("a",)}
        self.reachable = [*self.fakes]

    def __enter__(self) -> World:
        self._stack.enter_context(self.sim)
        self.threads = self._stack.enter_context(threads_of(self.sim, self._client))
        for name in self.fakes:
            self.start(name)
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            violations = [violation for fake in self.fakes.values() for violation in fake.violations]
            assert violations == []
        self._stack.__exit__(*error)

    @property
    def fake(self) -> FakeNsqd:
        """The only one, or the first."""
        return next(iter(self.fakes.values()))

    @property
    def env(self) -> Env:
        return self.sim.driver.env

    @property
    def addresses(self) -> list[str]:
        return [f"{name}:{PORT}" for name in self.fakes]

    def start(self, name: str) -> None:
        """Start an nsqd, with the messages it had."""
        fake = self.fakes[name]
        fake.recover()
        self.sim.node(name).start(fake.main)

    def kill(self, name: str, power_loss: bool = False) -> None:
        """kill -9, or a machine that goes silent."""
        self.sim.node(name).kill(power_loss)
        self.fakes[name].crash()

    def consumer(self, topic: str = "t", channel: str = "c", **options: Any) -> Any:
        """A consumer of the client that the world is for; each shell is called alike."""
        if "nsqlookupd_http_addresses" not in options:
            options.setdefault("nsqd_tcp_addresses", self.addresses)
        return new_consumer(self.threads, topic, channel, env=self.env, **options)

    def producer(self, *addresses: str, **options: Any) -> Any:
        """A producer of the client that the world is for; each shell is called alike."""
        if "nsqlookupd_http_addresses" not in options:
            options["nsqd_tcp_addresses"] = addresses or self.addresses
        return new_producer(self.threads, env=self.env, **options)

    def run(self, main: Coroutine[Any, Any, T], timeout_s: float = 3600.0) -> T:
        """Run a scenario."""
        return self.sim.run(main, timeout_s)

    @property
    def now(self) -> float:
        return self.sim.now_s


async def until(condition: Callable[[], object], timeout_s: float = 600.0) -> None:
    """Let time pass until ``condition`` holds.

    Raises:
        TimeoutError: it did not within ``timeout_s``.
    """
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
