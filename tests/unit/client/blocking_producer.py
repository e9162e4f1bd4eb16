"""The blocking producer in a simulated world, as a scenario on the loop sees it: each call in a thread of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.sim.loop import Simulation, seeds
from tests.sim.threads import Threads

import flintmq
from flintmq.client.blocking import dead_letters, producer, stream, thread_pool, ticker
from flintmq.sync import Producer

MODULES = (dead_letters, producer, stream, thread_pool, ticker)
ASYNCIO, SYNC = "asyncio", "sync"


def seeds_of_both(count: int) -> list[tuple[str, int]]:
    """Clients with their seeds: so many for the asyncio one, and half as many, as threads are slow, for the other."""
    return [*((ASYNCIO, seed) for seed in seeds(count)), *((SYNC, seed) for seed in seeds(count // 2))]


@contextmanager
def threads_of(sim: Simulation, client: str) -> Iterator[Threads | None]:
    """The threads of a world whose clients are blocking ones; None: they are not."""
    if client == ASYNCIO:
        yield None
        return
    assert client == SYNC
    with Threads(sim) as threads, threads.installed(*MODULES):
        yield threads


class BlockingProducer:
    """A producer whose methods are awaited."""

    def __init__(self, threads: Threads, *args: Any, **options: Any) -> None:
        self._threads = threads
        options.pop("batch", None)  # it gathers nothing
        if (fetch := options.get("fetch")) is not None:
            options["fetch"] = lambda url, timeout_s: threads.run(fetch(url, timeout_s), None)
        self._producer = Producer(*args, **options)

    async def __aenter__(self) -> BlockingProducer:
        await self._threads.call(self._producer.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        await self._threads.call(self._producer.start)

    async def close(self) -> None:
        await self._threads.call(self._producer.close)

    async def pub(self, *args: Any, **options: Any) -> Any:
        return await self._threads.call(lambda: self._producer.pub(*args, **options))

    async def mpub(self, *args: Any, **options: Any) -> Any:
        return await self._threads.call(lambda: self._producer.mpub(*args, **options))

    async def dpub(self, *args: Any, **options: Any) -> Any:
        return await self._threads.call(lambda: self._producer.dpub(*args, **options))

    def __getattr__(self, name: str) -> Any:
        """What waits for nothing: ``stats``, ``describe``, ``trace``, ``traced``."""
        return getattr(self._producer, name)


def new_producer(threads: Threads | None, *args: Any, **options: Any) -> Any:
    """A producer of the client that the threads are for; each shell is called alike."""
    if threads is not None:
        return BlockingProducer(threads, *args, **options)
    return flintmq.Producer(*args, **options)
