"""Utilities that move messages, on one nsqd and in one run: ours, and NSQ's where an nsqd of NSQ is named.

``python -m benchmarks --only tools [--quick] [--peer=PATH]``: beside the nsqd that ``--peer`` names lie its utilities,
which are measured beside ours, in turns. Both use our nsqd with ``--durability=os``, 200-byte messages, the same flags.

A rate is that between the first message that is finished (or published) and the last; starting is not part of it. The
CPU seconds are those of the utility, in the same time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness

BODY = b"x" * 200
CHANNEL = "c"
RUNS = 5
TIMEOUT_S = 120.0
POLL_S = 0.01
PIECE = 5000
PRELOAD = 1.1  # of what is counted: the last ones wait for --sync-interval
MESSAGES = 400_000
OURS, NSQS = "flintmq", "nsq"


@dataclass(frozen=True, slots=True)
class Case:
    """A utility and its flags.

    Attributes:
        target: messages a second that ours must reach.
    """

    name: str
    program: str
    flags: tuple[str, ...]
    target: int


CASES = (
    Case("nsq_to_file, 200 in flight", "nsq_to_file", ("--output-dir={directory}",), 0),
    Case("nsq_to_file", "nsq_to_file", ("--output-dir={directory}", "--max-in-flight=2500"), 300_000),
    Case("nsq_to_file, gzip", "nsq_to_file", ("--output-dir={directory}", "--max-in-flight=2500", "--gzip"), 0),
    Case("nsq_tail to /dev/null", "nsq_tail", ("--max-in-flight=2500",), 300_000),
    Case("nsq_to_nsq", "nsq_to_nsq", ("--destination-nsqd-tcp-address={other}", "--max-in-flight=2500"), 300_000),
    Case("to_nsq", "to_nsq", (), 500_000),
)


def main(quick: bool = False, only: str = "", peer: str = "") -> dict[str, Any]:
    """Run the cases whose name contains ``only``; once and with a tenth of the messages when ``quick``.

    Args:
        peer: an nsqd of NSQ with its utilities beside it.
    """
    rows: list[dict[str, Any]] = []
    messages = MESSAGES // (10 if quick else 1)
    whose = [OURS, *([NSQS] if peer else [])]
    for case in CASES:
        if only not in case.name:
            continue
        samples: dict[str, list[dict[str, float]]] = {each: [] for each in whose}
        for number in range(1 if quick else RUNS):
            for each in whose if number % 2 else reversed(whose):
                samples[each].append(_measure(case, each, peer, messages))
        rows += [_row(case, each, samples[each], messages) for each in whose]
        print(harness.table(rows[-len(whose) :]), flush=True)
    return {"title": "utilities", "rows": rows, "messages": messages}


def _measure(case: Case, whose: str, peer: str, messages: int) -> dict[str, float]:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flintmq-bench-")))
        nsqd, other = (stack.enter_context(harness.nsqd("--durability=os")) for _ in range(2))
        feeds = case.program == "to_nsq"
        if feeds:
            (directory / "lines").write_bytes((BODY + b"\n") * messages)
        else:
            nsqd.call("POST", "/topic/create?topic=t")
            nsqd.call("POST", f"/channel/create?topic=t&channel={CHANNEL}")
            for _ in range(0, int(messages * PRELOAD), PIECE):
                nsqd.call("POST", "/mpub?topic=t", (BODY + b"\n") * PIECE)
        names = {"directory": directory, "other": "{}:{}".format(*other.tcp)}
        flags = [flag.format(**names) for flag in case.flags]
        flags += [
            "--topic=t",
            "--nsqd-tcp-address={}:{}".format(*nsqd.tcp),
            *([] if feeds else [f"--channel={CHANNEL}"]),
        ]
        lines = stack.enter_context((directory / "lines").open("rb")) if feeds else subprocess.DEVNULL
        process = subprocess.Popen(
            [*_command(case.program, whose, peer), *flags],
            stdin=lines, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(harness.ROOT / "src")},
        )  # fmt: skip
        try:
            return _watch(process, lambda: _done(nsqd, feeds), messages, f"{whose} {case.name}")
        finally:
            process.terminate()
            process.wait()


def _command(program: str, whose: str, peer: str) -> list[str]:
    if whose == NSQS:
        return [str(Path(peer).parent / program)]
    return [sys.executable, "-c", f"import sys; from flintmq.cli import {program} as run; sys.exit(run())"]


def _done(nsqd: harness.Daemon, feeds: bool) -> int:
    """Messages that are finished, or published."""
    topics = json.loads(nsqd.call("GET", "/stats?format=json&topic=t&include_clients=false"))["topics"]
    if not topics:
        return 0
    if feeds:
        return int(topics[0]["message_count"])
    (channel,) = topics[0]["channels"]
    left = channel["depth"] + channel["in_flight_count"] + channel["deferred_count"]
    return int(channel["message_count"]) - int(left)


def _watch(process: subprocess.Popen[bytes], done: Callable[[], int], messages: int, what: str) -> dict[str, float]:
    deadline = time.monotonic() + TIMEOUT_S
    began, cpu_before, cpu_s = time.monotonic(), 0.0, 0.0
    while time.monotonic() < deadline:
        cpu_s = max(cpu_s, _cpu_s(process.pid))
        count, now = done(), time.monotonic()
        if not count:
            began, cpu_before = now, cpu_s  # what a start takes is not measured
        if count >= messages:
            return {"msg_per_s": messages / (now - began), "cpu_us": (cpu_s - cpu_before) / messages * 1e6}
        time.sleep(POLL_S)
    raise harness.BenchmarkError(f"{what}: {done()} of {messages} within {TIMEOUT_S:.0f} s")


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process that may have just ended."""
    try:
        tasks = [*Path(f"/proc/{pid}/task").iterdir()]
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


def _row(case: Case, whose: str, samples: list[dict[str, float]], messages: int) -> dict[str, Any]:
    rate = harness.median(sample["msg_per_s"] for sample in samples)
    row = {
        "case": case.name,
        "whose": whose,
        "msg_per_s": rate,
        "cpu_us_per_msg": harness.median(sample["cpu_us"] for sample in samples),
        "messages": messages,
        "target": "",
    }
    if case.target and whose == OURS:
        row["target"] = "met" if rate >= case.target else f"missed: {case.target:,}"
    return row
