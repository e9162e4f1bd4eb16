"""Placing partitions: every one once, spread as far as there are nodes, the least loaded first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.cluster.placement import NoNodes, Site, TooFewFiles, TooFewNodes, place, place_copies


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


@pytest.mark.slow
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


# -- several copies ----------------------------------------------------------------------------------------------------


def sites(text: str) -> list[Site]:
    """Nodes such as ``a@host/zone``, with spaces between."""
    found = []
    for word in text.split():
        node, _, rest = word.partition("@")
        host, _, zone = rest.partition("/")
        found.append(Site(node, host, zone))
    return found


def test_copies_are_on_different_machines_and_zones():
    nodes = sites("a@1/x b@2/x c@3/y d@4/y e@5/z")
    zones = {site.node: site.zone for site in nodes}
    for chosen in place_copies(range(10), 3, nodes, {}).values():
        assert {zones[node] for node in chosen} == {"x", "y", "z"}
    for chosen in place_copies(range(10), 4, nodes, {}).values():
        assert {zones[node] for node in chosen} == {"x", "y", "z"} and len(set(chosen)) == 4


def test_two_nodes_of_one_machine_never_have_the_same_partition():
    nodes = sites("a@1 b@1 c@2 d@2")
    for chosen in place_copies(range(8), 2, nodes, {}).values():
        assert {"a", "b"} & set(chosen) and {"c", "d"} & set(chosen)
    with pytest.raises(TooFewNodes, match="replicator=3, and there are 4 nsqds on 2 machines, which have one copy"):
        place_copies([0], 3, nodes, {})
    assert len(place_copies([0], 3, nodes, {}, allow_same_host=True)[0]) == 3


def test_a_machine_that_is_not_known_is_one_of_its_own():
    assert len(place_copies([0], 2, sites("a b"), {})[0]) == 2


def test_leaders_go_where_fewest_are():
    nodes = [Site("a", led_count=9, held_count=9), Site("b", led_count=0, held_count=9), Site("c", held_count=0)]
    placed = place_copies(range(3), 2, nodes, {})
    assert [placed[number][0] for number in range(3)] == ["c", "b", "a"]


def test_who_has_no_files_for_more_gets_nothing():
    nodes = [Site("a", "a", held_count=3, copies_max=3), Site("b", "b", copies_max=1), Site("c", "c")]
    assert place_copies([0], 2, nodes, {}) == {0: ("b", "c")}
    with pytest.raises(TooFewFiles, match="each takes one: node a at most 3, node b at most 1; delete topics"):
        place_copies([0, 1], 2, nodes, {})


def test_what_is_placed_counts_for_copies_too():
    found = place_copies([1, 2], 2, sites("a b c"), {0: ("a", "b")})
    assert sorted(chosen[0] for chosen in found.values()) == ["b", "c"]


@pytest.mark.slow
@given(
    st.integers(0, 40),
    st.integers(1, 5),
    st.dictionaries(
        st.text(min_size=1, max_size=2),
        st.tuples(st.sampled_from(["", "1", "2", "3", "4", "5", "6"]), st.sampled_from(["", "x", "y"])),
        max_size=9,
    ),
    st.booleans(),
)
def test_copies_are_never_together_and_even(count, copies, nodes, allow_same_host):
    known = [Site(node, host, zone) for node, (host, zone) in nodes.items()]
    hosts = {site.node: site.host or f"of {site.node}" for site in known}
    room = len(nodes) if allow_same_host else len(set(hosts.values()))
    if count and copies > room:
        with pytest.raises(TooFewNodes) as refused:
            place_copies(range(count), copies, known, {}, allow_same_host)
        assert "start" in str(refused.value)
        return
    found = place_copies(range(count), copies, known, {}, allow_same_host)
    assert list(found) == list(range(count))
    for chosen in found.values():
        places = chosen if allow_same_host else [hosts[node] for node in chosen]
        assert len(set(places)) == copies
    assert place_copies(range(count), copies, list(reversed(known)), {}, allow_same_host) == found
    leaders = [chosen[0] for chosen in found.values()]
    if count:
        counts = [leaders.count(node) for node in nodes]
        assert max(counts) - min(counts) <= 1, "whoever follows, leaders are even"
