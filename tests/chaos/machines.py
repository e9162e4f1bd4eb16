"""A cluster whose every process is on a machine of its own: nsqd, nsqlookupd and its store.

Rules of this file: the processes have the defaults of an operator but for their addresses; all machines are one host to
them, so copies may meet on it (``--allow-same-host``).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.chaos.network import CLIENTS, Network
from tests.integration import etcd
from tests.integration.daemons import PATIENCE_S, Daemon, Nsqd, Nsqlookupd, wait_until
from tests.integration.mounts import Mount

TCP_PORT, HTTP_PORT, PEER_PORT, ETCD_PORT, ETCD_PEER_PORT = 4150, 4151, 4152, 2379, 2380
DISK_BYTES = 768 * 1024 * 1024
COPY_COUNT = 3
_ASK_S = 2.0


class Etcd:
    """A member of an etcd on a machine."""

    def __init__(self, network: Network, name: str, directory: Path, members: list[str]) -> None:
        self.name = name
        self._directory = directory
        self._inside = network.inside(name)
        self._address = network.address(name)
        self._members = ",".join(f"{each}=http://{network.address(each)}:{ETCD_PEER_PORT}" for each in members)
        self.url = f"http://{self._address}:{ETCD_PORT}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def data_path(self) -> Path:
        return self._directory / self.name

    def start(self) -> None:
        peer = f"http://{self._address}:{ETCD_PEER_PORT}"
        flags = (
            f"--name={self.name}",
            f"--data-dir={self.data_path}",
            f"--listen-client-urls={self.url}",
            f"--advertise-client-urls={self.url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={self._members}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        )
        with (self._directory / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._inside, str(etcd.binary()), *flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def discard(self) -> None:
        if self.is_running:
            self.kill()


class Machines:
    """The whole cluster, and the network between its machines.

    Args:
        directory: for logs, and the data of the store.
        etcd_count: members of the etcd that is the store; 0: the first nsqlookupd keeps it.
        flags: of every nsqd, besides.
        lookupd_flags: of every nsqlookupd, besides.
    """

    def __init__(
        self,
        directory: Path,
        etcd_count: int = 1,
        node_count: int = COPY_COUNT,
        lookupd_count: int = 2,
        flags: tuple[str, ...] = (),
        lookupd_flags: tuple[str, ...] = (),
    ) -> None:
        self.directory = directory
        node_names = [f"n{number}" for number in range(node_count)]
        lookupd_names = [f"l{number}" for number in range(lookupd_count)]
        etcd_names = [f"e{number}" for number in range(etcd_count)]
        self.network = Network([CLIENTS, *node_names, *lookupd_names, *etcd_names])
        self.etcds = [Etcd(self.network, name, directory, etcd_names) for name in etcd_names]
        for member in self.etcds:
            member.start()
        self.store_names = etcd_names or lookupd_names[:1]
        store = ",".join(each.url for each in self.etcds)
        own = f"{self.network.address(lookupd_names[0])}:{HTTP_PORT}"
        self.names: dict[Daemon, str] = {}
        self.lookupds: list[Nsqlookupd] = []
        for number, name in enumerate(lookupd_names):
            kept = [f"--cluster-store={store or own}"]
            if not store and number == 0:
                (directory / "store").mkdir()
                kept = ["--cluster-store=own", f"--store-path={directory / 'store'}"]
            address = f"--broadcast-address={self.network.address(name)}"
            lookupd = Nsqlookupd(
                directory / f"{name}.log",
                [address, "--allow-same-host", *kept, *lookupd_flags],
                self.network.inside(name),
            )
            self._place(lookupd, name)
            self.lookupds.append(lookupd)
        self.nodes: list[Nsqd] = []
        self.disks: dict[Nsqd, Mount] = {}
        for name in node_names:
            self._add_node(name, store or own, flags)
        for daemon in (*self.lookupds, *self.nodes):
            daemon.launch()
        self.wait_whole()

    def _place(self, daemon: Daemon, name: str) -> None:
        address = self.network.address(name)
        daemon.tcp, daemon.http = (address, TCP_PORT), (address, HTTP_PORT)
        self.names[daemon] = name

    def _add_node(self, name: str, store: str, flags: tuple[str, ...]) -> None:
        disk = self.directory / name
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)]
        subprocess.run(command, check=True, capture_output=True)
        address = self.network.address(name)
        lookupds = [f"--lookupd-tcp-address={lookupd.tcp[0]}:{TCP_PORT}" for lookupd in self.lookupds]
        node = Nsqd(disk / "data", self.directory / f"{name}.log", (), self.network.inside(name))
        node.flags = [
            f"--data-path={node.data_path}",
            f"--broadcast-address={address}",
            f"--cluster-store={store}",
            f"--peer-address={address}:{PEER_PORT}",
            *lookupds,
            *flags,
        ]
        self._place(node, name)
        self.nodes.append(node)
        self.disks[node] = Mount(disk)

    @property
    def daemons(self) -> list[Daemon]:
        return [*self.lookupds, *self.nodes]

    @property
    def lookup_addresses(self) -> list[str]:
        """What clients are told."""
        return [f"http://{lookupd.tcp[0]}:{HTTP_PORT}" for lookupd in self.lookupds]

    # -- what the cluster says -----------------------------------------------------------------------------------------

    def ask(self, target: str, method: str = "GET") -> tuple[int, Any]:
        """Ask the first nsqlookupd that answers; status 0 when none does."""
        for lookupd in self.lookupds:
            if lookupd.is_running:
                with contextlib.suppress(OSError, ValueError):
                    return lookupd_request(lookupd.http, target, method)
        return 0, None

    def status(self) -> Any:
        """What a nsqlookupd says of the cluster; None when none says anything."""
        status, found = self.ask("/cluster/status")
        return found if status == 200 else None

    def partition(self, topic: str, number: int) -> dict[str, Any] | None:
        """The row of a partition in the status."""
        status = self.status()
        for row in status["topics"] if status else ():
            if row["topic"] == topic:
                return next((each for each in row["partitions"] if each["partition"] == number), None)
        return None

    def leader(self, topic: str, number: int, access: str = "w") -> Nsqd | None:
        """The node that leads a partition, as a nsqlookupd says."""
        found = find_leader([each.http for each in self.lookupds], topic, number, access)
        return next((node for node in self.nodes if found and node.tcp[0] == found[0]), None)

    def create(self, topic: str, partition_num: int, **parameters: str) -> None:
        """Create a topic, and wait until all of it can be published to."""
        more = "".join(f"&{name}={value}" for name, value in parameters.items())
        target = f"/topic/create?topic={topic}&partition_num={partition_num}&replicator={COPY_COUNT}{more}"
        wait_until(lambda: self.ask(target, "POST")[0] == 200, lambda: f"{topic} is created: {self.status()}")
        numbers = range(partition_num)
        wait_until(lambda: all(self.leader(topic, number, "r") for number in numbers), f"{topic} is led")

    def wait_whole(self, timeout_s: float = 2 * PATIENCE_S) -> None:
        """Wait until every node is registered and each partition has all of its copies in sync."""

        def is_whole() -> bool:
            status = self.status()
            if status is None or sum(not row["suspected"] for row in status["nodes"]) != len(self.nodes):
                return False
            rows = [row for topic in status["topics"] for row in topic["partitions"]]
            return all(row["leader"] and len(row["in_sync"]) == COPY_COUNT for row in rows)

        wait_until(is_whole, lambda: f"the cluster is whole: {self.status()}", timeout_s)

    # -- the end -------------------------------------------------------------------------------------------------------

    def mend(self) -> None:
        """Undo every cut, and start what does not run."""
        self.network.heal()
        for disk in self.disks.values():
            with contextlib.suppress(FileNotFoundError):
                disk.empty()
        for member in self.etcds:
            if member.is_running:
                member.send_signal(signal.SIGCONT)
            else:
                member.start()
        for daemon in self.daemons:
            if daemon.is_running:
                daemon.send_signal(signal.SIGCONT)
            else:
                daemon.discard()
                daemon.launch()

    def close(self) -> None:
        """End everything."""
        for daemon in self.daemons:
            daemon.discard()
        for member in self.etcds:
            member.discard()
        self.network.close()

    def crashes(self) -> list[str]:
        """What the daemons logged that only a bug logs."""
        return [f"{self.names[daemon]}: {crash}" for daemon in self.daemons for crash in daemon.crashes()]

    def stored(self, node: Nsqd, topic: str, number: int) -> bytes:
        """The batches of a copy, as they are on the disk of a node."""
        paths = sorted(node.data_path.glob(f"topics/*{topic}/p-{number:04d}/*.log"))
        return b"".join(path.read_bytes()[64:] for path in paths)


def lookupd_request(where: tuple[str, int], target: str, method: str = "GET", timeout_s: float = _ASK_S) -> Any:
    """Ask a nsqlookupd, and give up soon; return the status and the JSON.

    Raises:
        OSError, ValueError: it cannot be asked.
    """
    connection = http.client.HTTPConnection(*where, timeout=timeout_s)
    try:
        headers = {"Accept": "application/vnd.nsq; version=1.0"}
        connection.request(method, target, b"" if method == "POST" else None, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"null")
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()


def find_leader(lookupds: list[tuple[str, int]], topic: str, number: int, access: str) -> tuple[str, int] | None:
    """Ask several nsqlookupd for the leader of a partition; None: nobody knows one."""
    for where in lookupds:
        try:
            status, found = lookupd_request(
                where, f"/lookup?topic={topic}&access={access}&metainfo=true", timeout_s=1.0
            )
        except (OSError, ValueError):
            continue
        peer = (found.get("partitions") or {}).get(str(number)) if status == 200 else None
        if peer:
            return peer["broadcast_address"], peer["tcp_port"]
    return None


def now_ns() -> int:
    """The clock of the history."""
    return time.monotonic_ns()
