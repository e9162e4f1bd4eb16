"""MemoryFiles behaves as OsFiles does, on a plain disk and on one that can crash; a disk is full, or fails, as told."""

from __future__ import annotations

import errno
import random
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.disk import CrashingDisk

from flintmq.errors import DataPathLocked, StorageError
from flintmq.storage import Files, OsFiles
from flintmq.testing import MemoryDisk, MemoryFiles, Operation

SEEDS = range(60)
DISKS = [MemoryDisk, CrashingDisk]
on_both_disks = pytest.mark.parametrize("new_disk", DISKS)


# ------------------------------------------------------------------------------- the contract, on memory and on the OS


@pytest.fixture(params=["memory", "crashing", "os"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Files]:
    disks = {"memory": MemoryDisk, "crashing": CrashingDisk}
    opened: Files = OsFiles(str(tmp_path)) if request.param == "os" else MemoryFiles(disks[request.param]())
    yield opened
    opened.close()


def test_write_and_read(files: Files):
    file = files.open("a", create=True)
    file.write_at(0, b"hello")
    file.write_at(3, bytearray(b"p!"))
    file.write_at(8, memoryview(b"end"))
    file.write_at(2, b"")
    assert file.size() == 11
    assert file.read_at(0, 100) == b"help!\0\0\0end"
    assert file.read_at(8, 2) == b"en"
    assert file.read_at(11, 1) == b""
    assert file.read_at(99, 1) == b""
    file.sync()
    assert files.open("a").read_at(0, 5) == b"help!"


def test_an_empty_write_past_the_end_adds_nothing(files: Files):
    file = files.open("a", create=True)
    file.write_at(10, b"")
    assert file.size() == 0


def test_truncate(files: Files):
    file = files.open("a", create=True)
    file.write_at(0, b"0123456789")
    file.truncate(4)
    file.truncate(6)
    assert file.read_at(0, 100) == b"0123\0\0"


def test_negative_positions_are_refused(files: Files):
    file = files.open("a", create=True)
    for call in (lambda: file.write_at(-1, b"x"), lambda: file.read_at(-1, 1), lambda: file.truncate(-1)):
        with pytest.raises(OSError, match="Invalid argument"):
            call()


def test_a_closed_file_refuses(files: Files):
    file = files.open("a", create=True)
    file.close()
    file.close()
    for call in (lambda: file.write_at(0, b"x"), lambda: file.read_at(0, 1), file.size, lambda: file.truncate(0)):
        with pytest.raises(OSError, match="Bad file descriptor"):
            call()


def test_open(files: Files):
    with pytest.raises(FileNotFoundError):
        files.open("a")
    with pytest.raises(FileNotFoundError):
        files.open("no/a", create=True)
    files.open("a", create=True).write_at(0, b"kept")
    assert files.open("a", create=True).read_at(0, 9) == b"kept"
    files.make_directory("d")
    with pytest.raises(IsADirectoryError):
        files.open("d")
    with pytest.raises(NotADirectoryError):
        files.open("a/b", create=True)


def test_directories(files: Files):
    files.make_directory("x/y/z")
    files.make_directory("x/y")
    files.open("x/y/b", create=True)
    files.open("x/y/a", create=True)
    assert files.list("") == ["x"]
    assert files.list("x/y") == ["a", "b", "z"]
    assert files.list("nothing") == []
    with pytest.raises(NotADirectoryError):
        files.list("x/y/a")
    with pytest.raises(NotADirectoryError):
        files.list("x/y/a/below")
    files.sync_directory("x/y")
    files.sync_directory("")
    with pytest.raises(FileNotFoundError):
        files.sync_directory("nothing")


def test_rename(files: Files):
    files.make_directory("d")
    files.make_directory("full/inside")
    files.make_directory("empty")
    files.open("a", create=True).write_at(0, b"A")
    files.open("b", create=True).write_at(0, b"B")
    handle = files.open("a")
    files.rename("a", "b")
    files.rename("b", "b")
    assert files.list("") == ["b", "d", "empty", "full"]
    assert files.open("b").read_at(0, 9) == handle.read_at(0, 9) == b"A"
    files.rename("b", "d/c")
    files.rename("d", "empty")
    assert files.open("empty/c").read_at(0, 9) == b"A"
    for source, target, error in (
        ("nothing", "e", FileNotFoundError),
        ("empty", "nothing/e", FileNotFoundError),
        ("empty/c", "full", IsADirectoryError),
        ("full", "empty/c", NotADirectoryError),
        ("full", "empty", OSError),
        ("full", "full/inside/deeper", OSError),
        ("empty/c", "empty", OSError),
    ):
        with pytest.raises(error):
            files.rename(source, target)


def test_remove(files: Files):
    files.open("a", create=True)
    handle = files.open("a")
    handle.write_at(0, b"still")
    files.remove("a")
    files.remove("a")
    files.remove("no/where")
    assert files.list("") == []
    assert handle.read_at(0, 9) == b"still"
    files.make_directory("d")
    with pytest.raises(IsADirectoryError):
        files.remove("d")


def test_remove_directory(files: Files):
    files.make_directory("d/e/f")
    files.open("d/a", create=True)
    files.open("d/e/b", create=True)
    files.remove_directory("d")
    files.remove_directory("d")
    assert files.list("") == []
    files.open("a", create=True)
    with pytest.raises(NotADirectoryError):
        files.remove_directory("a")


def test_only_an_empty_directory_is_removed_as_one(files: Files):
    files.make_directory("d/e")
    files.open("a", create=True)
    for path in ("d", "a", "there is none", "a/b"):
        files.remove_empty_directory(path)
    assert files.list("") == ["a", "d"] and files.list("d") == ["e"]
    for path in ("d/e", "d"):
        files.remove_empty_directory(path)
    assert files.list("") == ["a"]


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "d/../../up", ".."])
def test_paths_stay_inside(files: Files, path: str):
    for call in (files.open, files.list, files.remove, files.sync_directory, files.open_database):
        with pytest.raises(StorageError, match="leaves the data directory"):
            call(path)
    with pytest.raises(StorageError, match="leaves the data directory"):
        files.rename(path, "a")


def test_database(files: Files):
    database = files.open_database("state.db")
    database.run_transaction([("CREATE TABLE t (k INTEGER PRIMARY KEY, v BLOB)", [()])], sync=True)
    database.run_transaction(
        [("INSERT INTO t VALUES (?, ?)", [(1, b"one"), (2, b"two")]), ("DELETE FROM t", [()])], sync=False
    )
    database.run_transaction([("INSERT INTO t VALUES (?, ?)", [(3, b"three")])], sync=True)
    with pytest.raises(StorageError, match=r"state\.db: UNIQUE"):
        database.run_transaction([("INSERT INTO t VALUES (?, ?)", [(4, b"four"), (3, b"again")])], sync=True)
    assert database.query("SELECT k, v FROM t WHERE k > ?", (0,)) == [(3, b"three")]
    database.close()
    database.close()
    with pytest.raises(StorageError, match=r"state\.db: "):
        database.query("SELECT 1")
    again = files.open_database("state.db")
    assert again.query("SELECT k FROM t") == [(3,)]
    assert "state.db" in files.list("")


def test_free_bytes(files: Files):
    assert files.free_bytes() > 0


def test_the_lock(tmp_path: Path):
    disk = MemoryDisk()
    for attach in (disk.attach, lambda: OsFiles(str(tmp_path))):
        first: Files = attach()
        with pytest.raises(DataPathLocked):
            attach()
        first.close()
        first.close()
        attach().close()


Step = tuple[str, ...]
PATHS = st.sampled_from(["a", "b", "d", "d/a", "d/b", "d/e", "d/e/a", "", "d/", "./a"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), PATHS, st.integers(0, 20), st.binary(max_size=12)),
        st.tuples(st.just("truncate"), PATHS, st.integers(0, 20)),
        st.tuples(st.just("open"), PATHS, st.booleans()),
        st.tuples(st.just("rename"), PATHS, PATHS),
        st.tuples(st.sampled_from(["list", "make_directory", "remove", "remove_directory", "sync_directory"]), PATHS),
        st.tuples(st.just("remove_empty_directory"), PATHS),
    ),
    max_size=25,
)


def apply(files: Files, step: tuple[Any, ...]) -> object:
    """What a step answers, or the kind of its error."""
    name, path, *arguments = step
    try:
        if name == "write":
            files.open(path).write_at(*arguments)
            return files.open(path).read_at(0, 100)
        if name == "truncate":
            files.open(path).truncate(*arguments)
            return files.open(path).size()
        if name == "open":
            return files.open(path, *arguments).size()
        if name == "make_directory" and is_file(files, path):
            return None  # OsFiles takes it for the directory that it wants
        return getattr(files, name)(path, *arguments)
    except OSError as error:
        return error.errno


def is_file(files: Files, path: str) -> bool:
    try:
        files.open(path)
    except OSError:
        return False
    return True


def is_portable(step: tuple[Any, ...]) -> bool:
    """Whether a step stays away from the data directory itself and from spellings on which systems differ."""
    paths = [argument for argument in step[1:] if isinstance(argument, str)]
    return step[0] in ("list", "sync_directory") or not any(path in ("", "d/") for path in paths)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_memory_and_operating_system_agree(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Any, ...]]):
    real = OsFiles(str(tmp_path_factory.mktemp("data")))
    memory, crashing = (disk().attach() for disk in DISKS)
    for step in filter(is_portable, steps):
        assert apply(memory, step) == apply(crashing, step) == apply(real, step), step
    real.close()


# ------------------------------------------------------------------------------------------ a plain disk, and faults


@on_both_disks
def test_after_close_nothing_can_be_written(new_disk):
    disk = new_disk()
    files = disk.attach()
    file = files.open("a", create=True)
    files.close()
    with pytest.raises(OSError, match="closed its data directory"):
        file.write_at(0, b"x")


@on_both_disks
def test_a_full_disk(new_disk):
    disk = new_disk(capacity_bytes=100)
    files = disk.attach()
    file = files.open("a", create=True)
    file.write_at(0, bytes(80))
    assert files.free_bytes() == 20
    with pytest.raises(OSError, match="No space left") as caught:
        file.write_at(80, b"x" * 30)
    assert caught.value.errno == errno.ENOSPC
    assert file.size() == 100
    file.write_at(0, bytes(100))  # needs no more room
    with pytest.raises(StorageError, match="db: database or disk is full"):
        files.open_database("db").run_transaction([("CREATE TABLE t (k)", [()])], sync=True)
    file.truncate(10)
    assert files.free_bytes() == 90
    disk.set_free_bytes(5)
    with pytest.raises(OSError, match="No space left"):
        file.write_at(10, b"123456")
    assert file.size() == 15
    files.remove("a")
    assert files.free_bytes() == 15
    with pytest.raises(OSError, match="No space left"):
        files.open("b", create=True).write_at(1000, b"far away")
    assert files.open("b").size() == 0


@on_both_disks
def test_replacing_a_file_frees_its_room(new_disk):
    disk = new_disk(capacity_bytes=100)
    files = disk.attach()
    files.open("a", create=True).write_at(0, bytes(30))
    files.open("b", create=True).write_at(0, bytes(30))
    files.rename("a", "b")
    assert files.free_bytes() == 70


@on_both_disks
def test_the_nth_write_fails_in_part(new_disk):
    sizes = set()
    for seed in SEEDS:
        disk = new_disk(rng=random.Random(seed))
        file = disk.attach().open("a", create=True)
        disk.fail("write", nth=2, times=2)
        file.write_at(0, b"1234")
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output error") as caught:
                file.write_at(4, b"5678")
            assert caught.value.errno == errno.EIO
        sizes.add(file.size())
        file.write_at(4, b"good")
        assert file.read_at(0, 99) == b"1234good"
    assert sizes == {4, 5, 6, 7, 8}


@on_both_disks
def test_failures_can_be_aimed_and_healed(new_disk):
    disk = new_disk()
    files = disk.attach()
    disk.fail("create", path="d/", times=100, error=errno.ENOSPC)
    files.make_directory("d")
    files.open("a", create=True)
    with pytest.raises(OSError, match="No space left"):
        files.open("d/a", create=True)
    assert files.list("d") == []
    disk.heal()
    files.open("d/a", create=True)
    for kind, call in (
        ("rename", lambda: files.rename("a", "b")),
        ("remove", lambda: files.remove("a")),
        ("truncate", lambda: files.open("a").truncate(5)),
        ("sync_directory", lambda: files.sync_directory("")),
        ("commit", lambda: files.open_database("db").run_transaction([], sync=True)),
    ):
        disk.fail(kind)
        with pytest.raises((OSError, StorageError), match="Input/output error"):
            call()
    assert files.open("a").size() == 0


@on_both_disks
def test_a_database_has_one_user(new_disk):
    files = new_disk().attach()
    database = files.open_database("db")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        files.open_database("db")
    database.close()
    files.open_database("db")
    files.open("a", create=True)
    with pytest.raises(sqlite3.DatabaseError, match="not a database"):
        files.open_database("a")


@on_both_disks
def test_the_data_directory_itself_is_no_file(new_disk):
    files = new_disk().attach()
    for call in (files.remove_directory, files.open_database, lambda path: files.open(path, create=True)):
        with pytest.raises(StorageError, match="is the data directory itself"):
            call("")


@on_both_disks
def test_what_is_one_thing_is_no_other(new_disk):
    files = new_disk().attach()
    files.open("a", create=True)
    files.open_database("db").close()
    with pytest.raises(OSError, match="Invalid argument"):
        files.open("db")
    with pytest.raises(NotADirectoryError):
        files.make_directory("a")
    files.rename("db", "other")
    files.rename("a", "other")
    assert files.list("") == ["other"]


@on_both_disks
def test_a_removed_file_takes_no_room(new_disk):
    files = new_disk().attach()
    file = files.open("a", create=True)
    files.remove("a")
    file.write_at(0, bytes(1000))
    assert files.disk.free_bytes == files.disk.capacity_bytes


@on_both_disks
def test_a_sync_that_fails_says_so_and_the_next_one_succeeds(new_disk):
    disk = new_disk()
    file = disk.attach().open("a", create=True)
    disk.fail("sync")
    file.write_at(0, b"written")
    with pytest.raises(OSError, match="Input/output error"):
        file.sync()
    file.sync()
    assert file.read_at(0, 99) == b"written"


@on_both_disks
def test_a_process_that_is_released_leaves_what_it_wrote(new_disk):
    disk = new_disk()
    files = disk.attach()
    files.open("a", create=True).write_at(0, b"not synced")
    files.open_database("db").run_transaction([("CREATE TABLE t (k)", [()])], sync=False)
    disk.release()
    disk.release()
    with pytest.raises(OSError, match="dead"):
        files.open("a")
    assert disk.paths() == ["a", "db"]
    again = disk.attach()
    assert again.open("a").read_at(0, 99) == disk.content("a") == b"not synced"
    assert again.open_database("db").query("SELECT count(*) FROM t") == [(0,)]
    assert again.boot_id() == "boot 1"
    with pytest.raises(IsADirectoryError):
        disk.content("")


@on_both_disks
def test_operations_are_counted_and_observed(new_disk):
    disk = new_disk()
    seen: list[Operation] = []
    disk.observers.append(seen.append)
    file = disk.attach().open("a", create=True)
    file.write_at(0, b"123")
    file.read_at(0, 3)
    file.truncate(2)
    assert seen == [Operation(1, "create", "a", 0), Operation(2, "write", "a", 3), Operation(3, "truncate", "a", 2)]
    assert disk.operation_count == 3


@on_both_disks
def test_threads_may_share_a_disk(new_disk):
    files = new_disk().attach()
    file = files.open("a", create=True)

    def write(number: int) -> None:
        for index in range(200):
            file.write_at(4 * (number + 4 * index), b"%04d" % number)
            file.sync()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.read_at(0, 9999) == b"0000000100020003" * 200
    assert files.disk.operation_count == 1 + 4 * 400
    if isinstance(files.disk, CrashingDisk):
        files.disk.crash(power_loss=True, rng=random.Random(0))
