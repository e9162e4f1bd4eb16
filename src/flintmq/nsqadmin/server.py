"""The process nsqadmin: builds everything, listens, and ends as it is told.

:class:`Nsqadmin` runs on whatever event loop there is, also beside other daemons; :func:`run` is the process around it:
logging, signals, exit code. Source: NSQ's options.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import ssl
from collections.abc import Callable, Iterator

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from flintmq.addresses import format_address
from flintmq.clock import Clock
from flintmq.env import Env
from flintmq.errors import FlintError
from flintmq.net import early_stop, supervisor
from flintmq.net.address import ListenFailed
from flintmq.net.listen import BACKLOG, listen_on_all
from flintmq.net.log import announce, configure
from flintmq.net.loop import end_undisturbed, loop_factory
from flintmq.net.origin import local_names
from flintmq.net.problems import Problems
from flintmq.net.tls import ServerTls, server_context
from flintmq.nsqadmin.admin import Admin
from flintmq.nsqadmin.app import create_app
from flintmq.nsqadmin.options import NsqadminOptions
from flintmq.version import __version__

CONNECTION_COUNT_MAX = 1000
REQUEST_HEAD_BYTES_MAX = 64 * 1024
REQUEST_S_MAX = 15.0
HANDSHAKE_S_MAX = 10.0
STOP_S_MAX = 5

_log = logging.getLogger(__name__)


class _Connection(H11Protocol):
    """A connection that does not wait for ever for a request to be complete, and is refused where there are too many.

    uvicorn ends idle connections after an answer, but not those that never ask, or ask a byte at a time.

    Args:
        server: whose connection it is.
    """

    def __init__(self, server: _Server) -> None:
        super().__init__(server.config, server.server_state, server.lifespan.state)
        self._problems = server.problems
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > CONNECTION_COUNT_MAX:
            problem = f"{CONNECTION_COUNT_MAX} connections are open; another one is refused"
            self._problems.tell(problem, logging.WARNING)
            transport.abort()
            return
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._unwatch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        self._unwatch()
        self._deadline = self.loop.call_later(REQUEST_S_MAX, self._end)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()


class _Server(uvicorn.Server):
    """uvicorn without its own signals: whoever runs it has some.

    Attributes:
        problems: tells what goes wrong again and again.
        secured: the sockets that speak TLS, each with its context.
    """

    def __init__(self, config: uvicorn.Config, clock: Clock) -> None:
        super().__init__(config)
        self.problems = Problems(clock)
        self.secured: dict[socket.socket, ssl.SSLContext] = {}

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; uvicorn's own way has one kind of sockets, and lets a handshake last for a minute."""
        loop = asyncio.get_running_loop()
        await self.lifespan.startup()
        self.servers = []
        for each in sockets or []:
            context = self.secured.get(each)
            limit_s = None if context is None else HANDSHAKE_S_MAX
            self.servers.append(
                await loop.create_server(
                    self._connection, sock=each, ssl=context, ssl_handshake_timeout=limit_s, backlog=BACKLOG
                )
            )
        self.started = True

    def _connection(self) -> _Connection:
        return _Connection(self)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Nsqadmin:
    """A running nsqadmin.

    Attributes:
        http_address: the real host and port; empty and 0 where it listens for HTTPS alone.
        https_address: the same over HTTPS; None without.

    Raises:
        FlintError: an option, or a file that it names, cannot be used.
    """

    def __init__(self, env: Env, options: NsqadminOptions) -> None:
        options.check_start()
        self.http_address = ("", 0)
        self.https_address: tuple[str, int] | None = None
        self._options = options
        self._tls = _tls(options)
        self._env = env
        self._admin = Admin(options, env, secrets.token_bytes)
        config = uvicorn.Config(
            create_app(self._admin),
            http=_Connection,
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=True,
            h11_max_incomplete_event_size=REQUEST_HEAD_BYTES_MAX,
            timeout_keep_alive=int(REQUEST_S_MAX),
            timeout_graceful_shutdown=STOP_S_MAX,
        )
        self._server = _Server(config, env.clock)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            ListenFailed: an address cannot be listened on.
            TlsSetupError: the files for HTTPS cannot be used.
        """
        context = None if self._tls is None else _renewed_context(self._tls)
        sockets: list[socket.socket] = []
        try:
            if self._options.http_address:
                sockets, self.http_address = await listen_on_all(self._options.http_address, _listening)
            if context is not None:
                secured, self.https_address = await listen_on_all(self._options.https_address, _listening)
                sockets += secured
                self._server.secured.update(dict.fromkeys(secured, context))
        except ListenFailed:
            for each in sockets:
                each.close()
            raise
        self._admin.start()
        self._task = asyncio.ensure_future(self._server.serve(sockets))
        while not self._server.started and not self._task.done():  # noqa: ASYNC110 - uvicorn tells nobody
            await asyncio.sleep(0.005)
        if self._task.done():
            self._task.result()
        if self._options.http_address:
            announce(_log, "HTTP", format_address(*self.http_address))
        if self.https_address is not None:
            announce(_log, "HTTPS", format_address(*self.https_address))
        for concern in () if self._tls is None else self._tls.concerns(self._env.clock.wall_ns()):
            _log.warning(concern)

    async def close(self) -> None:
        """Answer what was asked, and end."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        await self._admin.close()


def _renewed_context(tls: ServerTls) -> ssl.SSLContext:
    """Return a context for asyncio, of which each handshake takes the files as they are then.

    Raises:
        TlsSetupError: they cannot be used.
    """
    renewed = tls.renewed(lambda: server_context(tls))
    context = renewed.now()

    def renew(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = renewed.now()

    context.sni_callback = renew
    return context


def _tls(options: NsqadminOptions) -> ServerTls | None:
    if not options.https_address:
        return None
    policy, authorities = options.tls_client_auth_policy, options.tls_root_ca_file
    return ServerTls(options.tls_cert, options.tls_key, policy, authorities, options.tls_min_version)


async def _listening(host: str, port: int) -> tuple[socket.socket, tuple[str, int]]:
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listening.family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening, listening.getsockname()[:2]


async def main(
    env: Env, options: NsqadminOptions, stop: asyncio.Event, ready: Callable[[Nsqadmin], None] | None = None
) -> None:
    """Run nsqadmin until ``stop`` is set.

    Raises:
        FlintError: it cannot start.
    """
    nsqadmin = Nsqadmin(env, options)
    await nsqadmin.start()
    try:
        if ready is not None:
            ready(nsqadmin)
        await stop.wait()
    finally:
        await nsqadmin.close()


def run(options: NsqadminOptions) -> int:
    """Be the process nsqadmin until SIGTERM or SIGINT.

    Returns:
        The exit code: 0 after a clean stop, 1 when it could not start, which the log explains.
    """
    options.check_start()
    reopen_log = configure(options.log_prefix, options.log_level, path=options.log_file)
    env = Env(hostname=socket.gethostname(), local_names=local_names())  # noqa: TID251 - the process fills its Env
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_until_signal(env, options, reopen_log))
    except FlintError as error:
        _log.critical("failed to instantiate nsqadmin - %s", error)
        return 1
    return 0


async def _until_signal(env: Env, options: NsqadminOptions, reopen_log: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, reopen_log)
    if early_stop.was_asked():
        stop.set()
    _log.info("nsqadmin v%s", __version__)
    try:
        async with supervisor.told_of_end(stop):
            await main(env, options, stop, lambda _: supervisor.tell(supervisor.READY))
    finally:
        await end_undisturbed()


__all__ = ["Nsqadmin", "main", "run"]
