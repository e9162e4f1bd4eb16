"""nsqd against raw sockets: publishing, delivering, memory, latency; beside the official nsqd where it is installed.

Every case is measured several times against one server, each time with a topic of its own; medians are shown. Targets
stand beside the figures they are for. A ``Go nsqd`` on PATH is measured with memory queues, which is its fastest way.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from benchmarks import harness, load
from benchmarks.harness import Daemon, Load, Sample

RUNS = 5
BATCH = 200
MESSAGE_BYTES = 200
WINDOW = 32  # MPUBs under way; fsync has to gather enough of them while a sync runs
PEER_FLAGS = ("--mem-queue-size=10000000",)
CHANNELS_OF_BACKLOG = RUNS


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        run: called with the server, a fresh topic and how many messages to use.
        targets: largest or smallest value allowed, by column; a rate is a lower bound, all others upper bounds.
        has_peer: whether a server without our flags can run it, too.
        extra: further columns out of a sample.
    """

    name: str
    run: Callable[[Daemon, str, int], Sample]
    messages: int
    durability: str = "os"  # of nsqd; empty for the server that does the least instead
    targets: dict[str, float] = field(default_factory=dict)
    has_peer: bool = True
    extra: Callable[[Sample], dict[str, float]] = lambda sample: {}


# publishing


def _publish(window: int) -> Callable[[Daemon, str, int], Sample]:
    def run(daemon: Daemon, topic: str, messages: int) -> Sample:
        return harness.measure(daemon, _batches(daemon, topic, messages, window))

    return run


def _batches(daemon: Daemon, topic: str, messages: int, window: int = WINDOW) -> Load:
    return Load(
        load.publish_batches,
        address=daemon.tcp,
        topic=topic,
        messages=messages,
        batch=BATCH,
        size=MESSAGE_BYTES,
        window=window,
    )


def _singles(connections: int) -> Callable[[Daemon, str, int], Sample]:
    def run(daemon: Daemon, topic: str, messages: int) -> Sample:
        request = load.pub(topic, load.bodies(1, MESSAGE_BYTES)[0])
        return harness.measure(
            daemon,
            Load(
                load.request_reply,
                address=daemon.tcp,
                request=request,
                messages=messages,
                connections=connections,
            ),
        )

    return run


def _http(connections: int) -> Callable[[Daemon, str, int], Sample]:
    def run(daemon: Daemon, topic: str, messages: int) -> Sample:
        request = load.http_pub(daemon.http, topic, load.bodies(1, MESSAGE_BYTES)[0])
        return harness.measure(
            daemon,
            Load(
                load.request_reply,
                address=daemon.http,
                request=request,
                messages=messages,
                connections=connections,
                is_http=True,
            ),
        )

    return run


# delivering


def _preload(daemon: Daemon, topic: str, channels: list[str], messages: int) -> None:
    daemon.call("POST", f"/topic/create?topic={topic}")
    for channel in channels:
        daemon.call("POST", f"/channel/create?topic={topic}&channel={channel}")
    harness.measure(daemon, _batches(daemon, topic, messages))


def _consume(daemon: Daemon, topic: str, channels: list[str], messages: int, **arguments: Any) -> Load:
    return Load(
        load.consume,
        address=daemon.tcp,
        topic=topic,
        channels=channels,
        messages=messages,
        size=MESSAGE_BYTES,
        **arguments,
    )


def _deliver(consumers: int = 1, rdy_count: int = 2500, shuffled: bool = False) -> Callable[[Daemon, str, int], Sample]:
    def run(daemon: Daemon, topic: str, messages: int) -> Sample:
        _preload(daemon, topic, ["ch"], messages)
        channels = ["ch"] * consumers
        return harness.measure(
            daemon, _consume(daemon, topic, channels, messages, rdy_count=rdy_count, shuffled=shuffled)
        )

    return run


def _ordered(partitions: int = 1) -> Callable[[Daemon, str, int], Sample]:
    """One consumer in order on each of several partitions."""

    def run(daemon: Daemon, topic: str, messages: int) -> Sample:
        daemon.call("POST", f"/topic/create?topic={topic}&partition_num={partitions}&orderedmulti=true")
        each = messages // partitions
        for number in range(partitions):
            harness.measure(daemon, _batches(daemon, f"{topic} {number}", each))
        arguments = {"address": daemon.tcp, "topic": topic, "channel": "ch", "messages": each, "size": MESSAGE_BYTES}
        loads = [Load(load.consume_ordered, partition=number, **arguments) for number in range(partitions)]
        return harness.measure(daemon, *loads, messages=messages)

    return run


def _deliver_partitions(partitions: int) -> Callable[[Daemon, str, int], Sample]:
    """One plain consumer of a topic with partitions, all of them through one connection."""

    def run(daemon: Daemon, topic: str, messages: int) -> Sample:
        daemon.call("POST", f"/topic/create?topic={topic}&partition_num={partitions}")
        daemon.call("POST", f"/channel/create?topic={topic}&channel=ch")
        for number in range(partitions):
            harness.measure(daemon, _batches(daemon, f"{topic} {number}", messages // partitions))
        return harness.measure(daemon, _consume(daemon, topic, ["ch"], messages))

    return run


def _channels(count: int) -> Callable[[Daemon, str, int], Sample]:
    def run(daemon: Daemon, topic: str, messages: int) -> Sample:
        channels = [f"ch{number}" for number in range(count)]
        _preload(daemon, topic, channels, messages // count)
        return harness.measure(daemon, _consume(daemon, topic, channels, messages))

    return run


class Backlog:
    """The same backlog drained by one channel after the other: filled only once, because it is large."""

    def __init__(self) -> None:
        self._drained: dict[int, int] = {}

    def run(self, daemon: Daemon, topic: str, messages: int) -> Sample:
        count = self._drained.get(daemon.pid, 0)
        self._drained[daemon.pid] = count + 1
        if not count:
            _preload(daemon, "backlog", [f"ch{number}" for number in range(CHANNELS_OF_BACKLOG)], messages)
        return harness.measure(daemon, _consume(daemon, "backlog", [f"ch{count}"], messages))


def _publish_and_consume(daemon: Daemon, topic: str, messages: int) -> Sample:
    _preload(daemon, topic, ["ch"], 0)
    return harness.measure(
        daemon, _batches(daemon, topic, messages), _consume(daemon, topic, ["ch"], messages), messages=messages
    )


# latency


def _latency(rate: int) -> Callable[[Daemon, str, int], Sample]:
    def run(daemon: Daemon, topic: str, messages: int) -> Sample:
        _preload(daemon, topic, ["ch"], 0)
        return harness.measure(
            daemon,
            Load(load.publish_paced, address=daemon.tcp, topic=topic, messages=messages, rate=rate, size=MESSAGE_BYTES),
            Load(
                load.consume_timed,
                address=daemon.tcp,
                topic=topic,
                channel="ch",
                messages=messages,
                size=MESSAGE_BYTES,
            ),
        )

    return run


def _delays(sample: Sample) -> dict[str, float]:
    """Percentiles, and how late the publisher itself was at worst: what a busy machine adds."""
    publisher, consumer = sample.loads
    return {"p50_ms": consumer["p50_ms"], "p99_ms": consumer["p99_ms"], "load_late_ms": publisher["behind_ms"]}


def _peak(sample: Sample) -> dict[str, float]:
    return {"peak_MiB": sample.memory_mib}


MILLION = 1_000_000
CASES = [
    Case("mpub-os", _publish(1), MILLION, targets={"cpu_s_per_M": 0.6}),
    Case("mpub-os-pipelined", _publish(WINDOW), 2 * MILLION, targets={"msg_per_s": 1.2e6, "cpu_s_per_M": 0.6}),
    Case("mpub-fsync", _publish(1), 100_000, "fsync", has_peer=False),
    Case("mpub-fsync-pipelined", _publish(WINDOW), MILLION, "fsync", {"cpu_s_per_M": 0.6}, has_peer=False),
    Case("mpub-interval-pipelined", _publish(WINDOW), 2 * MILLION, "interval", {"cpu_s_per_M": 0.6}, has_peer=False),
    Case("deliver-fin", _deliver(), MILLION, targets={"msg_per_s": 0.8e6, "cpu_s_per_M": 0.8}),
    Case("deliver-fin-shuffled", _deliver(shuffled=True), MILLION, targets={"cpu_s_per_M": 1.5}),
    Case("drain-backlog", Backlog().run, 5 * MILLION, targets={"peak_MiB": 80.0, "cpu_s_per_M": 0.8}, extra=_peak),
    Case("channels-4", _channels(4), 4 * MILLION, targets={"cpu_s_per_M": 0.8}),
    Case("consumers-100", _deliver(consumers=100, rdy_count=250), MILLION),
    Case("publish-and-consume", _publish_and_consume, MILLION, targets={"cpu_s_per_M": 1.4}),
    Case("pub-1-connection", _singles(1), 40_000),
    Case("pub-10-connections", _singles(10), 100_000),
    Case("pub-100-connections", _singles(100), 200_000, targets={"cpu_s_per_M": 7.0}),
    Case("pub-100-connections-fsync", _singles(100), 100_000, "fsync", has_peer=False),
    Case("floor-100-connections", _singles(100), 200_000, "", has_peer=False),
    Case("http-pub-10-connections", _http(10), 40_000),
    Case("ping-pong-rdy-1", _deliver(rdy_count=1), 40_000),
    Case("ordered", _ordered(), 40_000, targets={"msg_per_s": 20_000.0}, has_peer=False),
    Case("ordered-fsync", _ordered(), 40_000, "fsync", {"msg_per_s": 20_000.0}, has_peer=False),
    Case("ordered-4-partitions", _ordered(4), 80_000, has_peer=False),
    Case("deliver-4-partitions", _deliver_partitions(4), MILLION, targets={"cpu_s_per_M": 0.8}, has_peer=False),
    Case("latency-10k", _latency(10_000), 50_000, targets={"p50_ms": 0.3, "p99_ms": 3.0}, extra=_delays),
]


def main(quick: bool = False, only: str = "", peer: str = "") -> dict[str, Any]:
    """Run the case named ``only``, or else those whose name contains it; one run of a tenth when ``quick``.

    Args:
        peer: an nsqd binary to run side by side; without it, the official one found on PATH.
    """
    found = (peer, peer) if peer else harness.find_peer()
    runs = 1 if quick else RUNS
    rows, details = [], {}
    for case in [case for case in CASES if case.name == only] or [case for case in CASES if only in case.name]:
        messages = case.messages // (10 if quick else 1)
        server = harness.nsqd(f"--durability={case.durability}") if case.durability else harness.floor()
        samples = _run_case(case, server, messages, runs)
        row = _row(case, samples)
        details[case.name] = {"messages": messages, "durability": case.durability, "samples": samples}
        if found and case.has_peer:
            peer_runs = 1 if case.name == "drain-backlog" else runs
            theirs = _run_case(case, harness.peer_nsqd(found[0], *PEER_FLAGS), messages, peer_runs)
            row |= {f"peer_{key}": value for key, value in _figures(case, theirs).items() if key != "load_s_per_M"}
            details[case.name]["peer_samples"] = theirs
        rows.append(row)
        print(harness.table([row]), flush=True)
    _compare_durability(rows)
    return {
        "title": "nsqd",
        "note": f"peer: {found[1]}" if found else "peer: no official nsqd on PATH, so its columns are empty",
        "rows": rows,
        "details": details,
    }


def _run_case(case: Case, server: AbstractContextManager[Daemon], messages: int, runs: int) -> list[Sample]:
    samples = []
    with server as daemon:
        for number in range(runs):
            topic = f"{case.name}-{number}"
            samples.append(case.run(daemon, topic, messages))
            if case.durability and f'"{topic}"' in daemon.call("GET", "/stats?format=json").decode():
                daemon.call("POST", f"/topic/delete?topic={topic}")
    return samples


def _figures(case: Case, samples: list[Sample]) -> dict[str, Any]:
    millions = [sample.messages / 1e6 for sample in samples]
    figures: dict[str, Any] = {
        "msg_per_s": harness.median(sample.messages / sample.seconds for sample in samples),
        "cpu_s_per_M": harness.median(s.server_cpu_s / m for s, m in zip(samples, millions, strict=True)),
        "load_s_per_M": harness.median(s.load_cpu_s / m for s, m in zip(samples, millions, strict=True)),
        "peak_MiB": max(sample.memory_mib for sample in samples),
    }
    extras = [case.extra(sample) for sample in samples]
    return figures | {key: harness.median(extra[key] for extra in extras) for key in extras[0]}


def _row(case: Case, samples: list[Sample]) -> dict[str, Any]:
    figures = _figures(case, samples)
    missed = [
        f"{column} {bound:g}"
        for column, bound in case.targets.items()
        if (figures[column] < bound if column == "msg_per_s" else figures[column] > bound)
    ]
    met = "missed: " + ", ".join(missed) if missed else "met" if case.targets else ""
    return {"case": case.name, "p50_ms": None, "p99_ms": None, **figures, "target": met}


def _compare_durability(rows: list[dict[str, Any]]) -> None:
    """The target of ``fsync`` is a share of what ``os`` reached."""
    rates = {row["case"]: row["msg_per_s"] for row in rows}
    for row in rows:
        if row["case"] == "mpub-fsync-pipelined" and "mpub-os-pipelined" in rates:
            share = row["msg_per_s"] / rates["mpub-os-pipelined"]
            row["of_os"] = f"{share:.0%}"
            if share < 0.6:
                row["target"] = "missed: 60% of os" + row["target"].replace("missed: ", ", ").replace("met", "")
