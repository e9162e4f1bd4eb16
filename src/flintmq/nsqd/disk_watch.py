"""Whether the disk has room for publishes: what ``/ping`` says of it, and what the log does.

::

    no more than the reserve is free, or a publish found no room --> full: a WARNING
    room again for what was refused, for some time               --> an INFO

While there is no room, what is consumed and stands in segments that are still written to is to go as well.

Rules of this file: ``/ping`` says what is so now. The log has one line for each change, never one for each publish,
and a disk that goes to and fro is told of ever more seldom: the log may be on it. Once a second the file system is
asked in a worker thread, as what is mounted there may not answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from flintmq.env import Env
from flintmq.errors import DiskFull
from flintmq.limits import BATCH_SIZE_MAX, DISK_RESERVE_BYTES
from flintmq.net.tasks import Tasks, kept_up
from flintmq.storage import Files

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks."""
ROOM_BYTES = DISK_RESERVE_BYTES + BATCH_SIZE_MAX
"""With so much free there is room for whatever is published at once."""
HOLD_NS_MIN = 5_000_000_000
HOLD_NS_MAX = 300_000_000_000
"""Nanoseconds with room before the log says so: twice as many as before where that was too soon, at most the latter."""


class DiskWatch:
    """Looks at the room on the disk of the data directory.

    Args:
        data_path: of the data directory, for people.
        refused: returns why a publish was refused for lack of room last, another error each time; None: none was.
        make_room: called at each look while there is no room, with the bytes that are wanted.
        is_short: returns whether somebody else finds that there is too little room, until ``ROOM_BYTES`` are free.
    """

    def __init__(
        self,
        env: Env,
        files: Files,
        data_path: str,
        refused: Callable[[], DiskFull | None],
        make_room: Callable[[int], None] = lambda _wanted_bytes: None,
        is_short: Callable[[], bool] = lambda: False,
    ) -> None:
        self._env = env
        self._files = files
        self._data_path = data_path
        self._refused = refused
        self._make_room = make_room
        self._is_short = is_short
        self._tasks: Tasks | None = None
        self._is_full = False  # as the log has it
        self._seen: DiskFull | None = None
        self._lack: DiskFull | None = None  # there is to be room for this; None: for anything
        self._lacked_ns = 0
        self._freed_ns: int | None = None
        self._hold_ns = HOLD_NS_MIN

    def full(self, error: DiskFull | None) -> DiskFull | None:
        """Return why a publish would find no room now; without publishes nothing else would tell.

        Args:
            error: that one was answered with last, if nothing was stored since.
        """
        try:
            free = self._files.free_bytes()
        except OSError:
            return error
        # where a write found no room although the file system said there was (a quota), the same is not believed again
        is_doubtful = error is not None and free <= error.free_bytes
        if not is_doubtful and not _is_lacking(free, error):
            return None
        return error or DiskFull(self._data_path, free, DISK_RESERVE_BYTES)

    def start(self) -> None:
        """Look at once, and from then on."""
        self._tasks = Tasks(asyncio.get_running_loop())
        self._tasks.begin(kept_up(self._watch, "watching the disk"), "watching the disk")

    async def _watch(self) -> None:
        while True:
            try:
                free = await self._env.run_blocking(self._files.free_bytes)
            except OSError:
                pass  # whoever watches the data path tells
            else:
                self.look(free, self._env.clock.monotonic_ns())
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        """Look no more; does not wait for a file system that does not answer."""
        if self._tasks is not None:
            await self._tasks.close()

    def look(self, free: int, now_ns: int) -> None:
        """Tell the log what has changed.

        Args:
            free: bytes that the disk has.
            now_ns: monotonic time.
        """
        refused = self._refused()
        is_new = refused is not None and refused is not self._seen
        if is_new:
            self._seen = self._lack = refused
        is_lacking = is_new or _is_lacking(free, self._lack)
        if is_lacking:
            self._lacked_ns = now_ns
            if not self._is_full:
                self._begin(self._lack or DiskFull(self._data_path, free, DISK_RESERVE_BYTES), now_ns)
        elif self._is_full and now_ns - self._lacked_ns >= self._hold_ns:
            self._is_full, self._lack, self._freed_ns = False, None, now_ns
            log.info("the disk of %s has room again: %d bytes are free", self._data_path, free)
        # where a write found no room although there is some (a quota), what is free says nothing
        wanted = max(ROOM_BYTES - free, BATCH_SIZE_MAX if is_new else 0)
        if wanted > 0 and (is_lacking or self._is_short()):
            self._make_room(wanted)

    def _begin(self, full: DiskFull, now_ns: int) -> None:
        self._is_full = True
        is_soon = self._freed_ns is not None and now_ns - self._freed_ns < 2 * HOLD_NS_MAX
        self._hold_ns = min(2 * self._hold_ns, HOLD_NS_MAX) if is_soon else HOLD_NS_MIN
        log.warning(
            "publishes are refused, the disk of %s is full: it has %d bytes free, %d are always kept free%s; make room "
            "(consume, empty topics, --retention-bytes, or what else is on it) and it goes on by itself",
            self._data_path,
            full.free_bytes,
            full.needed_bytes,
            f", and {full.size_bytes} more were to be stored" if full.size_bytes else "",
        )


def _is_lacking(free: int, error: DiskFull | None) -> bool:
    """Return whether there is no room for what was refused, or without that for the smallest message."""
    if error is None:
        return free <= DISK_RESERVE_BYTES
    return free < error.needed_bytes + max(1, error.size_bytes)
