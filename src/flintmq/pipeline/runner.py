"""Runs the jobs of ``flintmq pipeline``: signals, progress, the session and its queries, errors.

A job is a function that is given its options and a :class:`Runner`. It tells the runner how far it is, looks now and
then whether it is to stop, and has the runner start Spark and wait for queries.

The rules of this file: Ctrl-C and SIGTERM end a job with what it has done, the second one as if this were not there; a
failure of Spark's is told as one line, as all others are; a session that was handed in is left as it is, and may be
another thread's.

Signals often come to a whole process group, as from a terminal or timeout(1). A JVM that was started here outlives
them, until this process has ended its queries and closed the JVM's stdin. timeout(1) signals its child first and the
group then, so what comes again within a second is the same signal.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from flintmq.clock import Clock, SystemClock
from flintmq.errors import UNREADABLE_JSON, FlintError
from flintmq.options import SECOND, read_command, version_line
from flintmq.pipeline.options import JobOptions, SparkFlags, Work
from flintmq.pipeline.signals import stopped_by_signals
from flintmq.spark.stopping import Stopped, Stopping
from flintmq.version import __version__

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TOLD_EVERY_S = 0.5
LOOKED_EVERY_S = 0.2
BATCH_PATIENCE_S = 5.0
LOG_LEVEL = "spark.log.level"
QUIET = "FATAL"  # at ERROR Spark logs what a job fails with several times, with stacks, before the job can say it
_DUMB = "dumb"
_LINES_MAX = 4
_STARTS = "Initializing"  # how the status of a query begins while it starts its sources
_OF_PY4J = tuple(os.path.join("py4j", name) for name in ("java_gateway.py", "clientserver.py"))
_TELL_OF_SQL = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")  # loggers of PySpark

# how our errors, and others of Python, stand in what Spark makes of them
_PYTHON_ERROR = re.compile(
    r"^(?:\[\w+(?:\.\w+)*\] )?(?:flintmq\.[\w.]+?|[\w.]+(?:Error|Exception)): (.+)", re.MULTILINE
)
_OF_QUERY = re.compile(r"terminated with exception: (.+?)(?: SQLSTATE: \w+)?$", re.MULTILINE)
_OUR_ERROR = re.compile(r"^flintmq\.[\w.]+: (.+)", re.MULTILINE)
# what only says that something within it failed; and the exceptions of a Java stack, those within others last
_SAYS_LITTLE = re.compile(
    r"An error occurred while calling |Job aborted|Exception thrown in |\[(TASK_WRITE|STREAM)_FAILED\]"
)
_OF_JAVA = re.compile(r"^(?:: |Caused by: )(.+)", re.MULTILINE)
_CLASSES = re.compile(r"(?:[\w$]+\.)+[\w$]+(?:: |$)")
_CONDITION = re.compile(r"\[[A-Z][A-Z0-9_.]+\] ")  # as Spark names what a user can do something about
_URL = re.compile(r"\b\w+:/[^\s,]*[^\s,.;]")
_GONE = "Spark's JVM has ended before the job did"

Table = TypeVar("Table", bound=JobOptions)

log = logging.getLogger("flintmq.pipeline")


class JobFailed(FlintError):
    """Spark ended a job.

    Args:
        reason: Spark's words, in one line.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class StoppedEarly(FlintError):
    """A job was told to stop before it had begun anything.

    Args:
        reason: what it waited for.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"stopped {self.reason}; nothing was begun"


@contextmanager
def awaiting(stop: threading.Event) -> Iterator[Stopping]:
    """Ask nsqds for a job that has begun nothing yet, in a ``with`` block: nobody is waited for when it is to stop.

    Raises:
        StoppedEarly: ``stop`` was set, and something was waited for.
    """
    try:
        with Stopping(stop) as stopping:
            yield stopping
    except Stopped as error:
        raise StoppedEarly(f"while it waited for {error.awaited}") from error


class Runner:
    """The world around a job: whom it tells, who stops it, where Spark is.

    Args:
        on_progress: called now and then with how far the job is.
        stop: set when the job is to end with what it has done.
        spark: a session to use; None: one is started, and stopped in the end.

    Attributes:
        batches_done: micro-batches that queries have done while they were followed.
    """

    def __init__(
        self,
        on_progress: Callable[[Any], None] | None = None,
        stop: threading.Event | None = None,
        spark: SparkSession | None = None,
    ) -> None:
        self.stop = stop or threading.Event()
        self.batches_done = 0
        self._on_progress = on_progress
        self._spark = spark
        self._clock: Clock = SystemClock()
        self._after_start: Callable[[], None] | None = None
        self._before_words: Callable[[], None] = lambda: None

    def tell(self, work: Work) -> None:
        """Say how far the job is."""
        if self._on_progress is not None:
            self._on_progress(work)

    def say(self, text: str) -> None:
        """Print a line of the result on stdout, below the progress."""
        self._before_words()
        print(text, flush=True)

    @contextmanager
    def session(self, app: str, options: SparkFlags, work: Work | None = None) -> Iterator[SparkSession]:
        """Start Spark, or take the session that was handed in.

        Args:
            work: told the address of Spark's page.

        Raises:
            JobFailed: Spark does not start, or ended what was done within.
            SetupError: this machine lacks something Spark needs.
        """
        from flintmq.spark.session import activated, given_to_spark_submit, require_pyspark, session

        spark = self._spark
        is_quiet = False
        if spark is None:
            conf = options.settings()
            if is_quiet := LOG_LEVEL not in conf and LOG_LEVEL not in given_to_spark_submit():
                conf[LOG_LEVEL] = QUIET
            require_pyspark()
            try:
                with _shielded(takes_signals=self._after_start is None), spark_failures():
                    spark = session(app, options.master, options.jvm, **conf)
            except JobFailed as error:
                remote = "" if options.master.startswith("local") else "; does it run, and is this its address?"
                why = f"{error.reason.rstrip('.')}{remote}"
                raise JobFailed(f"Spark does not start with master {options.master}: {why}") from error
            if self._after_start is not None:
                self._after_start()
        if work is not None:
            work.ui = spark.sparkContext.uiWebUrl or ""
            self.tell(work)
        try:
            with ExitStack() as around:
                around.enter_context(spark_failures())
                if self._spark is not None:
                    around.enter_context(activated(spark))
                if is_quiet:
                    around.enter_context(without_stacks_of_sql())
                yield spark
        finally:
            if self._spark is None:
                try:
                    with spark_failures():
                        spark.stop()
                except JobFailed as error:
                    log.debug("there is nothing left to stop: %s", error)

    def follow(
        self,
        queries: Sequence[Any],
        work: Work,
        on_batch: Callable[[Mapping[str, Any]], None] | None = None,
        beside: Sequence[Any] = (),
    ) -> None:
        """Wait for the end of streaming queries, and tell how far they are; end them when the job is to stop.

        Args:
            queries: as ``start()`` returns them.
            on_batch: given the progress of each micro-batch, as Spark writes it.
            beside: those of ``queries`` that read once more what others read: their rows are not counted.

        Raises:
            JobFailed: one of them failed; the others are ended.
        """
        seen: dict[str, int] = {}
        lags: dict[str, int] = {}
        uncounted = {query.id for query in beside}
        try:
            while True:
                active, is_last = [query for query in queries if query.isActive], self.stop.is_set()
                if active and not is_last:
                    try:
                        with spark_failures():
                            active[0].awaitTermination(LOOKED_EVERY_S)
                    except JobFailed:
                        if not self.stop.is_set():
                            raise
                elif active:
                    self._await_batches(active)
                for query in queries:
                    self._look(query, work, seen, lags, on_batch, query.id not in uncounted)
                self.tell(work)
                for query in queries:
                    # what fails when the job is to stop lacks a process of Spark's that has had the signal, too
                    if not self.stop.is_set() and not query.isActive and (failure := query.exception()) is not None:
                        raise JobFailed(reason(failure))
                if not active or is_last:
                    return
        finally:
            for query in queries:
                if query.isActive:
                    query.stop()

    def _await_batches(self, queries: Sequence[Any]) -> None:
        """Wait until queries have ended their micro-batch, those that start the first one, for at most 5 s.

        A query that is stopped before takes away the socket by which the Python process of its source is about to
        connect, or to be asked, and that process tells of it in stacks.
        """
        until_ns = self._clock.monotonic_ns() + round(BATCH_PATIENCE_S * SECOND)
        for query in queries:
            with suppress(JobFailed), spark_failures():
                last = _last_batch(query)
                while query.isActive and _last_batch(query) == last and self._clock.monotonic_ns() < until_ns:
                    status = query.status
                    is_starting = last < 0 and status["message"].startswith(_STARTS)
                    if not status["isTriggerActive"] and not is_starting:
                        break
                    query.awaitTermination(LOOKED_EVERY_S)

    def _look(
        self,
        query: Any,
        work: Work,
        seen: dict[str, int],
        lags: dict[str, int],
        on_batch: Callable[[Mapping[str, Any]], None] | None,
        is_counted: bool,
    ) -> None:
        for each in query.recentProgress:
            progress = json.loads(each.json)
            if progress["batchId"] <= seen.get(query.id, -1):
                continue
            if not progress["numInputRows"] and "addBatch" not in progress["durationMs"]:
                continue  # nothing was new, and the number is that of the next one
            seen[query.id] = progress["batchId"]
            self.batches_done += 1
            if is_counted:
                work.rows += progress["numInputRows"]
                work.batch = max(work.batch, progress["batchId"])
            lags[query.id] = sum(_lag(source.get("latestOffset")) for source in progress["sources"])
            work.lag = sum(lags.values())
            if on_batch is not None:
                on_batch(progress)


def _last_batch(query: Any) -> int:
    """Return the number of the last micro-batch of which a query tells; -1: of none."""
    recent = query.recentProgress
    return int(json.loads(recent[-1].json)["batchId"]) if recent else -1


def _lag(latest: object) -> int:
    """Return the messages behind that ``latestOffset`` of a source of format nsq says."""
    try:
        found = json.loads(latest) if isinstance(latest, str) else latest
        logs = [each for topic in found.get("_lag", {}).values() for each in topic.values()]  # type: ignore[union-attr]
        return sum(int(each["messages"]) for each in logs)
    except (*UNREADABLE_JSON, AttributeError, KeyError, TypeError):
        return 0  # the offsets of another source


class Shown:
    """Progress on stderr: a bar as wide as the terminal at most, or lines of JSON, at most twice a second.

    A terminal that cannot go back in its line (``TERM=dumb``) gets lines.
    """

    def __init__(self, kind: str, clock: Clock | None = None) -> None:
        if kind == "auto":
            kind = "bar" if sys.stderr.isatty() else "none"
        self._kind = kind
        self._clock = clock or SystemClock()
        self._started_s = self._last_s = self._clock.monotonic_ns() / SECOND
        self._ui = ""
        self._width = 78
        self._last: Work | None = None
        self._is_finished = False

    def __call__(self, work: Work) -> None:
        """Show it, if it is time."""
        self._last = work
        now_s = self._clock.monotonic_ns() / SECOND
        is_new_ui = work.ui != self._ui
        if self._kind != "none" and (is_new_ui or now_s - self._last_s >= TOLD_EVERY_S):
            self._show(work, now_s)

    def finish(self) -> None:
        """Show how it ended; once."""
        if self._is_finished:
            return
        self._is_finished = True
        if self._kind != "none" and self._last is not None:
            self._show(self._last, self._clock.monotonic_ns() / SECOND)
            if self._kind == "bar" and os.environ.get("TERM") != _DUMB:
                print(file=sys.stderr, flush=True)

    def _show(self, work: Work, now_s: float) -> None:
        self._last_s = now_s
        rate = work.rows / max(now_s - self._started_s, 1e-3)
        eta_s = work.lag / rate if rate and work.lag else None
        if self._kind == "json":
            row: dict[str, Any] = {"rows": work.rows, **work.figures(), "lag": work.lag, "batch": work.batch}
            row |= {"rows_per_s": round(rate), "eta_s": None if eta_s is None else round(eta_s)}
            print(json.dumps(row | ({"spark_ui": work.ui} if work.ui else {})), file=sys.stderr, flush=True)
            self._ui = work.ui
            return
        is_dumb = os.environ.get("TERM") == _DUMB
        if work.ui != self._ui:
            self._ui = work.ui
            print(f"Spark: {work.ui}" if is_dumb else f"\rSpark: {work.ui}", file=sys.stderr)
        more = "".join(f"  {number:,} {name}" for name, number in work.figures().items())
        eta = "-" if eta_s is None else f"{eta_s:.0f} s"
        line = f"{work.rows:,} rows{more}  {rate:,.0f}/s  lag {work.lag:,}  batch {work.batch}  ETA {eta}"
        if is_dumb:
            print(line, file=sys.stderr, flush=True)
            return
        self._width = max(self._width, len(line))
        columns = _columns()
        width = min(self._width, columns - 1) if columns else self._width  # after the last column some begin a line
        print(f"\r{line[:width]:<{width}}", end="", file=sys.stderr, flush=True)


def _columns() -> int:
    """Return how wide the terminal of stderr is; 0: there is none, or it does not say."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:
        return 0


def run_command(table: type[Table], arguments: Sequence[str], job: Callable[[Table, Runner], int | None]) -> int:
    """Run a job as a command; return its exit code, 0 unless the job says another.

    Raises:
        UsageError: the command line is wrong.
        FlintError: the job failed.
    """
    options = read_command(table, arguments, table.program, version_line("flintmq", __version__))
    if options is None:
        return 0
    shown = Shown(options.progress)
    with stopped_by_signals() as signals, _without_stacks_of_py4j():
        runner = Runner(shown, signals.stop)
        runner._after_start, runner._before_words = signals.take, shown.finish
        try:
            return job(options, runner) or 0
        except StoppedEarly as early:  # no failure, but no result either
            print(f"{table.program}: {early}", file=sys.stderr)
            return 0
        finally:
            shown.finish()


@contextmanager
def _without_stacks_of_py4j() -> Iterator[None]:
    """Leave out what py4j logs, in the root logger and in one of its own, of each connection that ends with a JVM, and
    of each call from there that fails: we say that in a line.
    """

    def keep(record: logging.LogRecord) -> bool:
        return not record.pathname.endswith(_OF_PY4J)

    with _filtered([logging.getLogger(), logging.getLogger("py4j.clientserver")], keep):
        yield


@contextmanager
def without_stacks_of_sql() -> Iterator[None]:
    """Leave out what PySpark logs of an error in SQL before it raises it: a line of JSON with the stack of Java."""
    from pyspark.logger import PySparkLogger

    # made here in PySpark's way: a logger of that name of another class would not take what PySpark calls it with
    with _filtered([PySparkLogger.getLogger(name) for name in _TELL_OF_SQL], lambda _: False):
        yield


@contextmanager
def _filtered(loggers: Sequence[logging.Logger], keep: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    for each in loggers:
        each.addFilter(keep)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(keep)


_starts = threading.local()  # whether a thread starts a JVM now


def _spare_jvm() -> None:
    """Ignore SIGTERM in a process that becomes a JVM, as pyspark does with SIGINT: what is ignored, a JVM leaves so."""
    if getattr(_starts, "now", False):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_spare_jvm)


@contextmanager
def _shielded(*, takes_signals: bool) -> Iterator[None]:
    """Start a JVM that SIGTERM does not end.

    Args:
        takes_signals: pyspark may take SIGINT, for which it raises KeyboardInterrupt wherever it is.
    """
    from pyspark.core import context

    ours: Any = context
    before = ours.signal
    if not takes_signals:
        ours.signal = SimpleNamespace(SIGINT=signal.SIGINT, signal=lambda *_: None)
    _starts.now = True
    try:
        yield
    finally:
        _starts.now = False
        ours.signal = before


@contextmanager
def spark_failures() -> Iterator[None]:
    """Turn what Spark raises into :class:`JobFailed`.

    Raises:
        JobFailed: with the line that says most.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError, ConnectionError) as error:
        if _is_without_jvm(error):
            raise JobFailed(_GONE) from error
        if isinstance(error, ConnectionError):
            raise
        raise JobFailed(reason(error)) from error


def check_streaming(frame: DataFrame, mode: str = "append") -> None:
    """See that Spark can run the query of a stream, which it looks at when one is started, and not before.

    Args:
        mode: the output mode: append, update or complete.

    Raises:
        JobFailed: it cannot.
    """
    of_java: Any = frame
    jvm: Any = frame.sparkSession.sparkContext._jvm
    with spark_failures():
        output = getattr(jvm.org.apache.spark.sql.streaming.OutputMode, mode.capitalize())()
        checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
        checker.checkForStreaming(of_java._jdf.queryExecution().analyzed(), output)


def _is_without_jvm(error: BaseException) -> bool:
    """Tell whether an error came about because nobody answers any more."""
    from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
    from pyspark import SparkContext

    if isinstance(error, Py4JNetworkError):
        return True
    if isinstance(error, ConnectionError):
        frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        return any(name.startswith("py4j.") for name in frames)
    process = getattr(SparkContext._gateway, "proc", None)
    has_ended = process is not None and process.poll() is not None
    return isinstance(error, Py4JError) and not isinstance(error, Py4JJavaError) and has_ended


def reason(error: BaseException) -> str:
    """Return the line that says most of an exception of Spark's, with those within it."""
    stacks: list[str] = []
    within: Any = error
    while within is not None:
        if stack := getattr(within, "_stackTrace", None):
            stacks.append(f"Caused by: {stack}")
        within = getattr(within, "_cause", None)
    return one_line(str(error), "\n".join(stacks))


def one_line(text: str, stack: str = "") -> str:
    """Return the line that says most of what Spark reports: that of our own error, else of Python's, else the first.

    Where that says little it is the cause that Java names.

    Args:
        stack: of Java, where ``text`` has none.
    """
    for pattern in (_OUR_ERROR, _PYTHON_ERROR, _OF_QUERY):
        if found := pattern.findall(text):
            said = str(found[-1]).strip()
            break
    else:
        said = next((line.strip() for line in text.splitlines() if line.strip()), "Spark failed and does not say why")
    return (_cause(f"{text}\n{stack}") or said) if _SAYS_LITTLE.match(said) else said


def _cause(text: str) -> str:
    """Return the cause that a stack of Java's names, with the place that one around it names; empty: it names none."""
    whole = [_without_classes(each.strip()) for each in _OF_JAVA.findall(text)]
    useful = [each for each in whole if each and not _SAYS_LITTLE.match(each)]
    if not useful:
        return ""
    said = next((each for each in useful if _CONDITION.match(each)), useful[-1])
    place = next((found[0] for each in whole if (found := _URL.search(each))), "")
    return said if "/" in said or not place or _CONDITION.match(said) else f"{said} ({place})"


def _without_classes(text: str) -> str:
    while found := _CLASSES.match(text):
        text = text[found.end() :]
    return text


__all__ = [
    "JobFailed",
    "Runner",
    "Shown",
    "StoppedEarly",
    "awaiting",
    "check_streaming",
    "one_line",
    "reason",
    "run_command",
    "spark_failures",
]
