"""What the master nsqlookupd decides, situation by situation."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.cluster.models import KEYS, Master, World, member, node, state

from flintmq.cluster import orders
from flintmq.cluster.controller import LOOKS_MAX, Defaults, Refused, why_no_leader
from flintmq.cluster.moving import COPIES_AT_ONCE_MAX, UPGRADING
from flintmq.cluster.orders import alter
from flintmq.cluster.power import told
from flintmq.cluster.state import (
    DiskRecord,
    Ending,
    LookupdRecord,
    PartitionState,
    TopicRecord,
    WantedTopic,
    encode,
)
from flintmq.cluster.store import Compare
from flintmq.cluster.view import Fate
from flintmq.topic_meta import PLAIN, TopicMeta

OTHER_BOOT = "another boot"


def decided(world: World, before: PartitionState) -> tuple[PartitionState, str]:
    """What becomes of one partition, and why; why is empty when nothing does."""
    world.topic("t", replica=len(before.replicas))
    world.partition("t", 0, before)
    reasons = Master(world).settle()
    now = world.state("t")
    assert now is not None
    assert bool(reasons) == (now != before)
    return now, "".join(reasons)


# -- elections ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "before", "leader", "in_sync", "reason"),
    [
        ("abc", state("a", "abc"), "a", "abc", ""),
        ("bc", state("a", "abc"), "b", "bc", "node a is gone"),
        ("bc", state("a", "ac", "abc"), "c", "c", "node a is gone"),
        ("c", state("a", "abc"), "c", "c", "node a is gone"),
        ("bc", state("a", "a", "abc"), "", "a", "no replica that has everything is alive"),
        ("bc", state("", "a", "abc"), "", "a", ""),
        ("abc", state("", "ac", "abc"), "a", "ac", "nobody led it"),
        ("", state("a", "ab"), "", "ab", "node a is gone"),
        ("bc", state("a", "abc", "acb"), "c", "bc", "node a is gone"),
        ("bc", state("a", "abc", "ac", leaving=("b",)), "c", "bc", "node a is gone"),
        ("b", state("a", "abc", "ac", leaving=("b",)), "b", "b", "node a is gone"),
    ],
)
def test_elections(nodes: str, before: PartitionState, leader: str, in_sync: str, reason: str):
    world = World()
    world.nodes(nodes)
    now, why = decided(world, before)
    assert (now.leader, "".join(now.in_sync_nodes)) == (leader, in_sync)
    assert reason in why if reason else not why
    assert now.incarnation == (f"{leader}1" if leader else "")
    assert now.epoch == before.epoch + bool(now.leader and why)
    assert (now.log_id, now.topic_number, now.replicas) == (before.log_id, before.topic_number, before.replicas)


@pytest.mark.parametrize(
    ("nodes", "before", "leader", "in_sync"),
    [
        ("bc", state("a", "abc"), "b", "bc"),
        ("c", state("a", "abc"), "c", "cab"),
        ("bc", state("a", "ac", "abc"), "c", "ca"),
        ("b", state("a", "ab"), "b", "ba"),
    ],
)
def test_who_is_away_stays_in_sync_where_the_others_are_too_few(
    nodes: str, before: PartitionState, leader: str, in_sync: str
):
    """Nothing is acknowledged meanwhile, so it has everything, and can lead when the one that is elected cannot."""
    world = World()
    world.nodes(nodes)
    world.topic("t", replica=3, min_in_sync=2)
    world.partition("t", 0, before)
    master = Master(world)
    master.settle()
    now = world.state("t")
    assert now is not None and (now.leader, "".join(now.in_sync_nodes)) == (leader, in_sync)


def test_who_lost_something_does_not_stay_in_sync_where_the_others_are_too_few():
    world = World()
    world.nodes("b")
    world.node(node("a", incarnation="a2", boot_id=OTHER_BOOT))
    world.topic("t", replica=3, min_in_sync=2)
    world.partition("t", 0, state("a", "abc"))
    Master(world).settle()
    now = world.state("t")
    assert now is not None and (now.leader, now.in_sync_nodes) == ("b", ("b", "c"))


def test_a_leader_that_was_started_anew_does_not_carry_on():
    world = World()
    world.nodes("bc")
    world.node(node("a", incarnation="a2"))
    now, why = decided(world, state("a", "abc"))
    assert (now.leader, now.incarnation, now.epoch) == ("a", "a2", 4)
    assert now.in_sync_nodes == ("a", "b", "c"), "it lost nothing"
    assert "node a was started anew" in why


def test_who_lost_power_without_syncing_leaves_the_in_sync_set():
    world = World()
    world.nodes("bc")
    world.node(node("a", incarnation="a2", boot_id=OTHER_BOOT))
    now, _ = decided(world, state("a", "abc"))
    assert (now.leader, now.in_sync_nodes) == ("b", ("b", "c"))


def test_who_syncs_has_everything_after_a_power_loss():
    world = World()
    world.node(node("a", incarnation="a2", boot_id=OTHER_BOOT, syncs=True))
    now, _ = decided(world, msgspec.structs.replace(state("a", "a"), in_sync=(member("a", syncs=True),)))
    assert (now.leader, now.incarnation) == ("a", "a2")
    assert now.in_sync == (member("a", syncs=True, boot_id=OTHER_BOOT),), "as it is from now on"


def test_who_synced_and_does_no_longer_is_taken_as_it_is_now():
    world = World()
    world.nodes("b")
    members = member("a", syncs=True), member("b", syncs=True)
    now, _ = decided(world, msgspec.structs.replace(state("a", "ab"), in_sync=members))
    assert now.in_sync == (member("b", syncs=False),)


def test_all_of_several_lost_power_and_are_waited_for():
    world = World()
    world.node(node("a", incarnation="a2", boot_id=OTHER_BOOT))
    world.node(node("b", incarnation="b2", boot_id=OTHER_BOOT))
    now, why = decided(world, state("a", "abc"))
    assert (now.leader, now.in_sync, now.epoch) == ("", state("a", "abc").in_sync, 3)
    assert "power" in why
    master = Master(world)
    assert "power" in why_no_leader(master.view, ("t", 0))
    assert why_no_leader(master.view, ("t", 0), hindrance="it is full").endswith("; it is full")
    world.nodes("c")
    master.settle()
    assert world.state("t").leader == "c", "its power was never lost"  # type: ignore[union-attr]


def say(world: World, node_id: str, epoch: int, end: int) -> None:
    """A node says how far its copy is."""
    now = world.state("t")
    assert now is not None
    said = told(now, Ending(node_id, f"{node_id}2", epoch, end))
    assert said is not None
    world.partition("t", 0, said)


def lost_power(nodes: str, in_sync: str, copies: str = "") -> tuple[World, Master]:
    """All who were in sync have lost their power, these nodes are back, and nobody leads."""
    world = World()
    for each in nodes:
        world.node(node(each, incarnation=f"{each}2", boot_id=OTHER_BOOT))
    world.topic("t", replica=len(copies or in_sync))
    world.partition("t", 0, state("a", in_sync, copies or in_sync))
    master = Master(world)
    master.settle()
    assert world.state("t").leader == ""  # type: ignore[union-attr]
    return world, master


def led(world: World) -> tuple[str, tuple[str, ...], int]:
    now = world.state("t")
    assert now is not None and (not now.leader or not now.ends)
    return now.leader, now.in_sync_nodes, now.lossy_epoch


def test_all_lost_power_and_who_has_most_leads_when_all_have_said_it():
    world, master = lost_power("bc", "abc")
    say(world, "b", 3, 90)
    say(world, "c", 2, 95)
    master.settle()
    assert "waits for a; most of it has b: epoch 3, up to 90" in why_no_leader(master.view, ("t", 0))
    world.node(node("a", incarnation="a2", boot_id=OTHER_BOOT))
    master.settle()
    assert led(world)[0] == "", "it may have more"
    say(world, "a", 3, 80)
    master.settle()
    assert led(world) == ("b", ("b",), 4)


def test_what_a_process_of_before_said_counts_no_more():
    world, master = lost_power("ab", "ab")
    say(world, "b", 3, 90)
    world.node(node("b", incarnation="b3", boot_id="a third one"))
    say(world, "a", 3, 80)
    master.settle()
    assert led(world)[0] == ""


@pytest.mark.parametrize(("end", "leader"), [(70, "a"), (90, "b")])
def test_the_only_one_in_sync_leads_after_a_power_loss_unless_a_copy_has_more(end, leader):
    world, master = lost_power("ab", "a", "ab")
    say(world, "a", 3, 80)
    master.settle()
    assert led(world)[0] == "", "who lives and has a copy is asked"
    say(world, "b", 3, end)
    master.settle()
    assert led(world) == (leader, (leader,), 4)


def test_an_operator_is_told_what_is_lost_and_may_leave_the_choice_to_the_master():
    world, master = lost_power("bc", "abc")
    say(world, "b", 3, 90)
    say(world, "c", 2, 95)
    master.settle()
    plan = orders.elect(master.controller, "t", 0, "c")
    assert plan.notes == [
        "node b has more: what it has of epoch 3; that would be cut off, and lost",
        "node a had everything and does not answer: what only it has is lost",
    ]
    best = orders.elect(master.controller, "t", 0, "")
    assert best.swap is not None and "node b leads" in best.swap.reason
    assert best.notes == plan.notes[1:]


def test_a_state_without_any_epoch_gets_its_first_leader():
    world = World()
    world.nodes("bc")
    now, why = decided(world, PartitionState(7, 9, replicas=("a", "b", "c")))
    assert (now.leader, now.epoch, now.in_sync_nodes) == ("b", 1, ("b", "c"))
    assert "first" in why


@pytest.mark.parametrize(
    ("draining", "before", "leader"),
    [
        ("a", state("a", "abc"), "b"),
        ("ab", state("a", "abc"), "c"),
        ("abc", state("a", "abc"), "a"),
        ("a", state("a", "a", "abc"), "a"),
        ("", state("a", "abc", "bc", leaving=("a",)), "b"),
        ("", state("a", "a", "bc", leaving=("a",)), "a"),
        ("b", state("a", "ab"), "a"),
    ],
)
def test_who_drains_or_leaves_hands_over(draining: str, before: PartitionState, leader: str):
    world = World()
    for name in "abc":
        world.node(node(name, is_draining=name in draining))
    now, why = decided(world, before)
    assert now.leader == leader
    assert now.in_sync_nodes == before.in_sync_nodes
    assert ("a is draining" in why or "keep no copy" in why) == (leader != "a")


@pytest.mark.parametrize(("full", "leader"), [("a", "b"), ("ab", "c"), ("abc", "a"), ("b", "a")])
def test_who_has_no_room_hands_over_to_one_that_has(full: str, leader: str):
    world = World()
    for name in "abc":
        world.node(node(name, is_full=name in full))
    world.topic("t", replica=3)
    world.partition("t", 0, state("a", "abc"))
    master = Master(world)
    master.settle()
    now = world.state("t")
    assert now is not None and (now.leader, now.in_sync_nodes) == (leader, ("a", "b", "c"))
    assert master.settle() == [], "it comes to rest"
    assert not master.controller.spread(), "and stays so"


def test_who_has_no_room_gets_no_partitions_and_no_copies():
    world = World()
    for name in "abc":
        world.node(node(name, is_full=name == "c"))
    master = Master(world)
    assert {site.node for site in master.controller.sites()} == {"a", "b"}
    world.topic("t", replica=2)
    world.partition("t", 0, state("a", "ab"))
    master.settle()
    with pytest.raises(Refused, match="no room"):
        orders.move(master.controller, ("t", 0), "b", "c")


def crowded(*copies_max: int) -> tuple[World, Master]:
    """A topic of two copies on nodes that have files for so many copies each; its master."""
    world = World()
    for name, most in zip("abcd", copies_max, strict=False):
        world.node(node(name, copies_max=most))
    world.topic("t", replica=2)
    world.partition("t", 0, state("a", "ab"))
    return world, Master(world)


def test_a_topic_for_which_nodes_have_no_files_is_refused():
    _, master = crowded(3, 3)
    meta = TopicMeta(partition_num=3, replica=2)
    with pytest.raises(Refused, match=r"no nsqd has an open file left .* node a at most 3, node b at most 3; delete"):
        master.controller.creation("u", meta, 3)
    created(master, "u", 2, 2)
    master.settle()
    assert {name: len(held) for name, held in master.controller.view.held.items()} == {"a": 3, "b": 3}
    with pytest.raises(Refused, match="no nsqd has an open file left"):
        orders.expand(master.controller, "u", 3)


def test_partitions_without_files_get_them_when_another_topic_is_deleted():
    world, master = crowded(3, 3)
    created(master, "u", 2, 2)
    created(master, "v", 2, 2)  # both were asked for before either was placed
    master.settle()
    waiting = [name for name in "uv" if "an open file left" in master.controller.why_not_placed(name)]
    assert len(waiting) == 1
    gone = master.controller.deletion("u" if waiting == ["v"] else "v")
    assert gone is not None
    world.swap(gone)
    master.settle()
    assert not master.controller.why_not_placed(waiting[0])
    assert {name: len(held) for name, held in master.controller.view.held.items()} == {"a": 3, "b": 3}


def test_a_copy_goes_to_no_node_without_files():
    world, master = crowded(0, 0, 1, 0)
    world.topic("u", replica=1, number=8)
    world.partition("u", 0, state("c", "c", topic_number=8))
    master.settle()
    with pytest.raises(Refused, match=r"node c has 1 copies, as many as its limit of open files allows: .* ulimit -n"):
        orders.move(master.controller, ("t", 0), "b", "c")
    assert master.controller.moving.placed(("t", 0), master.controller.view.partitions["t", 0], ["a", "b"]) == "d"


def test_a_node_whose_copies_have_no_files_elsewhere_is_not_drained():
    world, master = crowded(0, 0, 1)
    world.topic("u", replica=1, number=8)
    world.partition("u", 0, state("c", "c", topic_number=8))
    master.settle()
    with pytest.raises(Refused, match=r"t/0 that can go nowhere: no nsqd has an open file left .* node c at most 1;"):
        orders.drain(master.controller, "a")


def test_a_copy_that_waits_for_a_file_is_made_when_there_is_one():
    world, master = crowded(0, 0, 1)
    world.topic("u", replica=1, number=8)
    world.partition("u", 0, state("c", "c", topic_number=8))
    world.topic("t", replica=3)
    master.settle()
    assert "an open file left" in master.controller.moving.stuck["t", 0]
    gone = master.controller.deletion("u")
    assert gone is not None
    world.swap(gone)
    master.settle()
    now = world.state("t")
    assert now is not None and now.replicas == ("a", "b", "c")
    assert not master.controller.moving.stuck


# -- suspicion ---------------------------------------------------------------------------------------------------------


def test_a_suspected_leader_is_replaced_before_its_lease_runs_out():
    world = World()
    world.nodes("ab")
    world.topic("t", replica=2)
    world.partition("t", 0, state("a", "ab"))
    master = Master(world)
    assert not master.settle()
    master.controller.suspect("a", "a0")
    master.controller.suspect("z", "z1")
    assert not master.settle(), "another process of it"
    master.controller.suspect("a", "a1")
    (why,) = master.settle()
    assert "does not listen" in why
    assert (now := world.state("t")) is not None
    assert (now.leader, now.in_sync_nodes) == ("b", ("b",))


def test_what_nobody_else_can_lead_stays_with_a_suspect_until_it_is_gone():
    world = World()
    world.nodes("ab")
    world.topic("t")
    world.partition("t", 0, state("a", "a"))
    master = Master(world)
    master.controller.suspect("a", "a1")
    assert not master.settle()
    world.delete(KEYS.node("a"))
    (why,) = master.settle()
    assert "nobody leads" in why
    world.node(node("a", incarnation="a2"))
    master.settle()
    assert world.state("t").leader == "a"  # type: ignore[union-attr]


def test_a_suspect_that_connects_again_is_one_no_longer():
    world = World()
    world.nodes("ab")
    world.topic("t", partition_num=2)
    world.partition("t", 0, state("a", "a"))
    master = Master(world)
    master.controller.suspect("a", "a1")
    master.settle()
    assert world.state("t", 1).leader == "b", "a suspect gets nothing"  # type: ignore[union-attr]
    master.controller.trust("a", "a1")
    assert set(master.controller.live) == {"a", "b"}


@pytest.mark.slow
def test_thousands_are_elected_in_one_pass():
    world = World()
    world.nodes("bc")
    world.node(node("a"))
    world.topic("t", partition_num=1, replica=2)
    for number in range(3000):
        world.partition("t", number, state("a", "ab" if number % 2 else "ac"))
    master = Master(world)
    assert not master.settle()
    world.delete(KEYS.node("a"))
    master.follow()
    assert len(master.controller.next_swaps(5000)) == LOOKS_MAX < 3000, "others have their turn"
    master = Master(world)
    swaps = master.swaps(5000)
    assert len(swaps) == 3000 and not master.swaps(5000)
    for swap in swaps:
        world.swap(swap)
        master.controller.ended(swap, is_known=True)
    assert not master.settle(), "each is elected once"
    assert [found.leader for found in world.states().values()] == ["c", "b"] * 1500


def test_what_a_node_led_is_spread_over_the_others():
    world = World()
    world.nodes("abcd")
    world.topic("t", replica=4)
    for number in range(12):
        world.partition("t", number, state("a", "abcd"))
    world.partition("t", 12, state("d", "dc", "dcab"))
    master = Master(world)
    world.delete(KEYS.node("a"))
    assert len(master.settle(count_max=20)) == 12
    leaders = [found.leader for found in world.states().values()]
    assert sorted(map(leaders.count, "bcd")) == [4, 4, 5]


def test_who_is_preferred_leads_again_after_a_restart():
    world = World()
    world.nodes("bc")
    world.node(node("a", incarnation="a2"))
    world.topic("t", replica=3)
    for number in range(3):
        world.partition("t", number, state("a", "abc"))
    Master(world).settle()
    assert {found.leader for found in world.states().values()} == {"a"}


# -- an operator decides -----------------------------------------------------------------------------------------------


def test_an_operator_lets_a_node_lead_that_lacks_something():
    world = World()
    world.nodes("bc")
    world.topic("t", replica=3)
    world.partition("t", 0, state("a", "a", "abc"))
    master = Master(world)
    for name, words in (("a", "there are b, c"), ("d", "there are b, c")):
        with pytest.raises(Refused, match=words):
            master.controller.forced(("t", 0), name)
    world.swap(master.controller.forced(("t", 0), "c"))
    now = world.state("t")
    assert now is not None and (now.leader, now.epoch, now.in_sync_nodes) == ("c", 4, ("c",))
    master.settle()
    with pytest.raises(Refused, match="is led by node c"):
        master.controller.forced(("t", 0), "b")
    with pytest.raises(Refused, match="not created"):
        master.controller.forced(("t", 1), "b")


def test_an_operator_does_not_lose_what_nobody_has_to():
    world = World()
    world.nodes("bc")
    world.topic("t", replica=3)
    world.partition("t", 0, state("a", "ab", "abc"))
    with pytest.raises(Refused, match="one of b, which have everything"):
        Master(world).controller.forced(("t", 0), "c")


# -- topics ------------------------------------------------------------------------------------------------------------


def created(master: Master, topic: str, partition_num: int, replica: int, **fields: object) -> None:
    meta = TopicMeta(partition_num=partition_num, replica=replica, **fields)  # type: ignore[arg-type]
    swap = master.controller.creation(topic, meta, partition_num)
    assert swap is not None
    master.world.swap(swap)


def test_a_topic_is_made_whole():
    world = World()
    world.nodes("abc")
    master = Master(world)
    created(master, "t", 6, 2)
    assert len(master.settle()) == 6
    record = world.record("t")
    assert record is not None and record.min_in_sync == 1
    states = list(world.states().values())
    assert {found.topic_number for found in states} == {record.number}
    assert len({found.log_id for found in states}) == 6
    assert all(found.epoch == 1 and found.in_sync_nodes == found.replicas for found in states)
    assert all(found.leader == found.replicas[0] and len(set(found.replicas)) == 2 for found in states)
    assert sorted(found.leader for found in states) == list("aabbcc"), "leaders are spread"


def test_with_three_copies_two_have_to_be_in_sync():
    world = World()
    world.nodes("abc")
    created(Master(world), "t", 1, 3)
    assert world.record("t").min_in_sync == 2  # type: ignore[union-attr]


def test_a_topic_of_which_there_is_only_the_record_is_made_whole_by_the_next_master():
    world = World()
    world.nodes("ab")
    created(Master(world), "t", 4, 1)
    first = Master(world)
    for swap in first.swaps(2):
        world.swap(swap)
    assert len(world.states()) == 2
    half = world.states()
    second = Master(world)
    assert len(second.settle()) == 2
    assert len(world.states()) == 4
    assert half.items() <= world.states().items()
    assert sorted(found.leader for found in world.states().values()) == list("aabb"), "also with what was there"


def test_partitions_without_a_place_get_one_when_nodes_come():
    world = World()
    world.nodes("ab")
    master = Master(world)
    created(master, "t", 2, 2)
    world.delete(KEYS.node("b"))
    master.follow()
    assert not master.settle()
    assert "there are 1 nsqds on 1 machines" in master.controller.why_not_placed("t")
    world.node(node("c"))
    assert len(master.settle()) == 2
    assert not master.controller.why_not_placed("t")


@pytest.mark.parametrize(
    ("nodes", "replica", "reason"),
    [
        ([], 1, "no nsqd of the cluster takes partitions"),
        ([node("a", is_draining=True)], 1, "no nsqd of the cluster takes partitions"),
        ([node("a"), node("b")], 3, "2 nsqds on 2 machines; start more"),
        ([node("a"), node("b", host_id="host a")], 2, "2 nsqds on 1 machines, which have one copy each"),
    ],
)
def test_a_topic_without_room_is_refused(nodes, replica, reason):
    world = World()
    for each in nodes:
        world.node(each)
    with pytest.raises(Refused, match=reason):
        Master(world).controller.creation("t", TopicMeta(partition_num=1, replica=replica), 1)


def test_copies_on_one_machine_where_it_is_allowed():
    world = World()
    world.node(node("a"))
    world.node(node("b", host_id="host a"))
    master = Master(world, allow_same_host=True)
    created(master, "t", 1, 2)
    master.settle()
    assert sorted(world.state("t").replicas) == ["a", "b"]  # type: ignore[union-attr]


def test_making_a_topic_again():
    world = World()
    world.nodes("ab")
    master = Master(world)
    created(master, "t", 2, 2, ordered=True)
    master.settle()
    meta = world.record("t").meta  # type: ignore[union-attr]
    assert master.controller.creation("t", meta, 2) is None
    for other, words in (
        (TopicMeta(partition_num=3, replica=2, ordered=True), "2 partitions of 2 copies"),
        (TopicMeta(partition_num=2, replica=1, ordered=True), "2 partitions of 2 copies"),
        (TopicMeta(partition_num=2, replica=2), "ordered=True"),
    ):
        with pytest.raises(Refused, match=words):
            master.controller.creation("t", other, other.partition_num)
        assert master.controller.creation("t", other, other.partition_num, is_any_fine=True) is None


def test_a_plain_topic_has_partitions_in_its_record_alone():
    world = World()
    world.nodes("ab")
    master = Master(world)
    swap = master.controller.creation("t", msgspec.structs.replace(PLAIN, replica=2), 2)
    assert swap is not None
    world.swap(swap)
    master.settle()
    record = world.record("t")
    assert record is not None and not record.meta.is_partitioned and record.partition_num == 2
    assert len(world.states()) == 2


@pytest.mark.parametrize(
    ("nodes", "defaults", "partitions", "copies"),
    [("abc", Defaults(), 3, 3), ("abcd", Defaults(), 4, 3), ("a", Defaults(), 1, 1), ("abc", Defaults(2, 1), 2, 1)],
)
def test_a_topic_that_a_node_asks_for_is_made_and_the_question_goes(
    nodes: str, defaults: Defaults, partitions: int, copies: int
):
    world = World()
    world.nodes(nodes)
    master = Master(world, defaults=defaults)
    world.put(KEYS.wanted("t"), WantedTopic(1, "a", extend_support=True))
    master.settle()
    record = world.record("t")
    assert record is not None
    assert (record.partition_num, record.meta) == (partitions, TopicMeta(0, copies, extend_support=True))
    assert len(world.states()) == partitions
    assert world.wish("t") is None
    assert not master.settle()


def test_a_topic_that_is_there_is_not_made_again_because_somebody_asks():
    world = World()
    world.nodes("abc")
    world.topic("t", partition_num=2)
    master = Master(world)
    master.settle()
    before = world.record("t")
    world.put(KEYS.wanted("t"), WantedTopic(1, "a"))
    assert master.settle() == ["topic t is there, as was asked for"]
    assert world.record("t") == before and world.wish("t") is None


def test_a_topic_that_is_asked_for_while_it_is_deleted_is_made_anew():
    world = World()
    world.nodes("abc")
    world.topic("t", number=7)
    master = Master(world)
    master.settle()
    world.swap(master.controller.deletion("t"))  # type: ignore[arg-type]
    world.put(KEYS.wanted("t"), WantedTopic(1, "a"))
    master.settle()
    record = world.record("t")
    assert record is not None and record.number != 7 and not record.is_deleting
    assert world.wish("t") is None


def test_who_asks_for_a_topic_that_cannot_be_made_is_told_why():
    world = World()
    world.nodes("ab")
    refused = {"alone": "it is on nsqd x alone"}
    master = Master(world, defaults=Defaults(1, 3), why_not=lambda topic: refused.get(topic, ""))
    for topic, reason in (("t", "replicator=3, and there are 2 nsqds"), ("alone", "on nsqd x alone")):
        world.put(KEYS.wanted(topic), WantedTopic(1, "a"))
        master.settle()
        wish = world.wish(topic)
        assert wish is not None and reason in wish.refusal
        assert world.record(topic) is None
    world.put(KEYS.wanted("t"), WantedTopic(2, "a"))  # who asks again is told anew
    master.settle()
    assert world.wish("t").refusal  # type: ignore[union-attr]
    world.delete(KEYS.node("a"))
    master.settle()
    assert world.wish("t") is None and world.wish("alone") is None, "nobody is left who would take it away"


def test_partitions_that_nodes_bring_are_not_made():
    world = World()
    world.nodes("abc")
    meta = TopicMeta(partition_num=2)
    world.put(KEYS.topic("t"), TopicRecord(7, meta, 2, is_brought=True))
    world.partition("t", 0, state("a", "a", topic_number=7))
    assert not Master(world).settle()
    assert len(world.states()) == 1


def test_nobody_makes_a_topic_that_is_asked_for_no_longer():
    world = World()
    world.nodes("abc")
    world.put(KEYS.wanted("t"), WantedTopic(1, "a"))
    master = Master(world)
    (swap,) = master.swaps()
    world.delete(KEYS.wanted("t"))
    world.swap(swap)
    assert world.record("t") is None


def test_a_topic_goes_mark_first_then_partitions_then_record():
    world = World()
    world.nodes("ab")
    master = Master(world)
    created(master, "t", 3, 2)
    created(master, "other", 1, 1)
    master.settle()
    number = world.record("t").number  # type: ignore[union-attr]
    assert master.view.fate("t", number) is Fate.THERE
    swap = master.controller.deletion("t", number)
    assert swap is not None
    with pytest.raises(Refused, match="made anew"):
        master.controller.deletion("t", number + 1)
    world.swap(swap)
    master.follow()
    assert master.view.fate("t", number) is Fate.DELETED
    assert master.controller.deletion("t") is None, "it has begun"
    with pytest.raises(Refused, match="being deleted"):
        master.controller.creation("t", TopicMeta(partition_num=3, replica=2), 3)
    assert [reason.split()[0] for reason in master.settle(2)] == ["partition"] * 3 + ["topic"]
    assert world.record("t") is None and len(world.states()) == 1
    assert master.view.fate("t", number) is Fate.DELETED, "who has seen it knows it afterwards"
    assert Master(world).view.fate("t", number) is Fate.UNKNOWN, "who was away does not"
    created(master, "t", 1, 1)
    master.settle()
    assert master.view.fate("t", number) is Fate.DELETED
    assert world.record("t").number != number  # type: ignore[union-attr]


def test_a_deletion_is_finished_by_the_next_master():
    world = World()
    world.nodes("ab")
    master = Master(world)
    created(master, "t", 3, 1)
    master.settle()
    world.swap(master.controller.deletion("t"))  # type: ignore[arg-type]
    master.follow()
    world.swap(master.swaps(1)[0])
    assert len(world.states()) == 2
    Master(world).settle()
    assert not world.states() and world.record("t") is None


def test_a_partition_is_never_made_of_a_topic_that_is_deleted_meanwhile():
    world = World()
    world.nodes("ab")
    slow = Master(world)
    created(slow, "t", 3, 1)
    slow.follow()
    late = slow.swaps()
    assert len(late) == 3
    other = Master(world)
    world.swap(other.controller.deletion("t"))  # type: ignore[arg-type]
    other.settle()
    assert world.record("t") is None
    for swap in late:
        world.swap(swap)
        slow.controller.ended(swap, is_known=True)
    assert not world.states(), "nobody would ever delete them"
    assert not slow.settle()


def test_a_topic_is_changed():
    world = World()
    world.nodes("a")
    master = Master(world)
    created(master, "t", 1, 1)
    master.settle()
    meta = msgspec.structs.replace(world.record("t").meta, retention_days=3, version=1)  # type: ignore[union-attr]
    world.swap(alter(master.controller, "t", meta).swap)  # type: ignore[arg-type]
    assert world.record("t").meta.retention_days == 3  # type: ignore[union-attr]
    with pytest.raises(Refused, match="no topic u"):
        alter(master.controller, "u", meta)
    with pytest.raises(Refused, match="no topic u"):
        master.controller.deletion("u")


def _with_copies(world: World, copies: int, least: int, *in_sync: str, partition_num: int = 0) -> Master:
    """Topic t, with as many partitions as there are in-sync sets."""
    meta = TopicMeta(partition_num=partition_num or len(in_sync), replica=copies)
    world.nodes("abc")
    world.put(KEYS.topic("t"), TopicRecord(7, meta, meta.partition_num, least))
    for number, names in enumerate(in_sync):
        world.partition("t", number, state("a", names))
    return Master(world)


def _with_more(master: Master, copies: int) -> orders.Plan:
    meta = msgspec.structs.replace(master.view.topics["t"].meta, replica=copies)
    plan = alter(master.controller, "t", meta)
    if plan.swap is not None:
        master.world.swap(plan.swap)
    return plan


@pytest.mark.parametrize(
    ("copies", "least", "in_sync", "wanted", "then"),
    [
        (2, 1, ("ab", "ab"), 3, 2),
        (1, 1, ("ab",), 3, 2),
        (1, 1, ("a",), 3, 1),
        (2, 1, ("ab", "a"), 3, 1),
        (1, 1, ("ab",), 2, 1),
        (3, 1, ("abc",), 4, 1),  # an operator has said so
        (3, 2, ("abc",), 2, 2),
    ],
)
def test_with_more_copies_more_have_to_be_in_sync_if_they_are(copies, least, in_sync, wanted, then):
    world = World()
    master = _with_copies(world, copies, least, *in_sync)
    world.node(node("d"))
    master.follow()
    notes = "".join(_with_more(master, wanted).notes)
    assert world.record("t").min_in_sync == then  # type: ignore[union-attr]
    assert ("what a leader alone acknowledges is one copy" in notes) is (then == 1)
    assert ("flintmq topic update t --min-in-sync=2" in notes) is (then == 1 and wanted > 2)


def test_a_change_says_from_what_to_what_and_where_one_node_stops_everything():
    master = _with_copies(World(), 2, 1, "ab")
    plan = _with_more(master, 3)
    assert plan.notes == ["an OK needs 2 of 3 copies in sync, instead of 1"]
    master.settle()
    (note,) = _with_more(master, 2).notes  # so many stay needed
    assert "an OK needs all 2 copies" in note and "flintmq topic update t --min-in-sync=1" in note
    master.settle()
    assert not _with_more(master, 2).notes, "nothing is changed"


def test_who_publishes_waits_neither_for_partitions_that_are_yet_to_be_brought_nor_for_the_dead():
    world = World()
    assert _with_more(_with_copies(world, 2, 1, "ab", partition_num=2), 3).notes
    assert world.record("t").min_in_sync == 1  # type: ignore[union-attr]
    world = World()
    master = _with_copies(world, 2, 1, "ab")
    master.controller.suspect("b", "b1")
    assert _with_more(master, 3).notes
    assert world.record("t").min_in_sync == 1  # type: ignore[union-attr]


def test_what_is_usual_is_said_again_to_who_asks_again():
    world = World()
    master = _with_copies(world, 1, 1, "a")
    assert _with_more(master, 3).swap is not None
    master.settle()
    again = _with_more(master, 3)
    assert again.swap is None and "--min-in-sync=2" in again.notes[0]


# -- drains ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("allow_same_host", "advice"), [(False, "on other machines, "), (True, "start more, or ")])
def test_a_node_whose_copies_have_no_place_is_not_drained(allow_same_host, advice):
    world = World()
    for name in "abc":
        world.node(node(name, host_id="one machine"))
    world.topic("t", replica=3)
    world.partition("t", 0, state("a", "abc"))
    master = Master(world, allow_same_host=allow_same_host)
    with pytest.raises(Refused, match=f"node a has a copy .* that can go nowhere: .* {advice}ask for fewer"):
        orders.drain(master.controller, "a")


def test_copies_that_wait_for_a_node_that_is_away_hold_up_no_others_and_say_so():
    world = World()
    world.nodes("abcd")
    world.topic("t", COPIES_AT_ONCE_MAX + 1, replica=3)
    for number in range(COPIES_AT_ONCE_MAX + 1):
        world.partition("t", number, state("a", "abc"))
    master = Master(world)
    _done(world, master, orders.drain(master.controller, "b"))
    under_way = [number for number in range(COPIES_AT_ONCE_MAX + 1) if "d" in replicas(world, number)]
    assert len(under_way) == COPIES_AT_ONCE_MAX
    world.delete(KEYS.node("d"))
    world.nodes("e")
    master.settle()
    stuck = master.controller.moving.stuck
    assert stuck.keys() == {("t", number) for number in under_way}
    assert all(why.startswith("node d is to have a copy and is away") for why in stuck.values())
    (other,) = set(range(COPIES_AT_ONCE_MAX + 1)) - set(under_way)
    assert "e" in replicas(world, other)
    world.nodes("d")
    master.settle()
    assert not stuck, "it is back, and gets them"
    world.delete(KEYS.node("d"))
    master.settle()
    assert stuck
    _done(world, master, orders.drain(master.controller, "d", is_removal=True))
    left = [each for each in world.states().values() if "d" in each.replicas]
    assert len(left) == 1, "e takes its place, and gets one already"


def test_copies_for_which_a_disk_has_no_room_any_more_wait_and_say_so():
    """Another node would fill up as well: whoever is to take them instead is for an operator to say."""
    world = World()
    world.nodes("abcd")
    world.topic("t", COPIES_AT_ONCE_MAX, replica=3)
    for number in range(COPIES_AT_ONCE_MAX):
        world.partition("t", number, state("a", "abc"))
    master = Master(world)
    _done(world, master, orders.drain(master.controller, "b"))
    numbers = range(COPIES_AT_ONCE_MAX)
    assert all("d" in replicas(world, number) for number in numbers)
    world.nodes("e")
    world.node(node("d", is_full=True))
    assert master.settle() == []
    stuck = master.controller.moving.stuck
    assert len(stuck) == COPIES_AT_ONCE_MAX
    why = "node d is to have a copy and has no room on its disk: free space there, or have another node take it with"
    assert all(each == f"{why} flintmq node drain d" for each in stuck.values())
    world.node(node("d"))
    assert master.settle() == [] and not stuck, "it was full for a moment, and goes on"
    world.node(node("d", is_full=True))
    _done(world, master, orders.drain(master.controller, "d"))
    assert not stuck and all({"a", "c", "e"} == set(replicas(world, number)) for number in numbers)
    master.controller.moving.check()


def test_a_copy_that_an_operator_moves_waits_for_room_where_it_was_to_go_and_says_so():
    world = World()
    world.nodes("abcd")
    world.topic("t", replica=2)
    world.partition("t", 0, state("a", "ab"))
    master = Master(world)
    _done(world, master, orders.move(master.controller, ("t", 0), "b", "c"))
    assert replicas(world, 0) == ("a", "c")
    world.node(node("c", is_full=True))
    assert master.settle() == []
    stuck = master.controller.moving.stuck
    assert stuck[("t", 0)].startswith("node c is to have a copy and has no room on its disk: free space there")
    _done(world, master, orders.drain(master.controller, "c"))
    assert replicas(world, 0) == ("a", "b") and not stuck, "who has it still"


def test_a_drain_says_that_it_waits_for_a_copy_that_fell_behind_because_its_disk_is_full():
    world = World()
    world.nodes("ab")
    world.node(node("c", is_full=True))
    world.topic("t", replica=3)
    world.partition("t", 0, state("a", "ab", "abc"))
    master = Master(world)
    world.nodes("de")
    assert master.settle() == [] and not master.controller.moving.stuck, "its disk may be mended, and nobody waits"
    _done(world, master, orders.drain(master.controller, "b"))
    assert replicas(world, 0) == ("a", "b", "c")
    assert "node c is to have a copy and has no room" in master.controller.moving.stuck[("t", 0)]


def replicas(world: World, number: int) -> tuple[str, ...]:
    return world.states()[KEYS.partition("t", number)].replicas


def _done(world: World, master: Master, plan: orders.Plan) -> None:
    assert plan.swap is not None
    world.swap(plan.swap)
    master.settle()


def test_a_copy_that_stays_while_the_cluster_is_upgraded_says_so():
    world = World()
    world.nodes("abcd")
    world.topic("t", replica=3)
    world.partition("t", 0, state("a", "abc"))
    master = Master(world)
    for plan in (orders.settle(master.controller, {"is_upgrading": True}), orders.drain(master.controller, "b")):
        assert plan.swap is not None
        world.swap(plan.swap)
    assert master.settle() == []
    stuck = master.controller.moving.stuck
    assert stuck == {("t", 0): UPGRADING}
    done = orders.settle(master.controller, {"is_upgrading": False})
    assert done.swap is not None
    world.swap(done.swap)
    assert "node b is drained" in "".join(master.settle())
    assert stuck == {}


def test_nothing_is_left_of_a_node_that_is_removed_and_has_ended():
    world = World()
    world.nodes("ab")
    for name in "ab":
        world.put(KEYS.disk(name), DiskRecord(5, f"{name}1"))
    master = Master(world)
    removal = orders.drain(master.controller, "a", is_removal=True)
    assert removal.swap is not None
    world.swap(removal.swap)
    assert master.settle() == [], "it has not ended"
    world.delete(KEYS.node("a"))
    master.follow()
    (swap,) = master.swaps()
    world.put(KEYS.disk("a"), DiskRecord(6, "a1"))  # what it had sent arrives late
    world.swap(swap)
    master.controller.ended(swap, is_known=True)
    master.settle()
    assert [pair.key for pair in world.store.range(KEYS.all).found if pair.key.endswith("/a")] == []
    assert world.store.get(KEYS.disk("b")) is not None


# -- who is master -----------------------------------------------------------------------------------------------------


def record_of(name: str) -> LookupdRecord:
    return LookupdRecord(name, f"{name}1", "host", 4160, 4161)


def as_master(world: World, name: str) -> Master:
    """Become master: the key is written, and its revision is what is compared from then on."""
    world.put(KEYS.master, record_of(name))
    return Master(world, Compare(KEYS.master, world.store.revision))


def test_who_is_master_no_longer_writes_nothing_more():
    world = World()
    world.nodes("ab")
    world.topic("t", partition_num=2, replica=2)
    world.partition("t", 0, state("c", "ca"))
    old = as_master(world, "old")
    swaps = old.swaps()
    assert [swap.key for swap in swaps] == [KEYS.partition("t", 0), KEYS.partition("t", 1)]
    new = as_master(world, "new")
    revision = world.store.revision
    for swap in swaps:
        world.swap(swap)
        old.controller.ended(swap, is_known=True)
    assert world.store.revision == revision, "nothing of that was carried out, although nobody else decided"
    assert not old.settle(), "and it decides nothing more"
    assert len(new.settle()) == 2
    again = as_master(world, "old")
    assert not old.settle(), "an election of later is another one's"
    assert not again.settle(), "there is nothing left to do"


def test_nothing_is_decided_before_the_view_has_us_as_master():
    world = World()
    world.nodes("b")
    world.topic("t", replica=2)
    world.partition("t", 0, state("a", "ab"))
    next_revision = world.store.revision + 1
    master = Master(world, Compare(KEYS.master, next_revision))
    assert not master.settle()
    world.put(KEYS.master, record_of("us"))
    assert world.store.revision == next_revision
    assert len(master.settle()) == 1


# -- what cannot be read -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        b"{",
        b"\xff",
        b'{"log_id": 1}',
        encode(state("a", "bc")),
        encode(state("", "")),
        encode(state("a", "aa")),
        encode(state("a", "a", "bb")),
    ],
)
def test_a_state_that_cannot_be_read_is_left_alone(value: bytes):
    world = World()
    world.nodes("bc")
    world.topic("t", partition_num=2, replica=2)
    world.put(KEYS.partition("t", 0), value)
    world.partition("t", 1, state("a", "ab"))
    master = Master(world)
    assert len(master.settle()) == 1, "the other one is elected"
    assert world.store.get(KEYS.partition("t", 0)).value == value  # type: ignore[union-attr]
    assert list(master.view.unreadable) == [KEYS.partition("t", 0)]
    assert KEYS.partition("t", 0) in why_no_leader(master.view, ("t", 0))
    world.partition("t", 0, state("a", "ac"))
    assert len(master.settle()) == 1
    assert not master.view.unreadable


def test_a_topic_that_cannot_be_read_keeps_its_leaders():
    world = World()
    world.nodes("bc")
    world.put(KEYS.topic("t"), b"?")
    world.partition("t", 0, state("a", "ab"))
    master = Master(world)
    assert len(master.settle()) == 1
    for call in (
        lambda: master.controller.creation("t", PLAIN, 1),
        lambda: master.controller.deletion("t"),
        lambda: alter(master.controller, "t", PLAIN),
    ):
        with pytest.raises(Refused, match="cannot be read"):
            call()


def test_a_leader_whose_record_cannot_be_read_is_left_alone():
    world = World()
    world.nodes("b")
    world.put(KEYS.node("a"), b'{"node": "a", "version": "of a newer kind"}')
    world.topic("t", partition_num=2, replica=2)
    world.partition("t", 0, state("a", "ab"))
    world.partition("t", 1, state("b", "ab"))
    assert not Master(world).settle()
    world.delete(KEYS.node("a"))
    assert len(Master(world).settle()) == 1


def test_a_state_of_no_topic_is_left_alone():
    world = World()
    world.nodes("b")
    world.partition("t", 0, state("a", "ab"))
    assert not Master(world).settle()


def test_a_node_under_another_name_is_none():
    world = World()
    world.put(KEYS.node("a"), node("b"))
    master = Master(world)
    assert not master.view.nodes and KEYS.node("a") in master.view.unreadable


# -- swaps that do not end as they should ------------------------------------------------------------------------------


def test_a_swap_of_which_nothing_is_known_is_decided_anew():
    world = World()
    world.nodes("b")
    world.topic("t", replica=2)
    world.partition("t", 0, state("a", "ab"))
    master = Master(world)
    (swap,) = master.swaps()
    assert not master.swaps(), "while it is under way"
    master.controller.ended(swap, is_known=False)
    (again,) = master.swaps()
    assert again == swap
    world.swap(swap)  # the first one was carried out after all
    world.swap(again)
    master.controller.ended(again, is_known=True)
    assert not master.settle()
    assert world.state("t").epoch == 4  # type: ignore[union-attr]


def test_a_swap_is_not_repeated_before_its_outcome_is_heard():
    world = World()
    world.nodes("b")
    world.topic("t", replica=2)
    world.partition("t", 0, state("a", "ab"))
    master = Master(world)
    (swap,) = master.swaps()
    world.swap(swap)
    master.controller.ended(swap, is_known=True)
    world.node(node("c"))
    assert not master.swaps()
    master.view.feed(world.store.range(KEYS.all))
    master.controller.see([], is_whole=True)
    assert not master.swaps()
