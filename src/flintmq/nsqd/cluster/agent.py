"""A node's part in a cluster: it follows the store, and leads and follows the partitions that the store gives it.

::

    store --follow--> view --> role_of --> create, follow, lead, set aside, remove        broker/replicas.py
                                   |
                 Leading (one per partition led)   <--- links --->   Following (one per copy)
                    |         |
      engine: written, synced   watermark -> Broker.set_watermark -> publishers and consumers

Rules of this file:

- What may be acknowledged or delivered is asked immediately before: :meth:`Agent.look` runs before every turn's end.
- One thing at a time is done with a partition; what the store says meanwhile is looked at when that has ended.
- What a partition fails with is told and tried again, and is no other partition's.
- What is done for every publish or turn is a dictionary look-up; what is done ten times a second is done for those
  partitions alone that are not at rest.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from itertools import islice
from typing import Any

import msgspec

from flintmq.broker.broker import Broker
from flintmq.broker.partition import Ended, Partition, PublishGroup
from flintmq.broker.replicas import Replica
from flintmq.broker.subscription import Subscription
from flintmq.broker.topic import Topic
from flintmq.cluster.following import Following
from flintmq.cluster.keys import Keys
from flintmq.cluster.leading import Kept, Leading
from flintmq.cluster.link import FollowerLink
from flintmq.cluster.state import LEASE_TTL_S, BadState, NodeRecord, PartitionState, decode, encode, renounced
from flintmq.cluster.store import (
    Compare,
    Fate,
    Get,
    KeyValue,
    OutcomeUnknown,
    Put,
    Snapshot,
    Store,
    StoreError,
    Txn,
    follow,
    swap,
)
from flintmq.cluster.view import Change, NodeChange, PartitionChange, PartitionId, TopicChange, Unreadable, View
from flintmq.env import Env
from flintmq.errors import FlintError, StorageError
from flintmq.net.address import format_address
from flintmq.net.isolation import for_each
from flintmq.net.membership import Membership, Replaced
from flintmq.net.tasks import kept_up, tell
from flintmq.nsqd import partitions
from flintmq.nsqd.client import Client, Clients
from flintmq.nsqd.cluster.bringing import Bringing, NotBrought
from flintmq.nsqd.cluster.copies import FollowedLog, LedLog, bytes_below, synced_end
from flintmq.nsqd.cluster.handing import until
from flintmq.nsqd.cluster.led import Led
from flintmq.nsqd.cluster.peer_tls import PeerTls
from flintmq.nsqd.cluster.peers import Peers
from flintmq.nsqd.cluster.roles import Here, Role, followers_of, role_of
from flintmq.nsqd.cluster.seen import Seen, figures_of, name_of, sorted_partitions, why_changed, why_ended
from flintmq.nsqd.cluster.serving import Serving
from flintmq.nsqd.cluster.wishes import TopicNotMade
from flintmq.nsqd.engine import Engine
from flintmq.nsqd.leadership import NOT_LEADER, LedElsewhere, NotOfOneNode, OfTheCluster, not_leader, not_writable
from flintmq.nsqd.pending_reply import PendingReply
from flintmq.nsqd.replica_figures import ClusterFigures, ReplicaFigures
from flintmq.storage import PartitionLog
from flintmq.storage.records import encode_records
from flintmq.topic_meta import TopicMeta
from flintmq.wire.peer import Identity, Open, Refusal
from flintmq.wire.server import NOT_A_NUMBER, Publish, Subscribe

log = logging.getLogger(__name__)

TICK_S = 0.1
AGAIN_S = 0.2
"""After the store, or something of a partition, failed."""
SWEEP_TICKS = 10
"""In so many all copies are looked at: for what can wait, and is rare."""
FOLLOW_AGAIN_S = 1.0
"""Before a copy that could not be written is tried again."""
DISK_TICKS = 30
"""So many ticks, 3 s, and a sync that has not come back is a dead disk's. A write that does not holds the loop, and
costs the lease."""
REPLACE_NS_MIN = 1_000_000_000
REPLACE_NS_MAX = 60_000_000_000
"""Between two copies of one partition that are set aside because they take nothing more: longer from time to time."""
HOLD_NS = 10_000_000_000
"""For so long the only one in sync waits at what it has lost: another one may come back that has it."""
SWAPS_MAX = 32
"""Changes of partitions' states that are asked for together."""
SWAPPING_MAX = 4
"""Times as many are under way."""
SLICE_COUNT = 128
"""Partitions that something is done with before others of the loop have their turn: some 20 ms."""
_LEASE_NS = LEASE_TTL_S * 1_000_000_000
_FOREVER_NS = 1 << 63
OnReady = Callable[[str, Sequence[int] | None], None]


class NotLedAnyMore(StorageError):
    """A publish may be stored or not: another node decides that."""

    def __str__(self) -> str:
        return "this node leads the partition no longer; whether it is stored is not known, publish it again"


class NotEnoughCopies(StorageError):
    """A publish is stored here, and nobody can tell whether it stays: too few replicas have it."""

    def __str__(self) -> str:
        return "too few replicas acknowledge; whether it stays stored is not known, publish it again"


class _Copy:
    """One partition of the cluster, as far as it is here, and what is being done with it."""

    __slots__ = (
        "again",
        "ended_epoch",
        "followed",
        "following",
        "is_busy",
        "last_leader",
        "led",
        "partition",
        "replica",
    )

    def __init__(self, partition: PartitionId, replica: Replica | None) -> None:
        self.partition = partition
        self.replica = replica
        self.following: Following | None = None
        self.followed: FollowedLog | None = None
        self.led: Led | None = None
        self.is_busy = False
        self.ended_epoch = 0  # in which this process led last: it leads no more before the store names a later one
        self.last_leader: tuple[str, str] | None = None  # another process, as the store said
        self.again: asyncio.TimerHandle | None = None


class Agent:
    """This node in the cluster.

    Args:
        node_id: identity of the data directory.
        boot_id: of the machine's start.
        secret: that all nodes share.
        tls: between nodes; None: it is plain.
        on_ready: called with a topic and the partitions of it that can be read here from now on; None: some of it
            can be read no longer.
        change_meta: puts another state of a topic into force.
        own_topics: that are this node's alone.
        makes_topics: whether topics that publishing and subscribing make are the cluster's.
        are_created: whether publishing and subscribing make topics at all.
        msg_timeout_ns: of consumers that have not said another one.

    Attributes:
        let_go: has a consumer go on without a partition; False: it has nothing else here.
    """

    def __init__(
        self,
        env: Env,
        engine: Engine,
        store: Store,
        keys: Keys,
        node_id: str,
        boot_id: str,
        secret: bytes,
        clients: Clients,
        on_ready: OnReady,
        change_meta: Callable[[Topic, TopicMeta], bool],
        own_topics: frozenset[str] = frozenset(),
        makes_topics: bool = True,
        are_created: bool = True,
        msg_timeout_ns: int = 60_000_000_000,
        tls: PeerTls | None = None,
    ) -> None:
        self.view = View(keys)
        self.node_id = node_id
        self.incarnation = f"{env.random.getrandbits(64):016x}"
        self.problem = ""
        self.seen = Seen()
        self._env = env
        self._engine = engine
        self._broker: Broker = engine.broker
        self._replicas = engine.broker.replicas
        self._store = store
        self._keys = keys
        self._boot_id = boot_id
        self._clients = clients
        self._on_ready = on_ready
        self._change_meta = change_meta
        self._syncs = engine.durability.waits_for_syncs
        self._record: NodeRecord | None = None
        self._membership: Membership | None = None
        self._peers = Peers(env, self._identity, secret, self, self._find_node, self._appended, self._refused, tls=tls)
        self._copies: dict[PartitionId, _Copy] = {}
        self._led: dict[PartitionId, Led] = {}
        self._by_partition: dict[Partition, Led] = {}
        self._by_log: dict[PartitionLog, Led] = {}
        self._moving: dict[Led, None] = {}  # not every follower has everything
        self._changed: dict[Led, None] = {}
        self._unready: dict[Led, None] = {}
        # topics of which it is to be told what is ready, and partitions: only these, and none is not any more
        self._ready_changed: dict[str, list[int] | None] = {}
        self._unsynced: dict[Following, None] = {}
        self._has_membership = asyncio.Event()
        self._has_cluster = asyncio.Event()  # its record is known, which the first nsqlookupd makes
        self._is_looking = False
        self._is_held = False
        self._confirmed_until_ns = 0  # until then, no lease is needed for what is led here and not fenced
        self._fenced: dict[Led, None] = {}
        self._is_closing = False
        self._due: dict[PartitionId, None] = {}
        self._is_settling = False
        self._to_swap: dict[Led, None] = {}
        self._swapping_count = 0
        self._kept = Kept()
        self._to_promote: deque[Callable[[], None]] = deque()
        self._promoting_count = 0
        self._bringing: set[str] = set()
        self._bringer = Bringing(
            keys, self.view, store, env.random, self._broker.topics, self._own_record, self._lease_id, self._take_in
        )
        self.let_go: Callable[[Subscription, int], bool] = lambda _subscription, _number: False
        self.serving = Serving(
            env, self._broker, node_id, keys, self.view, store, self._peers, self._led, self._lease_id, own_topics,
            makes_topics, are_created,
            engine.wants_output, engine.schedule, msg_timeout_ns,
        )  # fmt: skip
        self._damaged: dict[PartitionId, int] = {}  # what lacks something, and since when that is known
        self._renouncing: set[PartitionId] = set()
        self._renounces = asyncio.Semaphore(SWAPS_MAX)
        self._begun_anew: dict[PartitionId, tuple[int, int]] = {}  # when a copy was, and how long another one is not
        self._syncing: object | None = None  # the sync that the last ticks have seen, and how many
        self._sync_ticks = 0
        self._is_disk_dead = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._to_sweep: list[_Copy] = []
        self._sweep_count = 0

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self, address: str, record: NodeRecord) -> None:
        """Listen for other nodes, follow the store, and be one of the cluster.

        Args:
            record: of this node, but for what is known here.

        Raises:
            ListenFailed: it cannot be listened for them.
        """
        _, port = await self._peers.listen(address)
        self._record = msgspec.structs.replace(
            record, node=self.node_id, incarnation=self.incarnation, boot_id=self._boot_id, peer_port=port,
            syncs=self._syncs,
        )  # fmt: skip
        log.info("PEER: listening on %s for other nodes; this is node %s", port, self.node_id)
        for partition, replica in self._replicas.items():
            self._follow(self._add(partition, replica), self._env.clock.monotonic_ns())
            if replica.is_damaged:
                self._is_damaged(replica)
        self._replicas.on_damaged = self._is_damaged
        self._replicas.on_records = self._hand_on
        self._engine.replication = self
        self._begin(kept_up(self._follow_store, "following the cluster", pause_s=AGAIN_S), "following the cluster")
        self._begin(self._join(), "joining the cluster")
        self._tick()

    async def _join(self) -> None:
        await self._has_cluster.wait()
        await self._renounce_all()
        record = self._record
        assert record is not None
        key = self._keys.node(self.node_id)
        self._membership = Membership(
            self._store,
            self._env.clock,
            key,
            record,
            on_held=self._held,
            on_lost=self._lost,
            on_replaced=self._replaced,
        )
        self._membership.start()
        self._has_membership.set()
        self._begin(self._bring_all(), "giving topics to the cluster")

    def serve_others(self, new_session: Callable[[int], asyncio.Protocol]) -> None:
        """Take what other nodes hand on.

        Args:
            new_session: serves one connection of theirs.
        """
        self._peers.new_session = new_session

    async def _lease_id(self) -> int:
        """Return the id of the lease that this node is registered with, as soon as it is."""
        await self._has_membership.wait()
        assert self._membership is not None
        return (await self._membership.held()).lease_id

    async def close(self) -> None:
        """Lead nothing any more, and leave the cluster."""
        self._is_closing = True
        await self.serving.close()
        if self._timer is not None:
            self._timer.cancel()
        for led in list(self._led.values()):
            self._fence(led, "this node ends")
        if self._membership is not None:
            await self._membership.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        await self._peers.close()
        for led in list(self._led.values()):
            led.leading.ended()
        self._replicas.on_records = None
        self._replicas.on_damaged = None
        self._engine.replication = None
        close = getattr(self._store, "close", None)
        if close is not None:
            await close()

    def set_draining(self, is_draining: bool) -> None:
        """Tell the cluster whether this node is to lead nothing."""
        if self._record is None:
            return  # it is asked again when it has begun
        self._record = msgspec.structs.replace(self._record, is_draining=is_draining)
        if self._membership is not None:
            self._begin(self._update(self._membership, self._record), "telling the cluster that this node drains")

    async def _update(self, membership: Membership, record: NodeRecord) -> None:
        try:
            await membership.update(record)
        except Replaced as error:
            log.error("CLUSTER: %s", error)

    def _begin(self, work: object, what: str) -> None:
        task: asyncio.Task[None] = self._engine.loop.create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(tell(what))

    def _identity(self) -> Identity:
        cluster_id = "" if self.view.cluster is None else self.view.cluster.cluster_id
        version = 1 if self._record is None else self._record.version
        return Identity(cluster_id, self.node_id, self.incarnation, self._boot_id, self._syncs, version)

    # -- the store -----------------------------------------------------------------------------------------------------

    async def _follow_store(self) -> None:
        told = ""
        while True:
            try:
                async with aclosing(follow(self._store, self._keys.all)) as following:
                    async for what in following:
                        told = ""
                        self._take(self.view.feed(what), isinstance(what, Snapshot))
            except StoreError as error:
                if str(error) != told:
                    told = str(error)
                    log.warning("CLUSTER: the store is not followed, what is known stays in force: %s", error)
            await asyncio.sleep(AGAIN_S)

    def _take(self, changes: Iterable[Change], is_whole: bool) -> None:
        if self.view.cluster is not None:
            self._has_cluster.set()
        for change in changes:
            match change:
                case PartitionChange():
                    self._state_changed(change)
                    self._due[change.partition] = None
                case TopicChange():
                    self._topic_changed(change)
                case NodeChange():
                    self._node_changed(change)
                case Unreadable():
                    log.error("CLUSTER: %s", change.error)
        if is_whole:
            self._due |= dict.fromkeys(self._copies)
            self._due |= dict.fromkeys(self.view.held.get(self.node_id, ()))
        self.look()
        self._settle_soon()
        self.serving.look()

    def _state_changed(self, change: PartitionChange) -> None:
        before, copy = change.before, self._copies.get(change.partition)
        if before is not None and before.leader and copy is not None:
            copy.last_leader = before.leader, before.incarnation
        led = self._led.get(change.partition)
        if led is None:
            return
        pair = self.view.pairs.get(change.key)
        if change.now is None or pair is None:
            led.leading.ended()
        else:
            self._adopt(led, pair, change.now)

    def _adopt(self, led: Led, pair: KeyValue, state: PartitionState) -> None:
        if pair.mod_revision > led.pair.mod_revision:
            led.pair = pair
        led.leading.state_changed(state, pair.mod_revision)
        self._members_changed()
        self._note(led)

    def _topic_changed(self, change: TopicChange) -> None:
        for number in self.view.of_topic.get(change.topic, ()):
            self._due[change.topic, number] = None
        for number in self._replicas.of_topic(change.topic):
            self._due[change.topic, number] = None
            led = self._led.get((change.topic, number))
            if led is not None and change.now is not None:
                led.leading.min_in_sync_changed(change.now.min_in_sync)
        topic = self._broker.topics.get(change.topic)
        if topic is not None and change.now is not None and self._replicas.of_topic(change.topic):
            if change.now.meta.rank > topic.meta.rank:
                self._change_meta(topic, change.now.meta)

    def _node_changed(self, change: NodeChange) -> None:
        self._peers.nodes_changed()
        before, now = change.before, change.now
        if before is not None and now is not None and before.incarnation != now.incarnation:
            self._is_dead(before)  # one process at a time has the data directory
        if change.now is None and change.node != self.node_id:
            for link in self._peers.links():
                if link.node == change.node and not link.is_connected:
                    link.presume_dead()

    def _find_node(self, node: str) -> NodeRecord | None:
        return self.view.nodes.get(node)

    def _is_dead(self, record: NodeRecord) -> None:
        """A process is dead: what it led is delivered by nobody else any more."""
        for led in self._unready:
            if led.previous == (record.node, record.incarnation):
                led.deliver_from_ns = 0
                self._note(led)

    def _refused(self, record: NodeRecord) -> None:
        """Nobody listens where a node did: its process is dead."""
        self._is_dead(record)
        for link in self._peers.links():
            if link.node == record.node and not link.is_connected:
                link.presume_dead()

    # -- the lease -----------------------------------------------------------------------------------------------------

    def _held(self, pair: KeyValue) -> None:
        log.info("CLUSTER: this is node %s, incarnation %s", self.node_id, self.incarnation)
        self._look_at_lease()
        self._due |= dict.fromkeys(self._copies)
        self._settle_soon()

    def _lost(self, reason: str) -> None:
        self._look_at_lease()

    def _replaced(self, error: Replaced) -> None:
        self.problem = str(error)
        self._look_at_lease()

    def look(self) -> None:
        """Before a turn ends: fence what may not be acknowledged or delivered any more."""
        if not self._led:
            return
        is_held = self._has_lease()
        if is_held is not self._is_held or (not is_held and self._env.clock.monotonic_ns() >= self._confirmed_until_ns):
            self._look_at_lease()

    def _has_lease(self) -> bool:
        membership = self._membership
        if membership is None or not membership.is_held:
            return False
        assert membership.pair is not None
        # who was gone for the store has to know first what happened meanwhile
        return self.view.revision >= membership.pair.mod_revision

    def _look_at_lease(self) -> None:
        """Fence, or let go on, what is led here; find out until when it need not be looked at again."""
        is_held = self._has_lease()
        now_ns = self._env.clock.monotonic_ns()
        self._is_held = is_held
        until_ns = _FOREVER_NS
        for led in list(self._led.values()):
            confirmed_until_ns = None if is_held else led.leading.confirmed_until_ns()
            if self._is_closing or (confirmed_until_ns is not None and now_ns >= confirmed_until_ns):
                self._fence_once(led)
            else:
                self._let_go_on(led)
                if confirmed_until_ns is not None and confirmed_until_ns < until_ns:
                    until_ns = confirmed_until_ns
        self._confirmed_until_ns = until_ns

    def _look_at_lease_for(self, led: Led) -> None:
        """As :meth:`_look_at_lease`, for one that has just begun to be led: there may be thousands of others."""
        if self._has_lease() is not self._is_held:
            self._look_at_lease()
            return
        until_ns = None if self._is_held else led.leading.confirmed_until_ns()
        if self._is_closing or (until_ns is not None and self._env.clock.monotonic_ns() >= until_ns):
            self._fence_once(led)
        elif until_ns is not None:
            self._confirmed_until_ns = min(self._confirmed_until_ns, until_ns)

    def _look_at_fenced(self, now_ns: int) -> None:
        """Let go on what may: followers may have confirmed it since."""
        for led in list(self._fenced):
            until_ns = None if self._is_held else led.leading.confirmed_until_ns()
            if not self._is_closing and (until_ns is None or now_ns < until_ns):
                self._let_go_on(led)
                self._confirmed_until_ns = min(self._confirmed_until_ns, until_ns or _FOREVER_NS)

    def _members_changed(self) -> None:
        """Others may have to confirm something: look at once when it is asked."""
        self._confirmed_until_ns = 0

    def _let_go_on(self, led: Led) -> None:
        if led.is_fenced:
            led.is_fenced = False
            self._fenced.pop(led, None)
            self._unready[led] = None
            self._note(led)
            log.warning("CLUSTER: %s goes on", _name(led))

    def _fence_once(self, led: Led) -> None:
        if not led.is_fenced:
            self._fence(led, "its lease is gone, and not every replica confirms that it leads")

    def _fence(self, led: Led, why: str) -> None:
        led.is_fenced = True
        self._fenced[led] = None
        log.warning("CLUSTER: %s is held: %s", _name(led), why)
        self._set_ready(led, False)
        self._clients.look_up_again()
        self._end_publishes(led, NotLedAnyMore())
        self._dismiss(self._consumers_of(led.partition), f"{_name(led)}: {why}")

    def _end_publishes(self, led: Led, error: StorageError) -> None:
        """Tell those who wait for an answer that there is none to be had; what they published may be kept."""
        for group in list(led.partition.written):
            group.end(error)

    def _consumers_of(self, partition: Partition) -> list[Subscription]:
        return [each for channel in partition.channels.values() for each in channel.subscriptions]

    def _dismiss(self, subscriptions: Iterable[Subscription], why: str) -> None:
        owners = {each.owner: None for each in subscriptions if isinstance(each.owner, Client)}
        for_each(owners, lambda client: client.dismiss(NOT_LEADER, why), "closing")

    # -- what is to be done --------------------------------------------------------------------------------------------

    def _settle_soon(self) -> None:
        if not self._is_settling:
            self._is_settling = True
            self._engine.loop.call_soon(self._settle)

    def _settle(self) -> None:
        self._is_settling = False
        if self._is_closing or not self.view.is_fed:
            self._due.clear()
            return
        for partition in list(islice(self._due, SLICE_COUNT)):
            del self._due[partition]
            try:
                self._settle_one(partition)
            except Exception as error:
                log.error("CLUSTER: %s/%d: %r", *partition, error, exc_info=error)
                self._settle_later(partition)
        if self._due:
            self._settle_soon()
        self._engine.schedule()

    def _settle_later(self, partition: PartitionId, after_s: float = AGAIN_S) -> None:
        def again() -> None:
            self._due[partition] = None
            self._settle_soon()

        self._engine.loop.call_later(after_s, again)

    def _settle_one(self, partition: PartitionId) -> None:
        copy = self._copies.get(partition)
        if copy is not None and copy.is_busy:
            return  # it is looked at when that has ended
        if self._record is None:
            return
        replica = None if copy is None else copy.replica
        here = None if replica is None else Here(replica.topic_number, replica.log_id)
        role = role_of(self.view, self._record, partition, here)
        if copy is None:
            if role is Role.CREATE and self._is_alone(partition[0]):
                self._bring_soon(partition[0])  # this node died while it gave it to the cluster
            elif role is Role.CREATE:
                self._create(partition)
            return
        if role is not Role.LEAD and copy.led is not None:
            self._depose(copy)
        if replica is not None and self._is_unfit(replica) and self._lacks(partition, replica) and role is Role.LEAD:
            return  # another one is to lead it
        match role:
            case Role.LEAD:
                self._lead(copy)
            case Role.FOLLOW:
                state = self.view.partitions.get(partition)
                if copy.following is None and replica is not None and replica.log.failed is None:
                    self._follow(copy, self._env.clock.monotonic_ns())
                if state is not None and state.leader and copy.following is not None:
                    self._heard_of(copy, state)
            case Role.SET_ASIDE | Role.REMOVE:
                self._let_go(copy, role)

    # -- what was this node's alone ------------------------------------------------------------------------------------

    def _is_alone(self, topic: str) -> bool:
        return topic in self._broker.topics and not self._replicas.of_topic(topic)

    async def _bring_all(self) -> None:
        """Give the cluster the topics with partitions that this node had before it joined."""
        topics = [topic for topic in self._broker.topics.values() if topic.meta.is_partitioned and not topic.ephemeral]
        for topic in topics:
            if self._is_alone(topic.name):
                await self._bring_one(topic.name)

    def _bring_soon(self, topic: str) -> None:
        if topic not in self._bringing:
            self._begin(self._bring_one(topic), f"giving topic {topic} to the cluster")

    async def _bring_one(self, topic: str) -> None:
        try:
            await self.bring(topic)
        except (NotBrought, TopicNotMade) as error:
            log.error("CLUSTER: %s", error)

    async def bring(self, topic: str) -> None:
        """Give a topic that is this node's alone to the cluster, with one copy; return when clients can use it again.

        Raises:
            NotBrought: it stays this node's alone.
            TopicNotMade: it is the cluster's, and nobody can use it yet.
        """
        self._bringing.add(topic)
        try:
            if self._is_alone(topic):
                await self._bringer.bring(topic)
        finally:
            self._bringing.discard(topic)
        usable = self.serving.wishes.ask(topic)
        await until(usable)
        if usable.error is not None:
            raise usable.error

    async def _take_in(self, topic: Topic, number: int) -> None:
        ended: asyncio.Future[None] = self._engine.loop.create_future()

        def done(error: BaseException | None) -> None:
            if not ended.done():
                ended.set_result(None) if error is None else ended.set_exception(error)

        numbers = list(topic.partitions)
        try:
            subscriptions = self._broker.give_to_cluster(topic, number, done)
        except FlintError as error:
            raise NotBrought(topic.name, f"{error}; ask again") from None
        for each in numbers:
            replica = self._replicas[topic.name, each]
            self._follow(self._add((topic.name, each), replica), self._env.clock.monotonic_ns() - _LEASE_NS)
            self._due[topic.name, each] = None
        self._clients.look_up_again()
        self._dismiss(subscriptions, f"topic {topic.name} becomes one of the cluster")
        self._engine.schedule()
        await ended
        self._settle_soon()

    def _own_record(self) -> NodeRecord:
        assert self._record is not None
        return self._record

    def _heard_of(self, copy: _Copy, state: PartitionState) -> None:
        """Another node leads: who led before is refused."""
        assert copy.following is not None
        if state.epoch > copy.following.epoch and state.leader != self.node_id:
            # the new leader itself opens a stream of this epoch; whoever comes with a lower one is refused
            copy.following.superseded(state.epoch - 1)

    def _ended(self, copy: _Copy, error: BaseException | None, what: str) -> None:
        """Something that was done with a copy has ended."""
        copy.is_busy = False
        if error is not None:
            trace = None if isinstance(error, FlintError | ValueError | OSError) else error
            log.error("CLUSTER: %s/%d: %s failed: %s", *copy.partition, what, error, exc_info=trace)
            self._settle_later(copy.partition, FOLLOW_AGAIN_S)
        else:
            self._due[copy.partition] = None
            self._settle_soon()
        self._engine.schedule()

    # -- what is lost here ---------------------------------------------------------------------------------------------

    def _is_damaged(self, replica: Replica) -> None:
        """A copy lacks something that it had; perhaps in the middle of reading it."""
        partition = (replica.topic, replica.number)
        self._damaged.setdefault(partition, self._env.clock.monotonic_ns())
        self._due[partition] = None
        self._settle_soon()

    def _is_unfit(self, replica: Replica) -> bool:
        """Whether another node had better lead: something is lost here, or nothing more can be stored."""
        return replica.is_damaged or replica.log.failed is not None or self._is_disk_dead

    def _lacks(self, partition: PartitionId, replica: Replica) -> bool:
        """Look after a copy that is unfit; return whether others are in sync, and this node is no longer when the store
        knows.
        """
        if replica.is_damaged:
            self._damaged.setdefault(partition, self._env.clock.monotonic_ns())
        state = self.view.partitions.get(partition)
        if state is None:
            return False
        if renounced(state, self.node_id) is not None:
            self._renounce_soon(partition)
            return True
        if self.node_id not in state.in_sync_nodes and not replica.work:
            self._replicas.lost_end_comes(replica)
        return False

    def _look_at_damaged(self, now_ns: int) -> None:
        """Let the only one in sync go on without what it lacks, when nobody else had it in time."""
        for partition, since_ns in list(self._damaged.items()):
            replica, state = self._replicas.get(partition), self.view.partitions.get(partition)
            if replica is None or not replica.is_damaged:
                del self._damaged[partition]
            elif state is not None and state.in_sync_nodes == (self.node_id,) and not replica.work:
                if now_ns - since_ns >= HOLD_NS or set(state.holders) <= {self.node_id}:
                    log.error(
                        "CLUSTER: %s/%d: what is lost here no other replica in sync has: it is skipped", *partition
                    )
                    self._replicas.accept_damage(replica)
                    self._engine.schedule()

    def _renounce_soon(self, partition: PartitionId) -> None:
        if partition not in self._renouncing:
            self._renouncing.add(partition)
            self._begin(self._renounce(partition), f"leaving the in-sync set of {partition}")

    async def _renounce(self, partition: PartitionId) -> None:
        """Leave an in-sync set, because something is lost here that the others have."""
        key = self._keys.partition(*partition)
        try:
            async with self._renounces:
                pair, state = self.view.pairs.get(key), self.view.partitions.get(partition)
                wanted = None if pair is None or state is None else renounced(state, self.node_id)
                if wanted is not None:
                    swapped = await swap(self._store, key, pair, encode(wanted))
                    if swapped.fate is Fate.APPLIED:
                        log.warning(
                            "CLUSTER: %s/%d: this node is in sync no longer: %s", *partition, self._why(partition)
                        )
        except StoreError as error:
            what = "CLUSTER: %s/%d: the store cannot be told that this node is in sync no longer (%s): %s"
            log.warning(what, *partition, self._why(partition), error)
        finally:
            self._renouncing.discard(partition)
            self._settle_later(partition)

    def _why(self, partition: PartitionId) -> str:
        replica = self._replicas.get(partition)
        if replica is not None and replica.log.failed is not None:
            return f"nothing more can be stored here: {replica.log.failed}"
        if replica is not None and not replica.is_damaged and self._is_disk_dead:
            return "the disk does not answer"
        return "something is lost here, which comes from another replica"

    def _look_at_disk(self) -> None:
        """Find out whether the disk has stopped to answer: what is led here is led by others then.

        Ticks are counted, because a process that stood still says nothing about the disk.
        """
        syncing = self._engine.syncing
        self._sync_ticks = self._sync_ticks + 1 if syncing is not None and syncing is self._syncing else 0
        self._syncing = syncing
        is_dead = self._sync_ticks >= DISK_TICKS
        if is_dead is not self._is_disk_dead:
            self._is_disk_dead = is_dead
            log.error("CLUSTER: %s", "the disk does not answer" if is_dead else "the disk answers again")
            self._due |= dict.fromkeys(self._copies)
            self._settle_soon()
        elif is_dead and self._led:
            self._due |= dict.fromkeys(self._led)
            self._settle_soon()

    def _replace(self, copy: _Copy, replica: Replica) -> None:
        """Begin anew with a copy that takes nothing more, when all that counts is elsewhere."""
        state = self.view.partitions.get(copy.partition)
        if state is None or copy.led is not None:
            self._due[copy.partition] = None
            self._settle_soon()
        elif renounced(state, self.node_id) is not None:
            self._renounce_soon(copy.partition)
        elif self.node_id not in state.in_sync_nodes and not replica.work and not self._is_disk_dead:
            now_ns = self._env.clock.monotonic_ns()
            last_ns, pause_ns = self._begun_anew.get(copy.partition, (now_ns - REPLACE_NS_MIN, 0))
            if now_ns - last_ns >= pause_ns:
                is_again = now_ns - last_ns < 2 * REPLACE_NS_MAX
                pause_ns = min(2 * pause_ns, REPLACE_NS_MAX) if is_again and pause_ns else REPLACE_NS_MIN
                self._begun_anew[copy.partition] = now_ns, pause_ns
                log.error("CLUSTER: %s/%d: nothing more can be stored: %s", *copy.partition, replica.log.failed)
                self._let_go(copy, Role.SET_ASIDE)

    async def _renounce_all(self) -> None:
        """Before this process can be elected: leave the in-sync sets of what is damaged or missing here."""
        while True:
            wanted = [partition for partition in self.view.held.get(self.node_id, ()) if self._must_renounce(partition)]
            if not wanted:
                return
            await asyncio.gather(*map(self._renounce, wanted))
            await asyncio.sleep(TICK_S)  # until the view has it

    def _must_renounce(self, partition: PartitionId) -> bool:
        state, replica = self.view.partitions.get(partition), self._replicas.get(partition)
        if state is None or renounced(state, self.node_id) is None:
            return False
        return replica is None or replica.log_id != state.log_id or replica.is_damaged

    # -- replicas ------------------------------------------------------------------------------------------------------

    def _add(self, partition: PartitionId, replica: Replica | None) -> _Copy:
        copy = self._copies[partition] = _Copy(partition, replica)
        return copy

    def _create(self, partition: PartitionId) -> None:
        topic, number = partition
        state, record = self.view.partitions[partition], self.view.topics[topic]
        copy = self._add(partition, None)
        copy.is_busy = True

        def done(error: BaseException | None) -> None:
            if error is None:
                copy.replica = self._replicas[partition]
                # nobody was ever told that this copy follows
                self._follow(copy, self._env.clock.monotonic_ns() - _LEASE_NS)
            else:
                del self._copies[partition]
            self._ended(copy, error, "making a replica")

        try:
            self._replicas.create(topic, number, state.topic_number, state.log_id, record.meta, done)
        except FlintError:
            del self._copies[partition]
            raise
        self._engine.schedule()

    def _follow(self, copy: _Copy, confirmed_ns: int) -> None:
        """Let another node change a copy."""
        replica = copy.replica
        assert replica is not None
        if copy.followed is None or copy.followed.replica is not replica:
            syncs = partial(self._counts_synced, replica)
            copy.followed = FollowedLog(self._replicas, replica, syncs, self._engine.schedule)
        copy.following = Following(
            replica.topic, replica.number, replica.topic_number, replica.log_id, copy.followed, confirmed_ns
        )
        copy.following.superseded(replica.epoch)  # also by one that was to be noted, and may not be yet

    def _counts_synced(self, replica: Replica) -> bool:
        """Whether only what is synced of a log is acknowledged."""
        return self._syncs or replica.meta.syncdisk == 1

    def _let_go(self, copy: _Copy, role: Role) -> None:
        replica = copy.replica
        assert replica is not None
        if copy.following is not None:
            copy.following.retire()
            copy.following = None
        copy.is_busy = True
        what = "removing its replica" if role is Role.REMOVE else "setting its replica aside"
        log.warning(
            "CLUSTER: %s/%d: %s (topic %d, log %d)", *copy.partition, what, replica.topic_number, replica.log_id
        )

        def done(error: BaseException | None) -> None:
            if error is None:
                del self._copies[copy.partition]
            self._ended(copy, error, what)

        try:
            if role is Role.REMOVE:
                self._replicas.remove(replica, done)
            else:
                self._replicas.set_aside(replica, done)
        except FlintError as error:
            self._ended(copy, error, what)

    # -- leading -------------------------------------------------------------------------------------------------------

    def _lead(self, copy: _Copy) -> None:
        state = self.view.partitions[copy.partition]
        key = self._keys.partition(*copy.partition)
        pair = self.view.pairs[key]
        replica = copy.replica
        assert replica is not None
        if copy.led is not None:
            if copy.led.leading.epoch == state.epoch and not copy.led.leading.is_ended:
                return
            self._depose(copy)
        if copy.following is None:
            self._follow(copy, self._env.clock.monotonic_ns())
        if state.epoch <= max(copy.ended_epoch, replica.epoch - 1):
            return  # what is known of the store is old
        following = copy.following
        assert following is not None
        following.superseded(state.epoch)
        if replica.work:
            self._settle_later(copy.partition, TICK_S)
            return
        confirmed_ns = following.confirmed_ns
        copy.is_busy = True
        copy.following = None  # whoever opens a stream is refused by find

        def noted(error: BaseException | None) -> None:
            if error is not None:
                self._ended(copy, error, f"noting epoch {state.epoch}")
                return
            self._to_promote.append(promote)
            self._promote_some()

        def promote() -> None:
            try:
                self._replicas.promote(replica, state.epoch, self._meta_of(copy), promoted)
            except (FlintError, ValueError) as failure:
                promoted(failure)

        def promoted(error: BaseException | None) -> None:
            self._promoting_count -= 1
            if self._to_promote:
                self._engine.loop.call_soon(self._promote_some)
            if error is not None:
                self._ended(copy, error, "leading it")
                return
            assert replica.partition is not None
            if key not in self.view.pairs:  # it was deleted meanwhile
                self._dismiss(self._replicas.demote(replica, NotLedAnyMore()), "the partition is deleted")
                self._follow(copy, self._env.clock.monotonic_ns())
            else:
                self._begin_leading(copy, replica, replica.partition, state, pair, confirmed_ns)
            self._ended(copy, None, "leading it")

        try:
            self._replicas.note_epoch(replica, state.epoch, True, noted)
        except (FlintError, ValueError) as error:
            self._ended(copy, error, f"noting epoch {state.epoch}")

    def _promote_some(self) -> None:
        """Begin promotions: those that one flush ends, all in one turn, are not to be too many."""
        while self._to_promote and self._promoting_count < SLICE_COUNT:
            self._promoting_count += 1
            self._to_promote.popleft()()
        self._engine.schedule()

    def _meta_of(self, copy: _Copy) -> TopicMeta:
        record = self.view.topics.get(copy.partition[0])
        assert copy.replica is not None
        return copy.replica.meta if record is None else record.meta

    def _begin_leading(
        self,
        copy: _Copy,
        replica: Replica,
        partition: Partition,
        state: PartitionState,
        pair: KeyValue,
        confirmed_ns: int,
    ) -> None:
        topic, number = copy.partition
        record = self.view.topics.get(topic)
        progress: list[Leading] = []
        led_log = LedLog(self._replicas, replica, lambda: progress[0].progress_number, self._engine.schedule)
        leading = Leading(
            topic,
            number,
            self.node_id,
            state,
            pair.mod_revision,
            led_log,
            end=replica.log.next_sequence,
            min_in_sync=1 if record is None else record.min_in_sync,
            needs_sync=self._counts_synced(replica),
            kept=self._kept,
            on_change=self._leading_changed,
        )
        progress.append(leading)
        led = Led(replica, partition, leading, pair, confirmed_ns + _LEASE_NS, copy.last_leader)
        copy.led = self._led[copy.partition] = self._by_partition[partition] = self._by_log[replica.log] = led
        if leading.epoch and self._counts_synced(replica):
            leading.synced(synced_end(replica.log))
            self._engine.sync_soon(replica.log)
        self._unready[led] = None
        self._relink(led)
        self._look_at_lease_for(led)
        self._clients.look_up_again()
        self._note(led)
        self.seen.elected_count += 1
        log.info("CLUSTER: %s is led here, its log ends at %d", _name(led), replica.log.next_sequence)
        current = self.view.partitions.get(copy.partition)
        if current is not None:  # perhaps it was changed since it was to be led
            self._adopt(led, self.view.pairs[self._keys.partition(topic, number)], current)

    def _relink(self, led: Led) -> None:
        """Send a partition to the nodes that its state names."""
        leading = led.leading
        wanted = [] if leading.is_ended else followers_of(leading.state, self.node_id)
        for node in [node for node in led.linked if node not in wanted]:
            del led.linked[node]
            self._peers.link(node).remove(leading.topic, leading.number)
        for node in wanted:
            if node not in led.linked:
                led.linked[node] = None
                self._peers.link(node).add(leading)

    def _depose(self, copy: _Copy) -> None:
        """Lead a partition no more."""
        led, replica = copy.led, copy.replica
        assert led is not None and replica is not None
        leading = led.leading
        leading.ended()
        self._relink(led)
        self._set_ready(led, False)
        copy.led = None
        copy.ended_epoch = leading.epoch
        del self._led[copy.partition]
        del self._by_partition[led.partition]
        del self._by_log[replica.log]
        for group in (self._moving, self._changed, self._unready, self._fenced):
            group.pop(led, None)
        number = copy.partition[1]
        subscriptions = self._replicas.demote(replica, NotLedAnyMore())
        subscriptions = [each for each in subscriptions if not self.let_go(each, number)]
        self.seen.ended_count += 1
        log.warning("CLUSTER: %s is led here no longer: %s", _name(led), why_ended(self.view, self.node_id, leading))
        self._clients.look_up_again()
        self._dismiss(subscriptions, f"{_name(led)} is led elsewhere now")
        self._follow(copy, self._env.clock.monotonic_ns())
        self._engine.schedule()

    def _leading_changed(self, leading: Leading) -> None:
        """Note that something may have to be done; called in the middle of things."""
        led = self._led.get((leading.topic, leading.number))
        if led is not None and led.leading is leading:
            if leading.is_ended:
                self._members_changed()
            self._note(led)

    def _note(self, led: Led) -> None:
        self._changed[led] = None
        self._look_soon()

    def _look_soon(self) -> None:
        if not self._is_looking:
            self._is_looking = True
            self._engine.loop.call_soon(self._look_at_changes)

    def _look_at_changes(self) -> None:
        self._is_looking = False
        for led in list(islice(self._changed, SLICE_COUNT)):
            del self._changed[led]
            try:
                self._look_at(led)
            except Exception as error:
                log.error("CLUSTER: %s: %r", _name(led), error, exc_info=error)
                self._engine.loop.call_later(AGAIN_S, self._note, led)
        if self._changed:
            self._look_soon()

    def _look_at(self, led: Led) -> None:
        leading = led.leading
        partition = (leading.topic, leading.number)
        if self._led.get(partition) is not led:
            return
        if leading.is_ended:
            copy = self._copies[partition]
            if not copy.is_busy:
                self._depose(copy)
                self._due[partition] = None
                self._settle_soon()
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
        if led in self._unready:
            self._look_at_ready(led)
        self.seen.look(led, self._env.clock.monotonic_ns())
        if not led.is_swapping and leading.wanted_state() is not None:
            self._swap_soon(led)
        if any(node not in led.linked for node in followers_of(leading.state, self.node_id)) or any(
            node not in leading.followers for node in led.linked
        ):
            self._relink(led)

    def _move_watermark(self, led: Led) -> None:
        watermark = led.leading.watermark
        stored = led.partition.log
        if watermark is None or led.is_fenced or watermark <= stored.committed_sequence:
            return
        if not led.may_act(self._membership is not None and self._membership.is_held, self._env.clock.monotonic_ns()):
            self._look_at_lease()
            return
        self._broker.set_watermark(led.partition, watermark)
        self._engine.schedule()

    def _look_at_ready(self, led: Led) -> None:
        is_known = led.leading.watermark is not None
        if is_known and not led.is_fenced and self._env.clock.monotonic_ns() >= led.deliver_from_ns:
            del self._unready[led]
            self._set_ready(led, True)

    def _set_ready(self, led: Led, is_ready: bool) -> None:
        if led.is_ready != is_ready:
            led.is_ready = is_ready
            if is_ready:
                log.info("CLUSTER: %s is ready, committed up to %s", _name(led), led.leading.watermark)
            if not self._ready_changed:
                self._engine.loop.call_soon(self._tell_ready)
            topic, number = led.leading.topic, led.leading.number
            gained = self._ready_changed.setdefault(topic, [])
            if not is_ready:
                self._ready_changed[topic] = None
            elif gained is not None:
                gained.append(number)

    def _tell_ready(self) -> None:
        """Tell of each topic once: hundreds of its partitions may have become ready in a turn."""
        changed, self._ready_changed = self._ready_changed, {}
        for_each(changed, lambda topic: self._on_ready(topic, changed[topic]), "telling what is ready of")
        self.serving.look()

    def _swap_soon(self, led: Led) -> None:
        """Have written what a leader wants of the store, with what others want in this turn."""
        led.is_swapping = True
        self._to_swap[led] = None
        if self._swapping_count < SWAPPING_MAX:
            self._swapping_count += 1
            self._begin(self._swap_waiting(), "changing who is in sync")

    async def _swap_waiting(self) -> None:
        try:
            while self._to_swap:
                swapping = list(islice(self._to_swap, SWAPS_MAX))
                for led in swapping:
                    del self._to_swap[led]
                try:
                    await self._swap(swapping)
                finally:
                    self._members_changed()
                    for led in swapping:
                        led.is_swapping = False
                        self._note(led)
        finally:
            self._swapping_count -= 1

    async def _swap(self, swapping: Sequence[Led]) -> None:
        """Write what leaders want of the store, as far as they want it still: together, or else each alone."""
        wanted = {led: state for led in swapping if (state := led.leading.wanted_state()) is not None}
        for led, state in wanted.items():
            led.asked = led.leading.state, why_changed(led.leading, state)
            led.leading.swap_began(state)
        self._members_changed()
        is_doubtful = False
        if len(wanted) > 1:
            try:
                found = await self._swap_together(wanted)
            except OutcomeUnknown:
                is_doubtful = True  # it may be carried out yet: each finds that, or keeps it from it
            except StoreError:
                pass  # whether it was one of them, or all, is found out below
            else:
                if found is not None:
                    for (led, state), pair in zip(wanted.items(), found, strict=True):
                        self._swapped(led, state, pair)
                    return
        ends = await asyncio.gather(*(self._swap_one(led, state, is_doubtful) for led, state in wanted.items()))
        pause_s = max(ends, default=0.0)
        if pause_s:
            await asyncio.sleep(pause_s)

    async def _swap_together(self, wanted: Mapping[Led, PartitionState]) -> Sequence[KeyValue | None] | None:
        """Ask for several changes in one transaction; what stands there then, or None: nothing was changed."""
        pairs = [(led.pair, encode(state)) for led, state in wanted.items()]
        conditions = tuple(Compare(pair.key, pair.mod_revision) for pair, _ in pairs)
        puts = tuple(Put(pair.key, value) for pair, value in pairs)
        result = await self._store.txn(Txn(conditions, (*puts, *(Get(pair.key) for pair, _ in pairs))))
        return result.found if result.succeeded else None

    async def _swap_one(self, led: Led, state: PartitionState, is_doubtful: bool) -> float:
        """Ask for one change; return how many seconds to wait before another.

        Args:
            is_doubtful: it was asked for before, and may have been made.
        """
        leading = led.leading
        members = ",".join(state.in_sync_nodes)
        try:
            swapped = await swap(self._store, led.pair.key, led.pair, encode(state))
        except StoreError as error:
            log.warning("CLUSTER: %s: in sync %s: %s", _name(led), members, error)
            if is_doubtful or isinstance(error, OutcomeUnknown):
                leading.swap_ended(None)
            else:
                leading.swap_not_sent()
            return AGAIN_S
        return self._swapped(led, state, swapped.now)

    def _swapped(self, led: Led, wanted: PartitionState, now: KeyValue | None) -> float:
        """Take note of what stands in the store; return how many seconds to wait before another change."""
        leading = led.leading
        if now is None:
            leading.swap_not_sent()
            leading.ended()
            return 0.0
        led.pair = now if now.mod_revision > led.pair.mod_revision else led.pair
        try:
            # what was written is not read again
            state = wanted if now.value == encode(wanted) else decode(now.key, now.value, PartitionState)
        except BadState as error:
            log.error("CLUSTER: %s", error)
            leading.swap_ended(None)
            return FOLLOW_AGAIN_S
        before, why = led.asked  # the view may have the new state already
        leading.swap_ended(state, now.mod_revision)
        if state == wanted:
            self.seen.changed(before, state)
        else:
            why = "somebody else changed it"
        log.info("CLUSTER: %s: in sync now %s: %s", _name(led), ",".join(state.in_sync_nodes), why)
        return 0.0

    # -- the engine ----------------------------------------------------------------------------------------------------

    def written(self, groups: Sequence[PublishGroup]) -> None:
        """Groups were written: what is led here is sent on."""
        by_partition = self._by_partition
        if not by_partition:
            return
        for group in groups:
            led = by_partition.get(group.partition)
            if led is not None:
                led.leading.written(led.partition.log.next_sequence)
                if not led.is_writable:  # they were taken a moment before
                    self._note(led)
                self._move_watermark(led)  # with this turn, where nobody else is needed

    def synced(self, logs: Iterable[Any]) -> None:
        """Logs were synced: what is led here may be committed, and what is followed acknowledged."""
        for each in logs:
            led = self._by_log.get(each)
            if led is not None:
                led.leading.synced(synced_end(led.replica.log))
        unsynced, self._unsynced = self._unsynced, {}
        for following in unsynced:
            following.synced()
            if following.log.acknowledged_end < following.log.end:
                self._unsynced[following] = None

    def _hand_on(self, records: Mapping[PartitionId, Sequence[object]], done: Callable[..., None]) -> None:
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
            led = self._led.get(partition)
            if led is None:
                # it is being promoted, so its followers are sent the whole state; or it is led no longer
                copy = self._copies.get(partition)
                one_done(partition, None if copy is not None and copy.is_busy else NotLedAnyMore())
                continue
            leading = led.leading
            number = leading.progress(encode_records(of_it), led.partition.log.committed_sequence)
            leading.when_progress_replicated(number, partial(one_done, partition))

    # -- following -----------------------------------------------------------------------------------------------------

    def find(self, frame: Open, peer: Identity) -> Following | tuple[Refusal, int, str]:
        """Return the copy that a node says it leads; or why it is not followed."""
        partition = (frame.topic, frame.partition)
        copy = self._copies.get(partition)
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
        state = self.view.partitions.get(partition)
        if copy.replica.is_damaged and (state is None or self.node_id in state.in_sync_nodes):
            return Refusal.NOT_HERE, copy.replica.epoch, "something is lost here: it leaves the in-sync set first"
        self._sync_soon(copy.following)
        return copy.following

    def _appended(self, link: FollowerLink) -> None:
        """Have synced what was appended to, where that is the rule."""
        for following in link.take_appended():
            self._sync_soon(following)

    def _sync_soon(self, following: Following) -> None:
        followed = following.log
        if isinstance(followed, FollowedLog) and followed.acknowledged_end < followed.end:
            self._unsynced[following] = None
            self._engine.sync_soon(followed.replica.log)

    # -- time ----------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._timer = self._engine.loop.call_later(TICK_S, self._tick)
        now_ns = self._env.clock.monotonic_ns()
        try:
            self.look()
            self._look_at_disk()
            self._look_at_fenced(now_ns)
            self._peers.tick(now_ns)
            for led in list(self._moving):
                led.leading.tick(now_ns)  # what it finds it tells
            for led in list(self._unready):
                if now_ns >= led.deliver_from_ns:
                    self._look_at_ready(led)
            for copy in self._swept():
                following, replica = copy.following, copy.replica
                if replica is not None and replica.log.failed is not None and not copy.is_busy:
                    self._replace(copy, replica)
                elif following is not None and following.broken is not None and not copy.is_busy:
                    self._mend(copy, following)
            if self._damaged:
                self._look_at_damaged(now_ns)
            self._peers.leave_idle()
            self.serving.tick()
        except Exception as error:
            log.error("CLUSTER: %r", error, exc_info=error)

    def _swept(self) -> list[_Copy]:
        """Return some of the copies: all of them once in ``SWEEP_TICKS``."""
        if not self._to_sweep:
            self._to_sweep = list(self._copies.values())
            self._sweep_count = -(-len(self._to_sweep) // SWEEP_TICKS)
        swept, self._to_sweep = self._to_sweep[: self._sweep_count], self._to_sweep[self._sweep_count :]
        return [copy for copy in swept if self._copies.get(copy.partition) is copy]

    def _mend(self, copy: _Copy, following: Following) -> None:
        """Try again with a copy that could not be written."""
        if copy.again is not None:
            return
        assert copy.replica is not None
        log.error("CLUSTER: %s/%d: the copy here could not be written: %s", *copy.partition, following.broken)

        def again() -> None:
            copy.again = None
            replica = copy.replica
            if copy.following is not following or replica is None or replica.work or replica.log.failed is not None:
                return
            if replica.log.has_room:  # else it would be in sync until the next message comes
                self._follow(copy, following.confirmed_ns)

        copy.again = self._engine.loop.call_later(FOLLOW_AGAIN_S, again)

    # -- what clients ask ----------------------------------------------------------------------------------------------

    def to_publish(self, event: Publish) -> Partition | None:
        """See :class:`flintmq.nsqd.leadership.Leadership`."""
        topics, name, number = self._broker.topics, event.topic, event.partition
        if self.is_replicated(name):
            is_named = number is not None and number != NOT_A_NUMBER
            if is_named and number is not None:
                if (name, number) not in self._led and self._is_of_cluster(name, number):
                    raise not_leader(event.command, name, number, "is led by another node", fatal=False)
            elif name not in topics:
                raise not_leader(event.command, name, None, "is led by other nodes", fatal=False)
        found = partitions.to_publish(topics, event)
        if found is not None and (led := self._by_partition.get(found)) is not None and not led.is_writable:
            raise not_writable(event.command, name, found.number, "has too few replicas that acknowledge")
        return found

    def to_consume(self, event: Subscribe) -> list[int] | None:
        """See :class:`flintmq.nsqd.leadership.Leadership`."""
        topics, name, number = self._broker.topics, event.topic, event.partition
        is_named = number is not None and number != NOT_A_NUMBER
        if self.is_replicated(name):
            if name not in topics or (
                is_named
                and number is not None
                and (name, number) not in self._led
                and self._is_of_cluster(name, number)
            ):
                raise not_leader(
                    event.command, name, number if is_named else None, "is led by another node", fatal=True
                )
        numbers = partitions.to_consume(topics, event, self._broker.is_order_must)
        if self.is_replicated(name):
            for each in topics[name].partitions if numbers is None else numbers:
                led = self._led.get((name, each))
                if led is None or not led.is_ready:
                    why = "is not ready: its leader was elected a moment ago"
                    raise not_leader(event.command, name, each, why, fatal=True)
        return numbers

    def check_read(self, command: str, topic: str, number: int | None) -> None:
        """See :class:`flintmq.nsqd.leadership.Leadership`."""
        if not self.is_replicated(topic):
            return
        held = self._broker.topics.get(topic)
        numbers = ([] if held is None else list(held.partitions)) if number is None else [number]
        if number is not None and not self._is_of_cluster(topic, number):
            return
        for each in numbers:
            led = self._led.get((topic, each))
            if led is None or not led.is_ready:
                why = "is led by another node" if led is None else "is not ready: its leader was elected a moment ago"
                raise not_leader(command, topic, each, why, fatal=False)
        if not numbers:
            raise not_leader(command, topic, None, "is led by other nodes", fatal=False)

    def led_elsewhere(self, topic: str) -> list[LedElsewhere] | None:
        """See :class:`flintmq.nsqd.leadership.Leadership`."""
        if not self.is_replicated(topic):
            return None
        states = self.view.of_topic.get(topic, {})
        found: list[LedElsewhere] = []
        for number in sorted(states.keys() | self._replicas.of_topic(topic).keys()):
            led = self._led.get((topic, number))
            if led is not None and led.is_ready:
                continue
            state = states.get(number)
            if state is None:  # the store has not told of it yet, or somebody else's store is asked
                replica = self._replicas[topic, number]
                found.append(LedElsewhere(number, replica.log_id, replica.epoch, ""))
                continue
            node = self.view.nodes.get(state.leader) if state.has_leader(self.view.nodes) else None
            address = "" if node is None or node.node == self.node_id else format_address(node.host, node.tcp_port)
            found.append(LedElsewhere(number, state.log_id, state.epoch, address))
        return found

    def elsewhere(self, event: Publish) -> PendingReply | None:
        """See :class:`flintmq.nsqd.leadership.Leadership`."""
        name = event.topic
        return None if name in self._broker.topics else self.serving.elsewhere(event, self.is_replicated(name))

    def prepare(self, client: Client, event: Subscribe) -> Ended | None:
        """See :class:`flintmq.nsqd.leadership.Leadership`."""
        return self.serving.prepare(client, event, self.is_replicated(event.topic))

    def relay(self, client: Client, event: Subscribe) -> Ended | None:
        """See :class:`flintmq.nsqd.leadership.Leadership`."""
        return self.serving.relay(client, event, self.is_replicated(event.topic))

    def wish(self, topic: str, is_extended: bool = False) -> Ended | None:
        """See :class:`flintmq.nsqd.leadership.Leadership`."""
        return self.serving.wish(topic, is_extended, self.is_replicated(topic))

    def check_create(self, topic: str) -> None:
        """See :class:`flintmq.nsqd.leadership.Leadership`."""
        if self.is_replicated(topic):
            raise OfTheCluster(topic)
        if topic not in self._broker.topics and not self.serving.is_own(topic):
            raise NotOfOneNode(topic)

    def check_delete(self, topic: str) -> None:
        """See :class:`flintmq.nsqd.leadership.Leadership`."""
        if self.is_replicated(topic):
            raise OfTheCluster(topic)

    def is_replicated(self, topic: str) -> bool:
        """See :class:`flintmq.nsqd.leadership.Leadership`."""
        if self._replicas.of_topic(topic):
            return True
        # what this node had before it joined stays its own until it is given to the cluster
        return topic in self.view.topics and topic not in self._broker.topics

    def is_ready(self, topic: str, number: int) -> bool:
        """Whether a partition may be read here; also of what is no business of the cluster."""
        led = self._led.get((topic, number))
        return led.is_ready if led is not None else not self.is_replicated(topic)

    def _is_of_cluster(self, topic: str, number: int) -> bool:
        return (topic, number) in self.view.partitions or number in self._replicas.of_topic(topic)

    # -- figures -------------------------------------------------------------------------------------------------------

    def figures(self) -> ClusterFigures:
        """See :class:`flintmq.nsqd.replica_figures.ClusterPart`."""
        seen = self.seen
        return ClusterFigures(
            cluster=self._keys.cluster,
            node=self.node_id,
            incarnation=self.incarnation,
            has_lease=self._has_lease(),
            revision=self.view.revision,
            problem=self.problem,
            elected_count=seen.elected_count,
            ended_count=seen.ended_count,
            joined_count=seen.joined_count,
            left_count=seen.left_count,
            caught_up_count=seen.caught_up_count,
            replica_count=len(self._copies),
            leader_count=len(self._led),
        )

    def replicas(self, topic: str = "", partition: int | None = None) -> Iterator[ReplicaFigures]:
        """See :class:`flintmq.nsqd.replica_figures.ClusterPart`."""
        for each in sorted_partitions(self._copies, topic, partition):
            copy = self._copies.get(each)
            if copy is not None:
                yield figures_of(self.view, each, copy.replica, copy.led, copy.following)

    def copies(self, lags_only: bool = False) -> list[dict[str, Any]]:
        """Return what is led here, how much that is, and how far the other copies are.

        Args:
            lags_only: of those partitions alone that somebody is not in sync of who is to be.
        """
        rows = []
        for (topic, number), led in self._led.items():
            leading, stored = led.leading, led.replica.log
            if lags_only and not leading.state.lacking:
                continue
            total = bytes_below(stored, stored.next_sequence)
            rows.append(
                {
                    "topic": topic,
                    "partition": number,
                    "bytes": total,
                    "messages": stored.next_sequence - stored.start_sequence,
                    "end_bytes": stored.end_offset_bytes,
                    "followers": {
                        node: {
                            "bytes_done": bytes_below(stored, follower.acked),
                            "messages_done": max(0, follower.acked - stored.start_sequence),
                        }
                        for node, follower in leading.followers.items()
                    },
                }
            )
        return rows

    def describe(self) -> str:
        """The state of everything, for humans and failing tests."""
        lines = [f"node {self.node_id} incarnation={self.incarnation} held={self._is_held} {self.problem}"]
        lines += [
            f"  {led.leading.describe()} ready={led.is_ready} fenced={led.is_fenced}" for led in self._led.values()
        ]
        for link in self._peers.links():
            lines += [f"  {stream.describe()}" for stream in link.streams.values()]
        lines += [f"  {copy.replica.describe()}" for copy in self._copies.values() if copy.replica is not None]
        return "\n".join(lines)


def _name(led: Led) -> str:
    return name_of(led.leading)
