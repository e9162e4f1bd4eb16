"""What the trace costs: publishing, delivering and finishing with it off, on for some messages, and on for all.

Every mode is measured in turn against one server, each time with a topic of its own, ``RUNS`` times over, so that what
else the machine does meets all of them. ``rate_of_off`` and ``cpu_of_off`` compare medians with the mode ``off`` of the
same kind of topic. ``events_per_M`` says how many events were recorded for a million messages; with more of them than
``--trace-max-rate`` the rest is left out, and ``all-unbounded`` has no such bound.

The paced cases publish 5,000 messages a second one by one, which stays below the bound: every event is recorded.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

from benchmarks import harness, load
from benchmarks.harness import Daemon, Load, Sample

RUNS = 5
BATCH = 200
MESSAGE_BYTES = 200
WINDOW = 32
MESSAGES = 400_000
PACED_MESSAGES = 10_000
PACED_RATE = 5000
UNBOUNDED = "--trace-max-rate=100000000"
OWN_SERVER = ("--trace-max-rate=20000",)  # the default: how much is left out depends on the last second
_STORED_BYTES = 4 + 4 + 30  # the answer to MPUB_TRACE
_EVENTS = re.compile(r"^flintmq_nsqd_trace_events_total (\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Mode:
    """One row of the table.

    Attributes:
        switch: parameters of ``/message/trace/enable``; None for off.
        traced: of a batch of 200, messages with a trace id; None for a plain topic.
        is_paced: published one by one at a steady rate.
    """

    name: str
    switch: str | None = None
    traced: int | None = None
    is_paced: bool = False
    flags: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Rows of one kind are compared."""
        return "paced" if self.is_paced else "plain" if self.traced is None else "partition"


MODES = [
    Mode("plain off"),
    Mode("plain all", ""),
    Mode("plain all-unbounded", "", flags=(UNBOUNDED,)),
    Mode("partition off", traced=0),
    Mode("partition traced, 0 %", "&only=traced", 0),
    Mode("partition traced, 1 %", "&only=traced", 2),
    Mode("partition all", "", 0),
    Mode("paced off", is_paced=True, flags=OWN_SERVER),
    Mode("paced all", "", is_paced=True, flags=OWN_SERVER),
]


def publish_traced(ready: load.Ready, address: load.Address, topic: str, messages: int, traced: int) -> load.Figures:
    """MPUB_TRACEs of which ``traced`` messages each have a trace id, ``WINDOW`` of them unanswered at any time."""
    connection = load.connect(address, -1)
    ids = [(number + 1 if number < traced else 0).to_bytes(8, "big") for number in range(BATCH)]
    bodies = [each + body for each, body in zip(ids, load.bodies(BATCH, MESSAGE_BYTES), strict=True)]
    command = load.mpub(f"{topic} 0", bodies).replace(b"MPUB", b"MPUB_TRACE", 1)
    count = messages // BATCH
    sent = min(WINDOW, count)
    ready()
    began = time.perf_counter()
    connection.sendall(command * sent)
    answered = held = 0
    while answered < count:
        data = connection.recv(_STORED_BYTES * WINDOW)
        if not data or (not held and data[8:10] != b"OK"):
            raise load.UnexpectedAnswer(repr(data[:100]))
        fresh, held = divmod(held + len(data), _STORED_BYTES)
        answered += fresh
        fresh = min(fresh, count - sent)
        if fresh:
            connection.sendall(command * fresh)
            sent += fresh
    return {"messages": count * BATCH, "seconds": time.perf_counter() - began}


def _publisher(daemon: Daemon, mode: Mode, topic: str, messages: int) -> Load:
    arguments: dict[str, Any] = {"address": daemon.tcp, "topic": topic, "messages": messages}
    if mode.is_paced:
        return Load(load.publish_paced, rate=PACED_RATE, size=MESSAGE_BYTES, **arguments)
    if mode.traced is None:
        return Load(load.publish_batches, batch=BATCH, size=MESSAGE_BYTES, window=WINDOW, **arguments)
    return Load(publish_traced, traced=mode.traced, **arguments)


def _run(daemon: Daemon, mode: Mode, topic: str, messages: int) -> tuple[Sample, int]:
    """One measurement, and how many events were recorded in it."""
    parameters = "" if mode.traced is None else "&partition_num=1"
    daemon.call("POST", f"/topic/create?topic={topic}{parameters}")
    daemon.call("POST", f"/channel/create?topic={topic}&channel=ch")
    if mode.switch is not None:
        daemon.call("POST", f"/message/trace/enable?topic={topic}{mode.switch}")
    before = _event_count(daemon)
    arguments: dict[str, Any] = {"address": daemon.tcp, "topic": topic, "messages": messages, "size": MESSAGE_BYTES}
    consumer = Load(load.consume_timed, channel="ch", **arguments) if mode.is_paced else None
    consumer = consumer or Load(load.consume, channels=["ch"], **arguments)
    sample = harness.measure(daemon, _publisher(daemon, mode, topic, messages), consumer, messages=messages)
    count = _event_count(daemon) - before
    daemon.call("POST", f"/topic/delete?topic={topic}")
    return sample, count


def _event_count(daemon: Daemon) -> int:
    found = _EVENTS.search(daemon.call("GET", "/metrics").decode())
    return 0 if found is None else int(found[1])


def main(quick: bool = False, only: str = "") -> dict[str, Any]:
    """Run the modes whose name contains ``only``; one run of a tenth when ``quick``."""
    modes = [mode for mode in MODES if only in mode.name]
    runs = 1 if quick else RUNS
    share = 10 if quick else 1
    samples: dict[str, list[Sample]] = {mode.name: [] for mode in modes}
    events: dict[str, list[int]] = {mode.name: [] for mode in modes}
    for flags in dict.fromkeys(mode.flags for mode in modes):
        with harness.nsqd("--durability=os", *flags) as daemon:
            for number in range(runs):
                for index, mode in enumerate(modes):
                    if mode.flags == flags:
                        messages = (PACED_MESSAGES if mode.is_paced else MESSAGES) // share
                        sample, count = _run(daemon, mode, f"t{number}-{index}", messages)
                        samples[mode.name].append(sample)
                        events[mode.name].append(count * 1_000_000 // messages)
    rows = [_row(mode, samples[mode.name], events[mode.name]) for mode in modes]
    for mode, row in zip(modes, rows, strict=True):
        _compare(row, next((off for each, off in zip(modes, rows, strict=True) if _is_off(each, mode)), None))
    return {"title": "trace", "rows": rows, "details": samples}


def _is_off(mode: Mode, other: Mode) -> bool:
    return mode.switch is None and mode.kind == other.kind


def _row(mode: Mode, samples: list[Sample], events: list[int]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "mode": mode.name,
        "msg_per_s": harness.median(sample.messages / sample.seconds for sample in samples),
        "cpu_s_per_M": harness.median(sample.server_cpu_s * 1e6 / sample.messages for sample in samples),
        "peak_MiB": max(sample.memory_mib for sample in samples),
        "events_per_M": int(harness.median(events)),
        "p50_ms": None,
        "p99_ms": None,
    }
    if mode.is_paced:
        for name in ("p50_ms", "p99_ms"):
            row[name] = harness.median(sample.loads[-1][name] for sample in samples)
    return row


def _compare(row: dict[str, Any], off: dict[str, Any] | None) -> None:
    if off is not None:
        row["rate_of_off"] = f"{row['msg_per_s'] / off['msg_per_s']:.1%}"
        row["cpu_of_off"] = f"{row['cpu_s_per_M'] / off['cpu_s_per_M']:.1%}"
