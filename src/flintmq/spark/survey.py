"""The survey: what there is to read right now, the driver's view of all partition logs.

The rules of this file: a :class:`Surveyor` holds plain data only, because Spark pickles the reader that owns it; a
survey that may wait asks every nsqd until it answers or the retries are used up, one that may not leaves an nsqd that
is away out and says so.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from flintmq.clock import Clock, SystemClock
from flintmq.errors import FlintError, OptionError
from flintmq.spark.broker import FAILURES, POOL, PartitionLog, is_final
from flintmq.spark.discovery import LookupRefused, all_topics, nsqds_of_topic
from flintmq.spark.offsets import RESERVED_TOPICS, PartitionKey
from flintmq.spark.options import SourceOptions
from flintmq.spark.retry import FIRST_PAUSE_S, PAUSE_MAX_S, Retries

log = logging.getLogger("flintmq.spark")


@dataclass(slots=True)
class Survey:
    """Logs by partition, and the nsqds that did not answer (address to reason)."""

    logs: dict[PartitionKey, PartitionLog] = field(default_factory=dict)
    away: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Absence:
    since_ns: int
    reason: str
    attempts: int = 0
    next_attempt_ns: int = 0


class Surveyor:
    """Looks at all nsqds a query reads from."""

    def __init__(
        self, options: SourceOptions, clock: Clock | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._options = options
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._absences: dict[str, _Absence] = {}
        self._discovered: dict[str, tuple[str, ...]] = {}
        self._discovered_ns: int | None = None

    def look(
        self, known: Iterable[PartitionKey] = (), timestamp_ns: int | None = None, is_waiting: bool = False
    ) -> Survey:
        """Ask every nsqd for the ends of its logs.

        Args:
            known: partitions the query has read from; their nsqds are asked even when discovery no longer lists them.
            timestamp_ns: fill in ``at`` of each log.
            is_waiting: wait for each nsqd as long as the retries last.

        Raises:
            FlintError: discovery failed, or (when waiting) an nsqd stayed away.
        """
        topics_by_nsqd = self._wanted(known, is_waiting)
        survey = Survey()
        for address in sorted(topics_by_nsqd):
            topics = sorted(topics_by_nsqd[address])
            if is_waiting:
                found = self._ask_patiently(address, topics, timestamp_ns)
            else:
                found = self._ask_once(address, topics, timestamp_ns, survey)
            for topic, logs in zip(topics, found, strict=False):
                for entry in logs:
                    survey.logs[PartitionKey(topic, address, entry.partition)] = entry
        return survey

    def away_s(self, address: str) -> float:
        """For how long an nsqd has not answered."""
        absence = self._absences.get(address)
        return 0.0 if absence is None else (self._clock.monotonic_ns() - absence.since_ns) / 1e9

    def move_cursor(self, key: PartitionKey, sequence: int) -> int:
        """Create or advance the channel of the query on one partition; returns its position.

        Raises:
            FlintError: nsqd did not answer as often as the retries allow.
        """
        retries = Retries(self._options.retries, self._sleep)
        while True:
            try:
                return self.try_cursor(key, sequence)
            except FAILURES as error:
                if is_final(error, key.nsqd, self._options.link):
                    raise
                retries.failed(error, f"setting the cursor of {key.topic} {key.label}")

    def try_cursor(self, key: PartitionKey, sequence: int) -> int:
        """Move a cursor as :meth:`move_cursor` does, without a second attempt."""
        options = self._options
        with POOL.lend(key.nsqd, options.connect_timeout, options.fetch_timeout, options.link) as connection:
            return connection.cursor(key.topic, options.channel, key.partition, sequence)

    def _wanted(self, known: Iterable[PartitionKey], is_waiting: bool) -> dict[str, set[str]]:
        wanted: dict[str, set[str]] = {}
        if self._options.nsqd:
            for address in self._options.nsqd:
                wanted[address] = set(self._options.named_topics)
        else:
            for topic, addresses in self._discover(is_waiting).items():
                for address in addresses:
                    wanted.setdefault(address, set()).add(topic)
        for key in known:
            wanted.setdefault(key.nsqd, set()).add(key.topic)
        return wanted

    def _discover(self, is_waiting: bool) -> dict[str, tuple[str, ...]]:
        now_ns = self._clock.monotonic_ns()
        fresh_ns = int(self._options.lookupd_poll_interval * 1e9)
        if self._discovered_ns is not None and now_ns - self._discovered_ns < fresh_ns and not is_waiting:
            return self._discovered
        retries = Retries(self._options.retries, self._sleep)
        while True:
            try:
                self._discovered = self._ask_lookupds()
                break
            except FlintError as error:
                if isinstance(error, LookupRefused | OptionError):
                    raise
                if self._discovered_ns is not None and not is_waiting:
                    break  # go on with what is known; ask again when it is due
                retries.failed(error, "discovery")
        self._discovered_ns = self._clock.monotonic_ns()
        return self._discovered

    def _ask_lookupds(self) -> dict[str, tuple[str, ...]]:
        lookupds, timeout_s, link = self._options.lookupd, self._options.connect_timeout, self._options.link
        topics: Iterable[str] = self._options.named_topics
        if self._options.topic_pattern:
            pattern = re.compile(self._options.topic_pattern)
            found = all_topics(lookupds, timeout_s, link)
            topics = [topic for topic in found if pattern.fullmatch(topic) and topic not in RESERVED_TOPICS]
        return {topic: tuple(nsqds_of_topic(lookupds, topic, timeout_s, link)) for topic in topics}

    def _ask_patiently(self, address: str, topics: list[str], timestamp_ns: int | None) -> list[list[PartitionLog]]:
        retries = Retries(self._options.retries, self._sleep)
        while True:
            try:
                return self._offsets(address, topics, timestamp_ns)
            except FAILURES as error:
                if is_final(error, address, self._options.link):
                    raise
                retries.failed(error, f"asking nsqd {address} for offsets")

    def _ask_once(
        self, address: str, topics: list[str], timestamp_ns: int | None, survey: Survey
    ) -> list[list[PartitionLog]]:
        now_ns = self._clock.monotonic_ns()
        absence = self._absences.get(address)
        if absence is not None and now_ns < absence.next_attempt_ns:
            survey.away[address] = absence.reason
            return []
        try:
            found = self._offsets(address, topics, timestamp_ns)
        except FAILURES as error:
            if is_final(error, address, self._options.link):
                raise
            absence = absence or _Absence(now_ns, str(error))
            # an address that does not even refuse costs connectTimeout, so it is tried ever more seldom
            pause_s = min(FIRST_PAUSE_S * 2**absence.attempts, PAUSE_MAX_S)
            absence.attempts = min(absence.attempts + 1, 16)
            absence.reason = str(error)
            absence.next_attempt_ns = self._clock.monotonic_ns() + int(pause_s * 1e9)
            if address not in self._absences:
                log.warning("nsqd %s is away, its partitions wait: %s", address, error)
            self._absences[address] = absence
            survey.away[address] = absence.reason
            return []
        if self._absences.pop(address, None) is not None:
            log.warning("nsqd %s is back", address)
        return found

    def _offsets(self, address: str, topics: list[str], timestamp_ns: int | None) -> list[list[PartitionLog]]:
        options = self._options
        with POOL.lend(address, options.connect_timeout, options.fetch_timeout, options.link) as connection:
            return connection.offsets(topics, timestamp_ns)
