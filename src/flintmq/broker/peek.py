"""A look at a channel without touching it: what it will deliver next, what consumers hold, what is deferred.

Rules of this file: nothing is changed, and nothing is counted; a look notes at once which messages it is about and
reads them one by one as it is asked to, so that the caller can let others have their turn in between; no more of a
message is copied than is asked for.

Source: NSQ's issues (peeking at a channel).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest

from flintmq.batch import Batch
from flintmq.broker.channel import Channel
from flintmq.broker.due_times import DueTimes
from flintmq.broker.state import Log, Message
from flintmq.broker.subscription import Subscription
from flintmq.message import ATTEMPTS, ATTEMPTS_POSITION, FRAME_OVERHEAD_BYTES

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


def _seen_message(log: Log, message: Message, bytes_max: int) -> Seen | None:
    """One message that the cursor has passed; None when it is damaged."""
    sequence, frame = message.sequence, message.frame
    batch = find(log, sequence)
    if frame is None:
        return None if batch is None else seen(batch, sequence, bytes_max, message.attempts)
    offset_bytes = None if batch is None else batch.offset_of(sequence)
    return Seen(sequence, message.attempts, frame[: FRAME_OVERHEAD_BYTES + bytes_max], len(frame), offset_bytes)


def _seen_messages(log: Log, messages: list[Message], bytes_max: int) -> Iterator[Seen]:
    found = (_seen_message(log, message, bytes_max) for message in messages)
    return (each for each in found if each is not None)


def next_messages(channel: Channel, count: int, bytes_max: int, wall_ns: int) -> Iterator[Seen]:
    """List what consumers get next: what comes again and what has come due in turns, and in turns with both the new."""
    log = channel.log
    first, second = channel.waiting_again(count)
    noted = [*first, *second]
    if channel.keep_floor is None:
        noted = [each for pair in zip_longest(first, second) for each in pair if each is not None]
    again = _seen_messages(log, noted, bytes_max)
    holes, due_times = list(channel.window.holes), channel.due_times
    new = _seen_new(log, due_times, channel.next, channel.end, holes, bytes_max, wall_ns)
    if channel.keep_floor is not None:
        return chain(again, new)
    return _in_turns(again, new, channel.owed_count)


def _in_turns(again: Iterator[Seen], new: Iterator[Seen], owed_count: int) -> Iterator[Seen]:
    while True:
        own, other = (new, again) if owed_count else (again, new)
        found = next(own, None)
        if found is None:
            yield from other
            return
        yield found
        owed_count += -1 if own is new else 1


def _seen_new(
    log: Log, due_times: DueTimes, sequence: int, end: int, holes: list[tuple[int, int]], bytes_max: int, wall_ns: int
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
        if batch.first > sequence or due_times.of(batch) > wall_ns:
            sequence = max(batch.first, stop if batch.first <= sequence else 0)
            continue
        for number in range(sequence, stop):
            yield seen(batch, number, bytes_max)
        sequence = stop


def in_flight_messages(channel: Channel, count: int, bytes_max: int) -> Iterator[Seen]:
    """List what consumers hold, oldest first."""
    noted = [(each, each.deadline_ns, each.owner) for each in channel.window.held_messages(count)]
    for message, deadline_ns, owner in noted:
        found = _seen_message(channel.log, message, bytes_max)
        if found is not None:
            found.deadline_ns, found.owner = deadline_ns, owner
            yield found


def deferred_messages(channel: Channel, count: int, bytes_max: int) -> Iterator[Seen]:
    """List what is deferred for a short time and in memory, the next one first; the rest the database knows."""
    for due_ns, message in channel.window.deferred_messages(count):
        found = _seen_message(channel.log, message, bytes_max)
        if found is not None:
            found.due_ns = due_ns
            yield found
