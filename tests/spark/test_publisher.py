"""The sink without Spark, with plain publishes: what reaches nsqd, in which pieces, and what when it is not taken."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType
from tests.spark.fake_lookupd import FakeLookupd
from tests.spark.fake_nsqd import FakeNsqd

from flintmq.errors import ConnectionFailed, NoNsqd, OptionError, PublishRefused
from flintmq.spark import retry
from flintmq.spark.identity import TaskIdentity
from flintmq.spark.options import SinkOptions
from flintmq.spark.sink import NsqStreamWriter, NsqWriter, Published, RowWriter

TASK = TaskIdentity("query", 0, 0)
BODY = StructType([StructField("body", BinaryType())])
TOPIC_AND_BODY = StructType([StructField("topic", StringType()), StructField("body", StringType())])


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(retry, "PAUSE_MAX_S", 0.01)


@pytest.fixture
def nsqd() -> Iterator[FakeNsqd]:
    with FakeNsqd() as fake:
        yield fake


def options(*nsqds: FakeNsqd, **more: str) -> SinkOptions:
    return SinkOptions.parse(
        {"nsqd": ",".join(one.address for one in nsqds), "topic": "t", "delivery": "atLeastOnce", **more}
    )


def bodies(*values: bytes) -> pa.RecordBatch:
    return pa.record_batch([pa.array(values, pa.binary())], ["body"])


def write(chosen: SinkOptions, *batches: pa.RecordBatch, schema: StructType = BODY) -> Published:
    return RowWriter(chosen, schema).write(iter(batches), TASK)


def received(nsqd: FakeNsqd, topic: str = "t") -> list[bytes]:
    return [body for name, one in nsqd.published if name == topic for body in one]


def test_rows_in_order_in_pieces(nsqd):
    rows = [b"%d" % number for number in range(2500)]
    done = write(options(nsqd, batchMessages="400", maxInFlight="3"), bodies(*rows[:1000]), bodies(*rows[1000:]))
    assert received(nsqd) == rows
    assert [len(one) for _, one in nsqd.published] == [400] * 6 + [100]
    assert (done.messages, done.body_bytes, done.dropped) == ({"t": 2500}, sum(map(len, rows)), 0)


def test_pieces_by_bytes(nsqd):
    write(options(nsqd, batchBytes="1k"), bodies(*[b"x" * 296] * 10))
    assert [len(one) for _, one in nsqd.published] == [3, 3, 3, 1]


def test_a_column_says_the_topic(nsqd):
    chosen = SinkOptions.parse({"nsqd": nsqd.address, "delivery": "atLeastOnce"})
    batch = pa.record_batch({"topic": ["b", "a", "b", "a"], "body": ["1", "2", "3", "vier…"]})
    done = write(chosen, batch, schema=TOPIC_AND_BODY)
    assert received(nsqd, "a") == [b"2", "vier…".encode()]
    assert received(nsqd, "b") == [b"1", b"3"]
    assert done.messages == {"a": 2, "b": 2}


def test_the_option_wins_over_the_column(nsqd):
    write(options(nsqd), pa.record_batch({"topic": ["b"], "body": ["1"]}), schema=TOPIC_AND_BODY)
    assert received(nsqd, "t") == [b"1"]


@pytest.mark.parametrize("topic", [None, "no spaces"])
def test_a_bad_topic_in_a_row(nsqd, topic):
    batch = pa.record_batch([pa.array([topic], pa.string()), pa.array(["x"])], ["topic", "body"])
    with pytest.raises(PublishRefused, match="no topic name"):
        write(SinkOptions.parse({"nsqd": nsqd.address, "delivery": "atLeastOnce"}), batch, schema=TOPIC_AND_BODY)


def test_bodies_that_nsqd_would_refuse(nsqd):
    with pytest.raises(PublishRefused, match="1 rows have a null body, row 1 of its batch for topic 't'"):
        write(options(nsqd), pa.record_batch([pa.array([b"a", None], pa.binary())], ["body"]))
    with pytest.raises(PublishRefused, match="empty body, which nsqd refuses, row 1 of its batch"):
        write(options(nsqd), bodies(b"a", b""))
    with pytest.raises(PublishRefused, match=r"11 bytes, maxMessageSize=10 .*oversize=drop"):
        write(options(nsqd, maxMessageSize="10"), bodies(b"12345678901"))
    assert nsqd.published == []


def test_dropping_what_is_too_long(nsqd):
    chosen = options(nsqd, maxMessageSize="3", oversize="drop")
    done = write(chosen, bodies(b"1234", b"123", b"12345", b"1"), bodies(b"1234"))
    assert received(nsqd) == [b"123", b"1"]
    assert (done.dropped, done.messages) == (3, {"t": 2})


@pytest.mark.parametrize("how", ["close", "cut", "E_MPUB_FAILED disk full"])
def test_after_a_failure_everything_is_there_at_least_once(nsqd, how):
    rows = [b"%d" % number for number in range(3000)]
    nsqd.fail("MPUB", "", how, "", how, how)
    write(options(nsqd, batchMessages="100"), bodies(*rows))
    assert sorted(set(received(nsqd))) == sorted(rows)


def test_the_next_nsqd_takes_over(nsqd):
    rows = [b"%d" % number for number in range(100)]
    with FakeNsqd() as gone:
        chosen = options(gone, nsqd)
    write(chosen, bodies(*rows))
    assert received(nsqd) == rows


def test_retries_end(nsqd):
    nsqd.fail("MPUB", *["close"] * 3)
    with pytest.raises(ConnectionFailed):
        write(options(nsqd, retries="2"), bodies(b"1"))


def test_a_refusal_is_final_and_names_the_limit(nsqd):
    nsqd.fail("MPUB", "E_BAD_MESSAGE MPUB message too big 2000000 > 1048576")
    with pytest.raises(PublishRefused, match=r"--max-msg-size; maxMessageSize=1048576") as caught:
        write(options(nsqd), bodies(b"1"))
    assert caught.value.code == "E_BAD_MESSAGE"
    assert nsqd.count("MPUB") == 1


def test_columns_that_do_not_fit(nsqd):
    number = StructType([StructField("body", IntegerType())])
    with pytest.raises(OptionError, match="column body of type binary or string"):
        RowWriter(options(nsqd), number)
    with pytest.raises(OptionError, match="topic"):
        RowWriter(SinkOptions.parse({"nsqd": nsqd.address, "delivery": "atLeastOnce"}), BODY)
    for writer in (NsqWriter, NsqStreamWriter):
        with pytest.raises(OptionError, match="only be appended"):
            writer(options(nsqd), BODY, True)
        assert isinstance(pickle.loads(pickle.dumps(writer(options(nsqd), BODY, False))), writer)


@pytest.mark.parametrize("name", ["value", "timestamp", "id", "unused"])
def test_a_column_that_would_be_lost(nsqd, name):
    schema = StructType([*TOPIC_AND_BODY.fields, StructField(name, StringType())])
    for kind in (NsqWriter, NsqStreamWriter):
        with pytest.raises(OptionError, match=rf"columns='{name}' is not allowed; .* select\('body'\)"):
            kind(options(nsqd), schema, False)


@pytest.mark.parametrize(
    ("columns", "more", "words"),
    [
        ({"partition": StringType()}, {}, "partition has to be tinyint or smallint or int or bigint"),
        ({"headers": IntegerType()}, {}, r"headers has to be map<string,string> or string"),
        ({"partition": IntegerType(), "key": StringType()}, {}, "give one of them"),
        ({"defer_ms": IntegerType(), "trace_id": IntegerType()}, {}, "no headers or trace id with a delay"),
        ({"key": BinaryType()}, {"sharding": "java"}, "sharding=java is for text and numbers"),
        ({"key": StringType()}, {"sharding": "mod"}, "sharding=mod is for numbers"),
        ({}, {"orderBy": "time"}, "name columns that can be sorted by"),
    ],
)
def test_columns_that_do_not_go_together(nsqd, columns, more, words):
    schema = StructType([*BODY.fields, *(StructField(name, kind) for name, kind in columns.items())])
    with pytest.raises(OptionError, match=words):
        NsqWriter(options(nsqd, **more), schema, False)


def test_nothing_to_write_makes_no_topic(nsqd):
    done = write(options(nsqd), bodies())
    assert (done.messages, nsqd.asked) == ({}, [])


def test_nsqds_by_discovery(nsqd):
    with FakeLookupd() as lookupd:
        lookupd.answers["/nodes"] = {"producers": [{"broadcast_address": "127.0.0.1", "tcp_port": nsqd.port}]}
        write(SinkOptions.parse({"lookupd": lookupd.address, "topic": "t", "delivery": "atLeastOnce"}), bodies(b"1"))
        assert received(nsqd) == [b"1"]
        lookupd.answers["/nodes"] = {"producers": []}
        with pytest.raises(NoNsqd):
            write(
                SinkOptions.parse({"lookupd": lookupd.address, "topic": "t", "delivery": "atLeastOnce"}), bodies(b"1")
            )
