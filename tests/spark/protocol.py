"""Queries driven as Spark drives them, without a JVM: offsets log, late commits, replays, pickling, and death anywhere.

``python -m tests.spark.protocol --seeds=10000 --first=1``. A query reads two topics of two real nsqds, keeps what it
read as Spark's file sink does, and publishes it with the sink nsq to a third topic. A seed decides how it is configured
and what happens at each step, which is a call of Spark's or a request or answer of nsqd's: nothing, somebody publishes,
the query's process dies, an nsqd is reached at another address from now on, or (seldom) is killed and starts again. In
the end each message has to be once in what the query has kept and once in the topic it was copied to.

What Spark does is in ``flintmq/spark/stream_reader.py``; here it is done in the same order.

Rules of this file: everything that crosses processes in Spark is pickled, or written as JSON and read again; nothing
follows from time, so a seed does the same again, up to the bytes of an address.
"""

from __future__ import annotations

import argparse
import json
import logging
import pickle
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
from pyspark.sql.datasource_internal import _SimpleStreamReaderWrapper
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import BinaryType, StructField, StructType
from tests.integration.daemons import Connection
from tests.integration.proxy import Proxy
from tests.spark.fake_lookupd import FakeLookupd
from tests.spark.processes import NsqdProcess

from flintmq.errors import FlintError
from flintmq.spark import fetch, placing, retry, sink, survey
from flintmq.spark.batch_reader import NsqReader
from flintmq.spark.broker import POOL, NsqdConnection
from flintmq.spark.errors import BadCheckpoint, DataLost, LogTwice
from flintmq.spark.identity import TaskIdentity
from flintmq.spark.options import SinkOptions, SourceOptions
from flintmq.spark.sink import RowWriter
from flintmq.spark.spooled import AnyStreamReader

PARTITION_NUM = 2
SPLIT_AT = 6
TASK_TRIES = 4
STEPS = (40, 200)
DIES, PUBLISHES, MOVES, RESTARTS = 0.02, 0.06, 0.003, 0.0003
IDLE_MAX = 20
COLUMNS = "topic,partition,log_id,offset,body"
LOSS = (DataLost, BadCheckpoint, LogTwice)
"""Errors that nothing which happens here may cause."""
ROWS = StructType([StructField("body", BinaryType())])


class Killed(BaseException):
    """The query's processes end here."""


class Wrong(AssertionError):
    """What must not be."""


class Clock:
    """Time that goes on by a good while with each trigger, as far as the query can tell."""

    now_ns = 10**15

    def wall_ns(self) -> int:
        return Clock.now_ns

    monotonic_ns = boottime_ns = wall_ns


class Served:
    """A real nsqd behind an address that changes."""

    def __init__(self, directory: Path) -> None:
        self.process = NsqdProcess(directory)
        self._proxy: Proxy | None = None
        self._connection: Connection | None = None
        self.move()

    @property
    def target(self) -> tuple[str, int]:
        host, _, port = self.process.address.rpartition(":")
        return host, int(port)

    @property
    def port(self) -> int:
        assert self._proxy is not None
        return self._proxy.address[1]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def move(self) -> None:
        """Be reached at another address, and no longer at the one before."""
        left, self._proxy = self._proxy, Proxy(self.target).__enter__()
        if left is not None:
            left.__exit__()

    def restart(self) -> None:
        """kill -9, and start again."""
        self.forget()
        self.process.kill()
        self.process.start()

    def publish(self, topic: str, partition: int | None, bodies: list[bytes]) -> None:
        self._connection = self._connection or Connection(self.target)
        data = b"".join(len(each).to_bytes(4, "big") + each for each in bodies)
        place = topic if partition is None else f"{topic} {partition}"
        size = (len(data) + 4).to_bytes(4, "big")
        self._connection.ok(f"MPUB {place}\n".encode() + size + len(bodies).to_bytes(4, "big") + data)

    def forget(self) -> None:
        """Publish over a new connection the next time."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        self.forget()
        if self._proxy is not None:
            self._proxy.__exit__()
        self.process.stop()


class World:
    """Two nsqds, and a nsqlookupd that knows where they are; use as a context manager."""

    def __init__(self, directory: Path) -> None:
        self.nsqds = [Served(directory / str(number)) for number in range(2)]
        self.lookupd = FakeLookupd().__enter__()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.lookupd.__exit__()
        for nsqd in self.nsqds:
            nsqd.close()

    @property
    def addresses(self) -> str:
        return ",".join(nsqd.address for nsqd in self.nsqds)


@dataclass
class Config:
    """What a query is, by its seed.

    Attributes:
        by_lookup: nsqds are found by nsqlookupd; else a query learns a new address when it starts again.
        start: ``earliest`` or ``latest``.
        limit: messages of a micro-batch; 0 for all.
        copies_to: partitions of the topic that it copies to; 0 for a plain one.
    """

    by_lookup: bool
    start: str
    limit: int
    min_partitions: int
    per_task: int
    copies_to: int

    @classmethod
    def drawn(cls, chance: random.Random) -> Config:
        return cls(
            chance.random() < 0.5,
            chance.choice(["earliest", "earliest", "latest"]),
            chance.choice([0, 7, 40]),
            chance.choice([1, 2, 3]),
            chance.choice([20, 500_000]),
            chance.choice([0, PARTITION_NUM]),
        )


@dataclass
class Checkpoint:
    """What survives the query: as Spark keeps it, JSON text by number of the micro-batch."""

    offsets: dict[int, str] = field(default_factory=dict)
    commits: set[int] = field(default_factory=set)
    kept: dict[int, list[tuple[Any, ...]]] = field(default_factory=dict)
    tasks: dict[int, list[list[tuple[Any, ...]]]] = field(default_factory=dict)


class Scenario:
    """One query, from its seed.

    Args:
        without_channel: start at ``latest`` without the channel that remembers where that was.
    """

    def __init__(self, world: World, seed: int, without_channel: bool = False) -> None:
        self.chance = random.Random(seed)
        self.world = world
        self.config = Config.drawn(self.chance)
        if without_channel:
            self.config.start = "latest"
        self.without_channel = without_channel
        self.topics = [f"s{seed}-plain", f"s{seed}-split"]
        self.copy = f"s{seed}-copy"
        self.checkpoint = Checkpoint()
        self.published: dict[bytes, tuple[int, str]] = {}
        self.began_at: int | None = None
        self.planned_at = 0
        self.lives = 0
        self._steps = self.chance.randint(*STEPS)
        self._is_quiet = True
        self._count = 0
        self.query_name = f"{seed:024x}"

    def run(self) -> None:
        """Play it.

        Raises:
            Wrong: a message is missing or repeated, or a query failed that should not.
        """
        nsqds = self.world.nsqds
        for nsqd in nsqds:
            nsqd.forget()
            self._publish_to(nsqd, self.topics[0], None)  # makes the topic
        if self.config.copies_to:
            nsqds[0].process.post(f"/topic/create?topic={self.copy}&partition_num={self.config.copies_to}")
        self._answer()
        with self._stepping():
            is_over = False
            while not is_over:
                self.lives += 1
                self._is_quiet = False
                try:
                    self._live()
                    is_over = True
                except Killed:
                    pass
                finally:
                    self._is_quiet = True
                    forget_process()
        self._judge()
        for nsqd in nsqds:
            nsqd.process.post(f"/topic/delete?topic={self.topics[0]}")
        if any(self.checkpoint.kept.values()) or self.config.copies_to:
            nsqds[0].process.post(f"/topic/delete?topic={self.copy}")
        if self._count > SPLIT_AT:
            nsqds[1].process.post(f"/topic/delete?topic={self.topics[1]}")

    # -- the world -----------------------------------------------------------------------------------------------------

    def _answer(self) -> None:
        producers = [{"broadcast_address": "127.0.0.1", "tcp_port": nsqd.port} for nsqd in self.world.nsqds]
        answers: dict[str, Any] = {f"/lookup?topic={topic}": {"producers": producers} for topic in self.topics}
        answers[f"/lookup?topic={self.copy}"] = {"producers": producers[:1]}
        self.world.lookupd.answers = answers

    def _publish(self) -> None:
        """Somebody publishes; the topic with partitions is there from the sixth time on, at one nsqd."""
        if self._count == SPLIT_AT:
            path = f"/topic/create?topic={self.topics[1]}&partition_num={PARTITION_NUM}"
            self.world.nsqds[1].process.post(path)
        if self._count >= SPLIT_AT and self.chance.random() < 0.5:
            self._publish_to(self.world.nsqds[1], self.topics[1], self.chance.randrange(PARTITION_NUM))
        else:
            self._publish_to(self.chance.choice(self.world.nsqds), self.topics[0], None)

    def _publish_to(self, nsqd: Served, topic: str, partition: int | None) -> None:
        number = self._count
        self._count += 1
        bodies = [b"%d.%d" % (number, each) for each in range(self.chance.randint(1, 12))]
        nsqd.publish(topic, partition, bodies)
        self.published |= dict.fromkeys(bodies, (number, topic))

    def step(self) -> None:
        """One step of the query's: something may happen."""
        self._steps -= 1
        if self._is_quiet or self._steps < 0:
            return
        roll = self.chance.random()
        if roll < DIES:
            raise Killed
        if roll < DIES + PUBLISHES:
            self._publish()
        elif roll < DIES + PUBLISHES + MOVES:
            self.chance.choice(self.world.nsqds).move()
            self._moved()
        elif roll < DIES + PUBLISHES + MOVES + RESTARTS:
            self.chance.choice(self.world.nsqds).restart()

    def _moved(self) -> None:
        self._answer()
        if not self.config.by_lookup:
            raise Killed  # people start it again with the new address

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        def stepping(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(connection: NsqdConnection, *arguments: Any) -> Any:
                self.step()
                result = method(connection, *arguments)
                self.step()
                return result

            return call

        steps: Any = {
            name: stepping(getattr(NsqdConnection, name)) for name in ("send", "receive", "receive_fetch_head")
        }
        with (
            patch.multiple(NsqdConnection, **steps),
            patch.object(retry, "FIRST_PAUSE_S", 0.0005),
            patch.object(survey, "LACKING_INTERVAL_S", 0.0),
            patch.object(sink, "SEGMENT_BYTES", 60),
        ):
            yield

    # -- the query -----------------------------------------------------------------------------------------------------

    def _source_options(self) -> SourceOptions:
        config = self.config
        where = {"lookupd": self.world.lookupd.address} if config.by_lookup else {"nsqd": self.world.addresses}
        channel = {"allowUnsafeLatest": "true"} if self.without_channel else {"channel": "query"}
        given = {
            "topics": ",".join(self.topics),
            "columns": COLUMNS,
            "startingOffsets": config.start,
            "maxMessagesPerTrigger": str(config.limit),
            "minPartitions": str(config.min_partitions),
            "maxMessagesPerTask": str(config.per_task),
            "retries": "4",
        }
        return SourceOptions.parse({**where, **channel, **given})

    def _sink_options(self) -> SinkOptions:
        nsqd = self.world.nsqds[0].address
        # once into a plain topic has to name its nsqds
        by_lookup = self.config.by_lookup and self.config.copies_to
        where = {"lookupd": self.world.lookupd.address} if by_lookup else {"nsqd": nsqd}
        given = {"topic": self.copy, "delivery": "once", "retries": "4", "batchMessages": "5"}
        return SinkOptions.parse({**where, **given})

    def _live(self) -> None:
        """Live once: from the checkpoint to the end of the stream, or to the death of the process."""
        checkpoint = self.checkpoint
        reader = AnyStreamReader(self._source_options(), Clock())
        planner = pickle.dumps(reader)  # tasks are sent what was built, not what has worked
        driver: AnyStreamReader = pickle.loads(planner)
        writer = pickle.dumps(RowWriter(self._sink_options(), ROWS))
        number = max(checkpoint.offsets, default=-1)
        if number >= 0 and number not in checkpoint.commits:
            self._batch(driver, planner, writer, number)
        number += 1
        idle = 0
        while self._steps > 0 or idle < 2:
            has_run = self._trigger(driver, planner, writer, number)
            number += has_run
            idle = 0 if has_run else idle + 1
            if idle > IDLE_MAX:
                self._publish()

    def _trigger(self, driver: AnyStreamReader, planner: bytes, writer: bytes, number: int) -> bool:
        """One trigger; whether there was anything."""
        checkpoint = self.checkpoint
        Clock.now_ns += 20 * 10**9
        self.step()
        start = checkpoint.offsets.get(number - 1) or json.dumps(self._tried(driver.initialOffset))
        self.step()
        limit = driver.getDefaultReadLimit()
        assert isinstance(limit, ReadMaxRows | ReadAllAvailable)
        end = json.dumps(self._tried(lambda: driver.latestOffset(json.loads(start), limit)))
        if self.began_at is None:
            self.began_at = self._count
        self.step()
        self._tried(driver.reportLatestOffset)
        if end == start:
            return False
        checkpoint.offsets[number] = end
        if not number:
            self.planned_at = self._count
        self.step()
        if number > 0:
            self._tried(lambda: driver.commit(json.loads(checkpoint.offsets[number - 1])))
        self.step()
        self._batch(driver, planner, writer, number)
        return True

    def _batch(self, driver: AnyStreamReader, planner: bytes, writer: bytes, number: int) -> None:
        """Run a micro-batch that is in the offsets log, for the first time or again."""
        checkpoint = self.checkpoint
        start = json.loads(checkpoint.offsets[number - 1]) if number else self._tried(driver.initialOffset)
        end = json.loads(checkpoint.offsets[number])
        tasks = [pickle.dumps(task) for task in self._tried(lambda: driver.partitions(start, end))]
        kept: list[pa.RecordBatch] | None = None
        if isinstance(driver, _SimpleStreamReaderWrapper):
            kept = list(driver.getCache(start, end))
            self.step()
        rows = [self._task(planner, writer, number, index, task, kept) for index, task in enumerate(tasks)]
        before = checkpoint.tasks.setdefault(number, rows)
        if before != rows:
            raise Wrong(f"micro-batch {number} was {before} and is {rows}")
        self.step()
        checkpoint.kept.setdefault(number, [row for task_rows in rows for row in task_rows])
        self.step()
        checkpoint.commits.add(number)

    def _task(
        self, planner: bytes, writer: bytes, epoch: int, index: int, task: bytes, kept: list[pa.RecordBatch] | None
    ) -> list[tuple[Any, ...]]:
        """Run a task on an executor, as often as Spark tries; now and then twice, as one that was thought slow.

        Args:
            kept: rows that came with the plan, which Spark may have lost by the time.
        """
        for attempt in range(1, TASK_TRIES + 1):
            try:
                rows = self._attempt(planner, writer, epoch, index, task, kept)
                if not self._is_quiet and self.chance.random() < 0.05:
                    again = self._attempt(planner, writer, epoch, index, task, None)
                    if again != rows:
                        raise Wrong(f"a task read {rows}, and then {again}")
                return rows
            except LOSS as error:
                raise Wrong(f"a task failed: {error}") from error
            except FlintError:
                if attempt == TASK_TRIES:
                    raise Killed from None  # the query fails, and is started again
        raise AssertionError

    def _attempt(
        self, planner: bytes, writer: bytes, epoch: int, index: int, task: bytes, kept: list[pa.RecordBatch] | None
    ) -> list[tuple[Any, ...]]:
        reader: AnyStreamReader = pickle.loads(planner)
        batches = list(reader.read(pickle.loads(task))) if kept is None else kept
        self.step()
        publishing: RowWriter = pickle.loads(writer)
        bodies = (pa.record_batch({"body": batch.column("body")}) for batch in batches)
        done = publishing.write(bodies, TaskIdentity(self.query_name, epoch, index))
        if done.repeated:
            raise Wrong(f"up to {done.repeated} messages of an earlier try are stored as well")
        return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]

    def _tried(self, call: Callable[[], Any]) -> Any:
        """Call the driver's reader; a failure ends the query, which is started again."""
        try:
            return call()
        except LOSS as error:
            raise Wrong(f"the query failed: {error}") from error
        except FlintError:
            if self._is_quiet:
                raise
            raise Killed from None

    # -- the verdict ---------------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        kept = [row for rows in self.checkpoint.kept.values() for row in rows]
        bodies = Counter(row[-1] for row in kept)
        places = Counter(row[:-1] for row in kept)
        due = self.published
        if self.config.start == "latest":  # of a topic that is younger than the query, from its first micro-batch on
            since = {self.topics[0]: self.began_at or 0, self.topics[1]: self.planned_at}
            due = {body: (number, topic) for body, (number, topic) in due.items() if number >= since[topic]}
        problems = {
            "missing": sorted(due.keys() - bodies.keys()),
            "read twice": [body for body, count in bodies.items() if count > 1],
            "offsets read twice": [place for place, count in places.items() if count > 1],
            "of nobody": sorted(bodies.keys() - self.published.keys()),
        }
        copied = Counter(self._copied())
        problems["not copied"] = sorted((bodies - copied).elements())
        problems["copied twice"] = sorted((copied - bodies).elements())
        said = [f"{len(found)} {what}, such as {found[:3]}" for what, found in problems.items() if found]
        if said:
            raise Wrong(f"{'; '.join(said)} ({self.lives} lives, {self.config})")

    def _copied(self) -> list[bytes]:
        if not any(self.checkpoint.kept.values()):
            return []  # nothing was due, and nothing has made the topic
        given = {"nsqd": self.world.nsqds[0].address, "topic": self.copy, "columns": "body"}
        reader = NsqReader(SourceOptions.parse(given))
        return [
            body for task in reader.partitions() for b in reader.read(task) for body in b.column("body").to_pylist()
        ]


def forget_process() -> None:
    """Leave nothing behind that would end with the process of a query."""
    for idle in POOL._idle.values():
        for connection in idle:
            connection.close()
    POOL._idle.clear()
    fetch._places.clear()
    placing._others.clear()


def play(world: World, seed: int, **given: bool) -> str:
    """Play one seed; returns what was wrong, or nothing."""
    try:
        Scenario(world, seed, **given).run()
    except Wrong as error:
        return f"seed {seed}: {error}"
    return ""


def main() -> int:
    """Play many seeds, and say by the exit code whether all held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=1)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    began, wrong = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as directory, World(Path(directory)) as world:
        for seed in range(given.first, given.first + given.seeds):
            if found := play(world, seed):
                wrong += 1
                print(found, flush=True)
            if seed % 500 == 0:
                print(f"{time.monotonic() - began:7.1f} s  seed {seed}, {wrong} wrong", flush=True)
    print(f"{given.seeds} seeds, {wrong} wrong, {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
