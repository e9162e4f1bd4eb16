"""Every flag of nsqd and nsqlookupd: name, key in a file, default, and another value (NSQ's options).

Values are spelled three times: as the flag takes them, as a TOML file does, and as ``GET /config/<key>`` shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.certificates import Certificates

FORMS: dict[str, Callable[[str, str], tuple[str, ...]]] = {
    "-x v": lambda name, value: (f"-{name}", value),
    "--x v": lambda name, value: (f"--{name}", value),
    "--x=v": lambda name, value: (f"--{name}={value}",),
    "-x=v": lambda name, value: (f"-{name}={value}",),
}
SWITCHES = frozenset({"deflate", "snappy", "statsd-mem-stats", "statsd-exclude-ephemeral", "tls-required"})
"""Flags that never take the next word as their value."""


@dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
        name: without dashes.
        key: in a file and in ``/config``.
        default: as ``/config`` shows it; None where it depends on the machine or on the other flags.
        given: another value, as a flag takes it.
        shown: that value as ``/config`` shows it.
        toml: that value in a file; empty for the given text in quotes.
    """

    name: str
    key: str
    default: str | None
    given: str
    shown: str
    toml: str = ""

    @property
    def toml_line(self) -> str:
        return f"{self.key} = {self.toml or chr(34) + self.given + chr(34)}\n"


def _text(name: str, default: str | None, given: str, key: str = "") -> Flag:
    return Flag(name, key or name.replace("-", "_"), default, given, given)


def _number(name: str, default: str | None, given: str, key: str = "") -> Flag:
    return Flag(name, key or name.replace("-", "_"), default, given, given, given)


def _duration(name: str, default_ns: int, given: str, given_ns: int) -> Flag:
    return Flag(name, name.replace("-", "_"), str(default_ns), given, str(given_ns))


def _switch(name: str, default: bool) -> Flag:
    other = str(not default).lower()
    return Flag(name, name.replace("-", "_"), str(default).lower(), other, other, other)


def _list(name: str, key: str, given: str, shown: str) -> Flag:
    return Flag(name, key, "[]", given, shown, shown)


_MS = 1_000_000
_S = 1_000 * _MS
_M = 60 * _S
_H = 60 * _M

NSQD = (
    Flag("log-level", "log_level", "2", "debug", "1"),
    _text("log-prefix", "[nsqd] ", "[x] "),
    _number("node-id", None, "7", "id"),
    _text("https-address", "0.0.0.0:4152", "127.0.0.1:0"),
    _text("broadcast-address", None, "nsqd.example"),
    _number("broadcast-tcp-port", None, "14150"),
    _number("broadcast-http-port", None, "14151"),
    _list("lookupd-tcp-address", "nsqlookupd_tcp_addresses", "127.0.0.1:1", '["127.0.0.1:1"]'),
    _list("auth-http-address", "auth_http_addresses", "127.0.0.1:1", '["127.0.0.1:1"]'),
    _text("auth-http-request-method", "get", "post"),
    _duration("http-client-connect-timeout", 2 * _S, "3s", 3 * _S),
    _duration("http-client-request-timeout", 5 * _S, "6s", 6 * _S),
    _number("mem-queue-size", "10000", "100"),
    _number("max-bytes-per-file", "104857600", "1048576"),
    _number("sync-every", "2500", "100"),
    _duration("sync-timeout", 2 * _S, "1m30s", 90 * _S),
    _number("queue-scan-worker-pool-max", "4", "5"),
    _number("queue-scan-selection-count", "20", "30"),
    _duration("msg-timeout", _M, "1.5s", 1500 * _MS),
    _duration("max-msg-timeout", 15 * _M, "10m", 10 * _M),
    _number("max-msg-size", "1048576", "65536"),
    _number("max-body-size", "5242880", "131072"),
    _duration("max-req-timeout", _H, "2h", 2 * _H),
    _duration("max-heartbeat-interval", _M, "30s", 30 * _S),
    _number("max-rdy-count", "2500", "100"),
    _number("max-output-buffer-size", "65536", "32768"),
    _duration("max-output-buffer-timeout", 30 * _S, "20s", 20 * _S),
    _duration("min-output-buffer-timeout", 25 * _MS, "50ms", 50 * _MS),
    _duration("output-buffer-timeout", 250 * _MS, "100ms", 100 * _MS),
    _number("max-channel-consumers", "0", "5"),
    _text("statsd-address", "", "127.0.0.1:1"),
    _duration("statsd-interval", _M, "30s", 30 * _S),
    _switch("statsd-mem-stats", True),
    Flag("statsd-prefix", "statsd_prefix", None, "x.%s", "x.nsqd_example_14151."),
    _number("statsd-udp-packet-size", "508", "1000"),
    _switch("statsd-exclude-ephemeral", False),
    _list("e2e-processing-latency-percentile", "e2e_processing_latency_percentiles", "0.5", "[0.5]"),
    _duration("e2e-processing-latency-window-time", 10 * _M, "5m", 5 * _M),
    _text("tls-client-auth-policy", "", "require"),
    Flag("tls-required", "tls_required", "0", "tcp-https", "1"),
    Flag("tls-min-version", "tls_min_version", None, "tls1.3", "772"),
    _switch("deflate", True),
    _number("max-deflate-level", "6", "3"),
    _switch("snappy", True),
    _text("topology-region", "", "r1"),
    _text("topology-zone", "", "z1"),
    _list("enable-experiment", "enable_experiment", "topology-aware-consumption", '["topology-aware-consumption"]'),
)
"""All but those that every start needs (addresses, data path), TLS files, and deprecated ones."""

TLS_FILES = ("tls-cert", "tls-key", "tls-root-ca-file")


def tls_files(certificates: Certificates) -> tuple[Flag, ...]:
    """The flags that name files of TLS, without which others are refused."""
    paths = (certificates.server.cert, certificates.server.key, certificates.ca)
    return tuple(_text(name, "", path) for name, path in zip(TLS_FILES, paths, strict=True))


def command_line(flags: Iterable[Flag], form: str) -> list[str]:
    """All ``flags`` with their other value, spelled in one form as far as a switch can be."""
    words: list[str] = []
    for flag in flags:
        words += FORMS[form.replace(" ", "=") if flag.name in SWITCHES else form](flag.name, flag.given)
    return words
