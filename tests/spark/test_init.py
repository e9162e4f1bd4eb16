"""``flintmq pipeline init``: what it refuses; that a project runs is in test_sessions.py."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from flintmq import cli

pytestmark = pytest.mark.spark


def test_the_next_command_can_be_pasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["pipeline", "init", "--declarative", "my prö"]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(command) == ["cd", "my prö", "&&", "SPARK_CONF_DIR=conf", "spark-pipelines", "run"]


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
