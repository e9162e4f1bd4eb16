"""A node's part in a cluster: it follows the store, and leads and follows the partitions that the store gives it.

::

    store --follow--> view --> Settling --> create, follow, lead, set aside, remove        broker/replicas.py
                                   |
              Leaders (leaders.py) |                <--- Peers --->   Followings (followings.py)
       Lease, Readiness, Swaps     |
      engine: written, synced   watermark -> Broker.set_watermark -> publishers and consumers

An agent is put together of those who each own a part of its state:

===================== ==============================================================================================
``table.py``          which partitions are here, and which of them are led
``settling.py``       the role of each partition here; ``due.py``: when it is looked at
``leaders.py``        what is led: from the election to the end; ``founding.py``: what a partition begins with
``lease.py``          whether what is led may go on
``readiness.py``      whether what is led may be read
``swaps.py``          who is in sync, in the store
``followings.py``     what others lead, and change here
``damaged.py``        copies that another node had better lead
``older_records.py``  topics of which the store knows less than this node
``alone.py``          topics from before this node joined
``belonging.py``      which cluster this is; ``disk_mark.py``: whether directory or store are older than they were
``let_go.py``         logs that were here
``admission.py``      what clients may do here; ``serving.py``: what is done for them elsewhere
``shown.py``          figures
===================== ==============================================================================================

Rules of this file:

- What the store says is told to all of them here, in one order.
- What may be acknowledged or delivered is asked immediately before: :meth:`Agent.look` runs before every turn's end.
- What is done for every publish or turn is a dictionary look-up; what is done ten times a second is done for those
  partitions alone that are not at rest.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from flintmq.broker.partition import PublishGroup
from flintmq.broker.topic import Topic
from flintmq.cluster.keys import Keys
from flintmq.cluster.state import NodeRecord
from flintmq.cluster.store import Lapses, Snapshot, Store, StoreError, follow
from flintmq.cluster.view import Change, NodeChange, PartitionChange, PartitionId, TopicChange, Unreadable, View
from flintmq.env import Env
from flintmq.net.tasks import Tasks, kept_up
from flintmq.nsqd.client import Clients
from flintmq.nsqd.cluster.admission import Admission
from flintmq.nsqd.cluster.alone import TOLD_MAX, Alone
from flintmq.nsqd.cluster.belonging import Belonging, BelongingStore, OtherCluster, OtherStore
from flintmq.nsqd.cluster.bringing import Bringing
from flintmq.nsqd.cluster.damaged import Damaged
from flintmq.nsqd.cluster.disk_mark import MARK_S, MARK_SOON_S, DiskMark
from flintmq.nsqd.cluster.due import Due
from flintmq.nsqd.cluster.endings import Endings
from flintmq.nsqd.cluster.followings import Followings
from flintmq.nsqd.cluster.leaders import Leaders
from flintmq.nsqd.cluster.lease import Lease
from flintmq.nsqd.cluster.led import Led
from flintmq.nsqd.cluster.let_go import LetGo
from flintmq.nsqd.cluster.older_records import OlderRecords
from flintmq.nsqd.cluster.peer_tls import PeerTls
from flintmq.nsqd.cluster.peers import Peers
from flintmq.nsqd.cluster.readiness import OnReady, Readiness
from flintmq.nsqd.cluster.room import DiskRoom
from flintmq.nsqd.cluster.rounds import AGAIN_S, Rounds
from flintmq.nsqd.cluster.seen import Seen, name_of
from flintmq.nsqd.cluster.serving import Serving
from flintmq.nsqd.cluster.settling import Settling
from flintmq.nsqd.cluster.shown import Shown
from flintmq.nsqd.cluster.swaps import Swaps
from flintmq.nsqd.cluster.table import Table
from flintmq.nsqd.engine import Engine
from flintmq.nsqd.file_room import FileRoom
from flintmq.storage import Files
from flintmq.topic_meta import TopicMeta
from flintmq.wire.peer import Identity, Purpose

log = logging.getLogger(__name__)

TICK_S = 0.1
SHARED_LOOK_NS = 1_000_000_000
"""Between two looks at who has copies of the same partitions, at least."""
ANSWERED_S_MAX = 0.3
"""Until what was published is answered, before others lead."""
HAND_OVER_S_MAX = 5.0
"""Until others lead, before this node ends all the same."""
HAND_OVER_STUCK_S = 0.7
"""As long as that without anybody taking anything over."""
ENDED_S_MAX = 1.5
"""Until everybody who published is told what became of it, before connections are closed; it takes as long as a copy
needs to learn from the next leader what is committed (``unanswered.KNOWN_NS_MAX``), or another node to answer."""
HANDED_LOOK_S = 0.01


class Agent:
    """This node in the cluster.

    Args:
        node_id: identity of the data directory.
        files: of the data directory.
        secret: that all nodes share.
        tls: between nodes; None: it is plain.
        on_ready: called with a topic and the partitions of it that can be read here from now on; None: some of it
            can be read no longer.
        change_meta: puts another state of a topic into force.
        room: for the files of replicas.
        own_topics: that are this node's alone.
        makes_topics: whether topics that publishing and subscribing make are the cluster's.
        are_created: whether publishing and subscribing make topics at all.
        msg_timeout_ns: of consumers that have not said another one.

    Attributes:
        view: of the store, as far as it is followed.
        table: the partitions that are here.
        admission: what clients may do here.
        serving: what is done for clients elsewhere.
        shown: figures.
        alone: gives topics of this node to the cluster.
        on_refused: called once when this node is not of the cluster that the store has, and takes no part.
    """

    def __init__(
        self,
        env: Env,
        engine: Engine,
        store: Store,
        keys: Keys,
        node_id: str,
        files: Files,
        secret: bytes,
        clients: Clients,
        on_ready: OnReady,
        change_meta: Callable[[Topic, TopicMeta], bool],
        room: FileRoom,
        own_topics: frozenset[str] = frozenset(),
        makes_topics: bool = True,
        are_created: bool = True,
        msg_timeout_ns: int = 60_000_000_000,
        tls: PeerTls | None = None,
    ) -> None:
        clock, loop, broker = env.clock, engine.loop, engine.broker
        self.on_refused: Callable[[OtherCluster], None] = lambda _: None
        view = self.view = View(keys)
        table = self.table = Table()
        self.node_id = node_id
        self.incarnation = f"{env.random.getrandbits(64):016x}"
        self._clock = clock
        self._engine = engine
        self._broker = broker
        self._replicas = broker.replicas
        self._belonging = Belonging(env, files)
        store = self._store = BelongingStore(store, keys, self._belonging)
        self._keys = keys
        self._gone = LetGo(env, files)
        self._is_store_older = False
        self._to_count = asyncio.Event()
        self._refusal: OtherCluster | None = None
        self._boot_id = files.boot_id()
        self._mark = DiskMark(env, files, store, keys, view, node_id, self.incarnation)
        self._clients = clients
        self._change_meta = change_meta
        self._syncs = engine.durability.waits_for_syncs
        self._record: NodeRecord | None = None
        self._has_cluster = asyncio.Event()  # its record is known, which the first nsqlookupd makes
        self._is_closing = False
        self._is_sharing_changed = False
        self._shared_ns = 0
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = Tasks(loop)
        self._due = Due(loop, self._settle, self._may_settle, engine.schedule)
        changed: Rounds[Led] = Rounds(loop, self._look_at, lambda led: name_of(led.leading))
        self._lease = Lease(
            clock, store, keys, view, table, self._held, self._fenced, self._freed, self._process_replaced
        )
        self._readiness = Readiness(loop, clock, on_ready, self._told_ready, changed.note)
        self._followings = Followings(
            loop, node_id, view, table, broker.followed_replicas, self._syncs, engine.sync_soon, engine.schedule
        )
        self._peers = Peers(
            env, self._identity, secret, self._followings, self._find_node, self._followings.appended, self._refused,
            tls=tls,
        )  # fmt: skip
        seen = Seen()
        swaps = Swaps(
            clock, store, lambda node: view.pairs.get(keys.node(node)), self._tasks, seen,
            self._lease.members_changed, self._lease.look_at, changed.note,
        )  # fmt: skip
        self.leaders = Leaders(
            clock, engine, node_id, keys, view, table, self._lease, self._readiness, self._followings, swaps,
            self._peers, clients, seen, self._due, changed,
        )  # fmt: skip
        self._damaged = Damaged(
            clock, node_id, keys, view, store, table, self._replicas, self._due, self._tasks, engine.schedule,
            self.incarnation, self._gone, self._followings.disk_changed,
        )  # fmt: skip
        self.serving = Serving(
            env, broker, node_id, keys, view, store, self._peers, table.led, self._lease.lease_id, own_topics,
            makes_topics, are_created, engine.wants_output, engine.schedule, msg_timeout_ns,
        )  # fmt: skip
        bringing = Bringing(
            keys, view, store, env.random, broker.topics, self._own_record, self._lease.lease_id, self._take_in
        )
        self.alone = Alone(
            clock, engine, view, table, bringing, self.serving.wishes, self._followings, clients, self._due,
            self._tasks, self._kept_alone_changed,
        )  # fmt: skip
        older_records = OlderRecords(clock, keys, view, store, broker.topics, self._replicas, self._due, self._tasks)
        self._settling = Settling(
            clock, lambda: self._record, view, table, self._replicas, self.leaders, self._followings, self._damaged,
            Endings(keys, view, store, self._due, self._tasks), older_records, self.alone, self._due, engine.schedule,
            room, self._gone, lambda: self._is_store_older, lambda: not self.problem,
        )  # fmt: skip
        write_errors = (lambda: broker.write_error, lambda: self._followings.write_error)  # copies alone may find none
        self._room = DiskRoom(broker.free_bytes, write_errors, self._room_changed)
        self.admission = Admission(broker, node_id, view, table, self.serving, self._room, self.alone.why_refused)
        self.shown = Shown(
            node_id, self.incarnation, view, table, self._lease, self._peers, seen, store, self._gone, self.alone
        )

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self, address: str, record: NodeRecord) -> None:
        """Listen for other nodes, follow the store, and be one of the cluster.

        Args:
            record: of this node, but for what is known here.

        Raises:
            ListenFailed: it cannot be listened for them.
            StorageError: it cannot be read to which cluster the data directory belongs.
        """
        await self._belonging.load()
        await self._mark.load()
        await self._gone.load()
        _, port = await self._peers.listen(address)
        self._record = msgspec.structs.replace(
            record, node=self.node_id, incarnation=self.incarnation, boot_id=self._boot_id, peer_port=port,
            syncs=self._syncs,
        )  # fmt: skip
        log.info("PEER: listening on %s for other nodes; this is node %s", port, self.node_id)
        for partition, replica in self._replicas.items():
            self._followings.follow(self.table.add(partition, replica), self._clock.monotonic_ns())
            if replica.is_damaged:
                self._damaged.found(replica)
        self._replicas.on_damaged = self._damaged.found
        self._broker.led_replicas.on_records = self.leaders.hand_on
        self._broker.led_replicas.keep_floors_by(self.leaders)
        self._engine.replication = self
        self._tasks.begin(
            kept_up(self._follow_store, "following the cluster", pause_s=AGAIN_S), "following the cluster"
        )
        self._tasks.begin(self._join(), "joining the cluster")
        self._tick()

    async def _join(self) -> None:
        await self._has_cluster.wait()
        assert self.view.cluster is not None
        await self._belonging.adopt(self.view.cluster.cluster_id)
        self._due.note_all(self.table.copies)
        await self._damaged.renounce_all()
        await self._count()
        self._lease.begin(self._own_record())
        self._tasks.begin(kept_up(self._keep_counting, "counting", pause_s=MARK_S), "counting")
        self._tasks.begin(self.alone.bring_all(), "giving topics to the cluster")

    async def _keep_counting(self) -> None:
        while True:
            try:
                async with asyncio.timeout(MARK_S):
                    await self._to_count.wait()
                await asyncio.sleep(MARK_SOON_S)
            except TimeoutError:
                pass
            self._to_count.clear()
            await self._gone.recount()
            await self._count()

    async def _count(self) -> None:
        if self.problem:
            return  # the count is that of the process that is registered
        if self._is_store_older:
            if any(map(self._is_unwanted, self.table.copies)):
                return  # until they are set aside, the next process has to find out as well
            self._is_store_older = False  # what the store says of copies from now on is of now
        if not self._own_record().is_older or not self._is_trusted():
            await self._mark.advance()

    def _is_trusted(self) -> bool:
        """Whether an in-sync set counts on what this node had before its data directory was an older one, so that the
        next process has to find that out as well.
        """
        own = self._own_record().member
        sets = (self.view.partitions[partition].in_sync for partition in self.view.held.get(self.node_id, ()))
        return any(member.node == self.node_id and member != own for members in sets for member in members)

    def _found_older(self) -> None:
        self._boot_id = f"older/{self.incarnation}"
        self._record = msgspec.structs.replace(self._own_record(), boot_id=self._boot_id, is_older=True)
        log.error(
            "CLUSTER: the data directory is older than what this node last told the coordination store: a snapshot "
            "that was put back, or a disk that lost what it had synced. Of what it had in sync others lead, or who has "
            "most when all are back"
        )

    def _is_unwanted(self, partition: PartitionId) -> bool:
        state = self.view.partitions.get(partition)
        return state is None or self.node_id not in (*state.holders, *state.in_sync_nodes)

    def _found_store_older(self) -> None:
        self._is_store_older = True
        log.error(
            "CLUSTER: the coordination store is older than what this node last told it: a backup of the store was put "
            "back, or this node was removed from the cluster. Copies that it says are not wanted here are set aside, "
            "not deleted; what it says is in sync here and is not is led by nobody (flintmq cluster status)"
        )

    def _find_lost(self) -> None:
        """Note what this node is said to have in sync and does not have: from before this process, so that it was not
        just made. Of one in its first epoch that is known only where the store is older.
        """
        for partition in self.view.held.get(self.node_id, ()):
            state, replica = self.view.partitions[partition], self._replicas.get(partition)
            if replica is not None and replica.log_id == state.log_id:
                continue
            if self._replicas.is_alone(partition[0]):
                continue  # it is about to be given to the cluster
            if self._is_store_older or state.epoch > 1:
                self._gone.note(state.log_id, is_aside=False)

    def _is_foreign(self) -> bool:
        """Whether copies are here that a store knows nothing of, nor of this node."""
        if self._belonging.cluster_id or not self._mark.is_there or not self.table.copies:
            return False
        return not Belonging.is_known(self.view, self.node_id, self._replicas.items())

    def _refuse(self, what: str) -> None:
        """End this process, which has not joined: nothing of the data directory is of this cluster."""
        if self._refusal is None:
            self._refusal = OtherCluster(what)
            self.on_refused(self._refusal)

    def serve_others(self, new_session: Callable[[int], asyncio.Protocol]) -> None:
        """Take what other nodes hand on.

        Args:
            new_session: serves one connection of theirs.
        """
        answers: dict[int, Callable[[], asyncio.Protocol]] = {
            Purpose.UNREAD: self.serving.answers,
            Purpose.CHANNELS: self.leaders.founding.answers,
        }

        def session(purpose: int) -> asyncio.Protocol:
            return answers[purpose]() if purpose in answers else new_session(purpose)

        self._peers.new_session = session

    async def hand_over(self) -> None:
        """Have others lead what is led here, and leave the in-sync sets: this node ends in a moment.

        What was published is answered first; nothing more is taken. It takes as long as others take over, and no longer
        than ``HAND_OVER_S_MAX``; nothing is waited for that nobody else can lead.
        """
        if self._record is None or self.problem or not self._remaining():
            return
        loop = self._engine.loop
        self.admission.is_ending = True
        self._clients.look_up_again()
        await self._until_answered(ANSWERED_S_MAX)
        self._record = msgspec.structs.replace(self._record, is_draining=True, is_ending=True)
        self._tasks.begin(self._lease.update(self._record), "telling the cluster that this node ends")
        began = changed = loop.time()
        asked = left = self._remaining()
        log.info("CLUSTER: this node ends: others take over %d partitions", left)
        while left and loop.time() < min(began + HAND_OVER_S_MAX, changed + HAND_OVER_STUCK_S):
            await asyncio.sleep(HANDED_LOOK_S)
            before, left = left, self._remaining()
            changed = loop.time() if left < before else changed
        log.info("CLUSTER: %s", handed_over(asked, left, loop.time() - began))

    async def answered(self) -> None:
        """Wait until everybody is told what became of what was published here, for ``ENDED_S_MAX`` at most."""
        await self._until_answered(ENDED_S_MAX, lambda: self.serving.handing.is_idle)

    async def _until_answered(self, seconds: float, is_idle: Callable[[], bool] = lambda: True) -> None:
        loop = self._engine.loop
        until = loop.time() + seconds
        while (self.leaders.has_unanswered or not is_idle()) and loop.time() < until:  # noqa: ASYNC110 - it is in many
            await asyncio.sleep(HANDED_LOOK_S)

    def _remaining(self) -> int:
        """Return how many partitions this node leads or is in sync of, where another one could go on."""
        nodes, count = self.view.nodes, 0
        for partition in self.view.held.get(self.node_id, ()):
            state = self.view.partitions.get(partition)
            if state is None or (state.leader != self.node_id and self.node_id not in state.in_sync_nodes):
                continue
            others = [nodes.get(node) for node in state.in_sync_nodes if node != self.node_id]
            count += any(record is not None and not record.is_draining for record in others)
        return count

    async def close(self) -> None:
        """Lead nothing any more, and leave the cluster."""
        self._is_closing = True
        await self.serving.close()
        await self.leaders.founding.close()
        if self._timer is not None:
            self._timer.cancel()
        self._lease.end()
        await self._lease.close()
        await self._tasks.close()
        await self._peers.close()
        for copy in self.table.copies.values():
            self._followings.give_up_unanswered(copy)
        self.leaders.end_all()
        self._broker.led_replicas.on_records = None
        self._replicas.on_damaged = None
        self._engine.replication = None
        await self._store.close()

    def set_draining(self, is_draining: bool) -> None:
        """Tell the cluster whether this node is to lead nothing."""
        if self._record is None or self.problem:
            return  # it is asked again when it has begun
        self._record = msgspec.structs.replace(self._record, is_draining=is_draining)
        self._tasks.begin(self._lease.update(self._record), "telling the cluster that this node drains")

    def _room_changed(self) -> None:
        self._record = msgspec.structs.replace(self._own_record(), is_full=self._room.is_full)
        self._tasks.begin(self._lease.update(self._record), "telling the cluster whether the disk has room")

    def _kept_alone_changed(self) -> None:
        kept = self.alone.kept()
        self._record = msgspec.structs.replace(
            self._own_record(), kept_alone=tuple(kept[:TOLD_MAX]), kept_alone_count=len(kept)
        )
        self._tasks.begin(self._lease.update(self._record), "telling the cluster what it has not taken of this node")

    @property
    def problem(self) -> str:
        """Why this node takes part no longer, and what to do; empty: it does, or is about to."""
        return self._lease.problem

    @property
    def is_disk_full(self) -> bool:
        """Whether others are to lead because this node's disk has too little room."""
        return self._room.is_full

    def data_removed(self) -> None:
        """Nothing that is stored here outlives this process: others are to lead, and it is in sync with nothing."""
        self._damaged.data_removed()

    def _process_replaced(self) -> None:
        """Take part no longer, for good: another process has registered as this node, and speaks for it. The store is
        followed further, so that clients are told what is no business of this node alone.
        """
        self.admission.problem = self.serving.wishes.problem = "another process has taken this node's place"
        self.serving.dismiss_relayed(self.admission.problem)
        self._peers.end("another process has registered as this node, which takes part no longer")
        for copy in self.table.copies.values():
            self._followings.give_up_unanswered(copy)
        self._due.note_all(self.table.copies)

    def _identity(self) -> Identity:
        cluster_id = self._belonging.cluster_id  # known before the store is reached
        if not cluster_id and self.view.cluster is not None:
            cluster_id = self.view.cluster.cluster_id
        version = 1 if self._record is None else self._record.version
        return Identity(cluster_id, self.node_id, self.incarnation, self._boot_id, self._syncs, version)

    def _own_record(self) -> NodeRecord:
        assert self._record is not None
        return self._record

    def _may_settle(self) -> bool:
        belongs = bool(self._belonging.cluster_id) or not self._mark.is_there
        return not self._is_closing and self.view.is_fed and belongs

    def _held(self) -> None:
        log.info("CLUSTER: this is node %s, incarnation %s", self.node_id, self.incarnation)
        self._due.note_all(self.table.copies)

    # -- what its parts tell each other --------------------------------------------------------------------------------

    def _settle(self, partition: PartitionId) -> None:
        self._settling.settle(partition)

    def _look_at(self, led: Led) -> None:
        self.leaders.look_at(led)

    def _fenced(self, led: Led, why: str) -> None:
        self.leaders.fenced(led, why)

    def _freed(self, led: Led) -> None:
        self.leaders.freed(led)

    def _told_ready(self) -> None:
        self.serving.look()

    def _take_in(self, topic: Topic, number: int) -> Awaitable[None]:
        return self.alone.take_in(topic, number)

    # -- the store -----------------------------------------------------------------------------------------------------

    async def _follow_store(self) -> None:
        lapses = Lapses()
        while True:
            try:
                async with aclosing(follow(self._store, self._keys.all)) as following:
                    async for what in following:
                        lapses.followed(self._clock.monotonic_ns())
                        if what.revision < self.view.revision and not self._is_store_older:
                            self._found_store_older()
                        self._take(self.view.feed(what), isinstance(what, Snapshot))
            except OtherStore as error:
                if error.found and not self._has_cluster.is_set():
                    self._refuse(
                        f"the data directory belongs to the cluster {error.mine}, and the coordination store has the "
                        f"cluster {error.found} under the name {error.name}"
                    )
                elif lapses.is_news(error, self._clock.monotonic_ns()):
                    log.error("CLUSTER: %s", error)
            except StoreError as error:
                if lapses.is_news(error, self._clock.monotonic_ns()):
                    log.warning("CLUSTER: the store is not followed, what is known stays in force: %s", error)
            await asyncio.sleep(AGAIN_S)

    def _take(self, changes: Iterable[Change], is_whole: bool) -> None:
        if self.view.cluster is not None and not self._has_cluster.is_set():
            if self._is_foreign():
                self._refuse(
                    "the data directory has copies of a cluster, and the coordination store, which has the cluster "
                    f"{self.view.cluster.cluster_id}, knows neither this node, {self.node_id}, nor any of them"
                )
                return
            if self._mark.is_older:  # before another node hears of this process
                self._found_older()
            if self._mark.is_store_older and (self.table.copies or self.node_id in self.view.held):
                self._found_store_older()
            self._find_lost()
            self._has_cluster.set()
        for change in changes:
            match change:
                case PartitionChange():
                    self._is_sharing_changed = True
                    self._partition_changed(change)
                case TopicChange():
                    self._topic_changed(change)
                case NodeChange():
                    self._is_sharing_changed = True
                    self._node_changed(change)
                case Unreadable():
                    log.error("CLUSTER: %s", change.error)
        if is_whole:
            self._due.note_all(self.table.copies)
            self._due.note_all(self.view.held.get(self.node_id, ()))
        self.look()
        self.serving.look()

    def _partition_changed(self, change: PartitionChange) -> None:
        before, copy = change.before, self.table.copies.get(change.partition)
        if before is not None and before.leader and copy is not None:
            copy.last_leader = before.leader, before.incarnation, before.epoch
        self.leaders.state_changed(change)
        self._due.note(change.partition)
        states = (each for each in (before, change.now) if each is not None)
        if any(self.node_id in (*each.holders, *each.in_sync_nodes) for each in states):
            self._to_count.set()

    def _topic_changed(self, change: TopicChange) -> None:
        self._due.note_all((change.topic, number) for number in self.view.of_topic.get(change.topic, ()))
        for number in self._replicas.of_topic(change.topic):
            self._due.note((change.topic, number))
            self.leaders.topic_changed(change, number)
        topic = self._broker.topics.get(change.topic)
        if topic is not None and change.now is not None and self._replicas.of_topic(change.topic):
            meta = change.now.meta.with_headers_of(topic.meta)
            if meta.rank > topic.meta.rank:
                self._change_meta(topic, meta)

    def _node_changed(self, change: NodeChange) -> None:
        self._peers.nodes_changed()
        before, now = change.before, change.now
        if before is not None and now is not None and before.incarnation != now.incarnation:
            self._readiness.is_dead(before)  # also of two with one data directory: it gives way when it hears of that
        if change.node == self.node_id:
            if now is not None and now.incarnation != self.incarnation:
                self._lease.doubt()
        else:
            if now is None:
                self._presume_dead(change.node)
            else:
                self._lives(change.node)
                self.leaders.node_ends(change.node, now.is_ending)
                if before is None or before.incarnation != now.incarnation:
                    self.leaders.node_registered(change.node)
        if now is None or before is None or before.incarnation != now.incarnation:
            # of what nobody leads it may be asked now how far it is here
            unled = (each for each in self.view.held.get(change.node, ()) if not self.view.partitions[each].leader)
            self._due.note_all(each for each in unled if each in self.table.copies)

    def _look_who_shares(self, now_ns: int) -> None:
        """Stay in touch with the nodes that have copies of what this node has copies of."""
        if not self._is_sharing_changed or now_ns - self._shared_ns < SHARED_LOOK_NS:
            return
        self._is_sharing_changed, self._shared_ns = False, now_ns
        view, shared = self.view, dict[str, None]()
        for partition in view.held.get(self.node_id, ()):
            state = view.partitions[partition]
            shared.update(dict.fromkeys((*state.holders, *state.in_sync_nodes)))
        self._peers.keep_in_touch([node for node in shared if node != self.node_id and node in view.nodes])

    def _find_node(self, node: str) -> NodeRecord | None:
        return self.view.nodes.get(node)

    def _refused(self, record: NodeRecord) -> None:
        """Nobody listens where a node did: its process is dead."""
        self._readiness.is_dead(record)
        self._presume_dead(record.node, is_refused=True)

    def _presume_dead(self, node: str, is_refused: bool = False) -> None:
        for link in self._peers.links():
            if link.node == node and not link.is_connected:
                link.presume_dead(is_refused)

    def _lives(self, node: str) -> None:
        for link in self._peers.links():
            if link.node == node:
                link.lives()

    # -- the engine ----------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """See :class:`flintmq.nsqd.leadership.Replication`."""
        self._lease.look()

    def written(self, groups: Sequence[PublishGroup]) -> None:
        """See :class:`flintmq.nsqd.leadership.Replication`."""
        self.leaders.written(groups)

    def synced(self, logs: Iterable[Any]) -> None:
        """See :class:`flintmq.nsqd.leadership.Replication`."""
        self.leaders.synced(logs)
        self._followings.synced()

    # -- time ----------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._timer = self._engine.loop.call_later(TICK_S, self._tick)
        now_ns = self._clock.monotonic_ns()
        try:
            if self.problem:
                self._followings.tick(now_ns)
                self.serving.tick()
                return
            self._lease.look()
            self._damaged.tick_disk(self._engine.syncing)
            self._lease.look_at_fenced(now_ns)
            self._peers.tick(now_ns)
            self.leaders.tick(now_ns)
            self._followings.tick(now_ns)
            self._readiness.tick(now_ns)
            self._settling.tick()
            self._damaged.tick(now_ns)
            self._room.tick(now_ns)
            self._look_who_shares(now_ns)
            self._peers.leave_idle()
            self.serving.tick()
        except Exception as error:
            log.error("CLUSTER: %r", error, exc_info=error)


def handed_over(asked: int, left: int, took_s: float) -> str:
    """Say what became of the partitions that others were to take over, for the log; ``left`` were not taken over."""
    if not left:
        return f"others have taken over all of them in {took_s:.3f} s"
    return f"others have not taken over {left} of {asked} partitions in {took_s:.3f} s, and this node ends without that"
