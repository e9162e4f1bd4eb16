"""A data directory of which this user may not use a part: nsqd says permission and where, and changes nothing.

root may read everything; so these tests take that right from the nsqd they start, or run as somebody else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.daemons import PATIENCE_S, Daemons, pub

SOURCES = Path(__file__).resolve().parents[2] / "src"
WITHOUT_RIGHTS = () if os.geteuid() else ("setpriv", "--bounding-set=-dac_override,-dac_read_search")

pytestmark = pytest.mark.skipif(
    bool(WITHOUT_RIGHTS) and not shutil.which("setpriv"), reason="root may read everything, and there is no setpriv"
)


def start(program: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """A start that must fail."""
    ports = ("--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", *(("--free-ports",) if program == "up" else ()))
    return subprocess.run(
        [*WITHOUT_RIGHTS, sys.executable, "-m", "flintmq", program, f"--data-path={directory}", *ports],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
    )


@pytest.fixture
def used(daemons: Daemons, tmp_path: Path) -> Path:
    """A data directory with a topic, a channel and messages, that no nsqd uses."""
    nsqd = daemons.nsqd("--durability=os")
    with nsqd.connect() as connection:
        connection.ok(pub("t", b"x"))
    nsqd.post("/channel/create?topic=t&channel=c")
    nsqd.stop()
    directory = tmp_path / "used"
    shutil.copytree(nsqd.data_path, directory)
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.name.endswith(("-shm", "-wal"))
    }


@pytest.mark.parametrize("program", ["nsqd", "up"])
@pytest.mark.parametrize(
    ("part", "mode"),
    [
        (".", 0o000),
        (".", 0o500),
        ("channels.db", 0o000),
        ("channels.db", 0o400),
        ("nsqd.dat", 0o000),
        ("topics", 0o000),
        ("topics/t-t", 0o000),
        ("topics/t-t/p-0000", 0o000),
        ("topics/t-t/p-0000/log.meta", 0o000),
        ("topics/t-t/p-0000/00000000000000000001.log", 0o000),
    ],
    ids=lambda value: oct(value) if isinstance(value, int) else value,
)
def test_what_may_not_be_used_is_said(used: Path, program: str, part: str, mode: int):
    path = used / part
    before, was = contents(used), path.stat().st_mode
    path.chmod(mode)
    try:
        done = start(program, used)
    finally:
        path.chmod(was)
    assert done.returncode == 1, done
    said = done.stderr.lower()
    assert "permission denied" in said and path.name in done.stderr, done.stderr
    assert "move it away" not in said and "create the directory" not in said and "traceback" not in said, done.stderr
    assert contents(used) == before


def test_a_directory_in_which_nothing_may_be_made(tmp_path: Path):
    parent = tmp_path / "closed"
    parent.mkdir(mode=0o500)
    done = start("up", parent / "data")
    assert done.returncode == 1 and "Permission denied" in done.stderr and "--data-path" in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1
