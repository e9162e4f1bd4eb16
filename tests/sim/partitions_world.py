"""One real nsqd with a topic of several partitions, consumed in order and as it comes, while everything breaks.

The topic is made over HTTP, as nsqlookupd does it, in one of the ways there are: ordered, multipart, or merely with
partitions. Publishers name a partition, or none where they may. A channel in order has two consumers for each partition
(``SUB_ORDER``) that compete; the other channel has one of all partitions and one of a single one (``SUB``).

The clients are raw, as in :mod:`tests.sim.nsqd_world`, whose faults these worlds have, too. What must hold is in
:meth:`PartitionsWorld.problems`.

Source: tests/sim/README.md, docs/decisions/0009.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from tests.sim.checkers import in_flight, strict_order, timeline, total_queue
from tests.sim.loop import Simulation
from tests.sim.nsqd_world import ANSWER_DEADLINE_S, DRAIN_S_MAX, PORT, Wire, World

from flintmq.client.core.message import is_hex
from flintmq.message import partition_of, sequence_of
from flintmq.nsqd.options import NsqdOptions
from flintmq.nsqd.server import main
from flintmq.wire import commands
from flintmq.wire.frames import ERROR, MESSAGE

TOPIC = "ledger"
HTTP_PORT = 4151
PARTITIONS = (0, 1, 2)
MSG_TIMEOUT_NS = 2_000_000_000
MAX_MSG_TIMEOUT_NS = 5_000_000_000
KINDS = {"": False, "&multipart=true": False, "&orderedmulti=true": True}  # of topics, and whether they are ordered
LATENCY_NS = 700_000_000  # more than two segments that are sent again take
REPEATED_NS = 100_000_000 + LATENCY_NS  # what a power loss may repeat, by the clocks of clients
RDY_COUNTS = (1, 3, 20)
_NOT_HELD = (b"E_FIN_FAILED", b"E_REQ_FAILED", b"E_TOUCH_FAILED")


@dataclass
class Channel:
    """One channel, and what its consumers saw.

    Attributes:
        delivered: bodies, with repeats.
        flow: for :func:`in_flight`.
        lives: for :func:`timeline`.
        orders: for :func:`strict_order`, by partition.
        offsets: virtual offset -> id, by partition.
    """

    name: str
    is_ordered: bool
    delivered: list[bytes] = field(default_factory=list)
    flow: list[tuple[int, str, object, object]] = field(default_factory=list)
    lives: list[tuple[int, str, object, object, int]] = field(default_factory=list)
    orders: dict[int, list[tuple[int, str, object, int]]] = field(default_factory=lambda: {n: [] for n in PARTITIONS})
    offsets: dict[int, dict[int, int]] = field(default_factory=lambda: {n: {} for n in PARTITIONS})


class Publisher:
    """Publishes to partitions in every way there is; never publishes a body twice."""

    def __init__(self, world: PartitionsWorld, number: int) -> None:
        self.world = world
        self.name = f"p{number}"
        self.random = random.Random(f"{world.seed}/{self.name}")
        self.left = world.random.randint(10, 45)
        self.count = 0
        self.connection_count = 0

    async def run(self):
        loop = asyncio.get_running_loop()
        while self.left > 0:
            waiting: list[list[bytes]] = []
            try:
                async with asyncio.timeout(ANSWER_DEADLINE_S):
                    _, wire = await loop.create_connection(
                        partial(Wire, partial(self._on_frame, waiting)), "nsqd", PORT
                    )
            except (OSError, TimeoutError):
                await asyncio.sleep(0.1)
                continue
            self.connection_count += 1
            wire.send(commands.MAGIC_V2)
            stuck_since = loop.time()
            while self.left > 0 and not wire.lost.done() and loop.time() - stuck_since < ANSWER_DEADLINE_S:
                if len(waiting) < self.random.choice((1, 1, 5)):
                    waiting.append(self._publish(wire))
                    stuck_since = loop.time()
                await asyncio.sleep(self.random.expovariate(1 / 0.02))
            deadline = loop.time() + ANSWER_DEADLINE_S
            while waiting and not wire.lost.done() and loop.time() < deadline:
                await asyncio.sleep(0.01)
            wire.transport.abort()

    def _on_frame(self, waiting, kind, frame):
        history = self.world.history
        if kind == ERROR:
            if waiting:
                waiting.pop(0)  # refused or unknown, which only the history of deliveries can tell
            if frame.startswith((b"E_TOPIC_NOT_EXIST", b"E_BAD")):
                history.problems.append(f"{self.name}: {frame!r}")
        elif waiting:
            history.acked.update(dict.fromkeys(waiting.pop(0)))

    def _publish(self, wire):
        is_free = self.world.kind == "" and self.random.random() < 0.3
        number = None if is_free else self.random.choice(PARTITIONS)
        way = self.random.random()
        bodies = self._bodies(self.random.randint(2, 5) if 0.5 < way < 0.8 else 1, number)
        if way <= 0.5:
            wire.send(commands.pub(TOPIC, bodies[0], number))
        elif way < 0.8:
            wire.send(commands.mpub(TOPIC, bodies, number))
        else:
            wire.send(commands.dpub(TOPIC, self.random.choice((50, 500, 1500)), bodies[0], number))
        return bodies

    def _bodies(self, count, number):
        bodies = []
        for _ in range(count):
            self.count += 1
            body = b"%s-%d" % (self.name.encode(), self.count) + b"." * self.random.choice((0, 0, 7, 300))
            self.world.homes[body] = number
            self.world.turns[body] = (self.name, self.connection_count), self.count
            bodies.append(body)
        self.left -= count
        self.world.history.attempted += bodies
        return bodies


class Link:
    """A consumer of one partition or of all; finishes most of what it gets, and does everything else to the rest.

    Args:
        number: of its partition; None for all of them.
    """

    def __init__(self, world: PartitionsWorld, node: str, channel: Channel, number: int | None) -> None:
        self.world = world
        self.channel = channel
        self.number = number
        self.name = f"{node} {channel.name} {number}"
        self.random = random.Random(f"{world.seed}/{self.name}")
        self.connection_count = 0

    async def run(self):
        loop = asyncio.get_running_loop()
        while True:
            self.connection_count += 1
            key = self.name, self.connection_count
            answers: list[bytes] = []
            try:
                async with asyncio.timeout(ANSWER_DEADLINE_S):
                    _, wire = await loop.create_connection(partial(self._wire, key, answers), "nsqd", PORT)
            except (OSError, TimeoutError):
                await asyncio.sleep(0.1)
                continue
            wire.send(commands.MAGIC_V2 + self._subscribe())
            began = heard = loop.time()
            while not wire.lost.done() and (len(answers) >= 2 or loop.time() - began < ANSWER_DEADLINE_S):
                await asyncio.wait([wire.lost], timeout=0.2)
                if loop.time() - heard > 10:
                    heard = loop.time()
                    wire.send(commands.NOP)  # without it nobody would learn that the other side has lost its power
                if not self.world.is_polite and self.random.random() < 0.03:
                    break
            self._note("close", key)
            wire.transport.abort()

    def _wire(self, key, answers):
        """The connection is there: it is to the nsqd that runs now."""
        incarnation = self.world.incarnation

        def on_frame(kind, frame):
            self._on_frame(key, wire, incarnation == self.world.incarnation, answers, kind, frame)

        wire = Wire(on_frame)
        return wire

    def _subscribe(self):
        identify = b'{"feature_negotiation":true,"msg_timeout":%d,"heartbeat_interval":2000}'
        sub = commands.sub(TOPIC, self.channel.name, self.number)
        if self.channel.is_ordered:
            sub = self.random.choice((b"SUB_ORDER", b"SUB_ORDERED")) + sub[3:]
        elif self.number is None and self.random.random() < 0.5:
            sub = sub[:-1] + b" -1\n"  # as one that knows of partitions
        return commands.identify(identify % (MSG_TIMEOUT_NS // 1_000_000)) + sub

    def _note(self, step, key, message=None, value=0):
        now_ns = self.world.now_ns()
        self.channel.lives.append((now_ns, step, key, message, value))
        if step == "close":
            self.channel.flow.append((now_ns, "close", key, None))
        elif step in ("finish", "requeue"):
            self.channel.flow.append((now_ns, "done", key, message))
        if self.channel.is_ordered and step in ("deliver", "finish"):
            self.channel.orders[partition_of(message)].append((now_ns, step, key, sequence_of(message)))

    def _on_frame(self, key, wire, is_living, answers, kind, frame):
        if kind == MESSAGE:
            self._on_message(key, wire, frame, is_living)
        elif kind == ERROR:
            if not frame.startswith((*_NOT_HELD, b"E_SUB_FAILED")):
                self.world.history.problems.append(f"{key}: unexpected error {frame!r}")
        else:
            answers.append(frame)
            if len(answers) == 2:
                rdy_count = self.random.choice(RDY_COUNTS)
                self.channel.flow.append((self.world.now_ns(), "rdy", key, rdy_count))
                wire.send(commands.rdy(rdy_count))

    def _on_message(self, key, wire, frame, is_living):
        world, channel = self.world, self.channel
        _, attempts, message_id = struct.unpack_from(">QH16s", frame)
        internal, trace_id = (int(message_id, 16), 0) if is_hex(message_id) else struct.unpack(">QQ", message_id)
        body = frame[26:]
        if channel.is_ordered:
            offset, raw_size = struct.unpack_from(">QI", body)
            body = body[12:]
            world.check_offset(channel, internal, offset, raw_size, body)
        channel.delivered.append(body)
        world.check_identity(internal, trace_id, body, self.number)
        if not is_living:
            return  # what a dead nsqd had sent; nobody there takes an answer
        self.channel.flow.append((world.now_ns(), "message", key, internal))
        self._note("deliver", key, internal, attempts)
        self._answer(key, wire, internal, message_id)

    def _answer(self, key, wire, internal, message_id):
        call_later = asyncio.get_running_loop().call_later
        choice = 0.0 if self.world.is_polite else self.random.random()
        finish = partial(self._send, key, wire, "finish", internal, commands.fin(message_id))
        if choice < 0.75:
            call_later(0.0 if self.world.is_polite else self.random.choice((0.0, 0.0, 0.02)), finish)
        elif choice < 0.9:
            delay_ms = self.random.choice((0, 0, 30, 700))
            self._send(key, wire, "requeue", internal, commands.req(message_id, delay_ms), delay_ms * 1_000_000)
        elif choice < 0.95:
            call_later(1.2, partial(self._send, key, wire, "touch", internal, commands.touch(message_id)))
            call_later(2.5, finish)  # behind the first timeout
        else:
            # not answered: it times out there; when, this client cannot know
            self.channel.flow.append((self.world.now_ns(), "done", key, internal))

    def _send(self, key, wire, step, internal, command, value=0):
        if not wire.transport.is_closing():
            wire.send(command)
            self._note(step, key, internal, value)


class PartitionsWorld(World):
    """One seed's nsqd with a topic of several partitions, and everything around it."""

    def __init__(self, sim: Simulation, durability: str | None = None) -> None:
        super().__init__(sim, durability)
        self.kind = self.random.choice(list(KINDS))
        is_ordered = KINDS[self.kind]
        self.channels = [Channel("strict", True), Channel("audit", is_ordered)]
        self.homes: dict[bytes, int | None] = {}  # partitions that publishers named
        self.turns: dict[bytes, tuple[object, int]] = {}  # connection and place in what it published
        self.ids: dict[bytes, int] = {}
        self.incarnation = 0
        self.power_losses = 0
        self.is_polite = False
        self.was_disk_slow = False

    async def _main(self):
        options = NsqdOptions(
            tcp_address=f"0.0.0.0:{PORT}",
            http_address=f"0.0.0.0:{HTTP_PORT}",
            durability=self.durability,
            max_bytes_per_file=self.random.choice((2_000, 20_000, 1_000_000)),
            max_msg_size=1000,
            max_msg_timeout_ns=MAX_MSG_TIMEOUT_NS,
        )
        self.stop = asyncio.Event()

        def ready(nsqd):
            self.nsqd = nsqd

        await main(self.node.env, self.node.files, options, ready=ready, stop=self.stop)

    # -- what every message is checked for

    def check_identity(self, internal, trace_id, body, wanted_partition):
        """A body has one id, of the partition that it was published to and is consumed from."""
        problems = self.history.problems
        if self.ids.setdefault(body, internal) != internal:
            problems.append(f"{body!r} has the ids {self.ids[body]:x} and {internal:x}")
        if self.history.bodies_by_id.setdefault(internal, body) != body:
            problems.append(f"id {internal:x} names {self.history.bodies_by_id[internal]!r} and {body!r}")
        number = partition_of(internal)
        if number not in PARTITIONS or self.homes.get(body) not in (None, number) or trace_id:
            problems.append(f"{body!r} of partition {self.homes.get(body)} came as {internal:x} {trace_id:x}")
        if wanted_partition not in (None, number):
            problems.append(f"{body!r} of partition {number} went to a consumer of {wanted_partition}")

    def check_offset(self, channel, internal, offset, raw_size, body):
        """A message is always at the same offset, and no other one is there."""
        there = channel.offsets[partition_of(internal)].setdefault(offset, internal)
        if there != internal or raw_size != 34 + len(body):
            self.history.problems.append(f"{internal:x} at offset {offset} of size {raw_size}, where {there:x} is")

    # -- faults

    def start(self):
        self.incarnation += 1
        for channel in self.channels:
            channel.lives.append((self.now_ns(), "restart", None, None, 0))
        self._note_in_orders("start")
        if self.power_losses:
            self._expect_power_losses(self.power_losses - 1)
        super().start()

    def _note_in_orders(self, step):
        for channel in self.channels:
            for events in channel.orders.values():
                events.append((self.now_ns(), step, None, 0))

    def _expect_power_losses(self, count):
        """So many of the next starts may be behind one."""
        self.power_losses = count
        if count:
            self._note_in_orders("power")

    async def _power(self):
        self._expect_power_losses(1 if self.durability == "fsync" else 0)
        await super()._power()

    async def _operation(self):
        self._expect_power_losses(2 if self.durability == "fsync" else 0)
        await super()._operation()

    async def _clean(self):
        if self.stop is not None and self.node.is_running:
            self.incarnation += 1  # what is on the way now comes from one that is ending
            await super()._clean()

    async def _freeze(self):
        self.was_disk_slow = True
        await super()._freeze()

    async def _full(self):
        self.was_disk_slow = True
        await super()._full()

    async def _eio(self):
        self.was_disk_slow = True
        await super()._eio()

    # -- the play

    async def play(self):
        sim = self.sim
        self.start()
        faults = asyncio.ensure_future(self.nemesis())
        admin = sim.node("admin")
        admin.start(self._create)
        await admin.exited()
        for number in range(2):
            sim.node(f"p{number}").start(Publisher(self, number).run)
            sim.node(f"c{number}").start(partial(self._consume, number))
        await faults
        sim.network.heal()
        for number in range(2):
            await sim.node(f"p{number}").exited()
        self.is_polite = True
        if not await self._drained():
            self.history.problems.append(f"not drained after {DRAIN_S_MAX} s:\n{self.nsqd and self.nsqd.describe()}")
        await self._restart_repeats_nothing()

    async def _create(self):
        await self._post(f"/topic/create?topic={TOPIC}&partition_num={len(PARTITIONS)}{self.kind}&partitions=0,1,2")
        for channel in self.channels:
            await self._post(f"/channel/create?topic={TOPIC}&channel={channel.name}")

    async def _post(self, target):
        """Ask until it is answered well: nsqd may die meanwhile."""
        loop = asyncio.get_running_loop()
        while True:
            answer: asyncio.Future[bytes] = loop.create_future()
            request = f"POST {target} HTTP/1.1\r\nHost: nsqd\r\nContent-Length: 0\r\n\r\n".encode()
            try:
                async with asyncio.timeout(ANSWER_DEADLINE_S):
                    transport, _ = await loop.create_connection(partial(Answer, answer), "nsqd", HTTP_PORT)
                    transport.write(request)
                    head = await answer
                    transport.abort()
            except (OSError, TimeoutError):
                head = b""
            if head.startswith(b"HTTP/1.1 200"):
                return
            await asyncio.sleep(0.1)

    def _links(self, number) -> Iterator[Link]:
        for channel in self.channels:
            if channel.is_ordered:
                for partition in PARTITIONS:
                    yield Link(self, f"c{number}", channel, partition)
            else:
                yield Link(self, f"c{number}", channel, None if number != 1 else self.random.choice(PARTITIONS))

    async def _consume(self, number):
        await asyncio.gather(*(link.run() for link in self._links(number)))

    def _is_empty(self):
        topic = self.nsqd.node.engine.broker.topics.get(TOPIC)
        if topic is None:
            return False
        parts = [part for name in topic.channel_names for part in topic.channels(name)]
        return not any(part.depth + part.in_flight_count + part.deferred_count for part in parts)

    async def _drained(self):
        deadline = self.sim.loop.time() + DRAIN_S_MAX
        while self.sim.loop.time() < deadline:
            await asyncio.sleep(1.0)
            if self.node.is_running and self.nsqd is not None and self._is_empty():
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
        before = [len(channel.delivered) for channel in self.channels]
        self.start()
        self.sim.node("c9").start(partial(self._consume, 9))
        await asyncio.sleep(5.0)
        for channel, count in zip(self.channels, before, strict=True):
            if len(channel.delivered) > count:
                self.history.problems.append(f"after a clean restart again: {channel.delivered[count:][:5]}")

    def problems(self) -> list[str]:
        """Everything that is wrong with what was seen.

        - nothing acknowledged is lost in any channel, and nothing comes that was not published;
        - in order: what :func:`strict_order` says, in every partition;
        - no message goes to two consumers at a time, none comes before its delay is over, attempts count;
        - no consumer gets more than it is ready for;
        - what one connection published to a partition is there in that order.
        """
        history = self.history
        found = list(history.problems)
        for channel in self.channels:
            queue = total_queue(history.attempted, history.acked, (), channel.delivered)
            if not queue.is_ok:
                found.append(f"{channel.name}: {queue}")
            for number, events in channel.orders.items():
                repeated_ns = None if self.was_disk_slow else REPEATED_NS
                violations = strict_order(events, repeated_ns, may_be_late=self.network_was_cut)
                found += [f"{channel.name} {number}: {violation}" for violation in violations]
            if not self.network_was_cut:  # a message may be seen after its timeout then
                violations = timeline(channel.lives, MSG_TIMEOUT_NS, MAX_MSG_TIMEOUT_NS, LATENCY_NS)
                violations += in_flight(channel.flow, tolerance_ns=30_000_000_000)
                found += [f"{channel.name}: {violation}" for violation in violations]
        return found + list(self._out_of_order())

    def _out_of_order(self) -> Iterator[str]:
        last: dict[object, tuple[int, int]] = {}
        for body, (connection, turn) in self.turns.items():
            if body in self.ids:
                key = connection, partition_of(self.ids[body])
                if last.get(key, (0, 0))[0] > self.ids[body]:
                    yield f"{body!r} (publish {turn} of {connection}) is before publish {last[key][1]}"
                last[key] = self.ids[body], turn


class Answer(asyncio.Protocol):
    """Takes what comes first."""

    def __init__(self, answer: asyncio.Future[bytes]) -> None:
        self._answer = answer

    def data_received(self, data):
        if not self._answer.done():
            self._answer.set_result(data)

    def connection_lost(self, exc):
        if not self._answer.done():
            self._answer.set_result(b"")


def run(seed: int, durability: str | None = None) -> PartitionsWorld:
    """Play one seed; return its world.

    Raises:
        AssertionError: something was wrong.
    """
    with Simulation(seed) as sim:
        world = PartitionsWorld(sim, durability)
        sim.run(world.play())
        problems = world.problems()
        if problems:
            error = AssertionError("\n".join(problems))
            error.add_note(sim.describe())
            raise error
        return world


def trace_hash(seed: int) -> str:
    """Equal for equal runs of one seed."""
    with Simulation(seed) as sim:
        sim.run(PartitionsWorld(sim).play())
        return sim.trace_hash
