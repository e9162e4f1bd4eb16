"""What waits for its FIN: finished when it is safe, touched meanwhile, and known when it comes a second time."""

from __future__ import annotations

from tests.unit.spool.links import FakeLink, ids

from flintmq.spool.held import Held


def add(held: Held, link: FakeLink, first: int, end: int, now: float = 0.0) -> None:
    held.see(link)
    held.add(end, link, list(range(first, end)), ids(first, end), now)


def test_what_is_safe_is_finished_and_nothing_else():
    held, link = Held(100), FakeLink()
    add(held, link, 1, 11)
    add(held, link, 11, 21)
    assert held.finish_below(20) == 10
    assert link.finished == ids(1, 11) and held.count == 10
    assert held.finish_below(21) == 10
    assert link.finished == ids(1, 21) and held.count == 0


def test_nothing_is_finished_on_a_lost_link():
    held, link = Held(100), FakeLink()
    add(held, link, 1, 11)
    link.is_lost = True
    assert held.finish_below(11) == 10
    assert link.finished == [] and held.count == 0


def test_what_waits_is_touched_when_half_of_its_time_is_over():
    held, link = Held(100), FakeLink()
    add(held, link, 1, 3, now=0.0)
    add(held, link, 3, 5, now=20.0)
    assert held.touch_due(29.0) == 0
    assert held.touch_due(30.0) == 2 and link.touched == ids(1, 3)
    assert held.touch_due(31.0) == 0, "it has just been"
    assert held.touch_due(60.0) == 4, "both again"
    held.finish_below(5)
    assert link.finished == ids(1, 5)


def test_what_waits_longer_than_nsqd_allows_is_counted_once_and_touched_no_more():
    held, link = Held(100), FakeLink()
    add(held, link, 1, 3, now=0.0)
    assert held.touch_due(900.0) == 0 and held.late_count == 2
    assert held.touch_due(1800.0) == 0 and held.late_count == 2
    held.finish_below(3)
    assert link.finished == ids(1, 3), "it is done, whoever has it now"


def test_what_will_not_be_safe_is_given_back():
    held, link, lost = Held(100), FakeLink(), FakeLink()
    add(held, link, 1, 3)
    add(held, lost, 3, 5)
    lost.is_lost = True
    held.give_back()
    assert link.requeued == ids(1, 3) and lost.requeued == [] and held.count == 0


def test_messages_of_a_lost_link_are_known_when_another_brings_them():
    """Those whose FIN was sent as well: it may never have arrived."""
    held, old, new = Held(100), FakeLink(), FakeLink()
    add(held, old, 1, 5)
    add(held, old, 5, 9)
    held.finish_below(5)
    old.is_lost = True
    held.see(new)
    again = held.are_known(list(range(1, 10)), [2] * 9, ids(1, 10))
    assert again == [True] * 8 + [False]
    assert held.are_known([99], [2], ids(1, 2)) is None, "the same id of another time is another message"
    assert held.are_known(list(range(1, 10)), [1] * 9, ids(1, 10)) is None, "nothing comes again for the first time"


def test_messages_of_a_link_that_stands_are_known_from_any_link():
    """Their time was over at nsqd, which has sent them again: those that wait for the disk, and those that are done."""
    held, link, other = Held(100), FakeLink(), FakeLink()
    add(held, link, 1, 5)
    held.finish_below(5)
    add(held, link, 5, 9)
    held.see(other)
    assert held.are_known(list(range(1, 10)), [2] * 9, ids(1, 10)) == [True] * 8 + [False]
    assert held.are_known(list(range(1, 10)), [1] * 9, ids(1, 10)) is None, "nothing comes again for the first time"


def test_what_comes_while_others_come_again_is_known_later():
    held, link = Held(100), FakeLink()
    for first in range(1, 101, 10):
        add(held, link, first, first + 10)
        assert held.are_known([first], [2], ids(first, first + 1)) == [True]
    for first in range(101, 1001, 10):
        add(held, link, first, first + 10)
        held.finish_below(first + 10)
    assert held.are_known([999, 1], [2, 2], [*ids(999, 1000), *ids(1, 2)]) == [True, False]


def test_the_shorter_the_time_of_a_message_the_more_are_remembered():
    """Within the time in which nsqd bears a client that stands still, each time that passes brings others."""
    held, link = Held(10), FakeLink()
    link.msg_timeout_s = 5.0
    for first in range(1, 1001, 5):
        add(held, link, first, first + 5)
        held.finish_below(first + 5)
    known = held.are_known(list(range(1, 1001)), [2] * 1000, ids(1, 1001))
    assert known is not None and known[-130:] == [True] * 130 and sum(known) <= 135


def test_no_more_is_remembered_than_can_come_again():
    held, link, new = Held(10), FakeLink(), FakeLink()
    for first in range(1, 1001, 5):
        add(held, link, first, first + 5)
        held.finish_below(first + 5)
    link.is_lost = True
    held.see(new)
    known = held.are_known(list(range(1, 1001)), [2] * 1000, ids(1, 1001))
    assert known is not None and known[-10:] == [True] * 10
    assert sum(known) <= 25
    held.expect_again((number, b"%016x" % number) for number in range(5000))
    known = held.are_known(list(range(5000)), [2] * 5000, ids(0, 5000))
    assert known is not None and sum(known) == 40
