"""One real nsqd with producers and consumers in a simulated world, a nemesis that breaks it, and what must hold.

The nsqd is the one that users run (``flintmq.nsqd.server.main``). The clients are raw: they speak the protocol byte
by byte and write down what they saw, so that no bug of the FlintMQ client can hide one of nsqd.

``run(seed)`` plays one world and returns what was wrong with it; ``python -m tests.sim.nsqd_world [count]`` measures
how many seeds a minute it plays.

Source: tests/sim/README.md.
"""

from __future__ import annotations

import asyncio
import random
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.sim.checkers import in_flight, total_queue
from tests.sim.loop import Node, Simulation, SimulationError

from flintmq.nsqd.options import NsqdOptions
from flintmq.nsqd.server import main
from flintmq.wire import commands
from flintmq.wire.frames import ERROR, HEARTBEAT, MESSAGE, RESPONSE

TOPIC, CHANNEL = "orders", "billing"
PORT = 4150
ANSWER_DEADLINE_S = 5.0
MSG_TIMEOUT_MS = 1000
DRAIN_S_MAX = 300.0


class Wire(asyncio.Protocol):
    """A raw client connection: frames in, bytes out."""

    def __init__(self, on_frame: Callable[[int, bytes], None]) -> None:
        self._on_frame = on_frame
        self._buffer = b""
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self._buffer += data
        position = 0
        while len(self._buffer) - position >= 8:
            size, kind = struct.unpack_from(">II", self._buffer, position)
            if len(self._buffer) - position < size + 4:
                break
            frame = self._buffer[position + 8 : position + 4 + size]
            position += size + 4
            if frame == HEARTBEAT and kind == RESPONSE:
                self.send(commands.NOP)
            else:
                self._on_frame(kind, frame)
        self._buffer = self._buffer[position:]

    def connection_lost(self, exc):
        if not self.lost.done():
            self.lost.set_result(None)

    def send(self, data):
        if not self.transport.is_closing():
            self.transport.write(data)


@dataclass
class History:
    """What the clients saw."""

    attempted: list[bytes] = field(default_factory=list)
    acked: dict[bytes, None] = field(default_factory=dict)
    delivered: list[bytes] = field(default_factory=list)
    finished: dict[bytes, int] = field(default_factory=dict)
    bodies_by_id: dict[bytes, bytes] = field(default_factory=dict)
    not_before: dict[bytes, float] = field(default_factory=dict)
    flow: list[tuple[int, str, object, object]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Producer:
    """Publishes until it has had enough, in every way there is; never publishes a body twice."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.name = f"p{number}"
        self.random = random.Random(f"{world.seed}/{self.name}")
        self.left = world.random.randint(10, 60)
        self.count = 0

    async def run(self):
        loop = asyncio.get_running_loop()
        while self.left > 0:
            waiting: list[list[bytes]] = []

            def on_frame(kind, frame, waiting=waiting):
                if kind == ERROR:
                    waiting.clear()  # refused or unknown, which only the history of deliveries can tell
                elif waiting:
                    self.world.history.acked.update(dict.fromkeys(waiting.pop(0)))

            try:
                async with asyncio.timeout(ANSWER_DEADLINE_S):
                    _, wire = await loop.create_connection(partial(Wire, on_frame), "nsqd", PORT)
            except (OSError, TimeoutError):
                await asyncio.sleep(0.1)
                continue
            wire.send(commands.MAGIC_V2)
            stuck_since = loop.time()
            while self.left > 0 and not wire.lost.done():
                if len(waiting) < self.random.choice((1, 1, 5)):
                    waiting.append(self._publish(wire))
                    stuck_since = loop.time()
                elif loop.time() - stuck_since > ANSWER_DEADLINE_S:
                    break
                await asyncio.sleep(self.random.expovariate(1 / 0.01))
            deadline = loop.time() + ANSWER_DEADLINE_S
            while waiting and not wire.lost.done() and loop.time() < deadline:
                await asyncio.sleep(0.01)
            wire.transport.abort()

    def _bodies(self, count):
        bodies = []
        for _ in range(count):
            self.count += 1
            bodies.append(b"%s-%d" % (self.name.encode(), self.count) + b"." * self.random.choice((0, 0, 7, 300)))
        self.left -= count
        self.world.history.attempted += bodies
        return bodies

    def _publish(self, wire):
        way = self.random.random()
        if way < 0.55:
            (body,) = bodies = self._bodies(1)
            wire.send(commands.pub(TOPIC, body))
        elif way < 0.8:
            bodies = self._bodies(self.random.randint(1, 5))
            wire.send(commands.mpub(TOPIC, bodies))
        else:
            (body,) = bodies = self._bodies(1)
            delay_ms = self.random.choice((50, 500, 3000))
            # nsqd counts the delay from when it reads the command, which is later than now
            self.world.history.not_before[body] = asyncio.get_running_loop().time() + delay_ms / 1000
            wire.send(commands.dpub(TOPIC, delay_ms, body))
        return bodies


class Consumer:
    """Finishes most of what it gets; requeues, defers, lets time out or hangs up on the rest."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.random = random.Random(f"{world.seed}/c{number}")
        self.name = f"c{number}"
        self.connection_count = 0
        self.is_polite = False

    async def run(self):
        loop = asyncio.get_running_loop()
        history = self.world.history
        while True:
            key = (self.name, self.connection_count)
            self.connection_count += 1
            state: dict[str, Any] = {"answers": 0}

            def on_frame(kind, frame, key=key, state=state):
                if kind == MESSAGE:
                    self._on_message(key, state["wire"], frame)
                elif kind == RESPONSE:
                    state["answers"] += 1
                elif not frame.startswith((b"E_FIN_FAILED", b"E_REQ_FAILED", b"E_TOUCH_FAILED", b"E_SUB_FAILED")):
                    history.problems.append(f"{key}: unexpected error {frame!r}")

            try:
                async with asyncio.timeout(ANSWER_DEADLINE_S):
                    _, wire = await loop.create_connection(partial(Wire, on_frame), "nsqd", PORT)
            except (OSError, TimeoutError):
                await asyncio.sleep(0.1)
                continue
            state["wire"] = wire
            identify = b'{"feature_negotiation":true,"msg_timeout":%d,"heartbeat_interval":2000}' % MSG_TIMEOUT_MS
            wire.send(commands.MAGIC_V2 + commands.identify(identify) + commands.sub(TOPIC, CHANNEL))
            heard = loop.time()
            while not wire.lost.done():
                await asyncio.sleep(0.05)
                if state["answers"] >= 2 and state["answers"] < 100:
                    state["answers"] = 100
                    self.world.channel_is_acked = True
                    rdy = self.random.choice((1, 3, 20))
                    history.flow.append((self.world.now_ns(), "rdy", key, rdy))
                    wire.send(commands.rdy(rdy))
                if state["answers"] < 2 and loop.time() - heard > ANSWER_DEADLINE_S:
                    break
                if not self.is_polite and self.random.random() < 0.01:
                    break
                if loop.time() - heard > 20:
                    heard = loop.time()
                    wire.send(commands.NOP)
            history.flow.append((self.world.now_ns(), "close", key, None))
            self.world._forget_due_times(seconds=0.5)  # what was sent last may never arrive
            wire.transport.abort()

    def _on_message(self, key, wire, frame):
        history = self.world.history
        loop = asyncio.get_running_loop()
        _, attempts, message_id = struct.unpack_from(">QH16s", frame)
        body = frame[26:]
        history.delivered.append(body)
        history.flow.append((self.world.now_ns(), "message", key, message_id))
        if attempts < 1:
            history.problems.append(f"{body!r} delivered with attempts {attempts}")
        if history.bodies_by_id.setdefault(message_id, body) != body:
            history.problems.append(f"id {message_id!r} names {history.bodies_by_id[message_id]!r} and {body!r}")
        # behind a cut a message may have timed out, and been sent again, before this client's REQ got there
        if not self.world.network_was_cut and loop.time() < history.not_before.get(body, 0):
            history.problems.append(f"{body!r} delivered {history.not_before[body] - loop.time():.3f} s early")
        choice = 0.0 if self.is_polite else self.random.random()
        if choice < 0.8:
            delay = 0.0 if self.is_polite else self.random.choice((0.0, 0.0, 0.02))
            loop.call_later(delay, self._finish, key, wire, message_id, body)
        elif choice < 0.87:
            wire.send(commands.req(message_id, 0))
            history.flow.append((self.world.now_ns(), "done", key, message_id))
        elif choice < 0.94:
            delay_ms = self.random.choice((30, 700))
            history.not_before[body] = loop.time() + delay_ms / 1000
            self.world.requeued_at[body] = loop.time()
            wire.send(commands.req(message_id, delay_ms))
            history.flow.append((self.world.now_ns(), "done", key, message_id))
        else:
            # not answered: it times out there, this client cannot know when
            history.flow.append((self.world.now_ns(), "done", key, message_id))

    def _finish(self, key, wire, message_id, body):
        if wire.transport.is_closing():
            return
        wire.send(commands.fin(message_id))
        self.world.history.flow.append((self.world.now_ns(), "done", key, message_id))
        self.world.history.finished[body] = self.world.now_ns()


class World:
    """One seed's nsqd and everything around it."""

    def __init__(self, sim: Simulation, durability: str | None = None) -> None:
        self.sim = sim
        self.seed = sim.seed
        self.random = sim.random
        self.history = History()
        self.nsqd: Any = None
        self.stop: Any = None
        self.channel_is_acked = False
        self.network_was_cut = False
        self.disk_has_failed = False
        self.requeued_at: dict[bytes, float] = {}
        self.durability = durability or self.random.choice(("fsync", "fsync", "os", "interval"))
        self.node: Node = sim.node("nsqd")

    def now_ns(self):
        return round(self.sim.loop.time() * 1e9)

    def start(self):
        self.nsqd = None  # until the new one is ready: what the last one knew says nothing
        self.node.start(self._main)

    async def _main(self):
        options = NsqdOptions(
            tcp_address=f"0.0.0.0:{PORT}",
            http_address="",
            durability=self.durability,
            max_bytes_per_file=self.random.choice((2_000, 20_000, 1_000_000)),
            max_msg_size=1000,
        )
        self.stop = asyncio.Event()

        def ready(nsqd):
            self.nsqd = nsqd

        await main(self.node.env, self.node.files, options, ready=ready, stop=self.stop)

    # -- faults

    async def nemesis(self):
        for _ in range(self.random.randint(1, 4)):
            await asyncio.sleep(self.random.uniform(0.02, 1.0))
            fault = self.random.choice(
                ("kill", "kill", "power", "operation", "cut", "one way", "freeze", "clock", "full", "eio", "clean")
            )
            self.sim.loop.trace("nemesis", fault)
            self._check()
            await getattr(self, "_" + fault.replace(" ", "_"))()

    def _check(self):
        """What a channel says of itself holds."""
        if self.node.is_running and self.nsqd is not None:
            for topic in self.nsqd.node.engine.broker.topics.values():
                for name in topic.channel_names:
                    for channel in topic.channels(name):
                        channel.check()

    async def _kill(self):
        self.node.kill()
        await asyncio.sleep(self.random.uniform(0.01, 0.5))
        self._forget_due_times()
        self.start()

    async def _power(self):
        if self.durability != "fsync":
            await self._kill()  # the others do not promise to survive it
            return
        self.node.kill(power_loss=True)
        await asyncio.sleep(self.random.uniform(0.01, 0.5))
        self._forget_due_times()
        self.start()

    async def _operation(self):
        """Die inside a disk operation, once more while recovering from that."""
        power = self.durability == "fsync" and self.random.random() < 0.5
        for _ in range(2):
            disk = self.node.disk
            self.node.crash_at_operation(disk.operation_count + self.random.randint(1, 30), power)
            await asyncio.sleep(self.random.uniform(0.1, 1.0))
            if self.node.is_running:
                self.node.kill()  # it did not get that far
            self._forget_due_times()
            self.start()

    async def _clean(self):
        if self.stop is None or not self.node.is_running:
            return
        self.stop.set()
        await self.node.exited()
        self._forget_due_times(seconds=0.5)
        self.start()

    async def _cut(self):
        self.network_was_cut = True
        name = self.random.choice(("p0", "p1", "c0", "c1"))
        self.sim.network.partition(name, "nsqd")
        await asyncio.sleep(self.random.uniform(0.1, 6))
        self.sim.network.heal()

    async def _one_way(self):
        self.network_was_cut = True
        ends = [self.random.choice(("p0", "c0")), "nsqd"]
        self.random.shuffle(ends)
        self.sim.network.cut(*ends)
        await asyncio.sleep(self.random.uniform(0.1, 6))
        self.sim.network.heal()

    async def _freeze(self):
        self.node.freeze_disk(self.random.uniform(0.05, 3))

    async def _clock(self):
        for body in self.history.attempted:
            if body not in self.history.delivered:
                # a DPUB that no channel has reached yet is due by the wall clock of its time
                self.history.not_before.pop(body, None)
        self.node.jump_wall_clock(self.random.choice((-60, -1, 1, 60)))
        await asyncio.sleep(4)  # until the due times on disk are rewritten, however slow the disk

    async def _full(self):
        self.node.disk.set_free_bytes(self.random.choice((0, 1000)))
        await asyncio.sleep(self.random.uniform(0.1, 1))
        self.node.disk.heal()
        self.node.disk.set_free_bytes(1 << 40)

    async def _eio(self):
        self.disk_has_failed = True
        self.node.disk.fail(self.random.choice(("write", "sync")), nth=self.random.randint(1, 5))
        await asyncio.sleep(self.random.uniform(0.1, 1))
        self.node.disk.heal()
        # the partition stays read-only until nsqd is restarted
        await self._kill()

    def _forget_due_times(self, seconds=4.0):
        """A REQ of the last moments may not have been recorded, or not have come: the message comes at once."""
        since = self.sim.loop.time() - seconds
        for body, at in self.requeued_at.items():
            if at >= since:
                self.history.not_before.pop(body, None)

    # -- the play

    async def play(self):
        sim = self.sim
        self.start()
        consumers = [Consumer(self, number) for number in range(2)]
        producers = [Producer(self, number) for number in range(2)]
        for number, consumer in enumerate(consumers):
            sim.node(f"c{number}").start(consumer.run)
        await asyncio.sleep(self.random.choice((0.0, 0.3)))
        for number, producer in enumerate(producers):
            sim.node(f"p{number}").start(producer.run)
        await self.nemesis()
        sim.network.heal()
        for number in range(2):
            await sim.node(f"p{number}").exited()
        for consumer in consumers:
            consumer.is_polite = True
        if not await self._drained():
            self.history.problems.append(f"not drained after {DRAIN_S_MAX} s:\n{self.nsqd and self.nsqd.describe()}")
        await self._restart_repeats_nothing()

    async def _drained(self):
        deadline = self.sim.loop.time() + DRAIN_S_MAX
        while self.sim.loop.time() < deadline:
            await asyncio.sleep(1.0)
            is_ready = self.node.is_running and self.nsqd is not None
            topic = self.nsqd.node.engine.broker.topics.get(TOPIC) if is_ready else None
            self._check()
            if topic is None:
                if not self.history.attempted or not self.history.acked:
                    return True
                continue
            if CHANNEL in topic.channel_names:
                (channel,) = topic.channels(CHANNEL)
                if channel.depth + channel.in_flight_count + channel.deferred_count == 0:
                    return True
        return False

    async def _restart_repeats_nothing(self):
        for number in range(2):
            self.sim.node(f"c{number}").kill()
        await asyncio.sleep(1.0)
        if not self.node.is_running:
            return
        self.stop.set()
        await self.node.exited()
        before = len(self.history.delivered)
        self.start()
        late = Consumer(self, 9)
        late.is_polite = True
        self.sim.node("c9").start(late.run)
        await asyncio.sleep(5.0)
        if len(self.history.delivered) > before:
            self.history.problems.append(f"after a clean restart again: {self.history.delivered[before:][:5]}")

    def problems(self) -> list[str]:
        """Everything that is wrong with the history."""
        history = self.history
        found = list(history.problems)
        queue = total_queue(history.attempted, history.acked, (), history.delivered)
        if not queue.is_ok:
            found.append(str(queue))
        if not self.network_was_cut:  # a message that arrives after its timeout makes room for another one
            found += [str(violation) for violation in in_flight(history.flow, tolerance_ns=30_000_000_000)]
        if not self.disk_has_failed and self.nsqd is not None:
            found += [f"told of damage: {damage}" for _, damage in self.nsqd.node.damage.reports]
        return found


def run(seed: int, durability: str | None = None) -> list[str]:
    """Play one seed; return what was wrong."""
    with Simulation(seed) as sim:
        world = World(sim, durability)
        sim.run(world.play())
        problems = world.problems()
        if problems:
            error = AssertionError("\n".join(problems))
            error.add_note(sim.describe())
            raise error
        return problems


def trace_hash(seed: int) -> str:
    """Equal for equal runs of one seed."""
    with Simulation(seed) as sim:
        world = World(sim)
        sim.run(world.play())
        return sim.trace_hash


def measure(count: int) -> None:
    """Print how many seeds a minute are played."""
    started = time.perf_counter()
    failed = []
    for seed in range(count):
        try:
            run(seed)
        except (AssertionError, SimulationError) as problem:
            failed.append((seed, problem))
    elapsed = time.perf_counter() - started
    print(f"{count} seeds in {elapsed:.1f} s: {count / elapsed * 60:.0f} seeds/min, {len(failed)} failed")
    for seed, error in failed[:10]:
        print(f"seed {seed}: {type(error).__name__}: {str(error)[:400]}")


if __name__ == "__main__":
    measure(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
