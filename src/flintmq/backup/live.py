"""A data directory that may be in use: looked at without the lock that its nsqd holds.

Rules of this file: files are opened for reading alone; no link is followed; what is gone between two looks is no error
but a fact, which :class:`FileNotFoundError` tells.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from typing import NamedTuple

from flintmq.backup.manifest import BackupError
from flintmq.storage import database_error, prepare_connection
from flintmq.storage.channel_store import DATABASE_NAME, decode_history
from flintmq.storage.tables import REPLICA

_WAIT_S = 30.0  # for a checkpoint of SQLite


class Stat(NamedTuple):
    """A file as it is now: another one, or other contents, have another of these."""

    inode: int
    mtime_ns: int
    size: int


class LiveFile:
    """One open file of a directory in use."""

    __slots__ = ("_fd",)

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def stat(self) -> Stat:
        """Return how the file is now."""
        found = os.fstat(self._fd)
        return Stat(found.st_ino, found.st_mtime_ns, found.st_size)

    def read_at(self, position: int, size: int) -> bytes:
        """Return up to ``size`` bytes from ``position``; fewer only at the end of the file."""
        parts = []
        while size > 0 and (data := os.pread(self._fd, size, position)):
            parts.append(data)
            position += len(data)
            size -= len(data)
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
        if not os.access(self._path(DATABASE_NAME), os.R_OK | os.W_OK):
            raise BackupError(f"--data-path {root} cannot be read: run this as the user that nsqd runs as, or as root")

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

    def copy_database(self, target: str) -> None:
        """Copy the database as it is at one moment, while others write to it. Blocks.

        Args:
            target: an absolute path at which there is nothing.

        Raises:
            StorageError: it cannot be read, or not be written there.
        """
        with self._connected() as source, contextlib.closing(sqlite3.connect(target)) as copy:
            try:
                source.backup(copy)  # all pages in one step: as of one moment, and nobody waits for it
            except sqlite3.Error as error:
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
