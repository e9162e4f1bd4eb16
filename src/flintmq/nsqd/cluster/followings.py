"""The copies here that other nodes change: who may, and when what they wrote is synced.

Rules of this file: a copy that is led here, is being changed, cannot be written or lacks something that it is in sync
for is followed by nobody, and whoever asks is told so; nor is any while the disk does not answer: a copy to which
nothing is published has everything, and would be taken for in sync.

Source: docs/decisions/0017; ``cluster/following.py`` for what is promised to a leader.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from flintmq.broker.followed_replicas import FollowedReplicas
from flintmq.broker.partition import PublishGroup
from flintmq.broker.replica import Replica
from flintmq.cluster.following import Following
from flintmq.cluster.history import cut
from flintmq.cluster.link import FollowerLink
from flintmq.cluster.power import is_doubtful
from flintmq.cluster.state import PartitionState
from flintmq.cluster.view import PartitionId, View
from flintmq.errors import DiskFull
from flintmq.nsqd.cluster.copies import FollowedLog
from flintmq.nsqd.cluster.table import Copy, Table
from flintmq.storage import CutsCommitted, PartitionLog
from flintmq.wire.peer import Identity, Open, Refusal

log = logging.getLogger(__name__)

AGAIN_S = 1.0
"""Before a copy that could not be written is tried again."""

OTHER_MESSAGES = (
    "the coordination store was older than the data: the copy here may have other messages than its leader, and begins "
    "anew"
)
DISK_IS_DEAD = "the disk does not answer"


def _last_epoch(replica: Replica) -> int:
    """Return the epoch of the last batch of a replica's log; 0: it has none."""
    history = cut(replica.history, replica.log.next_sequence)
    return history[-1][0] if history else 0


class Followings:
    """Lets other nodes change copies.

    Args:
        node_id: of this node.
        syncs: only what is synced of a log is acknowledged, whatever its topic says.
        sync_soon: has a log synced.
        schedule: has the turn ended.

    Attributes:
        is_disk_dead: nobody follows.
        write_error: why a copy could not be written, or made, last; None after the next one that was written.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        node_id: str,
        view: View,
        table: Table,
        replicas: FollowedReplicas,
        syncs: bool,
        sync_soon: Callable[[PartitionLog], None],
        schedule: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._node_id = node_id
        self._view = view
        self._table = table
        self._replicas = replicas
        self._syncs = syncs
        self._engine_sync_soon = sync_soon
        self._schedule = schedule
        self._unsynced: dict[Following, None] = {}
        self._unanswered: dict[FollowedLog, None] = {}
        self.is_disk_dead = False
        self.write_error: BaseException | None = None
        self._told: dict[PartitionId, type] = {}  # copies that could not be written since, as the log says
        self._is_full_told = False  # of one of them that it found no room, and none was written since

    def follow(self, copy: Copy, confirmed_ns: int) -> None:
        """Let another node change a copy.

        Args:
            confirmed_ns: monotonic time at which this node last told a leader that it follows it, or later.
        """
        replica = copy.replica
        assert replica is not None
        if copy.followed is None or copy.followed.replica is not replica:
            syncs = partial(self.counts_synced, replica)
            copy.followed = FollowedLog(self._replicas, replica, syncs, self._schedule)
        copy.following = Following(
            replica.topic, replica.number, replica.topic_number, replica.log_id, copy.followed, confirmed_ns
        )
        copy.following.superseded(replica.epoch)  # also by one that was to be noted, and may not be yet

    def keep_unanswered(self, copy: Copy, groups: list[PublishGroup], now_ns: int) -> None:
        """Find out what becomes of publishes to a copy that was led here until now."""
        if groups and copy.followed is not None:
            copy.followed.unanswered.keep(groups, now_ns)
            self._unanswered[copy.followed] = None

    @property
    def has_unanswered(self) -> bool:
        """Whether there are such publishes."""
        return any(followed.unanswered for followed in self._unanswered)

    def give_up_unanswered(self, copy: Copy) -> None:
        """Tell publishers that nobody knows: nothing is followed here any more."""
        self._told.pop(copy.partition, None)
        if copy.followed is not None:
            copy.followed.unanswered.give_up()

    def tick(self, now_ns: int) -> None:
        """Tell publishers who have waited for too long that nobody knows."""
        for followed in list(self._unanswered):
            followed.unanswered.tick(now_ns)
            if not followed.unanswered:
                del self._unanswered[followed]

    def counts_synced(self, replica: Replica) -> bool:
        """Whether only what is synced of a log is acknowledged."""
        return self._syncs or replica.meta.syncdisk == 1

    def heard_of(self, copy: Copy, state: PartitionState) -> None:
        """Another node leads: who led before is refused."""
        assert copy.following is not None
        if state.epoch > copy.following.epoch and state.leader != self._node_id:
            # the new leader itself opens a stream of this epoch; whoever comes with a lower one is refused
            copy.following.superseded(state.epoch - 1)

    def find(self, frame: Open, peer: Identity) -> Following | tuple[Refusal, int, str]:
        """Return the copy that a node says it leads; or why it is not followed."""
        partition = (frame.topic, frame.partition)
        copy = self._table.copies.get(partition)
        if copy is None or copy.replica is None:
            return Refusal.NOT_HERE, 0, ""
        if copy.led is not None:
            epoch = copy.led.leading.epoch
            if frame.epoch > epoch:
                copy.led.leading.ended(frame.epoch)
                return Refusal.NOT_HERE, epoch, "it was led here until now"
            return Refusal.HIGHER_EPOCH, epoch, ""
        if copy.following is None:
            if copy.replica.epoch > frame.epoch:
                return Refusal.HIGHER_EPOCH, copy.replica.epoch, ""
            return Refusal.NOT_HERE, copy.replica.epoch, "it is being changed"
        if copy.replica.log.failed is not None:
            return Refusal.BROKEN, copy.replica.epoch, f"nothing more can be stored: {copy.replica.log.failed}"
        state = self._view.partitions.get(partition)
        is_in_sync = state is None or self._node_id in state.in_sync_nodes
        if self.is_disk_dead:  # it leaves the in-sync set by itself, so that the leader knows how often that happens
            return Refusal.NOT_HERE if is_in_sync else Refusal.BROKEN, copy.replica.epoch, DISK_IS_DEAD
        if copy.replica.is_damaged and is_in_sync:
            return Refusal.NOT_HERE, copy.replica.epoch, "something is lost here: it leaves the in-sync set first"
        if frame.epoch < copy.following.epoch:
            return copy.following  # which says of which epoch it knows
        if why := self._why_not_followed(copy.replica, frame.epoch, peer.incarnation, state):
            return Refusal.NOT_HERE, copy.replica.epoch, why
        led_by = copy.replica.about.led_by
        if state is not None and is_doubtful(state, copy.replica.epoch, _last_epoch(copy.replica), led_by):
            if copy.following.broken is None:
                copy.following.broken = CutsCommitted(OTHER_MESSAGES)
                log.error("CLUSTER: %s/%d: %s", *partition, OTHER_MESSAGES)
            return Refusal.BROKEN, copy.replica.epoch, str(copy.following.broken)
        copy.replica.heard_of_leader(frame.epoch, peer.incarnation)
        self._sync_soon(copy.following)
        return copy.following

    def _why_not_followed(self, replica: Replica, epoch: int, incarnation: str, state: PartitionState | None) -> str:
        """Tell why it is not clear yet that a leader's epoch names one process alone; empty: it does."""
        known, its = replica.about.led_by
        if known > epoch or (known == epoch and its != incarnation):
            return f"another process led in epoch {known}: the coordination store is older than the copy here"
        if replica.log.next_sequence == 1:
            return ""  # it never had anything: whatever comes is right
        if not self._view.is_fed:
            return "the coordination store was not heard yet"
        if state is not None and epoch > state.epoch + (not state.is_contested):
            return f"the coordination store has told of epoch {state.epoch} here, and not yet why others follow"
        return ""

    def disk_changed(self, is_dead: bool) -> None:
        """The disk has stopped to answer, or answers again: leaders are told, and ask again once a second."""
        self.is_disk_dead = is_dead
        if is_dead:
            for copy in self._table.copies.values():
                if copy.following is not None:
                    copy.following.interrupt(DISK_IS_DEAD)

    def appended(self, link: FollowerLink) -> None:
        """Have synced what was appended to, where that is the rule."""
        for following in link.take_appended():
            if self._told:
                self._told.pop((following.topic, following.number), None)
                self._is_full_told = False
            self.write_error = None
            self._sync_soon(following)

    def synced(self) -> None:
        """Logs were synced: what is followed may be acknowledged."""
        unsynced, self._unsynced = self._unsynced, {}
        for following in unsynced:
            following.synced()
            if following.log.acknowledged_end < following.log.end:
                self._unsynced[following] = None

    def _sync_soon(self, following: Following) -> None:
        followed = following.log
        if isinstance(followed, FollowedLog) and followed.acknowledged_end < followed.end:
            self._unsynced[following] = None
            self._engine_sync_soon(followed.replica.log)

    def mend(self, copy: Copy, following: Following) -> None:
        """Try again with a copy that could not be written."""
        if copy.again is not None:
            return
        assert copy.replica is not None
        self._tell_broken(copy.partition, following.broken)
        self.write_error = following.broken

        def again() -> None:
            copy.again = None
            replica = copy.replica
            if copy.following is not following or replica is None or replica.work or replica.log.failed is not None:
                return
            if replica.log.has_room:  # else it would be in sync until the next message comes
                self.follow(copy, following.confirmed_ns)

        copy.again = self._loop.call_later(AGAIN_S, again)

    def _tell_broken(self, partition: PartitionId, broken: Exception | None) -> None:
        """Log why a copy could not be written: once until it is; that there is no room, of one copy for all."""
        kind = type(broken)
        was_told, self._told[partition] = self._told.get(partition) is kind, kind
        if was_told or (kind is DiskFull and self._is_full_told):
            return
        self._is_full_told |= kind is DiskFull
        more = "; it is said of this copy alone until one is written again" if kind is DiskFull else ""
        log.error("CLUSTER: %s/%d: the copy here could not be written: %s%s", *partition, broken, more)
