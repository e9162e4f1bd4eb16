"""Finds where the messages of an MPUB end, as their bytes arrive.

Rules of this file:

- The count says how many messages there are; the size in front of it is not asked, because clients get it wrong.
- Every byte is passed once: what an MPUB costs does not depend on the pieces that it comes in.
- A size is refused as soon as its four bytes are there, and so is one too many for what all of them may be.

Source: NSQ's TCP protocol.
"""

from __future__ import annotations

from flintmq.wire.frames import INT32
from flintmq.wire.refusals import Refused

_RUN_MIN = 8  # fewer sizes are compared faster one by one


def uniform_run(data: bytes, at: int, count: int) -> int:
    """Return how many of ``count`` messages stand whole at ``at``, if those are all of one size; else 0."""
    field = data[at : at + 4]
    size: int = INT32.unpack(field)[0] if len(field) == 4 else 0
    if size <= 0:
        return 0
    stride = size + 4
    count = min(count, (len(data) - at) // stride)
    end = at + count * stride
    # all sizes are checked by their columns, in few calls
    is_uniform = (
        data[at + 3 : end : stride] == field[3:] * count
        and data[at + 2 : end : stride] == field[2:3] * count
        and data[at + 1 : end : stride] == field[1:2] * count
        and data[at:end:stride] == field[:1] * count
    )
    return count if is_uniform else 0


class SizeWalk:
    """Walks over ``count`` messages, each behind its size.

    Args:
        count: how many there are, at least 1.
        size_max: of one message, in bytes.
        added: what a message may have beside these.
        bytes_max: of the count, the sizes and the messages together.

    Attributes:
        is_done: whether the last message is there.
    """

    __slots__ = ("_added", "_bytes", "_bytes_max", "_count", "_index", "_missing", "_part", "_size_max", "is_done")

    def __init__(self, count: int, size_max: int, added: int, bytes_max: int) -> None:
        self._count = count
        self._size_max = size_max
        self._added = added
        self._bytes_max = bytes_max
        self._bytes = 4
        self._index = 0  # of the message whose size comes next
        self._missing = 0  # bytes of the one before it
        self._part = b""  # what is there of the size
        self.is_done = False

    @property
    def lack(self) -> tuple[str, str]:
        """Code and detail of the error for a client that ends its stream here."""
        if self._missing:
            return "E_BAD_MESSAGE", "MPUB failed to read message body"
        return "E_BAD_MESSAGE", f"MPUB failed to read message({self._index}) body size"

    def advance(self, data: bytes, at: int = 0) -> bool:
        """Go on with the bytes that follow the last ones; whether the last message is there.

        Raises:
            Refused: a size is not positive, too big, or more than all messages together may have.
        """
        if self._part:
            data, at = self._part + data[at:], 0
        start = at = at + self._missing
        index, count, end = self._index, self._count, len(data) - 4
        size_max, stop = self._size_max + self._added, start + self._bytes_max - self._bytes
        if count - index >= _RUN_MIN and at <= end and (run := uniform_run(data, at, count - index)) >= _RUN_MIN:
            stride = INT32.unpack_from(data, at)[0] + 4
            run = min(run, (stop - at) // stride) if stride - 4 <= size_max else 0
            index += run
            at += run * stride
        unpack = INT32.unpack_from
        while index < count and at <= end:
            size = unpack(data, at)[0]
            if not 0 < size <= size_max or at + 4 + size > stop:
                raise self._refusal(index, size, self._bytes + at - start + 4 + size)
            at += size + 4
            index += 1
        self._index = index
        self._bytes += at - start
        self._missing = max(0, at - len(data))
        self._part = data[at:] if index < count else b""
        self.is_done = index == count and not self._missing
        return self.is_done

    def _refusal(self, index: int, size: int, total: int) -> Refused:
        if size <= 0:
            return Refused("E_BAD_MESSAGE", f"MPUB invalid message({index}) body size {size}")
        if size > self._size_max + self._added:
            return Refused("E_BAD_MESSAGE", f"MPUB message too big {size - self._added} > {self._size_max}")
        return Refused("E_BAD_BODY", f"MPUB body too big {total} > {self._bytes_max}")
