"""Our programs as forks of a process that has imported them: most of the processor time of a start is saved.

::

    test --argv, environment, directory; in, out, err, pipe--> template --fork--> python -m flintmq nsqd ...
         <----------------------- process id ---------'    '--exit status into the pipe--> test

Rules of this file: a fork runs the program from its first line on, and ends as the interpreter ends, but for taking its
modules apart. Tests of a start or an end itself, or of what a process takes, have it started anew: the fixture
``started_anew``. One template serves one process of tests, and ends with it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

SOURCES = Path(__file__).resolve().parents[2] / "src"
_DAEMONS = ("nsqd", "nsqlookupd", "nsqadmin")
_MODULES = (
    "flintmq.cli", "flintmq.up", *(f"flintmq.{name}.server" for name in _DAEMONS), "flintmq.nsqd.cluster.agent",
    "encodings.idna", "uvloop",  # what they import when they begin
)  # fmt: skip
_PACKAGES = ("flintmq.backup", "flintmq.tools")
_REQUEST_BYTES_MAX = 1 << 20
_OF_THE_INTERPRETER = ("LANG", "LC_", "LD_", "PYTHON")
"""Beginnings of variables that a process reads when it is started: a fork cannot obey others than its template's."""

is_forking = True
"""Whether :func:`start` forks what it can."""

Stream = int | IO[Any]
"""What a stream of a process is: a file, its descriptor, ``PIPE``, ``DEVNULL``, or ``STDOUT`` for stderr."""


def start(
    words: Sequence[str],
    *,
    program: str = "flintmq",
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    stdin: Stream = subprocess.PIPE,
    stdout: Stream = subprocess.PIPE,
    stderr: Stream = subprocess.PIPE,
) -> subprocess.Popen[bytes] | Forked:
    """Start ``python -m flintmq`` with these words, or one of NSQ's programs.

    Args:
        environment: all of it, but for where our sources are; default this process's.
        directory: default this process's.
    """
    whole = {**(os.environ if environment is None else environment), "PYTHONPATH": str(SOURCES)}
    if is_forking and template().is_like(whole):
        return template().start([program, *words], whole, directory or Path.cwd(), (stdin, stdout, stderr))
    module = ["-m", "flintmq"]
    if program != "flintmq":
        module = ["-c", f"import sys; from flintmq.cli import {program} as run; sys.exit(run())"]
    command = [sys.executable, *module, *words]
    return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, env=whole, cwd=directory)


class Forked:
    """A process that was forked off the template; what is needed of :class:`subprocess.Popen`.

    Args:
        status: the end of the pipe that its exit status comes out of.
        pipes: our ends of its three streams, for those that are pipes.
    """

    def __init__(self, args: list[str], pid: int, status: int, pipes: Sequence[IO[bytes] | None]) -> None:
        self.args = args
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = pipes
        self._status = status

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self.stdout, self.stderr, self.stdin):
            if pipe:
                _close(pipe)
        self.wait()

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

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """kill -9."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, text: bytes = b"", timeout: float | None = None) -> tuple[bytes, bytes]:
        """Write ``text`` to its stdin and wait for its end; return what it wrote to stdout and stderr.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        said: dict[IO[bytes] | None, bytes] = {}
        threads = [
            threading.Thread(target=lambda pipe=pipe: said.update({pipe: pipe.read()}), daemon=True)
            for pipe in (self.stdout, self.stderr)
            if pipe
        ]
        if self.stdin:
            threads.append(threading.Thread(target=_feed, args=(self.stdin, text), daemon=True))
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_left(deadline))
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(_left(deadline))
        return said.get(self.stdout, b""), said.get(self.stderr, b"")


def _feed(pipe: IO[bytes], text: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # it reads no more
        pipe.write(text)
    _close(pipe)


def _close(pipe: IO[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError):
        pipe.close()


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


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
            stdout=subprocess.DEVNULL,  # no terminal, whose lines would go out one by one
            env={**os.environ, "PYTHONPATH": str(SOURCES)},
        )
        theirs.close()

    def is_like(self, environment: dict[str, str]) -> bool:
        """Whether a fork of it can have this environment."""
        return _read_at_start(environment) == self._environment

    def start(
        self, command: list[str], environment: dict[str, str], directory: Path, streams: tuple[Stream, Stream, Stream]
    ) -> Forked:
        """Start a program with its arguments; ``streams`` are its stdin, stdout and stderr."""
        request = json.dumps([command, environment, str(directory)]).encode()
        pipes: list[IO[bytes] | None] = []
        theirs: list[int] = []
        status, told = os.pipe()
        try:
            for number, stream in enumerate(streams):
                pipe, descriptor = _opened(number, stream, theirs)
                pipes.append(pipe)
                theirs.append(descriptor)
            with self._lock:
                socket.send_fds(self._connection, [request], [*theirs, told])
                answer = self._connection.recv(16)
        finally:
            for descriptor in (*theirs, told):
                os.close(descriptor)
        assert answer, "the template has ended"
        return Forked(command, int(answer), status, pipes)


def _opened(number: int, stream: Stream, before: list[int]) -> tuple[IO[bytes] | None, int]:
    """Our end of a stream if it is a pipe, and the descriptor for the fork."""
    if stream == subprocess.PIPE:
        reading, writing = os.pipe()
        return (open(writing, "wb"), reading) if number == 0 else (open(reading, "rb"), writing)
    if stream == subprocess.DEVNULL:
        return None, os.open(os.devnull, os.O_RDWR)
    if stream == subprocess.STDOUT:
        return None, os.dup(before[1])
    return None, os.dup(stream if isinstance(stream, int) else stream.fileno())


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
        request, descriptors, _, _ = socket.recv_fds(connection, _REQUEST_BYTES_MAX, 4)
        if not request:
            return None
        *streams, pipe = descriptors
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.close()
            for descriptor in (woken, waking, pipe, *pipes.values()):
                os.close(descriptor)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            asked: list[Any] = json.loads(request)
            return asked
        pipes[pid] = pipe
        for stream in streams:
            os.close(stream)
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
    for name in (*_MODULES, *_modules_of_packages()):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is None:
        return
    (program, *arguments), environment, directory = asked
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    os.chdir(directory)
    sys.argv = [program, *arguments]
    try:
        if program == "flintmq":
            runpy.run_module("flintmq", run_name="__main__", alter_sys=True)
        sys.exit(getattr(importlib.import_module("flintmq.cli"), program)())
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            _end(end.code or 0)
        raise


def _end(code: int) -> None:
    """End as the interpreter does, but for taking apart all modules: that takes longer than the rest of a short run.

    Returns:
        When what is printed cannot be written, which the interpreter tells in a way of its own.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()  # what was not closed or awaited says so
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return
    os._exit(code)


def _modules_of_packages() -> list[str]:
    return [
        module.name
        for name in _PACKAGES
        for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}.")
    ]


if __name__ == "__main__":
    _main()
