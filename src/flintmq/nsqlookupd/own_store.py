"""The embedded store as those use it who live in its process: the same protocol as over HTTP.

Rules of this file: what is answered is durable, and what is not known to be is said to be unknown; a call has a
deadline, because a disk may have none.

Source: :class:`flintmq.cluster.store.Store`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from flintmq.cluster.store import (
    Events,
    KeyValue,
    Lease,
    OutcomeUnknown,
    Snapshot,
    Span,
    StoreFull,
    StoreUnavailable,
    Txn,
    TxnResult,
)
from flintmq.cluster.store_state import StoreState
from flintmq.env import Env
from flintmq.nsqlookupd.store import EmbeddedStore

TIMEOUT_S = 4.0

Result = TypeVar("Result")


class OwnStore:
    """A :class:`flintmq.cluster.store.Store` over the one of this process.

    Args:
        env: for the ids of leases.
    """

    def __init__(self, embedded: EmbeddedStore, env: Env) -> None:
        self._embedded = embedded
        self._env = env

    async def close(self) -> None:
        """Do nothing: whoever opened the store closes it."""

    async def get(self, key: str) -> KeyValue | None:
        return await self._ask(lambda state, _: state.get(key))

    async def range(self, span: Span) -> Snapshot:
        def read(state: StoreState, _now_ns: int) -> Snapshot:
            found: list[KeyValue] = []
            rest = span
            while True:  # an answer of the state has a bound, which is for the network
                page = state.range(rest)
                found.extend(page.found)
                if not page.has_more:
                    return Snapshot(page.revision, tuple(found))
                rest = Span(found[-1].key + "\0", span.end)

        return await self._ask(read)

    async def txn(self, txn: Txn) -> TxnResult:
        return await self._change(lambda state, _: state.apply(txn))

    async def grant(self, ttl_s: int) -> Lease:
        lease_id = self._env.random.getrandbits(62) + 1
        return await self._ask(lambda state, now_ns: state.grant(lease_id, ttl_s, now_ns))

    async def keepalive(self, lease_id: int) -> int:
        return await self._ask(lambda state, now_ns: state.keepalive(lease_id, now_ns))

    async def revoke(self, lease_id: int) -> None:
        await self._change(lambda state, _: state.revoke(lease_id))

    @asynccontextmanager
    async def watch(self, span: Span, after: int) -> AsyncIterator[AsyncIterator[Events]]:
        watch = _Watch(self._embedded, span, after)
        self._embedded.listen(watch.wake)
        try:
            yield watch
        finally:
            self._embedded.unlisten(watch.wake)

    async def _ask(self, work: Callable[[StoreState, int], Result]) -> Result:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._embedded.ask(work)
        except TimeoutError:
            raise StoreUnavailable(f"the store was not written within {TIMEOUT_S:g} s") from None

    async def _change(self, work: Callable[[StoreState, int], Result]) -> Result:
        try:
            return await self._ask(work)
        except StoreFull:
            raise  # nothing was done
        except StoreUnavailable as error:
            raise OutcomeUnknown(f"a change is not known to be durable: {error}") from None


class _Watch:
    """One watch: how far it is told."""

    def __init__(self, embedded: EmbeddedStore, span: Span, after: int) -> None:
        self._embedded = embedded
        self._span = span
        self._after = after
        self._news = asyncio.Event()

    def wake(self) -> None:
        self._news.set()

    def __aiter__(self) -> _Watch:
        return self

    async def __anext__(self) -> Events:
        while True:
            self._news.clear()
            events = self._embedded.events_after(self._span, self._after)
            self._after = max(self._after, events.revision)
            if events.events:
                return events
            await self._news.wait()
