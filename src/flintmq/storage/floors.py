"""Floors of channels that are consumed in order: each FIN is written here before the next message goes out.

The database of the data directory has the same at most 0.1 s later; what is larger counts. Writing a record is one
system call, which is what lets a consumer in order go on after some microseconds and still get nothing twice when the
process is killed.

Byte picture (big-endian), two records of 24 bytes per channel and partition, overwritten in turn, so that one which is
torn by a kill leaves the one before::

    0              8              16       20       24
    +--------------+--------------+--------+--------+
    | cursor       | floor        | 0      | crc    |
    +--------------+--------------+--------+--------+
    crc is CRC-32 of what stands before it; a record of zeros is free

What goes back, because an operator has it delivered again, takes both records, since of two the larger floor counts;
and who promises that syncs the file behind it: a power loss would bring the larger one back.

Rules of this file: a record whose CRC is wrong is no record; numbers of cursors are used again only after a restart, so
a restart keeps records of living channels alone.

Source: Youzan's TCP protocol "Ordered delivery", docs/decisions/0003.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct

from flintmq.checksum import crc32
from flintmq.errors import WriteFailed
from flintmq.storage.files import File, Files, replace_file

FLOORS_NAME = "ordered.floors"
_RECORD = Struct(">QQI")
_CRC = Struct(">I")
RECORD_BYTES = _RECORD.size + _CRC.size
_NO_RECORD = bytes(RECORD_BYTES)
_RECORDS_MAX = 2_000_000


class FloorFile:
    """The file of one data directory; without channels in order there is none."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._file: File | None = None
        # cursor -> numbers of its records, the older one first, and the floor that they have
        self._places: dict[int, tuple[int, int, int]] = {}
        self._free: list[int] = []
        self._is_there = False

    def load(self) -> dict[int, int]:
        """Read the floor of every cursor.

        Raises:
            OSError: the file is there and cannot be read.
        """
        try:
            file = self._files.open(FLOORS_NAME)
        except FileNotFoundError:
            return {}
        self._is_there = True
        try:
            data = file.read_at(0, min(file.size(), _RECORDS_MAX * RECORD_BYTES))
        finally:
            file.close()
        floors: dict[int, int] = {}
        for position in range(0, len(data) - RECORD_BYTES + 1, RECORD_BYTES):
            cursor, floor, _ = _RECORD.unpack_from(data, position)
            (crc,) = _CRC.unpack_from(data, position + _RECORD.size)
            if cursor and crc == crc32(data[position : position + _RECORD.size]):
                floors[cursor] = max(floor, floors.get(cursor, 0))
        return floors

    def begin(self, floors: Mapping[int, int]) -> None:
        """Go on with these records and no others, durably. Blocks.

        Raises:
            OSError: nothing has changed.
        """
        if not floors:
            if self._is_there:
                self._files.remove(FLOORS_NAME)
                self._files.sync_directory("")
            return
        records = b"".join(_record(cursor, floor) + _NO_RECORD for cursor, floor in floors.items())
        replace_file(self._files, FLOORS_NAME, records)
        self._files.sync_directory("")
        places = enumerate(floors.items())
        self._places = {cursor: (2 * number + 1, 2 * number, floor) for number, (cursor, floor) in places}

    def put(self, cursor: int, floor: int) -> bool:
        """Note how far a channel is; survives the end of this process.

        Returns:
            Whether it is less far than it was: a power loss may undo that until :meth:`sync`.

        Raises:
            WriteFailed: nothing is known about the record.
        """
        places = self._places.get(cursor)
        if places is None:
            if not self._free:
                self._free += (2 * len(self._places) + 1, 2 * len(self._places))
            places = self._free.pop(), self._free.pop(), 0
            self._places[cursor] = places
        older, newer, before = places
        record = _record(cursor, floor)
        self._write(older, record)
        is_back = floor < before
        if is_back:
            self._write(newer, record)
        self._places[cursor] = newer, older, floor
        return is_back

    def forget(self, cursor: int) -> bool:
        """Free the records of a channel that is gone, or whose floor went back.

        Returns:
            Whether there were any: a power loss may bring them back until :meth:`sync`.

        Raises:
            WriteFailed: nothing is known about the record.
        """
        places = self._places.pop(cursor, None)
        if places is None:
            return False
        self._free += places[:2]
        for number in places[:2]:
            self._write(number, _NO_RECORD)
        return True

    def _write(self, number: int, record: bytes) -> None:
        try:
            if self._file is None:
                self._file = self._files.open(FLOORS_NAME, create=True)
            self._file.write_at(number * RECORD_BYTES, record)
        except OSError as error:
            self.close()  # a handle that failed is not written to again
            raise WriteFailed(FLOORS_NAME, str(error)) from error

    def sync(self) -> None:
        """Have what was written survive a power loss. Blocks; for a worker thread.

        Raises:
            WriteFailed: nothing is known about the records.
        """
        file = self._file
        if file is not None:
            try:
                file.sync()
            except OSError as error:
                raise WriteFailed(FLOORS_NAME, str(error)) from error

    def close(self) -> None:
        """Release the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _record(cursor: int, floor: int) -> bytes:
    head = _RECORD.pack(cursor, floor, 0)
    return head + _CRC.pack(crc32(head))
