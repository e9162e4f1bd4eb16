"""From stored batches to Arrow record batches, without a Python step per message.

A fetch answer holds whole batches (``flintmq/batch.py``), verified here by their CRC. Per batch there is a little
Python; per message there is only numpy: where each frame starts is computed for all messages of the answer, and every
column is gathered from these positions.

::

    answer   | header | frame | frame | ... | header | sizes | frame | frame | ...
    positions           ^p0     ^p1                            ^p2     ^p3

The rules of this file: a column nobody asked for is not built; nothing returned refers to the answer's memory, so its
buffer is used again for the next one.

Source: docs/decisions/0006 (binary_view over the raw buffer), docs/decisions/0001.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flintmq.batch import (
    EXTENDED,
    HEADER,
    HEADER_BYTES,
    KNOWN_FLAGS,
    LAYOUT_FLAGS,
    MAGIC,
    RAW_IDS,
    UNIFORM,
    VERSION,
    BatchError,
    decode_header,
    is_possible_prefix,
    verify,
)
from flintmq.checksum import crc32
from flintmq.limits import MESSAGE_ID_SIZE, SEQUENCE_MAX
from flintmq.message import ATTEMPTS_POSITION, FRAME_OVERHEAD_BYTES, HEADERS, ID_POSITION, NO_HEADERS, TRACE_ID_SIZE
from flintmq.spark.broker import PAD_BYTES
from flintmq.spark.headers import HeaderMaps
from flintmq.spark.schema import arrow_schema

_HEAD_POSITION = 8  # of the timestamp
_HEAD = np.dtype(
    {
        "names": ["timestamp", "attempts", "id", "trace_id", "body"],
        "formats": [">u8", ">u2", f"V{MESSAGE_ID_SIZE}", ">u8", "<i4"],
        "offsets": [
            position - _HEAD_POSITION
            for position in (
                _HEAD_POSITION,
                ATTEMPTS_POSITION,
                ID_POSITION,
                ID_POSITION + TRACE_ID_SIZE,
                FRAME_OVERHEAD_BYTES,
            )
        ],
    }
)
"""The part of a frame before its body, and four bytes of that, from ``_HEAD_POSITION`` on.

The trace id is the second half of the id, where ids are raw.
"""
VIEW_INLINE_MAX = 12  # a binary_view of up to 12 bytes holds the bytes themselves

assert PAD_BYTES >= VIEW_INLINE_MAX  # short bodies at the very end are gathered 12 bytes at a time

Int64s = npt.NDArray[np.int64]


@dataclass(slots=True)
class Messages:
    """The messages of one answer: one entry per message, positions counted from the start of the answer.

    ``body_sizes`` count headers as well. ``layouts`` are the flags of batches that say how frames are laid out; None
    when they have neither trace ids nor headers. ``gaps`` are the sequences in the range asked for that the answer
    proves absent.
    """

    positions: Int64s
    body_sizes: Int64s
    sequences: Int64s
    internal_ids: Int64s
    layouts: npt.NDArray[np.uint8] | None
    gaps: list[tuple[int, int]]


class _Run(NamedTuple):
    """One batch, trimmed to the range asked for; ``stride`` is 0 where frames differ in size."""

    message_count: int
    base: int
    stride: int
    first_sequence: int
    first_id: int
    layout: int


def locate(answer: memoryview, start: int, end: int, next_sequence: int) -> Messages:
    """Verify the batches in ``answer`` and find the messages ``start`` to ``end`` (exclusive).

    Args:
        answer: whole batches in order of sequence.
        next_sequence: where nsqd says to go on; all before it that no batch holds is gone.

    Raises:
        BatchError: a batch is damaged, or the batches are not in order.
    """
    runs: list[_Run] = []
    sizes_of: dict[int, Int64s] = {}
    gaps: list[tuple[int, int]] = []
    expected = start
    position = 0
    while position < len(answer):
        run, position_after = _read_run(answer, position)
        run_end = run.first_sequence + run.message_count
        if run_end <= expected:
            if runs:
                raise BatchError(f"batch of sequences up to {run_end} follows one that ends at {expected}")
            position = position_after
            continue
        if run.first_sequence >= end:
            break
        if run.first_sequence > expected:
            gaps.append((expected, run.first_sequence))
            expected = run.first_sequence
        sizes = None if run.stride else _read_sizes(answer, run, position_after)
        if run.first_sequence < expected or run_end > end:
            run, sizes = _trim(run, sizes, expected, min(end, run_end))
        if sizes is not None:
            sizes_of[len(runs)] = sizes
        runs.append(run)
        expected = run.first_sequence + run.message_count
        position = position_after
    reached = min(end, next_sequence)
    if reached > expected:
        gaps.append((expected, reached))
    return _expand(runs, sizes_of, gaps)


def _read_run(answer: memoryview, position: int) -> tuple[_Run, int]:
    """Verify one batch; returns it and where the next one begins.

    This is the only Python that runs per batch, and a batch may hold a single message: so the header is taken apart
    here, and :func:`decode_header`, which says what is wrong, is asked only when something is.
    """
    if len(answer) - position < HEADER_BYTES:
        raise BatchError(f"{len(answer) - position} bytes left, a batch header has {HEADER_BYTES}")
    fields = HEADER.unpack_from(answer, position)
    magic, version, flags, prefix_bytes, payload_size, count, first_id = fields[:7]
    payload = position + HEADER_BYTES
    after = payload + payload_size
    sizes = payload + prefix_bytes
    frame_bytes = payload_size - prefix_bytes
    if (
        magic != MAGIC
        or version != VERSION
        or flags & ~KNOWN_FLAGS
        or not is_possible_prefix(flags, prefix_bytes)
        or not 0 < count * FRAME_OVERHEAD_BYTES <= frame_bytes <= len(answer) - sizes
    ):
        verify(answer, decode_header(answer, position), position)
        raise BatchError("a header that cannot be")
    if crc32(answer[payload:after], crc32(answer[position : payload - 4])) != fields[-1]:
        raise BatchError(f"the CRC of the batch of message {first_id & SEQUENCE_MAX} does not fit its bytes")
    if not flags & UNIFORM:
        return _Run(count, sizes + 4 * count, 0, first_id & SEQUENCE_MAX, first_id, flags & LAYOUT_FLAGS), after
    stride = frame_bytes // count
    if stride * count != frame_bytes:
        raise BatchError(f"{frame_bytes} bytes cannot be {count} frames of one size")
    return _Run(count, sizes, stride, first_id & SEQUENCE_MAX, first_id, flags & LAYOUT_FLAGS), after


def _read_sizes(answer: memoryview, run: _Run, after: int) -> Int64s:
    """Return the table of frame sizes that stands before the frames of a batch."""
    sizes = np.frombuffer(answer, ">u4", run.message_count, run.base - 4 * run.message_count).astype(np.int64)
    if int(sizes.sum()) != after - run.base or int(sizes.min()) < FRAME_OVERHEAD_BYTES:
        raise BatchError("the table of sizes does not fit the frames")
    return sizes


def _trim(run: _Run, sizes: Int64s | None, start: int, end: int) -> tuple[_Run, Int64s | None]:
    """Keep the messages ``start`` to ``end`` (exclusive) of a batch."""
    skip = max(0, start - run.first_sequence)
    count = end - run.first_sequence - skip
    base = run.base + (skip * run.stride if sizes is None else int(sizes[:skip].sum()))
    kept = None if sizes is None else sizes[skip : skip + count]
    return _Run(count, base, run.stride, run.first_sequence + skip, run.first_id + skip, run.layout), kept


def _expand(runs: Sequence[_Run], sizes_of: Mapping[int, Int64s], gaps: list[tuple[int, int]]) -> Messages:
    """Turn one entry per batch into one per message."""
    counts, bases, strides, sequences, ids, layouts = np.array(runs, dtype=np.int64).reshape(len(runs), 6).T
    row_starts = np.cumsum(counts) - counts
    index_in_run = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(row_starts, counts)
    sizes = np.repeat(strides, counts)
    positions = np.repeat(bases, counts) + index_in_run * sizes
    for index, own in sizes_of.items():
        rows = slice(int(row_starts[index]), int(row_starts[index]) + len(own))
        sizes[rows] = own
        positions[rows] += np.cumsum(own) - own
    return Messages(
        positions,
        sizes - FRAME_OVERHEAD_BYTES,
        np.repeat(sequences, counts) + index_in_run,
        np.repeat(ids, counts) + index_in_run,
        np.repeat(layouts.astype(np.uint8), counts) if layouts.any() else None,
        gaps,
    )


class Decoder:
    """Builds the record batches of one partition.

    Args:
        columns: which columns, in which order.
        rows_max: most rows of a record batch.
        log_id: of the partition's log.
    """

    def __init__(
        self, columns: Sequence[str], topic: str, nsqd: str, partition: int, rows_max: int, log_id: str = ""
    ) -> None:
        self._schema = arrow_schema(columns)
        self._rows_max = rows_max
        self._constants = {"topic": topic.encode(), "nsqd": nsqd.encode(), "log_id": log_id.encode()}
        self._partition = partition
        self._repeated: dict[str, pa.Array] = {}
        build: dict[str, Callable[[_Rows], pa.Array]] = {
            "topic": lambda rows: self._repeat("topic", rows.count),
            "partition": lambda rows: self._repeat("partition", rows.count),
            "offset": lambda rows: _int64_array(rows.sequences),
            "timestamp": _timestamps,
            "attempts": _attempts,
            "id": _ids,
            "internal_id": lambda rows: _int64_array(rows.internal_ids),
            "trace_id": self._trace_ids,
            "body": _bodies,
            "nsqd": lambda rows: self._repeat("nsqd", rows.count),
            "log_id": lambda rows: self._repeat("log_id", rows.count),
            "headers": self._headers,
        }
        self._build = [build[name] for name in columns]

    def record_batches(self, answer: memoryview, messages: Messages) -> Iterator[pa.RecordBatch]:
        """Build record batches of about equal length from the messages of one answer.

        Args:
            answer: what ``messages`` was located in, followed by at least ``PAD_BYTES`` of any content.
        """
        total = len(messages.positions)
        if not total:
            return
        step = math.ceil(total / math.ceil(total / self._rows_max))
        for row in range(0, total, step):
            rows = _Rows(answer, messages, slice(row, min(total, row + step)))
            arrays = [build(rows) for build in self._build]
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _trace_ids(self, rows: _Rows) -> pa.Array:
        if rows.layouts is None:
            return self._repeat("trace_id", rows.count)
        found = rows.heads["trace_id"].astype(np.uint64).view(np.int64)  # Spark has no unsigned numbers
        return _int64_array(np.where(rows.layouts & RAW_IDS, found, 0))

    def _headers(self, rows: _Rows) -> pa.Array:
        if rows.layouts is None:
            return pa.nulls(rows.count, self._schema.field("headers").type)
        maps = HeaderMaps()
        answer = rows.answer
        starts = rows.positions + FRAME_OVERHEAD_BYTES
        for start, front in zip(starts.tolist(), rows.fronts.tolist(), strict=True):
            if not front:
                maps.add_none()
            elif front == 1:
                maps.add_empty()
            else:
                maps.add(answer[start], bytes(answer[start + HEADERS.size : start + front]))
        return maps.array()

    def _repeat(self, column: str, count: int) -> pa.Array:
        """Return a column with one value in every row; kept, as all record batches of a range have about one length."""
        kept = self._repeated.get(column)
        if kept is None or len(kept) < count:
            if column in self._constants:
                text = self._constants[column]
                offsets = np.arange(count + 1, dtype=np.int32) * len(text)
                kept = pa.Array.from_buffers(
                    pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(text * count)]
                )
            elif column == "partition":
                kept = pa.Array.from_buffers(
                    pa.int32(), count, [None, pa.py_buffer(np.full(count, self._partition, np.int32))]
                )
            else:  # trace_id: a plain topic carries none, which NSQ writes as 0
                kept = _int64_array(np.zeros(count, np.int64))
            self._repeated[column] = kept
        return kept.slice(0, count)


class _Rows:
    """The messages of one record batch, and what several of its columns need.

    Args:
        answer: what ``messages`` was located in.
        rows: which of them.
    """

    def __init__(self, answer: memoryview, messages: Messages, rows: slice) -> None:
        self.answer = answer
        self.count = rows.stop - rows.start
        self.positions = messages.positions[rows]
        self.body_sizes = messages.body_sizes[rows]
        self.sequences = messages.sequences[rows]
        self.internal_ids = messages.internal_ids[rows]
        self.layouts = None if messages.layouts is None else messages.layouts[rows]

    @cached_property
    def heads(self) -> npt.NDArray[Any]:
        """The part before each body; gathered once, as each gathering visits the memory of all messages."""
        return _unaligned(self.answer, f"V{_HEAD.itemsize}")[self.positions + _HEAD_POSITION].view(_HEAD)

    @cached_property
    def fronts(self) -> Int64s:
        """The size of the headers in front of each body, in bytes; 1 for none on a topic with headers, 0 on another.

        Raises:
            BatchError: headers are longer than their message.
        """
        assert self.layouts is not None, "nothing has headers"
        starts = self.positions + FRAME_OVERHEAD_BYTES
        is_extended = (self.layouts & EXTENDED) != 0
        versions = _unaligned(self.answer, "u1")[starts]
        sizes = _unaligned(self.answer, ">u2")[starts + 1].astype(np.int64)
        fronts = np.where(is_extended, np.where(versions == NO_HEADERS, 1, sizes + HEADERS.size), 0)
        if bool((fronts > self.body_sizes).any()):
            raise BatchError("headers do not fit their message")
        return fronts


def _unaligned(answer: memoryview, dtype: str) -> npt.NDArray[Any]:
    """Return a view that has one item starting at every byte, so that items are gathered from any position."""
    item = np.dtype(dtype)
    return np.ndarray((len(answer) - item.itemsize + 1,), item, answer, strides=(1,))


def _int64_array(values: Int64s) -> pa.Array:
    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def _timestamps(rows: _Rows) -> pa.Array:
    stored_ns = rows.heads["timestamp"].astype(np.int64)
    return pa.Array.from_buffers(pa.timestamp("us", tz="UTC"), rows.count, [None, pa.py_buffer(stored_ns // 1000)])


def _attempts(rows: _Rows) -> pa.Array:
    attempts = rows.heads["attempts"].astype(np.int32)
    return pa.Array.from_buffers(pa.int32(), rows.count, [None, pa.py_buffer(attempts)])


def _ids(rows: _Rows) -> pa.Array:
    ids = np.ascontiguousarray(rows.heads["id"])
    offsets = np.arange(rows.count + 1, dtype=np.int32) * MESSAGE_ID_SIZE
    return pa.Array.from_buffers(pa.binary(), rows.count, [None, pa.py_buffer(offsets), pa.py_buffer(ids)])


def _bodies(rows: _Rows) -> pa.Array:
    """Copy the bodies into one binary array: describe each as a view of the answer and let Arrow gather them."""
    answer, sizes = rows.answer, rows.body_sizes
    starts = rows.positions + FRAME_OVERHEAD_BYTES
    if rows.layouts is None:
        firsts = rows.heads["body"]
    else:
        starts, sizes = starts + rows.fronts, sizes - rows.fronts
        firsts = _unaligned(answer, "<i4")[starts]
    views = np.empty((rows.count, 4), np.int32)
    views[:, 0] = sizes
    views[:, 1] = firsts
    views[:, 2] = 0
    views[:, 3] = starts
    inline = np.flatnonzero(sizes <= VIEW_INLINE_MAX)
    if len(inline):
        short = _unaligned(answer, "V12")[starts[inline]].view(np.uint8).reshape(-1, VIEW_INLINE_MAX)
        views.view(np.uint8)[inline, 4:] = short
    described = pa.Array.from_buffers(pa.binary_view(), rows.count, [None, pa.py_buffer(views), pa.py_buffer(answer)])
    return described.cast(pa.binary())
