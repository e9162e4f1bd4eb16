"""Balancing copies by load: it makes the greatest load smaller, comes to rest, and stays there while loads waver."""

from __future__ import annotations

import random

import pytest
from tests.unit.cluster.models import KEYS, World, node, state

from flintmq.cluster.balance import COPY_LOAD, FULL_ABOVE, RATE_OVER_NS, STORED_OVER_S, Loads, copy_to_move, is_within
from flintmq.cluster.state import joined, released, replaced
from flintmq.cluster.view import PartitionId, View

SECOND = 1_000_000_000
NAMES = "abcdef"


def test_the_load_of_a_partition_is_what_is_written_and_a_little_of_what_is_stored():
    loads = Loads()
    assert loads.of(("t", 0)) == COPY_LOAD
    loads.told(("t", 0), 1000, 0, now_ns=0)
    for number in range(1, 100):
        loads.told(("t", 0), 1000 + number * 30_000, 0, now_ns=number * 30 * SECOND)
    assert loads.of(("t", 0)) == pytest.approx(COPY_LOAD + 1000, rel=0.01)
    loads.told(("t", 0), 10, int(STORED_OVER_S) * 500, now_ns=100 * 30 * SECOND)
    assert loads.of(("t", 0)) == pytest.approx(COPY_LOAD + 1000 + 500, rel=0.01), "another log: its rate is not known"
    loads.forget_all_but({})
    assert len(loads) == 0


@pytest.mark.parametrize(
    ("window", "inside", "outside"),
    [
        ((2, 6), (2, 5), (1, 6, 23)),
        ((22, 4), (22, 23, 0, 3), (4, 12, 21)),
        ((0, 24), (0, 12, 23), ()),
        ((3, 3), (), (3, 4)),
    ],
)
def test_hours(window: tuple[int, int], inside: tuple[int, ...], outside: tuple[int, ...]):
    assert all(is_within(window, hour) for hour in inside)
    assert not any(is_within(window, hour) for hour in outside)


@pytest.mark.parametrize("seed", range(20))
def test_copies_come_to_rest(seed: int):
    choice = random.Random(seed)
    world, loads = World(), Loads()
    world.nodes(NAMES)
    count = choice.randint(3, 60)
    world.topic("t", count, replica=2)
    rates = [choice.choice((0, 100, 1000, 20_000)) for _ in range(count)]
    for number in range(count):
        world.partition("t", number, state("a", "ab" if choice.random() < 0.7 else "ac"))
    view = View(KEYS)
    view.feed(world.store.range(KEYS.all))
    for moved in range(1000):
        for number, rate in enumerate(rates):
            written = int(rate * moved * 30 * choice.uniform(0.97, 1.03))
            loads.told(("t", number), written, 0, now_ns=moved * 10 * RATE_OVER_NS)
        held = held_by(view, loads)
        found = copy_to_move(view, view.nodes.values(), loads, lambda *_: True)
        if found is None:
            break
        (partition, source, target), before = found, held
        assert source == max(NAMES, key=lambda name: (before[name], name))
        move(world, view, partition, source, target)
        now = held_by(view, loads)
        assert max(now[source], now[target]) <= max(before[source], before[target])
        assert sum(load**2 for load in now.values()) < sum(load**2 for load in before.values())
    else:
        raise AssertionError("copies are moved to and fro")
    heaviest = max(map(loads.of, view.partitions))
    held = held_by(view, loads)
    mean = sum(held.values()) / len(held)
    assert max(held.values()) <= max(mean * FULL_ABOVE, min(held.values()) + 2 * heaviest + 1)


def held_by(view: View, loads: Loads) -> dict[str, float]:
    return {name: sum(map(loads.of, view.held.get(name, ()))) for name in NAMES}


def move(world: World, view: View, partition: PartitionId, source: str, target: str) -> None:
    before = view.partitions[partition]
    now = replaced(before, (target if name == source else name for name in before.replicas))
    now = joined(now, node(target).member)
    leader = next(name for name in now.replicas)
    members = tuple(each for each in now.in_sync if each.node in now.replicas)
    now = now.__class__(**{**{name: getattr(now, name) for name in now.__struct_fields__}, "leader": leader})
    now = released(now)
    now = now.__class__(**{**{name: getattr(now, name) for name in now.__struct_fields__}, "in_sync": members})
    world.partition(*partition, now)
    view.feed(world.store.range(KEYS.all))
