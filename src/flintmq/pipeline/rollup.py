"""``flintmq pipeline rollup``: counts, sums and whatever SQL aggregates, by windows of time, to a topic or to files.

The rules of this file: a window is written once, when the watermark has passed its end; messages that come later than
that are counted, and told of; messages that have no time do not fit, with a schema or without.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flintmq.errors import UsageError
from flintmq.options import MINUTE, SECOND, Duration, Repeated, Switch, Text, option
from flintmq.pipeline.bodies import PLACE, REASON, SchemaFlags, quoted, ticked, unused, with_columns
from flintmq.pipeline.files import ROLLUP
from flintmq.pipeline.options import NO_END, SinkFlags, SourceFlags, StreamFlags, Work
from flintmq.pipeline.runner import JobFailed, Runner, check_streaming, run_command, spark_failures
from flintmq.pipeline.streams import COLUMNS, Queries, check_expressions, check_places, claimed, read_stream, target_of
from flintmq.pipeline.topics import await_topics, targets_of
from flintmq.spark.options import SourceOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SHOWN_MAX = 20
STORED = "timestamp"
WINDOW = ("window_start", "window_end")
_WINDOW = "_window"
_WHAT, _INTO = "What is counted", "Where it goes"


@dataclass(frozen=True, kw_only=True)
class RollupOptions(SourceFlags, SinkFlags, SchemaFlags, StreamFlags):
    """The flags of flintmq pipeline rollup."""

    program: ClassVar[str] = "flintmq pipeline rollup"
    summary: ClassVar[str] = (
        "flintmq pipeline rollup aggregates messages by windows of time, and writes a row for each window to a topic, "
        "as JSON, or to Parquet files."
    )

    aggregate: tuple[str, ...] = option(
        Repeated(Text("SQL")), ("count(*) AS messages",), "such as 'sum(data.price) AS price'", group=_WHAT
    )
    by: tuple[str, ...] = option(Repeated(Text("SQL")), (), "such as topic, or 'data.country AS country'", group=_WHAT)
    window_ns: int = option(Duration(1_000_000), MINUTE, "length of a window", group=_WHAT)
    time: str = option(Text("SQL"), STORED, "the time of a message; timestamp: when nsqd stored it", group=_WHAT)
    late_ns: int = option(
        Duration(0), MINUTE, "how much later than others a message may come and still be counted", group=_WHAT
    )
    to: str = option(Text("DIRECTORY"), "", "write Parquet files there", group=_INTO)
    dry_run: bool = option(Switch(), False, "show the newest windows of what there is, write nothing", group=_INTO)
    json: bool = option(Switch(), False, "print the result as a line of JSON", group=_INTO)

    def has_bad_rows(self) -> bool:
        """Whether a message may not fit: each has the time when it was stored, but no other one for certain."""
        return bool(self.schema) or self.time != STORED

    def check_schema(self) -> None:
        """See that the flags go together.

        Raises:
            UsageError: they do not.
        """
        if self.schema or not self.has_bad_rows() or self.unknown_fields != "bad":
            super().check_schema()
        elif self.bad_rows and self.bad_topic:
            raise UsageError("give either --bad-rows or --bad-topic")


@dataclass(slots=True)
class RolledUp(Work):
    """The work so far; ``more`` has the messages that came too late, and those that do not fit.

    Attributes:
        windows: of a dry run, newest first; ``rows`` and ``more`` are counted then where a message may not fit.
    """

    windows: list[dict[str, object]] | None = None


def rollup(options: RollupOptions, runner: Runner | None = None) -> RolledUp:
    """Aggregate messages by windows of time.

    Raises:
        UsageError: options are missing, contradict each other, or are no SQL.
        JobFailed: Spark failed.
        CheckpointError: the checkpoint is another job's, or in use.
        StoppedEarly: it was told to stop while a topic was waited for.
    """
    if bool(options.to) == bool(options.to_topic) and not options.dry_run:
        raise UsageError("give either --to or --to-topic")
    options.check_schema()
    check_places(options.to, options.to_topic, options)
    runner, work = runner or Runner(), RolledUp()
    source = options.source()
    where = options.sink(options, orderBy="at")
    if not options.dry_run:
        options.trigger()
        SourceOptions.parse(source).check_stream(NO_END)
    job = {
        "job": "rollup", "topics": options.topics_told(), "aggregate": "; ".join(options.aggregate),
        "by": "; ".join(options.by), "window_ns": str(options.window_ns), "time": options.time, "to": options.to,
        "to_topic": options.to_topic, "schema": options.schema,
    }  # fmt: skip
    targets = targets_of(where, options.bad_topic)
    await_topics(
        source, options.wait_for_topic_ns / SECOND, runner.stop, checkpoint=options.checkpoint, targets=targets
    )
    with runner.session("flintmq-rollup", options, work) as spark:
        rows, bad, at = _timed(read_stream(spark, **source), options)
        found = _aggregated(rows, at, options)
        _check_streamed(found)
        if options.dry_run:
            frame = spark.read.format("nsq").options(**{"columns": COLUMNS, **source}).load()
            rows, bad, at = _timed(frame, options)
            shown = _aggregated(rows, at, options).orderBy(WINDOW[0], ascending=False).limit(SHOWN_MAX)
            work.windows = [json.loads(row.told) for row in shown.selectExpr("to_json(struct(*)) AS told").collect()]
            if bad is not None:
                work.more = {"bad": bad.count()}
                work.rows = rows.count() + work.more["bad"]
            return work
        with claimed(options.checkpoint, job, target_of(where) if targets else {}) as name:
            queries = Queries(options, name)
            if options.to:
                queries.to_files(found, options.to, ROLLUP, by_hour=False)
            else:
                shown = found.selectExpr("to_json(struct(*)) AS body", "window_start AS at")
                queries.to_topic(shown, where)
            beside = options.sink(options) if options.bad_topic else {}
            queries.bad_rows(bad, options, {key: value for key, value in beside.items() if key != "topic"})
            queries.wait(runner, work, {"late": "numRowsDroppedByWatermark"})
    return work


def _timed(frame: DataFrame, options: RollupOptions) -> tuple[DataFrame, DataFrame | None, str]:
    """Return rows that have a time, those that do not fit, if there may be some, and the column of the time."""
    if options.schema:
        frame = with_columns(frame, options.schema, drops_unknown=options.unknown_fields == "drop")
    visible = frame.drop(REASON) if options.schema else frame
    time = f"try_cast(({options.time}) AS timestamp)"
    check_expressions(visible, "--time", [time])
    check_expressions(visible, "--by", options.by)
    at = unused("_at", frame.columns)
    if not options.has_bad_rows():
        return frame.selectExpr("*", f"{time} AS {at}"), None, at
    before = REASON if options.schema else "NULL"  # a time of what does not fit may be an error of Spark's
    timed = frame.selectExpr("*", f"if({before} IS NULL, {time}, NULL) AS {at}")
    missing = quoted(f"the time is null, or no timestamp: {options.time}")
    said = f"coalesce({before}, if({at} IS NULL, {missing}, NULL)) AS {REASON}"
    timed = timed.selectExpr(*(ticked(name) for name in timed.columns if name != REASON), said)
    bad = timed.where(f"{REASON} IS NOT NULL").selectExpr(*PLACE, "body", f"{REASON} AS reason")
    return timed.where(f"{REASON} IS NULL").drop(REASON), bad, at


def _aggregated(rows: DataFrame, at: str, options: RollupOptions) -> DataFrame:
    """Return a row for each window and group.

    Raises:
        UsageError: two columns would have one name.
    """
    from pyspark.sql import functions

    timed = rows.withWatermark(at, f"{options.late_ns // 1_000_000} milliseconds")
    window = functions.window(at, f"{options.window_ns // 1_000_000} milliseconds").alias(_WINDOW)
    grouped = timed.groupBy(window, *map(functions.expr, options.by))
    with spark_failures():
        found = grouped.agg(*map(functions.expr, options.aggregate))
    names = found.columns[1:]
    known = {name.lower() for name in (*WINDOW, _WINDOW)}
    for name in names:
        if name.lower() in known:
            raise UsageError(f"--by and --aggregate: there is a column {name} already; give another one with AS")
        known.add(name.lower())
    bounds = f"{_WINDOW}.start AS {WINDOW[0]}", f"{_WINDOW}.end AS {WINDOW[1]}"
    return found.selectExpr(*bounds, *(ticked(name) for name in names))


def _check_streamed(found: DataFrame) -> None:
    """See that Spark can go on with such windows, before a checkpoint is this job's.

    Raises:
        UsageError: it cannot.
    """
    try:
        check_streaming(found)
    except JobFailed as error:
        raise UsageError(f"--by and --aggregate: {error.reason.rstrip(';')}") from error


def run(arguments: Sequence[str]) -> int:
    """Run ``flintmq pipeline rollup``; a signal ends it, and the next run goes on there."""
    return run_command(RollupOptions, arguments, _run)


def _run(options: RollupOptions, runner: Runner) -> None:
    work = rollup(options, runner)
    if work.windows is not None:
        for each in work.windows:
            runner.say(json.dumps(each))
        if "bad" in work.more:
            runner.say(json.dumps({"rows": work.rows, **work.more}))
        return
    late, bad = work.more.get("late", 0), work.more.get("bad", 0)
    if options.json:
        runner.say(json.dumps({"rows": work.rows, **work.more, "lag": work.lag}))
        return
    said = f"{work.rows} messages read"
    if "bad" in work.more:
        said += f", {bad} that do not fit"
    if late:
        said += f"; {late} groups of messages came too late to be counted (--late)"
    runner.say(said)


__all__ = ["RolledUp", "RollupOptions", "rollup", "run"]
