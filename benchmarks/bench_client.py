"""Our client beside other Python clients, on one nsqd and in one run.

``python -m benchmarks --only client [--quick]``, or ``--only client/consume`` for some cases. The clients of a case
take turns, so that a busy moment of the machine does not hit one of them alone. Each is a process of its own
(``benchmarks/clients.py``); a client that cannot be imported is left out and named in the note.

nsq-py and pynsq both install a module named ``nsq``: to compare with nsq-py, install it into a virtual environment of
its own and name its interpreter in ``FLINTMQ_BENCH_NSQ_PY``.

The nsqd is ours with ``--durability=os``, or ``--peer``. What was consumed is checked with nsqd's counters.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from benchmarks import harness, load
from benchmarks.clients import BATCH, BODY, CHANNEL

RUNS = 5
TIMEOUT_S = 180.0
PRELOAD = 1.05  # of what is consumed: the end of a backlog is slow with every client
NSQ_PY = "FLINTMQ_BENCH_NSQ_PY"
MODULES = {
    "pynsq": "tornado, nsq.writer",
    "gnsq": "gnsq",
    "ansq": "ansq",
    "asyncnsq": "asyncnsq",
    "nsq-py": "nsq.checker",  # which pynsq, of the same name, does not have
}

OURS_PUBLISHING = ("flintmq", "flintmq uvloop", "flintmq no-batch")
OURS_CONSUMING = (
    "flintmq",
    "flintmq handler",
    "flintmq inline",
    "flintmq threads",
    "flintmq uvloop",
    "flintmq sync",
    "flintmq sync handler",
)
PEERS = ("pynsq", "gnsq", "ansq", "asyncnsq", "nsq-py")


@dataclass(frozen=True, slots=True)
class Case:
    """What is compared.

    Attributes:
        target: messages a second that ours must reach in it.
    """

    name: str
    messages: int
    clients: tuple[str, ...]
    target: int = 0


CASES = (
    Case("pub-single", 20_000, ("flintmq", "flintmq uvloop", "flintmq sync", *PEERS)),
    # On blocking sockets a thread has one publish under way; nsq-py has no public way to have more either.
    Case("pub-200", 100_000, (*OURS_PUBLISHING, *(peer for peer in PEERS if peer != "nsq-py"))),
    Case("mpub-200", 400_000, ("flintmq", "flintmq uvloop", "flintmq sync", *PEERS)),
    Case("consume-200", 100_000, (*OURS_CONSUMING, *PEERS)),
    Case("consume-2500", 100_000, (*OURS_CONSUMING, *PEERS), target=300_000),
)


def main(quick: bool = False, only: str = "", peer: str = "") -> dict[str, Any]:
    """Run the cases whose name contains ``only``; once and with a tenth of the messages when ``quick``.

    Args:
        peer: an nsqd binary to use instead of ours.
    """
    missing = [client for client in PEERS if not _is_there(client)]
    rows, details = [], {}
    for case in CASES:
        if only not in case.name:
            continue
        clients = [client for client in case.clients if client not in missing]
        messages = case.messages // (10 if quick else 1)
        with _server(peer) as daemon:
            samples = _run_case(daemon, case.name, clients, messages, 1 if quick else RUNS)
        found = [_row(case, client, samples[client], messages) for client in clients]
        print(harness.table(found), flush=True)
        rows += found
        details[case.name] = {"messages": messages, "samples": samples}
    return {
        "title": "clients on one nsqd",
        "note": f"not installed, so left out: {', '.join(missing)}" if missing else "",
        "server": peer or "flintmq nsqd --durability=os",
        "rows": rows,
        "details": details,
    }


def _server(peer: str) -> AbstractContextManager[harness.Daemon]:
    if peer:
        return harness.peer_nsqd(peer, "--mem-queue-size=1000000")
    return harness.nsqd("--durability=os")


def _interpreter(client: str) -> str:
    return os.environ.get(NSQ_PY, sys.executable) if client == "nsq-py" else sys.executable


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(harness.ROOT), str(harness.ROOT / "src")))}


def _is_there(client: str) -> bool:
    code = "import " + MODULES[client]
    done = subprocess.run([_interpreter(client), "-c", code], capture_output=True, env=_environment(), timeout=60)
    return done.returncode == 0


def _run_case(
    daemon: harness.Daemon, case: str, clients: list[str], messages: int, runs: int
) -> dict[str, list[dict[str, float]]]:
    samples: dict[str, list[dict[str, float]]] = {client: [] for client in clients}
    for number in range(runs):
        for client in _rotated(clients, number):
            topic = f"{case}-{number}-{clients.index(client)}"
            if case.startswith("consume"):
                _preload(daemon, topic, int(messages * PRELOAD))
            cpu_before = daemon.cpu_s()
            figures = _measure(client, case, daemon, topic, messages)
            figures["nsqd_cpu_s"] = daemon.cpu_s() - cpu_before
            _check(daemon, case, client, topic, messages)
            samples[client].append(figures)
            daemon.call("POST", f"/topic/delete?topic={topic}")
    return samples


def _rotated(clients: list[str], by: int) -> Iterator[str]:
    """Each round begins with another client."""
    for number in range(len(clients)):
        yield clients[(number + by) % len(clients)]


def _measure(client: str, case: str, daemon: harness.Daemon, topic: str, messages: int) -> dict[str, float]:
    command = [
        _interpreter(client),
        "-m",
        "benchmarks.clients",
        client,
        case,
        *map(str, daemon.tcp),
        topic,
        str(messages),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=_environment(), timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise harness.BenchmarkError(f"{client} did not end {case} within {TIMEOUT_S:g} s") from error
    if done.returncode:
        raise harness.BenchmarkError(f"{client} failed in {case}: {done.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _preload(daemon: harness.Daemon, topic: str, messages: int) -> None:
    connection = load.connect(daemon.tcp)
    try:
        command = load.mpub(topic, [BODY] * BATCH)
        for _ in range(-(-messages // BATCH)):
            connection.sendall(command)
            load.expect(connection, load.OK)
    finally:
        connection.close()


def _check(daemon: harness.Daemon, case: str, client: str, topic: str, messages: int) -> None:
    """See that nsqd counted what the client says it did."""
    (row,) = json.loads(daemon.call("GET", f"/stats?format=json&topic={topic}"))["topics"]
    if not case.startswith("consume"):
        if row["message_count"] != messages:
            raise harness.BenchmarkError(f"{client} published {row['message_count']} of {messages} in {case}")
        return
    (channel,) = (each for each in row["channels"] if each["channel_name"] == CHANNEL)
    left = channel["depth"] + channel["in_flight_count"] + channel["deferred_count"]
    finished = row["message_count"] - left
    # Some clients end without sending what they gathered; ours must not.
    lost = 0 if client.startswith("flintmq") else int(case.rpartition("-")[2])
    if finished < messages - lost:
        raise harness.BenchmarkError(f"{client} finished {finished} of {messages} in {case}")
    if channel["timeout_count"]:
        raise harness.BenchmarkError(f"{client} let {channel['timeout_count']} messages time out in {case}")


def _row(case: Case, client: str, samples: list[dict[str, float]], messages: int) -> dict[str, Any]:
    rate = harness.median(messages / sample["seconds"] for sample in samples)
    row: dict[str, Any] = {
        "case": case.name,
        "client": client,
        "msg_per_s": rate,
        "cpu_us_per_msg": harness.median(sample["cpu_s"] / messages * 1e6 for sample in samples),
        "nsqd_us_per_msg": harness.median(sample["nsqd_cpu_s"] / messages * 1e6 for sample in samples),
        "peak_MiB": max(sample["peak_mib"] for sample in samples),
        "target": "",
    }
    if case.target and client.startswith("flintmq"):
        row["target"] = "met" if rate >= case.target else f"missed: {case.target:,}"
    return row
