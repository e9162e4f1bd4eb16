"""The second list of topics and channels, beside the database, by which each of the two is checked at the start.

It is a journal of the rows of some tables: what a transaction changes in them is appended here before the database has
it, so the list is never behind. What has become long by that is written anew. Of transactions that change nothing in
these tables, only the number is noted, in a place that is written over; that costs one small write and no sync.
It is synced beside the database, so a power loss may take the last record from the list and leave it in the database.

Byte picture of ``channels.list`` (big-endian)::

    0      4        6         8          16    20            64        128       192
    +------+--------+---------+----------+-----+-------------+---------+---------+--------
    | FMQL | version| reserved| identity | crc | zeros       | a note  | a note  | records
    +------+--------+---------+----------+-----+-------------+---------+---------+--------
    note:   [8 commits][8 synced][8 generation][16 boot][4 crc]      written in turn; the one with more commits counts
    record: [4 size][4 crc][8 generation][msgpack]                   crc covers what stands behind it

    commits     transactions that the database has had, in all its life
    synced      how many of them survive a power loss
    generation  records, in all its life; in a note: of those, what the database had as well
    boot        what the time since the machine was started is called, hashed; zeros when nobody knows
    msgpack     [[table, [key columns], [other columns] or nil when the row is gone], ...]

Rules of this file: bytes that are damaged never raise, they end what is believed; what it means is decided in
integrity.py; after an error nothing is appended to the file as it is, it is written anew.

Source: docs/decisions/0011.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from struct import Struct
from typing import Any, NamedTuple

import msgspec

from flintmq.checksum import crc32
from flintmq.errors import StorageError
from flintmq.storage.files import File, Files, replace_file

LIST_NAME = "channels.list"
LIST_BYTES_MAX = 1 << 30
_MAGIC = b"FMQL"
_VERSION = 1
_HEADER = Struct(">4sHHQ")
_NOTE = Struct(">QQQ16s")
_RECORD = Struct(">IIQ")
_CRC = Struct(">I")
_NOTES_AT = (64, 128)
_RECORDS_AT = 192
_CHANGES_MAX = 1000  # in one record of a list that is written anew
_GROWTH_BYTES = 256 * 1024  # before it is written anew, or as much as it had then
_NO_BOOT = bytes(16)

Change = tuple[str, Sequence[Any], Sequence[Any] | None]
"""A table, the key of a row, and the rest of it; None when it is gone."""
Rows = dict[str, dict[tuple[Any, ...], tuple[Any, ...]]]
"""Rows by table and key, each without its key."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[str, tuple[Any, ...], tuple[Any, ...] | None]]).decode


class Note(NamedTuple):
    """The last note of the database, see the picture above."""

    commits: int = 0
    synced: int = 0
    generation: int = 0
    boot: bytes = _NO_BOOT


@dataclass(slots=True)
class LoadedList:
    """The contents of a file.

    Attributes:
        identity: of the directory; None when the header is damaged.
        records: those that are whole up to the first that is not: generation, changes.
        note: None when both are damaged.
        bad_position: byte position of what is no record; None when all are.
    """

    identity: int | None = None
    records: list[tuple[int, list[Change]]] = field(default_factory=list)
    note: Note | None = None
    bad_position: int | None = None

    @property
    def generation(self) -> int:
        """Of the last record that is whole."""
        return self.records[-1][0] if self.records else 0

    def rows(self, generation: int | None = None) -> Rows:
        """The rows as they were at a generation, or as the last record left them."""
        rows: Rows = {}
        for number, changes in self.records:
            if generation is not None and number > generation:
                break
            for table, key, rest in changes:
                its = rows.setdefault(table, {})
                if rest is None:
                    its.pop(tuple(key), None)
                else:
                    its[tuple(key)] = tuple(rest)
        return rows


def boot_of(files: Files) -> bytes:
    """The time since the machine was started, as a note has it."""
    text = files.boot_id()
    return sha256(text.encode()).digest()[:16] if text else _NO_BOOT


class ChannelList:
    """The list of one data directory.

    Attributes:
        boot: the time since the machine was started, as a note has it.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._file: File | None = None
        self._end = 0
        self._is_whole = False  # what is in the file can be appended to
        self._rewrite_at = 0
        self.boot = boot_of(files)
        self._slot = 0

    def load(self) -> LoadedList | None:
        """Read the list; None when there is none.

        Raises:
            OSError: it is there and cannot be read.
            StorageError: it was written by a newer release.
        """
        try:
            file = self._files.open(LIST_NAME)
        except FileNotFoundError:
            return None
        try:
            data = file.read_at(0, min(file.size(), LIST_BYTES_MAX))
        finally:
            file.close()
        loaded = LoadedList(_identity(data))
        notes = [note for position in _NOTES_AT if (note := _note(data, position)) is not None]
        loaded.note = max(notes, default=None)
        self._read_records(data, loaded)
        self._is_whole = loaded.identity is not None and loaded.bad_position is None and len(notes) == len(_NOTES_AT)
        self._rewrite_at = self._end + _GROWTH_BYTES
        return loaded

    def _read_records(self, data: bytes, loaded: LoadedList) -> None:
        position = _RECORDS_AT
        while position < len(data):
            record = _record(data, position)
            if record is None:
                loaded.bad_position = position
                break
            generation, changes, position = record
            loaded.records.append((generation, changes))
        self._end = position

    @property
    def wants_rewrite(self) -> bool:
        """Whether :meth:`rewrite` should be next: it has grown, or something is wrong with it."""
        return not self._is_whole or self._end > self._rewrite_at

    def rewrite(
        self, identity: int, generation: int, rows: Mapping[str, Iterable[tuple[Any, Any]]], note: Note
    ) -> None:
        """Begin anew with these rows, durably. Blocks.

        Raises:
            OSError: the one before is still there, or this one is.
        """
        self.close()
        self._is_whole = False
        head = _HEADER.pack(_MAGIC, _VERSION, 0, identity)
        written = _pack_note(note)
        parts = [(head + _CRC.pack(crc32(head))).ljust(_NOTES_AT[0], b"\0")]
        parts += [written.ljust(_NOTES_AT[1] - _NOTES_AT[0], b"\0"), written.ljust(_RECORDS_AT - _NOTES_AT[1], b"\0")]
        changes = [(table, key, rest) for table, each in rows.items() for key, rest in each]
        for start in range(0, max(len(changes), 1), _CHANGES_MAX):
            parts.append(_pack_record(generation, changes[start : start + _CHANGES_MAX]))
        data = b"".join(parts)
        replace_file(self._files, LIST_NAME, data)
        self._files.sync_directory("")
        self._end = len(data)
        self._rewrite_at = self._end + max(self._end, _GROWTH_BYTES)
        self._is_whole = True

    def append(self, generation: int, changes: Sequence[Change]) -> None:
        """Write what a transaction is about to change; it survives the process, and with :meth:`sync` a power loss.

        Raises:
            StorageError: nothing is known about the file; it is to be written anew.
        """
        data = _pack_record(generation, changes)
        self._write(self._end, data)
        self._end += len(data)

    def sync(self) -> None:
        """Return when what was appended survives a power loss. Blocks.

        Raises:
            OSError: nothing is known about the file; it is to be written anew.
        """
        assert self._file is not None, "something was appended"
        try:
            self._file.sync()
        except OSError:
            self._give_up()
            raise

    def note(self, commits: int, synced: int, generation: int) -> None:
        """Note how far the database is; survives the process.

        Raises:
            StorageError: nothing is known about the file; it is to be written anew.
        """
        self._slot = 1 - self._slot
        self._write(_NOTES_AT[self._slot], _pack_note(Note(commits, synced, generation, self.boot)))

    def _write(self, position: int, data: bytes) -> None:
        try:
            if self._file is None:
                self._file = self._files.open(LIST_NAME)
            self._file.write_at(position, data)
        except OSError as error:
            self._give_up()
            raise StorageError(f"{LIST_NAME}: {error.strerror or error}") from error

    def _give_up(self) -> None:
        self._is_whole = False
        self.close()  # a handle that failed is not written to again

    def close(self) -> None:
        """Release the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _pack_note(note: Note) -> bytes:
    data = _NOTE.pack(*note)
    return data + _CRC.pack(crc32(data))


def _note(data: bytes, position: int) -> Note | None:
    end = position + _NOTE.size
    if len(data) < end + _CRC.size or _CRC.unpack_from(data, end)[0] != crc32(data[position:end]):
        return None
    return Note(*_NOTE.unpack_from(data, position))


def _identity(data: bytes) -> int | None:
    end = _HEADER.size
    if len(data) < end + _CRC.size or _CRC.unpack_from(data, end)[0] != crc32(data[:end]):
        return None
    magic, version, _, identity = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise StorageError(f"{LIST_NAME} has version {version}; this release knows {_VERSION}: start a newer one")
    return int(identity)


def _pack_record(generation: int, changes: Sequence[Change]) -> bytes:
    body = _encode(changes)
    head = _RECORD.pack(len(body), 0, generation)
    return head[:4] + _CRC.pack(crc32(body, crc32(head[8:], crc32(head[:4])))) + head[8:] + body


def _record(data: bytes, position: int) -> tuple[int, list[Any], int] | None:
    at = position + _RECORD.size
    if len(data) < at:
        return None
    size, crc, generation = _RECORD.unpack_from(data, position)
    body = memoryview(data)[at : at + size]
    if len(body) < size or crc != crc32(body, crc32(data[position + 8 : at], crc32(data[position : position + 4]))):
        return None
    try:
        return generation, _decode(body), at + size
    except msgspec.MsgspecError:
        return None
