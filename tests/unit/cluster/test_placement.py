"""Placing partitions: every one once, spread as far as there are nodes, the least loaded first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.cluster.placement import NoNodes, place


def test_several_on_one_node_when_there_is_one():
    assert place(3, {"a": 0}, {}) == {0: "a", 1: "a", 2: "a"}


def test_the_least_loaded_first():
    assert place(2, {"a": 5, "b": 1, "c": 3}, {}) == {0: "b", 1: "c"}


def test_spread_comes_before_load():
    assert sorted(place(3, {"a": 100, "b": 0, "c": 0}, {}).values()) == ["a", "b", "c"]


def test_what_is_placed_stays_and_counts():
    assert place(4, {"a": 0, "b": 0}, {0: "a", 1: "a"}) == {2: "b", 3: "b"}


def test_what_is_placed_on_a_node_that_is_away_stays():
    assert place(2, {"a": 0}, {0: "gone"}) == {1: "a"}


def test_nothing_to_place_needs_no_node():
    assert place(1, {}, {0: "a"}) == {}


def test_no_node():
    with pytest.raises(NoNodes, match="--lookupd-tcp-address"):
        place(1, {}, {})


@given(
    st.integers(1, 255),
    st.dictionaries(st.text(max_size=3), st.integers(0, 50), min_size=1, max_size=12),
    st.data(),
)
def test_every_partition_once_and_even(partition_num, loads, data):
    placed = data.draw(st.dictionaries(st.integers(0, partition_num - 1), st.sampled_from(sorted(loads)), max_size=9))
    found = place(partition_num, loads, placed)
    assert sorted([*found, *placed]) == list(range(partition_num))
    assert set(found.values()) <= set(loads)
    assert place(partition_num, dict(reversed(loads.items())), placed) == found, "whatever the order of the nodes"
    if not placed:
        counts = [list(found.values()).count(node) for node in loads]
        assert max(counts) - min(counts) <= 1
