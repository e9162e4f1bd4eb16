"""A led partition: its watermark, its in-sync set, its progress."""

from typing import Any

import msgspec
import pytest

from flintmq.cluster import leading as leading_module
from flintmq.cluster.history import LogShape
from flintmq.cluster.leading import ALL_FLOORS, Leading, LeadingEnded
from flintmq.cluster.state import LAG_NS_MAX, LEASE_TTL_S, Member, NodeRecord, PartitionState, elected, without
from flintmq.cluster.steadiness import Steadiness

S = 1_000_000_000


def member(node, boot_id="boot", syncs=False):
    return Member(node, boot_id, syncs)


def state_of(*in_sync, replicas=("a", "b", "c"), epoch=5, leader="a"):
    members = tuple(each if isinstance(each, Member) else member(each) for each in in_sync)
    return PartitionState(7, 9, epoch, leader, "1", members, replicas)


class Stream:
    def __init__(self):
        self.confirmed_ns = None
        self.heard_ns = 1 << 62
        self.sent = -1
        self.state_number = None
        self.woken = self.watermarks = self.floors_woken = 0

    def wake(self):
        self.woken += 1

    def wake_watermark(self):
        self.watermarks += 1

    def wake_floors(self):
        self.floors_woken += 1


class Log:
    def __init__(self):
        self.reads = 0

    def shape(self):
        return LogShape([(5, 0)], 0, 100)

    def read(self, sequence, bytes_max):
        self.reads += 1
        return b"x" * 10, sequence + 10, 3

    def whole_state(self, done):
        raise NotImplementedError


class Case:
    """A leader ``a`` with its log at 100, and its followers connected."""

    def __init__(self, state=None, connected=("b", "c"), level=False, **options):
        self.changes = 0
        self.revision = 10
        self.log = Log()
        state = state or state_of("a", "b", "c")
        self.leading: Any = Leading("t", 0, "a", state, 10, self.log, end=100, on_change=self.note, **options)
        self.streams: dict[str, Any] = {}
        for node in connected:
            self.connect(node)
        if level:
            for node in connected:
                self.leading.acked(node, 100, 0)
                self.leading.progress_acked(node, 0, 0)
                self.leading.floors_acked(node, 0, 0)

    def note(self, leading):
        self.changes += 1

    def connect(self, node, **kind):
        self.streams[node] = Stream()
        self.leading.opened(node, member(node, **kind), self.streams[node])

    def swap(self):
        """What it wants is written to the store."""
        state = self.leading.wanted_state()
        self.leading.swap_began(state)
        self.revision += 1
        self.leading.swap_ended(state, self.revision)
        return state.in_sync_nodes

    def pass_time(self, first_ns, last_ns, step_ns=S // 5):
        for now_ns in range(first_ns, last_ns + 1, step_ns):
            self.leading.tick(now_ns)


# -- the watermark -----------------------------------------------------------------------------------------------------


def test_nothing_is_committed_before_every_member_has_the_whole_log_in_this_epoch():
    case = Case()
    leading = case.leading
    assert leading.watermark is None and leading.is_writable
    leading.written(120)
    leading.acked("b", 120, 0)
    leading.acked("c", 99, 0)
    assert leading.watermark is None
    leading.acked("c", 100, 0)
    assert leading.watermark == 100
    leading.acked("c", 110, 0)
    assert leading.watermark == 110
    assert case.streams["b"].watermarks == 2


def test_a_leader_alone_commits_at_once():
    leading = Case(state_of("a"), connected=()).leading
    assert leading.watermark == 100
    leading.written(150)
    assert leading.watermark == 150


def test_its_own_copy_counts_as_far_as_it_is_synced():
    leading = Case(state_of("a"), connected=(), needs_sync=True).leading
    assert leading.watermark is None
    leading.synced(100)
    leading.written(130)
    assert leading.watermark == 100
    leading.synced(120)
    assert leading.watermark == 120


def test_the_watermark_never_goes_back():
    case = Case(level=True)
    case.leading.written(120)
    case.leading.acked("b", 120, 0)
    case.leading.acked("c", 110, 0)
    assert case.leading.watermark == 110
    case.connect("c")  # it lost power, and says how far it is now
    case.leading.acked("c", 40, 0)
    assert case.leading.watermark == 110
    with pytest.raises(ValueError, match="acknowledged 39 after 40"):
        case.leading.acked("c", 39, 0)


def test_who_is_not_in_sync_does_not_hold_it():
    case = Case(state_of("a", "b"), level=True)
    case.leading.written(120)
    case.leading.acked("b", 120, 0)
    assert case.leading.watermark == 120


def test_below_the_demanded_number_nothing_is_acknowledged():
    case = Case(state_of("a", "b"), connected=("b",), level=True, min_in_sync=2)
    leading = case.leading
    leading.written(120)
    leading.silent("b")
    leading.gone("b")
    assert case.swap() == ("a",)
    assert leading.watermark == 100 and not leading.is_writable
    leading.heard("b")
    leading.acked("b", 120, 0)
    assert leading.watermark == 100
    assert case.swap() == ("a", "b")
    assert leading.watermark == 120 and leading.is_writable


def test_below_the_demanded_number_what_was_there_at_the_election_is_committed_all_the_same():
    leading = Case(state_of("a"), connected=(), min_in_sync=2).leading
    assert leading.watermark == 100 and not leading.is_writable
    leading.written(120)
    assert leading.watermark == 100
    leading.min_in_sync_changed(1)
    assert leading.watermark == 120 and leading.is_writable


# -- who is in sync ----------------------------------------------------------------------------------------------------


def test_a_silent_member_holds_the_watermark_until_the_store_has_it_out():
    case = Case(level=True)
    leading = case.leading
    leading.written(120)
    leading.acked("b", 120, 0)
    leading.silent("c")
    wanted = leading.wanted_state()
    assert wanted == without(leading.state, ["c"])
    leading.swap_began(wanted)
    assert leading.watermark == 100 and leading.wanted_state() is None
    leading.swap_ended(None)  # no answer: it may have been written
    assert leading.watermark == 100 and leading.wanted_state() == wanted
    leading.swap_began(wanted)
    leading.swap_ended(wanted, 11)
    assert leading.watermark == 120 and leading.wanted_state() is None


# -- who cannot reach enough -------------------------------------------------------------------------------------------


def test_what_a_process_acknowledged_says_nothing_of_the_one_that_takes_its_place():
    case = Case(level=True)
    leading = case.leading
    leading.written(120)
    leading.acked("b", 120, 0)
    leading.replaced("b")
    leading.acked("c", 120, 0)
    assert leading.watermark == 100, "of two processes with copies of one directory the other one may lack it"
    assert leading.wanted_state() is None, "it is in sync until it says what it has"
    case.connect("b")
    leading.acked("b", 110, 0)
    assert leading.watermark == 110 and leading.wanted_state() is None
    leading.replaced("b")
    case.connect("b")
    leading.acked("b", 90, 0)
    assert leading.wanted_state().in_sync_nodes == ("a", "c"), "it lacks what is committed"
    leading.replaced("nobody")


def test_a_change_that_the_store_refuses_for_another_reason_is_wanted_again():
    case = Case(state_of("a", "b"), level=True)
    leading = case.leading
    wanted = leading.wanted_state()
    assert wanted.in_sync_nodes == ("a", "b", "c")
    leading.swap_began(wanted)
    assert leading.wanted_state() is None
    leading.swap_ended(None)
    assert leading.wanted_state() is wanted, "it may have been carried out"
    leading.swap_began(wanted)
    leading.closed("c", case.streams["c"])
    leading.swap_refused()
    assert leading.wanted_state() is None, "it never will be, and nobody is to join any more"
    leading.written(120)
    leading.acked("b", 120, 0)
    assert leading.watermark == 120


class Strandable(Case):
    """It needs two in sync.

    Attributes:
        asked: states from which others would lead, and who is not counted on.
        answer: whether they could.
    """

    def __init__(self, *in_sync):
        self.asked: list[Any] = []
        self.answer = True
        state = state_of(*(in_sync or ("a", "b", "c")))
        connected = [node for node in ("b", "c") if node in in_sync or not in_sync]
        super().__init__(state, connected, level=True, min_in_sync=2, can_go_on=self.could)

    def could(self, state, away, least):
        self.asked.append((state.leader, state.in_sync_nodes, sorted(away), least))
        return self.answer

    def lose(self, *nodes, is_long=True, is_gone=False):
        for node in nodes:
            self.leading.silent(node)
            if is_long:
                self.leading.unreached(node)
            if is_gone:
                self.leading.gone(node)


def test_a_leader_that_reaches_nobody_has_others_lead():
    case = Strandable()
    leading = case.leading
    leading.written(120)
    case.lose("b")
    assert leading.wanted_state() == without(leading.state, ["b"]), "with c there are enough"
    case.lose("c", is_long=False)
    assert leading.wanted_state() is None, "who is dead would be among the living still"
    assert leading.is_writable and not leading.gives_up
    leading.unreached("c")
    wanted = leading.wanted_state()
    assert (wanted.leader, wanted.in_sync_nodes, wanted.epoch) == ("", ("b", "c"), leading.epoch)
    assert case.asked[-1] == ("", ("b", "c"), ["a"], 2)
    leading.swap_began(wanted)
    assert leading.gives_up and not leading.is_writable
    leading.swap_ended(None)  # no answer: it may have been written
    leading.heard("b")
    assert leading.gives_up and leading.wanted_state() == wanted, "and may still be"
    leading.swap_began(wanted)
    leading.swap_ended(wanted, 11)
    assert leading.is_ended and leading.watermark == 100


def test_who_is_behind_may_be_one_who_is_not_reached_either():
    """The last that was heard of it came a moment after the last that it acknowledged."""
    case = Strandable()
    leading = case.leading
    leading.written(120)
    case.lose("b", is_long=False)
    case.pass_time(0, 3 * S + S // 5)
    assert leading.followers["c"].is_late and leading.wanted_state() is None
    case.lose("c", is_long=False)
    assert leading.wanted_state() is None
    leading.unreached("b")
    assert leading.wanted_state() is None, "c may be dead, and still count as living"
    leading.unreached("c")
    assert leading.wanted_state().in_sync_nodes == ("b", "c")


def test_who_is_late_is_not_waited_for_where_another_one_is_not_reached():
    """That one may have it acknowledge; this node could do nothing but refuse."""
    case = Strandable()
    leading = case.leading
    leading.written(120)
    case.lose("b", is_long=False)
    case.pass_time(0, 3 * S + S // 5)
    assert leading.followers["c"].is_late and not leading.followers["c"].is_slow
    leading.unreached("b")
    wanted = leading.wanted_state()
    assert (wanted.leader, wanted.in_sync_nodes) == ("", ("b", "c"))


def test_who_is_slow_is_not_waited_for_either():
    case = Strandable()
    leading = case.leading
    leading.written(120)
    case.lose("b", is_long=False)
    case.pass_time(0, 6 * S + S // 5)
    assert leading.followers["c"].is_slow and leading.wanted_state() is None
    leading.unreached("b")
    assert leading.wanted_state().in_sync_nodes == ("b", "c")


def test_where_all_are_slow_nobody_could_do_better():
    case = Strandable()
    leading = case.leading
    leading.written(120)
    case.pass_time(0, 5 * S)
    assert leading.wanted_state() is None
    case.pass_time(5 * S, 6 * S + S // 5)
    assert leading.wanted_state().in_sync_nodes == ("a",), "they catch up with this node, or with nobody"


def test_who_is_late_and_was_not_heard_of_just_now_may_be_cut_off():
    """Late first, and cut off then: the in-sync set is whole until that is known, so that others may lead."""
    case = Strandable()
    leading = case.leading
    leading.written(120)
    for stream in case.streams.values():
        stream.heard_ns = 4 * S
    case.pass_time(0, 6 * S + S // 5)
    assert leading.wanted_state() is None
    case.lose("b", "c")
    assert leading.wanted_state().in_sync_nodes == ("b", "c")


def test_who_is_heard_of_a_moment_longer_is_cut_off_as_well():
    """One that is not in sync seems to be reached when the other is silent; it is a moment later."""
    case = Strandable("a", "b")
    case.connect("c")
    case.lose("b", is_long=False)
    assert case.leading.wanted_state() is None, "with b gone from the in-sync set nobody else could ever lead"
    case.lose("c", is_long=False)
    case.leading.unreached("b")
    wanted = case.leading.wanted_state()
    assert (wanted.leader, wanted.in_sync_nodes) == ("", ("b",))


def test_a_leader_goes_on_where_others_could_not():
    case = Strandable()
    case.answer = False
    case.lose("b", "c", is_gone=True)
    assert case.leading.wanted_state().in_sync_nodes == ("a",)


@pytest.mark.parametrize("others", ["live again", "are gone", "are refused", "are there"])
def test_others_that_may_only_have_stood_still_stay_in_sync_until_that_is_known(others):
    """The store does not count them among the living at that moment; out of sync, nobody but this node could lead."""
    case = Strandable()
    leading = case.leading
    case.answer = False
    case.lose("b", "c")
    assert not leading.is_writable, "what was published a moment before is refused as well"
    assert leading.wanted_state() is None
    match others:
        case "live again":
            case.answer = True
            assert (leading.wanted_state().leader, leading.wanted_state().in_sync_nodes) == ("", ("b", "c"))
        case "are gone":
            assert not leading.is_writable, "what is published meanwhile is refused at once"
            leading.gone("b")
            assert leading.wanted_state() is None, "c may live"
            leading.gone("c")
            assert case.swap() == ("a",)
        case "are refused":
            for node in ("b", "c"):
                leading.silent(node, is_dead=True)
                assert leading.wanted_state() is None, "the store may not have heard of them in time"
            leading.gone("b")
            leading.gone("c")
            assert case.swap() == ("a",)
        case "are there":
            leading.gone("b")
            leading.heard("b")
            leading.silent("b")
            leading.unreached("b")
            leading.gone("c")
            assert leading.wanted_state() is None, "it is silent anew"
            leading.heard("b")
            assert case.swap() == ("a", "b") and leading.is_writable


def test_who_has_caught_up_joins_while_others_may_only_have_stood_still():
    case = Strandable("a", "b")
    case.answer = False
    case.lose("b")
    assert case.leading.wanted_state() is None and not case.leading.is_writable
    case.connect("c")
    case.leading.acked("c", 100, 0)
    case.leading.progress_acked("c", 0, 0)
    case.leading.floors_acked("c", 0, 0)
    assert case.swap() == ("a", "b", "c")
    assert case.swap() == ("a", "c") and case.leading.is_writable


def test_a_leader_that_was_not_deposed_goes_on():
    case = Strandable()
    case.lose("b", "c")
    case.leading.swap_began(case.leading.wanted_state())
    case.leading.swap_not_sent()
    assert not case.leading.gives_up and case.leading.is_writable
    case.leading.heard("b")
    assert case.swap() == ("a", "b") and case.leading.is_writable


def test_a_leader_that_somebody_reaches_waits_for_that_one():
    case = Strandable("a", "b")
    case.connect("c")  # it catches up
    case.lose("b")
    assert case.swap() == ("a",)


@pytest.mark.parametrize("how", ["is dead", "lacks what it had", "takes nothing", "ends", "is to have no copy"])
def test_who_may_lack_something_is_not_left_in_sync_for_others(how):
    case = Strandable()
    leading = case.leading
    match how:
        case "is dead":
            leading.silent("b", is_dead=True)
        case "lacks what it had":
            case.connect("b")
            leading.acked("b", 40, 0)
            case.lose("b")
        case "takes nothing":
            leading.silent("b", "its disk is full")
            leading.unreached("b")
        case "ends":
            leading.ends("b", True)
            case.lose("b")
        case "is to have no copy":
            case.lose("b")
            leading.state_changed(msgspec.structs.replace(leading.state, replicas=("a", "c")), 11)
    case.lose("c")
    wanted = leading.wanted_state()
    assert (wanted.leader, wanted.in_sync_nodes) == ("", ("c",))
    away = case.asked[-1][2]
    assert away == (["a", "b"] if how in ("is dead", "takes nothing") else ["a"])


def late_acknowledgements(case, now_ns=0):
    """Messages that come every 10 ms, and whose acknowledgements take five times as long; yields at each."""
    leading, flying = case.leading, [leading_end := case.leading.end] * 5
    while True:
        now_ns += 10_000_000
        leading_end += 1
        leading.written(leading_end)
        leading.progress(b"", 0)
        case.streams["b"].sent = leading_end
        flying.append(leading_end)
        leading.acked("b", flying.pop(0), now_ns)
        leading.progress_acked("b", max(0, leading.progress_number - 5), now_ns)
        if not leading.is_level:
            leading.tick(now_ns)
        yield now_ns


def test_who_is_always_a_moment_behind_joins_all_the_same():
    case = Case(state_of("a"), connected=("b",))
    leading = case.leading
    leading.floors_acked("b", 0, 0)
    rounds = late_acknowledgements(case)
    for _ in range(20):
        next(rounds)
        if leading.wanted_state() is not None:
            break
    assert case.swap() == ("a", "b")
    watermark = leading.watermark
    for _ in range(10):
        next(rounds)
    assert leading.watermark > watermark


def test_the_watermark_is_not_held_for_long():
    case = Case(state_of("a"), connected=("b",))
    leading = case.leading
    case.streams["b"].sent = 120
    leading.floors_acked("b", 0, 0)
    leading.progress_acked("b", 0, 0)
    leading.acked("b", 99, 0)
    leading.written(120)
    assert leading.watermark == 100 and not leading.is_level
    leading.tick(leading_module.JOIN_NS - 1)
    assert leading.watermark == 100
    leading.tick(leading_module.JOIN_NS)
    assert leading.watermark == 120 and leading.is_level
    leading.written(121)
    leading.acked("b", 119, leading_module.JOIN_NS + 1)
    assert leading.watermark == 121, "not for the same one at once again"
    leading.written(122)
    case.streams["b"].sent = 122
    leading.acked("b", 120, leading_module.JOIN_AGAIN_NS)
    leading.written(123)
    assert leading.watermark == 122
    leading.closed("b", case.streams["b"])
    assert leading.watermark == 123


def test_the_watermark_is_not_held_for_somebody_who_was_not_sent_all():
    case = Case(state_of("a"), connected=("b",))
    leading = case.leading
    leading.written(120)
    case.streams["b"].sent = 119
    leading.floors_acked("b", 0, 0)
    leading.progress_acked("b", 0, 0)
    leading.acked("b", 118, 0)
    leading.written(121)
    assert leading.watermark == 121 and leading.is_level


def test_the_store_may_say_it_before_the_answer_comes():
    case = Case(level=True)
    leading = case.leading
    leading.written(120)
    leading.acked("b", 120, 0)
    leading.silent("c")
    wanted = leading.wanted_state()
    leading.swap_began(wanted)
    leading.state_changed(wanted, 11)
    assert leading.watermark == 120
    leading.swap_ended(wanted, 11)
    assert leading.watermark == 120 and leading.wanted_state() is None


def test_who_is_joining_is_waited_for_from_when_the_store_is_asked():
    case = Case(state_of("a", "b"), level=True)
    leading = case.leading
    wanted = leading.wanted_state()
    assert wanted.in_sync_nodes == ("a", "b", "c")
    leading.swap_began(wanted)
    leading.written(120)
    leading.acked("b", 120, 0)
    assert leading.watermark == 100
    leading.swap_ended(None)
    assert leading.watermark == 100
    leading.state_changed(msgspec.structs.replace(leading.state, replicas=("a", "b", "c", "d")), 11)
    assert leading.watermark == 120  # somebody else wrote: the change cannot be carried out any more
    leading.acked("c", 110, 0)
    assert leading.wanted_state() is None  # it is behind again
    leading.acked("c", 120, 0)
    assert leading.wanted_state().in_sync_nodes == ("a", "b", "c")


def test_a_change_that_was_never_sent_is_forgotten_and_a_doubtful_one_is_not():
    case = Case(state_of("a", "b"), level=True)
    leading = case.leading
    leading.swap_began(leading.wanted_state())
    leading.swap_not_sent()
    leading.written(120)
    leading.acked("b", 120, 0)
    assert leading.watermark == 120
    leading.acked("c", 120, 0)
    wanted = leading.wanted_state()
    leading.swap_began(wanted)
    leading.swap_ended(None)
    leading.swap_began(wanted)
    leading.swap_not_sent()  # this time; the time before it may have been
    leading.written(130)
    leading.acked("b", 130, 0)
    assert leading.watermark == 120 and leading.wanted_state() == wanted


def test_what_is_not_wanted_any_more_is_not_begun():
    case = Case(state_of("a", "b"), level=True)
    wanted = case.leading.wanted_state()
    case.leading.written(120)
    case.leading.acked("b", 120, 0)
    with pytest.raises(ValueError, match="ask again"):
        case.leading.swap_began(wanted)


def test_nobody_joins_before_the_log_of_the_election():
    case = Case(state_of("a", "b"))
    case.leading.progress_acked("c", 0, 0)
    case.leading.floors_acked("c", 0, 0)
    case.leading.acked("c", 99, 0)
    assert case.leading.wanted_state() is None
    case.leading.acked("c", 100, 0)
    assert case.leading.wanted_state().in_sync_nodes == ("a", "b", "c")


def test_nobody_joins_without_the_progress_that_was_called_safe():
    case = Case(state_of("a", "b"), level=True)
    leading = case.leading
    number = leading.progress(b"records", 100)
    assert leading.wanted_state().in_sync_nodes == ("a", "b", "c")
    leading.progress_acked("b", number, 0)
    assert leading.wanted_state() is None
    leading.progress_acked("c", number, 0)
    assert leading.wanted_state().in_sync_nodes == ("a", "b", "c")


def test_nobody_joins_who_is_gone():
    case = Case(state_of("a", "b"), level=True)
    case.leading.closed("c", case.streams["c"])
    assert case.leading.wanted_state() is None


def test_a_member_that_lacks_what_was_committed_leaves_at_once():
    case = Case(level=True)
    case.connect("c")
    case.leading.acked("c", 40, 0)
    assert case.swap() == ("a", "b")
    case.leading.acked("c", 100, 0)
    case.leading.progress_acked("c", 0, 0)
    case.leading.floors_acked("c", 0, 0)
    assert case.swap() == ("a", "b", "c")


@pytest.mark.parametrize(
    ("entry", "now"),
    [
        (member("b", "boot 1"), {"boot_id": "boot 2"}),  # it had no power: what it had not synced is gone
        (member("b", syncs=True), {"syncs": False}),  # what it acknowledges from now on would not survive that
        (member("b", syncs=False), {"syncs": True}),
    ],
)
def test_acknowledgements_count_when_the_store_knows_the_process(entry, now):
    case = Case(state_of("a", entry), connected=())
    leading = case.leading
    case.connect("b", **now)
    leading.acked("b", 100, 0)
    leading.progress_acked("b", 0, 0)
    leading.floors_acked("b", 0, 0)
    assert leading.watermark is None
    assert case.swap() == ("a", "b") and leading.watermark == 100
    assert leading.state.in_sync[-1] == member("b", **now)


def test_a_node_that_is_to_have_no_copy_leaves():
    case = Case(state_of("a", "b", "c", replicas=("a", "b")), level=True)
    assert case.swap() == ("a", "b")
    assert case.leading.wanted_state() is None


# -- behind ------------------------------------------------------------------------------------------------------------


def test_a_member_that_is_behind_leaves_after_the_bound_and_not_before():
    case = Case(level=True)
    case.leading.written(120)
    case.leading.acked("b", 120, 0)
    assert not case.leading.is_level
    case.pass_time(0, LAG_NS_MAX - 1)
    assert case.leading.wanted_state() is None
    case.pass_time(LAG_NS_MAX - S // 5, LAG_NS_MAX)
    assert case.swap() == ("a", "b")
    assert case.leading.watermark == 120


def test_a_busy_leader_keeps_a_follower_that_is_a_second_behind():
    case = Case(level=True)
    ends = {}
    for tick in range(100):
        now_ns = tick * S // 5
        ends[tick] = 100 + tick
        case.leading.written(100 + tick)
        case.leading.acked("b", 100 + tick, now_ns)
        if tick >= 5:
            case.leading.acked("c", ends[tick - 5], now_ns)
        case.leading.tick(now_ns)
        assert case.leading.wanted_state() is None
    assert not case.leading.is_level


def test_a_busy_leader_drops_a_follower_that_falls_back_for_ever():
    case = Case(level=True)
    for tick in range(100):
        now_ns = tick * S // 5
        case.leading.written(100 + tick * 2)
        case.leading.acked("b", 100 + tick * 2, now_ns)
        case.leading.acked("c", 100 + tick // 4, now_ns)
        case.leading.tick(now_ns)
        if case.leading.wanted_state() is not None:
            break
    assert 3 <= now_ns / S <= 5
    assert case.swap() == ("a", "b")


def test_a_member_that_was_idle_for_an_hour_has_its_time():
    case = Case(level=True)
    case.leading.tick(0)
    case.leading.written(120)
    case.leading.acked("b", 120, 3600 * S)
    case.leading.tick(3600 * S)
    case.leading.tick(3600 * S + LAG_NS_MAX // 2)
    assert case.leading.wanted_state() is None


def test_a_leader_that_stood_still_does_not_blame_others():
    case = Case(level=True)
    case.leading.written(120)
    case.leading.acked("b", 120, 0)
    case.pass_time(0, S)
    case.leading.tick(60 * S)
    assert case.leading.wanted_state() is None
    case.pass_time(60 * S, 60 * S + LAG_NS_MAX)
    assert case.swap() == ("a", "b")


def test_progress_that_is_not_stored_is_being_behind():
    case = Case(level=True)
    case.leading.progress_acked("b", case.leading.progress(b"records", 100), 0)
    case.pass_time(0, LAG_NS_MAX)
    assert case.swap() == ("a", "b")


def test_who_is_not_in_sync_need_not_be_watched():
    case = Case(state_of("a"), connected=())
    case.leading.written(120)
    assert case.leading.is_level


# -- its end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "later",
    [
        state_of("a", "b", "c", epoch=6, leader="b"),
        state_of("a", "b", "c", leader=""),
        msgspec.structs.replace(state_of("a", "b", "c"), incarnation="2"),
    ],
)
def test_a_leader_that_leads_no_longer_moves_nothing(later):
    case = Case(level=True)
    leading, told = case.leading, list[Any]()
    leading.written(120)
    leading.when_progress_replicated(leading.progress(b"records", 100), told.append)
    leading.state_changed(later, 11)
    assert leading.is_ended and not leading.is_writable and leading.wanted_state() is None
    assert [type(each) for each in told] == [LeadingEnded] and "partition 0 of topic t" in str(told[0])
    assert leading.superseded_by == (6 if later.epoch == 6 else 0)
    leading.acked("b", 120, 0)
    leading.acked("c", 120, 0)
    leading.synced(120)
    leading.written(130)
    assert leading.watermark == 100 and leading.end == 120
    leading.when_progress_replicated(1, told.append)
    assert len(told) == 2


def test_old_news_change_nothing():
    case = Case(level=True)
    case.leading.state_changed(state_of("a", "b", "c", epoch=4, leader="b"), 9)
    assert not case.leading.is_ended


def test_only_the_leader_leads():
    with pytest.raises(ValueError, match="does not lead"):
        Case(state_of("a", "b", leader="b"))
    with pytest.raises(ValueError, match="does not lead"):
        Case(state_of("b"))


def test_confirmations_of_every_member_count():
    case = Case(level=True)
    leading = case.leading
    assert not leading.is_confirmed(0)
    case.streams["b"].confirmed_ns = 10 * S
    case.streams["c"].confirmed_ns = 11 * S
    assert leading.is_confirmed(11 * S, margin_ns=0)
    assert leading.is_confirmed((10 + LEASE_TTL_S) * S - 1, margin_ns=0)
    assert not leading.is_confirmed((10 + LEASE_TTL_S) * S, margin_ns=0)
    assert not leading.is_confirmed((10 + LEASE_TTL_S) * S - 1)
    leading.closed("b", case.streams["b"])
    assert not leading.is_confirmed(11 * S)
    leading.ended()
    assert not leading.is_confirmed(11 * S)


def test_a_leader_alone_needs_no_confirmation():
    case = Case(state_of("a"))
    assert case.leading.is_confirmed(10**18)
    case.leading.acked("c", 100, 0)
    case.leading.progress_acked("c", 0, 0)
    case.leading.floors_acked("c", 0, 0)
    case.leading.swap_began(case.leading.wanted_state())
    assert not case.leading.is_confirmed(0)  # another one may be in sync already


# -- progress ----------------------------------------------------------------------------------------------------------


def test_whoever_waits_for_progress_is_told_when_every_member_has_it():
    case = Case(level=True)
    leading, told = case.leading, list[Any]()
    for _ in range(3):
        number = leading.progress(b"records", 100)
        leading.when_progress_replicated(number, lambda error, number=number: told.append(number))
    leading.progress_acked("b", 3, 0)
    assert told == []
    leading.progress_acked("c", 2, 0)
    assert told == [1, 2]
    leading.silent("c")
    assert told == [1, 2]
    case.swap()
    assert told == [1, 2, 3]
    with pytest.raises(ValueError, match="progress 4 of 3"):
        leading.progress_acked("b", 4, 0)


def test_records_are_kept_until_everybody_connected_has_them():
    case = Case(level=True)
    leading = case.leading
    for count in range(3):
        assert leading.progress(b"records %d" % count, 100) == count + 1
    assert leading.entry(0) is None and leading.entry(4) is None
    assert leading.entry(1) == (100, b"records 0") and leading.entry(3) == (100, b"records 2")
    leading.progress_acked("b", 3, 0)
    assert leading.entry(1) is not None
    leading.progress_acked("c", 1, 0)
    assert leading.entry(1) is None and leading.entry(2) == (100, b"records 1")
    leading.closed("c", case.streams["c"])
    assert leading.entry(2) is None and leading.entry(3) is None


def test_records_are_kept_behind_a_state_that_is_being_sent():
    case = Case(level=True)
    leading = case.leading
    case.connect("c")
    case.streams["c"].state_number = 1
    for _ in range(3):
        leading.progress_acked("b", leading.progress(b"records", 100), 0)
    assert leading.entry(1) is None and leading.entry(2) is not None


def test_records_that_are_kept_are_bounded(monkeypatch):
    monkeypatch.setattr(leading_module, "PROGRESS_BYTES_MAX", 100)
    case = Case(level=True)
    for _ in range(50):
        case.leading.progress(b"x" * 10, 100)
    assert case.leading.entry(40) is None and case.leading.entry(41) is not None
    assert case.leading.next_progress((5, 39)) is None and case.leading.next_progress((5, 40)) == 41


def test_what_all_partitions_keep_together_is_bounded():
    kept = leading_module.Kept(100)
    cases = [Case(level=True, kept=kept) for _ in range(3)]
    for number in range(1, 4):
        for case in cases:
            case.leading.progress(b"x" * 10, 100)
        assert kept.size_bytes == 30 * number
    cases[1].leading.progress(b"x" * 10, 100)
    cases[0].leading.progress(b"x" * 10, 100)
    assert kept.size_bytes == 70, "one that is told of more forgets its own"
    assert cases[0].leading.next_progress((5, 3)) is None and cases[1].leading.next_progress((5, 3)) == 4
    for node in "bc":
        cases[1].leading.progress_acked(node, 4, 0)
    assert kept.size_bytes == 30
    for case in cases:
        case.leading.ended()
    assert kept.size_bytes == 0


def test_nothing_is_kept_for_nobody():
    leading = Case(state_of("a"), connected=()).leading
    leading.progress(b"records", 100)
    assert leading.entry(1) is None


def test_progress_goes_on_where_a_follower_is():
    case = Case(level=True, base=(4, 17))
    leading = case.leading
    assert leading.next_progress((5, 0)) == 1  # it had the whole state of the election
    assert leading.next_progress((4, 17)) == 1  # it is where this node was elected
    assert leading.next_progress((4, 16)) is None and leading.next_progress((6, 0)) is None
    leading.progress(b"records", 100)
    assert leading.next_progress((5, 0)) == 1 and leading.next_progress((5, 1)) == 2
    assert leading.next_progress((5, 2)) is None  # it says that it has more than there is


def test_nobody_is_where_nothing_began():
    assert Case(base=(0, 0)).leading.next_progress((0, 0)) is None


# -- reading -----------------------------------------------------------------------------------------------------------


def test_followers_at_the_same_place_are_served_by_one_read():
    case = Case(level=True)
    case.streams["b"].sent = case.streams["c"].sent = 50
    assert case.leading.read(50, 1000) == (b"x" * 10, 60, 3)
    case.streams["b"].sent = 60
    assert case.leading.read(50, 1000) == (b"x" * 10, 60, 3) and case.log.reads == 1
    case.streams["c"].sent = 60
    case.leading.read(60, 1000)
    case.leading.read(60, 5)  # not what was asked for
    assert case.log.reads == 3
    assert case.leading.oldest_needed == 60


def test_a_leader_begins_with_what_an_election_made():
    record = NodeRecord("a", "1", "boot", False, "host", 4150, 4151, 4152)
    leading = Leading("t", 0, "a", elected(state_of("a", "b", leader=""), record), 3, Log(), end=7)
    assert leading.epoch == 6 and leading.revision == 3 and "epoch=6" in leading.describe()


# -- channels in order -------------------------------------------------------------------------------------------------


def test_a_floor_is_kept_when_every_member_keeps_it():
    case = Case(level=True)
    leading, kept = case.leading, []
    assert not leading.keep_floor("ch", 7, lambda: kept.append(7))
    assert not leading.keep_floor("other", 3, lambda: kept.append(3))
    assert case.streams["b"].floors_woken == 2
    assert leading.floors_after(0) == [(1, "ch", 7), (2, "other", 3)] and leading.floors_after(1) == [(2, "other", 3)]
    leading.floors_acked("b", 2, 0)
    leading.floors_acked("c", 1, 0)
    assert kept == [7]
    assert not leading.is_level
    leading.floors_acked("c", 2, 0)
    assert kept == [7, 3] and leading.is_level
    assert not leading.keep_floor("ch", 8, lambda: kept.append(8))
    assert leading.floors_after(0) == [(2, "other", 3), (3, "ch", 8)], "the last of each channel"
    leading.forget_floor("ch")
    assert leading.floors_after(0) == [(2, "other", 3)]


def test_a_member_that_keeps_no_floor_holds_it_until_the_store_has_it_out_of_the_set():
    case = Case(level=True)
    leading, kept = case.leading, []
    leading.floors_acked("b", 0, 0)
    leading.keep_floor("ch", 7, lambda: kept.append(7))
    leading.floors_acked("b", 1, 0)
    case.pass_time(0, 4 * S)
    assert not kept
    assert case.swap() == ("a", "b")
    assert kept == [7]
    leading.floors_acked("c", 0, 5 * S)
    assert leading.wanted_state() is None, "who is not a member has to keep what was acted on"
    leading.floors_acked("c", 1, 5 * S)
    assert case.swap() == ("a", "b", "c")


def test_a_floor_is_kept_at_once_where_no_member_knows_of_floors():
    """Nodes of the version before; who asks is not called, because it goes on by itself."""
    case = Case(level=True)
    leading, kept = case.leading, []
    leading.floors_acked("b", ALL_FLOORS, 0)
    assert not leading.keep_floor("ch", 7, lambda: kept.append(7))
    leading.floors_acked("c", ALL_FLOORS, 0)
    assert kept == [7]
    assert leading.keep_floor("ch", 8, lambda: kept.append(8))
    assert kept == [7] and leading.is_level


def test_a_floor_of_a_leader_alone_is_kept_at_once_and_of_one_that_has_ended_never():
    leading = Case(state_of("a"), connected=()).leading
    assert leading.keep_floor("ch", 7, lambda: None)
    leading.ended(6)
    assert not leading.keep_floor("ch", 8, lambda: None)


# -- who stops again and again -----------------------------------------------------------------------------------------


class Flapping(Case):
    """It knows the time; ``c`` has fallen out so often."""

    def __init__(self, count, state=None, **options):
        self.steadiness = Steadiness()
        self.now_ns = 1000 * S
        super().__init__(state, level=True, steadiness=self.steadiness, **options)
        for _ in range(count):
            self.fall()

    def rest(self, rest_ns, acks=True):
        """Let time pass; what is published is acknowledged by ``c``, or not."""
        leading = self.leading
        end_ns = self.now_ns + rest_ns
        while self.now_ns < end_ns:
            self.now_ns += S // 10
            leading.written(leading.end + 1)
            self.streams["c"].sent = leading.end
            if acks:
                leading.acked("c", leading.end, self.now_ns)
            leading.acked("b", leading.end, self.now_ns)
            self.steadiness.tick(self.now_ns)
            if not leading.is_level:
                leading.tick(self.now_ns)

    def fall(self):
        """``c`` is in sync, stops, and is back with everything."""
        self.join()
        self.rest(S)
        self.stop()
        assert "c" not in self.swap()
        self.come_back()

    def join(self):
        if "c" not in self.leading.state.in_sync_nodes:
            self.rest(61 * S)
            assert "c" in self.swap()

    def stop(self):
        leading = self.leading
        leading.closed("c", self.streams["c"])
        leading.silent("c")
        self.steadiness.tick(self.now_ns)

    def come_back(self):
        leading = self.leading
        self.now_ns += 4 * S
        self.steadiness.tick(self.now_ns)
        leading.heard("c")
        self.connect("c")
        self.streams["c"].sent = leading.end
        leading.acked("c", leading.end, self.now_ns)
        leading.progress_acked("c", leading.progress_number, self.now_ns)
        leading.floors_acked("c", leading.floor_number, self.now_ns)

    def wants_it(self):
        wanted = self.leading.wanted_state()
        return wanted is not None and "c" in wanted.in_sync_nodes


def test_who_fell_out_once_is_in_sync_as_soon_as_it_has_everything():
    case = Flapping(1)
    assert case.wants_it()


@pytest.mark.parametrize(("count", "wait_s"), [(2, 5), (3, 10), (9, 60)])
def test_who_fell_out_again_and_again_is_watched_for_longer_each_time(count, wait_s):
    case = Flapping(count)
    changes = case.changes
    case.rest((wait_s - 1) * S)
    assert not case.wants_it()
    assert case.leading.watermark == case.leading.end, "nobody waits for it meanwhile"
    assert not case.leading.is_level, "it is looked at again when its time has come"
    case.rest(2 * S)
    assert case.wants_it() and case.changes > changes
    case.swap()
    assert case.leading.is_level


def test_time_ends_it_also_where_nothing_is_published():
    case = Flapping(2)
    changes = case.changes
    for _ in range(52):
        assert not case.leading.is_level
        case.now_ns += S // 10
        case.steadiness.tick(case.now_ns)
        case.leading.tick(case.now_ns)
    assert case.wants_it() and case.changes > changes


def test_who_stops_while_it_is_watched_begins_anew():
    case = Flapping(2)
    case.rest(4 * S)
    case.stop()
    case.come_back()
    case.rest(4 * S)
    assert not case.wants_it()
    case.rest(2 * S)
    assert case.wants_it()


def test_who_does_not_keep_up_while_it_is_watched_begins_anew():
    case = Flapping(2)
    case.rest(S)
    case.rest(4 * S, acks=False)
    case.rest(4 * S)
    assert not case.wants_it()
    case.rest(2 * S)
    assert case.wants_it()


def test_who_is_needed_is_in_sync_at_once():
    case = Flapping(4, min_in_sync=2)
    assert not case.wants_it()
    case.leading.silent("b")
    case.leading.gone("b")
    assert "b" not in case.swap() and not case.leading.is_writable
    assert case.wants_it() and case.swap() == ("a", "c") and case.leading.is_writable


def test_who_is_one_of_two_copies_is_in_sync_at_once():
    """Else one node would have the only copy of what is acknowledged."""
    case = Flapping(0, state_of("a", "b", "c", replicas=("a", "b", "c")))
    for _ in range(3):
        case.fall()
    assert not case.wants_it()
    case.leading.state_changed(state_of("a", replicas=("a", "c")), case.revision + 1)
    assert case.wants_it()


def test_what_a_node_did_counts_for_all_partitions_and_epochs():
    case = Flapping(3)
    state = state_of("a", "b", epoch=9)
    later = Leading("u", 1, "a", state, 20, Log(), end=100, steadiness=case.steadiness)
    for node in ("b", "c"):
        stream = Stream()
        stream.sent = 100
        later.opened(node, member(node), stream)
        later.acked(node, 100, case.now_ns)
        later.progress_acked(node, 0, case.now_ns)
        later.floors_acked(node, 0, case.now_ns)
    assert later.wanted_state() is None and later.watermark == 100
    case.now_ns += S
    case.steadiness.tick(case.now_ns)
    later.tick(case.now_ns)
    case.now_ns += 11 * S
    case.steadiness.tick(case.now_ns)
    wanted = later.wanted_state()
    assert wanted is not None and wanted.in_sync_nodes == ("a", "b", "c")


@pytest.mark.parametrize("how", ["is dead", "takes nothing", "ends", "lacks what it had"])
def test_who_leaves_without_holding_anybody_may_do_so_often(how):
    case = Flapping(0)
    for _ in range(5):
        leading = case.leading
        match how:
            case "is dead":
                leading.silent("c", is_dead=True)
            case "takes nothing":
                leading.silent("c", "its disk is full")
            case "ends":
                leading.ends("c", True)
            case "lacks what it had":
                case.connect("c")
                leading.acked("c", 40, case.now_ns)
        assert "c" not in case.swap()
        leading.ends("c", False)
        case.come_back()
        assert case.wants_it() and "c" in case.swap()
    assert case.steadiness.count("c") == 0


def test_who_leaves_by_itself_again_and_again_is_watched():
    """Its disk hangs and goes on, say: nobody was late, and each time the store is written twice."""
    case = Flapping(0)
    for count in range(1, 4):
        case.rest(S)
        case.leading.closed("c", case.streams["c"])
        case.revision += 1
        case.leading.state_changed(without(case.leading.state, ["c"]), case.revision)
        assert case.steadiness.count("c") == count
        case.come_back()
        assert case.wants_it() is (count < 2)
        case.join()


def test_who_leaves_by_itself_because_it_ends_or_has_to_have_it_no_longer_is_not_watched():
    case = Flapping(0)
    case.leading.ends("c", True)
    case.leading.state_changed(without(case.leading.state, ["c"]), 11)
    case.leading.ends("c", False)
    case.revision = 11
    assert case.wants_it() and "c" in case.swap()
    case.leading.state_changed(state_of("a", "b", replicas=("a", "b")), 20)
    assert case.steadiness.count("c") == 0
