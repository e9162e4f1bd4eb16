"""Producer and consumers of the demo: what they count, and the order of a key."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from flintmq.demo.flights import Flights
from flintmq.demo.screen import Meter
from flintmq.demo.traffic import BATCH_COUNT, Counters, publish
from flintmq.errors import PublishRefused

COUNT = 3 * BATCH_COUNT
FLIGHTS = Flights([b"%d" % number for number in range(COUNT)], [f"N{number % 7}" for number in range(COUNT)])


class FakeProducer:
    """Stores what it is given; refuses the MPUB with the number ``refused``, from 1."""

    def __init__(self, refused=0):
        self.stored = []
        self.calls = 0
        self.refused = refused

    async def mpub(self, topic, bodies):
        assert topic == "flights"
        self.calls += 1
        if self.calls == self.refused:
            raise PublishRefused("E_BAD_TOPIC", retryable=False)
        self.stored += map(int, bodies)


async def test_every_flight_is_published_once_and_counted():
    producer, meter = FakeProducer(), Meter("published", COUNT)
    await publish(producer, "flights", FLIGHTS, meter)
    assert sorted(producer.stored) == list(range(COUNT))
    assert meter.count == COUNT


async def test_flights_of_one_aircraft_are_published_in_their_order():
    producer = FakeProducer()
    await publish(producer, "flights", FLIGHTS, Meter("published", COUNT))
    for key in set(FLIGHTS.keys):
        of_key = [number for number in producer.stored if FLIGHTS.keys[number] == key]
        assert of_key == sorted(of_key)


async def test_a_refusal_ends_it_and_is_not_counted():
    producer, meter = FakeProducer(refused=2), Meter("published", COUNT)
    with pytest.raises(PublishRefused, match="E_BAD_TOPIC"):
        await publish(producer, "flights", FLIGHTS, meter)
    assert meter.count == len(producer.stored) < COUNT


def test_counters_count_flights_and_repetitions():
    counters = Counters("counts", 2, Meter("published", 4))
    for flight_id in (0, 1, 0, 3):
        message: Any = SimpleNamespace(body=json.dumps({"id": flight_id, "carrier": "UA"}).encode())
        counters.count(message)
    assert (counters.delivered, counters.meter.count, counters.repeated, counters.missing) == (4, 3, 1, 1)
