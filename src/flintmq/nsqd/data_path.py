"""Notices when the data path leads to another directory than the one that this nsqd began with, and when files that it
works in were removed.

::

    mounted over, moved, a link changed --> all goes on in the directory of the start; /ping says so
    channels.db is not in it any more   --> all of it goes with this process: nothing more is taken, nor led
    a log has no segment any more       --> the same of its partition

What was removed can still be read here, as its files are open, so consumers can go on and save it. But nothing that is
written reaches the next start, so no publish may be answered with OK.

Rules of this file: the file system is asked in a worker thread, as what is mounted there may not answer. What cannot be
asked is not taken for removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from flintmq.env import Env
from flintmq.net.tasks import Tasks, kept_up
from flintmq.storage import OsFiles, PartitionLog
from flintmq.storage.channel_store import DATABASE_NAME

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks."""
LOGS_MAX = 128
"""Logs that are looked at in one look: all of them in turns."""
_SUFFIX = ".log"


class DataPathWatch:
    """Looks at the data path once a second.

    Args:
        logs: returns the logs that have files.
        on_removed: called at each look once the files of this nsqd were removed, with what to say.
        on_log_removed: told of a log whose files were removed.

    Attributes:
        problem: what is wrong with it; empty when nothing is.
        removed: the same, where what is stored was removed, and stays so; empty: it was not.
    """

    def __init__(
        self,
        env: Env,
        files: OsFiles,
        logs: Callable[[], Sequence[PartitionLog]] = tuple,
        on_removed: Callable[[str], None] = lambda _why: None,
        on_log_removed: Callable[[PartitionLog], None] = lambda _log: None,
    ) -> None:
        self._env = env
        self._files = files
        self._logs = logs
        self._on_removed = on_removed
        self._on_log_removed = on_log_removed
        self._tasks: Tasks | None = None
        self._has_database = False  # as seen: only what was there can have been removed
        self._next = 0
        self._missed: set[PartitionLog] = set()  # had none when they were looked at last
        self.problem = ""
        self.removed = ""

    def start(self) -> None:
        """Begin to look; the data directory is in use."""
        with contextlib.suppress(OSError):
            self._has_database = DATABASE_NAME in self._files.list("")
        self._tasks = Tasks(asyncio.get_running_loop())
        self._tasks.begin(kept_up(self._watch, "watching the data path"), "watching the data path")

    async def _watch(self) -> None:
        while True:
            if not self.removed:
                await self._look_for_database()
            if self.removed:
                self._on_removed(self.removed)  # each time: topics may be made meanwhile
            else:
                self._found(await self._env.run_blocking(self._files.displaced))
                await self._look_for_segments()
            await asyncio.sleep(LOOK_S)

    async def _look_for_database(self) -> None:
        try:
            has_database = DATABASE_NAME in await self._env.run_blocking(self._files.list, "")
        except OSError:
            return
        if self._has_database and not has_database:
            self.problem = self.removed = (
                f"the content of the data directory {self._files.root} was removed while nsqd ran ({DATABASE_NAME} is "
                "missing): all that is stored here goes when nsqd ends, and nothing more is taken; let consumers "
                "finish what they can, then restart nsqd"
            )
            log.critical("%s", self.removed)
        self._has_database = self._has_database or has_database

    async def _look_for_segments(self) -> None:
        logs = self._logs()
        looked = logs[self._next : self._next + LOGS_MAX]
        self._next = self._next + LOGS_MAX if self._next + LOGS_MAX < len(logs) else 0
        looked = [each for each in looked if each.next_sequence > 1]  # others may have no file yet
        found = await self._env.run_blocking(self._have_segments, [each.directory for each in looked])
        is_there = set(self._logs())
        missed = self._missed & is_there
        for each, has_segment in zip(looked, found, strict=True):
            if has_segment is not False or each not in is_there:  # it is removed on purpose
                missed.discard(each)
            elif each in missed:  # twice: a log is without for a moment while it begins anew
                self._on_log_removed(each)
            else:
                missed.add(each)
        self._missed = missed

    def _have_segments(self, directories: Sequence[str]) -> list[bool | None]:
        return [self._has_segment_file(each) for each in directories]

    def _has_segment_file(self, directory: str) -> bool | None:
        try:
            return any(name.endswith(_SUFFIX) for name in self._files.list(directory))
        except OSError:
            return None

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
