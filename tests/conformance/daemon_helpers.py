"""What the cases about nsqlookupd, discovery, flags and processes share.

Rules of this file: no code of the daemons; what is started is ended by its own id; everything waits with a deadline.

Source: NSQ's nsqlookupd, NSQ's options.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import socketserver
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import IO, Any, NamedTuple, cast

from tests.integration import forked
from tests.integration.daemons import PATIENCE_S, Nsqlookupd, sized, wait_until

PEER: dict[str, Any] = {
    "version": "1.2.1",
    "tcp_port": 14150,
    "http_port": 14151,
    "hostname": "nsqd-host",
    "broadcast_address": "nsqd.example",
    "topology_zone": "z1",
    "topology_region": "r1",
}
"""What a connection of a case says in IDENTIFY unless told otherwise."""

NODE = "nsqd.example:14151"
_INT32 = Struct(">i")


# -- nsqd's end of a connection ----------------------------------------------------------------------------------------


class LookupConnection:
    """A V1 connection to nsqlookupd on a raw socket, its magic sent."""

    def __init__(self, address: tuple[str, int] | str, magic: bytes = b"  V1") -> None:
        self.socket = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(address)
        self._received = self.socket.makefile("rb")
        if magic:
            self.send(magic)

    def __enter__(self) -> LookupConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """Its own address, which is the id of the node at nsqlookupd."""
        host, port = self.socket.getsockname()
        return f"{host}:{port}"

    def close(self) -> None:
        self._received.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def raw(self, count: int) -> bytes:
        """The next bytes as they came."""
        return self._received.read(count)

    def answer(self) -> bytes:
        """The next answer."""
        head = self.raw(4)
        assert len(head) == 4, "closed without an answer"
        return self.raw(_INT32.unpack(head)[0])

    def ask(self, command: bytes) -> bytes:
        """Send a command and return its answer."""
        self.send(command)
        return self.answer()

    def ok(self, *commands: bytes) -> LookupConnection:
        """Send commands and see each answered with OK."""
        for command in commands:
            assert self.ask(command) == b"OK", command
        return self

    def identify(self, **fields: object) -> dict[str, Any]:
        """Say who it is; return what nsqlookupd says of itself."""
        answer = json.loads(self.ask(identify_command({**PEER, **fields})))
        assert isinstance(answer, dict)
        return answer

    def is_closed(self) -> bool:
        """Whether nsqlookupd closes it, waiting for that; nothing may come before."""
        try:
            return self.raw(1) == b""
        except ConnectionResetError:
            return True


def identify_command(fields: Mapping[str, object]) -> bytes:
    """IDENTIFY with a JSON body."""
    return b"IDENTIFY\n" + sized(json.dumps(fields).encode())


def identified(nsqlookupd: Nsqlookupd, **fields: object) -> LookupConnection:
    """A connection that has said who it is."""
    connection = LookupConnection(nsqlookupd.tcp)
    connection.identify(**fields)
    return connection


def addresses_of(nsqlookupd: Nsqlookupd, topic: str) -> list[str]:
    """Broadcast addresses of the producers of a topic, sorted; the topic must be known."""
    return sorted(each["broadcast_address"] for each in nsqlookupd.get(f"/lookup?topic={topic}")["producers"])


def topics_of(nsqlookupd: Nsqlookupd) -> list[str]:
    """Every topic that nsqlookupd knows."""
    return sorted(nsqlookupd.get("/topics")["topics"])


def registered_ids(nsqlookupd: Nsqlookupd, key: str) -> list[str]:
    """Who is registered for a key ``category:key:subkey``, by id."""
    return sorted(row["id"] for row in nsqlookupd.get("/debug").get(key, []))


def unused_port() -> int:
    """A port of 127.0.0.1 on which nobody listens now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


# -- a nsqlookupd that is not one --------------------------------------------------------------------------------------


class Told(NamedTuple):
    """A command that nsqd sent.

    Attributes:
        at_s: monotonic time.
        connection: counted from 0.
        line: without its end; of IDENTIFY only the name.
    """

    at_s: float
    connection: int
    line: str


class FakeNsqlookupd:
    """Takes what nsqd says, notes it, and answers what a case wants; use as a context manager.

    Attributes:
        told: every command so far.
        identities: every body of IDENTIFY.
        magics: what each connection began with.
        closed: numbers of the connections that nsqd has closed.
        is_mute: commands are taken and not answered while this is set.
        may_answer: answers wait for this, which is set at first.
        answers: instead of OK, by the first word of the command.
        body_commands: first words of the commands, beside IDENTIFY, that are followed by a sized body.
        http_port: what IDENTIFY is answered.
    """

    def __init__(self, port: int = 0) -> None:
        self.told: list[Told] = []
        self.identities: list[dict[str, Any]] = []
        self.magics: list[bytes] = []
        self.closed: list[int] = []
        self.is_mute = False
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.answers: dict[str, bytes] = {}
        self.body_commands: tuple[str, ...] = ()
        self.http_port = unused_port()
        self._sockets: list[socket.socket] = []
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.fake = self
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def __enter__(self) -> FakeNsqlookupd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def flag(self) -> str:
        return f"--lookupd-tcp-address={self.address}"

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def lines(self) -> list[str]:
        """Every command so far, without IDENTIFY and PING."""
        return [each.line for each in self.told if each.line not in ("IDENTIFY", "PING")]

    def accepted(self, connection: socket.socket) -> None:
        """A connection has come."""
        self._sockets.append(connection)

    def disconnect(self) -> None:
        """Cut every connection."""
        for connection in self._sockets:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it is gone already
        self._sockets.clear()

    def close(self) -> None:
        """Be gone, like a nsqlookupd that was killed."""
        self._server.shutdown()
        self._server.server_close()
        self.disconnect()
        self._thread.join(PATIENCE_S)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    block_on_close = False
    fake: FakeNsqlookupd


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        fake = cast(_Server, self.server).fake
        number = len(fake.magics)
        try:
            fake.magics.append(self.rfile.read(4))
            fake.accepted(self.connection)
            while line := self.rfile.readline():
                self._take(fake, number, line.decode().strip())
        except OSError:
            pass  # cut by one of both sides
        finally:
            fake.closed.append(number)

    def _take(self, fake: FakeNsqlookupd, number: int, line: str) -> None:
        answer = b"OK"
        if line == "IDENTIFY":
            fake.identities.append(json.loads(self.rfile.read(_INT32.unpack(self.rfile.read(4))[0])))
            about = {"broadcast_address": "127.0.0.1", "hostname": "h", "tcp_port": fake.port, "version": "1.3.0"}
            answer = json.dumps({**about, "http_port": fake.http_port}).encode()
        elif line.partition(" ")[0] in fake.body_commands:
            self.rfile.read(_INT32.unpack(self.rfile.read(4))[0])
        fake.told.append(Told(time.monotonic(), number, line))
        fake.may_answer.wait(PATIENCE_S)
        if not fake.is_mute:
            self.wfile.write(sized(fake.answers.get(line.partition(" ")[0], answer)))


# -- processes that end by themselves ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that has ended."""

    code: int
    out: str
    err: str


def start_program(
    program: str,
    flags: Sequence[str],
    cwd: Path | None,
    out: IO[bytes],
    err: IO[bytes],
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes] | forked.Forked:
    """Start a daemon, ours or the one that the environment names; ``environment`` is added to this process's."""
    whole = {**os.environ, **(environment or {})}
    other = shlex.split(os.environ.get(f"CONFORMANCE_{program.upper()}", ""))
    streams: Any = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
    if other:
        return subprocess.Popen([*other, *flags], env=whole, cwd=cwd, **streams)
    return forked.start([program, *flags], environment=whole, directory=cwd, **streams)


def run_to_end(
    program: str, *flags: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run a daemon that ends by itself: one that prints something, or cannot start."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = start_program(program, flags, cwd, out, err, environment)
        try:
            code = process.wait(PATIENCE_S)
        finally:
            process.kill()
        ended = Ended(code, *(os.pread(file.fileno(), 1 << 20, 0).decode() for file in (out, err)))
    assert "Traceback" not in ended.err, ended.err
    return ended


def wait_for_lines(fake: FakeNsqlookupd, *lines: str) -> None:
    """Wait until nsqd has said all of ``lines``."""
    wait_until(lambda: set(lines) <= set(fake.lines), f"{lines} at the nsqlookupd")
