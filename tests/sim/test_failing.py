"""Connections that fail in every way there is, and others that must not notice: a simulation of one nsqd.

No fault of the machine here: whatever an innocent consumer or publisher waits for, a failing connection was the reason.
"""

from __future__ import annotations

import asyncio
import logging
import random
from functools import partial
from typing import Any

import pytest
from tests.sim.loop import Simulation, SimulationError, seeds, share
from tests.sim.nsqd_world import PORT, Wire

from flintmq.nsqd.engine import Engine
from flintmq.nsqd.options import NsqdOptions
from flintmq.nsqd.server import main
from flintmq.nsqd.session import Session
from flintmq.wire import commands
from flintmq.wire.frames import ERROR, MESSAGE, RESPONSE

TOPIC = "orders"
WAYS = ("cannot be written to", "sends nonsense and stays", "never reads", "hangs up")
INNOCENT_COUNT = 4
FAILING_COUNT = 6
PUBLISH_COUNT = 40
WAIT_S_MAX = 1.0  # of virtual time, in which nothing but a failing connection takes any
MUTANT_SEEDS = 20


@pytest.fixture(autouse=True)
def quiet():
    """What nsqd logs about connections that fail is not what is looked for."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class World:
    """One nsqd, innocent clients and failing ones, all on one topic."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.random = sim.random
        self.problems: list[str] = []
        self.nsqd: Any = None
        self.published_at: dict[bytes, float] = {}
        self.received: list[dict[bytes, float]] = [{} for _ in range(INNOCENT_COUNT)]

    async def _main(self):
        node = self.sim.node("nsqd")
        options = NsqdOptions(tcp_address=f"0.0.0.0:{PORT}", http_address="", durability="os", max_msg_size=300_000)

        def ready(nsqd):
            nsqd.node.engine.on_defect = self._defect
            self.nsqd = nsqd

        await main(node.env, node.files, options, ready=ready)

    def _defect(self, what, error):
        if "writing failed" not in what or "broken by the test" not in str(error):
            self.problems.append(f"{what}: {error!r}")

    async def _connect(self, on_frame):
        _, wire = await asyncio.get_running_loop().create_connection(partial(Wire, on_frame), "nsqd", PORT)
        wire.send(commands.MAGIC_V2)
        return wire

    async def innocent(self, number):
        loop = asyncio.get_running_loop()
        answered = asyncio.Event()

        def on_frame(kind, frame):
            if kind == MESSAGE:
                self.received[number].setdefault(frame[26:], loop.time())
                wire.send(commands.fin(frame[10:26]))
            elif kind == RESPONSE:
                answered.set()
            else:
                self.problems.append(f"innocent {number}: {frame!r}")

        wire = await self._connect(on_frame)
        wire.send(commands.sub(TOPIC, f"innocent-{number}"))
        await answered.wait()
        wire.send(commands.rdy(10))
        await wire.lost
        self.problems.append(f"innocent {number} was closed")

    async def failing(self, number):
        """Subscribe, fail, and come again when the connection is gone or after a while."""
        chance = random.Random(f"{self.sim.seed}/failing-{number}")
        # some on channels of their own, some on those of others
        while True:
            way = chance.choice(WAYS)
            channel = chance.choice((f"failing-{number}", "failing", "failing-gone#ephemeral"))
            before = set(self.nsqd.clients)
            mine: list[Any] = []

            def on_frame(kind, frame, mine=mine, number=number):
                still = [session for session in mine if session.subscription is not None]
                if kind == ERROR and frame.startswith(b"E_INVALID") and still:
                    self.problems.append(f"failing {number} is a consumer still, behind its error")

            wire = await self._connect(on_frame)
            address = wire.transport.get_extra_info("sockname")
            await asyncio.sleep(0.05)
            mine += [
                each for each in self.nsqd.clients if each not in before and each.peer == f"{address[0]}:{address[1]}"
            ]
            wire.send(commands.sub(TOPIC, channel))
            await asyncio.sleep(0.05)
            wire.send(commands.rdy(chance.choice((1, 100))))
            await asyncio.sleep(chance.uniform(0, 0.3))
            if way == "cannot be written to":
                for session in mine:
                    self._break(session._transport)
            elif way == "sends nonsense and stays":
                wire.send(b"BOGUS\n")
            elif way == "never reads":
                wire.transport.pause_reading()
            else:
                wire.transport.abort()
            self.sim.loop.trace("failing", way)
            await asyncio.wait((wire.lost,), timeout=chance.uniform(0.1, 1.0))
            wire.transport.abort()

    def _break(self, transport):
        def write(_data):
            raise RuntimeError("broken by the test")

        if transport is not None:
            transport.write = write

    async def publisher(self):
        loop = asyncio.get_running_loop()
        waiting: list[tuple[bytes, float]] = []

        def on_frame(kind, frame):
            body, at = waiting.pop(0)
            if kind == ERROR or loop.time() - at > WAIT_S_MAX:
                self.problems.append(f"publish of {body[:20]!r}: {frame!r} after {loop.time() - at:.3f} s")

        wire = await self._connect(on_frame)
        for number in range(PUBLISH_COUNT):
            body = b"%d." % number + b"." * self.random.choice((0, 0, 100, 200_000))
            self.published_at[body] = loop.time()
            waiting.append((body, loop.time()))
            wire.send(commands.pub(TOPIC, body))
            await asyncio.sleep(self.random.uniform(0.0, 0.2))
        await asyncio.sleep(WAIT_S_MAX)
        self.problems += [f"publish of {body[:20]!r} was never answered" for body, _ in waiting]

    async def play(self):
        self.sim.node("nsqd").start(self._main)
        while self.nsqd is None:
            await asyncio.sleep(0.01)
        for number in range(INNOCENT_COUNT):
            self.sim.node(f"innocent-{number}").start(partial(self.innocent, number))
        for number in range(FAILING_COUNT):
            self.sim.node(f"failing-{number}").start(partial(self.failing, number))
        await asyncio.sleep(1.0)
        self.sim.node("publisher").start(self.publisher)
        await self.sim.node("publisher").exited()
        for number, received in enumerate(self.received):
            for body, at in self.published_at.items():
                waited_s = received.get(body, float("inf")) - at
                if waited_s > WAIT_S_MAX:
                    self.problems.append(f"innocent {number} waited {waited_s:.3f} s for {body[:20]!r}")


def run(seed):
    """Play one seed; return what the innocent noticed."""
    with Simulation(seed) as sim:
        world = World(sim)
        sim.run(world.play())
        if world.problems:
            error = AssertionError("\n".join(world.problems[:20]))
            error.add_note(sim.describe())
            raise error


@pytest.mark.parametrize("chunk", range(share(4)))
def test_connections_that_fail_are_noticed_by_nobody_else(chunk):
    for seed in seeds(10, first=chunk * 10):
        run(seed)


def forget_the_outputs_behind_one_that_fails(monkeypatch):
    honest = Engine._end_turn

    def give_up(self, output, error):
        raise RuntimeError("what comes behind it is forgotten")

    def end_turn(self):
        try:
            honest(self)
        except RuntimeError:
            self.schedule()

    monkeypatch.setattr(Engine, "output_failed", give_up)
    monkeypatch.setattr(Engine, "_end_turn", end_turn)


def go_on_delivering_behind_a_protocol_error(monkeypatch):
    def end_input(self):
        self._is_finished = True

    monkeypatch.setattr(Session, "_end_input", end_input)


def leave_a_broken_connection_open(monkeypatch):
    monkeypatch.setattr(Engine, "output_failed", lambda self, output, error: self.on_defect("unseen", error))


MUTANTS = [
    forget_the_outputs_behind_one_that_fails,
    go_on_delivering_behind_a_protocol_error,
    leave_a_broken_connection_open,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_planted_bugs_are_found(mutant, monkeypatch):
    mutant(monkeypatch)
    for seed in range(MUTANT_SEEDS):
        try:
            run(seed)
        except (AssertionError, SimulationError):
            return
    pytest.fail(f"{mutant.__name__} was not found in {MUTANT_SEEDS} seeds")
