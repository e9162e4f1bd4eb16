"""nsqlookupd's composition root: builds everything, nothing else does.

:func:`main` is the daemon on whatever event loop runs, without globals, so that several live in one simulation;
:func:`run` is the process around it: logging, signals, exit code. Source: NSQ's nsqlookupd, NSQ's options.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from flintmq.cluster.registration import RegistrationDatabase
from flintmq.cluster.state import LookupdRecord
from flintmq.env import Env
from flintmq.errors import DataPathLocked, FlintError, PermissionMissing, StorageError
from flintmq.net import early_stop, supervisor
from flintmq.net.debug import DebugApi
from flintmq.net.http_auth import HttpAuth, TokenFile
from flintmq.net.http_router import Router
from flintmq.net.http_server import HttpServer
from flintmq.net.listen import PATH_PORT, Listener, listen
from flintmq.net.log import announce, configure
from flintmq.net.loop import end_undisturbed, loop_factory
from flintmq.net.networks import LOOPBACK, Networks
from flintmq.net.origin import Origins, local_names
from flintmq.net.tls import VERIFY_IF_GIVEN, ServerTls
from flintmq.nsqlookupd import metrics
from flintmq.nsqlookupd.http_api import LookupdAddress, build_router
from flintmq.nsqlookupd.http_permissions import CLUSTER_TABLE as CLUSTER_PERMISSIONS
from flintmq.nsqlookupd.http_permissions import STORE_TABLE as STORE_PERMISSIONS
from flintmq.nsqlookupd.http_permissions import TABLE as HTTP_PERMISSIONS
from flintmq.nsqlookupd.options import NsqlookupdOptions
from flintmq.nsqlookupd.session import Sessions
from flintmq.nsqlookupd.topics import TopicAdmin
from flintmq.version import __version__
from flintmq.wire.identify import NSQ_VERSION
from flintmq.wire.lookup import LookupdInfo

if TYPE_CHECKING:
    from flintmq.nsqlookupd.cluster import Cluster
    from flintmq.nsqlookupd.store import EmbeddedStore
    from flintmq.storage import Files, OsFiles

_log = logging.getLogger(__name__)


class StorePathError(StorageError):
    """The directory of the coordination store cannot be used.

    Args:
        path: as it was given.
        reason: why not, and what to do.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"--store-path={self.path}: {self.reason}"


class Nsqlookupd:
    """A running nsqlookupd.

    Args:
        files: the directory of its coordination store; None: it has none.

    Attributes:
        tcp_address: the real host and port nsqd connects to; of a unix socket its path and -1.
        http_address: the same of the HTTP API.
        https_address: the same over HTTPS; None without.
    """

    def __init__(self, env: Env, options: NsqlookupdOptions, files: Files | None = None) -> None:
        self.tcp_address = ("", 0)
        self.http_address = ("", 0)
        self.https_address: tuple[str, int] | None = None
        self.database = RegistrationDatabase(options.inactive_producer_timeout_ns, options.tombstone_lifetime_ns)
        self._env = env
        self._options = options
        path = options.nsqd_http_token_file
        token = TokenFile(path, env, "--nsqd-http-token-file") if path else None
        admin = TopicAdmin(self.database, env.clock, token)
        self._store = None if files is None else _store(env, files, options.accept_older_store)
        self._cluster = _cluster(env, options, self.database, self._store) if options.cluster_store else None
        api = None
        if self._cluster is not None:
            api = self._cluster.api(self.database, env, admin, self._own_address, options)
        router = build_router(
            self.database,
            env.clock,
            admin,
            self._own_address,
            options.allow_write_with_nochannels,
            options.http_style,
            api,
        )
        if api is not None:
            api.add_routes(router)
        self._admin = admin
        coordinator = None if self._cluster is None else self._cluster.coordinator
        metrics.add_route(router, env.clock, self.database, __version__, coordinator)
        self._debug = DebugApi(env, Networks(LOOPBACK), self.describe)
        self._debug.add_routes(router)
        if self._store is not None:
            _add_store_routes(router, self._store, env)
        self._auth = _auth(options, router, env)
        check = None if self._auth is None else self._auth.check
        self._tls = _tls(options)
        origins = Origins(options.http_allow_origin, (env.hostname, *env.local_names, options.broadcast_address))
        self._http = HttpServer(router, clock=env.clock, before=check, origins=origins)
        self._https = None if self._tls is None else HttpServer(router, clock=env.clock, before=check, origins=origins)
        idle_deadline_s = options.inactive_producer_timeout_ns / 1e9
        self._sessions = Sessions(self.database, env.clock, self._info, idle_deadline_s)
        self._sessions.on_change = admin.registered
        self._sessions.on_left = admin.left
        if self._cluster is not None:
            self._cluster.watch(self._sessions, admin)
        self._listener: Listener | None = None

    async def start(self) -> None:
        """Listen on all addresses.

        Raises:
            ListenFailed: an address cannot be used; nothing is left listening.
            TlsSetupError: the files for HTTPS cannot be used.
            StorageError: the coordination store cannot be used.
        """
        if self._store is not None:
            await self._env.run_blocking(self._store.open)
        try:
            await self._listen()
        except BaseException:
            if self._store is not None:
                await self._store.close()
            raise
        if self._store is not None:
            self._store.start()
        if self._cluster is not None:
            self._cluster.start(self._record())

    async def _listen(self) -> None:
        new_tls = None if self._tls is None else self._tls.engines()
        loop = asyncio.get_running_loop()
        # HTTP first: the answer to IDENTIFY names its port.
        http = await self._http.start(self._options.http_address)
        self.http_address = http.address or (http.name, PATH_PORT)
        https = None
        try:
            if self._https is not None:
                https = await self._https.start(self._options.https_address, new_tls)
                self.https_address = https.address or (https.name, PATH_PORT)
            tcp = self._listener = await listen(lambda: self._sessions.new(loop), self._options.tcp_address)
        except BaseException:
            for server in self._servers():
                await server.close()
            raise
        self.tcp_address = tcp.address or (tcp.name, PATH_PORT)
        announce(_log, "TCP", tcp.name)
        announce(_log, "HTTP", http.name)
        if https is not None:
            announce(_log, "HTTPS", https.name)
        for concern in self._tls.concerns(self._env.clock.wall_ns()) if self._tls is not None else ():
            _log.warning("%s", concern)
        if self._auth is not None:
            self._auth.start()

    async def close(self) -> None:
        """Stop listening, close the nsqd connections, let HTTP requests in progress end."""
        if self._listener is not None:
            self._listener.close()
        await self._admin.close()
        if self._cluster is not None:
            await self._cluster.close()
        self._sessions.close_all()
        self._debug.close()
        for server in self._servers():
            await server.close()
        if self._store is not None:
            await self._store.close()
        if self._auth is not None:
            await self._auth.close()
        _log.info("nsqlookupd: stopped")

    def _servers(self) -> list[HttpServer]:
        return [server for server in (self._http, self._https) if server is not None]

    @property
    def cluster_node_count(self) -> int:
        """The number of nsqds of the cluster that live; 0 without a cluster."""
        return 0 if self._cluster is None else len(self._cluster.coordinator.view.nodes)

    def describe(self) -> str:
        """Return the state of all parts, for failing tests."""
        servers = [server.describe() for server in self._servers()]
        if self._store is not None:
            servers.append(self._store.describe())
        if self._cluster is not None:
            servers.append(self._cluster.coordinator.describe())
        return "\n".join((self.database.describe(), self._sessions.describe(), *servers))

    def _own_address(self) -> LookupdAddress:
        """Return the address for clients: a name that was given, or the only one they can have reached us under."""
        options = self._options
        host, http_port = self.http_address
        is_reachable = http_port != PATH_PORT and host not in ("", "0.0.0.0", "::")
        name = options.broadcast_address or (host if is_reachable else self._env.hostname)
        https_port = 0 if self.https_address is None else max(0, self.https_address[1])  # a unix socket has none
        return LookupdAddress(name, self.tcp_address[1], http_port, https_port)

    def _record(self) -> LookupdRecord:
        address = self._own_address()
        lookupd, incarnation = (f"{self._env.random.getrandbits(64):016x}" for _ in range(2))
        ports = (address.tcp_port, address.http_port, address.https_port)
        return LookupdRecord(lookupd, incarnation, address.host, *ports)

    def _info(self) -> LookupdInfo:
        """Return the answer to an nsqd's IDENTIFY."""
        return LookupdInfo(
            broadcast_address=self._options.broadcast_address or self._env.hostname,
            hostname=self._env.hostname,
            http_port=self.http_address[1],
            tcp_port=self.tcp_address[1],
            version=NSQ_VERSION,
        )


def _store(env: Env, files: Files, accepts_older: bool) -> EmbeddedStore:
    from flintmq.nsqlookupd.store import EmbeddedStore  # for those who have a store

    return EmbeddedStore(env, files, accepts_older=accepts_older)


def _add_store_routes(router: Router, store: EmbeddedStore, env: Env) -> None:
    from flintmq.nsqlookupd import store_api

    store_api.add_routes(router, store, env)


def _cluster(
    env: Env,
    options: NsqlookupdOptions,
    database: RegistrationDatabase,
    own: EmbeddedStore | None,
) -> Cluster:
    from flintmq.nsqlookupd.cluster import Cluster  # for those who are in one

    return Cluster(env, options, database, own)


def _tls(options: NsqlookupdOptions) -> ServerTls | None:
    if not options.https_address:
        return None
    policy = options.tls_client_auth_policy
    if options.http_auth_client_cert and not policy:
        policy = VERIFY_IF_GIVEN
    return ServerTls(options.tls_cert, options.tls_key, policy, options.tls_root_ca_file, options.tls_min_version)


def _auth(options: NsqlookupdOptions, router: Router, env: Env) -> HttpAuth | None:
    if not options.http_auth_tokens_file:
        if options.store_path:
            _log.warning(
                "whoever reaches the HTTP port may change the coordination store, and so be a node or name a leader: "
                "give this nsqlookupd --http-auth-tokens-file, and those who use the store --cluster-store-token-file"
            )
        return None
    file, trusts = options.http_auth_tokens_file, options.http_auth_client_cert
    permissions = {**HTTP_PERMISSIONS, **CLUSTER_PERMISSIONS, **STORE_PERMISSIONS}
    return HttpAuth(file, router, permissions, env, trusts, "nsqlookupd")


async def main(
    env: Env,
    options: NsqlookupdOptions,
    ready: Callable[[Nsqlookupd], None] | None = None,
    stop: asyncio.Event | None = None,
    files: Files | None = None,
) -> None:
    """Run one nsqlookupd until ``stop`` is set or the task is cancelled.

    Args:
        ready: called once, when both addresses are being listened on.
        files: the directory of its coordination store; None: it has none.

    Raises:
        ListenFailed: an address cannot be used.
        StorageError: the coordination store cannot be used.
    """
    nsqlookupd = Nsqlookupd(env, options, files)
    await nsqlookupd.start()
    try:
        if ready is not None:
            ready(nsqlookupd)
        await (stop or asyncio.Event()).wait()
    finally:
        await nsqlookupd.close()


def run(options: NsqlookupdOptions) -> int:
    """Be the process nsqlookupd until SIGTERM or SIGINT.

    Returns:
        The exit code: 0 after a clean stop, 1 when it could not start, which the log explains.
    """
    reopen_log = configure(options.log_prefix, options.log_level, path=options.log_file)
    env = Env(hostname=socket.gethostname(), local_names=local_names())  # noqa: TID251 - the process fills its Env
    files: OsFiles | None = None
    try:
        files = _files(options.store_path) if options.store_path else None
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_until_signal(env, options, reopen_log, files))
    except FlintError as error:
        _log.critical("failed to instantiate nsqlookupd - %s", error)
        return 1
    finally:
        if files is not None:
            files.close()
    return 0


def _files(path: str) -> OsFiles:
    """Open the directory of the store.

    Raises:
        StorePathError: it cannot be used.
    """
    from flintmq.storage import OsFiles  # for those who have a store

    try:
        return OsFiles(path)
    except DataPathLocked as error:
        raise StorePathError(
            path,
            f"another process has it open ({error.reason}); every nsqlookupd and nsqd needs a directory of its own",
        ) from error
    except PermissionMissing as error:
        raise StorePathError(path, str(error)) from error
    except StorageError as error:
        cause = error.__cause__
        if isinstance(cause, FileNotFoundError):
            raise StorePathError(path, "there is no such directory; create it first") from error
        raise StorePathError(
            path, cause.strerror or str(cause) if isinstance(cause, OSError) else str(error)
        ) from error


async def _until_signal(
    env: Env, options: NsqlookupdOptions, reopen_log: Callable[[], None], files: OsFiles | None
) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, reopen_log)
    if early_stop.was_asked():
        stop.set()
    _log.info("nsqlookupd v%s", __version__)

    def listens(_nsqlookupd: Nsqlookupd) -> None:
        if files is not None:
            files.keep_reserve()
        supervisor.tell(supervisor.READY)

    try:
        async with supervisor.told_of_end(stop):
            await main(env, options, listens, stop, files)
    finally:
        await end_undisturbed()
