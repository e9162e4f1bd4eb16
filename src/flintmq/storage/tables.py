"""The tables of channels.db.

Tables, each with ``crc`` as its last column (see rows.py)::

    state(id, version, identity, generation, commits)      one row: which directory this is, and how new
    topic(name, paused)
    topic_meta(name, meta, partitions)                     of a topic with partitions: JSON, and the numbers held here
    partition(topic, partition, backlog_start, paused_at)
    channel(topic, partition, name, cursor, paused, skipped)
    cursor(id, topic, partition, channel, aside_count, state)
    log(topic, partition, log_id, synced, written)         how far a log was
    settings(topic, channel, json)                         of topics (channel is empty) and channels, see settings.py
    takeover(id, journal)                                  one row while NSQ's files are being taken over
    damage(id, at_ns, report)                              what was found and is not acknowledged: JSON, see damage.py
    aside_pack, aside_data, aside_done                     messages set aside, see packs.py

and, in a database that has ever had a replica of a partition::

    replica(topic, partition, topic_number, log_id, epoch, history, rows_end, state, about)
    replica_progress(topic, partition, epoch, n, committed)

    topic_number  of the topic, drawn when it was created
    epoch         the highest that was noted
    history       msgpack of [[epoch, its first sequence], ...]
    rows_end      what other rows of the partition say beyond this sequence is not so any more; 0: all is
    state         0: it is held; 1: it is being removed; 2: it is being set aside
    about         msgpack of StoredAbout: what its leader last said of the topic
    n             of the leader's progress in that epoch, how much is in the other rows of the partition
    committed     every sequence below it is known to be on all replicas that count

    cursor        number of the cursor that a channel has in a partition; 0 when there is none yet
    skipped       whether everything is finished without being delivered
    aside_count   how many messages the packs of this cursor hold
    state         msgpack of CursorRow, done bits deflated
    synced        every sequence below it survives a power loss
    written       every sequence below it survives the end of the process

Rules of this file: definitions alone.

Source: docs/decisions/0003, docs/decisions/0011.
"""

from __future__ import annotations

from flintmq.storage import packs
from flintmq.storage.rows import Table

SCHEMA_VERSION = 4  # 1 had no topic_meta, 2 a row for each message set aside, 3 no checksums

_TEXT, _INTEGER, _BLOB = "TEXT NOT NULL", "INTEGER NOT NULL", "BLOB NOT NULL"
STATE = Table(
    "state",
    {
        "id": "INTEGER PRIMARY KEY",
        "version": _INTEGER,
        "identity": _INTEGER,
        "generation": _INTEGER,
        "commits": _INTEGER,
    },
    key=1,
)
TOPIC = Table("topic", {"name": _TEXT, "paused": _INTEGER}, key=1)
META = Table("topic_meta", {"name": _TEXT, "meta": _BLOB, "partitions": _TEXT}, key=1)
PARTITION = Table(
    "partition",
    {"topic": _TEXT, "partition": _INTEGER, "backlog_start": _INTEGER, "paused_at": "INTEGER"},
    key=2,
)
CHANNEL = Table(
    "channel",
    {
        "topic": _TEXT,
        "partition": _INTEGER,
        "name": _TEXT,
        "cursor": _INTEGER,
        "paused": _INTEGER,
        "skipped": _INTEGER,
    },
    key=3,
)
CURSOR = Table(
    "cursor",
    {
        "id": "INTEGER PRIMARY KEY",
        "topic": _TEXT,
        "partition": _INTEGER,
        "channel": _TEXT,
        "aside_count": _INTEGER,
        "state": _BLOB,
    },
    key=1,
)
LOG = Table(
    "log",
    {"topic": _TEXT, "partition": _INTEGER, "log_id": _INTEGER, "synced": _INTEGER, "written": _INTEGER},
    key=2,
)
SETTINGS = Table("settings", {"topic": _TEXT, "channel": _TEXT, "json": _BLOB}, key=2)
TAKEOVER = Table("takeover", {"id": "INTEGER PRIMARY KEY", "journal": _BLOB}, key=1)
DAMAGE = Table("damage", {"id": "INTEGER PRIMARY KEY", "at_ns": _INTEGER, "report": _BLOB}, key=1)
REPLICA = Table(
    "replica",
    {
        "topic": _TEXT,
        "partition": _INTEGER,
        "topic_number": _INTEGER,
        "log_id": _INTEGER,
        "epoch": _INTEGER,
        "history": _BLOB,
        "rows_end": _INTEGER,
        "state": _INTEGER,
        "about": _BLOB,
    },
    key=2,
    is_optional=True,
)
REPLICA_PROGRESS = Table(
    "replica_progress",
    {"topic": _TEXT, "partition": _INTEGER, "epoch": _INTEGER, "n": _INTEGER, "committed": _INTEGER},
    key=2,
    is_optional=True,
)
TABLES = (STATE, TOPIC, META, PARTITION, CHANNEL, CURSOR, LOG, SETTINGS, TAKEOVER, DAMAGE)
OPTIONAL_TABLES = (REPLICA, REPLICA_PROGRESS)
"""Tables that a database gets when it first needs them."""
SCHEMA = (*(table.create for table in TABLES), *packs.SCHEMA)
