"""Topics that a node had before it joined a cluster: they become the cluster's as they are, with one copy.

::

    a topic here alone --> its record, if there is none, and a state for each partition: its next epoch, led here
                       --> replicas of the same logs here --> led as any other

Rules of this file:

- The store gets a record together with states, after everything was checked: a record by itself would be a topic that
  nobody leads, and would hide this node's from lookups.
- A topic of many partitions comes in several transactions. Each holds only while the record is as it was read, and what
  the store has of it then says what is left: whoever begins again, after an end or a lost answer between two of them,
  goes on there, also where an operator has changed the topic meanwhile.
- First the store knows of it, then the data directory: a node that dies on the way goes on at its next start, by the
  ids of its logs.
- What another node has brought already is refused, and both are named; it stays this node's alone, as it was.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import asyncio
import logging
import random as _random
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from flintmq.addresses import format_address
from flintmq.broker.partition import Partition
from flintmq.broker.replica import found_history
from flintmq.broker.topic import Topic
from flintmq.cluster.keys import Keys
from flintmq.cluster.state import NodeRecord, PartitionState, TopicRecord, encode
from flintmq.cluster.store import (
    SWAP_TRIES,
    Compare,
    OutcomeUnknown,
    Put,
    Store,
    StoreError,
    StoreRefused,
    Txn,
)
from flintmq.cluster.view import View
from flintmq.errors import FlintError, StorageError
from flintmq.nsqd.cluster.belonging import OPERATIONS_TAKEN_MAX
from flintmq.storage import PartitionLog

log = logging.getLogger(__name__)

BROUGHT_WITHIN_S = 10.0
_LOOK_S = 0.02
_ID_BITS = 62


class NotBrought(FlintError):
    """A topic stays one node's alone.

    Args:
        topic: which.
        reason: why, and what to do.
    """

    def __init__(self, topic: str, reason: str) -> None:
        super().__init__(topic, reason)
        self.topic = topic
        self.reason = reason

    def __str__(self) -> str:
        return f"topic {self.topic} stays this node's alone: {self.reason}"


class Double(NotBrought):
    """The cluster has another one of this name, and keeps that."""


def is_brought(state: PartitionState, log_id: int, node: str) -> bool:
    """Whether a node has brought a partition with this log, and nobody else has ever had any of it.

    A copy that was restored from a backup has the log's id as well, and may have been given a place meanwhile.
    """
    return (state.log_id, state.in_sync_nodes) == (log_id, (node,))


class Bringing:
    """Gives topics of this node to the cluster.

    Args:
        me: the record of this node.
        held: returns when this node is registered.
        take_in: makes replicas of a topic's partitions here, of this number; returns when that is durable.
    """

    def __init__(
        self,
        keys: Keys,
        view: View,
        store: Store,
        random: _random.Random,
        topics: Mapping[str, Topic],
        me: Callable[[], NodeRecord],
        held: Callable[[], Awaitable[object]],
        take_in: Callable[[Topic, int], Awaitable[None]],
    ) -> None:
        self._keys = keys
        self._view = view
        self._store = store
        self._random = random
        self._topics = topics
        self._me = me
        self._held = held
        self._take_in = take_in
        self._turn = asyncio.Lock()

    async def bring(self, name: str) -> None:
        """Give a topic to the cluster.

        Raises:
            NotBrought: it stays this node's alone, or the store did not answer in time.
        """
        try:
            async with asyncio.timeout(BROUGHT_WITHIN_S), self._turn:
                await self._held()
                topic = self._topics.get(name)
                if topic is None:
                    raise NotBrought(name, "it is not here")
                record = await self._agreed(topic)
                await self._take_in(topic, record.number)
        except TimeoutError:
            raise NotBrought(name, f"the cluster did not have it within {BROUGHT_WITHIN_S:g} s; ask again") from None
        except StoreRefused as error:
            raise NotBrought(name, f"the coordination store refuses it: {error}") from None
        except StoreError as error:
            raise NotBrought(name, f"{error}; ask again") from None
        except StorageError as error:
            raise NotBrought(name, f"replicas of it could not be made here: {error}; ask again") from None
        log.info("CLUSTER: topic %s of this node is the cluster's now, with one copy", name)

    def has_begun(self, topic: Topic) -> bool:
        """Whether the store has some of a topic that is this node's alone still, as this node brings it."""
        states, me = self._view.of_topic.get(topic.name, {}), self._me().node
        return any(
            number in states and is_brought(states[number], partition.log.log_id, me)
            for number, partition in topic.partitions.items()
            if isinstance(partition.log, PartitionLog)
        )

    async def _agreed(self, topic: Topic) -> TopicRecord:
        """Return the record of a topic when the store has it, and the states of what this node brings.

        Where there is none it is made, and where a plain one has fewer partitions than this node brings it grows.
        """
        view, keys, name = self._view, self._keys, topic.name
        key = keys.topic(name)
        while True:
            if self._topics.get(name) is not topic:
                raise NotBrought(name, "it is not here any more")
            record, pair = view.topics.get(name), view.pairs.get(key)
            for each in (key, *(keys.partition(name, number) for number in topic.partitions)):
                if each in view.unreadable:
                    raise NotBrought(name, str(view.unreadable[each]))
            wanted = self._made(topic) if record is None else _grown(record, topic)
            self._check(topic, wanted)
            states = {
                keys.partition(name, number): self._state(partition, wanted)
                for number, partition in topic.partitions.items()
                if (name, number) not in view.partitions
            }
            if wanted == record and not states:
                return wanted
            some = [Put(each, encode(state)) for each, state in list(states.items())[: OPERATIONS_TAKEN_MAX - 1]]
            changed = [] if wanted == record else [Put(key, encode(wanted))]
            await self._write(Compare(key, 0 if pair is None else pair.mod_revision), changed, some)

    def _made(self, topic: Topic) -> TopicRecord:
        number = self._random.getrandbits(_ID_BITS) + 1
        meta = msgspec.structs.replace(topic.meta, replica=1)
        count = meta.partition_num or _count_of(topic)
        return TopicRecord(number, meta, count, is_brought=True, brought_num=count)

    async def _write(self, guard: Compare, record: Sequence[Put], states: Sequence[Put]) -> None:
        """Write a record and states if nobody was faster; return when the view has what there is then.

        Args:
            guard: the record is as it was read.
            record: as it is to be; empty: as it is.

        Raises:
            OutcomeUnknown: no try was answered. If it took place, the states say that this node brings it.
        """
        conditions = (guard, *(Compare(each.key, 0) for each in states))
        changes = (*record, *states)
        for left in reversed(range(SWAP_TRIES)):
            try:
                result = await self._store.txn(Txn(conditions, changes))
            except OutcomeUnknown:
                if not left:
                    raise
                continue
            await self._seen(result.revision)
            return

    async def _seen(self, revision: int) -> None:
        while self._view.revision < revision:  # noqa: ASYNC110 - the view has no event for everybody
            await asyncio.sleep(_LOOK_S)

    def _check(self, topic: Topic, record: TopicRecord) -> None:
        """See that nobody else has what this node brings."""
        view, me = self._view, self._me().node
        if record.is_deleting:
            raise NotBrought(topic.name, "the cluster is deleting one of this name; ask again presently")
        left: dict[int, int] = {}
        for number, partition in topic.partitions.items():
            assert isinstance(partition.log, PartitionLog)
            log_id, state = partition.log.log_id, view.partitions.get((topic.name, number))
            if state is None or not is_brought(state, log_id, me):
                left[number] = log_id
        if topic.partitions and not left:
            return  # this node died on the way; nobody else has ever had any of this
        has_begun = len(left) < len(topic.partitions)  # then it is this very topic, which may have been changed since
        theirs, mine = (msgspec.structs.replace(meta, replica=1) for meta in (record.meta, topic.meta))
        if mine.is_partitioned and mine.partition_num == record.brought_below:
            # it has got more partitions meanwhile, which no node brings
            mine = msgspec.structs.replace(mine, partition_num=theirs.partition_num)
        if not record.is_brought or not (has_begun or theirs.is_like(mine)):
            states = [view.partitions.get((topic.name, number)) for number in topic.partitions]
            holders = ", ".join(dict.fromkeys(node for state in states if state for node in state.in_sync_nodes))
            what = f"the cluster has one of this name that was made otherwise, on node {holders or '-'}"
            here = "nothing is published to it here" if mine.is_partitioned else "what is published here only it has"
            raise Double(
                topic.name,
                f"{what}: delete it on this node, {me} (flintmq topic delete {topic.name} --nsqd-http-address="
                f"{format_address(self._me().host, self._me().http_port)}), or there; {here}",
            )
        # partitions that were made together have the same id
        by_log = {state.log_id: (where, state) for where, state in view.partitions.items() if where[0] != topic.name}
        for number, log_id in left.items():
            if number >= record.brought_below:
                what = f"partition {number} of it is one that the cluster makes"
                raise Double(topic.name, f"{what}: delete one of the two, or give this one another name")
            state = view.partitions.get((topic.name, number))
            if state is not None:
                holders = ", ".join(state.holders)
                what = f"node {holders} has brought partition {number} with log {state.log_id}"
                raise Double(topic.name, f"{what}, and node {me} has log {log_id}: delete it on one of them")
            if log_id in by_log:
                (other, at), its = by_log[log_id]
                holders = ", ".join(its.holders)
                what = f"node {holders} has log {log_id} as {other}/{at}, and node {me} as {topic.name}/{number}"
                raise NotBrought(topic.name, f"{what}: was its data directory copied? delete it on one of them")

    def _state(self, partition: Partition, record: TopicRecord) -> PartitionState:
        """Return the state of a partition that this node brings."""
        assert isinstance(partition.log, PartitionLog)
        me = self._me()
        history = found_history(partition.log, [], 0)  # it may have been a cluster's before, as a restored one was
        epoch = history[-1][0] + 1 if history else 1
        return PartitionState(
            record.number, partition.log.log_id, epoch, me.node, me.incarnation, (me.member,), (me.node,)
        )


def _count_of(topic: Topic) -> int:
    """Return how many partitions a plain topic has as far as this node knows: one restored may have some of them."""
    return max(topic.partitions, default=0) + 1


def _grown(record: TopicRecord, topic: Topic) -> TopicRecord:
    """Return the record of a plain topic with room for what this node brings: who brought it first did not know of it.

    Where the cluster has made partitions itself none of those behind them is one to come.
    """
    count = _count_of(topic)
    is_plain = record.is_brought and not record.meta.is_partitioned
    if not is_plain or record.brought_below != record.partition_num or count <= record.partition_num:
        return record
    return msgspec.structs.replace(record, partition_num=count, brought_num=count)
