"""The options of nsqlookupd: every flag of NSQ 1.3 under its own name and default. Source: NSQ's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flintmq.errors import OptionError
from flintmq.net.http_auth import check_options as check_http_auth
from flintmq.net.http_envelope import NSQ, STYLES
from flintmq.net.log import LOG_FILE_HELP
from flintmq.net.origin import check_origins
from flintmq.options import (
    MILLISECOND,
    MINUTE,
    SECOND,
    Address,
    Choice,
    Duration,
    Integer,
    Items,
    Options,
    Switch,
    Text,
    option,
)
from flintmq.topic_meta import PARTITION_NUM_MAX, REPLICATOR_MAX

OWN_STORE = "own"

_LOGGING = "Logging"
_ADDRESSES = "Addresses"
_PRODUCERS = "Producers"
_TLS = "TLS"
_HTTP_AUTH = "HTTP clients"
_OF_STORES_ELSEWHERE = (
    "cluster_store_token_file",
    "cluster_store_password_file",
    "cluster_store_root_ca_file",
    "cluster_store_cert",
    "cluster_store_key",
)
_DEFAULT_CLUSTER = "default"
DEFAULT_WINDOW = "2-6"
_OF_CLUSTERS = {
    "cluster": _DEFAULT_CLUSTER,
    "allow_same_host": False,
    "balance_interval_ns": 5 * SECOND,
    "balance_window": DEFAULT_WINDOW,
    "default_partitions": 0,
    "default_replicator": 0,
}


@dataclass(frozen=True, kw_only=True)
class NsqlookupdOptions(Options):
    """The flags of nsqlookupd; each attribute is the flag of the same name."""

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
    https_address: str = option(
        Address(may_be_empty=True, may_be_path=True),
        "",
        "where to listen for HTTPS clients; needs --tls-cert and --tls-key",
        group=_ADDRESSES,
        origin="flintmq",
        default_text="nowhere",
    )
    broadcast_address: str = option(
        Text("HOST"), "", "the host nsqd is told", group=_ADDRESSES, default_text="the name of this host"
    )

    http_style: str = option(
        Choice(STYLES),
        NSQ,
        "how questions are answered: nsq - as NSQ, unless a request has a path or parameter of Youzan's NSQ alone; "
        "youzan - as that, in its envelope where a request does not accept application/vnd.nsq; version=1.0",
        group=_ADDRESSES,
        origin="flintmq",
    )

    inactive_producer_timeout_ns: int = option(
        Duration(MILLISECOND), 5 * MINUTE, "how long an nsqd stays listed after its last ping", group=_PRODUCERS
    )
    tombstone_lifetime_ns: int = option(
        Duration(), 45 * SECOND, "how long a tombstoned nsqd stays hidden while it keeps registering", group=_PRODUCERS
    )
    allow_write_with_nochannels: bool = option(
        Switch(),
        True,
        "name the nsqd of a topic without channels to those who ask with access=w; false: only once there is a channel",
        group=_PRODUCERS,
        origin="flintmq",
    )

    store_path: str = option(
        Text("DIR"),
        "",
        "directory of the coordination store of a cluster, which other nodes use over the HTTP and HTTPS ports",
        group=_PRODUCERS,
        origin="flintmq",
        default_text="none",
    )
    accept_older_store: bool = option(
        Switch(),
        False,
        "start although the coordination store is not as new as it was when changes were last acknowledged: what is "
        "missing is forgotten. Stop every nsqd of the cluster first",
        group=_PRODUCERS,
        origin="flintmq",
    )

    cluster_store: tuple[str, ...] = option(
        Items(Text("ADDR")),
        (),
        "coordination store of the cluster: own - that of --store-path; or host:port or http(s)://user:password@host:"
        "port of members of an etcd, or of the nsqlookupd that keeps one",
        group=_PRODUCERS,
        origin="flintmq",
        default_text="none",
    )
    cluster_store_token_file: str = option(
        Text("FILE"),
        "",
        "file with the token for the nsqlookupd that keeps the store; read again when it changes",
        group=_PRODUCERS,
        origin="flintmq",
        default_text="none",
    )
    cluster_store_password_file: str = option(
        Text("FILE"),
        "",
        "file with the password of the user that the addresses of the store name; read again when it changes",
        group=_PRODUCERS,
        origin="flintmq",
        default_text="none",
    )
    cluster_store_root_ca_file: str = option(
        Text("FILE"),
        "",
        "certificate authorities of the store; read again when it changes",
        group=_PRODUCERS,
        origin="flintmq",
        default_text="those of the system",
    )
    cluster_store_cert: str = option(
        Text("FILE"),
        "",
        "certificate shown to the store; read again when it changes",
        group=_PRODUCERS,
        origin="flintmq",
        default_text="none",
    )
    cluster_store_key: str = option(
        Text("FILE"),
        "",
        "private key of that certificate, without a passphrase",
        group=_PRODUCERS,
        origin="flintmq",
        default_text="none",
    )
    cluster: str = option(
        Text("NAME"),
        _DEFAULT_CLUSTER,
        "name of the cluster in the coordination store",
        group=_PRODUCERS,
        origin="flintmq",
    )
    allow_same_host: bool = option(
        Switch(),
        False,
        "let several copies of a partition be on one machine",
        group=_PRODUCERS,
        origin="flintmq",
    )

    balance_interval_ns: int = option(
        Duration(),
        5 * SECOND,
        "between rounds in which leaders, and copies, are spread over the nodes of the cluster; 0 for never",
        group=_PRODUCERS,
        origin="flintmq",
    )
    balance_window: str = option(
        Text("HH-HH"),
        DEFAULT_WINDOW,
        "hours of the day (UTC) in which copies are moved for that",
        group=_PRODUCERS,
        origin="flintmq",
    )

    default_partitions: int = option(
        Integer(0, PARTITION_NUM_MAX),
        0,
        "partitions of a topic of the cluster that is made without saying how many",
        group=_PRODUCERS,
        origin="flintmq",
        default_text="one for each nsqd",
    )
    default_replicator: int = option(
        Integer(0, REPLICATOR_MAX),
        0,
        "copies of each partition of such a topic",
        group=_PRODUCERS,
        origin="flintmq",
        default_text="3, or one on each machine where there are fewer",
    )

    tls_cert: str = option(
        Text("FILE"),
        "",
        "certificate for HTTPS and its chain; read again when it changes",
        group=_TLS,
        origin="flintmq",
        default_text="none",
    )
    tls_key: str = option(
        Text("FILE"),
        "",
        "private key of that certificate, without a passphrase",
        group=_TLS,
        origin="flintmq",
        default_text="none",
    )
    tls_client_auth_policy: str = option(
        Choice(("", "require", "require-verify")),
        "",
        "require - HTTPS clients need a certificate, whoever issued it; require-verify - one issued by "
        "--tls-root-ca-file, or by an authority of the system without it",
        group=_TLS,
        origin="flintmq",
    )
    tls_root_ca_file: str = option(
        Text("FILE"),
        "",
        "authorities of clients; read again when it changes",
        group=_TLS,
        origin="flintmq",
        default_text="none",
    )
    tls_min_version: str = option(
        Choice(("tls1.0", "tls1.1", "tls1.2", "tls1.3")),
        "tls1.2",
        "oldest version of TLS that is accepted",
        group=_TLS,
        origin="flintmq",
    )

    http_allow_origin: tuple[str, ...] = option(
        Items(Text("ORIGIN")),
        (),
        "origin of a web page that may use the HTTP and HTTPS ports, such as https://wiki.example; its host is also a "
        "name that this host is asked under; requests of other pages are refused",
        group=_HTTP_AUTH,
        origin="flintmq",
        default_text="none",
    )
    http_auth_tokens_file: str = option(
        Text("FILE"),
        "",
        "clients of the HTTP and HTTPS ports with their tokens, permissions and topics, in TOML or JSON (*.json); read "
        "again when it changes; without it everybody may do everything",
        group=_HTTP_AUTH,
        origin="flintmq",
        default_text="none",
    )
    http_auth_client_cert: bool = option(
        Switch(),
        False,
        "let HTTPS clients show a certificate issued by --tls-root-ca-file instead of a token: its common name stands "
        "in --http-auth-tokens-file",
        group=_HTTP_AUTH,
        origin="flintmq",
    )
    nsqd_http_token_file: str = option(
        Text("FILE"),
        "",
        "file with the token for what is asked of the HTTP port of nsqd; read again when it changes",
        group=_HTTP_AUTH,
        origin="flintmq",
        default_text="none",
    )

    def check_together(self) -> None:
        if self.https_address and not (self.tls_cert and self.tls_key):
            raise OptionError("https_address", self.https_address, "it needs --tls-cert and --tls-key", "argument")
        if (self.tls_cert or self.tls_key or self.tls_client_auth_policy) and not self.https_address:
            attribute = "tls_cert" if self.tls_cert else "tls_key" if self.tls_key else "tls_client_auth_policy"
            allowed = "it is for HTTPS: give --https-address as well"
            raise OptionError(attribute, getattr(self, attribute), allowed, "argument")
        if self.accept_older_store and not self.store_path:
            raise OptionError(
                "accept_older_store", True, "it is about the store of --store-path: give that", "argument"
            )
        check_http_auth(self)
        self._check_cluster()
        check_origins(self.http_allow_origin)

    def _check_cluster(self) -> None:
        if not self.cluster_store or self.is_own_store:
            for name in _OF_STORES_ELSEWHERE:
                if given := getattr(self, name):
                    allowed = "it is for a --cluster-store that is elsewhere: give that"
                    raise OptionError(name, given, allowed, "argument")
        if self.cluster_store or self.cluster != _DEFAULT_CLUSTER:
            from flintmq.net.cluster_store import check_options  # only a nsqlookupd of a cluster needs it

            check_options(self, is_elsewhere=bool(self.cluster_store) and not self.is_own_store)
        if not self.cluster_store:
            for name, default in _OF_CLUSTERS.items():
                if (given := getattr(self, name)) != default:
                    raise OptionError(name, given, "it needs --cluster-store as well", "argument")
            return
        if parsed_window(self.balance_window) is None:
            allowed = "it must be HH-HH with hours from 0 to 24 of UTC"
            raise OptionError("balance_window", self.balance_window, allowed, "argument")
        if self.is_own_store and not self.store_path:
            raise OptionError("cluster_store", OWN_STORE, "own needs --store-path, where it is", "argument")
        for name in ("tcp_address", "http_address"):
            if "/" in getattr(self, name):
                allowed = "in a cluster it must be host:port: others have to reach it"
                raise OptionError(name, getattr(self, name), allowed, "argument")

    @property
    def balance_hours(self) -> tuple[int, int]:
        """The hours of ``balance_window``."""
        return parsed_window(self.balance_window) or (0, 0)

    @property
    def is_own_store(self) -> bool:
        """Whether the cluster's store is the one of this nsqlookupd."""
        return self.cluster_store == (OWN_STORE,)


def parsed_window(text: str) -> tuple[int, int] | None:
    """Read hours of the day such as ``22-4``, of which the first is before midnight; None for anything else."""
    first, _, last = text.partition("-")
    if all(word.isascii() and word.isdigit() and len(word) <= 2 and int(word) <= 24 for word in (first, last)):
        return int(first), int(last)
    return None
