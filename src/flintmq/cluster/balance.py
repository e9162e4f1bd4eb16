"""The load of partitions, as their leaders tell, and the moves that let all nodes carry their part of it.

Rules of this file: no IO, no clock; what is decided here makes the greatest difference smaller with every step, so that
it comes to rest.

Source: Youzan's replication (a load of writes and of what is stored; moved within hours of the day).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from flintmq.cluster.state import NodeRecord, NoLeader, PartitionState, candidates
from flintmq.cluster.view import PartitionId, View

RATE_OVER_NS = 300_000_000_000
"""A rate is that of the last five minutes or so."""
STORED_OVER_S = 86_400.0
"""Bytes that are stored count as if they were written once in so long."""
COPY_LOAD = 100.0
"""Of a copy to which nothing is written, in bytes per second: many of them are a load as well."""
HAND_OVERS_MAX = 4
"""Partitions that a node begins to lead, or leads no more, in one round."""
LOOKS_MAX = 2000
"""Partitions that are looked at in one round."""
FULL_ABOVE = 1.2
"""Times the mean load: a node with more gives copies away."""
COPIES_LOOKED_AT_MAX = 200
TARGETS_LOOKED_AT_MAX = 10


@dataclass(slots=True)
class _Known:
    end_bytes: int
    at_ns: int
    rate: float = 0.0
    stored_bytes: int = 0


class Loads:
    """The load of each partition in bytes per second."""

    def __init__(self) -> None:
        self._known: dict[PartitionId, _Known] = {}

    def __len__(self) -> int:
        return len(self._known)

    def told(self, partition: PartitionId, end_bytes: int, stored_bytes: int, now_ns: int) -> None:
        """Take note of what its leader tells.

        Args:
            end_bytes: virtual offset of the end of the log; it only grows.
            stored_bytes: of the log on disk.
        """
        known = self._known.get(partition)
        if known is None or end_bytes < known.end_bytes:
            self._known[partition] = _Known(end_bytes, now_ns, 0.0 if known is None else known.rate, stored_bytes)
            return
        passed_ns = now_ns - known.at_ns
        if passed_ns <= 0:
            return
        rate = (end_bytes - known.end_bytes) * 1e9 / passed_ns
        weight = min(1.0, passed_ns / RATE_OVER_NS)
        known.rate += (rate - known.rate) * weight
        known.end_bytes, known.at_ns, known.stored_bytes = end_bytes, now_ns, stored_bytes

    def forget_all_but(self, partitions: Mapping[PartitionId, object]) -> None:
        """Forget partitions that there are no longer."""
        for partition in [each for each in self._known if each not in partitions]:
            del self._known[partition]

    def of(self, partition: PartitionId) -> float:
        """Return the load of one copy of a partition."""
        known = self._known.get(partition)
        return COPY_LOAD if known is None else COPY_LOAD + known.rate + known.stored_bytes / STORED_OVER_S

    def of_nodes(self, view: View) -> tuple[dict[str, float], dict[str, float]]:
        """Return the load of what each node leads, and of what it has."""
        load_of = {partition: self.of(partition) for partition in view.partitions}
        led = {node: sum(map(load_of.__getitem__, view.led.get(node, ()))) for node in view.nodes}
        held = {node: sum(map(load_of.__getitem__, view.held.get(node, ()))) for node in view.nodes}
        return led, held

    def of_topics(self, view: View, count: int) -> list[tuple[str, float]]:
        """Return the topics with the greatest load, and that, the greatest first."""
        totals: dict[str, float] = {}
        for partition in view.partitions:
            totals[partition[0]] = totals.get(partition[0], 0.0) + self.of(partition)
        return sorted(totals.items(), key=lambda pair: (-pair[1], pair[0]))[:count]


# -- who is to lead ----------------------------------------------------------------------------------------------------


class LeaderSpread:
    """Hands leadership from nodes that lead many partitions to nodes that lead few, a few at a time.

    A hand-over takes place only where the one leads at least two more than the other, so the sum of the squares becomes
    smaller with each and there is a last one.
    """

    def __init__(self) -> None:
        self._place = 0  # in the order of nodes, where the last look ended
        self._rested_at: int | None = None  # revision at which there was nothing to do

    def next(self, view: View, live: Mapping[str, NodeRecord]) -> list[tuple[PartitionId, str]]:
        """Return partitions and the nodes that are to lead them."""
        if self._rested_at == view.revision:
            return []
        led = {node: len(view.led.get(node, ())) for node in live}
        takers = [node for node in live if not _takes_nothing(live[node]) and node not in view.drains]
        found: list[tuple[PartitionId, str]] = []
        if not takers:
            return found
        fewest = min(led[node] for node in takers)
        full = [node for node in sorted(led, key=lambda node: (-led[node], node)) if led[node] >= fewest + 2]
        begun: Counter[str] = Counter()
        looks = LOOKS_MAX
        for number in range(len(full)):
            place = (self._place + number) % len(full)
            node = full[place]
            for partition in view.led.get(node, ()):
                if not looks:
                    self._place = place + 1
                    return found
                looks -= 1
                if begun[node] >= HAND_OVERS_MAX or led[node] < fewest + 2:
                    break
                best = self._better(view.partitions[partition], live, led, begun, view.drains)
                if best is not None:
                    found.append((partition, best))
                    begun.update((node, best))
                    led[node] -= 1
                    led[best] += 1
        if not found:
            self._rested_at = view.revision
        return found

    def _better(
        self,
        state: PartitionState,
        live: Mapping[str, NodeRecord],
        led: Mapping[str, int],
        begun: Mapping[str, int],
        drains: Mapping[str, object],
    ) -> str | None:
        """Return who should lead in place of the leader; None: nobody."""
        if state.target or state.leaving or state.lacking or not state.has_leader(live):
            return None  # it is moved, or somebody catches up
        found = candidates(state, live)
        names = [] if isinstance(found, NoLeader) else [node.node for node in found]
        able = [
            node
            for node in names
            if node in state.replicas
            and not _takes_nothing(live[node])
            and node not in drains
            and begun.get(node, 0) < HAND_OVERS_MAX
            and led[state.leader] >= led[node] + 2
        ]
        return min(able, key=lambda node: (led[node], state.replicas.index(node)), default=None)


def _takes_nothing(node: NodeRecord) -> bool:
    return node.is_draining or node.is_full


# -- where copies are to be --------------------------------------------------------------------------------------------


def copy_to_move(
    view: View, takers: Iterable[NodeRecord], loads: Loads, may_be_on: Callable[[PartitionId, str, str], bool]
) -> tuple[PartitionId, str, str] | None:
    """Return a copy to be moved, from which node and to which, so that loads are more even; None: they are enough.

    The node with the greatest load gives one away when that load is above :data:`FULL_ABOVE` times the mean, and only
    to a node that has less than it afterwards: so the sum of squares becomes smaller with each move.

    Args:
        takers: nodes that may be given something.
        may_be_on: whether a copy of a partition may go from a node to another one.
    """
    names = [node.node for node in takers]
    if len(names) < 2:
        return None
    load_of = {partition: loads.of(partition) for partition in view.partitions}
    held = {node: sum(map(load_of.__getitem__, view.held.get(node, ()))) for node in names}
    mean = sum(held.values()) / len(names)
    by_load = sorted(names, key=lambda node: (held[node], node))
    source = by_load[-1]
    if held[source] <= mean * FULL_ABOVE:
        return None
    heaviest = sorted(view.held.get(source, ()), key=lambda each: (-load_of[each], each))
    for partition in heaviest[:COPIES_LOOKED_AT_MAX]:
        state, load = view.partitions[partition], load_of[partition]
        if source not in state.replicas or state.target or state.leaving or state.lacking:
            continue
        for target in by_load[:TARGETS_LOOKED_AT_MAX]:
            if held[target] + load > held[source] - load:
                break
            if target not in state.holders and may_be_on(partition, source, target):
                return partition, source, target
    return None


def is_within(window: tuple[int, int], hour: int) -> bool:
    """Whether an hour of the day is in a window, which may go over midnight; one that ends where it begins is empty."""
    first, end = window
    return first <= hour < end if first <= end else hour >= first or hour < end
