"""A store of another cluster than that of a data directory is as one that is away; the directory keeps which it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.cluster.models import KEYS, World, node, state

from flintmq.cluster.state import ClusterRecord, DiskRecord, encode
from flintmq.cluster.store import Compare, Event, Events, Get, KeyValue, Put, Snapshot, Span, Store, Txn, TxnResult
from flintmq.cluster.view import View
from flintmq.env import Env
from flintmq.nsqd.cluster.belonging import (
    ID_NAME,
    OPERATIONS_TAKEN_MAX,
    Belonging,
    BelongingStore,
    OtherCluster,
    OtherStore,
)
from flintmq.testing.files import MemoryFiles

MINE, ANOTHER = "00000000000000aa", "00000000000000bb"
KEY = KEYS.node("a")


async def _at_once(work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)


class Room:
    """A data directory, and the store that it is given."""

    def __init__(self) -> None:
        self.files = MemoryFiles()
        self.world = World()
        self.told: list[Events] = []
        self.belonging = self.start()
        self.store = BelongingStore(cast(Store, self), KEYS, self.belonging)

    def start(self) -> Belonging:
        """Return what another process reads from the directory."""
        belonging = Belonging(Env(run_blocking=_at_once), self.files)
        asyncio.run(belonging.load())
        return belonging

    def be_of(self, cluster_id: str) -> None:
        self.world.put(KEYS.record, ClusterRecord(cluster_id))

    async def get(self, key: str) -> KeyValue | None:
        return self.world.store.get(key)

    async def range(self, span: Span) -> Snapshot:
        return self.world.store.range(span)

    async def txn(self, txn: Txn) -> TxnResult:
        return self.world.store.apply(txn)

    @asynccontextmanager
    async def watch(self, span: Span, after: int) -> AsyncIterator[AsyncIterator[Events]]:
        async def tell() -> AsyncIterator[Events]:
            for events in self.told:
                yield events

        yield tell()


@pytest.fixture
def room() -> Room:
    room = Room()
    room.be_of(MINE)
    asyncio.run(room.belonging.adopt(MINE))
    return room


def put(value: bytes, mod_revision: int = 0) -> Txn:
    return Txn((Compare(KEY, mod_revision),), (Put(KEY, value), Get(KEY)), (Get(KEY),))


def test_the_directory_keeps_which_cluster_it_is(room: Room) -> None:
    assert room.start().cluster_id == MINE
    assert not Room().belonging.cluster_id


def test_a_damaged_file_is_as_none(room: Room, caplog: pytest.LogCaptureFixture) -> None:
    file = room.files.open(ID_NAME)
    file.write_at(0, b"?")
    file.close()
    assert not room.start().cluster_id
    assert "is damaged" in caplog.text


def test_the_store_of_the_cluster_is_as_it_is(room: Room) -> None:
    result = asyncio.run(room.store.txn(put(b"x")))
    assert result.succeeded and [pair.value for pair in result.found if pair is not None] == [b"x"]
    refused = asyncio.run(room.store.txn(put(b"y")))
    assert not refused.succeeded and [pair.value for pair in refused.found if pair is not None] == [b"x"]
    assert asyncio.run(room.store.range(KEYS.all)) == room.world.store.range(KEYS.all)
    assert asyncio.run(room.store.get(KEY)) == room.world.store.get(KEY)
    assert not room.store.problem


def test_what_it_takes_at_most_the_store_takes_with_what_is_added(room: Room) -> None:
    keys = [KEYS.node(str(number)) for number in range(OPERATIONS_TAKEN_MAX)]
    conditions, gets = tuple(Compare(each, 0) for each in keys), tuple(Get(each) for each in keys)
    puts = tuple(Put(each, b"x") for each in keys)
    assert asyncio.run(room.store.txn(Txn(conditions, puts, gets))).succeeded
    assert not asyncio.run(room.store.txn(Txn(conditions, puts, gets))).succeeded


@pytest.mark.parametrize("found", ["", ANOTHER], ids=["emptied", "another"])
def test_another_store_is_away(room: Room, found: str) -> None:
    asyncio.run(room.store.txn(put(b"x")))
    room.world = World()
    if found:
        room.be_of(found)
    asks: list[Callable[[], Any]] = [
        lambda: room.store.range(KEYS.all),
        lambda: room.store.txn(put(b"y")),
        lambda: room.store.get(KEY),
    ]
    for ask in asks:
        with pytest.raises(OtherStore, match=found or "has no cluster") as caught:
            asyncio.run(ask())
        assert (caught.value.mine, caught.value.found) == (MINE, found)
    assert room.world.store.get(KEY) is None, "nothing is written there"
    assert MINE in room.store.problem
    room.world = World()
    room.be_of(MINE)
    asyncio.run(room.store.range(KEYS.all))
    assert not room.store.problem and asyncio.run(room.store.txn(put(b"z"))).succeeded


@pytest.mark.parametrize("now", [None, ClusterRecord(ANOTHER)])
def test_what_a_watch_tells_of_another_cluster_is_not_handed_on(room: Room, now: ClusterRecord | None) -> None:
    def event(key: str, value: bytes | None, revision: int) -> Events:
        pair = None if value is None else KeyValue(key, value, revision, revision, 1)
        return Events(revision, (Event(revision, key, pair),))

    room.told = [event(KEY, b"x", 7), event(KEYS.record, None if now is None else encode(now), 8), event(KEY, b"y", 9)]

    async def followed() -> list[Events]:
        async with room.store.watch(KEYS.all, 6) as watched:
            first = await anext(watched)
            with pytest.raises(OtherStore):
                await anext(watched)
        return [first]

    assert asyncio.run(followed()) == room.told[:1]


def test_a_record_that_is_written_otherwise_is_the_same_cluster(room: Room) -> None:
    asyncio.run(room.store.range(KEYS.all))
    room.world.put(KEYS.record, encode(ClusterRecord(MINE)) + b" ")
    assert asyncio.run(room.store.txn(put(b"x"))).succeeded


def test_who_belongs_to_none_takes_any(room: Room) -> None:
    new = BelongingStore(cast(Store, room), KEYS, Room().belonging)
    assert asyncio.run(new.txn(put(b"x"))).succeeded and asyncio.run(new.range(KEYS.all)).found


def test_a_store_knows_the_node_or_one_of_its_logs() -> None:
    replicas: Any = [(("t", 0), SimpleNamespace(log_id=9))]

    def is_known(fill: Callable[[World], None]) -> bool:
        world, view = World(), View(KEYS)
        fill(world)
        view.feed(world.store.range(KEYS.all))
        return Belonging.is_known(view, "a", replicas)

    assert not is_known(lambda world: world.nodes("b"))
    assert not is_known(lambda world: world.partition("t", 0, state("b", "b", log_id=8)))
    assert is_known(lambda world: world.partition("t", 0, state("b", "b")))
    assert is_known(lambda world: world.partition("u", 0, state("b", "b", "ba", log_id=8)))
    assert is_known(lambda world: world.put(KEYS.disk("a"), DiskRecord(1, "a0")))
    assert is_known(lambda world: world.node(node("a")))


def test_what_a_node_of_another_cluster_is_to_do_is_said() -> None:
    assert str(OtherCluster("two ids")).startswith("two ids. Give the node") and "cluster.id" in str(OtherCluster("x"))
