"""Power losses of nodes that do not sync, all at once and one after the other, under the real controller.

Three nodes have copies of one partition; logs are lists of (epoch, message). Publishing, replication, who is in sync
and catching up are a model; elections, and what nodes say before one, are the real ones (``cluster/power.py``).

Invariant (H4): whoever is elected has everything that was acknowledged and that any copy has of a node that lives.

A rule that is switched off has to be missed: ``RULES``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from random import Random
from unittest.mock import patch

import pytest
from tests.sim.loop import beginning_with, seeds
from tests.unit.cluster.models import KEYS, Master, World, node

from flintmq.cluster import power
from flintmq.cluster.state import Ending, NodeRecord, PartitionState, elected, joined, without

NAMES = ("a", "b", "c")
STEPS = 400
SEEDS_MAX = 2000


class Broken(AssertionError):
    """The invariant does not hold."""


class Copy:
    """One node's copy, and the process that has it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.log: list[tuple[int, int]] = []
        self.synced = 0
        self.starts = 0
        self.boots = 0
        self.is_up = False

    @property
    def record(self) -> NodeRecord:
        return node(self.name, incarnation=f"{self.name}{self.starts}", boot_id=f"{self.name} boot {self.boots}")

    @property
    def ending(self) -> Ending:
        epoch = self.log[-1][0] if self.log else 0
        return Ending(self.name, self.record.incarnation, epoch, len(self.log))


class Room:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.world = World()
        self.copies = {name: Copy(name) for name in NAMES}
        self.world.topic("t", replica=3)
        for copy in self.copies.values():
            self.start(copy)
        first = PartitionState(7, 9, replicas=NAMES)
        members = [copy.record.member for copy in self.copies.values()]
        self.world.partition("t", 0, elected(first, self.copies["a"].record, members))
        self.master = Master(self.world)
        self.acked: dict[int, int] = {}  # place: message
        self.count = 0
        self.elections = 0

    @property
    def state(self) -> PartitionState:
        now = self.world.state("t")
        assert now is not None
        return now

    def put(self, state: PartitionState) -> None:
        self.world.partition("t", 0, state)

    @property
    def leader(self) -> Copy | None:
        copy = self.copies.get(self.state.leader)
        return copy if copy is not None and copy.is_up and copy.record.incarnation == self.state.incarnation else None

    # --- what happens

    def start(self, copy: Copy) -> None:
        copy.is_up = True
        copy.starts += 1
        self.world.node(copy.record)

    def stop(self, copy: Copy, is_power_lost: bool) -> None:
        copy.is_up = False
        self.world.delete(KEYS.node(copy.name))
        if is_power_lost:
            copy.boots += 1
            del copy.log[self.random.randrange(copy.synced, len(copy.log) + 1) :]
        copy.synced = min(copy.synced, len(copy.log))

    def run(self) -> None:
        for _ in range(STEPS):
            getattr(self, self.random.choices(*zip(*EVENTS.items(), strict=True))[0])()

    def publish(self) -> None:
        leader = self.leader
        if leader is not None:
            self.count += 1
            leader.log.append((self.state.epoch, self.count))

    def replicate(self) -> None:
        """A follower gets some of what it lacks; what it has and the leader has not is cut off."""
        leader, copy = self.leader, self.copies[self.random.choice(NAMES)]
        if leader is None or copy is leader or not copy.is_up:
            return
        same = next((at for at, (mine, its) in enumerate(zip(copy.log, leader.log, strict=False)) if mine != its), None)
        same = min(len(copy.log), len(leader.log)) if same is None else same
        del copy.log[same:]
        copy.synced = min(copy.synced, same)
        copy.log += leader.log[same : same + self.random.randrange(4)]
        self.acknowledge(leader)

    def acknowledge(self, leader: Copy) -> None:
        members = {member.node: member for member in self.state.in_sync}
        if any(members[name] != self.copies[name].record.member for name in members):
            return  # another process than the one that is in sync
        end = min(len(self.copies[name].log) for name in members)
        if any(self.copies[name].log[:end] != leader.log[:end] for name in members):
            return
        for place in range(end):
            self.acked[place] = leader.log[place][1]

    def sync(self) -> None:
        copy = self.copies[self.random.choice(NAMES)]
        copy.synced = self.random.randrange(copy.synced, len(copy.log) + 1)

    def leave(self) -> None:
        others = [name for name in self.state.in_sync_nodes if name != self.state.leader]
        if self.leader is not None and others:
            self.put(without(self.state, [self.random.choice(others)]))

    def join(self) -> None:
        leader, copy = self.leader, self.copies[self.random.choice(NAMES)]
        if leader is not None and copy.is_up and copy is not leader:
            acked = max(self.acked, default=-1) + 1
            if len(copy.log) >= min(acked, len(leader.log)) and copy.log == leader.log[: len(copy.log)]:
                self.put(joined(self.state, copy.record.member))

    def kill(self) -> None:
        copy = self.copies[self.random.choice(NAMES)]
        if copy.is_up:
            self.stop(copy, is_power_lost=False)

    def power(self) -> None:
        """Of some of the nodes, mostly all."""
        for copy in self.copies.values():
            if self.random.random() < 0.8 and copy.is_up:
                self.stop(copy, is_power_lost=True)

    def back(self) -> None:
        copy = self.copies[self.random.choice(NAMES)]
        if not copy.is_up:
            self.start(copy)

    def say(self) -> None:
        copy = self.copies[self.random.choice(NAMES)]
        live = {name: each.record for name, each in self.copies.items() if each.is_up}
        if copy.is_up and power.asks_for_ends(self.state, live):
            said = power.told(self.state, copy.ending)
            if said is not None:
                self.put(said)

    def elect(self) -> None:
        before = self.state.epoch
        self.master.settle()
        now = self.state
        if now.epoch == before:
            return
        self.elections += 1
        leader = self.copies[now.leader]
        for place, message in list(self.acked.items()):
            if place < len(leader.log) and leader.log[place][1] == message:
                continue
            for copy in self.copies.values():
                if copy.is_up and place < len(copy.log) and copy.log[place][1] == message:
                    raise Broken(f"seed {self.seed}: H4: {leader.name} leads and lacks {message}, {copy.name} has it")
            del self.acked[place]  # no copy has it


EVENTS = {"publish": 30, "replicate": 40, "sync": 4, "leave": 3, "join": 8, "kill": 1, "power": 1, "back": 6, "say": 25,
          "elect": 15}  # fmt: skip

_best_of, _heard = power.best_of, power.heard


def _any(state: PartitionState, live: dict[str, NodeRecord]) -> Ending | None:
    """The first who is back leads."""
    said = [each for each in _heard(state, live).values() if each.node in state.in_sync_nodes]
    return said[0] if said and power.asks_for_ends(state, live) else None


def _impatient(state: PartitionState, live: dict[str, NodeRecord]) -> Ending | None:
    """Nobody is waited for who lives and has not said anything."""
    return _best_of(state, live) if power.asks_for_ends(state, live) else None


def _longest(state: PartitionState, live: dict[str, NodeRecord]) -> Ending | None:
    """The length decides, not the epoch."""
    return max(_heard(state, live).values(), key=lambda each: each.end, default=None)


def _anybody_said(state: PartitionState, live: dict[str, NodeRecord]) -> dict[str, Ending]:
    """It counts what a process of before said."""
    return {each.node: each for each in state.ends if each.node in live}


_CONTROLLER = "flintmq.cluster.controller.who_has_most"
RULES: dict[str, tuple[Callable[[], AbstractContextManager[object]], int]] = {
    "ask before one leads": (lambda: patch(_CONTROLLER, _any), 3),
    "wait for who lives": (lambda: patch(_CONTROLLER, _impatient), 3),
    "epochs go before lengths": (lambda: patch.object(power, "best_of", _longest), 32),
    "a process says what it has": (lambda: patch.object(power, "heard", _anybody_said), 133),
}


def play(seed: int, rule: str = "") -> Room:
    """Play one seed, without a rule.

    Raises:
        Broken: the invariant.
    """
    room = Room(seed)
    with RULES[rule][0]() if rule else nullcontext():
        room.run()
    return room


def test_what_a_copy_has_is_not_lost_whoever_loses_power():
    lossy = elections = 0
    for seed in seeds(150):
        room = play(seed)
        elections += room.elections
        lossy += room.state.lossy_epoch > 0
    assert elections > 150 and lossy > 50


def missed(rule: str, candidates: Iterator[int]) -> int | None:
    """The first seed in which the invariant breaks because a rule is missing."""
    for seed in candidates:
        try:
            play(seed, rule)
        except Broken:
            return seed
    return None


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_nobody_keeps_is_missed(rule):
    assert missed(rule, beginning_with(RULES[rule][1], range(SEEDS_MAX))) is not None
