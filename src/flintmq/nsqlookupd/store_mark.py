"""A mark beside the coordination store: how far it was when something was last answered.

SQLite takes the end of its journal that is damaged for one that was never written, and goes on with an older state as
if nothing had been after it. What was answered is in the database first, then here, and only then it is answered; so a
database that is older than the mark has lost something.

Byte picture of ``store.mark`` (big-endian)::

    0      4         6          8            16    20         4096     8192
    +------+---------+----------+------------+-----+----------+--------+--------
    | FMSM | version | reserved | cluster id | crc | zeros    | a mark | a mark
    +------+---------+----------+------------+-----+----------+--------+--------
    mark: [8 writes][8 revision][8 digest][4 crc]      written in turn; the one with more writes counts

    writes      transactions that the database has had, in all its life; 0 before it was made
    revision    of the store
    digest      of all rows, see store.py

Rules of this file: bytes that are damaged never raise; a crash damages one of the two at most, and one page of the
device holds one of them; after an error the file is written anew.

Source: docs/decisions/0016.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from flintmq.checksum import crc32
from flintmq.errors import StorageError
from flintmq.storage import File, Files, replace_file

MARK_NAME = "store.mark"
_MAGIC, _VERSION = b"FMSM", 1
_HEADER = Struct(">4sHHQ")
_MARK = Struct(">QQQ")
_CRC = Struct(">I")
_PLACES = (4096, 8192)
_SIZE = 12_288


class Mark(NamedTuple):
    """A state of the database, see the picture above."""

    writes: int
    revision: int
    digest: int


class MarkFile:
    """The mark of one store.

    Attributes:
        cluster_id: of the store that it belongs to; None when that cannot be read, or there is no such file.
        mark: the last one; None when none can be read.
        is_there: whether there is a file.
    """

    def __init__(self, files: Files) -> None:
        self.cluster_id: int | None = None
        self.mark: Mark | None = None
        self.is_there = False
        self._files = files
        self._file: File | None = None
        self._place = 0
        self._is_whole = False

    def load(self) -> None:
        """Read it. Blocks.

        Raises:
            StorageError: it cannot be read now, or a newer release wrote it.
        """
        try:
            try:
                file = self._files.open(MARK_NAME)
            except FileNotFoundError:
                return
            try:
                data = file.read_at(0, _SIZE)
            finally:
                file.close()
        except OSError as error:
            raise _failure(error) from error
        self.is_there = True
        self.cluster_id = _cluster_id(data)
        marks = [_mark_at(data, place) for place in _PLACES]
        found = [mark for mark in marks if mark is not None]
        self.mark = max(found, default=None)
        self._is_whole = len(found) == len(_PLACES) and self.cluster_id is not None
        self._place = marks.index(self.mark) if found else 0

    def write(self, cluster_id: int, mark: Mark) -> None:
        """Write a mark; it survives a power loss. Blocks.

        Raises:
            StorageError: it is not known whether it does; the next one writes all of the file.
        """
        try:
            if self._is_whole and self.cluster_id == cluster_id:
                self._place = 1 - self._place
                if self._file is None:
                    self._file = self._files.open(MARK_NAME)
                self._file.write_at(_PLACES[self._place], _packed(mark))
                self._file.sync()
            else:
                self._write_all(cluster_id, mark)
        except OSError as error:
            self._is_whole = False
            self.close()  # a handle that failed is not written to again
            raise _failure(error) from error
        self.cluster_id, self.mark = cluster_id, mark

    def _write_all(self, cluster_id: int, mark: Mark) -> None:
        self.close()
        data = bytearray(_SIZE)
        head = _HEADER.pack(_MAGIC, _VERSION, 0, cluster_id)
        data[: len(head) + _CRC.size] = head + _CRC.pack(crc32(head))
        packed = _packed(mark)
        for place in _PLACES:
            data[place : place + len(packed)] = packed
        replace_file(self._files, MARK_NAME, bytes(data))
        self._files.sync_directory("")
        self._is_whole = self.is_there = True

    def close(self) -> None:
        """Release the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _failure(error: OSError) -> StorageError:
    return StorageError(f"{MARK_NAME}: {error.strerror or error}")


def _packed(mark: Mark) -> bytes:
    data = _MARK.pack(*mark)
    return data + _CRC.pack(crc32(data))


def _mark_at(data: bytes, place: int) -> Mark | None:
    end = place + _MARK.size
    if len(data) < end + _CRC.size or _CRC.unpack_from(data, end)[0] != crc32(data[place:end]):
        return None
    return Mark(*_MARK.unpack_from(data, place))


def _cluster_id(data: bytes) -> int | None:
    end = _HEADER.size
    if len(data) < end + _CRC.size or _CRC.unpack_from(data, end)[0] != crc32(data[:end]):
        return None
    magic, version, _, cluster_id = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise StorageError(f"{MARK_NAME} has version {version}, this nsqlookupd knows {_VERSION}: start a newer one")
    return int(cluster_id)
