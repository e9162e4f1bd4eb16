"""The ends of the copies of this node, told the cluster where nobody can be elected without knowing.

Rules of this file: what is said of a copy is so as long as this process lives and nobody leads: nobody changes it.

Source: docs/decisions/0017; ``cluster/power.py`` for when and why.
"""

from __future__ import annotations

import asyncio
import logging

from flintmq.cluster.keys import Keys
from flintmq.cluster.power import asks_for_ends, told
from flintmq.cluster.state import Ending, NodeRecord, encode
from flintmq.cluster.store import Fate, Store, StoreError, swap
from flintmq.cluster.view import PartitionId, View
from flintmq.net.tasks import Tasks
from flintmq.nsqd.cluster.copies import shape_of
from flintmq.nsqd.cluster.due import Due
from flintmq.nsqd.cluster.table import Copy

log = logging.getLogger(__name__)

TOLD_MAX = 32
"""Partitions of which it is said at a time."""


class Endings:
    """Says how far copies are.

    Args:
        due: has partitions settled.
        tasks: that end with this node.
    """

    def __init__(self, keys: Keys, view: View, store: Store, due: Due, tasks: Tasks) -> None:
        self._keys = keys
        self._view = view
        self._store = store
        self._due = due
        self._tasks = tasks
        self._telling: set[PartitionId] = set()
        self._turns = asyncio.Semaphore(TOLD_MAX)

    def look(self, copy: Copy, me: NodeRecord) -> None:
        """Say how far a copy is, if that is asked and was not said."""
        state = self._view.partitions.get(copy.partition)
        known = self._view.nodes.get(me.node)
        if state is None or copy.partition in self._telling or known is None or known.incarnation != me.incarnation:
            return  # it is looked at again when this node is registered
        if asks_for_ends(state, self._view.nodes) and told(state, self._ending(copy, me)) is not None:
            self._telling.add(copy.partition)
            self._tasks.begin(self._tell(copy, me), f"telling how far {copy.partition} is")

    def _ending(self, copy: Copy, me: NodeRecord) -> Ending:
        replica = copy.replica
        if replica is None or replica.log.failed is not None:
            return Ending(me.node, me.incarnation, 0, 0)  # nobody could be led by it
        shape = shape_of(replica) if copy.followed is None else copy.followed.shape()
        epoch = shape.history[-1][0] if shape.history else 0
        return Ending(me.node, me.incarnation, epoch, shape.end, replica.about.led_by)

    async def _tell(self, copy: Copy, me: NodeRecord) -> None:
        key = self._keys.partition(*copy.partition)
        try:
            async with self._turns:
                pair, state = self._view.pairs.get(key), self._view.partitions.get(copy.partition)
                if pair is None or state is None or not asks_for_ends(state, self._view.nodes):
                    return
                ending = self._ending(copy, me)
                wanted = told(state, ending)
                if wanted is not None and (await swap(self._store, key, pair, encode(wanted))).fate is Fate.APPLIED:
                    what = "CLUSTER: %s/%d: nobody is known to have everything; the copy here is of epoch %d, up to %d"
                    log.warning(what, *copy.partition, ending.epoch, ending.end)
        except StoreError as error:
            log.warning("CLUSTER: %s/%d: the store cannot be told how far it is here: %s", *copy.partition, error)
        finally:
            self._telling.discard(copy.partition)
            self._due.note_later(copy.partition)
