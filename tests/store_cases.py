"""What every coordination store has to do: one suite for etcd, nsqlookupd's own, and that one in a simulation.

Each case is a coroutine function of a store and a prefix that nobody else writes below. It waits for events; the only
times in it are the lifetimes of leases.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from flintmq.cluster.state import LookupdRecord, NodeRecord, encode
from flintmq.cluster.store import (
    Compare,
    CompareValue,
    Delete,
    Event,
    Events,
    Fate,
    Get,
    KeyValue,
    LeaseNotFound,
    Operation,
    Put,
    Snapshot,
    Span,
    Store,
    StoreRefused,
    Txn,
    follow,
    swap,
)
from flintmq.cluster.store_state import StoreState
from flintmq.net.membership import Candidacy, Membership, Replaced

Case = Callable[[Store, str], Awaitable[None]]
CASES: dict[str, Case] = {}
LEASE_TTL_S = 2  # the shortest that etcd grants with its usual settings
LONG_LEASE_TTL_S = 60  # a machine that stands still for so long is broken
TRIES = 5


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def short_case(function: Case) -> Case:
    """A case in which a short lease must not run out by itself: tried a few times, each below a prefix of its own.

    A busy machine is late now and then; what is wrong is never right.
    """

    async def tried(store: Store, prefix: str) -> None:
        for number in range(TRIES):
            try:
                await function(store, f"{prefix}{number}/")
                return
            except (AssertionError, LeaseNotFound):
                if number == TRIES - 1:
                    raise

    CASES[function.__name__] = tried
    return function


async def put(store: Store, key: str, value: bytes = b"x", lease_id: int = 0) -> int:
    return (await store.txn(Txn((), (Put(key, value, lease_id),)))).revision


async def delete(store: Store, key: str) -> int:
    return (await store.txn(Txn((), (Delete(key),)))).revision


async def take(watched: AsyncIterator[Events], count: int) -> list[Event]:
    """The next events, when there are ``count``."""
    found: list[Event] = []
    while len(found) < count:
        found.extend((await anext(watched)).events)
    return found


@case
async def a_key_from_nothing_to_gone(store: Store, prefix: str) -> None:
    key = prefix + "key"
    assert await store.get(key) is None
    created = await put(store, key, b"one")
    assert await store.get(key) == KeyValue(key, b"one", created, created, 1)
    written = await put(store, key, b"\x00\xff")
    assert written > created
    assert await store.get(key) == KeyValue(key, b"\x00\xff", created, written, 2)
    assert await delete(store, key) == written + 1
    assert await store.get(key) is None
    assert await delete(store, key) == written + 1, "nothing was deleted, so nothing has changed"
    again = await put(store, key, b"")
    assert await store.get(key) == KeyValue(key, b"", again, again, 1)


@case
async def a_range_is_a_prefix_in_order(store: Store, prefix: str) -> None:
    inside = [prefix + name for name in ("b/", "b/\x00", "b/1", "b/10", "b/2", "b/é", "b/\U0001f600")]
    outside = [prefix + name for name in ("a", "b", "b.", "b0", "c")]
    shuffled = inside + outside
    random.Random(1).shuffle(shuffled)
    for key in shuffled:
        revision = await put(store, key, key.encode())
    found = await store.range(Span.of_prefix(prefix + "b/"))
    assert found.revision >= revision and not found.has_more
    assert [pair.key for pair in found.found] == sorted(inside)
    assert all(pair.value == pair.key.encode() for pair in found.found)
    assert [pair.key for pair in (await store.range(Span.of_key(prefix + "b"))).found] == [prefix + "b"]
    everything = await store.range(Span.of_prefix(""))
    assert [pair.key for pair in everything.found if pair.key.startswith(prefix)] == sorted(shuffled)


@case
async def a_large_range_comes_whole(store: Store, prefix: str) -> None:
    keys = [f"{prefix}{number:04d}" for number in range(300)]
    for begin in range(0, len(keys), 100):
        await store.txn(Txn((), tuple(Put(key, b"v" * 100) for key in keys[begin : begin + 100])))
    found = await store.range(Span.of_prefix(prefix))
    assert [pair.key for pair in found.found] == keys and not found.has_more


@case
async def conditions_decide(store: Store, prefix: str) -> None:
    key, other = prefix + "key", prefix + "other"
    then, otherwise = (Put(key, b"then"), Get(key), Get(other)), (Get(key), Put(other, b"otherwise"), Get(other))
    first = await store.txn(Txn((Compare(key, 0), Compare(other, 0)), then, otherwise))
    pair = KeyValue(key, b"then", first.revision, first.revision, 1)
    assert first.succeeded and first.found == (pair, None)
    second = await store.txn(Txn((Compare(key, 0),), then, otherwise))
    assert not second.succeeded
    assert second.found == (pair, KeyValue(other, b"otherwise", second.revision, second.revision, 1))
    for condition, holds in (
        (Compare(key, first.revision), True),
        (Compare(key, first.revision + 1), False),
        (CompareValue(key, b"then"), True),
        (CompareValue(key, b"the"), False),
        (CompareValue(prefix + "none", b""), False),
    ):
        assert (await store.txn(Txn((condition,)))).succeeded is holds, condition
        assert (await store.txn(Txn((Compare(key, first.revision), condition)))).succeeded is holds
    assert (await store.txn(Txn())).revision == second.revision


@case
async def what_is_refused_changes_nothing(store: Store, prefix: str) -> None:
    key = prefix + "key"
    before = await put(store, prefix + "there")
    for txn in (
        Txn((), (Put(key, b"1"), Put(key, b"2"))),
        Txn((), (Put(key, b"1"), Delete(key))),
        Txn((), (Delete(key), Put(key, b"1"))),
        Txn((), (), (Put(key, b"1"), Put(key, b"1"))),
        Txn((), (Put(key, b"1"), Put("", b"1"))),
        Txn((), tuple(Put(f"{key}{number}", b"") for number in range(129))),
    ):
        with pytest.raises(StoreRefused):
            await store.txn(txn)
    with pytest.raises(LeaseNotFound):
        await store.txn(Txn((), (Put(key, b"1"), Put(key + "2", b"1", 12345))))
    assert (await store.txn(Txn((Compare(key, 1),), (Put(key, b"1", 12345),)))).succeeded is False
    found = await store.range(Span.of_prefix(prefix))
    assert [pair.mod_revision for pair in found.found] == [before]


@case
async def a_watch_tells_what_was_and_what_comes(store: Store, prefix: str) -> None:
    start = await put(store, prefix + "before")
    one = await put(store, prefix + "a", b"1")
    await put(store, prefix[:-1] + "beside")
    two = await delete(store, prefix + "a")
    async with store.watch(Span.of_prefix(prefix), start) as watched:
        assert await take(watched, 2) == [
            Event(one, prefix + "a", KeyValue(prefix + "a", b"1", one, one, 1)),
            Event(two, prefix + "a", None),
        ]
        result = await store.txn(Txn((), (Put(prefix + "b", b""), Put(prefix + "c", b""), Delete(prefix + "before"))))
        events = await anext(watched)
        assert events.revision == result.revision
        assert [(event.revision - events.revision, event.key[-1], event.now is None) for event in events.events] == [
            (0, "b", False),
            (0, "c", False),
            (0, "e", True),
        ]
        await put(store, prefix[:-1] + "beside")
        last = await put(store, prefix + "d")
        assert [event.revision for event in await take(watched, 1)] == [last]
    async with store.watch(Span.of_key(prefix + "b"), start) as watched:
        assert [event.key for event in await take(watched, 1)] == [prefix + "b"]


@case
async def every_watcher_hears_everything_once(store: Store, prefix: str) -> None:
    start = await put(store, prefix + "start")
    count = 60

    async def listen() -> list[str]:
        async with store.watch(Span.of_prefix(prefix), start) as watched:
            return [event.key for event in await take(watched, count)]

    listening = [asyncio.ensure_future(listen()) for _ in range(3)]
    keys = [f"{prefix}{number:03d}" for number in range(count)]
    for key in keys:
        await put(store, key)
    assert await asyncio.gather(*listening) == [keys] * 3


@case
async def whoever_gives_up_waiting_misses_nothing(store: Store, prefix: str) -> None:
    start = await put(store, prefix + "start")
    async with store.watch(Span.of_prefix(prefix), start) as watched:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await anext(watched)
        heard: list[str] = []
        for name in "abc":
            await put(store, prefix + name)
            try:
                async with asyncio.timeout(0.001):
                    heard.extend(event.key for event in (await anext(watched)).events)
            except TimeoutError:
                continue
        if len(heard) < 3:
            heard.extend(event.key for event in await take(watched, 3 - len(heard)))
        assert heard == [prefix + "a", prefix + "b", prefix + "c"]


@short_case
async def a_lease_takes_its_keys_along(store: Store, prefix: str) -> None:
    lease = await store.grant(LEASE_TTL_S)
    assert lease.ttl_s >= LEASE_TTL_S and lease.lease_id > 0
    held, kept, freed = prefix + "held", prefix + "kept", prefix + "freed"
    await store.txn(Txn((), (Put(held, b"", lease.lease_id), Put(kept, b""), Put(freed, b"", lease.lease_id))))
    start = await put(store, freed)
    pair = await store.get(held)
    assert pair is not None and pair.lease_id == lease.lease_id
    assert await store.keepalive(lease.lease_id) == lease.ttl_s
    async with store.watch(Span.of_prefix(prefix), start) as watched:
        assert [(event.key, event.now) for event in await take(watched, 1)] == [(held, None)]
    assert [pair.key for pair in (await store.range(Span.of_prefix(prefix))).found] == [freed, kept]
    with pytest.raises(LeaseNotFound):
        await store.keepalive(lease.lease_id)
    with pytest.raises(LeaseNotFound):
        await put(store, held, b"", lease.lease_id)


@case
async def a_lease_is_revoked(store: Store, prefix: str) -> None:
    lease = await store.grant(60)
    await store.txn(Txn((), (Put(prefix + "a", b"", lease.lease_id), Put(prefix + "b", b"", lease.lease_id))))
    start = await put(store, prefix + "c")
    async with store.watch(Span.of_prefix(prefix), start) as watched:
        await store.revoke(lease.lease_id)
        events = (await anext(watched)).events
        assert [(event.revision, event.key, event.now) for event in events] == [
            (start + 1, prefix + "a", None),
            (start + 1, prefix + "b", None),
        ]
    with pytest.raises(LeaseNotFound):
        await store.revoke(lease.lease_id)
    with pytest.raises(LeaseNotFound):
        await store.keepalive(lease.lease_id)


@case
async def only_one_of_many_wins(store: Store, prefix: str) -> None:
    key = prefix + "leader"
    tried = await asyncio.gather(*(swap(store, key, None, b"%d" % number) for number in range(8)))
    (winner,) = [each for each in tried if each.fate is Fate.APPLIED]
    assert winner.now is not None and winner.now.version == 1
    assert {each.now for each in tried} == {winner.now}
    assert sum(each.fate is Fate.REFUSED for each in tried) == 7
    gone = await swap(store, key, winner.now, None)
    assert gone.fate is Fate.APPLIED and gone.now is None
    assert (await swap(store, key, winner.now, b"late")).fate is Fate.REFUSED


@case
async def to_follow_is_to_know(store: Store, prefix: str) -> None:
    await put(store, prefix + "a")
    following = follow(store, Span.of_prefix(prefix))
    snapshot = await anext(following)
    assert isinstance(snapshot, Snapshot) and [pair.key for pair in snapshot.found] == [prefix + "a"]
    revision = await put(store, prefix + "b")
    events = await anext(following)
    assert isinstance(events, Events) and events.revision == revision
    await following.aclose()


@case
async def it_does_as_the_state_machine(store: Store, prefix: str) -> None:
    await compare_with_model(store, prefix, seed=1, steps=60)


async def compare_with_model(store: Store, prefix: str, seed: int, steps: int) -> None:
    """Ask a store and :class:`StoreState` the same at random; both have to answer alike, and to tell the same events.

    Nobody else may write to the store meanwhile: revisions are compared.
    """
    rng = random.Random(seed)
    start = await put(store, prefix + "start")
    model = StoreState(revision=start)
    keys = [f"{prefix}{name}" for name in "abcde"]
    leases: list[int] = []

    def condition() -> Compare | CompareValue:
        key = rng.choice(keys)
        pair = model.get(key)
        if rng.random() < 0.3:
            return CompareValue(key, pair.value if pair is not None and rng.random() < 0.7 else b"3")
        return Compare(key, pair.mod_revision if pair is not None and rng.random() < 0.8 else 0)

    def operation() -> Operation:
        key, kind = rng.choice(keys), rng.random()
        if kind < 0.5:
            return Put(key, b"%d" % rng.randrange(4), rng.choice([0, 0, *leases[-3:]]))
        return Delete(key) if kind < 0.75 else Get(key)

    def operations() -> tuple[Operation, ...]:
        return tuple(operation() for _ in range(rng.randrange(4)))

    async def both(txn: Txn) -> None:
        expected: object
        answered: object
        try:
            expected = model.apply(txn)
        except StoreRefused as error:
            expected = type(error)
        try:
            answered = await store.txn(txn)
        except StoreRefused as error:
            answered = type(error)
        assert answered == expected, (txn, model.describe())

    for step in range(steps):
        kind = rng.random()
        if kind < 0.1:
            lease = await store.grant(3600)
            leases.append(model.grant(lease.lease_id, 3600, 0).lease_id)
        elif kind < 0.16 and leases:
            lease_id = leases[rng.randrange(len(leases))]
            expected: object = None
            try:
                model.revoke(lease_id)
            except LeaseNotFound as error:
                expected = type(error)
            answered: object = None
            try:
                await store.revoke(lease_id)
            except LeaseNotFound as error:
                answered = type(error)
            assert answered == expected
        else:
            await both(Txn(tuple(condition() for _ in range(rng.randrange(3))), operations(), operations()))
        model.check()
        if step % 10 == 0:
            found = await store.range(Span.of_prefix(prefix))
            told = tuple(pair for pair in found.found if pair.key != prefix + "start")
            assert (found.revision, told) == (model.revision, model.range(Span.of_prefix(prefix)).found)
    expected_events = model.events(Span.of_prefix(prefix), start, model.revision, 1_000_000).events
    if expected_events:
        async with store.watch(Span.of_prefix(prefix), start) as watched:
            events = await take(watched, len(expected_events))
        assert _by_revision(events) == _by_revision(expected_events)


def _by_revision(events: list[Event] | tuple[Event, ...]) -> list[tuple[int, str, KeyValue | None]]:
    """Within one revision the order is nobody's business."""
    return sorted(((event.revision, event.key, event.now) for event in events), key=lambda row: row[:2])


# -- membership --------------------------------------------------------------------------------------------------------

INCARNATIONS = ("a" * 16, "b" * 16, "c" * 16)


def node(incarnation: str = INCARNATIONS[0], **fields: object) -> NodeRecord:
    return NodeRecord("0123456789abcdef", incarnation, "boot", False, "host", 4150, 4151, 4152, **fields)  # type: ignore[arg-type]


class Heard:
    """A member, perhaps a candidate, and what it was told."""

    def __init__(
        self, store: Store, key: str, record: NodeRecord | LookupdRecord, place: str = "", ttl_s: int = LONG_LEASE_TTL_S
    ) -> None:
        self.told: list[str] = []
        self.term = 0
        tell = self.told.append
        self.membership = Membership(
            store,
            store._env.clock,  # type: ignore[attr-defined]  # of its simulation, if it is in one
            key,
            record,
            ttl_s,
            on_held=lambda pair: tell("held"),
            on_lost=lambda reason: tell("lost"),
            on_replaced=lambda error: tell("replaced"),
        )
        self.membership.start()
        self.candidacy = Candidacy(self.membership, place, self._elected, lambda reason: tell("voted out"))
        if place:
            self.candidacy.start()

    def _elected(self, pair: KeyValue) -> None:
        self.term = pair.mod_revision
        self.told.append("elected")

    async def until(self, what: str, times: int = 1) -> None:
        while self.told.count(what) < times:
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self.candidacy.resign()
        await self.membership.close()


async def left_behind(store: Store, key: str, record: NodeRecord | LookupdRecord, *others: str) -> int:
    """What a process that was killed leaves: its record, and perhaps other keys, under a lease that runs on."""
    lease = await store.grant(3600)
    puts = [Put(each, encode(record), lease.lease_id) for each in (key, *others)]
    await store.txn(Txn((), tuple(puts)))
    return lease.lease_id


@case
async def a_member_is_there_while_it_lives(store: Store, prefix: str) -> None:
    key = prefix + "node/1"
    one = Heard(store, key, node())
    await one.until("held")
    pair = await store.get(key)
    assert pair is not None and pair == one.membership.pair and pair.value == encode(node())
    assert one.membership.is_held and one.membership.lease is not None
    assert pair.lease_id == one.membership.lease.lease_id
    await one.membership.update(node(is_draining=True))
    pair = await store.get(key)
    assert pair is not None and pair.value == encode(node(is_draining=True)) and pair.version == 2
    assert pair.lease_id == one.membership.lease.lease_id and one.told == ["held"]
    await one.close()
    assert await store.get(key) is None
    assert one.told == ["held", "lost"] and not one.membership.is_held


@short_case
async def a_member_stays_for_longer_than_its_lease(store: Store, prefix: str) -> None:
    one = Heard(store, prefix + "node/1", node(), ttl_s=LEASE_TTL_S)
    await one.until("held")
    start = one.membership.pair
    await asyncio.sleep(2 * LEASE_TTL_S)
    assert await store.get(prefix + "node/1") == start and one.told == ["held"]
    await one.close()


@short_case
async def a_member_whose_lease_is_gone_registers_again(store: Store, prefix: str) -> None:
    one = Heard(store, prefix + "node/1", node(), ttl_s=LEASE_TTL_S)
    await one.until("held")
    assert one.membership.lease is not None
    await store.revoke(one.membership.lease.lease_id)
    await one.until("held", 2)
    assert one.told == ["held", "lost", "held"]
    assert await store.get(prefix + "node/1") == one.membership.pair
    await one.close()


@case
async def the_record_of_the_process_before_is_replaced_at_once(store: Store, prefix: str) -> None:
    key, place = prefix + "node/1", prefix + "place"
    lease_id = await left_behind(store, key, node(INCARNATIONS[0]), place)
    start = await store.get(key)
    assert start is not None
    async with store.watch(Span.of_key(key), start.mod_revision) as watched:
        one = Heard(store, key, node(INCARNATIONS[1]))
        await one.until("held")
        (event,) = await take(watched, 1)
        assert event.now == one.membership.pair, "it was never gone"
    while await store.get(place) is not None:  # what else it held is free
        await asyncio.sleep(0.01)
    with pytest.raises(LeaseNotFound):
        await store.keepalive(lease_id)
    assert await store.get(key) == one.membership.pair
    await one.close()


@short_case
async def the_later_of_two_with_one_id_takes_over(store: Store, prefix: str) -> None:
    key = prefix + "node/1"
    first = Heard(store, key, node(INCARNATIONS[0]), ttl_s=LEASE_TTL_S)
    await first.until("held")
    later = Heard(store, key, node(INCARNATIONS[1]))
    await later.until("held")
    await first.until("replaced")
    assert first.told == ["held", "lost", "replaced"] and not first.membership.is_held
    with pytest.raises(Replaced, match="two processes use copies of one data directory"):
        await first.membership.held()
    with pytest.raises(Replaced):
        await first.membership.update(node())
    assert later.told == ["held"] and await store.get(key) == later.membership.pair
    await later.close()
    assert await store.get(key) is None
    await first.close()
    assert first.told == ["held", "lost", "replaced"], "it does not come back"


def lookupd(number: int, incarnation: str = INCARNATIONS[0]) -> LookupdRecord:
    return LookupdRecord(f"{number:016x}", incarnation, "host", 4160, 4161)


@case
async def one_of_many_is_elected_and_the_next_when_it_goes(store: Store, prefix: str) -> None:
    place = prefix + "master"
    candidates = [Heard(store, f"{prefix}lookupd/{number}", lookupd(number), place) for number in range(3)]
    terms = []
    while candidates:
        while not (elected := [each for each in candidates if each.candidacy.is_elected]):
            await asyncio.sleep(0.01)
        (master,) = elected
        pair = await store.get(place)
        assert pair is not None
        assert pair.value == encode(master.membership.record)
        assert pair == master.candidacy.pair and master.term == pair.mod_revision
        terms.append(master.term)
        candidates.remove(master)
        if len(candidates) == 2:
            assert master.membership.lease is not None
            await master.candidacy.resign()
            assert master.told == ["held", "elected", "voted out"] and master.membership.is_held
        else:
            await master.membership.close()  # with the lease the place goes
            assert sorted(master.told) == ["elected", "held", "lost", "voted out"]
        assert not master.candidacy.is_elected
        await master.close()
    assert terms == sorted(set(terms))
    assert await store.get(place) is None


@case
async def a_place_is_ours_again_after_a_restart_and_never_somebody_elses(store: Store, prefix: str) -> None:
    place = prefix + "master"
    lease_id = await left_behind(store, place, lookupd(1, INCARNATIONS[0]))
    other = Heard(store, prefix + "lookupd/2", lookupd(2), place)
    await other.until("held")
    again = Heard(store, prefix + "lookupd/1", lookupd(1, INCARNATIONS[1]), place)
    await again.until("elected")
    assert other.told == ["held"]
    assert await store.keepalive(lease_id) == 3600, "it held nothing of ours but the place"
    await again.close()
    await other.until("elected")
    await other.close()


@case
async def a_guarded_change_is_for_who_is_elected(store: Store, prefix: str) -> None:
    place, key = prefix + "master", prefix + "key"
    one = Heard(store, prefix + "lookupd/1", lookupd(1), place)
    await one.until("elected")
    other = Heard(store, prefix + "lookupd/2", lookupd(2), place)
    guard = one.candidacy.guard
    assert (await swap(store, key, None, b"1", guards=(guard,))).fate is Fate.APPLIED
    await one.candidacy.resign()
    await other.until("elected")
    before = await store.get(key)
    late = await swap(store, key, before, b"2", guards=(guard,))
    assert late.fate is Fate.REFUSED and late.now == before
    assert (await swap(store, key, before, b"3", guards=(other.candidacy.guard,))).fate is Fate.APPLIED
    await one.close()
    await other.close()


@short_case
async def a_place_is_lost_with_the_lease_and_found_again(store: Store, prefix: str) -> None:
    place = prefix + "master"
    one = Heard(store, prefix + "lookupd/1", lookupd(1), place, LEASE_TTL_S)
    await one.until("elected")
    assert one.membership.lease is not None
    await store.revoke(one.membership.lease.lease_id)
    await one.until("elected", 2)
    assert sorted(one.told) == ["elected", "elected", "held", "held", "lost", "voted out"]
    assert one.told.index("voted out") < 4
    deleted = await store.get(place)
    assert deleted is not None
    await delete(store, place)
    await one.until("elected", 3)
    assert one.term > deleted.mod_revision
    await one.close()
