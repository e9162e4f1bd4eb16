"""``flintmq pipeline archive``: topics as Parquet files, each message exactly once for whoever reads them.

It reads as Spark's source does, with the same options, and writes with Arrow in this process: no Spark is started, and
no checkpoint is kept beside the files (:mod:`flintmq.pipeline.files`).

Logs are read by a few threads, one log by one of them: while one waits for nsqd or for the disk, another compresses.

The rules of this file: a channel is moved only when what is below it is durable; a log is left where it is when this
ends early, at the end of a file; what threads share they change with the lock held; a log that is gone is an error, as
nobody can tell any more what it had, until a run lets it go; seen again, it is let go no longer.

Source: docs/decisions/0028.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, NamedTuple

from flintmq.clock import SystemClock
from flintmq.errors import FlintError, OptionError, UsageError
from flintmq.names import is_ephemeral
from flintmq.options import SECOND, Choice, Duration, Integer, Switch, Text, option
from flintmq.pipeline.file_sinks import check_readable
from flintmq.pipeline.files import ARCHIVE, Archive, ArchiveError, Finished, LogFiles, check_writer
from flintmq.pipeline.options import JobOptions, SourceFlags, Work
from flintmq.pipeline.runner import Runner, run_command
from flintmq.pipeline.table_files import DAY, TableArchive
from flintmq.pipeline.topics import await_topics
from flintmq.spark.broker import NotByOffset, PartitionLog
from flintmq.spark.errors import SOURCE, DataLost, LogAway
from flintmq.spark.fetch import RangeReader
from flintmq.spark.lake.opening import open_table
from flintmq.spark.lake.table import DELTA, ICEBERG, PARQUET, TABLE, TableError, check_kind, local_path
from flintmq.spark.offsets import PartitionKey
from flintmq.spark.options import SourceOptions, camel
from flintmq.spark.plan import FetchRange
from flintmq.spark.retry import Retries
from flintmq.spark.schema import arrow_schema
from flintmq.spark.start import StartingPoints
from flintmq.spark.stopping import Stopped, Stopping
from flintmq.spark.survey import Survey, Surveyor

COLUMNS = "topic,partition,log_id,offset,timestamp,trace_id,body"
NEEDED = ("offset", "timestamp")
ROWS_MAX = 1_000_000
THREADS_MAX = 4
"""Each gathers a row group, of 32 MiB, and what is compressed of it."""
KINDS = (PARQUET, DELTA, ICEBERG)
AWAY_NS = 300 * SECOND
"""With ``follow``: a log that nsqlookupd lists no more may be nowhere for so long before that is an error."""

_NOT_OBEYED = (
    "max_messages_per_trigger", "max_bytes_per_trigger", "min_messages_per_trigger", "max_trigger_delay",
    "min_partitions", "max_messages_per_task", "driver_read_max_bytes", "nsqd_down_timeout",
    "spool_location", "spool_max_bytes", "spool_host", "max_in_flight", "msg_timeout",
)  # fmt: skip
_GONE = "no nsqd that is asked has it: the topic was deleted, or its data directory is gone"
_REPLACED = "there is another log in its place: the topic was deleted and created again, or that is of another nsqd"
_WHAT, _HOW = "What to archive", "How"
_NO_END = (
    "an archive takes what there is, so that the next run goes on behind it: leave it out; replay --until and "
    "--end-offset publish a part of the files"
)
_BY_OFFSET = (
    "an archive knows by offsets what it has, so it reads FlintMQ's nsqd alone; nsq_to_file writes what a channel "
    "delivers to files, nsq_to_nsq copies it to FlintMQ, and Spark reads it with mode=spool"
)

log = logging.getLogger("flintmq.pipeline")


class LogGone(DataLost):
    """A log that is archived is served by nobody any more, and what it had in the end nobody knows.

    Args:
        key: of the log.
        position: up to where it is archived (exclusive).
        reason: what is known of it.
        is_away: somebody who may have it does not answer: it is never let go.
    """

    def __init__(self, key: PartitionKey, position: int, reason: str, is_away: bool = False) -> None:
        super().__init__(key.topic, key.label, position, None, reason)
        self.key = key
        self.is_away = is_away

    def __reduce__(self) -> tuple[type[LogGone], tuple[PartitionKey, int, str, bool]]:
        return LogGone, (self.key, self.start, self.reason, self.is_away)

    def __str__(self) -> str:
        topic, partition, log_id = self.key
        advice = (
            "Start that one again: a log that may be there is not let go"
            if self.is_away
            else "One run with failOnDataLoss=false lets it go, and the archive remembers that until it sees it again"
        )
        return (
            f"topic {topic!r}, partition {partition}, log {log_id}: it is archived up to {self.start}, and what it had "
            f"from there on, if anything, is in no file: {self.reason}. {advice}"
        )


class _Missing(NamedTuple):
    """A log that is archived and not found.

    Attributes:
        is_away: somebody who may have it does not answer.
    """

    reason: str
    is_away: bool = False


@dataclass(frozen=True, kw_only=True)
class ArchiveOptions(SourceFlags, JobOptions):
    """The flags of flintmq pipeline archive."""

    program: ClassVar[str] = "flintmq pipeline archive"
    summary: ClassVar[str] = "flintmq pipeline archive writes topics as Parquet files, each message exactly once."

    to: str = option(Text("DIRECTORY"), "", "where the files go, and go on", group=_WHAT)
    columns: str = option(Text("NAMES"), COLUMNS, "columns of the files, separated by commas", group=_WHAT)
    format: str = option(Choice(KINDS), PARQUET, "files alone, or a table with a transaction per round", group=_WHAT)
    table: str = option(Text("NAME"), TABLE, "with --format=iceberg: its name in the catalog", group=_WHAT)
    catalog: str = option(
        Text("NAME"),
        "",
        "with --format=iceberg: a catalog of PyIceberg's configuration",
        group=_WHAT,
        default_text="SQLite, in the directory",
    )
    follow: bool = option(Switch(), False, "go on with what is published, until Ctrl-C or SIGTERM", group=_HOW)
    interval_ns: int = option(Duration(1), 60 * SECOND, "with --follow: how long a round may gather", group=_HOW)
    rows_per_file: int = option(Integer(1), ROWS_MAX, "most messages of one file", group=_HOW)

    def check_together(self) -> None:
        if self.format != ICEBERG and (self.table != TABLE or self.catalog):
            raise OptionError("table", self.table, "--table and --catalog are of --format=iceberg", "argument")


@dataclass(slots=True)
class Archived(Work):
    """The work so far; ``lag`` is of those messages that were there when this round began."""

    files: int = 0
    bytes: int = 0
    paths: list[Path] = field(default_factory=list)

    def figures(self) -> dict[str, int]:
        return {"files": self.files, "bytes": self.bytes}


def archive(
    directory: str | Path,
    *,
    format: str = PARQUET,  # noqa: A002 - Spark's word
    table: str = TABLE,
    catalog: str = "",
    follow: bool = False,
    interval_s: float = 60.0,
    rows_per_file: int = ROWS_MAX,
    on_progress: Callable[[Archived], None] | None = None,
    stop: threading.Event | None = None,
    wait_for_topic_s: float = 0.0,
    **options: str,
) -> Archived:
    """Archive what there is, and go on where the files in ``directory`` end.

    Args:
        format: ``parquet``, or ``delta`` or ``iceberg`` for a table in ``directory``, with one transaction per round.
        table: of Iceberg, its name in the catalog.
        catalog: of Iceberg, by its name in PyIceberg's configuration; empty: one in SQLite, in ``directory``.
        follow: go on with what is published, in rounds of ``interval_s``, until ``stop`` is set.
        on_progress: called now and then, with each file and behind each round, by one thread at a time: any of them.
        stop: ends it when set: what was read by then is in files.
        wait_for_topic_s: how long a topic may be missing of which there are no files; 0: it is refused at once.
        options: of format nsq, as for ``spark.readStream``: ``nsqd`` or ``lookupd``, ``topic``, ``channel`` and more.

    Raises:
        UsageError: the directory is a URL.
        SinkError: Spark would not read the files there.
        LogGone: a log that is archived is gone; the others are archived.
        StoppedEarly: ``stop`` was set while a topic was waited for; a directory that was not there is not made.
        FlintError: a topic is nowhere, messages that are due are gone, an nsqd stays away, or the directory cannot be
            written.
    """
    place = local_path(directory, "--to")
    if format == PARQUET:
        check_readable(place)
    parsed = SourceOptions.parse({"columns": COLUMNS, **options})
    columns = parsed.all_columns
    for name in NEEDED:
        if name not in columns:
            raise OptionError("columns", ",".join(columns), f"{name} has to be among them", SOURCE)
    parsed.check_by_offset(_BY_OFFSET)
    parsed.check_stream(_NO_END)
    for name in _NOT_OBEYED:
        if (value := getattr(parsed, name)) != SourceOptions.__dataclass_fields__[name].default:
            raise OptionError(camel(name), value, "an archive has no micro-batches and no tasks: leave it out", SOURCE)
    stop = stop or threading.Event()
    done = Archived()
    is_new = not place.exists()
    try:
        if is_new:  # so that nothing is left of an archive that is not begun
            await_topics(options, wait_for_topic_s, stop)
        with Stopping(stop) as stopping, _files(place, format, columns, table, catalog) as files:
            how = replace(parsed, columns=columns)
            job = _Job(how, files, rows_per_file, done, on_progress, stop, stopping, follow)
            if not is_new:
                await_topics(options, wait_for_topic_s, stop, known=job.topics)
            while job.run_round() and follow and not job.stop.wait(interval_s):
                pass
    except NotByOffset as error:
        raise error.instead(_BY_OFFSET) from error
    return done


def _files(directory: Path, kind: str, columns: Sequence[str], table: str, catalog: str) -> Archive:
    check_writer(directory, ARCHIVE)  # before a table is made in it
    if kind == PARQUET:
        check_kind(directory, kind)
        return Archive(directory)
    if kind not in KINDS:
        raise OptionError("format", kind, f"say {', '.join(KINDS)}", "flintmq pipeline archive")
    schema = arrow_schema(columns)
    return TableArchive(
        open_table(kind, directory, schema, partition=DAY, day_of="timestamp", name=table, catalog=catalog),
        is_partitioned=kind == DELTA,
    )


class _Job:
    """One run."""

    def __init__(
        self,
        options: SourceOptions,
        files: Archive,
        rows_per_file: int,
        done: Archived,
        on_progress: Callable[[Archived], None] | None,
        stop: threading.Event,
        stopping: Stopping,
        is_following: bool,
    ) -> None:
        self.stop = stop
        self._stopping = stopping
        self._is_following = is_following
        self._options = options
        self._files = files
        self._rows_per_file = rows_per_file
        self._done = done
        self._on_progress = on_progress
        self._surveyor = Surveyor(options, sleep=stopping.pause, pool=stopping.pool)
        self._let_go = files.remembered()
        self._positions = files.positions()
        read = [key for key in self._positions if options.reads(key.topic, key.partition)]
        self._positions |= files.settled(read, is_lenient=not options.fail_on_data_loss)
        self._missing_since_ns: dict[PartitionKey, int] = {}
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._is_ending = threading.Event()  # this round, at the next batch of each log

    @property
    def topics(self) -> set[str]:
        """The topics of which there are files."""
        return {key.topic for key in self._positions}

    def run_round(self) -> bool:
        """Archive what there is now; False when it was told to stop.

        Raises:
            FlintError: something is gone, or cannot be read or written; what else there was is archived.
        """
        try:
            survey = self._surveyor.look(timestamp_ns=self._options.starting_timestamp, is_waiting=True)
            self._files.begin()
            gone = self._find_gone(survey)
            self._enter(survey)
        except Stopped as stopped:
            log.warning("%s; what was read before is in files", stopped)
            return False
        self._done.batch += 1
        self._done.lag = sum(max(0, entry.end - self._positions[key]) for key, entry in survey.logs.items())
        try:
            self._read(survey)
        except TableError:
            raise
        except FlintError:
            self._commit()  # one log that cannot be read does not hold up the others
            raise
        self._commit()
        if self.stop.is_set():
            return False
        self._tell()
        if gone:
            raise gone[0]
        return True

    def _find_gone(self, survey: Survey) -> list[LogGone]:
        """Find logs that are archived and gone, and tell of them; return those that are an error.

        One is let go until it is seen again: what it gets then would be missed if it were gone once more.
        """
        missing = [key for key, end in sorted(self._positions.items()) if self._is_missing(key, end, survey)]
        failing: list[LogGone] = []
        let_go: dict[PartitionKey, int] = {}
        for key, (reason, is_away) in self._look_for(missing, survey).items():
            end = self._positions[key]
            if self._options.fail_on_data_loss and not is_ephemeral(key.topic):
                failing.append(LogGone(key, end, reason, is_away))
                log.warning("%s %s is gone (%s); the others are archived first", key.topic, key.label, reason)
            elif is_away:
                log.warning("%s %s is away; it is archived up to %d (%s)", key.topic, key.label, end, reason)
            else:
                log.warning("%s %s is no more; it is archived up to %d (%s)", key.topic, key.label, end, reason)
                let_go[key] = end
        let_go |= {key: 0 for key, end in self._let_go.items() if end and key in survey.logs}
        if let_go:
            self._files.remember(let_go)
            self._let_go |= let_go
        return failing

    def _is_missing(self, key: PartitionKey, end: int, survey: Survey) -> bool:
        is_read = self._options.reads(key.topic, key.partition)
        return is_read and key not in survey.logs and self._let_go.get(key) != end  # else it came back since

    def _look_for(self, missing: Sequence[PartitionKey], survey: Survey) -> dict[PartitionKey, _Missing]:
        """Return which logs are gone or stay away, and why; those that have come back are added to the survey.

        One that nsqlookupd lists no more may be at an nsqd that is starting: it is waited for.
        """
        retries = Retries(self._options.retries, self._pause)
        gone: dict[PartitionKey, _Missing] = {}
        self._missing_since_ns = {key: at for key, at in self._missing_since_ns.items() if key in missing}
        unsure, found = list(missing), survey
        while True:
            survey.logs.update({key: found.logs[key] for key in unsure if key in found.logs})
            for key in unsure:
                if self._surveyor.is_gone(key, found):
                    is_replaced = any(other[:2] == key[:2] for other in survey.logs)
                    gone[key] = _Missing(_REPLACED if is_replaced else _GONE)
            unsure = [key for key in unsure if key not in gone and key not in survey.logs]
            if not unsure or self.stop.is_set():
                return gone
            if found is not survey:
                if self._is_following:
                    return gone | self._overdue(unsure, found)
                key = unsure[0]
                away = LogAway(key.topic, key.label, found.why_missing(key))
                try:
                    retries.failed(away, "looking for logs that are archived")
                except LogAway:
                    return gone | {key: _why_missing(key, found) for key in unsure}
            found = self._surveyor.look(unsure)

    def _overdue(self, unsure: Iterable[PartitionKey], found: Survey) -> dict[PartitionKey, _Missing]:
        """Return which logs have been nowhere for too long, and why."""
        now_ns = self._clock.monotonic_ns()
        overdue: dict[PartitionKey, _Missing] = {}
        for key in unsure:
            if key not in self._missing_since_ns:
                log.warning("%s %s waits at %d: %s", key.topic, key.label, self._positions[key], found.why_missing(key))
            if now_ns - self._missing_since_ns.setdefault(key, now_ns) >= AWAY_NS:
                overdue[key] = _why_missing(key, found)
        return overdue

    def _pause(self, pause_s: float) -> None:
        self.stop.wait(pause_s)

    def _read(self, survey: Survey) -> None:
        self._is_ending.clear()
        threads = min(len(survey.logs), THREADS_MAX, (os.cpu_count() or 1) + 1)
        pool = ThreadPoolExecutor(max(1, threads), "archive")
        try:
            reading = [pool.submit(self._read_log, key, entry, threads) for key, entry in sorted(survey.logs.items())]
            wait(reading)
        except BaseException:
            self._is_ending.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        for each in reading:
            each.result()  # raises what the first one failed with

    def _read_log(self, key: PartitionKey, entry: PartitionLog, threads: int) -> None:
        try:
            if self._must_end():
                return
            with self._lock:
                start = self._held(key, max(entry.start, 0))
            if start < entry.end:
                self._archive(FetchRange(key.topic, entry.nsqd, key.partition, start, entry.end, key.log_id))
        except FlintError as error:
            if isinstance(error, TableError):
                self._is_ending.set()  # no other log can be added either
            elif threads > 1:
                log.warning("%s; the other logs are archived before this ends", error)
            raise
        except BaseException:
            self._is_ending.set()
            raise

    def _must_end(self) -> bool:
        return self.stop.is_set() or self._is_ending.is_set()

    def _enter(self, survey: Survey) -> None:
        """Find where logs begin that have no files yet."""
        if unknown := survey.logs.keys() - self._positions.keys():
            self._positions |= self._files.positions_now(unknown)
        new = survey.logs.keys() - self._positions.keys()
        if new:  # offsets that are given may name the others as well
            found = StartingPoints(self._options, self._surveyor).find(survey)
            self._positions |= {key: found[key] for key in new}
        if self._options.channel and self._done.batch == 0:
            self._surveyor.try_cursors({key: self._positions[key] for key in survey.logs})

    def _held(self, key: PartitionKey, least: int) -> int:
        position = self._positions[key]
        if position < least:
            lost = DataLost(
                key.topic, self._surveyor.label(key), position, least, f"retention has removed all below {least}"
            )
            if self._options.fail_on_data_loss:
                raise lost
            log.warning("%s", lost.forgiven())
            self._positions[key] = least
        return self._positions[key]

    def _archive(self, wanted: FetchRange) -> None:
        stopping, writing = self._stopping, LogFiles(self._files, wanted.key, wanted.start, self._rows_per_file)
        is_whole = False
        try:
            with suppress(Stopped):  # what came whole before goes into a file
                for batch in RangeReader(wanted, self._options, stopping.pool, stopping.pause).record_batches():
                    finished = list(writing.write(batch))
                    with self._lock:
                        self._named(wanted.key, finished)
                        self._done.rows += batch.num_rows
                        self._done.lag = max(0, self._done.lag - batch.num_rows)
                        self._tell()
                    if self._must_end():
                        break
                else:
                    is_whole = True
            finished = list(writing.finish(wanted.end if is_whole else 0))
            with self._lock:
                self._named(wanted.key, finished)
                if is_whole:
                    self._positions[wanted.key] = wanted.end
        except OSError as error:
            reason = f"{error}; what has its name stays, run it again when there is room"
            raise ArchiveError(self._files.directory, reason) from error
        finally:
            writing.abandon()
        if self._options.channel and not self._files.is_committed_later:
            with self._lock:
                self._surveyor.try_cursors({wanted.key: self._positions[wanted.key]})

    def _named(self, key: PartitionKey, finished: Iterable[Finished]) -> None:
        for path, end in finished:
            self._positions[key] = end
            self._done.files += 1
            self._done.bytes += path.stat().st_size
            self._done.paths = [*self._done.paths[-99:], path]
            self._commit(is_due=False)
            self._tell()

    def _commit(self, *, is_due: bool = True) -> None:
        ends = self._files.commit(is_due=is_due)
        if ends and self._options.channel:
            self._surveyor.try_cursors(ends)

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self._done)


def _why_missing(key: PartitionKey, found: Survey) -> _Missing:
    # nsqlookupd lists no nsqd that has stopped: whether one that it does not list has the log, nobody can say
    return _Missing(found.why_missing(key), bool(found.away) or key in found.unled)


def run(arguments: Sequence[str]) -> int:
    """Run ``flintmq pipeline archive``; a signal ends it with what it has read in files."""
    return run_command(ArchiveOptions, arguments, _run)


def _run(options: ArchiveOptions, runner: Runner) -> None:
    if not options.to:
        raise UsageError("give --to, the directory of the files")
    done = archive(
        options.to,
        format=options.format,
        table=options.table,
        catalog=options.catalog,
        follow=options.follow,
        interval_s=options.interval_ns / SECOND,
        rows_per_file=options.rows_per_file,
        on_progress=runner.tell,
        stop=runner.stop,
        wait_for_topic_s=options.wait_for_topic_ns / SECOND,
        **options.source(columns=options.columns),
    )
    runner.say(f"{done.rows} messages in {done.files} files, {done.bytes} bytes, in {options.to}")


__all__ = ["ArchiveOptions", "Archived", "archive", "run"]
