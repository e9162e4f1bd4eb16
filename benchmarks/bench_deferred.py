"""Deferred messages: what a million of them cost, and how late they come when they are due.

Bodies of 200 bytes, MDPUBs of 100 messages, one channel, RDY 2500. A body begins with the time at which the publisher
wanted it to come, so lateness is from there to when the consumer has read it, publishing included. ``seconds`` and
``msg/s`` are those of publishing where nothing is delivered, else from the first due time to the last message.

A row meets its target when memory stays within 150 MiB, publishing takes at least 50,000 messages a second, and
messages due at that rate come within a second. When all are due at one moment the rate is what counts.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

from benchmarks import harness, load
from benchmarks.harness import Daemon, Load
from benchmarks.load import Address, Figures, Ready

BATCH = 100
MESSAGE_BYTES = 200
RATE = 50_000
RDY_COUNT = 2500
WINDOW = 8  # MDPUBs under way
MESSAGES = 1_000_000
MESSAGES_QUICK = 100_000
LEAD_S = 3.0  # between the last MDPUB and the first due time
PUBLISH_RATE_MIN = 30_000  # what publishing is taken to reach, for the first due time
REQUEUE_DELAY_MS = 15_000
MEMORY_MIB_MAX = 150.0
LATENESS_MS_MAX = 1000.0
_DUE = Struct(">Q")
_FRAME = Struct(f">{load.FRAME_OVERHEAD_BYTES}xQ{MESSAGE_BYTES - _DUE.size}x")
_REQUEUE_LINE = b"REQ 0000000000000000 %d\n" % REQUEUE_DELAY_MS


# loads


def publish(ready: Ready, address: Address, topic: str, messages: int, spread_s: float, delay_s: float) -> Figures:
    """MDPUBs whose due times begin after ``delay_s`` and are ``spread_s`` apart, the first from the last."""
    connection = load.connect(address, -1)
    fillers = load.bodies(BATCH, MESSAGE_BYTES - _DUE.size)
    count = messages // BATCH
    ready()
    began, began_ns = time.perf_counter(), time.time_ns()
    for number in range(count + WINDOW):
        if number < count:
            due_ns = began_ns + int((delay_s + spread_s * number / count) * 1e9)
            connection.sendall(mdpub(topic, due_ns, fillers))
        if number >= WINDOW:
            load.expect(connection, load.OK)
    return {"messages": messages, "seconds": time.perf_counter() - began, "first_due_ns": began_ns + int(delay_s * 1e9)}


def mdpub(topic: str, due_ns: int, fillers: Sequence[bytes]) -> bytes:
    """One MDPUB of bodies that say when they are due."""
    delay_ms = max(1, -(-(due_ns - time.time_ns()) // 1_000_000))
    return b"MD" + load.mpub(f"{topic} {delay_ms}", [_DUE.pack(due_ns) + filler for filler in fillers])[1:]


class TimedConsumer(load.Consumer):
    """A consumer that notes how late each message is; before that, it may give all of them back once.

    Attributes:
        lateness_ns: of each message.
    """

    def __init__(self, address: Address, topic: str, channel: str) -> None:
        super().__init__(address, topic, channel, MESSAGE_BYTES)
        self.lateness_ns = array("q")
        self.first_due_ns = 1 << 62

    def note(self, data: memoryview) -> None:
        """Messages that were just received."""
        now_ns = time.time_ns()
        dues = [due_ns for (due_ns,) in _FRAME.iter_unpack(data)]
        self.first_due_ns = min(self.first_due_ns, *dues)
        self.lateness_ns.extend([now_ns - due_ns for due_ns in dues])


def consume(ready: Ready, address: Address, topic: str, consumers: int, messages: int) -> Figures:
    """Receive and finish messages as they come due, by one or several connections."""
    connections = [TimedConsumer(address, topic, "ch") for _ in range(consumers)]
    ready()
    for connection in connections:
        connection.ready(RDY_COUNT)
    load.consume_all(connections, messages)
    ended_ns = time.time_ns()
    for connection in connections:
        connection.close()
    lateness = array("q")
    for connection in connections:
        lateness += connection.lateness_ns
    first_due_ns = min(connection.first_due_ns for connection in connections)
    return {"messages": len(lateness), "seconds": (ended_ns - first_due_ns) / 1e9, **_figures(lateness)}


def requeue(ready: Ready, address: Address, topic: str, messages: int) -> Figures:
    """Give every message back with a delay when it comes, and finish it when it comes again."""
    connection = load.connect(address)
    connection.sendall(f"SUB {topic} ch\n".encode())
    load.expect(connection, load.OK)
    frame_bytes = load.FRAME_OVERHEAD_BYTES + MESSAGE_BYTES
    due_ns = array("q", bytes(8 * (messages + 1)))
    lateness = array("q")
    ready()
    began = time.perf_counter()
    connection.sendall(b"RDY %d\n" % RDY_COUNT)
    requeued_s = 0.0
    requeued = 0
    held = b""
    while len(lateness) < messages:
        held += connection.recv(load.RECEIVE_BUFFER_BYTES)
        count = len(held) // frame_bytes
        now_ns = time.time_ns()
        lines = []
        for at in range(0, count * frame_bytes, frame_bytes):
            message_id = held[at + load.ID_AT : at + load.ID_AT + load.ID_BYTES]
            sequence = int(message_id, 16)
            if due_ns[sequence]:
                lateness.append(now_ns - due_ns[sequence])
                lines.append(b"FIN %b\n" % message_id)
            else:
                requeued += 1
                due_ns[sequence] = now_ns + REQUEUE_DELAY_MS * 1_000_000
                lines.append(b"REQ %b %d\n" % (message_id, REQUEUE_DELAY_MS))
        connection.sendall(b"".join(lines))
        held = held[count * frame_bytes :]
        if requeued == messages and not requeued_s:
            requeued_s = time.perf_counter() - began
    return {"messages": messages, "seconds": requeued_s, **_figures(lateness)}


def _figures(lateness_ns: array[int]) -> Figures:
    ordered = sorted(lateness_ns)
    return {
        "p50_ms": harness.percentile(ordered, 50) / 1e6,
        "p99_ms": harness.percentile(ordered, 99) / 1e6,
        "max_ms": ordered[-1] / 1e6,
        "min_ms": ordered[0] / 1e6,
    }


# cases


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        run: called with the server and how many messages to use; returns figures.
        share: of the messages that the others use.
        has_rate: whether messages are due no faster than they are to be delivered.
    """

    name: str
    run: Callable[[Daemon, int], dict[str, Any]]
    share: float = 1.0
    has_rate: bool = True


def _put(daemon: Daemon, messages: int) -> dict[str, Any]:
    """Published for later: nothing comes due."""
    _create(daemon)
    sample = harness.measure(
        daemon, Load(publish, address=daemon.tcp, topic="t", messages=messages, spread_s=1800.0, delay_s=1200.0)
    )
    _wait_until_deferred(daemon, messages)
    figures = sample.loads[0]
    return {
        "seconds": figures["seconds"],
        "msg/s": messages / figures["seconds"],
        "server_cpu_s_per_M": sample.server_cpu_s / messages * 1e6,
        "memory_mib": daemon.memory_mib("VmHWM"),
    }


def _due(rate: int, consumers: int = 1) -> Callable[[Daemon, int], dict[str, Any]]:
    """Published before the first is due, then due at a rate; all at one moment with rate 0."""

    def run(daemon: Daemon, messages: int) -> dict[str, Any]:
        _create(daemon)
        delay_s = messages / PUBLISH_RATE_MIN + LEAD_S
        spread_s = messages / rate if rate else 0.0
        arguments: dict[str, Any] = {"address": daemon.tcp, "topic": "t", "messages": messages}
        sample = harness.measure(
            daemon,
            Load(publish, spread_s=spread_s, delay_s=delay_s, **arguments),
            Load(consume, consumers=consumers, **arguments),
        )
        return {"server_cpu_s_per_M": sample.server_cpu_s / messages * 1e6, **_delivered(sample)}

    return run


def _requeue(daemon: Daemon, messages: int) -> dict[str, Any]:
    _create(daemon)
    harness.measure(
        daemon, Load(load.publish_batches, address=daemon.tcp, topic="t", messages=messages, size=MESSAGE_BYTES)
    )
    sample = harness.measure(daemon, Load(requeue, address=daemon.tcp, topic="t", messages=messages))
    return {"server_cpu_s_per_M": sample.server_cpu_s / messages * 1e6, **_delivered(sample)}


def _delivered(sample: harness.Sample) -> dict[str, Any]:
    figures = sample.loads[-1]
    if figures["min_ms"] < 0:
        raise harness.BenchmarkError(f"a message came {-figures['min_ms']:.3f} ms early")
    return {
        "seconds": figures["seconds"],
        "msg/s": figures["messages"] / figures["seconds"],
        "p50_ms": figures["p50_ms"],
        "p99_ms": figures["p99_ms"],
        "max_ms": figures["max_ms"],
        "memory_mib": sample.memory_mib,
    }


def _create(daemon: Daemon) -> None:
    daemon.call("POST", "/topic/create?topic=t")
    daemon.call("POST", "/channel/create?topic=t&channel=ch")


def _wait_until_deferred(daemon: Daemon, messages: int) -> None:
    deadline = time.monotonic() + harness.LOAD_TIMEOUT_S
    while f'"deferred_count":{messages},'.encode() not in daemon.call("GET", "/stats?format=json").replace(b" ", b""):
        if time.monotonic() > deadline:
            raise harness.BenchmarkError("not all messages are deferred")
        time.sleep(0.1)


CASES = [
    Case("MDPUB x 100, 20 min and more", _put, has_rate=False),
    Case("due at 50 k/s, 200 k", _due(RATE), share=0.2),
    Case("due at 50 k/s", _due(RATE)),
    Case("due at 50 k/s, 4 consumers", _due(RATE, consumers=4)),
    Case("due at one moment", _due(0), has_rate=False),
    Case("REQ 15 s each", _requeue, has_rate=False),
]


def main(quick: bool = False, only: str = "") -> dict[str, Any]:
    """Run the cases whose name contains ``only``; with a tenth of the messages when ``quick``."""
    rows = []
    for case in CASES:
        if only not in case.name:
            continue
        messages = int((MESSAGES_QUICK if quick else MESSAGES) * case.share)
        with harness.nsqd() as daemon:
            figures = case.run(daemon, messages)
        rows.append({"case": case.name, "messages": messages, **figures, "target": _verdict(case, figures)})
        print(harness.table(rows[-1:]), flush=True)
    return {"title": "deferred messages", "rows": rows}


def _verdict(case: Case, figures: dict[str, Any]) -> str:
    missed = []
    if figures["memory_mib"] > MEMORY_MIB_MAX:
        missed.append(f"{MEMORY_MIB_MAX:.0f} MiB")
    if case.has_rate and figures["max_ms"] > LATENESS_MS_MAX:
        missed.append(f"max {LATENESS_MS_MAX:.0f} ms")
    if not case.has_rate and figures["msg/s"] < RATE:
        missed.append(f"{RATE} msg/s")
    return f"missed: {', '.join(missed)}" if missed else "met"
