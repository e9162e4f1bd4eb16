"""A disk in memory: it keeps what is written, is full when a test wants it, and fails on demand.

:class:`MemoryDisk` is the device: it outlives the processes that use it. :class:`MemoryFiles` is what one process sees
of it, a :class:`flintmq.storage.Files`.

The rules of this file:

- Nothing waits and nothing is ever lost: a sync has nothing to do. A disk that loses power is built on this one by
  ``tests/sim/disk.py``: its :class:`Tree` has nodes that remember what was not synced, and it decides in
  ``MemoryDisk._fault_of`` which operation a process dies in.
- One operation is in progress at a time, also with several threads.
- Opening a database makes its name durable, as SQLite does; its ``-wal`` and ``-shm`` files are not shown.
- Stricter than the operating system: after :meth:`MemoryFiles.close` open files refuse as well, because a process that
  gave the lock away must not write.
"""

from __future__ import annotations

import errno
import os
import random
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from flintmq.errors import DataPathLocked, StorageError
from flintmq.storage import bytes_of, database_error, prepare_connection, salvaged_rows, shrink

Kind = Literal[
    "create", "write", "truncate", "sync", "rename", "remove", "remove_directory", "make_directory", "sync_directory",
    "commit",
]  # fmt: skip
Errors = list[OSError | None]  # of several calls, in their order


class Operation(NamedTuple):
    """One call that changes the disk. Reads are not counted: a crash at a read is a crash before the next operation.

    Attributes:
        number: 1 for the first operation of the disk's life.
        kind: what was asked for.
        path: relative to the data directory.
        size_bytes: bytes to write, the new size for a truncate, otherwise 0.
    """

    number: int
    kind: Kind
    path: str
    size_bytes: int


class Fault(NamedTuple):
    """An operation that does not simply succeed.

    Attributes:
        partly: how many of so many bytes arrive.
        happened: whether an operation without parts took effect.
        strike: does what the fault does besides, and returns what to raise; called last.
    """

    partly: Callable[[int], int]
    happened: Callable[[], bool]
    strike: Callable[[], BaseException]


@dataclass(slots=True)
class _FailureRule:
    """Fail the ``first``-th to ``last``-th operation of a kind from now on."""

    kind: Kind
    path: str
    first: int
    last: int
    error: int
    seen: int = 0

    def matches(self, operation: Operation) -> bool:
        if operation.kind != self.kind or not operation.path.startswith(self.path):
            return False
        self.seen += 1
        return self.first <= self.seen <= self.last


class Write(NamedTuple):
    """Bytes put at a position of a file; a gap before them is filled with zeros."""

    position: int
    data: bytes

    def apply(self, content: bytearray) -> None:
        """Change a file's bytes."""
        if not self.data:
            return  # or the gap would be filled
        gap = self.position - len(content)
        if gap > 0:
            content.extend(bytes(gap))
        content[self.position : self.position + len(self.data)] = self.data


class Truncate(NamedTuple):
    """A file cut to a size, or filled with zeros up to it."""

    size: int

    def apply(self, content: bytearray) -> None:
        """Change a file's bytes."""
        if self.size < len(content):
            del content[self.size :]
        else:
            content.extend(bytes(self.size - len(content)))


class FileNode:
    """The bytes of a file as processes see them, and whether it still has a name."""

    __slots__ = ("content", "is_linked")

    def __init__(self) -> None:
        self.content = bytearray()
        self.is_linked = True

    def change(self, change: Write | Truncate) -> None:
        """Take a write or a truncate."""
        change.apply(self.content)

    def sync(self) -> None:
        """Take a sync that succeeded."""

    def fail_sync(self) -> None:
        """Take a sync that failed."""


class DatabaseNode:
    """The newest state of a database, serialised, and the process's handle to it; None: nobody has it open."""

    __slots__ = ("content", "user")

    def __init__(self) -> None:
        self.content = b""
        self.user: MemoryDatabase | None = None

    def commit(self, content: bytes, sync: bool) -> None:
        """Take the state after a transaction."""
        self.content = content


class DirectoryNode:
    """The names in a directory."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries: dict[str, Node] = {}


Node = FileNode | DatabaseNode | DirectoryNode


class Renaming(NamedTuple):
    """One entry of one directory becomes ``node``; None removes it."""

    directory: DirectoryNode
    name: str
    node: Node | None


class Tree:
    """The names of a disk, from its data directory down.

    Attributes:
        file_type, database_type, directory_type: what its nodes are made of.
    """

    file_type: type[FileNode] = FileNode
    database_type: type[DatabaseNode] = DatabaseNode
    directory_type: type[DirectoryNode] = DirectoryNode

    def __init__(self) -> None:
        self.root = self.directory_type()

    def change(self, *change: Renaming) -> None:
        """Make changes that take effect together, as those of a rename do."""
        for directory, name, node in change:
            if node is None:
                directory.entries.pop(name, None)
            else:
                directory.entries[name] = node

    def sync(self, directory: DirectoryNode) -> None:
        """Take the sync of a directory."""

    def walk(self) -> Iterable[tuple[str, Node]]:
        """Yield every path and its node, the root first, parents before children, sorted."""
        waiting: list[tuple[str, Node]] = [("", self.root)]
        while waiting:
            path, node = waiting.pop()
            yield path, node
            if isinstance(node, DirectoryNode):
                names = node.entries
                prefix = f"{path}/" if path else ""
                waiting.extend((prefix + name, names[name]) for name in sorted(names, reverse=True))

    def find(self, path: str) -> Node:
        """Return what a path leads to.

        Raises:
            FileNotFoundError, NotADirectoryError: nothing, or through a file.
        """
        node: Node = self.root
        for part in _parts(path):
            if not isinstance(node, DirectoryNode):
                raise os_error(errno.ENOTDIR, path)
            if part not in node.entries:
                raise os_error(errno.ENOENT, path)
            node = node.entries[part]
        return node

    def directory(self, path: str) -> DirectoryNode:
        """Return the directory a path leads to.

        Raises:
            FileNotFoundError, NotADirectoryError: there is none.
        """
        node = self.find(path)
        if not isinstance(node, DirectoryNode):
            raise os_error(errno.ENOTDIR, path)
        return node

    def parent(self, path: str) -> tuple[DirectoryNode, str]:
        """Return the directory that ``path`` is or would be in, and its name there.

        Raises:
            FileNotFoundError, NotADirectoryError: there is no such directory.
            StorageError: the path is the data directory itself, or leaves it.
        """
        parts = _parts(path)
        if not parts:
            raise StorageError(f"path {path!r} is the data directory itself")
        return self.directory("/".join(parts[:-1])), parts[-1]


def _parts(path: str) -> list[str]:
    parts = path.split("/")
    if path.startswith("/") or ".." in parts:
        raise StorageError(f"path {path!r} leaves the data directory")
    return [part for part in parts if part not in ("", ".")]


def os_error(number: int, path: str) -> OSError:
    """Return the error of the operating system with this number, such as ``errno.EIO``."""
    return OSError(number, os.strerror(number), path)


CAPACITY_BYTES = 1 << 40


class MemoryDisk:
    """A disk with one data directory on it. Safe to use from several threads.

    Args:
        capacity_bytes: size of the file system; more than that and writes fail with ENOSPC.
        rng: decides how much of a failing write arrives; a fixed seed when not given.

    Attributes:
        operation_count: operations so far.
        observers: called with each :class:`Operation` before it takes effect.
        boot_id: tells a start of the machine from the one before; a disk that loses power changes it.
        was_broken: it was told to fail, or is smaller than by default; errors of it are what a test wanted.
    """

    tree_type: type[Tree] = Tree

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES, rng: random.Random | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.was_broken = capacity_bytes < CAPACITY_BYTES
        self.operation_count = 0
        self.observers: list[Callable[[Operation], None]] = []
        self.boot_id = "boot 1"
        self._rng = rng or random.Random(0)
        self._lock = threading.RLock()
        self._tree = self.tree_type()
        self._used_bytes = 0
        self._attached: MemoryFiles | None = None
        self._rules: list[_FailureRule] = []

    # -- processes come and go

    def attach(self) -> MemoryFiles:
        """Open the data directory for a new process.

        Raises:
            DataPathLocked: another one has it open: it was neither closed nor released.
        """
        return MemoryFiles(self)

    def release(self) -> None:
        """End the process that has the data directory open without a fault: nothing is lost, its handles die."""
        with self._lock:
            if self._attached is not None:
                self._attached.close()

    # -- faults

    def fail(self, kind: Kind, nth: int = 1, times: int = 1, error: int = errno.EIO, path: str = "") -> None:
        """Let the ``nth`` operation of a kind from now on, and the ``times - 1`` after it, raise an OSError.

        A failing write leaves a random part of its bytes; any other failing operation has no effect.

        Args:
            kind: such as ``"write"``, ``"sync"``, ``"create"``, ``"commit"`` (of a database).
            nth: 1 for the next one.
            error: its ``errno``.
            path: only operations on paths that start so are counted.
        """
        self.was_broken = True
        self._rules.append(_FailureRule(kind, path, nth, nth + times - 1, error))

    def heal(self) -> None:
        """Forget every :meth:`fail`; a full disk is healed by :meth:`set_free_bytes`."""
        self._rules.clear()

    @property
    def free_bytes(self) -> int:
        """Bytes that still fit, 0 or more."""
        return max(0, self.capacity_bytes - self._used_bytes)

    def set_free_bytes(self, free_bytes: int) -> None:
        """Resize the file system so that this much is free now; writes past it fail with ENOSPC."""
        self.was_broken = True
        self.capacity_bytes = self._used_bytes + free_bytes

    # -- what is on it

    def paths(self) -> list[str]:
        """Return every file and database, sorted."""
        return sorted(path for path, node in self._tree.walk() if not isinstance(node, DirectoryNode))

    def content(self, path: str) -> bytes:
        """Return the bytes a process would read; of a database its newest serialised state."""
        node = self._tree.find(path)
        if isinstance(node, DirectoryNode):
            raise os_error(errno.EISDIR, path)
        return bytes(node.content)

    # -- for the handles, and for disks that are built on this one

    def _begin(self, kind: Kind, path: str, size_bytes: int = 0) -> Fault | None:
        """Count an operation. None: it goes through; otherwise it happens in part, and ``strike()`` is to be raised."""
        self.operation_count += 1
        operation = Operation(self.operation_count, kind, path, size_bytes)
        for observer in self.observers:
            observer(operation)
        return self._fault_of(operation)

    def _fault_of(self, operation: Operation) -> Fault | None:
        """Return the fault that was ordered for an operation; called once for each."""
        for rule in self._rules:
            if rule.matches(operation):
                return self._failing(os_error(rule.error, operation.path))
        return None

    def _failing(self, error: OSError) -> Fault:
        return Fault(lambda size: self._rng.randint(0, size), lambda: False, lambda: error)

    def _grow(self, size_bytes: int) -> None:
        self._used_bytes += size_bytes

    def _count_used_bytes(self) -> None:
        self._used_bytes = sum(len(node.content) for _, node in self._tree.walk() if isinstance(node, FileNode))


class MemoryFile:
    """A :class:`flintmq.storage.File` in memory."""

    __slots__ = ("_files", "_node", "_open", "path")

    def __init__(self, files: MemoryFiles, path: str, node: FileNode) -> None:
        self.path = path
        self._files = files
        self._node = node
        self._open = True

    def _disk(self, position: int = 0) -> MemoryDisk:
        if not self._open:
            raise os_error(errno.EBADF, self.path)
        if position < 0:
            raise os_error(errno.EINVAL, self.path)
        return self._files._alive()

    def write_at(self, position: int, data: bytes | bytearray | memoryview) -> None:
        disk = self._disk(position)
        with disk._lock:
            fault = disk._begin("write", self.path, len(data))
            if fault is not None:
                self._write(disk, position, bytes(data[: fault.partly(len(data))]))
                raise fault.strike()
            room = len(self._node.content) + disk.free_bytes - position
            if room < len(data):
                self._write(disk, position, bytes(data[: max(0, room)]))
                raise os_error(errno.ENOSPC, self.path)
            self._write(disk, position, bytes(data))

    def _write(self, disk: MemoryDisk, position: int, data: bytes) -> None:
        if data:
            self._change(disk, Write(position, data))

    def _change(self, disk: MemoryDisk, change: Write | Truncate) -> None:
        size = len(self._node.content)
        self._node.change(change)
        if self._node.is_linked:
            disk._grow(len(self._node.content) - size)

    def read_at(self, position: int, size: int) -> bytes:
        disk = self._disk(position)
        with disk._lock:
            return bytes(self._node.content[position : position + size])

    def size(self) -> int:
        self._disk()
        return len(self._node.content)

    def truncate(self, size: int) -> None:
        disk = self._disk(size)
        with disk._lock:
            fault = disk._begin("truncate", self.path, size)
            if fault is None or fault.happened():
                self._change(disk, Truncate(size))
            if fault is not None:
                raise fault.strike()

    def write_out(self) -> None:
        self._disk()

    def sync(self) -> None:
        disk = self._disk()
        with disk._lock:
            fault = disk._begin("sync", self.path)
            if fault is None:
                self._node.sync()
                return
            if fault.happened():
                self._node.sync()
            error = fault.strike()
            if isinstance(error, OSError):
                self._node.fail_sync()
            raise error

    def close(self) -> None:
        self._open = False


class MemoryDatabase:
    """A :class:`flintmq.storage.Database`: SQLite in memory, saved to the disk at each commit."""

    def __init__(self, files: MemoryFiles, path: str, node: DatabaseNode, *, shrinks: bool = True) -> None:
        if node.user is not None:
            raise sqlite3.OperationalError(f"database is locked: {path} is open already")
        self.path = path
        self._files = files
        self._node = node
        self._connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        prepare_connection(self._connection)
        if shrinks:
            self._connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        self._connection.execute("PRAGMA secure_delete=OFF")
        if node.content:
            self._connection.deserialize(node.content)
            try:
                self._connection.execute("PRAGMA schema_version")  # reads the file, so that damage shows here
            except sqlite3.Error as error:
                self._connection.close()
                raise database_error(path, error) from error
        node.user = self

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._files._alive()._lock:
            try:
                return self._connection.execute(sql, parameters).fetchall()
            except sqlite3.Error as error:
                raise database_error(self.path, error) from error

    def salvage(self, sql: str) -> list[tuple[Any, ...]]:
        with self._files._alive()._lock:
            return salvaged_rows(self._connection, sql)

    def run_transaction(self, statements: Iterable[tuple[str, Sequence[Sequence[Any]]]], sync: bool) -> None:
        disk = self._files._alive()
        with disk._lock:
            fault = disk._begin("commit", self.path)
            if fault is None and disk.free_bytes > 0:
                self._transact(statements, sync)
                return
            if fault is None:
                raise StorageError(f"{self.path}: database or disk is full")
            if fault.happened():
                self._transact(statements, sync)
            error = fault.strike()
            if isinstance(error, OSError):
                raise StorageError(f"{self.path}: {error.strerror}") from error
            raise error

    def _transact(self, statements: Iterable[tuple[str, Sequence[Sequence[Any]]]], sync: bool) -> None:
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            for sql, rows in statements:
                if rows == ((),):  # executemany refuses to make a trigger that is there already
                    connection.execute(sql)
                else:
                    connection.executemany(sql, rows)
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise database_error(self.path, error) from error
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        self._node.commit(connection.serialize(), sync)

    def size_bytes(self) -> int:
        return bytes_of(self.query, "page_count")

    def unused_bytes(self) -> int:
        return bytes_of(self.query, "freelist_count")

    def give_back(self, wanted_bytes: int) -> bool:
        with self._files._alive()._lock:
            is_shorter = shrink(self._connection, wanted_bytes)
            if is_shorter:
                self._node.commit(self._connection.serialize(), False)
        return is_shorter

    def make_shrinkable(self) -> None:
        """Nothing was made by a release that needs it."""

    def snapshot(self) -> MemorySnapshot:
        with self._files._alive()._lock:
            return MemorySnapshot(self._connection.serialize(), self.path)

    def close(self) -> None:
        if self._node.user is self:
            self._node.user = None
            self._files._databases.remove(self)
            self._connection.close()


class MemorySnapshot:
    """A copy of a database."""

    def __init__(self, content: bytes, path: str) -> None:
        self._path = path
        self._connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        prepare_connection(self._connection)
        self._connection.deserialize(content)

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(sql, parameters).fetchall()
        except sqlite3.Error as error:
            raise database_error(self._path, error) from error

    def close(self) -> None:
        self._connection.close()


class MemoryFiles:
    """A :class:`flintmq.storage.Files` in memory: what one process sees of a :class:`MemoryDisk`.

    Args:
        disk: a new one when not given; it is the attribute ``disk``.

    Raises:
        DataPathLocked: another process has the disk attached.
    """

    def __init__(self, disk: MemoryDisk | None = None) -> None:
        self.disk = disk or MemoryDisk()
        self._is_alive = True
        self._databases: list[MemoryDatabase] = []
        with self.disk._lock:
            if self.disk._attached is not None:
                raise DataPathLocked("memory disk", os.strerror(errno.EAGAIN))
            self.disk._attached = self
        self._tree = self.disk._tree

    def _alive(self) -> MemoryDisk:
        if not self._is_alive:
            raise OSError(errno.EBADF, "the process that opened this is dead or has closed its data directory")
        return self.disk

    def open(self, path: str, create: bool = False) -> MemoryFile:
        disk = self._alive()
        with disk._lock:
            directory, name = self._tree.parent(path)
            node = directory.entries.get(name)
            if node is None:
                if not create:
                    raise os_error(errno.ENOENT, path)
                node = self._tree.file_type()
                self._change("create", path, Renaming(directory, name, node))
            if isinstance(node, DirectoryNode):
                raise os_error(errno.EISDIR, path)
            if isinstance(node, DatabaseNode):
                raise os_error(errno.EINVAL, path)
            return MemoryFile(self, path, node)

    def open_to_read(self, path: str) -> MemoryFile:
        return self.open(path)  # there are no links

    def list(self, path: str) -> list[str]:
        disk = self._alive()
        with disk._lock:
            try:
                return sorted(self._tree.directory(path).entries)
            except FileNotFoundError:
                return []

    def make_directory(self, path: str, durable: bool = True) -> None:
        disk = self._alive()
        with disk._lock:
            node = self._tree.root
            for part in _parts(path):
                child = node.entries.get(part)
                if child is None:
                    child = self._tree.directory_type()
                    self._change("make_directory", path, Renaming(node, part, child))
                    if durable:
                        self._tree.sync(node)
                if not isinstance(child, DirectoryNode):
                    raise os_error(errno.ENOTDIR, path)
                node = child

    def rename(self, source: str, target: str) -> None:
        disk = self._alive()
        with disk._lock:
            source_directory, source_name = self._tree.parent(source)
            target_directory, target_name = self._tree.parent(target)
            node = self._tree.find(source)
            replaced = target_directory.entries.get(target_name)
            if replaced is node:
                return
            _check_replaceable(node, replaced, source, target)
            self._change(
                "rename",
                source,
                Renaming(source_directory, source_name, None),
                Renaming(target_directory, target_name, node),
            )
            self._forget(replaced)

    def remove(self, path: str) -> None:
        disk = self._alive()
        with disk._lock:
            try:
                directory, name = self._tree.parent(path)
                node = self._tree.find(path)
            except FileNotFoundError:
                return
            if isinstance(node, DirectoryNode):
                raise os_error(errno.EISDIR, path)
            self._change("remove", path, Renaming(directory, name, None))
            self._forget(node)

    def remove_directory(self, path: str) -> None:
        disk = self._alive()
        with disk._lock:
            try:
                node = self._tree.directory(path)
            except FileNotFoundError:
                return
            directory, name = self._tree.parent(path)
            for child in sorted(node.entries):
                if isinstance(node.entries[child], DirectoryNode):
                    self.remove_directory(f"{path}/{child}")
                else:
                    self.remove(f"{path}/{child}")
            self._change("remove_directory", path, Renaming(directory, name, None))

    def remove_empty_directory(self, path: str) -> None:
        disk = self._alive()
        with disk._lock:
            try:
                node = self._tree.find(path)
            except (FileNotFoundError, NotADirectoryError):
                return
            if isinstance(node, DirectoryNode) and not node.entries:
                directory, name = self._tree.parent(path)
                self._change("remove_directory", path, Renaming(directory, name, None))

    def _change(self, kind: Kind, path: str, *change: Renaming) -> None:
        fault = self.disk._begin(kind, path)
        if fault is None or fault.happened():
            self._tree.change(*change)
        if fault is not None:
            raise fault.strike()

    def _forget(self, node: Node | None) -> None:
        if isinstance(node, FileNode):
            node.is_linked = False
            self.disk._grow(-len(node.content))

    def sync_directory(self, path: str) -> None:
        disk = self._alive()
        with disk._lock:
            directory = self._tree.directory(path)
            fault = disk._begin("sync_directory", path)
            if fault is None or fault.happened():
                self._tree.sync(directory)
            if fault is not None:
                raise fault.strike()

    def run_all(self, calls: Sequence[Callable[[], None]]) -> Errors:
        errors: Errors = []
        for call in calls:  # in this order, so that a seed gives the same run
            try:
                call()
            except OSError as error:
                errors.append(error)
            else:
                errors.append(None)
        return errors

    def boot_id(self) -> str:
        return self._alive().boot_id

    def free_bytes(self) -> int:
        return self._alive().free_bytes

    def open_database(self, path: str, *, shrinks: bool = True) -> MemoryDatabase:
        disk = self._alive()
        with disk._lock:
            directory, name = self._tree.parent(path)
            node = directory.entries.get(name)
            if node is None:
                node = self._tree.database_type()
                self._change("create", path, Renaming(directory, name, node))
                self._tree.sync(directory)
            if not isinstance(node, DatabaseNode):
                raise sqlite3.DatabaseError(f"{path} is not a database")
            database = MemoryDatabase(self, path, node, shrinks=shrinks)
            self._databases.append(database)
            return database

    def close(self) -> None:
        with self.disk._lock:
            if self._is_alive:
                self._is_alive = False
                self.disk._attached = None
                for database in list(self._databases):
                    database.close()


def _check_replaceable(node: Node, replaced: Node | None, source: str, target: str) -> None:
    """Refuse what rename(2) refuses."""
    source_path, target_path = "/".join(_parts(source)), "/".join(_parts(target))
    if target_path.startswith(source_path + "/"):
        raise os_error(errno.EINVAL, target)
    if source_path.startswith(target_path + "/"):
        raise os_error(errno.ENOTEMPTY, target)
    if isinstance(node, DirectoryNode):
        if replaced is not None and not isinstance(replaced, DirectoryNode):
            raise os_error(errno.ENOTDIR, target)
        if isinstance(replaced, DirectoryNode) and replaced.entries:
            raise os_error(errno.ENOTEMPTY, target)
    elif isinstance(replaced, DirectoryNode):
        raise os_error(errno.EISDIR, target)
