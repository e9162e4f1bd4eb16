"""Keeps the elections of a cluster in the history, also while nobody looks: nsqlookupd forget them at their end.

Rules of this file: they are asked for every ``STEP_S``, where there is no cluster every ``NO_CLUSTER_S``.
"""

from __future__ import annotations

import asyncio

from flintmq.net.tasks import kept_up
from flintmq.nsqadmin.gather import Gather

STEP_S = 10.0
NO_CLUSTER_S = 60.0


class ElectionKeeper:
    """Asks for them from time to time."""

    def __init__(self, gather: Gather) -> None:
        self._gather = gather
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Keep what happens from now on."""
        if self._gather.snapshots.lookupds:
            self._task = asyncio.ensure_future(kept_up(self._keep, "keeping elections"))

    async def _keep(self) -> None:
        while True:
            is_cluster = await self._gather.keep_elections()
            await asyncio.sleep(STEP_S if is_cluster else NO_CLUSTER_S)

    async def close(self) -> None:
        """Keep nothing more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


__all__ = ["ElectionKeeper"]
