"""Reading what NSQ's nsqd left on disk: the queue files of its topics and channels. Nothing here writes.

Files of one queue, ``NAME`` being ``topic`` or ``topic:channel`` (``;`` where a file name cannot have a colon)::

    NAME.diskqueue.000000.dat ...      records, 6 digits or more
    NAME.diskqueue.meta.dat            "depth\\nread_file,read_position\\nwrite_file,write_position\\n"

Record (big-endian)::

    0        4                12        14               30
    +--------+----------------+---------+----------------+------
    | length | timestamp_ns   | attempts| message id     | body
    +--------+----------------+---------+----------------+------
    length counts everything after itself: 26 + len(body)

Rules of this file: files are read in pieces of :data:`CHUNK_BYTES`, so that memory does not grow with a queue; what is
wrong with a file is reported with its position and ends the reading of that file, not of the queue; the depth in the
meta file is not believed, nsqd counts it from memory.

Source: NSQ's data files.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from struct import Struct

from flintmq.limits import ATTEMPTS_MAX, BATCH_SIZE_MAX, MESSAGE_ID_SIZE
from flintmq.storage import File, Files

CHUNK_BYTES = 1024 * 1024
CHUNK_COUNT_MAX = 16_384  # messages handed over at once
META_BYTES_MAX = 4096
RECORD_LENGTH_MAX = BATCH_SIZE_MAX - 1024  # what a batch of one message can hold
_RECORD = Struct(">iQH")  # length, timestamp_ns, attempts
_LENGTH = Struct(">i")
_HEADER_BYTES = 8 + 2 + MESSAGE_ID_SIZE  # what the length counts beside the body
_BODY_AT = 4 + _HEADER_BYTES
_FILE_NAME = re.compile(r"(?P<queue>.+)\.diskqueue\.(?P<part>\d{6,}|meta)\.dat(?P<rest>\..+)?\Z", re.DOTALL)
_META = re.compile(rb"(-?\d+)\n(\d+),(\d+)\n(\d+),(\d+)\n?\Z")
assert _HEADER_BYTES == 26


@dataclass(slots=True)
class Queue:
    """The files of one queue.

    Attributes:
        name: what the file names begin with.
        topic, channel: whose queue it is; ``channel`` is None for the topic's own.
        numbers: of its data files, ascending, with the name of each.
        meta: name of the meta file; empty when there is none.
        others: leftovers beside them: files being written when nsqd died, ``.bad`` files.
    """

    name: str
    topic: str
    channel: str | None
    numbers: dict[int, str] = field(default_factory=dict)
    meta: str = ""
    others: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Meta:
    """A meta file: where nsqd goes on reading and writing; how many messages it says there are, for people only."""

    read_file: int
    read_position: int
    write_file: int
    write_position: int
    depth: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Fault:
    """Something of a queue that cannot be taken.

    Attributes:
        path: the file.
        position: byte position of the record, or where reading begins when it is about the whole file.
        reason: what is wrong, and what became of the rest.
    """

    path: str
    position: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path} at byte {self.position}: {self.reason}"


@dataclass(slots=True)
class Chunk:
    """Consecutive messages of one file.

    Attributes:
        stamps: (timestamp_ns, attempts of the next delivery) of each.
        bodies: their bodies.
        size_bytes: what they take up in the file.
    """

    stamps: list[tuple[int, int]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    size_bytes: int = 0


def find_queues(names: Iterable[str]) -> list[Queue]:
    """Return the queues among the names of a directory, sorted by name."""
    queues: dict[str, Queue] = {}
    for name in sorted(names):
        match = _FILE_NAME.match(name)
        if match is None or not name.isascii():
            continue  # nsqd gives no other names
        queue = queues.get(match["queue"])
        if queue is None:
            topic, separator, channel = match["queue"].replace(";", ":").partition(":")
            queue = queues[match["queue"]] = Queue(match["queue"], topic, channel if separator else None)
        if match["rest"]:
            queue.others.append(name)
        elif match["part"] == "meta":
            queue.meta = name
        else:
            queue.numbers[int(match["part"])] = name
    for queue in queues.values():
        queue.numbers = dict(sorted(queue.numbers.items()))
    return list(queues.values())


def parse_meta(data: bytes) -> Meta | None:
    """Return the content of a meta file; None when it is not one."""
    match = _META.match(data)
    if match is None:
        return None
    depth, read_file, read_position, write_file, write_position = map(int, match.groups())
    return Meta(read_file, read_position, write_file, write_position, depth)


def unread(queue: Queue, sizes: dict[int, int], meta: Meta | None) -> tuple[list[tuple[int, int]], str]:
    """Return the data files with what was not read yet, each from which byte on; and why the meta file is not believed.

    Args:
        sizes: of the data files, by number.
        meta: None when it is missing or unreadable: then everything there is counts; better delivered again than
            lost.
    """
    numbers = list(queue.numbers)
    if meta is None:
        doubt = "no meta file, or one that cannot be read" if numbers else ""
    elif (meta.read_file, meta.read_position) > (meta.write_file, meta.write_position):
        doubt = "the meta file says that more was read than written"
    elif meta.read_position > sizes.get(meta.read_file, meta.read_position):
        doubt = f"the meta file says that byte {meta.read_position} of file {meta.read_file} was read, which it has not"
    elif numbers and numbers[-1] < meta.read_file and (meta.read_file, 0) != (meta.write_file, meta.write_position):
        doubt = f"the meta file begins with file {meta.read_file}, and there are only older ones"
    else:
        doubt = ""
    if doubt or meta is None:
        return [(number, 0) for number in numbers], doubt
    found = [number for number in numbers if number >= meta.read_file]
    return [(number, meta.read_position if number == meta.read_file else 0) for number in found], ""


def read_records(
    files: Files, path: str, position: int, message_size_max: int, report: Callable[[Fault], None]
) -> Iterator[Chunk]:
    """Yield the messages of a data file from ``position`` to its end, also beyond what the meta file knows.

    Args:
        message_size_max: larger messages are reported and left out.

    Raises:
        OSError: the file cannot be opened or read.
    """
    file = files.open_to_read(path)
    try:
        yield from _Reader(file, path, message_size_max, report).chunks(position)
    finally:
        file.close()


class _Reader:
    """Reads one data file; ``_position`` is where the next record begins."""

    def __init__(self, file: File, path: str, message_size_max: int, report: Callable[[Fault], None]) -> None:
        self._file = file
        self._path = path
        self._length_max = min(message_size_max + _HEADER_BYTES, RECORD_LENGTH_MAX)
        self._report = report
        self._position = 0
        self._end = file.size()

    def chunks(self, position: int) -> Iterator[Chunk]:
        self._position = position
        size = CHUNK_BYTES
        while self._position < self._end:
            data = self._file.read_at(self._position, size)
            if len(data) < min(size, self._end - self._position):
                raise OSError(errno.EIO, "the file became shorter while it was read", self._path)
            chunk, length = self._parse(data)
            if chunk.bodies:
                self._position += chunk.size_bytes
                yield chunk
            size = CHUNK_BYTES
            if length is None:
                if chunk.bodies:
                    continue  # the next read begins with the record that was cut off
                self._fault(f"{self._end - self._position} bytes at the end are not a record")
                return
            if length < _HEADER_BYTES or not self._fits(length):
                self._fault(self._why_bad(length))
                return
            if length > self._length_max:
                if not self._is_record(self._position + 4 + length):
                    self._fault(f"length {length} is not a record's; the rest of the file is left out")
                    return
                self._fault(
                    f"a message of {length - _HEADER_BYTES} bytes is larger than --max-msg-size="
                    f"{self._length_max - _HEADER_BYTES}; it is left out"
                )
                self._position += 4 + length
                continue
            size = max(CHUNK_BYTES, 4 + length)

    def _parse(self, data: bytes) -> tuple[Chunk, int | None]:
        """Return the records at the start of ``data``, and the length field of the first that is not whole or good."""
        chunk = Chunk()
        stamps, bodies = chunk.stamps, chunk.bodies
        unpack, length_max, size = _RECORD.unpack_from, self._length_max, len(data)
        at = 0
        while at + _BODY_AT <= size and len(bodies) < CHUNK_COUNT_MAX:
            length, timestamp_ns, attempts = unpack(data, at)
            following = at + 4 + length
            if length < _HEADER_BYTES or length > length_max or following > size:
                chunk.size_bytes = at
                return chunk, length
            stamps.append((timestamp_ns, attempts + 1 if attempts < ATTEMPTS_MAX else attempts))
            bodies.append(data[at + _BODY_AT : following])
            at = following
        chunk.size_bytes = at
        if len(bodies) == CHUNK_COUNT_MAX or size - at < 4:
            return chunk, None
        # too few bytes for a record: either the piece ends here, or the file does
        return chunk, _LENGTH.unpack_from(data, at)[0]

    def _fits(self, length: int) -> bool:
        return length <= RECORD_LENGTH_MAX and self._position + 4 + length <= self._end

    def _is_record(self, position: int) -> bool:
        """Whether a record may begin there: tells a length that is only too large from one that is nonsense."""
        if position == self._end:
            return True
        data = self._file.read_at(position, 4)
        if len(data) < 4:
            return False
        length: int = _LENGTH.unpack(data)[0]
        return _HEADER_BYTES <= length <= RECORD_LENGTH_MAX and position + 4 + length <= self._end

    def _why_bad(self, length: int) -> str:
        left = self._end - self._position
        if _HEADER_BYTES <= length <= self._length_max:
            return f"a record of {4 + length} bytes is cut off, the file has {left} more"
        return f"length {length} is not a record's; the rest of the file, {left} bytes, is left out"

    def _fault(self, reason: str) -> None:
        self._report(Fault(self._path, self._position, reason))
