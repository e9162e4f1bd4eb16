"""``flintmq pipeline`` where the extra [spark] is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flintmq.pipeline import JOBS

WITHOUT_THE_EXTRA = """
import sys
for package in ("numpy", "pyarrow", "pyspark", "zlib_ng"):
    sys.modules[package] = None
from flintmq.cli import main
for words in {commands}:
    print("exit", words[1], main(words), flush=True)
    sys.stderr.flush()
"""


def run(*commands: list[str]) -> str:
    """Run commands one after the other in a process without the extra; return what it prints, each exit code too."""
    program = WITHOUT_THE_EXTRA.format(commands=commands)
    return subprocess.run(
        [sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ).stdout


@pytest.mark.parametrize("arguments", [["--help"], ["--nsqd=127.0.0.1:1"]])
def test_a_job_says_in_one_line_that_the_extra_is_missing(arguments: list[str]):
    jobs = [name for name in JOBS if name not in ("cluster", "doctor", "init", "submit", "warm")]
    said = run(*(["pipeline", name, *arguments] for name in jobs)).splitlines()
    line = "flintmq pipeline: this job needs pyarrow, which is not installed; pip install 'flintmq[spark]'"
    assert said == [each for name in jobs for each in (line, f"exit {name} 1")]


def test_jobs_that_need_little_of_it_explain_themselves():
    jobs = ("doctor", "init", "submit", "warm")
    said = run(*(["pipeline", name, "--help"] for name in jobs))
    assert [line for line in said.splitlines() if line.startswith("exit")] == [f"exit {name} 0" for name in jobs]


def test_doctor_says_what_is_missing_and_all_else_that_it_knows(tmp_path):
    for name in ("metadata", "offsets"):
        (tmp_path / name).mkdir()
    said = run(["pipeline", "doctor", f"--checkpoint={tmp_path}"])
    for package in ("numpy", "pyarrow", "pyspark"):
        assert f"problem  {package}: is not installed; pip install 'flintmq[spark]'" in said
    assert f"checkpoint {tmp_path}" in said
    assert "problem  session: the Python package pyspark is missing" in said
    assert "exit doctor 1" in said and "Traceback" not in said
