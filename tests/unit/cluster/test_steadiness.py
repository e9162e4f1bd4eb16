"""Nodes that fall out of in-sync sets again and again, and for how long they are watched before they are in again."""

import pytest

from flintmq.cluster import steadiness as steadiness_module
from flintmq.cluster.state import LAG_NS_MAX
from flintmq.cluster.steadiness import FORGOTTEN_NS, STEADY_NS_MAX, STEADY_NS_MIN, Steadiness

S = 1_000_000_000


class Flapping:
    def __init__(self):
        self.steadiness = Steadiness()
        self.now_ns = 1000 * S

    def fall(self, after_ns=10 * S, node="b"):
        """A node joins and falls out again; return how long it has to be steady then."""
        self.steadiness.joined(node)
        self.now_ns += after_ns
        self.steadiness.tick(self.now_ns)
        self.steadiness.fell(node)
        return self.steadiness.wait_ns(node)


def test_the_first_time_costs_nothing_and_each_further_one_twice_as_much_up_to_a_bound():
    flapping = Flapping()
    assert flapping.steadiness.wait_ns("b") == 0
    waits = [flapping.fall() // S for _ in range(8)]
    assert waits == [0, 5, 10, 20, 40, 60, 60, 60]
    assert STEADY_NS_MIN == 5 * S and STEADY_NS_MAX == 60 * S
    assert flapping.steadiness.wait_ns("c") == 0


def test_it_stays_bounded_however_often():
    flapping = Flapping()
    assert max(flapping.fall() for _ in range(500)) == STEADY_NS_MAX


def test_what_a_node_leaves_together_is_once():
    flapping = Flapping()
    flapping.fall()
    for _ in range(100):  # partitions, of which it is taken out one after the other
        flapping.now_ns += S
        flapping.steadiness.tick(flapping.now_ns)
        flapping.steadiness.fell("b")
    assert flapping.steadiness.count("b") == 1


def test_it_is_once_where_a_node_joins_and_leaves_at_the_same_time():
    flapping = Flapping()
    flapping.fall()
    assert flapping.fall(after_ns=LAG_NS_MAX - 1) == 0 and flapping.steadiness.count("b") == 1
    assert flapping.fall(after_ns=1) == STEADY_NS_MIN


@pytest.mark.parametrize("count", [1, 7])
def test_it_is_forgotten_after_a_while(count):
    flapping = Flapping()
    for _ in range(count):
        wait_ns = flapping.fall()
    last_ns = flapping.now_ns
    flapping.steadiness.tick(last_ns + FORGOTTEN_NS - 1)
    assert flapping.steadiness.wait_ns("b") == wait_ns and flapping.steadiness.count("b") == count
    flapping.steadiness.tick(last_ns + FORGOTTEN_NS)
    assert flapping.steadiness.count("b") == 0
    assert flapping.fall(FORGOTTEN_NS) == 0


def test_publishers_wait_for_a_small_part_of_the_time():
    """Whoever joins as soon as it may, and stops at once."""
    flapping = Flapping()
    held_ns = 0
    began_ns = flapping.now_ns
    wait_ns = 0
    while flapping.now_ns - began_ns < 3600 * S:
        held_ns += LAG_NS_MAX
        wait_ns = flapping.fall(after_ns=wait_ns + LAG_NS_MAX)
    assert held_ns < 3600 * S // 15
    assert steadiness_module.FORGOTTEN_NS > 2 * STEADY_NS_MAX, "else the longest wait would be forgotten meanwhile"
