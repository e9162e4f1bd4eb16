"""What a start makes of a coordination store whose files are not what the last answer left.

The files are those of a killed process: copied while it has them open. Whatever is done to one of them, a start has
all that was acknowledged, or refuses.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest
from tests.sim.disk import CrashingDisk, DiskCrashed
from tests.unit.nsqlookupd.test_store import on_the_loop, put

from flintmq.cluster.store import Delete, Span, Txn
from flintmq.env import Env
from flintmq.errors import StorageError
from flintmq.nsqlookupd.store import DATABASE_NAME, FORGOTTEN_REVISIONS, DamagedStore, EmbeddedStore, OlderStore
from flintmq.nsqlookupd.store_mark import MARK_NAME, Mark, MarkFile
from flintmq.storage import Files, OsFiles
from flintmq.testing import ManualClock, MemoryDisk, MemoryFiles

ALL = Span.of_prefix("")
WAL_NAME = f"{DATABASE_NAME}-wal"
FLIPS = 120
"""Positions of a file at which bits are flipped, beside every one of the first and last bytes."""


def new_store(files: Files, accepts_older: bool = False) -> EmbeddedStore:
    store = EmbeddedStore(Env(clock=ManualClock(), run_blocking=on_the_loop), files, accepts_older=accepts_older)
    try:
        store.open()
    except BaseException:
        files.close()
        raise
    return store


async def contents(store: EmbeddedStore) -> tuple[object, ...]:
    """All that was ever acknowledged."""
    return await store.ask(
        lambda state, now_ns: (
            state.revision,
            state.range(ALL).found,
            [state.time_to_live(lease_id, now_ns) for lease_id in (7, 8)],
        )
    )


async def close(store: EmbeddedStore) -> None:
    await store.close()
    store._files.close()


@pytest.fixture
async def killed(tmp_path: Path) -> tuple[Path, tuple[object, ...]]:
    """A directory as kill -9 leaves it, some of it in the database and some in its journal; what was acknowledged."""
    (tmp_path / "store").mkdir()
    store = new_store(OsFiles(str(tmp_path / "store")))
    await store.ask(lambda state, now_ns: state.grant(7, 60, now_ns))
    for number in range(40):
        await put(store, f"/old/{number}", value=b"v" * 200)
    await close(store)  # which writes the journal into the database
    store = new_store(OsFiles(str(tmp_path / "store")))
    await store.ask(lambda state, now_ns: state.grant(8, 60, now_ns))
    for number in range(8):
        await put(store, f"/old/{number}", f"/new/{number}", value=b"w" * 50)
    await store.ask(lambda state, _: state.apply(Txn((), (Delete("/old/30"),))))
    expected = await contents(store)
    shutil.copytree(tmp_path / "store", tmp_path / "killed")
    await close(store)
    assert (tmp_path / "killed" / WAL_NAME).stat().st_size > 10_000
    return tmp_path / "killed", expected


async def outcome(directory: Path, expected: tuple[object, ...]) -> str:
    """Start it: "all" of what was acknowledged, or the reason why it is refused."""
    try:
        store = new_store(OsFiles(str(directory)))
    except StorageError as error:
        assert isinstance(error, OlderStore | DamagedStore), error
        return str(error)
    found = await contents(store)
    await close(store)
    assert found == expected, "something is missing, and nobody was told"
    return "all"


def positions(size: int) -> Iterator[int]:
    edge = 32
    yield from range(min(edge, size))
    yield from range(edge, max(edge, size - edge), max(1, (size - 2 * edge) // FLIPS))
    yield from range(max(edge, size - edge), size)


@pytest.mark.slow
@pytest.mark.parametrize("name", [WAL_NAME, DATABASE_NAME, MARK_NAME, f"{DATABASE_NAME}-shm"])
async def test_a_flipped_bit_anywhere_is_made_good_or_refused(
    killed: tuple[Path, tuple[object, ...]], tmp_path: Path, name: str
):
    directory, expected = killed
    data = (directory / name).read_bytes()
    outcomes: dict[str, int] = {}
    for position in positions(len(data)):
        copy = tmp_path / "copy"
        shutil.copytree(directory, copy)
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        (copy / name).write_bytes(flipped)
        found = await outcome(copy, expected)
        outcomes[found] = outcomes.get(found, 0) + 1
        shutil.rmtree(copy)
    refused = sum(count for each, count in outcomes.items() if each != "all")
    if name in (MARK_NAME, f"{DATABASE_NAME}-shm"):
        assert not refused, outcomes
    else:
        assert refused > 10, outcomes
    if name == WAL_NAME:
        assert any("before the last that was acknowledged" in each for each in outcomes)


@pytest.mark.parametrize("name", [WAL_NAME, DATABASE_NAME, MARK_NAME])
async def test_a_file_that_is_cut_or_gone_is_made_good_or_refused(
    killed: tuple[Path, tuple[object, ...]], tmp_path: Path, name: str
):
    directory, expected = killed
    size = (directory / name).stat().st_size
    for kept in (None, 0, 1, 31, 32, 100, size // 3, size // 2, size - 5000, size - 1):
        copy = tmp_path / "copy"
        shutil.copytree(directory, copy)
        if kept is None:
            (copy / name).unlink()
        else:
            with (copy / name).open("r+b") as file:
                file.truncate(max(0, kept))
        found = await outcome(copy, expected)
        if name == WAL_NAME or kept is None or kept < 100:  # a page of the database may be in its journal as well
            assert "--accept-older-store" in found or "Restore it from a backup" in found, (kept, found)
        shutil.rmtree(copy)


async def test_a_database_of_an_earlier_time_is_refused(killed: tuple[Path, tuple[object, ...]], tmp_path: Path):
    directory, expected = killed
    backup = tmp_path / "backup"
    shutil.copytree(directory, backup)
    store = new_store(OsFiles(str(directory)))
    await put(store, "/since")
    await close(store)
    (backup / MARK_NAME).unlink()
    for path in directory.iterdir():
        if path.name != MARK_NAME:
            path.unlink()
    for path in backup.iterdir():
        shutil.copy(path, directory / path.name)
    assert "it ends 1 transactions before the last that was acknowledged" in await outcome(directory, expected)


async def test_a_mark_of_another_store_is_refused(killed: tuple[Path, tuple[object, ...]], tmp_path: Path):
    directory, expected = killed
    (tmp_path / "other").mkdir()
    await close(new_store(OsFiles(str(tmp_path / "other"))))
    shutil.copy(tmp_path / "other" / MARK_NAME, directory / MARK_NAME)
    assert "is of another store" in await outcome(directory, expected)


async def test_all_files_of_one_backup_are_taken(killed: tuple[Path, tuple[object, ...]]):
    directory, expected = killed
    assert await outcome(directory, expected) == "all"
    assert await outcome(directory, expected) == "all", "and once more, after it was closed"


@pytest.mark.parametrize("gone", [WAL_NAME, DATABASE_NAME, MARK_NAME])
async def test_who_insists_goes_on_and_no_revision_means_two_things(
    killed: tuple[Path, tuple[object, ...]], caplog: pytest.LogCaptureFixture, gone: str
):
    directory, expected = killed
    (directory / gone).unlink()
    if gone == DATABASE_NAME:
        (directory / WAL_NAME).unlink()
    acknowledged = expected[0]
    assert isinstance(acknowledged, int)
    store = new_store(OsFiles(str(directory)), accepts_older=True)
    assert "--accept-older-store" in caplog.text
    revision = await put(store, "/after")
    assert revision > acknowledged + FORGOTTEN_REVISIONS - 100 and revision > acknowledged
    assert await store.ask(lambda state, _: state.get("/after")) is not None
    await close(store)
    again = new_store(OsFiles(str(directory)))
    assert await put(again, "/after") == revision + 1, "and the next start asks nothing"
    await close(again)


# -- crashes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power_loss", [False, True])
@pytest.mark.parametrize("number", range(1, 40))
async def test_a_crash_at_any_operation_loses_nothing_and_the_next_start_goes_on(number: int, power_loss: bool):
    disk = CrashingDisk()
    rng = random.Random(number)
    crashed = asyncio.Event()
    acknowledged = 0

    def crash() -> None:
        disk.crash(power_loss, rng)
        crashed.set()

    async def work() -> None:
        nonlocal acknowledged
        store = new_store(disk.attach())
        for count in range(8):
            await put(store, f"/{count}")
            acknowledged = count + 1
        await close(store)

    disk.crash_at(number, power_loss, rng, crash)
    both = {asyncio.ensure_future(work()), asyncio.ensure_future(crashed.wait())}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    for task in both:
        task.cancel()
    for result in await asyncio.gather(*both, return_exceptions=True):
        assert result in (None, True) or isinstance(result, DiskCrashed | asyncio.CancelledError), result
    disk.heal()
    disk.release()
    store = new_store(disk.attach())
    found = await store.ask(lambda state, _: state.range(ALL).found)
    assert acknowledged <= len(found) <= acknowledged + 1
    await close(store)


@pytest.mark.slow
async def test_a_mark_that_cannot_be_written_holds_answers_up_until_it_can():
    disk = MemoryDisk()
    store = new_store(MemoryFiles(disk))
    await put(store, "/a")
    disk.fail("sync", path=MARK_NAME)
    with pytest.raises(Exception, match=r"store\.mark"):
        await put(store, "/b")
    while store._failure:
        await asyncio.sleep(0.05)
    await put(store, "/c")
    await close(store)
    store = new_store(MemoryFiles(disk))
    assert [pair.key for pair in (await store.ask(lambda state, _: state.range(ALL).found))] == ["/a", "/b", "/c"]
    await close(store)


def test_the_newer_of_two_marks_counts_and_a_torn_one_does_not():
    disk = CrashingDisk()
    files = disk.attach()
    file = MarkFile(files)
    file.load()
    assert not file.is_there
    for writes in range(5):
        file.write(9, Mark(writes, writes + 1, 77))
    file.close()
    again = MarkFile(files)
    again.load()
    assert (again.cluster_id, again.mark) == (9, Mark(4, 5, 77))
    for place in (4096, 8192):
        disk.zero(MARK_NAME, place, 20)
        again = MarkFile(files)
        again.load()
        if place == 4096:
            assert again.mark in (Mark(3, 4, 77), Mark(4, 5, 77))
    assert again.mark is None and again.is_there
    again.write(9, Mark(6, 7, 78))
    again.close()
    once_more = MarkFile(files)
    once_more.load()
    assert once_more.mark == Mark(6, 7, 78)


def test_a_mark_of_a_newer_release_is_refused():

    disk = CrashingDisk()
    files = disk.attach()
    file = MarkFile(files)
    file.write(9, Mark(0, 1, 0))
    file.close()
    head = bytearray(disk.content(MARK_NAME)[:16])
    head[5] = 9
    disk.damage(MARK_NAME, 0, bytes(head) + crc32(head).to_bytes(4, "big"))
    with pytest.raises(StorageError, match="has version 9"):
        MarkFile(files).load()
