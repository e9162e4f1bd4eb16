"""The shared parts of the jobs: flags, progress, errors of Spark as one line."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import ClassVar

import pytest

from flintmq.clock import SystemClock
from flintmq.errors import UsageError
from flintmq.options import help_text, resolve, rows
from flintmq.pipeline.archive import Archived, ArchiveOptions
from flintmq.pipeline.options import LinkFlags, SinkFlags, SourceFlags, StreamFlags, Work, pairs
from flintmq.pipeline.runner import Shown, one_line


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
