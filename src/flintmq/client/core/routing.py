"""Routes: the nsqd, and the partition, that a publish goes to. Pure: no clock, no random numbers, no IO.

Rules of this file:

- A publish without a sharding id may go to any partition that takes messages now; they take turns.
- A sharding id belongs to one partition for good. Who leads that partition may change; another one is never taken.
- An nsqd that says it does not lead a partition, or cannot write to it, is not asked again before the next lookup, and
  that lookup believes it only if no nsqlookupd says anything else (``DISTRUST_S``).
- A topic that is known to have partitions keeps them while every nsqlookupd says that there is no such topic: it is
  never taken for one without, which an nsqd of ours would create.
- While the nsqlookupd list no nsqd at all, what was known stands: they have just started, and nsqd register one by one.

Source: Youzan's smart client, "Client as producer" and "Ordered Message Consumption".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flintmq.client.core.once import Home
from flintmq.client.core.publish import TOPIC_COUNT_MAX, Carrier
from flintmq.client.core.sharding import ShardingId, partition_of
from flintmq.client.core.topology import PARTITION_COUNT_MAX, Topology
from flintmq.client.options import SOURCE, whole
from flintmq.errors import OptionError

DISTRUST_S = 10.0


class Target(NamedTuple):
    """An nsqd, or a partition on it."""

    address: str
    partition: int | None = None

    def __str__(self) -> str:
        return self.address if self.partition is None else f"{self.address} partition {self.partition}"


class Place(NamedTuple):
    """A connection, or a partition on it, that can be published to now."""

    connection: Carrier
    partition: int | None


class Turns:
    """The places a topic can be published at, in turn.

    Args:
        first: whose turn it was last.
    """

    __slots__ = ("places", "_last")

    def __init__(self, places: list[Place], first: int) -> None:
        self.places = places
        self._last = first

    def next(self) -> Place | None:
        """The next in turn, one whose connection is not choked if there is a choice."""
        places = self.places
        for _ in places:
            self._last = (self._last + 1) % len(places)
            if not places[self._last].connection.is_write_paused:
                break
        return places[self._last] if places else None


class _Route:
    """The state of one topic as far as it is known.

    Attributes:
        is_gone: it has partitions, and no nsqlookupd knew it when they were asked last.
    """

    __slots__ = ("topology", "is_guess", "leaders", "distrusted", "is_gone")

    def __init__(self, topology: Topology, is_guess: bool) -> None:
        self.topology = topology
        self.is_guess = is_guess
        self.is_gone = False
        self.leaders = dict(topology.leaders)
        self.distrusted: dict[tuple[int, str], float] = {}


class Routes:
    """The topics of a producer, and where each of them is.

    Args:
        nsqd: ``host:port`` of the nsqd to publish to, when no nsqlookupd is asked.
    """

    def __init__(self, nsqd: tuple[str, ...]) -> None:
        self._nsqd = nsqd
        self._routes: dict[str, _Route] = {}
        self._moved: dict[tuple[str, int], int] = {}
        self._learned: dict[str, int] = {}

    # --- learning ---

    def learn(self, topic: str, topology: Topology, is_guess: bool = False) -> None:
        """Take what a lookup found.

        Args:
            is_guess: no nsqlookupd knows the topic; these are simply all nsqd there are.
        """
        self._learned[topic] = self._learned.pop(topic, 0) + 1
        while len(self._learned) > TOPIC_COUNT_MAX:
            del self._learned[next(iter(self._learned))]
        former = self._routes.pop(topic, None)
        says_nothing = is_guess and not topology.nodes and not topology.is_refused
        if former is not None and (says_nothing or (is_guess and former.topology.is_partitioned)):
            former.is_gone |= not says_nothing and not topology.is_refused
            self._routes[topic] = former
            return
        route = self._routes[topic] = _Route(topology, is_guess)
        if former is not None:
            route.distrusted = former.distrusted
        while len(self._routes) > TOPIC_COUNT_MAX:
            del self._routes[next(iter(self._routes))]

    def drop(self, topic: str, partition: int, address: str, now: float) -> None:
        """Note that an nsqd does not lead a partition, or cannot write to it."""
        if self._nsqd:
            if len(self._moved) > TOPIC_COUNT_MAX:
                self._moved.clear()
            self._moved[topic, partition] = self._nsqd.index(address) + 1 if address in self._nsqd else 0
        elif (route := self._routes.get(topic)) is not None:
            if route.leaders.get(partition) == address:
                del route.leaders[partition]
            route.distrusted[partition, address] = now + DISTRUST_S

    def distrusted(self, topic: str, now: float) -> tuple[tuple[int, str], ...]:
        """(partition, address) that were found wrong a short while ago."""
        route = self._routes.get(topic)
        if route is None:
            return ()
        route.distrusted = {wrong: until for wrong, until in route.distrusted.items() if until > now}
        return tuple(route.distrusted)

    # --- answering ---

    def knows(self, topic: str) -> bool:
        """Whether a lookup has found anything out about a topic."""
        return bool(self._nsqd) or topic in self._routes

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that were looked up."""
        return tuple(self._routes)

    @property
    def gaps(self) -> tuple[str, ...]:
        """Topics with a partition that nothing can be published to now."""
        return tuple(
            topic
            for topic, route in self._routes.items()
            if len(route.leaders) < max(len(route.topology.leaders), route.topology.partition_count)
        )

    def addresses(self) -> Iterable[str]:
        """Every nsqd that should be connected."""
        for route in self._routes.values():
            yield from route.topology.leaders.values()
            yield from route.topology.plain

    def targets(self, topic: str) -> tuple[Target, ...]:
        """Return where a publish without a sharding id may go."""
        if self._nsqd:
            return tuple(Target(address) for address in self._nsqd)
        route = self._routes.get(topic)
        if route is None:
            return ()
        if route.topology.is_partitioned:
            return tuple(Target(address, partition) for partition, address in route.leaders.items())
        return tuple(Target(address) for address in route.topology.plain)

    def learned_count(self, topic: str) -> int:
        """Return how many lookups of a topic have said something: with the next one its partitions may be more."""
        return self._learned.get(topic, 0)

    def lacks(self, topic: str, partition: int | None) -> bool:
        """Whether a partition is beyond those that a topic was known to have when it was looked up last."""
        route = self._routes.get(topic)
        if route is None or partition is None or not route.topology.is_partitioned:
            return False
        return 0 < route.topology.partition_count <= partition

    def partition_count(self, topic: str) -> int:
        """Return how many partitions a topic has; 0 when nobody said."""
        route = self._routes.get(topic)
        return 0 if route is None else route.topology.partition_count

    def leader(self, topic: str, partition: int) -> str | None:
        """The nsqd to publish to for a partition; None when there is none now."""
        if self._nsqd:
            return self._nsqd[self._moved.get((topic, partition), 0) % len(self._nsqd)]
        route = self._routes.get(topic)
        return None if route is None else route.leaders.get(partition)

    def log_id(self, topic: str, partition: int | None) -> str:
        """Return the id of a partition's log, if that stays the same whoever leads it; empty when nobody said so."""
        route = self._routes.get(topic)
        return "" if route is None or partition is None else route.topology.log_ids.get(partition, "")

    def home(self, topic: str, partition: int | None, address: str) -> Home:
        """Return where an nsqd would store a publish."""
        log_id = self.log_id(topic, partition)
        return Home("" if log_id else address, log_id, topic, partition)

    def nsqd_of(self, home: Home) -> str | None:
        """The nsqd that stores in a log; None when nobody leads it now, or it is no longer that of its partition."""
        if not home.log_id:
            return home.address
        if home.partition is None or self.log_id(home.topic, home.partition) != home.log_id:
            return None
        return self.leader(home.topic, home.partition)

    def never(self, topic: str, partition: int | None) -> str:
        """Return why a topic has no such partition and will not have it, or no partitions at all; empty when it may."""
        route = self._routes.get(topic)
        if route is None or route.is_guess:
            return ""
        count = route.topology.partition_count
        if not route.topology.is_partitioned:
            return f"topic {topic} has no partitions: publish without sharding_id, partition, trace_id and headers"
        if partition is not None and count and partition >= count:
            return f"topic {topic} has partitions 0 to {count - 1}, not {partition}"
        return ""

    def is_extended(self, topic: str) -> bool:
        """Whether it is known that messages of a topic may carry headers."""
        route = self._routes.get(topic)
        return route is not None and route.topology.is_extended

    def decides_headers(self, topic: str) -> bool:
        """Whether it will not be known better than now if messages of a topic may carry headers, when one is sent.

        With the addresses of nsqd alone nobody ever says so.
        """
        route = self._routes.get(topic)
        return bool(self._nsqd) or (route is not None and (not route.is_guess or bool(route.topology.nodes)))

    def has_headers(self, topic: str) -> bool:
        """Whether messages of a topic may carry headers; True while nobody said otherwise."""
        route = self._routes.get(topic)
        return route is None or not route.topology.is_partitioned or route.topology.is_extended

    def is_ordered(self, topic: str) -> bool:
        """Whether it is known that a topic is to be consumed in order."""
        route = self._routes.get(topic)
        return route is not None and route.topology.is_ordered

    def takes_headers_alone(self, topic: str) -> bool:
        """Whether it is known that a topic has no partitions, and that its messages may carry headers."""
        route = self._routes.get(topic)
        return route is not None and route.topology.is_extended and not route.topology.is_partitioned

    def refusal(self, topic: str, partition: int | None, has_headers: bool) -> tuple[str, str] | None:
        """Code and text of why a topic will never take a publish that needs partitions; None when it may."""
        if reason := self.never(topic, partition):
            return "NO_PARTITIONS", reason
        if has_headers and not self.has_headers(topic):
            how = "create it with extend=true (flintmq topic create --headers), or upgrade it"
            return "E_EXT_NOT_SUPPORT", f"topic {topic} takes no headers: {how}"
        return None

    def why_gone(self, topic: str) -> str:
        """Return what to do about a topic whose partitions no nsqlookupd knows any more; empty when they are known."""
        route = self._routes.get(topic)
        if route is None or not route.is_gone:
            return ""
        count = route.topology.partition_count or len(route.topology.leaders)
        had = "one partition" if count == 1 else f"{count} partitions"
        return f"it had {had}, and no nsqlookupd knows it any more (deleted?): create it again, or start a new producer"

    def why_not(self, topic: str, partition: int | None) -> str:
        """Return why nothing can be published to a partition now."""
        route = self._routes.get(topic)
        if route is None or route.is_guess:
            reason = f" ({route.topology.reason})" if route is not None and route.topology.reason else ""
            return f"no nsqlookupd knows topic {topic}{reason}: create it with partitions first"
        if not route.leaders and (gone := self.why_gone(topic)):
            return f"topic {topic}: {gone}"
        known = ", ".join(map(str, route.leaders)) or "none"
        if partition is None:
            return f"no nsqlookupd says how many partitions topic {topic} has; leaders are known of: {known}"
        which = f"partition {partition} of {route.topology.partition_count or 'an unknown number'}"
        return f"{which} of topic {topic} has no nsqd that takes messages; leaders are known of: {known}"


def check_place(sharding_id: ShardingId | None, partition: int | None, has_lookup: bool, sharding: str) -> None:
    """Raise OptionError unless a publish can be asked for like this.

    Args:
        has_lookup: there are nsqlookupd, which know how many partitions there are.
        sharding: the producer's function.
    """
    if sharding_id is not None and partition is not None:
        raise OptionError("partition", partition, "either sharding_id or partition, not both", SOURCE)
    if sharding_id is not None:
        if not has_lookup:
            allowed = "with nsqlookupd_http_addresses, which know how many partitions there are; or name one"
            raise OptionError("sharding_id", sharding_id, allowed, SOURCE)
        partition_of(sharding_id, 1, sharding)
    if partition is not None:
        whole(partition, "partition", 0, PARTITION_COUNT_MAX - 1)
