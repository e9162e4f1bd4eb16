"""nsqadmin over 2,000 topics with five channels each: the topics page, a node that never answers, and its memory.

The nsqd behind it is a server that answers ``/stats`` with as many topics, whose counters grow; the history is what a
day leaves behind. Times are those of a visitor on the same machine, medians; the CPU milliseconds of nsqadmin beside
them are the robust figure on a shared one. Memory is resident, after the pages were looked at and several rounds of
figures were taken. The time with a dead node is the longest of three pages, the first of them right after the start.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks import harness

TOPICS = 2_000
TOPICS_QUICK = 100
CHANNELS = 5
LOOKS = 20
ROUNDS_S = 45.0
ROUNDS_QUICK_S = 0.0
DAY_S = 86_400
PAGES = (
    "/",
    "/topics?sort=-waiting",
    "/topics/topic-0001",
    "/topics/topic-0001/channel-1",
    "/nodes",
    "/problems",
    "/counter",
)
TARGETS = {"topics page, ms": 100.0, "topics page, KiB": 150.0, "with a dead node, s": 2.0, "memory, MiB": 80.0}


class PretendNsqd:
    """A server that answers as an nsqd with many topics.

    Attributes:
        address: of its HTTP port.
    """

    def __init__(self, topics: int) -> None:
        self._topics = topics
        pretend = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path, _, query = self.path.partition("?")
                body = pretend.answer(path, query)
                self.send_response(200)
                self.send_header("Content-Type", "application/json; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with suppress(OSError):
                    self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, path: str, query: str) -> bytes:
        """Return the answer to a question."""
        if path == "/info":
            about = {"version": "1.3.0", "broadcast_address": "127.0.0.1", "hostname": "pretend", "tcp_port": 4150}
            return json.dumps({**about, "http_port": self._server.server_port}).encode()
        if path != "/stats":
            return b"OK"
        wanted = re.search(r"topic=topic-(\d+)", query)
        numbers = [int(wanted[1])] if wanted else range(self._topics)
        now = int(time.time())
        topics = [self._topic(number, now) for number in numbers]
        return json.dumps({"version": "1.3.0", "health": "OK", "start_time": 1, "topics": topics}).encode()

    def _topic(self, number: int, now: int) -> dict[str, Any]:
        count = now * (1 + number % 7)
        about = {"depth": number % 50, "backend_depth": 0, "message_count": count, "paused": False}
        latency = {"count": 0, "percentiles": None}
        more = {"in_flight_count": 3, "deferred_count": 0, "requeue_count": 1, "timeout_count": 0, "client_count": 2}
        channels = [
            {"channel_name": f"channel-{each}", **about, **more, "clients": None, "e2e_processing_latency": latency}
            for each in range(CHANNELS)
        ]
        name = f"topic-{number:04d}"
        return {
            "topic_name": name,
            "channels": channels,
            **about,
            "message_bytes": count,
            "e2e_processing_latency": latency,
        }

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()


def fill_history(path: Path, topics: int, address: str) -> int:
    """Write the file that a day leaves behind; return its size in bytes."""
    from flintmq.nsqadmin.history import FIGURES, TIERS, HistoryFile
    from flintmq.nsqadmin.options import NsqadminOptions

    size = NsqadminOptions(nsqd_http_address=(address,)).history_series
    names = ["total/", f"node/{address}", *(f"topic/topic-{number:04d}" for number in range(topics))]
    names += [f"channel/topic-{number:04d}/channel-{each}" for number in range(topics) for each in range(CHANNELS)]
    file = HistoryFile(str(path), size)
    now = int(time.time())
    file.write(now - DAY_S, dict.fromkeys(names[:size], (1.0,) * FIGURES))
    chance = random.Random(1)
    with file._database:
        for tier, (step_s, count) in enumerate(TIERS):
            for number in range(1, min(count, DAY_S // step_s) + 1):
                block = array("f", [chance.random()]) * (size * FIGURES)
                file._put(tier, now - now % step_s - number * step_s, block)
    file.close()
    return path.stat().st_size


class Nsqadmin:
    """A running nsqadmin."""

    def __init__(self, directory: Path, *flags: str) -> None:
        log = directory / "nsqadmin.log"
        command = [sys.executable, "-m", "flintmq", "nsqadmin", "--http-address=127.0.0.1:0", *flags]
        with log.open("wb") as file:
            environment = {**os.environ, "PYTHONPATH": str(harness.ROOT / "src")}
            self._process = subprocess.Popen(command, stderr=file, stdout=file, env=environment)
        deadline = time.monotonic() + harness.START_TIMEOUT_S * 4
        while (found := re.search(r"HTTP: listening on \S*?:(\d+)\n", log.read_text(errors="replace"))) is None:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise harness.BenchmarkError(f"nsqadmin does not listen: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.02)
        self._port = int(found[1])

    def look(self, path: str) -> tuple[float, float, bytes]:
        """Wall and CPU seconds of one page as a browser asks for it, and its bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        cpu_before, began = self._cpu_s(), time.perf_counter()
        try:
            connection.request("GET", path, headers={"Accept": "text/html"})
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise harness.BenchmarkError(f"{path} answers {answer.status}")
        return time.perf_counter() - began, self._cpu_s() - cpu_before, body

    def _cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/schedstat").read_text().split()
        return int(fields[0]) / 1e9

    def memory_mib(self, which: str = "VmRSS") -> float:
        """Resident memory; ``VmHWM`` is the highest so far."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.findall(rf"^{which}:\s+(\d+) kB", status, re.MULTILINE)[0]) / 1024

    def stop(self) -> None:
        """Ask it to stop."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)


def main(quick: bool) -> dict[str, Any]:
    """Measure; see the module."""
    topics = TOPICS_QUICK if quick else TOPICS
    figures: dict[str, float] = {}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nsqd = PretendNsqd(topics)
        stack.callback(nsqd.close)
        history = directory / "history"
        figures["history file, MiB"] = fill_history(history, topics, nsqd.address) / 2**20
        nsqadmin = Nsqadmin(directory, f"--nsqd-http-address={nsqd.address}", f"--history-path={history}")
        stack.callback(nsqadmin.stop)
        nsqadmin.look("/topics")
        looks = [nsqadmin.look("/topics") for _ in range(3 if quick else LOOKS)]
        figures["topics page, ms"] = 1000 * statistics.median(wall_s for wall_s, _, _ in looks)
        figures["topics page, CPU ms"] = 1000 * statistics.median(cpu_s for _, cpu_s, _ in looks)
        figures["topics page, KiB"] = len(looks[-1][2]) / 1024
        until = time.monotonic() + (ROUNDS_QUICK_S if quick else ROUNDS_S)
        while True:
            for page in PAGES:
                nsqadmin.look(page)
            nsqadmin.look("/topics/topic-0001?span=86400")
            if time.monotonic() > until:
                break
            time.sleep(2)
        figures["memory, MiB"] = nsqadmin.memory_mib()
        figures["memory at most, MiB"] = nsqadmin.memory_mib("VmHWM")
        dead = stack.enter_context(socket.create_server(("127.0.0.1", 0)))  # takes connections, and never answers
        addresses = (nsqd.address, f"127.0.0.1:{dead.getsockname()[1]}")
        (directory / "second").mkdir()
        second = Nsqadmin(directory / "second", *(f"--nsqd-http-address={address}" for address in addresses))
        stack.callback(second.stop)
        figures["with a dead node, s"] = max(second.look(page)[0] for page in ("/topics", "/nodes", "/"))
    rows = [
        {"case": f"{topics:,} topics x {CHANNELS} channels", "figure": name, "value": round(value, 2),
         "target": TARGETS.get(name), "holds": value <= TARGETS[name] if name in TARGETS else None}
        for name, value in figures.items()
    ]  # fmt: skip
    return {"title": "nsqadmin", "rows": rows}
