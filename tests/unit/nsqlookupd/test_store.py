"""nsqlookupd's coordination store on a disk in memory: who watches, and what it refuses to open."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from flintmq.cluster.store import OPERATIONS_MAX, Put, Span, StoreUnavailable, Txn
from flintmq.cluster.store_state import StoreLimits
from flintmq.env import Env
from flintmq.errors import StorageError
from flintmq.net.http_messages import StreamingResponse
from flintmq.nsqlookupd import store as module
from flintmq.nsqlookupd.store import DamagedStore, EmbeddedStore
from flintmq.testing import ManualClock, MemoryDisk, MemoryFiles

ALL = Span.of_prefix("")


async def on_the_loop(function: Any, *args: Any) -> Any:
    await asyncio.sleep(0)
    return function(*args)


def new_store(disk: MemoryDisk, limits: StoreLimits | None = None) -> EmbeddedStore:
    store = EmbeddedStore(Env(clock=ManualClock(), run_blocking=on_the_loop), MemoryFiles(disk), limits)
    store.open()
    store.start()
    return store


async def close(store: EmbeddedStore) -> None:
    await store.close()
    store._files.close()


async def put(store: EmbeddedStore, *keys: str, value: bytes = b"x") -> int:
    txn = Txn((), tuple(Put(key, value) for key in keys))
    return (await store.ask(lambda state, _: state.apply(txn))).revision


def told(response: StreamingResponse) -> list[dict[str, Any]]:
    """The lines that are there now; an empty one when it has ended."""
    lines = []
    while piece := response.next_piece():
        lines.append(json.loads(piece)["result"])
    return lines if piece is not None else [*lines, {}]


async def test_a_watch_is_told_what_is_durable_in_pieces_with_a_bound():
    store = new_store(MemoryDisk())
    response = store.watch(ALL, 2)
    (created,) = told(response)
    assert created["created"] and created["header"]["revision"] == "1"
    woken: list[None] = []
    response.attach(lambda: woken.append(None))
    writing = asyncio.ensure_future(put(store, "a"))
    await asyncio.sleep(0)
    assert told(response) == [], "it is not written yet"
    await writing
    assert woken
    (line,) = told(response)
    assert [event["kv"]["key"] for event in line["events"]] == ["YQ=="]
    for number in range(20):
        await put(store, *(f"k{number}/{each}" for each in range(OPERATIONS_MAX)))
    lines = told(response)
    assert len(lines) > 1
    assert sum(len(line["events"]) for line in lines) == 20 * OPERATIONS_MAX
    response.closed()
    assert "watchers=0" in store.describe()
    await close(store)


async def test_a_watch_that_is_behind_what_is_remembered_is_told_so_and_ended():
    store = new_store(MemoryDisk(), StoreLimits(history_count_max=10))
    response = store.watch(ALL, 2)
    told(response)
    for number in range(30):
        await put(store, f"k{number}")
    line, end = told(response)
    assert line["canceled"] and int(line["compact_revision"]) > 10 and end == {}
    await close(store)


async def test_there_is_a_bound_on_watches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "WATCHER_COUNT_MAX", 2)
    store = new_store(MemoryDisk())
    first = store.watch(ALL, 0)
    store.watch(ALL, 0)
    with pytest.raises(StoreUnavailable, match="2 watches"):
        store.watch(ALL, 0)
    first.closed()
    store.watch(ALL, 0)
    await close(store)


async def test_what_waits_is_written_together():
    disk = MemoryDisk()
    store = new_store(disk)
    commits: list[str] = []
    disk.observers.append(lambda operation: commits.append(operation.kind))
    await asyncio.gather(*(put(store, f"k{number}") for number in range(50)))
    assert 1 <= commits.count("commit") <= 3
    await close(store)
    again = new_store(disk)
    assert (await again.ask(lambda state, _: state.key_count)) == 50
    await close(again)


@pytest.mark.parametrize(
    ("sql", "text"),
    [
        ("DELETE FROM store_lease", "rows of it are gone, or of different times"),
        ("DELETE FROM store_key", "rows of it are gone, or of different times"),
        ("DELETE FROM store_state", "its row of state is gone"),
        ("UPDATE store_key SET value = x'00'", "1 rows of store_key are not as they were written"),
        ("UPDATE store_state SET crc = crc + 1", "1 rows of store_state"),
        ("DROP TABLE store_lease", "no such table"),
    ],
)
async def test_what_is_not_as_it_was_written_is_refused(sql: str, text: str):
    disk = MemoryDisk()
    store = new_store(disk)
    await store.ask(lambda state, now_ns: state.grant(7, 60, now_ns))
    txn = Txn((), (Put("a", b"1", 7),))
    await store.ask(lambda state, _: state.apply(txn))
    await close(store)
    files = MemoryFiles(disk)
    database = files.open_database(module.DATABASE_NAME)
    database.run_transaction([(sql, ((),))], sync=True)
    database.close()
    with pytest.raises(StorageError, match=text) as refused:
        EmbeddedStore(Env(), files).open()
    assert isinstance(refused.value, DamagedStore) or "no such table" in text


async def test_a_newer_version_is_refused():
    disk = MemoryDisk()
    await close(new_store(disk))
    files = MemoryFiles(disk)
    database = files.open_database(module.DATABASE_NAME)
    database.run_transaction([module.STATE.put((1, 9, 5, 1, 1, 0))], sync=True)
    database.close()
    with pytest.raises(StorageError, match="has version 9, this nsqlookupd knows 2"):
        EmbeddedStore(Env(), files).open()
