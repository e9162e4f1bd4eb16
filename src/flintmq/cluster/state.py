"""The state that the nodes of a cluster agree on: values of the coordination store, and how they may change.

A value is read, changed by one of the functions here, and written by compare-and-swap
(:func:`flintmq.cluster.store.swap`); nobody writes one in any other way. Who may make which change:

- the master nsqlookupd makes and deletes topics and partitions, and elects leaders (:func:`elected`);
- the master says who is to have a copy (:func:`replaced`), and who need not have one any longer (:func:`released`);
- a node that was a single one makes the topics and partitions that it brings, led by itself, in the epoch behind the
  last of its log;
- the leader of a partition changes its in-sync set (:func:`without`, :func:`joined`), under its own epoch;
- a node with a copy says how far that is, while nobody can be elected without knowing (power.py);
- a node with a copy says that it knows of epochs that the store does not, which is older than the data (power.py);
- a node with a copy raises the number of changes of a topic's record above the one that it knows, where a store was put
  back (``nsqd/cluster/older_records.py``);
- a node takes itself out of an in-sync set when its copy was damaged, or when it leads and others can do what it cannot
  (:func:`renounced`).

Rules of this file: no IO, no clock; values are immutable; an epoch names one leader for ever; the in-sync set is never
empty, and a leader is in it.

Source: docs/decisions/0017.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from typing import TypeVar

import msgspec

from flintmq.errors import FlintError
from flintmq.topic_meta import TopicMeta

PEER_VERSION = 2
"""Of what nodes say to each other; a node talks to those of its own version and of the one before and after it."""
LEASE_TTL_S = 3
"""Of a node's lease, which it renews every second."""
LAG_NS_MAX = 3_000_000_000
"""A replica that is behind for so long leaves the in-sync set."""


class BadState(FlintError):
    """A value of the store is not what a release of this kind has written.

    Args:
        key: of the value.
        reason: what is wrong with it, and what to do.
    """

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        return f"coordination store, key {self.key}: {self.reason}"


class _Value(msgspec.Struct, frozen=True, omit_defaults=True):
    """A value: JSON, so that people can read it with the tools of etcd."""


class ClusterRecord(_Value, frozen=True):
    """There is a cluster.

    Attributes:
        cluster_id: 16 hex digits, drawn when it was made.
        version: of the values in the store.
    """

    cluster_id: str
    version: int = 1


class LookupdRecord(_Value, frozen=True):
    """A nsqlookupd that lives; its key has a lease.

    Attributes:
        lookupd: its id, 16 hex digits.
        incarnation: drawn when the process started, 16 hex digits.
        host, tcp_port, http_port: where it is reached.
        https_port: where with TLS; 0: nowhere, or it is of a release that did not say.
    """

    lookupd: str
    incarnation: str
    host: str
    tcp_port: int
    http_port: int
    https_port: int = 0


class NodeRecord(_Value, frozen=True):
    """An nsqd that lives; its key has a lease.

    Attributes:
        node: its id, 16 hex digits, which its data directory keeps.
        incarnation: drawn when the process started, 16 hex digits.
        boot_id: of the machine's start, as the kernel has it; of a process with an older data directory it is its own.
        syncs: whether it acknowledges only what was synced to the device.
        host, tcp_port, http_port: where clients reach it.
        peer_port: where other nodes do, on the same host.
        host_id: of the machine; two replicas do not meet on one.
        zone: of the machine; replicas are spread over zones. Empty: unknown.
        version: :data:`PEER_VERSION` of it.
        is_draining: it gets no partitions, and gives its own away.
        number: what the redesigned NSQ tells nodes apart by.
        is_full: its disk has no room: it leads nothing that another one in sync can lead, and gets no partitions.
        is_ending: it ends in a moment: others lead what it leads, and it leaves every in-sync set.
        is_older: its data directory is from before what it acknowledged, see ``nsqd/cluster/disk_mark.py``.
        copies_max: copies of partitions for which it has open files; 0: no limit, or its release did not say.
        kept_alone: topics that are to be the cluster's and are this node's alone still, each with the reason; the first
            of them, see ``nsqd/cluster/alone.py``.
        kept_alone_count: how many there are.
    """

    node: str
    incarnation: str
    boot_id: str
    syncs: bool
    host: str
    tcp_port: int
    http_port: int
    peer_port: int
    host_id: str = ""
    zone: str = ""
    version: int = PEER_VERSION
    is_draining: bool = False
    number: int = 0
    is_full: bool = False
    is_ending: bool = False
    is_older: bool = False
    copies_max: int = 0
    kept_alone: tuple[tuple[str, str], ...] = ()
    kept_alone_count: int = 0

    def has_files_for(self, count: int) -> bool:
        """Whether it can have one more copy than ``count``."""
        return not self.copies_max or count < self.copies_max

    @property
    def member(self) -> Member:
        """Its entry in an in-sync set."""
        return Member(self.node, self.boot_id, self.syncs)


class TopicRecord(_Value, frozen=True):
    """A topic that is there.

    Attributes:
        number: drawn when it was created, 1 to 2^63 - 1: a topic that was deleted and made anew has another.
        meta: what it was created with; ``meta.replica`` copies of each partition are wanted.
        partition_num: partitions of it; also of a plain topic, whose ``meta`` has none.
        min_in_sync: with fewer replicas in sync nothing is acknowledged; 1 to ``meta.replica``.
        is_deleting: it is to go, with all that nodes have of it. First this is written, then its partitions go, then
            the record: whoever has a replica of this topic's number and has seen this mark removes it. Whoever finds
            no record of the number, and has not seen the mark, sets its replica aside: it was away then, or the store
            is another one.
        is_brought: it was a single node's: partitions of it come with the nodes that have them, see
            :attr:`brought_below`.
        brought_num: how many those are, the first ones; 0: a release that does not count them wrote the record.
    """

    number: int
    meta: TopicMeta
    partition_num: int
    min_in_sync: int = 1
    is_deleting: bool = False
    is_brought: bool = False
    brought_num: int = 0

    @property
    def knows_brought(self) -> bool:
        """Whether it says which partitions come with nodes; else one that is missing may be another release's, which
        raised ``partition_num`` alone.
        """
        return not self.is_brought or self.brought_num > 0 or not self.meta.is_partitioned

    @property
    def brought_below(self) -> int:
        """Partitions below this number come with the nodes that have them and are not made; 0: all are made."""
        if not self.is_brought:
            return 0
        if self.knows_brought:
            return self.brought_num or 1  # a plain one had no more
        return self.partition_num


class WantedTopic(_Value, frozen=True):
    """A plain topic that a node wants to be made, because somebody publishes or subscribes to it there.

    The master makes it, and deletes this; or it writes down why it does not, and whoever asked deletes it.

    Attributes:
        number: drawn by the node that asks, so that nobody else writes the same.
        node: who asks.
        extend_support: its messages may carry headers.
        copies: of each partition, or as many as there is room for; 0: as always.
        refusal: why it is not made; empty: that is not decided yet.
    """

    number: int
    node: str
    extend_support: bool = False
    copies: int = 0
    refusal: str = ""


class DrainRecord(_Value, frozen=True):
    """A node that an operator takes everything from, whether or not it lives.

    Attributes:
        node: its id.
        is_removal: it is not to come back: the record goes with the node, once that has nothing and has ended.
    """

    node: str
    is_removal: bool = False


class DiskRecord(_Value, frozen=True):
    """The count of a node's data directory, see ``nsqd/cluster/disk_mark.py``.

    Attributes:
        count: 1 and up.
        incarnation: of the process that counted.
        host, tcp_port, http_port: where clients reached the node last; empty and 0: not known.
    """

    count: int
    incarnation: str
    host: str = ""
    tcp_port: int = 0
    http_port: int = 0


class SettingsRecord(_Value, frozen=True):
    """The settings that operators gave the whole cluster; without a record everything is as it is by default.

    Attributes:
        balances: leaders and copies are spread over the nodes without being asked.
        balance_window: hours of the day (UTC) in which copies are moved for that, ``from`` up to ``to``, 0 to 24; the
            same twice: never. None: as the options of the master say.
        balances_load: copies are moved by load for that.
        is_upgrading: nothing is moved, because nodes are being restarted.
        write_disabled: ``all`` or ``ordered``: topics of the cluster that lookups name no leader of to publishers;
            empty: none.
        hidden_lookupds: ids of nsqlookupds that are not named to clients.
        version: counts the changes.
    """

    balances: bool = True
    balances_load: bool = True
    balance_window: tuple[int, int] | None = None
    is_upgrading: bool = False
    write_disabled: str = ""
    hidden_lookupds: tuple[str, ...] = ()
    version: int = 0


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A member of an in-sync set, as it was when it joined.

    Attributes:
        node: its id.
        boot_id: of its machine's start then.
        syncs: whether what it acknowledged survives a power loss.
    """

    node: str
    boot_id: str
    syncs: bool

    def is_whole(self, node: NodeRecord) -> bool:
        """Whether a node still has everything that it acknowledged as this member."""
        keeps_it = self.syncs and not node.is_older
        return self.node == node.node and (keeps_it or self.boot_id == node.boot_id)


class Ending(msgspec.Struct, frozen=True, array_like=True):
    """A copy, as a process has it that does not know whether it lost something with its power.

    Attributes:
        node, incarnation: of the process.
        epoch: of the last batch; 0: there is none.
        end: of the log.
        led_by: the latest epoch that the copy was told of, and the process that led in it; (0, ""): none.
    """

    node: str
    incarnation: str
    epoch: int
    end: int
    led_by: tuple[int, str] = (0, "")


class Older(msgspec.Struct, frozen=True, array_like=True):
    """The store was found to be older than the copies: epochs may be of two leaders, one before and one after it was
    put back.

    Attributes:
        found: the epoch that the store had when that was found. Only up to this one can somebody have been elected by
            the store that was put back, in an epoch that had a leader before.
        known: the highest epoch that a copy knows of; higher ones name one leader each.
        led_by: what the copy that leads since was told of before, see :attr:`Ending.led_by`.
    """

    found: int
    known: int
    led_by: tuple[int, str] = (0, "")


class PartitionState(_Value, frozen=True):
    """A partition: who has it, who leads it, and who has all of it that was acknowledged.

    Attributes:
        topic_number: of its topic.
        log_id: of its log, the same on every replica; 1 to 2^63 - 1.
        epoch: how often a leader was elected; 0 before the first.
        leader: id of the node that leads; empty: none does.
        incarnation: of the leader's process: another one does not lead, although it is the same node.
        in_sync: who has all that was acknowledged; a leader is one of them. Empty only in epoch 0.
        replicas: ids of the nodes that are to have it, the one that leads by preference first.
        leaving: ids of those that are to have it no longer, once the others do.
        target: ids of those that are to take the place of ``replicas`` when their turn has come; empty: that is all.
        ends: how far copies are, while nobody can be elected without knowing; see power.py.
        lossy_epoch: the last epoch whose leader may have lacked, when it was elected, some of what was acknowledged; 0:
            there was none, or an operator knows of it.
        older: what is known since the store was older than the copies; None: it never was.
    """

    topic_number: int
    log_id: int
    epoch: int = 0
    leader: str = ""
    incarnation: str = ""
    in_sync: tuple[Member, ...] = ()
    replicas: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    ends: tuple[Ending, ...] = ()
    lossy_epoch: int = 0
    older: Older | None = None

    @property
    def in_sync_nodes(self) -> tuple[str, ...]:
        """Ids of the in-sync set."""
        return tuple(member.node for member in self.in_sync)

    @property
    def holders(self) -> tuple[str, ...]:
        """Ids of all nodes that have some of it, or are to have it."""
        return (*self.replicas, *self.leaving)

    @property
    def lacking(self) -> tuple[str, ...]:
        """Ids of the nodes that are to have it, and do not have everything yet."""
        members = self.in_sync_nodes
        return tuple(node for node in self.replicas if node not in members)

    @property
    def may_have_lost(self) -> bool:
        """Whether some of what was acknowledged may be lost, and no operator has said that this is known."""
        return self.lossy_epoch > 0

    @property
    def is_contested(self) -> bool:
        """Whether the store was found to be older than the copies, and nobody was elected since."""
        return self.older is not None and self.epoch <= self.older.known + 1

    def is_led_by(self, node: str, incarnation: str) -> bool:
        """Whether this process leads it."""
        return bool(self.leader) and (self.leader, self.incarnation) == (node, incarnation)

    def has_leader(self, live: Mapping[str, NodeRecord]) -> bool:
        """Whether the process that leads it lives."""
        node = live.get(self.leader)
        return node is not None and node.incarnation == self.incarnation


def elected(state: PartitionState, leader: NodeRecord, in_sync: Iterable[Member] | None = None) -> PartitionState:
    """Let a node lead from the next epoch on.

    Args:
        in_sync: who is in sync from then on; the same as before when not given.

    Raises:
        ValueError: the leader would not be in sync.
    """
    members = state.in_sync if in_sync is None else tuple(in_sync)
    members = tuple(leader.member if member.node == leader.node else member for member in members)
    if leader.node not in (member.node for member in members):
        raise ValueError(f"node {leader.node} is not in sync, and cannot lead")
    return msgspec.structs.replace(
        state, epoch=state.epoch + 1, leader=leader.node, incarnation=leader.incarnation, in_sync=members, ends=()
    )


def without_leader(state: PartitionState) -> PartitionState:
    """Let nobody lead; the in-sync set stays, from which the next leader comes."""
    return msgspec.structs.replace(state, leader="", incarnation="")


def without(state: PartitionState, nodes: Collection[str]) -> PartitionState:
    """Take nodes out of the in-sync set, as its leader.

    Raises:
        ValueError: the leader would go with them.
    """
    if state.leader in nodes:
        raise ValueError(f"node {state.leader} leads, and cannot leave the in-sync set")
    return msgspec.structs.replace(state, in_sync=tuple(each for each in state.in_sync if each.node not in nodes))


def renounced(state: PartitionState, node: str) -> PartitionState | None:
    """Let a node that lacks something of what it acknowledged be a member no longer; if it leads, nobody does then, and
    the next leader comes from the others.

    Returns:
        None when it is no member, or the only one: nobody else is known to have what it lacks.
    """
    others = tuple(each for each in state.in_sync if each.node != node)
    if not others or len(others) == len(state.in_sync):
        return None
    now = msgspec.structs.replace(state, in_sync=others)
    return without_leader(now) if state.leader == node else now


def begun_anew(state: PartitionState, leader: NodeRecord, log_id: int) -> PartitionState:
    """Let a partition begin with an empty log on one node, because all copies are lost; that stays to be seen until an
    operator says that it is known.

    It is another log, so that nobody takes it for a continuation: who has something of the one before sets it aside.

    Args:
        log_id: of the new log; 1 to 2^63 - 1.
    """
    epoch = state.epoch + 1
    return PartitionState(
        state.topic_number,
        log_id,
        epoch,
        leader.node,
        leader.incarnation,
        (leader.member,),
        (leader.node,),
        lossy_epoch=epoch,
    )


def joined(state: PartitionState, member: Member) -> PartitionState:
    """Take a node that has caught up into the in-sync set, as its leader.

    Raises:
        ValueError: it has no replica.
    """
    if member.node not in state.holders:
        raise ValueError(f"node {member.node} has no replica of the partition")
    others = tuple(each for each in state.in_sync if each.node != member.node)
    return msgspec.structs.replace(state, in_sync=(*others, member))


def replaced(state: PartitionState, replicas: Iterable[str]) -> PartitionState:
    """Give these nodes copies, the one that leads by preference first. Who has one and is not among them keeps it until
    all of these have everything.
    """
    wanted = tuple(replicas)
    leaving = tuple(node for node in state.holders if node not in wanted)
    return msgspec.structs.replace(state, replicas=wanted, leaving=leaving, target=())


def released(state: PartitionState) -> PartitionState:
    """Let go who is to have it no longer.

    Raises:
        ValueError: one of them leads, or somebody who is to have it lacks something.
    """
    if state.leader in state.leaving:
        raise ValueError(f"node {state.leader} leads, and has to hand over first")
    if state.lacking:
        raise ValueError(f"{', '.join(state.lacking)} do not have everything yet")
    return msgspec.structs.replace(state, leaving=())


class NoLeader(Enum):
    """Why nobody can be elected."""

    NONE_ALIVE = "no replica that has everything is alive"
    STORE_OLDER = "the coordination store is older than the data, so who has most is to lead"
    POWER_LOST = "every replica that had everything may have lost some of it, with its power or its disk"


def whole_members(state: PartitionState, live: Mapping[str, NodeRecord]) -> list[NodeRecord]:
    """Return the nodes of the in-sync set that live, and still have everything that they acknowledged, in its order."""
    return [live[each.node] for each in state.in_sync if each.node in live and each.is_whole(live[each.node])]


def candidates(state: PartitionState, live: Mapping[str, NodeRecord]) -> list[NodeRecord] | NoLeader:
    """Return the nodes that may lead without losing anything, the best first; or why there are none.

    Any member of the in-sync set that is whole may; one that is to keep its replica goes before one that is to lose
    it, one that is not draining before one that is, and one that has room before one that has none.
    """
    if state.is_contested:
        return NoLeader.STORE_OLDER
    whole = whole_members(state, live)
    if not whole:
        return NoLeader.POWER_LOST if any(node in live for node in state.in_sync_nodes) else NoLeader.NONE_ALIVE
    order = {node: number for number, node in enumerate(state.replicas)}
    last = len(order)
    return sorted(
        whole, key=lambda node: (node.node not in order, node.is_draining, node.is_full, order.get(node.node, last))
    )


def can_go_on(state: PartitionState, live: Mapping[str, NodeRecord], least: int) -> bool:
    """Whether somebody can be elected, and so many of those who have a copy live, as is needed to acknowledge.

    Args:
        live: the nodes that may be counted on.
        least: so many.
    """
    found = candidates(state, live)
    if isinstance(found, NoLeader) or all(node.is_full or node.is_ending for node in found):
        return False
    return sum(node in live and not live[node].is_ending for node in state.holders) >= least


# -- as bytes ----------------------------------------------------------------------------------------------------------

_V = TypeVar("_V", bound=_Value)
encode = msgspec.json.Encoder().encode
"""The bytes of a value."""


def decode(key: str, value: bytes, kind: type[_V]) -> _V:
    """Read a value.

    Raises:
        BadState: it is nothing of the kind.
    """
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadState(key, f"not a {kind.__name__}: {error}; a newer release wrote it, or it was changed") from None
