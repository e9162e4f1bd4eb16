"""The asyncio client and the blocking one behind one small adapter, so that one scenario runs with both.

A scenario is a plain function in the test's thread. An asyncio client lives on a loop in a thread of its own, a
blocking consumer in a thread that calls ``run()``; a blocking producer is used by a pool of threads, as in a web
application.

Rules of this file: it adds no behaviour: every call is one call of the client; what goes wrong in a client's thread is
raised when the client is left; every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Protocol

from tests.integration.daemons import PATIENCE_S, SOON_S, Nsqd, wait_until
from tests.integration.load import body_of, number_of
from tests.sim.checkers import TotalQueue, total_queue

import flintmq.sync
from flintmq import Consumer, Producer, PublishRefused, PublishUnknown

FLAVOURS = ("asyncio", "sync")
CONCURRENCY = 4
"""Handlers that may block and run at once, in the asyncio flavour."""
POOL_COUNT = 32
RATE_PER_S = 1500.0

Handler = Callable[[Any], object]


def address_of(where: tuple[str, int] | Nsqd) -> str:
    """``host:port`` of a daemon or of a proxy's address."""
    host, port = where.tcp if isinstance(where, Nsqd) else where
    return f"{host}:{port}"


class Handle(Protocol):
    """A running client."""

    def call(self, function: Callable[[Any], Any]) -> Any:
        """``function(client)`` where the client lives; what it returns is awaited if that is a coroutine."""


class PublishHandle(Handle, Protocol):
    """A running producer."""

    def submit(self, topic: str, body: bytes, timeout_s: float | None = None) -> Future[None]:
        """Begin a ``pub``; the future has its outcome."""


class Flavour(Protocol):
    """How clients of one kind are made."""

    name: str

    def producer(self, *args: Any, **options: Any) -> contextlib.AbstractContextManager[PublishHandle]: ...
    def consumer(
        self, topic: str, channel: str, handler: Handler, may_block: bool = False, **options: Any
    ) -> contextlib.AbstractContextManager[Handle]:
        """A consumer with a handler; ``may_block``: the handler may, so the asyncio client calls it in threads."""


class Asyncio:
    """The asyncio client. Handlers are called on the loop unless they may block."""

    name = "asyncio"

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="asyncio client", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the loop; no client may be running."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    def _run(self, function: Callable[[], Any]) -> Any:
        async def run() -> Any:
            result = function()
            return await result if inspect.isawaitable(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(PATIENCE_S * 2)

    @contextlib.contextmanager
    def producer(self, *args: Any, **options: Any) -> Iterator[PublishHandle]:
        producer = Producer(*args, **options)
        self._run(producer.start)
        loop = self._loop

        class Here:
            call = staticmethod(lambda function: self._run(lambda: function(producer)))

            @staticmethod
            def submit(topic: str, body: bytes, timeout_s: float | None = None) -> Future[None]:
                return asyncio.run_coroutine_threadsafe(producer.pub(topic, body, timeout=timeout_s), loop)

        try:
            yield Here()
        finally:
            self._run(producer.close)

    @contextlib.contextmanager
    def consumer(
        self, topic: str, channel: str, handler: Handler, may_block: bool = False, **options: Any
    ) -> Iterator[Handle]:
        consumer = Consumer(
            topic,
            channel,
            handler=handler,
            inline=not may_block,
            concurrency=CONCURRENCY if may_block else 1,
            **options,
        )
        self._run(consumer.start)

        class Here:
            call = staticmethod(lambda function: self._run(lambda: function(consumer)))

        try:
            yield Here()
        finally:
            self._run(consumer.close)


class Blocking:
    """The blocking client: a consumer in a thread, a producer used by a pool of threads."""

    name = "sync"

    def __init__(self) -> None:
        self._module = flintmq.sync

    def close(self) -> None:
        """Nothing is shared."""

    @contextlib.contextmanager
    def producer(self, *args: Any, **options: Any) -> Iterator[PublishHandle]:
        with (
            ThreadPoolExecutor(POOL_COUNT, "publish") as pool,
            self._module.Producer(*args, **options) as producer,
        ):

            class Here:
                call = staticmethod(lambda function: function(producer))

                @staticmethod
                def submit(topic: str, body: bytes, timeout_s: float | None = None) -> Future[None]:
                    return pool.submit(producer.pub, topic, body, timeout=timeout_s)

            yield Here()

    @contextlib.contextmanager
    def consumer(
        self, topic: str, channel: str, handler: Handler, may_block: bool = False, **options: Any
    ) -> Iterator[Handle]:
        consumer = self._module.Consumer(topic, channel, handler=handler, **options)
        consumer.start()
        failures: list[BaseException] = []

        def run() -> None:
            try:
                consumer.run()
            except BaseException as error:  # noqa: BLE001 - raised where the consumer is left
                failures.append(error)

        thread = threading.Thread(target=run, name="blocking consumer", daemon=True)
        thread.start()

        class Here:
            call = staticmethod(lambda function: function(consumer))

        try:
            yield Here()
        finally:
            consumer.stop()
            thread.join(PATIENCE_S * 2)
            assert not thread.is_alive(), "run() did not end"
        if failures:
            raise failures[0]


def stats_of(client: Handle) -> Any:
    """What ``stats()`` of a client says."""
    return client.call(lambda it: it.stats())


def connections_of(consumer: Handle) -> tuple[str, ...]:
    """The nsqd that a consumer is subscribed on."""
    connections: tuple[str, ...] = consumer.call(lambda it: it.connections)
    return connections


def set_max_in_flight(consumer: Handle, count: int) -> None:
    """Change the limit of a consumer that runs."""

    def change(it: Any) -> None:
        it.max_in_flight = count

    consumer.call(change)


@contextlib.contextmanager
def opened(name: str) -> Iterator[Flavour]:
    """The flavour of this name."""
    flavour = Asyncio() if name == "asyncio" else Blocking()
    try:
        yield flavour
    finally:
        flavour.close()


# -- load --------------------------------------------------------------------------------------------------------------


class PublishLoad:
    """Publishes numbered messages through a producer until it is stopped: so many at a time, and not faster than
    ``RATE_PER_S``, so that whoever handles them keeps up on a busy machine.

    Attributes:
        attempted: numbers in the order they were begun.
        acked: those that ended well.
        refused: those that are definitely not stored.
        unknown: those that may be stored.
        unexpected: any other end of a call.
        longest_s: how long the slowest call took.
    """

    def __init__(
        self,
        producer: PublishHandle,
        topic: str,
        window: int = POOL_COUNT,
        size: int = 200,
        timeout_s: float = PATIENCE_S,
    ) -> None:
        self.attempted: list[int] = []
        self.acked: list[int] = []
        self.refused: list[int] = []
        self.unknown: list[int] = []
        self.unexpected: list[BaseException] = []
        self.longest_s = 0.0
        self._producer = producer
        self._topic = topic
        self._size = size
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._room = threading.Semaphore(window)
        self._waiting: dict[Future[None], None] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def __enter__(self) -> PublishLoad:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            self.stop()
        else:
            self._is_over.set()

    def stop(self) -> None:
        """Begin no more, and see every call that was begun end within its deadline."""
        self._is_over.set()
        self._thread.join(PATIENCE_S * 2)
        assert not self._thread.is_alive(), "submitting hangs"
        late = wait([*self._waiting], self._timeout_s + SOON_S).not_done
        assert not late, f"{len(late)} calls never ended"
        assert not self.unexpected, self.unexpected[:3]
        ended = len(self.acked) + len(self.refused) + len(self.unknown)
        assert ended == len(self.attempted), f"{len(self.attempted) - ended} calls have no outcome"

    def _run(self) -> None:
        begun_at = time.monotonic()
        while not self._is_over.is_set():
            early_s = len(self.attempted) / RATE_PER_S - (time.monotonic() - begun_at)
            if early_s > 0.005:
                time.sleep(early_s)
            if not self._room.acquire(timeout=0.1):
                continue
            number = next(self._numbers)
            self.attempted.append(number)
            began = time.monotonic()
            future = self._producer.submit(self._topic, body_of(number, self._size), self._timeout_s)
            self._waiting[future] = None
            future.add_done_callback(partial(self._ended, number, began))

    def _ended(self, number: int, began: float, future: Future[None]) -> None:
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        match future.exception():
            case None:
                self.acked.append(number)
            case PublishRefused():
                self.refused.append(number)
            case PublishUnknown():
                self.unknown.append(number)
            case other:
                self.unexpected.append(other)
        self._waiting.pop(future, None)
        self._room.release()

    @contextlib.contextmanager
    def widened(self, count: int) -> Iterator[None]:
        """Have so many more at a time meanwhile, whatever becomes of those that are on their way."""
        for _ in range(count):
            self._room.release()
        yield
        for _ in range(count):
            assert self._room.acquire(timeout=self._timeout_s), "what was on its way never ends"

    def wait_for(self, count: int, timeout_s: float = PATIENCE_S) -> None:
        """Wait until so many more messages are acknowledged."""
        wanted = len(self.acked) + count
        wait_until(lambda: len(self.acked) >= wanted, f"{count} more acknowledged", timeout_s)


class Seen:
    """A handler that writes down the numbers of the messages and finishes them.

    Attributes:
        counts: number -> deliveries handled.
        damaged: bodies that nobody published.
    """

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.damaged: list[bytes] = []

    def __call__(self, message: Any) -> None:
        try:
            self.counts[number_of(message.body)] += 1
        except (AssertionError, ValueError):
            self.damaged.append(message.body)

    def has_all(self, numbers: Sequence[int]) -> bool:
        """Whether every number was handled."""
        return all(number in self.counts for number in numbers)

    def wait_for(self, numbers: Sequence[int], timeout_s: float = PATIENCE_S) -> None:
        """Wait until every number was handled."""
        wait_until(lambda: self.has_all(numbers), "everything acknowledged was handled", timeout_s)

    def check(self, load: PublishLoad) -> TotalQueue:
        """See that nothing acknowledged is lost, nothing refused and nothing strange was handled."""
        assert not self.damaged, self.damaged[:3]
        assert load.acked, "nothing was acknowledged, so nothing was tested"
        result = total_queue(load.attempted, load.acked, load.refused, self.counts.elements())
        assert result.is_ok, str(result)
        return result
