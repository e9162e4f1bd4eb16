"""``flintmq pipeline tail``: the last messages of topics as the rows that a query would see, then those that come.

The rules of this file: nothing is moved and nothing remembered; what a terminal could be flooded with is bounded, and
what was left out is said; no body is one that cannot be shown.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from flintmq.errors import UsageError
from flintmq.names import shortened
from flintmq.options import SECOND, Duration, Integer, Switch, Text, option
from flintmq.pipeline.arrow_rows import plain_rows, text_of
from flintmq.pipeline.bodies import REASON, SchemaFlags, unused, with_columns
from flintmq.pipeline.options import WHEN, SourceFlags, SparkFlags, Work
from flintmq.pipeline.runner import Runner, awaiting, run_command
from flintmq.pipeline.streams import check_expressions
from flintmq.pipeline.topics import await_topics
from flintmq.spark.broker import NotByOffset
from flintmq.spark.options import SourceOptions
from flintmq.spark.survey import Surveyor

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROWS_MAX = 100_000
WIDTH = 40
_SHOWN = "What is shown"
_BY_OFFSET = (
    "the last messages of a topic are read by offset, and moving no channel, so of FlintMQ's nsqd alone; flintmq tail "
    "shows what a channel of any nsqd delivers"
)


@dataclass(frozen=True, kw_only=True)
class TailOptions(SourceFlags, SchemaFlags, SparkFlags):
    """The flags of flintmq pipeline tail."""

    program: ClassVar[str] = "flintmq pipeline tail"
    summary: ClassVar[str] = (
        "flintmq pipeline tail shows the last messages of topics as rows, and their schema. It moves no channel."
    )

    rows: int = option(Integer(0, ROWS_MAX), 10, "of each partition's last messages", group=_SHOWN)
    filter: str = option(Text("SQL"), "", "rows for which it is true, such as 'data.price > 10'", group=_SHOWN)
    select: str = option(Text("SQL"), "", "columns to show, such as 'offset, data.price * 2 AS twice'", group=_SHOWN)
    json: bool = option(Switch(), False, "a line of JSON for each row, whole", group=_SHOWN)
    follow: bool = option(Switch(), False, "go on with what is published, until Ctrl-C or SIGTERM", group=WHEN)
    interval_ns: int = option(Duration(0), SECOND, "with --follow: how often to look", group=WHEN)


def _starts(source: dict[str, str], rows: int, stop: threading.Event) -> str:
    """Return where each log has ``rows`` messages left, as startingOffsets."""
    parsed = SourceOptions.parse(source)
    parsed.check_by_offset(_BY_OFFSET)
    try:
        with awaiting(stop) as stopping:
            survey = Surveyor(parsed, sleep=stopping.pause, pool=stopping.pool).look(is_waiting=True)
    except NotByOffset as error:
        raise error.instead(_BY_OFFSET) from error
    starts: dict[str, Any] = {"_log": 2}
    for key, entry in survey.logs.items():
        starts.setdefault(key.topic, {})[key.label] = max(entry.start, entry.end - rows)
    return json.dumps(starts)


def _shown(frame: DataFrame, options: TailOptions) -> DataFrame:
    """Return the columns that are shown."""
    if options.schema:
        wide = with_columns(frame, options.schema, drops_unknown=options.unknown_fields == "drop")
        frame = wide.withColumnRenamed(REASON, unused("bad", wide.columns))
    else:
        frame = frame.selectExpr(*(name for name in frame.columns if name != "body"), "cast(body AS string) AS body")
    if options.filter:
        check_expressions(frame, "--filter", [options.filter])
        frame = frame.where(options.filter)
    if options.select:
        texts = _split(options.select)
        check_expressions(frame, "--select", texts)
        return frame.selectExpr(*texts)
    hidden = {"data", "log_id", "trace_id"} | ({"body"} if options.schema else set())
    return frame.selectExpr(*(f"`{name}`" for name in frame.columns if name not in hidden))


def _split(text: str) -> list[str]:
    """Split at commas that are in no brackets and no quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"`":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


class _Printer:
    """Prints rows, each with its columns below each other's."""

    def __init__(self, options: TailOptions, runner: Runner, work: Work) -> None:
        self._is_json = options.json
        self._runner = runner
        self._work = work
        self._has_head = False

    def __call__(self, frame: DataFrame, batch: int = 0) -> None:
        """Print one micro-batch, or all of a batch read."""
        # collect() would show times in the zone of this process, and not say so
        found = frame.limit(ROWS_MAX + 1).toArrow()
        if not self._has_head and not self._is_json:
            self._has_head = True
            self._runner.say(", ".join(f"{name} {kind}" for name, kind in frame.dtypes))
        for values in plain_rows(found.slice(0, ROWS_MAX)):
            if self._is_json:
                self._runner.say(json.dumps(values, default=text_of, ensure_ascii=False))
            else:
                self._runner.say("  ".join(_short(value) for value in values.values()))
        if found.num_rows > ROWS_MAX:
            self._runner.say(f"... and more: a look shows at most {ROWS_MAX} rows")
        self._work.rows += min(found.num_rows, ROWS_MAX)


def _short(value: object) -> str:
    if isinstance(value, dict | list):
        value = json.dumps(value, default=text_of, ensure_ascii=False)
    text = "null" if value is None else text_of(value)
    text = "".join(letter if letter.isprintable() else "?" for letter in text)  # nobody writes to this terminal but we
    return shortened(text, WIDTH)


def tail(options: TailOptions, runner: Runner | None = None) -> Work:
    """Print the last messages of topics, and with ``follow`` those that come.

    Raises:
        UsageError: options are missing, or are no SQL.
        JobFailed: Spark failed.
        StoppedEarly: it was told to stop while a topic or an nsqd was waited for.
    """
    if options.bad_rows or options.bad_topic:
        raise UsageError("--bad-rows and --bad-topic are for other jobs: here column bad says what does not fit")
    if options.channel:
        raise UsageError("--channel is for other jobs: tail moves none")
    options.check_schema()
    runner, work = runner or Runner(), Work()
    source = {"columns": "topic,partition,log_id,offset,timestamp,trace_id,body", **options.source()}
    if any(name.lower().startswith("starting") for name in source):
        raise UsageError("--rows says where tail starts: leave out startingOffsets and startingTimestamp")
    await_topics(source, options.wait_for_topic_ns / SECOND, runner.stop)
    source["startingOffsets"] = _starts(source, options.rows, runner.stop)
    printer = _Printer(options, runner, work)
    with runner.session("flintmq-tail", options, work) as spark:
        if not options.follow:
            found = spark.read.format("nsq").options(**source).load()
            printer(_shown(found.orderBy("timestamp", "topic", "partition", "offset"), options))
            return work
        stream = _shown(spark.readStream.format("nsq").options(**source).load(), options)
        with tempfile.TemporaryDirectory(prefix="flintmq-tail-") as checkpoint:
            query = (
                stream.writeStream.option("checkpointLocation", checkpoint)
                .trigger(processingTime=f"{options.interval_ns // 1_000_000} milliseconds")
                .foreachBatch(printer)
                .start()
            )
            runner.follow([query], Work())
    return work


def run(arguments: Sequence[str]) -> int:
    """Run ``flintmq pipeline tail``."""
    return run_command(TailOptions, arguments, _run)


def _run(options: TailOptions, runner: Runner) -> None:
    tail(options, runner)


__all__ = ["TailOptions", "run", "tail"]
