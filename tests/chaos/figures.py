"""How long publishing stands still when something fails, with the defaults: ``python -m tests.chaos.figures DIR``.

Three nsqd, two nsqlookupd and an etcd, each on a machine of its own, under the load of a chaos run; plain publishers
wait for half a second at most before they look for the leader again. Each line: the longest time in which one of them
had no ``OK``, as often as it was tried, and what the clients of this project told their callers meanwhile.

Rules of this file: figures are printed and never asserted; the machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.chaos.history import Outcome
from tests.chaos.network import command, problem
from tests.chaos.run import PLAIN, Run
from tests.integration.daemons import Nsqd, wait_until

ANSWER_S = 0.5
TIMES = 3


class Figures:
    """The scenarios, on a run under load."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.machines = run.machines
        self.scenarios: dict[str, Callable[[], None]] = {
            "nothing": lambda: None,
            "kill -9 of a leader": lambda: self.leader().kill(),
            "a leader is killed and started inside its lease": self.restart_in_lease,
            "SIGTERM of a leader": self.stop_leader,
            "SIGTERM of a follower": self.stop_follower,
            "SIGSTOP of a leader": lambda: self.leader().send_signal(signal.SIGSTOP),
            "a leader is cut from everybody": lambda: self.cut(self.leader()),
            "a leader is cut from the other nodes": partial(self.strand, False, False),
            "a leader reaches the other nodes, and hears none": partial(self.strand, False, True),
            "a leader hears the other nodes, and reaches none": partial(self.strand, True, False),
            "SIGSTOP of a follower": lambda: self.follower().send_signal(signal.SIGSTOP),
            "the master nsqlookupd is killed": self.kill_master,
            "the store is gone for two leases": self.lose_store,
            "an upgrade, node by node": self.upgrade,
        }

    def leader(self) -> Nsqd:
        found = wait_until(lambda: self.machines.leader(PLAIN, 0), "a leader")
        assert found is not None
        return found

    def follower(self) -> Nsqd:
        leader = self.leader()
        return next(node for node in self.machines.nodes if node is not leader)

    def stop_leader(self) -> None:
        self.leader().stop()

    def stop_follower(self) -> None:
        self.follower().stop()

    def strand(self, hears: bool, is_heard: bool) -> None:
        """Cut the leader from the other nodes alone, or one way."""
        leader, network = self.leader(), self.machines.network
        name = self.machines.names[leader]
        for other in (self.machines.names[node] for node in self.machines.nodes if node is not leader):
            if not is_heard:
                network.cut(name, other)
            if not hears:
                network.cut(other, name)

    def cut(self, node: Nsqd) -> None:
        network, name = self.machines.network, self.machines.names[node]
        for other in network.names:
            if other != name:
                network.cut(name, other)
                network.cut(other, name)

    def upgrade(self) -> None:
        """End and start each node in turn, as an upgrade does."""
        for node in self.machines.nodes:
            node.stop()
            node.launch()
            self.machines.wait_whole()

    def kill_master(self) -> None:
        status = self.machines.status()
        master = next(each for each in self.machines.lookupds if each.tcp[0] == status["master"]["host"])
        master.kill()
        wait_until(lambda: (self.machines.status() or {}).get("is_master"), "another master")

    def restart_in_lease(self) -> None:
        leader = self.leader()
        leader.kill()
        leader.launch()

    def lose_store(self) -> None:
        """For two leases."""
        self.machines.etcds[0].kill()
        time.sleep(6.0)

    def measure(self, name: str, fail: Callable[[], None], times: int) -> None:
        """Have something fail a few times, and print what it cost."""
        run, gaps, told = self.run, [], 0
        for _ in range(times):
            self.machines.mend()
            self.machines.wait_whole()
            run.wait_published(f"everybody publishes before: {name}")
            known = len(run.record.history.published)
            run.record.begin_window()
            fail()
            run.wait_published(f"everybody publishes after: {name}")
            gaps.append(max(run.record.longest_ns.get(each.name, 0) for each in run.plain) / 1e9)
            clients = {each.name for each in run.publishers} - {each.name for each in run.plain}
            ended = run.record.history.published[known:]
            told += sum(each.writer in clients and each.outcome is not Outcome.OK for each in ended)
        shown = ", ".join(f"{gap:.2f}" for gap in sorted(gaps))
        print(f"{name:48} {shown:24} s   errors at callers of our clients: {told}", flush=True)


def main() -> int:
    """Measure all of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", default="", help="part of the names of what is to be measured")
    parser.add_argument("--times", type=int, default=TIMES, help="how often each is tried")
    parser.add_argument("--inside", action="store_true", help="the namespaces are made already")
    options = parser.parse_args()
    if not options.inside:
        if problem():
            print(problem())
            return 2
        again = command(sys.executable, "-m", "tests.chaos.figures", *sys.argv[1:], "--inside")
        return subprocess.run(again, check=False).returncode
    options.directory.mkdir(parents=True)
    logging.basicConfig(filename=options.directory / "clients.log", format="%(asctime)s %(message)s")
    run = Run(options.directory, seed=1)
    try:
        run.begin(ANSWER_S)
        it = Figures(run)
        for name, fail in it.scenarios.items():
            if options.only in name:
                it.measure(name, fail, 1 if fail in (it.lose_store, it.upgrade) else options.times)
        verdict = run.end()
        print(verdict)
    finally:
        run.close()
    return 0 if verdict.is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
