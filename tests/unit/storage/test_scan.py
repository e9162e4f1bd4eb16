"""The walk, the hop and the search on bare bytes."""

from __future__ import annotations

import random
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.batch import HEADER_BYTES, decode_header, encode_batch
from flintmq.message import FRAME_OVERHEAD_BYTES, internal_id
from flintmq.storage import scan
from flintmq.storage.scan import Anchor, Claim, Search, claim_at, hop, walk, why_not

PARTITION = 513
BASE = internal_id(PARTITION, 0)
NO_STOP = 1 << 64


class Log:
    """Batches one after the other, as a writer leaves them."""

    def __init__(self, first: int = 1, offset_bytes: int = 0, partition: int = PARTITION) -> None:
        self.data = b""
        self.starts: list[int] = []
        self.firsts: list[int] = []
        self.sequence = first
        self.offset_bytes = offset_bytes
        self.partition = partition

    def add(self, *bodies: bytes, synced_before: int = 0) -> bytes:
        batch = encode_batch(
            internal_id(self.partition, self.sequence),
            self.offset_bytes,
            1000 + self.sequence,
            bodies,
            synced_before=synced_before,
        )
        self.starts.append(len(self.data))
        self.firsts.append(self.sequence)
        self.data += batch
        self.sequence += len(bodies)
        self.offset_bytes += sum(len(body) + FRAME_OVERHEAD_BYTES for body in bodies)
        return batch

    def search(self, data: bytes | None = None) -> Search:
        content = self.data if data is None else data
        return Search(lambda position, size: content[position : position + size], len(content), BASE)


def sample(count: int = 6) -> Log:
    log = Log()
    for number in range(count):
        log.add(*[b"message %d" % number + b"." * number * i for i in range(1 + number % 3)])
    return log


def damaged(data: bytes, position: int) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 0x10
    return bytes(changed)


def found(claim: Claim | None) -> tuple[int, int] | None:
    return None if claim is None else (claim.position, claim.first_id - BASE)


def test_walk_visits_every_batch():
    log = sample()
    run = walk(log.data, 0, BASE | 1, NO_STOP)
    assert run.positions == log.starts
    assert [first - BASE for first in run.first_ids] == log.firsts
    assert run.timestamps == [1000 + first for first in log.firsts]
    assert (run.position, run.next_id - BASE) == (len(log.data), log.sequence)


def test_walk_starts_and_stops_where_it_is_told():
    log = sample()
    run = walk(log.data, log.starts[2], BASE | log.firsts[2], BASE | log.firsts[4])
    assert run.positions == log.starts[2:4]
    assert run.position == log.starts[4]
    run = walk(log.data, log.starts[2], BASE | log.firsts[2], BASE | log.firsts[4] + 1)
    assert run.positions == log.starts[2:5], "a batch that begins below the stop is whole"


def test_walk_stops_at_every_kind_of_damage():
    log = sample()
    for position in range(len(log.data)):
        run = walk(damaged(log.data, position), 0, BASE | 1, NO_STOP)
        hit = max(number for number, start in enumerate(log.starts) if start <= position)
        assert run.positions == log.starts[:hit]
        assert run.position == log.starts[hit]


def test_walk_stops_at_the_end_of_the_data():
    log = sample()
    for size in range(len(log.data)):
        whole = [end for end in [*log.starts[1:], len(log.data)] if end <= size]
        run = walk(log.data[:size], 0, BASE | 1, NO_STOP)
        assert len(run.positions) == len(whole)
        assert run.position == (whole[-1] if whole else 0)


def test_walk_does_not_take_another_sequence_or_partition():
    log = sample()
    assert walk(log.data, 0, BASE | 2, NO_STOP).positions == []
    assert walk(log.data, 0, internal_id(PARTITION + 1, 1), NO_STOP).positions == []


def test_hop_goes_to_the_batch_with_the_wanted_sequence():
    log = sample()
    for sequence in range(1, log.sequence):
        number = max(n for n, first in enumerate(log.firsts) if first <= sequence)
        assert hop(log.data, 0, BASE | 1, BASE | sequence) == (log.starts[number], BASE | log.firsts[number])
    assert hop(log.data, 0, BASE | 1, BASE | log.sequence) == (len(log.data), BASE | log.sequence)


def test_hop_stops_before_what_does_not_look_like_the_next_batch():
    log = sample()
    broken = damaged(log.data, log.starts[3])
    assert hop(broken, 0, BASE | 1, BASE | log.sequence)[0] == log.starts[3]
    cut = log.data[: log.starts[3] + HEADER_BYTES + 3]
    assert hop(cut, 0, BASE | 1, BASE | log.sequence)[0] == log.starts[3]


def test_a_claim_says_what_the_header_says():
    log = sample()
    for start in log.starts:
        header = decode_header(log.data, start)
        claim = claim_at(log.data, start, 5000 + start, BASE)
        assert claim is not None
        assert claim.position == 5000 + start
        assert claim.size == header.size
        assert claim.end_position == 5000 + start + header.size
        assert (claim.first_id, claim.end_id) == (header.first_id, header.first_id + header.count)
        assert claim.synced_before == header.synced_before
    ends = [claim_at(log.data, start, start, BASE) for start in log.starts]
    assert [claim.end_offset_bytes for claim in ends if claim][:-1] == [c.offset_bytes for c in ends if c][1:]


@pytest.mark.parametrize(
    ("position", "value"),
    [(0, b"G"), (4, b"\x02"), (5, b"\x80"), (6, b"\x01"), (8, b"\xff"), (12, b"\xff"), (16, b"\xff")],
    ids=["magic", "version", "flags", "reserved", "payload_size", "count", "partition"],
)
def test_no_claim_for_what_no_writer_produces(position, value):
    log = sample(1)
    data = log.data[:position] + value + log.data[position + 1 :]
    assert claim_at(data, 0, 0, BASE) is None


def test_no_claim_outside_the_data():
    log = sample(1)
    assert claim_at(log.data, -1, 0, BASE) is None
    assert claim_at(log.data[: HEADER_BYTES - 1], 0, 0, BASE) is None
    assert claim_at(log.data[:8] + bytes(4) + log.data[12:], 0, 0, BASE) is None, "a batch has a payload"


def test_search_finds_the_next_batch_behind_any_damaged_byte():
    log = sample()
    for position in range(len(log.data)):
        hit = max(number for number, start in enumerate(log.starts) if start <= position)
        data = damaged(log.data, position)
        anchor = Anchor(log.starts[hit], decode_header(log.data, log.starts[hit]).offset_bytes)
        claim = log.search(data).next_batch(log.starts[hit], BASE | log.firsts[hit], anchor)
        expected = (log.starts[hit + 1], log.firsts[hit + 1]) if hit + 1 < len(log.starts) else None
        assert found(claim) == expected


def test_search_without_an_anchor_finds_the_next_batch_too():
    log = sample()
    claim = log.search(b"\0" + log.data[1:]).next_batch(0, BASE | 1, None)
    assert found(claim) == (log.starts[1], log.firsts[1])


def test_search_finds_a_batch_whose_predecessors_bytes_are_gone():
    log = sample()
    data = log.data[: log.starts[2]] + log.data[log.starts[4] :]
    offset = decode_header(log.data, log.starts[2]).offset_bytes
    claim = log.search(data).next_batch(log.starts[2], BASE | log.firsts[2], Anchor(log.starts[2], offset))
    assert found(claim) == (log.starts[2], log.firsts[4])


def test_search_skips_repeated_batches():
    log = sample()
    again = log.data[log.starts[1] : log.starts[2]]
    data = log.data[: log.starts[2]] + again + again + log.data[log.starts[2] :]
    offset = decode_header(log.data, log.starts[2]).offset_bytes
    claim = log.search(data).next_batch(log.starts[2], BASE | log.firsts[2], Anchor(log.starts[2], offset))
    assert found(claim) == (log.starts[2] + 2 * len(again), log.firsts[2])


@pytest.mark.parametrize("shift", [-30, -1, 1, 700, 4096])
def test_search_finds_batches_that_were_shifted(shift):
    log = sample()
    start = log.starts[1]
    filler = b"" if shift < 0 else random.Random(shift).randbytes(shift)
    data = log.data[:start] + filler + log.data[start + max(0, -shift) :]
    offset = decode_header(log.data, start).offset_bytes
    claim = log.search(data).next_batch(start, BASE | log.firsts[1], Anchor(start, offset))
    hit = 1 if shift > 0 else 2
    assert found(claim) == (log.starts[hit] + shift, log.firsts[hit])


def test_search_takes_the_good_batches_that_lead_to_a_consistent_one():
    """A shift may make a later batch look consistent by chance; those before it are not given up for it."""
    log = Log()
    for _ in range(3):
        log.add(b"a")
    wide = Log(4, log.offset_bytes)
    for _ in range(4):
        wide.add(b"b")
    # 76 more bytes than there should be: consistent with two more lost batches
    data = log.data[: log.starts[1]] + bytes(76) + log.data[log.starts[1] :] + wide.data
    offset = decode_header(log.data, log.starts[1]).offset_bytes
    claim = log.search(data).next_batch(log.starts[1], BASE | 2, Anchor(log.starts[1], offset))
    assert found(claim) == (log.starts[1] + 76, 2)


def inner_log(first: int) -> Log:
    inner = Log(first=first, offset_bytes=77_777_777)
    for number in range(4):
        inner.add(b"a stranger %d" % number)
    return inner


@pytest.mark.parametrize("position", range(HEADER_BYTES))
@pytest.mark.parametrize("is_last", [False, True], ids=["followed", "last"])
def test_a_batch_inside_a_message_is_never_taken_for_a_stored_one(position, is_last):
    """The header of a batch is damaged whose message is a copy of some other log, with sequences that would fit."""
    log = Log()
    log.add(b"before")
    log.add(inner_log(first=3).data)
    if not is_last:
        log.add(b"after")
    data = damaged(log.data, log.starts[1] + position)
    offset = decode_header(log.data, log.starts[1]).offset_bytes
    claim = log.search(data).next_batch(log.starts[1], BASE | 2, Anchor(log.starts[1], offset))
    assert found(claim) == (None if is_last else (log.starts[2], 3))


@pytest.mark.parametrize(
    ("budget", "hashed_min", "hashed_max"), [(500_000, 0, 3_000_000), (1 << 40, 50_000_000, 1 << 40)]
)
def test_a_body_full_of_headers_does_not_make_the_search_slow(monkeypatch, budget, hashed_min, hashed_max):
    """Each fake header consistently claims 100 kB; only so many bytes are hashed for such claims."""
    hashed = 0

    def counting(data: bytes, value: int = 0) -> int:
        nonlocal hashed
        hashed += len(data)
        return crc32(data, value)

    monkeypatch.setattr(scan, "crc32", counting)
    monkeypatch.setattr(scan, "RESYNC_CRC_BYTES_MAX", budget)
    log = Log()
    log.add(b"before")
    offset = log.offset_bytes
    fakes = []
    position = len(log.data) + HEADER_BYTES + FRAME_OVERHEAD_BYTES
    for number in range(1500):
        at = position + number * HEADER_BYTES
        lost = 1 + number // 2
        frame_bytes = at - len(log.data) - HEADER_BYTES
        fake = bytearray(encode_batch(BASE | 2 + lost, offset + frame_bytes, 1, [b"x" * 100_000])[:HEADER_BYTES])
        fakes.append(bytes(fake))
    log.add(b"".join(fakes) + b"y" * 200_000)
    log.add(b"after")
    data = damaged(log.data, log.starts[1])
    claim = log.search(data).next_batch(log.starts[1], BASE | 2, Anchor(log.starts[1], offset))
    assert found(claim) == (log.starts[2], 3)
    assert hashed_min <= hashed <= hashed_max


@given(st.binary(max_size=300), st.integers(0, 5))
def test_noise_is_survived_and_the_batches_behind_it_found(noise, number):
    log = sample()
    start = log.starts[number]
    data = log.data[:start] + noise + log.data[start:]
    offset = decode_header(log.data, start).offset_bytes
    claim = log.search(data).next_batch(start, BASE | log.firsts[number], Anchor(start, offset))
    assert found(claim) == (start + len(noise), log.firsts[number])


@given(st.binary(max_size=400))
def test_noise_alone_is_no_batch(noise):
    assert walk(noise, 0, BASE | 1, NO_STOP).positions == []
    assert hop(noise, 0, BASE | 1, NO_STOP) == (0, BASE | 1)
    search = Search(lambda position, size: noise[position : position + size], len(noise), BASE)
    assert search.next_batch(0, BASE | 1, Anchor(0, 0)) is None
    assert why_not(noise, BASE | 1, BASE, len(noise))


@pytest.mark.parametrize("partition", [0, 1, 3, 63, 64, 255, 1023])
def test_every_partition_is_found(partition):
    log = Log(partition=partition)
    log.add(b"first")
    log.add(b"second")
    base = internal_id(partition, 0)
    data = b"x" + log.data[1:]
    claim = Search(lambda position, size: data[position : position + size], len(data), base).next_batch(
        0, base | 1, Anchor(0, 0)
    )
    assert claim is not None
    assert claim.position == log.starts[1]


def test_reasons_are_words():
    log = sample(2)
    assert why_not(log.data[:10], BASE | 1, BASE, 10) == "10 bytes left, a batch header has 72"
    assert why_not(b"x" * 80, BASE | 1, BASE, 80) == "not a batch header"
    assert why_not(log.data, BASE | 7, BASE, len(log.data)) == "batch of sequence 1 where 7 was expected"
    assert why_not(log.data, BASE | 1, BASE, 90).startswith("cut short: 90 of ")
    assert why_not(damaged(log.data, 100), BASE | 1, BASE, len(log.data)) == "CRC mismatch"
