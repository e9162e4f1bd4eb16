"""Daemons as forks of a process that has imported their modules: most of the processor time of a start is saved.

::

    test --argv, environment, directory; out, err, pipe--> template --fork--> python -m flintmq nsqd ...
         <-------------------- process id ----------'    '--exit status into the pipe--> test

Rules of this file: a fork runs ``python -m flintmq`` from its first line on, and ends as the interpreter ends. Tests of
a start itself, or of what a process takes, have it started anew: the fixture ``started_anew``. One template serves one
process of tests, and ends with it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parents[2] / "src"
_DAEMONS = ("nsqd", "nsqlookupd", "nsqadmin")
_MODULES = ("flintmq.cli", *(f"flintmq.{name}.server" for name in _DAEMONS), "flintmq.nsqd.cluster.agent")
_REQUEST_BYTES_MAX = 1 << 20
_OF_THE_INTERPRETER = ("LD_", "PYTHON")
"""Beginnings of variables that a process reads when it is started: a fork cannot obey others than its template's."""


class Forked:
    """A process that was forked off the template; what is needed of :class:`subprocess.Popen`.

    Args:
        status: the end of the pipe that its exit status comes out of.
    """

    def __init__(self, args: list[str], pid: int, status: int) -> None:
        self.args = args
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        if self.returncode is None:
            ready, _, _ = select.select([self._status], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            told = os.read(self._status, 16)
            assert told, "the template is gone, and nobody knows how this process ends"
            self.returncode = int(told)
            os.close(self._status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9."""
        self.send_signal(signal.SIGKILL)


class Template:
    """The process to fork, which lives as long as this one."""

    def __init__(self) -> None:
        self._environment = _read_at_start(os.environ)
        self._lock = threading.Lock()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(SOURCES)},
        )
        theirs.close()

    def is_like(self, environment: dict[str, str]) -> bool:
        """Whether a fork of it can have this environment."""
        return _read_at_start(environment) == self._environment

    def start(self, arguments: list[str], environment: dict[str, str], directory: Path, out: int, err: int) -> Forked:
        """Start ``python -m flintmq`` with these arguments; what it prints goes to the files ``out`` and ``err``."""
        status, theirs = os.pipe()
        request = json.dumps([arguments, environment, str(directory)]).encode()
        try:
            with self._lock:
                socket.send_fds(self._connection, [request], [out, err, theirs])
                answer = self._connection.recv(16)
        finally:
            os.close(theirs)
        assert answer, "the template has ended"
        return Forked(arguments, int(answer), status)


def _read_at_start(environment: Any) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_OF_THE_INTERPRETER) and name != "PYTHONPATH"
    }


@functools.cache
def template() -> Template:
    """The template of this process."""
    return Template()


# -- in the template ---------------------------------------------------------------------------------------------------


def _serve(connection: socket.socket) -> list[Any] | None:
    """Fork whatever is asked for; return the request in the fork, and None when nobody asks any more."""
    woken, waking = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(waking, False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.set_wakeup_fd(waking)
    pipes: dict[int, int] = {}
    sources: list[socket.socket | int] = [connection, woken]
    while True:
        ready, _, _ = select.select(sources, [], [])
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            _tell_ended(pipes)
        if connection not in ready:
            continue
        request, descriptors, _, _ = socket.recv_fds(connection, _REQUEST_BYTES_MAX, 3)
        if not request:
            return None
        out, err, pipe = descriptors
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.close()
            for descriptor in (woken, waking, pipe, *pipes.values()):
                os.close(descriptor)
            os.dup2(out, 1)
            os.dup2(err, 2)
            os.close(out)
            os.close(err)
            asked: list[Any] = json.loads(request)
            return asked
        pipes[pid] = pipe
        os.close(out)
        os.close(err)
        connection.send(b"%d" % pid)


def _tell_ended(pipes: dict[int, int]) -> None:
    while pipes:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        pipe = pipes.pop(pid)
        with contextlib.suppress(BrokenPipeError):  # nobody waits for it
            os.write(pipe, b"%d" % os.waitstatus_to_exitcode(status))
        os.close(pipe)


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who runs the tests
    gc.disable()
    for name in _MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is None:
        return
    arguments, environment, directory = asked
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv[1:] = arguments
    runpy.run_module("flintmq", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
