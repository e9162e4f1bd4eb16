"""``flintmq pipeline init``: what it refuses; that a project runs is in test_sessions.py."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from flintmq import cli

pytestmark = pytest.mark.spark


def test_the_next_command_can_be_pasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["pipeline", "init", "--declarative", "$prö"]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(command) == ["cd", "$prö", "&&", "SPARK_CONF_DIR=conf", "spark-pipelines", "run"]
    spec, defaults = (tmp_path / "$prö" / name for name in ("spark-pipeline.yml", "conf/spark-defaults.conf"))
    # as it is: Spark does not read what is written as in a URL
    assert json.dumps(f"file:{tmp_path}/$prö/pipeline-storage") in spec.read_text(encoding="utf-8")
    assert f"file:{tmp_path}/$prö/warehouse\n" in defaults.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["a b", "50%", "x#y", "what?", "a:b", "[1]"])
def test_a_directory_that_spark_would_write_otherwise_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
):
    assert cli.main(["pipeline", "init", "--declarative", str(tmp_path / name / "project")]) == 2
    assert "name one without" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--declarative"], "name one directory"),
        (["DIRECTORY"], "say --declarative"),
        (["--declarative", "DIRECTORY", "--topic=t", "--to-topic=t"], "that is the topic itself"),
        (["--declarative", "DIRECTORY", '--topic=h"d'], "--topic: topic name 'h\"d' is not valid"),
        (["--declarative", "DIRECTORY", "--to-topic=a b"], "--to-topic: topic name 'a b' is not valid"),
        (["--declarative", "DIRECTORY", "--topic=_log"], "topic='_log' is not allowed"),
        (["--declarative", "DIRECTORY", "--nsqd=nowhere"], "nsqd='nowhere' is not allowed"),
        (["DIRECTORY", '--topic=h"d'], "say --declarative"),
    ],
)
def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], reason: str):
    given = [str(tmp_path / "project") if word == "DIRECTORY" else word for word in words]
    assert cli.main(["pipeline", "init", *given]) == 2
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
