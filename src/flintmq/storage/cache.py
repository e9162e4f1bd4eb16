"""The cache of all logs of one nsqd: memory and handles stay bounded however many logs and messages there are.

- decoded read-ahead chunks and loaded indexes of sealed segments: least recently used go first, bounded in bytes;
- handles of sealed segments: least recently used are closed first, bounded in number;
- tail caches: each log keeps its own newest batches; when all together exceed their bound, the log that appended
  longest ago gives its tail up.

Rules of this file: it never reads a file; an evicted value is told by its ``release``; used from the event loop's
thread only.

Source: docs/decisions/0001.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Protocol

from flintmq.limits import READ_CACHE_BYTES, SEALED_FILES_OPEN_MAX, TAIL_CACHES_BYTES
from flintmq.storage.files import File


class TailOwner(Protocol):
    """A log as seen by the shared bound on tail caches."""

    def drop_tail(self) -> None:
        """Forget the batches kept in memory; they are read from the file from now on."""
        ...


class ReadCache:
    """The one per nsqd; see the module text.

    Args:
        capacity_bytes: of chunks and indexes.
        tails_bytes: of the tail caches of all logs together.
        files_max: handles of sealed segments kept open.
    """

    def __init__(
        self,
        capacity_bytes: int = READ_CACHE_BYTES,
        tails_bytes: int = TAIL_CACHES_BYTES,
        files_max: int = SEALED_FILES_OPEN_MAX,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._entries: OrderedDict[Hashable, tuple[Any, int, Callable[[], None] | None]] = OrderedDict()
        self._files_max = files_max
        self._files: OrderedDict[Hashable, File] = OrderedDict()
        self._tails_max = tails_bytes
        self.tails_bytes = 0
        self._tails: OrderedDict[TailOwner, int] = OrderedDict()

    # chunks and indexes

    def get(self, key: Hashable) -> Any:
        """The value kept under ``key``, now the most recently used; None when there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: Hashable, value: Any, size_bytes: int, release: Callable[[], None] | None = None) -> None:
        """Keep a value, which may evict others; one larger than the whole cache stays until the next comes.

        Args:
            release: called once when the value is evicted or discarded.
        """
        self.discard(key)
        self._entries[key] = (value, size_bytes, release)
        self.used_bytes += size_bytes
        while self.used_bytes > self.capacity_bytes and len(self._entries) > 1:
            self.discard(next(iter(self._entries)))

    def discard(self, key: Hashable) -> None:
        """Forget a value; nothing happens when it is not kept."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self.used_bytes -= entry[1]
        if entry[2] is not None:
            entry[2]()

    # handles of sealed segments

    def file(self, key: Hashable, open_file: Callable[[], File]) -> File:
        """The open handle under ``key``, opened by ``open_file`` when it is not open."""
        file = self._files.get(key)
        if file is not None:
            self._files.move_to_end(key)
            return file
        file = open_file()
        self.keep_file(key, file)
        return file

    def keep_file(self, key: Hashable, file: File) -> None:
        """Take over an open handle; the least recently used is closed when there are too many."""
        self.close_file(key)
        self._files[key] = file
        while len(self._files) > self._files_max:
            self.close_file(next(iter(self._files)))

    def take_file(self, key: Hashable) -> File | None:
        """Give an open handle away; None when it is not open."""
        return self._files.pop(key, None)

    def close_file(self, key: Hashable) -> None:
        """Close the handle under ``key`` if it is open."""
        file = self._files.pop(key, None)
        if file is not None:
            file.close()

    # tail caches

    def tail_changed(self, owner: TailOwner, delta_bytes: int) -> None:
        """Account for a tail that grew or shrank; one that grows makes its log the most recent."""
        tails = self._tails
        tails[owner] = tails.get(owner, 0) + delta_bytes
        self.tails_bytes += delta_bytes
        if delta_bytes < 0:
            return
        tails.move_to_end(owner)
        while self.tails_bytes > self._tails_max and len(tails) > 1:
            oldest = next(iter(tails))
            oldest.drop_tail()
            self.tail_dropped(oldest)

    def tail_dropped(self, owner: TailOwner) -> None:
        """Account for a tail that is gone."""
        self.tails_bytes -= self._tails.pop(owner, 0)

    def describe(self) -> str:
        """One line for people."""
        return (
            f"ReadCache({self.used_bytes}/{self.capacity_bytes} bytes in {len(self._entries)} entries, "
            f"{len(self._files)} handles, {self.tails_bytes} bytes in {len(self._tails)} tails)"
        )
