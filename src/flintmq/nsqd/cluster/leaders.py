"""The partitions that this node leads: from the election, which is a start as after a kill, to the end.

::

    lead --> channels known, of one that begins (founding.py)
         --> epoch noted --> promoted in the broker --> Leading, links to the others --> watermark, who is in sync
                                                                                 |
    engine: written, synced, records of a flush -------------------------------->+--> deposed: the copy follows again

Rules of this file:

- What ``Leading`` says in the middle of things is noted, and looked at when the turn has ended.
- The watermark moves only where :class:`Lease` says at that moment that this node may act.
- Publishes that can be answered no more are answered so, at once.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from flintmq.broker.broker import Broker
from flintmq.broker.channel import Channel
from flintmq.broker.partition import Partition, PublishGroup
from flintmq.broker.replica import Replica
from flintmq.broker.subscription import Subscription
from flintmq.clock import Clock
from flintmq.cluster.keys import Keys
from flintmq.cluster.leading import Kept, Leading
from flintmq.cluster.state import LEASE_TTL_S, PartitionState, can_go_on
from flintmq.cluster.steadiness import Steadiness
from flintmq.cluster.store import KeyValue
from flintmq.cluster.view import PartitionChange, PartitionId, TopicChange, View
from flintmq.errors import FlintError, StorageError
from flintmq.nsqd.client import Clients
from flintmq.nsqd.cluster.copies import LedLog, synced_end
from flintmq.nsqd.cluster.due import Due
from flintmq.nsqd.cluster.followings import Followings
from flintmq.nsqd.cluster.founding import Founding
from flintmq.nsqd.cluster.lease import Lease
from flintmq.nsqd.cluster.led import Led
from flintmq.nsqd.cluster.peers import Peers
from flintmq.nsqd.cluster.readiness import Readiness
from flintmq.nsqd.cluster.roles import followers_of
from flintmq.nsqd.cluster.rounds import SLICE_COUNT, Rounds
from flintmq.nsqd.cluster.seen import Seen, name_of, why_ended
from flintmq.nsqd.cluster.swaps import Swaps
from flintmq.nsqd.cluster.table import Copy, Table
from flintmq.nsqd.cluster.unanswered import NotLedAnyMore
from flintmq.nsqd.engine import Engine
from flintmq.nsqd.leadership import dismiss, not_leader
from flintmq.storage import PartitionLog
from flintmq.storage.records import encode_records
from flintmq.topic_meta import TopicMeta

log = logging.getLogger(__name__)

BUSY_AGAIN_S = 0.1
"""Before a copy is led of which something is still being written."""
_LEASE_NS = LEASE_TTL_S * 1_000_000_000


class NotEnoughCopies(StorageError):
    """A publish is stored here, and nobody can tell whether it stays: too few replicas have it."""

    def __str__(self) -> str:
        return "too few replicas acknowledge; whether it stays stored is not known, publish it again"


class Promotions:
    """Has copies promoted: those that one flush ends, all in one turn, are not to be too many.

    Args:
        schedule: has the turn ended.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, schedule: Callable[[], None]) -> None:
        self._loop = loop
        self._schedule = schedule
        self._waiting: deque[Callable[[], None]] = deque()
        self._count = 0

    def add(self, promote: Callable[[], None]) -> None:
        """Call ``promote`` when it is its turn; :meth:`ended` follows."""
        self._waiting.append(promote)
        self._begin_some()

    def ended(self) -> None:
        """One that was begun has ended, well or not."""
        self._count -= 1
        if self._waiting:
            self._loop.call_soon(self._begin_some)

    def _begin_some(self) -> None:
        while self._waiting and self._count < SLICE_COUNT:
            self._count += 1
            self._waiting.popleft()()
        self._schedule()


class Leaders:
    """Leads partitions.

    Args:
        node_id: of this node.
        due: has partitions settled.
        changed: has what is led looked at by :meth:`look_at`.
        swaps: writes who is in sync.

    Attributes:
        founding: knows what partitions begin with.
        let_go: has a consumer go on without a partition; False: it has nothing else here.
    """

    def __init__(
        self,
        clock: Clock,
        engine: Engine,
        node_id: str,
        keys: Keys,
        view: View,
        table: Table,
        lease: Lease,
        readiness: Readiness,
        followings: Followings,
        swaps: Swaps,
        peers: Peers,
        clients: Clients,
        seen: Seen,
        due: Due,
        changed: Rounds[Led],
    ) -> None:
        self.let_go: Callable[[Subscription, int], bool] = lambda _subscription, _number: False
        self._clock = clock
        self._engine = engine
        self._broker: Broker = engine.broker
        self._led_replicas = engine.broker.led_replicas
        self._node_id = node_id
        self._keys = keys
        self._view = view
        self._table = table
        self._lease = lease
        self._readiness = readiness
        self._followings = followings
        self._swaps = swaps
        self._peers = peers
        self._clients = clients
        self._seen = seen
        self._due = due
        self._noted = changed
        self._moving: dict[Led, None] = {}  # not every follower has everything
        self._kept = Kept()
        self._steadiness = Steadiness()
        self._promotions = Promotions(engine.loop, engine.schedule)
        self.founding = Founding(node_id, view, table, engine.broker, peers, due, engine.loop, engine.schedule)

    # -- the beginning -------------------------------------------------------------------------------------------------

    def lead(self, copy: Copy) -> None:
        """Lead a partition in the epoch that the store names, unless this is being done or was."""
        state = self._view.partitions[copy.partition]
        key = self._keys.partition(*copy.partition)
        pair = self._view.pairs[key]
        replica = copy.replica
        assert replica is not None
        if copy.led is not None:
            if copy.led.leading.epoch == state.epoch and not copy.led.leading.is_ended:
                return
            self.depose(copy)
        if copy.following is None:
            self._followings.follow(copy, self._clock.monotonic_ns())
        if state.epoch <= max(copy.ended_epoch, replica.epoch - 1):
            return  # what is known of the store is old
        following = copy.following
        assert following is not None
        following.superseded(state.epoch)
        if replica.work:
            self._due.note_later(copy.partition, BUSY_AGAIN_S)
            return
        begins_with = None
        if self.founding.is_new(copy.partition, replica):
            begins_with = self.founding.known(copy.partition, state.epoch)
            if begins_with is None:
                return
        confirmed_ns = following.confirmed_ns
        self._followings.give_up_unanswered(copy)
        copy.is_busy = True
        copy.following = None  # whoever opens a stream is refused by find

        def noted(error: BaseException | None) -> None:
            if error is not None:
                self._due.ended(copy, error, f"noting epoch {state.epoch}")
            else:
                self._promotions.add(promote)

        def promote() -> None:
            try:
                meta = self._meta_of(copy, replica)
                self._led_replicas.promote(replica, state.epoch, meta, promoted, begins_with)
            except (FlintError, ValueError) as failure:
                promoted(failure)

        def promoted(error: BaseException | None) -> None:
            self._promotions.ended()
            if error is not None:
                self._due.ended(copy, error, "leading it")
                return
            assert replica.partition is not None
            if key not in self._view.pairs:  # it was deleted meanwhile
                dismiss(self._led_replicas.demote(replica, NotLedAnyMore()), "the partition is deleted")
                self._followings.follow(copy, self._clock.monotonic_ns())
            else:
                led = self._begin(copy, replica, replica.partition, state, pair, confirmed_ns)
                if begins_with is not None and replica.partition.channels:
                    led.awaits_channels = True
                    self._led_replicas.hold_until_stored(replica, partial(self._channels_stored, led))
            self._due.ended(copy, None, "leading it")

        replica.heard_of_leader(state.epoch, state.incarnation)
        try:
            replica.note_epoch(state.epoch, True, noted)
        except (FlintError, ValueError) as error:
            self._due.ended(copy, error, f"noting epoch {state.epoch}")

    def _meta_of(self, copy: Copy, replica: Replica) -> TopicMeta:
        record = self._view.topics.get(copy.partition[0])
        return replica.meta if record is None else record.meta

    def _begin(
        self,
        copy: Copy,
        replica: Replica,
        partition: Partition,
        state: PartitionState,
        pair: KeyValue,
        confirmed_ns: int,
    ) -> Led:
        topic, number = copy.partition
        record = self._view.topics.get(topic)
        progress: list[Leading] = []
        led_log = LedLog(self._led_replicas, replica, lambda: progress[0].progress_number, self._engine.schedule)
        needs_sync = self._followings.counts_synced(replica)
        leading = Leading(
            topic,
            number,
            self._node_id,
            state,
            pair.mod_revision,
            led_log,
            end=replica.log.next_sequence,
            min_in_sync=1 if record is None else record.min_in_sync,
            needs_sync=needs_sync,
            can_go_on=self._can_others,
            kept=self._kept,
            steadiness=self._steadiness,
            is_registered=self._peers.is_registered,
            on_change=self._leading_changed,
        )
        progress.append(leading)
        previous, last = None, copy.last_leader
        if last is not None and last[2] == state.epoch - 1:  # else somebody led in between, who is not known
            previous = last[:2]
        led = Led(replica, partition, leading, pair, confirmed_ns + _LEASE_NS, previous)
        self._table.begin_led(copy, led)
        if leading.epoch and needs_sync:
            leading.synced(synced_end(replica.log))
            self._engine.sync_soon(replica.log)
        self._readiness.wait_for(led)
        for node in leading.followers:
            process = self._view.nodes.get(node)
            leading.ends(node, process is not None and process.is_ending)
        self._relink(led)
        self._lease.look_at(led)
        self._clients.look_up_again()
        self._noted.note(led)
        self._seen.elected_count += 1
        log.info("CLUSTER: %s is led here, its log ends at %d", name_of(leading), replica.log.next_sequence)
        if state.lossy_epoch == state.epoch:
            what = "CLUSTER: %s: acknowledged messages behind %d may be lost: nobody is known to have everything"
            log.error(what, name_of(leading), replica.log.next_sequence - 1)
        current = self._view.partitions.get(copy.partition)
        if current is not None:  # perhaps it was changed since it was to be led
            self._adopt(led, self._view.pairs[self._keys.partition(topic, number)], current)
        return led

    def _channels_stored(self, led: Led) -> None:
        """Let whoever reads in: what is acknowledged from now on is delivered to all that the partition began with."""
        led.awaits_channels = False
        self._noted.note(led)
        self._engine.schedule()

    def _can_others(self, state: PartitionState, away: Collection[str], least: int) -> bool:
        """Whether others could go on with a partition, if somebody elects them."""
        live = {node: record for node, record in self._view.nodes.items() if node not in away}
        return self._view.master is not None and can_go_on(state, live, least)

    # -- the end -------------------------------------------------------------------------------------------------------

    def depose(self, copy: Copy) -> None:
        """Lead a partition no more; the copy follows from now on."""
        led, replica = copy.led, copy.replica
        assert led is not None and replica is not None
        leading = led.leading
        leading.ended()
        self._relink(led)
        self._table.end_led(copy)
        self._readiness.forget(led)
        self._lease.forget(led)
        self._noted.forget(led)
        self._moving.pop(led, None)
        topic, number = copy.partition
        kept: list[PublishGroup] = []
        refusal = not_leader("PUB", topic, number, "is led by another node", fatal=False)
        subscriptions = self._led_replicas.demote(replica, NotLedAnyMore(), refusal, kept.extend)
        subscriptions = [each for each in subscriptions if not self.let_go(each, number)]
        self._seen.ended_count += 1
        why = why_ended(self._view, self._node_id, leading)
        log.warning("CLUSTER: %s is led here no longer: %s", name_of(leading), why)
        self._clients.look_up_again()
        dismiss(subscriptions, f"{name_of(leading)} is led elsewhere now")
        now_ns = self._clock.monotonic_ns()
        self._followings.follow(copy, now_ns)
        self._followings.keep_unanswered(copy, kept, now_ns)
        self._engine.schedule()

    @property
    def has_unanswered(self) -> bool:
        """Whether somebody waits for an answer to what was published to something that is led here."""
        if self._broker.publishes.pending or self._followings.has_unanswered:
            return True
        return any(each.written for each in self._table.by_partition)

    def end_all(self) -> None:
        """Lead nothing any more: this node ends."""
        for led in list(self._table.led.values()):
            led.leading.ended()

    def fenced(self, led: Led, why: str) -> None:
        """Nothing may be acknowledged or delivered any more: say so to everybody who waits for it."""
        self._readiness.end(led)
        self._clients.look_up_again()
        self._end_publishes(led, NotLedAnyMore())
        consumers = [each for channel in led.partition.channels.values() for each in channel.subscriptions]
        dismiss(consumers, f"{name_of(led.leading)}: {why}")

    def freed(self, led: Led) -> None:
        """It may be again."""
        self._readiness.wait_for(led)
        self._noted.note(led)

    def _end_publishes(self, led: Led, error: StorageError) -> None:
        """Tell those who wait for an answer that there is none to be had; what they published may be kept."""
        for group in list(led.partition.written):
            group.end(error)

    # -- what the store says -------------------------------------------------------------------------------------------

    def state_changed(self, change: PartitionChange) -> None:
        """Take note of a partition's state, which may not be led here at all."""
        led = self._table.led.get(change.partition)
        if led is None:
            return
        if change.now is None or change.pair is None:
            led.leading.ended()
        else:
            self._adopt(led, change.pair, change.now)

    def topic_changed(self, change: TopicChange, number: int) -> None:
        """Take note of the record of a topic, for one of its partitions."""
        led = self._table.led.get((change.topic, number))
        if led is not None and change.now is not None:
            led.leading.min_in_sync_changed(change.now.min_in_sync)

    def node_ends(self, node: str, is_ending: bool) -> None:
        """Another node says that it ends; or it has ended, and is there again."""
        for led in list(self._table.led.values()):
            led.leading.ends(node, is_ending)

    def node_registered(self, node: str) -> None:
        """A process is registered as another node from now on: it may join what it was kept from joining."""
        for led in self._table.led.values():
            if node in led.leading.followers and node not in led.leading.state.in_sync_nodes:
                self._noted.note(led)

    def _adopt(self, led: Led, pair: KeyValue, state: PartitionState) -> None:
        if pair.mod_revision > led.pair.mod_revision:
            led.pair = pair
        led.leading.state_changed(state, pair.mod_revision)
        self._lease.members_changed()
        self._noted.note(led)

    # -- looking -------------------------------------------------------------------------------------------------------

    def _leading_changed(self, leading: Leading) -> None:
        """Note that something may have to be done; called in the middle of things."""
        led = self._table.led.get((leading.topic, leading.number))
        if led is not None and led.leading is leading:
            if leading.is_ended:
                self._lease.members_changed()
            self._noted.note(led)

    def look_at(self, led: Led) -> None:
        """Do what has to be done about something that is led here, and was noted."""
        leading = led.leading
        partition = (leading.topic, leading.number)
        if self._table.led.get(partition) is not led:
            return
        if leading.is_ended:
            copy = self._table.copies[partition]
            if not copy.is_busy:
                self.depose(copy)
                self._due.note(partition)
            return
        if leading.is_level:
            self._moving.pop(led, None)
        else:
            self._moving[led] = None
        self._move_watermark(led)
        is_writable = led.is_writable
        if led.was_writable and not is_writable:
            self._clients.look_up_again()  # who publishes there already is refused from now on, as everybody is
        led.was_writable = is_writable
        if not is_writable:
            self._end_publishes(led, NotLedAnyMore() if led.is_fenced else NotEnoughCopies())
        if led.previous is not None and not led.is_ready and led.deliver_from_ns:
            node, incarnation = led.previous
            if node in led.linked and self._peers.link(node).is_followed_by(leading, incarnation):
                led.deliver_from_ns = 0  # whoever led before follows, and delivers nothing any more
        self._readiness.look(led)
        self._seen.look(led, self._clock.monotonic_ns())
        self._swaps.want(led)
        if any(node not in led.linked for node in followers_of(leading.state, self._node_id)) or any(
            node not in leading.followers for node in led.linked
        ):
            self._relink(led)

    def tick(self, now_ns: int) -> None:
        """Look who is behind for too long, and who has been steady for long enough."""
        self._steadiness.tick(now_ns)
        for led in list(self._moving):
            led.leading.tick(now_ns)  # what it finds it tells

    def _relink(self, led: Led) -> None:
        """Send a partition to the nodes that its state names."""
        leading = led.leading
        wanted = [] if leading.is_ended else followers_of(leading.state, self._node_id)
        for node in [node for node in led.linked if node not in wanted]:
            del led.linked[node]
            self._peers.link(node).remove(leading.topic, leading.number)
        for node in wanted:
            if node not in led.linked:
                led.linked[node] = None
                link = self._peers.link(node)
                if node not in self._view.nodes and not link.is_connected:
                    link.presume_dead()  # it was in sync until this node was elected, and may live again in a moment
                link.add(leading)

    def _move_watermark(self, led: Led) -> None:
        watermark = led.leading.watermark
        if watermark is None or led.is_fenced or watermark <= led.partition.log.committed_sequence:
            return
        if self._lease.may_act(led):
            self._broker.set_watermark(led.partition, watermark)
            self._engine.schedule()

    # -- the engine ----------------------------------------------------------------------------------------------------

    def written(self, groups: Sequence[PublishGroup]) -> None:
        """Groups were written: what is led here is sent on."""
        by_partition = self._table.by_partition
        if not by_partition:
            return
        for group in groups:
            led = by_partition.get(group.partition)
            if led is not None:
                led.leading.written(led.partition.log.next_sequence)
                if not led.is_writable:  # they were taken a moment before
                    self._noted.note(led)
                self._move_watermark(led)  # with this turn, where nobody else is needed

    def synced(self, logs: Iterable[PartitionLog]) -> None:
        """Logs were synced: what is led here may be committed."""
        for each in logs:
            led = self._table.by_log.get(each)
            if led is not None:
                led.leading.synced(synced_end(led.replica.log))

    def keep(self, partition: Partition, channel: Channel, floor: int) -> bool:
        """See :class:`flintmq.broker.channels.FloorKeeper`."""
        led = self._table.by_partition.get(partition)
        if led is None:
            return True  # it is this node's alone; or not ready, and every replica has kept it for the leader before
        return led.leading.keep_floor(channel.name, floor, partial(self._kept_floor, channel, floor))

    def _kept_floor(self, channel: Channel, floor: int) -> None:
        channel.floor_is_kept(floor)
        self._broker.deliveries.mark(channel)
        self._engine.schedule()

    def forget(self, partition: Partition, channel: Channel) -> None:
        """See :class:`flintmq.broker.channels.FloorKeeper`."""
        led = self._table.by_partition.get(partition)
        if led is not None:
            led.leading.forget_floor(channel.name)

    def hand_on(self, records: Mapping[PartitionId, Sequence[Any]], done: Callable[..., None]) -> None:
        """Send what a flush has written to the followers; ``done`` when every one that is in sync has it."""
        waiting = dict.fromkeys(records)
        failed: list[BaseException] = []

        def one_done(partition: PartitionId, error: BaseException | None) -> None:
            waiting.pop(partition, None)
            if error is not None:
                failed.append(error)
            if not waiting:
                done(failed[0] if failed else None)
                self._engine.schedule()

        for partition, of_it in records.items():
            led = self._table.led.get(partition)
            if led is None:
                # it is being promoted, so its followers are sent the whole state; or it is led no longer
                copy = self._table.copies.get(partition)
                one_done(partition, None if copy is not None and copy.is_busy else NotLedAnyMore())
                continue
            leading = led.leading
            number = leading.progress(encode_records(of_it), led.partition.log.committed_sequence)
            leading.when_progress_replicated(number, partial(one_done, partition))
