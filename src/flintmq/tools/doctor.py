"""``flintmq doctor``: look at a deployment as a client does, and say what to do about what is wrong.

Rules of this file:

- It only looks: nothing is published, created or subscribed.
- A finding says what was seen and, unless all is well, what to do. One part that does not answer hides no other.
- Every question has a deadline (``--timeout``); nsqd are asked at the same time, at most 32 at once.
- An nsqd whose HTTP port nobody says is asked at the port behind its TCP port, as all commands have it; one that wants
  TLS there, at the HTTPS port that it names. An nsqd of which something was not looked at has a warning that says so.
- The token is shown to the nsqlookupds and nsqd that are named, and to the nsqd that they list; but not in clear to an
  nsqd that was found over HTTPS alone, or whose HTTP port nobody says where options are of TLS. Where there are such
  options it is not shown in clear before it is asked for.
- Two connections of nsqd under one address are two nsqd only while both live: a restart leaves one that is not yet
  known to be dead, and who says anew who it is has two for a moment.
- Exit code 0: it works, perhaps with warnings. 1: somebody will fail.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.metadata
import json
import os
import platform
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar
from urllib.parse import quote

import msgspec

from flintmq.addresses import format_address, shown_url
from flintmq.client.admin.health import store_away, store_read_only, troubles
from flintmq.client.admin.results import ClusterStatus
from flintmq.client.admin.route import Route, Step, wants_tls
from flintmq.client.aio.connection import Connection
from flintmq.client.core.http import ANSWER_SIZE_MAX, no_answer
from flintmq.client.core.topology import NODE_COUNT_MAX, Node, parse_nodes
from flintmq.client.options import ConnectionOptions, http_addresses, system_env, tcp_addresses
from flintmq.client.security import TlsRefused
from flintmq.env import Env
from flintmq.errors import UNREADABLE_JSON, DiscoveryError, FlintError, NsqdError, UsageError
from flintmq.names import listed
from flintmq.net.http_client import HttpClient
from flintmq.net.http_exchange import NoAnswer, Request
from flintmq.net.loop import loop_factory
from flintmq.options import (
    MILLISECOND,
    SECOND,
    Address,
    Duration,
    Items,
    Options,
    Switch,
    Text,
    option,
    read_command,
    version_line,
)
from flintmq.tools.admin import fill_in
from flintmq.tools.secret import secret_of
from flintmq.tools.shell.arguments import LOOKUPD_HTTP_PORT, NSQD_TCP_PORT, VARIABLES, is_on, split_host
from flintmq.tools.shell.secrets import shown_token
from flintmq.version import __version__
from flintmq.wire.client import MessageFailed, Messages

PROGRAM = "flintmq doctor"
CONCURRENT_MAX = 32
CLOCK_TOLERANCE_S = 2.0  # the Date header of HTTP has whole seconds
SLOW_S = 0.5
PORT_END = 65_536
SILENT_NS = 45_000_000_000  # three of nsqd's pings
LOOK_AGAIN_S = 1.0
_NAMED_MAX = 8
_ADDRESS_MAX = 300  # a host name has at most 253 characters

_LOOKUPD_HERE, _NSQD_HERE = "127.0.0.1:4161", "127.0.0.1:4150"
_AS_OTHERS_SAY = {
    "--lookupd": "--lookupd-http-address",
    "--nsqd": "--nsqd-tcp-address",
    "--nsqd-http": "--nsqd-http-address",
}  # how the commands for people spell it
_WHAT, _SECURITY, _HOW = "What to look at", "Security", "How"
OK, NOTE, WARNING, PROBLEM = "ok", "note", "warning", "problem"
_STATUS = msgspec.json.Decoder(ClusterStatus)
_SECURED = "clients need the same; here: --tls, --tls-root-ca-file, --tls-cert, --tls-key, --auth-secret"
_HTTP_NAMED = (
    "name it with --nsqd-http-address=HOST:PORT beside --nsqd-tcp-address; nsqadmin and monitoring need it, too"
)
_HTTPS = "--nsqd-http-address=https://HOST:PORT names where it is asked over TLS"
_TLS_TRUST = "--tls-root-ca-file, --tls-cert, --tls-key say how; nsqadmin and monitoring need the same"
_UNKNOWN = "nothing is known of its disk and its topics"
_DOUBLE = (
    "give each its own --broadcast-address or --broadcast-tcp-port; one nsqd alone is there twice if it names this "
    "nsqlookupd twice, and for some minutes after its machine or network failed"
)
_REFUSALS = {
    401: ("its HTTP API does not know the token", "is it in its --http-auth-tokens-file, and not an old one?"),
    403: ("its HTTP API does not let this token read", "give it the permission read, for all topics"),
    429: ("its HTTP API looks at no token from here: too many were unknown", "wait for a minute; who shows old ones?"),
}
_ACCELERATORS = (
    ("uvloop", "a faster event loop", "pip install 'flintmq[fast]'"),
    ("cramjam", "snappy", "pip install flintmq (it is a dependency)"),
    ("msgspec", "JSON", "pip install flintmq (it is a dependency)"),
    ("httptools", "HTTP", "pip install flintmq (it is a dependency)"),
    ("pyspark", "the Spark source and sink", "pip install 'flintmq[spark]', if you want Spark"),
    ("opentelemetry-api", "tracing", "pip install 'flintmq[otel]', if you want OpenTelemetry"),
)


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(Options):
    """The flags of ``flintmq doctor``."""

    program: ClassVar[str] = "doctor"
    summary: ClassVar[str] = (
        "flintmq doctor looks at a deployment as a client does and says what is wrong and what to do. "
        "It changes nothing."
    )

    lookupd_http_address: tuple[str, ...] = option(
        Items(Text("HOST:PORT")),
        (),
        "a nsqlookupd; its nsqd are looked at too",
        group=_WHAT,
        default_text=f"{_LOOKUPD_HERE}, if no nsqd is named",
    )
    nsqd_tcp_address: tuple[str, ...] = option(
        Items(Address()),
        (),
        "an nsqd that no nsqlookupd has to know",
        group=_WHAT,
        default_text=f"{_NSQD_HERE}, if no nsqlookupd is named",
    )
    nsqd_http_address: tuple[str, ...] = option(
        Items(Text("HOST:PORT")),
        (),
        "the HTTP address of the nsqd that is named, or https://...; of several in the order of --nsqd-tcp-address",
        group=_WHAT,
        default_text="what nsqlookupd says, or the port behind the TCP port",
    )
    topic: str = option(Text("TOPIC"), "", "also look who has this topic, and whether anybody consumes it", group=_WHAT)
    tls: bool = option(Switch(), False, "connect with TLS, and verify", group=_SECURITY)
    tls_root_ca_file: str = option(
        Text("FILE"), "", "PEM file with the authorities to trust", group=_SECURITY, default_text="the system's"
    )
    tls_cert: str = option(Text("FILE"), "", "PEM file with a certificate to show", group=_SECURITY)
    tls_key: str = option(Text("FILE"), "", "PEM file with its key", group=_SECURITY)
    tls_insecure_skip_verify: bool = option(Switch(), False, "trust every certificate", group=_SECURITY)
    auth_secret: str = option(
        Text("REF"), "", "secret for AUTH: env:NAME, file:/path, or itself, which others see", group=_SECURITY
    )
    token: str = option(
        Text("REF"),
        "",
        f"bearer token for HTTP: env:NAME or file:/path; or set {VARIABLES['token']}",
        group=_SECURITY,
        default_text="none",
    )
    token_file: str = option(
        Text("FILE"), "", "with a bearer token for HTTP, in place of --token", group=_SECURITY, default_text="none"
    )
    timeout_ns: int = option(Duration(MILLISECOND), 3 * SECOND, "how long anybody may take to answer", group=_HOW)
    json: bool = option(Switch(), False, "print the findings as JSON, one a line", group=_HOW)

    def check_together(self) -> None:
        """Check what excludes each other.

        Raises:
            UsageError: both of such are given.
        """
        if self.token and self.token_file:
            raise UsageError("--token and --token-file name two tokens: give one of them")
        if self.nsqd_http_address and len(self.nsqd_http_address) != len(self.nsqd_tcp_address):
            raise UsageError("--nsqd-http-address is given once for each --nsqd-tcp-address, in the same order")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: ``ok``, ``note`` (good to know), ``warning`` (works, and will bite), ``problem`` (does not work).
        subject: who it is about.
        text: what was seen.
        advice: what to do; empty when there is nothing to be done.
    """

    level: str
    subject: str
    text: str
    advice: str = ""


@dataclass(slots=True)
class Answer:
    """An HTTP answer; ``took_s`` until its last byte, ``clock_ahead_s`` None when it has no date."""

    status: int
    body: bytes
    took_s: float
    clock_ahead_s: float | None


@dataclass(slots=True)
class Seen:
    """An nsqd: where it is, and which nsqlookupd list it.

    Attributes:
        http: the URL of its HTTP API, where that is named; empty: it is not.
        channels: messages that wait and consumers of each channel, by topic and channel; without topics that it has
            alone where its cluster has others of the same names: nsqlookupd leads nobody there.
    """

    node: Node
    http: str = ""
    listed_by: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    channels: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)


class Doctor:
    """Collects the findings.

    Args:
        options: what to look at.
        env: whose clock the others are compared with.
    """

    def __init__(self, options: DoctorOptions, env: Env) -> None:
        self._env = env
        self._topic = options.topic
        self._lookups = http_addresses(options.lookupd_http_address, "--lookupd-http-address")
        self._nsqd = tcp_addresses(options.nsqd_tcp_address, "--nsqd-tcp-address")
        if not self._lookups and not self._nsqd:
            self._lookups = http_addresses(_LOOKUPD_HERE, "--lookupd-http-address")
            self._nsqd = tcp_addresses(_NSQD_HERE, "--nsqd-tcp-address")
        pairs = zip(options.nsqd_tcp_address, options.nsqd_http_address, strict=False)  # or none of HTTP is named
        self._nsqd_http = {
            tcp_addresses(tcp, "--nsqd-tcp-address")[0]: http_addresses(http, "--nsqd-http-address")[0]
            for tcp, http in pairs
        }
        self._timeout_s = options.timeout_ns / SECOND
        given = argparse.Namespace(
            token=options.token or None,
            token_file=options.token_file or None,
            tls_root_ca_file=options.tls_root_ca_file or None,
            tls_cert=options.tls_cert or None,
            tls_key=options.tls_key or None,
        )
        fill_in(given)
        self._connection_options = ConnectionOptions(
            connect_timeout=self._timeout_s,
            tls=options.tls,
            tls_ca_file=given.tls_root_ca_file,
            tls_cert=given.tls_cert,
            tls_key=given.tls_key,
            tls_verify=not options.tls_insecure_skip_verify,
            auth_secret=_secret(options.auth_secret) or None,
            lookup_token=shown_token(given),
        )
        self._turns = asyncio.Semaphore(CONCURRENT_MAX)
        self._client = HttpClient(idle_max=CONCURRENT_MAX)

    async def examine(self) -> list[Finding]:
        """Look at everything; return the findings, grouped by whom they are about."""
        findings = examine_machine()
        try:
            seen = {address: Seen(_node_of(address), self._nsqd_http.get(address, "")) for address in self._nsqd}
            answered: list[str] = []
            for address, (more, nodes) in zip(
                self._lookups, await asyncio.gather(*map(self._examine_lookup, self._lookups)), strict=True
            ):
                findings += more
                if nodes is None:
                    continue
                answered.append(address)
                for node in nodes:
                    known = seen.setdefault(node.address, Seen(node))
                    known.listed_by.append(address)
                    known.node = node  # it knows the HTTP port as well
            await self._unite(seen)
            if answered and not seen:
                advice = "start nsqd with --lookupd-tcp-address=<the nsqlookupd's host>:4160"
                findings.append(Finding(PROBLEM, "discovery", "no nsqlookupd lists any nsqd", advice))
            await asyncio.gather(*(self._examine_nsqd(each, answered) for each in seen.values()))
            for each in seen.values():
                findings += each.findings
            findings += _unread(seen.values())
            findings += await self._examine_clusters(answered)
            if self._topic:
                findings += await self._examine_topic(answered)
        finally:
            await self._client.close()
        return findings

    async def _unite(self, seen: dict[str, Seen]) -> None:
        """Take an nsqd that is named by another address than it registers with for the one that is listed: it says at
        which one clients are to find it, and the one there says the same of itself, down to when it was started.
        """
        named = [address for address in self._nsqd if address in seen and not seen[address].listed_by]
        if not any(each.listed_by for each in seen.values()):
            return
        for address, info in zip(named, await asyncio.gather(*(self._info(seen[each]) for each in named)), strict=True):
            try:
                registered = format_address(str(info["broadcast_address"]), int(info["tcp_port"]))
            except (KeyError, TypeError, ValueError):
                continue  # it does not say
            listed_as = seen.get(registered)
            if listed_as is not None and listed_as.listed_by and await self._info(listed_as) == info:
                listed_as.http = listed_as.http or seen[address].http
                del seen[address]

    async def _info(self, seen: Seen) -> dict[str, Any]:
        """Return what an nsqd says of itself; empty where that cannot be had."""
        port = seen.node.http_port if seen.listed_by else seen.node.tcp_port + 1
        base = seen.http or f"http://{format_address(seen.node.broadcast_address, port)}"
        try:
            async with self._turns:
                answer, _ = await self._ask(
                    self._route(base, bool(seen.http) or self._may_show_in_clear(seen)), "/info"
                )
            fields = msgspec.json.decode(answer.body, type=dict[str, Any])
        except (OSError, *UNREADABLE_JSON, ValueError):
            return {}
        data = fields.get("data")
        return data if isinstance(data, dict) else fields

    # -- nsqlookupd ----------------------------------------------------------------------------------------------------

    async def _examine_lookup(self, address: str) -> tuple[list[Finding], tuple[Node, ...] | None]:
        subject = f"nsqlookupd {shown_url(address)}"
        try:
            info = await self._get(f"{address}/info")
            found = await self._get(f"{address}/nodes")
            nodes = parse_nodes(found.body) if found.status == 200 else ()
        except (OSError, DiscoveryError) as error:
            advice = "is it running there, and is this its HTTP port (4161), not the TCP port (4160)?"
            return [Finding(PROBLEM, subject, f"cannot be asked: {error}", advice)], None
        findings = [_answered(subject, info)]
        if refused := self._refused(found):
            return [*findings, Finding(PROBLEM, subject, *refused)], None
        if found.status != 200:
            text = f"/nodes is answered with status {found.status}"
            return [*findings, Finding(PROBLEM, subject, text, "is this a nsqlookupd?")], None
        findings += self._clock(subject, info)
        findings.append(Finding(OK if nodes else NOTE, subject, f"lists {_count(len(nodes), 'nsqd', 'nsqd')}"))
        for nsqd, remotes in (await self._doubles(address, found)).items():
            names = listed([remote[:_ADDRESS_MAX] for remote in remotes], _NAMED_MAX)
            text = f"{len(remotes)} nsqd say that they are {nsqd} (from {names}): clients reach one of them"
            findings.append(Finding(PROBLEM, subject, text, _DOUBLE))
        other = await self._try_get(f"{address}/listlookup")
        if other is not None and other.status == 200:
            findings.append(Finding(OK, subject, "has /listlookup: partitions and leaders can be looked up"))
        return findings, nodes

    async def _doubles(self, address: str, nodes: Answer) -> dict[str, list[str]]:
        """Return each address that several nsqd have registered, all of which live, and where they connect from."""
        if not (found := _doubled(nodes.body)):
            return {}
        await asyncio.sleep(LOOK_AGAIN_S)
        again, debug = await self._try_get(f"{address}/nodes"), await self._try_get(f"{address}/debug")
        still = _doubled(again.body) if again is not None and again.status == 200 else found
        heard = _last_heard(debug.body) if debug is not None and debug.status == 200 else {}
        return {nsqd: living for nsqd in found if len(living := _living(still.get(nsqd, []), heard)) > 1}

    # -- cluster -------------------------------------------------------------------------------------------------------

    async def _examine_clusters(self, lookups: Iterable[str]) -> list[Finding]:
        """Look at the state of the cluster, where there is one: as the first nsqlookupd has it that takes part."""
        findings: list[Finding] = []
        named: dict[str, list[str]] = {}
        known: dict[str, ClusterStatus] = {}
        without: list[str] = []
        for address in lookups:
            subject = f"nsqlookupd {shown_url(address)}"
            answer = await self._try_get(f"{address}/cluster/status")
            if answer is None or self._refused(answer):
                findings.append(Finding(NOTE, subject, "its cluster cannot be asked for"))
                continue
            if answer.status != 200:
                without.append(address)
                continue
            try:
                status = _STATUS.decode(answer.body)
            except UNREADABLE_JSON as error:
                text = f"/cluster/status cannot be read: {error}"
                findings.append(Finding(PROBLEM, subject, text, "run releases that fit together"))
                continue
            named.setdefault(status.cluster_id, []).append(shown_url(address))
            known[address] = status
        if not known:
            return findings
        best = min(known.values(), key=lambda status: (bool(status.problem), bool(store_away(status))))
        if len(named) > 1:
            text = f"nsqlookupds are of different clusters: {'; '.join(map(', '.join, named.values()))}"
            findings.append(Finding(PROBLEM, "clusters", text, "give all the same --cluster-store and --cluster"))
        for address in without:
            subject = f"nsqlookupd {shown_url(address)}"
            text = "it is in no cluster, and others are: who asks it does not find leaders"
            findings.append(Finding(WARNING, subject, text, "give it --cluster-store as the others"))
        for address, status in known.items():
            subject = f"nsqlookupd {shown_url(address)}"
            if (away := store_away(status)) and not store_away(best):
                advice = "others have it: can the store be reached from there? its log says more"
                findings.append(Finding(WARNING, subject, away, advice))
            if (read_only := store_read_only(status)) and not store_read_only(best):
                advice = "others say that it does: may its user of the store write, by all its addresses? see its log"
                findings.append(Finding(WARNING, subject, read_only, advice))
        found = troubles(best)
        if all(each.level == NOTE for each in found):
            count = sum(len(topic.partitions) for topic in best.topics)
            nodes, parts = _count(len(best.nodes), "node", "nodes"), _count(count, "partition", "partitions")
            text = f"is whole: {nodes}, {parts}"
            findings.append(Finding(OK, f"cluster {best.cluster}", text))
        return findings + [Finding(each.level, each.subject, each.text, each.advice) for each in found]

    # -- nsqd ----------------------------------------------------------------------------------------------------------

    async def _examine_nsqd(self, seen: Seen, lookups: Sequence[str]) -> None:
        async with self._turns:
            found = await self._tcp(seen.node)
            if seen.http or seen.listed_by or all(finding.level != PROBLEM for finding in found):
                found += await self._http(seen)  # else it is not known whether an nsqd is there at all
            seen.findings += found
        missing = [address for address in lookups if address not in seen.listed_by]
        if missing:
            level = WARNING if seen.listed_by else PROBLEM
            text = f"is not registered with {', '.join(map(shown_url, missing))}"
            advice = "give it --lookupd-tcp-address of every nsqlookupd; clients that ask only that one do not find it"
            seen.findings.append(Finding(level, _name(seen.node), text, advice))

    async def _tcp(self, node: Node) -> list[Finding]:
        subject = _name(node)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                await loop.getaddrinfo(node.broadcast_address, node.tcp_port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError) as error:
            advice = (
                "start it with --broadcast-address=<an address that this machine can reach>, or make the name known"
            )
            text = f"its address {node.broadcast_address} cannot be resolved here: {str(error) or 'no answer'}"
            return [Finding(PROBLEM, subject, text, advice)]
        begun = loop.time()
        owner = _Owner()
        try:
            connection = await Connection.open(node.address, owner, self._connection_options, self._env)
        except FlintError as error:
            return [Finding(PROBLEM, subject, f"cannot be used: {error}", _tcp_advice(error, node))]
        took_s = loop.time() - begun
        features = connection.features
        if "tls" in connection.layers:
            connection.close()
        elif await self._is_refused_without_tls(connection):
            return [Finding(PROBLEM, subject, "refuses every command without TLS (--tls-required)", _SECURED)]
        layers = [*connection.layers, *(["AUTH"] if features.auth_required else [])]
        text = f"speaks NSQ {features.version or 'of before 1.0'}, ready in {_ms(took_s)}"
        return [Finding(OK, subject, f"{text}{', with ' + ' and '.join(layers) if layers else ''}")]

    async def _is_refused_without_tls(self, connection: Connection) -> bool:
        """Close the connection; whether this nsqd, which lets everybody identify, wanted TLS for what comes after."""
        try:
            async with asyncio.timeout(self._timeout_s):
                error = await connection.leave()
        except TimeoutError:
            connection.close()
            return False
        return isinstance(error, NsqdError) and "TLS required" in str(error)

    def _may_show_in_clear(self, seen: Seen) -> bool:
        """Whether an nsqd whose HTTP address nobody named is shown the token over plain HTTP."""
        options = self._connection_options
        if seen.listed_by:
            return any(not address.startswith("https:") for address in seen.listed_by)
        return not (options.tls or options.tls_ca_file or options.tls_cert)

    async def _http(self, seen: Seen) -> list[Finding]:
        node, subject, base = seen.node, _name(seen.node), seen.http
        port = node.http_port if seen.listed_by else node.tcp_port + 1
        is_guess = not base and not seen.listed_by
        if not base and not 0 < port < PORT_END:
            text = "nobody says its HTTP port: whether its disk and its data are well was not looked at"
            return [Finding(WARNING, subject, text, _HTTP_NAMED)]
        base = base or f"http://{format_address(node.broadcast_address, port)}"
        route = self._route(base, bool(seen.http) or self._may_show_in_clear(seen))
        try:
            ping, _ = await self._ask(route, "/ping")
            stats, last = await self._ask(route, "/stats?format=json&include_clients=false&include_mem=false")
        except OSError as error:
            if (secured := route.first().base) != base:
                text = f"its HTTP API wants TLS and cannot be asked at {secured}, so {_UNKNOWN}: {error}"
                return [Finding(WARNING, subject, text, _TLS_TRUST)]
            advice = "nsqadmin and monitoring need it; check --http-address, --broadcast-http-port and the firewall"
            text = f"its HTTP port cannot be asked, so nothing is known of its disk and its data: {error}"
            return [Finding(WARNING, subject, text, _HTTP_NAMED if is_guess else advice)]
        if ping.status == 403:
            if b"TLS_REQUIRED" in ping.body:
                text = f"its HTTP API wants TLS (--tls-required), and does not say at which port: {_UNKNOWN}"
                return [Finding(WARNING, subject, text, _HTTPS)]
            text = f"its HTTP API does not let us ask, so {_UNKNOWN}: {ping.body[:200].decode(errors='replace')}"
            return [Finding(WARNING, subject, text, "docs/http-auth.md (Web pages) says which names it answers to")]
        if is_guess and ping.status not in (200, 401, 429, 500):
            text = f"what answers at {base} is not its HTTP API: nothing is known of its disk and its data"
            return [Finding(WARNING, subject, text, _HTTP_NAMED)]
        findings = self._clock(subject, ping)
        if ping.status != 200:
            reason = ping.body[:200].decode(errors="replace")
            advice = "its disk refuses writes, so publishing fails: look at free space and the kernel's log"
            findings.append(Finding(PROBLEM, subject, f"is not well: {reason}", advice))
        if stats.status == 401 and not last.shows_token and self._connection_options.lookup_token is not None:
            why = "nsqlookupd is asked over HTTPS" if seen.listed_by else "options are of TLS"
            text = f"its HTTP API asks for a token, which is not shown to it in clear: {why}"
            return [*findings, Finding(WARNING, subject, f"{text}; its topics were not looked at", _HTTPS)]
        if refused := self._refused(stats):
            return [*findings, Finding(WARNING, subject, *refused)]
        if stats.status != 200:
            text = f"/stats is answered with status {stats.status}: nothing is known of its data"
            return [*findings, Finding(WARNING, subject, text, "is this port nsqd's HTTP API?")]
        more, seen.channels = _stats_findings(subject, stats)
        return findings + more

    # -- topic ---------------------------------------------------------------------------------------------------------

    async def _examine_topic(self, lookups: Iterable[str]) -> list[Finding]:
        subject = f"topic {self._topic}"
        found: dict[str, Node] = {}
        channels: dict[str, None] = {}
        asked = False
        for address in lookups:
            answer = await self._try_get(f"{address}/lookup?topic={quote(self._topic, safe='')}")
            if answer is None or answer.status not in (200, 404):
                continue
            asked = True
            if answer.status == 200:
                found.update({node.address: node for node in parse_nodes(answer.body)})
                channels.update(dict.fromkeys(_channels(answer.body)))
        if not asked:
            return [Finding(NOTE, subject, "no nsqlookupd could be asked for it")]
        if not found:
            advice = "publish to it or create it (POST /topic/create on an nsqd); is its name spelled right?"
            return [Finding(WARNING, subject, "no nsqd has it", advice)]
        findings = [Finding(OK, subject, f"is on {', '.join(found)}")]
        if channels:
            return [*findings, Finding(OK, subject, f"channels: {', '.join(channels)}")]
        advice = "messages gather at the topic until somebody subscribes"
        return [*findings, Finding(WARNING, subject, "has no channel", advice)]

    # -- asking --------------------------------------------------------------------------------------------------------

    def _refused(self, answer: Answer) -> tuple[str, str] | None:
        """Return what it means that a daemon does not let us ask, and what to do; None: it does."""
        if answer.status == 401 and self._connection_options.lookup_token is None:
            return "its HTTP API asks for a token", f"--token=REF, --token-file=FILE or {VARIABLES['token']}"
        return _REFUSALS.get(answer.status)

    def _route(self, base: str, token_in_clear: bool) -> Route:
        return Route(
            base,
            has_token=self._connection_options.lookup_token is not None,
            waits_for_401=wants_tls(self._connection_options),
            token_in_clear=token_in_clear,
        )

    async def _ask(self, route: Route, target: str) -> tuple[Answer, Step]:
        """Ask an nsqd, where and as its answers say; return the last of at most three, and what led to it.

        Raises:
            OSError: no answer; the text says why.
        """
        step: Step | None = route.first()
        while step is not None:
            last = step
            answer = await self._get(last.base + target, last.shows_token)
            step = route.after(last, answer.status, answer.body)
        return answer, last

    async def _get(self, url: str, shows_token: bool = True) -> Answer:
        """Ask.

        Raises:
            OSError: no answer; the text says why.
        """
        loop = asyncio.get_running_loop()
        options = self._connection_options
        headers = {**options.lookup_headers(), "User-Agent": f"flintmq-doctor/{__version__}"}
        if not shows_token:
            headers.pop("Authorization", None)
        begun = loop.time()
        try:
            request = Request.to("GET", url, headers)
            context = options.tls_context() if request.endpoint.is_secured else None
            answer = await self._client.ask(
                request, timeout_s=self._timeout_s, context=context, body_bytes_max=ANSWER_SIZE_MAX
            )
        except NoAnswer as failure:
            raise no_answer(failure, options) from failure
        took_s = loop.time() - begun
        return Answer(answer.status, answer.body, took_s, self._ahead_s(answer.headers.get("date", ""), took_s))

    async def _try_get(self, url: str) -> Answer | None:
        try:
            return await self._get(url)
        except OSError:
            return None

    def _ahead_s(self, date: str, took_s: float) -> float | None:
        try:
            theirs = parsedate_to_datetime(date)
        except ValueError:
            return None
        ours = datetime.fromtimestamp(self._env.clock.wall_ns() / SECOND - took_s / 2, UTC)
        return (theirs - ours).total_seconds() + 0.5  # the header has no fraction: half a second is lost on average

    def _clock(self, subject: str, answer: Answer) -> list[Finding]:
        ahead_s = answer.clock_ahead_s
        if ahead_s is None or abs(ahead_s) <= CLOCK_TOLERANCE_S:
            return []
        text = f"its clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's"
        return [Finding(WARNING, subject, text, "run NTP on both: timestamps and delays of messages differ by that")]


class _Owner:
    """Owns a connection that nothing is sent on."""

    def on_messages(self, connection: Connection, messages: Messages) -> None: ...
    def on_message_failed(self, connection: Connection, failure: MessageFailed) -> None: ...
    def on_settled(self, connection: Connection, finished: Sequence[bytes], requeued: int, dropped: int) -> None: ...
    def on_lost(self, connection: Connection, error: FlintError) -> None: ...


def examine_machine() -> list[Finding]:
    """Look for the packages that make FlintMQ fast or add to it."""
    subject = "this machine"
    findings = [Finding(OK, subject, f"flintmq {__version__}, Python {platform.python_version()}, {sys.platform}")]
    for name, use, advice in _ACCELERATORS:
        try:
            findings.append(Finding(OK, subject, f"{name} {importlib.metadata.version(name)}: {use}"))
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(NOTE, subject, f"{name} is not installed: {use}", advice))
    return findings


def render(findings: Iterable[Finding]) -> str:
    """Return the findings as text, grouped by whom they are about, and a last line that sums up."""
    lines: list[str] = []
    subject = ""
    counts = dict.fromkeys((PROBLEM, WARNING), 0)
    for finding in findings:
        if finding.subject != subject:
            subject = finding.subject
            lines += ["", subject] if lines else [subject]
        lines.append(f"  {finding.level:<8} {finding.text}")
        if finding.advice:
            lines.append(f"           -> {finding.advice}")
        if finding.level in counts:
            counts[finding.level] += 1
    summary = [_count(counts[level], level, f"{level}s") for level in counts if counts[level]]
    return "\n".join([*lines, "", ", ".join(summary) or "all is well", ""])


def run(arguments: Sequence[str]) -> int:
    """Run ``flintmq doctor``; return its exit code.

    Raises:
        OptionError: a flag is wrong.
    """
    options = read_command(DoctorOptions, _as_nsq_spells(arguments), PROGRAM, version_line(PROGRAM, __version__))
    if options is None:
        return 0
    doctor = Doctor(with_environment(options, os.environ), system_env())
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        findings = runner.run(doctor.examine())
    if options.json:
        for finding in findings:
            print(
                json.dumps(
                    {"level": finding.level, "subject": finding.subject, "text": finding.text, "advice": finding.advice}
                )
            )
    else:
        sys.stdout.write(render(findings))
    return 1 if any(finding.level == PROBLEM for finding in findings) else 0


def _as_nsq_spells(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the addresses' flags as NSQ's tools spell them, where ours spell them."""
    found = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        found.append(_AS_OTHERS_SAY.get(flag, flag) + equals + value)
    return found


def with_environment(options: DoctorOptions, environment: Mapping[str, str]) -> DoctorOptions:
    """Return the options with what is not given from the variables of the other commands.

    Addresses are taken from there where no flag names any.

    Raises:
        UsageError: more HTTP addresses of nsqd are named there than nsqd.
        OptionError: one of them is no address.
    """
    if not options.lookupd_http_address and not options.nsqd_tcp_address:
        https = tuple(_addresses_of(environment, "nsqd_http"))
        nsqd = tuple(_with_port(each, NSQD_TCP_PORT, "nsqd") for each in _addresses_of(environment, "nsqd"))
        if https and not nsqd:
            nsqd = (_NSQD_HERE,)
        if https and len(https) != len(nsqd):
            raise UsageError(
                f"{VARIABLES['nsqd_http']} is for each nsqd of {VARIABLES['nsqd']}, in the same order: {len(https)} "
                f"are named there, and {len(nsqd)} nsqd"
            )
        lookups = (_with_port(each, LOOKUPD_HTTP_PORT, "lookupd") for each in _addresses_of(environment, "lookupd"))
        options = dataclasses.replace(
            options, lookupd_http_address=tuple(lookups), nsqd_tcp_address=nsqd, nsqd_http_address=https
        )
    tls, secret = (environment.get(VARIABLES[name], "") for name in ("tls", "auth_secret"))
    return dataclasses.replace(
        options,
        tls=options.tls or is_on(tls),
        auth_secret=options.auth_secret or secret,
    )


def _addresses_of(environment: Mapping[str, str], name: str) -> list[str]:
    return [part.strip() for part in environment.get(VARIABLES[name], "").split(",") if part.strip()]


def _with_port(address: str, port: int, name: str) -> str:
    """Return an address of the environment with the port of its kind, where it has none."""
    if "://" in address:
        return address
    host, found = split_host(address, port, VARIABLES[name])
    return f"{host}:{found}"


def _secret(given: str) -> str:
    """Return the secret for AUTH: what ``env:`` or ``file:`` refers to, as of other commands, or what was given.

    Raises:
        OptionError: the reference is to none.
    """
    return secret_of("--auth-secret", given) if given.startswith(("env:", "file:")) else given


# -- small ones --------------------------------------------------------------------------------------------------------


def _node_of(address: str) -> Node:
    host, _, port = address.rpartition(":")
    return Node(broadcast_address=host.strip("[]"), tcp_port=int(port))


def _name(node: Node) -> str:
    return f"nsqd {node.address}"


def _answered(subject: str, info: Answer) -> Finding:
    version = ""
    try:
        fields = msgspec.json.decode(info.body, type=dict[str, Any])
        version = str((fields.get("data") or fields).get("version", ""))
    except (*UNREADABLE_JSON, AttributeError):
        pass  # /info is a courtesy; whether it can be used is seen from /nodes
    text = f"answers in {_ms(info.took_s)}{', version ' + version if version else ''}"
    if info.took_s > SLOW_S:
        return Finding(WARNING, subject, text, "discovery is as slow as its slowest nsqlookupd: is the machine busy?")
    return Finding(OK, subject, text)


def _doubled(body: bytes) -> dict[str, list[str]]:
    """Return where the connections come from of each address that ``/nodes`` has more than once."""
    found: dict[str, list[str]] = {}
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
        for row in ((fields.get("data") or fields).get("producers") or [])[:NODE_COUNT_MAX]:
            address = format_address(str(row["broadcast_address"]), int(row["tcp_port"]))
            found.setdefault(address, []).append(str(row.get("remote_address", "")) or "an address it does not say")
    except (*UNREADABLE_JSON, AttributeError, KeyError, TypeError, ValueError):
        return {}  # what can be read of it was told by who read its nodes
    return {address: remotes for address, remotes in found.items() if len(remotes) > 1}


def _last_heard(body: bytes) -> dict[str, int]:
    """Return when nsqlookupd heard last from each connection, by where that comes from, as ``/debug`` has it."""
    try:
        rows = msgspec.json.decode(body, type=dict[str, Any]).get("client::") or []
        return {str(row["id"]): int(row["last_update"]) for row in rows[:NODE_COUNT_MAX]}
    except (*UNREADABLE_JSON, AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return {}


def _living(remotes: Sequence[str], heard: Mapping[str, int]) -> list[str]:
    """Return those that were not silent for pings while another one spoke; all, where nothing is known of that."""
    latest = max((heard[remote] for remote in remotes if remote in heard), default=0)
    return [remote for remote in remotes if latest - heard.get(remote, latest) <= SILENT_NS]


def _unread(seen: Iterable[Seen]) -> list[Finding]:
    """Find channels with messages at one nsqd and consumers at others alone: each brings what its nsqd has."""
    waiting: dict[tuple[str, str], list[tuple[int, Seen]]] = {}
    consumed: dict[tuple[str, str], list[Seen]] = {}
    for each in seen:
        for channel, (depth, consumer_count) in each.channels.items():
            if consumer_count:
                consumed.setdefault(channel, []).append(each)
            elif depth:
                waiting.setdefault(channel, []).append((depth, each))
    findings = []
    for channel, places in waiting.items():
        if channel not in consumed:
            continue
        depth = sum(count for count, _ in places)
        where, others = _named(each for _, each in places), _named(consumed[channel])
        text = f"{_count(depth, 'message waits', 'messages wait')} at {where}, and consumers are at {others} alone"
        advice = "have consumers ask nsqlookupd, or give them the address of every nsqd"
        findings.append(Finding(WARNING, "topic {}, channel {}".format(*channel), text, advice))
    return findings


def _named(seen: Iterable[Seen]) -> str:
    return listed(sorted(each.node.address for each in seen), _NAMED_MAX)


def _stats_findings(subject: str, answer: Answer) -> tuple[list[Finding], dict[tuple[str, str], tuple[int, int]]]:
    """Read what an nsqd says of its topics; return what was seen, and :attr:`Seen.channels`."""
    try:
        fields = msgspec.json.decode(answer.body, type=dict[str, Any])
        topics = (fields.get("data") or fields).get("topics") or []
        waiting = sum(topic["depth"] for topic in topics if not topic["channels"])
        depth = sum(channel["depth"] for topic in topics for channel in topic["channels"])
        paused = [topic["topic_name"] for topic in topics if topic["paused"]]
        paused += [
            f"{topic['topic_name']}/{channel['channel_name']}"
            for topic in topics
            for channel in topic["channels"]
            if channel["paused"]
        ]
        cluster = (fields.get("data") or fields).get("cluster")
        doubles = _doubles(cluster)
        channels = {
            (topic["topic_name"], channel["channel_name"]): (channel["depth"], int(channel.get("client_count", 0)))
            for topic in topics
            for channel in topic["channels"]
            if not channel["paused"] and not topic["paused"] and topic["topic_name"] not in doubles
        }
    except (*UNREADABLE_JSON, AttributeError, KeyError, TypeError, ValueError) as error:
        advice = "is this port nsqd's HTTP API?"
        return [Finding(WARNING, subject, f"its /stats cannot be read: {error!r}", advice)], {}
    findings = [Finding(OK, subject, f"{_count(len(topics), 'topic', 'topics')}, {depth} messages wait in channels")]
    health = (fields.get("data") or fields).get("health", "OK")
    if str(health).startswith("NOK - damage"):
        text = f"its data directory was damaged: {str(health).removeprefix('NOK - damage: ')[:500]}"
        advice = "flintmq admin damage lists what was found; after flintmq admin acknowledge-damage this ends"
        findings.append(Finding(PROBLEM, subject, text, advice))
    findings += _lookup_findings(subject, (fields.get("data") or fields).get("nsqlookupds"))
    findings += _cluster_findings(subject, cluster)
    if waiting:
        text = f"{_count(waiting, 'message', 'messages')} in topics that have no channel"
        findings.append(Finding(NOTE, subject, text, "they are kept for the first channel; is a consumer missing?"))
    if paused:
        findings.append(
            Finding(NOTE, subject, f"paused: {', '.join(paused[:20])}", "unpause them, if that was not wanted")
        )
    return findings, channels


def _lookup_findings(subject: str, lookups: Any) -> list[Finding]:
    """Look at what an nsqd says of its nsqlookupds; NSQ's own, and one that has none, say nothing."""
    rows = [row for row in lookups if isinstance(row, dict)] if isinstance(lookups, list) else []
    away = [str(row.get("address", "?"))[:_ADDRESS_MAX] for row in rows if row.get("connected") is False]
    advice = (
        "is it there, at its TCP port (4160)? --lookupd-tcp-address says where it is asked; the log of nsqd says why"
    )
    if not away:
        return []
    if len(away) == len(rows):
        text = f"reaches none of its nsqlookupds ({listed(away, _NAMED_MAX)}): clients that ask those do not find it"
        return [Finding(PROBLEM, subject, text, advice)]
    findings = [
        Finding(WARNING, subject, f"does not reach its nsqlookupd {address}", advice) for address in away[:_NAMED_MAX]
    ]
    if more := len(away) - len(findings):
        findings.append(Finding(WARNING, subject, f"does not reach {more} more of its nsqlookupds", advice))
    return findings


def _doubles(cluster: Any) -> list[str]:
    """Return the topics that an nsqd has alone, and its cluster others of the same names."""
    return [str(name) for name in cluster.get("double_topics") or []] if isinstance(cluster, dict) else []


def _cluster_findings(subject: str, cluster: Any) -> list[Finding]:
    """Look at what an nsqd says of its own part in a cluster; it is not in one where that is None."""
    if not isinstance(cluster, dict):
        return []
    findings = []
    if problem := str(cluster.get("problem") or "")[:500]:
        text = f"it takes no part in its cluster any more: {problem}"
        findings.append(
            Finding(PROBLEM, subject, text, "its log says more; flintmq cluster status shows who leads now")
        )
    elif not cluster.get("has_lease", True):
        text = "the coordination store does not know that it lives: it has lost its lease, and others may lead"
        advice = "is the store there, and reached from that machine (--cluster-store)? its log says more"
        findings.append(Finding(PROBLEM, subject, text, advice))
    aside = cluster.get("set_aside_count")
    if isinstance(aside, int) and aside > 0:
        what = _count(aside, "log of a copy was set aside", "logs of copies were set aside")
        text = f"{what}, in set-aside/ of its data directory: nothing of that is served"
        advice = "docs/cluster.md says how to read it; remove what is not needed"
        findings.append(Finding(NOTE, subject, text, advice))
    if doubles := _doubles(cluster):
        text = f"it has {listed(doubles, _NAMED_MAX)} alone, and the cluster has topics of the same names"
        advice = (
            "publishes at this nsqd to those with partitions are refused, and those to plain ones only it has; "
            "docs/cluster.md (Backup) says how to end that"
        )
        findings.append(Finding(WARNING, subject, text, advice))
    replicas = [each for each in cluster.get("replicas") or [] if isinstance(each, dict)]
    held: dict[str, list[str]] = {}
    for each in replicas:
        if each.get("is_leader") and each.get("is_writable") is False:
            name = f"{each.get('topic_name', '?')}/{each.get('topic_partition', '?')}"
            held.setdefault(str(each.get("state", ""))[:100], []).append(name)
    for state, names in held.items():
        text = f"takes no messages for {listed(names, _NAMED_MAX)}, which it leads: {state}"
        advice = "flintmq cluster status says who lacks; ports between nsqd (4153) and to the store have to be open"
        findings.append(Finding(PROBLEM, subject, text, advice))
    return findings


def _channels(body: bytes) -> list[str]:
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
        return [str(name) for name in (fields.get("data") or fields).get("channels") or []]
    except (*UNREADABLE_JSON, AttributeError):
        return []


def _tcp_advice(error: FlintError, node: Node) -> str:
    text = str(error)
    if isinstance(error, TlsRefused | NsqdError):
        return _SECURED
    if "refused" in text.lower() or "no answer" in text:
        return f"is it running, does it listen on port {node.tcp_port}, does a firewall stand between?"
    return "is this nsqd's TCP port (4150), not its HTTP port (4151)?"


def _count(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _ms(duration_s: float) -> str:
    return f"{duration_s * 1000:.0f} ms"


__all__ = ["Doctor", "DoctorOptions", "Finding", "examine_machine", "render", "run"]
