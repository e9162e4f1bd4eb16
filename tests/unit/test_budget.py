"""The memory that clients can make a daemon use: what is counted, and who holds it."""

from flintmq.budget import NO_LIMIT_BYTES, Budget, OutputMeter


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


def test_a_connection_holds_what_its_transport_has_not_written():
    budget = Budget(1600)
    first, second = Connection(budget), Connection(budget)
    first.meter.wrote(120, 80)
    second.meter.wrote(50, 50)
    assert (budget.output_bytes, list(budget.holders)) == (130, [first, second])
    first.meter.look(20, 1.0)
    assert budget.output_bytes == 70
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
