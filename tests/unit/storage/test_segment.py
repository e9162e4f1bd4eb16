"""One segment file: its header, reading around damage, setting bytes aside, its index."""

from __future__ import annotations

import errno
from dataclasses import replace
from itertools import pairwise

import pytest
from tests.unit.storage.log_kit import Kit, ReadFaults, bodies_of, fetch_all, fill, read_all, read_randomly, sync

from flintmq.batch import decode_header
from flintmq.errors import StorageError
from flintmq.limits import BAD_FILES_MAX, DISK_RESERVE_BYTES, PAGE_BYTES
from flintmq.storage import segment as segment_module
from flintmq.storage.index import Entry, SparseIndex, encode_index
from flintmq.storage.partition_log import PartitionLog
from flintmq.storage.segment import (
    SEGMENT_HEADER_BYTES,
    Corruption,
    Damage,
    SegmentHeader,
    decode_segment_header,
    encode_segment_header,
    segment_name,
)

HEADER = SegmentHeader(
    partition=7, log_id=1 << 60, first=1001, offset_bytes=98_765, previous_end=1001, synced_before=900
)


def positions(kit: Kit, path: str) -> dict[int, int]:
    """Where each batch of a segment starts, by its first sequence."""
    content = kit.disk.content(path)
    position, found = SEGMENT_HEADER_BYTES, {}
    while position < len(content):
        header = decode_header(content, position)
        found[header.first_sequence] = position
        position += header.size
    return found


def reopened(kit: Kit) -> PartitionLog:
    """The log after a clean restart: nothing is in memory, every segment is believed by its index."""
    log = kit.open()
    fill(log, 12)
    sync(log)
    log.close()
    return kit.open()


def test_a_header_says_what_was_written():
    data = encode_segment_header(HEADER)
    assert len(data) == SEGMENT_HEADER_BYTES
    assert decode_segment_header(data) == HEADER
    assert decode_segment_header(data + b"batches") == HEADER


def test_any_changed_byte_of_a_header_is_noticed():
    data = encode_segment_header(HEADER)
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        assert decode_segment_header(bytes(changed)) is None
    for size in range(len(data)):
        assert decode_segment_header(data[:size]) is None


def test_a_header_of_a_later_version_is_refused_not_repaired(monkeypatch):
    monkeypatch.setattr(segment_module, "VERSION", 2)
    data = encode_segment_header(HEADER)
    monkeypatch.undo()
    with pytest.raises(StorageError, match="version 2; this release reads version 1"):
        decode_segment_header(data)


def test_names_sort_as_their_sequences():
    assert segment_name(1) == "00000000000000000001.log"
    assert segment_name(9) < segment_name(10) < segment_name(1 << 49)


def test_a_corruption_is_told_in_words():
    corruption = Corruption("topics/t/1.log", 70, 300, "CRC mismatch", 5, 8)
    assert str(corruption) == (
        "topics/t/1.log at byte 70, 300 bytes: CRC mismatch; 3 messages from sequence 5 to 7 skipped"
    )
    assert str(replace(corruption, end_sequence_lost=5)) == "topics/t/1.log at byte 70, 300 bytes: CRC mismatch"


def test_damage_found_while_reading_is_told_once_and_kept_aside():
    kit = Kit()
    log = reopened(kit)
    expected = read_all(log)
    path = kit.logs()[0]
    places = positions(kit, path)
    first, position = list(places.items())[1]
    following = list(places)[2]
    log = kit.open()
    bad = kit.disk.content(path)[position : places[following]]
    kit.disk.flip_bit(path, position + 80)
    stored = read_all(log)
    assert stored == {n: body for n, body in expected.items() if not first <= n < following}
    assert fetch_all(log) == stored
    assert read_all(log, start=first) == {n: body for n, body in stored.items() if n >= following}
    [report] = kit.reports
    assert (report.path, report.position, report.size) == (path, position, len(bad))
    assert (report.first_sequence_lost, report.end_sequence_lost, report.kind) == (first, following, "damage")
    assert report.reason == f"CRC mismatch; set aside in {path}.{position}.bad"
    aside = kit.disk.content(f"{path}.{position}.bad")
    assert len(aside) == len(bad)
    assert [i for i in range(len(bad)) if aside[i] != bad[i]] == [80]
    assert "is in place" not in report.reason

    log = kit.open()
    assert read_all(log) == stored
    [report] = kit.reports
    assert report.reason == f"CRC mismatch; set aside before in {path}.{position}.bad"


def test_damage_at_the_end_of_a_sealed_segment_is_told_with_its_messages():
    kit = Kit()
    log = reopened(kit)
    path = kit.logs()[0]
    places = positions(kit, path)
    last, position = list(places.items())[-1]
    end = log.segments()[1].first_sequence
    kit.disk.flip_bit(path, position + 20)
    stored = read_all(log)
    assert not set(range(last, end)) & set(stored)
    [report] = kit.reports
    assert (report.first_sequence_lost, report.end_sequence_lost) == (last, end)
    assert fetch_all(log) == read_all(log) == stored
    assert len(kit.reports) == 1


def test_two_neighbouring_damages_found_from_behind_are_told_apart():
    """The second is found first, by a reader that starts there; the first then only reaches up to it."""
    kit = Kit(segment_bytes=100_000)
    log = reopened(kit)
    path = kit.logs()[0]
    places = list(positions(kit, path).items())
    (first, position), (second, second_position), (third, _) = places[3:6]
    segment = log._segments[0]
    segment.index()
    kit.disk.flip_bit(path, position + 75)
    kit.disk.flip_bit(path, second_position + 75)
    segment.set_aside(Damage(second_position, places[5][1], second, third), "found from behind")
    read_all(log)
    assert [(r.first_sequence_lost, r.end_sequence_lost) for r in kit.reports] == [(second, third), (first, second)]


def test_an_unreadable_page_costs_the_batches_on_it():
    kit = Kit(segment_bytes=1 << 20, faults=ReadFaults())
    assert kit.faults is not None
    log = kit.open()
    model = {}
    for number in range(60):
        first = log.append([b"%d" % number * 200], number)
        model[first] = b"%d" % number * 200
    sync(log)
    log.close()
    path = kit.logs()[0]
    bad = range(PAGE_BYTES, 2 * PAGE_BYTES)
    places = [*positions(kit, path).items(), (61, 1 << 30)]
    hit = {n for (n, start), (_, end) in pairwise(places) if start < bad.stop and bad.start < end}
    kit.faults.bytes_unreadable[path] = (bad.start + 5, bad.stop - 5, errno.EIO)
    log = kit.open()
    assert read_all(log) == {n: body for n, body in model.items() if n not in hit}
    assert kit.lost() == hit
    assert 3 <= len(hit) < 30


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EACCES, errno.ELOOP])
def test_a_file_that_does_not_open_is_not_called_damaged(error):
    kit = Kit(faults=ReadFaults())
    assert kit.faults is not None
    reopened(kit)
    log = kit.open()
    path = kit.logs()[0]
    log._segments[0].close()
    kit.faults.not_opening[path] = error
    with pytest.raises(StorageError, match=path):
        log.read(1)
    assert kit.reports == []
    kit.faults.not_opening.clear()
    assert log.read(1) is not None


def test_an_error_that_is_not_about_the_bytes_is_not_called_damage():
    kit = Kit(faults=ReadFaults())
    assert kit.faults is not None
    log = reopened(kit)
    path = kit.logs()[0]
    kit.faults.bytes_unreadable[path] = (0, 1 << 30, errno.EINVAL)
    with pytest.raises(StorageError, match="cannot read"):
        log.read(1)
    kit.faults.bytes_unreadable[path] = (0, 1 << 30, errno.EIO)
    assert log.read(1) is not None
    assert kit.lost() == set(range(1, log.segments()[0].end_sequence))


@pytest.mark.parametrize("how", ["read", "fetch"])
def test_a_disk_that_does_not_answer_for_a_while_costs_nothing(how: str):
    """Nothing is taken for damage, so nobody steps over it, nor keeps zeros as what was there."""
    kit = Kit(faults=ReadFaults())
    assert kit.faults is not None
    log = reopened(kit)
    expected = read_all(log)
    before = kit.disk.paths()
    log = kit.open()
    for path in before:
        kit.faults.bytes_unreadable[path] = (0, 1 << 30, errno.EIO)
    for _ in range(3):
        with pytest.raises(StorageError, match="The disk does not answer"):
            log.read(1) if how == "read" else log.fetch(1, log.committed_sequence, 700)
    kit.faults.bytes_unreadable.clear()
    assert (read_all if how == "read" else fetch_all)(log) == expected
    assert kit.reports == [] and kit.disk.paths() == before


def test_a_page_that_turns_unreadable_for_another_reason_is_an_error():
    kit = Kit(faults=ReadFaults())
    log = reopened(kit)
    calls = 0

    def check(path: str, position: int, size: int) -> None:
        nonlocal calls
        calls += 1
        raise OSError(errno.EIO if calls == 1 else errno.ENODEV, "gone", path)

    assert kit.faults is not None
    kit.faults.check = check  # type: ignore[method-assign]
    log._segments[0].close()
    with pytest.raises(StorageError, match="cannot read"):
        log._segments[0].read(0, 10)


def test_a_file_removed_while_running_is_told_as_lost():
    kit = Kit()
    log = reopened(kit)
    expected = read_all(log)
    path = kit.logs()[1]
    info = log.segments()[1]
    log = kit.open()
    log._files.remove(path)
    log._segments[1].close()  # an open handle would go on reading
    gone = range(info.first_sequence, info.end_sequence)
    stored = {n: body for n, body in expected.items() if n not in gone}
    assert read_all(log) == fetch_all(log) == stored
    assert kit.lost() == set(gone)
    assert len(kit.reports) == 1


@pytest.mark.parametrize(
    "how", ["missing", "noise", "another segment's", "another log's", "unreadable", "not opening", "of another size"]
)
def test_an_index_that_is_no_use_is_rebuilt_while_reading(how):
    kit = Kit(faults=ReadFaults())
    assert kit.faults is not None
    expected = read_all(reopened(kit))
    log = kit.open()
    path = kit.path(1, ".index")
    good = kit.disk.content(path)
    if how == "missing":
        log._files.remove(path)
    elif how == "noise":
        kit.disk.damage(path, 80, b"noise")
    elif how == "another segment's":
        kit.disk.damage(path, 0, kit.disk.content(kit.path(log.segments()[1].first_sequence, ".index")))
    elif how == "another log's":
        loaded = log._segments[0].load_index()
        assert loaded is not None
        empty = SparseIndex()
        empty.add(Entry(5, 10_000, 0), 1)  # nothing of it is true here
        kit.disk.damage(path, 0, encode_index(replace(loaded[0], log_id=loaded[0].log_id + 1), empty))
        kit.disk.cut(path, len(encode_index(loaded[0], empty)))
        assert log._segments[0].load_index() is None
    elif how == "unreadable":
        kit.faults.bytes_unreadable[path] = (0, 1000, errno.EIO)
    elif how == "not opening":
        kit.faults.not_opening[path] = errno.EACCES
    else:
        loaded = log._segments[0].load_index()
        assert loaded is not None
        kit.disk.damage(path, 0, encode_index(replace(loaded[0], data_size=loaded[0].data_size - 1), loaded[1]))
    assert read_all(log) == expected
    assert kit.reports == []
    if how in ("missing", "another segment's"):
        assert kit.disk.content(path)[:60] == good[:60]


def test_an_index_that_became_shorter_is_believed():
    kit = Kit()
    segment = reopened(kit)._segments[0]
    longer = SparseIndex()
    for number in range(5):
        longer.add(Entry(1 + number, SEGMENT_HEADER_BYTES + 10 * number, 10 * number), number)
    segment.write_index(longer, 1)
    shorter = SparseIndex()
    shorter.add(Entry(1, SEGMENT_HEADER_BYTES, 0), 0)
    segment.write_index(shorter, 1)
    loaded = segment.load_index()
    assert loaded is not None and len(loaded[1]) == 1


@pytest.mark.parametrize("shift", [-50, 50])
def test_bytes_that_moved_are_found_by_every_reader(monkeypatch, shift):
    """The index still says where they were; readers that start in the middle must find what readers of all find."""
    monkeypatch.setattr("flintmq.storage.index.INDEX_INTERVAL_BYTES", 100)
    kit = Kit(segment_bytes=100_000)
    log = kit.open()
    model = fill(log, 40)
    sync(log)
    log.close()
    path = kit.logs()[0]
    position = list(positions(kit, path).values())[10] + 80
    content = kit.disk.content(path)
    moved = content[: position + min(shift, 0)] + b"x" * max(shift, 0) + content[position:]
    for sequences in (range(max(model), 0, -1), range(1, max(model) + 1)):
        kit.disk.cut(path, 0)
        kit.disk.damage(path, 0, moved.ljust(len(content), b"\0") if shift < 0 else moved[: len(content)])
        log = kit.open()
        stored = read_randomly(log, list(sequences))
        assert stored == read_all(log) == fetch_all(log)
        lost = set(model) - set(stored)
        assert lost == kit.lost()
        assert len(lost) <= (8 if shift > 0 else 5)
    assert kit.reports


def test_only_so_many_copies_are_kept(monkeypatch):
    monkeypatch.setattr(segment_module, "BAD_FILES_MAX", 2)
    assert BAD_FILES_MAX > 2
    kit = Kit(segment_bytes=100_000)
    log = reopened(kit)
    path = kit.logs()[0]
    for position in list(positions(kit, path).values())[1:10:2]:
        kit.disk.flip_bit(path, position + 75)
    read_all(log)
    assert len(kit.reports) == 5
    assert sum(name.endswith(".bad") for name in kit.disk.paths()) == 2
    assert kit.reports[-1].reason == (
        "CRC mismatch; not set aside, there are 2 such files already; the bytes are still in place"
    )


def test_no_copy_is_kept_when_the_disk_is_full():
    kit = Kit()
    log = reopened(kit)
    path = kit.logs()[0]
    kit.disk.flip_bit(path, 150)
    kit.disk.set_free_bytes(DISK_RESERVE_BYTES)
    read_all(log)
    assert "not set aside, the disk is full" in kit.reports[0].reason
    assert not any(name.endswith(".bad") for name in kit.disk.paths())


def test_a_copy_that_fails_is_told():
    kit = Kit()
    log = reopened(kit)
    kit.disk.flip_bit(kit.logs()[0], 150)
    kit.disk.fail("write", error=errno.EIO)
    stored = read_all(log)
    assert stored
    assert "not set aside: [Errno 5]" in kit.reports[0].reason


def test_position_of_finds_the_batch_of_any_sequence():
    kit = Kit(segment_bytes=100_000)
    log = reopened(kit)
    segment = log._segments[0]
    places = positions(kit, segment.path)
    assert segment.position_of(1) == segment.position_of(0) == 0
    for sequence in range(2, log.next_sequence):
        first = max(n for n in places if n <= sequence)
        assert segment.position_of(sequence) == places[first]
    assert segment.position_of(log.next_sequence) == segment.position_of(1 << 40) == segment.size


def test_a_batch_larger_than_a_read_is_read_whole(monkeypatch):
    monkeypatch.setattr("flintmq.storage.partition_log.READ_AHEAD_BYTES", 100)
    monkeypatch.setattr(segment_module, "SCAN_WINDOW_BYTES", 100)
    kit = Kit(segment_bytes=100_000)
    log = kit.open()
    bodies = [b"large" * 300, b"small", b"larger" * 900]
    for number, body in enumerate(bodies):
        log.append([body], number)
    log = kit.open()
    assert list(read_all(log).values()) == bodies
    assert bodies_of(log.fetch(1, 4, 1)[0]) == {1: bodies[0]}
