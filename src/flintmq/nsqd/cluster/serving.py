"""A cluster as the clients of one node see it, beside what is led here: new topics, publishes handed on, relays.

Rules of this file: what is led here costs one look-up more; nothing that a client waits for lasts without a deadline;
ephemeral topics and the trace topic are this node's own.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from flintmq.broker.broker import Broker
from flintmq.broker.partition import Ended, Partition
from flintmq.broker.shared_subscription import ChannelParts
from flintmq.cluster.keys import Keys
from flintmq.cluster.state import NodeRecord
from flintmq.cluster.store import Store
from flintmq.cluster.view import PartitionId, View
from flintmq.env import Env
from flintmq.errors import RemoteProtocolError
from flintmq.message import TRACE_ID_SIZE
from flintmq.names import is_ephemeral
from flintmq.net.problems import Problems
from flintmq.nsqd.client import Client
from flintmq.nsqd.cluster.handing import HandOn, until
from flintmq.nsqd.cluster.led import Led
from flintmq.nsqd.cluster.peers import Peers
from flintmq.nsqd.cluster.relaying import Means, Outcome, Relay, Supplement, greeting_of, subscribed_once
from flintmq.nsqd.cluster.unread import Answers, UnreadElsewhere
from flintmq.nsqd.cluster.wishes import Wishes
from flintmq.nsqd.leadership import Leadership, NotOfOneNode, OfTheCluster, not_leader
from flintmq.nsqd.pending_reply import PendingReply
from flintmq.topic_meta import TopicMeta
from flintmq.wire.commands import COMMANDS
from flintmq.wire.peer import Purpose
from flintmq.wire.server import NOT_A_NUMBER, Publish, Subscribe

log = logging.getLogger(__name__)

AGAIN_S = 0.05
READY_WITHIN_S = 5.0
"""Until a client that wants to subscribe is told that what it asks for cannot be had yet."""


class Serving:
    """The part.

    Args:
        led: what is led here.
        lease: returns the id of the lease that this node is registered with, as soon as it has one.
        own_topics: that are never the cluster's.
        makes_topics: whether the cluster is asked for topics that are not there; else they are made here alone.
        are_created: whether publishing and subscribing make topics at all.
        wants_output: has a client's output written at the end of the turn.
        schedule: has the turn ended.
        msg_timeout_ns: of who has not said another one.

    Attributes:
        publish_here: takes a publish to what is led here, and hands nothing on.
        unread: has consumers here get what nobody consumes elsewhere.
    """

    def __init__(
        self,
        env: Env,
        broker: Broker,
        node: str,
        keys: Keys,
        view: View,
        store: Store,
        peers: Peers,
        led: Mapping[PartitionId, Led],
        lease: Callable[[], Awaitable[int]],
        own_topics: frozenset[str],
        makes_topics: bool,
        are_created: bool,
        wants_output: Callable[[Client], None],
        schedule: Callable[[], None],
        msg_timeout_ns: int,
    ) -> None:
        self._broker = broker
        self._node = node
        self._view = view
        self._led = led
        self._own_topics = own_topics
        self._makes_topics = makes_topics
        self._are_created = are_created
        self.publish_here: Callable[[Publish], PendingReply] = _nothing_here
        self.wishes = Wishes(env, node, keys, view, store, lease, self._is_usable)
        self.handing = HandOn(
            peers,
            env.clock.monotonic_ns,
            self._is_led_here,
            self._reached_leaders,
            self._missing,
            self._publish_here,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._peers = peers
        self._now_ns = env.clock.monotonic_ns
        self._means = Means(peers, self._now_ns, wants_output, msg_timeout_ns)
        self._schedule = schedule
        self._relays: dict[Relay, None] = {}
        problems = Problems(env.clock)
        self.unread = UnreadElsewhere(node, peers, self._now_ns, self.leading, self._supplement, problems)

    async def close(self) -> None:
        """Take nothing more; who waits is told."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        await self.unread.close()
        await self.wishes.close()
        await self.handing.close()

    def dismiss_relayed(self, why: str) -> None:
        """Have consumers of what is led elsewhere go on there: nothing is relayed to them any more."""
        for relay in list(self._relays):
            relay.dismiss(why)

    def look(self) -> None:
        """Something of the cluster has changed."""
        self.wishes.look()
        for relay in list(self._relays):
            relay.look()

    def tick(self) -> None:
        """Do what is due from time to time."""
        self.wishes.look()
        self.handing.look(self._why_given_up)
        now_ns = self._now_ns()
        for relay in self._relays:
            relay.tick(now_ns)
        self.unread.tick(now_ns)

    # -- which topics ------------------------------------------------------------------------------------------------

    def is_own(self, topic: str) -> bool:
        """Whether a topic of this name is this node's own, whatever the cluster has."""
        return is_ephemeral(topic) or topic in self._own_topics or not self._makes_topics

    def wish(self, topic: str, is_extended: bool, is_replicated: bool) -> Ended | None:
        """See :class:`flintmq.nsqd.leadership.Leadership`."""
        if topic in self._broker.topics or (not is_replicated and self.is_own(topic)):
            return None
        return self.wishes.ask(topic, is_extended)

    def _missing(self, topic: str) -> Ended | None:
        """Ask for a topic that the cluster does not have; None: it has it."""
        record = self._view.topics.get(topic)
        is_there = record is not None and not record.is_deleting and topic in self._view.of_topic
        return None if is_there or self._is_led_here(topic) else self.wishes.ask(topic)

    def _is_led_here(self, topic: str) -> bool:
        return topic in self._broker.topics

    def _mine(self, topic: str) -> list[int]:
        """The partitions that the store says are led here, by this process or the one before."""
        return [number for number, state in self._view.of_topic.get(topic, {}).items() if state.leader == self._node]

    def _is_usable(self, topic: str) -> bool:
        record = self._view.topics.get(topic)
        if record is None or record.is_deleting:
            return False
        states = self._view.of_topic.get(topic, {})
        if any(number not in states for number in range(record.brought_below, record.partition_num)):
            return False  # those before them are not made: they may never come
        mine = self._mine(topic)
        if mine:
            return all(self._is_ready(topic, number) for number in mine)
        return bool(self.leaders(topic))

    def _is_ready(self, topic: str, number: int) -> bool:
        led = self._led.get((topic, number))
        return led is not None and led.is_ready

    def leaders(self, topic: str) -> list[NodeRecord]:
        """Return the processes elsewhere that lead something of a topic; one that drains only if no other does."""
        found: dict[str, NodeRecord] = {}
        for number in self._view.of_topic.get(topic, ()):
            record = self._view.leader((topic, number))
            if record is not None and record.node != self._node:
                found[record.node] = record
        staying = [record for record in found.values() if not record.is_draining]
        return staying or list(found.values())

    def _reached_leaders(self, topic: str) -> list[NodeRecord]:
        """Return those of :meth:`leaders` that something was heard of lately, or that nobody was connected with."""
        return [record for record in self.leaders(topic) if not self._peers.is_silent(record.node)]

    def _why_given_up(self, record: NodeRecord) -> str:
        """Tell why nothing more is expected of a process; empty: it is."""
        if not _is_alive(self._view.nodes, record):
            return "it is gone"
        return "nothing is heard of it" if self._peers.is_silent(record.node) else ""

    # -- publishing --------------------------------------------------------------------------------------------------

    def elsewhere(self, event: Publish, is_replicated: bool) -> PendingReply | None:
        """See :class:`flintmq.nsqd.leadership.Leadership`; of a topic that is not here."""
        if event.partition not in (None, NOT_A_NUMBER):
            return None
        if event.producer_id is not None and (is_replicated or event.partition == NOT_A_NUMBER):
            return None  # it is about one log, which somebody else leads
        if not is_replicated and (event.front or not self._asks_for(event.topic)):
            return None
        return self.handing.take(event)

    def _publish_here(self, event: Publish) -> PendingReply:
        reply = self.publish_here(event)
        self._schedule()
        return reply

    def dead_letters(self, topic: str, copies: int, is_replicated: bool) -> LettersElsewhere | Ended | None:
        """Find a topic for dead letters that is not led here, or have it made; None: it is for here.

        Args:
            copies: of each partition, if it has to be made; 0: as always.
        """
        if topic in self._broker.topics or (not is_replicated and self.is_own(topic)):
            return None
        record = self._view.topics.get(topic)
        if record is None or not self._is_usable(topic):
            return self.wishes.ask(topic, True, copies)
        return LettersElsewhere(self.handing, topic, record.meta)

    def _asks_for(self, topic: str) -> bool:
        return self._are_created and not self.is_own(topic)

    # -- subscribing -------------------------------------------------------------------------------------------------

    def prepare(self, client: Client, event: Subscribe, is_replicated: bool) -> Ended | None:
        """See :class:`flintmq.nsqd.leadership.Leadership`."""
        topic, number = event.topic, event.partition
        is_named = number is not None and number != NOT_A_NUMBER
        if not is_replicated:
            if topic in self._broker.topics or event.is_ordered or is_named or not self._asks_for(topic):
                return None
        elif is_named and number is not None:
            if (topic, number) not in self._led or self._is_ready(topic, number):
                return None  # it is said at once who does not lead
        else:
            mine = self._mine(topic)
            if mine and all(self._is_ready(topic, each) for each in mine) and not self._lacks_channel(event):
                return None
        return self._begin(self._until_ready(client, event, is_named))

    def _lacks_channel(self, event: Subscribe) -> bool:
        """Whether other leaders of a topic may not have a channel."""
        here = self._broker.topics.get(event.topic)
        if here is None or event.channel in here.channel_names or is_ephemeral(event.channel):
            return False
        return len(self._mine(event.topic)) < len(self._view.of_topic.get(event.topic, ()))

    async def _until_ready(self, client: Client, event: Subscribe, is_named: bool) -> None:
        topic = event.topic
        if not self._is_usable(topic):
            wish = self.wishes.ask(topic, client.request.extend_support)
            await until(wish)
            if wish.error is not None:
                raise RemoteProtocolError("E_SUB_FAILED", f"{event.command} failed {wish.error}", fatal=True)
        if not is_named and self._lacks_channel(event):
            await self._make_channel(client, event)

    async def _make_channel(self, client: Client, event: Subscribe) -> None:
        """Have every other leader of a topic make a channel, before anybody relies on it."""
        greeting = greeting_of(client, event)
        done: set[tuple[str, str]] = set()
        why = ""
        try:
            async with asyncio.timeout(READY_WITHIN_S):
                while True:
                    leading = self.leading(event.topic).values()
                    records = [record for record, _ in leading if record.node != self._node]
                    wanted = [record for record in records if (record.node, record.incarnation) not in done]
                    led_count = sum(len(numbers) for _, numbers in leading)
                    if not wanted and led_count == len(self._view.of_topic.get(event.topic, ())):
                        return
                    for record in wanted:
                        error = await subscribed_once(self._peers, record, greeting)
                        if error is None:
                            done.add((record.node, record.incarnation))
                        elif isinstance(error, RemoteProtocolError) and not error.code.startswith("E_FAILED_ON_"):
                            raise error
                        else:
                            why = f"node {record.node}: {error}"
                    await asyncio.sleep(AGAIN_S)
        except TimeoutError:
            what = (
                f"{event.command} failed channel {event.channel} of topic {event.topic} cannot be made everywhere yet"
            )
            reason = why or "a partition has no leader"
            raise RemoteProtocolError("E_SUB_FAILED", f"{what}: {reason}; try again", fatal=True) from None

    def relay(self, client: Client, event: Subscribe, is_replicated: bool) -> Ended | None:
        """See :class:`flintmq.nsqd.leadership.Leadership`."""
        if event.topic in self._broker.topics or not is_replicated or event.command != "SUB":
            return None
        record = self._view.topics.get(event.topic)
        if record is None or event.partition not in (None, NOT_A_NUMBER):
            return None
        relay = Relay(
            self._means, client, event, record.meta, self.leading, lambda relay: self._relays.pop(relay, None)
        )
        self._relays[relay] = None
        return relay.subscribed

    def _supplement(
        self,
        client: Client,
        event: Subscribe,
        on_outcome: Callable[[Supplement, str, Outcome], None],
        on_end: Callable[[Supplement], None],
    ) -> Supplement:
        assert client.topic is not None
        return Supplement(self._means, client, event, client.topic.meta, self._deliver, on_outcome, on_end)

    def _deliver(self, parts: ChannelParts) -> None:
        self._broker.mark_in_turn(parts.in_turn())
        self._schedule()

    def answers(self) -> Answers:
        """Return what tells another node which channels nobody consumes here."""
        return Answers(self._is_unread)

    def _is_unread(self, topic: str, channel: str) -> bool:
        held = self._broker.topics.get(topic)
        if held is None or held.paused or is_ephemeral(channel):
            return False
        parts = [
            (partition, partition.channels[channel])
            for number, partition in held.partitions.items()
            if channel in partition.channels and self._is_ready(topic, number)
        ]
        # one in order is for those who ask for that
        if any(part.subscriptions or part.keep_floor is not None for _, part in parts):
            return False
        return any(
            not part.paused and (part.depth or part.end < partition.log.committed_sequence) for partition, part in parts
        )

    def leading(self, topic: str) -> dict[str, tuple[NodeRecord, tuple[int, ...]]]:
        """Return the processes that lead something of a topic, this one as well, by node; and what each leads."""
        found: dict[str, tuple[NodeRecord, tuple[int, ...]]] = {}
        for number in sorted(self._view.of_topic.get(topic, ())):
            record = self._view.leader((topic, number))
            if record is not None:
                found[record.node] = record, (*found.get(record.node, (record, ()))[1], number)
        return found

    def _begin(self, work: Awaitable[None]) -> Ended:
        """Do something with a deadline; what is returned ends when it is done, or with why it is not."""
        ended = Ended()

        async def run() -> None:
            error: BaseException | None = RemoteProtocolError("E_SUB_FAILED", "this node ends", fatal=True)
            try:
                async with asyncio.timeout(2 * READY_WITHIN_S):
                    await work
                error = None
            except TimeoutError:
                error = None  # what is not so yet is found, and said, by who subscribes
            except RemoteProtocolError as refused:
                error = refused
            except Exception as defect:
                log.error("CLUSTER: preparing a subscription: %r", defect, exc_info=defect)
                error = RemoteProtocolError("E_SUB_FAILED", f"internal error {defect!r}", fatal=True)
            finally:
                ended.end(error)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return ended


class LettersElsewhere:
    """A topic for dead letters that other nodes lead.

    Args:
        meta: of it.
    """

    def __init__(self, handing: HandOn, topic: str, meta: TopicMeta) -> None:
        self.meta = meta
        self._handing = handing
        self._topic = topic

    def publish(self, bodies: list[bytes]) -> Ended:
        """Hand on bodies as they are stored; what is returned ends with the leader's answer."""
        has_headers = self.meta.extend_support
        # behind the trace id stands which kind of headers there are, which the command says
        left_out = (TRACE_ID_SIZE if self.meta.has_raw_ids else 0) + has_headers
        command = "MPUB_EXT" if has_headers else "MPUB"
        front = COMMANDS[command].body.front
        event = Publish(command, self._topic, [body[left_out:] for body in bodies], 1, front=front)
        return self._handing.take(event, Purpose.DEAD_LETTERS).source


def _is_alive(nodes: Mapping[str, NodeRecord], record: NodeRecord) -> bool:
    now = nodes.get(record.node)
    return now is not None and now.incarnation == record.incarnation


def _nothing_here(event: Publish) -> PendingReply:
    raise not_leader(event.command, event.topic, None, "is led by other nodes", fatal=False)


class LedHere:
    """A node as clients of other nodes see it: nothing is handed on a second time, and no topic is made.

    Args:
        leadership: of this node.
        on_publish: called with each topic that is published to.
    """

    def __init__(self, leadership: Leadership, on_publish: Callable[[str], None] = lambda _topic: None) -> None:
        self._leadership = leadership
        self._on_publish = on_publish
        self.to_consume = leadership.to_consume
        self.check_read = leadership.check_read
        self.check_delete = leadership.check_delete
        self.was_deleted = leadership.was_deleted
        self.led_elsewhere = leadership.led_elsewhere
        self.is_ready = leadership.is_ready
        self.is_replicated = leadership.is_replicated

    def to_publish(self, event: Publish) -> Partition | None:
        """As the node's own, but a topic that is not here is never made."""
        found = self._leadership.to_publish(event)
        if found is None:
            raise not_leader(event.command, event.topic, None, "is not led here", fatal=False)
        self._on_publish(event.topic)
        return found

    def elsewhere(self, event: Publish) -> PendingReply | None:
        """Hand nothing on."""
        return None

    def prepare(self, client: Client, event: Subscribe) -> Ended | None:
        """Wait for nothing."""
        return None

    def relay(self, client: Client, event: Subscribe) -> Ended | None:
        """Relay nothing."""
        return None

    def wish(self, topic: str, is_extended: bool = False) -> Ended | None:
        """Ask for nothing."""
        raise OfTheCluster(topic)

    def check_create(self, topic: str) -> None:
        """Make nothing."""
        raise NotOfOneNode(topic)
