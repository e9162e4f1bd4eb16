"""The shared parts of the jobs: flags, progress, errors of Spark as one line."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from pyspark.errors import PySparkException
from tests.integration.daemons import SPARK_PATIENCE_S

from flintmq import cli
from flintmq.clock import SystemClock
from flintmq.errors import UsageError
from flintmq.options import help_text, resolve, rows
from flintmq.pipeline import runner
from flintmq.pipeline.archive import Archived, ArchiveOptions
from flintmq.pipeline.options import LinkFlags, SinkFlags, SourceFlags, SparkFlags, StreamFlags, Work, pairs
from flintmq.pipeline.runner import JobFailed, Runner, Shown, one_line, spark_failures


@dataclass(frozen=True, kw_only=True)
class Flags(SourceFlags, SinkFlags, StreamFlags):
    """The flags of a job that has all parts."""

    program: ClassVar[str] = "flintmq pipeline all"
    summary: ClassVar[str] = "flintmq pipeline all has all parts."


def test_flags_become_options_of_the_source():
    flags = resolve(
        Flags,
        ["--topic=a", "--topic=b", "--nsqd=h:1", "--channel=c", "--tls", "--tls-ca-file=/ca.pem", "--auth-secret=env:S",
         '--source-option=startingOffsets={"a":{"0":1,"1":2}}'],
        {},
    ).options  # fmt: skip
    assert flags.source(columns="body") == {
        "nsqd": "h:1",
        "topics": "a,b",
        "channel": "c",
        "tls": "true",
        "tlsCaFile": "/ca.pem",
        "authSecret": "env:S",
        "startingOffsets": '{"a":{"0":1,"1":2}}',
        "columns": "body",
    }
    here = {"nsqd": "h:1", "tls": "true", "tlsCaFile": "/ca.pem", "authSecret": "env:S"}
    assert flags.replace(to_topic="t").sink(flags) == {**here, "topic": "t"}
    elsewhere = flags.replace(to_lookupd=("l:1",), to_option=("oversize=drop",))
    assert elsewhere.sink(flags) == {"lookupd": "l:1", "oversize": "drop"}, "secrets of one cluster are not another's"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "give --topic"),
        ({"topic": ("t",)}, "give either --nsqd or --lookupd"),
        ({"topic": ("t",), "nsqd": ("a:1",), "lookupd": ("b:1",)}, "give either --nsqd or --lookupd"),
        ({"topic": ("t",), "nsqd": ("a:1",), "source_option": ("x",)}, "--source-option x is not NAME=VALUE"),
    ],
)
def test_wrong_sources(given, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        SourceFlags(**given).source()


def test_other_wrong_flags():
    with pytest.raises(UsageError, match="give either --to-nsqd or --to-lookupd"):
        SinkFlags(to_nsqd=("a:1",), to_lookupd=("b:1",)).sink(LinkFlags())
    with pytest.raises(UsageError, match="give --checkpoint"):
        StreamFlags().trigger()
    with pytest.raises(UsageError, match=r"names of Spark settings begin with spark\."):
        StreamFlags(conf=("master=x",)).settings()
    with pytest.raises(UsageError, match="is given twice, and differs"):
        pairs("--conf", ["spark.x=1", "spark.x=2"])
    assert StreamFlags(checkpoint="c", follow=True).trigger() == {"processingTime": "5000 milliseconds"}
    assert StreamFlags(checkpoint="c").trigger() == {"availableNow": True}


def test_an_option_that_a_flag_hands_on_is_of_the_command_line(tmp_path, capsys):
    """Whoever refuses it: exit code 2, as for the flags themselves."""
    here = ["--topic=t", "--nsqd=127.0.0.1:1"]
    out = [f"--to={tmp_path}/out", f"--checkpoint={tmp_path}/c"]
    end = "--source-option=endingTimestamp=2020-01-01"
    no_end = "endingTimestamp='1577836800000 ms since 1970' is not allowed; a job goes on where it was, and has no end"
    for words, said in (
        (["replay", "--path=x", "--to-topic=t", here[1], "--write-id=a b"], "writeId='a b' is not allowed"),
        (["rollup", *here, *out, "--source-option=maxMessagesPerTrigger=-1"], "maxMessagesPerTrigger='-1' is not all"),
        (["rollup", *here, *out, end], no_end),
        (["mirror", *here, out[1], "--prefix=copy-", end], no_end),
        (["tail", *here, "--source-option=retrys=3"], "unknown option retrys; did you mean retries?"),
    ):
        assert cli.main(["pipeline", *words]) == 2, words
        assert said in capsys.readouterr().err, words
    assert not list(tmp_path.iterdir())


def test_a_job_shows_its_own_flags_first():
    groups = list(dict.fromkeys(row.group for row in rows(ArchiveOptions)))
    assert groups == ["What to archive", "How", "Where nsqd is", "TLS and secrets", "How it is told"]
    assert "FLINTMQ_PIPELINE_ARCHIVE_<NAME>" in help_text(ArchiveOptions)


class Later(SystemClock):
    """Time passes between any two looks."""

    now_ns = 0

    def monotonic_ns(self) -> int:
        self.now_ns += 2_000_000_000
        return self.now_ns


def test_progress_as_lines_of_json(capsys):
    shown = Shown("json", Later())
    shown(Archived(rows=10, files=2, bytes=30, lag=90, batch=1, ui="http://127.0.0.1:4040"))
    shown.finish()
    shown.finish()
    first, last = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first == {
        "rows": 10,
        "files": 2,
        "bytes": 30,
        "lag": 90,
        "batch": 1,
        "rows_per_s": 5,
        "eta_s": 18,
        "spark_ui": "http://127.0.0.1:4040",
    }
    assert last["rows"] == 10 and last["rows_per_s"] < first["rows_per_s"]


def test_progress_as_a_bar(capsys):
    shown = Shown("bar", Later())
    shown(Work(rows=1000, lag=4000, batch=3, more={"bad": 7}, ui="http://127.0.0.1:4040"))
    shown.finish()
    told = capsys.readouterr().err
    assert "Spark: http://127.0.0.1:4040\n" in told
    assert "\r1,000 rows  7 bad  500/s  lag 4,000  batch 3  ETA 8 s" in told
    assert told.endswith("\n")


@pytest.mark.parametrize(("columns", "bar"), [(200, 78), (40, 39), (5, 4), (1, 0), (0, 78)])
def test_a_bar_is_no_wider_than_its_terminal(capsys, monkeypatch, columns: int, bar: int):
    """What is wider goes to the next line, and the next look cannot take it away."""
    monkeypatch.setattr("sys.stderr.fileno", lambda: 2, raising=False)
    monkeypatch.setattr("os.get_terminal_size", lambda _: os.terminal_size((columns, 10)))
    monkeypatch.setenv("TERM", "xterm")
    shown = Shown("bar", Later())
    for count in (1000, 2000):
        shown(Work(rows=count, lag=4000, batch=3, more={"bad": 7}))
    shown.finish()
    told = capsys.readouterr().err
    lines = told.removesuffix("\n").split("\r")[1:]
    assert told.endswith("\n") and {len(line) for line in lines} == {bar} and len(lines) == 3
    assert lines[0].startswith("1,000 rows"[:bar])


def test_a_terminal_that_cannot_go_back_gets_lines(capsys, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    shown = Shown("bar", Later())
    shown(Work(rows=1000, lag=4000, batch=3, ui="http://127.0.0.1:4040"))
    shown.finish()
    told = capsys.readouterr().err
    assert "\r" not in told and told.endswith("\n")
    first, *more = told.splitlines()
    assert first == "Spark: http://127.0.0.1:4040"
    assert [line.partition(" rows")[0] for line in more] == ["1,000", "1,000"]


def test_quiet_where_nobody_looks(capsys):
    shown = Shown("auto", Later())
    shown(Work(rows=1))
    shown.finish()
    assert capsys.readouterr().err == ""


def test_errors_of_spark_in_one_line():
    told = """[STREAM_FAILED] Query [id = 1] terminated with exception: Job aborted
Traceback (most recent call last):
  File "x.py", line 3, in write
flintmq.errors.PublishRefused: E_BAD_MESSAGE a row has an empty body, which nsqd refuses; filter it out

\tat org.apache.spark"""
    assert one_line(told) == "E_BAD_MESSAGE a row has an empty body, which nsqd refuses; filter it out"
    assert one_line("Traceback\nValueError: no such thing\n") == "no such thing"
    assert one_line("\n[UNRESOLVED_COLUMN] A column `x` cannot be resolved\n at line 1") == (
        "[UNRESOLVED_COLUMN] A column `x` cannot be resolved"
    )


FULL = """[STREAM_FAILED] Query [id = 1] terminated with exception: [FOREACH_BATCH_USER_FUNCTION_ERROR] An error
Traceback (most recent call last):
  File "x.py", line 3, in __call__
py4j.protocol.Py4JJavaError: An error occurred while calling o1570.parquet.
: org.apache.spark.SparkException: [TASK_WRITE_FAILED] Task failed while writing rows to file:/data/o. SQLSTATE: 58030
\tat org.apache.spark.sql.errors.QueryExecutionErrors$.taskFailedWhileWritingRowsError(X.scala:789)
Caused by: org.apache.parquet.util.AutoCloseables$ParquetCloseResourceException: Unable to close resource
\t... 9 more
Caused by: org.apache.hadoop.fs.FSError: java.io.IOException: No space left on device
\tSuppressed: java.io.IOException: another one
\tCaused by: java.io.IOException: of that
Caused by: java.io.IOException: No space left on device
\tat java.base/java.io.FileOutputStream.writeBytes(Native Method)
"""
NO_FORMAT = """An error occurred while calling o70.start.
: org.apache.spark.SparkClassNotFoundException: [DATA_SOURCE_NOT_FOUND] Failed to find the data source: parqet.
\tat org.apache.spark
Caused by: java.lang.ClassNotFoundException: parqet.DefaultSource
"""
NO_DIRECTORY = """An error occurred while calling o52.parquet.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 0.0 failed 1 times, most recent

Driver stacktrace:
Caused by: java.io.IOException: Mkdirs failed to create file:/proc/nope/x (exists=false, cwd=file:/tmp)
"""
STACK = """Caused by: org.apache.spark.sql.streaming.StreamingQueryException: [TASK_WRITE_FAILED] to file:/data/o. SQL
Caused by: org.apache.hadoop.fs.FSError: java.io.IOException: No space left on device
"""


@pytest.mark.parametrize(
    ("told", "stack", "said"),
    [
        (FULL, "", "No space left on device (file:/data/o)"),
        (NO_FORMAT, "", "[DATA_SOURCE_NOT_FOUND] Failed to find the data source: parqet."),
        (NO_DIRECTORY, "", "Mkdirs failed to create file:/proc/nope/x (exists=false, cwd=file:/tmp)"),
        ("[STREAM_FAILED] Query [id = 1] terminated with exception: Job aborted. SQLSTATE: XXKST", STACK,
         "No space left on device (file:/data/o)"),
        ("An error occurred while calling o1.save.\n", "", "An error occurred while calling o1.save."),
        ("[NO_SUCH] nothing", STACK, "[NO_SUCH] nothing"),
    ],
)  # fmt: skip
def test_what_java_says_in_one_line(told, stack, said):
    assert one_line(told, stack) == said


def test_spark_is_quiet_unless_it_is_told_to_speak_and_says_why_it_does_not_start(monkeypatch):
    """The module is needed by its full name: the package has a function of that name."""
    module = importlib.import_module("flintmq.spark.session")
    started: list[dict[str, str]] = []

    def start(app: str, master: str, jvm: str, **conf: str) -> None:
        started.append(conf)
        raise PySparkException("Cannot call methods on a stopped SparkContext.")

    monkeypatch.setattr(module, "session", start)
    given: dict[str, str] = {}
    monkeypatch.setattr(module, "given_to_spark_submit", lambda: given)
    for conf, to_submit, level in (
        ((), {}, "FATAL"),
        (("spark.log.level=WARN",), {}, "WARN"),
        ((), {"spark.log.level": "INFO"}, None),
    ):
        given.update(to_submit)
        said = (
            r"^Spark does not start with master spark://h:1: Cannot call .* SparkContext; does it run, and is this its"
        )
        with pytest.raises(JobFailed, match=said), Runner().session("x", SparkFlags(master="spark://h:1", conf=conf)):
            pass
        assert started[-1].get("spark.log.level") == level


@pytest.mark.spark
def test_a_format_that_nobody_knows(spark, tmp_path):
    said = r"^\[DATA_SOURCE_NOT_FOUND\] Failed to find the data source: parqet"
    with pytest.raises(JobFailed, match=said), spark_failures():
        spark.read.format("parqet").load(str(tmp_path))


def test_a_jvm_that_starts_is_spared_sigterm_and_ctrl_c_stays_ours():
    context: Any = importlib.import_module("pyspark.core.context")
    ask = [sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGTERM).name)"]

    def started() -> str:  # as pyspark starts one
        return subprocess.run(ask, preexec_fn=lambda: None, stdout=subprocess.PIPE, text=True, check=True).stdout

    before = signal.getsignal(signal.SIGINT)
    try:
        with runner._shielded(takes_signals=False):
            assert started() == "SIG_IGN\n"
            context.signal.signal(context.signal.SIGINT, lambda *_: None)  # as a SparkContext does when it is made
            assert signal.getsignal(signal.SIGINT) is before
        assert started() == "SIG_DFL\n", "only a JVM"
        with runner._shielded(takes_signals=True):
            context.signal.signal(context.signal.SIGINT, signal.SIG_IGN)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert context.signal is signal


SIGNALS = """
import os, signal, sys
from flintmq.clock import SystemClock
from flintmq.pipeline.signals import stopped_by_signals

class Stands(SystemClock):
    now_ns = 0

    def monotonic_ns(self):
        return self.now_ns

clock, number = Stands(), getattr(signal, sys.argv[1])
with stopped_by_signals(clock) as signals:
    for _ in range(3):
        os.kill(os.getpid(), number)
    signals.take()
    os.kill(os.getpid(), number)
    print("stopped", signals.stop.is_set(), flush=True)
    clock.now_ns = 1_500_000_000
    os.kill(os.getpid(), number)
    print("goes on", flush=True)
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", -signal.SIGTERM), ("SIGINT", -signal.SIGINT)])
def test_a_signal_that_comes_twice_at_once_is_one(name: str, code: int):
    """As timeout(1) sends it to its child, and to the child's group."""
    done = subprocess.run(
        [sys.executable, "-c", SIGNALS, name], capture_output=True, text=True, timeout=SPARK_PATIENCE_S
    )
    assert (done.returncode, done.stdout) == (code, "stopped True\n"), done.stderr


class Starting:
    """A query that is asked to end while it starts; each look finds it further."""

    def __init__(self, *steps: tuple[str, bool, int]) -> None:
        self.id, self.isActive, self.steps, self.seen = "id", True, list(steps), 0

    @property
    def status(self) -> dict[str, Any]:
        return {"message": self.steps[0][0], "isTriggerActive": self.steps[0][1]}

    @property
    def recentProgress(self) -> list[Any]:
        made = {"batchId": 0, "numInputRows": 1, "durationMs": {}, "sources": []}
        return [SimpleNamespace(json=json.dumps(made))] * self.steps[0][2]

    def awaitTermination(self, _: float) -> bool:
        self.seen += 1
        self.steps = self.steps[1:] or self.steps
        return False

    def stop(self) -> None:
        self.isActive = False


@pytest.mark.parametrize(
    ("steps", "looks"),
    [
        ([("Initializing sources", False, 0), ("Initializing StreamExecution", False, 0), ("Processing", True, 0),
          ("Processing", True, 1)], 3),
        ([("Initializing sources", False, 0), ("Waiting for data to arrive", False, 0)], 1),
        ([("Processing new data", True, 1), ("Waiting for next trigger", False, 1)], 1),
        ([("Waiting for next trigger", False, 1)], 0),
    ],
)  # fmt: skip
def test_a_query_is_ended_behind_its_micro_batch(steps: list[tuple[str, bool, int]], looks: int):
    runner, query, work = Runner(), Starting(*steps), Work()
    runner.stop.set()
    runner.follow([query], work)
    assert (query.isActive, query.seen) == (False, looks)
    assert work.rows == steps[-1][2], "what it has done is counted"


def test_a_job_that_is_stopped_while_its_query_starts_counts_the_first_micro_batch():
    """The signal comes amid a look."""
    runner, work = Runner(), Work()

    class Stopped(Starting):
        def awaitTermination(self, seconds: float) -> bool:
            runner.stop.set()
            return super().awaitTermination(seconds)

    query = Stopped(("Initializing sources", False, 0), ("Processing new data", True, 0), ("Processing", True, 1))
    runner.follow([query], work)
    assert (query.isActive, work.rows) == (False, 1)


@pytest.mark.parametrize("stopped", ["before", "meanwhile", "never"])
def test_what_fails_when_all_processes_have_the_signal_is_no_failure(stopped: str):
    """Spark's Python processes end by it as well, and a micro-batch with them: the next run repeats it."""
    runner, failure = Runner(), RuntimeError("Python worker exited unexpectedly")

    class Failing(Starting):
        def awaitTermination(self, seconds: float) -> bool:
            self.isActive = False
            if stopped == "meanwhile":
                runner.stop.set()
            return super().awaitTermination(seconds)

        def exception(self) -> Exception:
            return failure

    query = Failing(("Processing", True, 1))
    if stopped == "before":
        runner.stop.set()
    if stopped == "never":
        with pytest.raises(JobFailed, match="exited unexpectedly"):
            runner.follow([query], Work())
    else:
        runner.follow([query], Work())
    assert query.seen == 1


def test_a_query_that_does_not_start_is_ended_after_all():
    runner, query = Runner(), Starting(("Initializing sources", False, 0))
    runner._clock = Later()
    runner.stop.set()
    runner.follow([query], Work())
    assert (query.isActive, query.seen) == (False, 2)


def test_a_refused_connection_is_no_end_of_the_jvm_unless_py4j_says_so():
    with pytest.raises(ConnectionRefusedError), spark_failures():
        raise ConnectionRefusedError
    code = compile("def call():\n    raise ConnectionRefusedError", "clientserver.py", "exec")
    names: dict = {"__name__": "py4j.clientserver"}
    exec(code, names)  # a frame of that module
    with pytest.raises(JobFailed, match="Spark's JVM has ended"), spark_failures():
        names["call"]()
