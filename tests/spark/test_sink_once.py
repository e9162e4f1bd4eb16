"""The sink without Spark at a real nsqd: whatever a task is run again for, each row is stored once, in its place."""

from __future__ import annotations

import json
import logging
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)
from tests.spark.fake_nsqd import FakeNsqd
from tests.spark.processes import NsqdProcess

from flintmq.client.core.sharding import partition_of
from flintmq.errors import ConnectionFailed, NsqdError, OptionError, PublishRefused
from flintmq.spark import placing, retry, sink
from flintmq.spark.batch_reader import NsqReader
from flintmq.spark.broker import POOL, NsqdConnection
from flintmq.spark.errors import LogAway
from flintmq.spark.identity import TaskIdentity, base36, query_name
from flintmq.spark.options import SinkOptions, SourceOptions
from flintmq.spark.sink import NsqStreamWriter, NsqWriter, Published, RowWriter, check_columns

KINDS = {
    "body": BinaryType(),
    "partition": IntegerType(),
    "key": StringType(),
    "trace_id": LongType(),
    "headers": MapType(StringType(), StringType()),
    "headers_json": StringType(),
    "defer_ms": IntegerType(),
    "at": LongType(),
    "topic": StringType(),
}
HEADERS = pa.map_(pa.string(), pa.string())


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(retry, "PAUSE_MAX_S", 0.01)
    monkeypatch.setattr(placing, "_others", {})
    monkeypatch.setattr(placing, "_given_up", {})
    yield
    POOL._idle.clear()


def task(epoch: int = 0, number: int = 0, query: str = "query") -> TaskIdentity:
    return TaskIdentity(query, epoch, number)


def write(address: str, topic: str, columns: dict, identity: TaskIdentity, **more: str) -> Published:
    option, _, listed = address.rpartition("=")
    given = {option or "nsqd": listed, "retries": "3", "batchMessages": "40", **more} | (
        {} if "topic" in columns else {"topic": topic}
    )
    rows = pa.record_batch(dict(columns))
    schema = StructType([StructField(name, KINDS[name]) for name in columns])
    batches = [rows.slice(first, 50) for first in range(0, rows.num_rows, 50)]
    return RowWriter(SinkOptions.parse(given), schema).write(iter(batches), identity)


def stored(address: str, topic: str, columns: str = "partition,body") -> list[tuple]:
    """The rows of a topic, by partition and in their order there."""
    reader = NsqReader(SourceOptions.parse({"nsqd": address, "topic": topic, "columns": columns}))
    return [
        tuple(row.values()) for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()
    ]


def bodies(first: int, end: int, size: int = 0) -> list[bytes]:
    return [b"%06d" % number + b"." * size for number in range(first, end)]


class Killed(BaseException):
    """The process ends here."""


class Crash:
    """Ends the process at the ``at``-th thing that it does on the network, before it or behind it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.at = -1
        for name in ("send", "receive"):
            monkeypatch.setattr(NsqdConnection, name, self._counted(getattr(NsqdConnection, name)))

    def _counted(self, method):
        def call(connection, *arguments):
            self._step()
            result = method(connection, *arguments)
            self._step()
            return result

        return call

    def _step(self) -> None:
        self.count += 1
        if self.count == self.at:
            raise Killed


@pytest.mark.parametrize("partitions", [0, 3])
def test_killed_between_any_two_calls(nsqd: NsqdProcess, topic: str, monkeypatch, partitions):
    """Two tasks of an epoch, each killed anywhere and run again; then the epoch, because it was not committed."""
    monkeypatch.setattr(sink, "SEGMENT_BYTES", 500)
    crash = Crash(monkeypatch)
    columns = [{"body": bodies(first, first + 200), "key": [str(n % 17) for n in range(200)]} for first in (0, 200)]
    if not partitions:
        columns = [{"body": each["body"]} for each in columns]
    at, tries, finished = 1, 0, False
    while not finished:
        name = f"{topic}-{at}"
        if partitions:
            nsqd.post(f"/topic/create?topic={name}&partition_num={partitions}")
        else:
            nsqd.post(f"/topic/create?topic={name}")
        for _ in range(2):  # the second time as if the driver had died before it wrote its commit
            finished = True
            for number, rows in enumerate(columns):
                crash.count, crash.at = 0, at
                try:
                    write(nsqd.address, name, rows, task(7, number))
                except Killed:
                    finished, tries = False, tries + 1
                    crash.at = -1
                    POOL._idle.clear()
                    assert write(nsqd.address, name, rows, task(7, number)).repeated == 0
        crash.at = -1
        found = stored(nsqd.address, name)
        assert Counter(body for _, body in found) == Counter(bodies(0, 400)), f"killed at {at}"
        if partitions:
            where = {body: str(n % 17) for n, body in enumerate(bodies(0, 200))}
            assert all(partition_of(where[b], partitions) == number for number, b in found if b in where)
            per_partition = [[b for number, b in found if number == each and b in where] for each in range(partitions)]
            assert all(one == sorted(one) for one in per_partition), "in the order of the task"
        at += 1 if at < 12 else 7
    assert tries > 15


def test_nsqd_killed_and_slow_to_come_back(tmp_path: Path):
    process = NsqdProcess(tmp_path / "data", durability="fsync")
    try:
        writing = write(process.address, "t", {"body": bodies(0, 300)}, task())
        process.kill()
        with pytest.raises(ConnectionFailed):
            write(process.address, "t", {"body": bodies(0, 600)}, task(1), retries="1")
        process.start()
        POOL._idle.clear()
        again = write(process.address, "t", {"body": bodies(0, 300)}, task())
        write(process.address, "t", {"body": bodies(300, 600)}, task(1))
        assert (writing.messages, again.messages, writing.is_once) == ({"t": 300}, {"t": 300}, True)
        assert [body for _, body in stored(process.address, "t")] == bodies(0, 600)
    finally:
        process.stop()


def test_another_order_is_stored_again_and_never_lost(nsqd: NsqdProcess, topic: str, monkeypatch, caplog):
    """After a shuffle a task may get its rows in another order: sequences alone would take one row for another."""
    crash = Crash(monkeypatch)
    first, second = bodies(0, 200), bodies(100, 200) + bodies(0, 100)
    for rows, more in ((first, {}), (second, {}), (first, {"orderBy": "body"}), (second, {"orderBy": "body"})):
        crash.count, crash.at = 0, 9
        with pytest.raises(Killed):
            write(nsqd.address, topic, {"body": rows}, task(1 if more else 0), **more)
        crash.at = -1
        POOL._idle.clear()
    done = write(nsqd.address, topic, {"body": second}, task())
    counts = Counter(body for _, body in stored(nsqd.address, topic))
    assert set(counts) == set(first)
    assert done.repeated > 0 and max(counts.values()) == 3, "once of each order, and once sorted as far as it came"
    with caplog.at_level(logging.WARNING):
        NsqStreamWriter(
            SinkOptions.parse({"nsqd": "a:1", "topic": "t"}), StructType([StructField("body", BinaryType())]), False
        ).commit([done], 5)
    assert "micro-batch 5: at least once: up to" in caplog.text and "set orderBy" in caplog.text
    sorted_ones = write(nsqd.address, topic, {"body": second}, task(1), orderBy="body")
    assert sorted_ones.repeated == 0


@pytest.mark.parametrize("name", ["key", "headers", "headers_json"])
def test_a_segment_ends_at_the_text_of_any_column(nsqd: NsqdProcess, topic: str, monkeypatch, name):
    """Short bodies with long headers or keys are not gathered by their number alone."""
    monkeypatch.setattr(sink, "SEGMENT_TEXT_BYTES", 20_000)
    rows = combined_rows(monkeypatch)
    if name == "key":
        nsqd.post(f"/topic/create?topic={topic}&partition_num=3")
    else:
        nsqd.post(f"/topic/create?topic={topic}&extend=true")
    for size, segments in ((20, [400]), (250, [100] * 4)):  # in batches of 50
        text = [f"{number:06d}" + "x" * (size - 6) for number in range(400)]
        long = text
        if name == "headers":
            long = pa.array([[(each, "y" * size)] for each in text], HEADERS)
        elif name == "headers_json":
            long = [json.dumps({each: "y" * size}) for each in text]
        if name != "key" and size == 250:
            segments = [50] * 8
        rows.clear()
        done = write(nsqd.address, topic, {"body": bodies(0, 400), name: long}, task(size))
        assert done.messages == {topic: 400}
        assert rows == segments
    assert sorted(stored(nsqd.address, topic, "body")) == sorted([(body,) for body in bodies(0, 400)] * 2)


def test_a_column_longer_than_an_array_can_be(nsqd: NsqdProcess, topic: str, monkeypatch):
    """Arrow then leaves several batches where one was asked for: all of them are published, and once."""
    monkeypatch.setattr(sink, "_combined", list)
    nsqd.post(f"/topic/create?topic={topic}&partition_num=3")
    columns = {"body": bodies(0, 400), "key": [str(number % 17) for number in range(400)]}
    for _ in range(2):
        done = write(nsqd.address, topic, columns, task())
        assert (done.messages, done.repeated) == ({topic: 400}, 0)
    assert sorted(body for _, body in stored(nsqd.address, topic)) == bodies(0, 400)


def combined_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of rows of each segment."""
    rows: list[int] = []
    combined = sink._combined

    def counted(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
        rows.append(sum(batch.num_rows for batch in batches))
        return combined(batches)

    monkeypatch.setattr(sink, "_combined", counted)
    return rows


def test_orders_by_a_column_that_is_not_published(nsqd: NsqdProcess, topic: str):
    columns = {"body": [b"c", b"a", b"b"], "at": [3, 1, 2]}
    write(nsqd.address, topic, columns, task(), orderBy="at")
    assert stored(nsqd.address, topic, "body") == [(b"a",), (b"b",), (b"c",)]


def test_partitions_that_are_added_between_two_tries(nsqd: NsqdProcess, topic: str, monkeypatch):
    """The retry goes where its first try went; the next epoch uses all there are."""
    nsqd.post(f"/topic/create?topic={topic}&partition_num=5")
    ask = placing.Placing._ask

    def when_there_were_two(*arguments):
        answer = ask(*arguments)
        assert answer is not None
        return {**answer, "partition_num": 2, "partitions": answer["partitions"][:2]}

    columns = {"body": bodies(0, 200), "key": [str(n) for n in range(200)]}
    with monkeypatch.context() as before:
        before.setattr(placing.Placing, "_ask", when_there_were_two)
        crash = Crash(before)
        crash.at = 10
        with pytest.raises(Killed):
            write(nsqd.address, topic, columns, task())
    POOL._idle.clear()
    write(nsqd.address, topic, columns, task())
    found = stored(nsqd.address, topic)
    assert sorted(found) == sorted((partition_of(str(n), 2), body) for n, body in enumerate(bodies(0, 200)))
    write(nsqd.address, topic, {"body": bodies(200, 400), "key": columns["key"]}, task(1))
    assert {number for number, _ in stored(nsqd.address, topic)} == set(range(5))


def test_trace_ids_headers_and_delays(nsqd: NsqdProcess, topic: str):
    nsqd.post(f"/topic/create?topic={topic}&partition_num=2&extend=true")
    headers = pa.array([[("shop", "7")], None, [], [("shop", "7"), ("x", None)]], HEADERS)
    columns = {"body": bodies(0, 4), "partition": [1, 0, 1, 0], "headers": headers, "trace_id": [5, -2, 0, None]}
    for _ in range(2):
        write(nsqd.address, topic, {**columns, "trace_id": pa.array(columns["trace_id"], pa.int64())}, task())
    found = {body: rest for body, *rest in stored(nsqd.address, topic, "body,partition,trace_id,headers")}
    assert found == {
        b"000000": [1, 5, [("shop", "7"), ("##trace_id", "5")]],
        b"000001": [0, -2, [("##trace_id", str(2**64 - 2))]],
        b"000002": [1, 0, []],
        b"000003": [0, 0, [("shop", "7"), ("x", None)]],
    }
    for _ in range(2):
        write(nsqd.address, topic, {"body": bodies(4, 6), "trace_id": pa.array([8, 9], pa.int64())}, task(1))
    traced = [row for row in stored(nsqd.address, topic, "body,trace_id") if row[0] >= b"000004"]
    assert sorted(traced) == [(b"000004", 8), (b"000005", 9)]

    nsqd.post(f"/topic/create?topic={topic}-later")
    nsqd.post(f"/channel/create?topic={topic}-later&channel=c")
    for _ in range(2):
        write(nsqd.address, f"{topic}-later", {"body": bodies(0, 4), "defer_ms": [0, 3_000_000, 3_000_000, 0]}, task())
    assert [body for _, body in stored(nsqd.address, f"{topic}-later")] == bodies(0, 4)
    (stats,) = json.loads(nsqd.get(f"/stats?format=json&topic={topic}-later"))["topics"]
    assert (stats["message_count"], stats["channels"][0]["depth"]) == (4, 2), "two of them wait for their time"


def test_headers_as_json_and_a_map_that_is_put_over_them(nsqd: NsqdProcess, topic: str):
    nsqd.post(f"/topic/create?topic={topic}&partition_num=1&extend=true")
    texts = ['{"n":5, "n":6}', None, "", '{"shop":{"a":1},"n":1.0}']
    headers = pa.array([None, [("shop", "7")], [], [("shop", "7")]], HEADERS)
    for columns in ({"headers_json": texts}, {"headers_json": texts, "headers": headers}):
        write(nsqd.address, topic, {"body": bodies(0, 4), **columns}, task(len(columns)))
    assert [text for (text,) in stored(nsqd.address, topic, "headers_json")] == [
        '{"n":5, "n":6}', "{}", "{}", '{"shop":{"a":1},"n":1.0}',
        '{"n":5, "n":6}', '{"shop":"7"}', "{}", '{"n":1.0,"shop":"7"}',
    ]  # fmt: skip
    columns = {"body": [b"a"], "headers_json": ["{bad"]}
    with pytest.raises(PublishRefused, match=r"headers '\{bad' are not a JSON object, row 0 of its batch"):
        write(nsqd.address, topic, columns, task())
    kinds = {"body": StringType(), "headers_json": StringType()}
    for more, words in (("headers", "beside headers_json, headers is a map"), ("defer_ms", "leave out defer_ms")):
        kind = LongType() if more == "defer_ms" else StringType()
        schema = StructType([StructField(name, kind) for name, kind in {**kinds, more: kind}.items()])
        with pytest.raises(OptionError, match=words):
            check_columns(SinkOptions.parse({"nsqd": nsqd.address, "topic": topic}), schema)


def test_rows_that_cannot_be_published(nsqd: NsqdProcess, topic: str):
    nsqd.post(f"/topic/create?topic={topic}&partition_num=2")
    for columns, words in (
        ({"body": [b"a"], "partition": [2]}, "partition has 2, topic .* has 0 to 1"),
        ({"body": [b"a"], "defer_ms": [-1]}, "defer_ms is -1 in a row"),
        ({"body": [b"a", b"b"], "defer_ms": [0, None]}, f"defer_ms is null in a row, row 1 of its .* topic '{topic}'"),
        ({"body": [b"a"] * 2, "topic": [topic, None]}, r"topic has None, .*, row 1 of its batch \(topic None\)"),
        ({"body": [b"a"] * 2, "topic": [None, "a b"], "trace_id": [1, 2]}, r"None.*row 0 .*\(topic None, trace_id 1\)"),
        ({"body": [b"a"] * 2, "topic": [topic, "a b"]}, r"topic has 'a b', .*, row 1 of its batch \(topic a b\)"),
        ({"body": [b"a", b""], "key": ["x", "y"]}, r"row 1 of its batch \(key y\)"),
        ({"body": [b"a"], "headers": pa.array([[("x", "y" * 70_000)]], HEADERS)}, "headers have 700.. bytes; at most"),
    ):
        with pytest.raises(PublishRefused, match=words):
            write(nsqd.address, topic, columns, task())
    with pytest.raises(NsqdError, match="has no headers"):
        write(nsqd.address, topic, {"body": [b"a"], "headers": pa.array([[("x", "y")]], HEADERS)}, task())
    with pytest.raises(PublishRefused, match="has no partitions"):
        nsqd.post(f"/topic/create?topic={topic}-plain")
        write(nsqd.address, f"{topic}-plain", {"body": [b"a"], "partition": [1]}, task())
    assert stored(nsqd.address, topic) == []


def test_a_key_needs_partitions(nsqd: NsqdProcess, topic: str):
    nsqd.post(f"/topic/create?topic={topic}")
    with pytest.raises(PublishRefused, match=f"topic {topic} has no partitions: leave out the column key, or create"):
        write(nsqd.address, topic, {"body": [b"a", b"b"], "key": ["", None]}, task())
    assert stored(nsqd.address, topic) == []
    none = pa.array([None, None], pa.string())
    write(nsqd.address, topic, {"body": [b"a", b"b"], "key": none}, task())
    assert [body for _, body in stored(nsqd.address, topic)] == [b"a", b"b"]


@pytest.mark.parametrize("trace_ids", [None, [5] * 120])
@pytest.mark.parametrize("wrong", ["{bad", "[1]"])
def test_headers_that_are_no_json_object(nsqd: NsqdProcess, topic: str, wrong: str, trace_ids: list[int] | None):
    """In a batch behind others, and in a share of them: the row is named as Spark gave it."""
    nsqd.post(f"/topic/create?topic={topic}&partition_num=2&extend=true")
    rows: dict[str, Any] = {
        "body": bodies(0, 120),
        "headers": ['{"shop":"7"}'] * 120,
        "partition": [n % 2 for n in range(120)],
    }
    rows["headers"][57], rows["headers"][58] = wrong, ""
    if trace_ids:
        rows["trace_id"] = trace_ids
    kinds = {**KINDS, "headers": StringType()}
    schema = StructType([StructField(name, kinds[name]) for name in rows])
    batch = pa.record_batch(rows)
    writer = RowWriter(SinkOptions.parse({"nsqd": nsqd.address, "topic": topic}), schema)
    with pytest.raises(PublishRefused) as refused:
        writer.write(iter([batch.slice(0, 50), batch.slice(50)]), task())
    assert f"headers {wrong!r} are not a JSON object, row 7 of its batch (partition 1" in str(refused.value)
    assert str(refused.value).endswith(f"for topic '{topic}'")
    rows["headers"][57] = "{}"
    done = writer.write(iter([pa.record_batch(rows)]), task(1))
    assert done.messages == {topic: 120}


def test_what_nsqd_refuses_is_said_with_its_topic(tmp_path: Path, topic: str):
    nsqd = NsqdProcess(tmp_path / "data", "os", "--max-msg-size=1000", "--max-req-timeout=1m")
    try:
        nsqd.post(f"/topic/create?topic={topic}&partition_num=2")
        rows = [*bodies(0, 95), b"x" * 2000, b"x" * 5000]
        columns = {"body": rows, "partition": [n % 2 for n in range(97)]}
        with pytest.raises(PublishRefused, match="message too big") as refused:
            write(nsqd.address, topic, columns, task(), batchMessages="10")
        # whichever of the two nsqd says first: each ends the last MPUB of its partition
        assert f"for topic '{topic}', partition " in str(refused.value)
        assert "maxMessageSize=1048576" in str(refused.value)
        which = "the longest of 9 messages sent at once has 5000 bytes, message 8 of them"
        other = "the longest of 8 messages sent at once has 2000 bytes, message 7 of them"
        assert which in str(refused.value) or other in str(refused.value)
        with pytest.raises(PublishRefused) as refused:
            write(nsqd.address, f"{topic}-plain", {"body": bodies(0, 3), "defer_ms": [0, 0, 60_001]}, task())
        words = f"out of range 0-60000 (defer_ms is more than nsqd's --max-req-timeout), for topic '{topic}-plain'"
        assert words in str(refused.value)
    finally:
        nsqd.stop()


@pytest.mark.parametrize("delivery", ["once", "atLeastOnce"])
def test_a_topic_with_headers_has_to_be_there(nsqd: NsqdProcess, topic: str, delivery: str, caplog):
    """Nsqd makes none for rows that have some, so it is not tried again."""
    columns = {"body": [b"a"], "headers": pa.array([[("x", "y")]], HEADERS)}
    with pytest.raises(PublishRefused, match=rf"create it with extend=true, .*topic={topic}&extend=true") as refused:
        write(nsqd.address, topic, columns, task(), delivery=delivery)
    assert f"(nsqd {nsqd.address})" in str(refused.value)
    assert "attempt" not in caplog.text
    nsqd.post(f"/topic/create?topic={topic}&extend=true")
    assert sum(write(nsqd.address, topic, columns, task(), delivery=delivery).messages.values()) == 1


def test_places_follow_from_task_and_epoch(tmp_path: Path, nsqd: NsqdProcess, topic: str, monkeypatch):
    """A plain topic on two nsqds: a task goes to one of them, the same in every try."""
    second = NsqdProcess(tmp_path / "second")
    both = f"{nsqd.address},{second.address}"
    try:
        for one in (nsqd, second):
            one.post(f"/topic/create?topic={topic}")
        for _ in range(2):
            for number in range(4):
                write(both, topic, {"body": bodies(100 * number, 100 * number + 100)}, task(0, number))
        per_nsqd = [[body for _, body in stored(one.address, topic)] for one in (nsqd, second)]
        assert [len(one) for one in per_nsqd] == [200, 200]
        assert sorted(per_nsqd[0] + per_nsqd[1]) == bodies(0, 400)
        second.kill()
        away = sorted([nsqd.address, second.address]).index(second.address)
        with pytest.raises(ConnectionFailed):  # it may have rows of an earlier try
            write(both, topic, {"body": bodies(500, 510)}, task(2, away), delivery="once")
        write(both, topic, {"body": bodies(500, 510)}, task(2, 1 - away), delivery="once")
        POOL._idle.clear()
        done = [write(both, topic, {"body": bodies(600, 610)}, task(4, number)) for number in range(2)]
        assert sorted(each.is_once for each in done) == [False, True], "auto goes on with the other"
        pauses: list[str] = []
        monkeypatch.setattr(retry.Retries, "failed", lambda *_: pauses.append("failed"))
        assert not write(both, topic, {"body": bodies(700, 710)}, task(6, away)).is_once
        assert not pauses, "who was waited for in vain is not waited for by the next task"
        assert Counter(body for _, body in stored(nsqd.address, topic))[b"000600"] == 2
    finally:
        second.stop()


def test_partitions_of_the_same_topic_on_two_nsqds(tmp_path: Path, nsqd: NsqdProcess, topic: str):
    """No cluster keeps them: while one is away nobody can tell whether it has rows of an earlier try."""
    second = NsqdProcess(tmp_path / "second", durability="fsync")
    both = f"{nsqd.address},{second.address}"
    rows = {"body": bodies(0, 200), "key": [str(n % 17) for n in range(200)]}
    bodies_of_others = {"body": bodies(200, 220)}
    try:
        for one in (nsqd, second):
            one.post(f"/topic/create?topic={topic}&partition_num=3")
        write(both, topic, rows, task())
        second.kill()
        for _ in range(2):
            with pytest.raises((LogAway, ConnectionFailed)):
                write(both, topic, rows, task(), delivery="once", retries="1")
        assert not write(both, topic, bodies_of_others, task(8), retries="1").is_once, "auto goes on and says so"
        second.start()
        POOL._idle.clear()
        assert write(both, topic, rows, task()).is_once
        found = stored(nsqd.address, topic) + stored(second.address, topic)
        assert sorted(body for _, body in found) == bodies(0, 220)
    finally:
        second.stop()


def test_topics_by_column_and_many_of_them(nsqd: NsqdProcess, topic: str):
    names = [f"{topic}-{number % 30}" for number in range(300)]
    for _ in range(2):
        done = write(nsqd.address, topic, {"topic": names, "body": bodies(0, 300)}, task())
    assert done.messages == dict.fromkeys(names, 10)
    assert [body for _, body in stored(nsqd.address, f"{topic}-7")] == bodies(0, 300)[7::30]


@pytest.fixture
def other() -> Iterator[FakeNsqd]:
    """An nsqd that knows nothing of producers, as NSQ's own."""
    with FakeNsqd() as fake:
        yield fake


def test_another_nsqd(other: FakeNsqd, caplog):
    done = write(other.address, "t", {"body": bodies(0, 100)}, task())
    assert (done.is_once, done.messages) == (False, {"t": 100})
    assert [body for _, one in other.published for body in one] == bodies(0, 100)
    assert "is not FlintMQ's: rows are published at least once" in caplog.text
    with pytest.raises(OptionError, match="would store again what is published again"):
        write(other.address, "t", {"body": bodies(0, 100)}, task(), delivery="once")
    with pytest.raises(OptionError, match="columns='key' is not allowed; only FlintMQ's nsqd"):
        write(other.address, "t", {"body": [b"a"], "key": ["b"]}, task())
    assert len(other.published) == 3


def test_names():
    name = TaskIdentity(query_name("573b3fdc-6257-47d9-ac41-03d686a93497"), 36**6 - 1, 36**4 - 1).producer_id(
        1023, 36**3 - 1, [b"x"]
    )
    assert name.startswith("sink:573b3fdc625747d9ac4103d6:zzzzzz:zzzz.sf.zzz.") and len(name) <= 64
    one, two = TaskIdentity("q", 1, 2), TaskIdentity("q", 1, 23)
    assert one.partition_count_in(one.producer_id(5, 0, [])) == 5
    assert two.producer_id(5, 0, []).startswith(two.prefix) and not two.producer_id(5, 0, []).startswith(one.prefix)
    assert one.producer_id(5, 0, [b"ab"]) == one.producer_id(5, 0, [b"a", b"b"]) != one.producer_id(5, 1, [b"ab"])
    assert [base36(number) for number in (0, 35, 36, 1295)] == ["0", "z", "10", "zz"]


def test_batch_writes_of_a_single_task_go_to_all_partitions(nsqd: NsqdProcess, topic: str, monkeypatch):
    """With a name always to the same one; without one by chance, but the same in each try. Tasks stand side by side."""
    nsqd.post(f"/topic/create?topic={topic}&partition_num=3")
    schema = StructType([StructField("body", BinaryType())])
    given = {"nsqd": nsqd.address, "topic": topic}

    def put(writer: NsqWriter, body: bytes, number: int = 0) -> None:
        monkeypatch.setattr(sink, "_task_number", lambda: number)
        pickle.loads(pickle.dumps(writer)).write(iter([pa.record_batch({"body": pa.array([body], pa.binary())})]))

    for _ in range(2):
        for number in range(12):
            put(NsqWriter(SinkOptions.parse({**given, "writeId": f"load-{number}"}), schema, False), b"%d" % number)
    first = stored(nsqd.address, topic)
    assert sorted(int(body) for _, body in first) == list(range(12)), "each once"
    assert {partition for partition, _ in first} == {0, 1, 2}
    assert all(partition == crc32(b"load-" + body) % 3 for partition, body in first)
    writers = [NsqWriter(SinkOptions.parse(given), schema, False) for _ in range(24)]
    for number, writer in enumerate(writers):
        for _ in range(2):
            put(writer, b"run-%d" % number)
    runs = [partition for partition, body in stored(nsqd.address, topic) if body.startswith(b"run-")]
    assert len(runs) == len(writers) and len(set(runs)) > 1
    for number in range(3):
        put(writers[0], b"task-%d" % number, number)
    tasks = sorted((body, partition) for partition, body in stored(nsqd.address, topic) if body.startswith(b"task-"))
    begun = tasks[0][1]
    assert [partition for _, partition in tasks] == [(begun + number) % 3 for number in range(3)]


def test_a_batch_write_has_a_name_of_its_own_or_the_one_it_is_given():
    schema = StructType([StructField("body", BinaryType())])
    given = {"nsqd": "a:1", "topic": "t"}
    names = {NsqWriter(SinkOptions.parse(given), schema, False)._name for _ in range(2)}
    assert len(names) == 2 and all(len(name) == 24 for name in names)
    assert NsqWriter(SinkOptions.parse({**given, "writeId": "load-7"}), schema, False)._name == "load-7"
    with pytest.raises(OptionError, match="a stream's query has an id"):
        NsqStreamWriter(SinkOptions.parse({**given, "writeId": "load-7"}), schema, False)
    for wrong in ("a:b", "x" * 25, " "):
        with pytest.raises(OptionError, match="1 to 24"):
            SinkOptions.parse({**given, "writeId": wrong})
