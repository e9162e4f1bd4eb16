"""Queries that jobs run: into a topic, or into Parquet files that each row is in once; and the rows that do not fit.

::

    DIRECTORY/dt=2026-11-23/hour=14/5f3a9c01d2e4b677-0000000012-0003.parquet
                                    job              micro-batch file
    DIRECTORY/.staged/...           what is being written
    DIRECTORY/.writer               the kind of job that writes here: no other one may, as readers would count both
    DIRECTORY/.lock                 held by those of that kind, together
    CHECKPOINT/job.json             which job this is, the name that its files have, and where it publishes
    CHECKPOINT/job.lock             held by the one that runs
    CHECKPOINT/rows/, bad/          the checkpointLocation of each query

The rules of this file: a file gets its name by a rename, when it is durable; a micro-batch that is repeated replaces
its files before anything else is written; a checkpoint belongs to one job, and to one process at a time.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flintmq.errors import UNREADABLE_JSON, UsageError
from flintmq.pipeline.bodies import PLACE, REASON, SchemaFlags, with_columns
from flintmq.pipeline.file_sinks import SinkError, check_readable
from flintmq.pipeline.files import BAD_ROWS, STAGED, DirectoryError, held, shared
from flintmq.pipeline.options import StreamFlags, Work
from flintmq.pipeline.runner import JobFailed, Runner, spark_failures
from flintmq.spark.durable import replace
from flintmq.spark.lag import CHECKPOINT_FILE_MAX, unfinished
from flintmq.spark.lake.table import DELTA, ICEBERG, kind_of, local_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NAME_BYTES = 8
STARTS_MAX = 12
LOCK = "job.lock"
JOB = "job.json"
ROWS, BAD = "rows", "bad"
STARVED = "Python worker failed to connect back"  # within 10 s, which Spark has as a constant
COLUMNS = "topic,partition,log_id,offset,timestamp,trace_id,body"
_BAD = ", ".join((*PLACE, "body", f"{REASON} AS reason"))


log = logging.getLogger("flintmq.pipeline")


class CheckpointError(DirectoryError):
    """A checkpoint cannot be used."""

    kind = "checkpoint"


@contextmanager
def claimed(checkpoint: str, job: Mapping[str, str], target: Mapping[str, str] | None = None) -> Iterator[str]:
    """Hold a checkpoint while a job runs; yields the name that this job has for ever.

    Args:
        checkpoint: a local or mounted directory.
        job: what makes it this job: with other values a checkpoint is another job's.
        target: where it publishes, and how: with other values it goes on, as addresses change, with a warning.

    Raises:
        CheckpointError: another job's, or in use, or it cannot be written.
        UsageError: it is no directory of this machine.
    """
    directory = local_path(checkpoint, "--checkpoint")
    with checkpoint_held(directory):
        yield _name(directory, dict(job), dict(target or {}))


def checkpoint_held(checkpoint: Path) -> AbstractContextManager[None]:
    """Keep other processes from a checkpoint, which is made where it is missing.

    Raises:
        CheckpointError: another job runs with it, or it cannot be written.
    """
    return held(checkpoint, LOCK, "another job runs with it", CheckpointError)


def target_of(sink: Mapping[str, str], **more: str) -> dict[str, str]:
    """Return where a job publishes, as its checkpoint notes it.

    Args:
        sink: options of format nsq for writing.
        more: what else makes a difference to what is there.
    """
    places = {name: ",".join(sorted(sink[name].split(","))) for name in ("nsqd", "lookupd") if sink.get(name)}
    return {**places, **more}


def _name(directory: Path, job: dict[str, str], target: dict[str, str]) -> str:
    path = directory / JOB
    if path.exists():
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            before, name = dict(known["job"]), str(known["name"])
            noted = dict(known.get("target", {}))  # that of a release that noted none says nothing
        except (*UNREADABLE_JSON, KeyError, TypeError, OSError) as error:
            raise CheckpointError(directory, f"job.json cannot be read: {error}") from error
        if before.get("topics") == "":  # that of an earlier release, which noted no pattern
            before["topics"] = job.get("topics")
        other = sorted(key for key in before.keys() | job.keys() if before.get(key) != job.get(key))
        if other:
            told = "; ".join(f"{key} was {before.get(key)!r} and is {job.get(key)!r}" for key in other)
            raise CheckpointError(directory, f"it is another job's: {told}. Name another one")
        if noted and target != noted:
            _warn_of_target(directory, noted, target)
        if known != {"job": job, "name": name, "target": target}:
            _note(path, {"job": job, "name": name, "target": target})
        return name
    ours = (LOCK, _staged(path).name)  # a job that was killed here has done nothing yet
    if any(each.name not in ours for each in directory.iterdir()):
        raise CheckpointError(directory, "it is not empty, and no job's: name a directory of this job alone")
    name = secrets.token_hex(NAME_BYTES)
    _note(path, {"job": job, "name": name, "target": target})
    return name


def _note(path: Path, known: Mapping[str, Any]) -> None:
    staged = _staged(path)
    staged.write_text(json.dumps(known), encoding="utf-8")
    replace(staged, path)


def _staged(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _warn_of_target(directory: Path, noted: Mapping[str, str], target: Mapping[str, str]) -> None:
    told = [
        f"{name} was {noted.get(name, '')!r} and is {target.get(name, '')!r}"
        for name in sorted(noted.keys() | target.keys())
        if noted.get(name) != target.get(name)
    ]
    log.warning(
        "checkpoint %s: it publishes elsewhere, or otherwise, from here on: %s. What it has read before is not there "
        "unless that is the same place by another name; to publish all of it, name another --checkpoint",
        directory, "; ".join(told),
    )  # fmt: skip


def forget_unfinished(place: Path) -> None:
    """Remove what is left of a first micro-batch that a driver was killed over while it wrote down what to read.

    Nothing of it has run. Spark 4.3 would never start a query there again (STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY).

    Args:
        place: the query's ``checkpointLocation``.
    """
    for path in unfinished(place):
        path.unlink(missing_ok=True)


def until_not_starved(run: Callable[[], None], runner: Runner) -> None:
    """Run queries, which go on from their checkpoint when Spark's Python did not start in time on a busy machine.

    Args:
        run: starts them, and returns when they have ended.
        runner: follows them.

    Raises:
        JobFailed: they failed otherwise, or so ``STARTS_MAX`` times without a micro-batch done in between.
    """
    failures = done = 0
    while True:
        try:
            run()
            return
        except JobFailed as error:
            failures = 1 if runner.batches_done > done else failures + 1
            done = runner.batches_done
            if STARVED not in error.reason or failures >= STARTS_MAX:
                raise
            log.warning("%s; this machine is busy, going on from the checkpoint", error)


def last_watermark_ms(checkpoint: str | Path) -> int:
    """Return the watermark with which the next micro-batch of a job's rows goes on, in milliseconds since the epoch.

    It is that of the last micro-batch that was planned, or the one that the last committed has left behind it. 0: there
    is none, or it cannot be read, which Spark says when it starts the query.
    """
    place = Path(checkpoint) / ROWS
    return max(
        _last_noted(place / "offsets", "batchWatermarkMs"),
        _last_noted(place / "commits", "nextBatchWatermarkMs"),
    )


def _last_noted(directory: Path, name: str) -> int:
    """Return a number that Spark has noted in the second line of the last file of a log of its checkpoint; 0: none."""
    try:
        last = max(int(path.name) for path in directory.iterdir() if path.name.isdecimal())
        with (directory / str(last)).open(encoding="utf-8") as file:
            lines = file.read(CHECKPOINT_FILE_MAX).splitlines()
        return int(json.loads(lines[1])[name])
    except (OSError, *UNREADABLE_JSON, KeyError, IndexError, TypeError):
        return 0


class BatchFiles:
    """Writes micro-batches as Parquet files, for ``foreachBatch``.

    Args:
        directory: local or mounted, on every machine of the cluster.
        name: of the job, as :func:`claimed` has it.
        by_hour: whether files lie by date and hour of the column ``timestamp``.
    """

    def __init__(self, directory: str | Path, name: str, *, by_hour: bool = False) -> None:
        self._directory = Path(directory)
        self._name = name
        self._by_hour = by_hour
        self._begun: int | None = None  # the last micro-batch that was

    def __call__(self, frame: DataFrame, batch: int) -> None:
        """Write one micro-batch; what an earlier try of it has left behind is replaced."""
        staged = self._directory / STAGED / f"{self._name}-{batch}"
        prefix = f"{self._name}-{batch:010d}-"
        if self._begun is None or batch <= self._begun:  # any other one begins in this process
            for left in self._directory.glob(f"**/{prefix}*.parquet"):
                left.unlink()
        self._begun = batch
        writer = frame
        if self._by_hour:
            writer = frame.selectExpr("*", "date_format(timestamp, 'yyyy-MM-dd') AS dt",
                                      "date_format(timestamp, 'HH') AS hour")  # fmt: skip
        out = writer.write.mode("overwrite")
        (out.partitionBy("dt", "hour") if self._by_hour else out).parquet(str(staged))
        for number, path in enumerate(sorted(staged.glob("**/*.parquet"))):
            place = self._directory / path.parent.relative_to(staged)
            place.mkdir(parents=True, exist_ok=True)
            replace(path, place / f"{prefix}{number:04d}.parquet")
        shutil.rmtree(staged)


class _FailAtBadRow:
    """Ends a query at the first row that does not fit."""

    def __call__(self, frame: DataFrame, batch: int) -> None:
        found = frame.orderBy("topic", "partition", "offset").limit(1).collect()
        if found:
            row = found[0]
            raise JobFailed(
                f"topic {row.topic}, partition {row.partition}, offset {row.offset}: {row.reason}; give --bad-rows or "
                "--bad-topic to go on without such rows"
            )


def read_stream(spark: SparkSession, **options: str) -> DataFrame:
    """Return the messages of topics as a stream, with the columns that jobs need."""
    stream: DataFrame = spark.readStream.format("nsq").options(**{"columns": COLUMNS, **options}).load()
    return stream


def parsed(frame: DataFrame, flags: SchemaFlags) -> tuple[DataFrame, DataFrame | None]:
    """Return rows whose JSON bodies are columns, and those that do not fit; all as they are without a schema."""
    if not flags.schema:
        return frame, None
    wide = with_columns(frame, flags.schema, drops_unknown=flags.unknown_fields == "drop")
    return wide.where(f"{REASON} IS NULL").drop(REASON), wide.where(f"{REASON} IS NOT NULL").selectExpr(
        *_BAD.split(", ")
    )


class Queries:
    """The queries of one job.

    Args:
        flags: with checkpoint and trigger.
        name: of the job, as :func:`claimed` has it.
    """

    def __init__(self, flags: StreamFlags, name: str) -> None:
        self._flags = flags
        self._name = name
        self._starters: list[Callable[[], Any]] = []
        self._places: list[tuple[Path, str]] = []
        self._has_bad = False

    def to_topic(self, frame: DataFrame, sink: Mapping[str, str], query: str = ROWS) -> None:
        """Publish rows."""
        self._starters.append(self._writer(frame, query).format("nsq").options(**sink).start)

    def to_files(self, frame: DataFrame, directory: str, job: str, *, by_hour: bool, query: str = ROWS) -> None:
        """Write rows as Parquet files.

        Args:
            job: the kind of job, in a word: those of others are refused there.

        Raises:
            SinkError: Spark would not read them there.
        """
        check_readable(Path(directory))
        self._places.append((Path(directory), job))
        files = BatchFiles(directory, self._name, by_hour=by_hour)
        self._starters.append(self._writer(frame, query).foreachBatch(files).start)

    def bad_rows(self, bad: DataFrame | None, flags: SchemaFlags, sink: Mapping[str, str]) -> None:
        """Put rows that do not fit where they are wanted; the first one ends the job where they are not.

        Args:
            sink: options of format nsq for writing, without the topic.
        """
        if bad is None:
            return
        from pyspark.sql import functions

        counted = bad.observe("bad", functions.expr("count(*) AS rows"))
        if flags.bad_topic:
            told = counted.selectExpr(
                "to_json(struct(topic, partition, log_id, offset, timestamp, reason, "
                "if(is_valid_utf8(cast(body AS string)), cast(body AS string), NULL) AS body, "
                "base64(body) AS body_base64)) AS body"
            )
            self.to_topic(told, {**sink, "topic": flags.bad_topic}, BAD)
        elif flags.bad_rows:
            self.to_files(counted, flags.bad_rows, BAD_ROWS, by_hour=True, query=BAD)
        else:
            self._starters.append(self._writer(counted, BAD).foreachBatch(_FailAtBadRow()).start)
        self._has_bad = True

    def wait(
        self,
        runner: Runner,
        work: Work,
        counted: Mapping[str, str] | None = None,
        check: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        """Start them, and wait until they end, or the job is to stop.

        Args:
            counted: further figures of the job, by the metric of Spark's stateful operators that they are; they go on
                from those that the work has.
            check: given the progress of each micro-batch when it was counted; what it raises ends the queries.

        Raises:
            JobFailed: one of them failed.
            SinkError: a job of another kind writes to a directory of files, or has.
        """
        with ExitStack() as around:
            for place, job in self._places:
                if (kind := kind_of(place)) in (DELTA, ICEBERG):
                    why = f"it is a table of {kind}, which has those files alone that it lists"
                    raise SinkError(place, f"{why}: name another one")
                around.enter_context(shared(place, job, SinkError))
            self._wait(runner, work, counted or {}, check)

    def _wait(
        self,
        runner: Runner,
        work: Work,
        counted: Mapping[str, str],
        check: Callable[[Mapping[str, Any]], None] | None,
    ) -> None:
        for figure in (*counted, *(["bad"] if self._has_bad else [])):
            work.more.setdefault(figure, 0)

        def look(progress: Mapping[str, Any]) -> None:
            if self._has_bad:
                work.more["bad"] += progress.get("observedMetrics", {}).get("bad", {}).get("rows", 0)
            for name, metric in counted.items():
                for operator in progress.get("stateOperators", ()):
                    value = operator.get(metric, operator.get("customMetrics", {}).get(metric, 0))
                    work.more[name] += int(value)
            if check is not None:
                check(progress)

        together = list(enumerate(self._starters))
        if self._flags.follow or not self._has_bad:
            self._run(runner, work, look, together)
        else:  # one after the other is less to start at once, and no row is written before a bad one is found
            self._run(runner, work, look, together[-1:])
            if not runner.stop.is_set():
                self._run(runner, work, look, together[:-1])

    def _run(
        self,
        runner: Runner,
        work: Work,
        look: Callable[[Mapping[str, Any]], None],
        starters: Sequence[tuple[int, Callable[[], Any]]],
    ) -> None:
        last = len(self._starters) - 1

        def once() -> None:
            with spark_failures():
                started = [start() for _, start in starters]
            beside = [
                query for query, (number, _) in zip(started, starters, strict=True) if self._has_bad and number == last
            ]
            runner.follow(started, work, look, beside=beside)

        until_not_starved(once, runner)

    def _writer(self, frame: DataFrame, query: str) -> Any:
        place = Path(self._flags.checkpoint).resolve() / query
        forget_unfinished(place)
        writer: Any = frame.writeStream
        return (
            writer.queryName(f"{query}-{self._name}-{threading.get_ident()}")
            .option("checkpointLocation", str(place))
            .trigger(**self._flags.trigger())
        )


def check_places(to: str, to_topic: str, flags: SchemaFlags) -> None:
    """See that rows that do not fit go elsewhere than the others, and files to directories of this machine.

    Both queries of a job have the same number of a micro-batch, and the job's name, so in one directory each would
    take the other's files for those of an earlier try.

    Args:
        to, to_topic: where the others go, as --to and --to-topic have it.

    Raises:
        UsageError: one directory is the other, or lies in it, by whatever name; it is one topic; or one is a URL.
    """
    good, bad = (
        Path(os.path.realpath(local_path(directory, flag))) if directory else None
        for flag, directory in (("--to", to), ("--bad-rows", flags.bad_rows))
    )
    if good and bad and (good.is_relative_to(bad) or bad.is_relative_to(good)):
        where = "are one directory" if good == bad else "lie one in the other"
        raise UsageError(f"--to {to} and --bad-rows {flags.bad_rows} {where}: give --bad-rows a directory beside --to")
    if to_topic and to_topic == flags.bad_topic:
        raise UsageError(f"--to-topic and --bad-topic are both {to_topic}: give another --bad-topic")


def check_expressions(frame: DataFrame, flag: str, texts: Sequence[str]) -> None:
    """See that Spark understands SQL expressions over the columns of a frame.

    Raises:
        UsageError: one it does not; the columns are named.
    """
    from pyspark.errors import PySparkException

    for text in texts:
        try:
            frame.selectExpr(text)
        except PySparkException as error:
            line = str(error).strip().splitlines()[0]
            have = ", ".join(f"{name} {kind}" for name, kind in frame.dtypes)
            raise UsageError(f"{flag} {text}: {line} There is: {have}") from error
