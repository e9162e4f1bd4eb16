"""The right to lead: this node's lease, or without one what every replica confirms.

::

    look, before every turn's end --> the lease is held: all goes on
                                  --> it is not: what the in-sync replicas have just confirmed goes on
                                                 the rest is fenced

Rules of this file: nobody acts on what was told; :meth:`Lease.look` is asked immediately before anything is
acknowledged or delivered. It is asked each turn, so it costs nothing while nothing changes.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from flintmq.clock import Clock
from flintmq.cluster.keys import Keys
from flintmq.cluster.state import NodeRecord
from flintmq.cluster.store import KeyValue, Store
from flintmq.cluster.view import View
from flintmq.net.membership import Membership, Replaced
from flintmq.nsqd.cluster.led import Led
from flintmq.nsqd.cluster.seen import name_of
from flintmq.nsqd.cluster.table import Table

log = logging.getLogger(__name__)

_FOREVER_NS = 1 << 63


class Lease:
    """Knows what may be led.

    Args:
        table: of what is led.
        on_held: called when this node is registered, and again whenever it can rely on that after it could not.
        on_fenced: called with what may not be acknowledged or delivered any more, and why.
        on_freed: called with what may be again.
        on_replaced: called once when another process has registered as this node: nothing is led here from then on.

    Attributes:
        problem: why this node takes no part any more; empty: it does.
    """

    def __init__(
        self,
        clock: Clock,
        store: Store,
        keys: Keys,
        view: View,
        table: Table,
        on_held: Callable[[], None],
        on_fenced: Callable[[Led, str], None],
        on_freed: Callable[[Led], None],
        on_replaced: Callable[[], None],
    ) -> None:
        self.problem = ""
        self._clock = clock
        self._store = store
        self._keys = keys
        self._view = view
        self._led = table.led
        self._on_held = on_held
        self._on_fenced = on_fenced
        self._on_freed = on_freed
        self._when_replaced = on_replaced
        self._membership: Membership | None = None
        self._has_membership = asyncio.Event()
        self._is_held = False
        self._confirmed_until_ns = 0  # until then, no lease is needed for what is led here and not fenced
        self._fenced: dict[Led, None] = {}
        self._is_closing = False

    # -- being registered ----------------------------------------------------------------------------------------------

    def begin(self, record: NodeRecord) -> None:
        """Register this process from now on."""
        key = self._keys.node(record.node)
        self._membership = Membership(
            self._store,
            self._clock,
            key,
            record,
            on_held=self._held,
            on_lost=self._lost,
            on_replaced=self._replaced,
        )
        self._membership.start()
        self._has_membership.set()

    async def lease_id(self) -> int:
        """Return the id of the lease that this node is registered with, as soon as it is.

        Raises:
            Replaced: it never will be.
        """
        await self._has_membership.wait()
        assert self._membership is not None
        return (await self._membership.held()).lease_id

    async def update(self, record: NodeRecord) -> None:
        """Register with another record, if this process registers at all yet."""
        if self._membership is None:
            return
        try:
            await self._membership.update(record)
        except Replaced as error:
            log.error("CLUSTER: %s", error)

    def doubt(self) -> None:
        """Find out at once whether another process has registered as this node."""
        if self._membership is not None:
            self._membership.doubt()

    def end(self, why: str = "this node ends") -> None:
        """Hold all that is led here; nothing of it goes on any more."""
        self._is_closing = True
        for led in list(self._led.values()):
            self._fence(led, why)

    async def close(self) -> None:
        """Give the lease back."""
        if self._membership is not None:
            await self._membership.close()

    def _held(self, pair: KeyValue) -> None:
        self.look_at_all()
        self._on_held()

    def _lost(self, reason: str) -> None:
        self.look_at_all()

    def _replaced(self, error: Replaced) -> None:
        self.problem = str(error)
        self.end("another process has registered as this node")
        self._when_replaced()

    # -- asking --------------------------------------------------------------------------------------------------------

    @property
    def is_registered(self) -> bool:
        """Whether the lease runs."""
        return self._membership is not None and self._membership.is_held

    @property
    def is_held(self) -> bool:
        """Whether the lease runs, and what is led here is what the store said when it began."""
        membership = self._membership
        if membership is None or not membership.is_held:
            return False
        assert membership.pair is not None
        # who was gone for the store has to know first what happened meanwhile
        return self._view.revision >= membership.pair.mod_revision

    def may_act(self, led: Led) -> bool:
        """Whether this moment something may be acknowledged and delivered; what may not is fenced."""
        if not self._is_closing and led.may_act(self.is_registered, self._clock.monotonic_ns()):
            return True
        self.look_at_all()
        return False

    # -- looking -------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Before a turn ends: fence what may not be acknowledged or delivered any more."""
        if not self._led:
            return
        is_held = self.is_held
        if is_held is not self._is_held or (not is_held and self._clock.monotonic_ns() >= self._confirmed_until_ns):
            self.look_at_all()

    def look_at_all(self) -> None:
        """Fence, or let go on, what is led here; find out until when it need not be looked at again."""
        is_held = self.is_held
        now_ns = self._clock.monotonic_ns()
        self._is_held = is_held
        until_ns = _FOREVER_NS
        for led in list(self._led.values()):
            its_until_ns = self._until_ns(led)
            if self._is_closing or (its_until_ns is not None and now_ns >= its_until_ns):
                self._fence_once(led)
            else:
                self._let_go_on(led)
                if its_until_ns is not None and its_until_ns < until_ns:
                    until_ns = its_until_ns
        self._confirmed_until_ns = until_ns

    def look_at(self, led: Led) -> None:
        """As :meth:`look_at_all`, for one that has just begun to be led, or is about to be led by others: there may be
        thousands that are not.
        """
        if self.is_held is not self._is_held:
            self.look_at_all()
            return
        until_ns = self._until_ns(led)
        if self._is_closing or (until_ns is not None and self._clock.monotonic_ns() >= until_ns):
            self._fence_once(led)
        elif until_ns is not None:
            self._confirmed_until_ns = min(self._confirmed_until_ns, until_ns)

    def look_at_fenced(self, now_ns: int) -> None:
        """Let go on what may: followers may have confirmed it since."""
        for led in list(self._fenced):
            until_ns = self._until_ns(led)
            if not self._is_closing and (until_ns is None or now_ns < until_ns):
                self._let_go_on(led)
                self._confirmed_until_ns = min(self._confirmed_until_ns, until_ns or _FOREVER_NS)

    def _until_ns(self, led: Led) -> int | None:
        """Return until when something may be acknowledged and delivered; None: for as long as the lease is held."""
        if led.leading.gives_up:
            return 0
        return None if self._is_held else led.leading.confirmed_until_ns()

    def members_changed(self) -> None:
        """Others may have to confirm something: look at once when it is asked."""
        self._confirmed_until_ns = 0

    def forget(self, led: Led) -> None:
        """It is led here no longer."""
        self._fenced.pop(led, None)

    def _let_go_on(self, led: Led) -> None:
        if led.is_fenced:
            led.is_fenced = False
            self._fenced.pop(led, None)
            self._on_freed(led)
            log.warning("CLUSTER: %s goes on", name_of(led.leading))

    def _fence_once(self, led: Led) -> None:
        if not led.is_fenced:
            why = "its lease is gone, and not every replica confirms that it leads"
            self._fence(led, "others are to lead it" if led.leading.gives_up else why)

    def _fence(self, led: Led, why: str) -> None:
        led.is_fenced = True
        self._fenced[led] = None
        log.warning("CLUSTER: %s is held: %s", name_of(led.leading), why)
        self._on_fenced(led, why)
