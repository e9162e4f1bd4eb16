"""``--consumer-opt`` and ``--producer-opt`` of NSQ's utilities: go-nsq's options by name, as those of this client.

Rules of this file: a value is ``name,value``, or ``name`` alone for true, as go-nsq reads it; what this client has no
counterpart for may be set to go-nsq's default, which asks for nothing, and is refused otherwise. A secret is
shown in no text.

Source: go-nsq 1.1, type Config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flintmq.client.options import UNBUFFERED, ConnectionOptions
from flintmq.client.security import Secret
from flintmq.env import Env
from flintmq.errors import OptionError
from flintmq.net.http_auth import TokenFile
from flintmq.options import Duration, Integer, Switch, Text, nearest
from flintmq.options.kinds import Kind, Number
from flintmq.tools.secret import RenewedSecret
from flintmq.version import __version__
from flintmq.wire.identify import NSQ_VERSION

_NS_PER_S = 1_000_000_000
_FLAG = "flag"
_REFERENCES = ("env:", "file:")


def _as_is(value: Any) -> Any:
    return value


def _in_seconds(value: int) -> float:
    return value / _NS_PER_S


def _secret(value: str) -> Secret:
    """Read ``env:NAME`` and ``file:/path``, the latter for every connection; anything else is the secret itself.

    Raises:
        ValueError: there is none.
    """
    if not value.startswith(_REFERENCES):
        return value
    try:
        return RenewedSecret("auth_secret", value).now
    except OptionError as error:
        raise ValueError(error.allowed) from None


def _tls_version(value: str) -> str:
    return value if value.startswith("tls") else f"tls{value}"


@dataclass(frozen=True)
class _Name:
    """An option of go-nsq.

    Attributes:
        connection: the attribute of :class:`ConnectionOptions` that it is.
        consumer: the keyword argument of a consumer that it is, otherwise.
        compression: the one that it switches on or off, otherwise.
        convert: from the value as it is written to the one that the client takes.
        default: of an option without counterpart: the only value that may be set.
    """

    kind: Kind
    connection: str = ""
    consumer: str = ""
    compression: str = ""
    convert: Callable[[Any], Any] = _as_is
    default: Any = None


_NAMES: Mapping[str, _Name] = {
    "dial_timeout": _Name(Duration(), "connect_timeout", convert=_in_seconds),
    "heartbeat_interval": _Name(Duration(), "heartbeat_interval", convert=_in_seconds),
    "msg_timeout": _Name(Duration(), "msg_timeout", convert=lambda ns: _in_seconds(ns) or None),
    "client_id": _Name(Text(), "client_id"),
    "user_agent": _Name(Text(), "user_agent"),
    "sample_rate": _Name(Integer(0, 99), "sample_rate"),
    "output_buffer_size": _Name(Integer(UNBUFFERED), "output_buffer_size"),
    "output_buffer_timeout": _Name(Duration(), "output_buffer_timeout", convert=_in_seconds),
    "tls_v1": _Name(Switch(), "tls"),
    "tls_root_ca_file": _Name(Text(), "tls_ca_file"),
    "tls_cert": _Name(Text(), "tls_cert"),
    "tls_key": _Name(Text(), "tls_key"),
    "tls_insecure_skip_verify": _Name(Switch(), "tls_verify", convert=lambda skips: not skips),
    "tls_min_version": _Name(Text(), "tls_min_version", convert=_tls_version),
    "deflate": _Name(Switch(), compression="deflate"),
    "snappy": _Name(Switch(), compression="snappy"),
    "deflate_level": _Name(Integer(1, 9), "deflate_level"),
    "auth_secret": _Name(Text(), "auth_secret", convert=_secret),
    "max_in_flight": _Name(Integer(0), consumer="max_in_flight"),
    "max_attempts": _Name(Integer(0, 65535), consumer="max_attempts"),
    "default_requeue_delay": _Name(Duration(), consumer="requeue_delay", convert=_in_seconds),
    "max_requeue_delay": _Name(Duration(), consumer="max_requeue_delay", convert=_in_seconds),
    "backoff_multiplier": _Name(Duration(), consumer="backoff", convert=_in_seconds),
    "max_backoff_duration": _Name(Duration(), consumer="max_backoff", convert=_in_seconds),
    "low_rdy_idle_timeout": _Name(Duration(), consumer="low_rdy_idle_timeout", convert=_in_seconds),
    "low_rdy_timeout": _Name(Duration(), consumer="low_rdy_timeout", convert=_in_seconds),
    "lookupd_poll_interval": _Name(Duration(), consumer="lookup_interval", convert=_in_seconds),
    "lookupd_poll_timeout": _Name(Duration(), consumer="lookup_timeout", convert=_in_seconds),
    "lookupd_poll_jitter": _Name(Number(-1e-9, 1.0, "it must be from 0 to 1"), consumer="lookup_jitter"),
    "read_timeout": _Name(Duration(), default=60 * _NS_PER_S),
    "write_timeout": _Name(Duration(), default=_NS_PER_S),
    "rdy_redistribute_interval": _Name(Duration(), default=5 * _NS_PER_S),
    "backoff_strategy": _Name(Text(), default="exponential"),
    "local_addr": _Name(Text(), default=""),
    "hostname": _Name(Text(), default=""),
    "topology_region": _Name(Text(), default=""),
    "topology_zone": _Name(Text(), default=""),
}


@dataclass(frozen=True)
class ClientOpts:
    """The options of one client.

    Attributes:
        consumer: keyword arguments of a consumer; empty for a producer.
    """

    connection: ConnectionOptions
    consumer: Mapping[str, Any]


def client_opts(program: str, flag: str, given: Iterable[str], for_consumer: bool, token_file: str = "") -> ClientOpts:
    """Read what was given as ``--consumer-opt`` or ``--producer-opt``; the last one of a name counts.

    Args:
        program: goes into the user agent, unless that is given.
        token_file: with the token that nsqlookupd are shown; none if empty.

    Raises:
        OptionError: there is no such option, its value is wrong, nothing here can obey it, or two compressions are on.
        HttpAuthFileError: there is no token in the file.
    """
    connection: dict[str, Any] = {"user_agent": f"{program}/{NSQ_VERSION} flintmq/{__version__}"}
    if token_file:
        connection["lookup_token"] = TokenFile(token_file, Env()).now
    consumer: dict[str, Any] = {}
    is_on: dict[str, bool] = {}
    for each in given:
        name, _, text = each.partition(",")
        value = text if "," in each else "true"
        name = name.replace("-", "_")  # as go-nsq reads it
        known = _NAMES.get(name)
        if known is None:
            near = nearest(name, _NAMES)
            raise OptionError(flag, name, f"there is no {name}; did you mean {near}?" if near else _ALL, _FLAG)
        try:
            read = known.kind.from_text(value)
            known.kind.check(read)
            converted = known.convert(read)
        except ValueError as error:
            raise OptionError(flag, each, f"{name}: {error}", _FLAG) from None
        if known.connection:
            connection[known.connection] = converted
        elif known.compression:
            is_on[known.compression] = converted
        elif known.consumer and for_consumer:
            consumer[known.consumer] = converted
        elif not known.consumer and read != known.default:
            shown = known.kind.show(known.default)
            raise OptionError(flag, each, f"nothing here can obey {name}; leave it at {shown or 'nothing'}", _FLAG)
    compressions = [name for name in is_on if is_on[name]]
    if len(compressions) > 1:
        raise OptionError(flag, ", ".join(compressions), "cannot enable both deflate and snappy compression", _FLAG)
    if compressions:
        (connection["compression"],) = compressions
    try:
        return ClientOpts(ConnectionOptions(**connection), consumer)
    except OptionError as error:
        raise OptionError(f"{flag} ({error.option})", error.value, error.allowed, _FLAG) from None


_ALL = f"known are {', '.join(_NAMES)}"
