"""Headers for topics that have none: an opt-in envelope around the body.

Byte picture (big-endian)::

    0        4       6
    +--------+-------+--------------+------
    | F1 FMH | size  | headers      | body          headers: a JSON object with text values, size bytes of it
    +--------+-------+--------------+------

Whoever does not know the envelope is handed it as the body; so both sides of a topic switch it on, consumers first: a
body without an envelope is passed on as it is. The first byte begins no text in UTF-8 and no JSON.

Where a topic has headers nothing is put into an envelope, except bodies that could be taken for one; but envelopes are
opened there too: a producer with nsqd addresses alone does not know that a topic has headers, and a topic may get them
while messages are stored in it. The message's own headers win over those of its envelope.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from struct import Struct
from typing import TYPE_CHECKING

import msgspec

from flintmq.errors import UNREADABLE_JSON, LocalProtocolError
from flintmq.message import HEADERS_SIZE_MAX, JSON, NO_HEADERS
from flintmq.wire.client import Record
from flintmq.wire.extended import Extension

if TYPE_CHECKING:
    from flintmq.client.core.message import Delivery

MAGIC = b"\xf1FMH"
_HEAD = Struct(">4sH")


def wrap(headers: Mapping[str, str], body: bytes) -> bytes:
    """Put headers in front of a body; without headers it stays what it is, unless it could be taken for an envelope.

    Raises:
        LocalProtocolError: the headers are too large.
    """
    if not headers and not body.startswith(MAGIC):
        return body
    encoded = msgspec.json.encode(dict(headers))
    if len(encoded) > HEADERS_SIZE_MAX:
        raise LocalProtocolError("E_BAD_EXT", f"headers of {len(encoded)} bytes, at most {HEADERS_SIZE_MAX}")
    return _HEAD.pack(MAGIC, len(encoded)) + encoded + body


def unwrap(data: bytes) -> tuple[bytes, bytes]:
    """Take headers (as JSON) and body apart; no headers and all of it if there is no envelope, or a broken one."""
    if not data.startswith(MAGIC) or len(data) < _HEAD.size:
        return b"", data
    _, size = _HEAD.unpack_from(data)
    end = _HEAD.size + size
    if end > len(data):
        return b"", data
    return data[_HEAD.size : end], data[end:]


def open_all(records: Sequence[Record]) -> tuple[list[Record], dict[bytes, Extension]]:
    """Take messages out of their envelopes; headers by message id."""
    opened: list[Record] = []
    extensions: dict[bytes, Extension] = {}
    for timestamp_ns, attempts, message_id, data in records:
        headers, body = unwrap(data)
        if headers:
            extensions[message_id] = Extension(JSON, headers, -1, 0)
        opened.append((timestamp_ns, attempts, message_id, body))
    return opened, extensions


def open_delivery(delivery: Delivery) -> None:
    """Take the messages of a delivery out of their envelopes; where they are stored stays known."""
    delivery.records, opened = open_all(delivery.records)
    extensions = delivery.extensions or {}
    for message_id, extension in opened.items():
        if (known := extensions.get(message_id)) is not None:
            extension = _united(known, extension)
        extensions[message_id] = extension
    delivery.extensions = extensions


def _united(own: Extension, opened: Extension) -> Extension:
    """Fields of a message that had some of its own outside of its envelope."""
    if own.version == NO_HEADERS or not own.headers:
        return opened._replace(offset=own.offset, raw_size=own.raw_size)
    if own.version != JSON:  # a tag, which leaves no room for headers
        return own
    try:
        inner, outer = (msgspec.json.decode(each.headers, type=dict[str, msgspec.Raw]) for each in (opened, own))
    except UNREADABLE_JSON:
        return own
    return own._replace(headers=msgspec.json.encode({**inner, **outer}))
