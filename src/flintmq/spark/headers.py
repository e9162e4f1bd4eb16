"""Headers of messages as Spark's map<string,string>, and as the JSON they are.

Both are null for a message of a topic without headers, and empty (``{}``) for a message that has none. In a map, values
that are no text are their JSON, ``null`` is null, and of a name that comes twice the last one counts; the JSON is as it
came, byte for byte. A dispatch tag that came alone (version 2) is the header that names it.

The rules of this file: often many messages have the same headers, so what was taken apart is kept, within a bound;
what is no JSON object, which nsqd never takes, is shown whole under an empty name.

Source: docs/decisions/0006, Youzan's TCP protocol.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pyarrow as pa

from flintmq.errors import UNREADABLE_JSON
from flintmq.message import TAG, TAG_HEADER

_KEPT_MAX = 1024

Pairs = list[tuple[str, str | None]]
Shown = Pairs | str
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class HeaderColumn:
    """Gathers a column of one record batch.

    Args:
        is_json: whether it has the headers as JSON, and not as maps.
    """

    def __init__(self, is_json: bool = False) -> None:
        self._rows: list[Shown | None] = []
        self._kept: dict[tuple[int, bytes], Shown] = {}
        self._show: Callable[[int, bytes], Shown] = json_of if is_json else pairs_of
        self._empty: Shown = "{}" if is_json else []
        self._type = pa.string() if is_json else pa.map_(pa.string(), pa.string())

    def add_none(self) -> None:
        """Add a row for a message of a topic without headers."""
        self._rows.append(None)

    def add_empty(self) -> None:
        """Add a row for a message without headers, on a topic that has them."""
        self._rows.append(self._empty)

    def add(self, version: int, headers: bytes) -> None:
        """Add a row for a message with headers."""
        key = (version, headers)
        shown = self._kept.get(key)
        if shown is None:
            shown = self._show(version, headers)
            if len(self._kept) < _KEPT_MAX:
                self._kept[key] = shown
        self._rows.append(shown)

    def array(self) -> pa.Array:
        """Return the column."""
        return pa.array(self._rows, self._type)


def pairs_of(version: int, headers: bytes) -> Pairs:
    """Return names and values in headers."""
    if version == TAG:
        return [(TAG_HEADER, headers.decode(errors="replace"))]
    try:
        return [(name, _text(bytes(value))) for name, value in _decode(headers).items()]
    except UNREADABLE_JSON:
        return [("", headers.decode(errors="replace"))]


def json_of(version: int, headers: bytes) -> str:
    """Return headers as a JSON object; it is what they are, unless they are none."""
    if version != TAG:
        try:
            _decode(headers)
            return headers.decode()
        except UNREADABLE_JSON:
            pass
    return msgspec.json.encode(dict(pairs_of(version, headers))).decode()


def _text(value: bytes) -> str | None:
    if value == b"null":
        return None
    return msgspec.json.decode(value, type=str) if value.startswith(b'"') else value.decode()
