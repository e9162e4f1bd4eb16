"""Has the master spread leaders, and within hours of the day copies, over the nodes, a little at a time.

Source: Youzan's replication; :mod:`flintmq.cluster.balance` for what is decided.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from flintmq.clock import Clock
from flintmq.cluster import orders
from flintmq.cluster.balance import Loads, is_within
from flintmq.net.tasks import kept_up
from flintmq.nsqlookupd.coordinator import Coordinator

LOADS_EVERY_NS = 30_000_000_000
"""Nodes are asked for their loads, within the hours in which copies are moved."""
_HOUR_NS = 3_600_000_000_000

_log = logging.getLogger(__name__)


class Balancer:
    """The rounds.

    Args:
        ask_loads: asks all nodes what they lead.
        interval_s: between rounds.
        window: hours of the day (UTC) in which copies are moved, unless the cluster has others.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        clock: Clock,
        ask_loads: Callable[[], Awaitable[Loads]],
        interval_s: float,
        window: tuple[int, int],
    ) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._ask_loads = ask_loads
        self._interval_s = interval_s
        self._window = window
        self._asked_ns: int | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.get_running_loop().create_task(kept_up(self._run, "balancing the cluster"))

    async def close(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            if self._coordinator.is_master:
                await self._round()

    async def _round(self) -> None:
        coordinator = self._coordinator
        await coordinator.carry_out_now(lambda controller: controller.spread())
        settings = coordinator.view.settings
        hour = self._clock.wall_ns() // _HOUR_NS % 24
        if not settings.balances or not is_within(settings.balance_window or self._window, hour):
            return
        now_ns = self._clock.monotonic_ns()
        if self._asked_ns is not None and now_ns - self._asked_ns < LOADS_EVERY_NS:
            return
        is_first, self._asked_ns = self._asked_ns is None, now_ns
        loads = await self._ask_loads()
        if is_first:
            return  # what is written to them is not known yet

        await coordinator.carry_out_now(
            lambda controller: [] if (swap := orders.balance_copies(controller, loads)) is None else [swap]
        )
