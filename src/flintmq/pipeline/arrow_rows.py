"""Rows that Spark hands over in Arrow, as plain values that can be shown.

The rules of this file: any row can be shown, whatever its bytes are: Spark's strings are UTF-8 by agreement alone, as
``CAST(body AS STRING)`` looks at nothing; a time is shown in UTC, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa


def plain_rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield each row by the names of its columns: structs and maps as dicts, times as text.

    What is no UTF-8 in a string is ``U+FFFD``. Values of binary are bytes.
    """
    import pyarrow as pa

    kinds = table.schema
    unread = table.cast(pa.schema([_unread(field) for field in kinds]))
    for row in unread.to_pylist():
        yield {field.name: _plain(row[field.name], field.type) for field in kinds}


def _unread(field: pa.Field) -> pa.Field:
    """Return a field with binary for each string in it, as pyarrow decodes no other way than strictly."""
    import pyarrow as pa

    kind = field.type
    if pa.types.is_string(kind):
        return field.with_type(pa.binary())
    if pa.types.is_large_string(kind):
        return field.with_type(pa.large_binary())
    if pa.types.is_struct(kind):
        return field.with_type(pa.struct([_unread(each) for each in kind]))
    if pa.types.is_map(kind):
        return field.with_type(pa.map_(_unread(kind.key_field), _unread(kind.item_field)))
    if pa.types.is_list(kind):
        return field.with_type(pa.list_(_unread(kind.value_field)))
    if pa.types.is_large_list(kind):
        return field.with_type(pa.large_list(_unread(kind.value_field)))
    return field


def _plain(value: Any, kind: pa.DataType) -> Any:
    """Return a value of Arrow's with maps as dicts, and with times as text: in UTC, unless they have no zone.

    Args:
        kind: what it is; its strings are given as bytes.
    """
    import pyarrow as pa

    if value is None:
        return None
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return text_of(value)
    if pa.types.is_timestamp(kind):
        text: str = (value.astimezone(UTC) if kind.tz else value).isoformat()
        return text.replace("+00:00", "Z")
    if pa.types.is_struct(kind):
        return {field.name: _plain(value[field.name], field.type) for field in kind}
    if pa.types.is_map(kind):
        return {_key(_plain(key, kind.key_type)): _plain(each, kind.item_type) for key, each in value}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_plain(each, kind.value_type) for each in value]
    return value


def _key(value: object) -> object:
    """Return the key of a map as one of a dict that can be written as JSON."""
    return value if isinstance(value, str | int | float) else text_of(value)


def text_of(value: object) -> str:
    """Return what is shown of a value; bytes as UTF-8, with ``U+FFFD`` for what is none."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes | bytearray) else str(value)


__all__ = ["plain_rows", "text_of"]
