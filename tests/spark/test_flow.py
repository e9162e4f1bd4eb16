"""Pipelines that are written down: what the file may say, and what comes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.integration.daemons import SPARK_PATIENCE_S
from tests.spark.processes import NsqdProcess, environment
from tests.spark.test_lag import checkpoint

from flintmq import cli
from flintmq.errors import NsqdError
from flintmq.pipeline import file_sinks, flow
from flintmq.pipeline.flow import check_plan, run_plan
from flintmq.pipeline.plan_file import PlanError, read_plan
from flintmq.pipeline.runner import JobFailed, Runner
from flintmq.pipeline.streams import STARVED, CheckpointError, checkpoint_held
from flintmq.pipeline.toml_lines import KeyPath, lines_of_keys

WHOLE = """
name = "flights"
checkpoint = "{directory}/checkpoint"

[[source]]
name = "flights"
schema = "carrier string, delay int"
[source.options]
nsqd = "{nsqd}"
topic = "{topic}"

[[step]]
name = "late"
sql = '''
SELECT offset, json.carrier AS carrier, json.delay AS delay
FROM flights
WHERE json.delay > 0 OR json.delay IS NULL
'''

[[step]]
name = "shouted"
python = "steps.py:shouted"

[[rule]]
name = "is JSON"
of = "late"
drop = "carrier IS NOT NULL"

[[rule]]
name = "below an hour"
of = "late"
expect = "delay < 60"

[[sink]]
from = "shouted"
format = "parquet"
[sink.options]
path = "{directory}/late"

[[sink]]
name = "out"
from = "bodies"
format = "nsq"
[sink.options]
nsqd = "{nsqd}"
topic = "{topic}-late"

[[step]]
name = "bodies"
sql = "SELECT carrier AS body FROM shouted"
"""

FILES = """
name = "files"
checkpoint = "{directory}/checkpoint"

[[source]]
name = "flights"
format = "json"
stream = true
schema = "carrier string, delay int"
options = {{ path = "{directory}/files" }}

[[step]]
name = "late"
sql = "SELECT * FROM flights WHERE delay > 0 OR delay IS NULL"

[[step]]
name = "shouted"
python = "steps.py:shouted"

[[rule]]
name = "has a carrier"
of = "late"
drop = "carrier IS NOT NULL"

[[rule]]
name = "below an hour"
of = "late"
expect = "delay < 60"

[[sink]]
from = "shouted"
format = "parquet"
options = {{ path = "{directory}/late" }}
"""

EMPTY = """
name = "empty"
checkpoint = "{directory}/checkpoint"

[[source]]
name = "flights"
format = "json"
stream = false
schema = "carrier string"
options = {{ path = "{directory}/flights" }}

[[source]]
name = "names"
format = "parquet"
stream = false
options = {{ path = "{directory}/names" }}

[[step]]
name = "joined"
sql = "SELECT names.name FROM flights {how} names ON flights.carrier = names.carrier"

[[rule]]
name = "has a carrier"
of = "flights"
expect = "carrier IS NOT NULL"

[[rule]]
name = "has a name"
of = "names"
expect = "name IS NOT NULL"

[[sink]]
from = "joined"
format = "parquet"
options = {{ path = "{directory}/out" }}
"""

STEPS = """
from pyspark.sql import functions


@functions.udf("string")
def shout(text):
    return text.upper() + "!"


def shouted(spark, views):
    return views["late"].withColumn("carrier", shout("carrier"))
"""


def flight(number: int) -> bytes:
    return json.dumps({"carrier": f"c{number}", "delay": number - 5}).encode()


@pytest.fixture
def plan(nsqd: NsqdProcess, topic: str, tmp_path: Path) -> Path:
    (tmp_path / "steps.py").write_text(STEPS)
    path = tmp_path / "flights.toml"
    path.write_text(WHOLE.format(nsqd=nsqd.address, topic=topic, directory=tmp_path))
    nsqd.publish(topic, [flight(number) for number in range(70)] + [b"no JSON"])
    return path


@pytest.mark.spark
@pytest.mark.slow
def test_a_stream_twice(spark, tmp_path):
    (tmp_path / "steps.py").write_text(STEPS)
    plan, files = tmp_path / "files.toml", tmp_path / "files"
    plan.write_text(FILES.format(directory=tmp_path))
    files.mkdir()
    (files / "1.json").write_bytes(b"\n".join([flight(number) for number in range(70)] + [b"no JSON"]))
    said = "\n".join(check_plan(plan, spark=spark))
    assert f"sink shouted (parquet): a stream that begins in {tmp_path}/checkpoint/shouted, mode append" in said
    assert "rule 'below an hour' of late: expect delay < 60" in said
    assert not (tmp_path / "checkpoint").exists(), "a check runs nothing"

    done = run_plan(plan, spark=spark)
    assert done.written == {"shouted": 64}
    assert done.broken == {("shouted", "has a carrier"): 1, ("shouted", "below an hour"): 5}
    (files / "2.json").write_bytes(flight(7))
    assert run_plan(plan, spark=spark).written == {"shouted": 1}, "it goes on where it was"
    rows = [row for path in (tmp_path / "late").glob("*.parquet") for row in pq.ParquetFile(path).read().to_pylist()]
    assert sorted(row["delay"] for row in rows) == [1, 2, 2, *range(3, 65)]
    assert {row["carrier"] for row in rows} == {f"C{number}!" for number in range(6, 70)}
    assert f"goes on from {tmp_path}/checkpoint/shouted" in "\n".join(check_plan(plan, spark=spark))

    plan.write_text(plan.read_text().replace('expect = "delay < 60"', 'fail = "delay < 60"'))
    (files / "3.json").write_bytes(flight(65))
    with pytest.raises(JobFailed, match=r"rule 'below an hour' of late is broken by \{.*\"delay\":60") as caught:
        run_plan(plan, spark=spark)
    assert str(caught.value).startswith(f"{plan}:{line_of('[[sink]]', plan.read_text())}: sink shouted: ")


BROKEN = """
name = "broken"

[[source]]
name = "flights"
format = "json"
stream = false
schema = "carrier string, delay int"
options = {{ path = "{directory}/flights" }}

[[step]]
name = "made"
python = "steps.py:{function}"

[[rule]]
name = "has a carrier"
of = "made"
fail = "carrier IS NOT NULL"

[[sink]]
from = "made"
format = "parquet"
options = {{ path = "{directory}/out" }}
"""

BROKEN_STEPS = """
from __future__ import annotations

import sys
from dataclasses import dataclass

from pyspark.sql import functions


@dataclass
class Suffix:
    text: str

    def after(self, text: str) -> str:
        return text + self.text


MARK = Suffix("!")


@functions.udf("string")
def shout(text):
    return both(text.upper(), Suffix("?"))


def both(text, suffix):
    return suffix.after(MARK.after(text))


def shouted(spark, views):
    return views["flights"].withColumn("carrier", shout("carrier"))


def kept(spark, views):
    return views["flights"]


def leave(spark, views):
    sys.exit(0)


def leave_at_once(spark, views):
    exit()


def interrupted(spark, views):
    raise KeyboardInterrupt


def sorts(spark, views):
    return raises(min)


def raises(what):
    return what([])


def silent(spark, views):
    raise RuntimeError
"""


@pytest.fixture
def broken(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a plan whose step is that function of BROKEN_STEPS."""
    (tmp_path / "steps.py").write_text(BROKEN_STEPS)
    (tmp_path / "flights").mkdir()
    (tmp_path / "flights" / "1.json").write_text('{"carrier": "a", "delay": 1}\n')

    def write(function: str) -> Path:
        path = tmp_path / "x.toml"
        path.write_text(BROKEN.format(directory=tmp_path, function=function))
        return path

    return write


@pytest.mark.spark
def test_a_step_that_has_dataclasses_and_functions_of_its_own(broken, spark, tmp_path):
    """Annotations are looked up in its module, and workers, which have no such module, run its functions."""
    assert run_plan(broken("shouted"), spark=spark).written == {"made": 1}
    assert pq.read_table(tmp_path / "out").to_pylist() == [{"carrier": "A!?", "delay": 1}]


@pytest.mark.spark
@pytest.mark.parametrize(
    ("function", "at", "said"),
    [
        ("leave", "    sys.exit(0)", "called sys.exit(0)"),
        ("leave_at_once", "    exit()", "called sys.exit()"),
        ("sorts", "    return what(", ": ValueError: min() "),
        ("silent", "    raise RuntimeError", ": RuntimeError"),
    ],
)
def test_what_ends_a_step_is_told_with_its_line(broken, spark, tmp_path, capsys, function, at, said):
    path = broken(function)
    place = f"{path}:{line_of('python', path.read_text())}: steps.py:{function}, line {line_of(at, BROKEN_STEPS)}"
    for look in (check_plan, run_plan):
        with pytest.raises(PlanError) as caught:
            look(path, spark=spark)
        assert str(caught.value).startswith(f"{place}{'' if said.startswith(':') else ' '}{said}")
        assert not str(caught.value).endswith(": ")
    assert not (tmp_path / "out").exists()


@pytest.mark.spark
def test_ctrl_c_in_a_step_is_no_error_of_it(broken, spark):
    with pytest.raises(KeyboardInterrupt):
        check_plan(broken("interrupted"), spark=spark)


@pytest.mark.spark
def test_the_row_that_breaks_a_rule_is_shown_with_its_nulls(broken, spark, tmp_path):
    path = broken("kept")
    (tmp_path / "flights" / "1.json").write_text('{"delay": 1}\n')
    with pytest.raises(PlanError, match=r"'has a carrier' of made is broken by \{\"carrier\":null,\"delay\":1\}"):
        run_plan(path, spark=spark)


BODIES = """
name = "bodies"

[[source]]
name = "bodies"
stream = false
schema = "id bigint, v double, at struct<x: int>, c string"
[source.options]
nsqd = "{nsqd}"
topic = "{topic}"

[[sink]]
from = "bodies"
format = "parquet"
options = {{ path = "{directory}/out" }}
"""


@pytest.mark.spark
def test_a_body_is_one_value_of_json_or_corrupt(spark, nsqd, topic, tmp_path):
    """Whatever follows the first one, at which Spark would stop; the more so what fits a brace or a bracket of ours."""
    whole: list[bytes] = [
        b'{"id": 1}', b' {"id": 1}\r\n\t ', b'{"id": 1, "at": {"x": 1}, "l": [{}, [1]]}\n', b'{"id": 1, "t": "}{]["}',
        b'{"id": 1, "v": NaN}', b"{'id': 1}", b'{"id": 1, "_": {"a": [1]}, "b": 5}', b'{"id": 1, "id": 1}',
        b'{"id": 1, "c": "ab"}',
    ]  # fmt: skip
    corrupt: list[bytes] = [
        b'{"id":1}garbage', b'{"id":1}{"id":2}', b'{"id":1}\n{"id":2}', b'{"id":1}]x', b'{"id":1}}', b'{"id":1}}x',
        b'{"id":1},"b":2', b'{"id":1}, "b": {"id":2}', b'{"id":1},{"id":2}', b'{"id":1},', b',{"id":1}', b'{"id":1}]',
        b'{"at":{"x":1}} }', b'{"id":1', b'garbage{"id":1}', b"}", b"5", b"[1]", b'[{"id":1}]', b'{"id":1},""]',
        b" ",
    ]  # fmt: skip
    mixed, bytes_behind = b'{"id": "x", "v": 2}', b'{"id":1} \xff\xfe'
    nsqd.publish(topic, [*whole, *corrupt, mixed, bytes_behind])
    plan = tmp_path / "x.toml"
    plan.write_text(BODIES.format(nsqd=nsqd.address, topic=topic, directory=tmp_path))
    run_plan(plan, spark=spark)
    found = {row["body"]: row["json"] for row in pq.read_table(tmp_path / "out").to_pylist()}
    assert {(found[body]["id"], found[body]["_corrupt_record"]) for body in whole} == {(1, None)}
    assert (found[whole[2]]["at"], found[whole[-1]]["c"]) == ({"x": 1}, "ab")
    nothing = {"id": None, "v": None, "at": None, "c": None}
    assert {body: found[body] for body in corrupt} == {
        body: {**nothing, "_corrupt_record": body.decode()} for body in corrupt
    }
    assert found[mixed] == {**nothing, "v": 2.0, "_corrupt_record": mixed.decode()}, "what fits is there"
    assert (found[bytes_behind]["id"], found[bytes_behind]["_corrupt_record"]) == (None, '{"id":1} \ufffd\ufffd')
    named = plan.read_text().replace("c string", "_Corrupt_Record string").replace("/out", "/named")
    plan.write_text(named)
    run_plan(plan, spark=spark)
    again = {row["body"]: row["json"] for row in pq.read_table(tmp_path / "named").to_pylist()}
    assert again[corrupt[0]] == {"id": None, "v": None, "at": None, "_Corrupt_Record": corrupt[0].decode()}


@pytest.mark.spark
@pytest.mark.slow
def test_topics_as_a_batch(plan, spark, nsqd, topic, tmp_path):
    said = "\n".join(check_plan(plan, spark=spark))
    assert f"source flights: {topic} partition 0 at {nsqd.address}: 71 messages stored" in said
    assert "offset bigint, carrier string, delay int" in said
    batch = plan.read_text().replace('name = "flights"\nschema', 'name = "flights"\nstream = false\nschema')
    plan.write_text(batch)
    done = run_plan(plan, spark=spark)
    assert done.written == {"shouted": 64, "out": 64}
    counted = {"is JSON": 1, "below an hour": 5}
    assert done.broken == {(sink, rule): count for sink in ("shouted", "out") for rule, count in counted.items()}
    assert sorted(pq.read_table(tmp_path / "late").column("offset").to_pylist()) == list(range(7, 71))
    assert spark.read.format("nsq").options(nsqd=nsqd.address, topic=f"{topic}-late").load().count() == 64


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("how", ["LEFT JOIN", "JOIN"])
def test_a_batch_with_a_view_that_is_empty(spark, tmp_path, how):
    """Spark leaves out what is empty, with the rule of it: that is no reason to fail when the rows are written."""
    (tmp_path / "flights").mkdir()
    (tmp_path / "flights" / "1.json").write_text('{"carrier": "a"}\n{"carrier": "b"}\n')
    spark.createDataFrame([], "carrier string, name string").write.parquet(str(tmp_path / "names"))
    path = tmp_path / "plan.toml"
    path.write_text(EMPTY.format(directory=tmp_path, how=how))
    (build,) = flow._checked(read_plan(path), spark)
    rows = 2 if how == "LEFT JOIN" else 0
    assert next(build.show()) == f"joined (parquet) would get {rows} rows:"
    for times in (1, 2):
        done = run_plan(path, spark=spark)
        assert (done.written, set(done.broken.values())) == ({"joined": rows}, {0})
        assert spark.read.schema("name string").parquet(str(tmp_path / "out")).count() == times * rows


@pytest.mark.spark
@pytest.mark.slow
def test_figures_that_spark_does_not_tell_are_no_failure(spark, tmp_path, monkeypatch, caplog):
    """What was written is written: a run that failed then would be started again, and write it twice."""
    (tmp_path / "flights").mkdir()
    (tmp_path / "flights" / "1.json").write_text('{"carrier": "a"}\n')
    spark.createDataFrame([("a", "A")], "carrier string, name string").write.parquet(str(tmp_path / "names"))
    path = tmp_path / "plan.toml"
    path.write_text(EMPTY.format(directory=tmp_path, how="JOIN"))
    monkeypatch.setattr(flow, "OBSERVED_WITHIN_S", 0)
    (build,) = flow._checked(read_plan(path), spark)
    assert build._observed() == {"rows": {}, "rule_0": {}, "rule_1": {}}, "no action: nothing was observed"
    assert "sink joined: Spark does not tell of how many rows it got" in caplog.text
    assert "sink joined: Spark does not tell of rule 'has a name'" in caplog.text


@pytest.mark.spark
@pytest.mark.slow
def test_a_plan_in_a_thread_with_the_session_of_another(plan, spark, nsqd, topic):
    text = plan.read_text().replace("[source.options]", "stream = false\n[source.options]")
    plan.write_text(text)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run_plan, plan, spark=spark).result().written == {"shouted": 64, "out": 64}
        active = pool.submit(type(spark).getActiveSession).result()
    assert active is None, "the thread is as it was"


@pytest.mark.spark
@pytest.mark.slow
def test_a_dry_run_shows_and_writes_nothing(plan, spark, tmp_path):
    found = [line for sink in read_plan(plan).sinks for line in flow._Build(read_plan(plan), spark, sink, 20).show()]
    assert found[0] == "shouted (parquet) would get 14 rows:"
    assert found[1].startswith("  {'offset': 7, 'carrier': 'C6!', 'delay': 1}")
    assert "out (nsq) would get 14 rows:" in found
    assert not (tmp_path / "late").exists() and not (tmp_path / "checkpoint").exists()


@pytest.mark.spark
def test_a_dry_run_shows_what_is_no_utf8(spark, nsqd, topic, tmp_path):
    nsqd.publish(topic, [b"a\xff"])
    path = tmp_path / "x.toml"
    step = '[[step]]\nname = "texts"\nsql = "SELECT CAST(body AS STRING) AS text FROM bodies"\n\n[[sink]]'
    text = BODIES.format(nsqd=nsqd.address, topic=topic, directory=tmp_path).replace("[[sink]]", step)
    path.write_text(text.replace('from = "bodies"', 'from = "texts"'))
    plan = read_plan(path)
    assert [*flow._Build(plan, spark, plan.sinks[0], 20).show()][1] == "  {'text': 'a\ufffd'}"


@pytest.mark.spark
@pytest.mark.slow
def test_a_dry_run_of_some_of_many_messages_is_quiet(plan, nsqd, topic):
    """No worker finds that Spark has closed its connection before it was done."""
    nsqd.publish(topic, [flight(number) for number in range(5000)])
    done = subprocess.run(
        [sys.executable, "-m", "flintmq", "pipeline", "run", str(plan), "--dry-run", "--rows=20"],
        capture_output=True, text=True, timeout=SPARK_PATIENCE_S, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "shouted (parquet) would get 14 rows:" in done.stdout
    assert "Error" not in done.stderr


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("json.carrier AS carrier", "json.carier AS carrier", "sql = '''", "carier"),
        ('drop = "carrier IS NOT NULL"', 'drop = "carriage IS NOT NULL"', "drop =", "carriage"),
        ("steps.py:shouted", "steps.py:whispered", "python =", "AttributeError: .*whispered"),
        ("steps.py:shouted", "nowhere.py:shouted", "python =", "there is no file"),
        ('topic = "', 'topik = "', "[source.options]", "topik"),
        ('name = "out"', 'name = "out"\nmode = "overwrite"', "mode =", "a stream, which has no mode overwrite"),
        ("SELECT carrier AS body", "SELECT max(carrier) AS body", 'format = "nsq"', "watermark"),
        ("SELECT carrier AS body", "SELECT 1 AS body; SELECT carrier AS body", "sql = \"SELECT", "Syntax error"),
        ("SELECT carrier AS body", "SELECT carrier", 'format = "nsq"', "there must be a column body"),
        ('format = "parquet"', 'format = "parqet"', 'format = "parqet"', "Failed to find the data source: parqet"),
        ("schema =", 'format = "nsqq"\nschema =', "[source.options]", "Failed to find the data source: nsqq"),
        ("delay int", "delay int, Delay string", "schema =", "schema has two fields Delay"),
        ("carrier string, delay int", "bigint", "schema =", "schema is a list of fields"),
        ("delay int", "delay int, at array<struct<x: int, X: int>>", "schema =", "schema has two fields X"),
        ("delay int", "delay inch", "schema =", "INCH"),
        ('path = "', 'paths = "', "[sink.options]", "format parquet needs the option path"),
        ('path = "', 'compression = "zsttd"\npath = "', 'format = "parquet"', "codec zsttd is not available"),
        ('format = "parquet"', 'format = "text"', 'format = "text"', "only a single column"),
        ('format = "parquet"', 'format = "memory"', 'format = "memory"', "goes on from no checkpoint"),
        ('/checkpoint"', '/steps.py"', "checkpoint =", "steps.py is a file; name a directory"),
        ('name = "out"', 'name = "out"\nmode = "update"', "mode =", "a topic can only be appended to"),
        ('name = "out"', 'name = "out"\nmode = "complete"', "mode =", "a topic can only be appended to"),
        ('format = "parquet"', 'format = "parquet"\nmode = "update"', "mode =", "a stream can only append to files"),
        ('topic = "', 'startingOffsets = "latest"\ntopic = "', "[source.options]", "latest needs channel"),
        ('topic = "', 'endingTimestamp = "1"\ntopic = "', "[source.options]", "a stream has no end"),
        ('topic = "', 'channel = "c"\ntopic = "', "[source.options]",
         r"channel c holds messages for one reader alone, .* 2 times, for shouted and out: write a \[\[source\]\]"),
        ('topic = "', 'channel = "c"\ndeferred = "due"\nspoolLocation = "x"\ntopic = "', "[source.options]",
         r"channel c holds .* 2 times, for shouted and out: .* with a channel and a spoolLocation of its own"),
    ],
)  # fmt: skip
def test_what_spark_refuses_has_a_line(plan, spark, old, new, line, said):
    text = plan.read_text()
    assert old in text
    plan.write_text(text.replace(old, new, 1))
    for look in (check_plan, run_plan):
        with pytest.raises(PlanError, match=said) as caught:
            look(plan, spark=spark)
        assert f":{line_of(line, plan.read_text())}: " in str(caught.value)


@pytest.mark.spark
def test_a_step_that_is_no_query_is_not_run(spark, tmp_path):
    """By a check and a dry run as little as by a run: Spark would run it at once, once for each sink."""
    plan, made = stream_of("first", tmp_path), tmp_path / "made"
    text = plan.read_text()
    assert "sql" not in text
    insert = f"INSERT OVERWRITE DIRECTORY '{made}' USING parquet SELECT * FROM numbers"
    before = spark.conf.get("spark.sql.shuffle.partitions")
    for sql in (
        f"INSERT OVERWRITE DIRECTORY '{made}' USING parquet SELECT 1 AS x",
        f"WITH a AS (SELECT 1 AS x) {insert}",
        f"FROM (SELECT 1 AS x) INSERT OVERWRITE DIRECTORY '{made}' USING parquet SELECT x",
        "FROM numbers INSERT INTO a SELECT * INSERT INTO b SELECT *",
        "INSERT INTO nowhere SELECT 1",
        "MERGE INTO a USING b ON a.x = b.x WHEN MATCHED THEN DELETE",
        f"CREATE TABLE made USING parquet LOCATION '{made}' AS SELECT 1 AS x",
        "CREATE OR REPLACE TEMP VIEW numbers AS SELECT 1 AS number",
        "DROP VIEW numbers",
        "SET spark.sql.shuffle.partitions = 3",
        "CACHE TABLE numbers",
        f"EXECUTE IMMEDIATE \"INSERT OVERWRITE DIRECTORY '{made}' USING parquet SELECT 1 AS x\"",
        "CALL catalog.clean()",
        "EXPLAIN SELECT 1",
        "SHOW TABLES",
        f"BEGIN INSERT OVERWRITE DIRECTORY '{made}' USING parquet SELECT 1 AS x; END",
    ):
        plan.write_text(f"{text}\n[[step]]\nname = \"it\"\nsql = '''{sql}'''\n")
        with pytest.raises(PlanError, match=r"the sql of step it is a statement, .* write a query") as caught:
            check_plan(plan, spark=spark)
        assert f":{line_of('sql =', plan.read_text())}: " in str(caught.value), sql
        assert not made.exists(), sql
    refused_at(plan, "sql =", "write a query", spark)
    with pytest.raises(PlanError, match="write a query"):
        list(flow._shown(read_plan(plan), spark, 20))
    assert not made.exists() and spark.conf.get("spark.sql.shuffle.partitions") == before
    for sql in (
        "WITH a AS (SELECT 1 AS x) SELECT * FROM a -- ; DROP VIEW numbers",
        "FROM numbers |> WHERE number > 1",
        "(TABLE numbers) UNION ALL VALUES (2); -- INSERT INTO a",
        "SELECT 'INSERT INTO a' AS `INSERT INTO`",
    ):
        plan.write_text(f"{text}\n[[step]]\nname = \"it\"\nsql = '''{sql}'''\n")
        assert check_plan(plan, spark=spark), sql


@pytest.mark.spark
def test_sql_is_read_with_what_the_steps_before_it_have_set(spark, tmp_path):
    """It may be no SQL until then, or no query any more."""
    plan = stream_of("first", tmp_path)
    text = plan.read_text()
    (tmp_path / "steps.py").write_text(
        "def prepared(spark, views):\n"
        "    spark.conf.set('day', '2026-11-30')\n"
        "    spark.conf.set('begin', 'DROP VIEW numbers --')\n"
        "    spark.conf.set('spark.sql.ansi.enabled', 'true')\n"
        "    spark.conf.set('spark.sql.ansi.doubleQuotedIdentifiers', 'true')\n"
        "    return views['numbers']\n"
    )

    def step(sql: str) -> None:
        python = '[[step]]\nname = "prepared"\npython = "steps.py:prepared"'
        plan.write_text(f"{text}\n{python}\n[[step]]\nname = \"it\"\nsql = '''{sql}'''\n")

    settings = ("day", "begin", "spark.sql.ansi.enabled", "spark.sql.ansi.doubleQuotedIdentifiers")
    before = {name: spark.conf.get(name, None) for name in settings}

    def forget() -> None:
        for name, value in before.items():
            if value is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, value)

    try:
        for sql in ("SELECT date'${day}' AS day FROM prepared", 'SELECT number AS "my number" FROM prepared'):
            forget()
            step(sql)
            assert check_plan(plan, spark=spark), sql
        for sql, said in (
            ("${begin} SELECT number FROM prepared", "the sql of step it is a statement, .* write a query"),
            ("SELECT date'${night}'", "INVALID_TYPED_LITERAL"),
        ):
            forget()
            step(sql)
            with pytest.raises(PlanError, match=said) as caught:
                check_plan(plan, spark=spark)
            assert f":{line_of('sql =', plan.read_text())}: " in str(caught.value), sql
    finally:
        forget()


SINKS = """
name = "pipeline"
checkpoint = "{directory}/checkpoint"

[[source]]
name = "first"
[source.options]
nsqd = "{nsqd}"
topic = "{topic}"
channel = "c"

[[source]]
name = "second"
[source.options] # 2
nsqd = "{nsqd}"
topic = "{topic}"
channel = "d"

[[step]]
name = "bodies"
sql = "SELECT body FROM first"

[[step]]
name = "kept"
sql = "SELECT topic, body FROM second"

[[sink]]
from = "bodies"
format = "noop"

[[sink]]
from = "kept"
format = "nsq"
[sink.options]
nsqd = "{nsqd}"
topic = "{topic}-kept"
"""


@pytest.mark.spark
def test_a_source_for_each_sink(spark, nsqd, topic, tmp_path):
    """Each has a channel of its own, and no topic is published to that is read, however its nsqd is named."""
    nsqd.publish(topic, [b"1", b"2"])
    plan = tmp_path / "x.toml"
    text = SINKS.format(nsqd=nsqd.address, topic=topic, directory=tmp_path)
    plan.write_text(text)
    assert "begins in" in "\n".join(check_plan(plan, spark=spark))
    assert json.loads(nsqd.get(f"/stats?format=json&topic={topic}"))["topics"][0]["channels"] == [], "made by a check"
    localhost = nsqd.address.replace("127.0.0.1", "localhost")
    sink = '[sink.options]\nnsqd = "'
    start = "startingOffsets = '{%s}'\nchannel"
    itself = f"from source second: topic '{topic}' is read, and would be published to: name another topic"
    for old, new, line, said in (
        ('channel = "d"', 'channel = "c"', "[source.options] # 2", f"channel c of topic {topic} holds .* source first"),
        (f'{topic}-kept"', f'{topic}"', "[sink.options]", itself),
        (f'topic = "{topic}-kept"', "", "[sink.options]", itself),
        (f'{sink}{nsqd.address}"\ntopic = "{topic}-kept"', f'{sink}{localhost}"\ntopic = "{topic}"', "[sink.options]",
         itself),
        ("channel", start % f'"{topic}": {{"0": 99}}', "[source.options]", "/0 has no 99 yet; there is "),
        ("channel", start % f'"{topic}": {{"7": 1}}', "[source.options]", f"topic '{topic}' has no '7'"),
    ):  # fmt: skip
        assert old in text
        plan.write_text(text.replace(old, new, 1))
        for look in (check_plan, run_plan):
            with pytest.raises(PlanError, match=said) as caught:
                look(plan, spark=spark)
            assert f":{line_of(line, plan.read_text())}: " in str(caught.value), str(caught.value)
    assert not (tmp_path / "checkpoint").exists()


STREAMS = """
name = "{name}"
checkpoint = "{directory}/{name}"

[[source]]
name = "numbers"
format = "json"
stream = true
schema = "number int"
options = {{ path = "{directory}/{name}-in" }}

[[sink]]
from = "numbers"
format = "parquet"
[sink.options]
path = "{directory}/out"
"""


def stream_of(name: str, directory: Path) -> Path:
    """Write a pipeline from a directory of its own into the same one as the others, and a number for it to read."""
    (directory / f"{name}-in").mkdir()
    (directory / f"{name}-in" / "1.json").write_text('{"number": 1}')
    plan = directory / f"{name}.toml"
    plan.write_text(STREAMS.format(name=name, directory=directory))
    return plan


def as_batch(plan: Path) -> Callable[[str], int]:
    """Make a pipeline read what there is, all at once; what is returned writes it with a mode of its sink."""
    text = plan.read_text().replace("stream = true", "stream = false")
    return lambda mode: plan.write_text(text.replace('format = "parquet"', f'format = "parquet"\nmode = "{mode}"'))


def refused_at(plan: Path, line: str, said: str, spark: Any) -> None:
    for look in (check_plan, run_plan):
        with pytest.raises(PlanError, match=said) as caught:
            look(plan, spark=spark)
        assert f":{line_of(line, plan.read_text())}: " in str(caught.value)


@pytest.mark.spark
@pytest.mark.slow
def test_a_directory_that_has_micro_batches_of_another_query(spark, tmp_path):
    """Spark would take ours of the same number for done, and nobody would have the rows."""
    first, second = (stream_of(name, tmp_path) for name in ("first", "second"))
    place, checkpoint = tmp_path / "first", tmp_path / "first" / "numbers"
    assert run_plan(first, spark=spark).written == {"numbers": 1}
    said = "it has micro-batches up to 0 of another query or checkpoint; Spark would leave out ours: name another dir"
    refused_at(second, "path =", said, spark)
    assert not any((tmp_path / "second").glob("numbers/offsets/*")), "nothing was read"

    place.rename(tmp_path / "aside")  # as rm -r does
    refused_at(first, "path =", said, spark)
    (tmp_path / "aside").rename(place)

    (checkpoint / "commits" / "0").unlink()  # as after a kill between the two notes
    assert check_plan(first, spark=spark)
    planned, listed = checkpoint / "offsets" / "0", tmp_path / "out" / "_spark_metadata" / "0"
    note, status = planned.read_text(), listed.stat()
    os.utime(listed, (status.st_atime - 3600, status.st_mtime - 3600))  # as of a copy: the checkpoint came later
    assert check_plan(first, spark=spark)
    os.utime(listed, (status.st_atime, status.st_mtime))
    (planned.parent / ".0.crc").unlink()
    lines = note.splitlines()
    noted = json.loads(lines[1])
    noted["batchTimestampMs"] += 3_600_000
    lines[1] = json.dumps(noted)
    planned.write_text("\n".join(lines))
    refused_at(first, "path =", said, spark)  # what is there was written long before this one was planned
    planned.write_text(note)
    (tmp_path / "first-in" / "2.json").write_text('{"number": 2}')
    run_plan(first, spark=spark)
    assert sorted(row["number"] for row in spark.read.parquet(str(tmp_path / "out")).collect()) == [1, 2]

    more = {number: tmp_path / "out" / "_spark_metadata" / f"{number}" for number in (8, 9)}
    more[8].touch()
    more[9].with_suffix(".compact").touch()
    refused_at(second, "path =", "up to 9 of another", spark)


@pytest.mark.spark
@pytest.mark.slow
def test_a_batch_into_the_directory_of_a_stream(spark, tmp_path):
    """Spark would not read its rows there, and what overwrites all takes the list of files from the stream."""
    plan = stream_of("first", tmp_path)
    run_plan(plan, spark=spark)
    batch = as_batch(plan)
    for mode in ("append", "overwrite"):
        batch(mode)
        refused_at(plan, "path =", "a stream has written there, and Spark reads the files alone that _spark_met", spark)
    batch("errorifexists")
    refused_at(plan, "mode =", "out already exists, and the mode is errorifexists", spark)
    batch("ignore")
    assert run_plan(plan, spark=spark).written == {"numbers": 0}
    assert spark.read.parquet(str(tmp_path / "out")).count() == 1


@pytest.mark.spark
def test_a_batch_beside_a_stream_that_begins(spark, tmp_path):
    """It has the directory before it has written there; a batch that wants no directory finds none of ours."""
    plan, out = stream_of("first", tmp_path), tmp_path / "out"
    batch = as_batch(plan)
    batch("errorifexists")
    assert run_plan(plan, spark=spark).written == {"numbers": 1}
    assert not (out / file_sinks.LOCK).exists()
    for mode in ("append", "overwrite"):
        batch(mode)
        with file_sinks.sink_held(f"file:{out}"), pytest.raises(PlanError, match="another pipeline writes to it"):
            run_plan(plan, spark=spark)
    batch("append")
    assert run_plan(plan, spark=spark).written == {"numbers": 1}
    assert spark.read.parquet(str(out)).count() == 2
    batch("overwrite")
    assert run_plan(plan, spark=spark).written == {"numbers": 1}
    assert spark.read.parquet(str(out)).count() == 1


@pytest.mark.spark
@pytest.mark.slow
def test_a_stream_into_a_directory_that_has_files(spark, tmp_path):
    """Nobody would read them any more; what Spark does not read anyway may be there."""
    plan, out = stream_of("first", tmp_path), tmp_path / "out"
    spark.range(3).write.parquet(str(out))
    refused_at(plan, "path =", "it has part-.* no stream has written; .* reads the files alone .*: name another", spark)
    assert spark.read.parquet(str(out)).count() == 3
    for path in out.glob("*part-*"):
        path.unlink()
    for name, said in (("_day=1", "it has _day=1, which"), ("_temporary", "a batch writes there, or was killed")):
        (out / name).mkdir()
        refused_at(plan, "path =", said, spark)
        (out / name).rmdir()
    assert (out / "_SUCCESS").exists()
    assert run_plan(plan, spark=spark).written == {"numbers": 1}
    assert spark.read.parquet(str(out)).count() == 1


@pytest.mark.spark
def test_places_where_nothing_can_be_written(spark, tmp_path, monkeypatch):
    """A check says it, and makes nothing; a run does before it claims the checkpoint."""
    plan, file, loop = stream_of("first", tmp_path), tmp_path / "file", tmp_path / "loop"
    file.touch()
    loop.symlink_to(loop)
    text, out, place = plan.read_text(), f'path = "{tmp_path}/out"', f'checkpoint = "{tmp_path}/first"'
    for old, new, line, said in (
        (out, f'path = "{file}"', "path =", f"{file} is a file: name another directory"),
        (out, f'path = "{file}/within/it"', "path =", f"{file} is a file: name"),
        (out, f'path = "{loop}/within"', "path =", f"{loop} is a link that leads nowhere: name another directory"),
        (place, f'checkpoint = "{loop}"', "checkpoint =", f"{loop} is a link that leads nowhere; name"),
        (out, 'path = "/proc/nope"', "path =", "/proc .*: name another directory"),
        (place, 'checkpoint = "/proc/nope"', "checkpoint =", "/proc .*; name a directory of this pipeline alone"),
    ):
        assert old in text
        plan.write_text(text.replace(old, new, 1))
        refused_at(plan, line, said, spark)
    second = stream_of("second", tmp_path)
    batch = as_batch(second)
    batch("append")
    batched = second.read_text().replace(out, f'path = "{file}"')
    second.write_text(batched)
    refused_at(second, "path =", f"{file} is a file", spark)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        plan.write_text(text)
        refused_at(plan, "checkpoint =", f"{tmp_path} cannot be written to; name", spark)
    assert not (tmp_path / "first").exists() and not (tmp_path / "out").exists()
    second.write_text(batched.replace('mode = "append"', 'mode = "ignore"'))
    assert check_plan(second, spark=spark), "what is there is left as it is"
    second.write_text(batched.replace('mode = "append"', 'mode = "overwrite"'))
    assert run_plan(second, spark=spark).written == {"numbers": 1}, "and is replaced"


@pytest.mark.spark
def test_two_sinks_with_one_directory(spark, tmp_path):
    plan = stream_of("first", tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    text = plan.read_text()
    paths = (tmp_path / "out", f"{tmp_path}/out/", os.path.relpath(tmp_path / "out"), f"file://{tmp_path}/link")
    for path in paths:
        more = f'[[sink]]\nname = "again"\nfrom = "numbers"\nformat = "json"\noptions = {{ path = "{path}" }}\n'
        plan.write_text(f"{text}\n{more}")
        refused_at(plan, f'options = {{ path = "{path}"', "sink numbers writes to this directory", spark)


@pytest.mark.spark
def test_a_sink_does_not_remove_what_another_one_has_written(spark, tmp_path):
    plan = stream_of("first", tmp_path)
    streamed = plan.read_text()
    as_batch(plan)("append")
    batched = plan.read_text()
    more = '\n[[sink]]\nname = "again"\nfrom = "{}"\nformat = "json"\nmode = "overwrite"\n{}\n'
    beside = f'''
        [[source]]
        name = "beside"
        format = "json"
        schema = "number bigint"
        options = {{ path = "{tmp_path}/first-in" }}
    '''
    within, around = f'options = {{ path = "{tmp_path}/out/b" }}', f'options = {{ path = "{tmp_path}/x/.." }}'
    for text, view, path in (
        (batched, "numbers", f'options = {{ path = "{tmp_path}/out" }}'),
        (batched, "numbers", around),
        (streamed + beside, "beside", around),
    ):
        plan.write_text(text + more.format(view, path))
        refused_at(plan, path, "sink numbers writes to .*/out, which mode overwrite would remove", spark)
    dynamic = around.replace(" }", ', partitionOverwriteMode = "DYNAMIC" }')
    for path in (within, dynamic):
        plan.write_text(batched + more.format("numbers", path))
        assert check_plan(plan, spark=spark), "nothing of the other one is removed"


@pytest.mark.spark
def test_one_run_at_a_time(spark, tmp_path):
    """A second one with the same checkpoint, or with another and the same directory, is refused; the first goes on."""
    plan = stream_of("first", tmp_path)
    place = tmp_path / "first"
    with checkpoint_held(place), pytest.raises(CheckpointError, match=f"{place}: another job runs with it"):
        run_plan(plan, spark=spark)
    with file_sinks.sink_held(f"file:{tmp_path}/out"):
        assert check_plan(plan, spark=spark), "a check changes nothing"
        with pytest.raises(PlanError, match="another pipeline writes to it") as caught:
            run_plan(plan, spark=spark)
    assert f":{line_of('path =', plan.read_text())}: " in str(caught.value)
    assert run_plan(plan, spark=spark).written == {"numbers": 1}


class Starved(Runner):
    """Spark's Python does not come in time, as often as ``times``, when a query has done what there is."""

    def __init__(self, spark: Any, times: int) -> None:
        super().__init__(spark=spark)
        self.times = times

    def follow(self, queries, work, on_batch=None, beside=()) -> None:
        super().follow(queries, work, on_batch, beside)
        self.times -= 1
        if self.times >= 0:
            raise JobFailed(f"{STARVED}.")


@pytest.mark.spark
def test_a_busy_machine_is_waited_for(spark, tmp_path, caplog):
    plan = read_plan(stream_of("first", tmp_path))
    runner = Starved(spark, 2)
    assert flow._run_plan(plan, runner, 0).written == {"numbers": 1}
    assert runner.times == -1
    assert caplog.text.count(f"{STARVED}.; this machine is busy, going on from the checkpoint") == 2


@pytest.mark.spark
def test_a_checkpoint_has_one_lock_however_it_is_written(spark, tmp_path, monkeypatch):
    plan, place = stream_of("first", tmp_path), tmp_path / "first"
    (tmp_path / "link").symlink_to(place)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    text = plan.read_text()
    for name in (f"file:{place}", f"file://{place}", f"{place}/", str(tmp_path / "link")):
        plan.write_text(text.replace(f'checkpoint = "{place}"', f'checkpoint = "{name}"'))
        with checkpoint_held(place), pytest.raises(CheckpointError, match=f"{place}: another job runs with it"):
            run_plan(plan, spark=spark)
    plan.write_text(text.replace(f'checkpoint = "{place}"', f'checkpoint = "file:{place}"'))
    assert f"begins in file:{place}/numbers" in "\n".join(check_plan(plan, spark=spark))
    assert run_plan(plan, spark=spark).written == {"numbers": 1}
    assert f"goes on from file:{place}/numbers" in "\n".join(check_plan(plan, spark=spark))
    assert not any(Path.cwd().iterdir()), "and no directory file:"
    for url in ("hdfs://127.0.0.1:1/ck", "hdfs://127.0.0.1:1/data/x"):
        assert file_sinks.local_directory(file_sinks.directory_of(spark, url)) is None
    plan.write_text(text.replace(f'checkpoint = "{place}"', 'checkpoint = "nowhere:/ck"'))
    refused_at(plan, "checkpoint =", "nowhere", spark)


def test_a_topic_that_is_nowhere(nsqd, topic, tmp_path, capsys):
    """Refused before Spark is started, unless a query has read it."""
    plan = tmp_path / "x.toml"
    plan.write_text(WHOLE.format(nsqd=nsqd.address, topic=topic, directory=tmp_path))
    where = f"E_TOPIC_NOT_EXIST {plan}:{line_of('[source.options]', plan.read_text())}: no nsqd of {nsqd.address} has"
    for words in (["run"], ["run", "--wait-for-topic=1ms"], ["run", "--dry-run"], ["check"]):
        assert cli.main(["pipeline", words[0], str(plan), *words[1:]]) == 1, words
        waited = " after 0.001 s" if len(words) > 1 and "wait" in words[1] else ""
        assert f"{where} topic '{topic}'{waited}. --wait-for-topic waits" in capsys.readouterr().err, words
    checkpoint(tmp_path / "checkpoint" / "out", [{"_log": 2, topic: {"0/00000000000000aa": 5}}])
    text = plan.read_text()
    for url in ("", "file:", "file://"):
        plan.write_text(text.replace('checkpoint = "', f'checkpoint = "{url}'))
        flow._await_topics(read_plan(plan), Runner())
    with pytest.raises(NsqdError, match=f"has topic '{topic}'"):
        flow._await_topics(read_plan(plan), Runner(), is_dry=True)
    plan.write_text(plan.read_text().replace(f'topic = "{topic}"', f'topic = "{topic}-2"'))
    with pytest.raises(NsqdError, match=f"has topic '{topic}-2'"):
        flow._await_topics(read_plan(plan), Runner())


def line_of(text: str, whole: str) -> int:
    """Return the number of the line that begins with ``text``."""
    return [line.startswith(text) for line in whole.splitlines()].index(True) + 1


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("[[step]]\nname", "[[stepp]]\nname", "[[stepp]]", "there is no stepp; did you mean step"),
        ('name = "flights"\ncheckpoint', 'nam = "flights"\ncheckpoint', "nam =", "there is no nam; did you mean name"),
        ("[[step]]\nname", "[[step]\nname", "[[step]", "it is no TOML: "),
        ('checkpoint = "', 'trigger = "5 parsecs"\ncheckpoint = "', "trigger", "trigger is"),
        ('checkpoint = "', 'trigger = "0.5ms"\ncheckpoint = "', "trigger", "trigger is of whole milliseconds"),
        ('checkpoint = "', 'trigger = "9999999999999h"\ncheckpoint = "', "trigger", "and at most 8784h; not '9999"),
        ('checkpoint = "', f'trigger = "{"9" * 5000}h"\ncheckpoint = "', "trigger", "trigger is"),
        ('checkpoint = "x"', "", "", "checkpoint, a directory of this pipeline alone"),
        ("schema =", "shema =", "shema", "[[source]] has no shema; did you mean schema"),
        ('of = "late"', 'of = "lates"', 'of = "lates"', "there is no view lates; there is flights, late, "),
        ('drop = "carrier', 'forbid = "carrier', "forbid", "[[rule]] has no forbid"),
        ('drop = "carrier IS NOT NULL"', "", "[[rule]]", "a rule needs one of expect, drop and fail"),
        ('name = "shouted"', 'name = "late" # 2', 'name = "late" # 2', "there are two views late"),
        ('name = "shouted"', 'name = "Late" # 2', 'name = "Late" # 2',
         "there are two views Late and late, which differ only in case (line 13); give each a name of its own"),
        ('name = "shouted"', 'name = "FLIGHTS"', 'name = "FLIGHTS"',
         "there are two views FLIGHTS and flights, which differ only in case (line 6)"),
        ('name = "out"', 'name = "shouted" # 2', 'name = "shouted" # 2',
         "there are two sinks shouted (line 34); give each a name"),
        ('name = "out"', 'name = "Shouted"', 'name = "Shouted"', "there are two sinks Shouted and shouted, which"),
        ('name = "out"', 'mode = "upsert"', "mode", "mode is one of append"),
        ('format = "parquet"', 'form = "nsq"', "form =", "[[sink]] has no form"),
        ('python = "steps.py:shouted"', "", "", "step shouted needs either sql or python"),
        ('path = "', 'checkpointLocation = "', "[sink.options]", "say checkpoint once"),
        ('path = "', 'path = "a\\u0000b', "path =", r"a path has no character U+0000, as 'a\x00bx/late' does"),
        ('checkpoint = "', 'checkpoint = "\\u0000', "checkpoint =", "a path has no character U+0000"),
        ("topic = ", "topic = [1]\n#", "topic = [1]", "options: topic is a text, a number"),
        ("[source.options]", "options = 5\n[spark.conf]", "options = 5", "options is a table, [source.options]"),
        ("[[source]]", "[spark]\nconf = 5\n[[source]]", "conf = 5", "conf is a table, [spark.conf]"),
        ("[[source]]", '[spark]\nconf = { x = "1" }\n[[source]]', "conf = {", "x: names of Spark settings begin with"),
        ("[[source]]", "[spark]\nmasters = 5\n[[source]]", "masters", "[spark] has no masters; did you mean master"),
        ("[[source]]", "spark = 5\n[[source]]", "spark = 5", "spark is a table, [spark]"),
        ('[[source]]\nname = "flights"', '[["source"]]\nnam = "flights"', "nam =", "[[source]] has no nam"),
        ('schema = "', 'watermark = 5\nschema = """\\\n[x]\n" \\""" """ # " \n#"', "watermark = 5", "watermark is ["),
        ('schema = "', "schema = '''x\n[x]\ny = 1'''\nstream = 5\n#", "stream = 5", "stream is true or false"),
        ("schema =", "#  it's \"\"\" here and ''' here\nshema =", "shema =", "[[source]] has no shema"),
        ("schema =", '"sh\\u0065ma" =', '"sh', "[[source]] has no shema"),
        ("name = ", "x = " + 5000 * "[" + 5000 * "]" + "\nname = ", "", "nested too deeply"),
        ('name = "below an hour"', 'name = "is JSON" # 2', 'name = "is JSON" # 2', "there are two rules 'is JSON'"),
    ],
)  # fmt: skip
def test_what_the_file_may_say(tmp_path, old, new, line, said):
    path = tmp_path / "x.toml"
    text = WHOLE.format(nsqd="127.0.0.1:4150", topic="t", directory="x").replace('"x/checkpoint"', '"x"')
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(PlanError) as caught:
        read_plan(path)
    number = f"{line_of(line, path.read_text())}: " if line else ""
    assert str(caught.value).startswith(f"{path}:") and f":{number}" in str(caught.value) and said in str(caught.value)


def test_sources_in_an_array_have_lines(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text(
        'name = "x"\nsource = [{ name = "a" },\n  { name = "b", options = { x = """\n""", topic = [1] } }]\n'
    )
    with pytest.raises(PlanError, match=":4: options: topic is a text"):
        read_plan(path)
    path.write_text(path.read_text().replace('name = "b"', 'schema = "x int"'))
    with pytest.raises(PlanError, match=r":3: \[\[source\]\] needs name"):
        read_plan(path)


ODD = '''
name = "a" # """ and " in a comment
[spark.conf]
"spark.x" = "1"
[spark]
jvm = """
[[source]]
b = 1 \\""" ""\\
"""""
'k' = \'\'\'x
= \'\'\'
[["source"]]
name = 'a\\'
"na\\u006de2" = 1.5
at = 1979-05-27 07:32:00
l = [ [1, 2], ["]", "#"], # c ]
  { x = 1,   y.z = [
  { q = 1 } ] },
]
[source . options]
a.b.c = 1
a.b.d = {}
[[ source ]]
[source.options]
topic = [1]
[[source.deep]]
[[source.deep]]
x = "\\u2028\N{LINE SEPARATOR}"
[[step]]
name = ""
'''


def paths_of(value: object, path: KeyPath = ()) -> Iterator[KeyPath]:
    """All that has a line: keys, and tables in arrays."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield (*path, name)
            yield from paths_of(each, (*path, name))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            if isinstance(each, dict):
                yield (*path, number)
            yield from paths_of(each, (*path, number))


def test_where_the_keys_of_an_odd_file_are():
    found = lines_of_keys(ODD, 10)
    assert set(found) == {*paths_of(tomllib.loads(ODD))}
    lines = ODD.split("\n")
    for path, line in found.items():
        if isinstance(path[-1], str) and path[-1] not in ("source", "spark", "name2", "deep", "step"):
            assert path[-1] in lines[line - 1], path
    assert {path: found[path] for path in found if path[-1] in ("source", "spark", "deep", "name2", 0, 1, 2)} == {
        ("spark",): 5, ("source",): 12, ("source", 0): 12, ("source", 0, "name2"): 14, ("source", 0, "l", 2): 17,
        ("source", 0, "l", 2, "y", "z", 0): 18, ("source", 1): 23, ("source", 1, "deep"): 26,
        ("source", 1, "deep", 0): 26, ("source", 1, "deep", 1): 27, ("step", 0): 29,
    }  # fmt: skip
    assert lines_of_keys(ODD, 3) == {path: line for path, line in found.items() if len(path) <= 3}
    assert lines_of_keys(ODD.replace("\n", "\r\n"), 10) == found


@pytest.mark.parametrize(
    ("text", "milliseconds"), [("1.5m", 90_000), ("0.25 h", 900_000), ("0s", 0), ("250ms", 250), ("8784h", 31622400000)]
)
def test_how_often_in_whole_milliseconds(tmp_path, text, milliseconds):
    """Spark takes no fraction of a minute."""
    path = tmp_path / "x.toml"
    whole = WHOLE.format(nsqd="127.0.0.1:4150", topic="t", directory="x")
    path.write_text(whole.replace('checkpoint = "', f'trigger = "{text}"\ncheckpoint = "'))
    assert read_plan(path).trigger == {"processingTime": f"{milliseconds} milliseconds"}


def test_the_file_of_the_page_is_one(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text()
    (tmp_path / "x.toml").write_text(text.partition("```toml\n")[2].partition("```")[0])
    plan = read_plan(tmp_path / "x.toml")
    assert [source.watermark for source in plan.sources] == [("timestamp", "10 minutes")]
    assert (plan.conf, plan.trigger) == ({"spark.driver.memory": "2g"}, {"availableNow": True})
    assert [(rule.kind, rule.of) for rule in plan.rules] == [("drop", "late")]


def test_wrong_words(tmp_path, capsys):
    assert cli.main(["pipeline", "run"]) == 2
    assert "give the file of the pipeline: flintmq pipeline run x.toml" in capsys.readouterr().err
    assert cli.main(["pipeline", "check", str(tmp_path / "none.toml")]) == 2
    assert "none.toml: it cannot be read: No such file" in capsys.readouterr().err
    (tmp_path / "latin.toml").write_bytes(b'name = "a"\n# \xe9\n')
    with pytest.raises(PlanError, match=":2: it is not UTF-8"):
        read_plan(tmp_path / "latin.toml")


def test_a_file_with_a_byte_order_mark(tmp_path):
    """Its first line is as good as without one, and lines are counted from there."""
    path, text = tmp_path / "x.toml", WHOLE.format(nsqd="127.0.0.1:4150", topic="t", directory="x").strip()
    path.write_text(text, encoding="utf-8-sig")
    assert text.startswith("name = ") and read_plan(path).name == "flights"
    path.write_text(text.replace("name = ", "nam = ", 1), encoding="utf-8-sig")
    with pytest.raises(PlanError, match=":1: there is no nam; did you mean name"):
        read_plan(path)
    path.write_bytes(b"\xef\xbb\xbf# a\n\xe9")
    with pytest.raises(PlanError, match=":2: it is not UTF-8"):
        read_plan(path)


def test_names_of_views_in_any_case(tmp_path):
    """As in SQL; a sink has the directory in the checkpoint of the view's own name, in whatever case it says that."""
    path, text = tmp_path / "x.toml", WHOLE.format(nsqd="127.0.0.1:4150", topic="t", directory="x")
    path.write_text(text.replace('from = "shouted"', 'from = "SHOUTED"').replace('of = "late"', 'of = "Late"'))
    plan = read_plan(path)
    assert [(sink.name, sink.view) for sink in plan.sinks] == [("shouted", "shouted"), ("out", "bodies")]
    assert [rule.of for rule in plan.rules] == ["late", "late"]
