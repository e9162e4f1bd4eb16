"""Who published what: the table, its snapshot, and that a start finds exactly what the log says after any crash."""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sim.disk import DiskCrashed
from tests.unit.storage.log_kit import DIRECTORY, Kit, ReadFaults, fetch_all, fill, read_all, sync

from flintmq.batch import HEADER_BYTES, PRODUCER, decode_batch, encode_batch, producer_of, with_stamps
from flintmq.errors import StorageError
from flintmq.limits import PRODUCER_ID_SIZE_MAX, PRODUCER_SEQUENCE_MAX, PRODUCERS_MAX, SINK_PRODUCERS_MAX
from flintmq.message import FRAME_OVERHEAD_BYTES
from flintmq.storage.partition_log import PartitionLog
from flintmq.storage.producers import SNAPSHOT_NAME, ProducerTable, decode_snapshot, encode_snapshot

SNAPSHOT = f"{DIRECTORY}/{SNAPSHOT_NAME}"
ids = st.binary(min_size=1, max_size=PRODUCER_ID_SIZE_MAX)
sequences = st.integers(1, PRODUCER_SEQUENCE_MAX)


# -- the batch ---------------------------------------------------------------------------------------------------------


@given(ids, sequences, st.lists(st.binary(max_size=30), min_size=1, max_size=9), st.integers(0, 2**20))
def test_a_batch_says_who_published_it(producer_id, sequence, bodies, offset):
    data = encode_batch(7, offset, 1, bodies, producer=(producer_id, sequence))
    plain = encode_batch(7, offset, 1, bodies)
    batch, without = decode_batch(data), decode_batch(plain)
    assert producer_of(data) == (producer_id, sequence)
    assert producer_of(plain) is None
    assert batch.header.flags == without.header.flags | PRODUCER
    assert bytes(batch.frames(7, 7 + len(bodies))) == bytes(without.frames(7, 7 + len(bodies)))
    assert list(batch.positions()) == list(without.positions())
    for number in range(7, 7 + len(bodies)):
        assert bytes(batch.frames(number, number + 1)) == bytes(without.frames(number, number + 1))
        assert batch.offset_of(number) == without.offset_of(number)


def test_stamps_keep_the_producer():
    data = with_stamps(encode_batch(7, 0, 1, [b"a", b"bb"], producer=(b"p", 5)), [(10, 2), (20, 3)])
    assert producer_of(data) == (b"p", 5)
    assert bytes(decode_batch(data).frames(8, 9)[FRAME_OVERHEAD_BYTES:]) == b"bb"


# -- table and snapshot ------------------------------------------------------------------------------------------------


def test_the_least_recently_used_is_forgotten():
    table = ProducerTable()
    for number in range(PRODUCERS_MAX):
        table.note(b"%d" % number, 1, 1)
    table.note(b"0", 2, 2)
    table.touch(b"1")
    table.note(b"new", 1, 1)
    table.note(b"newer", 1, 1)
    assert len(table) == PRODUCERS_MAX
    assert [table.last(b"%d" % number) for number in range(5)] == [2, 1, None, None, 1]


def sink_id(sink: str, epoch: int, task: int) -> bytes:
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    return f"sink:{sink}:{digits[epoch // 36]}{digits[epoch % 36]}:{task}".encode()


def test_sinks_have_room_of_their_own():
    """However many there are, they push out nobody else, and those of the last two epochs stay as long as they can."""
    table = ProducerTable()
    for number in range(PRODUCERS_MAX):
        table.note(b"%d" % number, 1, 1)
    tasks = SINK_PRODUCERS_MAX // 4
    for epoch in range(40):
        table.note(sink_id("other", 5, 0), epoch + 1, epoch + 1)
        for task in range(tasks):
            table.note(sink_id("q", epoch, task), 1, 7)
        assert len(table) <= PRODUCERS_MAX + SINK_PRODUCERS_MAX
        for kept in (epoch - 1, epoch) if epoch else (epoch,):
            assert all(table.last(sink_id("q", kept, task)) == 7 for task in range(tasks))
    assert table.last(sink_id("q", 30, 0)) is None
    assert table.last(sink_id("other", 5, 0)) == 40
    assert [table.last(b"%d" % number) for number in range(PRODUCERS_MAX)] == [1] * PRODUCERS_MAX
    found = decode_snapshot(encode_snapshot(42, 9, table), 42)
    assert found is not None and list(found[1].items()) == list(table.items())


def test_an_epoch_with_more_producers_than_there_is_room_for():
    table = ProducerTable()
    for task in range(2 * SINK_PRODUCERS_MAX):
        table.note(sink_id("q", 0, task), 1, 1)
        table.note(b"sink:without-an-epoch%d" % (task % 5), 1, 1)
    assert len(table) <= SINK_PRODUCERS_MAX
    assert table.last(sink_id("q", 0, 2 * SINK_PRODUCERS_MAX - 1)) == 1
    assert table.last(sink_id("q", 0, 0)) is None


@given(st.dictionaries(ids | ids.map(lambda name: b"sink:" + name[:32]), sequences, max_size=40), st.integers(1, 2**50))
def test_a_snapshot_is_read_as_it_was_written(entries, sequence):
    table = ProducerTable()
    for producer_id, last in entries.items():
        table.note(producer_id, last, last)
        if last > 100:
            table.lack(producer_id, 1, 20)
            table.lack(producer_id, 30, last)
    data = encode_snapshot(42, sequence, table)
    found = decode_snapshot(data, 42)
    assert found is not None
    assert found[0] == sequence
    assert list(found[1].items()) == sorted(entries.items(), key=lambda entry: entry[0].startswith(b"sink:"))
    for producer_id, last in entries.items():
        assert found[1].holes(producer_id, 1, last) == ([(1, 20), (30, last)] if last > 100 else [])
    assert decode_snapshot(data, 43) is None
    assert decode_snapshot(data[:-1], 42) is None
    assert decode_snapshot(data[:9] + bytes((data[9] ^ 1,)) + data[10:], 42) is None


# -- the log -----------------------------------------------------------------------------------------------------------


@dataclass
class History:
    """Every batch that was to be written: its place in the log, who published it, and its sequences."""

    batches: list[tuple[int, bytes, int, int]] = field(default_factory=list)
    next: dict[bytes, int] = field(default_factory=dict)

    def append(self, log: PartitionLog, producer_id: bytes, bodies: list[bytes]) -> None:
        first = self.next.get(producer_id, 1)
        self.next[producer_id] = first + len(bodies)
        self.batches.append((log.next_sequence, producer_id, first, first + len(bodies) - 1))
        log.append(bodies, 1, producer=(producer_id, first))

    def forget(self, end: int, lost: set[int]) -> None:
        """What was not written, or was lost, does not count; sequences from ``end`` on are used again."""
        self.batches = [batch for batch in self.batches if batch[0] < end and batch[0] not in lost]
        self.next = {producer_id: last + 1 for producer_id, last in self.table(end).items()}

    def table(self, end: int) -> dict[bytes, int]:
        """The last sequences that a log must know which ends before ``end``."""
        return {producer_id: last for sequence, producer_id, _, last in self.batches if sequence < end}

    def holes(self) -> dict[bytes, set[int]]:
        """Sequences that are missing before the last."""
        found = {producer_id: set(range(1, last)) for _, producer_id, _, last in self.batches}
        for _, producer_id, first, last in self.batches:
            found[producer_id] -= set(range(first, last + 1))
        return {producer_id: missing for producer_id, missing in found.items() if missing}


def known(log: PartitionLog) -> dict[bytes, int]:
    return dict(log.producers.table.items())


def known_holes(log: PartitionLog) -> dict[bytes, set[int]]:
    table = log.producers.table
    found = {
        producer_id: {n for first, end in table.holes(producer_id, 0, 1000) for n in range(first, end)}
        for producer_id, _ in table.items()
    }
    return {producer_id: holes for producer_id, holes in found.items() if holes}


def bodies_for(number: int) -> list[bytes]:
    return [b"%d of %d" % (i, number) + b"." * (number % 3 * i) for i in range(1 + number % 4)]


def work(kit: Kit, history: History) -> None:
    log = kit.open()
    for number in range(16):
        if number % 4 == 3:
            log.append([b"of nobody"] * 3, number)
        history.append(log, b"producer-%d" % (number % 3), bodies_for(number))
        if number % 3 == 1:
            sync(log)
        if number in (9, 13):
            log.drop_before(log.next_sequence - 4)
            sync(log)
            log.drop_before(log.next_sequence - 4)
    log.close()
    log = kit.open()
    history.append(log, b"late", [b"after a restart"])
    sync(log)
    log.close()


@pytest.fixture(params=[300, 10**9], ids=["often", "never"])
def snapshots(request, monkeypatch):
    """How many bytes lie between two snapshots."""
    monkeypatch.setattr("flintmq.storage.producers.PRODUCERS_SNAPSHOT_BYTES", request.param)
    monkeypatch.setattr("flintmq.storage.partition_log.CHECKPOINT_BYTES", 400)
    monkeypatch.setattr("flintmq.storage.recovery.CHECKPOINT_BYTES", 200)
    return request.param


def test_such_batches_are_read_like_others():
    kit = Kit(segment_bytes=2000)
    log = kit.open()
    model = fill(log, 10)
    for number in range(20):
        bodies = bodies_for(number)
        first = log.append(bodies, 2000, producer=(b"p" * (1 + number), 1 + number))
        model.update(enumerate(bodies, first))
    log.advance_committed(log.next_sequence)
    end_offset = log.end_offset_bytes
    assert read_all(log) == model
    assert fetch_all(log) == model
    offsets = {}
    for sequence in model:
        batch = log.read(sequence)
        assert batch is not None
        offsets[sequence] = batch.offset_of(sequence)
    log.drop_tail()
    assert read_all(log) == model
    assert fetch_all(log) == model
    assert sorted(offsets.values()) == list(offsets.values())
    for sequence, offset in offsets.items():
        assert log.sequence_at_offset(offset) == sequence
    log = kit.open()
    assert log.end_offset_bytes == end_offset
    assert read_all(log) == model
    assert not kit.reports


def test_a_damaged_batch_costs_only_itself():
    """Where the next one begins is found by sizes that count the prefix."""
    kit = Kit(segment_bytes=10**6)
    log = kit.open()
    for number in range(6):
        log.append(bodies_for(number), 1, producer=(b"p", 100 * number + 1))
    sync(log)
    model = read_all(log)
    path = kit.path(1)
    second = 64 + len(encode_batch(1, 0, 1, bodies_for(0), producer=(b"p", 1)))
    log.close()
    file = kit.files().open(path)
    file.write_at(second + HEADER_BYTES + 3, b"\xff")
    log = kit.open()
    found = read_all(log)
    assert found == {sequence: body for sequence, body in model.items() if sequence in found}
    assert set(model) - set(found) == {2, 3} == kit.lost()
    assert known(log) == {b"p": 502}


@pytest.mark.usefixtures("snapshots")
def test_a_start_finds_everybody_again():
    kit, history = Kit(segment_bytes=700), History()
    work(kit, history)
    log = kit.open()
    assert known(log) == history.table(log.next_sequence) != {}
    assert log.start_sequence > 1, "retention has dropped segments"
    assert not kit.reports


def test_a_log_without_producers_has_no_snapshot_and_is_not_searched():
    kit = Kit(segment_bytes=700)
    log = kit.open()
    fill(log, 30)
    sync(log)
    log.drop_before(10)
    log.close()
    assert not any(SNAPSHOT_NAME in path for path in kit.disk.paths())
    log = kit.open()
    assert not any(segment.has_producers for segment in log._segments)


def test_retention_waits_for_the_snapshot():
    kit, history = Kit(segment_bytes=400), History()
    log = kit.open()
    for number in range(12):
        history.append(log, b"p%d" % number, [b"x" * 50])
    sync(log)
    assert log.drop_before(log.next_sequence) == 0
    assert log.producers.is_snapshot_due
    sync(log)
    assert log.drop_before(log.next_sequence) > 0
    log = kit.open()
    assert known(log) == history.table(log.next_sequence)
    assert len(known(log)) == 12


def test_a_snapshot_that_cannot_be_written_costs_nothing_else():
    kit, history = Kit(segment_bytes=400), History()
    log = kit.open()
    for number in range(12):
        history.append(log, b"p%d" % number, [b"x" * 50])
    log.drop_before(log.next_sequence)
    kit.disk.fail("rename", path=SNAPSHOT)
    sync(log)
    assert log.failed is None
    assert log.producers.snapshot_error
    assert log.synced_sequence == log.next_sequence
    assert log.drop_before(log.next_sequence) == 0
    kit.disk.heal()
    sync(log)
    assert log.producers.snapshot_error is None
    assert log.drop_before(log.next_sequence) > 0


def test_a_snapshot_of_a_sync_that_failed_is_none():
    kit, history = Kit(segment_bytes=400), History()
    log = kit.open()
    for number in range(12):
        history.append(log, b"p%d" % number, [b"x" * 50])
    sync(log)
    assert log.drop_before(log.next_sequence) == 0
    log.append([b"y"], 1)
    kit.disk.fail("sync")
    sync(log)
    assert log.failed
    assert SNAPSHOT not in kit.disk.paths(), "it would vouch for what may be gone"
    assert log.producers.snapshot_error
    assert log.drop_before(log.next_sequence) == 0, "who published them is written down nowhere else"
    assert known(kit.open()) == history.table(log.next_sequence)


def test_a_damaged_snapshot_is_reported_and_made_again():
    kit, history = Kit(segment_bytes=400), History()
    log = kit.open()
    for number in range(12):
        history.append(log, b"p%d" % number, [b"x" * 50])
    log.producers.is_snapshot_due = True
    sync(log)
    log.close()
    kit.files().open(SNAPSHOT).write_at(20, b"\xff\xff")
    log = kit.open()
    assert [report.path for report in kit.reports] == [SNAPSHOT]
    assert known(log) == history.table(log.next_sequence)


@pytest.mark.parametrize("can_open", [True, False])
def test_a_snapshot_that_cannot_be_read(can_open):
    kit, history = Kit(segment_bytes=400), History()
    log = kit.open()
    history.append(log, b"p", [b"x"])
    log.producers.is_snapshot_due = True
    sync(log)
    log.close()
    kit.faults = ReadFaults()
    if can_open:
        kit.faults.bytes_unreadable[SNAPSHOT] = (0, 10, errno.EIO)
        assert known(kit.open()) == {b"p": 1}
        assert [report.path for report in kit.reports] == [SNAPSHOT]
    else:
        kit.faults.not_opening[SNAPSHOT] = errno.EMFILE
        with pytest.raises(StorageError, match="cannot open"):
            kit.open()


@pytest.mark.parametrize("lost", [".log", ".log and .index"])
def test_no_sequence_below_the_snapshot_is_used_again(lost):
    """Or what is stored there would not be found by the next start."""
    kit, history = Kit(segment_bytes=10**6), History()
    log = kit.open()
    for _ in range(4):
        history.append(log, b"p", [b"x"])
    log.producers.is_snapshot_due = True
    sync(log)
    log.close()
    for path in kit.disk.paths():
        if path.endswith(tuple(lost.split(" and "))):
            kit.files().remove(path)
    log = kit.open()
    assert log.next_sequence >= 5
    assert known(log) == {b"p": 4}
    history.append(log, b"q", [b"y"])
    log = kit.open()
    assert known(log) == {b"p": 4, b"q": 1}


def operations_of(snapshot_bytes: int) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flintmq.storage.producers.PRODUCERS_SNAPSHOT_BYTES", snapshot_bytes)
        patch.setattr("flintmq.storage.partition_log.CHECKPOINT_BYTES", 400)
        patch.setattr("flintmq.storage.recovery.CHECKPOINT_BYTES", 200)
        kit = Kit(segment_bytes=700)
        work(kit, History())
        return kit.disk.operation_count


OPERATIONS = max(operations_of(300), operations_of(10**9))


@pytest.mark.parametrize("power_loss", [False, True], ids=["kill", "power"])
@pytest.mark.parametrize("number", range(1, OPERATIONS + 1))
def test_crash_at_every_operation(number, power_loss, snapshots):
    """What a start knows of producers is what the log has: nobody is forgotten, nothing is known that is not stored."""
    for seed in range(3 if power_loss else 1):
        kit, history = Kit(segment_bytes=700), History()
        kit.disk.crash_at(number, power_loss, random.Random(seed * 1000 + number))
        try:
            work(kit, history)
        except DiskCrashed:
            pass
        else:
            assert snapshots > 300, "there are fewer operations without snapshots"
            return
        log = kit.open()
        history.forget(log.next_sequence, kit.lost())
        assert known(log) == history.table(log.next_sequence), kit.all_reports
        assert known_holes(log) == history.holes(), kit.all_reports
        history.append(log, b"producer-1", [b"goes on"])
        sync(log)
        kit.disk.crash(power_loss=True, rng=random.Random(seed))
        log = kit.open()
        assert known(log) == history.table(log.next_sequence)
        assert known_holes(log) == history.holes()


def test_a_hole_is_filled_once_and_remembered():
    """The first of two batches that nobody was promised is gone, the second is there."""
    kit, history = Kit(segment_bytes=10**6), History()
    log = kit.open()
    history.append(log, b"p", [b"a"] * 2)
    history.append(log, b"p", [b"b"] * 3)
    history.append(log, b"p", [b"c"])
    position = 64 + len(encode_batch(1, 0, 1, [b"a"] * 2, producer=(b"p", 1)))
    log.close()
    kit.files().open(kit.path(1)).write_at(position + HEADER_BYTES + 20, b"\xff")
    for _ in range(2):  # its damage is not met again by the next start
        log = kit.open()
        assert known(log) == {b"p": 6}
        assert known_holes(log) == {b"p": {3, 4, 5}}
        log.producers.is_snapshot_due = True
        sync(log)
        log.close()
    log = kit.open()
    log.append([b"b"], 1, producer=(b"p", 4))
    assert known(log) == {b"p": 6}
    assert known_holes(log) == {b"p": {3, 5}}
    for is_saved in (False, True):
        log.producers.is_snapshot_due = is_saved
        sync(log)
        log = kit.open()
        assert known(log) == {b"p": 6}
        assert known_holes(log) == {b"p": {3, 5}}
    log.append([b"b"], 1, producer=(b"p", 3))
    log.append([b"b"], 1, producer=(b"p", 5))
    assert known_holes(kit.open()) == {}
