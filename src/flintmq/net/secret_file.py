"""A secret that a file holds: read at the start, and again when the file changes: who changes one replaces the file.

Rules of this file: what cannot be read leaves the last good secret in use, and is logged once for each change of the
file; no text that leaves this file has a secret in it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from flintmq.env import Env
from flintmq.errors import FlintError
from flintmq.file_stamp import file_stamp

_log = logging.getLogger(__name__)


class SecretFile:
    """The secret of a file.

    Args:
        env: for threads, as the disk may not answer.
        read: reads the secret from the path; raises ValueError or a FlintError that says why it cannot.
        name: of the secret, for the log.

    Attributes:
        known: the secret that was read last.

    Raises:
        ValueError, FlintError: ``read`` cannot read it.
    """

    def __init__(self, path: str, env: Env, read: Callable[[str], str], name: str) -> None:
        self._path = path
        self._env = env
        self._read = read
        self._name = name
        self._lock = threading.Lock()
        self._stamp = file_stamp(path)  # first: what is written after it is read again
        self.known = read(path)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._path}>"

    async def current(self) -> str:
        """Return the secret as the file has it now; the last good one when it cannot be read."""
        found: str = await self._env.run_blocking(self.now)
        return found

    def now(self) -> str:
        """Return what :meth:`current` does; for threads, because it waits for the disk."""
        with self._lock:  # who reads slowly must not put back what another thread has replaced
            stamp = file_stamp(self._path)
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self.known = self._read(self._path)
                except (ValueError, FlintError) as error:
                    _log.error("%s; the %s that was in it is still used", error, self._name)
            return self.known


__all__ = ["SecretFile"]
