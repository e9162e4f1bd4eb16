"""One run: a Spark cluster over two nsqds under load, kills drawn from a seed, and the verdict on three outputs.

``python -m tests.spark.kills --kills=50 --seed=1 DIRECTORY``. Two topics, one with partitions and a plain one, are
published to all along. One query archives them with Spark's Parquet sink, one copies them to other topics with the sink
nsq, and ``flintmq pipeline archive`` writes files of its own. Driver, executor, worker, nsqd and the archive are killed
with -9 or stopped for a while; a kill counts when a micro-batch of a query was planned and not finished both before and
behind it. In the end each output has to hold each stored message once, by its bytes and by its offset, and what was
acknowledged has to be stored once. What was found stands in ``report.txt``, with the logs beside it. Ctrl-C ends the
kills, not the verdict.

Rules of this file: nothing is judged by how long it took, but that everything goes on within the patience of the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tests.integration.daemons import PATIENCE_S, SPARK_PATIENCE_S, wait_until
from tests.spark.kills_job import COLUMNS
from tests.spark.processes import Driver, NsqdProcess, environment
from tests.spark.standalone import Standalone, paused, signal_tree

from flintmq.errors import FlintError
from flintmq.spark.batch_reader import NsqReader
from flintmq.spark.broker import NsqdConnection
from flintmq.spark.options import SourceOptions
from flintmq.spark.session import settings
from flintmq.wire import commands

JOB = Path(__file__).with_name("kills_job.py")
SPLIT, PLAIN = "split", "plain"
PARTITION_NUM = 2
PER_MPUB = 10
MPUB_INTERVAL_S = 0.1
VICTIMS = ("driver", "executor", "worker", "nsqd", "archive")
STOPPED_MAX_S = 20.0
"""Longer than it takes for a worker or executor to count as lost: it comes back as one that nobody expects."""
CHECKPOINTS = ("checkpoint-rows", "checkpoint-copy")
KEYS = COLUMNS.split(",")
RESTS_MAX = 5
"""Drivers end by themselves as well: Spark gives a Python 10 s to start, which is little on a busy machine."""


class Publisher(threading.Thread):
    """Publishes to one partition of one nsqd; never the same body twice, so an answer that is lost leaves it open.

    Attributes:
        acknowledged: bodies that are stored for sure.
    """

    def __init__(self, nsqd: NsqdProcess, topic: str, partition: int | None, name: str) -> None:
        super().__init__(daemon=True)
        self.acknowledged: list[bytes] = []
        self.unknown = 0
        self.is_over = threading.Event()
        self.failure: BaseException | None = None
        self._nsqd = nsqd
        self._topic = topic
        self._partition = partition
        self._prefix = f"{name}-{topic}-{partition}"
        self._count = 0

    def run(self) -> None:
        connection: NsqdConnection | None = None
        while not self.is_over.wait(MPUB_INTERVAL_S):
            bodies = [b"%s:%d" % (self._prefix.encode(), self._count + n) for n in range(PER_MPUB)]
            try:
                connection = connection or NsqdConnection(self._nsqd.address, 5, PATIENCE_S)
                self._count += PER_MPUB
                connection.send(commands.mpub(self._topic, bodies, self._partition))
                connection.receive()
                self.acknowledged += bodies
            except FlintError:
                self.unknown += PER_MPUB
                if connection is not None:
                    connection.close()
                connection = None
            except BaseException as error:
                self.failure = error
                raise
        if connection is not None:
            connection.close()


class Archiving:
    """``flintmq pipeline archive --follow``, started again when it was killed."""

    def __init__(self, directory: Path, nsqds: str) -> None:
        self._directory = directory
        self._words = [
            *(sys.executable, "-m", "flintmq", "pipeline", "archive", f"--to={directory / 'archive'}"),
            *(f"--topic={SPLIT}", f"--topic={PLAIN}", f"--columns={COLUMNS},timestamp", "--channel=files"),
            *(f"--nsqd={each}" for each in nsqds.split(",")),
        ]
        self.process = self._start("--follow", "--interval=1s")

    def _start(self, *more: str) -> subprocess.Popen[bytes]:
        with (self._directory / "archive.log").open("ab") as log:
            return subprocess.Popen([*self._words, *more], stdout=log, stderr=log, env=environment())

    def mend(self) -> None:
        """Start it again if it has ended."""
        if self.process.poll() is not None:
            self.process = self._start("--follow", "--interval=1s")

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def finish(self) -> None:
        """Archive what there is, to its end."""
        self.kill()
        assert self._start().wait(SPARK_PATIENCE_S) == 0, (self._directory / "archive.log").read_text()[-4000:]


class Run:
    """A Spark cluster, two nsqds, and what runs on them.

    Args:
        directory: for everything; it must not exist.
        stopped_max_s: longest time that a process is stopped for.
    """

    def __init__(self, directory: Path, seed: int, stopped_max_s: float = STOPPED_MAX_S) -> None:
        self.directory = directory
        self.seed = seed
        self.chance = random.Random(seed)
        self.hits: Counter[str] = Counter()
        self.misses = 0
        self.ended_itself: list[str] = []
        self.wrong: list[str] = []
        self._stopped_max_s = stopped_max_s
        self._began_s = time.monotonic()
        self._reading: list[threading.Thread] = []
        directory.mkdir(parents=True)
        self.nsqds = [NsqdProcess(directory / f"nsqd-{number}") for number in range(2)]
        self.addresses = ",".join(each.address for each in self.nsqds)
        for nsqd in self.nsqds:
            nsqd.post(f"/topic/create?topic={SPLIT}&partition_num={PARTITION_NUM}")
            nsqd.post(f"/topic/create?topic={PLAIN}")
        # a sink's topic with partitions has one nsqd; a plain one may have several
        self.nsqds[0].post(f"/topic/create?topic=copy-{SPLIT}&partition_num={PARTITION_NUM}")
        self.publishers = [
            Publisher(nsqd, topic, partition, f"n{number}")
            for number, nsqd in enumerate(self.nsqds)
            for topic, partition in ((PLAIN, None), *((SPLIT, each) for each in range(PARTITION_NUM)))
        ]
        for publisher in self.publishers:
            publisher.start()
        self.spark = Standalone(directory)
        self.archiving = Archiving(directory, self.addresses)
        self._drivers = 0
        self.driver = self._start_driver("continuous")

    def _start_driver(self, trigger: str) -> Driver:
        given = {
            "trigger": trigger,
            "directory": str(self.directory),
            "master": self.spark.url,
            "nsqd": self.addresses,
            "topics": f"{SPLIT},{PLAIN}",
            "trigger_messages": "20000",
            "lost_after_s": self.spark.lost_after_s,
            "checkpoint_manager": settings("local[1]")["spark.sql.streaming.checkpointFileManagerClass"],
        }
        self._drivers += 1
        return Driver(JOB, json.dumps(given), PYSPARK_PYTHON=sys.executable)

    def close(self) -> None:
        """End every process."""
        self._keep_output()
        self.driver.kill()
        self.archiving.kill()
        self.spark.__exit__()
        for publisher in self.publishers:
            publisher.is_over.set()
        for nsqd in self.nsqds:
            nsqd.stop()

    def _keep_output(self) -> None:
        (self.directory / f"driver-{self._drivers}.log").write_text("".join(self.driver.output))

    # -- kills ---------------------------------------------------------------------------------------------------------

    def play(self, kills: int, victims: Iterable[str] = VICTIMS, how: Iterable[str] = ("kill", "stop")) -> None:
        """Kill until so many kills have hit a micro-batch in flight; each kind once before any comes again."""
        every = [f"{each} {victim}" for each in how for victim in victims]
        kinds: list[str] = []
        self.wait_for_progress("both queries run")
        while self.hits.total() < kills:
            if not kinds:
                kinds = list(every)
                self.chance.shuffle(kinds)
            self.suffer(kinds.pop())

    def suffer(self, kind: str) -> None:
        """Have one fault happen at a random moment, and both queries go on behind it."""
        paused(self.chance.uniform(0, 2))
        wait_until(self._in_flight, self.status, SPARK_PATIENCE_S)
        before = self._in_flight()
        how, victim = kind.split()
        lasting_s = self.chance.uniform(1, self._stopped_max_s) if how == "stop" else 0.0
        strike = self._find(victim)
        strike(signal.SIGSTOP if how == "stop" else signal.SIGKILL)
        hit = before & self._in_flight()
        if how == "stop":
            paused(lasting_s)
            strike(signal.SIGCONT)
        if hit:
            self.hits[kind] += 1
        else:
            self.misses += 1
        which = ", ".join(f"{name} {number}" for name, number in sorted(hit)) or "nothing in flight"
        lasted = f" for {lasting_s:.1f} s" if lasting_s else ""
        print(f"{time.monotonic() - self._began_s:7.1f} s  {kind}{lasted}: {which}", flush=True)
        self.wait_for_progress(f"both queries go on after {kind}")

    def _find(self, victim: str) -> Callable[[int], None]:
        """Choose a process of a kind; returns what sends it a signal."""
        if victim == "driver":
            process_id = self.driver.process_id
        elif victim == "executor":
            wait_until(self.spark.executors, self.status, SPARK_PATIENCE_S)
            process_id = self.chance.choice(sorted(self.spark.executors()))
        elif victim == "worker":  # its executors end by themselves when it has
            process = self.chance.choice(self.spark.workers)
            return process.send_signal
        elif victim == "nsqd":
            process_id = self.chance.choice(self.nsqds).process_id
        else:
            process_id = self.archiving.process.pid
        return lambda number: signal_tree(process_id, number)

    def _in_flight(self) -> set[tuple[str, int]]:
        """Micro-batches that are planned and not finished, by checkpoint."""
        found = set()
        for name in CHECKPOINTS:
            planned = self._last(name, "offsets")
            if planned > self._last(name, "commits"):
                found.add((name, planned))
        return found

    def _last(self, checkpoint: str, what: str) -> int:
        directory = self.directory / checkpoint / what
        numbers = (
            [int(path.name) for path in directory.iterdir() if path.name.isdecimal()] if directory.is_dir() else []
        )
        return max(numbers, default=-1)

    def wait_for_progress(self, what: str) -> None:
        """Mend what is dead, and wait until each query has planned and finished a micro-batch since."""
        self.mend()
        since = {name: self._last(name, "offsets") for name in CHECKPOINTS}

        def is_going_on() -> bool:
            self.mend()
            return all(self._last(name, "commits") > since[name] for name in CHECKPOINTS)

        wait_until(is_going_on, lambda: f"{what}: {self.status()}", 2 * SPARK_PATIENCE_S)

    def mend(self) -> None:
        """Start again what has ended, and fail when a publisher did."""
        for publisher in self.publishers:
            if publisher.failure is not None:
                raise AssertionError("a publisher failed") from publisher.failure
        for nsqd in self.nsqds:
            if not nsqd.is_running:
                nsqd.kill()
                nsqd.start()
        self.spark.mend()
        self.archiving.mend()
        if not self.driver.is_running:
            self._keep_output()
            output = "".join(self.driver.output)
            if "are lost" in output:
                self.wrong.append(f"a driver told of loss: {_lines(output, 'are lost')}")
            if self.driver.exit_code != -signal.SIGKILL:
                assert "started" in output, f"a driver does not start:\n{output[-4000:]}"
                self.ended_itself.append(_lines(output, "Error"))
            self.driver.kill()
            self.driver = self._start_driver("continuous")

    def status(self) -> str:
        """Where the queries are, and what the driver said last."""
        at = {name: (self._last(name, "offsets"), self._last(name, "commits")) for name in CHECKPOINTS}
        return f"planned and finished: {at}; the driver says:\n{''.join(self.driver.output)[-3000:]}"

    # -- the end -------------------------------------------------------------------------------------------------------

    def end(self) -> bool:
        """Read everything to its end, and judge; the verdict is in ``wrong``."""
        for publisher in self.publishers:
            publisher.is_over.set()
        for publisher in self.publishers:
            publisher.join(2 * PATIENCE_S)
            assert not publisher.is_alive(), "a publisher does not end"
        self.mend()
        self._keep_output()
        self.driver.kill()
        self._read_the_rest()
        self.archiving.finish()
        stored = self._stored(f"{SPLIT},{PLAIN}")
        acknowledged = pa.table({"body": [body for each in self.publishers for body in each.acknowledged]})
        self.stored, self.acknowledged = stored.num_rows, acknowledged.num_rows
        self._compare("stored twice", stored.select(["body"]).group_by("body").aggregate([]), stored.select(["body"]))
        missing = acknowledged.join(stored.select(["body"]), "body", join_type="left anti")
        if missing.num_rows:
            self.wrong.append(f"{missing.num_rows} acknowledged messages are not stored: {missing.slice(0, 3)}")
        self._compare("Spark's Parquet", stored, pq.read_table(self.directory / "found.parquet"))
        self._compare("files of the archive", stored, _archived(self.directory / "archive"))
        copied = self._stored(f"copy-{SPLIT},copy-{PLAIN}").select(["topic", "body"])
        wanted = stored.select(["topic", "body"])
        wanted = wanted.set_column(0, "topic", pc.binary_join_element_wise("copy", wanted["topic"], "-"))
        self._compare("copy", wanted, copied)
        return not self.wrong

    def _read_the_rest(self) -> None:
        """Run both queries to the end of what there is."""
        for _ in range(RESTS_MAX):
            self.driver = self._start_driver("now")
            try:
                self.driver.finish(2 * SPARK_PATIENCE_S)
                return
            except AssertionError:
                self._keep_output()
                output = "".join(self.driver.output)
                if "are lost" in output:
                    raise
                self.ended_itself.append(_lines(output, "Exception"))
        raise AssertionError(f"none of {RESTS_MAX} drivers came to an end: {self.ended_itself[-RESTS_MAX:]}")

    def _stored(self, topics: str) -> pa.Table:
        options = SourceOptions.parse({"nsqd": self.addresses, "topics": topics, "columns": COLUMNS})
        reader = NsqReader(options)
        return pa.Table.from_batches([batch for task in reader.partitions() for batch in reader.read(task)])

    def _compare(self, name: str, wanted: pa.Table, found: pa.Table) -> None:
        if said := difference(wanted, found):
            self.wrong.append(f"{name}: {said}")

    def report(self) -> str:
        """What happened, for people."""
        unknown = sum(each.unknown for each in self.publishers)
        lines = [
            f"seed {self.seed}: {self.hits.total()} kills hit a micro-batch in flight, {self.misses} hit nothing; "
            f"{self._drivers} drivers; {time.monotonic() - self._began_s:.0f} s",
            *(f"  {count:4d} {kind}" for kind, count in sorted(self.hits.items())),
            f"{self.stored} messages stored, {self.acknowledged} acknowledged, {unknown} without an answer",
            f"micro-batches: { ({name: self._last(name, 'commits') + 1 for name in CHECKPOINTS}) }",
            *(f"a driver ended by itself: {each}" for each in self.ended_itself),
        ]
        return "\n".join([*lines, *(self.wrong or ["each message once in all three outputs"])])


def difference(wanted: pa.Table, found: pa.Table) -> str:
    """Say where two tables differ, whatever the order of their rows; nothing if they do not."""
    columns = wanted.column_names
    order = [(each, "ascending") for each in columns]
    found = found.select(columns).cast(wanted.schema)
    if wanted.sort_by(order).combine_chunks().equals(found.sort_by(order).combine_chunks()):
        return ""
    counts = found.group_by(columns).aggregate([([], "count_all")])
    parts = {
        "missing": wanted.join(found, columns, join_type="left anti"),
        "repeated": counts.filter(pc.greater(counts["count_all"], 1)),
        "of nobody": found.join(wanted, columns, join_type="left anti"),
    }
    return "; ".join(
        f"{len(table)} {what}, such as {table.slice(0, 3).to_pylist()}" for what, table in parts.items() if len(table)
    )


def _archived(directory: Path) -> pa.Table:
    from pyarrow import dataset  # with all of pandas, which every process that runs tests would import with this file

    return dataset.dataset(sorted(map(str, directory.rglob("*.parquet")))).to_table(columns=KEYS)


def _lines(output: str, word: str) -> str:
    """The last lines of output that have a word in them."""
    return " | ".join([line.strip()[:300] for line in output.splitlines() if word in line][-3:])


def main() -> int:
    """Run, report, and say by the exit code whether everything held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kills", type=int, default=50, help="that hit a micro-batch in flight")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    directory = given.directory.absolute() / f"seed-{given.seed}"
    shutil.rmtree(directory, ignore_errors=True)
    print(f"seed {given.seed}, {given.kills} kills; logs in {directory}", flush=True)
    run = Run(directory, given.seed)
    report, is_ok = "", False
    try:
        with contextlib.suppress(KeyboardInterrupt):  # it is judged then all the same
            run.play(given.kills)
        is_ok = run.end()
        report = run.report()
    except AssertionError:
        report = traceback.format_exc()
    finally:
        run.close()
    (directory / "report.txt").write_text(report, encoding="utf-8")
    print(report, flush=True)
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
