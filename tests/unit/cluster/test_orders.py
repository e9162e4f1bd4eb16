"""Names by which operators call nodes."""

from __future__ import annotations

import pytest
from tests.unit.cluster.models import KEYS, World, node

from flintmq.cluster.controller import Refused
from flintmq.cluster.orders import node_named
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
