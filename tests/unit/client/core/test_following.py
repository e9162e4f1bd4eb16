"""Following a topic: one question at a time, soon after a loss, and whom it distrusts."""

from __future__ import annotations

from typing import Any

import pytest

from flintmq.client.blocking.timers import Timers
from flintmq.client.core.discovery import BLIND_POLL_S, Node, PollTimes
from flintmq.client.core.following import PARTITIONED_POLL_S, SOON_S, Following
from flintmq.client.core.reconnect import TOLD_EVERY_S
from flintmq.client.core.routing import DISTRUST_S, Target
from flintmq.client.core.topology import Topology
from flintmq.client.options import system_env
from flintmq.errors import DiscoveryError
from flintmq.testing import ManualClock

LED_BY_A = Topology(leaders={0: "a:1"}, partition_count=1)
HALF = Topology(leaders={0: "a:1"}, partition_count=2)


class World:
    """Follows topic ``t``; notes what is asked and found."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.timers = Timers(self.clock)
        self.asked: list[Any] = []
        self.found: list[Topology] = []
        self.failed: list[DiscoveryError] = []
        times = PollTimes(60.0, 0.0)
        told = self.asked.append, self.found.append, self.failed.append
        self.following = Following("t", times, system_env(), *told)
        self.following.start(self.timers)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(round(seconds * 1e9) + 1000)
        self.timers.run_due()

    def wait_s(self) -> float:
        """Until the next question."""
        next_at = self.timers.next_at()
        assert next_at is not None
        return next_at - self.timers.time()


@pytest.fixture
def world():
    return World()


def test_one_question_at_a_time(world):
    assert world.asked == [()]
    assert not world.following.is_polled
    world.following.hurry()
    world.pass_time(1000)
    assert world.asked == [()], "the first is not answered"
    world.following.answered(Topology())
    assert world.following.is_polled
    world.pass_time(world.wait_s())
    assert len(world.asked) == 2


def test_rarely_when_all_is_quiet_and_soon_after_a_loss(world):
    for _ in range(10):
        world.following.answered(LED_BY_A)
        world.pass_time(world.wait_s())
    world.following.answered(LED_BY_A)
    assert world.wait_s() == pytest.approx(PARTITIONED_POLL_S, abs=0.01)
    world.following.hurry()
    assert world.wait_s() <= SOON_S


def test_while_a_partition_is_missing_it_is_asked_every_second(world):
    for _ in range(5):
        world.following.answered(HALF)
        assert world.wait_s() <= SOON_S
        world.pass_time(world.wait_s())


def test_a_failure_takes_nothing_away_and_is_hurried_once(world):
    world.following.answered(LED_BY_A)
    world.pass_time(world.wait_s())
    world.following.answered(DiscoveryError("no nsqlookupd answered"))
    assert world.following.topology is LED_BY_A
    assert world.found == [LED_BY_A]
    assert len(world.failed) == 1
    first_s = world.wait_s()
    world.pass_time(first_s)
    world.following.answered(DiscoveryError("still none"))
    assert world.wait_s() > first_s


def test_while_nobody_answers_it_is_asked_every_few_seconds_and_told_now_and_then(world, caplog):
    """Whatever the interval is: nothing is consumed where nothing was found before."""
    waits, began = [], world.timers.time()
    while world.timers.time() < began + 10 * TOLD_EVERY_S:
        world.following.answered(DiscoveryError("none"))
        waits.append(world.wait_s())
        world.pass_time(waits[-1])
    assert max(waits) <= BLIND_POLL_S
    assert len(waits) <= 10 * TOLD_EVERY_S / SOON_S / 2, "nor is it a flood"
    assert 5 <= caplog.text.count("discovery of t failed: none") <= 11
    assert len(world.failed) == len(waits), "the application is told of each"


def test_while_nobody_answers_and_nothing_is_lost_it_is_asked_rarely(world):
    answer = Topology(nodes=(Node("a", 1),))
    world.following.answered(answer)
    for _ in range(9):
        world.pass_time(world.wait_s())
        world.following.answered(DiscoveryError("none"))
    assert world.wait_s() > 10 * BLIND_POLL_S
    world.following.hurry()
    for _ in range(9):
        world.pass_time(world.wait_s())
        world.following.answered(DiscoveryError("none"))
        assert world.wait_s() <= BLIND_POLL_S
    for _ in range(9):
        world.pass_time(world.wait_s())
        world.following.answered(answer)
    assert world.wait_s() > 10 * BLIND_POLL_S


def test_soon_again_when_they_are_back(world):
    """They have just started, and nsqd register one by one."""
    for _ in range(10):
        world.following.answered(Topology())
        world.pass_time(world.wait_s())
    world.following.answered(DiscoveryError("none"))
    for _ in range(5):
        world.pass_time(world.wait_s())
        world.following.answered(DiscoveryError("none"))
    world.pass_time(world.wait_s())
    world.following.answered(Topology())
    assert world.wait_s() == pytest.approx(2.0, abs=0.01)


def test_whom_it_distrusts_is_told_for_a_while(world):
    world.following.answered(LED_BY_A)
    world.following.distrust(Target("a:1", 0))
    world.pass_time(world.wait_s())
    assert world.asked[-1] == ((0, "a:1"),)
    world.following.answered(LED_BY_A)
    world.pass_time(DISTRUST_S)
    assert world.asked[-1] == ()


def test_who_leads(world):
    world.following.answered(LED_BY_A)
    assert world.following.leads(Target("a:1", 0))
    assert not world.following.leads(Target("b:1", 0))
    assert world.following.leads(Target("b:1"))
    assert world.following.leads(Target("b:1", 7)), "nobody else is known to"


def test_nothing_is_asked_or_told_after_the_end(world):
    world.following.stop()
    world.following.answered(LED_BY_A)
    world.following.hurry()
    world.pass_time(1000)
    assert (world.asked, world.found) == ([()], [])
