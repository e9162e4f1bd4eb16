"""Back-pressure: how many bytes may be on their way, and who waits for room. First come first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from flintmq.client.core.publish import closed_error
from flintmq.client.core.stats import ProducerStats
from flintmq.errors import FlintError, LocalProtocolError, PublishRefused


class Waiter(Protocol):
    """A caller that waits for room, and is told once; an :class:`asyncio.Future` is one."""

    def done(self) -> bool: ...
    def set_result(self, result: None, /) -> object: ...
    def set_exception(self, exception: PublishRefused, /) -> object: ...


class Admission:
    """The gate of a producer.

    Args:
        bytes_max: what may be on its way.
        stats: whose ``bytes_in_flight`` is kept here.
        cause: why publishes take long, if something is known.

    Attributes:
        waiting: who wants to go in, and how much each brings.
    """

    __slots__ = ("waiting", "bytes_max", "_stats", "_cause")

    def __init__(self, bytes_max: int, stats: ProducerStats, cause: Callable[[], FlintError | None]) -> None:
        self.waiting: deque[tuple[int, Waiter]] = deque()
        self.bytes_max = bytes_max
        self._stats = stats
        self._cause = cause

    def admit(self, cost: int) -> bool:
        """Let ``cost`` bytes be sent; False when they have to :meth:`wait` for it.

        Raises:
            LocalProtocolError: they never may.
        """
        if cost > self.bytes_max:
            raise LocalProtocolError(
                "E_BAD_BODY",
                f"{cost} bytes to publish, at most {self.bytes_max}: raise max_bytes_in_flight or send less",
            )
        if self.waiting or self._stats.bytes_in_flight + cost > self.bytes_max:
            return False
        self._stats.bytes_in_flight += cost
        return True

    def wait(self, cost: int, waiter: Waiter) -> None:
        """Stand in line; ``waiter`` is told when the bytes may be sent, or that the producer is closed."""
        self.waiting.append((cost, waiter))

    def withdraw(self, cost: int, was_granted: bool) -> None:
        """Undo an admission that nobody uses: granted in the moment it was given up, or its waiter is done by now."""
        self.release(cost if was_granted else 0)  # the next in line may be smaller

    def late(self) -> PublishRefused:
        """Return what a call raises for which there was no room in time."""
        detail = f"not sent: {self._stats.bytes_in_flight} bytes are on their way already"
        error = PublishRefused("TIMEOUT", detail, retryable=True)
        error.__cause__ = self._cause()
        return error

    def release(self, cost: int) -> None:
        """Give ``cost`` bytes back."""
        stats = self._stats
        stats.bytes_in_flight -= cost
        while self.waiting:
            wanted, waiter = self.waiting[0]
            if not waiter.done():
                if stats.bytes_in_flight + wanted > self.bytes_max:
                    return
                stats.bytes_in_flight += wanted
                waiter.set_result(None)
            self.waiting.popleft()

    def close(self) -> None:
        """Turn everybody away."""
        while self.waiting:
            _, waiter = self.waiting.popleft()
            if not waiter.done():
                waiter.set_exception(closed_error())
