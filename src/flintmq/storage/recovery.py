"""Opening a partition log: which segments there are, what they hold, where it ends.

What is done, in this order:

1. the identity: ``log.meta``, else any segment header, else the caller's; then a cut that had begun is finished, see
   cut.py;
2. sealed segments are believed by the header of their index when the file has the size it names, else walked;
3. the last segment is walked from its checkpoint, or from its start, and its torn tail cut;
4. those of the last sealed segments that were not known to be durable are walked after all; a replica ends at the
   first hole behind what is;
5. missing sequences are told;
6. what may be only in the page cache is synced, of all logs together, so that everything recovered can be called
   committed;
7. who published what is read from the snapshot and from what is stored behind it, see producers.py.

A *checkpoint* is the index file of the active segment; it is believed only when everything it covers was durable when
it was written. Rules of this file: bytes that are damaged, unreadable or missing never prevent opening, they are
reported; a file that cannot be opened for another reason (rights, handles) does. Only the torn tail is cut.

Byte picture of ``log.meta`` (big-endian)::

    0      4        6         8          12      20    24
    +------+--------+---------+----------+-------+-----+
    | FMQM | version| reserved| partition| log_id| crc |
    +------+--------+---------+----------+-------+-----+

Source: docs/decisions/0001, docs/decisions/0002.
"""

from __future__ import annotations

import errno
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from struct import Struct

from flintmq.batch import HEADER_BYTES
from flintmq.checksum import crc32
from flintmq.errors import DiskFull, StorageError, WriteFailed
from flintmq.limits import CHECKPOINT_BYTES, DISK_RESERVE_BYTES, PAGE_BYTES, REWRITE_BYTES_MAX, SEQUENCE_MAX
from flintmq.storage.cut import CUT_NAME, finish_cut
from flintmq.storage.files import File, Files
from flintmq.storage.group_sync import sync_together
from flintmq.storage.index import IndexSummary, SparseIndex
from flintmq.storage.producers import SNAPSHOT_NAME, ProducerMemory, ProducerTable, load, restore
from flintmq.storage.scan import why_not
from flintmq.storage.segment import (
    BAD_SUFFIX,
    INDEX_SUFFIX,
    META_NAME,
    NO_STOP,
    SEGMENT_HEADER_BYTES,
    Corruption,
    Home,
    Segment,
    SegmentHeader,
    Walker,
    decode_segment_header,
)

FOREIGN_SUFFIX = ".foreign"  # a segment of another log found here; never touched again
UNREADABLE_SUFFIX = ".unreadable"  # a segment of which the disk has lost all that can be told; never touched again
_META_MAGIC = b"FMQM"
_META_VERSION = 1
_META = Struct(">4sHHIQ")
_CRC = Struct(">I")
_SEGMENT_NAME = re.compile(r"([0-9]{20})\.log")
_FIRST_SEGMENT_NAME = f"{1:020d}.log"
_OWNED_NAME = re.compile(r"([0-9]{20})(?:\.index|\.log\.[0-9]+\.bad)")
_DOUBTFUL_SEGMENTS_MAX = 2  # sealed, but perhaps not synced at a power loss; with --durability=fsync there are no more
_PIECE_BYTES = 1024 * 1024
assert _META.size + _CRC.size == 24


@dataclass(slots=True)
class Recovered:
    """The log as opening found it.

    Attributes:
        segments: at least one; the last is the active one.
        failed: why the log takes no appends; None when it does.
        producers: who has published to it.
        checkpoint_size: how much of the active segment its checkpoint covers, in bytes; 0 when there is none.
    """

    segments: list[Segment]
    failed: str | None
    producers: ProducerMemory = field(default_factory=ProducerMemory)
    checkpoint_size: int = 0


def recover(files: Files, recoveries: Sequence[Recovery]) -> list[Recovered]:
    """Sync what was found, of several logs together, and tell what it is. Blocks."""
    unsynced = [recovery for recovery in recoveries if recovery.begin_sync()]
    for recovery, error in zip(unsynced, sync_together(files, unsynced), strict=True):
        recovery.sync_ended(error)
    return [recovery.finish() for recovery in recoveries]


def begin(home: Home) -> Segment | None:
    """Write the files of a log that is new, without syncing anything; None when there is something in its directory.

    Raises:
        OSError: nothing is known about the files.
    """
    files = home.files
    if files.list(home.directory):
        return None
    files.make_directory(home.directory, durable=False)
    meta = _write_meta(home)
    try:
        meta.write_out()
    finally:
        meta.close()
    segment = Segment(home, 1)
    try:
        segment.create(1, 0, 0)
        segment.file().write_out()
    except OSError:
        segment.close()
        raise
    return segment


def is_made_empty(files: Files, path: str) -> bool:
    """Whether a file is as :func:`begin` makes it, whole or in part: no batch was ever in it.

    Raises:
        OSError: it cannot be read.
    """
    name = path.rpartition("/")[2]
    if name == META_NAME:
        return True
    if name != _FIRST_SEGMENT_NAME:
        return False
    file = files.open(path)
    try:
        return file.size() <= SEGMENT_HEADER_BYTES
    finally:
        file.close()


def sync_begun(home: Home, segment: Segment) -> None:
    """Sync what :func:`begin` has written; its directory and :func:`parents_of` that are left to the caller.

    Raises:
        OSError: nothing is known about what is durable.
    """
    segment.file().sync()
    meta = home.files.open(f"{home.directory}/{META_NAME}")
    try:
        meta.sync()
    finally:
        meta.close()


def parents_of(path: str) -> list[str]:
    """The directories above a path, the data directory itself last."""
    parents = []
    while path:
        path = path.rpartition("/")[0]
        parents.append(path)
    return parents


def storage_error(path: str, error: OSError, free_bytes: int) -> StorageError:
    """Say what a failed write or creation means to a publisher."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(path, free_bytes, DISK_RESERVE_BYTES)
    return WriteFailed(path, error.strerror or str(error))


class _Hole(Exception):
    """A replica has a hole where it is not known to be whole.

    Args:
        first: of the segment in which it is, or behind which.
    """

    def __init__(self, first: int) -> None:
        super().__init__(first)
        self.first = first


class Recovery:
    """The log in ``home.directory`` as far as it can be opened before anything is synced; see :func:`recover`.

    Args:
        created_ns: identity of the log if it is a new one.
        next_sequence_min: the next append gets at least this sequence.
        durable_end: every sequence below it cannot have been lost but by damage.

    Attributes:
        directories: to be synced, after :meth:`begin_sync`.

    Raises:
        StorageError: the directory is another partition's, a file cannot be opened, or a new log cannot be created.
    """

    def __init__(self, home: Home, created_ns: int, next_sequence_min: int, durable_end: int = 1) -> None:
        self.home = home
        self.files = home.files
        self.segments: list[Segment] = []
        self.failed: str | None = None
        self.directories: list[str] = []
        self._unsynced_paths: list[str] = []
        self._checkpoint_size = 0
        names = self.files.list(home.directory)
        if not names:
            self.files.make_directory(home.directory)
        self._look(names)
        self._directory_changed = False
        self._is_clean = False
        self._is_name_durable = False
        self._walked: dict[int, Segment] = {}
        self._is_checkpoint_due = False
        self._durable_end = durable_end
        self._identify(created_ns)
        if CUT_NAME in names:
            self._finish_cut(names)
        self._saved_sequence, self._table = load(home) if self._has_snapshot else (0, ProducerTable())
        if home.is_replica:
            home.whole_until = durable_end
        self._open_all()
        home.whole_until = NO_STOP
        self._tell_gaps()
        # below the snapshot no sequence is used again: what is stored there is not read for it
        self._continue_at(max(next_sequence_min, self._saved_sequence))
        self._sweep()

    def finish(self) -> Recovered:
        """Return what was found; to be called last."""
        producers = restore(self.segments, self._saved_sequence, self._table)
        return Recovered(self.segments, self.failed, producers, self._checkpoint_size)

    def _look(self, names: Sequence[str]) -> None:
        self._has_snapshot = SNAPSHOT_NAME in names
        firsts = [int(match[1]) for name in names if (match := _SEGMENT_NAME.fullmatch(name))]
        self._firsts = [first for first in firsts if 0 < first <= SEQUENCE_MAX]
        self._owned = [name for name in names if _OWNED_NAME.fullmatch(name)]
        self._bad_paths: dict[int, list[str]] = {}
        for name in self._owned:
            if name.endswith(BAD_SUFFIX):
                self._bad_paths.setdefault(_first_in(name), []).append(f"{self.home.directory}/{name}")

    def _finish_cut(self, names: Sequence[str]) -> None:
        home = self.home
        try:
            finish_cut(home, names)
        except OSError as error:
            raise StorageError(f"{home.directory}: cannot finish cutting the log back: {error}") from error
        self._look(self.files.list(home.directory))

    # 1 identity

    def _identify(self, created_ns: int) -> None:
        home = self.home
        path = f"{home.directory}/{META_NAME}"
        meta = self._read_meta(path)
        if meta is not None:
            partition, home.log_id = meta
            if partition != home.partition:
                raise StorageError(f"{path} belongs to partition {partition}, not {home.partition}; move the directory")
            return
        headers = [header for first in self._firsts if (header := self._header(Segment(home, first))) is not None]
        ids = Counter(header.log_id for header in headers if header.partition == home.partition)
        home.log_id = ids.most_common(1)[0][0] if ids else created_ns
        try:
            self._directory_changed = True
            file = _write_meta(home)
            try:
                file.sync()
            finally:
                file.close()
        except OSError as error:
            if not self._firsts:
                raise storage_error(path, error, self.files.free_bytes()) from error
            self.failed = str(WriteFailed(path, str(error)))
        if self._firsts:
            reason = "missing or damaged; written again from the segment headers"
            self.home.report(Corruption(path, 0, 0, reason, 0, 0, "header"))

    def _read_meta(self, path: str) -> tuple[int, int] | None:
        try:
            file = self.files.open(path)
        except FileNotFoundError:
            return None
        try:
            data = file.read_at(0, _META.size + _CRC.size)
        except OSError:
            return None  # as good as damaged: the segment headers say the same
        finally:
            file.close()
        if len(data) < _META.size + _CRC.size or _CRC.unpack_from(data, _META.size)[0] != crc32(data[: _META.size]):
            return None
        magic, version, reserved, partition, log_id = _META.unpack_from(data)
        if magic != _META_MAGIC or version != _META_VERSION or reserved:
            raise StorageError(f"{path}: version {version}; this release reads version {_META_VERSION}")
        return partition, log_id

    # 2, 3, 4 segments

    def _open_all(self) -> None:
        while True:
            try:
                self._open_segments()
                self._verify_doubtful()
                self._look_for_holes()
                return
            except _Hole as hole:
                self._drop_behind(hole.first)

    def _look_for_holes(self) -> None:
        """Find a segment of a replica behind which one is missing."""
        for segment, following in pairwise(self.segments):
            if self.home.whole_until <= segment.end < min(following.first, self._expected_end(following.first)):
                raise _Hole(segment.first)

    def _drop_behind(self, first: int) -> None:
        """Remove the segments behind one that has a hole: a replica gets all of it again."""
        for segment in self.segments:
            segment.close()
        for each in reversed(self._firsts):
            segment = self._new_segment(each)
            if each > first:
                segment.remove()
            else:
                segment.close()
        self._directory_changed = True
        self.segments, self._walked = [], {}
        self._look(self.files.list(self.home.directory))

    def _open_segments(self) -> None:
        for first, following in pairwise(self._firsts):
            segment = self._open_sealed(first, following)
            if segment is not None:
                self.segments.append(segment)
        active = self._open_last(self._firsts[-1]) if self._firsts else None
        self._learn_from_orphans()
        if active is None:
            active = self._begin_after_last()
        if active is not None:
            self.segments.append(active)

    def _learn_from_orphans(self) -> None:
        """Tell of segments whose index is there but whose file is gone; retention deletes the index first."""
        firsts = dict.fromkeys(self._firsts)
        oldest, newest = min(firsts, default=0), max(firsts, default=0)
        for name in self._owned:
            first = _first_in(name)
            if not name.endswith(INDEX_SUFFIX) or first in firsts or oldest < first < newest:
                continue
            segment = Segment(self.home, first)
            summary = segment.load_summary()
            if first > newest:
                self._remember_end(segment)
            elif summary is not None:
                self._tell_gap(segment, first, min(summary.end, oldest), "the file is gone, its index is there")

    def _new_segment(self, first: int) -> Segment:
        segment = Segment(self.home, first)
        segment.bad_paths = self._bad_paths.get(first, [])
        return segment

    def _open_sealed(self, first: int, following: int) -> Segment | None:
        segment = self._new_segment(first)
        file_size = self._file_size(segment)
        if file_size is None:
            return None
        summary = segment.load_summary()
        if summary is not None and summary.data_size == file_size:
            _adopt(segment, summary)
            return segment
        if self._is_foreign(segment, file_size):
            return None
        return self._walk_sealed(segment, file_size, following, self.segments[-1] if self.segments else None)

    def _walk_sealed(
        self, segment: Segment, file_size: int, following: int, previous: Segment | None
    ) -> Segment | None:
        """Walk a segment that is not the last one; None when it turns out to be empty, which removes it."""
        walker = self._walk(segment, file_size, _checkpoint(segment, file_size), previous)
        if walker.position < file_size:
            if walker.next_sequence >= self.home.whole_until:
                segment.close()
                raise _Hole(segment.first)
            end = max(self._expected_end(following), segment.end)
            walker.give_up(end)
            segment.end = end
        segment.size = max(file_size, SEGMENT_HEADER_BYTES)
        if segment.is_empty:
            expected = self._expected_end(following)
            if self.home.whole_until <= segment.first < expected:
                segment.close()
                raise _Hole(segment.first)
            if previous is None and expected > segment.first:
                self._tell_gap(segment, segment.first, expected, "the file is empty")
            if segment.has_unreadable:
                self._move_aside(segment)
            else:
                segment.remove()
            self._directory_changed = True
            return None
        self._seal(segment)
        return segment

    def _seal(self, segment: Segment) -> None:
        assert segment.live_index is not None, "a walked segment has its index in memory"
        segment.write_index(segment.live_index, segment.synced_before)
        segment.live_index = None
        self._walked[segment.first] = segment

    def _open_last(self, first: int) -> Segment | None:
        segment = self._new_segment(first)
        file_size = self._file_size(segment)
        if file_size is None or self._is_foreign(segment, file_size):
            return None
        segment.hold_file()
        header = self._header(segment)
        if header is not None:
            segment.synced_before = header.synced_before
        loaded = None
        if self._has_index(segment):
            self._remember_end(segment)
            loaded = _checkpoint(segment, file_size)
            if loaded is None:
                self._forget_index(segment)
        previous = self.segments[-1] if self.segments else None
        walker = self._walk(segment, file_size, loaded, previous)
        # something in the segment was synced: its name was as well
        self._is_name_durable = segment.synced_before > first
        self._is_clean = self._is_name_durable and walker.position == file_size and segment.synced_before >= segment.end
        self._checkpoint_size = loaded[0].data_size if loaded else 0
        self._is_checkpoint_due = walker.position - self._checkpoint_size > CHECKPOINT_BYTES
        if segment.has_unreadable and walker.position < file_size:
            self._leave(segment, file_size)
            return None
        self._cut(segment, file_size)
        if segment.is_empty and previous is not None and first < previous.end:
            # the segment was begun, that failed, and the log went on in the one before it
            segment.remove()
            self._directory_changed = True
            return self._reopen(self.segments.pop())
        if header is None and self.failed is None:
            self._write_header_again(segment, previous)
        return segment

    def _has_index(self, segment: Segment) -> bool:
        return segment.index_path.rpartition("/")[2] in self._owned

    def _remember_end(self, segment: Segment) -> None:
        """Learn from a checkpoint where the log durably ended: what is missing below that is a loss, no torn tail."""
        summary = segment.load_summary()
        if summary is not None and summary.synced_sequence >= summary.end:
            self._durable_end = max(self._durable_end, summary.end)

    def _reopen(self, segment: Segment) -> Segment:
        segment.live_index = segment.index()
        segment.hold_file()
        self._checkpoint_size = 0
        self._is_clean = False
        return segment

    def _walk(
        self,
        segment: Segment,
        file_size: int,
        loaded: tuple[IndexSummary, SparseIndex] | None,
        previous: Segment | None,
    ) -> Walker:
        offset_before = previous.end_offset_bytes if previous is not None else 0
        follows = previous is not None and previous.end == segment.first
        walker = None
        if loaded is not None:
            summary, segment.live_index = loaded
            _adopt(segment, summary)
            walker = Walker(segment, segment.size, segment.end, segment.end_offset_bytes, file_size)
            if walker.position == file_size or walker.is_at_batch():
                segment.walk_into(segment.live_index, walker)
        if walker is None or walker.position < file_size:
            # Bytes nobody understands behind a checkpoint: perhaps those before it were shifted. Look at all of them.
            segment.timestamp_max = 0
            segment.live_index = SparseIndex()
            walker = segment.walker_at_start(file_size, offset_before if follows else None)
            segment.walk_into(segment.live_index, walker)
        segment.size = walker.position
        segment.end = walker.next_sequence
        segment.end_offset_bytes = offset_before if walker.offset_bytes is None else walker.offset_bytes
        return walker

    def _leave(self, segment: Segment, file_size: int) -> None:
        """Leave a segment as it is whose end cannot be read: the log goes on in another one."""
        self._directory_changed = True
        position, end = segment.size, segment.end
        reason = "its end cannot be read from the disk, so it is left as it is, and the log goes on in another file"
        if segment.is_empty:
            reason = f"{reason}; moved to {self._move_aside(segment)}"
        else:
            segment.size = file_size
            self._seal(segment)
            self.segments.append(segment)
        size = file_size - position
        self.home.report(Corruption(segment.path, position, size, reason, end, end, "torn", segment.synced_before))

    def _move_aside(self, segment: Segment) -> str:
        """Let a segment be none of the log's, and keep its file; its new name.

        Raises:
            StorageError: it cannot be renamed.
        """
        segment.close()
        target = f"{segment.path}{UNREADABLE_SUFFIX}"
        try:
            self.files.rename(segment.path, target)
        except OSError as error:
            raise StorageError(f"{segment.path}: cannot read it, nor rename it: {error}") from error
        return target

    def _cut(self, segment: Segment, file_size: int) -> None:
        size = file_size - segment.size
        if size <= 0:
            return
        position = segment.size
        data = segment.read(position, HEADER_BYTES)
        reason = f"unfinished write cut off ({why_not(data, self.home.id_base | segment.end, self.home.id_base, size)})"
        written = self._size_without_zeros(segment, file_size) - position
        can_cut = True
        if written >= HEADER_BYTES:
            self._directory_changed = True
            can_cut, words = segment.copy_aside(position, written, must=True)
            reason = f"{reason}; {words}"
        try:
            if can_cut:
                segment.file().truncate(position)
            else:
                self.failed = str(WriteFailed(segment.path, f"cannot set its torn tail aside: {reason}"))
        except OSError as error:
            self.failed = str(WriteFailed(segment.path, f"cannot cut its torn tail: {error}"))
        if written:
            end = segment.end
            report = Corruption(segment.path, position, size, reason, end, end, "torn", segment.synced_before)
            self.home.report(report)

    def _size_without_zeros(self, segment: Segment, file_size: int) -> int:
        end = file_size
        while end > segment.size:
            start = max(segment.size, end - _PIECE_BYTES)
            written = len(segment.read(start, end - start).rstrip(b"\0"))
            if written:
                return start + written
            end = start
        return end

    def _write_header_again(self, segment: Segment, previous: Segment | None) -> None:
        if not segment.is_empty:
            reason = "segment header damaged; written again"
            end = segment.first
            self.home.report(Corruption(segment.path, 0, SEGMENT_HEADER_BYTES, reason, end, end, "header"))
        try:
            follows = previous is not None and previous.end == segment.first
            segment.write_header(segment.first, previous.end_offset_bytes if previous and follows else None)
        except OSError as error:
            self.failed = str(WriteFailed(segment.path, f"cannot write its header: {error}"))
        self._is_clean = False

    def _begin_after_last(self) -> Segment | None:
        previous = self.segments[-1] if self.segments else None
        first = previous.end if previous is not None else 1
        return self._begin(first, previous.end if previous is not None else 1, previous)

    def _begin(self, first: int, previous_end: int, previous: Segment | None) -> Segment | None:
        segment = self._new_segment(first)
        offset_bytes = previous.end_offset_bytes if previous is not None else 0
        self._is_clean = False
        self._directory_changed = True
        self._checkpoint_size = 0
        try:
            segment.create(previous_end, offset_bytes, previous.synced_before if previous is not None else 0)
        except OSError as error:
            if previous is None:
                raise storage_error(segment.path, error, self.files.free_bytes()) from error
            segment.close()
            self.failed = str(WriteFailed(segment.path, str(error)))
            return None
        return segment

    def _file_size(self, segment: Segment) -> int | None:
        try:
            return segment.file().size()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"{segment.path}: cannot open: {error}") from error

    def _header(self, segment: Segment) -> SegmentHeader | None:
        return decode_segment_header(segment.read(0, SEGMENT_HEADER_BYTES))

    def _expected_end(self, following: int) -> int:
        header = self._header(Segment(self.home, following))
        if header is not None and header.first == following and header.log_id == self.home.log_id:
            return header.previous_end
        return following

    def _is_foreign(self, segment: Segment, file_size: int) -> bool:
        header = self._header(segment)
        home = self.home
        if header is None or (header.partition, header.log_id, header.first) == (
            home.partition,
            home.log_id,
            segment.first,
        ):
            return False
        segment.close()
        self._directory_changed = True
        target = f"{segment.path}{FOREIGN_SUFFIX}"
        self.files.rename(segment.path, target)
        reason = (
            f"its header says partition {header.partition}, log {header.log_id}, sequence {header.first}: "
            f"not a segment of this log; moved to {target}"
        )
        home.report(Corruption(segment.path, 0, file_size, reason, segment.first, segment.first))
        return True

    def _forget_index(self, segment: Segment) -> None:
        """Remove an index that must not be believed: once the segment has grown over it again, it would look good."""
        self._directory_changed = True
        try:
            self.files.remove(segment.index_path)
        except OSError as error:
            self.failed = str(WriteFailed(segment.index_path, f"cannot remove it: {error}"))

    # 4, 5, 6

    def _verify_doubtful(self) -> None:
        """Walk those of the last sealed segments that a power loss may have caught before they were synced."""
        durable = self.segments[-1].synced_before
        start = max(len(self.segments) - 1 - _DOUBTFUL_SEGMENTS_MAX, 0)
        for number in range(len(self.segments) - 2, start - 1, -1):
            segment = self.segments[number]
            if segment.end <= max(durable, segment.synced_before) or segment.first in self._walked:
                continue
            twin = self._new_segment(segment.first)
            twin.synced_before = durable
            previous = self.segments[number - 1] if number else None
            walked = self._walk_sealed(twin, segment.size, self.segments[number + 1].first, previous)
            self.segments[number : number + 1] = [] if walked is None else [walked]

    def _tell_gaps(self) -> None:
        """Report sequences between two segments that neither holds, unless the gap was there from the beginning."""
        for segment, following in pairwise(self.segments):
            if segment.end == following.first:
                continue
            expected = self._expected_end(following.first)
            if segment.end < expected:
                self._tell_gap(segment, segment.end, expected, "the file ends early or the next one is missing")
            elif segment.end > following.first:
                reason = f"overlaps {following.path}; the later segment is used"
                self.home.report(Corruption(segment.path, segment.size, 0, reason, segment.end, segment.end))
                segment.end = following.first

    def _tell_gap(self, segment: Segment, first: int, end: int, reason: str) -> None:
        durable = max(segment.synced_before, self._durable_end)
        is_replica = self.home.is_replica
        self.home.report(Corruption(segment.path, segment.size, 0, reason, first, end, "gap", durable, is_replica))

    def _continue_at(self, next_sequence_min: int) -> None:
        """Leave a gap when consumers were ahead of what survived, so that no sequence is given to two messages."""
        active = self.segments[-1]
        next_sequence = max(next_sequence_min, self._durable_end)
        if active.end >= next_sequence:
            return
        if self.home.is_replica:
            self._end_early(active, next_sequence)
            return
        reason = "the log ends before what was durable or consumed already; numbering goes on behind that"
        self._tell_gap(active, active.end, next_sequence, reason)
        segment = self._begin(next_sequence, active.end, active)
        if segment is None:
            return
        if active.is_empty:
            self.segments.pop()
            active.remove()
        else:
            self._seal(active)
        self.segments.append(segment)

    def _end_early(self, active: Segment, next_sequence: int) -> None:
        """Let a replica end where it ends: what is missing is another's, too, and comes from there, as it was."""
        self._tell_gap(active, active.end, next_sequence, "the log ends before what was durable already")
        if self._saved_sequence > active.end:
            # it knows of messages that may not come again as they were
            try:
                self.files.remove(f"{self.home.directory}/{SNAPSHOT_NAME}")
                self.files.sync_directory(self.home.directory)
            except OSError as error:
                self.failed = str(WriteFailed(self.home.directory, f"cannot remove {SNAPSHOT_NAME}: {error}"))
            self._saved_sequence, self._table = 0, ProducerTable()

    def _sweep(self) -> None:
        """Remove what belonged to segments that are gone."""
        firsts = {segment.first for segment in self.segments}
        oldest = self.segments[0].first
        for name in self._owned:
            first = _first_in(name)
            if first in firsts or (not name.endswith(INDEX_SUFFIX) and first >= oldest):
                continue
            with suppress(OSError):
                self.files.remove(f"{self.home.directory}/{name}")

    def begin_sync(self) -> bool:
        """Fix what has to be synced, and write it once more; False when all of it is known to be durable."""
        active = self.segments[-1]
        if self._is_clean and not self._directory_changed and not self._walked:
            self.sync_ended(None)
            return False
        durable = active.synced_before
        try:
            active.hold_file()
            self._write_again(durable)
        except OSError as error:
            self.sync_ended(error)
            return False
        self._unsynced_paths = [
            segment.path for segment in self.segments[:-1] if segment.end > durable or segment.first in self._walked
        ]
        if self._directory_changed or self._walked or not self._is_name_durable:
            self.directories.append(self.home.directory)
        if not self._is_name_durable:
            # a kill may have come before the names of the directory itself and of those above it were durable
            self.directories += parents_of(self.home.directory)
        return True

    def sync_files(self) -> None:
        """Sync the segments that may need it. Blocks; may be called in a thread.

        Raises:
            OSError: nothing is known about what is durable.
        """
        for path in self._unsynced_paths:
            file = self.files.open(path)
            try:
                file.sync()
            finally:
                file.close()
        self.segments[-1].file().sync()

    def sync_ended(self, error: OSError | None) -> None:
        """Take note that everything recovered is durable, or why that is not known."""
        active = self.segments[-1]
        if error is not None:
            self.failed = self.failed or str(WriteFailed(self.home.directory, f"cannot sync: {error}"))
            return
        active.synced_before = active.end
        for segment in self._walked.values():
            if segment is not active:
                segment.release_file()
        if self._is_checkpoint_due and active.live_index:
            active.write_index(active.live_index, active.end)
            self._checkpoint_size = active.size

    def _write_again(self, durable: int) -> None:
        """Write the newest bytes that were not known to be durable once more, unchanged, before they are synced.

        A sync that failed before the restart left their pages looking clean: another sync would succeed and do nothing.
        """
        left = REWRITE_BYTES_MAX
        for segment in reversed(self.segments[-1 - _DOUBTFUL_SEGMENTS_MAX :]):
            if segment.end <= durable and not segment.is_empty:
                break
            position = max(segment.position_of(durable), segment.size - left)
            left -= segment.size - position
            while position < segment.size:
                # page by page where the disk has lost some, so that all others are written
                piece = PAGE_BYTES - position % PAGE_BYTES if segment.has_unreadable else _PIECE_BYTES
                size = min(piece, segment.size - position)
                try:
                    data = segment.file().read_at(position, size)
                except OSError:
                    if not segment.has_unreadable:
                        raise
                    position += size
                    continue
                if not data:
                    break
                segment.file().write_at(position, data)
                position += len(data)


def log_id_in(files: Files, directory: str) -> int:
    """Return the id of the log that a directory holds, without opening it; 0: it cannot be read. Blocks for a small
    file.
    """
    try:
        file = files.open(f"{directory}/{META_NAME}")
        try:
            data = file.read_at(0, _META.size + _CRC.size)
        finally:
            file.close()
    except OSError:
        return 0
    if len(data) < _META.size + _CRC.size or _CRC.unpack_from(data, _META.size)[0] != crc32(data[: _META.size]):
        return 0
    magic, _, _, _, log_id = _META.unpack_from(data)
    return int(log_id) if magic == _META_MAGIC else 0


def _write_meta(home: Home) -> File:
    """Write the meta file and return it open, so that it can be synced."""
    data = _META.pack(_META_MAGIC, _META_VERSION, 0, home.partition, home.log_id)
    file = home.files.open(f"{home.directory}/{META_NAME}", create=True)
    try:
        file.write_at(0, data + _CRC.pack(crc32(data)))
        file.truncate(_META.size + _CRC.size)
    except OSError:
        file.close()
        raise
    return file


def _first_in(name: str) -> int:
    return int(name.partition(".")[0])


def _adopt(segment: Segment, summary: IndexSummary) -> None:
    segment.end = summary.end
    segment.size = summary.data_size
    segment.end_offset_bytes = summary.end_offset_bytes
    segment.timestamp_max = summary.timestamp_max
    segment.synced_before = max(segment.synced_before, summary.synced_sequence)
    segment.has_producers = summary.has_producers


def _checkpoint(segment: Segment, file_size: int) -> tuple[IndexSummary, SparseIndex] | None:
    """The index of a segment if all it covers was durable when it was written."""
    loaded = segment.load_index()
    if loaded is None or loaded[0].data_size > file_size or loaded[0].synced_sequence < loaded[0].end:
        return None
    return loaded
