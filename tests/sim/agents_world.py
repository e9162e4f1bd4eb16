"""A cluster of real daemons in a simulated world: three nsqds and the nsqlookupd that keeps their store, and clients.

All of it is the code that users run, from ``main`` on: agents with their waits, leases and errors, links between nodes,
sessions that hand publishes on and relay consumers. The clients are raw and know one address at a time, as NSQ's do.

While it runs, of each partition at most one process may deliver, whatever was killed, stopped, starved or cut off, and
what the store says of it never goes back. In
the end, when all is well again: somebody leads, everybody is in sync, publishes are answered at every node, what was
acknowledged was delivered, nothing is being waited for, and no error was logged that nobody expected.

``python -m tests.sim.agents_world 0 100`` plays seeds and prints their cost, and how long nothing could be published.

Source: tests/sim/README.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import msgspec
from tests.sim.loop import Node, Simulation, SimulationError
from tests.sim.nsqd_world import Wire

from flintmq.cluster.state import LEASE_TTL_S, PartitionState
from flintmq.cluster.view import PartitionId, View
from flintmq.net.http_client import ask
from flintmq.net.http_exchange import NoAnswer
from flintmq.nsqd import server as nsqd_server
from flintmq.nsqd.cluster.agent import Agent
from flintmq.nsqd.cluster.led import Led
from flintmq.nsqd.cluster.peers import Peers
from flintmq.nsqd.options import NsqdOptions
from flintmq.nsqlookupd import server as lookup_server
from flintmq.nsqlookupd.options import NsqlookupdOptions
from flintmq.storage import node_id
from flintmq.wire import commands
from flintmq.wire.frames import ERROR, MESSAGE, RESPONSE

NAMES = ("a", "b", "c")
TOPIC, CHANNEL = "orders", "billing"
TCP, HTTP, PEER = 4150, 4151, 4152
LOOKUP_TCP, LOOKUP_HTTP = 4160, 4161
LOOK_S = 0.05
ANSWER_S_MAX = 12.0
STRANDED_S = 20.0
WHOLE_S_MAX = 30.0
"""Of virtual time, after the last fault, until all are in sync again."""
FAULTS = (
    "kill", "kill", "power", "stop", "stop", "pause", "starve", "starve all", "cut", "one way", "isolate", "strand",
    "estrange", "reset", "lookup kill", "lookup pause", "slow disk", "frozen disk", "stumble",
)  # fmt: skip

LOST = b"the connection is lost"
PATIENCE_S = 0.5
"""After which who publishes to one partition looks for its leader again."""


class Errors(logging.Handler):
    """Keeps what daemons log as unexpected: with a traceback, or by that name."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or "unexpected" in record.getMessage():
            self.found.append(self.format(record))


class Publisher:
    """Publishes one message after the other at some node; goes to another one when it is not answered with OK."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._random = random.Random(f"{world.sim.seed}/publisher {number}")
        self._prefix = b"%d-" % number
        self._count = 0

    async def run(self) -> None:
        while True:
            name = self._random.choice(NAMES)
            with contextlib.suppress(OSError, TimeoutError):
                await self._publish_at(name)
            await asyncio.sleep(self._random.uniform(0.01, 0.1))

    async def _publish_at(self, name: str) -> None:
        answers: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
        loop, world = asyncio.get_running_loop(), self._world
        async with asyncio.timeout(1.0):
            _, wire = await loop.create_connection(
                partial(Wire, lambda kind, frame: answers.put_nowait((kind, frame))), name, TCP
            )
        wire.lost.add_done_callback(lambda _: answers.put_nowait((ERROR, LOST)))
        wire.send(commands.MAGIC_V2)
        try:
            while not wire.lost.done():
                body = self._prefix + b"%d" % self._count
                self._count += 1
                began = loop.time()
                world.attempted[body] = None
                wire.send(commands.pub(TOPIC, body))
                try:
                    async with asyncio.timeout(ANSWER_S_MAX):
                        kind, frame = await answers.get()
                except TimeoutError:
                    world.note_unanswered(name, body, began)
                    return
                if (kind, frame) != (RESPONSE, b"OK"):
                    is_unknown = frame == LOST or b"not known" in frame
                    world.refused["unknown" if is_unknown else frame.split(b" ")[0].decode()] += 1
                    if is_unknown:
                        world.unknown.append((began, loop.time(), name, frame))
                    return
                world.acked[body] = None
                world.answered(began)
                await asyncio.sleep(self._random.expovariate(1 / 0.04))
        finally:
            wire.transport.abort()


class Consumer:
    """Finishes all that it gets from some node; goes to another one now and then, and when it is sent away."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._random = random.Random(f"{world.sim.seed}/consumer {number}")

    async def run(self) -> None:
        while True:
            name = self._random.choice(NAMES)
            with contextlib.suppress(OSError, TimeoutError):
                await self._consume_at(name)
            await asyncio.sleep(self._random.uniform(0.05, 0.3))

    async def _consume_at(self, name: str) -> None:
        loop, world = asyncio.get_running_loop(), self._world
        wires: list[Wire] = []
        heard_at = [loop.time()]

        def on_frame(kind: int, frame: bytes) -> None:
            heard_at[0] = loop.time()
            if kind == MESSAGE:
                world.delivered[frame[26:]] += 1
                wires[0].send(commands.fin(frame[10:26]))
            elif kind == RESPONSE and frame == b"OK":
                wires[0].send(commands.rdy(20))
            elif kind == ERROR:
                wires[0].transport.abort()

        async with asyncio.timeout(1.0):
            _, wire = await loop.create_connection(partial(Wire, on_frame), name, TCP)
        wires.append(wire)
        wire.send(commands.MAGIC_V2 + commands.sub(TOPIC, CHANNEL))
        until = loop.time() + self._random.choice((3.0, 20.0))
        try:
            while not wire.lost.done() and loop.time() < until:
                await asyncio.sleep(0.2)
                if loop.time() - heard_at[0] > 5.0:
                    return
        finally:
            wire.transport.abort()


class Seeker:
    """Publishes to one partition, at the node that nsqlookupd says leads it, and asks again when that does not answer.

    Attributes:
        longest_s: between two publishes that were answered with OK.
    """

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._number = number
        self._count = 0
        self.longest_s = 0.0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        answered_at, target = loop.time(), f"/lookup?topic={TOPIC}&access=w&metainfo=true"
        while True:
            with contextlib.suppress(OSError, TimeoutError, NoAnswer):
                status, answer = await ask(
                    "GET", "lookup", LOOKUP_HTTP, target, connect_timeout_s=1, request_timeout_s=1
                )
                peers = (msgspec.json.decode(answer).get("partitions") or {}) if status == 200 else {}
                leader = peers.get(str(self._number))
                if leader:
                    async for _ in self._published(leader["broadcast_address"]):
                        self.longest_s = max(self.longest_s, loop.time() - answered_at)
                        answered_at = loop.time()
            await asyncio.sleep(LOOK_S)

    async def _published(self, name: str) -> AsyncIterator[None]:
        """Publish one message after the other, for as long as that goes well."""
        loop, answers = asyncio.get_running_loop(), asyncio.Queue[tuple[int, bytes]]()
        async with asyncio.timeout(PATIENCE_S):
            _, wire = await loop.create_connection(lambda: Wire(lambda *frame: answers.put_nowait(frame)), name, TCP)
        wire.send(commands.MAGIC_V2)
        try:
            while not wire.lost.done():
                body = b"seeker %d-%d" % (self._number, self._count)
                self._count += 1
                self._world.attempted[body] = None
                wire.send(commands.pub(TOPIC, body, partition=self._number))
                async with asyncio.timeout(PATIENCE_S):
                    if await answers.get() != (RESPONSE, b"OK"):
                        return
                self._world.acked[body] = None
                yield
                await asyncio.sleep(LOOK_S)
        finally:
            wire.transport.abort()


class World:
    """One seed's cluster.

    Args:
        partition_count: of the topic; 0: the seed says.

    Attributes:
        outages: spans of time in which no publish was begun that was answered with OK, with the fault of that time.
        seekers: who publishes to one partition each; only where a fault asks for them.
    """

    def __init__(self, sim: Simulation, faults: Sequence[str] = FAULTS, partition_count: int = 0) -> None:
        self.sim = sim
        self.random = sim.random
        self.faults = faults
        self.lookup = sim.node("lookup")
        self.hosts: dict[str, Node] = {name: sim.node(name) for name in NAMES}
        self.nsqds: dict[str, nsqd_server.Nsqd] = {}
        self.stops: dict[str, asyncio.Event] = {}
        self.durability = self.random.choice(("os", "os", "fsync"))
        drawn = self.random.choice((1, 1, 3))
        self.partition_count = partition_count or drawn
        self.attempted: dict[bytes, None] = {}
        self.acked: dict[bytes, None] = {}
        self.delivered: defaultdict[bytes, int] = defaultdict(int)
        self.refused: defaultdict[str, int] = defaultdict(int)
        self.unknown: list[tuple[float, float, str, bytes]] = []
        self.problems: list[str] = []
        self.unanswered: list[tuple[float, str, bytes]] = []
        self.outages: list[tuple[float, str]] = []
        self.seekers: list[Seeker] = []
        self.fault = ""
        self._answered_until = 0.0
        self._troubled: dict[str, float] = {}  # nodes that were stopped or cut off, and until when

    # -- daemons

    def start_lookup(self) -> None:
        node = self.lookup
        options = NsqlookupdOptions(
            tcp_address=f"0.0.0.0:{LOOKUP_TCP}", http_address=f"0.0.0.0:{LOOKUP_HTTP}", broadcast_address="lookup",
            store_path="given", cluster_store=("own",), allow_same_host=True,
        )  # fmt: skip
        node.start(lambda: lookup_server.main(node.env, options, files=node.files))

    def start(self, name: str) -> None:
        self.nsqds.pop(name, None)
        self.stops[name] = asyncio.Event()
        self.hosts[name].start(partial(self._main, name, self.stops[name]))

    async def _main(self, name: str, stop: asyncio.Event) -> None:
        host = self.hosts[name]
        node_id(host.files, random.Random(name).randbytes)
        options = NsqdOptions(
            tcp_address=f"0.0.0.0:{TCP}", http_address=f"0.0.0.0:{HTTP}", peer_address=f"0.0.0.0:{PEER}",
            broadcast_address=name, cluster_store=(f"lookup:{LOOKUP_HTTP}",), durability=self.durability,
            lookupd_tcp_address=(f"lookup:{LOOKUP_TCP}",),
        )  # fmt: skip

        def ready(nsqd: nsqd_server.Nsqd) -> None:
            self.nsqds[name] = nsqd

        await nsqd_server.main(host.env, host.files, options, ready=ready, stop=stop)

    def agents(self) -> Iterator[tuple[str, Agent]]:
        """Yield the agents of all processes that run and are not stopped."""
        for name, host in self.hosts.items():
            nsqd = self.nsqds.get(name)
            if host.process is not None and host.process.is_scheduled and nsqd is not None:
                if nsqd.node.agent is not None:
                    yield name, nsqd.node.agent

    # -- what clients saw

    def answered(self, began: float) -> None:
        """A publish that was begun then was answered with OK."""
        if self._answered_until and began - self._answered_until > 0.5:
            self.outages.append((began - self._answered_until, self.fault))
        self._answered_until = max(self._answered_until, began)

    def note_unanswered(self, name: str, body: bytes, began: float) -> None:
        if self._troubled.get(name, 0.0) < began:
            self.unanswered.append((began, name, body))

    def note_state(self, partition: PartitionId, before: PartitionState, now: PartitionState) -> None:
        """A node learns that the store says something else."""
        if now.epoch == before.epoch:
            is_next = not now.leader or (now.leader, now.incarnation) == (before.leader, before.incarnation)
        else:
            is_next = now.epoch > before.epoch
        if not is_next:
            self.problems.append(f"{self.sim.now_s:.2f}: the state of {partition} went back: {now} after {before}")

    # -- the play

    async def play(self) -> None:
        self.start_lookup()
        for name in NAMES:
            self.start(name)
        await self._create()
        for number in range(2):
            self.sim.node(f"p{number}").start(Publisher(self, number).run)
            self.sim.node(f"q{number}").start(Consumer(self, number).run)
        looking = asyncio.get_running_loop().create_task(self._look())
        await asyncio.sleep(1.0)
        for _ in range(self.random.randint(1, 3)):
            self.fault = self.random.choice(self.faults)
            self.sim.loop.trace("nemesis", self.fault)
            await getattr(self, "_" + self.fault.replace(" ", "_"))()
            await asyncio.sleep(self.random.choice((0.1, 1.0, 4.0)))
        self.sim.network.heal()
        for name, host in self.hosts.items():
            host.disk_delay_s = (1e-6, 20e-3)
            if not host.is_running:
                self.start(name)
        await self._until_whole()
        await asyncio.sleep(3.0)
        for number in range(2):
            self.sim.node(f"p{number}").kill()
        for number in range(len(self.seekers)):
            self.sim.node(f"s{number}").kill()
        await self._until_delivered()
        looking.cancel()
        self._check_rest()

    async def _create(self) -> None:
        target = f"/topic/create?topic={TOPIC}&partition_num={self.partition_count}&replicator=3&extend=false"
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, Exception):
                status, _ = await ask(
                    "POST", "lookup", LOOKUP_HTTP, target, connect_timeout_s=1.0, request_timeout_s=10.0
                )
                if status == 200:
                    break
            await asyncio.sleep(0.2)
        await self._until_whole()

    async def _look(self) -> None:
        """See that at most one process may deliver, all the time."""
        while True:
            ready: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
            for name, agent in self.agents():
                for partition, led in agent.table.led.items():
                    if led.is_ready and _may_act(agent, led):
                        ready[partition].append(f"{name} in epoch {led.leading.epoch}")
            for partition, who in ready.items():
                if len(who) > 1:
                    self.problems.append(f"{self.sim.now_s:.2f}: {partition} is delivered by {who}")
            await asyncio.sleep(LOOK_S)

    async def _until_whole(self) -> None:
        try:
            async with asyncio.timeout(WHOLE_S_MAX):
                while not self._is_whole():
                    assert not self.problems, "\n".join(self.problems[:10])
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise AssertionError(f"not whole after {WHOLE_S_MAX:g} s:\n{self.describe()}") from None

    def _is_whole(self) -> bool:
        agents = dict(self.agents())
        if len(agents) < len(NAMES):
            return False
        led = [led for agent in agents.values() for led in agent.table.led.values()]
        return (
            len(led) == self.partition_count
            and all(each.is_ready and each.is_writable for each in led)
            and all(len(each.leading.state.in_sync) == len(NAMES) for each in led)
            and all(agent.shown.figures().has_lease for agent in agents.values())
        )

    async def _until_delivered(self) -> None:
        try:
            async with asyncio.timeout(WHOLE_S_MAX):
                while not self.acked.keys() <= self.delivered.keys():
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            missing = sorted(self.acked.keys() - self.delivered.keys())
            raise AssertionError(
                f"{len(missing)} acknowledged and not delivered: {missing[:5]}\n{self.describe()}"
            ) from None

    def _check_rest(self) -> None:
        """Nothing is waited for, and everybody was answered."""
        assert not self.problems, "\n".join(self.problems[:10])
        assert len(self.acked) > 20, f"{len(self.acked)} acknowledged, refused: {dict(self.refused)}"
        assert not self.unanswered, f"not answered within {ANSWER_S_MAX:g} s: {self.unanswered}"
        for name, agent in self.agents():
            busy = [copy.partition for copy in agent.table.copies.values() if copy.is_busy]
            assert not busy, f"{name}: {busy}: something is being done with it, for ever"
            for led in agent.table.led.values():
                assert not led.is_swapping, f"{name}: {led.leading.describe()} is being changed, for ever"
                assert led.leading.wanted_state() is None, f"{name}: {led.leading.describe()} wants something"

    def describe(self) -> str:
        return "\n".join(
            f"{name}: {'' if nsqd.node.agent is None else nsqd.node.agent.shown.describe()}"
            for name, nsqd in self.nsqds.items()
        )

    # -- faults

    def _somebody(self) -> str:
        """The name of a node: more often than not the one that leads most."""
        if any(self.agents()) and self.random.random() < 0.6:
            return self._leader()
        return self.random.choice(NAMES)

    def _leader(self) -> str:
        """The name of the node that leads most."""
        leads = {name: len(agent.table.led) for name, agent in self.agents()}
        return max(sorted(leads), key=lambda name: leads[name])

    def _lasting(self) -> float:
        return self.random.choice((self.random.uniform(0.05, 1.0), self.random.uniform(1.0, 7.0)))

    def _trouble(self, name: str, seconds: float) -> None:
        self._troubled[name] = self.sim.loop.time() + seconds + ANSWER_S_MAX

    async def _kill(self) -> None:
        name = self._somebody()
        if self.hosts[name].is_running:
            self.hosts[name].kill()
        await asyncio.sleep(self._lasting())
        self.start(name)

    async def _power(self) -> None:
        name = self._somebody()
        lasting = self._lasting()
        self._trouble(name, lasting)  # it answers nothing, not even that it is gone
        if self.hosts[name].is_running:
            self.hosts[name].kill(power_loss=self.durability == "fsync")
        await asyncio.sleep(lasting)
        self.start(name)

    async def _stop(self) -> None:
        name = self._somebody()
        if self.hosts[name].is_running:
            self.stops[name].set()
            await self.hosts[name].exited()
        await asyncio.sleep(self.random.choice((0.0, 0.5, 4.0)))
        self.start(name)

    async def _pause(self) -> None:
        name, lasting = self._somebody(), self._lasting()
        self._trouble(name, lasting)
        self.hosts[name].pause()
        await asyncio.sleep(lasting)
        self.hosts[name].resume()

    async def _starve(self, names: Sequence[str] = ()) -> None:
        """Have a process, or several, run for some ms now and then only, as beside many others."""
        names = names or [self._somebody()]
        share_s, pause_s = self.random.choice(((0.005, 0.1), (0.01, 0.3), (0.02, 0.8), (0.05, 1.5)))
        until = self.sim.loop.time() + self.random.uniform(2.0, 12.0)
        for name in names:
            self._trouble(name, until - self.sim.loop.time())

        async def starve(name: str) -> None:
            host = self.hosts[name]
            while self.sim.loop.time() < until:
                host.pause()
                await asyncio.sleep(self.random.uniform(0.2, 1.8) * pause_s)
                host.resume()
                await asyncio.sleep(self.random.uniform(0.2, 1.8) * share_s)

        await asyncio.gather(*map(starve, names))

    async def _starve_all(self) -> None:
        await self._starve(NAMES if self.random.random() < 0.5 else self.random.sample(NAMES, 2))

    async def _cut(self) -> None:
        one, other = self.random.sample(NAMES, 2)
        await self._cut_for([(one, other), (other, one)], self._lasting())

    async def _one_way(self) -> None:
        one, other = self.random.sample((*NAMES, "lookup"), 2)
        await self._cut_for([(one, other)], self._lasting())

    async def _isolate(self) -> None:
        name = self._somebody()
        others = [each for each in (*NAMES, "lookup") if each != name]
        await self._cut_for([way for other in others for way in ((name, other), (other, name))], self._lasting())

    async def _return(self) -> None:
        """A node is alone until others lead what it led, and is back while it asks for changes."""
        name = self._leader()
        others = [each for each in (*NAMES, "lookup") if each != name]
        ways = [way for other in others for way in ((name, other), (other, name))]
        await self._cut_for(ways, self.random.uniform(4.2, 4.8))

    async def _strand(self, name: str = "") -> None:
        """A node reaches the store and none of the others; or it is not heard by them, or does not hear them."""
        name = name or self._somebody()
        to = [(name, other) for other in NAMES if other != name]
        back = [(other, name) for _, other in to]
        await self._cut_for(self.random.choice((to + back, to, back)), self.random.choice((1.0, 7.0)))

    async def _spread(self) -> None:
        """A node is stranded while leadership is being handed to it, because it leads nothing."""
        name = self._somebody()
        self.stops[name].set()
        await self.hosts[name].exited()
        self.start(name)
        await self._until_whole()
        for number in range(len(self.seekers), self.partition_count):
            self.seekers.append(Seeker(self, number))
            self.sim.node(f"s{number}").start(self.seekers[-1].run)
        await asyncio.sleep(self.random.uniform(0.5, 5.0))
        await self._strand(name)

    async def _strand_and_stop(self) -> None:
        """A node is stranded, and the others stand still until their leases are over."""
        others = [name for name in NAMES if name != self._leader()]
        ways = [way for other in others for way in ((self._leader(), other), (other, self._leader()))]

        async def stand_still() -> None:
            for name in others:
                self.hosts[name].pause()
            await asyncio.sleep(self.random.uniform(LEASE_TTL_S + 1.0, LEASE_TTL_S + 2.0))
            for name in others:
                self.hosts[name].resume()

        await asyncio.gather(self._cut_for(ways, STRANDED_S), stand_still())

    async def _estrange(self) -> None:
        name = self._somebody()
        await self._cut_for([(name, "lookup"), ("lookup", name)], self._lasting())

    async def _cut_for(self, ways: Sequence[tuple[str, str]], seconds: float) -> None:
        for way in ways:
            self.sim.network.cut(*way)
            for name in way:
                self._trouble(name, seconds)
        await asyncio.sleep(seconds)
        self.sim.network.heal()

    async def _reset(self) -> None:
        self.sim.network.reset(*self.random.sample((*NAMES, "lookup"), 2))

    async def _lookup_kill(self) -> None:
        self.lookup.kill()
        await asyncio.sleep(self._lasting())
        self.start_lookup()

    async def _lookup_pause(self) -> None:
        self.lookup.pause()
        await asyncio.sleep(self._lasting())
        self.lookup.resume()

    async def _slow_disk(self) -> None:
        self.hosts[self._somebody()].disk_delay_s = (0.05, self.random.choice((0.2, 1.0)))
        await asyncio.sleep(self._lasting())

    async def _frozen_disk(self) -> None:
        name, lasting = self._somebody(), self._lasting()
        self._trouble(name, lasting)
        self.hosts[name].freeze_disk(lasting)
        await asyncio.sleep(lasting)

    async def _stumble(self) -> None:
        """Two things at once: a node goes while another one is slow."""
        slow = self.random.choice(NAMES)
        self._trouble(slow, 3.0)
        self.hosts[slow].freeze_disk(self.random.uniform(0.1, 2.0))
        await self._kill()


def _may_act(agent: Agent, led: Led) -> bool:
    lease = agent._lease
    return lease.is_held or led.leading.is_confirmed(agent._clock.monotonic_ns())


@contextmanager
def _watched(world: World) -> Iterator[None]:
    """The world is told of each change of a partition's state that a node learns of."""
    set_partition = View._set_partition

    def tell(view: View, partition: PartitionId, state: PartitionState | None) -> PartitionState | None:
        before = set_partition(view, partition, state)
        if before is not None and state is not None:
            world.note_state(partition, before, state)
        return before

    with patch.object(View, "_set_partition", tell):
        yield


@contextmanager
def _quiet() -> Iterator[Errors]:
    """Nothing is logged but into what is yielded; what a process would draw from the kernel, it draws from a seed."""
    errors, logger = Errors(), logging.getLogger("flintmq")
    errors.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    level, propagate = logger.level, logger.propagate
    logger.addHandler(errors)
    logger.propagate = False
    defaults = (random.Random(1).randbytes, *(Peers.__init__.__defaults__ or ())[1:])
    try:
        with patch.object(Peers.__init__, "__defaults__", defaults):
            yield errors
    finally:
        logger.removeHandler(errors)
        logger.setLevel(level)
        logger.propagate = propagate


def play(seed: int, faults: Sequence[str] = FAULTS, partition_count: int = 0) -> tuple[World, str]:
    """Play one seed; return its world and the hash of what happened.

    Raises:
        AssertionError, SimulationError: something does not hold.
    """
    with _quiet() as errors, Simulation(seed) as sim:
        world = World(sim, faults, partition_count)
        try:
            with _watched(world):
                sim.run(world.play())
            assert not errors.found, "\n".join(errors.found)
        except (AssertionError, SimulationError) as error:
            error.add_note("\n".join(errors.found[:3]))
            error.add_note(sim.describe())
            raise
        return world, sim.trace_hash


def main(first: int, end: int, *faults: str) -> None:
    """Play seeds and print what they found."""
    outages: defaultdict[str, list[float]] = defaultdict(list)
    failed: list[int] = []
    refused: defaultdict[str, int] = defaultdict(int)
    began = time.process_time()
    for seed in range(first, end):
        try:
            world, _ = play(seed, faults or FAULTS)
        except (AssertionError, SimulationError) as error:
            failed.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:1500]}", flush=True)
            continue
        for seconds, fault in world.outages:
            outages[fault].append(seconds)
        for code, count in world.refused.items():
            refused[code] += count
    for fault, spans in sorted(outages.items()):
        middle = sorted(spans)[len(spans) // 2]
        print(f"{fault:14s} {len(spans)} times nothing for {middle:.2f} s, at most {max(spans):.2f} s")
    spent = time.process_time() - began
    print(f"{end - first} seeds in {spent:.1f} s of CPU, failed: {failed}, refused: {dict(refused)}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
