"""A copy with its log on disk and its rows in a database, as the follower's core changes it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.broker.test_replicas import LOG_ID, NUMBER, TOPIC_NUMBER, Batches, World, stored_in

from flintmq.cluster.following import Following
from flintmq.cluster.history import LogShape, agreement
from flintmq.nsqd.cluster.copies import FollowedLog
from flintmq.wire.peer import CutTo, Frame, Open, Opened, PeerError, Ready, Refusal


class Stream:
    """A connection that keeps what is said on it."""

    def __init__(self, number: int = 1) -> None:
        self.number = number
        self.confirmed_ns = 0
        self.sent: list[Frame] = []
        self.refused: list[tuple[Refusal, int]] = []

    def send(self, frame: Frame) -> None:
        self.sent.append(frame)

    def refuse(self, refusal: Refusal, epoch: int, reason: str = "") -> None:
        self.refused.append((refusal, epoch))

    def acknowledge(self) -> None:
        pass

    def acknowledge_progress(self, number: int) -> None:
        pass


class Case:
    """A node that follows one partition."""

    def __init__(self) -> None:
        self.world = World()
        self.world.make()
        self.follow()

    def follow(self) -> None:
        self.log = FollowedLog(self.world.broker.replicas, self.world.replica, lambda: False, lambda: None)
        self.following = Following("t", NUMBER, TOPIC_NUMBER, LOG_ID, self.log, 0)

    def open(self, epoch: int) -> Stream:
        stream = Stream()
        self.following.open(stream, Open(1, "t", NUMBER, TOPIC_NUMBER, LOG_ID, epoch))
        self.world.settle()
        return stream

    def ready(self, epoch: int, leader: LogShape) -> Stream:
        """A stream whose leader has found out up to where the logs agree."""
        stream = self.open(epoch)
        (opened,) = stream.sent
        assert isinstance(opened, Opened)
        place = agreement(leader, LogShape(opened.history, opened.start, opened.end))
        assert place is not None
        self.following.cut_to(stream, CutTo(1, place))
        self.world.settle()
        assert stream.sent[1:] == [Ready(1, place)]
        return stream

    def append(self, stream: Any, data: bytes, **said: Any) -> None:
        self.following.append(stream, self.log.end, 0, memoryview(data), **said)


@pytest.mark.parametrize("restarts", [True, False])
def test_a_node_that_was_elected_and_wrote_nothing_follows_who_led_before(restarts: bool) -> None:
    case, leader = Case(), Batches()
    stream = case.ready(1, LogShape((), 1, 1))
    case.append(stream, leader.next(1, [b"both have it"]))
    end = leader.sequence
    case.following.superseded(2)
    case.world.note(2, begins=True)
    if restarts:
        case.world.die(power_loss=False)
    case.follow()
    older = leader.next(1, [b"of an older epoch"])
    stream = case.ready(3, LogShape(((1, 1), (3, leader.sequence)), 1, leader.sequence))
    case.append(stream, older)
    case.append(stream, leader.next(3, [b"of the new one"]))
    assert case.following.broken is None and stream.refused == []
    assert stored_in(case.world.log) == leader.stored
    assert case.world.replica.history == [(1, 1), (3, end + 1)]
    case.world.die(power_loss=False)
    assert case.world.replica.history == [(1, 1), (3, end + 1)]
    with pytest.raises(PeerError):
        case.follow()
        case.append(case.ready(3, LogShape(((1, 1), (3, end + 1)), 1, leader.sequence)), older)
