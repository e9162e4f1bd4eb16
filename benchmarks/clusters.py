"""A cluster of real processes on this machine: several nsqds, and a nsqlookupd that keeps their coordination store.

Rules of this file: as in harness.py; the CPU time of every process counts, and what everybody else on the machine used
meanwhile is said beside each figure, because rates mean nothing while others work.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import harness
from benchmarks.harness import Address, BenchmarkError, Daemon, Load

NODES = 3
PATIENCE_S = 300.0
_POLL_S = 0.02
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_ACCEPT = {"Accept": "application/vnd.nsq; version=1.0"}

Found = TypeVar("Found")


def until(condition: Callable[[], Found], what: str, timeout_s: float = PATIENCE_S, poll_s: float = _POLL_S) -> Found:
    """Ask until the answer is true; return it.

    Raises:
        BenchmarkError: it was not in time.
    """
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise BenchmarkError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(poll_s)
    return found


class Node:
    """One nsqd over a directory that outlives it.

    Attributes:
        daemon: its process; of one that was ended, the last.
    """

    def __init__(self, command: Sequence[str], directory: Path) -> None:
        self._command = [*command, f"--data-path={directory}"]
        self._directory = directory
        directory.mkdir()
        self.daemon = self._launch()

    def _launch(self) -> Daemon:
        return Daemon(self._command, self._directory, {"PYTHONPATH": str(harness.ROOT / "src")})

    @property
    def tcp(self) -> Address:
        return self.daemon.tcp

    def start(self) -> None:
        """Start it again."""
        self.daemon = self._launch()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.daemon.pid, number)

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        self.daemon.stop(signal.SIGKILL)


class Cluster:
    """The processes.

    Attributes:
        nsqlookupd: keeps the store, unless there is an etcd.
        nodes: the nsqds.
        etcd: the process; None: there is none.
    """

    def __init__(self, directory: Path, flags: Sequence[str], etcd: str) -> None:
        self._directory = directory
        self.etcd: subprocess.Popen[bytes] | None = None
        self.nodes: list[Node] = []
        self.nsqlookupd: Daemon | None = None
        try:
            self._start(flags, etcd)
        except BaseException:
            self.stop()
            raise

    def _start(self, flags: Sequence[str], etcd: str) -> None:
        program = [sys.executable, "-m", "flintmq"]
        addresses = ["--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0"]
        (self._directory / "store").mkdir()
        store = ["--cluster-store=own", f"--store-path={self._directory / 'store'}"]
        if etcd:
            self.etcd, address = _start_etcd(etcd, self._directory)
            store = [f"--cluster-store={address}"]
        lookup_directory = self._directory / "nsqlookupd"
        lookup_directory.mkdir()
        self.nsqlookupd = Daemon(
            [*program, "nsqlookupd", *addresses, "--broadcast-address=127.0.0.1", "--allow-same-host", *store],
            lookup_directory,
            {"PYTHONPATH": str(harness.ROOT / "src")},
        )
        address = store[0].partition("=")[2] if etcd else "{}:{}".format(*self.nsqlookupd.http)
        command = [
            *program,
            "nsqd",
            *addresses,
            f"--cluster-store={address}",
            "--peer-address=127.0.0.1:0",
            "--broadcast-address=127.0.0.1",
            "--lookupd-tcp-address={}:{}".format(*self.nsqlookupd.tcp),
            *flags,
        ]
        for number in range(NODES):
            self.nodes.append(Node(command, self._directory / f"nsqd-{number}"))
        until(lambda: len(self.status("-")["nodes"]) == NODES, "the nodes are registered")

    def stop(self) -> None:
        """End everything."""
        for node in self.nodes:
            node.daemon.stop(signal.SIGKILL)
        if self.nsqlookupd is not None:
            self.nsqlookupd.stop()
        if self.etcd is not None:
            self.etcd.terminate()
            self.etcd.wait()

    # --- what is asked of it

    @property
    def lookup(self) -> Daemon:
        """The nsqlookupd."""
        assert self.nsqlookupd is not None
        return self.nsqlookupd

    def status(self, topic: str = "") -> Any:
        """What the nsqlookupd says of the cluster; ``-`` for what it says of no topic."""
        return json.loads(self.lookup.call("GET", f"/cluster/status?topic={topic}"))

    def create(self, topic: str, partitions: int = 1, copies: int = NODES, **meta: object) -> float:
        """Create a topic; return the seconds until all of it can be read and written."""
        extra = "".join(f"&{name}={value}" for name, value in meta.items())
        began = time.perf_counter()
        self.lookup.call("POST", f"/topic/create?topic={topic}&partition_num={partitions}&replicator={copies}{extra}")
        until(
            lambda: len(self.leaders(topic)) == partitions, f"{topic} is led", poll_s=0.002 if partitions < 64 else 0.2
        )
        return time.perf_counter() - began

    def leaders(self, topic: str, access: str = "r") -> dict[int, Node]:
        """The nodes that lead the partitions of a topic, by number."""
        connection = http.client.HTTPConnection(*self.lookup.http, timeout=60)
        try:
            connection.request("GET", f"/lookup?topic={topic}&access={access}&metainfo=true", headers=_ACCEPT)
            answer = connection.getresponse()
            found = json.loads(answer.read())
        finally:
            connection.close()
        ports = {node.tcp[1]: node for node in self.nodes}
        peers = (found.get("partitions") or {}) if answer.status == 200 else {}
        return {int(number): ports[peer["tcp_port"]] for number, peer in peers.items() if peer["tcp_port"] in ports}

    def others(self, node: Node) -> list[Node]:
        """All nodes but one."""
        return [each for each in self.nodes if each is not node]

    def in_sync(self, topic: str, number: int = 0) -> int:
        """How many copies of a partition are in sync."""
        (row,) = self.status(topic)["topics"]
        return len(next(each for each in row["partitions"] if each["partition"] == number)["in_sync"])

    def wait_in_sync(self, topic: str, count: int = NODES, number: int = 0) -> None:
        """Wait until so many copies of a partition are in sync."""
        until(lambda: self.in_sync(topic, number) == count, f"{count} copies of {topic}/{number} are in sync")

    def stored_bytes(self, node: Node, topic: str) -> int:
        """Bytes of a topic's logs at a node."""
        paths = (self._directory / f"nsqd-{self.nodes.index(node)}").glob(f"topics/*{topic}/p-*/*.log")
        return sum(path.stat().st_size for path in paths)

    def mark(self) -> Mark:
        """Note what everything has used so far."""
        running = [node.daemon for node in self.nodes if node.daemon.is_running]
        ours = {daemon.pid: daemon.cpu_s() for daemon in running}
        return Mark(time.perf_counter(), _busy_s(), ours, self.lookup.cpu_s(), time.process_time())


@contextmanager
def cluster(*flags: str, etcd: str = "") -> Iterator[Cluster]:
    """Three nsqds from this tree on free ports, with empty data directories that are removed afterwards.

    Args:
        flags: of each nsqd.
        etcd: a binary to keep the store; without one, nsqlookupd does.
    """
    directory = Path(tempfile.mkdtemp(prefix="flintmq-bench-"))
    found = None
    try:
        found = Cluster(directory, flags, etcd)
        yield found
    finally:
        if found is not None:
            found.stop()
        shutil.rmtree(directory, ignore_errors=True)


def find_etcd() -> str:
    """Path of an etcd on PATH or beside this Python; empty when there is none."""
    beside = Path(sys.executable).parent / "etcd"
    return shutil.which("etcd") or (str(beside) if beside.exists() else "")


def _start_etcd(binary: str, directory: Path) -> tuple[subprocess.Popen[bytes], str]:
    with harness.reserved_port() as first, harness.reserved_port() as second:
        return _start_etcd_on(binary, directory, first.getsockname()[1], second.getsockname()[1])


def _start_etcd_on(binary: str, directory: Path, port: int, peer_port: int) -> tuple[subprocess.Popen[bytes], str]:
    client, peer = (f"http://127.0.0.1:{each}" for each in (port, peer_port))
    command = [binary, f"--data-dir={directory / 'etcd'}", f"--listen-client-urls={client}", "--log-level=error"]
    command += [
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
    ]
    process = subprocess.Popen([*command, f"--initial-cluster=default={peer}"], stderr=subprocess.DEVNULL)

    def is_up() -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return False

    until(is_up, "etcd listens")
    return process, f"127.0.0.1:{port}"


# what it costs


@dataclass(frozen=True, slots=True)
class Mark:
    """What had been used at a moment: CPU seconds."""

    at_s: float
    busy_s: float
    nodes: dict[int, float]
    lookup_s: float
    own_s: float


@dataclass(slots=True)
class Cost:
    """What was used between two moments.

    Attributes:
        seconds: between them.
        nodes: CPU seconds of each node, in their order; 0 of one that does not live.
        lookup_s: of the nsqlookupd.
        others: shares of a core that other processes of the machine had.
    """

    seconds: float
    nodes: list[float]
    lookup_s: float
    others: float


def cost(found: Cluster, before: Mark, load_cpu_s: float = 0.0) -> Cost:
    """Say what was used since a mark.

    Args:
        load_cpu_s: by the loads, which are nobody else.
    """
    now = found.mark()
    nodes = [
        now.nodes.get(pid, 0.0) - before.nodes.get(pid, 0.0) if pid in now.nodes else 0.0
        for pid in (node.daemon.pid for node in found.nodes)
    ]
    lookup_s, seconds = now.lookup_s - before.lookup_s, now.at_s - before.at_s
    ours = sum(nodes) + lookup_s + load_cpu_s + now.own_s - before.own_s
    return Cost(seconds, nodes, lookup_s, max(0.0, now.busy_s - before.busy_s - ours) / seconds)


def _busy_s() -> float:
    """CPU seconds that anything on this machine has used."""
    user, nice, system, _idle, _wait, irq, softirq, *_ = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    return sum(map(int, (user, nice, system, irq, softirq))) / _TICKS_PER_S


@dataclass(slots=True)
class Run:
    """One run of loads against a cluster.

    Attributes:
        messages: that all of it is divided by.
        seconds: of the longest load.
        load_cpu_s: of the loads.
    """

    messages: int
    seconds: float
    load_cpu_s: float
    cost: Cost
    loads: list[dict[str, Any]] = field(default_factory=list)


def measure(found: Cluster, *loads: Load, meanwhile: Callable[[], None] | None = None) -> Run:
    """Run loads together against a cluster.

    Args:
        meanwhile: is called while they run.

    Raises:
        BenchmarkError: a load failed or did not end in time.
    """
    try:
        for each in loads:
            if each.wait() is None:
                raise BenchmarkError("a load is not ready in time")
        before = found.mark()
        for each in loads:
            each.go()
        if meanwhile is not None:
            meanwhile()
        figures = [each.wait() for each in loads]
        if None in figures:
            raise BenchmarkError(f"a load did not end in {harness.LOAD_TIMEOUT_S:.0f} s")
        load_cpu_s = sum(figure["cpu_s"] for figure in figures)
        return Run(
            messages=sum(figure["messages"] for figure in figures),
            seconds=max(figure["seconds"] for figure in figures),
            load_cpu_s=load_cpu_s,
            cost=cost(found, before, load_cpu_s),
            loads=figures,
        )
    finally:
        for each in loads:
            each.end()
