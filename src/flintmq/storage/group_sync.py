"""Syncing many logs together: their files several at a time, and every directory once.

A log alone costs a sync of its file and, when it is new, of four directories. Of thousands of logs that a start or a
stop has to sync, most directories are the same, and the file system commits what is synced at the same time in one go.

Rules of this file: nothing here touches a log, only what its owner has prepared, so that it may run in a worker thread
while the log goes on; what fails of one log says nothing about the others.

Source: docs/decisions/0002, docs/decisions/0001.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from flintmq.storage.files import Files


class Unsynced(Protocol):
    """Files and directories that are to be made durable for one purpose."""

    @property
    def directories(self) -> Sequence[str]:
        """Directories whose entries changed."""
        ...

    def sync_files(self) -> None:
        """Sync the files. Blocks.

        Raises:
            OSError: nothing is known about what is durable.
        """
        ...


def sync_together(files: Files, parts: Sequence[Unsynced]) -> list[OSError | None]:
    """Sync several logs. Blocks.

    Returns:
        for each the first error; None when it is durable.
    """
    errors = files.run_all([part.sync_files for part in parts])
    sharing: dict[str, list[int]] = {}
    for number, part in enumerate(parts):
        if errors[number] is None:
            for path in part.directories:
                sharing.setdefault(path, []).append(number)
    # from the deepest to the data directory itself; each once for all that are below it
    paths = sorted(sharing, key=len, reverse=True)
    results = files.run_all([partial(files.sync_directory, path) for path in paths])
    for path, error in zip(paths, results, strict=True):
        for number in sharing[path]:
            errors[number] = errors[number] or error
    return errors
