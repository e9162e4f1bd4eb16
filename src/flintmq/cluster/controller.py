"""The decisions of the master nsqlookupd: who leads, where partitions are, which topics there are. No IO, no clock.

Fed with the changes that a :class:`flintmq.cluster.view.View` found; gives out swaps, which somebody carries out in
parallel and tells the end of. A decision is made of what is known now and nothing else, so that another controller
makes the next one from where this one was stopped.

How a topic comes and goes:

- First its record is made, then a state for each partition, which names its leader in the same write; a partition
  without a state is made up for by whoever is master then.
- First its record is marked (``is_deleting``), then the states go, then the record. A node that has seen the mark
  removes its replicas; one that was away sets them aside (:meth:`flintmq.cluster.view.View.fate`).

Invariants:

- I1: a swap compares the revision of what was decided on, and that this nsqlookupd is master still: who has lost that
  changes nothing more. A state is made only while the record of its topic is as it was read.
- I2: only members of the in-sync set that have everything are elected, each under the next epoch; where there is none,
  who has most of all (power.py). What all copies are lost of begins anew where an operator says so, as another log.
- I3: of what :meth:`Controller.next_swaps` gives out a key has one under way at most, and none again before the view
  has what became of the last.
- I4: what cannot be read is left as it is, and nothing else waits for it.
- I5: elections go before topics that are made, and these before copies that are moved (:mod:`flintmq.cluster.moving`).

Source: docs/decisions/0017.
"""

from __future__ import annotations

import dataclasses
import random as _random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from flintmq.cluster.balance import LeaderSpread
from flintmq.cluster.moving import Moving
from flintmq.cluster.placement import NoPlace, Site, TooFewFiles, place_copies
from flintmq.cluster.power import describe, elected_with_loss, has_no_copy, who_has_most
from flintmq.cluster.state import (
    Member,
    NodeRecord,
    NoLeader,
    PartitionState,
    TopicRecord,
    begun_anew,
    candidates,
    elected,
    encode,
    whole_members,
    without_leader,
)
from flintmq.cluster.store import Compare, KeyValue
from flintmq.cluster.view import (
    Change,
    DrainChange,
    NodeChange,
    OtherChange,
    PartitionChange,
    PartitionId,
    TopicChange,
    View,
    WantedChange,
)
from flintmq.errors import FlintError
from flintmq.topic_meta import NO_COPY, NOT_CREATED, PARTITION_NUM_MAX, PLAIN, TO_COME, TopicMeta, usual_min_in_sync

DEFAULT_COPIES_MAX = 3
"""Of a partition of a topic that is made without saying how many; fewer where there is room for fewer."""
LOOKS_MAX = 2000
"""Partitions that are looked at before others have their turn: some 20 ms."""
_ID_BITS = 62


class Refused(FlintError):
    """A topic cannot be made, changed or deleted.

    Args:
        reason: why, and what to do.
        status: of HTTP.
    """

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason, status)
        self.reason = reason
        self.status = status

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class Swap:
    """A change to make by :func:`flintmq.cluster.store.swap`.

    Attributes:
        before: what the key is; None: it is not there.
        value: what it is to be; None: it is to go.
        reason: what it does and why, for the log.
        guards: what has to hold of other keys.
    """

    key: str
    before: KeyValue | None
    value: bytes | None
    reason: str
    guards: tuple[Compare, ...] = ()


@dataclass(frozen=True, slots=True)
class Defaults:
    """The shape of topics that are made without saying more than a name.

    Attributes:
        partitions, copies: 0: by the nodes there are.
    """

    partitions: int = 0
    copies: int = 0

    def shape(
        self, nodes: Iterable[NodeRecord], allow_same_host: bool, copies_max: int = DEFAULT_COPIES_MAX
    ) -> tuple[int, int]:
        """Return how many partitions such a topic has, and how many copies of each.

        Args:
            nodes: that live.
            copies_max: so many copies where there is room for them.
        """
        takers = [node for node in nodes if not node.is_draining]
        hosts = {node.node if allow_same_host or not node.host_id else node.host_id for node in takers}
        partitions = self.partitions or min(max(1, len(takers)), PARTITION_NUM_MAX)
        return partitions, self.copies or min(copies_max or DEFAULT_COPIES_MAX, max(1, len(hosts)))


class Controller:
    """The decisions.

    Args:
        random: for the numbers of topics and logs.
        master: that this nsqlookupd is master, since the election that wrote this revision; None: nobody asks.
        allow_same_host: several copies of a partition may be on one machine.
        defaults: of topics that nodes ask for.
        why_not: tells why a topic that nodes ask for must not be made, as far as that is known beside the store; empty:
            nothing is against it.

    Attributes:
        moving: the copies that come and go.
    """

    def __init__(
        self,
        view: View,
        random: _random.Random,
        master: Compare | None = None,
        allow_same_host: bool = False,
        defaults: Defaults = Defaults(),
        why_not: Callable[[str], str] = lambda _topic: "",
    ) -> None:
        self.view = view
        self._keys = view.keys
        self._random = random
        self._master = master
        self._defaults = defaults
        self._why_not = why_not
        self.allows_same_host = allow_same_host
        self._suspected: dict[str, str] = {}  # node: incarnation
        self._live: dict[str, NodeRecord] | None = None
        self._leader_spread = LeaderSpread()
        self.moving = Moving(view, lambda: self.live, allow_same_host)
        self._partitions: dict[PartitionId, None] = dict.fromkeys(view.partitions)  # to be looked at, in this order
        self._topics: dict[str, None] = dict.fromkeys(view.topics)
        self._wanted: dict[str, None] = dict.fromkeys(view.wanted)
        self._planned: deque[Swap] = deque()
        self._under_way: dict[str, Swap] = {}
        self._awaited: dict[str, Swap] = {}  # ended, and the view does not have it yet
        self._waiting_for: dict[str, dict[str, None]] = {}  # a key: the awaited swaps that end when it changes
        self._placing: dict[PartitionId, tuple[str, ...]] = {}
        self._looks_left = 0
        self._electing: dict[PartitionId, str] = {}  # who is about to lead, and is not counted yet
        self._gains: Counter[str] = Counter()  # the same by node
        self._unplaced: dict[str, str] = {}  # topics that lack partitions, and why
        self._without_files: dict[str, None] = {}  # those of them that wait until a node has fewer copies
        self._emptied: dict[str, None] = dict.fromkeys(view.drains)  # nodes that may be forgotten

    # --- what is told

    def see(self, changes: Iterable[Change], is_whole: bool = False) -> None:
        """Take note of what the view found.

        Args:
            is_whole: the view was told all there is, not merely what happened since.
        """
        if is_whole:
            for key in list(self._awaited):
                self._release(key)
        for change in changes:
            for key in self._waiting_for.pop(change.key, ()):
                self._release(key)
            match change:
                case NodeChange():
                    self._see_node(change)
                case TopicChange():
                    self._topics[change.topic] = None
                    for number in self.view.of_topic.get(change.topic, ()):
                        self._partitions[change.topic, number] = None
                    if change.topic in self.view.wanted:
                        self._wanted[change.topic] = None
                case WantedChange():
                    self._wanted[change.topic] = None
                case PartitionChange():
                    self._settled(change.partition)
                    self._partitions[change.partition] = None
                    if change.now is None:
                        self._topics[change.partition[0]] = None
                    if self._without_files and change.before is not None:
                        self._topics.update(self._without_files)
                    if self.view.drains and change.before is not None:
                        self._emptied.update(dict.fromkeys(change.before.holders))
                case DrainChange():
                    self._live_changed(change.node)
                    self._emptied[change.node] = None
                case OtherChange():
                    if change.key == self._keys.master:
                        self._topics.update(dict.fromkeys(self._unplaced))
                    elif change.key == self._keys.settings:
                        self.moving.settings_changed()
                    elif (node := self._keys.name_in(change.key, "disk")) is not None and node in self.view.drains:
                        self._emptied[node] = None

    def _live_changed(self, node: str) -> None:
        """Something is so of a node that decides on what it has, or may get."""
        self._live = None
        self.moving.nodes_changed()
        self._partitions.update(dict.fromkeys(self.view.held.get(node, ())))
        self._topics.update(dict.fromkeys(self._unplaced))

    def _see_node(self, change: NodeChange) -> None:
        self._live = None
        self._emptied[change.node] = None
        now = change.now
        if now is None or self._suspected.get(change.node) != now.incarnation:
            self._suspected.pop(change.node, None)
        if now is not None and change.before == now:
            return
        self._live_changed(change.node)
        if now is None:
            self._wanted.update(dict.fromkeys(self.view.wanted))

    def suspect(self, node: str, incarnation: str) -> None:
        """Take a process for dead: its connection broke, and nobody listens where it did.

        Others are elected in its place; what nobody else can lead stays with it until its key is gone.
        """
        record = self.view.nodes.get(node)
        if record is None or record.incarnation != incarnation or self._suspected.get(node) == incarnation:
            return
        self._suspected[node] = incarnation
        self._live_changed(node)

    def trust(self, node: str, incarnation: str) -> None:
        """Suspect a process no longer: it connected again."""
        if self._suspected.get(node) == incarnation:
            del self._suspected[node]
            self._live_changed(node)

    def ended(self, swap: Swap, is_known: bool) -> None:
        """Take note that a swap has ended which was given out.

        Args:
            is_known: it took place, or never will; else it is decided anew.
        """
        self._under_way.pop(swap.key, None)
        if not is_known or self._has_moved(swap):
            self._look_again(swap)
            return
        self._awaited[swap.key] = swap
        for key in (swap.key, *(guard.key for guard in swap.guards)):
            self._waiting_for.setdefault(key, {})[swap.key] = None

    def _has_moved(self, swap: Swap) -> bool:
        """Whether the view has something else by now than what was decided on."""
        pairs = self.view.pairs
        if pairs.get(swap.key) != swap.before:
            return True
        return not all(map(self._holds, swap.guards))

    def _holds(self, guard: Compare) -> bool:
        pair = self.view.pairs.get(guard.key)
        return guard.mod_revision == (0 if pair is None else pair.mod_revision)

    def _release(self, key: str) -> None:
        swap = self._awaited.pop(key, None)
        if swap is None:
            return
        for other in (swap.key, *(guard.key for guard in swap.guards)):
            waiting = self._waiting_for.get(other)
            if waiting is not None:
                waiting.pop(key, None)
                if not waiting:
                    del self._waiting_for[other]
        self._look_again(swap)

    def _look_again(self, swap: Swap) -> None:
        partition = self._keys.partition_in(swap.key)
        if partition is not None:
            self._settled(partition)
            self._partitions[partition] = None
            self._topics[partition[0]] = None
        elif (topic := self._keys.name_in(swap.key, "topic")) is not None:
            self._topics[topic] = None
            if topic in self.view.wanted:
                self._wanted[topic] = None
        elif (topic := self._keys.name_in(swap.key, "wanted")) is not None:
            self._wanted[topic] = None
        elif (node := self._keys.name_in(swap.key, "drain") or self._keys.name_in(swap.key, "disk")) is not None:
            self._emptied[node] = None

    def _settled(self, partition: PartitionId) -> None:
        """Count no longer what was planned for a partition: the view has it, or it is decided anew."""
        self._placing.pop(partition, None)
        if (node := self._electing.pop(partition, None)) is not None:
            self._gains[node] -= 1

    # --- what is to be done

    @property
    def is_master(self) -> bool:
        """Whether the view says so, too; nothing is decided before it does."""
        return self._master is None or self._holds(self._master)

    @property
    def has_work(self) -> bool:
        """Whether something is to be looked at still."""
        is_left = self._partitions or self._topics or self._wanted or self._planned or self._emptied
        return self.is_master and bool(is_left or self.moving.has_work)

    def next_swaps(self, count_max: int) -> list[Swap]:
        """Return swaps to carry out now, elections first; each is told the end of by :meth:`ended`.

        No more than ``LOOKS_MAX`` partitions are looked at; :attr:`has_work` tells whether there are others.

        Args:
            count_max: so many at most.
        """
        found: list[Swap] = []
        if not self.is_master:
            return found
        self._looks_left = LOOKS_MAX
        while len(found) < count_max:
            swap = self._next()
            if swap is None:
                break
            self._under_way[swap.key] = swap
            found.append(swap)
        return found

    def _next(self) -> Swap | None:
        while self._partitions:
            if not self._looks_left:
                return None
            self._looks_left -= 1
            partition = next(iter(self._partitions))
            del self._partitions[partition]
            swap = self._of_partition(partition)
            if swap is not None:
                return swap
        while True:
            while self._planned:
                swap = self._planned.popleft()
                if self._is_busy(swap.key):
                    continue  # it is looked at again when that has ended
                if not self._has_moved(swap):
                    return swap
                self._look_again(swap)
            if self._wanted:
                topic = next(iter(self._wanted))
                del self._wanted[topic]
                self._planned.extend(self._of_wanted(topic))
                continue
            if not self._topics:
                return self._next_move()
            topic = next(iter(self._topics))
            del self._topics[topic]
            self._planned.extend(self._of_topic(topic))

    def _next_move(self) -> Swap | None:
        while self.moving.has_work:
            if not self._looks_left:
                return None
            self._looks_left -= 1
            step = self.moving.next_step(lambda partition: self._is_busy(self._keys.partition(*partition)))
            if step is not None:
                topic, number = step.partition
                key = self._keys.partition(topic, number)
                return self.swap_to(key, step.now, f"partition {topic}/{number}: {step.reason}")
        while self._emptied:
            node, _ = self._emptied.popitem()
            # what names the node as removed goes last: without it nobody would look for the rest again
            drain = self.view.drains.get(node)
            key = self._keys.disk(node) if node in self.view.disks else self._keys.drain(node)
            is_there = node in self.view.nodes or self._keys.node(node) in self.view.unreadable
            if drain is None or not drain.is_removal or is_there or node in self.view.held or self._is_busy(key):
                continue
            return self.swap_to(key, None, f"node {node} is removed: it has nothing, and has ended")
        return None

    def _is_busy(self, key: str) -> bool:
        return key in self._under_way or key in self._awaited

    def swap_to(self, key: str, value: msgspec.Struct | None, reason: str, *guards: Compare) -> Swap:
        """Return what gives a key another value, or none, while it is as the view has it and we are master."""
        master = () if self._master is None else (self._master,)
        data = None if value is None else encode(value)
        return Swap(key, self.view.pairs.get(key), data, reason, (*master, *guards))

    @property
    def live(self) -> Mapping[str, NodeRecord]:
        """Nodes that live, as far as is known: without those that are suspected."""
        if self._live is None:
            self._live = {
                node: record
                for node, record in self.view.nodes.items()
                if self._suspected.get(node) != record.incarnation
            }
        return self._live

    # --- partitions

    def _of_partition(self, partition: PartitionId) -> Swap | None:
        view, (topic, number) = self.view, partition
        key = self._keys.partition(topic, number)
        state = view.partitions.get(partition)
        record = view.topics.get(topic)
        if self._is_busy(key):
            return None
        self.moving.note(partition, state)
        if state is None:
            return None
        if record is None and self._keys.topic(topic) not in view.unreadable:
            return None  # nodes know of no such topic
        if record is not None and record.is_deleting:
            return self.swap_to(key, None, f"partition {topic}/{number} is deleted with its topic")
        chosen = self._elect(state, 1 if record is None else record.min_in_sync)
        if chosen is None:
            return None
        now, reason = chosen
        if now.leader:
            self._settled(partition)
            self._electing[partition] = now.leader
            self._gains[now.leader] += 1
        return self.swap_to(key, now, f"partition {topic}/{number}: {reason}")

    def _elect(self, state: PartitionState, min_in_sync: int) -> tuple[PartitionState, str] | None:
        """Return what a partition's state has to become and why; None: it stays."""
        live = self.live
        leader = live.get(state.leader)
        if leader is not None and leader.incarnation == state.incarnation:
            return self._handed_over(state, leader, min_in_sync)
        if self._keys.node(state.leader) in self.view.unreadable:
            return None  # it may live
        gone = self._gone(state)
        if not state.epoch and not state.in_sync:
            members = tuple(live[node].member for node in state.replicas if node in live)
            if not members:
                return None
            first = live[members[0].node]
            return elected(state, first, members), f"{_led(first, state)}: it is the first"
        found = candidates(state, live)
        if isinstance(found, NoLeader):
            if state.leader:
                if state.has_leader(self.view.nodes):
                    return None  # it is only suspected, and nobody else can lead
                return without_leader(state), f"nobody leads: {gone}, and {found.value}"
            most = who_has_most(state, live)
            if most is None:
                return None  # somebody is waited for
            return (
                elected_with_loss(state, live[most.node]),
                f"{_led(live[most.node], state)}: {found.value}, and it has most, epoch {most.epoch} up to {most.end}; "
                "what no copy has is lost",
            )
        best = self._best(state, found)
        return elected(state, best, self._members(state, min_in_sync)), f"{_led(best, state)}: {gone}"

    def _best(self, state: PartitionState, found: Sequence[NodeRecord]) -> NodeRecord:
        """Return who is to lead: by preference, or else who leads the fewest."""
        preferred = state.replicas[0] if state.replicas else ""
        led = self.view.led
        return min(
            found,
            key=lambda node: (
                node.node not in state.replicas,
                node.is_draining,
                node.is_full,
                node.node in self.view.drains,
                node.node != preferred,
                len(led.get(node.node, ())) + self._gains[node.node],
            ),
        )

    def _handed_over(
        self, state: PartitionState, leader: NodeRecord, min_in_sync: int
    ) -> tuple[PartitionState, str] | None:
        is_leaving = leader.node not in state.replicas and not state.lacking
        if not (leader.is_draining or leader.is_full or is_leaving):
            return None
        found = candidates(state, self.live)
        best = None if isinstance(found, NoLeader) else self._best(state, found)
        if best is None or best.node == leader.node or best.node not in state.replicas or best.is_draining:
            return None
        is_only_full = not (leader.is_draining or is_leaving)
        if is_only_full and best.is_full:
            return None  # nobody has room: it stays where it is
        if leader.is_ending:
            why = "ends"
        elif is_leaving:
            why = "is to keep no copy"
        else:
            why = "is draining" if leader.is_draining else "has no room on its disk"
        ending = {node for node, record in self.live.items() if record.is_ending}
        members = [member for member in self._members(state, min_in_sync) if member.node not in ending]
        return elected(state, best, members), f"{_led(best, state)}: node {leader.node} {why}"

    def _members(self, state: PartitionState, min_in_sync: int) -> tuple[Member, ...]:
        """Return those who have everything and live; who is dead would only be waited for.

        Where these are fewer than the topic demands, nothing is acknowledged as long as the others are away: then who
        is not registered stays as well. It may only have stood still, and lead when the one that is elected cannot.
        """
        members = tuple(node.member for node in whole_members(state, self.live))
        if len(members) >= min_in_sync:
            return members
        return (*members, *(member for member in state.in_sync if member.node not in self.view.nodes))

    def _gone(self, state: PartitionState) -> str:
        """Tell why nobody leads."""
        if not state.leader:
            return "nobody led it"
        node = self.view.nodes.get(state.leader)
        if node is None:
            return f"node {state.leader} is gone"
        if node.incarnation != state.incarnation:
            return f"node {state.leader} was started anew"
        return f"node {state.leader} broke its connection and does not listen"

    def spread(self) -> list[Swap]:
        """Return hand-overs that let every node lead its part, a few of them; none when it does. Carry them out, and do
        not tell the end of them.
        """
        if not self.is_master or self.view.settings.is_upgrading or not self.view.settings.balances:
            return []
        found = []
        for partition, node in self._leader_spread.next(self.view, self.live):
            key = self._keys.partition(*partition)
            if self._is_busy(key):
                continue
            state, best = self.view.partitions[partition], self.live[node]
            name = f"partition {partition[0]}/{partition[1]}"
            reason = f"{name}: {_led(best, state)}: node {state.leader} leads more than it"
            topic = self.view.topics.get(partition[0])
            members = self._members(state, 1 if topic is None else topic.min_in_sync)
            found.append(self.swap_to(key, elected(state, best, members), reason))
        return found

    def forced(self, partition: PartitionId, node: str) -> Swap:
        """Return what lets a node lead that may lack some of what was acknowledged, because an operator says so. Where
        no node with a copy lives it may be any: the partition begins anew there, with an empty log.

        Raises:
            Refused: somebody leads or can be elected without losing anything, or the node has no copy while others that
                live have one, or is not there.
        """
        topic, number = partition
        state = self.view.partitions.get(partition)
        if state is None:
            reason = self.why_no_leader(partition)
            raise Refused(f"partition {topic}/{number} has no state that can be changed: {reason}")
        if state.has_leader(self.view.nodes):
            raise Refused(f"partition {topic}/{number} is led by node {state.leader}")
        found = candidates(state, self.live)
        if not isinstance(found, NoLeader):
            names = ", ".join(each.node for each in found)
            raise Refused(f"partition {topic}/{number} is about to be led by one of {names}, which have everything")
        record = self.live.get(node)
        if has_no_copy(state, self.view.nodes):
            return self._anew(partition, state, node)
        if node not in state.holders or record is None:
            there = ", ".join(each for each in state.holders if each in self.live) or "none"
            raise Refused(
                f"node {node[:64]} has no copy of partition {topic}/{number} or is not there; there are {there}"
            )
        reason = f"partition {topic}/{number}: {_led(record, state)}: an operator said so, what it lacks is lost"
        return self.swap_to(self._keys.partition(topic, number), elected_with_loss(state, record), reason)

    def _anew(self, partition: PartitionId, state: PartitionState, node: str) -> Swap:
        topic, number = partition
        name = f"partition {topic}/{number}"
        record = self.live.get(node)
        if self.record_of(topic).is_deleting:
            raise Refused(f"topic {topic} is being deleted")
        if record is None:
            raise Refused(
                f"node {node[:64]} is not there: {name} can begin anew, with an empty log, on a node that lives"
            )
        if record.is_draining or record.is_full or node in self.view.drains:
            raise Refused(f"node {node} takes nothing, it drains or its disk has no room: name another one")
        if not self.moving.has_files(record, partition):
            raise Refused(f"node {node} has {record.copies_max} copies, as many as its open files allow: name another")
        reason = (
            f"{name} begins anew with an empty log: {_led(record, state)}: an operator said so, no node with a copy is "
            f"alive ({', '.join(state.holders)})"
        )
        now = begun_anew(state, record, self._random.getrandbits(_ID_BITS) + 1)
        return self.swap_to(self._keys.partition(topic, number), now, reason)

    def why_no_leader(self, partition: PartitionId) -> str:
        """Tell why nobody leads a partition, for people; empty: somebody does."""
        return why_no_leader(self.view, partition, self.live)

    # --- topics

    def _of_wanted(self, topic: str) -> list[Swap]:
        """Make a topic that a node asks for, or say why not; when it is there the question goes."""
        view, key = self.view, self._keys.wanted(topic)
        wish = view.wanted.get(topic)
        if wish is None or self._is_busy(key) or self._is_busy(self._keys.topic(topic)):
            return []  # it is looked at again when that has ended
        if wish.refusal:
            is_left = wish.node not in view.nodes and self._keys.node(wish.node) not in view.unreadable
            return [self.swap_to(key, None, f"topic {topic} was refused, and who asked is gone")] if is_left else []
        record = view.topics.get(topic)
        if record is not None:
            # one that is being deleted is made anew when it is gone
            return [] if record.is_deleting else [self.swap_to(key, None, f"topic {topic} is there, as was asked for")]
        try:
            if why_not := self._why_not(topic):
                raise Refused(why_not)
            takers = [node for node in self.live.values() if node.node not in view.drains]
            defaults = dataclasses.replace(self._defaults, copies=0) if wish.copies else self._defaults
            count, copies = defaults.shape(takers, self.allows_same_host, wish.copies)
            meta = msgspec.structs.replace(PLAIN, replica=copies, extend_support=wish.extend_support)
            made = self.creation(topic, meta, count)
        except Refused as error:
            now = msgspec.structs.replace(wish, refusal=error.reason)
            return [self.swap_to(key, now, f"topic {topic} is asked for and is not made: {error}")]
        if made is None:
            return []
        asked = Compare(key, view.pairs[key].mod_revision)
        return [dataclasses.replace(made, guards=(*made.guards, asked))]

    def _of_topic(self, topic: str) -> list[Swap]:
        view = self.view
        record, key = view.topics.get(topic), self._keys.topic(topic)
        self._unplaced.pop(topic, None)
        self._without_files.pop(topic, None)
        if record is None or self._is_busy(key):
            return []
        if record.is_deleting:
            is_held = any(True for _ in self._states(topic))
            return [] if is_held else [self.swap_to(key, None, f"topic {topic} is deleted")]
        missing = [
            number
            for number in range(record.brought_below, record.partition_num)
            if (topic, number) not in view.partitions and (topic, number) not in self._placing
        ]
        missing = [number for number in missing if self._keys.partition(topic, number) not in view.pairs]
        if not missing:
            return []
        here = {number: state.replicas for number, state in view.of_topic.get(topic, {}).items()}
        here |= {number: nodes for (name, number), nodes in self._placing.items() if name == topic}
        try:
            placed = place_copies(missing, record.meta.replica, self.sites(), here, self.allows_same_host)
        except NoPlace as error:
            self._unplaced[topic] = f"{len(missing)} partitions have no place: {error}"
            if isinstance(error, TooFewFiles):
                self._without_files[topic] = None
            return []
        self._placing.update({(topic, number): nodes for number, nodes in placed.items()})
        pair = view.pairs[key]
        guard = Compare(key, pair.mod_revision)
        return [self._created(topic, record, number, nodes, guard) for number, nodes in placed.items()]

    def _states(self, topic: str) -> Iterator[str]:
        """Yield the keys of a topic's partitions that there are, or may be presently."""
        head = self._keys.partitions(topic).start
        for number in self.view.of_topic.get(topic, ()):
            yield self._keys.partition(topic, number)
        for keys in (self.view.unreadable, self._under_way, self._awaited):
            yield from (key for key in keys if key.startswith(head))

    def _created(self, topic: str, record: TopicRecord, number: int, nodes: Sequence[str], guard: Compare) -> Swap:
        """Make a partition that nobody has written to: all replicas have all of it."""
        live = self.live
        state = PartitionState(record.number, self._random.getrandbits(_ID_BITS) + 1, replicas=tuple(nodes))
        leader = live[nodes[0]]
        state = elected(state, leader, (live[node].member for node in nodes))
        reason = f"partition {topic}/{number} is created on {', '.join(nodes)}"
        return self.swap_to(self._keys.partition(topic, number), state, reason, guard)

    def sites(self) -> list[Site]:
        """Return the nodes that new partitions may be placed on."""
        led: dict[str, int] = {}
        held: dict[str, int] = {}
        for nodes in self._placing.values():
            led[nodes[0]] = led.get(nodes[0], 0) + 1
            for node in nodes:
                held[node] = held.get(node, 0) + 1
        view = self.view
        return [
            Site(
                node.node,
                node.host_id,
                node.zone,
                len(view.led.get(node.node, ())) + led.get(node.node, 0),
                len(view.held.get(node.node, ())) + held.get(node.node, 0),
                node.copies_max,
            )
            for node in self.live.values()
            if not node.is_draining and not node.is_full and node.node not in view.drains
        ]

    def why_not_placed(self, topic: str) -> str:
        """Tell why a topic lacks partitions; empty: it does not, or not for long."""
        return self._unplaced.get(topic, "")

    def creation(self, topic: str, meta: TopicMeta, partition_num: int, is_any_fine: bool = False) -> Swap | None:
        """Return what makes a topic; None when it is there as it is wanted. Its partitions follow by themselves.

        Args:
            meta: of a plain topic without partitions; ``meta.replica`` counts.
            partition_num: of a plain topic as well.
            is_any_fine: one that is there is taken, whatever it is like.

        Raises:
            Refused: it is there and different, is being deleted, or there are too few nodes.
        """
        key = self._keys.topic(topic)
        if key in self.view.unreadable:
            raise Refused(f"topic {topic} is there and cannot be read: {self.view.unreadable[key].reason}")
        record = self.view.topics.get(topic)
        if record is not None:
            if record.is_deleting:
                raise Refused(f"topic {topic} is being deleted; try again presently")
            if is_any_fine or (record.meta.is_like(meta) and record.partition_num == partition_num):
                return None
            raise Refused(
                f"topic {topic} is there already, with {record.partition_num} partitions of {record.meta.replica} "
                f"copies{_differences(record.meta, meta)}: delete it first"
            )
        try:
            place_copies(range(partition_num), meta.replica, self.sites(), {}, self.allows_same_host)
        except NoPlace as error:
            raise Refused(f"ErrType:9 ErrCode:1 : No node is available for topic - {error}") from None
        number = self._random.getrandbits(_ID_BITS) + 1
        reason = f"topic {topic} is created with {partition_num} partitions of {meta.replica} copies"
        return self.swap_to(key, TopicRecord(number, meta, partition_num, usual_min_in_sync(meta.replica)), reason)

    def deletion(self, topic: str, number: int = 0) -> Swap | None:
        """Return what begins to delete a topic; None when that has begun. The rest follows by itself.

        Args:
            number: only the one that was created with it; 0: whichever is there.

        Raises:
            Refused: there is no such topic.
        """
        record = self.record_of(topic)
        if number and record.number != number:
            raise Refused(f"topic {topic} was deleted and made anew")
        if record.is_deleting:
            return None
        now = msgspec.structs.replace(record, is_deleting=True)
        return self.swap_to(self._keys.topic(topic), now, f"topic {topic} is to be deleted")

    def record_of(self, topic: str) -> TopicRecord:
        """Return the record of a topic.

        Raises:
            Refused: there is none, or it cannot be read.
        """
        record, key = self.view.topics.get(topic), self._keys.topic(topic)
        if key in self.view.unreadable:
            raise Refused(f"topic {topic} cannot be read: {self.view.unreadable[key].reason}")
        if record is None:
            raise Refused(f"there is no topic {topic}")
        return record

    def describe(self) -> str:
        """One line, for logs and failing tests."""
        return (
            f"Controller revision={self.view.revision} nodes={len(self.view.nodes)} topics={len(self.view.topics)} "
            f"partitions={len(self.view.partitions)} suspected={sorted(self._suspected)} "
            f"to do={len(self._partitions)}+{len(self._topics)}+{len(self._planned)} "
            f"under way={len(self._under_way)} awaited={len(self._awaited)} unplaced={self._unplaced} "
            f"{self.moving.describe()}"
        )


def why_no_leader(
    view: View, partition: PartitionId, live: Mapping[str, NodeRecord] | None = None, hindrance: str = ""
) -> str:
    """Tell why nobody leads a partition, for people; empty: somebody does.

    Args:
        live: the nodes that live; None: all that the view has.
        hindrance: why nobody is elected, whoever could be; empty: somebody is.
    """
    live = view.nodes if live is None else live
    key = view.keys.partition(*partition)
    if key in view.unreadable:
        return str(view.unreadable[key])
    state = view.partitions.get(partition)
    if state is None:
        topic, number = partition
        record = view.topics.get(topic)
        return TO_COME if record is not None and number < record.brought_below else NOT_CREATED
    if state.has_leader(live):
        return ""
    found = candidates(state, live)
    members = ", ".join(state.in_sync_nodes)
    if isinstance(found, NoLeader):
        asked = describe(state, live)
        lost = NO_COPY if has_no_copy(state, view.nodes) else ""
        more = "".join(f"; {each}" for each in (lost, asked, hindrance) if each)
        return f"{found.value}; they are {members}{more}"
    return f"one of {members} can lead, but {hindrance}" if hindrance else f"one of {members} is about to be elected"


def _led(node: NodeRecord, state: PartitionState) -> str:
    return f"node {node.node} leads from epoch {state.epoch + 1} on"


def _differences(known: TopicMeta, wanted: TopicMeta) -> str:
    before, now = msgspec.structs.asdict(known), msgspec.structs.asdict(wanted)
    names = [
        name for name in before if before[name] != now[name] and name not in ("version", "partition_num", "replica")
    ]
    return "".join(f", {name}={before[name]}" for name in names)
