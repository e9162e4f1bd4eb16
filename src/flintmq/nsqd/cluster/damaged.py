"""Copies that another node had better lead: some of it is lost here, nothing more can be stored, or the disk hangs; or
the store is older than they are, and nobody is to lead before it is known who has most.

::

    damaged, failed, hanging --> this node leaves the in-sync set --> what is lost is cut off --> the leader sends it
                                 | it is the only one in sync
                                 +--> it waits for somebody who has it, then goes on without

Rules of this file: a process leaves in-sync sets by itself, before it can be elected; the only one in sync never does,
but it says so when its copy is gone altogether.

Source: docs/decisions/0017; ``broker/replica.py`` for what a copy knows of its damage.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from flintmq.broker.replica import Replica
from flintmq.broker.replicas import Replicas
from flintmq.clock import Clock
from flintmq.cluster.keys import Keys
from flintmq.cluster.power import lost
from flintmq.cluster.state import PartitionState, encode, renounced
from flintmq.cluster.store import Fate, Store, StoreError, swap
from flintmq.cluster.view import PartitionId, View
from flintmq.net.tasks import Tasks
from flintmq.nsqd.cluster.due import Due
from flintmq.nsqd.cluster.let_go import LetGo
from flintmq.nsqd.cluster.outdated import Outdated
from flintmq.nsqd.cluster.roles import is_lost
from flintmq.nsqd.cluster.table import Copy, Table

log = logging.getLogger(__name__)

DISK_TICKS = 30
"""So many ticks, 3 s, and a sync that has not come back is a dead disk's. A write that does not holds the loop, and
costs the lease."""
REPLACE_NS_MIN = 1_000_000_000
REPLACE_NS_MAX = 60_000_000_000
"""Between two copies of one partition that are set aside because they take nothing more: longer from time to time."""
HOLD_NS = 10_000_000_000
"""For so long the only one in sync waits at what it has lost: another one may come back that has it."""
RENOUNCES_MAX = 32
"""In-sync sets that are left at a time."""
_LOOK_S = 0.1


class DiskWatch:
    """Whether the disk answers, as far as a sync tells that has not come back; or what is on it was removed.

    Ticks are counted, because a process that stood still says nothing about the disk.

    Attributes:
        is_dead: it does not, or the data directory is not there any more.
        is_removed: the latter; it stays so.
    """

    def __init__(self) -> None:
        self.is_dead = False
        self.is_removed = False
        self._syncing: object | None = None  # the sync that the last ticks have seen, and how many
        self._ticks = 0

    def tick(self, syncing: object | None) -> bool:
        """Look again, ten times a second; return whether :attr:`is_dead` has changed.

        Args:
            syncing: the sync that is under way.
        """
        self._ticks = self._ticks + 1 if syncing is not None and syncing is self._syncing else 0
        self._syncing = syncing
        was_dead, self.is_dead = self.is_dead, self.is_removed or self._ticks >= DISK_TICKS
        if self.is_dead is not was_dead and not self.is_removed:
            log.error("CLUSTER: %s", "the disk does not answer" if self.is_dead else "the disk answers again")
        return self.is_dead is not was_dead


class Damaged:
    """Looks after such copies.

    Args:
        node_id: of this node.
        due: has partitions settled.
        tasks: that end with this node.
        schedule: has the turn ended.
        incarnation: of this process.
        let_go: knows which logs were here.
        on_disk: is told whether the disk has stopped to answer, when that has changed.
    """

    def __init__(
        self,
        clock: Clock,
        node_id: str,
        keys: Keys,
        view: View,
        store: Store,
        table: Table,
        replicas: Replicas,
        due: Due,
        tasks: Tasks,
        schedule: Callable[[], None],
        incarnation: str,
        let_go: LetGo,
        on_disk: Callable[[bool], None],
    ) -> None:
        self._clock = clock
        self._node_id = node_id
        self._keys = keys
        self._view = view
        self._store = store
        self._table = table
        self._replicas = replicas
        self._due = due
        self._tasks = tasks
        self._schedule = schedule
        self._incarnation = incarnation
        self._let_go = let_go
        self._on_disk = on_disk
        self._disk = DiskWatch()
        self._outdated = Outdated(clock, node_id, keys, view, store, due, tasks)
        self._since_ns: dict[PartitionId, int] = {}  # what lacks something, and since when that is known
        self._renouncing: set[PartitionId] = set()
        self._renounces = asyncio.Semaphore(RENOUNCES_MAX)
        self._begun_anew: dict[PartitionId, tuple[int, int]] = {}  # when a copy was, and how long another one is not

    def found(self, replica: Replica) -> None:
        """A copy lacks something that it had; perhaps in the middle of reading it."""
        partition = (replica.topic, replica.number)
        self._since_ns.setdefault(partition, self._clock.monotonic_ns())
        self._due.note(partition)

    def is_unfit(self, replica: Replica) -> bool:
        """Whether another node had better lead: something is lost here, or nothing more can be stored; or the store is
        older than the copy.
        """
        is_able = replica.log.failed is None and not self._disk.is_dead and not replica.is_damaged
        return not is_able or self._outdated.knows_more(replica) > 0

    def lacks(self, partition: PartitionId, replica: Replica) -> bool:
        """Look after a copy that is unfit; return whether others are in sync, and this node is no longer when the store
        knows; or whether nobody is to lead before all have said how far they are.
        """
        if self._outdated.knows_more(replica):
            self._outdated.tell_soon(replica)
            return True
        if replica.is_damaged:
            self._since_ns.setdefault(partition, self._clock.monotonic_ns())
        state = self._view.partitions.get(partition)
        if state is None:
            return False
        if renounced(state, self._node_id) is not None:
            self._renounce_soon(partition)
            return True
        if self._node_id not in state.in_sync_nodes and not replica.work:
            replica.lost_end_comes()
        return False

    def may_begin_anew(self, copy: Copy, replica: Replica) -> bool:
        """Whether a copy that takes nothing more may be set aside: all that counts is elsewhere.

        Where this node is in sync yet, it leaves the in-sync set.
        """
        state = self._view.partitions.get(copy.partition)
        if state is None or copy.led is not None:
            self._due.note(copy.partition)
        elif renounced(state, self._node_id) is not None:
            self._renounce_soon(copy.partition)
        elif self._node_id not in state.in_sync_nodes and not replica.work and not self._disk.is_dead:
            now_ns = self._clock.monotonic_ns()
            last_ns, pause_ns = self._begun_anew.get(copy.partition, (now_ns - REPLACE_NS_MIN, 0))
            if now_ns - last_ns >= pause_ns:
                is_again = now_ns - last_ns < 2 * REPLACE_NS_MAX
                pause_ns = min(2 * pause_ns, REPLACE_NS_MAX) if is_again and pause_ns else REPLACE_NS_MIN
                self._begun_anew[copy.partition] = now_ns, pause_ns
                log.error("CLUSTER: %s/%d: nothing more can be stored: %s", *copy.partition, replica.log.failed)
                return True
        return False

    def is_left_behind(self, copy: Copy) -> bool:
        """Whether a copy that has more than its leader, some of it committed, may be set aside, to be fetched anew: a
        leader was elected that lacked that, or may have other messages there, and this node is in sync no longer.
        """
        state, replica = self._view.partitions.get(copy.partition), copy.replica
        if state is None or not state.leader or self._node_id in state.in_sync_nodes:
            return False
        if replica is None or replica.work or copy.led is not None:
            return False
        what = "CLUSTER: %s/%d: node %s leads without messages that are committed here, up to %d at most"
        log.error(what, *copy.partition, state.leader, replica.log.committed_sequence - 1)
        return True

    # -- time ----------------------------------------------------------------------------------------------------------

    def tick_disk(self, syncing: object | None) -> None:
        """Find out whether the disk has stopped to answer: others lead then what is led here, and nothing is followed.

        Args:
            syncing: the sync that is under way.
        """
        if self._disk.tick(syncing):
            self._on_disk(self._disk.is_dead)
            self._due.note_all(self._table.copies)
        elif self._disk.is_dead and self._table.led:
            self._due.note_all(self._table.led)

    def data_removed(self) -> None:
        """Nothing here outlives this process: others lead, and it follows nothing, from the next tick on."""
        self._disk.is_removed = True

    def tick(self, now_ns: int) -> None:
        """Let the only one in sync go on without what it lacks, when nobody else had it in time."""
        for partition, since_ns in list(self._since_ns.items()):
            replica, state = self._replicas.get(partition), self._view.partitions.get(partition)
            if replica is None or not replica.is_damaged:
                del self._since_ns[partition]
            elif state is not None and state.in_sync_nodes == (self._node_id,) and not replica.work:
                if now_ns - since_ns >= HOLD_NS or set(state.holders) <= {self._node_id}:
                    log.error(
                        "CLUSTER: %s/%d: what is lost here no other replica in sync has: it is skipped", *partition
                    )
                    replica.accept_damage()
                    self._schedule()

    # -- leaving in-sync sets ------------------------------------------------------------------------------------------

    async def renounce_all(self) -> None:
        """Before this process can be elected: leave the in-sync sets of what is damaged or missing here, and say which
        copies the store is older than.
        """
        while True:
            held = self._view.held.get(self._node_id, ())
            wanted = [partition for partition in held if self._must_renounce(partition)]
            known = [replica for replica in self._replicas.values() if self._outdated.knows_more(replica)]
            if not wanted and not known:
                return
            await asyncio.gather(*map(self._renounce, wanted), *map(self._outdated.tell, known))
            await asyncio.sleep(_LOOK_S)  # until the view has it

    def lose(self, partition: PartitionId) -> None:
        """Leave the in-sync set of a partition whose copy was here and is no more; the only one in sync says so."""
        state = self._view.partitions.get(partition)
        if state is not None and self._given_up(partition, state) is not None:
            self._renounce_soon(partition)

    def _must_renounce(self, partition: PartitionId) -> bool:
        state, replica = self._view.partitions.get(partition), self._replicas.get(partition)
        if state is None or self._given_up(partition, state) is None:
            return False
        return self._is_missing(partition, state) or (replica is not None and replica.is_damaged)

    def _is_missing(self, partition: PartitionId, state: PartitionState) -> bool:
        replica = self._replicas.get(partition)
        return replica is None or replica.log_id != state.log_id

    def _given_up(self, partition: PartitionId, state: PartitionState) -> PartitionState | None:
        """Return what a state becomes without this node in sync; None: it stays."""
        now = renounced(state, self._node_id)
        if now is None and self._is_missing(partition, state):
            if is_lost(state, self._node_id, self._let_go.has(state.log_id)):
                return lost(state, self._node_id, self._incarnation)
        return now

    def _renounce_soon(self, partition: PartitionId) -> None:
        if partition not in self._renouncing:
            self._renouncing.add(partition)
            self._tasks.begin(self._renounce(partition), f"leaving the in-sync set of {partition}")

    async def _renounce(self, partition: PartitionId) -> None:
        """Leave an in-sync set, because something is lost here that the others have."""
        key = self._keys.partition(*partition)
        try:
            async with self._renounces:
                pair, state = self._view.pairs.get(key), self._view.partitions.get(partition)
                wanted = None if pair is None or state is None else self._given_up(partition, state)
                if wanted is not None:
                    swapped = await swap(self._store, key, pair, encode(wanted))
                    if swapped.fate is Fate.APPLIED and self._node_id in wanted.in_sync_nodes:
                        log.error(
                            "CLUSTER: %s/%d: the copy that was in sync is not here any more, and no other one is in "
                            "sync: nobody leads until an operator says who: flintmq topic elect %s %d --dry-run. A log "
                            "of it that was set aside is in set-aside/ of the data directory", *partition, *partition
                        )  # fmt: skip
                    elif swapped.fate is Fate.APPLIED:
                        log.warning(
                            "CLUSTER: %s/%d: this node is in sync no longer: %s", *partition, self._why(partition)
                        )
        except StoreError as error:
            what = "CLUSTER: %s/%d: the store cannot be told that this node is in sync no longer (%s): %s"
            log.warning(what, *partition, self._why(partition), error)
        finally:
            self._renouncing.discard(partition)
            self._due.note_later(partition)

    def _why(self, partition: PartitionId) -> str:
        replica = self._replicas.get(partition)
        if self._disk.is_removed:
            return "the content of the data directory was removed"
        if replica is not None and replica.log.failed is not None:
            return f"nothing more can be stored here: {replica.log.failed}"
        if replica is not None and not replica.is_damaged and self._disk.is_dead:
            return "the disk does not answer"
        return "something is lost here, which comes from another replica"
