"""Copies that know of epochs which the coordination store does not have: a backup of the store was put back.

::

    epoch here > epoch of the state, or another leader of the same one --> the state is contested, nobody leads
                                          every holder says how far it is <--+--> who has most leads, above all epochs

Rules of this file: nothing is believed of a view alone, which may be late: what is said is written by compare-and-swap,
and is refused where the store has gone on; a process says it before it can be elected.

Source: docs/decisions/0017; ``cluster/power.py`` for when, and for what comes of it.
"""

from __future__ import annotations

import asyncio
import logging

from flintmq.broker.replica import Replica
from flintmq.clock import Clock
from flintmq.cluster.keys import Keys
from flintmq.cluster.power import contested, known_epoch
from flintmq.cluster.state import encode
from flintmq.cluster.store import Fate, Store, StoreError, swap
from flintmq.cluster.view import PartitionId, View
from flintmq.net.problems import Problems
from flintmq.net.tasks import Tasks
from flintmq.nsqd.cluster.due import Due

log = logging.getLogger(__name__)

TOLD_MAX = 32
"""Partitions of which it is said at a time."""
AGAIN_S = 0.2
"""Before a copy is looked at again of which the store could not be told."""
STORE_OLDER = (
    "CLUSTER: the coordination store is older than the data: it was put back from a backup. Of what copies here know "
    "later epochs nobody leads before all nodes with a copy have said how far it is"
)


class Outdated:
    """Says so of copies.

    Args:
        node_id: of this node.
        due: has partitions settled.
        tasks: that end with this node.
    """

    def __init__(
        self, clock: Clock, node_id: str, keys: Keys, view: View, store: Store, due: Due, tasks: Tasks
    ) -> None:
        self._node_id = node_id
        self._keys = keys
        self._view = view
        self._store = store
        self._due = due
        self._tasks = tasks
        self._problems = Problems(clock)
        self._telling: set[PartitionId] = set()
        self._turns = asyncio.Semaphore(TOLD_MAX)

    def knows_more(self, replica: Replica) -> int:
        """Return the epoch that a copy knows of and that its state, as the view has it, cannot have had; 0: none."""
        state = self._view.partitions.get((replica.topic, replica.number))
        if state is None or (state.topic_number, state.log_id) != (replica.topic_number, replica.log_id):
            return 0
        return known_epoch(state, replica.epoch, replica.about.led_by)

    def tell_soon(self, replica: Replica) -> None:
        """Say so of a copy, unless that is being done."""
        partition = (replica.topic, replica.number)
        if partition not in self._telling:
            self._telling.add(partition)
            self._tasks.begin(self._tell_once(replica), f"telling that the store is older than {partition}")

    async def _tell_once(self, replica: Replica) -> None:
        partition = (replica.topic, replica.number)
        try:
            await self.tell(replica)
        finally:
            self._telling.discard(partition)
            self._due.note_later(partition, AGAIN_S)

    async def tell(self, replica: Replica) -> None:
        """Say so of a copy, if it is still so."""
        partition = (replica.topic, replica.number)
        key = self._keys.partition(*partition)
        try:
            async with self._turns:
                pair, state, epoch = self._view.pairs.get(key), self._view.partitions.get(partition), 0
                if pair is not None and state is not None:
                    epoch = self.knows_more(replica)
                if pair is None or state is None or not epoch:
                    return
                wanted = contested(state, self._node_id, epoch)
                if (await swap(self._store, key, pair, encode(wanted))).fate is Fate.APPLIED:
                    what = "{}/{} is of epoch {} there, and {} here".format(*partition, state.epoch, epoch)
                    self._problems.tell(STORE_OLDER, logging.ERROR, what)
        except StoreError as error:
            what = "CLUSTER: %s/%d: the store cannot be told that it is older than the copy here: %s"
            log.warning(what, *partition, error)
