"""The RDY policy: its rules one by one, and its invariants under random histories."""

from __future__ import annotations

import random
from typing import Any

import pytest

from flintmq.client.core.rdy import PROMPT_S, SETTLE_S, RdyPolicy, Share

NOW = 100.0


def policy_of(max_in_flight: int, *rdy_maxima: int, started: bool = True, **options: Any) -> RdyPolicy:
    policy = RdyPolicy(max_in_flight, **options)
    for number, rdy_max in enumerate(rdy_maxima):
        policy.shares.append(Share(f"n{number}", rdy_max, is_started=started))
    return policy


def plan(policy: RdyPolicy, now: float = NOW) -> dict[str, int]:
    return {share.name: count for share, count in policy.plan(now, policy.shares)}


def levels(policy: RdyPolicy) -> list[int]:
    return [share.rdy_count for share in policy.shares]


# --- distribution ---


def test_a_new_connection_starts_at_one_and_gets_its_share_with_its_first_message():
    policy = policy_of(100, 2500, started=False)
    assert plan(policy) == {"n0": 1}
    policy.shares[0].received(1, NOW)
    assert plan(policy) == {"n0": 100}


@pytest.mark.parametrize(
    ("max_in_flight", "rdy_maxima", "expected"),
    [
        (100, (2500,), [100]),
        (100, (2500, 2500), [50, 50]),
        (10, (2500, 2500, 2500), [3, 3, 4]),
        (5000, (2500,), [2500]),
        (100, (10, 2500), [10, 90]),
        (3, (2500, 2500, 2500), [1, 1, 1]),
    ],
)
def test_even_distribution_within_each_maximum(max_in_flight, rdy_maxima, expected):
    policy = policy_of(max_in_flight, *rdy_maxima)
    plan(policy)
    assert levels(policy) == expected


def test_nothing_to_send_when_nothing_changes():
    policy = policy_of(100, 2500, 2500)
    assert plan(policy)
    assert plan(policy) == {}


def test_a_connection_that_joins_waits_until_the_others_have_let_go():
    policy = policy_of(100, 2500)
    plan(policy)
    policy.shares[0].received(100, NOW)
    policy.shares.append(Share("new", is_started=True))
    assert plan(policy) == {"n0": 50}
    assert policy.is_short
    assert policy.next_at(NOW) == NOW + SETTLE_S
    later = NOW + SETTLE_S
    assert plan(policy, later) == {}, "all 100 are still in flight"
    policy.shares[0].settled(30)
    assert plan(policy, later) == {"new": 30}
    policy.shares[0].settled(20)
    assert plan(policy, later) == {"new": 50}
    assert not policy.is_short


def test_messages_that_the_application_forgot_hold_nothing_back_for_ever():
    policy = policy_of(100, 2500)
    plan(policy)
    policy.shares[0].received(100, NOW)
    policy.shares.append(Share("new", is_started=True))
    plan(policy)
    wake = policy.next_at(NOW + SETTLE_S)
    assert wake == NOW + policy.shares[0].msg_timeout_s
    assert plan(policy, wake) == {"new": 50}


def test_orphans_count_against_the_budget():
    policy = policy_of(10, 2500)
    policy.orphan_count = 4
    assert plan(policy) == {"n0": 6}
    policy.orphan_count = 10
    assert plan(policy) == {"n0": 0}
    policy.orphan_count = 12
    assert plan(policy) == {}


def test_changing_max_in_flight():
    policy = policy_of(10, 2500, 2500)
    plan(policy)
    policy.max_in_flight = 100
    assert plan(policy) == {"n0": 50, "n1": 50}
    policy.max_in_flight = 4
    assert plan(policy) == {"n0": 2, "n1": 2}


def test_a_level_below_its_target_is_raised_in_doublings():
    policy = policy_of(100, 2500)
    plan(policy)
    policy.shares[0].received(100, NOW)
    policy.shares.append(Share("new", is_started=True))
    later = NOW + SETTLE_S
    plan(policy)
    sent: list[int] = []
    for _ in range(50):
        policy.shares[0].settled(1)
        sent += plan(policy, later).values()
    assert sent == [1, 2, 4, 8, 16, 32, 50]


# --- stop, probe, rotation ---


def test_stop_and_probe():
    policy = policy_of(100, 2500, 2500)
    plan(policy)
    policy.limit = 0
    assert plan(policy) == {"n0": 0, "n1": 0}
    policy.limit = 1
    later = NOW + SETTLE_S
    assert plan(policy, later) == {"n0": 1}
    policy.limit = None
    assert plan(policy, later) == {"n0": 50, "n1": 50}


def test_fewer_permits_than_connections():
    policy = policy_of(2, 2500, 2500, 2500)
    plan(policy)
    assert sorted(levels(policy)) == [0, 1, 1]


def test_an_idle_permit_moves_on():
    policy = policy_of(1, 2500, 2500, idle_timeout_s=10.0)
    assert plan(policy) == {"n0": 1}
    assert policy.next_at(NOW) == NOW + 10.0
    assert plan(policy, NOW + 9.9) == {}
    assert plan(policy, NOW + 10.0) == {"n0": 0}
    assert plan(policy, NOW + 10.0 + SETTLE_S) == {"n1": 1}


def test_a_busy_permit_moves_on_after_its_tenure():
    policy = policy_of(1, 2500, 2500, idle_timeout_s=10.0, tenure_s=30.0)
    plan(policy)
    for second in range(1, 30):
        policy.shares[0].received(1, NOW + second)
        policy.shares[0].settled(1)
        assert plan(policy, NOW + second) == {}
    assert plan(policy, NOW + 30.0) == {"n0": 0}
    assert plan(policy, NOW + 30.0 + SETTLE_S) == {"n1": 1}


def test_the_only_candidate_keeps_an_expired_permit():
    policy = policy_of(1, 2500, 0, idle_timeout_s=10.0)
    policy.shares[1].max_rdy_count = 0
    plan(policy)
    levels_before = levels(policy)
    plan(policy, NOW + 11.0)
    assert sum(levels(policy)) <= sum(levels_before) == 1


# --- refresh and starvation ---


@pytest.mark.parametrize(("received", "expected"), [(0, False), (74, False), (75, True), (100, True)])
def test_the_25_percent_rule(received, expected):
    policy = policy_of(100, 2500)
    plan(policy)
    policy.shares[0].received(received, NOW)
    assert policy.shares[0].needs_refresh() is expected


def test_a_level_of_zero_is_not_refreshed():
    assert not Share("n").needs_refresh()


@pytest.mark.parametrize(("in_flight", "expected"), [(0, False), (84, False), (85, True), (100, True)])
def test_is_starved(in_flight, expected):
    policy = policy_of(100, 2500)
    plan(policy)
    policy.shares[0].received(in_flight, NOW)
    assert policy.is_starved() is expected


def test_answers_on_their_way_do_not_starve():
    share = Share("n", rdy_count=10, in_flight=10)
    assert share.is_starved()
    assert not share.is_starved(unsent_answers=10)


def test_more_is_expected_of_an_nsqd_that_could_not_deliver_before_and_as_long_as_it_does():
    share = Share("n")
    share.sent(10, NOW)
    assert share.prompt_until == NOW + PROMPT_S
    share.received(4, NOW + 10)
    assert share.prompt_until == NOW + PROMPT_S, "it had nothing"
    share.settled(4, NOW + 11)
    assert share.prompt_until == NOW + PROMPT_S, "it could deliver all the time"
    share.received(10, NOW + 12)
    assert share.is_full() and not share.is_full(unsent_answers=1)
    share.settled(10, NOW + 13)
    assert share.prompt_until == NOW + 13 + PROMPT_S
    later = NOW + 13 + PROMPT_S / 2
    share.received(3, later)
    assert share.prompt_until == later + PROMPT_S


# --- invariants ---


@pytest.mark.parametrize("seed", range(200))
def test_never_more_than_max_in_flight(seed):
    """A model of nsqd delivers whatever the levels it has heard of allow; a level takes up to SETTLE_S to arrive."""
    rng = random.Random(seed)
    max_in_flight = rng.choice([1, 2, 3, 7, 50, 1000])
    policy = RdyPolicy(max_in_flight, idle_timeout_s=rng.uniform(0.3, 5.0), tenure_s=rng.uniform(1.0, 10.0))
    heard: dict[str, int] = {}
    under_way: list[tuple[float, Share, int]] = []
    now = NOW
    for step in range(300):
        now += rng.choice([0.0, 0.001, 0.05, 0.3, 2.0])
        for item in [item for item in under_way if item[0] <= now]:
            under_way.remove(item)
            heard[item[1].name] = item[2]
        for share in policy.shares:  # nsqd delivers what it may
            room = heard.get(share.name, 0) - share.in_flight
            if room > 0 and rng.random() < 0.7:
                share.received(rng.randint(1, room), now)
        total = sum(share.in_flight for share in policy.shares) + policy.orphan_count
        assert total <= max_in_flight, policy.describe()
        action = rng.random()
        if action < 0.15 and len(policy.shares) < 6:
            policy.shares.append(Share(f"n{step}", rng.choice([1, 5, 2500]), msg_timeout_s=1e9))
        elif action < 0.25 and policy.shares:
            share = policy.shares.pop(rng.randrange(len(policy.shares)))
            policy.orphan_count += share.in_flight
            under_way = [item for item in under_way if item[1] is not share]
        elif action < 0.35:
            policy.limit = rng.choice([None, 0, 1])
        elif action < 0.5:
            policy.orphan_count = rng.randint(0, policy.orphan_count)
        for share in policy.shares:
            if share.in_flight and rng.random() < 0.5:
                share.settled(rng.randint(1, share.in_flight))
        order = policy.shares.copy()
        rng.shuffle(order)
        for share, count in policy.plan(now, order):
            assert 0 <= count <= share.max_rdy_count
            earlier = [item[0] for item in under_way if item[1] is share]
            under_way.append((max([now + rng.uniform(0, SETTLE_S * 0.9), *earlier]), share, count))


@pytest.mark.parametrize("seed", range(50))
def test_time_passes_between_two_plans(seed):
    """Whatever the clock's fractions are: what is due at a time is done by the plan of that time."""
    rng = random.Random(seed)
    policy = policy_of(3, *[2500] * 5, idle_timeout_s=rng.uniform(0.1, 3), tenure_s=rng.uniform(0.1, 9))
    now = rng.uniform(0, 1e6)
    for share in policy.shares:
        share.msg_timeout_s = rng.uniform(0.3, 60)
    plan(policy, now)
    for share in policy.shares:
        share.received(share.rdy_count, now)
    for _ in range(200):
        wake = policy.next_at(now)
        assert wake is not None
        assert wake > now, policy.describe()
        now = wake
        plan(policy, now)


def test_everybody_gets_a_share_in_the_end():
    rng = random.Random(1)
    policy = policy_of(20, 2500, 2500, 2500)
    now = NOW
    for _ in range(100):
        now += 0.1
        for share in policy.shares:
            if share.rdy_count > share.in_flight:
                share.received(share.rdy_count - share.in_flight, now)
            share.settled(rng.randint(0, share.in_flight))
        plan(policy, now)
    assert levels(policy) == [6, 7, 7]
    assert "max_in_flight=20" in policy.describe()


def test_what_is_paused_gets_nothing_and_counts_for_nothing():
    policy = RdyPolicy(10)
    shares = [Share(name, is_started=True) for name in "abc"]
    policy.shares.extend(shares)
    policy.plan(0.0, shares)
    assert sorted(share.rdy_count for share in shares) == [3, 3, 4]
    shares[0].is_paused = True
    policy.plan(1.0, shares)
    assert shares[0].rdy_count == 0
    policy.plan(2.0, shares)
    assert [share.rdy_count for share in shares] == [0, 5, 5]
    shares[0].is_paused = False
    policy.plan(3.0, shares)
    policy.plan(4.0, shares)
    assert sorted(share.rdy_count for share in shares) == [3, 3, 4]


def test_who_waits_longest_is_raised_first():
    """Levels that were lowered stay reserved for a moment; what is free meanwhile must not go round in a circle."""
    policy = RdyPolicy(3, idle_timeout_s=0.2, tenure_s=0.5)
    shares = [Share(name, is_started=True) for name in "abcde"]
    policy.shares.extend(shares)
    had: set[str] = set()
    now = 0.0
    for _ in range(60):
        policy.plan(now, shares)
        had.update(share.name for share in shares if share.rdy_count)
        now = max(now + 0.01, policy.next_at(now) or 0.0)
    assert had == set("abcde")
