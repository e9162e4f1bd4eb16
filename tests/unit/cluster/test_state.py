"""The values of the coordination store, and what may be made of them."""

import pytest

from flintmq.cluster.keys import Keys
from flintmq.cluster.state import (
    BadState,
    LookupdRecord,
    Member,
    NodeRecord,
    NoLeader,
    PartitionState,
    TopicRecord,
    candidates,
    decode,
    elected,
    encode,
    joined,
    renounced,
    without,
    without_leader,
)
from flintmq.topic_meta import TopicMeta


def node(name, incarnation="1", boot_id="boot", syncs=False, **fields):
    return NodeRecord(name, incarnation, boot_id, syncs, "host", 4150, 4151, 4152, **fields)


def state_of(*names, leader="", replicas=(), leaving=(), syncs=False):
    members = tuple(Member(name, "boot", syncs) for name in names)
    return PartitionState(7, 9, 3, leader, "1" if leader else "", members, replicas or names, leaving)


def live(*nodes):
    return {each.node: each for each in nodes}


def names(found):
    return [each.node for each in found]


def test_an_election_begins_an_epoch_with_the_process_that_leads():
    state = elected(state_of("a", "b", leader="a"), node("b", "2"))
    assert (state.epoch, state.leader, state.incarnation) == (4, "b", "2")
    assert state.is_led_by("b", "2") and not state.is_led_by("b", "1") and not state.is_led_by("a", "1")
    assert not without_leader(state).is_led_by("", "")


def test_only_a_member_of_the_in_sync_set_leads():
    with pytest.raises(ValueError, match="not in sync"):
        elected(state_of("a", replicas=("a", "b")), node("b"))
    with pytest.raises(ValueError, match="not in sync"):
        elected(state_of("a", "b"), node("b"), [Member("a", "boot", False)])


def test_a_leader_is_in_sync_as_it_is_now():
    state = elected(state_of("a", "b", syncs=True), node("b", boot_id="later", syncs=True))
    assert state.in_sync == (Member("a", "boot", True), Member("b", "later", True))


def test_the_leader_takes_members_out_and_in_but_not_itself():
    state = state_of("a", "b", "c", leader="a")
    assert without(state, {"b", "c"}).in_sync_nodes == ("a",)
    with pytest.raises(ValueError, match="leads"):
        without(state, {"a"})
    back = joined(without(state, {"b"}), Member("b", "later", False))
    assert back.in_sync_nodes == ("a", "c", "b") and back.epoch == state.epoch
    assert joined(back, Member("b", "again", False)).in_sync_nodes == ("a", "c", "b")
    with pytest.raises(ValueError, match="no replica"):
        joined(state, Member("d", "boot", False))


def test_who_lost_something_leaves_it_to_the_others():
    state = state_of("a", "b", "c", leader="a")
    as_follower, as_leader = renounced(state, "b"), renounced(state, "a")
    assert as_follower is not None and as_leader is not None
    assert (as_follower.in_sync_nodes, as_follower.leader, as_follower.epoch) == (("a", "c"), "a", state.epoch)
    assert (as_leader.in_sync_nodes, as_leader.leader, as_leader.incarnation) == (("b", "c"), "", "")
    assert renounced(as_leader, "a") is None, "it is no member"
    assert renounced(without(state, {"b", "c"}), "a") is None, "nobody else has it"


def test_a_leader_that_was_started_again_does_not_lead():
    state = state_of("a", "b", leader="a")
    assert state.has_leader(live(node("a")))
    assert not state.has_leader(live(node("a", "2")))
    assert not state.has_leader(live(node("b")))
    assert not without_leader(state).has_leader(live(node("a")))


def test_candidates_are_in_sync_alive_and_whole():
    state = state_of("a", "b", "c")
    assert names(candidates(state, live(node("b"), node("c"), node("d")))) == ["b", "c"]
    assert names(candidates(state, live(node("b", boot_id="later"), node("c")))) == ["c"]
    assert candidates(state, live(node("d"))) is NoLeader.NONE_ALIVE
    assert candidates(state, live(node("b", boot_id="later"))) is NoLeader.POWER_LOST
    synced = state_of("a", "b", syncs=True)
    assert names(candidates(synced, live(node("b", boot_id="later")))) == ["b"]


def test_a_process_with_an_older_data_directory_is_whole_where_it_joined_itself():
    older = node("b", "2", boot_id="older/2", is_older=True)
    synced = state_of("a", "b", syncs=True)
    assert candidates(synced, live(older)) is NoLeader.POWER_LOST
    assert names(candidates(synced, live(node("a"), older))) == ["a"]
    again = joined(synced, Member("b", "older/2", True))
    assert names(candidates(again, live(older))) == ["b"]
    assert names(candidates(again, live(node("b", boot_id="later")))) == ["b"], "the next process has what it had"
    assert candidates(again, live(node("b", "3", boot_id="older/3", is_older=True))) is NoLeader.POWER_LOST, (
        "unless it is an older one again"
    )


def test_a_candidate_that_stays_goes_before_one_that_goes():
    state = state_of("a", "b", "c", replicas=("c", "b"), leaving=("a",))
    assert names(candidates(state, live(node("a"), node("b"), node("c")))) == ["c", "b", "a"]
    assert names(candidates(state, live(node("a"), node("b"), node("c", is_draining=True)))) == ["b", "c", "a"]


def test_values_are_json_and_what_is_none_is_told_with_its_key():
    meta = TopicMeta(partition_num=2, replica=3)
    for value in state_of("a", "b", leader="a"), node("a"), TopicRecord(5, meta, 2, 2):
        assert decode("k", encode(value), type(value)) == value
    with pytest.raises(BadState, match=r"key k.*not a PartitionState"):
        decode("k", b'{"epoch":"one"}', PartitionState)
    with pytest.raises(BadState, match="key k"):
        decode("k", b"\xff", NodeRecord)


def test_keys_name_what_they_are_read_as():
    keys = Keys("main")
    assert keys.partition_in(keys.partition("a.b", 12)) == ("a.b", 12)
    assert keys.name_in(keys.topic("a.b"), "topic") == "a.b"
    assert keys.name_in(keys.node("ab"), "topic") is None
    for wrong in keys.topic("a"), f"{keys.prefix}partition/a/1", f"{keys.prefix}partition//0001", "/flintmq/other/x":
        assert keys.partition_in(wrong) is None
    assert keys.partitions("a").has(keys.partition("a", 0)) and not keys.partitions("a").has(keys.partition("ab", 0))
    for span in keys.nodes, keys.topics, keys.lookupds, keys.partitions():
        assert keys.all.start <= span.start
    with pytest.raises(ValueError, match="cluster is called"):
        Keys("a/b")


def test_the_port_for_https_of_a_nsqlookupd_is_no_matter_for_other_releases():
    without = LookupdRecord("1", "2", "h", 4160, 4161)
    assert b"https" not in encode(without)
    assert decode("k", encode(without), LookupdRecord) == without and without.https_port == 0
    secured = LookupdRecord("1", "2", "h", 4160, 4161, 4163)
    assert decode("k", encode(secured), LookupdRecord) == secured
    assert decode("k", encode(secured)[:-1] + b',"of_a_later_release":1}', LookupdRecord) == secured
