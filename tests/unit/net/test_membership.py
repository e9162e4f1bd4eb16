"""Who finds another record in the place of its own gives way to a later one alone, not to one of an older store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest
from tests.unit.cluster.models import KEYS, node

from flintmq.clock import SystemClock
from flintmq.cluster.state import NodeRecord, decode, encode
from flintmq.cluster.store import KeyValue, Lease, Put, Store, StoreRefused, Txn, TxnResult
from flintmq.cluster.store_state import StoreState
from flintmq.net import membership
from flintmq.net.membership import Membership, Replaced

KEY = KEYS.node("a")
PATIENCE_S = 60.0
BEFORE, OTHER = node("a", incarnation="before"), node("a", incarnation="other")


class World:
    """A store whose leases do not end by themselves, and one process that is registered there."""

    def __init__(self, revision: int) -> None:
        self.state = StoreState()
        for _ in range(revision):
            self.write(BEFORE)
        self.lost = asyncio.Event()
        self.refusal: StoreRefused | None = None
        self.why_lost = ""
        self.lease_count = self.get_count = 0
        self.member = Membership(cast(Store, self), SystemClock(), KEY, node("a"), ttl_s=1, on_lost=self.note_lost)

    def note_lost(self, reason: str) -> None:
        self.why_lost = reason
        self.lost.set()

    def write(self, record: NodeRecord) -> None:
        self.state.apply(Txn((), (Put(KEY, encode(record)),)))

    def record(self) -> NodeRecord:
        pair = self.state.get(KEY)
        assert pair is not None
        return decode(KEY, pair.value, NodeRecord)

    async def get(self, key: str) -> KeyValue | None:
        self.get_count += 1
        if self.refusal is not None:
            raise self.refusal
        return self.state.get(key)

    async def txn(self, txn: Txn) -> TxnResult:
        return self.state.apply(txn)

    async def grant(self, ttl_s: int) -> Lease:
        self.lease_count += 1
        return self.state.grant(self.lease_count, ttl_s, 0)

    async def keepalive(self, lease_id: int) -> int:
        return self.state.keepalive(lease_id, 0)

    async def revoke(self, lease_id: int) -> None:
        self.state.revoke(lease_id)

    async def when_registered(self, change: Callable[[], None]) -> None:
        """Change something as soon as it is registered; return when it has found that it is so no longer."""
        self.member.start()
        await self.member.held()
        change()
        await self.lost.wait()


def test_a_record_that_is_older_than_its_own_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        world = World(revision=9)

        def put_back() -> None:
            world.state = StoreState()
            world.write(BEFORE)

        async with asyncio.timeout(PATIENCE_S):
            await world.when_registered(put_back)
            await world.member.held()
            assert world.record().incarnation == "a1"
            await world.member.close()

    asyncio.run(scenario())
    assert "the store is older than it was" in caplog.text and "node.id" not in caplog.text


def test_it_gives_way_as_soon_as_somebody_has_heard_of_a_later_one() -> None:
    """Its lease runs on: who has registered in its place could not end it."""

    async def scenario() -> None:
        world = World(revision=1)
        async with asyncio.timeout(membership.CHECK_S / 2):

            def take_over() -> None:
                world.member.doubt()
                world.write(OTHER)

            await world.when_registered(take_over)
            with pytest.raises(Replaced):
                await world.member.held()
            await world.member.close()

    asyncio.run(scenario())


def test_a_doubt_without_reason_changes_nothing() -> None:
    async def scenario() -> None:
        world = World(revision=1)
        async with asyncio.timeout(PATIENCE_S):
            world.member.start()
            await world.member.held()
            looked = world.get_count
            world.member.doubt()
            while world.get_count == looked:
                await asyncio.sleep(0)
            assert world.member.is_held and not world.lost.is_set()
            await world.member.close()

    asyncio.run(scenario())


def test_a_store_that_lets_it_in_no_longer_is_why() -> None:
    async def scenario() -> None:
        world = World(revision=1)

        def refuse() -> None:
            world.refusal = StoreRefused("the password was changed")
            world.member.doubt()

        async with asyncio.timeout(PATIENCE_S):
            await world.when_registered(refuse)
            await world.member.close()
        assert "the password was changed" in world.why_lost

    asyncio.run(scenario())


def test_it_gives_way_to_one_that_is_later() -> None:
    async def scenario() -> None:
        world = World(revision=1)

        def take_over() -> None:
            world.state.revoke(world.lease_count)
            world.write(OTHER)

        async with asyncio.timeout(PATIENCE_S):
            await world.when_registered(take_over)
            with pytest.raises(Replaced):
                await world.member.held()
            assert world.record() == OTHER
            await world.member.close()

    asyncio.run(scenario())
