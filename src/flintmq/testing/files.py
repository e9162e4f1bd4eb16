"""A disk in memory that forgets what was not synced, fails on demand and crashes at any operation.

:class:`MemoryDisk` is the device: it outlives crashes. :class:`MemoryFiles` is what one process sees of it, a
:class:`flintmq.storage.Files`; it dies with the process, and then it and all of its handles refuse every call.

What survives, and what the model leaves out:

====================  ================================  ===============================================================
done                  ``crash(power_loss=False)``       ``crash(power_loss=True)``
====================  ================================  ===============================================================
``write_at``          all of it                         synced: all of it. Not synced, per file: a prefix of the writes
                                                        with the next one torn at a random byte, or (one time in four)
                                                        any set of their 512-byte sectors
``sync``              yes                               yes; it does not make the file's *name* durable
create, rename,       yes                               synced with ``sync_directory``: yes. Else, per directory, a
remove                                                  prefix of the changes: metadata journals keep their order
``make_directory``    yes                               yes, as :class:`flintmq.storage.Files` promises
``commit``            the last one                      the last one with ``sync``, or any later one
====================  ================================  ===============================================================

- One operation is in progress at a time; a kill tears it only when it happens *at* it (:meth:`MemoryDisk.crash_at`).
- A sync that fails drops the unsynced writes of the file and marks them clean: they can still be read, the next sync
  succeeds, and a power loss takes them (fsyncgate, ``design/reliability.md`` R7). :meth:`MemoryDisk.drop_caches` makes
  reads show it too.
- Opening a database makes its name durable, as SQLite does; its ``-wal`` and ``-shm`` files are not shown.
- Stricter than the operating system: after :meth:`MemoryFiles.close` open files refuse as well, because whoever gave
  the lock away must not write.

Source: design/reliability.md 2, 4 (S3) and 5.
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
from flintmq.storage import database_error, prepare_connection, salvaged_rows

SECTOR_BYTES = 512
SCATTER_PROBABILITY = 0.25
SNAPSHOT_COUNT_MAX = 64

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


class DiskCrashed(BaseException):
    """The process died in this disk operation. Not an Exception: nothing of a dead process handles it."""


class _Fault(NamedTuple):
    """What becomes of an operation that does not simply succeed.

    Attributes:
        partly: how many of so many bytes arrive.
        happened: whether an operation without parts took effect.
        strike: lets the fault strike and returns what to raise; called last.
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


@dataclass(slots=True)
class _CrashPlan:
    number: int
    rng: random.Random
    crash: Callable[[], None]


class _Write(NamedTuple):
    position: int
    data: bytes

    def apply(self, content: bytearray) -> None:
        if not self.data:
            return  # or the gap would be filled
        gap = self.position - len(content)
        if gap > 0:
            content.extend(bytes(gap))
        content[self.position : self.position + len(self.data)] = self.data

    def within(self, size: int) -> _Write:
        """The part of it in the first ``size`` bytes of the file."""
        return _Write(self.position, self.data[: max(0, size - self.position)])

    def sectors(self) -> Iterable[_Write]:
        """Split where the device would: at multiples of 512 bytes of the file."""
        start = 0
        while start < len(self.data):
            end = SECTOR_BYTES - (self.position + start) % SECTOR_BYTES + start
            yield _Write(self.position + start, self.data[start:end])
            start = end


class _Truncate(NamedTuple):
    size: int

    def apply(self, content: bytearray) -> None:
        if self.size < len(content):
            del content[self.size :]
        else:
            content.extend(bytes(self.size - len(content)))

    def within(self, size: int) -> _Truncate:
        """The part of it in the first ``size`` bytes of the file."""
        return _Truncate(min(size, self.size))


class _FileNode:
    """A file's bytes: in the page cache (``current``), on the platter (``durable``), and what lies between.

    I1: ``current`` is ``durable`` with ``unsynced`` applied, unless a sync failed (``diverged``).
    """

    __slots__ = ("current", "diverged", "durable", "is_linked", "unsynced")

    def __init__(self) -> None:
        self.current = bytearray()
        self.durable = bytearray()
        self.unsynced: list[_Write | _Truncate] = []
        self.diverged = False
        self.is_linked = True

    def change(self, change: _Write | _Truncate) -> None:
        change.apply(self.current)
        self.unsynced.append(change)

    def rot(self, change: _Write | _Truncate) -> None:
        """Change the bytes where they are: on the platter, in the cache, or in both."""
        if not self.unsynced:
            change.apply(self.current)
            change.apply(self.durable)
            return
        self.change(change)
        change.within(len(self.durable)).apply(self.durable)

    def sync(self) -> None:
        for change in self.unsynced:
            change.apply(self.durable)
        self.unsynced.clear()

    def fail_sync(self) -> None:
        self.diverged = self.diverged or bool(self.unsynced)
        self.unsynced.clear()

    def drop_cache(self) -> None:
        """Read the clean pages from the platter again; dirty ones stay."""
        if self.diverged:
            self.current = bytearray(self.durable)
            for change in self.unsynced:
                change.apply(self.current)
            self.diverged = False

    def lose_power(self, rng: random.Random) -> None:
        self.is_linked = True  # else nobody would ask: its removal may not have survived
        if not self.unsynced and not self.diverged:
            return
        for change in self._survivors(rng):
            change.apply(self.durable)
        self.unsynced.clear()
        self.current = bytearray(self.durable)
        self.diverged = False

    def _survivors(self, rng: random.Random) -> Iterable[_Write | _Truncate]:
        if rng.random() < SCATTER_PROBABILITY:
            for change in self.unsynced:
                for piece in change.sectors() if isinstance(change, _Write) else (change,):
                    if rng.getrandbits(1):
                        yield piece
            return
        count = rng.randint(0, len(self.unsynced))
        yield from self.unsynced[:count]
        if count < len(self.unsynced):
            torn = self.unsynced[count]
            if isinstance(torn, _Write):
                yield _Write(torn.position, torn.data[: rng.randint(0, len(torn.data))])


class _DatabaseNode:
    """Serialised states of a database: the first survives a power loss, the last is the newest commit."""

    __slots__ = ("snapshots", "user")

    def __init__(self) -> None:
        self.snapshots = [b""]
        self.user: MemoryDatabase | None = None

    def commit(self, snapshot: bytes, sync: bool) -> None:
        if sync:
            self.snapshots = [snapshot]
            return
        self.snapshots.append(snapshot)
        if len(self.snapshots) > SNAPSHOT_COUNT_MAX:
            del self.snapshots[1:-1:2]

    def lose_power(self, rng: random.Random) -> None:
        self.snapshots = [rng.choice(self.snapshots)]


class _DirectoryNode:
    __slots__ = ("durable", "entries")

    def __init__(self) -> None:
        self.entries: dict[str, _Node] = {}
        self.durable: dict[str, _Node] = {}


_Node = _FileNode | _DatabaseNode | _DirectoryNode


class _Renaming(NamedTuple):
    """One entry of one directory becomes ``node``; None removes it."""

    directory: _DirectoryNode
    name: str
    node: _Node | None


_Change = tuple[_Renaming, ...]  # takes effect as a whole, as a rename does


def _apply_durably(change: _Change) -> None:
    for directory, name, node in change:
        if node is None:
            directory.durable.pop(name, None)
        else:
            directory.durable[name] = node


class _Namespace:
    """Directories and names. Lookups follow the current names; the durable ones are what a power loss leaves.

    I2: ``unsynced`` holds, in order, every change of the current names that is not in the durable ones.
    """

    def __init__(self) -> None:
        self.root = _DirectoryNode()
        self.unsynced: list[_Change] = []

    def change(self, *change: _Renaming) -> None:
        for directory, name, node in change:
            if node is None:
                directory.entries.pop(name, None)
            else:
                directory.entries[name] = node
        self.unsynced.append(change)

    def sync(self, directory: _DirectoryNode) -> None:
        """Make the changes of one directory durable, and with them those of others that they were built upon."""
        needed = [directory]
        durable: list[_Change] = []
        remaining: list[_Change] = []
        for change in reversed(self.unsynced):
            touched = [renaming.directory for renaming in change]
            if any(one is other for one in touched for other in needed):
                needed.extend(touched)
                durable.append(change)
            else:
                remaining.append(change)
        for change in reversed(durable):
            _apply_durably(change)
        self.unsynced = remaining[::-1]

    def lose_power(self, rng: random.Random) -> None:
        keep_probability = rng.random()
        stopped: list[_DirectoryNode] = []
        for change in self.unsynced:
            touched = [renaming.directory for renaming in change]
            lost = any(one is other for one in touched for other in stopped)
            if lost or rng.random() >= keep_probability:
                stopped.extend(touched)
            else:
                _apply_durably(change)
        self.unsynced.clear()
        for _, node in self.walk(durable=True):
            if isinstance(node, _DirectoryNode):
                node.entries = dict(node.durable)
            else:
                node.lose_power(rng)

    def walk(self, durable: bool = False) -> Iterable[tuple[str, _Node]]:
        """Every path and what it names, the root first, parents before children, sorted."""
        waiting: list[tuple[str, _Node]] = [("", self.root)]
        while waiting:
            path, node = waiting.pop()
            yield path, node
            if isinstance(node, _DirectoryNode):
                names = node.durable if durable else node.entries
                prefix = f"{path}/" if path else ""
                waiting.extend((prefix + name, names[name]) for name in sorted(names, reverse=True))

    def find(self, path: str) -> _Node:
        node: _Node = self.root
        for part in _parts(path):
            if not isinstance(node, _DirectoryNode):
                raise _os_error(errno.ENOTDIR, path)
            if part not in node.entries:
                raise _os_error(errno.ENOENT, path)
            node = node.entries[part]
        return node

    def directory(self, path: str) -> _DirectoryNode:
        node = self.find(path)
        if not isinstance(node, _DirectoryNode):
            raise _os_error(errno.ENOTDIR, path)
        return node

    def parent(self, path: str) -> tuple[_DirectoryNode, str]:
        """The directory ``path`` is or would be in, and its name there."""
        parts = _parts(path)
        if not parts:
            raise StorageError(f"path {path!r} is the data directory itself")
        return self.directory("/".join(parts[:-1])), parts[-1]


def _parts(path: str) -> list[str]:
    parts = path.split("/")
    if path.startswith("/") or ".." in parts:
        raise StorageError(f"path {path!r} leaves the data directory")
    return [part for part in parts if part not in ("", ".")]


def _os_error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


class MemoryDisk:
    """A disk with one data directory on it. Safe to use from several threads.

    Args:
        capacity_bytes: size of the file system; more than that and writes fail with ENOSPC.
        rng: decides how much of a failing write arrives; a fixed seed when not given.

    Attributes:
        operation_count: operations so far.
        boot_count: how often the machine has been started.
        observers: called with each :class:`Operation` before it takes effect.
    """

    def __init__(self, capacity_bytes: int = 1 << 40, rng: random.Random | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.operation_count = 0
        self.boot_count = 1
        self.observers: list[Callable[[Operation], None]] = []
        self._rng = rng or random.Random(0)
        self._lock = threading.RLock()
        self._names = _Namespace()
        self._used_bytes = 0
        self._attached: MemoryFiles | None = None
        self._rules: list[_FailureRule] = []
        self._crash_plan: _CrashPlan | None = None

    # -- processes come and go

    def attach(self) -> MemoryFiles:
        """Open the data directory for a new process.

        Raises:
            DataPathLocked: another one has it open: it was neither closed, released nor crashed.
        """
        return MemoryFiles(self)

    def release(self) -> None:
        """End the process that has the data directory open without a fault: nothing is lost, its handles die."""
        with self._lock:
            if self._attached is not None:
                self._attached.close()

    def crash(self, power_loss: bool, rng: random.Random) -> None:
        """Kill the process (``kill -9``), or the whole machine, between two operations."""
        with self._lock:
            self.release()
            self._crash_plan = None
            if power_loss:
                self.boot_count += 1
                self._names.lose_power(rng)
                self._count_used_bytes()

    def crash_at(
        self, number: int, power_loss: bool, rng: random.Random, kill: Callable[[], None] | None = None
    ) -> None:
        """Crash inside the operation with this number, counted from the disk's first, and raise :class:`DiskCrashed`.

        A write in progress is torn at a random byte; any other operation has happened or not.

        Args:
            kill: called instead of :meth:`crash`, which it must call; for simulations that kill a whole node.
        """
        if number <= self.operation_count:
            raise ValueError(f"operation {number} is over: {self.operation_count} have been done")
        self._crash_plan = _CrashPlan(number, rng, kill or (lambda: self.crash(power_loss, rng)))

    # -- faults

    def fail(self, kind: Kind, nth: int = 1, times: int = 1, error: int = errno.EIO, path: str = "") -> None:
        """Let the ``nth`` operation of a kind from now on, and the ``times - 1`` after it, raise an OSError.

        A failing write leaves a random part of its bytes; a failing sync drops what it should have made durable.

        Args:
            path: only operations on paths that start so are counted.
        """
        self._rules.append(_FailureRule(kind, path, nth, nth + times - 1, error))

    def heal(self) -> None:
        """Forget every :meth:`fail` and :meth:`crash_at`; a full disk is healed by :meth:`set_free_bytes`."""
        self._rules.clear()
        self._crash_plan = None

    @property
    def free_bytes(self) -> int:
        return max(0, self.capacity_bytes - self._used_bytes)

    def set_free_bytes(self, free_bytes: int) -> None:
        """Resize the file system so that this much is free now; writes past it fail with ENOSPC."""
        self.capacity_bytes = self._used_bytes + free_bytes

    def drop_caches(self) -> None:
        """Let every read come from the platter: what a failed sync dropped is gone now."""
        with self._lock:
            for _, node in self._names.walk():
                if isinstance(node, _FileNode):
                    node.drop_cache()
            self._count_used_bytes()

    # -- looking at the platter and damaging it

    def paths(self) -> list[str]:
        """Every file and database, sorted."""
        return sorted(path for path, node in self._names.walk() if not isinstance(node, _DirectoryNode))

    def content(self, path: str) -> bytes:
        """The bytes a process would read; of a database its newest serialised state."""
        node = self._names.find(path)
        if isinstance(node, _DirectoryNode):
            raise _os_error(errno.EISDIR, path)
        return bytes(node.current) if isinstance(node, _FileNode) else node.snapshots[-1]

    def damage(self, path: str, position: int, data: bytes) -> None:
        """Overwrite bytes behind the back of whoever uses them, in cache and on the platter."""
        self._rot(path, _Write(position, data))

    def flip_bit(self, path: str, position: int, bit: int = 0) -> None:
        """Flip one bit (0 is the lowest) of the byte at ``position``."""
        self.damage(path, position, bytes([self.content(path)[position] ^ (1 << bit)]))

    def zero(self, path: str, position: int, size: int) -> None:
        """Put zeros where the data was."""
        self.damage(path, position, bytes(size))

    def cut(self, path: str, size: int) -> None:
        """Lose everything from byte ``size`` on."""
        self._rot(path, _Truncate(size))

    def _rot(self, path: str, change: _Write | _Truncate) -> None:
        node = self._names.find(path)
        if isinstance(node, _DirectoryNode):
            raise _os_error(errno.EISDIR, path)
        with self._lock:
            if isinstance(node, _FileNode):
                node.rot(change)
            else:
                content = bytearray(node.snapshots[-1])
                change.apply(content)
                node.snapshots = [bytes(content)]
            self._count_used_bytes()

    # -- for the handles

    def _begin(self, kind: Kind, path: str, size_bytes: int = 0) -> _Fault | None:
        """Count an operation. None: it goes through; otherwise it happens in part, and ``strike()`` is to be raised."""
        self.operation_count += 1
        operation = Operation(self.operation_count, kind, path, size_bytes)
        for observer in self.observers:
            observer(operation)
        plan = self._crash_plan
        if plan is not None and plan.number == operation.number:
            return self._crashing(plan, operation)
        for rule in self._rules:
            if rule.matches(operation):
                return self._failing(_os_error(rule.error, path))
        return None

    def _failing(self, error: OSError) -> _Fault:
        return _Fault(lambda size: self._rng.randint(0, size), lambda: False, lambda: error)

    def _crashing(self, plan: _CrashPlan, operation: Operation) -> _Fault:
        def strike() -> BaseException:
            plan.crash()
            return DiskCrashed(operation)

        return _Fault(lambda size: plan.rng.randint(0, size), lambda: plan.rng.random() < 0.5, strike)

    def _grow(self, size_bytes: int) -> None:
        self._used_bytes += size_bytes

    def _count_used_bytes(self) -> None:
        self._used_bytes = sum(len(node.current) for _, node in self._names.walk() if isinstance(node, _FileNode))


class MemoryFile:
    """A :class:`flintmq.storage.File` in memory."""

    __slots__ = ("_files", "_node", "_open", "path")

    def __init__(self, files: MemoryFiles, path: str, node: _FileNode) -> None:
        self.path = path
        self._files = files
        self._node = node
        self._open = True

    def _disk(self, position: int = 0) -> MemoryDisk:
        if not self._open:
            raise _os_error(errno.EBADF, self.path)
        if position < 0:
            raise _os_error(errno.EINVAL, self.path)
        return self._files._alive()

    def write_at(self, position: int, data: bytes | bytearray | memoryview) -> None:
        disk = self._disk(position)
        with disk._lock:
            fault = disk._begin("write", self.path, len(data))
            if fault is not None:
                self._write(disk, position, bytes(data[: fault.partly(len(data))]))
                raise fault.strike()
            room = len(self._node.current) + disk.free_bytes - position
            if room < len(data):
                self._write(disk, position, bytes(data[: max(0, room)]))
                raise _os_error(errno.ENOSPC, self.path)
            self._write(disk, position, bytes(data))

    def _write(self, disk: MemoryDisk, position: int, data: bytes) -> None:
        if data:
            self._change(disk, _Write(position, data))

    def _change(self, disk: MemoryDisk, change: _Write | _Truncate) -> None:
        size = len(self._node.current)
        self._node.change(change)
        if self._node.is_linked:
            disk._grow(len(self._node.current) - size)

    def read_at(self, position: int, size: int) -> bytes:
        disk = self._disk(position)
        with disk._lock:
            return bytes(self._node.current[position : position + size])

    def size(self) -> int:
        self._disk()
        return len(self._node.current)

    def truncate(self, size: int) -> None:
        disk = self._disk(size)
        with disk._lock:
            fault = disk._begin("truncate", self.path, size)
            if fault is None or fault.happened():
                self._change(disk, _Truncate(size))
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

    def __init__(self, files: MemoryFiles, path: str, node: _DatabaseNode) -> None:
        if node.user is not None:
            raise sqlite3.OperationalError(f"database is locked: {path} is open already")
        self.path = path
        self._files = files
        self._node = node
        self._connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        prepare_connection(self._connection)
        if node.snapshots[-1]:
            self._connection.deserialize(node.snapshots[-1])
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

    def commit(self, statements: Iterable[tuple[str, Sequence[Sequence[Any]]]], sync: bool) -> None:
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

    def close(self) -> None:
        if self._node.user is self:
            self._node.user = None
            self._files._databases.remove(self)
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
        self._names = self.disk._names

    def _alive(self) -> MemoryDisk:
        if not self._is_alive:
            raise OSError(errno.EBADF, "the process that opened this is dead or has closed its data directory")
        return self.disk

    def open(self, path: str, create: bool = False) -> MemoryFile:
        disk = self._alive()
        with disk._lock:
            directory, name = self._names.parent(path)
            node = directory.entries.get(name)
            if node is None:
                if not create:
                    raise _os_error(errno.ENOENT, path)
                node = _FileNode()
                self._change("create", path, _Renaming(directory, name, node))
            if isinstance(node, _DirectoryNode):
                raise _os_error(errno.EISDIR, path)
            if isinstance(node, _DatabaseNode):
                raise _os_error(errno.EINVAL, path)
            return MemoryFile(self, path, node)

    def list(self, path: str) -> list[str]:
        disk = self._alive()
        with disk._lock:
            try:
                return sorted(self._names.directory(path).entries)
            except FileNotFoundError:
                return []

    def make_directory(self, path: str, durable: bool = True) -> None:
        disk = self._alive()
        with disk._lock:
            node = self._names.root
            for part in _parts(path):
                child = node.entries.get(part)
                if child is None:
                    child = _DirectoryNode()
                    self._change("make_directory", path, _Renaming(node, part, child))
                    if durable:
                        self._names.sync(node)
                if not isinstance(child, _DirectoryNode):
                    raise _os_error(errno.ENOTDIR, path)
                node = child

    def rename(self, source: str, target: str) -> None:
        disk = self._alive()
        with disk._lock:
            source_directory, source_name = self._names.parent(source)
            target_directory, target_name = self._names.parent(target)
            node = self._names.find(source)
            replaced = target_directory.entries.get(target_name)
            if replaced is node:
                return
            _check_replaceable(node, replaced, source, target)
            self._change(
                "rename",
                source,
                _Renaming(source_directory, source_name, None),
                _Renaming(target_directory, target_name, node),
            )
            self._forget(replaced)

    def remove(self, path: str) -> None:
        disk = self._alive()
        with disk._lock:
            try:
                directory, name = self._names.parent(path)
                node = self._names.find(path)
            except FileNotFoundError:
                return
            if isinstance(node, _DirectoryNode):
                raise _os_error(errno.EISDIR, path)
            self._change("remove", path, _Renaming(directory, name, None))
            self._forget(node)

    def remove_directory(self, path: str) -> None:
        disk = self._alive()
        with disk._lock:
            try:
                node = self._names.directory(path)
            except FileNotFoundError:
                return
            directory, name = self._names.parent(path)
            for child in sorted(node.entries):
                if isinstance(node.entries[child], _DirectoryNode):
                    self.remove_directory(f"{path}/{child}")
                else:
                    self.remove(f"{path}/{child}")
            self._change("remove_directory", path, _Renaming(directory, name, None))

    def _change(self, kind: Kind, path: str, *change: _Renaming) -> None:
        fault = self.disk._begin(kind, path)
        if fault is None or fault.happened():
            self._names.change(*change)
        if fault is not None:
            raise fault.strike()

    def _forget(self, node: _Node | None) -> None:
        if isinstance(node, _FileNode):
            node.is_linked = False
            self.disk._grow(-len(node.current))

    def sync_directory(self, path: str) -> None:
        disk = self._alive()
        with disk._lock:
            directory = self._names.directory(path)
            fault = disk._begin("sync_directory", path)
            if fault is None or fault.happened():
                self._names.sync(directory)
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
        return f"boot {self._alive().boot_count}"

    def free_bytes(self) -> int:
        return self._alive().free_bytes

    def open_database(self, path: str) -> MemoryDatabase:
        disk = self._alive()
        with disk._lock:
            directory, name = self._names.parent(path)
            node = directory.entries.get(name)
            if node is None:
                node = _DatabaseNode()
                self._change("create", path, _Renaming(directory, name, node))
                self._names.sync(directory)
            if not isinstance(node, _DatabaseNode):
                raise sqlite3.DatabaseError(f"{path} is not a database")
            database = MemoryDatabase(self, path, node)
            self._databases.append(database)
            return database

    def close(self) -> None:
        with self.disk._lock:
            if self._is_alive:
                self._is_alive = False
                self.disk._attached = None
                for database in list(self._databases):
                    database.close()


def _check_replaceable(node: _Node, replaced: _Node | None, source: str, target: str) -> None:
    """Refuse what rename(2) refuses."""
    source_path, target_path = "/".join(_parts(source)), "/".join(_parts(target))
    if target_path.startswith(source_path + "/"):
        raise _os_error(errno.EINVAL, target)
    if source_path.startswith(target_path + "/"):
        raise _os_error(errno.ENOTEMPTY, target)
    if isinstance(node, _DirectoryNode):
        if replaced is not None and not isinstance(replaced, _DirectoryNode):
            raise _os_error(errno.ENOTDIR, target)
        if isinstance(replaced, _DirectoryNode) and replaced.entries:
            raise _os_error(errno.ENOTEMPTY, target)
    elif isinstance(replaced, _DirectoryNode):
        raise _os_error(errno.EISDIR, target)
