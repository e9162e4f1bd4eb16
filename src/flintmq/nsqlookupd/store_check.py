"""Whether the coordination store takes what is written: a full etcd goes on answering reads, watches and renewals.

Rules of this file:

- About once a minute, and soon after a write that failed, a compare-and-swap is sent whose comparison never holds. Who
  may write has it answered, and nothing is stored: it costs an entry of the log of etcd, and neither a revision nor
  history that would have to be compacted. So every nsqlookupd can ask, and knows it also when nobody is the master.
- What is refused counts at once; what is not answered counts when it happens twice in a row, as an etcd that elects its
  leader answers nothing for a moment.
- It is said in the log once when it begins, and once when it is over.

Source: etcd 3.5, server/etcdserver/apply.go: while the alarm NOSPACE is on, a transaction with a put is refused whether
or not it would take place, and what puts nothing is carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from flintmq.clock import Clock
from flintmq.cluster.store import Compare, Put, Store, StoreError, StoreFull, StoreRefused, Txn
from flintmq.options import SECOND

CHECK_S = 60.0
"""The pause between two checks while the store takes what is written."""
AGAIN_S = 5.0
"""The shortest pause, which is that while it does not."""
UNANSWERED_COUNT = 2
"""Checks in a row without an answer that count as much as a refusal."""
NEVER = 1
"""A key that was written has a later revision, and one that was not has 0."""

_log = logging.getLogger(__name__)


class StoreCheck:
    """The check.

    Args:
        key: a key of the cluster's own, which is never there.
        is_away: whether the store is known to be away altogether; then it is no news that it does not answer.

    Attributes:
        reason: why the store takes nothing that is written; empty: it does, as far as is known.
        since_s: since when that is so, in seconds since 1970; None while ``reason`` is empty.
        is_refused: the last check was refused: the store is there.
    """

    def __init__(self, store: Store, clock: Clock, key: str, is_away: Callable[[], bool]) -> None:
        self.reason = ""
        self.since_s: float | None = None
        self.is_refused = False
        self._store = store
        self._clock = clock
        self._key = key
        self._is_away = is_away
        self._failed_count = 0  # checks in a row
        self._failed_at_s = 0.0  # the first of them
        self._doubted = asyncio.Event()

    def doubt(self) -> None:
        """A write has failed: check soon."""
        self._doubted.set()

    async def run(self) -> None:
        """Check for ever."""
        while True:
            self._doubted.clear()
            await self.check()
            await asyncio.sleep(AGAIN_S)
            if not self._failed_count:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CHECK_S - AGAIN_S):
                        await self._doubted.wait()

    async def check(self) -> None:
        """Check once."""
        began_s = self._clock.wall_ns() / SECOND
        try:
            await self._store.txn(Txn((Compare(self._key, NEVER),), (Put(self._key, b""),)))
        except StoreError as error:
            self._failed(error, began_s)
        else:
            self._worked()

    def _failed(self, error: StoreError, began_s: float) -> None:
        if not self._failed_count:
            self._failed_at_s = began_s
        self._failed_count += 1
        self.is_refused = isinstance(error, StoreFull | StoreRefused)
        if not self.is_refused and (self._failed_count < UNANSWERED_COUNT or self._is_away()):
            return
        if not self.reason:
            self.since_s = self._failed_at_s
            _log.error(
                "CLUSTER: the coordination store takes no writes: %s. Until it does nobody is elected, and no topic is "
                "created",
                error,
            )
        self.reason = str(error)

    def _worked(self) -> None:
        self._failed_count, self.is_refused = 0, False
        if self.reason:
            self.reason, self.since_s = "", None
            _log.info("CLUSTER: the coordination store takes writes again")
