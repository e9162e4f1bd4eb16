"""Messages set aside as releases before schema version 3 kept them: a row for each, made into packs at the first start.

Table::

    aside(cursor, sequence, due_ns, attempts, frame)

Rules of this file: one transaction, so that each message is in the one form or the other; memory for some rows at once.

Source: design/reliability.md R4.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from flintmq.storage.files import Database
from flintmq.storage.packs import NewPack, Piece, Statement, group, put_packs

_ROWS = 5000  # read at once
_ROWS_AFTER = (
    "SELECT sequence, due_ns, attempts, frame FROM aside WHERE cursor = ? AND (due_ns, sequence) > (?, ?)"
    " ORDER BY due_ns, sequence LIMIT ?"
)


def pack_rows(database: Database) -> None:
    """Make packs of the rows and remove their table; nothing happens when there is none.

    Raises:
        StorageError: the database cannot be read or written; everything is as it was.
    """
    if database.query("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'aside'"):
        database.commit(_statements(database), True)


def _statements(database: Database) -> Iterator[Statement]:
    ((last,),) = database.query("SELECT MAX(id) FROM aside_pack")
    numbers = count((last or 0) + 1)
    for (cursor,) in database.query("SELECT DISTINCT cursor FROM aside ORDER BY cursor"):
        after = (-(1 << 62), -1)
        while rows := database.query(_ROWS_AFTER, (cursor, *after, _ROWS)):
            pieces = [
                Piece(due_ns, sequence, 1, attempts, len(frame), frame) for sequence, due_ns, attempts, frame in rows
            ]
            after = pieces[-1].due_ns, pieces[-1].first
            packs = [NewPack(next(numbers), gathered) for gathered in group(pieces, pieces[0].due_ns)]
            yield from put_packs(cursor, packs, 0)
    yield "DROP TABLE aside", ((),)
