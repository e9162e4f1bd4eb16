"""``--mode``: several hosts are used in turn, in turn without those that fail, or the quicker ones more.

Rules of this file: pure, time and chance come in; a host that failed is left out for 30 s, then for twice as long each
time it fails again, at most 15 minutes; when all are left out, all are used again; there is always one.

Source: NSQ 1.3, apps/nsq_to_http, apps/nsq_to_nsq, with github.com/bitly/go-hostpool.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

ROUND_ROBIN, HOSTPOOL, EPSILON_GREEDY = "round-robin", "hostpool", "epsilon-greedy"
MODES = (HOSTPOOL, ROUND_ROBIN, EPSILON_GREEDY)
RETRY_S = (30.0, 900.0)
"""Until a host that failed is tried again: at first, and at most."""
EXPLORE = (0.3, 0.01)
"""The part that goes to any host, to learn how quick it is: at first, and at least."""
EXPLORE_DECAY = 0.9
REMEMBER_S = 300.0
_TIMES_MAX = 256  # of a host; the newest count
_SHORTEST_S = 0.0001


class _Host:
    __slots__ = ("is_dead", "name", "next_try_at", "retry_s", "times")

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.retry_s, self.next_try_at = RETRY_S[0], 0.0
        self.times: deque[tuple[float, float]] = deque(maxlen=_TIMES_MAX)

    def can_be_tried(self, now: float) -> bool:
        return not self.is_dead or now >= self.next_try_at

    def average_s(self, now: float) -> float | None:
        """Return how long it takes lately; None: nobody knows."""
        while self.times and self.times[0][0] < now - REMEMBER_S:
            self.times.popleft()
        return sum(time for _, time in self.times) / len(self.times) if self.times else None


class HostPool:
    """The hosts and how they do.

    Args:
        now: seconds that never jump.
        chance: for ``epsilon-greedy``.
    """

    def __init__(self, names: Sequence[str], mode: str, now: Callable[[], float], chance: random.Random) -> None:
        self._hosts = [_Host(name) for name in dict.fromkeys(names)]
        self._by_name = {host.name: host for host in self._hosts}
        self._mode = mode
        self._now = now
        self._chance = chance
        self._next = 0
        self._explore = EXPLORE[0]

    def get(self) -> str:
        """Return the one to use."""
        hosts = self._hosts
        if len(hosts) == 1:
            return hosts[0].name
        if self._mode == ROUND_ROBIN:
            return self._in_turn().name
        now = self._now()
        host = self._quick(now) if self._mode == EPSILON_GREEDY else None
        for _ in hosts:
            if host is not None:
                break
            host = self._in_turn()
            if not host.can_be_tried(now):
                host = None
        if host is None:
            for each in hosts:
                each.is_dead = False
            host = self._in_turn()
        if host.is_dead:
            host.retry_s = min(RETRY_S[1], 2 * host.retry_s)
            host.next_try_at = now + host.retry_s
        return host.name

    def deal(self, count: int) -> list[str]:
        """Return those that ``count`` things are spread over evenly."""
        return list(dict.fromkeys(self.get() for _ in range(min(count, len(self._hosts)))))

    def mark(self, name: str, is_well: bool, took_s: float) -> None:
        """Note how it went."""
        host, now = self._by_name[name], self._now()
        if is_well:
            host.is_dead = False
            if self._mode == EPSILON_GREEDY:
                host.times.append((now, took_s))
        elif not host.is_dead:
            host.is_dead = True
            host.retry_s = RETRY_S[0]
            host.next_try_at = now + host.retry_s

    def _in_turn(self) -> _Host:
        host = self._hosts[self._next]
        self._next = (self._next + 1) % len(self._hosts)
        return host

    def _quick(self, now: float) -> _Host | None:
        """Return one by chance, in proportion to how quick it is; None: any will do."""
        if self._chance.random() < self._explore:
            self._explore = max(EXPLORE[1], self._explore * EXPLORE_DECAY)
            return None
        known: list[tuple[_Host, float]] = []
        for host in self._hosts:
            average_s = host.average_s(now) if host.can_be_tried(now) else None
            if average_s is not None:
                known.append((host, 1 / max(average_s, _SHORTEST_S)))
        if not known:
            return None
        return self._chance.choices([host for host, _ in known], [weight for _, weight in known])[0]
