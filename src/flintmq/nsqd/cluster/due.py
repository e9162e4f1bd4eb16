"""Partitions of the cluster whose role here has to be looked at, and the ends of what was done with them.

Rules of this file: one thing at a time is done with a partition; what the store says meanwhile is looked at when that
has ended, however it ended.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable

from flintmq.cluster.view import PartitionId
from flintmq.errors import DiskFull, FlintError
from flintmq.nsqd.cluster.rounds import Failures, Rounds
from flintmq.nsqd.cluster.table import Copy

log = logging.getLogger(__name__)

FAILED_AGAIN_S = 1.0
"""After something that was done with a copy failed."""


class Due(Rounds[PartitionId]):
    """Has partitions settled.

    Args:
        settle: one of them.
        may_settle: whether any may be now.
        schedule: has the turn ended, so that what was begun is written.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        settle: Callable[[PartitionId], None],
        may_settle: Callable[[], bool],
        schedule: Callable[[], None],
    ) -> None:
        super().__init__(loop, settle, lambda partition: "{}/{}".format(*partition), may_settle, schedule)
        self._schedule = schedule
        self._failures = Failures(loop)

    def ended(self, copy: Copy, error: BaseException | None, what: str) -> None:
        """Something that was done with a copy has ended.

        Args:
            error: that it ended with; it is told. That there is no room on the disk is told of one copy for all.
            what: it was.
        """
        copy.is_busy = False
        if error is not None:
            cause = error.__cause__
            is_full = any(map(_is_full, (error, cause)))
            if self._failures.is_new(what if is_full else (copy.partition, what), (type(error), type(cause))):
                trace = None if isinstance(error, FlintError | ValueError | OSError) else error
                more = "; it is said of this copy alone until it goes well with one" if is_full else ""
                log.error("CLUSTER: %s/%d: %s failed: %s%s", *copy.partition, what, error, more, exc_info=trace)
            self.note_later(copy.partition, FAILED_AGAIN_S)
        else:
            self._failures.clear(what)
            self._failures.clear((copy.partition, what))
            self.note(copy.partition)
        self._schedule()


def _is_full(error: BaseException | None) -> bool:
    return isinstance(error, DiskFull) or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT))
