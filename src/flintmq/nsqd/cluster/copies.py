"""A replica as the two ends of replication want it: a leader's log to be read, a follower's to be changed.

Rules of this file: nothing is decided here; whatever has to be durable ends with a flush, which is asked for at once.

Source: ``cluster/leading.py`` and ``cluster/following.py`` for what is promised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import msgspec

from flintmq.batch import BatchError, decode_header
from flintmq.broker.followed_replicas import FollowedReplicas
from flintmq.broker.led_replicas import LedReplicas, SpilledState
from flintmq.broker.replica import Replica
from flintmq.cluster.history import LogShape, cut
from flintmq.cluster.leading import Done, MoreDone, NotInLog, StateDone, WholeState
from flintmq.errors import FlintError, StorageError
from flintmq.nsqd.cluster.unanswered import Unanswered
from flintmq.storage import PartitionLog
from flintmq.storage.records import PutSpilled, decode_records, encode_records

log = logging.getLogger(__name__)

PART_COUNT = 512
"""Records of a whole state that travel together; one that is about many messages is large."""
STATE_BYTES_MAX = 256 * 1024 * 1024
"""Of the whole state of one partition without what is spilled, gathered in memory: a byte a message of each window."""


def shape_of(replica: Replica) -> LogShape:
    """Return the history, the start and the end of a replica's log."""
    stored = replica.log
    offset_bytes = stored.end_offset_bytes
    if stored.start_sequence < stored.next_sequence:
        data, _ = stored.fetch_stored(stored.start_sequence, 1)
        if data:
            offset_bytes = decode_header(data).offset_bytes
    return LogShape(tuple(replica.history), stored.start_sequence, stored.next_sequence, offset_bytes)


def synced_end(stored: PartitionLog) -> int:
    """Return the sequence up to which a log would survive a power loss; of an empty one that is its end."""
    return max(stored.synced_sequence, stored.start_sequence)


class LedLog:
    """The log of a partition that is led here.

    Args:
        number_of: the number of the progress that was handed over last.
    """

    def __init__(
        self, led_replicas: LedReplicas, replica: Replica, number_of: Callable[[], int], schedule: Callable[[], None]
    ) -> None:
        self._led_replicas = led_replicas
        self._replica = replica
        self._number_of = number_of
        self._schedule = schedule

    def shape(self) -> LogShape:
        return shape_of(self._replica)

    def read(self, sequence: int, bytes_max: int) -> tuple[bytes | memoryview, int, int]:
        stored = self._replica.log
        if not stored.start_sequence <= sequence < stored.next_sequence:
            raise NotInLog(f"{sequence} is not between {stored.start_sequence} and {stored.next_sequence}")
        data, end = stored.fetch_stored(sequence, bytes_max)
        gap = decode_header(data).first_sequence - sequence if data else -1
        if gap < 0:
            raise NotInLog(f"no batch begins at {sequence} in {stored.directory}")
        if gap:
            where = self._replica.topic, self._replica.number
            log.warning("CLUSTER: %s/%d: messages %d to %d are missing here and are sent to nobody", *where, sequence,
                        sequence + gap - 1)  # fmt: skip
        return data, end, gap

    def whole_state(self, done: StateDone) -> None:
        def read(records: Sequence[Any], spilled: SpilledState | None, error: BaseException | None) -> None:
            if error is not None:
                self._tell_state_failed(error)
                done(None)
                return
            rows = iter(records)
            parts = [encode_records(part) for part in iter(lambda: list(islice(rows, PART_COUNT)), [])]
            rest = () if spilled is None else (partial(self._more_state, spilled), spilled.close)
            done(WholeState(self._number_of(), self._replica.log.committed_sequence, parts, *rest))

        try:
            self._led_replicas.whole_state(self._replica, read)
        except (ValueError, FlintError) as error:
            self._tell_state_failed(error)
            done(None)
            return
        self._schedule()

    def _more_state(self, spilled: SpilledState, done: MoreDone) -> None:
        def read(records: Sequence[Any], error: BaseException | None) -> None:
            if error is not None:
                self._tell_state_failed(error)
                done(None)
            else:
                done([encode_records([record]) for record in records])

        self._led_replicas.read_spilled(spilled, read)
        self._schedule()

    def _tell_state_failed(self, error: BaseException) -> None:
        log.warning("state of %s/%d: %s", self._replica.topic, self._replica.number, error)


class FollowedLog:
    """The log and the state of a copy of what another node leads.

    Attributes:
        unanswered: publishes from when it was led here.

    Args:
        syncs: only what is synced may be acknowledged.
        schedule: has the turn ended, so that a flush is written that something waits for.
    """

    def __init__(
        self,
        replicas: FollowedReplicas,
        replica: Replica,
        syncs: Callable[[], bool],
        schedule: Callable[[], None],
    ) -> None:
        self.replica = replica
        self.unanswered = Unanswered(replica.topic, replica.number)
        self._replicas = replicas
        self._syncs = syncs
        self._schedule = schedule
        self._kept: list[Any] = []  # records of a whole state that is coming, but what is staged
        self._kept_bytes = 0

    @property
    def epoch(self) -> int:
        return self.replica.durable_epoch

    @property
    def progress(self) -> tuple[int, int]:
        return self.replica.progress

    @property
    def end(self) -> int:
        return self.replica.log.next_sequence

    @property
    def acknowledged_end(self) -> int:
        stored = self.replica.log
        return synced_end(stored) if self._syncs() else stored.next_sequence

    def shape(self) -> LogShape:
        replica = self.replica
        start, lost_from = replica.log.start_sequence, replica.lost_from
        if not lost_from:
            return shape_of(replica)
        if lost_from <= start:
            return LogShape((), 0, 0)  # no log begins there, so it starts over
        return LogShape(tuple(cut(replica.history, lost_from)), start, lost_from)

    def note_epoch(self, epoch: int, done: Done) -> None:
        def note() -> None:
            self.replica.note_epoch(epoch, False, lambda error: done(_told(error)))

        self._do(note, done)

    def append(self, data: memoryview, gap: int) -> int:
        replica, batches = self.replica, data
        end = replica.log.next_sequence
        try:
            if gap:
                first = decode_header(batches).first_sequence
                if first != end + gap:
                    raise ValueError(f"the first batch begins at {first}, not {gap} behind {end}")
            end_now = self._replicas.append(replica, batches, after_gap=gap > 0)
        except BatchError as error:
            raise ValueError(str(error)) from error
        if gap:
            what = "CLUSTER: %s/%d: messages %d to %d are missing here as they are at the leader, which lost them"
            log.warning(what, replica.topic, replica.number, end, end + gap - 1)
        return end_now

    def commit(self, sequence: int) -> None:
        self.replica.log.advance_committed(sequence)
        self.unanswered.committed(sequence)

    def cut_back(self, sequence: int, done: Done) -> None:
        def ended(error: BaseException | None) -> None:
            if error is None:
                self.unanswered.cut(sequence)
            done(_told(error))

        self._do(lambda: self._replicas.cut_back(self.replica, sequence, ended), done)

    def start_over(self, sequence: int, offset_bytes: int, done: Done) -> None:
        self.unanswered.give_up()

        def start() -> None:
            self._replicas.start_over(self.replica, sequence, offset_bytes, lambda error: done(_told(error)))

        self._do(start, done)

    def keep_floors(self, floors: list[tuple[str, int]]) -> None:
        self._replicas.keep_floors(self.replica, floors)

    def drop_state(self) -> None:
        self._kept, self._kept_bytes = [], 0
        self.replica.rows.drop_staged()

    def stage(self, part: bytes, done: Done) -> None:
        def write() -> None:
            records = _records_in(part)
            spilled = [record for record in records if isinstance(record, PutSpilled)]
            if len(spilled) < len(records):
                self._kept_bytes += len(part)
                if self._kept_bytes > STATE_BYTES_MAX:
                    raise StorageError(f"a state of more than {STATE_BYTES_MAX} bytes beside what is spilled")
                self._kept += [record for record in records if not isinstance(record, PutSpilled)]
            if spilled:
                self._replicas.stage(self.replica, spilled, lambda error: done(_told(error)))
            else:
                done(None)

        self._do(write, done)

    def apply(self, position: tuple[int, int], parts: list[bytes], is_whole: bool, done: Done) -> None:
        def write() -> None:
            records = [record for part in parts for record in _records_in(part)]
            if is_whole:
                records = [*self._kept, *records]
                self._kept, self._kept_bytes = [], 0
            self._replicas.apply(self.replica, position, records, is_whole, lambda error: done(_told(error)))

        self._do(write, done)

    def _do(self, work: Callable[[], None], done: Done) -> None:
        """Begin something; what it is refused with ends it."""
        try:
            work()
        except (ValueError, FlintError) as error:
            done(error)
        self._schedule()


def _records_in(part: bytes) -> list[Any]:
    try:
        return decode_records(part)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StorageError(f"progress that cannot be read: {error}") from None


def _told(error: BaseException | None) -> Exception | None:
    return error if error is None or isinstance(error, Exception) else StorageError(repr(error))
