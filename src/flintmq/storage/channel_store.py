"""The database of a data directory: topics, channels, how far each channel is, and the messages set aside.

Tables::

    topic(name, paused)
    topic_meta(name, meta, partitions)                     of a topic with partitions: JSON, and the numbers held here
    partition(topic, partition, backlog_start, paused_at)
    channel(topic, name, paused)
    cursor(id, topic, partition, channel, state)           state: msgpack of CursorRow, done bits deflated
    aside_pack, aside_data, aside_done                     messages set aside, see packs.py
    takeover(id, journal)                                  one row while NSQ's files are being taken over
    channel_skip(topic, name)                              channels that finish everything without delivering it
    settings(topic, channel, json)                         of topics (channel is empty) and channels, see settings.py

Rules of this file: statements are built here and run by whoever owns the worker thread; one :class:`ChannelStore`
is used by one thread at a time. Cursors and packs of one flush are one transaction, because a message leaves the
cursor exactly when it enters a pack.

Source: design/reliability.md R3 and R4.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from flintmq.errors import PermissionMissing, StorageError
from flintmq.settings import Settings, decode_settings, encode_settings
from flintmq.storage import packs
from flintmq.storage.aside_rows import pack_rows
from flintmq.storage.files import Database, Files
from flintmq.topic_meta import TopicMeta, decode_meta, encode_meta

SCHEMA_VERSION = 3  # 1 had no topic_meta, 2 a row for each message set aside
DATABASE_NAME = "channels.db"

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS topic(name TEXT PRIMARY KEY, paused INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS topic_meta(name TEXT PRIMARY KEY, meta BLOB NOT NULL, partitions TEXT NOT NULL)"
    " WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS partition(topic TEXT, partition INTEGER, backlog_start INTEGER NOT NULL,"
    " paused_at INTEGER, PRIMARY KEY(topic, partition)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS channel(topic TEXT, name TEXT, paused INTEGER NOT NULL,"
    " PRIMARY KEY(topic, name)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS cursor(id INTEGER PRIMARY KEY, topic TEXT NOT NULL, partition INTEGER NOT NULL,"
    " channel TEXT NOT NULL, state BLOB NOT NULL)",
    *packs.SCHEMA,
)

_PUT_CURSOR = "INSERT OR REPLACE INTO cursor(id, topic, partition, channel, state) VALUES(?, ?, ?, ?, ?)"
_HAS_TABLE = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"

Statement = tuple[str, Sequence[Sequence[Any]]]


class CursorRow(msgspec.Struct, array_like=True):
    """The stored form of a channel's progress; ``done`` is a deflated string of one byte per message."""

    floor: int
    done: bytes = b""
    deferred: list[tuple[int, int]] = []
    attempts: list[tuple[int, int]] = []
    holes: list[tuple[int, int]] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(CursorRow).decode


@dataclass(slots=True)
class StoredCursor:
    """One channel of one partition as found at start.

    Attributes:
        aside_count: messages set aside.
        aside_next_due_ns: the earliest of their due times, None without any.
    """

    id: int
    topic: str
    partition: int
    channel: str
    row: CursorRow
    window: bytes
    aside_count: int
    aside_next_due_ns: int | None


@dataclass(slots=True)
class StoredTopics:
    """Everything found at start."""

    topics: dict[str, bool] = field(default_factory=dict)
    metas: dict[str, tuple[TopicMeta, list[int]]] = field(default_factory=dict)
    partitions: dict[tuple[str, int], tuple[int, int | None]] = field(default_factory=dict)
    channels: dict[tuple[str, str], bool] = field(default_factory=dict)
    skipped: dict[tuple[str, str], None] = field(default_factory=dict)
    settings: dict[tuple[str, str], Settings] = field(default_factory=dict)
    cursors: list[StoredCursor] = field(default_factory=list)
    next_pack: int = 1


class ChannelStore:
    """The database of one data directory.

    Raises:
        StorageError: it cannot be opened, or was written by a newer release.
    """

    def __init__(self, files: Files) -> None:
        try:
            self._database: Database = files.open_database(DATABASE_NAME)
            version = self._database.query("PRAGMA user_version")[0][0]
            statements: list[Statement] = [(sql, ((),)) for sql in _SCHEMA]
            if version < SCHEMA_VERSION:
                self._database.commit(statements, True)
                self._database.commit([(f"PRAGMA user_version = {SCHEMA_VERSION}", ((),))], True)
            if version <= SCHEMA_VERSION:
                pack_rows(self._database)
        except PermissionMissing:
            raise
        except StorageError as error:
            raise StorageError(
                f"cannot open {DATABASE_NAME}: {error}; restore it from a copy, or move it away: then messages stay, "
                "channels are gone, and the first new channel of a topic gets all that is stored"
            ) from error
        if version > SCHEMA_VERSION:
            raise StorageError(
                f"{DATABASE_NAME} has schema version {version}; this release knows {SCHEMA_VERSION}: "
                "start the release that wrote it, or one that is newer"
            )

    def load(self) -> StoredTopics:
        """Read everything but the frames set aside."""
        query = self._database.query
        # what ephemeral channels had set aside went with the process
        self._database.commit(
            [
                ("DELETE FROM aside_pack WHERE cursor NOT IN (SELECT id FROM cursor)", ((),)),
                ("DELETE FROM aside_done WHERE pack NOT IN (SELECT id FROM aside_pack)", ((),)),
            ],
            False,
        )
        stored = StoredTopics()
        stored.topics = {name: bool(paused) for name, paused in query("SELECT name, paused FROM topic")}
        stored.metas = {
            name: (decode_meta(meta), [int(number) for number in numbers.split(",") if number])
            for name, meta, numbers in query("SELECT name, meta, partitions FROM topic_meta")
        }
        stored.partitions = {
            (topic, partition): (backlog_start, paused_at)
            for topic, partition, backlog_start, paused_at in query(
                "SELECT topic, partition, backlog_start, paused_at FROM partition"
            )
        }
        stored.channels = {
            (topic, name): bool(paused) for topic, name, paused in query("SELECT topic, name, paused FROM channel")
        }
        if self._has_table("channel_skip"):
            rows = query("SELECT topic, name FROM channel_skip")
            stored.skipped = dict.fromkeys((topic, name) for topic, name in rows)
        if self._has_table("settings"):
            rows = query("SELECT topic, channel, json FROM settings")
            stored.settings = {(topic, channel): decode_settings(json) for topic, channel, json in rows}
        aside = packs.count_packed(query)
        stored.next_pack = (query("SELECT MAX(id) FROM aside_pack")[0][0] or 0) + 1
        for identity, topic, partition, channel, blob in query(
            "SELECT id, topic, partition, channel, state FROM cursor ORDER BY id"
        ):
            row = _decode(blob)
            count, due = aside.get(identity, (0, None))
            window = zlib.decompress(row.done) if row.done else b""
            stored.cursors.append(StoredCursor(identity, topic, partition, channel, row, window, count, due))
        return stored

    def commit(self, statements: Iterable[Statement], sync: bool) -> None:
        """Run one transaction; see :meth:`flintmq.storage.files.Database.commit`."""
        self._database.commit(statements, sync)

    def journal(self) -> bytes | None:
        """What :func:`put_journal` wrote last; None when there is nothing."""
        if not self._has_table("takeover"):
            return None
        rows = self._database.query("SELECT journal FROM takeover")
        return rows[0][0] if rows else None

    def _has_table(self, name: str) -> bool:
        return bool(self._database.query(_HAS_TABLE, (name,)))

    def due(self, cursor: int, after: tuple[int, int], until_ns: int, bytes_max: int) -> packs.DuePacks:
        """Packs of one cursor that begin to come due, see :func:`flintmq.storage.packs.due_packs`."""
        return packs.due_packs(self._database.query, cursor, after, until_ns, bytes_max)

    def aside_after(
        self, cursor: int, wall_ns: int, count_max: int, bytes_max: int
    ) -> list[tuple[int, int, int, bytes, int]]:
        """Messages set aside until after ``wall_ns``, the next one first, each with at most so much of its frame.

        Returns:
            ``(sequence, due_ns, attempts, start of the frame, size of the frame)``.
        """
        found = packs.packed_after(self._database.query, cursor, wall_ns, count_max)
        frames = [(sequence, piece, piece.frame(sequence)) for sequence, piece in found]
        return [(s, piece.due_ns, piece.attempts, frame[:bytes_max], len(frame)) for s, piece, frame in frames]

    def find_aside(self, cursor: int, sequence: int) -> int | None:
        """The number of the pack in which a message is set aside; None when it is not."""
        return packs.find_packed(self._database.query, cursor, sequence)

    def aside_count(self, cursor: int) -> int:
        """How many messages are set aside."""
        return packs.count_packed(self._database.query, cursor).get(cursor, (0, 0))[0]

    def close(self) -> None:
        """Close the database."""
        self._database.close()


def put_journal(journal: bytes | None) -> list[Statement]:
    """Remember how far the takeover of NSQ's files is, or that there is none."""
    statements: list[Statement] = [
        ("CREATE TABLE IF NOT EXISTS takeover(id INTEGER PRIMARY KEY, journal BLOB NOT NULL)", ((),)),
        ("DELETE FROM takeover", ((),)),
    ]
    if journal is not None:
        statements.append(("INSERT INTO takeover(id, journal) VALUES(1, ?)", ((journal,),)))
    return statements


def put_topic(name: str, paused: bool) -> Statement:
    """Create a topic or change its pause."""
    return "INSERT OR REPLACE INTO topic(name, paused) VALUES(?, ?)", ((name, int(paused)),)


def put_topic_meta(name: str, meta: TopicMeta, partitions: Iterable[int]) -> Statement:
    """Remember what a topic with partitions is, and which of them are held here."""
    numbers = ",".join(map(str, partitions))
    return (
        "INSERT OR REPLACE INTO topic_meta(name, meta, partitions) VALUES(?, ?, ?)",
        ((name, encode_meta(meta), numbers),),
    )


def put_partition(topic: str, partition: int, backlog_start: int, paused_at: int | None) -> Statement:
    """Remember where a partition's backlog for a first channel begins, and where a paused topic stopped."""
    return (
        "INSERT OR REPLACE INTO partition(topic, partition, backlog_start, paused_at) VALUES(?, ?, ?, ?)",
        ((topic, partition, backlog_start, paused_at),),
    )


def put_channel(topic: str, name: str, paused: bool) -> Statement:
    """Create a channel or change its pause."""
    return "INSERT OR REPLACE INTO channel(topic, name, paused) VALUES(?, ?, ?)", ((topic, name, int(paused)),)


def put_cursor(identity: int, topic: str, partition: int, channel: str, row: CursorRow, window: bytes) -> Statement:
    """Write a channel's progress; ``window`` is one byte per message from the floor on, 1 for done."""
    row.done = zlib.compress(window, 1) if window else b""
    return _PUT_CURSOR, ((identity, topic, partition, channel, _encode(row)),)


def delete_cursor(identity: int) -> list[Statement]:
    """Remove a cursor and everything set aside for it."""
    return [
        ("DELETE FROM aside_pack WHERE cursor = ?", ((identity,),)),
        ("DELETE FROM cursor WHERE id = ?", ((identity,),)),
    ]


def put_skip(topic: str, name: str, skipped: bool) -> list[Statement]:
    """Remember that a channel delivers nothing and finishes everything, or that it does so no longer."""
    change = "INSERT OR REPLACE INTO channel_skip(topic, name) VALUES(?, ?)"
    if not skipped:
        change = "DELETE FROM channel_skip WHERE topic = ? AND name = ?"
    create = "CREATE TABLE IF NOT EXISTS channel_skip(topic TEXT, name TEXT, PRIMARY KEY(topic, name)) WITHOUT ROWID"
    return [(create, ((),)), (change, ((topic, name),))]


def put_settings(topic: str, channel: str, settings: Settings | None) -> list[Statement]:
    """Remember what was set for a topic, or for its channel when that is not empty; None to forget it."""
    create = (
        "CREATE TABLE IF NOT EXISTS settings(topic TEXT, channel TEXT, json BLOB NOT NULL,"
        " PRIMARY KEY(topic, channel)) WITHOUT ROWID"
    )
    if settings is None:
        change, row = "DELETE FROM settings WHERE topic = ? AND channel = ?", (topic, channel)
        return [(create, ((),)), (change, (row,))]
    change = "INSERT OR REPLACE INTO settings(topic, channel, json) VALUES(?, ?, ?)"
    return [(create, ((),)), (change, ((topic, channel, encode_settings(settings)),))]


def delete_channel(topic: str, name: str) -> Statement:
    """Remove a channel's row."""
    return "DELETE FROM channel WHERE topic = ? AND name = ?", ((topic, name),)


def delete_topic(name: str) -> list[Statement]:
    """Remove a topic's own rows; its channels and cursors are removed one by one."""
    return [
        ("DELETE FROM topic WHERE name = ?", ((name,),)),
        ("DELETE FROM topic_meta WHERE name = ?", ((name,),)),
        ("DELETE FROM partition WHERE topic = ?", ((name,),)),
        ("DELETE FROM channel WHERE topic = ?", ((name,),)),
    ]
