"""What keeps one turn of the loop short: many outputs, the garbage collector; and what tells how long it was."""

import asyncio
import gc
import random
from typing import Any

import pytest

from flintmq.broker.broker import Broker, BrokerOptions
from flintmq.env import Env
from flintmq.nsqd.collector import Collector
from flintmq.nsqd.engine import Engine
from flintmq.nsqd.loop_delays import BOUNDS_S, LoopDelays
from flintmq.storage import ChannelStore
from flintmq.testing import MemoryDisk


class Output:
    def __init__(self, written):
        self.written = written

    def flush(self):
        self.written.append(self)


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
