"""What renews a lease: a thread, for as long as the event loop of its holder turns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

import pytest

from flintmq.cluster.store import KeyValue, Lease, LeaseNotFound, Store, StoreRefused, StoreUnavailable, Tenure
from flintmq.net.lease import STANDSTILL_NS, HeldLease, holding
from flintmq.testing import ManualClock

PATIENCE_S = 60.0
KEY = "/flintmq/default/node/a"
TTL_NS = 30_000_000  # a third of it is the pause between two renewals


class FakeStore:
    """Counts what it is asked, in whatever thread, and answers as it is told.

    Attributes:
        error: raised instead of an answer.
        refusal: raised instead of what is read.
        threads: those that asked.
        asked: ``get`` or ``keepalive``, each time.
        is_silent: nothing is answered.
        is_gone: the lease has ended, which is said of a renewal alone.
        carried_out_ns: when it renewed a lease last, whether or not it answered.
    """

    def __init__(self, clock: ManualClock, is_apart: bool = True) -> None:
        self.clock = clock
        self.error: Exception | None = None
        self.refusal: Exception | None = None
        self.threads: list[str] = []
        self.asked: list[str] = []
        self.is_silent = False
        self.is_gone = False
        self.carried_out_ns = 0
        self.revoked: list[int] = []
        self._is_apart = is_apart
        self._news = threading.Condition()

    def apart(self) -> AbstractAsyncContextManager[Store] | None:
        return self._opened() if self._is_apart else None

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Store]:
        yield cast(Store, self)

    async def grant(self, ttl_s: int) -> Lease:
        return Lease(7, ttl_s)

    def _hear(self, what: str) -> None:
        with self._news:
            self.threads.append(threading.current_thread().name)
            self.asked.append(what)
            self._news.notify_all()

    async def get(self, key: str) -> KeyValue | None:
        assert key == KEY
        self._hear("get")
        if self.is_silent:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        if self.refusal is not None:
            raise self.refusal
        return None

    async def keepalive(self, lease_id: int) -> int:
        self.carried_out_ns = self.clock.boottime_ns()
        self._hear("keepalive")
        if self.is_silent:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        if self.is_gone:
            raise LeaseNotFound(lease_id)
        return 1

    async def revoke(self, lease_id: int) -> None:
        self.revoked.append(lease_id)

    def wait_for(self, count: int) -> None:
        """Hold whatever thread this is until there were so many renewals more."""
        with self._news:
            wanted = self.asked.count("keepalive") + count
            assert self._news.wait_for(lambda: self.asked.count("keepalive") >= wanted, PATIENCE_S)


def hold_until(condition: Any) -> None:
    """Hold the loop until something is so."""
    waiting = threading.Event()
    for _ in range(int(PATIENCE_S * 1000)):
        if condition():
            return
        waiting.wait(0.001)
    raise AssertionError("it never was")


def new_lease(store: FakeStore) -> HeldLease:
    return HeldLease(cast(Store, store), KEY, store.clock, 7, Tenure(TTL_NS, store.clock.boottime_ns()))


@pytest.mark.slow
async def test_a_loop_that_is_held_up_keeps_its_lease_and_one_that_hangs_does_not():
    store = FakeStore(ManualClock())
    lease = new_lease(store)
    keeping = asyncio.ensure_future(lease.keep())
    await asyncio.sleep(0)
    store.clock.advance(STANDSTILL_NS // 2)
    store.wait_for(3)  # and nothing else runs on this loop
    hold_until(lambda: lease.is_held)
    assert set(store.threads) == {"lease"} and not lease.failure
    store.clock.advance(STANDSTILL_NS)
    hold_until(lambda: lease.failure)
    assert "has not turned" in lease.failure
    count = len(store.threads)
    store.clock.advance(TTL_NS + STANDSTILL_NS)
    assert not lease.is_held, "it runs out"
    while len(store.threads) == count:  # the loop turns again
        await asyncio.sleep(0.001)
    while not lease.is_held:
        await asyncio.sleep(0.001)
    keeping.cancel()
    await asyncio.wait({keeping})
    assert not [each for each in threading.enumerate() if each.name == "lease"]


async def test_while_it_stands_still_nothing_is_renewed():
    store = FakeStore(ManualClock())
    lease = new_lease(store)
    keeping = asyncio.ensure_future(lease.keep())
    await asyncio.sleep(0)
    store.clock.advance(2 * STANDSTILL_NS)
    hold_until(lambda: lease.failure)
    count = len(store.threads)
    threading.Event().wait(0.1)  # five looks of the thread
    assert len(store.threads) == count
    keeping.cancel()
    await asyncio.wait({keeping})


@pytest.mark.parametrize("is_apart", [True, False])
async def test_a_lease_that_is_gone_is_known_at_once_and_told_on_the_loop(is_apart: bool):
    store = FakeStore(ManualClock(), is_apart)
    told: list[str] = []
    lease = new_lease(store)
    lease.on_change = lambda: told.append(threading.current_thread().name)
    keeping = asyncio.ensure_future(lease.keep())
    await asyncio.sleep(0)
    store.error = LeaseNotFound(7)
    store.clock.advance(TTL_NS // 2)
    if is_apart:
        hold_until(lambda: not lease.is_held)
        assert not lease.lost.is_set()
    async with asyncio.timeout(PATIENCE_S):
        await lease.lost.wait()
        await keeping
    assert set(told) == {threading.main_thread().name}


@pytest.mark.parametrize(
    ("stood_still_ns", "told"),
    [
        (TTL_NS + STANDSTILL_NS, "has run out: it was not renewed for 1.0 s, because this process stood still"),
        (TTL_NS // 2, "was ended before its time"),
    ],
)
async def test_what_it_means_that_a_lease_is_gone_is_said(
    stood_still_ns: int, told: str, caplog: pytest.LogCaptureFixture
):
    store = FakeStore(ManualClock(), is_apart=False)
    lease = new_lease(store)
    store.clock.advance(stood_still_ns)
    store.error = LeaseNotFound(7)
    async with asyncio.timeout(PATIENCE_S):
        await lease.keep()
    (record,) = [each for each in caplog.records if "lease 7" in each.message]
    assert record.levelname == "WARNING" and told in record.message and "asks for another lease" in record.message


@pytest.mark.parametrize("is_apart", [True, False])
async def test_a_store_that_is_away_is_asked_again(is_apart: bool):
    store = FakeStore(ManualClock(), is_apart)
    store.error = StoreUnavailable("away")
    lease = new_lease(store)
    keeping = asyncio.ensure_future(lease.keep())
    while len(store.threads) < 2:
        store.clock.advance(TTL_NS)
        await asyncio.sleep(0.01)
    assert lease.failure == "away" and not lease.is_held
    store.error = None
    while lease.failure:
        await asyncio.sleep(0.01)
    assert lease.is_held
    keeping.cancel()
    await asyncio.wait({keeping})
    assert set(store.threads) == ({"lease"} if is_apart else {threading.main_thread().name})


@pytest.mark.parametrize("is_apart", [True, False])
async def test_a_store_that_carries_out_and_answers_too_late_does_not_keep_the_lease(is_apart: bool):
    store = FakeStore(ManualClock(), is_apart)
    lease = new_lease(store)
    keeping = asyncio.ensure_future(lease.keep())
    store.error = StoreUnavailable("late")
    store.clock.advance(TTL_NS // 2)
    async with asyncio.timeout(PATIENCE_S):
        while "keepalive" not in store.asked:  # while it may be relied on it is renewed as it is
            await asyncio.sleep(0.001)
        store.clock.advance(TTL_NS)
        while "get" not in store.asked:
            await asyncio.sleep(0.001)
        store.clock.advance(3 * TTL_NS)
        while store.asked.count("get") < 4:
            await asyncio.sleep(0.001)
        first = store.asked.index("get")
        assert set(store.asked[first:]) == {"get"}, "nothing is renewed any more"
        assert store.carried_out_ns < store.clock.boottime_ns() - TTL_NS, "it has ended in the store"
        assert lease.failure == "late" and not lease.is_held and not lease.lost.is_set()
        store.error, store.is_gone = None, True
        await lease.lost.wait()
        await keeping


@pytest.mark.parametrize("is_apart", [True, False])
async def test_a_renewal_that_is_not_answered_is_given_up_when_the_lease_may_be_over(is_apart: bool):
    store = FakeStore(ManualClock(), is_apart)
    store.is_silent = True
    lease = new_lease(store)
    store.clock.advance(TTL_NS // 2)
    asked_at_ns = store.clock.boottime_ns()
    keeping = asyncio.ensure_future(lease.keep())
    async with asyncio.timeout(PATIENCE_S):
        while "keepalive" not in store.asked:
            await asyncio.sleep(0.001)
        store.clock.advance(TTL_NS)
        while store.asked[:2] != ["keepalive", "get"]:
            await asyncio.sleep(0.001)
    assert lease.asked_at_ns == asked_at_ns, "it has not answered since"
    keeping.cancel()
    await asyncio.wait({keeping})


@pytest.mark.parametrize("refusal", [None, StoreRefused("permission denied")])
async def test_a_store_that_was_away_for_long_is_asked_for_an_answer_and_then_for_the_lease(refusal: Exception | None):
    store = FakeStore(ManualClock(), is_apart=False)
    store.error, store.refusal = StoreUnavailable("away"), refusal
    lease = new_lease(store)
    store.clock.advance(100 * TTL_NS)
    keeping = asyncio.ensure_future(lease.keep())
    async with asyncio.timeout(PATIENCE_S):
        while len(store.asked) < 3:
            await asyncio.sleep(0.001)
        assert set(store.asked) == {"get"} and not lease.is_held and not lease.asked_at_ns
        store.asked.clear()
        store.error = None
        while not lease.is_held:
            await asyncio.sleep(0.001)
        assert store.asked == ["get", "keepalive"] and not lease.failure
        store.clock.advance(10**9 // 2)
        while len(store.asked) < 3:
            await asyncio.sleep(0.001)
        assert store.asked[2:] == ["keepalive"], "one that may be relied on is renewed without a read"
    keeping.cancel()
    await asyncio.wait({keeping})


async def test_an_error_of_ours_in_the_thread_is_told(caplog: pytest.LogCaptureFixture):
    store = FakeStore(ManualClock())
    store.error = RuntimeError("a bug")
    async with holding(cast(Store, store), KEY, store.clock, 1):
        store.clock.advance(10**9)
        while "a bug" not in caplog.text:
            await asyncio.sleep(0.01)
            store.clock.advance(10**8)
    assert "renewing a lease ended unexpectedly" in caplog.text and store.revoked == [7]


async def test_a_suspended_machine_has_lost_its_time():
    clock = ManualClock()
    store = FakeStore(clock, is_apart=False)
    async with holding(cast(Store, store), KEY, clock, 1) as lease:
        assert lease.is_held
        clock.suspend(10**9)
        assert not lease.is_held and lease.left_s <= 0
