"""Load for the tests that break things: publishers and consumers in threads that write down what they saw.

A message is known by the number in its body, ``<number> <padding>``. Rules of this file: a client never asks the daemon
what happened; what was sent, acknowledged, delivered and finished is written down when it was seen on the socket, and a
broken connection is an end, not an error, which tells of itself in ``ended``; any other exception in a thread fails the
test through pytest.
"""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from tests.integration.daemons import (
    ERROR,
    HEARTBEAT,
    MESSAGE,
    PATIENCE_S,
    Connection,
    Frame,
    FrameReader,
    Nsqd,
    dpub,
    fin,
    message_of,
    mpub,
    pub,
    req,
    wait_until,
)
from tests.sim.checkers import TotalQueue, total_queue

_RECEIVE_BYTES = 256 * 1024
_BODY_SIZE = 200


def body_of(number: int, size: int = _BODY_SIZE) -> bytes:
    """The body of a message: its number, padded."""
    return (b"%d " % number).ljust(size, b".")


def number_of(body: bytes) -> int:
    """The number in a body, which must be as it was published."""
    number = int(body[: body.index(b" ")])
    assert body == body_of(number, len(body)), f"a body was changed: {body[:60]!r}"
    return number


class Numbers:
    """Hands out message numbers to several publishers."""

    def __init__(self) -> None:
        self._next = itertools.count()

    def take(self, count: int) -> list[int]:
        return list(itertools.islice(self._next, count))


class Publisher(threading.Thread):
    """Publishes numbered messages on one connection, many commands ahead of their answers, until it breaks.

    Args:
        batch: messages of one command; more than one makes it MPUB.
        window: commands on their way.
        defer_ms: makes it DPUB.
        count_max: stop after so many messages; a multiple of ``batch``.

    Attributes:
        attempted: numbers that were sent, in order.
        acked_count: how many of them were acknowledged; nsqd answers in order, so they are the first ones.
        errors: error frames.
        ended: how it came to its end; empty while it runs.
        sent_ns: number -> wall time before it was sent, of deferred messages.
    """

    def __init__(
        self,
        address: tuple[str, int],
        topic: str,
        numbers: Numbers,
        *,
        batch: int = 1,
        window: int = 100,
        defer_ms: int = 0,
        size: int = _BODY_SIZE,
        count_max: int = 1_000_000,
    ) -> None:
        super().__init__(daemon=True)
        self.attempted: list[int] = []
        self.acked_count = 0
        self.errors: list[str] = []
        self.ended = ""
        self.sent_ns: dict[int, int] = {}
        self._connection = Connection(address)
        self._topic = topic
        self._numbers = numbers
        self._batch = batch
        self._window = window
        self._defer_ms = defer_ms
        self._size = size
        self._count_max = count_max
        self._stopping = threading.Event()
        self._on_way: list[int] = []  # messages of each command that is not answered

    @property
    def acked(self) -> list[int]:
        return self.attempted[: self.acked_count]

    @property
    def is_complete(self) -> bool:
        """Whether everything was acknowledged that should have been sent."""
        return self.acked_count >= self._count_max

    def stop(self) -> Publisher:
        """Send no more, wait for the answers, and end."""
        self._stopping.set()
        return self.finish()

    def finish(self) -> Publisher:
        """Wait for the end: everything sent and answered, or the connection broken."""
        self.join(PATIENCE_S * 2)
        assert not self.is_alive(), "a publisher hangs"
        return self

    def run(self) -> None:
        try:
            self._run()
            self.ended = f"{self.acked_count} of {len(self.attempted)} acknowledged"
        except OSError as error:  # the connection broke: what is not acknowledged is unknown
            self.ended = f"{error!r}, {self.acked_count} of {len(self.attempted)} acknowledged"
        finally:
            self._connection.close()

    def _run(self) -> None:
        reader = FrameReader()
        connection = self._connection.socket
        while True:
            room = self._window - len(self._on_way)
            if room >= self._window // 2 and not self._is_done:
                self._send(room)
            if not self._on_way:
                return
            data = connection.recv(_RECEIVE_BYTES)
            if not data:
                return
            for kind, answer in reader.receive(data):
                if kind == ERROR:
                    self.errors.append(answer.decode())
                elif answer == b"OK":
                    self.acked_count += self._on_way.pop(0)

    @property
    def _is_done(self) -> bool:
        return self._stopping.is_set() or len(self.attempted) >= self._count_max

    def _send(self, count: int) -> None:
        commands = []
        for _ in range(min(count, -(-(self._count_max - len(self.attempted)) // self._batch))):
            numbers = self._numbers.take(self._batch)
            bodies = [body_of(number, self._size) for number in numbers]
            if self._defer_ms:
                commands.append(dpub(self._topic, self._defer_ms, bodies[0]))
                self.sent_ns[numbers[0]] = time.time_ns()
            else:
                commands.append(pub(self._topic, bodies[0]) if self._batch == 1 else mpub(self._topic, bodies))
            self.attempted += numbers
            self._on_way.append(self._batch)
        self._connection.send(b"".join(commands))


class Delivery:
    """One delivery as the consumer saw it; times are ``time.monotonic()``."""

    __slots__ = ("attempts", "at", "number", "wall_ns")

    def __init__(self, number: int, attempts: int, at: float, wall_ns: int) -> None:
        self.number = number
        self.attempts = attempts
        self.at = at
        self.wall_ns = wall_ns


class Consumer(threading.Thread):
    """Consumes a channel on one connection until told to stop or the connection breaks.

    Args:
        rdy_count: level to ask for.
        answer: what to send for a message id: :func:`finished`, :func:`held`, :func:`requeued`.

    Attributes:
        deliveries: in the order they came.
        finished_at: number -> ``time.monotonic()`` when FIN was handed to the kernel; only with :func:`finished`.
        errors: error frames.
        ended: how it came to its end; empty while it runs.
    """

    def __init__(
        self,
        address: tuple[str, int],
        topic: str,
        channel: str,
        rdy_count: int = 500,
        answer: Callable[[bytes], bytes] = fin,
    ) -> None:
        super().__init__(daemon=True)
        self.deliveries: list[Delivery] = []
        self.finished_at: dict[int, float] = {}
        self.errors: list[str] = []
        self.ended = ""
        self._connection = Connection(address).subscribe(topic, channel, rdy_count)
        self._answer = answer
        self._stopping = threading.Event()

    def begin(self) -> Consumer:
        """Start the thread."""
        self.start()
        return self

    def stop(self) -> Consumer:
        """End the connection and wait for the thread."""
        self._stopping.set()
        self.join(PATIENCE_S)
        assert not self.is_alive(), "a consumer hangs"
        return self

    @property
    def numbers(self) -> list[int]:
        return [delivery.number for delivery in self.deliveries]

    def run(self) -> None:
        try:
            self.ended = self._run()
        except ConnectionError as error:  # the daemon was killed; one that reads nothing for long is an error
            self.ended = repr(error)
        except BaseException as error:
            self.ended = repr(error)
            raise
        finally:
            self._connection.close()

    def __str__(self) -> str:
        last = f", the last one {time.monotonic() - self.deliveries[-1].at:.1f} s ago" if self.deliveries else ""
        return (
            f"the consumer {'ended: ' + self.ended if self.ended else 'reads'}; {len(self.deliveries)} deliveries of "
            f"{len(set(self.numbers))} messages{last}; {len(self.finished_at)} finished; errors: {self.errors[:3]}"
        )

    def _run(self) -> str:
        reader = FrameReader()
        connection = self._connection.socket
        connection.settimeout(0.02)
        while not self._stopping.is_set():
            try:
                data = connection.recv(_RECEIVE_BYTES)
            except TimeoutError:
                continue
            if not data:
                return "nsqd closed the connection"
            self._receive(reader.receive(data))
        return "it was told to stop"

    def _receive(self, frames: Sequence[Frame]) -> None:
        self.errors += [data.decode() for kind, data in frames if kind == ERROR]
        messages = [message_of(data) for kind, data in frames if kind == MESSAGE]
        at, wall_ns = time.monotonic(), time.time_ns()
        numbers = []
        for _timestamp_ns, attempts, _id, body in messages:
            number = number_of(body)
            numbers.append(number)
            self.deliveries.append(Delivery(number, attempts, at, wall_ns))
        answers = b"".join(self._answer(message[2]) for message in messages)
        answers += b"NOP\n" * sum(data == HEARTBEAT for _kind, data in frames)
        if answers:
            self._connection.socket.settimeout(PATIENCE_S)
            self._connection.send(answers)
            self._connection.socket.settimeout(0.02)
        if self._answer is fin:
            self.finished_at.update(dict.fromkeys(numbers, time.monotonic()))


def held(message_id: bytes) -> bytes:
    """Answer nothing: the message stays in flight."""
    return b""


def requeued(timeout_ms: int) -> Callable[[bytes], bytes]:
    """Give every message back, to come again after ``timeout_ms``."""
    return lambda message_id: req(message_id, timeout_ms)


def drain(nsqd: Nsqd, topic: str, channel: str, timeout_s: float = PATIENCE_S * 2) -> Consumer:
    """Finish everything a channel holds, deferred messages included; return what was delivered.

    Raises:
        AssertionError: it did not come to that within ``timeout_s``, or the connection ended before; says what is left.
    """
    consumer = Consumer(nsqd.tcp, topic, channel, 2500).begin()

    def what() -> str:
        row = nsqd.stats(topic, channel) if nsqd.is_running else "nsqd does not run"
        log = "\n".join([line for line in nsqd.log.splitlines() if "GET /stats" not in line][-20:])
        return f"{topic}/{channel} drained\n{consumer}\nchannel: {json.dumps(row)}\nnsqd's last lines:\n{log}"

    def is_over() -> bool:
        if nsqd.unfinished(topic, channel) == 0:
            return True
        assert not consumer.ended, f"too early an end of what should be {what()}"
        return False

    wait_until(is_over, what, timeout_s)
    return consumer.stop()


def check(publishers: Sequence[Publisher], *consumers: Consumer) -> TotalQueue:
    """Compare all publishes with all deliveries of one channel; nothing may be lost or invented.

    Raises:
        AssertionError: says what is wrong.
    """
    result = total_queue(
        chain(publisher.attempted for publisher in publishers),
        chain(publisher.acked for publisher in publishers),
        (),
        chain(consumer.numbers for consumer in consumers),
    )
    assert result.is_ok, str(result)
    assert result.acked_count > 0, "nothing was acknowledged, so nothing was tested"
    return result


def chain(parts: Iterator[list[int]] | Sequence[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


def broken(connection: socket.socket) -> bool:
    """Whether the peer has closed a connection; data that waits is thrown away."""
    connection.setblocking(False)
    try:
        while connection.recv(_RECEIVE_BYTES):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True
