"""Input that is to be published: a descriptor, its items, and the pace at which they may go.

Rules of this file: a descriptor that says nothing for ever keeps no process from ending; of it, ``BLOCKS_MAX`` blocks
and what is left of one item are in memory.
"""

from __future__ import annotations

import asyncio
import os
import threading
from time import monotonic

from flintmq.errors import FlintError

READ_BYTES = 256 * 1024
"""At a time, of the input."""
BLOCKS_MAX = 16
"""Read ahead while others are published; so much, and what is left of one item, is in memory."""
TAKE_BYTES = 1024 * 1024
"""Of what is there, to be published at once."""
ITEM_BYTES_MAX = 64 * 1024 * 1024
COUNT_MAX = 5000
"""Messages of one MPUB."""
_ROUNDING = 1e-6


class InputError(FlintError):
    """Something of the input cannot be published."""


class Source:
    """A descriptor, read in a thread of its own, which may wait for ever and keeps no process from ending.

    Attributes:
        is_at_end: it was read to its end.
    """

    def __init__(self, descriptor: int) -> None:
        self.is_at_end = False
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._blocks: asyncio.Queue[bytes | OSError] = asyncio.Queue()
        self._last: bytes | OSError | None = None  # came, and is for the next call
        self._has_room = threading.Semaphore(BLOCKS_MAX)
        threading.Thread(target=self._read, name="input", daemon=True).start()

    async def read(self) -> bytes:
        """Return what is there, as soon as something is; empty at the end, or after :meth:`stop`.

        Raises:
            InputError: it cannot be read.
        """
        block = await self._blocks.get() if self._last is None else self._last
        if isinstance(block, OSError):
            raise InputError(f"the input cannot be read: {block.strerror}") from block
        if not block:
            return block
        self._has_room.release()
        taken, size = [block], len(block)
        while size < TAKE_BYTES and not self._blocks.empty():
            block = self._blocks.get_nowait()
            if isinstance(block, OSError) or not block:
                self._last = block
                break
            self._has_room.release()
            taken.append(block)
            size += len(block)
        return b"".join(taken)

    def stop(self) -> None:
        """Let whoever waits go on."""
        self._blocks.put_nowait(b"")

    def take_rest(self) -> bytes:
        """Return what was read and nobody has taken, after :meth:`stop`."""
        blocks = []
        while not self._blocks.empty():
            blocks.append(self._blocks.get_nowait())
        return b"".join(block for block in blocks if isinstance(block, bytes))

    def _came(self, block: bytes | OSError) -> None:
        self.is_at_end = block == b""
        self._blocks.put_nowait(block)

    def _read(self) -> None:
        block: bytes | OSError = b"-"
        while block and isinstance(block, bytes):
            self._has_room.acquire()
            try:
                block = os.read(self._descriptor, READ_BYTES)
            except OSError as error:
                block = error
            try:
                self._loop.call_soon_threadsafe(self._came, block)
            except RuntimeError:
                return  # the loop has ended


class Splitter:
    """Items of a stream of bytes.

    Raises:
        InputError: an item is longer than ``ITEM_BYTES_MAX``; those before it were returned by the call before.
    """

    def __init__(self, delimiter: bytes) -> None:
        self._delimiter = delimiter
        self._parts: list[bytes] = []
        self._size = 0
        self._count = 0  # of items that were returned, empty ones included

    def feed(self, data: bytes) -> list[bytes]:
        """Return the items that are complete now."""
        self._check()
        *ended, rest = data.split(self._delimiter)
        if ended:
            ended[0] = b"".join([*self._parts, ended[0]])
            self._parts, self._size = [], 0
        self._count += len(ended)
        if rest:
            self._parts.append(rest)
            self._size += len(rest)
        return ended

    def end(self) -> list[bytes]:
        """Return what came after the last delimiter."""
        self._check()
        rest, self._parts, self._size = b"".join(self._parts), [], 0
        return [rest] if rest else []

    def _check(self) -> None:
        if self._size > ITEM_BYTES_MAX:
            much = f"has more than {ITEM_BYTES_MAX} bytes without a delimiter"
            raise InputError(f"item {self._count + 1} {much}; is --delimiter right?")


class Pace:
    """At most so many a second; what was not used is kept for one second."""

    def __init__(self, rate: int) -> None:
        self.count_max = min(COUNT_MAX, max(1, rate // 10)) if rate else COUNT_MAX
        self._rate = rate
        self._free = 1.0
        self._at = monotonic()

    async def wait(self, count: int) -> None:
        """Wait until so many may go."""
        if not self._rate:
            return
        while True:
            now = monotonic()
            self._free = min(float(max(self._rate, count)), self._free + (now - self._at) * self._rate)
            self._at = now
            if self._free >= count - _ROUNDING:
                self._free -= count
                return
            await asyncio.sleep((count - self._free) / self._rate)
