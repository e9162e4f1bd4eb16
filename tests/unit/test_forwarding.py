"""Parts of nsq_to_nsq and nsq_to_http that need no process: the pool of hosts, filters of JSON, the log of times.

Source: NSQ 1.3, apps/nsq_to_http, apps/nsq_to_nsq.
"""

from __future__ import annotations

import logging
import random
from collections import Counter

import pytest

from flintmq.tools.host_pool import EPSILON_GREEDY, HOSTPOOL, ROUND_ROBIN, HostPool
from flintmq.tools.json_filter import JsonFilter
from flintmq.tools.status_log import StatusLog


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def _pool(mode: str, *names: str) -> tuple[HostPool, Clock]:
    clock = Clock()
    return HostPool(names or ("a", "b", "c"), mode, clock, random.Random(1)), clock


# --- hosts


def test_one_after_the_other_whatever_becomes_of_it() -> None:
    pool, _ = _pool(ROUND_ROBIN)
    pool.mark("b", False, 1.0)
    assert [pool.get() for _ in range(6)] == [*"abcabc"]


def test_a_batch_is_dealt_and_the_next_one_begins_where_it_ended() -> None:
    pool, _ = _pool(ROUND_ROBIN)
    assert [pool.deal(1), pool.deal(2), pool.deal(100)] == [["a"], ["b", "c"], ["a", "b", "c"]]


def test_who_fails_is_left_out_for_longer_and_longer() -> None:
    pool, clock = _pool(HOSTPOOL, "a", "b")
    pool.mark("a", False, 1.0)
    assert {pool.get() for _ in range(4)} == {"b"}
    waits = []
    for _ in range(7):
        began = clock.now
        while pool.get() != "a":
            clock.now += 1
        pool.mark("a", False, 1.0)
        waits.append(clock.now - began)
    assert waits == [30, 60, 120, 240, 480, 900, 900]
    clock.now += 900
    while pool.get() != "a":
        pass
    pool.mark("a", True, 1.0)
    assert Counter(pool.get() for _ in range(10)) == {"a": 5, "b": 5}


def test_when_all_fail_all_are_tried() -> None:
    pool, _ = _pool(HOSTPOOL)
    for name in "abc":
        pool.mark(name, False, 1.0)
    assert {pool.get() for _ in range(3)} == {*"abc"}
    assert HostPool(["a"], HOSTPOOL, Clock(), random.Random(1)).get() == "a"


def test_the_quicker_one_is_used_more_and_the_others_still_sometimes() -> None:
    pool, clock = _pool(EPSILON_GREEDY, "quick", "slow")
    seen: Counter[str] = Counter()
    for _ in range(2000):
        clock.now += 0.1
        name = pool.get()
        seen[name] += 1
        pool.mark(name, True, 0.001 if name == "quick" else 0.009)
    assert 0.8 < seen["quick"] / 2000 < 0.98
    pool.mark("quick", False, 0.001)
    assert {pool.get() for _ in range(50)} == {"slow"}


# --- filters


@pytest.mark.parametrize(
    ("body", "value", "passes"),
    [
        (b'{"f": "5"}', "5", True),
        (b'{"f": 5}', "5", True),
        (b'{"f": 5.0}', "5", True),
        (b'{"f": 5}', "5e0", True),
        (b'{"f": "5.0"}', "5", False),
        (b'{"f": true}', "true", False),
        (b'{"f": null}', "null", False),
        (b'{"f": [5]}', "5", False),
        (b'{"f": null}', "", True),
        (b'{"g": 5}', "", False),
        (b'{"g": 5}', "5", False),
        (b'{"f": "a", "f": "b"}', "b", True),
        (b"null", "", False),
    ],
)
def test_values_are_compared_as_text_or_as_numbers(body: bytes, value: str, passes: bool) -> None:
    assert JsonFilter("f", value, ()).apply(body) == (body if passes else None)


@pytest.mark.parametrize("body", [b"[1]", b"1", b'"a"', b"{", b'{"a": 1} x', b"\xff", b"[" * 100_000])
def test_what_is_no_object_is_told(body: bytes) -> None:
    with pytest.raises(ValueError):
        JsonFilter("f", "", ()).apply(body)


def test_what_is_kept_stays_as_it_is() -> None:
    keep = JsonFilter("", "", ("z", "a", "a", "é"))
    assert keep.apply(b'{"b": 1, "z": 12345678901234567890123, "a": {"x": 1.50}, "\\u00e9": "<"}') == (
        '{"a":{"x": 1.50},"z":12345678901234567890123,"é":"<"}'.encode()
    )
    assert keep.apply(b"{}") == keep.apply(b"null") == b"{}"
    assert not JsonFilter("", "", ()).is_needed


# --- times


def test_a_line_every_so_many_but_not_more_than_one_a_second(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    status = StatusLog(100, "[aggregate]:", clock)
    for number in range(100):
        status.note(number / 1000)
    assert caplog.messages == ["[aggregate]: finished 100 - 99th: 99.00ms - 95th: 96.00ms - avg: 49.50ms"]
    status.note(0.002, 1000)
    assert len(caplog.messages) == 1
    clock.now += 1
    status.note(0.002)
    assert caplog.messages[1:] == ["[aggregate]: finished 1001 - 99th: 2.00ms - 95th: 2.00ms - avg: 2.00ms"]
    StatusLog(0, "", clock).note(1.0, 1000)
    assert len(caplog.messages) == 2
