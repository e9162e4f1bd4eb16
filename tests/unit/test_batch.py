"""The batch: layout, slicing, damage."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flintmq.batch import (
    DEFERRED,
    HEADER_BYTES,
    UNIFORM,
    BatchError,
    decode_batch,
    decode_header,
    encode_batch,
    with_stamps,
)
from flintmq.message import FRAME_OVERHEAD_BYTES, MESSAGE_HEADER, hex_id, internal_id, partition_of, sequence_of

bodies_lists = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=30)


def frames_of(data):
    """The slow way: walk the frames one by one."""
    frames, position = [], 0
    data = bytes(data)
    while position < len(data):
        (size,) = struct.unpack_from(">I", data, position)
        frames.append(data[position : position + size + 4])
        position += size + 4
    return frames


@settings(deadline=None)
@given(bodies=bodies_lists, partition=st.integers(0, 1023), first=st.integers(1, 2**50 - 100))
def test_what_is_encoded_is_decoded(bodies, partition, first):
    data = encode_batch(internal_id(partition, first), 77, 123, bodies, synced_before=5, due_ns=9, epoch=3)
    batch = decode_batch(data)
    header = batch.header
    assert (header.count, header.offset_bytes, header.synced_before, header.epoch) == (len(bodies), 77, 5, 3)
    assert (batch.first, batch.end, batch.due_ns, batch.timestamp_ns) == (first, first + len(bodies), 9, 123)
    assert header.flags & DEFERRED
    assert bool(header.flags & UNIFORM) == (len({len(body) for body in bodies}) == 1)
    frames = frames_of(batch.frames(batch.first, batch.end))
    for index, (frame, body) in enumerate(zip(frames, bodies, strict=True)):
        size, kind, timestamp, attempts, message_id = MESSAGE_HEADER.unpack_from(frame)
        assert (size, kind, timestamp, attempts) == (30 + len(body), 2, 123, 1)
        assert message_id == hex_id(internal_id(partition, first + index))
        assert frame[FRAME_OVERHEAD_BYTES:] == body


@settings(deadline=None)
@given(bodies=bodies_lists, data=st.data())
def test_slices_and_counts(bodies, data):
    batch = decode_batch(encode_batch(100, 0, 1, bodies))
    start = data.draw(st.integers(100, 100 + len(bodies) - 1))
    end = data.draw(st.integers(start + 1, 100 + len(bodies)))
    assert [frame[34:] for frame in frames_of(batch.frames(start, end))] == bodies[start - 100 : end - 100]
    limit = data.draw(st.integers(1, 2000))
    count = batch.count_within(start, limit)
    sizes = [len(body) + 34 for body in bodies[start - 100 :]]
    assert count == max(1, sum(1 for i in range(len(sizes)) if sum(sizes[: i + 1]) <= limit))


def test_ids_run_over_a_block_of_4096():
    batch = decode_batch(encode_batch(4090, 0, 1, [b"x"] * 20))
    ids = [frame[18:34] for frame in frames_of(batch.frames(4090, 4110))]
    assert ids == [hex_id(n) for n in range(4090, 4110)]


def test_redelivery_changes_only_the_attempts():
    batch = decode_batch(encode_batch(1, 0, 1, [b"a", b"bb"]))
    first = bytes(batch.frames(2, 3))
    again = batch.redelivery(2, 7)
    assert again == first[:16] + b"\x00\x07" + first[18:]
    assert batch.redelivery(2, 70_000)[16:18] == b"\xff\xff"


@pytest.mark.parametrize("bodies", [[b"aa", b"bb", b"cc"], [b"a", b"bbb", b""]], ids=["uniform", "sizes"])
def test_messages_with_a_past_keep_their_timestamps_and_attempts(bodies):
    plain = encode_batch(5, 100, 7, bodies, synced_before=3)
    batch = decode_batch(with_stamps(plain, [(30, 4), (10, 1), (20, 65535)]))
    frames = frames_of(batch.frames(5, 8))
    assert [struct.unpack_from(">QH", frame, 8) for frame in frames] == [(30, 4), (10, 1), (20, 65535)]
    assert [frame[:8] + frame[18:] for frame in frames] == [
        frame[:8] + frame[18:] for frame in frames_of(decode_batch(plain).frames(5, 8))
    ]
    assert (batch.header.timestamp_min, batch.header.timestamp_max, batch.header.synced_before) == (10, 30, 3)
    assert [struct.unpack_from(">H", batch.redelivery(5, n), 16) for n in (1, 2, 3)] == [(4,), (5,), (6,)]
    assert batch.redelivery(7, 2)[16:18] == b"\xff\xff"


def test_every_flipped_byte_and_every_cut_is_noticed():
    data = encode_batch(1, 0, 1, [b"hello", b"world!"])
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x40
        with pytest.raises(BatchError):
            decode_batch(bytes(damaged))
        with pytest.raises(BatchError):
            decode_batch(data[:position])


def test_errors_say_what_is_wrong():
    data = encode_batch(1, 0, 1, [b"hello"])
    with pytest.raises(BatchError, match="10 bytes left, a batch header has 72"):
        decode_header(data[:10])
    with pytest.raises(BatchError, match="magic"):
        decode_header(bytes(HEADER_BYTES))
    with pytest.raises(BatchError, match="version 2"):
        decode_header(data[:4] + b"\x02" + data[5:])


def test_internal_ids():
    combined = internal_id(3, 17)
    assert combined == (3 << 50) + 17
    assert (partition_of(combined), sequence_of(combined)) == (3, 17)
    assert hex_id(255) == b"00000000000000ff"
