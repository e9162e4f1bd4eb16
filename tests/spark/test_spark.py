"""Source and sink in a real Spark against a real nsqd, as a user meets them."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from tests.integration.daemons import SPARK_PATIENCE_S, Daemons
from tests.spark.processes import NsqdProcess, assert_each_once, numbered

from flintmq.pipeline.archive import archive as archive_to
from flintmq.pipeline.lag import lag
from flintmq.spark.schema import COLUMNS
from flintmq.spark.session import activate, session
from flintmq.spark.session_settings import settings
from flintmq.spark.watch import QueryWatch, watch

pytestmark = [pytest.mark.spark, pytest.mark.timeout(2 * SPARK_PATIENCE_S)]


def wait_until(condition: Callable[[], bool], query: Any, timeout_s: float = SPARK_PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if query.exception() is not None:
            raise query.exception()
        assert time.monotonic() < deadline, query.status
        time.sleep(0.02)


def run(query: Any) -> list[dict]:
    """Wait for the end of a query; its progress, one entry per micro-batch that had rows."""
    assert query.awaitTermination(int(SPARK_PATIENCE_S))
    return [json.loads(progress.json) for progress in query.recentProgress if progress.numInputRows]


def archived(spark: Any, tmp_path: Any) -> list[bytes]:
    return [bytes(row.body) for row in spark.read.parquet(str(tmp_path / "archive")).select("body").collect()]


def bodies(frame: Any) -> list[bytes]:
    return [bytes(row.body) for row in frame.select("body").collect()]


def test_spark_finds_the_source_by_itself(spark):
    assert spark._jsparkSession.sessionState().dataSourceManager().dataSourceExists("nsq")


def test_a_stream_that_starts_adds_nothing_to_the_environment_that_all_streams_share(spark, source, topic, tmp_path):
    """Two that add a name at the same time corrupt it, and no query can send a task any more."""
    environment = (
        spark._jsparkSession.sessionState().dataSourceManager().lookupDataSource("nsq").dataSourceCls().envVars()
    )
    for name in list(environment):
        if name.startswith("SPARK_"):
            environment.remove(name)  # as before the first stream
    session("tests")
    before = set(environment)
    writer = source(spark.readStream).load().writeStream.format("noop")
    run(writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start())
    assert set(environment) == before


def test_the_settings_are_in_force(spark):
    for name, value in settings("local[2]").items():
        assert spark.conf.get(name) == value, name


def test_workers_do_not_compile_pyspark(spark):
    import pyarrow as pa

    def look(batches):
        import os

        import pyspark

        for _ in batches:
            yield pa.record_batch([[os.path.isfile(pyspark.__file__)]], ["is_file"])

    (row,) = spark.range(1).mapInArrow(look, "is_file boolean").collect()
    assert row.is_file, "not out of a zip, of which nothing compiled is kept"


def test_what_a_worker_has_imported_is_not_searched_for_garbage_again(spark):
    """PySpark's daemon collects after each task; the source asks for this in each process that it reads in."""
    import pyarrow as pa

    def ask(batches):
        import gc

        from flintmq.spark.garbage import spare_what_stays

        spare_what_stays()
        for _ in batches:
            yield pa.record_batch([[gc.get_freeze_count()]], ["spared"])

    # by one worker or several
    spared = [spark.range(1).mapInArrow(ask, "spared long").first().spared for _ in range(8)]
    assert spared[-1] > 10_000


def test_all_columns(spark, nsqd, source, topic):
    before = time.time()
    nsqd.publish(topic, [b"one", b"two", b"a third one"])
    frame = source(spark.read).load()
    assert tuple(frame.columns) == COLUMNS
    first, _, third = frame.orderBy("offset").collect()
    assert (first.topic, first.partition, first.offset, first.attempts, first.trace_id) == (topic, 0, 1, 1, 0)
    assert (bytes(first.body), bytes(third.body), first.nsqd) == (b"one", b"a third one", nsqd.address)
    assert bytes(first.id) == b"%016x" % first.internal_id
    assert before - 1 <= frame.selectExpr("unix_micros(timestamp) AS us").first().us / 1e6 <= time.time() + 1


def test_trace_ids_and_headers(spark, nsqd, source, topic):
    nsqd.post(f"/topic/create?topic={topic}&partition_num=1&extend=true")
    nsqd.post(f"/pub_ext?topic={topic}&ext=%7B%22k%22:%22v%22,%22n%22:1.50,%22%23%23trace_id%22:%225%22%7D", b"one")
    nsqd.post(f"/pubtrace?topic={topic}&trace_id={2**64 - 2}", b"two")
    nsqd.publish(topic, [b"three"])
    frame = source(spark.read, includeHeaders="true").load()
    assert frame.schema["headers"].simpleString() == "headers:map<string,string>"
    rows = [(bytes(row.body), row.trace_id, row.headers) for row in frame.orderBy("offset").collect()]
    assert rows == [
        (b"one", 5, {"k": "v", "n": "1.50", "##trace_id": "5"}),
        (b"two", -2, {}),
        (b"three", 0, {}),
    ]
    assert bodies(frame.where("headers['k'] = 'v'")) == [b"one"]
    assert tuple(source(spark.read).load().columns) == COLUMNS


def test_columns_and_schemas(spark, nsqd, source, topic):
    nsqd.publish(topic, numbered(0, 10))
    assert source(spark.read, columns="body,offset").load().columns == ["body", "offset"]
    assert source(spark.read.schema("offset bigint, topic string")).load().first() == (1, topic)
    with pytest.raises(Exception, match="offset int"):
        source(spark.read.schema("offset int")).load().collect()


def test_many_messages_in_several_tasks(spark, nsqd, source, topic):
    nsqd.publish(topic, numbered(0, 60_000), per_mpub=500)
    frame = source(spark.read, maxMessagesPerTask=20_000).load()
    assert frame.rdd.getNumPartitions() == 3
    assert_each_once(bodies(frame), 60_000)
    assert frame.selectExpr("count(distinct offset) AS n", "min(offset) AS low", "max(offset) AS high").first() == (
        60_000,
        1,
        60_000,
    )


def test_small_backlogs_of_many_topics_share_a_task(spark, nsqd, source, topic):
    topics = [f"{topic}-{number}" for number in range(4)]
    for name in topics:
        nsqd.publish(name, numbered(0, 500))
    frame = source(spark.read, topic=None, topics=",".join(topics)).load()
    assert frame.rdd.getNumPartitions() == 1
    assert {tuple(row) for row in frame.groupBy("topic").count().collect()} == {(name, 500) for name in topics}
    assert source(spark.read, topic=None, topics=",".join(topics), minPartitions=4).load().rdd.getNumPartitions() == 4


def test_ranges_times_and_filters(spark, nsqd, source, topic):
    nsqd.publish(topic, numbered(0, 500))
    time.sleep(0.01)
    between_us = time.time_ns() // 1000
    between_ms = -(-between_us // 1000)
    time.sleep(0.01)
    nsqd.publish(topic, numbered(500, 1000))

    given = {"startingOffsets": json.dumps({topic: {"0": 101}}), "endingOffsets": json.dumps({topic: {"0": 201}})}
    assert sorted(map(int, bodies(source(spark.read, **given).load()))) == list(range(100, 200))
    assert sorted(map(int, bodies(source(spark.read, startingTimestamp=between_ms).load()))) == list(range(500, 1000))
    assert sorted(map(int, bodies(source(spark.read, endingTimestamp=between_ms).load()))) == list(range(500))

    frame = source(spark.read, maxMessagesPerTask=100).load()
    some = frame.where(f"offset > 990 AND topic = '{topic}' AND nsqd = '{nsqd.address}'")
    assert sorted(map(int, bodies(some))) == list(range(990, 1000))
    assert bodies(frame.where("topic = 'another'")) == []
    late = frame.where(f"timestamp >= timestamp_micros({between_us})")
    assert sorted(map(int, bodies(late))) == list(range(500, 1000))
    assert some.rdd.getNumPartitions() == 10


@pytest.mark.parametrize("is_pushed", [False, True])
def test_one_frame_with_several_filters(spark, nsqd, source, topic, is_pushed):
    """Spark plans once what it reads for a frame: what one filter leaves out must be there for all the others."""
    nsqd.publish(topic, numbered(0, 100))
    setting = "spark.sql.python.filterPushdown.enabled"
    before = spark.conf.get(setting)
    spark.conf.set(setting, str(is_pushed).lower())
    try:
        frame = source(spark.read).load()
        first, second = frame.where("offset <= 7"), frame.where("offset BETWEEN 51 AND 60")
        assert (first.count(), second.count(), frame.count(), first.count()) == (7, 10, 100, 7)
        assert sorted(row.offset for row in first.union(second).collect()) == [*range(1, 8), *range(51, 61)]
        fresh = source(spark.read).load()
        assert fresh.where("offset <= 7").union(fresh.where("offset BETWEEN 51 AND 60")).count() == 17
    finally:
        spark.conf.set(setting, before)


def test_a_frame_stays_at_the_end_of_its_first_action(spark, nsqd, source, topic):
    """Filters included: in a session of ours Spark does not plan anew for them."""
    nsqd.publish(topic, numbered(0, 100))
    frame = source(spark.read).load()
    assert frame.count() == 100
    nsqd.publish(topic, numbered(100, 110))
    assert (frame.where("offset > 100").count(), frame.count(), source(spark.read).load().count()) == (0, 100, 110)


def test_a_table_of_the_catalog_is_refused_and_a_view_is_none(spark, nsqd, source, topic):
    nsqd.publish(topic, numbered(0, 5))
    using = f"USING nsq OPTIONS (nsqd '{nsqd.address}', topic '{topic}')"
    with pytest.raises(AnalysisException, match=r"Spark's catalog keeps no options.*CREATE TEMPORARY VIEW"):
        spark.sql(f"CREATE TABLE no_table {using}")
    try:
        spark.sql(f"CREATE TABLE no_table (offset bigint) {using}")  # Spark asks nobody for the columns
        with pytest.raises(AnalysisException, match=r"Spark's catalog keeps no options.*CREATE TEMPORARY VIEW"):
            spark.sql("SELECT count(*) FROM no_table").collect()
    finally:
        spark.sql("DROP TABLE IF EXISTS no_table")
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW a_view {using}")
    assert spark.sql("SELECT count(*) AS n FROM a_view").first().n == 5


def test_a_thread_writes_with_the_session_of_another(spark, nsqd, source, topic, tmp_path):
    """Spark looks for sinks in Python in the active session, which is each thread's own."""

    def write() -> None:
        rows = spark.range(3).selectExpr("cast(id AS string) AS body")
        source(rows.write).mode("append").save()
        nsqd.publish(f"{topic}-in", numbered(3, 5))
        stream = source(spark.readStream, topic=f"{topic}-in").load().select("body").writeStream
        run(source(stream.option("checkpointLocation", str(tmp_path))).trigger(availableNow=True).start())

    def in_a_thread(*calls: Callable[[], object]) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: [call() for call in calls]).result()

    with pytest.raises(Exception, match="DATA_SOURCE_NOT_FOUND"):
        in_a_thread(write)
    in_a_thread(partial(activate, spark), write)
    assert sorted(map(int, bodies(source(spark.read).load()))) == list(range(5))
    same: list[object] = []
    in_a_thread(lambda: same.append(session("tests")), lambda: source(spark.range(1).selectExpr("'5' AS body").write)
                .mode("append").save())  # fmt: skip
    assert same == [spark] and source(spark.read).load().count() == 6


def test_a_limit_stops_reading_early(spark, nsqd, source, topic):
    nsqd.publish(topic, numbered(0, 60_000), per_mpub=500)
    frame = source(spark.read, maxMessagesPerTask=10_000).load()
    assert [row.offset for row in frame.limit(3).collect()] == [1, 2, 3]
    assert frame.count() == 60_000


def test_errors_are_readable(spark, nsqd, source, topic):
    with pytest.raises(AnalysisException, match=r"topc.*did you mean topic\?"):
        source(spark.read, topc="x").load()
    with pytest.raises(Exception, match=f"no nsqd of {nsqd.address} has topic '{topic}'"):
        source(spark.read).load().collect()
    with pytest.raises(StreamingQueryException, match="latest needs channel"):
        run(source(spark.readStream, startingOffsets="latest").load().writeStream.format("noop").start())


def test_available_now_twice(spark, nsqd, source, topic, archive, tmp_path):
    nsqd.publish(topic, numbered(0, 5000))
    frame = source(spark.readStream, maxMessagesPerTrigger=2000, channel="archive").load()

    def depth() -> int:
        (channel,) = json.loads(nsqd.get(f"/stats?format=json&topic={topic}"))["topics"][0]["channels"]
        assert channel["channel_name"] == "archive"
        return channel["depth"]

    progress = run(archive(frame, availableNow=True))
    assert [entry["numInputRows"] for entry in progress] == [2000, 2000, 1000]
    assert depth() == 0, "right after the last micro-batch"
    lags = [entry["sources"][0]["latestOffset"]["_lag"][topic] for entry in progress]
    assert [figures["messages"] for labels in lags for figures in labels.values()] == [3000, 1000, 0]
    assert [figures["seconds"] > 0 for labels in lags for figures in labels.values()] == [True, True, False]
    ((label, _),) = progress[0]["sources"][0]["endOffset"][topic].items()
    assert label.startswith("0/"), "a log is named by its partition and its id"
    assert [entry["sources"][0]["endOffset"][topic][label] for entry in progress] == [2001, 4001, 5001]
    assert progress[0]["sources"][0]["latestOffset"][topic][label] == 5001, "the lag can be computed from progress"

    assert run(archive(frame, availableNow=True)) == []
    nsqd.publish(topic, numbered(5000, 5500))
    assert [entry["numInputRows"] for entry in run(archive(frame, availableNow=True))] == [500]
    assert_each_once(archived(spark, tmp_path), 5500)
    assert depth() == 0

    nsqd.publish(topic, numbered(5500, 5600))
    found = lag(tmp_path / "checkpoint", nsqd=nsqd.address)
    assert [(each.key.topic, each.messages, (each.seconds or 0) > 0) for each in found.partitions] == [
        (topic, 100, True)
    ]


def test_a_watched_query_that_is_stopped(spark, nsqd, source, topic, archive, tmp_path):
    """Its channel is where it is, although no further micro-batch was planned; Prometheus sees its lag until then."""
    nsqd.publish(topic, numbered(0, 300))
    frame = source(spark.readStream, channel="watched").load()
    listener = watch(spark, metrics="127.0.0.1:0", nsqd=nsqd.address, topic=topic, channel="watched")
    try:
        query = archive(frame, processingTime="1 hour")
        wait_until(lambda: f'topic="{topic}"' in metrics(listener) and has_rows(query, 300), query)
        labels = rf'query="{query.id}",topic="{topic}",partition="0",log_id="[0-9a-f]{{16}}"'
        assert re.search(rf"flintmq_spark_lag_messages{{{labels}}} 0\n", metrics(listener))
        query.stop()
        a_few_times(lambda: metrics(listener), lambda text: str(query.id) not in text)
        (channel,) = json.loads(nsqd.get(f"/stats?format=json&topic={topic}"))["topics"][0]["channels"]
        assert (channel["channel_name"], channel["depth"]) == ("watched", 0)
    finally:
        spark.streams.removeListener(listener)
        listener.close()


def test_a_watched_channel_waits_for_its_own_query(spark, nsqd, source, topic, archive, tmp_path):
    """Another query of the session that reads the topic to its end does not move it."""
    nsqd.publish(topic, numbered(0, 300))
    listener = watch(spark, metrics="127.0.0.1:0", nsqd=nsqd.address, topic=topic, channel="watched")

    def depth() -> int:
        (channel,) = json.loads(nsqd.get(f"/stats?format=json&topic={topic}"))["topics"][0]["channels"]
        return int(channel["depth"])

    try:
        frame = source(spark.readStream, channel="watched", maxMessagesPerTrigger=100).load()
        mine = archive(frame, processingTime="1 hour")
        wait_until(lambda: has_rows(mine, 100) and depth() == 200, mine)
        other = source(spark.readStream).load().writeStream.format("noop").trigger(availableNow=True)
        other = other.option("checkpointLocation", str(tmp_path / "other")).start()
        assert sum(entry["numInputRows"] for entry in run(other)) == 300
        mine.stop()
        a_few_times(lambda: metrics(listener), lambda text: str(mine.id) not in text)  # behind what the other has told
        assert depth() == 200
    finally:
        spark.streams.removeListener(listener)
        listener.close()


def test_nsqadmin_is_told_of_available_now_and_of_its_end(spark, nsqd, source, topic, archive, tmp_path):
    """Its lag is there right after the last micro-batch, and grows while it does not run."""
    nsqd.publish(topic, numbered(0, 300))
    daemons = Daemons(tmp_path)
    nsqadmin = daemons.nsqadmin(f"--nsqd-http-address={nsqd.http_address}")
    listener = watch(spark, nsqadmin=nsqadmin.url)

    def query_is(state: str, messages: int) -> bool:
        rows = nsqadmin.get(f"/api/v2/topics/{topic}")["queries"]
        return [(row["state"], row["messages"], row["row_count"]) for row in rows] == [(state, messages, 300)]

    try:
        query = archive(source(spark.readStream).load(), availableNow=True)
        run(query)
        wait_until(lambda: query_is("stopped", 0), query)
        nsqd.publish(topic, numbered(300, 307))
        wait_until(lambda: query_is("stopped", 7), query)
        (row,) = nsqadmin.get("/api/v2/queries")["queries"]
        assert row["id"] == str(query.id) and row["logs"][0]["read"] == 301 and row["seconds"] > 0
    finally:
        spark.streams.removeListener(listener)
        listener.close()
        daemons.close()


def metrics(listener: QueryWatch) -> str:
    with urllib.request.urlopen(f"http://{listener.metrics_address}/metrics", timeout=SPARK_PATIENCE_S) as answer:
        return answer.read().decode()


def a_few_times(get: Callable[[], str], is_right: Callable[[str], bool]) -> None:
    deadline = time.monotonic() + SPARK_PATIENCE_S
    while not is_right(text := get()):
        assert time.monotonic() < deadline, text
        time.sleep(0.05)


def test_once(spark, nsqd, source, topic, archive, tmp_path):
    nsqd.publish(topic, numbered(0, 5000))
    frame = source(spark.readStream, maxMessagesPerTrigger=2000).load()
    assert [entry["numInputRows"] for entry in run(archive(frame, once=True))] == [5000]
    assert_each_once(archived(spark, tmp_path), 5000)


def test_a_running_stream_sees_what_is_published(spark, nsqd, source, topic, archive, tmp_path):
    """The topic does not even exist when the query starts."""
    query = archive(source(spark.readStream).load(), processingTime="0 seconds")
    try:
        for first in range(0, 3000, 1000):
            nsqd.publish(topic, numbered(first, first + 1000))
            wait_until(partial(has_rows, query, first + 1000), query)
    finally:
        query.stop()
    assert_each_once(archived(spark, tmp_path), 3000)


def rows(query: Any) -> int:
    return sum(progress.numInputRows for progress in query.recentProgress)


def has_rows(query: Any, count: int) -> bool:
    return rows(query) >= count


def test_latest_with_a_channel_loses_nothing_when_the_first_micro_batch_fails(spark, nsqd, source, topic, tmp_path):
    nsqd.publish(topic, numbered(0, 100))
    frame = source(spark.readStream, startingOffsets="latest", channel="late").load()
    got: list[bytes] = []

    def start(handle: Callable[[Any, int], None]) -> Any:
        writer = frame.writeStream.foreachBatch(handle).option("checkpointLocation", str(tmp_path / "checkpoint"))
        return writer.trigger(processingTime="0 seconds").start()

    def fail(_frame: Any, _batch: int) -> None:
        raise RuntimeError("the first attempt fails")

    query = start(fail)
    wait_until(lambda: b'"late"' in nsqd.get(f"/stats?format=json&topic={topic}"), query)
    nsqd.publish(topic, numbered(0, 50))
    with pytest.raises(StreamingQueryException):
        query.awaitTermination(int(SPARK_PATIENCE_S))
    nsqd.publish(topic, numbered(50, 75))
    query = start(lambda batch, _number: got.extend(bodies(batch)))
    try:
        wait_until(lambda: len(got) >= 75, query)
    finally:
        query.stop()
    assert_each_once(got, 75)


def test_a_topic_created_anew(spark, nsqd, source, topic, archive, tmp_path):
    nsqd.publish(topic, numbered(0, 100))
    run(archive(source(spark.readStream).load(), availableNow=True))
    nsqd.post(f"/topic/delete?topic={topic}")
    nsqd.publish(topic, numbered(100, 350))
    with pytest.raises(StreamingQueryException, match="deleted and created again"):
        run(archive(source(spark.readStream).load(), availableNow=True))
    run(archive(source(spark.readStream, failOnDataLoss="false").load(), availableNow=True))
    assert_each_once(archived(spark, tmp_path), 350)


def test_an_nsqd_killed_in_the_middle(spark, source, topic, archive, tmp_path):
    own = NsqdProcess(tmp_path / "own")
    try:
        own.publish(topic, numbered(0, 20_000))
        frame = source(spark.readStream, nsqd=own.address, maxMessagesPerTrigger=3000, channel="c").load()
        query = archive(frame, processingTime="0 seconds")
        try:
            wait_until(lambda: rows(query) >= 3000, query)
            for first in (20_000, 30_000):
                own.kill()
                time.sleep(0.3)
                own.start()
                own.publish(topic, numbered(first, first + 10_000))
            wait_until(lambda: rows(query) >= 40_000, query)
        finally:
            query.stop()
        assert_each_once(archived(spark, tmp_path), 40_000)
    finally:
        own.stop()


def test_an_archive_is_read_as_it_is(spark, nsqd, topic, tmp_path):
    """No list of files beside the files says which of them count."""
    nsqd.publish(topic, numbered(0, 5000))
    archive_to(tmp_path / "files", nsqd=nsqd.address, topic=topic, rows_per_file=1500)
    frame = spark.read.parquet(str(tmp_path / "files"))
    assert_each_once(bodies(frame), 5000)
    assert {"dt", "hour"} < set(frame.columns)


# -- writing -----------------------------------------------------------------------------------------------------------


def sink(writer: Any, nsqd: NsqdProcess, **options: object) -> Any:
    return writer.format("nsq").options(nsqd=nsqd.address, **{name: str(value) for name, value in options.items()})


def test_write(spark, nsqd, source, topic):
    frame = spark.range(5000).selectExpr("cast(id as string) AS body")
    sink(frame.write.mode("append"), nsqd, topic=topic).save()
    assert_each_once(bodies(source(spark.read).load()), 5000)


def test_write_by_column(spark, nsqd, source, topic):
    frame = spark.range(3000).selectExpr(
        f"concat('{topic}-', id % 3) AS topic", "encode(cast(id as string), 'utf-8') AS body"
    )
    sink(frame.write.mode("append"), nsqd).save()
    for rest in range(3):
        assert sorted(map(int, bodies(source(spark.read, topic=f"{topic}-{rest}").load()))) == list(
            range(rest, 3000, 3)
        )


def test_write_what_does_not_fit(spark, nsqd, source, topic):
    frame = spark.range(10).selectExpr("repeat('x', cast(id * 10 AS int) + 1) AS body")
    with pytest.raises(Exception, match="maxMessageSize=50"):
        sink(frame.write.mode("append"), nsqd, topic=topic, maxMessageSize=50).save()
    name = f"{topic}-dropped"
    sink(frame.write.mode("append"), nsqd, topic=name, maxMessageSize=50, oversize="drop").save()
    assert sorted(len(body) for body in bodies(source(spark.read, topic=name).load())) == [1, 11, 21, 31, 41]
    with pytest.raises(Exception, match="only be appended"):
        sink(frame.write.mode("overwrite"), nsqd, topic=topic).save()
    with pytest.raises(Exception, match="columns='unused' is not allowed"):
        sink(frame.selectExpr("body", "1 AS unused").write.mode("append"), nsqd, topic=topic).save()
    with pytest.raises(Exception, match="column body of type binary or string"):
        sink(spark.range(3).write.mode("append"), nsqd, topic=topic).save()


def test_from_topic_to_topic(spark, nsqd, source, topic, tmp_path):
    nsqd.publish(topic, numbered(0, 5000))
    frame = source(spark.readStream, maxMessagesPerTrigger=2000).load().select("body")
    writer = sink(frame.writeStream, nsqd, topic=f"{topic}-copy").option("checkpointLocation", str(tmp_path / "c"))
    assert len(run(writer.trigger(availableNow=True).start())) == 3
    assert_each_once(bodies(source(spark.read, topic=f"{topic}-copy").load()), 5000)


@pytest.mark.parametrize("order_by", ["", "body"])
def test_a_task_that_fails_amid_its_rows_leaves_nothing_that_the_next_try_repeats(spark, nsqd, topic, order_by):
    """Its first record batch has come to Python whole, which looks like all there is."""
    count = 12_000
    rows = spark.range(0, count, 1, 1)
    fails = f"if(id = {count - 100}, raise_error('planted'), cast(id AS string)) AS body"
    given = {"nsqd": nsqd.address, "topic": topic, "writeId": f"load-{topic}"}
    if order_by:
        given["orderBy"] = order_by
    with pytest.raises(Exception, match="planted"):
        rows.selectExpr(fails).write.format("nsq").mode("append").options(**given).save()
    rows.selectExpr("cast(id AS string) AS body").write.format("nsq").mode("append").options(**given).save()
    found = bodies(spark.read.format("nsq").options(nsqd=nsqd.address, topic=topic).load())
    assert_each_once(found, count)
