"""Topics of which this node knows a later change than the coordination store: a backup of the store was put back.

What is in force of a topic goes by the number of its changes (:attr:`flintmq.topic_meta.TopicMeta.rank`). In a store
that was put back it is lower than on the nodes, and counts on from there: no node would take the next changes, as many
as were made since the backup. So the number in the store is raised above the one that is known here; what the record
says counts, on all nodes, also on those that come later. ::

    rank here > rank of the record --> the record as it is, its version above both, by compare-and-swap --> all nodes

Rules of this file: nothing that is known here is written but the number, and that there are headers, which no topic
gives up; a view that is late is refused by the store, so a node that is merely behind, or hears of a change from the
leader first, changes nothing. Topics that this node has alone are no business of it.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import msgspec

from flintmq.broker.replica import Replica
from flintmq.broker.replicas import Replicas
from flintmq.broker.topic import Topic
from flintmq.clock import Clock
from flintmq.cluster.keys import Keys
from flintmq.cluster.state import TopicRecord, encode
from flintmq.cluster.store import Fate, Store, StoreError, swap
from flintmq.cluster.view import View
from flintmq.net.problems import Problems
from flintmq.net.tasks import Tasks
from flintmq.nsqd.cluster.due import FAILED_AGAIN_S, Due
from flintmq.topic_meta import TopicMeta

log = logging.getLogger(__name__)

TOLD_MAX = 32
"""Topics of which it is said at a time."""
OLDER_RECORD = (
    "CLUSTER: the coordination store is older than what is known here of a topic: it was put back from a backup. What "
    "the store says of the topic counts from now on, also where nodes have other settings or more partitions"
)


class OlderRecords:
    """Raises the versions of such records.

    Args:
        topics: that are led here, or this node's alone.
        due: has partitions settled.
        tasks: that end with this node.
    """

    def __init__(
        self,
        clock: Clock,
        keys: Keys,
        view: View,
        store: Store,
        topics: Mapping[str, Topic],
        replicas: Replicas,
        due: Due,
        tasks: Tasks,
    ) -> None:
        self._keys = keys
        self._view = view
        self._store = store
        self._topics = topics
        self._replicas = replicas
        self._due = due
        self._tasks = tasks
        self._problems = Problems(clock)
        self._telling: set[str] = set()
        self._turns = asyncio.Semaphore(TOLD_MAX)

    def look(self, replica: Replica) -> None:
        """Have the record of a topic raised, if one of its replicas here knows more; unless that is being done."""
        topic, record = replica.topic, self._view.topics.get(replica.topic)
        if record is None or topic in self._telling:
            return
        if any(_is_above(known, record) for known in self._known(replica, record)):
            self._telling.add(topic)
            self._tasks.begin(self._tell_once(replica), f"telling that the record of topic {topic} is older")

    def _known(self, replica: Replica, record: TopicRecord) -> list[TopicMeta]:
        """Return what a replica and, if this node leads it, its topic are told of the topic that a record is about."""
        if record.is_deleting or record.number != replica.topic_number:
            return []
        known, led = [replica.meta], self._topics.get(replica.topic)
        if led is not None and replica.partition is not None:
            known.append(led.meta)
        # it has partitions for its life, or never: what says otherwise is of another one of this name
        return [each for each in known if each.is_partitioned == record.meta.is_partitioned]

    async def _tell_once(self, replica: Replica) -> None:
        topic = replica.topic
        try:
            async with self._turns:
                await self._tell(topic)
        except StoreError as error:
            self._problems.tell("CLUSTER: the store cannot be told that it is older than what is known of a topic here",
                                logging.WARNING, f"{topic}: {error}")  # fmt: skip
        finally:
            self._telling.discard(topic)
            self._due.note_later((topic, replica.number), FAILED_AGAIN_S)  # perhaps somebody was faster

    async def _tell(self, topic: str) -> None:
        pair, record = self._view.pairs.get(self._keys.topic(topic)), self._view.topics.get(topic)
        if pair is None or record is None:
            return
        replicas = self._replicas.of_topic(topic).values()
        known = [each for replica in replicas for each in self._known(replica, record) if _is_above(each, record)]
        if not known:
            return
        version = max(record.meta.version, *(each.version for each in known)) + 1
        meta = msgspec.structs.replace(record.meta, version=version)
        for each in known:
            meta = meta.with_headers_of(each)
        wanted = msgspec.structs.replace(record, meta=meta)
        if (await swap(self._store, pair.key, pair, encode(wanted))).fate is Fate.APPLIED:
            what = (
                f"topic {topic} was at version {record.meta.version} there and at {version - 1} here, now at {version}"
            )
            self._problems.tell(OLDER_RECORD, logging.ERROR, what)


def _is_above(known: TopicMeta, record: TopicRecord) -> bool:
    """Whether a record cannot be put into force where this is."""
    meta = record.meta
    return known.rank > meta.rank or (known.extend_support and not meta.extend_support)
