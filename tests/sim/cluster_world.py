"""A cluster of model nodes around the real cores: leaders, followers and links, and the real state of the store.

One partition, three nodes, a controller, publishers that publish once, channels that are consumed. Everything is an
event of one heap; the seed decides all of it. A model is: the disks (``cluster_model.py``), the network, the daemon
around the cores, the clients, and the controller, which elects by :mod:`flintmq.cluster.state` as the real one does.

Invariants, checked while it runs (names as in the design):

- I1: what was acknowledged is in the log of every later leader. I3: the watermark never goes back, over all leaders.
- I4: copies are equal up to the lower of their watermarks. I5: an epoch has one leader; nothing is delivered in an
  epoch after something was in a later one; nothing is acknowledged in it that a later leader does not have.
- I7: a sequence is one message's. I8: no floor passes a message that was not delivered. I10: states are a chain.
- H2: a channel that somebody was told of is at every later leader; in order nothing is delivered again behind what
  comes after it, and nothing is passed over. What was finished last may come again where all in sync lost their power,
  or nodes that sync, whose floors do not. H5: progress is what the leader had at that position. The others (H1, H3, H4)
  are seen by what gets lost without them.
- I12: a node that stops again and again has publishers wait for it a few times, and not each time.
- In the end, when all is well again: one leader, all in sync, everything acknowledged delivered to every channel.

A :class:`Rules` switches single rules of the design off; then an invariant has to break.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import Any
from unittest.mock import patch

from tests.sim.cluster_model import Disk, change_channels, encode_records

from flintmq.cluster import link as link_module
from flintmq.cluster.following import Following
from flintmq.cluster.history import LogShape
from flintmq.cluster.leading import Leading
from flintmq.cluster.link import FollowerLink, LeaderLink, Window
from flintmq.cluster.power import asks_for_ends, elected_with_loss, told, who_has_most
from flintmq.cluster.state import (
    LAG_NS_MAX,
    LEASE_TTL_S,
    PEER_VERSION,
    Ending,
    NodeRecord,
    NoLeader,
    PartitionState,
    can_go_on,
    candidates,
    decode,
    elected,
    encode,
    renounced,
    without_leader,
)
from flintmq.cluster.steadiness import Steadiness
from flintmq.cluster.store import Compare, Get, KeyValue, LeaseNotFound, Put, Span, Tenure, Txn
from flintmq.cluster.store_state import StoreState
from flintmq.wire.peer import Identity, Open, PeerError, Progress, Refusal

MS = 1_000_000
S = 1000 * MS
KEY = "/p"
NODES = ("a", "b", "c")
ORDER = "in order"
PUBLISHERS = 2
HELD_NS = 5 * S // 2
"""Who waits for so long waits for a node that is about to leave the in-sync set."""
HELD_MAX = 3 * PUBLISHERS
"""Twice by a node that stops again and again, and once for whatever else happens."""
LEASE_NS = LEASE_TTL_S * S
MARGIN_NS = S // 10
TROUBLE_NS = 14 * S
FLAPPING_NS = 60 * S
"""So long there is trouble where a node stops again and again."""
LAST_PUBLISH_NS = 10 * S
"""After the trouble."""
END_NS = 20 * S
"""After the trouble."""


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Rules:
    """The rules of the design; False: nobody keeps it."""

    new_incarnation_is_dead: bool = True  # rule 1
    written_before_acknowledged: bool = True  # rule 2
    epochs_decide_truncation: bool = True  # rule 3
    followers_refuse_lower_epochs: bool = True  # rule 3
    shrink_before_watermark: bool = True  # rule 4
    steady_before_in_sync: bool = True
    fencing: bool = True  # rule 6
    stops_before_it_gives_up: bool = True
    h1: bool = True
    h2: bool = True
    h2_order: bool = True
    h3: bool = True
    h4: bool = True
    h4_order: bool = True
    h4_back: bool = True
    h5: bool = True
    h7: bool = True

    @classmethod
    def without(cls, name: str) -> Rules:
        assert name in {each.name for each in fields(cls)}
        return cls(**{name: False})


# -- cores with a rule missing -----------------------------------------------------------------------------------------


class EagerLeading(Leading):
    """Rule 4 is missing: the watermark moves without those who are silent or late, before the store knows."""

    def _advance(self) -> None:
        watched = self._watched
        self._watched = tuple(each for each in watched if not self._must_leave(each))
        super()._advance()
        self._watched = watched


class HastyLeading(Leading):
    """H1 is missing: the log that was found at the election is committed."""

    def _advance(self) -> None:
        if self.watermark is None:
            self._move_watermark(self._promoted_end)
        super()._advance()


class GaplessLeading(Leading):
    """H5 is missing: progress goes on from whatever there is."""

    def next_progress(self, position: tuple[int, int]) -> int | None:
        return self.progress_number + 1


class GaplessFollowing(Following):
    """H5 is missing: progress is applied to whatever there is."""

    def _fits(self, frame: Progress) -> bool:
        return True


class ForgetfulFollowing(Following):
    """Rule 3 is missing: whoever says that it leads is followed."""

    def open(self, stream: Any, frame: Open) -> None:
        self.epoch = min(self.epoch, frame.epoch)
        super().open(stream, frame)

    def superseded(self, epoch: int) -> None:
        if self.stream is None or epoch > self.epoch:
            super().superseded(epoch)


class HeedlessSteadiness(Steadiness):
    """Who stops again and again is in sync each time that it has caught up."""

    def fell(self, node: str) -> None:
        pass


def agreement_by_length(leader: LogShape, follower: LogShape) -> int | None:
    """Rule 3 is missing: the shorter log is taken for the beginning of the longer one."""
    place = min(leader.end, follower.end)
    return place if place >= max(leader.start, follower.start) else None


_LENGTHS = patch.object(link_module, "agreement", agreement_by_length)


# -- the world ---------------------------------------------------------------------------------------------------------


class World:
    """One seed.

    Args:
        faults: kinds that are tried; all, when none are named.
    """

    def __init__(self, seed: int, rules: Rules | None = None, faults: tuple[str, ...] = ()) -> None:
        self.seed = seed
        self.rules = Rules() if rules is None else rules
        self.random = Random(seed)
        self.now = 0
        self.trace: deque[str] = deque(maxlen=200)
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self.is_excused = False
        self.cuts: set[tuple[str, str]] = set()
        self.facts = Facts(self)
        self.store = Store(self)
        syncs = [self.random.random() < 0.25 for _ in NODES]
        self.nodes = {name: Node(self, name, needs) for name, needs in zip(NODES, syncs, strict=True)}
        self.controller = Controller(self)
        self.faults = faults or FAULTS
        self.trouble_ns = FLAPPING_NS if "flap" in self.faults else TROUBLE_NS
        self.min_in_sync = self.random.choice([1, 1, 2])
        self.message_count = 0
        self.slowest_ns = self.random.choice([2 * MS, 20 * MS, 100 * MS])

    # --- time

    def at(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Do something later."""
        self._count += 1
        heappush(self._events, (self.now + max(0, delay_ns), self._count, action))

    def delay(self) -> int:
        """The time that something takes on the way."""
        return self.random.randrange(MS // 5, self.slowest_ns)

    def note(self, text: str) -> None:
        self.trace.append(f"{self.now / S:10.4f} {text}")

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self.cuts

    # --- a run

    def run(self) -> None:
        """Play it.

        Raises:
            Broken: an invariant.
        """
        for node in self.nodes.values():
            node.start()
        self.at(50 * MS, self.controller.turn)
        self.at(100 * MS, self.store.turn)
        for number in range(PUBLISHERS):
            Publisher(self, number)
        Subscriber(self)
        self.at(int(1.5 * S), self.trouble)
        self.at(self.trouble_ns, self.peace)
        self.at(S, self._look)
        try:
            while self._events and self.now < self.trouble_ns + END_NS and not self.is_excused:
                self.now, _, action = heappop(self._events)
                action()
            if not self.is_excused:
                self.facts.check_end()
        except Broken:
            raise
        except Exception as error:
            raise RuntimeError(f"seed {self.seed} at {self.now / S:.3f} s\n{self.story()}") from error

    def story(self) -> str:
        """The last events."""
        return "\n".join(self.trace)

    def _look(self) -> None:
        self.facts.check_copies()
        self.at(S // 2, self._look)

    # --- faults

    def trouble(self) -> None:
        """One more fault."""
        if self.now >= self.trouble_ns - S:
            return
        getattr(self, f"fault_{self.random.choice(self.faults)}")()
        self.at(self.random.randrange(100 * MS, 2500 * MS), self.trouble)

    def somebody(self) -> Node:
        """A node, more often the one that leads."""
        state = self.store.state()
        if state is not None and state.leader in self.nodes and self.random.random() < 0.5:
            return self.nodes[state.leader]
        return self.nodes[self.random.choice(NODES)]

    def lasting(self) -> int:
        return self.random.choice([50 * MS, 300 * MS, S, 4 * S, 6 * S])

    def fault_kill(self) -> None:
        node = self.somebody()
        if node.process is not None:
            node.kill(has_power=True)
            self.at(self.lasting(), node.start)

    def fault_stumble(self) -> None:
        """A process dies and is back before anybody else is elected, perhaps."""
        node = self.somebody()
        if node.process is not None:
            node.kill(has_power=True)
            self.at(self.random.randrange(5 * MS, 60 * MS), node.start)

    def fault_power(self) -> None:
        node = self.somebody()
        if node.process is not None and self.store.survives(node.name):
            node.kill(has_power=False)
            self.at(self.lasting(), node.start)

    def fault_dark(self) -> None:
        """All nodes lose their power, at once or one after the other, and are back one after the other."""
        spread_ns = self.random.choice([MS, S, 4 * S])
        for node in self.nodes.values():
            self.at(self.random.randrange(spread_ns), partial(self._darken, node))

    def _darken(self, node: Node) -> None:
        if node.process is not None:
            node.kill(has_power=False)
            self.at(self.random.randrange(S // 10, 6 * S), node.start)

    def fault_pause(self) -> None:
        process = self.somebody().process
        if process is not None and not process.is_paused:
            self.note(f"pause {process.name}")
            process.is_paused = True
            self.at(self.lasting(), process.resume)

    def fault_flap(self) -> None:
        """One that follows stands still until it is out of sync, and a moment later again."""
        process = self.nodes[NODES[-1]].process
        if process is not None and not process.is_paused:
            self.note(f"pause {process.name}")
            process.is_paused = True
            self.at(LAG_NS_MAX + S, process.resume)

    def fault_rewind(self) -> None:
        """An operator has what a channel in order has finished delivered again; perhaps all lose their power then."""
        state = self.store.state()
        process = self.nodes[state.leader].process if state is not None and state.leader in self.nodes else None
        if process is None:
            return
        process.do(process.rewind)
        if self.random.random() < 0.5:
            delay_ns = self.random.randrange(S // 2)
            for node in self.nodes.values():
                self.at(delay_ns + self.random.randrange(MS), partial(self._darken, node))

    def fault_cut(self) -> None:
        ends = [*NODES, "store"]
        first = self.somebody().name
        second = self.random.choice([each for each in ends if each != first])
        ways = self.random.choice([[(first, second)], [(second, first)], [(first, second), (second, first)]])
        self.note(f"cut {ways}")
        self.cuts.update(ways)
        self.at(self.lasting(), lambda: self.heal(ways))

    def fault_isolate(self) -> None:
        """A node is alone with its clients; perhaps with one other node."""
        name = self.somebody().name
        kept = self.random.choice([*NODES, "store", ""])
        ways = [way for each in (*NODES, "store") if each not in (name, kept) for way in ((name, each), (each, name))]
        self.note(f"isolate {name} but for {kept}")
        self.cuts.update(ways)
        self.at(self.lasting(), lambda: self.heal(ways))

    def fault_strand(self) -> None:
        """A leader reaches the store alone; about when it has others lead, it hears nothing of the store either."""
        state = self.store.state()
        leader = state.leader if state is not None else ""
        if leader not in self.nodes or self.nodes[leader].process is None:
            return
        self.note(f"strand {leader}")
        ways = [way for each in NODES if each != leader for way in ((leader, each), (each, leader))]
        self.cuts.update(ways)
        self.at(self.random.randrange(3 * S, 4 * S), lambda: self.cuts.add(("store", leader)))
        self.at(8 * S, lambda: self.heal([*ways, ("store", leader)]))

    def fault_estrange(self) -> None:
        """A leader is alone until another leads alone; then that one dies, and what is back of it meets the first one
        before it meets the store.
        """
        state = self.store.state()
        leader = state.leader if state is not None else ""
        if leader not in self.nodes or self.now > 5 * S:
            return
        second, third = self.random.sample([each for each in NODES if each != leader], 2)
        if self.nodes[third].process is None or self.nodes[second].process is None:
            return
        self.note(f"estrange {leader}")
        ways = [way for each in (second, third, "store") for way in ((leader, each), (each, leader))]
        self.cuts.update(ways)
        self.nodes[third].kill(has_power=True)

        def turn() -> None:
            others = [("store", second), (second, "store")]
            self.cuts.update(others)
            node = self.nodes[second]
            if node.process is not None:
                node.kill(has_power=True)
            self.at(20 * MS, node.start)
            self.heal(ways[:2])
            self.at(2 * S, lambda: self.heal([*others, *ways]))

        self.at(int(5.5 * S), turn)
        self.at(9 * S, self.nodes[third].start)

    def heal(self, ways: list[tuple[str, str]]) -> None:
        self.note(f"heal {ways}")
        self.cuts.difference_update(ways)
        for node in self.nodes.values():
            if node.process is not None:
                for connection in list(node.process.connections):
                    connection.deliver_held()

    def fault_bit(self) -> None:
        """A bit of what a copy has synced is not what it was; it is found when the process starts, or reads it."""
        node, state = self.somebody(), self.store.state()
        disk = node.disk
        firsts = [first for first, end, _, _ in disk.batches if end <= disk.synced_end]
        if firsts and state is not None and not disk.bad and self.store.survives(node.name, must_sync=False):
            first = self.random.choice(firsts)
            self.note(f"bit of {node.name} at {first}")
            disk.bad.add(first)
            if node.process is not None and self.random.random() < 0.7:
                node.kill(has_power=True)
                self.at(self.random.choice([10 * MS, S, 4 * S]), node.start)

    def fault_reset(self) -> None:
        process = self.somebody().process
        if process is not None and process.connections:
            self.random.choice(process.connections).reset()

    def fault_store(self) -> None:
        self.note("store down")
        self.store.is_up = False
        self.at(self.lasting(), self.store.restart)

    def peace(self) -> None:
        """All is well from here on."""
        self.note("peace")
        self.store.restart()
        self.store.is_reliable = True
        self.heal(list(self.cuts))
        self.cuts.clear()
        for node in self.nodes.values():
            if node.process is None:
                node.start()
            else:
                node.process.resume()


LOSING = ("bit", "bit", "kill", "stumble", "reset", "isolate")
"""With bits that are lost."""
FAULTS = ("kill", "kill", "stumble", "power", "pause", "cut", "cut", "isolate", "reset", "store")


# -- what must hold ----------------------------------------------------------------------------------------------------


class Facts:
    """Everything that anybody outside was told."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.acked: dict[int, int] = {}  # message: sequence
        self.message_at: dict[int, int] = {}
        self.watermark = 0
        self.leaders: dict[int, str] = {}  # by epoch
        self.led_ends: dict[int, tuple[Disk, int]] = {}
        self.delivered: dict[str, set[int]] = {}
        self.delivered_epoch = 0
        self.channels: dict[str, int] = {}  # that somebody was told of, with where they began
        self.states: dict[tuple[int, int], dict[str, int]] = {}
        self.acked_count = 0
        self.last_in_order = -1
        self.lossy_count = 0
        self.is_power_lost = False
        self.in_order: set[int] = set()
        self.dropped_end = 0  # that retention went over before it was delivered in order
        self._order_epoch = 0
        self.held_count = 0
        self._delivered_in_order: list[int] = []

    def fail(self, reason: str) -> None:
        world = self.world
        raise Broken(f"seed {world.seed} at {world.now / S:.3f} s: {reason}\n{world.story()}")

    def _lose(self, name: str, disk: Disk) -> None:
        """Who has most begins, as nobody is known to have everything: what no copy has is gone, and nothing else."""
        for message, sequence in list(self.acked.items()):
            if sequence >= disk.start and (sequence >= disk.end or disk.id_at(sequence) != message):
                for node in self.world.nodes.values():
                    if node.disk.start <= sequence < node.disk.end and node.disk.id_at(sequence) == message:
                        self.fail(f"H4: {name} leads without message {message}, which {node.name} has at {sequence}")
                del self.acked[message]
        self.message_at = {at: message for at, message in self.message_at.items() if at < disk.end}
        self.watermark = min(self.watermark, disk.end)
        self.channels = {channel: min(begun, disk.end) for channel, begun in self.channels.items()}
        self.dropped_end = min(self.dropped_end, disk.end)
        self.lossy_count += 1
        self.last_in_order = -1

    def led(self, name: str, leading: Leading, disk: Disk) -> None:
        """A leader begins."""
        epoch = leading.epoch
        if leading.state.lossy_epoch == epoch:
            self._lose(name, disk)
        if self.leaders.setdefault(epoch, name) != name:
            self.fail(f"I5: {name} leads in epoch {epoch}, and so did {self.leaders[epoch]}")
        self.led_ends[epoch] = (disk, disk.end)
        self.states[epoch, 0] = dict(disk.channels)
        if any(later > epoch for later in self.leaders):
            return  # it is late, and nobody will follow it
        for message, sequence in self.acked.items():
            self._check_has(disk, message, sequence, f"leader {name} of epoch {epoch}")
        for channel, floor in self.channels.items():
            if channel not in disk.channels:
                self.fail(f"H2: leader {name} of epoch {epoch} has no channel {channel}")
            if disk.channels[channel] < floor:
                self.fail(f"H2: channel {channel} at leader {name} is at {disk.channels[channel]}, it began at {floor}")
        self.check_floors(disk, name)

    def _check_has(self, disk: Disk, message: int, sequence: int, who: str) -> None:
        if disk.lost_from is not None and sequence >= disk.start and disk.is_bad(sequence, sequence + 1):
            self.fail(f"I1: {who} knows that it lost message {message}, acknowledged at {sequence}")
        if sequence >= disk.start and (sequence >= disk.end or disk.id_at(sequence) != message):
            self.fail(f"I1: {who} does not have message {message}, acknowledged at {sequence}")

    def check_floors(self, disk: Disk, name: str) -> None:
        for channel, floor in disk.channels.items():
            begun = self.channels.get(channel)
            if begun is None:
                continue
            if floor > disk.end:
                self.fail(f"I8: channel {channel} at {name} is at {floor}, its log ends at {disk.end}")
            delivered = self.delivered.get(channel, set())
            for message in disk.ids(begun, floor):
                if message not in delivered:
                    self.fail(f"I8: channel {channel} at {name} is at {floor}, and never got {message}")

    def acknowledge(self, leading: Leading, name: str, message: int, sequence: int) -> None:
        """A publisher gets its OK."""
        self.acked_count += 1
        if self.message_at.setdefault(sequence, message) != message:
            self.fail(f"I7: sequence {sequence} is message {message}'s, and was {self.message_at[sequence]}'s")
        self.acked[message] = sequence
        self.watermark = max(self.watermark, leading.watermark or 0)
        for epoch, (disk, _) in self.led_ends.items():
            if epoch > leading.epoch:
                self._check_has(disk, message, sequence, f"I5: {name} acknowledges in epoch {leading.epoch}; {epoch}")

    def waited(self, wait_ns: int) -> None:
        """A publisher got its OK after so long."""
        if wait_ns > HELD_NS:
            self.held_count += 1

    def moved(self, leading: Leading, name: str, before: int | None) -> None:
        """A leader's watermark is another one."""
        if before is None and leading.watermark is not None and leading.watermark < self.watermark:
            self.fail(f"I3: leader {name} of epoch {leading.epoch} begins at {leading.watermark}, not {self.watermark}")
        if before is not None and (leading.watermark is None or leading.watermark < before):
            self.fail(f"I3: the watermark of {name} went from {before} to {leading.watermark}")

    def may_deliver(self, leading: Leading, name: str) -> None:
        """A consumer would get messages now, if there were any."""
        if leading.epoch < self.delivered_epoch:
            self.fail(f"I5: {name} delivers in epoch {leading.epoch}, after epoch {self.delivered_epoch}")
        self.delivered_epoch = leading.epoch

    def deliver(self, channel: str, messages: list[int], end: int) -> None:
        """A consumer gets messages."""
        self.watermark = max(self.watermark, end)
        self.delivered.setdefault(channel, set()).update(messages)

    def deliver_in_order(self, leading: Leading, name: str, sequence: int, disk: Disk) -> None:
        """The consumer in order gets a message."""
        first = max(self.dropped_end, sequence - 1 if leading.epoch == self._order_epoch else disk.start)
        self._order_epoch = leading.epoch
        for message in disk.ids(first, sequence):
            if message in self.acked and message not in self.in_order:
                self.fail(f"H4: {name} of epoch {leading.epoch} delivers {sequence} in order, and never {message}")
        self.in_order.add(disk.id_at(sequence))
        self._delivered_in_order.append(disk.id_at(sequence))
        if sequence < self.last_in_order and not self.is_power_lost:
            self.fail(f"H2: {name} of epoch {leading.epoch} delivers {sequence} in order, behind {self.last_in_order}")
        self.last_in_order = max(self.last_in_order, sequence)

    def rewinding(self, target: int) -> Callable[[], None]:
        """An operator has a channel in order go back; what is returned is called when it gets its OK."""
        finished = {message for message in self.in_order if self.acked.get(message, -1) >= target}
        mark = len(self._delivered_in_order)
        self.last_in_order = -1

        def rewound() -> None:
            self.in_order -= finished - set(self._delivered_in_order[mark:])

        return rewound

    def stored(self, disk: Disk, name: str) -> None:
        """A copy has stored progress."""
        expected = self.states.get(disk.progress)
        if expected is not None and expected != disk.channels:
            self.fail(f"H5: {name} has {disk.channels} at {disk.progress}, the leader had {expected}")

    def stated(self, before: PartitionState | None, now: PartitionState | None) -> None:
        """The state in the store is another one."""
        assert now is not None
        if before is None:
            is_next = now.epoch == 1
        elif now.epoch == before.epoch:
            is_next = before.leader == now.leader or not now.leader
        else:
            known = before.holders if now.lossy_epoch == now.epoch else before.in_sync_nodes
            is_next = now.epoch == before.epoch + 1 and set(now.in_sync_nodes) <= set(known)
        if not is_next or (now.leader and now.leader not in now.in_sync_nodes) or not now.in_sync:
            self.fail(f"I10: {now} after {before}")

    def check_copies(self) -> None:
        """Copies are equal as far as both know it is committed."""
        disks = [(node.name, node.disk) for node in self.world.nodes.values()]
        for index, (name, disk) in enumerate(disks):
            for other_name, other in disks[index + 1 :]:
                start, end = max(disk.start, other.start), min(disk.committed, other.committed)
                if disk.lost_from is not None or other.lost_from is not None:
                    continue
                if start < end and _part(disk, start, end) != _part(other, start, end):
                    self.fail(f"I4: {name} and {other_name} differ between {start} and {end}")

    def check_end(self) -> None:
        """All is well again."""
        world = self.world
        self.check_copies()
        state = world.store.state()
        if state is None or not state.leader:
            self.fail("nobody leads in the end")
        assert state is not None
        if set(state.in_sync_nodes) != set(NODES):
            self.fail(f"in the end {state.in_sync_nodes} are in sync")
        leader = world.nodes[state.leader]
        process = leader.process
        if process is None or process.leading is None or process.leading.watermark != leader.disk.end:
            self.fail(f"in the end {state.leader} leads: {process and process.leading and process.leading.describe()}")
        for node in world.nodes.values():
            if node.disk.end != leader.disk.end or node.disk.channels != leader.disk.channels:
                self.fail(f"in the end {node.name} is at {node.disk.end}, {leader.name} at {leader.disk.end}")
        for channel, begun in self.channels.items():
            missing = [
                message
                for message, sequence in self.acked.items()
                if sequence >= begun and message not in self.delivered.get(channel, set())
            ]
            if missing:
                self.fail(f"I2: channel {channel} never got {missing[:5]}")
        if world.faults == ("flap",) and self.held_count > HELD_MAX:
            self.fail(f"I12: publishers were held {self.held_count} times by one node")
        if self.acked_count < 10:
            self.fail(f"only {self.acked_count} publishes were acknowledged")


def _part(disk: Disk, start: int, end: int) -> list[tuple[int, int, int, bytes]]:
    return [batch for batch in disk.batches if batch[1] > start and batch[0] < end]


# -- the store ---------------------------------------------------------------------------------------------------------


class Store:
    """The real state of the embedded store behind a bad network."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.keys = StoreState()
        self.is_up = True
        self.is_reliable = False
        self._last: PartitionState | None = None
        self._lease_count = 0

    def state(self) -> PartitionState | None:
        pair = self.keys.get(KEY)
        return None if pair is None else decode(KEY, pair.value, PartitionState)

    def nodes(self) -> dict[str, NodeRecord]:
        found = self.keys.range(Span.of_prefix("/n/")).found
        return {pair.key[3:]: decode(pair.key, pair.value, NodeRecord) for pair in found}

    def survives(self, without: str, must_sync: bool = True) -> bool:
        """Whether somebody else has all that was acknowledged, so that one may lose its power, or some of what it has.

        Args:
            must_sync: who has synced everything loses nothing.
        """
        state, nodes = self.state(), self.world.nodes
        if state is None or (must_sync and nodes[without].disk.needs_sync):
            return state is not None
        return any(
            member.node != without
            and not nodes[member.node].disk.bad
            and (member.syncs or member.boot_id == nodes[member.node].boot_id)
            for member in state.in_sync
        )

    def turn(self) -> None:
        if self.is_up:
            before = self.keys.revision
            self.keys.expire(self.world.now)
            if self.keys.revision != before:
                self.changed()
        self.world.at(100 * MS, self.turn)

    def restart(self) -> None:
        if not self.is_up:
            self.world.note("store up")
            self.is_up = True
            self.keys.restart_leases(self.world.now)

    def changed(self) -> None:
        """Tell everybody who watches."""
        world = self.world
        state = self.state()
        if state != self._last:
            world.facts.stated(self._last, state)
            self._last = state
        for node in world.nodes.values():
            if node.process is not None:
                node.process.watch()
        world.controller.watch()

    def call(self, who: str, action: Callable[[StoreState], Any], done: Callable[[Any], None]) -> None:
        """Ask the store; ``done`` gets the answer, or None: there was none, and nobody knows."""
        world, random = self.world, self.world.random
        is_answered = False

        def answer(result: Any) -> None:
            nonlocal is_answered
            if not is_answered:
                is_answered = True
                done(result)

        def carry_out() -> None:
            if not self.is_up or world.is_cut(who, "store"):
                return
            before = self.keys.revision
            try:
                result = action(self.keys)
            except LeaseNotFound as error:
                result = error
            if self.keys.revision != before:
                self.changed()
            if not world.is_cut("store", who) and (self.is_reliable or random.random() > 0.02):
                world.at(world.delay(), lambda: answer(result))

        late = not self.is_reliable and random.random() < 0.03
        world.at(random.randrange(S // 10, 3 * S) if late else world.delay(), carry_out)
        world.at(S // 2, lambda: answer(None))


class Controller:
    """Elects, by what it saw of the store."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._seen: tuple[KeyValue | None, dict[str, NodeRecord]] = (None, {})
        self._is_busy = False
        self._is_watching = False

    def watch(self) -> None:
        if not self._is_watching:
            self._is_watching = True
            self.world.at(self.world.delay(), self._see)

    def _see(self) -> None:
        self._is_watching = False
        store = self.world.store
        if store.is_up:
            self._seen = (store.keys.get(KEY), store.nodes())
            self._decide()

    def turn(self) -> None:
        self._see()
        self.world.at(200 * MS, self.turn)

    def _live(self) -> dict[str, NodeRecord]:
        """Without those whose port is closed."""
        nodes = self.world.nodes
        live = {}
        for name, record in self._seen[1].items():
            process = nodes[name].process
            is_dead = process is None and not nodes[name].is_without_power
            if not is_dead or not self.world.rules.new_incarnation_is_dead:
                live[name] = record
        return live

    def _decide(self) -> None:
        pair, live = self._seen[0], self._live()
        if self._is_busy:
            return
        if pair is None:
            if len(live) == len(NODES):
                members = tuple(live[name].member for name in NODES)
                state = elected(PartitionState(7, 9, replicas=NODES), live["a"], members)
                self._write(None, state)
            return
        state = decode(KEY, pair.value, PartitionState)
        rules = self.world.rules
        if rules.new_incarnation_is_dead:
            has_leader = state.has_leader(live)
        else:
            has_leader = state.leader in live
        if has_leader:
            return
        electable = live
        if not rules.h4:
            boots = {member.node: member.boot_id for member in state.in_sync}
            electable = {
                name: NodeRecord(name, record.incarnation, boots.get(name, ""), record.syncs, "", 1, 1, 1)
                for name, record in live.items()
            }
        found = candidates(state, electable)
        if isinstance(found, NoLeader):
            if state.leader and not state.has_leader(self._seen[1]):
                self._write(pair, without_leader(state))
            elif not state.leader and (most := who_has_most(state, live)) is not None:
                self._write(pair, elected_with_loss(state, live[most.node]))
            return
        best = live[found[0].node]
        members = tuple(
            live[each.node].member
            for each in state.in_sync
            if each.node in live and each.is_whole(electable[each.node])
        )
        self._write(pair, elected(state, best, members))

    def _write(self, before: KeyValue | None, state: PartitionState) -> None:
        self._is_busy = True
        revision = 0 if before is None else before.mod_revision
        txn = Txn((Compare(KEY, revision),), (Put(KEY, encode(state)),))

        def done(result: Any) -> None:
            self._is_busy = False
            if result is not None and result.succeeded:
                self.world.note(f"elected {state.leader or 'nobody'} in epoch {state.epoch} {state.in_sync_nodes}")

        self.world.store.call("controller", lambda keys: keys.apply(txn), done)


# -- nodes -------------------------------------------------------------------------------------------------------------


class Node:
    """A machine with a disk."""

    def __init__(self, world: World, name: str, needs_sync: bool) -> None:
        self.world = world
        self.name = name
        self.disk = Disk(needs_sync=needs_sync, syncs_floors=world.rules.h4_back)
        self.floors_left = Random(f"{world.seed} {name}")
        self.boot = 1
        self.start_count = 0
        self.process: Process | None = None
        self.is_without_power = False
        self.offset_ns = world.random.randrange(1000 * S)
        self.rate = 1 + world.random.uniform(-0.001, 0.001)
        self.buffered_from = 0

    @property
    def boot_id(self) -> str:
        return f"{self.name}{self.boot}"

    def start(self) -> None:
        if self.process is None:
            self.is_without_power = False
            self.start_count += 1
            self.world.note(f"start {self.name}{self.start_count} with {self.disk.end}, boot {self.boot}")
            self.process = Process(self, f"{self.name}{self.start_count}")
            self.process.begin()

    def kill(self, has_power: bool) -> None:
        process, self.process = self.process, None
        assert process is not None
        process.is_alive = False
        disk = self.disk
        if not self.world.rules.written_before_acknowledged:
            disk.lose_from(max(min(process.flushed_end, disk.end), disk.start))
        if not has_power:
            if disk.needs_sync:
                self.world.facts.is_power_lost = True
            if ORDER in disk.floors:  # a file of its own, which is not synced
                disk.floors[ORDER] = self.floors_left.randrange(disk.floors[ORDER] + 1)
                stale = disk.stale_floors.pop(ORDER, 0)
                if stale and self.floors_left.random() < 0.5:
                    disk.floors[ORDER] = max(disk.floors[ORDER], stale)
            self.boot += 1
            self.is_without_power = True
            disk.lose_from(self.world.random.randrange(disk.synced_end, disk.end + 1))
        disk.synced_end = min(disk.synced_end, disk.end)
        self.world.note(f"{'kill' if has_power else 'power'} {process.name}, {disk.end} left")
        for connection in list(process.connections):
            connection.died(process, is_told=has_power)


class Process:
    """An nsqd: what it does around the cores."""

    def __init__(self, node: Node, name: str) -> None:
        self.node = node
        self.world = node.world
        self.name = name
        self.disk = node.disk
        self.is_alive = True
        self.is_paused = False
        self.connections: list[Connection] = []
        self.links: dict[str, LeaderLink] = {}
        self.dialled: dict[str, Connection] = {}
        self.leading: Leading | None = None
        self.following: Following | None = None
        self.refused_epoch = 0
        self.confirmed_ns = 0
        self.tenure: Tenure | None = None
        self.lease_id = 0
        self.flushed_end = self.disk.end
        self._held: list[Callable[[], None]] = []
        self._state: tuple[PartitionState, int] | None = None
        self._nodes: dict[str, NodeRecord] = {}
        self._is_watching = False
        self._promoting = 0
        self._waiting: list[tuple[int, int, Callable[[str], None]]] = []
        self._last_watermark: int | None = None
        self._cursors: dict[str, int] = {}
        self._changes: dict[str, int | None] = {}
        self._deliver_from_ns = 0
        self._is_renewing = False
        self._committed_ns = 0
        self._in_order = 0
        self._is_order_held = False
        heeds = self.world.rules.steady_before_in_sync
        self.steadiness = Steadiness() if heeds else HeedlessSteadiness()

    # --- a process

    def now(self) -> int:
        """Its own monotonic clock."""
        return self.node.offset_ns + int(self.world.now * self.node.rate)

    def at(self, delay_ns: int, action: Callable[[], None]) -> None:
        self.world.at(delay_ns, lambda: self.do(action))

    def do(self, action: Callable[[], None]) -> None:
        """Do something in a turn, unless it is dead; when it is paused, afterwards."""
        if not self.is_alive:
            return
        if self.is_paused:
            self._held.append(action)
            return
        action()
        self._end_turn()

    def resume(self) -> None:
        if self.is_paused and self.is_alive:
            self.world.note(f"resume {self.name}")
            self.is_paused = False
            held, self._held = self._held, []
            for action in held:
                self.do(action)

    def begin(self) -> None:
        disk = self.disk
        disk.later = self._transact
        self.confirmed_ns = self.now()
        self._follow()
        for name in NODES:
            if name != self.node.name:
                window = Window(2000, 500, 200) if self.world.random.random() < 0.3 else None
                self.links[name] = LeaderLink(name, self.now(), window)
        disk.is_led = False
        disk.on_bad = self._met_damage
        if disk.bad and self.world.rules.h7 and self.world.random.random() < 0.8:
            disk.notice()
        if disk.lost_from is not None:
            self.at(0, partial(self._renounce, self._register))
        else:
            self.at(0, self._register)
        self.at(0, self._tick)
        self.at(0, self._renew)
        self.at(100 * MS, self._flush)
        self.at(30 * MS, self._consume_in_order)
        self.at(self.world.random.randrange(S), self._sync_all)
        self.at(0, self.watch)

    def _transact(self, action: Callable[[], None]) -> None:
        """Commit a transaction of the database some time, after the one before."""
        delay_ns = self.world.random.randrange(MS, 20 * MS)
        self._committed_ns = max(self._committed_ns, self.world.now + delay_ns)

        def commit() -> None:
            action()
            self.world.facts.stored(self.disk, self.name)

        self.at(self._committed_ns - self.world.now, commit)

    def _end_turn(self) -> None:
        if self.leading is not None:
            self._answer()
        for name, link in self.links.items():
            connection = self.dialled.get(name)
            if connection is not None and link.has_output:
                connection.send(self, b"".join(map(bytes, link.take_output(self.now()))))
        for connection in self.connections:
            follower = connection.follower
            if connection.acceptor is self and follower is not None and follower.has_output:
                connection.send(self, b"".join(map(bytes, follower.take_output(self.now()))))

    # --- the store

    def record(self) -> NodeRecord:
        node = self.node
        return NodeRecord(node.name, self.name, node.boot_id, self.disk.needs_sync, "", 1, 1, 1)

    def _call(self, action: Callable[[StoreState], Any], done: Callable[[Any], None]) -> None:
        self.world.store.call(self.node.name, action, lambda result: self.do(lambda: done(result)))

    def _register(self) -> None:
        sent_ns = self.now()
        self.world.store._lease_count += 1
        lease_id = self.world.store._lease_count
        value = encode(self.record())

        def act(keys: StoreState) -> bool:
            keys.grant(lease_id, LEASE_TTL_S, self.world.now)
            keys.apply(Txn((), (Put(f"/n/{self.node.name}", value, lease_id),)))
            return True

        def done(result: Any) -> None:
            self._is_renewing = False
            if result is True:
                self.lease_id = lease_id
                self.tenure = Tenure(LEASE_NS, sent_ns, MARGIN_NS)
            else:
                self.at(200 * MS, self._register)

        self._is_renewing = True
        self._call(act, done)

    def _renew(self) -> None:
        self.at(S, self._renew)
        if not self.lease_id or self._is_renewing:
            return
        sent_ns, lease_id = self.now(), self.lease_id

        def done(result: Any) -> None:
            if isinstance(result, LeaseNotFound):
                if self.lease_id == lease_id:
                    self.lease_id = 0
                    self.tenure = None
                    self._register()
            elif result is not None and self.tenure is not None and self.lease_id == lease_id:
                self.tenure.renewed(sent_ns, LEASE_NS)

        self._call(lambda keys: keys.keepalive(lease_id, self.world.now), done)

    def watch(self) -> None:
        """The store has changed: it is seen a little later, if it is seen."""
        if not self._is_watching:
            self._is_watching = True
            self.world.at(self.world.delay(), self._see)

    def _see(self) -> None:
        self._is_watching = False
        store = self.world.store
        if store.is_up and not self.world.is_cut("store", self.node.name):
            pair, mine = store.keys.get(KEY), store.keys.get(f"/n/{self.node.name}")
            if self.lease_id and not self._is_renewing and (mine is None or mine.lease_id != self.lease_id):
                self.do(self._register)  # an earlier request came late, and its lease has run out since
            self._nodes = store.nodes()
            if pair is not None:
                self.do(lambda: self._saw(decode(KEY, pair.value, PartitionState), pair.mod_revision))

    def _saw(self, state: PartitionState, revision: int) -> None:
        if self._state is not None and revision <= self._state[1]:
            return
        self._state = (state, revision)
        if self.leading is not None:
            self.leading.state_changed(state, revision)
            if self.leading.is_ended:
                self._demote()
        rules = self.world.rules
        is_mine = state.is_led_by(self.node.name, self.name)
        if not rules.new_incarnation_is_dead:
            is_mine = state.leader == self.node.name
        if is_mine:
            if self.leading is None and self._promoting < state.epoch:
                self._promoting = state.epoch
                self._promote(state)
        elif self.following is not None:
            self.following.superseded(state.epoch - 1 if state.leader else state.epoch)
            if state.leader and state.leader != self.node.name and state.epoch > self.following.epoch:
                if rules.followers_refuse_lower_epochs:
                    self.following.superseded(state.epoch)

    def _tell_end(self) -> None:
        """Say how far this copy is, where nobody can be elected without knowing."""
        if self._state is None or self.following is None or not self.following.is_idle:
            return
        state, revision = self._state
        if self._nodes.get(self.node.name) != self.record() or not asks_for_ends(state, self._nodes):
            return
        shape = self.disk.shape()
        epoch = shape.history[-1][0] if shape.history else 0
        wanted = told(state, Ending(self.node.name, self.name, epoch, shape.end))
        if wanted is not None:
            txn = Txn((Compare(KEY, revision),), (Put(KEY, encode(wanted)),))
            self._call(lambda keys: keys.apply(txn), lambda result: None)

    # --- what is lost

    def _met_damage(self) -> None:
        """Something that was to be read cannot be."""
        if self.world.rules.h7 and self.disk.lost_from is None:
            self.world.note(f"{self.name} meets what it lost")
            self.disk.notice()
            self._renounce(lambda: None)

    def _renounce(self, then: Callable[[], None]) -> None:
        """Be in sync no longer, where others are."""

        def act(keys: StoreState) -> bool:
            pair = keys.get(KEY)
            state = None if pair is None else decode(KEY, pair.value, PartitionState)
            wanted = None if state is None else renounced(state, self.node.name)
            if pair is not None and wanted is not None:
                keys.apply(Txn((Compare(KEY, pair.mod_revision),), (Put(KEY, encode(wanted)),)))
            elif state is not None and self.node.name in state.in_sync_nodes and self.disk.lost_from is not None:
                self.world.is_excused = True  # nobody else is known to have it: it is skipped after a while
            return True

        def done(result: Any) -> None:
            if result is None:
                self.at(200 * MS, partial(self._renounce, then))
            else:
                self.world.note(f"{self.name} renounced")
                then()

        self._call(act, done)

    # --- leading

    def _promote(self, state: PartitionState) -> None:
        """Become the leader, when nothing is under way."""
        if self.disk.lost_from is not None:
            self._renounce(lambda: None)
            return
        following = self.following
        if following is not None:
            following.superseded(state.epoch)
            if following.stream is not None:
                following._leave(Refusal.HIGHER_EPOCH, state.epoch)
            if not following.is_idle:
                self.at(5 * MS, lambda: self._promote(state))
                return
            self.confirmed_ns = max(self.confirmed_ns, following.confirmed_ns)
            self.following = None
        self.refused_epoch = state.epoch
        if self._state is None or self._state[0].epoch != state.epoch or self._state[0].leader != self.node.name:
            self._follow()
            return
        self.disk.later(lambda: self._lead(state.epoch))

    def _lead(self, epoch: int) -> None:
        assert self._state is not None
        state, revision = self._state
        if state.epoch != epoch or state.leader != self.node.name or self.disk.epoch > epoch:
            self._follow()
            return
        disk, rules = self.disk, self.world.rules
        base = disk.progress
        if disk.epoch == epoch and not rules.new_incarnation_is_dead:
            disk.flush_number = 0
        else:
            disk.lead(epoch)
        disk.is_led = True
        kind: type[Leading] = Leading
        if not rules.shrink_before_watermark:
            kind = EagerLeading
        elif not rules.h1:
            kind = HastyLeading
        elif not rules.h5:
            kind = GaplessLeading
        self._last_watermark = None
        if state.lossy_epoch == epoch:  # what channels have finished and the log has not is no more
            disk.channels = {channel: min(floor, disk.end) for channel, floor in disk.channels.items()}
            disk.progress, base = (epoch, 0), (0, 0)
        self._cursors = {channel: floor for channel, floor in disk.channels.items() if channel != ORDER}
        self._changes = {}
        self.leading = kind(
            "t",
            0,
            self.node.name,
            state,
            revision,
            disk,
            end=disk.end,
            base=base,
            min_in_sync=self.world.min_in_sync,
            needs_sync=disk.needs_sync,
            can_go_on=self._can_others,
            steadiness=self.steadiness,
        )
        self._deliver_from_ns = self.confirmed_ns + LEASE_NS
        self._in_order = max(disk.floors.get(ORDER, 0), disk.channels.get(ORDER, 0))
        if rules.h4_order:
            self._in_order = min(self._in_order, disk.end)
        self._keep_floor()
        self.world.note(f"{self.name} leads in epoch {epoch}, its log ends at {disk.end}")
        self.world.facts.led(self.node.name, self.leading, disk)
        for link in self.links.values():
            link.add(self.leading)
        if disk.needs_sync:
            self._sync_soon()

    def _can_others(self, state: PartitionState, away: Collection[str], least: int) -> bool:
        return can_go_on(state, {node: each for node, each in self._nodes.items() if node not in away}, least)

    def _demote(self) -> None:
        leading, self.leading = self.leading, None
        self.disk.is_led = False
        assert leading is not None
        self.world.note(f"{self.name} leads no longer in epoch {leading.epoch}")
        leading.ended()
        for link in self.links.values():
            link.remove("t", 0)
        waiting, self._waiting = self._waiting, []
        for _, _, answer in waiting:
            answer("unknown")
        self._follow()

    def _follow(self) -> None:
        kind: type[Following] = Following
        if not self.world.rules.h5:
            kind = GaplessFollowing
        elif not self.world.rules.followers_refuse_lower_epochs:
            kind = ForgetfulFollowing
        self.following = kind("t", 0, 7, 9, self.disk, self.confirmed_ns)
        if self._state is not None and self._state[0].epoch > self.following.epoch:
            state = self._state[0]
            self.following.superseded(state.epoch if state.leader != self.node.name else state.epoch - 1)

    def may_act(self) -> bool:
        """Whether it may act as the leader: fencing."""
        leading, now = self.leading, self.now()
        if leading is None or leading.is_ended:
            return False
        if not self.world.rules.fencing:
            return True
        if leading.gives_up and self.world.rules.stops_before_it_gives_up:
            return False
        return (self.tenure is not None and self.tenure.is_held(now)) or leading.is_confirmed(now)

    def _answer(self) -> None:
        """At the end of a turn: what was committed is answered."""
        leading = self.leading
        assert leading is not None
        if leading.is_ended:
            self._demote()
            return
        facts = self.world.facts
        if leading.watermark != self._last_watermark:
            facts.moved(leading, self.name, self._last_watermark)
            self._last_watermark = leading.watermark
        if leading.watermark is None:
            return
        self.disk.commit(leading.watermark)
        if self._waiting and self._waiting[0][0] < leading.watermark and self.may_act() and leading.is_writable:
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                sequence, message, answer = each
                if sequence < leading.watermark:
                    facts.acknowledge(leading, self.name, message, sequence)
                    answer("ok")
                else:
                    self._waiting.append(each)

    def find(self, frame: Open, peer: Identity) -> Following | tuple[Refusal, int, str]:
        """Whom another node may lead here."""
        leading = self.leading
        if leading is not None and not leading.is_ended:
            if frame.epoch <= leading.epoch:
                return Refusal.HIGHER_EPOCH, max(leading.epoch, frame.epoch + 1), ""
            leading.ended(frame.epoch)
            self._demote()
        if self.following is None:
            if frame.epoch < self.refused_epoch:
                return Refusal.HIGHER_EPOCH, self.refused_epoch, ""
            return Refusal.NOT_HERE, 0, "it is becoming the leader"
        if self.disk.lost_from is not None and (self._state is None or self.node.name in self._state[0].in_sync_nodes):
            return Refusal.NOT_HERE, 0, "something is lost here"
        return self.following

    def _tick(self) -> None:
        now = self.now()
        for name, link in self.links.items():
            link.tick(now)
            connection = self.dialled.get(name)
            if connection is not None and link.is_silent:
                connection.reset()
            if connection is None and self.leading is not None:
                self._dial(name)
        leading = self.leading
        self.steadiness.tick(now)
        if leading is not None:
            leading.tick(now)
            self._swap()
        elif self.world.rules.h4:
            self._tell_end()
        self.at(100 * MS, self._tick)
        self.watch()

    def _swap(self) -> None:
        leading = self.leading
        if leading is None or leading.is_ended:
            return
        wanted = leading.wanted_state()
        if wanted is None:
            return
        leading.swap_began(wanted)
        self.world.note(f"{self.name} asks for {[(each.node, each.boot_id) for each in wanted.in_sync]}")
        txn = Txn((Compare(KEY, leading.revision),), (Put(KEY, encode(wanted)),), (Get(KEY),))

        def done(result: Any) -> None:
            if result is None:
                leading.swap_ended(None)
            elif result.succeeded:
                leading.swap_ended(wanted, result.revision)
            else:
                pair = result.found[0]
                leading.swap_ended(decode(KEY, pair.value, PartitionState), pair.mod_revision)
            if leading.is_ended and self.leading is leading:
                self._demote()

        self._call(lambda keys: keys.apply(txn), done)

    # --- the disk

    def _sync_all(self) -> None:
        """The kernel writes what it has, some time."""
        self.disk.synced_end = self.disk.end
        self.disk.stale_floors.clear()
        self.at(self.world.random.randrange(S // 2, 3 * S), self._sync_all)

    def _sync_soon(self) -> None:
        end = self.disk.end

        def done() -> None:
            self.disk.synced_end = max(self.disk.synced_end, min(end, self.disk.end))
            if self.leading is not None:
                self.leading.synced(self.disk.synced_end)
            if self.following is not None:
                self.following.synced()

        self.at(self.world.random.randrange(MS, 20 * MS), done)

    def wrote(self) -> None:
        """Something was appended."""
        end = self.disk.end

        def flushed() -> None:
            self.flushed_end = max(self.flushed_end, end)

        if not self.world.rules.written_before_acknowledged:
            self.at(50 * MS, flushed)
        if self.disk.needs_sync:
            self._sync_soon()

    # --- clients

    def publish(self, message: int, answer: Callable[[str], None]) -> None:
        """Publish once."""
        leading, disk = self.leading, self.disk
        if leading is None or not leading.is_writable or not self.may_act():
            answer("refused")
            return
        sequence = disk.sequence_of.get(message)
        if sequence is not None and sequence >= disk.start:
            if not self.world.rules.h3:
                self.world.facts.acknowledge(leading, self.name, message, sequence)
                answer("ok")
                return
        else:
            sequence = disk.end
            disk.write(leading.epoch, [message])
            leading.written(disk.end)
            self.wrote()
        self._waiting.append((sequence, message, answer))
        self._waiting.sort(key=lambda each: each[0])

    def subscribe(self, channel: str, answer: Callable[[str], None]) -> None:
        """Make a channel."""
        leading, disk = self.leading, self.disk
        if leading is None or leading.watermark is None or not self.may_act() or self.now() < self._deliver_from_ns:
            answer("refused")
            return
        floor = disk.channels.get(channel)
        if floor is None:
            floor = self._changes.get(channel)
        begun = leading.watermark if floor is None else floor
        if floor is None:
            self._cursors[channel] = begun
            self._changes[channel] = begun
        number = self._write_progress()

        def done(error: Exception | None) -> None:
            if error is None and self.may_act():
                facts.channels.setdefault(channel, begun)
                answer("ok")
            else:
                answer("unknown")

        facts = self.world.facts
        if self.world.rules.h2:
            leading.when_progress_replicated(number, done)
        else:
            done(None)

    def _flush(self) -> None:
        """Consume, and write what changed."""
        leading, disk, random = self.leading, self.disk, self.world.random
        self.at(100 * MS, self._flush)
        if leading is None or leading.is_ended:
            if random.random() < 0.02:
                self._drop()
            return
        if leading.watermark is not None and self.may_act() and self.now() >= self._deliver_from_ns:
            self.world.facts.may_deliver(leading, self.name)
            for channel, cursor in self._cursors.items():
                wish = random.randrange(4) if self.world.now < self.world.trouble_ns else 50
                end = min(leading.watermark, cursor + wish)
                if end > cursor and channel in disk.channels:
                    messages = disk.ids(cursor, end)
                    if disk.is_bad(cursor, end):
                        if self.world.rules.h7:
                            self._met_damage()
                            continue
                        messages = [
                            each
                            for at in range(cursor, end)
                            if not disk.is_bad(at, at + 1)
                            for each in disk.ids(at, at + 1)
                        ]
                    self.world.facts.deliver(channel, messages, end)
                    self._cursors[channel] = self._changes[channel] = end
        if self._changes:
            self._write_progress()
        if random.random() < 0.02:
            self._drop()

    def _consume_in_order(self) -> None:
        """Deliver the next message to the one who consumes in order, and finish it, perhaps."""
        leading, disk, random = self.leading, self.disk, self.world.random
        self.at(random.randrange(10 * MS, 50 * MS), self._consume_in_order)
        if leading is None or leading.watermark is None or self._is_order_held or self.now() < self._deliver_from_ns:
            return
        if self._in_order < disk.start:  # retention went over it
            self.world.facts.dropped_end = max(self.world.facts.dropped_end, disk.start)
            self._in_order = disk.start
            self._keep_floor()
            return
        if self._in_order >= leading.watermark or not self.may_act():
            return
        self.world.facts.deliver_in_order(leading, self.name, self._in_order, disk)
        if random.random() < 0.8:
            self._in_order += 1
            self._keep_floor()

    def _keep_floor(self) -> None:
        leading, floor = self.leading, self._in_order
        assert leading is not None
        self.disk.floors[ORDER] = floor

        def done() -> None:
            if self._in_order == floor:
                self._is_order_held = False

        is_kept = leading.keep_floor(ORDER, floor, done)
        self._is_order_held = self.world.rules.h2_order and not is_kept

    def rewind(self) -> None:
        """Have the channel in order go back, as an operator says."""
        leading, disk = self.leading, self.disk
        if leading is None or leading.watermark is None or not self.may_act() or self.now() < self._deliver_from_ns:
            return
        target = self.world.random.randrange(disk.start, max(disk.start, self._in_order) + 1)
        if target >= self._in_order:
            return
        rewound = self.world.facts.rewinding(target)
        self._in_order = target
        leading.keep_floor(ORDER, 0, lambda: None)
        self._keep_floor()
        self._changes[ORDER] = target

        def done(error: Exception | None) -> None:
            if error is None and self.may_act():
                rewound()

        leading.when_progress_replicated(self._write_progress(), done)

    def _drop(self) -> None:
        """Retention: what every channel has finished may go."""
        disk = self.disk
        if disk.channels and (self.following is None or self.following.is_idle):
            disk.drop_before(min(*disk.channels.values(), disk.committed, disk.end))

    def _write_progress(self) -> int:
        """A transaction of the leader, and its records for the others; return their number."""
        leading, disk = self.leading, self.disk
        assert leading is not None
        if self._changes or not leading.progress_number:
            changes, self._changes = self._changes, {}
            change_channels(disk.channels, changes)
            disk.flush_number = leading.progress_number + 1
            position = (leading.epoch, disk.flush_number)
            self.world.facts.states[position] = dict(disk.channels)
            disk.progress = position
            leading.progress(encode_records(changes), leading.watermark or 0)
        return leading.progress_number

    # --- connections

    def _dial(self, name: str) -> None:
        world, other = self.world, self.world.nodes[name].process
        if world.is_cut(self.node.name, name) or world.is_cut(name, self.node.name):
            return
        if other is None or other.is_paused:
            return
        self.dialled[name] = connection = Connection(world, self, other)

        def connect() -> None:
            if connection.is_open:
                self.links[name].connected(other.identity(), self.now())

        self.at(2 * world.delay(), connect)

    def identity(self) -> Identity:
        return Identity("c", self.node.name, self.name, self.node.boot_id, self.disk.needs_sync, PEER_VERSION)


class Connection:
    """Bytes between two processes, in order; what meets a cut waits for its end."""

    def __init__(self, world: World, dialer: Process, acceptor: Process) -> None:
        self.world = world
        self.dialer = dialer
        self.acceptor = acceptor
        self.is_open = True
        self.follower: FollowerLink | None = FollowerLink(dialer.identity(), acceptor)
        self._arrival_ns = {dialer: 0, acceptor: 0}
        self._held: list[tuple[Process, bytes]] = []
        dialer.connections.append(self)
        acceptor.connections.append(self)

    def send(self, source: Process, data: bytes) -> None:
        if not self.is_open or not data:
            return
        target = self.acceptor if source is self.dialer else self.dialer
        world = self.world
        arrival_ns = max(self._arrival_ns[target] + 1, world.now + world.delay())
        self._arrival_ns[target] = arrival_ns
        world.at(arrival_ns - world.now, lambda: self._arrive(target, data))

    def _arrive(self, target: Process, data: bytes) -> None:
        source = self.acceptor if target is self.dialer else self.dialer
        if self.world.is_cut(source.node.name, target.node.name) or any(each is target for each, _ in self._held):
            self._held.append((target, data))
        else:
            target.do(lambda: self._take(target, data))

    def deliver_held(self) -> None:
        held, self._held = self._held, []
        for target, data in held:
            self._arrive(target, data)

    def _take(self, target: Process, data: bytes) -> None:
        if not self.is_open:
            return
        if target is self.dialer:
            link = target.links[self.acceptor.node.name]
            if link.is_connected:
                self._receive(lambda: link.receive(data, target.now()))
        elif self.follower is not None:
            follower, end = self.follower, target.disk.end
            self._receive(lambda: follower.receive(data))
            follower.take_appended()
            if target.disk.end != end:
                target.wrote()

    def _receive(self, action: Callable[[], object]) -> None:
        try:
            action()
        except PeerError as error:
            self.world.note(f"peer error: {error}")
            if self.world.rules == Rules():
                self.world.facts.fail(f"two nodes that keep all rules do not understand each other: {error}")
            self.reset()

    def reset(self) -> None:
        """It breaks, and both ends notice at once."""
        self._close()
        self.dialer.do(self._dialer_closed)
        self.acceptor.do(self._acceptor_closed)

    def died(self, process: Process, is_told: bool) -> None:
        """One end is gone; the other one notices soon, or when it is back."""
        other = self.acceptor if process is self.dialer else self.dialer
        closed = self._acceptor_closed if process is self.dialer else self._dialer_closed
        delay_ns = self.world.delay() if is_told else 4 * S
        self._close()
        other.at(delay_ns, closed)

    def _close(self) -> None:
        self.is_open = False
        for end in (self.dialer, self.acceptor):
            if self in end.connections:
                end.connections.remove(self)

    def _dialer_closed(self) -> None:
        name = self.acceptor.node.name
        if self.dialer.dialled.get(name) is self:
            del self.dialer.dialled[name]
            self.dialer.links[name].disconnected(self.dialer.now())

    def _acceptor_closed(self) -> None:
        follower, self.follower = self.follower, None
        if follower is not None:
            follower.closed()


# -- clients -----------------------------------------------------------------------------------------------------------


class Publisher:
    """Publishes one message after the other, each until it is acknowledged or nobody cares any more."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self._try_count = 0
        self._message = 0
        self._begun_ns = 0
        world.at(S // 2, self._next)

    def _next(self) -> None:
        if self.world.now > self.world.trouble_ns + LAST_PUBLISH_NS:
            return
        self._begun_ns = self.world.now
        self.world.message_count += 1
        self._message = self.world.message_count
        self._try_count = 0
        self._send()

    def _send(self) -> None:
        world, random = self.world, self.world.random
        self._try_count += 1
        attempt, message = self._try_count, self._message
        is_over = False

        def answered(answer: str) -> None:
            nonlocal is_over
            if is_over:
                return
            is_over = True
            if (message, attempt) != (self._message, self._try_count):
                return
            if answer == "ok":
                world.facts.waited(world.now - self._begun_ns)
            if answer == "ok" or (self._try_count > 8 and world.now < world.trouble_ns):
                world.at(random.randrange(10 * MS, 200 * MS), self._next)
            else:
                world.at(random.randrange(5 * MS, 150 * MS), self._send)

        leaders = [node.name for node in world.nodes.values() if node.process and node.process.leading is not None]
        name = random.choice(leaders or list(NODES)) if random.random() < 0.9 else random.choice(NODES)
        process = world.nodes[name].process

        def on_way_back(answer: str) -> None:
            world.at(world.delay(), lambda: answered(answer))

        if process is not None:
            process.at(world.delay(), lambda: process.publish(message, on_way_back))
        world.at(S, lambda: answered("timeout"))


class Subscriber:
    """Makes a channel now and then."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._count = 0
        world.at(S, self._next)

    def _next(self) -> None:
        world = self.world
        if world.now > world.trouble_ns or self._count >= 6:
            return
        name = f"channel{self._count}"

        def answered(answer: str) -> None:
            if answer == "ok" and name == f"channel{self._count}":
                self._count += 1

        for node in world.nodes.values():
            process = node.process
            if process is not None and process.leading is not None:
                process.at(world.delay(), partial(process.subscribe, name, answered))
        world.at(world.random.randrange(S // 2, 3 * S), self._next)


def play(seed: int, rules: Rules | None = None, faults: tuple[str, ...] = ()) -> World:
    """Play one seed; return the world as it is in the end.

    Raises:
        Broken: an invariant.
    """
    world = World(seed, rules, faults)
    truncation = nullcontext() if world.rules.epochs_decide_truncation else _LENGTHS
    with truncation:
        world.run()
    return world
