"""A copy with its log on disk and its rows in a database, as the follower's core changes it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.broker.test_replicas import LOG_ID, NUMBER, TOPIC_NUMBER, Batches, World, stored_in

from flintmq.cluster.following import Following
from flintmq.cluster.history import LogShape, agreement
from flintmq.cluster.leading import Leading
from flintmq.cluster.link import FollowerLink, LeaderLink
from flintmq.cluster.state import Member, PartitionState
from flintmq.nsqd.cluster.copies import FollowedLog, LedLog
from flintmq.wire.peer import CutTo, Frame, Identity, Open, Opened, PeerError, Ready, Refusal


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

    def acknowledge_floors(self, number: int) -> None:
        pass


class Case:
    """A node that follows one partition."""

    def __init__(self) -> None:
        self.world = World()
        self.world.make()
        self.follow()

    def follow(self) -> None:
        self.log = FollowedLog(self.world.broker.followed_replicas, self.world.replica, lambda: False, lambda: None)
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


# -- gaps


@pytest.mark.parametrize("said", [0, 4, 6])
def test_a_hole_that_the_leader_did_not_tell_of_is_none_here(said: int) -> None:
    case, leader = Case(), Batches()
    stream = case.ready(1, LogShape((), 1, 1))
    case.append(stream, leader.next(1, [b"first"]))
    behind = leader.next(1, [b"behind"], gap=5)
    with pytest.raises(PeerError, match="cannot be appended"):
        case.append(stream, behind, gap=said)
    assert case.world.log.next_sequence == 2


def test_a_gap_of_the_leader_is_told_of_on_both_nodes(caplog: pytest.LogCaptureFixture) -> None:
    case, leader, batches = Case(), World(), Batches()
    leader.make()
    leader.note(5)
    for gap in (0, 0, 5, 0):
        data = batches.next(5, [b"x"] * 2, gap=gap)
        leader.broker.followed_replicas.append(leader.replica, data, after_gap=gap > 0)

    class Led(LedLog):
        def whole_state(self, done: Any) -> None:
            pass  # it is not what this is about

    members = tuple(Member(name, "boot", False) for name in "ab")
    state = PartitionState(TOPIC_NUMBER, LOG_ID, 5, "a", "1", members, ("a", "b"))
    log = Led(leader.broker.led_replicas, leader.replica, lambda: 0, lambda: None)
    leading = Leading("t", NUMBER, "a", state, 1, log, end=batches.sequence)

    class Owner:
        def find(self, frame: Open, peer: Identity) -> Following:
            return case.following

    there = LeaderLink("b", 0)
    here = FollowerLink(Identity("c", "a", "1", "boot", False, 1), Owner())
    there.add(leading)
    there.connected(Identity("c", "b", "1", "boot", False, 1), 0)
    for now_ns in range(20):
        here.receive(b"".join(map(bytes, there.take_output(now_ns))))
        case.world.settle()
        there.receive(b"".join(map(bytes, here.take_output(now_ns))), now_ns)
    assert case.world.log.next_sequence == batches.sequence
    assert stored_in(case.world.log) == batches.stored
    assert "messages 5 to 9 are missing here and are sent to nobody" in caplog.text
    assert "messages 5 to 9 are missing here as they are at the leader" in caplog.text
