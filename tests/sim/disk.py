"""A disk in memory that forgets what was not synced, crashes at any operation, and can be damaged.

:class:`CrashingDisk` is a :class:`flintmq.testing.MemoryDisk` with a platter under the page cache: its nodes remember
what a power loss may take. What one process sees of it is the same :class:`flintmq.testing.MemoryFiles`.

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

- A kill tears an operation only when it happens *at* it (:meth:`CrashingDisk.crash_at`).
- A sync that fails drops the unsynced writes of the file and marks them clean: they can still be read, the next sync
  succeeds, and a power loss takes them (fsyncgate). :meth:`CrashingDisk.drop_caches` makes reads show it too.

Source: Rebello et al., "Can Applications Recover from fsync Failures?" (2020); Pillai et al., "All File Systems Are Not
Created Equal" (2014).
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flintmq.testing.files import (
    DatabaseNode,
    DirectoryNode,
    Fault,
    FileNode,
    MemoryDisk,
    Node,
    Operation,
    Renaming,
    Tree,
    Truncate,
    Write,
    os_error,
)

SECTOR_BYTES = 512
SCATTER_PROBABILITY = 0.25
SNAPSHOT_COUNT_MAX = 64

Change = tuple[Renaming, ...]  # takes effect as a whole, as a rename does


class DiskCrashed(BaseException):
    """The process died in this disk operation. Not an Exception: nothing of a dead process handles it."""


@dataclass(slots=True)
class _CrashPlan:
    number: int
    rng: random.Random
    crash: Callable[[], None]


class _File(FileNode):
    """A file's bytes: in the page cache (``content``), on the platter (``durable``), and what lies between.

    I1: ``content`` is ``durable`` with ``unsynced`` applied, unless a sync failed (``diverged``).
    """

    __slots__ = ("diverged", "durable", "unsynced")

    def __init__(self) -> None:
        super().__init__()
        self.durable = bytearray()
        self.unsynced: list[Write | Truncate] = []
        self.diverged = False

    def change(self, change: Write | Truncate) -> None:
        super().change(change)
        self.unsynced.append(change)

    def rot(self, change: Write | Truncate) -> None:
        """Change the bytes where they are: on the platter, in the cache, or in both."""
        if not self.unsynced:
            change.apply(self.content)
            change.apply(self.durable)
            return
        self.change(change)
        _within(change, len(self.durable)).apply(self.durable)

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
            self.content = bytearray(self.durable)
            for change in self.unsynced:
                change.apply(self.content)
            self.diverged = False

    def lose_power(self, rng: random.Random) -> None:
        """Keep what is on the platter and some of the rest."""
        self.is_linked = True  # else nobody would ask: its removal may not have survived
        if not self.unsynced and not self.diverged:
            return
        for change in self._survivors(rng):
            change.apply(self.durable)
        self.unsynced.clear()
        self.content = bytearray(self.durable)
        self.diverged = False

    def _survivors(self, rng: random.Random) -> Iterable[Write | Truncate]:
        if rng.random() < SCATTER_PROBABILITY:
            for change in self.unsynced:
                for piece in _sectors(change) if isinstance(change, Write) else (change,):
                    if rng.getrandbits(1):
                        yield piece
            return
        count = rng.randint(0, len(self.unsynced))
        yield from self.unsynced[:count]
        if count < len(self.unsynced):
            torn = self.unsynced[count]
            if isinstance(torn, Write):
                yield Write(torn.position, torn.data[: rng.randint(0, len(torn.data))])


def _within(change: Write | Truncate, size: int) -> Write | Truncate:
    """Return the part of a change in the first ``size`` bytes of the file."""
    if isinstance(change, Write):
        return Write(change.position, change.data[: max(0, size - change.position)])
    return Truncate(min(size, change.size))


def _sectors(write: Write) -> Iterable[Write]:
    """Split where the device would: at multiples of 512 bytes of the file."""
    start = 0
    while start < len(write.data):
        end = SECTOR_BYTES - (write.position + start) % SECTOR_BYTES + start
        yield Write(write.position + start, write.data[start:end])
        start = end


class _Database(DatabaseNode):
    """Serialised states of a database: the first survives a power loss, the last is the newest commit (``content``)."""

    __slots__ = ("snapshots",)

    def __init__(self) -> None:
        super().__init__()
        self.snapshots = [self.content]

    def commit(self, content: bytes, sync: bool) -> None:
        super().commit(content, sync)
        if sync:
            self.snapshots = [content]
            return
        self.snapshots.append(content)
        if len(self.snapshots) > SNAPSHOT_COUNT_MAX:
            del self.snapshots[1:-1:2]

    def rot(self, change: Write | Truncate) -> None:
        """Change the bytes of the newest state, which is the only one from now on."""
        content = bytearray(self.content)
        change.apply(content)
        self.commit(bytes(content), sync=True)

    def lose_power(self, rng: random.Random) -> None:
        """Keep one of the states since the last sync."""
        self.commit(rng.choice(self.snapshots), sync=True)


class _Directory(DirectoryNode):
    """The names in a directory, and those that are on the platter (``durable``)."""

    __slots__ = ("durable",)

    def __init__(self) -> None:
        super().__init__()
        self.durable: dict[str, Node] = {}


class _Tree(Tree):
    """Names of which a power loss leaves the durable ones.

    I2: ``unsynced`` holds, in order, every change of the current names that is not in the durable ones.
    """

    file_type = _File
    database_type = _Database
    directory_type = _Directory

    def __init__(self) -> None:
        super().__init__()
        self.unsynced: list[Change] = []

    def change(self, *change: Renaming) -> None:
        super().change(*change)
        self.unsynced.append(change)

    def sync(self, directory: DirectoryNode) -> None:
        """Make the changes of one directory durable, and with them those of others that they were built upon."""
        needed = [directory]
        durable: list[Change] = []
        remaining: list[Change] = []
        for change in reversed(self.unsynced):
            touched = [renaming.directory for renaming in change]
            if any(one is other for one in touched for other in needed):
                needed.extend(touched)
                durable.append(change)
            else:
                remaining.append(change)
        for change in reversed(durable):
            _make_durable(change)
        self.unsynced = remaining[::-1]

    def lose_power(self, rng: random.Random) -> None:
        """Keep the durable names and some of the changes since, and of what they name what survives."""
        keep_probability = rng.random()
        stopped: list[DirectoryNode] = []
        for change in self.unsynced:
            touched = [renaming.directory for renaming in change]
            lost = any(one is other for one in touched for other in stopped)
            if lost or rng.random() >= keep_probability:
                stopped.extend(touched)
            else:
                _make_durable(change)
        self.unsynced.clear()
        for _, node in self.walk():
            if isinstance(node, _Directory):
                node.entries = dict(node.durable)  # before the walk goes into it
            elif isinstance(node, _File | _Database):
                node.lose_power(rng)


def _make_durable(change: Change) -> None:
    for directory, name, node in change:
        assert isinstance(directory, _Directory)
        if node is None:
            directory.durable.pop(name, None)
        else:
            directory.durable[name] = node


class CrashingDisk(MemoryDisk):
    """A disk whose machine can be killed and lose power, and whose bytes can rot.

    A sync that :meth:`fail` fails drops what it should have made durable.

    Attributes:
        boot_count: how often the machine has been started.
    """

    tree_type = _Tree
    _tree: _Tree

    def __init__(self, capacity_bytes: int = 1 << 40, rng: random.Random | None = None) -> None:
        super().__init__(capacity_bytes, rng)
        self.boot_count = 1
        self._crash_plan: _CrashPlan | None = None

    def crash(self, power_loss: bool, rng: random.Random) -> None:
        """Kill the process (``kill -9``), or the whole machine, between two operations."""
        with self._lock:
            self.release()
            self._crash_plan = None
            if power_loss:
                self.boot_count += 1
                self.boot_id = f"boot {self.boot_count}"
                self._tree.lose_power(rng)
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

    def heal(self) -> None:
        """Forget every :meth:`fail` and :meth:`crash_at`; a full disk is healed by :meth:`set_free_bytes`."""
        super().heal()
        self._crash_plan = None

    def drop_caches(self) -> None:
        """Let every read come from the platter: what a failed sync dropped is gone now."""
        with self._lock:
            for _, node in self._tree.walk():
                if isinstance(node, _File):
                    node.drop_cache()
            self._count_used_bytes()

    # -- damage

    def damage(self, path: str, position: int, data: bytes) -> None:
        """Overwrite bytes behind the back of the process that uses them, in cache and on the platter."""
        self._rot(path, Write(position, data))

    def flip_bit(self, path: str, position: int, bit: int = 0) -> None:
        """Flip one bit (0 is the lowest) of the byte at ``position``."""
        self.damage(path, position, bytes([self.content(path)[position] ^ (1 << bit)]))

    def zero(self, path: str, position: int, size: int) -> None:
        """Put zeros where the data was."""
        self.damage(path, position, bytes(size))

    def cut(self, path: str, size: int) -> None:
        """Lose everything from byte ``size`` on."""
        self._rot(path, Truncate(size))

    def _rot(self, path: str, change: Write | Truncate) -> None:
        node = self._tree.find(path)
        if not isinstance(node, _File | _Database):
            raise os_error(errno.EISDIR, path)
        with self._lock:
            node.rot(change)
            self._count_used_bytes()

    # -- for the handles

    def _fault_of(self, operation: Operation) -> Fault | None:
        plan = self._crash_plan
        if plan is None or plan.number != operation.number:
            return super()._fault_of(operation)

        def strike() -> BaseException:
            plan.crash()
            return DiskCrashed(operation)

        return Fault(lambda size: plan.rng.randint(0, size), lambda: plan.rng.random() < 0.5, strike)
