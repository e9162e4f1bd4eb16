"""Logs that this node has had and has no more: who is called in sync of one must not begin it anew, empty.

What was set aside is known by its directory, also to the next process; what was removed, to this one.

Rules of this file: a directory that cannot be read is passed over; nothing is removed here.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import logging

from flintmq.broker.logs import ASIDE_DIRECTORY
from flintmq.env import Env
from flintmq.storage import Files, log_id_in

NAMES_MAX = 3
"""Directories that one line of the log names."""

log = logging.getLogger(__name__)


class LetGo:
    """Knows these logs.

    Args:
        files: of the data directory.

    Attributes:
        aside_count: directories in ``set-aside/``, as they were counted last.
    """

    def __init__(self, env: Env, files: Files) -> None:
        self.aside_count = 0
        self._env = env
        self._files = files
        self._logs: set[int] = set()

    async def load(self) -> None:
        """Read what was set aside, and say so."""
        found = await self._env.run_blocking(self._read)
        self._logs.update(log_id for _, log_id in found)
        self.aside_count = len(found)
        if found:
            names = ", ".join(name for name, _ in found[:NAMES_MAX])
            log.warning(
                "CLUSTER: %s of the data directory has %d logs that were set aside (%s%s): nothing of them is served. "
                "docs/cluster.md says how to read them; remove what is not needed",
                ASIDE_DIRECTORY, len(found), names, ", ..." if len(found) > NAMES_MAX else "",
            )  # fmt: skip

    async def recount(self) -> None:
        """Count what was set aside: somebody may have removed it."""
        self.aside_count = len(await self._env.run_blocking(self._names))

    def has(self, log_id: int) -> bool:
        """Whether a log was here."""
        return log_id in self._logs

    def note(self, log_id: int, is_aside: bool) -> None:
        """Note that a log goes.

        Args:
            is_aside: it is kept in ``set-aside/``.
        """
        self._logs.add(log_id)
        self.aside_count += is_aside

    def _read(self) -> list[tuple[str, int]]:
        return [(name, log_id_in(self._files, f"{ASIDE_DIRECTORY}/{name}")) for name in self._names()]

    def _names(self) -> list[str]:
        try:
            names = sorted(self._files.list(ASIDE_DIRECTORY))
        except OSError:
            return []
        return [name for name in names if not name.startswith("removed-")]
