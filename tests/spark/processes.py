"""Real processes for the tests with Spark: nsqd, and drivers that may be killed; each is ended by its own id."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.integration.daemons import PATIENCE_S, SPARK_PATIENCE_S, Nsqd, wait_until

import flintmq
from flintmq.pipeline.streams import STARVED, forget_unfinished
from flintmq.spark.encode import encode_bodies
from flintmq.spark.options import SinkOptions
from flintmq.spark.publish import Publisher

SOURCE_ROOT = str(Path(flintmq.__file__).resolve().parents[1])


def environment(**more: str) -> dict[str, str]:
    """The environment for child processes: they find the package under test and this Python."""
    path = os.pathsep.join(part for part in (SOURCE_ROOT, os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, "PYTHONPATH": path, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", **more}


class NsqdProcess:
    """A running nsqd, which keeps its ports over restarts."""

    def __init__(self, data_path: Path, durability: str = "os", *flags: str) -> None:
        self._run(Nsqd, data_path, f"--durability={durability}", *flags)

    def _run(self, program: type[Nsqd], data_path: Path, *flags: str) -> None:
        self._daemon = program(data_path, data_path.with_name(f"{data_path.name}.nsqd.txt"), flags)
        self.start()

    @property
    def address(self) -> str:
        """Where it speaks NSQ's protocol: ``host:port``."""
        return "{}:{}".format(*self._daemon.tcp)

    @property
    def http_address(self) -> str:
        return "{}:{}".format(*self._daemon.http)

    @property
    def process_id(self) -> int:
        return self._daemon.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended; a process that is stopped runs."""
        return self._daemon.is_running

    def start(self) -> None:
        """Start, and return when both ports listen."""
        self._daemon.start()

    def kill(self) -> None:
        """kill -9, unless it has ended already."""
        if self.is_running:
            self._daemon.kill()
        else:
            self._daemon.wait()

    def move(self) -> None:
        """Start again with the same data directory and other ports."""
        self._daemon.move()
        self.start()

    def stop(self) -> None:
        """Have it end by itself, and see that it logged no error of its own; it may have ended before."""
        if self.is_running:
            self._daemon.stop()
        crashes = self._daemon.crashes()
        assert not crashes, crashes[:3]

    def post(self, path: str, data: bytes = b"") -> bytes:
        return self._daemon.post(path, data).body

    def get(self, path: str) -> bytes:
        answer = self._daemon.request("GET", path)
        assert answer.status == 200, (path, answer)
        return answer.body

    def publish(self, topic: str, bodies: Sequence[bytes], per_mpub: int = 200) -> None:
        """Publish and wait until all are stored."""
        publisher = Publisher([self.address], SinkOptions.parse({"nsqd": self.address}))
        try:
            for count, messages in encode_bodies(pa.array(bodies, pa.binary())).slices(per_mpub, 1 << 20):
                publisher.publish(topic, count, messages)
            publisher.finish()
        finally:
            publisher.close()


class _OfNsqAlone(Nsqd):
    @property
    def command(self) -> list[str]:
        other = shlex.split(os.environ.get("SPARK_NSQD", ""))
        return other or [sys.executable, str(Path(__file__).with_name("plain_nsqd.py"))]


class PlainNsqd(NsqdProcess):
    """One that knows no more than NSQ's: the program in ``SPARK_NSQD``, or one of ours that has forgotten the rest."""

    def __init__(self, data_path: Path, *flags: str) -> None:
        self._run(_OfNsqAlone, data_path, *flags)

    def channel(self, topic: str, channel: str) -> dict[str, Any]:
        """Return what ``/stats`` says of a channel; nothing before it is there."""
        topics = json.loads(self.get(f"/stats?format=json&topic={topic}&channel={channel}"))["topics"]
        return dict(topics[0]["channels"][0]) if topics and topics[0]["channels"] else {}

    def unfinished(self, topic: str, channel: str) -> int:
        """Return the messages of a channel that nobody has finished."""
        found = self.channel(topic, channel)
        return int(found["depth"] + found["in_flight_count"] + found["deferred_count"]) if found else -1


class Driver:
    """A Spark driver in a session of its own, so that kill -9 takes its JVM along; the workers end with that."""

    def __init__(self, script: Path, *arguments: str, **more: str) -> None:
        # what a killed JVM leaves behind; a short path, because sockets are made below it
        self._scratch = tempfile.mkdtemp(prefix="spark-")
        scratch = {"SPARK_LOCAL_DIRS": self._scratch, "JAVA_TOOL_OPTIONS": f"-Djava.io.tmpdir={self._scratch}"}
        self._process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(**scratch, **more),
            start_new_session=True,
        )
        self.output: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.output.extend(self._process.stdout)

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative when a signal ended it."""
        return self._process.poll()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended; a process that is stopped runs."""
        return self.exit_code is None

    @property
    def is_starved(self) -> bool:
        """Whether it ended because Python did not start within the 10 s that Spark waits, which nobody can set."""
        if self.exit_code in (None, 0):
            return False
        self._reader.join(PATIENCE_S)  # it may not have read the end yet
        return any(STARVED in line for line in self.output)

    def story(self) -> str:
        """The end of its output, and behind it what went wrong: a second query that ends with the first says more."""
        lines = list(self.output)
        return "".join(lines)[-8000:] + "".join(line[:500] for line in lines if RAISED.match(line))[-2000:]

    def wait_for(self, text: str, timeout_s: float = SPARK_PATIENCE_S) -> str:
        """Wait for a line of output that contains ``text``."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for line in list(self.output):
                if text in line:
                    return line
            assert self._process.poll() is None, f"the driver ended:\n{self.story()}"
            time.sleep(0.02)
        raise AssertionError(f"no {text!r} within {timeout_s} s:\n{self.story()}")

    def pause(self) -> None:
        """Stop the driver and its JVM (SIGSTOP), and return when none of their threads runs any more.

        A thread that has just begun a process (vfork) never stops where that one is stopped before its first step: then
        all go on for a moment.
        """
        for tries_left in reversed(range(STOP_TRIES)):
            self._send(signal.SIGSTOP)
            try:
                wait_until(
                    lambda: set(self._states()) <= STOPPED,
                    lambda: f"its threads: {''.join(self._states())}",
                    PATIENCE_S / STOP_TRIES,
                )
            except AssertionError:
                if not tries_left:
                    raise
                self.go_on()
            else:
                return

    def go_on(self) -> None:
        """Have it run again after :meth:`pause`."""
        self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self._process.pid, number)

    def _states(self) -> Iterator[str]:
        """Each thread's state, as ``/proc`` has it."""
        for stat in Path("/proc").glob("[0-9]*/task/[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
                if int(group) == self._process.pid:
                    yield state

    def kill(self) -> None:
        """kill -9 of the driver, its JVM and its workers; also what is left of them when it has ended."""
        self._send(signal.SIGKILL)
        self._process.wait(PATIENCE_S)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def finish(self, timeout_s: float = SPARK_PATIENCE_S) -> str:
        """Wait for a clean end and return the output."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the driver does not end:\n{self.story()}") from None
        self._reader.join(PATIENCE_S)
        shutil.rmtree(self._scratch, ignore_errors=True)
        assert code == 0, self.story()
        return "".join(self.output)


STOP_TRIES = 6
STOPPED = set("TtZXx")
"""States of a thread that does nothing any more, or nothing until SIGCONT."""

RAISED = re.compile(r"(Caused by: )?[\w.$]+(Error|Exception)\b")
"""A line of the output with which an exception begins."""

STARTS = 3
"""Of a driver that starved, at most."""


def finished(script: Path, *arguments: str, **more: str) -> str:
    """Run a driver to a clean end and return its output; one that starved is started again."""
    for _ in range(STARTS - 1):
        driver = Driver(script, *arguments, **more)
        try:
            return driver.finish()
        except AssertionError:
            if not driver.is_starved:
                raise
    return Driver(script, *arguments, **more).finish()


def said(output: str) -> dict[str, object]:
    """What a job has printed behind the word ``said``, as JSON."""
    return dict(json.loads(next(line for line in output.splitlines() if line.startswith("said "))[5:]))


def logged(checkpoint: Path, name: str) -> int:
    """Micro-batches in the log of planned (``offsets``) or finished (``commits``) ones."""
    directory = checkpoint / name
    return sum(path.name.isdecimal() for path in directory.iterdir()) if directory.is_dir() else 0


def is_between(checkpoint: Path) -> bool:
    """Whether a micro-batch is planned and not finished."""
    done = logged(checkpoint, "commits")
    return logged(checkpoint, "offsets") > done


def stopped_between(driver: Driver, checkpoint: Path, committed: int) -> bool:
    """Stop the driver amid a micro-batch, after so many finished ones; False when it has starved before."""
    deadline = time.monotonic() + SPARK_PATIENCE_S
    while time.monotonic() < deadline and driver.is_running:
        if logged(checkpoint, "commits") >= committed and is_between(checkpoint):
            driver.pause()
            if is_between(checkpoint):  # it may have finished before it stood still
                return True
            driver.go_on()
        time.sleep(0.005)
    done = logged(checkpoint, "commits")
    assert driver.is_starved, f"{done} micro-batches finished, waited for {committed}:\n{driver.story()}"
    return False


def killed_between(start: Callable[[], Driver], committed: int, checkpoint: Path, *others: Path) -> None:
    """Kill a driver amid a micro-batch of a query, after so many finished ones; one that starved is started again.

    Args:
        others: checkpoints of its other queries, whose first plan may have been cut.
    """
    for _ in range(STARTS):
        driver = start()
        try:
            is_cut = stopped_between(driver, checkpoint, committed)
        finally:
            driver.kill()
        for each in (checkpoint, *others):
            forget_unfinished(each)  # else Spark 4.3 never starts that query again
        if is_cut:
            assert is_between(checkpoint), "no micro-batch was cut in two, the test proved nothing"
            return
    raise AssertionError(f"starved at each of {STARTS} starts:\n{driver.story()}")


def numbered(first: int, end: int, size: int = 24) -> list[bytes]:
    """Bodies that are their own number, filled up to ``size``."""
    return [b"%0*d" % (size, number) for number in range(first, end)]


def assert_each_once(bodies: Iterable[bytes], count: int) -> None:
    """Check that the bodies are the numbers 0 to ``count`` (exclusive), each exactly once."""
    found = sorted(int(body) for body in bodies)
    missing = sorted(set(range(count)) - set(found))
    assert found == list(range(count)), (
        f"{len(found)} rows, {len(set(found))} distinct of {count}; missing {missing[:10]}"
    )
