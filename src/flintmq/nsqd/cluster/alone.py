"""Topics that are on this node alone, from before it joined the cluster, and how they leave that state.

Rules of this file:

- Such a topic is served as that of a single node until its partitions are replicas; a topic is given once at a time,
  however often that is asked for.
- One that is to be the cluster's, as it has partitions or was begun to be given, and is not taken, is given again,
  after pauses that grow to ``AGAIN_S_MAX``; meanwhile the record of this node says so with the reason.
- What the cluster had some of when it was deleted there does not come back by itself: an operator deletes the rest, or
  gives it anew. This process remembers that; the next one does not.

Source: docs/decisions/0017; ``bringing.py`` for what is agreed with the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from flintmq.broker.topic import Topic
from flintmq.clock import Clock
from flintmq.cluster.state import LEASE_TTL_S
from flintmq.cluster.view import Fate, View
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

AGAIN_S, AGAIN_S_MAX = 1.0, 60.0
"""Until a topic that was not taken is given again: after the first time, and at most, twice as long each time."""
TOLD_MAX, REASON_CHARS_MAX = 8, 300
"""Topics that are told with the reason, and its length."""
DELETED = (
    "the cluster had some of it, and there it was deleted: delete the rest of it at this node (flintmq topic delete "
    "{topic} --nsqd-http-address=...), or give it to the cluster anew (flintmq topic replicate)"
)
"""Why one is not given again by itself."""
_LEASE_NS = LEASE_TTL_S * 1_000_000_000
_SECOND = 1_000_000_000


@dataclass(slots=True)
class _NotTaken:
    """Why a topic is this node's alone still, and when it is given again; a plain one that was refused never is."""

    error: NotBrought
    pause_s: float
    due_ns: int
    is_given_again: bool


class Alone:
    """Gives such topics to the cluster.

    Args:
        bringing: agrees with the others; calls :meth:`take_in` back.
        wishes: know when a topic of the cluster can be used.
        tasks: that end with this node.
        tell: called when :meth:`kept` has changed.
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
        tell: Callable[[], None],
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
        self._tell = tell
        self._not_taken: dict[str, _NotTaken] = {}
        self._begun: dict[str, int] = {}  # number of the cluster's topic that has some of it

    def has(self, topic: str) -> bool:
        """Whether a topic is one of these."""
        return topic in self._topics and not self._replicas.of_topic(topic)

    def doubles(self) -> list[str]:
        """Return the names of those that the cluster has one of as well, and keeps."""
        return [
            name
            for name in self._view.topics
            if self.has(name) and (name in self._not_taken or name not in self._being_brought)
        ]

    def kept(self) -> list[tuple[str, str]]:
        """Return those that are to be the cluster's and were not taken, with the reason."""
        return [
            (topic, each.error.reason[:REASON_CHARS_MAX])
            for topic, each in self._not_taken.items()
            if each.is_given_again
        ]

    def why_refused(self, topic: str) -> str:
        """Tell why the cluster keeps another topic of a name, and what to do; empty: it does not, as far as known."""
        found = self._not_taken.get(topic)
        return found.error.reason if found and isinstance(found.error, Double) and topic in self._view.topics else ""

    def tick(self) -> None:
        """Give the cluster again what it has not taken, when it is time, or once it has no other one any more."""
        now_ns = self._clock.monotonic_ns()
        for topic, each in list(self._not_taken.items()):
            if topic in self._being_brought:
                continue
            if not self.has(topic) or not (each.is_given_again or topic in self._view.topics):
                self._forget(topic)
            elif each.is_given_again:
                has_no_other = isinstance(each.error, Double) and topic not in self._view.topics
                if now_ns >= each.due_ns or has_no_other:
                    self.bring_soon(topic, is_again=True)

    def _note(self, error: NotBrought) -> None:
        """Remember that a topic was not taken, unless it is one that only an operator's request makes the cluster's."""
        name, before = error.topic, self._not_taken.get(error.topic)
        topic = self._topics.get(name)
        if before is not None and isinstance(before.error, Double) and not isinstance(error, Double):
            if name in self._view.topics:
                error = before.error  # a store that is away does not change that, and nothing may be published here
        if topic is None or not self.has(name):
            self._forget(name)
            return
        record = self._view.topics.get(name)
        has_begun = self._bringing.has_begun(topic)
        if has_begun and record is not None:
            self._begun[name] = record.number
        is_given_again = topic.meta.is_partitioned or has_begun
        if not is_given_again and not isinstance(error, Double):
            self._forget(name)
            return
        pause_s = AGAIN_S if before is None else min(AGAIN_S_MAX, before.pause_s * 2)
        due_ns = self._clock.monotonic_ns() + int(pause_s * _SECOND)
        self._not_taken[name] = _NotTaken(error, pause_s, due_ns, is_given_again)
        if before is None or before.error.reason != error.reason:
            self._tell()

    def _forget(self, topic: str) -> None:
        self._begun.pop(topic, None)
        if self._not_taken.pop(topic, None) is not None:
            self._tell()

    async def bring_all(self) -> None:
        """Give the cluster the topics with partitions that this node had before it joined."""
        for topic in list(self._topics.values()):
            if topic.meta.is_partitioned and not topic.ephemeral and self.has(topic.name):
                await self._bring_one(topic.name)

    def bring_soon(self, topic: str, is_again: bool = False) -> None:
        """Give one to the cluster, unless that is being done.

        Args:
            is_again: nothing has happened but that time has passed.
        """
        if topic not in self._being_brought:
            self._being_brought.add(topic)
            self._tasks.begin(self._bring_one(topic, is_again), f"giving topic {topic} to the cluster")

    async def _bring_one(self, topic: str, is_again: bool = False) -> None:
        """As :meth:`bring`; tell what is in the way, of one that is given again once for each reason."""
        before = self._not_taken.get(topic)
        try:
            await self.bring(topic, is_asked=False)
        except (NotBrought, TopicNotMade) as error:
            if not is_again or before is None or str(before.error) != str(error):
                more = "; it is given again by itself" if topic in self._not_taken else ""
                log.error("CLUSTER: %s%s", error, more)

    async def bring(self, topic: str, *, is_asked: bool = True) -> None:
        """Give one to the cluster, with one copy; return when clients can use it again.

        Args:
            is_asked: an operator wants it.

        Raises:
            NotBrought: it stays this node's alone.
            TopicNotMade: it is the cluster's, and nobody can use it yet.
        """
        self._being_brought.add(topic)
        begun = self._begun.get(topic)
        try:
            if self.has(topic):
                if not is_asked and begun is not None and self._view.fate(topic, begun) is Fate.DELETED:
                    raise NotBrought(topic, DELETED.format(topic=topic))
                await self._bringing.bring(topic)
            self._forget(topic)
        except NotBrought as error:
            self._note(error)
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
