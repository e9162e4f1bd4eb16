"""Cutting a log back: what stays, what goes, what is refused; and a crash at every disk operation of it."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable

import pytest
from tests.sim.disk import DiskCrashed
from tests.unit.storage.log_kit import DIRECTORY, Kit, fetch_all, fill, read_all, sync

from flintmq.batch import Batch
from flintmq.errors import StorageError, WriteFailed
from flintmq.limits import SEQUENCE_MAX
from flintmq.storage.cut import CUT_NAME
from flintmq.storage.partition_log import PartitionLog
from flintmq.storage.producers import SNAPSHOT_NAME, table_before

ONE, TWO = b"one", b"two"


@pytest.fixture(autouse=True)
def often_checkpointed(monkeypatch):
    monkeypatch.setattr("flintmq.storage.partition_log.CHECKPOINT_BYTES", 200)
    monkeypatch.setattr("flintmq.storage.recovery.CHECKPOINT_BYTES", 100)


def boundaries(kit: Kit, batches: int) -> tuple[PartitionLog, list[int]]:
    """A log with nothing committed, and where its batches begin."""
    log = kit.open()
    firsts = []
    for number in range(batches):
        firsts.append(log.next_sequence)
        fill(log, 1, number)
    return log, firsts


def batch_at(log: PartitionLog, sequence: int) -> Batch:
    batch = log.read(sequence)
    assert batch is not None
    return batch


def all_in(log: PartitionLog) -> dict[int, bytes]:
    stored = read_all(log)
    committed, log.committed_sequence = log.committed_sequence, log.next_sequence
    assert fetch_all(log) == stored
    log.committed_sequence = committed
    return stored


@pytest.mark.parametrize("is_synced", [False, True])
@pytest.mark.parametrize("is_in_memory", [False, True])
@pytest.mark.parametrize("index", range(12))
def test_what_is_before_it_stays_and_the_numbers_are_used_again(index, is_in_memory, is_synced):
    kit = Kit(segment_bytes=400)
    log, firsts = boundaries(kit, 12)
    assert len(log.segments()) > 3
    if is_synced:
        sync(log)
    if not is_in_memory:
        log.drop_tail()
    before = all_in(log)
    at = firsts[index]
    log.cut_back_to(at)
    left = {n: body for n, body in before.items() if n < at}
    assert (log.next_sequence, log.synced_sequence, log.committed_sequence, log.failed) == (at, at, 1, None)
    assert all_in(log) == left
    assert log.read(at) is None and log.sequence_at(1 << 60) == at
    assert log.size_bytes == sum(len(kit.disk.content(path)) for path in kit.logs())
    assert log.append([b"another"], 10**6) == at
    sync(log)
    kit.disk.crash(power_loss=True, rng=random.Random(1))
    log = kit.open()
    assert all_in(log) == left | {at: b"another"}
    assert kit.all_reports == []
    log.close()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("segment_bytes", [400, 100_000])
def test_a_power_loss_does_not_cut_it_again(seed, segment_bytes):
    """Neither the intent nor what went comes back once something new is synced in its place."""
    kit = Kit(segment_bytes=segment_bytes)
    log = kit.open()
    firsts = []
    for number in range(12):
        firsts.append(log.next_sequence)
        fill(log, 1, number)
        sync(log)  # what follows says so: its names are known to be durable
    before, at = all_in(log), firsts[7]
    log.cut_back_to(at)
    assert log.append([b"another"], 10**6) == at
    sync(log)
    kit.disk.crash(power_loss=True, rng=random.Random(seed))
    assert f"{DIRECTORY}/{CUT_NAME}" not in kit.disk.paths()
    assert all_in(kit.open()) == {n: body for n, body in before.items() if n < at} | {at: b"another"}
    assert kit.all_reports == []


def test_offsets_go_on_from_there():
    log, firsts = boundaries(Kit(), 5)
    wanted = batch_at(log, firsts[3]).header.offset_bytes
    log.cut_back_to(firsts[3])
    assert log.end_offset_bytes == wanted
    log.append([b"x"], 1)
    assert batch_at(log, firsts[3]).header.offset_bytes == wanted


def test_a_batch_of_the_leader_follows():
    """What a replica does: its own last batches go, those of another log of the partition come."""
    leader, firsts = boundaries(Kit(), 6)
    follower, _ = boundaries(Kit(), 3)
    follower.append([b"what nobody else has"], 5)
    follower.cut_back_to(firsts[3])
    for first in firsts[3:]:
        follower.append_batch(bytes(batch_at(leader, first).data))
    assert all_in(follower) == all_in(leader)


@pytest.mark.parametrize("beyond", [0, 1])
def test_not_below_what_is_committed(beyond):
    log, firsts = boundaries(Kit(), 4)
    log.advance_committed(firsts[2])
    before = log.describe()
    with pytest.raises(ValueError, match=f"committed up to {firsts[2]}"):
        log.cut_back_to(firsts[2 - beyond] - 1 + beyond)
    assert log.describe() == before
    log.cut_back_to(firsts[2])
    assert log.next_sequence == log.committed_sequence == firsts[2]


def test_not_where_no_batch_begins():
    log, firsts = boundaries(Kit(segment_bytes=300), 6)
    before, stored = log.describe(), all_in(log)
    wide = next(n for n in range(2, log.next_sequence) if n not in firsts)
    for sequence in (wide, log.next_sequence + 1, SEQUENCE_MAX):
        with pytest.raises(ValueError, match="no batch begins there"):
            log.cut_back_to(sequence)
    assert (log.describe(), all_in(log)) == (before, stored)


def test_at_its_end_it_does_nothing():
    kit = Kit()
    log, _ = boundaries(kit, 3)
    operations = kit.disk.operation_count
    log.cut_back_to(log.next_sequence)
    assert kit.disk.operation_count == operations


def test_not_below_what_was_dropped():
    log, firsts = boundaries(Kit(segment_bytes=300), 12)
    log.drop_before(firsts[6])
    assert log.start_sequence > 1
    with pytest.raises(ValueError, match="no batch begins there"):
        log.cut_back_to(1)


def test_a_log_that_failed_or_was_closed_refuses():
    kit = Kit()
    log, firsts = boundaries(kit, 3)
    log.close()
    with pytest.raises(WriteFailed):
        log.cut_back_to(firsts[1])


def test_what_was_found_damaged_behind_it_goes_and_before_it_stays():
    kit = Kit(segment_bytes=100_000)
    log, firsts = boundaries(kit, 10)
    sync(log)
    positions = [log._segments[0].position_of(first) for first in firsts]
    log.close()
    for index in (2, 7):
        kit.disk.flip_bit(kit.path(1), positions[index] + 40)
    log = kit.open()
    log.committed_sequence = 1
    read_all(log)
    copies = sorted((path for path in kit.disk.paths() if path.endswith(".bad")), key=len)
    assert len(copies) == 2
    log.cut_back_to(firsts[5])
    assert [path for path in kit.disk.paths() if path.endswith(".bad")] == copies[:1]
    assert max(read_all(log)) == firsts[5] - 1


# -- producers


def published(log: PartitionLog, producer: bytes, first: int, count: int = 1) -> int:
    return log.append([b"x"] * count, 1, producer=(producer, first))


def table_of(log: PartitionLog) -> dict[bytes, tuple[int, list[tuple[int, int]]]]:
    table = log.producers.table
    return {name: (last, table.holes(name, 0, 1 << 60)) for name, last in table.items()}


def test_what_producers_published_behind_it_is_forgotten():
    kit = Kit(segment_bytes=300)
    log = kit.open()
    for number in range(1, 6):
        published(log, ONE, number)
    at = published(log, ONE, 6, 2)
    published(log, TWO, 1, 3)
    published(log, ONE, 8)
    log.cut_back_to(at)
    assert table_of(log) == {ONE: (5, [])} or table_of(log) == {ONE: (5, []), TWO: (0, [])}
    assert published(log, ONE, 6, 2) == at
    sync(log)
    log.close()
    assert table_of(kit.open())[ONE] == (7, [])


def test_what_they_published_in_segments_that_were_dropped_is_not():
    kit = Kit(segment_bytes=300)
    log = kit.open()
    for number in range(1, 20):
        published(log, ONE, number)
    log.producers.is_snapshot_due = True
    sync(log)
    at = published(log, TWO, 1)
    log.drop_before(at)
    assert log.start_sequence > 1
    log.producers.is_snapshot_due = True
    sync(log)  # a snapshot that knows of what is to go
    log.cut_back_to(at)
    assert table_of(log)[ONE] == (19, [])
    kit.disk.crash(power_loss=True, rng=random.Random(1))
    assert table_of(kit.open())[ONE] == (19, [])


def test_a_hole_that_was_filled_behind_it_is_one_again():
    log = Kit().open()
    table = log.producers.table
    published(log, ONE, 1)
    table.lack(ONE, 2, 5)
    published(log, ONE, 5)
    at = published(log, ONE, 3)
    published(log, ONE, 6, 2)
    assert (table.last(ONE), table.holes(ONE, 0, 99)) == (7, [(2, 3), (4, 5)])
    left = table_before(table, log._segments, at)
    assert (left.last(ONE), left.holes(ONE, 0, 99)) == (5, [(2, 5)])


def test_taking_back_what_is_gone_already_changes_nothing():
    log = Kit().open()
    published(log, ONE, 1, 5)
    at = published(log, TWO, 1)
    published(log, ONE, 6)
    published(log, TWO, 2)
    published(log, ONE, 7)
    once = table_before(log.producers.table, log._segments, at)
    twice = table_before(once, log._segments, at)
    assert list(once.items()) == list(twice.items())
    assert dict(once.items())[ONE] == 5
    assert not twice.holes(ONE, 0, 99) and not twice.holes(TWO, 0, 99)


# -- crashes

SEGMENT_BYTES = 400
KEPT, GONE = 7, 6  # batches


LASTS: dict[int, tuple[bytes, int]] = {}  # first sequence of a batch -> its producer and the last of its messages


def lasts_of(stored: dict[int, bytes]) -> dict[bytes, int]:
    """The last sequence of each producer when the log has this."""
    return {producer: last for first, (producer, last) in LASTS.items() if first in stored}


def begin(kit: Kit) -> tuple[PartitionLog, int]:
    """A log whose last batches are to go, some of them synced and some not, of two producers and none."""
    log = kit.open()
    LASTS[published(log, ONE, 1, 2)] = ONE, 2
    fill(log, KEPT)
    log.advance_committed(log.next_sequence)
    LASTS[published(log, ONE, 3)] = ONE, 3
    log.producers.is_snapshot_due = True
    sync(log)
    at = log.next_sequence
    LASTS[published(log, TWO, 1)] = TWO, 1
    fill(log, GONE // 2, KEPT)
    log.producers.is_snapshot_due = True
    sync(log)
    LASTS[published(log, ONE, 4)] = ONE, 4
    fill(log, GONE // 2, KEPT + GONE // 2)
    return log, at


OPERATIONS_MAX = 60
SYNCED = begin(Kit(segment_bytes=SEGMENT_BYTES))[0].synced_sequence


def states() -> tuple[dict[int, bytes], dict[int, bytes]]:
    log, at = begin(Kit(segment_bytes=SEGMENT_BYTES))
    before = read_all(log)
    return before, {n: body for n, body in before.items() if n < at}


def check(kit: Kit, power_loss: bool) -> None:
    """It is as before, or as after; both with what producers had published then, and nothing is called lost."""
    log = kit.open()
    assert log.failed is None
    before, after = states()
    stored = all_in(log)
    is_after = stored == after
    if not is_after and power_loss:  # what had not been synced may be gone, and nothing else
        assert before.items() >= stored.items() >= {n: body for n, body in before.items() if n < SYNCED}.items()
    elif not is_after:
        assert stored == before
    lasts = {name: last for name, (last, holes) in table_of(log).items() if last and not holes}
    assert lasts == lasts_of(stored)
    lost = {n for n in kit.lost() if not power_loss or n < SYNCED}
    assert not lost, kit.all_reports
    assert not [path for path in kit.disk.paths() if path.endswith(CUT_NAME)]
    end = log.next_sequence
    assert log.append([b"new"], 10**6) == end
    sync(log)
    kit.disk.crash(power_loss=True, rng=random.Random(1))
    assert all_in(kit.open()) == stored | {end: b"new"}, "what came behind it is not cut"


def crash(kit: Kit, nth: int, power_loss: bool, seed: int) -> bool:
    """Crash at the nth operation of the cut; False when it does not have so many."""
    log, at = begin(kit)
    kit.disk.crash_at(kit.disk.operation_count + nth, power_loss, random.Random(seed))
    try:
        log.cut_back_to(at)
    except DiskCrashed:
        return True
    kit.disk.crash(power_loss, random.Random(seed))
    return False


def test_the_cut_does_what_crashes_are_for():
    kit = Kit(segment_bytes=SEGMENT_BYTES)
    log, at = begin(kit)
    seen: list[str] = []
    kit.disk.observers.append(lambda each: seen.append(f"{each.kind} {each.path.removeprefix(DIRECTORY + '/')}"))
    log.cut_back_to(at)
    assert sum(each.startswith("remove") and each.endswith(".log") for each in seen) >= 2
    assert any(each.startswith("truncate 0") for each in seen)
    order = [seen.index(f"rename {name}.tmp") for name in (SNAPSHOT_NAME, CUT_NAME)]
    assert order == sorted(order)
    assert 15 < len(seen) < OPERATIONS_MAX
    check(kit, power_loss=True)


@pytest.mark.parametrize("power_loss", [False, True], ids=["kill", "power"])
@pytest.mark.parametrize("nth", range(1, OPERATIONS_MAX))
def test_crash_at_every_operation(nth, power_loss):
    for seed in range(4 if power_loss else 1):
        kit = Kit(segment_bytes=SEGMENT_BYTES)
        is_cut = not crash(kit, nth, power_loss, seed * 1000 + nth)
        check(kit, power_loss)
        if is_cut:
            assert read_all(kit.open()).items() >= states()[1].items()
            return


@pytest.mark.slow
@pytest.mark.parametrize("power_loss", [False, True], ids=["kill", "power"])
@pytest.mark.parametrize("number", range(1, 40, 3))
def test_second_crash_while_it_is_finished(number, power_loss):
    nth = 1
    while True:
        kit = Kit(segment_bytes=SEGMENT_BYTES)
        crash(kit, number, power_loss, number)
        kit.disk.crash_at(kit.disk.operation_count + nth, power_loss, random.Random(nth))
        try:
            kit.open()
        except DiskCrashed:
            check(kit, power_loss)
            nth += 1
            continue
        break
    assert nth <= OPERATIONS_MAX


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("kind", ["write", "sync", "create", "truncate", "rename", "remove", "sync_directory"])
@pytest.mark.parametrize("nth", range(1, 6))
def test_an_error_at_every_operation(kind, nth, error):
    """It is done, or nothing was changed, or the log takes no more appends and the next start knows."""
    kit = Kit(segment_bytes=SEGMENT_BYTES)
    log, at = begin(kit)
    before, after = states()
    kit.disk.fail(kind, nth=nth, error=error)
    try:
        log.cut_back_to(at)
    except StorageError:
        assert log.failed is not None or read_all(log) == before
        if log.failed is not None:
            with pytest.raises(WriteFailed):
                log.append([b"x"], 1)
    else:
        assert log.failed is not None or read_all(log) == after
    kit.disk.heal()
    kit.disk.crash(power_loss=False, rng=random.Random(nth))
    check(kit, power_loss=False)


def damaged(data: bytes) -> bytes:
    return data[:-1] + bytes((data[-1] ^ 1,))


@pytest.mark.parametrize("change", [damaged, lambda data: data[:10], lambda _: b""], ids=["bit", "short", "empty"])
def test_a_cut_that_cannot_be_read_is_told_and_removed(change: Callable[[bytes], bytes]):
    kit = Kit(segment_bytes=SEGMENT_BYTES)
    steps: list[int] = []
    kit.disk.observers.append(
        lambda each: (
            steps.append(each.number) if each.kind == "rename" and each.path.endswith(f"{CUT_NAME}.tmp") else None
        )
    )
    log, at = begin(kit)
    steps.append(-kit.disk.operation_count)
    log.cut_back_to(at)
    kit = Kit(segment_bytes=SEGMENT_BYTES)
    assert crash(kit, sum(steps) + 1, False, 1)
    path = f"{DIRECTORY}/{CUT_NAME}"
    files = kit.files()
    file = files.open(path)
    data = change(file.read_at(0, 100))
    file.truncate(0)
    file.write_at(0, data)
    file.close()
    log = kit.open()
    assert [report.path for report in kit.reports if report.path == path]
    assert path not in kit.disk.paths()
    before, _ = states()
    assert all_in(log) == before
