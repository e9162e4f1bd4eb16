"""The survey: what there is to read right now, the driver's view of all partition logs, and where each of them is.

Who serves a log is looked up each time. Nsqds that are configured, or listed by nsqlookupd, are asked; a node of a
cluster also says who leads what it does not, and that one is asked then.

The rules of this file: a :class:`Surveyor` holds plain data only, because Spark pickles the reader that owns it; a
survey that may wait asks until every nsqd answers and every partition of a cluster has a leader, or the retries are
used up; one that may not leaves out what is away, and says so.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from flintmq.clock import Clock, SystemClock
from flintmq.errors import DiscoveryError, FlintError, OptionError
from flintmq.spark.broker import FAILURES, POOL, ConnectionPool, PartitionLog, TopicLogs, is_final
from flintmq.spark.discovery import (
    LookupRefused,
    TopicPlaces,
    all_topics,
    listed_places,
    partition_counts,
    places_of,
)
from flintmq.spark.errors import LogAway, LogTwice
from flintmq.spark.offsets import RESERVED_TOPICS, PartitionKey
from flintmq.spark.options import SourceOptions
from flintmq.spark.retry import FIRST_PAUSE_S, PAUSE_MAX_S, Retries

LACKING_INTERVAL_S = 1.0
"""Between two questions to nsqlookupd while a log is not where it was."""

UNKNOWN_LOG = ""
"""The id of a log of which nobody says more than that there has to be one."""

log = logging.getLogger("flintmq.spark")


@dataclass(slots=True)
class Survey:
    """Everything that was found.

    Attributes:
        logs: every log that is served, by its key.
        others: logs of the same topics that the options leave out.
        left_out: topic and partition of these, and of those that a cluster has elsewhere.
        away: nsqds that did not answer, and why.
        unled: logs that nobody serves now, of a cluster or of a topic with partitions, and why.
        asked: nsqds that answered, and the topics they were asked about.
    """

    logs: dict[PartitionKey, PartitionLog] = field(default_factory=dict)
    others: dict[PartitionKey, PartitionLog] = field(default_factory=dict)
    left_out: set[tuple[str, int]] = field(default_factory=set)
    away: dict[str, str] = field(default_factory=dict)
    unled: dict[PartitionKey, str] = field(default_factory=dict)
    asked: dict[str, set[str]] = field(default_factory=dict)

    def add(self, topic: str, entry: PartitionLog) -> None:
        """Take a log that an nsqd serves.

        Raises:
            LogTwice: another one has it, and they are not copies that a cluster keeps.
        """
        key = PartitionKey(topic, entry.partition, entry.log_id)
        other = self.logs.get(key)
        if other is not None and not (entry.epoch and other.epoch):
            raise LogTwice(*key, *sorted((other.nsqd, entry.nsqd)))
        if other is None or entry.epoch > other.epoch:  # who was the leader may not know yet that it is no longer
            self.logs[key] = entry

    def why_missing(self, key: PartitionKey) -> str:
        """Say why a log is not here, as far as anybody can tell."""
        reasons = [f"nsqd {address} is away ({reason})" for address, reason in sorted(self.away.items())]
        if key in self.unled:
            reasons.insert(0, self.unled[key])
        return "; ".join(reasons) or "no nsqd has it"


@dataclass(slots=True)
class _Absence:
    since_ns: int
    reason: str
    attempts: int = 0
    next_attempt_ns: int = 0


@dataclass(frozen=True, slots=True)
class _Asked:
    """Arguments of :meth:`Surveyor.look` with which nsqds are asked; ``times``: the time to ask for, of each topic."""

    timestamp_ns: int | None
    times: Mapping[str, int]
    is_waiting: bool
    is_lenient: bool
    compared: dict[tuple[str, str], str] = field(default_factory=dict)
    """The connection over which each nsqd was asked for the time of a topic, last."""


class Surveyor:
    """Looks at all nsqds a query reads from.

    Args:
        sleep: how to pause between attempts; seconds.
        pool: where connections come from; None: that of the process. With one, this is not to be pickled.
    """

    def __init__(
        self,
        options: SourceOptions,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
        pool: ConnectionPool | None = None,
    ) -> None:
        self._options = options
        self._own_pool = pool
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._absences: dict[str, _Absence] = {}
        self._places: dict[PartitionKey, str] = {}
        self._discovered: dict[str, TopicPlaces] = {}
        self._discovered_ns: int | None = None
        self._compared: dict[tuple[str, str], str] = {}  # the connection over which the times were asked for
        self._lacks_some = False

    @property
    def _pool(self) -> ConnectionPool:
        return POOL if self._own_pool is None else self._own_pool

    def look(
        self,
        known: Iterable[PartitionKey] = (),
        timestamp_ns: int | None = None,
        is_waiting: bool = False,
        is_lenient: bool = False,
        is_whole: bool = False,
        times: Mapping[PartitionKey, int] = {},
    ) -> Survey:
        """Ask every nsqd for the ends of its logs.

        Args:
            known: logs the query has read from; where they were, it is asked even when discovery no longer lists it.
            timestamp_ns: fill in ``at`` of each log.
            is_waiting: wait for each nsqd, and for the leaders of a cluster, as long as the retries last.
            is_lenient: having waited, go on without those who stay away.
            is_whole: wait as well for partitions that no nsqd has which nsqlookupd lists: it lists none that is dead.
            times: that nothing is later than which was read of logs, in ns; where an nsqd may have been started again
                since it was asked, fill in ``at`` with where what is later begins.

        Raises:
            FlintError: discovery failed, two nsqds have the same log, or (when waiting) something stayed away.
        """
        known = list(known)
        asked = _Asked(timestamp_ns, _behind_all(times), is_waiting, is_lenient)
        retries = Retries(self._options.retries, self._sleep)
        while True:
            survey = self._look_once(known, asked)
            if is_whole:
                self._find_unserved(survey)
            if not is_waiting or not survey.unled:
                self._compared |= asked.compared  # not before: a survey that is dropped has told nobody
                return survey
            key = min(survey.unled)
            try:
                retries.failed(LogAway(key.topic, self.label(key), survey.unled[key]), "looking for leaders")
            except LogAway as error:
                if not is_lenient:
                    raise
                log.warning("%s; going on without it", error)
                self._compared |= asked.compared
                return survey

    def _look_once(self, known: list[PartitionKey], asked: _Asked) -> Survey:
        survey = Survey()
        wanted: Mapping[str, set[str]] = self._wanted(known, asked.is_waiting)
        led: dict[PartitionKey, tuple[int, str]] = {}  # as nodes of a cluster say
        while wanted:
            for address in sorted(wanted):
                self._ask(address, sorted(wanted[address]), asked, survey, led)
            wanted = self._told(survey, led)
        for key, (epoch, address) in led.items():
            if key not in survey.logs:
                who = f"nsqd {address} leads it, and does not serve it yet" if address else "no node leads it"
                survey.unled[key] = f"{who} (epoch {epoch})"
        for key, entry in survey.logs.items():
            self._places[key] = entry.nsqd
        self._lacks_some = any(key not in survey.logs for key in known)
        return survey

    def _ask(
        self,
        address: str,
        topics: list[str],
        asked: _Asked,
        survey: Survey,
        led: dict[PartitionKey, tuple[int, str]],
    ) -> None:
        found: list[TopicLogs] | None = None
        if asked.is_waiting:
            try:
                found = self._ask_patiently(address, topics, asked)
            except FAILURES as error:
                if not asked.is_lenient or is_final(error, address, self._options.link):
                    raise
                log.warning("nsqd %s is away, going on without it: %s", address, error)
                survey.away[address] = str(error)
        else:
            found = self._ask_once(address, topics, asked, survey)
        if found is None:
            return
        survey.asked.setdefault(address, set()).update(topics)
        for topic, answer in zip(topics, found, strict=True):
            for entry in answer.logs:
                if self._options.reads(topic, entry.partition):
                    survey.add(topic, entry)
                else:
                    survey.others[PartitionKey(topic, entry.partition, entry.log_id)] = entry
                    survey.left_out.add((topic, entry.partition))
            for other in answer.elsewhere:
                key = PartitionKey(topic, other.partition, other.log_id)
                if not self._options.reads(topic, other.partition):
                    survey.left_out.add((topic, other.partition))
                    continue
                led[key] = max(led.get(key, (-1, "")), (other.epoch, other.nsqd))

    def _find_unserved(self, survey: Survey) -> None:
        """Note the partitions that a topic has and no nsqd that is listed."""
        served: dict[str, set[int]] = {}
        for key in (*survey.logs, *survey.others, *survey.unled):
            served.setdefault(key.topic, set()).add(key.partition)
        for topic, count in self._partition_counts().items():
            for number in set(range(count)) - served.get(topic, set()):
                if self._options.reads(topic, number):
                    reason = f"the topic has {count} partitions, and no nsqd that nsqlookupd lists has this one"
                    survey.unled[PartitionKey(topic, number, UNKNOWN_LOG)] = reason

    def _told(self, survey: Survey, led: Mapping[PartitionKey, tuple[int, str]]) -> dict[str, set[str]]:
        """Return whom to ask besides, because a node said that it leads what nobody has answered for."""
        wanted: dict[str, set[str]] = {}
        for key, (epoch, address) in led.items():
            entry = survey.logs.get(key)
            is_new = address not in survey.away and key.topic not in survey.asked.get(address, ())
            if address and is_new and (entry is None or entry.epoch < epoch):
                wanted.setdefault(address, set()).add(key.topic)
        return wanted

    def away_s(self, address: str) -> float:
        """For how long an nsqd has not answered."""
        absence = self._absences.get(address)
        return 0.0 if absence is None else (self._clock.monotonic_ns() - absence.since_ns) / 1e9

    def place(self, key: PartitionKey) -> str:
        """Return the address where a log was when it was seen last; empty when it never was."""
        return self._places.get(key, "")

    def label(self, key: PartitionKey) -> str:
        """Name a log for people: ``<nsqd>/<partition>``, or by its id when nobody has had it."""
        place = self.place(key)
        if key.log_id == UNKNOWN_LOG:
            return f"partition {key.partition}"
        return f"{place}/{key.partition}" if place else key.label

    def is_gone(self, key: PartitionKey, survey: Survey) -> bool:
        """Whether a log that a survey lacks is nowhere: everybody who could have it has answered, and has not.

        With nsqlookupd that is certain only of one whose nsqd was seen with it before: another may be starting
        somewhere else with its data directory.
        """
        if survey.away or key in survey.unled or key in survey.logs:
            return False
        if self._options.nsqd:
            return True
        return key.topic in survey.asked.get(self.place(key), ())

    def forget(self, key: PartitionKey) -> None:
        """Look for a log no longer where it was."""
        self._places.pop(key, None)

    def move_cursor(self, key: PartitionKey, sequence: int) -> int:
        """Create or advance the channel of the query on one partition; returns its position.

        Raises:
            FlintError: nsqd did not answer as often as the retries allow.
        """
        retries = Retries(self._options.retries, self._sleep)
        while True:
            address = self.place(key)
            try:
                if not address:
                    raise LogAway(key.topic, key.label, "it is not where it was")
                return self._cursors(address, {key: sequence})[key]
            except (*FAILURES, LogAway) as error:
                if is_final(error, address, self._options.link):
                    raise
                retries.failed(error, f"setting the cursor of {key.topic} {self.label(key)}")
            self.look([key])  # perhaps it is elsewhere by now

    def try_cursors(self, wanted: Mapping[PartitionKey, int]) -> dict[PartitionKey, int]:
        """Move cursors without a second attempt; returns those that were moved, and warns of the others."""
        moved: dict[PartitionKey, int] = {}
        by_address: dict[str, dict[PartitionKey, int]] = {}
        for key, sequence in wanted.items():
            address = self.place(key)
            if address and not self.away_s(address):
                by_address.setdefault(address, {})[key] = sequence
        for address, those in by_address.items():
            try:
                moved |= self._cursors(address, those)
            except FlintError as error:  # only the lag shown is late; the next commit says it again
                log.warning("cursors on nsqd %s not moved: %s", address, error)
        return moved

    def _cursors(self, address: str, wanted: Mapping[PartitionKey, int]) -> dict[PartitionKey, int]:
        options = self._options
        topics = sorted({key.topic for key in wanted})
        moved: dict[PartitionKey, int] = {}
        with self._pool.lend(address, options.connect_timeout, options.fetch_timeout, options.link) as connection:
            # a number means nothing in another log: that of a topic that was created anew, or of another directory
            there = {
                PartitionKey(topic, entry.partition, entry.log_id)
                for topic, answer in zip(topics, connection.offsets(topics), strict=True)
                for entry in answer.logs
            }
            for key, sequence in wanted.items():
                if key in there:
                    moved[key] = connection.cursor(key.topic, options.channel, key.partition, sequence)
        for key in wanted.keys() - moved.keys():
            raise LogAway(key.topic, key.label, f"nsqd {address} no longer has it")
        return moved

    def _wanted(self, known: Iterable[PartitionKey], is_waiting: bool) -> dict[str, set[str]]:
        wanted: dict[str, set[str]] = {}
        if self._options.nsqd:
            for address in self._options.nsqd:
                wanted[address] = set(self._options.named_topics)
        else:
            for topic, places in self._discover(is_waiting).items():
                for address in places.nsqds:
                    wanted.setdefault(address, set()).add(topic)
        for key in known:
            address = self.place(key)
            if address:
                wanted.setdefault(address, set()).add(key.topic)
        return wanted

    def _discover(self, is_waiting: bool) -> dict[str, TopicPlaces]:
        now_ns = self._clock.monotonic_ns()
        interval_s = self._options.lookupd_poll_interval
        if self._lacks_some:
            interval_s = min(interval_s, LACKING_INTERVAL_S)
        fresh_ns = int(interval_s * 1e9)
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

    def _ask_lookupds(self) -> dict[str, TopicPlaces]:
        lookupds, timeout_s, link = self._options.lookupd, self._options.connect_timeout, self._options.link
        if not self._options.topic_pattern:
            return places_of(lookupds, self._options.named_topics, timeout_s, link)
        pattern = re.compile(self._options.topic_pattern)
        found = all_topics(lookupds, timeout_s, link)
        topics = [topic for topic in found if pattern.fullmatch(topic) and topic not in RESERVED_TOPICS]
        return listed_places(lookupds, topics, timeout_s, link)

    def _partition_counts(self) -> dict[str, int]:
        """Return how many partitions the topics have that nsqlookupd has told of, whoever serves them; those of which
        that was not told with their places are asked about.
        """
        options = self._options
        counts = {topic: each.partition_count for topic, each in self._discovered.items()}
        known = {topic: count for topic, count in counts.items() if count is not None}
        unknown = [topic for topic in counts if topic not in known]
        retries = Retries(options.retries, self._sleep)
        while True:
            try:
                return known | partition_counts(options.lookupd, unknown, options.connect_timeout, options.link)
            except DiscoveryError as error:
                if isinstance(error, LookupRefused):
                    raise
                retries.failed(error, "discovery")

    def _ask_patiently(self, address: str, topics: list[str], asked: _Asked) -> list[TopicLogs]:
        retries = Retries(self._options.retries, self._sleep)
        while True:
            try:
                return self._offsets(address, topics, asked)
            except FAILURES as error:
                if is_final(error, address, self._options.link):
                    raise
                retries.failed(error, f"asking nsqd {address} for offsets")

    def _ask_once(self, address: str, topics: list[str], asked: _Asked, survey: Survey) -> list[TopicLogs] | None:
        """Ask as :meth:`_ask_patiently` does, without a second attempt; None: it is away."""
        now_ns = self._clock.monotonic_ns()
        absence = self._absences.get(address)
        if absence is not None and now_ns < absence.next_attempt_ns:
            survey.away[address] = absence.reason
            return None
        try:
            found = self._offsets(address, topics, asked)
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
            return None
        if self._absences.pop(address, None) is not None:
            log.warning("nsqd %s is back", address)
        return found

    def _offsets(self, address: str, topics: list[str], asked: _Asked) -> list[TopicLogs]:
        options = self._options
        with self._pool.lend(address, options.connect_timeout, options.fetch_timeout, options.link) as connection:
            here = [topic for topic in topics if topic in asked.times]
            times = {each: asked.times[each] for each in here if self._compared.get((address, each)) != connection.name}
            found = connection.offsets(topics, asked.timestamp_ns, times)
            asked.compared.update(((address, topic), connection.name) for topic in times)
            return found


def _behind_all(times: Mapping[PartitionKey, int]) -> dict[str, int]:
    """Return for each topic the first time that is later than those of all its logs."""
    found: dict[str, int] = {}
    for key, time_ns in times.items():
        found[key.topic] = max(time_ns + 1, found.get(key.topic, 0))
    return found
