"""A topic that clients want is asked for once, and everybody is told what became of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.cluster.models import KEYS, Master, World, node

from flintmq.cluster.state import WantedTopic
from flintmq.cluster.store import StoreUnavailable, Txn
from flintmq.cluster.view import View
from flintmq.nsqd.cluster import wishes as module
from flintmq.nsqd.cluster.wishes import TopicNotMade, Wishes


class Case:
    """Node ``a`` that asks, a store, and a master who answers when told to."""

    def __init__(self) -> None:
        self.world = World()
        self.world.nodes("abc")
        self.master = Master(self.world)
        self.view = View(KEYS)
        self.txn_count = 0
        self.failures = 0
        self.hear()
        env: Any = SimpleNamespace(random=random.Random(1))
        self.wishes = Wishes(env, "a", KEYS, self.view, self, self._lease, self.is_usable)  # type: ignore[arg-type]

    async def txn(self, request: Txn) -> Any:
        self.txn_count += 1
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("it is away")
        return self.world.store.apply(request)

    async def _lease(self) -> int:
        return 0

    def is_usable(self, topic: str) -> bool:
        return (topic, 0) in self.view.partitions

    def hear(self) -> None:
        self.view.feed(self.world.store.range(KEYS.all))

    async def turn(self, count: int = 10) -> None:
        """Let everybody do what is ready, and hear of it."""
        for _ in range(count):
            await asyncio.sleep(0)
            self.hear()
            self.wishes.look()


def run(scenario: Callable[[Case], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await scenario(Case())

    asyncio.run(main())


def test_many_who_want_a_topic_are_one_question():
    async def scenario(case: Case) -> None:
        asked = [case.wishes.ask("t") for _ in range(50)]
        await case.turn()
        assert case.txn_count == 1 and case.world.wish("t") is not None
        assert not any(each.ended for each in asked)
        case.master.settle()
        await case.turn()
        assert all(each.ended and each.error is None for each in asked)
        assert case.world.wish("t") is None and case.txn_count == 1

    run(scenario)


def test_one_that_another_node_asks_for_is_waited_for():
    async def scenario(case: Case) -> None:
        case.world.put(KEYS.wanted("t"), WantedTopic(7, "b"))
        case.hear()
        asked = case.wishes.ask("t")
        await case.turn()
        assert case.txn_count == 0
        case.world.delete(KEYS.wanted("t"))  # node b is gone before the master saw it
        await case.turn()
        assert case.txn_count == 1
        case.master.settle()
        await case.turn()
        assert asked.ended and asked.error is None

    run(scenario)


def test_a_refusal_is_told_to_all_and_asked_anew_by_the_next():
    async def scenario(case: Case) -> None:
        for name in "abc":
            case.world.node(node(name, is_draining=True))
        asked = [case.wishes.ask("t"), case.wishes.ask("t")]
        await case.turn()
        (why,) = case.master.settle()
        assert "no nsqd of the cluster takes partitions" in why
        await case.turn()
        for each in asked:
            assert isinstance(each.error, TopicNotMade) and "takes partitions" in str(each.error)
        case.world.nodes("abc")
        again = case.wishes.ask("t")
        await case.turn()
        case.master.settle()
        await case.turn()
        assert again.ended and again.error is None

    run(scenario)


def test_a_store_that_is_away_is_asked_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "AGAIN_S", 0.0)

    async def scenario(case: Case) -> None:
        case.failures = 3
        asked = case.wishes.ask("t")
        await case.turn(40)
        case.master.settle()
        await case.turn()
        assert asked.ended and asked.error is None

    run(scenario)


def test_who_waits_too_long_is_told_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MADE_WITHIN_S", 0.0)

    async def scenario(case: Case) -> None:
        asked = case.wishes.ask("t")
        while not asked.ended:
            await case.turn(1)
        assert isinstance(asked.error, TopicNotMade) and "nothing was stored" in str(asked.error)

    run(scenario)


def test_who_waits_when_the_node_ends_is_told_so():
    async def scenario(case: Case) -> None:
        asked = case.wishes.ask("t")
        await case.turn(2)
        await case.wishes.close()
        assert isinstance(asked.error, TopicNotMade) and "this node ends" in str(asked.error)

    run(scenario)
