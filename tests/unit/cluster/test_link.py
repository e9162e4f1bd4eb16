"""A connection between two nodes: alignment, flow, fairness, silence, and peers that lie."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.cluster_model import Disk, change_channels, encode_records

from flintmq.cluster import link as link_module
from flintmq.cluster.following import Following
from flintmq.cluster.leading import STALL_NS, Leading, NotInLog, WholeState
from flintmq.cluster.link import GONE_NS, PING_NS, UNREACHED_NS, FollowerLink, LeaderLink, Window
from flintmq.cluster.state import LAG_NS_MAX, Member, PartitionState
from flintmq.wire.peer import (
    Acks,
    Append,
    Close,
    CutTo,
    Farewell,
    Hello,
    Identity,
    NeedState,
    Open,
    Opened,
    PeerError,
    PeerReader,
    Ping,
    Pong,
    Progress,
    ProgressAcks,
    Ready,
    Refusal,
    Refused,
    StartOver,
    StateBegin,
    StatePart,
    Watermarks,
    encode_one,
)

MS = 1_000_000
MEMBERS = {name: Member(name, "boot", False) for name in "abc"}


def state_of(*in_sync, epoch=5, leader="a", replicas=("a", "b")):
    return PartitionState(7, 9, epoch, leader, "1", tuple(MEMBERS[each] for each in in_sync), replicas)


def identity(node):
    return Identity("c", node, "1", "boot", False, 1)


def frames_of(data):
    reader = PeerReader(is_trusted=True)
    reader.receive(data)
    found = []
    while (each := reader.next_frame()) is not None:
        found.append(each[0])
    return found


class Pair:
    """Node ``a`` leads partitions, ``b`` has copies; both on model disks."""

    def __init__(self, count=1, window=None):
        self.now_ns = 0
        self.leader = LeaderLink("b", 0, window)
        self.follower: Any = None
        self.leadings: list[Leading] = []
        self.streams: list[Any] = []
        self.disks: list[Disk] = []
        self.copies: list[Disk] = []
        self.followings: dict[int, Any] = {}
        self.frames: list[tuple[str, Any]] = []
        for number in range(count):
            disk, copy = Disk(), Disk()
            disk.lead(5)
            self.disks.append(disk)
            self.copies.append(copy)
            self.followings[number] = Following("t", number, 7, 9, copy, 0)
            self.leadings.append(Leading("t", number, "a", state_of("a", "b"), 1, disk, end=disk.end))
            self.streams.append(self.leader.add(self.leadings[-1]))

    def find(self, frame, peer):
        return self.followings.get(frame.partition, (Refusal.NOT_HERE, 0, "no such replica"))

    def connect(self):
        self.follower = FollowerLink(identity("a"), self)
        self.leader.connected(identity("b"), self.now_ns)

    def lose(self):
        self.follower.closed()
        self.leader.disconnected(self.now_ns)

    def to_follower(self, bytes_max=1 << 20):
        """What goes out at once arrives; return its size."""
        data = b"".join(map(bytes, self.leader.take_output(self.now_ns, bytes_max)))
        self.frames += [(">", frame) for frame in frames_of(data)]
        self.follower.receive(data)
        return len(data)

    def to_leader(self):
        data = b"".join(map(bytes, self.follower.take_output(self.now_ns)))
        self.frames += [("<", frame) for frame in frames_of(data)]
        self.leader.receive(data, self.now_ns)
        return len(data)

    def settle(self):
        while self.to_follower() + self.to_leader():
            self.now_ns += 1

    def write(self, number=0, messages=1, batches=1):
        for _ in range(batches):
            self.disks[number].write(
                5, [number * 1_000_000 + self.disks[number].end + each for each in range(messages)]
            )
        self.leadings[number].written(self.disks[number].end)

    def flush(self, number=0, **changes):
        disk = self.disks[number]
        change_channels(disk.channels, changes)
        disk.flush_number += 1
        return self.leadings[number].progress(encode_records(changes), disk.committed)

    def pass_time(self, duration_ns, step_ns=100 * MS):
        for _ in range(duration_ns // step_ns):
            self.now_ns += step_ns
            self.leader.tick(self.now_ns)
            if self.follower is not None and self.leader.is_connected:
                self.settle()

    def same(self, number=0):
        disk, copy = self.disks[number], self.copies[number]
        return disk.ids(copy.start, disk.end) == copy.ids(copy.start, copy.end) and disk.end == copy.end

    def kinds(self, direction):
        return [type(frame).__name__ for way, frame in self.frames if way == direction]


def pair_of(*args, **kwargs) -> Any:
    return Pair(*args, **kwargs)


# -- alignment ---------------------------------------------------------------------------------------------------------


def test_a_new_copy_gets_everything():
    pair = pair_of()
    pair.write(messages=3, batches=4)
    pair.connect()
    pair.settle()
    assert pair.same() and pair.copies[0].epoch == 5
    assert pair.leadings[0].watermark == pair.disks[0].end == 12
    assert pair.kinds("<")[:4] == ["Opened", "Ready", "Acks", "Acks"]
    pair.pass_time(200 * MS)
    assert pair.copies[0].committed == 12


def test_a_copy_with_another_end_is_cut_back():
    pair = pair_of()
    disk, copy = pair.disks[0], pair.copies[0]
    for each, epoch, counts in ((disk, 5, [2, 2]), (copy, 4, [2, 5])):
        each.epoch, each.history = 5, []
        each.write(3, list(range(counts[0])))
        each.write(epoch, [epoch * 100 + number for number in range(counts[1])])
    pair.leadings[0].written(disk.end)
    pair.connect()
    pair.settle()
    assert pair.same() and copy.history == [(3, 0), (5, 2)]
    assert (">", CutTo(0, 2)) in pair.frames


def test_a_copy_that_ends_before_the_leaders_log_begins_starts_over():
    pair = pair_of()
    pair.write(messages=2, batches=5)
    pair.disks[0].drop_before(6)
    pair.connect()
    pair.settle()
    assert pair.copies[0].start == 6 and pair.same()
    assert (">", StartOver(0, 6, 48)) in pair.frames


def test_a_copy_whose_next_messages_are_dropped_meanwhile_starts_over():
    pair = pair_of(window=Window(stream_bytes=1, chunk_bytes=1))
    pair.write(messages=2, batches=5)
    pair.connect()
    for _ in range(3):  # opened, ready, the first batch
        pair.to_follower()
        pair.to_leader()
    assert pair.copies[0].end == 2
    pair.disks[0].drop_before(6)
    pair.settle()
    assert pair.copies[0].start == 6 and pair.same() and pair.leadings[0].watermark == 10


def test_a_log_that_cannot_be_read_is_tried_again_and_disturbs_nobody(monkeypatch):
    pair = pair_of(2)
    pair.write(0)
    pair.write(1)

    def read(sequence, bytes_max):
        raise NotInLog("damaged")

    monkeypatch.setattr(pair.leadings[0], "read", read)
    pair.connect()
    pair.settle()
    assert pair.same(1) and not pair.same(0) and "damaged" in pair.streams[0].problem
    monkeypatch.undo()
    pair.pass_time(200 * MS)
    assert pair.same(0) and pair.streams[0].problem == ""


def test_a_replica_that_is_not_there_yet_is_asked_for_again():
    pair = pair_of()
    following = pair.followings.pop(0)
    pair.connect()
    pair.settle()
    assert pair.streams[0].problem == "NOT_HERE: no such replica"
    pair.pass_time(500 * MS)
    pair.followings[0] = following
    pair.pass_time(1000 * MS)
    assert pair.leadings[0].watermark == 0 and pair.streams[0].is_running
    opens = pair.kinds(">").count("Open")
    assert 3 <= opens <= 8  # less often each time


def test_a_connection_that_is_lost_is_made_good():
    pair = pair_of()
    pair.connect()
    pair.settle()
    pair.write(batches=3)
    pair.to_follower()  # and the acknowledgement is lost
    pair.lose()
    pair.write(batches=3)
    pair.connect()
    pair.settle()
    assert pair.same() and pair.leadings[0].watermark == 6


def test_a_leader_that_hears_of_a_later_one_stops():
    pair = pair_of(2)
    pair.connect()
    pair.settle()
    pair.followings[0].superseded(6)
    pair.settle()
    assert pair.leadings[0].is_ended and pair.leadings[0].superseded_by == 6 and not pair.leadings[1].is_ended
    pair.write(1)
    pair.settle()
    assert pair.same(1)


def test_a_later_epoch_of_a_partition_takes_the_place_of_an_earlier_one():
    pair = pair_of()
    pair.connect()
    pair.settle()
    pair.write()
    state = state_of("a", "b", epoch=7)
    pair.disks[0].lead(7)
    leading = Leading("t", 0, "a", state, 3, pair.disks[0], end=1)
    pair.leader.add(leading)
    pair.settle()
    assert leading.watermark == 1 and pair.copies[0].epoch == 7 and len(pair.leader.streams) == 1
    pair.leader.remove("t", 0)
    pair.settle()
    assert pair.followings[0].stream is None and (">", Close(1)) in pair.frames


def test_two_connections_of_the_same_leader():
    """The one before is not known to be broken yet at the follower."""
    pair = pair_of()
    pair.connect()
    pair.settle()
    old = pair.follower
    pair.leader.disconnected(pair.now_ns)
    pair.connect()
    pair.settle()
    assert frames_of(b"".join(old.take_output(0))) == [Refused(0, 5, Refusal.TAKEN)]
    old.closed()
    pair.write()
    pair.settle()
    assert pair.same()


def test_a_broken_copy_is_told_to_its_leader_alone():
    pair = pair_of(2)
    pair.connect()
    pair.settle()
    pair.followings[0].broken = RuntimeError("disk")
    pair.lose()
    pair.connect()
    pair.settle()
    assert pair.leadings[0].wanted_state().in_sync_nodes == ("a",)
    assert pair.leadings[1].wanted_state() is None and pair.streams[0].problem == "BROKEN: disk"


# -- flow --------------------------------------------------------------------------------------------------------------


def test_a_stream_has_a_bound_of_what_is_not_acknowledged():
    pair = pair_of(window=Window(stream_bytes=100, chunk_bytes=40))
    pair.connect()
    pair.settle()
    pair.write(messages=2, batches=100)  # 40 bytes each
    while pair.to_follower():
        pass
    assert pair.streams[0].flying_bytes == 120 and not pair.leader.has_output
    pair.settle()
    assert pair.same() and pair.streams[0].flying_bytes == pair.leader._flying_bytes == 0


def test_a_follower_that_does_not_read_costs_its_window():
    """Nothing is read from the log before there is room for it."""
    pair = pair_of(4, window=Window(link_bytes=200, stream_bytes=100, chunk_bytes=40))
    pair.connect()
    pair.settle()
    for number in range(4):
        pair.write(number, messages=2, batches=100)
    size = sum(sum(map(len, pair.leader.take_output(0, 10_000))) for _ in range(50))
    assert size < 400 and sum(disk.read_count for disk in pair.disks) <= 6
    pair.write(0)
    assert pair.leader.take_output(0) == [] and not pair.leader.has_output


def test_new_messages_go_before_those_of_somebody_who_catches_up():
    window = Window(link_bytes=1 << 20, stream_bytes=1 << 19, chunk_bytes=1000)
    pair = pair_of(3, window=window)
    pair.connect()
    pair.settle()
    pair.write(0, messages=10, batches=1000)  # 104 KB
    pair.to_follower(1)
    assert pair.streams[0].is_behind
    pair.write(1)
    pair.write(2)
    data = b"".join(map(bytes, pair.leader.take_output(0, 2000)))
    appends = [frame.stream for frame in frames_of(data) if isinstance(frame, Append)]
    behind = pair.streams[0].number
    assert appends[:2] == [pair.streams[1].number, pair.streams[2].number] and set(appends[2:]) == {behind}
    assert len(appends) <= 5  # of those, what fits and one more


@pytest.mark.slow
def test_somebody_who_catches_up_arrives_although_others_always_have_news():
    window = Window(link_bytes=1 << 20, stream_bytes=1 << 19, chunk_bytes=1000)
    pair = pair_of(2, window=window)
    pair.write(0, messages=10, batches=500)
    pair.connect()
    turns = 0
    while not pair.same(0):
        pair.write(1, messages=100)  # as much as is taken at once
        pair.to_follower(800)
        pair.to_leader()
        turns += 1
        assert turns < 1000
    assert pair.streams[1].phase.name == "RUNNING"


def test_catching_up_takes_half_of_the_window():
    window = Window(link_bytes=1000, stream_bytes=10_000, chunk_bytes=100)
    pair = pair_of(2, window=window)
    pair.write(0, messages=2, batches=100)
    pair.connect()
    for _ in range(2):
        pair.to_follower()
        pair.to_leader()
    while pair.to_follower():
        pass
    assert 500 <= pair.leader._flying_bytes < 700
    pair.write(1)
    assert pair.to_follower()


def test_watermarks_are_told_by_the_way_or_soon():
    pair = pair_of(3)
    pair.connect()
    pair.settle()
    pair.pass_time(200 * MS)
    pair.frames.clear()
    for number in range(3):
        pair.write(number)
    pair.settle()
    assert "Watermarks" not in pair.kinds(">") and pair.copies[0].committed == 0
    pair.now_ns += 100 * MS
    pair.leader.tick(pair.now_ns)
    pair.settle()
    assert pair.kinds(">").count("Watermarks") == 1 and [each.committed for each in pair.copies] == [1, 1, 1]
    pair.write(0)
    pair.write(0)
    pair.settle()
    pair.write(0)
    pair.to_follower()
    assert pair.copies[0].committed == 3  # with the message


def test_acknowledgements_of_a_turn_are_one_frame():
    pair = pair_of(50)
    pair.connect()
    pair.settle()
    pair.frames.clear()
    for number in range(50):
        pair.write(number)
    pair.to_follower()
    pair.to_leader()
    assert pair.kinds("<") == ["Acks"] and len(pair.frames[-1][1].ends) == 50


def test_a_copy_that_syncs_acknowledges_afterwards():
    pair = pair_of()
    pair.copies[0].needs_sync = True
    pair.connect()
    pair.settle()
    pair.write()
    pair.settle()
    assert pair.leadings[0].watermark == 0 and pair.follower.take_appended() == [pair.followings[0]]
    pair.copies[0].synced_end = 1
    pair.followings[0].synced()
    pair.settle()
    assert pair.leadings[0].watermark == 1 and pair.follower.take_appended() == []


def test_idle_streams_cost_nothing(monkeypatch):
    pair = pair_of(300)
    pair.connect()
    pair.settle()
    pair.pass_time(1000 * MS)
    touched: list[Any] = []
    monkeypatch.setattr(link_module.LeaderStream, "leading", property(touched.append))
    pair.frames.clear()
    pair.pass_time(5000 * MS)
    assert touched == [] and set(pair.kinds(">")) == {"Ping"} and set(pair.kinds("<")) == {"Pong"}


# -- time --------------------------------------------------------------------------------------------------------------


def test_confirmations_have_the_time_of_the_question():
    pair = pair_of()
    pair.connect()
    pair.settle()
    assert pair.streams[0].confirmed_ns is None
    pair.now_ns += PING_NS
    asked_ns = pair.now_ns
    pair.leader.tick(asked_ns)
    pair.to_follower()
    pair.now_ns += 100 * MS
    pair.to_leader()
    assert pair.streams[0].confirmed_ns == asked_ns and pair.leadings[0].is_confirmed(asked_ns)
    assert pair.followings[0].confirmed_ns == asked_ns + 100 * MS
    pair.lose()
    assert not pair.leadings[0].is_confirmed(asked_ns)
    assert pair.followings[0].confirmed_ns == asked_ns + 100 * MS


def test_a_confirmation_counts_for_streams_that_were_open_when_it_was_asked_for():
    pair = pair_of()
    following = pair.followings.pop(0)
    pair.connect()
    pair.settle()
    pair.leader.tick(pair.now_ns)
    pair.followings[0] = following
    pair.leader._refuse(pair.streams[0], "again")
    pair.now_ns += 60 * MS
    pair.leader.tick(pair.now_ns)
    pair.settle()
    assert pair.streams[0].is_running and pair.leader.confirmed_ns is not None
    assert pair.streams[0].confirmed_ns is None


def test_a_node_that_follows_another_does_not_confirm():
    pair = pair_of()
    pair.connect()
    pair.settle()
    pair.followings[0].superseded(9)
    pair.leader.tick(pair.now_ns + PING_NS)
    pair.to_follower()
    pair.to_leader()
    assert [type(frame).__name__ for way, frame in pair.frames if way == "<"][-2:] == ["Refused", "Pong"]
    assert pair.leadings[0].is_ended


def test_a_node_that_is_silent_leaves_all_its_partitions():
    pair = pair_of(3)
    pair.connect()
    pair.settle()
    pair.follower = None
    now_ns = pair.now_ns
    while not pair.leader.is_silent:
        pair.now_ns += 100 * MS
        pair.leader.tick(pair.now_ns)
    assert LAG_NS_MAX <= pair.now_ns - now_ns <= LAG_NS_MAX + 200 * MS
    assert [each.wanted_state().in_sync_nodes for each in pair.leadings] == [("a",)] * 3
    late: Any = Leading("t", 9, "a", state_of("a", "b"), 1, Disk(), end=0)
    pair.leader.add(late)
    assert late.wanted_state().in_sync_nodes == ("a",)  # nobody waits for it once more
    pair.leader.receive(encode_one(Pong(0)), pair.now_ns)
    assert not pair.leader.is_silent and pair.leadings[0].wanted_state() is None


def test_a_node_that_is_silent_for_longer_than_a_lease_is_not_reached():
    pair = pair_of()
    (leading,) = pair.leadings
    pair.connect()
    pair.settle()
    pair.follower = None
    pair.pass_time(LAG_NS_MAX + 100 * MS)
    assert leading.followers["b"].is_silent and not leading.followers["b"].is_unreached
    pair.pass_time(UNREACHED_NS - LAG_NS_MAX)
    assert leading.followers["b"].is_unreached and not leading.followers["b"].is_dead
    late: Any = Leading("t", 9, "a", state_of("a", "b"), 1, Disk(), end=0)
    pair.leader.add(late)
    assert late.followers["b"].is_unreached
    pair.leader.presume_dead()  # by now its lease is over
    assert leading.followers["b"].is_dead and late.followers["b"].is_dead
    pair.leader.lives()  # it has another one
    assert not leading.followers["b"].is_dead and leading.followers["b"].is_unreached
    pair.pass_time(GONE_NS - UNREACHED_NS - 100 * MS)
    assert not leading.followers["b"].is_gone
    pair.pass_time(100 * MS)
    later: Any = Leading("t", 10, "a", state_of("a", "b"), 1, Disk(), end=0)
    pair.leader.add(later)
    followers = [each.followers["b"] for each in (leading, late, later)]
    assert all(each.is_gone and each.is_silent for each in followers)
    pair.leader.receive(encode_one(Pong(0)), pair.now_ns)
    assert not any(each.is_unreached or each.is_dead or each.is_gone or each.is_silent for each in followers)


def test_a_node_whose_port_refuses_is_gone_at_once():
    pair = pair_of()
    (leading,) = pair.leadings
    pair.connect()
    pair.settle()
    pair.follower = None
    pair.leader.presume_dead()
    assert leading.followers["b"].is_dead and not leading.followers["b"].is_gone
    pair.leader.presume_dead(is_refused=True)
    assert leading.followers["b"].is_dead and leading.followers["b"].is_gone


def test_a_node_that_never_answers_is_silent():
    pair = pair_of()
    pair.pass_time(LAG_NS_MAX)
    assert pair.leader.is_silent
    pair.connect()
    pair.settle()
    assert not pair.leader.is_silent and pair.leadings[0].wanted_state() is None


def test_who_waits_for_another_member_is_asked_whether_it_lives():
    """A leader that cannot tell yet what is committed has nothing to say to those who have everything."""
    pair = pair_of()
    wanted: list[bool] = []
    link = pair.leader = LeaderLink("b", 0, on_output=lambda: wanted.append(True))
    link.add(Leading("t", 0, "a", state_of("a", "b", "c"), 1, pair.disks[0], end=0))
    pair.connect()
    while pair.now_ns < 2 * LAG_NS_MAX:
        pair.now_ns += 100 * MS
        link.tick(pair.now_ns)
        while wanted:
            del wanted[:]
            pair.settle()
    assert not link.is_silent


def test_a_node_that_is_known_to_be_dead_is_not_waited_for():
    pair = pair_of()
    pair.leader.presume_dead()
    assert pair.leadings[0].wanted_state().in_sync_nodes == ("a",)


def test_a_process_that_follows_leads_no_longer():
    pair = pair_of()
    (leading,), process = pair.leadings, identity("b").incarnation
    assert not pair.leader.is_followed_by(leading, process)
    pair.connect()
    pair.to_follower()
    assert not pair.leader.is_followed_by(leading, process), "it has not answered"
    pair.settle()
    assert pair.leader.is_followed_by(leading, process)
    assert not pair.leader.is_followed_by(leading, "another one"), "that led on this node before"
    pair.lose()
    assert not pair.leader.is_followed_by(leading, process)


def test_a_leader_that_stood_still_does_not_blame_others():
    pair = pair_of()
    pair.connect()
    pair.settle()
    pair.now_ns += 60 * STALL_NS
    pair.leader.tick(pair.now_ns)
    assert not pair.leader.is_silent


# -- progress ----------------------------------------------------------------------------------------------------------


def test_progress_follows_the_messages_it_needs():
    pair = pair_of()
    pair.connect()
    pair.settle()
    assert pair.copies[0].progress == (5, 0)  # the whole state, of which there is nothing
    pair.write(messages=5)
    pair.disks[0].committed = 5
    told: list[Any] = []
    pair.leadings[0].when_progress_replicated(pair.flush(channel=3), told.append)
    kinds = len(pair.frames)
    pair.to_follower()
    assert [type(frame).__name__ for _, frame in pair.frames[kinds:]] == ["Append", "Progress"]
    assert told == []
    pair.to_leader()
    assert told == [None] and pair.copies[0].channels == {"channel": 3} and pair.copies[0].progress == (5, 1)


def test_progress_goes_on_after_a_lost_connection():
    pair = pair_of()
    pair.connect()
    pair.settle()
    pair.flush(one=1)
    pair.settle()
    pair.frames.clear()
    pair.flush(two=2)
    pair.to_follower()  # and the acknowledgement is lost
    pair.lose()
    pair.connect()
    pair.settle()
    pair.flush(three=3)
    pair.settle()
    assert pair.copies[0].channels == {"one": 1, "two": 2, "three": 3}
    assert "StateBegin" not in pair.kinds(">")


def test_progress_that_is_missing_is_made_good_by_the_whole_state():
    pair = pair_of()
    pair.connect()
    pair.settle()
    pair.lose()
    for count in range(5):
        pair.flush(**{f"channel{count}": count})
    pair.connect()
    pair.settle()
    assert pair.copies[0].channels == pair.disks[0].channels and pair.copies[0].progress == (5, 5)
    assert pair.kinds(">").count("StatePart") == 3
    pair.flush(channel1=None)
    pair.settle()
    assert pair.copies[0].channels == pair.disks[0].channels and pair.copies[0].progress == (5, 6)


def test_a_new_epoch_goes_on_from_the_same_position():
    pair = pair_of()
    pair.leadings[0].base = pair.copies[0].progress = (4, 9)
    pair.connect()
    pair.settle()
    pair.flush(one=1)
    pair.settle()
    assert "StateBegin" not in pair.kinds(">") and pair.copies[0].progress == (5, 1)
    assert (">", Progress(0, (5, 1), (4, 9), 0)) in pair.frames


def test_a_follower_may_ask_for_the_whole_state():
    pair = pair_of()
    pair.connect()
    pair.settle()
    pair.disks[0].channels = {"one": 1}
    pair.leader.receive(encode_one(NeedState(0)), 0)
    pair.settle()
    assert pair.copies[0].channels == {"one": 1}


def test_few_states_are_under_way_at_once():
    pair = pair_of(6)
    asked: list[Any] = []
    for disk in pair.disks:
        disk.whole_state = asked.append
    pair.connect()
    pair.settle()
    assert len(asked) == link_module.STATES_MAX
    for count in range(6):
        asked[count](WholeState(0, 0, []))
        asked[count](WholeState(0, 0, []))  # nobody asked for it a second time
        pair.settle()
    assert [copy.progress for copy in pair.copies] == [(5, 0)] * 6 and len(asked) == 6


def test_a_state_that_cannot_be_had_now_is_asked_for_again():
    pair = pair_of()
    asked: list[Any] = []
    pair.disks[0].whole_state = asked.append
    pair.connect()
    pair.settle()
    asked.pop()(None)
    pair.pass_time(200 * MS)
    asked.pop()(WholeState(0, 0, []))
    pair.settle()
    assert pair.copies[0].progress == (5, 0)


def test_an_answer_for_a_stream_that_has_ended_is_nobodys():
    pair = pair_of()
    asked: list[Any] = []
    pair.disks[0].whole_state = asked.append
    pair.connect()
    pair.settle()
    pair.lose()
    pair.connect()
    pair.settle()
    asked[0](WholeState(7, 0, []))
    pair.settle()
    assert pair.copies[0].progress == (0, 0)
    asked[1](WholeState(0, 0, []))
    pair.settle()
    assert pair.copies[0].progress == (5, 0)


class Spilled:
    """A state of which all but the first part is read when it is asked for."""

    def __init__(self, count):
        self.left = [encode_records({f"channel{number}": number}) for number in range(count)]
        self.asked: list[Any] = []
        self.is_closed = False

    def state(self, number=0):
        return WholeState(number, 0, [self.left.pop(0)], self.asked.append, self.close)

    def close(self):
        assert not self.is_closed
        self.is_closed = True

    def give(self, count=1):
        given, self.left = self.left[:count], self.left[count:]
        self.asked.pop(0)(given)


def spilled_pair(count):
    pair, spilled = pair_of(), Spilled(count)
    pair.disks[0].whole_state = lambda done: done(spilled.state())
    pair.connect()
    pair.settle()
    return pair, spilled


def test_a_state_is_read_when_there_is_room_for_it():
    pair, spilled = spilled_pair(7)
    for _ in range(6):
        assert len(spilled.asked) == 1 and not spilled.is_closed and pair.copies[0].progress == (0, 0)
        spilled.give()
        pair.settle()
    spilled.give()
    pair.settle()
    assert pair.copies[0].channels == {f"channel{number}": number for number in range(7)}
    assert pair.copies[0].progress == (5, 0) and spilled.is_closed and not spilled.asked


def test_a_follower_that_does_not_write_is_sent_no_more_of_a_state():
    pair, spilled = spilled_pair(7)
    pending: list[Any] = []
    pair.copies[0].later = pending.append
    spilled.give(6)
    pair.settle()
    assert pair.kinds(">").count("StatePart") == 1 + link_module.STATE_PARTS_MAX
    while pending:
        pending.pop(0)()
        pair.settle()
    assert pair.kinds(">").count("StatePart") == 7 and len(spilled.asked) == 1
    spilled.give()
    pair.settle()
    while pending:
        pending.pop(0)()
        pair.settle()
    assert len(pair.copies[0].channels) == 7


def test_a_state_that_cannot_be_read_further_is_sent_again_from_its_beginning():
    pair, spilled = spilled_pair(3)
    spilled.asked.pop()(None)
    assert spilled.is_closed
    again = Spilled(2)
    pair.disks[0].whole_state = lambda done: done(again.state())
    pair.settle()
    pair.pass_time(200 * MS)
    pair.settle()
    again.give(2)
    pair.settle()
    again.give()
    pair.settle()
    assert pair.copies[0].channels == {"channel0": 0, "channel1": 1} and pair.copies[0].staged == []


@pytest.mark.parametrize("end", ["lost", "closed", "silent"])
def test_what_a_state_is_read_from_is_let_go_with_its_stream(end):
    pair, spilled = spilled_pair(3)
    if end == "lost":
        pair.lose()
    elif end == "closed":
        pair.leader.remove("t", 0)
    else:
        pair.leader.presume_dead()
    assert spilled.is_closed
    spilled.give()  # for nobody
    pair.leader.take_output(pair.now_ns)


def test_a_peer_that_does_not_read_is_not_told_ever_more():
    pair = pair_of(50)
    pair.connect()
    pair.settle()
    for _ in range(1000):
        pair.now_ns += 100 * MS
        for leading, stream in zip(pair.leadings, pair.streams, strict=True):
            leading.watermark = (leading.watermark or 0) + 1
            pair.leader.wake_watermark(stream)
        pair.leader.tick(pair.now_ns)
    assert len(pair.leader.take_output(pair.now_ns)) < 5
    pair.leader.tick(pair.now_ns + PING_NS)
    assert "Watermarks" in [type(frame).__name__ for frame in frames_of(b"".join(pair.leader.take_output(pair.now_ns)))]


# -- peers that lie ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (Acks([(0, 3)]), "an acknowledgement of 3 on stream 0, which was sent 2"),
        (Acks([(0, 1)]), "acknowledged 1 after 2"),
        (Acks([(7, 1)]), "stream 7, which was never opened"),
        (ProgressAcks([(0, 1)]), "an acknowledgement of progress 1 on stream 0, never sent"),
        (Opened(0, [], 0, 0, (0, 0)), "Opened of stream 0 out of turn"),
        (Ready(0, 2), "Ready of stream 0 out of turn"),
        (Refused(0, 5, Refusal.HIGHER_EPOCH), "because of epoch 5"),
        (Pong(1 << 60), "an answer to a ping that was never sent"),
        (Ping(1), "Ping, which only a leader sends"),
        (Farewell("bored"), "node b closed the connection: bored"),
    ],
)
def test_a_follower_that_breaks_a_rule_is_told_which(frame, words):
    pair = pair_of()
    pair.write(messages=2)
    pair.connect()
    pair.settle()
    with pytest.raises(PeerError, match=words):
        pair.leader.receive(encode_one(frame), 0)


@pytest.mark.parametrize(
    ("frame", "words"),
    [(Ready(0, 1), "was told 0"), (Ready(0, 99), "was told 0"), (NeedState(0), "out of turn")],
)
def test_a_follower_that_is_not_ready_where_it_was_told(frame, words):
    pair = pair_of()
    pair.write(messages=2)
    pair.connect()
    pair.to_follower()
    pair.to_leader()
    with pytest.raises(PeerError, match=words):
        pair.leader.receive(encode_one(frame), 0)


def test_what_is_still_under_way_for_a_closed_stream_is_passed_over():
    pair = pair_of()
    pair.connect()
    pair.settle()
    pair.leader.remove("t", 0)
    for frame in (Acks([(0, 3)]), ProgressAcks([(0, 1)]), Ready(0, 2), Refused(0, 9, Refusal.HIGHER_EPOCH)):
        pair.leader.receive(encode_one(frame), 0)
    assert not pair.leadings[0].is_ended


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (Append(5, 0, 0), "stream 5, which is not open"),
        (Watermarks([(5, 0)]), "stream 5, which is not open"),
        (Open(0, "t", 0, 7, 9, 5), "opened stream 0, with 1 open"),
        (StatePart(0), "did not begin"),
        (StateBegin(0, (5, 1), 99), "needs the log up to 99"),
        (Pong(1), "Pong, which only a follower sends"),
        (Hello(b"FMQP", identity("x"), b"n" * 32), "Hello, which only a follower sends"),
        (Farewell("bored"), "node a closed the connection: bored"),
    ],
)
def test_a_leader_that_breaks_a_rule_is_told_which(frame, words):
    pair = pair_of()
    pair.connect()
    pair.settle()
    with pytest.raises(PeerError, match=words):
        pair.follower.receive(encode_one(frame))


def test_streams_are_opened_some_at_a_time_and_nothing_overtakes_them():
    pair = pair_of(5)
    pair.follower = FollowerLink(identity("a"), pair)
    opens = b"".join(encode_one(Open(number, "t", number, 7, 9, 5)) for number in range(5))
    assert pair.follower.receive(opens + encode_one(Ping(1)), 2)
    assert len(frames_of(b"".join(pair.follower.take_output(0)))) == 2
    assert pair.follower.receive(encode_one(Ping(2)), 0), "it is kept for later"
    assert pair.follower.receive(b"", 2)
    assert len(frames_of(b"".join(pair.follower.take_output(0)))) == 2
    assert not pair.follower.receive(b"", 2)
    last = frames_of(b"".join(pair.follower.take_output(0)))
    assert [type(each) for each in last] == [Opened, Pong] and last[1] == Pong(2)


def test_a_leader_that_does_not_read_is_let_go(monkeypatch):
    monkeypatch.setattr(link_module, "REPLIES_BYTES_MAX", 1000)
    pair = pair_of()
    pair.follower = FollowerLink(identity("a"), pair)
    with pytest.raises(PeerError, match="does not read"):
        for number in range(1000):
            pair.follower.receive(encode_one(Open(number, "t", 5, 7, 9, 5)) + encode_one(Close(number)))
    follower = FollowerLink(identity("a"), pair)
    for count in range(1000):
        follower.receive(encode_one(Ping(count)))
    assert frames_of(b"".join(follower.take_output(0))) == [Pong(999)]


def test_streams_of_a_connection_are_bounded(monkeypatch):
    monkeypatch.setattr(link_module, "STREAMS_MAX", 3)
    pair = pair_of()
    follower = FollowerLink(identity("a"), pair)
    with pytest.raises(PeerError, match="with 3 open, at most 3"):
        for number in range(4):
            follower.receive(encode_one(Open(number, "t", 5, 7, 9, 5)))


FROM_FOLLOWER = st.one_of(
    st.builds(Acks, st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=3)),
    st.builds(ProgressAcks, st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=3)),
    st.builds(Opened, st.integers(0, 2), st.just([]), st.integers(0, 3), st.integers(0, 3), st.just((0, 0))),
    st.builds(Ready, st.integers(0, 2), st.integers(0, 5)),
    st.builds(Refused, st.integers(0, 2), st.integers(4, 7), st.sampled_from(Refusal)),
    st.builds(NeedState, st.integers(0, 2)),
    st.builds(Pong, st.integers(0, 10)),
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(FROM_FOLLOWER, st.sampled_from(["write", "flush", "take", "tick"])), max_size=25))
def test_whatever_a_follower_says_the_leader_keeps_its_own_rules(steps):
    pair = pair_of(2)
    pair.connect()
    watermarks: list[Any] = [None, None]
    for step in steps:
        if step == "write":
            pair.write(0)
        elif step == "flush":
            pair.flush(channel=1)
        elif step == "take":
            pair.leader.take_output(0)
        elif step == "tick":
            pair.now_ns += 300 * MS
            pair.leader.tick(pair.now_ns)
        else:
            try:
                pair.leader.receive(encode_one(step), pair.now_ns)
            except PeerError:
                pair.leader.disconnected(pair.now_ns)
                pair.leader.connected(identity("b"), pair.now_ns)
        for number, leading in enumerate(pair.leadings):
            assert leading.watermark is None or leading.watermark >= (watermarks[number] or 0)
            assert leading.watermark is None or leading.watermark <= pair.disks[number].end
            watermarks[number] = leading.watermark
        link = pair.leader
        assert link._flying_bytes == sum(each.flying_bytes for each in link.streams.values()) >= 0
        assert link._behind_bytes == sum(each.behind_bytes for each in link.streams.values()) >= 0


FROM_LEADER = st.one_of(
    st.builds(Open, st.integers(0, 2), st.just("t"), st.integers(0, 2), st.just(7), st.just(9), st.integers(3, 7)),
    st.builds(Close, st.integers(0, 2)),
    st.builds(CutTo, st.integers(0, 2), st.integers(0, 3)),
    st.builds(StartOver, st.integers(0, 2), st.integers(0, 3), st.just(0)),
    st.builds(Append, st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)),
    st.builds(Watermarks, st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=3)),
    st.builds(StateBegin, st.integers(0, 2), st.tuples(st.integers(4, 6), st.integers(0, 3)), st.integers(0, 3)),
    st.builds(Ping, st.integers(0, 10)),
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(FROM_LEADER, max_size=25))
def test_whatever_a_leader_says_the_copy_keeps_its_own_rules(frames):
    pair = pair_of(2)
    follower = FollowerLink(identity("a"), pair)
    epochs = [0, 0]
    for frame in frames:
        try:
            follower.receive(encode_one(frame))
            follower.take_output(0)
        except PeerError:
            follower.closed()
            follower = FollowerLink(identity("a"), pair)
        for number, copy in enumerate(pair.copies):
            assert copy.epoch >= epochs[number] and copy.committed <= copy.end
            epochs[number] = copy.epoch
