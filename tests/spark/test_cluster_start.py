"""What ``flintmq pipeline cluster up`` leaves behind when it is ended on the way; the processes are none of Spark's."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.integration.daemons import PATIENCE_S, wait_until
from tests.spark.processes import environment

from flintmq import cli
from flintmq.pipeline import cluster

pytestmark = pytest.mark.spark

UP = ["pipeline", "cluster", "up", "--port=0", "--ui-port=0", "--workers=1", "--timeout=10m"]
STARTED = """
import sys
from pathlib import Path
from flintmq import cli
from flintmq.pipeline import cluster
cluster.linked_home = cluster.find_java_home = lambda _: Path(sys.argv[1])
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A SPARK_HOME whose programs do nothing, until they are ended."""
    program = tmp_path / "home" / "bin" / "spark-class"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nexec sleep 3600\n")
    program.chmod(0o755)
    return tmp_path / "home"


def processes_in(text: str) -> list[cluster.Running]:
    return [cluster.Running(**each) for each in json.loads(text)["processes"]]


def started(home: Path, place: Path) -> tuple[subprocess.Popen[str], cluster.Running]:
    """An ``up`` that waits for its master, and that master."""
    up = subprocess.Popen(
        [sys.executable, "-c", STARTED, str(home), *UP, f"--directory={place}"],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        wait_until(lambda: (place / "cluster.json").exists() or up.poll() is not None)
        assert up.poll() is None, up.communicate()
        (master,) = processes_in((place / "cluster.json").read_text())
        assert master.name == "master" and master.is_there()
    except BaseException:
        up.kill()
        up.communicate()
        cluster.down(place)
        raise
    return up, master


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGHUP, -signal.SIGHUP), (signal.SIGINT, cli.EXIT_INTERRUPTED)],
)
def test_a_signal_ends_what_was_started(home: Path, tmp_path: Path, number: signal.Signals, code: int):
    up, master = started(home, tmp_path / "c")
    try:
        up.send_signal(number)
        os.killpg(up.pid, number)  # as timeout(1) does
        output, errors = up.communicate(timeout=PATIENCE_S)
        assert (up.returncode, output) == (code, ""), errors
        assert "Traceback" not in errors
        assert not master.is_there()
        assert not (tmp_path / "c" / "cluster.json").exists()
    finally:
        up.kill()
        cluster.down(tmp_path / "c")


def test_down_ends_what_a_killed_up_has_left(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    up, master = started(home, tmp_path / "c")
    try:
        up.kill()
        up.communicate(timeout=PATIENCE_S)
        assert master.is_there(), "nobody has ended it"
        assert cli.main([*UP, f"--directory={tmp_path / 'c'}"]) == 1
        assert f"({tmp_path / 'c'}); end it" in capsys.readouterr().err
        state = tmp_path / "c" / "cluster.json"
        said = json.loads(state.read_text())
        said["processes"].insert(0, {"name": "worker-0", "process_id": up.pid, "began": 1})
        state.write_text(json.dumps(said))
        assert cli.main([*UP, f"--directory={tmp_path / 'c'}"]) == 1
        assert f"({tmp_path / 'c'}), without worker-0, which ended; end it" in capsys.readouterr().err
    finally:
        assert cli.main(["pipeline", "cluster", "down", f"--directory={tmp_path / 'c'}"]) == 0
    assert "has ended" in capsys.readouterr().out
    assert not master.is_there()


@pytest.mark.parametrize("at", [1, 2])
def test_a_full_disk(home: Path, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str], at: int):
    """At the first process that is written down, or at the second."""
    seen: list[cluster.Running] = []

    def replace(staged: Path, path: Path) -> None:
        seen[:] = processes_in(staged.read_text())
        if len(seen) == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(staged))
        staged.replace(path)

    for name in ("linked_home", "find_java_home"):
        monkeypatch.setattr(cluster, name, lambda _: home)
    monkeypatch.setattr(cluster, "_workers", lambda _: 1)
    monkeypatch.setattr(cluster, "replace", replace)
    try:
        assert cli.main([*UP, f"--directory={tmp_path / 'c'}"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "cluster.json cannot be written: [Errno 28] No space left on device" in line
        assert len(seen) == at
        assert not any(process.is_there() for process in seen)
        assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [".lock", "logs", "work"]
    finally:
        for process in seen:
            if process.is_there():
                os.kill(process.process_id, signal.SIGKILL)
