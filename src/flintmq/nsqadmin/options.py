"""The options of nsqadmin: every flag of NSQ 1.3 under its own name and default. Source: NSQ's options."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_network
from typing import ClassVar
from urllib.parse import urlsplit

from flintmq.errors import OptionError
from flintmq.net.log import LOG_FILE_HELP
from flintmq.net.origin import check_origins
from flintmq.options import (
    HOUR,
    MINUTE,
    SECOND,
    Address,
    Choice,
    Duration,
    Integer,
    Items,
    Options,
    StartRefused,
    Switch,
    Text,
    option,
)

ROLES = ("none", "read", "operate", "admin")
"""Each may do what those before it may."""

SERIES_MAX = 16384

_LOGGING = "Logging"
_PAGES = "Pages"
_TLS = "TLS of the pages"
_DAEMONS = "Daemons behind it"
_VISITORS = "Who may do what"
_HISTORY = "History"
_GRAPHITE = "Graphite"


@dataclass(frozen=True, kw_only=True)
class NsqadminOptions(Options):
    """The flags of nsqadmin; each attribute is the flag of the same name."""

    program: ClassVar[str] = "nsqadmin"
    summary: ClassVar[str] = "nsqadmin shows nsqd and nsqlookupd as web pages, and changes them."

    log_level: str = option(
        Choice(("debug", "info", "warn", "error", "fatal")), "info", "how much to log on stderr", group=_LOGGING
    )
    log_prefix: str = option(Text(), "[nsqadmin] ", "what every log line starts with", group=_LOGGING)
    log_file: str = option(Text("FILE"), "", LOG_FILE_HELP, group=_LOGGING, origin="flintmq", default_text="stderr")
    verbose: bool = option(Switch(), False, "has no effect, use --log-level", group=_LOGGING, deprecated=True)

    http_address: str = option(
        Address(may_be_empty=True),
        "0.0.0.0:4171",
        "where to listen for browsers and scripts; empty, with --https-address, for HTTPS alone",
        group=_PAGES,
    )
    https_address: str = option(
        Address(may_be_empty=True),
        "",
        "where to listen for HTTPS; needs --tls-cert and --tls-key",
        group=_PAGES,
        origin="flintmq",
        default_text="nowhere",
    )
    base_path: str = option(Text("PATH"), "/", "path that all pages are below, behind a proxy", group=_PAGES)
    dev_static_dir: str = option(
        Text("DIR"), "", "directory of files that are served in place of those below /static", group=_PAGES,
        default_text="none",
    )  # fmt: skip

    lookupd_http_address: tuple[str, ...] = option(
        Items(Address(to_connect=True)),
        (),
        "a nsqlookupd; its nsqd are shown",
        group=_DAEMONS,
        key="nsqlookupd_http_addresses",
        default_text="none",
    )
    nsqd_http_address: tuple[str, ...] = option(
        Items(Address(to_connect=True)),
        (),
        "an nsqd, where there is no nsqlookupd",
        group=_DAEMONS,
        key="nsqd_http_addresses",
        default_text="none",
    )
    http_client_connect_timeout_ns: int = option(
        Duration(1), 2 * SECOND, "the most time that connecting to a daemon takes", group=_DAEMONS
    )
    http_client_request_timeout_ns: int = option(
        Duration(1),
        5 * SECOND,
        "the most time that a change takes, a question to Graphite, or the figures of all topics of an nsqd that "
        "answers /ping; no page waits longer than 2s for a daemon that answers nothing",
        group=_DAEMONS,
    )
    http_client_tls_insecure_skip_verify: bool = option(
        Switch(), False, "trust every certificate of a daemon", group=_DAEMONS
    )
    http_client_tls_root_ca_file: str = option(
        Text("FILE"), "", "certificate authorities of the daemons", group=_DAEMONS, default_text="those of the system"
    )
    http_client_tls_cert: str = option(
        Text("FILE"), "", "certificate shown to the daemons", group=_DAEMONS, default_text="none"
    )
    http_client_tls_key: str = option(
        Text("FILE"), "", "private key of that certificate, without a passphrase", group=_DAEMONS, default_text="none"
    )
    http_client_token_file: str = option(
        Text("FILE"),
        "",
        "file with the token for daemons that ask for permissions; read again when it changes",
        group=_DAEMONS,
        origin="flintmq",
        default_text="none",
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
        Choice(("", "require-verify")),
        "",
        "require-verify - browsers and scripts need a certificate issued by --tls-root-ca-file, or by an authority of "
        "the system without it",
        group=_TLS,
        origin="flintmq",
    )
    tls_root_ca_file: str = option(
        Text("FILE"),
        "",
        "authorities of visitors; read again when it changes",
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
    notification_http_endpoint: str = option(
        Text("URL"), "", "gets a POST of each change that somebody makes", group=_DAEMONS, default_text="none"
    )

    acl_http_header: str = option(
        Text("NAME"), "X-Forwarded-User", "header in which a proxy names the user", group=_VISITORS
    )
    admin_user: tuple[str, ...] = option(
        Items(Text("NAME")),
        (),
        "a user that may change things, as that header names it; with none, and no --users-file, everybody may",
        group=_VISITORS,
        key="admin_users",
        default_text="none",
    )
    acl_from_cidr: tuple[str, ...] = option(
        Items(Text("CIDR")),
        (),
        "networks of the proxies whose header counts; if given, the last entry of their X-Forwarded-For is the address "
        "by which whoever guesses is slowed down",
        group=_VISITORS,
        origin="flintmq",
        default_text="all, as with NSQ: then whoever reaches nsqadmin past the proxy is who he says",
    )
    users_file: str = option(
        Text("FILE"),
        "",
        "users with their roles, by password, by token, or by the proxy's header, in TOML or JSON (*.json); read again "
        "when it changes",
        group=_VISITORS,
        origin="flintmq",
        default_text="none",
    )
    default_role: str = option(
        Choice(("", *ROLES)),
        "",
        "what somebody may do who is no known user: none - log in; read - look; operate - also create, pause, requeue; "
        "admin - everything",
        group=_VISITORS,
        origin="flintmq",
        default_text="none with --users-file, read with --admin-user, else admin",
    )
    bodies_role: str = option(
        Choice(("read", "operate", "admin")),
        "operate",
        "the least role that sees bodies and headers of messages",
        group=_VISITORS,
        origin="flintmq",
    )
    session_lifetime_ns: int = option(
        Duration(MINUTE, 30 * 24 * HOUR), 12 * HOUR, "how long a log-in lasts", group=_VISITORS, origin="flintmq"
    )
    audit_log: str = option(
        Text("FILE"),
        "",
        "file to append every change, log-in and refusal to, one JSON object a line",
        group=_VISITORS,
        origin="flintmq",
        default_text="only the log",
    )
    allow_config_from_cidr: str = option(
        Text("CIDR"), "127.0.0.1/8", "network from which /config may be used; empty for all", group=_VISITORS
    )
    http_allow_origin: tuple[str, ...] = option(
        Items(Text("ORIGIN")),
        (),
        "origin of another web page that may use the JSON API, such as https://wiki.example; also what nsqadmin is "
        "called in the browser, where a proxy says another Host",
        group=_VISITORS,
        origin="flintmq",
        default_text="none",
    )

    history_path: str = option(
        Text("FILE"),
        "",
        "file that keeps the figures for charts over a restart, about 18 KiB for each series",
        group=_HISTORY,
        origin="flintmq",
        default_text="a temporary file",
    )
    history_series: int = option(
        Integer(0, SERIES_MAX),
        3072,
        "series with a history: all together, nodes, topics, then channels, the busiest first; 0 for no history",
        group=_HISTORY,
        origin="flintmq",
    )

    graphite_url: str = option(Text("URL"), "", "Graphite", group=_GRAPHITE, default_text="none")
    proxy_graphite: bool = option(Switch(), False, "fetch Graphite's pictures for the browsers", group=_GRAPHITE)
    statsd_counter_format: str = option(
        Text(), "stats.counters.%s.count", "how statsd names counters; empty for the bare name", group=_GRAPHITE
    )
    statsd_gauge_format: str = option(
        Text(), "stats.gauges.%s", "how statsd names gauges; empty for the bare name", group=_GRAPHITE
    )
    statsd_prefix: str = option(
        Text(), "nsq.%s", "what names begin with, as nsqd was told; %s is its host", group=_GRAPHITE
    )
    statsd_interval_ns: int = option(
        Duration(SECOND), MINUTE, "between two reports of nsqd, as it was told", group=_GRAPHITE
    )

    def check_together(self) -> None:
        if self.nsqd_http_address and self.lookupd_http_address:
            refused = "use --nsqd-http-address or --lookupd-http-address not both"
            raise StartRefused("nsqd_http_address", self.nsqd_http_address, refused, "argument")
        if self.http_client_tls_cert and not self.http_client_tls_key:
            refused = "--http-client-tls-key must be specified with --http-client-tls-cert"
            raise StartRefused("http_client_tls_cert", self.http_client_tls_cert, refused, "argument")
        if self.http_client_tls_key and not self.http_client_tls_cert:
            refused = "--http-client-tls-cert must be specified with --http-client-tls-key"
            raise StartRefused("http_client_tls_key", self.http_client_tls_key, refused, "argument")
        self._check_https()
        if self.allow_config_from_cidr:
            self._check_network("allow_config_from_cidr", self.allow_config_from_cidr)
        for each in self.acl_from_cidr:
            self._check_network("acl_from_cidr", each)
        for name in ("graphite_url", "notification_http_endpoint"):
            self._check_url(name, getattr(self, name))
        if self.proxy_graphite and not self.graphite_url:
            raise OptionError("proxy_graphite", True, "it needs --graphite-url as well", "argument")
        if not self.acl_http_header.replace("-", "").replace("_", "").isalnum() or not self.acl_http_header.isascii():
            raise OptionError("acl_http_header", self.acl_http_header, "the name of an HTTP header", "argument")
        for name in ("statsd_counter_format", "statsd_gauge_format", "statsd_prefix"):
            value = getattr(self, name)
            if value.replace("%s", "", 1).count("%"):
                raise OptionError(name, value, "text with at most one %, as %s", "argument")
        if set(self.base_path) & set("?#\\ \t%") or not self.base_path.isascii():
            raise OptionError("base_path", self.base_path, "a path such as /nsqadmin", "argument")
        check_origins(self.http_allow_origin)

    def _check_https(self) -> None:
        if not (self.http_address or self.https_address):
            allowed = "only --https-address can be listened on in its place: give that"
            raise OptionError("http_address", self.http_address, allowed, "argument")
        if self.https_address and not (self.tls_cert and self.tls_key):
            raise OptionError("https_address", self.https_address, "it needs --tls-cert and --tls-key", "argument")
        for name in ("tls_cert", "tls_key", "tls_client_auth_policy", "tls_root_ca_file"):
            if getattr(self, name) and not self.https_address:
                allowed = "it is for HTTPS: give --https-address as well"
                raise OptionError(name, getattr(self, name), allowed, "argument")
        if self.tls_root_ca_file and not self.tls_client_auth_policy:
            allowed = "it is for --tls-client-auth-policy=require-verify: give that as well"
            raise OptionError("tls_root_ca_file", self.tls_root_ca_file, allowed, "argument")

    def check_start(self) -> None:
        """Refuse to look at nobody.

        Raises:
            StartRefused: neither nsqlookupd nor nsqd are named.
        """
        if not self.nsqd_http_address and not self.lookupd_http_address:
            refused = "--nsqd-http-address or --lookupd-http-address required"
            raise StartRefused("lookupd_http_address", (), refused, "argument")

    def _check_network(self, name: str, value: str) -> None:
        try:
            ip_network(value, strict=False)
        except ValueError as error:
            refused = f"failed to parse --{name.replace('_', '-')} ({value}) - {error}"
            raise StartRefused(name, value, refused, "argument") from None

    def _check_url(self, name: str, value: str) -> None:
        if not value:
            return
        try:
            split = urlsplit(value)
            is_good = split.scheme in ("http", "https") and bool(split.hostname) and split.port != 0
        except ValueError:
            is_good = False
        if not is_good:
            raise OptionError(name, value, "a URL such as http://graphite.example:8080", "argument")

    @property
    def base(self) -> str:
        """The base path without a slash at its end; empty for ``/``."""
        words = [word for word in self.base_path.split("/") if word not in ("", ".")]
        return "".join(f"/{word}" for word in words)

    @property
    def role_of_others(self) -> str:
        """The role of somebody who is no known user."""
        return self.default_role or ("none" if self.users_file else "read" if self.admin_user else "admin")


__all__ = ["ROLES", "SERIES_MAX", "NsqadminOptions"]
