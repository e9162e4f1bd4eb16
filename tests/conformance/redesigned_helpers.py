"""What the cases of the redesigned NSQ share: its commands as bytes, its answers taken apart.

Rules of this file: no code of the daemons or of the client. Source: Youzan's TCP protocol.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from struct import Struct
from typing import Any, NamedTuple

from tests.integration.daemons import Connection, Message, Nsqd, Nsqlookupd, mpub_body, sized

RAW_ID = Struct(">QQ")
LOCATION = Struct(">QI")
STORED = Struct(">2sQQQI")
BARE = {"Accept": "application/vnd.nsq; version=1.0"}
"""What a client sends that wants no envelope."""


class Placed(NamedTuple):
    """A message of a partition; offset and raw size only when it was subscribed in order."""

    partition: int
    sequence: int
    trace_id: int
    attempts: int
    body: bytes
    offset: int = -1
    raw_size: int = -1


def placed(message: Message, is_ordered: bool = False) -> Placed:
    """Take the id of a message apart, and what stands in front of its body."""
    internal, trace_id = RAW_ID.unpack(message.id)
    location = LOCATION.unpack_from(message.body) if is_ordered else (-1, -1)
    body = message.body[LOCATION.size :] if is_ordered else message.body
    return Placed(internal >> 50, internal & (1 << 50) - 1, trace_id, message.attempts, body, *location)


def pub_to(topic: str, partition: object, body: bytes) -> bytes:
    return f"PUB {topic} {partition}\n".encode() + sized(body)


def mpub_to(topic: str, partition: object, bodies: Sequence[bytes]) -> bytes:
    return f"MPUB {topic} {partition}\n".encode() + sized(mpub_body(bodies))


def dpub_to(topic: str, partition: object, defer_ms: int, body: bytes) -> bytes:
    return f"DPUB {topic} {defer_ms} {partition}\n".encode() + sized(body)


def sub_to(topic: str, channel: str, partition: object, command: str = "SUB") -> bytes:
    return f"{command} {topic} {channel} {partition}\n".encode()


def create(nsqd: Nsqd, topic: str, partition_num: int = 2, **parameters: object) -> str:
    """A topic with partitions on one nsqd; return its name."""
    more = "".join(f"&{name}={value}" for name, value in parameters.items())
    nsqd.post(f"/topic/create?topic={topic}&partition_num={partition_num}{more}")
    return topic


@contextlib.contextmanager
def consumer_of_all(nsqd: Nsqd, topic: str, channel: str = "c", rdy_count: int = 1) -> Iterator[Connection]:
    """A connection that is subscribed to all partitions, and says that it knows of such."""
    with nsqd.connect() as connection:
        connection.ok(sub_to(topic, channel, -1))
        connection.rdy(rdy_count)
        yield connection


@contextlib.contextmanager
def in_order(
    nsqd: Nsqd, topic: str, partition: int = 0, channel: str = "c", rdy_count: int = 1
) -> Iterator[Connection]:
    """A connection that is subscribed in order."""
    with nsqd.connect() as connection:
        connection.ok(sub_to(topic, channel, partition, "SUB_ORDER"))
        if rdy_count:
            connection.rdy(rdy_count)
        yield connection


def bare(nsqlookupd: Nsqlookupd, target: str) -> tuple[int, Any]:
    """Status and JSON of a question by a client that wants no envelope."""
    return _answer(nsqlookupd, target, BARE)


def enveloped(nsqlookupd: Nsqlookupd, target: str) -> tuple[int, Any]:
    """Status and JSON of a question by a client that says nothing about envelopes."""
    return _answer(nsqlookupd, target, {})


def _answer(nsqlookupd: Nsqlookupd, target: str, headers: Mapping[str, str]) -> tuple[int, Any]:
    answer = nsqlookupd.request("GET", target, headers=dict(headers))
    return answer.status, json.loads(answer.body)


# -- trace ids and headers ---------------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """The answer to a traced publish."""

    partition: int
    sequence: int
    trace_id: int
    offset: int
    raw_size: int


def stored(answer: bytes) -> Stored:
    """Take the answer to a traced publish apart."""
    assert len(answer) == 30, answer
    ok, internal, trace_id, offset, raw_size = STORED.unpack(answer)
    assert ok == b"OK"
    return Stored(internal >> 50, internal & (1 << 50) - 1, trace_id, offset, raw_size)


def traced(trace_id: int, body: bytes) -> bytes:
    return trace_id.to_bytes(8, "big") + body


def headed(headers: object, body: bytes) -> bytes:
    """A body behind headers: bytes as they are, anything else as JSON."""
    data = headers if isinstance(headers, bytes) else json.dumps(headers).encode()
    return len(data).to_bytes(2, "big") + data + body


def one(command: str, topic: str, partition: object, body: bytes) -> bytes:
    """PUB_TRACE or PUB_EXT; no partition when it is None."""
    return _line(command, topic, partition) + sized(body)


def several(command: str, topic: str, partition: object, bodies: Sequence[bytes]) -> bytes:
    """MPUB_TRACE or MPUB_EXT."""
    return _line(command, topic, partition) + sized(mpub_body(bodies))


def _line(command: str, topic: str, partition: object) -> bytes:
    return f"{command} {topic}{'' if partition is None else f' {partition}'}\n".encode()


class Extended(NamedTuple):
    """What a consumer that knows headers gets behind the id: their version, they, the body."""

    version: int
    headers: bytes
    body: bytes


def extended(data: bytes) -> Extended:
    """Take apart what stands behind the id on an extended topic."""
    if data[0] == 0:
        return Extended(0, b"", data[1:])
    end = 3 + int.from_bytes(data[1:3], "big")
    return Extended(data[0], data[3:end], data[end:])
