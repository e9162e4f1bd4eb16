"""Follows a topic: asks the nsqlookupd again and again, soon after a loss, rarely when all is quiet.

Rules of this file: one poll at a time; a topic with partitions is polled at least every ``PARTITIONED_POLL_S``, because
leadership moves without a connection being lost, and every ``SOON_S`` while something is missing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from flintmq.client.aio.lookup import Lookup
from flintmq.client.core.backoff import jittered_s
from flintmq.client.core.discovery import PollTimes
from flintmq.client.core.routing import DISTRUST_S, Target
from flintmq.client.core.topology import PARTITION_COUNT_MAX, Topology
from flintmq.client.subscription import PARTITIONED_POLL_S, SOON_S
from flintmq.env import Env
from flintmq.errors import DiscoveryError

log = logging.getLogger("flintmq.client")


class Following:
    """What the nsqlookupd say of one topic.

    Args:
        found: told of each answer.

    Attributes:
        topology: as said last.
    """

    def __init__(
        self, lookup: Lookup, topic: str, times: PollTimes, env: Env, found: Callable[[Topology], None]
    ) -> None:
        self.topology = Topology()
        self._lookup = lookup
        self._topic = topic
        self._times = times
        self._env = env
        self._found = found
        self._wanted = asyncio.Event()
        self._is_blind = False
        self._distrusted: dict[tuple[int, str], float] = {}

    async def run(self) -> None:
        """Poll for ever."""
        while True:
            self._wanted.clear()
            try:
                async with asyncio.timeout(self._times.next_s(self._jittered)):
                    await self._wanted.wait()
            except TimeoutError:
                await self.poll()

    async def poll(self) -> None:
        """Ask once, and tell what was found."""
        now = asyncio.get_running_loop().time()
        self._distrusted = {wrong: until for wrong, until in self._distrusted.items() if until > now}
        try:
            topology = await self._lookup.topic(self._topic, tuple(self._distrusted))
        except DiscoveryError as error:
            log.warning("discovery of %s failed: %s", self._topic, error)
            if not self._is_blind:
                self._times.hurry()
            self._is_blind = True
            return
        self._is_blind = False
        self.topology = topology
        if topology.is_partitioned:
            self._times.limit(PARTITIONED_POLL_S, SOON_S)
            if not topology.is_complete:
                self._times.hurry()
        self._found(topology)

    def hurry(self) -> None:
        """Ask soon: something was lost."""
        if self._times.hurry():
            self._wanted.set()

    def distrust(self, target: Target) -> None:
        """Believe for a while that an nsqd does not lead a partition, and ask soon."""
        if target.partition is not None and len(self._distrusted) < PARTITION_COUNT_MAX:
            until = asyncio.get_running_loop().time() + DISTRUST_S
            self._distrusted[target.partition, target.address] = until
        self.hurry()

    def leads(self, target: Target) -> bool:
        """Whether nobody else is known to lead the partition of a target."""
        if target.partition is None:
            return True
        return self.topology.leaders.get(target.partition, target.address) == target.address

    async def close(self) -> None:
        """Close the connections to the nsqlookupd."""
        await self._lookup.close()

    def _jittered(self, interval_s: float, jitter: float) -> float:
        return jittered_s(interval_s, jitter, self._env.random.random())
