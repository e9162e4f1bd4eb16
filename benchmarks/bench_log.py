"""Speed of the partition log in one process: append, read, fetch, recovery, start.

Run ``python -m benchmarks.bench_log``; JSON on stdout. Every figure is the median of ``--repeat`` runs on a directory
of its own (``--directory``, default: a temporary one), after one run that is thrown away; data stays in the page cache,
so what is measured is this code and the kernel, not the device. Times are CPU seconds of this process.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flintmq.storage.files import OsFiles
from flintmq.storage.partition_log import PartitionLog, ReadCache

BODY = b"x" * 200
SEGMENT_BYTES = 64 * 1024 * 1024
MIB = 1024 * 1024


@contextmanager
def directory(parent: str | None) -> Iterator[OsFiles]:
    root = tempfile.mkdtemp(prefix="flintmq-bench-", dir=parent)
    files = OsFiles(root)
    try:
        yield files
    finally:
        files.close()
        shutil.rmtree(root)


def open_log(files: OsFiles, segment_bytes: int = SEGMENT_BYTES, cache: ReadCache | None = None) -> PartitionLog:
    def fail(corruption: object) -> None:
        raise AssertionError(f"the benchmark's own log is damaged: {corruption}")

    return PartitionLog.open(
        files,
        "topics/bench/0",
        partition=0,
        segment_bytes=segment_bytes,
        cache=cache or ReadCache(),
        report=fail,
        created_ns=1,
    )


def timed(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def fill(log: PartitionLog, batches: int, count: int, commit: bool = True) -> None:
    bodies = [BODY] * count
    append, set_committed = log.append, log.advance_committed
    for number in range(batches):
        append(bodies, number)
        if commit:
            set_committed(log.next_sequence)


def read_through(log: PartitionLog) -> None:
    sequence = log.start_sequence
    while (batch := log.read(sequence)) is not None:
        sequence = batch.end
    assert sequence == log.next_sequence


def fetch_through(log: PartitionLog, bytes_max: int) -> None:
    sequence = log.start_sequence
    while sequence < log.committed_sequence:
        _data, sequence = log.fetch(sequence, log.committed_sequence, bytes_max)


def follow(log: PartitionLog, batches: int, count: int) -> None:
    """Append and read each batch as the consumer of a live topic does."""
    bodies = [BODY] * count
    for number in range(batches):
        sequence = log.append(bodies, number)
        batch = log.read(sequence)
        assert batch is not None


def sync(log: PartitionLog) -> None:
    while (ticket := log.begin_sync()) is not None:
        ticket.run()
        log.finish_sync(ticket, None)


def shape(files: OsFiles, batches: int, count: int) -> dict[str, float]:
    """All figures of one shape of batches."""
    log = open_log(files)
    messages = batches * count
    append_s = timed(lambda: fill(log, batches, count))
    mib = log.size_bytes / MIB
    read_s = timed(lambda: read_through(log))
    fetch_s = timed(lambda: fetch_through(log, MIB))
    follow_s = timed(lambda: follow(log, batches, count))
    tail = log.next_sequence - 1
    tail_s = timed(lambda: [log.read(tail) for _ in range(100_000)])
    mib_all = log.size_bytes / MIB
    files.close()
    fresh = OsFiles(files.root)
    recover_s = timed(lambda: open_log(fresh))
    fresh.close()
    return {
        "append_us_per_batch": append_s / batches * 1e6,
        "append_messages_per_s": messages / append_s,
        "append_mib_per_s": mib / append_s,
        "read_us_per_batch": read_s / batches * 1e6,
        "read_mib_per_s": mib / read_s,
        "fetch_mib_per_s": mib / fetch_s,
        "append_and_read_us_per_batch": follow_s / batches * 1e6,
        "tail_read_us": tail_s / 100_000 * 1e6,
        "recover_s": recover_s,
        "log_mib": mib_all,
    }


def walk_segment(files: OsFiles, mib: int, count: int) -> dict[str, float]:
    """Recovery after a kill of a log that is one segment, never synced, so that all of it is walked."""
    log = open_log(files, segment_bytes=1 << 40)
    while log.size_bytes < mib * MIB:
        fill(log, 1000 // count + 1, count)
    size = log.size_bytes
    files.close()
    fresh = OsFiles(files.root)
    seconds = timed(lambda: open_log(fresh, segment_bytes=1 << 40))
    fresh.close()
    return {"recover_s": seconds, "recover_mib_per_s": size / MIB / seconds}


def many_segments(files: OsFiles, segments: int) -> dict[str, float]:
    """Start of a cleanly closed log of many segments."""
    log = open_log(files, segment_bytes=8192)
    while len(log.segments()) < segments:
        fill(log, 4, 30)
    sync(log)
    log.close()
    return {"segments": segments, "open_s": timed(lambda: open_log(files, segment_bytes=8192))}


def memory(files: OsFiles, messages: int) -> dict[str, float]:
    """Resident memory with a backlog, after reading all of it."""
    log = open_log(files)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fill(log, messages // 100, 100)
    read_through(log)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"backlog_mib": log.size_bytes / MIB, "max_rss_mib": after / 1024, "grown_mib": (after - before) / 1024}


def median(run: Callable[[OsFiles], dict[str, float]], repeat: int, parent: str | None) -> dict[str, float]:
    results = []
    for number in range(repeat + 1):
        with directory(parent) as files:
            result = run(files)
        if number:
            results.append(result)
    return {key: round(statistics.median(result[key] for result in results), 3) for key in results[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--directory", help="where to make the temporary directories")
    options = parser.parse_args()
    report: dict[str, object] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "body_bytes": len(BODY),
    }
    with directory(options.directory) as files:
        report["memory"] = {key: round(value, 1) for key, value in memory(files, 5_000_000).items()}

    def measure(name: str, run: Callable[[OsFiles], dict[str, float]]) -> None:
        report[name] = median(run, options.repeat, options.directory)
        print(name, file=sys.stderr)

    measure("mpub_200", lambda files: shape(files, 2_500, 200))
    measure("batches_of_10", lambda files: shape(files, 20_000, 10))
    measure("single", lambda files: shape(files, 100_000, 1))
    measure("recover_100_mib_of_200", lambda files: walk_segment(files, 100, 200))
    measure("recover_100_mib_of_single", lambda files: walk_segment(files, 100, 1))
    measure("start_with_segments", lambda files: many_segments(files, 2_000))
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
