"""Everything that is known of a cluster: its values as the store last told them, and the revisions to swap them by.

Fed with what :func:`flintmq.cluster.store.follow` yields; every nsqd and nsqlookupd has one.

Invariants:

- I1: what is here was in the store at ``revision``, and nothing else was, but for what cannot be read.
- I2: a value that cannot be read is in ``unreadable`` and nowhere else; nobody takes it for one that is gone.
- I3: the indexes name exactly the partitions that are here.

Source: docs/decisions/0017.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from flintmq.cluster.keys import Keys
from flintmq.cluster.state import (
    BadState,
    ClusterRecord,
    DiskRecord,
    DrainRecord,
    LookupdRecord,
    NodeRecord,
    PartitionState,
    SettingsRecord,
    TopicRecord,
    WantedTopic,
    decode,
)
from flintmq.cluster.store import Events, KeyValue, Snapshot
from flintmq.limits import PARTITION_COUNT_MAX

DELETED_COUNT_MAX = 10_000
"""Numbers of deleted topics that are remembered."""
PLACE_COUNT_MAX = 1_000
"""Nodes whose address is remembered while they are away, beyond those that the store has it of."""

PartitionId = tuple[str, int]
"""Topic and number."""
_V = TypeVar(
    "_V",
    ClusterRecord,
    DiskRecord,
    DrainRecord,
    LookupdRecord,
    NodeRecord,
    PartitionState,
    SettingsRecord,
    TopicRecord,
    WantedTopic,
)
DEFAULT_SETTINGS = SettingsRecord()


@dataclass(frozen=True, slots=True)
class NodeChange:
    """An nsqd came, changed, or went (``now`` is None)."""

    key: str
    node: str
    before: NodeRecord | None
    now: NodeRecord | None


@dataclass(frozen=True, slots=True)
class TopicChange:
    """A topic came, changed, or went (``now`` is None)."""

    key: str
    topic: str
    before: TopicRecord | None
    now: TopicRecord | None


@dataclass(frozen=True, slots=True)
class PartitionChange:
    """The state of a partition came, changed, or went (``now`` is None).

    Attributes:
        pair: ``now`` as the store has it; the view may know a later one already, when several steps came together.
    """

    key: str
    partition: PartitionId
    before: PartitionState | None
    now: PartitionState | None
    pair: KeyValue | None


@dataclass(frozen=True, slots=True)
class WantedChange:
    """A topic is asked for, was refused, or is asked for no longer (``now`` is None)."""

    key: str
    topic: str
    now: WantedTopic | None


@dataclass(frozen=True, slots=True)
class DrainChange:
    """An nsqd is to have nothing any more, or may have something again (``now`` is None)."""

    key: str
    node: str
    now: DrainRecord | None


@dataclass(frozen=True, slots=True)
class OtherChange:
    """The record of the cluster, its master, its settings, a nsqlookupd or a disk changed; or an unknown key."""

    key: str


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A value was written that cannot be read: what it is about is left as it is."""

    key: str
    error: BadState


Change = NodeChange | TopicChange | PartitionChange | DrainChange | WantedChange | OtherChange | Unreadable


class Fate(Enum):
    """The fate of a topic with a certain number, as far as is known to who has a replica of it."""

    THERE = "there"
    DELETED = "deleted"
    """It was seen to be deleted: the replica is to go."""
    UNKNOWN = "unknown"
    """No such topic is there, and nobody was seen to delete it: the replica is kept aside."""


class View:
    """The values of one cluster. Only read its attributes; :meth:`feed` changes them.

    Attributes:
        revision: of the store, as of the last that was told; 0: nothing was.
        pairs: every key of the cluster as it is in the store, whether or not it can be read.
        cluster: the record of the cluster; None: there is none.
        master: the nsqlookupd that coordinates; None: none does.
        lookupds, nodes, topics: by id and name.
        wanted: topics that are asked for, or were refused.
        disks: how far data directories have counted, by id of the node.
        drains: what is said of nodes that are to have nothing any more, by id.
        settings: of the whole cluster.
        partitions: states by topic and number.
        of_topic: the same by topic, then number.
        led: partitions by the node that their state says leads, whether or not it lives.
        held: partitions by each node that has or is to have some of it, or is in sync.
        unreadable: what cannot be read, by key.
    """

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.revision = 0
        self.pairs: dict[str, KeyValue] = {}
        self.cluster: ClusterRecord | None = None
        self.master: LookupdRecord | None = None
        self.lookupds: dict[str, LookupdRecord] = {}
        self.nodes: dict[str, NodeRecord] = {}
        self.topics: dict[str, TopicRecord] = {}
        self.wanted: dict[str, WantedTopic] = {}
        self.disks: dict[str, DiskRecord] = {}
        self.drains: dict[str, DrainRecord] = {}
        self.settings = DEFAULT_SETTINGS
        self.partitions: dict[PartitionId, PartitionState] = {}
        self.of_topic: dict[str, dict[int, PartitionState]] = {}
        self.led: dict[str, dict[PartitionId, None]] = {}
        self.held: dict[str, dict[PartitionId, None]] = {}
        self.unreadable: dict[str, BadState] = {}
        self._deleted: dict[int, str] = {}  # topics by number that were seen to be deleted, the oldest first
        self._gone: dict[str, NodeRecord] = {}  # as nodes were that were seen to go, the oldest first

    @property
    def is_fed(self) -> bool:
        """Whether anything was told."""
        return self.revision > 0

    def feed(self, told: Snapshot | Events) -> list[Change]:
        """Take what the store tells; return what has changed, in order, every step of it."""
        changes: list[Change] = []
        if isinstance(told, Snapshot):
            found = {pair.key: pair for pair in told.found}
            gone = [key for key in self.pairs if key not in found]
            changes.extend(self._take(key, None) for key in gone)
            different = [pair for key, pair in found.items() if self.pairs.get(key) != pair]
            changes.extend(self._take(pair.key, pair) for pair in different)
        else:
            changes.extend(self._take(event.key, event.now) for event in told.events)
        self.revision = told.revision
        return changes

    def fate(self, topic: str, number: int) -> Fate:
        """Tell what became of the topic of this name that was created with this number."""
        record = self.topics.get(topic)
        if number in self._deleted:
            return Fate.DELETED
        return Fate.THERE if record is not None and record.number == number else Fate.UNKNOWN

    def was_deleted(self, topic: str) -> bool:
        """Whether a topic of this name was seen to be deleted, and there is no other one since."""
        record = self.topics.get(topic)
        return (record is None or record.is_deleting) and topic in self._deleted.values()

    def leader(self, partition: PartitionId) -> NodeRecord | None:
        """Return the node whose living process leads a partition; None: nobody does."""
        state = self.partitions.get(partition)
        if state is None or not state.has_leader(self.nodes):
            return None
        return self.nodes[state.leader]

    def place(self, node: str) -> tuple[str, int, int]:
        """Return host, TCP and HTTP port where clients reach a node, or reached it last; empty and 0: not known."""
        record = self.nodes.get(node) or self._gone.get(node)
        if record is None:
            disk = self.disks.get(node)
            return ("", 0, 0) if disk is None else (disk.host, disk.tcp_port, disk.http_port)
        return (record.host, record.tcp_port, record.http_port)

    def nodes_at(self, host: str, tcp_port: int) -> list[NodeRecord]:
        """Return the nodes that clients reach at an address: several while the lease of one before has not run out."""
        return [node for node in self.nodes.values() if (node.host, node.tcp_port) == (host, tcp_port)]

    # --- inside

    def _take(self, key: str, pair: KeyValue | None) -> Change:
        if pair is None:
            self.pairs.pop(key, None)
        else:
            self.pairs[key] = pair
        self.unreadable.pop(key, None)
        try:
            return self._decoded(key, pair)
        except BadState as error:
            self._decoded(key, None)
            self.unreadable[key] = error
            return Unreadable(key, error)

    def _decoded(self, key: str, pair: KeyValue | None) -> Change:
        keys = self.keys
        if (partition := keys.partition_in(key)) is not None:
            state = _value(key, pair, PartitionState)
            if state is not None and (reason := _contradiction(state)):
                raise BadState(key, f"{reason}; it was changed by hand, restore it")
            return PartitionChange(key, partition, self._set_partition(partition, state), state, pair)
        if (node := keys.name_in(key, "node")) is not None:
            record = _value(key, pair, NodeRecord)
            if record is not None and record.node != node:
                raise BadState(key, f"it is the record of another node, {record.node[:64]!r}")
            before = _set(self.nodes, node, record)
            self._remember_gone(node, before, record)
            return NodeChange(key, node, before, record)
        if (topic := keys.name_in(key, "topic")) is not None:
            meta = _value(key, pair, TopicRecord)
            if meta is not None and not 1 <= meta.partition_num <= PARTITION_COUNT_MAX:
                raise BadState(key, f"it has {meta.partition_num} partitions, it must be 1 to {PARTITION_COUNT_MAX}")
            if meta is not None and meta.is_deleting:
                self._remember_deleted(meta.number, topic)
            return TopicChange(key, topic, _set(self.topics, topic, meta), meta)
        if (topic := keys.name_in(key, "wanted")) is not None:
            wish = _value(key, pair, WantedTopic)
            _set(self.wanted, topic, wish)
            return WantedChange(key, topic, wish)
        if (node := keys.name_in(key, "drain")) is not None:
            drain = _value(key, pair, DrainRecord)
            _set(self.drains, node, drain)
            return DrainChange(key, node, drain)
        if (lookupd := keys.name_in(key, "lookupd")) is not None:
            _set(self.lookupds, lookupd, _value(key, pair, LookupdRecord))
        elif (node := keys.name_in(key, "disk")) is not None:
            _set(self.disks, node, _value(key, pair, DiskRecord))
        elif key == keys.master:
            self.master = None  # also when the new one cannot be read
            self.master = _value(key, pair, LookupdRecord)
        elif key == keys.settings:
            self.settings = DEFAULT_SETTINGS
            self.settings = _value(key, pair, SettingsRecord) or DEFAULT_SETTINGS
        elif key == keys.record:
            self.cluster = _value(key, pair, ClusterRecord)
        return OtherChange(key)

    def _remember_deleted(self, number: int, topic: str) -> None:
        self._deleted[number] = topic
        if len(self._deleted) > DELETED_COUNT_MAX:
            del self._deleted[next(iter(self._deleted))]

    def _remember_gone(self, node: str, before: NodeRecord | None, now: NodeRecord | None) -> None:
        """Keep the last record of a node: its data directory tells the store where it is only once a minute."""
        if now is not None:
            self._gone.pop(node, None)
        elif before is not None:
            self._gone[node] = before
            if len(self._gone) > PLACE_COUNT_MAX:
                del self._gone[next(iter(self._gone))]

    def _set_partition(self, partition: PartitionId, state: PartitionState | None) -> PartitionState | None:
        before = self.partitions.get(partition)
        if before is not None:
            _forget(self.led, (before.leader,), partition)
            _forget(self.held, _holders(before), partition)
        topic, number = partition
        if state is None:
            self.partitions.pop(partition, None)
            numbers = self.of_topic.get(topic, {})
            numbers.pop(number, None)
            if not numbers:
                self.of_topic.pop(topic, None)
            return before
        self.partitions[partition] = state
        self.of_topic.setdefault(topic, {})[number] = state
        if state.leader:
            self.led.setdefault(state.leader, {})[partition] = None
        for node in _holders(state):
            self.held.setdefault(node, {})[partition] = None
        return before

    def check(self) -> None:
        """Assert what has to hold; for tests."""
        assert self.partitions == {
            (topic, number): state for topic, numbers in self.of_topic.items() for number, state in numbers.items()
        }, "I3"
        led = {(state.leader, partition) for partition, state in self.partitions.items() if state.leader}
        assert led == {(node, each) for node, partitions in self.led.items() for each in partitions}, "I3"
        held = {(node, partition) for partition, state in self.partitions.items() for node in _holders(state)}
        assert held == {(node, each) for node, partitions in self.held.items() for each in partitions}, "I3"
        named = [self.keys.partition(*each) for each in self.partitions]
        named += [*map(self.keys.topic, self.topics), *map(self.keys.node, self.nodes)]
        named += [*map(self.keys.lookupd, self.lookupds), *map(self.keys.drain, self.drains)]
        assert not set(named) & set(self.unreadable), "I2"
        assert set(named) | set(self.unreadable) <= set(self.pairs), "I1"


def _value(key: str, pair: KeyValue | None, kind: type[_V]) -> _V | None:
    return None if pair is None else decode(key, pair.value, kind)


def _set(known: dict[str, _V], name: str, value: _V | None) -> _V | None:
    """Set or delete what is known under a name; return what was."""
    before = known.pop(name, None)
    if value is not None:
        known[name] = value
    return before


def _contradiction(state: PartitionState) -> str:
    """Tell what cannot be true of a state; empty when all of it can."""
    if state.leader and state.leader not in state.in_sync_nodes:
        return f"node {state.leader[:64]!r} leads and is not in sync"
    if state.epoch > 0 and not state.in_sync:
        return "nobody is in sync"
    groups = state.in_sync_nodes, state.holders, state.target
    if any(len(set(nodes)) < len(nodes) for nodes in groups):
        return "a node is named twice"
    return ""


def _holders(state: PartitionState) -> dict[str, None]:
    return dict.fromkeys((*state.holders, *state.in_sync_nodes))


def _forget(index: dict[str, dict[PartitionId, None]], nodes: Iterable[str], partition: PartitionId) -> None:
    for node in nodes:
        partitions = index.get(node)
        if partitions is not None:
            partitions.pop(partition, None)
            if not partitions:
                del index[node]
