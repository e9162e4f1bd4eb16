"""A directory for the token of a spool in memory, which no kill leaves behind for ever.

The rules of this file: whoever has such a directory holds a lock on it; one that nobody holds is left over from a
process that was killed, and the next one of the same user removes it, if there is nothing in it but a token.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "flintmq-token-"
TOKEN = "token"


class TokenPlace:
    """One directory, from now until :meth:`close`; makes it, and removes those of the dead.

    Raises:
        OSError: none can be made.
    """

    def __init__(self) -> None:
        _remove_left()
        while True:
            self.path = tempfile.mkdtemp(prefix=PREFIX)
            lock = _locked(self.path, fcntl.LOCK_EX)
            if lock is not None:
                self._lock = lock
                return

    def close(self) -> None:
        """Remove it, if that has not been done."""
        _remove(self.path)
        os.close(self._lock)


def _remove_left() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            is_ours = path.lstat().st_uid == os.geteuid()
        except OSError:
            continue
        lock = _locked(str(path), fcntl.LOCK_EX | fcntl.LOCK_NB) if is_ours else None
        if lock is not None:
            _remove(str(path))
            os.close(lock)


def _locked(path: str, how: int) -> int | None:
    """Return the lock of a directory; None: it is somebody's, or gone by the time it was locked."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, how)
        if os.path.samestat(os.fstat(lock), os.lstat(path)):
            return lock
    except OSError:
        pass
    os.close(lock)
    return None


def _remove(path: str) -> None:
    with suppress(OSError):  # the spool has done it, or there is something else in it
        os.unlink(os.path.join(path, TOKEN))
    with suppress(OSError):
        os.rmdir(path)
