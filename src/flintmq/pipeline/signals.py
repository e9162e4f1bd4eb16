"""Signals that end what a command does in good order.

Rules of this file: a handler only sets an event, which is looked at between two steps: an exception at any place, as of
Ctrl-C, might come between a step and what notes that it was taken.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from flintmq.clock import Clock, SystemClock
from flintmq.options import SECOND

SAME_SIGNAL_NS = SECOND


class Signals:
    """Sets an event at signals; the second one is as if there were none.

    What comes again within a second of the first is that one once more, as timeout(1) sends it twice.

    Attributes:
        stop: the event.
        first: the signal that came first, None before it.
    """

    def __init__(self, numbers: Iterable[signal.Signals], clock: Clock) -> None:
        self._clock = clock
        self._before = {number: signal.getsignal(number) for number in numbers}
        self._first_ns: dict[int, int] = {}
        self.stop = threading.Event()

    @property
    def first(self) -> int | None:
        return next(iter(self._first_ns), None)

    def take(self) -> None:
        """Handle them; also again, as Spark takes them when it starts."""
        for number in self._before:
            signal.signal(number, self._came)

    def give_back(self) -> None:
        """Have them handled as before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _came(self, number: int, frame: object) -> None:
        self.stop.set()
        now_ns = self._clock.monotonic_ns()
        if now_ns - self._first_ns.setdefault(number, now_ns) > SAME_SIGNAL_NS:
            signal.signal(number, self._before[signal.Signals(number)])
            signal.raise_signal(number)


@contextmanager
def stopped_by_signals(
    clock: Clock | None = None, numbers: Iterable[signal.Signals] = (signal.SIGINT, signal.SIGTERM)
) -> Iterator[Signals]:
    """Handle signals for a ``with`` block, by default Ctrl-C and SIGTERM."""
    signals = Signals(numbers, clock or SystemClock())
    signals.take()
    try:
        yield signals
    finally:
        signals.give_back()


__all__ = ["Signals", "stopped_by_signals"]
