"""A simulated nsqd whose log loses its end while nobody looks: it is told of, and only when it was promised."""

import asyncio
import logging
from typing import Any

import pytest
from tests.sim import nsqd_world
from tests.sim.loop import Simulation

from flintmq.broker.log_marks import LogMarks
from flintmq.storage import integrity, tables

SEEDS = 12
MUTANT_SEEDS = 40


@pytest.fixture(autouse=True)
def quiet():
    """What nsqd logs about planted faults is not what is looked for."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


async def play(world, harm):
    """Publish, die, be damaged, start again; return the nsqd."""
    world.start()
    producers = [nsqd_world.Producer(world, number) for number in range(2)]
    for number, producer in enumerate(producers):
        world.sim.node(f"p{number}").start(producer.run)
    for number in range(2):
        await world.sim.node(f"p{number}").exited()
    consumer = nsqd_world.Consumer(world, 0)
    world.sim.node("c0").start(consumer.run)
    await asyncio.sleep(1.0)
    world.sim.node("c0").kill()
    await asyncio.sleep(1.0)  # some flushes of progress
    world.node.kill()
    harm(world)
    world.start()
    for _ in range(100):
        await asyncio.sleep(0.1)
        if world.nsqd is not None and world.node.is_running:
            break
    return world.nsqd


def started_after(seed, harm):
    with Simulation(seed) as sim:
        world = nsqd_world.World(sim, "fsync")
        found: dict[str, Any] = {}

        async def scene():
            nsqd = await play(world, harm)
            found["reports"] = [damage for _, damage in nsqd.node.damage.reports]
            found["health"] = nsqd.node.state_of_health()
            found["ping"] = nsqd.node.health()
            found["topics"] = {
                name: list(topic.channel_names) for name, topic in nsqd.node.engine.broker.topics.items()
            }

        sim.run(scene())
        return world, found


def nothing(world):
    """No damage."""


def cut_the_log(world):
    """The newest segment ends behind its header."""
    disk = world.node.disk
    newest = max(path for path in disk.paths() if path.endswith(".log"))
    if len(disk.content(newest)) > 64:
        disk.cut(newest, 64)
        world.is_cut = True


def forget_channels(world):
    """The database is an older state of itself: from before there was any topic."""
    disk = world.node.disk
    files = disk.attach()
    database = files.open_database("channels.db")
    gone = [(f"DELETE FROM {table.name}", ((),)) for table in (tables.TOPIC, tables.CHANNEL)]
    state = tables.STATE.put((1, tables.SCHEMA_VERSION, *identity_of(database), 1, 1))
    database.run_transaction([*gone, ("DELETE FROM cursor", ((),)), state], True)
    files.close()


def identity_of(database):
    rows, _ = tables.STATE.read(database.query)
    return (rows[0][2],)


def problems(seed, harm):
    world, found = started_after(seed, harm)
    if harm is nothing:
        return found["health"] == "OK" and not found["reports"]
    if harm is cut_the_log:
        if not getattr(world, "is_cut", False):
            return True
        return found["health"].startswith("NOK - damage") and found["ping"] == "OK"
    return nsqd_world.TOPIC in found["topics"] and bool(found["reports"])


@pytest.mark.parametrize("harm", [nothing, cut_the_log, forget_channels], ids=lambda harm: harm.__name__)
def test_damage_is_told_of_and_nothing_else(harm):
    for seed in range(SEEDS):
        assert problems(seed, harm), f"seed {seed}"


def ignore_how_far_logs_were(monkeypatch):
    monkeypatch.setattr(LogMarks, "take", lambda self: [])


def ignore_the_list(monkeypatch):
    monkeypatch.setattr(integrity._Opening, "_follow_list", lambda self, contents, loaded, generation: generation)
    monkeypatch.setattr(integrity._Opening, "_look_for_older", lambda self, contents, loaded: None)


@pytest.mark.parametrize(
    ("mutant", "harm"), [(ignore_how_far_logs_were, cut_the_log), (ignore_the_list, forget_channels)]
)
def test_planted_bugs_are_found(mutant, harm, monkeypatch):
    mutant(monkeypatch)
    assert any(not problems(seed, harm) for seed in range(MUTANT_SEEDS))
