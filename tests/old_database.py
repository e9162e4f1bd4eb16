"""Databases as earlier releases wrote them, made of one that this release wrote."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from flintmq.storage.packs import decode_pack

_SCHEMA = """
CREATE TABLE topic(name TEXT PRIMARY KEY, paused INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE topic_meta(name TEXT PRIMARY KEY, meta BLOB NOT NULL, partitions TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE partition(topic TEXT, partition INTEGER, backlog_start INTEGER NOT NULL, paused_at INTEGER,
    PRIMARY KEY(topic, partition)) WITHOUT ROWID;
CREATE TABLE channel(topic TEXT, name TEXT, paused INTEGER NOT NULL, PRIMARY KEY(topic, name)) WITHOUT ROWID;
CREATE TABLE channel_skip(topic TEXT, name TEXT, PRIMARY KEY(topic, name)) WITHOUT ROWID;
CREATE TABLE cursor(id INTEGER PRIMARY KEY, topic TEXT NOT NULL, partition INTEGER NOT NULL, channel TEXT NOT NULL,
    state BLOB NOT NULL);
CREATE TABLE settings(topic TEXT, channel TEXT, json BLOB NOT NULL, PRIMARY KEY(topic, channel)) WITHOUT ROWID;
"""
_PACKS = """
CREATE TABLE aside_pack(id INTEGER PRIMARY KEY, cursor INTEGER NOT NULL, due_ns INTEGER NOT NULL,
    last_due_ns INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL, cut INTEGER NOT NULL,
    count INTEGER NOT NULL, size INTEGER NOT NULL);
CREATE INDEX aside_pack_due ON aside_pack(cursor, due_ns, id, last_due_ns);
CREATE TABLE aside_data(id INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE aside_done(id INTEGER PRIMARY KEY, pack INTEGER NOT NULL, sequences BLOB NOT NULL);
CREATE INDEX aside_done_pack ON aside_done(pack);
CREATE TRIGGER aside_pack_gone AFTER DELETE ON aside_pack BEGIN
    DELETE FROM aside_data WHERE id = OLD.id; DELETE FROM aside_done WHERE pack = OLD.id; END;
"""
_ROWS = """
CREATE TABLE aside(cursor INTEGER, sequence INTEGER, due_ns INTEGER NOT NULL, attempts INTEGER NOT NULL,
    frame BLOB NOT NULL, PRIMARY KEY(cursor, sequence)) WITHOUT ROWID;
CREATE INDEX aside_due ON aside(cursor, due_ns, sequence);
"""
_COPIED = {
    "topic": "SELECT name, paused FROM now.topic",
    "topic_meta": "SELECT name, meta, partitions FROM now.topic_meta",
    "partition": "SELECT topic, partition, backlog_start, paused_at FROM now.partition",
    "channel": "SELECT topic, name, MIN(paused) FROM now.channel GROUP BY topic, name",
    "channel_skip": "SELECT DISTINCT topic, name FROM now.channel WHERE skipped",
    "cursor": "SELECT id, topic, partition, channel, state FROM now.cursor",
    "settings": "SELECT topic, channel, json FROM now.settings",
}
_COPIED_PACKS = {
    "aside_pack": "SELECT id, cursor, due_ns, last_due_ns, first, last, cut, count, size FROM now.aside_pack",
    "aside_data": "SELECT id, data FROM now.aside_data",
    "aside_done": "SELECT NULL, pack, sequences FROM now.aside_done",
}


def make_older(data_path: Path, version: int) -> None:
    """Let the database of a stopped nsqd be one of schema version 1, 2 or 3, and remove what is newer beside it."""
    path = data_path / "channels.db"
    now = data_path / "now.db"
    path.rename(now)
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.executescript(_SCHEMA + (_PACKS if version == 3 else _ROWS))
    database.execute("ATTACH ? AS now", (str(now),))
    for table, select in (_COPIED | (_COPIED_PACKS if version == 3 else {})).items():
        database.execute(f"INSERT INTO {table} {select}")
    if version < 3:
        _copy_rows(database)
    if version < 2:
        database.execute("DROP TABLE topic_meta")
    database.execute("DETACH now")
    database.execute(f"PRAGMA user_version = {version}")
    database.close()
    now.unlink()
    (data_path / "channels.list").unlink(missing_ok=True)


def _copy_rows(database: sqlite3.Connection) -> None:
    sql = "SELECT p.cursor, p.due_ns, d.data FROM now.aside_pack p JOIN now.aside_data d ON d.id = p.id"
    for cursor, due_ns, data in database.execute(sql).fetchall():
        for piece in decode_pack(data, due_ns).pieces:
            database.executemany(
                "INSERT INTO aside VALUES(?, ?, ?, ?, ?)",
                [(cursor, sequence, piece.due_ns, piece.attempts, frame) for sequence, frame in piece.messages()],
            )
