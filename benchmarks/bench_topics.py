"""What very many topics cost: a start after kill -9, ``/stats``, a stop, and the start of an nsqd without any.

One data directory per run: 5,000 topics with three channels and a few messages each, made by a real nsqd with
``fsync``, which is then killed. Wall times are from the start of the process to the first answer of ``/ping``, and from
SIGTERM to its end; on a shared machine the CPU seconds beside them are the robust figure.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks import harness, load

TOPICS = 5_000
TOPICS_QUICK = 200
CHANNELS = 3
MESSAGES = 3  # per topic, in as many batches
MESSAGE_BYTES = 200
WINDOW = 200  # requests under way while the topics are made
PING_S = 0.005  # between two of them, beside /stats
RUNS = 3
EMPTY_RUNS = 9
DEADLINE_S = 300.0
TARGETS = {
    (False, "start_killed_s"): 5.0,
    (False, "stop_s"): 8.0,
    (False, "stats_s"): 0.5,
    (True, "start_cpu_s"): 0.2,
}

Address = tuple[str, int]


class Process:
    """One nsqd on free ports over a directory that outlives it; when constructed, it has answered ``/ping``.

    Attributes:
        start_s, start_cpu_s: from its start to that answer.
    """

    def __init__(self, directory: Path) -> None:
        self._reserved = [harness.reserved_port() for _ in range(2)]
        self.tcp: Address
        self.http: Address
        self.tcp, self.http = (each.getsockname() for each in self._reserved)
        command = [sys.executable, "-m", "flintmq", "nsqd", f"--data-path={directory / 'data'}", "--log-level=warn"]
        command += [f"--tcp-address=127.0.0.1:{self.tcp[1]}", f"--http-address=127.0.0.1:{self.http[1]}"]
        (directory / "data").mkdir(exist_ok=True)
        began = time.perf_counter()
        with (directory / "stderr.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(harness.ROOT / "src")}
            )
        self.pid = self._process.pid
        while True:
            with suppress(OSError):
                if self.get("/ping")[1] == b"OK":
                    break
            if self._process.poll() is not None or time.perf_counter() - began > DEADLINE_S:
                self.kill()
                raise harness.BenchmarkError(f"nsqd does not answer: {(directory / 'stderr.log').read_text()[-2000:]}")
            time.sleep(0.005)
        self.start_s = time.perf_counter() - began
        self.start_cpu_s = self.cpu_s()

    def cpu_s(self) -> float:
        """CPU seconds of its living threads so far."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def memory_mib(self) -> float:
        """Resident memory in MiB."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def get(self, path: str) -> tuple[float, bytes]:
        """How long one GET took in seconds, and the body of its answer."""
        connection = http.client.HTTPConnection(*self.http, timeout=60)
        began = time.perf_counter()
        try:
            connection.request("GET", path)
            body = connection.getresponse().read()
        finally:
            connection.close()
        return time.perf_counter() - began, body

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()
        self._free()

    def stop(self) -> tuple[float, float]:
        """Ask it to stop; wall and CPU seconds until it has."""
        cpu_before, began = self.cpu_s(), time.perf_counter()
        self._process.send_signal(signal.SIGTERM)
        _, status, usage = os.wait4(self.pid, 0)
        seconds = time.perf_counter() - began
        self._process.returncode = os.waitstatus_to_exitcode(status)
        self._free()
        if self._process.returncode:
            raise harness.BenchmarkError(f"nsqd stopped with exit code {self._process.returncode}")
        return seconds, usage.ru_utime + usage.ru_stime - cpu_before

    def _free(self) -> None:
        for each in self._reserved:
            each.close()


def fill(nsqd: Process, topics: int) -> None:
    """Make the topics, their channels, and publish to each."""
    names = [f"topic_{number}" for number in range(topics)]
    channels = [f"/channel/create?topic={name}&channel=ch{c}" for name in names for c in range(CHANNELS)]
    for paths in ([f"/topic/create?topic={name}" for name in names], channels):
        asyncio.run(_post_all(nsqd.http, paths))
    connection = load.connect(nsqd.tcp)
    body = b"x" * MESSAGE_BYTES
    for _ in range(MESSAGES):
        for start in range(0, topics, WINDOW):
            part = names[start : start + WINDOW]
            connection.sendall(b"".join(load.pub(name, body) for name in part))
            load.expect(connection, load.OK * len(part))
    connection.close()


async def _post_all(address: Address, paths: list[str]) -> None:
    left = iter(paths)

    async def work() -> None:
        reader, writer = await asyncio.open_connection(*address)
        for path in left:
            writer.write(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in head:
                raise harness.BenchmarkError(f"POST {path}: {head!r}")
        writer.close()

    await asyncio.gather(*(work() for _ in range(WINDOW)))


def stats(nsqd: Process) -> dict[str, float]:
    """What ``/stats`` takes, and the longest that a ``/ping`` of somebody else waited meanwhile."""
    cpu_before = nsqd.cpu_s()
    seconds, body = nsqd.get("/stats?format=json")
    cpu_s = nsqd.cpu_s() - cpu_before
    waited_s = [nsqd.get("/ping")[0]]
    ended = threading.Event()

    def ping() -> None:
        while not ended.wait(PING_S):
            waited_s.append(nsqd.get("/ping")[0])

    pinging = threading.Thread(target=ping)
    pinging.start()
    nsqd.get("/stats?format=json")
    ended.set()
    pinging.join()
    return {"stats_s": seconds, "stats_cpu_s": cpu_s, "stats_MB": len(body) / 1e6, "ping_max_ms": max(waited_s) * 1000}


# cases


def _many(topics: int) -> dict[str, float]:
    with _directory() as directory:
        nsqd = Process(directory)
        fill(nsqd, topics)
        nsqd.kill()
        nsqd = Process(directory)
        figures = {"start_killed_s": nsqd.start_s, "start_killed_cpu_s": nsqd.start_cpu_s}
        figures |= stats(nsqd)
        figures["stop_s"], figures["stop_cpu_s"] = nsqd.stop()
        nsqd = Process(directory)
        figures |= {"start_stopped_s": nsqd.start_s, "start_stopped_cpu_s": nsqd.start_cpu_s}
        figures["memory_MiB"] = nsqd.memory_mib()
        figures["stop_idle_s"], figures["stop_idle_cpu_s"] = nsqd.stop()
        return figures


def _empty() -> dict[str, float]:
    with _directory() as directory:
        nsqd = Process(directory)
        figures = {"start_s": nsqd.start_s, "start_cpu_s": nsqd.start_cpu_s, "memory_MiB": nsqd.memory_mib()}
        nsqd.stop()
        return figures


def main(quick: bool = False, only: str = "") -> dict[str, Any]:
    """Run the cases whose name contains ``only``; once and with few topics when ``quick``."""
    topics = TOPICS_QUICK if quick else TOPICS
    runs: dict[str, list[dict[str, float]]] = {}
    if only in "many":
        runs[f"{topics} topics x {CHANNELS} channels"] = [_many(topics) for _ in range(1 if quick else RUNS)]
    if only in "empty":
        runs["empty"] = [_empty() for _ in range(1 if quick else EMPTY_RUNS)]
    rows = [
        {"case": case, "figure": figure, "median": median, "target": _verdict(figure, case, median)}
        for case, samples in runs.items()
        for figure, median in ((figure, harness.median(each[figure] for each in samples)) for figure in samples[0])
    ]
    return {"title": "very many topics, and none", "rows": rows, "runs": runs}


def _verdict(figure: str, case: str, value: float) -> str:
    target = TARGETS.get((case.partition(" ")[0] == "empty", figure))
    if target is None:
        return ""
    return f"{'met' if value <= target else 'missed'}: {target}"


@contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="flintmq-bench-") as name:
        yield Path(name)
