"""A topic that the cluster does not take is told of, and given again after pauses that grow to a bound."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flintmq.broker.partition import Ended
from flintmq.cluster.view import Fate
from flintmq.net.tasks import Tasks
from flintmq.nsqd.cluster.alone import AGAIN_S, AGAIN_S_MAX, Alone
from flintmq.nsqd.cluster.bringing import Double, NotBrought
from flintmq.topic_meta import PLAIN, TopicMeta

_SECOND = 1_000_000_000


class Room:
    """A node with topics of its own, and a cluster that takes one or does not."""

    def __init__(self, **metas: TopicMeta) -> None:
        self.now_ns = 0
        self.reason = "the store is full"
        self.kind = NotBrought
        self.given: list[tuple[str, float]] = []
        self.told = 0
        self.topics = {name: SimpleNamespace(name=name, meta=meta, ephemeral=False) for name, meta in metas.items()}
        self.taken: set[str] = set()
        self._loop = asyncio.new_event_loop()
        replicas: Any = SimpleNamespace(of_topic=lambda name: name in self.taken)
        engine: Any = SimpleNamespace(broker=SimpleNamespace(topics=self.topics, replicas=replicas))
        clock: Any = SimpleNamespace(monotonic_ns=lambda: self.now_ns)
        usable = Ended()
        usable.end(None)
        self.has_begun = False
        bringing: Any = SimpleNamespace(bring=self._bring, has_begun=lambda _: self.has_begun)
        wishes: Any = SimpleNamespace(ask=lambda _: usable)
        nothing = cast(Any, None)
        self.deleted: set[int] = set()
        self.view: Any = SimpleNamespace(
            topics={}, fate=lambda _, number: Fate.DELETED if number in self.deleted else Fate.UNKNOWN
        )
        self.alone = Alone(
            clock, engine, cast(Any, self.view), nothing, bringing, wishes, nothing, nothing, nothing,
            Tasks(self._loop), self._tell,
        )  # fmt: skip

    async def _bring(self, topic: str) -> None:
        self.given.append((topic, self.now_ns / _SECOND))
        if self.reason:
            raise self.kind(topic, self.reason)
        self.taken.add(topic)

    def _tell(self) -> None:
        self.told += 1

    def run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)

    def pass_s(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_ns += _SECOND
            self.alone.tick()
            self.run(asyncio.sleep(0))
            self.run(asyncio.sleep(0))

    def close(self) -> None:
        self._loop.close()


def test_what_is_not_taken_is_given_again_ever_more_rarely_until_it_is(caplog: pytest.LogCaptureFixture) -> None:
    room = Room(parts=TopicMeta(partition_num=2))
    room.run(room.alone.bring_all())
    assert room.alone.kept() == [("parts", "the store is full")] and room.told == 1
    room.pass_s(400)
    times = [at for _, at in room.given]
    pauses = [after - before for before, after in pairwise(times)]
    assert pauses[:3] == [AGAIN_S, 2 * AGAIN_S, 4 * AGAIN_S] and pauses[-1] == AGAIN_S_MAX == max(pauses)
    assert room.told == 1 and caplog.text.count("stays this node's alone") == 1, "for each reason once"
    room.reason = "the store is away"
    room.pass_s(int(AGAIN_S_MAX))
    assert room.alone.kept() == [("parts", "the store is away")] and room.told == 2
    assert caplog.text.count("it is given again by itself") == 2
    room.reason = ""
    room.pass_s(int(AGAIN_S_MAX))
    assert room.alone.kept() == [] and room.told == 3 and room.taken == {"parts"}
    count = len(room.given)
    room.pass_s(int(2 * AGAIN_S_MAX))
    assert len(room.given) == count
    room.close()


def test_one_that_is_deleted_here_is_forgotten() -> None:
    room = Room(parts=TopicMeta(partition_num=2))
    room.run(room.alone.bring_all())
    del room.topics["parts"]
    room.pass_s(1)
    assert room.alone.kept() == [] and room.told == 2
    room.close()


def test_one_that_was_deleted_in_the_cluster_when_half_of_it_was_there_does_not_come_back_by_itself() -> None:
    room = Room(parts=TopicMeta(partition_num=200))
    room.view.topics["parts"], room.has_begun = SimpleNamespace(number=7), True
    room.run(room.alone.bring_all())
    del room.view.topics["parts"]
    room.deleted, room.has_begun, room.reason = {7}, False, ""
    room.pass_s(400)
    assert room.given == [("parts", 0.0)] and not room.taken
    [(topic, reason)] = room.alone.kept()
    assert topic == "parts" and "there it was deleted" in reason and "topic delete parts" in reason
    room.run(room.alone.bring("parts"))
    assert room.taken == {"parts"} and room.alone.kept() == []
    room.close()


def test_one_whose_store_has_forgotten_it_is_given_again() -> None:
    room = Room(parts=TopicMeta(partition_num=200))
    room.view.topics["parts"], room.has_begun = SimpleNamespace(number=7), True
    room.run(room.alone.bring_all())
    del room.view.topics["parts"]
    room.has_begun, room.reason = False, ""
    room.pass_s(10)
    assert room.taken == {"parts"}
    room.close()


def test_a_plain_topic_that_an_operator_gave_in_vain_stays_what_it_was() -> None:
    room = Room(plain=PLAIN)
    room.alone.bring_soon("plain")
    room.run(asyncio.sleep(0))
    room.pass_s(100)
    assert room.given == [("plain", 0.0)] and room.alone.kept() == [] and room.told == 0
    room.close()


@pytest.mark.parametrize("meta", [PLAIN, TopicMeta(partition_num=2)], ids=["plain", "partitions"])
def test_one_that_the_cluster_has_as_well_is_refused_until_it_has_it_no_more(meta: TopicMeta) -> None:
    """Also while the store is away: what is published to it here would be lost when it is deleted, as is advised."""
    room = Room(both=meta)
    room.view.topics["both"] = "another one"
    room.kind, room.reason = Double, "delete it here, or there"
    room.alone.bring_soon("both")
    room.run(asyncio.sleep(0))
    assert room.alone.why_refused("both") == "delete it here, or there"
    room.kind, room.reason = NotBrought, "the store is away"
    room.pass_s(400)
    assert room.alone.why_refused("both") == "delete it here, or there"
    del room.view.topics["both"]
    room.pass_s(1)
    assert not room.alone.why_refused("both")
    room.close()
