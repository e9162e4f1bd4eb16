"""Whether the coordination store takes writes: what counts, since when, and what is said in the log."""

from __future__ import annotations

import asyncio
import logging
from typing import cast

import pytest

from flintmq.cluster.store import (
    Compare,
    Fate,
    OutcomeUnknown,
    Put,
    Store,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    Txn,
    TxnResult,
    swap,
)
from flintmq.cluster.store_state import StoreState
from flintmq.nsqlookupd import store_check
from flintmq.nsqlookupd.store_check import StoreCheck
from flintmq.options import SECOND
from flintmq.testing import ManualClock

KEY = "/flintmq/c/check"
FULL = StoreFull("database space exceeded")


class FakeStore:
    """A store that takes what it is asked, or raises.

    Attributes:
        error: raised instead of an answer.
        asked: is set with every request.
    """

    def __init__(self) -> None:
        self.error: StoreError | None = None
        self.asked = asyncio.Event()
        self.state = StoreState()
        self.requests: list[Txn] = []

    async def txn(self, txn: Txn) -> TxnResult:
        self.requests.append(txn)
        self.asked.set()
        if self.error is not None:
            raise self.error
        return self.state.apply(txn)


class Bench:
    def __init__(self) -> None:
        self.store = FakeStore()
        self.clock = ManualClock()
        self.is_away = False
        self.check = StoreCheck(cast(Store, self.store), self.clock, KEY, lambda: self.is_away)

    async def after(self, error: StoreError | None) -> str:
        """Check once, a second after the last time, a store that fails so."""
        self.clock.advance(SECOND)
        self.store.error = error
        await self.check.check()
        return self.check.reason


async def test_a_check_changes_nothing_and_asks_for_a_write():
    bench = Bench()
    revision = bench.store.state.revision
    assert await bench.after(None) == "" and bench.store.state.revision == revision
    (asked,) = bench.store.requests
    assert asked == Txn((Compare(KEY, 1),), (Put(KEY, b""),))
    written = await swap(cast(Store, bench.store), KEY, None, b"somebody's")
    assert written.fate is Fate.APPLIED
    assert await bench.after(None) == "" and bench.store.state.revision == revision + 1


@pytest.mark.parametrize("error", [FULL, StoreRefused("permission denied")])
async def test_what_is_refused_counts_at_once_and_is_said_once(error: StoreError, caplog: pytest.LogCaptureFixture):
    bench = Bench()
    with caplog.at_level(logging.INFO):
        assert await bench.after(None) == "" and bench.check.since_s is None
        for _ in range(3):
            assert await bench.after(error) == str(error) and bench.check.is_refused
        assert bench.check.since_s == bench.clock.wall_ns() / SECOND - 2
        assert await bench.after(OutcomeUnknown("no answer")) == "no answer" and not bench.check.is_refused
        assert await bench.after(None) == "" and bench.check.since_s is None
    begun, ended = caplog.messages
    assert f"the coordination store takes no writes: {error}" in begun and "takes writes again" in ended


async def test_what_is_not_answered_counts_at_the_second_time_unless_the_store_is_away():
    bench = Bench()
    assert await bench.after(StoreUnavailable("no answer")) == ""
    assert await bench.after(None) == ""
    assert await bench.after(OutcomeUnknown("no answer")) == ""
    bench.is_away = True
    assert await bench.after(OutcomeUnknown("no answer")) == ""
    bench.is_away = False
    assert await bench.after(OutcomeUnknown("no answer")) == "no answer"
    assert bench.check.since_s == bench.clock.wall_ns() / SECOND - 2, "the first of them"


async def test_it_checks_again_soon_when_a_write_has_failed_and_while_nothing_is_taken(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(store_check, "CHECK_S", 3600.0)
    monkeypatch.setattr(store_check, "AGAIN_S", 0.001)
    bench = Bench()
    store = bench.store

    async def asked() -> None:
        await store.asked.wait()
        store.asked.clear()

    running = asyncio.ensure_future(bench.check.run())
    try:
        async with asyncio.timeout(60):
            await asked()  # at once, and then not for an hour
            store.error = FULL
            bench.check.doubt()
            for _ in range(3):
                await asked()
            assert bench.check.reason
            store.error = None
            while bench.check.reason:
                await asked()
    finally:
        running.cancel()
        await asyncio.wait({running})
