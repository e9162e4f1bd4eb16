"""The copies of partitions that have to come and go, one step at a time and few at once.

What is wanted stands in the store: a partition's ``target`` and ``leaving``, its topic's number of copies, the nodes
that are to have nothing any more. So whoever is master next goes on where this one was stopped.

How a copy goes from one node to another: the new node is made one of ``replicas`` and the old one ``leaving``; the
leader sends the new one what it lacks and takes it into the in-sync set; the leader hands over if it is the one that
leaves; then ``leaving`` is emptied, the leader takes that node out of the in-sync set, and the node removes its files.
Where the new node finds no room on its disk meanwhile, that is said, and an operator decides: another one that took its
place would fill up as well, with two copies that are not whole.

Invariants:

- V1: nobody loses a copy before every node that is to have one is in sync; nobody who leads does.
- V2: one copy of a partition is made at a time, and a node takes part in ``COPIES_AT_ONCE_MAX`` of them at most.
- V3: the copies of a partition are on different machines, unless that is allowed. Where the machine of one that is
  away is not known, none is added.

Rules of this file: no IO, no clock; nothing is searched through when a single partition changes.

Source: docs/decisions/0017.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from flintmq.cluster.placement import NoPlace, TooFewFiles, TooFewNodes
from flintmq.cluster.state import NodeRecord, PartitionState, TopicRecord, released, replaced
from flintmq.cluster.view import PartitionId, View
from flintmq.errors import FlintError

COPIES_AT_ONCE_MAX = 4
"""Copies under way that a node takes part in, as the one that gets or that sends; those of a node that was started anew
count, too."""
UPGRADING = "nothing is moved while the cluster is being upgraded, until flintmq cluster upgrade done"


def _waits_for(away: Sequence[str]) -> str:
    """Return why a copy that is being made is not, and what to do.

    Args:
        away: the nodes that are to have it.
    """
    return (
        f"{_named(away)} is to have a copy and is away: start it, or have another one take its place with flintmq node "
        "remove"
    )


def _waits_for_room(full: Sequence[str]) -> str:
    """Return why a copy that is being made gets no further, and what to do."""
    names = " ".join(full)
    return (
        f"{_named(full)} is to have a copy and has no room on its disk: free space there, or have another node take it "
        f"with flintmq node drain {names}"
    )


class HostUnknown(FlintError):
    """No copy can be added, because nobody knows on which machine another one is.

    Args:
        node: that has it and is away.
    """

    def __init__(self, node: str) -> None:
        super().__init__(node)
        self.node = node

    def __str__(self) -> str:
        return (
            f"node {self.node} has a copy and is away, so it is not known on which machine: start it, or remove it "
            f"with /cluster/node/remove?remove_node={self.node}"
        )


@dataclass(frozen=True, slots=True)
class Step:
    """A change of a partition's state.

    Attributes:
        now: what it is to be.
        reason: what happens and why.
    """

    partition: PartitionId
    now: PartitionState
    reason: str


class Moving:
    """The steps.

    Args:
        live: returns the nodes that live.
        allow_same_host: several copies of a partition may be on one machine.

    Attributes:
        stuck: partitions whose copies cannot be as they are wanted, and why.
    """

    def __init__(self, view: View, live: Callable[[], Mapping[str, NodeRecord]], allow_same_host: bool = False) -> None:
        self.stuck: dict[PartitionId, str] = {}
        self._view = view
        self._live = live
        self._allow_same_host = allow_same_host
        self._due: dict[PartitionId, None] = {}
        self._frozen: dict[PartitionId, None] = {}
        self._without_files: dict[PartitionId, None] = {}  # they wait until a node has fewer copies
        self._busy: Counter[str] = Counter()  # copies under way, by node
        self._involved: dict[PartitionId, tuple[str, ...]] = {}  # the nodes that a copy under way is counted for
        self._waiting: dict[str, dict[PartitionId, None]] = {}  # by the node that has too many under way
        self._waits_for: dict[PartitionId, str] = {}
        self._woken_by: dict[PartitionId, str] = {}
        self._takers: list[NodeRecord] | None = None

    # --- what is told

    def note(self, partition: PartitionId, state: PartitionState | None) -> None:
        """Take note of the state of a partition, or of a state that it is about to get."""
        if self._without_files:
            self._due[next(iter(self._without_files))] = None  # it comes to the end when it has to wait again
        self._count(partition, state)
        if state is None:
            self._forget(partition)
        elif self._is_wanting(partition, state):
            self._due[partition] = None
        else:
            self.stuck.pop(partition, None)

    def nodes_changed(self) -> None:
        """Others live, or take copies, than before."""
        self._takers = None
        live = self._live()
        waiting = [
            each
            for each, nodes in self._involved.items()
            if not all(node in live and not live[node].is_full for node in nodes)
        ]
        for partition in (*waiting, *self.stuck):
            self._count(partition, self._view.partitions.get(partition))  # who is away takes no place from others
            self._due[partition] = None

    def settings_changed(self) -> None:
        """Moves may be allowed that were not."""
        frozen, self._frozen = self._frozen, {}
        self._due.update(frozen)

    def _count(self, partition: PartitionId, state: PartitionState | None) -> None:
        """Count a partition's copies under way for the nodes that have to do with them."""
        before = self._involved.pop(partition, ())
        now: tuple[str, ...] = ()
        if state is not None and state.leader:
            live = self._live()
            learners = [node for node in state.lacking if node in live]
            if learners:
                now = (state.leader, *learners)
                self._involved[partition] = now
        if now == before:
            return
        self._busy.update(now)
        for node in before:
            self._busy[node] -= 1
            if not self._busy[node]:
                del self._busy[node]
            self._wake(node)

    def _wake(self, node: str) -> None:
        """Have as many look again as a node has room for."""
        waiting = self._waiting.get(node)
        if waiting is None:
            return
        for _ in range(max(0, COPIES_AT_ONCE_MAX - self._busy[node])):
            partition = next(iter(waiting))
            self._wait_no_more(partition)
            self._due[partition] = None
            self._woken_by[partition] = node
            if not waiting:
                return

    def _wait(self, partition: PartitionId, node: str) -> None:
        self._wait_no_more(partition)
        self._waits_for[partition] = node
        self._waiting.setdefault(node, {})[partition] = None

    def _wait_no_more(self, partition: PartitionId) -> None:
        node = self._waits_for.pop(partition, None)
        if node is not None:
            waiting = self._waiting[node]
            del waiting[partition]
            if not waiting:
                del self._waiting[node]

    def _forget(self, partition: PartitionId) -> None:
        for known in (self._due, self._frozen, self._without_files, self.stuck):
            known.pop(partition, None)
        self._wait_no_more(partition)

    def _is_wanting(self, partition: PartitionId, state: PartitionState) -> bool:
        """Whether something may have to be done about a partition."""
        record = self._view.topics.get(partition[0])
        if record is None or record.is_deleting:
            return False
        if state.target or state.leaving or len(state.replicas) != record.meta.replica:
            return True
        drains = self._view.drains
        return bool(drains) and any(node in drains for node in state.replicas)

    # --- what is to be done

    @property
    def has_work(self) -> bool:
        """Whether something is to be looked at."""
        return bool(self._due)

    @property
    def is_moving(self) -> bool:
        """Whether copies are being made, or are to be."""
        return bool(self._involved or self._waits_for or self._due)

    def next_step(self, is_busy: Callable[[PartitionId], bool]) -> Step | None:
        """Look at one partition; return what is to be done about it, if anything is.

        Args:
            is_busy: whether a change of it is under way, after which it is told of again.
        """
        partition = next(iter(self._due))
        del self._due[partition]
        self._wait_no_more(partition)
        woken_by = self._woken_by.pop(partition, None)
        step = None if is_busy(partition) else self._step(partition)
        if woken_by is not None:
            self._wake(woken_by)  # somebody else, if this one did not need it
        return step

    def _step(self, partition: PartitionId) -> Step | None:
        view, live = self._view, self._live()
        state, record = view.partitions.get(partition), view.topics.get(partition[0])
        self.stuck.pop(partition, None)
        self._without_files.pop(partition, None)
        if state is None or record is None or not self._is_wanting(partition, state) or not state.has_leader(live):
            return None
        if state.leaving and not state.lacking:
            if state.leader in state.leaving:
                return None  # it hands over first
            return Step(partition, released(state), f"all have it that are to, and {_named(state.leaving)} no longer")
        if view.settings.is_upgrading:
            self._frozen[partition] = None
            self.stuck[partition] = UPGRADING
            return None
        if gone := [node for node in state.target if node not in live]:
            now = msgspec.structs.replace(state, target=())
            return Step(partition, now, f"it stays where it is, {_named(gone)} is gone that it was to go to")
        kept = state.target or state.replicas
        making = [node for node in state.lacking if node in live and node in kept and node not in view.drains]
        if making:  # one step at a time
            is_asked = state.leaving or state.target or any(node in view.drains for node in state.holders)
            if is_asked and all(live[node].is_full for node in making):
                self.stuck[partition] = _waits_for_room(making)
            return None
        try:
            wanted, why = (state.target, "as was asked") if state.target else self.wanted(partition, state, record)
        except (NoPlace, HostUnknown) as error:
            self.stuck[partition] = str(error)
            if isinstance(error, TooFewFiles):
                self._without_files[partition] = None
            return None
        if wanted == state.replicas:
            if away := [node for node in state.lacking if node not in live]:
                self.stuck[partition] = _waits_for(away)
            return None
        now = replaced(state, wanted)
        counted = self._involved.get(partition, ())  # for the copy that this one takes the place of
        for node in (state.leader, *now.lacking) if now.lacking else ():
            if self._busy[node] - counted.count(node) >= COPIES_AT_ONCE_MAX:
                self._wait(partition, node)
                return None
        self._count(partition, now)
        return Step(partition, now, f"copies on {_named(wanted)}{_and_leaving(now)}: {why}")

    def wanted(self, partition: PartitionId, state: PartitionState, record: TopicRecord) -> tuple[tuple[str, ...], str]:
        """Return the nodes that are to have a partition after the next step, and why.

        Raises:
            NoPlace: there is no node for another copy.
            HostUnknown: it is not known which nodes could have one.
        """
        replicas, drains = list(state.replicas), self._view.drains
        going = [node for node in replicas if node in drains]
        if len(replicas) > record.meta.replica:
            out = self._dispensable(state, replicas, going)
            return tuple(node for node in replicas if node != out), f"{record.meta.replica} copies are enough"
        failure: NoPlace | HostUnknown | None = None
        for out in going:
            why = "is removed" if drains[out].is_removal else "is drained"
            try:
                new = self.placed(partition, state, [node for node in replicas if node != out])
            except (NoPlace, HostUnknown) as error:
                failure = failure or error
            else:
                return tuple(new if node == out else node for node in replicas), f"node {out} {why}"
        if failure is not None:
            raise failure
        if len(replicas) < record.meta.replica:
            return (*replicas, self.placed(partition, state, replicas)), f"{record.meta.replica} copies are wanted"
        return state.replicas, ""

    def _dispensable(self, state: PartitionState, replicas: Sequence[str], going: Sequence[str]) -> str:
        """Return the copy that goes when there are too many."""
        live, held = self._live(), self._view.held
        members = state.in_sync_nodes
        zones = Counter(live[node].zone for node in replicas if node in live)

        def rank(node: str) -> tuple[object, ...]:
            zone_count = zones[live[node].zone] if node in live else 0
            held_count = len(held.get(node, ()))
            return (
                node in going, node not in live, node not in members, node != state.leader, zone_count, held_count,
                replicas.index(node),
            )  # fmt: skip

        return max(replicas, key=rank)

    def placed(self, partition: PartitionId, state: PartitionState, staying: Sequence[str]) -> str:
        """Return the node that another copy goes to: on a machine that has none, in a zone with the fewest, with the
        fewest of the topic, then of all; of those with room for a copy under way, if there are any.

        Args:
            staying: who has the others.

        Raises:
            TooFewNodes: there is none.
            TooFewFiles: there are some, and none has an open file left.
            HostUnknown: the machine of one that stays, and is not to go as well, is not known.
        """
        view, takers = self._view, self._taking()
        self.check_hosts_known([node for node in staying if node not in view.drains])
        free = self.free_for(staying)
        if not free:
            hosts = {node.host_id or node.node for node in takers}
            raise TooFewNodes(len(staying) + 1, len(takers), len(hosts), self._allow_same_host)
        able = [node for node in free if self.has_files(node, partition)]
        if not able:
            raise TooFewFiles({node.node: node.copies_max for node in free})
        zones = Counter(view.nodes[node].zone for node in staying if node in view.nodes)
        here = Counter(node for each in view.of_topic.get(partition[0], {}).values() for node in each.holders)
        members, held, led, busy = state.in_sync_nodes, view.held, view.led, self._busy

        def rank(record: NodeRecord) -> tuple[object, ...]:
            node = record.node
            return (
                node not in members, busy[node] >= COPIES_AT_ONCE_MAX, zones[record.zone], here[node],
                len(held.get(node, ())) + busy[node], len(led.get(node, ())), node,
            )  # fmt: skip

        return min(able, key=rank).node

    def free_for(self, staying: Sequence[str]) -> list[NodeRecord]:
        """Return the nodes that may get a copy of what these have, on machines that have none."""
        nodes = self._view.nodes
        taken = {self._host(nodes[node]) for node in staying if node in nodes}
        return [node for node in self._taking() if node.node not in staying and self._host(node) not in taken]

    def has_files(self, node: NodeRecord, partition: PartitionId, more: int = 0) -> bool:
        """Whether a node has an open file for a copy of a partition, when it gets ``more`` others before."""
        held = self._view.held.get(node.node, {})
        return partition in held or node.has_files_for(len(held) + more)

    def _taking(self) -> list[NodeRecord]:
        """Return the nodes that may be given something."""
        if self._takers is None:
            drains = self._view.drains
            live = self._live().values()
            self._takers = [node for node in live if not (node.is_draining or node.is_full) and node.node not in drains]
        return self._takers

    @property
    def takers(self) -> Sequence[NodeRecord]:
        """The nodes that may be given something."""
        return self._taking()

    def _host(self, node: NodeRecord) -> str:
        return node.node if self._allow_same_host or not node.host_id else f"host {node.host_id}"

    def check_hosts_known(self, others: Sequence[str]) -> None:
        """See that it is known on which machines these nodes are, where that counts.

        Raises:
            HostUnknown: one is away.
        """
        for node in () if self._allow_same_host else others:
            if node not in self._view.nodes:
                raise HostUnknown(node)

    def shares_host(self, node: NodeRecord, others: Sequence[str]) -> str:
        """Return which of ``others`` is on the machine of a node where that is not allowed; empty: none."""
        nodes = self._view.nodes
        return next((each for each in others if each in nodes and self._host(nodes[each]) == self._host(node)), "")

    def queue_of(self, partition: PartitionId) -> str:
        """Return the node that a partition waits for, because it has enough copies under way; empty: it does not."""
        return self._waits_for.get(partition, "")

    def check(self) -> None:
        """Assert what has to hold; for tests."""
        assert self._busy == Counter(node for nodes in self._involved.values() for node in nodes)
        waiting = {partition: node for node, group in self._waiting.items() for partition in group}
        assert waiting == self._waits_for
        for node in self._waiting:
            woken = self._busy[node] < COPIES_AT_ONCE_MAX
            assert not woken or node in self._woken_by.values(), f"they wait for node {node} in vain"

    def describe(self) -> str:
        """In short, for logs and failing tests."""
        return f"moving={len(self._involved)} due={len(self._due)} waiting={len(self._waits_for)} stuck={self.stuck}"


def _named(nodes: Sequence[str]) -> str:
    return f"node{'s' * (len(nodes) != 1)} {', '.join(nodes)}"


def _and_leaving(state: PartitionState) -> str:
    return f", then no longer on {', '.join(state.leaving)}" if state.leaving else ""
