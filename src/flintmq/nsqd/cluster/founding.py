"""Partitions that never had a message: they begin with the channels of their topic, and with what is set for them.

A topic that is given more partitions has channels, which are to get what is published to these as well: so this node,
before it leads one, asks whoever leads the topic's other partitions. Nobody publishes there before it knows. ::

    lead --> is it new? --> who leads the others: AskChannels --> Channels --> lead, with them --> stored --> ready

Rules of this file:

- Answers wait for nothing: two nodes that begin may ask each other. Who begins has nothing to tell.
- Who is asked answers only when it knows of the partition itself: from then on whoever subscribes there has channels
  made at this one, too, so that none is missed in between. A consumer at a node that leads nothing of the topic, and
  hears late of the partition, may be missed.
- It takes ``WITHIN_S`` at most. What could not be asked then is told, and the channels are those that are known from
  the others, from copies here and from nsqlookupd.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

from msgspec import DecodeError

from flintmq.broker.broker import Broker
from flintmq.broker.known_topic import KnownChannel, KnownTopic
from flintmq.broker.replica import Replica
from flintmq.cluster.state import NodeRecord
from flintmq.cluster.view import PartitionId, View
from flintmq.names import listed
from flintmq.net.tasks import Tasks
from flintmq.nsqd.cluster.asking import Answering, Asked
from flintmq.nsqd.cluster.due import FAILED_AGAIN_S, Due
from flintmq.nsqd.cluster.peers import PassageFailed, Peers
from flintmq.nsqd.cluster.table import Table
from flintmq.settings import Settings, decode_settings, encode_settings
from flintmq.wire.peer import CHANNELS_MAX, AskChannels, ChannelRow, Channels, PeerError, Purpose

log = logging.getLogger(__name__)

WITHIN_S = 8.0
"""Until a partition begins with what is known: longer than others need to elect a leader in place of one that died."""
AGAIN_S = 0.02, 0.5
"""Before who could not tell is asked again: at first, and at most."""
LISTED_MAX = 16
"""Partitions, and channels, that a line of the log names."""
COPIES_WITHIN_S = 2.0
"""Until what copies here have is not waited for any more."""


class _Node(Asked[Channels]):
    """One node that is asked."""

    def __init__(self, peers: Peers) -> None:
        super().__init__(peers, Channels, Purpose.CHANNELS)
        self.turn = asyncio.Lock()


class Founding:
    """Finds out what partitions begin with, and tells others.

    Args:
        node_id: of this node.
        due: has partitions settled.
        schedule: has the turn ended.

    Attributes:
        channels_of: asks nsqlookupd for the names of a topic's channels.
    """

    def __init__(
        self,
        node_id: str,
        view: View,
        table: Table,
        broker: Broker,
        peers: Peers,
        due: Due,
        loop: asyncio.AbstractEventLoop,
        schedule: Callable[[], None],
    ) -> None:
        self.channels_of: Callable[[str], Awaitable[list[str]]] = _unknown
        self._node_id = node_id
        self._view = view
        self._table = table
        self._broker = broker
        self._peers = peers
        self._due = due
        self._loop = loop
        self._schedule = schedule
        self._tasks = Tasks(loop)
        self._is_closed = False
        self._nodes: dict[str, _Node] = {}
        self._waiting: dict[str, dict[int, int]] = {}  # partitions of a topic, and their epochs
        self._asking: dict[str, dict[int, int]] = {}  # the same, of which it is being asked
        self._known: dict[PartitionId, tuple[int, list[KnownTopic]]] = {}  # and the epoch for which it was asked

    async def close(self) -> None:
        """Ask no more."""
        self._is_closed = True
        await self._tasks.close()
        for node in self._nodes.values():
            node.close("this node asks no more")

    # -- who begins ----------------------------------------------------------------------------------------------------

    def is_new(self, partition: PartitionId, replica: Replica) -> bool:
        """Whether a partition beside others has never had a message, and no channel."""
        has_others = len(self._view.of_topic.get(partition[0], ())) > 1
        return has_others and replica.log.next_sequence == 1 and not replica.rows.cursors

    def known(self, partition: PartitionId, epoch: int) -> list[KnownTopic] | None:
        """Return what a partition begins with that this node is to lead in an epoch.

        None: others are being asked, and it is settled again when they have told.
        """
        topic, number = partition
        if partition in self._known:
            of_epoch, found = self._known.pop(partition)
            if of_epoch == epoch:
                return found
        if not self._elsewhere(topic):
            return []
        if self._asking.get(topic, {}).get(number) != epoch:
            self._waiting.setdefault(topic, {})[number] = epoch
            if topic not in self._asking:
                self._begin(topic)
        return None

    def _elsewhere(self, topic: str) -> dict[int, NodeRecord | None]:
        """Return the partitions that may have channels which this node does not know, and who leads each."""
        found: dict[int, NodeRecord | None] = {}
        for number, state in self._view.of_topic.get(topic, {}).items():
            if not state.epoch:
                continue  # nobody has ever led it
            if state.leader != self._node_id:
                found[number] = self._view.leader((topic, number))
            elif not self._can_tell(topic, number):
                found[number] = None  # it is this node's in a moment
        return found

    def _begin(self, topic: str) -> None:
        asked = self._asking[topic] = {}
        self._tasks.begin(self._ask_all(topic, asked), f"asking for the channels of topic {topic}")

    async def _ask_all(self, topic: str, asked: dict[int, int]) -> None:
        asked.update(self._waiting.pop(topic, {}))
        found = None
        try:
            found = await self._found(topic, sorted(asked))
        finally:
            del self._asking[topic]
            for number, epoch in asked.items():
                if found is not None:
                    self._known[topic, number] = epoch, found
                    self._due.note((topic, number))
                else:
                    self._due.note_later((topic, number), FAILED_AGAIN_S)
            self._forget_others()
            if topic in self._waiting and not self._is_closed:
                self._begin(topic)
        self._schedule()

    def _forget_others(self) -> None:
        """Keep nothing of partitions that others lead by now, and no connection with nodes that are gone."""
        states = self._view.partitions
        for partition, (epoch, _) in list(self._known.items()):
            state = states.get(partition)
            if state is None or (state.leader, state.epoch) != (self._node_id, epoch):
                del self._known[partition]
        for node in self._nodes.keys() - self._view.nodes.keys():
            self._nodes.pop(node).close("it is gone")

    async def _found(self, topic: str, numbers: list[int]) -> list[KnownTopic]:
        """Ask whoever leads the other partitions; return what each has."""
        parts: dict[str, KnownTopic] = {}
        told: set[int] = set()
        why: dict[str, str] = {}
        strangers: set[str] = set()  # nodes that do not know the question
        pause_s = AGAIN_S[0]
        with suppress(TimeoutError):
            async with asyncio.timeout(WITHIN_S):
                while left := [record for each, record in self._elsewhere(topic).items() if each not in told]:
                    records = {record.node: record for record in left if record is not None}
                    if None not in left and records.keys() <= strangers:
                        break
                    asked = [record for node, record in records.items() if node not in strangers]
                    before = len(told)
                    for record, answer in zip(
                        asked, await asyncio.gather(*(self._ask(each, topic, numbers) for each in asked)), strict=True
                    ):
                        if isinstance(answer, Exception):
                            why[record.node] = str(answer) or "it does not answer"
                            if isinstance(answer, PeerError):
                                strangers.add(record.node)
                                why[record.node] = f"it does not know the question; an earlier release? {answer}"
                            continue
                        those, part = answer
                        told.update(those)
                        if part is not None:
                            parts[record.node] = part
                    if len(told) == before:
                        await asyncio.sleep(pause_s)
                        pause_s = min(2 * pause_s, AGAIN_S[1])
        found = list(parts.values())
        missing = {each: record for each, record in self._elsewhere(topic).items() if each not in told}
        if missing:
            found += await self._known_here(topic, missing)
            names = await self.channels_of(topic)
            if names:
                everything = {name for part in found for name in part.channels}
                # whoever says that one is paused goes first
                more = {name: KnownChannel() for name in names if name not in everything}
                is_paused = bool(found) and all(part.paused for part in found)
                found.append(KnownTopic(is_paused, more))
            names = sorted({name for part in found for name in part.channels})
            log.warning(
                "CLUSTER: %s: partitions %s begin without knowing which channels those of %s have (%s): with %s, which "
                "this node or nsqlookupd knows. One that is missing there gets what is published after its consumers "
                "have come",
                topic,
                listed(map(str, numbers), LISTED_MAX),
                listed(map(str, sorted(missing)), LISTED_MAX),
                "; ".join(_why(record, why) for record in dict.fromkeys(missing.values())),
                listed(names, LISTED_MAX) or "none",
            )
        return found

    async def _ask(
        self, record: NodeRecord, topic: str, numbers: list[int]
    ) -> tuple[list[int], KnownTopic | None] | PassageFailed | PeerError | TimeoutError:
        """Ask a node; return for which partitions it tells, and what it has of the topic."""
        node = self._nodes.get(record.node)
        if node is None:
            node = self._nodes[record.node] = _Node(self._peers)
        channels: dict[str, KnownChannel] = {}
        settings: dict[str, Settings] = {}
        after = ""
        try:
            async with node.turn:
                try:
                    while True:
                        answer = await node.ask(record, AskChannels(topic, numbers, after))
                        _take(answer, channels, settings)
                        if not answer.has_more or not answer.rows:
                            break
                        after = answer.rows[-1].name
                except BaseException:
                    node.close("it gave no answer")
                    raise
        except (PassageFailed, PeerError, TimeoutError) as error:
            return error
        return answer.numbers, KnownTopic(answer.paused, channels, settings) if answer.is_led else None

    async def _known_here(self, topic: str, numbers: Collection[int]) -> list[KnownTopic]:
        """Return what copies of partitions have that others lead, or nobody does."""
        read: asyncio.Future[list[KnownTopic]] = self._loop.create_future()

        def done(found: list[KnownTopic], error: BaseException | None) -> None:
            if error is not None:
                log.warning("CLUSTER: %s: what copies here know of its channels cannot be read: %s", topic, error)
            if not read.done():
                read.set_result(found)

        self._broker.led_replicas.followed(topic, numbers, done)
        self._schedule()
        with suppress(TimeoutError):
            async with asyncio.timeout(COPIES_WITHIN_S):
                return await read
        return []

    # -- who is asked --------------------------------------------------------------------------------------------------

    def answers(self) -> Answering[AskChannels]:
        """Return what tells another node which channels topics have here."""
        return Answering(AskChannels, self.answer)

    def answer(self, question: AskChannels) -> Channels:
        """Tell which channels a topic has here."""
        topic = question.topic
        states = self._view.of_topic.get(topic, {})
        if any(number not in states for number in question.numbers):
            return Channels([])
        mine = [number for number, state in states.items() if state.leader == self._node_id]
        numbers = [number for number in mine if self._can_tell(topic, number)]
        known = self._broker.led_replicas.known(topic)
        if known is None or not any((topic, number) in self._table.led for number in numbers):
            return Channels(numbers)
        names = sorted({*known.channels, *known.settings} - {""})
        names = [name for name in names if name > question.after]
        rows = [_row(name, known) for name in names[:CHANNELS_MAX]]
        return Channels(numbers, True, known.paused, _settings("", known), rows, len(names) > len(rows))

    def _can_tell(self, topic: str, number: int) -> bool:
        """Whether this node knows the channels of a partition that it is to lead: it does, or there are none."""
        led = self._table.led.get((topic, number))
        if led is not None:
            return not led.is_fenced
        copy = self._table.copies.get((topic, number))
        if copy is None or copy.replica is None:
            held = self._broker.topics.get(topic)
            # one that it has alone is given to the cluster in a moment
            return held is None or number not in held.partitions
        return self.is_new((topic, number), copy.replica)


def _row(name: str, known: KnownTopic) -> ChannelRow:
    channel = known.channels.get(name, KnownChannel())
    return ChannelRow(name, name in known.channels, channel.paused, channel.skipped, _settings(name, known))


def _settings(name: str, known: KnownTopic) -> bytes:
    return encode_settings(known.settings[name]) if name in known.settings else b""


def _take(answer: Channels, channels: dict[str, KnownChannel], settings: dict[str, Settings]) -> None:
    """Take what a node tells.

    Raises:
        PeerError: settings that it tells cannot be read.
    """
    channels.update({row.name: KnownChannel(row.paused, row.skipped) for row in answer.rows if row.is_there})
    encoded = {row.name: row.settings for row in answer.rows}
    try:
        settings.update(
            {name: decode_settings(each) for name, each in [("", answer.settings), *encoded.items()] if each}
        )
    except DecodeError as error:
        raise PeerError(f"settings that cannot be read: {error}") from None


def _why(record: NodeRecord | None, why: dict[str, str]) -> str:
    if record is None:
        return "it has no leader"
    return f"node {record.node}: {why.get(record.node, 'it cannot tell yet')}"


async def _unknown(_topic: str) -> list[str]:
    return []
