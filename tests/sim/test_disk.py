"""CrashingDisk loses what its table says and nothing else, dies at any operation, and is damaged where it is told.

That it behaves as the operating system does while nothing goes wrong: ``tests/unit/testing/test_files.py``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.disk import CrashingDisk, DiskCrashed

from flintmq.errors import DamagedDatabase
from flintmq.storage import Files
from flintmq.testing import MemoryFiles, Operation

SEEDS = range(60)


# ---------------------------------------------------------------------------------------------------------- crashes


def lost_power(prepare: Callable[[MemoryFiles], object], seed: int) -> MemoryFiles:
    """What a new process finds after ``prepare`` and a power loss."""
    disk = CrashingDisk()
    prepare(disk.attach())
    disk.crash(power_loss=True, rng=random.Random(seed))
    return disk.attach()


def test_a_kill_loses_nothing():
    disk = CrashingDisk()
    files = disk.attach()
    files.open("a", create=True).write_at(0, b"unsynced")
    files.open("b", create=True)
    files.rename("b", "c")
    disk.crash(power_loss=False, rng=random.Random(0))
    survivor = disk.attach()
    assert survivor.list("") == ["a", "c"]
    assert survivor.open("a").read_at(0, 99) == b"unsynced"


def test_what_survived_a_kill_is_still_lost_with_the_power():
    sizes = set()
    for seed in SEEDS:
        disk = CrashingDisk()
        files = disk.attach()
        file = files.open("a", create=True)
        files.sync_directory("")
        file.write_at(0, bytes(1000))
        disk.crash(power_loss=False, rng=random.Random(seed))
        disk.crash(power_loss=True, rng=random.Random(seed))
        sizes.add(len(disk.content("a")))
    assert len(sizes) > 10


def test_power_loss_keeps_what_was_synced_and_part_of_the_rest():
    contents = set()
    for seed in SEEDS:

        def prepare(files: MemoryFiles) -> None:
            file = files.open("a", create=True)
            files.sync_directory("")
            file.write_at(0, b"synced")
            file.sync()
            for number in range(4):
                file.write_at(6 + 5 * number, b"%05d" % number)

        content = lost_power(prepare, seed).open("a").read_at(0, 99)
        assert content.startswith(b"synced")
        contents.add(content)
    whole = b"synced00000000010000200003"
    assert whole in contents
    assert b"synced" in contents
    assert any(content == whole[: len(content)] and len(content) % 5 != 1 for content in contents), "torn"
    assert any(content != whole[: len(content)] for content in contents), "out of order"


def test_sectors_of_one_write_survive_one_by_one():
    patterns = set()
    for seed in SEEDS:

        def prepare(files: MemoryFiles) -> None:
            file = files.open("a", create=True)
            files.sync_directory("")
            file.write_at(100, b"x" * 2000)

        content = lost_power(prepare, seed).open("a").read_at(0, 9999)
        pieces = [
            content[start:end] for start, end in ((100, 512), (512, 1024), (1024, 1536), (1536, 2048), (2048, 2100))
        ]
        patterns.add(tuple(bool(piece.strip(b"\0")) for piece in pieces))
        assert set(content) <= {0, ord("x")}
    assert any(later and not earlier for pattern in patterns for earlier, later in pairwise(pattern))


@settings(max_examples=200, deadline=None)
@given(
    synced=st.lists(st.tuples(st.integers(0, 3000), st.binary(min_size=1, max_size=1500)), max_size=4),
    unsynced=st.lists(st.tuples(st.integers(0, 3000), st.binary(min_size=1, max_size=1500)), max_size=4),
    seed=st.integers(0, 1000),
)
@pytest.mark.slow
def test_every_byte_after_a_power_loss_was_there_or_was_written(
    synced: list[tuple[int, bytes]], unsynced: list[tuple[int, bytes]], seed: int
):
    possible: list[set[int]] = [{0} for _ in range(5000)]

    def prepare(files: MemoryFiles) -> None:
        file = files.open("a", create=True)
        files.sync_directory("")
        for position, data in synced:
            file.write_at(position, data)
            for index, byte in enumerate(data, position):
                possible[index] = {byte}
        file.sync()
        for position, data in unsynced:
            file.write_at(position, data)
            for index, byte in enumerate(data, position):
                possible[index].add(byte)

    content = lost_power(prepare, seed).open("a").read_at(0, 9999)
    assert all(byte in possible[index] for index, byte in enumerate(content))
    assert len(content) >= max((position + len(data) for position, data in synced), default=0)


def test_syncing_a_file_does_not_save_its_name():
    def prepare(files: MemoryFiles) -> None:
        file = files.open("a", create=True)
        file.write_at(0, b"x")
        file.sync()

    found = {tuple(lost_power(prepare, seed).list("")) for seed in SEEDS}
    assert found == {(), ("a",)}


def test_a_synced_name_stays_with_or_without_its_bytes():
    def prepare(files: MemoryFiles) -> None:
        files.make_directory("d")
        files.open("d/a", create=True).write_at(0, b"x")
        files.sync_directory("d")

    found = {lost_power(prepare, seed).open("d/a").read_at(0, 9) for seed in SEEDS}
    assert found == {b"", b"x"}


def test_made_directories_stay():
    for seed in SEEDS:
        assert lost_power(lambda files: files.make_directory("d/e"), seed).list("d") == ["e"]


def test_a_rename_happens_or_not():
    def prepare(files: MemoryFiles) -> None:
        for name in ("new", "old"):
            file = files.open(name, create=True)
            file.write_at(0, name.encode())
            file.sync()
        files.sync_directory("")
        files.rename("new", "old")

    found = set()
    for seed in SEEDS:
        files = lost_power(prepare, seed)
        found.add((tuple(files.list("")), files.open("old").read_at(0, 9)))
    assert found == {(("new", "old"), b"old"), (("old",), b"new")}


def test_a_rename_between_directories_never_doubles_or_loses_the_file():
    def prepare(files: MemoryFiles) -> None:
        files.make_directory("d")
        files.make_directory("e")
        files.open("d/a", create=True)
        files.sync_directory("d")
        files.rename("d/a", "e/b")

    found = set()
    for seed in SEEDS:
        files = lost_power(prepare, seed)
        found.add((tuple(files.list("d")), tuple(files.list("e"))))
    assert found == {(("a",), ()), ((), ("b",))}


def test_syncing_a_directory_saves_what_the_change_was_built_upon():
    def prepare(files: MemoryFiles) -> None:
        files.make_directory("d")
        files.make_directory("e")
        files.open("d/a", create=True)
        files.rename("d/a", "e/b")
        files.sync_directory("e")

    for seed in SEEDS:
        files = lost_power(prepare, seed)
        assert (files.list("d"), files.list("e")) == ([], ["b"])


def test_removed_files_may_come_back():
    def prepare(files: MemoryFiles) -> None:
        file = files.open("a", create=True)
        file.write_at(0, b"x")
        file.sync()
        files.sync_directory("")
        files.remove("a")

    found = set()
    for seed in SEEDS:
        files = lost_power(prepare, seed)
        found.add(tuple(files.list("")))
        if files.list(""):
            assert files.open("a").read_at(0, 9) == b"x"
            assert files.disk.free_bytes == files.disk.capacity_bytes - 1
    assert found == {(), ("a",)}


def test_changes_of_one_directory_survive_in_order():
    def prepare(files: MemoryFiles) -> None:
        files.make_directory("d")
        for number in range(5):
            files.open(f"{number}", create=True)
            files.open(f"d/{number}", create=True)

    counts = set()
    for seed in SEEDS:
        files = lost_power(prepare, seed)
        outer = [name for name in files.list("") if name != "d"]
        inner = files.list("d")
        assert outer == [str(number) for number in range(len(outer))]
        assert inner == [str(number) for number in range(len(inner))]
        counts.add((len(outer), len(inner)))
    assert any(outer < inner for outer, inner in counts)
    assert any(outer > inner for outer, inner in counts)


def test_handles_of_a_dead_process_refuse_every_call():
    disk = CrashingDisk()
    files = disk.attach()
    file = files.open("a", create=True)
    database = files.open_database("db")
    disk.crash(power_loss=False, rng=random.Random(0))
    calls: list[Callable[[], object]] = [
        lambda: file.write_at(0, b"x"),
        lambda: file.read_at(0, 1),
        lambda: file.truncate(0),
        file.size,
        file.sync,
        lambda: files.open("a"),
        lambda: files.list(""),
        lambda: files.make_directory("d"),
        lambda: files.rename("a", "b"),
        lambda: files.remove("a"),
        lambda: files.remove_directory("d"),
        lambda: files.remove_empty_directory("d"),
        lambda: files.sync_directory(""),
        files.free_bytes,
        lambda: files.open_database("db"),
        lambda: database.query("SELECT 1"),
        lambda: database.run_transaction([], sync=True),
    ]
    for call in calls:
        with pytest.raises(OSError, match="dead"):
            call()
    file.close()
    database.close()
    files.close()
    assert disk.attach().list("") == ["a", "db"]


# --------------------------------------------------------------------------------------------- crashes at an operation


def workload(files: Files) -> None:
    files.make_directory("d")
    file = files.open("d/a", create=True)
    files.sync_directory("d")
    file.write_at(0, b"0123456789")
    file.sync()
    file.truncate(5)
    database = files.open_database("db")
    database.run_transaction([("CREATE TABLE t (k)", [()])], sync=True)
    database.run_transaction([("INSERT INTO t VALUES (?)", [(1,)])], sync=False)
    files.rename("d/a", "d/b")
    files.sync_directory("d")
    files.remove("d/b")
    files.remove_directory("d")


KINDS = [
    "make_directory",
    "create",
    "sync_directory",
    "write",
    "sync",
    "truncate",
    "create",
    "commit",
    "commit",
    "rename",
    "sync_directory",
    "remove",
    "remove_directory",
]


def test_the_operations_of_the_workload():
    disk = CrashingDisk()
    seen: list[Operation] = []
    disk.observers.append(seen.append)
    workload(disk.attach())
    assert [operation.kind for operation in seen] == KINDS
    assert [operation.number for operation in seen] == list(range(1, len(KINDS) + 1))
    assert seen[3] == Operation(4, "write", "d/a", 10)
    assert disk.operation_count == len(KINDS)


@pytest.mark.parametrize("power_loss", [False, True])
@pytest.mark.parametrize("number", range(1, len(KINDS) + 1))
def test_a_crash_at_each_operation(number: int, power_loss: bool):
    for seed in range(5):
        disk = CrashingDisk()
        disk.crash_at(number, power_loss, random.Random(seed))
        with pytest.raises(DiskCrashed, match=KINDS[number - 1]):
            workload(disk.attach())
        assert disk.operation_count == number
        workload(disk.attach() if not disk.paths() else wiped(disk))


def wiped(disk: CrashingDisk) -> MemoryFiles:
    files = disk.attach()
    for name in files.list(""):
        if name == "d":
            files.remove_directory(name)
        else:
            files.remove(name)
    return files


def test_a_write_in_progress_is_torn_anywhere():
    contents = set()
    for seed in SEEDS:
        disk = CrashingDisk()
        file = disk.attach().open("a", create=True)
        file.write_at(0, b"before")
        disk.crash_at(3, power_loss=False, rng=random.Random(seed))
        with pytest.raises(DiskCrashed):
            file.write_at(6, b"during")
        contents.add(disk.content("a"))
    assert contents == {b"beforeduring"[:size] for size in range(6, 13)}


@pytest.mark.parametrize("number", [3, 4, 5])
def test_other_operations_in_progress_have_happened_or_not(number: int):
    outcomes = set()
    for seed in SEEDS:
        disk = CrashingDisk()
        files = disk.attach()
        file = files.open("a", create=True)
        file.write_at(0, b"data")
        disk.crash_at(number, power_loss=False, rng=random.Random(seed))
        with pytest.raises(DiskCrashed):
            file.truncate(1)
            files.rename("a", "b")
            files.remove("b")
        outcomes.add(tuple(disk.paths()) if number > 3 else disk.content("a"))
    assert len(outcomes) == 2


def test_nothing_handles_a_crash():
    disk = CrashingDisk()
    disk.crash_at(1, power_loss=False, rng=random.Random(0))
    with pytest.raises(DiskCrashed):
        try:
            disk.attach().open("a", create=True)
        except Exception:  # noqa: BLE001  what a daemon would do
            pytest.fail("handled")


def test_a_simulation_kills_in_its_own_way():
    disk = CrashingDisk()
    killed: list[int] = []

    def kill() -> None:
        killed.append(disk.operation_count)
        disk.crash(power_loss=False, rng=random.Random(0))

    disk.crash_at(1, power_loss=False, rng=random.Random(0), kill=kill)
    with pytest.raises(DiskCrashed):
        disk.attach().open("a", create=True)
    assert killed == [1]
    with pytest.raises(ValueError, match="operation 1 is over"):
        disk.crash_at(1, power_loss=False, rng=random.Random(0))


def test_a_planned_crash_can_be_called_off():
    disk = CrashingDisk()
    disk.crash_at(1, power_loss=False, rng=random.Random(0))
    disk.heal()
    workload(disk.attach())
    disk.crash_at(disk.operation_count + 1, power_loss=False, rng=random.Random(0))
    disk.crash(power_loss=False, rng=random.Random(0))
    workload(wiped(disk))


# ------------------------------------------------------------------------------------------------------------ faults


def test_a_failed_sync_drops_the_data_and_says_so_only_once():
    disk = CrashingDisk()
    files = disk.attach()
    file = files.open("a", create=True)
    files.sync_directory("")
    file.write_at(0, b"kept")
    file.sync()
    disk.fail("sync")
    file.write_at(4, b"dropped")
    with pytest.raises(OSError, match="Input/output error"):
        file.sync()
    file.sync()
    assert file.read_at(0, 99) == b"keptdropped"
    disk.crash(power_loss=True, rng=random.Random(0))
    assert disk.content("a") == b"kept"


def test_a_failed_sync_shows_when_the_cache_is_dropped():
    disk = CrashingDisk()
    files = disk.attach()
    file = files.open("a", create=True)
    disk.fail("sync")
    file.write_at(0, b"dropped")
    with pytest.raises(OSError, match="Input/output error"):
        file.sync()
    file.write_at(7, b"dirty")
    files.open("b", create=True).write_at(0, b"")
    disk.drop_caches()
    assert file.read_at(0, 99) == b"\0\0\0\0\0\0\0dirty"
    assert disk.free_bytes == disk.capacity_bytes - 12


# --------------------------------------------------------------------------------------------------------- databases


def rows(files: MemoryFiles) -> list[int]:
    return [k for (k,) in files.open_database("db").query("SELECT k FROM t ORDER BY k")]


def fill(files: Files, syncs: list[bool]) -> None:
    database = files.open_database("db")
    database.run_transaction([("CREATE TABLE t (k)", [()])], sync=True)
    for number, sync in enumerate(syncs):
        database.run_transaction([("INSERT INTO t VALUES (?)", [(number,)])], sync)


def test_a_kill_keeps_the_last_commit():
    disk = CrashingDisk()
    fill(disk.attach(), [False] * 5)
    disk.crash(power_loss=False, rng=random.Random(0))
    assert rows(disk.attach()) == [0, 1, 2, 3, 4]


def test_power_loss_keeps_the_last_synced_commit_or_a_later_one():
    found = set()
    for seed in SEEDS:
        files = lost_power(lambda files: fill(files, [False, True, False, False]), seed)
        found.add(tuple(rows(files)))
    assert found == {(0, 1), (0, 1, 2), (0, 1, 2, 3)}


def test_many_unsynced_commits_keep_few_snapshots():
    found = set()
    for seed in SEEDS:
        found.add(len(rows(lost_power(lambda files: fill(files, [False] * 300), seed))))
    assert max(found) == 300
    assert min(found) < 100
    assert len(found) > 10


def test_a_damaged_database_is_noticed_when_it_is_opened_again():
    disk = CrashingDisk()
    files = disk.attach()
    fill(files, [True])
    files.close()
    disk.zero("db", 0, 100)
    with pytest.raises(DamagedDatabase):
        rows(disk.attach())


# ------------------------------------------------------------------------------------------------------------ damage


def test_damage():
    disk = CrashingDisk()
    files = disk.attach()
    file = files.open("d", create=True)
    files.sync_directory("")
    file.write_at(0, b"0123456789")
    file.sync()
    disk.flip_bit("d", 1)
    disk.flip_bit("d", 2, bit=7)
    disk.zero("d", 4, 2)
    disk.damage("d", 8, b"XYZ")
    assert disk.content("d") == b"00\xb23\0\x0067XYZ"
    disk.cut("d", 5)
    assert file.size() == 5
    disk.crash(power_loss=True, rng=random.Random(0))
    assert disk.content("d") == b"00\xb23\0"
    assert disk.paths() == ["d"]
    with pytest.raises(IsADirectoryError):
        disk.content("")
    with pytest.raises(IsADirectoryError):
        disk.zero("", 0, 1)


def test_a_cut_reaches_what_is_durable_and_what_is_not():
    disk = CrashingDisk()
    files = disk.attach()
    file = files.open("a", create=True)
    files.sync_directory("")
    file.write_at(0, b"synced")
    file.sync()
    file.write_at(6, b"volatile")
    disk.cut("a", 8)
    assert file.read_at(0, 99) == b"syncedvo"
    disk.cut("a", 3)
    assert file.read_at(0, 99) == b"syn"
    file.sync()
    disk.crash(power_loss=True, rng=random.Random(0))
    assert disk.content("a") == b"syn"


def test_damage_makes_nothing_durable():
    for seed in SEEDS:
        disk = CrashingDisk()
        files = disk.attach()
        file = files.open("a", create=True)
        files.sync_directory("")
        file.write_at(0, b"synced")
        file.sync()
        file.write_at(6, b"volatile")
        disk.flip_bit("a", 0)
        disk.flip_bit("a", 7)
        assert disk.content("a") == b"rynced" + b"vnlatile"
        disk.crash(power_loss=True, rng=random.Random(seed))
        content = disk.content("a")
        assert content.startswith(b"rynced")
        assert content[6:] in {text[:size] for text in (b"volatile", b"vnlatile", b"\0n") for size in range(9)}
