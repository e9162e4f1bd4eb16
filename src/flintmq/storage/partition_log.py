"""The log of one topic partition: append, read, fetch, sync, retention.

A directory holds ``log.meta``, segments ``<first sequence>.log`` with their ``.index``, and ``.bad`` files with damaged
bytes that were set aside. The last segment is the active one; it is sealed when it is full, and not changed after that.

Invariants: I1 ``start_sequence``, ``synced_sequence`` and ``committed_sequence`` are at most ``next_sequence``; I2 the
tail cache holds every batch from ``_tail_first`` to ``next_sequence``; I3 after a write or sync went wrong nothing is
appended (``failed``); I4 at most one sync is under way; I5 what a :class:`SyncTicket` covers is fixed when it is begun.

Rules of this file: everything runs on the event loop's thread, except :meth:`SyncTicket.run`; no object per message;
memory does not grow with the backlog (see cache.py).

Source: docs/decisions/0001, docs/decisions/0002, docs/decisions/0005.
"""

from __future__ import annotations

import errno
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct

from flintmq.batch import (
    EXTENDED,
    FLAGS_POSITION,
    HEADER_BYTES,
    PREFIX_BYTES_MIN,
    RAW_IDS,
    UNIFORM,
    Batch,
    BatchError,
    BatchHeader,
    decode_batch,
    decode_header,
    encode_batch,
    producer_of,
    verify,
    with_stamps,
)
from flintmq.errors import DiskFull, FileSizeLimit, PartitionFailed, StorageError, WriteFailed
from flintmq.limits import (
    BATCH_COUNT_MAX,
    BATCH_SIZE_MAX,
    CHECKPOINT_BYTES,
    DISK_RESERVE_BYTES,
    READ_AHEAD_BYTES,
    SEQUENCE_MAX,
    SPACE_SAMPLE_BYTES,
    SYNC_HANDLES_MAX,
    TAIL_CACHE_BYTES,
)
from flintmq.storage.cache import ReadCache
from flintmq.storage.cut import Cut, write_cut
from flintmq.storage.files import File, Files
from flintmq.storage.group_sync import sync_together
from flintmq.storage.index import Entry, SparseIndex
from flintmq.storage.producers import ProducerTable, encode_snapshot, table_before, write_snapshot
from flintmq.storage.read_ahead import decode_run
from flintmq.storage.recovery import Recovered, Recovery, parents_of, recover
from flintmq.storage.scan import SIZE_TABLE_ENTRY_BYTES
from flintmq.storage.segment import (
    NO_STOP,
    SEGMENT_HEADER_BYTES,
    Corruption,
    Found,
    Home,
    Segment,
    decode_segment_header,
)

__all__ = ["Corruption", "LogPlace", "PartitionLog", "ReadCache", "SegmentInfo", "SyncTicket", "run_tickets"]

_LONE_READ_BYTES = 16 * 1024
_CLOSED = "the log is closed"
_BATCH_OVERHEAD_BYTES = 700  # memory of a Batch and its header beside its bytes
_OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT)
_TIMESTAMP = Struct(">Q")
_TIMESTAMP_POSITION = 8  # in a message frame


class CutsCommitted(ValueError):
    """A log is not cut back: it would lose what is committed."""


@dataclass(slots=True, frozen=True)
class SegmentInfo:
    """A segment, as retention needs to know it.

    Attributes:
        first_sequence, end_sequence: the sequences it holds; the end is exclusive.
        size_bytes: on disk, without index.
        timestamp_max: latest timestamp of its messages in ns, 0 when empty.
        is_sealed: whether it can be dropped.
    """

    first_sequence: int
    end_sequence: int
    size_bytes: int
    timestamp_max: int
    is_sealed: bool


class SyncTicket:
    """One group sync: what to sync was fixed when it was begun.

    Attributes:
        directory: of the log.
        directories: those whose entries changed.
        end_sequence: every sequence below it is durable once :func:`run_tickets` returned.
        segments: the segments it covers, each with its size when the ticket was begun.
        is_abandoned: whether the log was deleted since, so that errors say nothing.
        snapshot: of the producers, to be written when everything below ``end_sequence`` is durable; None for none.
        snapshot_error: why that could not be done.
    """

    __slots__ = (
        "_files",
        "_held",
        "_paths",
        "directories",
        "directory",
        "end_sequence",
        "is_abandoned",
        "segments",
        "snapshot",
        "snapshot_error",
    )

    def __init__(
        self,
        files: Files,
        directory: str,
        directories: list[str],
        segments: list[Segment],
        held: list[File],
        end: int,
        snapshot: bytes | None = None,
    ) -> None:
        self._files = files
        self.directory = directory
        self.snapshot = snapshot
        self.snapshot_error: OSError | None = None
        self.directories = directories
        self._held = held
        self._paths = [segment.path for segment in segments[: len(segments) - len(held)]]
        self.segments = [(segment, segment.size) for segment in segments]
        self.end_sequence = end
        self.is_abandoned = False

    def run(self) -> None:
        """Sync the files, and directories whose entries changed. Blocks; for a worker thread.

        Raises:
            OSError: nothing is known about what is durable.
        """
        (error,) = run_tickets([self])
        if error is not None:
            raise error

    def sync_files(self) -> None:
        """Sync the files alone. Blocks.

        Raises:
            OSError: nothing is known about what is durable.
        """
        for path in self._paths:
            file = self._files.open(path)
            try:
                file.sync()
            finally:
                file.close()
        for file in self._held:
            file.sync()

    def write_snapshot(self) -> None:
        """Write down what is known of producers, if that is due; everything the ticket covers is durable. Blocks."""
        if self.snapshot is not None:
            try:
                write_snapshot(self._files, self.directory, self.snapshot)
            except OSError as error:  # says nothing about the messages
                self.snapshot_error = error


def run_tickets(tickets: Sequence[SyncTicket]) -> list[OSError | None]:
    """Sync several logs of one data directory. Blocks; for a worker thread.

    Returns:
        for each why nothing is known about what is durable; None when all it covers is.
    """
    if not tickets:
        return []
    files = tickets[0]._files
    errors = [
        None if ticket.is_abandoned else error
        for ticket, error in zip(tickets, sync_together(files, tickets), strict=True)
    ]
    durable = [ticket for ticket, error in zip(tickets, errors, strict=True) if error is None]
    files.run_all([ticket.write_snapshot for ticket in durable if ticket.snapshot is not None])
    return errors


@dataclass(slots=True, frozen=True)
class LogPlace:
    """A log to be opened.

    Attributes:
        directory: relative to the data directory; created when missing.
        partition: number of it.
        next_sequence_min: the next append gets at least this sequence; a gap is reported.
        durable_end: every sequence below it cannot have been lost but by damage.
        committed_end: nothing at or beyond it counts as committed, although it is stored; None: all that is stored.
        log_id: identity of the log if it is a new one; 0: the time.
        is_replica: it is as another node has it: it ends where it ends, and what its batches say of synced sequences is
            not true of it.
    """

    directory: str
    partition: int
    next_sequence_min: int = 1
    durable_end: int = 1
    committed_end: int | None = None
    log_id: int = 0
    is_replica: bool = False


@dataclass(slots=True)
class _Lent:
    """The things of the event loop that a log does without while a worker thread has it."""

    cache: ReadCache
    report: Callable[[Corruption], None]
    reports: list[Corruption]


class _Chunk:
    """Batches decoded by one read ahead; every batch stored between ``first`` and ``end`` is in it."""

    __slots__ = ("batches", "end", "ends", "first")

    def __init__(self, first: int, batches: list[Batch]) -> None:
        self.first = first
        self.batches = batches
        self.ends = [batch.end for batch in batches]
        self.end = self.ends[-1]


def _frames_at(flags: int, count: int, producer: tuple[bytes, int] | None) -> int:
    """Return how many bytes of a batch stand before its first frame."""
    frames_at = HEADER_BYTES if flags & UNIFORM else HEADER_BYTES + SIZE_TABLE_ENTRY_BYTES * count
    return frames_at if producer is None else frames_at + PREFIX_BYTES_MIN - 1 + len(producer[0])


class PartitionLog:
    """The single owner of one partition's directory.

    Attributes:
        log_id: identity of this log: what it was given when it was made, as a rule the time.
        start_sequence: first sequence still stored; ``next_sequence`` when there is none.
        next_sequence: one past the last appended.
        committed_sequence: what delivers must stop here.
        synced_sequence: everything below survives a power loss.
        end_offset_bytes: virtual position after the last frame: frame bytes since the log was born.
        size_bytes: of all segments on disk.
        failed: why nothing can be appended any more; None when all is well.
        on_failed: told of the directory and of ``failed`` once that is set, unless the log was closed; whoever opens a
            log sets it. In the thread that has the log, see :meth:`lend`.
        is_created: whether there are files; without them nothing can be appended yet.
        layout: flags of the batches that are appended, as :func:`flintmq.batch.encode_batch` has them; whoever opens a
            log sets it, as it is a property of the topic.
        epoch: that the batches carry which :meth:`append` makes; 0 unless the partition is replicated.
        home: what its segments have in common.
        producers: who has published to it with sequences.
        lost_from: from this sequence on nothing that is missing is stepped over, because another replica has it: what
            would do that fails; ``NO_STOP``: everything is.
    """

    def __init__(self, home: Home, recovered: Recovered, segment_bytes: int) -> None:
        self.home = self._home = home
        self._files = home.files
        self._cache = home.cache
        self._id_base = home.id_base
        self._segment_bytes = segment_bytes
        self.partition = home.partition
        self.directory = home.directory
        self.is_created = True
        self.layout = 0
        self.epoch = 0
        self.lost_from = NO_STOP
        self.on_failed: Callable[[str, str], None] = lambda _directory, _reason: None
        self._space_credit = 0
        self._unsynced: list[Segment] = []  # sealed, not yet synced
        self._new: Segment | None = None  # of which a power loss could take the name and the header
        self._is_directory_dirty = False
        self._unsynced_parents: list[str] = []
        self._ticket: SyncTicket | None = None
        self._is_closed = False
        self._table_before_cut: ProducerTable | None = None
        self._lent: _Lent | None = None
        self._tail: list[bytes | Batch] = []  # bytes until somebody reads it
        self._tail_ends: list[int] = []
        self._tail_bytes = 0
        self._chunk_firsts: list[int] = []
        self._chunks: dict[int, _Chunk] = {}
        self._expected: int | None = None  # LAYOUT_FLAGS of the topic; None: not known, nobody delivers from it
        self._adopt(recovered)

    def _adopt(self, recovered: Recovered) -> None:
        segments, failed = recovered.segments, recovered.failed
        self.producers = recovered.producers
        self._segments = segments
        self._firsts = [segment.first for segment in segments]
        active = self._active = segments[-1]
        self._new = None
        self.log_id = self._home.log_id
        self.failed = failed
        self._has_sync_failed = failed is not None
        self.next_sequence = active.end
        self.committed_sequence = active.end
        self.synced_sequence = active.synced_before
        self.end_offset_bytes = active.end_offset_bytes
        self.size_bytes = sum(segment.size for segment in segments)
        self._checkpoint_position = recovered.checkpoint_size
        self._tail_first = active.end
        if failed is not None:
            self.on_failed(self.directory, failed)

    @classmethod
    def new(
        cls,
        files: Files,
        directory: str,
        *,
        partition: int,
        segment_bytes: int,
        cache: ReadCache,
        report: Callable[[Corruption], None],
        created_ns: int,
        is_replica: bool = False,
    ) -> PartitionLog:
        """A log without files, see creation.py: empty, and nothing may be appended before :meth:`created`.

        The arguments are those of :meth:`open`.

        Args:
            is_replica: see :class:`LogPlace`.
        """
        home = Home(files, directory, partition, cache, report, created_ns, is_replica)
        segment = Segment(home, 1)
        segment.live_index = SparseIndex()
        log = cls(home, Recovered([segment], None), segment_bytes)
        log.is_created = False
        return log

    def created(self, recovered: Recovered, is_synced: bool) -> None:
        """Take over the files that were made for it.

        Args:
            is_synced: whether they survive a power loss; else the first sync makes them.
        """
        self.is_created = True
        self._adopt(recovered)
        if not is_synced:
            self._is_directory_dirty = True
            self._unsynced_parents = parents_of(self.directory)
        if self._is_closed:
            self._close_files()
            self.failed = _CLOSED

    @classmethod
    def open(
        cls,
        files: Files,
        directory: str,
        *,
        partition: int,
        segment_bytes: int,
        cache: ReadCache,
        report: Callable[[Corruption], None],
        created_ns: int,
        next_sequence_min: int = 1,
        durable_end: int = 1,
    ) -> PartitionLog:
        """Open and recover a log, or create it. Blocks, also for syncs.

        Args:
            directory: relative to the data directory; created when missing.
            segment_bytes: a segment is sealed before it grows beyond this; a larger batch gets a segment of its own.
            report: told of everything damaged, cut or missing, now and later.
            created_ns: wall time; becomes the identity of a new log.
            next_sequence_min: the next append gets at least this sequence; a gap is reported.
            durable_end: every sequence below it was durable, or written since the machine was started; likewise.

        Raises:
            StorageError: the directory is another partition's, a file cannot be opened, or a new log cannot be created.
        """
        place = LogPlace(directory, partition, next_sequence_min, durable_end)
        (log,) = cls.open_all(
            files, [place], segment_bytes=segment_bytes, cache=cache, report=report, created_ns=created_ns
        )
        return log

    @classmethod
    def open_all(
        cls,
        files: Files,
        places: Sequence[LogPlace],
        *,
        segment_bytes: int,
        cache: ReadCache,
        report: Callable[[Corruption], None],
        created_ns: int,
    ) -> list[PartitionLog]:
        """As :meth:`open`, of several logs: what they have to sync is synced together."""
        recoveries = []
        for place in places:
            first = place.next_sequence_min
            if not 0 < first <= SEQUENCE_MAX:
                raise ValueError(f"next_sequence_min is {first}; sequences go from 1 to {SEQUENCE_MAX}")
            home = Home(files, place.directory, place.partition, cache, report, is_replica=place.is_replica)
            recoveries.append(Recovery(home, place.log_id or created_ns, first, place.durable_end))
        recovered = recover(files, recoveries)
        logs = [cls(recovery.home, found, segment_bytes) for recovery, found in zip(recoveries, recovered, strict=True)]
        for log, place in zip(logs, places, strict=True):
            if place.committed_end is not None:
                log.committed_sequence = min(log.next_sequence, max(log.start_sequence, place.committed_end))
        return logs

    @property
    def start_sequence(self) -> int:
        """First sequence still stored; ``next_sequence`` when there is none."""
        return self._firsts[0]

    def told_gap(self) -> tuple[int, int]:
        """Sequences in front of the oldest segment that were missing when it was begun, the end exclusive.

        That was told of then; what is missing beyond that was dropped since, or has gone.
        """
        oldest = self._segments[0]
        header = decode_segment_header(oldest.read(0, SEGMENT_HEADER_BYTES)) if self.is_created else None
        return oldest.first if header is None else header.previous_end, oldest.first

    # appending

    def append(
        self,
        bodies: Sequence[bytes],
        timestamp_ns: int,
        due_ns: int = 0,
        stamps: Sequence[tuple[int, int]] | None = None,
        producer: tuple[bytes, int] | None = None,
    ) -> int:
        """Write one batch to the kernel; the sequence of its first message.

        Args:
            stamps: ``(timestamp_ns, attempts)`` of each message when they have a past; ``timestamp_ns`` is the latest.
            producer: as :func:`flintmq.batch.encode_batch` has it; the batch is then remembered, see producers.py.

        Raises:
            DiskFull: nothing was stored; it works again as soon as there is space.
            FileSizeLimit: nothing was stored, because files may not be as large as this batch.
            WriteFailed: nothing was stored, and the log takes no more appends.
            ValueError: no body, more than ``BATCH_COUNT_MAX``, or more bytes than ``BATCH_SIZE_MAX``.
        """
        if self.failed is not None:
            raise self._refusal(self.failed)
        first = self.next_sequence
        count = len(bodies)
        if not 0 < count <= BATCH_COUNT_MAX:
            raise ValueError(f"a batch holds 1 to {BATCH_COUNT_MAX} messages, not {count}")
        data = encode_batch(
            self._id_base | first,
            self.end_offset_bytes,
            timestamp_ns,
            bodies,
            synced_before=self.synced_sequence,
            due_ns=due_ns,
            epoch=self.epoch,
            layout=self.layout,
            producer=producer,
        )
        if stamps is not None:
            data = with_stamps(data, stamps)
        if len(data) > BATCH_SIZE_MAX:
            raise ValueError(
                f"a batch of {count} messages has {len(data)} bytes; at most {BATCH_SIZE_MAX} are stored at once"
            )
        self._write(data, first, count, timestamp_ns, producer)
        self._keep_in_tail(data, len(data) + _BATCH_OVERHEAD_BYTES)
        return first

    def append_batch(
        self,
        data: bytes | memoryview,
        after_gap: bool = False,
        header: BatchHeader | None = None,
        *,
        is_verified: bool = False,
    ) -> int:
        """Write one batch as another log of this partition has it, byte for byte; the sequence of its first message.

        What it says of that log's synced sequence is not true of this one.

        Args:
            after_gap: the other log has nothing between the end of this one and the batch: it lost that, told of it,
                and went on behind it. The batch begins a segment then, and what is missing is missing here as well.
            header: of the batch, where it was read already.
            is_verified: its CRC was made or checked just now.

        It is not kept in memory: who copies a log is hardly ever asked for what was written last.

        Raises:
            DiskFull, FileSizeLimit, WriteFailed: as for :meth:`append`.
            BatchError: the bytes are damaged, or not one batch.
            ValueError: it is of another partition, or does not follow what this log ends with.
        """
        if self.failed is not None:
            raise self._refusal(self.failed)
        if header is None:
            header = decode_header(data)
        if not is_verified:
            verify(data, header)
        if len(data) != header.size:
            raise BatchError(f"{len(data)} bytes, the batch has {header.size}")
        wanted = (self._id_base | self.next_sequence, self.end_offset_bytes)
        if (header.first_id, header.offset_bytes) != wanted:
            is_behind = header.first_id > wanted[0] and header.offset_bytes >= wanted[1]
            if not after_gap or not is_behind or header.first_id - self._id_base > SEQUENCE_MAX:
                raise self._does_not_follow(header, *wanted)
            self._skip_to(header.first_sequence, header.offset_bytes)
        first = self.next_sequence
        self._write(data, first, header.count, header.timestamp_max, producer_of(data))
        self._keep_nothing_in_tail()
        return first

    def append_batches(self, data: memoryview, headers: Sequence[BatchHeader]) -> None:
        """Write batches as :meth:`append_batch` does each, one after the other: with one write for each segment.

        Those before one that is refused are written.

        Args:
            data: the batches, with nothing between them and nothing behind.
            headers: of them, at least one.

        Raises:
            DiskFull, FileSizeLimit, WriteFailed: as for :meth:`append`; what went into the segments before stays.
            BatchError: the bytes of one are damaged.
            ValueError: one is of another partition, or does not follow.
        """
        if self.failed is not None:
            raise self._refusal(self.failed)
        position = 0
        refused: ValueError | None = None
        run: list[tuple[int, BatchHeader, int]] = []  # where each begins, and its frames
        next_id, offset_bytes = self._id_base | self.next_sequence, self.end_offset_bytes
        for header in headers:
            try:
                verify(data, header, position)
            except BatchError as error:
                refused = error
                break
            if (header.first_id, header.offset_bytes) != (next_id, offset_bytes):
                refused = self._does_not_follow(header, next_id, offset_bytes)
                break
            producer = producer_of(data, position)
            frames_at = _frames_at(data[position + FLAGS_POSITION], header.count, producer)
            run.append((position, header, frames_at))
            next_id += header.count
            offset_bytes += header.size - frames_at
            position += header.size
        self._write_run(data, run)
        if refused is not None:
            raise refused

    def _does_not_follow(self, header: BatchHeader, next_id: int, offset_bytes: int) -> ValueError:
        return ValueError(
            f"{self.directory}: a batch with id {header.first_id} at offset {header.offset_bytes} does not "
            f"follow: the log goes on with {next_id} at {offset_bytes}"
        )

    def _write_run(self, data: memoryview, run: Sequence[tuple[int, BatchHeader, int]]) -> None:
        """Add whole batches to the active segment and to new ones."""
        at = 0
        while at < len(run):
            begin, header, _ = run[at]
            active = self._room_for(header.size)
            end, stop = begin + header.size, at + 1
            while stop < len(run):
                size = run[stop][1].size
                if active.size + end + size - begin > self._segment_bytes:
                    break
                end, stop = end + size, stop + 1
            active = self._write_bytes(active, data[begin:end])
            position = active.size - begin
            for batch_at, header, frames_at in run[at:stop]:
                producer = producer_of(data, batch_at)
                self._written(
                    active, position + batch_at, header.size, header.count, header.timestamp_max, frames_at, producer
                )
            at = stop
        self._keep_nothing_in_tail()

    def _keep_nothing_in_tail(self) -> None:
        if self._tail:
            self._cache.tail_changed(self, -self._forget_tail(len(self._tail)))
        self._tail_first = self.next_sequence

    def _write(
        self, data: bytes | memoryview, first: int, count: int, timestamp_ns: int, producer: tuple[bytes, int] | None
    ) -> None:
        """Add a whole batch to the active segment, or to a new one.

        Args:
            timestamp_ns: of its latest message.
        """
        size = len(data)
        active = self._write_bytes(self._room_for(size), data)
        position = active.size
        frames_at = _frames_at(data[FLAGS_POSITION], count, producer)
        self._written(active, position, size, count, timestamp_ns, frames_at, producer)

    def _room_for(self, size: int) -> Segment:
        """Return the segment that a batch goes to, where the disk has room for it."""
        if self._space_credit < size:
            self._sample_space(size)
        active = self._active
        if active.size + size > self._segment_bytes and not active.is_empty:
            return self._roll()
        return active

    def _write_bytes(self, active: Segment, data: bytes | memoryview) -> Segment:
        """Return the segment that has them: the active one, or a new one where that file may not grow further."""
        size = len(data)
        if self._space_credit < size:
            self._sample_space(size)
        file = active.live_file
        assert file is not None, "the active segment is open"
        try:
            file.write_at(active.size, data)
        except OSError as error:
            failure = self._write_failed(active, error, size)
            if isinstance(failure, FileSizeLimit) and not active.is_empty:
                return self._write_bytes(self._roll(), data)
            raise failure from error
        self._space_credit -= size
        return active

    def _written(
        self,
        active: Segment,
        position: int,
        size: int,
        count: int,
        timestamp_ns: int,
        frames_at: int,
        producer: tuple[bytes, int] | None,
    ) -> None:
        """Take note of a batch that the active segment has at a position.

        Args:
            frames_at: bytes before its first frame.
        """
        first, index = self.next_sequence, active.live_index
        assert index is not None, "the index of the active segment is in memory"
        if position >= index.next_position:
            index.add(Entry(first, position, self.end_offset_bytes), active.timestamp_max)
        if timestamp_ns > active.timestamp_max:
            active.timestamp_max = timestamp_ns
        self.next_sequence = active.end = first + count
        active.size = position + size
        self.size_bytes += size
        if producer is not None:
            producer_id, producer_sequence = producer
            active.has_producers = True
            self.producers.appended(producer_id, producer_sequence, producer_sequence + count - 1, size)
        self.end_offset_bytes = active.end_offset_bytes = self.end_offset_bytes + size - frames_at

    def _sample_space(self, size: int) -> None:
        free = self._files.free_bytes()
        if free - size < DISK_RESERVE_BYTES:
            raise DiskFull(self._active.path, free, DISK_RESERVE_BYTES, size)
        # Other logs write to the same disk: look again after a little, not after all of what is free now.
        self._space_credit = size + min(SPACE_SAMPLE_BYTES, free - size - DISK_RESERVE_BYTES)

    @property
    def has_room(self) -> bool:
        """Whether the disk has room for what is appended at once."""
        return self.has_room_for(BATCH_SIZE_MAX)

    def has_room_for(self, size: int) -> bool:
        """Return whether the disk has room for so many bytes beside its reserve."""
        return self._files.free_bytes() >= DISK_RESERVE_BYTES + size

    def _write_failed(self, segment: Segment, error: OSError, size: int) -> StorageError:
        if error.errno in _OUT_OF_SPACE or error.errno == errno.EFBIG:
            try:
                # Unlike other errors these say that earlier bytes are fine; cut what arrived and stay usable.
                segment.file().truncate(segment.size)
            except OSError as cut_error:
                return self._fail(segment.path, f"{error}; and cannot cut it: {cut_error}")
            if error.errno == errno.EFBIG:
                return FileSizeLimit(segment.path)
            self._space_credit = 0
            return DiskFull(segment.path, self._files.free_bytes(), DISK_RESERVE_BYTES, size)
        return self._fail(segment.path, str(error))

    def _fail(self, path: str, reason: str) -> WriteFailed:
        self._set_failed(reason)
        return self._refusal(reason, path)

    def _set_failed(self, reason: str) -> None:
        if self.failed is None:
            self.failed = reason
            self.on_failed(self.directory, reason)

    def _refusal(self, reason: str, path: str = "") -> WriteFailed:
        """Return the error of what cannot be stored any more."""
        kind = WriteFailed if reason is _CLOSED else PartitionFailed
        return kind(path or self._active.path, reason)

    def roll(self) -> None:
        """Seal the active segment, so that retention can drop it; nothing happens when it is empty.

        Raises:
            DiskFull: it stays active.
            WriteFailed: the log takes no more appends.
        """
        if self.failed is not None:
            raise self._refusal(self.failed)
        if not self._active.is_empty:
            self._roll()

    def _skip_to(self, sequence: int, offset_bytes: int) -> None:
        """Go on behind a gap, with a segment that says where it begins. What is kept in memory has no gap."""
        self._cache.tail_dropped(self)
        self.drop_tail()
        if not self._active.is_empty:
            self._roll(sequence, offset_bytes)
            return
        empty, previous_end = self._active, self.next_sequence
        segment = Segment(self._home, sequence)
        self._is_directory_dirty = True
        try:
            segment.create(previous_end, offset_bytes, self.synced_sequence)
        except OSError as error:
            raise self._creation_failed(segment, error) from error
        try:
            empty.remove()
        except OSError as error:
            raise self._fail(empty.path, f"cannot remove it: {error}") from error
        self._segments[-1] = segment
        self._firsts[-1] = sequence
        self._go_on_with(segment)

    def _go_on_with(self, segment: Segment) -> None:
        self._active = self._new = segment
        self._checkpoint_position = segment.size
        self.next_sequence, self.end_offset_bytes = segment.end, segment.end_offset_bytes
        if not self._tail:
            self._tail_first = segment.first

    def _roll(self, first: int | None = None, offset_bytes: int | None = None) -> Segment:
        """Seal the active segment and begin the next one.

        Args:
            first, offset_bytes: where that begins, behind a gap; None: where this one ends.
        """
        sealed = self._active
        segment = Segment(self._home, self.next_sequence if first is None else first)
        self._is_directory_dirty = True
        try:
            segment.create(
                self.next_sequence,
                self.end_offset_bytes if offset_bytes is None else offset_bytes,
                self.synced_sequence,
            )
        except OSError as error:
            raise self._creation_failed(segment, error) from error
        index = sealed.live_index
        assert index is not None, "the active segment's index is in memory"
        sealed.write_index(index, self.synced_sequence)
        sealed.live_index = None
        if not self._is_being_synced(sealed):
            sealed.release_file()
        self._cache.put((self._home, sealed.first), index, index.size_bytes)
        self._unsynced.append(sealed)
        self._segments.append(segment)
        self._firsts.append(segment.first)
        self._go_on_with(segment)
        self.size_bytes += segment.size
        return segment

    def _creation_failed(self, segment: Segment, error: OSError) -> StorageError:
        try:
            segment.remove()
        except OSError as remove_error:
            return self._fail(segment.path, f"{error}; and cannot remove it: {remove_error}")
        if error.errno in _OUT_OF_SPACE:
            return DiskFull(segment.path, self._files.free_bytes(), DISK_RESERVE_BYTES)
        if error.errno == errno.EFBIG:
            return FileSizeLimit(segment.path)
        return self._fail(segment.path, str(error))

    def advance_committed(self, sequence: int) -> None:
        """Let everything below ``sequence`` be delivered; never goes back."""
        if sequence > self.committed_sequence:
            self.committed_sequence = min(sequence, self.next_sequence)

    # syncing

    def begin_sync(self) -> SyncTicket | None:
        """Fix what must be synced for everything appended so far to be durable.

        None when there is nothing to sync, and when syncing has failed before: durable is only what is below
        ``synced_sequence``. The caller runs the ticket in a worker thread, then calls :meth:`finish_sync` (I4).
        """
        assert self._ticket is None, "a sync is under way"
        if self._has_sync_failed or self._is_closed or not self.is_created or self._lent is not None:
            return None
        segments = [*self._unsynced]
        # an empty one as well whose name and header are all that will say how far the log was
        if self._new is self._active if self._active.is_empty else self.synced_sequence < self.next_sequence:
            segments.append(self._active)
        if not segments and not self._is_directory_dirty and not self.producers.is_snapshot_due:
            return None
        try:
            # Handles are kept for the newest; older ones, if a caller never synced, are opened by the ticket in turn.
            held = [segment.hold_file() for segment in segments[-SYNC_HANDLES_MAX:]]
        except OSError as error:
            self._has_sync_failed = True
            self._set_failed(f"cannot open a segment to sync it: {error}")
            return None
        directories = [self.directory, *self._unsynced_parents] if self._is_directory_dirty else []
        self._is_directory_dirty = False
        self._unsynced_parents = []
        snapshot = self.producers.begin_snapshot(self.log_id, self.next_sequence)
        self._ticket = SyncTicket(
            self._files, self.directory, directories, segments, held, self.next_sequence, snapshot
        )
        return self._ticket

    @property
    def is_syncing(self) -> bool:
        """Whether a sync is under way, see I4."""
        return self._ticket is not None

    def finish_sync(self, ticket: SyncTicket, error: BaseException | None) -> None:
        """Record what a ticket's :meth:`SyncTicket.run` did; an error makes the log read-only.

        A sync is not tried again after an error: the kernel may have dropped the pages and report success (R7).
        """
        assert ticket is self._ticket, "finish the sync that was begun"
        self._ticket = None
        if error is not None:
            self._has_sync_failed = True
            self._set_failed(f"sync failed: {error}")
        else:
            self.synced_sequence = max(self.synced_sequence, ticket.end_sequence)
        if ticket.snapshot is not None:
            self.producers.snapshot_ended(ticket.end_sequence, error or ticket.snapshot_error)
        synced = {segment: size for segment, size in ticket.segments if error is None}
        if self._new in synced:
            self._new = None
        self._unsynced = [segment for segment in self._unsynced if synced.get(segment) != segment.size]
        for segment, _size in ticket.segments:
            if segment is not self._active:
                segment.release_file()
        self._checkpoint()
        if self._is_closed:
            self._close_files()

    def _checkpoint(self) -> None:
        active = self._active
        if self.failed is not None or self.synced_sequence < self.next_sequence:
            return
        if active.size - self._checkpoint_position >= CHECKPOINT_BYTES:
            self.write_checkpoint()

    @property
    def has_checkpoint_due(self) -> bool:
        """Whether the next start would have to walk and sync what :meth:`write_checkpoint` can vouch for now."""
        return (
            self.failed is None
            and self.synced_sequence == self.next_sequence
            and self._active.size != self._checkpoint_position
            and not self._active.is_empty
        )

    def write_checkpoint(self) -> None:
        """Write down that everything in the active segment is good and durable; only when it is, and nothing syncs it.

        Of several logs this may be done at once, in threads.
        """
        index = self._active.live_index
        if index:
            self._active.write_index(index, self.synced_sequence)
            self._checkpoint_position = self._active.size

    # reading

    def read(self, sequence: int) -> Batch | None:
        """The batch that contains ``sequence``, or the next one when it is not stored; None at ``next_sequence``.

        Small batches that come from disk may be joined, see read_ahead.py. Damaged ones are reported, set aside and
        skipped.

        Raises:
            StorageError: a file cannot be opened for a reason that says nothing about its content; or it would step
                over what another replica has, see ``lost_from``.
        """
        if sequence >= self._tail_first:
            number = bisect_right(self._tail_ends, sequence)
            return self._tail_batch(number) if number < len(self._tail) else None
        chunk = self._chunk(sequence)
        if chunk is None:
            return self._tail_batch(0) if self._tail else None
        return chunk.batches[bisect_right(chunk.ends, sequence)]

    def _tail_batch(self, number: int) -> Batch:
        entry = self._tail[number]
        if entry.__class__ is bytes:
            # nobody needed it as a batch so far
            entry = self._tail[number] = Batch(entry, decode_header(entry))
        return entry  # type: ignore[return-value]  # mypy cannot see that it is no longer bytes

    def _keep_in_tail(self, data: bytes, size: int) -> None:
        self._tail.append(data)
        self._tail_ends.append(self.next_sequence)
        self._tail_bytes += size
        if self._tail_bytes > TAIL_CACHE_BYTES:
            size -= self._trim_tail()
        self._cache.tail_changed(self, size)

    def _trim_tail(self) -> int:
        """Forget the oldest batches, an eighth of the bound at once so that it is rare; how many bytes that freed."""
        tail = self._tail
        wanted = self._tail_bytes - TAIL_CACHE_BYTES * 7 // 8
        freed = count = 0
        while freed < wanted and count < len(tail) - 1:
            freed += len(_bytes_of(tail[count])) + _BATCH_OVERHEAD_BYTES
            count += 1
        return self._forget_tail(count)

    def _forget_tail(self, count: int) -> int:
        """Forget the oldest ``count`` batches; how many bytes that freed."""
        if not count:
            return 0
        freed = sum(len(_bytes_of(entry)) for entry in self._tail[:count]) + count * _BATCH_OVERHEAD_BYTES
        self._tail_first = self._tail_ends[count - 1]
        del self._tail[:count]
        del self._tail_ends[:count]
        self._tail_bytes -= freed
        return freed

    def drop_tail(self) -> None:
        """Forget the batches kept in memory; for the shared bound of :class:`ReadCache`."""
        self._tail.clear()
        self._tail_ends.clear()
        self._tail_first = self.next_sequence
        self._tail_bytes = 0

    def _chunk(self, sequence: int) -> _Chunk | None:
        firsts = self._chunk_firsts
        number = bisect_right(firsts, sequence)
        size = _LONE_READ_BYTES  # one of many messages that are read in no order, unless it is the next
        if number:
            chunk = self._chunks[firsts[number - 1]]
            if sequence == chunk.end:
                size = READ_AHEAD_BYTES
            if sequence < chunk.end:
                self._cache.get((self._home, "chunk", chunk.first))
                return chunk
        following = self._chunks[firsts[number]] if number < len(firsts) else None
        stop = self._tail_first if following is None else min(self._tail_first, following.first)
        batches = self._read_ahead(sequence, size, stop)
        if not batches:
            return following
        first = min(sequence, batches[0].first)
        chunk = _Chunk(first, batches)
        size = sum(batch.size for batch in batches) + len(batches) * _BATCH_OVERHEAD_BYTES
        self._cache.put((self._home, "chunk", first), chunk, size, lambda: self._forget_chunk(first))
        insort(firsts, first)
        self._chunks[first] = chunk
        return chunk

    def _forget_chunk(self, first: int) -> None:
        del self._chunks[first]
        del self._chunk_firsts[bisect_left(self._chunk_firsts, first)]

    def _read_ahead(self, sequence: int, size: int, stop: int) -> list[Batch]:
        found = self._next_run(sequence, size, stop)
        if found is None:
            return []
        data, run, _position = found
        skipped = bisect_right(run.first_ids, self._id_base | sequence)
        batches = decode_run(data, [*run.positions[max(skipped - 1, 0) :], run.position])
        return batches if self._expected is None else self._fitting(batches, self._expected)

    def expect_layout(self, layout: int) -> None:
        """Return no batch from now on that is laid out as no message of the topic can be: :meth:`read` fails at it.

        Args:
            layout: RAW_IDS: all have such ids, without it none has; EXTENDED: some may have headers, else none has.
        """
        if layout != self._expected:
            self._expected = layout
            self._forget_chunks()

    def _fitting(self, batches: list[Batch], layout: int) -> list[Batch]:
        """Return the batches before the first one that does not fit."""
        for number, batch in enumerate(batches):
            flags = batch.header.flags
            if (flags ^ layout) & RAW_IDS or flags & EXTENDED & ~layout:
                if number:
                    return batches[:number]
                raise self._misfit(batch.first, flags, layout)
        return batches

    def _misfit(self, sequence: int, flags: int, layout: int) -> StorageError:
        if (flags ^ layout) & RAW_IDS:
            kinds = ("a plain topic", "a topic with partitions")
            theirs, ours = kinds[bool(flags & RAW_IDS)], kinds[bool(layout & RAW_IDS)]
        else:
            theirs, ours = "a topic with headers", "one without"
        return StorageError(
            f"{self.directory}: messages from sequence {sequence} on are those of {theirs}, and here the topic is "
            f"{ours}: they are kept, and not delivered. To read them, stop this nsqd, move the directory to the same "
            "place in a data directory that is empty, and start an nsqd with that; it finds out what the topic is"
        )

    def _next_run(self, sequence: int, size: int, stop: int) -> Found | None:
        """The next good batches at or after ``sequence``, in any segment; none that starts at or beyond ``stop``."""
        number = max(bisect_right(self._firsts, sequence) - 1, 0)
        while number < len(self._segments) and self._firsts[number] < stop:
            segment = self._segments[number]
            wanted = max(sequence, segment.first)
            if wanted < segment.end:
                found = segment.next_run(wanted, size, min(stop, segment.end))
                if found is not None:
                    if found.run.first_ids[0] > self._id_base | sequence:
                        self._refuse_hole(sequence)
                    return found
            number += 1
        if sequence < stop:
            self._refuse_hole(sequence)
        return None

    def _refuse_hole(self, sequence: int) -> None:
        if sequence >= self.lost_from:
            raise StorageError(
                f"{self.directory}: messages from {sequence} on are damaged or missing here: another replica has them"
            )

    def hold_from(self, sequence: int) -> None:
        """Set ``lost_from``; what was read before is read anew."""
        self.lost_from = sequence
        self._forget_chunks()

    def fetch(self, start: int, end: int, bytes_max: int) -> tuple[bytes, int]:
        """Batches as they are stored that overlap ``start`` to ``end``, and the sequence to ask for next.

        Whole verified batches, at most about ``bytes_max``, at least one; only committed ones. Empty bytes with a next
        sequence beyond ``start`` mean that nothing is stored between the two.

        Raises:
            StorageError: see :meth:`read`.
        """
        return self._fetch(start, end, bytes_max, self.committed_sequence)

    def fetch_unverified(self, start: int, end: int, bytes_max: int) -> tuple[bytes | memoryview, int]:
        """As :meth:`fetch`, for who verifies the batches: their CRC is not looked at here.

        What looks wrong is verified nevertheless, so that damage is set aside and told of.

        Raises:
            StorageError: see :meth:`read`.
        """
        stop = self.committed_sequence
        end = min(end, stop)
        if start < min(end, self._tail_first):
            segment = self._segments[max(bisect_right(self._firsts, start) - 1, 0)]
            if segment.first <= start < segment.end:
                found = segment.unverified(start, end, min(bytes_max, BATCH_SIZE_MAX), min(stop, segment.end))
                if found is not None:
                    return found
        return self._fetch(start, end, bytes_max, stop)

    def fetch_stored(self, start: int, bytes_max: int) -> tuple[bytes, int]:
        """As :meth:`fetch`, up to the end of what is stored, committed or not; for replicas alone."""
        return self._fetch(start, self.next_sequence, bytes_max, self.next_sequence)

    def _fetch(self, start: int, end: int, bytes_max: int, stop: int) -> tuple[bytes, int]:
        end = min(end, stop)
        if start >= end:
            return b"", start
        if start >= self._tail_first:
            return self._fetch_tail(start, end, bytes_max, stop)
        found = self._next_run(start, min(bytes_max, BATCH_SIZE_MAX), end)
        if found is None:
            return b"", end
        data, run, _position = found
        ids, positions = run.first_ids, [*run.positions, run.position]
        first = max(bisect_right(ids, self._id_base | start) - 1, 0)
        last = bisect_right(positions, positions[first] + bytes_max) - 1
        last = min(max(last, first + 1), len(ids))
        next_id = ids[last] if last < len(ids) else run.next_id
        if next_id > self._id_base | stop:
            last -= 1
            next_id = ids[last]
        return data[positions[first] : positions[last]], max(start, next_id & SEQUENCE_MAX)

    def _fetch_tail(self, start: int, end: int, bytes_max: int, stop: int) -> tuple[bytes, int]:
        number = bisect_right(self._tail_ends, start)
        ends = self._tail_ends
        parts: list[bytes | memoryview] = []
        size = 0
        while number < len(ends) and start < end and ends[number] <= stop:
            data = _bytes_of(self._tail[number])
            if parts and size + len(data) > bytes_max:
                break
            parts.append(data)
            size += len(data)
            start = ends[number]
            number += 1
        return b"".join(parts), start

    @property
    def timestamp_max(self) -> int:
        """The latest timestamp of the messages that are stored, in ns, 0 when there is none; where the clock was set
        back, that is not the one of the last message.
        """
        return max((segment.timestamp_max for segment in self._segments), default=0)

    def sequence_at(self, timestamp_ns: int) -> int:
        """The first sequence with a timestamp of at least ``timestamp_ns``; ``next_sequence`` when there is none."""
        for segment in self._segments:
            if segment.timestamp_max < timestamp_ns or segment.is_empty:
                continue
            runs = segment.runs_from(lambda index: index.before_timestamp(timestamp_ns), READ_AHEAD_BYTES)
            for data, run, _position in runs:
                for number, latest in enumerate(run.timestamps):
                    if latest >= timestamp_ns:
                        return _first_at(decode_batch(data, run.positions[number]), timestamp_ns)
        return self.next_sequence

    def sequence_at_offset(self, offset_bytes: int) -> int:
        """The sequence of the message whose frame contains a virtual offset, or the first one behind it."""
        for segment in self._segments:
            if segment.end_offset_bytes <= offset_bytes or segment.is_empty:
                continue
            runs = segment.runs_from(lambda index: index.before_offset(offset_bytes), READ_AHEAD_BYTES)
            for data, run, _position in runs:
                for position in run.positions:
                    batch = decode_batch(data, position)
                    into = offset_bytes - batch.header.offset_bytes
                    if into < batch.positions()[-1]:
                        return batch.first + max(bisect_right(batch.positions(), into) - 1, 0)
        return self.next_sequence

    # retention

    def segments(self) -> list[SegmentInfo]:
        """All segments, oldest first; the last one is active."""
        return [
            SegmentInfo(segment.first, segment.end, segment.size, segment.timestamp_max, segment is not self._active)
            for segment in self._segments
        ]

    def bytes_below(self, sequence: int) -> int:
        """Bytes of the files below the batch of a sequence, as far as the index of its segment is fine enough, which
        whoever reads there has in memory. It does not become less because more is appended.
        """
        count = 0
        for segment in self._segments:
            if segment.end <= sequence:
                count += segment.size
            elif segment.first < sequence:
                try:
                    entry = segment.index().before_sequence(sequence)
                except (StorageError, OSError):  # it cannot be read, which its readers tell of
                    continue
                count += 0 if entry is None else entry.position
        return count

    def drop_before(self, sequence: int) -> int:
        """Delete sealed segments that lie entirely below ``sequence``; the bytes that freed.

        The deletion is durable after the next sync; until then a power loss may bring segments back.

        A segment that says who published something stays until the next sync has written that down; so does the last
        one in front of an empty active segment, until that is durable.

        Raises:
            WriteFailed: a file cannot be deleted; appends go on.
        """
        freed = 0
        while len(self._segments) > 1 and self._segments[0].end <= sequence:
            segment = self._segments[0]
            if self._is_being_synced(segment) or self.producers.needs(segment):
                break
            if len(self._segments) == 2 and self._active.is_empty and self._new is self._active:
                break  # a power loss could take the new one's header, which would be all that is left
            self._is_directory_dirty = True
            self._forget_before(segment.end)
            try:
                segment.remove()
            except OSError as error:
                raise WriteFailed(segment.path, f"cannot delete it: {error}") from error
            if segment in self._unsynced:
                self._unsynced.remove(segment)
            del self._segments[0], self._firsts[0]
            freed += segment.size
            self.size_bytes -= segment.size
        return freed

    def _is_being_synced(self, segment: Segment) -> bool:
        return self._ticket is not None and any(each is segment for each, _ in self._ticket.segments)

    def _forget_before(self, sequence: int) -> None:
        for first in self._chunk_firsts[: bisect_left(self._chunk_firsts, sequence)]:
            self._cache.discard((self._home, "chunk", first))
        count = bisect_right(self._tail_ends, sequence)
        if count:
            self._cache.tail_changed(self, -self._forget_tail(count))

    # cutting back

    def cut_back_to(self, sequence: int) -> None:
        """Let the log end before ``sequence``: what it has from there on is gone, and is not used for anything. Blocks.

        What was told of the newest messages elsewhere, such as how far the log was, is to be taken back, durably,
        before: the next start would take what is missing for lost. A crash leaves the log as it was or as it is to be.

        Args:
            sequence: first of one of its batches, or the end of one behind which others are missing, not below
                ``committed_sequence``; or ``next_sequence``, which does nothing.

        Raises:
            CutsCommitted: it is below what is committed.
            ValueError: no batch begins there.
            WriteFailed: a step failed. If it was one behind the first that counts, the log takes no more appends, and
                the next start leaves it as it was or finishes.
            StorageError: it cannot be read now; nothing has changed.
        """
        assert self._ticket is None, "no sync is under way"
        cut = self.check_cut(sequence)
        if cut is None:
            return
        committed = self.committed_sequence
        try:
            self._sync_now()
            self._save_producers_before(sequence)
        except OSError as error:
            raise WriteFailed(self._active.path, f"cannot cut the log back: {error}") from error
        try:
            write_cut(self._files, self.directory, cut)
            self._forget_all()
            self._close_files()
            (recovered,) = recover(self._files, [Recovery(self._home, self.log_id, sequence)])
        except (OSError, StorageError) as error:
            reason = f"cannot finish cutting the log back to {sequence}: {error}"
            raise self._fail(self._active.path, reason) from error
        self._adopt(recovered)
        self._table_before_cut = None
        self.committed_sequence = committed
        self._unsynced = []
        self._is_directory_dirty = False

    def start_over(self, sequence: int, offset_bytes: int) -> None:
        """Let go of all that is stored: the log is empty and begins with ``sequence``. Blocks.

        What was told of it elsewhere, such as how far it was, is to be taken back before, as for :meth:`cut_back_to`.
        A crash leaves the log as it was or as it is to be.

        Args:
            sequence: of the next message; everything before counts as committed elsewhere.
            offset_bytes: virtual position of its frame.

        Raises:
            ValueError: there is no such sequence, or no such position.
            WriteFailed: a step failed. If it was one behind the first that counts, the log takes no more appends, and
                the next start leaves it as it was or finishes.
        """
        assert self._ticket is None, "no sync is under way"
        if self.failed is not None:
            raise self._refusal(self.failed)
        if not 0 < sequence <= SEQUENCE_MAX or offset_bytes < 0:
            raise ValueError(f"{self.directory}: no log begins with {sequence} at offset {offset_bytes}")
        try:
            write_cut(self._files, self.directory, Cut(self.log_id, sequence, SEGMENT_HEADER_BYTES, offset_bytes))
            self._forget_all()
            self._close_files()
            (recovered,) = recover(self._files, [Recovery(self._home, self.log_id, sequence)])
        except (OSError, StorageError) as error:
            reason = f"cannot finish starting the log over at {sequence}: {error}"
            raise self._fail(self._active.path, reason) from error
        self._adopt(recovered)
        self._unsynced = []
        self._is_directory_dirty = False

    def lend(self) -> None:
        """Let a worker thread call :meth:`cut_back_to` or :meth:`start_over`; nothing else before :meth:`take_back`."""
        assert self._ticket is None and self._lent is None, "no sync is under way, and nobody else has it"
        self._forget_all()
        self._close_sealed()
        self._lent = _Lent(self._cache, self._home.report, [])
        self._cache = self._home.cache = ReadCache()
        self._home.report = self._lent.reports.append

    def take_back(self) -> None:
        """Go on with a log behind :meth:`lend`; what was reported meanwhile is reported."""
        lent, self._lent = self._lent, None
        assert lent is not None, "it was lent"
        self._forget_all()
        self._close_sealed()
        self._cache = self._home.cache = lent.cache
        self._home.report = lent.report
        for each in lent.reports:
            lent.report(each)

    def _close_sealed(self) -> None:
        for segment in self._segments:
            if segment.live_file is None:
                segment.close()

    def begin_cut(self, sequence: int) -> bool:
        """Let producers publish again what :meth:`cut_back_to` will cut off; nothing may be appended before it does.

        Returns:
            False when there is nothing to be cut.

        Raises:
            CutsCommitted, ValueError, WriteFailed, StorageError: as :meth:`cut_back_to`, which would do nothing.
        """
        if self.check_cut(sequence) is None:
            return False
        self._table_before_cut = self.producers.table
        self.producers.table = table_before(self.producers.table, self._segments, sequence)
        return True

    def abandon_cut(self) -> None:
        """Go back behind :meth:`begin_cut`."""
        if self._table_before_cut is not None:
            self.producers.table, self._table_before_cut = self._table_before_cut, None

    def check_cut(self, sequence: int) -> Cut | None:
        """Find where :meth:`cut_back_to` would cut; None: nowhere, it ends there.

        Raises:
            ValueError, WriteFailed, StorageError: as :meth:`cut_back_to`, which would do nothing.
        """
        if self.failed is not None:
            raise self._refusal(self.failed)
        if sequence < self.committed_sequence:
            raise CutsCommitted(
                f"{self.directory}: cannot be cut back to {sequence}: it is committed up to {self.committed_sequence}"
            )
        if sequence == self.next_sequence:
            return None
        number = bisect_right(self._firsts, sequence) - 1
        segment = self._segments[number] if number >= 0 else self._active
        is_within = number >= 0 and sequence < segment.end
        if number >= 0 and sequence == segment.first:
            return Cut(self.log_id, segment.first, SEGMENT_HEADER_BYTES)
        found = segment.next_run(sequence, READ_AHEAD_BYTES, NO_STOP) if is_within else None
        wanted = self._id_base | sequence
        if found is not None and wanted in found.run.first_ids:
            position = found.run.positions[found.run.first_ids.index(wanted)]
            return Cut(self.log_id, segment.first, found.position + position)
        # what began there is damaged or missing: behind the batch that ends there
        found = segment.next_run(sequence - 1, READ_AHEAD_BYTES, NO_STOP) if number >= 0 else None
        ends = [] if found is None else [*found.run.first_ids[1:], found.run.next_id]
        if found is None or wanted not in ends:
            raise ValueError(f"{self.directory}: cannot be cut back to {sequence}: no batch begins there")
        position = [*found.run.positions[1:], found.run.position][ends.index(wanted)]
        return Cut(self.log_id, segment.first, found.position + position)

    def uncommit(self, sequence: int) -> None:
        """Let :meth:`cut_back_to` go as far back as ``sequence``: what is behind it is on another replica."""
        self.committed_sequence = min(self.committed_sequence, sequence)

    def _sync_now(self) -> None:
        ticket = self.begin_sync()
        if ticket is not None:
            (error,) = run_tickets([ticket])
            self.finish_sync(ticket, error)
            if error is not None:
                raise error

    def _save_producers_before(self, sequence: int) -> None:
        """Have the snapshot know of nothing behind ``sequence``; with what is stored there it says the same as now."""
        producers = self.producers
        if len(producers.table) or producers.saved_sequence > sequence:
            table = table_before(producers.table, self._segments, sequence)
            write_snapshot(self._files, self.directory, encode_snapshot(self.log_id, sequence, table))

    def _forget_all(self) -> None:
        """Forget what is kept in memory of what is stored."""
        self._forget_chunks()
        self._cache.tail_dropped(self)
        self.drop_tail()

    def _forget_chunks(self) -> None:
        for first in [*self._chunk_firsts]:
            self._cache.discard((self._home, "chunk", first))

    # the end

    def close(self) -> None:
        """Release the files without syncing; a sync under way keeps its handles until it is finished."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.has_checkpoint_due:
            self.write_checkpoint()
        self._forget_all()
        if self._ticket is None:
            self._close_files()
        if self.failed is None:
            self.failed = _CLOSED

    def _close_files(self) -> None:
        for segment in self._segments:
            segment.close()

    def delete(self) -> None:
        """Close the log and remove its directory.

        Raises:
            OSError: some of it may be left.
        """
        self.close()
        if self._ticket is not None:
            self._ticket.is_abandoned = True
        self._files.remove_directory(self.directory)

    def describe(self) -> str:
        """One line for people."""
        state = f"failed: {self.failed}" if self.failed else "ok"
        return (
            f"PartitionLog({self.directory}, partition {self.partition}, log {self.log_id}, "
            f"sequences {self.start_sequence}..{self.next_sequence} synced {self.synced_sequence} "
            f"committed {self.committed_sequence}, {len(self._segments)} segments, {self.size_bytes} bytes, "
            f"tail {len(self._tail)} batches, {len(self._chunks)} chunks, {state})"
        )


def _bytes_of(entry: bytes | Batch) -> bytes | memoryview:
    return entry if isinstance(entry, bytes) else entry.data


def _first_at(batch: Batch, timestamp_ns: int) -> int:
    header = batch.header
    if header.timestamp_min >= timestamp_ns:
        return batch.first
    positions = batch.positions()
    for number in range(header.count):
        (timestamp,) = _TIMESTAMP.unpack_from(batch.data, batch.frames_at + positions[number] + _TIMESTAMP_POSITION)
        if timestamp >= timestamp_ns:
            return batch.first + number
    return batch.end
