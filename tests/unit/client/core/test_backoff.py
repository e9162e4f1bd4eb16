"""The waiting times: of a consumer after failures, between attempts to connect, of requeued messages."""

from __future__ import annotations

import pytest

from flintmq.client.core.backoff import Backoff, BackoffState, ReconnectDelay, jittered_s, requeue_delay_s


def fail_through(backoff: Backoff, count: int) -> list[float | None]:
    """Fail every probe."""
    waits = []
    for _ in range(count):
        waits.append(backoff.failure())
        backoff.elapsed()
    return waits


def test_waiting_times_double_up_to_the_maximum():
    assert fail_through(Backoff(1.0, 10.0), 6) == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_limits_in_each_state():
    backoff = Backoff(1.0, 10.0)
    limits = [(backoff.state, backoff.limit)]
    backoff.failure()
    limits.append((backoff.state, backoff.limit))
    backoff.elapsed()
    limits.append((backoff.state, backoff.limit))
    assert limits == [(BackoffState.NORMAL, None), (BackoffState.WAITING, 0), (BackoffState.PROBING, 1)]


def test_one_result_counts_per_waiting_time():
    backoff = Backoff(1.0, 10.0)
    assert backoff.failure() == 1.0
    assert backoff.failure() is None
    assert backoff.success() is None
    assert backoff.level == 1


def test_successful_probes_lead_back_step_by_step():
    backoff = Backoff(1.0, 10.0)
    fail_through(backoff, 3)
    assert backoff.success() == 2.0
    backoff.elapsed()
    assert backoff.success() == 1.0
    backoff.elapsed()
    assert backoff.success() is None
    assert backoff.state is BackoffState.NORMAL
    assert backoff.describe() == "normal level=0"


def test_success_without_a_failure_changes_nothing():
    backoff = Backoff(1.0, 10.0)
    assert backoff.success() is None
    backoff.elapsed()
    assert backoff.state is BackoffState.NORMAL


def test_the_level_does_not_grow_beyond_the_maximum():
    backoff = Backoff(1.0, 4.0)
    fail_through(backoff, 100)
    assert backoff.level == 3, "or the way back would take a hundred probes"


def test_off():
    backoff = Backoff(1.0, 0.0)
    assert backoff.failure() is None
    assert backoff.limit is None


# --- reconnecting ---


def test_the_first_attempt_comes_within_a_second_and_the_later_ones_less_and_less_often():
    delay = ReconnectDelay()
    delays = [delay.next_s(1.0) for _ in range(10)]
    assert delays[0] <= 1.0
    assert delays == sorted(delays)
    assert delays[1] == 2 * delays[0]
    assert delays[-1] == delays[-2] == 15.0


def test_jitter_is_at_most_half():
    assert ReconnectDelay(base_s=1.0).next_s(0.0) == 0.5
    assert ReconnectDelay(base_s=1.0).next_s(1.0) == 1.0


def test_only_a_connection_that_held_clears_the_failures():
    delay = ReconnectDelay(base_s=0.25, settled_s=5.0)
    for _ in range(4):
        delay.next_s(1.0)
    assert delay.next_s(1.0, lived_s=4.9) == 4.0, "accepted and dropped again: not a working nsqd"
    assert delay.next_s(1.0, lived_s=5.0) == 0.25


def test_a_thousand_failures_do_not_overflow():
    delay = ReconnectDelay()
    assert [delay.next_s(0.5) for _ in range(1000)][-1] == pytest.approx(11.25)


# --- spreading and requeueing ---


@pytest.mark.parametrize(("chance", "expected"), [(0.0, 42.0), (0.5, 60.0), (1.0, 78.0)])
def test_jitter(chance, expected):
    assert jittered_s(60.0, 0.3, chance) == pytest.approx(expected)


@pytest.mark.parametrize(("attempts", "expected"), [(0, 90.0), (1, 90.0), (3, 270.0), (65535, 900.0)])
def test_requeue_delay_grows_with_attempts(attempts, expected):
    assert requeue_delay_s(attempts, 90.0, 900.0) == expected
