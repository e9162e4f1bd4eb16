"""A clock that stands still until a test moves it."""

from __future__ import annotations

WALL_START_NS = 1_735_689_600_000_000_000
"""2025-01-01T00:00:00Z: where the wall clock of a test begins, so that timestamps look like timestamps."""

MONOTONIC_START_NS = 1_000_000_000_000
"""Not zero, so that nothing mistakes "at the start" for "never"."""


class ManualClock:
    """A :class:`flintmq.clock.Clock` whose times are moved by hand.

    Args:
        wall_ns: nanoseconds since the Unix epoch at the start.
        monotonic_ns: nanoseconds of the monotonic clock at the start.
    """

    __slots__ = ("_monotonic_ns", "_suspended_ns", "_wall_ns")

    def __init__(self, wall_ns: int = WALL_START_NS, monotonic_ns: int = MONOTONIC_START_NS) -> None:
        self._wall_ns = wall_ns
        self._monotonic_ns = monotonic_ns
        self._suspended_ns = 0

    def wall_ns(self) -> int:
        return self._wall_ns

    def monotonic_ns(self) -> int:
        return self._monotonic_ns

    def boottime_ns(self) -> int:
        return self._monotonic_ns + self._suspended_ns

    def suspend(self, duration_ns: int) -> None:
        """Let time pass in which the machine is suspended: the monotonic clock does not notice."""
        self._wall_ns += duration_ns
        self._suspended_ns += duration_ns

    def advance(self, duration_ns: int) -> None:
        """Let time pass on all clocks.

        Raises:
            ValueError: ``duration_ns`` is negative; only the wall clock can go back (:meth:`jump_wall`).
        """
        if duration_ns < 0:
            raise ValueError(
                f"time passes by 0 ns or more, not {duration_ns}; use jump_wall() to set the wall clock back"
            )
        self._wall_ns += duration_ns
        self._monotonic_ns += duration_ns

    def jump_wall(self, offset_ns: int) -> None:
        """Set the wall clock forward or back, as an administrator or NTP does; the monotonic clock does not notice."""
        self._wall_ns += offset_ns
