"""What is done to a cluster: faults with a beginning and an end, drawn from a seed.

Rules of this file: a fault may be undone by :meth:`Machines.mend` at any time; none takes a disk away for good, so
nothing acknowledged may ever be lost by them.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import permutations

from tests.chaos.machines import Etcd, Machines
from tests.chaos.network import CLIENTS
from tests.integration.daemons import Daemon, Nsqd

Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong for a while.

    Attributes:
        name: what it is, and on which machine.
        begin, end: what is done.
        lasting_s: between the two.
    """

    name: str
    begin: Step
    end: Step
    lasting_s: float


def _start(daemon: Daemon) -> None:
    if not daemon.is_running:
        daemon.discard()
        daemon.launch()


def _kill(daemon: Daemon) -> None:
    if daemon.is_running:
        daemon.send_signal(signal.SIGKILL)
        code = daemon.wait()
        assert code in (-signal.SIGKILL, 0), f"{code}\n{daemon.log}"  # 0: another fault has ended it just now


def _signal(daemon: Daemon, number: signal.Signals) -> None:
    if daemon.is_running:
        daemon.send_signal(number)


def _pairs(between: Iterable[str], others: Iterable[str]) -> list[tuple[str, str]]:
    """Both directions between two groups of machines."""
    return [pair for one in between for other in others if one != other for pair in ((one, other), (other, one))]


class Faults:
    """Draws faults for a cluster."""

    def __init__(self, machines: Machines, chance: random.Random) -> None:
        self._machines = machines
        self._network = machines.network
        self._chance = chance
        self._kinds: dict[str, Callable[[], Fault]] = {
            "kill": self.kill,
            "stop": self.stand_still,
            "end": self.end_and_start,
            "isolate": self.isolate,
            "peers": self.cut_from_nodes,
            "store": self.cut_from_store,
            "one way": self.cut_one_way,
            "slow": self.slow,
            "full": self.fill_disk,
            "lookupd": self.kill_nsqlookupd,
            "lookupd stands": self.stop_nsqlookupd,
            "etcd": self.lose_store,
            "all": self.kill_all,
        }

    @property
    def kinds(self) -> list[str]:
        return list(self._kinds)

    def draw(self, kind: str = "") -> Fault:
        """Return a fault, of a kind or of any."""
        return self._kinds[kind or self._chance.choice(self.kinds)]()

    def _node(self) -> Nsqd:
        return self._chance.choice(self._machines.nodes)

    def _name(self, daemon: Daemon) -> str:
        return self._machines.names[daemon]

    def _lasting(self, least_s: float = 0.2, most_s: float = 9.0) -> float:
        return self._chance.uniform(least_s, most_s)

    def kill(self) -> Fault:
        """kill -9, and a start inside or after its lease."""
        node = self._node()
        return Fault(f"kill -9 of {self._name(node)}", lambda: _kill(node), lambda: _start(node), self._lasting())

    def stand_still(self) -> Fault:
        node = self._node()

        def go_on() -> None:
            _signal(node, signal.SIGCONT)

        name = f"SIGSTOP of {self._name(node)}"
        return Fault(name, lambda: _signal(node, signal.SIGSTOP), go_on, self._lasting())

    def end_and_start(self) -> Fault:
        """As an upgrade does."""
        node = self._node()
        told: list[int] = []

        def end() -> None:
            if node.is_running:
                told.append(node.pid)
                node.send_signal(signal.SIGTERM)

        def start() -> None:
            if node.is_running and node.pid in told:  # else another fault has killed it, and started the next one
                node.send_signal(signal.SIGCONT)
                node.wait()
            _start(node)

        return Fault(f"SIGTERM of {self._name(node)}", end, start, self._lasting())

    def kill_all(self) -> Fault:
        nodes = self._machines.nodes

        def begin() -> None:
            for node in nodes:
                _kill(node)

        def end() -> None:
            for node in nodes:
                _start(node)

        return Fault("kill -9 of all nodes", begin, end, self._lasting(0.1, 5.0))

    def _cut(self, name: str, pairs: list[tuple[str, str]], lasting_s: float | None = None) -> Fault:
        def begin() -> None:
            for pair in pairs:
                self._network.cut(*pair)

        def end() -> None:
            for pair in pairs:
                self._network.mend(*pair)

        return Fault(name, begin, end, self._lasting() if lasting_s is None else lasting_s)

    def isolate(self) -> Fault:
        name = self._name(self._node())
        return self._cut(f"{name} cut from everybody", _pairs([name], self._network.names))

    def cut_from_nodes(self) -> Fault:
        name = self._name(self._node())
        others = [self._name(node) for node in self._machines.nodes]
        return self._cut(f"{name} cut from the other nodes", _pairs([name], others))

    def cut_from_store(self) -> Fault:
        name = self._name(self._node())
        return self._cut(f"{name} cut from the store", _pairs([name], self._machines.store_names))

    def cut_one_way(self) -> Fault:
        """Of two machines one reaches the other no longer; it still hears it."""
        names = [name for name in self._network.names if name != CLIENTS]
        source, target = self._chance.choice(list(permutations(names, 2)))
        return self._cut(f"nothing from {source} reaches {target}", [(source, target)])

    def slow(self) -> Fault:
        """All that a node sends and receives comes late, and some of it never."""
        name = self._name(self._node())
        pairs = _pairs([name], self._network.names)
        delay_s, loss = self._chance.choice((0.005, 0.05, 0.3)), self._chance.choice((0.0, 0.0, 0.02))

        def begin() -> None:
            for pair in pairs:
                self._network.delay(*pair, delay_s, loss)

        def end() -> None:
            for pair in pairs:
                self._network.hurry(*pair)

        return Fault(f"{name} is {delay_s * 1000:g} ms away and loses {loss:.0%}", begin, end, self._lasting(2.0))

    def fill_disk(self) -> Fault:
        node = self._node()
        disk = self._machines.disks[node]

        def end() -> None:
            disk.empty()

        return Fault(f"the disk of {self._name(node)} is full", disk.fill, end, self._lasting())

    def kill_nsqlookupd(self) -> Fault:
        lookupd = self._chance.choice(self._machines.lookupds)
        name = f"kill -9 of {self._name(lookupd)}"
        return Fault(name, lambda: _kill(lookupd), lambda: _start(lookupd), self._lasting())

    def stop_nsqlookupd(self) -> Fault:
        lookupd = self._chance.choice(self._machines.lookupds)

        def go_on() -> None:
            _signal(lookupd, signal.SIGCONT)

        name = f"SIGSTOP of {self._name(lookupd)}"
        return Fault(name, lambda: _signal(lookupd, signal.SIGSTOP), go_on, self._lasting())

    def lose_store(self) -> Fault:
        """A member of etcd, or the nsqlookupd that keeps the store."""
        if not self._machines.etcds:
            lookupd = self._machines.lookupds[0]
            name = f"kill -9 of {self._name(lookupd)}, the store"
            return Fault(name, lambda: _kill(lookupd), lambda: _start(lookupd), self._lasting())
        member = self._chance.choice(self._machines.etcds)
        if self._chance.random() < 0.5:
            return self._stop_etcd(member)

        def begin() -> None:
            if member.is_running:
                member.kill()

        def end() -> None:
            if not member.is_running:
                member.start()

        return Fault(f"kill -9 of {member.name}", begin, end, self._lasting())

    def _stop_etcd(self, member: Etcd) -> Fault:
        def send(number: signal.Signals) -> None:
            if member.is_running:
                member.send_signal(number)

        name = f"SIGSTOP of {member.name}"
        return Fault(name, lambda: send(signal.SIGSTOP), lambda: send(signal.SIGCONT), self._lasting())
