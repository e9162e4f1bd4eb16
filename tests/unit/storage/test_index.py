"""The sparse index in memory and as a file."""

from __future__ import annotations

from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.batch import decode_header, encode_batch
from flintmq.limits import INDEX_ENTRIES_MAX, INDEX_INTERVAL_BYTES
from flintmq.message import internal_id
from flintmq.storage import index as index_module
from flintmq.storage.index import (
    INDEX_BYTES_MAX,
    SUMMARY_BYTES,
    Entry,
    IndexSummary,
    SparseIndex,
    decode_index,
    decode_summary,
    encode_index,
)
from flintmq.storage.scan import walk

BASE = internal_id(7, 0)
SUMMARY = IndexSummary(
    log_id=11, first=100, end=900, data_size=123_456, end_offset_bytes=120_000, timestamp_max=77, synced_sequence=850
)


def filled(count: int) -> SparseIndex:
    index = SparseIndex()
    for number in range(count):
        index.add(Entry(100 + 3 * number, 64 + 5000 * number, 4900 * number), 10 * number)
    return index


def test_an_empty_index_knows_nothing():
    index = SparseIndex()
    assert len(index) == 0
    assert index.next_position == 0
    assert index.before_sequence(5) is None
    assert index.before_offset(5) is None
    assert index.before_timestamp(5) is None


def test_lookups():
    index = filled(10)
    assert index.before_sequence(99) is None
    assert index.before_sequence(100) == Entry(100, 64, 0)
    assert index.before_sequence(102) == Entry(100, 64, 0)
    assert index.before_sequence(103) == Entry(103, 5064, 4900)
    assert index.before_sequence(10**9) == Entry(127, 45064, 44100)
    assert index.before_offset(0) == Entry(100, 64, 0)
    assert index.before_offset(4899) == Entry(100, 64, 0)
    assert index.before_offset(4900) == Entry(103, 5064, 4900)
    assert index.before_timestamp(0) == Entry(100, 64, 0)
    assert index.before_timestamp(10) == Entry(100, 64, 0), "what has 10 ns comes before the entry that has seen 10 ns"
    assert index.before_timestamp(11) == Entry(103, 5064, 4900)
    assert index.before_timestamp(10**9) == Entry(127, 45064, 44100)


def test_its_size_is_bounded():
    index = SparseIndex()
    position, added = 64, 0
    while added < 5 * INDEX_ENTRIES_MAX:
        if position >= index.next_position:
            index.add(Entry(added + 1, position, position), added)
            added += 1
        position += INDEX_INTERVAL_BYTES
    assert INDEX_ENTRIES_MAX // 2 <= len(index) <= INDEX_ENTRIES_MAX
    assert index.positions[0] == 64, "the first batch stays"
    assert list(index.positions) == sorted(index.positions)
    assert index.size_bytes < 200_000
    gaps = {after - before for before, after in zip(index.positions[1:], index.positions[2:], strict=False)}
    assert max(gaps) <= 2 * min(gaps)


def test_an_entry_that_came_too_early_after_thinning_is_left_out(monkeypatch):
    monkeypatch.setattr(index_module, "INDEX_ENTRIES_MAX", 4)
    index = SparseIndex()
    for number in range(4):
        index.add(Entry(number, number * INDEX_INTERVAL_BYTES, 0), 0)
    index.add(Entry(4, 3 * INDEX_INTERVAL_BYTES + 1, 0), 0)
    assert list(index.sequences) == [0, 2]
    index.add(Entry(5, index.next_position, 0), 0)
    assert list(index.sequences) == [0, 2, 5]


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 50)), min_size=1, max_size=60), st.integers(50, 3000))
def test_add_run_records_what_is_needed_to_find_everything(batches, interval):
    """Sequences, offsets and timestamps are found from the entry before them, whatever the shape of the log."""
    index = SparseIndex()
    index._interval_bytes = interval
    data, sequence, offset, starts = b"", 1, 0, []
    for count, timestamp in batches:
        starts.append((sequence, len(data), offset, timestamp))
        batch = encode_batch(BASE | sequence, offset, timestamp, [b"x" * (timestamp % 7)] * count)
        offset += decode_header(batch).payload_size
        sequence += count
        data += batch
    cut = starts[len(starts) // 2]
    latest = 0
    for part, at, first in ((data[: cut[1]], 0, 1), (data[cut[1] :], cut[1], cut[0])):
        run = walk(part, 0, BASE | first, 1 << 64)
        latest = index.add_run(part, run, 64 + at, BASE, latest)
    assert latest == max(timestamp for _, timestamp in batches)
    assert index.before_sequence(1) == Entry(1, 64, 0)
    for first, position, offset_bytes, _timestamp in starts:
        entry = index.before_sequence(first)
        assert entry is not None
        assert entry.position <= 64 + position
        assert 64 + position - entry.position <= interval + 72 + 40 * 40
        assert entry == index.before_offset(offset_bytes)
        assert (entry.sequence, entry.position - 64, entry.offset_bytes) in [start[:3] for start in starts]
    for timestamp in range(52):
        wanted = next((position for _, position, _, t in starts if t >= timestamp), None)
        entry = index.before_timestamp(timestamp)
        assert entry is not None
        if wanted is not None:
            assert entry.position <= 64 + wanted


@pytest.mark.parametrize("count", [1, 2, 100, INDEX_ENTRIES_MAX])
def test_a_file_says_what_was_written(count):
    index = filled(count)
    data = encode_index(SUMMARY, index)
    assert len(data) <= INDEX_BYTES_MAX
    assert decode_summary(data[:SUMMARY_BYTES]) == SUMMARY
    decoded = decode_index(data)
    assert decoded is not None
    summary, loaded = decoded
    assert summary == SUMMARY
    assert loaded.sequences == index.sequences
    assert loaded.positions == index.positions
    assert loaded.offsets == index.offsets
    assert loaded.timestamps == index.timestamps
    assert loaded.next_position > loaded.positions[-1]


def test_a_loaded_index_goes_on_with_a_fitting_interval():
    index = SparseIndex()
    for number in range(INDEX_ENTRIES_MAX):
        index.add(Entry(number + 1, 64 + number * INDEX_INTERVAL_BYTES * 4, 0), 0)
    decoded = decode_index(encode_index(SUMMARY, index))
    assert decoded is not None
    assert decoded[1].next_position - decoded[1].positions[-1] == INDEX_INTERVAL_BYTES * 4


def test_the_file_is_big_endian():
    data = encode_index(SUMMARY, filled(1))
    assert data[SUMMARY_BYTES : SUMMARY_BYTES + 8] == (100).to_bytes(8, "big")


def test_any_changed_byte_is_noticed():
    data = encode_index(SUMMARY, filled(3))
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        assert decode_index(bytes(changed)) is None
        if position < SUMMARY_BYTES:
            assert decode_summary(bytes(changed)) is None


def test_any_other_length_is_noticed():
    data = encode_index(SUMMARY, filled(3))
    for size in range(len(data)):
        assert decode_index(data[:size]) is None
    assert decode_index(data + b"\0") is None
    assert decode_index(encode_index(SUMMARY, SparseIndex())) is None, "an index without an entry says nothing"


@given(st.binary(max_size=300))
def test_noise_is_no_index(noise):
    assert decode_index(noise) is None
    assert decode_summary(noise) is None


def test_another_version_is_not_read():
    data = bytearray(encode_index(SUMMARY, filled(1)))
    data[5] = 2
    header = bytes(data[: SUMMARY_BYTES - 4])
    data[SUMMARY_BYTES - 4 : SUMMARY_BYTES] = crc32(header).to_bytes(4, "big")
    assert decode_summary(bytes(data)) is None
