"""Machines of one's own on this one: a network namespace each, and between them a router that cuts and delays.

::

    clients (this process) ---+                        +--- n0: nsqd
                              +--- router: one rule for each pair and direction
    e0: etcd -----------------+      |                 +--- l0: nsqlookupd
                                     +--- tun: tests/chaos/delaying.py holds back what goes this way

A machine has the address ``10.77.<number>.2``. A cut is a rule of the router that drops, without a word, what one
machine sends to another: the other direction has a rule of its own.

Rules of this file: it needs root, and is used in namespaces of its own alone (see :func:`command`), which end with the
process, so that nothing is left whatever happens; nothing but iproute2 and util-linux is needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

CLIENTS = "clients"
_TOOLS = ("ip", "unshare", "nsenter", "mount")
_TUN = Path("/dev/net/tun")
_DELAYED_TABLE = 77
_PRIORITY = {"from tun": 10, "cut": 20, "delayed": 30}


def command(*arguments: str) -> list[str]:
    """Return a command that runs another one with a network, mounts and processes of its own.

    Everything that it starts ends with it, and so do its namespaces.
    """
    own = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return [*own, *arguments]


@cache
def problem() -> str:
    """Return why there can be no such network here; empty when there can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} of iproute2 and util-linux are missing: apt-get install iproute2 util-linux"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if not _TUN.exists():
        return f"there is no {_TUN}"
    probe = (
        "mount -t tmpfs tmpfs /mnt && ip link add veth-a type veth peer name veth-b && ip link del veth-a && "
        "ip tuntap add dev t mode tun && ip rule add from 10.77.1.2 to 10.77.2.2 blackhole"
    )
    found = subprocess.run(command("sh", "-c", probe), capture_output=True, text=True, check=False)
    return "" if found.returncode == 0 else f"network namespaces cannot be made here: {found.stderr.strip()}"


def _run(*arguments: str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(arguments)}: {done.stderr.strip()}"


class Network:
    """Machines, and who of them reaches whom.

    Args:
        names: of the machines; this process becomes the one called ``clients``.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._numbers = {name: number for number, name in enumerate(names, 1)}
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._cuts: set[tuple[str, str]] = set()
        self._delays: dict[tuple[str, str], tuple[float, float]] = {}
        _run("ip", "link", "set", "lo", "up")
        self._hold("router")
        self._router("sysctl", "-qw", "net.ipv4.ip_forward=1")
        for scope in ("all", "default"):  # what comes back from the tun does not come from where it was sent
            self._router("sysctl", "-qw", f"net.ipv4.conf.{scope}.rp_filter=0")
        for name, number in self._numbers.items():
            self._join(name, number)
        self._delaying = self._start_delaying()

    @property
    def names(self) -> list[str]:
        """Return the machines."""
        return list(self._numbers)

    def address(self, name: str) -> str:
        """Return the address of a machine."""
        return f"10.77.{self._numbers[name]}.2"

    def inside(self, name: str) -> list[str]:
        """Return the beginning of a command that is to run on a machine."""
        if name == CLIENTS:
            return []
        return ["nsenter", f"--net=/proc/{self._holders[name].pid}/ns/net"]

    def _hold(self, name: str) -> None:
        """Make the namespace of a machine; it is there as long as a process that does nothing."""
        ready = ["unshare", "--net", "sh", "-c", "ip link set lo up && echo && exec sleep infinity"]
        holder = self._holders[name] = subprocess.Popen(ready, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"\n", f"no namespace for {name}"

    def _router(self, *arguments: str) -> None:
        _run(*self.inside("router"), *arguments)

    def _join(self, name: str, number: int) -> None:
        """Put a cable between a machine and the router."""
        if name != CLIENTS:
            self._hold(name)
        router, here = f"/proc/{self._holders['router'].pid}/ns/net", self.inside(name)
        peer = str(self._holders["router"].pid)
        subnet, port = f"10.77.{number}", f"to-{name}"
        _run(*here, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", peer)
        _run(*here, "ip", "address", "add", f"{subnet}.2/24", "dev", "eth0")
        _run(*here, "ip", "link", "set", "eth0", "up")
        _run("nsenter", f"--net={router}", "ip", "address", "add", f"{subnet}.1/24", "dev", port)
        _run("nsenter", f"--net={router}", "ip", "link", "set", port, "up")
        _run(*here, "ip", "route", "add", "default", "via", f"{subnet}.1")

    # -- cuts ----------------------------------------------------------------------------------------------------------

    def _rule(self, verb: str, kind: str, source: str, target: str, *what: str) -> None:
        between = ("from", self.address(source), "to", self.address(target))
        self._router("ip", "rule", verb, "priority", str(_PRIORITY[kind]), *between, *what)

    def cut(self, source: str, target: str) -> None:
        """Drop what ``source`` sends to ``target`` from now on; not what comes the other way."""
        if (source, target) not in self._cuts:
            self._cuts.add((source, target))
            self._rule("add", "cut", source, target, "blackhole")

    def mend(self, source: str, target: str) -> None:
        """Undo :meth:`cut`."""
        if (source, target) in self._cuts:
            self._cuts.discard((source, target))
            self._rule("del", "cut", source, target, "blackhole")

    # -- delays --------------------------------------------------------------------------------------------------------

    def _start_delaying(self) -> subprocess.Popen[bytes]:
        name = [*self.inside("router"), sys.executable, str(Path(__file__).with_name("delaying.py")), "tun0"]
        process = subprocess.Popen(name, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n", "what delays packets did not start"
        self._router("ip", "link", "set", "tun0", "up")
        table = str(_DELAYED_TABLE)
        self._router("ip", "route", "add", "default", "dev", "tun0", "table", table)
        self._router("ip", "rule", "add", "priority", str(_PRIORITY["from tun"]), "iif", "tun0", "lookup", "main")
        return process

    def delay(self, source: str, target: str, delay_s: float, loss: float = 0.0) -> None:
        """Hold back each packet from ``source`` to ``target`` for half to one and a half of ``delay_s``, in order.

        Args:
            loss: the part of them that is dropped.
        """
        if (source, target) not in self._delays:
            self._rule("add", "delayed", source, target, "lookup", str(_DELAYED_TABLE))
        self._delays[source, target] = (delay_s, loss)
        self._tell(source, target, delay_s, loss)

    def hurry(self, source: str, target: str) -> None:
        """Undo :meth:`delay`."""
        if self._delays.pop((source, target), None) is not None:
            self._rule("del", "delayed", source, target, "lookup", str(_DELAYED_TABLE))

    def _tell(self, source: str, target: str, delay_s: float, loss: float) -> None:
        assert self._delaying.stdin is not None
        line = f"{self.address(source)} {self.address(target)} {delay_s} {loss}\n"
        self._delaying.stdin.write(line.encode())
        self._delaying.stdin.flush()

    def heal(self) -> None:
        """Undo every cut and delay."""
        for source, target in list(self._cuts):
            self.mend(source, target)
        for source, target in list(self._delays):
            self.hurry(source, target)

    def close(self) -> None:
        """End the processes that hold it."""
        processes: Sequence[subprocess.Popen[bytes]] = [self._delaying, *self._holders.values()]
        for process in processes:
            process.kill()
            process.wait()
