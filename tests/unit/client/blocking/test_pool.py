"""The connections to one nsqd: which is taken, how many may be opened, how often."""

from __future__ import annotations

from typing import Any

import pytest

from flintmq.client.blocking.pool import Pool


class FakeConnection:
    def __init__(self, opened_at: float = 0.0) -> None:
        self.opened_at = opened_at
        self.was_refused = False
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def pool():
    return Pool("n:4150")


def connections_of(pool: Pool, count: int) -> list[Any]:
    connections: list[Any] = [FakeConnection() for _ in range(count)]
    for connection in connections:
        pool.add(connection)
    return connections


def test_the_line_used_last_is_taken_first(pool):
    first, second = connections_of(pool, 2)
    assert pool.take() is second
    assert pool.take() is first
    assert pool.take() is None
    assert pool.is_up


def test_no_more_lines_than_allowed(pool):
    connections = connections_of(pool, 2)
    assert pool.may_open(4, now=0.0)
    pool.openings = dict.fromkeys([1, 2])
    assert not pool.may_open(4, now=0.0)
    del pool.openings[2]
    pool.lose(connections[0], now=5.0, chance=1.0)
    assert not pool.may_open(4, now=5.0), "not at once"
    assert pool.may_open(4, now=5.26)


def test_lines_lost_together_count_once(pool):
    connections = connections_of(pool, 4)
    for connection in connections:
        pool.lose(connection, now=10.0, chance=1.0)
    assert not pool.is_up
    assert pool.retry_at <= 10.25


def test_failures_are_tried_less_and_less_often(pool):
    now = 0.0
    waits = []
    for _ in range(10):
        pool.wait(now, chance=1.0)
        waits.append(pool.retry_at - now)
        now = pool.retry_at
    assert waits == sorted(waits)
    assert waits[0] <= 0.25
    assert waits[-1] == 15


def test_while_a_call_waits_it_is_tried_every_second_and_no_more_often(pool):
    now = 0.0
    for _ in range(10):
        pool.wait(now, chance=1.0)
        now = pool.retry_at
    pool.wait(now, chance=1.0)
    assert pool.retry_at == now + 15
    for _ in range(10):
        assert not pool.may_open(1, now + 0.99, is_wanted=True)
        assert not pool.may_open(1, now + 1.01)
        now += 1.01
        assert pool.may_open(1, now, is_wanted=True)
        pool.wait(now, chance=1.0)
    assert pool.retry_at == now + 15


def test_a_line_closed_because_of_what_was_asked_is_replaced_at_once(pool):
    (connection,) = connections_of(pool, 1)
    connection.was_refused = True
    pool.lose(connection, now=1.0, chance=1.0)
    assert pool.may_open(1, now=1.0)


def test_a_line_that_a_call_forgot_gives_its_place_back(pool):
    connections = connections_of(pool, 1)
    assert pool.take() is connections[0]
    assert not pool.may_open(1, now=0.0)
    connections.clear()
    assert pool.may_open(1, now=0.0)


def test_closing_closes_what_is_free(pool):
    connections = connections_of(pool, 2)
    busy = pool.take()
    pool.close()
    assert [connection.is_closed for connection in connections] == [True, False]
    assert busy is connections[1]
