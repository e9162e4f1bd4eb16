"""The engine's own rules, in virtual time: what ends a turn, when a sync, a timer or a flush begins, and what follows.

The broker and the disk are real ones, in memory. Blocking calls take a little virtual time, can be held up and fail.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from tests.sim.disk import CrashingDisk
from tests.sim.loop import Simulation

from flintmq.broker.broker import Broker, BrokerOptions
from flintmq.broker.channel import Channel
from flintmq.broker.logs import log_directory
from flintmq.broker.partition import Partition, PublishGroup
from flintmq.broker.publishes import Publishes
from flintmq.broker.subscription import Subscription
from flintmq.broker.topic import Topic
from flintmq.errors import StorageError, WriteFailed
from flintmq.limits import CURSOR_FLUSH_S
from flintmq.message import FRAME_OVERHEAD_BYTES, MESSAGE_HEADER
from flintmq.nsqd import engine as engine_module
from flintmq.nsqd.engine import Engine
from flintmq.storage import ChannelStore, PartitionLog
from flintmq.topic_meta import TopicMeta

SECOND = 1_000_000_000
MSG_TIMEOUT_NS = 60 * SECOND
POWER_CUTS = 8
TURN_S = 0.001  # virtual: longer than everything that is ready takes, shorter than every timer


class Consumer:
    """A connection: what the engine writes to it at the end of a turn.

    Attributes:
        written: ``(body, attempts, timestamp_ns)`` of each message whose frame was written.
    """

    peer = "consumer"

    def __init__(self, world: World, channel: Channel, rdy_count: int = 100) -> None:
        self.written: list[tuple[bytes, int, int]] = []
        self.channel = channel
        self._world = world
        self._out: list[bytes | memoryview] = []
        self.subscription = Subscription(self._out, MSG_TIMEOUT_NS, 15 * MSG_TIMEOUT_NS, owner=self)
        channel.add(self.subscription)
        self.subscription.is_open = True
        self.subscription.rdy_count = rdy_count
        world.broker.mark(channel)
        world.engine.schedule()

    @property
    def bodies(self) -> list[bytes]:
        return [body for body, _, _ in self.written]

    def finish(self, *sequences: int) -> None:
        """Finish messages, at once, as its connection does in its turn."""
        assert self.channel.finish(self.subscription, sequences) == []
        self._world.broker.mark(self.channel)
        self._world.engine.schedule()

    def flush(self) -> None:
        data = b"".join(bytes(part) for part in self._out)
        self._out.clear()
        while data:
            size, _, timestamp_ns, attempts, _ = MESSAGE_HEADER.unpack_from(data)
            self.written.append((data[FRAME_OVERHEAD_BYTES : size + 4], attempts, timestamp_ns))
            data = data[size + 4 :]

    def abort(self) -> None:
        raise AssertionError("it can be written to")


class World:
    """An engine on a broker on a disk.

    Attributes:
        calls: name and arguments of every blocking call that began.
        held: names of calls that do not go on.
        failing: how often calls of a name fail with something that nobody expects.
    """

    def __init__(
        self, sim: Simulation, durability: str, sync_every: int, sync_timeout_s: float, **options: Any
    ) -> None:
        self.sim = sim
        self.disk = CrashingDisk(rng=random.Random(sim.seed))
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.held: set[str] = set()
        self._released = asyncio.Event()
        self.failing: dict[str, int] = {}
        self._durability = durability, sync_every, round(sync_timeout_s * SECOND)
        self._options = BrokerOptions(**options)
        self.broker: Broker
        self.engine: Engine
        self.open()

    def open(self) -> None:
        """Start on what is on the disk."""
        durability, sync_every, sync_timeout_ns = self._durability
        files = self.disk.attach()
        env = replace(self.sim.driver.env, run_blocking=self._run_blocking)
        self.broker = Broker(files, ChannelStore(files), self._options, random.Random(1), print)
        self.broker.open(env.clock.wall_ns())
        self.engine = Engine(
            env, self.broker, durability=durability, sync_every=sync_every, sync_timeout_ns=sync_timeout_ns
        )

    def hold(self, name: str) -> None:
        """Let blocking calls of a name begin and not go on until :meth:`release`."""
        self._released.clear()
        self.held.add(name)

    def release(self) -> None:
        self.held.clear()
        self._released.set()

    async def _run_blocking(self, function: Callable[..., Any], /, *args: Any) -> Any:
        name = function.__name__
        self.calls.append((name, args))
        await asyncio.sleep(TURN_S / 10)
        while name in self.held:
            await self._released.wait()
        if self.failing.get(name):
            self.failing[name] -= 1
            raise ZeroDivisionError(name)
        return function(*args)

    def ping(self) -> str | None:
        """What /ping says is wrong."""
        return self.engine.health

    def count(self, name: str) -> int:
        """How many blocking calls of a name have begun."""
        return sum(each == name for each, _ in self.calls)

    def lose_power(self) -> None:
        """The machine is gone from one moment to the next, and is started again."""
        self.disk.crash(power_loss=True, rng=random.Random(self.sim.seed))
        self.open()

    def topic(self, name: str = "t", meta: TopicMeta | None = None) -> Topic:
        topic = self.broker.topic(name, 1)
        if meta is not None:
            topic.first_partition.meta = meta
        return topic

    def partition(self, name: str = "t") -> Partition:
        return self.broker.topics[name].first_partition

    def publish(self, *bodies: bytes, topic: str = "t", delay_s: float = 0) -> PublishGroup:
        """Publish at once, as a connection does in its turn."""
        due_ns = self.engine.due_clock_ns() + round(delay_s * SECOND) if delay_s else 0
        group = self.broker.publish_to(self.partition(topic), list(bodies), due_ns)
        self.engine.schedule()
        return group

    def consumer(self, topic: str = "t", channel: str = "c", rdy_count: int = 100) -> Consumer:
        ((made,), _) = self.broker.channel(self.broker.topics[topic], channel)
        return Consumer(self, made, rdy_count)


def run(
    scenario: Callable[[World], Coroutine[Any, Any, None]],
    durability: str = "fsync",
    *,
    seed: int = 0,
    strict: bool = True,
    sync_every: int = 1000,
    sync_timeout_s: float = 2.0,
    **options: Any,
) -> None:
    with Simulation(seed, strict=strict) as sim:

        async def main() -> None:
            await scenario(World(sim, durability, sync_every, sync_timeout_s, **options))

        sim.run(main())


async def turn() -> None:
    """Let everything happen that is ready and waits for no timer and no disk."""
    await asyncio.sleep(TURN_S / 100)


async def a_while(seconds: float = TURN_S) -> None:
    await asyncio.sleep(seconds)


# -- syncs -------------------------------------------------------------------------------------------------------------


def test_a_publish_is_answered_and_delivered_when_its_sync_has_ended_and_not_before():
    async def scenario(world: World) -> None:
        world.topic()
        consumer = world.consumer()
        world.hold("run_tickets")
        group = world.publish(b"x")
        await a_while(30)
        assert (group.ended, consumer.bodies, world.count("run_tickets")) == (False, [], 1)
        world.release()
        await a_while()
        assert (group.ended, group.error, consumer.bodies) == (True, None, [b"x"])

    run(scenario)


def test_without_syncs_a_publish_is_answered_and_delivered_in_its_turn():
    async def scenario(world: World) -> None:
        world.topic()
        consumer = world.consumer()
        await a_while()
        group = world.publish(b"x")
        await turn()
        assert (group.ended, group.error, consumer.bodies, world.count("run_tickets")) == (True, None, [b"x"], 0)

    run(scenario, "os")


def test_what_is_published_during_a_sync_waits_for_the_next_and_one_is_under_way_at_a_time():
    async def scenario(world: World) -> None:
        world.topic()
        consumer = world.consumer()
        world.hold("run_tickets")
        first = world.publish(b"a")
        await a_while()
        during = []
        for body in (b"b", b"c"):  # in two turns
            during.append(world.publish(body))
            await a_while()
        assert world.count("run_tickets") == 1
        world.release()
        while not first.ended:
            await turn()
        assert [group.ended for group in during] == [False, False]
        assert world.count("run_tickets") == 2
        await a_while()
        assert [(group.ended, group.error) for group in during] == [(True, None)] * 2
        assert (consumer.bodies, world.count("run_tickets")) == ([b"a", b"b", b"c"], 2)

    run(scenario)


@pytest.mark.parametrize("why", ["disk", "thread"])
def test_what_could_not_be_synced_is_an_error_and_is_not_delivered(why, caplog):
    async def scenario(world: World) -> None:
        world.topic()
        consumer = world.consumer()
        await a_while()
        if why == "disk":
            world.disk.fail("sync")
        else:
            world.failing["run_tickets"] = 1
        group = world.publish(b"x")
        await a_while()
        assert group.ended and isinstance(group.error, WriteFailed)
        later = world.publish(b"y")
        await a_while()
        assert later.ended and isinstance(later.error, WriteFailed)
        assert consumer.bodies == []
        assert "the partition takes no more messages until nsqd is restarted" in caplog.text
        assert str(later.error).endswith("; the partition takes no more messages until nsqd is restarted")

    run(scenario)


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_a_write_that_fails_is_told_once_and_says_until_when(durability, caplog):
    async def scenario(world: World) -> None:
        world.topic()
        await a_while()
        world.disk.fail("write")
        for body in (b"x", b"y"):
            group = world.publish(body)
            await a_while()
            assert group.ended
            assert str(group.error).endswith("; the partition takes no more messages until nsqd is restarted")
        log = world.partition().log
        assert isinstance(log, PartitionLog)
        told = [record.message for record in caplog.records if record.levelno >= logging.ERROR]
        (line,) = told
        assert line.startswith(f"writing to {log.directory} failed: ") and "Errno 5" in line
        assert line.endswith("; the partition takes no more messages until nsqd is restarted")

    run(scenario, durability)


def test_a_log_that_cannot_be_recovered_is_told_of(caplog):
    async def scenario(world: World) -> None:
        world.topic()
        await world.engine.close()
        world.engine.broker._files.close()
        files = world.disk.attach()
        path = f"{log_directory('t', 0)}/log.meta"
        files.remove(path)
        world.disk.fail("create", path=path)
        broker = Broker(files, ChannelStore(files), BrokerOptions(), random.Random(1), print)
        Engine(world.sim.driver.env, broker, durability="os", sync_every=1, sync_timeout_ns=1)
        broker.open(1)
        assert "log.meta" in caplog.text
        assert caplog.text.count("; the partition takes no more messages until nsqd is restarted") == 1

    run(scenario)


@pytest.mark.parametrize("is_failing", [False, True])
def test_of_a_topic_deleted_during_the_sync_the_publishers_are_answered(is_failing):
    async def scenario(world: World) -> None:
        world.topic()
        await a_while()
        world.hold("run_tickets")
        group = world.publish(b"x")
        await a_while()
        if is_failing:
            world.failing["run_tickets"] = 1
        world.broker.delete_topic("t")
        world.release()
        await a_while()
        assert (group.ended, group.error) == (True, None)

    run(scenario)


def test_a_sync_that_nobody_expected_to_fail_tells_the_publishers_and_ping_and_the_next_one_runs(monkeypatch):
    async def scenario(world: World) -> None:
        world.topic("a")
        world.topic("b")
        world.engine.start()
        world.hold("run_tickets")
        first = world.publish(b"x", topic="a")
        await a_while()
        second = world.publish(b"y", topic="b")
        await a_while()
        synced = world.engine._synced

        def once(_groups: list[PublishGroup]) -> None:
            monkeypatch.setattr(world.engine, "_synced", synced)
            raise ZeroDivisionError("once")

        monkeypatch.setattr(world.engine, "_synced", once)
        world.release()
        await a_while()
        assert first.ended and isinstance(first.error, WriteFailed)
        assert (second.ended, second.error) == (True, None)
        await a_while(10)
        assert world.ping() == "sync ended unexpectedly: ZeroDivisionError('once')"
        third = world.publish(b"z", topic="b")
        await a_while()
        assert (third.ended, third.error) == (True, None)
        await world.engine.close()

    run(scenario)


def test_a_topic_with_a_sync_of_its_own_gets_it_for_each_publish_or_every_so_many():
    async def scenario(world: World) -> None:
        world.topic("each", TopicMeta(partition_num=1, syncdisk=1))
        for name in ("a", "b"):
            world.topic(name, TopicMeta(partition_num=1, syncdisk=2))
        world.hold("run_tickets")
        waiting = world.publish(b"x", topic="each")
        await a_while()
        assert not waiting.ended
        for name in ("a", "b"):  # both become due while a sync runs, in different turns
            world.publish(b"1", b"2", topic=name)
            await a_while()
        world.release()
        await a_while()
        assert waiting.ended
        assert [world.partition(name).log.synced_sequence for name in ("each", "a", "b")] == [2, 3, 3]
        assert world.count("run_tickets") == 2
        world.publish(b"3", topic="a")
        await a_while(60)
        assert world.partition("a").log.synced_sequence == 3, "one message alone is not due"

    run(scenario, "os")


# -- syncs by interval -------------------------------------------------------------------------------------------------


def test_an_interval_ends_with_a_sync_and_the_next_begins_with_the_next_publish():
    async def scenario(world: World) -> None:
        log = world.topic().first_partition.log
        await a_while(10)
        for end in (2, 3, 4):
            group = world.publish(b"x")
            await a_while(1.9)
            assert group.ended
            assert log.synced_sequence < end
            await a_while(0.2)
            assert log.synced_sequence == end
        assert world.count("run_tickets") == 3
        await a_while(60)
        assert world.count("run_tickets") == 3, "nothing was published"

    run(scenario, "interval", sync_timeout_s=2.0)


def test_so_many_messages_end_an_interval_early_and_are_counted_anew():
    async def scenario(world: World) -> None:
        log = world.topic().first_partition.log
        for _ in range(4):
            assert world.count("run_tickets") == 0
            world.publish(b"x")
            await a_while()
        assert (log.synced_sequence, world.count("run_tickets")) == (5, 1)
        world.publish(b"x")
        await a_while(0.5)
        assert (log.synced_sequence, world.count("run_tickets")) == (5, 1)

    run(scenario, "interval", sync_every=4)


def test_what_comes_during_a_sync_is_synced_an_interval_later_even_when_it_was_due():
    async def scenario(world: World) -> None:
        log = world.topic().first_partition.log
        world.hold("run_tickets")
        world.publish(b"a", b"b")
        await a_while()
        world.publish(b"c", b"d")  # due as well, and the sync that runs has begun without it
        await a_while()
        world.release()
        await a_while(2.1)
        assert log.synced_sequence == 5

    run(scenario, "interval", sync_every=2, sync_timeout_s=2.0)


def test_how_far_a_sync_that_nobody_waited_for_came_is_written_down():
    async def scenario(world: World) -> None:
        world.topic()
        world.engine.start()
        world.publish(b"x")
        await a_while(1)
        assert (world.partition().log.synced_sequence, world.count("run_flush") > 0) == (1, True)
        await a_while(3)
        assert world.partition().log.synced_sequence == 2
        world.disk.crash(power_loss=False, rng=random.Random(0))
        stored = ChannelStore(world.disk.attach()).load()
        assert stored.logs["t", 0].synced == 2

    run(scenario, "interval", sync_timeout_s=2.0)


# -- turns -------------------------------------------------------------------------------------------------------------


def test_more_than_one_turn_writes_is_written_by_the_turns_after_it(monkeypatch):
    async def scenario(world: World) -> None:
        world.topic()
        groups = [world.publish(bytes(600_000)) for _ in range(12)]
        honest, written = Publishes.write_pending, []

        def write_pending(publishes: Publishes, wall_ns: int) -> list[PublishGroup]:
            found = honest(publishes, wall_ns)
            written.append(len(found))
            return found

        monkeypatch.setattr(Publishes, "write_pending", write_pending)
        await a_while()
        assert len(written) > 1, "one turn does not write all of it"
        assert all(group.ended and group.error is None for group in groups)

    run(scenario, "os")


def test_a_turn_that_fails_is_followed_by_the_next(monkeypatch):
    async def scenario(world: World) -> None:
        world.topic()
        write_pending = Publishes.write_pending

        def once(_publishes: Publishes, _wall_ns: int) -> list[PublishGroup]:
            monkeypatch.setattr(Publishes, "write_pending", write_pending)
            raise ZeroDivisionError("once")

        monkeypatch.setattr(Publishes, "write_pending", once)
        world.engine.received_bytes = 10
        group = world.publish(b"x")
        await a_while()
        assert (group.ended, group.error, world.engine.received_bytes) == (True, None, 0)
        assert [repr(failure.exception) for failure in world.sim.failures] == ["ZeroDivisionError('once')"]
        world.sim.failures.clear()

    run(scenario, "os", strict=False)


def test_connections_are_not_read_while_a_turn_has_taken_enough():
    async def scenario(world: World) -> None:
        engine, enough = world.engine, world.broker.budget.publishing_max_bytes
        engine.received_bytes = enough
        assert not engine.is_crowded
        engine.received_bytes = enough + 1
        assert engine.is_crowded
        await turn()
        assert not engine.is_crowded, "asking for it ended the turn"
        world.broker.publishes.left_bytes = enough
        engine.received_bytes = 1
        assert engine.is_crowded, "what earlier turns left counts"

    run(scenario, "os")


def test_memory_is_looked_at_when_a_turn_finds_it_short(monkeypatch):
    begun = []

    class Watch:
        def __init__(self, *_: object) -> None:
            pass

        def begin(self) -> None:
            begun.append(1)

    monkeypatch.setattr(engine_module, "MemoryWatch", Watch)

    async def scenario(world: World) -> None:
        budget = world.broker.budget
        for size, count in ((budget.output_short_bytes, 0), (budget.output_short_bytes + 1, 1)):
            budget.output_bytes = size
            world.engine.schedule()
            await turn()
            assert len(begun) == count

    run(scenario, "os")


# -- deadlines and clocks ----------------------------------------------------------------------------------------------


def test_a_message_comes_again_at_each_timeout_without_any_other_event():
    async def scenario(world: World) -> None:
        world.topic()
        consumer = world.consumer()
        world.publish(b"x")
        for attempts in (1, 2, 3):
            await a_while(1)
            assert [(body, each) for body, each, _ in consumer.written[attempts - 1 :]] == [(b"x", attempts)]
            await a_while(58)
            assert len(consumer.written) == attempts
            await a_while(1.1)

    run(scenario, "os")


def test_of_two_deadlines_the_nearer_one_is_kept_whichever_is_known_first():
    async def scenario(world: World) -> None:
        world.topic()
        consumer = world.consumer()
        for delays in ((50, 5), (5, 50)):
            for delay in delays:
                world.publish(b"%d" % delay, delay_s=delay)
                await a_while()
            await a_while(4.9)
            assert consumer.bodies == []
            await a_while(0.2)
            assert consumer.bodies == [b"5"]
            await a_while(45)
            assert consumer.bodies == [b"5", b"50"]
            consumer.finish(*range(consumer.channel.floor, consumer.channel.next))
            consumer.written.clear()

    run(scenario, "os")


class HeldUp:
    """Clocks between whose first two looks ten seconds pass."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self._late_ns = 0

    def wall_ns(self) -> int:
        now_ns, self._late_ns = self._clock.wall_ns() + self._late_ns, 10 * SECOND
        return now_ns

    def monotonic_ns(self) -> int:
        return self._clock.monotonic_ns() + self._late_ns

    boottime_ns = monotonic_ns


def test_a_process_that_is_held_up_between_two_looks_at_clocks_takes_that_for_no_step(caplog):
    async def scenario(world: World) -> None:
        world.engine.env = replace(world.engine.env, clock=HeldUp(world.engine.env.clock))
        world.engine._watch_wall_clock()
        assert world.broker.clock_shift_ns == 0

    run(scenario, "os")
    assert "wall clock" not in caplog.text


@pytest.mark.parametrize("jump_s", [3600, -3600])
def test_a_clock_that_is_set_moves_no_delay_and_is_told_once(jump_s, caplog):
    async def scenario(world: World) -> None:
        world.topic()
        world.engine.start()
        consumer = world.consumer()
        world.publish(b"later", delay_s=10)
        await a_while(1)
        world.sim.driver.jump_wall_clock(jump_s)
        await a_while(1)
        assert world.broker.clock_shift_ns == jump_s * SECOND
        world.publish(b"also", delay_s=5)
        await a_while(4.9)
        assert consumer.bodies == []
        await a_while(0.2)
        assert consumer.bodies == [b"also"]
        await a_while(3)
        assert consumer.bodies == [b"also", b"later"]
        await a_while(10)
        told = [record.getMessage() for record in caplog.records if "wall clock" in record.getMessage()]
        assert told == [f"the wall clock moved by {jump_s:.3f} s"]
        world.publish(b"now")
        await a_while()
        wall_ns = world.engine.env.clock.wall_ns()
        body, _, timestamp_ns = consumer.written[-1]
        assert body == b"now"
        assert abs(timestamp_ns - wall_ns) < SECOND, "messages carry the wall clock as it is set"
        world.sim.driver.jump_wall_clock(-jump_s)
        await a_while(1)
        assert world.broker.clock_shift_ns == 0
        await world.engine.close()

    run(scenario, "os")


@pytest.mark.parametrize("is_clean", [True, False])
@pytest.mark.parametrize("jump_s", [3600, -3600])
def test_a_start_finds_the_delays_of_what_no_channel_had_reached(jump_s, is_clean):
    async def scenario(world: World) -> None:
        world.topic()
        world.engine.start()
        world.publish(b"the topic is there")
        await a_while(1)
        world.sim.driver.jump_wall_clock(jump_s)
        world.publish(b"soon", delay_s=15)  # in the turn that meets the clock as it was set
        world.publish(b"later", delay_s=90)
        if is_clean:
            await a_while(1)
            await world.engine.close()
            world.engine.broker._files.close()
            world.open()
        else:
            await a_while(0.1)
            world.lose_power()
        world.engine.start()
        consumer = world.consumer()
        seen = []
        for passed_s in (13, 3, 70, 5):
            await a_while(passed_s)
            seen.append([*dict.fromkeys(consumer.bodies)])  # none is finished, so they come again
        first = [b"the topic is there"]
        assert seen == [first, [*first, b"soon"], [*first, b"soon"], [*first, b"soon", b"later"]]
        await world.engine.close()

    run(scenario)


def test_small_steps_of_the_clock_are_left_alone_until_they_add_up():
    async def scenario(world: World) -> None:
        world.engine.start()
        for _ in range(2):
            world.sim.driver.jump_wall_clock(0.02)
            await a_while(1)
            assert world.broker.clock_shift_ns == 0
        world.sim.driver.jump_wall_clock(0.02)
        await a_while(1)
        assert world.broker.clock_shift_ns == 60_000_000
        await world.engine.close()

    run(scenario, "os")


# -- new topics --------------------------------------------------------------------------------------------------------


def test_a_new_topic_takes_messages_and_answers_when_it_has_its_files_and_others_do_not_wait():
    async def scenario(world: World) -> None:
        world.topic()
        world.hold("create_logs")
        for name in ("a", "b"):  # b comes while the files of a are made
            world.broker.topic(name, 1, later=True)
            made = world.publish(b"x", topic=name)
            await a_while()
            assert not made.ended
        other = world.publish(b"y")
        await a_while()
        assert other.ended
        assert world.count("create_logs") == 1
        world.release()
        await a_while()
        assert world.count("create_logs") == 2
        for name in ("a", "b"):
            assert world.partition(name).log.committed_sequence == 2
        world.broker.topic("c", 1, later=True)
        third = world.publish(b"x", topic="c")
        await a_while()
        assert (third.ended, third.error) == (True, None)

    run(scenario)


@pytest.mark.parametrize("seed", range(POWER_CUTS))
def test_what_was_answered_of_a_new_topic_survives_a_power_cut(seed):
    async def scenario(world: World) -> None:
        world.broker.topic("t", 1, later=True)
        group = world.publish(b"x")
        while not group.ended:
            await turn()
        world.lose_power()
        assert world.partition().log.next_sequence == 2

    run(scenario, seed=seed)


@pytest.mark.parametrize("seed", range(POWER_CUTS))
def test_with_intervals_a_new_topic_itself_survives_a_power_cut(seed):
    async def scenario(world: World) -> None:
        world.broker.topic("t", 1, later=True)
        group = world.publish(b"x")
        while not group.ended:
            await turn()
        world.lose_power()
        assert "t" in world.broker.topics

    run(scenario, "interval", seed=seed)


def test_a_topic_whose_files_cannot_be_made_is_an_error_and_the_next_publisher_tries_again(caplog):
    async def scenario(world: World) -> None:
        for name in ("a", "b"):
            world.failing["create_logs"] = 1
            world.broker.topic(name, 1, later=True)
            group = world.publish(b"x", topic=name)
            await a_while()
            assert group.ended and isinstance(group.error, StorageError)
            assert world.broker.topics == {}
            world.broker.topic(name, 1, later=True)
            again = world.publish(b"x", topic=name)
            await a_while()
            assert (again.ended, again.error) == (True, None)
            world.broker.delete_topic(name)
        assert "creating topics ended unexpectedly: ZeroDivisionError('create_logs')" in caplog.text

    run(scenario)


# -- progress ----------------------------------------------------------------------------------------------------------


def test_a_flush_that_fails_is_told_by_ping_and_tried_again(caplog):
    caplog.set_level(logging.INFO)

    async def scenario(world: World) -> None:
        told: list[BaseException | None] = []
        world.topic()
        world.engine.start()
        await a_while(1)
        world.engine.on_metadata = lambda: told.append(None)
        world.disk.fail("commit", times=2)
        world.broker.channel(world.broker.topics["t"], "c")
        assert world.broker.when_metadata_durable(told.append)
        world.engine.schedule()
        await a_while(0.05)
        assert (world.ping() or "").startswith("writing progress failed: ")
        assert [isinstance(error, StorageError) for error in told] == [True], "who waits is told, and others are not"
        await a_while(1.2)
        assert world.ping(), "the second one failed as well"
        assert len(told) == 1
        await a_while(1.2)
        assert (world.ping(), told[1:]) == (None, [None])
        assert caplog.text.count("trying again every 1 s") == 1, "not for each of them"
        assert caplog.text.count("progress is written again") == 1
        world.disk.crash(power_loss=False, rng=random.Random(0))
        assert ("t", 0, "c") in ChannelStore(world.disk.attach()).load().channels

    run(scenario)


@pytest.mark.parametrize("what", ["metadata", "urgent"])
def test_what_somebody_waits_for_is_flushed_at_once(what):
    async def scenario(world: World) -> None:
        world.topic()
        consumer = world.consumer()
        world.engine.start()
        await a_while(10 * CURSOR_FLUSH_S + CURSOR_FLUSH_S / 10)
        flushed: list[BaseException | None] = []
        before = world.count("run_flush")
        if what == "metadata":
            world.broker.channel(world.broker.topics["t"], "new")
            assert world.broker.when_metadata_durable(flushed.append)
        else:
            world.broker.ask(consumer.channel, lambda _store, _cursor: None, lambda _, error: flushed.append(error))
        world.engine.schedule()
        await a_while(CURSOR_FLUSH_S / 10)
        assert (world.count("run_flush"), flushed) == (before + 1, [None])
        await world.engine.close()

    run(scenario)


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_progress_is_synced_where_publishes_are(durability):
    async def scenario(world: World) -> None:
        world.topic()
        world.engine.start()
        consumer = world.consumer()
        world.publish(b"x")
        await a_while(1)
        world.calls.clear()
        consumer.finish(1)
        await a_while(1)
        assert [args[-1] for name, args in world.calls if name == "run_flush"] == [durability == "fsync"]
        await world.engine.close()

    run(scenario, durability)


def test_retention_is_looked_at_now_and_then_when_nothing_happens(monkeypatch):
    async def scenario(world: World) -> None:
        looked: list[float] = []
        monkeypatch.setattr(world.broker, "retain_all", lambda _wall_ns: looked.append(world.sim.now_s))
        world.engine.start()
        await a_while(100)
        assert [round(each / 30) for each in looked] == [1, 2, 3]
        await world.engine.close()

    run(scenario)


@pytest.mark.parametrize("durability", ["fsync", "os", "interval"])
def test_a_disk_full_of_what_is_consumed_gets_room_without_a_publish(durability, monkeypatch):
    async def scenario(world: World) -> None:
        world.topic()
        consumer = world.consumer()
        world.engine.start()
        world.publish(b"x" * 10_000)
        await a_while(3)
        log = world.partition().log
        assert isinstance(log, PartitionLog)
        world.engine.make_room(1)
        assert len(log.segments()) == 1, "it is not finished"
        consumer.finish(1)
        await a_while(2 * CURSOR_FLUSH_S)
        world.hold("run_tickets")
        world.engine.make_room(1)
        await a_while(3)
        for _ in range(3):
            world.engine.make_room(1)
        assert len(log.segments()) == 2, "what was sealed is waited for"
        world.release()
        await a_while(2 * CURSOR_FLUSH_S)
        assert log.start_sequence == log.next_sequence == 2
        retained: list[int] = []
        monkeypatch.setattr(world.broker, "retain_all", retained.append)
        group = world.publish(b"y")
        await a_while(3)
        assert group.ended and group.error is None and consumer.bodies[1:] == [b"y"]
        assert retained == [], "with room, later syncs are about messages alone"
        await world.engine.close()
        world.engine.make_room(1)

    run(scenario, durability)


async def publish_and_finish(world: World, consumer: Consumer, count: int) -> None:
    """Each message fills a segment of 1000 bytes."""
    for _ in range(count):
        group = world.publish(b"x" * 900)
        await a_while()
        assert (group.ended, group.error) == (True, None)
    await a_while(1)
    consumer.finish(*range(consumer.channel.floor, world.partition().log.next_sequence))
    await a_while(2 * CURSOR_FLUSH_S)


@pytest.mark.parametrize("jump_s", [300_000, -300_000])
@pytest.mark.parametrize("days", [0, 1])
def test_no_step_of_the_wall_clock_removes_what_retention_keeps(jump_s, days, caplog):
    async def scenario(world: World) -> None:
        world.topic(meta=TopicMeta(retention_days=days) if days else None)
        consumer = world.consumer()
        world.engine.start()
        log = world.partition().log
        await publish_and_finish(world, consumer, 6)
        world.sim.driver.jump_wall_clock(jump_s)
        await publish_and_finish(world, consumer, 1)
        for each_s in (-jump_s, 600_000):
            await a_while(100)
            assert log.start_sequence == 1
            world.sim.driver.jump_wall_clock(each_s)
        await a_while(70)
        assert log.start_sequence == 1 and "removes" not in caplog.text
        if not days:
            await a_while(400)
            assert log.start_sequence == 7
            told = [record.message for record in caplog.records if "removes" in record.message]
            assert sum(int(each.split("removes ")[1].split(" messages")[0]) for each in told) == 6
            assert all(each.startswith("TOPIC(t): retention by time removes ") for each in told)
        await world.engine.close()

    with caplog.at_level(logging.INFO):
        run(scenario, segment_bytes=1000, retention_time_ns=300 * SECOND)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_time_that_lies_ahead_does_not_keep_what_is_stored_behind_it(is_restarted, caplog):
    async def scenario(world: World) -> None:
        world.topic()
        consumer = world.consumer()
        world.engine.start()
        await publish_and_finish(world, consumer, 1)
        world.sim.driver.jump_wall_clock(30 * 365 * 86_400)
        await publish_and_finish(world, consumer, 1)
        world.sim.driver.jump_wall_clock(-30 * 365 * 86_400)
        await publish_and_finish(world, consumer, 5)
        if is_restarted:
            await world.engine.close()
            world.engine.broker._files.close()
            world.open()
            world.engine.start()
        log = world.partition().log
        await a_while(250)
        assert log.start_sequence == 1
        await a_while(100)
        assert log.start_sequence == 7
        assert caplog.text.count("messages have times that lie ahead") == 1
        await world.engine.close()

    with caplog.at_level(logging.INFO):
        run(scenario, segment_bytes=1000, retention_time_ns=300 * SECOND)


def test_what_is_known_of_producers_is_written_down_when_it_is_due_and_frees_what_waited_for_it(monkeypatch):
    async def scenario(world: World) -> None:
        retained: list[int] = []
        monkeypatch.setattr(world.broker, "retain_all", retained.append)
        world.topic()
        world.engine.start()
        world.broker.publish_to(world.partition(), [b"x"], producer=(b"me", 1))
        world.engine.schedule()
        await a_while(1)
        log = world.partition().log
        log.producers.is_snapshot_due = True
        world.broker.publishes.note_snapshot(world.partition())
        syncs = world.count("run_tickets")
        await a_while(0.5)
        assert world.count("run_tickets") == syncs + 1
        assert not log.producers.is_snapshot_due
        assert len(retained) == 1
        await world.engine.close()

    run(scenario, "os")


def test_a_snapshot_that_cannot_be_written_is_told(caplog):
    async def scenario(world: World) -> None:
        world.topic()
        world.engine.start()
        world.broker.publish_to(world.partition(), [b"x"], producer=(b"me", 1))
        world.engine.schedule()
        await a_while(1)
        world.partition().log.producers.is_snapshot_due = True
        world.disk.fail("rename")
        world.broker.publishes.note_snapshot(world.partition())
        await a_while(0.5)
        assert "cannot be written" in caplog.text
        assert world.partition().log.failed is None
        await world.engine.close()

    run(scenario, "os")


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["run_tickets", "create_logs"])
def test_settling_waits_for_what_is_under_way(call):
    async def scenario(world: World) -> None:
        world.broker.topic("t", 1, later=call == "create_logs")
        world.hold(call)
        group = world.publish(b"x")
        settled = asyncio.ensure_future(world.engine.settle())
        await a_while(60)
        assert (settled.done(), group.ended) == (False, False)
        world.release()
        await settled
        assert (group.ended, group.error) == (True, None)

    run(scenario)


@pytest.mark.parametrize("is_closing", [False, True])
def test_what_is_held_until_the_database_knows_something_is_stored_before_the_end(is_closing):
    async def scenario(world: World) -> None:
        world.topic()
        world.engine.start()
        await a_while(1)
        world.broker.channel(world.broker.topics["t"], "c")
        assert world.broker.hold_until_durable(world.broker.topics["t"], lambda _error: None)
        group = world.publish(b"x")
        await (world.engine.close() if is_closing else world.engine.settle())
        assert (group.ended, group.error) == (True, None)

    run(scenario)


def test_what_is_held_and_never_gets_free_is_an_error_at_the_end():
    async def scenario(world: World) -> None:
        world.topic()
        world.engine.start()
        await a_while(1)
        world.broker.channel(world.broker.topics["t"], "c")
        told: list[BaseException | None] = []
        assert world.broker.hold_until_durable(world.broker.topics["t"], told.append)
        world.publish(b"x")
        world.disk.fail("commit", times=1000)
        with pytest.raises(StorageError):
            await world.engine.close()
        assert [isinstance(error, StorageError) for error in told] == [True]

    run(scenario)


@pytest.mark.parametrize("durability", ["fsync", "os", "interval"])
@pytest.mark.parametrize("seed", range(POWER_CUTS))
def test_after_a_clean_end_nothing_is_lost_or_repeated_by_a_power_cut(seed, durability):
    async def scenario(world: World) -> None:
        world.topic()
        world.engine.start()
        consumer = world.consumer()
        world.publish(b"a", b"b")
        await a_while(1)
        consumer.finish(1)
        last = world.publish(b"c")  # in the very turn in which it ends
        await world.engine.close()
        assert (last.ended, last.error) == (True, None)
        world.engine.broker._files.close()
        world.disk.crash(power_loss=True, rng=random.Random(seed))
        world.open()
        log = world.partition().log
        assert (log.next_sequence, log.failed) == (4, None)
        assert world.partition().channels["c"].floor == 2
        # how far it was is known, so that a file that goes missing now would be noticed
        world.disk.crash(power_loss=False, rng=random.Random(seed))
        assert ChannelStore(world.disk.attach()).load().logs["t", 0].synced == 4

    run(scenario, durability, seed=seed)


def test_the_end_waits_for_a_flush_under_way_and_knows_its_outcome():
    async def scenario(world: World) -> None:
        world.topic()
        world.engine.start()
        world.hold("run_flush")
        await a_while(1)
        assert world.count("run_flush") == 1
        closing = asyncio.ensure_future(world.engine.close())
        await a_while(60)
        assert (closing.done(), world.count("run_flush")) == (False, 1), "no second flush beside it"
        world.release()
        await closing
        assert world.count("run_flush") == 2

    run(scenario)


def test_progress_that_cannot_be_written_at_the_end_is_raised():
    async def scenario(world: World) -> None:
        world.topic()
        consumer = world.consumer()
        world.publish(b"x")
        world.engine.start()
        await a_while(1)
        consumer.finish(1)
        world.disk.fail("commit", times=1000)
        with pytest.raises(StorageError):
            await world.engine.close()

    run(scenario)


@pytest.mark.parametrize("expected", [False, True])
def test_a_flush_that_fails_gives_back_what_it_took_and_raises(expected):
    async def scenario(world: World) -> None:
        world.topic()
        if expected:
            world.disk.fail("commit")
        else:
            world.failing["run_flush"] = 1
        with pytest.raises(StorageError if expected else ZeroDivisionError):
            await world.engine.flush_progress(sync=True)
        assert world.broker.has_flush(world.engine.due_clock_ns())
        await world.engine.flush_progress(sync=True)
        assert not world.broker.has_flush(world.engine.due_clock_ns())

    run(scenario)


def test_how_far_the_last_sync_came_is_written_down_at_the_end():
    async def scenario(world: World) -> None:
        world.topic()
        world.engine.start()
        world.publish(b"x")
        await a_while(1)
        await world.engine.close()
        world.disk.crash(power_loss=False, rng=random.Random(0))
        assert ChannelStore(world.disk.attach()).load().logs["t", 0].synced == 2

    run(scenario, "os")


def test_nothing_happens_after_the_end():
    async def scenario(world: World) -> None:
        world.topic()
        consumer = world.consumer()
        world.engine.start()
        world.publish(b"x")
        await a_while(1)
        await world.engine.close()
        calls = len(world.calls)
        assert world.partition().log.failed == "the log is closed"
        await a_while(200)  # its timeout would be long over
        assert (consumer.bodies, len(world.calls)) == ([b"x"], calls)

    run(scenario, "interval", sync_timeout_s=100)


# -- what the flush finds ----------------------------------------------------------------------------------------------


def test_what_a_flush_makes_ready_is_delivered_without_any_other_event(monkeypatch):
    async def scenario(world: World) -> None:
        world.topic()
        consumer = world.consumer()
        await a_while()
        flush_ended = world.broker.flush_ended

        def ready(*args: Any) -> None:
            flush_ended(*args)
            world.broker.publish_to(world.partition(), [b"x"])

        monkeypatch.setattr(world.broker, "flush_ended", ready)
        await world.engine.flush_progress(sync=False)
        await a_while()
        assert consumer.bodies == [b"x"]

    run(scenario, "os")


def test_what_a_sweep_makes_ready_is_delivered_without_any_other_event(monkeypatch):
    async def scenario(world: World) -> None:
        world.topic()
        consumer = world.consumer()
        await a_while()
        ready = [b"x"]

        def sweep(_wall_ns: int) -> bool:
            if not ready:
                return False
            world.broker.publish_to(world.partition(), [ready.pop()])
            return True

        monkeypatch.setattr(world.broker, "sweep", sweep)
        world.engine.start()
        await a_while(2 * CURSOR_FLUSH_S)
        assert consumer.bodies == [b"x"]
        await world.engine.close()

    run(scenario, "os")


def test_a_flush_that_did_not_read_all_that_is_due_is_followed_by_the_next_at_once(monkeypatch):
    async def scenario(world: World) -> None:
        more = [False, True, True, True]
        flush_ended = world.broker.flush_ended

        def ended(*args: Any) -> None:
            flush_ended(*args)
            world.broker._progress.has_more_due = bool(more) and more.pop()

        monkeypatch.setattr(world.broker, "flush_ended", ended)
        monkeypatch.setattr(world.broker, "has_flush", lambda _wall_ns: bool(more))
        world.engine.start()
        await a_while(CURSOR_FLUSH_S * 1.5)
        assert world.count("run_flush") == 4
        await world.engine.close()

    run(scenario, "os")


def test_what_is_remembered_of_defects_is_bounded(caplog):
    async def scenario(world: World) -> None:
        for number in range(1000):
            world.engine.on_defect(f"defect {number}", ZeroDivisionError())
        assert len(world.engine._defects) <= 100
        assert len(caplog.records) == 1000

    run(scenario, "os")
