"""One run: a cluster under load, faults drawn from a seed, and the verdict on its history.

``python -m tests.chaos.run --seconds=60 --seed=1 DIRECTORY``: it makes namespaces of its own (``network.py``). What it
found stands in ``report.txt`` of the directory, with the daemons' logs and the history beside it. ``make chaos`` runs
it for half an hour.

Rules of this file: nothing is judged by how long it took, but that everything goes on within the patience of the tests
when all is mended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.faults import Fault, Faults
from tests.chaos.history import Delivered, Verdict, check
from tests.chaos.load import (
    ANSWER_S,
    CONNECT_S,
    REFUSALS,
    ClientConsumer,
    ClientPublisher,
    PlainConsumer,
    PlainPublisher,
    Record,
    Worker,
    delivery_of,
)
from tests.chaos.machines import Machines, now_ns
from tests.chaos.network import command, problem
from tests.integration.daemons import (
    ERROR,
    MESSAGE,
    PATIENCE_S,
    RESPONSE,
    Closed,
    Connection,
    fin,
    message_of,
    wait_until,
)

PARTITION_NUM = 2
PLAIN, ORDERED, LOG = "plain", "ordered", "log"
"""Topics, and the channel that nobody consumes before the end."""
MENDED_S = 3 * PATIENCE_S
OVERLAP = 0.25
"""Part of the faults that begin while the one before still lasts."""


@dataclass(slots=True)
class Happened:
    """A fault, and what it did to those who publish over plain sockets.

    Attributes:
        began_s: since the run began.
        gap_s: the longest time in which one of them had no OK, until each had one after the fault.
    """

    name: str
    began_s: float
    lasted_s: float
    gap_s: float


class Run:
    """A cluster under load.

    Args:
        directory: for everything.
        etcd_count: members of the store; 0: nsqlookupd's own.
    """

    def __init__(self, directory: Path, seed: int, etcd_count: int = 1, flags: tuple[str, ...] = ()) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.record = Record()
        self.happened: list[Happened] = []
        self.began_ns = now_ns()
        self.machines = Machines(directory, etcd_count, flags=flags)
        self.lookupds = [lookupd.http for lookupd in self.machines.lookupds]
        self.faults = Faults(self.machines, self.chance)
        self.plain: list[PlainPublisher] = []
        self.publishers: list[Worker] = []
        self.consumers: list[Worker] = []

    def begin(self, answer_s: float = ANSWER_S) -> None:
        """Create the topics and channels, and start publishers and consumers.

        Args:
            answer_s: how long plain publishers wait for an answer.
        """
        self.machines.create(PLAIN, PARTITION_NUM)
        self.machines.create(ORDERED, PARTITION_NUM, orderedmulti="true")
        history, args = self.record.history, (self.lookupds, self.seed)
        for topic in (PLAIN, ORDERED):
            for number in range(PARTITION_NUM):
                self._make_channel(topic, LOG, number)
                self._make_channel(topic, "sockets", number)
                self._make_channel(topic, "clients", number)
                self.plain.append(PlainPublisher(self.record, topic, number, *args))
                self.consumers.append(PlainConsumer(self.record, topic, "sockets", number, topic == ORDERED, *args))
            history.channels |= {(topic, "sockets"), (topic, "clients")}
            self.consumers.append(
                ClientConsumer(self.record, topic, "clients", *args, topic == PLAIN, is_ordered=topic == ORDERED)
            )
        history.ordered |= {(ORDERED, "sockets"), (ORDERED, "clients")}
        self.publishers = [
            *self.plain,
            ClientPublisher(self.record, "asyncio", PLAIN, *args, is_blocking=False, retry_unknown=False),
            ClientPublisher(self.record, "blocking", PLAIN, *args, is_blocking=True, retry_unknown=False),
            ClientPublisher(self.record, "repeating", PLAIN, *args, is_blocking=False, retry_unknown=True),
            ClientPublisher(self.record, "sharded", ORDERED, *args, is_blocking=True, is_sharded=True,
                            retry_unknown=False),
        ]  # fmt: skip
        history.repeating.add("repeating")
        for publisher in self.plain:
            publisher.answer_s = answer_s
        for worker in (*self.publishers, *self.consumers):
            worker.start()
        self.wait_published("everybody publishes")

    def _make_channel(self, topic: str, channel: str, number: int) -> None:
        def is_made() -> bool:
            leader = self.machines.leader(topic, number, "r")
            if leader is None:
                return False
            with leader.connect() as connection:
                command = "SUB_ORDER" if topic == ORDERED else "SUB"
                connection.send(f"{command} {topic} {channel} {number}\n".encode())
                return connection.frame() == (RESPONSE, b"OK")

        wait_until(is_made, f"{channel} of {topic}/{number} is made")

    def wait_published(self, what: str) -> None:
        """Wait until every plain publisher has an acknowledgement that is newer than this call."""
        since_ns = now_ns()

        def has_all() -> bool:
            self.check_workers()
            return all(self.record.last_ok_ns.get(each.name, 0) > since_ns for each in self.plain)

        wait_until(has_all, lambda: f"{what}: {self.machines.status()}", MENDED_S)

    def check_workers(self) -> None:
        """Fail when one of the clients failed."""
        for worker in (*self.publishers, *self.consumers):
            if worker.failure is not None:
                raise AssertionError(f"{worker.name} failed") from worker.failure

    # -- faults --------------------------------------------------------------------------------------------------------

    def play(self, seconds: float) -> None:
        """Have faults happen for so long; each kind once before any comes again."""
        deadline = time.monotonic() + seconds
        kinds: list[str] = []
        while time.monotonic() < deadline:
            if not kinds:
                kinds = self.faults.kinds
                self.chance.shuffle(kinds)
            faults = [self.faults.draw(kinds.pop())]
            if kinds and self.chance.random() < OVERLAP:
                faults.append(self.faults.draw(kinds.pop()))
            self.suffer(faults)

    def suffer(self, faults: list[Fault]) -> None:
        """Have faults happen at the same time, end one after the other, and everybody publish again."""
        name = " and ".join(fault.name for fault in faults)
        began_ns = now_ns()
        self.record.begin_window()
        print(f"{(began_ns - self.began_ns) / 1e9:7.1f} s  {name} for {faults[0].lasting_s:.1f} s", flush=True)
        for fault in faults:
            fault.begin()
        for fault in faults:
            time.sleep(fault.lasting_s)
            fault.end()
        ended_ns = now_ns()
        self.wait_published(f"everybody publishes after {name}")
        gap_s = max(self.record.longest_ns.get(each.name, 0) for each in self.plain) / 1e9
        happened = Happened(name, (began_ns - self.began_ns) / 1e9, (ended_ns - began_ns) / 1e9, gap_s)
        self.happened.append(happened)
        print(f"{'':9}  without an OK for {gap_s:.2f} s at most", flush=True)

    # -- the end -------------------------------------------------------------------------------------------------------

    def end(self) -> Verdict:
        """Mend everything, see that all of it is delivered, and judge."""
        self.machines.mend()
        self.machines.wait_whole(MENDED_S)
        self.wait_published("everybody publishes when all is mended")
        for worker in self.publishers:
            worker.is_over.set()
        for worker in self.publishers:
            worker.join(MENDED_S)
            assert not worker.is_alive(), f"{worker.name} does not end"
        last = {(t, n): self._publish_last(t, n) for t in (PLAIN, ORDERED) for n in range(PARTITION_NUM)}
        with contextlib.suppress(AssertionError):  # the verdict says what is missing
            wait_until(lambda: not self.record.missing(), timeout_s=MENDED_S)
        for worker in self.consumers:
            worker.is_over.set()
        for worker in self.consumers:
            worker.join(MENDED_S)
            assert not worker.is_alive(), f"{worker.name} does not end"
        self.check_workers()
        for (topic, number), body in last.items():
            self._read_log(topic, number, body)
            self._compare_copies(topic, number)
        crashes = self.machines.crashes()
        assert not crashes, "a daemon logged an error of its own:\n" + "\n".join(crashes[:3])
        return check(self.record.history)

    def _publish_last(self, topic: str, number: int) -> str:
        """Publish the last message of a partition; return it."""
        last = PlainPublisher(self.record, topic, number, self.lookupds, self.seed)
        last.name = f"last-{topic}-{number}"
        body = f"{last.name}:1"
        wait_until(lambda: last.publish(body) is not None, f"the last message of {topic}/{number}")
        last.close()
        assert body in self.record.acknowledged[topic], f"{body} is not acknowledged in a cluster that is whole"
        return body

    def _read_log(self, topic: str, number: int, body: str) -> None:
        """Read what a partition holds, up to its last message, whoever leads it meanwhile."""
        found: dict[int, Delivered] = {}

        def is_read() -> bool:
            leader = self.machines.leader(topic, number, "r")
            if leader is None:
                return False
            with contextlib.suppress(OSError, Closed), Connection(leader.tcp, connect_s=CONNECT_S * 10) as connection:
                return self._read_up_to(connection, topic, number, body, found)
            return False

        wait_until(is_read, lambda: f"{topic}/{number} is read: {len(found)} messages so far", MENDED_S)
        self.record.history.log += found.values()

    def _read_up_to(
        self, connection: Connection, topic: str, number: int, body: str, found: dict[int, Delivered]
    ) -> bool:
        """Read on; return whether the last message came, and not that this node leads no longer."""
        is_ordered = topic == ORDERED
        command = "SUB_ORDER" if is_ordered else "SUB"
        connection.send(f"{command} {topic} {LOG} {number}\n".encode())
        kind, data = connection.frame()
        if kind != ERROR:
            connection.rdy(2000)
            kind, data = connection.frame()
        while kind == MESSAGE:
            delivered = delivery_of(data, topic, LOG, "log", is_ordered)
            known = found.setdefault(delivered.offset, delivered)
            assert known.body == delivered.body, (known, delivered)
            connection.send(fin(message_of(data).id))
            if delivered.body == body:
                return True
            kind, data = connection.frame()
        assert kind == ERROR and data.startswith(REFUSALS), (kind, data)
        return False

    def _compare_copies(self, topic: str, number: int) -> None:
        """See that all copies are the same byte for byte."""

        def are_same() -> bool:
            return len({self.machines.stored(node, topic, number) for node in self.machines.nodes}) == 1

        def sizes() -> str:
            stored = [len(self.machines.stored(node, topic, number)) for node in self.machines.nodes]
            return f"the copies of {topic}/{number} are the same: they have {stored} bytes"

        wait_until(are_same, sizes)

    def close(self) -> None:
        """Have everybody end who still works, and end every process: a thread that goes on would hold up the exit."""
        for worker in (*self.publishers, *self.consumers):
            worker.is_over.set()
        self.machines.close()

    def report(self, verdict: Verdict) -> str:
        """What happened, for people."""
        lines = [f"seed {self.seed}, {len(self.happened)} faults, {len(self.machines.etcds)} etcd"]
        lines += [f"  {each.began_s:7.1f} s  {each.gap_s:6.2f} s without an OK: {each.name}" for each in self.happened]
        lines += ["what clients were told:"]
        lines += [f"  {count:6d} {answer}" for answer, count in self.record.answers.most_common(30)]
        return "\n".join([*lines, str(verdict)])

    def write_history(self) -> None:
        """Keep the history beside the logs."""
        with (self.machines.directory / "history.jsonl").open("w", encoding="utf-8") as file:
            history = self.record.history
            for each in (*history.published, *history.consumed, *history.log):
                file.write(json.dumps([type(each).__name__, *each]) + "\n")


def main() -> int:
    """Run, report, and say by the exit code whether everything held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("directory", type=Path)
    given = os.environ.get
    parser.add_argument("--seconds", type=float, default=float(given("CHAOS_SECONDS", "1800")))
    parser.add_argument("--seed", type=int, default=int(given("CHAOS_SEED", str(int(time.time())))))
    etcd = int(given("CHAOS_ETCD", "1"))
    parser.add_argument("--etcd", type=int, default=etcd, help="members of the store; 0: nsqlookupd's own")
    parser.add_argument("--inside", action="store_true", help="the namespaces are made already")
    options = parser.parse_args()
    if not options.inside:
        if problem():
            print(problem())
            return 2
        seed = f"--seed={options.seed}"
        again = command(sys.executable, "-m", "tests.chaos.run", *sys.argv[1:], seed, "--inside")
        return subprocess.run(again, check=False).returncode
    directory = options.directory / f"seed-{options.seed}-etcd-{options.etcd}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    print(f"seed {options.seed}, {options.seconds:g} s, {options.etcd} etcd; logs in {directory}", flush=True)
    logging.basicConfig(filename=directory / "clients.log", format="%(asctime)s %(message)s")
    run = Run(directory, options.seed, options.etcd)
    report, is_ok = "", False
    try:
        run.begin()
        run.play(options.seconds)
        verdict = run.end()
        report, is_ok = run.report(verdict), verdict.is_ok
    except AssertionError:
        report = traceback.format_exc()
    finally:
        run.write_history()
        run.close()
    (directory / "report.txt").write_text(report, encoding="utf-8")
    print(report, flush=True)
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
