"""Keeping addresses connected: when it is tried again, and when not."""

from __future__ import annotations

import asyncio

import pytest
from tests.sim.loop import Simulation

from flintmq.client.aio.reconnect import Reconnector
from flintmq.client.core.reconnect import TOLD_EVERY_S, FailureLog
from flintmq.errors import ConnectionFailed


class FakeConnection:
    """As much of a connection as Reconnector looks at."""

    is_publish_refused = False

    def __init__(self) -> None:
        self.lost = asyncio.get_running_loop().create_future()


class Script:
    """Counts attempts; fails while ``is_down``."""

    def __init__(self) -> None:
        self.is_down = self.is_wanted = False
        self.times: list[float] = []
        self.results: list[object] = []
        self.broken: list[BaseException] = []
        self.connections: list[FakeConnection] = []

    async def connect(self, address: str) -> FakeConnection:
        self.times.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.01)
        if self.is_down:
            raise ConnectionFailed(address, "refused")
        self.connections.append(FakeConnection())
        return self.connections[-1]


def run(scenario):
    script = Script()
    with Simulation(0) as sim:
        reconnector = Reconnector(
            script.connect,  # type: ignore[arg-type]
            lambda address, error: script.results.append(error),
            script.broken.append,
            sim.driver.env,
            lambda: script.is_wanted,
        )
        sim.run(scenario(script, reconnector))


def test_one_task_per_address():
    async def scenario(script, reconnector):
        reconnector.keep(["a:1", "b:1", "a:1"])
        reconnector.keep(["a:1", "b:1"])
        await reconnector.all_tried()
        assert reconnector.listed == ("a:1", "b:1")
        assert script.results == [None, None]
        await asyncio.sleep(600)
        assert len(script.connections) == 2
        await reconnector.close()

    run(scenario)


def test_attempts_after_a_loss_become_rare_and_start_within_a_second():
    async def scenario(script, reconnector):
        reconnector.keep(["a:1"])
        await reconnector.all_tried()
        await asyncio.sleep(60)
        script.is_down = True
        script.connections[0].lost.set_result(ConnectionFailed("a:1", "closed"))
        await asyncio.sleep(300)
        gaps = [later - earlier for earlier, later in zip(script.times[1:], script.times[2:], strict=False)]
        assert script.times[1] - script.times[0] - 60 < 1
        assert gaps[0] < 1
        assert 7 < gaps[-1] < 16
        assert len(gaps) < 50
        assert isinstance(script.results[-1], ConnectionFailed)
        await reconnector.close()

    run(scenario)


def gaps_of(script) -> list[float]:
    return [later - earlier for earlier, later in zip(script.times, script.times[1:], strict=False)]


def test_while_something_waits_attempts_come_every_second_and_no_more_often():
    async def scenario(script, reconnector):
        script.is_down = True
        reconnector.keep(["a:1", "b:1"])
        await asyncio.sleep(300)
        del script.times[:]
        script.is_wanted = True
        began = asyncio.get_running_loop().time()
        for _ in range(100):
            reconnector.hasten()  # as a hundred publishes would
        await asyncio.sleep(0.001)
        assert script.times == [began, began], "the last attempt is long ago: one more each, at once"
        for _ in range(600):
            reconnector.hasten()
            await asyncio.sleep(0.1)
        assert 2 * 59 <= len(script.times) <= 2 * 120
        assert max(gaps_of(script)) < 1.1
        script.is_wanted = False
        await asyncio.sleep(60)
        del script.times[:]
        await asyncio.sleep(60)
        assert len(script.times) <= 2 * 8, "nothing waits any more: as rarely as before"
        await reconnector.close()

    run(scenario)


def test_failures_that_last_are_told_now_and_then():
    log = FailureLog()
    refused, other = ConnectionFailed("a:1", "refused"), ConnectionFailed("a:1", "no route")
    assert [log.is_new("a:1", refused, now) for now in (0.0, 1.0, TOLD_EVERY_S - 1, TOLD_EVERY_S)] == [1, 0, 0, 1]
    assert log.is_new("a:1", other, TOLD_EVERY_S + 1)
    assert log.is_new("b:1", refused, TOLD_EVERY_S + 1)
    log.clear("a:1")
    assert log.is_new("a:1", other, TOLD_EVERY_S + 2)


def test_an_address_that_is_not_wanted_is_kept_until_it_is_lost():
    async def scenario(script, reconnector):
        reconnector.keep(["a:1"])
        await reconnector.all_tried()
        reconnector.keep([])
        await asyncio.sleep(600)
        script.connections[0].lost.set_result(ConnectionFailed("a:1", "closed"))
        await asyncio.sleep(600)
        assert len(script.times) == 1
        reconnector.keep(["a:1"])
        await reconnector.all_tried()
        assert len(script.times) == 2
        await reconnector.close()

    run(scenario)


def test_nothing_is_connected_after_the_end():
    async def scenario(script, reconnector):
        reconnector.keep(["a:1"])
        waiting = asyncio.create_task(reconnector.all_tried())
        await asyncio.sleep(0)
        await reconnector.close()
        await waiting
        reconnector.keep(["a:1", "b:1"])
        await asyncio.sleep(60)
        assert len(script.times) == 1
        assert script.results == []

    run(scenario)


def test_a_bug_is_told_and_keeps_nobody_waiting():
    async def scenario(script, reconnector):
        async def connect(address):
            raise ZeroDivisionError

        reconnector._connect = connect
        reconnector.keep(["a:1"])
        await reconnector.all_tried()
        await asyncio.sleep(0)
        assert [type(error) for error in script.broken] == [ZeroDivisionError]
        await reconnector.close()

    run(scenario)


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_refused_publish_is_no_reason_to_wait(is_refused):
    async def scenario(script, reconnector):
        reconnector.keep(["a:1"])
        await reconnector.all_tried()
        script.connections[0].is_publish_refused = is_refused
        script.connections[0].lost.set_result(ConnectionFailed("a:1", "closed"))
        await asyncio.sleep(0.1)
        assert len(script.times) == (2 if is_refused else 1)
        await reconnector.close()

    run(scenario)
