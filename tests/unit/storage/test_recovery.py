"""Opening a log: identity, torn tails, gaps, checkpoints, what is synced and what is only reported."""

from __future__ import annotations

import errno
import random
from itertools import pairwise

import pytest
from tests.unit.storage.log_kit import CREATED_NS, DIRECTORY, Kit, ReadFaults, fetch_all, fill, read_all, sync

from flintmq.errors import DiskFull, StorageError, WriteFailed
from flintmq.limits import DISK_RESERVE_BYTES, PAGE_BYTES, SEQUENCE_MAX
from flintmq.storage import recovery, segment
from flintmq.storage.cache import ReadCache
from flintmq.storage.partition_log import PartitionLog
from flintmq.storage.scan import Run, walk
from flintmq.storage.segment import SEGMENT_HEADER_BYTES

META = f"{DIRECTORY}/log.meta"


def kill(kit: Kit) -> None:
    kit.disk.crash(power_loss=False, rng=random.Random(0))


def lose_power(kit: Kit, seed: int = 0) -> None:
    kit.disk.crash(power_loss=True, rng=random.Random(seed))


def filled(kit: Kit, batches: int = 12) -> dict[int, bytes]:
    """Fill a new log, sync and close it."""
    log = kit.open()
    model = fill(log, batches)
    sync(log)
    log.close()
    return model


def operations(kit: Kit) -> list[str]:
    """What the following operations are, as they happen."""
    seen: list[str] = []
    kit.disk.observers.append(lambda operation: seen.append(f"{operation.kind} {operation.path}"))
    return seen


# identity


def test_a_new_log_is_empty_and_durable():
    kit = Kit()
    log = kit.open()
    assert (log.start_sequence, log.next_sequence, log.committed_sequence, log.synced_sequence) == (1, 1, 1, 1)
    assert (log.log_id, log.partition, log.directory, log.failed) == (CREATED_NS, 3, DIRECTORY, None)
    assert log.read(1) is None
    assert log.size_bytes == SEGMENT_HEADER_BYTES
    assert kit.reports == []
    lose_power(kit)
    assert kit.disk.paths() == [kit.path(1), META]
    assert kit.open().log_id == CREATED_NS


def test_a_log_keeps_its_identity(monkeypatch):
    kit = Kit()
    filled(kit)
    monkeypatch.setattr("tests.unit.storage.log_kit.CREATED_NS", 5)
    assert kit.open().log_id == CREATED_NS
    for damage in ("damage", "remove"):
        if damage == "damage":
            kit.disk.flip_bit(META, 3)
        else:
            kit.files().remove(META)
        assert kit.open().log_id == CREATED_NS, "the segments know it too"
        assert kit.kinds() == ["header"]
        assert kit.open().log_id == CREATED_NS
        assert kit.reports == []


def test_the_identity_is_what_most_segments_say():
    kit = Kit()
    filled(kit)
    stranger = Kit()
    filled(stranger)
    path = kit.logs()[0]
    header = segment.decode_segment_header(kit.disk.content(path)[:64])
    assert header is not None
    forged = segment.SegmentHeader(3, 99, 1, header.offset_bytes, 1, 1)
    kit.disk.damage(path, 0, segment.encode_segment_header(forged))
    kit.disk.cut(META, 10)
    assert kit.open().log_id == CREATED_NS


def test_an_unreadable_meta_file_is_written_again():
    kit = Kit(faults=ReadFaults(bytes_unreadable={META: (0, 24, errno.EIO)}))
    model = filled(kit)
    log = kit.open()
    assert log.log_id == CREATED_NS
    assert read_all(log) == model


def test_another_partitions_directory_is_refused():
    kit = Kit()
    filled(kit)
    kit.disk.release()
    with pytest.raises(StorageError, match="belongs to partition 3, not 4; move the directory"):
        PartitionLog.open(
            kit.disk.attach(),
            DIRECTORY,
            partition=4,
            segment_bytes=1000,
            cache=ReadCache(),
            report=kit.reports.append,
            created_ns=1,
        )


def test_a_later_version_is_refused_and_nothing_is_touched(monkeypatch):
    kit = Kit()
    monkeypatch.setattr(recovery, "_META_VERSION", 2)
    filled(kit)
    monkeypatch.undo()
    before = {path: kit.disk.content(path) for path in kit.disk.paths()}
    with pytest.raises(StorageError, match="version 2; this release reads version 1"):
        kit.open()
    assert {path: kit.disk.content(path) for path in kit.disk.paths()} == before


def test_segments_of_a_later_version_are_refused_and_nothing_is_touched(monkeypatch):
    kit = Kit()
    monkeypatch.setattr(segment, "VERSION", 2)
    filled(kit)
    monkeypatch.undo()
    before = {path: kit.disk.content(path) for path in kit.disk.paths()}
    with pytest.raises(StorageError, match="version 2; this release reads version 1"):
        kit.open()
    assert {path: kit.disk.content(path) for path in kit.disk.paths()} == before


@pytest.mark.parametrize("sequence", [0, -1, SEQUENCE_MAX + 1])
def test_sequences_have_a_range(sequence):
    with pytest.raises(ValueError, match="sequences go from 1 to"):
        Kit().open(next_sequence_min=sequence)


@pytest.mark.parametrize("kind", ["create", "write", "sync", "truncate"])
@pytest.mark.parametrize(("error", "expected"), [(errno.EIO, WriteFailed), (errno.ENOSPC, DiskFull)])
def test_a_new_log_that_cannot_be_created_is_an_error(kind, error, expected):
    kit = Kit()
    kit.disk.fail(kind, error=error)
    with pytest.raises(expected):
        kit.open()
    kit.disk.heal()
    log = kit.open()
    assert log.failed is None
    assert log.append([b"body"], 1) == 1


def test_a_new_segment_that_cannot_be_created_makes_an_old_log_read_only():
    kit = Kit()
    model = filled(kit)
    kit.disk.fail("create", path=kit.path(500))
    log = kit.open(next_sequence_min=500)
    assert log.failed is not None
    assert read_all(log) == model
    with pytest.raises(WriteFailed):
        log.append([b"body"], 1)
    kit.disk.heal()
    log = kit.open(next_sequence_min=500)
    assert log.append([b"body"], 1) == 500


def test_an_old_log_whose_meta_file_cannot_be_written_is_read_only():
    kit = Kit()
    model = filled(kit)
    kit.disk.flip_bit(META, 3)
    kit.disk.fail("write", path=META)
    log = kit.open()
    assert log.log_id == CREATED_NS
    assert read_all(log) == model
    assert log.failed is not None


# torn tails


def test_a_torn_tail_is_cut_and_kept_aside():
    kit = Kit()
    log = kit.open()
    model = fill(log, 3)
    sync(log)
    durable = log.next_sequence
    model[durable] = b"written after the sync"
    log.append([model[durable]], 9)
    tail = log.append([b"torn" * 20], 9)
    kill(kit)
    path = kit.logs()[-1]
    size = len(kit.disk.content(path))
    kit.disk.cut(path, size - 1)
    torn = kit.disk.content(path)[-113:]
    log = kit.open()
    assert read_all(log) == model
    assert log.next_sequence == tail
    [report] = kit.reports
    position = size - 1 - report.size
    assert (report.kind, report.path, report.position) == ("torn", path, position)
    assert report.first_sequence_lost == report.end_sequence_lost == tail
    assert report.synced_before == durable, "as the last good batch says"
    assert f"cut short: {report.size} of {report.size + 1} bytes" in report.reason
    aside = kit.disk.content(f"{path}.{position}.bad")
    assert len(aside) == report.size
    assert aside.endswith(torn[-50:])
    assert len(kit.disk.content(path)) == position
    assert log.append([b"again"], 10) == tail
    kill(kit)
    assert read_all(kit.open()) == model | {tail: b"again"}
    assert kit.reports == []


@pytest.mark.parametrize("tail", [b"\0" * 10, b"\0" * 100_000], ids=len)
def test_a_tail_of_zeros_is_cut_without_a_word(tail):
    kit = Kit()
    model = filled(kit)
    path = kit.logs()[-1]
    size = len(kit.disk.content(path))
    kit.disk.damage(path, size, tail)
    log = kit.open()
    assert read_all(log) == model
    assert len(kit.disk.content(path)) == size
    assert kit.reports == []
    assert not any(name.endswith(".bad") for name in kit.disk.paths())


def test_a_few_torn_bytes_are_told_but_not_kept():
    kit = Kit()
    model = filled(kit)
    path = kit.logs()[-1]
    kit.disk.damage(path, len(kit.disk.content(path)), b"FMQB\x01")
    assert read_all(kit.open()) == model
    assert kit.kinds() == ["torn"]
    assert not any(name.endswith(".bad") for name in kit.disk.paths())


@pytest.mark.parametrize("seed", range(8))
def test_the_copy_of_a_torn_tail_survives_what_the_cut_survives(seed):
    kit = Kit()
    filled(kit)
    path = kit.logs()[-1]
    size = len(kit.disk.content(path))
    kit.disk.damage(path, size, b"x" * 2000)
    kit.open()
    assert len(kit.disk.content(path)) == size
    kit.disk.crash(power_loss=True, rng=random.Random(seed))
    assert kit.disk.content(f"{path}.{size}.bad") == b"x" * 2000


@pytest.mark.parametrize("scarce", ["space", "number"])
def test_a_torn_tail_is_kept_aside_however_scarce_room_is(scarce, monkeypatch):
    kit = Kit()
    model = filled(kit)
    path = kit.logs()[-1]
    size = len(kit.disk.content(path))
    kit.disk.damage(path, size, b"x" * 200)
    if scarce == "space":
        kit.disk.set_free_bytes(DISK_RESERVE_BYTES)
    else:
        monkeypatch.setattr("flintmq.storage.segment.BAD_FILES_MAX", 0)
    log = kit.open()
    assert (read_all(log), log.failed) == (model, None)
    assert kit.disk.content(f"{path}.{size}.bad") == b"x" * 200


def test_a_tail_that_cannot_be_kept_aside_is_not_cut():
    kit = Kit()
    model = filled(kit)
    path = kit.logs()[-1]
    kit.disk.damage(path, len(kit.disk.content(path)), b"x" * 200)
    content = kit.disk.content(path)
    kit.disk.fail("write", error=errno.ENOSPC)
    log = kit.open()
    assert read_all(log) == model
    assert log.failed is not None
    assert kit.disk.content(path) == content
    kit.disk.heal()
    log = kit.open()
    assert log.failed is None
    assert kit.disk.content(path) == content[:-200]


def test_a_tail_that_cannot_be_cut_makes_the_log_read_only():
    kit = Kit()
    model = filled(kit)
    path = kit.logs()[-1]
    kit.disk.damage(path, len(kit.disk.content(path)), b"x" * 200)
    kit.disk.fail("truncate", path=path)
    log = kit.open()
    assert read_all(log) == model
    assert log.failed is not None
    assert "cannot cut its torn tail" in log.failed
    kit.disk.heal()
    assert kit.open().failed is None


# damage told by recovery


def test_damage_in_the_last_segment_is_stepped_over_and_told_at_each_start():
    kit = Kit(segment_bytes=100_000)
    log = kit.open()
    model = fill(log, 10)
    sync(log)
    kill(kit)
    path = kit.logs()[0]
    kit.disk.flip_bit(path, 150)
    for words in ("set aside in", "set aside before in"):
        log = kit.open()
        assert read_all(log) == {n: body for n, body in model.items() if n not in kit.lost()}
        assert kit.lost() == {1}
        assert words in kit.reports[0].reason
        assert log.failed is None
        kill(kit)


def test_lost_sequences_below_the_watermark_were_durable():
    kit = Kit(segment_bytes=100_000)
    log = kit.open()
    first = log.append([b"durable"], 1)
    sync(log)
    log.append([b"after"], 2)
    kill(kit)
    kit.disk.flip_bit(kit.logs()[0], 150)
    kit.open()
    [report] = kit.reports
    assert report.first_sequence_lost == first
    assert report.synced_before == first + 1


def test_a_damaged_header_is_written_again():
    kit = Kit()
    model = filled(kit)
    path = kit.logs()[-1]
    header = kit.disk.content(path)[:SEGMENT_HEADER_BYTES]
    kit.disk.zero(path, 0, SEGMENT_HEADER_BYTES)
    log = kit.open()
    assert read_all(log) == model
    assert kit.kinds() == ["header"]
    again = segment.decode_segment_header(kit.disk.content(path)[:SEGMENT_HEADER_BYTES])
    before = segment.decode_segment_header(header)
    assert again is not None
    assert before is not None
    assert (again.first, again.offset_bytes, again.log_id) == (before.first, before.offset_bytes, before.log_id)
    assert read_all(kit.open()) == model
    assert kit.reports == []


def test_a_header_that_cannot_be_written_again_makes_the_log_read_only():
    kit = Kit()
    model = filled(kit)
    path = kit.logs()[-1]
    kit.disk.zero(path, 0, SEGMENT_HEADER_BYTES)
    kit.disk.fail("write", path=path)
    log = kit.open()
    assert read_all(log) == model
    assert log.failed is not None


@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_segment_of_another_log_is_moved_away(which):
    kit, other = Kit(), Kit()
    model = filled(kit)
    log = other.open()
    fill(log, 12, start=100)
    log.close()
    path = kit.logs()[which]
    foreign = bytearray(other.disk.content(path))
    header = segment.decode_segment_header(bytes(foreign[:64]))
    assert header is not None
    stranger = segment.SegmentHeader(3, 42, header.first, header.offset_bytes, header.previous_end, 1)
    foreign[:64] = segment.encode_segment_header(stranger)
    kit.disk.cut(path, 0)
    kit.disk.damage(path, 0, bytes(foreign))
    files = kit.files()
    files.remove(path.replace(".log", ".index"))
    log = kit.open()
    stored = read_all(log)
    assert stored.items() <= model.items()
    assert kit.disk.content(f"{path}.foreign") == foreign
    assert any("not a segment of this log" in report.reason for report in kit.reports)
    log.append([b"after"], 1)
    assert read_all(kit.open()) == stored | {log.next_sequence - 1: b"after"}
    assert kit.disk.content(f"{path}.foreign") == foreign


# gaps


def test_numbering_goes_on_behind_what_consumers_had_reached():
    kit = Kit()
    model = filled(kit)
    end = max(model) + 1
    log = kit.open(next_sequence_min=end + 10)
    assert (log.next_sequence, log.committed_sequence, log.synced_sequence) == (end + 10,) * 3
    [report] = kit.reports
    assert (report.kind, report.first_sequence_lost, report.end_sequence_lost) == ("gap", end, end + 10)
    assert log.read(end) is None
    assert log.append([b"behind the gap"], 7) == end + 10
    model[end + 10] = b"behind the gap"
    log.advance_committed(end + 11)
    assert read_all(log) == fetch_all(log) == model
    batch = log.read(end)
    assert batch is not None
    assert batch.first == end + 10
    sync(log)
    lose_power(kit)
    log = kit.open(next_sequence_min=end + 11)
    assert kit.reports == [], "a gap that was told is not told again"
    assert read_all(log) == fetch_all(log) == model


def test_a_gap_behind_an_empty_log_leaves_one_segment():
    kit = Kit()
    kit.open()
    log = kit.open(next_sequence_min=77)
    assert kit.logs() == [kit.path(77)]
    assert log.start_sequence == log.next_sequence == 77
    assert log.append([b"body"], 1) == 77
    assert log.read(1) is not None


def test_a_smaller_minimum_changes_nothing():
    kit = Kit()
    model = filled(kit)
    log = kit.open(next_sequence_min=3)
    assert log.next_sequence == max(model) + 1
    assert kit.reports == []


def test_what_was_durable_and_is_gone_is_told_and_not_numbered_again():
    """The checkpoint written by a clean close knows where the log ended."""
    kit = Kit()
    model = filled(kit)
    end = max(model) + 1
    path = kit.logs()[-1]
    first = int(path[-24:-4])
    kit.disk.cut(path, SEGMENT_HEADER_BYTES + 20)
    log = kit.open()
    assert kit.lost() == set(range(first, end))
    assert log.append([b"new"], 1) == end


@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_missing_segment_is_told(which):
    kit = Kit()
    model = filled(kit)
    path = kit.logs()[which]
    files = kit.files()
    files.remove(path)
    log = kit.open()
    stored = read_all(log)
    assert stored.items() <= model.items()
    assert set(model) - set(stored) == kit.lost()
    assert log.append([b"new"], 1) == max(model) + 1


def test_an_empty_sealed_segment_is_told_and_removed():
    kit = Kit()
    model = filled(kit)
    for path in kit.logs()[:-1]:
        kit.disk.cut(path, 0)
    log = kit.open()
    assert kit.logs() == [kit.path(log.start_sequence)]
    assert set(model) - set(read_all(log)) == kit.lost()


def test_segments_that_overlap_are_told_and_the_later_one_is_used():
    kit = Kit(segment_bytes=100_000)
    log = kit.open()
    model = fill(log, 4)
    later = max(model) - 2
    home = log._home
    overlapping = segment.Segment(home, later)
    overlapping.create(later, 0, 1)
    overlapping.close()
    kill(kit)
    log = kit.open()
    assert read_all(log) == model, "an empty segment that was begun too early is removed"
    assert kit.logs() == [kit.path(1)]
    assert log.append([b"more"], 1) == max(model) + 1
    assert kit.reports == []


def test_overlapping_messages_come_from_the_later_segment():
    one, two = Kit(), Kit()
    log = one.open()
    for number in range(8):
        log.append([b"old %d" % number], number)
    log = two.open(next_sequence_min=5)
    for number in range(5, 8):
        log.append([b"new %d" % number], number)
    path = two.path(5)
    content = two.disk.content(path)
    file = one.files().open(path, create=True)
    file.write_at(0, content)
    log = one.open()
    assert list(read_all(log).values()) == [b"old 0", b"old 1", b"old 2", b"old 3", b"new 5", b"new 6", b"new 7"]
    assert any("overlaps" in report.reason for report in one.reports)
    assert fetch_all(log) == read_all(log)


# checkpoints and syncs


def test_a_clean_start_walks_and_syncs_nothing():
    kit = Kit(segment_bytes=1000)
    filled(kit, 40)
    kit.faults = ReadFaults()
    seen = operations(kit)
    log = kit.open()
    assert seen == []
    segments = len(log.segments())
    assert segments > 5
    assert kit.faults.read_count <= 2 * segments + 6, "one look at each index, and at the last header"


def test_only_what_came_after_a_checkpoint_is_walked(monkeypatch):
    monkeypatch.setattr("flintmq.storage.partition_log.CHECKPOINT_BYTES", 10_000)
    kit = Kit(segment_bytes=1 << 20)
    log = kit.open()
    for number in range(300):
        log.append([b"x" * 100], number)
        if number % 10 == 0:
            sync(log)
    model = read_all(log)
    kill(kit)
    walked: list[int] = []

    def counting_walk(data: bytes, position: int, next_id: int, stop_id: int) -> Run:
        walked.append(len(data))
        return walk(data, position, next_id, stop_id)

    monkeypatch.setattr(segment, "walk", counting_walk)
    log = kit.open()
    assert 0 < sum(walked) < 20_000
    assert read_all(log) == model


def test_an_index_of_bytes_that_were_cut_is_not_believed_later():
    """Otherwise it would look good again as soon as other batches have grown over the place."""
    kit = Kit(segment_bytes=100_000)
    log = kit.open()
    for number in range(6):
        log.append([b"old %d" % number], number)
    log.roll()
    index, path = kit.path(1, ".index"), kit.path(1)
    assert index in kit.disk.paths()
    kit.files().remove(kit.path(7))
    kit.disk.cut(path, 200)
    log = kit.open()
    assert index not in kit.disk.paths()
    model = {1: b"old 0"}
    for number in range(8):
        model[log.append([b"new and longer %d" % number], number)] = b"new and longer %d" % number
    kill(kit)
    assert read_all(kit.open()) == model


@pytest.mark.parametrize("seed", range(4))
def test_an_index_that_is_not_believed_does_not_come_back_with_a_power_loss(seed):
    """Its removal is durable with what was recovered; what is written later has made it look good by then."""
    kit = Kit(segment_bytes=100_000)
    log = kit.open()
    log.append([b"kept"], 0)
    sync(log)
    log.append([b"says that the one before is durable"], 1)
    size = len(kit.disk.content(kit.path(1)))
    for number in range(6):
        log.append([b"old %d" % number], number)
    log.roll()
    sync(log)
    index, path = kit.path(1, ".index"), kit.path(1)
    kit.files().remove(kit.path(9))
    kit.files().sync_directory(DIRECTORY)
    kit.disk.cut(path, size)
    log = kit.open()
    assert index not in kit.disk.paths()
    model = {1: b"kept", 2: b"says that the one before is durable"}
    for number in range(8):
        model[log.append([b"new and longer %d" % number], number)] = b"new and longer %d" % number
    sync(log)
    lose_power(kit, seed)
    assert index not in kit.disk.paths()
    assert read_all(kit.open()) == model


def test_an_index_that_cannot_be_removed_makes_the_log_read_only():
    kit = Kit(segment_bytes=100_000)
    filled(kit, 6)
    kit.disk.flip_bit(kit.path(1, ".index"), 80)
    kit.disk.fail("remove")
    log = kit.open()
    assert log.failed is not None
    assert "cannot remove it" in log.failed


def test_everything_recovered_is_durable():
    for seed in range(10):
        kit = Kit()
        log = kit.open()
        model = fill(log, 12)
        kill(kit)
        log = kit.open()
        assert log.synced_sequence == log.committed_sequence == log.next_sequence
        lose_power(kit, seed)
        assert read_all(kit.open()) == model


def test_bytes_whose_sync_failed_are_written_again_before_they_are_called_durable():
    """The kernel forgets that they are dirty: without the second write the second sync would do nothing (fsyncgate)."""
    kit = Kit()
    log = kit.open()
    model = fill(log, 12)
    kit.disk.fail("sync", times=3)
    sync(log)
    assert log.failed is not None
    assert log.synced_sequence == 1
    kit.disk.heal()
    log = kit.open()
    assert read_all(log) == model
    lose_power(kit)
    log = kit.open()
    assert read_all(log) == model


@pytest.mark.parametrize("seed", range(8))
def test_everything_that_a_start_after_a_kill_found_survives_the_power_from_then_on(seed):
    """Sealed segments that nobody synced, more of them than are walked, are synced by the start."""
    kit = Kit(segment_bytes=300)
    model = fill(kit.open(), 14)
    assert len(kit.logs()) > 6
    kill(kit)
    log = kit.open()
    assert log.synced_sequence == log.next_sequence
    lose_power(kit, seed)
    assert read_all(kit.open()) == model
    assert kit.reports == []


def test_the_index_of_a_walked_segment_vouches_for_no_more_than_was_durable():
    kit = Kit(segment_bytes=300)
    model = fill(kit.open(), 14)
    kill(kit)
    kit.files().remove(kit.path(1, ".index"))
    kit.disk.fail("sync", times=100)
    log = kit.open()
    assert log.failed is not None
    assert read_all(log) == model
    loaded = log._segments[0].load_index()
    assert loaded is not None
    assert loaded[0].synced_sequence <= 1


def test_what_is_written_again_at_a_start_is_bounded(monkeypatch):
    monkeypatch.setattr("flintmq.storage.recovery.REWRITE_BYTES_MAX", 500)
    kit = Kit(segment_bytes=100_000)
    model = fill(kit.open(), 60)
    kill(kit)
    written: list[int] = []
    kit.disk.observers.append(lambda each: written.append(each.size_bytes) if each.kind == "write" else None)
    assert read_all(kit.open()) == model
    assert 0 < sum(written) <= 500


def test_a_start_that_walked_far_writes_a_checkpoint(monkeypatch):
    monkeypatch.setattr("flintmq.storage.recovery.CHECKPOINT_BYTES", 500)
    kit = Kit(segment_bytes=100_000)
    model = fill(kit.open(), 60)
    kill(kit)
    assert kit.path(1, ".index") not in kit.disk.paths()
    assert read_all(kit.open()) == model
    assert kit.path(1, ".index") in kit.disk.paths()


def test_what_was_set_aside_outlives_its_segment():
    kit = Kit(segment_bytes=300)
    model = filled(kit)
    _, second, *_ = kit.logs()
    kit.disk.flip_bit(second, 150)
    log = kit.open()
    read_all(log)
    (bad,) = [path for path in kit.disk.paths() if path.endswith(".bad")]
    log.close()
    kit.files().remove(second)
    log = kit.open()
    assert model and log.failed is None
    assert bad in kit.disk.paths()


def test_segments_sealed_but_perhaps_not_synced_are_walked():
    """A power loss may leave the size of a sealed file and the index, but not the bytes."""
    kit = Kit(segment_bytes=700)
    log = kit.open()
    model = fill(log, 12)
    kill(kit)
    path = kit.logs()[-2]
    kit.disk.zero(path, 200, 100)
    log = kit.open()
    assert kit.lost()
    assert kit.reports[0].path == path
    assert read_all(log) == {n: body for n, body in model.items() if n not in kit.lost()}


def test_a_sync_that_fails_while_opening_makes_the_log_read_only():
    kit = Kit()
    log = kit.open()
    model = fill(log, 12)
    kill(kit)
    kit.disk.fail("sync")
    log = kit.open()
    assert log.failed is not None
    assert "cannot sync" in log.failed
    assert read_all(log) == model
    assert log.begin_sync() is None
    with pytest.raises(WriteFailed):
        log.append([b"x"], 1)


def test_leftovers_of_segments_that_are_gone_are_removed():
    kit = Kit()
    log = kit.open()
    fill(log, 12)
    sync(log)
    kit.disk.flip_bit(kit.logs()[0], 150)
    read_all(kit.open())
    [bad] = [path for path in kit.disk.paths() if path.endswith(".bad")]
    log = kit.open()
    files = kit.files()
    for path in (kit.path(1), kit.path(1, ".index")):
        files.remove(path)
    kit.open()
    assert bad not in kit.disk.paths()
    assert all(int(path[-24:-4]) >= log.segments()[1].first_sequence for path in kit.logs())


def test_other_files_in_the_directory_are_left_alone():
    kit = Kit()
    model = filled(kit)
    files = kit.files()
    names = ["notes.txt", "1.log", "00000000000000000001.log.bak", "00000000000000000001.index.tmp", "x.index"]
    names += ["99999999999999999999.log", "00000000000000000000.log"]
    for name in names:
        files.open(f"{DIRECTORY}/{name}", create=True).write_at(0, b"mine")
    assert read_all(kit.open()) == model
    for name in names:
        assert kit.disk.content(f"{DIRECTORY}/{name}") == b"mine"


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EACCES])
def test_a_segment_that_does_not_open_stops_the_start_with_a_clear_error(error):
    kit = Kit(faults=ReadFaults())
    filled(kit)
    assert kit.faults is not None
    for path in (kit.logs()[0], kit.logs()[-1]):
        kit.faults.not_opening = {path: error}
        with pytest.raises(StorageError, match=f"{path}: cannot"):
            kit.open()


def test_unreadable_bytes_do_not_stop_the_start():
    kit = Kit(faults=ReadFaults())
    model = filled(kit)
    assert kit.faults is not None
    for path in kit.logs():
        kit.faults.bytes_unreadable[path] = (0, 1 << 30, errno.EIO)
    log = kit.open()
    assert read_all(log) == {}
    kit.faults.bytes_unreadable.clear()
    assert set(model) == kit.lost()


def contents(kit: Kit) -> dict[str, bytes]:
    """Every file there is, as it is on the disk."""
    files = kit.files()
    found = {}
    for path in kit.disk.paths():
        file = files.open(path)
        found[path] = file.read_at(0, file.size())
        file.close()
    return found


@pytest.mark.parametrize("segment_bytes", [1000, 1 << 20], ids=["several segments", "one"])
@pytest.mark.parametrize("error", [errno.EIO, errno.EUCLEAN, errno.EBADMSG])
def test_a_disk_that_does_not_answer_stops_the_start_and_nothing_is_changed(segment_bytes: int, error: int):
    """As where a path to the storage is away for a moment while a machine boots."""
    kit = Kit(segment_bytes=segment_bytes, faults=ReadFaults())
    model = filled(kit)
    assert kit.faults is not None
    before = contents(kit)
    for path in before:
        kit.faults.bytes_unreadable[path] = (0, 1 << 30, error)
    with pytest.raises(StorageError, match=r"cannot read: .*The disk does not answer.*nothing of it is changed"):
        kit.open(next_sequence_min=1000)
    assert contents(kit) == before and kit.reports == []
    kit.faults.bytes_unreadable.clear()
    assert read_all(kit.open()) == model and kit.reports == []


def test_a_segment_that_is_lost_to_the_last_byte_is_moved_and_never_removed():
    """It may be readable again tomorrow, with another cable."""
    kit = Kit(segment_bytes=1 << 20, faults=ReadFaults())
    log = kit.open()
    model = fill(log, 12)
    sync(log)
    kill(kit)  # there is no checkpoint, so the file is read
    assert kit.faults is not None
    (path,) = kit.logs()
    whole = contents(kit)[path]
    kit.faults.bytes_unreadable[path] = (0, 1 << 30, errno.EIO)
    log = kit.open(next_sequence_min=max(model) + 1)
    kit.faults.bytes_unreadable.clear()
    assert kit.lost() == set(model) and any(".unreadable" in report.reason for report in kit.reports)
    after = log.append([b"after"], 1)
    assert after > max(model)
    sync(log)
    log.close()
    files = contents(kit)
    assert files[f"{path}.unreadable"] == whole
    kit.files().rename(f"{path}.unreadable", path)
    assert read_all(kit.open()) == model | {after: b"after"}, "who moves it back has it all again"


def test_an_end_that_the_disk_has_lost_is_not_cut():
    kit = Kit(segment_bytes=1 << 20, faults=ReadFaults())
    log = kit.open()
    model = {log.append([b"%d" % number * 200], number): b"%d" % number * 200 for number in range(60)}
    kill(kit)  # there is no checkpoint, so the file is read
    assert kit.faults is not None
    (path,) = kit.logs()
    whole = contents(kit)[path]
    kit.faults.bytes_unreadable[path] = (PAGE_BYTES, 1 << 30, errno.EIO)
    log = kit.open()
    assert kit.kinds() == ["torn"] and "it is left as it is" in kit.reports[0].reason
    first = log.append([b"after"], 1)
    kept = {sequence: body for sequence, body in model.items() if sequence < first}
    assert 3 <= len(kept) < 30 and read_all(log) == kept | {first: b"after"}
    sync(log)
    log.close()
    kit.faults.bytes_unreadable.clear()
    assert contents(kit)[path] == whole
    assert read_all(kit.open()) == kept | {first: b"after"}


def test_the_virtual_offset_goes_on_when_everything_before_is_gone():
    kit = Kit(segment_bytes=400)
    log = kit.open()
    fill(log, 10)
    offset = log.end_offset_bytes
    log.roll()
    sync(log)
    log.drop_before(log.next_sequence)
    assert log.start_sequence == log.next_sequence
    sync(log)
    log.close()
    log = kit.open()
    assert log.end_offset_bytes == offset
    log.append([b"after"], 1)
    batch = log.read(log.start_sequence)
    assert batch is not None
    assert batch.header.offset_bytes == offset
    assert [info.first_sequence for info in log.segments()] == [log.start_sequence]
    assert not list(pairwise(log.segments()))
