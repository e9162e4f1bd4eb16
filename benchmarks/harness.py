"""What every benchmark needs: daemons in processes of their own, what they cost, medians, tables and JSON.

Rules of this file:

- A daemon is started with port 0 and a data directory of its own, and is ended by its process id.
- CPU time of a daemon is read from the kernel's scheduler in nanoseconds, all threads, user and system.
- A load runs in a process of its own, so that it never shares an interpreter with what is measured; its costs are
  reported beside the server's.
- On a shared machine CPU per message is the robust figure, a rate the less robust one; both are medians.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import platform
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "local"  # not in git
START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 30.0
LOAD_TIMEOUT_S = 300.0
SAMPLE_INTERVAL_S = 0.05
_LISTENING = re.compile(r"\b(TCP|HTTP): listening on \S*?([\d.]+):(\d+)")
_ADDRESSES = ("--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0")
_CONTEXT = multiprocessing.get_context("fork")

Address = tuple[str, int]


class BenchmarkError(Exception):
    """A benchmark could not be run; the text says why."""


# daemons


class Daemon:
    """A server process under measurement.

    Attributes:
        tcp, http: where it listens.
        pid: of the process.
    """

    def __init__(self, command: Sequence[str], directory: Path, environment: dict[str, str] | None = None) -> None:
        self._log = directory / "stderr.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=directory, env={**os.environ, **(environment or {})}
            )
        self.pid = self._process.pid
        try:
            addresses = self._wait_until_listening()
            self.tcp, self.http = addresses["TCP"], addresses["HTTP"]
        except BaseException:
            self.stop()
            raise

    def _wait_until_listening(self) -> dict[str, Address]:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            found = {kind: (host, int(port)) for kind, host, port in _LISTENING.findall(self.log())}
            if len(found) == 2:
                return found
            if self._process.poll() is not None:
                break
            time.sleep(0.01)
        raise BenchmarkError(f"{self._process.args!r} does not listen: {self.log()[-2000:]}")

    def log(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def cpu_s(self) -> float:
        """CPU seconds of all its threads so far."""
        return scheduled_s(self.pid)[0]

    def memory_mib(self, which: str = "VmRSS") -> float:
        """Resident memory in MiB; ``VmHWM`` is the highest since its start."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        match = re.search(rf"^{which}:\s+(\d+) kB", status, re.MULTILINE)
        if match is None:
            raise BenchmarkError(f"/proc has no {which} for process {self.pid}")
        return int(match[1]) / 1024

    def reset_peak(self) -> None:
        """Let ``VmHWM`` begin again from what is resident now."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def call(self, method: str, path: str, body: bytes = b"") -> bytes:
        """One HTTP request.

        Raises:
            BenchmarkError: the answer is not 200.
        """
        connection = http.client.HTTPConnection(*self.http, timeout=60)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise BenchmarkError(f"{method} {path}: {response.status} {answer!r}")
        return answer

    def stop(self, first: signal.Signals = signal.SIGTERM) -> None:
        """End it, gently first unless told otherwise."""
        if self._process.poll() is None:
            self._process.send_signal(first)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def reserved_port() -> socket.socket:
    """Bind a port of 127.0.0.1 that nobody else is given while the socket is open, but that a daemon may listen on."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def scheduled_s(pid: int) -> tuple[float, float]:
    """Seconds that the threads of a process have run so far, and that they were ready to and had no core."""
    run_ns = waited_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # a thread may have ended since the directory was read
            run, waited, _ = (task / "schedstat").read_text().split()
            run_ns, waited_ns = run_ns + int(run), waited_ns + int(waited)
    return run_ns / 1e9, waited_ns / 1e9


@contextmanager
def nsqd(*flags: str, loop: str = "") -> Iterator[Daemon]:
    """Our nsqd from this tree on free ports with an empty data directory, removed afterwards.

    Args:
        loop: ``asyncio`` for that event loop; otherwise uvloop where it is installed.
    """
    with _directory() as directory:
        command = [sys.executable, "-m", "flintmq", "nsqd", *_ADDRESSES, f"--data-path={directory}", *flags]
        daemon = Daemon(command, directory, {"PYTHONPATH": _python_path(directory, loop)})
        try:
            yield daemon
        finally:
            daemon.stop()


@contextmanager
def nsqlookupd(loop: str = "") -> Iterator[Daemon]:
    """Our nsqlookupd, started alike."""
    with _directory() as directory:
        command = [sys.executable, "-m", "flintmq", "nsqlookupd", *_ADDRESSES]
        daemon = Daemon(command, directory, {"PYTHONPATH": _python_path(directory, loop)})
        try:
            yield daemon
        finally:
            daemon.stop()


def _python_path(directory: Path, loop: str) -> str:
    paths = [ROOT / "src"]
    if loop == "asyncio":
        hiding = directory / "without-uvloop"
        hiding.mkdir()
        (hiding / "uvloop.py").write_text("raise ImportError('hidden by the benchmark')\n")
        paths.insert(0, hiding)
    return os.pathsep.join(map(str, paths))


@contextmanager
def peer_nsqd(binary: str, *flags: str) -> Iterator[Daemon]:
    """Somebody else's nsqd, started alike."""
    with _directory() as directory:
        daemon = Daemon([binary, *_ADDRESSES, f"--data-path={directory}", *flags], directory)
        try:
            yield daemon
        finally:
            daemon.stop()


@contextmanager
def floor() -> Iterator[Daemon]:
    """A server that only answers: what a request costs on this machine before a broker does anything."""
    with _directory() as directory:
        daemon = Daemon([sys.executable, "-m", "benchmarks.load"], directory, {"PYTHONPATH": str(ROOT)})
        try:
            yield daemon
        finally:
            daemon.stop()


def find_peer() -> tuple[str, str] | None:
    """Path and version line of an official (Go) nsqd on PATH; None when there is none."""
    for folder in os.get_exec_path():
        path = shutil.which("nsqd", path=folder)
        if path is None:
            continue
        line = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10).stdout.strip()
        if "built w/go" in line:  # ours has the same name and the same form of this line
            return path, line
    return None


@contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="flintmq-bench-") as name:
        yield Path(name)


# loads


class Load:
    """A function that makes load, running in its own process.

    Args:
        function: called with ``ready`` and the keyword arguments; it sets up, calls ``ready()``, which returns when the
            measurement begins, and returns its figures: at least ``messages`` and ``seconds``.
    """

    def __init__(self, function: Callable[..., dict[str, Any]], **arguments: Any) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_run_load, args=(theirs, function, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def wait(self, timeout_s: float = LOAD_TIMEOUT_S) -> Any:
        """What it says next; None while it says nothing in ``timeout_s``.

        Raises:
            BenchmarkError: it failed.
        """
        if not self._pipe.poll(timeout_s):
            return None
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            raise BenchmarkError("a load ended without a result") from None
        if kind == "failed":
            raise BenchmarkError(f"a load failed: {value}")
        return value

    def go(self) -> None:
        """Let it begin."""
        self._pipe.send("go")

    def end(self) -> None:
        """Make sure that it is gone."""
        self._pipe.close()
        self._process.join(1)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def new_event() -> Any:
    """An event that a load can be given, to see what happens in this process."""
    return _CONTEXT.Event()


def _run_load(pipe: Any, function: Callable[..., dict[str, Any]], arguments: dict[str, Any]) -> None:
    cpu_at_start = 0.0

    def ready() -> None:
        nonlocal cpu_at_start
        pipe.send(("ready", "ready"))
        pipe.recv()
        cpu_at_start = time.process_time()

    try:
        figures = function(ready=ready, **arguments)
        figures["cpu_s"] = time.process_time() - cpu_at_start
        pipe.send(("done", figures))
    except Exception as error:  # noqa: BLE001 - told to the parent, which raises it
        pipe.send(("failed", f"{type(error).__name__}: {error}"))


@dataclass(slots=True)
class Sample:
    """One run: what the loads did and what it cost the server.

    Attributes:
        messages: that all of it is divided by.
        seconds: from go to the last load's end.
        server_cpu_s, load_cpu_s: CPU seconds in that time.
        memory_mib: highest resident memory of the server in that time.
        loads: the figures of each load.
    """

    messages: int
    seconds: float
    server_cpu_s: float
    load_cpu_s: float
    memory_mib: float
    loads: list[dict[str, Any]] = field(default_factory=list)


def measure(daemon: Daemon, *loads: Load, messages: int | None = None) -> Sample:
    """Run loads together against a daemon.

    Args:
        messages: what to count; without it, what the last load reports.

    Raises:
        BenchmarkError: a load failed or did not end in time.
    """
    try:
        for load in loads:
            if load.wait() is None:
                raise BenchmarkError("a load is not ready in time")
        daemon.reset_peak()
        cpu_before, began = daemon.cpu_s(), time.monotonic()
        for load in loads:
            load.go()
        figures: list[dict[str, Any]] = []
        for load in loads:
            figure = load.wait(max(1.0, LOAD_TIMEOUT_S - (time.monotonic() - began)))
            if figure is None:
                raise BenchmarkError(f"a load did not end in {LOAD_TIMEOUT_S:.0f} s")
            figures.append(figure)
        return Sample(
            messages=messages if messages is not None else figures[-1]["messages"],
            seconds=max(figure["seconds"] for figure in figures),
            server_cpu_s=daemon.cpu_s() - cpu_before,
            load_cpu_s=sum(figure["cpu_s"] for figure in figures),
            memory_mib=daemon.memory_mib("VmHWM"),
            loads=figures,
        )
    finally:
        for load in loads:
            load.end()


# figures


def median(values: Iterable[float]) -> float:
    """The median."""
    return statistics.median(values)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that ``percent`` of a sorted sequence do not exceed."""
    return values[min(len(values) - 1, int(len(values) * percent / 100))]


def machine() -> dict[str, Any]:
    """What a figure depends on beside the code."""
    cpu = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "uvloop": _installed("uvloop"),
        "file_system": _file_system(Path(tempfile.gettempdir())),
        "load_average": round(os.getloadavg()[0], 2),
    }


def machine_line(facts: dict[str, Any]) -> str:
    """The facts of :func:`machine` in one line."""
    return (
        f"{facts['cores']} cores {facts['cpu']}, Linux {facts['kernel']}, Python {facts['python']}, "
        f"uvloop {facts['uvloop'] or 'not installed'}, {facts['file_system']}, load average {facts['load_average']}"
    )


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _file_system(path: Path) -> str:
    """Type of the file system a path is on."""
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _device, mount, found, *_ = line.split()
        if (str(path) + "/").startswith(mount.rstrip("/") + "/") and len(mount) >= len(best):
            best, kind = mount, found
    return kind


# output


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as an aligned text table; the columns are the keys in the order of their appearance."""
    columns = list({key: None for row in rows for key in row})
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(text) for text in texts) for texts in zip(columns, *cells, strict=True)]
    numeric = [all(not _is_text(row.get(column)) for row in rows) for column in columns]
    lines = ["  ".join(_pad(c, w, n) for c, w, n in zip(columns, widths, numeric, strict=True)).rstrip()]
    lines.append("  ".join("-" * width for width in widths))
    lines += ["  ".join(_pad(c, w, n) for c, w, n in zip(row, widths, numeric, strict=True)).rstrip() for row in cells]
    return "\n".join(lines)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _pad(text: str, width: int, right: bool) -> str:
    return text.rjust(width) if right else text.ljust(width)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def write_json(name: str, content: Any) -> Path:
    """Write a result beside the others; return where."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=1, default=_jsonable) + "\n")
    return path


def _jsonable(value: Any) -> Any:
    return asdict(value) if isinstance(value, Sample) else str(value)
