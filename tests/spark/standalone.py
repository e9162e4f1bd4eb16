"""A standalone Spark cluster of real processes on loopback: a master and workers, each ended by its own id."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from tests.integration.daemons import PATIENCE_S, SPARK_PATIENCE_S, wait_until
from tests.ports import reserved_port
from tests.spark.processes import environment

from flintmq.spark.home import linked_home
from flintmq.spark.java import find_java_home
from flintmq.spark.session_settings import QUICK_JVM_FLAGS, with_archive

_CLASSES = "org.apache.spark.deploy"


class Standalone:
    """A master and some workers with one core each; use as a context manager.

    Args:
        directory: for logs.
        lost_after_s: without a word from it a worker or executor counts as lost.
    """

    def __init__(self, directory: Path, worker_count: int = 2, lost_after_s: int = 15) -> None:
        self.directory = directory
        self.lost_after_s = lost_after_s
        # Python's workers make sockets below it, whose paths must be short
        self._scratch = Path(tempfile.mkdtemp(prefix="spark-"))
        self._reserved = [reserved_port(), reserved_port()]
        port, page = (each.getsockname()[1] for each in self._reserved)
        self.url = f"spark://127.0.0.1:{port}"
        self._logs = directory / "spark"
        self._logs.mkdir(parents=True)
        words = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", str(page)]
        self._master = self._start("master", f"{_CLASSES}.master.Master", *words)
        wait_until(lambda: is_listening(port), self.logs, SPARK_PATIENCE_S)
        self.workers = [self._start_worker(number) for number in range(worker_count)]

    def __enter__(self) -> Standalone:
        return self

    def __exit__(self, *_: object) -> None:
        executors = self.executors()
        for process in (*self.workers, self._master):
            process.kill()
            process.wait(PATIENCE_S)
        for process_id in executors:
            signal_tree(process_id, signal.SIGKILL)
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def master_process_id(self) -> int:
        return self._master.pid

    def _start_worker(self, number: int) -> subprocess.Popen[bytes]:
        words = ["-c", "1", "-m", "1g", "--host", "127.0.0.1", "-d", str(self._scratch / str(number)), self.url]
        return self._start(f"worker-{number}", f"{_CLASSES}.worker.Worker", "--webui-port", "0", *words)

    def _start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        found = find_spec("pyspark")
        assert found is not None and found.origin is not None
        home = linked_home(os.environ) or Path(found.origin).parent
        java_home = find_java_home(os.environ)
        more = {
            "SPARK_HOME": str(home),
            "JAVA_HOME": str(java_home),
            "SPARK_DAEMON_MEMORY": "192m",
            "SPARK_DAEMON_JAVA_OPTS": with_archive(f"{QUICK_JVM_FLAGS} -Xss512k", java_home, os.environ),
            # a master forgets an application whose executors have failed too often in a row
            "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false -Dspark.deploy.maxExecutorRetries=-1 "
            f"-Dspark.worker.timeout={self.lost_after_s}",
            "SPARK_LOCAL_DIRS": str(self._scratch),
            "PYSPARK_PYTHON": sys.executable,
        }
        with (self._logs / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [str(home / "bin" / "spark-class"), *words],
                stdout=log,
                stderr=log,
                env=environment(**more),
            )

    def mend(self) -> None:
        """Start the workers again that have ended."""
        for number, process in enumerate(self.workers):
            if process.poll() is not None:
                self.workers[number] = self._start_worker(number)

    def executors(self) -> list[int]:
        """Process ids of the executors that run now, of whichever worker."""
        scratch = str(self._scratch).encode()
        return [pid for pid, words in command_lines() if b"ExecutorBackend" in words and scratch in environ_of(pid)]

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(self._logs.iterdir()))


def is_listening(port: int) -> bool:
    """Whether somebody takes connections there."""
    try:
        socket.create_connection(("127.0.0.1", port), PATIENCE_S).close()
    except ConnectionRefusedError:
        return False
    return True


def command_lines() -> list[tuple[int, bytes]]:
    """All processes that can be seen, with their command lines."""
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal():
            try:
                found.append((int(directory.name), (directory / "cmdline").read_bytes()))
            except OSError:  # it has just ended
                continue
    return found


def environ_of(process_id: int) -> bytes:
    """The environment a process was started with; empty when it has ended."""
    try:
        return Path(f"/proc/{process_id}/environ").read_bytes()
    except OSError:
        return b""


def signal_tree(process_id: int, number: int) -> None:
    """Send a signal to a process and all that it has started; to those that still run."""
    parents = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal():
            try:
                fields = (directory / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(directory.name)] = int(fields[1])
    tree, found = [], [process_id]
    while found:
        tree += found
        found = [each for each, parent in parents.items() if parent in found and each not in tree]
    for each in tree:
        try:
            os.kill(each, number)
        except ProcessLookupError:
            continue


def paused(seconds: float) -> None:
    """Let a fault last: what happens meanwhile is the point, and no event says that it has."""
    time.sleep(seconds)
