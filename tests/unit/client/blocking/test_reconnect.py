"""Keeping nsqd connected without a thread for each: retries, listing, stopping."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from flintmq.client.blocking.reconnect import Reconnector
from flintmq.client.blocking.timers import Timers
from flintmq.env import Env
from flintmq.errors import ConnectionFailed, FlintError
from flintmq.testing import ManualClock


class World:
    """Reconnector whose connections are texts."""

    def __init__(self, threads) -> None:
        self.clock = ManualClock()
        self.timers = Timers(self.clock)
        self.threads = threads
        self.down: set[str] = set()
        self.broken: set[str] = set()
        self.joined: list[str] = []
        self.dropped: list[str] = []
        self.tries: list[tuple[str, bool]] = []
        env = Env(clock=self.clock, random=random.Random(1))
        self.reconnector: Reconnector[str, str] = Reconnector(
            self.open, self.join, self.tried, self.dropped.append, threads, self.timers, threading.RLock(), env
        )

    def open(self, address: str) -> str:
        if address in self.down:
            raise ConnectionFailed(address, "refused")
        if address == "bug:1":
            raise ZeroDivisionError
        return address

    def join(self, address: str) -> None:
        if address in self.broken:
            raise ZeroDivisionError
        self.joined.append(address)

    def tried(self, address: str, error: FlintError | None) -> None:
        self.tries.append((address, error is None))

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(round(seconds * 1e9) + 1000)
        self.timers.run_due()


@pytest.fixture
def world(threads):
    return World(threads)


def test_every_address_is_connected_once(world):
    world.reconnector.keep(["a:1", "b:1", "a:1"])
    world.reconnector.keep(["a:1", "b:1"])
    assert not world.reconnector.are_all_tried
    world.threads.work_all()
    assert world.joined == ["a:1", "b:1"]
    assert world.reconnector.are_all_tried
    world.pass_time(1000)
    assert world.threads.jobs == []


def test_an_address_whose_connection_could_not_be_taken_in_is_tried_again(world):
    world.broken.add("a:1")
    world.reconnector.keep(["a:1", "b:1"])
    world.threads.work_all()
    assert world.joined == ["b:1"] and world.tries == [("a:1", False), ("b:1", True)]
    world.broken.clear()
    world.pass_time(1)
    world.threads.work_all()
    assert world.joined == ["b:1", "a:1"]


def test_failures_are_tried_again_within_a_second_then_less_often(world):
    world.down.add("a:1")
    world.reconnector.keep(["a:1"])
    waits = []
    for _ in range(12):
        world.threads.work()
        assert world.threads.jobs == []
        waits.append(world.timers.next_at() - world.timers.time())
        world.pass_time(waits[-1])
    assert waits[0] <= 0.25
    assert waits[0] < waits[3] < waits[-1] <= 15
    world.down.clear()
    world.threads.work()
    assert world.joined == ["a:1"]


def test_a_lost_one_comes_back_quickly_if_it_had_held(world):
    world.reconnector.keep(["a:1"])
    world.threads.work()
    for _ in range(5):
        world.reconnector.lost("a:1", lived_s=10.0)
        world.pass_time(0.26)
        world.threads.work()
    assert len(world.joined) == 6
    world.reconnector.lost("a:1", lived_s=0.0)
    for _ in range(5):
        world.pass_time(world.timers.next_at() - world.timers.time())
        world.threads.work()
        world.reconnector.lost("a:1", lived_s=0.0)
    assert world.timers.next_at() - world.timers.time() > 1, "one that breaks at once is not a good one"


def test_what_is_not_listed_any_more_is_not_connected_again(world):
    world.reconnector.keep(["a:1", "b:1"])
    world.threads.work_all()
    world.reconnector.keep(["b:1"])
    world.reconnector.lost("a:1", 10.0)
    world.pass_time(10)
    assert world.threads.jobs == []
    world.reconnector.keep(["a:1", "b:1"])
    world.threads.work_all()
    assert world.joined == ["a:1", "b:1", "a:1"]


def test_stopping_drops_what_is_being_connected(world):
    world.reconnector.keep(["a:1"])
    job = world.threads.jobs[0]
    world.reconnector.stop()
    job()
    assert world.joined == []
    assert world.dropped == ["a:1"]
    world.reconnector.keep(["b:1"])
    assert world.threads.jobs == []


def test_a_mistake_of_ours_is_logged_and_tried_again(world, caplog):
    world.reconnector.keep(["bug:1"])
    world.threads.work()
    assert "mistake of ours" in caplog.text
    assert world.tries == [("bug:1", False)]
    world.pass_time(1)
    assert len(world.threads.jobs) == 1


def test_an_attempt_that_no_thread_can_be_started_for_is_a_failed_one(world, monkeypatch):
    run = world.threads.run
    monkeypatch.setattr(world.threads, "run", refuse(RuntimeError("can't start new thread")))
    world.reconnector.keep(["a:1"])
    assert world.tries == [("a:1", False)]
    monkeypatch.setattr(world.threads, "run", run)
    world.pass_time(1)
    world.threads.work_all()
    assert world.joined == ["a:1"]


@pytest.mark.parametrize("is_begun", [False, True])
def test_an_attempt_that_was_interrupted_is_made_again_and_counts_once(world, monkeypatch, is_begun):
    run = world.threads.run
    monkeypatch.setattr(world.threads, "run", refuse(KeyboardInterrupt(), run if is_begun else None))
    with pytest.raises(KeyboardInterrupt):
        world.reconnector.keep(["a:1"])
    monkeypatch.setattr(world.threads, "run", run)
    world.pass_time(1)
    world.threads.work_all()
    assert world.joined == ["a:1"]
    assert world.dropped == ["a:1"] * is_begun
    world.pass_time(1000)
    assert world.threads.jobs == []


def refuse(error: BaseException, run: Callable[[Callable[[], object]], None] | None = None):
    """A pool's ``run`` that raises, perhaps with the job in hand."""

    def refuse_it(job: Callable[[], object]) -> None:
        if run is not None:
            run(job)
        raise error

    return refuse_it
