"""Every channel of this nsqd in every partition: the number of its cursor, and what of it is to be written.

Rules of this file: no IO but the floors of channels in order; a number is never given to two channels while the process
lives, and none that still stands in the file of floors.

Source: docs/decisions/0003.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from typing import Protocol

from flintmq.broker.channel import Channel, ChannelState
from flintmq.broker.latency import Latency
from flintmq.broker.metadata import Metadata
from flintmq.broker.options import BrokerOptions
from flintmq.broker.partition import Partition
from flintmq.broker.spilled import Shares, SpilledStore
from flintmq.broker.tagged import TaggedChannel
from flintmq.broker.topic import Topic
from flintmq.budget import Budget
from flintmq.errors import StorageError
from flintmq.names import is_ephemeral
from flintmq.storage import Files, FloorFile
from flintmq.storage.channel_store import CursorRow, StoredCursor
from flintmq.storage.records import DeleteProgress, PutChannel


class FloorKeeper(Protocol):
    """Keeps how far channels in order are elsewhere as well, where others may deliver them one day."""

    def keep(self, partition: Partition, channel: Channel, floor: int) -> bool:
        """Keep a floor; 0: what was kept is not so any more.

        Returns:
            Whether it is done. Else :meth:`Channel.floor_is_kept` is called when it is.
        """

    def forget(self, partition: Partition, channel: Channel) -> None:
        """A channel is gone."""


class Channels:
    """Owner of the channels' numbers.

    Args:
        metadata: where channels are written down.
        report: told what could not be written.

    Attributes:
        changed: those of which something may be to be written, or to be read from the database.
        is_urgent: whether one of them cannot go on before the next flush.
        shares: of the memory for spilled messages.
        floor_keeper: of channels that become ordered from now on; None: nobody else delivers them.
    """

    def __init__(
        self,
        files: Files,
        options: BrokerOptions,
        budget: Budget,
        metadata: Metadata,
        random_source: random.Random,
        report: Callable[[StorageError], None],
    ) -> None:
        self._options = options
        self._budget = budget
        self._metadata = metadata
        self._random = random_source
        self._report = report
        self._floors = FloorFile(files)
        self.floor_keeper: FloorKeeper | None = None
        self._cursors: dict[Channel, tuple[int, Partition]] = {}
        self._next_cursor = 1
        self._pack_numbers = count(1)
        self.shares = Shares(budget.deferred_max_bytes)
        self.changed: dict[Channel, None] = {}
        self.is_urgent = False

    # -- start ---------------------------------------------------------------------------------------------------

    def load_floors(self) -> dict[int, int]:
        """Read how far channels in order were, by the number of the cursor."""
        return self._floors.load()

    def restore(self, next_cursor: int, next_pack: int, floors: dict[int, int]) -> None:
        """Begin with numbers that the database does not have.

        Args:
            floors: as :meth:`load_floors` found them.
        """
        self._pack_numbers = count(next_pack)
        # a number that stands in the floors is not given to another channel, which would begin there
        self._next_cursor = max(next_cursor, max(floors, default=0) + 1)

    def begin_floors(self, floors: dict[int, int], others: Iterable[int] = ()) -> None:
        """Keep of the floors those of channels that are there. Blocks.

        Args:
            others: numbers of more cursors that are in use.
        """
        living = {*others, *(cursor for cursor, _ in self._cursors.values())}
        self._floors.begin({cursor: floor for cursor, floor in floors.items() if cursor in living})

    # -- which there are -----------------------------------------------------------------------------------------

    def __contains__(self, channel: Channel) -> bool:
        return channel in self._cursors

    def __iter__(self) -> Iterator[Channel]:
        return iter(self._cursors)

    def cursor(self, channel: Channel) -> int:
        """The number of its cursor; negative when nothing of it outlives the process."""
        return self._cursors[channel][0]

    def partition(self, channel: Channel) -> Partition:
        """The partition that it is of."""
        return self._cursors[channel][1]

    def is_durable(self, channel: Channel) -> bool:
        """Whether it outlives the process."""
        return not channel.ephemeral and not is_ephemeral(self._cursors[channel][1].topic_name)

    def add(
        self,
        topic: Topic,
        partition: Partition,
        name: str,
        stored: StoredCursor | None,
        paused: bool,
        is_ordered: bool,
        is_new: bool = False,
    ) -> Channel:
        """Make a channel of one partition.

        Args:
            stored: where it begins; None: its creation was durable and its cursor was not, so it has not been
                delivered anything.
            is_new: whether what is counted of it begins here.
        """
        if stored is None:
            stored = first_cursor(partition.log.start_sequence)
        row = stored.row
        ephemeral = is_ephemeral(name) or topic.ephemeral
        kind = TaggedChannel if topic.meta.extend_support else Channel
        channel = kind(
            name,
            partition.number,
            partition.log,
            ChannelState(row.floor, stored.window, row.deferred, row.attempts, row.holes),
            SpilledStore(stored.spilled_count, stored.spilled_next_due_ns, self._pack_numbers, self.shares),
            self._random,
            depth_max=self._options.ephemeral_depth_max if ephemeral else None,
        )
        if isinstance(channel, TaggedChannel):
            channel.headers_from = partition.headers_from
        channel.budget = self._budget
        channel.paused = paused
        channel.limit = partition.paused_at
        channel.delayed = partition.delayed
        channel.due_times = partition.due_times
        if self._options.latency_window_ns:
            channel.latency = Latency(self._options.latency_window_ns)
        if is_new:
            channel.counted_from = channel.floor
        partition.channels[name] = channel
        cursor = stored.id
        if not cursor:
            cursor = -self.new_cursor() if ephemeral else self.new_cursor()
        self._cursors[channel] = cursor, partition
        if is_ordered:
            self.order(channel, True)
        self.changed[channel] = None
        return channel

    def order(self, channel: Channel, is_ordered: bool) -> None:
        """Have a channel deliver in order, keeping its floor before each delivery; or no longer."""
        keep: Callable[[int], bool | None] = _keep_nothing
        if self.is_durable(channel):
            cursor, partition = self._cursors[channel]
            keep = partial(self._keep_here, cursor)
            if self.floor_keeper is not None:
                keep = partial(self._keep_everywhere, self.floor_keeper, cursor, partition, channel)
        channel.deliver_in_order(keep if is_ordered else None)

    def _keep_here(self, cursor: int, floor: int) -> None:
        self._floors.put(cursor, floor)

    def _keep_everywhere(
        self, keeper: FloorKeeper, cursor: int, partition: Partition, channel: Channel, floor: int
    ) -> bool:
        self._floors.put(cursor, floor)
        return keeper.keep(partition, channel, floor)

    def remove(self, channel: Channel) -> None:
        """Forget a channel that is deleted, and have its progress removed."""
        self.changed.pop(channel, None)
        self._budget.waiting.pop(channel, None)
        cursor, partition = self._cursors.pop(channel)
        if self.floor_keeper is not None:
            self.floor_keeper.forget(partition, channel)
        self._metadata.put(DeleteProgress(partition.topic_name, partition.number, channel.name), cursor)
        self.forget_cursor(cursor)

    def release(self, channel: Channel) -> int:
        """Forget a channel that is not this node's to deliver any more, and nothing of what is stored; its number."""
        self.changed.pop(channel, None)
        self._budget.waiting.pop(channel, None)
        cursor, _ = self._cursors.pop(channel)
        return cursor

    def new_cursor(self) -> int:
        """Take a number that no other cursor has."""
        cursor = self._next_cursor
        self._next_cursor += 1
        return cursor

    def new_pack(self) -> int:
        """Take a number that no other pack of spilled messages has."""
        return next(self._pack_numbers)

    def forget_cursor(self, cursor: int) -> None:
        """Forget the floor of a channel that is gone."""
        try:
            self._floors.forget(cursor)
        except StorageError as error:
            self._report(error)  # at the next start there is no such cursor

    def unkeep_floor(self, cursor: int) -> bool:
        """Forget the floor of a channel that another node delivers, which stays; whether something was kept.

        Raises:
            WriteFailed: nothing is known about it.
        """
        return self._floors.forget(cursor)

    # -- what is to be written -------------------------------------------------------------------------------------

    def put(self, channel: Channel) -> None:
        """Have written that it is there, and whether it is paused or skipped."""
        if self.is_durable(channel):
            cursor, partition = self._cursors[channel]
            where = partition.topic_name, partition.number, channel.name
            self._metadata.put(PutChannel(*where, channel.paused, channel.skipped), cursor)

    def note_changed(self, channel: Channel) -> None:
        """Write its progress with the next flush, whatever it is."""
        channel.mark_changed()
        self.changed[channel] = None

    def note_all_changed(self) -> None:
        """As :meth:`note_changed`, of all."""
        for channel in self._cursors:
            self.note_changed(channel)

    def forget_floor(self, channel: Channel) -> None:
        """Free what is kept of the floor of a channel in order: it may go back.

        Raises:
            WriteFailed: nothing is known about it.
        """
        cursor, partition = self._cursors[channel]
        self._floors.forget(cursor)
        if self.floor_keeper is not None:
            self.floor_keeper.keep(partition, channel, 0)

    def keep_floor(self, cursor: int, floor: int) -> bool:
        """Keep the floor of a channel that another node delivers; whether it went back.

        Raises:
            WriteFailed: nothing is known about it.
        """
        return self._floors.put(cursor, floor)

    def sync_floors(self) -> None:
        """Have the floors survive a power loss. Blocks; for a worker thread.

        Raises:
            WriteFailed: nothing is known about them.
        """
        self._floors.sync()

    @property
    def spilled_bytes(self) -> int:
        """Memory that spilled messages take."""
        return sum(channel.spilled.memory_bytes for channel in self._cursors)

    def close(self) -> None:
        """Release the file of floors."""
        self._floors.close()


def first_cursor(floor: int) -> StoredCursor:
    """The cursor of a channel that begins with a sequence."""
    return StoredCursor(0, "", 0, "", CursorRow(floor), b"", 0, None)


def _keep_nothing(_floor: int) -> bool | None:
    """Of a channel that does not outlive the process."""
    return None
