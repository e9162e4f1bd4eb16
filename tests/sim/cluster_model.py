"""A partition on a model disk: batches with their epochs, the channels' state, and what of both survives what.

A batch is ``>QIQI`` (first sequence, messages, epoch, bytes of the payload) and its payload: the message ids, 8 bytes
each. The state of the channels is a dictionary from names to floors; its records are changes of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from struct import Struct

import msgspec

from flintmq.cluster.history import LogShape, cut, noted, trimmed
from flintmq.cluster.leading import Done, MoreDone, NotInLog, StateDone, WholeState
from flintmq.errors import StorageError

HEADER = Struct(">QIQI")
ID = Struct(">Q")
ID_BYTES = ID.size
NOWHERE = 1 << 50

encode_records = msgspec.msgpack.Encoder().encode
decode_records = msgspec.msgpack.Decoder(dict[str, int | None]).decode


def batch_of(first: int, epoch: int, ids: list[int]) -> bytes:
    """Build a batch."""
    return HEADER.pack(first, len(ids), epoch, ID_BYTES * len(ids)) + b"".join(map(ID.pack, ids))


@dataclass(eq=False)
class Disk:
    """One copy of a partition on a disk, with what its process knows of it.

    Attributes:
        batches: (first, end, epoch, bytes), ascending.
        ends: of the batches.
        synced_end: what a power loss leaves of the log.
        epoch: the highest that was noted.
        channels: the state, at ``progress``.
        floors: of channels in order, ahead of that.
        stale_floors: larger ones of before, which a power loss may bring back.
        syncs_floors: whether those that go back are synced, so that there are none.
        staged: parts of a whole state that is not complete.
        bad: first sequences of batches that cannot be read any more.
        lost_from: what of that is known: the first sequence that is missing; None: nothing is.
        is_led: whether what reads it is a leader.
        later: runs a transaction of the database: at once, unless somebody else is in charge.
    """

    start: int = 0
    end: int = 0
    batches: list[tuple[int, int, int, bytes]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    history: list[tuple[int, int]] = field(default_factory=list)
    synced_end: int = 0
    committed: int = 0
    epoch: int = 0
    progress: tuple[int, int] = (0, 0)
    channels: dict[str, int] = field(default_factory=dict)
    floors: dict[str, int] = field(default_factory=dict)
    stale_floors: dict[str, int] = field(default_factory=dict)
    syncs_floors: bool = True
    needs_sync: bool = False
    later: Callable[[Callable[[], None]], None] = lambda action: action()
    on_bad: Callable[[], None] = lambda: None
    sequence_of: dict[int, int] = field(default_factory=dict)
    read_count: int = 0
    state_part_bytes: int = 32  # two channels
    flush_number: int = 0
    staged: list[bytes] = field(default_factory=list)
    bad: set[int] = field(default_factory=set)
    lost_from: int | None = None
    is_led: bool = False

    def is_bad(self, start: int, end: int) -> bool:
        """Whether something from ``start`` to ``end`` (exclusive) cannot be read."""
        return any(first < end and self.ends[bisect_left(self.ends, first + 1)] > start for first in self.bad)

    def notice(self) -> None:
        """Find out what cannot be read."""
        if self.bad:
            self.lost_from = min(self.bad)

    def ids(self, start: int, end: int) -> list[int]:
        """The messages from ``start`` to ``end`` (exclusive)."""
        return [self.id_at(sequence) for sequence in range(max(start, self.start), min(end, self.end))]

    def id_at(self, sequence: int) -> int:
        """The message with a sequence that is here."""
        first, _, _, data = self.batches[bisect_left(self.ends, sequence + 1)]
        return int(ID.unpack_from(data, HEADER.size + (sequence - first) * ID_BYTES)[0])

    # --- as a leader's

    def shape(self) -> LogShape:
        if self.lost_from is not None and not self.is_led:
            if self.lost_from <= self.start:
                return LogShape((), NOWHERE, NOWHERE)
            end = min(self.end, self.lost_from)
            return LogShape(cut(self.history, end), self.start, end, self.start * ID_BYTES)
        return LogShape(list(self.history), self.start, self.end, self.start * ID_BYTES)

    def read(self, sequence: int, bytes_max: int) -> tuple[bytes, int, int]:
        self.read_count += 1
        index = bisect_left(self.ends, sequence + 1)
        if index == len(self.batches) or self.batches[index][0] != sequence:
            raise NotInLog(f"no batch begins at {sequence}")
        if sequence in self.bad:
            self.on_bad()
            raise StorageError(f"the batch at {sequence} cannot be read")
        found: list[bytes] = []
        size = 0
        for first, _, _, data in self.batches[index:]:
            if found and (size + len(data) > bytes_max or first in self.bad):
                break
            found.append(data)
            size += len(data)
        return b"".join(found), self.batches[index + len(found) - 1][1], 0

    def whole_state(self, done: StateDone) -> None:
        names = [*self.channels]
        step = max(1, self.state_part_bytes // 16)
        parts = [
            encode_records({name: self.channels[name] for name in names[at : at + step]})
            for at in range(0, len(names), step)
        ]
        left = deque(parts[1:])  # what is spilled is read when there is room for it

        def more(then: MoreDone) -> None:
            then([left.popleft()] if left else [])

        done(WholeState(self.flush_number, self.committed, parts[:1], more))

    def write(self, epoch: int, ids: list[int]) -> int:
        """Append messages, as a leader; return the end."""
        self.append(memoryview(batch_of(self.end, epoch, ids)))
        return self.end

    def lead(self, epoch: int) -> None:
        """Begin an epoch, durably."""
        self.epoch = epoch
        self.history = noted(self.history, epoch, self.end)
        self.flush_number = 0

    def drop_before(self, sequence: int) -> None:
        """Forget whole batches at the start."""
        count = bisect_left(self.ends, sequence + 1)
        if count:
            for data in self.batches[:count]:
                self._forget_ids(data)
            self.start = self.ends[count - 1]
            del self.batches[:count], self.ends[:count]
            self.bad = {first for first in self.bad if first >= self.start}
            self.history = trimmed(self.history, self.start)

    # --- as a follower's

    @property
    def acknowledged_end(self) -> int:
        return self.synced_end if self.needs_sync else self.end

    def note_epoch(self, epoch: int, done: Done) -> None:
        def commit() -> None:
            self.epoch = max(self.epoch, epoch)
            done(None)

        self.later(commit)

    def append(self, data: memoryview, gap: int = 0) -> int:
        if gap:
            raise ValueError(f"a gap of {gap}, and no log here has one")
        at = 0
        while at < len(data):
            first, count, epoch, size = HEADER.unpack_from(data, at)
            if first != self.end or epoch > self.epoch:
                raise ValueError(f"batch {first} of epoch {epoch}, the end is {self.end}, the epoch {self.epoch}")
            self.history = noted(self.history, epoch, first)
            whole = bytes(data[at : at + HEADER.size + size])
            at += HEADER.size + size
            self.end = first + count
            self.batches.append((first, self.end, epoch, whole))
            self.ends.append(self.end)
            for index in range(count):
                self.sequence_of[ID.unpack_from(whole, HEADER.size + index * ID_BYTES)[0]] = first + index
        return self.end

    def commit(self, sequence: int) -> None:
        self.committed = max(self.committed, min(sequence, self.end))

    def lose_from(self, end: int) -> None:
        """Let the log end at the last whole batch before ``end``."""
        count = bisect_left(self.ends, end + 1)
        for data in self.batches[count:]:
            self._forget_ids(data)
        del self.batches[count:], self.ends[count:]
        self.end = self.ends[-1] if self.ends else self.start
        self.bad = {first for first in self.bad if first < self.end}
        if self.lost_from is not None and self.lost_from >= self.end:
            self.lost_from = None
        self.history = cut(self.history, self.end)
        self.synced_end = min(self.synced_end, self.end)
        self.committed = min(self.committed, self.end)

    def _forget_ids(self, batch: tuple[int, int, int, bytes]) -> None:
        first, end, _, data = batch
        for index in range(end - first):
            message = ID.unpack_from(data, HEADER.size + index * ID_BYTES)[0]
            if self.sequence_of.get(message) == first + index:
                del self.sequence_of[message]

    def cut_back(self, sequence: int, done: Done) -> None:
        def commit() -> None:
            if sequence < self.end and sequence not in (*self.ends, self.start):
                done(ValueError(f"no batch ends at {sequence}"))
                return
            self.lose_from(sequence)
            self.synced_end = self.end
            done(None)

        self.later(commit)

    def start_over(self, sequence: int, offset_bytes: int, done: Done) -> None:
        def commit() -> None:
            self.lose_from(self.start)
            self.start = self.end = self.synced_end = self.committed = sequence
            self.history, self.progress, self.channels = [], (0, 0), {}
            self.bad, self.lost_from = set(), None
            done(None)

        self.later(commit)

    def keep_floors(self, floors: list[tuple[str, int]]) -> None:
        for name, floor in floors:
            before = self.floors.get(name, 0)
            if floor < before and not self.syncs_floors:
                self.stale_floors[name] = max(before, self.stale_floors.get(name, 0))
            self.floors[name] = floor

    def drop_state(self) -> None:
        self.later(self.staged.clear)

    def stage(self, part: bytes, done: Done) -> None:
        def commit() -> None:
            self.staged.append(part)
            done(None)

        self.later(commit)

    def apply(self, position: tuple[int, int], parts: list[bytes], is_whole: bool, done: Done) -> None:
        def commit() -> None:
            staged: list[bytes] = []
            if is_whole:
                self.channels = {}
                staged, self.staged = self.staged, []
            for part in [*staged, *parts]:
                change_channels(self.channels, decode_records(part))
            self.progress = position
            done(None)

        self.later(commit)


def change_channels(channels: dict[str, int], changes: dict[str, int | None]) -> None:
    """Make the changes that records say."""
    for name, floor in changes.items():
        if floor is None:
            channels.pop(name, None)
        else:
            channels[name] = floor
