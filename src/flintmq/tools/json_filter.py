"""Filters of nsq_to_nsq for messages that are JSON objects: a field that must be there, and the fields that are kept.

Rules of this file: a message passes or it does not, whatever it is; values that are kept stay byte for byte the same.

Source: NSQ 1.3, apps/nsq_to_nsq. Other than there a message without the field does not have the value either, and goes
no further; large numbers are not rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from flintmq.errors import UNREADABLE_JSON

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)


class JsonFilter:
    """Decides what becomes of a body.

    Args:
        require_field: only objects with this field pass; empty: all do.
        require_value: only those in which it has this value; empty: any.
        keep: the fields that are kept; none: all are.
    """

    def __init__(self, require_field: str, require_value: str, keep: Sequence[str]) -> None:
        self._field = require_field
        self._value = require_value
        self._keep = sorted(set(keep))
        try:
            self._number = float(require_value) if "_" not in require_value else math.nan
        except ValueError:
            self._number = math.nan

    @property
    def is_needed(self) -> bool:
        """Whether it does anything."""
        return bool(self._field or self._keep)

    def apply(self, body: bytes) -> bytes | None:
        """Return what is passed on; None: nothing is.

        Raises:
            ValueError: it is no JSON object.
        """
        try:
            fields = _OBJECT.decode(body)
        except UNREADABLE_JSON as error:
            raise ValueError(str(error)) from error
        fields = fields or {}
        if self._field and not self._passes(fields.get(self._field)):
            return None
        if not self._keep:
            return body
        kept = [msgspec.json.encode(name) + b":" + bytes(fields[name]) for name in self._keep if name in fields]
        return b"{" + b",".join(kept) + b"}"

    def _passes(self, raw: msgspec.Raw | None) -> bool:
        if raw is None:
            return False
        if not self._value:
            return True
        value = msgspec.json.decode(raw)
        if isinstance(value, str):
            return value == self._value
        return isinstance(value, int | float) and not isinstance(value, bool) and value == self._number
