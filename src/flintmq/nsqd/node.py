"""A node: everything that one nsqd does, whoever asks for it; what listens is :mod:`flintmq.nsqd.server`.

::

    publishing  a Publish -> the log        subscribing  a client -> a channel        topics  created, changed, deleted
    engine      the turns of the broker     drain        takes no more                lookup  nsqlookupds are told
    damage      what the disk has lost      tracing      what happens to messages    data_path  where it leads to
    disk_watch  whether it has room

Rules of this file: rooms are put together here and know of each other only what they are given; nothing is global, so
that several nodes can live in one process.

Source: NSQ's options (start and stop), NSQ's data files; docs/decisions/0002.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import msgspec

from flintmq.addresses import format_address
from flintmq.broker.broker import Broker, BrokerOptions
from flintmq.broker.dead_letters import Elsewhere
from flintmq.broker.partition import Ended, Partition
from flintmq.broker.subscription import Subscription
from flintmq.budget import NO_LIMIT_BYTES
from flintmq.env import Env
from flintmq.errors import NO_MORE_MESSAGES, DiskFull, FlintError
from flintmq.limits import EPHEMERAL_DEPTH_MIN
from flintmq.migrate.metadata_file import MetadataFile
from flintmq.net.problems import Problems
from flintmq.nsqd.client import Clients
from flintmq.nsqd.damage import DamageRegister
from flintmq.nsqd.data_path import DataPathWatch
from flintmq.nsqd.disk_watch import DiskWatch
from flintmq.nsqd.drain import Drain
from flintmq.nsqd.engine import Engine
from flintmq.nsqd.identity import Identity
from flintmq.nsqd.leadership import Leadership
from flintmq.nsqd.lookup import Lookup, registrations_of
from flintmq.nsqd.lookup_peer import Registration
from flintmq.nsqd.options import NsqdOptions
from flintmq.nsqd.publishing import Publishing
from flintmq.nsqd.subscribing import Subscribing
from flintmq.nsqd.topics import Topics
from flintmq.nsqd.tracing import Tracing
from flintmq.storage import RESERVE_NAME, ChannelStore, Corruption, Files, OsFiles
from flintmq.storage.channel_list import LIST_NAME
from flintmq.storage.channel_store import DATABASE_NAME
from flintmq.topic_meta import PLAIN
from flintmq.wire.lookup import PeerInfo

if TYPE_CHECKING:
    from flintmq.nsqd.cluster.agent import Agent


class Node:
    """One node, from the data directory up.

    Args:
        clients: that are connected to it.

    Attributes:
        engine, drain, topics, publishing, subscribing, lookup, damage, tracing: see above.
        publishing_here, publishing_letters, subscribing_here: the same for what other nodes hand on, which goes no
            further; dead letters apart from others.
        agent: its part in a cluster; None: it belongs to none.
        refusal: why it ends by itself: the store is of a cluster that it does not belong to; None: it does not.
        leadership: asked which partitions are led here; None: all that are.
    """

    def __init__(self, env: Env, files: Files, options: NsqdOptions, identity: Identity, clients: Clients) -> None:
        self._env = env
        self._files = files
        self._options = options
        self._identity = identity
        self._clients = clients
        self._store = ChannelStore(files, identity.start_ns, options.accept_lost_channels)
        broker_options = _broker_options(options, env.buggify("tiny segments"))
        broker = self._broker = Broker(files, self._store, broker_options, env.random, self._corrupted)
        self.damage = DamageRegister(env, broker)
        broker.on_damage = self.damage.add
        broker.on_known_damage = self.damage.restore
        broker.replicas.on_settled = self.damage.settled
        self._metadata_file = MetadataFile(env, files, broker.topics.values)
        self.engine = Engine(
            env,
            broker,
            durability=options.durability,
            sync_every=options.sync_every,
            sync_timeout_ns=options.sync_timeout_ns,
        )
        self._data_path: DataPathWatch | None = None  # in memory it has no path
        if isinstance(files, OsFiles):
            self._data_path = DataPathWatch(env, files, broker.logs, self._data_removed, broker.log_removed)
        self._gone_count = 0
        self.agent: Agent | None = None
        self._disk = DiskWatch(
            env,
            files,
            options.data_path,
            lambda: broker.publishes.disk_full,
            self.engine.make_room,
            lambda: self.agent is not None and self.agent.is_disk_full,
        )
        self.refusal: FlintError | None = None
        self._stop: asyncio.Event | None = None
        self.lookup = Lookup(env, options, self._peer_info, self._registrations)
        self.drain = Drain(env, self.engine, options.drain_timeout_ns, self._drain_changed)
        self.topics = Topics(self.engine, self.drain, self.lookup, clients, options)
        self.publishing = Publishing(self.engine, self.drain, self.topics)
        self.subscribing = Subscribing(self.engine, self.drain, self.topics, options)
        self.publishing_here = self.publishing_letters = self.publishing  # for what another node hands on
        self.subscribing_here = self.subscribing
        self.leadership: Leadership | None = None
        self.tracing = Tracing(
            self.engine, options.trace_topic, options.trace_max_rate, self.topics.create, clients.look_up_again
        )

    # -- life --------------------------------------------------------------------------------------------------------

    async def open(
        self, restoring: Callable[[], AbstractContextManager[None]], stop: asyncio.Event | None = None
    ) -> None:
        """Restore the data directory, NSQ's as well.

        Args:
            restoring: around the making of all that was there before.
            stop: when set, a takeover of NSQ's data ends early; is set when this node has drained.

        Raises:
            TakeoverStopped: it did.
            FlintError: the data directory cannot be used.
        """
        broker, options = self._broker, self._options
        self._stop = stop
        if stop is not None:
            self.drain.finished = stop.set
        if any(not name.startswith((DATABASE_NAME, LIST_NAME, RESERVE_NAME)) for name in self._files.list("")):
            from flintmq.migrate import takeover  # a new nsqd has nothing to take over

            settings = takeover.Settings(options.max_bytes_per_file, options.max_msg_size)
            await takeover.take_over(
                self._env, self._files, self._store, settings, options.data_path, self._corrupted, stop
            )
        with restoring():
            broker.open(self._env.clock.wall_ns())
        self.tracing.start()
        broker.on_topic_change = self._topic_changed
        broker.on_problem = Problems(self._env.clock).tell
        broker.on_dead_letter_topic = lambda name, _wall_ns: self.topics.create_extended(name)
        if options.cluster_store:
            await self._join()
        self.engine.on_metadata = self._metadata_file.changed
        self.engine.start()
        self.engine.schedule()
        await self._metadata_file.start()

    async def _join(self) -> None:
        """Prepare to be one of a cluster."""
        from flintmq.nsqd.cluster.join import new_agent  # nobody else needs it
        from flintmq.nsqd.cluster.serving import LedHere

        agent = self.agent = await new_agent(
            self._env,
            self._files,
            self._options,
            self.engine,
            self._clients,
            self._ready_changed,
            self.topics.change_meta,
            self.topics.room,
        )
        admission = agent.admission
        self.leadership = self.topics.leadership = admission
        self.publishing.leadership = self.subscribing.leadership = admission
        here = LedHere(admission)
        self.publishing_here = Publishing(self.engine, self.drain, self.topics)
        self.subscribing_here = Subscribing(self.engine, self.drain, self.topics, self._options, is_for_nodes=True)
        self.publishing_here.leadership = self.subscribing_here.leadership = here
        topics, take = self._broker.topics, self._broker.take_dead_letters
        self.publishing_letters = Publishing(self.engine, self.drain, self.topics)
        self.publishing_letters.leadership = LedHere(admission, lambda topic: take(topics[topic]))
        self._broker.find_dead_letters(self._letters_elsewhere)
        agent.leaders.let_go = self._let_go
        agent.on_refused = self._refused
        agent.leaders.founding.channels_of = self.lookup.channels_of
        agent.serving.publish_here = self.publishing_here.publish
        agent.serving.unread.followers = self.subscribing.followers
        self.lookup.is_ready = admission.is_ready

    def _refused(self, why: FlintError) -> None:
        self.refusal = why
        if self._stop is not None:
            self._stop.set()

    def _letters_elsewhere(self, topic: str, source: Partition) -> Elsewhere | Ended | None:
        """Find the topic of what a partition gives up, if the cluster has or is to make it."""
        agent = self.agent
        if agent is None or topic in self._broker.topics:
            return None
        copies = source.meta.replica if agent.admission.is_replicated(source.topic_name) else 0
        return agent.serving.dead_letters(topic, copies, agent.admission.is_replicated(topic))

    async def enter(self, new_session: Callable[[int], asyncio.Protocol]) -> None:
        """Be one of the cluster that this node belongs to, if it does; its addresses are known.

        Args:
            new_session: serves what another node hands on, for a purpose of :class:`flintmq.wire.peer.Purpose`.

        Raises:
            ListenFailed: it cannot be listened for other nodes.
        """
        if self.agent is not None:
            from flintmq.nsqd.cluster.join import record_of

            self.agent.serve_others(new_session)
            await self.agent.start(self._options.peer_address, record_of(self._options, self._identity))
            if self.drain.is_on:
                self.agent.set_draining(True)

    def begin(self) -> None:
        """Tell nsqlookupds where this node listens, hand out messages, and watch the data path and its disk."""
        me = self._identity.peer()
        self.tracing.node = format_address(me.broadcast_address, me.tcp_port)
        self.lookup.set(self._options.lookupd_tcp_address)
        self.topics.start_all()
        if self._data_path is not None:
            self._data_path.start()
            self._disk.start()

    async def hand_over(self) -> bool:
        """Have other nodes of the cluster lead what is led here, if any are; return that. :meth:`exit` follows."""
        if self.agent is None:
            return False
        await self.agent.hand_over()
        return True

    def exit(self) -> None:
        """Take nothing new from now on; :meth:`leave` and :meth:`close` follow."""
        self.tracing.flush()  # its topic may be new
        self.drain.close()

    async def settle(self) -> None:
        """Wait until what was taken is stored, here or by whom it was handed on to."""
        if self.agent is not None:
            await self.agent.answered()
        await self.engine.settle()

    async def leave(self) -> None:
        """Have the cluster, and every nsqlookupd, forget this node."""
        self.topics.stop_starting()
        if self.agent is not None:
            await self.agent.close()
        await self.lookup.close()

    async def close(self) -> None:
        """Write everything to disk; connections are gone already.

        Raises:
            OSError, StorageError: what the disk said; the data directory is as after a kill.
        """
        if self._data_path is not None:
            await self._data_path.close()
            await self._disk.close()
            self._gone_count = self._broker.unfinished_count() if self._data_path.removed else 0
        await self._metadata_file.close()
        self.tracing.close()
        await self.engine.close()
        self._files.close()

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def gone(self) -> tuple[str, int] | None:
        """Why what is stored goes with this process, and when it is closed, how many messages of it are not finished;
        None: it stays.
        """
        removed = "" if self._data_path is None else self._data_path.removed
        return (removed, self._gone_count) if removed else None

    def health(self) -> str:
        """Return ``OK``, or why the disk cannot be trusted now, or the node takes part in its cluster no longer."""
        if self._data_path is not None and self._data_path.removed:
            return f"NOK - {self._data_path.removed}"
        error = self._broker.write_error
        if error is None or isinstance(error, DiskFull):
            if (full := self._disk.full(error)) is not None:
                return f"NOK - {full}"  # progress cannot be written then either, and this says what to do
            error = None
        if self.engine.health:
            return f"NOK - {self.engine.health}"
        for each in self._broker.logs():
            if each.failed:
                return f"NOK - {each.directory}: {each.failed}; {NO_MORE_MESSAGES}"
        if error is None and self._data_path is not None and self._data_path.problem:
            return f"NOK - {self._data_path.problem}"
        if error is None and self.agent is not None and self.agent.problem:
            return f"NOK - {self.agent.problem}"
        return "OK" if error is None else f"NOK - {error}"

    def state_of_health(self) -> str:
        """As :meth:`health`, or that damage was found that nobody has acknowledged; the node serves all the same."""
        health = self.health()
        return self.damage.health() if health == "OK" else health

    # -- what rooms tell each other ------------------------------------------------------------------------------------

    def _data_removed(self, why: str) -> None:
        """Take nothing more, and lead nothing that another node has."""
        self._broker.data_removed(why)
        if self.agent is not None:
            self.agent.data_removed()

    def _drain_changed(self) -> None:
        """Publishes are refused from now on, or taken again; nsqlookupds are told."""
        self._clients.look_up_again()
        self.lookup.introduce_again()
        if self.agent is not None:
            self.agent.set_draining(self.drain.is_on)

    def _topic_changed(self, name: str, channel: str | None, exists: bool) -> None:
        self.tracing.changed(name, channel)
        self.lookup.changed(name, self._broker.topics.get(name), channel, exists)

    def _peer_info(self) -> PeerInfo:
        """Return what a nsqlookupd is told; a node with partitions or headers has an id, as the redesigned NSQ's."""
        me = msgspec.structs.replace(self._identity.peer(), draining=self.drain.is_on)
        if self.agent is None and all(topic.meta == PLAIN for topic in self._broker.topics.values()):
            return me
        number = self._identity.node_id
        return msgspec.structs.replace(me, distributed_id=f"{me.broadcast_address}:0:{me.tcp_port}:{number}")

    def _registrations(self) -> list[Registration]:
        return registrations_of(self._broker.topics.values(), self.lookup.is_ready)

    def _ready_changed(self, name: str, gained: Sequence[int] | None) -> None:
        self.lookup.ready_changed(name, self._broker.topics.get(name), gained)
        for each in (self.subscribing, self.subscribing_here):
            each.partitions_changed(name)

    def _let_go(self, subscription: Subscription, number: int) -> bool:
        return any(each.let_go(subscription, number) for each in (self.subscribing, self.subscribing_here))

    def _corrupted(self, found: Corruption) -> None:
        self.damage.found(found)


def _broker_options(options: NsqdOptions, has_tiny_segments: bool) -> BrokerOptions:
    has_latencies = bool(options.e2e_processing_latency_percentile)
    return BrokerOptions(
        segment_bytes=64 * 1024 if has_tiny_segments else options.max_bytes_per_file,
        ephemeral_depth_max=options.mem_queue_size or EPHEMERAL_DEPTH_MIN,
        retention_time_ns=options.retention_time_ns,
        retention_bytes=options.retention_bytes,
        latency_window_ns=options.e2e_processing_latency_window_time_ns if has_latencies else 0,
        settings=options.settings,
        memory_budget_bytes=options.memory_budget or NO_LIMIT_BYTES,
    )
