"""An nsqd in a thread, for what a real one does only on a bad day: cut answers, flipped bits, topics created anew.

A data directory that moves is a log that is handed from one to another; ``elsewhere`` makes it a node of a cluster.

It speaks the commands the Spark source and sink use (V2, IDENTIFY, OFFSETS, FETCH, CURSOR, MPUB) on 127.0.0.1, stores
with ``flintmq.batch`` and keeps a list of everything it was asked.
"""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import Struct, pack, unpack

from flintmq.batch import decode_header, encode_batch
from flintmq.message import internal_id
from flintmq.wire.commands import FETCH_UNVERIFIED

_FETCH = Struct(">QQII")
_ids = itertools.count(0xA1)


class FakeError(Exception):
    """Answered as an error frame."""


@dataclass
class FakeLog:
    """The log of one partition; ``batches`` are first sequence, end sequence, timestamp, bytes."""

    log_id: str = field(default_factory=lambda: f"{next(_ids):016x}")
    partition: int = 0
    epoch: int = 0
    start: int = 1
    end: int = 1
    batches: list[tuple[int, int, int, bytes]] = field(default_factory=list)
    channels: dict[str, int] = field(default_factory=dict)

    def append(self, bodies: Sequence[bytes], timestamp_ns: int = 1_700_000_000_000_000_000) -> None:
        data = encode_batch(internal_id(self.partition, self.end), 0, timestamp_ns, bodies)
        self.batches.append((self.end, self.end + len(bodies), timestamp_ns, data))
        self.end += len(bodies)

    def trim(self, start: int) -> None:
        self.start = start
        self.batches = [batch for batch in self.batches if batch[1] > start]

    def at(self, timestamp_ns: int) -> int:
        return next((first for first, _, stored_ns, _ in self.batches if stored_ns >= timestamp_ns), self.end)

    def fetch(self, start: int, end: int, bytes_max: int) -> bytes:
        if not self.start <= start <= self.end:
            raise FakeError(f"E_OFFSET_OUT_OF_RANGE start={self.start} end={self.end}")
        chosen: list[bytes] = []
        size, next_sequence = 0, start
        for first, batch_end, _, data in self.batches:
            if batch_end <= start:
                continue
            if first >= end or (chosen and size + len(data) > bytes_max):
                break
            chosen.append(data)
            size += len(data)
            next_sequence = batch_end
        else:
            next_sequence = max(next_sequence, min(end, self.end))
        return pack(">Q", next_sequence) + b"".join(chosen)


def _log_of(logs: list[FakeLog], words: list[str], place: int) -> FakeLog:
    """The log of the partition that a command names; it may have got another leader a moment ago."""
    for log in logs:
        if log.partition == int(words[place]):
            return log
    raise FakeError(f"E_FAILED_ON_NOT_LEADER topic {words[0]} partition {words[place]} is led by another node")


class FakeNsqd:
    """Serves until :meth:`close`; use as a context manager."""

    def __init__(self) -> None:
        self.logs: dict[str, list[FakeLog]] = {}
        self.asked: list[str] = []
        self.elsewhere: dict[str, list[dict[str, object]]] = {}
        self.published: list[tuple[str, list[bytes]]] = []
        self.failures: dict[str, list[str]] = {}
        self.connection_count = 0
        self.tells_max_timestamp = True
        self.hangs = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self._accept = threading.Thread(target=self._serve, daemon=True)
        self._accept.start()

    def __enter__(self) -> FakeNsqd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def topic(self, name: str, bodies: Sequence[bytes] = (), batch: int = 1000) -> FakeLog:
        """The log of partition 0 of a topic, created if need be, with bodies appended in batches."""
        log = self.logs.setdefault(name, [FakeLog()])[0]
        for first in range(0, len(bodies), batch):
            log.append(bodies[first : first + batch])
        return log

    def fail(self, command: str, *how: str) -> None:
        """Make the next answers to a command go wrong: ``cut``, ``close``, ``flip``, ``heartbeat``, ``hang``
        or an error text.

        One that hangs has sent half an answer, and sets ``hangs``.
        """
        self.failures.setdefault(command, []).extend(how)

    def count(self, command: str) -> int:
        return sum(line.split(" ")[0] == command for line in self.asked)

    def disconnect(self) -> None:
        """Close every connection, as a restart does."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for one in sockets:
            shut(one)

    def close(self) -> None:
        """Stop listening and end every thread."""
        shut(self._listener)
        self._accept.join(5)
        self.disconnect()
        for thread in self._threads:
            thread.join(5)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets.append(connection)
                self.connection_count += 1
            thread = threading.Thread(target=self._talk, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _talk(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as incoming:
                assert incoming.read(4) == b"  V2"
                while line := incoming.readline():
                    words = line.decode().split()
                    self.asked.append(" ".join(words))
                    self._answer(connection, words, self._payload(words[0], incoming))
        except OSError:
            return

    def _payload(self, command: str, incoming) -> bytes:
        if command in ("IDENTIFY", "MPUB"):
            return incoming.read(unpack(">I", incoming.read(4))[0])
        return incoming.read(_FETCH.size) if command == "FETCH" else b""

    def _answer(self, connection: socket.socket, words: list[str], payload: bytes) -> None:
        failure = self.failures.get(words[0], [])
        how = failure.pop(0) if failure else ""
        if how.startswith("E_"):
            connection.sendall(frame(1, how.encode()))
            return
        if how == "close":
            shut(connection)
            return
        try:
            data = self._do(words, payload)
        except FakeError as error:
            connection.sendall(frame(1, str(error).encode()))
            return
        if data is None:
            return
        answer = frame(0, data)
        if how == "flip":
            answer = answer[:-1] + bytes((answer[-1] ^ 1,))
        elif how == "heartbeat":
            answer = frame(0, b"_heartbeat_") + answer
        elif how == "cut":
            connection.sendall(answer[: len(answer) // 2])
            shut(connection)
            return
        elif how == "hang":
            connection.sendall(answer[: len(answer) // 2])
            self.hangs.set()
            while connection.recv(1 << 16):
                pass
            return
        connection.sendall(answer)

    def _do(self, words: list[str], payload: bytes) -> bytes | None:
        command, *rest = words
        if command == "NOP":
            return None
        if command == "IDENTIFY":
            return json.dumps({"version": "fake"}).encode()
        if command == "PRODUCERS":  # as an nsqd that has never heard of it
            raise FakeError("E_INVALID invalid command PRODUCERS")
        if command == "MPUB":
            return self._mpub(rest[0], payload)
        logs = self.logs.get(rest[0], [] if rest[0] in self.elsewhere else None)
        if logs is None:
            raise FakeError(f"E_TOPIC_NOT_EXIST {rest[0]}")
        if command == "OFFSETS":
            return self._offsets(rest[0], logs, int(rest[1]) if len(rest) > 1 else None)
        if command == "FETCH":
            start, end, bytes_max, epoch = _FETCH.unpack(payload)
            bytes_max &= ~FETCH_UNVERIFIED
            log = _log_of(logs, rest, 1)
            if epoch != log.epoch:
                raise FakeError(f"E_STALE_EPOCH {log.epoch}")
            return log.fetch(start, end, bytes_max)
        assert command == "CURSOR"
        log, sequence = _log_of(logs, rest, 2), int(rest[3])
        wanted = {-1: log.end, -2: log.start}.get(sequence, sequence)
        floor = log.channels.get(rest[1])
        if floor is None or (sequence >= 0 and wanted > floor):
            floor = log.channels[rest[1]] = wanted
        return json.dumps({"sequence": floor}).encode()

    def _offsets(self, topic: str, logs: list[FakeLog], timestamp_ns: int | None) -> bytes:
        partitions = []
        for log in logs:
            entry: dict[str, object] = {
                "partition": log.partition,
                "log_id": log.log_id,
                "epoch": log.epoch,
                "start": log.start,
                "end": log.end,
                "start_timestamp": log.batches[0][2] if log.batches else 0,
                "end_timestamp": log.batches[-1][2] if log.batches else 0,
                "size_bytes": sum(len(data) for _, _, _, data in log.batches),
            }
            if self.tells_max_timestamp:
                entry["max_timestamp"] = max((batch[2] for batch in log.batches), default=0)
            if timestamp_ns is not None:
                entry["at"] = log.at(timestamp_ns)
            partitions.append(entry)
        answer: dict[str, object] = {"topic": topic, "partitions": partitions}
        if topic in self.elsewhere:
            answer["elsewhere"] = self.elsewhere[topic]
        return json.dumps(answer).encode()

    def _mpub(self, topic: str, payload: bytes) -> bytes:
        (count,) = unpack(">I", payload[:4])
        bodies, position = [], 4
        for _ in range(count):
            (size,) = unpack(">I", payload[position : position + 4])
            bodies.append(payload[position + 4 : position + 4 + size])
            position += 4 + size
        assert position == len(payload)
        self.published.append((topic, bodies))
        self.topic(topic).append(bodies)
        return b"OK"


def frame(frame_type: int, data: bytes) -> bytes:
    return pack(">II", len(data) + 4, frame_type) + data


def shut(one: socket.socket) -> None:
    """Close a socket that another thread may be waiting on."""
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it was closed from the other side
    one.close()


def batch_count(answer: bytes) -> int:
    """How many batches a fetch answer holds."""
    count, position = 0, 8
    while position < len(answer):
        position += decode_header(answer, position).size
        count += 1
    return count
