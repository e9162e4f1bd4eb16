"""What is done with the source and the sink: archive, once, triggers, latency, a session's start, the spool, memory.

``python -m benchmarks --only pipeline`` (``--quick``), with the nsqd, the Spark and the rows of ``bench_spark``. Each
case has a ceiling, or what it is compared with, of the same run, by turns; ``share`` is the one by the other.

- ``archive``: ``flintmq pipeline archive`` without Spark, beside Spark's own Parquet writer on the same rows.
- ``once``: the sink with ``delivery=once``, beside ``delivery=atLeastOnce``.
- ``trigger``: a micro-batch of 500 messages of one partition, beside Spark's ``rate-micro-batch`` with 500 rows.
- ``latency``: from nsqd's clock to the rows in the hands of ``foreachBatch``, at 10,000 messages a second; ``share`` is
  an empty trigger of ``rate-micro-batch`` by it.
- ``session``: seconds from nothing to a session, beside Spark's without any settings; ``archive_s`` with the class
  archive of ``flintmq pipeline warm``, where that was written.
- ``spool``: ``mode=spool`` from a channel's backlog to Spark's noop sink, beside the same by offset: from the start of
  the first micro-batch to the end of the last. What comes before is ``start_s``, the start of the spool's process
  included, and ``start_by_offset_s``. ``alone``: from nsqd to the disk and finished, without Spark; ``alone_waited`` is
  the share of that time in which the spool was ready to run and had no core: with much of it the rate is the machine's.
- ``memory``: most memory of JVM and Python workers while a micro-batch of all rows runs, shared pages counted once; the
  ceiling is what the JVM may have of it alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.bench_spark import TRIGGER_MESSAGES, Bench, publish, started
from flintmq.pipeline.archive import archive as archive_to
from flintmq.spark.java import find_java_home
from flintmq.spark.options import SPOOL, SourceOptions
from flintmq.spark.session_settings import class_archive, is_whole
from flintmq.spark.spool import SpoolProcess
from flintmq.sync import Producer

LATENCY_RATE = 10_000
LATENCY_S = 15.0
GATHERED_S = 0.01
WARM_BATCHES = 5
SAMPLED_EVERY_S = 0.05
GOALS = {
    "archive": ("share", 2.5, True),
    "once": ("share", 0.8, True),
    "trigger": ("share", 1.3, False),
    "latency": ("p50_ms", 500.0, False),
    "session": ("archive_s", 5.0, False),
    "spool": ("msg_per_s", 250_000.0, True),
    "memory": ("mib", 1536.0, False),
}
"""Of each case the figure that has a goal, the goal, and whether more is better."""

_OURS = "from flintmq.spark import session; spark = session('start', 'local[2]', **conf)"
_PLAIN = (
    "from pyspark.sql import SparkSession; b = SparkSession.builder.master('local[2]')\n"
    "for name, value in conf.items(): b = b.config(name, value)\n"
    "spark = b.getOrCreate()"
)


def by_turns(bench: Bench, ours: Callable[[], float], other: Callable[[], float]) -> tuple[float, float, float]:
    """Both by turns, the first turn thrown away: medians, and the median of their ratio."""
    ours(), other()
    pairs = [(ours(), other()) for _ in range(bench.runs)]
    return tuple(harness.median(each) for each in (*zip(*pairs, strict=True), [a / b for a, b in pairs]))  # type: ignore[return-value]


def archive(bench: Bench) -> dict[str, Any]:
    def ours() -> float:
        with tempfile.TemporaryDirectory(dir=bench.directory) as place:
            began = time.perf_counter()
            archive_to(f"{place}/out", nsqd=bench.address, topics=",".join(bench.topics))
            return bench.messages / (time.perf_counter() - began)

    def spark() -> float:
        with tempfile.TemporaryDirectory(dir=bench.directory) as place:
            began = time.perf_counter()
            bench.read(bench.topics).write.parquet(f"{place}/out")
            return bench.messages / (time.perf_counter() - began)

    rate, other, share = by_turns(bench, ours, spark)
    return {"msg_per_s": rate, "spark_parquet_per_s": other, "share": share}


def once(bench: Bench) -> dict[str, Any]:
    def write(delivery: str) -> float:
        frame = bench.read(bench.topics, columns="body")
        began = time.perf_counter()
        given = {"nsqd": bench.address, "topic": "written", "delivery": delivery}
        frame.write.format("nsq").options(**given).mode("append").save()
        seconds = time.perf_counter() - began
        bench.daemon.call("POST", "/topic/delete?topic=written")
        return bench.messages / seconds

    rate, other, share = by_turns(bench, partial(write, "once"), partial(write, "atLeastOnce"))
    return {"msg_per_s": rate, "plain_per_s": other, "share": share}


def rate_trigger_ms(bench: Bench) -> float:
    """Milliseconds of a micro-batch of Spark's own source."""
    frame = bench.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", TRIGGER_MESSAGES).load()
    query = frame.writeStream.format("noop").trigger(processingTime="0 seconds").start()
    try:
        wanted = WARM_BATCHES + 15 * bench.runs
        wait_until(lambda: len(query.recentProgress) >= min(wanted, 100), query)
        done = [json.loads(each.json)["durationMs"]["triggerExecution"] for each in query.recentProgress]
    finally:
        query.stop()
    return harness.median(done[WARM_BATCHES:])


def trigger(bench: Bench) -> dict[str, Any]:
    count = WARM_BATCHES + 15 * bench.runs

    def ours(number: int) -> float:
        publish(bench.address, f"short-{number}", TRIGGER_MESSAGES * count)
        frame = bench.read_stream([f"short-{number}"], maxMessagesPerTrigger=str(TRIGGER_MESSAGES))
        done = bench.run_stream(frame)[WARM_BATCHES:]
        return harness.median(each["durationMs"]["triggerExecution"] for each in done)

    pairs = [(ours(number), rate_trigger_ms(bench)) for number in range(3)][1:]
    share = harness.median(mine / theirs for mine, theirs in pairs)
    mine_ms, theirs_ms = (harness.median(each) for each in zip(*pairs, strict=True))
    return {"ms": mine_ms, "rate_micro_batch_ms": theirs_ms, "share": share}


def latency(bench: Bench) -> dict[str, Any]:
    waited_ms: list[float] = []

    def take(frame: Any, _: int) -> None:
        stored_us = [row[0] for row in frame.selectExpr("unix_micros(timestamp)").collect()]
        now_us = time.time_ns() / 1000
        waited_ms.extend((now_us - each) / 1000 for each in stored_us)

    with publishing(bench.address, "steady"):
        frame = bench.read_stream(["steady"], columns="timestamp")
        query = frame.writeStream.foreachBatch(take).trigger(processingTime="0 seconds").start()
        try:
            wait_until(lambda: len(query.recentProgress) > WARM_BATCHES, query)
            waited_ms.clear()
            time.sleep(LATENCY_S)
        finally:
            query.stop()
    found = sorted(waited_ms)
    p50, p99 = harness.percentile(found, 50), harness.percentile(found, 99)
    floor_ms = rate_trigger_ms(bench)
    row = {"p50_ms": p50, "p99_ms": p99, "msg_per_s": len(found) / LATENCY_S}
    return row | {"rate_micro_batch_ms": floor_ms, "share": floor_ms / p50}


@contextmanager
def publishing(address: str, topic: str) -> Iterator[None]:
    """Publish at a steady rate, in MPUBs of what comes in 10 ms."""
    stop = threading.Event()

    def run() -> None:
        bodies = [os.urandom(200)] * int(LATENCY_RATE * GATHERED_S)
        due = time.monotonic()
        with Producer(address) as producer:
            while not stop.wait(max(0.0, due - time.monotonic())):
                producer.mpub(topic, bodies)
                due += GATHERED_S

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def session_start(bench: Bench) -> dict[str, Any]:
    flags = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

    def start(program: str, conf: dict[str, str]) -> float:
        given = {"spark.ui.enabled": "false", **conf}
        code = f"conf = {given!r}\n{program}\nprint('up', flush=True)\ninput()"
        began = time.perf_counter()
        pipe = subprocess.PIPE
        child = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        assert child.stdout is not None
        line = child.stdout.readline()
        seconds = time.perf_counter() - began
        child.communicate(b"\n")
        if line != b"up\n":
            raise harness.BenchmarkError("a session does not start")
        return seconds

    without = {"spark.driver.extraJavaOptions": flags}
    has_archive = is_whole(class_archive(find_java_home(os.environ), os.environ))
    start(_OURS, without)
    runs = [
        (start(_OURS, without), start(_PLAIN, {}), start(_OURS, {}) if has_archive else float("nan"))
        for _ in range(bench.runs)
    ]
    ours_s, plain_s, archive_s = (harness.median(each) for each in zip(*runs, strict=True))
    row = {"s": ours_s, "plain_s": plain_s, "share": ours_s / plain_s}
    return row | ({"archive_s": archive_s} if has_archive else {})


def spool(bench: Bench) -> dict[str, Any]:
    numbers = iter(range(1000))
    starts_s: dict[str, list[float]] = {"spool": [], "offset": []}

    def run(mode: str) -> float:
        more = spooled(bench, f"{mode}-{next(numbers)}")
        began = time.time()
        done = bench.run_stream(bench.read_stream(bench.topics, mode=mode, **more if mode == "spool" else {}))
        rows = sum(each["numInputRows"] for each in done)
        if rows != bench.messages:
            raise harness.BenchmarkError(f"{rows} rows came by {mode}, {bench.messages} were published")
        first, last = (datetime.fromisoformat(each["timestamp"]).timestamp() for each in (done[0], done[-1]))
        starts_s[mode].append(first - began)
        return rows / (last + done[-1]["durationMs"]["triggerExecution"] / 1000 - first)

    rate, other, share = by_turns(bench, partial(run, "spool"), partial(run, "offset"))
    start_s, other_s = (harness.median(each[1:]) for each in starts_s.values())
    row = {
        "msg_per_s": rate,
        "by_offset_per_s": other,
        "share": share,
        "start_s": start_s,
        "start_by_offset_s": other_s,
    }
    alone = [spool_alone(bench, f"alone-{number}") for number in range(bench.runs)]
    return row | {name: harness.median(each[name] for each in alone) for name in alone[0]}


def spooled(bench: Bench, channel: str) -> dict[str, str]:
    """Options that spool a new channel, with all messages waiting in it."""
    for topic in bench.topics:
        bench.daemon.call("POST", f"/channel/create?topic={topic}&channel={channel}")
        bench.daemon.call("POST", f"/channel/setoffset?topic={topic}&channel={channel}", b"msgcount:0")
    return {"channel": channel, "spoolLocation": str(bench.directory / channel)}


def spool_alone(bench: Bench, channel: str) -> dict[str, float]:
    """From nsqd to the disk and finished, without Spark."""
    more = spooled(bench, channel)
    process = SpoolProcess(
        SourceOptions.parse({"nsqd": bench.address, "topics": ",".join(bench.topics), **more}), SPOOL
    )
    try:
        process.running()
        began, nsqd_s = time.perf_counter(), bench.daemon.cpu_s()
        run_s, waited_s = harness.scheduled_s(process.process_id)
        while any(unfinished(bench, topic, channel) for topic in bench.topics):
            time.sleep(SAMPLED_EVERY_S)
        seconds, nsqd_s = time.perf_counter() - began, bench.daemon.cpu_s() - nsqd_s
        run_after_s, waited_after_s = harness.scheduled_s(process.process_id)
    finally:
        process.close()
    return {
        "alone_per_s": bench.messages / seconds,
        "alone_cpu_s_per_M": (run_after_s - run_s) / bench.messages * 1e6,
        "alone_nsqd_s_per_M": nsqd_s / bench.messages * 1e6,
        "alone_waited": (waited_after_s - waited_s) / seconds,
    }


def unfinished(bench: Bench, topic: str, channel: str) -> int:
    """Messages of a channel that are not finished."""
    answer = json.loads(bench.daemon.call("GET", f"/stats?format=json&topic={topic}&channel={channel}"))
    found = answer["topics"][0]["channels"][0]
    return int(found["depth"] + found["in_flight_count"] + found["deferred_count"])


def memory(bench: Bench) -> dict[str, Any]:
    stop = threading.Event()
    most = [0, 0]

    def sample() -> None:
        while not stop.wait(SAMPLED_EVERY_S):
            jvm, workers = pss_bytes(bench.jvm_id)
            if jvm + workers > sum(most):
                most[:] = [jvm, workers]

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        for _ in range(bench.runs):
            bench.stream_rate(bench.read_stream(bench.topics))
    finally:
        stop.set()
        thread.join()
    heap_mib = bench.spark.sparkContext._jvm.Runtime.getRuntime().maxMemory() / (1 << 20)
    jvm_mib, workers_mib = (each / (1 << 20) for each in most)
    whole = jvm_mib + workers_mib
    row = {"mib": whole, "jvm_mib": jvm_mib, "workers_mib": workers_mib, "heap_max_mib": heap_mib}
    return row | {"share": whole / heap_mib}


def pss_bytes(root: int) -> tuple[int, int]:
    """Memory of a process, and of its descendants together, pages that several have counted once."""
    parents: dict[int, int] = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal():
            try:
                parents[int(directory.name)] = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has just ended
                continue
    tree, found = {root}, {root}
    while found:
        found = {each for each, parent in parents.items() if parent in found} - tree
        tree |= found
    sizes = {each: _pss(each) for each in tree}
    return sizes.pop(root), sum(sizes.values())


def _pss(process_id: int) -> int:
    try:
        text = Path(f"/proc/{process_id}/smaps_rollup").read_text()
    except OSError:  # it has just ended
        return 0
    return next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:")), 0)


def wait_until(condition: Callable[[], bool], query: Any, timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if query.exception() is not None:
            raise query.exception()
        if time.monotonic() > deadline:
            raise harness.BenchmarkError(f"a query does not get on: {query.status}")
        time.sleep(SAMPLED_EVERY_S)


CASES: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "archive": archive,
    "once": once,
    "trigger": trigger,
    "latency": latency,
    "session": session_start,
    "spool": spool,
    "memory": memory,
}


def judged(name: str, row: dict[str, Any]) -> str:
    figure, goal, is_more_better = GOALS[name]
    if figure not in row:
        return f"{figure}: not measured; flintmq pipeline warm comes first"
    is_met = row[figure] >= goal if is_more_better else row[figure] <= goal
    return f"{figure} {'>=' if is_more_better else '<='} {goal:g}: {'met' if is_met else 'missed'}"


def main(quick: bool = False, only: str = "") -> dict[str, Any]:
    """Run the cases whose name contains ``only``."""
    messages, runs = (200_000, 1) if quick else (2_000_000, 5)
    rows = []
    with started(messages, runs) as bench:
        for name, case in CASES.items():
            if only in name:
                found = case(bench)
                row = {"case": name, **found, "target": judged(name, found)}
                rows.append(row)
                print(harness.table([row]), file=sys.stderr, flush=True)
    return {
        "title": "Pipeline",
        "note": f"{messages:,} messages of 200 bytes, local[2], medians of {runs}",
        "rows": rows,
    }


if __name__ == "__main__":
    print(json.dumps({"machine": harness.machine(), **main("--quick" in sys.argv)}, indent=1))
