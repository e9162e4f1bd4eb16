"""Databases of earlier releases, made into one of the present schema version at the first start.

Tables before version 4, when rows had no checksums::

    topic(name, paused)
    topic_meta(name, meta, partitions)                     from version 2 on
    partition(topic, partition, backlog_start, paused_at)
    channel(topic, name, paused)                           of all partitions
    cursor(id, topic, partition, channel, state)
    takeover(id, journal)                                  when there was something to remember
    channel_skip(topic, name)                              likewise
    settings(topic, channel, json)                         likewise
    aside(cursor, sequence, due_ns, attempts, frame)       before version 3: messages set aside
    aside_pack(id, cursor, due_ns, last_due_ns, first, last, cut, count, size)   from version 3 on: the same in packs
    aside_data(id, data)
    aside_done(id, pack, sequences)

Rules of this file: one transaction, so that everything is in the one form or the other; of messages set aside, memory
for some at once.

Source: docs/decisions/0003, docs/decisions/0011.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from flintmq.storage import packs
from flintmq.storage.files import Database
from flintmq.storage.packs import NewPack, Piece
from flintmq.storage.rows import Statement
from flintmq.storage.tables import CHANNEL, CURSOR, META, PARTITION, SCHEMA, SCHEMA_VERSION, SETTINGS, TAKEOVER, TOPIC

_ROWS = 5000  # read at once
_ROWS_AFTER = (
    "SELECT sequence, due_ns, attempts, frame FROM aside WHERE cursor = ? AND (due_ns, sequence) > (?, ?)"
    " ORDER BY due_ns, sequence LIMIT ?"
)
_SMALL = {
    "topic": "name, paused",
    "topic_meta": "name, meta, partitions",
    "partition": "topic, partition, backlog_start, paused_at",
    "channel": "topic, name, paused",
    "channel_skip": "topic, name",
    "cursor": "id, topic, partition, channel, state",
    "settings": "topic, channel, json",
    "takeover": "id, journal",
    "aside_pack": "id, cursor, due_ns, last_due_ns, first, last, cut, count, size",
    "aside_done": "pack, sequences",
}


def migration(database: Database) -> Iterator[Statement]:
    """List what makes an older database one of the present version; of an empty one as well.

    Raises:
        StorageError: the database cannot be read; from the iterator, so that the transaction fails.
    """
    tables = [name for (name,) in database.query("SELECT name FROM sqlite_master WHERE type = 'table'")]
    rows: dict[str, list[tuple[Any, ...]]] = {}
    for name, columns in _SMALL.items():
        rows[name] = database.query(f"SELECT {columns} FROM {name}") if name in tables else []
    for name in _SMALL:
        if name in tables:
            yield f"DROP TABLE {name}", ((),)
    for sql in SCHEMA:
        yield sql, ((),)
    yield TOPIC.put(*rows["topic"])
    yield META.put(*rows["topic_meta"])
    yield PARTITION.put(*rows["partition"])
    yield SETTINGS.put(*rows["settings"])
    yield TAKEOVER.put(*rows["takeover"])
    yield CHANNEL.put(*_channels(rows))
    cursors = {row[0] for row in rows["cursor"]}
    yield from _packs(database, [row for row in rows["aside_pack"] if row[1] in cursors])
    yield packs.DONE.put(*rows["aside_done"])
    for table in ("aside_data WHERE id", "aside_done WHERE pack"):
        yield f"DELETE FROM {table} NOT IN (SELECT id FROM aside_pack)", ((),)
    if "aside" in tables:
        yield from _pack_rows(database, cursors, count(max((row[0] for row in rows["aside_pack"]), default=0) + 1))
        yield "DROP TABLE aside", ((),)
    counts = packs.count_packed(database.query)
    yield CURSOR.put(*((*names, counts.get(names[0], (0, 0))[0], state) for *names, state in rows["cursor"]))
    yield f"PRAGMA user_version = {SCHEMA_VERSION}", ((),)


def _channels(rows: dict[str, list[tuple[Any, ...]]]) -> Iterator[Sequence[Any]]:
    """A row for each channel in each partition; they had all channels in all partitions."""
    held = {topic: [int(number) for number in numbers.split(",") if number] for topic, _, numbers in rows["topic_meta"]}
    cursors: dict[tuple[str, str], dict[int, int]] = {}
    for cursor, topic, number, name, _ in rows["cursor"]:
        cursors.setdefault((topic, name), {})[number] = cursor
    skipped = set(rows["channel_skip"])
    for topic, name, paused in rows["channel"]:
        own = cursors.get((topic, name), {})
        for number in sorted({*held.get(topic, [0]), *own}):
            yield topic, number, name, own.get(number, 0), paused, int((topic, name) in skipped)


def _packs(database: Database, rows: list[tuple[Any, ...]]) -> Iterator[Statement]:
    """The same packs with their checksums."""
    for row in rows:
        found = database.query("SELECT data FROM aside_data WHERE id = ?", (row[0],))
        if found:
            yield packs.PACKS.put((*row, *packs.checksums(found[0][0])))


def _pack_rows(database: Database, cursors: set[int], numbers: Iterator[int]) -> Iterator[Statement]:
    """Packs of messages that had a row each."""
    for (cursor,) in database.query("SELECT DISTINCT cursor FROM aside ORDER BY cursor"):
        if cursor not in cursors:
            continue  # of a channel that did not outlive the process
        after = (-(1 << 62), -1)
        while found := database.query(_ROWS_AFTER, (cursor, *after, _ROWS)):
            pieces = [
                Piece(due_ns, sequence, 1, attempts, len(frame), frame) for sequence, due_ns, attempts, frame in found
            ]
            after = pieces[-1].due_ns, pieces[-1].first
            new = [NewPack(next(numbers), gathered) for gathered in packs.group(pieces, pieces[0].due_ns)]
            yield from packs.put_packs(cursor, new, 0)
