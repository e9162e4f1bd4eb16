"""Fairness: what happens to the latency of a quiet publisher and its consumer while somebody else is not quiet.

The victim publishes 2,000 messages of 200 bytes a second to one topic, one PUB each; its consumer finishes each as it
comes. Latency is from before the PUB is sent to after the message is received, so with ``fsync`` it has a sync in it.
In one run it is taken in a window before and in each phase of a disturbance, see disturbances.py.

A phase meets its target when the 99th percentile is at most three times what it was before, or 10 ms.

``turn_over_ms`` is what the longest turn of nsqd's event loop exceeded in the whole disturbance, as its own /metrics
saw it, ``nsqd_cpu`` its share of one core in the phase, ``late_ms`` how late the victim itself was at worst.

Floods are run on both event loops. At nsqlookupd the victim sends PINGs, and latency is that of the answers.
"""

from __future__ import annotations

import re
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from benchmarks import disturbances, harness
from benchmarks.harness import Address, BenchmarkError, Daemon, Load

RUNS = 3
RATE = 2000
TOPIC, CHANNEL = "victim", "channel"
WARM_UP_S = 0.7
BEFORE_S = 3.0
BEFORE_QUICK_S = 1.0
CPU_SAMPLE_S = 0.02
TARGET_FACTOR = 3.0
TARGET_MS = 10.0
DURABILITIES = ("os", "fsync")
LOOPS = ("uvloop", "asyncio")
PING_RATE = 100
_TURN = re.compile(r'^flintmq_nsqd_loop_delays_total\{over="([^"]+)"\} (\d+)', re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """One disturbance.

    Attributes:
        disturb: the load.
        arguments: what it takes beside addresses.
        quick: what is different in a quick run.
        flags: of nsqd.
        durabilities: with which it is run; none for a case of nsqlookupd, whose PINGs are watched instead.
        loops: the event loops on which it is run.
    """

    name: str
    disturb: Callable[..., dict[str, Any]]
    arguments: dict[str, Any]
    quick: dict[str, Any]
    flags: tuple[str, ...] = ()
    durabilities: tuple[str, ...] = DURABILITIES
    loops: tuple[str, ...] = LOOPS[:1]


_SHORT = {"seconds": 1.0}
CASES = [
    Case(
        "slow-consumers-same-topic",
        disturbances.slow_consumers,
        {"topic": TOPIC, "backlog": 1_000_000, "seconds": 5.0},
        {"backlog": 100_000, "seconds": 2.0},
    ),
    Case(
        "slow-consumers-other-topic",
        disturbances.slow_consumers,
        {"topic": "other", "backlog": 1_000_000, "seconds": 5.0},
        {"backlog": 100_000, "seconds": 2.0},
    ),
    Case("huge-mpubs", disturbances.huge_mpubs, {"rate": 20.0, "burst": 4, "seconds": 3.0}, _SHORT),
    Case(
        "idle-connections",
        disturbances.idle_connections,
        {"count": 5000, "rate": 2500, "seconds": 5.0},
        {"count": 500, **_SHORT},
    ),
    Case(
        "topics",
        disturbances.topics,
        {"count": 2000, "seconds": 4.0},
        {"count": 200, **_SHORT},
        ("--statsd-address=127.0.0.1:9", "--statsd-interval=2s"),  # the discard port: nobody has to listen
    ),
    Case("deferred", disturbances.deferred, {"count": 100_000, "rate": 20_000}, {"count": 10_000}),
    Case(
        "requeue-storm",
        disturbances.requeue_storm,
        {"backlog": 100_000, "rounds_per_s": 20.0, "seconds": 3.0},
        {"backlog": 10_000, **_SHORT},
    ),
    Case("floods", disturbances.flood_nsqd, {"seconds": 4.0}, _SHORT, durabilities=("os",), loops=LOOPS),
    Case("floods-nsqlookupd", disturbances.flood_nsqlookupd, {"seconds": 4.0}, _SHORT, durabilities=(), loops=LOOPS),
]


def main(quick: bool = False, only: str = "") -> dict[str, Any]:
    """Run the cases whose name contains ``only``, each with every durability; once and smaller when ``quick``."""
    rows: list[dict[str, Any]] = []
    details: dict[str, Any] = {}
    for case in [case for case in CASES if only in case.name]:
        for durability, loop in product(case.durabilities or ("",), case.loops):
            runs = [_run(case, durability, loop, quick) for _ in range(1 if quick else RUNS)]
            fresh = [_row(case, durability, loop, phases) for phases in zip(*runs, strict=True)]
            details[f"{case.name} {durability} {loop}"] = runs
            rows += fresh
            print(harness.table(fresh), flush=True)
    missed = [
        f"{row['case']} {row['durability']} {row['loop']} {row['phase']}" for row in rows if row["target"] != "met"
    ]
    return {
        "title": "fairness",
        "note": f"missed: {'; '.join(missed)}" if missed else "every phase meets its target",
        "rows": rows,
        "details": details,
    }


def _run(case: Case, durability: str, loop: str, quick: bool) -> list[dict[str, Any]]:
    """One run: the figures of each phase."""
    if not durability:
        return _run_nsqlookupd(case, loop, quick)
    over = harness.new_event()
    arguments = {**case.arguments, **(case.quick if quick else {})}
    with harness.nsqd(f"--durability={durability}", *case.flags, loop=loop) as daemon:
        disturbance = Load(case.disturb, **_addresses(case.disturb, daemon), **arguments)
        loads = [disturbance]
        try:
            _wait(disturbance)
            consumer = Load(
                disturbances.consume_steadily, address=daemon.tcp, topic=TOPIC, channel=CHANNEL, is_over=over.is_set
            )
            loads.append(consumer)
            _wait(consumer)
            publisher = Load(
                disturbances.publish_steadily, address=daemon.tcp, topic=TOPIC, rate=RATE, is_over=over.is_set
            )
            loads.append(publisher)
            _wait(publisher)
            consumer.go()
            publisher.go()
            time.sleep(WARM_UP_S)
            with _CpuShares(daemon) as shares:
                before_ns = time.monotonic_ns()
                time.sleep(BEFORE_QUICK_S if quick else BEFORE_S)
                turns = _turns(daemon)
                began_ns = time.monotonic_ns()
                disturbance.go()
                phases = _wait(disturbance)["phases"]
            turn_ms = _longest(turns, _turns(daemon))
            over.set()
            sent, received = _wait(publisher), _wait(consumer)
        finally:
            for each in loads:
                each.end()
    if sent["messages"] != received["messages"]:
        raise BenchmarkError(f"{case.name}: {sent['messages']} sent, {received['messages']} received")
    return _phases(received, sent["late_ms"], turn_ms, shares, (before_ns, began_ns), phases)


def _run_nsqlookupd(case: Case, loop: str, quick: bool) -> list[dict[str, Any]]:
    over = harness.new_event()
    arguments = {**case.arguments, **(case.quick if quick else {})}
    with harness.nsqlookupd(loop) as daemon:
        disturbance = Load(case.disturb, address=daemon.tcp, **arguments)
        victim = Load(disturbances.ping_steadily, address=daemon.tcp, rate=PING_RATE, is_over=over.is_set)
        try:
            _wait(disturbance)
            _wait(victim)
            victim.go()
            time.sleep(WARM_UP_S)
            with _CpuShares(daemon) as shares:
                before_ns = time.monotonic_ns()
                time.sleep(BEFORE_QUICK_S if quick else BEFORE_S)
                began_ns = time.monotonic_ns()
                disturbance.go()
                phases = _wait(disturbance)["phases"]
            over.set()
            seen = _wait(victim)
        finally:
            for each in (disturbance, victim):
                each.end()
    return _phases(seen, seen["late_ms"], float("nan"), shares, (before_ns, began_ns), phases)


def _phases(
    seen: dict[str, Any],
    late_ms: float,
    turn_ms: float,
    shares: _CpuShares,
    quiet_ns: tuple[int, int],
    phases: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """The figures of each phase, and of the time before.

    Args:
        seen: by the victim.
    """
    delays = _Delays(seen["sent_ns"], seen["delays_ns"])
    before = delays.figures(*quiet_ns)
    return [
        {
            "phase": phase["phase"],
            "seconds": (phase["end_ns"] - phase["begin_ns"]) / 1e9,
            **{f"before_{name}": value for name, value in before.items()},
            **delays.figures(phase["begin_ns"], phase["end_ns"]),
            "late_ms": late_ms,
            "turn_over_ms": turn_ms,
            "nsqd_cpu": shares.share(phase["begin_ns"], phase["end_ns"]),
            "before_nsqd_cpu": shares.share(*quiet_ns),
            "about": phase,
        }
        for phase in phases
    ]


def _addresses(function: Callable[..., Any], daemon: Daemon) -> dict[str, Address]:
    wants_http = "http_address" in function.__annotations__
    return {"address": daemon.tcp, **({"http_address": daemon.http} if wants_http else {})}


def _wait(one: Load) -> Any:
    said = one.wait()
    if said is None:
        raise BenchmarkError(f"a load said nothing in {harness.LOAD_TIMEOUT_S:.0f} s")
    return said


class _Delays:
    def __init__(self, sent_ns: Sequence[int], delays_ns: Sequence[int]) -> None:
        self._sent_ns, self._delays_ns = sent_ns, delays_ns

    def figures(self, begin_ns: int, end_ns: int) -> dict[str, float]:
        """Percentiles in ms of what was sent in a window."""
        pairs = zip(self._sent_ns, self._delays_ns, strict=True)
        found = array("q", sorted(delay_ns for sent_ns, delay_ns in pairs if begin_ns <= sent_ns < end_ns))
        if not found:
            raise BenchmarkError("the victim sent nothing in a window")
        return {
            "p50_ms": harness.percentile(found, 50) / 1e6,
            "p99_ms": harness.percentile(found, 99) / 1e6,
            "max_ms": found[-1] / 1e6,
        }


class _CpuShares:
    """Samples what a daemon has used, so that its share of a core is known for any window."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._samples: list[tuple[int, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> _CpuShares:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(CPU_SAMPLE_S):
            self._samples.append((time.monotonic_ns(), self._daemon.cpu_s()))

    def share(self, begin_ns: int, end_ns: int) -> float:
        """CPU seconds a second between two moments."""
        inside = [sample for sample in self._samples if begin_ns <= sample[0] <= end_ns]
        if len(inside) < 2:
            return float("nan")
        (first_ns, first_s), (last_ns, last_s) = inside[0], inside[-1]
        return (last_s - first_s) / ((last_ns - first_ns) / 1e9)


def _turns(daemon: Daemon) -> list[tuple[float, int]]:
    """How often nsqd's loop was late by more than so many seconds."""
    text = daemon.call("GET", "/metrics").decode()
    return [(float(bound), int(count)) for bound, count in _TURN.findall(text)]


def _longest(before: list[tuple[float, int]], after: list[tuple[float, int]]) -> float:
    """What the longest delay between two readings exceeded, in ms; 0 when there was none worth counting."""
    grown = [bound for (bound, count), (_, old) in zip(after, before, strict=True) if count > old]
    return max(grown, default=0.0) * 1000


def _row(case: Case, durability: str, loop: str, phases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One phase, medians over the runs; the maxima are the highest."""

    def middle(name: str) -> float:
        return harness.median(phase[name] for phase in phases)

    p99_ms, allowed_ms = middle("p99_ms"), max(TARGET_FACTOR * middle("before_p99_ms"), TARGET_MS)
    return {
        "case": case.name,
        "durability": durability,
        "loop": loop,
        "phase": phases[0]["phase"],
        "seconds": middle("seconds"),
        "before_p50_ms": middle("before_p50_ms"),
        "before_p99_ms": middle("before_p99_ms"),
        "p50_ms": middle("p50_ms"),
        "p99_ms": p99_ms,
        "max_ms": max(phase["max_ms"] for phase in phases),
        "turn_over_ms": max(phase["turn_over_ms"] for phase in phases),
        "nsqd_cpu": middle("nsqd_cpu"),
        "late_ms": max(phase["late_ms"] for phase in phases),
        "target": "met" if p99_ms <= allowed_ms else f"missed: p99 {allowed_ms:.3g} ms",
    }
