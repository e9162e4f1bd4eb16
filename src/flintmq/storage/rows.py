"""Tables whose rows say themselves whether they are whole: the last column of each is a checksum of all the others.

SQLite notices a damaged page only where its structure breaks; a bit that flips in a name or a number is served as if it
had been written. So every row carries CRC-32 of the name of its table and of its columns, in this form::

    crc32(msgpack([column, column, ...]), crc32(name of the table))

Rules of this file: no IO; what a damaged database may hand out (other types, text that is no UTF-8) is a row that is
not whole, never an exception.

Source: docs/decisions/0011.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from flintmq.checksum import crc32

Statement = tuple[str, Sequence[Sequence[Any]]]
Query = Callable[[str, Sequence[Any]], list[tuple[Any, ...]]]

_encode = msgspec.msgpack.Encoder().encode


def row_crc(table: str, *values: Any) -> int:
    """The checksum of a row; also a function of our databases' SQL, for rows that are changed where they are."""
    return crc32(_encode(values), crc32(table.encode()))


class Table:
    """One table: its SQL, and what its rows have to be.

    Args:
        columns: their names and types, without the checksum.
        key: how many of the first columns tell a row from the others; 0 when nothing does.
        is_optional: whether a database may do without the table, which has no rows then.
    """

    def __init__(self, name: str, columns: dict[str, str], key: int, is_optional: bool = False) -> None:
        self.name = name
        self.key = key
        self.is_optional = is_optional
        self.columns = tuple(columns)
        names = ", ".join(self.columns)
        typed = ", ".join(f"{column} {kind}" for column, kind in columns.items())
        has_rowid = not key or columns[self.columns[0]].endswith("PRIMARY KEY")
        primary = "" if has_rowid else f", PRIMARY KEY({', '.join(self.columns[:key])})"
        kind = "" if has_rowid else " WITHOUT ROWID"
        self.create = f"CREATE TABLE IF NOT EXISTS {name}({typed}, crc INTEGER NOT NULL{primary}){kind}"
        self.insert = f"INSERT OR REPLACE INTO {name}({names}, crc) VALUES({', '.join('?' * (len(columns) + 1))})"
        self.remove = f"DELETE FROM {name} WHERE {' AND '.join(f'{column} = ?' for column in self.columns[:key])}"
        self.select = f"SELECT {names}, crc FROM {name}"
        self._seed = crc32(name.encode())

    def put(self, *rows: Sequence[Any]) -> Statement:
        """Write rows, in the place of those with the same key."""
        seed = self._seed
        return self.insert, [(*row, crc32(_encode(row), seed)) for row in rows]

    def delete(self, *keys: Sequence[Any]) -> Statement:
        """Remove rows."""
        return self.remove, keys

    def is_whole(self, row: Sequence[Any]) -> bool:
        """Whether a row, with its checksum, is what was written."""
        try:
            return bool(crc32(_encode(row[:-1]), self._seed) == row[-1])
        except (UnicodeError, msgspec.MsgspecError, OverflowError):
            return False

    def read(self, query: Query) -> tuple[list[tuple[Any, ...]], int]:
        """All rows that are whole, without their checksums, and how many are not."""
        if self.is_optional and not query(
            "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (self.name,)
        ):
            return [], 0
        found = query(self.select, ())
        is_whole = self.is_whole
        rows = [row[:-1] for row in found if is_whole(row)]
        return rows, len(found) - len(rows)
