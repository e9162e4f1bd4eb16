"""Bytes as the other side would build them: commands that publish, and what stands in front of a body."""

from __future__ import annotations

from collections.abc import Sequence

from flintmq.message import LOCATION, NO_HEADERS
from flintmq.wire.bodies import HEADERS_SIZE
from flintmq.wire.commands import COMMANDS, publish
from flintmq.wire.extended import Extension


def pub_once(topic: str, partition: int | None, producer_id: str, sequence: int, body: bytes) -> bytes:
    return publish(COMMANDS["PUB_ONCE"], topic, (body,), partition, producer_id=producer_id, sequence=sequence)


def mpub_once(topic: str, partition: int | None, producer_id: str, sequence: int, bodies: Sequence[bytes]) -> bytes:
    return publish(COMMANDS["MPUB_ONCE"], topic, bodies, partition, producer_id=producer_id, sequence=sequence)


def pub_trace(topic: str, partition: int, trace_id: int, body: bytes) -> bytes:
    return publish(COMMANDS["PUB_TRACE"], topic, (body,), partition, fronts=(trace_id,))


def mpub_trace(topic: str, partition: int, messages: Sequence[tuple[int, bytes]]) -> bytes:
    return _several("MPUB_TRACE", topic, partition, messages)


def pub_ext(topic: str, partition: int, headers: bytes, body: bytes) -> bytes:
    return publish(COMMANDS["PUB_EXT"], topic, (body,), partition, fronts=(headers,))


def mpub_ext(topic: str, partition: int, messages: Sequence[tuple[bytes, bytes]]) -> bytes:
    return _several("MPUB_EXT", topic, partition, messages)


def _several(
    command: str, topic: str, partition: int, messages: Sequence[tuple[int, bytes]] | Sequence[tuple[bytes, bytes]]
) -> bytes:
    bodies = [body for _, body in messages]
    return publish(COMMANDS[command], topic, bodies, partition, fronts=[front for front, _ in messages])


def joined_body(extension: Extension, body: bytes, is_extended: bool, is_ordered: bool) -> bytes:
    """The inverse of :func:`flintmq.wire.extended.split_body`."""
    parts: list[bytes] = []
    if is_extended:
        parts.append(bytes((extension.version,)))
        if extension.version != NO_HEADERS:
            parts += (HEADERS_SIZE.pack(len(extension.headers)), extension.headers)
    if is_ordered:
        parts.append(LOCATION.pack(extension.offset, extension.raw_size))
    return b"".join((*parts, body))
