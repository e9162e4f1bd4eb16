"""When a message was stored, by a wall clock that was set meanwhile."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from flintmq.broker.clock_steps import STEP_MIN_NS, STEPS_MAX, ClockSteps

SECOND = 1_000_000_000


class World:
    """A wall clock that is set, and what it showed; told at once, as by an nsqd."""

    def __init__(self) -> None:
        self.steps = ClockSteps()
        self.now_ns = 1_000_000 * SECOND
        self.shift_ns = 0
        self.stored: list[tuple[int, int]] = []  # wall time and due clock

    def pass_time(self, duration_ns: int) -> None:
        self.now_ns += duration_ns

    def set_clock(self, by_ns: int) -> None:
        self.shift_ns += by_ns
        self.steps.moved(self.shift_ns, self.now_ns)

    def store(self) -> None:
        self.stored.append((self.now_ns + self.shift_ns, self.now_ns))


def test_a_clock_that_is_never_set():
    assert ClockSteps().stored_ns(5 * SECOND) == 5 * SECOND


def test_a_step_forward_is_counted_for_what_comes_behind_it():
    world = World()
    for by_s in (0, 7200, 86_400):
        world.set_clock(by_s * SECOND)
        world.pass_time(SECOND)
        world.store()
        world.pass_time(SECOND)
    assert [world.steps.stored_ns(wall_ns) for wall_ns, _ in world.stored] == [at_ns for _, at_ns in world.stored]


def test_a_time_that_is_shown_twice_is_the_later():
    world = World()
    world.store()
    world.pass_time(10 * SECOND)
    world.set_clock(-60 * SECOND)
    world.pass_time(50 * SECOND)
    ((wall_ns, at_ns),) = world.stored
    assert world.steps.stored_ns(wall_ns) == at_ns + 60 * SECOND == world.now_ns


def test_a_time_that_was_never_shown_is_that_of_the_step_over_it():
    world = World()
    world.set_clock(3600 * SECOND)
    assert world.steps.stored_ns(world.now_ns + 1800 * SECOND) == world.now_ns


def test_a_clock_that_is_slowed_is_one_step():
    world = World()
    world.set_clock(3600 * SECOND)
    world.store()
    for _ in range(10 * STEPS_MAX):
        world.pass_time(100 * SECOND)
        world.set_clock(50_000_000)
    ((wall_ns, at_ns),) = world.stored
    assert abs(world.steps.stored_ns(wall_ns) - at_ns) <= 10 * STEPS_MAX * 50_000_000


@example([(0, -7 * SECOND), (0, 7 * SECOND + STEP_MIN_NS - 1)])  # a step that another one takes back but for a little
@given(st.lists(st.tuples(st.integers(0, 10**13), st.integers(-(10**13), 10**13)), max_size=STEPS_MAX))
def test_nothing_is_older_than_it_is(moves: list[tuple[int, int]]):
    world = World()
    for duration_ns, by_ns in moves:
        world.store()
        world.pass_time(duration_ns)
        world.store()
        if abs(by_ns) >= SECOND:
            world.set_clock(by_ns)
            world.store()
    most_ns = sum(abs(by_ns) for _, by_ns in moves)
    for wall_ns, at_ns in world.stored:
        assert at_ns <= world.steps.stored_ns(wall_ns) <= at_ns + most_ns
