"""The server's side of publishing with a trace id or with headers: PUB_TRACE, PUB_EXT, MPUB_TRACE and MPUB_EXT.

Byte pictures: :mod:`flintmq.wire.extended`. What is refused here is what breaks the framing, and fatal; whether headers
are JSON, and whether the topic has any, is the owner's to say, because the connection goes on after it.

Rules of this file: the publishes of one read to one place are one event, as PUBs are; ``max_msg_size`` counts what
consumers see as the body, without trace id and headers.

Source: seed 000 "Message Tracing", reference/youzan.md 1.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flintmq.message import HEADERS_SIZE_MAX, TRACE_ID_SIZE
from flintmq.wire.extended import HEADERS_SIZE
from flintmq.wire.frames import INT32
from flintmq.wire.refusals import Incomplete, Refused


class Limits(Protocol):
    """Of :class:`flintmq.wire.server.ServerLimits` what is needed here."""

    @property
    def max_msg_size(self) -> int: ...


class Connection(Protocol):
    """Of :class:`flintmq.wire.server.ServerConnection` what is needed here."""

    @property
    def limits(self) -> Limits: ...

    def topic_name(self, command: str, raw: bytes) -> str: ...

    def partition_word(self, parameters: list[bytes], index: int) -> int | None: ...

    def several_bodies(
        self, data: bytes, start: int, at: int, command: str, topic: str, added: int = 0
    ) -> tuple[Sequence[bytes], int]: ...


@dataclass(slots=True)
class PublishExtended:
    """One MPUB_TRACE or MPUB_EXT, or a run of PUB_TRACE or PUB_EXT to one place.

    Attributes:
        command: its name.
        bodies: as they came, behind their sizes: with trace ids, or with headers that fit.
        replies: how many answers the client expects.
        partition: as in :class:`flintmq.wire.server.Publish`.
    """

    command: str
    topic: str
    bodies: Sequence[bytes]
    replies: int
    partition: int | None = None

    @property
    def kind(self) -> str:
        """``PUB``, or ``MPUB`` when one answer stands for all messages."""
        return self.command.partition("_")[0]

    @property
    def has_headers(self) -> bool:
        """Whether bodies begin with headers; else with a trace id."""
        return self.command.endswith("EXT")


def headers_end(body: bytes) -> int:
    """Where the message begins in a body of PUB_EXT that has been checked."""
    return HEADERS_SIZE.size + (body[0] << 8 | body[1])


def _pub(connection: Connection, data: bytes, start: int, at: int, parameters: list[bytes], events: list[Any]) -> int:
    command, topic, partition = _target(connection, parameters)
    body, end = _body(connection, command, data, start, at)
    last = events[-1] if events else None
    if type(last) is PublishExtended and (last.command, last.topic, last.partition) == (command, topic, partition):
        last.bodies.append(body)  # type: ignore[attr-defined]  # the list made below
        last.replies += 1
    else:
        events.append(PublishExtended(command, topic, [body], 1, partition))
    return end


def _mpub(connection: Connection, data: bytes, start: int, at: int, parameters: list[bytes], events: list[Any]) -> int:
    command, topic, partition = _target(connection, parameters)
    has_headers = command == "MPUB_EXT"
    added = HEADERS_SIZE.size + HEADERS_SIZE_MAX if has_headers else TRACE_ID_SIZE
    bodies, end = connection.several_bodies(data, start, at, command, topic, added)
    if has_headers:
        for body in bodies:
            _check_headers(command, body, connection.limits.max_msg_size)
    elif min(map(len, bodies)) <= TRACE_ID_SIZE:
        raise Refused("E_BAD_BODY", f"{command} invalid body size {min(map(len, bodies))} with a trace id")
    events.append(PublishExtended(command, topic, bodies, 1, partition))
    return end


def _target(connection: Connection, parameters: list[bytes]) -> tuple[str, str, int | None]:
    command = parameters[0].decode("ascii")
    if len(parameters) < 2:
        raise Refused("E_INVALID", f"{command} insufficient number of parameters")
    return command, connection.topic_name(command, parameters[1]), connection.partition_word(parameters, 2)


def _body(connection: Connection, command: str, data: bytes, start: int, at: int) -> tuple[bytes, int]:
    """The body of a PUB_TRACE or PUB_EXT and where it ends."""
    if len(data) - at < INT32.size:
        raise Incomplete(at - start + INT32.size, "E_BAD_BODY", f"{command} failed to read body size")
    size: int = INT32.unpack_from(data, at)[0]
    has_headers = command == "PUB_EXT"
    least = HEADERS_SIZE.size if has_headers else TRACE_ID_SIZE
    if size <= least:
        raise Refused(
            "E_BAD_BODY", f"{command} invalid body size {size} with {'headers' if has_headers else 'a trace id'}"
        )
    limit = connection.limits.max_msg_size
    added = least + HEADERS_SIZE_MAX if has_headers else least
    if size > limit + added:
        raise Refused("E_BAD_MESSAGE", f"{command} message too big {size - added} > {limit}")
    end = at + INT32.size + size
    if len(data) < end:
        raise Incomplete(end - start, "E_BAD_MESSAGE", f"{command} failed to read message body")
    body = data[at + INT32.size : end]
    if has_headers:
        _check_headers(command, body, limit)
    return body, end


def _check_headers(command: str, body: bytes, max_msg_size: int) -> None:
    """Refuse headers that do not fit into their message, and a message that is too big behind them."""
    if len(body) <= HEADERS_SIZE.size:
        raise Refused("E_BAD_BODY", f"{command} invalid body size {len(body)} with headers")
    end = headers_end(body)
    if end > len(body):
        raise Refused("E_BAD_EXT", f"{command} headers of {end - HEADERS_SIZE.size} bytes in a body of {len(body)}")
    if end == len(body):
        raise Refused("E_BAD_BODY", f"{command} nothing behind headers of {end - HEADERS_SIZE.size} bytes")
    if len(body) - end > max_msg_size:
        raise Refused("E_BAD_MESSAGE", f"{command} message too big {len(body) - end} > {max_msg_size}")


Parser = Callable[[Connection, bytes, int, int, list[bytes], list[Any]], int]
PARSERS: dict[bytes, Parser] = {b"PUB_TRACE": _pub, b"PUB_EXT": _pub, b"MPUB_TRACE": _mpub, b"MPUB_EXT": _mpub}
