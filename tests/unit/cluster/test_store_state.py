"""The embedded store as a state machine: against a dictionary at random, and its bounds and edges by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flintmq.cluster import store_state
from flintmq.cluster.store import (
    KEY_BYTES_MAX,
    LEASE_TTL_S_MAX,
    OPERATIONS_MAX,
    VALUE_BYTES_MAX,
    Compacted,
    Compare,
    CompareValue,
    Delete,
    Event,
    Get,
    KeyValue,
    LeaseExists,
    LeaseNotFound,
    Put,
    Span,
    StoreRefused,
    Txn,
)
from flintmq.cluster.store_state import StoreLimits, StoreState

ALL = Span.of_prefix("")
SECOND_NS = 1_000_000_000
KEYS = st.sampled_from(["a", "a/", "a/1", "a/2", "b", "\U0001f600"])
VALUES = st.sampled_from([b"", b"1", b"2"])


def put(state: StoreState, key: str, value: bytes = b"x", lease_id: int = 0) -> int:
    return state.apply(Txn((), (Put(key, value, lease_id),))).revision


class Model(RuleBasedStateMachine):
    """A dictionary of every revision says what is there, and what has happened."""

    def __init__(self) -> None:
        super().__init__()
        self.state = StoreState(StoreLimits(history_count_max=12))
        self.worlds: dict[int, dict[str, tuple[bytes, int]]] = {1: {}}  # by revision: key to value and lease
        self.leases: dict[int, tuple[int, int]] = {}  # lifetime in seconds, and until when
        self.now_ns = 0
        self.disk: dict[str, KeyValue] = {}
        self.disk_leases: dict[int, int] = {}

    @property
    def world(self) -> dict[str, tuple[bytes, int]]:
        return self.worlds[self.state.revision]

    def moved(self, before: int, world: dict[str, tuple[bytes, int]], has_changed: bool) -> None:
        assert self.state.revision == before + has_changed, "I1"
        self.worlds[self.state.revision] = world

    @rule(
        changes=st.lists(st.tuples(KEYS, st.none() | VALUES), max_size=3, unique_by=lambda change: change[0]),
        guard=st.none() | st.tuples(KEYS, st.none() | VALUES),
        data=st.data(),
    )
    def transaction(self, changes: list[Any], guard: Any, data: st.DataObject) -> None:
        before, world = self.state.revision, dict(self.world)
        conditions: tuple[Any, ...] = ()
        holds = True
        if guard is not None:
            key, value = guard
            conditions = (CompareValue(key, value) if value is not None else Compare(key, 0),)
            holds = (world.get(key, (None, 0))[0] == value) if value is not None else key not in world
        operations: list[Any] = []
        has_changed = False
        for key, value in changes if holds else ():
            if value is None:
                has_changed |= world.pop(key, None) is not None
            else:
                lease_id = data.draw(st.sampled_from([0, *self.leases]))
                world[key] = (value, lease_id)
                has_changed = True
                operations.append(Put(key, value, lease_id))
        deletes = [Delete(key) for key, value in changes if value is None]
        result = self.state.apply(Txn(conditions, (*operations, *deletes, Get("a/1"))))
        assert result.succeeded == holds
        self.moved(before, world, has_changed)
        if holds:
            (found,) = result.found
            assert (None if found is None else (found.value, found.lease_id)) == world.get("a/1")

    @rule(ttl_s=st.integers(1, 5))
    def grant(self, ttl_s: int) -> None:
        lease_id = len(self.leases) + 1 + self.state.revision * 100
        if lease_id not in self.leases:
            self.state.grant(lease_id, ttl_s, self.now_ns)
            self.leases[lease_id] = (ttl_s, self.now_ns + ttl_s * SECOND_NS)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def keepalive(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        ttl_s, _ = self.leases[lease_id]
        assert self.state.keepalive(lease_id, self.now_ns) == ttl_s
        self.leases[lease_id] = (ttl_s, self.now_ns + ttl_s * SECOND_NS)

    def end(self, lease_id: int) -> None:
        del self.leases[lease_id]

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        before, world = self.state.revision, dict(self.world)
        kept = {key: row for key, row in world.items() if row[1] != lease_id}
        self.state.revoke(lease_id)
        del self.leases[lease_id]
        self.moved(before, kept, kept != world)

    @rule(seconds=st.integers(0, 3))
    def time_passes(self, seconds: int) -> None:
        self.now_ns += seconds * SECOND_NS
        due = {lease_id for lease_id, (_, until_ns) in self.leases.items() if until_ns <= self.now_ns}
        before, world = self.state.revision, self.world
        assert set(self.state.expire(self.now_ns)) == due
        for lease_id in due:
            del self.leases[lease_id]
        # each lease with keys is a revision of its own; between them nobody looks
        with_keys = len({row[1] for row in world.values() if row[1] in due})
        assert self.state.revision == before + with_keys
        kept = {key: row for key, row in world.items() if row[1] not in due}
        self.worlds[self.state.revision] = kept

    @rule()
    def written_and_read_again(self) -> None:
        """What is taken is all that a restart needs."""
        changes = self.state.take_changes()
        if changes is not None:
            assert changes.revision == self.state.revision
            for key, pair in changes.keys.items():
                self.disk.pop(key, None)
                if pair is not None:
                    self.disk[key] = pair
            for lease_id, ttl_s in changes.leases.items():
                self.disk_leases.pop(lease_id, None)
                if ttl_s is not None:
                    self.disk_leases[lease_id] = ttl_s
        assert self.state.take_changes() is None
        again = StoreState(None, self.state.revision, self.disk.values(), self.disk_leases.items(), self.now_ns)
        again.check()
        assert again.range(ALL) == self.state.range(ALL)
        assert again.lease_count == len(self.leases)

    @invariant()
    def is_sound(self) -> None:
        self.state.check()
        found = self.state.range(ALL).found
        assert {pair.key: (pair.value, pair.lease_id) for pair in found} == self.world
        assert [pair.key for pair in found] == sorted(self.world)

    @invariant()
    def remembers_what_it_says(self) -> None:
        for revision, world in self.worlds.items():
            if revision < self.state.compacted:
                if revision < self.state.revision:
                    with pytest.raises(Compacted):
                        self.state.events(ALL, revision, self.state.revision)
                continue
            past = self.state.range(ALL, revision=revision)
            assert {pair.key: (pair.value, pair.lease_id) for pair in past.found} == world, revision
            replayed = {pair.key: pair for pair in past.found}
            after = revision
            while after < self.state.revision:
                events = self.state.events(ALL, after, self.state.revision, count_max=2)
                assert events.revision > after
                for event in events.events:
                    assert after < event.revision <= events.revision
                    replayed.pop(event.key, None)
                    if event.now is not None:
                        replayed[event.key] = event.now
                after = events.revision
            assert sorted(replayed.values(), key=lambda pair: pair.key) == list(self.state.range(ALL).found)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_bounds_of_a_request():
    state = StoreState()
    put(state, "é" * (KEY_BYTES_MAX // 2), b"x" * VALUE_BYTES_MAX)
    before = state.range(ALL)
    for txn, text in (
        (Txn((), (Put("", b""),)), "0 bytes, it must be 1 to 1024"),
        (Txn((), (Put("k" * (KEY_BYTES_MAX + 1), b""),)), "1025 bytes"),
        (Txn((), (Get("\ud800"),)), "no text that can be written as UTF-8"),
        (Txn((Compare("", 0),)), "0 bytes"),
        (Txn((), (Put("k", b"x" * (VALUE_BYTES_MAX + 1)),)), "at most 262144"),
        (Txn((), (Get("k"),) * (OPERATIONS_MAX + 1)), "129 operations, at most 128; divide it"),
        (Txn((Compare("k", 0),) * (OPERATIONS_MAX + 1)), "129 conditions"),
        (Txn((), (Put("k", b""), Put("k", b""))), "changes 'k' twice"),
        (Txn((), (), (Delete("k"), Put("k", b""))), "changes 'k' twice"),
    ):
        with pytest.raises(StoreRefused, match=text):
            state.apply(txn)
    assert state.range(ALL) == before


def test_bounds_of_the_store():
    state = StoreState(StoreLimits(key_count_max=2, lease_count_max=1, bytes_max=1500))
    put(state, "a", b"x" * 500)
    put(state, "b")
    with pytest.raises(StoreRefused, match="has 2 keys, at most 2; delete some"):
        put(state, "c")
    with pytest.raises(StoreRefused, match="at most 1500; delete some keys"):
        put(state, "b", b"x" * 700)
    assert state.apply(Txn((), (Delete("a"), Put("c", b"x" * 500)))).succeeded
    state.grant(1, 10, 0)
    with pytest.raises(StoreRefused, match="all there may be; revoke some"):
        state.grant(2, 10, 0)
    state.check()


def test_a_full_store_still_lets_what_is_there_change():
    full = [KeyValue(name, b"x" * 500, 2, 2, 1) for name in "abcd"]
    state = StoreState(StoreLimits(key_count_max=2, bytes_max=100), 9, full)
    put(state, "a", b"y" * 500)
    state.apply(Txn((), (Delete("b"),)))
    with pytest.raises(StoreRefused):
        put(state, "e")


def test_leases():
    state = StoreState()
    for ttl_s in (0, -1, LEASE_TTL_S_MAX + 1):
        with pytest.raises(StoreRefused, match="must be 1 to"):
            state.grant(1, ttl_s, 0)
    for lease_id in (0, -1, 1 << 63):
        with pytest.raises(StoreRefused, match="id must be"):
            state.grant(lease_id, 1, 0)
    state.grant(1, 2, 0)
    with pytest.raises(LeaseExists):
        state.grant(1, 2, 0)
    put(state, "a", b"", 1)
    assert state.time_to_live(1, 500_000_000) == (1, 2, ("a",))
    with pytest.raises(LeaseNotFound, match="lease 1 is not there"):
        state.keepalive(1, 2 * SECOND_NS)  # it has run out, although nobody has looked
    state.restart_leases(2 * SECOND_NS)
    assert state.keepalive(1, 3 * SECOND_NS) == 2
    assert state.expire(5 * SECOND_NS - 1) == []
    assert state.expire(5 * SECOND_NS) == [1]
    assert state.key_count == 0
    for call in (state.revoke, lambda lease_id: state.time_to_live(lease_id, 0)):
        with pytest.raises(LeaseNotFound):
            call(1)


def test_a_key_changes_hands_between_leases():
    state = StoreState()
    state.grant(1, 1, 0)
    state.grant(2, 9, 0)
    put(state, "a", b"", 1)
    put(state, "a", b"", 2)
    assert state.expire(SECOND_NS) == [1]
    assert state.get("a") is not None
    put(state, "a")
    assert state.expire(9 * SECOND_NS) == [2]
    assert state.get("a") is not None
    state.check()


def test_answers_have_a_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store_state, "RANGE_BYTES_MAX", 1000)
    state = StoreState()
    for name in "abcdef":
        put(state, name, b"x" * 300)
    page = state.range(ALL)
    assert [pair.key for pair in page.found] == ["a", "b"] and page.has_more
    then = state.revision
    put(state, "aa")
    rest = state.range(Span("a\0", None), revision=then)
    assert [pair.key for pair in rest.found] == ["b", "c"], "as it was when the first page was read"
    assert not state.range(Span.of_prefix("f"), count_max=1).has_more
    assert state.range(ALL, count_max=1).has_more
    assert state.count(Span("b", "e")) == 3 and state.count(Span("e", "b")) == 0


def test_events_of_one_revision_stay_together():
    state = StoreState()
    revision = state.apply(Txn((), tuple(Put(f"k{number}", b"") for number in range(10)))).revision
    put(state, "z")
    events = state.events(ALL, 1, state.revision, count_max=3)
    assert len(events.events) == 10 and events.revision == revision
    assert state.events(Span.of_prefix("z"), 1, state.revision, count_max=3).events == ()
    assert state.events(ALL, revision, revision).events == (), "what is not durable is told to nobody"
    (event,) = state.events(ALL, revision, state.revision).events
    assert event == Event(revision + 1, "z", state.get("z"))


def test_compaction():
    state = StoreState()
    for number in range(5):
        put(state, "a", b"%d" % number)
    state.compact(4)
    state.check()
    with pytest.raises(Compacted, match="after revision 4 only; begin again with a range"):
        state.events(ALL, 3, state.revision)
    with pytest.raises(Compacted):
        state.range(ALL, revision=3)
    with pytest.raises(Compacted):
        state.compact(4)
    with pytest.raises(StoreRefused, match="still to come"):
        state.compact(99)
    with pytest.raises(StoreRefused, match="still to come"):
        state.range(ALL, revision=99)
    assert [event.revision for event in state.events(ALL, 4, state.revision).events] == [5, 6]
    assert state.range(ALL, revision=4).found[0].value == b"2"


@pytest.mark.parametrize("prefix", ["", "a", "a/", "\x7f", "\ud7ff", "a\U0010ffff", "\U0010ffff"])
def test_a_span_of_a_prefix_is_its_keys(prefix: str):
    span = Span.of_prefix(prefix)
    for key in (
        "",
        "a",
        "a/",
        "a/b",
        "a0",
        "b",
        "\x7f",
        "\x7fx",
        "\x80",
        "\ud7ff!",
        "\ue000",
        "a\U0010ffffx",
        "\U0010ffff",
    ):
        assert span.has(key) == key.startswith(prefix), key
    assert span.end is None or span.end.encode() > prefix.encode()
