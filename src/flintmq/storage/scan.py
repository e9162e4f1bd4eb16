"""Finding batches in bytes: the verified walk (hot), the unverified hop, the search for the next batch behind damage.

Rules of this file: no IO of its own (bytes come from a ``read(position, size)`` handed in); no object per batch;
nothing is believed without its CRC, except by :func:`hop`, whose result must be walked.

A batch behind damage is accepted by the first of these that holds, and its CRC in any case:

1. it stands where the walk stopped: the file lost bytes, the sequence jumps;
2. it stands where the damaged batch says it ends, and carries on the damaged batch's ids;
3. it is *consistent*: the bytes skipped equal the frame bytes lost (difference of ``offset_bytes``) plus the header,
   prefix and size table of at least one and at most each lost message. A message whose body is itself a batch (a copy
   of some log) fails this, so it is not taken for ours. Earlier batches that lead to it without a gap are accepted with
   it;
4. for files whose bytes were shifted: it is consistent but for ``SHIFT_BYTES_MAX``, and a verified batch, or the end of
   the file, follows on it.

Source: docs/decisions/0001.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from struct import Struct

from flintmq.batch import (
    FLAGS_POSITION,
    HEADER_BYTES,
    KNOWN_FLAGS,
    MAGIC,
    PREFIX_BYTES_MAX,
    PRODUCER,
    UNIFORM,
    VERSION,
    is_possible_prefix,
)
from flintmq.checksum import crc32
from flintmq.limits import BATCH_SIZE_MAX, RESYNC_CRC_BYTES_MAX, SEQUENCE_BITS
from flintmq.message import FRAME_OVERHEAD_BYTES

Read = Callable[[int, int], bytes]

# beginning (magic, version, flags, prefix), payload_size, count, first_id, offset_bytes, timestamp_max, crc
_FIELDS = Struct(">8sIIQQ8xQ20xI")
_SYNCED_BEFORE = Struct(">Q")
_SYNCED_BEFORE_POSITION = 48
_CRC_POSITION = HEADER_BYTES - 4
_PREFIX_POSITION = 6
_BEGINNINGS = frozenset(
    MAGIC + bytes((VERSION, flags, 0, prefix_bytes))
    for flags in range(KNOWN_FLAGS + 1)
    for prefix_bytes in range(PREFIX_BYTES_MAX + 1)
    if is_possible_prefix(flags, prefix_bytes)
)
_SEARCH_BYTES_FIRST = 16 * 1024  # the next good batch is near, as a rule
_SEARCH_BYTES = 1024 * 1024
SHIFT_BYTES_MAX = 1024 * 1024
SIZE_TABLE_ENTRY_BYTES = 4
assert _FIELDS.size == HEADER_BYTES


@dataclass(slots=True)
class Run:
    """Good batches in a row; one entry per batch in each list.

    Attributes:
        positions: where each batch starts in the data.
        first_ids: the internal id of its first message.
        timestamps: its latest timestamp in ns.
        position: where the first byte after the run is.
        next_id: one past the last id of the run.
    """

    positions: list[int] = field(default_factory=list)
    first_ids: list[int] = field(default_factory=list)
    timestamps: list[int] = field(default_factory=list)
    position: int = 0
    next_id: int = 0


def walk(data: bytes, position: int, next_id: int, stop_id: int) -> Run:
    """Verify batches from ``position`` while they are whole, good and carry on ``next_id``.

    Args:
        stop_id: no batch is looked at that starts at or beyond it.
    """
    unpack = _FIELDS.unpack_from
    beginnings = _BEGINNINGS
    view = memoryview(data)
    size = len(data)
    last_header = size - HEADER_BYTES
    run = Run()
    add_position = run.positions.append
    add_id = run.first_ids.append
    add_timestamp = run.timestamps.append
    while position <= last_header and next_id < stop_id:
        beginning, payload_size, count, first_id, _offset, timestamp, crc = unpack(data, position)
        payload_at = position + HEADER_BYTES
        end = payload_at + payload_size
        if first_id != next_id or beginning not in beginnings or end > size or not count:
            break
        if crc32(view[payload_at:end], crc32(data[position : position + _CRC_POSITION])) != crc:
            break
        add_position(position)
        add_id(first_id)
        add_timestamp(timestamp)
        position = end
        next_id = first_id + count
    run.position = position
    run.next_id = next_id
    return run


def has_producers(data: bytes, run: Run) -> bool:
    """Whether a batch of a run found in ``data`` says who published it."""
    return any(data[position + FLAGS_POSITION] & PRODUCER for position in run.positions)


def hop(data: bytes, position: int, next_id: int, wanted_id: int) -> tuple[int, int]:
    """Skip batches that end at or before ``wanted_id`` by their unverified headers.

    Returns where it stopped and the id expected there. It stops before anything that does not look like the next batch,
    and at the end of the data.
    """
    unpack = _FIELDS.unpack_from
    size = len(data)
    last_header = size - HEADER_BYTES
    while position <= last_header:
        beginning, payload_size, count, first_id, *_ = unpack(data, position)
        end = position + HEADER_BYTES + payload_size
        if first_id != next_id or beginning not in _BEGINNINGS or end > size or first_id + count > wanted_id:
            break
        position = end
        next_id = first_id + count
    return position, next_id


def skim(data: bytes, position: int, next_id: int, wanted_id: int, stop_id: int) -> tuple[int, int]:
    """Go over batches by their unverified headers, to the last that may be handed out to who verifies them.

    Args:
        wanted_id: no batch is taken that starts at or beyond it.
        stop_id: nor one that ends beyond it.

    Returns:
        Where it stopped and the id expected there; as for :func:`hop` that is before anything that looks wrong.
    """
    unpack = _FIELDS.unpack_from
    beginnings = _BEGINNINGS
    size = len(data)
    last_header = size - HEADER_BYTES
    while position <= last_header and next_id < wanted_id:
        beginning, payload_size, count, first_id, *_ = unpack(data, position)
        end = position + HEADER_BYTES + payload_size
        following = first_id + count
        if first_id != next_id or beginning not in beginnings or end > size or not count or following > stop_id:
            break
        position = end
        next_id = following
    return position, next_id


@dataclass(slots=True, frozen=True)
class Claim:
    """The claims of the header at a position, plausible but not verified."""

    position: int
    size: int
    first_id: int
    end_id: int
    offset_bytes: int
    end_offset_bytes: int
    synced_before: int
    crc: int

    @property
    def end_position(self) -> int:
        return self.position + self.size


def claim_at(data: bytes, at: int, position: int, id_base: int) -> Claim | None:
    """Read the header at ``data[at:]``; None when no writer of this partition produces it.

    Args:
        position: what to call that place in the claim: its position in the file.
        id_base: internal id of sequence 0 of the partition.
    """
    if at < 0 or len(data) - at < HEADER_BYTES:
        return None
    beginning, payload_size, count, first_id, offset_bytes, _timestamp, crc = _FIELDS.unpack_from(data, at)
    if beginning not in _BEGINNINGS or not 0 < payload_size <= BATCH_SIZE_MAX:
        return None
    table_bytes = 0 if beginning[FLAGS_POSITION] & UNIFORM else count * SIZE_TABLE_ENTRY_BYTES
    frame_bytes = payload_size - table_bytes - beginning[_PREFIX_POSITION + 1]
    if not 0 < count <= frame_bytes // FRAME_OVERHEAD_BYTES or first_id >> SEQUENCE_BITS != id_base >> SEQUENCE_BITS:
        return None
    size = HEADER_BYTES + payload_size
    (synced_before,) = _SYNCED_BEFORE.unpack_from(data, at + _SYNCED_BEFORE_POSITION)
    end_offset_bytes = offset_bytes + frame_bytes
    return Claim(position, size, first_id, first_id + count, offset_bytes, end_offset_bytes, synced_before, crc)


@dataclass(slots=True, frozen=True)
class Anchor:
    """The end of the last good batch: its byte position in the file and its virtual position in the log."""

    position: int
    offset_bytes: int


class Search:
    """Looks for the next good batch behind damage in one file.

    Args:
        read: returns ``size`` bytes from a position, fewer only at the end of the file.
        size: of the file, in bytes.
        id_base: internal id of sequence 0 of the partition.
    """

    def __init__(self, read: Read, size: int, id_base: int) -> None:
        self._read = read
        self._size = size
        self._id_base = id_base
        # A body full of plausible headers must not make start-up quadratic.
        self._doubtful_bytes_left = RESYNC_CRC_BYTES_MAX
        self._pattern = _header_pattern(id_base)

    def next_batch(self, position: int, expected_id: int, anchor: Anchor | None) -> Claim | None:
        """The first verified batch at or after ``position`` with an id of at least ``expected_id``; None without one.

        Args:
            anchor: None when nothing good stands before ``position`` and its virtual position is unknown.
        """
        here = self._claim(position)
        if here is not None:
            if here.first_id >= expected_id and self._verified(here):
                return here
            after = self._claim(here.end_position)
            if after is not None and after.first_id == here.end_id >= expected_id and self._verified(after):
                return after
        if anchor is not None:
            for claim in self._claims_after(position):
                if _is_consistent(claim, expected_id, anchor, 0) and self._is_good(claim):
                    return self._earlier(position, expected_id, claim) or claim
        for claim in self._claims_after(position):
            if claim.first_id < expected_id:
                continue
            if anchor is not None and not _is_consistent(claim, expected_id, anchor, SHIFT_BYTES_MAX):
                continue
            if self._is_followed(claim) and self._afford(claim) and self._verified(claim):
                following = self._claim(claim.end_position)
                if following is None or self._verified(following):
                    return claim
        return None

    def _is_good(self, claim: Claim) -> bool:
        return claim.end_position <= self._size and (
            (self._is_followed(claim) or self._afford(claim)) and self._verified(claim)
        )

    def _afford(self, claim: Claim) -> bool:
        self._doubtful_bytes_left -= claim.size
        return self._doubtful_bytes_left >= 0

    def _earlier(self, position: int, expected_id: int, known: Claim) -> Claim | None:
        """The first batch after ``position`` from which verified ones lead to ``known`` without a gap."""
        for claim in self._claims_after(position):
            if claim.position >= known.position:
                break
            if expected_id <= claim.first_id < known.first_id and self._leads_to(claim, known):
                return claim
        return None

    def _leads_to(self, claim: Claim, known: Claim) -> bool:
        step: Claim | None = claim
        while step is not None and step.end_position <= known.position:
            if not self._afford(step) or not self._verified(step):
                return False
            if step.end_position == known.position:
                return step.end_id == known.first_id
            following = self._claim(step.end_position)
            step = following if following is not None and following.first_id == step.end_id else None
        return False

    def _claim(self, position: int) -> Claim | None:
        if position + HEADER_BYTES > self._size:
            return None
        return claim_at(self._read(position, HEADER_BYTES), 0, position, self._id_base)

    def _verified(self, claim: Claim) -> bool:
        if claim.end_position > self._size:
            return False
        data = self._read(claim.position, claim.size)
        if len(data) < claim.size:
            return False
        view = memoryview(data)
        return crc32(view[HEADER_BYTES:], crc32(view[:_CRC_POSITION])) == claim.crc

    def _is_followed(self, claim: Claim) -> bool:
        """Whether the end of the file, or what may be the next batch, comes behind it; unverified."""
        if claim.end_position == self._size:
            return True
        following = self._claim(claim.end_position)
        return following is not None and following.first_id == claim.end_id

    def _claims_after(self, position: int) -> Iterator[Claim]:
        start = position + 1
        size = _SEARCH_BYTES_FIRST
        while start + HEADER_BYTES <= self._size:
            data = self._read(start, size + HEADER_BYTES - 1)
            size = min(size * 4, _SEARCH_BYTES)
            for match in self._pattern.finditer(data):
                claim = claim_at(data, match.start(), start + match.start(), self._id_base)
                if claim is not None:
                    yield claim
            if len(data) < HEADER_BYTES:
                return
            # every header that starts in the last 71 bytes is cut off here and whole in the next piece
            start += len(data) - HEADER_BYTES + 1


def _header_pattern(id_base: int) -> re.Pattern[bytes]:
    partition = id_base >> SEQUENCE_BITS
    high, low = divmod(partition << 2, 256)
    flags = b"[\\x00-" + re.escape(bytes((KNOWN_FLAGS,))) + b"]"
    identity = re.escape(bytes((high,))) + b"[" + re.escape(bytes((low,))) + b"-" + re.escape(bytes((low | 3,))) + b"]"
    prefix = b"\\x00[\\x00-" + re.escape(bytes((PREFIX_BYTES_MAX,))) + b"]"
    following = re.escape(bytes((VERSION,))) + flags + prefix + b".{8}" + identity
    return re.compile(MAGIC + b"(?=" + following + b")", re.DOTALL)


def _is_consistent(claim: Claim, expected_id: int, anchor: Anchor, shift_bytes: int) -> bool:
    lost = claim.first_id - expected_id
    frame_bytes = claim.offset_bytes - anchor.offset_bytes
    header_bytes = claim.position - anchor.position - frame_bytes
    return (
        lost >= (0 if shift_bytes else 1)
        and frame_bytes >= lost * FRAME_OVERHEAD_BYTES
        and -shift_bytes <= header_bytes - HEADER_BYTES
        and header_bytes <= lost * (HEADER_BYTES + PREFIX_BYTES_MAX + SIZE_TABLE_ENTRY_BYTES) + shift_bytes
    )


def why_not(data: bytes, next_id: int, id_base: int, left: int) -> str:
    """Say in words why the bytes at the start of ``data`` are not the batch that begins with ``next_id``.

    Args:
        left: bytes from there to the end of the file.
    """
    claim = claim_at(data, 0, 0, id_base)
    if claim is None:
        return (
            "not a batch header"
            if len(data) >= HEADER_BYTES
            else f"{left} bytes left, a batch header has {HEADER_BYTES}"
        )
    if claim.first_id < next_id:
        return f"batch of sequence {claim.first_id - id_base} where {next_id - id_base} was expected"
    if claim.size > left:
        return f"cut short: {left} of {claim.size} bytes"
    return "CRC mismatch"
