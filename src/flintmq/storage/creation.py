"""Making the files of new logs, several at a time and away from the event loop.

A log is there before its files are: :meth:`PartitionLog.new` takes its place among the others, a :class:`Creation`
makes the files in a worker thread, :meth:`Creation.finish` hands them over on the event loop. Syncing many logs
together, when the names and contents of all have been written, costs the disk little more than syncing one.

Rules of this file: :func:`create_logs` runs in a worker thread and touches no log, only what will be its files; a
directory that is not empty is what a creation left that failed, and is recovered like any other.

Source: docs/decisions/0002, docs/decisions/0001.
"""

from __future__ import annotations

from collections.abc import Sequence

from flintmq.errors import StorageError
from flintmq.storage.group_sync import sync_together
from flintmq.storage.partition_log import PartitionLog
from flintmq.storage.recovery import Recovered, Recovery, begin, parents_of, recover, storage_error, sync_begun


class Creation:
    """One log that has no files yet.

    Attributes:
        log: as :meth:`PartitionLog.new` gave it.
        error: why its files could not be made; None before that, and when they were.
    """

    __slots__ = ("_is_synced", "_recovered", "error", "log")

    def __init__(self, log: PartitionLog) -> None:
        self.log = log
        self.error: Exception | None = None
        self._recovered: Recovered | None = None
        self._is_synced = False

    def finish(self) -> None:
        """Let the log take appends; only without an error."""
        assert self._recovered is not None, "its files were made"
        self.log.created(self._recovered, self._is_synced)

    def _make(self) -> None:
        home = self.log.home
        try:
            segment = begin(home)
            if segment is not None:
                self._recovered = Recovered([segment], None)
            else:
                (self._recovered,) = recover(home.files, [Recovery(home, home.log_id, 1)])
                self._is_synced = True
        except StorageError as error:
            self.error = error
        except OSError as error:
            self.error = storage_error(home.directory, error, home.files.free_bytes())

    @property
    def directories(self) -> list[str]:
        """Directories whose entries its files are, and those above them."""
        return [self.log.directory, *parents_of(self.log.directory)]

    def sync_files(self) -> None:
        """Sync the files that were made. Blocks.

        Raises:
            OSError: nothing is known about what is durable.
        """
        assert self._recovered is not None, "it was made"
        sync_begun(self.log.home, self._recovered.segments[0])

    def _fail(self, error: OSError) -> None:
        assert self._recovered is not None, "it was made"
        for segment in self._recovered.segments:
            segment.close()
        self._recovered = None
        self.error = storage_error(self.log.directory, error, self.log.home.files.free_bytes())


def create_logs(creations: Sequence[Creation], sync: bool) -> None:
    """Make the files of several logs. Blocks; for a worker thread.

    Args:
        sync: whether they are to survive a power loss, and not only the end of this process.
    """
    for creation in creations:
        creation._make()
    if not sync:
        return
    made = [creation for creation in creations if creation._recovered is not None and not creation._is_synced]
    if not made:
        return
    for creation, error in zip(made, sync_together(made[0].log.home.files, made), strict=True):
        if error is not None:
            creation._fail(error)
        creation._is_synced = error is None
