"""The rights of clients on this node: publishing to, consuming and reading what is led here and ready, nothing else.

Rules of this file: nothing is changed here; it is asked for every command, so it costs a few look-ups.

Source: docs/decisions/0017, 0018.
"""

from __future__ import annotations

from collections.abc import Callable

from flintmq.addresses import format_address
from flintmq.broker.broker import Broker
from flintmq.broker.partition import Ended, Partition
from flintmq.cluster.view import View
from flintmq.errors import RemoteProtocolError
from flintmq.nsqd import partitions
from flintmq.nsqd.client import Client
from flintmq.nsqd.cluster.bringing import is_brought
from flintmq.nsqd.cluster.led import Led
from flintmq.nsqd.cluster.room import DiskRoom
from flintmq.nsqd.cluster.serving import Serving
from flintmq.nsqd.cluster.table import Table
from flintmq.nsqd.leadership import LedElsewhere, NotOfOneNode, OfTheCluster, not_leader, not_writable
from flintmq.nsqd.pending_reply import PendingReply
from flintmq.storage import PartitionLog
from flintmq.wire.server import NOT_A_NUMBER, Publish, Subscribe


class Admission:
    """The :class:`flintmq.nsqd.leadership.Leadership` of a node in a cluster.

    Attributes:
        is_ending: nothing more is to be published here, because others are about to lead.
        problem: why this node takes part in the cluster no longer: what others lead has to be asked of them; empty: it
            does.

    Args:
        node_id: of this node.
        serving: for what is led elsewhere.
        why_refused: tells why the cluster has not taken a topic of this node, and what to do; empty: it may.
    """

    def __init__(
        self,
        broker: Broker,
        node_id: str,
        view: View,
        table: Table,
        serving: Serving,
        room: DiskRoom,
        why_refused: Callable[[str], str],
    ) -> None:
        self.is_ending = False
        self.problem = ""
        self._broker = broker
        self._node_id = node_id
        self._replicas = broker.replicas
        self._view = view
        self._led = table.led
        self._by_partition = table.by_partition
        self._serving = serving
        self._room = room
        self._why_refused = why_refused

    def to_publish(self, event: Publish) -> Partition | None:
        """See :class:`flintmq.nsqd.leadership.Leadership`."""
        topics, name, number = self._broker.topics, event.topic, event.partition
        if self.is_replicated(name):
            is_named = number is not None and number != NOT_A_NUMBER
            if is_named and number is not None:
                if (name, number) not in self._led and self._is_of_cluster(name, number):
                    raise not_leader(event.command, name, number, "is led by another node", fatal=False)
            elif name not in topics:
                raise not_leader(event.command, name, None, "is led by other nodes", fatal=False)
        found = partitions.to_publish(topics, event)
        led = None if found is None else self._by_partition.get(found)
        if found is None:
            return None
        if led is None:
            self._check_alone(event.command, found)
            return found
        if self.is_ending:
            raise not_writable(event.command, name, found.number, "is about to be led by another node")
        if not led.is_writable:
            raise not_writable(event.command, name, found.number, "has too few replicas that acknowledge")
        if self._room.is_full and self._others_have_room(led):
            raise not_writable(event.command, name, found.number, "has no room here: another replica is about to lead")
        return found

    def _check_alone(self, command: str, partition: Partition) -> None:
        """See that the cluster does not have another topic of the name of one that is this node's alone."""
        name, number = partition.topic_name, partition.number
        if name not in self._view.topics or not partition.meta.is_partitioned:
            return
        why = self._why_refused(name)
        state = self._view.partitions.get((name, number))
        if not why and state is not None and isinstance(partition.log, PartitionLog):
            if is_brought(state, partition.log.log_id, self._node_id):
                return  # it is the cluster's in a moment
            why = "the cluster has one of this name, the log of this node says more"
        if why:
            raise not_writable(command, name, number, f"is node {self._node_id}'s alone, publish elsewhere: {why}")

    def _others_have_room(self, led: Led) -> bool:
        """Whether another one in sync can take over; else it is tried here, and its error says what is wrong."""
        nodes = self._view.nodes
        others = [nodes.get(node) for node in led.leading.state.in_sync_nodes if node != self._node_id]
        return any(each is not None and not each.is_full and not each.is_draining for each in others)

    def to_consume(self, event: Subscribe) -> list[int] | None:
        """See :class:`flintmq.nsqd.leadership.Leadership`."""
        topics, name, number = self._broker.topics, event.topic, event.partition
        is_named = number is not None and number != NOT_A_NUMBER
        if self.is_replicated(name):
            partitions.check_start(event, self._partition_num(name))
            if name not in topics or (
                is_named
                and number is not None
                and (name, number) not in self._led
                and self._is_of_cluster(name, number)
            ):
                raise not_leader(
                    event.command, name, number if is_named else None, "is led by another node", fatal=True
                )
        numbers = partitions.to_consume(topics, event, self._broker.is_order_must)
        if self.is_replicated(name):
            for each in topics[name].partitions if numbers is None else numbers:
                led = self._led.get((name, each))
                if led is None or not led.is_ready:
                    why = "is not ready: its leader was elected a moment ago"
                    raise not_leader(event.command, name, each, why, fatal=True)
        return numbers

    def check_read(self, command: str, topic: str, number: int | None) -> None:
        """See :class:`flintmq.nsqd.leadership.Leadership`."""
        if not self.is_replicated(topic):
            return
        held = self._broker.topics.get(topic)
        numbers = ([] if held is None else list(held.partitions)) if number is None else [number]
        if number is not None and not self._is_of_cluster(topic, number):
            return
        for each in numbers:
            led = self._led.get((topic, each))
            if led is None or not led.is_ready:
                why = "is led by another node" if led is None else "is not ready: its leader was elected a moment ago"
                raise not_leader(command, topic, each, why, fatal=False)
        if not numbers:
            raise not_leader(command, topic, None, "is led by other nodes", fatal=False)

    def led_elsewhere(self, topic: str) -> list[LedElsewhere] | None:
        """See :class:`flintmq.nsqd.leadership.Leadership`."""
        if not self.is_replicated(topic):
            return None
        states = self._view.of_topic.get(topic, {})
        found: list[LedElsewhere] = []
        for number in sorted(states.keys() | self._replicas.of_topic(topic).keys()):
            led = self._led.get((topic, number))
            if led is not None and led.is_ready:
                continue
            state = states.get(number)
            if state is None:  # the store has not told of it yet, or somebody else's store is asked
                replica = self._replicas[topic, number]
                found.append(LedElsewhere(number, replica.log_id, replica.epoch, ""))
                continue
            node = self._view.nodes.get(state.leader) if state.has_leader(self._view.nodes) else None
            address = "" if node is None or node.node == self._node_id else format_address(node.host, node.tcp_port)
            found.append(LedElsewhere(number, state.log_id, state.epoch, address))
        return found

    def elsewhere(self, event: Publish) -> PendingReply | None:
        """See :class:`flintmq.nsqd.leadership.Leadership`."""
        name = event.topic
        if name in self._broker.topics:
            return None
        if (refusal := self._why_no_part(event.command, name, fatal=False)) is not None:
            raise refusal
        return self._serving.elsewhere(event, self.is_replicated(name))

    def prepare(self, client: Client, event: Subscribe) -> Ended | None:
        """See :class:`flintmq.nsqd.leadership.Leadership`."""
        refusal = self._why_no_part(event.command, event.topic, fatal=True)
        if refusal is not None and event.topic not in self._broker.topics:
            ended = Ended()
            ended.end(refusal)
            return ended
        is_replicated = self.is_replicated(event.topic)
        if is_replicated:
            try:
                partitions.check_start(event, self._partition_num(event.topic))
            except RemoteProtocolError:
                return None  # nothing is made for what is refused
        return self._serving.prepare(client, event, is_replicated)

    def _why_no_part(self, command: str, topic: str, fatal: bool) -> RemoteProtocolError | None:
        """Return the error for a topic of the cluster, in which this node takes part no longer; None: it does."""
        if not self.problem or (self._serving.is_own(topic) and not self.is_replicated(topic)):
            return None
        return not_leader(command, topic, None, f"is led by other nodes: {self.problem}", fatal)

    def relay(self, client: Client, event: Subscribe) -> Ended | None:
        """See :class:`flintmq.nsqd.leadership.Leadership`."""
        return self._serving.relay(client, event, self.is_replicated(event.topic))

    def wish(self, topic: str, is_extended: bool = False) -> Ended | None:
        """See :class:`flintmq.nsqd.leadership.Leadership`."""
        return self._serving.wish(topic, is_extended, self.is_replicated(topic))

    def check_create(self, topic: str) -> None:
        """See :class:`flintmq.nsqd.leadership.Leadership`."""
        if self.is_replicated(topic):
            raise OfTheCluster(topic)
        if topic not in self._broker.topics and not self._serving.is_own(topic):
            raise NotOfOneNode(topic)

    def check_delete(self, topic: str) -> None:
        """See :class:`flintmq.nsqd.leadership.Leadership`."""
        if self.is_replicated(topic):
            raise OfTheCluster(topic)

    def was_deleted(self, topic: str) -> bool:
        """See :class:`flintmq.nsqd.leadership.Leadership`."""
        is_own = topic in self._broker.topics and not self.is_replicated(topic)
        return not is_own and self._view.was_deleted(topic)

    def is_replicated(self, topic: str) -> bool:
        """See :class:`flintmq.nsqd.leadership.Leadership`."""
        if self._replicas.of_topic(topic):
            return True
        # what this node had before it joined stays its own until it is given to the cluster
        return topic in self._view.topics and topic not in self._broker.topics

    def is_ready(self, topic: str, number: int) -> bool:
        """Whether a partition may be read here; also of what is no business of the cluster."""
        led = self._led.get((topic, number))
        return led.is_ready if led is not None else not self.is_replicated(topic)

    def _partition_num(self, topic: str) -> int:
        """Of a topic of the cluster, whether or not it has partitions for clients."""
        return len(self._view.of_topic.get(topic, {}).keys() | self._replicas.of_topic(topic).keys())

    def _is_of_cluster(self, topic: str, number: int) -> bool:
        return (topic, number) in self._view.partitions or number in self._replicas.of_topic(topic)
