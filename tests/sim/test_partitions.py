"""A topic with partitions is consumed in order while nsqd dies; and planted bugs that these worlds must find."""

import logging

import pytest
from tests.sim import partitions_world
from tests.sim.checkers import strict_order
from tests.sim.loop import SimulationError, seeds, share

from flintmq.broker.channel import Channel
from flintmq.broker.window import Window
from flintmq.storage import FloorFile

CHUNKS = 4
SEEDS_PER_CHUNK = 40
MUTANT_SEEDS = 400


@pytest.fixture(autouse=True)
def quiet():
    """What nsqd logs about planted faults is not what is looked for."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("chunk", range(share(CHUNKS)))
def test_nothing_is_lost_and_order_is_kept(chunk):
    worlds = [partitions_world.run(seed) for seed in seeds(SEEDS_PER_CHUNK, first=chunk * SEEDS_PER_CHUNK)]
    if len(worlds) > 1:
        assert sum(len(world.history.acked) for world in worlds) > 25 * len(worlds), "hardly anything was published"
        assert {world.kind for world in worlds} == set(partitions_world.KINDS)


def test_a_seed_decides_everything():
    for seed in seeds(3, first=50):
        assert partitions_world.trace_hash(seed) == partitions_world.trace_hash(seed)


def forget_floors_with_the_process(monkeypatch):
    monkeypatch.setattr(FloorFile, "put", lambda self, cursor, floor: None)


def set_aside_what_is_in_the_way(monkeypatch):
    """A delay lets the others pass, as on a plain channel."""
    honest = Window._sleep

    def sleep(self, sequence, due_ns, wall_ns):
        is_ordered, self.is_ordered = self.is_ordered, False
        try:
            monkeypatch.setattr("flintmq.broker.window.WINDOW_DEFERRED_MAX", 0)
            honest(self, sequence, due_ns, wall_ns)
        finally:
            self.is_ordered = is_ordered

    monkeypatch.setattr(Window, "_sleep", sleep)


def take_every_message_for_the_first_partition_s(monkeypatch):
    monkeypatch.setattr("flintmq.broker.shared_subscription.partition_of", lambda internal: 0)


def hand_out_two_at_a_time(monkeypatch):
    """As if order began anew with every publish."""
    honest = Channel._deliver_new

    def deliver_new(self, now_ns, wall_ns, end):
        keep_floor, self.keep_floor = self.keep_floor, None
        try:
            honest(self, now_ns, wall_ns, end)
        finally:
            self.keep_floor = keep_floor

    monkeypatch.setattr(Channel, "_deliver_new", deliver_new)


MUTANTS = [
    forget_floors_with_the_process,
    set_aside_what_is_in_the_way,
    take_every_message_for_the_first_partition_s,
    hand_out_two_at_a_time,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_planted_bugs_are_found(mutant, monkeypatch):
    mutant(monkeypatch)
    for seed in range(MUTANT_SEEDS):
        try:
            partitions_world.run(seed)
        except (AssertionError, SimulationError):
            return
    pytest.fail(f"{mutant.__name__} was not found in {MUTANT_SEEDS} seeds")


# ---------------------------------------------------------------------------------------------------- strict_order


def deliver(time_ns, sequence, connection="a"):
    return time_ns, "deliver", connection, sequence


def finish(time_ns, sequence, connection="a"):
    return time_ns, "finish", connection, sequence


POWER = [(60, "power", None, 0), (61, "start", None, 0)]


@pytest.mark.parametrize(
    "events",
    [
        [deliver(1, 1), finish(2, 1), deliver(3, 2), finish(4, 2), deliver(5, 9)],
        [deliver(1, 1), deliver(2, 1, "b"), finish(3, 1, "b"), deliver(4, 2)],
        [deliver(1, 1), finish(2, 1), deliver(3, 1, "b"), finish(4, 1, "b"), deliver(5, 2)],
        [deliver(1, 1), finish(50, 1), deliver(51, 2), *POWER, deliver(70, 1), finish(71, 1), deliver(72, 2)],
        [deliver(1, 1), finish(50, 1), deliver(51, 2), *POWER, deliver(70, 2)],
        [deliver(1, 1), POWER[0], finish(61, 1), deliver(62, 2), (65, "start", None, 0), deliver(70, 1)],
    ],
    ids=[
        "in order",
        "again to another",
        "FIN too late",
        "repeated after a power loss",
        "nothing repeated",
        "power goes later",
    ],
)
def test_what_is_in_order(events):
    assert strict_order(events, 20) == []


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([deliver(1, 1), deliver(2, 2)], "before the one in front"),
        ([deliver(1, 1), deliver(2, 1, "b"), finish(3, 1, "a"), deliver(4, 2)], "before the one in front"),
        ([deliver(1, 1), finish(2, 1), deliver(3, 1, "b"), deliver(4, 2)], "before the one in front"),
        ([deliver(1, 1), finish(2, 1), deliver(3, 2), deliver(4, 1)], "behind its successor"),
        ([deliver(1, 1), finish(2, 1), deliver(3, 2), *POWER, deliver(62, 1)], "long after"),
        ([deliver(1, 1), finish(50, 1), deliver(51, 2), *POWER, deliver(70, 1), deliver(71, 2)], "in front"),
        ([deliver(1, 1), finish(50, 1), deliver(51, 2), *POWER, deliver(70, 2), deliver(71, 1)], "behind"),
        ([deliver(1, 1), finish(50, 1), deliver(51, 2), POWER[0], deliver(70, 1)], "behind"),
    ],
)
def test_what_is_not_in_order(events, problem):
    (violation,) = strict_order(events, 20)
    assert problem in violation.problem


def test_behind_a_cut_deliveries_are_seen_late():
    events = [deliver(1, 1), deliver(2, 1, "b"), finish(3, 1, "b"), deliver(4, 2, "b"), deliver(5, 1, "c")]
    assert strict_order(events, 20, may_be_late=True) == []
    assert strict_order(events, 20) != []
