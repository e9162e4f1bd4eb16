"""nsqd's composition root: builds the broker, the listeners and the peers, and takes them down in order.

Nothing here is global: several nsqd can live in one process (simulations do).

Source: reference/nsq.md 4.3 and 5.3.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import resource
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flintmq import __version__
from flintmq.broker.broker import Broker, BrokerOptions
from flintmq.broker.channel import Channel
from flintmq.broker.partition import PublishGroup
from flintmq.broker.subscription import Subscription
from flintmq.broker.topic import Topic
from flintmq.env import Env
from flintmq.errors import Exiting, FlintError, StorageError
from flintmq.net import log as logs
from flintmq.net.address import ListenFailed, bind_host, format_address, listening_address, split_address
from flintmq.net.http_messages import JSON_TYPE, NSQ_TYPE, Request, Response
from flintmq.net.http_server import HttpServer
from flintmq.net.tls import ServerTls, client_context
from flintmq.net.tls_engine import NewEngine
from flintmq.nsqd.auth import AuthClient
from flintmq.nsqd.engine import Ended, Engine
from flintmq.nsqd.http_api import HttpApi
from flintmq.nsqd.lookup_peer import LookupPeer, Registration
from flintmq.nsqd.options import NsqdOptions
from flintmq.nsqd.session import Session
from flintmq.storage import ChannelStore, Corruption, Files, OsFiles
from flintmq.wire import server as wire
from flintmq.wire.identify import NSQ_VERSION, ServerFeatures
from flintmq.wire.lookup import PeerInfo

log = logging.getLogger(__name__)

_DRAIN_DEADLINE_S = 1.0  # for clients to read their last frames and close
_FILES_RESERVE = 200  # descriptors kept for the log, the database and peers
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
        self.sessions: dict[Session, None] = {}
        self.addresses = Addresses(None, None)
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
        self._files = files
        self._is_exiting = False
        self._connections_max = options.max_connections or _descriptor_limit() - _FILES_RESERVE
        self._peers: list[LookupPeer] = []
        self._tcp: asyncio.AbstractServer | None = None
        self._http: HttpServer | None = None
        self._https: HttpServer | None = None
        self._damage_count = 0
        broker = Broker(
            files,
            ChannelStore(files),
            BrokerOptions(
                segment_bytes=64 * 1024 if env.buggify("tiny segments") else options.max_bytes_per_file,
                ephemeral_depth_max=options.mem_queue_size,
                retention_time_ns=options.retention_time_ns,
                retention_bytes=options.retention_bytes,
                max_channel_consumers=options.max_channel_consumers,
            ),
            env.random,
            self._report,
        )
        self.engine = Engine(
            env,
            broker,
            durability=options.durability,
            sync_every=options.sync_every,
            sync_timeout_ns=options.sync_timeout_ns,
        )

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Restore the data directory, then listen.

        Raises:
            FlintError: the data directory or an address cannot be used.
        """
        options = self.options
        broker = self.engine.broker
        broker.open(self.env.clock.wall_ns())
        broker.on_topic_change = self._topic_changed
        broker.on_problem = self._problem
        self.engine.start()
        self.engine.schedule()
        log.info("%s", self.version_line)
        log.info("durability: %s - %s", options.durability, _DURABILITY_TEXT[options.durability])
        for concern in self._tls.concerns(self.start_ns) if self._tls is not None else ():
            log.warning("%s", concern)
        tcp = await self._listen_tcp(options.tcp_address)
        router = HttpApi(self).router()
        http = https = None
        if options.http_address:
            refuse = self._require_tls if self.tls_required == "true" else None
            self._http = HttpServer(router, clock=self.env.clock, before=refuse)
            http = await self._listen_http("HTTP", self._http, options.http_address)
        if options.https_address and self.new_tls is not None:
            self._https = HttpServer(router, clock=self.env.clock)
            https = await self._listen_http("HTTPS", self._https, options.https_address, self.new_tls)
        self.addresses = Addresses(tcp, http, https)
        self._peers = [
            LookupPeer(address, self.env, self._peer_info, self._registrations)
            for address in options.lookupd_tcp_address
        ]

    async def _listen_tcp(self, text: str) -> tuple[str, int] | None:
        loop = self.engine.loop
        address = split_address(text)
        try:
            if address is None:
                self._tcp = await loop.create_unix_server(lambda: Session(self), text)
                log.info("TCP: listening on %s", text)
                return None
            host = await bind_host(*address)
            self._tcp = await loop.create_server(lambda: Session(self), host, address[1], backlog=1024)
        except OSError as error:
            raise ListenFailed(text, error.strerror or str(error)) from error
        bound = listening_address(self._tcp, host, address[1])
        log.info("TCP: listening on %s", format_address(*bound))
        return bound

    async def _listen_http(
        self, name: str, server: HttpServer, text: str, new_tls: NewEngine | None = None
    ) -> tuple[str, int] | None:
        address = split_address(text)
        try:
            if address is None:
                await server.start_unix(text, new_tls)
                log.info("%s: listening on %s", name, text)
                return None
            bound = await server.start(*address, new_tls)
        except OSError as error:
            raise ListenFailed(text, error.strerror or str(error)) from error
        log.info("%s: listening on %s", name, format_address(*bound))
        return bound

    def _require_tls(self, request: Request) -> Response:
        """The answer to every plain request when TLS is required; NSQ's clients follow it to the other port."""
        https = self.addresses.https
        body = f'{{"message": "TLS_REQUIRED", "https_port": {https[1] if https else 0}}}'
        return Response(403, body.encode(), (JSON_TYPE, NSQ_TYPE))

    async def close(self) -> None:
        """Stop in nsqd's order: listeners, clients, peers, then everything to disk."""
        self._is_exiting = True
        if self._tcp is not None:
            self._tcp.close()
        # what was published is stored and answered before the connections close
        await self.engine.settle()
        for session in list(self.sessions):
            session.drain()
        for server in (self._http, self._https):
            if server is not None:
                await server.close()
        if self.auth is not None:
            await self.auth.close()
        for peer in self._peers:
            await peer.close()
        deadline = self.engine.loop.time() + _DRAIN_DEADLINE_S
        while self.sessions and self.engine.loop.time() < deadline:
            await asyncio.sleep(0.01)
        for session in list(self.sessions):
            session.abort()
        while self.sessions:
            await asyncio.sleep(0)
        await self.engine.close()
        self._files.close()

    # -- what connections ask for --------------------------------------------------------------------------------------

    def admit(self, session: Session) -> bool:
        """Count a connection in; False when there are too many."""
        if self._is_exiting:
            return False
        if len(self.sessions) >= self._connections_max:
            log.warning("client %s refused: %d connections are the limit", session.peer, self._connections_max)
            return False
        self.sessions[session] = None
        return True

    def forget(self, session: Session) -> None:
        """Count a connection out."""
        self.sessions.pop(session, None)

    def create_topic(self, name: str) -> Topic:
        """Find a topic or create it.

        Raises:
            Exiting: this nsqd is shutting down.
            StorageError: its log cannot be created.
        """
        topic = self.engine.broker.topics.get(name)
        if topic is not None:
            return topic
        if self._is_exiting:
            raise Exiting
        log.info("TOPIC(%s): created", name)
        return self.engine.broker.topic(name, self.env.clock.wall_ns())

    def publish(self, topic_name: str, bodies: Sequence[bytes], defer_ms: int) -> PublishGroup:
        """Publish messages.

        Raises:
            Exiting: this nsqd is shutting down.
            StorageError: the topic's log cannot be created.
        """
        if self._is_exiting:
            raise Exiting
        topic = self.create_topic(topic_name)
        due_ns = self.engine.due_clock_ns() + defer_ms * 1_000_000 if defer_ms else 0
        return self.engine.broker.publish(topic, bodies, due_ns)

    def subscribe(self, session: Session, topic_name: str, channel_name: str) -> Ended:
        """Attach a connection to a channel; what is returned ends when the channel is durable.

        Raises:
            FlintError: the channel has as many consumers as are allowed, or this nsqd is shutting down.
        """
        if self._is_exiting:
            raise Exiting
        topic = self.create_topic(topic_name)
        channels, _ = self.engine.broker.channel(topic, channel_name)
        channel = channels[0]
        limit = self.options.max_channel_consumers
        if limit and len(channel.subscriptions) >= limit:
            raise FlintError(f"consumers for {topic_name}:{channel_name} exceeds limit of {limit}")
        negotiated = session.negotiated
        msg_timeout_ms = negotiated.msg_timeout_ms if negotiated else self.features.msg_timeout_ms
        session.subscription = Subscription(
            session.out,
            msg_timeout_ms * 1_000_000,
            self.options.max_msg_timeout_ns,
            negotiated.sample_rate if negotiated else 0,
            session,
        )
        session.channel = channel
        session.topic = topic
        channel.add(session.subscription)
        return self._when_durable(session)

    def unsubscribe(self, session: Session) -> None:
        """Detach a connection that is gone; what it held is queued again."""
        channel, topic, subscription = session.channel, session.topic, session.subscription
        assert channel is not None and topic is not None and subscription is not None
        session.subscription = None
        broker = self.engine.broker
        if broker.topics.get(topic.name) is not topic or channel.name not in topic.channel_names:
            return
        if subscription not in channel.subscriptions:
            return
        channel.remove(subscription)
        broker.mark(channel)
        self.engine.schedule()
        if channel.ephemeral and not channel.subscriptions:
            self.delete_channel(topic, channel.name)
            if topic.ephemeral and not topic.channel_names:
                self.delete_topic(topic.name)

    def place_cursor(self, session: Session, topic: Topic, event: wire.Cursor) -> tuple[Ended, Channel]:
        """Create a channel at a position or confirm up to it (CURSOR)."""
        broker = self.engine.broker
        log_start = topic.partitions[event.partition].log.start_sequence
        log_end = topic.partitions[event.partition].log.committed_sequence
        at = {-1: log_end, -2: log_start}.get(event.sequence, event.sequence)
        _, is_new = broker.channel(topic, event.channel, at)
        channel = topic.partitions[event.partition].channels[event.channel]
        if not is_new and event.sequence >= 0:
            channel.confirm(event.sequence)
            broker.mark(channel)
            self.engine.schedule()
        return self._when_durable(session), channel

    def _when_durable(self, waiter: Session) -> Ended:
        ended = Ended()
        ended.waiters.append(waiter)
        if not self.engine.broker.when_metadata_durable(ended.end):
            ended.end(None)
        return ended

    def metadata_durable(self) -> Ended | None:
        """Something that ends when all changes of topics and channels are durable; None when they are."""
        ended = Ended()
        return ended if self.engine.broker.when_metadata_durable(ended.end) else None

    def delete_channel(self, topic: Topic, name: str) -> None:
        """Delete a channel and close its consumers."""
        self._close_consumers(self.engine.broker.delete_channel(topic, name))
        log.info("TOPIC(%s): deleted channel %s", topic.name, name)

    def delete_topic(self, name: str) -> None:
        """Delete a topic with its channels and close their consumers."""
        self._close_consumers(self.engine.broker.delete_topic(name))
        log.info("TOPIC(%s): deleted", name)

    def _close_consumers(self, subscriptions: list[Subscription]) -> None:
        self.engine.schedule()
        for subscription in subscriptions:
            if isinstance(subscription.owner, Session):
                subscription.owner.abort()

    # -- state -----------------------------------------------------------------------------------------------------

    def health(self) -> str:
        """``OK``, or why the disk cannot be trusted now."""
        if self.engine.health:
            return f"NOK - {self.engine.health}"
        for each in self.engine.broker.logs():
            if each.failed:
                return f"NOK - {each.failed}"
        return "OK"

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
        }

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

    def _registrations(self) -> list[Registration]:
        rows: list[Registration] = []
        for topic in self.engine.broker.topics.values():
            rows += [(topic.name, channel) for channel in topic.channel_names] or [(topic.name, "")]
        return rows

    def _topic_changed(self, topic: str, channel: str | None, exists: bool) -> None:
        for peer in self._peers:
            peer.register((topic, channel or ""), exists)

    def _problem(self, error: StorageError) -> None:
        log.error("%s", error)

    def _report(self, damage: Corruption) -> None:
        self._damage_count += 1
        log.error("%s", damage)

    def describe(self) -> str:
        """The state of everything, for humans and failing tests."""
        return "\n".join([self.engine.broker.describe(), *(session.describe() for session in self.sessions)])


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


def _descriptor_limit() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(2 * _FILES_RESERVE, soft)


async def main(
    env: Env,
    files: Files,
    options: NsqdOptions,
    ready: Callable[[Nsqd], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Run an nsqd until ``stop`` is set.

    Args:
        ready: called when it listens.

    Raises:
        FlintError: it cannot start.
        StopFailed: it has stopped, and could not write everything.
    """
    nsqd = Nsqd(env, files, options)
    await nsqd.start()
    if ready is not None:
        ready(nsqd)
    if stop is None:
        stop = asyncio.Event()
    await stop.wait()
    log.info("stopping: draining connections and writing everything to disk")
    try:
        await nsqd.close()
    except FlintError as error:
        raise StopFailed(error) from error


def run(options: NsqdOptions) -> int:
    """Run an nsqd in this process until SIGTERM or SIGINT; return its exit code."""
    logs.configure(options.log_prefix, options.log_level)
    try:
        files = OsFiles(options.data_path or ".")
        env = Env(hostname=platform.node() or "localhost")
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_until_signal(env, files, options))
    except StopFailed as error:
        log.critical("%s", error)
        return 1
    except FlintError as error:
        log.critical("failed to instantiate nsqd - %s", error)
        return 1
    return 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _until_signal(env: Env, files: Files, options: NsqdOptions) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await main(env, files, options, stop=stop)


__all__ = ["Addresses", "Nsqd", "main", "run"]
