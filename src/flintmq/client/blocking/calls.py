"""A publish on its way, and where it can go: what a producer's calls are made of.

Rules of this file: no waiting and no locking; :mod:`flintmq.client.blocking.producer` does both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from flintmq.client.blocking.pool import Pool
from flintmq.errors import FlintError
from flintmq.wire.client import ClientConnection

if TYPE_CHECKING:
    from flintmq.client.core.once import Writer
    from flintmq.client.core.sharding import ShardingId
    from flintmq.client.publish import Published

Build = Callable[[ClientConnection, int | None], bytes]
"""Makes the command that publishes; to a partition, if it is told one."""


class Call:
    """A call on its way.

    Attributes:
        needs_partition: it can be published only where there are partitions.
        is_ordered: it stands in the queue of its partition.
        key: what must stay in order, with those that have the same.
        sharding_id: decides the partition, as soon as their number is known.
        trace_ids: one for each body: they are sent traced where there are partitions.
        is_trace_asked: the call is to return where its message is stored.
        headers: JSON objects, one for each body.
        partition: where it goes, or went the last time.
        tries: how often nsqd refused it.
        is_unknown: it may have been stored by a try that was not answered.
        error: why the last try failed.
        overtook: an earlier one of its order failed, with this code.
        published: where it is stored, if that was asked.
        writer: that it is published with, if that is to be idempotent; until its fate is known it goes nowhere else.
        is_in_doubt: nobody knows whether that writer's next sequence is the one it has.
    """

    # Most calls never change these: they stand at the class, so that making one is cheap.
    needs_partition = False
    is_ordered = False
    key: object = None
    sharding_id: ShardingId | None = None
    trace_ids: list[int] | None = None
    is_trace_asked = False
    headers: list[bytes] | None = None
    partition: int | None = None
    tries = 0
    is_unknown = False
    error: FlintError | None = None
    overtook = ""
    published: Published | None = None
    writer: Writer | None = None
    is_in_doubt = False

    def __init__(self, topic: str, deadline: float, bodies: list[bytes], cost: int) -> None:
        self.topic = topic
        self.deadline = deadline
        self.bodies = bodies
        self.count = len(bodies)
        self.cost = cost


class Place(NamedTuple):
    """Where something can be published."""

    pool: Pool
    partition: int | None


@dataclass(slots=True)
class Turns:
    """The places that a topic is published at, and whose turn it was last."""

    places: list[Place]
    next: int


def pub_command(call: Call, body: bytes, wire: ClientConnection, partition: int | None) -> bytes:
    """One message, as the command that its call wants where there are partitions, and where there are none."""
    if call.headers is not None:
        return wire.pub_ext(call.topic, partition, call.headers[0], body, None)
    if partition is not None and call.trace_ids is not None:
        return wire.pub_trace(call.topic, partition, [(call.trace_ids[0], body)], None)
    return wire.pub(call.topic, body, None, partition)


def once_command(call: Call, wire: ClientConnection, partition: int | None) -> bytes:
    """The messages of a call with its writer, one or several."""
    assert call.writer is not None, "it was taken with the line"
    return wire.pub_once(call.topic, call.bodies, call.writer.producer_id, call.writer.sequence, None, partition)


def mpub_command(
    call: Call, bodies: list[bytes], defer_ms: int | None, wire: ClientConnection, partition: int | None
) -> bytes:
    """Several messages, with a delay if that is not None; likewise."""
    if defer_ms is not None and len(bodies) == 1:
        return wire.dpub(call.topic, defer_ms, bodies[0], None, partition if call.needs_partition else None)
    if defer_ms is not None:
        return wire.mdpub(call.topic, defer_ms, bodies, None, partition)
    if call.headers is not None:
        if len(bodies) == 1:
            return wire.pub_ext(call.topic, partition, call.headers[0], bodies[0], None)
        return wire.mpub_ext(call.topic, partition, [*zip(call.headers, bodies, strict=True)], None)
    if partition is not None and call.trace_ids is not None:
        return wire.pub_trace(call.topic, partition, [*zip(call.trace_ids, bodies, strict=True)], None)
    return wire.mpub(call.topic, bodies, None, partition)
