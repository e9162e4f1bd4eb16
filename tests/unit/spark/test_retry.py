"""Retries end, wait longer and longer, and begin anew after progress."""

from __future__ import annotations

import pytest

from flintmq.spark.retry import PAUSE_MAX_S, Retries


def test_pauses_grow_up_to_a_bound_and_then_the_error_comes_out():
    pauses: list[float] = []
    retries = Retries(8, pauses.append)
    error = OSError("away")
    for _ in range(8):
        retries.failed(error, "asking")
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, PAUSE_MAX_S, PAUSE_MAX_S]
    with pytest.raises(OSError, match="away"):
        retries.failed(error, "asking")


def test_progress_starts_a_new_series():
    pauses: list[float] = []
    retries = Retries(2, pauses.append)
    for _ in range(3):
        retries.failed(OSError(), "asking")
        retries.failed(OSError(), "asking")
        retries.succeeded()
    assert pauses == [0.1, 0.2] * 3


def test_none_allowed():
    with pytest.raises(OSError, match="away"):
        Retries(0, lambda _: None).failed(OSError("away"), "asking")
