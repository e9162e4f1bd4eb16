"""The messages of a channel that are not finished, in number and in bytes.

Rules of this file: nothing is changed; counts are exact, bytes are taken from the offsets of the log: exact for what
the cursor has not reached, a share of the stretch for what is behind it, and an average for what was set aside.
"""

from __future__ import annotations

from flintmq.broker.channel import Channel
from flintmq.broker.state import Log
from flintmq.errors import StorageError


def unfinished_count(channel: Channel) -> int:
    """Messages that a channel has not finished: waiting, deferred, in flight, and on their way to the dead letters."""
    return waiting_count(channel) + channel.window.unfinished_count + channel.spilled.count


def waiting_count(channel: Channel) -> int:
    """Stored messages that the cursor has not reached; those of a paused topic, too."""
    start, end = channel.next, channel.log.next_sequence
    return max(0, end - start - channel.window.left_out_count(start, end))


class ByteCount:
    """Counts the bytes of the log that a channel has not finished; remembers where it looked last."""

    __slots__ = ("_channel", "_floor", "_next")

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._floor = (-1, 0)
        self._next = (-1, 0)

    def unfinished_bytes(self) -> int:
        """Frame bytes of what is not finished; when the log cannot be read now, as far as is known."""
        channel = self._channel
        log, window = channel.log, channel.window
        try:
            if self._next[0] != channel.next:
                self._next = (channel.next, offset_at(log, channel.next))
            if len(window) and self._floor[0] != channel.floor:
                self._floor = (channel.floor, offset_at(log, channel.floor))
        except StorageError:
            pass  # whoever delivers meets it as well, and reports it
        end_bytes = log.end_offset_bytes
        unfinished = end_bytes - self._next[1]
        if len(window):
            stretch = max(0, self._next[1] - self._floor[1])
            unfinished += stretch * window.unfinished_count // len(window)
        if channel.spilled.count:
            unfinished += channel.spilled.count * end_bytes // max(1, log.next_sequence - 1)
        return max(0, unfinished)


def offset_at(log: Log, sequence: int) -> int:
    """Bytes of the log before a sequence, or before the first one stored behind it.

    Raises:
        StorageError: the log cannot be read now.
    """
    batch = log.read(sequence) if sequence < log.next_sequence else None
    if batch is None:
        return log.end_offset_bytes
    return batch.header.offset_bytes if batch.first > sequence else batch.offset_of(sequence)
