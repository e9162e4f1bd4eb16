"""Rows of a replica's channels while another node leads: where the channels are, and what is spilled of them.

A leader names channels, and numbers its packs of spilled messages; here each has a number of this node. How far a
channel in order is comes by itself, ahead of the leader's progress, and is kept in the file of floors.

Rules of this file: no clock, no IO but the floors of channels in order; what was told to be written is written with the
next flush, in the order in which it was told.

Source: docs/decisions/0017.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from flintmq.broker.channels import Channels
from flintmq.broker.metadata import Metadata
from flintmq.broker.progress import Progress, Question
from flintmq.errors import StorageError
from flintmq.storage import channel_store
from flintmq.storage.records import (
    ChannelRecord,
    DeleteChannel,
    DeleteProgress,
    PutBacklog,
    PutProgress,
    PutSpilled,
    Record,
)
from flintmq.storage.rows import Statement


class KeptFloors:
    """The floors of channels in order that other nodes deliver; what goes back is synced with the next flush.

    Args:
        on_problem: told what could not be synced, and is tried again.
    """

    __slots__ = ("_channels", "_on_problem", "_progress", "_syncing")

    def __init__(self, channels: Channels, progress: Progress, on_problem: Callable[[StorageError], None]) -> None:
        self._channels = channels
        self._progress = progress
        self._on_problem = on_problem
        self._syncing = 0  # times that it is under way, or waits for the next flush

    @property
    def are_syncing(self) -> bool:
        """Whether some that went back would be forgotten by a power loss."""
        return self._syncing > 0

    def keep(self, cursor: int, floor: int) -> None:
        """Keep the floor of a channel; it outlives the process.

        Raises:
            StorageError: it cannot be written.
        """
        if self._channels.keep_floor(cursor, floor):
            self._sync()

    def forget(self, cursor: int) -> None:
        """Let nothing be kept of a channel that stays.

        Raises:
            StorageError: it cannot be written.
        """
        if self._channels.unkeep_floor(cursor):
            self._sync()

    def _sync(self) -> None:
        """Have what went back survive a power loss: who leads after one would pass over what is between."""
        self._syncing += 1
        self._progress.ask(Question(lambda _store: self._channels.sync_floors(), self._synced))

    def _synced(self, _answer: object, error: BaseException | None) -> None:
        self._syncing -= 1
        if error is not None:
            if isinstance(error, StorageError):
                self._on_problem(error)
            self._sync()  # with the next flush; no progress is stored meanwhile


class ReplicaRows:
    """The rows of the channels of one replica.

    Args:
        metadata: where they are written.
        channels: gives numbers.

    Attributes:
        cursors: the numbers of its channels' cursors.
        kept_floors: of channels in order, ahead of the database, by cursor.
        durable_floor: no channel needs the log below this sequence, as the database has it.
    """

    __slots__ = ("_backlog_start", "_channels", "_floors", "_kept", "_metadata", "_number", "_packs", "_staged",
                 "_staged_packs", "_told_floors", "_topic", "cursors", "durable_floor", "kept_floors")  # fmt: skip

    def __init__(self, topic: str, number: int, metadata: Metadata, channels: Channels, kept: KeptFloors) -> None:
        self._topic = topic
        self._number = number
        self._metadata = metadata
        self._channels = channels
        self._kept = kept
        self.cursors: dict[str, int] = {}
        self.kept_floors: dict[int, int] = {}
        self._told_floors: dict[str, int] = {}  # of channels in order, also of those that are not here yet
        self._floors: dict[str, int] = {}  # of all channels, as the database will have them
        self._backlog_start = 1
        self._packs: dict[int, int] = {}  # the leader's numbers of packs of spilled messages, and those here
        self._staged: dict[str, int] = {}  # cursors of what came of a whole state that is not complete, by channel
        self._staged_packs: dict[int, int] = {}  # the same as ``_packs``
        self.durable_floor = 1

    @property
    def floor(self) -> int:
        """The sequence below which no channel needs the log any more."""
        return min(self._floors.values(), default=self._backlog_start)

    def restore(
        self, cursors: dict[str, int], floors: Mapping[str, int], kept_floors: Mapping[int, int], backlog_start: int
    ) -> None:
        """Begin with what the database has, or a partition had.

        Args:
            cursors: numbers of the channels' cursors.
            floors: of the channels.
            kept_floors: of channels in order, ahead of the database, by cursor; those of others may be among them.
            backlog_start: where a channel begins that is made now.
        """
        self.cursors = cursors
        self._floors = dict(floors)
        self.kept_floors = {cursor: kept_floors[cursor] for cursor in cursors.values() if cursor in kept_floors}
        self._told_floors = {}
        self._backlog_start = backlog_start
        self.durable_floor = self.floor

    def led(self) -> None:
        """Forget what only a follower needs: the partition is led here."""
        self._packs = {}
        self.drop_staged()

    # -- what the leader's flushes say ---------------------------------------------------------------------------

    def make_room(self, records: Iterable[Record]) -> None:
        """Keep the floors of channels that records make here, and that were told of before there was a place for them.

        It comes before any of the records is written: of these, all are written or none.

        Raises:
            StorageError: one cannot be written.
        """
        for record in records:
            if isinstance(record, ChannelRecord) and not isinstance(record, DeleteProgress | DeleteChannel):
                name = record.channel
                if name in self._told_floors and name not in self.cursors:
                    cursor = self._channels.new_cursor()
                    self._keep(cursor, self._told_floors[name])
                    self.cursors[name] = cursor

    def write(self, record: ChannelRecord | PutBacklog) -> None:
        """Have written what a record says, by this node's numbers."""
        for statement in self._statements(record):
            self._metadata.put_own(statement)

    def _statements(self, record: ChannelRecord | PutBacklog) -> list[Statement]:
        if isinstance(record, PutBacklog):
            self._backlog_start = record.backlog_start
            return record.statements()
        name = record.channel
        if isinstance(record, DeleteProgress):
            cursor = self.cursors.pop(name, None)
            self._floors.pop(name, None)
            self._told_floors.pop(name, None)
            if cursor is None:
                return []
            self.kept_floors.pop(cursor, None)
            self._channels.forget_cursor(cursor)
            return record.statements(cursor)
        if isinstance(record, DeleteChannel):
            return record.statements()
        cursor = self.cursors.get(name)
        if cursor is None:
            cursor = self.cursors[name] = self._channels.new_cursor()
        if isinstance(record, PutProgress):
            self._floors[name] = record.floor
        if isinstance(record, PutSpilled):
            record = self._renumbered(self._packs, record)
        return record.statements(cursor)

    def _renumbered(self, numbers: dict[int, int], record: PutSpilled) -> PutSpilled:
        """Give packs the numbers that they have here; what is said of one that is not here is left out."""
        for pack in record.packs:
            if pack.number not in numbers:
                numbers[pack.number] = self._channels.new_pack()
        done = {number: sequences for number, sequences in record.done.items() if number in numbers}
        gone = [number for number in record.gone if number in numbers]
        record = msgspec.structs.replace(record, done=done, gone=gone).renumbered(numbers)
        for number in gone:
            del numbers[number]
        return record

    # -- a whole state -------------------------------------------------------------------------------------------

    def stage(self, record: PutSpilled) -> None:
        """Have a part of a whole state written, under a cursor that a start removes."""
        if record.channel not in self._staged:
            self._staged[record.channel] = -self._channels.new_cursor()
        numbered = self._renumbered(self._staged_packs, record)
        for statement in numbered.statements(self._staged[record.channel]):
            self._metadata.put_own(statement)

    def drop_staged(self) -> None:
        """Forget what :meth:`stage` has written."""
        for cursor in self._staged.values():
            for statement in channel_store.delete_cursor(cursor):
                self._metadata.put_own(statement)
        self._staged, self._staged_packs = {}, {}

    def begin_anew(self, left: Collection[str]) -> None:
        """Forget where the channels are, and those that are not among ``left``: of all of them the spilled messages are
        what was staged.
        """
        put = self._metadata.put_own
        for name, cursor in self.cursors.items():
            for statement in channel_store.delete_cursor(cursor):
                put(statement)
            if name not in left or name not in self._told_floors:
                self._channels.forget_cursor(cursor)
            if name not in left:
                put(channel_store.delete_channel(self._topic, self._number, name))
        put(channel_store.delete_partition(self._topic, self._number))
        floors = {name: floor for name, floor in self._told_floors.items() if name in left}
        # what is kept of these stays where it is: there is no moment without it
        self.cursors = {name: cursor for name, cursor in self.cursors.items() if name in floors}
        self.kept_floors = {cursor: floors[name] for name, cursor in self.cursors.items()}
        self._told_floors = floors
        self._floors = {}
        self._backlog_start = 1
        for name, staged in self._staged.items():
            if name not in self.cursors:
                self.cursors[name] = self._channels.new_cursor()
            put(channel_store.move_packs(staged, self.cursors[name]))
        self._packs = self._staged_packs
        self._staged, self._staged_packs = {}, {}

    # -- floors of channels in order -----------------------------------------------------------------------------

    def keep_floor(self, name: str, floor: int) -> None:
        """Keep how far a channel in order is; 0: what is kept is not so any more.

        Raises:
            StorageError: it cannot be written.
        """
        cursor = self.cursors.get(name)
        if floor:
            self._told_floors[name] = floor
            if cursor is not None:
                self._keep(cursor, floor)
            return
        self._told_floors.pop(name, None)
        if cursor is not None:
            self.kept_floors.pop(cursor, None)
            self._kept.forget(cursor)

    def _keep(self, cursor: int, floor: int) -> None:
        self._kept.keep(cursor, floor)
        self.kept_floors[cursor] = floor

    def limit_floors(self, end: int) -> None:
        """Let no channel in order be beyond a log that was cut back, or lost its end with the power: the sequences from
        there on are other messages' from now on, which nobody has finished.

        Raises:
            StorageError: it cannot be written.
        """
        for name, floor in self._told_floors.items():
            self._told_floors[name] = min(floor, end)
        for cursor, floor in self.kept_floors.items():
            if floor > end:
                self._keep(cursor, end)


def delete_rows(metadata: Metadata, channels: Channels, topic: str, number: int, cursors: Mapping[str, int]) -> None:
    """Have all rows of a replica removed, with those of its channels."""
    for name, cursor in cursors.items():
        metadata.put_own(channel_store.delete_channel(topic, number, name))
        for statement in channel_store.delete_cursor(cursor):
            metadata.put_own(statement)
        channels.forget_cursor(cursor)
    for statement in channel_store.delete_replica(topic, number):
        metadata.put_own(statement, must_sync=True)
