"""Producer and consumers of the demo: what they write down for every answer nsqd can give, and the order of a key."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flintmq.demo import traffic
from flintmq.demo.failures import DemoFailed
from flintmq.demo.flights import Flights
from flintmq.demo.meters import Meter
from flintmq.demo.traffic import BATCH_COUNT, Audience, Ledger, publish
from flintmq.errors import PublishRefused, PublishUnknown

COUNT = 3 * BATCH_COUNT
FLIGHTS = Flights([b"%d" % number for number in range(COUNT)], [f"N{number % 7}" for number in range(COUNT)])


class FakeNsqd:
    """Answers each MPUB with the next of ``answers``, then with OK; stores what is said to be stored."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.stored = []

    async def mpub(self, topic, bodies, *, timeout):
        assert (topic, timeout > 0) == ("flights", True)
        answer = self.answers.pop(0) if self.answers else None
        if answer is None or (isinstance(answer, PublishUnknown) and answer.detail == "stored"):
            self.stored += map(int, bodies)
        if answer is not None:
            raise answer


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(traffic, "_PAUSE_S", 0.0)


async def published(*answers):
    nsqd, ledger = FakeNsqd(*answers), Ledger(COUNT, Meter("published", COUNT))
    await publish(nsqd, "flights", FLIGHTS, ledger)
    return nsqd.stored, ledger


async def test_every_flight_is_published_once_and_acknowledged():
    stored, ledger = await published()
    assert sorted(stored) == list(range(COUNT))
    assert ledger.acknowledged.all() and ledger.meter.count == COUNT
    assert (ledger.sent == 1).all() and ledger.resent == 0


async def test_flights_of_one_aircraft_are_published_in_their_order():
    stored, _ = await published(PublishUnknown("LOST", "not stored"), PublishRefused("LOST", retryable=True))
    for key in set(FLIGHTS.keys):
        of_key = [number for number in stored if FLIGHTS.keys[number] == key]
        assert of_key == sorted(of_key)


async def test_what_is_refused_is_sent_again_and_counts_once():
    stored, ledger = await published(PublishRefused("LOST", retryable=True))
    assert sorted(stored) == list(range(COUNT))
    assert (ledger.sent == 1).all() and ledger.resent == 0 and ledger.acknowledged.all()


@pytest.mark.parametrize("became", ["stored", "lost"])
async def test_what_is_unknown_is_sent_again_and_may_be_there_twice(became):
    stored, ledger = await published(PublishUnknown("LOST", became))
    copies = np.bincount(stored, minlength=COUNT)
    assert 0 < ledger.resent <= BATCH_COUNT
    assert (ledger.sent == 2).sum() == ledger.resent and (ledger.sent >= copies).all()
    assert (copies.max() == 2) == (became == "stored")
    assert ledger.acknowledged.all()


async def test_a_refusal_for_good_ends_it():
    with pytest.raises(PublishRefused, match="E_BAD_TOPIC"):
        await published(PublishRefused("E_BAD_TOPIC", retryable=False))


async def test_an_nsqd_that_stays_away_ends_it(monkeypatch):
    monkeypatch.setattr(traffic, "_PUBLISH_S_MAX", 0.01)
    with pytest.raises(DemoFailed, match="has taken no messages"):
        await published(*[PublishRefused("LOST", retryable=True)] * 100_000)


async def test_waiting_for_a_number_of_acknowledged_flights():
    ledger = Ledger(10, Meter("published", 10))
    await ledger.wait_for(0)
    ledger.note_acknowledged([1, 2, 3])
    await ledger.wait_for(3)
    ledger.note_acknowledged([4])
    assert ledger.meter.count == 4


def test_an_audience_counts_flights_and_repetitions():
    audience = Audience("counts", 2, Meter("published", 4))
    first, second = audience.counter(0), audience.counter(1)
    for handler, flight_id in [(first, 0), (second, 1), (second, 0), (first, 3)]:
        message: Any = SimpleNamespace(body=json.dumps({"id": flight_id, "carrier": "UA"}).encode())
        handler(message)
    assert audience.delivered == [2, 2]
    assert (audience.meter.count, audience.repeated) == (3, 1)
    assert audience.lost(np.array([True, True, True, True])) == 1
    assert audience.lost(np.array([True, True, False, True])) == 0
