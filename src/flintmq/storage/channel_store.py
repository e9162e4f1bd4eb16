"""The database of a data directory: topics, channels, how far each channel is, and the messages set aside.

The tables are in tables.py.

Rules of this file: statements are built here and run by whoever owns the worker thread; one :class:`ChannelStore`
is used by one thread at a time. Cursors and packs of one flush are one transaction, because a message leaves the
cursor exactly when it enters a pack.

Source: docs/decisions/0003, docs/decisions/0011.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from flintmq.errors import StorageError
from flintmq.limits import BATCH_SIZE_MAX, DISK_RESERVE_BYTES
from flintmq.settings import Settings, decode_settings, encode_settings
from flintmq.storage import packs
from flintmq.storage.channel_list import LIST_NAME, Note
from flintmq.storage.damage import Damage
from flintmq.storage.files import Database, DatabaseSnapshot, Files
from flintmq.storage.integrity import DATABASE_NAME as DATABASE_NAME
from flintmq.storage.integrity import LISTED, changes_of, open_checked
from flintmq.storage.rows import Statement as Statement
from flintmq.storage.rows import Table
from flintmq.storage.tables import (
    CHANNEL,
    CURSOR,
    DAMAGE,
    LOG,
    META,
    OPTIONAL_TABLES,
    PARTITION,
    REPLICA,
    REPLICA_PROGRESS,
    SCHEMA_VERSION,
    SETTINGS,
    STATE,
    TABLES,
    TAKEOVER,
    TOPIC,
)
from flintmq.topic_meta import TopicMeta, decode_meta, encode_meta

log = logging.getLogger(__name__)

_BEFORE_ALL_NS = -(1 << 63)
_UNUSED_BYTES = 16 * 1024 * 1024  # of the database that are given back, when they are half of it
_UNUSED_MIN_BYTES = 1024 * 1024  # that are given back when the disk is short of room
_GIVEN_BACK_BYTES = 8 * 1024 * 1024  # by one flush
_SHORT_BYTES = DISK_RESERVE_BYTES + BATCH_SIZE_MAX
_REMADE_BYTES = 16 * 1024 * 1024  # kept in a database that a start makes anew, so that it can become shorter
_TOLD_MAX = 100  # channels of which each is told of
UNKNOWN_COUNT = -1  # of messages set aside, until they are counted again


class _HeadersFrom(msgspec.Struct):
    """Fields beside those of a topic's meta, of this node alone."""

    headers_from: dict[int, int] = {}


_encode_headers_from = msgspec.json.Encoder().encode
_decode_headers_from = msgspec.json.Decoder(_HeadersFrom).decode


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
class StoredChannel:
    """A channel in one partition.

    Attributes:
        cursor: the number of its cursor; 0 when it has none yet and begins where the log does.
        skipped: whether everything is finished without being delivered.
    """

    cursor: int
    paused: bool = False
    skipped: bool = False


@dataclass(slots=True)
class StoredLog:
    """The end of a partition's log.

    Attributes:
        log_id: of the log that this is about.
        synced: every sequence below it survives a power loss.
        written: every sequence below it survives the end of the process.
    """

    log_id: int
    synced: int
    written: int


@dataclass(slots=True)
class StoredCursor:
    """One channel of one partition as found at start.

    Attributes:
        spilled_count: messages set aside.
        spilled_next_due_ns: the earliest of their due times, None without any.
        spilled_missing: how many more there should be.
        is_lost: whether its row is gone, so that nothing is known of how far it was.
    """

    id: int
    topic: str
    partition: int
    channel: str
    row: CursorRow
    window: bytes
    spilled_count: int
    spilled_next_due_ns: int | None
    spilled_missing: int = 0
    is_lost: bool = False


class StoredAbout(msgspec.Struct, array_like=True):
    """A topic as the leader of one of its partitions, a replicated one, last described it.

    Attributes:
        meta: as :func:`flintmq.topic_meta.encode_meta` has it.
        paused: whether the topic is.
        headers_from: the first message with headers, when the topic got them while it was there; else 0.
        settings: as :func:`flintmq.settings.encode_settings` has them, by channel; of the topic under an empty name.
        lost_from: of this node's copy, the first sequence that it had and lacks; 0: it lacks nothing.
        is_progress_lost: of this node's copy, it had more of the channels than it has.
        led_by: the latest epoch that this node's copy was told of, and the incarnation of the process that leads in it.
    """

    meta: bytes
    paused: bool = False
    headers_from: int = 0
    settings: dict[str, bytes] = {}
    lost_from: int = 0
    is_progress_lost: bool = False
    led_by: tuple[int, str] = (0, "")


decode_history = msgspec.msgpack.Decoder(list[tuple[int, int]]).decode
"""Read the history of a replica out of its row."""
_decode_about = msgspec.msgpack.Decoder(StoredAbout).decode


@dataclass(slots=True)
class StoredReplica:
    """A replica of a partition; see the columns of ``replica`` in tables.py.

    Attributes:
        progress: ``(epoch, n)``, (0, 0) for none; it is in a row of its own, as ``committed`` is.
    """

    topic_number: int
    log_id: int
    epoch: int
    history: list[tuple[int, int]]
    rows_end: int
    state: int
    about: StoredAbout
    progress: tuple[int, int] = (0, 0)
    committed: int = 0


@dataclass(slots=True)
class StoredTopics:
    """Everything found at start.

    Attributes:
        topics: and whether they are paused.
        metas: of topics with partitions, with the numbers held here.
        headers_from: topic and number -> first message with headers, of topics that got them while they were there.
        partitions: topic and number -> start of the backlog, and where a paused topic stopped.
        channels: topic, partition and name.
        next_cursor: the first number that no cursor has, and no messages set aside belong to.
        damage: what was found by earlier processes: number, wall time in ns, and the report as JSON.
        replicas: topic and number; what else there is of these partitions is of a replica.
        has_had_replicas: whether there is, or was, one.
        is_older: whether progress is missing that was there.
        is_behind: as that, or a power loss may have taken what was not synced.
        is_same_boot: whether the machine has not been started since, so that no power loss can have taken anything.
    """

    topics: dict[str, bool] = field(default_factory=dict)
    metas: dict[str, tuple[TopicMeta, list[int]]] = field(default_factory=dict)
    headers_from: dict[tuple[str, int], int] = field(default_factory=dict)
    partitions: dict[tuple[str, int], tuple[int, int | None]] = field(default_factory=dict)
    channels: dict[tuple[str, int, str], StoredChannel] = field(default_factory=dict)
    logs: dict[tuple[str, int], StoredLog] = field(default_factory=dict)
    settings: dict[tuple[str, str], Settings] = field(default_factory=dict)
    cursors: list[StoredCursor] = field(default_factory=list)
    next_pack: int = 1
    next_cursor: int = 1
    damage: list[tuple[int, int, bytes]] = field(default_factory=list)
    replicas: dict[tuple[str, int], StoredReplica] = field(default_factory=dict)
    has_had_replicas: bool = False
    is_older: bool = False
    is_behind: bool = False
    is_same_boot: bool = False


class ChannelStore:
    """The database of one data directory, and the list beside it.

    Args:
        identity: of a directory that has none yet; wall time in ns will do.
        accept_lost_channels: whether to go on when it is lost which channels there were.

    Raises:
        StorageError: it cannot be opened, was written by a newer release, or is damaged beyond repair.
    """

    def __init__(self, files: Files, identity: int = 1, accept_lost_channels: bool = False) -> None:
        self._files = files
        opened = open_checked(files, identity, accept_lost_channels)
        self._database: Database = opened.database
        self._list = opened.channel_list
        self._identity = opened.identity
        self._generation = opened.generation
        self._commits = opened.commits
        self._synced = opened.synced
        self._is_older = opened.is_older
        self._is_behind = opened.is_behind
        self._is_same_boot = opened.is_same_boot
        self._damages = opened.damages
        self._is_giving_back = False
        try:
            self._database.run_transaction(
                [("DELETE FROM state WHERE 0", ((),))], False
            )  # tells whether it may be written
        except BaseException:
            self.close()
            raise
        self._found: dict[str, list[tuple[Any, ...]]] | None = opened.rows  # until something is written
        self._make_shrinkable()

    def _make_shrinkable(self) -> None:
        """Let a database of an earlier release become shorter, if that is quick and there is room for a copy."""
        database = self._database
        try:
            if database.query("PRAGMA auto_vacuum")[0][0]:
                return
            kept = database.size_bytes() - database.unused_bytes()
            if kept <= _REMADE_BYTES and self._files.free_bytes() >= DISK_RESERVE_BYTES + 2 * kept:
                database.make_shrinkable()
        except (OSError, StorageError) as error:
            log.warning("%s: it cannot be made so that it becomes shorter: %s", DATABASE_NAME, error)

    def load(self) -> StoredTopics:
        """Read everything but the frames set aside."""
        found = self._found
        tables = (*TABLES, *OPTIONAL_TABLES)
        rows = {table.name: table.read(self._database.query)[0] for table in tables} if found is None else found
        stored = StoredTopics(is_older=self._is_older, is_behind=self._is_behind, is_same_boot=self._is_same_boot)
        stored.topics = {name: bool(paused) for name, paused in rows[TOPIC.name]}
        stored.headers_from = {
            (name, number): sequence
            for name, meta, _ in rows[META.name]
            for number, sequence in _decode_headers_from(meta).headers_from.items()
        }
        stored.metas = {
            name: (decode_meta(meta), [int(number) for number in numbers.split(",") if number])
            for name, meta, numbers in rows[META.name]
        }
        stored.partitions = {
            (topic, partition): (backlog_start, paused_at)
            for topic, partition, backlog_start, paused_at in rows[PARTITION.name]
        }
        stored.channels = {
            (topic, partition, name): StoredChannel(cursor, bool(paused), bool(skipped))
            for topic, partition, name, cursor, paused, skipped in rows[CHANNEL.name]
        }
        stored.logs = {(topic, partition): StoredLog(*rest) for topic, partition, *rest in rows[LOG.name]}
        stored.settings = {(topic, channel): decode_settings(json) for topic, channel, json in rows[SETTINGS.name]}
        stored.damage = [(number, at_ns, report) for number, at_ns, report in sorted(rows[DAMAGE.name])]
        names = self._database.query("SELECT name FROM sqlite_master WHERE type = 'table'", ())
        stored.has_had_replicas = (REPLICA.name,) in names
        for topic, number, *columns in rows[REPLICA.name]:
            topic_number, log_id, epoch, history, rows_end, state, about = columns
            stored.replicas[topic, number] = StoredReplica(
                topic_number, log_id, epoch, decode_history(history), rows_end, state, _decode_about(about)
            )
        for topic, number, epoch, n, committed in rows[REPLICA_PROGRESS.name]:
            replica = stored.replicas.get((topic, number))
            if replica is not None:
                replica.progress, replica.committed = (epoch, n), committed
        self._load_cursors(rows[CURSOR.name], stored)
        return stored

    def take_damages(self) -> list[Damage]:
        """Return what was found to be damaged so far, once."""
        damages, self._damages = self._damages, []
        return damages

    def _load_cursors(self, rows: list[tuple[Any, ...]], stored: StoredTopics) -> None:
        """Cursors with what is set aside for them; what belongs to no channel any more is removed."""
        query = self._database.query
        aside = packs.count_packed(query)
        stored.next_pack = (query("SELECT MAX(id) FROM aside_pack")[0][0] or 0) + 1
        owners = {channel.cursor: key for key, channel in stored.channels.items() if channel.cursor}
        for identity, topic, partition, channel, expected, blob in rows:
            if owners.get(identity) != (topic, partition, channel):
                continue
            row = _decode(blob)
            count, due = aside.get(identity, (0, None))
            window = zlib.decompress(row.done) if row.done else b""
            cursor = StoredCursor(identity, topic, partition, channel, row, window, count, due)
            cursor.spilled_missing = max(0, expected - count)
            stored.cursors.append(cursor)
            del owners[identity]
        self._tell_lost(owners.values())
        for identity, (topic, partition, channel) in owners.items():
            cursor = StoredCursor(
                identity, topic, partition, channel, CursorRow(1), b"", *aside.get(identity, (0, None))
            )
            cursor.is_lost = True
            stored.cursors.append(cursor)
        used = [cursor.id for cursor in stored.cursors]
        stored.next_cursor = max([*used, *(row[0] for row in rows), *aside], default=0) + 1
        unowned = sorted({*aside, *(row[0] for row in rows)}.difference(used))
        if unowned:
            # negative ones are of ephemeral channels, which went with the process
            lost = sum(aside[identity][0] for identity in unowned if identity > 0 and identity in aside)
            if lost and not self._is_behind:
                what = "messages that were set aside belong to no channel, and are removed"
                self._damages.append(Damage(DATABASE_NAME, what, lost=lost))
            self.run_transaction([statement for identity in unowned for statement in delete_cursor(identity)], False)

    def _tell_lost(self, channels: Collection[tuple[str, int, str]]) -> None:
        what = "how far it was is lost; it begins again with the oldest message that is stored"
        for topic, partition, channel in list(channels)[:_TOLD_MAX]:
            self._damages.append(
                Damage(DATABASE_NAME, what, topic=topic, partition=partition, channel=channel, is_more_possible=True)
            )
        if len(channels) > _TOLD_MAX:
            self._damages.append(Damage(DATABASE_NAME, f"the same of {len(channels) - _TOLD_MAX} more channels"))

    def run_transaction(self, statements: Iterable[Statement], sync: bool) -> None:
        """Run one transaction; see :meth:`flintmq.storage.files.Database.run_transaction`.

        What it changes of topics, channels and settings is written to the list before. Of much that is set aside and
        to be forgotten, most is forgotten before all else, a little at a time: at once it would need more room in the
        write-ahead log than a full disk has. So after a crash, or an error, some of it may be gone already.

        Raises:
            StorageError: nothing else of it was applied.
        """
        statements = list(statements)
        self._found = None
        self._forget_ahead(packs.cleared(statements))
        generation = self._generation
        changes = changes_of(statements)
        if changes:
            if self._list.wants_rewrite:
                self._rewrite_list()
            generation += 1
            self._generation = generation  # also if the rest fails: what is in the list has this number
            self._list.append(generation, changes)
        commits = self._commits + 1
        statements.append(STATE.put((1, SCHEMA_VERSION, self._identity, generation, commits)))
        if changes and sync:
            self._run_synced(statements)
        else:
            self._database.run_transaction(statements, sync)
        self._commits = commits
        if sync:
            self._synced = commits
        with suppress(StorageError):  # then the list is written anew before the next change
            self._list.note(commits, self._synced, generation)

    def _forget_ahead(self, cleared: Iterable[tuple[int, int]]) -> None:
        query = self._database.query
        at_once = 0.0
        for cursor, first in cleared:
            after = (_BEFORE_ALL_NS, 0)
            while True:
                found = packs.find_cleared(query, cursor, first, after)
                if found.is_rest and at_once + found.share <= 1.0:
                    at_once += found.share
                    break
                self._database.run_transaction(found.forget(), False)
                if found.is_rest:
                    break
                after = found.after

    def give_back(self, is_busy: bool = False) -> bool:
        """Give the disk back some of what the database needs no more; whether there is more to be given back. Blocks.

        Most of what was taken is kept for what comes next, unless it is much, or the disk is short of room.

        Args:
            is_busy: whether messages come due that are to be read: they wait for a sync only where the disk is short.

        Raises:
            StorageError: it cannot be written or read now; nothing is lost.
        """
        unused = self._database.unused_bytes()
        if unused < _UNUSED_MIN_BYTES:
            self._is_giving_back = False
            return False
        size = self._database.size_bytes()
        if is_busy or unused < (size // 8 if self._is_giving_back else max(size // 2, _UNUSED_BYTES)):
            try:
                is_short = self._files.free_bytes() < _SHORT_BYTES
            except OSError:
                is_short = False
            if not is_short:
                self._is_giving_back &= is_busy
                return self._is_giving_back
        self._is_giving_back = self._database.give_back(min(unused, _GIVEN_BACK_BYTES))
        return self._is_giving_back

    def _run_synced(self, statements: list[Statement]) -> None:
        """Run a transaction, and sync the list meanwhile: whoever waits for a new channel waits for both at once."""
        failures: list[StorageError] = []

        def run() -> None:
            try:
                self._database.run_transaction(statements, True)
            except StorageError as error:
                failures.append(error)

        list_error, _ = self._files.run_all([self._list.sync, run])
        if failures:
            raise failures[0]
        if list_error is not None:
            # the database has it, so it cannot be taken back; the list is written anew before the next change
            log.error("cannot sync %s: %s; it is written anew", LIST_NAME, list_error.strerror or list_error)

    def _rewrite_list(self) -> None:
        rows: dict[str, list[tuple[Any, Any]]] = {}
        for name, table in LISTED.items():
            found, _ = table.read(self._database.query)
            rows[name] = [(row[: table.key], row[table.key :]) for row in found]
        note = Note(self._commits, self._synced, self._generation, self._list.boot)
        try:
            self._list.rewrite(self._identity, self._generation, rows, note)
        except OSError as error:
            raise StorageError(f"cannot write {LIST_NAME}: {error.strerror or error}") from error

    def load_partition(self, topic: str, number: int) -> StoredTopics:
        """Read what there is of one partition, but the frames set aside, as :meth:`load` would.

        Raises:
            StorageError: it cannot be read, or something of it is damaged, which a start repairs.
        """
        key = (topic, number)
        stored = StoredTopics(is_same_boot=True)
        for _, _, name, cursor, paused, skipped in self._whole_rows(CHANNEL, "topic = ? AND partition = ?", key):
            stored.channels[topic, number, name] = StoredChannel(cursor, bool(paused), bool(skipped))
        for _, _, backlog_start, paused_at in self._whole_rows(PARTITION, "topic = ? AND partition = ?", key):
            stored.partitions[key] = backlog_start, paused_at
        for (_, _, name), channel in stored.channels.items():
            rows = self._whole_rows(CURSOR, "id = ?", (channel.cursor,)) if channel.cursor else []
            aside = packs.count_packed(self._database.query, channel.cursor).get(channel.cursor, (0, None))
            where = channel.cursor, topic, number, name
            for *_, expected, blob in rows:
                row = _decode(blob)
                window = zlib.decompress(row.done) if row.done else b""
                found = StoredCursor(*where, row, window, *aside)
                found.spilled_missing = max(0, expected - found.spilled_count)
                stored.cursors.append(found)
            if channel.cursor and not rows:
                lost = StoredCursor(*where, CursorRow(1), b"", *aside)
                lost.is_lost = True
                stored.cursors.append(lost)
        return stored

    def _whole_rows(self, table: Table, condition: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        rows = self._database.query(f"{table.select} WHERE {condition}", values)
        if not all(table.is_whole(row) for row in rows):
            raise StorageError(f"{DATABASE_NAME}: rows of table {table.name} are damaged; restart to have it repaired")
        return [row[:-1] for row in rows]

    def snapshot(self) -> DatabaseSnapshot:
        """Keep what is so now to be read later, see :meth:`flintmq.storage.files.Database.snapshot`."""
        return self._database.snapshot()

    def journal(self) -> bytes | None:
        """Read what :func:`put_journal` wrote last; None when there is nothing."""
        rows, _ = TAKEOVER.read(self._database.query)
        return rows[0][1] if rows else None

    def due(self, cursor: int, after: tuple[int, int], until_ns: int, bytes_max: int) -> packs.DuePacks:
        """Packs of one cursor that begin to come due, see :func:`flintmq.storage.packs.due_packs`."""
        return packs.due_packs(self._database.query, cursor, after, until_ns, bytes_max)

    def spilled_after(
        self, cursor: int, wall_ns: int, count_max: int, bytes_max: int
    ) -> list[tuple[int, int, int, bytes, int]]:
        """Messages set aside until after ``wall_ns``, the next one first, each with at most so much of its frame.

        Returns:
            ``(sequence, due_ns, attempts, start of the frame, size of the frame)``.
        """
        found = packs.packed_after(self._database.query, cursor, wall_ns, count_max)
        frames = [(sequence, piece, piece.frame(sequence)) for sequence, piece in found]
        return [(s, piece.due_ns, piece.attempts, frame[:bytes_max], len(frame)) for s, piece, frame in frames]

    def find_spilled(self, cursor: int, sequence: int) -> int | None:
        """The number of the pack in which a message is set aside; None when it is not."""
        return packs.find_packed(self._database.query, cursor, sequence)

    def spilled_count(self, cursor: int) -> int:
        """Count the spilled messages."""
        return packs.count_packed(self._database.query, cursor).get(cursor, (0, 0))[0]

    def close(self) -> None:
        """Close the database and the list."""
        self._list.close()
        self._database.close()


def put_journal(journal: bytes | None) -> list[Statement]:
    """Remember how far the takeover of NSQ's files is, or that there is none."""
    return [TAKEOVER.delete((1,)) if journal is None else TAKEOVER.put((1, journal))]


def put_topic(name: str, paused: bool) -> Statement:
    """Create a topic or change its pause."""
    return TOPIC.put((name, int(paused)))


def put_topic_meta(
    name: str, meta: TopicMeta, partitions: Iterable[int], headers_from: Mapping[int, int] | None = None
) -> Statement:
    """Remember what a topic with partitions is, and which of them are held here.

    Args:
        headers_from: of a topic that got headers while it was there: number of a partition -> first message with them.
    """
    encoded = encode_meta(meta)
    if headers_from:
        encoded = encoded[:-1] + b"," + _encode_headers_from(_HeadersFrom(dict(headers_from)))[1:]
    return META.put((name, encoded, ",".join(map(str, partitions))))


def put_partition(topic: str, partition: int, backlog_start: int, paused_at: int | None) -> Statement:
    """Remember where a partition's backlog for a first channel begins, and where a paused topic stopped."""
    return PARTITION.put((topic, partition, backlog_start, paused_at))


def put_channel(topic: str, partition: int, name: str, channel: StoredChannel) -> Statement:
    """Create a channel in a partition, or change what is known of it."""
    return CHANNEL.put((topic, partition, name, channel.cursor, int(channel.paused), int(channel.skipped)))


def put_cursor(
    identity: int, topic: str, partition: int, channel: str, row: CursorRow, window: bytes, spilled_count: int
) -> Statement:
    """Write a channel's progress.

    Args:
        window: one byte per message from the floor on, 1 for done.
        spilled_count: of messages that are set aside when this is written, or ``UNKNOWN_COUNT``.
    """
    row.done = zlib.compress(window, 1) if window else b""
    return CURSOR.put((identity, topic, partition, channel, spilled_count, _encode(row)))


def put_logs(logs: Iterable[tuple[str, int, StoredLog]]) -> Statement:
    """Remember how far logs are: topic, partition, and how far."""
    return LOG.put(*((topic, number, log.log_id, log.synced, log.written) for topic, number, log in logs))


def delete_cursor(identity: int) -> list[Statement]:
    """Remove a cursor and everything set aside for it."""
    return [*packs.clear_all(identity), CURSOR.delete((identity,))]


def move_packs(identity: int, to: int) -> Statement:
    """Give everything set aside for one cursor to another."""
    return packs.move_packs(identity, to)


def create_replica_tables() -> list[Statement]:
    """Make the tables of replicas, if this database has none yet."""
    return [(table.create, ((),)) for table in OPTIONAL_TABLES]


def put_replica(topic: str, partition: int, replica: StoredReplica) -> Statement:
    """Remember a replica, but for how far its progress is; the tables are there, see :func:`create_replica_tables`."""
    history, about = _encode(replica.history), _encode(replica.about)
    columns = replica.topic_number, replica.log_id, replica.epoch, history, replica.rows_end, replica.state, about
    return REPLICA.put((topic, partition, *columns))


def put_replica_progress(topic: str, partition: int, progress: tuple[int, int], committed: int) -> Statement:
    """Remember how much of its leader's progress a replica has."""
    return REPLICA_PROGRESS.put((topic, partition, *progress, committed))


def delete_partition(topic: str, partition: int) -> Statement:
    """Forget where a partition's backlog begins."""
    return PARTITION.delete((topic, partition))


def delete_replica(topic: str, partition: int) -> list[Statement]:
    """Remove the rows of a replica but those of its channels and cursors, which are removed one by one."""
    key = (topic, partition)
    return [REPLICA.delete(key), REPLICA_PROGRESS.delete(key), PARTITION.delete(key), LOG.delete(key)]


def delete_replica_row(topic: str, partition: int) -> list[Statement]:
    """Let a partition be this node's alone from now on, with all its other rows."""
    return [REPLICA.delete((topic, partition)), REPLICA_PROGRESS.delete((topic, partition))]


def put_settings(topic: str, channel: str, settings: Settings | None) -> list[Statement]:
    """Remember what was set for a topic, or for its channel when that is not empty; None to forget it."""
    if settings is None:
        return [SETTINGS.delete((topic, channel))]
    return [SETTINGS.put((topic, channel, encode_settings(settings)))]


def put_damage(reports: Iterable[tuple[int, int, bytes]]) -> Statement:
    """Remember reports of damage: number, wall time in ns, JSON."""
    return DAMAGE.put(*reports)


def delete_damage(number: int) -> Statement:
    """Forget one report of damage."""
    return DAMAGE.delete((number,))


def delete_channel(topic: str, partition: int, name: str) -> Statement:
    """Remove a channel from a partition; its cursor is removed by itself."""
    return CHANNEL.delete((topic, partition, name))


def delete_own_rows(name: str) -> list[Statement]:
    """Remove what a topic has beside its partitions, which go on as replicas."""
    return [TOPIC.delete((name,)), META.delete((name,))]


def delete_topic(name: str) -> list[Statement]:
    """Remove a topic's own rows; its channels and cursors are removed one by one."""
    return [
        TOPIC.delete((name,)),
        META.delete((name,)),
        ("DELETE FROM partition WHERE topic = ?", ((name,),)),
        ("DELETE FROM log WHERE topic = ?", ((name,),)),
    ]
