"""Dead letters: what is published of a message that is given up, and what is needed of the broker to publish it.

Headers, of the version that is a JSON object, all values texts::

    ##dead_letter_reason       max_attempts
    ##dead_letter_topic        topic and channel that gave the message up
    ##dead_letter_channel
    ##dead_letter_attempts     deliveries, as the last consumer was told
    ##dead_letter_id           internal id, 16 hex digits
    ##dead_letter_timestamp    when it was published, ns
    ##dead_letter_client       address of the last consumer, if it is known

Headers that the message had are kept. A topic without headers gets the body alone.

Rules of this file: no IO; nothing of a channel is changed.

Source: Youzan's TCP protocol (JSON headers, the dispatch tag among them).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import msgspec

from flintmq.batch import HEADER_BYTES
from flintmq.broker.channel import Channel
from flintmq.broker.clock_steps import ClockSteps
from flintmq.broker.partition import Ended, Partition, PublishGroup
from flintmq.broker.state import Message
from flintmq.broker.topic import Topic
from flintmq.errors import UNREADABLE_JSON, StorageError
from flintmq.limits import BATCH_SIZE_MAX
from flintmq.message import (
    ATTEMPTS,
    ATTEMPTS_POSITION,
    FRAME_OVERHEAD_BYTES,
    HEADERS_SIZE_MAX,
    ID_POSITION,
    JSON,
    MESSAGE_HEADER,
    TAG,
    TAG_HEADER,
    TRACE_ID_SIZE,
    body_position,
    extended_body,
    headers_of,
    hex_id,
    internal_id,
)
from flintmq.topic_meta import TopicMeta

MAX_ATTEMPTS = "max_attempts"
PREFIX = "##dead_letter_"
_BATCH_BYTES_MAX = BATCH_SIZE_MAX - HEADER_BYTES - FRAME_OVERHEAD_BYTES - TRACE_ID_SIZE - 16


@dataclass(slots=True)
class GivenUp:
    """A message on its way to the dead letters.

    Attributes:
        client: address of its last consumer; empty when that is not known.
    """

    message: Message
    client: str = ""

    @property
    def sequence(self) -> int:
        return self.message.sequence


class Elsewhere(Protocol):
    """A topic for dead letters that another node leads.

    Attributes:
        meta: of it.
    """

    @property
    def meta(self) -> TopicMeta: ...

    def publish(self, bodies: list[bytes]) -> Ended:
        """Have bodies stored that have their headers; what is returned ends when they are, or may be not."""
        ...


FindElsewhere: TypeAlias = Callable[[str, Partition], Elsewhere | Ended | None]
"""Finds the topic of that name for what a partition gives up; what ends when there is one; None: look for it here."""


def _here(_topic: str, _source: Partition) -> None:
    """Look for every topic here."""


@dataclass(slots=True)
class DeadLetters:
    """The part of the broker that channels need to give messages up.

    Attributes:
        topic: finds the topic of that name or creates it, and remembers that it has dead letters.
        elsewhere: asked first.
        publish: publishes bodies that have their headers.
        mark: lets a channel be looked at, unless it has been deleted.
        report: told why something could not be published.
        clock_steps: how the wall clock was set.
    """

    topic: Callable[[str, int], Topic]
    publish: Callable[[Partition, list[bytes]], PublishGroup]
    mark: Callable[[Channel], None]
    report: Callable[[StorageError], None]
    clock_steps: ClockSteps = field(default_factory=ClockSteps)
    elsewhere: FindElsewhere = field(default=_here)


def dead_letter(
    source: Partition, channel: str, target: Partition | Elsewhere, given_up: GivenUp, frame: bytes | memoryview
) -> bytes:
    """Build the body that the dead-letter topic stores for one frame, trace id and headers included."""
    has_headers = source.has_headers(given_up.sequence)
    position = body_position(frame) if has_headers else FRAME_OVERHEAD_BYTES
    body = bytes(frame[position:])
    if target.meta.extend_support:
        _, _, timestamp_ns, _, _ = MESSAGE_HEADER.unpack_from(frame)
        (first,) = ATTEMPTS.unpack_from(frame, ATTEMPTS_POSITION)
        about = {
            "reason": MAX_ATTEMPTS,
            "topic": source.topic_name,
            "channel": channel,
            "attempts": str(first - 1 + given_up.message.attempts),
            "id": hex_id(internal_id(source.number, given_up.sequence)).decode(),
            "timestamp": str(timestamp_ns),
        }
        if given_up.client:
            about["client"] = given_up.client
        mine = {PREFIX + name: value for name, value in about.items()}
        kept = _headers(frame) if has_headers else {}
        body = extended_body(_joined(kept, mine, len(body)), body)
    if target.meta.has_raw_ids:
        at = ID_POSITION + TRACE_ID_SIZE
        is_traced = source.meta.has_raw_ids
        body = (bytes(frame[at : at + TRACE_ID_SIZE]) if is_traced else bytes(TRACE_ID_SIZE)) + body
    return body


def _headers(frame: bytes | memoryview) -> dict[str, Any]:
    """The headers that a message had, as a JSON object."""
    version, headers = headers_of(frame)
    if version == TAG:
        return {TAG_HEADER: headers.decode("utf-8", "replace")}
    try:
        return msgspec.json.decode(headers, type=dict[str, msgspec.Raw]) if version == JSON else {}
    except UNREADABLE_JSON:
        return {}  # nobody could have read them, or they are no object


def _joined(kept: dict[str, Any], mine: dict[str, str], body_size: int) -> bytes:
    """Both as JSON; when there is no room for both, why it is here matters more than what it was sent with."""
    headers = msgspec.json.encode(kept | mine)
    if len(headers) > HEADERS_SIZE_MAX or len(headers) + body_size > _BATCH_BYTES_MAX:
        headers = msgspec.json.encode(mine)
    return headers
