"""Load for an nsqd, written to cost less CPU than the server does.

How: raw blocking sockets, bytes formatted beforehand, big reads into one buffer, frames counted by division because all
have one size, and FIN lines built for a whole read by 16 strided slices.

Run as a program it is the server that does the least, see :func:`answer`: what a request and its answer cost on this
machine before a broker does anything.

Rules of this file: every function is a load in the sense of harness.Load; answers are checked, also where that is only
a comparison of whole columns; nothing here uses the client under ``src``.

Byte picture of a message frame, see flintmq/message.py::

    size 4 | type 4 | timestamp 8 | attempts 2 | id 16 | body
"""

from __future__ import annotations

import asyncio
import json
import random
import select
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from operator import itemgetter
from struct import Struct
from types import ModuleType
from typing import Any, cast

OK = b"\0\0\0\x06\0\0\0\0OK"
ERROR_START = b"\0\0\0\x01E_"
CLOSE_WAIT = b"\0\0\0\x0e\0\0\0\0CLOSE_WAIT"
FRAME_OVERHEAD_BYTES = 34
TYPE_AT = 7  # the last byte of the frame type, 2 for messages
ID_AT = 18
ID_BYTES = 16
LOCATION_BYTES = 12  # offset and size in front of the body of an ordered message
FIN_LINE = b"FIN 0000000000000000\n"
SOCKET_TIMEOUT_S = 60.0
RECEIVE_BUFFER_BYTES = 1024 * 1024
SHUFFLE_MAX = 1024
_SIZE = Struct(">I")
_TIME = Struct(">Q")

Address = tuple[str, int]
Ready = Callable[[], None]
Figures = dict[str, Any]


class UnexpectedAnswer(Exception):
    """The server said something else than the load expects."""


def connect(address: Address, heartbeat_ms: int = 60_000) -> socket.socket:
    """Open a V2 connection; heartbeats are as rare as nsqd allows because loads do not answer them."""
    connection = socket.create_connection(address, timeout=SOCKET_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    body = json.dumps({"client_id": "load", "heartbeat_interval": heartbeat_ms}).encode()
    connection.sendall(b"  V2IDENTIFY\n" + _SIZE.pack(len(body)) + body)
    expect(connection, OK)
    return connection


def expect(connection: socket.socket, answer: bytes) -> None:
    """Read exactly ``answer``.

    Raises:
        UnexpectedAnswer: it was something else.
    """
    got = receive(connection, len(answer))
    if got != answer:
        raise UnexpectedAnswer(f"{got!r} instead of {answer!r}")


def receive(connection: socket.socket, size: int) -> bytes:
    """Read ``size`` bytes."""
    parts: list[bytes] = []
    while size:
        data = connection.recv(size)
        if not data:
            raise UnexpectedAnswer(f"closed after {b''.join(parts)!r}")
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


def bodies(count: int, size: int) -> list[bytes]:
    """Bodies that do not compress."""
    source = random.Random(size)
    return [source.randbytes(size) for _ in range(count)]


def mpub(topic: str, batch: Sequence[bytes]) -> bytes:
    """One MPUB command."""
    payload = _SIZE.pack(len(batch)) + b"".join(_SIZE.pack(len(body)) + body for body in batch)
    return f"MPUB {topic}\n".encode() + _SIZE.pack(len(payload)) + payload


def pub(topic: str, body: bytes) -> bytes:
    """One PUB command."""
    return f"PUB {topic}\n".encode() + _SIZE.pack(len(body)) + body


def http_pub(address: Address, topic: str, body: bytes) -> bytes:
    """One POST /pub on a connection that stays open."""
    head = f"POST /pub?topic={topic} HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


# publishing


def publish_batches(
    ready: Ready, address: Address, topic: str, messages: int, batch: int = 200, size: int = 200, window: int = 1
) -> Figures:
    """MPUBs from one connection, ``window`` of them unanswered at any time."""
    connection = connect(address, -1)
    command = mpub(topic, bodies(batch, size))
    commands = memoryview(command * window)
    answers = OK * (window + 1)
    count = messages // batch
    ready()
    began = time.perf_counter()
    connection.sendall(commands[: len(command) * min(window, count)])
    sent = min(window, count)
    answered = held = 0
    while answered < count:
        data = connection.recv(len(OK) * window)
        if not data or answers[held : held + len(data)] != data:
            # whole answers and a part of one are both a slice of the repeated answer
            raise UnexpectedAnswer(repr(data))
        fresh, held = divmod(held + len(data), len(OK))
        answered += fresh
        fresh = min(fresh, count - sent)
        if fresh:
            connection.sendall(commands[: len(command) * fresh])
            sent += fresh
    return {"messages": count * batch, "seconds": time.perf_counter() - began}


def request_reply(
    ready: Ready, address: Address, request: bytes, messages: int, connections: int, is_http: bool = False
) -> Figures:
    """A request and its answer, then the next, on several connections at once; every answer ends with ``OK``."""
    sockets = []
    for _ in range(connections):
        sockets.append(_connect_http(address) if is_http else connect(address, -1))
        sockets[-1].sendall(request)
        answer_bytes = len(_whole_answer(sockets[-1]))
    ready()
    began = time.perf_counter()
    if len(sockets) == 1:
        _ping_pong(sockets[0], request, answer_bytes, messages)
    else:
        _ping_pongs(sockets, request, answer_bytes, messages)
    return {"messages": messages, "seconds": time.perf_counter() - began}


def _connect_http(address: Address) -> socket.socket:
    connection = socket.create_connection(address, timeout=SOCKET_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _whole_answer(connection: socket.socket) -> bytes:
    """The answer to one request: what arrives until the words that end it."""
    answer = b""
    while not answer.endswith(b"OK"):
        data = connection.recv(4096)
        if not data:
            raise UnexpectedAnswer(f"closed after {answer!r}")
        answer += data
    return answer


def _ping_pong(connection: socket.socket, request: bytes, size: int, count: int) -> None:
    send, recv = connection.sendall, connection.recv
    for _ in range(count):
        send(request)
        got = recv(size)
        if len(got) != size or not got.endswith(b"OK"):
            raise UnexpectedAnswer(repr(got))


def _ping_pongs(sockets: Sequence[socket.socket], request: bytes, size: int, count: int) -> None:
    poll = select.epoll()
    # a large request may need several writes; a small one goes into an empty buffer, for less
    calls = {each.fileno(): (each.sendall if len(request) > 4096 else each.send, each.recv) for each in sockets}
    for fd, (send, _recv) in calls.items():
        poll.register(fd, select.EPOLLIN)
        send(request)
    sent, answered = len(calls), 0
    while answered < count:
        for fd, _event in poll.poll():
            send, recv = calls[fd]
            got = recv(size)
            if len(got) != size or not got.endswith(b"OK"):
                raise UnexpectedAnswer(repr(got))
            answered += 1
            if sent < count:
                sent += 1
                send(request)
    poll.close()


# consuming


def consume_ordered(
    ready: Ready, address: Address, topic: str, channel: str, messages: int, size: int, partition: int = 0
) -> Figures:
    """One message at a time in the order of a partition, each finished before the next; the order is checked."""
    connection = connect(address)
    connection.sendall(f"SUB_ORDER {topic} {channel} {partition}\n".encode())
    expect(connection, OK)
    frame_bytes = FRAME_OVERHEAD_BYTES + LOCATION_BYTES + size
    send, recv = connection.sendall, connection.recv
    last = b""
    ready()
    began = time.perf_counter()
    send(b"RDY 1\n")
    for _ in range(messages):
        frame = recv(frame_bytes)
        if len(frame) != frame_bytes or frame[TYPE_AT] != 2:
            frame += receive(connection, frame_bytes - len(frame))
        message_id = frame[ID_AT : ID_AT + ID_BYTES]
        if message_id <= last:
            raise UnexpectedAnswer(f"message {message_id.hex()} behind {last.hex()}")
        last = message_id
        send(b"FIN " + message_id + b"\n")
    return {"messages": messages, "seconds": time.perf_counter() - began}


class Consumer:
    """One subscribed connection that finishes whatever it gets; all bodies have one size.

    Attributes:
        socket: to wait on.
    """

    def __init__(self, address: Address, topic: str, channel: str, size: int, shuffled: bool = False) -> None:
        self.socket = connect(address)
        self.socket.sendall(f"SUB {topic} {channel}\n".encode())
        expect(self.socket, OK)
        self._frame_bytes = FRAME_OVERHEAD_BYTES + size
        self._buffer = bytearray(RECEIVE_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._held = 0
        self._shuffled = shuffled

    def ready(self, rdy_count: int) -> None:
        """Ask for messages."""
        self.socket.sendall(b"RDY %d\n" % rdy_count)

    def turn(self) -> int:
        """Read once and finish the messages that are whole; how many they were."""
        got = self.socket.recv_into(self._view[self._held :])
        if not got:
            raise UnexpectedAnswer("closed")
        end = self._held + got
        stride = self._frame_bytes
        count = end // stride
        used = count * stride
        if count:
            data = self._buffer
            if data[TYPE_AT:used:stride] != b"\x02" * count:
                raise UnexpectedAnswer(repr(bytes(data[:64])))
            self.note(self._view[:used])
            lines = bytearray(FIN_LINE * count)
            for position in range(ID_BYTES):
                lines[4 + position :: len(FIN_LINE)] = data[ID_AT + position : used : stride]
            self.socket.sendall(_shuffle(lines, count) if self._shuffled else lines)
            if end > used:
                data[: end - used] = data[used:end]
        self._held = end - used
        return count

    def note(self, frames: memoryview) -> None:
        """Whole messages were received."""

    def close(self) -> None:
        """Return when the server has handled everything sent to it: CLS is answered behind the last FIN."""
        self.socket.sendall(b"RDY 0\nCLS\n")
        data = bytes(self._buffer[: self._held])
        while not data.endswith(CLOSE_WAIT):
            fresh = self.socket.recv(65536)
            if not fresh or ERROR_START in fresh:
                raise UnexpectedAnswer(repr(fresh[:100]))
            data = data[-len(CLOSE_WAIT) :] + fresh
        self.socket.close()


def _shuffle(lines: bytearray, count: int) -> bytes:
    size = len(FIN_LINE)
    parts: list[bytes] = []
    for first in range(0, count, SHUFFLE_MAX):
        run = min(SHUFFLE_MAX, count - first)
        if run == 1:
            parts.append(bytes(lines[first * size :]))
        else:
            unpack, pick = _shuffler(run)
            parts += pick(unpack(lines, first * size))
    return b"".join(parts)


@lru_cache(maxsize=SHUFFLE_MAX + 1)
def _shuffler(count: int) -> tuple[Callable[..., tuple[bytes, ...]], Callable[[Any], tuple[bytes, ...]]]:
    order = list(range(count))
    random.Random(count).shuffle(order)
    return Struct(f"{len(FIN_LINE)}s" * count).unpack_from, itemgetter(*order)


def consume(
    ready: Ready,
    address: Address,
    topic: str,
    channels: Sequence[str],
    messages: int,
    rdy_count: int = 2500,
    size: int = 200,
    shuffled: bool = False,
) -> Figures:
    """Receive and finish ``messages`` in all, by one connection for each of ``channels`` (which may repeat)."""
    consumers = [Consumer(address, topic, channel, size, shuffled) for channel in channels]
    ready()
    began = time.perf_counter()
    for consumer in consumers:
        consumer.ready(rdy_count)
    if len(consumers) == 1:
        turn = consumers[0].turn
        left = messages
        while left > 0:
            left -= turn()
    else:
        left = consume_all(consumers, messages)
    for consumer in consumers:
        consumer.close()
    return {"messages": messages - left, "seconds": time.perf_counter() - began}


def consume_all(consumers: Sequence[Consumer], left: int) -> int:
    """Let consumers receive and finish ``left`` messages in all; how many are left then, none or less."""
    poll = select.epoll()
    turns = {consumer.socket.fileno(): consumer.turn for consumer in consumers}
    for fd in turns:
        poll.register(fd, select.EPOLLIN)
    while left > 0:
        for fd, _event in poll.poll():
            left -= turns[fd]()
    poll.close()
    return left


# latency


def publish_paced(ready: Ready, address: Address, topic: str, messages: int, rate: int, size: int = 200) -> Figures:
    """Single PUBs at a steady rate; each body begins with the monotonic time in ns at which it was sent.

    ``behind_ms`` is how late the latest one was sent, which is not the server's fault.
    """
    connection = connect(address, -1)
    head, tail = f"PUB {topic}\n".encode() + _SIZE.pack(size), bytes(size - _TIME.size)
    ready()
    began = time.perf_counter()
    began_ns = time.monotonic_ns()
    step_ns = 1_000_000_000 // rate
    sent = answered = behind_ns = 0
    while answered < messages * len(OK):
        now_ns = time.monotonic_ns()
        due = min(messages, (now_ns - began_ns) // step_ns + 1)
        if due > sent:
            behind_ns = max(behind_ns, now_ns - began_ns - sent * step_ns)
            connection.sendall((head + _TIME.pack(now_ns) + tail) * (due - sent))
            sent = due
        if sent < messages:
            time.sleep(max(0, began_ns + sent * step_ns - time.monotonic_ns()) / 1e9)
        try:
            answered += len(connection.recv(65536, socket.MSG_DONTWAIT if sent < messages else 0))
        except BlockingIOError:
            pass  # no answer has arrived yet
    return {"messages": messages, "seconds": time.perf_counter() - began, "behind_ms": behind_ns / 1e6}


def publish_timed(ready: Ready, address: Address, topic: str, messages: int, rate: int, size: int = 200) -> Figures:
    """Single PUBs at a steady rate, answers not awaited; percentiles of the time from each to its answer, in ms.

    ``behind_ms`` as in :func:`publish_paced`.
    """
    connection = connect(address, -1)
    command = pub(topic, bodies(1, size)[0])
    connection.sendall(command)
    expect(connection, OK)
    ready()
    began = time.perf_counter()
    began_ns = time.monotonic_ns()
    step_ns = 1_000_000_000 // rate
    sent_ns: list[int] = []
    delays_ns: list[int] = []
    held = behind_ns = 0
    answers = select.poll()
    answers.register(connection, select.POLLIN)
    while len(delays_ns) < messages:
        now_ns = time.monotonic_ns()
        due = min(messages, (now_ns - began_ns) // step_ns + 1)
        if due > len(sent_ns):
            behind_ns = max(behind_ns, now_ns - began_ns - len(sent_ns) * step_ns)
            fresh = due - len(sent_ns)
            sent_ns += [now_ns] * fresh
            connection.sendall(command * fresh)
        wait_ns = began_ns + len(sent_ns) * step_ns - time.monotonic_ns() if due < messages else 1_000_000_000
        if not answers.poll(max(0, wait_ns) / 1e6):
            continue
        data = connection.recv(65536)
        now_ns = time.monotonic_ns()
        if not data or ERROR_START in data:
            raise UnexpectedAnswer(repr(data))
        whole, held = divmod(held + len(data), len(OK))
        delays_ns += [now_ns - at_ns for at_ns in sent_ns[len(delays_ns) : len(delays_ns) + whole]]
    delays_ns.sort()
    shown = {f"p{percent}_ms": delays_ns[int((messages - 1) * percent / 100)] / 1e6 for percent in (50, 90, 99)}
    figures = {"messages": messages, "seconds": time.perf_counter() - began, "behind_ms": behind_ns / 1e6}
    return {**figures, **shown, "max_ms": delays_ns[-1] / 1e6}


def consume_timed(ready: Ready, address: Address, topic: str, channel: str, messages: int, size: int = 200) -> Figures:
    """Receive what :func:`publish_paced` sends; percentiles of the time from send to arrival, in ms."""
    consumer = Consumer(address, topic, channel, size)
    consumer.ready(2500)
    ready()
    began = time.perf_counter()
    stride = FRAME_OVERHEAD_BYTES + size
    delays_ns: list[int] = []
    held = b""
    while len(delays_ns) < messages:
        fresh = consumer.socket.recv(RECEIVE_BUFFER_BYTES)
        now_ns = time.monotonic_ns()
        if not fresh:
            raise UnexpectedAnswer("closed")
        data = held + fresh
        used = len(data) // stride * stride
        fins = []
        for at in range(0, used, stride):
            if data[at + TYPE_AT] != 2:
                raise UnexpectedAnswer(repr(data[at : at + 64]))
            delays_ns.append(now_ns - _TIME.unpack_from(data, at + FRAME_OVERHEAD_BYTES)[0])
            fins.append(b"FIN %b\n" % data[at + ID_AT : at + ID_AT + ID_BYTES])
        consumer.socket.sendall(b"".join(fins))
        held = data[used:]
    consumer.close()
    delays_ns.sort()
    shown = {f"p{percent}_ms": delays_ns[int((messages - 1) * percent / 100)] / 1e6 for percent in (50, 90, 99)}
    return {"messages": messages, "seconds": time.perf_counter() - began, **shown, "max_ms": delays_ns[-1] / 1e6}


# the least a server can do


class _Answer(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(OK)


async def answer() -> None:
    """Answer ``OK`` to every read until the process is ended."""
    server = await asyncio.get_running_loop().create_server(_Answer, "127.0.0.1", 0)
    address = "{}:{}".format(*server.sockets[0].getsockname())
    print(f"TCP: listening on {address}\nHTTP: listening on {address}", file=sys.stderr, flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    runner: ModuleType = asyncio
    with suppress(ImportError):
        runner = import_module("uvloop")
    runner.run(answer())
