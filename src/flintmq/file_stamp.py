"""The signs by which a file that is read again when it changes is seen to have changed.

Rules of this file: a file that nobody could read, and whose owner or mode was put right since, has changed as well.
"""

from __future__ import annotations

import os
from typing import NamedTuple


class FileStamp(NamedTuple):
    """Signs that change when a file is written, replaced, or given to somebody else; times in ns since 1970."""

    modified_ns: int
    changed_ns: int
    size: int
    number: int
    mode: int


def file_stamp(path: str) -> FileStamp | None:
    """Return the stamp of a file, of what a link leads to; None when it cannot be looked at: reading it says why."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return FileStamp(found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode)


__all__ = ["FileStamp", "file_stamp"]
