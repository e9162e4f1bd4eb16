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

In the state a key is text, in one of these forms, which no other key has::

    k<text>    a value without parts; of a timestamp in a session whose zone is UTC
    t<number>  a timestamp elsewhere: microseconds since the epoch, as an hour of the night has the same text twice
    v<text>    a variant whose text another kind of variant could have: the string "1", for the number 1
    n<text>    a struct or an array: ("1",-,["a""b"]), where each value is quoted and null is -
    p/<place>  none: null

The rules of this file: a message without a key is never a repetition; no message is left out but for its key; the form
of a key is part of the state of jobs that run, so none is changed that tells values apart.
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
from flintmq.pipeline.files import DEDUPE
from flintmq.pipeline.options import NO_END, SinkFlags, SourceFlags, StreamFlags, Work
from flintmq.pipeline.runner import JobFailed, Runner, run_command
from flintmq.pipeline.streams import (
    Queries,
    check_expressions,
    check_places,
    claimed,
    last_watermark_ms,
    parsed,
    read_stream,
    target_of,
)
from flintmq.pipeline.topics import await_topics, targets_of
from flintmq.spark.options import SourceOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KEPT = ("trace_id", "headers")
_WHAT, _INTO = "What is a repetition", "Where it goes"
_KEY = "coalesce({text}, concat_ws('/', 'p', topic, partition, log_id, offset))"
_PLAIN = "concat('k', cast({value} AS string))"
_OF_TYPE = {
    "timestamp": f"if(current_timezone() = 'UTC', {_PLAIN}, concat('t', unix_micros({{value}})))",
    "variant": "concat(if((schema_of_variant({value}) = 'STRING') = (try_parse_json(cast({value} AS string)) IS NULL), "
    "'k', 'v'), cast({value} AS string))",
}
_PART = {
    "timestamp": "unix_micros({value})",
    "variant": "to_json({value})",
    "float": "if({value} = 0, '0', cast({value} AS string))",  # -0.0 is 0.0, as for Spark itself
    "double": "if({value} = 0, '0', cast({value} AS string))",
}
_NULL, _COMMA = "'-'", "','"
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
        StoppedEarly: it was told to stop while a topic was waited for.
    """
    if not options.key:
        raise UsageError("give --key, such as --key=trace_id or --key=body")
    if bool(options.to) == bool(options.to_topic) and not options.dry_run:
        raise UsageError("give either --to or --to-topic")
    options.check_schema()
    check_places(options.to, options.to_topic, options)
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
    SourceOptions.parse(source).check_stream(NO_END)
    job = {
        "job": "dedupe", "topics": options.topics_told(), "key": options.key, "within_ns": str(options.within_ns),
        "to": options.to, "to_topic": options.to_topic, "schema": options.schema,
    }  # fmt: skip
    await_topics(source, wait_s, runner.stop, checkpoint=options.checkpoint, targets=targets)
    with runner.session("flintmq-dedupe", options, work) as spark:
        rows, bad = parsed(read_stream(spark, **source), options)
        check_expressions(rows, "--key", [options.key])
        _keyed(rows, options.key)  # what is no key is refused before the checkpoint is this job's
        with claimed(options.checkpoint, job, target_of(where) if targets else {}) as name:
            _run_queries(name, rows, bad, where, options, runner, work)
    return work


def _run_queries(
    name: str,
    rows: DataFrame,
    bad: DataFrame | None,
    where: Mapping[str, str],
    options: DedupeOptions,
    runner: Runner,
    work: Deduped,
) -> None:
    """Have the queries run until they end, and begin them anew where the clock was set back."""
    while True:
        times = _Times(options.within_ns, last_watermark_ms(options.checkpoint))
        times.tell()
        key, unique = _unique(rows, options.key, times)
        queries = Queries(options, name)
        if options.to:
            queries.to_files(_without_hours(unique.drop(key)), options.to, DEDUPE, by_hour=True)
        else:
            place = ["concat_ws('/', topic, partition, log_id) AS from_log", "offset AS from_offset"]
            queries.to_topic(unique.selectExpr("body", *options.keep, *place), where)
        if bad is not None:
            beside = options.sink(options) if options.bad_topic else {}
            queries.bad_rows(bad, options, {key: value for key, value in beside.items() if key != "topic"})
        try:
            queries.wait(runner, work, {"repeated": "numDroppedDuplicateRows"}, times.check)
            return
        except _ClockSetBack:
            if runner.stop.is_set():
                return
            log.warning(
                "the clock of this machine was set back by more than twice --within; going on from the checkpoint"
            )


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

    key, keyed = _keyed(rows, expression)
    read, seen = unused("_read", keyed.columns), unused("_seen", keyed.columns)
    now = f"greatest(current_timestamp(), timestamp_millis({times.least_ms})) AS {read}"
    marked = keyed.selectExpr("*", now)
    marked = marked.withWatermark(read, f"{times.within_us} microseconds")
    later = functions.expr(f"timestamp_millis(unix_millis({read}) + {_NEVER_LATE_MS})")
    delay = {_DELAY: times.within_us // 1000 - _NEVER_LATE_MS}
    shifted = marked.select("*", later.alias(seen, metadata=delay)).drop(read)
    return key, shifted.dropDuplicatesWithinWatermark([key]).drop(seen)


def _keyed(rows: DataFrame, expression: str) -> tuple[str, DataFrame]:
    """Return rows with the column of the key, and its name.

    Raises:
        UsageError: there is a map in the key: no two are compared by Spark, and equal ones may have two texts.
    """
    from pyspark.sql import functions

    value, key = unused("_value", rows.columns), unused("_key", rows.columns)
    kind = rows.selectExpr(expression).schema[0].dataType
    numbered = _numbered(kind)
    if numbered is None:
        raise UsageError(
            f"--key {expression}: it is, or has in it, a map ({kind.simpleString()}), whose entries are in no order: "
            "name the values that count, as in m['id'], or say array_sort(map_entries(m))"
        )
    given = functions.expr(f"({expression})")
    text = _text(value, kind)
    valued = rows.withColumn(value, given if numbered == kind else given.cast(numbered))
    return key, valued.withColumn(key, functions.expr(_KEY.format(text=text))).drop(value)


def _numbered(kind: Any) -> Any:
    """Return a type with the fields of structs named by their numbers, as two may have one name; None: it has a map."""
    from pyspark.sql import types

    if isinstance(kind, types.MapType):
        return None
    if isinstance(kind, types.ArrayType):
        element = _numbered(kind.elementType)
        return None if element is None else types.ArrayType(element)
    if isinstance(kind, types.StructType):
        fields = [_numbered(field.dataType) for field in kind.fields]
        if None in fields:
            return None
        return types.StructType([types.StructField(f"_{number}", each) for number, each in enumerate(fields)])
    return kind


def _text(value: str, kind: Any) -> str:
    """Return the SQL of the text of a key; null: there is no key.

    Args:
        value: SQL of the key.
        kind: its type.
    """
    name = kind.typeName()
    if name in ("struct", "array"):
        return f"if({value} IS NULL, NULL, concat('n', {_part(value, kind)}))"
    return _OF_TYPE.get(name, _PLAIN).format(value=value)


def _part(value: str, kind: Any, depth: int = 0) -> str:
    """Return the SQL of the text of something within a key, from which its value can be told; it is never null."""
    name = kind.typeName()
    if name == "struct":
        fields = [_part(f"{value}._{number}", field.dataType, depth) for number, field in enumerate(kind.fields)]
        joined = f"concat_ws({', '.join((_COMMA, *fields))})"
        return f"if({value} IS NULL, {_NULL}, concat('(', {joined}, ')'))"
    if name == "array":
        each = f"_each{depth}"
        parts = f"transform({value}, {each} -> {_part(each, kind.elementType, depth + 1)})"
        return f"coalesce(concat('[', array_join({parts}, {_COMMA}), ']'), {_NULL})"
    said = _PART.get(name, "{value}").format(value=value)
    return f"""coalesce(concat('"', replace(cast({said} AS string), '"', '""'), '"'), {_NULL})"""


def _without_hours(rows: DataFrame) -> DataFrame:
    """Leave fields of bodies that are named as the directories of files to ``data``, which has them too."""
    return rows.selectExpr(*(ticked(name) for name in rows.columns if name.lower() not in _HOURS))


def _dry_run(options: DedupeOptions, source: dict[str, str], runner: Runner, work: Deduped) -> Deduped:
    from flintmq.pipeline.streams import COLUMNS

    with runner.session("flintmq-dedupe", options, work) as spark:
        frame = spark.read.format("nsq").options(**{"columns": COLUMNS, **source}).load()
        rows, bad = parsed(frame, options)
        check_expressions(rows, "--key", [options.key])
        key, keyed = _keyed(rows, options.key)
        (counts,) = keyed.selectExpr("count(*) AS messages", f"count(DISTINCT {key}) AS keys").collect()
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
