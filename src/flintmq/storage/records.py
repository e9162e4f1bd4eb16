"""The records that a flush writes, by names: of which topic, partition and channel, never of which row.

A record says what is so from now on; its ``statements`` are what a database has to do about it. A database has rows
under numbers of its own: of cursors, which ``statements`` is given (0 for what is not about a channel), and of packs,
which :meth:`PutSpilled.renumbered` changes. So what a partition's records say can be written by another node as well::

    topic       PutTopic, PutTopicMeta, DeleteTopic, PutSettings
    partition   PutBacklog, PutLog
    channel     PutChannel, PutProgress, PutSpilled, ShiftSpilled, DeleteChannel, DeleteProgress
    node        ShiftDueTimes

Rules of this file: data alone; records are applied in their order; times are wall time in ns; sequences' ends are
exclusive.

Source: docs/decisions/0017.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from flintmq.settings import NOTHING, Settings, decode_settings, encode_settings
from flintmq.storage import channel_store, packs
from flintmq.storage.channel_store import CursorRow, StoredChannel, StoredLog
from flintmq.storage.rows import Statement
from flintmq.topic_meta import TopicMeta, decode_meta, encode_meta


class _Record(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A record: fields of plain data, in the order in which they are written down."""


class PutTopic(_Record, frozen=True):
    """There is a topic."""

    topic: str
    paused: bool

    def statements(self, cursor: int = 0) -> list[Statement]:
        return [channel_store.put_topic(self.topic, self.paused)]


class PutTopicMeta(_Record, frozen=True):
    """A topic is one with partitions, and of this kind.

    Attributes:
        meta: as :func:`flintmq.topic_meta.encode_meta` has it.
        partitions: those held here.
        headers_from: of partitions that got headers while they were there, the first message with them.
    """

    topic: str
    meta: bytes
    partitions: Sequence[int]
    headers_from: Mapping[int, int]

    @classmethod
    def of(
        cls, topic: str, meta: TopicMeta, partitions: Iterable[int], headers_from: Mapping[int, int] | None = None
    ) -> PutTopicMeta:
        return cls(topic, encode_meta(meta), [*partitions], headers_from or {})

    def statements(self, cursor: int = 0) -> list[Statement]:
        return [
            channel_store.put_topic_meta(self.topic, decode_meta(self.meta), self.partitions, self.headers_from or None)
        ]


class DeleteTopic(_Record, frozen=True):
    """A topic is gone; its channels are by records of their own."""

    topic: str

    def statements(self, cursor: int = 0) -> list[Statement]:
        return channel_store.delete_topic(self.topic)


class PutSettings(_Record, frozen=True):
    """This is set for a topic, or for its channel when that is not empty.

    Attributes:
        settings: as :func:`flintmq.settings.encode_settings` has them; None when nothing is set any more.
    """

    topic: str
    channel: str
    settings: bytes | None

    @classmethod
    def of(cls, topic: str, channel: str, settings: Settings) -> PutSettings:
        return cls(topic, channel, None if settings == NOTHING else encode_settings(settings))

    def statements(self, cursor: int = 0) -> list[Statement]:
        settings = None if self.settings is None else decode_settings(self.settings)
        return channel_store.put_settings(self.topic, self.channel, settings)


class PutBacklog(_Record, frozen=True):
    """A partition's backlog for a first channel begins here, and a paused topic stopped here."""

    topic: str
    partition: int
    backlog_start: int
    paused_at: int | None

    def statements(self, cursor: int = 0) -> list[Statement]:
        return [channel_store.put_partition(self.topic, self.partition, self.backlog_start, self.paused_at)]


class PutLog(_Record, frozen=True):
    """This node's log of a partition has come so far; see :class:`flintmq.storage.channel_store.StoredLog`."""

    topic: str
    partition: int
    log_id: int
    synced: int
    written: int

    def statements(self, cursor: int = 0) -> list[Statement]:
        log = StoredLog(self.log_id, self.synced, self.written)
        return [channel_store.put_logs([(self.topic, self.partition, log)])]


class PutChannel(_Record, frozen=True):
    """There is a channel in a partition."""

    topic: str
    partition: int
    channel: str
    paused: bool
    skipped: bool

    def statements(self, cursor: int = 0) -> list[Statement]:
        row = StoredChannel(cursor, self.paused, self.skipped)
        return [channel_store.put_channel(self.topic, self.partition, self.channel, row)]


class DeleteChannel(_Record, frozen=True):
    """A channel is gone from a partition; so is its progress, by a record of its own."""

    topic: str
    partition: int
    channel: str

    def statements(self, cursor: int = 0) -> list[Statement]:
        return [channel_store.delete_channel(self.topic, self.partition, self.channel)]


class PutProgress(_Record, frozen=True):
    """A channel has come so far in a partition.

    Attributes:
        window: a byte for each message from the floor on, 1 when it is finished or spilled.
        deferred: sequences and due times.
        attempts: sequences and how often they have been delivered.
        holes: what it never gets behind that, from first to end.
        spilled_count: how many of its messages are spilled; ``UNKNOWN_COUNT`` when only the database knows.
    """

    topic: str
    partition: int
    channel: str
    floor: int
    window: bytes
    deferred: Sequence[tuple[int, int]]
    attempts: Sequence[tuple[int, int]]
    holes: Sequence[tuple[int, int]]
    spilled_count: int

    def statements(self, cursor: int = 0) -> list[Statement]:
        row = CursorRow(self.floor, deferred=[*self.deferred], attempts=[*self.attempts], holes=[*self.holes])
        where = self.topic, self.partition, self.channel
        return [channel_store.put_cursor(cursor, *where, row, self.window, self.spilled_count)]


class DeleteProgress(_Record, frozen=True):
    """A channel's progress in a partition is gone, with all that was spilled of it."""

    topic: str
    partition: int
    channel: str

    def statements(self, cursor: int = 0) -> list[Statement]:
        return channel_store.delete_cursor(cursor)


class PutSpilled(_Record, frozen=True):
    """A channel's spilled messages have changed.

    Attributes:
        cleared_from: those spilled before are forgotten from this sequence on; None: none are.
        packs: that are new.
        done: number of a pack -> sequences that are finished or have left it.
        gone: numbers of packs that are to be removed.
    """

    topic: str
    partition: int
    channel: str
    cleared_from: int | None
    packs: Sequence[packs.EncodedPack]
    done: Mapping[int, Sequence[int]]
    gone: Sequence[int]

    def statements(self, cursor: int = 0) -> list[Statement]:
        statements: list[Statement] = []
        new = dict.fromkeys(each.number for each in self.packs)
        old_done = {number: sequences for number, sequences in self.done.items() if number not in new}
        new_done = {number: sequences for number, sequences in self.done.items() if number in new}
        if old_done:
            statements.append(packs.put_done(old_done))  # first: it goes with a pack that is cleared
        if self.cleared_from is not None:
            statements += packs.clear_packs(cursor, self.cleared_from)
        if self.packs:
            statements += packs.put_encoded(cursor, self.packs)
        if new_done:
            statements.append(packs.put_done(new_done))
        if self.gone:
            statements.append(packs.delete_packs(self.gone))
        return statements

    def renumbered(self, numbers: Mapping[int, int]) -> PutSpilled:
        """The same with the numbers that another database has for its packs.

        Args:
            numbers: of all packs it names, by the numbers they have here.
        """
        return msgspec.structs.replace(
            self,
            packs=[each.renumbered(numbers[each.number]) for each in self.packs],
            done={numbers[number]: sequences for number, sequences in self.done.items()},
            gone=[numbers[number] for number in self.gone],
        )


class ShiftSpilled(_Record, frozen=True):
    """The wall clock was set: all due times of a channel's spilled messages move."""

    topic: str
    partition: int
    channel: str
    shift_ns: int

    def statements(self, cursor: int = 0) -> list[Statement]:
        return [packs.shift_packs(self.shift_ns, cursor)]


class ShiftDueTimes(_Record, frozen=True):
    """The wall clock was set: all due times of spilled messages move."""

    shift_ns: int

    def statements(self, cursor: int = 0) -> list[Statement]:
        return [packs.shift_packs(self.shift_ns)]


ChannelRecord: TypeAlias = PutChannel | DeleteChannel | PutProgress | DeleteProgress | PutSpilled | ShiftSpilled
PartitionRecord: TypeAlias = ChannelRecord | PutBacklog | PutLog
TopicRecord: TypeAlias = PutTopic | PutTopicMeta | PutSettings
"""Records of a topic that go with each of its partitions to another node."""
Record: TypeAlias = PartitionRecord | TopicRecord | DeleteTopic | ShiftDueTimes

encode_records = msgspec.msgpack.Encoder().encode
"""The bytes of a list of records."""

decode_records = msgspec.msgpack.Decoder(list[Record]).decode
"""Read what :func:`encode_records` made.

Raises:
    msgspec.DecodeError: it is nothing of the kind.
"""


def by_partition(records: Iterable[Record]) -> dict[tuple[str, int], list[PartitionRecord]]:
    """The records of each partition, in their order."""
    found: dict[tuple[str, int], list[PartitionRecord]] = {}
    for record in records:
        if isinstance(record, PartitionRecord):
            found.setdefault((record.topic, record.partition), []).append(record)
    return found
