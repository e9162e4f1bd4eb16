"""Changes of the in-sync sets of what is led here, as its leaders want them, written to the store together.

::

    Leading.wanted_state --> Swaps.want --> one transaction for 32 of them --> what stands there then
                                                   | refused, or not known
                                                   +--> each alone

Rules of this file: of one partition one change is under way at a time; its outcome is told to ``Leading``, known or
not; it may be asked for again afterwards. Who joins is registered as it was when that was wanted, or nothing is
written.

Source: docs/decisions/0017; ``cluster/leading.py`` for what may be done on the way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from flintmq.clock import Clock
from flintmq.cluster.state import BadState, PartitionState, decode, encode
from flintmq.cluster.store import Compare, Get, KeyValue, OutcomeUnknown, Put, Store, StoreError, Txn, swap
from flintmq.net.problems import Problems
from flintmq.net.tasks import Tasks
from flintmq.nsqd.cluster.led import Led
from flintmq.nsqd.cluster.seen import Seen, name_of, why_changed

log = logging.getLogger(__name__)

TOGETHER_MAX = 32
"""Changes that are asked for in one transaction."""
UNDER_WAY_MAX = 4
"""Times as many are under way."""
AGAIN_S = 0.2
"""After the store could not be asked."""
UNREADABLE_S = 1.0
"""After what stands there could not be read."""


class Swaps:
    """Has written what leaders want.

    Args:
        registered: the record of a node as it stands in the store; None: there is none, as far as is known.
        tasks: that end with this node.
        members_changed: called when others may have to confirm what is led here.
        give_up: called before the store is asked to have others lead something: nothing is acknowledged or delivered
            from then on.
        note: has something looked at again when the turn has ended.
    """

    def __init__(
        self,
        clock: Clock,
        store: Store,
        registered: Callable[[str], KeyValue | None],
        tasks: Tasks,
        seen: Seen,
        members_changed: Callable[[], None],
        give_up: Callable[[Led], None],
        note: Callable[[Led], None],
    ) -> None:
        self._problems = Problems(clock)
        self._store = store
        self._registered = registered
        self._tasks = tasks
        self._seen = seen
        self._members_changed = members_changed
        self._give_up = give_up
        self._note = note
        self._waiting: dict[Led, None] = {}
        self._under_way_count = 0

    def want(self, led: Led) -> None:
        """Have written what a leader wants, with what others want in this turn; nothing if that is being done."""
        if led.is_swapping or led.leading.wanted_state() is None:
            return
        led.is_swapping = True
        self._waiting[led] = None
        if self._under_way_count < UNDER_WAY_MAX:
            self._under_way_count += 1
            self._tasks.begin(self._write_waiting(), "changing who is in sync")

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                some = list(islice(self._waiting, TOGETHER_MAX))
                for led in some:
                    del self._waiting[led]
                try:
                    await self._write(some)
                except Exception as error:
                    log.error("CLUSTER: changing who is in sync failed: %r", error, exc_info=error)
                    for led in some:
                        led.leading.swap_ended(None)  # of those that had an answer it says nothing new
                    await asyncio.sleep(AGAIN_S)
                finally:
                    self._members_changed()
                    for led in some:
                        led.is_swapping = False
                        self._note(led)
        finally:
            self._under_way_count -= 1

    async def _write(self, some: Sequence[Led]) -> None:
        """Write what leaders want of the store, as far as they want it still: together, or else each alone."""
        wanted = {led: state for led in some if (state := led.leading.wanted_state()) is not None}
        # a change is of the state that it was made from, also when the store has told of a later one meanwhile
        pairs = {led: led.pair for led in wanted}
        for led, state in wanted.items():
            led.asked = led.leading.state, why_changed(led.leading, state)
            if led.guarded[0] is not state:  # else it is asked for again, as it was
                led.guarded = state, self._guards(led.leading.state, state)
            led.leading.swap_began(state)
            if led.leading.gives_up:
                self._give_up(led)
        self._members_changed()
        is_doubtful = False
        if len(wanted) > 1:
            try:
                found = await self._write_together(
                    [(pairs[led], state) for led, state in wanted.items()],
                    dict.fromkeys(guard for led in wanted for guard in led.guarded[1]),
                )
            except OutcomeUnknown:
                is_doubtful = True  # it may be carried out yet: each finds that, or keeps it from it
            except StoreError:
                pass  # whether it was one of them, or all, is found out below
            else:
                if found is not None:
                    for (led, state), pair in zip(wanted.items(), found, strict=True):
                        self._written(led, state, pair)
                    return
        ends = await asyncio.gather(
            *(self._write_one(led, pairs[led], state, is_doubtful) for led, state in wanted.items())
        )
        pause_s = max(ends, default=0.0)
        if pause_s:
            await asyncio.sleep(pause_s)

    def _guards(self, before: PartitionState, wanted: PartitionState) -> tuple[Compare, ...]:
        """Return what says that whoever joins is the process that is registered."""
        records = (self._registered(member.node) for member in wanted.in_sync if member not in before.in_sync)
        return tuple(Compare(record.key, record.mod_revision) for record in records if record is not None)

    async def _write_together(
        self, wanted: Sequence[tuple[KeyValue, PartitionState]], guards: Iterable[Compare]
    ) -> Sequence[KeyValue | None] | None:
        """Ask for several changes in one transaction; what stands there then, or None: nothing was changed."""
        conditions = (*(Compare(before.key, before.mod_revision) for before, _ in wanted), *guards)
        puts = tuple(Put(before.key, encode(state)) for before, state in wanted)
        result = await self._store.txn(Txn(conditions, (*puts, *(Get(before.key) for before, _ in wanted))))
        return result.found if result.succeeded else None

    async def _write_one(self, led: Led, before: KeyValue, state: PartitionState, is_doubtful: bool) -> float:
        """Ask for one change; return how many seconds to wait before another.

        Args:
            before: what stood in the store when the change was thought of.
            is_doubtful: it was asked for before, and may have been made.
        """
        leading = led.leading
        members = ",".join(state.in_sync_nodes)
        try:
            swapped = await swap(self._store, before.key, before, encode(state), guards=led.guarded[1])
        except Exception as error:
            is_expected = isinstance(error, StoreError)
            if is_expected:  # the store tells all partitions alike
                what = f"CLUSTER: who is in sync cannot be changed now: {error}"
                self._problems.tell(what, logging.WARNING, f"{name_of(leading)} to {members}")
            else:
                log.error("CLUSTER: %s: in sync %s: %r", name_of(leading), members, error, exc_info=error)
            if is_doubtful or isinstance(error, OutcomeUnknown) or not is_expected:
                leading.swap_ended(None)
            else:
                leading.swap_not_sent()
            return AGAIN_S
        if swapped.now == before and led.guarded[1]:
            leading.swap_refused()
            log.info("CLUSTER: %s: in sync is not %s yet: who joins has registered anew", name_of(leading), members)
            return AGAIN_S
        return self._written(led, state, swapped.now)

    def _written(self, led: Led, wanted: PartitionState, now: KeyValue | None) -> float:
        """Take note of what stands in the store; return how many seconds to wait before another change."""
        leading = led.leading
        if now is None:
            leading.swap_not_sent()
            leading.ended()
            return 0.0
        try:
            # what was written is not read again
            state = wanted if now.value == encode(wanted) else decode(now.key, now.value, PartitionState)
        except BadState as error:
            log.error("CLUSTER: %s", error)
            leading.swap_ended(None)
            return UNREADABLE_S  # what is wanted is of what was there before, and is never written over this
        led.pair = now if now.mod_revision > led.pair.mod_revision else led.pair
        before, why = led.asked  # the view may have the new state already
        leading.swap_ended(state, now.mod_revision)
        if state == wanted:
            self._seen.changed(before, state)
        else:
            why = "somebody else changed it"
        log.info("CLUSTER: %s: in sync now %s: %s", name_of(leading), ",".join(state.in_sync_nodes), why)
        return 0.0
