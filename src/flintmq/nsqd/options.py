"""The options of nsqd: every flag of NSQ 1.3 under its own name and default, and ours.

Rows marked ``implemented=False`` are known, documented and refused until their feature exists.
Source: NSQ's options.
"""

from __future__ import annotations

import binascii
import hashlib
from dataclasses import dataclass
from ipaddress import ip_network
from typing import ClassVar

from flintmq.errors import OptionError
from flintmq.limits import ATTEMPTS_MAX, BATCH_SIZE_MAX, MEMORY_BUDGET_MIN, SEQUENCE_MAX
from flintmq.names import is_valid_name
from flintmq.net.address import split_address
from flintmq.net.http_auth import check_options as check_http_auth
from flintmq.net.http_envelope import NSQ, STYLES
from flintmq.net.log import LOG_FILE_HELP
from flintmq.net.origin import check_origins
from flintmq.options import (
    HOUR,
    MILLISECOND,
    MINUTE,
    SECOND,
    Address,
    Choice,
    Duration,
    Integer,
    Items,
    Number,
    Options,
    StartRefused,
    Switch,
    Text,
    option,
)
from flintmq.settings import DEAD_LETTER_TOPIC, OVERFLOWS, REFUSE, TTL_MS_MAX, Settings, check_node

NODE_ID_COUNT = 1024
MAX_MSG_SIZE_MAX = BATCH_SIZE_MAX - 1024  # one message with its headers must fit one batch of the log
INT32_MAX = (1 << 31) - 1  # sizes and counts are int32 on the wire
TOPOLOGY_AWARE = "topology-aware-consumption"
DEFAULT_CLUSTER = "default"
DEFAULT_PEER_ADDRESS = "0.0.0.0:4153"

_LOGGING = "Logging"
_OPERATION = "Operation"
_ADDRESSES = "Addresses"
_STORAGE = "Storage"
_MESSAGES = "Messages"
_LIMITS = "Limits of topics"
_CLIENTS = "Clients"
_SCAN = "Queue scan"
_STATSD = "statsd"
_LATENCY = "End-to-end latency"
_TRACE = "Trace"
_AUTH = "Authorisation"
_HTTP_AUTH = "HTTP clients"
_TOPOLOGY = "Topology"
_TLS = "TLS"
_CLUSTER = "Cluster"
_COMPRESSION = "Compression"


def auth_url(address: str) -> str:
    """Return where an auth server is asked: a URL as it is, anything else as NSQ completes it."""
    return address if "://" in address else f"http://{address}/auth"


@dataclass(frozen=True)
class _AuthServer(Text):
    """``host:port`` or a URL; one with a user or a query is made a URL here, of which these two are not shown."""

    placeholder_text: str = "HOST:PORT"

    def from_text(self, text: str) -> str:
        return auth_url(text) if "@" in text or "?" in text else text


@dataclass(frozen=True, kw_only=True)
class NsqdOptions(Options):
    """The flags of nsqd; each attribute is the flag of the same name."""

    program: ClassVar[str] = "nsqd"
    summary: ClassVar[str] = "nsqd receives messages, stores them and delivers them to consumers."

    log_level: str = option(
        Choice(("debug", "info", "warn", "error", "fatal")), "info", "how much to log on stderr", group=_LOGGING
    )
    log_prefix: str = option(Text(), "[nsqd] ", "what every log line starts with", group=_LOGGING)
    log_file: str = option(Text("FILE"), "", LOG_FILE_HELP, group=_LOGGING, origin="flintmq", default_text="stderr")
    verbose: bool = option(Switch(), False, "has no effect, use --log-level", group=_LOGGING, deprecated=True)
    worker_id: bool = option(Switch(), False, "has no effect, use --node-id", group=_LOGGING, deprecated=True)

    tcp_address: str = option(
        Address(may_be_path=True), "0.0.0.0:4150", "where to listen for TCP clients", group=_ADDRESSES
    )
    http_address: str = option(
        Address(may_be_empty=True, may_be_path=True),
        "0.0.0.0:4151",
        'where to listen for HTTP clients, "" for nowhere',
        group=_ADDRESSES,
    )
    https_address: str = option(
        Address(may_be_empty=True, may_be_path=True),
        "0.0.0.0:4152",
        "where to listen for HTTPS clients; nothing listens there without --tls-cert and --tls-key",
        group=_ADDRESSES,
    )
    http_style: str = option(
        Choice(STYLES),
        NSQ,
        "how /stats, /pub, /mpub, /info answer: nsq - as NSQ, unless a request has a parameter of Youzan's NSQ alone; "
        "youzan - as that, in its envelope where a request does not accept application/vnd.nsq; version=1.0",
        group=_ADDRESSES,
        origin="flintmq",
    )
    broadcast_address: str = option(
        Text("HOST"),
        "",
        "the host that nsqlookupd tells clients to connect to",
        group=_ADDRESSES,
        default_text="the name of this host",
    )
    broadcast_tcp_port: int = option(
        Integer(0, 65535, "port"),
        0,
        "the TCP port that nsqlookupd tells clients, 0 for the one that is listened on",
        group=_ADDRESSES,
    )
    broadcast_http_port: int = option(
        Integer(0, 65535, "port"),
        0,
        "the HTTP port that nsqlookupd tells clients, 0 for the one that is listened on, or that for HTTPS without it",
        group=_ADDRESSES,
    )
    lookupd_tcp_address: tuple[str, ...] = option(
        Items(Address(to_connect=True, may_be_path=True)),
        (),
        "a nsqlookupd to register with",
        group=_ADDRESSES,
        key="nsqlookupd_tcp_addresses",
        default_text="none",
    )
    node_id: int | None = option(
        Integer(0, NODE_ID_COUNT - 1, refusal="--node-id must be [0,1024)"),
        None,
        "number of this node; accepted for NSQ's sake, message ids do not depend on it",
        group=_ADDRESSES,
        key="id",
        default_text="a hash of the name of this host",
    )
    max_connections: int = option(
        Integer(0),
        0,
        "most client connections at a time, 0 for as many as the limit of open files allows",
        group=_ADDRESSES,
        origin="flintmq",
    )

    memory_budget: int = option(
        Integer(0, SEQUENCE_MAX, "bytes"),
        0,
        "most memory that clients can make nsqd use: output they do not read, #ephemeral topics, publishes under way, "
        "bodies that are not complete, caches and deferred messages, each with its share; at least 67108864, 0 for a "
        "quarter of the memory of the machine or, where there is one, of the limit of the control group",
        group=_OPERATION,
        origin="flintmq",
    )
    allow_config_from_cidr: tuple[str, ...] = option(
        Items(Text("CIDR")),
        ("127.0.0.1/8", "::1/128"),
        'addresses from which PUT /config, /loglevel/set and /debug are answered, "" for all',
        group=_OPERATION,
        origin="flintmq",
    )
    auto_create_topics: bool = option(
        Switch(),
        True,
        "create a topic when it is first published to or subscribed to; false: E_TOPIC_NOT_EXIST, until /topic/create "
        "at nsqd or nsqlookupd has made it",
        group=_OPERATION,
        origin="flintmq",
    )
    auto_create: str = option(
        Choice(("cluster", "local")),
        "cluster",
        "in a cluster: who makes a topic when it is first published or subscribed to: the cluster, which keeps it on "
        "several nodes, or this node alone, as NSQ does",
        group=_OPERATION,
        origin="flintmq",
    )
    drain_timeout_ns: int = option(
        Duration(),
        0,
        "longest time that draining (POST /drain, SIGUSR1) waits for consumers, 0 for as long as it takes; what is "
        "left stays on disk",
        group=_OPERATION,
        origin="flintmq",
    )
    drain_on_sigterm: bool = option(
        Switch(),
        False,
        "drain on SIGTERM as well; the second SIGTERM stops at once",
        group=_OPERATION,
        origin="flintmq",
    )

    data_path: str = option(
        Text("DIRECTORY"),
        "",
        "directory of the message log; it must exist",
        group=_STORAGE,
        default_text="the current directory",
    )
    accept_lost_channels: bool = option(
        Switch(),
        False,
        "start although it is lost which channels there were, because channels.db and channels.list are both damaged "
        "or gone: those that either of them names begin again with the oldest message that is stored, others are gone",
        group=_STORAGE,
        origin="flintmq",
    )
    durability: str = option(
        Choice(("fsync", "os", "interval")),
        "fsync",
        "what a message survives once its publisher has read OK: fsync - a power loss; os - the end of this process, "
        "however it ends; interval - as os, and a power loss after --sync-every messages or --sync-timeout",
        group=_STORAGE,
        origin="flintmq",
    )
    sync_every: int = option(
        Integer(1, unit="messages"), 2500, "with --durability=interval: messages between two syncs", group=_STORAGE
    )
    sync_timeout_ns: int = option(
        Duration(MILLISECOND), 2 * SECOND, "with --durability=interval: longest time between two syncs", group=_STORAGE
    )
    max_bytes_per_file: int = option(
        Integer(1, unit="bytes"),
        104857600,
        "size at which a file of the log is closed and the next begun",
        group=_STORAGE,
    )
    mem_queue_size: int = option(
        Integer(0, unit="messages"),
        10000,
        "most messages an #ephemeral topic or channel holds; all others are on disk",
        group=_STORAGE,
    )
    retention_time_ns: int = option(
        Duration(),
        0,
        "how long messages are kept after every channel has finished them, 0 for no longer than that",
        group=_STORAGE,
        origin="flintmq",
    )
    retention_bytes: int = option(
        Integer(0, unit="bytes"),
        0,
        "most bytes per partition of messages that every channel has finished, 0 for no limit but --retention-time",
        group=_STORAGE,
        origin="flintmq",
    )

    msg_timeout_ns: int = option(
        Duration(MILLISECOND),
        MINUTE,
        "how long a consumer has to finish a message before others get it",
        group=_MESSAGES,
    )
    max_msg_timeout_ns: int = option(
        Duration(MILLISECOND), 15 * MINUTE, "longest time a consumer can ask for and TOUCH up to", group=_MESSAGES
    )
    max_msg_size: int = option(
        Integer(1, MAX_MSG_SIZE_MAX, "bytes"), 1048576, "size of the largest message", group=_MESSAGES
    )
    max_body_size: int = option(
        Integer(1, INT32_MAX, "bytes"), 5242880, "size of the largest command body, such as MPUB's", group=_MESSAGES
    )
    max_req_timeout_ns: int = option(Duration(), HOUR, "longest delay of REQ and DPUB", group=_MESSAGES)

    max_attempts: int = option(
        Integer(0, ATTEMPTS_MAX),
        0,
        "deliveries after which a message goes to the dead-letter topic, 0 for no limit",
        group=_LIMITS,
        origin="flintmq",
    )
    dead_letter_topic: str = option(
        Text("TOPIC"),
        DEAD_LETTER_TOPIC,
        "name of the dead-letter topic, {topic} stands for the topic of the message; where that is too long to be a "
        "name, --max-attempts has no effect",
        group=_LIMITS,
        origin="flintmq",
    )
    message_ttl_ns: int = option(
        Duration(0, TTL_MS_MAX * MILLISECOND),
        0,
        "how old a message may be when it is delivered, 0 for any age",
        group=_LIMITS,
        origin="flintmq",
    )
    topic_max_messages: int = option(
        Integer(0, SEQUENCE_MAX, "messages"),
        0,
        "most messages that a channel, or a topic without channels, has not finished, 0 for no limit",
        group=_LIMITS,
        origin="flintmq",
    )
    topic_max_bytes: int = option(
        Integer(0, SEQUENCE_MAX, "bytes"),
        0,
        "as --topic-max-messages, in bytes",
        group=_LIMITS,
        origin="flintmq",
    )
    overflow: str = option(
        Choice(OVERFLOWS),
        REFUSE,
        "what happens beyond --topic-max-messages and --topic-max-bytes: refuse - publishing is refused; drop_oldest - "
        "the oldest waiting messages are dropped",
        group=_LIMITS,
        origin="flintmq",
    )

    max_heartbeat_interval_ns: int = option(
        Duration(SECOND), MINUTE, "longest time between heartbeats that a client can ask for", group=_CLIENTS
    )
    max_rdy_count: int = option(Integer(1, INT32_MAX), 2500, "highest RDY count", group=_CLIENTS)
    max_output_buffer_size: int = option(
        Integer(64, INT32_MAX, "bytes"), 65536, "largest output buffer that a client can ask for", group=_CLIENTS
    )
    max_output_buffer_timeout_ns: int = option(
        Duration(),
        30 * SECOND,
        "longest flush interval that a client can ask for; messages are flushed at once whatever it asks for",
        group=_CLIENTS,
    )
    min_output_buffer_timeout_ns: int = option(
        Duration(), 25 * MILLISECOND, "shortest flush interval that a client can ask for", group=_CLIENTS
    )
    output_buffer_timeout_ns: int = option(
        Duration(), 250 * MILLISECOND, "flush interval of clients that ask for none", group=_CLIENTS
    )
    max_channel_consumers: int = option(Integer(0), 0, "most consumers of one channel, 0 for no limit", group=_CLIENTS)

    queue_scan_worker_pool_max: int = option(
        Integer(1), 4, "has no effect: timeouts are kept in order, nothing is scanned", group=_SCAN
    )
    queue_scan_selection_count: int = option(
        Integer(1), 20, "has no effect: timeouts are kept in order, nothing is scanned", group=_SCAN
    )

    statsd_address: str = option(
        Address(may_be_empty=True),
        "",
        "statsd daemon to send counters to over UDP",
        group=_STATSD,
        default_text="none",
    )
    statsd_interval_ns: int = option(
        Duration(MILLISECOND),
        MINUTE,
        "time between two reports",
        group=_STATSD,
    )
    statsd_mem_stats: bool = option(
        Switch(),
        True,
        "report memory and garbage collection too",
        group=_STATSD,
    )
    statsd_prefix: str = option(Text(), "nsq.%s", "prefix of keys, %s is the host", group=_STATSD)
    statsd_udp_packet_size: int = option(
        Integer(1, 65507, "bytes"),
        508,
        "size of the largest datagram",
        group=_STATSD,
    )
    statsd_exclude_ephemeral: bool = option(
        Switch(),
        False,
        "leave out #ephemeral topics and channels",
        group=_STATSD,
    )

    e2e_processing_latency_percentile: tuple[float, ...] = option(
        Items(Number(0, 1, "invalid E2E processing latency percentile")),
        (),
        "a percentile of the time from publishing to FIN to keep, such as 0.99",
        group=_LATENCY,
        key="e2e_processing_latency_percentiles",
        default_text="none",
    )
    e2e_processing_latency_window_time_ns: int = option(
        Duration(SECOND),
        10 * MINUTE,
        "how far back percentiles look",
        group=_LATENCY,
    )

    trace_topic: str = option(
        Text("TOPIC"),
        "nsqd_trace",
        "topic that events of traced messages are published to, see POST /message/trace/enable",
        group=_TRACE,
        origin="flintmq",
    )
    trace_max_rate: int = option(
        Integer(1, INT32_MAX, "events"),
        20000,
        "most events a second that are recorded; when more happens, only some messages are followed",
        group=_TRACE,
        origin="flintmq",
    )

    auth_http_address: tuple[str, ...] = option(
        Items(_AuthServer()),
        (),
        "an HTTP server that says what a client may do",
        group=_AUTH,
        key="auth_http_addresses",
        default_text="none",
    )
    auth_http_request_method: str = option(
        Choice(("get", "post"), refusal="--auth-http-request-method must be post or get"),
        "get",
        "how that server is asked; the secret stands in the URL with get, in the body with post",
        group=_AUTH,
    )
    http_client_connect_timeout_ns: int = option(
        Duration(MILLISECOND), 2 * SECOND, "longest wait for a connection to it", group=_AUTH
    )
    http_client_request_timeout_ns: int = option(
        Duration(MILLISECOND), 5 * SECOND, "longest wait for its answer", group=_AUTH
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
    lookupd_http_token_file: str = option(
        Text("FILE"),
        "",
        "file with the token for questions to the HTTP port of nsqlookupd; read again when it changes",
        group=_HTTP_AUTH,
        origin="flintmq",
        default_text="none",
    )

    topology_region: str = option(
        Text(), "", "the region this node is in, which clients and nsqlookupd are told", group=_TOPOLOGY
    )
    topology_zone: str = option(
        Text(), "", "the zone this node is in, which clients and nsqlookupd are told", group=_TOPOLOGY
    )
    enable_experiment: tuple[str, ...] = option(
        Items(Choice((TOPOLOGY_AWARE,))),
        (),
        "an experimental feature to turn on: topology-aware-consumption - consumers that are ready get messages in "
        "this order: those of this node's zone, those of its region, the others",
        group=_TOPOLOGY,
        default_text="none",
    )

    cluster_store: tuple[str, ...] = option(
        Items(Text("ADDRESS")),
        (),
        "address of the coordination store of the cluster that this node belongs to: of the members of an etcd, or of "
        "a nsqlookupd that keeps a store",
        group=_CLUSTER,
        origin="flintmq",
        default_text="none",
    )
    cluster_store_token_file: str = option(
        Text("FILE"),
        "",
        "file with the token for the nsqlookupd that keeps the store; read again when it changes",
        group=_CLUSTER,
        origin="flintmq",
        default_text="none",
    )
    cluster_store_password_file: str = option(
        Text("FILE"),
        "",
        "file with the password of the user that the addresses of the store name; read again when it changes",
        group=_CLUSTER,
        origin="flintmq",
        default_text="none",
    )
    cluster_store_root_ca_file: str = option(
        Text("FILE"),
        "",
        "certificate authorities of the store; read again when it changes",
        group=_CLUSTER,
        origin="flintmq",
        default_text="those of the system",
    )
    cluster_store_cert: str = option(
        Text("FILE"),
        "",
        "certificate shown to the store; read again when it changes",
        group=_CLUSTER,
        origin="flintmq",
        default_text="none",
    )
    cluster_store_key: str = option(
        Text("FILE"),
        "",
        "private key of that certificate, without a passphrase",
        group=_CLUSTER,
        origin="flintmq",
        default_text="none",
    )
    cluster: str = option(
        Text("NAME"), DEFAULT_CLUSTER, "name of the cluster in its store", group=_CLUSTER, origin="flintmq"
    )
    peer_address: str = option(
        Address(),
        DEFAULT_PEER_ADDRESS,
        "address where the other nodes of the cluster reach this one",
        group=_CLUSTER,
        origin="flintmq",
    )
    cluster_secret_file: str = option(
        Text("FILE"),
        "",
        "file with the secret that all nodes of the cluster share, at least 16 bytes; without it and without "
        "--cluster-tls-cert whoever reaches --peer-address is taken for a node",
        group=_CLUSTER,
        origin="flintmq",
        default_text="none",
    )
    cluster_tls_cert: str = option(
        Text("FILE"),
        "",
        "certificate that this node shows the others of the cluster, which names its --broadcast-address; nodes that "
        "show none are refused; read again when it changes",
        group=_CLUSTER,
        origin="flintmq",
        default_text="none",
    )
    cluster_tls_key: str = option(
        Text("FILE"),
        "",
        "private key of that certificate, without a passphrase",
        group=_CLUSTER,
        origin="flintmq",
        default_text="none",
    )
    cluster_tls_root_ca: str = option(
        Text("FILE"),
        "",
        "certificate authorities of the nodes: whoever has a certificate of one of them is a node",
        group=_CLUSTER,
        origin="flintmq",
        default_text="none",
    )

    tls_cert: str = option(
        Text("FILE"), "", "certificate of this server and its chain; read again when it changes", group=_TLS
    )
    tls_key: str = option(Text("FILE"), "", "private key of that certificate, without a passphrase", group=_TLS)
    tls_client_auth_policy: str = option(
        Choice(("", "require", "require-verify")),
        "",
        "require - clients need a certificate, whoever issued it; require-verify - one issued by --tls-root-ca-file, "
        "or by an authority of the system without it; either makes TLS required",
        group=_TLS,
    )
    tls_root_ca_file: str = option(
        Text("FILE"), "", "authorities of clients and of auth servers; read again when it changes", group=_TLS
    )
    tls_required: str = option(
        Choice(
            ("false", "true", "tcp-https"),
            {"f": "false", "0": "false", "t": "true", "1": "true"},
            bare_word="true",
        ),
        "false",
        "whether clients must use TLS: true - on every port; tcp-https - on all but the HTTP port",
        group=_TLS,
    )
    tls_min_version: str = option(
        Choice(("tls1.0", "tls1.1", "tls1.2", "tls1.3"), {"": "tls1.2"}),
        "tls1.2",
        "oldest version of TLS that is accepted; NSQ's default is tls1.0, which is broken",
        group=_TLS,
    )

    deflate: bool = option(Switch(), True, "let clients ask for deflate", group=_COMPRESSION)
    max_deflate_level: int = option(
        Integer(1, 9, refusal="--max-deflate-level must be [1,9]"),
        6,
        "highest deflate level a client can ask for",
        group=_COMPRESSION,
    )
    snappy: bool = option(Switch(), True, "let clients ask for snappy", group=_COMPRESSION)

    @property
    def settings(self) -> Settings:
        """The settings that topics inherit."""
        return Settings(
            max_attempts=self.max_attempts or None,
            dead_letter_topic=None if self.dead_letter_topic == DEAD_LETTER_TOPIC else self.dead_letter_topic,
            ttl_ms=-(-self.message_ttl_ns // MILLISECOND) or None,
            max_messages=self.topic_max_messages or None,
            max_bytes=self.topic_max_bytes or None,
            overflow=None if self.overflow == REFUSE else self.overflow,
        )

    def check_together(self) -> None:
        if not is_valid_name(self.trace_topic):
            allowed = "it must be 1 to 64 characters of .a-zA-Z0-9_-"
            raise OptionError("trace_topic", self.trace_topic, allowed, "argument")
        for each in self.allow_config_from_cidr:
            try:
                ip_network(each, strict=False)
            except ValueError:
                allowed = "it must be addresses such as 10.0.0.0/8"
                raise OptionError("allow_config_from_cidr", each, allowed, "argument") from None
        if not (self.tls_cert and self.tls_key):
            allowed = "cannot require TLS client connections without TLS key and cert"
            if self.tls_required != "false":
                raise StartRefused("tls_required", self.tls_required, allowed, "argument")
            if self.tls_client_auth_policy:
                raise StartRefused("tls_client_auth_policy", self.tls_client_auth_policy, allowed, "argument")
            if self.tls_cert or self.tls_key:
                attribute, missing = ("tls_cert", "--tls-key") if self.tls_cert else ("tls_key", "--tls-cert")
                raise OptionError(attribute, getattr(self, attribute), f"it needs {missing} as well", "argument")
        if 0 < self.memory_budget < MEMORY_BUDGET_MIN:
            allowed = f"it must be 0 or at least {MEMORY_BUDGET_MIN}"
            raise OptionError("memory_budget", str(self.memory_budget), allowed, "argument")
        self._check_auth_servers()
        check_http_auth(self)
        check_origins(self.http_allow_origin)
        self._check_cluster()
        refusal = check_node(self.settings)
        if refusal is not None:
            raise OptionError("dead_letter_topic", self.dead_letter_topic, refusal, "argument")

    def _check_auth_servers(self) -> None:
        addresses = self.auth_http_address
        if not addresses:
            return
        from flintmq.net.http_exchange import NoAnswer, Request  # for those who have one

        for number, address in enumerate(addresses, 1):
            try:
                Request.to("GET", auth_url(address)).encode()
            except NoAnswer as error:  # which shows nothing of the URL
                what = f"server {number} of {len(addresses)} can never be asked: {error.reason}"
                raise OptionError("auth_http_address", "", what, "argument") from None

    def _check_cluster(self) -> None:
        if not self.cluster_store:
            for attribute, default in (
                ("auto_create", "cluster"),
                ("cluster", DEFAULT_CLUSTER),
                ("peer_address", DEFAULT_PEER_ADDRESS),
                ("cluster_secret_file", ""),
                ("cluster_tls_cert", ""),
                ("cluster_tls_key", ""),
                ("cluster_tls_root_ca", ""),
                ("cluster_store_token_file", ""),
                ("cluster_store_password_file", ""),
                ("cluster_store_root_ca_file", ""),
                ("cluster_store_cert", ""),
                ("cluster_store_key", ""),
            ):
                value = getattr(self, attribute)
                if value != default:
                    raise OptionError(attribute, value, "it needs --cluster-store as well", "argument")
            return
        from flintmq.net.cluster_store import check_options  # only nodes of a cluster need it

        check_options(self)
        address = split_address(self.peer_address)
        if address is None:
            what = "it must be host:port: other nodes are on other machines"
            raise OptionError("peer_address", self.peer_address, what, "argument")
        files = ("cluster_tls_cert", "cluster_tls_key", "cluster_tls_root_ca")
        for attribute in files:
            if any(getattr(self, each) for each in files) and not getattr(self, attribute):
                what = "--cluster-tls-cert, --cluster-tls-key and --cluster-tls-root-ca go together: give all three"
                raise OptionError(attribute, "", what, "argument")


def node_id_of(hostname: str) -> int:
    """Return the node id that NSQ derives from a host name: 0 to 1023."""
    digest = hashlib.md5(hostname.encode(), usedforsecurity=False).digest()
    return binascii.crc32(digest) % NODE_ID_COUNT
