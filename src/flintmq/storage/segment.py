"""One file of a partition log: its name and header, reading good batches from it, setting damage aside.

Byte picture of ``<first sequence, 20 digits>.log`` (big-endian)::

    0      4        6         8          12        20      28
    +------+--------+---------+----------+---------+-------+--
    | FMQS | version| reserved| partition| reserved| log_id|
    +------+--------+---------+----------+---------+-------+--
     28              36            44            52      60    64
    +---------------+-------------+-------------+-------+-----+------------------------
    | first_sequence| offset_bytes| previous_end| synced| crc | batches, see batch.py
    +---------------+-------------+-------------+-------+-----+------------------------

- ``offset_bytes``: virtual position of the first frame, so that it goes on although everything before was deleted.
- ``previous_end``: where the log ended when this segment began; below ``first_sequence`` when that gap has been told.
- ``synced``: every sequence below it survived a power loss when this segment was begun.

Beside it: ``.index`` (see index.py) and ``.log.<position>.bad``, copies of damaged bytes.

Invariants: I1 batches stand one after the other and carry consecutive sequences, except across damage; I2 bytes at or
beyond ``size`` are never read as batches; I3 nothing is returned that failed its CRC; I4 damage is looked for once per
process and place, then stepped over.

Rules of this file: no byte of a stored segment is changed except its torn tail, which is cut, and a damaged header,
which is written again. Bytes that cannot be read are damage only where the disk answers for another file of the log;
else nobody knows anything about them, and whoever wanted them fails. No file with such bytes is cut or removed.

Source: docs/decisions/0001.
"""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from struct import Struct
from typing import NamedTuple

from flintmq.batch import HEADER_BYTES
from flintmq.checksum import crc32
from flintmq.errors import StorageError
from flintmq.limits import BAD_FILES_MAX, DISK_RESERVE_BYTES, PAGE_BYTES, SCAN_WINDOW_BYTES, SEQUENCE_BITS, SEQUENCE_MAX
from flintmq.storage.cache import ReadCache
from flintmq.storage.files import File, Files
from flintmq.storage.index import (
    INDEX_BYTES_MAX,
    SUMMARY_BYTES,
    Entry,
    IndexSummary,
    SparseIndex,
    decode_index,
    decode_summary,
    encode_index,
)
from flintmq.storage.scan import Anchor, Run, Search, claim_at, has_producers, hop, skim, walk, why_not

META_NAME = "log.meta"
MAGIC = b"FMQS"
VERSION = 1
_HEADER = Struct(">4sHHI8xQQQQQ")
_CRC = Struct(">I")
SEGMENT_HEADER_BYTES = _HEADER.size + _CRC.size
LOG_SUFFIX = ".log"
INDEX_SUFFIX = ".index"
BAD_SUFFIX = ".bad"
NAME_DIGITS = 20
NO_STOP = 1 << 64
_COPY_BYTES = 1024 * 1024
_UNREADABLE = (errno.EIO, errno.EUCLEAN, errno.EBADMSG)
assert SEGMENT_HEADER_BYTES == 64


@dataclass(slots=True)
class Corruption:
    """Damage that recovery or a read found and set aside.

    Attributes:
        path: the file, relative to the data directory.
        position: byte position of the bad bytes in it.
        size: how many bytes they are.
        first_sequence_lost, end_sequence_lost: messages that are gone; equal when none are known to be.
        kind: ``damage`` (stored bytes changed), ``torn`` (an unfinished write was cut), ``gap`` (sequences without a
            file), ``header`` (a segment header or the meta file was unreadable; no message is affected).
        synced_before: every sequence below it was known to be durable; what is lost below it is a real loss.
        is_elsewhere: what is gone is to come from another replica.
    """

    path: str
    position: int
    size: int
    reason: str
    first_sequence_lost: int
    end_sequence_lost: int
    kind: str = "damage"
    synced_before: int = 0
    is_elsewhere: bool = False

    def __str__(self) -> str:
        lost = self.end_sequence_lost - self.first_sequence_lost
        text = f"{self.path} at byte {self.position}, {self.size} bytes: {self.reason}"
        if lost:
            what = "are to come from another replica" if self.is_elsewhere else "skipped"
            text += f"; {lost} messages from sequence {self.first_sequence_lost} to {self.end_sequence_lost - 1} {what}"
        return text


@dataclass(slots=True, eq=False)
class Home:
    """The things that the segments of one log have in common.

    Attributes:
        is_replica: some of its batches are as another node's log has them: what those say of synced sequences is true
            of that log, not of this one.
        whole_until: a hole at or behind this sequence is where the log ends: while a replica is opened, as it gets what
            it lacks again, in its order.
    """

    files: Files
    directory: str
    partition: int
    cache: ReadCache
    report: Callable[[Corruption], None]
    log_id: int = 0
    is_replica: bool = False
    whole_until: int = NO_STOP
    id_base: int = field(init=False)

    def __post_init__(self) -> None:
        self.id_base = self.partition << SEQUENCE_BITS

    def ask_disk(self) -> None:
        """Read a small file of the log from the device, not from memory; one that is not there is an answer as well.

        Raises:
            OSError: it cannot be read.
        """
        try:
            file = self.files.open(f"{self.directory}/{META_NAME}")
        except FileNotFoundError:
            return
        try:
            file.write_out()  # what is in memory of it is dropped
            file.read_at(0, PAGE_BYTES)
        finally:
            file.close()


@dataclass(slots=True, frozen=True)
class SegmentHeader:
    """The fields of a segment header, see the picture above."""

    partition: int
    log_id: int
    first: int
    offset_bytes: int
    previous_end: int
    synced_before: int


def segment_name(first: int) -> str:
    """Name of the file of the segment that begins with a sequence."""
    return f"{first:0{NAME_DIGITS}d}{LOG_SUFFIX}"


def encode_segment_header(header: SegmentHeader) -> bytes:
    """Build the 64 bytes a segment starts with."""
    data = _HEADER.pack(
        MAGIC,
        VERSION,
        0,
        header.partition,
        header.log_id,
        header.first,
        header.offset_bytes,
        header.previous_end,
        header.synced_before,
    )
    return data + _CRC.pack(crc32(data))


def decode_segment_header(data: bytes) -> SegmentHeader | None:
    """Read and verify a segment header; None when it is not good.

    Raises:
        StorageError: it is good, but of another version; its batches may look like damage to this release.
    """
    if len(data) < SEGMENT_HEADER_BYTES:
        return None
    magic, version, reserved, *fields = _HEADER.unpack_from(data)
    (crc,) = _CRC.unpack_from(data, _HEADER.size)
    if magic != MAGIC or crc != crc32(data[: _HEADER.size]):
        return None
    if version != VERSION or reserved:
        raise StorageError(f"segment version {version}; this release reads version {VERSION}: use the newer release")
    return SegmentHeader(*fields)


@dataclass(slots=True, frozen=True)
class Damage:
    """A stretch without good batches: where it lies, and the sequences that stood there."""

    position: int
    end_position: int
    first: int
    end: int


class Segment:
    """One segment file; the only reader of it. The log that owns it writes the appends.

    Attributes:
        first: sequence it is named after.
        end: one past the last sequence it holds or lost.
        size: bytes up to the end of its last batch (I2).
        timestamp_max: latest timestamp of its messages, 0 when empty.
        end_offset_bytes: virtual position after its last frame.
        synced_before: the highest durable watermark its header, index or batches tell.
        has_producers: whether one of its batches says who published it, or may have said so before it was damaged.
        has_unreadable: whether the disk has lost some of what was read of it.
        live_index: the growing index of the active segment; None when it is loaded on demand.
        live_file: the handle while the segment is active or not synced; None when it is opened on demand.
        bad_paths: files that hold bytes set aside from it.
    """

    __slots__ = (
        "_damages",
        "bad_paths",
        "end",
        "end_offset_bytes",
        "first",
        "has_producers",
        "has_unreadable",
        "home",
        "live_file",
        "live_index",
        "path",
        "size",
        "synced_before",
        "timestamp_max",
    )

    def __init__(self, home: Home, first: int) -> None:
        self.home = home
        self.first = first
        self.end = first
        self.size = SEGMENT_HEADER_BYTES
        self.timestamp_max = 0
        self.end_offset_bytes = 0
        self.synced_before = 0
        self.has_producers = False
        self.has_unreadable = False
        self.live_index: SparseIndex | None = None
        self.live_file: File | None = None
        self.path = f"{home.directory}/{segment_name(first)}"
        self.bad_paths: list[str] = []
        self._damages: list[Damage] = []  # by position

    @property
    def index_path(self) -> str:
        return self.path.removesuffix(LOG_SUFFIX) + INDEX_SUFFIX

    @property
    def is_empty(self) -> bool:
        """Whether it neither holds nor lost a message."""
        return self.end == self.first

    # the file

    def create(self, previous_end: int, offset_bytes: int, synced_before: int) -> None:
        """Create the file with its header; the segment is active.

        Raises:
            OSError: nothing is known about the file.
        """
        file = self.home.files.open(self.path, create=True)
        self.live_file = file
        self.live_index = SparseIndex()
        self.end_offset_bytes = offset_bytes
        self.synced_before = synced_before
        file.truncate(0)  # what a failed creation of the same name left must not follow the header
        self.write_header(previous_end)

    def write_header(self, previous_end: int, base: int | None = None) -> None:
        """Write the header of a segment that has no batch yet, or whose header was damaged.

        Args:
            base: virtual position of its first frame; None when nothing but its index can tell.

        Raises:
            OSError: nothing is known about the file.
        """
        home = self.home
        if base is None:
            base = self.base_offset()
        header = SegmentHeader(home.partition, home.log_id, self.first, base, previous_end, self.synced_before)
        self.file().write_at(0, encode_segment_header(header))

    def base_offset(self) -> int:
        """Virtual position of its first frame, as far as its index knows."""
        entry = self.live_index.before_offset(0) if self.live_index is not None else None
        if entry is None:
            return self.end_offset_bytes
        lost_bytes = entry.position - SEGMENT_HEADER_BYTES
        # of what was lost before it a header is known to have been no frame
        return max(0, entry.offset_bytes - lost_bytes + HEADER_BYTES) if lost_bytes else entry.offset_bytes

    def file(self) -> File:
        """The open handle.

        Raises:
            OSError: it cannot be opened.
        """
        if self.live_file is not None:
            return self.live_file
        return self.home.cache.file((self.home, self.first), lambda: self.home.files.open(self.path))

    def hold_file(self) -> File:
        """Take the handle away from the shared cache, which must not close it until :meth:`release_file`.

        Raises:
            OSError: it cannot be opened.
        """
        if self.live_file is None:
            self.live_file = self.home.cache.take_file((self.home, self.first)) or self.home.files.open(self.path)
        return self.live_file

    def release_file(self) -> None:
        """Hand the handle to the shared cache, which may close it."""
        if self.live_file is not None:
            self.home.cache.keep_file((self.home, self.first), self.live_file)
            self.live_file = None

    def close(self) -> None:
        """Close the handle and forget the cached index."""
        if self.live_file is not None:
            self.live_file.close()
            self.live_file = None
        self.home.cache.close_file((self.home, self.first))
        self.home.cache.discard((self.home, self.first))

    def remove(self) -> None:
        """Delete the file, its index and what was set aside from it.

        Raises:
            OSError: some of it may be left.
        """
        self.close()
        # the log file goes last: what is left after a crash is still recognised as belonging to it
        for path in (*self.bad_paths, self.index_path, self.path):
            self.home.files.remove(path)

    def read(self, position: int, size: int) -> bytes:
        """Bytes of the file; pages that the disk has lost come as zeros, a missing file as nothing. Shorter at its end.

        Raises:
            StorageError: the file cannot be read for a reason that says nothing about its content.
        """
        if size <= 0:
            return b""
        try:
            return self.file().read_at(position, size)
        except FileNotFoundError:
            return b""
        except OSError as error:
            if error.errno not in _UNREADABLE:
                raise StorageError(f"{self.path}: cannot read: {error}") from error
        return b"".join(self._read_pages(position, position + size))

    def _read_pages(self, position: int, end: int) -> Iterable[bytes]:
        while position < end:
            size = min(PAGE_BYTES - position % PAGE_BYTES, end - position)
            try:
                page = self.file().read_at(position, size)
            except OSError as error:
                if error.errno not in _UNREADABLE:
                    raise StorageError(f"{self.path}: cannot read: {error}") from error
                page = self._page_again(position, size)
            yield page
            position += size

    def _page_again(self, position: int, size: int) -> bytes:
        """Read a page once more that could not be read; zeros if the disk has lost it.

        Raises:
            StorageError: the disk does not answer.
        """
        home = self.home
        try:
            home.ask_disk()
        except OSError as error:
            raise StorageError(
                f"{self.path}: cannot read: {error}. The disk does not answer; nothing is known about what is there, "
                "and nothing of it is changed"
            ) from error
        try:
            return self.file().read_at(position, size)
        except OSError as error:
            if error.errno not in _UNREADABLE:
                raise StorageError(f"{self.path}: cannot read: {error}") from error
        self.has_unreadable = True
        return bytes(size)

    # the index

    def index(self) -> SparseIndex:
        """The index: the live one, the cached one, the file's, or rebuilt by a walk."""
        if self.live_index is not None:
            return self.live_index
        key = (self.home, self.first)
        index: SparseIndex | None = self.home.cache.get(key)
        if index is None:
            loaded = self.load_index()
            index = loaded[1] if loaded is not None and loaded[0].data_size == self.size else self._rebuild_index()
            self.home.cache.put(key, index, index.size_bytes)
        return index

    def load_index(self) -> tuple[IndexSummary, SparseIndex] | None:
        """Read the index file; None when it is missing, damaged or another segment's."""
        loaded = decode_index(self._read_index_file(INDEX_BYTES_MAX + 1))
        return loaded if loaded is not None and self._is_mine(loaded[0]) else None

    def load_summary(self) -> IndexSummary | None:
        """Read the header of the index file; None when it is missing, damaged or another segment's."""
        summary = decode_summary(self._read_index_file(SUMMARY_BYTES))
        return summary if summary is not None and self._is_mine(summary) else None

    def _is_mine(self, summary: IndexSummary) -> bool:
        return summary.log_id == self.home.log_id and summary.first == self.first

    def _read_index_file(self, size: int) -> bytes:
        try:
            file = self.home.files.open(self.index_path)
        except OSError:
            # An index is only a help: one that cannot be read is rebuilt.
            return b""
        try:
            return file.read_at(0, size)
        except OSError:
            return b""
        finally:
            file.close()

    def write_index(self, index: SparseIndex, synced_sequence: int) -> None:
        """Write the index file; a segment whose index cannot be written does without.

        Args:
            synced_sequence: every sequence below it survives a power loss by now.
        """
        summary = IndexSummary(
            self.home.log_id,
            self.first,
            self.end,
            self.size,
            self.end_offset_bytes,
            self.timestamp_max,
            synced_sequence,
            self.has_producers,
        )
        data = encode_index(summary, index)
        with suppress(OSError):
            file = self.home.files.open(self.index_path, create=True)
            try:
                # A crash between the two leaves a file that fails its CRC or its length.
                file.write_at(0, data)
                file.truncate(len(data))
            finally:
                file.close()

    def _rebuild_index(self) -> SparseIndex:
        index = SparseIndex()
        walker = self.walker_at_start(self.size)
        self.walk_into(index, walker)
        if walker.position < self.size:
            walker.give_up(self.end)
        if self.live_index is None and len(index):
            self.write_index(index, self.synced_before)
        return index

    # reading

    def walker_at_start(self, limit: int, offset_bytes: int | None = None) -> Walker:
        """A walker that stands before the first batch.

        Args:
            limit: where the file ends, in bytes.
            offset_bytes: virtual position of the first frame, in case the header is unreadable; None when unknown.
        """
        header = decode_segment_header(self.read(0, SEGMENT_HEADER_BYTES))
        if header is not None:
            offset_bytes = header.offset_bytes
        return Walker(self, SEGMENT_HEADER_BYTES, self.first, offset_bytes, limit)

    def walk_into(self, index: SparseIndex, walker: Walker) -> None:
        """Record all batches a walker meets in ``index``."""
        while (found := walker.next_run(SCAN_WINDOW_BYTES, NO_STOP)) is not None:
            timestamp = index.add_run(found.data, found.run, found.position, self.home.id_base, self.timestamp_max)
            self.timestamp_max = timestamp
            self.has_producers = self.has_producers or has_producers(found.data, found.run)
        if not self.home.is_replica:
            self.synced_before = max(self.synced_before, walker.synced_before)

    def next_run(self, sequence: int, size: int, stop: int) -> Found | None:
        """The next good batches: from the one that contains ``sequence``, or the first behind it; None at the end.

        The run may begin with batches that end at or before ``sequence``.

        Args:
            size: bytes to read at once; more when the batch is larger.
            stop: no batch is returned that starts at or beyond this sequence.
        """
        base = self.home.id_base
        walker = self._walker_at(self.index().before_sequence(sequence))
        hopped = walker.hop_to(base | sequence, size, base | stop)
        if hopped is not None:
            return hopped
        walker = self.walker_before(lambda index: index.before_sequence(sequence))
        while (found := walker.next_run(size, base | stop)) is not None:
            if found.run.next_id > base | sequence:
                return found
        if walker.position < self.size and walker.next_id < base | min(stop, self.end):
            walker.give_up(self.end)
        return None

    def unverified(self, sequence: int, end: int, size: int, stop: int) -> tuple[memoryview, int] | None:
        """Batches as they lie in the file, by headers alone: from the one that contains ``sequence`` to before ``end``.

        None when anything about them looks wrong, or is known to be: :meth:`next_run` finds out what.

        Args:
            size: most bytes that are read.
            stop: no batch is returned that ends beyond this sequence.
        """
        if self._damages:
            return None
        base = self.home.id_base
        walker = self._walker_at(self.index().before_sequence(sequence))
        data = self.read(walker.position, min(size, self.size - walker.position))
        position, next_id = hop(data, 0, walker.next_id, base | sequence)
        after, next_id = skim(data, position, next_id, base | end, base | stop)
        if next_id <= base | sequence:
            return None
        return memoryview(data)[position:after], next_id & SEQUENCE_MAX

    def position_of(self, sequence: int) -> int:
        """Find where the batch with ``sequence``, or the first behind it, starts; the end when there is none."""
        if sequence <= self.first:
            return 0
        found = self.next_run(sequence, SCAN_WINDOW_BYTES, NO_STOP) if sequence < self.end else None
        if found is None:
            return self.size
        before = bisect_right(found.run.first_ids, self.home.id_base | sequence) - 1
        return found.position + found.run.positions[max(before, 0)]

    def runs_from(self, find: Callable[[SparseIndex], Entry | None], size: int) -> Iterable[Found]:
        """All good batches from the index entry on that ``find`` finds."""
        walker = self.walker_before(find)
        while (found := walker.next_run(size, NO_STOP)) is not None:
            yield found

    def walker_before(self, find: Callable[[SparseIndex], Entry | None]) -> Walker:
        """A walker at the index entry that ``find`` finds, which is known to be right."""
        entry = find(self.index())
        if entry is not None and self.known_damage(entry.position, entry.sequence) is None:
            walker = self._walker_at(entry)
            if walker.is_at_batch():
                return walker
            # The batch is damaged, or bytes before it were lost and all positions behind them are wrong: only a walk
            # from the beginning can tell.
            self.home.cache.discard((self.home, self.first))
            rebuilt = self._rebuild_index()
            if self.live_index is not None:
                self.live_index = rebuilt
            else:
                self.home.cache.put((self.home, self.first), rebuilt, rebuilt.size_bytes)
            entry = find(rebuilt)
        return self._walker_at(entry)

    def _walker_at(self, entry: Entry | None) -> Walker:
        if entry is None:
            return self.walker_at_start(self.size)
        return Walker(self, entry.position, entry.sequence, entry.offset_bytes, self.size)

    # damage

    def known_damage(self, position: int, sequence: int) -> Damage | None:
        """The damage found before that explains why no good batch of ``sequence`` stands at ``position``."""
        number = bisect_right(self._damages, position, key=_position) - 1
        if number < 0:
            return None
        damage = self._damages[number]
        if position < damage.end_position or (damage.position == position and damage.first <= sequence < damage.end):
            return damage
        return None

    def set_aside(self, damage: Damage, reason: str, kind: str = "damage") -> Damage:
        """Copy damaged bytes beside the segment, remember and report them; the stretch to step over.

        It is shorter than ``damage`` when its end was found and told before.
        """
        number = bisect_right(self._damages, damage.position, key=_position)
        if number < len(self._damages) and self._damages[number].position < damage.end_position:
            known = self._damages[number]
            damage = Damage(damage.position, known.position, damage.first, known.first)
        self._damages.insert(number, damage)
        self.has_producers = True
        size = damage.end_position - damage.position
        words = self.copy_aside(damage.position, size)[1]
        reason = f"{reason}; {words}" if words else reason
        if self.has_unreadable:
            reason = f"{reason}; some of the file cannot be read from the disk, and counts as zeros"
        # of a replica nothing is stepped over but what was durable
        is_replica = self.home.is_replica
        durable = max(self.synced_before, damage.end) if is_replica else self.synced_before
        self.home.report(
            Corruption(self.path, damage.position, size, reason, damage.first, damage.end, kind, durable, is_replica)
        )
        return damage

    def copy_aside(self, position: int, size: int, must: bool = False) -> tuple[bool, str]:
        """Copy bytes to ``<segment>.log.<position>.bad``; whether they are there now, and words for the report.

        Args:
            must: the bytes are about to be cut: copy them durably, and whatever the free space and their number.
        """
        path = f"{self.path}.{position}{BAD_SUFFIX}"
        files = self.home.files
        if path in self.bad_paths:
            return True, f"set aside before in {path}"
        if not size:
            return True, ""
        if not must and len(self.bad_paths) >= BAD_FILES_MAX:
            return False, f"not set aside, there are {BAD_FILES_MAX} such files already; the bytes are still in place"
        if not must and files.free_bytes() < size + DISK_RESERVE_BYTES:
            return False, "not set aside, the disk is full; the bytes are still in place"
        self.bad_paths.append(path)
        try:
            file = files.open(path, create=True)
            try:
                for done in range(0, size, _COPY_BYTES):
                    file.write_at(done, self.read(position + done, min(_COPY_BYTES, size - done)))
                if must:
                    file.sync()
            finally:
                file.close()
        except OSError as error:
            return False, f"not set aside: {error}"
        return True, f"set aside in {path}"


def _position(damage: Damage) -> int:
    return damage.position


class Found(NamedTuple):
    """A run of good batches, the bytes it lies in, and where in the segment those were read."""

    data: bytes
    run: Run
    position: int


class Walker:
    """Moves over the batches of one segment, verified, stepping over damage.

    Args:
        offset_bytes: virtual position of the frame expected at ``position``; None when unknown.
        limit: where the file ends, in bytes.

    Attributes:
        position: where the next batch should start.
        next_id: the id it should start with.
        synced_before: the durable watermark in the last good batch; 0 when there was none.
    """

    __slots__ = ("_anchor", "_limit", "_search", "_segment", "next_id", "position", "synced_before")

    def __init__(self, segment: Segment, position: int, sequence: int, offset_bytes: int | None, limit: int) -> None:
        self._segment = segment
        self._limit = limit
        self._anchor = None if offset_bytes is None else Anchor(position, offset_bytes)
        self._search: Search | None = None
        self.position = position
        self.next_id = segment.home.id_base | sequence
        self.synced_before = 0

    @property
    def next_sequence(self) -> int:
        return self.next_id & SEQUENCE_MAX

    @property
    def offset_bytes(self) -> int | None:
        """Virtual position after the last good batch, or as given when there was none."""
        return None if self._anchor is None else self._anchor.offset_bytes

    def next_run(self, window: int, stop_id: int) -> Found | None:
        """The next good batches; None at the end, at ``stop_id``, or when nothing good follows.

        Args:
            window: bytes to read at once; more when a batch is larger.
        """
        while self.position < self._limit and self.next_id < stop_id:
            position = self.position
            data = self._read(position, window)
            run = walk(data, 0, self.next_id, stop_id)
            if run.positions:
                return self._pass(Found(data, run, position))
            needed = self._size_of_larger(data)
            if needed:
                window = needed
            elif not self._step_over(data):
                return None
        return None

    def is_at_batch(self) -> bool:
        """Whether the batch expected here is here, and good."""
        claim = claim_at(self._read(self.position, HEADER_BYTES), 0, self.position, self._segment.home.id_base)
        if claim is None or claim.first_id != self.next_id or claim.end_position > self._limit:
            return False
        return bool(walk(self._read(self.position, claim.size), 0, self.next_id, NO_STOP).positions)

    def hop_to(self, wanted_id: int, window: int, stop_id: int) -> Found | None:
        """The run that starts with the batch that contains ``wanted_id``, without verifying those before it.

        None, and no move, when that batch is not found at once and good.
        """
        data = self._read(self.position, window)
        position, next_id = hop(data, 0, self.next_id, wanted_id)
        run = walk(data, position, next_id, stop_id)
        if not run.positions or not next_id <= wanted_id < run.next_id:
            return None
        return self._pass(Found(data, run, self.position))

    def give_up(self, end: int) -> None:
        """Set everything from here on aside: nothing good follows, and sequences up to ``end`` were stored there."""
        data = self._read(self.position, HEADER_BYTES)
        reason = why_not(data, self.next_id, self._segment.home.id_base, self._limit - self.position)
        self._segment.set_aside(Damage(self.position, self._limit, self.next_sequence, end), reason)

    def _read(self, position: int, size: int) -> bytes:
        return self._segment.read(position, min(max(size, HEADER_BYTES), self._limit - position))

    def _pass(self, found: Found) -> Found:
        last = found.run.positions[-1]
        claim = claim_at(found.data, last, found.position + last, self._segment.home.id_base)
        assert claim is not None, "a verified batch has a header"
        self.position = claim.end_position
        self.next_id = claim.end_id
        self.synced_before = claim.synced_before
        self._anchor = Anchor(claim.end_position, claim.end_offset_bytes)
        return found

    def _size_of_larger(self, data: bytes) -> int:
        """Size of the batch expected here when only its beginning was read; 0 when more bytes would not help."""
        claim = claim_at(data, 0, self.position, self._segment.home.id_base)
        if claim is None or claim.first_id != self.next_id or claim.end_position > self._limit:
            return 0
        return claim.size if claim.size > len(data) else 0

    def _step_over(self, data: bytes) -> bool:
        segment = self._segment
        if self.next_sequence >= segment.home.whole_until:
            return False
        base = segment.home.id_base
        damage = segment.known_damage(self.position, self.next_sequence)
        if damage is None:
            if self._search is None:
                self._search = Search(self._read, self._limit, base)
            found = self._search.next_batch(self.position, self.next_id, self._anchor)
            if found is None:
                return False
            if found.position == self.position and found.first_id == self.next_id:
                return True  # it could be read now, a moment ago it could not
            reason = why_not(data, self.next_id, base, self._limit - self.position)
            if not segment.home.is_replica:
                segment.synced_before = max(segment.synced_before, found.synced_before)
            damage = Damage(self.position, found.position, self.next_sequence, found.first_id - base)
            damage = segment.set_aside(damage, reason)
        self.position = damage.end_position
        self.next_id = max(self.next_id, base | damage.end)
        return True
