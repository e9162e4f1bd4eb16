"""The options of nsqlookupd: every flag of NSQ 1.3 under its own name and default. Source: reference/nsq.md 4.3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flintmq.net.log import LOG_FILE_HELP
from flintmq.options import MILLISECOND, MINUTE, SECOND, Address, Choice, Duration, Options, Switch, Text, option

_LOGGING = "Logging"
_ADDRESSES = "Addresses"
_PRODUCERS = "Producers"


@dataclass(frozen=True, kw_only=True)
class NsqlookupdOptions(Options):
    """What a nsqlookupd can be told; each attribute is the flag of the same name."""

    program: ClassVar[str] = "nsqlookupd"
    summary: ClassVar[str] = "nsqlookupd tells clients which nsqd has which topic."

    log_level: str = option(
        Choice(("debug", "info", "warn", "error", "fatal")), "info", "how much to log on stderr", group=_LOGGING
    )
    log_prefix: str = option(Text(), "[nsqlookupd] ", "what every log line starts with", group=_LOGGING)
    log_file: str = option(Text("FILE"), "", LOG_FILE_HELP, group=_LOGGING, origin="flintmq", default_text="stderr")
    verbose: bool = option(Switch(), False, "has no effect, use --log-level", group=_LOGGING, deprecated=True)

    tcp_address: str = option(Address(may_be_path=True), "0.0.0.0:4160", "where to listen for nsqd", group=_ADDRESSES)
    http_address: str = option(
        Address(may_be_path=True), "0.0.0.0:4161", "where to listen for HTTP clients", group=_ADDRESSES
    )
    broadcast_address: str = option(
        Text("HOST"), "", "the host nsqd is told", group=_ADDRESSES, default_text="the name of this host"
    )

    inactive_producer_timeout_ns: int = option(
        Duration(MILLISECOND), 5 * MINUTE, "how long an nsqd stays listed after its last ping", group=_PRODUCERS
    )
    tombstone_lifetime_ns: int = option(
        Duration(), 45 * SECOND, "how long a tombstoned nsqd stays hidden while it keeps registering", group=_PRODUCERS
    )
