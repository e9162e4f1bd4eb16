"""Whole clusters in the simulation: whatever fails, one node delivers, nothing is lost, and all becomes well."""

from __future__ import annotations

import asyncio
import datetime
from typing import Any
from unittest.mock import patch

import pytest
from tests.sim import agents_world
from tests.sim.agents_world import STRANDED_S, World, play
from tests.sim.loop import beginning_with, seeds, share

from flintmq.cluster.leading import Leading
from flintmq.cluster.link import LeaderLink
from flintmq.cluster.state import PartitionState
from flintmq.cluster.store import KeyValue
from flintmq.nsqd.cluster import peers
from flintmq.nsqd.cluster.lease import Lease
from flintmq.nsqd.cluster.led import Led
from flintmq.nsqd.cluster.peers import Peers
from flintmq.nsqd.cluster.swaps import Swaps

SEED_COUNT = 20
"""Some 20 s of CPU; others every day."""
HANDED_OVER_S = 4.6
"""Of virtual time: until others lead what a node cannot replicate any more, and who publishes has found them."""
SPREAD_SEED = 0
SEEDS_MAX = 200
"""Within so many a planted bug has to be found."""
_FIRST = SEED_COUNT * (datetime.datetime.now(datetime.UTC).date().toordinal() % 1000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(share(SEED_COUNT), _FIRST))
def test_one_node_delivers_and_all_becomes_well(seed: int) -> None:
    play(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(3, 5))
def test_a_node_that_ends_hands_over_first(seed: int) -> None:
    """Nobody who publishes to it is left without an answer, or waits for more than a second.

    What another node hands on to it in the moment in which it ends may be unknown: that node has not heard of it yet.
    """
    world, _ = play(seed, ("stop",))
    assert not [each for each in world.unknown if b" was handed on," not in each[-1]]
    assert max((seconds for seconds, _ in world.outages), default=0.0) < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(3, 6))
def test_publishing_goes_on_where_a_leader_reaches_the_store_and_no_other_node(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Also at the other nodes, which hand on: what they have sent to that leader they give up when it is silent."""
    strand = World._strand

    async def strand_when_publishing_goes_on(self: World, name: str = "") -> None:
        now = asyncio.get_running_loop().time()
        while self._answered_until < now:  # else two of them, a moment apart, are one that takes longer
            await asyncio.sleep(0.1)
        await strand(self, name)

    monkeypatch.setattr(World, "_strand", strand_when_publishing_goes_on)
    world, _ = play(seed, ("strand",))
    assert max((seconds for seconds, _ in world.outages), default=0.0) < HANDED_OVER_S


@pytest.mark.slow
def test_who_is_cut_off_hands_over_as_soon_when_it_was_elected_meanwhile() -> None:
    """The master gives partitions to a node that leads nothing, after that was cut off and before anybody noticed."""
    world, _ = play(SPREAD_SEED, ("spread",), 3)
    assert max(seeker.longest_s for seeker in world.seekers) < HANDED_OVER_S


@pytest.mark.parametrize("seed", (1, 2))
def test_others_lead_who_stood_still_when_their_leader_was_cut_off(seed: int) -> None:
    """They are no longer among the living when it is known that the leader reaches nobody, and are again soon after."""
    world, _ = play(seed, ("strand and stop",), 1)
    assert max(seconds for seconds, _ in world.outages) < STRANDED_S - 8.0


def test_two_nodes_at_rest_stay_in_sync_after_an_election() -> None:
    """Where what is committed was not known at the first tick, nothing more was asked of a follower."""
    play(19, ("stop",))


def test_the_same_seed_is_the_same_run() -> None:
    assert play(4, ("kill",))[1] == play(4, ("kill",))[1]


# -- what has to be found ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_silence_that_is_counted_anew_by_each_leader_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(LeaderLink):
        def __init__(self, *args: Any, heard_ns: int | None, **more: Any) -> None:
            super().__init__(*args, **more)

    monkeypatch.setattr(peers, "LeaderLink", Forgetful)
    monkeypatch.setattr(Peers, "keep_in_touch", lambda *_: None)
    world, _ = play(SPREAD_SEED, ("spread",), 3)
    assert max(seeker.longest_s for seeker in world.seekers) > HANDED_OVER_S


WHOLE_S = 12.0
"""Of virtual time: long enough for these seeds, where nothing is broken, as the first test below shows."""


def broken(found_by: int, *faults: str, partition_count: int = 0) -> str:
    """Play seeds until something does not hold, beginning with the one that showed it; return what."""
    with patch.object(agents_world, "WHOLE_S_MAX", WHOLE_S):
        for seed in beginning_with(found_by, range(SEEDS_MAX)):
            try:
                play(seed, faults, partition_count)
            except AssertionError as error:
                return str(error)
    return ""


@pytest.mark.slow
def test_nothing_is_found_where_nothing_is_broken() -> None:
    with patch.object(agents_world, "WHOLE_S_MAX", WHOLE_S):
        play(2, ("kill",))
        play(0, ("power", "kill"))


def test_a_leader_that_does_not_look_at_its_lease_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lease, "is_held", property(lambda self: True))
    assert "is delivered by" in broken(3, "isolate")


def test_a_change_that_is_compared_with_what_was_heard_of_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The revision is taken when the change is written, and not with the state that it was made from."""
    write_one = Swaps._write_one

    async def write(self: Swaps, led: Led, before: KeyValue, state: PartitionState, is_doubtful: bool) -> float:
        return await write_one(self, led, led.pair, state, is_doubtful)

    monkeypatch.setattr(Swaps, "_write_one", write)
    assert "went back" in broken(48, "return", partition_count=6)


def test_a_change_of_members_that_is_stuck_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def swap_ended(leading: Leading, state: PartitionState | None, revision: int = 0) -> None:
        if state is not None:
            leading.state_changed(state, revision)

    monkeypatch.setattr(Leading, "swap_ended", swap_ended)
    assert "not whole" in broken(2, "kill")


def test_a_wake_up_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a node that is gone is not told that it is back."""
    monkeypatch.setattr(Peers, "nodes_changed", lambda peers: None)
    assert "not whole" in broken(0, "power", "kill")
