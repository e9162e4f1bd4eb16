"""A node's part in a cluster, on a real broker: what becomes of a partition when something fails on the way."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from tests.unit.broker.test_replicas import Batches
from tests.unit.broker.test_replicas import World as BrokerWorld
from tests.unit.cluster.models import KEYS, World, member, node, state

from flintmq.cluster.leading import Leading
from flintmq.cluster.power import has_lost
from flintmq.cluster.state import LEASE_TTL_S, ClusterRecord, LookupdRecord, PartitionState, decode
from flintmq.cluster.store import OutcomeUnknown, Span, StoreUnavailable, Txn
from flintmq.errors import DiskFull, RemoteProtocolError, StorageError, WriteFailed
from flintmq.net.membership import Replaced
from flintmq.nsqd.cluster.agent import Agent, handed_over
from flintmq.nsqd.cluster.damaged import DISK_TICKS
from flintmq.nsqd.cluster.followings import DISK_IS_DEAD
from flintmq.nsqd.cluster.rounds import SLICE_COUNT
from flintmq.nsqd.cluster.settling import SWEEP_TICKS
from flintmq.nsqd.file_room import FileRoom
from flintmq.storage import CutsCommitted
from flintmq.wire.peer import CutTo, Identity, Open, Refusal
from flintmq.wire.server import Publish, Subscribe

PARTITION = ("t", 0)


class Task:
    """One that is run by the test."""

    def add_done_callback(self, call: Callable[..., None]) -> None: ...


class Loop:
    """Calls back when the test says so, whatever the time."""

    def __init__(self) -> None:
        self.due: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.begun: list[Coroutine[Any, Any, None]] = []

    def time(self) -> float:
        return 0.0

    def call_soon(self, call: Callable[..., None], *args: Any) -> None:
        self.due.append((call, args))

    def call_later(self, _delay_s: float, call: Callable[..., None], *args: Any) -> Any:
        self.due.append((call, args))
        return SimpleNamespace(cancel=lambda: None)

    def create_task(self, work: Coroutine[Any, Any, None]) -> Any:
        self.begun.append(work)
        return Task()

    def turn(self) -> None:
        due, self.due = self.due, []
        for call, args in due:
            call(*args)


class Case:
    """Node ``a`` with partitions of which it is the only holder, and a store that it follows step by step.

    Args:
        partition_count: of the topic ``t``.
        others: that are in sync as well, and are not there.

    Attributes:
        ready: what nsqlookupds were told: a topic, and the partitions that are ready there from then on.
    """

    def __init__(self, partition_count: int = 1, others: str = "") -> None:
        self.broker = BrokerWorld()
        self.cluster = World()
        self.ready: list[tuple[str, Sequence[int] | None]] = []
        self.loop = Loop()
        nothing = SimpleNamespace(look_up_again=lambda: None)
        engine: Any = SimpleNamespace(
            broker=self.broker.broker,
            durability=SimpleNamespace(waits_for_syncs=False),
            loop=self.loop,
            schedule=lambda: None,
            wants_output=lambda client: None,
            sync_soon=lambda log: None,
        )
        self.store: Any = SimpleNamespace(txn=None)
        clients: Any = nothing
        self.clock_ns = 10**15
        env: Any = SimpleNamespace(clock=SimpleNamespace(monotonic_ns=lambda: self.clock_ns), random=random.Random(1))
        files: Any = SimpleNamespace(boot_id=lambda: "boot a")
        self.agent: Any = Agent(
            env, engine, self.store, KEYS, "a", files, b"", clients, self._became_ready, lambda topic, meta: True,
            FileRoom(env.clock, lambda: 0),
        )  # fmt: skip
        link = SimpleNamespace(add=lambda leading: None, remove=lambda topic, number: None, is_connected=True)
        self.peers_ended: list[str] = []
        peers: Any = SimpleNamespace(
            link=lambda node: link, links=list, nodes_changed=lambda: None, is_registered=bool,
            end=self.peers_ended.append,
        )  # fmt: skip
        self.agent._peers = self.agent.leaders._peers = peers
        self.agent._record = node("a", incarnation=self.agent.incarnation)
        self.cluster.node(self.agent._record)
        self.cluster.topic("t", partition_count)
        for number in range(partition_count):
            self.elect(1, f"a{others}", f"a{others}", number)
        self.agent._take(self.agent.view.feed(self.cluster.store.range(KEYS.all)), True)

    def _became_ready(self, topic: str, gained: Sequence[int] | None) -> None:
        self.ready.append((topic, gained))

    def elect(self, epoch: int, replicas: str = "a", in_sync: str = "a", number: int = 0) -> None:
        incarnation = self.agent.incarnation
        fields = {"epoch": epoch, "incarnation": incarnation, "log_id": 9 + number}
        self.cluster.partition("t", number, state("a", in_sync, replicas, **fields))

    def hear(self) -> None:
        told = self.cluster.store.events(
            Span.of_prefix(KEYS.prefix), self.agent.view.revision, self.cluster.store.revision
        )
        self.agent._take(self.agent.view.feed(told), False)
        self.loop.turn()

    def settle(self) -> None:
        for _ in range(10):
            self.loop.turn()
            self.broker.settle()

    @property
    def copy(self) -> Any:
        return self.agent.table.copies.get(PARTITION)


@pytest.fixture
def case() -> Case:
    return Case()


def until_it_notes(case: Case, epoch: int) -> None:
    """Go on until the database is to be told of an epoch that begins here."""
    for _ in range(10):
        if case.copy is not None and case.copy.replica is not None and case.copy.replica.epoch == epoch:
            return
        case.broker.settle()
        case.loop.turn()
    raise AssertionError("it notes nothing")


def test_an_epoch_that_could_not_be_noted_is_noted_again(case: Case) -> None:
    until_it_notes(case, 1)
    for _ in range(2):
        case.broker.end_flush(case.broker.take_flush(), [], OSError("disk"))
        assert not case.copy.is_busy and case.copy.led is None
        while not case.copy.is_busy:
            case.loop.turn()
    case.settle()
    assert case.copy.led is not None and case.copy.replica.history == [(1, 1)]


def test_a_promotion_that_failed_is_tried_again(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    until_it_notes(case, 1)
    begin, tries = case.broker.broker.led_replicas._adoption.begin, 0

    def fail(*args: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise StorageError("disk")
        return begin(*args)

    monkeypatch.setattr(case.broker.broker.led_replicas._adoption, "begin", fail)
    case.settle()
    assert tries == 3 and case.copy.led is not None and case.copy.replica.history == [(1, 1)]


@pytest.mark.parametrize("where", ["first", "last"])
def test_a_promotion_that_ends_unexpectedly_is_tried_again(
    case: Case, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    until_it_notes(case, 1)
    broker, tries = case.broker.broker, 0
    owner: Any = type(broker.led_replicas._marks if where == "first" else broker.publishes)
    name = "mark" if where == "first" else "note_snapshot"
    work = getattr(owner, name)

    def fail(*args: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise RuntimeError("a defect")
        return work(*args)

    monkeypatch.setattr(owner, name, fail)
    case.settle()
    assert tries == 3 and case.copy.led is not None and case.copy.replica.history == [(1, 1)]
    assert list(broker.topics["t"].partitions) == [0]


def test_a_partition_that_is_deleted_while_it_is_promoted_is_removed(case: Case) -> None:
    until_it_notes(case, 1)
    case.cluster.delete(KEYS.partition("t", 0))
    case.cluster.delete(KEYS.topic("t"))
    case.hear()
    case.settle()
    assert case.copy is None and not case.broker.broker.topics and not case.broker.broker.replicas


def test_who_led_follows_nobody_of_an_epoch_before(case: Case) -> None:
    case.settle()
    case.elect(7)
    case.hear()
    case.settle()
    assert case.copy.led.leading.epoch == 7
    case.copy.led.leading.ended(8)
    case.settle()
    assert case.copy.led is None and case.copy.following.epoch == 7


class Stream:
    """What another node that leads sends, which hears the answers."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.confirmed_ns = 0
        self.heard: list[Any] = []

    def send(self, frame: Any) -> None:
        self.heard.append(frame)

    def refuse(self, refusal: Refusal, epoch: int, reason: str = "") -> None:
        self.heard.append((refusal, reason))

    def acknowledge(self) -> None: ...


@pytest.mark.parametrize("in_sync", ["ab", "b"])
def test_what_is_committed_here_and_not_at_the_leader_is_kept_aside(case: Case, in_sync: str) -> None:
    case.settle()
    case.cluster.node(node("b"))
    case.cluster.partition("t", 0, state("b", in_sync, "ba", epoch=2))
    case.hear()
    case.settle()
    copy, replica = case.copy, case.copy.replica
    stream = Stream(1)
    copy.following.open(stream, Open(1, "t", 0, 7, 9, 2))
    case.settle()
    copy.following.cut_to(stream, CutTo(1, 1))
    case.settle()
    messages = Batches(number=0)
    copy.following.append(stream, 1, 1, memoryview(messages.next(2, [b"one"])))
    copy.following.append(stream, 2, 3, memoryview(messages.next(2, [b"two"])))
    assert replica.log.committed_sequence == 3
    successor = Stream(2)
    copy.following.open(successor, Open(2, "t", 0, 7, 9, 3))
    case.settle()
    copy.following.cut_to(successor, CutTo(2, 2))
    case.settle()
    assert isinstance(copy.following.broken, CutsCommitted) and successor.heard[-1][0] is Refusal.BROKEN
    for _ in range(2 * SWEEP_TICKS):
        case.agent._settling.tick()
        case.settle()
    if in_sync == "b":
        assert replica.is_deleted and case.copy.replica is not replica, "it is fetched anew"
        assert case.copy.replica.log.next_sequence == 1 and list(case.broker.files.list("set-aside"))
    else:
        assert case.copy.replica is replica and replica.log.next_sequence == 3, "the leader has to let it go first"


def test_what_the_store_says_of_a_partition_while_it_is_promoted_is_known(case: Case) -> None:
    until_it_notes(case, 1)
    case.elect(1, replicas="ab")
    case.hear()
    case.settle()
    assert case.copy.led.leading.state.replicas == ("a", "b")


def test_each_of_several_steps_that_come_together_is_taken_with_its_own_revision(case: Case) -> None:
    """As the store tells one who was not connected for a while; else a change is written over the last of them."""
    case.settle()
    case.elect(1, replicas="ab")
    case.elect(1, replicas="abc")
    case.hear()
    led = case.copy.led
    assert led.leading.state.replicas == ("a", "b", "c")
    assert decode(led.pair.key, led.pair.value, PartitionState) == led.leading.state
    case.elect(1, replicas="a")
    case.elect(1, replicas="ad")
    case.cluster.delete(KEYS.partition("t", 0))
    case.hear()
    assert led.leading.is_ended


# -- very many partitions


def test_what_is_ready_is_told_once_of_a_topic() -> None:
    case = Case(40)
    case.settle()
    assert len(case.agent.table.led) == 40 and all(led.is_ready for led in case.agent.table.led.values())
    assert sorted(number for topic, gained in case.ready for number in gained or ()) == list(range(40))
    assert len(case.ready) < 10
    del case.ready[:]
    readiness, led = case.agent._readiness, case.agent.table.led
    for number in (3, 4):
        readiness.end(led["t", number])
    readiness.wait_for(led["t", 4])
    readiness.look(led["t", 4])
    case.loop.turn()
    assert case.ready == [("t", None)], "whoever was told of them has to be told anew"


def test_a_slice_of_them_is_promoted_in_a_turn() -> None:
    case = Case(3 * SLICE_COUNT // 2)
    counts = [0]
    while counts[-1] < 3 * SLICE_COUNT // 2:
        case.loop.turn()
        counts.append(len(case.agent.table.led))
        case.broker.settle()
        counts.append(len(case.agent.table.led))
        assert len(counts) < 1000
    steps = [after - before for before, after in pairwise(counts)]
    assert max(steps) <= SLICE_COUNT, steps


class Store:
    """The store of a case, and how it was asked.

    Args:
        failures: what the next transactions end with, before or behind their being carried out.
    """

    def __init__(self, case: Case, *failures: tuple[Exception, bool]) -> None:
        self.asked: list[Txn] = []
        self._case = case
        self._failures = list(failures)

    async def txn(self, txn: Txn) -> Any:
        self.asked.append(txn)
        error, is_done = self._failures.pop(0) if self._failures else (None, True)
        answer = self._case.cluster.store.apply(txn) if is_done else None
        if error is not None:
            raise error
        return getattr(answer, "result", answer)


def swap_all(case: Case, *failures: tuple[Exception, bool]) -> list[Txn]:
    """Let every other member be silent, and what follows be written; how the store was asked."""
    store = Store(case, *failures)
    case.store.txn = store.txn
    for led in case.agent.table.led.values():
        led.leading.silent("b")

    async def run() -> None:
        while case.loop.begun:
            await asyncio.gather(*(case.loop.begun.pop(0) for _ in list(case.loop.begun)))
            case.loop.turn()

    case.loop.turn()
    asyncio.run(run())
    return store.asked


def assert_alone(case: Case) -> None:
    states = [led.leading.state for led in case.agent.table.led.values()]
    assert states and all(state.in_sync_nodes == ("a",) for state in states)
    for number, its in enumerate(states):
        (pair,) = case.cluster.store.range(Span.of_key(KEYS.partition("t", number))).found
        assert decode(pair.key, pair.value, PartitionState) == its
    assert not any(led.is_swapping for led in case.agent.table.led.values())


def test_who_is_in_sync_is_changed_for_many_together() -> None:
    case = Case(40, others="b")
    case.settle()
    asked = swap_all(case)
    assert len(asked) == 2, "32 and 8"
    assert_alone(case)


def test_a_store_that_is_away_is_told_once_for_all_partitions(caplog: pytest.LogCaptureFixture) -> None:
    case = Case(40, others="b")
    case.settle()
    swap_all(case, *[(StoreUnavailable("no room"), False)] * 42)  # two together, then each alone
    assert_alone(case)
    told = [record.message for record in caplog.records if "no room" in record.message]
    assert len(told) == 1 and told[0].startswith("CLUSTER: who is in sync cannot be changed now: no room: t/")


def test_one_that_was_changed_by_somebody_else_does_not_keep_the_others() -> None:
    case = Case(3, others="b")
    case.settle()
    case.elect(1, "abc", "ab", 1)  # it is not known here yet
    asked = swap_all(case)
    assert len(asked) > 3, "together, then each alone, and one of them again"
    assert_alone(case)
    assert case.agent.table.led["t", 1].leading.state.replicas == ("a", "b", "c")


@pytest.mark.parametrize("is_done", [False, True])
def test_changes_whose_answer_is_missing_are_asked_for_one_by_one(is_done: bool) -> None:
    case = Case(3, others="b")
    case.settle()
    asked = swap_all(case, (OutcomeUnknown("no answer"), is_done))
    assert len(asked) == 4
    assert_alone(case)


def test_a_change_never_overwrites_the_successor_that_was_heard_of_while_it_was_asked_for() -> None:
    """A leader that is cut from the store asks for two changes together; when that ends, another one leads."""
    case = Case(2, others="b")
    case.settle()

    async def cut_off(txn: Txn) -> Any:
        case.store.txn = store.txn
        for number in (0, 1):
            fields = {"epoch": 2, "incarnation": "b1", "log_id": 9 + number}
            case.cluster.partition("t", number, state("b", "b", "ab", **fields))
        case.hear()
        raise OutcomeUnknown("no answer")

    store = Store(case)
    case.store.txn = cut_off
    for led in case.agent.table.led.values():
        led.leading.silent("b")
    case.loop.turn()
    asyncio.run(_first_batch(case))
    for number in (0, 1):
        (pair,) = case.cluster.store.range(Span.of_key(KEYS.partition("t", number))).found
        found = decode(pair.key, pair.value, PartitionState)
        assert (found.epoch, found.leader, found.in_sync_nodes) == (2, "b", ("b",))


@pytest.mark.parametrize("is_refused", [False, True])
def test_who_has_others_lead_acts_on_nothing_from_before_the_store_is_asked(is_refused: bool) -> None:
    case = Case(others="bc")
    record = case.agent.view.topics["t"]
    case.cluster.put(KEYS.topic("t"), msgspec.structs.replace(record, min_in_sync=2))
    for name in "bc":
        case.cluster.node(node(name))
    case.cluster.put(KEYS.master, LookupdRecord("l", "1", "l", 1, 2))
    case.hear()
    case.settle()
    lease = case.agent._lease
    lease._membership = SimpleNamespace(is_held=True, pair=SimpleNamespace(mod_revision=0))
    lease.look_at_all()
    led = case.copy.led
    for name in "bc":
        led.leading.opened(name, member(name), SimpleNamespace(wake_watermark=lambda: None))
        led.leading.acked(name, led.leading.end, 0)
    led.deliver_from_ns = 0
    case.loop.turn()
    assert led.is_ready and lease.may_act(led)
    if is_refused:
        case.elect(1, "acb", "abc")  # it is not known here yet
    acted: list[bool] = []

    async def txn(txn: Txn) -> Any:
        acted.append(led.is_ready or led.is_writable or lease.may_act(led))
        lease.look_at_all()
        acted.append(led.is_ready or led.is_writable or lease.may_act(led))
        return await store.txn(txn)

    store = Store(case)
    case.store.txn = txn
    for name in "bc":
        led.leading.silent(name)
        led.leading.unreached(name)
    case.loop.turn()
    if is_refused:
        asyncio.run(_first_batch(case))
        assert not led.leading.gives_up and not led.leading.is_ended
        lease.look_at_fenced(case.clock_ns)
        assert lease.may_act(led), "it is as it was"
    else:
        asyncio.run(_first_batch(case))
        case.loop.turn()
        assert led.leading.is_ended and case.copy.led is None
        (pair,) = case.cluster.store.range(Span.of_key(KEYS.partition("t", 0))).found
        found = decode(pair.key, pair.value, PartitionState)
        assert (found.leader, found.in_sync_nodes) == ("", ("b", "c"))
    assert acted and not any(acted)


@pytest.mark.parametrize("count", [1, 2])
def test_a_change_is_never_written_over_what_cannot_be_read(count: int) -> None:
    """A newer release wrote it; this one asks again and again, of what it knew."""
    case = Case(count, others="b")
    case.settle()
    key = KEYS.partition("t", 0)
    case.cluster.put(key, b'{"of": "a newer release"}')
    store = Store(case)
    case.store.txn = store.txn
    for led in case.agent.table.led.values():
        led.leading.silent("b")
    case.loop.turn()

    async def sleep(_seconds: float) -> None:
        if len(store.asked) > 5:
            raise asyncio.CancelledError

    with patch.object(asyncio, "sleep", sleep), contextlib.suppress(asyncio.CancelledError):
        for _ in range(10):
            asyncio.run(_first_batch(case))
            case.loop.turn()
    assert len(store.asked) > 2
    (pair,) = case.cluster.store.range(Span.of_key(key)).found
    assert pair.value == b'{"of": "a newer release"}'


def test_changes_that_may_have_been_made_are_not_taken_for_refused() -> None:
    case = Case(2, others="b")
    case.settle()
    away = StoreUnavailable("away")
    store = Store(case, (OutcomeUnknown("no answer"), True), *[(away, False)] * 2)
    case.store.txn = store.txn
    for led in case.agent.table.led.values():
        led.leading.silent("b")
    case.loop.turn()
    asyncio.run(_first_batch(case))
    assert all(led.leading._is_doubtful for led in case.agent.table.led.values())


@pytest.mark.slow
@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("count", [1, 40])
def test_a_defect_while_members_are_changed_does_not_keep_anybody_from_trying_again(count: int, is_done: bool) -> None:
    case = Case(count, others="b")
    case.settle()
    swap_all(case, (RuntimeError("a defect"), is_done), (RuntimeError("another one"), is_done))
    assert_alone(case)


def test_a_defect_behind_a_change_of_members_does_not_keep_anybody_from_trying_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, tries = Case(40, others="b"), 0
    case.settle()
    swap_ended = Leading.swap_ended

    def fail(leading: Leading, *args: Any) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise RuntimeError("a defect")
        swap_ended(leading, *args)

    monkeypatch.setattr(Leading, "swap_ended", fail)
    swap_all(case)
    assert_alone(case)


def catch_up(leading: Leading) -> Leading:
    """Have node ``b`` everything."""
    stream: Any = SimpleNamespace(
        wake=lambda: None, wake_watermark=lambda: None, wake_floors=lambda: None, sent=leading.end, state_number=None
    )
    leading.opened("b", member("b"), stream)
    leading.acked("b", leading.end, 0)
    leading.progress_acked("b", 0, 0)
    leading.floors_acked("b", 0, 0)
    return leading


def joining(count: int) -> Case:
    """Node ``b`` has caught up with all partitions, and its record is about to be another one."""
    case = Case(count)
    for number in range(count):
        case.elect(1, "ab", "a", number)
    case.cluster.node(node("b"))
    case.hear()
    case.settle()
    for led in case.agent.table.led.values():
        catch_up(led.leading)
    case.loop.turn()
    return case


@pytest.mark.parametrize("count", [1, 40])
def test_a_node_never_joins_whose_record_is_another_one_by_then(count: int) -> None:
    """Another process has registered, and nobody has told this node yet."""
    case = joining(count)
    case.cluster.node(node("b", incarnation="b2"))
    store = Store(case)
    case.store.txn = store.txn

    async def sleep(_seconds: float) -> None:
        if len(store.asked) > 10:
            raise asyncio.CancelledError

    def members() -> set[tuple[str, ...]]:
        pairs = [case.cluster.store.get(KEYS.partition("t", number)) for number in range(count)]
        return {decode(each.key, each.value, PartitionState).in_sync_nodes for each in pairs if each is not None}

    with patch.object(asyncio, "sleep", sleep), contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_first_batch(case))
    assert store.asked and members() == {("a",)}
    case.hear()
    with patch.object(asyncio, "sleep", sleep):
        while case.loop.due or case.loop.begun:
            asyncio.run(_first_batch(case))
            case.loop.turn()
    assert members() == {("a", "b")}, "what this node knows by now is what is registered"


def test_who_is_not_registered_is_not_asked_for() -> None:
    case = Case()
    case.agent.leaders._peers.is_registered = lambda node: False
    case.elect(1, "ab", "a")
    case.cluster.node(node("b"))
    case.hear()
    case.settle()
    leading = catch_up(case.copy.led.leading)
    assert leading.wanted_state() is None and leading.is_level, "and nobody waits for it"


def test_a_process_that_is_replaced_leads_and_follows_nothing_any_more(case: Case) -> None:
    case.settle()
    led = case.copy.led
    assert case.agent.admission.to_publish(publish()) is led.partition
    case.agent._lease._replaced(Replaced(KEYS.node("a"), "a2"))
    assert led.is_fenced and not led.is_writable, "at once"
    assert not case.agent._lease.may_act(led)
    assert case.peers_ended and "two processes" in case.agent.problem == case.agent.shown.figures().problem
    case.settle()
    assert case.copy.led is None and not case.agent.table.led
    with pytest.raises(RemoteProtocolError, match="taken this node's place"):
        case.agent.admission.elsewhere(publish())
    refused = case.agent.admission.prepare(SimpleNamespace(), Subscribe("t", "ch"))
    assert refused.ended and "taken this node's place" in str(refused.error)
    assert case.agent.admission.wish("new").error.reason == case.agent.admission.problem
    case.elect(2)
    case.hear()
    case.settle()
    assert case.copy.led is None, "whatever the store says"
    case.cluster.partition("t", 1, state("b", "b", "ab", epoch=1, log_id=11))
    case.hear()
    case.settle()
    assert ("t", 1) not in case.agent.table.copies, "no copy is made"
    asyncio.run(case.agent._count())
    assert not case.loop.begun and case.agent._mark._count == 0, "its directory is counted by the other one"
    asyncio.run(case.agent.hand_over())
    assert not case.agent._record.is_ending


def publish() -> Publish:
    return Publish("PUB", "t", [b"x"], 1)


async def _first_batch(case: Case) -> None:
    await asyncio.gather(*(case.loop.begun.pop(0) for _ in list(case.loop.begun)))


# -- without the store


class Member:
    """The only other one in sync, connected; it counts who asks what it confirmed."""

    def __init__(self, case: Case, confirmed_ns: int) -> None:
        self.confirmed = confirmed_ns
        self.asked = 0
        self.sent = 0
        self.state_number = None
        case.elect(1, in_sync="ab", replicas="ab")
        case.hear()
        case.copy.led.leading.opened("b", member("b"), self)

    @property
    def confirmed_ns(self) -> int:
        self.asked += 1
        return self.confirmed

    def wake(self) -> None: ...

    def wake_watermark(self) -> None: ...

    def wake_floors(self) -> None: ...


def test_what_followers_confirm_is_not_asked_every_turn(case: Case) -> None:
    case.settle()
    other = Member(case, case.clock_ns)
    for _ in range(5):
        case.agent.look()
        case.agent._lease.look_at_fenced(case.clock_ns)
    asked, led = other.asked, case.copy.led
    assert asked and not led.is_fenced
    for _ in range(100):
        case.agent.look()
    assert other.asked == asked
    case.clock_ns += LEASE_TTL_S * 1_000_000_000
    case.agent.look()
    assert led.is_fenced, "it confirmed too long ago"
    other.confirmed = case.clock_ns
    case.agent._lease.look_at_fenced(case.clock_ns)
    assert not led.is_fenced
    case.agent.look()
    asked = other.asked
    case.agent.look()
    assert other.asked == asked
    case.clock_ns += LEASE_TTL_S * 1_000_000_000
    case.agent.look()
    assert led.is_fenced


def test_a_new_member_has_to_confirm_at_once(case: Case) -> None:
    case.settle()
    case.agent.look()
    assert not case.copy.led.is_fenced, "it has nobody to ask"
    Member(case, 0)
    case.agent.look()
    assert case.copy.led.is_fenced


def test_one_that_has_ended_is_fenced_at_once(case: Case) -> None:
    case.settle()
    case.agent.look()
    led = case.copy.led
    led.leading.ended(2)
    case.agent.look()
    assert led.is_fenced


# -- the disk ----------------------------------------------------------------------------------------------------------


def follow_b(partition_count: int = 1) -> Case:
    """Node ``a`` is in sync with what ``b`` leads."""
    case = Case(partition_count)
    case.settle()
    case.cluster.node(node("b"))
    for number in range(partition_count):
        case.cluster.partition("t", number, state("b", "ab", "ba", epoch=2, log_id=9 + number))
    case.hear()
    case.settle()
    assert all(copy.following is not None for copy in case.agent.table.copies.values())
    return case


def test_nothing_is_followed_while_the_disk_does_not_answer() -> None:
    """A copy to which nothing is published has everything: it would be in sync again at once."""
    case = follow_b()
    followings, leader, sync = case.agent._followings, Identity("c", "b", "b1", "boot b", False, 1), object()
    stream = Stream(1)
    found = followings.find(Open(1, "t", 0, 7, 9, 2), leader)
    assert found is case.copy.following
    found.open(stream, Open(1, "t", 0, 7, 9, 2))
    for _ in range(DISK_TICKS):
        case.agent._damaged.tick_disk(sync)
    assert found.stream is stream
    case.agent._damaged.tick_disk(sync)
    assert found.stream is None and stream.heard[-1] == (Refusal.NOT_HERE, DISK_IS_DEAD)
    assert followings.find(Open(2, "t", 0, 7, 9, 2), leader)[::2] == (Refusal.NOT_HERE, DISK_IS_DEAD)
    case.cluster.partition("t", 0, state("b", "b", "ba", epoch=2))
    case.hear()
    case.settle()
    assert followings.find(Open(3, "t", 0, 7, 9, 2), leader)[::2] == (Refusal.BROKEN, DISK_IS_DEAD), "nor may it lead"
    case.agent._damaged.tick_disk(object())
    assert followings.find(Open(4, "t", 0, 7, 9, 2), leader) is case.copy.following, "it answers again"


def break_all(case: Case, error: Exception, times: int) -> None:
    """Each leader has what it sends refused, and tries again, so often."""
    for _ in range(times):
        for copy in case.agent.table.copies.values():
            copy.following.broken = error
        for _ in range(SWEEP_TICKS):
            case.agent._settling.tick()
        case.loop.turn()
        assert all(copy.following.broken is None for copy in case.agent.table.copies.values())


def test_copies_that_find_no_room_are_told_of_once_and_again_when_one_was_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    case, told = follow_b(3), "could not be written: disk full"
    break_all(case, DiskFull("a segment", 1, 2), 5)
    assert caplog.text.count(told) == 1, "one of three copies is named"
    written = case.copy.following
    case.agent._followings.appended(SimpleNamespace(take_appended=lambda: [written]))
    break_all(case, DiskFull("a segment", 1, 2), 5)
    assert caplog.text.count(told) == 2 and caplog.text.count(f"t/0: the copy here {told}") == 2


def test_each_copy_that_cannot_be_written_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    case = follow_b(3)
    break_all(case, WriteFailed("a segment", "Input/output error"), 5)
    for number in range(3):
        assert caplog.text.count(f"t/{number}: the copy here could not be written: ") == 1
    break_all(case, DiskFull("a segment", 1, 2), 1)
    assert caplog.text.count("could not be written: disk full") == 1, "it is another reason"


def test_a_node_names_the_cluster_of_its_data_directory_before_it_has_heard_the_store(case: Case) -> None:
    case.agent._belonging.cluster_id = "of the directory"
    assert case.agent.view.cluster is None
    assert case.agent._identity().cluster_id == "of the directory"


# -- the store is another one, or older --------------------------------------------------------------------------------


def test_a_directory_with_copies_that_the_store_does_not_know_takes_no_part(case: Case) -> None:
    case.settle()
    assert case.copy.replica is not None
    refused: list[Exception] = []
    case.agent.on_refused = refused.append
    case.agent._mark._count = 1  # it was one of a cluster before there was cluster.id
    case.cluster = World()
    case.cluster.put(KEYS.record, ClusterRecord("c"))
    for _ in range(2):
        case.agent._take(case.agent.view.feed(case.cluster.store.range(KEYS.all)), True)
    case.settle()
    assert case.copy.replica is not None and not list(case.broker.files.list("set-aside"))
    assert len(refused) == 1 and "knows neither this node" in str(refused[0])
    assert not case.agent._has_cluster.is_set()


def test_a_directory_from_before_it_kept_its_cluster_belongs_to_the_store_that_knows_it(case: Case) -> None:
    case.settle()
    case.agent._mark._count = 1
    case.cluster.put(KEYS.record, ClusterRecord("c"))
    case.hear()
    assert case.agent._has_cluster.is_set()


def test_a_copy_that_was_set_aside_is_not_begun_anew_by_who_is_in_sync(case: Case) -> None:
    case.settle()
    other = state("a", "a", epoch=1, incarnation=case.agent.incarnation, log_id=10)
    case.cluster.partition("t", 0, other)
    case.hear()
    case.settle()
    assert list(case.broker.files.list("set-aside")) and case.copy.replica.log_id == 10

    async def txn(asked: Txn) -> Any:
        return case.cluster.store.apply(asked)

    case.store.txn = txn
    case.elect(2)
    case.hear()
    case.settle()
    assert case.copy is None, "no empty one is made"
    asyncio.run(case.loop.begun[-1])
    pair = case.cluster.store.get(KEYS.partition("t", 0))
    assert pair is not None
    now = decode(pair.key, pair.value, PartitionState)
    assert not now.leader and has_lost(now.in_sync[0]) and now.in_sync_nodes == ("a",)
    case.hear()
    case.settle()
    assert case.copy is None


def test_it_is_said_whether_others_have_taken_over() -> None:
    assert handed_over(3, 0, 0.25) == "others have taken over all of them in 0.250 s"
    assert handed_over(3, 2, 0.703).startswith("others have not taken over 2 of 3 partitions in 0.703 s")
