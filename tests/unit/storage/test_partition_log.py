"""The log as its callers see it: append, commit, sync, read, fetch, search, retention, full and failing disks."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from itertools import pairwise
from zlib import crc32

import pytest
from tests.unit.storage.log_kit import (
    CREATED_NS,
    DIRECTORY,
    PARTITION,
    Kit,
    ReadFaults,
    bodies_of,
    fetch_all,
    fill,
    read_all,
    read_randomly,
    sync,
)

from flintmq.batch import HEADER_BYTES, decode_header, encode_batch
from flintmq.errors import DiskFull, FileSizeLimit, PartitionFailed, WriteFailed
from flintmq.limits import (
    BATCH_COUNT_MAX,
    DISK_RESERVE_BYTES,
    READ_AHEAD_BYTES,
    SPACE_SAMPLE_BYTES,
    SYNC_HANDLES_MAX,
    TAIL_CACHE_BYTES,
)
from flintmq.message import FRAME_OVERHEAD_BYTES, internal_id
from flintmq.storage import partition_log
from flintmq.storage.cache import ReadCache
from flintmq.storage.files import OsFiles
from flintmq.storage.partition_log import PartitionLog
from flintmq.storage.segment import SEGMENT_HEADER_BYTES


def lose_power(kit: Kit, seed: int = 0) -> None:
    kit.disk.crash(power_loss=True, rng=random.Random(seed))


def before_and_after_a_restart(kit: Kit, log: PartitionLog) -> Iterator[PartitionLog]:
    yield log
    yield kit.open()


def test_bytes_below_a_message_are_those_before_it_whatever_is_appended_behind_it():
    kit = Kit(segment_bytes=1 << 22)
    log = kit.open()
    for _ in range(10):
        log.append([bytes(100_000)], 1)
    told, per_message = log.bytes_below(6), log.size_bytes // 10
    assert 5 * per_message <= told < 6 * per_message
    for _ in range(500):
        log.append([b"small"], 1)
        assert log.bytes_below(6) == told
    log.append([bytes(3_500_000)], 1)  # in a segment of its own
    assert len(log.segments()) == 2
    for each in before_and_after_a_restart(kit, log):
        sync(each)
        assert each.bytes_below(6) == told
        assert each.bytes_below(511) == each.segments()[0].size_bytes
        assert each.bytes_below(each.next_sequence) == each.size_bytes


# append and read


def test_sequences_start_at_one_and_have_no_gaps():
    log = Kit().open()
    assert log.append([b"a"], 1) == 1
    assert log.append([b"b", b"c", b"d"], 2) == 2
    assert log.append([b"e"], 3) == 5
    assert log.next_sequence == 6
    assert read_all(log) == {1: b"a", 2: b"b", 3: b"c", 4: b"d", 5: b"e"}


def test_what_is_stored_is_the_batch_as_encoded():
    kit = Kit(segment_bytes=10_000)
    log = kit.open()
    log.append([b"one", b"three"], 77)
    offset = 2 * FRAME_OVERHEAD_BYTES + 8
    assert log.end_offset_bytes == offset
    sync(log)
    log.append([b"later"], 78, due_ns=99)
    first = encode_batch(internal_id(PARTITION, 1), 0, 77, [b"one", b"three"], synced_before=1)
    second = encode_batch(internal_id(PARTITION, 3), offset, 78, [b"later"], synced_before=3, due_ns=99)
    assert kit.disk.content(kit.path(1))[SEGMENT_HEADER_BYTES:] == first + second
    batch = log.read(3)
    assert batch is not None
    assert (batch.due_ns, batch.timestamp_ns, batch.data) == (99, 78, second)


def test_one_append_is_one_write():
    kit = Kit(segment_bytes=10_000)
    log = kit.open()
    before = kit.disk.operation_count
    log.append([b"body"] * 500, 1)
    assert kit.disk.operation_count == before + 1


@pytest.mark.parametrize("count", [0, BATCH_COUNT_MAX + 1])
def test_a_batch_has_a_bounded_number_of_messages(count):
    log = Kit().open()
    with pytest.raises(ValueError, match=f"a batch holds 1 to {BATCH_COUNT_MAX} messages, not {count}"):
        log.append([b""] * count, 1)
    assert log.next_sequence == 1


def test_a_batch_has_a_bounded_size(monkeypatch):
    monkeypatch.setattr(partition_log, "BATCH_SIZE_MAX", 1000)
    log = Kit().open()
    with pytest.raises(ValueError, match="at most 1000 are stored at once"):
        log.append([b"x" * 1000], 1)
    assert log.next_sequence == 1
    assert log.append([b"x" * 500], 1) == 1


def test_reading_from_memory_and_from_disk_is_the_same():
    kit = Kit(segment_bytes=2000)
    log = kit.open()
    model = fill(log, 40)
    assert read_all(log) == model
    log.drop_tail()
    assert read_all(log) == model
    assert read_all(kit.open()) == model


def test_any_order_of_reads_finds_everything(monkeypatch):
    monkeypatch.setattr(partition_log, "READ_AHEAD_BYTES", 600)
    kit = Kit(segment_bytes=2000)
    model = fill(kit.open(), 60)
    rng = random.Random(3)
    for _ in range(20):
        log = kit.open(cache=ReadCache(capacity_bytes=rng.choice([1, 3000, 1 << 20]), files_max=1))
        sequences = list(model)
        rng.shuffle(sequences)
        assert read_randomly(log, sequences) == model
        assert read_all(log) == model


def test_the_end_of_the_log_has_no_batch():
    kit = Kit()
    log = kit.open()
    fill(log, 9)
    end = log.next_sequence
    assert log.read(end) is None
    assert log.read(end + 100) is None
    log = kit.open()
    assert log.read(end) is None
    assert log.read(end + 100) is None


def test_a_sequence_below_the_first_gets_the_first():
    kit = Kit(segment_bytes=300)
    log = kit.open()
    fill(log, 20)
    log.drop_before(15)
    for start in (0, 1, 5):
        batch = log.read(start)
        assert batch is not None
        assert batch.first == log.start_sequence


def test_the_tail_is_read_without_the_disk():
    kit = Kit(segment_bytes=1 << 20)
    log = kit.open()
    for number in range(50):
        first = log.append([b"body %d" % number] * 3, number)
        batch = log.read(first + 1)
        assert batch is not None
        assert (batch.first, batch.end) == (first, first + 3)
        assert log.read(first) is batch, "nothing is decoded twice"
    kit.disk.zero(kit.path(1), SEGMENT_HEADER_BYTES, 1000)
    assert len(read_all(log)) == 150


def test_a_segment_is_filled_to_the_last_byte():
    probe = Kit(segment_bytes=1 << 20).open()
    for number in range(10):
        probe.append([b"x" * 100], number)
    log = Kit(segment_bytes=probe.size_bytes).open()
    for number in range(11):
        log.append([b"x" * 100], number)
    assert [info.end_sequence - info.first_sequence for info in log.segments()] == [10, 1]


def test_a_batch_larger_than_a_segment_gets_its_own():
    kit = Kit(segment_bytes=500)
    log = kit.open()
    log.append([b"small"], 1)
    log.append([b"L" * 2000], 2)
    log.append([b"small"], 3)
    assert [info.end_sequence - info.first_sequence for info in log.segments()] == [1, 1, 1]
    assert list(read_all(log).values()) == [b"small", b"L" * 2000, b"small"]


def test_segments_are_rolled_before_they_grow_too_large():
    kit = Kit(segment_bytes=1000)
    log = kit.open()
    model = fill(log, 60)
    infos = log.segments()
    assert len(infos) > 8
    assert all(info.size_bytes <= 1000 for info in infos)
    assert all(before.end_sequence == after.first_sequence for before, after in pairwise(infos))
    assert [info.is_sealed for info in infos] == [True] * (len(infos) - 1) + [False]
    assert kit.logs() == [kit.path(info.first_sequence) for info in infos]
    assert log.size_bytes == sum(info.size_bytes for info in infos)
    assert read_all(kit.open()) == model


# bounded memory


def test_the_tail_cache_is_bounded():
    log = Kit(segment_bytes=1 << 30).open()
    for number in range(3000):
        sequence = log.append([b"x" * 1000], number)
        assert log._tail_bytes <= TAIL_CACHE_BYTES
        if number > 2000:
            for before in (len(log._tail), len(log._tail) + 1):
                batch = log.read(sequence - before)
                assert batch is not None
                assert batch.first <= sequence - before < batch.end, "what left the tail is read from disk"
    assert len(log._tail) * 1000 > TAIL_CACHE_BYTES // 3
    assert log._cache.tails_bytes == log._tail_bytes
    assert len(log._tail) == len(log._tail_ends)


def test_one_batch_larger_than_the_tail_cache_is_kept_until_the_next():
    log = Kit(segment_bytes=1 << 30).open()
    log.append([b"x" * 2 * TAIL_CACHE_BYTES], 1)
    batch = log.read(1)
    assert batch is not None
    log.append([b"small"], 2)
    assert log._tail_bytes < TAIL_CACHE_BYTES
    again = log.read(1)
    assert again is not None
    assert again.data == batch.data


def test_the_tails_of_all_logs_together_are_bounded(monkeypatch):
    kit = Kit(segment_bytes=1 << 30)
    files = kit.disk.attach()
    cache = ReadCache(tails_bytes=20_000)
    logs = [
        PartitionLog.open(
            files,
            f"topics/{number}",
            partition=PARTITION,
            segment_bytes=1 << 20,
            cache=cache,
            report=kit.reports.append,
            created_ns=number,
        )
        for number in range(10)
    ]
    for number in range(300):
        log = logs[number % 10]
        log.append([b"%d" % number * 100], number)
        assert cache.tails_bytes <= 20_000
        assert sum(each._tail_bytes for each in logs) == cache.tails_bytes
    assert {sum(map(len, read_all(log).values())) for log in logs} <= set(range(6000, 9001))
    assert all(len(read_all(log)) == 30 for log in logs)
    for log in logs:
        log.close()
    assert cache.tails_bytes == 0
    assert cache.used_bytes == 0


def test_chunks_handles_and_indexes_are_bounded(monkeypatch):
    kit = Kit(segment_bytes=2000)
    model = fill(kit.open(), 300)
    cache = ReadCache(capacity_bytes=20_000, files_max=3)
    log = kit.open(cache=cache)
    assert len(log.segments()) > 20
    assert read_all(log) == model
    assert cache.used_bytes <= 20_000 + READ_AHEAD_BYTES
    assert len(cache._files) <= 3
    assert len(log._chunks) == len(log._chunk_firsts) <= 30
    kept = sum(segment.live_file is not None for segment in log._segments)
    assert kept == 1, "only the active segment keeps a handle of its own"


def test_sealed_segments_leave_no_handle_behind(tmp_path):
    files = OsFiles(str(tmp_path))
    log = PartitionLog.open(
        files, DIRECTORY, partition=PARTITION, segment_bytes=300, cache=ReadCache(files_max=2),
        report=print, created_ns=CREATED_NS,
    )  # fmt: skip
    before = len(os.listdir("/proc/self/fd"))
    for number in range(40):
        log.append([b"x" * 100], number)
        sync(log)
    assert len(log.segments()) > 15
    assert len(os.listdir("/proc/self/fd")) <= before + 2 + 2
    log.close()
    files.close()


def test_a_rebuilt_index_vouches_for_no_more_than_is_durable():
    kit = Kit(segment_bytes=400)
    log = kit.open()
    model = fill(log, 8)
    assert len(log.segments()) > 2
    log._files.remove(kit.path(1, ".index"))
    kit.cache.discard((log._home, 1))
    log.drop_tail()
    assert read_all(log) == model
    loaded = log._segments[0].load_index()
    assert loaded is not None
    assert loaded[0].synced_sequence <= log.synced_sequence == 1


def test_segments_never_synced_do_not_keep_handles():
    kit = Kit(segment_bytes=300)
    log = kit.open(cache=ReadCache(files_max=4))
    model = fill(log, 3 * SYNC_HANDLES_MAX * 2)
    assert len(log._unsynced) > 2 * SYNC_HANDLES_MAX
    assert sum(segment.live_file is not None for segment in log._segments) == 1
    ticket = log.begin_sync()
    assert ticket is not None
    assert ticket.end_sequence == log.next_sequence
    assert sum(segment.live_file is not None for segment in log._segments) == SYNC_HANDLES_MAX
    ticket.run()
    log.finish_sync(ticket, None)
    assert sum(segment.live_file is not None for segment in log._segments) == 1
    assert log._unsynced == []
    lose_power(kit)
    assert read_all(kit.open()) == model


def test_a_gap_in_front_of_the_oldest_segment_is_remembered():
    kit = Kit(segment_bytes=10_000)
    log = kit.open()
    fill(log, 3)
    end = log.next_sequence
    sync(log)
    log = kit.open(next_sequence_min=end + 40)
    log.append([b"x"], 1)
    assert log.told_gap() == (1, 1)
    log.drop_before(end + 40)
    assert log.told_gap() == (end, end + 40)


# commit


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_a_batch_is_fetched_when_all_of_it_is_committed(is_in_memory):
    log = Kit(segment_bytes=10_000).open()
    log.append([b"a"], 1)
    log.append([b"b", b"c", b"d"], 2)
    if not is_in_memory:
        log.drop_tail()
    for committed, expected in ((1, {}), (2, {1: b"a"}), (3, {1: b"a"}), (5, {1: b"a", 2: b"b", 3: b"c", 4: b"d"})):
        log.advance_committed(committed)
        data, following = log.fetch(1, 100, 10_000)
        assert bodies_of(data) == expected
        assert following == max(expected, default=0) + 1


def test_commit_only_goes_forward_and_not_beyond_the_end():
    log = Kit().open()
    fill(log, 5)
    end = log.next_sequence
    assert log.committed_sequence == 1
    log.advance_committed(4)
    log.advance_committed(2)
    assert log.committed_sequence == 4
    log.advance_committed(end + 50)
    assert log.committed_sequence == end


# syncing


def test_nothing_dirty_needs_no_sync():
    log = Kit().open()
    assert log.begin_sync() is None
    log.append([b"x"], 1)
    sync(log)
    assert log.synced_sequence == 2
    assert log.begin_sync() is None


def test_a_sync_covers_what_was_appended_before_it_began():
    kit = Kit(segment_bytes=10_000)
    log = kit.open()
    log.append([b"before"], 1)
    ticket = log.begin_sync()
    assert ticket is not None
    log.append([b"during"], 2)
    ticket.run()
    log.finish_sync(ticket, None)
    assert log.synced_sequence == ticket.end_sequence == 2
    assert log.begin_sync() is not None


def test_everything_synced_survives_a_power_loss_even_when_segments_rolled():
    for seed in range(20):
        kit = Kit(segment_bytes=400)
        log = kit.open()
        model = fill(log, 10)
        ticket = log.begin_sync()
        assert ticket is not None
        fill(log, 10)
        ticket.run()
        log.finish_sync(ticket, None)
        lose_power(kit, seed)
        log = kit.open()
        assert model.items() <= read_all(log).items()


def test_a_segment_that_grows_or_is_sealed_during_its_sync_stays_dirty():
    kit = Kit(segment_bytes=400)
    log = kit.open()
    log.append([b"one"], 1)
    ticket = log.begin_sync()
    assert ticket is not None
    model = fill(log, 6)
    assert len(log.segments()) > 2
    ticket.run()
    log.finish_sync(ticket, None)
    assert log._unsynced[0].first == 1, "what was written to it since is not synced"
    sync(log)
    assert log._unsynced == []
    assert log.synced_sequence == log.next_sequence
    lose_power(kit, 5)
    assert read_all(kit.open()) == model | {1: b"one"}


def test_a_segment_sealed_during_its_sync_keeps_the_file_that_is_being_synced():
    kit = Kit(segment_bytes=300)
    log = kit.open(cache=ReadCache(files_max=1))
    log.append([b"one"], 1)
    ticket = log.begin_sync()
    assert ticket is not None
    fill(log, 12)
    assert len(log.segments()) > 4, "every sealed segment hands its file to a cache that keeps one"
    log.drop_tail()
    assert len(read_all(log)) > 12
    ticket.run()
    log.finish_sync(ticket, None)
    assert log.failed is None
    lose_power(kit, 3)
    assert read_all(kit.open())[1] == b"one"


def test_a_failed_sync_makes_the_log_read_only_and_is_not_tried_again():
    kit = Kit()
    log = kit.open()
    fill(log, 3)
    sync(log)
    synced = log.synced_sequence
    log.append([b"never durable"], 9)
    kit.disk.fail("sync")
    sync(log)
    assert log.synced_sequence == synced
    assert log.failed is not None
    assert log.failed.startswith("sync failed: [Errno 5]")
    operations = kit.disk.operation_count
    assert log.begin_sync() is None
    with pytest.raises(WriteFailed, match="sync failed"):
        log.append([b"x"], 10)
    with pytest.raises(WriteFailed):
        log.roll()
    assert kit.disk.operation_count == operations
    log.close()
    assert kit.path(1, ".index") not in kit.disk.paths(), "no checkpoint of what is not durable"


def test_a_failed_directory_sync_counts_as_well():
    kit = Kit(segment_bytes=300)
    log = kit.open()
    fill(log, 6)
    kit.disk.fail("sync_directory")
    sync(log)
    assert log.failed is not None
    assert log.synced_sequence == 1


def test_after_a_failed_write_what_was_appended_before_can_still_be_synced():
    kit = Kit(segment_bytes=10_000)
    log = kit.open()
    log.append([b"good"], 1)
    kit.disk.fail("write")
    with pytest.raises(WriteFailed):
        log.append([b"bad"], 2)
    sync(log)
    assert log.synced_sequence == 2
    lose_power(kit)
    assert read_all(kit.open()) == {1: b"good"}


def test_a_file_that_cannot_be_opened_for_its_sync_makes_the_log_read_only_for_good():
    kit = Kit(segment_bytes=300)
    kit.faults = ReadFaults()
    log = kit.open(cache=ReadCache(files_max=1))
    fill(log, 8)
    kit.cache.close_file((log._home, 1))
    kit.faults.not_opening[kit.path(1)] = errno.EMFILE
    assert log.begin_sync() is None
    assert log.failed is not None
    assert log.synced_sequence == 1
    kit.faults.not_opening.clear()
    assert log.begin_sync() is None, "as after a sync that failed"


def test_an_old_file_that_cannot_be_opened_by_the_ticket_is_an_error(monkeypatch):
    monkeypatch.setattr(partition_log, "SYNC_HANDLES_MAX", 1)
    kit = Kit(segment_bytes=300)
    log = kit.open(cache=ReadCache(files_max=1))
    fill(log, 8)
    ticket = log.begin_sync()
    assert ticket is not None
    log._files.remove(kit.path(1))
    with pytest.raises(FileNotFoundError) as caught:
        ticket.run()
    log.finish_sync(ticket, caught.value)
    assert log.failed is not None


def test_only_one_sync_at_a_time():
    log = Kit().open()
    log.append([b"x"], 1)
    ticket = log.begin_sync()
    assert ticket is not None
    with pytest.raises(AssertionError, match="a sync is under way"):
        log.begin_sync()
    ticket.run()
    log.finish_sync(ticket, None)
    with pytest.raises(AssertionError, match="finish the sync that was begun"):
        log.finish_sync(ticket, None)


def test_the_watermark_is_in_every_batch():
    log = Kit(segment_bytes=10_000).open()
    for number in range(5):
        first = log.append([b"x"] * 3, number)
        batch = log.read(first)
        assert batch is not None
        assert batch.header.synced_before == log.synced_sequence == first
        sync(log)


def test_checkpoints_are_written_now_and_then(monkeypatch):
    monkeypatch.setattr(partition_log, "CHECKPOINT_BYTES", 1000)
    kit = Kit(segment_bytes=100_000)
    log = kit.open()
    written = []
    kit.disk.observers.append(lambda operation: written.append(operation.path) if operation.kind == "write" else None)
    for number in range(40):
        log.append([b"x" * 100], number)
        sync(log)
    assert 5 <= written.count(kit.path(1, ".index")) <= 8
    log.append([b"y"], 41)
    assert kit.disk.operation_count
    log.close()
    assert read_all(kit.open())[41] == b"y"


# full and failing disks


def test_a_full_disk_refuses_before_it_is_full_and_recovers_by_itself():
    kit = Kit(segment_bytes=1 << 20)
    log = kit.open()
    model = fill(log, 5)
    kit.disk.set_free_bytes(DISK_RESERVE_BYTES + SPACE_SAMPLE_BYTES)
    refused = 0
    for number in range(2000):
        try:
            first = log.append([b"x" * 1000], number)
        except DiskFull as error:
            assert error.needed_bytes == DISK_RESERVE_BYTES
            refused += 1
        else:
            model[first] = b"x" * 1000
    assert refused > 1000
    assert kit.disk.free_bytes >= DISK_RESERVE_BYTES - SPACE_SAMPLE_BYTES
    assert log.failed is None
    assert read_all(log) == model
    kit.disk.set_free_bytes(1 << 30)
    model[log.append([b"again"], 1)] = b"again"
    assert read_all(log) == model
    assert read_all(kit.open()) == model


@pytest.mark.parametrize("missing_bytes", [0, 1])
def test_the_reserve_is_what_is_left_behind_a_batch(missing_bytes):
    kit = Kit(segment_bytes=1 << 24)
    log = kit.open()
    body = b"x" * (2 * SPACE_SAMPLE_BYTES)
    before = log.size_bytes
    log.append([body], 1)
    size = log.size_bytes - before
    kit.disk.set_free_bytes(DISK_RESERVE_BYTES + size - missing_bytes)
    if missing_bytes:
        with pytest.raises(DiskFull) as caught:
            log.append([body], 2)
        assert caught.value.needed_bytes == DISK_RESERVE_BYTES and caught.value.size_bytes == size
        assert f" are kept in reserve, {size} more were to be stored; free space" in str(caught.value)
        assert log.next_sequence == 2
    else:
        assert log.append([body], 2) == 2
        assert kit.disk.free_bytes == DISK_RESERVE_BYTES


def test_after_a_write_without_space_the_free_space_is_looked_at_anew():
    kit = Kit(segment_bytes=10_000)
    log = kit.open()
    log.append([b"x"], 1)  # pays for more without a look
    kit.disk.fail("write", error=errno.ENOSPC)
    with pytest.raises(DiskFull) as caught:
        log.append([b"y"], 2)
    assert caught.value.size_bytes > 0 and caught.value.free_bytes > DISK_RESERVE_BYTES
    kit.disk.set_free_bytes(DISK_RESERVE_BYTES - 1)
    with pytest.raises(DiskFull):
        log.append([b"z"], 3)
    assert log.next_sequence == 2


def test_looking_at_the_free_space_is_rare(monkeypatch):
    kit = Kit(segment_bytes=1 << 30)
    log = kit.open()
    looks = 0
    free_bytes = log._files.free_bytes

    def counting() -> int:
        nonlocal looks
        looks += 1
        return free_bytes()

    monkeypatch.setattr(log._files, "free_bytes", counting)
    for number in range(2000):
        log.append([b"x" * 900], number)
    assert looks == pytest.approx(2_012_000 / SPACE_SAMPLE_BYTES, abs=2)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_in_the_middle_of_a_write_is_cut_and_recovers(error):
    kit = Kit(segment_bytes=10_000)
    log = kit.open()
    model = fill(log, 5)
    size = len(kit.disk.content(kit.path(1)))
    for _ in range(5):
        kit.disk.fail("write", error=error)
        with pytest.raises(DiskFull):
            log.append([b"refused" * 50], 2)
        assert len(kit.disk.content(kit.path(1))) == size
        kit.disk.heal()
    assert log.failed is None
    assert read_all(log) == model
    model[log.append([b"again"], 3)] = b"again"
    assert read_all(log) == read_all(kit.open()) == model
    assert kit.reports == []


def test_no_space_and_no_way_to_cut_makes_the_log_read_only():
    kit = Kit(segment_bytes=10_000)
    log = kit.open()
    model = fill(log, 5)
    kit.disk.fail("write", error=errno.ENOSPC)
    kit.disk.fail("truncate")
    with pytest.raises(WriteFailed, match="cannot cut it"):
        log.append([b"refused" * 50], 2)
    assert log.failed is not None
    kit.disk.heal()
    assert read_all(log) == model
    assert read_all(kit.open()) == model


@pytest.mark.parametrize("power_loss", [False, True])
def test_a_failed_write_is_never_visible_and_the_log_is_read_only(power_loss):
    for seed in range(10):
        kit = Kit(segment_bytes=10_000)
        log = kit.open()
        model = fill(log, 5)
        sync(log)
        kit.disk.fail("write")
        with pytest.raises(WriteFailed):
            log.append([b"failed %d" % seed] * 20, 2)
        kit.disk.heal()
        assert log.next_sequence == max(model) + 1
        assert read_all(log) == model
        with pytest.raises(WriteFailed):
            log.append([b"later"], 3)
        assert read_all(log) == model
        kit.disk.crash(power_loss, random.Random(seed))
        log = kit.open()
        assert log.failed is None
        assert model.items() <= read_all(log).items()
        assert set(read_all(log).values()) - set(model.values()) <= {b"failed %d" % seed}
        assert log.append([b"after"], 4) == log.next_sequence - 1


def test_a_log_that_fails_tells_so_once_and_its_errors_say_until_when():
    kit = Kit(segment_bytes=10_000)
    log = kit.open()
    fill(log, 5)
    told: list[tuple[str, str]] = []
    log.on_failed = lambda directory, reason: told.append((directory, reason))
    kit.disk.fail("write")
    for _ in range(2):
        with pytest.raises(PartitionFailed, match=r"Errno 5.*; the partition takes no more messages until nsqd is"):
            log.append([b"refused"], 2)
    assert told == [(log.directory, log.failed)]


def test_a_log_that_is_closed_tells_nothing():
    log = Kit(segment_bytes=10_000).open()
    log.on_failed = lambda _directory, reason: pytest.fail(reason)
    log.close()
    with pytest.raises(WriteFailed, match=r"the log is closed$"):
        log.append([b"refused"], 2)


@pytest.mark.parametrize("as_copy", [False, True])
def test_where_a_file_may_not_grow_further_another_one_goes_on(as_copy):
    """The limit is met within a write, of which some bytes are in the file by then."""
    kit = Kit(segment_bytes=100_000)
    log = kit.open()
    model = fill(log, 5)
    for number in range(3):
        batch = encode_batch(log.home.id_base | log.next_sequence, log.end_offset_bytes, 2, [b"%d" % number * 50] * 2)
        first = log.next_sequence
        kit.disk.fail("write", error=errno.EFBIG)
        if as_copy:
            log.append_batches(memoryview(batch), [decode_header(batch)])
        else:
            log.append([b"%d" % number * 50] * 2, 2)
        assert log.failed is None and log.next_sequence == first + 2
        model |= {first: b"%d" % number * 50, first + 1: b"%d" % number * 50}
        assert len(log.segments()) == number + 2
    assert log.append([b"after"], 3) == log.next_sequence - 1
    model[log.next_sequence - 1] = b"after"
    sync(log)
    assert read_all(log) == read_all(kit.open()) == model
    assert kit.reports == []


def test_what_no_file_may_have_is_refused_and_the_rest_goes_on():
    kit = Kit(segment_bytes=100_000)
    log = kit.open()
    model = fill(log, 5)
    kit.disk.fail("write", error=errno.EFBIG, path=kit.path(1))
    kit.disk.fail("write", error=errno.EFBIG, path=kit.path(log.next_sequence), nth=2)  # behind its header
    with pytest.raises(FileSizeLimit, match="ulimit -f"):
        log.append([b"refused" * 50], 2)
    assert (log.failed, len(log.segments())) == (None, 2)
    model[log.append([b"small"], 3)] = b"small"
    sync(log)
    assert read_all(log) == read_all(kit.open()) == model


@pytest.mark.parametrize(
    ("error", "expected"), [(errno.EIO, WriteFailed), (errno.ENOSPC, DiskFull), (errno.EFBIG, FileSizeLimit)]
)
@pytest.mark.parametrize("kind", ["create", "truncate", "write"])
def test_a_segment_that_cannot_be_begun(kind, error, expected):
    kit = Kit(segment_bytes=400)
    log = kit.open()
    model = {log.append([b"x" * 300], 1): b"x" * 300}
    sync(log)
    kit.disk.fail(kind, error=error, path=kit.path(2))
    with pytest.raises(expected):
        log.append([b"y" * 300], 2)
    kit.disk.heal()
    assert read_all(log) == model
    assert (log.failed is None) == (expected is not WriteFailed)
    if log.failed is None:
        model[log.append([b"z" * 300], 3)] = b"z" * 300
        assert read_all(log) == model
    lose_power(kit)
    log = kit.open()
    assert model.get(1) == read_all(log)[1]
    assert log.failed is None


def test_a_segment_that_can_neither_be_begun_nor_removed():
    kit = Kit(segment_bytes=400)
    log = kit.open()
    log.append([b"x" * 300], 1)
    kit.disk.fail("write", error=errno.ENOSPC, path=kit.path(2))
    kit.disk.fail("remove")
    with pytest.raises(WriteFailed, match="cannot remove it"):
        log.append([b"y" * 300], 2)
    kit.disk.heal()
    log = kit.open()
    assert list(read_all(log)) == [1]
    assert log.append([b"y" * 300], 2) == 2


def test_an_index_that_cannot_be_written_does_no_harm():
    kit = Kit(segment_bytes=400)
    log = kit.open()
    kit.disk.fail("write", error=errno.ENOSPC, path=f"{DIRECTORY}/00000000000000000001.index")
    model = fill(log, 12)
    kit.disk.heal()
    assert read_all(log) == model
    sync(log)
    log.close()
    log = kit.open()
    assert read_all(log) == model
    assert kit.reports == []


# fetch


def test_fetch_returns_whole_batches_as_stored():
    kit = Kit(segment_bytes=100_000)
    log = kit.open()
    fill(log, 20)
    log.advance_committed(log.next_sequence)
    stored = kit.disk.content(kit.path(1))[SEGMENT_HEADER_BYTES:]
    for from_memory in (True, False):
        data, following = log.fetch(1, log.next_sequence, 1 << 20)
        assert (data, following) == (stored, log.next_sequence)
        data, following = log.fetch(4, 5, 1 << 20)
        assert list(bodies_of(data)) == [2, 3, 4, 5]
        assert following == 6
        data, following = log.fetch(2, log.next_sequence, 1)
        assert list(bodies_of(data)) == [2, 3, 4, 5]
        data, following = log.fetch(1, log.next_sequence, len(stored) // 2)
        assert len(stored) // 4 < len(data) <= len(stored) // 2
        assert following == max(bodies_of(data)) + 1
        if from_memory:
            log.drop_tail()


def test_fetch_stops_at_what_is_committed():
    kit = Kit(segment_bytes=100_000)
    log = kit.open()
    log.append([b"a", b"b"], 1)
    log.append([b"c", b"d"], 2)
    assert log.fetch(1, 100, 1 << 20) == (b"", 1)
    for from_memory in (True, False):
        log.advance_committed(3)
        data, following = log.fetch(1, 100, 1 << 20)
        assert (list(bodies_of(data)), following) == ([1, 2], 3)
        assert log.fetch(3, 100, 1 << 20) == (b"", 3)
        if from_memory:
            log.drop_tail()
    log.advance_committed(4)
    for start in (1, 3):
        data, following = log.fetch(start, 100, 1 << 20)
        assert (list(bodies_of(data)), following) == ([1, 2] if start == 1 else [], 3), "half a batch is not given"
    log.advance_committed(5)
    assert log.fetch(3, 100, 1 << 20)[1] == 5


@pytest.mark.parametrize("segment_bytes", [600, 100_000])
def test_unverified_batches_are_those_that_are_verified(segment_bytes: int):
    kit = Kit(segment_bytes=segment_bytes)
    log = kit.open()
    fill(log, 30)
    for committed in range(1, log.next_sequence + 1, 3):
        log.advance_committed(committed)
        log.drop_tail()
        for start in range(1, committed + 2):
            for end, bytes_max in ((start, 1 << 20), (start + 1, 1 << 20), (start + 9, 200), (1 << 40, 1 << 20)):
                wanted, following = log.fetch(start, end, bytes_max)
                found, found_following = log.fetch_unverified(start, end, bytes_max)
                assert found_following == following or bytes_max == 200
                assert bytes(found) == wanted[: len(found)] and (found or not wanted)


@pytest.mark.parametrize("position", [SEGMENT_HEADER_BYTES + HEADER_BYTES + 5, SEGMENT_HEADER_BYTES + 9])
def test_damage_is_handed_out_once_at_most(position: int):
    """In a payload it is not seen without a look at the CRC, in a header it is; what was found is not sent again."""
    kit = Kit(segment_bytes=100_000)
    log = kit.open()
    fill(log, 20)
    sync(log)
    log.advance_committed(log.next_sequence)
    log.close()
    kit.disk.flip_bit(kit.path(1), position)
    log = kit.open()
    log.advance_committed(log.next_sequence)
    raw, _ = log.fetch_unverified(1, 1 << 40, 1 << 20)
    verified, _ = log.fetch(1, 1 << 40, 1 << 20)
    assert kit.reports and min(bodies_of(verified)) > 1
    if position > SEGMENT_HEADER_BYTES + HEADER_BYTES:
        assert decode_header(raw).first_id == internal_id(PARTITION, 1)
    assert bytes(log.fetch_unverified(1, 1 << 40, 1 << 20)[0]) == verified


def test_fetch_of_nothing():
    log = Kit().open()
    assert log.fetch(1, 10, 100) == (b"", 1)
    fill(log, 3)
    log.advance_committed(log.next_sequence)
    assert log.fetch(5, 5, 100) == (b"", 5)
    assert log.fetch(log.next_sequence, 1 << 40, 100) == (b"", log.next_sequence)
    assert log.fetch(1 << 40, 1 << 41, 100) == (b"", 1 << 40)


def test_fetch_goes_on_behind_a_gap():
    kit = Kit()
    model = fill(kit.open(), 5)
    end = max(model) + 1
    log = kit.open(next_sequence_min=end + 100)
    assert log.fetch(end, end + 50, 1 << 20) == (b"", end + 50)
    log.append([b"behind"], 1)
    log.advance_committed(log.next_sequence)
    log.drop_tail()
    assert fetch_all(log) == model | {end + 100: b"behind"}
    data, following = log.fetch(end + 3, 1 << 40, 1 << 20)
    assert (bodies_of(data), following) == ({end + 100: b"behind"}, end + 101)


def test_fetch_of_dropped_messages_starts_at_the_first_stored():
    kit = Kit(segment_bytes=300)
    log = kit.open()
    model = fill(log, 20)
    log.advance_committed(log.next_sequence)
    log.drop_before(15)
    log.drop_tail()
    assert fetch_all(log, start=1) == {n: body for n, body in model.items() if n >= log.start_sequence}


# searching


def test_sequence_at_is_exact_even_when_the_clock_went_back():
    kit = Kit(segment_bytes=600)
    log = kit.open()
    timestamps: dict[int, int] = {}
    rng = random.Random(1)
    for _ in range(60):
        timestamp = rng.randrange(1000, 2000)
        first = log.append([b"x" * rng.randrange(60)] * rng.randrange(1, 4), timestamp)
        timestamps.update(dict.fromkeys(range(first, log.next_sequence), timestamp))
    for found in before_and_after_a_restart(kit, log):
        for timestamp in range(990, 2010):
            wanted = next((n for n, t in timestamps.items() if t >= timestamp), found.next_sequence)
            assert found.sequence_at(timestamp) == wanted


def test_sequence_at_of_an_empty_log_is_the_end():
    log = Kit().open()
    assert log.sequence_at(0) == log.sequence_at(1 << 60) == 1


def test_sequence_at_looks_into_a_batch_with_a_range_of_timestamps():
    """No writer of this release makes one; a replica may store one."""
    kit = Kit(segment_bytes=10_000)
    log = kit.open()
    log.append([b"a", b"bb", b"ccc"], 100)
    log.append([b"later"], 200)
    sync(log)
    path = kit.path(1)
    batch = bytearray(kit.disk.content(path)[SEGMENT_HEADER_BYTES:])
    header = decode_header(bytes(batch))
    frames = 72 + 4 * 3
    for at, timestamp in ((32, 90), (frames + 8, 90), (frames + 8 + 35, 95)):
        batch[at : at + 8] = timestamp.to_bytes(8, "big")
    crc = crc32(batch[72 : header.size], crc32(batch[:68]))
    batch[68:72] = crc.to_bytes(4, "big")
    kit.disk.damage(path, SEGMENT_HEADER_BYTES, bytes(batch))
    log = kit.open()
    assert [log.sequence_at(t) for t in (1, 90, 91, 95, 96, 100, 101, 201)] == [1, 1, 2, 2, 3, 3, 4, 5]


def test_sequence_at_offset_finds_the_message_at_a_virtual_position():
    kit = Kit(segment_bytes=600)
    log = kit.open()
    model = fill(log, 30)
    offset, expected = 0, {}
    for sequence, body in model.items():
        size = FRAME_OVERHEAD_BYTES + len(body)
        for at in (offset, offset + size - 1):
            expected[at] = sequence
        offset += size
    assert log.end_offset_bytes == offset
    for found in before_and_after_a_restart(kit, log):
        assert {at: found.sequence_at_offset(at) for at in expected} == expected
        assert found.sequence_at_offset(offset) == found.next_sequence
    log = kit.open()
    log.drop_before(20)
    assert log.sequence_at_offset(0) == log.start_sequence


# retention


def test_only_whole_sealed_segments_below_are_dropped():
    kit = Kit(segment_bytes=500)
    log = kit.open()
    model = fill(log, 40)
    sync(log)
    infos = log.segments()
    assert log.drop_before(infos[2].end_sequence - 1) == infos[0].size_bytes + infos[1].size_bytes
    assert log.start_sequence == infos[2].first_sequence
    assert log.segments() == infos[2:]
    assert kit.logs() == [kit.path(info.first_sequence) for info in infos[2:]]
    assert not any(path.startswith(kit.path(1, "")) for path in kit.disk.paths())
    assert read_all(log) == {n: body for n, body in model.items() if n >= log.start_sequence}
    assert log.drop_before(infos[2].end_sequence - 1) == 0
    log.drop_before(1 << 49)
    assert log.segments() == infos[-1:], "the active one stays"
    assert log.read(1) is not None


def test_what_is_dropped_is_forgotten_by_every_cache():
    kit = Kit(segment_bytes=500)
    log = kit.open()
    fill(log, 40)
    log = kit.open()
    read_all(log)
    assert log._chunks
    log.drop_before(log.next_sequence)
    assert all(first >= log.start_sequence for first in log._chunks)
    assert list(log._chunks) == log._chunk_firsts
    batch = log.read(1)
    assert batch is not None
    assert batch.first == log.start_sequence


def test_dropping_is_durable_after_the_next_sync():
    for seed in range(10):
        kit = Kit(segment_bytes=500)
        log = kit.open()
        model = fill(log, 40)
        sync(log)
        log.drop_before(30)
        start = log.start_sequence
        assert log.begin_sync() is not None
        log._ticket = None
        log._is_directory_dirty = True
        sync(log)
        lose_power(kit, seed)
        log = kit.open()
        assert log.start_sequence == start
        assert read_all(log) == {n: body for n, body in model.items() if n >= start}
        assert kit.reports == []


def test_what_is_being_synced_is_not_dropped():
    kit = Kit(segment_bytes=500)
    log = kit.open()
    fill(log, 40)
    ticket = log.begin_sync()
    assert ticket is not None
    assert log.drop_before(log.next_sequence) == 0
    ticket.run()
    log.finish_sync(ticket, None)
    assert log.drop_before(log.next_sequence) > 0
    assert len(log.segments()) == 1


def test_dropping_what_was_never_synced():
    kit = Kit(segment_bytes=500)
    log = kit.open()
    fill(log, 40)
    log.drop_before(30)
    assert all(segment.first >= log.start_sequence for segment in log._unsynced)
    sync(log)
    assert log.synced_sequence == log.next_sequence


def test_a_segment_that_cannot_be_deleted_is_an_error_and_appends_go_on():
    kit = Kit(segment_bytes=500)
    log = kit.open()
    fill(log, 40)
    kit.disk.fail("remove", nth=3)
    with pytest.raises(WriteFailed, match="cannot delete it"):
        log.drop_before(log.next_sequence)
    kit.disk.heal()
    assert log.failed is None
    log.append([b"more"], 1)
    log.drop_before(log.next_sequence)
    assert len(log.segments()) == 1
    assert list(read_all(log).values())[-1] == b"more"


def test_set_aside_bytes_go_with_their_segment():
    kit = Kit(segment_bytes=500)
    log = kit.open()
    fill(log, 40)
    sync(log)
    log = kit.open()
    kit.disk.flip_bit(kit.path(1), 150)
    read_all(log)
    assert any(path.endswith(".bad") for path in kit.disk.paths())
    log.drop_before(30)
    assert not any(path.endswith(".bad") for path in kit.disk.paths())


def test_a_rolled_segment_can_be_dropped():
    kit = Kit()
    log = kit.open()
    log.roll()
    assert len(log.segments()) == 1, "an empty segment is not rolled"
    fill(log, 3)
    offset = log.end_offset_bytes
    log.roll()
    assert [info.is_sealed for info in log.segments()] == [True, False]
    assert log.drop_before(log.next_sequence) == 0, "the new one could be lost with the power, and all that it says"
    sync(log)
    log.drop_before(log.next_sequence)
    assert log.size_bytes == SEGMENT_HEADER_BYTES
    assert log.start_sequence == log.next_sequence
    assert log.read(1) is None
    assert log.fetch(1, 100, 100) == (b"", 1)
    first = log.append([b"x"], 1)
    batch = log.read(1)
    assert batch is not None
    assert (batch.first, batch.header.offset_bytes) == (first, offset)


def test_a_log_that_was_emptied_goes_on_where_it_was_behind_a_power_loss():
    for seed in range(10):
        kit = Kit()
        log = kit.open()
        fill(log, 3)
        sync(log)
        end, offset = log.next_sequence, log.end_offset_bytes
        log.roll()
        log.drop_before(end)
        sync(log)
        log.drop_before(end)
        assert log.start_sequence == end
        lose_power(kit, seed)
        log = kit.open()
        assert (log.next_sequence, log.end_offset_bytes) == (end, offset)


def test_a_log_that_was_emptied_beside_a_sync_goes_on_where_it_was_behind_a_power_loss():
    for seed in range(10):
        kit = Kit()
        log = kit.open()
        fill(log, 3)
        ticket = log.begin_sync()
        assert ticket is not None
        log.roll()  # what the sync is not about
        ticket.run()
        log.finish_sync(ticket, None)
        end, offset = log.next_sequence, log.end_offset_bytes
        assert log.drop_before(end) == 0, "the new one could be lost with the power"
        if seed % 2:
            sync(log)
            log.drop_before(end)
            assert log.start_sequence == end
            assert log.begin_sync() is not None, "the deletion"
        lose_power(kit, seed)
        log = kit.open()
        assert (log.next_sequence, log.end_offset_bytes) == (end, offset)


def test_timestamps_of_segments():
    kit = Kit(segment_bytes=500)
    log = kit.open()
    for timestamp in (50, 70, 60, 10, 90, 5, 1):
        log.append([b"x" * 100], timestamp)
    for each in before_and_after_a_restart(kit, log):
        assert [info.timestamp_max for info in each.segments()] == [70, 60, 90, 1]


# the end


def test_a_closed_log_takes_nothing_more():
    kit = Kit()
    log = kit.open()
    fill(log, 3)
    log.close()
    log.close()
    with pytest.raises(WriteFailed, match="the log is closed"):
        log.append([b"x"], 1)
    assert log.begin_sync() is None


def test_closing_during_a_sync_keeps_its_handles():
    kit = Kit(segment_bytes=300)
    log = kit.open()
    model = fill(log, 8)
    ticket = log.begin_sync()
    assert ticket is not None
    log.close()
    ticket.run()
    log.finish_sync(ticket, None)
    assert all(segment.live_file is None for segment in log._segments)
    lose_power(kit)
    assert read_all(kit.open()) == model


def test_delete_removes_everything():
    kit = Kit(segment_bytes=300)
    log = kit.open()
    fill(log, 20)
    read_all(log)
    log.delete()
    assert kit.disk.paths() == []
    assert kit.cache.used_bytes == kit.cache.tails_bytes == 0
    log = kit.open()
    assert (log.next_sequence, kit.reports) == (1, [])


def test_deleting_during_a_sync_is_no_error_of_the_sync():
    kit = Kit(segment_bytes=300)
    log = kit.open()
    fill(log, 8)
    ticket = log.begin_sync()
    assert ticket is not None
    log.delete()
    ticket.run()
    log.finish_sync(ticket, None)
    assert kit.disk.paths() == []
    log = kit.open()
    assert log.append([b"a new log"], 1) == 1


def test_describe_is_one_line():
    log = Kit().open()
    log.append([b"x"], 1)
    assert log.describe() == (
        f"PartitionLog({DIRECTORY}, partition 3, log {CREATED_NS}, sequences 1..2 synced 1 committed 1, 1 segments, "
        f"{log.size_bytes} bytes, tail 1 batches, 0 chunks, ok)"
    )
    log.close()
    assert "failed: the log is closed" in log.describe()


def test_on_a_real_disk(tmp_path):
    def open_log(files: OsFiles) -> PartitionLog:
        return PartitionLog.open(
            files,
            DIRECTORY,
            partition=PARTITION,
            segment_bytes=2000,
            cache=ReadCache(files_max=2),
            report=reports.append,
            created_ns=CREATED_NS,
        )

    reports: list[object] = []
    files = OsFiles(str(tmp_path))
    log = open_log(files)
    model = fill(log, 60)
    sync(log)
    model |= fill(log, 3)
    log.advance_committed(log.next_sequence)
    log.drop_tail()
    assert read_all(log) == fetch_all(log) == model
    files.close()
    files = OsFiles(str(tmp_path))
    log = open_log(files)
    assert read_all(log) == fetch_all(log) == model
    log.drop_before(50)
    sync(log)
    log.close()
    log = open_log(files)
    assert read_all(log) == {n: body for n, body in model.items() if n >= log.start_sequence}
    assert reports == []
    names = sorted(path.name for path in (tmp_path / DIRECTORY).iterdir())
    assert len(names) == 2 * len(log.segments()) + 1
    log.delete()
    assert not (tmp_path / DIRECTORY).exists()
    files.close()


# -- ready batches


def batches_of(log: PartitionLog, start: int = 1) -> list[bytes]:
    """What the log stores from a sequence on, batch by batch."""
    found = []
    while (batch := log.read(start)) is not None:
        found.append(bytes(batch.data))
        start = batch.end
    return found


def leader_log() -> tuple[PartitionLog, dict[int, bytes]]:
    """A log of several segments with batches of every shape, one of them of a producer that counts."""
    log = Kit().open()
    model = fill(log, 30)
    first = log.append([b"once", b"only"], 5, producer=(b"me", 7))
    return log, model | {first: b"once", first + 1: b"only"}


def test_ready_batches_make_the_same_log():
    leader, model = leader_log()
    log = Kit().open()
    for data in batches_of(leader):
        assert log.append_batch(data) == decode_header(data).first_sequence
    leader.drop_tail()  # who copies it keeps none: both are read from their files
    assert batches_of(log) == batches_of(leader)
    assert log.fetch_stored(1, 1 << 30) == leader.fetch_stored(1, 1 << 30)
    assert read_all(log) == model
    assert (log.next_sequence, log.end_offset_bytes) == (leader.next_sequence, leader.end_offset_bytes)
    assert log.producers.table.last(b"me") == leader.producers.table.last(b"me") == 8
    assert log.sequence_at_offset(300) == leader.sequence_at_offset(300)
    assert len(log.segments()) == len(leader.segments())


@pytest.mark.parametrize("seed", range(8))
def test_after_a_power_loss_in_the_middle_the_rest_follows(seed):
    leader, model = leader_log()
    kit = Kit()
    log = kit.open()
    batches = batches_of(leader)
    for data in batches[: 5 + 3 * seed]:
        log.append_batch(data)
        if decode_header(data).first_sequence % 4 == seed % 4:
            sync(log)
    kept = log.synced_sequence
    lose_power(kit, seed)
    log = kit.open()
    assert kept <= log.next_sequence and all(sequence >= kept for sequence in kit.lost())
    expected = {sequence: body for sequence, body in model.items() if sequence not in kit.lost()}
    for data in batches_of(leader, log.next_sequence):
        log.append_batch(data)
    assert read_all(log) == expected
    assert read_all(kit.open()) == expected


def append_together(log, batches):
    log.append_batches(memoryview(b"".join(batches)), [decode_header(data) for data in batches])


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_batches_that_come_together_make_the_same_log(count):
    leader, model = leader_log()
    kit = Kit()
    log = kit.open()
    batches = batches_of(leader)
    before, segments = kit.disk.operation_count, len(log.segments())
    for at in range(0, len(batches), count):
        append_together(log, batches[at : at + count])
    if count == 100:
        begun = len(log.segments()) - segments
        assert begun > 1 and kit.disk.operation_count - before < len(batches) + 5 * begun
    leader.drop_tail()
    assert batches_of(log) == batches_of(leader)
    assert read_all(log) == model
    assert (log.next_sequence, log.end_offset_bytes) == (leader.next_sequence, leader.end_offset_bytes)
    assert log.producers.table.last(b"me") == leader.producers.table.last(b"me") == 8
    assert [log.sequence_at_offset(at) for at in range(0, 600, 7)] == [
        leader.sequence_at_offset(at) for at in range(0, 600, 7)
    ]
    assert [segment.first_sequence for segment in log.segments()] == [
        segment.first_sequence for segment in leader.segments()
    ]
    assert read_all(kit.open()) == model


@pytest.mark.parametrize("change", ["gap", "again", "damaged", "other partition"])
def test_those_before_one_that_is_refused_are_written(change):
    leader, _ = leader_log()
    first, second, third, *_ = batches_of(leader)
    log = Kit().open()
    end = decode_header(second).first_sequence + decode_header(second).count
    wrong = {
        "gap": [first, third],
        "again": [first, first],
        "damaged": [first, second[:-1] + bytes((second[-1] ^ 1,)), third],
        "other partition": [first, encode_batch(internal_id(PARTITION + 1, 2), leader.end_offset_bytes, 1, [b"x"])],
    }[change]
    with pytest.raises(ValueError):
        append_together(log, wrong)
    assert log.next_sequence == decode_header(second).first_sequence
    append_together(log, [second])
    assert log.next_sequence == end and [*read_all(log)] == [*range(1, end)]


@pytest.mark.parametrize("seed", range(8))
def test_after_a_power_loss_in_the_middle_of_what_came_together_the_rest_follows(seed):
    leader, model = leader_log()
    kit = Kit()
    log = kit.open()
    batches = batches_of(leader)
    append_together(log, batches[: 2 + seed])
    sync(log)
    append_together(log, batches[2 + seed : 5 + 3 * seed])
    kept = log.synced_sequence
    lose_power(kit, seed)
    log = kit.open()
    assert kept <= log.next_sequence and all(sequence >= kept for sequence in kit.lost())
    append_together(log, batches_of(leader, log.next_sequence))
    expected = {sequence: body for sequence, body in model.items() if sequence not in kit.lost()}
    assert read_all(log) == read_all(kit.open()) == expected


def test_what_came_together_and_finds_no_room_is_not_there_and_comes_again():
    leader, model = leader_log()
    kit = Kit()
    log = kit.open()
    batches = batches_of(leader)
    append_together(log, batches[:3])
    kit.disk.fail("write", nth=1, error=errno.ENOSPC)
    before = log.next_sequence
    with pytest.raises(DiskFull):
        append_together(log, batches[3:])
    kit.disk.heal()
    assert log.next_sequence >= before and read_all(kit.open()) == {
        sequence: body for sequence, body in model.items() if sequence < log.next_sequence
    }
    log = kit.open()
    append_together(log, batches_of(leader, log.next_sequence))
    assert read_all(log) == model


@pytest.mark.parametrize("change", ["gap", "again", "damaged", "cut", "two", "other partition", "offset"])
def test_a_batch_that_does_not_follow_is_refused(change):
    leader, _ = leader_log()
    first, second, third, *_ = batches_of(leader)
    log = Kit().open()
    log.append_batch(first)
    wrong = {
        "gap": third,
        "again": first,
        "damaged": second[:-1] + bytes((second[-1] ^ 1,)),
        "cut": second[:-1],
        "two": second + third,
        "other partition": encode_batch(internal_id(PARTITION + 1, 2), log.end_offset_bytes, 1, [b"x"]),
        "offset": encode_batch(internal_id(PARTITION, 2), log.end_offset_bytes + 1, 1, [b"x"]),
    }[change]
    before = (log.next_sequence, log.end_offset_bytes, log.size_bytes)
    with pytest.raises(ValueError):
        log.append_batch(wrong)
    assert (log.next_sequence, log.end_offset_bytes, log.size_bytes) == before
    log.append_batch(second)
    log.append_batch(third)
