"""What the tests of the partition log share: a disk, a log on it, and reading everything back in every way there is."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.sim.disk import CrashingDisk

from flintmq.batch import HEADER_BYTES, decode_batch
from flintmq.message import FRAME_OVERHEAD_BYTES, FRAME_TYPE_MESSAGE, MESSAGE_HEADER, hex_id, internal_id
from flintmq.storage import File, Files
from flintmq.storage.cache import ReadCache
from flintmq.storage.partition_log import Corruption, PartitionLog

DIRECTORY = "topics/t/3"
PARTITION = 3
CREATED_NS = 1_700_000_000_000_000_001


@dataclass
class ReadFaults:
    """Reads that fail: bytes of a file that come as an error, files that do not open."""

    bytes_unreadable: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    not_opening: dict[str, int] = field(default_factory=dict)
    read_count: int = 0

    def over(self, files: Files) -> Files:
        return FaultyFiles(files, self)

    def check(self, path: str, position: int, size: int) -> None:
        self.read_count += 1
        start, end, error = self.bytes_unreadable.get(path, (0, 0, 0))
        if position < end and start < position + size:
            raise OSError(error, os.strerror(error), path)


class FaultyFiles:
    def __init__(self, files: Files, faults: ReadFaults) -> None:
        self._files = files
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def open(self, path: str, create: bool = False) -> FaultyFile:
        error = self._faults.not_opening.get(path)
        if error:
            raise OSError(error, os.strerror(error), path)
        return FaultyFile(self._files.open(path, create), self._faults.check)


class FaultyFile:
    def __init__(self, file: File, check: Callable[[str, int, int], None]) -> None:
        self._file = file
        self._check = check

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read_at(self, position: int, size: int) -> bytes:
        self._check(self._file.path, position, size)
        return self._file.read_at(position, size)


@dataclass
class Kit:
    """A disk that outlives the logs opened on it, and what they reported."""

    disk: CrashingDisk = field(default_factory=CrashingDisk)
    segment_bytes: int = 1000
    reports: list[Corruption] = field(default_factory=list)
    all_reports: list[Corruption] = field(default_factory=list)
    cache: ReadCache = field(default_factory=ReadCache)
    faults: ReadFaults | None = None

    def open(self, next_sequence_min: int = 1, cache: ReadCache | None = None) -> PartitionLog:
        """Open the log as a new process would, ending the one before without a fault."""
        self.disk.release()
        self.cache = cache or ReadCache()
        self.reports.clear()
        files: Files = self.disk.attach()
        return PartitionLog.open(
            files if self.faults is None else self.faults.over(files),
            DIRECTORY,
            partition=PARTITION,
            segment_bytes=self.segment_bytes,
            cache=self.cache,
            report=self._report,
            created_ns=CREATED_NS,
            next_sequence_min=next_sequence_min,
        )

    def _report(self, corruption: Corruption) -> None:
        self.reports.append(corruption)
        self.all_reports.append(corruption)

    def files(self) -> Files:
        """The disk for whoever comes between two processes."""
        self.disk.release()
        return self.disk.attach()

    def kinds(self) -> list[str]:
        return [report.kind for report in self.reports]

    def lost(self) -> set[int]:
        """Sequences that were reported as gone."""
        return {n for report in self.reports for n in range(report.first_sequence_lost, report.end_sequence_lost)}

    def logs(self) -> list[str]:
        return [path for path in self.disk.paths() if path.endswith(".log")]

    def path(self, first: int, suffix: str = ".log") -> str:
        return f"{DIRECTORY}/{first:020d}{suffix}"


def sync(log: PartitionLog) -> None:
    """Sync everything, as the daemon does from its worker thread."""
    while (ticket := log.begin_sync()) is not None:
        error: OSError | None = None
        try:
            ticket.run()
        except OSError as failure:
            error = failure
        log.finish_sync(ticket, error)


def bodies_of(data: bytes | memoryview) -> dict[int, bytes]:
    """Messages of batches one after the other, by sequence, every field of every frame checked."""
    found: dict[int, bytes] = {}
    position = 0
    while position < len(data):
        batch = decode_batch(bytes(data[position : position + len(data)]), 0)
        positions = batch.positions()
        for number in range(batch.end - batch.first):
            frame = bytes(batch.data[batch.frames_at + positions[number] : batch.frames_at + positions[number + 1]])
            size, kind, timestamp, attempts, message_id = MESSAGE_HEADER.unpack_from(frame)
            sequence = batch.first + number
            assert size == len(frame) - 4
            assert kind == FRAME_TYPE_MESSAGE
            assert attempts == 1
            assert message_id == hex_id(internal_id(PARTITION, sequence))
            assert batch.header.timestamp_min <= timestamp <= batch.header.timestamp_max
            assert sequence not in found
            found[sequence] = frame[FRAME_OVERHEAD_BYTES:]
        position += HEADER_BYTES + batch.header.payload_size
    return found


def read_all(log: PartitionLog, start: int = 0) -> dict[int, bytes]:
    """Everything from ``start`` on by :meth:`PartitionLog.read`, batch by batch."""
    found: dict[int, bytes] = {}
    sequence = start or log.start_sequence
    while (batch := log.read(sequence)) is not None:
        assert batch.end > sequence, "reading goes on"
        found.update(bodies_of(batch.data))
        sequence = batch.end
    assert sequence <= log.next_sequence
    return found


def fetch_all(log: PartitionLog, start: int = 0, bytes_max: int = 700) -> dict[int, bytes]:
    """Everything committed from ``start`` on by :meth:`PartitionLog.fetch`."""
    found: dict[int, bytes] = {}
    sequence = start or log.start_sequence
    while sequence < log.committed_sequence:
        data, following = log.fetch(sequence, log.committed_sequence, bytes_max)
        assert following > sequence, "fetching goes on"
        found.update(bodies_of(data))
        sequence = following
    return found


def read_randomly(log: PartitionLog, sequences: list[int]) -> dict[int, bytes]:
    """What :meth:`PartitionLog.read` returns for single sequences, in the order given."""
    found: dict[int, bytes] = {}
    for sequence in sequences:
        batch = log.read(sequence)
        if batch is not None:
            assert batch.end > sequence
            found.update(bodies_of(batch.data))
    return found


def fill(log: PartitionLog, batches: int, start: int = 0) -> dict[int, bytes]:
    """Append batches of every shape: one message, equal sizes, different sizes, empty bodies, deferred ones."""
    model: dict[int, bytes] = {}
    for number in range(start, start + batches):
        kind = number % 5
        if kind == 0:
            bodies = [b"single %d" % number]
        elif kind == 1:
            bodies = [b"uniform %04d-%d" % (number, i) for i in range(4)]
        elif kind == 2:
            bodies = [b"mixed %d" % number + b"m" * i * 3 for i in range(3)]
        elif kind == 3:
            bodies = [b"", b""]
        else:
            bodies = [b"deferred %d" % number]
        first = log.append(bodies, 1000 + number, due_ns=10**18 if kind == 4 else 0)
        model.update(enumerate(bodies, first))
    return model
