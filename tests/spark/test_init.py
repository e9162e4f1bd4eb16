"""``flintmq pipeline init``: what it refuses; that a project runs is in test_sessions.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from flintmq import cli

pytestmark = pytest.mark.spark


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--declarative"], "name one directory"),
        (["DIRECTORY"], "say --declarative"),
        (["--declarative", "DIRECTORY", "--topic=t", "--to-topic=t"], "that is the topic itself"),
    ],
)
def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], reason: str):
    given = [str(tmp_path / "project") if word == "DIRECTORY" else word for word in words]
    assert cli.main(["pipeline", "init", *given]) == 2
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
