"""The sink at real nsqds that nsqlookupd lists: one that dies is listed no more, and its rows are not stored again."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StringType, StructField, StructType
from tests.spark.fake_lookupd import FakeLookupd
from tests.spark.processes import NsqdProcess
from tests.spark.test_sink_once import bodies, short_pauses, stored

from flintmq.errors import ConnectionFailed, DiscoveryError, FlintError, OptionError
from flintmq.spark import sink
from flintmq.spark.broker import POOL
from flintmq.spark.errors import LogAway
from flintmq.spark.identity import EPOCH_PROPERTY, QUERY_ID_PROPERTY
from flintmq.spark.options import SinkOptions
from flintmq.spark.sink import NsqStreamWriter, NsqWriter, Published

__all__ = ["short_pauses"]

BODY = StructType([StructField("body", BinaryType())])
TOPIC_AND_BODY = StructType([StructField("topic", StringType()), *BODY.fields])
NOT_ONCE = "delivery='once' is not allowed; topic {} {}, and nsqlookupd.* does not tell of an nsqd that is away"


class World:
    """Two nsqds, and a nsqlookupd that lists those of them that it is told to."""

    def __init__(self, directory: Path, lookupd: FakeLookupd, topic: str) -> None:
        self.nsqds = sorted((NsqdProcess(directory / name) for name in "ab"), key=lambda each: each.address)
        self.lookupd = lookupd
        self.topic = topic
        self.task = 0
        self.by_column = False

    def create(self, *nsqds: NsqdProcess, partitions: int = 0) -> None:
        more = f"&partition_num={partitions}" if partitions else ""
        for nsqd in nsqds:
            nsqd.post(f"/topic/create?topic={self.topic}{more}")

    def list(self, *nsqds: NsqdProcess, has_topic: bool = True) -> None:
        producers = [
            {"broadcast_address": "127.0.0.1", "tcp_port": int(nsqd.address.rpartition(":")[2])} for nsqd in nsqds
        ]
        self.lookupd.answers = {"/nodes": {"producers": producers}}
        if has_topic and producers:
            self.lookupd.answers[f"/lookup?topic={self.topic}"] = {"producers": producers}

    def options(self, **more: str) -> SinkOptions:
        topic = {} if self.by_column else {"topic": self.topic}
        return SinkOptions.parse({"lookupd": self.lookupd.address, "delivery": "once", "retries": "1", **topic, **more})

    def dies(self, nsqd: NsqdProcess) -> None:
        """nsqlookupd drops it with its connection."""
        nsqd.kill()
        self.list(*(each for each in self.nsqds if each is not nsqd))
        POOL._idle.clear()

    def write(self, writer: Any, first: int, end: int, task: int = 0) -> Published:
        """One try of a task, as an executor makes it: from what was pickled on the driver."""
        self.task = task
        rows = {"body": pa.array(bodies(first, end), pa.binary())}
        if self.by_column:
            rows = {"topic": pa.array([self.topic] * (end - first)), **rows}
        done = pickle.loads(pickle.dumps(writer)).write(iter([pa.record_batch(rows)]))
        assert isinstance(done, Published)
        return done

    def count(self, nsqd: NsqdProcess) -> int:
        return len(stored(nsqd.address, self.topic, "body"))


@pytest.fixture
def world(tmp_path: Path, topic: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with FakeLookupd() as lookupd:
        made = World(tmp_path, lookupd, topic)
        context = SimpleNamespace(
            partitionId=lambda: made.task,
            getLocalProperty={QUERY_ID_PROPERTY: "573b3fdc-6257", EPOCH_PROPERTY: "4"}.get,
        )
        monkeypatch.setattr(sink, "TaskContext", SimpleNamespace(get=lambda: context))
        try:
            yield made
        finally:
            for nsqd in made.nsqds:
                nsqd.stop()


@pytest.mark.parametrize("how", ["option", "column", "new topic"])
@pytest.mark.parametrize("delivery", ["once", "auto"])
def test_a_task_is_repeated_while_its_nsqd_is_away(world: World, how: str, delivery: str):
    first, second = world.nsqds
    if how != "new topic":
        world.create(first, second)
    world.list(first, second, has_topic=how != "new topic")
    world.by_column = how == "column"
    writer = NsqWriter(world.options(delivery=delivery), TOPIC_AND_BODY if how == "column" else BODY, False)
    assert world.write(writer, 0, 100, task=1).is_once
    assert world.count(second) == 100, "the second task's turn"
    world.dies(second)
    if how == "new topic":
        world.list(first, has_topic=False)
    if delivery == "once":
        for _ in range(2):
            with pytest.raises(ConnectionFailed, match=second.address):
                world.write(writer, 0, 100, task=1)
        if how != "new topic":
            assert world.count(first) == 0
    else:
        done = world.write(writer, 0, 100, task=1)
        assert (done.is_once, done.messages) == (False, {world.topic: 100}), "it goes on, and says so"
        assert world.count(first) == 100
    assert world.write(writer, 100, 150, task=2).is_once, "the turn of the other one"
    second.start()
    world.list(first, second)
    again = Counter(body for nsqd in world.nsqds for (body,) in stored(nsqd.address, world.topic, "body"))
    assert set(again) == set(bodies(0, 150))
    assert max(again.values()) == (1 if delivery == "once" else 2)
    if delivery == "once":
        assert world.write(writer, 0, 100, task=1).is_once
        assert world.count(second) == 100, "known there"


def test_no_task_goes_to_an_nsqd_that_came_later(world: World):
    """It may be gone when the task is repeated, and nobody would know."""
    first, second = world.nsqds
    world.create(first)
    world.list(first)
    writer = NsqWriter(world.options(), BODY, False)
    world.create(second)
    world.list(first, second)
    for task in range(2):
        assert world.write(writer, 100 * task, 100 * task + 100, task).is_once
    assert (world.count(first), world.count(second)) == (200, 0)


@pytest.mark.parametrize("kind", ["stream", "writeId"])
def test_once_is_refused_where_a_repeat_would_not_know_of_an_nsqd(world: World, kind: str):
    first, second = world.nsqds

    def writer(**more: str) -> Any:
        if kind == "stream":
            return NsqStreamWriter(world.options(**more), BODY, False)
        return NsqWriter(world.options(writeId="load-7", **more), BODY, False)

    world.create(first, second)
    world.list(first, second)
    with pytest.raises(OptionError, match=NOT_ONCE.format(world.topic, "has no partitions")) as refused:
        world.write(writer(), 0, 100)
    assert "name its nsqds with nsqd=" in str(refused.value) and "delivery=auto" in str(refused.value)
    assert world.count(first) + world.count(second) == 0
    assert world.write(writer(delivery="auto"), 0, 100).is_once, "as no nsqd was missed"


def test_once_with_partitions_that_no_cluster_keeps(world: World):
    """At one nsqd, nobody else has them; at two, one of them may be away unknown when a micro-batch is repeated."""
    first, second = world.nsqds
    world.create(first, partitions=2)
    world.list(first)
    for _ in range(2):
        assert world.write(NsqStreamWriter(world.options(), BODY, False), 0, 100).is_once
    assert world.count(first) == 100
    world.create(second, partitions=2)
    world.list(first, second)
    what = f"has partition ., which no cluster keeps, at {first.address} and {second.address}"
    with pytest.raises(OptionError, match=NOT_ONCE.format(world.topic, what)):
        world.write(NsqStreamWriter(world.options(), BODY, False), 0, 100)

    # within one write it is known
    writer = NsqWriter(world.options(), BODY, False)
    assert world.write(writer, 200, 300).is_once
    assert (world.count(first), world.count(second)) == (100, 100)
    world.dies(second)
    for _ in range(2):
        with pytest.raises(LogAway, match=f"nsqd {second.address} is away"):
            world.write(writer, 200, 300)
    assert world.count(first) == 100
    # a micro-batch whose only nsqd is gone is not put into a new topic elsewhere
    world.lookupd.answers.pop(f"/lookup?topic={world.topic}")
    first.post(f"/topic/delete?topic={world.topic}")
    with pytest.raises(OptionError, match="has no partitions"):
        world.write(NsqStreamWriter(world.options(), BODY, False), 0, 100)


def test_the_driver_asks_once_and_does_without_an_answer(world: World):
    first, _ = world.nsqds
    world.create(first)
    world.list(first)
    for kind in (NsqWriter, NsqStreamWriter):
        world.lookupd.asked.clear()
        kind(world.options(), BODY, False)
        assert world.lookupd.asked == [f"/lookup?topic={world.topic}"]
    world.lookupd.asked.clear()
    NsqWriter(world.options(delivery="atLeastOnce"), BODY, False)
    NsqWriter(SinkOptions.parse({"nsqd": first.address, "topic": world.topic}), BODY, False)
    assert world.lookupd.asked == []

    world.lookupd.answers = dict.fromkeys(("/nodes", f"/lookup?topic={world.topic}"), b"broken")
    writer, auto = (NsqWriter(world.options(delivery=each), BODY, False) for each in ("once", "auto"))
    for each in (writer, auto):
        with pytest.raises(DiscoveryError, match="no nsqlookupd answers"):
            world.write(each, 0, 10)
    world.list(first)
    assert world.write(auto, 0, 10).is_once
    with pytest.raises(OptionError, match="has no partitions, and nsqlookupd, which named none when the write began"):
        world.write(writer, 0, 10)
    secret = {"lookupd": "https://127.0.0.1:1", "nsqlookupdToken": "env:NOT_HERE"}
    for options in (world.options(lookupd="127.0.0.1:1"), world.options(**secret)):
        with pytest.raises(FlintError):
            world.write(NsqWriter(options, BODY, False), 0, 10)
