"""Runs the jobs of ``flintmq pipeline``: signals, progress, the session and its queries, errors.

A job is a function that is given its options and a :class:`Runner`. It tells the runner how far it is, looks now and
then whether it is to stop, and has the runner start Spark and wait for queries.

The rules of this file: Ctrl-C and SIGTERM end a job with what it has done, the second one as if this were not there; a
failure of Spark's is told as one line, as all others are; a session that was handed in is left as it is.
"""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from flintmq.clock import Clock, SystemClock
from flintmq.errors import UNREADABLE_JSON, FlintError
from flintmq.options import SECOND, read_command, version_line
from flintmq.pipeline.options import JobOptions, SparkFlags, Work
from flintmq.version import __version__

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOLD_EVERY_S = 0.5
LOOKED_EVERY_S = 0.2
_LINES_MAX = 4

# how our errors, and others of Python, stand in what Spark makes of them
_PYTHON_ERROR = re.compile(
    r"^(?:\[\w+(?:\.\w+)*\] )?(?:flintmq\.[\w.]+?|[\w.]+(?:Error|Exception)): (.+)", re.MULTILINE
)
_OF_QUERY = re.compile(r"terminated with exception: (.+?)(?: SQLSTATE: \w+)?$", re.MULTILINE)
_OUR_ERROR = re.compile(r"^flintmq\.[\w.]+: (.+)", re.MULTILINE)

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


class Runner:
    """The world around a job: whom it tells, who stops it, where Spark is.

    Args:
        on_progress: called now and then with how far the job is.
        stop: set when the job is to end with what it has done.
        spark: a session to use; None: one is started, and stopped in the end.
    """

    def __init__(
        self,
        on_progress: Callable[[Any], None] | None = None,
        stop: threading.Event | None = None,
        spark: SparkSession | None = None,
    ) -> None:
        self.stop = stop or threading.Event()
        self._on_progress = on_progress
        self._spark = spark
        self._after_start: Callable[[], None] = lambda: None
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
            JobFailed: Spark ended what was done within.
            SetupError: this machine lacks something Spark needs.
        """
        from flintmq.spark.session import session

        spark = self._spark
        if spark is None:
            conf = {"spark.log.level": "ERROR", **options.settings()}
            spark = session(app, options.master, options.jvm, **conf)
            self._after_start()
        if work is not None:
            work.ui = spark.sparkContext.uiWebUrl or ""
            self.tell(work)
        try:
            with spark_failures():
                yield spark
        finally:
            if self._spark is None:
                spark.stop()

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
                active = [query for query in queries if query.isActive]
                if active and not self.stop.is_set():
                    with spark_failures():
                        active[0].awaitTermination(LOOKED_EVERY_S)
                for query in queries:
                    self._look(query, work, seen, lags, on_batch, query.id not in uncounted)
                self.tell(work)
                for query in queries:
                    if not query.isActive and (failure := query.exception()) is not None:
                        raise JobFailed(one_line(str(failure)))
                if not active or self.stop.is_set():
                    return
        finally:
            for query in queries:
                if query.isActive:
                    query.stop()

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
            if is_counted:
                work.rows += progress["numInputRows"]
                work.batch = max(work.batch, progress["batchId"])
            lags[query.id] = sum(_lag(source.get("latestOffset")) for source in progress["sources"])
            work.lag = sum(lags.values())
            if on_batch is not None:
                on_batch(progress)


def _lag(latest: object) -> int:
    """Return the messages behind that ``latestOffset`` of a source of format nsq says."""
    try:
        found = json.loads(latest) if isinstance(latest, str) else latest
        logs = [each for topic in found.get("_lag", {}).values() for each in topic.values()]  # type: ignore[union-attr]
        return sum(int(each["messages"]) for each in logs)
    except (*UNREADABLE_JSON, AttributeError, KeyError, TypeError):
        return 0  # the offsets of another source


class Shown:
    """Progress on stderr: a bar, or lines of JSON, at most twice a second."""

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
            if self._kind == "bar":
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
        if work.ui != self._ui:
            self._ui = work.ui
            print(f"\rSpark: {work.ui}", file=sys.stderr)
        more = "".join(f"  {number:,} {name}" for name, number in work.figures().items())
        eta = "-" if eta_s is None else f"{eta_s:.0f} s"
        line = f"{work.rows:,} rows{more}  {rate:,.0f}/s  lag {work.lag:,}  batch {work.batch}  ETA {eta}"
        self._width = max(self._width, len(line))
        print(f"\r{line:<{self._width}}", end="", file=sys.stderr, flush=True)


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
    with stopped_by_signals() as (stop, again):
        runner = Runner(shown, stop)
        runner._after_start, runner._before_words = again, shown.finish
        try:
            return job(options, runner) or 0
        finally:
            shown.finish()


@contextmanager
def stopped_by_signals() -> Iterator[tuple[threading.Event, Callable[[], None]]]:
    """Set an event at Ctrl-C and SIGTERM; the second one is as if there were none.

    The function beside the event takes the signals again, which Spark takes when it starts.
    """
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def end(number: int, frame: object) -> None:
        stop.set()
        signal.signal(number, before[signal.Signals(number)])

    def take() -> None:
        if not stop.is_set():
            for number in before:
                signal.signal(number, end)

    take()
    try:
        yield stop, take
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    except (PySparkException, Py4JError) as error:
        raise JobFailed(one_line(str(error))) from error


def one_line(text: str) -> str:
    """Return the line that says most of what Spark reports: that of our own error, else of Python's, else the first."""
    for pattern in (_OUR_ERROR, _PYTHON_ERROR, _OF_QUERY):
        if found := pattern.findall(text):
            return str(found[-1]).strip()
    return next((line.strip() for line in text.splitlines() if line.strip()), "Spark failed and does not say why")


__all__ = ["JobFailed", "Runner", "Shown", "one_line", "run_command", "spark_failures", "stopped_by_signals"]
