"""The producer and the consumers of the demo, and what they count.

The rules of this file: the producer is idempotent, so that what nsqd did not answer before it was killed is sent again
and stored once. Flights of one aircraft go through one lane, one MPUB at a time, so they are stored in their order.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

import msgspec

from flintmq.client import Consumer, Message, Producer
from flintmq.demo.flights import Flights
from flintmq.demo.screen import Meter

LANES = 4
BATCH_COUNT = 500
MAX_IN_FLIGHT = 2000
_PUBLISH_S_MAX = 60.0
_TRIES_MAX = 1000  # it is the time that ends it


async def together(*coroutines: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run coroutines at once; return their results in order.

    Raises:
        Exception: the first failure, as it is; the others are cancelled by then.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


class Publisher(Protocol):
    """The part of a :class:`flintmq.Producer` that is needed here."""

    async def mpub(self, topic: str, bodies: Iterable[bytes]) -> None: ...


def new_producer(nsqd: str) -> Producer:
    """Return a producer whose publishes survive the end of nsqd: it waits for the next one, which stores them once."""
    return Producer(nsqd, idempotent=True, timeout=_PUBLISH_S_MAX, max_tries=_TRIES_MAX, client_id="demo")


async def publish(producer: Publisher, topic: str, flights: Flights, meter: Meter) -> None:
    """Publish all flights; returns when nsqd has said OK to each.

    Args:
        meter: counts those that nsqd has said OK to.

    Raises:
        FlintError: nsqd does not want them, or takes no messages for a minute.
    """

    async def publish_lane(ids: list[int]) -> None:
        for start in range(0, len(ids), BATCH_COUNT):
            batch = ids[start : start + BATCH_COUNT]
            await producer.mpub(topic, [flights.bodies[flight_id] for flight_id in batch])
            meter.reach(meter.count + len(batch), time.monotonic())

    meter.begin(time.monotonic())
    await together(*map(publish_lane, _lanes(flights.keys)))


def _lanes(keys: list[str]) -> list[list[int]]:
    """Split the ids of all flights so that equal keys stay together."""
    lanes: list[list[int]] = [[] for _ in range(LANES)]
    for flight_id, key in enumerate(keys):
        lanes[zlib.crc32(key.encode()) % LANES].append(flight_id)
    return lanes


class _FlightId(msgspec.Struct):
    id: int


class Counters:
    """The consumers of one channel, counting together.

    Args:
        published: what they are to see.

    Attributes:
        delivered: how many messages they finished.
        meter: how many different flights they have seen.
    """

    def __init__(self, channel: str, consumer_count: int, published: Meter) -> None:
        self.channel = channel
        self.consumer_count = consumer_count
        self.delivered = 0
        self.meter = Meter(channel, published.total, source=published)
        self._seen = bytearray(published.total)
        self._decoder = msgspec.json.Decoder(_FlightId)

    @property
    def repeated(self) -> int:
        """Deliveries of flights that were delivered before."""
        return self.delivered - self.meter.count

    @property
    def missing(self) -> int:
        """Flights that nsqd has said OK to and that were never delivered."""
        return max(0, self.meter.total - self.meter.count)

    def count(self, message: Message) -> None:
        """Handle a message of any of the consumers."""
        flight_id = self._decoder.decode(message.body).id
        self.delivered += 1
        if not self._seen[flight_id]:
            self._seen[flight_id] = 1
            self.meter.reach(self.meter.count + 1, time.monotonic())

    @asynccontextmanager
    async def listening(self, topic: str, lookupd: str) -> AsyncIterator[None]:
        """Consume the topic while the block runs.

        Args:
            lookupd: HTTP address of the nsqlookupd that knows who has it.
        """
        async with AsyncExitStack() as consumers:
            for number in range(1, self.consumer_count + 1):
                await consumers.enter_async_context(_consumer(f"{self.channel}-{number}", self, topic, lookupd))
            yield


def _consumer(client_id: str, counters: Counters, topic: str, lookupd: str) -> Consumer:
    handler: Callable[[Message], None] = counters.count
    return Consumer(
        topic,
        counters.channel,
        nsqlookupd_http_addresses=lookupd,
        handler=handler,
        inline=True,
        max_in_flight=MAX_IN_FLIGHT,
        max_attempts=0,  # a flight that nsqd had to deliver again after its end is no bad message
        client_id=client_id,
    )
