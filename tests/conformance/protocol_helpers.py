"""What the cases of the TCP protocol share: commands that must be refused, ends of streams, rows of /stats."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.certificates import Certificates
from tests.integration.daemons import (
    ERROR,
    Connection,
    Frame,
    Message,
    Nsqd,
    dpub,
    fin,
    mpub,
    pub,
    req,
    sized,
    touch,
    wait_until,
)

SOME_ID = b"0123456789abcdef"
"""A message id that nobody has in flight."""

COMMANDS = {
    "IDENTIFY": b"IDENTIFY\n" + sized(b"{}"),
    "AUTH": b"AUTH\n" + sized(b"secret"),
    "SUB": b"SUB t c\n",
    "PUB": pub("t", b"x"),
    "MPUB": mpub("t", [b"x"]),
    "DPUB": dpub("t", 0, b"x"),
    "RDY": b"RDY 1\n",
    "FIN": fin(SOME_ID),
    "REQ": req(SOME_ID, 0),
    "TOUCH": touch(SOME_ID),
    "CLS": b"CLS\n",
    "NOP": b"NOP\n",
}
"""Every command of protocol V2 in a well-formed example."""


def identify(**fields: Any) -> bytes:
    """IDENTIFY with these fields and nothing else."""
    return b"IDENTIFY\n" + sized(json.dumps(fields).encode())


def fatal(nsqd: Nsqd, commands: bytes) -> str:
    """What a new connection is told that sends ``commands``: one error, and nothing but the end behind it."""
    with nsqd.connect() as connection:
        return fatal_on(connection, commands)


def fatal_on(connection: Connection, commands: bytes) -> str:
    """The error that ``commands`` are answered with; it must be the last frame of the connection."""
    with contextlib.suppress(ConnectionError):  # closed before all of it was sent
        connection.send(commands)
    frames = connection.wait_closed()
    assert [frame.kind for frame in frames] == [ERROR], frames
    return frames[0].data.decode("utf-8", "surrogateescape")


def goes_on(connection: Connection, commands: bytes = b"") -> None:
    """See that ``commands`` are answered with nothing and that the connection lives."""
    connection.send(commands)
    connection.settle()


def refused_but_open(connection: Connection, command: bytes) -> str:
    """The error of a command that does not end the connection."""
    error = connection.error(command)
    goes_on(connection)
    return error


def after_eof(nsqd: Nsqd, commands: bytes, magic: bytes = b"  V2") -> list[Frame]:
    """All frames that answer ``commands`` when the client ends its side of the stream behind them."""
    with nsqd.connect(magic) as connection:
        connection.send(commands)
        connection.socket.shutdown(socket.SHUT_WR)
        return connection.wait_closed()


@contextlib.contextmanager
def consumer(nsqd: Nsqd, topic: str, channel: str = "c", rdy_count: int = 1, **fields: Any) -> Iterator[Connection]:
    """A connection that is subscribed, IDENTIFYed before when there are fields."""
    with nsqd.connect() as connection:
        if fields:
            connection.identify(**fields)
        connection.subscribe(topic, channel, rdy_count)
        yield connection


@contextlib.contextmanager
def delivered(nsqd: Nsqd, topic: str, **fields: Any) -> Iterator[tuple[Connection, Message]]:
    """A consumer of a new topic with RDY 1, and the one message that it has in flight."""
    nsqd.publish(topic, b"x")
    with consumer(nsqd, topic, **fields) as connection:
        yield connection, connection.message()


def quickest(measure: Callable[[], float], enough_s: float, tries: int = 20) -> float:
    """The shortest of several times; a busy machine makes some of them long.

    Args:
        measure: does it once and returns how long it took, in seconds.
        enough_s: a time that needs no further try.
    """
    best = measure()
    for _ in range(tries - 1):
        if best < enough_s:
            break
        best = min(best, measure())
    return best


# -- /stats ------------------------------------------------------------------------------------------------------------


def topics(nsqd: Nsqd) -> set[str]:
    """The names of all topics."""
    return {
        row["topic_name"] for row in nsqd.get("/stats?format=json&include_mem=false&include_clients=false")["topics"]
    }


def channels(nsqd: Nsqd, topic: str) -> list[str]:
    """The names of a topic's channels."""
    return sorted(row["channel_name"] for row in nsqd.stats(topic)["channels"])


def clients(nsqd: Nsqd, topic: str, channel: str = "c") -> list[dict[str, Any]]:
    """The rows of a channel's consumers; none when there is no such channel."""
    found: list[dict[str, Any]] = []
    for row in nsqd.get(f"/stats?format=json&include_mem=false&topic={topic}&channel={channel}")["topics"]:
        for each in row["channels"]:
            found += each["clients"] or []
    return found


def only_client(nsqd: Nsqd, topic: str, channel: str = "c") -> dict[str, Any]:
    """The row of a channel's only consumer."""
    (row,) = clients(nsqd, topic, channel)
    return row


def producer(nsqd: Nsqd, topic: str) -> dict[str, Any]:
    """The row of the only connection that published to a topic."""
    rows: list[dict[str, Any]] = nsqd.get("/stats?format=json&include_mem=false")["producers"] or []
    (found,) = [row for row in rows if any(each["topic"] == topic for each in row["pub_counts"])]
    return found


def counts(nsqd: Nsqd, topic: str, channel: str = "c") -> tuple[int, int, int]:
    """Depth, messages in flight and deferred messages of a channel."""
    row = nsqd.stats(topic, channel)
    return row["depth"], row["in_flight_count"], row["deferred_count"]


def wait_for_counts(nsqd: Nsqd, topic: str, expected: tuple[int, int, int], channel: str = "c") -> None:
    """Wait until depth, in flight and deferred of a channel are as expected."""
    wait_until(lambda: counts(nsqd, topic, channel) == expected, f"{topic} {channel} to be {expected}")


# -- daemons -----------------------------------------------------------------------------------------------------------


def tls_flags(certificates: Certificates, *flags: str) -> tuple[str, ...]:
    """Flags of an nsqd that has a certificate."""
    files = certificates.server
    return (
        f"--tls-cert={files.cert}",
        f"--tls-key={files.key}",
        f"--tls-root-ca-file={certificates.ca}",
        "--https-address=127.0.0.1:0",
        *flags,
    )


class UnixNsqd(Nsqd):
    """An nsqd whose TCP protocol is spoken on a unix socket.

    Args:
        directory: for its data, its log and its socket; the path of the socket is bounded by the kernel.
    """

    def __init__(self, directory: Path, *flags: str) -> None:
        self.path = str(directory / "nsqd.sock")
        super().__init__(directory / "data", directory / "nsqd.log", (f"--tcp-address={self.path}", *flags))

    def start(self) -> UnixNsqd:
        self.launch()
        wait_until(lambda: f"TCP: listening on {self.path}\n" in self.log, "the line of the unix socket")
        self.http = self._listening("HTTP")
        return self

    def connect(self, magic: bytes = b"  V2", receive_buffer_bytes: int | None = None) -> Connection:
        return Connection(self.path, magic, receive_buffer_bytes)
