"""Headers of messages as Spark's map<string,string>.

A map is null for a message of a topic without headers, and empty for a message that has none. Values that are no text
are their JSON, ``null`` is null. A dispatch tag that came alone (version 2) is the header that names it.

The rules of this file: often many messages have the same headers, so what was taken apart is kept, within a bound;
what is no JSON object, which nsqd never takes, is shown whole under an empty name.

Source: docs/decisions/0006, Youzan's TCP protocol.
"""

from __future__ import annotations

import msgspec
import pyarrow as pa

from flintmq.errors import UNREADABLE_JSON
from flintmq.message import TAG, TAG_HEADER

_KEPT_MAX = 1024

Pairs = list[tuple[str, str | None]]
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class HeaderMaps:
    """Gathers the column of one record batch."""

    def __init__(self) -> None:
        self._maps: list[Pairs | None] = []
        self._kept: dict[tuple[int, bytes], Pairs] = {}

    def add_none(self) -> None:
        """Add a row for a message of a topic without headers."""
        self._maps.append(None)

    def add_empty(self) -> None:
        """Add a row for a message without headers, on a topic that has them."""
        self._maps.append([])

    def add(self, version: int, headers: bytes) -> None:
        """Add a row for a message with headers."""
        key = (version, headers)
        pairs = self._kept.get(key)
        if pairs is None:
            pairs = pairs_of(version, headers)
            if len(self._kept) < _KEPT_MAX:
                self._kept[key] = pairs
        self._maps.append(pairs)

    def array(self) -> pa.Array:
        """Return the column."""
        return pa.array(self._maps, pa.map_(pa.string(), pa.string()))


def pairs_of(version: int, headers: bytes) -> Pairs:
    """Return names and values in headers."""
    if version == TAG:
        return [(TAG_HEADER, headers.decode(errors="replace"))]
    try:
        return [(name, _text(bytes(value))) for name, value in _decode(headers).items()]
    except UNREADABLE_JSON:
        return [("", headers.decode(errors="replace"))]


def _text(value: bytes) -> str | None:
    if value == b"null":
        return None
    return msgspec.json.decode(value, type=str) if value.startswith(b'"') else value.decode()
