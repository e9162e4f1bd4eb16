"""Joining small batches that are read back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.storage.log_kit import PARTITION, bodies_of

from flintmq.batch import EXTENDED, LAYOUT_FLAGS, RAW_IDS, UNIFORM, Batch, decode_batch, encode_batch
from flintmq.limits import JOIN_SIZE_MAX, JOIN_TIME_NS
from flintmq.message import FRAME_OVERHEAD_BYTES, internal_id
from flintmq.storage.read_ahead import decode_run

BASE = internal_id(PARTITION, 0)


class Run:
    def __init__(self) -> None:
        self.data = b""
        self.positions = [0]
        self.sequence = 1
        self.offset_bytes = 1000

    def add(
        self,
        *bodies: bytes,
        timestamp_ns: int = 5,
        due_ns: int = 0,
        epoch: int = 0,
        synced_before: int = 0,
        layout: int = 0,
    ) -> None:
        self.data += encode_batch(
            BASE | self.sequence,
            self.offset_bytes,
            timestamp_ns,
            bodies,
            synced_before=synced_before,
            due_ns=due_ns,
            epoch=epoch,
            layout=layout,
        )
        self.positions.append(len(self.data))
        self.sequence += len(bodies)
        self.offset_bytes += sum(len(body) + FRAME_OVERHEAD_BYTES for body in bodies)

    def decoded(self) -> list[Batch]:
        return decode_run(self.data, self.positions)

    def ranges(self) -> list[tuple[int, int]]:
        return [(batch.first, batch.end) for batch in self.decoded()]


def test_small_batches_become_one_valid_batch():
    run = Run()
    run.add(b"same", timestamp_ns=7, synced_before=1)
    run.add(b"size", timestamp_ns=5, synced_before=2)
    run.add(b"here", b"also", timestamp_ns=9, synced_before=3)
    [batch] = run.decoded()
    assert bodies_of(batch.data) == {1: b"same", 2: b"size", 3: b"here", 4: b"also"}
    assert batch.header == decode_batch(batch.data).header
    assert batch.header.flags == UNIFORM
    assert (batch.first, batch.end, batch.due_ns, batch.timestamp_ns) == (1, 5, 0, 9)
    assert (batch.header.timestamp_min, batch.header.offset_bytes, batch.header.synced_before) == (5, 1000, 1)
    assert len(batch.frames(1, 5)) == 4 * (4 + FRAME_OVERHEAD_BYTES)


def test_frames_are_the_bytes_that_were_stored():
    run = Run()
    run.add(b"one")
    run.add(b"two", b"threeee", b"")
    run.add(b"x", b"y")
    stored = b"".join(
        bytes(batch.frames(batch.first, batch.end))
        for batch in (decode_batch(run.data[start:end]) for start, end in pairwise(run.positions))
    )
    [batch] = run.decoded()
    assert batch.frames(1, 7) == stored
    assert batch.header.flags == 0


def test_one_batch_stays_as_it_is():
    run = Run()
    run.add(b"a", b"bb")
    [batch] = run.decoded()
    assert batch.data == run.data
    assert decode_run(b"", [0]) == []


def test_large_batches_stay_as_they_are():
    run = Run()
    run.add(b"small")
    run.add(b"small")
    run.add(b"L" * JOIN_SIZE_MAX)
    run.add(b"small")
    run.add(b"small")
    assert run.ranges() == [(1, 3), (3, 4), (4, 6)]
    assert run.decoded()[1].data == run.data[run.positions[2] : run.positions[3]]


def test_deferred_batches_stay_alone():
    run = Run()
    for due_ns in (0, 0, 99, 99, 0, 0):
        run.add(b"x", due_ns=due_ns)
    assert run.ranges() == [(1, 3), (3, 4), (4, 5), (5, 7)]
    assert [batch.due_ns for batch in run.decoded()] == [0, 99, 99, 0]


def test_layouts_are_kept_and_kept_apart():
    run = Run()
    layouts = (0, 0, EXTENDED, EXTENDED, RAW_IDS | EXTENDED, RAW_IDS | EXTENDED, RAW_IDS)
    for number, layout in enumerate(layouts):
        run.add(bytes(9 + number), layout=layout)
    assert run.ranges() == [(1, 3), (3, 5), (5, 7), (7, 8)]
    flags = [batch.header.flags & LAYOUT_FLAGS for batch in run.decoded()]
    assert flags == [0, EXTENDED, RAW_IDS | EXTENDED, RAW_IDS]


def test_epochs_are_kept_apart():
    run = Run()
    for epoch in (1, 1, 2, 2, 2):
        run.add(b"x", epoch=epoch)
    assert run.ranges() == [(1, 3), (3, 6)]
    assert [batch.header.epoch for batch in run.decoded()] == [1, 2]


def test_batches_far_apart_in_time_are_kept_apart():
    run = Run()
    for timestamp_ns in (10**18, 10**18 + JOIN_TIME_NS, 10**18 + JOIN_TIME_NS + 1, 5, 6):
        run.add(b"x", timestamp_ns=timestamp_ns)
    assert run.ranges() == [(1, 3), (3, 4), (4, 6)]


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.lists(st.binary(max_size=5), min_size=1, max_size=4),
            st.integers(0, 3 * JOIN_TIME_NS),
            st.sampled_from([0, 0, 0, 77]),
            st.sampled_from([0, 0, 0, 1]),
        ),
        max_size=20,
    )
)
def test_nothing_is_lost_or_changed(batches):
    run = Run()
    for bodies, timestamp_ns, due_ns, epoch in batches:
        run.add(*bodies, timestamp_ns=timestamp_ns, due_ns=due_ns, epoch=epoch)
    decoded = run.decoded()
    assert bodies_of(b"".join(bytes(batch.data) for batch in decoded)) == bodies_of(run.data)
    assert all(before.end == after.first for before, after in pairwise(decoded))
    for batch in decoded:
        assert decode_batch(batch.data).header == batch.header
        assert batch.header.timestamp_max - batch.header.timestamp_min <= JOIN_TIME_NS
