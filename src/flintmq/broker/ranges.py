"""Ranges of consecutive numbers: what a run of FINs is for a channel, and what it leaves out.

Rules of this file: the usual case, one run in order, costs next to nothing; an end is exclusive.

Source: docs/decisions/0001.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any


def ranges_of(ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Split ids into ranges of consecutive ones; the usual case, one run in order, costs two comparisons."""
    count = len(ids)
    first = ids[0]
    if count == 1:
        yield first, first + 1
        return
    expected = tuple(range(first, first + count))
    if ids == expected:
        yield first, first + count
        return
    ordered = sorted(ids)
    first = ordered[0]
    if ordered[-1] - first == count - 1 and ordered == list(range(first, first + count)):
        yield first, first + count
        return
    end = first
    for internal in ordered:
        if internal != end:
            if end > first:
                yield first, end
            first = internal
        end = internal + 1
    yield first, end


def forget_range(mapping: dict[int, Any], first: int, end: int) -> None:
    """Remove the keys from ``first`` to ``end`` (exclusive), by whichever is less work."""
    if len(mapping) < end - first:
        for sequence in [s for s in mapping if first <= s < end]:
            del mapping[sequence]
    else:
        for sequence in range(first, end):
            mapping.pop(sequence, None)


def add_range(ranges: deque[tuple[int, int]], first: int, end: int) -> None:
    """Add a range to ascending ones that do not touch each other; behind the last it costs next to nothing."""
    behind = []
    while ranges and ranges[-1][1] >= first:
        start, stop = ranges.pop()
        if start > end:
            behind.append((start, stop))
        else:
            first, end = min(first, start), max(end, stop)
    ranges.append((first, end))
    ranges.extend(reversed(behind))
