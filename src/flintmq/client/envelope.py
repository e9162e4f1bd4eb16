"""Headers for topics that have none: an opt-in envelope around the body.

Byte picture (big-endian)::

    0        4       6
    +--------+-------+--------------+------
    | F1 FMH | size  | headers      | body          headers: a JSON object with text values, size bytes of it
    +--------+-------+--------------+------

Whoever does not know the envelope is handed it as the body; so both sides of a topic switch it on, consumers first: a
body without an envelope is passed on as it is. The first byte begins no text in UTF-8 and no JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct

import msgspec

from flintmq.errors import BodyError, LocalProtocolError

MAGIC = b"\xf1FMH"
HEADERS_SIZE_MAX = 2**16 - 1
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


def unwrap(data: bytes) -> tuple[dict[str, str], bytes]:
    """Take headers and body apart; no headers and all of it if there is no envelope.

    Raises:
        BodyError: it begins as an envelope and is none.
    """
    if not data.startswith(MAGIC):
        return {}, data
    if len(data) < _HEAD.size:
        raise BodyError("an envelope", f"it ends after {len(data)} bytes")
    _, size = _HEAD.unpack_from(data)
    end = _HEAD.size + size
    if end > len(data):
        raise BodyError("an envelope", f"it has {len(data)} bytes and says {end} of headers alone")
    try:
        return msgspec.json.decode(data[_HEAD.size : end], type=dict[str, str]), data[end:]
    except msgspec.MsgspecError as error:
        raise BodyError("an envelope", f"its headers: {error}") from error
