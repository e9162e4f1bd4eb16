"""A data directory that is older than what its node told the store is found out, and nothing else is taken for one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from tests.unit.cluster.models import KEYS, node

from flintmq.cluster.state import DiskRecord, NodeRecord, decode, encode
from flintmq.cluster.store import Delete, OutcomeUnknown, Put, Span, Store, StoreUnavailable, Txn, TxnResult
from flintmq.cluster.store_state import StoreState
from flintmq.cluster.view import View
from flintmq.env import Env
from flintmq.nsqd.cluster.disk_mark import MARK_NAME, DiskMark
from flintmq.testing.files import MemoryFiles


async def _at_once(work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)


class Room:
    """A data directory and a coordination store.

    Attributes:
        failure: is raised by the store instead of an answer.
    """

    def __init__(self) -> None:
        self.files = MemoryFiles()
        self.state = StoreState()
        self.failure: Exception | None = None

    async def txn(self, txn: Txn) -> TxnResult:
        if self.failure is not None:
            raise self.failure
        return self.state.apply(txn)

    def start(self) -> DiskMark:
        """Return the mark of a process that has just been started and follows the store."""
        view = View(KEYS)
        view.feed(self.state.range(KEYS.all))
        mark = DiskMark(Env(run_blocking=_at_once), self.files, cast(Store, self), KEYS, view, "a", "incarnation")
        asyncio.run(mark.load())
        return mark

    def live(self, counts: int = 1) -> None:
        """One process, from its start to its end."""
        for _ in range(counts):
            asyncio.run(self.start().advance())

    def record(self) -> DiskRecord:
        """Return what the store knows."""
        (pair,) = self.state.range(Span.of_key(KEYS.disk("a"))).found
        return decode(pair.key, pair.value, DiskRecord)

    def start_record(self, state: StoreState) -> DiskRecord:
        """Return what another store knows."""
        (pair,) = state.range(Span.of_key(KEYS.disk("a"))).found
        return decode(pair.key, pair.value, DiskRecord)

    def put(self, key: str, value: NodeRecord | DiskRecord | None) -> None:
        self.state.apply(Txn((), (Put(key, encode(value)) if value else Delete(key),)))

    def content(self) -> bytes:
        file = self.files.open(MARK_NAME)
        try:
            return file.read_at(0, 64)
        finally:
            file.close()

    def put_back(self, content: bytes) -> None:
        file = self.files.open(MARK_NAME, create=True)
        try:
            file.truncate(0)
            file.write_at(0, content)
        finally:
            file.close()


@pytest.fixture
def room() -> Room:
    return Room()


def test_a_new_directory_and_one_that_was_stopped_are_not_older(room: Room) -> None:
    assert not room.start().is_older
    room.live(3)
    assert not room.start().is_older


def test_an_older_copy_is_found_out_by_each_process_until_it_counts_on(room: Room) -> None:
    room.live()
    before = room.content()
    room.live()
    room.put_back(before)
    assert room.start().is_older
    again = room.start()
    assert again.is_older
    asyncio.run(again.advance())
    assert not room.start().is_older
    assert room.content() > before


@pytest.mark.parametrize("content", [b"", b"0000000000000001 00000000\n", b"nonsense"])
def test_a_mark_that_is_damaged_is_none(room: Room, content: bytes) -> None:
    room.live()
    room.put_back(content)
    assert room.start().is_older


def test_a_store_that_is_older_or_new_says_nothing_of_the_directory(room: Room) -> None:
    room.live(2)
    room.state = StoreState()
    assert not room.start().is_older
    room.live()
    assert not room.start().is_older


def test_a_store_from_before_what_it_was_told_is_found_out(room: Room) -> None:
    assert not room.start().is_store_older
    room.live()
    before = room.state
    room.state = StoreState()
    room.put(KEYS.disk("a"), room.start_record(before))
    assert not room.start().is_store_older
    room.live()
    assert not room.start().is_store_older
    for _ in range(2):  # it is found out again until it is told something
        room.state = before
        assert room.start().is_store_older
    room.live()
    assert not room.start().is_store_older
    room.state = StoreState()
    assert room.start().is_store_older, "it knows nothing"


@pytest.mark.parametrize("failure", [OutcomeUnknown("lost"), StoreUnavailable("away")])
def test_a_store_that_was_not_told_is_not_older(room: Room, failure: Exception) -> None:
    room.live()
    room.failure = failure
    room.live(3)
    room.failure = None
    assert not room.start().is_store_older


@pytest.mark.parametrize("failure", [OutcomeUnknown("lost"), StoreUnavailable("away")])
def test_the_directory_counts_before_a_store_that_does_not_answer(room: Room, failure: Exception) -> None:
    room.failure = failure
    room.live(2)
    room.failure = None
    room.live()
    assert not room.start().is_older


def test_a_process_counts_on_with_what_the_store_had_when_it_began(room: Room) -> None:
    room.live()
    mark = room.start()
    for _ in range(3):
        asyncio.run(mark.advance())
    assert not room.start().is_older


def test_the_store_is_told_where_the_node_is(room: Room) -> None:
    """Also by a process that is not registered yet: where the one before was."""
    room.live()
    assert room.record() == DiskRecord(1, "incarnation")
    room.put(KEYS.node("a"), node("a"))
    room.live()
    assert room.record() == DiskRecord(2, "incarnation", "a.example", 4150, 4151)
    room.put(KEYS.node("a"), None)
    room.live()
    assert room.record() == DiskRecord(3, "incarnation", "a.example", 4150, 4151)


def test_nothing_is_told_to_the_store_that_the_directory_does_not_have(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    room.live()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("flintmq.nsqd.cluster.disk_mark.write_number", fail)
        room.live()
    assert not room.start().is_older
