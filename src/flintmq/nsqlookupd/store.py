"""The coordination store that nsqlookupd keeps itself: a state machine, a SQLite file under it, and who watches.

Tables of store.db, each with ``crc`` as its last column (see storage/rows.py)::

    store_state(id, version, cluster_id, revision, writes, digest)   one row
    store_key(key, value, created, modified, version, lease)         key as UTF-8
    store_lease(id, ttl_s)

    writes    transactions that this database has had, in all its life
    digest    the sum of the checksums of all keys and leases, modulo 2^63: rows of different times do not have it

Rules of this file:

- Nothing is answered or told before everything that it shows survives a power loss; what waits meanwhile is written
  together.
- What cannot be written is tried again, and nothing is answered until it is: whether it holds is not known.
- A file that is not as it was written, or as new as it was, is refused: a forgotten leader or lease would make two of
  one. How new it was stands in a file beside it (store_mark.py), which is written before anything is answered.
- The time in which nobody could renew a lease (the store was away, stopped, or could not write) is nobody's: every
  lease has its full time afterwards.

Source: docs/decisions/0017, docs/decisions/0016.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from flintmq.cluster.store import Compacted, Events, KeyValue, Span, StoreFull, StoreUnavailable
from flintmq.cluster.store_state import Changes, StoreLimits, StoreState
from flintmq.env import Env
from flintmq.errors import DamagedDatabase, StorageError
from flintmq.net.etcd_wire import Answers
from flintmq.net.http_messages import JSON_TYPE, StreamingResponse
from flintmq.net.tasks import kept_up, tell
from flintmq.nsqlookupd.store_mark import MARK_NAME, Mark, MarkFile
from flintmq.storage import Database, Files
from flintmq.storage.rows import Statement, Table

DATABASE_NAME = "store.db"
SCHEMA_VERSION = 2
WATCHER_COUNT_MAX = 4096
TICK_S = 0.25
"""The pause between two looks at the leases."""
STALL_NS = 1_000_000_000
"""Beyond a tick; then leases could not be renewed, and begin again."""
PROGRESS_NS = 450_000_000
"""After which a watch that wants signs of life has one; whoever watches asks for it after a second."""
WRITE_AGAIN_S = 1.0
DIGEST_MODULUS = 1 << 63
FORGOTTEN_REVISIONS = 1_000_000
"""Revisions that are passed over where some were forgotten, so that none means two things."""

_INTEGER, _BLOB = "INTEGER NOT NULL", "BLOB NOT NULL"
STATE = Table(
    "store_state",
    {
        "id": "INTEGER PRIMARY KEY",
        "version": _INTEGER,
        "cluster_id": _INTEGER,
        "revision": _INTEGER,
        "writes": _INTEGER,
        "digest": _INTEGER,
    },
    key=1,
)
KEY = Table(
    "store_key",
    {"key": _BLOB, "value": _BLOB, "created": _INTEGER, "modified": _INTEGER, "version": _INTEGER, "lease": _INTEGER},
    key=1,
)
LEASE = Table("store_lease", {"id": "INTEGER PRIMARY KEY", "ttl_s": _INTEGER}, key=1)
TABLES = (STATE, KEY, LEASE)

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


class DamagedStore(StorageError):
    """The file of the store is not as it was written.

    Args:
        reason: what was found.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"{DATABASE_NAME} of --store-path is damaged: {self.reason}; nothing is served from it. Restore it from a "
            f"backup, or move it and {MARK_NAME} away: the store is empty then, and whoever uses it begins anew"
        )


class OlderStore(StorageError):
    """The file of the store is whole, and not as new as it was, or nobody can tell.

    Args:
        reason: what was found.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"{DATABASE_NAME} of --store-path is not as new as it was: {self.reason}. Acknowledged changes are "
            f"missing, so nothing is served from it: a forgotten leader would make two of one. Restore {DATABASE_NAME} "
            f"(with its -wal) and {MARK_NAME} from a backup of the same time, if there is a newer one; or stop every "
            "nsqd of the cluster, start once with --accept-older-store, and start them again: what is missing is "
            "forgotten then"
        )


class EmbeddedStore:
    """The store of one nsqlookupd.

    Args:
        files: its directory.
        accepts_older: take what is there although it is not as new as it was.
    """

    def __init__(self, env: Env, files: Files, limits: StoreLimits | None = None, accepts_older: bool = False) -> None:
        self._env = env
        self._accepts_older = accepts_older
        self._mark = MarkFile(files)
        self._writes = 0
        self._digest = 0
        self._crcs: dict[str | int, int] = {}  # of each key and lease, as it was written last
        self._files = files
        self._limits = limits
        self._database: Database | None = None
        self._state = StoreState(limits)
        self._cluster_id = 0
        self._durable_revision = 0
        self._writing: asyncio.Future[None] | None = None  # done when what is being written is
        self._next: asyncio.Future[None] | None = None  # done when what has changed since is written
        self._expiring: asyncio.Task[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._is_closing = False
        self._failure = ""
        self._turned_ns = 0
        self._could_answer_ns = 0  # when nothing waited for the disk
        self._progress_ns = 0
        self._progress = b""
        self._watchers: dict[_Watcher, None] = {}
        self._listeners: dict[Callable[[], None], None] = {}
        self._lines: dict[tuple[Span, int, int], tuple[int, bytes]] = {}
        self.answers = Answers(0)

    # --- opening and closing

    def open(self) -> None:
        """Read what is there; blocks.

        Raises:
            DamagedStore: it is not as it was written.
            OlderStore: it is not as new as it was.
            StorageError: it cannot be used.
        """
        try:
            self._mark.load()
            self._database = self._files.open_database(DATABASE_NAME, shrinks=False)
            self._load(self._database)
        except StorageError as error:
            self._close_files()
            if isinstance(error, DamagedDatabase):
                raise DamagedStore(str(error)) from error
            raise
        self.answers = Answers(self._cluster_id)
        self._durable_revision = self._state.revision
        self._turned_ns = self._env.clock.monotonic_ns()

    def _close_files(self) -> None:
        self._mark.close()
        if self._database is not None:
            self._database.close()
            self._database = None

    def _load(self, database: Database) -> None:
        if not database.query("SELECT name FROM sqlite_master"):
            self._make(database)
            return
        for (text,) in database.query("PRAGMA quick_check(3)"):
            if text != "ok":
                raise DamagedStore(text)
        rows = {}
        for table in TABLES:
            rows[table.name], damaged_count = table.read(database.query)
            if damaged_count:
                raise DamagedStore(f"{damaged_count} rows of {table.name} are not as they were written")
        if len(rows[STATE.name]) != 1:
            raise DamagedStore("its row of state is gone")
        ((_, version, cluster_id, revision, writes, digest),) = rows[STATE.name]
        if version != SCHEMA_VERSION:
            raise StorageError(f"{DATABASE_NAME} has version {version}, this nsqlookupd knows {SCHEMA_VERSION}")
        found, leases = rows[KEY.name], rows[LEASE.name]
        self._take_note(KEY.put(*found), LEASE.put(*leases))
        if self._digest != digest:
            raise DamagedStore("rows of it are gone, or of different times")
        if missing := {row[-1] for row in found} - {0} - {lease_id for lease_id, _ in leases}:
            raise DamagedStore(f"it has keys of leases that are not there: {sorted(missing)[:3]}")
        self._cluster_id, self._writes = cluster_id, writes
        forgotten = self._why_older(Mark(writes, revision, digest))
        if forgotten:
            revision = self._accept(database, revision, forgotten)
        elif self._mark.mark != Mark(writes, revision, digest):
            self._mark.write(cluster_id, Mark(writes, revision, digest))
        pairs = [KeyValue(bytes(key).decode(), bytes(value), *rest) for key, value, *rest in found]
        self._state = StoreState(self._limits, revision, pairs, leases, self._env.clock.monotonic_ns())

    def _make(self, database: Database) -> None:
        """Make a new store; the mark before it, so that there is never a store without one."""
        mark = self._mark.mark
        revision = 1
        if self._mark.is_there and mark != Mark(0, 1, 0):
            acknowledged = "nobody knows how many" if mark is None else str(mark.writes)
            reason = f"{DATABASE_NAME} is gone or empty, and {acknowledged} changes of it were acknowledged"
            if not self._accepts_older:
                raise OlderStore(reason)
            _log.warning("STORE: %s: they are forgotten, as --accept-older-store says", reason)
            revision = FORGOTTEN_REVISIONS + (1 if mark is None else mark.revision)
        self._cluster_id = self._mark.cluster_id or self._env.random.getrandbits(62) + 1
        if not self._mark.is_there:
            self._mark.write(self._cluster_id, Mark(0, 1, 0))
        self._writes = 1 if mark is None else mark.writes + 1
        self._state = StoreState(self._limits, revision)
        created: list[Statement] = [(table.create, ((),)) for table in TABLES]
        database.run_transaction([*created, self._state_row(revision)], sync=True)
        self._mark.write(self._cluster_id, Mark(self._writes, revision, 0))

    def _why_older(self, found: Mark) -> str:
        """Say why the database is not, or may not be, what it was when something was last answered; empty: it is."""
        file, mark = self._mark, self._mark.mark
        if not file.is_there:
            return f"{MARK_NAME} beside it is gone, which says how new it was"
        if mark is None:
            return f"{MARK_NAME} beside it is damaged, which says how new it was"
        if file.cluster_id not in (None, self._cluster_id):
            return f"{MARK_NAME} beside it is of another store"
        if found.writes < mark.writes:
            missing = mark.writes - found.writes
            return (
                f"it ends {missing} transactions before the last that was acknowledged, at revision {found.revision} "
                f"instead of {mark.revision}"
            )
        if found.writes == mark.writes and found != mark:
            return f"its rows are not those of revision {mark.revision} that were acknowledged"
        if found.writes > mark.writes + 1:
            _log.warning("STORE: %s was behind %s; it is written anew", MARK_NAME, DATABASE_NAME)
        return ""

    def _accept(self, database: Database, revision: int, reason: str) -> int:
        """Go on with an older state, if that was asked for; return the revision to go on from."""
        if not self._accepts_older:
            raise OlderStore(reason)
        _log.warning("STORE: %s: what is missing is forgotten, as --accept-older-store says", reason)
        mark = self._mark.mark or Mark(0, 0, 0)
        revision = max(revision, mark.revision) + FORGOTTEN_REVISIONS
        self._writes = max(self._writes, mark.writes) + 1
        database.run_transaction([self._state_row(revision)], sync=True)
        self._mark.write(self._cluster_id, Mark(self._writes, revision, self._digest))
        return revision

    def start(self) -> None:
        """Begin to write, and to look at leases."""
        loop = asyncio.get_running_loop()
        self._turned_ns = self._env.clock.monotonic_ns()
        self._state.restart_leases(self._turned_ns)
        self._expiring = loop.create_task(kept_up(self._expire, "looking at the leases of the store"))
        _log.info("STORE: revision %d, %d keys", self._state.revision, self._state.key_count)

    async def close(self) -> None:
        """Write what is not written, and close the file; nobody may ask or watch any more."""
        self._is_closing = True
        if self._expiring is not None:
            self._expiring.cancel()
            await asyncio.wait({self._expiring})
        while self._writer is not None and not self._writer.done():
            await asyncio.wait({self._writer})
        self._close_files()

    # --- asking

    async def ask(self, work: Callable[[StoreState, int], Result]) -> Result:
        """Do something with the state; return when all that it has seen and done is durable.

        Args:
            work: is called with the state and monotonic time.

        Raises:
            StoreFull: nothing can be written; nothing was done.
            StoreError: of ``work``; also when the store cannot write.
        """
        if self._failure:
            raise StoreFull(f"the store cannot be written: {self._failure}")
        try:
            return work(self._state, self._now_ns())
        finally:
            await self._until_durable()

    async def _until_durable(self) -> None:
        waiting = self._writing
        if self._state.has_changes:
            if self._next is None:
                self._next = asyncio.get_running_loop().create_future()
            waiting = self._next
            if self._writing is None:
                self._write_next()
        if waiting is not None:
            await asyncio.shield(waiting)

    def _now_ns(self) -> int:
        """The time; leases begin again when there was some in which nothing could be asked."""
        now_ns = self._env.clock.monotonic_ns()
        if now_ns - self._turned_ns > TICK_S * 1e9 + STALL_NS:
            _log.warning(
                "STORE: stood still for %.1f s; every lease has its full time", (now_ns - self._turned_ns) / 1e9
            )
            self._state.restart_leases(now_ns)
        self._turned_ns = now_ns
        return now_ns

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_ns = self._now_ns()
            self._give_signs_of_life(now_ns)
            if self._failure:
                self._state.restart_leases(now_ns)
                continue
            expired = self._state.expire(now_ns)
            if expired:
                _log.info("STORE: leases have run out: %s", ", ".join(map(str, expired)))
                try:
                    await self._until_durable()
                except StoreUnavailable:
                    continue  # it is logged, and tried again

    def _give_signs_of_life(self, now_ns: int) -> None:
        """Tell those who watch that the store lives, while what it is asked can be answered."""
        if self._writing is None:
            self._could_answer_ns = now_ns
        if self._failure or now_ns - self._could_answer_ns > STALL_NS or now_ns - self._progress_ns < PROGRESS_NS:
            return
        self._progress_ns = now_ns
        self._progress = self.answers.line(self.answers.plain(self._durable_revision))
        for watcher in list(self._watchers):
            watcher.give_sign_of_life()

    @property
    def progress(self) -> bytes:
        """The line that says that nothing has happened."""
        return self._progress

    # --- writing

    def _write_next(self) -> None:
        changes = self._state.take_changes()
        assert changes is not None
        self._writing, self._next = self._next, None
        statements = _statements(changes)
        self._take_note(*statements)
        self._writes += 1
        statements.append(self._state_row(changes.revision))
        mark = Mark(self._writes, changes.revision, self._digest)
        self._writer = asyncio.get_running_loop().create_task(self._write(mark, statements))
        self._writer.add_done_callback(tell("writing the store"))

    def _take_note(self, *statements: Statement) -> None:
        """Keep the digest that of all rows after some statements."""
        crcs, digest = self._crcs, self._digest
        for sql, rows in statements:
            is_put = sql in (KEY.insert, LEASE.insert)
            for row in rows:
                name = row[0] if isinstance(row[0], int) else bytes(row[0]).decode()
                digest -= crcs.pop(name, 0)
                if is_put:
                    crcs[name] = row[-1]
                    digest += row[-1]
        self._digest = digest % DIGEST_MODULUS

    def _state_row(self, revision: int) -> Statement:
        return STATE.put((1, SCHEMA_VERSION, self._cluster_id, revision, self._writes, self._digest))

    async def _write(self, mark: Mark, statements: list[Statement]) -> None:
        """Write one group; when it cannot be written, tell those who wait, and try again until it can."""
        database = self._database
        assert database is not None
        while True:
            try:
                await self._env.run_blocking(database.run_transaction, statements, True)
                await self._env.run_blocking(self._mark.write, self._cluster_id, mark)
                break
            except StorageError as error:
                if not self._failure:
                    _log.error("STORE: cannot be written, nothing is answered until it can: %s", error)
                self._failure = str(error)
                for waiting in (self._writing, self._next):
                    if waiting is not None and not waiting.done():
                        waiting.set_exception(StoreUnavailable(f"the store cannot be written: {error}"))
                        waiting.exception()  # whether or not somebody waits
            if self._is_closing:
                return
            await asyncio.sleep(WRITE_AGAIN_S)
        if self._failure:
            _log.info("STORE: is written again")
            self._failure = ""
            self._state.restart_leases(self._env.clock.monotonic_ns())
        self._durable_revision = mark.revision
        done, self._writing = self._writing, None
        if done is not None and not done.done():
            done.set_result(None)
        if self._state.has_changes:
            if self._next is None or self._next.done():
                self._next = asyncio.get_running_loop().create_future()
            self._write_next()
        self._lines.clear()
        for watcher in list(self._watchers):
            watcher.wake()
        for woken in list(self._listeners):
            woken()

    # --- watching

    def watch(self, span: Span, start_revision: int, wants_progress: bool = False) -> StreamingResponse:
        """Tell what happens in a span from a revision on.

        Args:
            start_revision: 0: from the next one.
            wants_progress: tell now and then that nothing does.

        Raises:
            StoreUnavailable: there are too many watches.
        """
        if len(self._watchers) >= WATCHER_COUNT_MAX:
            raise StoreUnavailable(f"the store has {WATCHER_COUNT_MAX} watches, which is all there may be")
        after = start_revision - 1 if start_revision else self._durable_revision
        if start_revision == self._state.compacted:
            after = start_revision  # as etcd: what came after it is remembered
        watcher = _Watcher(self, span, after, wants_progress)
        self._watchers[watcher] = None
        return watcher.response

    def forget(self, watcher: _Watcher) -> None:
        """A watch has ended."""
        self._watchers.pop(watcher, None)

    def listen(self, woken: Callable[[], None]) -> None:
        """Call ``woken`` whenever more may be told, until :meth:`unlisten`."""
        self._listeners[woken] = None

    def unlisten(self, woken: Callable[[], None]) -> None:
        """Call it no longer."""
        self._listeners.pop(woken, None)

    def events_after(self, span: Span, after: int) -> Events:
        """Return what comes next in a span, as far as it may be told.

        Raises:
            Compacted: it is forgotten.
        """
        reached = after
        while reached < self._durable_revision:
            events = self._state.events(span, reached, self._durable_revision)
            reached = events.revision
            if events.events:
                return events
        return Events(reached, ())

    def lines_after(self, span: Span, after: int) -> tuple[int, bytes]:
        """Return what comes next in a span as one line, empty when there is nothing, and how far it reaches.

        Raises:
            Compacted: it is forgotten.
        """
        until = self._durable_revision
        key = (span, after, until)
        known = self._lines.get(key)
        if known is not None:
            return known
        reached = after
        while reached < until:
            events = self._state.events(span, reached, until)
            reached = events.revision
            if events.events:
                found = (reached, self.answers.watch(events))
                break
        else:
            found = (reached, b"")
        if len(self._lines) < WATCHER_COUNT_MAX:
            self._lines[key] = found  # most watch the same, and are as far
        return found

    @property
    def durable_revision(self) -> int:
        """The revision up to which anything may be told."""
        return self._durable_revision

    def describe(self) -> str:
        """One line, for logs and failing tests."""
        failure = f" failure={self._failure!r}" if self._failure else ""
        return f"{self._state.describe()} durable={self._durable_revision} watchers={len(self._watchers)}{failure}"


class _Watcher:
    """One watch: how far it is told."""

    def __init__(self, store: EmbeddedStore, span: Span, after: int, wants_progress: bool) -> None:
        self._wants_progress = wants_progress
        self._is_due = False
        self._store = store
        self._span = span
        self._after = after
        self._is_created = False
        self._has_ended = False
        self.response = StreamingResponse(self._next_piece, self._closed, (JSON_TYPE,))

    def wake(self) -> None:
        self.response.wake()

    def give_sign_of_life(self) -> None:
        """Tell how far the store is, if nothing else is to be told."""
        if self._wants_progress:
            self._is_due = True
            self.wake()

    def _next_piece(self) -> bytes | None:
        store = self._store
        if not self._is_created:
            self._is_created = True
            return store.answers.line(store.answers.plain(store.durable_revision, created=True))
        if self._has_ended:
            return None
        try:
            self._after, line = store.lines_after(self._span, self._after)
        except Compacted as error:
            self._has_ended = True
            fields: dict[str, Any] = {"canceled": True, "compact_revision": str(error.revision)}
            return store.answers.line(store.answers.plain(store.durable_revision, **fields))
        if not line and self._is_due:
            line = store.progress
        self._is_due = False
        return line

    def _closed(self) -> None:
        self._store.forget(self)


def _statements(changes: Changes) -> list[Statement]:
    put = [
        (key.encode(), pair.value, pair.create_revision, pair.mod_revision, pair.version, pair.lease_id)
        for key, pair in changes.keys.items()
        if pair is not None
    ]
    deleted = [(key.encode(),) for key, pair in changes.keys.items() if pair is None]
    granted = [(lease_id, ttl_s) for lease_id, ttl_s in changes.leases.items() if ttl_s is not None]
    ended = [(lease_id,) for lease_id, ttl_s in changes.leases.items() if ttl_s is None]
    statements = [KEY.put(*put), KEY.delete(*deleted), LEASE.put(*granted), LEASE.delete(*ended)]
    return [statement for statement in statements if statement[1]]
