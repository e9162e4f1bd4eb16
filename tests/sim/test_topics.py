"""Topics are made by the dozen while nsqd dies: every acknowledged message is in its topic afterwards."""

import asyncio
import logging
import random
from functools import partial

import pytest
from tests.sim.checkers import total_queue
from tests.sim.loop import Simulation, SimulationError, beginning_with, seeds, share
from tests.sim.nsqd_world import ANSWER_DEADLINE_S, PORT, Wire, World

from flintmq.storage.creation import Creation
from flintmq.wire import commands
from flintmq.wire.frames import ERROR, MESSAGE

CHUNKS = 5
SEEDS_PER_CHUNK = 30
MUTANT_SEEDS = 400
TOPIC_COUNT = 60
CHANNEL = "late"


@pytest.fixture(autouse=True)
def quiet():
    """What nsqd logs about planted faults is not what is looked for."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Storm:
    """Publishes bursts of single messages to many topics, each body once and with the name of its topic."""

    def __init__(self, world, number):
        self.world = world
        self.name = f"p{number}"
        self.random = random.Random(f"{world.seed}/{self.name}")
        self.left = 60

    async def run(self):
        history, loop = self.world.history, asyncio.get_running_loop()
        while self.left > 0:
            waiting: list[bytes] = []

            def on_frame(kind, frame, waiting=waiting):
                if kind == ERROR:
                    waiting.clear()
                elif waiting:
                    history.acked[waiting.pop(0)] = None

            try:
                async with asyncio.timeout(ANSWER_DEADLINE_S):
                    _, wire = await loop.create_connection(partial(Wire, on_frame), "nsqd", PORT)
            except (OSError, TimeoutError):
                await asyncio.sleep(0.1)
                continue
            wire.send(commands.MAGIC_V2)
            while self.left > 0 and not wire.lost.done():
                for _ in range(self.random.choice((1, 5, 20))):
                    topic = f"t{self.random.randrange(TOPIC_COUNT)}"
                    body = f"{topic} {self.name}-{self.left}".encode()
                    self.left -= 1
                    history.attempted.append(body)
                    waiting.append(body)
                    wire.send(commands.pub(topic, body))
                await asyncio.sleep(self.random.choice((0.0, 0.005, 0.05)))
            deadline = loop.time() + ANSWER_DEADLINE_S
            while waiting and not wire.lost.done() and loop.time() < deadline:
                await asyncio.sleep(0.01)
            wire.transport.abort()


class Storms(World):
    """Two storms, a nemesis, and then somebody who reads every topic from its beginning."""

    async def play(self):
        self.start()
        for number in range(2):
            self.sim.node(f"p{number}").start(Storm(self, number).run)
        for _ in range(self.random.randint(1, 4)):
            await asyncio.sleep(self.random.uniform(0.005, 0.1))
            fault = self.random.choice(("_kill", "_power", "_power", "_operation", "_operation", "_full", "_eio"))
            await getattr(self, fault)()
        for number in range(2):
            await self.sim.node(f"p{number}").exited()
        if not self.node.is_running:
            self.start()
        reader = self.sim.node("c0")
        reader.start(self._read_all)
        await reader.exited()

    async def _read_all(self):
        loop = asyncio.get_running_loop()
        await asyncio.sleep(1.0)
        for topic in dict.fromkeys(body.partition(b" ")[0] for body in self.history.acked):
            wanted = {body for body in self.history.acked if body.partition(b" ")[0] == topic}

            def on_frame(kind, frame, topic=topic, wanted=wanted):
                if kind != MESSAGE:
                    return
                body = frame[26:]
                self.history.delivered.append(body)
                wanted.discard(body)
                if body.partition(b" ")[0] != topic:
                    self.history.problems.append(f"{body!r} was delivered by {topic!r}")

            _, wire = await loop.create_connection(partial(Wire, on_frame), "nsqd", PORT)
            name = topic.decode()
            wire.send(commands.MAGIC_V2 + commands.sub(name, CHANNEL) + commands.rdy(100))
            deadline = loop.time() + 10
            while wanted and loop.time() < deadline:
                await asyncio.sleep(0.01)
            wire.transport.abort()


def play(seed, durability=None):
    with Simulation(seed) as sim:
        world = Storms(sim, durability)
        sim.run(world.play())
        history = world.history
        queue = total_queue(history.attempted, history.acked, (), history.delivered)
        return len(history.acked), [*history.problems, *([] if queue.is_ok else [str(queue)])]


@pytest.mark.parametrize("chunk", range(share(CHUNKS)))
def test_nothing_acknowledged_is_lost(chunk):
    acked_count = 0
    for seed in seeds(SEEDS_PER_CHUNK, first=9000 + chunk * SEEDS_PER_CHUNK):
        count, problems = play(seed)
        assert problems == [], seed
        acked_count += count
    assert acked_count > 50 * SEEDS_PER_CHUNK, "the storms were hardly heard"


def do_not_sync_new_topics(monkeypatch):
    monkeypatch.setattr(Creation, "sync_files", lambda self: None)
    monkeypatch.setattr(Creation, "directories", [])


def do_not_sync_names_again_after_a_crash(monkeypatch):
    monkeypatch.setattr("flintmq.storage.recovery.parents_of", lambda path: [])


def believe_that_all_was_synced_before_a_crash(monkeypatch):
    monkeypatch.setattr("flintmq.storage.recovery.Recovery.begin_sync", lambda self: self.sync_ended(None))


def do_not_sync_directories_that_logs_share(monkeypatch):
    def sync_files_alone(files, parts):
        return files.run_all([part.sync_files for part in parts])

    for module in ("creation", "partition_log", "recovery"):
        monkeypatch.setattr(f"flintmq.storage.{module}.sync_together", sync_files_alone)


FOUND_BY = {
    do_not_sync_new_topics: 91,
    do_not_sync_names_again_after_a_crash: 177,
    believe_that_all_was_synced_before_a_crash: 177,
    do_not_sync_directories_that_logs_share: 91,
}


@pytest.mark.parametrize("mutant", FOUND_BY, ids=lambda mutant: mutant.__name__)
def test_planted_bugs_are_found(mutant, monkeypatch):
    mutant(monkeypatch)
    for seed in beginning_with(FOUND_BY[mutant], range(90, 90 + MUTANT_SEEDS)):
        try:
            if play(seed, "fsync")[1]:
                return
        except (AssertionError, SimulationError):
            return
    pytest.fail(f"{mutant.__name__} was not found in {MUTANT_SEEDS} seeds")
