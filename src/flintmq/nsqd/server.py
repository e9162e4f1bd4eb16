"""nsqd put together: the node, the listeners of its TCP protocol and its HTTP API; taken down in order.

Nothing here is global: several nsqd can live in one process (simulations do).

Source: NSQ's options, NSQ's data files.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import platform
import resource
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from flintmq.broker.logs import TOPICS_DIRECTORY
from flintmq.env import Env
from flintmq.errors import FlintError, StorageError, TakeoverStopped
from flintmq.net import early_stop, regex, supervisor
from flintmq.net import log as logs
from flintmq.net.debug import DebugApi
from flintmq.net.descriptors import descriptor_limit
from flintmq.net.http_auth import HttpAuth
from flintmq.net.http_messages import Request, Response
from flintmq.net.http_router import Router
from flintmq.net.http_server import HttpServer
from flintmq.net.listen import Listener, listen
from flintmq.net.log_level import set_log_level
from flintmq.net.loop import end_undisturbed, loop_factory
from flintmq.net.networks import Networks
from flintmq.net.origin import Origins, local_names
from flintmq.net.tls import VERIFY_IF_GIVEN
from flintmq.net.tls_or_plain import tls_required
from flintmq.nsqd.api.config import Running
from flintmq.nsqd.api.routes import PERMISSIONS, Api
from flintmq.nsqd.client import Clients
from flintmq.nsqd.collector import Collector
from flintmq.nsqd.drain import DrainSignal
from flintmq.nsqd.figures.figures import Figures
from flintmq.nsqd.identity import Addresses, Identity
from flintmq.nsqd.memory import default_budget_bytes
from flintmq.nsqd.node import Node
from flintmq.nsqd.options import NsqdOptions
from flintmq.nsqd.session import Session
from flintmq.nsqd.terms import Terms
from flintmq.storage import Files, OsFiles
from flintmq.wire.peer import Purpose

log = logging.getLogger(__name__)

_OTHER_FILES = 256  # what a start needs at least beside its topics, and some connections
_REFUSING_S = 0.1
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


class MessagesGone(StopFailed):
    """The files were removed while it ran: what they had is gone with the process.

    Args:
        why: what was found.
        count: of messages that some channel had not finished.
    """

    def __init__(self, why: str, count: int) -> None:
        super().__init__(StorageError(why))
        self.why = why
        self.count = count

    def __str__(self) -> str:
        return f"stopped, and {self.count} messages that were not finished are gone with it - {self.why}"


class Nsqd:
    """One running nsqd.

    Attributes:
        node: what it does.
        clients: who is connected.
        options: as they are now.
        restoring: around the making of all that was there before.
    """

    def __init__(self, env: Env, files: Files, options: NsqdOptions) -> None:
        self.options = options
        self.restoring: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self._env = env
        self._identity = Identity(env, options)
        self._terms = Terms.of(options, env, self._identity.run_id)
        self.clients = Clients(options.max_connections, env.clock)
        self.node = Node(env, files, options, self._identity, self.clients)
        self._figures = Figures(self.node, self.clients, self._identity, options)
        self._debug = DebugApi(env, Networks(options.allow_config_from_cidr), self.describe)
        self._tcp: Listener | None = None
        self._http: HttpServer | None = None
        self._https: HttpServer | None = None
        self._http_auth: HttpAuth | None = None

    @property
    def addresses(self) -> Addresses:
        """Addresses that it listens at."""
        return self._identity.addresses

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self, stop: asyncio.Event | None = None) -> None:
        """Restore the data directory, NSQ's as well, then listen.

        Args:
            stop: when set, a takeover of NSQ's data ends early; is set when this nsqd has drained.

        Raises:
            TakeoverStopped: it did.
            FlintError: the data directory or an address cannot be used.
        """
        await self.node.open(self.restoring, stop)
        self._announce()
        await self._listen()
        await self.node.enter(self._session_of_node)
        self.node.begin()
        self._figures.start()

    def _announce(self) -> None:
        terms, durability = self._terms, self.options.durability
        log.info("%s", self._identity.version_line)
        log.info("durability: %s - %s", durability, _DURABILITY_TEXT[durability])
        for concern in terms.tls.concerns(self._identity.start_ns) if terms.tls is not None else ():
            log.warning("%s", concern)
        if terms.auth is not None and not regex.is_available():
            what = "grants of auth servers may name topics and channels plainly, or all with .*"
            log.warning("google-re2 is not installed: %s: pip install 'flintmq[auth]'", what)

    async def _listen(self) -> None:
        options, terms, env = self.options, self._terms, self._env
        router = self.router()
        check = None
        if options.http_auth_tokens_file:
            file, trusts = options.http_auth_tokens_file, options.http_auth_client_cert
            self._http_auth = HttpAuth(file, router, PERMISSIONS, env, trusts, "nsqd")
            self._http_auth.start()
            check = self._http_auth.check
        origins = Origins(options.http_allow_origin, (env.hostname, *env.local_names, options.broadcast_address))
        budget = self.node.engine.broker.budget
        tcp = self._tcp = await listen(lambda: Session(self.node, self.clients, terms), options.tcp_address)
        http = https = None
        if options.http_address:
            refuse = self._require_tls if terms.tls_required == "true" else check
            self._http = HttpServer(router, clock=env.clock, before=refuse, origins=origins, budget=budget)
            http = await self._http.start(options.http_address)
        if options.https_address and terms.tls is not None:
            new_tls = terms.new_tls
            if options.http_auth_client_cert and not terms.tls.policy:
                new_tls = replace(terms.tls, policy=VERIFY_IF_GIVEN).engines()
            self._https = HttpServer(router, clock=env.clock, before=check, origins=origins, budget=budget)
            https = await self._https.start(options.https_address, new_tls)
        listeners = (("TCP", tcp), ("HTTP", http), ("HTTPS", https))
        self._identity.addresses = Addresses(*(None if each is None else each.address for _, each in listeners))
        # whoever reads one of these lines may use all of the addresses
        for name, listener in listeners:
            if listener is not None:
                logs.announce(log, name, listener.name)

    def _session_of_node(self, purpose: int) -> Session:
        """Serve another node of the cluster, which has proved who it is: nothing else is asked of it."""
        terms = replace(self._terms, tls_required="false", auth=None)
        is_of_letters = purpose == Purpose.DEAD_LETTERS
        publishing = self.node.publishing_letters if is_of_letters else self.node.publishing_here
        return Session(self.node, self.clients, terms, publishing)

    def router(self) -> Router:
        """Return the routes of its HTTP API."""
        running = Running(lambda: self.options, self._change_options, self._identity.filled_in)
        api = Api(self.node, self._identity, self._figures, self._terms.limits, running, self._debug)
        return api.router(self.options)

    def _require_tls(self, request: Request) -> Response:
        """The answer to every plain request when TLS is required; NSQ's clients follow it to the other port."""
        return tls_required(self.addresses.https)

    def _change_options(self, options: NsqdOptions) -> None:
        """Put options that may change at run time into force: the nsqlookupds and the log level."""
        self.options = options
        self.node.lookup.set(options.lookupd_tcp_address)
        set_log_level(options.log_level)

    async def close(self) -> None:
        """Stop in nsqd's order: listeners, clients, peers, then everything to disk. Other nodes take over first."""
        node, clients = self.node, self.clients
        is_of_cluster = await node.hand_over()
        node.exit()
        clients.close()
        if self._tcp is not None:
            self._tcp.close()
        if is_of_cluster:  # who publishes is told to go elsewhere before its connection ends
            await asyncio.sleep(_REFUSING_S)
        # what was published is stored and answered before the connections close
        await node.settle()
        clients.drain()
        self._debug.close()
        for server in (self._http, self._https):
            if server is not None:
                await server.close()
        if self._http_auth is not None:
            await self._http_auth.close()
        if self._terms.auth is not None:
            await self._terms.auth.close()
        await node.leave()
        await self._figures.close()
        await clients.abort(_DRAIN_DEADLINE_S)
        await node.close()

    async def introduced(self) -> None:
        """Wait until every nsqlookupd knows this nsqd, or could not be told at the first try."""
        await self.node.lookup.introduced()

    def describe(self) -> str:
        """The state of everything, for humans and failing tests."""
        parts = [self.node.engine.broker.describe(), *(client.describe() for client in self.clients)]
        parts += [server.describe() for server in (self._http, self._https) if server is not None]
        parts.append(self.node.lookup.describe())
        if self.node.agent is not None:
            parts.append(self.node.agent.shown.describe())
        return "\n".join(part for part in parts if part)


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
        FlintError: it cannot start, or found that it does not belong to the cluster of its store.
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
    refusal = nsqd.node.refusal
    if refusal is not None:
        log.error("CLUSTER: %s", refusal)
    log.info("stopping: draining connections and writing everything to disk")
    try:
        await nsqd.close()
    except (FlintError, OSError) as error:
        if nsqd.node.gone is None:
            raise StopFailed(error) from error
        log.error("%s", error)
    if nsqd.node.gone is not None:
        raise MessagesGone(*nsqd.node.gone)
    if refusal is not None:
        raise refusal


def run(options: NsqdOptions, ready: Callable[[Nsqd], None] | None = None) -> int:
    """Run an nsqd in this process until SIGTERM or SIGINT; return its exit code.

    Args:
        ready: called when it listens.
    """
    reopen_log = logs.configure(options.log_prefix, options.log_level, path=options.log_file)
    _raise_descriptor_limit()
    try:
        files = OsFiles(options.data_path or ".")
        env = Env(hostname=platform.node() or "localhost", local_names=local_names())
        options = replace(options, memory_budget=options.memory_budget or default_budget_bytes())
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_until_signal(env, files, options, reopen_log, ready))
    except StopFailed as error:
        log.critical("%s", error)
        return 1
    except (FlintError, OSError) as error:
        where = options.data_path or "."
        is_nameless = isinstance(error, OSError) and not error.filename
        text = f"{where}: {error.strerror or error}" if isinstance(error, OSError) and is_nameless else str(error)
        log.critical("failed to instantiate nsqd - %s%s", text, _advice(error, where))
        return 1
    return 0


def _advice(error: BaseException, data_path: str) -> str:
    """Return what to do where a start has needed more open files than it may have; else nothing."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.errno == errno.EMFILE):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return ""
    limit, count = descriptor_limit(), 0
    with contextlib.suppress(OSError):
        topics = os.path.join(data_path, TOPICS_DIRECTORY)
        count = sum(len(os.listdir(os.path.join(topics, each))) for each in os.listdir(topics))
    return (
        f": {limit} files are the limit of this process, and each of the {count} topics and partitions that are stored "
        f"takes one: raise it to {count + _OTHER_FILES} or more (LimitNOFILE of systemd, ulimit -n)"
    )


async def _until_signal(
    env: Env,
    files: OsFiles,
    options: NsqdOptions,
    reopen_log: Callable[[], None],
    ready: Callable[[Nsqd], None] | None,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    draining = DrainSignal(stop.set, options.drain_on_sigterm)
    loop.add_signal_handler(signal.SIGTERM, draining.terminate)
    loop.add_signal_handler(signal.SIGINT, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, draining.begin)
    loop.add_signal_handler(signal.SIGHUP, reopen_log)
    if early_stop.was_asked():
        stop.set()
    collector = Collector()
    collector.start()

    def listens(nsqd: Nsqd) -> None:
        draining.attach(nsqd.node.drain)
        files.keep_reserve()
        supervisor.tell(supervisor.READY)
        if ready is not None:
            ready(nsqd)

    try:
        async with supervisor.told_of_end(stop):
            await main(env, files, options, listens, stop, collector.paused)
    finally:
        collector.stop()
        await end_undisturbed()


__all__ = ["Addresses", "Nsqd", "main", "run"]
