"""The blocking client in a simulated world, as a scenario on the loop sees it: each call in a thread of its own."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.sim.loop import Simulation, seeds
from tests.sim.threads import Threads

import flintmq
from flintmq.client.blocking import consumer, dead_letters, producer, pump, stream, thread_pool, ticker
from flintmq.sync import Consumer, Producer

MODULES = (consumer, dead_letters, producer, pump, stream, thread_pool, ticker)
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
        _make_blocking(threads, options)
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


class BlockingConsumer:
    """A consumer that is iterated, and runs its handler, as one on an event loop does.

    Args:
        concurrency: threads that run it.
    """

    def __init__(
        self, threads: Threads, *args: Any, concurrency: int = 1, inline: bool = False, **options: Any
    ) -> None:
        assert not inline or concurrency == 1
        self._threads = threads
        self._concurrency = concurrency if "handler" in options else 0
        self._runs: list[asyncio.Task[Any]] = []
        _make_blocking(threads, options)
        self._consumer = Consumer(*args, **options)

    async def __aenter__(self) -> BlockingConsumer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        await self._threads.call(self._consumer.start)
        for _ in range(self._concurrency):
            self._runs.append(asyncio.get_running_loop().create_task(self._threads.call(self._consumer.run)))

    async def run(self) -> None:
        await self._threads.call(self._consumer.run)

    async def close(self) -> None:
        await self._threads.call(self._consumer.close)
        for run in self._runs:
            await run

    def __aiter__(self) -> Pulled:
        return Pulled(self._threads, lambda: iter(self._consumer))

    def batches(self, *args: Any, **options: Any) -> Pulled:
        return Pulled(self._threads, lambda: self._consumer.batches(*args, **options))

    def __setattr__(self, name: str, value: object) -> None:
        """``max_in_flight`` and ``trace`` are the consumer's."""
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self._consumer, name, value)

    def __repr__(self) -> str:
        return repr(self._consumer)

    def __getattr__(self, name: str) -> Any:
        """What waits for nothing: ``stats``, ``describe``, ``stop``, ``pause`` and the rest."""
        return getattr(self._consumer, name)


_OVER = object()


class Pulled:
    """What a blocking iterator yields, each in a thread."""

    def __init__(self, threads: Threads, begin: Callable[[], Iterator[Any]]) -> None:
        self._threads = threads
        self._begin = begin
        self._pulled: Iterator[Any] | None = None

    def __aiter__(self) -> Pulled:
        return self

    async def __anext__(self) -> Any:
        found = await self._threads.call(self._next)
        if found is _OVER:
            raise StopAsyncIteration
        return found

    def _next(self) -> Any:
        if self._pulled is None:
            self._pulled = self._begin()
        return next(self._pulled, _OVER)


def _make_blocking(threads: Threads, options: dict[str, Any]) -> None:
    """Let functions among the options, which may be coroutine functions, block the thread that they are called in."""
    for name in ("fetch", "handler", "on_giving_up", "on_error"):
        if (function := options.get(name)) is not None:
            options[name] = _blocking(threads, function)


def _blocking(threads: Threads, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        result = function(*args)
        return threads.run(_only(result), None) if inspect.isawaitable(result) else result

    return call


async def _only(result: Any) -> Any:
    return await result


def new_consumer(threads: Threads | None, *args: Any, **options: Any) -> Any:
    """A consumer of the client that the threads are for; each shell is called alike."""
    if threads is not None:
        return BlockingConsumer(threads, *args, **options)
    return flintmq.Consumer(*args, **options)
