"""Real nsqd, nsqlookupd and nsqadmin processes for tests, and raw connections to them.

A daemon is started with free ports, keeps them over a restart, and writes its log to a file. Everything here blocks and
has a deadline; when one passes, the failure shows the daemon's log.

Rules of this file: no code of the daemons or of the client is used, so that both sides of the wire are not wrong in the
same way; a process is ended by its own id; nothing but 127.0.0.1 is spoken to.

Source: NSQ's TCP protocol, NSQ's HTTP API, NSQ's nsqlookupd, NSQ's options.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple, TypeVar

from tests.integration import forked
from tests.ports import reserved_port

PATIENCE_S = 60.0
"""How long a test waits for what must come; a busy machine needs some of it, a broken daemon all of it."""

SPARK_PATIENCE_S = 300.0
"""The same for a query or a driver of Spark, which takes 5 to 10 s of processor time to start."""

SOON_S = PATIENCE_S / 3
"""How long what waits for nothing may take on such a machine; what it must not wait for is made to take longer."""

IS_OTHER_NSQD = "CONFORMANCE_NSQD" in os.environ
"""Whether the tests run against another implementation."""

RESPONSE, ERROR, MESSAGE = 0, 1, 2
HEARTBEAT = b"_heartbeat_"
SOURCES = Path(__file__).resolve().parents[2] / "src"
_OURS = [sys.executable, "-m", "flintmq"]
_UINT32 = Struct(">I")
_FRAME_HEADER = Struct(">II")
_MESSAGE_HEADER = Struct(">QH16s")
_RECEIVE_BYTES = 256 * 1024
_POLL_S = (0.002, 0.02)  # at first, and at most: one who asks all the time takes the processor from what it waits for
_CRASHES = ("Traceback (most recent call last)", "ended unexpectedly", "was never retrieved")

Found = TypeVar("Found")


def wait_until(
    condition: Callable[[], Found], what: str | Callable[[], str] = "", timeout_s: float = PATIENCE_S
) -> Found:
    """Call ``condition`` until it answers something true, and return that.

    Args:
        what: is waited for; a function is called when it did not come, and can say what was there instead.

    Raises:
        AssertionError: it did not within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    poll_s, poll_max_s = _POLL_S
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what() if callable(what) else what or condition}")
        time.sleep(poll_s)
        poll_s = min(poll_s * 1.25, poll_max_s)


def a_few_times(attempt: Callable[[int], None], tries: int = 5) -> None:
    """Call ``attempt`` with 0, 1, 2 and so on until nothing in it is asserted in vain; the last failure is raised.

    For what has to come within a time that a process may sleep through: a busy machine is late now and then, what is
    wrong is never right.
    """
    for number in range(tries):
        try:
            attempt(number)
            return
        except AssertionError:
            if number == tries - 1:
                raise


def in_time(test: Callable[..., None]) -> Callable[..., None]:
    """A test whose steps have to come within a time: tried as :func:`a_few_times` does, each with its own topic."""

    @functools.wraps(test)
    def tried(**fixtures: Any) -> None:
        a_few_times(lambda number: test(**{**fixtures, "topic": f"{fixtures['topic']}-{number}"}))

    return tried


# -- commands ----------------------------------------------------------------------------------------------------------


def sized(data: bytes) -> bytes:
    """``data`` behind its size as int32."""
    return _UINT32.pack(len(data)) + data


def pub(topic: str, body: bytes) -> bytes:
    return b"PUB %s\n%s" % (topic.encode(), sized(body))


def mpub_body(bodies: Sequence[bytes]) -> bytes:
    """int32 count and the sized messages: what stands behind MPUB's body size."""
    return _UINT32.pack(len(bodies)) + b"".join(map(sized, bodies))


def mpub(topic: str, bodies: Sequence[bytes]) -> bytes:
    return b"MPUB %s\n%s" % (topic.encode(), sized(mpub_body(bodies)))


def dpub(topic: str, defer_ms: int, body: bytes) -> bytes:
    return b"DPUB %s %d\n%s" % (topic.encode(), defer_ms, sized(body))


def fin(message_id: bytes) -> bytes:
    return b"FIN %s\n" % message_id


def req(message_id: bytes, timeout_ms: int) -> bytes:
    return b"REQ %s %d\n" % (message_id, timeout_ms)


def touch(message_id: bytes) -> bytes:
    return b"TOUCH %s\n" % message_id


class Frame(NamedTuple):
    """One frame from nsqd; ``kind`` is RESPONSE, ERROR or MESSAGE."""

    kind: int
    data: bytes


class Message(NamedTuple):
    """A message frame taken apart."""

    timestamp_ns: int
    attempts: int
    id: bytes
    body: bytes


def message_of(data: bytes) -> Message:
    """Take the data of a message frame apart."""
    timestamp_ns, attempts, message_id = _MESSAGE_HEADER.unpack_from(data)
    return Message(timestamp_ns, attempts, message_id, data[_MESSAGE_HEADER.size :])


class FrameReader:
    """Splits what was received into frames."""

    def __init__(self) -> None:
        self._buffer = b""

    def receive(self, data: bytes) -> list[Frame]:
        """The frames that are complete with ``data``."""
        buffer = self._buffer + data if self._buffer else data
        frames, position, size = [], 0, len(buffer)
        while size - position >= 8:
            frame_size, kind = _FRAME_HEADER.unpack_from(buffer, position)
            end = position + 4 + frame_size
            if end > size:
                break
            frames.append(Frame(kind, buffer[position + 8 : end]))
            position = end
        self._buffer = buffer[position:]
        return frames


class Closed(AssertionError):
    """The connection is closed, and a frame was expected."""


class Connection:
    """A V2 connection to nsqd on a raw socket.

    Args:
        address: host and port, or the path of a unix socket.
        magic: what is sent first.
        receive_buffer_bytes: for the kernel; a small one makes a slow reader.
        connect_s: until it must be made.
    """

    def __init__(
        self,
        address: tuple[str, int] | str,
        magic: bytes = b"  V2",
        receive_buffer_bytes: int | None = None,
        connect_s: float = PATIENCE_S,
    ) -> None:
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        if receive_buffer_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.socket.settimeout(connect_s)
        self.socket.connect(address)
        if family == socket.AF_INET:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.heartbeat_count = 0
        self._reader = FrameReader()
        self._frames: list[Frame] = []
        if magic:
            self.send(magic)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send ``data`` as it is."""
        self.socket.sendall(data)

    def any_frame(self, timeout_s: float = PATIENCE_S) -> Frame | None:
        """The next frame, heartbeats included; None when the peer closed.

        Raises:
            TimeoutError: nothing came.
        """
        deadline = time.monotonic() + timeout_s
        while not self._frames:
            self.socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = self.socket.recv(_RECEIVE_BYTES)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._frames = self._reader.receive(data)
        return self._frames.pop(0)

    def frame(self, timeout_s: float = PATIENCE_S) -> Frame:
        """The next frame that is not a heartbeat.

        Raises:
            Closed: the peer closed the connection.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                frame = self.any_frame(deadline - time.monotonic())
            except TimeoutError:
                raise AssertionError(f"no frame within {timeout_s:g} s") from None
            if frame is None:
                raise Closed("closed by nsqd")
            if frame != (RESPONSE, HEARTBEAT):
                return frame
            self.heartbeat_count += 1
            self.send(b"NOP\n")

    def response(self, timeout_s: float = PATIENCE_S) -> bytes:
        """The data of the next frame, which must be a response."""
        kind, data = self.frame(timeout_s)
        assert kind == RESPONSE, (kind, data[:200])
        return data

    def ok(self, command: bytes = b"", count: int = 1) -> None:
        """Send a command and see it answered with ``count`` times OK."""
        if command:
            self.send(command)
        for _ in range(count):
            assert self.response() == b"OK"

    def error(self, command: bytes = b"", timeout_s: float = PATIENCE_S) -> str:
        """Send a command and return the error it is answered with."""
        if command:
            self.send(command)
        kind, data = self.frame(timeout_s)
        assert kind == ERROR, (kind, data[:200])
        return data.decode()

    def identify(self, **fields: object) -> dict[str, Any]:
        """Negotiate features; return nsqd's answer."""
        self.send(b"IDENTIFY\n" + sized(json.dumps({"feature_negotiation": True, **fields}).encode()))
        answer = json.loads(self.response())
        assert isinstance(answer, dict)
        return answer

    def subscribe(self, topic: str, channel: str, rdy_count: int = 0) -> Connection:
        """Subscribe; ask for messages when ``rdy_count`` is not 0."""
        self.ok(b"SUB %s %s\n" % (topic.encode(), channel.encode()))
        if rdy_count:
            self.rdy(rdy_count)
        return self

    def rdy(self, count: int) -> None:
        self.send(b"RDY %d\n" % count)

    def message(self, timeout_s: float = PATIENCE_S) -> Message:
        """The next frame, which must be a message."""
        kind, data = self.frame(timeout_s)
        assert kind == MESSAGE, (kind, data[:200])
        return message_of(data)

    def messages(self, count: int, timeout_s: float = PATIENCE_S) -> list[Message]:
        """The next ``count`` messages."""
        return [self.message(timeout_s) for _ in range(count)]

    def finish(self, *messages: Message) -> None:
        self.send(b"".join(fin(message.id) for message in messages))

    def settle(self, topic: str = "settle#ephemeral") -> None:
        """Return when nsqd has executed every command sent so far."""
        self.ok(pub(topic, b"x"))

    def nothing_comes(self, fence: Connection | None = None) -> None:
        """See that nothing but heartbeats has come or will for all that was sent here, or answered elsewhere, so far.

        It is shown by a fence, not by a wait: what nsqd writes because of something stands before the second answer,
        which belongs to a turn that began when that of the first had ended. What is to come later (a timeout, a delay,
        another nsqd) stands behind no fence; see :meth:`silence` for that.

        Args:
            fence: the connection whose commands are answered; another one where this one is in the middle of a command,
                or may not publish.
        """
        for _ in range(2):
            (fence or self).settle()
        if IS_OTHER_NSQD:
            self.silence(0.05)  # its channels run beside its connections: no answer tells that they have come to rest
        elif fence is not None:
            self.silence(0)

    def silence(self, for_s: float) -> None:
        """See that nothing but heartbeats comes for a while; where only time can show it, see :meth:`nothing_comes`."""
        deadline = time.monotonic() + for_s
        while True:
            try:
                frame = self.any_frame(deadline - time.monotonic())
            except TimeoutError:
                return
            assert frame == (RESPONSE, HEARTBEAT), frame
            self.heartbeat_count += 1

    def wait_closed(self, timeout_s: float = PATIENCE_S) -> list[Frame]:
        """Wait until nsqd closes the connection; return what it sent before, without heartbeats."""
        deadline = time.monotonic() + timeout_s
        frames = []
        try:
            while (frame := self.any_frame(deadline - time.monotonic())) is not None:
                if frame != (RESPONSE, HEARTBEAT):
                    frames.append(frame)
        except TimeoutError:
            raise AssertionError(f"still open after {timeout_s:g} s; it sent {frames[:3]}") from None
        return frames


# -- processes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back over HTTP."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def error(self) -> tuple[int, str]:
        """Status and message of a JSON error."""
        return self.status, self.json["message"]


class Daemon:
    """One daemon as a real process, which can be killed and started again with the same ports and flags.

    Attributes:
        flags: of the next start; addresses are added.
        tcp, http: where it listens.
        started_in_s: from the start of the process to its last ``listening`` line.
    """

    program = ""
    protocols: tuple[str, ...] = ("tcp", "http")

    @property
    def command(self) -> list[str]:
        """What starts it: ours, or another implementation's that the environment names (CONFORMANCE_NSQD=/bin/nsqd)."""
        other = shlex.split(os.environ.get(f"CONFORMANCE_{self.program.upper()}", ""))
        return other or [*_OURS, self.program]

    def __init__(self, log_path: Path, flags: Iterable[str] = (), limits: Sequence[str] = ()) -> None:
        self.flags = list(flags)
        self.tcp = ("127.0.0.1", 0)
        self.http = ("127.0.0.1", 0)
        self.started_in_s = 0.0
        self._log_path = log_path
        self._limits = list(limits)  # a command that runs the daemon, such as prlimit --nofile=64
        self._log_start = 0
        self._process: subprocess.Popen[bytes] | forked.Forked | None = None
        self._reserved: list[socket.socket] = []

    # life

    def launch(self) -> None:
        """Start the process without waiting for it."""
        assert self._process is None, "it runs already"
        if not (self.tcp[1] or self.http[1]):
            self.move()
        places = (("tcp", self.tcp), ("http", self.http))
        addresses = [f"--{what}-address={host}:{port}" for what, (host, port) in places if what in self.protocols]
        self._log_start = self._log_path.stat().st_size if self._log_path.exists() else 0
        command, arguments = self.command, [*addresses, *self.flags]
        directory = self._log_path.parent
        with self._log_path.open("ab") as log:
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            if not self._limits and command == [*_OURS, self.program]:
                self._process = forked.start([self.program, *arguments], directory=directory, **streams)
                return
            self._process = subprocess.Popen(
                [*self._limits, *command, *arguments],
                env={**os.environ, "PYTHONPATH": str(SOURCES)},
                cwd=directory,
                **streams,
            )

    def move(self) -> None:
        """Listen on other ports from the next start on."""
        self._reserved += [reserved_port(), reserved_port()]
        self.tcp, self.http = (each.getsockname() for each in self._reserved[-2:])

    def start(self) -> Daemon:
        """Start the process and wait until it listens."""
        begun = time.monotonic()
        self.launch()
        self.wait_listening()
        self.started_in_s = time.monotonic() - begun
        return self

    def wait_listening(self) -> None:
        """Wait until a process that was launched listens."""
        if "tcp" in self.protocols:
            self.tcp = self._listening("TCP")
        self.http = self._listening("HTTP")

    def _listening(self, what: str) -> tuple[str, int]:
        pattern = re.compile(what + r": listening on (\S+):(\d+)\n")

        def look() -> re.Match[str] | None:
            found = pattern.search(self.log)
            assert found or self.is_running, f"{self.program} ended with {self._exit_code()}:\n{self.log}"
            return found

        found = wait_until(look, f"{what} address of {self.program}")
        assert found is not None
        return found[1], int(found[2])

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None, "it does not run"
        return self._process.pid

    def _exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait until the process ends by itself; return its exit code."""
        assert self._process is not None, "it does not run"
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.program} still runs after {timeout_s:g} s:\n{self.log}") from None
        self._process = None
        return code

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9."""
        self.send_signal(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL, self.log

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = PATIENCE_S) -> None:
        """Ask it to stop and see that it ends with exit code 0."""
        self.send_signal(number)
        code = self.wait(timeout_s)
        assert code == 0, f"exit code {code}:\n{self.log}"

    def restart(self) -> None:
        """Stop cleanly and start again."""
        self.stop()
        self.start()

    def discard(self) -> None:
        """End it, if it runs, at the end of a test."""
        while self._reserved:
            self._reserved.pop().close()
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
        self._process.wait()
        self._process = None

    # what it says

    @property
    def log(self) -> str:
        """What it wrote since it was started last."""
        with self._log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    @property
    def whole_log(self) -> str:
        """What it wrote in all of its lives."""
        return self._log_path.read_text(encoding="utf-8", errors="replace") if self._log_path.exists() else ""

    def crashes(self) -> list[str]:
        """Lines of the whole log that only a bug writes."""
        lines = self.whole_log.splitlines()
        found = [number for number, line in enumerate(lines) if any(crash in line for crash in _CRASHES)]
        return ["\n".join(lines[number : number + 25]) for number in found]

    def request(
        self, method: str, target: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """One HTTP request on a connection of its own."""
        with contextlib.closing(http.client.HTTPConnection(*self.http, timeout=PATIENCE_S)) as connection:
            connection.request(method, target, body, headers or {})
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())

    def get(self, target: str) -> Any:
        """The JSON of a GET that must succeed."""
        answer = self.request("GET", target)
        assert answer.status == 200, (target, answer.status, answer.body)
        return answer.json

    def post(self, target: str, body: bytes = b"") -> Answer:
        """A POST that must succeed."""
        answer = self.request("POST", target, body)
        assert answer.status == 200, (target, answer.status, answer.body)
        return answer

    # what the kernel knows

    def resident_bytes(self) -> int:
        """Memory of the process that is in RAM."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024

    def cpu_s(self) -> float:
        """CPU time used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Nsqd(Daemon):
    """An nsqd process with a data directory.

    Args:
        data_path: created when missing.
    """

    program = "nsqd"

    def __init__(self, data_path: Path, log_path: Path, flags: Iterable[str] = (), limits: Sequence[str] = ()) -> None:
        data_path.mkdir(parents=True, exist_ok=True)
        self.data_path = data_path
        self._written_count = 0
        super().__init__(log_path, (f"--data-path={data_path}", "--broadcast-address=127.0.0.1", *flags), limits)

    def connect(self, magic: bytes = b"  V2", receive_buffer_bytes: int | None = None) -> Connection:
        return Connection(self.tcp, magic, receive_buffer_bytes)

    def publish(self, topic: str, *bodies: bytes) -> None:
        """Publish and see it acknowledged."""
        with self.connect() as connection:
            connection.ok(mpub(topic, bodies))

    def stats(self, topic: str, channel: str = "") -> dict[str, Any]:
        """The row of a topic, or of one of its channels, which has been given all there is; it must exist."""
        if not channel:
            return self._topic_row(topic)
        rows = [each for each in self.wait_given(topic)["channels"] if each["channel_name"] == channel]
        assert rows, f"no channel {channel} of {topic}"
        found: dict[str, Any] = rows[0]
        return found

    def _topic_row(self, topic: str) -> dict[str, Any]:
        topics = self.get(f"/stats?format=json&include_mem=false&topic={topic}")["topics"]
        assert topics, f"no topic {topic}"
        row: dict[str, Any] = topics[0]
        return row

    def wait_given(self, topic: str) -> dict[str, Any]:
        """Wait until a topic has given its channels all it has; paused, or without any, it keeps it. Return its row.

        A new one begins when the nsqlookupds have said which channels it is to have.
        """

        def look() -> dict[str, Any] | None:
            row = self._topic_row(topic)
            return row if row["paused"] or not row["channels"] or row["depth"] == 0 else None

        found = wait_until(look, f"the channels of {topic} have what it has")
        assert found is not None
        return found

    def write_progress(self) -> None:
        """Return when what was finished and requeued so far survives a kill.

        That has no answer of its own, but is written with everything else that is not: a new channel is answered when
        what has it has been written.
        """
        self._written_count += 1
        self.post("/topic/create?topic=written")
        self.post(f"/channel/create?topic=written&channel=c{self._written_count}")

    def left(self, topic: str, channel: str) -> dict[str, Any]:
        """The row of a channel as its consumers leave it, once this nsqd has seen that they are gone."""
        wait_until(lambda: not self.stats(topic, channel)["clients"], f"no consumer at {topic}:{channel}")
        return self.stats(topic, channel)

    def unfinished(self, topic: str, channel: str) -> int:
        """Messages of a channel that are not finished: waiting, in flight or deferred."""
        row = self.stats(topic, channel)
        return int(row["depth"]) + int(row["in_flight_count"]) + int(row["deferred_count"])

    def partition_paths(self, topic: str) -> list[Path]:
        """The directories of the partitions of a topic with a plain name; one may be taken away meanwhile."""
        found: list[Path] = []
        for directory in sorted((self.data_path / "topics").glob(f"*{topic}")):
            with contextlib.suppress(FileNotFoundError):
                found += (directory / name for name in sorted(os.listdir(directory)) if name.startswith("p-"))
        return found

    def segment_paths(self, topic: str) -> list[Path]:
        """The segment files of a topic with a plain name, oldest first."""
        return sorted(self.data_path.glob(f"topics/*{topic}/p-0000/*.log"))


class Nsqlookupd(Daemon):
    """A nsqlookupd process."""

    program = "nsqlookupd"

    def producers(self, topic: str) -> list[int]:
        """TCP ports of the nsqds that have a topic; none when it is unknown.

        An nsqd that says anew who it is is there twice for a moment, as two connections are with NSQ's.
        """
        answer = self.request("GET", f"/lookup?topic={topic}")
        if answer.status == 404:
            return []
        return sorted({producer["tcp_port"] for producer in answer.json["producers"]})

    def channels(self, topic: str) -> list[str]:
        """The channels of a topic, sorted."""
        return sorted(self.get(f"/channels?topic={topic}")["channels"])


class Nsqadmin(Daemon):
    """An nsqadmin process."""

    program = "nsqadmin"
    protocols = ("http",)

    @property
    def url(self) -> str:
        """Of its pages, without a slash at the end."""
        return f"http://{self.http[0]}:{self.http[1]}"

    def whole(self, target: str) -> Any:
        """The JSON of a GET in which nobody is missing: a daemon that is late is left out, and is asked again."""

        def look() -> Any:
            found = self.get(target)
            return None if found.get("missing") or str(found.get("message")).startswith("WARNING") else found

        return wait_until(look, f"all daemons answer for {target}")


class Cluster:
    """Several nsqds and a nsqlookupd that keeps their coordination store, as real processes.

    Args:
        copies_on: how many nsqds there are.
        flags: of each of them.
        limits: of each of them, see :meth:`Daemons.nsqd`.
        store: the address of a store; empty: the nsqlookupd keeps it.
        lookupd_flags: of the nsqlookupd. Unless they say otherwise nothing is balanced: leaders stay where they are.
        data_paths: of the nsqds, as far as they are given.
    """

    def __init__(
        self,
        daemons: Daemons,
        copies_on: int = 3,
        flags: Iterable[str] = (),
        store: str = "",
        lookupd_flags: Iterable[str] = (),
        data_paths: Sequence[Path] = (),
        limits: Sequence[str] = (),
    ) -> None:
        kept = ["--balance-interval=0", f"--cluster-store={store or 'own'}"]
        if not store:
            kept.append(f"--store-path={daemons.new_directory('store')}")
        self.nsqlookupd = daemons.nsqlookupd(
            "--broadcast-address=127.0.0.1", "--allow-same-host", *kept, *lookupd_flags
        )
        host, tcp_port = self.nsqlookupd.tcp
        store = store or f"{host}:{self.nsqlookupd.http[1]}"
        self._reserved = [reserved_port() for _ in range(copies_on)]
        self.nodes = [
            daemons.new_nsqd(
                f"--cluster-store={store}",
                f"--peer-address=127.0.0.1:{reserved.getsockname()[1]}",
                f"--lookupd-tcp-address={host}:{tcp_port}",
                *flags,
                data_path=data_paths[index] if index < len(data_paths) else None,
                limits=limits,
            )
            for index, reserved in enumerate(self._reserved)
        ]
        self.mend()

    def mend(self) -> None:
        """Start the nodes that do not run, and wait until all of them, and not those before them, are in the store."""
        stopped = [node for node in self.nodes if not node.is_running]
        for node in stopped:
            node.discard()
            node.launch()
        for node in stopped:
            node.wait_listening()

        def is_whole() -> bool:
            rows = self.status()["nodes"]
            found = {row["tcp_port"]: row["incarnation"] for row in rows if not row["suspected"]}
            return found.keys() == {node.tcp[1] for node in self.nodes} and all(
                f"incarnation {found[node.tcp[1]]}\n" in node.log for node in self.nodes
            )

        wait_until(is_whole, "the nodes are registered")

    def close(self) -> None:
        """Let go of the ports; the processes are ended by who started them."""
        while self._reserved:
            self._reserved.pop().close()

    def status(self, topic: str = "") -> Any:
        """What the nsqlookupd says of the cluster."""
        return self.nsqlookupd.get(f"/cluster/status?topic={topic}" if topic else "/cluster/status")

    def create(self, topic: str, partition_num: int = 1, copies: int = 3) -> None:
        """Create a topic, and wait until each of its partitions can be read."""
        target = f"/topic/create?topic={topic}&partition_num={partition_num}&replicator={copies}"
        wait_until(lambda: self.nsqlookupd.request("POST", target).status == 200, f"{topic} is created")
        for number in range(partition_num):
            self.leader(topic, number)

    def expand(self, topic: str, partition_num: int) -> bool:
        """Give a topic more partitions; False when it could not be done now."""
        target = f"/topic/partition/expand?topic={topic}&partition_num={partition_num}"
        return bool(self.nsqlookupd.request("POST", target).status == 200)

    def partition(self, topic: str, number: int = 0) -> dict[str, Any]:
        """The row of a partition in the status."""
        (row,) = self.status(topic)["topics"]
        found: dict[str, Any] = next(each for each in row["partitions"] if each["partition"] == number)
        return found

    def found_leader(self, topic: str, number: int = 0, access: str = "r") -> Nsqd | None:
        """The node that nsqlookupd names to consumers (or publishers) of a partition; None: it names none."""
        accept = {"Accept": "application/vnd.nsq; version=1.0"}
        answer = self.nsqlookupd.request("GET", f"/lookup?topic={topic}&access={access}&metainfo=true", None, accept)
        peer = (answer.json.get("partitions") or {}).get(str(number)) if answer.status == 200 else None
        return next((node for node in self.nodes if peer and node.tcp[1] == peer["tcp_port"]), None)

    def leader(self, topic: str, number: int = 0, access: str = "r", but: Nsqd | None = None) -> Nsqd:
        """As :meth:`found_leader`, once there is one.

        Args:
            but: another one than this.
        """

        def look() -> Nsqd | None:
            found = self.found_leader(topic, number, access)
            return None if found is but else found

        found = wait_until(look, lambda: f"a leader of {topic}/{number}: {self.status(topic)}")
        assert found is not None
        return found

    def leader_of_plain(self, topic: str, number: int = 0, but: Nsqd | None = None) -> Nsqd:
        """As :meth:`leader`, of a topic whose partitions nsqlookupd does not name."""

        def look() -> Nsqd | None:
            row = self.partition(topic, number)
            port = row["address"].rpartition(":")[2]
            found = next((node for node in self.nodes if row["is_ready"] and str(node.tcp[1]) == port), None)
            return None if found is but else found

        found = wait_until(look, lambda: f"a leader of {topic}/{number}: {self.status(topic)}")
        assert found is not None
        return found

    def wait_in_sync(self, topic: str, count: int, number: int = 0) -> None:
        """Wait until so many copies of a partition are in sync, none by name only."""

        def is_so() -> bool:
            row = self.partition(topic, number)
            return len(row["in_sync"]) == count and not row["unconfirmed"]

        wait_until(is_so, lambda: str(self.status(topic)))


class Daemons:
    """Starts daemons in a directory and ends them all.

    Args:
        directory: for logs and, unless a test says otherwise, for data.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started: list[Daemon] = []

    def nsqd(self, *flags: str, data_path: Path | None = None, limits: Sequence[str] = ()) -> Nsqd:
        """A running nsqd.

        Args:
            data_path: default a new one of its own.
            limits: a command that runs another, such as ``prlimit``.
        """
        nsqd = self.new_nsqd(*flags, data_path=data_path, limits=limits)
        nsqd.start()
        return nsqd

    def new_nsqd(self, *flags: str, data_path: Path | None = None, limits: Sequence[str] = ()) -> Nsqd:
        """An nsqd that is not started yet."""
        name = f"nsqd-{len(self._started)}"
        nsqd = Nsqd(data_path or self._directory / name, self._directory / f"{name}.log", flags, limits)
        self._started.append(nsqd)
        return nsqd

    def new_directory(self, name: str) -> Path:
        """A directory for something else."""
        path = self._directory / f"{name}-{len(self._started)}"
        path.mkdir()
        return path

    def nsqlookupd(self, *flags: str, limits: Sequence[str] = ()) -> Nsqlookupd:
        """A running nsqlookupd; ``limits`` as for :meth:`nsqd`."""
        nsqlookupd = Nsqlookupd(self._directory / f"nsqlookupd-{len(self._started)}.log", flags, limits)
        self._started.append(nsqlookupd)
        nsqlookupd.start()
        return nsqlookupd

    def nsqadmin(self, *flags: str) -> Nsqadmin:
        """A running nsqadmin."""
        nsqadmin = Nsqadmin(self._directory / f"nsqadmin-{len(self._started)}.log", flags)
        self._started.append(nsqadmin)
        nsqadmin.start()
        return nsqadmin

    def close(self) -> None:
        """End what still runs.

        Raises:
            AssertionError: a daemon logged a traceback.
        """
        for daemon in self._started:
            daemon.discard()
        crashes = [crash for daemon in self._started for crash in daemon.crashes()]
        assert not crashes, "a daemon logged an error of its own:\n" + "\n".join(crashes[:3])


@contextlib.contextmanager
def running_cluster(directory: Path, **options: Any) -> Iterator[Cluster]:
    """A cluster with daemons of its own, which all end with it; ``options`` are those of :class:`Cluster`."""
    daemons = Daemons(directory)
    try:
        cluster = Cluster(daemons, **options)
        try:
            yield cluster
        finally:
            cluster.close()
    finally:
        daemons.close()
