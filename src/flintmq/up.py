"""``flintmq up``: nsqlookupd, nsqd and nsqadmin in one process, on one event loop, for use by hand.

The rules of this file: the daemons run the very code that runs them alone; what differs are defaults. They listen on
127.0.0.1 only, keep their data in ``./flintmq-data``, and log from ``warn`` upwards, so that what is printed can be
read. Every flag of nsqd is a flag of ``flintmq up``; nsqlookupd is started first and stopped last.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

from flintmq.addresses import format_address
from flintmq.env import Env
from flintmq.errors import DataPathLocked, FlintError, PermissionMissing, StorageError, UsageError
from flintmq.net import log as logs
from flintmq.net.address import ListenFailed, split_address
from flintmq.net.loop import loop_factory
from flintmq.net.origin import local_names
from flintmq.nsqd import server as nsqd_server
from flintmq.nsqd.options import NsqdOptions
from flintmq.nsqlookupd.options import OWN_STORE, NsqlookupdOptions
from flintmq.nsqlookupd.server import Nsqlookupd
from flintmq.options import (
    Address,
    Choice,
    Integer,
    Options,
    Switch,
    Text,
    option,
    read_command,
    version_line,
)
from flintmq.stdout import say
from flintmq.storage import Files, OsFiles
from flintmq.version import __version__

DATA_PATH = "flintmq-data"
LOOKUPD_TCP_PORT = 4160
LOOKUPD_HTTP_PORT = 4161
NSQADMIN_PORT = 4171
_USUAL = ("127.0.0.1:4150", "127.0.0.1:4151")
_UP = "flintmq up"
_PORTS_APART = 100
_POLL_S = 0.05
_PORT = Integer(0, 65535, "port")


@dataclass(frozen=True, kw_only=True)
class _OwnOptions(Options):
    """The flags that only ``flintmq up`` has; a base of its own, so that ``--help`` shows them first."""

    tcp_port: int | None = option(
        _PORT, None, "the port of --tcp-address", group=_UP, origin="flintmq", default_text="4150"
    )
    http_port: int | None = option(
        _PORT, None, "the port of --http-address", group=_UP, origin="flintmq", default_text="4151"
    )
    lookupd_tcp_port: int = option(
        _PORT, LOOKUPD_TCP_PORT, "the port of nsqlookupd that nsqd connects to", group=_UP, origin="flintmq"
    )
    lookupd_http_port: int = option(
        _PORT, LOOKUPD_HTTP_PORT, "the port of nsqlookupd that clients ask", group=_UP, origin="flintmq"
    )
    nsqadmin: bool = option(
        Switch(), True, "run nsqadmin as well: web pages of what is here", group=_UP, origin="flintmq"
    )
    nsqadmin_port: int = option(_PORT, NSQADMIN_PORT, "the port of nsqadmin", group=_UP, origin="flintmq")
    nsqd: int = option(
        Integer(1, 32, "nsqd"),
        1,
        "how many nsqd to run: several are processes of their own, and a cluster with its store in the data directory",
        group=_UP,
        origin="flintmq",
    )
    allow_same_host: bool = option(
        Switch(),
        False,
        "with several nsqd: keep copies of a partition on them, although they are on one machine",
        group=_UP,
        origin="flintmq",
    )
    free_ports: bool = option(
        Switch(), False, "take any free port for each address; the ports are printed", group=_UP, origin="flintmq"
    )


@dataclass(frozen=True, kw_only=True)
class UpOptions(NsqdOptions, _OwnOptions):
    """The flags of ``flintmq up``: its own and all of nsqd's."""

    program: ClassVar[str] = "up"
    summary: ClassVar[str] = (
        "flintmq up runs nsqlookupd, nsqd and nsqadmin in one process, for use by hand. It takes its own flags, which "
        "come first here, and every flag of nsqd."
    )

    log_level: str = option(
        Choice(("debug", "info", "warn", "error", "fatal")), "warn", "how much to log on stderr", group="Logging"
    )
    log_prefix: str = option(Text(), "[flintmq] ", "what every log line starts with", group="Logging")
    tcp_address: str = option(Address(), "127.0.0.1:4150", "where nsqd listens for TCP clients", group="Addresses")
    http_address: str = option(Address(), "127.0.0.1:4151", "where nsqd listens for HTTP clients", group="Addresses")
    data_path: str = option(
        Text("DIRECTORY"), DATA_PATH, "directory of the message log; created when missing", group="Storage"
    )


@dataclass(frozen=True, slots=True)
class Listening:
    """The addresses that the daemons listen on, with real ports.

    Attributes:
        others: TCP and HTTP of further nsqd.
        nsqadmin: empty: it does not run.
    """

    nsqd_tcp: str
    nsqd_http: str
    lookupd_tcp: str
    lookupd_http: str
    others: tuple[tuple[str, str], ...] = ()
    nsqadmin: str = ""


class UpFailed(FlintError):
    """The servers cannot start.

    Args:
        what: what is in the way, and where.
        remedy: what the user can do about it.
    """

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what, remedy)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


def run(arguments: Sequence[str]) -> int:
    """Run the command ``flintmq up`` until SIGINT, SIGTERM or SIGHUP; return its exit code.

    Raises:
        FlintError: a flag is wrong, or the servers cannot start.
    """
    options = read_command(UpOptions, arguments, _UP, version_line(_UP, __version__))
    if options is not None:
        _serve(options)
    return 0


async def main(
    env: Env,
    files: Files,
    options: UpOptions,
    ready: Callable[[Listening], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Run nsqlookupd, nsqd and nsqadmin until ``stop`` is set, then drain and stop all.

    Args:
        ready: called when both listen and nsqlookupd knows nsqd, or could not be told.

    Raises:
        UpFailed: an address cannot be used.
        FlintError: nsqd cannot start.
    """
    lookupd_options = options_of_nsqlookupd(options)
    nsqd_options = options_of_nsqd(options)
    lookupd = Nsqlookupd(env, lookupd_options)
    try:
        await lookupd.start()
        try:
            registered = (format_address(*lookupd.tcp_address), *nsqd_options.lookupd_tcp_address)

            saying: list[asyncio.Task[None]] = []
            async with _nsqadmin(env, options, _reachable(*lookupd.http_address)) as nsqadmin:

                def nsqd_listens(nsqd: nsqd_server.Nsqd) -> None:
                    if ready is not None:
                        saying.append(asyncio.ensure_future(_say_when_introduced(lookupd, nsqd, nsqadmin, ready)))

                try:
                    await nsqd_server.main(
                        env, files, nsqd_options.replace(lookupd_tcp_address=registered), nsqd_listens, stop
                    )
                finally:
                    for task in saying:
                        task.cancel()
        finally:
            await lookupd.close()
    except ListenFailed as error:
        raise _listen_failed(error, nsqd_options, lookupd_options, options) from error
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise UpFailed(what, f"mend that, or: {_UP} --data-path=DIRECTORY takes another data directory") from error


def options_of_nsqd(options: UpOptions) -> NsqdOptions:
    """Return the options of the nsqd in it; the address of its nsqlookupd is not among them yet."""
    values = {field.name: getattr(options, field.name) for field in fields(NsqdOptions)}
    tcp_port = 0 if options.free_ports else options.tcp_port
    http_port = 0 if options.free_ports else options.http_port
    values["tcp_address"] = _with_port(options.tcp_address, tcp_port)
    values["http_address"] = _with_port(options.http_address, http_port)
    host = _host(options.tcp_address)
    if not options.broadcast_address and _is_loopback(host):
        values["broadcast_address"] = host  # clients outside cannot connect, and this machine's name may not resolve
    return NsqdOptions(**values)


def options_of_nsqlookupd(options: UpOptions) -> NsqlookupdOptions:
    """Return the options of the nsqlookupd in it, which listens on the hosts that nsqd listens on."""
    host = _host(options.tcp_address)
    tcp_port = 0 if options.free_ports else options.lookupd_tcp_port
    http_port = 0 if options.free_ports else options.lookupd_http_port
    return NsqlookupdOptions(
        log_level=options.log_level,
        log_prefix=options.log_prefix,
        tcp_address=format_address(host, tcp_port),
        http_address=format_address(_host(options.http_address), http_port),
        broadcast_address=host if _is_loopback(host) else "",
        http_allow_origin=options.http_allow_origin,
    )


@contextlib.asynccontextmanager
async def _nsqadmin(env: Env, options: UpOptions, lookupd_http: str) -> AsyncIterator[str]:
    """Run nsqadmin in the block; yields its address, empty where it is not wanted."""
    if not options.nsqadmin:
        yield ""
        return
    from flintmq.nsqadmin.options import NsqadminOptions  # for those who have one
    from flintmq.nsqadmin.server import Nsqadmin

    nsqadmin = Nsqadmin(
        env,
        NsqadminOptions(
            http_address=_admin_address(options),
            lookupd_http_address=(lookupd_http,),
            http_allow_origin=options.http_allow_origin,
        ),
    )
    await nsqadmin.start()
    try:
        yield _reachable(*nsqadmin.http_address)
    finally:
        await nsqadmin.close()


def _admin_address(options: UpOptions) -> str:
    return format_address(_host(options.http_address), 0 if options.free_ports else options.nsqadmin_port)


def greeting(where: Listening, options: UpOptions, command: str) -> str:
    """Return what is printed once everything listens: addresses, and commands to try.

    Args:
        command: runs ``flintmq`` in the user's shell.
    """
    others = "".join(f"  nsqd        tcp {tcp:<21}  http://{http}\n" for tcp, http in where.others)
    if where.nsqadmin:
        pages = f"  nsqadmin    http://{where.nsqadmin}/\n"
    else:
        pages = ""
    cluster = (
        f"  cluster     {command} cluster status --lookupd-http-address={where.lookupd_http}\n" if where.others else ""
    )
    is_usual = (where.nsqd_tcp, where.nsqd_http) == _USUAL
    export = "" if is_usual else f"  export FLINTMQ_NSQD={where.nsqd_tcp} FLINTMQ_HTTP={where.nsqd_http}\n"
    tries = (
        ("pub greetings hello", "publish a message; the same with curl is below"),
        ("tail greetings", "look on: the last messages, then those that come"),
        ("sub greetings shell", "consume a channel; Ctrl-C ends it"),
        ("top", "rates and depths, live"),
    )
    width = max(len(words) for words, _ in tries)
    lines = "".join(f"  {command} {words:<{width}}  # {what}\n" for words, what in tries)
    return f"""
FlintMQ {__version__} is up. Ctrl-C stops it.

  nsqd        tcp {where.nsqd_tcp:<21}  http://{where.nsqd_http}
{others}  nsqlookupd  tcp {where.lookupd_tcp:<21}  http://{where.lookupd_http}
{pages}{cluster}  durability  {options.durability:<25}  change it with --durability=fsync|os|interval

To try in another shell:

{export}{lines}  curl -d hello 'http://{where.nsqd_http}/pub?topic=greetings'
"""


def flintmq_command() -> str:
    """Return the running program as a command for the user's shell: ``flintmq``, or what leads to it."""
    beside = Path(sys.executable).with_name("flintmq")
    if not beside.exists():
        return f"{python_command()} -m flintmq"
    found = shutil.which("flintmq")
    if found is not None and Path(found).exists() and os.path.samefile(found, beside):
        return "flintmq"
    return shlex.quote(str(_relative(beside)))


def python_command() -> str:
    """Return the running Python as a command for the user's shell, relative where that is shorter."""
    return shlex.quote(str(_relative(Path(sys.executable))))


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _serve(options: UpOptions) -> None:
    _check_together(options)
    logs.configure(options.log_prefix, options.log_level, path=options.log_file)
    files = _open_data_path(options.data_path)
    env = Env(hostname=socket.gethostname(), local_names=local_names())
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_until_signal(env, files, options))
    say(f"stopped; the messages stay in {options.data_path}")


def _open_data_path(data_path: str) -> OsFiles:
    path = Path(data_path)
    shown = path.absolute()
    remedy = f"{_UP} --data-path=DIRECTORY takes another one"
    try:
        is_new = not path.exists()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = OsFiles(data_path)
    except DataPathLocked as error:
        what = f"the data directory {shown} is in use by another nsqd or {_UP}"
        raise UpFailed(what, f"stop that one first, or: {remedy}") from error
    except PermissionMissing as error:
        raise UpFailed(str(error), f"or {remedy}") from error
    except OSError as error:
        raise UpFailed(f"cannot use {shown} as the data directory: {error.strerror}", remedy) from error
    except StorageError as error:
        raise UpFailed(str(error), remedy) from error
    say(f"{'created' if is_new else 'using'} the data directory {shown}")
    return files


async def _until_signal(env: Env, files: OsFiles, options: UpOptions) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def asked_to_stop() -> None:
        if not stop.is_set():
            stop.set()
            say("stopping: draining connections and writing everything to disk")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, asked_to_stop)
    command = flintmq_command()

    def ready(where: Listening) -> None:
        files.keep_reserve()
        say(greeting(where, options, command))

    if options.nsqd > 1:
        await _cluster_main(env, options, ready, stop)
    else:
        await main(env, files, options, ready, stop)


def _check_together(options: UpOptions) -> None:
    """Refuse flags that contradict each other.

    Raises:
        UsageError: they do.
    """
    if options.nsqd == 1 and options.allow_same_host:
        raise UsageError("--allow-same-host is for several nsqd: add --nsqd=N")
    if options.nsqd > 1 and options.cluster_store:
        raise UsageError("--nsqd=N keeps the coordination store itself: leave --cluster-store away")


async def _cluster_main(env: Env, options: UpOptions, ready: Callable[[Listening], None], stop: asyncio.Event) -> None:
    """Run nsqlookupd with the coordination store here, and several nsqd as processes, until ``stop`` is set.

    Raises:
        UpFailed: something of it cannot start.
    """
    from flintmq.up_nodes import NodeFailed, Nodes  # for those who have several

    data_path = Path(options.data_path)
    lookupd_options = options_of_nsqlookupd(options).replace(
        cluster_store=(OWN_STORE,), store_path=str(data_path / "store"), allow_same_host=options.allow_same_host
    )
    (data_path / "store").mkdir(mode=0o700, exist_ok=True)
    store_files = OsFiles(lookupd_options.store_path)
    lookupd = Nsqlookupd(env, lookupd_options, store_files)
    nodes = Nodes(lambda number, code: say(f"nsqd {number} has ended with exit code {code}; the others go on"))
    try:
        await lookupd.start()
        store_files.keep_reserve()
        async with contextlib.AsyncExitStack() as stack:
            lookupd_tcp, lookupd_http = (_reachable(*each) for each in (lookupd.tcp_address, lookupd.http_address))
            stack.push_async_callback(lookupd.close)
            stack.push_async_callback(nodes.stop)
            nsqadmin = await stack.enter_async_context(_nsqadmin(env, options, lookupd_http))
            starting = asyncio.ensure_future(
                nodes.start(
                    [_options_of_node(options, number, lookupd_tcp, lookupd_http) for number in range(options.nsqd)]
                )
            )
            stopping = asyncio.ensure_future(stop.wait())
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                found = await starting
                while lookupd.cluster_node_count < len(found) and not stop.is_set():  # noqa: ASYNC110 - it is soon
                    await asyncio.sleep(_POLL_S)
                first, *others = found
                if not stop.is_set():
                    ready(Listening(*first, lookupd_tcp, lookupd_http, tuple(others), nsqadmin))
                await stopping
            else:
                starting.cancel()
    except NodeFailed as error:
        what = f"{error}: the log above says why, or {options.log_file or 'stderr'}"
        raise UpFailed(what, f"mend that, or: {_UP} --free-ports takes any ports") from error
    except ListenFailed as error:
        raise _listen_failed(error, options_of_nsqd(options), lookupd_options, options) from error
    finally:
        store_files.close()


def _options_of_node(options: UpOptions, number: int, lookupd_tcp: str, lookupd_http: str) -> NsqdOptions:
    """Return the options of one of several nsqd; their ports are 100 apart."""
    alone = options_of_nsqd(options)
    data_path = Path(options.data_path) / f"nsqd-{number + 1}"
    data_path.mkdir(mode=0o700, exist_ok=True)
    tcp_host, http_host = _host(alone.tcp_address), _host(alone.http_address)
    return alone.replace(
        tcp_address=format_address(tcp_host, _port_of(alone.tcp_address, number)),
        http_address=format_address(http_host, _port_of(alone.http_address, number)),
        peer_address=format_address(tcp_host, 0),
        data_path=str(data_path),
        log_prefix=f"{alone.log_prefix}nsqd-{number + 1} ",
        lookupd_tcp_address=(lookupd_tcp, *alone.lookupd_tcp_address),
        cluster_store=(lookupd_http,),
    )


def _port_of(address: str, number: int) -> int:
    split = split_address(address)
    assert split is not None  # the table has checked it
    return split[1] and split[1] + _PORTS_APART * number


async def _say_when_introduced(
    lookupd: Nsqlookupd, nsqd: nsqd_server.Nsqd, nsqadmin: str, ready: Callable[[Listening], None]
) -> None:
    """Wait until nsqlookupd knows nsqd: before, no topic with partitions can be created."""
    await nsqd.introduced()
    ready(replace(_listening(lookupd, nsqd), nsqadmin=nsqadmin))


def _listening(lookupd: Nsqlookupd, nsqd: nsqd_server.Nsqd) -> Listening:
    tcp, http = nsqd.addresses.tcp, nsqd.addresses.http
    assert tcp is not None and http is not None  # the tables take neither "" nor the path of a unix socket
    found = (_reachable(*address) for address in (tcp, http, lookupd.tcp_address, lookupd.http_address))
    nsqd_tcp, nsqd_http, lookupd_tcp, lookupd_http = found
    return Listening(nsqd_tcp, nsqd_http, lookupd_tcp, lookupd_http)


def _reachable(host: str, port: int) -> str:
    """Return an address to connect to from this machine: a daemon that listens everywhere is reached at 127.0.0.1."""
    return format_address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)


def _listen_failed(error: ListenFailed, nsqd: NsqdOptions, lookupd: NsqlookupdOptions, options: UpOptions) -> UpFailed:
    flags = {
        nsqd.tcp_address: ("nsqd (TCP)", "--tcp-port"),
        nsqd.http_address: ("nsqd (HTTP)", "--http-port"),
        lookupd.tcp_address: ("nsqlookupd (TCP)", "--lookupd-tcp-port"),
        lookupd.http_address: ("nsqlookupd (HTTP)", "--lookupd-http-port"),
        _admin_address(options): ("nsqadmin", "--nsqadmin-port"),
    }
    who, flag = flags[error.address]
    number = error.__cause__.errno if isinstance(error.__cause__, OSError) else None
    reason = os.strerror(number) if number else error.reason
    what = f"{who} cannot listen on {error.address}: {reason}"
    if number == errno.EADDRINUSE:
        return UpFailed(
            what, f"stop what uses this port, or choose another with {flag}=PORT, or let --free-ports choose all"
        )
    return UpFailed(what, f"choose another port with {flag}=PORT, or another host with --tcp-address, --http-address")


def _with_port(address: str, port: int | None) -> str:
    return address if port is None else format_address(_host(address), port)


def _host(address: str) -> str:
    split = split_address(address)
    assert split is not None  # the table has checked it
    return split[0]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


__all__ = ["Listening", "UpFailed", "UpOptions", "greeting", "main", "python_command", "run"]
