"""Being one of a cluster: a record in the store while this process lives, and a place that only one may have.

Rules of this file:

- What is registered is there under a lease of ours, so that it goes with us; whoever loses the lease registers again
  under another.
- A record under our key is that of the process before us, whose lease runs yet: it is replaced at once by
  compare-and-swap, and what else it held goes with its lease. Of two living processes with one id, which are two copies
  of one directory, the later takes over, and the earlier one sees it and does not come back. A record that was written
  before ours, and is there again, says that the store is older than it was: it is replaced as well.
- A place is taken by compare-and-swap, under the same lease, and only while our record is the one that we wrote.
- Callbacks are told every change, in order; but nobody acts on what was told: ``is_held`` and ``is_elected`` are asked
  immediately before every act.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

from flintmq.clock import Clock
from flintmq.cluster.state import LEASE_TTL_S, BadState, LookupdRecord, NodeRecord, decode, encode
from flintmq.cluster.store import (
    Compare,
    Fate,
    KeyValue,
    LeaseNotFound,
    OutcomeUnknown,
    Snapshot,
    Span,
    Store,
    StoreError,
    StoreUnavailable,
    follow,
    swap,
)
from flintmq.net.lease import AGAIN_S, HeldLease, holding
from flintmq.net.tasks import kept_up

MARGIN_NS = 100_000_000
"""So much earlier than the store a holder takes its lease for gone: clocks do not run equally fast."""
CHECK_S = 10.0
"""The pause between two looks at our own record, which nobody else should write or delete."""

Record = NodeRecord | LookupdRecord

_log = logging.getLogger(__name__)


class Replaced(StoreError):
    """Another process that lives has registered under our id after us.

    Args:
        key: of the record.
        incarnation: of the other process.
    """

    def __init__(self, key: str, incarnation: str) -> None:
        super().__init__(
            f"another process (incarnation {incarnation}) has registered as {key} after this one, which takes part no "
            "longer: two processes use copies of one data directory. Stop one of them; remove node.id from a copy that "
            "is to be a node of its own"
        )
        self.incarnation = incarnation


def _ignore(*_: object) -> None:
    pass


def _id_of(record: Record) -> str:
    return record.node if isinstance(record, NodeRecord) else record.lookupd


def _read(pair: KeyValue, kind: type[Record]) -> Record | None:
    """Return the record of a key; None for what is none of this kind."""
    try:
        return decode(pair.key, pair.value, kind)
    except BadState as error:
        _log.warning("STORE: %s", error)
        return None


class Membership:
    """Keeps the record of this process in the store.

    Args:
        clock: counts its time as registered.
        key: of the record, which ends with the id of the process.
        record: its incarnation tells this process from the one before it.
        ttl_s: of its lease, 1 to ``LEASE_TTL_S_MAX``.
        margin_ns: it counts its lease as gone so much earlier than the store does.
        on_held: is called with the record's key and value when it is registered, and again whenever it can rely on
            that after :attr:`on_lost`.
        on_lost: is called with the reason when it cannot rely on being registered any more. It goes on to register.
        on_replaced: is called when another process has taken over its id; it does nothing more then.

    Attributes:
        listeners: are called after each of these changes.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        key: str,
        record: Record,
        ttl_s: int = LEASE_TTL_S,
        margin_ns: int = MARGIN_NS,
        on_held: Callable[[KeyValue], object] = _ignore,
        on_lost: Callable[[str], object] = _ignore,
        on_replaced: Callable[[Replaced], object] = _ignore,
    ) -> None:
        self.listeners: list[Callable[[], object]] = []
        self.key = key
        self._store = store
        self._clock = clock
        self._record = record
        self._ttl_s = ttl_s
        self._margin_ns = margin_ns
        self._on_held, self._on_lost, self._on_replaced = on_held, on_lost, on_replaced
        self._lease: HeldLease | None = None
        self._pair: KeyValue | None = None
        self._written: Record | None = None
        self._last_revision = 0  # at which we were registered
        self._is_told_held = False
        self._told_failure = ""
        self._why_ended = ""  # what the store said, when that ended the registration
        self._timer: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()
        self._is_doubted = False  # somebody has heard of another record in the place of ours
        self._changed = asyncio.Event()
        self._replaced: Replaced | None = None
        self._task: asyncio.Task[None] | None = None

    # --- asking

    @property
    def store(self) -> Store:
        """The store with its key."""
        return self._store

    @property
    def record(self) -> Record:
        """The record that is, or is to be, registered."""
        return self._record

    @property
    def lease(self) -> HeldLease | None:
        """The lease that the record is under; None while it is not registered."""
        return self._lease if self._pair is not None else None

    @property
    def pair(self) -> KeyValue | None:
        """The record as it stands in the store; None while it is not there."""
        return self._pair

    @property
    def is_held(self) -> bool:
        """Whether it can rely on being registered now."""
        return self._pair is not None and self._lease is not None and self._lease.is_held

    @property
    def until_ns(self) -> int:
        """Until when it can, on the clock of the lease, unless it is renewed; 0 while it is not registered."""
        return self._lease.until_ns if self._lease is not None and self._pair is not None else 0

    @property
    def heard_ns(self) -> int:
        """Boot time at which the last question about its lease was sent that the store has answered; 0: none was."""
        return self._lease.tenure.sent_at_ns if self._lease is not None else 0

    async def held(self) -> HeldLease:
        """Return the lease as soon as it can be relied on.

        Raises:
            Replaced: it never will.
        """
        while not self.is_held:
            if self._replaced is not None:
                raise self._replaced
            self._changed.clear()
            await self._changed.wait()
        assert self._lease is not None
        return self._lease

    async def update(self, record: Record) -> None:
        """Put another record in the place of ours; return when the store has it, or one that was given later.

        Raises:
            Replaced: there is nothing to put it in place of.
        """
        self._record = record
        self._wake.set()
        while self._written is not self._record:
            if self._replaced is not None:
                raise self._replaced
            self._changed.clear()
            await self._changed.wait()

    def doubt(self) -> None:
        """Look at our own record at once: somebody has heard that it is another process's."""
        self._is_doubted = True
        self._wake.set()

    # --- living

    def start(self) -> None:
        """Begin to register."""
        assert self._task is None
        self._task = asyncio.get_running_loop().create_task(kept_up(self._run, f"registering {self.key}"))

    async def close(self) -> None:
        """End the lease, so that everybody sees at once that this process is gone, if the store can be asked."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _run(self) -> None:
        while True:
            try:
                await self._under_one_lease()
            except Replaced as error:
                _log.critical("STORE: %s", error)
                self._replaced = error
                self._on_replaced(error)
                self._tell_listeners()
                return
            except StoreError as error:
                self._complain(error)
            await asyncio.sleep(AGAIN_S)

    def _complain(self, error: StoreError) -> None:
        """Say what is wrong, once until it has worked again."""
        if not self._told_failure:
            _log.warning("STORE: %s is not written, it is tried again: %s", self.key, error)
        self._told_failure = str(error)

    async def _under_one_lease(self) -> None:
        async with holding(self._store, self.key, self._clock, self._ttl_s, self._margin_ns, self._renewed) as lease:
            self._lease = lease
            try:
                await self._register(lease)
                await self._keep(lease)
            except Replaced:
                raise
            except StoreError as error:
                self._why_ended = str(error)
                raise
            finally:
                self._pair = self._written = None
                self._look()
                self._why_ended = ""

    async def _register(self, lease: HeldLease) -> None:
        """Write the record, in the place of what stands there.

        Raises:
            Replaced: that was written by somebody else after we were registered.
            LeaseNotFound, OutcomeUnknown, StoreUnavailable: it is not written, or that is not known.
        """
        before = await self._store.get(self.key)
        while True:
            is_other = before is not None and self._is_of_another(before)
            if before is not None and is_other and self._last_revision:
                self._give_way(before)
            await self._write(lease, before)
            if self._pair is None:
                before = await self._store.get(self.key)
                continue
            if before is not None and is_other:
                _log.info(
                    "STORE: %s was registered by the process before this one, incarnation %s; if that lives, two "
                    "processes use copies of one data directory, and it takes part no longer",
                    self.key,
                    self._incarnation_of(before),
                )
                await self._end_lease_of(before)
            return

    def _is_of_another(self, pair: KeyValue) -> bool:
        record = _read(pair, type(self._record))
        return record is None or record.incarnation != self._record.incarnation

    def _give_way(self, pair: KeyValue) -> None:
        if pair.mod_revision < self._last_revision:
            # nobody who registered after us: it is from before, and whoever wrote it is gone or is to learn of us
            _log.error(
                "STORE: the store is older than it was: it has a record %s of before this process registered, which "
                "is replaced. A backup of it was put back while this process ran: stop all nsqlookupd and nsqd and "
                "start them again",
                self.key,
            )
            return
        raise Replaced(self.key, self._incarnation_of(pair))

    def _incarnation_of(self, pair: KeyValue) -> str:
        record = _read(pair, type(self._record))
        return "unknown" if record is None else record.incarnation

    async def _write(self, lease: HeldLease, before: KeyValue | None) -> None:
        """Put our record in the place of ``before``; if that is not what stands there, ``_pair`` is None then."""
        record = self._record
        swapped = await swap(self._store, self.key, before, encode(record), lease.lease_id)
        self._pair = swapped.now if swapped.fate is Fate.APPLIED else None
        if self._pair is not None:
            self._last_revision = self._pair.mod_revision
            self._written = record
            if self._told_failure:
                _log.info("STORE: %s is written again", self.key)
                self._told_failure = ""
        self._look()

    async def _end_lease_of(self, pair: KeyValue) -> None:
        """End what the process before us held; if it lives in spite of all, it learns of us by that."""
        while pair.lease_id:
            try:
                await self._store.revoke(pair.lease_id)
                return
            except LeaseNotFound:
                return
            except (OutcomeUnknown, StoreUnavailable) as error:
                if self._lease is None or self._lease.lost.is_set():
                    _log.info("STORE: lease %d ends by itself: %s", pair.lease_id, error)
                    return
                await asyncio.sleep(AGAIN_S)

    async def _keep(self, lease: HeldLease) -> None:
        """Stay registered until the lease is gone, or the record.

        Raises:
            Replaced: somebody else's is in its place.
        """
        while not lease.lost.is_set():
            is_time_to_check = False
            if self._written is self._record and not self._is_doubted:
                self._wake.clear()
                if lease.lost.is_set():
                    return
                try:
                    async with asyncio.timeout(CHECK_S):
                        await self._wake.wait()
                except TimeoutError:
                    is_time_to_check = True
            try:
                if is_time_to_check or self._is_doubted:
                    self._is_doubted = False
                    if await self._store.get(self.key) != self._pair:
                        await self._write_again(lease)
                elif self._written is not self._record and not lease.lost.is_set():
                    before = self._pair
                    await self._write(lease, before)
                    if self._pair is None:
                        await self._write_again(lease)
            except (OutcomeUnknown, StoreUnavailable) as error:
                self._complain(error)
                await asyncio.sleep(AGAIN_S)
                await self._find_again(lease)
            except LeaseNotFound:
                return

    async def _write_again(self, lease: HeldLease) -> None:
        """Write a record that was deleted; give way to one that somebody else has written."""
        self._pair = None
        self._look()
        await self._register(lease)

    async def _find_again(self, lease: HeldLease) -> None:
        """Read what became of a write that was not answered."""
        while not lease.lost.is_set():
            try:
                now = await self._store.get(self.key)
            except StoreUnavailable:
                await asyncio.sleep(AGAIN_S)
                continue
            if now is None or self._is_of_another(now) or now.lease_id != lease.lease_id:
                await self._write_again(lease)
            elif now != self._pair:
                self._pair = now
                self._last_revision = now.mod_revision
                self._look()
            return

    # --- telling

    def _renewed(self) -> None:
        """The lease was renewed, or lost, or neither could be done."""
        if self._lease is not None and self._lease.lost.is_set():
            self._wake.set()
        self._look()

    def _look(self) -> None:
        """Tell whoever has to know that something is not as it was."""
        is_held = self.is_held
        if is_held and self._timer is None:
            self._set_timer()
        pair = self._pair
        if is_held != self._is_told_held:
            self._is_told_held = is_held
            if is_held:
                assert pair is not None
                _log.info("STORE: %s is registered", self.key)
                self._on_held(pair)
            else:
                reason = self._why_lost()
                _log.warning("STORE: %s is not registered any more: %s", self.key, reason)
                self._on_lost(reason)
        self._tell_listeners()

    def _why_lost(self) -> str:
        lease = self._lease
        if self._task is None or self._task.cancelling():
            return "this process ends"
        if lease is None or lease.lost.is_set():
            return "its lease has run out or was revoked"
        if self._pair is None:
            return self._why_ended or "its record was deleted or replaced"
        return f"its lease was not renewed in time: {lease.failure or self._why_late(lease)}"

    def _why_late(self, lease: HeldLease) -> str:
        """Tell the store that says nothing from ourselves: it was asked in time, or it was not."""
        if 0 < lease.asked_at_ns < lease.until_ns:
            silent_s = (self._clock.boottime_ns() - lease.asked_at_ns) / 1e9
            return f"the store has been asked for {silent_s:.1f} s and has not answered"
        return "this process was held up"

    def _set_timer(self) -> None:
        assert self._lease is not None
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, self._lease.left_s), self._time_is_over)

    def _time_is_over(self) -> None:
        self._timer = None
        self._look()

    def _tell_listeners(self) -> None:
        self._changed.set()
        for listener in self.listeners:
            listener()


class Candidacy:
    """Competes for a place that one process has at a time, such as that of the master.

    Who has it keeps it until its lease is gone or it resigns; the next one has it as soon as the store says so.

    Args:
        membership: whose record is written to the place, under its lease.
        key: of the place.
        on_elected: is called with the key and value of the place when it has it; its ``mod_revision`` is a number
            that grows from one election to the next.
        on_lost: is called with the reason when it cannot rely on having it any more.
    """

    def __init__(
        self,
        membership: Membership,
        key: str,
        on_elected: Callable[[KeyValue], object] = _ignore,
        on_lost: Callable[[str], object] = _ignore,
    ) -> None:
        self.key = key
        self._membership = membership
        self._on_elected, self._on_lost = on_elected, on_lost
        self._pair: KeyValue | None = None
        self._lease_id = 0
        self._is_told_elected = False
        self._is_resigning = False
        self._told_failure = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def is_elected(self) -> bool:
        """Whether it can rely on having the place now."""
        lease = self._membership.lease
        return (
            not self._is_resigning
            and self._pair is not None
            and lease is not None
            and lease.lease_id == self._lease_id
            and self._membership.is_held
        )

    @property
    def pair(self) -> KeyValue | None:
        """The place as it stands in the store while it is ours; None while it is not."""
        return self._pair

    @property
    def guard(self) -> Compare:
        """A condition for transactions: it holds until somebody else has the place; ask only while it is ours."""
        assert self._pair is not None
        return Compare(self.key, self._pair.mod_revision)

    def start(self) -> None:
        """Begin to compete."""
        assert self._task is None
        self._is_resigning = False
        self._membership.listeners.append(self._look)
        self._task = asyncio.get_running_loop().create_task(kept_up(self._run, f"competing for {self.key}"))

    async def resign(self) -> None:
        """Compete no longer, and leave the place to the next one; ``on_lost`` is called before it is.

        If the store cannot be asked, the place is free once the lease is gone.
        """
        if self._task is None:
            return
        self._is_resigning = True
        self._look()
        self._task.cancel()
        await asyncio.wait({self._task})
        self._task = None
        self._membership.listeners.remove(self._look)
        pair, self._pair = self._pair, None
        lease = self._membership.lease
        if pair is None or lease is None or lease.lease_id != self._lease_id:
            return
        try:
            await swap(self._membership.store, self.key, pair, None)
        except StoreError as error:
            _log.info("STORE: %s is left when the lease ends: %s", self.key, error)

    async def _run(self) -> None:
        while True:
            try:
                lease = await self._membership.held()
            except Replaced:
                return
            try:
                await self._under_one_lease(lease)
                self._told_failure = ""
            except StoreError as error:
                if str(error) != self._told_failure:
                    _log.warning("STORE: competing for %s goes on: %s", self.key, error)
                    self._told_failure = str(error)
            await asyncio.sleep(AGAIN_S)

    async def _under_one_lease(self, lease: HeldLease) -> None:
        """Compete until the lease is gone."""
        loop = asyncio.get_running_loop()
        competing, losing = loop.create_task(self._compete(lease)), loop.create_task(lease.lost.wait())
        both: set[asyncio.Task[object]] = {competing, losing}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            await asyncio.wait(both)
        if not competing.cancelled() and (error := competing.exception()) is not None:
            raise error

    async def _compete(self, lease: HeldLease) -> None:
        async with aclosing(follow(self._membership.store, Span.of_key(self.key))) as following:
            async for told in following:
                if isinstance(told, Snapshot):
                    revision, now = told.revision, told.found[0] if told.found else None
                else:
                    revision, now = told.events[-1].revision, told.events[-1].now
                if self._pair is None or revision > self._pair.mod_revision:
                    await self._seen(lease, now)

    async def _seen(self, lease: HeldLease, now: KeyValue | None) -> None:
        """Take note of who has the place, and take it if that is nobody, or the process before this one."""
        membership = self._membership
        record = None if now is None else _read(now, type(membership.record))
        if now is not None and (record is None or _id_of(record) != _id_of(membership.record)):
            self._has(lease, None)
            return
        if record is not None and now is not None and now.lease_id == lease.lease_id:
            if record.incarnation == membership.record.incarnation:
                self._has(lease, now)
                return
        self._has(lease, None)
        registered = membership.pair
        if registered is None:
            raise StoreUnavailable(f"{membership.key} is not registered")
        guards = (Compare(membership.key, registered.mod_revision),)
        swapped = await swap(membership.store, self.key, now, encode(membership.record), lease.lease_id, guards=guards)
        if swapped.fate is Fate.APPLIED:
            self._has(lease, swapped.now)
        elif swapped.now == now:
            raise StoreUnavailable(f"{membership.key} was changed")

    def _has(self, lease: HeldLease, pair: KeyValue | None) -> None:
        self._pair = pair
        self._lease_id = lease.lease_id
        self._look()

    def _look(self) -> None:
        is_elected = self.is_elected
        if is_elected == self._is_told_elected:
            return
        self._is_told_elected = is_elected
        if is_elected:
            assert self._pair is not None
            _log.info("STORE: this process has %s, elected at revision %d", self.key, self._pair.mod_revision)
            self._on_elected(self._pair)
        else:
            reason = "it resigns" if self._is_resigning else "somebody else has it, or its lease is gone"
            _log.info("STORE: this process has %s no longer: %s", self.key, reason)
            self._on_lost(reason)
