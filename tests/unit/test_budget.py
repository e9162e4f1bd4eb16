"""The memory that clients can make a daemon use: what is counted, and who holds it."""

import pytest

from flintmq.budget import COUNTED_BYTES, NO_LIMIT_BYTES, READ_BYTES, Budget, InputMeter, OutputMeter


class Connection:
    peer = "somebody"

    def __init__(self, budget):
        self.meter = OutputMeter(budget, self)

    def look_at_output(self, now_s):
        raise NotImplementedError

    def abort(self):
        raise NotImplementedError


def test_the_shares_are_the_whole():
    budget = Budget(1600)
    shares = (
        budget.output_max_bytes,
        budget.ephemeral_max_bytes,
        budget.publishing_max_bytes,
        budget.receiving_max_bytes,
        budget.caches_max_bytes,
        budget.deferred_max_bytes,
    )
    assert sum(shares) == 1600
    assert budget.output_short_bytes * 2 == budget.output_max_bytes
    assert Budget().limit_bytes == NO_LIMIT_BYTES


def test_short_is_beyond_half_and_full_is_the_share():
    budget = Budget(1600)
    seen = []
    for used in (0, 300, 301, 599, 600):
        budget.output_bytes = used
        seen.append((budget.is_short, budget.is_full))
    assert seen == [(False, False), (False, False), (True, False), (True, False), (True, True)]


@pytest.mark.parametrize(
    ("used", "silent", "new", "reads"),
    [
        (300, True, True, True),
        (301, False, True, True),
        (499, False, True, True),
        (500, False, False, True),
        (599, False, False, True),
        (600, False, False, False),
    ],
)
def test_large_answers_are_given_by_what_is_known_of_who_asks(used: int, silent: bool, new: bool, reads: bool):
    """``silent`` has shown nothing, ``new`` has answered a heartbeat, ``reads`` has read the answer before."""
    budget = Budget(1600)
    budget.output_bytes = used
    assert budget.may_answer("silent", has_read=False, has_answered=False) is silent
    assert budget.may_answer("new", has_read=False, has_answered=True) is new
    assert budget.may_answer("reads", has_read=True, has_answered=False) is reads
    assert list(budget.newcomers) == [name for name, may in (("new", new), ("reads", reads)) if not may]
    assert list(budget.held_back) == list(budget.to_ask) == ([] if silent else ["silent"])
    assert budget.has_waiting is not silent
    for each in ("silent", "new", "reads"):
        budget.forget(each)
    assert not budget.has_waiting


def test_a_connection_holds_what_its_transport_has_not_written():
    budget = Budget(1600)
    first, second = Connection(budget), Connection(budget)
    first.meter.wrote(120, 80)  # of a piece that is written in part nothing is free
    second.meter.wrote(50, 50)
    assert (budget.output_bytes, list(budget.holders)) == (170, [first, second])
    first.meter.look(1, 1.0)
    assert budget.output_bytes == 170
    first.meter.wrote(10, 11)
    assert budget.output_bytes == 180
    first.meter.wrote(10, 12)  # the large one has been written, or all but a byte of it
    assert budget.output_bytes == 181
    first.meter.wrote(10, 0)
    assert (budget.output_bytes, list(budget.holders)) == (50, [second])
    second.meter.close()
    second.meter.close()
    assert (budget.output_bytes, list(budget.holders)) == (0, [])


def test_what_was_written_at_once_counts_no_more():
    budget = Budget(1600)
    Connection(budget).meter.wrote(100, 0)
    assert (budget.output_bytes, list(budget.holders)) == (0, [])


def test_who_reads_what_was_there_is_not_unread_however_much_there_is():
    budget = Budget(1600)
    meter = Connection(budget).meter
    meter.wrote(100, 100)
    meter.look(100, 10.0)
    assert meter.unread_for_s(13.0) == 3.0
    meter.wrote(100, 101)  # 99 of the first 100 have been read
    meter.look(101, 14.0)
    assert meter.unread_for_s(14.0) == 4.0
    meter.wrote(100, 200)  # and now the first 100, while there was always something
    meter.look(200, 15.0)
    assert meter.unread_for_s(15.0) == 0.0
    assert meter.unread_for_s(25.0) == 10.0
    meter.unmark()
    assert meter.unread_for_s(25.0) == 0.0
    meter.look(200, 26.0)
    assert meter.unread_for_s(27.0) == 1.0
    meter.look(0, 28.0)
    assert meter.unread_for_s(100.0) == 0.0


def test_one_ephemeral_log_leaves_as_much_as_it_has():
    budget = Budget(1600)
    assert budget.ephemeral_room(0) == 100
    budget.ephemeral_bytes = 100
    assert budget.ephemeral_room(100) == 0
    assert budget.ephemeral_room(0) == 50
    budget.ephemeral_bytes = 500
    assert budget.ephemeral_room(0) == 0


class Publisher:
    """A connection that sends bodies."""

    def __init__(self, budget, has_published=False):
        self.input_meter = InputMeter(budget, self)
        self.peer = "somebody"
        self.has_published = has_published
        self.is_awaited = True
        self.is_read = True

    def pause_input(self):
        self.is_read = False

    def resume_input(self):
        self.is_read = True

    def refuse_input(self, reason):
        self.input_meter.close()


def sending(budget, *sizes, has_published=False):
    made = [Publisher(budget, has_published) for _ in sizes]
    for each, size in zip(made, sizes, strict=True):
        each.input_meter.hold(size)
    return made


PART = 10 * READ_BYTES
"""A sixteenth: ten reads of a socket."""


def test_parts_of_bodies_are_counted_until_they_are_complete():
    budget = Budget(16 * PART)
    first, second = sending(budget, 1000, 2000)
    assert (budget.receiving_bytes, list(budget.senders)) == (3000, [first, second])
    first.input_meter.hold(0)
    assert (budget.receiving_bytes, list(budget.senders)) == (2000, [second])
    second.input_meter.hold(COUNTED_BYTES - 1)  # the beginning of the next command
    assert (budget.receiving_bytes, list(budget.senders)) == (0, [])
    second.input_meter.close()
    assert budget.receiving_bytes == 0


def test_beyond_half_of_the_share_who_has_published_nothing_is_not_read():
    budget = Budget(16 * PART)
    told = []
    budget.on_receiving = lambda: told.append(budget.receiving_bytes)
    large, small = sending(budget, PART, 600)
    (known,) = sending(budget, PART - 1000, has_published=True)
    assert (large.is_read, small.is_read, known.is_read) == (True, False, True)
    assert told == [PART + 600]
    (second,) = sending(budget, 600, has_published=True)
    assert not second.is_read, "and beyond all of it nobody is"
    known.input_meter.hold(0)
    assert (small.is_read, second.is_read) == (True, True), "one of each goes on in any case, and who there is room for"
    small.input_meter.hold(2000)
    assert small.is_read, "it goes on"
    small.input_meter.hold(700)  # its body is complete, and this is the next one
    assert not small.is_read
    large.input_meter.close()
    assert small.is_read
    assert not budget.has_paused


def test_who_waits_goes_on_in_the_order_of_coming():
    budget = Budget(16 * PART)
    sending(budget, PART)
    waiting = sending(budget, *[600] * 5)
    budget.resume_senders()
    assert [each.is_read for each in waiting] == [True, False, False, False, False]
    waiting[0].input_meter.close()
    assert [each.is_read for each in waiting[1:]] == [True, False, False, False]
    for each in waiting[2:]:
        each.input_meter.close()
    assert not budget.has_paused


def test_when_all_parts_are_far_too_much_the_largest_are_refused():
    budget = Budget(16 * PART)
    known = sending(budget, 2 * PART, has_published=True)
    new = sending(budget, PART + 1000, PART // 2, 600)
    assert budget.excess_senders() == []
    last = sending(budget, PART - 1000)
    assert budget.receiving_bytes > budget.receiving_full_bytes
    assert budget.excess_senders() == [new[0]], "the largest"
    budget.receiving_bytes += 10 * PART
    assert budget.excess_senders() == [new[0], *last, *known, new[1], new[2]], "a part of who has published counts less"
    assert budget.has_paused_for(0.0, 1.0)
    assert not budget.has_paused_for(0.1, 1.0)


def test_how_long_a_connection_has_stalled():
    budget = Budget(16 * PART)
    sending(budget, PART)
    (one,) = sending(budget, 600)
    meter = one.input_meter
    meter.look(10.0)
    assert (meter.paused_for_s(13.0), meter.stalled_for_s(13.0)) == (3.0, 0.0), "it is not read"
    budget.resume_senders()
    meter.look(14.0)
    assert (meter.paused_for_s(15.0), meter.stalled_for_s(15.0)) == (0.0, 1.0)
    meter.hold(700)
    meter.look(16.0)
    assert (meter.stalled_for_s(16.0), meter.open_for_s(16.0)) == (0.0, 6.0)
    meter.look(17.0)
    assert meter.stalled_for_s(18.0) == 2.0
    meter.hold(0)
    meter.hold(700)
    meter.look(20.0)
    assert meter.open_for_s(21.0) == 1.0
    meter.unmark()
    assert (meter.stalled_for_s(30.0), meter.open_for_s(30.0)) == (0.0, 0.0)
