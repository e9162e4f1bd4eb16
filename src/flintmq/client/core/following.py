"""Follows a topic: has the nsqlookupd asked again and again, soon after a loss, rarely when all is quiet.

Rules of this file: one poll at a time; a topic with partitions is polled at least every ``PARTITIONED_POLL_S``, because
leadership moves without a connection being lost, and every ``SOON_S`` while something is missing. While no nsqlookupd
answers and something is missing, they are asked every few seconds; and soon again when they are back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from flintmq.client.core.backoff import jittered_s
from flintmq.client.core.discovery import PollTimes
from flintmq.client.core.reconnect import FailureLog
from flintmq.client.core.routing import DISTRUST_S, Target
from flintmq.client.core.timers import Timer, Timers
from flintmq.client.core.topology import PARTITION_COUNT_MAX, Topology
from flintmq.env import Env
from flintmq.errors import DiscoveryError

log = logging.getLogger("flintmq.client")

PARTITIONED_POLL_S = 5.0
SOON_S = 1.0

Wrong = tuple[tuple[int, str], ...]
"""Partitions and the nsqd that have been found not to lead them."""


class Following:
    """The nsqlookupd's picture of one topic, kept up to date.

    Args:
        times: when they are asked.
        ask: asks them; :meth:`answered` is to follow.
        found: told of each answer.
        failed: told when none of them has answered.

    Attributes:
        topology: as said last.
        is_polled: they were asked once, and have answered or failed.
    """

    def __init__(
        self,
        topic: str,
        times: PollTimes,
        env: Env,
        ask: Callable[[Wrong], object],
        found: Callable[[Topology], object],
        failed: Callable[[DiscoveryError], object],
    ) -> None:
        self.topology = Topology()
        self.is_polled = False
        self._topic = topic
        self._times = times
        self._env = env
        self._ask = ask
        self._found = found
        self._failed = failed
        self._timers: Timers | None = None
        self._timer: Timer | None = None
        self._is_asking = False
        self._is_stopped = False
        self._is_blind = False
        self._has_lost = False
        self._failure_log = FailureLog()
        self._distrusted: dict[tuple[int, str], float] = {}

    @property
    def is_blind(self) -> bool:
        """Whether no nsqlookupd has answered when they were asked last."""
        return self._is_blind or not self.is_polled

    @property
    def failure(self) -> str:
        """Why no nsqlookupd has answered, empty: one has, or they were not asked yet."""
        return self._failure_log.last(self._topic)

    def start(self, timers: Timers) -> None:
        """Ask for the first time."""
        self._timers = timers
        self._poll()

    def stop(self) -> None:
        """Ask no more."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def answered(self, outcome: Topology | DiscoveryError) -> None:
        """Take what was found, or why there is nothing, and ask again when it is time."""
        self._is_asking = False
        self.is_polled = True
        if self._is_stopped:
            return
        if isinstance(outcome, DiscoveryError):
            assert self._timers is not None
            if self._failure_log.is_new(self._topic, outcome, self._timers.time()):
                log.warning("discovery of %s failed: %s", self._topic, outcome)
            if not self._is_blind:
                self._times.hurry()
            self._is_blind = True
            self._failed(outcome)
        else:
            if self._is_blind:  # nsqd register one by one with nsqlookupd that are back
                self._times.hurry()
                self._failure_log.clear(self._topic)
            self._is_blind = self._has_lost = False
            self.topology = outcome
            if outcome.is_partitioned:
                self._times.limit(PARTITIONED_POLL_S, SOON_S)
                if not outcome.is_complete:
                    self._times.hurry()
            self._found(outcome)
        self._poll_later()

    def hurry(self) -> None:
        """Ask soon: something was lost."""
        self._has_lost = True
        if self._times.hurry() and self.is_polled and not self._is_asking:
            self._poll_later()

    def distrust(self, target: Target) -> None:
        """Believe for a while that an nsqd does not lead a partition, and ask soon."""
        if target.partition is not None and len(self._distrusted) < PARTITION_COUNT_MAX:
            assert self._timers is not None
            self._distrusted[target.partition, target.address] = self._timers.time() + DISTRUST_S
        self.hurry()

    def leads(self, target: Target) -> bool:
        """Whether nobody else is known to lead the partition of a target."""
        if target.partition is None:
            return True
        return self.topology.leaders.get(target.partition, target.address) == target.address

    def _poll(self) -> None:
        if self._is_stopped or self._is_asking:
            return
        assert self._timers is not None
        now = self._timers.time()
        self._distrusted = {wrong: until for wrong, until in self._distrusted.items() if until > now}
        self._is_asking = True
        try:
            self._ask(tuple(self._distrusted))
        except BaseException:  # Ctrl-C: there may be no answer
            self._is_asking = False
            self._poll_later()
            raise

    def _poll_later(self) -> None:
        if self._is_stopped:
            return
        if self._timer is not None:
            self._timer.cancel()
        assert self._timers is not None
        is_lacking = self._has_lost or not (self.topology.nodes or self.topology.leaders)
        is_hasty = self._is_blind and is_lacking
        self._timer = self._timers.call_later(self._times.next_s(self._jittered, is_hasty), self._poll)

    def _jittered(self, interval_s: float, jitter: float) -> float:
        return jittered_s(interval_s, jitter, self._env.random.random())
