"""``flintmq pipeline dedupe``: messages of topics without those that have been there before, into a topic or files.

Within means: read within. By its own time a message would be dropped as too late when one of several nsqds had been
away.

The time of reading is that of the driver's clock, which may go back: somebody sets it, or another host takes up the
checkpoint. Spark drops rows behind its watermark, which is the latest time of reading less ``--within``, and forgets a
key when the watermark passes the time that stands with it in the state. So this is done::

    time of reading       now, but never less than the last one that the checkpoint knows: keys are remembered
    what Spark looks at   a thousand years later, with a delay that is as much shorter: nothing is behind the watermark
    in the state          time of reading + --within, as if it were not so: a key is forgotten when it always was

A clock that is set back while a query runs is seen from the query's progress, and the query is started again.

The rules of this file: a message without a key is never a repetition; no message is left out but for its key.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar

from flintmq.clock import SystemClock
from flintmq.errors import UsageError
from flintmq.options import MINUTE, SECOND, Choice, Duration, Items, Switch, Text, option
from flintmq.pipeline.bodies import SchemaFlags, ticked, unused
from flintmq.pipeline.options import SinkFlags, SourceFlags, StreamFlags, Work
from flintmq.pipeline.runner import JobFailed, Runner, run_command
from flintmq.pipeline.streams import (
    Queries,
    check_expressions,
    claimed,
    last_watermark_ms,
    parsed,
    read_stream,
    target_of,
)
from flintmq.pipeline.topics import await_topics, targets_of
from flintmq.spark.lake.table import local_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KEPT = ("trace_id", "headers")
_WHAT, _INTO = "What is a repetition", "Where it goes"
_KEY = "coalesce(concat('k', cast(({key}) AS string)), concat_ws('/', 'p', topic, partition, log_id, offset))"
_HOURS = ("dt", "hour")  # columns that files by date and hour have from their place
_DELAY = "spark.watermarkDelayMs"  # where Spark notes the delay of a watermark, at the column that has one
_NEVER_LATE_MS = 365_000 * 24 * 3_600_000
_MS = 1_000_000  # nanoseconds

log = logging.getLogger("flintmq.pipeline")
_clock = SystemClock()


@dataclass(frozen=True, kw_only=True)
class DedupeOptions(SourceFlags, SinkFlags, SchemaFlags, StreamFlags):
    """The flags of flintmq pipeline dedupe."""

    program: ClassVar[str] = "flintmq pipeline dedupe"
    summary: ClassVar[str] = (
        "flintmq pipeline dedupe leaves out messages that have been there before, and writes the others to a topic "
        "or as Parquet files."
    )

    key: str = option(
        Text("SQL"), "", "messages with the same value are the same: trace_id, body, data.id, md5(body)", group=_WHAT
    )
    within_ns: int = option(Duration(1), 10 * MINUTE, "how long a key is remembered after it was read", group=_WHAT)
    to: str = option(Text("DIRECTORY"), "", "write Parquet files there, by date and hour", group=_INTO)
    keep: tuple[str, ...] = option(
        Items(Choice(KEPT)), (), "with --to-topic: what messages keep besides their body", group=_INTO
    )
    dry_run: bool = option(Switch(), False, "count what there is and what of it repeats, write nothing", group=_INTO)
    json: bool = option(Switch(), False, "print the result as a line of JSON", group=_INTO)


@dataclass(slots=True)
class Deduped(Work):
    """The work so far; ``rows`` were read, ``more`` has how many of them were repeated, and did not fit."""


def dedupe(options: DedupeOptions, runner: Runner | None = None) -> Deduped:
    """Leave out messages that have been there before.

    Raises:
        UsageError: options are missing, or contradict each other.
        JobFailed: Spark failed.
        CheckpointError: the checkpoint is another job's, or in use.
    """
    if not options.key:
        raise UsageError("give --key, such as --key=trace_id or --key=body")
    if bool(options.to) == bool(options.to_topic) and not options.dry_run:
        raise UsageError("give either --to or --to-topic")
    options.check_schema()
    for flag, directory in (("--to", options.to), ("--bad-rows", options.bad_rows)):
        local_path(directory, flag)  # raises for a URL
    runner = runner or Runner()
    work = Deduped()
    more = {"includeHeaders": "true"} if "headers" in options.keep else {}
    source = options.source(**more)
    where = options.sink(options, orderBy="from_log,from_offset")
    wait_s, targets = options.wait_for_topic_ns / SECOND, targets_of(where, options.bad_topic)
    if options.dry_run:
        await_topics(source, wait_s, runner.stop, targets=targets)
        return _dry_run(options, source, runner, work)
    options.trigger()
    job = {
        "job": "dedupe", "topics": ",".join(options.topic), "key": options.key, "within_ns": str(options.within_ns),
        "to": options.to, "to_topic": options.to_topic, "schema": options.schema,
    }  # fmt: skip
    await_topics(source, wait_s, runner.stop, checkpoint=options.checkpoint, targets=targets)
    with (
        claimed(options.checkpoint, job, target_of(where) if targets else {}) as name,
        runner.session("flintmq-dedupe", options, work) as spark,
    ):
        rows, bad = parsed(read_stream(spark, **source), options)
        check_expressions(rows, "--key", [options.key])
        while True:
            times = _Times(options.within_ns, last_watermark_ms(options.checkpoint))
            times.tell()
            key, unique = _unique(rows, options.key, times)
            queries = Queries(options, name)
            if options.to:
                queries.to_files(_without_hours(unique.drop(key)), options.to, by_hour=True)
            else:
                place = ["concat_ws('/', topic, partition, log_id) AS from_log", "offset AS from_offset"]
                queries.to_topic(unique.selectExpr("body", *options.keep, *place), where)
            if bad is not None:
                beside = options.sink(options) if options.bad_topic else {}
                queries.bad_rows(bad, options, {key: value for key, value in beside.items() if key != "topic"})
            try:
                queries.wait(runner, work, {"repeated": "numDroppedDuplicateRows"}, times.check)
                break
            except _ClockSetBack:
                if runner.stop.is_set():
                    break
                log.warning(
                    "the clock of this machine was set back by more than twice --within; going on from the checkpoint"
                )
    return work


class _ClockSetBack(Exception):
    """The clock went back while a query ran."""


class _Times:
    """The times of reading of one query.

    Args:
        within_ns: how long a key is remembered.
        watermark_ms: the last one of the checkpoint, since the epoch; 0: there is none.
    """

    def __init__(self, within_ns: int, watermark_ms: int) -> None:
        self.within_us = within_ns // 1000
        self.least_ms = watermark_ms + within_ns // _MS if watermark_ms else 0

    def tell(self) -> None:
        """Say that keys are remembered longer, where the clock is behind that of an earlier run."""
        behind_ns = self.least_ms * _MS - _clock.wall_ns()
        if behind_ns > MINUTE:
            log.warning(
                "the clock of this machine is %d s behind the one by which the checkpoint was written: keys are "
                "remembered so much longer, until it has caught up",
                behind_ns // SECOND,
            )

    def check(self, progress: Mapping[str, Any]) -> None:
        """See from a micro-batch's progress that Spark did with it what this file counts on.

        Raises:
            _ClockSetBack: keys of this micro-batch were forgotten at its end.
            JobFailed: messages were left out for their time.
        """
        operators = progress.get("stateOperators", ())
        if late := sum(int(each.get("numRowsDroppedByWatermark", 0)) for each in operators):
            raise JobFailed(
                f"Spark has left out {late} messages of micro-batch {progress['batchId']} as too late, and they are "
                "missing from what was written: read them again with another --checkpoint"
            )
        watermark = progress.get("eventTime", {}).get("watermark")
        if not operators or not watermark:
            return
        read_ms = max(_epoch_ms(progress["timestamp"]), self.least_ms)
        if read_ms + self.within_us // 1000 < _epoch_ms(watermark):
            raise _ClockSetBack


def _epoch_ms(text: str) -> int:
    """Return a time in a progress, such as ``2026-11-29T19:40:47.580Z``, in milliseconds since the epoch."""
    return round(datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() * 1000)


def _unique(rows: DataFrame, expression: str, times: _Times) -> tuple[str, DataFrame]:
    """Return rows without those whose key was there before, and the name of the column of the key, which they have."""
    from pyspark.sql import functions

    key, read = unused("_key", rows.columns), unused("_read", rows.columns)
    seen = unused("_seen", rows.columns)
    now = f"greatest(current_timestamp(), timestamp_millis({times.least_ms})) AS {read}"
    marked = rows.selectExpr("*", f"{_KEY.format(key=expression)} AS {key}", now)
    marked = marked.withWatermark(read, f"{times.within_us} microseconds")
    later = functions.expr(f"timestamp_millis(unix_millis({read}) + {_NEVER_LATE_MS})")
    delay = {_DELAY: times.within_us // 1000 - _NEVER_LATE_MS}
    shifted = marked.select("*", later.alias(seen, metadata=delay)).drop(read)
    return key, shifted.dropDuplicatesWithinWatermark([key]).drop(seen)


def _without_hours(rows: DataFrame) -> DataFrame:
    """Leave fields of bodies that are named as the directories of files to ``data``, which has them too."""
    return rows.selectExpr(*(ticked(name) for name in rows.columns if name.lower() not in _HOURS))


def _dry_run(options: DedupeOptions, source: dict[str, str], runner: Runner, work: Deduped) -> Deduped:
    from flintmq.pipeline.streams import COLUMNS

    with runner.session("flintmq-dedupe", options, work) as spark:
        frame = spark.read.format("nsq").options(**{"columns": COLUMNS, **source}).load()
        rows, bad = parsed(frame, options)
        check_expressions(rows, "--key", [options.key])
        (counts,) = (
            rows.selectExpr(f"{_KEY.format(key=options.key)} AS _key")
            .selectExpr("count(*) AS messages", "count(DISTINCT _key) AS keys")
            .collect()
        )
        work.rows = counts.messages
        work.more = {"repeated": counts.messages - counts["keys"]}
        if bad is not None:
            work.more["bad"] = bad.count()
            work.rows += work.more["bad"]
    return work


def run(arguments: Sequence[str]) -> int:
    """Run ``flintmq pipeline dedupe``; a signal ends it, and the next run goes on there."""
    return run_command(DedupeOptions, arguments, _run)


def _run(options: DedupeOptions, runner: Runner) -> None:
    work = dedupe(options, runner)
    if options.json:
        runner.say(json.dumps({"rows": work.rows, **work.more, "lag": work.lag}))
        return
    said = f"{work.rows} messages read, {work.more.get('repeated', 0)} of them repeated"
    if options.schema:
        said += f", {work.more.get('bad', 0)} that do not fit"
    runner.say(said + (", whenever that was; nothing was written" if options.dry_run else ""))


__all__ = ["DedupeOptions", "Deduped", "dedupe", "run"]
