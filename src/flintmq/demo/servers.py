"""nsqlookupd and nsqd as real processes: started on free ports, killed, started again on the same ones.

The rules of this file: a process is ended by its own id, and none outlives the demo; what a daemon logs goes to a file,
which every failure names.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import flintmq
from flintmq.demo.failures import DemoFailed
from flintmq.net.http_client import HttpClient
from flintmq.net.http_exchange import NoAnswer, Request

START_S_MAX = 20.0
STOP_S_MAX = 15.0
_HTTP_S_MAX = 10.0
_POLL_S = 0.01
_LISTENING = re.compile(rb"(TCP|HTTP): listening on 127\.0\.0\.1:(\d+)\n")


def child_environment() -> dict[str, str]:
    """The environment of a child process, which finds the same FlintMQ in whatever directory it runs."""
    here = str(Path(flintmq.__file__).resolve().parents[1])
    others = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys([here, *others]))}


class Server:
    """One daemon.

    Args:
        program: ``nsqd`` or ``nsqlookupd``.
        log_path: gets everything it says, in all of its lives.
        flags: besides the addresses.

    Attributes:
        tcp, http: ``host:port`` once it runs.
    """

    def __init__(self, program: str, log_path: Path, *flags: str) -> None:
        self.program = program
        self.tcp = "127.0.0.1:0"
        self.http = "127.0.0.1:0"
        self._flags = flags
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None

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
        self._process = self._launch()
        ports: dict[bytes, bytes] = {}
        while len(ports) < 2:
            if self._process.poll() is not None:
                raise self._failed(f"ended with exit code {self._process.returncode}")
            if time.monotonic() - began > START_S_MAX:
                raise self._failed(f"does not listen after {START_S_MAX:g} s")
            await asyncio.sleep(_POLL_S)
            ports = dict(_LISTENING.findall(self._log_path.read_bytes()[log_start:]))
        self.tcp = f"127.0.0.1:{int(ports[b'TCP'])}"
        self.http = f"127.0.0.1:{int(ports[b'HTTP'])}"
        return time.monotonic() - began

    def _launch(self) -> subprocess.Popen[bytes]:
        addresses = (f"--tcp-address={self.tcp}", f"--http-address={self.http}", "--broadcast-address=127.0.0.1")
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "flintmq", self.program, *addresses, *self._flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment(),
                start_new_session=True,  # Ctrl-C is for the demo, which then stops this one in order
            )

    def kill(self) -> None:
        """kill -9, if it runs."""
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()

    async def stop(self) -> None:
        """Stop it in order; kill it if that takes too long."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, STOP_S_MAX)
        except subprocess.TimeoutExpired:
            pass  # it gets no longer
        self.kill()

    async def get(self, target: str) -> Any:
        """The JSON that its HTTP API answers; None when it is a 404."""
        return await self._request("GET", target)

    async def post(self, target: str) -> None:
        """Ask its HTTP API to do something."""
        await self._request("POST", target)

    async def _request(self, method: str, target: str) -> Any:
        try:
            request = Request.to(method, f"http://{self.http}{target}")
            status, _, body = await HttpClient().ask(request, timeout_s=_HTTP_S_MAX)
        except NoAnswer as error:
            raise self._failed(f"did not answer {method} {target}: {error.reason}") from error
        if status == 404:
            return None
        if status != 200:
            raise self._failed(f"answered {method} {target} with {status}")
        return json.loads(body) if body and body != b"OK" else None

    def _failed(self, reason: str) -> DemoFailed:
        return DemoFailed(f"{self.program} {reason}", f"see {self._log_path}")
