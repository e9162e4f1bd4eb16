"""Back-pressure: how many bytes may be on their way, and who waits for room. First come first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from flintmq.client.core.stats import ProducerStats
from flintmq.client.publish import closed_error
from flintmq.errors import FlintError, LocalProtocolError, PublishRefused


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
        self.waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.bytes_max = bytes_max
        self._stats = stats
        self._cause = cause

    async def admit(self, cost: int, deadline: float) -> None:
        """Wait until ``cost`` bytes may be sent.

        Raises:
            LocalProtocolError: they never may.
            PublishRefused: there was no room in time, or the producer is closed.
        """
        if cost > self.bytes_max:
            raise LocalProtocolError(
                "E_BAD_BODY",
                f"{cost} bytes to publish, at most {self.bytes_max}: raise max_bytes_in_flight or send less",
            )
        if not self.waiting and self._stats.bytes_in_flight + cost <= self.bytes_max:
            self._stats.bytes_in_flight += cost
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append((cost, waiter))
        try:
            async with asyncio.timeout_at(deadline):
                await waiter
        except TimeoutError:
            self._withdraw(cost, waiter)
            raise PublishRefused(
                "TIMEOUT", f"not sent: {self._stats.bytes_in_flight} bytes are on their way already", retryable=True
            ) from self._cause()
        except asyncio.CancelledError:
            self._withdraw(cost, waiter)
            raise

    def _withdraw(self, cost: int, waiter: asyncio.Future[None]) -> None:
        """Undo an admission that nobody uses: still waiting, or granted in the moment it was given up."""
        if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
            self.release(cost)
        else:
            waiter.cancel()
            self.release(0)  # the next in line may be smaller

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
