"""Discovery for the blocking producer: asks nsqlookupd where topics are, and learns from what they say.

Rules of this file: part of :mod:`flintmq.client.blocking.producer`, which has the rest; everything is called with the
lock held.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from flintmq.client.blocking.lookup import Lookup
from flintmq.client.blocking.timers import Timers
from flintmq.client.core.backoff import jittered_s
from flintmq.client.core.discovery import NODES_PATH, topic_path
from flintmq.client.core.publish import LOOKUP_JITTER
from flintmq.client.core.routing import Routes
from flintmq.client.core.topology import Topology
from flintmq.env import Env
from flintmq.errors import DiscoveryError, FlintError, NoNsqd

log = logging.getLogger("flintmq.client")

LOOK_AGAIN_S = 1.0
GAPS_S = 5.0  # between two lookups of a topic that has a partition which takes nothing


class Discovery(ABC):
    """The part of a producer that finds out where to publish."""

    _asked: dict[str, bool]
    _changed: threading.Condition
    _env: Env
    _gaps_at: float
    _last_error: FlintError | None
    _lookup: Lookup | None
    _lookup_interval_s: float
    _refresh_at: float
    _routes: Routes
    _time: Callable[[], float]
    _timers: Timers
    _under_way: dict[str, None]
    _waiting: dict[str, int]

    @abstractmethod
    def _keep(self, wanted: Iterable[str]) -> None: ...

    def _follow(self, now: float) -> None:
        """Refresh every topic again and again, and those that calls wait for, or with gaps, more often."""
        topics = dict.fromkeys(self._waiting)
        if now >= self._gaps_at:
            topics.update(dict.fromkeys(self._routes.gaps))
            self._gaps_at = now + GAPS_S
        if now >= self._refresh_at:
            topics.update(dict.fromkeys(self._routes.topics))
            self._refresh_at = now + jittered_s(self._lookup_interval_s, LOOKUP_JITTER, self._env.random.random())
        for topic in topics:
            self._look_up(topic)

    def _look_up(self, topic: str, at_once: bool = False) -> None:
        """Refresh what is known of a topic, once at a time.

        Args:
            at_once: what is known has just been found wrong; others wait until a second after the last lookup.
        """
        if topic in self._under_way:
            return
        if topic in self._asked and not at_once:
            self._asked[topic] = True
        elif self._lookup is not None:
            self._asked[topic] = False
            self._under_way[topic] = None
            distrusted = self._routes.distrusted(topic, self._time())
            self._lookup.ask(topic_path(topic, "w"), partial(self._found, topic), distrusted)

    def _end_asking(self, topic: str) -> None:
        if self._asked.pop(topic, False):
            self._look_up(topic)

    def _found(self, topic: str, outcome: Topology | DiscoveryError) -> None:
        assert self._lookup is not None
        if isinstance(outcome, DiscoveryError) or outcome.nodes or outcome.is_partitioned:
            self._learn(topic, outcome)
        elif outcome.is_refused:
            self._learn(topic, outcome, is_guess=True)
        else:
            self._lookup.ask(NODES_PATH, partial(self._found_any, topic, outcome.reason))  # nobody has the topic yet

    def _found_any(self, topic: str, reason: str, outcome: Topology | DiscoveryError) -> None:
        if isinstance(outcome, Topology):
            outcome = replace(outcome, reason=reason)
        self._learn(topic, outcome, is_guess=True)

    def _learn(self, topic: str, outcome: Topology | DiscoveryError, is_guess: bool = False) -> None:
        del self._under_way[topic]  # who asked meanwhile has this answer
        self._asked[topic] = False
        self._timers.call_later(min(LOOK_AGAIN_S, self._lookup_interval_s), self._end_asking, topic)
        if isinstance(outcome, DiscoveryError):
            self._last_error = outcome
            log.warning("discovery of %s failed: %s", topic, outcome)
            return
        if not outcome.nodes:
            reason = outcome.reason if outcome.is_refused else "the nsqlookupd list no nsqd"
            self._last_error = NoNsqd(topic, reason)
        self._routes.learn(topic, outcome, is_guess)
        self._keep(self._routes.addresses())
        self._changed.notify_all()
