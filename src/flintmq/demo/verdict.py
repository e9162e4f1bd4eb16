"""The verdict: what was sent and acknowledged, compared with what is in the archive.

The rules of this file: it only compares, on arrays; nobody's statistics are believed. Two kinds of copies are told
apart: one offset that is archived twice is Spark's doing, one flight that is stored at two offsets is nsqd's.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
_OFFSET_BITS = 50  # the sequence in an internal id has as many; partition numbers stand above


@dataclass(frozen=True)
class Contents:
    """The rows of an archive, in any order; a row that is no flight has the id -1."""

    partition: Numbers
    offset: Numbers
    id: Numbers
    body_crc32: Numbers


@dataclass(frozen=True)
class Verdict:
    """The number of messages with each fault.

    Attributes:
        lost: not in the archive.
        archived_twice: rows beyond the first of their offset.
        stored_twice: copies of a flight at another offset.
        invented: rows that are no flight.
        skipped: offsets between the first and the last that are not in the archive.
        altered: rows whose body is not what was sent.
        out_of_order: flights that stand before an earlier one of the same aircraft.
    """

    lost: int
    archived_twice: int
    stored_twice: int
    invented: int
    skipped: int
    altered: int
    out_of_order: int

    @property
    def is_good(self) -> bool:
        """Whether every flight is there exactly once, unaltered and in order, and nothing else."""
        return not any(astuple(self))


def compare(bodies: Sequence[bytes], keys: Sequence[str], found: Contents) -> Verdict:
    """Compare what was acknowledged with what was found.

    Args:
        bodies: by flight id.
        keys: by flight id.
    """
    count = len(bodies)
    is_known = (found.id >= 0) & (found.id < count)
    places = (found.partition << _OFFSET_BITS) | found.offset
    distinct_places, first_rows = np.unique(places, return_index=True)
    is_first = np.zeros(len(places), dtype=bool)
    is_first[first_rows] = True
    copies = np.bincount(found.id[is_known & is_first], minlength=count)
    crc32 = np.fromiter(map(zlib.crc32, bodies), dtype=np.int64, count=count)
    return Verdict(
        lost=int((copies == 0).sum()),
        archived_twice=len(places) - len(distinct_places),
        stored_twice=int(np.maximum(copies - 1, 0).sum()),
        invented=int((~is_known & is_first).sum()),
        skipped=_gaps(distinct_places),
        altered=int((found.body_crc32[is_known] != crc32[found.id[is_known]]).sum()),
        out_of_order=_out_of_order(keys, found, is_known),
    )


def _gaps(places: Numbers) -> int:
    """Count the offsets that are missing between the first and the last of each partition; ``places`` are sorted."""
    steps = np.diff(places)
    same_partition = np.diff(places >> _OFFSET_BITS) == 0
    return int((steps[same_partition] - 1).sum())


def _out_of_order(keys: Sequence[str], found: Contents, is_known: npt.NDArray[np.bool_]) -> int:
    """Count the flights that stand before an earlier one of their aircraft; of copies, the first counts.

    Keys mean order within a partition only, and a key's flights are all in one.
    """
    far = np.iinfo(np.int64).max
    first_offset = np.full(len(keys), far, dtype=np.int64)
    np.minimum.at(first_offset, found.id[is_known], found.offset[is_known])
    _, aircraft = np.unique(np.asarray(keys), return_inverse=True)
    order = np.argsort(aircraft, kind="stable")  # by aircraft, then by id
    order = order[first_offset[order] != far]
    same_aircraft = np.diff(aircraft[order]) == 0
    return int((same_aircraft & (np.diff(first_offset[order]) < 0)).sum())
