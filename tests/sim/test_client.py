"""Our client and two real nsqds in simulated worlds: kills, power losses, cuts, stopped processes.

What must hold for every seed: a publish ends within its deadline; what was acknowledged is delivered; the application
never holds more than ``max_in_flight`` messages whose time is not over; leaving is bounded in time; a seed decides
everything. (Where the network holds messages back, their time may be over before they come: not checked there.)
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, ClassVar

import pytest
from tests.sim.loop import Simulation, share
from tests.sim.threads import Threads
from tests.unit.client.blocking_client import ASYNCIO, SYNC, new_producer, seeds_of_both, threads_of

from flintmq import Consumer, Message, Producer, PublishError
from flintmq.nsqd.options import NsqdOptions
from flintmq.nsqd.server import main

NAMES = ("a", "b")
PORT = 4150
DEADLINE_S = 3.0
SEEDS = 40


@pytest.fixture(autouse=True)
def quiet():
    """What is logged about planted faults is not what is looked for."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class World:
    """Two nsqds, one producer, one consumer."""

    producer_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, sim: Simulation, threads: Threads | None) -> None:
        self.sim = sim
        self.threads = threads
        self.random = sim.random
        self.max_in_flight = self.random.choice((1, 2, 10, 200))
        self.acknowledged: set[bytes] = set()
        self.seen: set[bytes] = set()
        self.in_hand: list[Message] = []
        self.is_late = False
        self.problems: list[str] = []

    def start(self, name: str) -> None:
        node = self.sim.node(name)
        options = NsqdOptions(tcp_address=f"0.0.0.0:{PORT}", http_address="")
        node.start(lambda: main(node.env, node.files, options, stop=asyncio.Event()))

    async def publish(self, producer: Producer, worker: int) -> None:
        for number in range(self.random.randint(5, 40)):
            body = b"%d-%d" % (worker, number)
            began = self.sim.now_s
            try:
                if self.random.random() < 0.2:
                    await producer.mpub("t", [body + b"-a", body + b"-b"])
                    self.acknowledged |= {body + b"-a", body + b"-b"}
                else:
                    await producer.pub("t", body)
                    self.acknowledged.add(body)
            except PublishError:
                pass  # told, so not acknowledged
            if self.sim.now_s - began > DEADLINE_S + 0.01:
                self.problems.append(f"publish {body!r} took {self.sim.now_s - began:.3f} s")
            await asyncio.sleep(self.random.uniform(0.0, 0.2))

    async def handle(self, message: Message) -> None:
        self.in_hand.append(message)
        valid = sum(each.time_left > 0.1 for each in self.in_hand)
        if valid > self.max_in_flight and not self.is_late:
            self.problems.append(f"{valid} messages in hand, max_in_flight is {self.max_in_flight}")
        try:
            chance = self.random.random()
            await asyncio.sleep(0.0 if chance < 0.5 else self.random.uniform(0.0, 0.3))
            if chance > 0.95:
                await asyncio.sleep(3.0)  # longer than the message timeout
            if chance > 0.9:
                raise ValueError("cannot be handled now")
            self.seen.add(message.body)
        finally:
            self.in_hand.remove(message)

    async def nemesis(self) -> None:
        for _ in range(self.random.randint(2, 6)):
            await asyncio.sleep(self.random.uniform(0.1, 1.5))
            name = self.random.choice(NAMES)
            node = self.sim.node(name)
            fault = self.random.choice(("kill", "kill", "power", "cut", "one way", "pause"))
            self.sim.loop.trace("nemesis", fault, name)
            if fault in ("kill", "power"):
                node.kill(power_loss=fault == "power")
                await asyncio.sleep(self.random.uniform(0.0, 3.0))
                self.start(name)
                continue
            self.is_late = True
            if fault == "pause":
                node.pause()
                await asyncio.sleep(self.random.uniform(0.1, 5.0))
                node.resume()
            else:
                ends = ["driver", name]
                self.random.shuffle(ends)
                if fault == "cut":
                    self.sim.network.partition(*ends)
                else:
                    self.sim.network.cut(*ends)
                await asyncio.sleep(self.random.uniform(0.1, 6.0))
                self.sim.network.heal()

    async def play(self) -> None:
        for name in NAMES:
            self.start(name)
        await asyncio.sleep(0.2)
        addresses = [f"{name}:{PORT}" for name in NAMES]
        options: dict[str, Any] = {
            "max_in_flight": self.max_in_flight,
            "handler": self.handle,
            "concurrency": 250,
            "requeue_delay": 0.2,
            "max_attempts": 0,
            "max_backoff": self.random.choice((0, 2)),
            "heartbeat_interval": 1,
            "msg_timeout": 2,
            "low_rdy_idle_timeout": 1,
            "env": self.sim.driver.env,
        }
        env = self.sim.driver.env
        async with (
            new_producer(
                self.threads, addresses, env=env, timeout=DEADLINE_S, heartbeat_interval=1, **self.producer_options
            ) as producer,
            Consumer("t", "c", nsqd_tcp_addresses=addresses, **options) as consumer,
        ):
            await asyncio.gather(self.nemesis(), *(self.publish(producer, worker) for worker in range(5)))
            deadline = self.sim.now_s + 300
            while not self.acknowledged <= self.seen and self.sim.now_s < deadline:
                await asyncio.sleep(0.5)
            left = self.sim.now_s
        if lost := self.acknowledged - self.seen:
            self.problems.append(
                f"{len(lost)} of {len(self.acknowledged)} lost: {sorted(lost)[:3]}\n{consumer.describe()}"
            )
        if self.sim.now_s - left > 10:
            self.problems.append(f"leaving took {self.sim.now_s - left:.1f} s")
        if producer.stats().bytes_in_flight:
            self.problems.append(f"{producer.stats()} after the end")


def play(seed: int, client: str) -> str:
    """Play one seed with the producer of one client; return its trace hash."""
    with Simulation(seed) as sim, threads_of(sim, client) as threads:
        world = World(sim, threads)
        sim.run(world.play())
        assert world.problems == []
        assert world.acknowledged
        return sim.trace_hash


@pytest.mark.parametrize(("client", "seed"), seeds_of_both(share(SEEDS)))
def test_nothing_acknowledged_is_lost_and_every_call_ends(client, seed):
    play(seed, client)


@pytest.mark.parametrize("client", [ASYNCIO, SYNC])
def test_a_seed_decides_everything(client):
    assert play(7, client) == play(7, client)
