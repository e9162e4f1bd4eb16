"""What is known of a cluster follows the store, whatever it tells and however it is told."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.cluster.models import KEYS, World, node, state

from flintmq.cluster import view as view_module
from flintmq.cluster.state import ClusterRecord, DiskRecord, LookupdRecord, PartitionState, TopicRecord
from flintmq.cluster.store import Span
from flintmq.cluster.view import NodeChange, PartitionChange, TopicChange, Unreadable, View
from flintmq.topic_meta import PLAIN

ALL = Span.of_prefix(KEYS.prefix)


def test_everything_has_its_place():
    world, view = World(), View(KEYS)
    assert not view.is_fed
    lookupd = LookupdRecord("l", "l1", "host", 4160, 4161)
    world.put(KEYS.record, ClusterRecord("c"))
    world.put(KEYS.master, lookupd)
    world.put(KEYS.lookupd("l"), lookupd)
    world.put(KEYS.prefix + "of a newer release", b"?")
    world.put("/elsewhere", b"?")
    world.nodes("ab")
    world.topic("t")
    world.partition("t", 0, state("a", "ab"))
    changes = view.feed(world.store.range(ALL))
    assert len(changes) == 8
    assert (view.cluster, view.master, view.lookupds) == (ClusterRecord("c"), lookupd, {"l": lookupd})
    assert view.nodes == {"a": node("a"), "b": node("b")}
    assert view.leader(("t", 0)) == node("a")
    assert view.nodes_at("b.example", 4150) == [node("b")]
    assert not view.nodes_at("b.example", 1)
    assert view.led == {"a": {("t", 0): None}}
    assert view.held == {"a": {("t", 0): None}, "b": {("t", 0): None}}
    assert not view.unreadable
    for key in (KEYS.master, KEYS.record, KEYS.lookupd("l")):
        world.delete(key)
    world.node(node("a", incarnation="a2"))
    view.feed(world.store.events(ALL, view.revision, world.store.revision))
    assert (view.cluster, view.master, view.lookupds) == (None, None, {})
    assert view.leader(("t", 0)) is None, "another process"


def test_the_place_of_a_node_outlives_its_lease(monkeypatch: pytest.MonkeyPatch):
    """By its last record, where that was seen, else as its data directory told the store."""
    monkeypatch.setattr(view_module, "PLACE_COUNT_MAX", 2)
    world, view = World(), View(KEYS)
    world.put(KEYS.disk("a"), DiskRecord(1, "a0", "old.example", 1, 2))
    world.put(KEYS.disk("b"), DiskRecord(1, "b0", "b.example", 3, 4))
    world.put(KEYS.disk("c"), b'{"count":1,"incarnation":"c0"}')  # of an older release
    world.nodes("a")
    view.feed(world.store.range(ALL))
    assert view.place("a") == ("a.example", 4150, 4151), "where it lives"
    world.delete(KEYS.node("a"))
    view.feed(world.store.range(ALL))
    assert view.place("a") == ("a.example", 4150, 4151), "where it was seen last"
    assert [view.place(name) for name in "bcx"] == [("b.example", 3, 4), ("", 0, 0), ("", 0, 0)]
    world.node(node("a", host="new.example"))
    world.nodes("xy")
    for name in "axy":
        world.delete(KEYS.node(name))
    view.feed(world.store.events(ALL, view.revision, world.store.revision))
    assert [view.place(name)[0] for name in "axy"] == ["old.example", "x.example", "y.example"], "two are remembered"


def test_every_step_is_told_in_order_with_what_was_before():
    world, view = World(), View(KEYS)
    view.feed(world.store.range(ALL))
    world.node(node("a"))
    world.node(node("a", is_draining=True))
    world.delete(KEYS.node("a"))
    world.topic("t")
    world.partition("t", 0, state("a", "a"))
    world.put(KEYS.partition("t", 0), b"?")
    key = KEYS.partition("t", 0)
    told = world.store.events(ALL, view.revision, world.store.revision)
    stored = next(event.now for event in told.events if event.key == key)
    changes = view.feed(told)
    one, two = node("a"), node("a", is_draining=True)
    assert changes[:3] == [
        NodeChange(KEYS.node("a"), "a", None, one),
        NodeChange(KEYS.node("a"), "a", one, two),
        NodeChange(KEYS.node("a"), "a", two, None),
    ]
    assert isinstance(changes[3], TopicChange)
    assert changes[4] == PartitionChange(key, ("t", 0), None, state("a", "a"), stored), "not the pair behind it"
    assert isinstance(changes[5], Unreadable) and "not a PartitionState" in str(changes[5].error)
    assert not view.partitions and key in view.pairs, "not taken for one that is gone"


_VALUES: dict[str, list[msgspec.Struct | bytes]] = {
    KEYS.node("a"): [node("a"), node("a", incarnation="a2"), b"?"],
    KEYS.node("b"): [node("b"), node("c")],
    KEYS.topic("t"): [
        TopicRecord(1, PLAIN, 1),
        TopicRecord(1, PLAIN, 1, is_deleting=True),
        TopicRecord(1, PLAIN, 10**9),
    ],
    KEYS.partition("t", 0): [state("a", "ab"), state("b", "ab"), state("b", "a"), PartitionState(1, 2)],
    KEYS.partition("t", 1): [state("a", "a", "ac", leaving=("d",)), b"null"],
    KEYS.partition("u/v", 1): [state("a", "a")],
    KEYS.master: [LookupdRecord("l", "l1", "h", 1, 2), b"{}"],
    KEYS.record: [ClusterRecord("c"), b"[]"],
}


@pytest.mark.slow
@given(
    st.lists(
        st.sampled_from(sorted(_VALUES)).flatmap(
            lambda key: st.tuples(st.just(key), st.sampled_from([None, *range(len(_VALUES[key]))]))
        ),
        max_size=40,
    ),
    st.data(),
)
def test_however_it_is_told_it_is_the_same(writes, data):
    world, view = World(), View(KEYS)
    for key, choice in writes:
        if choice is None:
            world.delete(key)
        else:
            world.put(key, _VALUES[key][choice])
        how = data.draw(st.sampled_from(["later", "events", "all"]))
        if how == "events":
            view.feed(world.store.events(ALL, max(view.revision, 1), world.store.revision))
        elif how == "all":
            view.feed(world.store.range(ALL))
            assert not view.feed(world.store.range(ALL)), "told twice, nothing has changed"
        view.check()
    view.feed(world.store.range(ALL))
    new = View(KEYS)
    new.feed(world.store.range(ALL))
    for name in ("pairs", "cluster", "master", "lookupds", "nodes", "topics", "partitions", "of_topic"):
        assert getattr(view, name) == getattr(new, name), name
    assert set(view.unreadable) == set(new.unreadable)
