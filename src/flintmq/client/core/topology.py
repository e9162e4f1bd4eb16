"""The places of a topic: what nsqlookupd answer, and one picture of it from the answers of several. Pure.

Answers come bare, or in an envelope whose ``status_code`` is the true status (HTTP says 500 for all of them then)::

    {"channels": [...], "producers": [PEER, ...]}                                            NSQ
    {..., "partitions": {"0": PEER, ...}, "meta": {"partition_num": 3, "replica": 1, ...}}   redesigned NSQ
                         PEER has "log_id" where copies of the partition are kept             FlintMQ's cluster
    {"status_code": 200, "status_txt": "OK", "data": {...}}                                  either, in the envelope

Rules of this file:

- Plain nsqd are united by ``broadcast_address:tcp_port``; partitions by their number.
- Where answers differ on who leads a partition, these decide, in this order: an nsqd that has just said that it does
  not lead it loses; who answers now beats who is failing and is only remembered; who *changed* its answer last beats
  those that repeat theirs (leadership moves, and nsqlookupd learn of it one by one); the majority; the order of the
  addresses. The topic's metadata likewise.

Source: Youzan's smart client, "Nsqd discovery service", Youzan's nsqlookupd, NSQ's nsqlookupd.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from flintmq.addresses import format_address
from flintmq.client.options import split_address
from flintmq.errors import UNREADABLE_JSON, DiscoveryError, OptionError

NODE_COUNT_MAX = 10_000
PARTITION_COUNT_MAX = 1024  # as many as an internal id can tell apart
REASON_SIZE_MAX = 200


class Node(msgspec.Struct, frozen=True):
    """An nsqd as nsqlookupd lists it."""

    broadcast_address: str
    tcp_port: int
    hostname: str = ""
    http_port: int = 0
    version: str = ""
    distributed_id: str = ""
    log_id: str = ""

    @property
    def address(self) -> str:
        """``host:port`` to connect to; the key of the union."""
        return format_address(self.broadcast_address, self.tcp_port)


class TopicMeta(msgspec.Struct, frozen=True):
    """A topic as a redesigned nsqlookupd knows it."""

    partition_num: int = 0
    replica: int = 0
    extend_support: bool = False
    ordered: bool = False
    multi_part: bool = False
    disable_channel_auto_create: bool = False


class _Data(msgspec.Struct):
    producers: list[Node] | None = None
    partitions: dict[int, Node] | None = None
    meta: TopicMeta | None = None


class _Member(msgspec.Struct):
    """A nsqlookupd; ports are JSON strings. Of the redesigned NSQ none has a port for HTTPS."""

    ip: str = msgspec.field(name="NodeIP", default="")
    http_port: str | int = msgspec.field(name="HttpPort", default="")
    https_port: str | int = msgspec.field(name="HttpsPort", default="")


class _Members(msgspec.Struct):
    lookupdnodes: list[_Member] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one nsqlookupd.

    Attributes:
        leaders: partition to ``host:port``.
        log_ids: of partitions that are kept by several nsqd together.
        meta: None when it has none, as with NSQ's own.
        reason: why there is nothing, in its words.
    """

    nodes: tuple[Node, ...] = ()
    leaders: Mapping[int, str] = field(default_factory=dict)
    meta: TopicMeta | None = None
    reason: str = ""
    log_ids: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Topology:
    """The places of a topic.

    Attributes:
        nodes: every nsqd that was named.
        leaders: partition to ``host:port`` of the nsqd to use for it; in the order of the partitions.
        partition_count: how many there are, known or not; 0 when nobody said.
        is_extended: messages may carry headers.
        is_ordered: it is to be consumed in order.
        reason: why nothing is known, in the words of a nsqlookupd.
        log_ids: of the partitions whose log is the same whoever leads them; 16 hex digits.
    """

    nodes: tuple[Node, ...] = ()
    leaders: Mapping[int, str] = field(default_factory=dict)
    partition_count: int = 0
    is_extended: bool = False
    is_ordered: bool = False
    reason: str = ""
    log_ids: Mapping[int, str] = field(default_factory=dict)

    @property
    def is_partitioned(self) -> bool:
        """Whether it is a topic of the redesigned NSQ."""
        return bool(self.leaders) or self.partition_count > 0

    @property
    def is_refused(self) -> bool:
        """Whether a nsqlookupd knows the topic and does not want it to be used, rather than not knowing it."""
        return bool(self.reason) and "not found" not in self.reason.lower().replace("_", " ")

    @property
    def missing(self) -> tuple[int, ...]:
        """Partitions that nobody is known to lead."""
        return tuple(number for number in range(self.partition_count) if number not in self.leaders)

    @property
    def is_complete(self) -> bool:
        """Whether every partition's leader is known, and how many there are."""
        return 0 < self.partition_count <= len(self.leaders)

    @property
    def plain(self) -> tuple[str, ...]:
        """``host:port`` of the nsqd that have the topic without partitions: NSQ's own."""
        if not self.is_partitioned:
            return tuple(node.address for node in self.nodes)
        leading = frozenset(self.leaders.values())
        return tuple(node.address for node in self.nodes if not node.distributed_id and node.address not in leading)


# -- reading -----------------------------------------------------------------------------------------------------------


NO_LOOKUPD = "no nsqlookupd is there; its HTTP port is 4161 where nothing else is set"
"""The meaning of a 404 for a path that every nsqlookupd has."""


def parse_answer(status: int, body: bytes, is_topic: bool = True, has_password: bool = False) -> Answer:
    """Read an answer of /lookup or /nodes in either form.

    Args:
        is_topic: 404 means that the topic is not known, not that there is no such question.
        has_password: a user and password were sent with the question.

    Raises:
        DiscoveryError: it says that something is wrong, or cannot be read.
    """
    status, reason, data = _opened(status, body)
    is_elsewhere = status == 404 and reason == "NOT_FOUND"  # nsqd and others say so of a path that they have not
    if is_topic and not is_elsewhere and (status == 404 or reason == "TOPIC_NOT_FOUND"):  # a 500 before NSQ 1.0
        return Answer(reason=reason)
    if status != 200:
        meaning = f": {NO_LOOKUPD}" if is_elsewhere else ""
        if status == 401:
            meaning = ", it asks for a token that it knows (lookup_token)"
            if has_password:
                meaning = ", it does not accept the user and password of its address, which were sent"
        raise DiscoveryError(f"status {status}: {reason or body[:100]!r}{meaning}")
    try:
        answer = _DATA.decode(data) or _Data()
    except UNREADABLE_JSON as error:
        raise DiscoveryError(f"the answer cannot be read: {error}") from error
    nodes = tuple(node for node in (answer.producers or [])[:NODE_COUNT_MAX] if _is_usable(node))
    partitions = sorted((answer.partitions or {}).items())[:PARTITION_COUNT_MAX]
    leaders = {number: node.address for number, node in partitions if number >= 0 and _is_usable(node)}
    log_ids = {number: node.log_id for number, node in partitions if number in leaders and node.log_id}
    return Answer(nodes, leaders, answer.meta if _says_something(answer.meta) else None, log_ids=log_ids)


# Made here, while one thread imports this: msgspec learns a type when it first reads it, and crashes the process when
# two threads have it learn the same one.
_DATA = msgspec.json.Decoder(_Data | None)
_MEMBERS = msgspec.json.Decoder(_Members | None)


def _says_something(meta: TopicMeta | None) -> bool:
    """Whether a topic is one with partitions, or one without that has headers."""
    if meta is None or not 0 <= meta.partition_num <= PARTITION_COUNT_MAX:
        return False
    return meta.partition_num > 0 or meta.extend_support


def parse_nodes(body: bytes) -> tuple[Node, ...]:
    """Read an answer of /lookup or /nodes in either form, whose status was 200.

    Raises:
        DiscoveryError: it is neither.
    """
    return parse_answer(200, body, is_topic=False).nodes


def parse_members(body: bytes, scheme: str = "http") -> tuple[str, ...]:
    """Read an answer of /listlookup: ``http://host:port`` of every nsqlookupd; none when it is something else.

    Args:
        scheme: of the nsqlookupd that answered; with ``https`` the members are those that say where they speak TLS:
            their other ports do not, and without TLS nobody is asked whom the user did not name so.
    """
    try:
        members = _MEMBERS.decode(_opened(200, body)[2])
    except (*UNREADABLE_JSON, DiscoveryError):
        return ()
    found: dict[str, None] = {}
    for member in (members.lookupdnodes or [] if members else [])[:NODE_COUNT_MAX]:
        host = member.ip.removeprefix("[").removesuffix("]")
        port = str(member.https_port if scheme == "https" else member.http_port)
        is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
        if host and is_port and not any(sign in host for sign in "/@?# "):
            found[f"{scheme}://{format_address(host, int(port))}"] = None
    return tuple(found)


def _opened(status: int, body: bytes) -> tuple[int, str, bytes]:
    """The true status, what is said with it, and the data without an envelope."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        if "status_code" in fields or ("data" in fields and "producers" not in fields):
            if "status_code" in fields:
                status = msgspec.json.decode(fields["status_code"], type=int)
            reason = msgspec.json.decode(fields.get("status_txt", b'""'), type=str)
            return status, reason[:REASON_SIZE_MAX], bytes(fields.get("data", b"null"))
        reason = msgspec.json.decode(fields.get("message", b'""'), type=str)
        return status, reason[:REASON_SIZE_MAX], body
    except UNREADABLE_JSON as error:
        if status != 200:
            return status, "", body
        raise DiscoveryError(f"the answer cannot be read: {error}") from error


def _is_usable(node: Node) -> bool:
    """Whether it can be connected to at all: anybody may register under any name."""
    try:
        split_address(node.address)
    except OptionError:
        return False
    return True


# -- uniting -----------------------------------------------------------------------------------------------------------

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Statement(Generic[Value]):
    """A statement of one nsqlookupd on one thing.

    Attributes:
        is_fresh: it answers now; otherwise this is remembered.
        since: when it began to say so, larger is later; 0: it never said anything else.
    """

    value: Value
    is_fresh: bool
    since: int


@dataclass(slots=True)
class Remembered:
    """The last answer of one nsqlookupd to one question, and since when it says what it says.

    Attributes:
        is_fresh: it answered the last time it was asked.
    """

    answer: Answer
    is_fresh: bool = True
    leaders_since: dict[int, int] = field(default_factory=dict)
    meta_since: int = 0

    def follow(self, answer: Answer, now: int) -> None:
        """Take the next answer; ``now`` is larger than before."""
        for number, address in answer.leaders.items():
            if self.answer.leaders.get(number) != address:
                self.leaders_since[number] = now
        if answer.meta != self.answer.meta:
            self.meta_since = now
        self.answer = answer
        self.is_fresh = True


def unite(remembered: Iterable[Remembered], distrusted: Collection[tuple[int, str]] = ()) -> Topology:
    """One picture from the answers of several nsqlookupd.

    Args:
        distrusted: (partition, address) that have been found wrong.
    """
    remembered = list(remembered)
    nodes: dict[str, Node] = {}
    leaders: dict[int, list[Statement[str]]] = {}
    metas: list[Statement[TopicMeta]] = []
    reason = ""
    for each in remembered:
        for node in each.answer.nodes:
            nodes.setdefault(node.address, node)
        for number, address in each.answer.leaders.items():
            since = each.leaders_since.get(number, 0)
            leaders.setdefault(number, []).append(Statement(address, each.is_fresh, since))
        if each.answer.meta is not None:
            metas.append(Statement(each.answer.meta, each.is_fresh, each.meta_since))
        reason = reason or each.answer.reason
    log_ids: dict[int, str] = {}
    meta = decide(metas) if metas else TopicMeta()
    chosen = {
        number: decide(leaders[number], [address for wrong, address in distrusted if wrong == number])
        for number in sorted(leaders)
    }
    for each in remembered:
        for number, log_id in each.answer.log_ids.items():
            if each.answer.leaders.get(number) == chosen[number]:
                log_ids.setdefault(number, log_id)
    return Topology(
        tuple(nodes.values()),
        chosen,
        meta.partition_num,
        meta.extend_support,
        meta.ordered,
        "" if nodes else reason,
        log_ids,
    )


def decide(statements: Iterable[Statement[Value]], distrusted: Collection[Value] = ()) -> Value:
    """Return what to believe of statements on the same thing; see the rules of this file."""
    ranks: dict[Value, list[int]] = {}
    for statement in statements:
        rank = ranks.setdefault(statement.value, [0, 0, 0, 0])
        rank[0] = int(statement.value not in distrusted)
        rank[1] = max(rank[1], int(statement.is_fresh))
        rank[2] = max(rank[2], statement.since if statement.is_fresh else 0)
        rank[3] += int(statement.is_fresh)
    return max(ranks, key=lambda value: ranks[value])  # the first of equals: dicts keep the order
