"""The test suites of other people's clients, as they published them, with our nsqd and nsqlookupd in PATH.

They name their ports and have deadlines of their own. So each has a network of its own, and what fails is run once more
by itself: on a busy machine a second is not always enough for them. They start ``nsqd`` as they would start NSQ's, and
get a fork from the second time on (``suites/forking.py``).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.integration.daemons import PATIENCE_S, SOURCES

HERE = Path(__file__).parent / "suites"
DOWNLOADS = Path(sys.prefix) / "suites"
_SUITE_S = 600
# brings up the loopback of the new network, then becomes the command
_WITH_LOOPBACK = """
import fcntl, os, socket, struct, sys
flags = struct.pack("16sH14x", b"lo", 0x1 | 0x8 | 0x40)  # UP, LOOPBACK, RUNNING
fcntl.ioctl(socket.socket(), 0x8914, flags)  # SIOCSIFFLAGS
os.execvp(sys.argv[1], sys.argv[1:])
"""
TRIES_MORE = 2
"""Of a test that failed: some of these suites count on who is quicker, see docs/compatibility.md."""
_NETWORK = [
    "unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child",  # what it leaves running ends with it
    sys.executable, "-c", _WITH_LOOPBACK,
]  # fmt: skip


@dataclass(frozen=True)
class Suite:
    """One suite.

    Attributes:
        conftest: of ours, where the release has none.
        options: of pytest.
    """

    name: str
    test_count: int
    conftest: str = ""
    options: tuple[str, ...] = ()


SUITES = [
    Suite("gnsq-1.0.2", 108),
    Suite("ansq-0.3.0", 107, "ansq_conftest.py", ("--asyncio-mode=auto",)),
]


def has_network() -> bool:
    """Whether a process may have a network of its own here."""
    try:
        return subprocess.run([*_NETWORK, "true"], capture_output=True, timeout=PATIENCE_S).returncode == 0
    except FileNotFoundError:
        return False


def run(directory: Path, suite: Suite, *options: str) -> subprocess.CompletedProcess[str]:
    programs = directory / "programs"
    programs.mkdir(exist_ok=True)
    for name in ("nsqd", "nsqlookupd"):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m flintmq {name} "$@"\n')
        (programs / name).chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    paths = (programs, *os.environ["PATH"].split(os.pathsep))
    environment = inherited | {
        "PATH": os.pathsep.join(map(str, paths)),
        "PYTHONPATH": os.pathsep.join((str(SOURCES), str(HERE))),
        "SUITE_PATIENCE_S": f"{PATIENCE_S:g}",
        "SLOW_TIMEOUT": f"{PATIENCE_S:.0f}",  # of gnsq's: 10 s for tests that start six processes
    }
    pytest_run = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, f"--rootdir={directory}", "--timeout=60"]
    command = [*_NETWORK, *pytest_run, "-W", "ignore", "-rfE", "-p", "forking", *suite.options, *options]
    return subprocess.run(
        command, cwd=directory / suite.name, env=environment, capture_output=True, text=True, timeout=_SUITE_S
    )


def failures(output: str) -> list[str]:
    return sorted(set(re.findall(r"^(?:FAILED|ERROR) (?:\S*/)?(tests/\S+)", output, re.MULTILINE)))


@pytest.mark.slow
@pytest.mark.timeout(2 * _SUITE_S)
@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_suite(tmp_path: Path, suite: Suite):
    release = DOWNLOADS / f"{suite.name}.tar.gz"
    if not release.exists() and not os.environ.get("CI"):
        pytest.skip(f"needs {release.name} in .venv/suites: run make setup")
    if not has_network():
        pytest.skip("needs the right to have a network of its own")
    with tarfile.open(release) as archive:
        archive.extractall(tmp_path, filter="data")
    if suite.conftest:
        shutil.copy(HERE / suite.conftest, tmp_path / suite.name / "tests" / "conftest.py")
    first = run(tmp_path, suite, "tests")
    failed = failures(first.stdout)
    assert failed or first.returncode == 0, first.stdout[-4000:] + first.stderr[-2000:]
    counts = [int(count) for count in re.findall(r"(\d+) (?:passed|failed|errors?)\b", first.stdout.splitlines()[-1])]
    assert sum(counts) == suite.test_count, first.stdout[-2000:]
    for tries_left in reversed(range(TRIES_MORE)):
        if not failed:
            break
        again = run(tmp_path, suite, *failed)
        failed = failures(again.stdout)
        assert failed or again.returncode == 0, again.stdout[-8000:]
        assert not failed or tries_left, again.stdout[-8000:]
