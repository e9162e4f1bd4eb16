"""A data directory that may be in use: looked at without the lock that its nsqd holds.

Rules of this file: files are opened for reading alone; no link is followed; what is gone between two looks is no error
but a fact, which :class:`FileNotFoundError` tells; an error names the file that it is about.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Iterator
from typing import NamedTuple

from flintmq.backup.manifest import BackupError
from flintmq.errors import StorageError
from flintmq.storage import database_error, prepare_connection
from flintmq.storage.channel_store import DATABASE_NAME, decode_history
from flintmq.storage.rows import Query
from flintmq.storage.tables import REPLICA, STATE

_WAIT_S = 30.0  # for a checkpoint of SQLite
# what SQLite says while it copies, of the file that is written
_OF_TARGET = (
    sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC,
    sqlite3.SQLITE_IOERR_TRUNCATE,
)  # fmt: skip


class Stat(NamedTuple):
    """A file as it is now: another one, or other contents, have another of these."""

    inode: int
    mtime_ns: int
    size: int


class LiveFile:
    """One open file of a directory in use."""

    __slots__ = ("_fd", "_path")

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def stat(self) -> Stat:
        """Return how the file is now."""
        found = os.fstat(self._fd)
        return Stat(found.st_ino, found.st_mtime_ns, found.st_size)

    def read_at(self, position: int, size: int) -> bytes:
        """Return up to ``size`` bytes from ``position``; fewer only at the end of the file.

        Raises:
            OSError: it cannot be read.
        """
        parts = []
        try:
            while size > 0 and (data := os.pread(self._fd, size, position)):
                parts.append(data)
                position += len(data)
                size -= len(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from error
        return b"".join(parts)

    def close(self) -> None:
        """Release the handle."""
        os.close(self._fd)


class LiveDirectory:
    """A data directory of nsqd.

    Raises:
        BackupError: it is none, or this user may not read it.
    """

    def __init__(self, root: str) -> None:
        self.root = os.path.realpath(root)
        if not os.path.isfile(self._path(DATABASE_NAME)):
            what = "has no channels.db" if os.path.isdir(self.root) else "is no directory"
            raise BackupError(f"--data-path {root} {what}: name the --data-path of an nsqd that was started there")
        self._check_access(root)

    def _check_access(self, root: str) -> None:
        """Refuse a database that SQLite could not read: for that it writes beside it, to what connections share.

        Without that it would read the file alone, and miss what is in the WAL; whether there is an nsqd that writes to
        a directory that is mounted for reading only here cannot be known.
        """
        path, user = self._path(DATABASE_NAME), "run this as the user that nsqd runs as, or as root"
        if not os.access(path, os.R_OK):
            raise BackupError(f"--data-path {root} cannot be read: {user}")
        if os.access(path, os.W_OK):
            return
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            raise BackupError(
                f"--data-path {root} is mounted for reading only, and a database is read by writing beside it: run "
                "this where it is mounted for writing; if nothing writes to it (a snapshot, an nsqd that has ended), "
                "copy it to where you may write and name the copy"
            )
        raise BackupError(f"--data-path {root} cannot be written, and a database is read by writing beside it: {user}")

    def _path(self, path: str) -> str:
        return os.path.join(self.root, *path.split("/"))

    def names(self, path: str) -> list[str]:
        """Return sorted names in a directory; none when it is not there.

        Raises:
            BackupError: it cannot be read.
        """
        try:
            return sorted(os.listdir(self._path(path)))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise BackupError(f"{self._path(path)}: {error.strerror or error}") from error

    def open(self, path: str) -> LiveFile:
        """Open a file.

        Raises:
            FileNotFoundError: it is not there (any more).
            OSError: it cannot be read.
        """
        return LiveFile(self._path(path))

    def identity(self) -> int:
        """Return the identity that the data directory was given when it was made.

        Raises:
            StorageError: it cannot be read.
        """
        with self._connected() as connection:
            try:
                return identity_of(lambda sql, values: connection.execute(sql, values).fetchall())
            except sqlite3.Error as error:
                raise database_error(self._path(DATABASE_NAME), error) from error

    def copy_database(self, target: str) -> None:
        """Copy the database as it is at one moment, while others write to it. Blocks.

        Args:
            target: an absolute path at which there is nothing.

        Raises:
            StorageError: it cannot be read.
            OSError: the copy cannot be written.
        """
        with self._connected() as source:
            try:
                copy = sqlite3.connect(target)
            except sqlite3.Error as error:
                raise OSError(errno.EIO, str(error), target) from error
            with contextlib.closing(copy):
                try:
                    source.backup(copy)  # all pages in one step: as of one moment, and nobody waits for it
                except sqlite3.Error as error:
                    code = getattr(error, "sqlite_errorcode", 0)
                    if code & 0xFF == sqlite3.SQLITE_FULL:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target) from error
                    if code in _OF_TARGET:
                        raise OSError(errno.EIO, str(error), target) from error
                    raise database_error(self._path(DATABASE_NAME), error) from error
        os.chmod(target, 0o600)

    def replica_rows(self) -> dict[tuple[str, int], tuple[int, int, int, list[tuple[int, int]], int]]:
        """Return number of the topic, log, epoch, history and end of the rows of each replica as of now.

        Raises:
            StorageError: it cannot be read.
        """
        with self._connected() as connection:
            try:
                rows, _ = REPLICA.read(lambda sql, values: connection.execute(sql, values).fetchall())
            except sqlite3.Error as error:
                raise database_error(self._path(DATABASE_NAME), error) from error
        return {
            (topic, number): (topic_number, log_id, epoch, decode_history(history), rows_end)
            for topic, number, topic_number, log_id, epoch, history, rows_end, *_ in rows
        }

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        path = self._path(DATABASE_NAME)
        try:
            connection = sqlite3.connect(path, isolation_level=None, timeout=_WAIT_S)
        except sqlite3.Error as error:
            raise database_error(path, error) from error
        try:
            prepare_connection(connection)
            yield connection
        finally:
            connection.close()


def identity_of(query: Query) -> int:
    """Return the identity of the data directory that a database belongs to.

    Raises:
        StorageError: it has none, or it is not whole.
    """
    rows, _ = STATE.read(query)
    if not rows:
        raise StorageError(f"{DATABASE_NAME} is damaged, or of a release before checksums: start its nsqd once")
    return int(rows[0][2])
