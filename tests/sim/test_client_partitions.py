"""Order through everything: partitions whose leaders move, die and forget to answer, in simulated worlds.

What must hold for every seed:

- a message that was acknowledged is in its partition's log; one that was refused is not;
- messages of a sharding id are in one partition, the first copies of the acknowledged ones in the order of the calls;
- what failed is not overtaken: a call that was made before the failure was told did not succeed;
- a publish ends within its deadline;
- consumed in order: the first copies come in the order of the log, each of them, and no violation is seen;
- nothing is left over: no byte in flight, no line, no task.

The nsqds are :mod:`tests.unit.client.fake_cluster`: their logs are common, as replicas are.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.sim.loop import share
from tests.unit.client.blocking_client import seeds_of_both
from tests.unit.client.cluster_world import ClusterWorld
from tests.unit.client.fake_cluster import HANG_UP, OK, SILENCE, STORE_AND_HANG_UP
from tests.unit.client.world import until

from flintmq import Message, Producer, PublishError, PublishUnknown
from flintmq.client.core.sharding import partition_of

SEEDS = 120
DEADLINE_S = 4.0
IDS = ("x", "y", "z", 7, "long sharding id")
FAULTS = (HANG_UP, STORE_AND_HANG_UP, SILENCE, "E_FAILED_ON_NOT_LEADER", "E_FAILED_ON_NOT_WRITABLE", "E_PUB_FAILED",
          "E_INVALID", "E_BAD_MESSAGE", "E_PUB_TOO_MUCH_WAITING", "E_TOPIC_NOT_EXIST")  # fmt: skip


@pytest.fixture(autouse=True)
def quiet():
    """What is logged about planted faults is not what is looked for."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@dataclass(eq=False)
class Call:
    """One publish: when it was made and told, as numbers that grow, and how it ended."""

    sharding_id: object
    bodies: list[bytes]
    began: int
    ended: int = 0
    error: PublishError | None = None


@dataclass
class Play:
    """One seed's story."""

    world: ClusterWorld
    calls: list[Call] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    now: int = 0
    is_calm: bool = False

    def tick(self) -> int:
        self.now += 1
        return self.now

    async def publish(self, producer: Producer, call: Call, options: dict[str, Any]) -> None:
        began_s = self.world.now
        try:
            if len(call.bodies) > 1:
                await producer.mpub("t", call.bodies, sharding_id=call.sharding_id)  # type: ignore[call-overload]
            else:
                await producer.pub("t", call.bodies[0], sharding_id=call.sharding_id, **options)  # type: ignore[call-overload]
        except PublishError as error:
            call.error = error
        call.ended = self.tick()
        if self.world.now - began_s > DEADLINE_S + 0.01:
            self.problems.append(f"{call} took {self.world.now - began_s:.3f} s")

    async def producing(self, producer: Producer) -> None:
        random = self.world.sim.random
        tasks = []
        for number in range(random.randint(20, 120)):
            bodies = [b"%d-%d" % (number, part) for part in range(1 if random.random() < 0.85 else 3)]
            call = Call(random.choice(IDS), bodies, self.tick())
            options: dict[str, Any] = {"trace_id": number} if random.random() < 0.1 else {}
            self.calls.append(call)
            tasks.append(asyncio.create_task(self.publish(producer, call, options)))
            if random.random() < 0.4:
                await asyncio.sleep(random.choice((0.0, 0.001, 0.05, 0.3)))
        await asyncio.gather(*tasks)

    def answer(self, name: str, command: str, number: int, bodies: list[bytes]) -> str:
        random = self.world.sim.random
        if self.is_calm or random.random() < 0.85:
            return OK
        return str(random.choice(FAULTS))

    async def nemesis(self) -> None:
        random, cluster = self.world.sim.random, self.world.cluster
        names = [*cluster.nodes]
        for _ in range(random.randint(1, 6)):
            await asyncio.sleep(random.uniform(0.05, 1.0))
            fault = random.choice(("move", "move", "lag", "kill", "leaderless", "lookup", "cut"))
            number = random.randrange(len(cluster.topics["t"].partitions))
            partition = cluster.topics["t"].partitions[number]
            if fault == "move":
                cluster.move("t", number, random.choice(names), closes=random.random() < 0.5)
            elif fault == "lag":
                leader = random.choice(names)
                cluster.move("t", number, leader, listed=partition.listed, closes=random.random() < 0.5)
                await asyncio.sleep(random.uniform(0.0, 1.5))
                partition.listed = leader
            elif fault == "leaderless":
                cluster.move("t", number, "", listed="")
                await asyncio.sleep(random.uniform(0.0, 2.0))
                cluster.move("t", number, random.choice(names))
            elif fault == "kill":
                name = random.choice(names)
                self.world.kill(name)
                await asyncio.sleep(random.uniform(0.0, 1.0))
                for each in cluster.topics["t"].partitions.values():
                    if each.leader == name and random.random() < 0.7:
                        cluster.move("t", each.number, random.choice([other for other in names if other != name]))
                await asyncio.sleep(random.uniform(0.0, 1.0))
                self.world.start(name)
            elif fault == "lookup":
                cluster.broken_lookups.add(random.choice(cluster.lookups))
                await asyncio.sleep(random.uniform(0.0, 2.0))
                cluster.broken_lookups.clear()
            else:
                self.world.sim.network.partition("driver", random.choice(names))
                await asyncio.sleep(random.uniform(0.0, 2.0))
                self.world.sim.network.heal()

    def handle(self, message: Message) -> None:
        random = self.world.sim.random
        if not self.is_calm and random.random() < 0.1:
            raise ValueError("not now")
        self.messages.append(message)

    async def run(self) -> None:
        cluster, random = self.world.cluster, self.world.sim.random
        cluster.create("t", random.choice((1, 2, 5)), is_ordered=True)
        cluster.answer = self.answer
        for node in cluster.nodes.values():
            node.knows_sub_order = random.random() < 0.5
        consumer = self.world.consumer(
            ordered=True, handler=self.handle, inline=True, max_in_flight=random.choice((1, 3, 50)),
            max_backoff=random.choice((0, 0.5)), backoff=0.1, requeue_delay=0.1, low_rdy_idle_timeout=0.2,
            low_rdy_timeout=0.5, heartbeat_interval=1,
        )  # fmt: skip
        options = {"timeout": DEADLINE_S, "batch": random.random() < 0.8, "retry_unknown": random.random() < 0.8}
        producer = self.world.producer(heartbeat_interval=1, **options)
        async with consumer:
            async with producer:
                await asyncio.gather(self.producing(producer), self.nemesis())
                assert "to t" not in producer.describe()
            assert producer.stats().bytes_in_flight == 0
            self.is_calm = True
            await asyncio.sleep(DEADLINE_S)  # what a lost connection had sent may be stored until then
            await until(lambda: self.finished() == len(cluster.stored("t")), 300)
            assert consumer.stats().order_violations == 0

    def finished(self) -> int:
        partitions = self.world.cluster.topics["t"].partitions.values()
        return sum(len(channel.finished) for each in partitions for channel in each.channels.values())

    # --- what must hold ---

    def check(self) -> None:
        topic = self.world.cluster.topics["t"]
        where: dict[bytes, tuple[int, int]] = {}
        for partition in topic.partitions.values():
            for position, body in reversed([*enumerate(partition.bodies)]):
                assert where.get(body, (partition.number, 0))[0] == partition.number
                where[body] = partition.number, position
        for call in self.calls:
            home = partition_of(call.sharding_id, len(topic.partitions))  # type: ignore[arg-type]
            for body in call.bodies:
                if call.error is None:
                    assert where.get(body, (None, 0))[0] == home, (call, "acknowledged and not in its partition")
                elif not isinstance(call.error, PublishUnknown):
                    assert body not in where, (call, "refused and stored")
        for sharding_id in IDS:
            calls = [call for call in self.calls if call.sharding_id == sharding_id]
            positions = [where[body][1] for call in calls if call.error is None for body in call.bodies]
            assert positions == sorted(positions), (sharding_id, "out of order")
            for index, failed in enumerate(calls):
                for later in calls[index + 1 :]:
                    if failed.error is not None and later.began < failed.ended:
                        assert later.error is not None, (failed, later, "overtaken")
        for partition in topic.partitions.values():
            came = [message.internal_id for message in self.messages if message.partition == partition.number]
            assert list(dict.fromkeys(came)) == [stored.internal_id for stored in partition.log]
        assert self.problems == []


@pytest.mark.parametrize(("client", "seed"), seeds_of_both(share(SEEDS)))
def test_order_through_moves_cuts_and_retries(client, seed):
    with ClusterWorld("a", "b", "c", seed=seed, client=client) as world:
        play = Play(world)
        world.sim.run(play.run(), 3600.0)
        play.check()
