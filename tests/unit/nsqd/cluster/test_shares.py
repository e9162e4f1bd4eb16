"""What leaders may send to one consumer together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flintmq.nsqd.cluster.shares import shares

_flights = st.lists(st.integers(0, 3), max_size=6)


@given(st.integers(-1, 20), _flights, st.integers(0, 100))
def test_all_together_are_granted_what_the_consumer_asked_for(rdy_count: int, in_flight: list[int], turn: int):
    granted = shares(rdy_count, in_flight, turn)
    assert len(granted) == len(in_flight)
    assert all(count >= 0 for count in granted)
    assert sum(granted) == (max(0, rdy_count) if in_flight else 0)
    if rdy_count >= len(in_flight) > 0:
        assert max(granted) - min(granted) <= 1, "all of them alike"


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 100))
def test_with_fewer_than_there_are_leaders_each_has_its_turn(rdy_count: int, count: int, turn: int):
    idle = [0] * count
    seen = {index for each in range(count) for index, n in enumerate(shares(rdy_count, idle, turn + each)) if n}
    assert seen == set(range(count))


def test_what_is_in_flight_counts_before_others_are_asked():
    assert shares(1, [0, 1, 0], 0) == [0, 1, 0]
    assert shares(2, [0, 1, 0], 2) == [0, 1, 1]
    assert shares(1, [1, 1], 1) == [0, 1], "one too many is on its way: no more than the consumer said"
    assert shares(0, [1, 1], 0) == [0, 0]
