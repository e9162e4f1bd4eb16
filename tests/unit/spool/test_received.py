"""Batches of messages as another nsqd has delivered them: their ids, times and attempts stay theirs."""

from __future__ import annotations

from itertools import pairwise

import pytest

from flintmq.batch import EXTENDED, RAW_IDS, Batch, decode_batch, encode_batch, encode_received
from flintmq.message import MESSAGE_HEADER
from flintmq.storage import MemoryLog


def stored(batch: Batch) -> list[tuple[int, int, bytes, bytes]]:
    """Timestamp, attempts, id and body of each message of a batch."""
    frames = bytes(batch.frames(batch.first, batch.end))
    found = []
    for at, end in pairwise(batch.positions()):
        size, kind, timestamp_ns, attempts, message_id = MESSAGE_HEADER.unpack_from(frames, at)
        assert (size, kind) == (end - at - 4, 2)
        found.append((timestamp_ns, attempts, message_id, frames[at + MESSAGE_HEADER.size : end]))
    return found


@pytest.mark.parametrize("bodies", [[b"aa", b"bb"], [b"", b"a longer one"]], ids=["of one size", "of several"])
@pytest.mark.parametrize("layout", [0, RAW_IDS, RAW_IDS | EXTENDED])
def test_messages_keep_what_they_came_with(bodies: list[bytes], layout: int):
    ids = [b"0123456789abcdef", bytes(range(16))]
    batch = decode_batch(encode_received(7, 1000, [50, 40], [1, 65535], ids, bodies, synced_before=3, layout=layout))
    assert stored(batch) == [(50, 1, ids[0], bodies[0]), (40, 65535, ids[1], bodies[1])]
    header = batch.header
    assert (batch.first, batch.end, header.offset_bytes, header.synced_before) == (7, 9, 1000, 3)
    assert (header.timestamp_min, header.timestamp_max) == (40, 50)
    assert header.flags & (RAW_IDS | EXTENDED) == layout


def test_a_time_before_1970_is_1970():
    batch = decode_batch(encode_received(1, 0, [-5, 7], [1, 1], [b"i" * 16] * 2, [b"a", b"b"]))
    assert [timestamp_ns for timestamp_ns, *_ in stored(batch)] == [0, 7]


def test_the_same_bytes_as_a_batch_of_our_own_where_nothing_differs():
    ours = encode_batch(9, 500, 123, [b"one", b"three"])
    ids = [message_id for _, _, message_id, _ in stored(decode_batch(ours))]
    assert encode_received(9, 500, [123, 123], [1, 1], ids, [b"one", b"three"]) == ours


def test_a_log_in_memory_takes_them_whatever_its_bounds():
    log = MemoryLog(0, 1)
    for first in (1, 3):
        data = encode_received(first, log.end_offset_bytes, [1, 2], [1, 1], [b"i" * 16] * 2, [b"a", b"b"])
        assert log.append_batch(data) == first
    log.advance_committed(log.next_sequence)
    assert log.fetch(1, 5, 1 << 20)[1] == 5 and log.dropped_count == 0
    log.drop_before(3)
    assert log.start_sequence == 3
