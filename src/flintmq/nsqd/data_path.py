"""Notices when the data path leads to another directory than the one that this nsqd began with.

All goes on in that directory (:class:`flintmq.storage.OsFiles`), so nothing is split between two. But the next start
would not find it, and somebody has to know: ``/ping`` says so, and the log does once.

Rules of this file: the file system is asked in a worker thread, as what is mounted there may not answer.
"""

from __future__ import annotations

import asyncio
import logging

from flintmq.env import Env
from flintmq.net.tasks import Tasks, kept_up
from flintmq.storage import OsFiles

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks."""


class DataPathWatch:
    """Looks at the data path once a second.

    Attributes:
        problem: what is wrong with it; empty when nothing is.
    """

    def __init__(self, env: Env, files: OsFiles) -> None:
        self._env = env
        self._files = files
        self._tasks: Tasks | None = None
        self.problem = ""

    def start(self) -> None:
        """Begin to look."""
        self._tasks = Tasks(asyncio.get_running_loop())
        self._tasks.begin(kept_up(self._watch, "watching the data path"), "watching the data path")

    async def _watch(self) -> None:
        while True:
            self._found(await self._env.run_blocking(self._files.displaced))
            await asyncio.sleep(LOOK_S)

    def _found(self, problem: str) -> None:
        if bool(problem) != bool(self.problem):
            if problem:
                log.error("%s", problem)
            else:
                log.warning("the data path %s is the directory of the start again", self._files.root)
        self.problem = problem

    async def close(self) -> None:
        """Look no more; does not wait for a file system that does not answer."""
        if self._tasks is not None:
            await self._tasks.close()
