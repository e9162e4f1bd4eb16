"""Options of a connection, and how durations and addresses are written.

Rules of this file: durations are seconds or a timedelta on the outside, seconds (float) inside, milliseconds only on
the wire; a value out of range is an :class:`OptionError` that names the option, the value and what is allowed.
Ranges that nsqd also checks (NSQ's TCP protocol) are nsqd's defaults: an operator can only move them on nsqd.
"""

from __future__ import annotations

import errno
import inspect
import os
import re
import socket
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import cache
from typing import Any, TypeAlias, TypeVar, cast
from urllib.parse import urlsplit

from flintmq.addresses import format_address, shown_url
from flintmq.client.security import (
    ClientTls,
    Secret,
    Token,
    checked_secret,
    checked_token,
    client_context,
    obtain_token,
)
from flintmq.env import Env
from flintmq.errors import OptionError
from flintmq.net.tls import VERSIONS
from flintmq.wire.client import FRAME_SIZE_MAX_DEFAULT
from flintmq.wire.codec import Snappy
from flintmq.wire.identify import IdentifyRequest

Given = TypeVar("Given")
Seconds: TypeAlias = float | timedelta
"""A duration: seconds, or a :class:`datetime.timedelta`."""

NSQD_TCP_PORT = 4150
NSQLOOKUPD_HTTP_PORT = 4161
NSQLOOKUPD_COUNT_MAX = 64
MS_PER_S = 1000
DAY_S = 86400.0
DELAY_MAX_S = 365 * DAY_S
UNBUFFERED = -1
"""The size of a buffer that nsqd does without."""

SOURCE = "argument"
_ERRNO = re.compile(r"\[Errno (\d+)\]")


def seconds(value: Seconds, option: str, minimum: float = 0.0, maximum: float = DAY_S) -> float:
    """Read a duration.

    Raises:
        OptionError: not a duration, or outside ``minimum`` to ``maximum`` seconds.
    """
    number = value.total_seconds() if isinstance(value, timedelta) else value
    allowed = f"seconds or a timedelta from {minimum:g} to {maximum:g} s"
    if not _is_number(number) or not minimum <= number <= maximum:
        raise OptionError(option, value, allowed, SOURCE)
    return float(number)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_keywords(call: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for a keyword argument that there is not."""
    if unknown := sorted({*given} - {*known}):
        raise TypeError(f"{call}() got an unexpected keyword argument {unknown[0]!r}")


def milliseconds(value: Seconds, option: str, minimum: float = 0.0, maximum: float = DAY_S) -> int:
    """Read a duration as the whole milliseconds that the wire carries, rounded up.

    Raises:
        OptionError: as :func:`seconds`.
    """
    exact = seconds(value, option, minimum, maximum) * MS_PER_S
    whole = round(exact)
    # 0.0001 s must not become "at once", and 0.3 s must not become 301 ms because of binary fractions.
    return whole if abs(exact - whole) < 1e-6 or whole > exact else whole + 1


def whole(value: int, option: str, minimum: int, maximum: int) -> int:
    """Read a count or a size.

    Raises:
        OptionError: not a whole number from ``minimum`` to ``maximum``.
    """
    if not _is_number(value) or not minimum <= value <= maximum or value != int(value):
        raise OptionError(option, value, f"a whole number from {minimum} to {maximum}", SOURCE)
    return value


def switch(value: bool, option: str) -> bool:
    """Read what is on or off; the text ``"no"`` would be on.

    Raises:
        OptionError: neither True nor False.
    """
    if not isinstance(cast(object, value), bool):
        raise OptionError(option, value, "True or False", SOURCE)
    return value


def listed(
    value: str | Iterable[str], option: str, allowed: str = "an address, or a list of addresses"
) -> tuple[str, ...]:
    """Read one text or several, without repetitions and in the order given: a text is not the list of its letters.

    Args:
        allowed: what they are, for errors.

    Raises:
        OptionError: something else than text was given.
    """
    is_one = isinstance(cast(object, value), str | bytes) or not hasattr(value, "__iter__")
    found: dict[str, None] = {}
    for item in cast(Iterable[object], [value] if is_one else value):
        if not isinstance(item, str) or not item.strip():
            raise OptionError(option, item, allowed, SOURCE)
        found[item.strip()] = None
    return tuple(found)


def _check_one(address: str, option: str) -> None:
    """Raise OptionError for several addresses in one text, and for blanks inside of one."""
    if "," in address:
        raise OptionError(option, address, 'several addresses are a list: ["a:1", "b:2"]', SOURCE)
    if len(address.split()) != 1:
        raise OptionError(option, address, "an address has no blanks; several addresses are a list", SOURCE)


def split_address(address: str, option: str = "nsqd_tcp_addresses") -> tuple[str, int]:
    """Split ``host:port``, ``[v6]:port`` or ``host`` (port 4150).

    Raises:
        OptionError: no host, one that no name can be, or a port that is none.
    """
    _check_one(address, option)
    if "://" in address:
        raise OptionError(option, address, "host:port without http://, such as 127.0.0.1:4150", SOURCE)
    host, colon, port_text = address.rpartition(":")
    if not colon or address.endswith("]"):
        host, port_text = address, str(NSQD_TCP_PORT)
    elif ":" in host and not host.startswith("["):
        raise OptionError(option, address, "an IPv6 address with a port is written [::1]:4150", SOURCE)
    host = host.removeprefix("[").removesuffix("]")
    port = int(port_text) if port_text.isascii() and port_text.isdigit() else 0
    if not host or "/" in host or not 0 < port < 65536:
        raise OptionError(option, address, "host:port, such as 127.0.0.1:4150", SOURCE)
    try:
        host.encode("idna")  # as looking it up does
    except UnicodeError:
        allowed = "a host whose parts between dots have 1 to 63 characters"
        raise OptionError(option, address, allowed, SOURCE) from None
    return host, port


def why_unreachable(error: OSError) -> str:
    """Return what is wrong with an address that cannot be connected to, and what to do, on one line."""
    if isinstance(error, socket.gaierror):
        return f"{error.strerror}: no such host; check the name"
    # asyncio says of several addresses what each of them says, and has no number of its own
    found = {error.errno} if error.errno else {*map(int, _ERRNO.findall(str(error)))}
    if len(found) != 1 or (number := found.pop()) <= 0:
        return str(error)
    if number == errno.ECONNREFUSED:
        return f"{os.strerror(number)}: nothing listens there; is the daemon running, and is this its address?"
    return os.strerror(number)


def tcp_addresses(value: str | Iterable[str], option: str = "nsqd_tcp_addresses") -> tuple[str, ...]:
    """Read the addresses of one or more nsqd.

    Raises:
        OptionError: one of them is not ``host:port``.
    """
    return tuple(dict.fromkeys(format_address(*split_address(item, option)) for item in listed(value, option)))


def http_addresses(value: str | Iterable[str], option: str = "nsqlookupd_http_addresses") -> tuple[str, ...]:
    """Read the addresses of one or more nsqlookupd: ``http://host:4161`` or ``host:4161``.

    Raises:
        OptionError: not an HTTP address, or too many of them.
    """
    found: dict[str, None] = {}
    for item in listed(value, option):
        _check_one(item, option)
        url = item if "://" in item else f"http://{item}"
        scheme, _, rest = url.partition("://")
        if scheme not in ("http", "https") or not _is_host_and_port(rest.partition("/")[0]):
            raise OptionError(option, shown_url(item), "http://host:port, such as http://127.0.0.1:4161", SOURCE)
        found[url.rstrip("/").removesuffix("/lookup")] = None
    if len(found) > NSQLOOKUPD_COUNT_MAX:
        raise OptionError(option, len(found), f"at most {NSQLOOKUPD_COUNT_MAX} addresses", SOURCE)
    return tuple(found)


def _is_host_and_port(place: str) -> bool:
    """Whether a URL may have this between its scheme and its path; the port may be left out."""
    try:
        parts = urlsplit(f"//{place}")
        return bool(parts.hostname) and parts.netloc == place and parts.port != 0
    except ValueError:  # the port is none, or an IPv6 address is not one
        return False


def addresses(nsqd: str | Iterable[str], lookups: str | Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Read where to find nsqd: their own addresses, or those of nsqlookupd.

    Raises:
        OptionError: none was given, or both, or one is not an address.
    """
    found = tcp_addresses(nsqd), http_addresses(lookups)
    if not any(found):
        allowed = 'give "127.0.0.1:4150", say, or nsqlookupd_http_addresses="http://127.0.0.1:4161", not both'
        raise OptionError("nsqd_tcp_addresses", found[0], allowed, SOURCE)
    if all(found):
        allowed = "either nsqd_tcp_addresses or nsqlookupd_http_addresses, not both"
        raise OptionError("nsqd_tcp_addresses", found[0], allowed, SOURCE)
    return found


@cache
def _hostname() -> str:
    return socket.gethostname()  # noqa: TID251 - the edge where no Env was handed in


def system_env() -> Env:
    """The real world, for a client that was not handed another one."""
    return Env(hostname=_hostname())


def checked_env(env: Env | None) -> Env:
    """Return the world that a client was handed, or the real one.

    Raises:
        OptionError: it is none.
    """
    if env is None:
        return system_env()
    if not isinstance(cast(object, env), Env):
        raise OptionError("env", env, "a flintmq.env.Env, or None for real time and chance", SOURCE)
    return env


def checked_fetch(fetch: Any) -> Any:
    """Return what nsqlookupd is asked with; None: what comes with the client.

    Raises:
        OptionError: it cannot be called.
    """
    if fetch is not None and not callable(fetch):
        raise OptionError("fetch", fetch, "a function of a URL and seconds, or None", SOURCE)
    return fetch


def checked_telemetry(telemetry: Given, method: str) -> Given:
    """Return what makes spans; None: nothing does.

    Args:
        method: that it needs to have.

    Raises:
        OptionError: it makes none.
    """
    if telemetry is not None and not callable(getattr(telemetry, method, None)):
        raise OptionError("telemetry", telemetry, "a flintmq.Telemetry", SOURCE)
    return telemetry


_IN_A_CONTEXT = {"tls_ca_file": None, "tls_cert": None, "tls_min_version": "tls1.2", "tls_verify": True}
"""Options that a context of the user's takes the place of, and their defaults."""


def _check_snappy() -> None:
    """Say here, and not when the first connection needs it, that its library is missing."""
    try:
        Snappy()
    except ImportError as error:
        allowed = f"the package {error.name} is missing, which pip install flintmq brings"
        raise OptionError("compression", Snappy.name, allowed, SOURCE) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """Options of connections to nsqd. Durations are seconds or a timedelta.

    Attributes:
        client_id: name of this client in statistics; the host's name when empty.
        user_agent: library and version in statistics.
        heartbeat_interval: how often nsqd asks for a sign of life, 1 s to 60 s; twice that without any byte from nsqd
            and the connection is given up.
        msg_timeout: how long a handler may take before nsqd gives the message to somebody else; nsqd's default if None.
        sample_rate: deliver only this percentage of the messages, 1 to 99; nsqd drops the others for good. 0: all.
        output_buffer_size: bytes nsqd gathers before it writes, 64 to 65536; nsqd's default if 0. -1: it gathers
            none, and the timeout means nothing.
        output_buffer_timeout: how long nsqd may hold back messages to fill its buffer, 25 ms or more; 25 ms because
            nsqd's own 250 ms makes quiet topics slow. 0: nsqd's default.
        connect_timeout: until a connection can be used: TCP, TLS and AUTH included; and for each later answer.
        frame_size_max: largest message accepted, in bytes with 30 of header.
        tls: True: connections are secured, nsqd's chain and name are verified; an :class:`ssl.SSLContext`: as that
            says. An nsqd without TLS is an error then. The other ``tls_`` options also hold for nsqlookupd at ``https://``.
        tls_ca_file: PEM file with the authorities to trust; the system's if None.
        tls_cert: PEM file with this client's certificate and its chain, if nsqd wants one.
        tls_key: PEM file with its key; None if it is in ``tls_cert``.
        tls_min_version: oldest version spoken: ``tls1.0`` to ``tls1.3``.
        tls_verify: False trusts everybody, also whoever sits between.
        tls_server_name: name expected in nsqd's certificate, if it is not the host that is connected to: nsqlookupd
            may list IP addresses.
        compression: ``snappy`` or ``deflate``; done without, with a warning in the log, where nsqd does not offer it.
        deflate_level: 1, fast, to 9, small; nsqd may lower it.
        auth_secret: sent to an nsqd that requires AUTH; or a function, ``async`` or not, that returns the secret and is
            called for every connection. A plain function runs in a thread.
        lookup_token: bearer token for nsqlookupd that ask for permissions; send it over ``https://`` only. Or a plain
            function that returns it, so that it can be renewed: called for every question, in a thread.
    """

    client_id: str = ""
    user_agent: str = ""
    heartbeat_interval: Seconds = 30.0
    msg_timeout: Seconds | None = None
    sample_rate: int = 0
    output_buffer_size: int = 0
    output_buffer_timeout: Seconds = 0.025
    connect_timeout: Seconds = 5.0
    frame_size_max: int = FRAME_SIZE_MAX_DEFAULT
    tls: bool | ssl.SSLContext = False
    tls_ca_file: str | os.PathLike[str] | None = None
    tls_cert: str | os.PathLike[str] | None = None
    tls_key: str | os.PathLike[str] | None = None
    tls_min_version: str = "tls1.2"
    tls_verify: bool = True
    tls_server_name: str | None = None
    compression: str | None = None
    deflate_level: int = 6
    auth_secret: Secret | None = field(default=None, repr=False)
    lookup_token: Token | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        milliseconds(self.heartbeat_interval, "heartbeat_interval", 1, 60)
        if self.msg_timeout is not None:
            milliseconds(self.msg_timeout, "msg_timeout", 1)
        whole(self.sample_rate, "sample_rate", 0, 99)
        if self.output_buffer_size not in (0, UNBUFFERED):
            whole(self.output_buffer_size, "output_buffer_size", 64, 65536)
        if self.output_buffer_timeout:
            milliseconds(self.output_buffer_timeout, "output_buffer_timeout", 0.025, 30)
        seconds(self.connect_timeout, "connect_timeout", 0.001, 3600)
        whole(self.frame_size_max, "frame_size_max", 1024, 2**31 - 1)
        for name in ("client_id", "user_agent"):
            if not isinstance(getattr(self, name), str):
                raise OptionError(name, getattr(self, name), "text", SOURCE)
        self._check_tls()
        whole(self.deflate_level, "deflate_level", 1, 9)
        if self.compression not in (None, "snappy", "deflate"):
            raise OptionError("compression", self.compression, "'snappy', 'deflate' or None", SOURCE)
        if self.compression == Snappy.name:
            _check_snappy()
        if self.auth_secret is not None and not callable(self.auth_secret):
            checked_secret(self.auth_secret)
        if inspect.iscoroutinefunction(self.lookup_token):
            raise OptionError("lookup_token", "an async function", "text, or a plain function", SOURCE)
        if self.lookup_token is not None and not callable(self.lookup_token):
            checked_token(self.lookup_token)

    def _check_tls(self) -> None:
        for name in ("tls_ca_file", "tls_cert", "tls_key", "tls_server_name"):
            value = getattr(self, name)
            allowed = str if name == "tls_server_name" else str | os.PathLike
            if value is not None and (not isinstance(value, allowed) or not str(value)):
                raise OptionError(name, value, "text" if allowed is str else "the path of a file", SOURCE)
        if self.tls_min_version not in VERSIONS:
            raise OptionError("tls_min_version", self.tls_min_version, f"one of {', '.join(VERSIONS)}", SOURCE)
        switch(self.tls_verify, "tls_verify")
        if self.tls_key is not None and self.tls_cert is None:
            raise OptionError("tls_key", self.tls_key, "it needs the certificate it belongs to: set tls_cert", SOURCE)
        if isinstance(self.tls, ssl.SSLContext):
            self._check_context(self.tls)
        elif not isinstance(self.tls, bool):
            raise OptionError("tls", self.tls, "True, False or an ssl.SSLContext", SOURCE)
        elif self.tls or self.tls_ca_file or self.tls_cert:
            self.tls_context()

    def _check_context(self, context: ssl.SSLContext) -> None:
        if context.protocol == ssl.PROTOCOL_TLS_SERVER:
            raise OptionError("tls", context, "an ssl.SSLContext for clients, ssl.create_default_context()", SOURCE)
        for name, default in _IN_A_CONTEXT.items():
            if getattr(self, name) != default:
                raise OptionError(name, getattr(self, name), "with an SSLContext as tls, set it in there", SOURCE)

    def tls_context(self) -> ssl.SSLContext:
        """The user's context, or the one for these options; files that have changed are read again.

        Raises:
            OptionError: a file or the version cannot be used.
        """
        if isinstance(self.tls, ssl.SSLContext):
            return self.tls
        ca_file, cert, key = (
            None if path is None else os.fspath(path) for path in (self.tls_ca_file, self.tls_cert, self.tls_key)
        )
        return client_context(ca_file, cert, key, self.tls_min_version, is_verified=self.tls_verify)

    def lookup_headers(self) -> dict[str, str]:
        """Return what every question to an nsqlookupd carries; waits for the user's function where there is one.

        Raises:
            OSError: that function raised, or returned what cannot be a token.
        """
        headers = {"Accept": "application/vnd.nsq; version=1.0"}
        if self.lookup_token is not None:
            headers["Authorization"] = f"Bearer {obtain_token(self.lookup_token)}"
        return headers

    def client_tls(self, address: str, host: str) -> ClientTls:
        """Return how to secure a connection to ``host``; ``address`` is for messages.

        Raises:
            OptionError: as :meth:`tls_context`.
        """
        return ClientTls(address, self.tls_context(), self.tls_server_name or host, self.shows_certificate)

    @property
    def shows_certificate(self) -> bool | None:
        """Whether this client has a certificate; None: only the user's context knows."""
        return None if isinstance(self.tls, ssl.SSLContext) else self.tls_cert is not None

    def with_overrides(self, **overrides: object) -> ConnectionOptions:
        """A copy in which every override that is not None replaces the option of its name."""
        values: dict[str, object] = {field.name: getattr(self, field.name) for field in fields(self)}
        values.update({name: value for name, value in overrides.items() if value is not None})
        return ConnectionOptions(**values)  # type: ignore[arg-type]

    def identify_request(self, hostname: str, version: str) -> IdentifyRequest:
        """Return what the client says about itself."""
        return IdentifyRequest(
            client_id=self.client_id or hostname.partition(".")[0],
            hostname=hostname,
            user_agent=self.user_agent or f"flintmq/{version}",
            feature_negotiation=True,
            heartbeat_interval=milliseconds(self.heartbeat_interval, "heartbeat_interval"),
            output_buffer_size=self.output_buffer_size,
            output_buffer_timeout=milliseconds(self.output_buffer_timeout, "output_buffer_timeout"),
            sample_rate=self.sample_rate,
            msg_timeout=0 if self.msg_timeout is None else milliseconds(self.msg_timeout, "msg_timeout"),
            tls_v1=bool(self.tls),
            snappy=self.compression == "snappy",
            deflate=self.compression == "deflate",
            deflate_level=self.deflate_level if self.compression == "deflate" else 0,
            nsqd_run_id=True,
        )


def checked_options(options: ConnectionOptions | None) -> ConnectionOptions:
    """Return the options that a client was handed, or the defaults.

    Raises:
        OptionError: they are something else.
    """
    if options is None:
        return ConnectionOptions()
    if not isinstance(cast(object, options), ConnectionOptions):
        raise OptionError("options", options, "a flintmq.ConnectionOptions, or None for its defaults", SOURCE)
    return options
