"""A lease that is kept while its holder lives, and how long the holder may rely on it.

Rules of this file:

- A renewal counts from when it was sent, and only once it was answered, on a clock that goes on while the machine is
  suspended: the store counts meanwhile.
- A store that does not answer is asked again until it says that the lease is gone, because one that comes back gives
  every lease its full time.
- Once the holder may not rely on it any more, a renewal is sent only behind a read that the store answered in time, and
  one that is not answered by then is sent no more. A store that was away answers the read at once, and nothing changes
  for it. One that carries out what it is asked and answers too late would else keep the lease for ever, for a holder
  that may never act on it: without renewals it ends there, and others are elected.
- What renews it is a thread with an event loop of its own, where there are threads: a turn of the holder's loop that
  takes two seconds is no reason to elect somebody else. It renews for as long as that loop has turned within the last
  second, so that a process that hangs does lose its lease.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from typing import Protocol, runtime_checkable

from flintmq.clock import Clock
from flintmq.cluster.store import (
    LeaseNotFound,
    OutcomeUnknown,
    Store,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    Tenure,
)
from flintmq.net.tasks import kept_up

RENEWALS_PER_TTL = 3
AGAIN_S = 0.1
"""After a renewal that failed."""
TURN_S = 0.1
"""The pause after which the holder's loop shows again that it turns."""
STANDSTILL_NS = 1_000_000_000
"""A loop that has not turned for so long may hang: nothing is renewed for it until it turns."""
LOOK_S = 0.02
"""The pause between two looks at a loop that stands still."""

_log = logging.getLogger(__name__)


@runtime_checkable
class Apart(Protocol):
    """A store that can be asked from the event loop of another thread as well."""

    def apart(self) -> AbstractAsyncContextManager[Store] | None:
        """Return another way to the same store, to be entered there; None: no threads may be started."""
        ...


def _ignore() -> None:
    pass


class HeldLease:
    """A lease of ours.

    Args:
        key: that our user of the store may read; whether it is there does not matter.
        on_change: called after every attempt to renew it.

    Attributes:
        lease_id: its id in the store.
        tenure: how long may be relied on it; it is the holder's to ask, immediately before every act.
        lost: set when the store says that it is gone.
        failure: why it was not renewed the last time; empty: it was.
        asked_at_ns: boot time since which the store is asked and has not answered; 0: it has, or that has failed.
        on_change: as it was given; may be exchanged.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        clock: Clock,
        lease_id: int,
        tenure: Tenure,
        on_change: Callable[[], object] = _ignore,
    ) -> None:
        self.lease_id = lease_id
        self.tenure = tenure
        self.lost = asyncio.Event()
        self.failure = ""
        self.asked_at_ns = 0
        self.on_change = on_change
        self._is_gone = False  # known at once, in whatever thread
        self._store = store
        self._key = key
        self._clock = clock

    @property
    def is_held(self) -> bool:
        """Whether the holder may act on it now."""
        return not self._is_gone and not self.lost.is_set() and self.tenure.is_held(self._clock.boottime_ns())

    @property
    def until_ns(self) -> int:
        """Until when in boot time the holder may act on it, unless it is renewed."""
        return self.tenure.until_ns

    @property
    def left_s(self) -> float:
        """Seconds until then; negative when it is over."""
        return (self.tenure.until_ns - self._clock.boottime_ns()) / 1e9

    async def renew(self) -> None:
        """Renew it once.

        Raises:
            LeaseNotFound: it is gone.
            StoreError: it was not renewed.
        """
        try:
            await self._renew(self._store)
        except LeaseNotFound:
            self.lost.set()
            raise

    async def _renew(self, store: Store) -> None:
        sent_at_ns = self.asked_at_ns = self._clock.boottime_ns()
        try:
            ttl_s = await store.keepalive(self.lease_id)
        except LeaseNotFound:
            self._is_gone = True
            raise
        finally:
            self.asked_at_ns = 0
        tenure = replace(self.tenure)
        tenure.renewed(sent_at_ns, ttl_s * 1_000_000_000)
        self.tenure = tenure  # as a whole: another thread may be asking

    async def _renew_if_heard(self, store: Store) -> None:
        """Renew it, behind an answer of the store where the holder may not rely on the lease.

        Raises:
            LeaseNotFound: it is gone.
            StoreError: it was not renewed.
        """
        asked_at_ns = now_ns = self._clock.boottime_ns()
        if self.tenure.is_held(now_ns):
            # what is left in the store, not to the holder: who asks why that may not act finds what is under way
            left_s = (self.tenure.sent_at_ns + self.tenure.ttl_ns - now_ns) / 1e9
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._renew(store)
                return
        await self._hear(store, asked_at_ns)
        await self._renew(store)

    async def _hear(self, store: Store, asked_at_ns: int) -> None:
        """Return when the store has answered something, whatever that is.

        Args:
            asked_at_ns: since when it has not.

        Raises:
            StoreError: it has not in time.
        """
        self.asked_at_ns = asked_at_ns
        try:
            await store.get(self._key)
        except StoreRefused:
            pass  # this is an answer as well
        finally:
            self.asked_at_ns = 0

    async def keep(self) -> None:
        """Renew it until it is gone, in a thread where the store can be asked in one."""
        way = self._store.apart() if isinstance(self._store, Apart) else None
        if way is None:
            await self._keep(self._store, self._tell, None)
        else:
            await self._keep_in_thread(way)

    async def _keep(self, store: Store, tell: Callable[[], object], turns: _Turns | None) -> None:
        while not self._is_gone:
            due_ns = self.tenure.sent_at_ns + self.tenure.ttl_ns // RENEWALS_PER_TTL
            pause_s = max(0.0, (due_ns - self._clock.boottime_ns()) / 1e9)
            await asyncio.sleep(AGAIN_S if self.failure else pause_s)
            if turns is not None and turns.is_standing_still:
                self._fails("the event loop of this process has not turned for a second")
                while turns.is_standing_still:  # noqa: ASYNC110 - what would set an event does not run
                    await asyncio.sleep(LOOK_S)
            try:
                await self._renew_if_heard(store)
            except LeaseNotFound:
                _log.warning("STORE: %s", self._why_gone())
            except StoreError as error:
                self._fails(str(error))
            else:
                self.failure = ""
            tell()

    def _why_gone(self) -> str:
        """Say what it means that the store does not have it any more."""
        ttl_s = self.tenure.ttl_ns / 1e9
        silent_s = (self._clock.boottime_ns() - self.tenure.sent_at_ns) / 1e9
        if silent_s < ttl_s:
            return (
                f"lease {self.lease_id} was ended before its time: it was revoked, or the store has lost it; what "
                "depends on it is taken from this process, which asks for another lease"
            )
        return (
            f"lease {self.lease_id} of {ttl_s:g} s has run out: it was not renewed for {silent_s:.1f} s, because this "
            "process stood still or the store could not be reached; what depends on it was taken from this process, "
            "which asks for another lease"
        )

    def _fails(self, reason: str) -> None:
        if not self.failure:
            _log.warning("STORE: lease %d is not renewed: %s", self.lease_id, reason)
        self.failure = reason

    def _tell(self) -> None:
        if self._is_gone:
            self.lost.set()
        self.on_change()

    async def _keep_in_thread(self, way: AbstractAsyncContextManager[Store]) -> None:
        """Let a thread renew it; return when it is gone, or raise what has ended the thread."""
        holder = asyncio.get_running_loop()
        ended: asyncio.Future[None] = holder.create_future()
        turns = _Turns(self._clock)
        loop = asyncio.new_event_loop()

        def tell() -> None:
            holder.call_soon_threadsafe(self._tell)

        async def work() -> None:
            async with way as store:
                await self._keep(store, tell, turns)

        task = loop.create_task(work())

        def run() -> None:
            error: BaseException | None = None
            try:
                loop.run_until_complete(task)
            except asyncio.CancelledError:
                pass
            except Exception as failure:  # noqa: BLE001 - whoever waits for it is told
                error = failure
            finally:
                loop.run_until_complete(loop.shutdown_asyncgens())
                loop.run_until_complete(loop.shutdown_default_executor())
                loop.close()
            with suppress(RuntimeError):  # nobody waits any more: the holder's loop is closed
                holder.call_soon_threadsafe(_end, ended, error)

        thread = threading.Thread(target=run, name="lease", daemon=True)
        turns.start()
        thread.start()
        try:
            await asyncio.shield(ended)
        finally:
            if not ended.done():
                with suppress(RuntimeError):  # it has just ended
                    loop.call_soon_threadsafe(task.cancel)
                await asyncio.wait({ended})
            thread.join()
            turns.stop()


class _Turns:
    """Knows when an event loop has turned last; asked by another thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._turned_ns = clock.boottime_ns()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Note it from now on, on the running loop."""
        self._turned_ns = self._clock.boottime_ns()
        self._timer = asyncio.get_running_loop().call_later(TURN_S, self.start)

    def stop(self) -> None:
        """Note it no longer."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def is_standing_still(self) -> bool:
        """Whether it has not turned for so long that it may hang."""
        return self._clock.boottime_ns() - self._turned_ns > STANDSTILL_NS


def _end(ended: asyncio.Future[None], error: BaseException | None) -> None:
    if ended.done():
        return
    if error is None:
        ended.set_result(None)
    else:
        ended.set_exception(error)


@asynccontextmanager
async def holding(
    store: Store, key: str, clock: Clock, ttl_s: int, margin_ns: int = 0, on_change: Callable[[], object] = _ignore
) -> AsyncIterator[HeldLease]:
    """Hold a lease of ``ttl_s`` seconds while the block runs; it is ended with it, if the store can be asked.

    Args:
        key: that our user of the store may read, such as the one that is to be under the lease.
        margin_ns: how much earlier than the store its holder takes it for gone.
        on_change: is called after every attempt to renew it.

    Raises:
        StoreError: it was not granted.
    """
    sent_at_ns = clock.boottime_ns()
    lease = await store.grant(ttl_s)
    tenure = Tenure(lease.ttl_s * 1_000_000_000, sent_at_ns, margin_ns)
    held = HeldLease(store, key, clock, lease.lease_id, tenure, on_change)
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
