"""The placement of a new topic's partitions on nodes: a pure function of what is known of the nodes.

Partitions go one by one to the node with the fewest, those of this topic counted first, so that a topic is spread over
as many nodes as there are, and several of its partitions share one when there are not enough. What is placed already
stays. Where partitions have several copies, those of one are on different machines, and in different zones as far as
there are.

Source: Youzan's nsqlookupd ("always allow several partitions per node"), docs/decisions/0017.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from flintmq.errors import FlintError

_NAMED_MAX = 8  # nodes, in a text


class NoNodes(FlintError):
    """There is no node that a partition could be placed on."""

    def __str__(self) -> str:
        return "no nsqd is registered that takes topics with partitions: start one with --lookupd-tcp-address"


def place(partition_num: int, loads: Mapping[str, int], placed: Mapping[int, str]) -> dict[int, str]:
    """Place the partitions of a topic that have no node yet.

    Args:
        loads: partitions of all topics on each node that may be given some; nodes by any name that can be ordered.
        placed: partitions of this topic that are somewhere already, not necessarily on one of these.

    Returns:
        The node of each partition that is new.

    Raises:
        NoNodes: there is something to place and no node.
    """
    missing = [number for number in range(partition_num) if number not in placed]
    if not missing:
        return {}
    if not loads:
        raise NoNodes
    mine = dict.fromkeys(loads, 0)
    for node in placed.values():
        if node in mine:
            mine[node] += 1
    heap = [(mine[node], loads[node], node) for node in loads]
    heapq.heapify(heap)
    found: dict[int, str] = {}
    for number in missing:
        here, load, node = heap[0]
        found[number] = node
        heapq.heapreplace(heap, (here + 1, load + 1, node))
    return found


# -- several copies ----------------------------------------------------------------------------------------------------


class NoPlace(FlintError):
    """There is no node for a copy of a partition."""


class TooFewNodes(NoPlace):
    """There are fewer places for copies of a partition than copies are wanted.

    Args:
        wanted: copies.
        node_count: nodes that take partitions.
        host_count: machines that these are on.
        allow_same_host: whether several copies may be on one.
    """

    def __init__(self, wanted: int, node_count: int, host_count: int, allow_same_host: bool) -> None:
        super().__init__(wanted, node_count, host_count, allow_same_host)
        self.wanted = wanted
        self.node_count = node_count
        self.host_count = host_count
        self.allow_same_host = allow_same_host

    def __str__(self) -> str:
        if not self.node_count:
            return "no nsqd of the cluster takes partitions: start one, or wait until one is back"
        text = f"replicator={self.wanted}, and there are {self.node_count} nsqds on {self.host_count} machines"
        if self.host_count < self.node_count and not self.allow_same_host:
            return (
                f"{text}, which have one copy each; start nsqds on other machines, ask for fewer copies, or give each "
                "nsqlookupd --allow-same-host, with which the loss of one machine can be that of all copies"
            )
        return f"{text}; start more, or ask for fewer copies"


class TooFewFiles(NoPlace):
    """The nodes that could have another copy of a partition have as many as their limits of open files allow.

    Args:
        copies_max: of each of these nodes.
    """

    def __init__(self, copies_max: Mapping[str, int]) -> None:
        super().__init__(copies_max)
        self.copies_max = copies_max

    def __str__(self) -> str:
        nodes = ", ".join(f"node {node} at most {count}" for node, count in islice(self.copies_max.items(), _NAMED_MAX))
        return (
            f"no nsqd has an open file left for another copy of a partition, each takes one: {nodes}; delete topics, "
            "raise the limit (LimitNOFILE of systemd, ulimit -n) and start those nsqds again one by one, or start more"
        )


@dataclass(frozen=True, slots=True)
class Site:
    """A node that may be given partitions.

    Attributes:
        node: its id.
        host: of its machine; two nodes of the same never have copies of one partition, unless allowed.
        zone: copies are spread over zones.
        led_count, held_count: partitions of all topics that it leads and has.
        copies_max: partitions that it may have; 0: no limit.
    """

    node: str
    host: str = ""
    zone: str = ""
    led_count: int = 0
    held_count: int = 0
    copies_max: int = 0


def place_copies(
    numbers: Iterable[int],
    copies: int,
    sites: Sequence[Site],
    placed: Mapping[int, Sequence[str]],
    allow_same_host: bool = False,
) -> dict[int, tuple[str, ...]]:
    """Choose nodes for partitions of one topic: for each the one that is to lead first, then those that follow it.

    Leaders go to the node that leads the fewest of this topic, then of all; followers first to zones that have none of
    the partition, then to the node that has the fewest of this topic, then of all.

    Args:
        numbers: of the partitions to place.
        copies: of each.
        placed: partitions of the topic that have nodes already, not necessarily of these.

    Raises:
        TooFewNodes: there are not so many nodes, or not so many machines.
        TooFewFiles: these have no files left for so many.
    """
    wanted = list(numbers)
    if not wanted:
        return {}
    hosts = {site.node: site.node if allow_same_host or not site.host else f"host {site.host}" for site in sites}
    host_count = len(set(hosts.values()))
    if copies > host_count:
        machines = len({site.host or site.node for site in sites})
        raise TooFewNodes(copies, len(sites), machines, allow_same_host)
    spread = _Spread(sites)
    for nodes in placed.values():
        spread.add(nodes)
    found: dict[int, tuple[str, ...]] = {}
    for number in wanted:
        free = able = [site for site in sites if spread.has_files(site)]
        chosen: list[str] = []
        zones: dict[str, int] = {}
        for _ in range(copies):
            if not free:
                raise TooFewFiles({site.node: site.copies_max for site in sites if site not in able})
            rank = spread.as_follower(zones) if chosen else spread.as_leader
            best = min(free, key=rank)
            chosen.append(best.node)
            zones[best.zone] = zones.get(best.zone, 0) + 1
            free = [site for site in free if hosts[site.node] != hosts[best.node]]
        found[number] = tuple(chosen)
        spread.add(chosen, is_new=True)
    return found


class _Spread:
    """The counts that decide who is next."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self._led = {site.node: site.led_count for site in sites}
        self._held = {site.node: site.held_count for site in sites}
        self._led_here = dict.fromkeys(self._led, 0)
        self._held_here = dict.fromkeys(self._led, 0)

    def add(self, nodes: Sequence[str], is_new: bool = False) -> None:
        """Count a partition; one that is not new is in the counts of all topics."""
        for place, node in enumerate(nodes):
            if node in self._held:
                self._held_here[node] += 1
                self._held[node] += is_new
                self._led_here[node] += place == 0
                self._led[node] += is_new and place == 0

    def has_files(self, site: Site) -> bool:
        return not site.copies_max or self._held[site.node] < site.copies_max

    def as_leader(self, site: Site) -> tuple[int | str, ...]:
        node = site.node
        return self._led_here[node], self._held_here[node], self._led[node], self._held[node], node

    def as_follower(self, zones: Mapping[str, int]) -> Callable[[Site], tuple[int | str, ...]]:
        return lambda site: (
            zones.get(site.zone, 0),
            self._held_here[site.node],
            self._led_here[site.node],
            self._held[site.node],
            site.node,
        )
