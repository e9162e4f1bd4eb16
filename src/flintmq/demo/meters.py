"""Counting: how far each stage is, and how fast it was.

The rules of this file: a meter starts with its first message and stops with its last expected one, so its rate is that
of the stage and not of what came before or after; time comes in as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Meter:
    """One stage.

    Attributes:
        name: as shown.
        total: messages expected.
        count: messages done.
    """

    name: str
    total: int
    count: int = 0
    began_s: float | None = None
    ended_s: float | None = None

    def begin(self, now_s: float) -> None:
        """Start the time before there is anything to count."""
        if self.began_s is None:
            self.began_s = now_s

    def reach(self, count: int, now_s: float) -> None:
        """Set the count."""
        self.begin(now_s)
        if count > self.count:
            self.count = count
            if count >= self.total and self.ended_s is None:
                self.ended_s = now_s

    def rate(self, now_s: float) -> float:
        """Messages per second, until now or until it was complete; 0.0 when nothing can be said."""
        if self.began_s is None:
            return 0.0
        elapsed_s = (self.ended_s or now_s) - self.began_s
        return self.count / elapsed_s if elapsed_s > 0 else 0.0
