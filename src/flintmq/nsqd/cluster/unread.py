"""Messages that nobody consumes where they are led, while consumers of their channel are here: those are given them.

A consumer with one fixed address is served by that node alone as long as it leads something of the topic. So each node
asks the others about the channels that are consumed here, and lets one consumer of a channel that is unread there have
that, too (:class:`flintmq.nsqd.cluster.relaying.Supplement`). Where consumers ask nsqlookupd no channel is unread, and
all that this costs is a question.

Rules of this file:

- A channel is unread when two answers in a row say so: consumers connect to one node after the other.
- Nothing waits for an answer; a node that gives none, or does not know the question, is asked again ever more seldom.
- What was brought for nothing (messages of another tag, say) is tried ever more seldom, too; a consumer with which a
  message timed out is taken only if there is no other.
- Bringing costs descriptors, of which enough are left for clients.

Source: docs/decisions/0018.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import TypeAlias

from flintmq.broker.shared_subscription import SharedSubscription
from flintmq.cluster.state import NodeRecord
from flintmq.net.descriptors import descriptor_limit, kept_count, room
from flintmq.net.problems import Problems
from flintmq.net.tasks import tell
from flintmq.nsqd.client import Client
from flintmq.nsqd.cluster.asking import Answering, Asked
from flintmq.nsqd.cluster.peers import PassageFailed, Peers
from flintmq.nsqd.cluster.relaying import Outcome, Supplement
from flintmq.wire.peer import ASK_UNREAD_MAX, AskUnread, PeerError, Purpose, Unread
from flintmq.wire.server import Subscribe

log = logging.getLogger(__name__)

ASK_NS = 2_000_000_000
"""Between two questions to a node."""
AGAIN_NS = 4_000_000_000, 600_000_000_000
"""Before a node that has not answered is asked again: at first, and at most."""
USELESS_NS = 4_000_000_000, 60_000_000_000
"""Before a channel is brought again over which nothing came: at first, and at most."""
DISTRUSTED_NS = 300_000_000_000
"""For how long a consumer with which a message timed out comes last."""
PASSAGE_FILES = 2
"""Descriptors that a connection to another node takes."""
BROUGHT_MAX = 64
"""Channels that one answer has begun to bring: each is a connection."""

ChannelName: TypeAlias = tuple[str, str]
"""Topic and channel."""
Place: TypeAlias = tuple[str, str, str]
"""Topic, channel and node."""


class Answers(Answering[AskUnread]):
    """The end that is asked.

    Args:
        is_unread: whether a channel of a topic has messages here, and no consumer.
    """

    def __init__(self, is_unread: Callable[[str, str], bool]) -> None:
        super().__init__(AskUnread, self._unread)
        self._is_unread = is_unread

    def _unread(self, question: AskUnread) -> Unread:
        return Unread([at for at, (topic, channel) in enumerate(question.channels) if self._is_unread(topic, channel)])


class _Asked(Asked[Unread]):
    """One node, and what is known of it."""

    def __init__(self, peers: Peers) -> None:
        super().__init__(peers, Unread, Purpose.UNREAD)
        self.task: asyncio.Task[None] | None = None
        self.not_before_ns = 0
        self.pause_ns = AGAIN_NS[0]
        self.turn = 0  # of the channels, when one question does not take them all

    def stop(self) -> None:
        """Ask no more at all."""
        if self.task is not None:
            self.task.cancel()
        self.close("this node asks no more")


class UnreadElsewhere:
    """Finds what is unread at other nodes, and has consumers here get it.

    Args:
        node: id of this one.
        leading: returns the processes that lead something of a topic, by node.
        supplement: makes that of a consumer.

    Attributes:
        followers: returns the consumers here that are given all that is led here of a replicated topic.
    """

    def __init__(
        self,
        node: str,
        peers: Peers,
        now_ns: Callable[[], int],
        leading: Callable[[str], dict[str, tuple[NodeRecord, tuple[int, ...]]]],
        supplement: Callable[
            [Client, Subscribe, Callable[[Supplement, str, Outcome], None], Callable[[Supplement], None]], Supplement
        ],
        problems: Problems,
    ) -> None:
        self.followers: Callable[[], Iterable[tuple[Client, Subscribe]]] = tuple
        self._node = node
        self._peers = peers
        self._now_ns = now_ns
        self._leading = leading
        self._new_supplement = supplement
        self._next_ns = 0
        self._asked: dict[str, _Asked] = {}
        self._seen: set[Place] = set()  # unread by the last answer
        self._useless: dict[Place, tuple[int, int]] = {}  # until when it is not brought, and the pause behind that
        self._told: set[Place] = set()  # was brought before, as the log says
        self._distrusted: dict[Client, int] = {}  # until when
        self._problems = problems
        self._supplements: dict[Supplement, None] = {}

    def tick(self, now_ns: int) -> None:
        """Do what is due."""
        for supplement in list(self._supplements):
            supplement.tick(now_ns)
        if now_ns >= self._next_ns:
            self._next_ns = now_ns + ASK_NS
            self._look(now_ns)

    async def close(self) -> None:
        """Ask no more, and bring nothing more."""
        tasks = [asked.task for asked in self._asked.values() if asked.task is not None]
        for asked in self._asked.values():
            asked.stop()
        self._asked.clear()
        for supplement in list(self._supplements):
            supplement.close()
        if tasks:
            await asyncio.wait(tasks)

    def _look(self, now_ns: int) -> None:
        """Ask every node about the channels that are consumed here and that it leads something of."""
        wanted: dict[str, tuple[NodeRecord, list[ChannelName]]] = {}
        others: dict[str, list[NodeRecord]] = {}
        for topic, channel in dict.fromkeys((e.topic, e.channel) for _, e in self.followers() if e.command == "SUB"):
            if topic not in others:
                others[topic] = [record for node, (record, _) in self._leading(topic).items() if node != self._node]
            for record in others[topic]:
                wanted.setdefault(record.node, (record, []))[1].append((topic, channel))
        for node in self._asked.keys() - wanted.keys():
            self._asked.pop(node).stop()
        if self._distrusted:
            living = {client for client, _ in self.followers()}
            self._distrusted = {each: at for each, at in self._distrusted.items() if at > now_ns and each in living}
        if self._seen or self._useless or self._told:
            there = {(*name, node) for node, (_, names) in wanted.items() for name in names}
            self._seen &= there
            self._told &= there
            self._useless = {place: pause for place, pause in self._useless.items() if place in there}
        for node, (record, names) in wanted.items():
            asked = self._asked.setdefault(node, _Asked(self._peers))
            is_busy = asked.task is not None and not asked.task.done()
            if is_busy or now_ns < asked.not_before_ns or self._peers.is_silent(node):
                continue
            begin = asked.turn % len(names)
            names = [*names[begin:], *names[:begin]][:ASK_UNREAD_MAX]
            asked.turn = begin + len(names)
            asked.task = asyncio.get_running_loop().create_task(self._ask(asked, record, names))
            asked.task.add_done_callback(tell("asking a node about channels"))

    async def _ask(self, asked: _Asked, record: NodeRecord, names: list[ChannelName]) -> None:
        try:
            unread = set((await asked.ask(record, AskUnread(names))).places)
        except (PassageFailed, PeerError, TimeoutError) as error:
            asked.close("it gave no answer")
            asked.not_before_ns = self._now_ns() + asked.pause_ns
            asked.pause_ns = min(2 * asked.pause_ns, AGAIN_NS[1])
            log.debug("CLUSTER: node %s was asked about channels that nobody consumes: %r", record.node, error)
            return
        asked.pause_ns = AGAIN_NS[0]
        wanted: dict[ChannelName, list[tuple[Client, Subscribe]]] = {}
        for at, name in enumerate(names):
            place = (*name, record.node)
            if at not in unread:
                self._seen.discard(place)
            elif place not in self._seen:
                self._seen.add(place)
            elif self._now_ns() >= self._useless.get(place, (0, 0))[0] and len(wanted) < BROUGHT_MAX:
                wanted[name] = []
        for client, event in self.followers() if wanted else ():
            if event.command == "SUB" and (event.topic, event.channel) in wanted:
                wanted[event.topic, event.channel].append((client, event))
        for name, consumers in wanted.items():
            self._bring(name, record, consumers)

    def _bring(self, name: ChannelName, record: NodeRecord, consumers: Iterable[tuple[Client, Subscribe]]) -> None:
        """Have one of a channel's consumers get what a node has of it, too."""
        found: list[tuple[tuple[bool, int, bool, int], Client, Subscribe]] = []
        for client, event in consumers:
            subscription = client.subscription
            if not isinstance(subscription, SharedSubscription) or not subscription.is_open:
                continue
            nodes = client.relay.nodes if isinstance(client.relay, Supplement) else set()
            if record.node in nodes:
                return
            if subscription.rdy_count > 0:
                # one that holds all that it asked for may never finish any of it
                is_distrusted = client in self._distrusted
                order = is_distrusted, len(nodes), subscription.capacity <= 0, -subscription.rdy_count
                found.append((order, client, event))
        if not found:
            return
        needed = kept_count(descriptor_limit()) + PASSAGE_FILES
        if room(needed) < needed:
            what = "CLUSTER: what nobody consumes at other nodes is left there: too few files are left (see ulimit -n)"
            self._problems.tell(what, logging.WARNING, "{}:{}".format(*name))
            return
        _, client, event = min(found, key=lambda each: each[0])
        place = (*name, record.node)
        if place not in self._told:
            self._told.add(place)
            what = "nobody consumes it there, so it is given what that has, too, now and later"
            log.info("CLUSTER: %s: %s:%s of node %s: %s", client.peer, *place, what)
        supplement = client.relay
        if not isinstance(supplement, Supplement):
            supplement = self._new_supplement(client, event, self._over, self._ended)
            self._supplements[supplement] = None
        supplement.add(record)

    def _over(self, supplement: Supplement, node: str, outcome: Outcome) -> None:
        """Note what became of an upstream."""
        place, now_ns = (supplement.topic, supplement.channel, node), self._now_ns()
        pause_ns = self._useless.pop(place, (0, USELESS_NS[0]))[1]
        match outcome:
            case Outcome.USELESS:
                self._useless[place] = now_ns + pause_ns, min(2 * pause_ns, USELESS_NS[1])
            case Outcome.LOST:
                self._useless[place] = now_ns + USELESS_NS[0], pause_ns
            case Outcome.UNFINISHED:
                self._distrusted[supplement.client] = now_ns + DISTRUSTED_NS

    def _ended(self, supplement: Supplement) -> None:
        self._supplements.pop(supplement, None)
