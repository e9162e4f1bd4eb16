"""Partitions get their roles on this node: they are made, followed, led, set aside or removed.

::

    the store's state and what is here --> role_of --> CREATE, FOLLOW, LEAD, SET_ASIDE, REMOVE, LOST

Rules of this file: a role is asked for anew whenever something has ended or changed, so each step is complete by
itself; what a partition fails with is told and tried again, and is no other partition's.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from flintmq.broker.replicas import Replicas
from flintmq.clock import Clock
from flintmq.cluster.state import LEASE_TTL_S, NodeRecord
from flintmq.cluster.view import PartitionId, View
from flintmq.errors import FlintError
from flintmq.nsqd.cluster.alone import Alone
from flintmq.nsqd.cluster.damaged import Damaged
from flintmq.nsqd.cluster.due import Due
from flintmq.nsqd.cluster.endings import Endings
from flintmq.nsqd.cluster.followings import Followings
from flintmq.nsqd.cluster.leaders import Leaders
from flintmq.nsqd.cluster.let_go import LetGo
from flintmq.nsqd.cluster.older_records import OlderRecords
from flintmq.nsqd.cluster.roles import Here, Role, role_of
from flintmq.nsqd.cluster.table import Copy, Table
from flintmq.nsqd.file_room import FileRoom
from flintmq.storage import CutsCommitted

log = logging.getLogger(__name__)

SWEEP_TICKS = 10
"""In so many all copies are looked at: for what can wait, and is rare."""
_LEASE_NS = LEASE_TTL_S * 1_000_000_000


class Settling:
    """Gives partitions their roles.

    Args:
        me: the record of this node; None: it has not begun.
        due: calls :meth:`settle` back.
        schedule: has the turn ended.
        room: for the files of replicas.
        gone: knows which logs were here.
        is_store_older: whether what the store says may be from before what is here.
        takes_part: whether this node is one of the cluster yet; else nothing is led, and nothing else is done.
    """

    def __init__(
        self,
        clock: Clock,
        me: Callable[[], NodeRecord | None],
        view: View,
        table: Table,
        replicas: Replicas,
        leaders: Leaders,
        followings: Followings,
        damaged: Damaged,
        endings: Endings,
        older_records: OlderRecords,
        alone: Alone,
        due: Due,
        schedule: Callable[[], None],
        room: FileRoom,
        gone: LetGo,
        is_store_older: Callable[[], bool],
        takes_part: Callable[[], bool],
    ) -> None:
        self._clock = clock
        self._me = me
        self._view = view
        self._table = table
        self._replicas = replicas
        self._leaders = leaders
        self._followings = followings
        self._damaged = damaged
        self._endings = endings
        self._older_records = older_records
        self._alone = alone
        self._due = due
        self._schedule = schedule
        self._room = room
        self._gone = gone
        self._is_store_older = is_store_older
        self._takes_part = takes_part
        self._beside_alone: set[PartitionId] = set()  # to be made here, where this node has a topic of that name alone
        self._to_sweep: list[Copy] = []
        self._sweep_count = 0

    def settle(self, partition: PartitionId) -> None:
        """Do what has to be done about one partition."""
        copy, me = self._table.copies.get(partition), self._me()
        if (copy is not None and copy.is_busy) or me is None:
            return  # it is looked at when that has ended, or this node begins
        if not self._takes_part():
            if copy is not None and copy.led is not None:
                self._leaders.depose(copy)
            return
        replica = None if copy is None else copy.replica
        state = self._view.partitions.get(partition)
        here = None
        if replica is not None:
            here = Here(replica.topic_number, replica.log_id, replica.epoch, replica.about.led_by)
        was_here = state is not None and self._gone.has(state.log_id)
        role = role_of(self._view, me, partition, here, was_here, self._is_store_older())
        if copy is None:
            if role is Role.CREATE and self._alone.has(partition[0]):
                self._beside_alone.add(partition)
                self._alone.bring_soon(partition[0])  # perhaps this node died while it gave it to the cluster
            elif role is Role.CREATE:
                self._create(partition)
            elif role is Role.LOST:
                self._damaged.lose(partition)
            return
        if role is not Role.LEAD and copy.led is not None:
            self._leaders.depose(copy)
        if replica is not None:
            self._older_records.look(replica)
        if replica is not None and self._damaged.is_unfit(replica):
            if self._damaged.lacks(partition, replica) and role is Role.LEAD:
                return  # another one is to lead it
        if role is Role.FOLLOW:
            self._endings.look(copy, me)
        match role:
            case Role.LEAD:
                self._leaders.lead(copy)
            case Role.FOLLOW:
                if copy.following is None and replica is not None and replica.log.failed is None:
                    self._followings.follow(copy, self._clock.monotonic_ns())
                if state is not None and state.leader and copy.following is not None:
                    self._followings.heard_of(copy, state)
            case Role.SET_ASIDE | Role.REMOVE:
                self._let_go(copy, role)

    def _create(self, partition: PartitionId) -> None:
        topic, number = partition
        state, record = self._view.partitions[partition], self._view.topics[topic]
        copy = self._table.add(partition, None)
        copy.is_busy = True

        def done(error: BaseException | None) -> None:
            if error is None:
                copy.replica = self._replicas[partition]
                # nobody was ever told that this copy follows
                self._followings.follow(copy, self._clock.monotonic_ns() - _LEASE_NS)
            else:
                self._table.remove(copy)
                self._followings.write_error = error.__cause__ or error
            self._due.ended(copy, error, "making a replica")

        try:
            self._room.take("replica of topic", topic, 1)
            self._replicas.create(topic, number, state.topic_number, state.log_id, record.meta, done)
        except FlintError:
            self._table.remove(copy)
            raise
        self._schedule()

    def _let_go(self, copy: Copy, role: Role) -> None:
        replica = copy.replica
        assert replica is not None
        if copy.following is not None:
            copy.following.retire()
            copy.following = None
        self._followings.give_up_unanswered(copy)
        copy.is_busy = True
        what = "removing its replica" if role is Role.REMOVE else "setting its replica aside"
        log.warning(
            "CLUSTER: %s/%d: %s (topic %d, log %d)", *copy.partition, what, replica.topic_number, replica.log_id
        )
        self._gone.note(replica.log_id, role is Role.SET_ASIDE)

        def done(error: BaseException | None) -> None:
            if error is None:
                self._table.remove(copy)
            self._due.ended(copy, error, what)

        try:
            if role is Role.REMOVE:
                self._replicas.remove(replica, done)
            else:
                self._replicas.set_aside(replica, done)
        except FlintError as error:
            self._due.ended(copy, error, what)

    # -- time ----------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Look at some of the copies, all of them once in ``SWEEP_TICKS``: which take nothing more."""
        self._alone.tick()
        for partition in [each for each in self._beside_alone if not self._alone.has(each[0])]:
            self._beside_alone.discard(partition)  # it was deleted here, or given to the cluster
            self._due.note(partition)
        for copy in self._swept():
            following, replica = copy.following, copy.replica
            if replica is not None and replica.log.failed is not None and not copy.is_busy:
                if self._damaged.may_begin_anew(copy, replica):
                    self._let_go(copy, Role.SET_ASIDE)
            elif following is not None and following.broken is not None and not copy.is_busy:
                if isinstance(following.broken, CutsCommitted) and self._damaged.is_left_behind(copy):
                    self._let_go(copy, Role.SET_ASIDE)
                else:
                    self._followings.mend(copy, following)

    def _swept(self) -> list[Copy]:
        copies = self._table.copies
        if not self._to_sweep:
            self._to_sweep = list(copies.values())
            self._sweep_count = -(-len(self._to_sweep) // SWEEP_TICKS)
        swept, self._to_sweep = self._to_sweep[: self._sweep_count], self._to_sweep[self._sweep_count :]
        return [copy for copy in swept if copies.get(copy.partition) is copy]
