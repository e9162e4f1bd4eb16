"""Messages set aside, as the database keeps them: in packs of a few hundred that come due at about the same time.

Tables::

    aside_pack(id, cursor, due_ns, last_due_ns, first, last, cut, count, size, heads_crc, data_crc, crc)
                                      what is known of a pack without it
    aside_data(id, data)              the pack
    aside_done(pack, sequences, crc)  what of a pack is finished or moved

    cursor                of the channel's part; negative when it does not outlive the process
    due_ns, last_due_ns   of the first and the last of its messages that come due
    first, last           lowest and highest sequence
    cut                   sequences from here on are forgotten
    heads_crc, data_crc   CRC-32 of the pack as far as its heads go, and of all of it
    crc                   of the row, see rows.py

Byte picture of ``data`` (big-endian), and of ``sequences`` (little-endian)::

    0       8            12           16
    +-------+------------+------------+------------------------+----------------+      +---------+---------+--
    | id    | heads_size | frames_size| heads, msgpack, one of | message frames |      | sequence| sequence| ..
    |       |            |            | each Head: see below   |                |      +---------+---------+--
    +-------+------------+------------+------------------------+----------------+      0         8

A pack is written once and never changed; it goes when all of its messages have.

Rules of this file: few steps of SQL whatever the number of rows, because each lets go of the interpreter and has to
wait for it again; so many small packs are read as one row.

Source: docs/decisions/0003.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, repeat
from struct import Struct, pack, unpack
from typing import Any, NamedTuple

import msgspec

from flintmq.checksum import crc32
from flintmq.errors import DamagedDatabase
from flintmq.storage.rows import Query, Statement, Table

PACK_BYTES = 128 * 1024  # of frames in one pack, about
SMALL_BYTES = 8 * 1024  # packs of less are read together
CLEARED_BYTES = 8 * 1024 * 1024  # of packs, and
CLEARED_COUNT = 1024  # packs forgotten in one transaction, about
_READ_COUNT_MAX = 4096  # packs looked at by one read
_LOOK_BYTES = 16 * 1024  # of a pack that is searched for one message
_LOOK_COUNT = 64
_NEAR_NS = 16_000_000_000  # what is due within this time is one group
_STEPS_LOG2 = 2  # groups in each doubling of the time behind that: 4

_PREFIX = Struct(">QII")
_SEQUENCE_BYTES = 8

PACKS = Table(
    "aside_pack",
    {
        "id": "INTEGER PRIMARY KEY",
        "cursor": "INTEGER NOT NULL",
        "due_ns": "INTEGER NOT NULL",
        "last_due_ns": "INTEGER NOT NULL",
        "first": "INTEGER NOT NULL",
        "last": "INTEGER NOT NULL",
        "cut": "INTEGER NOT NULL",
        "count": "INTEGER NOT NULL",
        "size": "INTEGER NOT NULL",
        "heads_crc": "INTEGER NOT NULL",
        "data_crc": "INTEGER NOT NULL",
    },
    key=1,
)
DONE = Table("aside_done", {"pack": "INTEGER NOT NULL", "sequences": "BLOB NOT NULL"}, key=0)
SCHEMA = (
    PACKS.create,
    "CREATE INDEX IF NOT EXISTS aside_pack_due ON aside_pack(cursor, due_ns, id, last_due_ns)",
    "CREATE TABLE IF NOT EXISTS aside_data(id INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    DONE.create,
    "CREATE INDEX IF NOT EXISTS aside_done_pack ON aside_done(pack)",
    "CREATE TRIGGER IF NOT EXISTS aside_pack_gone AFTER DELETE ON aside_pack BEGIN"
    " DELETE FROM aside_data WHERE id = OLD.id; DELETE FROM aside_done WHERE pack = OLD.id; END",
)

PUT_DATA = "INSERT OR REPLACE INTO aside_data(id, data) VALUES(?, ?)"
_PUT_DONE = (
    "INSERT INTO aside_done(pack, sequences, crc) SELECT ?1, ?2, ?3"
    " WHERE EXISTS (SELECT 1 FROM aside_pack WHERE id = ?1)"
)
_IN_JSON = "IN (SELECT value FROM json_each(?))"
_COLUMNS = ("id", "due_ns", "cut", "size", "heads_crc", "data_crc", "first", "last", "count")  # what a Found has
_FOUND = ", ".join(_COLUMNS)
_LINE = " || ' ' || ".join(_COLUMNS)
_FIND_DUE = (
    f"SELECT group_concat({_LINE}) FROM"
    f" (SELECT {_FOUND} FROM aside_pack WHERE cursor = ? AND due_ns <= ? AND (due_ns, id) > (?, ?)"
    f" ORDER BY due_ns, id LIMIT {_READ_COUNT_MAX})"
)
_NEXT_DUE = "SELECT due_ns FROM aside_pack WHERE cursor = ? AND (due_ns, id) > (?, ?) ORDER BY due_ns, id LIMIT 1"
_CLEAR = "DELETE FROM aside_pack WHERE cursor = ? AND first >= ?"
_UNCOUNT = (
    "UPDATE cursor SET aside_count = -1, crc = row_crc('cursor', id, topic, partition, channel, -1, state)"
    " WHERE id = ? AND aside_count <> -1"
)
_FIND_CLEARED = (
    "SELECT group_concat(due_ns || ' ' || id || ' ' || size) FROM"
    " (SELECT due_ns, id, size FROM aside_pack WHERE cursor = ? AND first >= ? AND (due_ns, id) > (?, ?)"
    f" ORDER BY due_ns, id LIMIT {CLEARED_COUNT})"
)
_IS_TOUCHED = "(cut <= last OR EXISTS (SELECT 1 FROM aside_done WHERE pack = aside_pack.id))"


class Head(msgspec.Struct, array_like=True):
    """Consecutive messages of a pack.

    Attributes:
        after_ns: their due time after that of the pack.
        attempts: how often they have been delivered.
        sizes: of each frame in bytes; one number when all are equal.
    """

    after_ns: int
    first: int
    count: int
    attempts: int
    sizes: int | list[int]


_encode_heads = msgspec.msgpack.Encoder().encode
_decode_heads = msgspec.msgpack.Decoder(list[Head]).decode


class Piece:
    """Consecutive messages with one due time and one delivery count, and their frames.

    Attributes:
        due_ns: when they are to be delivered, 0 for at once.
        first, count: their sequences.
        attempts: how often they have been delivered.
        sizes: of each frame in bytes; one number when all are equal.
        data: bytes that hold the frames, and more; where they begin in it is ``at``.
        pack: for the owner.
    """

    __slots__ = ("at", "attempts", "count", "data", "due_ns", "first", "pack", "sizes")

    def __init__(
        self, due_ns: int, first: int, count: int, attempts: int, sizes: int | list[int], data: bytes, at: int = 0
    ) -> None:
        self.due_ns = due_ns
        self.first = first
        self.count = count
        self.attempts = attempts
        self.sizes = sizes
        self.data = data
        self.at = at
        self.pack: Any = None

    @property
    def end(self) -> int:
        """One past the last sequence."""
        return self.first + self.count

    @property
    def size(self) -> int:
        """Bytes of its frames."""
        sizes = self.sizes
        return sizes * self.count if isinstance(sizes, int) else sum(sizes)

    @property
    def frames(self) -> bytes:
        """All of its frames."""
        at = self.at
        return self.data if not at and len(self.data) == self.size else self.data[at : at + self.size]

    def frame(self, sequence: int) -> bytes:
        """One of its frames."""
        index, sizes = sequence - self.first, self.sizes
        if isinstance(sizes, int):
            at, size = self.at + index * sizes, sizes
        else:
            at, size = self.at + sum(sizes[:index]), sizes[index]
        return self.data[at : at + size]

    def messages(self) -> Iterator[tuple[int, bytes]]:
        """Each of its sequences, with its frame."""
        data, at, sizes = self.data, self.at, self.sizes
        for sequence, size in enumerate(repeat(sizes, self.count) if isinstance(sizes, int) else sizes, self.first):
            yield sequence, data[at : at + size]
            at += size

    def count_within(self, bytes_max: int) -> int:
        """Count those of its messages that have together at most so many bytes; at least one."""
        sizes = self.sizes
        if isinstance(sizes, int):
            return max(1, min(self.count, bytes_max // sizes))
        return max(1, sum(end <= bytes_max for end in accumulate(sizes)))

    def part(self, start: int, end: int) -> Piece:
        """Its messages from ``start`` to ``end`` (exclusive, sequences), of the same bytes."""
        sizes, skipped, count = self.sizes, start - self.first, end - start
        if isinstance(sizes, int):
            piece = Piece(self.due_ns, start, count, self.attempts, sizes, self.data, self.at + skipped * sizes)
        else:
            at = self.at + sum(sizes[:skipped])
            piece = Piece(self.due_ns, start, count, self.attempts, sizes[skipped : skipped + count], self.data, at)
        piece.pack = self.pack
        return piece

    def take(self, count: int) -> Piece:
        """Take its first messages off; it keeps the others."""
        taken = self.part(self.first, self.first + count)
        rest = self.part(taken.end, self.end)
        self.first, self.count, self.sizes, self.at = rest.first, rest.count, rest.sizes, rest.at
        return taken

    def without(self, sequences: Iterable[int]) -> list[Piece]:
        """Return what is left of it without some of its messages."""
        left, start = [], self.first
        for sequence in sorted(each for each in sequences if self.first <= each < self.end):
            if sequence > start:
                left.append(self.part(start, sequence))
            start = max(start, sequence + 1)
        if start == self.first:
            return [self]
        if start < self.end:
            left.append(self.part(start, self.end))
        return left

    def own(self) -> None:
        """Let go of the bytes that are not its frames."""
        self.data, self.at = self.frames, 0


@dataclass(slots=True)
class NewPack:
    """A pack to be written.

    Attributes:
        pieces: by due time.
    """

    number: int
    pieces: list[Piece]


class Found(NamedTuple):
    """The columns of a pack's row that are needed to read it."""

    number: int
    due_ns: int
    cut: int
    size: int
    heads_crc: int
    data_crc: int
    first: int
    last: int
    message_count: int


@dataclass(slots=True)
class StoredPack:
    """A pack as it was read.

    Attributes:
        pieces: what is left of it, by due time; of a damaged one without frames, and none when its heads are damaged.
        size: bytes that the pieces share.
        found: its row, when its frames are not what was written.
    """

    number: int
    pieces: list[Piece]
    size: int
    found: Found | None = None


@dataclass(slots=True)
class DuePacks:
    """Packs that come due, in the order of their due times.

    Attributes:
        packs: those that are whole.
        through: ``(due_ns, number)`` of the last.
        next_due_ns: when the one after it comes due; None when there is none.
        damaged: those that are not.
    """

    packs: list[StoredPack]
    through: tuple[int, int]
    next_due_ns: int | None
    damaged: list[StoredPack] = field(default_factory=list)

    def shift(self, shift_ns: int) -> None:
        """Move all due times."""
        self.through = (self.through[0] + shift_ns, self.through[1])
        if self.next_due_ns is not None:
            self.next_due_ns += shift_ns
        for each in (*self.packs, *self.damaged):
            for piece in each.pieces:
                piece.due_ns += shift_ns


# -- grouping ----------------------------------------------------------------------------------------------------------


def group(pieces: Iterable[Piece], now_ns: int) -> Iterator[list[Piece]]:
    """Cut pieces into what fits into one pack each.

    The farther away the due times, the more they may differ within a pack: what is in a pack that begins to come due,
    and is not due for long, is written again with others of its time, so a few times at most. Little is not divided.
    """
    gathered: list[Piece] = []
    size = 0
    for _, these in groupby(sorted(pieces, key=_place), lambda piece: _distance_group(piece.due_ns - now_ns)):
        if size >= SMALL_BYTES:
            yield gathered
            gathered, size = [], 0
        for whole in these:
            for piece in _parts(whole):
                added = piece.size
                if gathered and size + added > PACK_BYTES:
                    yield gathered
                    gathered, size = [], 0
                gathered.append(piece)
                size += added
    if gathered:
        yield gathered


def _parts(piece: Piece) -> Iterator[Piece]:
    if piece.size <= PACK_BYTES:
        yield piece
        return
    rest = piece.part(piece.first, piece.end)
    while rest.count:
        yield rest.take(rest.count_within(PACK_BYTES))


def _place(piece: Piece) -> tuple[int, int]:
    return piece.due_ns, piece.first


def _distance_group(distance_ns: int) -> int:
    if distance_ns <= _NEAR_NS:
        return 0
    bits = distance_ns.bit_length() - 1 - _STEPS_LOG2
    return (bits << _STEPS_LOG2) + (distance_ns >> bits)


# -- packs and their bytes ---------------------------------------------------------------------------------------------


def encode_pack(new: NewPack) -> bytes:
    """The bytes of a pack."""
    due_ns = new.pieces[0].due_ns
    heads = _encode_heads(
        [(piece.due_ns - due_ns, piece.first, piece.count, piece.attempts, piece.sizes) for piece in new.pieces]
    )
    frames = [piece.frames for piece in new.pieces]
    return b"".join((_PREFIX.pack(new.number, len(heads), sum(map(len, frames))), heads, *frames))


def decode_pack(data: bytes, due_ns: int) -> StoredPack:
    """Read a pack.

    Args:
        due_ns: of its first message.
    """
    number, heads_size, frames_size = _PREFIX.unpack_from(data)
    at = _PREFIX.size + heads_size
    pieces = []
    for head in _decode_heads(memoryview(data)[_PREFIX.size : at]):
        piece = Piece(due_ns + head.after_ns, head.first, head.count, head.attempts, head.sizes, data, at)
        pieces.append(piece)
        at += piece.size
    return StoredPack(number, pieces, frames_size)


def checksums(data: bytes) -> tuple[int, int]:
    """``heads_crc`` and ``data_crc`` of a pack."""
    _, heads_size, _ = _PREFIX.unpack_from(data)
    at = _PREFIX.size + heads_size
    heads_crc = crc32(memoryview(data)[:at])
    return heads_crc, crc32(memoryview(data)[at:], heads_crc)


def _checked(data: bytes, found: Found) -> StoredPack:
    """Read a pack that may be damaged, or gone, which is empty."""
    if len(data) == found.size and crc32(data) == found.data_crc:
        return decode_pack(data, found.due_ns)
    damaged = StoredPack(found.number, [], 0, found)
    if len(data) > _PREFIX.size:
        number, heads_size, _ = _PREFIX.unpack_from(data)
        end = _PREFIX.size + heads_size
        if number == found.number and crc32(memoryview(data)[:end]) == found.heads_crc:
            heads = _decode_heads(memoryview(data)[_PREFIX.size : end])
            damaged.pieces = [
                Piece(found.due_ns + head.after_ns, head.first, head.count, head.attempts, 0, b"") for head in heads
            ]
    return damaged


class EncodedPack(msgspec.Struct, frozen=True, array_like=True):
    """A pack as it is stored.

    Attributes:
        due_ns, last_due_ns: of its first and its last message.
        first, last: its lowest and its highest sequence.
        count: of its messages.
        data: the bytes, which have the number, too.
    """

    number: int
    due_ns: int
    last_due_ns: int
    first: int
    last: int
    count: int
    data: bytes

    def renumbered(self, number: int) -> EncodedPack:
        """The same pack under another number."""
        _, heads_size, frames_size = _PREFIX.unpack_from(self.data)
        data = _PREFIX.pack(number, heads_size, frames_size) + self.data[_PREFIX.size :]
        return msgspec.structs.replace(self, number=number, data=data)


def encoded_pack(new: NewPack, shift_ns: int) -> EncodedPack:
    """A pack that is to be stored.

    Args:
        shift_ns: added to due times.
    """
    pieces = new.pieces
    first, last = min(piece.first for piece in pieces), max(piece.end for piece in pieces) - 1
    due_ns, last_due_ns = pieces[0].due_ns + shift_ns, pieces[-1].due_ns + shift_ns
    count = sum(piece.count for piece in pieces)
    return EncodedPack(new.number, due_ns, last_due_ns, first, last, count, encode_pack(new))


def put_encoded(cursor: int, packs: Sequence[EncodedPack]) -> list[Statement]:
    """Write packs; one that is there already is written again."""
    rows = [
        (
            each.number,
            cursor,
            each.due_ns,
            each.last_due_ns,
            each.first,
            each.last,
            each.last + 1,
            each.count,
            len(each.data),
            *checksums(each.data),
        )
        for each in packs
    ]
    return [PACKS.put(*rows), (PUT_DATA, [(each.number, each.data) for each in packs])]


def put_packs(cursor: int, packs: Sequence[NewPack], shift_ns: int) -> list[Statement]:
    """Write packs; one that is there already is written again.

    Args:
        shift_ns: added to due times.
    """
    return put_encoded(cursor, [encoded_pack(each, shift_ns) for each in packs])


def put_done(done: Mapping[int, Sequence[int]]) -> Statement:
    """Note of packs which more of their messages are finished or moved: number -> sequences.

    Of a pack that is gone nothing is noted: a flush that is written again may have removed it the first time.
    """
    _, rows = DONE.put(*((number, pack(f"<{len(sequences)}Q", *sequences)) for number, sequences in done.items()))
    return _PUT_DONE, rows


def delete_packs(numbers: Iterable[int]) -> Statement:
    """Forget whole packs."""
    return f"DELETE FROM aside_pack WHERE id {_IN_JSON}", ((json.dumps([*numbers]),),)


def clear_packs(cursor: int, first: int) -> list[Statement]:
    """Forget everything set aside for a cursor, from a sequence on."""
    return [
        (_CLEAR, ((cursor, first),)),
        (
            f"UPDATE aside_pack SET cut = ?, crc = {_crc_with(cut='?')} WHERE cursor = ? AND cut > ?",
            ((first, first, cursor, first),),
        ),
    ]


def clear_all(cursor: int) -> list[Statement]:
    """Forget everything set aside for a cursor."""
    return [(_CLEAR, ((cursor, 0),))]


def cleared(statements: Iterable[Statement]) -> list[tuple[int, int]]:
    """Find the cursors for which statements forget packs, and from which sequence on."""
    return [(row[0], row[1]) for sql, rows in statements if sql == _CLEAR for row in rows]


@dataclass(slots=True)
class Cleared:
    """Some of what is set aside for a cursor from a sequence on.

    Attributes:
        after: ``(due_ns, number)`` of the last.
        share: of what may be forgotten in one transaction, about; 1.0 is all of it.
        is_rest: whether there is nothing behind them.
    """

    cursor: int
    numbers: list[int]
    after: tuple[int, int]
    share: float
    is_rest: bool

    def forget(self) -> list[Statement]:
        """Forget these, before the transaction that forgets all: a start must not miss them, should that not come."""
        if not self.numbers:
            return []
        return [(_UNCOUNT, ((self.cursor,),)), delete_packs(self.numbers)]


def find_cleared(query: Query, cursor: int, first: int, after: tuple[int, int]) -> Cleared:
    """Find packs that :func:`clear_packs` would forget, as many as may be forgotten in one transaction.

    Args:
        after: ``(due_ns, number)`` of the last that was found before.
    """
    ((found,),) = query(_FIND_CLEARED, (cursor, first, *after))
    lines = (found or "").split(",") if found else []
    numbers: list[int] = []
    size = 0
    for line in lines:
        if size >= CLEARED_BYTES:
            break
        due_ns, number, pack_size = map(int, line.split())
        numbers.append(number)
        size += pack_size
        after = due_ns, number
    share = max(size / CLEARED_BYTES, len(numbers) / CLEARED_COUNT)
    return Cleared(cursor, numbers, after, share, len(numbers) == len(lines) < CLEARED_COUNT)


def shift_packs(shift_ns: int, cursor: int | None = None) -> Statement:
    """Move every due time, or those of one cursor, because the wall clock was set."""
    crc = _crc_with(due_ns="due_ns + ?", last_due_ns="last_due_ns + ?")
    change = f"UPDATE aside_pack SET due_ns = due_ns + ?, last_due_ns = last_due_ns + ?, crc = {crc}"
    shifts = (shift_ns, shift_ns, shift_ns, shift_ns)
    return (change, (shifts,)) if cursor is None else (f"{change} WHERE cursor = ?", ((*shifts, cursor),))


def move_packs(cursor: int, to: int) -> Statement:
    """Give all packs of one cursor to another."""
    crc = _crc_with(cursor="?")
    return f"UPDATE aside_pack SET cursor = ?, crc = {crc} WHERE cursor = ?", ((to, to, cursor),)


def _crc_with(**changed: str) -> str:
    """SQL for the checksum of a pack's row some of whose columns are changed."""
    values = ", ".join(changed.get(column, column) for column in PACKS.columns)
    return f"row_crc('{PACKS.name}', {values})"


# -- questions ---------------------------------------------------------------------------------------------------------


def due_packs(query: Query, cursor: int, after: tuple[int, int], until_ns: int, bytes_max: int) -> DuePacks:
    """Read packs that begin to come due until some time.

    Args:
        after: ``(due_ns, number)`` of the last that was read before.
        bytes_max: of all together, about; one is read however large it is.
    """
    packs: list[Found] = []
    size = 0
    following: int | None = None
    ((found,),) = query(_FIND_DUE, (cursor, until_ns, *after))
    for line in (found or "").split(",") if found else ():
        each = Found(*map(int, line.split()))
        if packs and size + each.size > bytes_max:
            following = each.due_ns
            break
        size += each.size
        packs.append(each)
    through = (packs[-1].due_ns, packs[-1].number) if packs else after
    if following is None:
        rows = query(_NEXT_DUE, (cursor, *through))
        following = rows[0][0] if rows else None
    read = list(_read_packs(query, packs).values())
    damaged = [each for each in read if each.found is not None]
    return DuePacks([each for each in read if each.found is None], through, following, damaged)


def _read_packs(query: Query, packs: Sequence[Found]) -> dict[int, StoredPack]:
    """Packs in this order, without what is done or forgotten of them."""
    small = {each.number for each in packs if each.size < SMALL_BYTES}
    if len(small) < 2:
        small = set()
    data = {each.number: _read_data(query, each.number) for each in packs if each.number not in small}
    if small:
        sql = f"SELECT group_concat(id || ' ' || hex(data)) FROM aside_data WHERE id {_IN_JSON}"
        ((found,),) = query(sql, (json.dumps([*small]),))
        for line in found.split(",") if found else ():
            number, _, text = line.partition(" ")
            data[int(number)] = bytes.fromhex(text)
    done = _read_done(query, [each.number for each in packs])
    read = {}
    for each in packs:
        number, cut = each.number, each.cut
        stored = read[number] = _checked(data.get(number, b""), each)
        gone, pieces = done.get(number), stored.pieces
        if gone or any(piece.end > cut for piece in pieces):
            stored.pieces = [
                left for piece in pieces for left in piece.without([*(gone or ()), *range(cut, piece.end)])
            ]
    return read


def _read_data(query: Query, number: int) -> bytes:
    """The bytes of a pack; nothing when they are gone, or where they should be is damaged."""
    try:
        rows = query("SELECT data FROM aside_data WHERE id = ?", (number,))
    except DamagedDatabase:
        return b""
    return rows[0][0] if rows and isinstance(rows[0][0], bytes) else b""


def _read_done(query: Query, numbers: Iterable[int]) -> dict[int, set[int]]:
    sql = f"SELECT group_concat(pack || ' ' || hex(sequences)) FROM aside_done WHERE pack {_IN_JSON}"
    ((found,),) = query(sql, (json.dumps([*numbers]),))
    done: dict[int, set[int]] = {}
    for line in (found or "").split(",") if found else ():
        number, _, sequences = line.partition(" ")
        data = bytes.fromhex(sequences)
        done.setdefault(int(number), set()).update(unpack(f"<{len(data) // _SEQUENCE_BYTES}Q", data))
    return done


def count_packed(query: Query, cursor: int | None = None) -> dict[int, tuple[int, int]]:
    """Count the spilled messages of each cursor or of one, and find the earliest due time."""
    of_one = "" if cursor is None else f" WHERE cursor = {int(cursor)}"
    counts = {
        each: (count, due_ns)
        for each, count, due_ns in query(
            f"SELECT cursor, SUM(CASE WHEN {_IS_TOUCHED} THEN 0 ELSE count END), MIN(due_ns) FROM aside_pack{of_one}"
            " GROUP BY cursor",
            (),
        )
    }
    condition = f"{of_one} AND {_IS_TOUCHED}" if of_one else f" WHERE {_IS_TOUCHED}"
    for each, *found in query(f"SELECT cursor, {_FOUND} FROM aside_pack{condition}", ()):
        (read,) = _read_packs(query, [Found(*found)]).values()
        left = sum(piece.count for piece in read.pieces)
        count, earliest_ns = counts[each]
        counts[each] = count + (left if read.found is None or read.pieces else read.found.message_count), earliest_ns
    return counts


def next_packs(
    query: Query, cursor: int, after: int, bytes_max: int
) -> tuple[list[EncodedPack], dict[int, list[int]], int | None]:
    """Read packs of a cursor as they are stored, and what of each is finished, has left it or is forgotten.

    Packs that are damaged are left out.

    Args:
        after: the number of the last that was read before; 0: none was.
        bytes_max: of all together, about.

    Returns:
        the packs, what is done of them, and the number of the last that was looked at; None: there are no more.
    """
    found: list[EncodedPack] = []
    done: dict[int, list[int]] = {}
    sql = f"{PACKS.select} WHERE cursor = ? AND id > ? ORDER BY id LIMIT {_LOOK_COUNT}"
    looked_at = query(sql, (cursor, after))
    if not looked_at:
        return [], {}, None
    rows = []
    size = 0
    for row in looked_at:
        after = row[0]
        if PACKS.is_whole(row):
            rows.append(row)
            size += row[8]
            if size >= bytes_max:
                break
    gone = _read_done(query, [row[0] for row in rows])
    for number, _, due_ns, last_due_ns, first, last, cut, count, size, heads_crc, data_crc, _ in rows:
        data = _read_data(query, number)
        read = _checked(data, Found(number, due_ns, cut, size, heads_crc, data_crc, first, last, count))
        if read.found is not None:
            continue
        found.append(EncodedPack(number, due_ns, last_due_ns, first, last, count, data))
        forgotten = [sequence for piece in read.pieces for sequence in range(max(cut, piece.first), piece.end)]
        left = sorted({*gone.get(number, ()), *forgotten})
        if left:
            done[number] = left
    return found, done, after


def packed_after(query: Query, cursor: int, wall_ns: int, count_max: int) -> list[tuple[int, Piece]]:
    """Messages set aside until after ``wall_ns``, the next one first: ``(sequence, piece)``."""
    found: list[tuple[int, int, Piece]] = []
    after = (-1, -1)
    while True:
        rows = query(
            f"SELECT {_FOUND} FROM aside_pack WHERE cursor = ? AND (due_ns, id) > (?, ?)"
            " AND last_due_ns > ? ORDER BY due_ns, id LIMIT 1",
            (cursor, *after, wall_ns),
        )
        if not rows:
            break
        next_pack = Found(*rows[0])
        if len(found) >= count_max and next_pack.due_ns > found[-1][0]:
            break
        after = (next_pack.due_ns, next_pack.number)
        (read,) = _read_packs(query, [next_pack]).values()
        for piece in read.pieces if read.found is None else ():
            if piece.due_ns > wall_ns:
                found += [
                    (piece.due_ns, s, piece) for s in range(piece.first, piece.first + min(piece.count, count_max))
                ]
        found = heapq.nsmallest(count_max, found, key=lambda each: each[:2])
    return [(sequence, piece) for _, sequence, piece in found]


def find_packed(query: Query, cursor: int, sequence: int) -> int | None:
    """The pack that holds a message which is not finished; None when there is none."""
    after = 0
    while True:
        rows = query(
            f"SELECT substr(d.data, 1, ?), {', '.join(f'p.{column}' for column in _COLUMNS)}"
            " FROM aside_pack p JOIN aside_data d ON d.id = p.id WHERE p.cursor = ? AND p.id > ?"
            " AND p.first <= ? AND p.cut > ? ORDER BY p.id LIMIT ?",
            (_LOOK_BYTES, cursor, after, sequence, sequence, _LOOK_COUNT),
        )
        for start, *columns in rows:
            found = Found(*columns)
            after = found.number
            if not _may_hold(start, sequence):
                continue
            (read,) = _read_packs(query, [found]).values()
            if any(piece.first <= sequence < piece.end for piece in read.pieces):
                return found.number
        if len(rows) < _LOOK_COUNT:
            return None


def _may_hold(start: bytes, sequence: int) -> bool:
    """Whether a pack holds a message, finished or not, as far as its start tells."""
    if len(start) < _PREFIX.size:
        return True  # damaged
    _, heads_size, _ = _PREFIX.unpack_from(start)
    heads = start[_PREFIX.size : _PREFIX.size + heads_size]
    if len(heads) < heads_size:
        return True
    try:
        decoded = _decode_heads(heads)
    except msgspec.MsgspecError:
        return True
    return any(head.first <= sequence < head.first + head.count for head in decoded)
