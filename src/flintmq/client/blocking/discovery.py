"""Discovery for the blocking producer: asks nsqlookupd where topics are, and learns from what they say.

Rules of this file: everything is called with the producer's lock held.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from flintmq.client.blocking.lookup import Lookup
from flintmq.client.blocking.timers import Timers
from flintmq.client.core.backoff import jittered_s
from flintmq.client.core.discovery import NODES_PATH, topic_path
from flintmq.client.core.publish import LOOKUP_JITTER
from flintmq.client.core.reconnect import FailureLog
from flintmq.client.core.routing import Routes
from flintmq.client.core.topology import Topology
from flintmq.env import Env
from flintmq.errors import DiscoveryError, FlintError, NoNsqd

log = logging.getLogger("flintmq.client")

LOOK_AGAIN_S = 1.0
GAPS_S = 5.0  # between two lookups of a topic that has a partition which takes nothing


class Discovery:
    """Finds out where to publish, and keeps that up to date.

    Args:
        lookup: is asked.
        routes: take what is learnt.
        interval_s: seconds between two lookups of a topic, without jitter.
        waiting: topics that calls wait for.
        learned: called when the routes have changed.
        failed: told why it is not known where a topic is.
    """

    def __init__(
        self,
        lookup: Lookup,
        routes: Routes,
        interval_s: float,
        timers: Timers,
        env: Env,
        waiting: Collection[str],
        learned: Callable[[], object],
        failed: Callable[[FlintError], object],
        is_counted: bool = False,
    ) -> None:
        self._lookup = lookup
        self._is_counted = is_counted
        self._routes = routes
        self._interval_s = interval_s
        self._timers = timers
        self._env = env
        self._waiting = waiting
        self._learned = learned
        self._failed = failed
        self._asked: dict[str, bool] = {}  # lately; whether somebody wanted to ask again meanwhile
        self._under_way: dict[str, None] = {}
        self._failure_log = FailureLog()
        self._refresh_at = timers.time() + interval_s
        self._gaps_at = 0.0

    @property
    def unanswered(self) -> tuple[str, ...]:
        """The nsqlookupd that are being asked and have not answered yet."""
        return self._lookup.unanswered

    def end(self) -> None:
        """Ask no more."""
        self._lookup.end()

    def follow(self) -> None:
        """Refresh every topic again and again, and those that calls wait for, or with gaps, more often."""
        now = self._timers.time()
        topics = dict.fromkeys(self._waiting)
        if now >= self._gaps_at:
            topics.update(dict.fromkeys(self._routes.gaps))
            self._gaps_at = now + GAPS_S
        if now >= self._refresh_at:
            topics.update(dict.fromkeys(self._routes.topics))
            self._refresh_at = now + jittered_s(self._interval_s, LOOKUP_JITTER, self._env.random.random())
        for topic in topics:
            self.look_up(topic)

    def look_up(self, topic: str, at_once: bool = False) -> None:
        """Refresh what is known of a topic, once at a time.

        Args:
            at_once: what is known has just been found wrong; others wait until a second after the last lookup.
        """
        if topic in self._under_way:
            return
        if topic in self._asked and not at_once:
            self._asked[topic] = True
        else:
            self._asked[topic] = False
            self._under_way[topic] = None
            try:
                distrusted = self._routes.distrusted(topic, self._timers.time())
                self._lookup.ask(topic_path(topic, "w", self._is_counted), partial(self._found, topic), distrusted)
            except BaseException:  # Ctrl-C: there may be no answer
                self._under_way.pop(topic, None)
                self._asked.pop(topic, None)
                raise

    def _end_asking(self, topic: str) -> None:
        if self._asked.pop(topic, False):
            self.look_up(topic)

    def _found(self, topic: str, outcome: Topology | DiscoveryError) -> None:
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
        self._under_way.pop(topic, None)  # who asked meanwhile has this answer
        self._asked[topic] = False
        self._timers.call_later(min(LOOK_AGAIN_S, self._interval_s), self._end_asking, topic)
        if isinstance(outcome, DiscoveryError):
            self._failed(outcome)
            if self._failure_log.is_new(topic, outcome, self._timers.time()):
                log.warning("discovery of %s failed: %s", topic, outcome)
            return
        self._failure_log.clear(topic)
        if not outcome.nodes:
            reason = outcome.reason if outcome.is_refused else "the nsqlookupd list no nsqd"
            self._failed(NoNsqd(topic, reason))
        self._routes.learn(topic, outcome, is_guess)
        self._learned()
