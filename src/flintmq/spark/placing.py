"""The places where a task's rows go: which nsqd, which partition.

A row's place follows from the row and from its task alone: from the column ``partition``, from ``key`` as our clients
shard, else from the numbers of task and epoch, and from the name of a batch write. Never from arrival, or from who
answers first: a task that is run again puts each row where its first try did. How many partitions that one found is in
the names of its producers, so a topic that has got more since is no reason to put rows elsewhere.

nsqlookupd lists no nsqd that is away, so by asking it alone a task cannot know that it misses rows of an earlier try.
What it listed when the write began goes with the writer (:class:`Begun`), and those nsqds are asked as well.

A topic without partitions is one log of an nsqd's own, or several that a cluster keeps: those have numbers, and are
placed in like partitions.

The rules of this file: who leads a partition is asked, and may change; the partition may not. Nothing is made here: a
topic that no nsqd has is made by what is published to it (:meth:`flintmq.spark.publish.Publishers.publish_first`), and
then it is looked for again.

Source: docs/idempotent.md ("PRODUCERS"), docs/decisions/0027.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flintmq.errors import UNREADABLE_JSON, FlintError, NoNsqd, NsqdError, OptionError, RemoteProtocolError
from flintmq.spark.broker import FAILURES, POOL, TOPIC_NOT_EXIST, is_final
from flintmq.spark.discovery import all_nsqds, nsqds_of_topic
from flintmq.spark.errors import LogAway
from flintmq.spark.identity import TaskIdentity
from flintmq.spark.options import AT_LEAST_ONCE, ONCE, SinkOptions
from flintmq.spark.retry import Retries
from flintmq.wire import commands

OTHERS_TTL_S = 60.0
GIVEN_UP_TTL_S = 60.0
SINK = "sink nsq"
NOTES_MAX = 1000

log = logging.getLogger("flintmq.spark")


@dataclass(frozen=True, slots=True)
class Begun:
    """The answer of nsqlookupd to the driver when a write began, or a micro-batch; the same for each try of a task.

    Attributes:
        nsqds: that have the option ``topic``; all there are, if none has it or the column ``topic`` decides. Empty when
            nsqds are given by address, when it does not matter, and when no nsqlookupd answered.
        is_first: whether nothing was published under the names of its tasks before.
    """

    nsqds: tuple[str, ...] = ()
    is_first: bool = False

    @property
    def has_all(self) -> bool:
        """Whether what a try has stored can be at these nsqds alone."""
        return self.is_first and bool(self.nsqds)


def begin(options: SinkOptions, is_first: bool) -> Begun:
    """Ask nsqlookupd once, on the driver; who does not answer there is met again by the tasks."""
    nsqds: list[str] = []
    if options.lookupd and options.delivery != AT_LEAST_ONCE:
        try:
            if options.topic:
                nsqds = nsqds_of_topic(options.lookupd, options.topic, options.connect_timeout, options.link)
            nsqds = nsqds or all_nsqds(options.lookupd, options.connect_timeout, options.link)
        except FlintError as error:
            log.warning("looking for nsqds before the write begins: %s", error)
    return Begun(tuple(nsqds), is_first)


@dataclass(frozen=True, slots=True)
class Place:
    """A partition of a topic, or a log that a cluster keeps of a plain one.

    ``partition`` is None for a plain topic of an nsqd's own, which is published to at one address.
    """

    topic: str
    partition: int | None


@dataclass(slots=True)
class Layout:
    """The places of one topic, as a task publishes to it.

    Attributes:
        partition_count: of the topic when the task was tried first; 0 for a plain topic that is in one place.
        address: of that place.
        log: the number that a cluster has given it since; None without one.
        is_plain: whether the topic has no partitions, also if a cluster keeps several logs of it.
        is_new: whether the nsqd at ``address`` did not have the topic.
        leaders: addresses by partition.
        known: producers of this task that were there before, and their last sequences.
        is_certain: whether what an earlier try has stored is known; not when an nsqd that may have it stayed away.
    """

    topic: str
    partition_count: int = 0
    address: str = ""
    log: int | None = None
    is_plain: bool = False
    is_new: bool = False
    leaders: dict[int, str] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)
    is_certain: bool = True


@dataclass(slots=True)
class _Found:
    """The answers of all nsqds to one round of questions."""

    partition_num: int = 0
    has_partitions: bool = False  # of their own, not only logs that a cluster keeps
    taken_for_one: int | None = None  # the log of a cluster in which an earlier try stored when it knew of none
    leaders: dict[int, tuple[int, bool, str]] = field(default_factory=dict)  # epoch, known from the start, address
    owners: dict[int, list[str]] = field(default_factory=dict)  # of partitions that no cluster keeps
    with_topic: list[str] = field(default_factory=list)
    without_topic: list[str] = field(default_factory=list)
    knowing: dict[str, dict[str, int]] = field(default_factory=dict)
    away: dict[str, FlintError] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)  # no nsqds of FlintMQ

    @property
    def can_be_published_to(self) -> bool:
        """Whether every place of the topic is at an nsqd that answers, though it may be at another one as well."""
        return bool(self.with_topic) and set(range(self.partition_num)) <= self.leaders.keys()


class Placing:
    """Finds the places of the topics that one task publishes to.

    Args:
        identity: of the task.
        sleep: how to pause between attempts; seconds.
        begun: what was known on the driver; nothing without one.
    """

    def __init__(
        self,
        options: SinkOptions,
        identity: TaskIdentity,
        sleep: Callable[[float], None] = time.sleep,
        begun: Begun | None = None,
    ) -> None:
        self._options = options
        self._identity = identity
        self._begun = begun or Begun()
        self._sleep = sleep
        self._layouts: dict[str, Layout | None] = {}

    def of(self, topic: str) -> Layout | None:
        """Return the places of a topic; None when an nsqd that has to do with it is not FlintMQ's.

        Raises:
            FlintError: an nsqd that is needed did not answer as often as the retries allow.
            OptionError: ``delivery=once`` cannot be had.
        """
        if topic not in self._layouts:
            self._layouts[topic] = self._look(topic)
        return self._layouts[topic]

    def forget(self, topic: str) -> None:
        """Look for the places of a topic anew when they are asked for: it was not there, and is being made."""
        self._layouts.pop(topic, None)

    def find(self, place: Place) -> str | None:
        """Ask once who leads a partition now; None when nobody says, or one that may have it is away."""
        if place.partition is None:
            return None
        try:
            found = self._ask_all(self._addresses_to_ask(place.topic), place.topic)
        except FlintError as error:
            log.warning("looking for partition %d of topic %s: %s", place.partition, place.topic, error)
            return None
        try:
            return self._leader(place.topic, place.partition, found)
        except (*FAILURES, LogAway):
            return None

    @property
    def known(self) -> dict[str, int]:
        """Producers of this task that were there when it began, and their last sequences."""
        return {each: last for layout in self._layouts.values() if layout for each, last in layout.known.items()}

    def addresses(self, topic: str) -> list[str]:
        """Return the nsqds that a topic can be published at, another one first in each task.

        Raises:
            NoNsqd: there is none.
        """
        addresses = self._addresses(topic)
        first = self._identity.task % len(addresses)
        return addresses[first:] + addresses[:first]

    def _addresses(self, topic: str) -> list[str]:
        options = self._options
        if options.nsqd:
            return list(options.nsqd)
        known = nsqds_of_topic(options.lookupd, topic, options.connect_timeout, options.link)
        known = known or all_nsqds(options.lookupd, options.connect_timeout, options.link)
        if not known:
            raise NoNsqd(topic, f"nsqlookupd {','.join(options.lookupd)} knows none")
        return known

    def _addresses_to_ask(self, topic: str) -> list[str]:
        """Return the nsqds that may have to do with a topic, also those that nsqlookupd no longer lists."""
        begun = self._begun.nsqds
        try:
            listed = self._addresses(topic)
        except NoNsqd:
            if not begun:
                raise
            listed = []
        return sorted({*listed, *begun}) if begun else listed

    def _look(self, topic: str) -> Layout | None:
        retries = Retries(self._options.retries, self._sleep)
        while True:
            addresses = self._addresses_to_ask(topic)
            found = self._ask_all(addresses, topic)
            if self._has_others(topic, found):
                return None
            known = {each: last for those in found.knowing.values() for each, last in those.items()}
            layout = Layout(topic, known=known, is_plain=not found.has_partitions)
            try:
                if found.partition_num or found.leaders:
                    self._place_in_partitions(layout, found)
                else:
                    self._place_plainly(layout, found, self._plain(topic, addresses, found))
                return layout
            except (*FAILURES, LogAway) as error:
                address = getattr(error, "address", "")
                if not isinstance(error, LogAway) and is_final(error, address, self._options.link):
                    raise
                # of nsqds that are found any one may take a plain topic, also one that has not got it
                instead = found.with_topic or (found.without_topic if self._options.lookupd else [])
                can_go_on = self._options.delivery != ONCE and (
                    found.can_be_published_to or bool(instead and not found.partition_num)
                )
                if not can_go_on or any(_given_up.get(each, 0.0) < time.monotonic() for each in found.away):
                    try:
                        retries.failed(error, f"looking for topic {topic}")
                        continue
                    except FlintError:
                        if not can_go_on:
                            raise
                for each in found.away:
                    _note(_given_up, each, GIVEN_UP_TTL_S)
                layout.is_certain = False
                if found.partition_num:
                    layout.leaders = {number: place for number, (*_, place) in found.leaders.items()}
                    layout.partition_count = min(layout.partition_count, found.partition_num) or found.partition_num
                else:
                    self._place_plainly(layout, found, self._turn(instead))
                log.warning(
                    "%s; going on without it, also in the next %.0f s: rows of topic %s that an earlier try has stored "
                    "there are stored again",
                    error,
                    GIVEN_UP_TTL_S,
                    topic,
                )
                return layout

    def _has_others(self, topic: str, found: _Found) -> bool:
        """Whether an nsqd that has to do with a topic is not FlintMQ's.

        Where the column ``topic`` decides, those of all topics were there in the beginning.
        """
        if not found.others or self._options.topic or not self._begun.nsqds:
            return bool(found.others)
        return bool(set(found.others).intersection(self._addresses(topic)))

    def _place_in_partitions(self, layout: Layout, found: _Found) -> None:
        counts = [count for each in layout.known if (count := self._identity.partition_count_in(each))]
        is_in_one = layout.is_plain and not counts and found.taken_for_one is not None
        layout.partition_count = 0 if is_in_one else max(counts, default=found.partition_num)
        for partition in range(max(layout.partition_count, found.partition_num)):
            layout.leaders[partition] = self._leader(layout.topic, partition, found)
        if is_in_one and found.taken_for_one is not None:
            layout.log, layout.address = found.taken_for_one, layout.leaders[found.taken_for_one]

    def _place_plainly(self, layout: Layout, found: _Found, address: str) -> None:
        layout.address, layout.is_new = address, address not in found.with_topic

    def _leader(self, topic: str, partition: int, found: _Found) -> str:
        """Return who a partition is published to.

        Partitions that no cluster keeps (epoch 0) may be on several nsqds, each with its own, and one that is
        away may have rows of an earlier try.
        """
        leader = found.leaders.get(partition)
        is_own = leader is not None and leader[0] == 0
        if leader is None or (is_own and found.away):
            reason = "; ".join(f"nsqd {each} is away ({error})" for each, error in sorted(found.away.items()))
            raise LogAway(topic, f"partition {partition}", reason or "nobody leads it")
        owners = found.owners.get(partition, [])
        if is_own and len(owners) > 1 and self._may_miss_tries:
            raise self._not_once(topic, f"has partition {partition}, which no cluster keeps, at {' and '.join(owners)}")
        return leader[2]

    def _plain(self, topic: str, addresses: Sequence[str], found: _Found) -> str:
        """Choose the nsqd for a plain topic: where an earlier try was, else in turn."""
        if self._may_miss_tries:
            if found.away and not found.with_topic:  # who is away may have it, and with partitions
                raise next(iter(found.away.values()))
            raise self._not_once(topic, "has no partitions")
        for address, known in found.knowing.items():
            if known:
                return address
        # who is away may have the topic; that it is chosen or not must not depend on that
        may_have = {*found.with_topic, *found.away}
        if begun := self._begun.nsqds:
            # the same in each try: never one that came later, which the next try might miss
            may_have = set(begun) if self._options.topic else may_have.intersection(begun) or set(begun)
        chosen = self._turn(sorted(may_have or addresses))
        if chosen in found.away:
            raise found.away[chosen]
        return chosen

    @property
    def _may_miss_tries(self) -> bool:
        """Whether once is wanted, and an earlier try can be at an nsqd that is away and that nobody tells of."""
        options = self._options
        return options.delivery == ONCE and bool(options.lookupd) and not self._begun.has_all

    def _not_once(self, topic: str, what: str) -> OptionError:
        lacks = ", which named none when the write began," if self._begun.is_first else ""
        allowed = (
            f"topic {topic} {what}, and nsqlookupd{lacks} does not tell of an nsqd that is away, which may have rows "
            "of an earlier try: name its nsqds with nsqd=, give the topic partitions that a cluster keeps, or set "
            "delivery=auto"
        )
        return OptionError("delivery", ONCE, allowed, SINK)

    def _turn(self, addresses: Sequence[str]) -> str:
        return addresses[(self._identity.task + self._identity.epoch) % len(addresses)]

    def _ask_all(self, addresses: Iterable[str], topic: str) -> _Found:
        found = _Found()
        asked: set[str] = set()
        wanted = list(addresses)
        while wanted:
            address = wanted.pop(0)
            if address in asked:
                continue
            asked.add(address)
            answer = self._ask(address, topic, found)
            if answer is None:
                continue
            try:
                self._take(address, answer, found)
                wanted += [str(other["nsqd"]) for other in answer.get("elsewhere", ()) if other["nsqd"]]
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                what = f"nsqd {address} answered PRODUCERS without the field {error}"
                found.away[address] = RemoteProtocolError("E_INVALID", what)
        return found

    def _take(self, address: str, answer: dict[str, Any], found: _Found) -> None:
        found.with_topic.append(address)
        found.partition_num = max(found.partition_num, int(answer["partition_num"]))
        found.has_partitions |= bool(answer["partition_num"])
        known = found.knowing.setdefault(address, {})
        for row in answer["partitions"]:
            producers = {str(each): int(last) for each, last in row["producers"].items()}
            known |= producers
            # of nsqds that own the same partition the one that each try knows of
            number, led = int(row["partition"]), (int(row["epoch"]), address in self._begun.nsqds, address)
            if answer["partition_num"] or led[0]:
                found.leaders[number] = max(found.leaders.get(number, led), led)
                found.partition_num = max(found.partition_num, number + 1)
                if not led[0]:
                    found.owners.setdefault(number, []).append(address)
                elif any(self._identity.partition_count_in(each) == 0 for each in producers):
                    found.taken_for_one = number
        highest = [int(other["partition"]) + 1 for other in answer.get("elsewhere", ())]
        found.partition_num = max(found.partition_num, *highest, 0)

    def _ask(self, address: str, topic: str, found: _Found) -> dict[str, Any] | None:
        options = self._options
        if _others.get(address, 0.0) > time.monotonic():
            found.others.append(address)
            return None
        try:
            with POOL.lend(address, options.connect_timeout, options.pub_timeout, options.link) as connection:
                connection.send(commands.producers(topic, self._identity.prefix))
                answer = json.loads(connection.receive())
        except NsqdError as error:
            if error.code == TOPIC_NOT_EXIST:
                found.without_topic.append(address)
                return None
            if error.code == "E_INVALID" and "invalid command" in error.detail:
                _note(_others, address, OTHERS_TTL_S)
                found.others.append(address)
                return None
            if is_final(error, address, options.link):
                raise
            found.away[address] = error
            return None
        except FAILURES as error:
            if is_final(error, address, options.link):
                raise
            found.away[address] = error
            return None
        except UNREADABLE_JSON:
            found.away[address] = RemoteProtocolError("E_INVALID", f"nsqd {address} answered PRODUCERS without JSON")
            return None
        return answer if isinstance(answer, dict) else {}


_others: dict[str, float] = {}
"""Addresses of nsqds that are not FlintMQ's, and until when that is not asked again; seconds."""


_given_up: dict[str, float] = {}
"""Addresses of nsqds that were waited for in vain, and until when that is not done again; seconds."""


def _note(notes: dict[str, float], address: str, ttl_s: float) -> None:
    if len(notes) >= NOTES_MAX:
        notes.clear()
    notes[address] = time.monotonic() + ttl_s
