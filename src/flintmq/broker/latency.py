"""The time that messages take from publishing to FIN: quantiles over a moving window, for runs of messages at once.

Picture of a :class:`Summary`, one column per kept value::

    values     12   40   95  ...   ascending, ns
    weights     3    1    7        how often exactly this value is known to have come
    lows        0    3   10        at least so many values are smaller
    highs       3    9   20        at most so many values are smaller or equal

It is Greenwald and Khanna's summary with weights, which CKMS (what nsqd uses) builds upon. nsqd's streams are precise
around the quantiles that were asked for and loose elsewhere. Merged streams need more, because the 99th percentile of a
topic may be the 90th of one of its channels; so here every rank is kept within ``_RANK_ERROR`` of the count, and within
``_TAIL_ERROR`` of what lies above it: the 99th percentile is somewhere between the 98.9th and the 99.1th, whatever was
merged.

Rules of this file: no clock, time comes in; a run of messages with one timestamp costs one insertion, whatever its
length, and is exact, because the log's batches have one timestamp each; everything kept has a bound.

Source: NSQ's latencies; Greenwald, Khanna: Space-Efficient Online Computation of Quantile Summaries (2001);
Cormode, Korn, Muthukrishnan, Srivastava: Effective Computation of Biased Quantiles over Data Streams (2005).
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from flintmq.batch import Batch
from flintmq.errors import StorageError
from flintmq.message import MESSAGE_HEADER

_RANK_ERROR = 0.01
_TAIL_ERROR = 0.1
_BUFFER_COUNT = 512
_ENTRIES_MAX = 1024  # usual are 100 to 200; should some input ever need more, precision gives way


class Summary:
    """A bounded picture of a distribution of whole numbers. Never changed.

    Attributes:
        count: how many values it stands for.
    """

    __slots__ = ("_highs", "_lows", "_values", "_weights", "count")

    def __init__(
        self,
        values: Sequence[int] = (),
        lows: Sequence[int] = (),
        highs: Sequence[int] = (),
        weights: Sequence[int] = (),
        count: int = 0,
    ) -> None:
        self._values = array("q", values)
        self._lows = array("q", lows)
        self._highs = array("q", highs)
        self._weights = array("q", weights)
        self.count = count

    def __len__(self) -> int:
        return len(self._values)

    @classmethod
    def of(cls, parts: Sequence[Summary], pairs: Sequence[tuple[int, int]] = ()) -> Summary:
        """Return the summary of everything in ``parts`` and of ``(value, weight)`` pairs in any order.

        Pairs are exact; the errors of parts add up as their counts do.
        """
        parts = [part for part in parts if part.count]
        if len(parts) == 1 and not pairs:
            return parts[0]
        steps = [(value, 0, weight, weight, weight) for value, weight in pairs]
        count = sum(step[3] for step in steps)
        low_after = high_after = 0  # of the next value, summed over all parts
        for part in parts:
            count += part.count
            high_after += part._highs[0] - part._weights[0]
            steps += part._steps()
        steps.sort()
        values: list[int] = []
        lows: list[int] = []
        highs: list[int] = []
        weights: list[int] = []
        previous = -1
        for value, low, next_low, weight, next_high in steps:
            if value == previous:
                lows[-1] += low
                highs[-1] += weight
                weights[-1] += weight
            else:
                previous = value
                values.append(value)
                lows.append(low_after + low)
                highs.append(high_after + weight)
                weights.append(weight)
            low_after += next_low
            high_after += next_high
        return cls(values, lows, highs, weights, count)

    def _steps(self) -> list[tuple[int, int, int, int, int]]:
        """Count what each value adds when summaries are added up from the smallest value on.

        Each is the value; what it adds to its own low; what it adds to the lows of greater values; its weight; and what
        it adds to the highs of greater values.
        """
        steps = []
        low = 0
        befores = [high - weight for high, weight in zip(self._highs, self._weights, strict=True)]
        befores.append(self.count)
        for index, (value, own_low, weight) in enumerate(zip(self._values, self._lows, self._weights, strict=True)):
            through = own_low + weight
            steps.append((value, own_low - low, through - low, weight, befores[index + 1] - befores[index]))
            low = through
        return steps

    def compressed(self, entries_max: int = _ENTRIES_MAX) -> Summary:
        """Return a summary without the values that the promised precision does not need."""
        slack = 1.0
        while True:
            kept = self._kept(slack)
            if len(kept) <= entries_max:
                break
            slack *= 1.5
        values, lows, highs, weights = (
            [part[index] for index in kept] for part in (self._values, self._lows, self._highs, self._weights)
        )
        return Summary(values, lows, highs, weights, self.count)

    def _kept(self, slack: float) -> list[int]:
        """Positions of the values to keep: the first, the last, and as few between as the errors allow."""
        count, lows, highs, weights = self.count, self._lows, self._highs, self._weights
        gap_max = 2 * _RANK_ERROR * slack * count
        tail = 2 * _TAIL_ERROR * slack
        last = len(lows) - 1
        if last <= 1:
            return list(range(last + 1))
        kept = [0]
        after_kept = lows[0] + weights[0]
        for index in range(1, last):
            before_next = highs[index + 1] - weights[index + 1]
            gap = before_next - after_kept
            if gap > gap_max or gap > tail * max(1, count - before_next):
                kept.append(index)
                after_kept = lows[index] + weights[index]
        kept.append(last)
        return kept

    def values_at(self, quantiles: Iterable[float]) -> list[int]:
        """Return the value at each quantile, 0 < q <= 1; zeros when there are no values."""
        if not self.count:
            return [0 for _ in quantiles]
        # twice the middle of where each value can stand, counted from 1
        middles = [low + high + 1 for low, high in zip(self._lows, self._highs, strict=True)]
        return [self._value_at(math.ceil(quantile * self.count), middles) for quantile in quantiles]

    def _value_at(self, rank: int, middles: list[int]) -> int:
        index = min(bisect_left(middles, 2 * rank), len(middles) - 1)
        if index and self._error(index - 1, rank) < self._error(index, rank):
            index -= 1
        return self._values[index]

    def _error(self, index: int, rank: int) -> int:
        """Bound the distance of a value from a rank; 0 when it surely has it."""
        before, through = self._highs[index] - self._weights[index], self._lows[index] + self._weights[index]
        return max(before + 1 - rank, rank - through, 0)

    def check(self) -> None:
        """Assert what every summary promises; for tests."""
        values, lows, highs, weights = self._values, self._lows, self._highs, self._weights
        assert all(a < b for a, b in pairwise(values))
        assert all(a <= b for part in (lows, highs) for a, b in pairwise(part))
        for low, high, weight in zip(lows, highs, weights, strict=True):
            assert 0 <= low <= low + weight <= high <= self.count


EMPTY = Summary()


class _Stream:
    """The values of one half of the window."""

    __slots__ = ("_summary", "_values", "_weights")

    def __init__(self) -> None:
        self._values = array("q")  # not in the summary yet
        self._weights = array("q")
        self._summary = EMPTY

    def insert(self, value: int, weight: int) -> None:
        self._values.append(value)
        self._weights.append(weight)
        if len(self._values) >= _BUFFER_COUNT:
            self.summary()

    def summary(self) -> Summary:
        """Everything inserted so far."""
        if self._values:
            pairs = list(zip(self._values, self._weights, strict=True))
            del self._values[:], self._weights[:]
            self._summary = Summary.of((self._summary,), pairs).compressed()
        return self._summary


class Latency:
    """Latencies of the messages that a channel finished lately, and the timestamps of those it has not finished yet.

    Two streams cover half of the window each; when the newer one is full the older one starts anew, so that a result
    looks back between half of the window and all of it.

    Args:
        window_ns: how far back results look.
    """

    __slots__ = ("_ends", "_first", "_half_ns", "_head", "_new", "_old", "_since_ns", "_timestamps")

    def __init__(self, window_ns: int) -> None:
        self._half_ns = max(1, window_ns // 2)
        self._since_ns: int | None = None
        self._new = _Stream()
        self._old = _Stream()
        # batches in delivery order: sequences up to an end (exclusive) and their timestamp
        self._first: int | None = None
        self._head = 0
        self._ends = array("q")
        self._timestamps = array("q")

    def delivered(self, first: int, end: int, timestamp_ns: int, floor: int) -> None:
        """Note when the messages ``first`` to ``end`` were published; each call goes on behind the last.

        Args:
            floor: everything below is finished and need not be known any more.
        """
        if self._first is None:
            self._first = first
        self._forget(floor)
        ends, timestamps = self._ends, self._timestamps
        if self._head < len(ends) and timestamps[-1] == timestamp_ns:
            ends[-1] = end
        else:
            ends.append(end)
            timestamps.append(timestamp_ns)

    def finished(self, first: int, end: int, wall_ns: int, floor: int, read: Callable[[int], Batch | None]) -> None:
        """Count the messages ``first`` to ``end``, which were finished now.

        Args:
            read: the log's, for messages that were delivered by an earlier process and again by this one.
        """
        if self._first is None or first < self._first:
            known = end if self._first is None else min(end, self._first)
            self._finished_early(first, known, wall_ns, read)
            first = known
        ends, timestamps = self._ends, self._timestamps
        index = bisect_right(ends, first, self._head)
        while first < end and index < len(ends):
            stop = min(end, ends[index])
            self.insert(wall_ns, wall_ns - timestamps[index], stop - first)
            first = stop
            index += 1
        self._forget(floor)

    def _finished_early(self, first: int, end: int, wall_ns: int, read: Callable[[int], Batch | None]) -> None:
        while first < end:
            try:
                batch = read(first)
            except StorageError:
                return  # told to the operator when the message was delivered; a figure is not worth a failed FIN
            if batch is None or batch.first > first:
                first += 1
                continue
            stop = min(end, batch.end)
            self.insert(wall_ns, wall_ns - batch.timestamp_ns, stop - first)
            first = stop

    def finished_frame(self, frame: bytes, wall_ns: int) -> None:
        """Count one message outside of the channel's window, of which the frame is at hand."""
        self.insert(wall_ns, wall_ns - MESSAGE_HEADER.unpack_from(frame)[2], 1)

    def restart(self) -> None:
        """Forget which messages are not finished; the next that are delivered may be any."""
        self._first = None
        self._head = 0
        del self._ends[:], self._timestamps[:]

    def _forget(self, floor: int) -> None:
        ends, head = self._ends, self._head
        while head < len(ends) and ends[head] <= floor:
            head += 1
        if head > 64 and 2 * head > len(ends):
            del ends[:head], self._timestamps[:head]
            head = 0
        self._head = head

    def insert(self, wall_ns: int, latency_ns: int, count: int) -> None:
        """Count ``count`` messages that took ``latency_ns``; negative ones, of a clock that was set back, as 0."""
        self._rotate(wall_ns)
        self._new.insert(max(0, latency_ns), count)

    def _rotate(self, wall_ns: int) -> None:
        since_ns = self._since_ns
        if since_ns is None or wall_ns < since_ns:
            self._since_ns = wall_ns
        elif wall_ns - since_ns > 2 * self._half_ns:
            self._old, self._new = _Stream(), _Stream()
            self._since_ns = wall_ns
        elif wall_ns - since_ns > self._half_ns:
            self._old, self._new = self._new, _Stream()
            self._since_ns = since_ns + self._half_ns

    def summary(self, wall_ns: int) -> Summary:
        """The latencies of the window."""
        self._rotate(wall_ns)
        return Summary.of((self._old.summary(), self._new.summary()))
