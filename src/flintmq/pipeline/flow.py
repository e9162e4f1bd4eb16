"""``flintmq pipeline run x.toml`` and ``flintmq pipeline check x.toml``: pipelines that are written down, on Spark.

Every sink is a query of its own, with its own place in the checkpoint, so views are built for each of them. Rows that
break a rule are counted in passing (``observe``), so they cost no second pass. A query reads its sources anew, so a
channel, which has one place, is of one of them alone.

The rules of this file: what Spark refuses is told with the line of the file that it comes from; a dry run reads, and
writes nothing; a checkpoint, and a directory that a stream writes to, are of one run at a time, however their
names are written.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flintmq.errors import FlintError, NsqdError, OptionError, UsageError
from flintmq.options import SECOND, Duration, Integer, Switch, Text, option
from flintmq.pipeline import file_sinks
from flintmq.pipeline.arrow_rows import plain_rows
from flintmq.pipeline.bodies import names_of_structs
from flintmq.pipeline.options import SPARK, JobOptions, SparkFlags, Work
from flintmq.pipeline.plan_file import (
    BATCH_MODES,
    DROP,
    FAIL,
    OVERWRITE,
    STREAM_MODES,
    Part,
    Plan,
    Sink,
    Source,
    Step,
    read_plan,
)
from flintmq.pipeline.runner import (
    JobFailed,
    Runner,
    awaiting,
    check_streaming,
    one_line,
    reason,
    run_command,
    spark_failures,
    without_stacks_of_sql,
)
from flintmq.pipeline.streams import checkpoint_held, forget_unfinished, until_not_starved
from flintmq.pipeline.topics import Target, await_topics, check_targets, shared_topics
from flintmq.spark.batch_reader import NsqReader
from flintmq.spark.broker import TOPIC_NOT_EXIST, NotByOffset
from flintmq.spark.errors import DataLost
from flintmq.spark.lag import committed_offsets
from flintmq.spark.offsets import Offsets, PartitionKey, to_json
from flintmq.spark.options import AUTO, CURSOR, EARLIEST, OFFSET, SPOOL, SinkOptions, SourceOptions
from flintmq.spark.start import StartingPoints, check_channel
from flintmq.spark.survey import Survey, Surveyor

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Observation, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

DRY_ROWS = 1000
SHOWN_ROWS = 5
SHOWN_WIDTH = 200
JSON_COLUMN = "json"
CORRUPT = "_corrupt_record"
_FIELDLESS = "struct<_: string>"  # of which nothing is made: any value would do, and none is kept
BROKEN = "rule "
OBSERVED_WITHIN_S = 60
"""Spark tells what was observed soon after an action has ended, unless its queue of events was full."""
_ROWS = "rows"
_OF_STREAMS = ("startingoffsets", "channel", "allowunsafelatest")  # what a look at some rows does without
_MEMORY = "memory"
_APPEND = "append"
_NEW = "errorifexists"
_PARTITIONS = "partitionOverwriteMode"
_RELATIONS = {"StreamingRelationV2": "extraOptions", "DataSourceV2Relation": "options"}
"""Spark's classes of what a plan reads in format nsq, and what each calls its options."""
_VARIABLE = "${"  # how one begins in SQL; one that is not set is nothing
_FILES = "org.apache.spark.sql.execution.datasources.v2.FileDataSourceV2"
_WHAT, _HOW = "What to run", "How"
_NEVER = threading.Event()  # of who is not told to stop

log = logging.getLogger("flintmq.pipeline")


@dataclass(frozen=True, kw_only=True)
class PlanFlags(JobOptions):
    """The file, and what runs it."""

    plan: str = option(Text("FILE"), "", "the pipeline, in TOML", group=_WHAT)
    master: str = option(Text("MASTER"), "", "the cluster, where the file names none", group=SPARK)


@dataclass(frozen=True, kw_only=True)
class CheckOptions(PlanFlags):
    """The flags of flintmq pipeline check."""

    program: ClassVar[str] = "flintmq pipeline check"
    summary: ClassVar[str] = "flintmq pipeline check plans a pipeline against the running nsqd, and runs nothing."


@dataclass(frozen=True, kw_only=True)
class RunOptions(PlanFlags):
    """The flags of flintmq pipeline run."""

    program: ClassVar[str] = "flintmq pipeline run"
    summary: ClassVar[str] = "flintmq pipeline run runs a pipeline: sources, steps, rules and sinks of a file."

    dry_run: bool = option(Switch(), False, "show what each sink would get, and write nothing", group=_HOW)
    rows: int = option(Integer(1, 1_000_000), DRY_ROWS, "with --dry-run: rows that are read of each source", group=_HOW)
    wait_for_topic_ns: int = option(
        Duration(0), 0, "how long a topic may be missing", group=_HOW, default_text="0: refused at once"
    )


@dataclass(slots=True)
class Ran(Work):
    """The work so far; ``rows`` were read by streams, ``written`` has what each sink got.

    Attributes:
        broken: rows that broke a rule, by sink and rule.
    """

    written: dict[str, int] = field(default_factory=dict)
    broken: dict[tuple[str, str], int] = field(default_factory=dict)

    def figures(self) -> dict[str, int]:
        return {"written": sum(self.written.values()), "broken": sum(self.broken.values())}


def run_plan(
    path: str | Path,
    *,
    spark: SparkSession | None = None,
    on_progress: Callable[[Ran], None] | None = None,
    stop: threading.Event | None = None,
    wait_for_topic_s: float = 0,
) -> Ran:
    """Run the pipeline of a file until it is done, or ``stop`` is set.

    Args:
        spark: a session to use; None: one is started as the file says, and stopped in the end.
        wait_for_topic_s: how long a topic may be missing.

    Raises:
        PlanError: the file says what cannot be done; with the line.
        NsqdError: a topic that was not read before is nowhere.
        StoppedEarly: ``stop`` was set while a topic was waited for.
        CheckpointError: another run has the checkpoint.
        JobFailed: Spark failed, or a row broke a rule that fails.
    """
    return _run_plan(read_plan(Path(path)), Runner(on_progress, stop, spark), wait_for_topic_s)


def check_plan(path: str | Path, *, spark: SparkSession | None = None) -> list[str]:
    """Plan the pipeline of a file against the running nsqd, and run nothing; return what was found, as lines.

    Raises:
        FlintError: the file says what cannot be done, or an nsqd does not answer.
    """
    return list(_check(read_plan(Path(path)), Runner(spark=spark)))


def _session_of(plan: Plan, master: str = "") -> SparkFlags:
    """Return how the session of a plan is started.

    Args:
        master: of the command line; empty: the plan's, or the default.

    Raises:
        PlanError: the plan names another one.
    """
    if master and plan.master not in ("", master):
        raise plan.error(plan.top, "spark", f"master is {plan.master} here, and --master says {master}: leave one out")
    conf = tuple(f"{name}={value}" for name, value in plan.conf.items())
    return SparkFlags(master=master or plan.master or SparkFlags().master, jvm=plan.jvm, conf=conf)


def _run_plan(plan: Plan, runner: Runner, wait_for_topic_s: float, master: str = "") -> Ran:
    done = Ran()
    session = _session_of(plan, master)
    _await_topics(plan, runner, wait_for_topic_s)
    with ExitStack() as around:
        spark = around.enter_context(runner.session(plan.name, session, done))
        builds = _checked(plan, spark, runner.stop)
        streams = [build for build in builds if build.is_stream]
        if streams and (checkpoint := streams[0].checkpoint) is not None:
            around.enter_context(checkpoint_held(checkpoint))
        for build in streams:
            around.enter_context(build.held())
        for build in builds:
            if not build.is_stream and not runner.stop.is_set():
                build.write(done)
                runner.tell(done)
        if streams and not runner.stop.is_set():
            until_not_starved(lambda: _follow(streams, runner, done), runner)
    return done


def _follow(streams: Sequence[_Build], runner: Runner, done: Ran) -> None:
    queries: list[Any] = []
    by_id: dict[str, _Build] = {}
    try:
        for build in streams:
            queries.append(build.start())
            by_id[str(queries[-1].id)] = build
    except BaseException:
        for query in queries:
            query.stop()
        raise

    def count(progress: Mapping[str, Any]) -> None:
        by_id[progress["id"]].count(progress.get("observedMetrics") or {}, done)

    try:
        runner.follow(queries, done, count)
    except JobFailed as error:
        for query in queries:
            if query.exception() is not None:
                raise by_id[str(query.id)].failed(error) from error
        raise


class _Build:
    """The views of one sink.

    Args:
        rows: read so many of each source, all at once; 0: as the file says.
        stop: set when nobody is to be waited for any more.

    Attributes:
        frame: what the sink gets.
        directory: of a sink of files, by the one name that it has; empty until it was checked, and of others.
        checkpoint: of the pipeline of a stream, by the one name that it has; None: it is not local or mounted.

    Raises:
        PlanError: Spark refuses a source, a step, a rule or the name of the checkpoint.
    """

    def __init__(
        self, plan: Plan, spark: SparkSession, sink: Sink, rows: int = 0, stop: threading.Event = _NEVER
    ) -> None:
        self._plan = plan
        self._spark = spark
        self.sink = sink
        self._row_limit = rows
        self._stop = stop
        self.directory = ""
        self.checkpoint: Path | None = None
        self.views: dict[str, DataFrame] = {}
        self._names = {f"rule_{index}": rule for index, rule in enumerate(plan.rules)}
        self._observations: dict[str, Observation] = {}
        self.frame = self._build(is_stream=True)
        self.is_stream = self.frame.isStreaming
        if self.is_stream:
            with self._told(plan.top, "checkpoint"):
                self.checkpoint = file_sinks.local_directory(file_sinks.directory_of(spark, plan.checkpoint))
        else:
            self.frame = self._build(is_stream=False)

    def _build(self, *, is_stream: bool) -> DataFrame:
        """Build the views; what is observed is found in the progress of a stream, else in an object for each."""
        plan, spark = self._plan, self._spark
        for source in plan.sources:
            with self._told(source, "schema"):
                _check_schema(spark, source)
            with self._told(source, "options"):
                frame = _read(spark, source, self._row_limit, self._stop)
            self._add(source.name, frame, is_stream)
        for step in plan.steps:
            with self._told(step, "sql" if step.sql else "python"):
                if step.sql:
                    _check_query(plan, spark, step)
                    frame = spark.sql(step.sql)
                else:
                    frame = _function(plan, step)(spark, dict(self.views))
            self._add(step.name, frame, is_stream)
        from pyspark.sql import functions

        return self._observe(self.views[self.sink.view], _ROWS, functions.count(functions.lit(1)), is_stream)

    def _add(self, view: str, frame: DataFrame, is_stream: bool) -> None:
        from pyspark.sql import functions

        for name, rule in self._names.items():
            if rule.of != view:
                continue
            is_met = f"coalesce(({rule.condition}), false)"
            with self._told(rule, rule.kind):
                frame = self._observe(frame, name, functions.count_if(~functions.expr(is_met)), is_stream)
                if rule.kind == DROP:
                    frame = frame.filter(is_met)
                elif rule.kind == FAIL:
                    said = functions.lit(f"{BROKEN}{rule.name!r} of {view} is broken by ")
                    whole = functions.to_json(functions.struct("*"), {"ignoreNullFields": "false"})
                    row = functions.substring(whole, 1, SHOWN_WIDTH)
                    failed = functions.raise_error(functions.concat(said, row)).cast("boolean")
                    frame = frame.filter(functions.when(functions.expr(is_met), True).otherwise(failed))
        self.views[view] = frame
        frame.createOrReplaceTempView(view)

    def _observe(self, frame: DataFrame, name: str, count: Column, is_stream: bool) -> DataFrame:
        from pyspark.sql import Observation

        if is_stream:
            return frame.observe(name, count.alias("n"))
        self._observations[name] = Observation(name)
        return frame.observe(self._observations[name], count.alias("n"))

    @property
    def place(self) -> Path | None:
        """The directory of the checkpoint of a stream; None: it is not local or mounted."""
        return self.checkpoint / self.sink.name if self.checkpoint is not None else None

    @property
    def location(self) -> str:
        """The same, as Spark is told it: the checkpoint may be a URL."""
        return os.path.join(self._plan.checkpoint, self.sink.name)

    @property
    def begins(self) -> bool:
        """Whether a stream has planned no micro-batch yet, as far as that can be seen from here."""
        return self.place is not None and not any((self.place / "offsets").glob("[0-9]*"))

    def sources(self) -> list[tuple[Source, bool]]:
        """Return the sources of format nsq that the sink reads, each as often as it reads it.

        The second of each pair is whether the rows' column ``topic`` is that of the source as it is.
        """
        found: dict[str, tuple[Source, bool]] = {}
        plan = self._analyzed()
        columns, leaves = plan.output(), plan.collectLeaves()
        names = [columns.apply(number) for number in range(columns.size())]
        topics = {str(each.exprId()) for each in names if each.name().lower() == "topic"}
        for leaf in (leaves.apply(number) for number in range(leaves.size())):
            if (options := _RELATIONS.get(leaf.getClass().getSimpleName())) is None:
                continue
            given = dict(getattr(leaf, options)().asCaseSensitiveMap())
            for source in self._plan.sources:
                if source.format == "nsq" and dict(source.options) == given:
                    own = {str(leaf.output().apply(number).exprId()) for number in range(leaf.output().size())}
                    found[str(leaf.output())] = source, bool(topics & own)
                    break
        return list(found.values())

    def check(self) -> None:
        """See that the sink can take the view, as far as that can be seen before.

        Raises:
            PlanError: it cannot.
        """
        sink, plan = self.sink, self._plan
        if (place := self.place) is not None:
            if why := file_sinks.obstacle(place):
                raise plan.error(plan.top, "checkpoint", f"{why}; name a directory of this pipeline alone")
        if sink.mode and sink.mode not in (STREAM_MODES if self.is_stream else BATCH_MODES):
            kind = "a stream" if self.is_stream else "no stream"
            raise plan.error(sink, "mode", f"view {sink.view} is {kind}, which has no mode {sink.mode}")
        if sink.format == "nsq" and sink.mode not in ("", _APPEND):
            raise plan.error(sink, "mode", f"a topic can only be appended to: it has no mode {sink.mode}")
        with self._told(sink, "format"):
            if sink.format == "nsq":
                from flintmq.spark.sink import check_columns

                check_columns(SinkOptions.parse(sink.options), self.frame.schema)
            elif sink.format.lower() == _MEMORY:
                why = "it is gone with the session, and goes on from no checkpoint"
                said = f"{_MEMORY} is no sink of a pipeline: {why}; write files, or see rows with run --dry-run"
                raise plan.error(sink, "format", said)
            else:
                self._check_format()
                self._check_directory()
            if self.is_stream:
                check_streaming(self.frame, sink.mode or _APPEND)

    def _check_format(self) -> None:
        """Have Spark find a format, and for files have it prepare to write: it looks at options and types then."""
        sink, session = self.sink, self._spark._jsparkSession
        gateway: Any = self._spark.sparkContext._gateway
        jvm, new = gateway.jvm, gateway.new_array
        sql = jvm.org.apache.spark.sql.execution.datasources
        nothing = new(jvm.java.lang.Class, 0), new(jvm.java.lang.Object, 0)

        def made(kind: Any) -> Any:
            return kind.getDeclaredConstructor(nothing[0]).newInstance(nothing[1])

        kind = sql.DataSource.lookupDataSource(sink.format, session.sessionState().conf())
        if jvm.java.lang.Class.forName(_FILES).isAssignableFrom(kind):
            if self.is_stream and sink.mode not in ("", _APPEND):
                raise self._plan.error(sink, "mode", f"a stream can only append to files: it has no mode {sink.mode}")
            path = next((value for name, value in sink.options.items() if name.lower() == "path"), None)
            if path is None:
                raise self._plan.error(sink, "options", f"format {sink.format} needs the option path")
            given = jvm.org.apache.spark.api.python.PythonUtils.toScalaMap(dict(sink.options))
            files, job = made(made(kind).fallbackFileFormat()), jvm.org.apache.hadoop.mapreduce.Job.getInstance()
            files.prepareWrite(session, job, given, self.frame._jdf.schema())
            self.directory = file_sinks.directory_of(self._spark, path)

    @property
    def path_key(self) -> str:
        """The option ``path`` of the sink, as errors name it."""
        return next((f"options.{name}" for name in self.sink.options if name.lower() == "path"), "options")

    def _check_directory(self) -> None:
        """See that Spark would write every row to a directory, and read it there.

        Raises:
            PlanError: it would leave some out, or could not write there.
        """
        if not self.directory:
            return
        if why := self._obstacle():
            raise self._plan.error(self.sink, self.path_key, f"{why}: name another directory")
        if self.sink.mode == _NEW and not self.is_stream and file_sinks.is_there(self._spark, self.directory):
            raise self._plan.error(self.sink, "mode", f"{self.directory} already exists, and the mode is {_NEW}")
        with self._told(self.sink, self.path_key):
            said = self._said_of_directory()
        if said:
            # Spark's log in a new directory has to begin with the first micro-batch
            more = "" if self.begins or not self.is_stream else " and another checkpoint"
            raise self._plan.error(self.sink, self.path_key, f"{said}: name another directory{more}")

    def _obstacle(self) -> str:
        """Return why nothing can be written to the directory, as far as it is local or mounted; "": it can."""
        local = file_sinks.local_directory(self.directory)
        if local is None or (not self._changes_files and os.path.exists(local)):  # Spark leaves that as it is
            return ""
        # what overwrites replaces a file as well
        return file_sinks.obstacle(local.parent if self.sink.mode == OVERWRITE and os.path.isfile(local) else local)

    def _said_of_directory(self) -> str:
        """Return why rows would be lost in the directory; "": none would."""
        spark, alone = self._spark, f"Spark reads the files alone that {file_sinks.METADATA} lists"
        if not self.is_stream:
            is_refused = self._changes_files and file_sinks.has_metadata(spark, self.directory)
            return f"a stream has written there, and {alone}" if is_refused else ""
        if name := file_sinks.unlisted(spark, self.directory):
            if name == file_sinks.UNDER_WAY:
                return f"it has {name}: a batch writes there, or was killed while it did, then remove that"
            return f"it has {name}, which no stream has written; once a stream has written there, {alone}"
        last = file_sinks.foreign_batch(spark, self.directory, self.location)
        ours = "Spark would leave out ours"
        return f"it has micro-batches up to {last} of another query or checkpoint; {ours}" if last >= 0 else ""

    @property
    def _changes_files(self) -> bool:
        """Whether a batch writes to a directory that is there."""
        return self.sink.mode in ("", _APPEND, OVERWRITE)

    @property
    def replaces_directory(self) -> bool:
        """Whether a batch removes all that is in a directory of files, and not the partitions alone that it writes."""
        if not self.directory or self.is_stream or self.sink.mode != OVERWRITE:
            return False
        given = {name.lower(): value for name, value in self.sink.options.items()}
        default = self._spark.conf.get(f"spark.sql.sources.{_PARTITIONS}")
        return str(given.get(_PARTITIONS.lower(), default)).lower() != "dynamic"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other runs from the directory of files, and look into it again, now that nobody else writes there.

        Raises:
            PlanError: one writes there, or has since the sink was checked.
        """
        with ExitStack() as around:
            if self.directory and (self.is_stream or self._changes_files):
                hold = file_sinks.sink_held if self.is_stream else file_sinks.batch_held
                try:
                    around.enter_context(hold(self.directory))
                except file_sinks.SinkError as error:
                    raise self._plan.error(self.sink, self.path_key, str(error)) from error
                self._check_directory()
            yield

    def start(self) -> StreamingQuery:
        """Start the query of a stream."""
        sink = self.sink
        if self.place is not None:
            forget_unfinished(self.place)
        with self._told(sink, "format"):
            query: StreamingQuery = (
                self.frame.writeStream.format(sink.format)
                .options(**sink.options)
                .outputMode(sink.mode or _APPEND)
                .option("checkpointLocation", self.location)
                .queryName(f"{self._plan.name}.{sink.name}")
                .trigger(**self._plan.trigger)  # type: ignore[call-overload]
                .start()
            )
        return query

    def failed(self, error: JobFailed) -> JobFailed:
        """Say where in the file the sink stands whose query failed."""
        return JobFailed(str(self._plan.error(self.sink, "", f"sink {self.sink.name}: {error.reason}")))

    def write(self, done: Ran) -> None:
        """Write a view that is no stream."""
        sink = self.sink
        with self.held(), self._told(sink, "format"):
            self.frame.write.format(sink.format).options(**sink.options).mode(sink.mode or _APPEND).save()
        self.count(self._observed(), done)

    def show(self) -> Iterator[str]:
        """Yield what the sink would get of the rows that are read, and how many break a rule."""
        with self._told(self.sink, "from"):
            rows = self.frame.toArrow()
        done = Ran()
        self.count(self._observed(), done)
        yield f"{self.sink.name} ({self.sink.format}) would get {rows.num_rows} rows:"
        for row in plain_rows(rows.slice(0, SHOWN_ROWS)):
            text = str(row)
            yield f"  {text[:SHOWN_WIDTH]}{'...' if len(text) > SHOWN_WIDTH else ''}"
        yield from _broken(done)

    def count(self, metrics: Mapping[str, Any], done: Ran) -> None:
        """Add what Spark has observed."""
        written = metrics.get(_ROWS, {}).get("n") or 0
        done.written[self.sink.name] = done.written.get(self.sink.name, 0) + written
        for name, rule in self._names.items():
            if name in metrics:
                key = (self.sink.name, rule.name)
                done.broken[key] = done.broken.get(key, 0) + (metrics[name].get("n") or 0)

    def _observed(self) -> dict[str, Any]:
        """Return what was observed by an action, of those rules that its rows went through."""
        text = str(self._analyzed().toString())
        found = {name: each for name, each in self._observations.items() if f"CollectMetrics {name}," in text}
        return {name: self._figures(name, each) for name, each in found.items()}

    def _figures(self, name: str, observation: Any) -> dict[str, Any]:
        """Return what an action that has succeeded observed; empty, for 0 rows, where Spark did not have to look.

        It leaves out what it knows to be empty, and with it the observation, for which ``get`` then fails. What was
        written is written: that Spark does not tell its figures is no failure either, after which it would be written
        once more.
        """
        from py4j.protocol import Py4JJavaError

        concurrent: Any = self._spark.sparkContext._jvm.scala.concurrent  # type: ignore[union-attr]
        java = observation._jo
        try:
            concurrent.Await.ready(java.future(), concurrent.duration.Duration.create(OBSERVED_WITHIN_S, "s"))
            return observation.get if java.getRow().length() else {}
        except Py4JJavaError as error:
            what = f"rule {self._names[name].name!r}" if name in self._names else "how many rows it got"
            log.warning("sink %s: Spark does not tell of %s: %s", self.sink.name, what, reason(error))
            return {}

    def _analyzed(self) -> Any:
        return self.frame._jdf.queryExecution().analyzed()

    def _told(self, part: Part, key: str) -> AbstractContextManager[None]:
        return _told_at(self._plan, part, key)


@contextmanager
def _told_at(plan: Plan, part: Part, key: str) -> Iterator[None]:
    """Tell what Spark or our own options refuse with the line of the file.

    Raises:
        PlanError: of that.
    """
    try:
        with spark_failures():
            yield
    except (JobFailed, OptionError) as error:
        raise plan.error(part, key, str(error)) from error


def _read(spark: SparkSession, source: Source, rows: int, stop: threading.Event) -> DataFrame:
    """Read a source.

    Args:
        rows: so many, at once, from the beginning; 0: as the file says.
    """
    options = dict(source.options)
    if rows and source.stream:
        late = {name for name in options if name.lower() in _OF_STREAMS}
        options = {name: value for name, value in options.items() if name not in late}
    ends = ""
    if rows and source.format == "nsq" and not any(name.lower().startswith("ending") for name in options):
        ends = _first(options, rows, stop)
        options |= {"endingOffsets": ends} if ends else {}
    reader: Any = spark.readStream if source.stream and not rows else spark.read
    reader = reader.format(source.format).options(**options)
    if source.schema and source.format != "nsq":
        reader = reader.schema(source.schema)
    frame: DataFrame = reader.load()
    if source.schema and source.format == "nsq":
        frame = frame.withColumn(JSON_COLUMN, _json_of(frame, source.schema))
    if source.watermark and not rows:
        frame = frame.withWatermark(*source.watermark)
    return frame.limit(rows) if rows and not ends else frame


def _json_of(frame: DataFrame, schema: str) -> Column:
    """Return the JSON of bodies as a struct; one that is not one value alone is in ``_corrupt_record`` as it is.

    Spark's ``from_json`` stops behind the first value. An object whose first brace that closes is the last sign of the
    body is all of it. Any other is looked at twice more, without its fields: braces around the body end at its own
    where something follows it that has one more, and brackets where it has one of these: who gets by both is one value.
    """
    from pyspark.sql import functions
    from pyspark.sql.types import StructType

    text = frame["body"].cast("string")
    kinds: Any = StructType.fromDDL(schema)
    given = [name for name in kinds.names if name.lower() == CORRUPT]
    corrupt = given[0] if given else CORRUPT
    how = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": corrupt}
    whole = schema if given else f"{schema}, {CORRUPT} string"
    found = functions.from_json(text, whole, how)
    shown = functions.make_valid_utf8(text)  # else nobody but Spark could read the column
    lost = functions.from_json(functions.lit("{}"), whole, how).withField(corrupt, shown)
    length = functions.length(functions.rtrim(text, functions.lit(" \n\r\t")))
    is_flat = (length > 0) & (functions.instr(text, "}") == length)
    braces = functions.concat(functions.lit('{"b":'), text, functions.lit("}"))
    brackets = functions.concat(functions.lit("["), text, functions.lit("]"))
    in_braces = functions.from_json(braces, f"b {_FIELDLESS}, {corrupt} string", how)
    in_brackets = functions.from_json(brackets, f"array<{_FIELDLESS}>")
    is_one = is_flat | (in_braces[corrupt].isNull() & (functions.size(in_brackets) == 1))
    return functions.when(functions.coalesce(is_one, functions.lit(False)), found).otherwise(lost)


def _check_schema(spark: SparkSession, source: Source) -> None:
    """See that no two fields of a struct have one name: Spark takes that, and its sinks write what nobody can read.

    Raises:
        JobFailed: it is no schema, or two have.
    """
    from pyspark.sql.types import StructType

    if not source.schema:
        return
    kind: Any = StructType.fromDDL(source.schema)
    if not isinstance(kind, StructType) or not kind.fields:
        raise JobFailed(f"schema is a list of fields, such as 'id bigint, name string', and not {source.schema!r}")
    tells_case = spark.conf.get("spark.sql.caseSensitive") == "true"
    for names in names_of_structs(kind):
        seen: set[str] = set()
        for name in names:
            plain = name if tells_case else name.lower()
            if plain in seen:
                raise JobFailed(f"schema has two fields {name}: Spark would tell them apart by nothing")
            seen.add(plain)


def _first(options: Mapping[str, str], rows: int, stop: threading.Event) -> str:
    """Return ``endingOffsets`` behind so many messages; empty where nsqd has no offsets, which the reader tells.

    A limit would do as well, but Spark then closes its connection to a worker that still writes, which says so on
    stderr.
    """
    parsed = replace(SourceOptions.parse(options), channel="")
    if parsed.mode not in (AUTO, OFFSET):
        return ""
    try:
        survey, starts = _starts(parsed, stop)
    except NotByOffset:
        return ""
    ends: dict[PartitionKey, int] = {}
    for key, start in sorted(starts.items()):
        entry = survey.logs[key]
        begin = min(max(start, entry.start), entry.end)
        ends[key] = min(entry.end, begin + rows)
        rows -= ends[key] - begin
    return json.dumps(to_json(ends))


def _starts(options: SourceOptions, stop: threading.Event) -> tuple[Survey, Offsets]:
    """Return what there is, and where reading would start; ``cursor`` is not asked for, which would make the channel.

    Raises:
        StoppedEarly: the job is to stop, and an nsqd was waited for.
        NotByOffset: nsqd has no offsets.
        OptionError: the options name a start that is not there.
        DataLost: what they name is gone.
    """
    start = EARLIEST if options.starting_offsets == CURSOR else options.starting_offsets
    with awaiting(stop) as stopping:
        surveyor = Surveyor(options, sleep=stopping.pause, pool=stopping.pool)
        survey = surveyor.look(timestamp_ns=options.starting_timestamp, is_waiting=True)
        check_channel(options, survey)
        return survey, StartingPoints(replace(options, channel="", starting_offsets=start), surveyor).find(survey)


def _function(plan: Plan, step: Step) -> Callable[[SparkSession, dict[str, DataFrame]], DataFrame]:
    """Return the function of a step, which is given the session and the views so far; what it raises is told as ours.

    Raises:
        PlanError: there is none.
    """
    file, _, name = step.python.rpartition(":")
    path = plan.path.parent / file
    if not path.is_file():
        raise plan.error(step, "python", f"there is no file {path}")
    digest = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()
    spec = importlib.util.spec_from_file_location(f"flintmq_step_{path.stem}_{digest[:8]}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)

    def call(spark: SparkSession, views: dict[str, DataFrame]) -> DataFrame:
        from pyspark import cloudpickle
        from pyspark.sql import DataFrame

        sys.modules[module.__name__] = module  # dataclasses look there for what their annotations name
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]  # a worker cannot import it
        try:
            spec.loader.exec_module(module)  # type: ignore[union-attr]
            made = getattr(module, name)(spark, views)
        except (Exception, SystemExit) as error:  # a pipeline that has written nothing has not succeeded
            raise plan.error(step, "python", f"{step.python}{_said_of(error, spec.origin)}") from error
        if not isinstance(made, DataFrame):
            raise plan.error(step, "python", f"{step.python} returned {made!r}; it has to return a DataFrame")
        return made

    return call


def _said_of(error: BaseException, file: str | None) -> str:
    """Return what a step raised, to be told behind the step, with the line of its file where that was."""
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    place = f", line {lines[-1]}" if lines else ""
    if isinstance(error, SystemExit):
        code = "" if error.code is None else repr(error.code)[:SHOWN_WIDTH]
        return f"{place} called sys.exit({code})"
    said = f": {one_line(str(error))}" if str(error).strip() else ""
    return f"{place}: {type(error).__name__}{said}"


def _checked(plan: Plan, spark: SparkSession, stop: threading.Event = _NEVER) -> list[_Build]:
    """Build what each sink gets, and see that it can be run.

    Raises:
        PlanError: it cannot.
        FlintError: an nsqd does not answer.
    """
    _check_channels(plan)
    _check_queries(plan, spark)
    builds = [_Build(plan, spark, sink, stop=stop) for sink in plan.sinks]
    readers: dict[str, list[_Build]] = {}
    for build in builds:
        build.check()
        for source, keeps_topic in build.sources():
            readers.setdefault(source.name, []).append(build)
            _check_published(plan, build, source, keeps_topic)
    _check_directories(plan, builds)
    for source in plan.sources:
        if source.format != "nsq":
            continue
        options, fed = SourceOptions.parse(source.options), readers.get(source.name, [])
        if source.stream and options.channel and len(fed) > 1:
            names = " and ".join(dict.fromkeys(build.sink.name for build in fed))
            reason = (
                f"channel {options.channel} holds messages for one reader alone, and source {source.name} is read "
                f"{len(fed)} times, for {names}: write a [[source]] for each, with {_own(options)}"
            )
            raise plan.error(source, "options", reason)
        with _told_of(plan, source):
            if source.stream:
                _check_stream(options, any(build.begins for build in fed), stop)
            else:
                NsqReader(options).plan()
    return builds


def _check_queries(plan: Plan, spark: SparkSession) -> None:
    """See, before any step has run, that the SQL of none is a statement that Spark would run at once.

    What is no SQL, or has a variable, may become a query by what a function before it sets: its turn comes.

    Raises:
        PlanError: one is.
    """
    from pyspark.errors import AnalysisException

    for step in plan.steps:
        if step.sql and _VARIABLE not in step.sql:
            with suppress(AnalysisException), without_stacks_of_sql():
                _check_query(plan, spark, step)


def _check_query(plan: Plan, spark: SparkSession, step: Step) -> None:
    """See that the SQL of a step is a query, as settings and variables are now.

    Raises:
        PlanError: it is a statement of another kind.
        PySparkException: it is no SQL.
    """
    if not _is_query(spark, step.sql):
        what = f"the sql of step {step.name} is a statement, which Spark runs at once, also in a check"
        do = "write a query, such as SELECT; a [[sink]] writes, and settings stand in [spark.conf]"
        raise plan.error(step, "sql", f"{what}: {do}")


def _is_query(spark: SparkSession, text: str) -> bool:
    """Return whether text is a query, as Spark's own parser has it; runs nothing.

    Raises:
        PySparkException: it is no SQL.
    """
    from pyspark.errors import ParseException

    parser: Any = spark._jsparkSession.sessionState().sqlParser()
    nodes = [parser.parsePlan(text)]
    try:
        parser.parseQuery(text)
    except ParseException as error:
        # the text is one statement, so behind a query there is nothing but the semicolons that end one
        return (error.getMessageParameters() or {}).get("error") == "';'"
    for node in nodes:  # a release of Spark whose parseQuery looks at no end takes FROM t INSERT INTO u ... for FROM t
        if node.getClass().getSimpleName().startswith("InsertInto"):
            return False
        children = node.children()
        nodes.extend(children.apply(number) for number in range(children.size()))
    return True


@contextmanager
def _told_of(plan: Plan, source: Source) -> Iterator[None]:
    """Tell what is wrong with the options of a source with the line of the file.

    Raises:
        PlanError: of that.
    """
    try:
        yield
    except (OptionError, DataLost, NotByOffset) as error:
        raise plan.error(source, "options", str(error)) from error


def _check_published(plan: Plan, build: _Build, source: Source, keeps_topic: bool) -> None:
    """See that a sink does not publish to what a source of it reads.

    Raises:
        PlanError: it does.
    """
    sink = build.sink
    decides = any(name.lower() == "topic" for name in sink.options)
    if sink.format == "nsq" and (decides or keeps_topic):
        target = Target(sink.options, "name another topic, or another nsqd")
        try:
            check_targets(SourceOptions.parse(source.options), [target])
        except UsageError as error:
            raise plan.error(sink, "options", f"sink {sink.name}, from source {source.name}: {error}") from error


def _check_channels(plan: Plan) -> None:
    """See that no two sources have a channel together.

    Raises:
        PlanError: some have; what the quicker one has read would be missing where the slower one is.
    """
    before: list[tuple[Source, SourceOptions]] = []
    for source in plan.sources:
        if source.format != "nsq" or not source.stream:
            continue
        with _told_of(plan, source):
            options = SourceOptions.parse(source.options)
        for other, theirs in before:
            if options.channel and theirs.channel == options.channel and (topics := shared_topics(options, theirs)):
                reason = (
                    f"channel {options.channel} of topic {topics[0]} holds messages for one reader alone, and source "
                    f"{other.name} has it: give each {_own(options)}"
                )
                raise plan.error(source, "options", reason)
        before.append((source, options))


def _check_directories(plan: Plan, builds: Sequence[_Build]) -> None:
    """See that a stream has the directory of its files for itself, and that no sink removes what another one writes.

    Raises:
        PlanError: another sink has it; of two streams each would leave out micro-batches, as they have one number. Or a
            batch overwrites a directory that has a stream's in it, or that of a batch that was written before it.
    """
    before: dict[str, _Build] = {}
    for build in builds:
        if not build.directory:
            continue
        other = before.setdefault(build.directory, build)
        if other is not build and (build.is_stream or other.is_stream):
            reason = f"sink {other.sink.name} writes to this directory: Spark would leave out rows, name another one"
            raise plan.error(build.sink, build.path_key, reason)
    for number, build in enumerate(builds):
        if not build.replaces_directory:
            continue
        for place, other in enumerate(builds):
            is_within = f"{other.directory}/".startswith(f"{build.directory}/") and other is not build
            if other.directory and is_within and (other.is_stream or place < number):
                reason = f"sink {other.sink.name} writes to {other.directory}, which mode {OVERWRITE} would remove"
                raise plan.error(build.sink, build.path_key, f"{reason}: name another directory")


def _own(options: SourceOptions) -> str:
    return "a channel and a spoolLocation of its own" if options.spool_location else "a channel of its own"


def _check_stream(options: SourceOptions, begins: bool, stop: threading.Event) -> None:
    """See that a stream can be read as its options say.

    Args:
        begins: it has no checkpoint that says where it starts, and how.

    Raises:
        OptionError, DataLost, NotByOffset: it cannot.
    """
    options.check_stream()
    if not begins or options.mode not in (AUTO, OFFSET):
        return
    try:
        _starts(options, stop)
    except NotByOffset:
        if options.mode == OFFSET:
            raise
        options.check_spooled(SPOOL)


def _shown(plan: Plan, spark: SparkSession, rows: int, stop: threading.Event = _NEVER) -> Iterator[str]:
    """Yield what each sink would get of some rows of each source."""
    _check_queries(plan, spark)
    for sink in plan.sinks:
        yield from _Build(plan, spark, sink, rows, stop).show()


def _check(plan: Plan, runner: Runner, master: str = "") -> Iterator[str]:
    """Yield what is there, and what each sink would get."""
    session = _session_of(plan, master)
    _await_topics(plan, runner)
    for source in plan.sources:
        if source.format == "nsq":
            yield from _topics(plan, source, runner.stop)
    with runner.session(plan.name, session) as spark:
        for build in _checked(plan, spark, runner.stop):
            sink = build.sink
            columns = ", ".join(f"{name} {kind}" for name, kind in build.frame.dtypes)
            if build.is_stream:
                how = f"a stream that {'begins in' if build.begins else 'goes on from'} {build.location}"
            else:
                how = "written as a whole"
            yield f"sink {sink.name} ({sink.format}): {how}, mode {sink.mode or 'append'}"
            yield f"  {sink.view}: {columns}"
        for rule in plan.rules:
            yield f"rule {rule.name!r} of {rule.of}: {rule.kind} {rule.condition}"


def _await_topics(plan: Plan, runner: Runner, wait_s: float = 0, *, is_dry: bool = False) -> None:
    """Return when each topic that is named is somewhere, or was read before by a stream that goes on.

    Args:
        is_dry: everything is read as what is no stream.

    Raises:
        NsqdError: a topic is nowhere.
        StoppedEarly: the job is to stop, and one has not come.
        PlanError: options of a source are wrong.
    """
    known: set[str] = set()
    for sink in plan.sinks:
        with suppress(FlintError):  # it begins, or Spark tells what is wrong with its checkpoint
            checkpoint = file_sinks.local_name(plan.checkpoint)
            committed = committed_offsets(Path(checkpoint, sink.name)) if checkpoint else {}
            known |= {key.topic for logs in committed.values() for key in logs}
    for source in plan.sources:
        if source.format != "nsq":
            continue
        try:
            goes_on = known if source.stream and not is_dry else ()
            await_topics(source.options, wait_s, runner.stop, known=goes_on)
        except OptionError as error:
            raise plan.error(source, "options", str(error)) from error
        except NsqdError as error:
            if error.code != TOPIC_NOT_EXIST:
                raise
            raise NsqdError(error.code, str(plan.error(source, "options", error.detail))) from error


def _topics(plan: Plan, source: Source, stop: threading.Event) -> Iterator[str]:
    try:
        options = SourceOptions.parse(source.options)
        with awaiting(stop) as stopping:
            survey = Surveyor(options, sleep=stopping.pause, pool=stopping.pool).look(is_waiting=True)
    except OptionError as error:
        raise plan.error(source, "options", str(error)) from error
    except NotByOffset as error:
        if not source.stream:
            return  # what is planned next says that it cannot be read
        if options.mode == OFFSET:
            raise plan.error(source, "options", str(error)) from error
        yield f"source {source.name}: nsqd {error.nsqd} has no offsets; its topics are read through a spool"
        return
    for key, entry in sorted(survey.logs.items()):
        count = max(0, entry.end - max(entry.start, 0))
        yield f"source {source.name}: {key.topic} partition {key.partition} at {entry.nsqd}: {count} messages stored"
    if not survey.logs:
        yield f"source {source.name}: none of its topics is there now"


def _broken(done: Ran) -> Iterator[str]:
    for (sink, rule), count in done.broken.items():
        yield f"rule {rule!r}: broken by {count} rows on the way to {sink}"


def check(arguments: Sequence[str]) -> int:
    """Run ``flintmq pipeline check``."""
    return run_command(CheckOptions, _named(arguments), _check_command)


def run(arguments: Sequence[str]) -> int:
    """Run ``flintmq pipeline run``; a signal ends it behind the micro-batches that are done."""
    return run_command(RunOptions, _named(arguments), _run_command)


def _named(arguments: Sequence[str]) -> Sequence[str]:
    if arguments and not arguments[0].startswith("-"):
        return [f"--plan={arguments[0]}", *arguments[1:]]
    return arguments


def _plan_of(options: PlanFlags) -> Plan:
    if not options.plan:
        raise UsageError(f"give the file of the pipeline: {options.program} x.toml")
    return read_plan(Path(options.plan))


def _check_command(options: CheckOptions, runner: Runner) -> None:
    for line in _check(_plan_of(options), runner, options.master):
        runner.say(line)


def _run_command(options: RunOptions, runner: Runner) -> None:
    plan = _plan_of(options)
    if options.dry_run:
        session = _session_of(plan, options.master)
        _await_topics(plan, runner, options.wait_for_topic_ns / SECOND, is_dry=True)
        with runner.session(plan.name, session) as spark:
            for line in _shown(plan, spark, options.rows, runner.stop):
                runner.say(line)
        return
    done = _run_plan(plan, runner, options.wait_for_topic_ns / SECOND, options.master)
    for name, count in done.written.items():
        runner.say(f"{name}: {count} rows")
    for line in _broken(done):
        runner.say(line)


__all__ = ["CheckOptions", "Ran", "RunOptions", "check", "check_plan", "run", "run_plan"]
