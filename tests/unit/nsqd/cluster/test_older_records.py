"""A node that knows of more changes of a topic than the coordination store: the store's record goes above them."""

from __future__ import annotations

import random
from collections.abc import Coroutine, Generator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.unit.cluster.models import KEYS, World, node, state
from tests.unit.nsqd.cluster.test_agent import Case, Store
from tests.unit.nsqd.cluster.test_outdated import carry_out

from flintmq.cluster.state import TopicRecord
from flintmq.cluster.store import StoreUnavailable, Txn
from flintmq.cluster.view import View
from flintmq.nsqd.cluster.older_records import OlderRecords
from flintmq.topic_meta import PLAIN, TopicMeta, encode_meta

KNOWN = TopicMeta(partition_num=4, retention_days=12, version=7)
RECORD = TopicMeta(partition_num=3, retention_days=1, version=2)


@pytest.fixture
def case() -> Case:
    """Node a has led partition 0 in epoch 5, and knows of ``KNOWN``; the store has no record of a later one."""
    case = Case()
    case.elect(5)
    case.hear()
    case.settle()
    case.store.txn = Store(case).txn
    case.agent._change_meta = case.broker.broker.change_meta
    put(case, KNOWN)
    case.hear()
    case.settle()
    assert topic(case).meta == KNOWN and case.copy.replica.meta == KNOWN
    return case


def topic(case: Case) -> Any:
    return case.broker.broker.topics["t"]


def put(case: Case, meta: TopicMeta, **fields: Any) -> None:
    case.cluster.put(KEYS.topic("t"), TopicRecord(**{"number": 7, "meta": meta, "partition_num": 3, **fields}))


def now(case: Case) -> TopicRecord:
    found = case.cluster.record("t")
    assert found is not None
    return found


def test_what_the_store_that_was_put_back_says_is_put_into_force(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    put(case, RECORD, min_in_sync=1)
    case.hear()
    carry_out(case)
    raised = msgspec.structs.replace(RECORD, version=8)
    assert now(case) == TopicRecord(7, raised, 3)
    assert topic(case).meta == raised and case.copy.replica.meta == raised
    told = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == 1 and "topic t was at version 2 there and at 7 here, now at 8" in told[0]
    put(case, msgspec.structs.replace(raised, retention_days=2, version=9))
    case.hear()
    carry_out(case)
    assert topic(case).meta.retention_days == 2 and now(case).meta.version == 9


def test_as_many_other_changes_as_are_known_do_not_stand_for_them(case: Case) -> None:
    put(case, msgspec.structs.replace(RECORD, retention_days=11, partition_num=1, version=7))
    assert now(case).meta.rank < KNOWN.rank
    case.hear()
    carry_out(case)
    assert now(case).meta.version == 8 and topic(case).meta == now(case).meta
    assert topic(case).meta.partition_num == 1


def test_a_copy_that_follows_knows_as_well(case: Case) -> None:
    case.cluster.node(node("b"))
    case.cluster.partition("t", 0, state("b", "ba", "ba", epoch=6))
    case.hear()
    case.settle()
    assert case.copy.led is None and "t" not in case.broker.broker.topics
    put(case, RECORD)
    case.hear()
    carry_out(case)
    assert now(case).meta == msgspec.structs.replace(RECORD, version=8)
    case.copy.replica.about = msgspec.structs.replace(
        case.copy.replica.about, meta=encode_meta(msgspec.structs.replace(KNOWN, version=20))
    )  # of a copy that comes later
    case.agent._due.note(("t", 0))
    carry_out(case)
    assert now(case).meta == msgspec.structs.replace(RECORD, version=21)


def test_a_view_that_is_late_changes_nothing(case: Case) -> None:
    later = msgspec.structs.replace(KNOWN, retention_days=3, version=8)
    put(case, later)
    case.copy.replica.about = msgspec.structs.replace(case.copy.replica.about, meta=encode_meta(later))
    case.agent._due.note(("t", 0))  # its leader has told of what the view has not
    case.loop.turn()
    assert case.loop.begun, "it takes the store for older, until the store refuses that"
    carry_out(case)
    assert now(case).meta == later and topic(case).meta == later


@pytest.mark.parametrize(
    "fields",
    [{"number": 8}, {"is_deleting": True}, {"meta": PLAIN}, {"meta": KNOWN}],
    ids=["made anew", "being deleted", "of another kind", "the same"],
)
def test_what_is_none_of_its_business_stays(case: Case, fields: dict[str, Any]) -> None:
    put(case, **{"meta": RECORD, **fields})
    record = now(case)
    case.hear()
    carry_out(case)
    assert now(case) == record


def test_headers_are_kept_whatever_the_store_says(case: Case) -> None:
    put(case, msgspec.structs.replace(KNOWN, extend_support=True, version=8))
    case.hear()
    case.settle()
    assert topic(case).meta.extend_support
    put(case, msgspec.structs.replace(RECORD, version=30))
    case.hear()
    carry_out(case)
    assert now(case).meta == msgspec.structs.replace(RECORD, version=31, extend_support=True) == topic(case).meta


def test_while_the_store_cannot_be_told_it_is_tried_again(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    txn = case.store.txn

    async def away(_request: Any) -> Any:
        raise StoreUnavailable("away")

    case.store.txn = away
    put(case, RECORD)
    case.hear()
    carry_out(case)
    assert now(case).meta == RECORD
    assert len([each for each in caplog.records if "cannot be told" in each.message]) == 1
    case.store.txn = txn
    carry_out(case)
    assert now(case).meta == msgspec.structs.replace(RECORD, version=8)


class Step:
    """A wait that ends when the test goes on with who waits."""

    def __await__(self) -> Generator[None]:
        yield


class Member:
    """A node with a copy of the topic, which hears of the store when the test says so.

    Attributes:
        known: what is in force here.
        work: what it is doing, which goes on step by step.
    """

    def __init__(self, world: World, known: TopicMeta) -> None:
        self.world = world
        self.known = known
        self.work: list[Coroutine[Any, Any, None]] = []
        self.view = View(KEYS)
        self.replica: Any = SimpleNamespace(topic="t", number=0, topic_number=7, partition=None, meta=known)
        anything: Any = SimpleNamespace(
            monotonic_ns=lambda: 0, note_later=lambda *_: None, of_topic=lambda _: {0: self.replica}, txn=self._txn,
            begin=lambda work, _what: self.work.append(work),
        )  # fmt: skip
        self.records = OlderRecords(anything, KEYS, self.view, anything, {}, anything, anything, anything)

    async def _txn(self, txn: Txn) -> Any:
        await Step()  # on its way
        answer = self.world.store.apply(txn)
        await Step()
        return answer

    def hear(self) -> None:
        """Take what the store says into force, as far as that is later than what is known here."""
        self.view.feed(self.world.store.range(KEYS.all))
        meta = self.view.topics["t"].meta.with_headers_of(self.known)
        if meta.rank > self.known.rank:
            assert meta.extend_support or not self.known.extend_support
            self.known = self.replica.meta = meta

    def go_on(self) -> None:
        try:
            self.work[0].send(None)
        except StopIteration:
            del self.work[0]


@pytest.mark.parametrize("seed", range(60))
def test_all_nodes_come_to_what_was_written_last_whatever_the_order(seed: int) -> None:
    rng, world = random.Random(seed), World()
    meta = TopicMeta(partition_num=1)
    backups = [meta]
    last = meta

    def write(now: TopicMeta) -> None:
        nonlocal last
        last = now
        world.put(KEYS.topic("t"), TopicRecord(7, now, now.partition_num))

    write(meta)
    members = [Member(world, meta) for _ in range(3)]

    def change() -> None:
        """What the master does, which knows of everything."""
        record = world.record("t")
        assert record is not None
        days, version = rng.randrange(9), record.meta.version + 1
        count, extend = rng.randint(1, 5), record.meta.extend_support or rng.random() < 0.1
        write(TopicMeta(count, retention_days=days, version=version, extend_support=extend))

    def put_back() -> None:
        write(rng.choice(backups))

    def back_up() -> None:
        record = world.record("t")
        assert record is not None
        backups.append(record.meta)

    def look() -> None:
        member = rng.choice(members)
        if member.view.is_fed:
            member.records.look(member.replica)

    def go_on() -> None:
        for member in rng.sample(members, 2):
            if member.work:
                member.go_on()

    for _ in range(rng.randrange(10, 120)):
        rng.choice((change, change, put_back, back_up, look, go_on, go_on, lambda: rng.choice(members).hear()))()
    rng.shuffle(members)
    for member in [*members, *members, *members]:  # one comes later than the other, and all hear of that
        while member.work:
            member.go_on()
        member.hear()
        member.records.look(member.replica)
        while member.work:
            member.go_on()
        member.hear()
    record = world.record("t")
    assert record is not None
    assert {member.known for member in members} == {record.meta}
    wanted = last.with_headers_of(record.meta)
    assert record.meta.is_like(wanted) and record.partition_num == wanted.partition_num
    assert not any(member.work for member in members)
