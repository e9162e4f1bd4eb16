"""nsqlookupd's database: which nsqd nodes serve which topics and channels.

In memory only; every nsqd says everything again when it connects. The single owner of registrations; it never does IO
and never reads a clock: ``now_ns`` is monotonic time and comes in.

Invariants:

- I1: a topic or channel that some node is registered for exists; a node's index names exactly those.
- I2: a node registered for a channel is registered for its topic.
- I3: topics and channels stay when their last node goes, until they are deleted, except ephemeral ones, which go with
  it (upstream keeps their keys after a disconnect: a leak). The channels of a topic go with the topic.
- I4: lists come out sorted by name, nodes by address, so that two questions get one answer.
- I5: what peers can make grow is bounded: registrations per node, and topics and channels in all.

Source: NSQ's nsqlookupd, NSQ's defects; partitions: Youzan's nsqlookupd.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from flintmq.addresses import format_address
from flintmq.errors import FlintError
from flintmq.names import is_ephemeral
from flintmq.topic_meta import PLAIN, TopicMeta

REGISTRATIONS_PER_NODE_MAX = 100_000
KEYS_MAX = 1_000_000

TOPIC_ITSELF = ""
"""Stands for the topic where a channel could be named; no channel has an empty name."""


class TooManyRegistrations(FlintError):
    """A bound of the database is reached.

    Args:
        what: what there is too much of.
        limit: how many there may be.
    """

    def __init__(self, what: str, limit: int) -> None:
        super().__init__(what, limit)
        self.what = what
        self.limit = limit

    def __str__(self) -> str:
        return f"too many {self.what}, at most {self.limit}; delete topics or channels that are not used"


@dataclass(slots=True)
class NsqdNode:
    """One connected nsqd (a *producer* in nsqlookupd's JSON).

    Attributes:
        node_id: unique per connection: its remote address.
        last_update_ns: monotonic time of its last IDENTIFY or PING.
        distributed_id: empty for an nsqd without partitions.
        is_draining: it takes no more messages.
    """

    node_id: str
    remote_address: str
    hostname: str
    broadcast_address: str
    tcp_port: int
    http_port: int
    version: str
    topology_zone: str = ""
    topology_region: str = ""
    distributed_id: str = ""
    last_update_ns: int = 0
    is_draining: bool = False

    @property
    def http_address(self) -> str:
        """The address of its HTTP API, as people write it."""
        return format_address(self.broadcast_address, self.http_port)

    def is_at(self, http_address: str) -> bool:
        """Whether its HTTP API is there; NSQ writes IPv6 hosts without brackets."""
        return http_address in (self.http_address, f"{self.broadcast_address}:{self.http_port}")

    @property
    def sort_key(self) -> tuple[str, int, str]:
        return self.broadcast_address, self.tcp_port, self.node_id


@dataclass(slots=True)
class Registration:
    """One node's registration for one topic or channel.

    Attributes:
        tombstoned_at_ns: when it was hidden, None if never; only topics are tombstoned.
        partitions: those the node named, sorted; empty from an nsqd without partitions.
        meta: what the node says that the topic was created with; of a plain topic, and of channels, nothing.
    """

    node: NsqdNode
    tombstoned_at_ns: int | None = None
    partitions: list[int] = field(default_factory=list)
    meta: TopicMeta = PLAIN

    def is_tombstoned(self, now_ns: int, lifetime_ns: int) -> bool:
        return self.tombstoned_at_ns is not None and now_ns - self.tombstoned_at_ns < lifetime_ns


@dataclass(frozen=True, slots=True)
class Lookup:
    """The answer to "who has this topic"."""

    channels: list[str]
    nodes: list[NsqdNode]


@dataclass(frozen=True, slots=True)
class Partitions:
    """The answer to "who has which partition of this topic".

    Attributes:
        meta: as the nodes say; of a plain topic nothing.
        leaders: partition to the node that has it, in their order.
        plain: nodes that have the topic without partitions.
        log_ids: of the partitions of a cluster, whose log is the same whoever leads; 16 hex digits.
    """

    channels: list[str]
    meta: TopicMeta
    leaders: dict[int, NsqdNode]
    plain: list[NsqdNode]
    log_ids: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeTopics:
    """A node and the topics it serves; ``tombstones[i]`` belongs to ``topics[i]``.

    Attributes:
        partitions: of the topics that have some, those that are there.
    """

    node: NsqdNode
    topics: list[str]
    tombstones: list[bool]
    partitions: dict[str, list[int]]


@dataclass(slots=True)
class _Topic:
    """Registrations by node id: ``channels[TOPIC_ITSELF]`` are those of the topic."""

    channels: dict[str, dict[str, Registration]]


@dataclass(slots=True)
class _Entry:
    """A node and the index of what it is registered for: (topic, channel or TOPIC_ITSELF)."""

    node: NsqdNode
    registered: dict[tuple[str, str], None]


class RegistrationDatabase:
    """Topics, channels and the nodes that serve them.

    Args:
        inactive_timeout_ns: a node that was silent for longer is not listed.
        tombstone_lifetime_ns: how long a tombstone hides a node from ``/lookup`` of one topic.
    """

    def __init__(
        self,
        inactive_timeout_ns: int,
        tombstone_lifetime_ns: int,
        registrations_per_node_max: int = REGISTRATIONS_PER_NODE_MAX,
        keys_max: int = KEYS_MAX,
    ) -> None:
        self._inactive_timeout_ns = inactive_timeout_ns
        self._tombstone_lifetime_ns = tombstone_lifetime_ns
        self._registrations_per_node_max = registrations_per_node_max
        self._keys_max = keys_max
        self._key_count = 0
        self._topics: dict[str, _Topic] = {}
        self._entries: dict[str, _Entry] = {}

    # --- nodes

    def add_node(self, node: NsqdNode) -> None:
        """Take a node that identified itself; its id must be new."""
        assert node.node_id not in self._entries, f"node {node.node_id} identified twice"
        self._entries[node.node_id] = _Entry(node, {})

    def touch(self, node_id: str, now_ns: int) -> int:
        """Note that a node is alive.

        Returns:
            Nanoseconds since it last was.
        """
        node = self._entries[node_id].node
        silent_ns = now_ns - node.last_update_ns
        node.last_update_ns = now_ns
        return silent_ns

    def remove_node(self, node_id: str) -> list[tuple[str, str]]:
        """Drop a node and all its registrations; an unknown one is ignored.

        Returns:
            What it was registered for: (topic, channel), the channel empty for the topic itself.
        """
        entry = self._entries.get(node_id)
        if entry is None:
            return []
        registered = list(entry.registered)
        for topic, channel in registered:
            self._forget(entry, topic, channel)
        del self._entries[node_id]
        return registered

    # --- registrations

    def register(self, node_id: str, topic: str, channel: str = TOPIC_ITSELF, partition: int | None = None) -> bool:
        """Note that a node serves a topic, and a channel of it if one is named. A tombstone is not lifted.

        Returns:
            Whether anything changed.

        Raises:
            TooManyRegistrations: a bound is reached (I5); nothing was changed.
        """
        entry = self._entries[node_id]
        wanted = list(dict.fromkeys(((topic, TOPIC_ITSELF), (topic, channel))))
        new_count = sum(key not in entry.registered for key in wanted)
        if len(entry.registered) + new_count > self._registrations_per_node_max:
            raise TooManyRegistrations("registrations of one nsqd", self._registrations_per_node_max)
        self._create(topic, channel)
        has_changed = False
        for _, name in wanted:
            nodes = self._topics[topic].channels[name]
            registration = nodes.get(node_id)
            if registration is None:
                registration = nodes[node_id] = Registration(entry.node)
                entry.registered[topic, name] = None
                has_changed = True
            if partition is not None and partition not in registration.partitions:
                registration.partitions.append(partition)
                registration.partitions.sort()
                has_changed = True
        return has_changed

    def describe_topic(self, node_id: str, topic: str, meta: TopicMeta) -> bool:
        """Note what a topic with partitions was created with, by a node that serves it.

        Returns:
            Whether anything changed.

        Raises:
            TooManyRegistrations: a bound is reached (I5); nothing was changed.
        """
        has_changed = self.register(node_id, topic)
        registration = self._topics[topic].channels[TOPIC_ITSELF][node_id]
        has_changed = has_changed or registration.meta != meta
        registration.meta = meta
        return has_changed

    def unregister(
        self, node_id: str, topic: str, channel: str = TOPIC_ITSELF, partition: int | None = None
    ) -> list[tuple[str, str]]:
        """Note that a node no longer serves a channel, or the topic and all its channels when none is named.

        Args:
            partition: of a node with partitions: only that one; the registration goes with the last.

        Returns:
            The registrations that went: (topic, channel), the channel empty for the topic itself.
        """
        entry = self._entries[node_id]
        found = self._topics.get(topic)
        if found is None:
            return []
        # The topic itself comes last: dropping it may drop the topic and its channels.
        names = [channel] if channel else [name for name in found.channels if name] + [TOPIC_ITSELF]
        gone: list[tuple[str, str]] = []
        for name in names:
            registration = found.channels.get(name, {}).get(node_id)
            if registration is not None and partition is not None:
                if partition in registration.partitions:
                    registration.partitions.remove(partition)
                if registration.partitions:
                    continue
            if registration is not None:
                gone.append((topic, name))
            self._forget(entry, topic, name)
        return gone

    def tombstone(self, topic: str, http_address: str, now_ns: int | None) -> int:
        """Hide nodes from lookups of one topic for the tombstone's lifetime, or no longer.

        Args:
            http_address: ``broadcast_address:http_port``; an IPv6 host with brackets or without.
            now_ns: None lifts the tombstone.

        Returns:
            How many nodes matched.
        """
        count = 0
        for registration in self._registrations(topic, TOPIC_ITSELF):
            if registration.node.is_at(http_address):
                registration.tombstoned_at_ns = now_ns
                count += 1
        return count

    # --- keys by hand (HTTP)

    def create(self, topic: str, channel: str = TOPIC_ITSELF) -> None:
        """Create a topic, and a channel of it if one is named, without a node.

        Raises:
            TooManyRegistrations: there are too many topics and channels (I5).
        """
        self._create(topic, channel)

    def delete_topic(self, topic: str) -> list[str]:
        """Delete a topic and its channels, registrations included.

        Returns:
            The channels that went.
        """
        found = self._topics.get(topic)
        if found is None:
            return []
        channels = sorted(name for name in found.channels if name)
        for name in [*channels, TOPIC_ITSELF]:
            self._delete_key(topic, name)
        return channels

    def delete_channel(self, topic: str, channel: str) -> bool:
        """Delete a channel, registrations included; False when there is none."""
        if channel not in self._channels(topic):
            return False
        self._delete_key(topic, channel)
        return True

    # --- questions

    def lookup(self, topic: str, now_ns: int) -> Lookup | None:
        """Return a topic's channels and its live, not tombstoned nodes; None for an unknown topic."""
        if topic not in self._topics:
            return None
        nodes = [
            registration.node
            for registration in self._registrations(topic, TOPIC_ITSELF)
            if self._is_active(registration.node, now_ns)
            and not registration.is_tombstoned(now_ns, self._tombstone_lifetime_ns)
        ]
        return Lookup(self.channels(topic), nodes)

    def partitions(self, topic: str, now_ns: int, hides_tombstoned: bool = False) -> Partitions | None:
        """Return a topic's channels, partitions and live nodes; None for an unknown topic.

        Of several nodes that claim a partition the first by address has it, for every nsqlookupd the same one.

        Args:
            hides_tombstoned: as who publishes has to see it, so without nodes that take no messages, too.
        """
        if topic not in self._topics:
            return None
        leaders: dict[int, NsqdNode] = {}
        plain: list[NsqdNode] = []
        for registration in self._registrations(topic, TOPIC_ITSELF):
            node = registration.node
            if not self._is_active(node, now_ns):
                continue
            is_tombstoned = registration.is_tombstoned(now_ns, self._tombstone_lifetime_ns)
            if hides_tombstoned and (is_tombstoned or node.is_draining):
                continue
            for number in registration.partitions:
                leaders.setdefault(number, node)
            if not registration.partitions and not registration.meta.is_partitioned:
                plain.append(node)
        return Partitions(self.channels(topic), self.meta(topic), dict(sorted(leaders.items())), plain)

    def meta(self, topic: str) -> TopicMeta:
        """Return what a topic was created with and changed to; :data:`PLAIN` for a plain or unknown one.

        Nodes agree, or the highest version wins, and of one version the most partitions. Headers that a topic has on
        some nodes because it was created with them there are no change that the others have missed.
        """
        metas = [registration.meta for registration in self._registrations(topic, TOPIC_ITSELF)]
        return max(metas, key=_precedence, default=PLAIN)

    def behind(self, topic: str) -> list[NsqdNode]:
        """Return the nodes that have missed a change of a topic which another one has."""
        meta = self.meta(topic)
        return [
            registration.node
            for registration in self._registrations(topic, TOPIC_ITSELF)
            if registration.meta.rank < meta.rank and registration.meta.partition_num == meta.partition_num
        ]

    def channels_of_partition(self, topic: str, partition: int) -> list[str]:
        """Return the channels that some node has of one partition."""
        found = []
        for name, nodes in self._channels(topic).items():
            if name and any(partition in registration.partitions for registration in nodes.values()):
                found.append(name)
        return sorted(found)

    def claims(self, topic: str, now_ns: int) -> list[Registration]:
        """Return what live nodes have registered of a topic, in whatever form."""
        return [each for each in self._registrations(topic, TOPIC_ITSELF) if self._is_active(each.node, now_ns)]

    def is_hidden(self, registration: Registration, now_ns: int) -> bool:
        """Whether a registration is tombstoned."""
        return registration.is_tombstoned(now_ns, self._tombstone_lifetime_ns)

    def holders(self, topic: str) -> list[NsqdNode]:
        """Return every connected node that has a topic, in whatever form."""
        return [registration.node for registration in self._registrations(topic, TOPIC_ITSELF)]

    def topics(self) -> list[str]:
        """Return all topics, with and without nodes."""
        return sorted(self._topics)

    def channels(self, topic: str) -> list[str]:
        """Return all channels of a topic; none of an unknown one."""
        return sorted(name for name in self._channels(topic) if name)

    def nodes(self, now_ns: int) -> list[NodeTopics]:
        """Return all live nodes, tombstoned ones included, with their topics."""
        listed = []
        for entry in sorted(self._entries.values(), key=lambda entry: entry.node.sort_key):
            if not self._is_active(entry.node, now_ns):
                continue
            topics = sorted(topic for topic, channel in entry.registered if not channel)
            tombstones = [
                self._topics[topic]
                .channels[TOPIC_ITSELF][entry.node.node_id]
                .is_tombstoned(now_ns, self._tombstone_lifetime_ns)
                for topic in topics
            ]
            held = {
                topic: self._topics[topic].channels[TOPIC_ITSELF][entry.node.node_id].partitions for topic in topics
            }
            partitions = {topic: list(numbers) for topic, numbers in held.items() if numbers}
            listed.append(NodeTopics(entry.node, topics, tombstones, partitions))
        return listed

    def all_nodes(self) -> list[NsqdNode]:
        """Return every connected node, live or not."""
        return sorted((entry.node for entry in self._entries.values()), key=lambda node: node.sort_key)

    def all_registrations(self) -> Iterator[tuple[str, str, list[Registration]]]:
        """Yield every topic (channel empty) and channel with its registrations, for ``/debug``."""
        for topic in self.topics():
            for channel in sorted(self._topics[topic].channels):
                yield topic, channel, self._registrations(topic, channel)

    def describe(self) -> str:
        """Return counts, for ``/debug`` and failing tests."""
        return f"RegistrationDatabase nodes={len(self._entries)} topics={len(self._topics)} keys={self._key_count}"

    def check(self) -> None:
        """Assert I1 to I3 and the count of keys; for tests."""
        keys = {(topic, name) for topic, found in self._topics.items() for name in found.channels}
        assert len(keys) == self._key_count
        registered = {
            (node_id, topic, name)
            for topic, found in self._topics.items()
            for name, nodes in found.channels.items()
            for node_id in nodes
        }
        indexed = {(node_id, *key) for node_id, entry in self._entries.items() for key in entry.registered}
        assert registered == indexed, "I1"
        assert all((node_id, topic, TOPIC_ITSELF) in registered for node_id, topic, _ in registered), "I2"
        assert all(TOPIC_ITSELF in found.channels for found in self._topics.values())

    # --- inside

    def _is_active(self, node: NsqdNode, now_ns: int) -> bool:
        return now_ns - node.last_update_ns <= self._inactive_timeout_ns

    def _channels(self, topic: str) -> dict[str, dict[str, Registration]]:
        found = self._topics.get(topic)
        return found.channels if found is not None else {}

    def _registrations(self, topic: str, channel: str) -> list[Registration]:
        nodes = self._channels(topic).get(channel, {})
        return sorted(nodes.values(), key=lambda registration: registration.node.sort_key)

    def _create(self, topic: str, channel: str) -> None:
        found = self._topics.get(topic)
        new_count = 1 if found is not None else 1 + bool(channel)
        if found is not None and channel in found.channels:
            return
        if self._key_count + new_count > self._keys_max:
            raise TooManyRegistrations("topics and channels", self._keys_max)
        if found is None:
            found = self._topics[topic] = _Topic({TOPIC_ITSELF: {}})
        found.channels.setdefault(channel, {})
        self._key_count += new_count

    def _forget(self, entry: _Entry, topic: str, channel: str) -> None:
        """Drop one registration, and what was ephemeral and has nobody left (I3)."""
        entry.registered.pop((topic, channel), None)
        nodes = self._channels(topic).get(channel)
        if nodes is None:
            return
        nodes.pop(entry.node.node_id, None)
        if nodes:
            return
        if channel and is_ephemeral(channel):
            self._delete_key(topic, channel)
        elif not channel and is_ephemeral(topic):
            self.delete_topic(topic)

    def _delete_key(self, topic: str, channel: str) -> None:
        found = self._topics[topic]
        for node_id in found.channels.pop(channel):
            self._entries[node_id].registered.pop((topic, channel), None)
        self._key_count -= 1
        if channel == TOPIC_ITSELF:
            del self._topics[topic]


def _precedence(meta: TopicMeta) -> tuple[object, ...]:
    return meta.version, meta.partition_num, meta.version > 0 or not meta.extend_support, meta.rank
