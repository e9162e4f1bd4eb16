"""The place up to which two logs agree, from their epochs."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flintmq.cluster.history import LogShape, agreement, cut, is_history, latest, noted, trimmed
from flintmq.wire.peer import HISTORY_MAX


def shape(history, end, start=0):
    return LogShape(history, start, end)


def test_the_picture_of_the_module():
    leader = shape([(1, 0), (3, 40), (4, 70)], 90)
    assert agreement(leader, shape([(1, 0), (2, 30)], 45)) == 30


@pytest.mark.parametrize(
    ("leader", "follower", "place"),
    [
        (shape([(1, 0)], 10), shape([(1, 0)], 10), 10),
        (shape([(1, 0)], 10), shape([(1, 0)], 7), 7),
        (shape([(1, 0), (2, 10)], 15), shape([(1, 0)], 12), 10),  # longer than the leader was when it was elected
        (shape([(1, 0), (2, 10)], 11), shape([(1, 0)], 50), 10),  # longer than the leader is
        (shape([(1, 0), (2, 10)], 20), shape([(1, 0), (2, 10)], 30), 20),  # the leader lost its end with its power
        (shape([(1, 0), (3, 10)], 20), shape([(1, 0), (2, 10)], 20), 10),  # as long, and another log
        (shape([(1, 0), (3, 8)], 20), shape([(1, 0), (2, 10)], 20), 8),
        (shape([(1, 0), (5, 10)], 10), shape([(1, 0)], 10), 10),  # an epoch without any batch
        (shape([(1, 0), (5, 10)], 20), shape([(1, 0), (4, 10)], 10), 10),  # the follower led, and wrote nothing
        (shape([(1, 0), (4, 10), (5, 12)], 20), shape([(1, 0), (4, 10)], 10), 10),
        (shape([(1, 0)], 8), shape([(1, 0), (4, 10)], 8), 8),  # it lost what was before its own epoch
    ],
)
def test_the_place(leader, follower, place):
    assert agreement(leader, follower) == place


def test_a_log_whose_beginning_was_dropped():
    leader = shape([(5, 100), (7, 200)], 250, start=150)
    assert agreement(leader, shape([(3, 0), (5, 100)], 180)) == 180
    assert agreement(leader, shape([(3, 0), (5, 100)], 140)) is None  # ends before the leader begins
    assert agreement(leader, shape([(3, 0)], 100)) is None  # nothing in common
    assert agreement(leader, shape([(5, 100), (6, 190)], 220, start=180)) == 190
    assert agreement(leader, shape([(5, 100), (6, 160)], 220, start=180)) is None  # of what it has nothing is right


def test_an_empty_log_agrees_wherever_the_leaders_is():
    leader = shape([(5, 100)], 200, start=150)
    for place, expected in ((0, None), (149, None), (150, 150), (180, 180), (200, 200), (201, None)):
        assert agreement(leader, shape([], place, start=place)) == expected
    assert agreement(shape([(1, 1)], 1, start=1), shape([], 1, start=1)) == 1


def test_histories_of_logs_that_are_cut_at_either_end():
    history = [(1, 0), (3, 40), (4, 70)]
    assert cut(history, 90) == history and cut(history, 71) == history
    assert cut(history, 70) == [(1, 0), (3, 40)] and cut(history, 1) == [(1, 0)] and cut(history, 0) == []
    assert trimmed(history, 0) == history
    assert trimmed(history, 40) == history  # a follower may end where epoch 1 does
    assert trimmed(history, 41) == [(3, 40), (4, 70)]
    assert trimmed(history, 900) == [(4, 70)]
    assert trimmed([], 5) == []


def test_an_epoch_is_noted_once_and_never_goes_back():
    history = noted([], 1, 0)
    assert history == [(1, 0)] and noted(history, 1, 5) == history
    history = noted(history, 4, 5)
    assert history == [(1, 0), (4, 5)] and is_history(history, 5) and not is_history(history, 4)
    for epoch, end in ((3, 9), (5, 4), (4, 3)):
        with pytest.raises(ValueError, match=f"(epoch {epoch}|ends at {end})"):
            noted(history, epoch, end)
    assert not is_history([(2, 0), (1, 3)], 9) and not is_history([(1, 3), (2, 3)], 9)


def test_an_epoch_without_a_batch_makes_room():
    """It was elected, wrote nothing, and follows one that led before and has more."""
    history = noted([(1, 0)], 2, 40)
    assert noted(history, 1, 40) == [(1, 0)]
    assert noted(history, 3, 40) == [(1, 0), (3, 40)]
    assert noted(noted([], 2, 0), 1, 0) == [(1, 0)]


def test_a_frame_has_room_for_the_latest_epochs():
    history = [(epoch, epoch) for epoch in range(HISTORY_MAX + 5)]
    assert latest(history) == history[5:]


class Log:
    """A log of which everything is known: the message at a sequence is (epoch, writer's count)."""

    def __init__(self):
        self.start = 0
        self.messages: list[Any] = []
        self.history: list[tuple[int, int]] = []

    @property
    def end(self):
        return self.start + len(self.messages)

    def shape(self):
        return LogShape(self.history, self.start, self.end)

    def cut_back(self, end):
        del self.messages[end - self.start :]
        self.history = cut(self.history, end)

    def append(self, messages):
        for message in messages:
            self.history = noted(self.history, message[0], self.end)
            self.messages.append(message)

    def follow(self, leader, count):
        place = agreement(leader.shape(), self.shape())
        if place is None:
            self.start, self.messages, self.history = leader.start, [], []
        else:
            self.cut_back(place)
        at = self.end - leader.start
        self.append(leader.messages[at : at + count])


def true_agreement(leader, follower):
    """Up to where the messages that both have are the same; None when that cannot be seen."""
    if not follower.messages:
        return follower.end if leader.start <= follower.end <= leader.end else None
    first = max(leader.start, follower.start)
    place = first
    while place < min(leader.end, follower.end):
        if leader.messages[place - leader.start] != follower.messages[place - follower.start]:
            break
        place += 1
    return place if first <= min(leader.end, follower.end) else None


steps = st.lists(st.tuples(st.sampled_from("EEWWWFFFLD"), st.integers(0, 2), st.integers(0, 6)), max_size=60)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(steps)
def test_it_is_where_the_messages_differ(steps):
    logs = [Log(), Log(), Log()]
    epoch, leader, count = 0, None, 0
    for step, number, size in steps:
        log = logs[number]
        if step == "E":
            epoch, leader = epoch + 1, log
            log.history = noted(log.history, epoch, log.end)
        elif step == "W" and leader is not None:
            leader.append([(epoch, count + each) for each in range(size)])
            count += size
        elif step == "F" and leader is not None and log is not leader:
            log.follow(leader, size)
        elif step == "L" and log is not leader:  # lost its end with its power
            log.cut_back(max(log.start, log.end - size))
        elif step == "D" and leader is not None:  # retention, of what all have
            place = min(*(each.end for each in logs), *(true_agreement(leader, each) or 0 for each in logs))
            if log.start < place:
                del log.messages[: place - log.start]
                log.start = place
                log.history = trimmed(log.history, place)
        assert is_history(log.history, log.end)
        for one in logs:
            for other in logs:
                found = agreement(one.shape(), other.shape())
                expected = true_agreement(one, other)
                assert found == expected or (found is None and expected == max(one.start, other.start))
