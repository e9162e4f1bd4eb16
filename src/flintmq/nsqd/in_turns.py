"""Looking at very many things without making everybody wait.

Requests that do so wait for each other (:mod:`flintmq.nsqd.api.lines`), so that a turn of the loop is lengthened by one
of them, however many there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

Item = TypeVar("Item")

PER_TURN = 20  # topics that are looked at before others get a turn
_REST_S = 0.001


async def in_turns(items: Iterable[Item]) -> AsyncIterator[Item]:
    """Yield items, and rest behind every :data:`PER_TURN` of them."""
    for number, item in enumerate(items, 1):
        yield item
        if number % PER_TURN == 0:
            await rest()


async def rest() -> None:
    """Leave the loop to others for a moment: beside one that is never idle the thread that syncs waits for Python."""
    await asyncio.sleep(_REST_S)
