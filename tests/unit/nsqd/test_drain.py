"""When draining is over, what it reports, and what its signals mean; the broker is made of figures."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest

from flintmq.env import Env
from flintmq.errors import RemoteProtocolError
from flintmq.nsqd import drain as drain_module
from flintmq.nsqd.drain import TOPIC_ROWS_MAX, Drain, Draining, DrainSignal, left_in
from flintmq.testing import ManualClock


def topic(name="t", depth=0, channels=None, **fields):
    """A topic whose channels are (depth, in flight, deferred) by name."""
    parts = {
        each: [SimpleNamespace(depth=a, in_flight_count=b, deferred_count=c, subscriptions={})]
        for each, (a, b, c) in (channels or {}).items()
    }
    facts = {"ephemeral": False, "is_starting": False, "paused": False, "meta": SimpleNamespace(is_partitioned=False)}
    names = dict.fromkeys(parts, False)
    return SimpleNamespace(
        **{**facts, **fields}, name=name, depth=depth, channel_names=names, channels=parts.__getitem__
    )


class World:
    """A Drain and all it touches."""

    def __init__(self, timeout_ns=0, **topics):
        self.topics = topics
        self.stored = asyncio.Event()
        self.stored.set()
        self.changes: list[bool] = []
        self.is_finished = asyncio.Event()
        engine = SimpleNamespace(
            loop=asyncio.get_running_loop(), broker=SimpleNamespace(topics=self.topics), settle=self.stored.wait
        )
        env = Env(clock=ManualClock())
        self.drain = Drain(env, engine, timeout_ns, lambda: self.changes.append(self.drain.is_on))  # type: ignore[arg-type]
        self.drain.finished = self.is_finished.set

    async def ends(self):
        async with asyncio.timeout(5):
            await self.is_finished.wait()

    async def stays(self):
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not self.is_finished.is_set()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(drain_module, "LOOK_INTERVAL_S", 0.001)


async def test_what_was_taken_before_counts():
    world = World()
    world.stored.clear()  # a publish whose sync is under way
    world.drain.begin()
    await world.stays()
    world.topics["t"] = topic(channels={"c": (1, 0, 0)})  # now it is stored
    world.stored.set()
    await world.stays()
    world.topics["t"] = topic(channels={"c": (0, 0, 0)})
    await world.ends()


@pytest.mark.parametrize(
    ("busy", "count"),
    [
        (topic(channels={"c": (1, 0, 0)}), 1),
        (topic(channels={"c": (0, 2, 0)}), 2),
        (topic(channels={"c": (0, 0, 3)}), 3),
        (topic(channels={"b": (0, 0, 0), "c": (1, 2, 3)}), 6),
        (topic(depth=4), 4),
        (topic(depth=4, channels={"c": (1, 0, 0)}), 5),
        (topic(is_starting=True), 0),
        (topic(ephemeral=True, depth=1, channels={"c": (1, 0, 0)}), 2),
    ],
)
async def test_what_it_waits_for(busy, count):
    world = World(a=topic("a"), t=busy)
    assert left_in(busy) == count
    world.drain.begin()
    await world.stays()
    world.topics["t"] = topic()
    world.topics["b"] = topic("b", depth=1)  # another one, which a full look finds
    await world.stays()
    del world.topics["b"]
    await world.ends()


async def test_nobody_waits_for_an_ephemeral_topic_without_channels():
    world = World(t=topic(ephemeral=True, depth=4))
    world.drain.begin()
    await world.ends()


async def test_the_time_it_may_take(caplog):
    world = World(timeout_ns=20_000_000, t=topic(depth=7))
    world.drain.begin()
    await world.ends()
    assert "7 messages are left" in caplog.text


async def test_calling_it_off():
    world = World(t=topic(depth=1))
    world.drain.end()
    assert world.changes == []
    world.drain.begin()
    world.drain.begin(60_000_000_000)
    world.drain.end()
    world.drain.end()
    assert world.changes == [True, False]
    del world.topics["t"]
    await world.stays()
    world.drain.check("PUB", "t", world.topics)
    world.drain.begin()
    await world.ends()


async def test_refusals():
    world = World(t=topic(), p=topic("p", depth=1, meta=SimpleNamespace(is_partitioned=True)))
    world.drain.begin()
    for name in ("t", "new"):
        with pytest.raises(Draining, match=r"^draining$"):
            world.drain.check("PUB", name, world.topics)
    with pytest.raises(RemoteProtocolError) as caught:
        world.drain.check("MPUB", "p", world.topics)
    assert (caught.value.code, caught.value.fatal) == ("E_FAILED_ON_NOT_WRITABLE", False)


async def test_the_report_is_bounded():
    names = [f"t{number:03}" for number in range(TOPIC_ROWS_MAX + 50)]
    world = World(**{name: topic(name, depth=2) for name in names}, empty=topic("empty"))
    assert await world.drain.state() == {"draining": False}
    world.drain.begin()
    state = await world.drain.state()
    assert (state["topic_count"], state["message_count"]) == (len(names), 2 * len(names))
    assert [row["topic_name"] for row in state["topics"]] == names[:TOPIC_ROWS_MAX]
    world.drain.close()


async def test_an_error_is_told(caplog):
    caplog.set_level(logging.ERROR)
    world = World(t=object())
    world.drain.begin()
    for _ in range(5):
        await asyncio.sleep(0)
    assert "draining ended unexpectedly" in caplog.text


async def test_signals():
    world, stops = World(t=topic(depth=1)), []
    signals = DrainSignal(lambda: stops.append(1), drains_on_stop=True)
    signals.terminate()  # before there is an nsqd
    assert not world.drain.is_on
    signals.attach(world.drain)
    assert world.drain.is_on and not stops
    world.drain.end()
    signals.terminate()  # it drains again, because that was called off
    assert world.drain.is_on and not stops
    signals.terminate()
    assert stops == [1]
    plain = DrainSignal(lambda: stops.append(2), drains_on_stop=False)
    plain.terminate()
    assert stops == [1, 2]
    world.drain.close()
