"""From Arrow columns to MPUB bodies, without a Python step per message.

::

    body column   | abc | defgh | ...
    encoded       | u32 3 | abc | u32 5 | defgh | ...      one buffer; any run of rows is a slice of it

The rules of this file: no IO; the bytes of a message are copied once.

Source: NSQ's TCP protocol (MPUB), docs/decisions/0006.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

SIZE_FIELD_BYTES = 4


@dataclass(slots=True)
class Encoded:
    """Messages as MPUB wants them; ``ends`` has one entry more than there are messages, the first being 0."""

    data: memoryview
    ends: npt.NDArray[np.int64]

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


def encode_bodies(bodies: pa.Array) -> Encoded:
    """Put its size before every body of a binary column that has no nulls."""
    sizes = body_sizes(bodies)
    prefixes = pa.Array.from_buffers(
        pa.binary(),
        len(bodies),
        [
            None,
            pa.py_buffer(np.arange(len(bodies) + 1, dtype=np.int32) * SIZE_FIELD_BYTES),
            pa.py_buffer(sizes.astype(">u4")),
        ],
    )
    joined = pc.binary_join_element_wise(prefixes, bodies, b"")
    ends = np.zeros(len(bodies) + 1, np.int64)
    np.cumsum(sizes + SIZE_FIELD_BYTES, out=ends[1:])
    start = int(_offsets(joined)[0])
    return Encoded(memoryview(joined.buffers()[2])[start : start + int(ends[-1])], ends)


def _offsets(column: pa.Array) -> npt.NDArray[np.int32]:
    return np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, column.offset * 4)
