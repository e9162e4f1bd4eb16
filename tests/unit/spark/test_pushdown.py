"""Filters as bounds: never tighter than the filter says."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from pyspark.sql.datasource import (
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from flintmq.spark.plan import FetchRange
from flintmq.spark.pushdown import bounds_of

WHOLE = FetchRange("t", "a:1", 0, 1, 1001, "00000000000000a1")


def one(topic: str, partition: int) -> FetchRange:
    return FetchRange(topic, "a:1", partition, 1, 1001, "00000000000000a1")


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([], (1, 1001)),
        ([EqualTo(("offset",), 5)], (5, 6)),
        ([GreaterThan(("offset",), 5), LessThan(("offset",), 9)], (6, 9)),
        ([GreaterThanOrEqual(("offset",), 5), LessThanOrEqual(("offset",), 9)], (5, 10)),
        ([GreaterThan(("offset",), 2000)], (2001, 2001)),
        ([Not(EqualTo(("offset",), 5))], (1, 1001)),
        ([IsNotNull(("offset",))], (1, 1001)),
        ([EqualTo(("attempts",), 5)], (1, 1001)),
        ([EqualTo(("offset", "inner"), 5)], (1, 1001)),
    ],
)
def test_offsets(filters, expected):
    assert bounds_of(filters).clip(WHOLE) == expected


def test_partitions():
    bounds = bounds_of([In(("topic",), ("t", "u")), EqualTo(("partition",), 1), StringStartsWith(("nsqd",), "a")])
    assert bounds.admits(one("t", 1))
    assert not bounds.admits(one("t", 0))
    assert not bounds.admits(one("v", 1))
    assert not bounds_of([EqualTo(("log_id",), "00000000000000b2")]).admits(WHOLE)
    assert not bounds_of([EqualTo(("nsqd",), "b:1")]).admits(WHOLE)
    both = bounds_of([EqualTo(("topic",), "t"), EqualTo(("topic",), "u")])
    assert not both.admits(one("t", 0))


def test_timestamps_bound_the_start_only():
    moment = datetime(2026, 1, 1, 0, 0, 0, 5, UTC)
    expected = 1_767_225_600_000_005_000
    assert bounds_of([GreaterThanOrEqual(("timestamp",), moment)]).timestamp_min_ns == expected
    assert bounds_of([EqualTo(("timestamp",), moment)]).timestamp_min_ns == expected
    assert bounds_of([LessThan(("timestamp",), moment)]).timestamp_min_ns is None
    assert bounds_of([GreaterThan(("timestamp",), moment.replace(tzinfo=None))]).timestamp_min_ns is None
