"""What a channel will deliver next, what its consumers hold, and what is deferred, looked at without touching it.

Rules of this file: nothing is changed, and nothing is counted; a look notes at once which messages it is about and
reads them one by one as it is asked to, so that the caller can let others have their turn in between; no more of a
message is copied than is asked for.

Source: reference/nsq.md 7 (peeking at a channel).
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, zip_longest

from flintmq.batch import Batch
from flintmq.broker.channel import DEFERRED, QUEUED, Channel
from flintmq.broker.state import Log
from flintmq.broker.subscription import Run, Subscription
from flintmq.message import ATTEMPTS, ATTEMPTS_POSITION, FRAME_OVERHEAD_BYTES

_IN_FLIGHT = re.compile(rb"[\x01-\xfb]")
_Again = tuple[int, int, bytes | None]  # sequence, deliveries so far, the frame if it was set aside
_READS_MAX = 256  # of batches that are passed over because they are not due


@dataclass(slots=True)
class Seen:
    """One message of a look.

    Attributes:
        delivery_count: how often it has been delivered, the present delivery included.
        head: its frame, or as much of its start as was asked for.
        size: of the whole frame in bytes.
        offset_bytes: its virtual offset; None when the log has it no more.
        due_ns: on the clock of due times; 0 when it is not deferred.
        deadline_ns: monotonic time at which it times out; 0 when nobody holds it.
        owner: who holds it.
    """

    sequence: int
    delivery_count: int
    head: bytes
    size: int
    offset_bytes: int | None
    due_ns: int = 0
    deadline_ns: int = 0
    owner: Subscription | None = None

    @property
    def attempts(self) -> int:
        """As the consumer was told at the last delivery; a message that comes from another nsqd had some before."""
        (first,) = ATTEMPTS.unpack_from(self.head, ATTEMPTS_POSITION)
        return max(0, int(first) - 1 + self.delivery_count)


def find(log: Log, sequence: int) -> Batch | None:
    """The batch that holds a message; None when it is not stored.

    Raises:
        StorageError: the log cannot be read now.
    """
    if not log.start_sequence <= sequence < log.committed_sequence:
        return None
    batch = log.read(sequence)
    return batch if batch is not None and batch.first <= sequence < batch.end else None


def seen(batch: Batch, sequence: int, bytes_max: int, delivery_count: int = 0) -> Seen:
    """One message of a batch, with at most so many bytes of its body."""
    positions = batch.positions()
    index = sequence - batch.first
    start, size = batch.frames_at + positions[index], positions[index + 1] - positions[index]
    head = bytes(memoryview(batch.data)[start : start + min(size, FRAME_OVERHEAD_BYTES + bytes_max)])
    return Seen(sequence, delivery_count, head, size, batch.offset_of(sequence))


def _seen_frame(log: Log, sequence: int, frame: bytes, bytes_max: int, delivery_count: int) -> Seen:
    """One message that was set aside with its frame."""
    batch = find(log, sequence)
    offset_bytes = None if batch is None else batch.offset_of(sequence)
    return Seen(sequence, delivery_count, frame[: FRAME_OVERHEAD_BYTES + bytes_max], len(frame), offset_bytes)


def next_messages(channel: Channel, count: int, bytes_max: int, wall_ns: int) -> Iterator[Seen]:
    """What consumers get next: what comes again and what has come due in turns, and in turns with both what is new."""
    channel.gather_waiting()  # which of several queues they wait in, nobody sees
    log, attempts, aside = channel.log, channel._attempts, channel.aside
    queued = (sequence for sequence in channel._requeued if _is(channel, sequence, QUEUED))
    window: list[_Again] = [(number, attempts.get(number, 1), None) for number in islice(queued, count)]
    ready = (aside.loaded[number] for number in aside.ready if number in aside.loaded)
    due: list[_Again] = [(each.sequence, each.attempts, each.frame) for each in islice(ready, count)]
    noted: list[_Again] = [*window, *due]
    if channel.keep_floor is None:
        first, second = (due, window) if channel._is_turn_of_asides else (window, due)
        noted = [each for pair in zip_longest(first, second) for each in pair if each is not None]
    again = _seen_again(log, noted, bytes_max)
    new = _seen_new(log, channel.next, channel.end, list(channel._holes), bytes_max, wall_ns)
    if channel.keep_floor is not None:
        return chain(again, new)
    return _in_turns(again, new, channel._owed_count)


def _in_turns(again: Iterator[Seen], new: Iterator[Seen], owed_count: int) -> Iterator[Seen]:
    while True:
        own, other = (new, again) if owed_count else (again, new)
        found = next(own, None)
        if found is None:
            yield from other
            return
        yield found
        owed_count += -1 if own is new else 1


def _seen_again(log: Log, noted: list[_Again], bytes_max: int) -> Iterator[Seen]:
    for sequence, delivery_count, frame in noted:
        if frame is not None:
            yield _seen_frame(log, sequence, frame, bytes_max, delivery_count)
            continue
        batch = find(log, sequence)
        if batch is not None:
            yield seen(batch, sequence, bytes_max, delivery_count)


def _seen_new(
    log: Log, sequence: int, end: int, holes: list[tuple[int, int]], bytes_max: int, wall_ns: int
) -> Iterator[Seen]:
    read_count = 0
    while sequence < end and read_count < _READS_MAX:
        while holes and holes[0][0] <= sequence:
            sequence = max(sequence, holes.pop(0)[1])
        if sequence >= end:
            return
        batch = log.read(sequence)
        read_count += 1
        if batch is None:
            return
        stop = min(batch.end, end, holes[0][0]) if holes else min(batch.end, end)
        if batch.first > sequence or batch.due_ns > wall_ns:
            sequence = max(batch.first, stop if batch.first <= sequence else 0)
            continue
        for number in range(sequence, stop):
            yield seen(batch, number, bytes_max)
        sequence = stop


def in_flight_messages(channel: Channel, count: int, bytes_max: int) -> Iterator[Seen]:
    """What consumers hold, oldest first."""
    log, floor, held = channel.log, channel.floor, channel._held
    noted: list[tuple[int, int, int, Subscription]] = []
    runs: dict[Subscription, list[Run]] = {}
    loaded = [each for each in sorted(channel.aside.loaded.items()) if each[1].owner is not None][:count]
    for match in _IN_FLIGHT.finditer(channel._window):
        if len(noted) >= count:
            break
        sequence = floor + match.start()
        owner = channel._owner(sequence)
        if owner is None:
            continue
        own = held.get(sequence)
        deadline_ns = own.deadline_ns if own else _deadline(runs.setdefault(owner, list(owner.runs)), sequence)
        noted.append((sequence, channel._attempts.get(sequence, 1), deadline_ns, owner))
    for sequence, each in loaded:
        found = _seen_frame(log, sequence, each.frame, bytes_max, each.attempts)
        found.deadline_ns, found.owner = each.deadline_ns, each.owner
        yield found
    for sequence, delivery_count, deadline_ns, owner in noted:
        batch = find(log, sequence)
        if batch is not None:
            found = seen(batch, sequence, bytes_max, delivery_count)
            found.deadline_ns, found.owner = deadline_ns, owner
            yield found


def _deadline(runs: list[Run], sequence: int) -> int:
    number = bisect_right(runs, sequence, key=_first) - 1
    return runs[number].deadline_ns if number >= 0 else 0


def _first(run: Run) -> int:
    return run.first


def deferred_messages(channel: Channel, count: int, bytes_max: int) -> Iterator[Seen]:
    """What is deferred for a short time and in memory, the next one first; the rest the database knows."""
    noted = heapq.nsmallest(
        count, ((due_ns, s) for s, due_ns in channel._deferred.items() if _is(channel, s, DEFERRED))
    )
    attempts = [channel._attempts.get(sequence, 1) for _, sequence in noted]
    for (due_ns, sequence), delivery_count in zip(noted, attempts, strict=True):
        batch = find(channel.log, sequence)
        if batch is not None:
            found = seen(batch, sequence, bytes_max, delivery_count)
            found.due_ns = due_ns
            yield found


def _is(channel: Channel, sequence: int, state: int) -> bool:
    index = sequence - channel.floor
    return 0 <= index < len(channel._window) and channel._window[index] == state
