"""Jobs that are queries: dedupe, rollup, mirror and tail in one Spark, against a real nsqd."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from datetime import datetime
from functools import reduce
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.integration.daemons import SPARK_PATIENCE_S
from tests.spark.fake_lookupd import FakeLookupd
from tests.spark.processes import NsqdProcess, environment, numbered
from tests.spark.test_sink_once import stored, task, write

from flintmq import cli
from flintmq.errors import FlintError, NsqdError, OptionError, UsageError
from flintmq.options import Options, resolve
from flintmq.pipeline import dedupe, mirror, rollup, streams, tail, topics
from flintmq.pipeline.archive import archive
from flintmq.pipeline.bodies import SchemaFlags, read_schema
from flintmq.pipeline.doctor import PROBLEM, checkpoint
from flintmq.pipeline.file_sinks import SinkError
from flintmq.pipeline.files import ArchiveError
from flintmq.pipeline.options import StreamFlags, Work
from flintmq.pipeline.runner import JobFailed, Runner
from flintmq.pipeline.topics import Target
from flintmq.spark.options import SourceOptions
from flintmq.spark.session_settings import PARQUET_TIMES

pytestmark = [pytest.mark.spark, pytest.mark.timeout(2 * SPARK_PATIENCE_S)]

Job = Callable[..., list[str]]


@pytest.fixture
def job(spark: Any, nsqd: NsqdProcess, capsys: pytest.CaptureFixture[str]) -> Job:
    """Runs a job on the tests' nsqd in the session of the tests; returns its lines."""

    def run(module: ModuleType, *words: str) -> list[str]:
        table: type[Options] = getattr(module, f"{module.__name__.rpartition('.')[2].capitalize()}Options")
        capsys.readouterr()
        module._run(resolve(table, [f"--nsqd={nsqd.address}", *words], {}).options, Runner(spark=spark))
        return capsys.readouterr().out.splitlines()

    return run


def rows(directory: Path) -> list[dict[str, Any]]:
    """The rows that a reader finds who knows nothing of us: those of every Parquet file."""
    return [row for path in directory.glob("**/*.parquet") for row in pq.ParquetFile(path).read().to_pylist()]


def test_dedupe_into_a_topic_and_again(job: Job, nsqd: NsqdProcess, topic: str, tmp_path: Path):
    nsqd.publish(topic, [b"%d" % (n % 50) for n in range(120)])
    flags = [f"--topic={topic}", f"--to-topic={topic}-out", f"--checkpoint={tmp_path / 'c'}", "--key=body", "--json"]
    plan = json.loads(job(dedupe, f"--topic={topic}", "--key=body", "--dry-run", "--json")[0])
    assert (plan["rows"], plan["repeated"]) == (120, 70)
    first = json.loads(job(dedupe, *flags)[0])
    assert (first["rows"], first["repeated"], first["lag"]) == (120, 70, 0)
    nsqd.publish(topic, [b"%d" % n for n in range(40, 60)])
    again = json.loads(job(dedupe, *flags)[0])
    assert (again["rows"], again["repeated"]) == (20, 10), "what was read before the restart is remembered"
    assert sorted(int(body) for _, body in stored(nsqd.address, f"{topic}-out")) == list(range(60))


def texts_of_keys(spark: Any, *expressions: str, zone: str = "UTC") -> list[bytes]:
    """What the state of a dedupe has for keys of one message."""
    rows = spark.sql("SELECT 't' AS topic, 0 AS partition, 'l' AS log_id, 7L AS offset, 8 AS _value")
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        keyed = [dedupe._keyed(rows, each) for each in expressions]
        texts = [
            frame.selectExpr(f"{number} AS number", f"cast({key} AS binary) AS text")
            for number, (key, frame) in enumerate(keyed)
        ]
        return [bytes(row.text) for row in sorted(reduce(lambda one, other: one.union(other), texts).collect())]
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


def test_a_key_without_parts_has_the_form_that_running_jobs_remember(spark: Any):
    known = {
        "1": b"k1",
        "_value": b"k8",
        "topic": b"kt",
        "1.50BD": b"k1.50",
        "-0.0D": b"k-0.0",
        "double('NaN')": b"kNaN",
        "true": b"ktrue",
        "date'2026-11-01'": b"k2026-11-01",
        "timestamp'2026-11-01 10:00:00.25'": b"k2026-11-01 10:00:00.25",
        "timestamp_ntz'2026-11-01 10:00:00'": b"k2026-11-01 10:00:00",
        "X'ff00'": b"k\xff\x00",
        "interval 1 day": b"kINTERVAL '1' DAY",
        "nullif(offset, 7)": b"p/t/0/l/7",
        "parse_json('1')": b"k1",
        'parse_json(\'{"b": [1, "2"]}\')': b'k{"b":[1,"2"]}',
        "parse_json('\"a\"')": b"ka",
        "parse_json('null')": b"p/t/0/l/7",
    }
    assert dict(zip(known, texts_of_keys(spark, *known), strict=True)) == known


def test_keys_differ_where_their_values_do(spark: Any):
    different = [
        ["struct('a, b' AS x, 'c' AS x)", "struct('a', 'b, c')", "struct('a\", \"b', 'c')", "struct('a', 'b\",\"c')"],
        ["struct(null, 'null')", "struct('null', null)", "struct('', null)", "struct(null, null)", "struct('-', null)"],
        [
            "array(null, 'null')",
            "array('null', null)",
            "array()",
            "array('')",
            "array('', '')",
            "cast(null AS array<int>)",
        ],
        ["array(array('a'), array())", "array(array(), array('a'))", "array(array('a'))", "array(array('a', null))"],
        [
            "struct(X'e222' AS a, X'' AS b)",
            "struct(X'e2' AS a, X'22' AS b)",
            "struct(X'e2', X'2222')",
            "struct(X'ff', X'')",
        ],
        ["struct(cast(X'ff' AS string))", "struct(cast(X'fe' AS string))", "struct('\ufffd')"],
        ["struct(1.0D)", "struct(2.0D)", "struct(double('NaN'))", "struct(double('Infinity'))", "struct(double(null))"],
        ["parse_json('1')", "parse_json('\"1\"')", "parse_json('[1]')", "parse_json('\"[1]\"')", "parse_json('true')"],
        ["struct(parse_json('1'))", "struct(parse_json('\"1\"'))", "struct(parse_json('null'))", "struct(null)"],
        ["struct()", "array(struct())", "cast(null AS struct<a: int>)"],
    ]
    equal = [
        ["struct(0.0D, float('NaN'))", "struct(-0.0D, float('NaN'))"],
        ["array(1, 2)", "filter(array(1, 2, 3), _each0 -> _each0 < 3)"],
        ["(topic, offset)", "struct(topic AS a, offset AS A)", "struct('t', 7L)"],
    ]
    tried = [expression for group in (*different, *equal) for expression in group]
    found = dict(zip(tried, texts_of_keys(spark, *tried), strict=True))
    for group in different:
        assert len({found[each] for each in group}) == len(group), [found[each] for each in group]
    for group in equal:
        assert len({found[each] for each in group}) == 1, [found[each] for each in group]


def test_a_time_is_the_same_key_in_every_zone_and_no_other_has_it(spark: Any):
    night = [f"timestamp_seconds({seconds})" for seconds in (1792888200, 1792891800)]
    assert len(set(texts_of_keys(spark, *night, zone="Europe/Oslo"))) == 2, "both are 02:30 there"
    nested = [form.format(each) for each in night for form in ("struct({})", "array({})")]
    found = {zone: texts_of_keys(spark, *nested, zone=zone) for zone in ("UTC", "Europe/Oslo")}
    assert found["UTC"] == found["Europe/Oslo"] and len(set(found["UTC"])) == 4
    # a run in another zone takes no text of the one before for its own
    assert not {*texts_of_keys(spark, *night)} & {*texts_of_keys(spark, *night, zone="Europe/London")}


def test_dedupe_by_a_struct_with_a_time(job: Job, spark: Any, nsqd: NsqdProcess, topic: str, tmp_path: Path):
    """In the hour that a night has twice."""
    made = [
        (("a, b", "c"), "2026-10-25T00:30:00Z"),
        (("a", "b, c"), "2026-10-25T00:30:00Z"),
        (("a", "b, c"), "2026-10-25T01:30:00Z"),
        ((None, "null"), "2026-10-25T01:30:00Z"),
        (("null", None), "2026-10-25T01:30:00Z"),
    ]
    bodies = [json.dumps({"who": dict(zip("ab", who, strict=True)), "at": at}).encode() for who, at in made]
    nsqd.publish(topic, [*bodies, *bodies])
    ddl = "--schema=who struct<a: string, b: string>, at timestamp"
    flags = [f"--topic={topic}", ddl, "--key=struct(who, at, who.a)", "--json"]
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Europe/Oslo")
    try:
        assert json.loads(job(dedupe, *flags, "--dry-run")[0])["repeated"] == 5
        flags += [f"--to={tmp_path / 'out'}", f"--checkpoint={tmp_path / 'c'}"]
        found = json.loads(job(dedupe, *flags)[0])
        nsqd.publish(topic, bodies)
        again = json.loads(job(dedupe, *flags)[0])
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    assert (found["rows"], found["repeated"]) == (10, 5)
    assert (again["rows"], again["repeated"]) == (5, 5)
    assert sorted(row["body"] for row in rows(tmp_path / "out")) == sorted(bodies)


@pytest.mark.parametrize("key", ["map(topic, 1)", "array(struct(map(1, offset)))"])
def test_a_map_is_no_key(job: Job, nsqd: NsqdProcess, topic: str, key: str):
    nsqd.publish(topic, [b"a"])
    with pytest.raises(UsageError, match=r"it is, or has in it, a map \(.*array_sort\(map_entries\(m\)\)"):
        job(dedupe, f"--topic={topic}", f"--key={key}", "--dry-run")


def test_a_key_that_is_none_leaves_the_checkpoint_to_the_next(job: Job, nsqd: NsqdProcess, topic: str, tmp_path: Path):
    nsqd.publish(topic, [b"a", b"a"])
    flags = [f"--topic={topic}", f"--to={tmp_path / 'out'}", f"--checkpoint={tmp_path / 'c'}"]
    with pytest.raises(OptionError, match="a job goes on where it was, and has no end"):
        job(dedupe, *flags, "--key=body", "--source-option=endingTimestamp=2020-01-01")
    for key in ("map('a', body)", "nothing_of_that_name"):
        with pytest.raises(FlintError, match="--key"):
            job(dedupe, *flags, f"--key={key}")
    assert job(dedupe, *flags, "--key=body") == ["2 messages read, 1 of them repeated"]


def ids(start: int, end: int) -> list[bytes]:
    return [b"%d" % n for n in range(start, end)]


def read_by_a_clock_that_is_ahead(monkeypatch: pytest.MonkeyPatch, run: Callable[[], list[str]]) -> list[str]:
    """Run a dedupe whose messages are read an hour from now."""
    with monkeypatch.context() as patched:
        patched.setattr(dedupe, "last_watermark_ms", lambda _: int((time.time() + 3000) * 1000))
        return run()


def test_dedupe_loses_nothing_by_a_clock_that_goes_back_between_runs(
    job: Job, nsqd: NsqdProcess, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):  # fmt: skip
    flags = [f"--topic={topic}", f"--to={tmp_path / 'out'}", f"--checkpoint={tmp_path / 'c'}", "--key=body"]
    nsqd.publish(topic, ids(0, 100))
    said = read_by_a_clock_that_is_ahead(monkeypatch, lambda: job(dedupe, *flags))
    assert said == ["100 messages read, 0 of them repeated"]
    for start in (50, 150, 250):
        nsqd.publish(topic, ids(start, start + 150))
        assert job(dedupe, *flags) == ["150 messages read, 50 of them repeated"]
    assert sorted(int(row["body"]) for row in rows(tmp_path / "out")) == list(range(400))
    assert re.search(r"the clock of this machine is 3\d\d\d s behind the one by which the checkpoint", caplog.text)


def test_dedupe_loses_nothing_by_a_checkpoint_that_is_ahead(job: Job, nsqd: NsqdProcess, topic: str, tmp_path: Path):
    """As one of a release that took the clock as it was."""
    flags = [f"--topic={topic}", f"--to={tmp_path / 'out'}", f"--checkpoint={tmp_path / 'c'}", "--key=body"]
    nsqd.publish(topic, ids(0, 100))
    job(dedupe, *flags)
    commits = tmp_path / "c" / "rows" / "commits"
    last = commits / str(max(int(path.name) for path in commits.iterdir() if path.name.isdecimal()))
    ahead = int((time.time() + 3000) * 1000)
    last.write_text(re.sub(r'(?<="nextBatchWatermarkMs":)\d+', str(ahead), last.read_text()))
    (commits / f".{last.name}.crc").unlink(missing_ok=True)
    assert streams.last_watermark_ms(tmp_path / "c") == ahead
    for start in (100, 150, 250):
        nsqd.publish(topic, ids(start, start + 150))
        assert job(dedupe, *flags)[0].startswith("150 messages read")
    assert sorted(int(row["body"]) for row in rows(tmp_path / "out")) == list(range(400))


def test_dedupe_loses_nothing_by_a_clock_that_goes_back_while_it_runs(
    job: Job, nsqd: NsqdProcess, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):  # fmt: skip
    flags = [f"--topic={topic}", f"--to-topic={topic}-out", f"--checkpoint={tmp_path / 'c'}", "--key=body"]
    nsqd.publish(topic, ids(0, 100))
    read_by_a_clock_that_is_ahead(monkeypatch, lambda: job(dedupe, *flags))
    nsqd.publish(topic, ids(100, 200))
    told = iter([0])  # the query has begun without knowing of the time that its checkpoint is ahead
    before = streams.last_watermark_ms
    monkeypatch.setattr(dedupe, "last_watermark_ms", lambda place: next(told, before(place)))
    assert job(dedupe, *flags) == ["100 messages read, 0 of them repeated"]
    assert "set back by more than twice --within; going on from the checkpoint" in caplog.text
    nsqd.publish(topic, ids(200, 300))
    job(dedupe, *flags)
    nsqd.publish(topic, ids(200, 300))
    assert job(dedupe, *flags) == ["100 messages read, 100 of them repeated"]
    assert sorted(int(body) for _, body in stored(nsqd.address, f"{topic}-out")) == list(range(300))


def test_messages_that_spark_drops_for_their_time_end_a_dedupe():
    made = {"batchId": 7, "timestamp": "2026-11-29T19:40:47.580Z", "eventTime": {}}
    times = dedupe._Times(600_000_000_000, 0)
    times.check({**made, "stateOperators": [{"numRowsDroppedByWatermark": 0}]})
    with pytest.raises(JobFailed, match="Spark has left out 3 messages of micro-batch 7 as too late"):
        times.check({**made, "stateOperators": [{"numRowsDroppedByWatermark": 3}]})


def test_dedupe_json_into_files_and_what_does_not_fit(job: Job, nsqd: NsqdProcess, topic: str, tmp_path: Path):
    good = [json.dumps({"id": n % 4, "name": f"n{n}", "at": {"x": 1.5}}).encode() for n in range(8)]
    nameless = [b'{"id": null, "name": "a"}', b'{"id": 99}']
    bad = {
        b"no json": "the body is no JSON object: no json",
        b"[1]": "the body is no JSON object: [1]",
        b"\xff\xfe": "the body is not UTF-8",
        b'{"id": 1, "name": "a", "colour": "red"}': "unknown fields: colour",
        b'{"id": "one", "name": "a"}': "field id is no bigint: one",
        b'{"id": 1, "name": "a", "at": 7}': "field at is no struct<x:double>: 7",
        nameless[1]: "field name is missing, or null",
    }
    nsqd.publish(topic, [*good, *bad, nameless[0], nameless[0]])
    ddl = tmp_path / "schema.ddl"
    ddl.write_text("id bigint, name string NOT NULL, at struct<x: double>\n")
    flags = [f"--topic={topic}", "--key=id", f"--schema={ddl}", "--json"]
    with pytest.raises(
        JobFailed, match=f"topic {topic}, partition 0, offset 9: the body is no JSON object.* --bad-rows"
    ):
        job(dedupe, *flags, f"--to={tmp_path / 'no'}", f"--checkpoint={tmp_path / 'no-c'}")
    flags += [f"--checkpoint={tmp_path / 'c'}", f"--to={tmp_path / 'out'}"]
    found = json.loads(job(dedupe, *flags, f"--bad-rows={tmp_path / 'bad'}")[0])
    assert (found["rows"], found["repeated"], found["bad"]) == (17, 4, 7)
    out = rows(tmp_path / "out")
    assert sorted((row["id"] is None, row["id"] or 0) for row in out) == [
        *((False, n) for n in range(4)),
        (True, 0),
        (True, 0),
    ]
    assert next(row["at"] for row in out if row["id"] == 2) == {"x": 1.5}
    assert {row["body"]: row["reason"] for row in rows(tmp_path / "bad")} == bad
    assert {(row["topic"], row["partition"]) for row in rows(tmp_path / "bad")} == {(topic, 0)}
    assert not list((tmp_path / "out" / ".staged").iterdir())
    assert all(path.parts[-3].startswith("dt=") for path in (tmp_path / "out").glob("**/*.parquet"))


def test_rollup_into_a_topic_with_bad_rows_in_another(job: Job, nsqd: NsqdProcess, topic: str, tmp_path: Path):
    def sale(second: int, country: str, price: float) -> bytes:
        return json.dumps({"at": f"2026-11-23T12:00:{second:02d}Z", "country": country, "price": price}).encode()

    nsqd.publish(topic, [sale(1, "no", 1), sale(2, "se", 2), sale(3, "no", 4), sale(11, "no", 8), b"{}", b"nothing"])
    flags = [
        f"--topic={topic}", "--schema=at timestamp NOT NULL, country string, price double", "--time=at", "--by=country",
        "--window=10s", "--late=0s", "--aggregate=count(*) AS sales", "--aggregate=sum(price) AS price",
    ]  # fmt: skip
    shown = [json.loads(line) for line in job(rollup, *flags, "--dry-run")]
    assert [(row["country"], row["sales"], row["price"]) for row in shown[:1]] == [("no", 1, 8.0)]
    flags += [f"--to-topic={topic}-out", f"--bad-topic={topic}-bad", f"--checkpoint={tmp_path / 'c'}"]
    assert job(rollup, *flags) == ["6 messages read, 2 that do not fit"]
    found = [json.loads(body) for _, body in stored(nsqd.address, f"{topic}-out")]
    assert sorted((row["country"], row["sales"], row["price"]) for row in found) == [("no", 2, 5.0), ("se", 1, 2.0)]
    assert found[0]["window_start"].startswith("2026-11-23T12:00:00")
    bad = [json.loads(body) for _, body in stored(nsqd.address, f"{topic}-bad")]
    assert [(row["offset"], row["reason"][:17], row["body"]) for row in sorted(bad, key=lambda row: row["offset"])] == [
        (5, "field at is missi", "{}"), (6, "the body is no JS", "nothing"),
    ]  # fmt: skip
    nsqd.publish(topic, [sale(30, "no", 1), sale(4, "se", 100)])
    assert job(rollup, *flags)[0].endswith("1 groups of messages came too late to be counted (--late)")
    found = [json.loads(body) for _, body in stored(nsqd.address, f"{topic}-out")]
    assert sum(row["price"] for row in found) == 15


def test_a_message_without_a_time_does_not_fit(job: Job, nsqd: NsqdProcess, topic: str, tmp_path: Path):
    timed = [b'{"n": %d, "at": "2026-11-23T12:00:%02dZ", "_at": 3, "Timestamp": "x"}' % (n, n) for n in range(10)]
    nsqd.publish(topic, [*timed, b'{"n": 1}', b'{"n": 2, "at": "soon"}', b'{"n": "x"}', timed[9]])
    ddl = "--schema=n bigint, at string, _at int, Timestamp string"
    flags = [f"--topic={topic}", ddl, "--time=data.at", "--window=2s", "--late=0s", "--by=_at"]
    *shown, counted = [json.loads(line) for line in job(rollup, *flags, "--dry-run")]
    assert counted == {"rows": 14, "bad": 3}
    assert [(row["_at"], row["messages"]) for row in shown] == [(3, 3), (3, 2), (3, 2), (3, 2), (3, 2)]
    out = [f"--to={tmp_path / 'out'}", f"--checkpoint={tmp_path / 'c'}"]
    with pytest.raises(JobFailed, match=r"offset 11: the time is null, or no timestamp: data\.at; give --bad-rows"):
        job(rollup, *flags, *out)
    assert job(rollup, *flags, *out, f"--bad-rows={tmp_path / 'bad'}") == ["14 messages read, 3 that do not fit"]
    assert sum(row["messages"] for row in rows(tmp_path / "out")) == 8, "the last window is open"
    missing = "the time is null, or no timestamp: data.at"
    assert {row["offset"]: row["reason"] for row in rows(tmp_path / "bad")} == {
        11: missing, 12: missing, 13: "field n is no bigint: x",
    }  # fmt: skip
    flags = [f"--topic={topic}", "--time=get_json_object(cast(body AS string), '$.at')", f"--to={tmp_path / 'plain'}"]
    flags += [f"--checkpoint={tmp_path / 'c2'}", f"--bad-rows={tmp_path / 'bad2'}"]
    assert job(rollup, *flags) == ["14 messages read, 3 that do not fit"], "no schema is needed"
    assert {row["offset"] for row in rows(tmp_path / "bad2")} == {11, 12, 13}


def test_columns_of_a_rollup_have_names_of_their_own(job: Job, nsqd: NsqdProcess, topic: str):
    nsqd.publish(topic, [b"a"])
    flags = [f"--topic={topic}", "--dry-run"]
    for more, name in (
        (["--aggregate=count(*) AS window_start"], "window_start"),
        (["--aggregate=count(*) AS n", "--aggregate=max(offset) AS N"], "N"),
        (["--by=topic AS Window_End"], "Window_End"),
    ):
        with pytest.raises(UsageError, match=f"there is a column {name} already; give another one with AS"):
            job(rollup, *flags, *more)
    (window,) = [json.loads(line) for line in job(rollup, *flags, "--aggregate=count(*) AS `a``b`")]
    assert window["a`b"] == 1


def test_fields_that_are_named_as_what_dedupe_adds(job: Job, nsqd: NsqdProcess, topic: str, tmp_path: Path):
    made = [{"user-id": n % 3, "dt": "d", "Hour": "h", "_key": "k", "_read": n, "Offset": 99} for n in range(6)]
    nsqd.publish(topic, [*(json.dumps(each).encode() for each in made), b'{"user-id": "x", "Offset": 99}'])
    ddl = "--schema=`user-id` bigint, dt string, Hour string, _key string, _read int, Offset bigint"
    flags = [f"--topic={topic}", ddl, "--key=`user-id`", "--json"]
    assert json.loads(job(dedupe, *flags, "--dry-run")[0])["repeated"] == 3
    flags += [f"--to={tmp_path / 'out'}", f"--checkpoint={tmp_path / 'c'}", f"--bad-rows={tmp_path / 'bad'}"]
    found = json.loads(job(dedupe, *flags)[0])
    assert (found["rows"], found["repeated"], found["bad"]) == (7, 3, 1)
    out = sorted(rows(tmp_path / "out"), key=lambda row: row["offset"])
    assert [(row["user-id"], row["_key"], row["offset"]) for row in out] == [(0, "k", 1), (1, "k", 2), (2, "k", 3)]
    assert [{**row["data"]} for row in out] == made[:3]
    assert not {"dt", "Hour"} & out[0].keys()
    assert [(row["topic"], row["offset"]) for row in rows(tmp_path / "bad")] == [(topic, 7)]


def cut_off_at_the_first_plan(place: Path, job: dict[str, str]) -> None:
    """Leave what a driver leaves that is killed while it writes down its first micro-batch."""
    with streams.claimed(str(place), job):
        (place / "rows" / "offsets").mkdir(parents=True)
        (place / "rows" / "metadata").write_text(json.dumps({"id": str(uuid.uuid4())}))
        name = f".0.{uuid.uuid4()}.tmp"
        (place / "rows" / "offsets" / name).write_text("v1\n")
        (place / "rows" / "offsets" / f".{name}.crc").write_bytes(b"crc")
    assert checkpoint(str(place / "rows")).state == PROBLEM


def test_mirror_with_where_it_came_from(job: Job, nsqd: NsqdProcess, topic: str, tmp_path: Path):
    nsqd.post(f"/topic/create?topic={topic}&partition_num=2")
    nsqd.publish(topic, numbered(0, 100))
    nsqd.post(f"/topic/create?topic=copy-{topic}&partition_num=2&extend=true")
    flags = [f"--topic={topic}", "--prefix=copy-", "--keep-partition", f"--checkpoint={tmp_path / 'c'}"]
    plan = job(mirror, *flags, "--dry-run")
    assert plan[-1] == "100 messages would be mirrored"
    cut_off_at_the_first_plan(tmp_path / "c", {"job": "mirror", "topics": topic, "to_topic": "", "prefix": "copy-"})
    assert job(mirror, *flags) == ["100 messages mirrored"]
    assert job(mirror, *flags) == ["0 messages mirrored"]
    there = {
        (partition, offset): body for partition, offset, body in stored(nsqd.address, topic, "partition,offset,body")
    }
    copies = stored(nsqd.address, f"copy-{topic}", "partition,headers,body")
    assert len(copies) == 100
    for partition, headers, body in copies:
        came = dict(headers)
        assert came["source_topic"] == topic and int(came["source_timestamp_ms"]) > 1.7e12
        assert int(came["source_partition"]) == partition
        assert there[partition, int(came["source_offset"])] == body
    with pytest.raises(streams.CheckpointError, match=r"it is another job's: prefix was 'copy-' and is 'other-'"):
        job(mirror, f"--topic={topic}", "--prefix=other-", f"--checkpoint={tmp_path / 'c'}")


def test_a_pattern_is_noted_like_topics(tmp_path: Path):
    def name(pattern: str) -> str:
        options = resolve(mirror.MirrorOptions, [f"--source-option=topicPattern={pattern}"], {}).options
        with streams.claimed(str(tmp_path), {"job": "mirror", "topics": options.topics_told()}, {}) as found:
            return found

    (tmp_path / "job.json").write_text(json.dumps({"job": {"job": "mirror", "topics": ""}, "name": "n", "target": {}}))
    assert name("a.*") == name("a.*") == "n", "what an earlier release noted says nothing of it"
    other = r"it is another job's: topics was 'topicpattern=a\.\*' and is 'topicpattern=b\.\*'"
    with pytest.raises(streams.CheckpointError, match=other):
        name("b.*")


def test_mirror_leaves_headers_the_json_they_are(job: Job, nsqd: NsqdProcess, topic: str, tmp_path: Path):
    """Also where a mirror is mirrored, and where a message has headers of the names that are added."""
    deep = f'{{"d":{"[" * 62}{"]" * 62}}}'
    texts = [
        '{"n":5,"b":true,"o":{"a":[1,2]},"none":null,"text":"5"}',
        '{ "##trace_id":"77", "x": 1.0, "x":2e5 }',
        '{"source_offset":{"mine":1},"o":{"source_offset":2}}',
        deep,
        f'{{"long":"{"y" * 60_000}"}}',
        "{}",
    ]
    for name in (topic, f"a-{topic}", f"b-a-{topic}"):
        nsqd.post(f"/topic/create?topic={name}&partition_num=1&extend=true")
    numbers = [b"%d" % number for number in range(len(texts))]
    write(nsqd.address, topic, {"body": numbers, "headers_json": texts}, task())
    job(mirror, f"--topic={topic}", "--prefix=a-", f"--checkpoint={tmp_path / 'a'}")
    job(mirror, f"--topic=a-{topic}", "--prefix=b-", f"--checkpoint={tmp_path / 'b'}")
    for name, came_from in ((f"a-{topic}", topic), (f"b-a-{topic}", f"a-{topic}")):
        copies = stored(nsqd.address, name, "headers_json,trace_id,body")
        assert [body for *_, body in copies] == numbers
        heads = [text.partition('"source_topic"') for text, *_ in copies]
        kept = [head.rstrip(",") for head, _, _ in heads]
        theirs = [text[:-1] for text in texts]
        theirs[2] = '{"o":{"source_offset":2}'
        assert kept == theirs
        added = [json.loads(f'{{"source_topic"{rest}') for _, _, rest in heads]
        assert [(each["source_topic"], each["source_partition"]) for each in added] == [(came_from, "0")] * len(texts)
        assert [int(each["source_offset"]) for each in added] == list(range(1, len(texts) + 1))
        assert [trace_id for _, trace_id, _ in copies] == [0, 77, 0, 0, 0, 0]


def test_a_topic_that_was_deleted_does_not_keep_a_job_from_the_others(
    job: Job, nsqd: NsqdProcess, topic: str, tmp_path: Path
):
    other = f"{topic}-other"
    for name in (topic, other):
        nsqd.publish(name, numbered(0, 20))
    flags = [f"--topic={topic}", f"--topic={other}", "--prefix=copy-", "--headers=false"]
    assert job(mirror, *flags, f"--checkpoint={tmp_path / 'c'}") == ["40 messages mirrored"]
    nsqd.post(f"/topic/delete?topic={other}")
    nsqd.publish(topic, numbered(20, 30))
    with pytest.raises(JobFailed, match=f"topic '{other}', .*: messages from 21 are lost: .*Set failOnDataLoss=false"):
        job(mirror, *flags, f"--checkpoint={tmp_path / 'c'}")
    more = ["--source-option=failOnDataLoss=false", f"--checkpoint={tmp_path / 'c'}"]
    assert job(mirror, *flags, *more) == ["10 messages mirrored"]
    with pytest.raises(NsqdError, match=f"no nsqd of .* has topic '{other}'"):
        job(mirror, *flags, f"--checkpoint={tmp_path / 'new'}")


def test_windows_that_no_stream_can_have_are_refused_before_the_checkpoint_is_claimed(
    job: Job, nsqd: NsqdProcess, topic: str, tmp_path: Path
):
    """The command that says it better goes on with the same checkpoint."""
    nsqd.publish(topic, [b"a", b"b"])
    flags, place = [f"--topic={topic}"], tmp_path / "c"
    out = [f"--to={tmp_path / 'out'}", f"--checkpoint={place}"]
    for how in (["--dry-run"], out):
        with pytest.raises(UsageError, match="--by and --aggregate: Distinct aggregations are not supported on stream"):
            job(rollup, *flags, *how, "--aggregate=count(distinct body) AS n")
        with pytest.raises(UsageError, match=r"--time try_cast\(\(nope\) AS timestamp\): "):
            job(rollup, *flags, *how, "--time=nope")
    assert not place.exists() and not (tmp_path / "out").exists()
    assert job(rollup, *flags, *out, "--aggregate=approx_count_distinct(body) AS n")[0].startswith("2 messages read")


def test_files_where_there_can_be_none(job: Job, nsqd: NsqdProcess, topic: str, tmp_path: Path):
    nsqd.publish(topic, numbered(0, 5))
    (tmp_path / "file").touch()
    flags = [f"--topic={topic}", "--key=body", f"--checkpoint={tmp_path / 'c'}"]
    with pytest.raises(SinkError, match=f"^directory {tmp_path}/file: it cannot be written"):
        job(dedupe, *flags, f"--to={tmp_path / 'file'}")


def assert_no_error_but_of_closed_pipes(errors: str) -> None:
    """Spark closes the pipe of a Python process when its query is stopped, and PySpark tells of that in one that just
    answers or waits for a question, unless that is ended before it has: docs/spark.md.
    """
    for told in errors.split("Traceback (most recent call last):\n")[1:]:
        error = next((line for line in told.splitlines() if not line.startswith(("  ", "{"))), "")
        assert error in ("", "EOFError", "BrokenPipeError: [Errno 32] Broken pipe"), errors
    places = re.findall(r'^  File "([^"]*)"', errors, re.M)
    assert all("/pyspark/" in place or place.endswith("/socket.py") for place in places), errors


@pytest.mark.parametrize("ends", ["Ctrl-C", "SIGTERM to all"])
def test_as_a_command_until_a_signal(nsqd: NsqdProcess, topic: str, tmp_path: Path, ends: str):
    nsqd.publish(topic, numbered(0, 50))
    flags = [f"--topic={topic}", f"--to-topic={topic}-copy", f"--nsqd={nsqd.address}", f"--checkpoint={tmp_path / 'c'}"]
    more = ["--headers=false", "--follow", "--interval=100ms", "--progress=json", "--master=local[1]"]
    process = subprocess.Popen(
        [sys.executable, "-m", "flintmq", "pipeline", "mirror", *flags, *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        told = (json.loads(line) for line in process.stderr if line.startswith("{"))
        row = next(row for row in told if row["rows"] >= 50)
        assert row["spark_ui"].startswith("http://") and row["lag"] == 0
        if ends == "Ctrl-C":
            process.send_signal(signal.SIGINT)
        else:
            os.killpg(process.pid, signal.SIGTERM)
        output, errors = process.communicate(timeout=SPARK_PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, output) == (0, "50 messages mirrored\n")
    assert_no_error_but_of_closed_pipes(errors)
    assert sorted(int(body) for _, body in stored(nsqd.address, f"{topic}-copy")) == list(range(50))


def test_a_command_that_fails_says_it_in_a_line(nsqd: NsqdProcess, topic: str, tmp_path: Path):
    """No stack of Java's or of Python's stands before the line that says what it is."""
    nsqd.publish(topic, [b'{"id": 1, "price": 2}'])
    flags = [f"--topic={topic}", f"--to-topic={topic}-copy", f"--nsqd={nsqd.address}", f"--checkpoint={tmp_path / 'c'}"]
    flags += ["--key=id", "--schema=id int", "--master=local[1]"]
    done = subprocess.run(
        [sys.executable, "-m", "flintmq", "pipeline", "dedupe", *flags],
        capture_output=True, text=True, env=environment(), timeout=SPARK_PATIENCE_S,
    )  # fmt: skip
    said = (
        f"flintmq pipeline: topic {topic}, partition 0, offset 1: unknown fields: price; give --bad-rows or --bad-topic"
    )
    assert (done.returncode, done.stdout) == (1, "") and f"\n{said}" in done.stderr, done.stderr[-4000:]
    assert_no_error_but_of_closed_pipes(done.stderr)
    assert not re.search(r"^(\s+at |Caused by|py4j\.|flintmq\.)", done.stderr, re.MULTILINE), done.stderr[-8000:]


def test_tail(job: Job, nsqd: NsqdProcess, topic: str):
    nsqd.publish(topic, [*(b'{"id": %d, "name": "n"}' % n for n in range(20)), b"\x1b[31mno json"])
    head, *lines = job(tail, f"--topic={topic}", "--rows=3")
    assert head == "topic string, partition int, offset bigint, timestamp timestamp, body string"
    assert [line.split("  ")[2] for line in lines] == ["19", "20", "21"]
    assert "\x1b" not in lines[2]
    found = [
        json.loads(line)
        for line in job(tail, f"--topic={topic}", "--rows=3", "--schema=id bigint, name string", "--json")
    ]
    assert [each["id"] for each in found] == [18, 19, None]
    assert found[2]["bad"].startswith("the body is no JSON object")
    flags = [f"--topic={topic}", "--rows=20", "--schema=id bigint, name string", "--filter=id % 7 = 0"]
    assert job(tail, *flags, "--select=concat(name, ',', id) AS both, offset") == [
        "both string, offset bigint", "n,7  8", "n,14  15",
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"--filter size > 1: .*There is: topic string, partition int.*id bigint"):
        job(tail, *flags[:3], "--filter=size > 1")


def test_a_tail_of_bodies_that_are_no_text(job: Job, nsqd: NsqdProcess, topic: str):
    nsqd.publish(topic, [b"a\xff\xfe"])
    flag, text, shown = f"--topic={topic}", "cast(body AS string)", "a\ufffd\ufffd"
    assert job(tail, flag)[1].split("  ")[-1] == shown
    assert json.loads(job(tail, flag, "--json")[0])["body"] == shown
    deep = f"struct({text} AS s, array({text}) AS l, map({text}, {text}) AS m, map(cast(body AS binary), 1) AS b) AS d"
    flags = [flag, f"--select={text} AS t, {deep}", "--json"]
    row = {"t": shown, "d": {"s": shown, "l": [shown], "m": {shown: shown}, "b": {shown: 1}}}
    assert json.loads(job(tail, *flags)[0]) == row
    (line,) = job(tail, flag, "--schema=id bigint", "--select=bad, body", "--json")
    assert json.loads(line) == {"bad": "the body is not UTF-8", "body": shown}


def test_a_tail_follows_bodies_that_are_no_text(
    spark: Any, nsqd: NsqdProcess, topic: str, monkeypatch: pytest.MonkeyPatch
):
    nsqd.publish(topic, [b"\xff"])
    runner, told = Runner(spark=spark), []

    def say(text: str) -> None:
        told.append(text)
        if text.endswith("7"):
            runner.stop.set()
        elif len(told) == 2:
            nsqd.publish(topic, [b"\xfe7"])

    monkeypatch.setattr(runner, "say", say)
    words = [f"--nsqd={nsqd.address}", f"--topic={topic}", "--select=cast(body AS string) AS t", "--follow"]
    tail.tail(resolve(tail.TailOptions, words, {}).options, runner)
    assert told == ["t string", "\ufffd", "\ufffd7"]


def test_times_of_a_tail_are_utc_wherever_it_runs(
    job: Job, nsqd: NsqdProcess, topic: str, monkeypatch: pytest.MonkeyPatch
):
    at = "2026-11-01T05:30:00.250000Z"  # half past one in New York, for the first time that night
    nsqd.publish(topic, [b'{"at": "2026-11-01T01:30:00.25-04:00"}'])
    shown = (
        "data.at AS at, array(struct(map('k', data.at) AS m)) AS l, to_timestamp_ntz('2026-11-01 01:30:00') AS plain, "
        "timestamp AS stored"
    )
    flags = [f"--topic={topic}", "--schema=at timestamp", f"--select={shown}"]
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        (line,) = job(tail, *flags, "--json")
        _, told = job(tail, *flags)
    finally:
        monkeypatch.undo()
        time.tzset()
    row = json.loads(line)
    assert (row["at"], row["l"], row["plain"]) == (at, [{"m": {"k": at}}], "2026-11-01T01:30:00")
    assert abs(datetime.fromisoformat(row["stored"]).timestamp() - time.time()) < SPARK_PATIENCE_S
    assert told.split("  ")[0] == at


def test_tail_of_bodies_that_have_a_field_bad(job: Job, nsqd: NsqdProcess, topic: str):
    nsqd.publish(topic, [b'{"id": 1, "Bad": 7}', b'{"id": "x", "Bad": 8}'])
    lines = job(tail, f"--topic={topic}", "--schema=id bigint, Bad int", "--json")
    first, second = (json.loads(line) for line in lines)
    assert (first["Bad"], first["_bad"]) == (7, None)
    assert second["_bad"] == "field id is no bigint: x"


def test_an_error_in_sql_is_a_line(nsqd: NsqdProcess, topic: str):
    nsqd.publish(topic, [b"1"])
    flags = [f"--topic={topic}", f"--nsqd={nsqd.address}", "--master=local[1]", "--filter=nix > 3"]
    done = subprocess.run(
        [sys.executable, "-m", "flintmq", "pipeline", "tail", *flags],
        capture_output=True, text=True, env=environment(), timeout=SPARK_PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 2 and "--filter nix > 3: [UNRESOLVED_COLUMN" in done.stderr.splitlines()[-1]
    assert "QueryContextLogger" not in done.stderr and "java." not in done.stderr


def test_a_schema_that_is_none(job: Job, topic: str, nsqd: NsqdProcess, tmp_path: Path):
    nsqd.publish(topic, [b"{}"])
    with pytest.raises(OptionError, match="schema='id nonsense' is not allowed; DDL such as"):
        job(tail, f"--topic={topic}", "--schema=id nonsense")
    (tmp_path / "x").write_bytes(b"\xff")
    with pytest.raises(OptionError, match="a file that can be read"):
        read_schema(str(tmp_path / "x"))
    (tmp_path / "x").write_text("id bigint\n", encoding="utf-8-sig")
    assert read_schema(str(tmp_path / "x")) == "id bigint", "an editor's byte order mark is no part of it"


def claim(directory: Path | str) -> str:
    with streams.claimed(str(directory), {"job": "a"}) as name:
        return name


def test_a_checkpoint_belongs_to_one(tmp_path: Path):
    place = tmp_path / "c"
    with streams.claimed(str(place), {"job": "a"}) as name:  # noqa: SIM117 - one is within the other
        with pytest.raises(streams.CheckpointError, match="another job runs with it"):
            claim(place)
    assert claim(place) == name
    (place / "job.json").write_text("{}")
    with pytest.raises(streams.CheckpointError, match=r"job\.json cannot be read"):
        claim(place)
    (tmp_path / "spark").mkdir()
    (tmp_path / "spark" / "metadata").write_text("{}")
    with pytest.raises(streams.CheckpointError, match="it is not empty, and no job's"):
        claim(tmp_path / "spark")
    with pytest.raises(UsageError, match="local or mounted"):
        claim("hdfs://host/c")


def test_a_checkpoint_whose_first_write_was_cut_short_by_a_kill_is_begun_anew(tmp_path: Path):
    (tmp_path / "job.json.new").write_text('{"job": {"jo')
    name = claim(tmp_path)
    assert claim(tmp_path) == name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.json", "job.lock"]


def test_a_job_that_publishes_elsewhere_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def publish(**sink: str) -> str:
        caplog.clear()
        with streams.claimed(str(tmp_path / "c"), {"job": "a"}, streams.target_of(sink, headers="true")) as name:
            assert name == json.loads((tmp_path / "c" / "job.json").read_text())["name"]
        return caplog.text

    assert publish(nsqd="a:1,b:1") == "" == publish(nsqd="b:1,a:1", topic="t", tls="true")
    said = publish(lookupd="c:2")
    assert "lookupd was '' and is 'c:2'; nsqd was 'a:1,b:1' and is ''. What it has read before is not there" in said
    assert "name another --checkpoint" in said
    assert publish(lookupd="c:2") == ""
    path = tmp_path / "c" / "job.json"
    known = json.loads(path.read_text())
    assert known.pop("target") == {"lookupd": "c:2", "headers": "true"}
    path.write_text(json.dumps(known))
    assert publish(nsqd="d:1") == "", "a release before noted none"
    assert "nsqd was 'd:1' and is 'e:1'" in publish(nsqd="e:1")


def test_a_mirror_to_another_nsqd_with_the_same_checkpoint(
    job: Job, nsqd: NsqdProcess, topic: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    nsqd.publish(topic, [b"1", b"2"])
    flags = [f"--topic={topic}", "--prefix=copy-", "--headers=false", f"--checkpoint={tmp_path / 'c'}"]
    assert job(mirror, *flags) == ["2 messages mirrored"]
    assert "name another --checkpoint" not in caplog.text
    port = nsqd.address.rpartition(":")[2]
    assert job(mirror, *flags, f"--to-nsqd=localhost:{port}") == ["0 messages mirrored"]
    assert f"nsqd was '{nsqd.address}' and is 'localhost:{port}'" in caplog.text


def test_a_micro_batch_that_is_repeated_replaces_its_files(spark: Any, tmp_path: Path):
    frame = spark.range(10).selectExpr("id", "timestamp_seconds(1795435200 + id * 1800) AS timestamp")
    for _ in range(2):  # as after a kill before Spark noted the end of the micro-batch
        files = streams.BatchFiles(tmp_path, "job", by_hour=True)
        files(frame, 0)
        left = tmp_path / "dt=2026-11-23" / "hour=12" / "job-0000000000-9999.parquet"
        left.write_bytes(next(tmp_path.glob("dt=*/hour=12/*.parquet")).read_bytes())
    files = streams.BatchFiles(tmp_path, "job", by_hour=True)
    files(frame, 0)
    files(frame.where("id < 2"), 1)
    assert sorted(row["id"] for row in rows(tmp_path)) == sorted([*range(10), 0, 1])
    assert {path.parent.name for path in tmp_path.glob("dt=*/hour=*/*.parquet")} == {f"hour={n}" for n in range(12, 17)}


def test_a_micro_batch_that_is_repeated_in_one_process(spark: Any, tmp_path: Path):
    """As when Spark's Python did not start in time for another query: its rows may come in other files."""
    frame = spark.range(8).selectExpr("id", "timestamp_seconds(1795435200 + id * 1800) AS timestamp")
    files = streams.BatchFiles(tmp_path, "job", by_hour=True)
    files(frame.where("id > 5"), 0)
    for parts in (1, 3, 1):
        files(frame.repartition(parts), 1)
    assert sorted(row["id"] for row in rows(tmp_path)) == [*range(6), 6, 6, 7, 7]


def test_files_beside_those_of_sparks_own_sink(job: Job, nsqd: NsqdProcess, topic: str, tmp_path: Path):
    """Spark would read the files alone that its sink has listed."""
    nsqd.publish(topic, numbered(0, 5))
    (tmp_path / "out" / "_spark_metadata").mkdir(parents=True)
    for words in (
        ["--key=body", f"--to={tmp_path / 'out'}"],
        ["--key=id", "--schema=id bigint", f"--to={tmp_path / 'rows'}", f"--bad-rows={tmp_path / 'out'}"],
    ):
        with pytest.raises(SinkError, match=f"directory {tmp_path}/out: .* _spark_metadata lists: name another one"):
            job(dedupe, f"--topic={topic}", *words, f"--checkpoint={tmp_path / words[0]}")
    assert not rows(tmp_path)


def test_files_beside_those_of_another_kind_of_job(job: Job, nsqd: NsqdProcess, topic: str, tmp_path: Path):
    """Whoever reads the directory would count both."""
    nsqd.publish(topic, numbered(0, 5))
    to, flags = tmp_path / "out", [f"--topic={topic}", "--aggregate=count(*) AS n"]
    job(dedupe, flags[0], "--key=body", f"--to={to}", f"--checkpoint={tmp_path / '1'}")
    with pytest.raises(ArchiveError, match="dedupe writes to it"):
        archive(to, nsqd=nsqd.address, topic=topic)
    archive(tmp_path / "archive", nsqd=nsqd.address, topic=topic)
    (tmp_path / "table" / "_delta_log").mkdir(parents=True)
    for place, said in (("out", "dedupe writes to it"), ("archive", "archive writes"), ("table", "a table of delta")):
        with pytest.raises(SinkError, match=f"directory {tmp_path}/{place}: .*{said}"):
            job(rollup, *flags, f"--to={tmp_path / place}", f"--checkpoint={tmp_path / place}-c")
    assert len(rows(to)) == 5
    job(dedupe, flags[0], "--key=body", f"--to={to}", f"--checkpoint={tmp_path / '1'}")
    assert len(rows(to)) == 5, "it goes on itself"


@pytest.mark.parametrize("name", ["dedupe", "rollup"])
def test_rows_that_do_not_fit_go_to_a_place_of_their_own(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """In one directory each query would take the other's files for its own of an earlier try."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "more").mkdir(parents=True)
    (tmp_path / "link").symlink_to("out")
    flags = ["pipeline", name, "--topic=t", "--nsqd=127.0.0.1:1", "--schema=a int", "--checkpoint=c"]
    flags += ["--key=a"] if name == "dedupe" else []
    for to, bad in (
        ("out", "out"), ("out", "./out/"), ("out", f"{tmp_path}/link"), ("link", "out/../out"), ("new", "new"),
        ("out", "out/bad"), ("out/rows", "out"), ("link/more", "out"), ("out", "link/more/x"),
    ):  # fmt: skip
        for more in ([], ["--dry-run"]):
            assert cli.main([*flags, f"--to={to}", f"--bad-rows={bad}", *more]) == 2, (to, bad)
            said = capsys.readouterr().err
            assert f"--to {to} and --bad-rows {bad} " in said and "give --bad-rows a directory beside --to" in said
    assert cli.main([*flags, "--to-topic=u", "--bad-topic=u"]) == 2
    assert "--to-topic and --bad-topic are both u: give another --bad-topic" in capsys.readouterr().err
    streams.check_places("out", "", SchemaFlags(bad_rows="output"))
    streams.check_places("", "u", SchemaFlags(bad_rows="out"))
    streams.check_places("out", "", SchemaFlags(bad_topic="u"))
    assert not list(tmp_path.glob("**/*.parquet")) and not (tmp_path / "c").exists()


def test_times_in_files_have_their_zone(spark: Any, tmp_path: Path):
    """Also in a directory whose first files are of before, without one: Spark reads and adds to both alike."""
    frame = spark.range(3).selectExpr("id", "timestamp_seconds(1795435200 + id) AS timestamp")
    files = streams.BatchFiles(tmp_path, "job", by_hour=True)
    kept = spark.conf.get(PARQUET_TIMES)
    try:
        spark.conf.set(PARQUET_TIMES, "INT96")
        files(frame, 0)
    finally:
        spark.conf.set(PARQUET_TIMES, kept)
    before = set(tmp_path.glob("**/*.parquet"))
    files(frame, 1)
    types = {pq.read_schema(path).field("timestamp").type for path in set(tmp_path.glob("**/*.parquet")) - before}
    assert types == {pa.timestamp("us", tz="UTC")}
    found = spark.read.parquet(str(tmp_path)).selectExpr("id", "unix_seconds(timestamp) AS at").collect()
    assert sorted((row["id"], row["at"] - 1795435200) for row in found) == [(n, n) for n in (0, 0, 1, 1, 2, 2)]
    zone = spark.conf.get("spark.sql.session.timeZone")
    try:
        spark.conf.set("spark.sql.session.timeZone", "America/New_York")
        again = spark.read.parquet(str(tmp_path)).selectExpr("unix_seconds(timestamp) - id AS at").distinct().collect()
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
    assert [row["at"] for row in again] == [1795435200]


def test_a_jvm_that_is_killed_ends_a_job_with_a_line(nsqd: NsqdProcess, topic: str, tmp_path: Path):
    nsqd.publish(topic, numbered(0, 50))
    flags = [f"--topic={topic}", f"--to-topic={topic}-copy", f"--nsqd={nsqd.address}", f"--checkpoint={tmp_path / 'c'}"]
    more = ["--headers=false", "--follow", "--interval=100ms", "--progress=json", "--master=local[1]"]
    process = subprocess.Popen(
        [sys.executable, "-m", "flintmq", "pipeline", "mirror", *flags, *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    try:
        assert process.stderr is not None
        told = (json.loads(line) for line in process.stderr if line.startswith("{"))
        assert next(row for row in told if row["rows"] >= 50)
        (jvm,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(jvm), signal.SIGKILL)
        _, errors = process.communicate(timeout=SPARK_PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1
    assert errors.splitlines()[-1] == "flintmq pipeline: Spark's JVM has ended before the job did"
    assert "Traceback" not in errors


class Starved(Runner):
    """Spark's Python does not come in time, as often as ``times``."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def follow(self, queries, work, on_batch=None, beside=()) -> None:
        self.times -= 1
        if self.times >= 0:
            raise JobFailed("Python worker failed to connect back.")


class Frame:
    """A frame that can be started, and counts how often."""

    started = 0

    def __getattr__(self, name: str) -> Any:
        return self if name == "writeStream" else lambda *_, **__: self

    def start(self) -> object:
        self.started += 1
        return object()


class BusyAgain(Starved):
    """One that does micro-batches in between, as many as ``done``."""

    done = 0

    def follow(self, queries, work, on_batch=None, beside=()) -> None:
        if self.done:
            self.done -= 1
            query = SimpleNamespace(id="1", recentProgress=[SimpleNamespace(json=PROGRESS)])
            self._look(query, work, {}, {}, None, is_counted=True)
        super().follow(queries, work, on_batch, beside)


PROGRESS = json.dumps({"batchId": 1, "numInputRows": 1, "durationMs": {"addBatch": 1}, "sources": []})


def test_a_machine_that_is_busy_now_and_then_is_waited_for_each_time(tmp_path: Path):
    queries = streams.Queries(StreamFlags(checkpoint=str(tmp_path)), "job")
    frame: Any = Frame()
    queries.to_topic(frame, {})
    runner = BusyAgain(99)
    runner.done = 2 * streams.STARTS_MAX
    with pytest.raises(JobFailed, match="failed to connect back"):
        queries.wait(runner, Work())
    assert frame.started == 3 * streams.STARTS_MAX - 1


def test_a_busy_machine_is_waited_for(tmp_path: Path):
    queries = streams.Queries(StreamFlags(checkpoint=str(tmp_path)), "job")
    frame: Any = Frame()
    queries.to_topic(frame, {})
    queries.wait(Starved(2), Work())
    assert frame.started == 3
    with pytest.raises(JobFailed, match="failed to connect back"):
        queries.wait(Starved(99), Work())
    assert frame.started == 3 + streams.STARTS_MAX


def test_wrong_words(capsys: pytest.CaptureFixture[str]):
    here, kept = ["--topic=t", "--nsqd=127.0.0.1:1"], ["--checkpoint=c"]
    for name, words, said in (
        ("dedupe", here, "give --key"),
        ("dedupe", [*here, "--key=body"], "give either --to or --to-topic"),
        ("dedupe", [*here, "--key=body", "--to=x"], "give --checkpoint"),
        ("dedupe", [*here, "--key=body", "--to=x", "--bad-rows=y"], "need --schema"),
        ("dedupe", [*here, "--key=body", "--to-topic=t", *kept], "topic 't' is read, and would be published to"),
        (
            "dedupe",
            [*here, "--key=body", "--to=x", "--schema=a int", "--bad-topic=t", *kept],
            "give another --bad-topic",
        ),
        ("dedupe", [*here, "--key=body", "--to-nsqd=127.0.0.1:2", "--to-topic=t"], "give --checkpoint"),
        ("dedupe", [*here, "--key=body", "--to=s3://x/y", *kept], "s3://x/y is a URL"),
        ("rollup", [*here, "--to=x", "--time=at", "--bad-rows=hdfs://x", *kept], "hdfs://x is a URL"),
        ("rollup", [*here, "--to-topic=t", *kept], "give --to-nsqd, --to-lookupd or another --to-topic"),
        ("rollup", [*here, "--to-topic=t", "--to-nsqd=127.0.0.1:1", *kept], "topic 't' is read"),
        ("rollup", [*here, "--to=x", "--bad-rows=y"], "need --schema"),
        ("rollup", [*here, "--to=x", "--time=at", "--bad-rows=y", "--bad-topic=z"], "either --bad-rows or"),
        ("rollup", [*here, "--to=x", "--to-topic=y"], "give either --to or --to-topic"),
        ("rollup", ["--topic=t", "--to=x"], "give either --nsqd or --lookupd"),
        ("mirror", [*here, *kept], "topic 't' is read, and would be published to: give --to-nsqd, --to-lookupd or"),
        ("mirror", [*here, "--prefix=a", "--to-topic=b"], "give either --prefix or --to-topic"),
        ("mirror", [*here, "--prefix=a"], "give --checkpoint"),
        ("mirror", [*here, "--prefix=it's"], "no beginning of a topic name"),
        (
            "mirror",
            [*here, "--to-nsqd=127.0.0.1:1", "--to-topic=t", *kept],
            "another --to-topic or --prefix, or read other",
        ),
        ("tail", [*here, "--channel=c"], "tail moves none"),
        ("cluster", ["up", "--memory=banane"], "--memory='banane' is not allowed; it must be a whole number and k, m,"),
        ("cluster", ["up", "--memory=1023k"], "such as 2g or 1500m, 1m or more"),
        ("cluster", ["up", "--memory=2048"], "it must be a whole number and k, m, g or t"),
        ("tail", [*here, "--source-option=startingOffsets=latest"], "--rows says where tail starts"),
    ):
        assert cli.main(["pipeline", name, *words]) == 2, words
        assert said in capsys.readouterr().err
    assert issubclass(streams.CheckpointError, FlintError)


@pytest.mark.parametrize("unknown", ["_logs", "_resolved"])
def test_no_job_publishes_to_what_it_reads_by_another_name(
    nsqd: NsqdProcess, topic: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, unknown: str,
):  # fmt: skip
    """Whether the addresses lead to the same nsqd, or the logs are the same."""
    names = [topic, f"copy-{topic}", f"b{topic}"]
    for name in names:
        nsqd.publish(name, numbered(0, 5))
    monkeypatch.setattr(topics, unknown, lambda *_: set())
    here, c = f"--nsqd={nsqd.address}", f"--checkpoint={tmp_path / 'c'}"
    there = f"--to-nsqd={nsqd.address.replace('127.0.0.1', 'localhost')}"
    chosen, assigned = f"--topic={topic}", f'--source-option=assign={{"{topic}":[0]}}'
    host, port = nsqd.address.split(":")
    with FakeLookupd() as lookupd:
        producers = {"producers": [{"broadcast_address": host, "tcp_port": int(port)}]}
        lookupd.answers = {f"/lookup?topic={name}": producers for name in names}
        lookupd.answers |= {"/topics": {"topics": names}, "/nodes": producers}
        pattern = [f"--lookupd={lookupd.address}", f"--source-option=topicPattern=.*{topic}"]
        for name, words, target in (
            ("mirror", [here, chosen, there], topic),
            ("mirror", [*pattern, there, "--prefix=copy-"], "copy-"),
            ("mirror", [*pattern, there, f"--to-topic=b{topic}"], f"b{topic}"),
            ("dedupe", [here, chosen, there, "--key=body", f"--to-topic={topic}"], topic),
            ("dedupe", [here, assigned, "--key=body", f"--to-topic={topic}", "--dry-run"], topic),
            ("rollup", [here, assigned, there, "--to=x", "--schema=a int", f"--bad-topic={topic}"], topic),
        ):
            assert cli.main(["pipeline", name, *words, c]) == 2, words
            said = capsys.readouterr().err
            assert f"topic '{target}" in said and "' is read, and would be published to: give " in said, words
    read = SourceOptions.parse({"nsqd": nsqd.address, "topic": topic})
    for address, name in ((nsqd.address, f"{topic}-out"), ("127.0.0.1:1", topic)):
        topics.check_targets(read, [Target({"nsqd": address, "topic": name}, "")])
