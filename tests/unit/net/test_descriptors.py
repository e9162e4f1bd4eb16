"""The descriptors that are left for topics."""

from __future__ import annotations

import os

import pytest

from flintmq.net import descriptors


def free_below(end: int) -> int:
    count = 0
    for number in range(end):
        try:
            os.fstat(number)
        except OSError:
            count += 1
    return count


def test_room_is_what_is_free_below_the_last_however_it_lies(monkeypatch: pytest.MonkeyPatch):
    opened = [os.open("/", os.O_RDONLY) for _ in range(80)]
    limit = max(opened) + 1
    monkeypatch.setattr(descriptors, "descriptor_limit", lambda: limit)
    end = limit - descriptors.kept_count(limit) * 2
    try:
        assert descriptors.room(10) == free_below(end) == 0
        for number in opened[5:15:2]:
            os.close(number)
            opened.remove(number)
        os.close(opened.pop())  # one of the last, which are kept
        before = free_below(limit)
        assert descriptors.room(100) == free_below(end) == 5
        assert descriptors.room(3) == 3
        assert free_below(limit) == before, "all that it opened are closed"
    finally:
        for number in opened:
            os.close(number)


def test_without_a_limit_there_is_room(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(descriptors, "descriptor_limit", lambda: -1)
    assert descriptors.room(1_000_000) == 1_000_000
