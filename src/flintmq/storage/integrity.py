"""Opening channels.db so that nothing is missing from it unnoticed: each row is checked, and all against channels.list.

What is compared, and what it means:

- rows whose checksum is wrong, and what SQLite finds by itself: the database is damaged;
- the number of the last transaction (``commits``) is noted in the list behind each of them: a database that has had
  fewer is an older state of itself, because its write-ahead log was cut, damaged or removed, or a copy was put there;
- each change of topics, channels and settings is in the list before it is in the database (``generation``).

What is done about it:

========================  ============================================================================================
the database is           then
========================  ============================================================================================
a change behind           that is what a kill between the two leaves; nobody was promised that change, it is forgotten
older                     topics, channels and settings are taken from the list; progress is older, so messages come
                          again
damaged or gone           a new one is made of what is whole, with topics, channels and settings from the list; the
                          damaged one is kept as ``channels.db.<n>.bad``
whole, and the list not   the list is written anew; no damage when a power loss has taken its last record, which is
                          synced while the database is
========================  ============================================================================================

When both are damaged there is nothing to tell which channels there were: it is refused, unless the caller insists; then
every channel is taken that either of them names.

Rules of this file: nothing is removed that could be looked at later; a power loss at any point leaves something that
the next start goes on with; what the database may be behind after a power loss, because of the policy, is no damage.

Source: docs/decisions/0011, docs/decisions/0003.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from flintmq.errors import DamagedDatabase, PermissionMissing, StorageError
from flintmq.storage import packs
from flintmq.storage.channel_list import LIST_NAME, Change, ChannelList, LoadedList, Note, boot_of
from flintmq.storage.damage import Damage
from flintmq.storage.files import Database, Files, replace_file
from flintmq.storage.old_schema import migration
from flintmq.storage.rows import Statement, Table
from flintmq.storage.tables import (
    CHANNEL,
    LOG,
    META,
    OPTIONAL_TABLES,
    REPLICA,
    SCHEMA,
    SCHEMA_VERSION,
    SETTINGS,
    STATE,
    TABLES,
    TOPIC,
)

DATABASE_NAME = "channels.db"
LISTED = {table.name: table for table in (TOPIC, META, CHANNEL, SETTINGS, REPLICA)}
TOPICS_DIRECTORY = "topics"
RESTORING_DIRECTORY = "restoring"
"""The directory in which ``flintmq restore`` has the database until everything else is in its place."""
_REBUILDING, _REBUILT = f"{DATABASE_NAME}.rebuilding", f"{DATABASE_NAME}.rebuilt"
_CHECKED = (*TABLES, packs.PACKS, packs.DONE, *OPTIONAL_TABLES)
_CHECK_BYTES_MAX = 64 * 1024 * 1024  # of a database of which SQLite is asked to check all pages
_COPIED_BYTES_MAX = 64 * 1024 * 1024  # of a write-ahead log that is kept
_PUTS = {table.insert: table for table in LISTED.values()}
_DELETES = {table.remove: table for table in LISTED.values()}
_REMEDY = (
    f"restore {DATABASE_NAME} or {LIST_NAME} from a copy; or start once with --accept-lost-channels: then the channels "
    "that either of the two still names begin again with the oldest message that is stored, and others are gone"
)

Rows = dict[str, dict[tuple[Any, ...], tuple[Any, ...]]]


def changes_of(statements: Iterable[Statement]) -> list[Change]:
    """Find what statements change in the tables that are listed."""
    changes: list[Change] = []
    for sql, rows in statements:
        table = _PUTS.get(sql)
        if table is not None:
            key = table.key
            changes += [(table.name, row[:key], row[key:-1]) for row in rows]
        elif sql in _DELETES:
            name = _DELETES[sql].name
            changes += [(name, key, None) for key in rows]
    return changes


@dataclass(slots=True)
class Opened:
    """A database that can be worked with.

    Attributes:
        rows: of each table, all of them whole, by key; of ``aside_done`` none.
        identity, generation, commits: see tables.py.
        synced: how many of the commits are known to survive a power loss.
        damages: what was found.
        is_older: whether progress is missing from it that it has had.
        is_behind: as that, or a power loss may have taken what was not synced.
        is_same_boot: whether the machine has not been started since the last transaction.
    """

    database: Database
    channel_list: ChannelList
    rows: dict[str, list[tuple[Any, ...]]]
    identity: int
    generation: int
    commits: int
    synced: int
    damages: list[Damage]
    is_older: bool
    is_behind: bool
    is_same_boot: bool


@dataclass(slots=True)
class _Contents:
    """The readable part of a database.

    Attributes:
        state: its one row; None when it is not whole.
        bad: how many rows of a table are not whole, where there are some.
        reason: what else is wrong; empty when nothing is.
    """

    rows: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)
    state: tuple[int, ...] | None = None
    bad: dict[str, int] = field(default_factory=dict)
    reason: str = ""

    @property
    def is_whole(self) -> bool:
        return not self.reason and not self.bad and self.state is not None

    @property
    def knows_channels(self) -> bool:
        """Whether topics, channels and settings are all there."""
        return not self.reason and self.state is not None and not any(name in LISTED for name in self.bad)

    @property
    def text(self) -> str:
        if self.reason:
            return self.reason
        counts = ", ".join(f"{count} of table {name}" for name, count in self.bad.items())
        return f"rows are damaged: {counts}" if counts else "the row that says how new it is is missing"


def open_checked(files: Files, new_identity: int, is_forced: bool) -> Opened:
    """Open the database, repaired where that is needed. Blocks.

    Args:
        new_identity: of a directory that has none yet.
        is_forced: whether to go on when it is lost which channels there were.

    Raises:
        StorageError: it cannot be opened, or cannot be repaired with certainty.
    """
    return _Opening(files, new_identity, is_forced).open()


class _Opening:
    def __init__(self, files: Files, new_identity: int, is_forced: bool) -> None:
        self._files = files
        self._new_identity = new_identity
        self._is_forced = is_forced
        self._boot = boot_of(files)
        self._list = ChannelList(files)
        self._database: Database | None = None
        self._damages: list[Damage] = []
        self._is_older = self._is_behind = self._is_same_boot = self._is_list_exact = False

    def open(self) -> Opened:
        try:
            self._finish_swap()
            loaded = self._list.load()
        except PermissionError as error:
            raise StorageError(
                f"cannot open {LIST_NAME}: {error}; give this user the right to read and write it"
            ) from error
        except OSError as error:
            raise StorageError(f"cannot open {LIST_NAME}: {error.strerror or error}") from error
        try:
            return self._open(loaded)
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        self._list.close()
        if self._database is not None:
            self._database.close()

    def _open(self, loaded: LoadedList | None) -> Opened:
        has_database = DATABASE_NAME in self._files.list("")
        if loaded is None and not has_database and not self._is_forced and RESTORING_DIRECTORY in self._files.list(""):
            raise StorageError(
                f"flintmq restore was interrupted here: {RESTORING_DIRECTORY}/ has what it had not completed; remove "
                "the whole data directory, and restore again"
            )
        if has_database:
            contents = self._read(loaded)
        elif loaded is not None:
            contents = _Contents(reason="it is missing")
        elif self._has_logs():
            self._refuse(f"{DATABASE_NAME} and {LIST_NAME} are both missing, and {TOPICS_DIRECTORY}/ has messages")
            contents = _Contents(reason=f"it is missing, and so is {LIST_NAME}")
        else:
            contents = self._read(loaded)
        self._check_identity(contents, loaded)
        self._look_for_older(contents, loaded)
        is_list_good = loaded is not None and self._is_list_good(contents, loaded)
        if not contents.knows_channels and not is_list_good:
            if loaded is not None or contents.state is not None or contents.reason:
                self._refuse(f"{DATABASE_NAME}: {contents.text}; and {self._list_text(loaded)}")
        if contents.is_whole:
            return self._go_on(contents, loaded, is_list_good)
        return self._rebuild(contents, loaded, is_list_good)

    def _refuse(self, what: str) -> None:
        if not self._is_forced:
            raise StorageError(f"cannot tell which channels there were: {what}; {_REMEDY}")

    def _has_logs(self) -> bool:
        topics = self._files.list(TOPICS_DIRECTORY)
        return any(
            name.endswith(".log")
            for topic in topics
            if topic.startswith("t-")
            for part in self._files.list(f"{TOPICS_DIRECTORY}/{topic}")
            for name in self._files.list(f"{TOPICS_DIRECTORY}/{topic}/{part}")
        )

    # -- looking -----------------------------------------------------------------------------------------------------

    def _read(self, loaded: LoadedList | None) -> _Contents:
        contents = _Contents()
        try:
            self._database = self._files.open_database(DATABASE_NAME)
            query = self._database.query
            tables = [name for (name,) in query("SELECT name FROM sqlite_master WHERE type = 'table'")]
            ((version,),) = query("PRAGMA user_version")
            if STATE.name not in tables:
                if loaded is not None or (version == 0 and self._has_logs()):
                    contents.reason = "its tables are missing"
                    return contents
                if version < SCHEMA_VERSION:
                    self._migrate(self._database)
                    version = SCHEMA_VERSION
            contents.state = self._state(version)
            pages = query("PRAGMA page_count")[0][0] * query("PRAGMA page_size")[0][0]
            if pages <= _CHECK_BYTES_MAX:
                found = query("PRAGMA integrity_check(1)")[0][0]
                if found != "ok":
                    contents.reason = f"SQLite finds it damaged: {' '.join(str(found).split())}"
            elif not self._is_index_whole(self._database):
                contents.reason = "an index does not fit its table"
        except DamagedDatabase as error:
            contents.reason = f"SQLite finds it damaged: {error}"
        except PermissionMissing:
            raise
        except StorageError as error:
            raise StorageError(f"cannot open {DATABASE_NAME}: {error}") from error
        self._read_tables(contents)
        return contents

    def _state(self, version: int) -> tuple[int, ...] | None:
        assert self._database is not None, "it was opened"
        rows, _ = STATE.read(self._database.query)
        if not rows:
            return None
        state = rows[0]
        if state[1] > SCHEMA_VERSION:
            raise StorageError(
                f"it has schema version {state[1]}; this release knows {SCHEMA_VERSION}: start the release that "
                "wrote it, or one that is newer"
            )
        if version != state[1]:
            raise DamagedDatabase(f"its header says schema version {version}, and it has {state[1]}")
        return state

    @staticmethod
    def _is_index_whole(database: Database) -> bool:
        """Whether messages set aside would be found when they come due."""
        columns = "cursor, due_ns, id, last_due_ns FROM aside_pack"
        indexed = database.query(f"SELECT {columns} INDEXED BY aside_pack_due ORDER BY cursor, due_ns, id")
        return sorted(database.query(f"SELECT {columns} NOT INDEXED")) == indexed

    def _migrate(self, database: Database) -> None:
        statements = [STATE.put((1, SCHEMA_VERSION, self._new_identity, 0, 0))]
        database.run_transaction(_chain(migration(database), statements), True)

    def _read_tables(self, contents: _Contents) -> None:
        if self._database is None:
            return
        for table in _CHECKED:
            try:
                rows, bad = table.read(self._database.query)
            except StorageError as error:
                contents.reason = contents.reason or f"SQLite finds it damaged: {error}"
                rows, bad = _salvaged(self._database, table), 0
            contents.rows[table.name] = rows
            if bad:
                contents.bad[table.name] = bad

    def _check_identity(self, contents: _Contents, loaded: LoadedList | None) -> None:
        if contents.state is None or loaded is None or loaded.identity is None:
            return
        if contents.state[2] != loaded.identity:
            raise StorageError(
                f"{DATABASE_NAME} and {LIST_NAME} are of two different data directories: put the right one back, or "
                "move the wrong one away and start again"
            )

    def _look_for_older(self, contents: _Contents, loaded: LoadedList | None) -> None:
        note = None if loaded is None else loaded.note
        self._is_same_boot = note is not None and note.boot == self._boot and any(note.boot)
        if note is None or contents.state is None:
            return
        commits = contents.state[4]
        self._is_behind = note.commits > commits
        self._is_older = self._is_behind and (self._is_same_boot or note.synced > commits)
        if self._is_older:
            kept = self._keep_wal()
            self._damages.append(
                Damage(
                    DATABASE_NAME,
                    f"it is an older state of itself: {note.commits - commits} transactions that it had are missing, "
                    f"its write-ahead log was damaged, cut or removed, or an old copy was put there{kept}; topics and "
                    f"channels are taken from {LIST_NAME}, and messages finished since then come again",
                )
            )

    def _keep_wal(self) -> str:
        """Copy the write-ahead log, which SQLite is going to write over."""
        name = f"{DATABASE_NAME}-wal"
        if name not in self._files.list(""):
            return ""
        with suppress(OSError):
            file = self._files.open(name)
            try:
                size = file.size()
                data = file.read_at(0, size) if 0 < size <= _COPIED_BYTES_MAX else b""
            finally:
                file.close()
            if data:
                target = self._bad_name(name)
                replace_file(self._files, target, data)
                return f" (that log is kept as {target})"
        return ""

    def _bad_name(self, name: str) -> str:
        names = self._files.list("")
        number = 1
        while f"{name}.{number}.bad" in names:
            number += 1
        return f"{name}.{number}.bad"

    def _is_list_good(self, contents: _Contents, loaded: LoadedList) -> bool:
        """Whether all is in it that the database can have; not how it ends, which is what a kill may have left."""
        if loaded.identity is None:
            return False
        known = [0 if loaded.note is None else loaded.note.generation, contents.state[3] if contents.state else 0]
        if loaded.bad_position is not None and loaded.note is None:
            return False
        return loaded.generation >= max(known)

    def _list_text(self, loaded: LoadedList | None) -> str:
        if loaded is None:
            return f"{LIST_NAME} is missing"
        if loaded.identity is None:
            return f"the header of {LIST_NAME} is damaged"
        if loaded.bad_position is not None:
            return f"{LIST_NAME} is damaged at byte {loaded.bad_position}"
        return f"{LIST_NAME} is an older state of itself, or was cut"

    # -- whole -------------------------------------------------------------------------------------------------------

    def _go_on(self, contents: _Contents, loaded: LoadedList | None, is_list_good: bool) -> Opened:
        assert contents.state is not None and self._database is not None, "it is whole"
        _, version, identity, generation, commits = contents.state
        note = None if loaded is None else loaded.note
        is_same = False
        if loaded is not None and is_list_good:
            generation = self._follow_list(contents, loaded, generation)
            is_same = self._is_list_exact and not self._list.wants_rewrite
        elif generation or loaded is not None:
            if self._is_older:
                self._refuse(f"{DATABASE_NAME} is an older state of itself, and {self._list_text(loaded)}")
            if not self._is_explained(loaded, generation):
                what = f"{self._list_text(loaded)}; it is written anew from {DATABASE_NAME}, no message is affected"
                self._damages.append(Damage(LIST_NAME, what))
        synced = min(commits, note.synced) if note is not None else 0
        if self._is_behind:
            assert note is not None, "that is how it was seen"
            commits = note.commits + 1  # so that it is not behind any more
            generation = max(generation, note.generation)
            self._database.run_transaction([STATE.put((1, version, identity, generation, commits))], True)
            synced = commits
        if is_same and not self._damages:
            return self._as_it_is(contents.rows, identity, generation, commits, synced)
        return self._opened(contents.rows, identity, max(generation, 1), commits, synced)

    def _is_explained(self, loaded: LoadedList | None, generation: int) -> bool:
        """Whether a power loss may have taken the end of the list: what the policy does not sync, or the last record.

        Args:
            generation: of the database, which is synced while the list is.
        """
        note = None if loaded is None else loaded.note
        if note is None or loaded is None or loaded.identity is None:
            return False
        is_last = loaded.generation == generation - 1 and note.generation < generation
        return note.boot != self._boot and (note.synced < note.commits or is_last)

    def _follow_list(self, contents: _Contents, loaded: LoadedList, generation: int) -> int:
        assert self._database is not None, "it is whole"
        # what the list has beyond what was noted never was in the database
        until = max(generation, loaded.note.generation if loaded.note is not None else loaded.generation)
        listed = loaded.rows(until)
        statements: list[Statement] = []
        missing: list[str] = []
        for name, table in LISTED.items():
            mine = {row[: table.key]: row[table.key :] for row in contents.rows[name]}
            theirs = listed.get(name, {})
            wanted = [(*key, *rest) for key, rest in theirs.items() if mine.get(key) != rest]
            if wanted:
                if table.is_optional:
                    statements.append((table.create, ((),)))
                statements.append(table.put(*wanted))
                missing += [f"{name} {' '.join(map(str, row[: table.key]))}" for row in wanted]
            gone = [key for key in mine if key not in theirs]
            if gone and until > generation:
                statements.append(table.delete(*gone))
                missing += [f"{name} {' '.join(map(str, key))} (removed)" for key in gone]
            elif gone:
                self._damages.append(
                    Damage(LIST_NAME, f"{len(gone)} rows of table {name} are missing; they are in {DATABASE_NAME}")
                )
        self._is_list_exact = loaded.generation == until  # else what it has beyond would be believed one day
        if statements:
            self._database.run_transaction(statements, True)
            for name, table in LISTED.items():
                contents.rows[name] = table.read(self._database.query)[0]
        if missing and not (self._is_behind and not self._is_older):
            shown = ", ".join(missing[:10]) + (", ..." if len(missing) > 10 else "")
            what = f"{len(missing)} rows were missing or old, and are as {LIST_NAME} has them now: {shown}"
            self._damages.append(Damage(DATABASE_NAME, what))
        return max(generation, loaded.generation)

    def _opened(
        self, rows: dict[str, list[tuple[Any, ...]]], identity: int, generation: int, commits: int, synced: int
    ) -> Opened:
        """Write the list anew."""
        listed = {name: [(row[: table.key], row[table.key :]) for row in rows[name]] for name, table in LISTED.items()}
        try:
            self._list.rewrite(identity, generation, listed, Note(commits, synced, generation, self._boot))
        except OSError as error:
            raise StorageError(f"cannot write {LIST_NAME}: {error.strerror or error}") from error
        return self._as_it_is(rows, identity, generation, commits, synced)

    def _as_it_is(
        self, rows: dict[str, list[tuple[Any, ...]]], identity: int, generation: int, commits: int, synced: int
    ) -> Opened:
        assert self._database is not None, "it was opened or made"
        return Opened(
            self._database,
            self._list,
            rows,
            identity,
            generation,
            commits,
            synced,
            self._damages,
            self._is_older,
            self._is_behind,
            self._is_same_boot,
        )

    # -- not whole ---------------------------------------------------------------------------------------------------

    def _rebuild(self, contents: _Contents, loaded: LoadedList | None, is_list_good: bool) -> Opened:
        rows = {table.name: contents.rows.get(table.name, []) for table in _CHECKED}
        state = contents.state or (1, SCHEMA_VERSION, 0, 0, 0)
        identity = loaded.identity if loaded is not None and loaded.identity is not None else state[2]
        generation, commits = state[3], state[4]
        if loaded is not None:
            generation = max(generation, loaded.generation)
            commits = max(commits, loaded.note.commits if loaded.note is not None else 0)
            note = loaded.note
            until = None if note is None or not is_list_good else max(state[3], note.generation)
            listed = loaded.rows(until)
            for name, table in LISTED.items():
                theirs = dict(listed.get(name, {}))
                if not is_list_good:  # whatever either of the two has
                    theirs = {row[: table.key]: row[table.key :] for row in rows[name]} | theirs
                    if contents.knows_channels:
                        theirs = {row[: table.key]: row[table.key :] for row in rows[name]}
                rows[name] = [(*key, *rest) for key, rest in theirs.items()]
        if not is_list_good and loaded is not None:
            self._damages.append(Damage(LIST_NAME, f"{self._list_text(loaded)}; it is written anew"))
        identity = identity or self._new_identity
        rows[STATE.name] = [(1, SCHEMA_VERSION, identity, max(generation, 1), commits + 1)]
        had_database = DATABASE_NAME in self._files.list("")
        kept = f"; the damaged one is kept as {self._bad_name(DATABASE_NAME)}" if had_database else ""
        source = f"of what is whole and of {LIST_NAME}" if had_database or loaded is not None else "without channels"
        self._write_rebuilt(rows)
        self._damages.append(
            Damage(
                DATABASE_NAME,
                f"{contents.text}; it is made anew {source}{kept}",
                # how far logs were is not known either, so nothing missing at their ends would be noticed
                is_more_possible=bool(contents.reason) or LOG.name in contents.bad,
            )
        )
        self._is_older = self._is_behind = True  # progress that was in damaged rows is missing from it
        return self._opened(rows, identity, max(generation, 1), commits + 1, 0)

    def _write_rebuilt(self, rows: dict[str, list[tuple[Any, ...]]]) -> None:
        files, old = self._files, self._database
        try:
            for suffix in ("", "-wal", "-shm", "-journal"):
                files.remove(f"{_REBUILDING}{suffix}")
            new = files.open_database(_REBUILDING)
            try:
                new.run_transaction(_statements(rows, old), True)
            finally:
                new.close()
            if old is not None:
                old.close()
                self._database = None
            files.rename(_REBUILDING, _REBUILT)
            files.sync_directory("")
            self._finish_swap()
        except OSError as error:
            raise StorageError(f"cannot make {DATABASE_NAME} anew: {error}") from error
        self._database = files.open_database(DATABASE_NAME)

    def _finish_swap(self) -> None:
        """Put a database that was made anew in the place of the damaged one; goes on where a crash has left it."""
        files = self._files
        names = files.list("")
        if _REBUILT not in names:
            return
        for suffix in ("", "-wal"):
            if f"{DATABASE_NAME}{suffix}" in names:
                files.rename(f"{DATABASE_NAME}{suffix}", self._bad_name(f"{DATABASE_NAME}{suffix}"))
        files.remove(f"{DATABASE_NAME}-shm")
        files.rename(_REBUILT, DATABASE_NAME)
        files.sync_directory("")


def _chain(*parts: Iterable[Statement]) -> Iterator[Statement]:
    for part in parts:
        yield from part


def _salvaged(database: Database, table: Table) -> list[tuple[Any, ...]]:
    """As many rows as can be read from either end of a table that is damaged somewhere."""
    found: dict[tuple[Any, ...], None] = {}
    columns = table.columns[: table.key] or ("rowid",)
    for direction in ("ASC", "DESC"):
        order = ", ".join(f"{column} {direction}" for column in columns)
        for row in database.salvage(f"{table.select} ORDER BY {order}"):
            if table.is_whole(row):
                found[row[:-1]] = None
    return list(found)


def _statements(rows: dict[str, list[tuple[Any, ...]]], old: Database | None) -> Iterator[Statement]:
    for sql in SCHEMA:
        yield sql, ((),)
    for table in _CHECKED:
        if table.is_optional and rows[table.name]:
            yield table.create, ((),)
        if table is not packs.PACKS and (rows[table.name] or not table.is_optional):
            yield table.put(*rows[table.name])
    for row in rows[packs.PACKS.name]:
        data = _data_of(old, row[0])
        if data is not None:
            yield packs.PACKS.put(row)
            yield packs.PUT_DATA, ((row[0], data),)
    yield f"PRAGMA user_version = {SCHEMA_VERSION}", ((),)


def _data_of(database: Database | None, number: int) -> bytes | None:
    if database is None:
        return None
    try:
        found: Sequence[tuple[Any, ...]] = database.query("SELECT data FROM aside_data WHERE id = ?", (number,))
    except StorageError:
        return None
    return found[0][0] if found and isinstance(found[0][0], bytes) else None
