"""The sink without Spark at a real cluster: topics that are not there yet, and those that have no partitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.integration.daemons import Cluster, running_cluster
from tests.integration.flavours import address_of
from tests.spark import test_sink_once
from tests.spark.processes import NsqdProcess
from tests.spark.test_sink_once import HEADERS, Crash, Killed, bodies, stored, task

from flintmq.errors import FlintError, OptionError, PublishRefused
from flintmq.pipeline.replay import replay
from flintmq.spark import placing, sink
from flintmq.spark.broker import POOL
from flintmq.spark.identity import TaskIdentity
from flintmq.spark.sink import Published

LOGS = 2
"""Of a topic that is made by publishing; a node of three leads none of them."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("cluster")
    with running_cluster(directory, lookupd_flags=[f"--default-partitions={LOGS}"]) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def nothing_noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(placing, "_others", {})
    monkeypatch.setattr(placing, "_given_up", {})
    yield
    POOL._idle.clear()


@pytest.fixture
def nodes(cluster: Cluster) -> list[str]:
    """The addresses of all nodes."""
    return [address_of(node.tcp) for node in cluster.nodes]


def write(address: str, topic: str, columns: dict[str, Any], identity: TaskIdentity, **more: str) -> Published:
    """As at one nsqd, with time enough for a cluster to make a topic, and for its leaders to be ready."""
    return test_sink_once.write(address, topic, columns, identity, **{"retries": "20", **more})


def made_with(cluster: Cluster, topic: str) -> int:
    """How many logs a topic has; 0: it is not there."""
    (row,) = cluster.status(topic)["topics"]
    return int(row.get("partition_num", 0))


@pytest.mark.parametrize(
    ("how", "delivery"),
    [("nsqd", "auto"), ("nsqd", "once"), ("nsqd", "atLeastOnce"), ("lookupd", "auto"), ("lookupd", "atLeastOnce")],
)
def test_a_topic_that_is_not_there_is_made(cluster: Cluster, nodes: list[str], topic: str, how: str, delivery: str):
    """With the same places as if it had been there, so a task that is run again stores nothing twice."""
    where = nodes[0] if how == "nsqd" else f"lookupd={address_of(cluster.nsqlookupd.http)}"
    columns: dict[str, Any] = {"body": bodies(0, 300)}
    if delivery == "atLeastOnce":
        columns["defer_ms"] = pa.array([0] * 300, pa.int32())  # such rows are placed, others are just published
    for number in range(LOGS):
        for _ in range(1 if delivery == "atLeastOnce" else 2):
            done = write(where, topic, columns, task(0, number), delivery=delivery)
            assert done.messages == {topic: 300} and done.is_once == (delivery != "atLeastOnce")
    assert made_with(cluster, topic) == LOGS
    found = stored(nodes[0], topic)
    assert Counter(body for _, body in found) == Counter(2 * bodies(0, 300))
    if delivery != "atLeastOnce":
        assert Counter(number for number, _ in found) == {0: 300, 1: 300}, "each task has its turn"


def test_topics_that_come_up_in_a_row(cluster: Cluster, nodes: list[str], topic: str):
    names = [f"{topic}-{number}" for number in range(3)]
    rows = {"body": bodies(0, 300), "topic": [names[number % 3] for number in range(300)]}
    for _ in range(2):
        write(",".join(nodes), topic, rows, task(3, 1))
    for first, name in enumerate(names):
        assert [body for _, body in stored(nodes[0], name)] == bodies(0, 300)[first::3]


def test_killed_between_any_two_calls(cluster: Cluster, nodes: list[str], topic: str, monkeypatch):
    """While the topic is being made, and behind that: the task is run again, and each row is stored once."""
    monkeypatch.setattr(sink, "SEGMENT_BYTES", 300)
    crash = Crash(monkeypatch)
    at, has_finished = 1, False
    while not has_finished:
        name = f"{topic}-{at}"
        crash.count, crash.at = 0, at
        try:
            write(nodes[at % 3], name, {"body": bodies(0, 120)}, task(0, at))
            has_finished = True
        except Killed:
            POOL._idle.clear()
        crash.at = -1
        write(nodes[0], name, {"body": bodies(0, 120)}, task(0, at))
        assert [body for _, body in stored(nodes[0], name)] == bodies(0, 120), at
        at += 1
    assert at > 10


def test_a_topic_that_is_made_between_the_look_and_the_first_message(
    cluster: Cluster, nodes: list[str], topic: str, monkeypatch
):
    """Where that was stored, the rest is, and what is published again."""
    cluster.nsqlookupd.post(f"/topic/create?topic={topic}")
    leader = address_of(cluster.leader_of_plain(topic, 1).tcp)
    ask = placing.Placing._ask
    asked: list[str] = []

    def when_it_was_not_there(self: Any, address: str, name: str, found: Any) -> Any:
        asked.append(address)
        if len(asked) > 1:
            return ask(self, address, name, found)
        found.without_topic.append(address)
        return None

    with monkeypatch.context() as before:
        before.setattr(placing.Placing, "_ask", when_it_was_not_there)
        write(leader, topic, {"body": bodies(0, 100)}, task())
    assert stored(nodes[0], topic) == [(1, body) for body in bodies(0, 100)]
    write(nodes[0], topic, {"body": bodies(0, 200)}, task())
    found = Counter(stored(nodes[0], topic))
    assert {number for number, _ in found} == {1}
    cluster.expand(topic, LOGS + 1)
    write(nodes[0], topic, {"body": bodies(0, 200)}, task())
    assert Counter(stored(nodes[0], topic)) == found


def test_what_needs_partitions_makes_no_topic(cluster: Cluster, nodes: list[str], topic: str, caplog):
    for column, value, said in (
        ("key", ["k"], "has no partitions: leave out the column key, or create it with some"),
        ("partition", [1], "has no partitions: leave out the column partition, or create it with some"),
        ("trace_id", [5], f"rows with a trace_id make no topic: flintmq topic create {topic} --partitions=N"),
        ("headers", pa.array([[("x", "y")]], HEADERS), "rows with headers make no topic: create it with extend=true"),
    ):
        with pytest.raises(PublishRefused, match=said):
            write(nodes[0], topic, {"body": [b"a"], column: value}, task())
    assert made_with(cluster, topic) == 0
    assert "attempt" not in caplog.text, "it is said at once"
    write(nodes[0], topic, {"body": [b"a"]}, task())
    with pytest.raises(PublishRefused, match="has no partitions: leave out the column key"):
        write(nodes[0], topic, {"body": [b"a"], "key": ["k"]}, task())


def test_a_topic_with_partitions_is_told_from_one_without(cluster: Cluster, nodes: list[str], topic: str):
    cluster.create(topic, LOGS)
    write(nodes[0], topic, {"body": bodies(0, 4), "partition": [0, 1, 1, 0]}, task())
    expected = [(0, b"000000"), (0, b"000003"), (1, b"000001"), (1, b"000002")]
    assert sorted(stored(nodes[0], topic)) == expected


def test_where_publishing_makes_no_topics(tmp_path: Path, topic: str, caplog):
    """It is said at once, and what to do."""
    nsqd = NsqdProcess(tmp_path / "data", "os", "--auto-create-topics=false")
    try:
        with pytest.raises(PublishRefused, match=f"flintmq topic create {topic} --partitions=N") as refused:
            write(nsqd.address, topic, {"body": bodies(0, 100)}, task())
        assert refused.value.code == "E_TOPIC_NOT_EXIST"
        assert "attempt" not in caplog.text
    finally:
        nsqd.stop()


def test_a_replay_to_a_topic_that_is_not_there(cluster: Cluster, nodes: list[str], topic: str, tmp_path: Path):
    """The dry run says that it is to be made, and makes none; of what the run refuses it says so."""
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"body": bodies(0, 100), "key": ["k"] * 100, "headers": ['{"a": "b"}'] * 100}), path)
    given: dict[str, Any] = {"nsqd": ",".join(nodes), "topic": topic}
    plan = replay(path, dry_run=True, **given)
    assert plan.rows == 100 and plan.topic.startswith("it is not there: nsqd 127.0.0.1:")
    assert made_with(cluster, topic) == 0
    first = replay(path, **given)
    assert (first.rows, first.found, first.is_once) == (100, 0, True)
    assert [body for _, body in stored(nodes[0], topic)] == bodies(0, 100)
    assert replay(path, **given).found == 100
    plan = replay(path, dry_run=True, **given)
    assert plan.topic == f"{LOGS} logs in a cluster" and plan.targets.total() == 100
    for more, said in (({"key": "key"}, "has no partitions"), ({"keep": ["headers"]}, "has no headers")):
        for is_dry in (True, False):
            with pytest.raises((OptionError, FlintError), match=said if is_dry else None):
                replay(path, dry_run=is_dry, write_id="other", **more, **given)


def test_the_wait_for_a_topic_ends(cluster: Cluster, nodes: list[str], topic: str, monkeypatch):
    """With the answer of nsqd, behind as many tries as the option allows."""
    write(nodes[0], topic, {"body": [b"a"]}, task())
    leaders = [cluster.leader_of_plain(topic, number) for number in range(LOGS)]
    (other,) = (address_of(node.tcp) for node in cluster.nodes if node not in leaders)
    looked: list[str] = []

    def is_nowhere(_self: Any, address: str, _topic: str, found: Any) -> None:
        looked.append(address)
        found.without_topic.append(address)

    monkeypatch.setattr(placing.Placing, "_ask", is_nowhere)
    with pytest.raises(FlintError, match=f"E_FAILED_ON_NOT_LEADER MPUB_ONCE topic {topic} is led by other nodes"):
        write(other, topic, {"body": [b"b"]}, task(), retries="2")
    assert looked == [other] * 3
