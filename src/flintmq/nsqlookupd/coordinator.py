"""A nsqlookupd's part in a cluster: it follows the store, and coordinates while it is the master.

Rules of this file:

- What lookups need is in memory, and stays when the store is away; what changes something needs the store.
- Only the master decides, and each of its swaps compares that it is that still; so two of them do no harm.
- Nothing is looked at again and again: a change in the store, a connection that breaks or a swap that ends is what
  makes the master look. Swaps go to the store together, several transactions at once, with a bound.
- Every wait of a request has a deadline, after which its answer says what is missing and what to do.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from flintmq.cluster import orders
from flintmq.cluster.balance import Loads
from flintmq.cluster.controller import Controller, Defaults, Refused, Swap, why_no_leader
from flintmq.cluster.keys import Keys
from flintmq.cluster.moving import COPIES_AT_ONCE_MAX, UPGRADING
from flintmq.cluster.registration import NsqdNode, Registration, RegistrationDatabase
from flintmq.cluster.state import (
    LEASE_TTL_S,
    BadState,
    ClusterRecord,
    LookupdRecord,
    NodeRecord,
    PartitionState,
    decode,
    encode,
    whole_members,
)
from flintmq.cluster.store import (
    Compare,
    Delete,
    Events,
    Fate,
    KeyValue,
    Lapses,
    OutcomeUnknown,
    Put,
    Snapshot,
    Store,
    StoreError,
    StoreFull,
    StoreRefused,
    Swapped,
    Txn,
    follow,
    swap,
)
from flintmq.cluster.view import PartitionChange, PartitionId, TopicChange, Unreadable, View
from flintmq.env import Env
from flintmq.errors import FlintError
from flintmq.net.membership import Candidacy, Membership, Replaced
from flintmq.net.tasks import kept_up, tell
from flintmq.nsqlookupd.store_check import StoreCheck
from flintmq.options import SECOND
from flintmq.topic_meta import TopicMeta

CLUSTER_VERSION = 1
"""Of the values in the store."""
BATCH_COUNT_MAX = 32
"""Swaps of one transaction."""
BATCHES_MAX = 4
"""Transactions at once."""
CREATED_WITHIN_S = 10.0
DELETED_WITHIN_S = 10.0
SEEN_WITHIN_S = 5.0
"""Until the nsqlookupd that was asked has in its view what the master has done."""
AGAIN_S = 0.2
"""After the store could not be asked."""
REFUSED_S = 5.0
"""After it refused something that has to be: there is no room, or we may not."""
STATUS_AT_ONCE = 1000
"""Partitions that are listed before others have their turn."""
ELECTIONS_MAX = 1000
"""Changes of leaders that are remembered."""
GONE_COUNT_MAX = 10_000
"""Deleted topics whose names are remembered."""
READ_ONLY = "nobody is elected while the coordination store takes no writes"
PROBE_TIMEOUT_S = 1.0
PROBE_PAUSE_S = 0.2
PROBE_COUNT = 2
"""A process that is killed closes its connections one after the other: its port may take one more."""

_log = logging.getLogger(__name__)


class NotMaster(FlintError):
    """This nsqlookupd does not coordinate, or not any more: ask the one that does."""

    def __str__(self) -> str:
        return "this nsqlookupd is not the master of the cluster, or is it no longer; ask again"


class NotDone(FlintError):
    """Something was asked of the cluster and did not take place, or not all of it.

    Args:
        reason: what is so now, and what to do.
        status: of HTTP; below 500 where it will never take place as it was asked.
    """

    def __init__(self, reason: str, status: int = 503) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status

    def __str__(self) -> str:
        return self.reason


class OtherCluster(FlintError):
    """The store is of another cluster, or of a release that this one does not know.

    Args:
        reason: what was found, and what to do.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class Election:
    """A change of who leads a partition.

    Attributes:
        at_s: when this nsqlookupd saw it, in seconds since 1970.
        before, now: ids of nodes; empty: nobody.
        reason: why, where this nsqlookupd decided it.
    """

    at_s: float
    topic: str
    partition: int
    epoch: int
    before: str
    now: str
    reason: str


@dataclass(frozen=True, slots=True)
class Leader:
    """A partition's leader, as lookups have it.

    Attributes:
        node: of the store.
        registration: of the topic by its connection to this nsqlookupd; None: it has none.
        is_ready: it has said here that it leads and can be read from.
    """

    node: NodeRecord
    registration: Registration | None
    is_ready: bool


class Coordinator:
    """The part.

    Args:
        database: what nsqds say over their connections.
        allow_same_host: several copies of a partition may be on one machine.
        defaults: of topics that are made without saying more than a name.
    """

    def __init__(
        self,
        env: Env,
        store: Store,
        keys: Keys,
        database: RegistrationDatabase,
        allow_same_host: bool = False,
        defaults: Defaults = Defaults(),  # noqa: B008 - it is immutable
    ) -> None:
        self.view = View(keys)
        self.cluster_id = ""
        self.problem = ""
        self.election_count = 0  # seen since the start, whoever decided them
        self._env = env
        self._store = store
        self._keys = keys
        self._database = database
        self._allow_same_host = allow_same_host
        self._defaults = defaults
        self._membership: Membership | None = None
        self._candidacy: Candidacy | None = None
        self._controller: Controller | None = None
        self._working: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._batches: set[asyncio.Task[None]] = set()
        self._todo = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self._following: asyncio.Task[None] | None = None
        self._joining: asyncio.Task[None] | None = None
        self._is_closing = False
        self._told_failure = ""
        self._gone: dict[str, None] = {}  # topics that were deleted
        self.loads = Loads()
        self._moves: dict[PartitionId, float] = {}  # since when, wall clock
        self.elections: deque[Election] = deque(maxlen=ELECTIONS_MAX)
        # in monotonic time, for whoever asks for how long a leader has not said that it is ready
        self._led_since_ns: dict[PartitionId, int] = {}  # as this nsqlookupd saw it
        self._gone_ns: dict[tuple[str, int], int] = {}  # when the connection of a node ended last
        self._left_ns: dict[str, int] = {}  # when an nsqd took back a topic; it may give the rest of it at once
        self._reasons: dict[str, tuple[bytes, str]] = {}  # of what this master writes, by key
        self._cluster_revision = 0  # at which the record of the cluster was there
        self._began_ns = env.clock.boottime_ns()
        self._unfollowed_ns = self._began_ns  # since when nothing is told of the store; 0: it is
        self.writing = StoreCheck(store, env.clock, keys.check, lambda: self.store_away_since_s is not None)
        self._checking: asyncio.Task[None] | None = None

    # --- living

    def start(self, me: LookupdRecord) -> None:
        """Begin to follow, to be listed, and to compete for being master."""
        loop = asyncio.get_running_loop()
        self._following = loop.create_task(kept_up(self._follow, "following the cluster"))
        self._checking = loop.create_task(kept_up(self.writing.run, "checking that the store can be written"))
        self._joining = loop.create_task(kept_up(lambda: self._join(me), "joining the cluster"))

    async def close(self) -> None:
        """Leave the cluster."""
        self._is_closing = True
        tasks = [task for task in (self._joining, self._following, self._checking, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._leave()

    async def _join(self, me: LookupdRecord) -> None:
        while not self.cluster_id:
            try:
                self.cluster_id = await self._agree_on_cluster()
            except OtherCluster as error:
                self._fail(str(error))
                return
            except StoreError as error:
                self._warn(error)
                await asyncio.sleep(AGAIN_S)
        _log.info("CLUSTER: %s, id %s", self._keys.cluster, self.cluster_id)
        self._membership = Membership(
            self._store, self._env.clock, self._keys.lookupd(me.lookupd), me, on_replaced=self._replaced
        )
        self._candidacy = Candidacy(self._membership, self._keys.master, self._elected, self._lost)
        self._membership.start()
        self._candidacy.start()
        self._changed()

    async def _agree_on_cluster(self) -> str:
        """Return the id of the cluster; make its record when there is none.

        Raises:
            OtherCluster: it is none that this release can take part in.
            StoreError: the store did not answer.
        """
        key = self._keys.record
        pair = await self._store.get(key)
        while pair is None:
            record = ClusterRecord(f"{self._env.random.getrandbits(64):016x}", CLUSTER_VERSION)
            pair = (await swap(self._store, key, None, encode(record))).now
        try:
            record = decode(key, pair.value, ClusterRecord)
        except BadState as error:
            raise OtherCluster(f"{error}; this nsqlookupd takes no part") from None
        if record.version != CLUSTER_VERSION:
            raise OtherCluster(
                f"the cluster {self._keys.cluster} has values of version {record.version}, this nsqlookupd knows "
                f"{CLUSTER_VERSION} and takes no part; run releases that fit together"
            )
        self._cluster_revision = pair.mod_revision
        return record.cluster_id

    def _replaced(self, error: Replaced) -> None:
        self._fail(str(error))

    def _fail(self, problem: str) -> None:
        """Take no part any more."""
        if self.problem:
            return
        self.problem = problem
        _log.critical("CLUSTER: %s", problem)
        self._changed()
        if not self._is_closing:
            self._begin(self._leave(), "leaving the cluster")

    async def _leave(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
        await self._stop_working()
        candidacy, self._candidacy = self._candidacy, None
        membership, self._membership = self._membership, None
        if candidacy is not None:
            await candidacy.resign()
        if membership is not None:
            await membership.close()

    def _warn(self, error: StoreError) -> None:
        """Say what is wrong with the store, once until it has worked again."""
        self.writing.doubt()
        if isinstance(error, StoreFull):
            return  # the check says so
        if str(error) != self._told_failure:
            _log.warning("CLUSTER: %s; it is tried again", error)
        self._told_failure = str(error)

    # --- following

    async def _follow(self) -> None:
        lapses, clock = Lapses(), self._env.clock
        while True:
            try:
                async with aclosing(follow(self._store, self._keys.all)) as following:
                    async for told in following:
                        lapses.followed(clock.monotonic_ns())
                        self._unfollowed_ns = 0
                        self._take(told)
            except StoreError as error:
                if lapses.is_news(error, clock.monotonic_ns()):
                    _log.warning("CLUSTER: the store is not followed, lookups are as it was last known: %s", error)
            finally:
                self._unfollowed_ns = self._unfollowed_ns or self._env.clock.boottime_ns()
            await asyncio.sleep(AGAIN_S)

    @property
    def store_away_since_s(self) -> float | None:
        """Since when the view may be older than the store, in seconds since 1970; None: that has lasted no longer than
        a lease, or this nsqlookupd takes no part.

        A watch waits for a store that says nothing, and does not tell; so the lease says that the store is there. So
        does a store that refuses what is written, of which nobody gets a lease.
        """
        now_ns = self._env.clock.boottime_ns()
        heard_ns = max(self._began_ns, 0 if self._membership is None else self._membership.heard_ns)
        if self.writing.is_refused:
            heard_ns = now_ns
        away_ns = now_ns - min(heard_ns, self._unfollowed_ns or now_ns)
        if self.problem or away_ns <= LEASE_TTL_S * SECOND:
            return None
        return (self._env.clock.wall_ns() - away_ns) / SECOND

    @property
    def known_master(self) -> LookupdRecord | None:
        """The nsqlookupd that coordinates; None: none does, or none can be known to, with the store away."""
        return self.view.master if self.store_away_since_s is None else None

    def _take(self, told: Snapshot | Events) -> None:
        changes = self.view.feed(told)
        for change in changes:
            if isinstance(change, PartitionChange):
                self._note_move(change)
                self._note_election(change)
                self._note_leader(change)
            elif isinstance(change, Unreadable):
                _log.error("CLUSTER: %s; what it is about stays as it is", change.error)
            elif isinstance(change, TopicChange) and change.now is None and change.before is not None:
                self._forget(change.topic)
        if self._controller is not None:
            self._controller.see(changes, isinstance(told, Snapshot))
        found = self.view.cluster
        is_current = bool(self.cluster_id) and self.view.revision >= self._cluster_revision
        if is_current and (found is None or found.cluster_id != self.cluster_id):
            there = "has no cluster" if found is None else f"has the cluster {found.cluster_id}"
            self._fail(
                f"the store {there} under the name {self._keys.cluster}, this nsqlookupd is of {self.cluster_id}: the "
                "store was emptied or exchanged. Give it back its content, or start all nsqlookupds and nsqds anew"
            )
        self._changed()

    def _note_move(self, change: PartitionChange) -> None:
        """Remember since when the copies of a partition are not as they are to be."""
        state = change.now
        if state is None or not (state.target or state.leaving or state.lacking or _lingering(state)):
            self._moves.pop(change.partition, None)
        elif change.partition not in self._moves:
            self._moves[change.partition] = self._env.clock.wall_ns() / 1_000_000_000

    def _note_election(self, change: PartitionChange) -> None:
        """Remember who leads a partition now, or that nobody does."""
        before, now = change.before, change.now
        written, reason = self._reasons.pop(change.key, (b"", ""))
        if before is None or now is None:
            return
        is_elected = now.epoch > before.epoch
        self.election_count += is_elected
        if is_elected or (before.leader and not now.leader):
            reason = reason if written == encode(now) else ""
            at_s = self._env.clock.wall_ns() / 1_000_000_000
            topic, number = change.partition
            self.elections.append(Election(at_s, topic, number, now.epoch, before.leader, now.leader, reason))

    def _note_leader(self, change: PartitionChange) -> None:
        """Remember since when a partition is led by whoever leads it."""
        before, now = change.before, change.now
        if now is None or not now.leader:
            self._led_since_ns.pop(change.partition, None)
        elif before is None or (before.leader, before.epoch) != (now.leader, now.epoch):
            self._led_since_ns[change.partition] = self._env.clock.monotonic_ns()

    def _note_reason(self, change: Swap) -> None:
        if change.value is not None:
            self._reasons[change.key] = change.value, change.reason
        while len(self._reasons) > ELECTIONS_MAX:
            del self._reasons[next(iter(self._reasons))]

    def _changed(self) -> None:
        """Something may be so that somebody waits for, or that is to be acted on."""
        self._todo.set()
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def _until(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until something is so; return whether it is."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not is_so():
                    future = loop.create_future()
                    self._waiting.append(future)
                    await future
        return is_so()

    def _forget(self, topic: str) -> None:
        """Forget what nsqds said of a topic that the cluster has no longer."""
        self._database.delete_topic(topic)
        self._left_ns.pop(topic, None)
        self._gone.pop(topic, None)
        self._gone[topic] = None
        if len(self._gone) > GONE_COUNT_MAX:
            del self._gone[next(iter(self._gone))]

    # --- connections of nsqds

    def left(self, topic: str) -> None:
        """An nsqd has a topic no longer; it may have said that it has it after that was deleted."""
        if self.has_topic(topic):
            self._left_ns[topic] = self._env.clock.monotonic_ns()
        if topic in self._gone and not self.has_topic(topic) and not self._database.holders(topic):
            self._database.delete_topic(topic)

    def registered(self, _topic: str) -> None:
        """An nsqd has registered something."""
        self._changed()

    def connected(self, node: NsqdNode) -> None:
        """An nsqd has introduced itself."""
        for record in self.view.nodes_at(node.broadcast_address, node.tcp_port):
            if self._controller is not None:
                self._controller.trust(record.node, record.incarnation)
                self._changed()

    def disconnected(self, node: NsqdNode) -> None:
        """The connection of an nsqd has ended: look whether it lives."""
        records = self.view.nodes_at(node.broadcast_address, node.tcp_port)
        if records:
            places = {(each.host, each.tcp_port) for each in self.view.nodes.values()}
            self._gone_ns = {place: at_ns for place, at_ns in self._gone_ns.items() if place in places}
            self._gone_ns[node.broadcast_address, node.tcp_port] = self._env.clock.monotonic_ns()
        self._look_at(records)

    def _look_at(self, nodes: Iterable[NodeRecord]) -> None:
        if self._controller is not None and not self._is_closing:
            for node in nodes:
                self._begin(self._look_after(node), f"looking after node {node.node}")

    async def _look_after(self, record: NodeRecord) -> None:
        for number in range(PROBE_COUNT):
            if number:
                await asyncio.sleep(PROBE_PAUSE_S)
            if await _is_refused(record.host, record.peer_port):
                if self._controller is not None:
                    _log.warning("CLUSTER: node %s closed its connection and does not listen any more", record.node)
                    self._controller.suspect(record.node, record.incarnation)
                    self._changed()
                return

    # --- being master

    @property
    def is_master(self) -> bool:
        """Whether this nsqlookupd may coordinate now."""
        return self._controller is not None and self._candidacy is not None and self._candidacy.is_elected

    def _elected(self, pair: KeyValue) -> None:
        _log.info("CLUSTER: this nsqlookupd is the master")
        guard = Compare(pair.key, pair.mod_revision)
        controller = Controller(
            self.view, self._env.random, guard, self._allow_same_host, self._defaults, self.why_not_made
        )
        self._controller = controller
        old, self._working = self._working, None
        if old is not None:
            old.cancel()
        self._working = asyncio.get_running_loop().create_task(
            kept_up(lambda: self._work(controller), "coordinating the cluster", pause_s=AGAIN_S)
        )
        # connections may have ended while nobody was master
        connected = {(node.broadcast_address, node.tcp_port) for node in self._database.all_nodes()}
        self._look_at(node for node in self.view.nodes.values() if (node.host, node.tcp_port) not in connected)
        self._changed()

    def _lost(self, reason: str) -> None:
        level = logging.INFO if self._is_closing else logging.WARNING
        _log.log(level, "CLUSTER: this nsqlookupd is the master no longer: %s", reason)
        self._controller = None
        if self._working is not None:
            self._working.cancel()
        self._changed()

    async def _stop_working(self) -> None:
        self._controller = None
        tasks = [task for task in (self._working, *self._batches) if task is not None]
        self._working = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _work(self, controller: Controller) -> None:
        """Carry out what is decided."""
        while True:
            self._todo.clear()
            while self.is_master and len(self._batches) < BATCHES_MAX:
                swaps = controller.next_swaps(BATCH_COUNT_MAX)
                if not swaps:
                    if not controller.has_work:
                        break
                    await asyncio.sleep(0)
                    continue
                task = asyncio.get_running_loop().create_task(self._carry_out_all(controller, swaps))
                self._batches.add(task)
                task.add_done_callback(self._batch_ended)
                await asyncio.sleep(0)
            await self._todo.wait()

    def _batch_ended(self, task: asyncio.Task[None]) -> None:
        self._batches.discard(task)
        tell("writing to the store")(task)
        self._todo.set()

    async def _carry_out_all(self, controller: Controller, swaps: Sequence[Swap]) -> None:
        """Carry out swaps together; when one of them does not hold any more, each alone."""
        known: dict[str, bool] = {}
        try:
            if len(swaps) > 1 and await self._apply_together(swaps):
                known = dict.fromkeys((each.key for each in swaps), True)
                return
            for each in swaps:
                await self._carry_out(each)
                known[each.key] = True
            self._told_failure = ""
        except StoreError as error:
            self._warn(error)
            await asyncio.sleep(REFUSED_S if isinstance(error, StoreRefused | StoreFull) else AGAIN_S)
        finally:
            for each in swaps:
                controller.ended(each, known.get(each.key, False))

    async def _apply_together(self, swaps: Sequence[Swap]) -> bool:
        conditions: dict[Compare, None] = {}
        operations: list[Put | Delete] = []
        for each in swaps:
            conditions[Compare(each.key, 0 if each.before is None else each.before.mod_revision)] = None
            conditions.update(dict.fromkeys(each.guards))
            self._note_reason(each)
            operations.append(Delete(each.key) if each.value is None else Put(each.key, each.value))
        try:
            result = await self._store.txn(Txn(tuple(conditions), tuple(operations)))
        except StoreRefused:
            return False  # one of them, or too much together
        if result.succeeded:
            for each in swaps:
                _log.info("CLUSTER: %s", each.reason)
        return result.succeeded

    async def _carry_out(self, each: Swap) -> Swapped:
        self._note_reason(each)
        swapped = await swap(self._store, each.key, each.before, each.value, guards=each.guards)
        if swapped.fate is Fate.APPLIED:
            _log.info("CLUSTER: %s", each.reason)
        else:
            _log.info("CLUSTER: it is not so that %s: somebody was faster", each.reason)
        return swapped

    # --- what is asked

    def leaders(self, topic: str) -> dict[int, Leader]:
        """Return who leads which partition of a topic, as far as somebody does."""
        claims = {
            (each.node.broadcast_address, each.node.tcp_port): each
            for each in self._database.claims(topic, self._env.clock.monotonic_ns())
        }
        found: dict[int, Leader] = {}
        for number in sorted(self.view.of_topic.get(topic, ())):
            node = self.view.leader((topic, number))
            if node is not None:
                claim = claims.get((node.host, node.tcp_port))
                is_ready = claim is not None and (not claim.partitions or number in claim.partitions)
                found[number] = Leader(node, claim, is_ready)
        return found

    def unready(self, topic: str) -> dict[int, str]:
        """Return the partitions of a topic that cannot be written to as far as is known here, and why."""
        record = self.view.topics.get(topic)
        if record is None:
            return {0: "the topic is not there"}
        found: dict[int, str] = {}
        leaders = self.leaders(topic)
        not_placed = "" if self._controller is None else self._controller.why_not_placed(topic)
        for number in range(record.partition_num):
            leader = leaders.get(number)
            if leader is None:
                why = self._why_no_leader((topic, number))
                found[number] = not_placed if not_placed and (topic, number) not in self.view.partitions else why
            elif not leader.is_ready:
                found[number] = (
                    f"node {leader.node.node} ({leader.node.host}) leads and has not said here that it is ready"
                )
        return found

    def _unready_s(self, partition: PartitionId, leader: Leader | None) -> float:
        """Return for how long the leader of a partition could have said here that it is ready, and has not."""
        if leader is None or leader.is_ready:
            return 0.0
        now_ns = self._env.clock.monotonic_ns()
        since_ns = max(
            self._led_since_ns.get(partition, now_ns),
            self._gone_ns.get((leader.node.host, leader.node.tcp_port), 0),
            self._left_ns.get(partition[0], 0),
        )
        return max(0, now_ns - since_ns) / SECOND

    def has_topic(self, topic: str) -> bool:
        """Whether the cluster has a topic, whether or not its record can be read."""
        return self._keys.topic(topic) in self.view.pairs

    def default_shape(self) -> tuple[int, int]:
        """Return how many partitions a topic has that is made without saying so, and how many copies of each."""
        takers = [node for node in self._live().values() if node.node not in self.view.drains]
        return self._defaults.shape(takers, self._allow_same_host)

    def why_not_made(self, topic: str) -> str:
        """Tell why the cluster must not make a topic by itself: an nsqd has one of that name alone; empty: none has."""
        where = self._alone_on(topic)
        if not where:
            return ""
        return f"topic {topic} is there already, on nsqd {where} alone and not in the cluster: delete it there first"

    def why_no_copies(self, topic: str) -> str:
        """Tell why no copies can be made of a topic: an nsqd has it alone; empty: none has."""
        where = self._alone_on(topic)
        if not where:
            return ""
        return (
            f"topic {topic} is nsqd {where}'s alone and not the cluster's, so there is one copy: flintmq topic "
            f"replicate {topic} gives it to the cluster, or says why that does not take it"
        )

    def _alone_on(self, topic: str) -> str:
        """Return the addresses of nsqds that have a topic which the cluster has not; empty: none."""
        holders = [] if self.has_topic(topic) else self._database.holders(topic)
        return ", ".join(node.http_address for node in holders[:3])

    def _live(self) -> Mapping[str, NodeRecord]:
        return self.view.nodes if self._controller is None else self._controller.live

    # --- what is changed

    def _master_controller(self) -> Controller:
        if self.problem:
            raise NotDone(self.problem)
        if not self.is_master or self._controller is None or not self._controller.is_master:
            raise NotMaster
        return self._controller

    async def _decided(self, decide: Callable[[Controller], Swap | None]) -> bool:
        """Carry out what is decided; decide again when somebody was faster. Return whether there was anything to do.

        Raises:
            NotMaster: somebody else decides.
            NotDone: it cannot be done, or the store does not answer.
        """
        async with asyncio.timeout(CREATED_WITHIN_S):
            while True:
                try:
                    change = decide(self._master_controller())
                except Refused as error:
                    raise NotDone(error.reason, error.status) from None
                if change is None:
                    return False
                try:
                    swapped = await self._carry_out(change)
                except OutcomeUnknown as error:
                    self.writing.doubt()
                    raise NotDone(f"it is not known whether {change.reason}: {error}; ask again") from None
                except StoreError as error:
                    self.writing.doubt()
                    raise NotDone(f"nothing was changed: {error}; ask again") from None
                if swapped.fate is Fate.APPLIED:
                    return True
                await self._until_moved(change)

    async def _until_moved(self, change: Swap) -> None:
        """Wait until the view has what somebody else wrote."""
        pairs = self.view.pairs
        await self._until(lambda: pairs.get(change.key) != change.before or not self.is_master, SEEN_WITHIN_S)

    async def _in_time(self, work: Awaitable[bool]) -> bool:
        try:
            return await work
        except TimeoutError:
            raise NotDone("the cluster was not changed in time; ask again") from None

    async def create(self, topic: str, meta: TopicMeta, partition_num: int, is_any_fine: bool = False) -> None:
        """Create a topic; return when every partition can be written to.

        A topic of which nothing can be written to in time is taken back. One that can partly be written to stays:
        somebody may have been answered OK there.

        Raises:
            NotMaster: somebody else decides.
            NotDone: it is there and different, or there are too few nodes, or it was not ready in time.
        """
        is_new = await self._in_time(
            self._decided(lambda controller: controller.creation(topic, meta, partition_num, is_any_fine))
        )
        await self._until(lambda: topic in self.view.topics or not self.is_master, SEEN_WITHIN_S)
        record = self.view.topics.get(topic)
        await self._until(lambda: not self.unready(topic) or not self.is_master, CREATED_WITHIN_S)
        unready = self.unready(topic)
        if not unready:
            return
        if not self.is_master:
            raise NotMaster
        reasons = "; ".join(f"partition {number}: {reason}" for number, reason in list(unready.items())[:3])
        if not is_new or record is None or len(unready) < record.partition_num:
            raise NotDone(f"topic {topic} is there, and cannot be written to completely yet: {reasons}; ask again")
        await self._in_time(self._decided(lambda controller: controller.deletion(topic, record.number)))
        raise NotDone(
            f"topic {topic} was not created: within {CREATED_WITHIN_S:g} s nothing could be written, {reasons}"
        )

    async def order(self, decide: Callable[[Controller], orders.Plan], is_dry_run: bool = False) -> orders.Plan:
        """Write down what an operator wants; return what it comes to.

        Args:
            is_dry_run: only return it.

        Raises:
            NotMaster: somebody else decides.
            NotDone: it cannot be so, or the store does not answer.
        """
        plans: list[orders.Plan] = []

        def plan(controller: Controller) -> Swap | None:
            plans.append(decide(controller))
            return plans[-1].swap

        if not is_dry_run:
            await self._in_time(self._decided(plan))
            return plans[-1]
        try:
            return decide(self._master_controller())
        except Refused as error:
            raise NotDone(error.reason, error.status) from None

    async def carry_out_now(self, decide: Callable[[Controller], Iterable[Swap]]) -> None:
        """Carry out what improves things and nobody waits for; where it fails it is left."""
        if not self.is_master or self._controller is None:
            return
        try:
            for each in decide(self._controller):
                await self._carry_out(each)
        except StoreError as error:
            self._warn(error)

    async def until_written(self, topic: str) -> None:
        """Wait until every partition of a topic can be written to.

        Raises:
            NotDone: one could not be in time.
        """
        await self._until(lambda: not self.unready(topic) or not self.is_master, CREATED_WITHIN_S)
        unready = self.unready(topic)
        if unready:
            reasons = "; ".join(f"partition {number}: {reason}" for number, reason in list(unready.items())[:3])
            raise NotDone(f"it is begun, and topic {topic} cannot be written to completely yet: {reasons}; ask again")

    async def delete(self, topic: str) -> None:
        """Delete a topic; return when the store has nothing of it any more.

        Raises:
            NotMaster: somebody else decides.
            NotDone: there is no such topic, or something of it was still there in time.
        """
        await self._in_time(self._decided(lambda controller: controller.deletion(topic)))
        record = self.view.topics.get(topic)
        number = 0 if record is None else record.number

        def is_gone() -> bool:
            now = self.view.topics.get(topic)
            return now is None or (number > 0 and now.number != number)

        if not await self._until(lambda: is_gone() or not self.is_master, DELETED_WITHIN_S):
            keys = [key for key in self.view.unreadable if self._keys.partitions(topic).has(key)]
            left = f": {self.view.unreadable[keys[0]]}" if keys else ""
            raise NotDone(f"topic {topic} is being deleted, and something of it is left{left}; ask again")
        if not is_gone():
            raise NotDone(
                f"topic {topic} is being deleted, and something of it is left; this nsqlookupd is not the master any "
                "more, and whoever is it next goes on with that: ask again"
            )

    async def until_seen(self, topic: str, is_there: bool) -> None:
        """Wait until what the master has done is known here as well, or it has taken too long."""
        await self._until(lambda: not self.unready(topic) if is_there else not self.has_topic(topic), SEEN_WITHIN_S)

    # --- for people

    async def loaded(self, told: Iterable[tuple[PartitionId, int, int]]) -> None:
        """Take note of the size of partitions, as :meth:`flintmq.cluster.balance.Loads.told`."""
        now_ns = self._env.clock.monotonic_ns()
        for number, (partition, end_bytes, stored_bytes) in enumerate(told):
            if number % STATUS_AT_ONCE == 0:
                await asyncio.sleep(0)
            self.loads.told(partition, end_bytes, stored_bytes, now_ns)
        if len(self.loads) > len(self.view.partitions):
            self.loads.forget_all_but(self.view.partitions)

    @property
    def is_stable(self) -> bool:
        """Whether every partition is led and has all of its copies, and nothing is moved."""
        view = self.view
        return not self._moves and all(state.has_leader(view.nodes) for state in view.partitions.values())

    def moves(self) -> list[tuple[PartitionId, float]]:
        """Return the partitions whose copies are not as they are to be, and since when (seconds of the wall clock, as
        far as this nsqlookupd knows), the oldest first.
        """
        return list(self._moves.items())

    def move_row(self, partition: PartitionId, since_s: float) -> dict[str, Any]:
        """Return what is moved of a partition, as ``GET /cluster/moves`` shows it."""
        topic, number = partition
        state, controller = self.view.partitions.get(partition), self._controller
        row: dict[str, Any] = {"topic": topic, "partition": number, "from": [], "to": [], "state": "", "reason": ""}
        if state is not None:
            if state.target:
                to = [node for node in state.target if node not in state.replicas]
                row |= {"state": "waiting", "to": to}
                row["from"] = [node for node in state.replicas if node not in state.target]
            elif state.lacking:
                row |= {"state": "copying", "to": list(state.lacking), "from": list(state.leaving)}
            else:
                row |= {"state": "removing", "from": [*state.leaving, *_lingering(state)]}
            away = [node for node in row["to"] if node not in self._live()]
            if away:
                row["reason"] = f"node {', '.join(away)} is away"
            elif controller is not None:
                moving = controller.moving
                busy = moving.queue_of(partition)
                row["reason"] = moving.stuck.get(partition) or (
                    f"node {busy} has {COPIES_AT_ONCE_MAX} copies under way, which is the most" if busy else ""
                )
        done = {"bytes_done": None, "bytes_total": None, "messages_done": None, "messages_total": None}
        return {**row, **done, "since": since_s}

    async def status(self, topic: str = "") -> dict[str, object]:
        """Return everything that is known, as ``GET /cluster/status`` shows it. Others have their turn meanwhile,
        so that topics may be of a later moment than the rest.

        Args:
            topic: only this one; empty: all of them.
        """
        answer, rows, count = self._status(), [], 0
        for name in [topic] if topic else sorted({*self.view.topics, *self.view.of_topic}):
            rows.append(self._topic_status(name))
            count += 1 + len(self.view.of_topic.get(name, ()))
            if count >= STATUS_AT_ONCE:
                count = 0
                await asyncio.sleep(0)
        return {**answer, "topics": rows}

    def _status(self) -> dict[str, object]:
        view, live, master = self.view, self._live(), self.known_master
        return {
            "cluster": self._keys.cluster,
            "cluster_id": self.cluster_id,
            "problem": self.problem,
            "store_away_since": self.store_away_since_s,
            "store_read_only_since": self.writing.since_s,
            "store_read_only_reason": self.writing.reason,
            "revision": view.revision,
            "is_master": self.is_master,
            "master": None if master is None else msgspec.to_builtins(master),
            "lookupds": [msgspec.to_builtins(each) for _, each in sorted(view.lookupds.items())],
            "settings": msgspec.to_builtins(view.settings),
            "drains": [self._drain_row(node) for node in sorted(view.drains)],
            "nodes": [
                {
                    **{name: getattr(node, name) for name in NodeRecord.__struct_fields__},
                    "suspected": name not in live,
                    "leads": len(view.led.get(name, ())),
                    "holds": len(view.held.get(name, ())),
                }
                for name, node in sorted(view.nodes.items())
            ],
            "away": [self._away_row(node) for node in sorted(view.held) if node not in view.nodes],
            "unreadable": [{"key": key, "reason": error.reason} for key, error in sorted(view.unreadable.items())],
        }

    def _away_row(self, node: str) -> dict[str, object]:
        """Return what is known of a node that has copies, or is to have some, and is not there."""
        host, tcp_port, http_port = self.view.place(node)
        held = len(self.view.held[node])
        return {
            "node": node, "host": host, "tcp_port": tcp_port, "http_port": http_port, "holds": held, "is_away": True,
        }  # fmt: skip

    def _drain_row(self, node: str) -> dict[str, object]:
        """Return how far it is that a node has nothing any more."""
        held = self.view.held.get(node, {})
        left = len(held)
        reason = next(filter(None, map(self._why_stuck, held)), "")
        if held and self.view.settings.is_upgrading:
            reason = UPGRADING  # which not only the master knows
        return {
            "node": node,
            "is_removal": self.view.drains[node].is_removal,
            "is_there": node in self.view.nodes,
            "left": left,
            "state": "draining" if left else "drained",
            "reason": reason,
        }

    def _topic_status(self, topic: str) -> dict[str, object]:
        view = self.view
        record = view.topics.get(topic)
        leaders = self.leaders(topic)
        partitions = []
        count = 0 if record is None else record.partition_num
        for number in sorted({*range(count), *view.of_topic.get(topic, ())}):
            state, leader = view.partitions.get((topic, number)), leaders.get(number)
            partitions.append(
                {
                    "partition": number,
                    "epoch": 0 if state is None else state.epoch,
                    "leader": "" if leader is None else leader.node.node,
                    "address": "" if leader is None else f"{leader.node.host}:{leader.node.tcp_port}",
                    "is_ready": leader is not None and leader.is_ready,
                    "unready_s": round(self._unready_s((topic, number), leader), 1),
                    "in_sync": [] if state is None else list(state.in_sync_nodes),
                    "unconfirmed": [] if state is None else _unconfirmed(state, view.nodes),
                    "replicas": [] if state is None else list(state.replicas),
                    "leaving": [] if state is None else list(state.leaving),
                    "target": [] if state is None else list(state.target),
                    "may_have_lost": state is not None and state.may_have_lost,
                    "ends": []
                    if state is None
                    else [{"node": each.node, "epoch": each.epoch, "end": each.end} for each in state.ends],
                    "reason": self._why_no_leader((topic, number)) or self._why_stuck((topic, number)),
                }
            )
        answer: dict[str, object] = {"topic": topic, "partitions": partitions}
        if record is not None:
            answer |= {
                "number": str(record.number),
                "partition_num": record.partition_num,
                "replicator": record.meta.replica,
                "min_in_sync": record.min_in_sync,
                "is_deleting": record.is_deleting,
                "meta": record.meta.for_clients(),
            }
        return answer

    def _why_no_leader(self, partition: PartitionId) -> str:
        """Tell why nobody leads a partition; empty: somebody does."""
        return why_no_leader(self.view, partition, hindrance=READ_ONLY if self.writing.reason else "")

    def _why_stuck(self, partition: PartitionId) -> str:
        """Tell why a partition's copies are not as they are wanted; only the master knows."""
        return "" if self._controller is None else self._controller.moving.stuck.get(partition, "")

    # --- small things

    def _begin(self, work: Awaitable[None], what: str) -> None:
        async def run() -> None:
            await work

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(tell(what))

    def describe(self) -> str:
        """One line, for failing tests."""
        controller = "" if self._controller is None else f" {self._controller.describe()}"
        return f"Coordinator master={self.is_master} revision={self.view.revision} problem={self.problem!r}{controller}"


def _lingering(state: PartitionState) -> list[str]:
    """Return who is in sync and need not be any more: its leader is about to let it go."""
    return [node for node in state.in_sync_nodes if node not in state.holders]


def _unconfirmed(state: PartitionState, live: Mapping[str, NodeRecord]) -> list[str]:
    """Return who lives and is in sync by name only: what it had when it got in is to be seen by its leader again."""
    whole = {node.node for node in whole_members(state, live)}
    return [node for node in state.in_sync_nodes if node in live and node not in whole]


async def _is_refused(host: str, port: int) -> bool:
    """Whether nobody listens at an address, as its machine says; a machine that says nothing has not said that."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            for *_, address in addresses:
                try:
                    transport, _ = await loop.create_connection(asyncio.Protocol, *address[:2])
                except ConnectionRefusedError:
                    continue
                transport.abort()
                return False
            return True
    except (OSError, TimeoutError):
        return False
