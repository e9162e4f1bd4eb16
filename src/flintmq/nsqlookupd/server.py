"""nsqlookupd's composition root: builds everything, nothing else does.

:func:`main` is the daemon on whatever event loop runs, without globals, so that several live in one simulation;
:func:`run` is the process around it: logging, signals, exit code. Source: reference/nsq.md 2.2, 2.3, 4.3.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable

from flintmq import __version__
from flintmq.cluster.registration import RegistrationDatabase
from flintmq.env import Env
from flintmq.errors import FlintError
from flintmq.net.address import ListenFailed, bind_host, format_address, listening_address, tcp_address
from flintmq.net.debug import DebugApi
from flintmq.net.http_server import HttpServer
from flintmq.net.log import configure
from flintmq.net.loop import loop_factory
from flintmq.net.networks import LOOPBACK, Networks
from flintmq.nsqlookupd import metrics
from flintmq.nsqlookupd.http_api import build_router
from flintmq.nsqlookupd.options import NsqlookupdOptions
from flintmq.nsqlookupd.session import Sessions
from flintmq.wire.lookup import LookupdInfo

_log = logging.getLogger(__name__)


class Nsqlookupd:
    """A running nsqlookupd.

    Attributes:
        tcp_address: the real host and port nsqd connects to.
        http_address: the real host and port of the HTTP API.
    """

    def __init__(self, env: Env, options: NsqlookupdOptions) -> None:
        self.tcp_address = ("", 0)
        self.http_address = ("", 0)
        self.database = RegistrationDatabase(options.inactive_producer_timeout_ns, options.tombstone_lifetime_ns)
        self._env = env
        self._options = options
        router = build_router(self.database, env.clock, __version__)
        metrics.add_route(router, env.clock, self.database, __version__)
        self._debug = DebugApi(env, Networks(LOOPBACK), self.describe)
        self._debug.add_routes(router)
        self._http = HttpServer(router, clock=env.clock)
        idle_deadline_s = options.inactive_producer_timeout_ns / 1e9
        self._sessions = Sessions(self.database, env.clock, self._info, idle_deadline_s)
        self._listener: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """Listen on both addresses.

        Raises:
            OptionError: an address is not host:port.
            ListenFailed: an address cannot be used; nothing is left listening.
        """
        # HTTP first: the answer to IDENTIFY names its port.
        self.http_address = await self._start_http()
        try:
            self.tcp_address = await self._start_tcp()
        except BaseException:
            await self._http.close()
            raise
        _log.info("TCP: listening on %s", format_address(*self.tcp_address))
        _log.info("HTTP: listening on %s", format_address(*self.http_address))

    async def close(self) -> None:
        """Stop listening, close the nsqd connections, let HTTP requests in progress end."""
        if self._listener is not None:
            self._listener.close()
        self._sessions.close_all()
        self._debug.close()
        await self._http.close()
        _log.info("nsqlookupd: stopped")

    def describe(self) -> str:
        """The state of all parts, for failing tests."""
        return "\n".join((self.database.describe(), self._sessions.describe(), self._http.describe()))

    async def _start_http(self) -> tuple[str, int]:
        text = self._options.http_address
        host, port = tcp_address("http-address", text)
        try:
            return await self._http.start(host, port)
        except OSError as error:
            raise ListenFailed(text, error.strerror or str(error)) from error

    async def _start_tcp(self) -> tuple[str, int]:
        text = self._options.tcp_address
        host, port = tcp_address("tcp-address", text)
        loop = asyncio.get_running_loop()
        try:
            host = await bind_host(host, port)
            self._listener = await loop.create_server(lambda: self._sessions.new(loop), host, port)
        except OSError as error:
            raise ListenFailed(text, error.strerror or str(error)) from error
        return listening_address(self._listener, host, port)

    def _info(self) -> LookupdInfo:
        """What an nsqd is told about us."""
        return LookupdInfo(
            broadcast_address=self._options.broadcast_address or self._env.hostname,
            hostname=self._env.hostname,
            http_port=self.http_address[1],
            tcp_port=self.tcp_address[1],
            version=__version__,
        )


async def main(
    env: Env,
    options: NsqlookupdOptions,
    ready: Callable[[Nsqlookupd], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Run one nsqlookupd until ``stop`` is set or the task is cancelled.

    Args:
        ready: called once, when both addresses are being listened on.

    Raises:
        OptionError: an address is not host:port.
        ListenFailed: an address cannot be used.
    """
    nsqlookupd = Nsqlookupd(env, options)
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
    configure(options.log_prefix, options.log_level)
    env = Env(hostname=socket.gethostname())  # noqa: TID251 - the process fills its Env
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_until_signal(env, options))
    except FlintError as error:
        _log.critical("failed to instantiate nsqlookupd - %s", error)
        return 1
    return 0


async def _until_signal(env: Env, options: NsqlookupdOptions) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # There is no log file to open again, and upstream dies of it.
    loop.add_signal_handler(signal.SIGHUP, _log.info, "SIGHUP: nothing to reopen, the log is on stderr")
    _log.info("nsqlookupd v%s", __version__)
    await main(env, options, stop=stop)
