"""Batches of messages as another nsqd has delivered them: their ids, times and attempts stay theirs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.batch import EXTENDED, RAW_IDS, Batch, decode_batch, encode_batch, encode_received
from flintmq.message import MESSAGE_HEADER, frame_sizes
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


def frame(timestamp_ns: int, attempts: int, message_id: bytes, body: bytes) -> bytes:
    return MESSAGE_HEADER.pack(30 + len(body), 2, timestamp_ns, attempts, message_id) + body


@pytest.mark.parametrize("bodies", [[b"aa", b"bb"], [b"", b"a longer one"]], ids=["of one size", "of several"])
@pytest.mark.parametrize("layout", [0, RAW_IDS, RAW_IDS | EXTENDED])
def test_messages_keep_what_they_came_with(bodies: list[bytes], layout: int):
    ids = [b"0123456789abcdef", bytes(range(16))]
    frames = frame(50, 1, ids[0], bodies[0]) + frame(40, 65535, ids[1], bodies[1])
    data = encode_received(7, 1000, frames, frame_sizes(frames), [50, 40], synced_before=3, layout=layout)
    batch = decode_batch(data)
    assert stored(batch) == [(50, 1, ids[0], bodies[0]), (40, 65535, ids[1], bodies[1])]
    header = batch.header
    assert (batch.first, batch.end, header.offset_bytes, header.synced_before) == (7, 9, 1000, 3)
    assert (header.timestamp_min, header.timestamp_max) == (40, 50)
    assert header.flags & (RAW_IDS | EXTENDED) == layout


def test_the_same_bytes_as_a_batch_of_our_own_where_nothing_differs():
    ours = encode_batch(9, 500, 123, [b"one", b"three"])
    frames = bytes(decode_batch(ours).frames(9, 11))
    assert encode_received(9, 500, frames, frame_sizes(frames), [123, 123]) == ours


def test_a_log_in_memory_takes_them_whatever_its_bounds():
    log = MemoryLog(0, 1)
    frames = frame(1, 1, b"i" * 16, b"a") + frame(2, 1, b"i" * 16, b"b")
    for first in (1, 3):
        data = encode_received(first, log.end_offset_bytes, frames, frame_sizes(frames), [1, 2])
        assert log.append_batch(data) == first
    log.advance_committed(log.next_sequence)
    assert log.fetch(1, 5, 1 << 20)[1] == 5 and log.dropped_count == 0
    log.drop_before(3)
    assert log.start_sequence == 3


@given(st.lists(st.integers(0, 3), max_size=50))
def test_sizes_of_frames_are_those_of_their_bodies(sizes: list[int]):
    frames = b"".join(frame(1, 1, b"i" * 16, b"\0\0\0\x1e"[:size]) for size in sizes)
    assert frame_sizes(frames) == [34 + size for size in sizes]
