"""``flintmq demo cluster``, which ``make cluster`` runs: nothing is lost, and nothing outlives it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.daemons import PATIENCE_S, SOURCES, wait_until

FLAGS = ("--seconds=1", "--rate=200")


def processes_of(directory: Path) -> list[str]:
    """Command lines of processes that name a directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(directory) in command:
            found.append(command)
    return found


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert not processes_of(tmp_path)


def launch(tmp_path: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "flintmq", "demo", "cluster", *FLAGS, *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCES), "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
        cwd=tmp_path,
    )


def test_a_leader_is_killed_and_nothing_is_lost(temporary: Path):
    demo = launch(temporary)
    said, _ = demo.communicate(timeout=4 * PATIENCE_S)
    assert demo.returncode == 0, said
    events = re.findall(r"^ +(\d+\.\d{3}) s  (\w+)", said, re.MULTILINE)
    assert {name for _, name in events} == {"detected", "elected", "writable", "readable", "all"}, said
    times = [float(at_s) for at_s, _ in events]
    assert times == sorted(times) and times[0] > 0
    assert re.search(r"^lost 0, duplicates \d+$", said, re.MULTILINE), said
    assert "in sync after" in said and "removed" in said.splitlines()[-1]
    assert not list(temporary.glob("flintmq-demo-*"))


def test_ctrl_c_ends_every_process(temporary: Path):
    data_path = temporary / "data"
    demo = launch(temporary, "--store=own", f"--data-path={data_path}", "--seconds=3600")
    try:
        wait_until((data_path / "nsqd-3.log").exists, "the nodes are started")
        assert processes_of(temporary)
        demo.send_signal(signal.SIGINT)
        said, _ = demo.communicate(timeout=PATIENCE_S)
    finally:
        demo.kill()
        demo.wait()
    assert demo.returncode == 130, said
    assert said.endswith(f"interrupted; what was written is in {data_path}\n") and "Traceback" not in said, said
