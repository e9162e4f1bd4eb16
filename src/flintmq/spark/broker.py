"""A small blocking client of nsqd's TCP port: offsets, fetch, cursor, MPUB.

::

    OFFSETS <topic>[ <timestamp_ns>]\\n                      -> JSON: the partitions of a topic and their ranges
    FETCH <topic> <partition>\\n                             -> u64 next_sequence + stored batches (flintmq/batch.py)
      + u64 start, u64 end, u32 max_bytes, u32 epoch
    CURSOR <topic> <channel> <partition> <sequence>\\n       -> JSON {"sequence": confirmed floor}
    MPUB <topic>\\n + u32 body_size + u32 count + count x (u32 size + body) -> OK

    every answer: u32 size | u32 type (0 response, 1 error, 2 message) | data

The rules of this file: no asyncio, as Spark's Python workers are processes that do one thing at a time; every wait
ends; a connection that failed in any way is closed and never used again; answers come in the order of requests, so
requests may be sent ahead.

Source: reference/nsq.md 1.1; the extended commands are documented with the protocol.
"""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from struct import Struct
from typing import Any

from flintmq.errors import UNREADABLE_JSON, ConnectionFailed, NsqdError, RemoteProtocolError
from flintmq.limits import BATCH_SIZE_MAX
from flintmq.message import FRAME_HEADER
from flintmq.spark.options import split_address

USER_AGENT = "flintmq-spark"
FRAME_TYPE_RESPONSE = 0
FRAME_TYPE_ERROR = 1
HEARTBEAT = b"_heartbeat_"
ANSWER_SIZE_MAX = 16 << 20  # of everything but FETCH
IDLE_CONNECTIONS_MAX = 4  # kept per nsqd and process
PAD_BYTES = 32  # readable bytes behind the content of a BatchBuffer

TOPIC_NOT_EXIST = "E_TOPIC_NOT_EXIST"
# errors after which the same request, or asking for the offsets again, may succeed; all others are final
RETRYABLE_CODES = frozenset(
    {
        TOPIC_NOT_EXIST,
        "E_OFFSET_OUT_OF_RANGE",
        "E_STALE_EPOCH",
        "E_FETCH_FAILED",
        "E_SUB_FAILED",  # of CURSOR
        "E_PUB_FAILED",
        "E_MPUB_FAILED",
    }
)

_FETCH = Struct(">QQII")
_NEXT_SEQUENCE = Struct(">Q")
_U32 = Struct(">I")


@cache
def _version() -> str:
    try:
        return version("flintmq")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"


@dataclass(frozen=True, slots=True)
class PartitionLog:
    """What nsqd says about one partition log; ``end`` is exclusive and durable.

    ``at`` is the first sequence stored at or after the timestamp asked for, ``end`` when there is none, and None when
    no timestamp was asked for.
    """

    partition: int
    log_id: str
    epoch: int
    start: int
    end: int
    size_bytes: int
    at: int | None


class BatchBuffer:
    """Memory that several FETCH answers are received into, one behind the other, and that is used again and again.

    nsqd is quickest with short answers, which fit its processor's cache; decoding is quickest with many messages.
    """

    def __init__(self, capacity: int) -> None:
        self._memory = memoryview(bytearray(capacity + PAD_BYTES))
        self.size = 0

    def clear(self) -> None:
        """Forget the content."""
        self.size = 0

    def extend(self, size: int) -> memoryview:
        """Make room for ``size`` more bytes and return it."""
        end = self.size + size
        if end + PAD_BYTES > len(self._memory):
            larger = memoryview(bytearray(end + PAD_BYTES))
            larger[: self.size] = self._memory[: self.size]
            self._memory = larger
        room = self._memory[self.size : end]
        self.size = end
        return room

    @property
    def batches(self) -> memoryview:
        """The content."""
        return self._memory[: self.size]

    @property
    def padded(self) -> memoryview:
        """The content followed by at least ``PAD_BYTES`` bytes of any content."""
        return self._memory[: self.size + PAD_BYTES]


class NsqdConnection:
    """One connection to one nsqd.

    Every method raises ``ConnectionFailed`` when the connection breaks or a wait is too long, ``NsqdError`` when nsqd
    answers an error, ``RemoteProtocolError`` when it answers nonsense.
    """

    def __init__(self, address: str, connect_timeout_s: float, timeout_s: float) -> None:
        self.address = address
        self._timeout_s = timeout_s
        try:
            self._socket = socket.create_connection(split_address(address), connect_timeout_s)
        except OSError as error:
            raise ConnectionFailed(address, str(error)) from error
        try:
            self._socket.settimeout(timeout_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._identify()
        except BaseException:
            self.close()
            raise

    def _identify(self) -> None:
        identity = {
            "client_id": f"{USER_AGENT}-{os.getpid()}",
            "hostname": socket.gethostname(),
            "user_agent": f"{USER_AGENT}/{_version()}",
            "feature_negotiation": True,
            "heartbeat_interval": -1,  # a connection may lie idle between two micro-batches for any time
        }
        body = json.dumps(identity).encode()
        self.send(b"  V2IDENTIFY\n" + _U32.pack(len(body)) + body)
        self.receive()

    def close(self) -> None:
        """Close the connection; harmless when it is closed."""
        self._socket.close()

    def is_usable(self) -> bool:
        """Whether an idle connection still stands: nothing has arrived on it, not even its end."""
        poll = select.poll()  # select() refuses descriptors above 1023
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def send(self, data: bytes) -> None:
        """Send all of ``data``."""
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise self._failed(error) from error

    def receive(self, size_max: int = ANSWER_SIZE_MAX) -> bytes:
        """Wait for the answer to the oldest request that has none.

        Args:
            size_max: a longer answer is a broken one.
        """
        while True:
            answer = self._receive(self._receive_head(size_max))
            if answer != HEARTBEAT:
                return answer
            self.send(b"NOP\n")

    def _receive_head(self, size_max: int) -> int:
        """Wait for the head of a response frame and return the size of its data; raises what an error frame says."""
        size, frame_type = FRAME_HEADER.unpack(self._receive(FRAME_HEADER.size))
        size -= FRAME_HEADER.size - _U32.size
        if not 0 <= size <= size_max:
            raise self._broken(f"a frame of {size} bytes; at most {size_max} were due")
        if frame_type == FRAME_TYPE_ERROR:
            raise self._error(self._receive(size))
        if frame_type != FRAME_TYPE_RESPONSE:
            raise self._broken(f"a frame of type {frame_type} where a response was due")
        return int(size)

    def offsets(self, topics: Sequence[str], timestamp_ns: int | None = None) -> list[list[PartitionLog]]:
        """Ask for the partition logs of several topics at once.

        Args:
            timestamp_ns: fill in ``at`` for this time.

        Returns:
            One list per topic, empty for a topic this nsqd does not have.
        """
        after = "" if timestamp_ns is None else f" {timestamp_ns}"
        found: list[list[PartitionLog]] = []
        for first in range(0, len(topics), 64):  # so many requests ahead that neither side's buffers fill
            ahead = topics[first : first + 64]
            self.send("".join(f"OFFSETS {topic}{after}\n" for topic in ahead).encode())
            found += [self._receive_offsets() for _ in ahead]
        return found

    def _receive_offsets(self) -> list[PartitionLog]:
        try:
            answer = self._json()
        except NsqdError as error:
            if error.code == TOPIC_NOT_EXIST:
                return []
            raise
        try:
            return [
                PartitionLog(
                    int(entry["partition"]),
                    str(entry["log_id"]),
                    int(entry["epoch"]),
                    int(entry["start"]),
                    int(entry["end"]),
                    int(entry["size_bytes"]),
                    None if entry.get("at") is None else int(entry["at"]),
                )
                for entry in answer["partitions"]
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise self._broken(f"partitions without the field {error}") from error

    def cursor(self, topic: str, channel: str, partition: int, sequence: int) -> int:
        """Create a channel at ``sequence`` (-1 latest, -2 earliest), or confirm everything below it if it exists.

        Returns:
            The sequence below which the channel has confirmed everything.
        """
        self.send(f"CURSOR {topic} {channel} {partition} {sequence}\n".encode())
        try:
            return int(self._json()["sequence"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._broken("a cursor without a sequence") from error

    def send_fetch(self, topic: str, partition: int, start: int, end: int, bytes_max: int, epoch: int) -> None:
        """Ask for the batches that overlap ``start`` to ``end`` (exclusive)."""
        self.send(f"FETCH {topic} {partition}\n".encode() + _FETCH.pack(start, end, bytes_max, epoch))

    def receive_fetch_head(self, bytes_max: int) -> tuple[int, int]:
        """Wait for the head of a FETCH answer: the sequence to ask for next, and how many bytes of batches follow.

        Args:
            bytes_max: what was asked for; a single batch may be longer.
        """
        while True:
            size = self._receive_head(_NEXT_SEQUENCE.size + bytes_max + BATCH_SIZE_MAX)
            if size == len(HEARTBEAT):  # no answer has this size: without a batch it has 8 bytes, with one over 100
                if self._receive(size) != HEARTBEAT:
                    raise self._broken(f"{size} bytes where batches were due")
                self.send(b"NOP\n")
                continue
            if size < _NEXT_SEQUENCE.size:
                raise self._broken(f"{size} bytes where batches were due")
            (next_sequence,) = _NEXT_SEQUENCE.unpack(self._receive(_NEXT_SEQUENCE.size))
            return next_sequence, size - _NEXT_SEQUENCE.size

    def receive_batches(self, size: int, buffer: BatchBuffer) -> None:
        """Wait for the batches whose head was received, and add them to ``buffer``."""
        self._receive_into(buffer.extend(size))

    def _json(self) -> Any:
        answer = self.receive()
        try:
            return json.loads(answer)
        except UNREADABLE_JSON as error:
            raise self._broken(f"{answer[:80]!r} where JSON was due") from error

    def _error(self, text: bytes) -> NsqdError:
        code, _, detail = text.decode("utf-8", "replace").partition(" ")
        if code == "E_INVALID" and "command" in detail:
            detail += " - this nsqd cannot be read by offset; only FlintMQ's nsqd can"
        return NsqdError(code, detail, self.address, code in RETRYABLE_CODES)

    def _receive(self, size: int) -> bytes:
        data = bytearray(size)
        self._receive_into(memoryview(data))
        return bytes(data)

    def _receive_into(self, view: memoryview) -> None:
        while len(view):
            try:
                count = self._socket.recv_into(view)
            except OSError as error:
                raise self._failed(error) from error
            if not count:
                raise self._failed(OSError("closed by nsqd"))
            view = view[count:]

    def _failed(self, error: OSError) -> ConnectionFailed:
        self.close()
        reason = f"no answer within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
        return ConnectionFailed(self.address, reason)

    def _broken(self, detail: str) -> RemoteProtocolError:
        self.close()
        return RemoteProtocolError("E_INVALID", f"nsqd {self.address} sent {detail}")


class ConnectionPool:
    """Idle connections of this process, by address.

    Spark uses its Python workers again, so a connection outlives the task and the micro-batch. A connection is taken by
    one user at a time. After a fork the child starts with none.
    """

    def __init__(self) -> None:
        self._idle: dict[str, list[NsqdConnection]] = {}
        self._process_id = os.getpid()

    @contextmanager
    def lend(self, address: str, connect_timeout_s: float, timeout_s: float) -> Iterator[NsqdConnection]:
        """Lend an idle connection, or a new one, for a ``with`` block.

        It is kept afterwards if the block ended well, with no answer due; it is closed if an exception ended it, be it
        only that Spark stopped reading early.

        Raises:
            ConnectionFailed: it cannot be made.
        """
        connection = self._take(address, connect_timeout_s, timeout_s)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        self._give(connection)

    def _take(self, address: str, connect_timeout_s: float, timeout_s: float) -> NsqdConnection:
        if self._process_id != os.getpid():
            self._idle, self._process_id = {}, os.getpid()
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if connection.is_usable():
                return connection
            connection.close()
        return NsqdConnection(address, connect_timeout_s, timeout_s)

    def _give(self, connection: NsqdConnection) -> None:
        idle = self._idle.setdefault(connection.address, [])
        if len(idle) < IDLE_CONNECTIONS_MAX:
            idle.append(connection)
        else:
            connection.close()


POOL = ConnectionPool()
