"""The one door to the operating system's files. Faults are injected here; nothing else opens a data file.

Rules of this file:

- Paths are relative to the data directory, ``/``-separated, and may not leave it.
- Every method is synchronous. Those that wait for the device (:meth:`File.sync`, :meth:`Files.sync_directory`,
  :meth:`Files.run_all`, :meth:`Database.run_transaction`) are called from a worker thread by the daemons once they
  listen; the rest return as fast as the page cache.
- A write that fails with an error is never retried on the same handle (fsyncgate, docs/decisions/0002).

:class:`OsFiles` is the real one; the simulation has its own that loses what was not synced.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import sqlite3
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from flintmq.errors import DamagedDatabase, DataPathLocked, PermissionMissing, StorageError
from flintmq.limits import DISK_RESERVE_BYTES, SYNC_THREADS
from flintmq.storage.rows import Query, row_crc

Errors = list[OSError | None]  # of several calls, in their order
RESERVE_NAME = "room-to-start"
"""A file that is deleted for a start on a full disk."""
_RESERVE_BYTES = 1024 * 1024
_WAL_KEPT_BYTES = 8 * 1024 * 1024  # of a write-ahead log that a large transaction has made longer
_STEP_PAGES = 256  # given back in one transaction, which may have to move as many
_SQLITE_PATH_BYTES_MAX = 504  # 512 with the end of its name and that of a journal
_MAKE_TRIES = 3
_GOES_ON = "all goes on in the directory of the start; the path has to lead there again before the next start"

log = logging.getLogger(__name__)


class File(Protocol):
    """One open data file."""

    path: str

    def write_at(self, position: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of ``data`` at byte ``position``, to the kernel.

        Raises:
            OSError: nothing is known about which bytes arrived.
        """
        ...

    def read_at(self, position: int, size: int) -> bytes:
        """Return up to ``size`` bytes from ``position``; shorter only at the end of the file."""
        ...

    def size(self) -> int:
        """Length of the file in bytes."""
        ...

    def truncate(self, size: int) -> None:
        """Cut the file to ``size`` bytes."""
        ...

    def sync(self) -> None:
        """Return when everything written so far survives a power loss (fdatasync). Blocks."""
        ...

    def write_out(self) -> None:
        """Begin to bring everything written so far to the device; a hint that promises nothing.

        Syncing many small files costs one commit of the file system's journal when all of them were written out first.
        """
        ...

    def close(self) -> None:
        """Release the handle; never syncs."""
        ...


class DatabaseSnapshot(Protocol):
    """A database as it was at one moment, whatever is written to it since; in use by one thread at a time."""

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """As :meth:`Database.query`."""
        ...

    def close(self) -> None:
        """Let go of it: the file keeps what was written since until then."""
        ...


class Database(Protocol):
    """A transactional table store (SQLite); one user at a time."""

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a SELECT and return all of its rows; ``row_crc`` of rows.py is one of its functions.

        Raises:
            DamagedDatabase: what it should have read is not what was written.
            StorageError: it cannot be read now.
        """
        ...

    def salvage(self, sql: str) -> list[tuple[Any, ...]]:
        """Run a SELECT and return the rows up to where it can read no further."""
        ...

    def run_transaction(self, statements: Iterable[tuple[str, Sequence[Sequence[Any]]]], sync: bool) -> None:
        """Run ``(sql, rows)`` pairs in order as one transaction, each sql once per row.

        Args:
            sync: when true, return only when the transaction survives a power loss; otherwise it survives the death
                of this process.

        Raises:
            StorageError: nothing of the transaction was applied.
        """
        ...

    def snapshot(self) -> DatabaseSnapshot:
        """Keep what is so now to be read later.

        Raises:
            StorageError: it cannot be had now.
        """
        ...

    def size_bytes(self) -> int:
        """Bytes of the file, once all of the write-ahead log is in it.

        Raises:
            DamagedDatabase, StorageError: as :meth:`query`.
        """
        ...

    def unused_bytes(self) -> int:
        """Bytes of the file in which nothing is kept; what is written next goes there first.

        Raises:
            DamagedDatabase, StorageError: as :meth:`query`.
        """
        ...

    def give_back(self, wanted_bytes: int) -> bool:
        """Make the file shorter, by what nothing is kept in; whether it became so. Blocks for two syncs.

        It does not while somebody reads an older state, which keeps what is written meanwhile in the write-ahead log.

        Args:
            wanted_bytes: by how much, at most; as many may have to be moved, and are written again.

        Raises:
            DamagedDatabase, StorageError: as :meth:`query`; nothing that is kept in it has changed.
        """
        ...

    def make_shrinkable(self) -> None:
        """Let :meth:`give_back` work for a file that was made by a release that had none. Blocks for a copy of it.

        Raises:
            DamagedDatabase, StorageError: as :meth:`query`; it is as it was.
        """
        ...

    def close(self) -> None: ...


class Files(Protocol):
    """The data directory."""

    def open(self, path: str, create: bool = False) -> File:
        """Open for reading and writing; with ``create`` the file is made if it does not exist. No link is followed.

        Raises:
            FileNotFoundError: it does not exist and ``create`` is false.
        """
        ...

    def open_to_read(self, path: str) -> File:
        """Open a file that somebody else may have put there, for reading only; a link is followed.

        Raises:
            FileNotFoundError: it does not exist, or it is a link that leads nowhere.
            OSError: it is something else than a file, such as a pipe.
        """
        ...

    def list(self, path: str) -> list[str]:
        """Sorted names in a directory; empty when there is no such directory."""
        ...

    def make_directory(self, path: str, durable: bool = True) -> None:
        """Create a directory and its parents.

        Args:
            durable: when true, return only when their names survive a power loss.
        """
        ...

    def rename(self, source: str, target: str) -> None:
        """Rename atomically, replacing ``target``."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file; no error when it does not exist."""
        ...

    def remove_directory(self, path: str) -> None:
        """Remove a directory and everything in it; no error when it does not exist. No link is followed."""
        ...

    def remove_empty_directory(self, path: str) -> None:
        """Remove a directory in which there is nothing; one that has something in it, or is none, stays."""
        ...

    def sync_directory(self, path: str) -> None:
        """Make creations, renames and removals in a directory survive a power loss. Blocks."""
        ...

    def run_all(self, calls: Sequence[Callable[[], None]]) -> Errors:
        """Make calls that wait for the device and know nothing of each other, several at a time. Blocks.

        Returns:
            for each call the error it raised; one that fails does not keep the others from being made.
        """
        ...

    def boot_id(self) -> str:
        """Return the name of the time since the machine was started; empty when nobody knows.

        What was written in the same time, and has not been synced, can have been lost by no power loss.
        """
        ...

    def free_bytes(self) -> int:
        """Bytes an unprivileged writer can still use on the file system of the data directory."""
        ...

    def open_database(self, path: str, *, shrinks: bool = True) -> Database:
        """Open or create a database file.

        Args:
            shrinks: whether one that is created can give room back, for which it keeps a map of its pages.
        """
        ...

    def close(self) -> None:
        """Release the lock on the data directory."""
        ...


def replace_file(files: Files, path: str, data: bytes) -> None:
    """Put a whole file in the place of another. Blocks; durable once its directory is synced.

    Raises:
        OSError: the one before is still there, or this one is, as a whole.
    """
    new = f"{path}.tmp"
    file = files.open(new, create=True)
    try:
        file.truncate(0)
        file.write_at(0, data)
        file.sync()
    finally:
        file.close()
    files.rename(new, path)


def permission_missing(path: str) -> PermissionMissing:
    """The error for a path that this user may not read and write."""
    try:
        owner = os.stat(path).st_uid
    except OSError:
        owner = None
    return PermissionMissing(path, os.geteuid(), owner)


FileIdentity = tuple[int, int]
"""The device and the inode of a file or directory: another one of the same name has others."""


def _identity(found: os.stat_result) -> FileIdentity:
    return found.st_dev, found.st_ino


class OsFile:
    """A file of the operating system."""

    __slots__ = ("_fd", "path")

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd

    def write_at(self, position: int, data: bytes | bytearray | memoryview) -> None:
        written = os.pwrite(self._fd, data, position)
        if written == len(data):
            return
        view = memoryview(data)
        while written < len(view):
            count = os.pwrite(self._fd, view[written:], position + written)
            if count == 0:
                raise OSError(errno.EIO, "write made no progress", self.path)
            written += count

    def read_at(self, position: int, size: int) -> bytes:
        data = os.pread(self._fd, size, position)
        if len(data) == size or not data:
            return data
        parts = [data]
        missing = size - len(data)
        while missing:
            data = os.pread(self._fd, missing, position + size - missing)
            if not data:
                break
            parts.append(data)
            missing -= len(data)
        return b"".join(parts)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def identity(self) -> FileIdentity:
        """Return which file this is, whatever its name is now."""
        return _identity(os.fstat(self._fd))

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def sync(self) -> None:
        if self._fd < 0:
            raise OSError(errno.EBADF, "file is closed", self.path)
        os.fdatasync(self._fd)

    def write_out(self) -> None:
        if hasattr(os, "posix_fadvise"):
            # Linux starts to write what is dirty, so that it can be dropped later, and does not wait for it
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# What SQLite says of the world around the file; anything else it says of a statement of ours is about the file.
_AROUND = (
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_NOLFS, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_MISUSE,
)  # fmt: skip


_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


def database_error(path: str, error: sqlite3.Error) -> StorageError:
    """Say what an error of SQLite means: that the file is damaged, or that it cannot be used now."""
    code = getattr(error, "sqlite_errorcode", 0)
    is_cut = code == sqlite3.SQLITE_IOERR_SHORT_READ
    is_around = code & 0xFF in _AROUND or not code
    return (StorageError if is_around and not is_cut else DamagedDatabase)(f"{path}: {error}")


def prepare_connection(connection: sqlite3.Connection) -> None:
    """Let a connection check rows, and read those that are damaged."""
    connection.create_function("row_crc", -1, row_crc, deterministic=True)
    connection.text_factory = _text


def salvaged_rows(connection: sqlite3.Connection, sql: str) -> list[tuple[Any, ...]]:
    """The rows of a query up to where it can read no further."""
    rows: list[tuple[Any, ...]] = []
    with contextlib.suppress(sqlite3.Error):
        rows.extend(connection.execute(sql))  # what came before an error stays
    return rows


def bytes_of(query: Query, pages: str) -> int:
    """Bytes of the pages that a PRAGMA counts."""
    (((count,),), ((size,),)) = query(f"PRAGMA {pages}", ()), query("PRAGMA page_size", ())
    return int(count * size)


def shrink(connection: sqlite3.Connection, wanted_bytes: int) -> bool:
    """Make a database shorter by so much at most; whether it became so."""
    ((before,),), ((size,),) = connection.execute("PRAGMA page_count"), connection.execute("PRAGMA page_size")
    left = wanted_bytes // size
    while left > 0:
        # it is one step for each page, of which execute takes only the first
        connection.executescript(f"PRAGMA incremental_vacuum({min(_STEP_PAGES, left)})")
        left -= _STEP_PAGES
    return bool(connection.execute("PRAGMA page_count").fetchone()[0] < before)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


class SqliteDatabase:
    """SQLite in WAL mode: a commit without ``sync`` survives the process, with it a power loss too.

    Args:
        path: its name in messages.
        place: where it is, which SQLite can only be told as a path; the same when empty.
        check_place: raises a StorageError where that path leads elsewhere by now.
        shrinks: as :meth:`Files.open_database` has it.
    """

    def __init__(
        self, path: str, place: str = "", check_place: Callable[[], None] | None = None, *, shrinks: bool = True
    ) -> None:
        self._path = path
        self._place = place or path
        self._check_place = check_place
        try:
            self._connection = sqlite3.connect(self._place, isolation_level=None, check_same_thread=False, timeout=10.0)
        except sqlite3.Error as error:
            raise self._failure(error) from error
        try:
            prepare_connection(self._connection)
            # of a new file, before anything is in it; where it is so, SQLite would write it again
            if shrinks and not self._connection.execute("PRAGMA auto_vacuum").fetchone()[0]:
                self._connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=FULL")
            # some builds overwrite what is deleted with zeros: as much room as it had, which a full disk has not
            self._connection.execute("PRAGMA secure_delete=OFF")
            self._connection.execute(f"PRAGMA journal_size_limit={_WAL_KEPT_BYTES}")
        except sqlite3.Error as error:
            self._connection.close()
            raise self._failure(error) from error
        self._sync = True

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(sql, parameters).fetchall()
        except sqlite3.Error as error:
            raise self._failure(error) from error

    def _failure(self, error: sqlite3.Error) -> StorageError:
        """SQLite does not say that it was permission that it lacked, or room, or that the path is too long for it."""
        size = len(os.fsencode(self._place))
        if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_CANTOPEN and size > _SQLITE_PATH_BYTES_MAX:
            what = f"{self._path}: its whole path has {size} bytes, and SQLite opens files with at most"
            return StorageError(f"{what} {_SQLITE_PATH_BYTES_MAX}: use a directory with a shorter path")
        for path in (os.path.dirname(self._place), self._place, f"{self._place}-wal", f"{self._place}-shm"):
            if os.path.exists(path) and not os.access(path, os.R_OK | os.W_OK):
                return permission_missing(path)
        may_lack_room = getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL)
        if may_lack_room and _is_full(os.path.dirname(self._place)):
            return StorageError(f"{self._path}: the disk is full ({error}); free some space")
        return database_error(self._path, error)

    def salvage(self, sql: str) -> list[tuple[Any, ...]]:
        return salvaged_rows(self._connection, sql)

    def run_transaction(self, statements: Iterable[tuple[str, Sequence[Sequence[Any]]]], sync: bool) -> None:
        connection = self._connection
        if sync != self._sync:
            connection.execute(f"PRAGMA synchronous={'FULL' if sync else 'NORMAL'}")
            self._sync = sync
        try:
            connection.execute("BEGIN IMMEDIATE")
            for sql, rows in statements:
                if rows == ((),):  # executemany refuses to make a trigger that is there already
                    connection.execute(sql)
                else:
                    connection.executemany(sql, rows)
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            failure = self._failure(error)
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _NO_ROOM:
                self._cut_wal()
            raise failure from error

    def _cut_wal(self) -> None:
        """Give back what a transaction has taken of a full disk that did not come to its end."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def size_bytes(self) -> int:
        return bytes_of(self.query, "page_count")

    def unused_bytes(self) -> int:
        return bytes_of(self.query, "freelist_count")

    def give_back(self, wanted_bytes: int) -> bool:
        try:
            if not self._is_all_in_file():
                return False
            is_shorter = shrink(self._connection, wanted_bytes)
            if is_shorter:
                self._is_all_in_file()  # the file is cut with that
        except sqlite3.Error as error:
            raise self._failure(error) from error
        return is_shorter

    def _is_all_in_file(self) -> bool:
        """Bring what the write-ahead log has into the file; whether nobody's older state is in the way."""
        ((is_busy, written, copied),) = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        return not is_busy and written == copied

    def make_shrinkable(self) -> None:
        execute = self._connection.execute
        try:
            execute("PRAGMA temp_store=MEMORY")
            execute("VACUUM")  # one transaction, which also makes it what auto_vacuum was set to
            execute("PRAGMA temp_store=DEFAULT")
            execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as error:
            raise self._failure(error) from error

    def snapshot(self) -> SqliteSnapshot:
        if self._check_place is not None:
            self._check_place()
        return SqliteSnapshot(self._path, self._place)

    def close(self) -> None:
        self._connection.close()


def _is_full(directory: str) -> bool:
    try:
        return not os.statvfs(directory).f_bavail
    except OSError:  # it is gone, and the error says something else
        return False


class SqliteSnapshot:
    """A connection of its own in a transaction that reads, which WAL lets go on beside those that write."""

    def __init__(self, path: str, place: str) -> None:
        self._path = path
        try:
            self._connection = sqlite3.connect(place, isolation_level=None, check_same_thread=False, timeout=10.0)
        except sqlite3.Error as error:
            raise database_error(path, error) from error
        try:
            prepare_connection(self._connection)
            self._connection.execute("PRAGMA query_only=1")
            self._connection.execute("BEGIN")
            self._connection.execute("SELECT 1 FROM sqlite_master").fetchone()  # it begins with what is read first
        except sqlite3.Error as error:
            self._connection.close()
            raise database_error(path, error) from error

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(sql, parameters).fetchall()
        except sqlite3.Error as error:
            raise database_error(self._path, error) from error

    def close(self) -> None:
        self._connection.close()


class OsFiles:
    """The data directory on the operating system, locked against a second nsqd while this object lives.

    The lock is ``flock`` on the directory itself, as nsqd's: the kernel drops it when the process dies, in any way. On
    a full disk the room that :meth:`keep_reserve` kept is given up.

    Everything is looked up from the directory that is locked, so that all of it stays together whatever the path leads
    to later, where something is mounted over it or a link changed. SQLite takes paths alone: it keeps what it has open,
    and what it would open later is refused then. :meth:`displaced` tells.

    Raises:
        StorageError: the directory does not exist or is not a directory.
        DataPathLocked: another process holds it.
    """

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)
        try:
            self._directory_fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        except PermissionError as error:
            raise permission_missing(self.root) from error
        except OSError as error:
            raise StorageError(f"data-path {self.root}: {error.strerror}; create the directory first") from error
        self._place = os.path.realpath(self.root)
        try:
            fcntl.flock(self._directory_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._directory_fd)
            raise DataPathLocked(self.root, error.strerror or str(error)) from error
        self._threads: ThreadPoolExecutor | None = None
        self._give_up_reserve()

    def keep_reserve(self) -> None:
        """Keep room for the next start, if the disk has it; to be called by a daemon that has started. Blocks for ms.

        A start has to write a little, such as SQLite's index of 32 KiB, also where all it is to do is to hand out what
        is stored, so that it can be deleted. A file system that compresses keeps no room by this.
        """
        try:
            if not self._exists(RESERVE_NAME) and self.free_bytes() >= DISK_RESERVE_BYTES:
                with contextlib.closing(self.open(RESERVE_NAME, create=True)) as file:
                    file.write_at(0, bytes(_RESERVE_BYTES))
        except OSError as error:
            self.remove(RESERVE_NAME)
            log.warning("%s: no room is kept for a start on a full disk: %s", self.root, error.strerror or error)

    def _give_up_reserve(self) -> None:
        try:
            if self.free_bytes() < _RESERVE_BYTES and self._exists(RESERVE_NAME):
                self.remove(RESERVE_NAME)
                log.warning("%s: the disk is full; %s was deleted, to start all the same", self.root, RESERVE_NAME)
        except OSError as error:
            log.warning("%s: the disk is full, and %s stays: %s", self.root, RESERVE_NAME, error.strerror or error)

    def _absolute(self, path: str) -> str:
        parts = path.split("/")
        if path.startswith("/") or ".." in parts:
            raise StorageError(f"path {path!r} leaves the data directory {self.root}")
        return os.path.join(self.root, *parts)

    @contextlib.contextmanager
    def _named(self, absolute: str) -> Iterator[None]:
        """Let errors name a path as whoever started this knows it."""
        try:
            yield
        except OSError as error:
            error.filename = absolute
            raise

    def _exists(self, path: str) -> bool:
        return self.identity(path) is not None

    def identity(self, path: str) -> FileIdentity | None:
        """Return which file or directory has this name, None: none. Blocks."""
        try:
            return _identity(os.stat(path, dir_fd=self._directory_fd))
        except OSError:
            return None

    def _is_directory(self, path: str) -> bool:
        try:
            return stat.S_ISDIR(os.stat(path, dir_fd=self._directory_fd).st_mode)
        except OSError:
            return False

    def displaced(self) -> str:
        """Say why a process that is started with this path would not find what is here; empty when it would. Blocks."""
        try:
            found = os.stat(self.root)
        except OSError as error:
            return f"the data path {self.root} is not there any more ({error.strerror}); {_GOES_ON}"
        if os.path.samestat(found, os.fstat(self._directory_fd)):
            return ""
        return (
            f"the data path {self.root} is another directory than at the start: was something mounted over it, or a "
            f"link changed? {_GOES_ON}"
        )

    def _check_place(self) -> None:
        try:
            is_here = os.path.samestat(os.stat(self._place), os.fstat(self._directory_fd))
        except OSError:
            is_here = False
        if not is_here:
            raise StorageError(f"{self.root}: {self._place} is not the directory any more that it was at the start")

    def open(self, path: str, create: bool = False) -> OsFile:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        absolute = self._absolute(path)
        with self._named(absolute):
            return OsFile(absolute, os.open(path, flags, 0o600, dir_fd=self._directory_fd))

    def open_to_read(self, path: str) -> OsFile:
        absolute = self._absolute(path)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # without which a pipe is waited for
        with self._named(absolute):
            fd = os.open(path, flags, dir_fd=self._directory_fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", absolute)
        return OsFile(absolute, fd)

    def list(self, path: str) -> list[str]:
        try:
            return sorted(self._names(path))
        except FileNotFoundError:
            return []

    def _names(self, path: str, flags: int = 0) -> Sequence[str]:
        with self._directory(path, flags) as fd:
            return os.listdir(fd)

    @contextlib.contextmanager
    def _directory(self, path: str, flags: int = 0) -> Iterator[int]:
        with self._named(self._absolute(path) if path else self.root):
            flags |= os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            fd = os.open(path or ".", flags, dir_fd=self._directory_fd)
            try:
                yield fd
            finally:
                os.close(fd)

    def make_directory(self, path: str, durable: bool = True) -> None:
        for _ in range(_MAKE_TRIES - 1):
            with contextlib.suppress(FileNotFoundError):  # a parent was empty, and removed meanwhile
                self._make_directory(path, durable)
                return
        self._make_directory(path, durable)

    def _make_directory(self, path: str, durable: bool) -> None:
        self._absolute(path)  # refuses a path that leaves the data directory
        parent = ""
        for part in path.split("/"):
            child = f"{parent}/{part}" if parent else part
            absolute = self._absolute(child)
            try:
                with self._named(absolute):
                    os.mkdir(child, 0o700, dir_fd=self._directory_fd)
            except FileExistsError as error:
                if not self._is_directory(child):
                    raise NotADirectoryError(errno.ENOTDIR, "not a directory", absolute) from error
            else:
                if durable:
                    self.sync_directory(parent)
            parent = child

    def rename(self, source: str, target: str) -> None:
        fd, names = self._directory_fd, (self._absolute(source), self._absolute(target))
        try:
            os.rename(source, target, src_dir_fd=fd, dst_dir_fd=fd)
        except OSError as error:
            error.filename, error.filename2 = names
            raise

    def remove(self, path: str) -> None:
        try:
            with self._named(self._absolute(path)):
                os.unlink(path, dir_fd=self._directory_fd)
        except FileNotFoundError:
            pass

    def remove_directory(self, path: str) -> None:
        root, absolute = self._directory_fd, self._absolute(path)
        with self._named(absolute):
            try:
                mode = os.stat(path, dir_fd=root, follow_symlinks=False).st_mode
            except FileNotFoundError:
                return
            if stat.S_ISLNK(mode):
                target = os.readlink(path, dir_fd=root)
                log.warning("%s leads to %s: the link is removed, what is there stays", absolute, target)
                os.unlink(path, dir_fd=root)
                return
            names = self._names(path, os.O_NOFOLLOW)
        for name in names:
            child = f"{path}/{name}"
            with self._named(f"{absolute}/{name}"):
                is_directory = stat.S_ISDIR(os.stat(child, dir_fd=root, follow_symlinks=False).st_mode)
                if not is_directory:
                    os.unlink(child, dir_fd=root)
            if is_directory:
                self.remove_directory(child)
        with self._named(absolute):
            os.rmdir(path, dir_fd=root)

    def remove_empty_directory(self, path: str) -> None:
        absolute = self._absolute(path)
        try:
            with self._named(absolute):
                os.rmdir(path, dir_fd=self._directory_fd)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise

    def sync_directory(self, path: str) -> None:
        with self._directory(path) as fd:
            os.fsync(fd)

    def run_all(self, calls: Sequence[Callable[[], None]]) -> Errors:
        errors: Errors = [None] * len(calls)
        left = deque(range(len(calls)))

        def work() -> None:
            while True:
                try:
                    number = left.popleft()
                except IndexError:
                    return
                try:
                    calls[number]()
                except OSError as error:
                    errors[number] = error

        if len(calls) < 2:
            work()
            return errors
        # syncs that are under way together share one commit of the file system's journal
        threads = self._threads = self._threads or ThreadPoolExecutor(SYNC_THREADS, "sync")
        helping = [threads.submit(work) for _ in range(min(len(calls), SYNC_THREADS) - 1)]
        work()
        for each in helping:
            each.result()
        return errors

    def boot_id(self) -> str:
        try:
            with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
                return file.read(64).strip()
        except OSError:
            return ""

    def free_bytes(self) -> int:
        info = os.statvfs(self._directory_fd)
        return info.f_bavail * info.f_frsize

    def open_database(self, path: str, *, shrinks: bool = True) -> SqliteDatabase:
        absolute = self._absolute(path)
        self._check_place()
        self._keep_private(path)
        place = os.path.join(self._place, *path.split("/"))
        return SqliteDatabase(absolute, place, self._check_place, shrinks=shrinks)

    def _keep_private(self, path: str) -> None:
        """Make the file of a database before SQLite does, which lets the umask decide who may read it; its journals
        follow.

        Raises:
            StorageError: it cannot be made.
        """
        root = self._directory_fd
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=root))
            for each in (path, f"{path}-wal", f"{path}-shm"):
                with contextlib.suppress(FileNotFoundError, PermissionError):  # of another user: it is theirs to decide
                    mode = os.stat(each, dir_fd=root).st_mode & 0o7777
                    if mode & 0o077:
                        os.chmod(each, mode & 0o700, dir_fd=root)
        except OSError as error:
            raise StorageError(f"{self._absolute(path)}: {error.strerror or error}") from error

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        if self._directory_fd >= 0:
            os.close(self._directory_fd)
            self._directory_fd = -1
