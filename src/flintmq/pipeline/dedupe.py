"""``flintmq pipeline dedupe``: messages of topics without those that have been there before, into a topic or files.

Within means: read within. The time of reading goes on evenly, so that no message is ever too late to be looked at and
dropped for that, as it would be by its own time when one of several nsqds had been away.

The rules of this file: a message without a key is never a repetition.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flintmq.errors import UsageError
from flintmq.options import MINUTE, SECOND, Choice, Duration, Items, Switch, Text, option
from flintmq.pipeline.bodies import SchemaFlags, ticked, unused
from flintmq.pipeline.options import SinkFlags, SourceFlags, StreamFlags, Work
from flintmq.pipeline.runner import Runner, run_command
from flintmq.pipeline.streams import Queries, check_expressions, claimed, parsed, read_stream
from flintmq.pipeline.topics import await_topics, targets_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KEPT = ("trace_id", "headers")
_WHAT, _INTO = "What is a repetition", "Where it goes"
_KEY = "coalesce(concat('k', cast(({key}) AS string)), concat_ws('/', 'p', topic, partition, log_id, offset))"
_HOURS = ("dt", "hour")  # columns that files by date and hour have from their place


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
        claimed(options.checkpoint, job) as name,
        runner.session("flintmq-dedupe", options, work) as spark,
    ):
        rows, bad = parsed(read_stream(spark, **source), options)
        check_expressions(rows, "--key", [options.key])
        key, read = unused("_key", rows.columns), unused("_read", rows.columns)
        unique = (
            rows.selectExpr("*", f"{_KEY.format(key=options.key)} AS {key}", f"current_timestamp() AS {read}")
            .withWatermark(read, f"{options.within_ns // 1000} microseconds")
            .dropDuplicatesWithinWatermark([key])
        )
        queries = Queries(options, name)
        if options.to:
            queries.to_files(_without_hours(unique.drop(key, read)), options.to, by_hour=True)
        else:
            place = ["concat_ws('/', topic, partition, log_id) AS from_log", "offset AS from_offset"]
            queries.to_topic(unique.selectExpr("body", *options.keep, *place), where)
        if bad is not None:
            beside = options.sink(options) if options.bad_topic else {}
            queries.bad_rows(bad, options, {key: value for key, value in beside.items() if key != "topic"})
        queries.wait(runner, work, {"repeated": "numDroppedDuplicateRows"})
    return work


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
