"""A node's part in a cluster, on a real broker: what becomes of a partition when something fails on the way."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.broker.test_replicas import World as BrokerWorld
from tests.unit.cluster.models import KEYS, World, member, node, state

from flintmq.cluster.state import LEASE_TTL_S
from flintmq.cluster.store import Span
from flintmq.errors import StorageError
from flintmq.nsqd.cluster.agent import Agent

PARTITION = ("t", 0)


class Loop:
    """Calls back when the test says so, whatever the time."""

    def __init__(self) -> None:
        self.due: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def call_soon(self, call: Callable[..., None], *args: Any) -> None:
        self.due.append((call, args))

    def call_later(self, _delay_s: float, call: Callable[..., None], *args: Any) -> Any:
        self.due.append((call, args))
        return SimpleNamespace(cancel=lambda: None)

    def turn(self) -> None:
        due, self.due = self.due, []
        for call, args in due:
            call(*args)


class Case:
    """Node ``a`` with a partition of which it is the only holder, and a store that it follows step by step."""

    def __init__(self) -> None:
        self.broker = BrokerWorld()
        self.cluster = World()
        self.loop = Loop()
        nothing = SimpleNamespace(look_up_again=lambda: None)
        engine: Any = SimpleNamespace(
            broker=self.broker.broker,
            durability=SimpleNamespace(waits_for_syncs=False),
            loop=self.loop,
            schedule=lambda: None,
            sync_soon=lambda log: None,
        )
        store: Any = None
        clients: Any = nothing
        self.clock_ns = 10**15
        env: Any = SimpleNamespace(clock=SimpleNamespace(monotonic_ns=lambda: self.clock_ns), random=random.Random(1))
        self.agent: Any = Agent(
            env, engine, store, KEYS, "a", "boot a", b"", clients, lambda topic: None, lambda topic, meta: True
        )
        link = SimpleNamespace(add=lambda leading: None, remove=lambda topic, number: None)
        peers: Any = SimpleNamespace(link=lambda node: link, links=list, nodes_changed=lambda: None)
        self.agent._peers = peers
        self.agent._record = node("a", incarnation=self.agent.incarnation)
        self.cluster.node(self.agent._record)
        self.cluster.topic("t")
        self.elect(1)
        self.agent._take(self.agent.view.feed(self.cluster.store.range(KEYS.all)), True)

    def elect(self, epoch: int, replicas: str = "a", in_sync: str = "a") -> None:
        incarnation = self.agent.incarnation
        self.cluster.partition("t", 0, state("a", in_sync, replicas, epoch=epoch, incarnation=incarnation))

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
        return self.agent._copies.get(PARTITION)


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
    begin, tries = case.broker.broker.replicas._adoption.begin, 0

    def fail(*args: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise StorageError("disk")
        return begin(*args)

    monkeypatch.setattr(case.broker.broker.replicas._adoption, "begin", fail)
    case.settle()
    assert tries == 3 and case.copy.led is not None and case.copy.replica.history == [(1, 1)]


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


def test_what_the_store_says_of_a_partition_while_it_is_promoted_is_known(case: Case) -> None:
    until_it_notes(case, 1)
    case.elect(1, replicas="ab")
    case.hear()
    case.settle()
    assert case.copy.led.leading.state.replicas == ("a", "b")


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


def test_what_followers_confirm_is_not_asked_every_turn(case: Case) -> None:
    case.settle()
    other = Member(case, case.clock_ns)
    for _ in range(5):
        case.agent.look()
        case.agent._look_at_fenced(case.clock_ns)
    asked, led = other.asked, case.copy.led
    assert asked and not led.is_fenced
    for _ in range(100):
        case.agent.look()
    assert other.asked == asked
    case.clock_ns += LEASE_TTL_S * 1_000_000_000
    case.agent.look()
    assert led.is_fenced, "it confirmed too long ago"
    other.confirmed = case.clock_ns
    case.agent._look_at_fenced(case.clock_ns)
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
