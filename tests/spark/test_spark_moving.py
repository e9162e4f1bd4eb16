"""Logs that move while Spark uses them: a data directory at another address, leaders that die, partitions that come.

Each message is archived exactly once, by its number and by its offset.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StringType, StructField, StructType
from tests.integration.daemons import PATIENCE_S, SPARK_PATIENCE_S, Cluster, running_cluster
from tests.integration.daemons import wait_until as wait_for
from tests.spark.processes import NsqdProcess, assert_each_once, numbered
from tests.spark.test_spark import archived, rows, run, wait_until

import flintmq.sync
from flintmq.client.core.sharding import partition_of
from flintmq.errors import FlintError
from flintmq.spark import sink
from flintmq.spark.batch_reader import NsqReader
from flintmq.spark.identity import TaskIdentity
from flintmq.spark.options import SinkOptions, SourceOptions
from flintmq.spark.sink import RowWriter

pytestmark = [pytest.mark.spark, pytest.mark.timeout(2 * SPARK_PATIENCE_S)]


def test_a_data_directory_behind_another_port(spark, source, topic, archive, tmp_path):
    """The pod was moved: 500 of its 1,500 messages are new, and no more than these are read."""
    own = NsqdProcess(tmp_path / "own")
    try:
        own.publish(topic, numbered(0, 1000))
        run(archive(source(spark.readStream, nsqd=own.address, channel="c").load(), availableNow=True))
        own.stop()
        own.move()
        own.publish(topic, numbered(1000, 1500))
        moved = source(spark.readStream, nsqd=own.address, channel="c", columns="offset,body,nsqd,log_id")
        progress = run(archive(moved.load(), availableNow=True))
        assert [entry["numInputRows"] for entry in progress] == [500]
        assert_each_once(archived(spark, tmp_path), 1500)
        found = spark.read.option("mergeSchema", "true").parquet(str(tmp_path / "archive"))  # log_id came later
        assert found.select("offset").distinct().count() == 1500
        ((label, _),) = progress[0]["sources"][0]["endOffset"][topic].items()
        assert found.where("log_id IS NOT NULL").selectExpr("concat('0/', log_id) AS l").distinct().first().l == label
    finally:
        own.stop()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started


class Publishing:
    """Publishes numbered bodies in a thread, slowly, so that the stream keeps up; each until it is acknowledged."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        host, port = cluster.nsqlookupd.http
        self._producer = flintmq.sync.Producer(
            nsqlookupd_http_addresses=f"http://{host}:{port}", idempotent=True, lookup_interval=0.5
        )
        self._topic = topic
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.count = 0
        self.error: FlintError | None = None
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._is_ending.wait(0.05):
                self._producer.mpub(self._topic, numbered(self.count, self.count + 50), timeout=PATIENCE_S)
                self.count += 50
        except FlintError as error:
            self.error = error

    def end(self) -> int:
        """Publish no more; returns how many were acknowledged."""
        self._is_ending.set()
        self._thread.join(PATIENCE_S)
        self._producer.close()
        if self.error is not None:
            raise self.error
        return self.count


def test_a_leader_dies_and_partitions_come_while_a_task_writes(cluster: Cluster, topic: str, monkeypatch: Any) -> None:
    """Without a JVM: the task goes on with the next leader; tried again as a whole it puts each row where it was."""
    monkeypatch.setattr(sink, "SEGMENT_BYTES", 20_000)
    cluster.create(topic, 2)
    for number in range(2):
        cluster.wait_in_sync(topic, 3, number)
    host, port = cluster.nsqlookupd.http
    given = {"lookupd": f"{host}:{port}", "topic": topic, "delivery": "once", "retries": "60"}
    kinds = StructType([StructField("body", BinaryType()), StructField("key", StringType())])
    keys = [str(number) for number in range(500)]

    def batches(dies: bool) -> Iterator[pa.RecordBatch]:
        for first in range(0, 10_000, 500):
            if dies and first == 5_000:
                cluster.leader(topic).kill()
            yield pa.record_batch({"body": numbered(first, first + 500), "key": keys})

    task = TaskIdentity("q", 3, 1)
    done = RowWriter(SinkOptions.parse(given), kinds).write(batches(True), task)
    assert (done.messages, done.repeated, done.is_once) == ({topic: 10_000}, 0, True)
    cluster.mend()
    wait_for(lambda: cluster.expand(topic, 3), "the topic has a partition more", PATIENCE_S)
    for number in range(3):
        cluster.wait_in_sync(topic, 3, number)
    again = RowWriter(SinkOptions.parse(given), kinds).write(batches(False), task)
    assert again.repeated == 0
    reader = NsqReader(SourceOptions.parse({"lookupd": given["lookupd"], "topic": topic, "columns": "body,partition"}))
    found = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    assert_each_once((row["body"] for row in found), 10_000)
    assert all(row["partition"] == partition_of(keys[int(row["body"]) % 500], 2) for row in found)


def reached(query: Any, topic: str, partition: int) -> int:
    """How far the query has read a partition; 0 when it does not know it."""
    progress = query.lastProgress
    ends = json.loads(progress.json)["sources"][0]["endOffset"].get(topic, {}) if progress else {}
    return max([0, *(end for label, end in ends.items() if label.startswith(f"{partition}/"))])


def test_a_leader_dies_and_a_partition_comes_while_a_stream_runs(
    spark: Any, source: Callable[..., Any], topic: str, archive: Callable[..., Any], cluster: Cluster, tmp_path: Any
) -> None:
    cluster.create(topic, 2)
    for number in range(2):
        cluster.wait_in_sync(topic, 3, number)
    host, port = cluster.nsqlookupd.http
    given = {"nsqd": None, "lookupd": f"{host}:{port}", "channel": "archive"}
    frame = source(spark.readStream, **given).load()
    publishing = Publishing(cluster, topic)
    query = archive(frame, processingTime="0 seconds")
    try:
        wait_until(lambda: rows(query) >= 500, query)
        before = rows(query)
        cluster.leader(topic).kill()
        wait_until(lambda: rows(query) >= before + 500, query)
        cluster.mend()
        wait_until(lambda: cluster.expand(topic, 3), query)
        wait_until(lambda: reached(query, topic, 2) > 1, query)
        count = publishing.end()
        wait_until(lambda: rows(query) >= count, query)
    finally:
        query.stop()
    found = spark.read.parquet(str(tmp_path / "archive"))
    assert_each_once(archived(spark, tmp_path), count)
    assert found.select("partition", "offset").distinct().count() == count
    run(archive(frame, availableNow=True))
    assert_each_once(archived(spark, tmp_path), count)
