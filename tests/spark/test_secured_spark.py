"""Spark itself against daemons that want TLS, client certificates, AUTH and tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PythonException
from tests.integration.daemons import SPARK_PATIENCE_S
from tests.spark.processes import finished
from tests.spark.secured import SECRETS, TOKEN, Secured, secured

pytestmark = pytest.mark.spark

JOB = Path(__file__).with_name("secured_job.py")


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured(tmp_path_factory.mktemp("secured")) as found:
        yield found


@pytest.mark.slow
@pytest.mark.timeout(2 * SPARK_PATIENCE_S)
def test_a_whole_query_and_no_trace_of_a_secret(everything: Secured, tmp_path: Path):
    """Plans, progress, checkpoint, the log at INFO, event log and whatever else lies in the directory of the job."""
    (tmp_path / "events").mkdir()
    options = everything.options(
        nsqd=None,
        lookupd=everything.lookupd,
        authSecret="env:SPARKS_SECRET",
        nsqlookupdToken="env:SPARKS_TOKEN",
        compression="snappy",
    )
    arguments = (json.dumps(options), "flights", str(tmp_path))
    output = finished(JOB, *arguments, SPARKS_SECRET=SECRETS[0], SPARKS_TOKEN=TOKEN)
    (tmp_path / "output.txt").write_text(output)
    assert "counted 2000" in output
    assert " INFO org.apache.spark" in output
    shown = {"output": output.encode()} | {
        str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    }
    for what in ("numInputRows", "Physical Plan"):
        assert what in output
    for where in ("events", "checkpoint/offsets", "checkpoint/commits"):
        assert [name for name in shown if f"/{where}/" in name], where
    assert [name for name, data in shown.items() if b'"flights"' in data], "what was looked through says nothing"
    line = next(line for line in output.splitlines() if "NOT_THERE is not set on host" in line)
    assert line.startswith("option of format nsq: authSecret='env:NOT_THERE'"), "one line first, then the traceback"
    for secret in SECRETS:
        assert not [name for name, data in shown.items() if secret.encode() in data]


def assert_one_line(error: BaseException, words: str) -> None:
    """Check that one of our errors stands in a line of its own in what Spark shows."""
    lines = [line for line in str(error).splitlines() if line.startswith("flintmq.") and words in line]
    assert len(lines) == 1, str(error)


REFUSALS: dict[str, tuple[dict[str, str | None], str]] = {
    "no variable": ({"authSecret": "env:NOT_THERE"}, "NOT_THERE is not set on host"),
    "no TLS": ({"tls": None, "tlsCaFile": None, "tlsCert": None, "tlsKey": None}, "connect with tls=true"),
    "no authority": ({"tlsCaFile": None}, "set tlsCaFile"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_reading_what_is_refused(spark: Any, everything: Secured, topic: str, case: str):
    others, words = REFUSALS[case]
    with pytest.raises(AnalysisException, match=words) as caught:
        spark.read.format("nsq").options(**everything.options(topic=topic, **others)).load().collect()
    assert_one_line(caught.value, words)


def test_writing_what_is_refused(spark: Any, everything: Secured, topic: str):
    others, words = REFUSALS["no TLS"]
    rows = spark.range(3).selectExpr("cast(id as string) AS body")
    with pytest.raises(PythonException, match=words) as caught:
        rows.write.format("nsq").options(**everything.options(topic=topic, **others)).mode("append").save()
    assert_one_line(caught.value, words)


def test_a_secret_itself_is_refused_and_not_repeated(spark: Any, everything: Secured, topic: str):
    given = everything.options(topic=topic, authSecret="the-secret-itself")
    with pytest.raises(AnalysisException, match="authSecret='<hidden>'") as caught:
        spark.read.format("nsq").options(**given).load()
    assert_one_line(caught.value, "write where the secret is, env:NAME or file:/path")
    assert "the-secret-itself" not in str(caught.value)
