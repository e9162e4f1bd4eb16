"""The logs of all partitions: where they are, how they are opened, how a topic's directory goes.

Rules of this file: names of paths are made here and nowhere else in the broker; a directory is renamed before it is
removed, so that a crash in the middle of the removal does not bring half a topic back.

Source: docs/decisions/0002, docs/decisions/0001.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flintmq.errors import StorageError
from flintmq.names import directory_name, topic_of_directory
from flintmq.storage import Corruption, Files, LogPlace, PartitionLog, ReadCache, is_made_empty

TOPICS_DIRECTORY = "topics"
ASIDE_DIRECTORY = "set-aside"  # of replicas
_REMOVED = "deleted-"
_REMOVED_REPLICA = "removed-"


def log_directory(topic: str, partition: int) -> str:
    """Return the directory of a partition's log."""
    return f"{TOPICS_DIRECTORY}/{directory_name(topic)}/p-{partition:04d}"


@dataclass(slots=True)
class OnDisk:
    """The contents of the directory of topics.

    Attributes:
        partitions: of every topic those that have a directory; none of one that died before.
        removed: paths of topics that were being deleted, each with the topic's name.
    """

    partitions: dict[str, list[int]] = field(default_factory=dict)
    removed: dict[str, str] = field(default_factory=dict)


def _nobody(_directory: str, _first: int, _end: int) -> None:
    """Nobody asks."""


class Logs:
    """Owner of the directory of topics.

    Args:
        report: told of damage that a log found and set aside.

    Attributes:
        on_lost: told of a log's directory, and of what the log lacks that it had, from first to end (exclusive).
        on_failed: told of a log's directory, and why it takes no more messages; see :class:`PartitionLog`.
    """

    __slots__ = ("_cache", "_files", "_removal_count", "_report", "_segment_bytes", "_told_lost",
                 "on_failed", "on_lost")  # fmt: skip

    def __init__(
        self, files: Files, cache: ReadCache, segment_bytes: int, report: Callable[[Corruption], None]
    ) -> None:
        self._files = files
        self._cache = cache
        self._segment_bytes = segment_bytes
        self._report = report
        self._removal_count = 0
        self._told_lost: dict[str, list[tuple[int, int]]] = {}  # by the directories of logs that are being opened
        self.on_lost: Callable[[str, int, int], None] = _nobody
        self.on_failed: Callable[[str, str], None] = lambda _directory, _reason: None

    def look(self) -> OnDisk:
        """Find out which directories there are."""
        found = OnDisk()
        for directory in self._files.list(TOPICS_DIRECTORY):
            path = f"{TOPICS_DIRECTORY}/{directory}"
            number, _, rest = directory.removeprefix(_REMOVED).partition("-")
            is_removed = directory.startswith(_REMOVED) and number.isascii() and number.isdigit()
            try:
                name = topic_of_directory(rest if is_removed else directory)
            except ValueError:
                continue
            if is_removed:
                found.removed[path] = name
                self._removal_count = max(self._removal_count, int(number))
                continue
            numbers = [int(part[2:]) for part in self._files.list(path) if part[:2] == "p-"]
            found.partitions[name] = sorted(numbers)
        return found

    def has_messages(self, topic: str, number: int) -> bool:
        """Whether a directory has, or had, anything but what the making of a log begins with. Blocks.

        Raises:
            OSError: it cannot be read.
        """
        directory = log_directory(topic, number)
        return any(not is_made_empty(self._files, f"{directory}/{name}") for name in self._files.list(directory))

    def new(self, topic: str, number: int, log_id: int, is_replica: bool = False) -> PartitionLog:
        """A log that has no files yet; see :meth:`flintmq.storage.PartitionLog.new`.

        Args:
            log_id: its identity; of a replica the one that it has on other nodes, else wall time in ns will do.
        """
        log = PartitionLog.new(
            self._files,
            log_directory(topic, number),
            partition=number,
            segment_bytes=self._segment_bytes,
            cache=self._cache,
            report=self._damaged,
            created_ns=log_id,
            is_replica=is_replica,
        )
        log.on_failed = self._failed
        return log

    def open(self, topic: str, number: int, wall_ns: int) -> PartitionLog:
        """Open a log, or create it. Blocks.

        Raises:
            OSError, StorageError: it cannot be.
        """
        (log,) = self._open([LogPlace(log_directory(topic, number), number)], wall_ns)
        return log

    def open_all(
        self, places: Sequence[LogPlace], wall_ns: int
    ) -> tuple[list[PartitionLog], dict[str, list[tuple[int, int]]]]:
        """Open logs together, so that what they have to sync is synced together. Blocks.

        Returns:
            the logs in the order of ``places``; and what each tells of that it lost, from first to end (exclusive), by
            its directory, until :meth:`start_ended`.
        """
        told = self._told_lost = {place.directory: [] for place in places}
        return self._open(places, wall_ns), told

    def start_ended(self) -> None:
        """Note no longer what logs tell of that they lost."""
        self._told_lost = {}

    def _open(self, places: Sequence[LogPlace], wall_ns: int) -> list[PartitionLog]:
        logs = PartitionLog.open_all(
            self._files,
            places,
            segment_bytes=self._segment_bytes,
            cache=self._cache,
            report=self._damaged,
            created_ns=wall_ns,
        )
        for log in logs:
            log.on_failed = self._failed
            if log.failed is not None:
                self._failed(log.directory, log.failed)
        return logs

    def _failed(self, directory: str, reason: str) -> None:
        self.on_failed(directory, reason)

    def _damaged(self, found: Corruption) -> None:
        directory, lost = found.path.rpartition("/")[0], (found.first_sequence_lost, found.end_sequence_lost)
        if (told := self._told_lost.get(directory)) is not None:
            told.append(lost)
        self._report(found)
        if lost[0] < lost[1]:
            self.on_lost(directory, *lost)

    def put_away(self, topic: str) -> str:
        """Rename the directory of a topic that is deleted; the path at which it is to be removed.

        Raises:
            StorageError: it cannot be renamed.
        """
        source = f"{TOPICS_DIRECTORY}/{directory_name(topic)}"
        self._removal_count += 1
        target = f"{TOPICS_DIRECTORY}/{_REMOVED}{self._removal_count}-{directory_name(topic)}"
        try:
            self._files.rename(source, target)
        except OSError as error:
            raise StorageError(f"cannot remove topic {topic}: {error}") from error
        return target

    def move_replica(self, topic: str, number: int, is_removed: bool) -> str:
        """Rename the directory of a replica, durably; the new path, empty when there is no such directory. Blocks.

        Args:
            is_removed: it is to be removed, and not kept.

        Raises:
            StorageError: it cannot be renamed.
        """
        files, source = self._files, log_directory(topic, number)
        parent, _, name = source.rpartition("/")
        try:
            if name not in files.list(parent):
                return ""
            files.make_directory(ASIDE_DIRECTORY)
            prefix = _REMOVED_REPLICA if is_removed else f"{directory_name(topic)}.{name}."
            taken = set(files.list(ASIDE_DIRECTORY))
            target = next(f"{prefix}{count}" for count in range(1, len(taken) + 2) if f"{prefix}{count}" not in taken)
            files.rename(source, f"{ASIDE_DIRECTORY}/{target}")
            files.sync_directory(ASIDE_DIRECTORY)
            files.sync_directory(parent)
        except OSError as error:
            raise StorageError(f"cannot move {source} to {ASIDE_DIRECTORY}: {error}") from error
        return f"{ASIDE_DIRECTORY}/{target}"

    def drop_empty(self, topic: str) -> None:
        """Remove the directory of a topic that has nothing here any more; one with anything in it stays. Blocks.

        Raises:
            StorageError: it cannot be removed.
        """
        path = f"{TOPICS_DIRECTORY}/{directory_name(topic)}"
        try:
            self._files.remove_empty_directory(path)
        except OSError as error:
            raise StorageError(f"cannot remove {path}, which is empty: {error}") from error

    def removed_replicas(self) -> list[str]:
        """Directories of replicas that were being removed."""
        names = self._files.list(ASIDE_DIRECTORY)
        return [f"{ASIDE_DIRECTORY}/{name}" for name in names if name.startswith(_REMOVED_REPLICA)]
