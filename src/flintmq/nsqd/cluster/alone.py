"""Topics that are on this node alone, from before it joined the cluster, and how they leave that state.

Rules of this file: such a topic is served as that of a single node until its partitions are replicas; a topic is given
once at a time, however often that is asked for.

Source: docs/decisions/0017; ``bringing.py`` for what is agreed with the others.
"""

from __future__ import annotations

import logging

from flintmq.broker.topic import Topic
from flintmq.clock import Clock
from flintmq.cluster.state import LEASE_TTL_S
from flintmq.cluster.view import View
from flintmq.errors import FlintError
from flintmq.net.tasks import Tasks
from flintmq.nsqd.client import Clients
from flintmq.nsqd.cluster.bringing import Bringing, Double, NotBrought
from flintmq.nsqd.cluster.due import Due
from flintmq.nsqd.cluster.followings import Followings
from flintmq.nsqd.cluster.handing import until
from flintmq.nsqd.cluster.table import Table
from flintmq.nsqd.cluster.wishes import TopicNotMade, Wishes
from flintmq.nsqd.engine import Engine
from flintmq.nsqd.leadership import dismiss

log = logging.getLogger(__name__)

_LEASE_NS = LEASE_TTL_S * 1_000_000_000


class Alone:
    """Gives such topics to the cluster.

    Args:
        bringing: agrees with the others; calls :meth:`take_in` back.
        wishes: know when a topic of the cluster can be used.
        tasks: that end with this node.
    """

    def __init__(
        self,
        clock: Clock,
        engine: Engine,
        view: View,
        table: Table,
        bringing: Bringing,
        wishes: Wishes,
        followings: Followings,
        clients: Clients,
        due: Due,
        tasks: Tasks,
    ) -> None:
        self._clock = clock
        self._engine = engine
        self._view = view
        self._topics = engine.broker.topics
        self._replicas = engine.broker.replicas
        self._table = table
        self._bringing = bringing
        self._wishes = wishes
        self._followings = followings
        self._clients = clients
        self._due = due
        self._tasks = tasks
        self._being_brought: set[str] = set()
        self._refused: dict[str, str] = {}  # by the cluster, which has another one of that name; why, and what to do

    def has(self, topic: str) -> bool:
        """Whether a topic is one of these."""
        return topic in self._topics and not self._replicas.of_topic(topic)

    def doubles(self) -> list[str]:
        """Return the names of those that the cluster has one of as well, and keeps."""
        return [name for name in self._view.topics if self.has(name) and name not in self._being_brought]

    def why_refused(self, topic: str) -> str:
        """Tell why the cluster has not taken a topic, and what to do; empty: it was not asked yet, or has none."""
        return self._refused.get(topic, "") if topic in self._view.topics else ""

    def tick(self) -> None:
        """Give the cluster what it has refused, once it has no other one any more."""
        for topic in [each for each in self._refused if each not in self._view.topics or not self.has(each)]:
            del self._refused[topic]
            if self.has(topic) and self._topics[topic].meta.is_partitioned:
                self.bring_soon(topic)

    async def bring_all(self) -> None:
        """Give the cluster the topics with partitions that this node had before it joined."""
        for topic in list(self._topics.values()):
            if topic.meta.is_partitioned and not topic.ephemeral and self.has(topic.name):
                await self._bring_one(topic.name)

    def bring_soon(self, topic: str) -> None:
        """Give one to the cluster, unless that is being done."""
        if topic not in self._being_brought:
            self._being_brought.add(topic)
            self._tasks.begin(self._bring_one(topic), f"giving topic {topic} to the cluster")

    async def _bring_one(self, topic: str) -> None:
        try:
            await self.bring(topic)
        except (NotBrought, TopicNotMade) as error:
            log.error("CLUSTER: %s", error)

    async def bring(self, topic: str) -> None:
        """Give one to the cluster, with one copy; return when clients can use it again.

        Raises:
            NotBrought: it stays this node's alone.
            TopicNotMade: it is the cluster's, and nobody can use it yet.
        """
        self._being_brought.add(topic)
        try:
            if self.has(topic):
                await self._bringing.bring(topic)
        except Double as error:
            self._refused[topic] = error.reason
            raise
        finally:
            self._being_brought.discard(topic)
        usable = self._wishes.ask(topic)
        await until(usable)
        if usable.error is not None:
            raise usable.error

    async def take_in(self, topic: Topic, number: int) -> None:
        """Make replicas of a topic's partitions; return when that is durable.

        Args:
            number: of the topic in the cluster.

        Raises:
            NotBrought: it could not be begun, nothing has changed.
        """
        ended = self._engine.loop.create_future()

        def done(error: BaseException | None) -> None:
            if not ended.done():
                ended.set_result(None) if error is None else ended.set_exception(error)

        numbers = list(topic.partitions)
        try:
            subscriptions = self._engine.broker.give_to_cluster(topic, number, done)
        except FlintError as error:
            raise NotBrought(topic.name, f"{error}; ask again") from None
        partitions = [(topic.name, each) for each in numbers]
        for partition in partitions:
            copy = self._table.add(partition, self._replicas[partition])
            self._followings.follow(copy, self._clock.monotonic_ns() - _LEASE_NS)
        self._clients.look_up_again()
        dismiss(subscriptions, f"topic {topic.name} becomes one of the cluster")
        self._engine.schedule()
        try:
            await ended
        finally:
            # those that it was given meanwhile as well: none is made where the topic is still this node's alone
            self._due.note_all({*partitions, *((topic.name, each) for each in self._view.of_topic.get(topic.name, ()))})
