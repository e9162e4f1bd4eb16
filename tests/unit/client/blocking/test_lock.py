"""An interrupt may come at any moment of taking a lock, and leaves it as it was."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from tests.integration.daemons import PATIENCE_S

from flintmq.client.blocking.lock import Lock


class Interrupted(Lock):
    """Is acquired, or not, and then interrupted: where the interpreter runs the handlers of signals."""

    comes_first = False
    is_quiet = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self.is_quiet:
            return super().acquire(blocking, timeout)
        if not self.comes_first:
            super().acquire(blocking, timeout)
        raise KeyboardInterrupt


def is_free(lock: Lock) -> bool:
    """Whether another thread can take it."""
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(lock.take(0.0)))
    thread.start()
    thread.join()
    return found == [True]


@pytest.mark.parametrize("comes_first", [True, False])
def test_what_an_interrupt_has_hit_is_not_held(comes_first: bool):
    lock = Interrupted()
    lock.comes_first = comes_first
    with pytest.raises(KeyboardInterrupt):
        lock.take()
    lock.is_quiet = True
    assert is_free(lock)


@pytest.mark.parametrize("comes_first", [True, False])
def test_what_was_held_before_stays_held(comes_first: bool):
    lock = Interrupted()
    lock.comes_first, lock.is_quiet = comes_first, True
    with lock:
        lock.is_quiet = False
        with pytest.raises(KeyboardInterrupt):
            lock.take()
        lock.is_quiet = True
        assert not is_free(lock)
    assert is_free(lock)


def test_it_is_taken_again_by_who_holds_it_and_by_nobody_else():
    lock = Lock()
    assert lock.take() and lock.take(0.0)
    assert not is_free(lock)
    lock.release()
    assert not is_free(lock)
    lock.release()
    assert is_free(lock)


def test_a_wait_for_it_ends():
    lock = Lock()
    taken: list[bool] = []
    with lock:
        thread = threading.Thread(target=lambda: taken.append(lock.take(0.01)))
        thread.start()
        thread.join(PATIENCE_S)
    assert taken == [False]


def test_interrupts_that_really_come_leave_nothing_held():
    """One for each try, so that none hits what is not tried."""
    lock, ended, is_armed, hits = Lock(), threading.Event(), False, 0

    def interrupt(number: int, frame: object) -> None:
        nonlocal is_armed
        if is_armed:
            is_armed = False
            raise KeyboardInterrupt

    def send() -> None:
        while not ended.wait(0.0005):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while hits < 300 and time.monotonic() < deadline:
            try:
                is_armed = True
                while True:
                    with lock:
                        pass
                    if lock.take():
                        try:
                            pass
                        finally:
                            lock.release()
            except KeyboardInterrupt:
                hits += 1
            assert not lock._is_owned(), f"after {hits} interrupts"
    finally:
        ended.set()
        sender.join()
        signal.signal(signal.SIGUSR1, before)
    assert hits > 0
