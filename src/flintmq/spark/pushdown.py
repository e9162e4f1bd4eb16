"""Filters of a batch query, pushed down: fewer topics, partitions and messages to read.

The rules of this file: bounds only ever leave out rows that no filter lets through, and Spark applies every filter
again, so a filter not understood here costs speed and nothing else. An upper bound on ``timestamp`` is not used: when a
clock was set back, later messages may be older.

Source: docs/decisions/0006 (pushFilters).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from flintmq.limits import SEQUENCE_MAX
from flintmq.spark.plan import FetchRange

_OF_A_LOG = ("topic", "nsqd", "partition", "log_id")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class Bounds:
    """Bounds outside of which no row passes the filters; ``None`` for no bound."""

    among: dict[str, frozenset[Any]] = field(default_factory=dict)
    offset_min: int = 0
    offset_end: int = SEQUENCE_MAX
    timestamp_min_ns: int | None = None

    def admits(self, wanted: FetchRange) -> bool:
        """Whether a range can hold such rows."""
        return all(getattr(wanted, column) in values for column, values in self.among.items())

    def clip(self, wanted: FetchRange) -> tuple[int, int]:
        """Start and end (exclusive) of the part of a range that can hold such rows."""
        start = max(wanted.start, self.offset_min)
        return start, max(start, min(wanted.end, self.offset_end))


def bounds_of(filters: Iterable[Filter]) -> Bounds:
    """Return the bounds that a conjunction of filters implies."""
    bounds = Bounds()
    for one in filters:
        column: tuple[str, ...] = getattr(one, "attribute", ())
        if len(column) != 1:
            continue
        if column[0] in _OF_A_LOG:
            _narrow_partitions(bounds, column[0], one)
        elif column[0] == "offset":
            _narrow_offsets(bounds, one)
        elif column[0] == "timestamp":
            _narrow_timestamp(bounds, one)
    return bounds


def _narrow_partitions(bounds: Bounds, column: str, one: Filter) -> None:
    if isinstance(one, EqualTo | EqualNullSafe):
        values = frozenset((one.value,))
    elif isinstance(one, In):
        values = frozenset(one.value)
    else:
        return
    bounds.among[column] = bounds.among.get(column, values) & values


def _narrow_offsets(bounds: Bounds, one: Filter) -> None:
    lowest: dict[type, Callable[[int], int]] = {
        EqualTo: lambda n: n,
        EqualNullSafe: lambda n: n,
        GreaterThanOrEqual: lambda n: n,
        GreaterThan: lambda n: n + 1,
    }
    ends: dict[type, Callable[[int], int]] = {
        EqualTo: lambda n: n + 1,
        EqualNullSafe: lambda n: n + 1,
        LessThanOrEqual: lambda n: n + 1,
        LessThan: lambda n: n,
    }
    value = getattr(one, "value", None)
    if not isinstance(value, int):
        return
    if type(one) in lowest:
        bounds.offset_min = max(bounds.offset_min, lowest[type(one)](value))
    if type(one) in ends:
        bounds.offset_end = min(bounds.offset_end, ends[type(one)](value))


def _narrow_timestamp(bounds: Bounds, one: Filter) -> None:
    if not isinstance(one, EqualTo | EqualNullSafe | GreaterThan | GreaterThanOrEqual):
        return
    if not isinstance(one.value, datetime) or one.value.tzinfo is None:
        return
    at_ns = (one.value - _EPOCH) // timedelta(microseconds=1) * 1000
    bounds.timestamp_min_ns = max(bounds.timestamp_min_ns or 0, at_ns)
