"""nsqd's composition root: builds the broker, the listeners and the peers, and takes them down in order.

Nothing here is global: several nsqd can live in one process (simulations do).

Source: reference/nsq.md 4.3 and 5.3.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
import resource
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from flintmq import __version__
from flintmq.broker.broker import Broker, BrokerOptions, TopicConflict
from flintmq.broker.channel import Channel
from flintmq.broker.partition import Ended, Partition
from flintmq.broker.parts import ChannelParts, PartSubscription, SharedSubscription
from flintmq.broker.subscription import Locality, Subscription
from flintmq.broker.topic import Topic
from flintmq.budget import NO_LIMIT_BYTES
from flintmq.env import Env
from flintmq.errors import DiskFull, Exiting, FlintError, RemoteProtocolError, StorageError, TakeoverStopped
from flintmq.limits import EPHEMERAL_DEPTH_MIN
from flintmq.migrate.metadata_file import MetadataFile
from flintmq.names import is_ephemeral
from flintmq.net import log as logs
from flintmq.net import regex
from flintmq.net.debug import DebugApi
from flintmq.net.descriptors import descriptor_limit, is_scarce
from flintmq.net.http_auth import HttpAuth, TokenFile
from flintmq.net.http_messages import JSON_TYPE, NSQ_TYPE, Request, Response
from flintmq.net.http_server import HttpServer
from flintmq.net.isolation import for_each
from flintmq.net.listen import Listener, listen
from flintmq.net.log_level import set_log_level
from flintmq.net.loop import loop_factory
from flintmq.net.metrics import Family
from flintmq.net.networks import Networks
from flintmq.net.origin import Origins, local_names
from flintmq.net.tls import VERIFY_IF_GIVEN, ServerTls, client_context
from flintmq.nsqd import extended, metrics, partitions, places, stats, statsd
from flintmq.nsqd.auth import AuthClient
from flintmq.nsqd.collector import Collector
from flintmq.nsqd.damage import DamageRegister
from flintmq.nsqd.drain import Drain, Draining, DrainSignal
from flintmq.nsqd.engine import Engine
from flintmq.nsqd.history import HourlySizes
from flintmq.nsqd.http_api import HttpApi
from flintmq.nsqd.http_permissions import TABLE as HTTP_PERMISSIONS
from flintmq.nsqd.lookup_peer import Registration
from flintmq.nsqd.lookupds import Lookupds
from flintmq.nsqd.loop_delays import LoopDelays
from flintmq.nsqd.memory import default_budget_bytes
from flintmq.nsqd.options import NsqdOptions, node_id_of
from flintmq.nsqd.pending_reply import PendingReply
from flintmq.nsqd.publishing import Publishing
from flintmq.nsqd.session import Session
from flintmq.nsqd.topology import Topology
from flintmq.nsqd.tracing import Tracing
from flintmq.storage import ChannelStore, Corruption, Files, OsFiles
from flintmq.storage.channel_list import LIST_NAME
from flintmq.storage.channel_store import DATABASE_NAME
from flintmq.topic_meta import PLAIN, TopicMeta
from flintmq.wire import server as wire
from flintmq.wire.identify import NSQ_VERSION, ServerFeatures
from flintmq.wire.lookup import PeerInfo

log = logging.getLogger(__name__)
AnySubscription = TypeVar("AnySubscription", bound=Subscription)

_HOLD_AGAIN_NS = 1_000_000_000  # before publishes to a topic have to wait for another new channel
_DRAIN_DEADLINE_S = 1.0  # for clients to read their last frames and close
_DURABILITY_TEXT = {
    "fsync": "OK means the message survives a power loss",
    "os": "OK means the message survives the end of this process, not a power loss",
    "interval": "OK means the message survives the end of this process; a power loss may take the last interval",
}


class StopFailed(FlintError):
    """A clean stop was not possible: the data directory is as after a kill.

    Args:
        reason: what the disk said.
    """

    def __init__(self, reason: Exception) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"stopped without writing everything - {self.reason}; after a start some finished messages may come again"
        )


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where an nsqd listens; None for what it does not."""

    tcp: tuple[str, int] | None
    http: tuple[str, int] | None
    https: tuple[str, int] | None = None


class Nsqd:
    """One running nsqd."""

    def __init__(self, env: Env, files: Files, options: NsqdOptions) -> None:
        self.env = env
        self.options = options
        self.version = NSQ_VERSION
        self.version_line = f"nsqd v{__version__} (built w/python{platform.python_version()})"
        self.start_ns = env.clock.wall_ns()
        self.gc_pauses = stats.GcPauses(env.clock)
        self._loop_delays = LoopDelays()
        self.history = HourlySizes(env.clock, self._partitions)
        self.sessions: dict[Session, None] = {}
        self.addresses = Addresses(None, None)
        self.restoring: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self.wire_limits = wire.ServerLimits(
            max_msg_size=options.max_msg_size,
            max_body_size=options.max_body_size,
            max_rdy_count=options.max_rdy_count,
            max_req_timeout_ms=options.max_req_timeout_ns // 1_000_000,
        )
        self.tls_required = options.tls_required
        if options.tls_client_auth_policy and self.tls_required == "false":
            self.tls_required = "true"
        self._tls = _tls(options)
        self.new_tls = None if self._tls is None else self._tls.engines()
        self.auth = _auth_client(options, env)
        self.features = _features(options, self.version)
        self._topology = Topology.of(options)
        self._files = files
        self._is_exiting = False
        self._gone: asyncio.Event | None = None
        self._connections_max = options.max_connections or descriptor_limit()
        self.debug = DebugApi(env, Networks(options.allow_config_from_cidr), self.describe)
        self._lookupds = Lookupds(
            env,
            self._lookup_info,
            self._registrations,
            options.http_client_connect_timeout_ns / 1e9,
            options.http_client_request_timeout_ns / 1e9,
            TokenFile(options.lookupd_http_token_file, env) if options.lookupd_http_token_file else None,
        )
        self._starting: dict[asyncio.Task[None], None] = {}
        self._statsd: statsd.Reporter | None = None
        self._tcp: Listener | None = None
        self._http: HttpServer | None = None
        self._https: HttpServer | None = None
        self._http_auth: HttpAuth | None = None
        self._store = ChannelStore(files, self.start_ns, options.accept_lost_channels)
        broker = Broker(
            files,
            self._store,
            BrokerOptions(
                segment_bytes=64 * 1024 if env.buggify("tiny segments") else options.max_bytes_per_file,
                ephemeral_depth_max=options.mem_queue_size or EPHEMERAL_DEPTH_MIN,
                retention_time_ns=options.retention_time_ns,
                retention_bytes=options.retention_bytes,
                latency_window_ns=_latency_window_ns(options),
                settings=options.settings,
                memory_budget_bytes=options.memory_budget or NO_LIMIT_BYTES,
            ),
            env.random,
            self._report,
        )
        self.damage = DamageRegister(env, broker)
        broker.on_damage = self.damage.add
        broker.on_known_damage = self.damage.restore
        self._metadata_file = MetadataFile(env, files, broker.topics.values)
        self.engine = Engine(
            env,
            broker,
            durability=options.durability,
            sync_every=options.sync_every,
            sync_timeout_ns=options.sync_timeout_ns,
        )
        self.drain = Drain(env, self.engine, options.drain_timeout_ns, self._drain_changed)
        self._publishing = Publishing(self.engine, self.drain, self.wanted_topic)
        self.tracing = Tracing(
            self.engine, options.trace_topic, options.trace_max_rate, self.create_topic, self._look_up_again
        )

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self, stop: asyncio.Event | None = None) -> None:
        """Restore the data directory, NSQ's as well, then listen.

        Args:
            stop: when set, a takeover of NSQ's data ends early; is set when this nsqd has drained.

        Raises:
            TakeoverStopped: it did.
            FlintError: the data directory or an address cannot be used.
        """
        options = self.options
        broker = self.engine.broker
        if stop is not None:
            self.drain.finished = stop.set
        if any(not name.startswith((DATABASE_NAME, LIST_NAME)) for name in self._files.list("")):
            from flintmq.migrate import takeover  # a new nsqd has nothing to take over

            settings = takeover.Settings(options.max_bytes_per_file, options.max_msg_size)
            await takeover.take_over(
                self.env, self._files, self._store, settings, options.data_path, self._report, stop
            )
        with self.restoring():
            broker.open(self.env.clock.wall_ns())
        self.tracing.start()
        broker.on_topic_change = self._topic_changed
        broker.on_problem = self._problem
        broker.on_dead_letter_topic = lambda name, _wall_ns: self.create_extended_topic(name)
        self.engine.on_metadata = self._metadata_file.changed
        self.engine.start()
        self.engine.schedule()
        await self._metadata_file.start()
        log.info("%s", self.version_line)
        log.info("durability: %s - %s", options.durability, _DURABILITY_TEXT[options.durability])
        for concern in self._tls.concerns(self.start_ns) if self._tls is not None else ():
            log.warning("%s", concern)
        if self.auth is not None and not regex.is_available():
            what = "grants of auth servers may name topics and channels plainly, or all with .*"
            log.warning("google-re2 is not installed: %s: pip install 'flintmq[auth]'", what)
        await self._listen()
        me = self._peer_info()
        self.tracing.node = f"{me.broadcast_address}:{me.tcp_port}"
        self._lookupds.set(options.lookupd_tcp_address)
        for topic in list(broker.topics.values()):
            if topic.is_starting:
                self._start_topic(topic)
        self.gc_pauses.start()
        self.history.start()
        if options.http_address:
            self._loop_delays.start()
        if options.statsd_address:
            self._statsd = self._new_statsd()

    async def _listen(self) -> None:
        options = self.options
        router = HttpApi(self).router()
        check = None
        if options.http_auth_tokens_file:
            file, trusts = options.http_auth_tokens_file, options.http_auth_client_cert
            self._http_auth = HttpAuth(file, router, HTTP_PERMISSIONS, self.env, trusts, "nsqd")
            self._http_auth.start()
            check = self._http_auth.check
        origins = Origins(
            options.http_allow_origin, (self.env.hostname, *self.env.local_names, options.broadcast_address)
        )
        tcp = self._tcp = await listen(lambda: Session(self), options.tcp_address)
        http = https = None
        if options.http_address:
            refuse = self._require_tls if self.tls_required == "true" else check
            self._http = HttpServer(
                router, clock=self.env.clock, before=refuse, origins=origins, budget=self.engine.broker.budget
            )
            http = await self._http.start(options.http_address)
        if options.https_address and self._tls is not None:
            new_tls = self.new_tls
            if options.http_auth_client_cert and not self._tls.policy:
                new_tls = replace(self._tls, policy=VERIFY_IF_GIVEN).engines()
            self._https = HttpServer(
                router, clock=self.env.clock, before=check, origins=origins, budget=self.engine.broker.budget
            )
            https = await self._https.start(options.https_address, new_tls)
        listeners = (("TCP", tcp), ("HTTP", http), ("HTTPS", https))
        self.addresses = Addresses(*(None if each is None else each.address for _, each in listeners))
        # whoever reads one of these lines may use all of the addresses
        for name, listener in listeners:
            if listener is not None:
                logs.announce(log, name, listener.name)

    def _require_tls(self, request: Request) -> Response:
        """The answer to every plain request when TLS is required; NSQ's clients follow it to the other port."""
        https = self.addresses.https
        body = f'{{"message": "TLS_REQUIRED", "https_port": {https[1] if https else 0}}}'
        return Response(403, body.encode(), (JSON_TYPE, NSQ_TYPE))

    async def close(self) -> None:
        """Stop in nsqd's order: listeners, clients, peers, then everything to disk."""
        self.tracing.flush()  # its topic may be new
        self._is_exiting = True
        self.drain.close()
        if self._tcp is not None:
            self._tcp.close()
        # what was published is stored and answered before the connections close
        await self.engine.settle()
        for_each(self.sessions, Session.drain, "draining")
        self.debug.close()
        for server in (self._http, self._https):
            if server is not None:
                await server.close()
        if self._http_auth is not None:
            await self._http_auth.close()
        if self.auth is not None:
            await self.auth.close()
        for task in list(self._starting):
            task.cancel()
        await self._lookupds.close()
        if self._statsd is not None:
            await self._statsd.close()
        self.gc_pauses.stop()
        self.history.stop()
        self._loop_delays.stop()
        await self._all_gone(_DRAIN_DEADLINE_S)
        for_each(self.sessions, Session.abort, "aborting")
        await self._all_gone(_DRAIN_DEADLINE_S)
        await self._metadata_file.close()
        self.tracing.close()
        await self.engine.close()
        self._files.close()

    async def _all_gone(self, deadline_s: float) -> None:
        """Wait until the last connection is gone, or the deadline."""
        if self.sessions:
            self._gone = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    await self._gone.wait()

    # -- what connections ask for --------------------------------------------------------------------------------------

    def admit(self, session: Session, transport: asyncio.BaseTransport) -> bool:
        """Count a connection in; False when there are too many."""
        if self._is_exiting:
            return False
        if is_scarce(transport):
            limit = descriptor_limit()
            log.warning("client %s refused: too few of %d files are left (see ulimit -n)", session.peer, limit)
            return False
        if len(self.sessions) >= self._connections_max:
            log.warning("client %s refused: %d connections are the limit", session.peer, self._connections_max)
            return False
        self.sessions[session] = None
        return True

    def forget(self, session: Session) -> None:
        """Count a connection out."""
        self.sessions.pop(session, None)
        if not self.sessions and self._gone is not None:
            self._gone.set()

    def create_topic(self, name: str) -> Topic:
        """Find a topic or create it; whoever waits for it to be stored is told when it cannot be.

        Raises:
            Exiting: this nsqd is shutting down.
        """
        topic = self.engine.broker.topics.get(name)
        if topic is not None:
            return topic
        if self._is_exiting:
            raise Exiting
        starting = bool(self._lookupds)
        topic = self.engine.broker.topic(name, self.env.clock.wall_ns(), starting, later=True)
        self.engine.schedule()
        log.info("TOPIC(%s): created", name)
        if topic.is_starting:
            self._start_topic(topic)
        return topic

    def wanted_topic(self, command: str, name: str, is_extended: bool = False) -> Topic:
        """The topic that a client publishes or subscribes to, which is created unless topics are not made so.

        Raises:
            Exiting: this nsqd is shutting down.
            RemoteProtocolError: it is not there.
        """
        if not self.options.auto_create_topics and name not in self.engine.broker.topics:
            what = f"{command} topic {name} is not on this nsqd, which creates none by itself: use /topic/create"
            raise RemoteProtocolError("E_TOPIC_NOT_EXIST", what, fatal=True)
        return self.create_extended_topic(name) if is_extended else self.create_topic(name)

    def create_extended_topic(self, name: str) -> Topic:
        """Find a plain topic whose messages may carry headers, or create it.

        Raises:
            Exiting: this nsqd is shutting down.
            TopicConflict: there is a topic of that name that was created otherwise.
        """
        if self._is_exiting:
            raise Exiting
        broker = self.engine.broker
        is_new = name not in broker.topics
        topic = broker.extended_topic(name, self.env.clock.wall_ns(), bool(self._lookupds))
        if topic.meta.is_partitioned or not topic.meta.extend_support:
            what = "with partitions" if topic.meta.is_partitioned else "without headers"
            raise TopicConflict(f"topic {name} is there already, {what}: delete it first, or take another name")
        self.engine.schedule()
        if is_new:
            log.info("TOPIC(%s): created, messages may have headers", name)
            if topic.is_starting:
                self._start_topic(topic)
        return topic

    def create_partitions(self, name: str, meta: TopicMeta, numbers: Iterable[int]) -> Topic:
        """Create those partitions of a topic that are not here, and the topic with them.

        Raises:
            Exiting, Draining: this nsqd is shutting down, or about to.
            TopicConflict: there is a topic of that name that was created otherwise.
            StorageError: a partition cannot be added.
        """
        if self._is_exiting:
            raise Exiting
        if self.drain.is_on:
            raise Draining
        broker = self.engine.broker
        is_new = name not in broker.topics
        topic = broker.create_partitions(name, meta, numbers, self.env.clock.wall_ns(), bool(self._lookupds))
        self.engine.schedule()
        if is_new:
            held = ",".join(map(str, topic.partitions))
            log.info("TOPIC(%s): created, partitions %s of %d", name, held, meta.partition_num)
            if topic.is_starting:
                self._start_topic(topic)
        return topic

    def _start_topic(self, topic: Topic) -> None:
        """Let a topic hand out messages once it has the channels that nsqlookupds know of."""
        task = self.engine.loop.create_task(self._create_channels(topic))
        self._starting[task] = None
        task.add_done_callback(lambda done: self._channels_created(topic, done))

    def _channels_created(self, topic: Topic, task: asyncio.Task[None]) -> None:
        self._starting.pop(task, None)
        if task.cancelled():
            return  # this nsqd stops; the next one asks again
        if task.exception() is not None:
            log.error("creating channels of topic %s ended unexpectedly", topic.name, exc_info=task.exception())
        if self.engine.broker.topics.get(topic.name) is topic:
            self.engine.broker.start_topic(topic)
            self.engine.schedule()

    async def _create_channels(self, topic: Topic) -> None:
        """Publishing goes on meanwhile: messages are stored and acknowledged, and handed out when this is done."""
        names = await self._lookupds.channels_of(topic.name) if self._lookupds else []
        if self.engine.broker.topics.get(topic.name) is not topic:
            return
        for name in names:
            if name not in topic.channel_names:
                log.info("TOPIC(%s): new channel(%s), which nsqlookupd knows", topic.name, name)
                self.engine.broker.channel(topic, name)

    def publish(self, event: wire.Publish) -> PendingReply:
        """Take messages; what is returned ends when they are stored.

        Raises:
            Exiting: this nsqd is shutting down.
            FlintError: as :meth:`flintmq.nsqd.publishing.Publishing.publish`.
        """
        if self._is_exiting:
            raise Exiting
        return self._publishing.publish(event)

    def subscribe(self, session: Session, event: wire.Subscribe) -> Ended:
        """Attach a connection to a channel; what is returned ends when the channel can be relied on.

        That is when it is durable, or nothing can be stored in its topic before it is.

        Raises:
            FlintError: the channel has as many consumers as are allowed, or this nsqd is shutting down.
            RemoteProtocolError: the topic cannot be had in this way.
        """
        if self._is_exiting:
            raise Exiting
        broker = self.engine.broker
        numbers = partitions.to_consume(broker.topics, event, broker.is_order_must)
        start = places.start_of(event)
        knows_headers = session.negotiated is not None and session.negotiated.request.extend_support
        extended.check_support(broker.topics, event, knows_headers)
        if session.ext_filter is not None:
            extended.check_filtered(broker.topics, event, knows_headers)
        if event.is_ordered and session.negotiated is not None and session.negotiated.sample_rate:
            raise RemoteProtocolError("E_INVALID", f"{event.command} cannot be sampled", fatal=True)
        is_extended = knows_headers and event.topic not in broker.topics
        topic = self.wanted_topic(event.command, event.topic, is_extended)
        _, is_new = broker.channel(topic, event.channel, numbers=numbers)
        channels = {number: topic.partitions[number].channels[event.channel] for number in numbers or topic.partitions}
        limit = self.options.max_channel_consumers
        if limit and any(len(channel.subscriptions) >= limit for channel in channels.values()):
            raise FlintError(f"consumers for {event.topic}:{event.channel} exceeds limit of {limit}")
        if event.is_ordered:
            broker.order_channel(topic, event.channel, True)
        if start is not None:
            places.begin_at(broker, topic, channels, start)
        session.topic = topic
        session.parser.raw_ids = topic.meta.is_partitioned
        if len(channels) == 1:
            (session.channel,) = channels.values()
            (number,) = channels
            session.subscription = self._subscription(session, Subscription, topic.partitions[number], event)
            session.subscription.wants_order = event.is_ordered
            session.channel.add(session.subscription)
        else:
            held = topic.partitions
            parts = {n: self._subscription(session, PartSubscription, held[n], event) for n in channels}
            session.channel = ChannelParts(channels, parts)
            session.subscription = SharedSubscription(list(parts.values()))
            for number, channel in channels.items():
                channel.add(parts[number])
        if not event.is_ordered:
            self._relax_order(topic, event.channel)
            if any(channel.keep_floor is not None for channel in channels.values()):
                what = "is consumed in order, so this consumer gets one message at a time"
                log.info("TOPIC(%s): client %s: channel %s %s", topic.name, session.peer, event.channel, what)
        is_passing = topic.ephemeral or is_ephemeral(event.channel)
        is_owed = any(
            channel.depth or channel.end < topic.partitions[number].log.next_sequence
            for number, channel in channels.items()
        )
        is_simple = (is_new or is_passing) and not (event.is_ordered or is_owed) and start is None
        if is_simple and (
            (is_passing and topic.first_partition.log.is_created)
            or self._hold_until_durable(session, topic, event.command)
        ):
            ended = Ended()
            ended.end(None)
            return ended
        return self._when_durable(session, topic)

    def _hold_until_durable(self, session: Session, topic: Topic, command: str) -> bool:
        """Let nothing be stored in a topic before a channel is that a client has subscribed to; False: not now.

        So the client can be answered at once, and has every message that is acknowledged from then on. What is stored
        already would not be its own after a kill, so the channel must be owed none of it. Publishes do not wait for the
        new channels of one client after the other.
        """
        now_ns = self.env.clock.monotonic_ns

        def done(error: BaseException | None) -> None:
            if any(partition.has_pending for partition in topic.partitions.values()):
                topic.waited_ns = now_ns()
            if error is not None:
                session.dismiss("E_SUB_FAILED", f"{command} failed {error}")

        is_often = now_ns() - topic.waited_ns < _HOLD_AGAIN_NS
        return not is_often and self.engine.broker.hold_until_durable(topic, done)

    def _relax_order(self, topic: Topic, name: str) -> None:
        if self.engine.broker.relax_order(topic, name):
            log.info("TOPIC(%s): channel %s is no longer in order: nobody is left who asked for it", topic.name, name)

    def _subscription(
        self, session: Session, kind: type[AnySubscription], partition: Partition, event: wire.Subscribe
    ) -> AnySubscription:
        negotiated = session.negotiated
        msg_timeout_ms = negotiated.msg_timeout_ms if negotiated else self.features.msg_timeout_ms
        subscription = kind(
            session.out,
            msg_timeout_ms * 1_000_000,
            self.options.max_msg_timeout_ns,
            negotiated.sample_rate if negotiated else 0,
            session,
            self._topology.locality(negotiated.request) if negotiated else Locality.GLOBAL,
        )
        has_headers = partition.meta.extend_support
        knows_headers = negotiated is not None and negotiated.request.extend_support
        subscription.layout = extended.layout_of(partition.meta, event.is_located, knows_headers)
        if has_headers and partition.headers_from:
            subscription.headers_from = partition.headers_from
            subscription.older_layout = extended.older_layout_of(event.is_located, knows_headers)
        if negotiated is not None and has_headers:
            subscription.tag = negotiated.request.desired_tag
            subscription.ext_filter = session.ext_filter
        return subscription

    def unsubscribe(self, session: Session) -> None:
        """Detach a connection that is gone; what it held is queued again."""
        channel, topic, subscription = session.channel, session.topic, session.subscription
        assert channel is not None and topic is not None and subscription is not None
        session.subscription = None
        broker = self.engine.broker
        if broker.topics.get(topic.name) is not topic or channel.name not in topic.channel_names:
            return
        for part in topic.channels(channel.name):
            for each in subscription.parts if isinstance(subscription, SharedSubscription) else (subscription,):
                if each in part.subscriptions:
                    part.remove(each)
                    broker.mark(part)
        self._relax_order(topic, channel.name)
        self.engine.schedule()
        if channel.ephemeral and not any(part.subscriptions for part in topic.channels(channel.name)):
            self.delete_channel(topic, channel.name)

    def place_cursor(self, session: Session, topic: Topic, event: wire.Cursor) -> tuple[Ended, Channel]:
        """Create a channel at a position or confirm up to it (CURSOR)."""
        broker = self.engine.broker
        log_start = topic.partitions[event.partition].log.start_sequence
        log_end = topic.partitions[event.partition].log.committed_sequence
        # the other partitions get a word of their own; until then nothing of them is passed over
        others = {-1: (1 << 62)}.get(event.sequence, 0)
        at = dict.fromkeys(topic.partitions, others)
        at[event.partition] = {-1: log_end, -2: log_start}.get(event.sequence, event.sequence)
        _, is_new = broker.channel(topic, event.channel, at, (event.partition,))
        channel = topic.partitions[event.partition].channels[event.channel]
        if not is_new and event.sequence >= 0:
            channel.confirm(event.sequence)
            broker.mark(channel)
            self.engine.schedule()
        return self._when_durable(session, topic), channel

    def _when_durable(self, waiter: Session, topic: Topic) -> Ended:
        ended = Ended()
        ended.waiters.append(waiter)
        if not self.engine.broker.when_metadata_durable(ended.end, topic):
            ended.end(None)
        return ended

    def metadata_durable(self, topic: Topic | None = None) -> Ended | None:
        """Something that ends when all changes of topics and channels are durable; None when they are.

        Args:
            topic: which may be new.
        """
        ended = Ended()
        return ended if self.engine.broker.when_metadata_durable(ended.end, topic) else None

    def delete_channel(self, topic: Topic, name: str, partition: int | None = None) -> None:
        """Delete a channel and close its consumers; an ephemeral topic goes with its last channel.

        Args:
            partition: in which it is deleted; everywhere when not given.

        Raises:
            ChannelNotFound, PartitionNotFound: as :meth:`Broker.delete_channel`.
        """
        self._close_consumers(self.engine.broker.delete_channel(topic, name, partition))
        where = "" if partition is None else f" in partition {partition}"
        log.info("TOPIC(%s): deleted channel %s%s", topic.name, name, where)
        if topic.ephemeral and not topic.channel_names:
            self.delete_topic(topic.name)

    def change_meta(self, topic: Topic, meta: TopicMeta) -> bool:
        """Put another state of a topic into force; see :meth:`Broker.change_meta`.

        Who consumes a topic with partitions that gets headers is sent away, because it does not know them; of a plain
        topic it goes on, and gets the bodies alone.
        """
        had_headers = topic.meta.extend_support
        if not self.engine.broker.change_meta(topic, meta):
            return False
        self.engine.schedule()
        if meta.extend_support and not had_headers:
            self._look_up_again()  # publishes wait now, and what waits is counted
            sessions: dict[Session, None] = {}
            for partition in topic.partitions.values():
                for channel in partition.channels.values():
                    for subscription in channel.subscriptions:
                        extended.go_on(subscription, partition)
                        if meta.is_partitioned and isinstance(subscription.owner, Session):
                            sessions[subscription.owner] = None
            what = f"topic {topic.name}: messages have headers from now on, identify with extend_support"
            for_each(list(sessions), lambda session: session.dismiss("E_SUB_EXTEND_NEED", what), "closing")
        return True

    def delete_topic(self, name: str) -> None:
        """Delete a topic with its channels and close their consumers."""
        self._close_consumers(self.engine.broker.delete_topic(name))
        log.info("TOPIC(%s): deleted", name)

    def _close_consumers(self, subscriptions: list[Subscription]) -> None:
        self.engine.schedule()
        owners = [each.owner for each in subscriptions if isinstance(each.owner, Session)]
        for_each(owners, Session.abort, "closing")

    # -- state -----------------------------------------------------------------------------------------------------

    def health(self) -> str:
        """``OK``, or why the disk cannot be trusted now."""
        error = self.engine.broker.write_error
        if isinstance(error, DiskFull):
            if not self._has_space(error):
                return f"NOK - {error}"  # progress cannot be written then either, and this says what to do
            error = None
        if self.engine.health:
            return f"NOK - {self.engine.health}"
        for each in self.engine.broker.logs():
            if each.failed:
                return f"NOK - {each.directory}: {each.failed}"
        return "OK" if error is None else f"NOK - {error}"

    def state_of_health(self) -> str:
        """As :meth:`health`, or that damage was found that nobody has acknowledged; the node serves all the same."""
        health = self.health()
        return self.damage.health() if health == "OK" else health

    def _has_space(self, error: DiskFull) -> bool:
        """Whether a disk that was full is so no longer; without publishes nothing else would tell."""
        try:
            return self._files.free_bytes() > error.needed_bytes
        except OSError:
            return False

    def info(self) -> dict[str, Any]:
        """The answer of /info."""
        options = self.options
        tcp, http = self.addresses.tcp, self.addresses.http
        return {
            "version": self.version,
            "broadcast_address": options.broadcast_address or self.env.hostname,
            "hostname": self.env.hostname,
            "http_port": http[1] if http else (-1 if options.http_address else 0),
            "tcp_port": tcp[1] if tcp else -1,
            "start_time": self.start_ns // 1_000_000_000,
            "max_heartbeat_interval": options.max_heartbeat_interval_ns,
            "max_output_buffer_size": options.max_output_buffer_size,
            "max_output_buffer_timeout": options.max_output_buffer_timeout_ns,
            "max_deflate_level": options.max_deflate_level,
            "topology_zone": options.topology_zone,
            "topology_region": options.topology_region,
            "flintmq_version": __version__,
            **({"draining": True} if self.drain.is_on else {}),
        }

    async def introduced(self) -> None:
        """Wait until every nsqlookupd knows this nsqd, or could not be told at the first try."""
        await self._lookupds.introduced()

    def metrics(self) -> list[Family]:
        """What Prometheus is told of the daemon itself."""
        families = metrics.describe_daemon(
            self.version,
            self.options.durability,
            self.start_ns,
            self.health() == "OK",
            len(self.sessions),
            self.damage,
            self._lookupds.connected(),
        )
        families += metrics.describe_memory(self.engine.broker)
        return [*families, self._loop_delays.family(), *self.tracing.families()]

    def _drain_changed(self) -> None:
        """Publishes are refused from now on, or taken again; nsqlookupds are told."""
        self._look_up_again()
        self._lookupds.introduce_again()

    def _look_up_again(self) -> None:
        for session in self.sessions:
            session.look_up_again()

    def change_options(self, options: NsqdOptions) -> None:
        """Put options that may change at run time into force: the nsqlookupds and the log level."""
        self.options = options
        self._lookupds.set(options.lookupd_tcp_address)
        set_log_level(options.log_level)

    def options_filled_in(self) -> dict[str, Any]:
        """Options that are not shown as they were given, by their name in a configuration file."""
        me = self._peer_info()
        node_id = self.options.node_id
        return {
            "broadcast_address": me.broadcast_address,
            "broadcast_tcp_port": me.tcp_port,
            "broadcast_http_port": me.http_port,
            "id": node_id_of(self.env.hostname) if node_id is None else node_id,
            "statsd_prefix": self.statsd_prefix,
        }

    @property
    def statsd_prefix(self) -> str:
        """What every key told to statsd starts with."""
        me = self._peer_info()
        return statsd.prefix_of(self.options.statsd_prefix, me.broadcast_address, me.http_port)

    def _new_statsd(self) -> statsd.Reporter:
        options = self.options

        def topics() -> Iterator[statsd.Row]:
            latencies = stats.Latencies(options.e2e_processing_latency_percentile, self.env.clock.wall_ns())
            return stats.topic_rows(self.engine.broker.topics, latencies)

        return statsd.Reporter(
            options.statsd_address,
            options.statsd_interval_ns / 1e9,
            options.statsd_udp_packet_size,
            statsd.Lines(self.statsd_prefix, options.statsd_exclude_ephemeral),
            topics,
            (lambda: stats.memory(self.gc_pauses)) if options.statsd_mem_stats else None,
        )

    def _peer_info(self) -> PeerInfo:
        options = self.options
        tcp, http = self.addresses.tcp, self.addresses.http
        return PeerInfo(
            version=self.version,
            tcp_port=options.broadcast_tcp_port or (tcp[1] if tcp else 0),
            http_port=options.broadcast_http_port or (http[1] if http else 0),
            hostname=self.env.hostname,
            broadcast_address=options.broadcast_address or self.env.hostname,
            topology_zone=options.topology_zone,
            topology_region=options.topology_region,
        )

    def _lookup_info(self) -> PeerInfo:
        """What a nsqlookupd is told; a node with partitions or headers has an id, as the redesigned NSQ's."""
        me = msgspec.structs.replace(self._peer_info(), draining=self.drain.is_on)
        if all(topic.meta == PLAIN for topic in self.engine.broker.topics.values()):
            return me
        node_id = self.options.node_id
        number = node_id_of(self.env.hostname) if node_id is None else node_id
        return msgspec.structs.replace(me, distributed_id=f"{me.broadcast_address}:0:{me.tcp_port}:{number}")

    def _partitions(self) -> Iterator[Partition]:
        return (partition for topic in self.engine.broker.topics.values() for partition in topic.partitions.values())

    def _registrations(self) -> list[Registration]:
        rows: list[Registration] = []
        for topic in self.engine.broker.topics.values():
            rows += _registrations_of(topic)
        return rows

    def _topic_changed(self, name: str, channel: str | None, exists: bool) -> None:
        self.tracing.changed(name, channel)
        topic = self.engine.broker.topics.get(name)
        if topic is None or not exists or topic.meta == PLAIN:
            self._lookupds.register(Registration(name, channel or ""), exists)
            return
        for row in _registrations_of(topic):
            if not channel or channel == row.channel:
                self._lookupds.register(row, True)

    def _problem(self, error: StorageError) -> None:
        log.error("%s", error)

    def _report(self, damage: Corruption) -> None:
        self.damage.found(damage)

    def describe(self) -> str:
        """The state of everything, for humans and failing tests."""
        parts = [self.engine.broker.describe(), *(session.describe() for session in self.sessions)]
        parts += [server.describe() for server in (self._http, self._https) if server is not None]
        parts.append(self._lookupds.describe())
        return "\n".join(part for part in parts if part)


def _registrations_of(topic: Topic) -> list[Registration]:
    """A topic and its channels; of a plain one the channels alone, which name the topic as well."""
    if topic.meta == PLAIN:
        return [Registration(topic.name, channel) for channel in topic.channel_names] or [Registration(topic.name)]
    held = tuple(topic.partitions) if topic.meta.is_partitioned else ()
    return [Registration(topic.name, channel, held, topic.meta) for channel in ("", *topic.channel_names)]


def _features(options: NsqdOptions, version: str) -> ServerFeatures:
    return ServerFeatures(
        version=version,
        max_rdy_count=options.max_rdy_count,
        msg_timeout_ms=options.msg_timeout_ns // 1_000_000,
        max_msg_timeout_ms=options.max_msg_timeout_ns // 1_000_000,
        max_heartbeat_interval_ms=options.max_heartbeat_interval_ns // 1_000_000,
        max_output_buffer_size=options.max_output_buffer_size,
        output_buffer_timeout_ms=options.output_buffer_timeout_ns // 1_000_000,
        min_output_buffer_timeout_ms=options.min_output_buffer_timeout_ns // 1_000_000,
        max_output_buffer_timeout_ms=options.max_output_buffer_timeout_ns // 1_000_000,
        tls=bool(options.tls_cert or options.tls_key),
        deflate=options.deflate,
        max_deflate_level=options.max_deflate_level,
        snappy=options.snappy,
        auth_required=bool(options.auth_http_address),
        topology_region=options.topology_region,
        topology_zone=options.topology_zone,
    )


def _tls(options: NsqdOptions) -> ServerTls | None:
    if not options.tls_cert and not options.tls_key:
        return None
    return ServerTls(
        options.tls_cert,
        options.tls_key,
        options.tls_client_auth_policy,
        options.tls_root_ca_file,
        options.tls_min_version,
    )


def _auth_client(options: NsqdOptions, env: Env) -> AuthClient | None:
    if not options.auth_http_address:
        return None
    return AuthClient(
        options.auth_http_address,
        method=options.auth_http_request_method,
        env=env,
        context=client_context(options.tls_root_ca_file, min_version=options.tls_min_version),
        connect_timeout_s=options.http_client_connect_timeout_ns / 1e9,
        request_timeout_s=options.http_client_request_timeout_ns / 1e9,
    )


def _latency_window_ns(options: NsqdOptions) -> int:
    return options.e2e_processing_latency_window_time_ns if options.e2e_processing_latency_percentile else 0


def _raise_descriptor_limit() -> None:
    """Allow this process as many files as the system lets it, as Go's runtime does: every topic keeps one open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            log.warning("the limit of open files stays at %d, %d cannot be had: %s", soft, hard, error)


async def main(
    env: Env,
    files: Files,
    options: NsqdOptions,
    ready: Callable[[Nsqd], None] | None = None,
    stop: asyncio.Event | None = None,
    restoring: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> None:
    """Run an nsqd until ``stop`` is set.

    Args:
        ready: called when it listens.
        restoring: around the making of all that was there before.

    Raises:
        FlintError: it cannot start.
        StopFailed: it has stopped, and could not write everything.
    """
    stop = stop or asyncio.Event()
    nsqd = Nsqd(env, files, options)
    nsqd.restoring = restoring
    try:
        await nsqd.start(stop)
    except TakeoverStopped as stopped:
        log.info("stopping: %s", stopped)
        return
    if ready is not None:
        ready(nsqd)
    await stop.wait()
    log.info("stopping: draining connections and writing everything to disk")
    try:
        await nsqd.close()
    except FlintError as error:
        raise StopFailed(error) from error


def run(options: NsqdOptions) -> int:
    """Run an nsqd in this process until SIGTERM or SIGINT; return its exit code."""
    reopen_log = logs.configure(options.log_prefix, options.log_level, path=options.log_file)
    _raise_descriptor_limit()
    try:
        files = OsFiles(options.data_path or ".")
        env = Env(hostname=platform.node() or "localhost", local_names=local_names())
        options = replace(options, memory_budget=options.memory_budget or default_budget_bytes())
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_until_signal(env, files, options, reopen_log))
    except StopFailed as error:
        log.critical("%s", error)
        return 1
    except (FlintError, OSError) as error:
        log.critical("failed to instantiate nsqd - %s", error)
        return 1
    return 0


async def _until_signal(env: Env, files: Files, options: NsqdOptions, reopen_log: Callable[[], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    draining = DrainSignal(stop.set, options.drain_on_sigterm)
    loop.add_signal_handler(signal.SIGTERM, draining.terminate)
    loop.add_signal_handler(signal.SIGINT, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, draining.begin)
    loop.add_signal_handler(signal.SIGHUP, reopen_log)
    collector = Collector()
    collector.start()
    try:
        await main(env, files, options, lambda nsqd: draining.attach(nsqd.drain), stop, collector.paused)
    finally:
        collector.stop()


__all__ = ["Addresses", "Nsqd", "main", "run"]
