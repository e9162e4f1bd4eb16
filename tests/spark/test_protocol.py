"""The protocol between Spark and the source and sink, driven without a JVM; and bugs that this has to find."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
from tests.spark import protocol
from tests.spark.protocol import World, play

from flintmq.spark import offsets, plan
from flintmq.spark.broker import NsqdConnection
from flintmq.spark.identity import TaskIdentity
from flintmq.spark.offsets import FROM_KEY
from flintmq.spark.prefetch import WithRows

pytestmark = pytest.mark.slow

SEEDS = 100
SEEDS_FOR_A_BUG = 200


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    logging.disable(logging.CRITICAL)  # warnings by the thousand
    with World(tmp_path_factory.mktemp("world")) as started:
        yield started
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", range(1, SEEDS, 25))
def test_each_message_once_whatever_happens(world: World, first: int):
    assert [found for seed in range(first, first + 25) if (found := play(world, seed))] == []


def assert_found(world: World, *words: str, **given: bool) -> None:
    """Check that a seed finds what was planted, as one of the things that it is seen by."""
    for seed in range(1, SEEDS_FOR_A_BUG):
        found = play(world, seed, **given)
        if any(each in found for each in words):
            return
    raise AssertionError(f"{SEEDS_FOR_A_BUG} seeds do not find it")


def test_finds_an_address_that_is_taken_for_a_log(world: World, monkeypatch: pytest.MonkeyPatch):
    real = NsqdConnection._log

    def by_address(connection: NsqdConnection, entry: dict[str, Any]) -> Any:
        return real(connection, {**entry, "log_id": f"{int(connection.address.rpartition(':')[2]):016x}"})

    monkeypatch.setattr(NsqdConnection, "_log", by_address)
    monkeypatch.setattr(protocol, "MOVES", 0.03)
    assert_found(world, "are lost: the topic was deleted and created again")


@pytest.fixture
def short_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries that seldom get beyond their first micro-batch."""
    monkeypatch.setattr(protocol, "DIES", 0.1)


@pytest.mark.usefixtures("short_lives")
def test_finds_a_latest_that_is_asked_for_twice(world: World):
    assert_found(world, "missing", without_channel=True)


@pytest.mark.usefixtures("short_lives")
def test_finds_a_plan_that_follows_from_the_cores(world: World, monkeypatch: pytest.MonkeyPatch):
    real, cores = plan.plan_tasks, itertools.cycle((2, 4))
    monkeypatch.setattr(
        "flintmq.spark.tasks.plan_tasks", lambda ranges, least, most: real(ranges, least * next(cores), most)
    )
    assert_found(world, "micro-batch", "stored as well", "copied twice")


@pytest.mark.usefixtures("short_lives")
def test_finds_where_reading_began_when_it_is_not_in_the_checkpoint(world: World, monkeypatch: pytest.MonkeyPatch):
    """A replay of the micro-batch with which a partition enters does not know where that starts."""
    real = offsets.to_json

    def without_entries(*given: Any) -> dict[str, Any]:
        return {key: value for key, value in real(*given).items() if key != FROM_KEY}

    def from_the_end(value: dict[str, Any]) -> dict[Any, int]:
        return offsets.from_json(value)

    monkeypatch.setattr("flintmq.spark.stream_reader.to_json", without_entries)
    monkeypatch.setattr("flintmq.spark.stream_reader.entries_of", from_the_end)
    assert_found(world, "missing")


def test_finds_producers_that_are_named_by_their_try(world: World, monkeypatch: pytest.MonkeyPatch):
    chance = random.Random(1)
    monkeypatch.setattr(TaskIdentity, "producer_id", lambda self, *_: f"{self.prefix}0.0.{chance.randbytes(6).hex()}")
    assert_found(world, "of an earlier try are stored as well")


def test_finds_rows_that_came_with_another_plan(world: World, monkeypatch: pytest.MonkeyPatch):
    real = WithRows.getCache

    def keep(reader: Any, start: dict[str, Any], end: dict[str, Any]) -> Any:
        first = reader.__dict__.setdefault("first", list(real(reader, start, end)))
        return iter(first)

    monkeypatch.setattr(WithRows, "getCache", keep)
    assert_found(world, "missing", "read twice", "micro-batch")
