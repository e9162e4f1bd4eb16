"""Three nsqds with three copies of everything, on one machine: replication, catching up, idle partitions, failover.

All processes and the loads share the machine's cores, so a rate says what the machine gave; the CPU seconds of each
process per million messages (s/M) say what it costs. ``rate_2_cores`` is what two cores would do that belong to the
three nsqds, the nsqlookupd and the load alone: 2 / (their seconds per message). ``others`` is how many cores other
processes had meanwhile.

``follower_s_per_M`` counts what a node does for partitions that it does not lead. Where one node leads everything it is
the middle of the other two; where all lead, it is not told apart and left out.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from benchmarks import clusters, disturbances, harness, load
from benchmarks.clusters import Cluster, Node, Run, cluster, cost, measure, until
from benchmarks.harness import BenchmarkError, Load

RUNS = 5
BATCH = 200
MESSAGE_BYTES = 100
MILLION = 1_000_000
CORES = 2
CATCH_UP_BYTES = 1_000_000_000
CATCH_UP_MESSAGE_BYTES = 1000
CREATED_COUNT = 20
PARTITIONS = 10_000
TOPICS = 50
IDLE_S = 20.0
SLOW_S = 10.0
STALL_S = 0.2  # a slow follower stands still for so long,
TURN_S = 0.02  # and runs for so long

Row = dict[str, Any]
Context = tuple[Cluster, str, int]


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        run: called with a fresh cluster or one that others have used, a topic that nobody has used, and ``size``.
        size: messages, bytes or partitions, as the case takes it.
        quick: the same in a quick run.
        targets: largest value allowed, by column; smallest of those that are rates.
        runs: how often; the row has the medians.
        is_alone: it gets a cluster of its own for each run.
    """

    name: str
    run: Callable[[Cluster, str, int], Row]
    size: int
    quick: int
    targets: dict[str, float] = field(default_factory=dict)
    runs: int = RUNS
    is_alone: bool = False


RATES = ("msg_per_s", "rate_2_cores", "mb_per_s", "mb_per_cpu_s")


# publishing


def _topic(found: Cluster, topic: str, partitions: int) -> dict[int, Node]:
    """Make a topic with all copies in sync; who leads which partition."""
    found.create(topic, partitions)
    for number in range(partitions):
        found.wait_in_sync(topic, number=number)
    return found.leaders(topic)


def _figures(run: Run, leaders: Sequence[int]) -> Row:
    """The row of a run, of which the nodes at these places led."""
    millions = run.messages / MILLION
    nodes = [each / millions for each in run.cost.nodes]
    followers = [each for place, each in enumerate(nodes) if place not in leaders]
    all_s = sum(nodes) + (run.cost.lookup_s + run.load_cpu_s) / millions
    row: Row = {"msg_per_s": run.messages / run.seconds, "rate_2_cores": CORES * MILLION / all_s}
    row["leader_s_per_M"] = sum(nodes[place] for place in set(leaders)) / len(set(leaders))
    if followers:
        row["follower_s_per_M"] = harness.median(followers)
    return row | {"load_s_per_M": run.load_cpu_s / millions, "others": run.cost.others}


def _publish(
    partitions: int, connections: int, request_of: Callable[[str], tuple[bytes, int]]
) -> Callable[[Cluster, str, int], Row]:
    """Requests one after the other on so many connections, to partitions that are led by as many nodes."""

    def run(found: Cluster, topic: str, messages: int) -> Row:
        leaders = _topic(found, topic, partitions)
        places = {number: found.nodes.index(leader) for number, leader in leaders.items()}
        loads = []
        for number, leader in leaders.items():
            request, count = request_of(f"{topic} {number}")
            share = connections // partitions + (number < connections % partitions)
            requests = max(share, messages // count // partitions)
            arguments = {"address": leader.tcp, "request": request, "messages": requests, "connections": share}
            loads.append(Load(load.request_reply, **arguments))
        made = measure(found, *loads)
        _, count = request_of(topic)
        made.messages *= count
        return _figures(made, sorted(set(places.values())))

    return run


def _batches(topic: str) -> tuple[bytes, int]:
    return load.mpub(topic, load.bodies(BATCH, MESSAGE_BYTES)), BATCH


def _single(topic: str) -> tuple[bytes, int]:
    return load.pub(topic, load.bodies(1, MESSAGE_BYTES)[0]), 1


def _paced(rate: int) -> Callable[[Cluster, str, int], Row]:
    """Single PUBs at a steady rate on one connection, answers not awaited: how long each took."""

    def run(found: Cluster, topic: str, messages: int) -> Row:
        leader = _topic(found, topic, 1)[0]
        arguments = {"topic": f"{topic} 0", "messages": messages, "rate": rate, "size": MESSAGE_BYTES}
        made = measure(found, Load(load.publish_timed, address=leader.tcp, **arguments))
        (figures,) = made.loads
        row = {name: figures[name] for name in ("p50_ms", "p99_ms", "max_ms")}
        return row | {"load_late_ms": figures["behind_ms"]} | _figures(made, [found.nodes.index(leader)])

    return run


# catching up


def _catch_up(found: Cluster, topic: str, size: int) -> Row:
    """A node that is down while so many bytes are published: from its first byte of them to being in sync."""
    leader = _topic(found, topic, 1)[0]
    late = found.others(leader)[0]
    late.kill()
    request = load.mpub(f"{topic} 0", load.bodies(BATCH, CATCH_UP_MESSAGE_BYTES))
    count = size // (BATCH * CATCH_UP_MESSAGE_BYTES)
    measure(found, Load(load.request_reply, address=leader.tcp, request=request, messages=count, connections=4))
    whole = found.stored_bytes(leader, topic)
    had = found.stored_bytes(late, topic)
    late.start()
    before = found.mark()
    until(lambda: found.stored_bytes(late, topic) > had, "the node gets something", poll_s=0.001)
    began = time.perf_counter()
    until(lambda: found.in_sync(topic) == clusters.NODES, "the node is in sync", poll_s=0.01)
    seconds = time.perf_counter() - began
    used = cost(found, before)
    nodes = {node: used.nodes[place] for place, node in enumerate(found.nodes)}
    megabytes = (whole - had) / 1e6
    return {
        "MB": megabytes,
        "mb_per_s": megabytes / seconds,
        "leader_s_per_GB": nodes[leader] / megabytes * 1000,
        "follower_s_per_GB": nodes[late] / megabytes * 1000,
        "mb_per_cpu_s": megabytes / max(nodes[leader], nodes[late]),
        "others": used.others,
    }


# topics


def _create(partitions: int) -> Callable[[Cluster, str, int], Row]:
    def run(found: Cluster, topic: str, count: int) -> Row:
        before = found.mark()
        times = sorted(found.create(f"{topic}-{number}", partitions) for number in range(count))
        used = cost(found, before)
        return {
            "p50_s": harness.percentile(times, 50),
            "max_s": times[-1],
            "cpu_s_each": (sum(used.nodes) + used.lookup_s) / count,
            "others": used.others,
        }

    return run


def _many(found: Cluster, topic: str, count: int) -> Row:
    """Very many partitions: made, idle, and the failover of a node that leads its share of them."""
    each = count // TOPICS
    topics = [f"{topic}-{number}" for number in range(TOPICS)]
    began, before = time.perf_counter(), found.mark()
    for name in topics:
        found.create(name, each)
    create_s, created = time.perf_counter() - began, cost(found, before)
    until(lambda: _in_sync_everywhere(found, topics), "all copies are in sync", poll_s=1.0)
    before = found.mark()
    time.sleep(IDLE_S)
    idle = cost(found, before)
    memory = [node.daemon.memory_mib() for node in found.nodes]
    victim = found.nodes[0]
    led = sum(1 for name in topics for node in found.leaders(name).values() if node is victim)
    before, began = found.mark(), time.perf_counter()
    victim.kill()

    def is_over(access: str) -> bool:
        others = [found.leaders(name, access) for name in topics]
        return all(len(its) == each and victim not in its.values() for its in others)

    until(lambda: is_over("w"), "others lead", poll_s=0.1)
    elected_s = time.perf_counter() - began
    until(lambda: is_over("r"), "others are ready", poll_s=0.1)
    ready_s = time.perf_counter() - began
    used = cost(found, before)
    return {
        "partitions": count,
        "create_s": create_s,
        "create_cpu_s": sum(created.nodes) + created.lookup_s,
        "idle_cpu_percent": 100 * max(idle.nodes) / idle.seconds,
        "idle_lookup_percent": 100 * idle.lookup_s / idle.seconds,
        "node_MiB": max(memory),
        "lookup_MiB": found.lookup.memory_mib(),
        "led": led,
        "elected_s": elected_s,
        "ready_s": ready_s,
        "failover_cpu_s": sum(used.nodes) + used.lookup_s,
        "others": max(idle.others, used.others),
    }


def _in_sync_everywhere(found: Cluster, topics: Sequence[str]) -> bool:
    rows = [row for name in topics for row in found.status(name)["topics"][0]["partitions"]]
    return all(len(row["in_sync"]) == clusters.NODES for row in rows)


# somebody is slow


def _slow_follower(found: Cluster, topic: str, messages: int) -> Row:
    """A follower stands still most of the time, then all the time: what the leader holds for it."""
    leader = _topic(found, topic, 1)[0]
    slow = found.others(leader)[0]
    request = load.mpub(f"{topic} 0", load.bodies(BATCH, CATCH_UP_MESSAGE_BYTES))

    def publish(count: int) -> Load:
        return Load(load.request_reply, address=leader.tcp, request=request, messages=count, connections=16)

    measure(found, publish(1000))
    before_mib = leader.daemon.memory_mib()
    leader.daemon.reset_peak()
    over = threading.Event()

    def hinder() -> None:
        while not over.wait(TURN_S):
            slow.signal(signal.SIGSTOP)
            over.wait(STALL_S)
            slow.signal(signal.SIGCONT)

    hinderer = threading.Thread(target=hinder)
    hinderer.start()
    try:
        measure(found, publish(messages // BATCH))
    finally:
        over.set()
        hinderer.join()
    hindered_mib = leader.daemon.memory_mib("VmHWM")
    slow.signal(signal.SIGSTOP)
    try:
        stopped = measure(found, publish(messages // BATCH))
        stopped_mib = leader.daemon.memory_mib("VmHWM")
    finally:
        slow.signal(signal.SIGCONT)
    return {
        "before_MiB": before_mib,
        "slow_MiB": hindered_mib,
        "stopped_MiB": stopped_mib,
        "held_MiB": stopped_mib - before_mib,
        "msg_per_s": stopped.messages * BATCH / stopped.seconds,
        "others": stopped.cost.others,
    }


# somebody floods


class _Watch:
    """Notes every state that a topic's partitions are seen in."""

    def __init__(self, found: Cluster, topic: str) -> None:
        self.states: set[tuple[Any, ...]] = set()
        self._found, self._topic = found, topic
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.05):
            with suppress(OSError, BenchmarkError):
                (row,) = self._found.status(self._topic)["topics"]
                for each in row["partitions"]:
                    self.states.add((each["partition"], each["epoch"], each["leader"], tuple(sorted(each["in_sync"]))))


def _floods(found: Cluster, topic: str, seconds: int) -> Row:
    """The floods of the fairness benchmark against a leader: elections, and members that leave the in-sync set."""
    leader = _topic(found, topic, 1)[0]
    flood = Load(
        disturbances.flood_nsqd,
        address=leader.tcp,
        http_address=leader.daemon.http,
        seconds=float(seconds),
        topic=f"{topic} 0",
    )
    with _Watch(found, topic) as watch:
        made = measure(found, flood)
        time.sleep(0.2)
    epochs = {state[1] for state in watch.states}
    return {
        "elections": len(epochs) - 1,
        "in_sync_changes": len({state[3] for state in watch.states}) - 1,
        "leader_cpu": max(made.cost.nodes) / made.cost.seconds,
        "others": made.cost.others,
    }


CASES = [
    Case("mpub-1-leader", _publish(1, 16, _batches), 2 * MILLION, 200_000, {"follower_s_per_M": 0.25}),
    Case("mpub-3-leaders", _publish(3, 16, _batches), 2 * MILLION, 200_000, {"rate_2_cores": 600_000}),
    Case("pub-1-leader", _publish(1, 100, _single), 100_000, 20_000),
    Case("pub-3-leaders", _publish(3, 100, _single), 100_000, 20_000, {"rate_2_cores": 30_000}),
    Case("paced-10k", _paced(10_000), 50_000, 10_000, {"p99_ms": 20.0}),
    Case("catch-up", _catch_up, CATCH_UP_BYTES, 100_000_000, {"mb_per_s": 150.0}, runs=3, is_alone=True),
    Case("create-1-partition", _create(1), CREATED_COUNT, 5, {"p50_s": 0.5}, runs=1),
    Case("create-30-partitions", _create(30), CREATED_COUNT // 4, 2, {"p50_s": 0.5}, runs=1),
    Case("slow-follower", _slow_follower, MILLION, 200_000, {"held_MiB": 64.0}, runs=1, is_alone=True),
    Case("floods", _floods, 8, 3, {"elections": 0.0, "in_sync_changes": 0.0}, runs=1, is_alone=True),
    Case(
        "many-partitions",
        _many,
        PARTITIONS,
        500,
        {"idle_cpu_percent": 5.0, "ready_s": 10.0},
        runs=1,
        is_alone=True,
    ),
]


def main(quick: bool = False, only: str = "") -> dict[str, Any]:
    """Run the case named ``only``, or else those whose name contains it; once and smaller when ``quick``."""
    cases = [case for case in CASES if case.name == only] or [case for case in CASES if only in case.name]
    rows, details = [], {}
    shared = [case for case in cases if not case.is_alone]
    if shared:
        with cluster("--durability=os") as found:
            for case in shared:
                runs = range(1 if quick else case.runs)
                samples = [_run(case, found, number, quick) for number in runs]
                details[case.name] = samples
                rows.append(_row(case, samples))
    for case in [case for case in cases if case.is_alone]:
        samples = []
        for number in range(1 if quick else case.runs):
            with cluster("--durability=os") as found:
                samples.append(_run(case, found, number, quick))
        details[case.name] = samples
        rows.append(_row(case, samples))
    note = f"load average {os.getloadavg()[0]:.1f} at the end"
    return {"title": "cluster: 3 nsqd, 3 copies, os", "rows": rows, "note": note, "details": details}


def _run(case: Case, found: Cluster, number: int, quick: bool) -> Row:
    topic = f"{case.name}-{number}"
    row = case.run(found, topic, case.quick if quick else case.size)
    for name in [each["topic"] for each in found.status()["topics"]] if not case.is_alone else ():
        found.lookup.call("POST", f"/topic/delete?topic={name}")
    return row


def _row(case: Case, samples: Sequence[Row]) -> Row:
    figures = {name: harness.median(sample[name] for sample in samples) for name in samples[0]}
    missed = [
        f"{column} {bound:g}"
        for column, bound in case.targets.items()
        if (figures[column] < bound if column in RATES else figures[column] > bound)
    ]
    met = "missed: " + ", ".join(missed) if missed else "met" if case.targets else ""
    row = {"case": case.name, **figures, "target": met}
    print(harness.table([row]), flush=True)
    return row
