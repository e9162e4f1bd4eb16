"""Subscribing: which channel a client consumes, how it is served, and what becomes of it when the client is gone.

Rules of this file: nothing is created before everything that a command says has been looked at; a client is answered
when its channel can be relied on, see :meth:`Subscribing.subscribe`.

Source: NSQ's TCP protocol (SUB), Youzan's TCP protocol (SUB_ADVANCED, SUB_ORDER), docs/decisions/0006 (CURSOR).
"""

from __future__ import annotations

import logging
from typing import TypeVar

from flintmq.broker.channel import Channel
from flintmq.broker.partition import Ended, Partition
from flintmq.broker.shared_subscription import ChannelParts, PartSubscription, SharedSubscription
from flintmq.broker.subscription import Locality, Subscription
from flintmq.broker.topic import Topic
from flintmq.errors import FlintError, RemoteProtocolError
from flintmq.names import is_ephemeral
from flintmq.nsqd import extended, partitions, start_place
from flintmq.nsqd.client import Client
from flintmq.nsqd.drain import Drain
from flintmq.nsqd.engine import Engine
from flintmq.nsqd.leadership import Leadership
from flintmq.nsqd.options import NsqdOptions
from flintmq.nsqd.topics import Topics
from flintmq.nsqd.topology import Topology
from flintmq.wire.server import NOT_A_NUMBER, Cursor, Subscribe

log = logging.getLogger(__name__)
AnySubscription = TypeVar("AnySubscription", bound=Subscription)

_HOLD_AGAIN_NS = 1_000_000_000  # before publishes to a topic have to wait for another new channel


def is_of_nsq(client: Client, event: Subscribe) -> bool:
    """Whether a subscription is as NSQ has it, of a client that has not said that it knows more.

    Such a client may take ids for text, which in NSQ they are.
    """
    return event.command == "SUB" and not event.names_partition and not client.request.extend_support


class Subscribing:
    """Attaches clients to channels, and detaches them.

    Args:
        is_for_nodes: other nodes subscribe, each for a client of its own, and make of ids what that client knows.

    Attributes:
        leadership: asked which partitions are led here; None: all that are here.
    """

    def __init__(
        self, engine: Engine, drain: Drain, topics: Topics, options: NsqdOptions, is_for_nodes: bool = False
    ) -> None:
        self._engine = engine
        self._is_for_nodes = is_for_nodes
        self._broker = engine.broker
        self._drain = drain
        self._topics = topics
        self._topology = Topology.of(options)
        self._msg_timeout_ms = options.msg_timeout_ns // 1_000_000
        self._max_msg_timeout_ns = options.max_msg_timeout_ns
        self._consumers_max = options.max_channel_consumers
        self.leadership: Leadership | None = None
        # who has asked for all of a replicated topic that is led here, now and later
        self._following: dict[str, dict[Client, Subscribe]] = {}

    def prepare(self, client: Client, event: Subscribe) -> Ended | None:
        """Return what has to end before :meth:`subscribe`; None: nothing."""
        if self.leadership is None or self._drain.is_exiting:
            return None
        return self.leadership.prepare(client, event)

    def subscribe(self, client: Client, event: Subscribe) -> Ended:
        """Attach a client to a channel; what is returned ends when the channel can be relied on.

        That is when it is durable, or nothing can be stored in its topic before it is.

        Raises:
            FlintError: the channel has as many consumers as are allowed, or this nsqd is shutting down.
            RemoteProtocolError: the topic cannot be had in this way.
        """
        self._drain.check_exiting()
        client.has_hex_ids = not self._is_for_nodes and is_of_nsq(client, event)
        broker = self._broker
        leadership = self.leadership
        if leadership is not None and (relayed := leadership.relay(client, event)) is not None:
            relayed.waiters.append(client)
            return relayed
        if leadership is None:
            numbers = partitions.to_consume(broker.topics, event, broker.is_order_must)
        else:
            numbers = leadership.to_consume(event)
        start = start_place.start_of(event)
        knows_headers = client.request.extend_support
        extended.check_support(broker.topics, event, knows_headers)
        if client.ext_filter is not None:
            extended.check_filtered(broker.topics, event, knows_headers)
        if event.is_ordered and client.negotiated is not None and client.negotiated.sample_rate:
            raise RemoteProtocolError("E_INVALID", f"{event.command} cannot be sampled", fatal=True)
        is_extended = knows_headers and event.topic not in broker.topics
        topic = self._topics.wanted(event.command, event.topic, is_extended)
        _, is_new = broker.channel(topic, event.channel, numbers=numbers)
        channels = {number: topic.partitions[number].channels[event.channel] for number in numbers or topic.partitions}
        limit = self._consumers_max
        if limit and any(len(channel.subscriptions) >= limit for channel in channels.values()):
            raise FlintError(f"consumers for {event.topic}:{event.channel} exceeds limit of {limit}")
        if event.is_ordered:
            broker.order_channel(topic, event.channel, True)
        if start is not None:
            start_place.begin_at(broker, topic, channels, start)
        self._attach(client, topic, channels, event)
        if not event.is_ordered:
            self._topics.relax_order(topic, event.channel)
            if any(channel.keep_floor is not None for channel in channels.values()):
                what = "is consumed in order, so this consumer gets one message at a time"
                log.info("TOPIC(%s): client %s: channel %s %s", topic.name, client.peer, event.channel, what)
        is_passing = topic.ephemeral or is_ephemeral(event.channel)
        is_owed = any(
            channel.depth or channel.end < topic.partitions[number].log.next_sequence
            for number, channel in channels.items()
        )
        # what is there waits for it after a kill as well, unless nsqlookupd's channels come before it then
        is_first = not topic.is_starting and all(len(topic.partitions[number].channels) == 1 for number in channels)
        is_simple = (is_new or is_passing) and not event.is_ordered and (is_first or not is_owed) and start is None
        if leadership is not None and leadership.is_replicated(topic.name):
            is_simple = False  # another node may go on, which has to know the channel
        if is_simple and (
            (is_passing and topic.first_partition.log.is_created)
            or self._hold_until_durable(client, topic, event.command)
        ):
            ended = Ended()
            ended.end(None)
            return ended
        return self._when_durable(client, topic)

    def _attach(self, client: Client, topic: Topic, channels: dict[int, Channel], event: Subscribe) -> None:
        """Let a client consume a channel in the partitions that it was given."""
        client.topic = topic
        leadership = self.leadership
        is_following = (
            leadership is not None
            and event.partition in (None, NOT_A_NUMBER)
            and not event.is_ordered
            and leadership.is_replicated(topic.name)
        )
        if is_following:
            self._following.setdefault(topic.name, {})[client] = event
        if len(channels) == 1 and not is_following:
            (client.channel,) = channels.values()
            (number,) = channels
            client.subscription = self._subscription(client, Subscription, topic.partitions[number], event)
            client.subscription.wants_order = event.is_ordered
            client.channel.add(client.subscription)
        else:
            held = topic.partitions
            parts = {n: self._subscription(client, PartSubscription, held[n], event) for n in channels}
            client.channel = ChannelParts(channels, parts)
            client.subscription = SharedSubscription(list(parts.values()))
            for number, channel in channels.items():
                channel.add(parts[number])

    def followers(self) -> list[tuple[Client, Subscribe]]:
        """Return who is given all that is led here of a replicated topic, and what each has asked for."""
        return [each for clients in self._following.values() for each in clients.items()]

    def partitions_changed(self, name: str) -> None:
        """Have those who consume all of a topic consume what has come to be led here."""
        topic = self._broker.topics.get(name)
        leadership = self.leadership
        if topic is None or leadership is None:
            return
        for client, event in list(self._following.get(name, {}).items()):
            subscription, parts = client.subscription, client.channel
            if not isinstance(subscription, SharedSubscription) or not isinstance(parts, ChannelParts):
                continue
            for number, partition in topic.partitions.items():
                if number not in parts.numbers and leadership.is_ready(name, number):
                    self._broker.channel(topic, event.channel, numbers=[number])
                    channel = partition.channels[event.channel]
                    part = self._subscription(client, PartSubscription, partition, event)
                    parts.add(number, channel, part)
                    subscription.add(part)
                    channel.add(part)
                    self._broker.mark(channel)
            client.topic = topic
        self._engine.schedule()

    def let_go(self, subscription: Subscription, number: int) -> bool:
        """Have a client go on without a partition that is led here no longer; False when it has no other."""
        client = subscription.owner
        if not isinstance(client, Client) or not isinstance(client.channel, ChannelParts):
            return False
        shared = client.subscription
        is_following = client.topic is not None and client in self._following.get(client.topic.name, {})
        if not is_following or not isinstance(shared, SharedSubscription) or len(shared.parts) < 2:
            return False
        shared.remove(subscription)
        client.channel.remove(number)
        return True

    def _hold_until_durable(self, client: Client, topic: Topic, command: str) -> bool:
        """Let nothing be stored in a topic before a channel is that a client has subscribed to; False: not now.

        So the client can be answered at once, and has every message that is acknowledged from then on. What is stored
        already would not be its own after a kill, so the channel must be owed none of it, or be the first: what a topic
        without channels has waits for the first that comes. Publishes do not wait for the new channels of one client
        after the other.
        """
        now_ns = self._engine.env.clock.monotonic_ns

        def done(error: BaseException | None) -> None:
            if any(partition.has_pending for partition in topic.partitions.values()):
                topic.waited_ns = now_ns()
            if error is not None:
                client.dismiss("E_SUB_FAILED", f"{command} failed {error}")

        is_often = now_ns() - topic.waited_ns < _HOLD_AGAIN_NS
        return not is_often and self._broker.hold_until_durable(topic, done)

    def _when_durable(self, client: Client, topic: Topic) -> Ended:
        ended = self._topics.when_durable(topic)
        ended.waiters.append(client)
        return ended

    def _subscription(
        self, client: Client, kind: type[AnySubscription], partition: Partition, event: Subscribe
    ) -> AnySubscription:
        negotiated = client.negotiated
        msg_timeout_ms = negotiated.msg_timeout_ms if negotiated else self._msg_timeout_ms
        subscription = kind(
            client.out,
            msg_timeout_ms * 1_000_000,
            self._max_msg_timeout_ns,
            negotiated.sample_rate if negotiated else 0,
            client,
            self._topology.locality(negotiated.request) if negotiated else Locality.GLOBAL,
        )
        subscription.is_located = event.is_located
        subscription.has_hex_ids = client.has_hex_ids and partition.meta.has_raw_ids
        extended.lay_out(subscription, partition, client.request.extend_support)
        if negotiated is not None and partition.meta.extend_support:
            subscription.tag = negotiated.request.desired_tag
            subscription.ext_filter = client.ext_filter
        return subscription

    def unsubscribe(self, client: Client) -> None:
        """Detach a client that is gone; what it held is queued again."""
        channel, topic, subscription = client.channel, client.topic, client.subscription
        assert channel is not None and topic is not None and subscription is not None
        client.subscription = None
        followers = self._following.get(topic.name)
        if followers is not None:
            followers.pop(client, None)
            if not followers:
                del self._following[topic.name]
        if client.relay is not None:
            client.relay.close()
        broker = self._broker
        if broker.topics.get(topic.name) is not topic or channel.name not in topic.channel_names:
            return
        for part in topic.channels(channel.name):
            for each in subscription.parts if isinstance(subscription, SharedSubscription) else (subscription,):
                if each in part.subscriptions:
                    part.remove(each)
                    broker.mark(part)
        self._topics.relax_order(topic, channel.name)
        self._engine.schedule()
        if channel.ephemeral and not any(part.subscriptions for part in topic.channels(channel.name)):
            self._topics.delete_channel(topic, channel.name)

    def place_cursor(self, client: Client, topic: Topic, event: Cursor) -> tuple[Ended, Channel]:
        """Create a channel at a position or confirm up to it; what is returned first ends when that is durable."""
        broker = self._broker
        log_start = topic.partitions[event.partition].log.start_sequence
        log_end = topic.partitions[event.partition].log.committed_sequence
        # the other partitions get a word of their own; until then nothing of them is passed over
        others = {-1: (1 << 62)}.get(event.sequence, 0)
        at = dict.fromkeys(topic.partitions, others)
        at[event.partition] = {-1: log_end, -2: log_start}.get(event.sequence, event.sequence)
        _, is_new = broker.channel(topic, event.channel, at, (event.partition,))
        channel = topic.partitions[event.partition].channels[event.channel]
        if not is_new and event.sequence >= 0:
            channel.confirm(event.sequence)
            broker.mark(channel)
            self._engine.schedule()
        return self._when_durable(client, topic), channel
