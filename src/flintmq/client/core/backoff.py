"""Waits: after failed messages, and between attempts to connect. Pure: no clock, no random numbers, no IO.

:class:`Backoff` is the consumer's (NSQ's client guide, "Backoff")::

    NORMAL --failure--> WAITING --time passes--> PROBING --failure--> WAITING, longer
      ^                    ^                        |
      |                    +---success, level > 0---+   (shorter)
      +------------------------success, level 0-----+

Rules: while WAITING nothing is delivered (RDY 0) and results are ignored; while PROBING exactly one message may be in
flight (RDY 1) whatever ``max_in_flight`` is; one result counts per waiting time.
"""

from __future__ import annotations

from enum import Enum

WANTED_MAX_S = 1.0
"""Longest delay before connecting again while a publish waits for it; go-nsq's producer connects when it publishes."""

LEVEL_MAX = 64  # 2 ** 63 times any base is beyond every maximum


class BackoffState(Enum):
    """The states of a consumer's backoff."""

    NORMAL = "normal"
    WAITING = "waiting"
    PROBING = "probing"


class Backoff:
    """Decides from results how long a consumer stops.

    Args:
        base_s: waiting time after the first failure.
        max_s: longest waiting time; 0 turns backoff off.
    """

    __slots__ = ("state", "level", "_base_s", "_max_s")

    def __init__(self, base_s: float, max_s: float) -> None:
        self.state = BackoffState.NORMAL
        self.level = 0
        self._base_s = base_s
        self._max_s = max_s

    def describe(self) -> str:
        """Say in one line where the consumer stands."""
        return f"{self.state.value} level={self.level}"

    @property
    def limit(self) -> int | None:
        """Return how many messages may be in flight in all: 0, 1, or None for no limit by backoff."""
        if self.state is BackoffState.NORMAL:
            return None
        return 1 if self.state is BackoffState.PROBING else 0

    def failure(self) -> float | None:
        """Note a failed message; return the seconds to wait from now on, or None if nothing changes."""
        if not self._max_s or self.state is BackoffState.WAITING:
            return None
        if self._duration_s(self.level) < self._max_s:
            self.level += 1
        return self._wait()

    def success(self) -> float | None:
        """Note a finished message; return the seconds to wait from now on, or None if there is nothing to wait for."""
        if self.state is not BackoffState.PROBING:
            return None
        self.level -= 1
        if self.level == 0:
            self.state = BackoffState.NORMAL
            return None
        return self._wait()

    def elapsed(self) -> None:
        """Note that the waiting time is over."""
        if self.state is BackoffState.WAITING:
            self.state = BackoffState.PROBING

    def _wait(self) -> float:
        self.state = BackoffState.WAITING
        return self._duration_s(self.level)

    def _duration_s(self, level: int) -> float:
        if level == 0:
            return 0.0
        return min(self._max_s, self._base_s * 2.0 ** (min(level, LEVEL_MAX) - 1))


class ReconnectDelay:
    """The waits before connecting again: exponential with jitter, forgotten once a connection held.

    Args:
        base_s: longest first delay; at most 1 s, so that a restarted nsqd is found at once.
        max_s: longest delay.
        settled_s: a connection that lived this long was a good one.
    """

    __slots__ = ("failures", "_base_s", "_max_s", "_settled_s")

    def __init__(self, base_s: float = 0.25, max_s: float = 15.0, settled_s: float = 1.0) -> None:
        self.failures = 0
        self._base_s = base_s
        self._max_s = max_s
        self._settled_s = settled_s

    def next_s(self, chance: float, lived_s: float = 0.0) -> float:
        """Seconds to wait now.

        Args:
            chance: a random number from 0 to 1; clients of one nsqd must not come back all at once.
            lived_s: how long the connection that was lost had been usable; 0 if there was none.
        """
        if lived_s >= self._settled_s:
            self.failures = 0
        delay_s = min(self._max_s, self._base_s * 2.0 ** min(self.failures, LEVEL_MAX))
        self.failures += 1
        return delay_s * (0.5 + 0.5 * chance)


def wanted_s(delay_s: float, chance: float) -> float:
    """Seconds to wait before connecting while a publish waits: ``delay_s``, at most ``WANTED_MAX_S`` with jitter.

    Args:
        chance: a random number from 0 to 1.
    """
    return min(delay_s, WANTED_MAX_S * (0.5 + 0.5 * chance))


def jittered_s(interval_s: float, jitter: float, chance: float) -> float:
    """Spread ``interval_s`` by up to ``jitter`` (0.3 is ±30 %) with a random number from 0 to 1."""
    return interval_s * (1.0 + jitter * (2.0 * chance - 1.0))


def requeue_delay_s(attempts: int, delay_s: float, max_s: float) -> float:
    """Return how long a failed message waits: in proportion to its attempts, with a maximum (NSQ's client guide)."""
    return min(max_s, delay_s * max(attempts, 1))
