"""Names by which operators call nodes."""

from __future__ import annotations

import pytest
from tests.unit.cluster.models import KEYS, World, node, state

from flintmq.cluster.controller import Refused
from flintmq.cluster.orders import node_named
from flintmq.cluster.state import DiskRecord, DrainRecord
from flintmq.cluster.store import Span
from flintmq.cluster.view import View


@pytest.fixture
def view() -> View:
    world, view = World(), View(KEYS)
    world.node(node("a", host="::1"))
    world.node(node("b"))
    view.feed(world.store.range(Span.of_prefix(KEYS.prefix)))
    return view


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", "a"),
        ("[::1]:4150", "a"),
        ("::1:4151", "a"),
        ("[::1]:4152", "a"),
        ("b.example:4151", "b"),
        ("b.example:4152:4150:0", "b"),
    ],
)
def test_a_node_is_called_by_its_id_or_any_of_its_addresses(view: View, text: str, expected: str) -> None:
    assert node_named(view, text) == expected


def test_who_there_is_is_said_where_a_name_is_nobodys(view: View) -> None:
    with pytest.raises(Refused, match=r"there is no node 'c'; there are a \(\[::1\]:4150\), b \(b.example:4150\)"):
        node_named(view, "c")


def view_with(*names: str, **fields: object) -> View:
    """A cluster in which c and d are away: one has a copy, the other is drained."""
    world, view = World(), View(KEYS)
    for name in names:
        world.node(node(name, **fields))
    for name in "cd":
        world.put(KEYS.disk(name), DiskRecord(1, f"{name}1", host=f"{name}.example", tcp_port=4150, http_port=4151))
    world.topic("t")
    world.partition("t", 0, state("", "c"))
    world.put(KEYS.drain("d"), DrainRecord("d"))
    view.feed(world.store.range(Span.of_prefix(KEYS.prefix)))
    return view


@pytest.mark.parametrize("text", ["x.example:4150", "x.example:4151", "x.example:4152"])
def test_an_address_of_several_nodes_is_refused_with_their_ids(text: str) -> None:
    with pytest.raises(Refused, match=f"2 nodes say that they are {text}: a, b; name the id"):
        node_named(view_with("a", "b", host="x.example"), text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("c", "c"), ("d", "d"), ("c.example:4150", "c"), ("d.example:4151", "d"), ("a.example:4150", "a")],
)
def test_a_node_that_is_away_is_called_by_the_address_that_it_had(text: str, expected: str) -> None:
    assert node_named(view_with("a"), text) == expected


def test_who_lives_at_the_address_of_one_that_is_away_is_meant() -> None:
    assert node_named(view_with("a", host="c.example"), "c.example:4150") == "a"


def test_who_is_away_is_said_too_where_a_name_is_nobodys() -> None:
    words = r"there are a \(a.example:4150\); away are c \(was c.example:4150\), d \(was d.example:4150, is drained\)$"
    with pytest.raises(Refused, match=words):
        node_named(view_with("a"), "e")
