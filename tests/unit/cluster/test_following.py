"""A followed partition: whom it obeys, and what it says when."""

from typing import Any

import pytest

from flintmq.cluster.following import STATE_PARTS_MAX, Following
from flintmq.cluster.history import LogShape
from flintmq.errors import StorageError, WriteFailed
from flintmq.wire.peer import (
    CutTo,
    Floors,
    NeedState,
    Open,
    Opened,
    PeerError,
    Progress,
    Ready,
    Refusal,
    StartOver,
    StateBegin,
    StateTaken,
)


class Log:
    """A copy whose slow operations end when the test says so."""

    def __init__(self):
        self.epoch = 4
        self.progress = (4, 17)
        self.start, self.end = 0, 100
        self.acknowledged_end = 100
        self.history = [(1, 0), (4, 50)]
        self.committed = 80
        self.gaps: list[int] = []
        self.floors: dict[str, int] = {}
        self.waiting: list[Any] = []
        self.applied: list[Any] = []
        self.staged: list[bytes] = []
        self.staging = b""
        self.error: Exception | None = None

    def shape(self):
        return LogShape(self.history, self.start, self.end)

    def note_epoch(self, epoch, done):
        self.waiting.append((done, "epoch", epoch))

    def append(self, data, gap):
        if self.error is not None:
            raise self.error
        self.gaps.append(gap)
        self.end += gap + len(data)
        self.acknowledged_end = self.end
        return self.end

    def commit(self, sequence):
        self.committed = max(self.committed, sequence)

    def cut_back(self, sequence, done):
        self.waiting.append((done, "end", sequence))

    def start_over(self, sequence, offset_bytes, done):
        self.waiting.append((done, "start", sequence))

    def keep_floors(self, floors):
        self.floors.update(floors)

    def drop_state(self):
        self.staged.clear()

    def stage(self, part, done):
        self.staged.append(part)
        self.waiting.append((done, "staging", part))

    def apply(self, position, parts, is_whole, done):
        staged: list[Any] = []
        if is_whole:
            staged, self.staged = self.staged, []
        self.applied.append((position, [*staged, *parts], is_whole))
        self.waiting.append((done, "progress", position))

    def finish(self, error=None):
        """The operation that has waited longest is over."""
        done, what, value = self.waiting.pop(0)
        if error is None:
            setattr(self, what, value)
            if what == "start":
                self.end, self.progress = value, (0, 0)
            self.acknowledged_end = self.end
        done(error)


class Stream:
    def __init__(self, number=1):
        self.number = number
        self.confirmed_ns = 0
        self.sent: list[Any] = []
        self.refused: list[Any] = []
        self.acknowledged = 0
        self.progress: list[int] = []
        self.floors: list[int] = []

    def send(self, frame):
        self.sent.append(frame)

    def refuse(self, refusal, epoch, reason=""):
        self.refused.append((refusal, epoch))

    def acknowledge(self):
        self.acknowledged += 1

    def acknowledge_progress(self, number):
        self.progress.append(number)

    def acknowledge_floors(self, number):
        self.floors.append(number)


class Case:
    def __init__(self, **options):
        self.log: Any = Log()
        self.following: Any = Following("t", 0, 7, 9, self.log, 5, **options)

    def open(self, epoch=5, topic_number=7, log_id=9, number=1):
        stream = Stream(number)
        self.following.open(stream, Open(number, "t", 0, topic_number, log_id, epoch))
        return stream

    def ready(self):
        """A stream on which batches may come."""
        stream = self.open()
        self.log.finish()
        self.following.cut_to(stream, CutTo(1, 100))
        return stream

    def progress(self, stream, number, after, needs=100):
        self.following.progress(stream, Progress(1, (5, number), after, needs), memoryview(b"r%d" % number))


# -- whom it obeys -----------------------------------------------------------------------------------------------------


def test_an_epoch_is_noted_before_anything_is_said_in_it():
    case = Case()
    stream = case.open(5)
    assert stream.sent == [] and case.following.epoch == 5 and case.log.waiting[0][1:] == ("epoch", 5)
    case.log.finish()
    assert stream.sent == [Opened(1, [(1, 0), (4, 50)], 0, 100, (4, 17))]
    assert case.open(5).sent != []  # it is noted already
    assert case.log.waiting == []


def test_a_lower_epoch_is_refused():
    case = Case()
    assert case.open(3).refused == [(Refusal.HIGHER_EPOCH, 4)]
    case.open(6)
    assert case.open(5).refused == [(Refusal.HIGHER_EPOCH, 6)]  # although 6 is not noted yet
    case.following.superseded(8)
    assert case.open(7).refused == [(Refusal.HIGHER_EPOCH, 8)]


def test_another_log_or_topic_is_refused_without_an_epoch():
    case = Case()
    assert case.open(1, topic_number=8).refused == [(Refusal.OTHER_LOG, 0)]
    assert case.open(9, log_id=1).refused == [(Refusal.OTHER_LOG, 0)]
    assert case.following.epoch == 4


def test_a_later_leader_takes_over_and_the_one_before_is_told():
    case = Case()
    old = case.ready()
    new = case.open(6, number=2)
    assert old.refused == [(Refusal.HIGHER_EPOCH, 6)] and case.following.stream is new
    assert not case.following.append(old, 100, 0, memoryview(b"late"))
    case.following.cut_to(old, CutTo(1, 3))
    case.following.progress(old, Progress(1, (5, 1), (4, 17), 0), memoryview(b"late"))
    assert case.log.end == 100 and case.log.applied == []
    case.log.finish()
    assert isinstance(new.sent[0], Opened)


def test_the_same_leader_may_connect_again():
    case = Case()
    old = case.ready()
    new = case.open(5, number=2)
    assert old.refused == [(Refusal.TAKEN, 5)] and isinstance(new.sent[0], Opened)
    case.following.closed(old)
    assert case.following.stream is new


def test_what_is_under_way_is_awaited_before_another_stream_begins():
    case = Case()
    old = case.open()
    case.log.finish()
    case.following.cut_to(old, CutTo(1, 60))
    new = case.open(5, number=2)
    assert new.sent == []
    case.log.finish()
    assert new.sent == [Opened(2, [(1, 0), (4, 50)], 0, 60, (4, 17))] and not isinstance(old.sent[-1], Ready)


def test_a_stream_that_closed_is_followed_by_nothing():
    case = Case()
    stream = case.open()
    case.following.closed(stream)
    case.log.finish()
    assert stream.sent == [] and case.log.epoch == 5


def test_it_knows_when_it_last_told_a_leader_that_it_follows():
    case = Case()
    assert case.following.confirmed_ns == 5
    stream = case.ready()
    stream.confirmed_ns = 70
    assert case.following.confirmed_ns == 70
    case.following.superseded(9)
    assert case.following.stream is None and case.following.confirmed_ns == 70
    assert stream.refused == [(Refusal.HIGHER_EPOCH, 9)]


def test_a_copy_that_is_removed_follows_nobody():
    case = Case()
    stream = case.ready()
    case.following.retire()
    assert stream.refused == [(Refusal.NOT_HERE, 5)] and case.open(9).refused == [(Refusal.BROKEN, 5)]


# -- the log -----------------------------------------------------------------------------------------------------------


def test_it_is_ready_when_nothing_is_to_be_cut():
    case = Case()
    stream = case.ready()
    assert stream.sent[-1] == Ready(1, 100) and stream.acknowledged == 1 and case.following.acknowledged_end == 100


def test_it_is_ready_when_the_cut_is_durable():
    case = Case()
    stream = case.open()
    case.log.finish()
    case.following.cut_to(stream, CutTo(1, 60))
    assert len(stream.sent) == 1 and case.following.acknowledged_end == -1
    case.log.finish()
    assert stream.sent[-1] == Ready(1, 60) and case.following.acknowledged_end == 60


def test_an_epoch_of_its_own_in_which_it_wrote_nothing_goes():
    case = Case()
    case.log.history = [(1, 0), (4, 100)]
    stream = case.open()
    case.log.finish()
    case.following.cut_to(stream, CutTo(1, 100))
    assert case.log.waiting[0][1:] == ("end", 100)


def test_what_cannot_begin_breaks_the_copy():
    case = Case()

    def cut_back(sequence, done):
        raise WriteFailed("path", "read-only")

    case.log.cut_back = cut_back
    stream = case.open()
    case.log.finish()
    case.following.cut_to(stream, CutTo(1, 60))
    assert stream.refused == [(Refusal.BROKEN, 5)]


@pytest.mark.parametrize("when", ["opened", "ready"])
def test_it_starts_over(when):
    case = Case()
    stream = case.ready() if when == "ready" else case.open()
    if when == "opened":
        case.log.finish()
    case.following.start_over(stream, StartOver(1, 200, 5000))
    assert case.following.acknowledged_end == -1
    with pytest.raises(PeerError, match="Append out of turn"):
        case.following.append(stream, 200, 0, memoryview(b"x"))
    case.log.finish()
    assert stream.sent[-1] == Ready(1, 200)
    assert case.following.append(stream, 200, 0, memoryview(b"x"))
    case.progress(stream, 1, (4, 17))
    assert stream.sent[-1] == NeedState(1)


def test_batches_are_appended_where_the_log_ends():
    case = Case()
    stream = case.ready()
    assert case.following.append(stream, 100, 90, memoryview(b"12345"))
    assert case.log.end == 105 and case.log.committed == 90 and stream.acknowledged == 2
    assert not case.following.append(stream, 105, 500, memoryview(b""))
    assert case.log.committed == 105 and stream.acknowledged == 2  # never beyond what is here
    with pytest.raises(PeerError, match=r"t/0, epoch 5: the leader sent batches from 104, the log ends at 105"):
        case.following.append(stream, 104, 0, memoryview(b"x"))


def test_a_gap_is_one_that_the_leader_told_of():
    case = Case()
    stream = case.ready()
    assert case.following.append(stream, 100, 0, memoryview(b"12345"), 7)
    assert case.log.end == 112 and case.log.gaps == [7]
    assert case.following.append(stream, 112, 0, memoryview(b"1")) and case.log.gaps == [7, 0]
    with pytest.raises(PeerError, match="a gap of 7 messages from 113 on, and nothing behind it"):
        case.following.append(stream, 113, 0, memoryview(b""), 7)


def test_it_acknowledges_what_is_synced_where_that_is_the_rule():
    case = Case()
    stream = case.ready()
    case.following.append(stream, 100, 0, memoryview(b"12345"))
    case.log.acknowledged_end = 100
    assert case.following.acknowledged_end == 100
    case.log.acknowledged_end = 105
    case.following.synced()
    assert case.following.acknowledged_end == 105 and stream.acknowledged == 3


def test_bytes_that_are_no_batches_are_the_leaders_fault():
    case = Case()
    stream = case.ready()
    case.log.error = ValueError("CRC is wrong")
    with pytest.raises(PeerError, match="cannot be appended: CRC is wrong"):
        case.following.append(stream, 100, 0, memoryview(b"x"))
    assert case.following.broken is None


def test_a_disk_that_fails_breaks_the_copy_and_nothing_else():
    case = Case()
    stream = case.ready()
    case.log.error = WriteFailed("path", "no space")
    assert not case.following.append(stream, 100, 0, memoryview(b"x"))
    assert stream.refused == [(Refusal.BROKEN, 5)] and case.following.broken is case.log.error
    assert case.open(6).refused == [(Refusal.BROKEN, 5)]


@pytest.mark.parametrize("operation", ["epoch", "cut"])
def test_an_operation_that_fails_breaks_the_copy(operation):
    case = Case()
    stream = case.open()
    if operation == "cut":
        case.log.finish()
        case.following.cut_to(stream, CutTo(1, 60))
    case.log.finish(WriteFailed("path", "no space"))
    assert stream.refused == [(Refusal.BROKEN, 5)]


def test_what_comes_out_of_turn_is_the_leaders_fault():
    case = Case()
    stream = case.open()
    for call in (
        lambda: case.following.cut_to(stream, CutTo(1, 100)),
        lambda: case.following.start_over(stream, StartOver(1, 0, 0)),
        lambda: case.following.append(stream, 100, 0, memoryview(b"x")),
        lambda: case.progress(stream, 1, (4, 17)),
        lambda: case.following.state_begin(stream, StateBegin(1, (5, 1), 0)),
        lambda: case.following.state_part(stream, memoryview(b"x")),
        lambda: case.following.state_end(stream),
    ):
        with pytest.raises(PeerError):
            call()
    case.log.finish()
    with pytest.raises(PeerError, match="cut to 101, the log has 0 to 100"):
        case.following.cut_to(stream, CutTo(1, 101))
    case.following.cut_to(stream, CutTo(1, 100))
    with pytest.raises(PeerError, match="CutTo out of turn"):
        case.following.cut_to(stream, CutTo(1, 90))


def test_a_watermark_out_of_turn_is_passed_over():
    case = Case()
    stream = case.open()
    case.following.watermark(stream, 95)
    assert case.log.committed == 80


# -- progress ----------------------------------------------------------------------------------------------------------


def test_progress_is_stored_in_its_order():
    case = Case()
    stream = case.ready()
    case.progress(stream, 1, (4, 17))
    case.progress(stream, 2, (5, 1))
    assert [each[0] for each in case.log.applied] == [(5, 1), (5, 2)] and stream.progress == []
    case.log.finish()
    case.log.finish()
    assert stream.progress == [1, 2]


@pytest.mark.parametrize("after", [(4, 16), (5, 1), (0, 0)])
def test_progress_with_a_gap_needs_the_whole_state(after):
    case = Case()
    stream = case.ready()
    case.progress(stream, 2, after)
    case.progress(stream, 3, (5, 2))
    assert case.log.applied == [] and stream.sent.count(NeedState(1)) == 1
    case.following.state_begin(stream, StateBegin(1, (5, 3), 100))
    case.following.state_part(stream, memoryview(b"one"))
    case.following.state_part(stream, memoryview(b"two"))
    case.following.state_end(stream)
    assert case.log.applied == [((5, 3), [b"one", b"two"], True)]
    case.progress(stream, 4, (5, 3))
    assert len(case.log.applied) == 2


def test_progress_over_a_log_that_is_not_here_is_the_leaders_fault():
    case = Case()
    stream = case.ready()
    with pytest.raises(PeerError, match="needs the log up to 101, it ends at 100"):
        case.progress(stream, 1, (4, 17), needs=101)
    with pytest.raises(PeerError, match="needs the log up to 101"):
        case.following.state_begin(stream, StateBegin(1, (5, 3), 101))


def test_there_is_room_for_more_of_a_state_when_some_of_it_is_written():
    case = Case()
    stream = case.ready()
    case.following.state_begin(stream, StateBegin(1, (5, 3), 100))
    for _ in range(3):
        case.following.state_part(stream, memoryview(b"x"))
    assert StateTaken(1, 1) not in stream.sent
    case.log.finish()
    case.log.finish()
    assert stream.sent[-2:] == [StateTaken(1, 1), StateTaken(1, 2)]
    for _ in range(STATE_PARTS_MAX - 1):
        case.following.state_part(stream, memoryview(b"x"))
    with pytest.raises(PeerError, match="more than 16 parts of a state at once"):
        case.following.state_part(stream, memoryview(b"x"))


def test_a_state_that_is_not_completed_is_forgotten():
    case = Case()
    stream = case.ready()
    case.following.state_begin(stream, StateBegin(1, (5, 3), 100))
    case.following.state_part(stream, memoryview(b"half"))
    case.following.closed(stream)
    assert case.log.staged == [] and case.log.applied == []
    new = case.open(5, number=2)
    assert new.sent == [], "what was begun is awaited"
    case.log.finish()
    assert [type(frame) for frame in new.sent] == [Opened]
    case.following.cut_to(new, CutTo(2, 100))
    case.following.state_begin(new, StateBegin(2, (5, 4), 100))
    case.following.state_part(new, memoryview(b"whole"))
    case.following.state_end(new)
    assert case.log.applied == [((5, 4), [b"whole"], True)]


def test_a_part_that_cannot_be_written_breaks_the_copy_alone():
    case = Case()
    stream = case.ready()
    case.following.state_begin(stream, StateBegin(1, (5, 3), 100))
    case.following.state_part(stream, memoryview(b"x"))
    case.log.finish(StorageError("disk"))
    assert stream.refused[-1][0] is Refusal.BROKEN and case.following.broken is not None


def test_a_state_is_in_one_piece():
    case = Case()
    stream = case.ready()
    case.following.state_begin(stream, StateBegin(1, (5, 3), 100))
    with pytest.raises(PeerError, match="Progress out of turn"):
        case.progress(stream, 1, (4, 17))
    with pytest.raises(PeerError, match="StateBegin out of turn"):
        case.following.state_begin(stream, StateBegin(1, (4, 3), 100))


def test_progress_under_way_is_awaited_before_a_stream_begins():
    case = Case()
    stream = case.ready()
    case.progress(stream, 1, (4, 17))
    new = case.open(5, number=2)
    assert new.sent == []
    case.log.finish()
    assert new.sent[0].progress == (5, 1) and stream.progress == [] and new.progress == []


# -- channels in order -------------------------------------------------------------------------------------------------


def test_floors_are_kept_before_they_are_acknowledged():
    case = Case()
    stream = case.ready()
    case.following.floors(stream, Floors(1, 3, [("ch", 7), ("other", 2)]))
    assert case.log.floors == {"ch": 7, "other": 2} and stream.floors == [3]
    case.following.floors(stream, Floors(1, 3, []))
    assert stream.floors == [3, 3], "a leader that has none asks whether it is followed"


def test_a_floor_that_cannot_be_kept_breaks_the_copy():
    case = Case()
    stream = case.ready()

    def fail(floors):
        raise StorageError("the disk is gone")

    case.log.keep_floors = fail
    case.following.floors(stream, Floors(1, 3, [("ch", 7)]))
    assert stream.floors == [] and case.following.broken is not None


def test_floors_out_of_turn_are_a_broken_rule():
    case = Case()
    stream = case.open()
    with pytest.raises(PeerError, match="out of turn"):
        case.following.floors(stream, Floors(1, 3, []))
