"""The processes that the demo starts: nsqlookupd and nsqd here, Spark in :mod:`flintmq.demo.archive`.

The rules of this file: a process is ended with all that it started, by its own id, and none outlives the demo; what it
says goes to a log file, which every failure names.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import flintmq
from flintmq.demo.failures import DemoFailed

START_S_MAX = 20.0
STOP_S_MAX = 15.0
_POLL_S = 0.01
_LISTENING = re.compile(rb"(TCP|HTTP): listening on 127\.0\.0\.1:(\d+)\n")


class Process:
    """A Python process of our own code.

    Args:
        name: for people.
        log_path: gets everything it says, in all of its lives.
    """

    def __init__(self, name: str, log_path: Path) -> None:
        self._name = name
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self, *arguments: str, cwd: Path | None = None, is_talking: bool = False) -> subprocess.Popen[bytes]:
        """Start ``python -m ...``.

        Args:
            is_talking: it has pipes to read and answer requests; else only its log.
        """
        pipe = subprocess.PIPE if is_talking else None
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or log,
                stderr=log,
                cwd=cwd,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the demo, which then ends this one and what it started
            )
        return self._process

    async def stop(self) -> None:
        """Ask it to end; kill it if that takes too long."""
        process = self._process
        if process is not None:
            self.ask_to_end(process)
            try:
                await asyncio.to_thread(process.wait, STOP_S_MAX)
            except subprocess.TimeoutExpired:
                pass  # it gets no longer
            self.kill()

    def ask_to_end(self, process: subprocess.Popen[bytes]) -> None:
        """Ask it to end, in the way that it understands."""
        process.terminate()

    def kill(self) -> None:
        """kill -9, and of what it started as well; nothing happens if it does not run."""
        process, self._process = self._process, None
        if process is not None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # all of them have ended
            process.wait()

    def failed(self, reason: str) -> DemoFailed:
        """Return the failure to raise."""
        return DemoFailed(f"{self._name} {reason}", f"see {self._log_path}")


class Server(Process):
    """nsqd or nsqlookupd.

    Args:
        program: which one.
        flags: besides the addresses.

    Attributes:
        tcp, http: ``host:port`` once it runs.
    """

    def __init__(self, program: str, log_path: Path, *flags: str) -> None:
        super().__init__(program, log_path)
        self.tcp = "127.0.0.1:0"
        self.http = "127.0.0.1:0"
        self._arguments = ("flintmq", program, "--broadcast-address=127.0.0.1", *flags)

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The id of the process."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> float:
        """Start it and wait until it listens; again on the same ports if it ran before. Returns the seconds it took.

        Raises:
            DemoFailed: it ended, or took too long.
        """
        began = time.monotonic()
        log_start = self._log_path.stat().st_size if self._log_path.exists() else 0
        process = self.launch(*self._arguments, f"--tcp-address={self.tcp}", f"--http-address={self.http}")
        ports: dict[bytes, bytes] = {}
        while len(ports) < 2:
            if process.poll() is not None:
                raise self.failed(f"ended with exit code {process.returncode}")
            if time.monotonic() - began > START_S_MAX:
                raise self.failed(f"does not listen after {START_S_MAX:g} s")
            await asyncio.sleep(_POLL_S)
            ports = dict(_LISTENING.findall(self._log_path.read_bytes()[log_start:]))
        self.tcp = f"127.0.0.1:{int(ports[b'TCP'])}"
        self.http = f"127.0.0.1:{int(ports[b'HTTP'])}"
        return time.monotonic() - began


def _environment() -> dict[str, str]:
    """Return the environment of a child process, which finds the same FlintMQ in whatever directory it runs."""
    here = str(Path(flintmq.__file__).resolve().parents[1])
    others = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys([here, *others]))}
