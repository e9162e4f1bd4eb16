"""nsqlookupd's database: every rule of NSQ's nsqlookupd, and its invariants under any sequence of calls."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flintmq.cluster.registration import NsqdNode, RegistrationDatabase, TooManyRegistrations
from flintmq.topic_meta import PLAIN, TopicMeta

SECOND = 1_000_000_000
INACTIVE_NS = 300 * SECOND
TOMBSTONE_NS = 45 * SECOND


def node(name: str = "a", now_ns: int = 0, **fields) -> NsqdNode:
    facts = {
        "node_id": f"10.0.0.1:{name}",
        "remote_address": f"10.0.0.1:{name}",
        "hostname": name,
        "broadcast_address": f"{name}.example",
        "tcp_port": 4150,
        "http_port": 4151,
        "version": "1.3.0",
        "last_update_ns": now_ns,
    }
    return NsqdNode(**{**facts, **fields})


@pytest.fixture
def database():
    found = RegistrationDatabase(INACTIVE_NS, TOMBSTONE_NS)
    yield found
    found.check()


def test_the_highest_version_of_a_topic_wins_and_the_others_are_behind(database, a, b):
    old = TopicMeta(partition_num=4, retention_days=9)
    new = TopicMeta(partition_num=4, retention_days=1, version=1)
    database.describe_topic(a.node_id, "t", old)
    assert database.behind("t") == []
    database.describe_topic(b.node_id, "t", new)
    assert (database.meta("t"), database.behind("t")) == (new, [a])
    database.describe_topic(a.node_id, "t", new)
    assert database.behind("t") == []


def test_two_changes_of_one_version_end_in_the_same_one_everywhere(database, a, b):
    one = TopicMeta(partition_num=4, retention_days=1, version=1)
    two = TopicMeta(partition_num=4, retention_days=2, version=1)
    database.describe_topic(a.node_id, "t", one)
    database.describe_topic(b.node_id, "t", two)
    higher, behind = max((one, b), (two, a), key=lambda each: each[0].rank)
    assert (database.meta("t"), database.behind("t")) == (higher, [behind])


@pytest.mark.parametrize("partition_num", [0, 4])
def test_headers_that_a_topic_was_created_with_on_one_node_are_no_change(database, a, b, partition_num):
    bare, headed = (TopicMeta(partition_num=partition_num, extend_support=each) for each in (False, True))
    database.describe_topic(a.node_id, "t", bare)
    database.describe_topic(b.node_id, "t", headed)
    assert (database.meta("t"), database.behind("t")) == (bare, [])


def test_of_one_version_headers_win(database, a, b):
    """Whatever else it says: a node that has them cannot give them up."""
    bare, headed = TopicMeta(retention_days=9, version=1), TopicMeta(extend_support=True, version=1)
    database.describe_topic(a.node_id, "t", bare)
    database.describe_topic(b.node_id, "t", headed)
    assert (database.meta("t"), database.behind("t")) == (headed, [a])


def test_who_has_a_plain_topic_is_not_behind_one_with_partitions(database, a, b):
    database.register(a.node_id, "t")
    database.describe_topic(b.node_id, "t", TopicMeta(partition_num=4, version=3))
    assert database.behind("t") == []


def test_the_node_of_a_tombstone_is_written_with_brackets_or_as_nsq_writes_it(database):
    six = node("six", broadcast_address="::1")
    database.add_node(six)
    database.register(six.node_id, "t")
    assert six.http_address == "[::1]:4151"
    assert [database.tombstone("t", name, 5) for name in ("[::1]:4151", "::1:4151", "[::1]:4150")] == [1, 1, 0]


def test_a_tombstone_can_be_lifted(database, a):
    database.register(a.node_id, "t")
    database.tombstone("t", a.http_address, 5)
    assert database.lookup("t", 6).nodes == []
    assert database.tombstone("t", a.http_address, None) == 1
    assert database.lookup("t", 6).nodes == [a]


@pytest.fixture
def a(database):
    found = node("a")
    database.add_node(found)
    return found


@pytest.fixture
def b(database):
    found = node("b")
    database.add_node(found)
    return found


def lookup(database, topic, now_ns=0):
    found = database.lookup(topic, now_ns)
    return None if found is None else (found.channels, [entry.hostname for entry in found.nodes])


class TestRegister:
    def test_topic(self, database, a):
        assert database.register(a.node_id, "t") is True
        assert database.register(a.node_id, "t") is False
        assert database.topics() == ["t"]
        assert lookup(database, "t") == ([], ["a"])

    def test_channel_registers_the_topic_too(self, database, a):
        database.register(a.node_id, "t", "c")
        assert lookup(database, "t") == (["c"], ["a"])

    def test_unknown_topic(self, database):
        assert lookup(database, "t") is None
        assert database.channels("t") == []

    def test_order_does_not_depend_on_arrival(self, database, b, a):
        for found in (b, a):
            for topic in ("z", "a", "m"):
                for channel in ("y", "b"):
                    database.register(found.node_id, topic, channel)
        assert database.topics() == ["a", "m", "z"]
        assert lookup(database, "m") == (["b", "y"], ["a", "b"])
        assert [(found.node.hostname, found.topics) for found in database.nodes(0)] == [
            ("a", ["a", "m", "z"]),
            ("b", ["a", "m", "z"]),
        ]

    def test_a_star_is_a_name_like_any_other(self, database, a):
        database.register(a.node_id, "t", "c")
        assert database.channels("*") == []
        assert database.delete_topic("*") == []
        assert database.topics() == ["t"]

    def test_an_id_identifies_once(self, database, a):
        with pytest.raises(AssertionError, match="twice"):
            database.add_node(node("a"))


class TestUnregister:
    def test_channel_keeps_key_and_topic(self, database, a):
        database.register(a.node_id, "t", "c")
        assert database.unregister(a.node_id, "t", "c") == [("t", "c")]
        assert database.unregister(a.node_id, "t", "c") == []
        assert lookup(database, "t") == (["c"], ["a"])

    def test_topic_takes_its_channels(self, database, a):
        for channel in ("c", "d"):
            database.register(a.node_id, "t", channel)
        database.register(a.node_id, "other", "c")
        assert sorted(database.unregister(a.node_id, "t")) == [("t", ""), ("t", "c"), ("t", "d")]
        assert lookup(database, "t") == (["c", "d"], [])
        assert lookup(database, "other") == (["c"], ["a"])

    def test_of_what_was_never_registered(self, database, a):
        assert database.unregister(a.node_id, "t") == []
        assert database.unregister(a.node_id, "t", "c") == []
        assert database.topics() == []

    def test_others_stay(self, database, a, b):
        for found in (a, b):
            database.register(found.node_id, "t", "c")
        database.unregister(a.node_id, "t")
        assert lookup(database, "t") == (["c"], ["b"])


class TestEphemeral:
    """Defect 17: upstream keeps the keys of ephemeral topics and channels after a disconnect."""

    def test_channel_goes_with_its_last_node(self, database, a, b):
        for found in (a, b):
            database.register(found.node_id, "t", "c#ephemeral")
        database.unregister(a.node_id, "t", "c#ephemeral")
        assert database.channels("t") == ["c#ephemeral"]
        database.unregister(b.node_id, "t", "c#ephemeral")
        assert lookup(database, "t") == ([], ["a", "b"])

    def test_channel_goes_with_the_connection(self, database, a):
        database.register(a.node_id, "t", "c#ephemeral")
        database.register(a.node_id, "t", "kept")
        database.remove_node(a.node_id)
        assert lookup(database, "t") == (["kept"], [])

    def test_topic_goes_with_its_last_node(self, database, a, b):
        for found in (a, b):
            database.register(found.node_id, "t#ephemeral", "c")
        database.remove_node(a.node_id)
        assert lookup(database, "t#ephemeral") == (["c"], ["b"])
        database.remove_node(b.node_id)
        assert database.topics() == []
        assert "keys=0" in database.describe()

    def test_topic_unregistered(self, database, a):
        database.register(a.node_id, "t#ephemeral", "c")
        assert sorted(database.unregister(a.node_id, "t#ephemeral")) == [("t#ephemeral", ""), ("t#ephemeral", "c")]
        assert database.topics() == []

    def test_created_by_hand_waits_for_its_first_node(self, database, a):
        database.create("t", "c#ephemeral")
        database.register(a.node_id, "t")
        assert database.channels("t") == ["c#ephemeral"]
        database.unregister(a.node_id, "t", "c#ephemeral")
        assert database.channels("t") == []


class TestDisconnect:
    def test_registrations_go_and_keys_stay(self, database, a):
        database.register(a.node_id, "t", "c")
        assert sorted(database.remove_node(a.node_id)) == [("t", ""), ("t", "c")]
        assert lookup(database, "t") == (["c"], [])
        assert database.nodes(0) == []

    def test_unknown_node(self, database):
        assert database.remove_node("nobody") == []

    def test_a_new_connection_starts_empty(self, database, a):
        database.register(a.node_id, "t")
        database.remove_node(a.node_id)
        database.add_node(node("a"))
        assert lookup(database, "t") == ([], [])


class TestInactive:
    def test_filtered_when_silent_for_longer(self, database, a):
        database.register(a.node_id, "t")
        assert lookup(database, "t", INACTIVE_NS) == ([], ["a"])
        assert lookup(database, "t", INACTIVE_NS + 1) == ([], [])
        assert database.nodes(INACTIVE_NS + 1) == []
        assert database.all_nodes() == [a]

    def test_a_ping_brings_it_back(self, database, a):
        database.register(a.node_id, "t")
        assert database.touch(a.node_id, INACTIVE_NS * 2) == INACTIVE_NS * 2
        assert lookup(database, "t", INACTIVE_NS * 3) == ([], ["a"])


class TestTombstone:
    def test_it_hides_one_node_from_one_topic(self, database, a, b):
        for found in (a, b):
            for topic in ("t", "other"):
                database.register(found.node_id, topic, "c")
        assert database.tombstone("t", "a.example:4151", now_ns=10) == 1
        assert lookup(database, "t", 10) == (["c"], ["b"])
        assert lookup(database, "other", 10) == (["c"], ["a", "b"])

    def test_nodes_shows_it(self, database, a):
        for topic in ("a", "t", "z"):
            database.register(a.node_id, topic)
        database.tombstone("t", "a.example:4151", now_ns=10)
        (found,) = database.nodes(10)
        assert (found.topics, found.tombstones) == (["a", "t", "z"], [False, True, False])
        (found,) = database.nodes(10 + TOMBSTONE_NS)
        assert found.tombstones == [False, False, False]

    def test_it_expires(self, database, a):
        database.register(a.node_id, "t")
        database.tombstone("t", "a.example:4151", now_ns=10)
        assert lookup(database, "t", 10 + TOMBSTONE_NS - 1) == ([], [])
        assert lookup(database, "t", 10 + TOMBSTONE_NS) == ([], ["a"])

    def test_registering_again_does_not_lift_it(self, database, a):
        database.register(a.node_id, "t")
        database.tombstone("t", "a.example:4151", now_ns=10)
        database.register(a.node_id, "t", "new")
        assert lookup(database, "t", 10) == (["new"], [])

    def test_unregistering_does(self, database, a):
        database.register(a.node_id, "t")
        database.tombstone("t", "a.example:4151", now_ns=10)
        database.unregister(a.node_id, "t")
        assert lookup(database, "t", 10) == ([], [])
        database.register(a.node_id, "t")
        assert lookup(database, "t", 10) == ([], ["a"])

    @pytest.mark.parametrize(
        ("topic", "address"),
        [("t", "a.example:4150"), ("t", "10.0.0.1:4151"), ("t", ""), ("x", "a.example:4151"), ("*", "a.example:4151")],
    )
    def test_no_match(self, database, a, topic, address):
        database.register(a.node_id, "t")
        assert database.tombstone(topic, address, 0) == 0


class TestKeysByHand:
    def test_create(self, database):
        database.create("t")
        database.create("t")
        database.create("u", "c")
        assert database.topics() == ["t", "u"]
        assert lookup(database, "u") == (["c"], [])

    def test_delete_topic(self, database, a):
        database.register(a.node_id, "t", "c")
        assert database.delete_topic("t") == ["c"]
        assert lookup(database, "t") is None
        (found,) = database.nodes(0)
        assert found.topics == []
        database.register(a.node_id, "t")
        assert lookup(database, "t") == ([], ["a"])

    def test_delete_channel(self, database, a):
        database.register(a.node_id, "t", "c")
        assert database.delete_channel("t", "c") is True
        assert database.delete_channel("t", "c") is False
        assert database.delete_channel("x", "c") is False
        assert lookup(database, "t") == ([], ["a"])

    def test_all_registrations(self, database, a):
        database.register(a.node_id, "t", "c")
        database.create("empty")
        listed = [(topic, channel, len(found)) for topic, channel, found in database.all_registrations()]
        assert listed == [("empty", "", 0), ("t", "", 1), ("t", "c", 1)]


class TestPartitions:
    def test_a_registration_goes_with_its_last_partition(self, database, a):
        for partition in (3, 1, 3):
            database.register(a.node_id, "t", "c", partition)
        registrations = {channel: found for _, channel, found in database.all_registrations()}
        assert [found[0].partitions for found in registrations.values()] == [[1, 3], [1, 3]]
        assert database.unregister(a.node_id, "t", "c", 3) == []
        assert database.unregister(a.node_id, "t", "c", 1) == [("t", "c")]
        assert lookup(database, "t") == (["c"], ["a"])

    def test_a_partition_of_a_topic_takes_that_of_its_channels(self, database, a):
        database.register(a.node_id, "t", "c", 0)
        database.register(a.node_id, "t", "", 1)
        assert database.unregister(a.node_id, "t", "", 0) == [("t", "c")]
        assert lookup(database, "t") == (["c"], ["a"])
        assert database.unregister(a.node_id, "t", "", 1) == [("t", "")]
        assert lookup(database, "t") == (["c"], [])


class TestBounds:
    def test_registrations_per_node(self):
        database = RegistrationDatabase(INACTIVE_NS, TOMBSTONE_NS, registrations_per_node_max=3)
        a, b = node("a"), node("b")
        database.add_node(a)
        database.add_node(b)
        database.register(a.node_id, "t", "c")
        with pytest.raises(TooManyRegistrations, match="at most 3"):
            database.register(a.node_id, "u", "c")
        assert database.topics() == ["t"]
        database.register(a.node_id, "u")
        database.register(a.node_id, "t", "c")
        database.register(b.node_id, "u", "c")
        database.unregister(a.node_id, "u")
        database.register(a.node_id, "v")
        database.check()

    def test_keys(self):
        database = RegistrationDatabase(INACTIVE_NS, TOMBSTONE_NS, keys_max=3)
        a = node("a")
        database.add_node(a)
        database.create("t", "c")
        with pytest.raises(TooManyRegistrations, match="topics and channels"):
            database.create("u", "c")
        with pytest.raises(TooManyRegistrations):
            database.register(a.node_id, "u", "c")
        database.create("u")
        with pytest.raises(TooManyRegistrations):
            database.create("t", "d")
        database.delete_channel("t", "c")
        database.create("t", "d")
        database.check()


class DatabaseMachine(RuleBasedStateMachine):
    """Any sequence of calls, beside upstream's model: a map of (category, topic, channel) to node ids."""

    nodes = st.sampled_from(["1", "2", "3"])
    topics = st.sampled_from(["t", "u#ephemeral"])
    channels = st.sampled_from(["", "c", "d#ephemeral"])

    def __init__(self) -> None:
        super().__init__()
        self.database = RegistrationDatabase(INACTIVE_NS, TOMBSTONE_NS)
        self.connected: dict[str, None] = {}
        self.model: dict[tuple[str, str], set[str]] = {}

    def drop_ephemeral(self, keys) -> None:
        for topic, channel in keys:
            if (topic, channel) in self.model and not self.model[topic, channel]:
                if channel.endswith("#ephemeral"):
                    del self.model[topic, channel]
                elif not channel and topic.endswith("#ephemeral"):
                    for key in [key for key in self.model if key[0] == topic]:
                        del self.model[key]

    @rule(name=nodes)
    def connect(self, name):
        if name not in self.connected:
            self.connected[name] = None
            self.database.add_node(node(name, node_id=name))

    @rule(name=nodes)
    def disconnect(self, name):
        self.database.remove_node(name)
        self.connected.pop(name, None)
        touched = [key for key, ids in self.model.items() if name in ids]
        for key in touched:
            self.model[key].discard(name)
        self.drop_ephemeral(touched)

    @rule(name=nodes, topic=topics, channel=channels)
    def register(self, name, topic, channel):
        if name in self.connected:
            self.database.register(name, topic, channel)
            for key in ((topic, ""), (topic, channel)):
                self.model.setdefault(key, set()).add(name)

    @rule(name=nodes, topic=topics, channel=channels)
    def unregister(self, name, topic, channel):
        if name in self.connected:
            self.database.unregister(name, topic, channel)
            touched = [(topic, channel)] if channel else [key for key in self.model if key[0] == topic]
            for key in touched:
                self.model.get(key, set()).discard(name)
            self.drop_ephemeral(touched)

    @rule(topic=topics, channel=channels)
    def create(self, topic, channel):
        self.database.create(topic, channel)
        for key in ((topic, ""), (topic, channel)):
            self.model.setdefault(key, set())

    @rule(topic=topics)
    def delete_topic(self, topic):
        self.database.delete_topic(topic)
        for key in [key for key in self.model if key[0] == topic]:
            del self.model[key]

    @rule(topic=topics, channel=st.sampled_from(["c", "d#ephemeral"]))
    def delete_channel(self, topic, channel):
        assert self.database.delete_channel(topic, channel) == ((topic, channel) in self.model)
        self.model.pop((topic, channel), None)

    @invariant()
    def it_agrees_with_the_model(self):
        self.database.check()
        listed = {
            (topic, channel): {found.node.node_id for found in registrations}
            for topic, channel, registrations in self.database.all_registrations()
        }
        assert listed == self.model


DatabaseMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
TestDatabaseMachine = pytest.mark.slow(DatabaseMachine.TestCase)


META = TopicMeta(partition_num=3, ordered=True)


class TestTopicsWithPartitions:
    def test_every_partition_has_its_node(self, database, a, b):
        for owner, numbers in ((a, (0, 2)), (b, (1,))):
            database.describe_topic(owner.node_id, "t", META)
            for number in numbers:
                database.register(owner.node_id, "t", partition=number)
        found = database.partitions("t", 0)
        assert {number: owner.hostname for number, owner in found.leaders.items()} == {0: "a", 1: "b", 2: "a"}
        assert (found.meta, found.plain, found.channels) == (META, [], [])
        assert [each.partitions for each in database.nodes(0)] == [{"t": [0, 2]}, {"t": [1]}]
        assert [each.hostname for each in database.holders("t")] == ["a", "b"]

    def test_of_two_that_claim_one_the_first_has_it(self, database, a, b):
        for owner in (b, a):
            database.register(owner.node_id, "t", partition=0)
        assert database.partitions("t", 0).leaders[0].hostname == "a"

    def test_who_is_silent_or_tombstoned_has_none(self, database, a, b):
        for number, owner in enumerate((a, b)):
            database.register(owner.node_id, "t", partition=number)
        database.tombstone("t", a.http_address, 0)
        assert list(database.partitions("t", 0, hides_tombstoned=True).leaders) == [1]
        assert list(database.partitions("t", 0).leaders) == [0, 1]
        database.touch(b.node_id, 2 * INACTIVE_NS)
        assert list(database.partitions("t", 2 * INACTIVE_NS).leaders) == [1]

    def test_a_plain_node_beside_one_with_partitions(self, database, a, b):
        database.describe_topic(a.node_id, "t", META)
        database.register(a.node_id, "t", partition=0)
        database.register(b.node_id, "t", "c")
        found = database.partitions("t", 0)
        assert ([each.hostname for each in found.plain], list(found.leaders)) == (["b"], [0])
        assert found.meta == META

    def test_channels_of_a_partition(self, database, a):
        database.register(a.node_id, "t", "c", 0)
        database.register(a.node_id, "t", "d", 1)
        assert database.channels_of_partition("t", 0) == ["c"]
        assert database.channels_of_partition("t", 2) == []
        assert database.channels_of_partition("other", 0) == []

    def test_what_it_was_created_with_goes_with_the_last_who_knows(self, database, a):
        assert database.describe_topic(a.node_id, "t", META) is True
        assert database.describe_topic(a.node_id, "t", META) is False
        database.remove_node(a.node_id)
        assert database.meta("t") == database.meta("unknown") == PLAIN
        assert database.partitions("unknown", 0) is None
