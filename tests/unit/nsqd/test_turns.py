"""What keeps one turn of the loop short: many outputs, the garbage collector; and what tells how long it was."""

import asyncio
import gc
import random
from typing import Any

import pytest

from flintmq.broker.broker import Broker, BrokerOptions
from flintmq.broker.channel import Channel
from flintmq.broker.partition import Partition, PublishGroup
from flintmq.env import Env
from flintmq.nsqd.collector import Collector
from flintmq.nsqd.engine import Engine
from flintmq.nsqd.figures.loop_delays import BOUNDS_S, LoopDelays
from flintmq.storage import ChannelStore
from flintmq.testing import MemoryDisk


class Output:
    peer = "somebody"

    def __init__(self, written, error=None):
        self.written = written
        self.error = error
        self.is_aborted = False

    def flush(self):
        if self.error is not None:
            raise self.error
        self.written.append(self)

    def abort(self):
        self.is_aborted = True
        if self.error is not None:
            raise self.error


@pytest.fixture
async def engine():
    files = MemoryDisk().attach()
    broker = Broker(files, ChannelStore(files), BrokerOptions(), random.Random(1), print)
    return Engine(Env(), broker, durability="os", sync_every=1, sync_timeout_ns=1)


async def turn():
    await asyncio.sleep(0)


async def test_of_very_many_outputs_new_ones_come_first(engine):
    written: list[Any] = []
    outputs = [Output(written) for _ in range(1000)]
    for output in outputs:
        engine.wants_output(output)
    await turn()
    assert 100 <= len(written) <= 200
    new = Output(written)
    engine.wants_output(new)
    written.clear()
    await turn()
    assert written[0] is new
    assert len(written) <= 200
    written.remove(new)
    for _ in range(20):
        await turn()
    assert len(written) >= 800
    assert len(set(written)) == len(written), "each is written once"


async def test_one_that_cannot_be_written_to_is_closed_and_the_others_are_written_to(engine, caplog):
    written: list[Any] = []
    first, bad, last = Output(written), Output(written, RuntimeError("cannot")), Output(written)
    for _ in range(3):
        written.clear()
        for output in (first, bad, last):
            engine.wants_output(output)
        await turn()
        assert written == [first, last]
        assert bad.is_aborted
    # told once with the connection: it may come every turn
    assert [record.message for record in caplog.records] == [
        "client somebody: writing failed, closing: RuntimeError('cannot')",
        "client somebody: closing failed: RuntimeError('cannot')",
    ]


class Waiter:
    def __init__(self, told, error=None):
        self.told = told
        self.error = error

    def publish_ended(self):
        self.told.append(self)
        if self.error is not None:
            raise self.error


async def test_a_publisher_that_cannot_be_answered_does_not_keep_the_others_from_their_answers(engine):
    defects: list[Any] = []
    engine.on_defect = lambda *about: defects.append(about)
    told: list[Any] = []
    error = RuntimeError("cannot")
    waiters = [Waiter(told), Waiter(told, error), Waiter(told), Waiter(told)]
    broker = engine.broker
    for name, each in (("a", waiters[:3]), ("b", waiters[3:])):
        group = broker.publish(broker.topic(name, 0), [b"x"])
        group.waiters += each
    engine.schedule()
    await turn()
    assert told == waiters
    assert defects == [("answering publishers of topic a", error)]


async def test_a_partition_that_cannot_be_written_fails_its_own_publishers_alone(engine, monkeypatch):
    defects: list[Any] = []
    engine.on_defect = lambda *about: defects.append(about)
    broker = engine.broker
    groups = [broker.publish(broker.topic(name, 0), [b"x"]) for name in "abc"]
    error = RuntimeError("cannot")

    honest = Partition.write_pending

    def write_pending(self: Partition, *arguments: int) -> PublishGroup | None:
        if self.topic_name == "b":
            raise error
        return honest(self, *arguments)

    monkeypatch.setattr(Partition, "write_pending", write_pending)
    engine.schedule()
    await turn()
    assert [group.ended for group in groups] == [True] * 3
    assert [group.error is None for group in groups] == [True, False, True]
    assert defects == [("writing to topic b partition 0", error)]
    assert not broker.has_pending


@pytest.mark.parametrize("what", ["pump", "handle_deadlines"])
async def test_a_channel_that_fails_does_not_keep_the_others_from_their_turn(engine, monkeypatch, what):
    defects: list[Any] = []
    engine.on_defect = lambda *about: defects.append(about)
    broker = engine.broker
    topic = broker.topic("t", 0)
    seen: list[str] = []
    error = RuntimeError("cannot")

    def look(self: Channel, *_: int) -> None:
        seen.append(self.name)
        if self.name == "b":
            raise error

    monkeypatch.setattr(Channel, what, look)
    for name in "abc":
        ((channel,), _) = broker.channel(topic, name)
        broker.deliveries.arm(channel, 1)
    engine.look_at_clock()
    assert seen == ["a", "b", "c"]
    assert defects[0][0].endswith(" topic t channel b")
    assert defects[0][1] is error
    assert broker.next_deadline_ns is not None, "it is looked at again in a while"


async def test_one_that_waits_and_wants_again_is_written_once(engine):
    written: list[Any] = []
    outputs = [Output(written) for _ in range(300)]
    for output in outputs:
        engine.wants_output(output)
    await turn()
    engine.wants_output(outputs[299])
    for _ in range(10):
        await turn()
    assert sorted(map(outputs.index, written)) == list(range(300))


async def test_the_collector_looks_at_nothing_twice():
    collector = Collector()
    collector.start()
    try:
        await asyncio.sleep(0)
        kept: list[list[object]] = [[] for _ in range(30_000)]
        while gc.get_freeze_count() < len(kept):
            await asyncio.sleep(0.01)
    finally:
        collector.stop()
    assert gc.get_freeze_count() == 0


async def test_delays_of_the_loop_are_counted():
    delays = LoopDelays()
    delays.start()
    loop = asyncio.get_running_loop()
    end = loop.time() + 0.08
    while loop.time() < end:
        pass  # nobody else has a turn
    await asyncio.sleep(0.03)
    delays.stop()
    over = dict(zip(BOUNDS_S, delays.counts_over(), strict=True))
    assert over[0.05] >= 1
    assert over[2.0] == 0
    assert f'{{over="0.05"}} {over[0.05]}' in "".join(delays.family().lines)
