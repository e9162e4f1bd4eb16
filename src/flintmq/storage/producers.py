"""The producers that publish to a partition with sequences of their own: as far as it is in the log.

The log itself says it, batch by batch (flag PRODUCER in batch.py). So that a start need not read all of the log, and
retention may drop old segments, a snapshot of the table is written beside the log now and then.

Byte picture of ``producers.snapshot`` (big-endian), entries from the least to the most recently used::

    0      4        6         8        16         24      28
    +------+--------+---------+--------+----------+-------+---------+-----+
    | FMQP | version| reserved| log_id | sequence | count | entries | crc |
    +------+--------+---------+--------+----------+-------+---------+-----+
    entry: [1 n][id, n bytes][8 last][1 k]{k times [8 first][8 end]}

- the table is what the batches below ``sequence`` of the log say; what stands behind it is read from the log;
- ``last`` is the sequence that the producer gave to its last message; ``first`` to ``end`` (exclusive) are *holes*:
  messages before it that the log does not have.

There are holes after a power loss that took a batch and left a later one: nobody was promised either, so the producer
sends both again, and only the first is to be stored.

Rules of this file: a snapshot never knows of a message that a power loss could still take from the log, so it is
written only after a sync of the log; it replaces the one before as a whole; producers of sinks have room of their own
and push out nobody else's; a producer that was forgotten because too
many others came later may begin anywhere, so a later batch of it counts, not the highest.

Source: docs/idempotent.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain, islice
from struct import Struct

from flintmq.batch import producer_of
from flintmq.checksum import crc32
from flintmq.errors import StorageError
from flintmq.limits import (
    PRODUCER_ID_SIZE_MAX,
    PRODUCERS_MAX,
    PRODUCERS_SNAPSHOT_BYTES,
    READ_AHEAD_BYTES,
    SINK_PRODUCERS_MAX,
)
from flintmq.storage.files import Files, replace_file
from flintmq.storage.index import SparseIndex
from flintmq.storage.segment import Corruption, Home, Segment

SNAPSHOT_NAME = "producers.snapshot"
_MAGIC = b"FMQP"
_VERSION = 1
_HEADER = Struct(">4sHHQQI")
_LAST = Struct(">QB")
_HOLE = Struct(">QQ")
_CRC = Struct(">I")
HOLES_MAX = 16  # of one producer; of more, the oldest count as stored
_ENTRY_BYTES_MAX = 1 + PRODUCER_ID_SIZE_MAX + _LAST.size + HOLES_MAX * _HOLE.size
_SNAPSHOT_BYTES_MAX = _HEADER.size + (PRODUCERS_MAX + SINK_PRODUCERS_MAX) * _ENTRY_BYTES_MAX + _CRC.size

Ranges = list[tuple[int, int]]
"""Sequences of one producer, each from the first to the end (exclusive)."""


SINK_PREFIX = b"sink:"
_SINK_FORGOTTEN_MIN = 256  # at a time, because looking for those of past epochs costs time
_KEPT_EPOCHS = 2  # of each sink: Spark repeats the one that was not committed, and begins none before it was


def epoch_of(producer_id: bytes) -> tuple[bytes, int] | None:
    """Return the name of a sink and the epoch of one of its producers, ``sink:<name>:<epoch>:...``.

    The epoch is a number to base 36. None when the id has another form.
    """
    parts = producer_id.split(b":", 3)
    try:
        return (parts[1], int(parts[2], 36)) if len(parts) == 4 and parts[2].isalnum() else None
    except ValueError:
        return None


class ProducerTable:
    """The last sequence of each producer.

    Of more than ``PRODUCERS_MAX`` the least recently used is forgotten. The producers of sinks, whose ids begin with
    ``sink:``, are counted apart: of more than ``SINK_PRODUCERS_MAX`` those go first that are of an epoch before the
    last two of their sink, else those that were used longest ago.
    """

    __slots__ = ("_holes", "_last", "_sinks")

    def __init__(self) -> None:
        self._last: dict[bytes, int] = {}  # least recently used first
        self._sinks: dict[bytes, int] = {}  # the same
        self._holes: dict[bytes, Ranges] = {}  # of very few

    def __len__(self) -> int:
        return len(self._last) + len(self._sinks)

    def items(self) -> Iterable[tuple[bytes, int]]:
        """Every producer and its last sequence, the least recently used first, those of sinks behind the others."""
        return chain(self._last.items(), self._sinks.items())

    def last(self, producer_id: bytes) -> int | None:
        """The last sequence of a producer; None when it is not known."""
        return self._room(producer_id).get(producer_id)

    def _room(self, producer_id: bytes) -> dict[bytes, int]:
        return self._sinks if producer_id.startswith(SINK_PREFIX) else self._last

    def holes(self, producer_id: bytes, first: int, end: int) -> Ranges:
        """Messages from ``first`` to ``end`` that are not in the log although later ones are."""
        found = [(max(first, start), min(end, stop)) for start, stop in self._holes.get(producer_id, ())]
        return [(start, stop) for start, stop in found if start < stop]

    def note(self, producer_id: bytes, first: int, last: int) -> None:
        """Remember that a producer's messages from ``first`` to ``last`` are in the log."""
        table = self._room(producer_id)
        before = table.pop(producer_id, None)
        if producer_id in self._holes and self._fill(producer_id, first, last + 1):
            assert before is not None, "there are holes"
            last = before
        table[producer_id] = last
        if len(self._last) > PRODUCERS_MAX:
            self._forget(self._last, [next(iter(table))])
        elif len(self._sinks) > SINK_PRODUCERS_MAX:
            self._forget(self._sinks, self._least_needed())

    def _forget(self, table: dict[bytes, int], producer_ids: Iterable[bytes]) -> None:
        for producer_id in producer_ids:
            del table[producer_id]
            self._holes.pop(producer_id, None)

    def _least_needed(self) -> list[bytes]:
        """Return producers of sinks to be forgotten: all whose epoch will not be repeated, then the least recent."""
        epochs = {producer_id: epoch_of(producer_id) for producer_id in self._sinks}
        latest: dict[bytes, int] = {}
        for found in epochs.values():
            if found is not None:
                latest[found[0]] = max(found[1], latest.get(found[0], 0))
        past = [each for each, found in epochs.items() if found and found[1] <= latest[found[0]] - _KEPT_EPOCHS]
        if len(past) >= _SINK_FORGOTTEN_MIN:
            return past
        is_past = set(past)
        others = (each for each in self._sinks if each not in is_past)
        return past + list(islice(others, _SINK_FORGOTTEN_MIN - len(past)))

    def _fill(self, producer_id: bytes, first: int, end: int) -> bool:
        """Take messages out of a hole; False when they are not in one."""
        holes = self._holes[producer_id]
        for index, (start, stop) in enumerate(holes):
            if start <= first and end <= stop:
                holes[index : index + 1] = [each for each in ((start, first), (end, stop)) if each[0] < each[1]]
                if not holes:
                    del self._holes[producer_id]
                return True
        return False

    def lack(self, producer_id: bytes, first: int, end: int) -> None:
        """Remember a hole."""
        holes = self._holes.setdefault(producer_id, [])
        holes.append((first, end))
        del holes[:-HOLES_MAX]

    def restored(self, producer_id: bytes, first: int, last: int, may_begin_anywhere: bool) -> None:
        """As :meth:`note`, of a batch that was found in the log.

        Args:
            may_begin_anywhere: nothing is missing before it, so what it begins with is what its producer began with.
        """
        before = self.last(producer_id)
        if before is None:
            before = first - 1 if may_begin_anywhere else 0
        if first > before + 1:
            self.lack(producer_id, before + 1, first)
        self.note(producer_id, first, last)

    def touch(self, producer_id: bytes) -> None:
        """Count a producer as used, if it is known."""
        table = self._room(producer_id)
        last = table.pop(producer_id, None)
        if last is not None:
            table[producer_id] = last


def encode_snapshot(log_id: int, sequence: int, table: ProducerTable) -> bytes:
    """Build a snapshot file: the table when the log ended before ``sequence``."""
    parts = [_HEADER.pack(_MAGIC, _VERSION, 0, log_id, sequence, len(table))]
    for producer_id, last in table.items():
        holes = table.holes(producer_id, 0, last)
        parts += (bytes((len(producer_id),)), producer_id, _LAST.pack(last, len(holes)))
        parts += [_HOLE.pack(*hole) for hole in holes]
    data = b"".join(parts)
    return data + _CRC.pack(crc32(data))


def decode_snapshot(data: bytes, log_id: int) -> tuple[int, ProducerTable] | None:
    """Read and verify a snapshot file: a sequence and the table; None when it is not good, or another log's."""
    body_size = len(data) - _CRC.size
    if body_size < _HEADER.size or _CRC.unpack_from(data, body_size)[0] != crc32(data[:body_size]):
        return None
    magic, version, reserved, its_log_id, sequence, count = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION or reserved or its_log_id != log_id:
        return None
    table = ProducerTable()
    position = _HEADER.size
    for _ in range(count):
        end = position + 1 + data[position]
        producer_id = data[position + 1 : end]
        last, hole_count = _LAST.unpack_from(data, end)
        table.note(producer_id, last, last)
        position = end + _LAST.size
        for _ in range(hole_count):
            table.lack(producer_id, *_HOLE.unpack_from(data, position))
            position += _HOLE.size
    return sequence, table


def write_snapshot(files: Files, directory: str, data: bytes) -> None:
    """Replace the snapshot of a log, durably. Blocks; for a worker thread.

    Raises:
        OSError: the one before is still there, or this one is.
    """
    replace_file(files, f"{directory}/{SNAPSHOT_NAME}", data)
    files.sync_directory(directory)


class ProducerMemory:
    """The table of one log, and how much of it the snapshot beside the log has.

    Attributes:
        table: what all batches of the log say.
        is_snapshot_due: whether the next sync of the log should write a snapshot.
        snapshot_error: why the last one could not be written; None when it could.
    """

    __slots__ = ("_saved_sequence", "_unsaved_bytes", "is_snapshot_due", "snapshot_error", "table")

    def __init__(self, table: ProducerTable | None = None, saved_sequence: int = 0, unsaved_bytes: int = 0) -> None:
        self.table = table or ProducerTable()
        self._saved_sequence = saved_sequence
        self._unsaved_bytes = unsaved_bytes
        self.is_snapshot_due = unsaved_bytes >= PRODUCERS_SNAPSHOT_BYTES
        self.snapshot_error: str | None = None

    def appended(self, producer_id: bytes, first: int, last: int, size: int) -> None:
        """Note that a batch of ``size`` bytes is in the log."""
        self.table.note(producer_id, first, last)
        self._unsaved_bytes += size
        if self._unsaved_bytes >= PRODUCERS_SNAPSHOT_BYTES:
            self.is_snapshot_due = True

    def needs(self, segment: Segment) -> bool:
        """Whether a segment says something that the snapshot does not: it must stay until the next one."""
        if not len(self.table) or not segment.has_producers or segment.end <= self._saved_sequence:
            return False
        self.is_snapshot_due = True
        return True

    @property
    def saved_sequence(self) -> int:
        """The end of the log as of the snapshot beside it; 0 without one."""
        return self._saved_sequence

    def begin_snapshot(self, log_id: int, sequence: int) -> bytes | None:
        """Build what is to be written once all below ``sequence``, where the log ends, is durable; None: nothing."""
        if not self.is_snapshot_due:
            return None
        self.is_snapshot_due = False
        self._unsaved_bytes = 0
        return encode_snapshot(log_id, sequence, self.table)

    def snapshot_ended(self, sequence: int, error: BaseException | None) -> None:
        """A snapshot was written, or could not be: then the next one has to do, as soon as it is wanted again."""
        self.snapshot_error = None if error is None else f"{SNAPSHOT_NAME} cannot be written: {error}"
        if error is None:
            self._saved_sequence = max(self._saved_sequence, sequence)


def table_before(table: ProducerTable, segments: Iterable[Segment], sequence: int) -> ProducerTable:
    """Build the table of a log that has nothing from ``sequence`` on.

    Args:
        table: what all batches of the log say.
        segments: of the log.
        sequence: first of a batch.
    """
    lost = _published_from(segments, sequence)
    left = ProducerTable()
    for producer_id, last in table.items():
        missing = _joined([*table.holes(producer_id, 0, last + 1), *lost.get(producer_id, ())])
        while missing and missing[-1][1] > last:
            last = min(last, missing.pop()[0] - 1)
        left.note(producer_id, last, last)
        for first, end in missing:
            left.lack(producer_id, first, end)
    return left


def _published_from(segments: Iterable[Segment], sequence: int) -> dict[bytes, Ranges]:
    """Find what each producer has published from ``sequence`` of the log on."""
    found: dict[bytes, Ranges] = {}
    for segment in segments:
        if segment.end <= sequence or not segment.has_producers:
            continue
        first_kept = segment.home.id_base | sequence
        for data, run, _ in segment.runs_from(
            partial(SparseIndex.before_sequence, sequence=sequence), READ_AHEAD_BYTES
        ):
            ends = [*run.first_ids[1:], run.next_id]
            for position, first_id, end_id in zip(run.positions, run.first_ids, ends, strict=True):
                published = producer_of(data, position) if first_id >= first_kept else None
                if published is not None:
                    producer_id, first = published
                    found.setdefault(producer_id, []).append((first, first + end_id - first_id))
    return found


def _joined(ranges: Ranges) -> Ranges:
    """Ranges in their order, neighbours as one."""
    joined: Ranges = []
    for first, end in sorted(ranges):
        if joined and joined[-1][1] >= first:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((first, end))
    return joined


def load(home: Home) -> tuple[int, ProducerTable]:
    """The snapshot of a log; sequence 0 and an empty table when there is none that can be used.

    Raises:
        StorageError: it is there and cannot be opened.
    """
    path = f"{home.directory}/{SNAPSHOT_NAME}"
    try:
        file = home.files.open(path)
    except FileNotFoundError:
        return 0, ProducerTable()
    except OSError as error:
        raise StorageError(f"{path}: cannot open: {error}") from error
    try:
        data = file.read_at(0, _SNAPSHOT_BYTES_MAX + 1)
    except OSError:
        data = b""  # as good as damaged
    finally:
        file.close()
    decoded = decode_snapshot(data, home.log_id)
    if decoded is None:
        reason = "damaged, or of another log; made again from what the log still has"
        home.report(Corruption(path, 0, len(data), reason, 0, 0, "header"))
        return 0, ProducerTable()
    return decoded


def restore(segments: Iterable[Segment], sequence: int, table: ProducerTable) -> ProducerMemory:
    """Bring a table up to date that says what stands below ``sequence``, with what the log has behind it."""
    unsaved_bytes = 0
    # What should come next. Retention drops nothing that a producer published and the snapshot does not have, so what
    # is missing in front of the oldest segment was lost.
    expected = max(sequence, 1)
    is_whole = True
    for segment in segments:
        if segment.end <= sequence:
            continue
        is_whole = is_whole and segment.first <= expected
        expected = segment.end
        if segment.has_producers:
            is_whole = _restore_from(segment, sequence, table, is_whole)
            unsaved_bytes += segment.size
    return ProducerMemory(table, sequence, unsaved_bytes)


def _restore_from(segment: Segment, sequence: int, table: ProducerTable, is_whole: bool) -> bool:
    """Read one segment; whether nothing is missing up to its end."""
    base = segment.home.id_base
    expected_id = base | max(sequence, segment.first)
    for data, run, _ in segment.runs_from(partial(SparseIndex.before_sequence, sequence=sequence), READ_AHEAD_BYTES):
        ends = [*run.first_ids[1:], run.next_id]
        for position, first_id, end_id in zip(run.positions, run.first_ids, ends, strict=True):
            if first_id < expected_id:
                continue  # below the snapshot
            is_whole = is_whole and first_id == expected_id
            expected_id = end_id
            found = producer_of(data, position)
            if found is not None:
                producer_id, first = found
                table.restored(producer_id, first, first + end_id - first_id - 1, is_whole)
    return is_whole and expected_id == base | segment.end
