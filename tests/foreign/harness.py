"""How somebody else's client is run: one process for all runs of a file, and the runs of a file side by side.

Most runs wait for something (a timeout, a reconnect, the next poll) and use no CPU meanwhile. So a file's cases are all
started when the first test of the file asks for its result, each in a thread with a topic of its own; a test then waits
for its own case. Only the cases of tests that were selected are started.

Rules of this file: every wait has a deadline; a failure shows what the client said; a defect of the client is accepted
only with the very words by which it shows itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.foreign.clients.task import Task
from tests.foreign.servers import Servers
from tests.integration.daemons import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = Path(__file__).resolve().parent / "clients"
CASES_AT_ONCE = 10
IMPATIENCE_S = 5.0
_STDERR_LINES_SHOWN = 10


class KnownDefect(AssertionError):
    """A client failed in the way it is known to."""


@dataclass(frozen=True, slots=True)
class Defect:
    """What a client does not do because of an error of its own.

    Attributes:
        reason: for people.
        shows: a pattern that the failure must contain.
    """

    reason: str
    shows: str


@dataclass(frozen=True, slots=True)
class Client:
    """Somebody else's client.

    Attributes:
        name: as on its package index, with the version.
        command: what runs it.
        can_hold: whether it goes on while a message is held. One that does not is tested without.
        absent: what it does not have, by the name of the case, and why.
        defects: what it fails at, by the name of the case.
        notes: what the cases live with, for the documentation.
        max_in_flight_changes: values it is told while it runs.
        reconnects_by_nsqlookupd: with a direct address it takes long.
    """

    name: str
    command: tuple[str, ...]
    can_hold: bool = True
    absent: Mapping[str, str] = field(default_factory=dict)
    defects: Mapping[str, Defect] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    max_in_flight_changes: tuple[int, ...] = (10, 0, 4)
    reconnects_by_nsqlookupd: bool = False

    @property
    def word(self) -> str:
        """The name without the version."""
        return self.name.partition(" ")[0]


def python_client(name: str) -> tuple[str, ...]:
    """The command of a client in Python."""
    return (sys.executable, "-m", f"tests.foreign.clients.{name}")


class Run:
    """One run of a client and the events it printed."""

    def __init__(self, program: Program, number: int) -> None:
        self.events: list[dict[str, Any]] = []
        self._program = program
        self._number = number

    def order(self, order: str, **fields: object) -> None:
        """Tell the client what to do next."""
        self._program.send({"run": self._number, "order": order, **fields})

    def publish(
        self,
        single: Sequence[bytes] = (),
        batch: Sequence[bytes] = (),
        deferred: Sequence[bytes] = (),
        defer_ms: int = 0,
    ) -> list[bool]:
        """Publish and wait for the answers; return for each whether it is OK. A batch has one answer."""
        return self.answers(self.begin_publishing(single, batch, deferred, defer_ms))

    def begin_publishing(
        self,
        single: Sequence[bytes] = (),
        batch: Sequence[bytes] = (),
        deferred: Sequence[bytes] = (),
        defer_ms: int = 0,
    ) -> range:
        """The same without waiting; return which of the client's answers will be these."""
        done = len(self.of("published"))
        self.order("publish", single=texts(single), batch=texts(batch), deferred=texts(deferred), defer_ms=defer_ms)
        return range(done, done + len(single) + bool(batch) + len(deferred))

    def answers(self, which: range) -> list[bool]:
        """Wait for these answers; return for each whether it is OK."""
        self.wait(lambda: len(self.of("published")) >= which.stop, "every publish answered")
        return [event["ok"] for event in self.of("published")[which.start : which.stop]]

    def wait(self, condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until a condition on the events holds.

        Raises:
            AssertionError: it did not in time, or the client failed.
        """
        with self._program.news:
            holds = self._program.news.wait_for(lambda: condition() or self.is_over, timeout_s) and condition()
        assert holds, f"{'failed before' if self.of('failed') else 'not seen'}: {what}; {self.described}"

    def end(self) -> None:
        """Let it close, and see that it does."""
        self.order("end")
        self.wait_end()

    def wait_end(self) -> None:
        """See that it closes by itself."""
        self.wait(lambda: self.of("ended"), "the end")

    def of(self, event: str) -> list[dict[str, Any]]:
        """Its events of one kind so far."""
        return [each for each in self.events if each["event"] == event]

    @property
    def is_over(self) -> bool:
        return not self._program.is_running or (bool(self.events) and self.events[-1]["event"] in ("ended", "failed"))

    @property
    def described(self) -> str:
        stderr = "".join(self._program.errors[-_STDERR_LINES_SHOWN:])
        return f"the client said {self.events[-5:]}, and on stderr (of all its runs):\n{stderr}"

    @property
    def messages(self) -> list[tuple[str, int]]:
        """Body (as :func:`tests.foreign.clients.task.shown` shows it) and attempts of every message so far."""
        return [(each["body"], each["attempts"]) for each in self.of("message")]

    @property
    def bodies(self) -> list[str]:
        """The bodies of :attr:`messages`."""
        return [body for body, _ in self.messages]


def texts(bodies: Iterable[bytes]) -> list[str]:
    """Bodies as they travel in an order."""
    return [b64encode(body).decode() for body in bodies]


class Program:
    """The process in which a client does its runs.

    Attributes:
        news: notified of every event.
        errors: lines of stderr.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.news = threading.Condition()
        self.errors: list[str] = []
        self._runs: list[Run] = []
        self._is_closed = False
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=CLIENTS.parent,
            text=True,
        )
        self._readers = [
            threading.Thread(target=self._read_events, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def start(self, task: Task) -> Run:
        """Start a run."""
        with self.news:
            run = Run(self, len(self._runs))
            self._runs.append(run)
        run.order("start", task=asdict(task))
        return run

    def send(self, order: dict[str, object]) -> None:
        assert self._process.stdin is not None
        with self.news, contextlib.suppress(BrokenPipeError):  # that it ended is seen by whoever waits
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def _read_events(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # asyncnsq prints texts of its own
                event = json.loads(line)
                with self.news:
                    self._runs[event.pop("run")].events.append(event)
                    self.news.notify_all()
        with self.news:
            self._is_closed = True
            self.news.notify_all()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.errors.append(line)

    @property
    def is_running(self) -> bool:
        return not self._is_closed

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:  # a client may leave something behind that does not end
            self._process.kill()
            self._process.wait()
        for reader in self._readers:
            reader.join(PATIENCE_S)


@dataclass(frozen=True, slots=True)
class Stage:
    """What a case gets.

    Attributes:
        case: its name.
    """

    client: Client
    program: Program
    servers: Servers
    case: str

    @property
    def topic(self) -> str:
        """Of this case and client alone."""
        return f"{self.client.word}-{self.case}"

    @property
    def patience_s(self) -> float:
        """How long to wait for what may be known not to come."""
        return IMPATIENCE_S if self.case in self.client.defects else PATIENCE_S

    def start(self, role: str, **fields: Any) -> Run:
        """Start a run of the client on this topic; what consumes does so on the channel ``channel``."""
        return self.program.start(Task(**{"role": role, "topic": self.topic, "channel": "channel", **fields}))


@dataclass(frozen=True, slots=True)
class Case:
    """Something a client is put through.

    Attributes:
        name: unique for a client; also the test's, and what a client may lack or fail at.
    """

    name: str
    play: Callable[[Stage], None]


class Ahead:
    """The cases of a file, played side by side."""

    def __init__(self, client: Client, servers: Servers, cases: Iterable[Case]) -> None:
        self._client = client
        self._program = Program(client.command)
        self._threads = ThreadPoolExecutor(CASES_AT_ONCE)
        self._results: dict[str, Future[None]] = {}
        for case in cases:
            stage = Stage(client, self._program, servers, case.name)
            assert case.name not in self._results, f"two cases of the name {case.name}"
            self._results[case.name] = self._threads.submit(case.play, stage)

    def result(self, case: Case) -> None:
        """Wait for a case; fail as it failed.

        Raises:
            KnownDefect: it failed as its client is known to.
        """
        defect = self._client.defects.get(case.name)
        try:
            self._results[case.name].result()
        except AssertionError as error:
            if defect is not None and re.search(defect.shows, str(error)):
                raise KnownDefect(defect.reason) from error
            raise

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._program.close()
        self._threads.shutdown()


def parameters(client: Client, cases: Iterable[Case]) -> list[Any]:
    """The cases as parameters of a test: what a client lacks is skipped, a defect is a strict xfail."""
    return [pytest.param(case, id=case.name, marks=_marks(client, case)) for case in cases]


def _marks(client: Client, case: Case) -> list[pytest.MarkDecorator]:
    if case.name in client.absent:
        return [pytest.mark.skip(reason=f"{client.word}: {client.absent[case.name]}")]
    if case.name in client.defects:
        reason = f"{client.word}: {client.defects[case.name].reason}"
        return [pytest.mark.xfail(strict=True, raises=KnownDefect, reason=reason)]
    return []


def until(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """As ``wait_until``, but asking seldom, because many cases ask at the same time."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.03)
    return found
