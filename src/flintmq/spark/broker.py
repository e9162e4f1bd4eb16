"""Requests of Spark to nsqd's TCP port: offsets, stored batches, cursors; and the connections that are idle.

::

    OFFSETS <topic>[ <timestamp_ns>]\\n                      -> JSON: the partitions of a topic and their ranges
    FETCH <topic> <partition>\\n                             -> u64 next_sequence + stored batches (flintmq/batch.py)
      + u64 start, u64 end, u32 max_bytes, u32 epoch
    CURSOR <topic> <channel> <partition> <sequence>\\n       -> JSON {"sequence": confirmed floor}

The rules of this file: connections are those of the blocking client (:mod:`flintmq.client.blocking.pipeline`), as
Spark's Python workers are processes that do one thing at a time; a connection is used again only with the options it
was made with.

Source: docs/reference/protocol.md.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from struct import Struct
from typing import Any

from flintmq.client import security
from flintmq.client.blocking.pipeline import Pipeline
from flintmq.client.options import system_env
from flintmq.errors import UNREADABLE_JSON, ConnectionFailed, FlintError, NsqdError, RemoteProtocolError
from flintmq.limits import BATCH_SIZE_MAX
from flintmq.spark.link import refusal_with_spark_names, silent_options, spark_names
from flintmq.spark.options import PLAIN, LinkOptions
from flintmq.wire import commands
from flintmq.wire.frames import HEARTBEAT

ACCEPTED_MAX = 10_000  # remembered in a process
IDLE_CONNECTIONS_MAX = 4  # kept per nsqd and process
OFFSETS_AHEAD_MAX = 64  # so few that neither side's buffers fill
PAD_BYTES = 32  # readable bytes behind the content of a BatchBuffer

TOPIC_NOT_EXIST = "E_TOPIC_NOT_EXIST"
OFFSET_OUT_OF_RANGE = "E_OFFSET_OUT_OF_RANGE"

_ANY_NSQD = "only FlintMQ's nsqd can; mode=spool and mode=direct read any other"
_NEXT_SEQUENCE = Struct(">Q")


@dataclass(frozen=True, slots=True)
class PartitionLog:
    """The state of one partition log as the nsqd tells it that has it; ``end`` is exclusive and durable.

    ``epoch`` is 0 of a log without copies. ``at`` is the first sequence stored at or after the timestamp asked for,
    ``end`` when there is none, and None when no timestamp was asked for. ``is_caught_up`` is false of a spool that has
    yet to take what waits in nsqd; ``waits_for`` says what has kept it from that for ``waits_s``. ``timestamp_max`` is
    the latest timestamp of its messages, in ns; 0: nsqd does not say, or there is none.
    """

    nsqd: str
    partition: int
    log_id: str
    epoch: int
    start: int
    end: int
    size_bytes: int
    at: int | None
    is_caught_up: bool = True
    timestamp_max: int = 0
    waits_for: str = ""
    waits_s: float = 0.0

    @property
    def mean_bytes(self) -> float:
        """Mean size of its messages, in bytes; 0 of an empty one."""
        return self.size_bytes / max(1, self.end - self.start)


@dataclass(frozen=True, slots=True)
class LedElsewhere:
    """A partition log of the cluster that an nsqd knows of and does not serve; ``nsqd`` is who does, empty: nobody."""

    partition: int
    log_id: str
    epoch: int
    nsqd: str


@dataclass(frozen=True, slots=True)
class TopicLogs:
    """Logs of a topic, as one nsqd tells it; ``is_known`` is false when it has never heard of the topic."""

    logs: tuple[PartitionLog, ...] = ()
    elsewhere: tuple[LedElsewhere, ...] = ()
    is_known: bool = True


class BatchBuffer:
    """Memory that several FETCH answers are received into, one behind the other, and that is used again and again.

    nsqd is quickest with short answers, which fit its processor's cache; decoding is quickest with many messages.
    """

    def __init__(self, capacity: int) -> None:
        self._memory = _uninitialised(capacity + PAD_BYTES)
        self.size = 0

    def clear(self) -> None:
        """Forget the content."""
        self.size = 0

    def extend(self, size: int) -> memoryview:
        """Make room for ``size`` more bytes and return it."""
        end = self.size + size
        if end + PAD_BYTES > len(self._memory):
            larger = _uninitialised(end + PAD_BYTES)
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


def _uninitialised(size: int) -> memoryview:
    """Return memory that is not touched before it is used: zeroing 8 MiB costs each task 0.4 ms and more."""
    import numpy as np  # executors have it; who only plans does without

    return np.empty(size, np.uint8).data


class NotByOffset(NsqdError):
    """This nsqd keeps no log that can be read by offset: it is NSQ's, or Youzan's."""

    def instead(self, way: str) -> NotByOffset:
        """Return the same for somebody who has another way than a stream of Spark's has."""
        said = self.detail.partition(f": {_ANY_NSQD}")[0]
        return NotByOffset(self.code, f"{said}: {way}", self.nsqd)


class NsqdConnection(Pipeline):
    """One connection to one nsqd.

    Every method raises ``ConnectionFailed`` when the connection breaks or a wait is too long, ``NsqdError`` when nsqd
    answers an error, ``RemoteProtocolError`` when it answers nonsense.

    Args:
        connect_timeout_s: until it can be used: TCP, TLS and AUTH included.
        timeout_s: until nsqd must have taken a request, or answered.
        link: how it is secured, and what it shows.

    Attributes:
        name: that no other connection has, of any process; an nsqd that was started again is behind a new one.

    Raises:
        OptionError: a file or secret that ``link`` names is not to be had on this host.
    """

    def __init__(self, address: str, connect_timeout_s: float, timeout_s: float, link: LinkOptions = PLAIN) -> None:
        self.link = link
        self.name = secrets.token_hex(8)
        options = silent_options(link, connect_timeout_s)
        with spark_names():
            super().__init__(address, options, system_env(), time.monotonic, timeout_s)
        if len(_accepted) >= ACCEPTED_MAX:
            _accepted.clear()
        _accepted.add((address, link))

    def refused(self, code: str, detail: str) -> NsqdError:
        """Return the exception for an error that nsqd answered."""
        error = refusal_with_spark_names(super().refused(code, detail))
        if code == "E_INVALID":  # what it does not understand now it will not understand later
            error.retryable = False
            if "invalid command" in detail:
                said = f"{error.detail} - this nsqd cannot be read by offset"
                return NotByOffset(code, f"{said}: {_ANY_NSQD}", error.nsqd)
        elif code == OFFSET_OUT_OF_RANGE:  # asking for the offsets again says what is there
            error.retryable = True
        return error

    def offsets(
        self, topics: Sequence[str], timestamp_ns: int | None = None, times: Mapping[str, int] = {}
    ) -> list[TopicLogs]:
        """Ask for the partition logs of several topics at once.

        Args:
            timestamp_ns: fill in ``at`` for this time.
            times: another time for some of the topics.

        Returns:
            One entry per topic.
        """
        found: list[TopicLogs] = []
        for first in range(0, len(topics), OFFSETS_AHEAD_MAX):
            ahead = topics[first : first + OFFSETS_AHEAD_MAX]
            self.send(b"".join(commands.offsets(topic, times.get(topic, timestamp_ns)) for topic in ahead))
            found += [self._receive_offsets() for _ in ahead]
        return found

    def _receive_offsets(self) -> TopicLogs:
        try:
            answer = self._json()
        except NsqdError as error:
            if error.code == TOPIC_NOT_EXIST:
                return TopicLogs(is_known=False)
            raise
        try:
            return TopicLogs(
                tuple(self._log(entry) for entry in answer["partitions"]),
                tuple(
                    LedElsewhere(int(entry["partition"]), str(entry["log_id"]), int(entry["epoch"]), str(entry["nsqd"]))
                    for entry in answer.get("elsewhere", ())
                ),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self.broken(f"partitions without the field {error}") from error

    def _log(self, entry: Mapping[str, Any]) -> PartitionLog:
        return PartitionLog(
            self.address,
            int(entry["partition"]),
            str(entry["log_id"]),
            int(entry["epoch"]),
            int(entry["start"]),
            int(entry["end"]),
            int(entry["size_bytes"]),
            None if entry.get("at") is None else int(entry["at"]),
            entry.get("is_caught_up", True) is True,
            int(entry.get("max_timestamp", 0)),
            str(entry.get("waits_for", "")),
            float(entry.get("waits_s", 0.0)),
        )

    def cursor(self, topic: str, channel: str, partition: int, sequence: int) -> int:
        """Create a channel at ``sequence`` (-1 latest, -2 earliest), or confirm everything below it if it exists.

        Returns:
            The sequence below which the channel has confirmed everything.
        """
        self.send(commands.cursor(topic, channel, partition, sequence))
        try:
            return int(self._json()["sequence"])
        except (KeyError, TypeError, ValueError) as error:
            raise self.broken("a cursor without a sequence") from error

    def send_fetch(
        self,
        topic: str,
        partition: int,
        start: int,
        end: int,
        bytes_max: int,
        epoch: int,
        is_verified: bool = True,
    ) -> None:
        """Ask for the batches that overlap ``start`` to ``end`` (exclusive), verified by nsqd or not."""
        self.send(commands.fetch(topic, partition, start, end, bytes_max, epoch, is_verified))

    def receive_fetch_head(self, bytes_max: int) -> tuple[int, int]:
        """Wait for the head of a FETCH answer: the sequence to ask for next, and how many bytes of batches follow.

        Args:
            bytes_max: what was asked for; a single batch may be longer.
        """
        while True:
            size = self.receive_head(_NEXT_SEQUENCE.size + bytes_max + BATCH_SIZE_MAX)
            if size == len(HEARTBEAT):  # no answer has this size: without a batch it has 8 bytes, with one over 100
                if self.receive_bytes(size) != HEARTBEAT:
                    raise self.broken(f"{size} bytes where batches were due")
                self.send(commands.NOP)
                continue
            if size < _NEXT_SEQUENCE.size:
                raise self.broken(f"{size} bytes where batches were due")
            (next_sequence,) = _NEXT_SEQUENCE.unpack(self.receive_bytes(_NEXT_SEQUENCE.size))
            return next_sequence, size - _NEXT_SEQUENCE.size

    def receive_batches(self, size: int, buffer: BatchBuffer) -> None:
        """Wait for the batches whose head was received, and add them to ``buffer``."""
        self.receive_into(buffer.extend(size))

    def _json(self) -> Any:
        answer = self.receive()
        try:
            return json.loads(answer)
        except UNREADABLE_JSON as error:
            raise self.broken(f"{answer[:80]!r} where JSON was due") from error


_accepted: set[tuple[str, LinkOptions]] = set()
"""The nsqds that have let this process in, and the options with which they did."""

FAILURES = (ConnectionFailed, RemoteProtocolError, NsqdError)
"""Errors of a connection, for :func:`is_final`."""


def is_final(error: FlintError, address: str, link: LinkOptions) -> bool:
    """Whether trying this nsqd again is of no use until somebody changes something.

    One that has let this process in before, and does not now, has rather lost its auth server for a while, or is being
    given another certificate.
    """
    return security.is_final(error, (address, link) in _accepted)


class ConnectionPool:
    """Idle connections of this process, by address and options.

    Spark uses its Python workers again, so a connection outlives the task and the micro-batch. A connection is taken by
    one user at a time. After a fork the child starts with none.
    """

    def __init__(self) -> None:
        self._idle: dict[tuple[str, LinkOptions], list[NsqdConnection]] = {}
        self._process_id = os.getpid()

    @contextmanager
    def lend(
        self, address: str, connect_timeout_s: float, timeout_s: float, link: LinkOptions = PLAIN
    ) -> Iterator[NsqdConnection]:
        """Lend an idle connection, or a new one, for a ``with`` block.

        It is kept afterwards if the block ended well, with no answer due; it is closed if an exception ended it, be it
        only that Spark stopped reading early.

        Raises:
            ConnectionFailed: it cannot be made.
            NsqdError: nsqd does not let this process in.
            OptionError: as :class:`NsqdConnection`.
        """
        connection = self._take(address, connect_timeout_s, timeout_s, link)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        self._give(connection)

    def _take(self, address: str, connect_timeout_s: float, timeout_s: float, link: LinkOptions) -> NsqdConnection:
        if self._process_id != os.getpid():
            self._idle, self._process_id = {}, os.getpid()
        idle = self._idle.get((address, link))
        while idle:
            try:
                connection = idle.pop()
            except IndexError:  # another thread was quicker
                break
            if connection.is_usable():
                return connection
            connection.close()
        return NsqdConnection(address, connect_timeout_s, timeout_s, link)

    def _give(self, connection: NsqdConnection) -> None:
        idle = self._idle.setdefault((connection.address, connection.link), [])
        if len(idle) < IDLE_CONNECTIONS_MAX:
            idle.append(connection)
        else:
            connection.close()


POOL = ConnectionPool()
