"""Whether this node's disk has room: who has none leads nothing that another replica in sync can lead.

::

    less room than FULL_BYTES, or a write that found none --> full --> the master elects others, where there are any
    more than ROOM_BYTES again, and some time without such a write --> not full

Rules of this file: what it says goes back and forth ever more slowly, so that nobody is elected again and again where
the file system says that there is room and writes find none (a quota).

Source: docs/decisions/0017.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from flintmq.errors import DiskFull
from flintmq.limits import BATCH_SIZE_MAX, DISK_RESERVE_BYTES

log = logging.getLogger(__name__)

FULL_BYTES = DISK_RESERVE_BYTES + 16 * 1024 * 1024
"""Less than this, and others are to lead: a moment before publishes are refused."""
ROOM_BYTES = DISK_RESERVE_BYTES + BATCH_SIZE_MAX
LOOK_NS = 500_000_000
HOLD_NS_MIN = 5_000_000_000
HOLD_NS_MAX = 60_000_000_000
"""For so long at least it is full, after a write that found no room: twice as long when that was too short."""


class DiskRoom:
    """Looks at the room.

    Args:
        free_bytes: returns how much there is.
        write_errors: return why the last write of each kind failed; None when it did not.
        on_change: called when :attr:`is_full` has changed.

    Attributes:
        is_full: there is too little.
    """

    def __init__(
        self,
        free_bytes: Callable[[], int],
        write_errors: Sequence[Callable[[], object]],
        on_change: Callable[[], None],
    ) -> None:
        self._free_bytes = free_bytes
        self._write_errors = write_errors
        self._on_change = on_change
        self.is_full = False
        self._seen: list[object] = []
        self._looked_ns = 0
        self._failed_ns: int | None = None
        self._freed_ns: int | None = None
        self._hold_ns = HOLD_NS_MIN

    def tick(self, now_ns: int) -> None:
        """Look again, ten times a second."""
        errors = [error for each in self._write_errors if isinstance(error := each(), DiskFull)]
        is_new = not all(any(error is seen for seen in self._seen) for error in errors)
        self._seen = list(errors)
        if is_new:
            self._failed_ns = now_ns
        if not is_new and now_ns - self._looked_ns < LOOK_NS:
            return
        self._looked_ns = now_ns
        free = self._free_bytes()
        if not self.is_full and (is_new or free < FULL_BYTES):
            is_soon = self._freed_ns is not None and now_ns - self._freed_ns < 2 * HOLD_NS_MAX
            self._hold_ns = min(2 * self._hold_ns, HOLD_NS_MAX) if is_new and is_soon else HOLD_NS_MIN
            self._set(True, f"the disk has {free} bytes left: others are to lead, where they can")
        elif self.is_full and free >= ROOM_BYTES:
            if self._failed_ns is None or now_ns - self._failed_ns >= self._hold_ns:
                self._freed_ns = now_ns
                self._set(False, f"the disk has room again, {free} bytes")

    def _set(self, is_full: bool, why: str) -> None:
        self.is_full = is_full
        log.warning("CLUSTER: %s", why)
        self._on_change()
