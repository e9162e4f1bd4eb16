"""What one client can do to the others of an nsqd, and the others, whose latency is watched meanwhile.

Every function is a load in the sense of harness.Load. A disturbance sets up, waits for its signal, and returns the
*phases* it went through, each with the monotonic times at which it began and ended: latencies are told apart by the
moment at which a message was sent.

Rules of this file: a disturbance is not to be the reason that a core is missing, so its process is nicer than the
others and rests where it would otherwise only measure the machine; everything has an end.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import select
import socket
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from struct import Struct
from typing import Any

from benchmarks import load
from benchmarks.load import FRAME_OVERHEAD_BYTES, ID_AT, ID_BYTES, OK, TYPE_AT, Address, Consumer, Figures, Ready

MESSAGE_BYTES = 200
BODY_BYTES_MAX = 5 * 1024 * 1024  # of an MPUB, as nsqd has it unless told otherwise
_NICENESS = 10
_SIZE = Struct(">I")
_TIME = Struct(">Q")
_HEARTBEAT = b"\0\0\0\x0f\0\0\0\0_heartbeat_"
_QUIET_S = 0.5
_BACKLOG_BATCH = 1000
_SEND_BUFFER_BYTES = 8 * 1024 * 1024
_FLOOD_COUNT = 20_000
_ASKERS = 100
_REQUESTS_AHEAD = 16
_PONG = b"\0\0\0\2OK"

Is = Callable[[], bool]


# the others


def publish_steadily(ready: Ready, address: Address, topic: str, rate: int, is_over: Is) -> Figures:
    """Single PUBs at a steady rate until it is over; each body begins with the monotonic ns at which it was sent.

    ``late_ms`` is how late this process sent the latest one: what the machine, and not the server, adds.
    """
    connection = load.connect(address, -1)
    # a server that does not read for a while must not keep the next messages from being sent and timed
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    head, tail = f"PUB {topic}\n".encode() + _SIZE.pack(MESSAGE_BYTES), bytes(MESSAGE_BYTES - _TIME.size)
    ready()
    began_ns = time.monotonic_ns()
    step_ns = 1_000_000_000 // rate
    sent = answered = late_ns = 0
    while not is_over():
        now_ns = time.monotonic_ns()
        due = (now_ns - began_ns) // step_ns + 1
        if due > sent:
            late_ns = max(late_ns, now_ns - began_ns - sent * step_ns)
            connection.sendall((head + _TIME.pack(now_ns) + tail) * (due - sent))
            sent = due
        time.sleep(max(0, began_ns + sent * step_ns - time.monotonic_ns()) / 1e9)
        with suppress(BlockingIOError):  # no answer has arrived yet
            answered += len(connection.recv(65536, socket.MSG_DONTWAIT))
    load.expect(connection, (OK * sent)[answered:])
    return {"messages": sent, "seconds": (time.monotonic_ns() - began_ns) / 1e9, "late_ms": late_ns / 1e6}


def consume_steadily(ready: Ready, address: Address, topic: str, channel: str, is_over: Is) -> Figures:
    """Receive and finish what :func:`publish_steadily` sends; when each was sent and how long it took, in ns."""
    consumer = Consumer(address, topic, channel, MESSAGE_BYTES)
    consumer.ready(2500)
    consumer.socket.settimeout(_QUIET_S)
    ready()
    began = time.perf_counter()
    stride = FRAME_OVERHEAD_BYTES + MESSAGE_BYTES
    sent_ns, delays_ns = array("q"), array("q")
    held = b""
    while True:
        try:
            fresh = consumer.socket.recv(load.RECEIVE_BUFFER_BYTES)
        except TimeoutError:
            if is_over():
                break
            continue
        now_ns = time.monotonic_ns()
        if not fresh:
            raise load.UnexpectedAnswer("closed")
        data = held + fresh
        used = len(data) // stride * stride
        fins = []
        for at in range(0, used, stride):
            if data[at + TYPE_AT] != 2:
                raise load.UnexpectedAnswer(repr(data[at : at + 64]))
            at_ns = _TIME.unpack_from(data, at + FRAME_OVERHEAD_BYTES)[0]
            sent_ns.append(at_ns)
            delays_ns.append(now_ns - at_ns)
            fins.append(b"FIN %b\n" % data[at + ID_AT : at + ID_AT + ID_BYTES])
        consumer.socket.sendall(b"".join(fins))
        held = data[used:]
    return {
        "messages": len(sent_ns),
        "seconds": time.perf_counter() - began,
        "sent_ns": sent_ns,
        "delays_ns": delays_ns,
    }


def ping_steadily(ready: Ready, address: Address, rate: int, is_over: Is) -> Figures:
    """PING nsqlookupd at a steady rate until it is over, one at a time; when each was sent and how long it took.

    What could not be sent in time counts from when it should have been.
    """
    connection = socket.create_connection(address, timeout=load.SOCKET_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(b"  V1")
    ready()
    began_ns = due_ns = time.monotonic_ns()
    step_ns = 1_000_000_000 // rate
    sent_ns, delays_ns = array("q"), array("q")
    while not is_over():
        connection.sendall(b"PING\n")
        load.expect(connection, _PONG)
        sent_ns.append(due_ns)
        delays_ns.append(time.monotonic_ns() - due_ns)
        due_ns += step_ns
        time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
    seconds = (time.monotonic_ns() - began_ns) / 1e9
    return {"messages": len(sent_ns), "seconds": seconds, "sent_ns": sent_ns, "delays_ns": delays_ns, "late_ms": 0.0}


# phases


class Phases:
    """What a disturbance has done, and when."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._rows: list[dict[str, Any]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[dict[str, Any]]:
        """Note when this part begins and ends; what is put into the dict is reported with it."""
        row: dict[str, Any] = {"phase": name, "begin_ns": time.monotonic_ns()}
        yield row
        row["end_ns"] = time.monotonic_ns()
        self._rows.append(row)

    def figures(self) -> Figures:
        return {"messages": 0, "seconds": time.perf_counter() - self._began, "phases": self._rows}


def _begin(ready: Ready) -> Phases:
    ready()
    os.nice(_NICENESS)
    return Phases()


# 1 slow consumers


def slow_consumers(
    ready: Ready, address: Address, http_address: Address, topic: str, backlog: int, seconds: float
) -> Figures:
    """One consumer that never reads and one that reads a message a second, both with RDY 2500 and a backlog."""
    for channel in ("never", "slowly"):
        call(http_address, f"/topic/create?topic={topic}")
        call(http_address, f"/channel/create?topic={topic}&channel={channel}")
    fill(address, topic, backlog)
    phases = _begin(ready)
    with phases.phase("slow"):
        sockets = [_impatient(address, topic, channel) for channel in ("never", "slowly")]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(1.0)
            sockets[1].recv(FRAME_OVERHEAD_BYTES + MESSAGE_BYTES)
    with phases.phase("they go"):
        for each in sockets:
            each.close()
        time.sleep(1.0)
    return phases.figures()


def _impatient(address: Address, topic: str, channel: str) -> socket.socket:
    """A consumer with a small receive buffer, whose messages time out after a second, which keeps nsqd busy."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(load.SOCKET_TIMEOUT_S)
    connection.connect(address)
    body = json.dumps({"heartbeat_interval": 60_000, "msg_timeout": 1000}).encode()
    connection.sendall(b"  V2IDENTIFY\n" + _SIZE.pack(len(body)) + body)
    load.expect(connection, OK)
    connection.sendall(f"SUB {topic} {channel}\n".encode())
    load.expect(connection, OK)
    connection.sendall(b"RDY 2500\n")
    return connection


# 2 huge MPUBs


def huge_mpubs(ready: Ready, address: Address, rate: float, burst: int, seconds: float) -> Figures:
    """MPUBs as large as allowed, several back to back, then a rest so that they are ``rate`` a second."""
    small = load.mpub("bulk-small", _bodies(MESSAGE_BYTES))
    large = load.mpub("bulk-large", _bodies(1024 * 1024 - 1024))
    connection = load.connect(address, -1)
    consumer = Consumer(address, "bulk-small", "drain", MESSAGE_BYTES)
    phases = _begin(ready)
    for name, command in (("small messages", small), ("large messages", large)):
        with phases.phase(name) as row:
            row["mpubs"] = _bursts(connection, command, rate, burst, seconds)
    with phases.phase("and delivered") as row:
        # what came in is drained while more comes
        consumer.ready(2500)
        end = time.monotonic() + seconds
        drained = mpubs = 0
        while time.monotonic() < end:
            connection.sendall(small)
            load.expect(connection, OK)
            mpubs += 1
            wanted = drained + (len(small) // (MESSAGE_BYTES + 4))
            rest_until = time.monotonic() + burst / rate
            while drained < wanted:
                drained += consumer.turn()
            time.sleep(max(0.0, rest_until - time.monotonic()))
        row["mpubs"], row["drained"] = mpubs, drained
    return phases.figures()


def _bodies(size: int) -> list[bytes]:
    return load.bodies((BODY_BYTES_MAX - 4) // (size + 4), size)


def _bursts(connection: socket.socket, command: bytes, rate: float, burst: int, seconds: float) -> int:
    count = 0
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        for _ in range(burst):
            connection.sendall(command)
            load.expect(connection, OK)
        count += burst
        time.sleep(max(0.0, began + count / rate - time.monotonic()))
    return count


# 3 idle connections


def idle_connections(ready: Ready, address: Address, count: int, rate: int, seconds: float) -> Figures:
    """Consumers that connect, a hundred at once, wait for messages that never come, and leave all at once."""
    phases = _begin(ready)
    with phases.phase("connecting") as row:
        heartbeats, began = Heartbeats(), time.monotonic()
        for number in range(count):
            heartbeats.add(_waiting(address, number))
            if number % 100 == 99:
                heartbeats.answer(lambda: True, max(0.0, began + (number + 1) / rate - time.monotonic()))
        heartbeats.answer(lambda: heartbeats.answered_ok < count, load.SOCKET_TIMEOUT_S)
        row["connections"] = count
    with phases.phase("idle") as row:
        heartbeats.answer(lambda: True, seconds)
        row["heartbeats"] = heartbeats.count
    with phases.phase("leaving"):
        heartbeats.close()
        time.sleep(1.0)
    return phases.figures()


def _waiting(address: Address, number: int) -> socket.socket:
    connection = socket.create_connection(address, timeout=load.SOCKET_TIMEOUT_S)
    # 1 to 30 s, as different clients have it
    body = json.dumps({"heartbeat_interval": 1000 * (1 + number % 30)}).encode()
    connection.sendall(b"  V2IDENTIFY\n%b%bSUB idle channel%d\nRDY 1\n" % (_SIZE.pack(len(body)), body, number % 50))
    return connection


class Heartbeats:
    """Answers the heartbeats of many consumers.

    Attributes:
        count: how many were answered.
        answered_ok: how many connections got the answers to IDENTIFY and SUB.
    """

    def __init__(self) -> None:
        self._sockets: dict[int, socket.socket] = {}
        self._answers: dict[int, int] = {}
        self._poll = select.epoll()
        self.count = 0
        self.answered_ok = 0

    def add(self, connection: socket.socket) -> None:
        """Answer this one from now on."""
        self._sockets[connection.fileno()] = connection
        self._answers[connection.fileno()] = 0
        self._poll.register(connection, select.EPOLLIN)

    def answer(self, goes_on: Is, seconds: float) -> None:
        """Answer what is there, then as long as ``goes_on``, at most ``seconds``."""
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            for fd, _event in self._poll.poll(max(0.0, min(left, 0.1))):
                self._read(fd)
            if left <= 0 or not goes_on():
                return

    def _read(self, fd: int) -> None:
        data = self._sockets[fd].recv(4096)
        if not data:
            raise load.UnexpectedAnswer("closed")
        answers, self._answers[fd] = self._answers[fd], self._answers[fd] + data.count(OK)
        self.answered_ok += answers < 2 <= self._answers[fd]
        beats = data.count(_HEARTBEAT)
        if beats:
            self._sockets[fd].sendall(b"NOP\n" * beats)
            self.count += beats

    def close(self) -> None:
        """Close all connections."""
        self._poll.close()
        for each in self._sockets.values():
            each.close()


# 4 topics


def topics(
    ready: Ready, address: Address, http_address: Address, count: int, seconds: float, publishers: int = 4
) -> Figures:
    """Publish to new topics in one burst, consume from each, ask for all of them again and again, delete them.

    The second time that they are asked for it is by a hundred connections at the same time.
    """
    names = [f"topic-{number:04d}" for number in range(count)]
    body = load.bodies(1, MESSAGE_BYTES)[0]
    connections = [load.connect(address, -1) for _ in range(publishers)]
    phases = _begin(ready)
    with phases.phase("creating") as row:
        for number, connection in enumerate(connections):
            connection.sendall(b"".join(load.pub(name, body) for name in names[number::publishers]))
        for number, connection in enumerate(connections):
            load.expect(connection, OK * len(names[number::publishers]))
        row["topics"] = count
    with phases.phase("subscribing"):
        heartbeats = Heartbeats()
        for name in names:
            heartbeats.add(_consumer_of(address, name))
        heartbeats.answer(lambda: heartbeats.answered_ok < count, load.SOCKET_TIMEOUT_S)
    with phases.phase("watched") as row:
        end = time.monotonic() + seconds
        row["stats"] = 0
        while time.monotonic() < end:
            call(http_address, "/stats?format=json", "GET")
            row["stats"] += 1
            heartbeats.answer(lambda: True, 0.25)
    with phases.phase("watched by many") as row:
        row["stats_bytes"] = _ask_at_once(http_address, "/stats?format=json", _ASKERS, seconds)
    heartbeats.close()
    with phases.phase("deleting"):
        connection_http = http.client.HTTPConnection(*http_address, timeout=load.SOCKET_TIMEOUT_S)
        for name in names:
            connection_http.request("POST", f"/topic/delete?topic={name}")
            response = connection_http.getresponse()
            if response.read() or response.status != 200:
                raise load.UnexpectedAnswer(f"/topic/delete: {response.status}")
    return phases.figures()


def _ask_at_once(http_address: Address, path: str, count: int, seconds: float) -> int:
    """Ask on many connections, each again and again, and read the answers away; how many bytes there were."""
    sockets = [socket.create_connection(http_address, timeout=load.SOCKET_TIMEOUT_S) for _ in range(count)]
    received, end = 0, time.monotonic() + seconds
    with select.epoll() as poll:
        by_fd = {each.fileno(): each for each in sockets}
        for fd, each in by_fd.items():
            each.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * _REQUESTS_AHEAD)
            poll.register(fd, select.EPOLLIN)
        while (left := end - time.monotonic()) > 0:
            for fd, _event in poll.poll(left):
                data = by_fd[fd].recv(load.RECEIVE_BUFFER_BYTES)
                if not data or data.startswith(b"HTTP/1.1 4"):
                    raise load.UnexpectedAnswer(repr(data[:64]))
                received += len(data)
    for each in sockets:
        each.close()
    return received


def _consumer_of(address: Address, topic: str) -> socket.socket:
    connection = socket.create_connection(address, timeout=load.SOCKET_TIMEOUT_S)
    body = b'{"heartbeat_interval": 30000}'
    # it takes the message that the topic began with, and holds it
    connection.sendall(b"  V2IDENTIFY\n%b%bSUB %b channel\nRDY 1\n" % (_SIZE.pack(len(body)), body, topic.encode()))
    return connection


# 5 deferred, requeued


def deferred(ready: Ready, address: Address, count: int, rate: int) -> Figures:
    """Messages that come due after 2 to 4 s, and a consumer that gets them then."""
    connection = load.connect(address, -1)
    consumer = Consumer(address, "deferred", "channel", MESSAGE_BYTES)
    body = _SIZE.pack(MESSAGE_BYTES) + load.bodies(1, MESSAGE_BYTES)[0]
    chance = random.Random(count)
    phases = _begin(ready)
    with phases.phase("deferring") as row:
        began, step = time.monotonic(), 1000
        for sent in range(0, count, step):
            delays = [chance.randint(2000, 4000) for _ in range(step)]
            connection.sendall(b"".join(b"DPUB deferred %d\n%b" % (delay_ms, body) for delay_ms in delays))
            load.expect(connection, OK * step)
            time.sleep(max(0.0, began + (sent + step) / rate - time.monotonic()))
        row["messages"] = count
    with phases.phase("due"):
        consumer.ready(2500)
        left = count
        while left > 0:
            left -= consumer.turn()
    consumer.close()
    return phases.figures()


def requeue_storm(ready: Ready, address: Address, backlog: int, rounds_per_s: float, seconds: float) -> Figures:
    """A consumer that gives everything back as soon as it gets it."""
    fill(address, "requeued", backlog)
    consumer = load.connect(address)
    consumer.sendall(b"SUB requeued channel\n")
    load.expect(consumer, OK)
    phases = _begin(ready)
    stride = FRAME_OVERHEAD_BYTES + MESSAGE_BYTES
    with phases.phase("requeueing") as row:
        consumer.sendall(b"RDY 2500\n")
        requeued, held = 0, b""
        began = time.monotonic()
        rounds = 0
        while time.monotonic() < began + seconds:
            held += consumer.recv(load.RECEIVE_BUFFER_BYTES)
            used = len(held) // stride * stride
            ids = [held[at + ID_AT : at + ID_AT + ID_BYTES] for at in range(0, used, stride)]
            consumer.sendall(b"".join(b"REQ %b 0\n" % each for each in ids))
            requeued += len(ids)
            held = held[used:]
            rounds += 1
            time.sleep(max(0.0, began + rounds / rounds_per_s - time.monotonic()))
        row["requeued"] = requeued
    with phases.phase("it goes"):
        consumer.close()
        time.sleep(0.5)
    return phases.figures()


# 6 floods


def flood_nsqd(ready: Ready, address: Address, http_address: Address, seconds: float, topic: str = "flood") -> Figures:
    """One connection after the other that sends the same small commands as fast as they are taken.

    Args:
        topic: that is published to; with the number of a partition, if it has some.
    """
    body = load.bodies(1, 1)[0]
    fins = b"".join(b"FIN %016x\n" % number for number in range(1_000_000, 1_000_000 + _FLOOD_COUNT))
    floods = (
        ("pipelined PUBs", address, b"  V2", load.pub(topic, body) * _FLOOD_COUNT),
        ("FINs of unknown ids", address, b"  V2SUB flood-fin channel\nRDY 1\n", fins),
        ("pipelined GET /ping", http_address, b"", b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n" * _FLOOD_COUNT),
    )
    return _floods(ready, floods, seconds)


def flood_nsqlookupd(ready: Ready, address: Address, seconds: float) -> Figures:
    """The same with what an nsqd says to nsqlookupd."""
    peer = b'{"broadcast_address":"there","tcp_port":1,"http_port":2,"version":"1"}'
    begin = b"  V1IDENTIFY\n" + _SIZE.pack(len(peer)) + peer
    return _floods(
        ready, (("pipelined REGISTERs", address, begin, b"REGISTER topic channel\n" * _FLOOD_COUNT),), seconds
    )


def _floods(ready: Ready, floods: tuple[tuple[str, Address, bytes, bytes], ...], seconds: float) -> Figures:
    phases = _begin(ready)
    for name, address, begin, again in floods:
        with phases.phase(name) as row:
            row["sent_bytes"] = _flood(address, begin, again, seconds)
        time.sleep(_QUIET_S)
    return phases.figures()


def _flood(address: Address, begin: bytes, again: bytes, seconds: float) -> int:
    """Send as fast as it is taken, and read the answers away; how much was sent."""
    with socket.create_connection(address, timeout=load.SOCKET_TIMEOUT_S) as connection:
        connection.sendall(begin)
        connection.setblocking(False)
        end, sent, position = time.monotonic() + seconds, 0, 0
        view = memoryview(again)
        while (left := end - time.monotonic()) > 0:
            readable, writable, _ = select.select([connection], [connection], [], left)
            if readable and not connection.recv(load.RECEIVE_BUFFER_BYTES):
                raise load.UnexpectedAnswer("closed")
            if writable:
                count = connection.send(view[position:])
                sent += count
                position = (position + count) % len(again)
        return sent


# helpers


def fill(address: Address, topic: str, count: int) -> None:
    """Publish a backlog."""
    connection = load.connect(address, -1)
    command = load.mpub(topic, load.bodies(_BACKLOG_BATCH, MESSAGE_BYTES))
    for _ in range(0, count, _BACKLOG_BATCH):
        connection.sendall(command)
        load.expect(connection, OK)
    connection.close()


def call(http_address: Address, path: str, method: str = "POST") -> bytes:
    """One HTTP request, whose answer is 200."""
    connection = http.client.HTTPConnection(*http_address, timeout=load.SOCKET_TIMEOUT_S)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise load.UnexpectedAnswer(f"{path}: {response.status} {answer!r}")
        return answer
    finally:
        connection.close()
