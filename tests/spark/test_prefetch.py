"""Small micro-batches travel with their plan; all others, and whatever fails, are read by tasks."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource_internal import _SimpleStreamReaderWrapper
from pyspark.sql.streaming.datasource import ReadAllAvailable, SupportsTriggerAvailableNow
from tests.integration.daemons import SPARK_PATIENCE_S
from tests.spark.fake_nsqd import FakeNsqd
from tests.spark.processes import NsqdProcess, environment

from flintmq.spark.broker import POOL
from flintmq.spark.offsets import LAG_KEY
from flintmq.spark.options import SourceOptions
from flintmq.spark.prefetch import MESSAGES_MAX
from flintmq.spark.spooled import AnyStreamReader

ALL = ReadAllAvailable()


@pytest.fixture
def nsqd() -> Iterator[FakeNsqd]:
    with FakeNsqd() as fake:
        yield fake
    POOL._idle.clear()


def reader_of(nsqd: FakeNsqd, **options: str) -> AnyStreamReader:
    given = {"nsqd": nsqd.address, "topic": "t", "columns": "offset,body", **options}
    return pickle.loads(pickle.dumps(AnyStreamReader(SourceOptions.parse(given))))


def plan(reader: AnyStreamReader) -> tuple[list[Any], list[tuple[int, bytes]] | None]:
    """Plan a micro-batch as Spark does: its tasks, and the rows that came with them, if it asks for any."""
    end = reader.latestOffset({}, reader.getDefaultReadLimit())
    tasks = list(reader.partitions({}, end))
    if not isinstance(reader, _SimpleStreamReaderWrapper):
        return tasks, None
    rows = rows_of(reader.getCache({}, end))
    assert not isinstance(reader, _SimpleStreamReaderWrapper), "Spark asks it as before when it reports its lag"
    return tasks, rows


def rows_of(batches: Any) -> list[tuple[int, bytes]]:
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def test_few_messages_come_with_the_plan_and_a_task_reads_the_same(nsqd: FakeNsqd):
    nsqd.topic("t", [b"%d" % number for number in range(500)])
    reader = reader_of(nsqd)
    (task,), rows = plan(reader)
    assert rows == [(number + 1, b"%d" % number) for number in range(500)]
    assert rows_of(reader.read(task)) == rows, "when what Spark kept of it is gone"
    assert isinstance(reader, SupportsTriggerAvailableNow)
    (_,), again = plan(reader)
    assert again == rows, "the same plan has the same rows"


@pytest.mark.parametrize(
    ("bodies", "options"),
    [
        ([b"x"] * (MESSAGES_MAX + 1), {}),
        ([b"x" * 1000] * 300, {}),
        ([b"x"] * 100, {"driverReadMaxBytes": "0"}),
        ([b"x"] * 12_000, {"minPartitions": "2"}),
        ([b"x" * 600_000] + [b"x"] * 100_000, {"maxMessagesPerTrigger": "2"}),
    ],
    ids=["many", "large", "never", "two tasks", "larger than they seemed"],
)
def test_others_are_read_by_tasks(bodies: list[bytes], options: dict[str, str], nsqd: FakeNsqd):
    nsqd.topic("t", bodies)
    reader = reader_of(nsqd, **options)
    tasks, rows = plan(reader)
    assert rows is None
    due = bodies[: int(options.get("maxMessagesPerTrigger", len(bodies)))]
    assert [body for task in tasks for _, body in rows_of(reader.read(task))] == due


@pytest.mark.parametrize("how", ["close", "cut", "flip", "E_INTERNAL disk"])
def test_what_fails_on_the_driver_is_read_by_a_task(how: str, nsqd: FakeNsqd):
    nsqd.topic("t", [b"a", b"b"])
    reader = reader_of(nsqd, retries="3")
    nsqd.fail("FETCH", how)
    (task,), rows = plan(reader)
    assert rows is None and nsqd.count("FETCH") == 1, "it is not waited for on the driver"
    assert rows_of(reader.read(task)) == [(1, b"a"), (2, b"b")]


def test_what_is_not_there_yet_is_not_given_up_on_the_driver(nsqd: FakeNsqd):
    """The task tries again, as it does where a log ends later for a moment, with another leader."""
    log = nsqd.topic("t", [b"a", b"b", b"c"], batch=1)
    reader = reader_of(nsqd, failOnDataLoss="false")
    end = reader.latestOffset({}, reader.getDefaultReadLimit())
    log.batches.pop()
    log.end -= 1
    (task,) = reader.partitions({}, end)
    assert not isinstance(reader, _SimpleStreamReaderWrapper)
    log.append([b"c"])
    assert rows_of(reader.read(task)) == [(1, b"a"), (2, b"b"), (3, b"c")]


def test_a_plan_that_is_repeated_after_a_restart_is_read_by_tasks(nsqd: FakeNsqd):
    """What its logs look like is not known before the next latest offset is asked for."""
    nsqd.topic("t", [b"a"])
    end = reader_of(nsqd).latestOffset({}, ALL)
    reader = reader_of(nsqd)
    (task,) = reader.partitions({}, end)
    assert not isinstance(reader, _SimpleStreamReaderWrapper)
    assert rows_of(reader.read(task)) == [(1, b"a")]


@pytest.mark.spark
@pytest.mark.timeout(2 * SPARK_PATIENCE_S)
@pytest.mark.parametrize("serializer", ["JavaSerializer", pytest.param("KryoSerializer", marks=pytest.mark.long)])
def test_spark_starts_no_python_task_for_them_and_has_every_column(serializer: str, tmp_path: Path):
    """In a session of its own, in which no Python worker has run: it runs none for small micro-batches."""
    nsqd = NsqdProcess(tmp_path / "nsqd")
    nsqd.post("/topic/create?topic=t&extend=true&partition_num=1&replicator=1")
    nsqd.post("/pub_ext?topic=t&ext=%7B%22k%22:%22v%22,%22%23%23trace_id%22:%225%22%7D", b"one")
    nsqd.publish("t", [b"two", b"\xff\x00", b"four"])
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    try:
        done = subprocess.run(
            [sys.executable, str(program), nsqd.address, str(tmp_path / "c"), serializer],
            env=environment(), capture_output=True, text=True, timeout=SPARK_PATIENCE_S, check=False,
        )  # fmt: skip
    finally:
        nsqd.stop()
    assert done.returncode == 0, done.stderr[-3000:]
    stream, batch, workers, reported = done.stdout.splitlines()[-4:]
    assert stream == batch and "'##trace_id': '5'" in stream and stream.count("Row(") == 4
    assert workers == "workers: 0"
    assert f'"{LAG_KEY}"' in reported, "its lag is in the progress all the same"


PROGRAM = """
import os, sys
from flintmq.spark import session

address, checkpoint, serializer = sys.argv[1:]
conf = {"spark.serializer": f"org.apache.spark.serializer.{serializer}", "spark.ui.enabled": "false"}
spark = session("prefetch", "local[2]", **conf)
spark.sparkContext.setLogLevel("OFF")
options = {"nsqd": address, "topic": "t", "includeHeaders": "true"}
frame = spark.readStream.format("nsq").options(**options).load()
writer = frame.writeStream.format("memory").queryName("kept").option("checkpointLocation", checkpoint)
query = writer.trigger(processingTime="0 seconds").start()
query.processAllAvailable()
rows = spark.sql("select * from kept order by offset").collect()
reported = [each.sources[0].latestOffset for each in query.recentProgress if each.numInputRows]
assert sum(each.numInputRows for each in query.recentProgress) == len(rows)
query.stop()
tree = {}
for name in os.listdir("/proc"):
    if name.isdigit():
        try:
            with open(f"/proc/{name}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
            with open(f"/proc/{name}/cmdline") as file:
                tree[int(name)] = parent, file.read()
        except OSError:
            pass
ours = {os.getpid()}
while more := {pid for pid, (parent, _) in tree.items() if parent in ours} - ours:
    ours |= more
workers = sum("pyspark.daemon" in tree[pid][1] and "\\0pyspark.worker\\0" in tree[pid][1] for pid in ours)
static = spark.read.format("nsq").options(**options).load().orderBy("offset").collect()
print(rows)
print(static)
print("workers:", workers)
print(reported[0])
"""
