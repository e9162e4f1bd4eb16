"""A SUB of a new channel is answered before the channel is on disk: kill, power loss, a frozen and a full disk."""

from __future__ import annotations

import asyncio
import logging
import random
from functools import partial

import pytest
from tests.sim.loop import Simulation, SimulationError, beginning_with, seeds, share
from tests.sim.nsqd_world import ANSWER_DEADLINE_S, PORT, Wire, World

from flintmq.broker.partition import Partition
from flintmq.wire import commands
from flintmq.wire.frames import ERROR, MESSAGE

CHUNKS = 5
SEEDS_PER_CHUNK = 30
MUTANT_SEEDS = 100
TOPIC = "orders"
FROZEN_S = 3.0
ANSWERED_S = 0.5  # of virtual time, which nothing but the disk and the network takes


@pytest.fixture(autouse=True)
def quiet():
    """What nsqd logs about planted faults is not what is looked for."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Client:
    """One connection that notes what it was sent, and when."""

    def __init__(self, world):
        self.world = world
        self.answers: list[tuple[float, int, bytes]] = []
        self.bodies: list[bytes] = []

    async def connect(self):
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            _, self.wire = await loop.create_connection(partial(Wire, self._on_frame), "nsqd", PORT)
        self.wire.send(commands.MAGIC_V2)
        return self

    def _on_frame(self, kind, frame):
        if kind == MESSAGE:
            self.bodies.append(frame[26:])
            self.wire.send(commands.fin(frame[10:26]))
        else:
            self.answers.append((self.world.sim.loop.time(), kind, frame))

    async def ask(self, data, wait_s=30.0):
        """Send a command; its answer, or None when the connection was lost before."""
        count = len(self.answers)
        self.wire.send(data)
        deadline = self.world.sim.loop.time() + wait_s
        while len(self.answers) == count and not self.wire.lost.done() and self.world.sim.loop.time() < deadline:
            await asyncio.sleep(0.001)
        return self.answers[count] if len(self.answers) > count else None


class Frozen(World):
    """What is answered while the disk answers nothing, and what is there when nsqd died then or went on.

    Args:
        end: how it goes on: ``thaw``, ``kill``, ``stop`` or ``full``.
        is_first: the topic has no other channel, so that what it has waits for this one.
    """

    def __init__(self, sim, end, durability, is_first):
        super().__init__(sim, durability)
        self.end = end
        self.is_first = is_first
        self.problems_seen: list[str] = []
        self.is_through = False

    def _note(self, condition, what):
        if not condition:
            self.problems_seen.append(what)

    async def play(self):
        self.start()
        node = self.sim.node("clients")
        node.start(self._clients)
        await node.exited()
        assert self.is_through

    async def _clients(self):
        await self._play()
        self.is_through = True

    async def _play(self):
        loop = self.sim.loop
        await asyncio.sleep(1.0)
        publisher, consumer, again = [await Client(self).connect() for _ in range(3)]
        assert await publisher.ask(commands.pub(TOPIC, b"first")) is not None
        if not self.is_first:
            assert await again.ask(commands.sub(TOPIC, "old")) is not None
        old, owed = ([], [b"first"]) if self.is_first else (["old"], [])
        await asyncio.sleep(1.0)
        if self.end == "full":
            self.node.disk.set_free_bytes(0)
        self.node.freeze_disk(FROZEN_S)
        begun = loop.time()
        answer = await consumer.ask(commands.sub(TOPIC, "new"))
        self._note(answer is not None and answer[2] == b"OK", f"SUB was answered {answer}")
        self._note(loop.time() - begun < ANSWERED_S, f"SUB took {loop.time() - begun:.3f} s")
        publishing = asyncio.ensure_future(publisher.ask(commands.pub(TOPIC, b"second")))
        await asyncio.sleep(FROZEN_S / 2)
        self._note(not publishing.done(), "PUB was answered before the channel was stored")
        if self.end == "kill":
            self.node.kill()
            self._note(await publishing is None, "PUB was answered")
            self.start()
            await asyncio.sleep(2.0)
            names = sorted(self.nsqd.node.engine.broker.topics[TOPIC].channel_names)
            self._note(names in (old, ["new", *old]), f"channels {names}")  # it may just have been stored
            consumer = await Client(self).connect()
            await consumer.ask(commands.sub(TOPIC, "new"))
            consumer.wire.send(commands.rdy(10))
            await asyncio.sleep(2.0)
            self._note(consumer.bodies[: len(owed)] == owed, f"{consumer.bodies} delivered")
            return
        if self.end == "stop":
            self.stop.set()
        answered = await publishing
        if self.end == "full":
            async with asyncio.timeout(ANSWER_DEADLINE_S):
                await consumer.wire.lost
            told = consumer.answers[-1]
            self._note(told[1] == ERROR and told[2].startswith(b"E_SUB_FAILED SUB failed "), f"told {told}")
            self._note(answered is not None, "PUB was never answered")
            self.node.disk.set_free_bytes(1 << 40)
            await asyncio.sleep(3.0)
            more = await Client(self).connect()
            answer = await more.ask(commands.sub(TOPIC, "new"))
            self._note(answer is not None and answer[2] == b"OK", f"the next SUB was answered {answer}")
            return
        self._note(answered is not None and answered[2] == b"OK", f"PUB was answered {answered}")
        if self.end == "stop":
            await self.node.exited()
            self.start()
            await asyncio.sleep(2.0)
            consumer = await Client(self).connect()
            await consumer.ask(commands.sub(TOPIC, "new"))
        consumer.wire.send(commands.rdy(10))
        await asyncio.sleep(2.0)
        self._note(consumer.bodies == [*owed, b"second"], f"{consumer.bodies} delivered")


@pytest.mark.parametrize("is_first", [False, True], ids=["new", "first"])
@pytest.mark.parametrize("durability", ["fsync", "os"])
@pytest.mark.parametrize("end", ["thaw", "kill", "stop", "full"])
def test_answered_while_the_disk_is_frozen(end, durability, is_first):
    for seed in seeds(3, first=700):
        with Simulation(seed) as sim:
            world = Frozen(sim, end, durability, is_first)
            sim.run(world.play())
            assert world.problems_seen == [], seed


class Subscribers(World):
    """Channels come one after the other while messages are published and nsqd dies.

    Whatever was sent behind the answer to a SUB, and was acknowledged, is in that channel after all. That ends with the
    process: the next one may not know the channel, and who consumes it has to subscribe again.
    """

    def __init__(self, sim, durability=None):
        super().__init__(sim, durability)
        self.owed: dict[str, tuple[int, list[bytes]]] = {}
        self.life = 0
        self.acked: dict[bytes, None] = {}
        self.is_over = False

    def start(self):
        self.life += 1
        super().start()

    async def play(self):
        self.start()
        nodes = [self.sim.node(name) for name in ("p0", "c0", "c1")]
        nodes[0].start(self._publish)
        for node in nodes[1:]:
            node.start(partial(self._subscribe, node.name))
        for _ in range(self.random.randint(1, 3)):
            await asyncio.sleep(self.random.uniform(0.01, 0.4))
            await getattr(self, self.random.choice(("_kill", "_power", "_operation", "_freeze", "_clean")))()
        self.is_over = True
        for node in nodes:
            await node.exited()
        if not self.node.is_running:
            self.start()
        reader = self.sim.node("reader")
        reader.start(self._read)
        await reader.exited()

    async def _publish(self):
        chance = random.Random(f"{self.seed}/p")
        count = 0
        while not self.is_over:
            try:
                client = await Client(self).connect()
            except (OSError, TimeoutError):
                await asyncio.sleep(0.05)
                continue
            while not client.wire.lost.done():
                if self.is_over:
                    break
                count += 1
                body = b"m%d" % count
                for life, bodies in self.owed.values():
                    if life == self.life:
                        bodies.append(body)
                answer = await client.ask(commands.pub(TOPIC, body))
                if answer is not None and answer[1] != ERROR:
                    self.acked[body] = None
                await asyncio.sleep(chance.choice((0.0, 0.001, 0.01, 0.1)))
            client.wire.transport.abort()

    async def _subscribe(self, who):
        chance = random.Random(f"{self.seed}/{who}")
        count = 0
        while not self.is_over:
            try:
                client = await Client(self).connect()
            except (OSError, TimeoutError):
                await asyncio.sleep(0.05)
                continue
            count += 1
            name, life = f"{who}-{count}", self.life
            answer = await client.ask(commands.sub(TOPIC, name))
            if answer is not None and answer[1] != ERROR:
                self.owed[name] = (life, [])
            await asyncio.sleep(chance.choice((0.0, 0.01, 0.2)))
            if any(kind == ERROR for _, kind, _ in client.answers):
                self.owed.pop(name, None)  # it was told
            client.wire.transport.abort()

    async def _read(self):
        await asyncio.sleep(3.0)
        for name, (_, bodies) in self.owed.items():
            client = await Client(self).connect()
            await client.ask(commands.sub(TOPIC, name) + commands.rdy(2500))
            wanted = [body for body in bodies if body in self.acked]
            deadline = self.sim.loop.time() + 5
            while not set(wanted) <= set(client.bodies) and self.sim.loop.time() < deadline:
                await asyncio.sleep(0.01)
            missing = [body for body in wanted if body not in client.bodies]
            if missing:
                self.history.problems.append(f"{missing} of {len(wanted)} are not in channel {name}")
            client.wire.transport.abort()


def play(seed, durability=None):
    with Simulation(seed) as sim:
        world = Subscribers(sim, durability)
        sim.run(world.play())
        return world.history.problems, len(world.owed), len(world.acked)


@pytest.mark.parametrize("chunk", range(share(CHUNKS)))
def test_what_is_acknowledged_behind_a_subscription_is_in_its_channel(chunk):
    channel_count = acked_count = 0
    for seed in seeds(SEEDS_PER_CHUNK, first=3100 + chunk * SEEDS_PER_CHUNK):
        problems, channels, acked = play(seed)
        assert problems == [], seed
        channel_count += channels
        acked_count += acked
    assert channel_count > 3 * SEEDS_PER_CHUNK and acked_count > 10 * SEEDS_PER_CHUNK, "hardly anything happened"


def hold_nothing(monkeypatch):
    monkeypatch.setattr(Partition, "hold", lambda self: None)
    monkeypatch.setattr(Partition, "release", lambda self: None)


def test_a_planted_bug_is_found(monkeypatch):
    hold_nothing(monkeypatch)
    for seed in beginning_with(88, range(MUTANT_SEEDS)):
        try:
            if play(seed)[0]:
                return
        except (AssertionError, SimulationError):
            return
    pytest.fail(f"it was not found in {MUTANT_SEEDS} seeds")
