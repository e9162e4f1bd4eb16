"""The lines to one nsqd. No waiting and no locking here: :mod:`flintmq.client.blocking.producer` does both."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from flintmq.client.blocking.line import Line
from flintmq.client.core.backoff import ReconnectDelay


class Pool:
    """Lines that are free, and how many there are.

    Attributes:
        address: ``host:port``.
        idle: free lines; the one used last is taken first, so that the others may rest.
        lines: all of them. Weakly, because a call that is interrupted at the wrong instruction forgets its line.
        opening_count: lines that are being opened.
        retry_at: not to be opened before, after a failure.
        is_tried: opening has succeeded or failed once.
    """

    __slots__ = ("address", "idle", "lines", "opening_count", "retry_at", "is_tried", "_delay")

    def __init__(self, address: str) -> None:
        self.address = address
        self.idle: list[Line] = []
        self.lines: WeakKeyDictionary[Line, None] = WeakKeyDictionary()
        self.opening_count = 0
        self.retry_at = 0.0
        self.is_tried = False
        self._delay = ReconnectDelay()

    def describe(self) -> str:
        """Show the lines, each in a line."""
        head = f"{self.address} lines={len(self.lines)} idle={len(self.idle)} opening={self.opening_count}"
        return "\n  ".join([head, *(line.describe() for line in self.idle)])

    @property
    def is_up(self) -> bool:
        """Whether there is a line."""
        return len(self.lines) > 0

    def may_open(self, size: int, now: float) -> bool:
        """Whether one more line may be opened."""
        return len(self.lines) + self.opening_count < size and now >= self.retry_at

    def add(self, line: Line) -> None:
        """Take in a fresh line."""
        self.lines[line] = None
        self.idle.append(line)

    def take(self) -> Line | None:
        """A free line, or None."""
        return self.idle.pop() if self.idle else None

    def lose(self, line: Line, now: float, chance: float) -> None:
        """Forget a line that was lost."""
        self.lines.pop(line, None)
        if not line.was_refused:  # else it was closed as the protocol has it, and others should not have to wait
            self.wait(now, chance, now - line.opened_at)

    def wait(self, now: float, chance: float, lived_s: float = 0.0) -> None:
        """Open nothing for a while; lines that are lost together count once.

        Args:
            lived_s: how long the line that was lost had been there.
        """
        if now >= self.retry_at:
            self.retry_at = now + self._delay.next_s(chance, lived_s)

    def close(self) -> None:
        """Close what is free."""
        while self.idle:
            self.idle.pop().close()
