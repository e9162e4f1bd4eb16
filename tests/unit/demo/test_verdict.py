"""The verdict of the demo: every way in which an archive can be wrong is seen, and told from what is in order."""

from __future__ import annotations

import zlib
from dataclasses import asdict

import numpy as np
import pytest

from flintmq.demo.verdict import Contents, compare

BODIES = [b"flight %d" % number for number in range(6)]
KEYS = ["N1", "N2", "N1", "N2", "N1", "N3"]
IDS = [0, 1, 2, 3, 4, 5]
FIRST = 1  # offsets begin at 1


def archive(ids, offsets=None, partitions=None, crc32=None):
    """An archive of these flights, at offsets in their order unless others are given."""
    offsets = list(range(FIRST, FIRST + len(ids))) if offsets is None else offsets
    checksums = [zlib.crc32(BODIES[flight_id]) if 0 <= flight_id < len(BODIES) else 0 for flight_id in ids]
    columns = (partitions or [0] * len(ids), offsets, ids, crc32 or checksums)
    return Contents(*(np.array(column, dtype=np.int64) for column in columns))


def faults(found):
    """What the verdict says, without what is 0."""
    verdict = compare(BODIES, KEYS, found)
    counts = {name: count for name, count in asdict(verdict).items() if count}
    assert verdict.is_good == (not counts)
    return counts


def test_all_is_well():
    assert faults(archive(IDS)) == {}


def test_rows_may_come_in_any_order():
    assert faults(archive(IDS[::-1], offsets=[6, 5, 4, 3, 2, 1])) == {}


def test_a_lost_flight():
    assert faults(archive([0, 1, 2, 3, 4])) == {"lost": 1}


def test_an_offset_that_is_archived_twice():
    assert faults(archive([*IDS, 5, 5], offsets=[1, 2, 3, 4, 5, 6, 6, 6])) == {"archived_twice": 2}


def test_an_offset_that_is_not_archived():
    assert faults(archive(IDS, offsets=[1, 2, 3, 6, 7, 8])) == {"skipped": 2}


def test_partitions_count_their_offsets_apart():
    assert faults(archive([0, 2, 4, 1, 3, 5], offsets=[1, 2, 3, 1, 2, 3], partitions=[0, 0, 0, 1, 1, 1])) == {}


def test_a_flight_that_is_stored_at_several_offsets():
    assert faults(archive([*IDS, 4, 5])) == {"stored_twice": 2}
    assert faults(archive([*IDS, 5, 5, 5])) == {"stored_twice": 3}


@pytest.mark.parametrize("nobody", [-1, 6, 1_000_000])
def test_rows_that_are_no_flight(nobody):
    assert faults(archive([*IDS, nobody])) == {"invented": 1}


def test_another_body():
    checksums = [zlib.crc32(body) for body in BODIES]
    checksums[3] ^= 1
    assert faults(archive(IDS, crc32=checksums)) == {"altered": 1}


def test_order_is_kept_within_an_aircraft_only():
    assert faults(archive([5, 1, 3, 0, 2, 4])) == {}
    assert faults(archive([5, 1, 3, 2, 0, 4])) == {"out_of_order": 1}


def test_of_copies_the_first_counts_for_the_order():
    assert faults(archive([0, 1, 2, 3, 0, 4, 5])) == {"stored_twice": 1}


def test_an_empty_archive():
    assert faults(archive([])) == {"lost": 6}
