"""The server's side of publishing once: PUB_ONCE and MPUB_ONCE. Byte pictures: :mod:`flintmq.wire.once`.

Rules of this file: what one producer publishes in one read to one place, with sequences that follow one another, is one
event; what is refused here breaks the framing or names no producer, and is fatal.

Source: docs/idempotent.md, design/reliability.md R13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flintmq.limits import PRODUCER_ID_SIZE_MAX, PRODUCER_SEQUENCE_MAX
from flintmq.wire.once import NO_PARTITION, is_producer_id, parse_sequence
from flintmq.wire.refusals import Refused

_PARAMETER_COUNT = 5
_RUN_COUNT_MAX = 1024  # one of it that fails makes all of them fail


class Connection(Protocol):
    """Of :class:`flintmq.wire.server.ServerConnection` what is needed here."""

    def topic_name(self, command: str, raw: bytes) -> str: ...

    def partition_word(self, parameters: list[bytes], index: int) -> int | None: ...

    def message_body(self, data: bytes, start: int, at: int, command: str) -> tuple[bytes, int]: ...

    def several_bodies(
        self, data: bytes, start: int, at: int, command: str, topic: str
    ) -> tuple[Sequence[bytes], int]: ...


@dataclass(slots=True)
class PublishOnce:
    """One MPUB_ONCE, or a run of PUB_ONCE.

    Attributes:
        command: its name.
        sequence: of the first body.
        replies: how many answers the client expects.
        partition: None for the only one; else as in :class:`flintmq.wire.server.Publish`.
    """

    command: str
    topic: str
    partition: int | None
    producer_id: bytes
    sequence: int
    bodies: Sequence[bytes]
    replies: int

    @property
    def last(self) -> int:
        """The sequence of the last body."""
        return self.sequence + len(self.bodies) - 1


def _pub_once(
    connection: Connection, data: bytes, start: int, at: int, parameters: list[bytes], events: list[Any]
) -> int:
    topic, partition, producer_id = _target(connection, "PUB_ONCE", parameters)
    sequence = _sequence("PUB_ONCE", parameters[4], 1)
    body, end = connection.message_body(data, start, at, "PUB_ONCE")
    last = events[-1] if events else None
    if type(last) is PublishOnce and last.command == "PUB_ONCE" and last.producer_id == producer_id:
        is_next = sequence == last.sequence + last.replies and last.replies < _RUN_COUNT_MAX
        if is_next and last.topic == topic and last.partition == partition:
            last.bodies.append(body)  # type: ignore[attr-defined]  # the list made below
            last.replies += 1
            return end
    events.append(PublishOnce("PUB_ONCE", topic, partition, producer_id, sequence, [body], 1))
    return end


def _mpub_once(
    connection: Connection, data: bytes, start: int, at: int, parameters: list[bytes], events: list[Any]
) -> int:
    topic, partition, producer_id = _target(connection, "MPUB_ONCE", parameters)
    sequence = _sequence("MPUB_ONCE", parameters[4], 1)  # before its bodies are gathered
    bodies, end = connection.several_bodies(data, start, at, "MPUB_ONCE", topic)
    if sequence > PRODUCER_SEQUENCE_MAX - len(bodies) + 1:
        _sequence("MPUB_ONCE", parameters[4], len(bodies))
    events.append(PublishOnce("MPUB_ONCE", topic, partition, producer_id, sequence, bodies, 1))
    return end


def _target(connection: Connection, command: str, parameters: list[bytes]) -> tuple[str, int | None, bytes]:
    if len(parameters) < _PARAMETER_COUNT:
        raise Refused("E_INVALID", f"{command} insufficient number of parameters")
    topic = connection.topic_name(command, parameters[1])
    partition = None if parameters[2] == NO_PARTITION else connection.partition_word(parameters, 2)
    producer_id = parameters[3]
    if not is_producer_id(producer_id):
        shown = producer_id[: 2 * PRODUCER_ID_SIZE_MAX].decode("utf-8", "backslashreplace")
        what = f"1 to {PRODUCER_ID_SIZE_MAX} of [A-Za-z0-9._:-]"
        raise Refused("E_INVALID", f"{command} producer id {shown} is not valid: {what}")
    return topic, partition, producer_id


def _sequence(command: str, text: bytes, count: int) -> int:
    sequence = parse_sequence(text, count)
    if sequence is None:
        shown = text[:40].decode("utf-8", "backslashreplace")
        raise Refused("E_INVALID", f"{command} sequence {shown} is not a number from 1 to 2^63-1")
    return sequence


Parser = Callable[[Connection, bytes, int, int, list[bytes], list[Any]], int]
PARSERS: dict[bytes, Parser] = {b"PUB_ONCE": _pub_once, b"MPUB_ONCE": _mpub_once}
