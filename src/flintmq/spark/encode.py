"""From Arrow columns to MPUB bodies, without a Python step per message.

::

    body column   | abc | defgh | ...
    encoded       | u32 3 | abc | u32 5 | defgh | ...      one buffer; any run of rows is a slice of it
    with fronts   | u32 11 | trace id | abc | ...          or u16 size and headers in front of the body

The rules of this file: no IO; the bytes of a message are copied once. Headers alone take a step for each row, and those
that many rows have are made once; those that come as JSON stay as they are, whatever is put beside them.

Source: NSQ's TCP protocol (MPUB), docs/decisions/0006.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from json import JSONDecoder

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from flintmq.errors import UNREADABLE_JSON
from flintmq.message import HEADERS_SIZE_MAX, TRACE_ID_HEADER, TRACE_ID_SIZE
from flintmq.wire.bodies import HEADERS_SIZE, TRACE_ID_MAX

SIZE_FIELD_BYTES = 4
_KEPT_MAX = 1024
_decode = msgspec.json.Decoder(dict[str, object]).decode
_encode = msgspec.json.encode
_read_value = JSONDecoder(parse_int=str, parse_float=str).raw_decode  # numbers of any size
_skip_space = re.compile(r"[ \t\n\r]*").match


class HeadersRefused(ValueError):
    """The headers of one row cannot be those of a message.

    Args:
        reason: why not.
        index: of the row.
    """

    def __init__(self, reason: str, index: int) -> None:
        super().__init__(reason)
        self.index = index


@dataclass(slots=True)
class Encoded:
    """Messages as MPUB wants them; ``ends`` has one entry more than there are messages, the first being 0."""

    data: memoryview
    ends: npt.NDArray[np.int64]

    def part(self, first: int, end: int) -> Encoded:
        """Return the messages from ``first`` to ``end`` (exclusive)."""
        start = int(self.ends[first])
        return Encoded(self.data[start : int(self.ends[end])], self.ends[first : end + 1] - start)

    def slices(self, messages_max: int, bytes_max: int) -> Iterator[tuple[int, memoryview]]:
        """Cut into runs for one MPUB each: count and bytes; a message longer than ``bytes_max`` goes alone."""
        first, count = 0, len(self.ends) - 1
        while first < count:
            fitting = int(np.searchsorted(self.ends, self.ends[first] + bytes_max, "right")) - 1
            last = min(count, first + messages_max, max(fitting, first + 1))
            yield last - first, self.data[int(self.ends[first]) : int(self.ends[last])]
            first = last


def as_binary(column: pa.Array) -> pa.Array:
    """Turn a string or binary column into plain binary; strings are UTF-8, as Arrow has them."""
    return column if column.type == pa.binary() else column.cast(pa.binary())


def body_sizes(bodies: pa.Array) -> npt.NDArray[np.int64]:
    """Return the size of every body in bytes; the column has no nulls."""
    return np.diff(_offsets(bodies)).astype(np.int64)


def text_bytes(column: pa.Array) -> int:
    """Return the bytes of all texts in a column, also of those in its maps; 0 for whole numbers."""
    if pa.types.is_map(column.type):
        first, end = column.offsets[0].as_py(), column.offsets[-1].as_py()  # keys and items are those of all rows
        return sum(text_bytes(each.slice(first, end - first)) for each in (column.keys, column.items))
    if pa.types.is_integer(column.type):
        return 0
    if pa.types.is_binary_view(column.type) or pa.types.is_string_view(column.type):
        column = as_binary(column)
    return pc.sum(pc.binary_length(column)).as_py() or 0  # Arrow's sum of nothing is null


def encode_bodies(bodies: pa.Array, fronts: pa.Array | None = None) -> Encoded:
    """Put its size before every body of a binary column that has no nulls.

    Args:
        fronts: what stands between the two, which the size counts; None for nothing.
    """
    sizes = body_sizes(bodies)
    if fronts is not None:
        sizes += body_sizes(fronts)
    prefixes = pa.Array.from_buffers(
        pa.binary(),
        len(bodies),
        [
            None,
            pa.py_buffer(np.arange(len(bodies) + 1, dtype=np.int32) * SIZE_FIELD_BYTES),
            pa.py_buffer(sizes.astype(">u4")),
        ],
    )
    parts = (prefixes, bodies) if fronts is None else (prefixes, fronts, bodies)
    joined = pc.binary_join_element_wise(*parts, b"")
    ends = np.zeros(len(bodies) + 1, np.int64)
    np.cumsum(sizes + SIZE_FIELD_BYTES, out=ends[1:])
    start = int(_offsets(joined)[0])
    return Encoded(memoryview(joined.buffers()[2])[start : start + int(ends[-1])], ends)


def trace_fronts(trace_ids: pa.Array) -> pa.Array:
    """Return trace ids as they stand in front of bodies; a null is 0, none."""
    numbers = pc.fill_null(trace_ids.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    ends = np.arange(len(numbers) + 1, dtype=np.int32) * TRACE_ID_SIZE
    data = np.ascontiguousarray(numbers.astype(">i8"))
    return pa.Array.from_buffers(pa.binary(), len(numbers), [None, pa.py_buffer(ends), pa.py_buffer(data)])


def header_fronts(headers: pa.Array, trace_ids: pa.Array | None, texts: pa.Array | None = None) -> pa.Array:
    """Return headers as they stand in front of bodies, from a map<string,string> or from JSON.

    Args:
        trace_ids: become a header of their own; nulls and 0 do not.
        texts: JSON that is kept as it is beside what a map in ``headers`` says; nulls and empty ones are none.

    Raises:
        HeadersRefused: headers are longer than a message can have, or no JSON object.
    """
    none = [None] * len(headers)
    ids = none if trace_ids is None else trace_ids.to_pylist()
    besides = none if texts is None else texts.to_pylist()
    known: dict[object, bytes] = {}
    fronts = []
    for index, (value, trace_id, text) in enumerate(zip(headers.to_pylist(), ids, besides, strict=True)):
        key = (tuple(value) if isinstance(value, list) else value, trace_id, text)
        front = known.get(key)
        if front is None:
            try:
                front = _header_front(value, trace_id, text)
            except ValueError as error:
                raise HeadersRefused(str(error), index) from error
            if len(known) < _KEPT_MAX:
                known[key] = front
        fronts.append(front)
    return pa.array(fronts, pa.binary())


def _header_front(value: list[tuple[str, str | None]] | str | None, trace_id: int | None, text: str | None) -> bytes:
    ours: dict[str, str | None] = {}
    if isinstance(value, str):
        text = value
    elif value is not None:
        ours = dict(value)
    if trace_id:
        ours[TRACE_ID_HEADER] = str(trace_id & TRACE_ID_MAX)
    return _sized(_laid_over(text, ours) if text else _encode(ours) if ours else b"")


def _laid_over(text: str, ours: dict[str, str | None]) -> bytes:
    """Return JSON with names and values behind its own, from which those names are taken out.

    Raises:
        ValueError: it is no JSON object.
    """
    try:
        theirs = _decode(text)
    except UNREADABLE_JSON as error:
        raise ValueError(f"headers {text[:80]!r} are not a JSON object") from error
    trace_id = ours.get(TRACE_ID_HEADER)
    if trace_id is not None and theirs.get(TRACE_ID_HEADER) == trace_id:
        ours = {name: value for name, value in ours.items() if name != TRACE_ID_HEADER}  # it stays where it is
    if not ours:
        return text.encode()
    has_more = bool(theirs)
    if not theirs.keys().isdisjoint(ours):
        text, has_more = _without(text, ours), bool(theirs.keys() - ours.keys())
    return text.rstrip().encode()[:-1] + (b"," if has_more else b"") + _encode(ours)[1:]


def _without(text: str, names: Container[str]) -> str:
    """Return a JSON object without some of its names, the others byte for byte, also those that come twice."""
    kept = []
    at = _end_of_space(text, 0)
    while text[at] != "}":  # at what opens the object, or at the comma behind a value
        start = at + 1
        name, end = _read_value(text, _end_of_space(text, start))
        colon = _end_of_space(text, end)
        _, end = _read_value(text, _end_of_space(text, colon + 1))
        at = _end_of_space(text, end)
        if name not in names:
            kept.append(text[start:at])
    return "{" + ",".join(kept) + "}"


def _end_of_space(text: str, start: int) -> int:
    found = _skip_space(text, start)
    assert found is not None, "no space at all is found as well"
    return found.end()


def _sized(headers: bytes) -> bytes:
    if len(headers) > HEADERS_SIZE_MAX:
        raise ValueError(f"headers have {len(headers)} bytes; at most {HEADERS_SIZE_MAX}")
    return HEADERS_SIZE.pack(len(headers)) + headers


def _offsets(column: pa.Array) -> npt.NDArray[np.int32]:
    return np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, column.offset * 4)
