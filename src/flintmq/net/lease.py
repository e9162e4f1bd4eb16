"""A lease that is kept while its holder lives, and how long the holder may rely on it.

Rules of this file: a renewal counts from when it was sent, and only once it was answered; a store that does not answer
is asked again until it says that the lease is gone, because one that comes back gives every lease its full time.

Source: design/cluster.md section 3 rule 6, H11.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from flintmq.clock import Clock
from flintmq.cluster.store import LeaseNotFound, OutcomeUnknown, Store, StoreError, StoreUnavailable, Tenure
from flintmq.net.tasks import kept_up

RENEWALS_PER_TTL = 3
AGAIN_S = 0.1
"""After a renewal that failed."""

_log = logging.getLogger(__name__)


def _ignore() -> None:
    pass


class HeldLease:
    """A lease of ours.

    Attributes:
        lease_id: its id in the store.
        tenure: how long may be relied on it; it is the holder's to ask, immediately before every act.
        lost: set when the store says that it is gone.
        failure: why it was not renewed the last time; empty: it was.
        on_change: called after every attempt to renew it.
    """

    def __init__(
        self, store: Store, clock: Clock, lease_id: int, tenure: Tenure, on_change: Callable[[], object] = _ignore
    ) -> None:
        self.lease_id = lease_id
        self.tenure = tenure
        self.lost = asyncio.Event()
        self.failure = ""
        self.on_change = on_change
        self._store = store
        self._clock = clock

    @property
    def is_held(self) -> bool:
        """Whether the holder may act on it now."""
        return not self.lost.is_set() and self.tenure.is_held(self._clock.monotonic_ns())

    @property
    def until_ns(self) -> int:
        """Until when the holder may act on it, unless it is renewed."""
        return self.tenure.until_ns

    @property
    def left_s(self) -> float:
        """Seconds until then; negative when it is over."""
        return (self.tenure.until_ns - self._clock.monotonic_ns()) / 1e9

    async def renew(self) -> None:
        """Renew it once.

        Raises:
            LeaseNotFound: it is gone.
            StoreError: it was not renewed.
        """
        sent_at_ns = self._clock.monotonic_ns()
        try:
            ttl_s = await self._store.keepalive(self.lease_id)
        except LeaseNotFound:
            self.lost.set()
            raise
        self.tenure.renewed(sent_at_ns, ttl_s * 1_000_000_000)

    async def keep(self) -> None:
        """Renew it until it is gone."""
        while True:
            due_ns = self.tenure.sent_at_ns + self.tenure.ttl_ns // RENEWALS_PER_TTL
            pause_s = max(0.0, (due_ns - self._clock.monotonic_ns()) / 1e9)
            await asyncio.sleep(AGAIN_S if self.failure else pause_s)
            try:
                await self.renew()
            except LeaseNotFound as error:
                _log.error("STORE: %s", error)
                self.on_change()
                return
            except StoreError as error:
                if not self.failure:
                    _log.warning("STORE: lease %d is not renewed: %s", self.lease_id, error)
                self.failure = str(error)
            else:
                self.failure = ""
            self.on_change()


@asynccontextmanager
async def holding(
    store: Store, clock: Clock, ttl_s: int, margin_ns: int = 0, on_change: Callable[[], object] = _ignore
) -> AsyncIterator[HeldLease]:
    """Hold a lease of ``ttl_s`` seconds while the block runs; it is ended with it, if the store can be asked.

    Args:
        margin_ns: how much earlier than the store its holder takes it for gone.
        on_change: is called after every attempt to renew it.

    Raises:
        StoreError: it was not granted.
    """
    sent_at_ns = clock.monotonic_ns()
    lease = await store.grant(ttl_s)
    tenure = Tenure(lease.ttl_s * 1_000_000_000, sent_at_ns, margin_ns)
    held = HeldLease(store, clock, lease.lease_id, tenure, on_change)
    keeping = asyncio.get_running_loop().create_task(kept_up(held.keep, "renewing a lease", pause_s=AGAIN_S))
    try:
        yield held
    finally:
        keeping.cancel()
        await asyncio.wait({keeping})
        if not held.lost.is_set():
            try:
                await store.revoke(lease.lease_id)
            except LeaseNotFound:
                pass
            except (StoreUnavailable, OutcomeUnknown) as error:
                _log.info("STORE: lease %d ends by itself: %s", lease.lease_id, error)
        held.lost.set()
