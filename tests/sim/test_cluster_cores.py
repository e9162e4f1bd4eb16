"""Leaders, followers and links of a cluster under faults, and the rules without which something is lost.

More of it: ``python -m tests.sim.test_cluster_cores FIRST END [rule]`` plays seeds and counts what it finds.
"""

import re
import sys
import time
from collections import Counter

import pytest
from tests.sim.cluster_world import FAULTS, LOSING, Broken, Rules, World, play
from tests.sim.loop import beginning_with, seeds, share

SEEDS_MAX = 2000
"""Within so many each rule has to be missed."""
INVARIANT = re.compile(r"seed \d+ at [0-9.]+ s: ([IH]\d+):")

REWINDING = ("rewind", "rewind", "kill")

MISSING = [  # rule, what goes wrong so that it shows, the seed that showed it first as the code stands
    ("new_incarnation_is_dead", ("power", "kill", "stumble"), 3),
    ("written_before_acknowledged", FAULTS, 2),
    ("epochs_decide_truncation", FAULTS, 1),
    ("followers_refuse_lower_epochs", ("estrange", "reset"), 0),
    ("shrink_before_watermark", FAULTS, 21),
    ("steady_before_in_sync", ("flap",), 0),
    ("fencing", FAULTS, 3),
    ("stops_before_it_gives_up", ("strand",), 2),
    ("h1", ("isolate", "stumble", "stumble", "cut", "kill"), 48),
    ("h2", FAULTS, 23),
    ("h2_order", ("kill", "cut", "isolate"), 1),
    ("h3", FAULTS, 3),
    ("h4", FAULTS, 0),
    ("h4_order", ("dark", "kill", "isolate"), 116),
    ("h4_back", REWINDING, 22),
    ("h5", FAULTS, 2),
    ("h7", LOSING, 17),
]


def test_nothing_is_lost_whatever_happens():
    acked = excused = 0
    played = list(seeds(share(200)))
    for seed in played:
        world = play(seed)
        acked += world.facts.acked_count
        excused += world.is_excused
    assert acked > 100 * len(played) and excused <= 1 + len(played) // 20


@pytest.mark.parametrize(
    "faults", [("strand", "kill"), ("estrange", "reset"), ("pause", "isolate", "store"), ("power", "stumble", "reset")]
)
def test_nothing_is_lost_when_the_same_happens_again_and_again(faults):
    for seed in seeds(share(25)):
        play(seed, faults=faults)


def test_a_node_that_stops_again_and_again_holds_publishers_a_few_times():
    for seed in seeds(10):
        play(seed, faults=("flap",))


def test_what_an_operator_has_delivered_again_is_delivered_whoever_leads():
    for seed in seeds(25):
        play(seed, faults=REWINDING)


def test_who_has_most_leads_when_all_lost_their_power():
    """H4: what no copy has is gone, and nothing that one of them has."""
    assert sum(play(seed, faults=("dark", "kill", "isolate")).facts.lossy_count for seed in seeds(25)) > 5


def test_what_a_copy_lost_comes_from_another_one():
    played = list(seeds(25))
    assert sum(play(seed, faults=LOSING).is_excused for seed in played) <= 1 + len(played) // 10


@pytest.mark.parametrize(("rule", "faults", "found_by"), MISSING, ids=[rule for rule, _, _ in MISSING])
def test_a_rule_that_nobody_keeps_is_missed(rule, faults, found_by):
    assert missed(rule, faults, beginning_with(found_by, range(SEEDS_MAX))) is not None


def missed(rule, faults, candidates):
    """The first seed in which an invariant breaks because a rule is missing, and which."""
    for seed in candidates:
        try:
            play(seed, Rules.without(rule), faults)
        except Broken as error:
            found = INVARIANT.match(str(error))
            if found is not None:
                return seed, found[1]
    return None


def test_every_rule_is_tried():
    assert {rule for rule, _, _ in MISSING} == set(Rules.__dataclass_fields__)


def test_the_same_seed_is_the_same_run():
    stories = []
    for _ in range(2):
        world = World(7)
        world.run()
        stories.append((world.story(), world.facts.acked, world.facts.states))
    assert stories[0] == stories[1] and len(stories[0][0]) > 500


def main(first: int, end: int, rule: str = "") -> None:
    """Play seeds and print what they found."""
    faults = {name: kinds for name, kinds, _ in MISSING}.get(rule, FAULTS)
    found: Counter[str] = Counter()
    acked, excused, began_s = 0, 0, time.process_time()
    for seed in range(first, end):
        try:
            world = play(seed, Rules.without(rule) if rule else None, faults)
            acked += world.facts.acked_count
            excused += world.is_excused
        except Broken as error:
            text = str(error) if not rule else str(error).splitlines()[0]
            print(text, flush=True)
            invariant = INVARIANT.match(text)
            found[invariant[1] if invariant else "end"] += 1
    spent_s = time.process_time() - began_s
    print(
        f"{end - first} seeds, {spent_s:.1f} s of CPU, {acked} acknowledged, {excused} given up, broken: {dict(found)}"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
