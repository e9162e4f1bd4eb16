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
        until_first: what is going on as long as nothing is done, for people.
        source: the stage before this one; how far this one is behind it is its lag.
    """

    name: str
    total: int
    count: int = 0
    until_first: str = ""
    source: Meter | None = None
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

    @property
    def lag(self) -> int | None:
        """Messages that the stage before has done and this one has not; None when there is no stage before."""
        return None if self.source is None else max(0, self.source.count - self.count)

    @property
    def state(self) -> str:
        """What a number does not say: why there is nothing yet, or the lag."""
        if not self.count and self.until_first:
            return self.until_first
        return f"lag {self.lag:,}" if self.lag is not None else ""

    def rate(self, now_s: float) -> float:
        """Messages per second, until now or until it was complete; 0.0 when nothing can be said."""
        if self.began_s is None:
            return 0.0
        elapsed_s = (self.ended_s or now_s) - self.began_s
        return self.count / elapsed_s if elapsed_s > 0 else 0.0
