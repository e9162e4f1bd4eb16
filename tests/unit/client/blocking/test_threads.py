"""A pool of threads, and a ticker: how many threads there are, and when they end."""

from __future__ import annotations

import gc
import threading

import pytest

from flintmq.client.blocking import thread_pool
from flintmq.client.blocking.thread_pool import ThreadPool
from flintmq.client.blocking.ticker import Ticker

PATIENCE_S = 10.0


def threads_named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_a_pool_runs_all_jobs_with_few_threads(request):
    name = request.node.name
    threads = ThreadPool(name, size=3)
    gate = threading.Event()
    running: list[int] = []
    done = threading.Semaphore(0)

    def job() -> None:
        running.append(len(threads_named(name)))
        assert gate.wait(PATIENCE_S)
        done.release()

    for _ in range(20):
        threads.run(job)
    assert len(threads_named(name)) == 3
    gate.set()
    for _ in range(20):
        assert done.acquire(timeout=PATIENCE_S)
    assert max(running) <= 3
    for thread in threads_named(name):
        thread.join(PATIENCE_S)
    assert threads_named(name) == [], "they end when there is nothing to do"


def test_a_job_that_fails_takes_no_thread_with_it(request, caplog):
    threads = ThreadPool(request.node.name, size=1)
    done = threading.Event()
    threads.run(lambda: 1 // 0)
    threads.run(done.set)
    assert done.wait(PATIENCE_S)
    assert "ZeroDivisionError" in caplog.text


def test_an_ended_pool_begins_nothing(request):
    threads = ThreadPool(request.node.name, size=1)
    gate, began = threading.Event(), threading.Event()
    calls: list[str] = []

    def first() -> None:
        began.set()
        gate.wait(PATIENCE_S)

    threads.run(first)
    threads.run(lambda: calls.append("queued"))
    assert began.wait(PATIENCE_S)
    threads.end()
    threads.run(lambda: calls.append("late"))
    gate.set()
    for thread in threads_named(request.node.name):
        thread.join(PATIENCE_S)
    assert calls == []


def test_a_pool_may_be_used_again_after_a_rest(request):
    threads = ThreadPool(request.node.name)
    for _ in range(50):
        done = threading.Event()
        threads.run(done.set)
        assert done.wait(PATIENCE_S)
    assert thread_pool.THREAD_COUNT_MAX == 16


class Refusing:
    """Stands in for ``Thread.start``: raises so many times, before it starts the thread or behind that.

    Attributes:
        count: times that it will raise.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: BaseException, is_begun: bool = False) -> None:
        self.count = 0
        start = threading.Thread.start

        def start_or_raise(thread: threading.Thread) -> None:
            is_raised = self.count > 0
            self.count -= is_raised
            if is_begun or not is_raised:
                start(thread)
            if is_raised:
                raise error

        monkeypatch.setattr(threading.Thread, "start", start_or_raise)


NO_THREAD = RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("error", "is_begun"), [(NO_THREAD, False), (KeyboardInterrupt(), False), (KeyboardInterrupt(), True)]
)
def test_a_thread_that_could_not_be_started_is_not_counted(request, monkeypatch, error, is_begun):
    threads = ThreadPool(request.node.name, size=1)
    refusing = Refusing(monkeypatch, error, is_begun)
    calls: list[str] = []
    for _ in range(3):
        refusing.count = 1
        with pytest.raises(type(error)):
            threads.run(lambda: calls.append("refused"))
    done = threading.Event()
    threads.run(done.set)
    assert done.wait(PATIENCE_S)
    for thread in threads_named(request.node.name):
        thread.join(PATIENCE_S)
    assert calls == [], "what was refused does not come later"


def test_a_job_waits_for_a_thread_that_is_there_when_no_other_can_be_started(request, monkeypatch):
    threads = ThreadPool(request.node.name, size=2)
    gate, done = threading.Event(), threading.Event()
    threads.run(lambda: gate.wait(PATIENCE_S))
    Refusing(monkeypatch, NO_THREAD).count = 1
    threads.run(done.set)
    assert not done.is_set()
    gate.set()
    assert done.wait(PATIENCE_S)


def test_a_ticker_whose_start_was_interrupted_does_not_tick(request, monkeypatch):
    kept = Kept()
    Refusing(monkeypatch, KeyboardInterrupt(), is_begun=True).count = 1
    with pytest.raises(KeyboardInterrupt):
        Ticker(kept.tick, 0.001, request.node.name)
    for thread in threads_named(request.node.name):
        thread.join(PATIENCE_S)
    assert threads_named(request.node.name) == []


class Kept:
    def __init__(self) -> None:
        self.ticks = threading.Semaphore(0)
        self.fails = False

    def tick(self) -> None:
        self.ticks.release()
        if self.fails:
            raise ValueError("no good")


@pytest.mark.parametrize("how", ["end", "forget"])
def test_a_ticker_ends_when_told_or_when_its_owner_is_gone(request, how, caplog):
    kept = Kept()
    kept.fails = how == "end"
    ticker = Ticker(kept.tick, 0.001, request.node.name)
    for _ in range(3):
        assert kept.ticks.acquire(timeout=PATIENCE_S)
    assert ("no good" in caplog.text) == kept.fails
    (thread,) = threads_named(request.node.name)
    if how == "end":
        ticker.end()
    else:
        del kept
        gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
