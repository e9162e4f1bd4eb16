"""The producer and the consumers of the demo, and what they remember.

The rules of this file: the producer writes down what it was told, message by message: sent, refused (then it is not
stored), unknown (then it may be), acknowledged. What is unknown is sent again, because losing is worse than doubling.
Flights of one aircraft go through one lane, one MPUB at a time, so that they are stored in their order.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from flintmq.client import Consumer, Message, Producer
from flintmq.demo.failures import DemoFailed
from flintmq.demo.meters import Meter
from flintmq.demo.together import together
from flintmq.errors import PublishRefused, PublishUnknown

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import numpy.typing as npt

    from flintmq.demo.flights import Flights
    from flintmq.demo.verdict import Numbers

LANES = 4
BATCH_COUNT = 500
MAX_IN_FLIGHT = 2000
_PUBLISH_S = 5.0
_PUBLISH_S_MAX = 60.0
_PAUSE_S = 0.05


class Ledger:
    """What the producer knows of each flight, by its id."""

    def __init__(self, count: int, meter: Meter) -> None:
        self.meter = meter
        self.resent = 0
        self._waiters: list[tuple[int, asyncio.Event]] = []
        self._sent = np.zeros(count, dtype=np.int64)
        self._acknowledged = np.zeros(count, dtype=bool)

    @property
    def sent(self) -> Numbers:
        """How often each flight was sent and perhaps stored."""
        return self._sent

    @property
    def acknowledged(self) -> npt.NDArray[np.bool_]:
        """Which flights nsqd has answered OK for."""
        return self._acknowledged

    def note_sent(self, ids: list[int]) -> None:
        """They are on their way."""
        self._sent[ids] += 1

    def note_refused(self, ids: list[int]) -> None:
        """They are not stored."""
        self._sent[ids] -= 1

    def note_unknown(self, ids: list[int]) -> None:
        """They may be stored."""
        self.resent += len(ids)

    def note_acknowledged(self, ids: list[int]) -> None:
        """They are stored."""
        self._acknowledged[ids] = True
        self.meter.reach(self.meter.count + len(ids), time.monotonic())
        for count, event in self._waiters:
            if self.meter.count >= count:
                event.set()

    async def wait_for(self, count: int) -> None:
        """Return as soon as so many are acknowledged."""
        if self.meter.count < count:
            event = asyncio.Event()
            self._waiters.append((count, event))
            await event.wait()


class Publisher(Protocol):
    """What is needed of a :class:`flintmq.Producer`; it must not send again by itself what is unknown."""

    async def mpub(self, topic: str, bodies: Iterable[bytes], *, timeout: float) -> None: ...


def new_producer(nsqd: str) -> Producer:
    """Return a producer that tells what became of each MPUB, instead of seeing to it."""
    return Producer(nsqd, retry_unknown=False, client_id="demo")


async def publish(producer: Publisher, topic: str, flights: Flights, ledger: Ledger) -> None:
    """Publish all flights; returns when each is acknowledged.

    Raises:
        DemoFailed: nsqd takes no messages for a long time.
        PublishRefused: nsqd does not want them.
    """
    ledger.meter.begin(time.monotonic())
    lanes = _lanes(flights.keys)
    await together(*(_publish_lane(producer, topic, flights, lane, ledger) for lane in lanes))


async def _publish_lane(producer: Publisher, topic: str, flights: Flights, lane: list[int], ledger: Ledger) -> None:
    for ids in _batches(lane):
        bodies = [flights.bodies[flight_id] for flight_id in ids]
        deadline = time.monotonic() + _PUBLISH_S_MAX
        while not await _is_acknowledged(producer, topic, ids, bodies, ledger):
            if time.monotonic() > deadline:
                raise DemoFailed(f"nsqd has taken no messages for {_PUBLISH_S_MAX:g} s", "see nsqd.log")
            await asyncio.sleep(_PAUSE_S)


async def _is_acknowledged(
    producer: Publisher, topic: str, ids: list[int], bodies: list[bytes], ledger: Ledger
) -> bool:
    """Publish one MPUB and write down what came of it."""
    ledger.note_sent(ids)
    try:
        await producer.mpub(topic, bodies, timeout=_PUBLISH_S)
    except PublishUnknown:
        ledger.note_unknown(ids)
        return False
    except PublishRefused as error:
        ledger.note_refused(ids)
        if not error.retryable:
            raise
        return False
    ledger.note_acknowledged(ids)
    return True


def _lanes(keys: list[str]) -> list[list[int]]:
    """Split the ids of all flights so that equal keys stay together."""
    lanes: list[list[int]] = [[] for _ in range(LANES)]
    lane_of = {key: zlib.crc32(key.encode()) % LANES for key in set(keys)}
    for flight_id, key in enumerate(keys):
        lanes[lane_of[key]].append(flight_id)
    return lanes


def _batches(ids: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(ids), BATCH_COUNT):
        yield ids[start : start + BATCH_COUNT]


class _FlightId(msgspec.Struct):
    id: int


class Audience:
    """The consumers of one channel, counting together.

    Args:
        published: what they are to see.

    Attributes:
        delivered: by consumer, how many messages it finished.
        meter: how many different flights they have seen.
    """

    def __init__(self, channel: str, consumer_count: int, published: Meter) -> None:
        self.channel = channel
        self.delivered = [0] * consumer_count
        self.meter = Meter(channel, published.total, source=published)
        self._seen = bytearray(published.total)
        self._decoder = msgspec.json.Decoder(_FlightId)

    @property
    def repeated(self) -> int:
        """Deliveries of flights that were delivered before."""
        return sum(self.delivered) - self.meter.count

    def lost(self, acknowledged: npt.NDArray[np.bool_]) -> int:
        """How many of the acknowledged flights were never delivered."""
        return int((acknowledged & (np.frombuffer(self._seen, dtype=np.uint8) == 0)).sum())

    @asynccontextmanager
    async def listening(self, topic: str, lookupd: str) -> AsyncIterator[None]:
        """Consume the topic while the block runs.

        Args:
            lookupd: HTTP address of the nsqlookupd that knows who has it.
        """
        consumers = [self._consumer(index, topic, lookupd) for index in range(len(self.delivered))]
        started: list[Consumer] = []
        try:
            for consumer in consumers:
                await consumer.start()
                started.append(consumer)
            yield
        finally:
            await asyncio.gather(*(consumer.close() for consumer in started))

    def counter(self, index: int) -> Callable[[Message], None]:
        """Return the handler of one consumer."""

        def count(message: Message) -> None:
            flight_id = self._decoder.decode(message.body).id
            self.delivered[index] += 1
            if not self._seen[flight_id]:
                self._seen[flight_id] = 1
                self.meter.reach(self.meter.count + 1, time.monotonic())

        return count

    def _consumer(self, index: int, topic: str, lookupd: str) -> Consumer:
        return Consumer(
            topic,
            self.channel,
            nsqlookupd_http_addresses=lookupd,
            handler=self.counter(index),
            inline=True,
            max_in_flight=MAX_IN_FLIGHT,
            max_attempts=0,  # a flight that nsqd had to deliver again after its end is no bad message
            client_id=f"{self.channel}-{index + 1}",
        )
