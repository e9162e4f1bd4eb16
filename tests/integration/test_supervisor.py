"""A daemon that systemd starts tells it that it listens, and that it ends; one that cannot runs all the same."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.daemons import PATIENCE_S, Daemon, Daemons, wait_until


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket of somebody who is told."""
    address = str(tmp_path / "notify") if request.param == "path" else f"\0flintmq-{tmp_path}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind(address)
        found.settimeout(PATIENCE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", address.replace("\0", "@"))
        yield found


def start(daemons: Daemons, program: str) -> Daemon:
    if program == "nsqadmin":
        return daemons.nsqadmin("--lookupd-http-address=127.0.0.1:1")
    return daemons.nsqd() if program == "nsqd" else daemons.nsqlookupd()


@pytest.mark.parametrize("program", ["nsqd", "nsqlookupd", "nsqadmin"])
def test_it_tells_when_it_listens_and_when_it_ends(manager: socket.socket, daemons: Daemons, program: str):
    daemon = start(daemons, program)
    assert manager.recv(100) == b"READY=1"
    daemon.stop()
    assert manager.recv(100) == b"STOPPING=1"


def test_a_drain_that_is_over_is_an_end_as_well(manager: socket.socket, daemons: Daemons):
    nsqd = daemons.nsqd()
    assert manager.recv(100) == b"READY=1"
    assert nsqd.request("POST", "/drain").status == 200
    assert manager.recv(100) == b"STOPPING=1"


@pytest.mark.parametrize("program", ["nsqd", "nsqlookupd"])
def test_a_manager_that_is_not_there_is_a_line_in_the_log(
    daemons: Daemons, program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    daemon = start(daemons, program)
    assert daemon.request("GET", "/ping").status == 200
    wait_until(lambda: "cannot tell READY=1 at NOTIFY_SOCKET=" in daemon.log, "the line")


@pytest.mark.parametrize(
    ("program", "flags"),
    [
        ("nsqd", ["--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0"]),
        ("nsqlookupd", ["--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0"]),
        ("nsqadmin", ["--http-address=127.0.0.1:0", "--lookupd-http-address=127.0.0.1:1"]),
    ],
)
def test_an_early_signal_whose_exception_was_dropped_ends_it(tmp_path: Path, program: str, flags: list[str]):
    """The interpreter drops what is raised in a destructor, and that is where a signal may come early."""
    code = (
        f"import sys; from flintmq import cli; from flintmq.net import early_stop; early_stop.note(2); cli.{program}()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *flags], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr


def test_an_early_signal_in_a_callback_of_the_interpreter_s_leaves_no_traceback(tmp_path: Path):
    """As in one of a lock of imports, of which it takes many while it starts."""
    code = """
import os, signal, weakref
from flintmq import cli
from flintmq.nsqd import server

class Lock:
    pass

def run(options, serve=server.run):
    lock = Lock()
    callback = weakref.ref(lock, lambda _: [os.kill(os.getpid(), signal.SIGINT), *map(str, range(1000))])
    del lock
    return serve(options)

server.run = run
raise SystemExit(cli.nsqd())
"""
    flags = ["--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0"]
    done = subprocess.run(
        [sys.executable, "-c", code, *flags], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert "INFO: stopping: " in done.stderr, "the exception was dropped, else it would not have come so far"
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
