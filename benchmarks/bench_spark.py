"""Spark: the source beside Spark's own Parquet reader, the time a micro-batch costs, and the sink.

``python -m benchmarks --only spark``, or ``python -m benchmarks.bench_spark`` for JSON on stdout. It starts an nsqd and
one Spark on two cores, which share the machine's cores: a rate is that of all three, nsqd, Python and JVM.

Cases (bodies of 200 random bytes):

- ``fetch``: FETCH over loopback, answers thrown away; ``decode``: the same into Arrow batches; one process, no Spark.
- ``decode-singles``: like ``decode``, a twentieth of the messages, each published and stored by itself.
- ``batch``, ``stream``: all columns into Spark's noop sink, from nsqd and from Parquet files of the very same rows, by
  turns; ``share`` is the nsqd rate by the Parquet rate, ``cpu_share`` the same of CPU seconds of nsqd, JVM and Python
  workers together, which a busy machine disturbs less. Streams read all in one micro-batch; their time is Spark's
  ``triggerExecution``. The ceiling is a source in Python whose rows stand ready (``constant_source``), and
  ``of_ceiling`` is the nsqd rate by its rate. ``python_cpu_s_per_M`` is the part of Spark's Python processes.
- ``body``: like ``batch`` with the column ``body`` only.
- ``trigger-1``, ``trigger-4``: milliseconds of a micro-batch of 500 messages from each of so many partitions.
- ``to-parquet``: stream into Spark's Parquet sink; ``sink``: from nsqd to another topic, and from Parquet to a topic.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks import harness
from benchmarks.constant_source import BODY_BYTES, ConstantSource
from flintmq.spark import session
from flintmq.spark.broker import BatchBuffer, NsqdConnection
from flintmq.spark.encode import encode_bodies
from flintmq.spark.fetch import RangeReader
from flintmq.spark.options import SinkOptions, SourceOptions
from flintmq.spark.plan import FetchRange
from flintmq.spark.publish import Publisher
from flintmq.sync import Producer

MESSAGES_PER_MPUB = 200
PARTITIONS = 4
TRIGGER_MESSAGES = 500  # of one partition in one micro-batch
SHARE_TARGET = 0.75
STREAM_SHARE_TARGET = 0.95
TRIGGER_TARGET_MS = 130.0
QUERY_TIMEOUT_S = 300


class Bench:
    """One nsqd, one Spark, one directory; the topics are filled once."""

    def __init__(self, daemon: harness.Daemon, spark: Any, directory: Path, messages: int, runs: int) -> None:
        self.daemon = daemon
        self.address = f"{daemon.tcp[0]}:{daemon.tcp[1]}"
        self.spark = spark
        self.directory = directory
        self.messages = messages
        self.runs = runs
        self.topics = [f"bench-{number}" for number in range(PARTITIONS)]
        self.parquet = str(directory / "rows")
        self._checkpoints = 0
        self.jvm_id = spark.sparkContext._jvm.ProcessHandle.current().pid()

    def cpu_s(self) -> float:
        """CPU seconds of nsqd, the JVM and all its Python workers so far."""
        return self.daemon.cpu_s() + sum(tree_cpu_s(self.jvm_id))

    def python_cpu_s(self) -> float:
        """The part of the Python workers."""
        return tree_cpu_s(self.jvm_id)[1]

    def prepare(self) -> None:
        """Publish, and write the same rows to Parquet."""
        for topic in self.topics:
            publish(self.address, topic, self.messages // PARTITIONS)
        self.read(self.topics).write.parquet(self.parquet)

    def read(self, topics: list[str], **options: str) -> Any:
        reader = self.spark.read.format("nsq").options(nsqd=self.address, topics=",".join(topics), **options)
        return reader.load()

    def read_stream(self, topics: list[str], **options: str) -> Any:
        given = {"nsqd": self.address, "topics": ",".join(topics), "maxMessagesPerTrigger": "0", **options}
        return self.spark.readStream.format("nsq").options(**given).load()

    def constant(self, reader: Any, **options: str) -> Any:
        """The same number of rows from a source in Python that does nothing for them."""
        return reader.format("constant").options(rows=str(self.messages), tasks=str(PARTITIONS), **options).load()

    def parquet_stream(self) -> Any:
        return self.spark.readStream.schema(self.spark.read.parquet(self.parquet).schema).parquet(self.parquet)

    def run_stream(self, frame: Any, sink: str = "noop", **options: str) -> list[dict[str, Any]]:
        """Run until everything is read; the progress of every micro-batch that had rows."""
        self._checkpoints += 1
        writer = frame.writeStream.format(sink).options(**options)
        writer = writer.option("checkpointLocation", str(self.directory / f"checkpoint-{self._checkpoints}"))
        query = writer.trigger(availableNow=True).start()
        if not query.awaitTermination(QUERY_TIMEOUT_S):
            query.stop()
            raise harness.BenchmarkError(f"a query did not end in {QUERY_TIMEOUT_S} s")
        return [json.loads(progress.json) for progress in query.recentProgress if progress.numInputRows]

    def batch_rate(self, frame: Any) -> float:
        began = time.perf_counter()
        frame.write.format("noop").mode("overwrite").save()
        return self.messages / (time.perf_counter() - began)

    def stream_rate(self, frame: Any, sink: str = "noop", **options: str) -> float:
        done = self.run_stream(frame, sink, **options)
        rows = sum(entry["numInputRows"] for entry in done)
        if rows != self.messages:
            raise harness.BenchmarkError(f"{rows} rows came, {self.messages} were published")
        return rows / sum(entry["durationMs"]["triggerExecution"] for entry in done) * 1000


def tree_cpu_s(root: int) -> tuple[float, float]:
    """CPU seconds of a process, and of its descendants, the ended ones included once they were waited for."""
    parents: dict[int, int] = {}
    own: dict[int, int] = {}
    ended: dict[int, int] = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal():
            try:
                fields = (directory / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            process = int(directory.name)
            parents[process] = int(fields[1])
            own[process] = sum(map(int, fields[11:13]))
            ended[process] = sum(map(int, fields[13:15]))
    tree: set[int] = set()
    found = {root}
    while found:
        tree |= found
        found = {process for process, parent in parents.items() if parent in tree} - tree
    descendants = sum(own.get(process, 0) for process in tree - {root}) + sum(ended.get(process, 0) for process in tree)
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return own.get(root, 0) / ticks_per_s, descendants / ticks_per_s


def publish(address: str, topic: str, count: int) -> None:
    """Publish ``count`` messages of random bytes in MPUBs."""
    publisher = Publisher([address], SinkOptions.parse({"nsqd": address}))
    try:
        for first in range(0, count, 10_000):
            length = min(10_000, count - first)
            random = os.urandom(length * BODY_BYTES)
            bodies = pa.array([random[n : n + BODY_BYTES] for n in range(0, len(random), BODY_BYTES)], pa.binary())
            for size, messages in encode_bodies(bodies).slices(MESSAGES_PER_MPUB, 1 << 20):
                publisher.publish(topic, size, messages)
        publisher.finish()
    finally:
        publisher.close()


def publish_singly(address: str, topic: str, count: int) -> None:
    """Publish ``count`` messages of random bytes, each after the answer to the one before."""
    producer = Producer(nsqd_tcp_addresses=address)
    try:
        for _ in range(count):
            producer.pub(topic, os.urandom(BODY_BYTES))
    finally:
        producer.close()


def ranges(bench: Bench, topics: list[str]) -> list[FetchRange]:
    connection = NsqdConnection(bench.address, 5, 30)
    try:
        logs = [found.logs[0] for found in connection.offsets(topics)]
    finally:
        connection.close()
    return [
        FetchRange(topic, bench.address, 0, log.start, log.end, log.log_id)
        for topic, log in zip(topics, logs, strict=True)
    ]


def fetch(bench: Bench) -> dict[str, Any]:
    """FETCH alone, as the source asks it."""
    options = SourceOptions.parse({"nsqd": bench.address, "topic": "any"})
    connection = NsqdConnection(bench.address, 5, 30)
    buffer = BatchBuffer(1 << 20)

    def once() -> None:
        for wanted in ranges(bench, bench.topics):
            position = wanted.start
            while position < wanted.end:
                connection.send_fetch(wanted.topic, 0, position, wanted.end, options.fetch_max_bytes, 0)
                position, size = connection.receive_fetch_head(options.fetch_max_bytes)
                buffer.clear()
                connection.receive_batches(size, buffer)

    try:
        return alone(bench, once, bench.messages)
    finally:
        connection.close()


def decode(bench: Bench) -> dict[str, Any]:
    """What one Spark task does, without Spark."""
    return decoded(bench, bench.topics, bench.messages)


def decode_singles(bench: Bench) -> dict[str, Any]:
    """The same for messages that were published one by one."""
    count = bench.messages // 20
    publish_singly(bench.address, "singles", count)
    return decoded(bench, ["singles"], count)


def decoded(bench: Bench, topics: list[str], count: int) -> dict[str, Any]:
    options = SourceOptions.parse({"nsqd": bench.address, "topic": "any"})

    def once() -> None:
        found = ranges(bench, topics)
        rows = sum(batch.num_rows for wanted in found for batch in RangeReader(wanted, options).record_batches())
        if rows != count:
            raise harness.BenchmarkError(f"{rows} rows came, {count} were published")

    return alone(bench, once, count)


def alone(bench: Bench, once: Callable[[], None], count: int) -> dict[str, Any]:
    """Rate and CPU of a step in this process, for so many messages; the first run is thrown away."""
    rates, own_s, nsqd_s = [], [], []
    for number in range(bench.runs + 1):
        cpu, nsqd_cpu, began = time.process_time(), bench.daemon.cpu_s(), time.perf_counter()
        once()
        if number:
            rates.append(count / (time.perf_counter() - began))
            own_s.append((time.process_time() - cpu) / count * 1e6)
            nsqd_s.append((bench.daemon.cpu_s() - nsqd_cpu) / count * 1e6)
    return {
        "msg_per_s": harness.median(rates),
        "client_cpu_s_per_M": harness.median(own_s),
        "nsqd_cpu_s_per_M": harness.median(nsqd_s),
    }


def beside_parquet(
    bench: Bench,
    ours: Callable[[], float],
    parquet: Callable[[], float],
    ceiling: Callable[[], float] | None = None,
    target: float = SHARE_TARGET,
) -> dict[str, Any]:
    """All by turns, so that the noise of the machine hits all; the first two turns are thrown away."""
    turns = {"ours": ours, "parquet": parquet} | ({"ceiling": ceiling} if ceiling is not None else {})
    rates: dict[str, list[float]] = {name: [] for name in turns}
    cpu_s: dict[str, list[float]] = {name: [] for name in turns}
    nsqd_s, python_s = [], []
    for number in range(2 + bench.runs):
        for name, turn in turns.items():
            before, nsqd_before, python_before = bench.cpu_s(), bench.daemon.cpu_s(), bench.python_cpu_s()
            rate = turn()
            if number < 2:
                continue
            rates[name].append(rate)
            cpu_s[name].append((bench.cpu_s() - before) / bench.messages * 1e6)
            if name == "ours":
                nsqd_s.append((bench.daemon.cpu_s() - nsqd_before) / bench.messages * 1e6)
                python_s.append((bench.python_cpu_s() - python_before) / bench.messages * 1e6)
    share = median_ratio(rates["ours"], rates["parquet"])
    row = {
        "msg_per_s": harness.median(rates["ours"]),
        "parquet_per_s": harness.median(rates["parquet"]),
        "nsqd_cpu_s_per_M": harness.median(nsqd_s),
        "python_cpu_s_per_M": harness.median(python_s),
        "cpu_s_per_M": harness.median(cpu_s["ours"]),
        "parquet_cpu_s_per_M": harness.median(cpu_s["parquet"]),
        "cpu_share": median_ratio(cpu_s["parquet"], cpu_s["ours"]),
        "share": share,
        "target": f"share >= {target}: {'met' if share >= target else 'missed'}",
    }
    if ceiling is not None:
        row["of_ceiling"] = median_ratio(rates["ours"], rates["ceiling"])
        row["ceiling_cpu_s_per_M"] = harness.median(cpu_s["ceiling"])
    return row


def median_ratio(these: list[float], those: list[float]) -> float:
    """The median of the ratios of each turn."""
    return harness.median(a / b for a, b in zip(these, those, strict=True))


def batch(bench: Bench) -> dict[str, Any]:
    return beside_parquet(
        bench,
        lambda: bench.batch_rate(bench.read(bench.topics)),
        lambda: bench.batch_rate(bench.spark.read.parquet(bench.parquet)),
        lambda: bench.batch_rate(bench.constant(bench.spark.read)),
    )


def body(bench: Bench) -> dict[str, Any]:
    return beside_parquet(
        bench,
        lambda: bench.batch_rate(bench.read(bench.topics, columns="body")),
        lambda: bench.batch_rate(bench.spark.read.parquet(bench.parquet).select("body")),
        lambda: bench.batch_rate(bench.constant(bench.spark.read, columns="body")),
    )


def stream(bench: Bench) -> dict[str, Any]:
    return beside_parquet(
        bench,
        lambda: bench.stream_rate(bench.read_stream(bench.topics)),
        lambda: bench.stream_rate(bench.parquet_stream()),
        lambda: bench.stream_rate(bench.constant(bench.spark.readStream)),
        STREAM_SHARE_TARGET,
    )


def to_parquet(bench: Bench) -> dict[str, Any]:
    """Into Parquet, from nsqd and from Parquet."""

    def into(frame: Any) -> float:
        with tempfile.TemporaryDirectory(dir=bench.directory) as target:
            return bench.stream_rate(frame, "parquet", path=f"{target}/out")

    return beside_parquet(
        bench, lambda: into(bench.read_stream(bench.topics)), lambda: into(bench.parquet_stream())
    ) | {"target": ""}


def trigger(bench: Bench, partitions: int, min_partitions: int = 1) -> dict[str, Any]:
    """Milliseconds of a micro-batch, of those after the first five."""
    count = 5 + 15 * bench.runs
    topics = [f"trigger-{number}" for number in range(partitions)]
    for topic in topics:
        if not logged(bench, topic):
            publish(bench.address, topic, TRIGGER_MESSAGES * count)
    frame = bench.read_stream(
        topics, maxMessagesPerTrigger=str(TRIGGER_MESSAGES * partitions), minPartitions=str(min_partitions)
    )
    parts: dict[str, list[float]] = {}
    for entry in bench.run_stream(frame)[5:]:
        for name, milliseconds in entry["durationMs"].items():
            parts.setdefault(name, []).append(milliseconds)
    medians = {name: harness.median(values) for name, values in parts.items()}
    whole = medians["triggerExecution"]
    return {
        "ms": whole,
        "planning_ms": medians["latestOffset"] + medians["queryPlanning"] + medians.get("getBatch", 0.0),
        "log_ms": medians["walCommit"] + medians["commitOffsets"],
        "run_ms": medians["addBatch"],
        "target": f"<= {TRIGGER_TARGET_MS:g} ms: {'met' if whole <= TRIGGER_TARGET_MS else 'missed'}",
    }


def logged(bench: Bench, topic: str) -> bool:
    connection = NsqdConnection(bench.address, 5, 30)
    try:
        return connection.offsets([topic])[0].is_known
    finally:
        connection.close()


def sink(bench: Bench) -> dict[str, Any]:
    """From nsqd, and from Parquet, to a topic; the topic is deleted after each run."""

    def write(frame: Any) -> float:
        began = time.perf_counter()
        frame.select("body").write.format("nsq").options(nsqd=bench.address, topic="written").mode("append").save()
        seconds = time.perf_counter() - began
        bench.daemon.call("POST", "/topic/delete?topic=written")
        return bench.messages / seconds

    return beside_parquet(
        bench,
        lambda: write(bench.read(bench.topics, columns="body")),
        lambda: write(bench.spark.read.parquet(bench.parquet)),
    ) | {"target": ""}


CASES: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "fetch": fetch,
    "decode": decode,
    "decode-singles": decode_singles,
    "batch": batch,
    "body": body,
    "stream": stream,
    "trigger-1": lambda bench: trigger(bench, 1),
    "trigger-4": lambda bench: trigger(bench, PARTITIONS),
    "trigger-4-tasks": lambda bench: trigger(bench, PARTITIONS, PARTITIONS),
    "to-parquet": to_parquet,
    "sink": sink,
}


@contextmanager
def started(messages: int, runs: int) -> Iterator[Bench]:
    """nsqd, Spark and filled topics."""
    places = (str(harness.ROOT / "src"), str(harness.ROOT), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    directory = Path(tempfile.mkdtemp(prefix="flintmq-bench-"))
    try:
        with harness.nsqd("--durability=os", "--retention-time=24h") as daemon:  # a spool finishes what others read
            kept = {"spark.ui.enabled": "false", "spark.sql.streaming.numRecentProgressUpdates": "10000"}
            spark = session("bench", "local[2]", "throughput", **kept)
            spark.sparkContext.setLogLevel("ERROR")
            spark.dataSource.register(ConstantSource)
            try:
                bench = Bench(daemon, spark, directory, messages, runs)
                bench.prepare()
                yield bench
            finally:
                spark.stop()
    finally:
        shutil.rmtree(directory)


def main(quick: bool = False, only: str = "") -> dict[str, Any]:
    """Run the cases whose name contains ``only``."""
    messages, runs = (200_000, 1) if quick else (2_000_000, 5)
    rows = []
    with started(messages, runs) as bench:
        for name, case in CASES.items():
            if only in name:
                row = {"case": name, **case(bench)}
                rows.append(row)
                print(harness.table([row]), file=sys.stderr, flush=True)
    return {
        "title": "Spark",
        "note": f"{messages:,} messages of {BODY_BYTES} bytes in {PARTITIONS} topics, local[2], medians of {runs}",
        "rows": rows,
    }


if __name__ == "__main__":
    print(json.dumps({"machine": harness.machine(), **main("--quick" in sys.argv)}, indent=1))
