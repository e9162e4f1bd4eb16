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
from flintmq.net.debug import DebugApi
from flintmq.net.http_server import HttpServer
from flintmq.net.listen import PATH_PORT, Listener, listen
from flintmq.net.log import announce, configure
from flintmq.net.loop import loop_factory
from flintmq.net.networks import LOOPBACK, Networks
from flintmq.nsqlookupd import metrics
from flintmq.nsqlookupd.http_api import build_router
from flintmq.nsqlookupd.options import NsqlookupdOptions
from flintmq.nsqlookupd.session import Sessions
from flintmq.wire.identify import NSQ_VERSION
from flintmq.wire.lookup import LookupdInfo

_log = logging.getLogger(__name__)


class Nsqlookupd:
    """A running nsqlookupd.

    Attributes:
        tcp_address: the real host and port nsqd connects to; of a unix socket its path and -1.
        http_address: the same of the HTTP API.
    """

    def __init__(self, env: Env, options: NsqlookupdOptions) -> None:
        self.tcp_address = ("", 0)
        self.http_address = ("", 0)
        self.database = RegistrationDatabase(options.inactive_producer_timeout_ns, options.tombstone_lifetime_ns)
        self._env = env
        self._options = options
        router = build_router(self.database, env.clock)
        metrics.add_route(router, env.clock, self.database, __version__)
        self._debug = DebugApi(env, Networks(LOOPBACK), self.describe)
        self._debug.add_routes(router)
        self._http = HttpServer(router, clock=env.clock)
        idle_deadline_s = options.inactive_producer_timeout_ns / 1e9
        self._sessions = Sessions(self.database, env.clock, self._info, idle_deadline_s)
        self._listener: Listener | None = None

    async def start(self) -> None:
        """Listen on both addresses.

        Raises:
            ListenFailed: an address cannot be used; nothing is left listening.
        """
        loop = asyncio.get_running_loop()
        # HTTP first: the answer to IDENTIFY names its port.
        http = await self._http.start(self._options.http_address)
        self.http_address = http.address or (http.name, PATH_PORT)
        try:
            tcp = self._listener = await listen(lambda: self._sessions.new(loop), self._options.tcp_address)
        except BaseException:
            await self._http.close()
            raise
        self.tcp_address = tcp.address or (tcp.name, PATH_PORT)
        announce(_log, "TCP", tcp.name)
        announce(_log, "HTTP", http.name)

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

    def _info(self) -> LookupdInfo:
        """What an nsqd is told about us."""
        return LookupdInfo(
            broadcast_address=self._options.broadcast_address or self._env.hostname,
            hostname=self._env.hostname,
            http_port=self.http_address[1],
            tcp_port=self.tcp_address[1],
            version=NSQ_VERSION,
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
    reopen_log = configure(options.log_prefix, options.log_level, path=options.log_file)
    env = Env(hostname=socket.gethostname())  # noqa: TID251 - the process fills its Env
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_until_signal(env, options, reopen_log))
    except FlintError as error:
        _log.critical("failed to instantiate nsqlookupd - %s", error)
        return 1
    return 0


async def _until_signal(env: Env, options: NsqlookupdOptions, reopen_log: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, reopen_log)
    _log.info("nsqlookupd v%s", __version__)
    await main(env, options, stop=stop)
