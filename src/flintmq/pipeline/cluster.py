"""``flintmq pipeline cluster up|down``: a standalone Spark of a master and workers on this machine, to try out jobs.

In its directory::

    cluster.json   what was started: the master's URL, and of each process its id and when it was started
    logs/          what they print
    work/          what executors write

The rules of this file: a process is ended only when the kernel says that it is the one that was started; one ``up`` or
``down`` at a time; what ``up`` could not start whole is ended again; a process is in cluster.json as soon as it is
there, so that ``down`` ends what a killed ``up`` has left; behind ``down`` nothing is left but the directory.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from flintmq.clock import SystemClock
from flintmq.errors import UNREADABLE_JSON, FlintError, UsageError
from flintmq.net import http_blocking
from flintmq.net.http_exchange import NoAnswer, Request
from flintmq.options import SECOND, Duration, Integer, Options, Switch, Text, option, read_command, version_line
from flintmq.pipeline.files import DirectoryError, take
from flintmq.pipeline.options import SPARK
from flintmq.pipeline.signals import stopped_by_signals
from flintmq.spark.durable import replace
from flintmq.spark.errors import SetupError
from flintmq.spark.home import linked_home
from flintmq.spark.java import cache_directory, find_java_home
from flintmq.spark.session_settings import QUICK_JVM_FLAGS, with_archive
from flintmq.version import __version__

STATE, LOGS, WORK, LOCK = "cluster.json", "logs", "work", ".lock"
STAGED = f".{STATE}"
WORKERS_MAX = 64
END_PATIENCE_S = 20.0
ASK_TIMEOUT_S = 10.0
MEMORY_MAX_MIB = (1 << 31) - 1
_POLL_S = 0.05
_CLASSES = "org.apache.spark.deploy"
_TAIL = 1500
_SIZE = re.compile(r"([0-9]{1,12})(?:([kmgtp])b?|b)?", re.IGNORECASE | re.ASCII)
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40, "p": 50}

_clock = SystemClock()


class ClusterError(FlintError):
    """A cluster cannot be started or ended.

    Args:
        reason: what is in the way, and what to do.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class ClusterStopped(ClusterError):
    """``up`` was told to stop before all had started; nothing is left running."""

    def __init__(self) -> None:
        super().__init__("stopped before all had started; nothing is left running")


@dataclass(frozen=True)
class _Memory(Text):
    """A size as Spark's Worker takes it: a whole number, and k, m, g, t or p; without one it is bytes."""

    placeholder_text: str = "SIZE"

    def check(self, value: Any) -> None:
        super().check(value)
        found = _SIZE.fullmatch(value)
        size = int(found[1]) << _UNITS[(found[2] or "").lower()] if found else 0
        if not 1 <= size >> 20 <= MEMORY_MAX_MIB:
            raise ValueError(f"it must be {self.allowed()}")

    def allowed(self) -> str:
        return "a whole number and k, m, g or t, such as 2g or 1500m, 1m or more"


class _BadDirectory(DirectoryError):
    """The directory of a cluster cannot be used."""


@dataclass(frozen=True, kw_only=True)
class DownOptions(Options):
    """The flags of flintmq pipeline cluster down."""

    program: ClassVar[str] = "flintmq pipeline cluster down"
    summary: ClassVar[str] = "flintmq pipeline cluster down ends what flintmq pipeline cluster up has started."

    directory: str = option(
        Text("DIRECTORY"), "", "where its processes, logs and scratch files are; without it in the cache", group=SPARK
    )

    def place(self) -> Path:
        """Return the directory of the cluster."""
        return Path(self.directory or cache_directory(os.environ) / "spark-cluster").absolute()


@dataclass(frozen=True, kw_only=True)
class UpOptions(DownOptions):
    """The flags of flintmq pipeline cluster up."""

    program: ClassVar[str] = "flintmq pipeline cluster up"
    summary: ClassVar[str] = (
        "flintmq pipeline cluster up starts a master and workers of a standalone Spark on this machine, for jobs with "
        "--master=spark://..., and returns when all are ready."
    )

    workers: int = option(Integer(1, WORKERS_MAX), 2, "how many workers", group=SPARK)
    cores: int = option(Integer(1, 1024), 1, "tasks that a worker runs at a time", group=SPARK)
    memory: str = option(_Memory(), "1g", "memory of a worker for its executors, such as 2g or 1500m", group=SPARK)
    host: str = option(Text("HOST"), "127.0.0.1", "the address they listen on; nobody is asked for a name", group=SPARK)
    port: int = option(Integer(0, 65535, "port"), 7077, "the master's; 0 takes a free one", group=SPARK)
    ui_port: int = option(Integer(0, 65535, "port"), 8080, "its page's; 0 takes a free one", group=SPARK)
    timeout_ns: int = option(Duration(SECOND), 120 * SECOND, "how long all of them may take to start", group=SPARK)
    json: bool = option(Switch(), False, "print what was started as a line of JSON", group=SPARK)


@dataclass(frozen=True, slots=True)
class Running:
    """A process that was started.

    Attributes:
        began: when the kernel started it, in its own ticks since boot; tells it from a later one of the same id.
    """

    name: str
    process_id: int
    began: int

    def is_there(self) -> bool:
        """Whether this very process runs."""
        return _began(self.process_id) == self.began


@dataclass(frozen=True, slots=True)
class Cluster:
    """A standalone Spark on this machine.

    Attributes:
        url: the master, for ``--master``.
        ui: address of its page.
        processes: the workers first, the master last: the order in which they are ended.
    """

    url: str
    ui: str
    directory: str
    processes: tuple[Running, ...]


def up(options: UpOptions, stop: threading.Event | None = None) -> Cluster:
    """Start a cluster, and return when every worker has joined it.

    Args:
        stop: set when it is to end before that.

    Raises:
        ClusterError: one runs there already, a port is taken, the directory cannot be written, or it does not start;
            then nothing is left running.
        ClusterStopped: it was told to stop.
        SetupError: there is no pyspark, or no Java.
    """
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        raise SetupError("the Python package pyspark is missing", "pip install 'flintmq[spark]'")
    java_home = find_java_home(os.environ)
    directory = options.place()
    with _alone(directory):
        running = _read(directory)
        if running is not None and any(process.is_there() for process in running.processes):
            gone = [process.name for process in running.processes if not process.is_there()]
            without = f", without {', '.join(gone)}, which ended" if gone else ""
            raise ClusterError(
                f"a cluster runs already at {running.url} ({directory}){without}; end it with flintmq pipeline "
                "cluster down" + (", and start it anew" if gone else "")
            )
        _clear(directory)
        for name in (LOGS, WORK):
            with _written(directory / name):
                (directory / name).mkdir()
        spark_home = linked_home(os.environ) or Path(found.origin).parent
        return _Start(options, directory, spark_home, java_home, stop or threading.Event()).run()


def down(directory: Path) -> Cluster | None:
    """End the cluster of a directory, its executors too, and remove what it has written; None: there is none.

    Raises:
        ClusterError: a process does not end.
    """
    if not directory.is_dir():
        return None
    with _alone(directory):
        running = _read(directory)
        if running is not None:
            _end(running.processes, directory)
        _clear(directory)
    return running


class _Start:
    """One start of a cluster; what it has started it ends when the rest fails."""

    def __init__(
        self, options: UpOptions, directory: Path, spark_home: Path, java_home: Path, stop: threading.Event
    ) -> None:
        self._options = options
        self._stop = stop
        self._url = self._ui = ""
        self._directory = directory
        self._spark_home = spark_home
        self._environment = {
            **os.environ,
            "SPARK_HOME": str(spark_home),
            "JAVA_HOME": str(java_home),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": with_archive(QUICK_JVM_FLAGS, java_home, os.environ),
            "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",
            "SPARK_LOCAL_DIRS": str(directory / WORK),
            "SPARK_LOCAL_IP": options.host,
            "PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable),
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._deadline_ns = _clock.monotonic_ns() + options.timeout_ns

    def run(self) -> Cluster:
        options = self._options
        port, ui_port = (
            _free_port(options.host, number, flag)
            for number, flag in ((options.port, "--port"), (options.ui_port, "--ui-port"))
        )
        url, ui = self._url, self._ui = f"spark://{options.host}:{port}", f"http://{options.host}:{ui_port}"
        try:
            where = ["--host", options.host, "--port", str(port), "--webui-port", str(ui_port)]
            self._start("master", f"{_CLASSES}.master.Master", *where)
            self._wait("the master does not listen", lambda: _workers(ui) is not None)
            for number in range(options.workers):
                words = ["-c", str(options.cores), "-m", options.memory, "--host", options.host, "--webui-port", "0"]
                words += ["-d", str(self._directory / WORK), url]
                self._start(f"worker-{number}", f"{_CLASSES}.worker.Worker", *words)
            self._wait("not all workers have joined", lambda: _workers(ui) == options.workers)
        except BaseException:
            _end(self._running(), self._directory)
            _forget(self._directory)
            raise
        return self._cluster()

    def _start(self, name: str, *words: str) -> None:
        path, program = self._directory / LOGS / f"{name}.log", self._spark_home / "bin" / "spark-class"
        with _written(path):
            log = path.open("wb")
        try:
            # of a session of its own, as Ctrl-C is for the command, and the cluster outlives it
            self._processes[name] = subprocess.Popen(
                [str(program), *words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ClusterError(f"{program} cannot be run: {error}") from error
        finally:
            log.close()
        self._remember()

    def _cluster(self) -> Cluster:
        return Cluster(self._url, self._ui, str(self._directory), self._running())

    def _remember(self) -> None:
        """Write down what was started so far: nobody else can end it when this process is killed."""
        text = json.dumps({**asdict(self._cluster()), "flintmq": __version__})
        path, staged = self._directory / STATE, self._directory / STAGED
        with _written(path):
            staged.write_text(text, encoding="utf-8")
            replace(staged, path)

    def _running(self) -> tuple[Running, ...]:
        began = [(name, process.pid, _began(process.pid)) for name, process in self._processes.items()]
        return tuple(Running(name, pid, ticks) for name, pid, ticks in reversed(began) if ticks is not None)

    def _wait(self, what: str, is_done: Callable[[], bool]) -> None:
        while True:
            if self._stop.is_set():
                raise ClusterStopped
            if is_done():
                return
            for name, process in self._processes.items():
                if (code := process.poll()) is not None:
                    raise ClusterError(f"{what}: {name} has ended with {code}, and said: {self._said(name)}")
            name, last = next(reversed(self._processes.items()))
            if _clock.monotonic_ns() > self._deadline_ns:
                raise ClusterError(f"{what} within --timeout; {name} said: {self._said(name)}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                last.wait(_POLL_S)

    def _said(self, name: str) -> str:
        text = (self._directory / LOGS / f"{name}.log").read_text(encoding="utf-8", errors="replace").strip()
        return text[-_TAIL:] or "nothing"


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    """Say of what fails within that a file or directory cannot be written.

    Raises:
        ClusterError: it cannot.
    """
    try:
        yield
    except OSError as error:
        raise ClusterError(f"{path} cannot be written: {error}; make room, or name another with --directory") from error


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ClusterError(f"{directory} cannot be made: {error}; name another with --directory") from error
    lock = take(directory, LOCK, "another flintmq pipeline cluster is at work there", _BadDirectory)
    try:
        yield
    finally:
        os.close(lock)


def _read(directory: Path) -> Cluster | None:
    path = directory / STATE
    try:
        said = json.loads(path.read_bytes())
        processes = tuple(Running(**each) for each in said["processes"])
        return Cluster(said["url"], said["ui"], said["directory"], processes)
    except FileNotFoundError:
        return None
    except (OSError, *UNREADABLE_JSON, KeyError, TypeError) as error:
        raise ClusterError(
            f"{path} cannot be read: {error}; end the processes org.apache.spark.deploy.* by hand, and remove it"
        ) from error


def _clear(directory: Path) -> None:
    """Remove what a cluster has written, and nothing else."""
    _forget(directory)
    for name in (LOGS, WORK):
        shutil.rmtree(directory / name, ignore_errors=True)


def _forget(directory: Path) -> None:
    for name in (STATE, STAGED):
        (directory / name).unlink(missing_ok=True)


def _free_port(host: str, number: int, flag: str) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError as error:
            raise ClusterError(f"{host}:{number} cannot be listened on: {error}; name another with {flag}") from error
        return int(probe.getsockname()[1])


def _workers(ui: str) -> int | None:
    """Return the workers that have joined a master; None while it does not answer."""
    try:
        answer = http_blocking.ask(Request.to("GET", f"{ui}/json/"), timeout_s=ASK_TIMEOUT_S, time=time.monotonic)
        workers: list[dict[str, str]] = json.loads(answer.body)["workers"]
        return sum(each["state"] == "ALIVE" for each in workers)
    except (NoAnswer, *UNREADABLE_JSON, KeyError, TypeError):
        return None


def _end(processes: Sequence[Running], directory: Path) -> None:
    """End processes in their order, then the executors that work in the directory; whoever stays, with SIGKILL."""
    for process in processes:
        _end_one(process)
    for process in _executors(directory):
        _end_one(process)
    if left := [process for process in (*processes, *_executors(directory)) if process.is_there()]:
        raise ClusterError("; ".join(f"{each.name} (process {each.process_id}) does not end" for each in left))


def _end_one(process: Running) -> None:
    try:
        handle = os.pidfd_open(process.process_id)
    except ProcessLookupError:
        return
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not process.is_there():  # asked behind the handle, so that nobody else can be meant by it
                return
            signal.pidfd_send_signal(handle, number)
            select.select([handle], [], [], END_PATIENCE_S)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)


def _executors(directory: Path) -> list[Running]:
    """Return the processes whose working directory is below the one of the workers."""
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdecimal():
            try:
                place = os.readlink(each / "cwd")
            except OSError:  # ended, or somebody else's
                continue
            began = _began(int(each.name))
            if place.startswith(f"{directory / WORK}{os.sep}") and began is not None:
                found.append(Running("executor", int(each.name), began))
    return found


def _began(process_id: int) -> int | None:
    """Return when a process was started, in ticks since boot; None when it does not run."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _up_unless_signalled(options: UpOptions) -> Cluster:
    """Start a cluster; Ctrl-C, SIGTERM or SIGHUP before that ends what was started, and then this process.

    One that is ignored, as nohup(1) has it, stays so.
    """
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    numbers = [number for number in ends if signal.getsignal(number) is not signal.SIG_IGN]
    with stopped_by_signals(_clock, numbers) as signals:
        try:
            return up(options, signals.stop)
        except ClusterStopped:
            signals.give_back()
            assert signals.first is not None, "it stops by nothing else"
            signal.raise_signal(signals.first)
            raise


def run(arguments: Sequence[str]) -> int:
    """Run ``flintmq pipeline cluster up`` or ``down``."""
    word, *rest = arguments or ["--help"]
    version = version_line("flintmq", __version__)
    if word == "up":
        flags = read_command(UpOptions, rest, UpOptions.program, version)
        if flags is not None:
            cluster = _up_unless_signalled(flags)
            count = f"{flags.workers} worker{'s' if flags.workers > 1 else ''}"
            shown = f"{cluster.url} with {count}; its page is {cluster.ui}, its logs are in {cluster.directory}/{LOGS}"
            print(json.dumps(asdict(cluster)) if flags.json else shown)
        return 0
    if word == "down":
        wanted = read_command(DownOptions, rest, DownOptions.program, version)
        if wanted is not None:
            ended = down(wanted.place())
            print(f"no cluster runs in {wanted.place()}" if ended is None else f"{ended.url} has ended")
        return 0
    if word.lstrip("-") in ("help", "h"):
        print("Usage: flintmq pipeline cluster up|down [flags]\n\nflintmq pipeline cluster up --help explains it.")
        return 0
    raise UsageError(f"flintmq pipeline cluster {word}: say up or down")


__all__ = ["Cluster", "ClusterError", "ClusterStopped", "DownOptions", "Running", "UpOptions", "down", "run", "up"]
