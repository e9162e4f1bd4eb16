"""A partition without messages begins with the channels of its topic, before anything is stored in it."""

from __future__ import annotations

import pytest
from tests.unit.broker.test_leading import Both
from tests.unit.broker.test_replicas import META, NUMBER

from flintmq.broker.known_topic import KnownChannel, KnownTopic
from flintmq.broker.led_replicas import Records
from flintmq.broker.metadata import Waiter
from flintmq.broker.partition import PublishGroup
from flintmq.errors import StorageError
from flintmq.settings import Settings
from flintmq.storage.records import PutBacklog, PutChannel, PutProgress, PutSettings, PutTopic

PAUSED = KnownChannel(paused=True)
ELSEWHERE = KnownTopic(
    False,
    {"theirs": PAUSED, "skipped": KnownChannel(skipped=True), "both": KnownChannel()},
    {"": Settings(max_attempts=9, ttl_ms=10**6), "theirs": Settings(is_ordered=True)},
)


class Node(Both):
    """A node whose other replicas acknowledge when the test says so."""

    def _hand_on(self, records: Records, done: Waiter) -> None:
        if self.is_waiting:
            self.waiting.append(done)
        else:
            super()._hand_on(records, done)

    def found(self, *begins_with: KnownTopic, number: int = NUMBER) -> None:
        """Lead a partition that begins."""
        self.done.clear()
        replica = self.broker.replicas["t", number]
        replica.note_epoch(1, True, self.done.append)
        self.broker.led_replicas.promote(replica, 1, META, self.done.append, begins_with)
        while len(self.done) < 2:
            self.flush()
        assert self.done == [None, None]

    def channel_states(self, number: int = NUMBER) -> dict[str, tuple[int, bool, bool, bool]]:
        channels = self.broker.topics["t"].partitions[number].channels
        return {
            name: (each.floor, each.paused, each.skipped, each.keep_floor is not None)
            for name, each in channels.items()
        }


def test_it_has_the_channels_that_others_have_with_all_that_is_set_for_them() -> None:
    node = Node()
    node.found(ELSEWHERE, KnownTopic(False, {"theirs": PAUSED, "both": KnownChannel()}))
    node.settle()
    wanted = {"theirs": (1, True, False, True), "skipped": (1, False, True, False), "both": (1, False, False, False)}

    def check() -> None:
        assert node.channel_states() == wanted
        assert node.broker.topics["t"].channel_names == {"theirs": True, "skipped": False, "both": False}
        assert node.broker.own_settings("t") == Settings(max_attempts=9, ttl_ms=10**6)
        assert not node.broker.topics["t"].paused

    check()
    records = node.whole()
    assert {each.channel for each in records if isinstance(each, PutChannel)} == wanted.keys()
    assert {each.channel for each in records if isinstance(each, PutSettings)} == {"", "theirs"}
    node.die(power_loss=True)
    node.lead_both(2)
    check()


def test_what_is_here_of_its_topic_counts_as_well_and_stays_as_it_is() -> None:
    node = Node()
    node.found(number=0)
    topic = node.broker.topics["t"]
    for name in ("here", "both", "gone#ephemeral"):
        node.broker.channel(topic, name)
    node.broker.pause_channel(topic, "both", True)
    node.broker.pause_channel(topic, "here", True)
    node.broker.change_settings(topic, None, Settings(max_attempts=7))
    node.settle()
    known = node.broker.led_replicas.known("t")
    assert known == KnownTopic(False, {"here": PAUSED, "both": PAUSED}, {"": Settings(max_attempts=7)})
    node.found(KnownTopic(True, ELSEWHERE.channels, ELSEWHERE.settings))
    assert {name: state[1] for name, state in node.channel_states().items()} == {
        "here": True, "both": False, "theirs": True, "skipped": False,
    }  # fmt: skip
    assert not topic.paused and topic.partitions[NUMBER].paused_at is None, "it is not paused everywhere"
    assert node.broker.own_settings("t") == Settings(max_attempts=7, ttl_ms=10**6)
    assert node.broker.own_settings("t", "theirs") == Settings(is_ordered=True)
    node.settle()
    node.die(power_loss=True)
    node.lead_both(2)
    assert node.broker.own_settings("t") == Settings(max_attempts=7, ttl_ms=10**6)


def test_a_topic_that_is_paused_everywhere_hands_nothing_out() -> None:
    node = Node()
    node.found(KnownTopic(True, {"c": KnownChannel()}), KnownTopic(True))
    node.settle()
    topic = node.broker.topics["t"]
    assert topic.paused and topic.partitions[NUMBER].paused_at == 1
    node.store([b"1"])
    node.commit_all()
    consumer = node.consume("c")
    consumer.ready(1)
    assert not consumer.received()
    node.broker.pause_topic(topic, False)
    node.pump()
    assert len(consumer.received()) == 1


def test_nothing_is_stored_before_its_channels_are_on_all_replicas() -> None:
    node = Node()
    node.is_waiting = True
    node.found(ELSEWHERE)
    said: list[str] = []
    node.broker.led_replicas.hold_until_stored(node.replica, lambda: said.append("stored"))
    group: PublishGroup = node.broker.publish_to(node.partition, [b"1"])
    for _ in range(3):
        node.broker.write_pending(node.clock.wall_ns())
        node.flush()
        assert not said and node.log.next_sequence == 1
    waiting, node.waiting = node.waiting, []
    node.is_waiting = False
    waiting[0](StorageError("one of them is led elsewhere now"))
    assert group.ended and isinstance(group.error, StorageError), "whoever waits is told"
    group = node.broker.publish_to(node.partition, [b"2"])
    for done in waiting[1:]:
        done(None)
    node.settle()
    assert said == ["stored"]
    node.broker.commit_groups(node.broker.write_pending(node.clock.wall_ns()))
    assert node.log.next_sequence == 2


def test_who_leads_no_more_waits_for_nothing() -> None:
    node = Node()
    node.is_waiting = True
    node.found(ELSEWHERE)
    said: list[str] = []
    node.broker.led_replicas.hold_until_stored(node.replica, lambda: said.append("stored"))
    node.flush()
    node.broker.led_replicas.demote(node.replica, StorageError("x"))
    node.is_waiting = False
    for done in node.waiting:
        done(None)
    node.settle()
    assert not said
    with pytest.raises(ValueError, match="not led here"):
        node.broker.led_replicas.hold_until_stored(node.replica, lambda: None)


def test_copies_tell_what_their_leaders_have_said() -> None:
    node = Node()
    node.follow(
        0,
        [
            PutTopic("t", True),
            PutSettings.of("t", "c", Settings(max_attempts=2)),
            PutBacklog("t", 0, 1, None),
            PutChannel("t", 0, "c", True, False),
            PutProgress("t", 0, "c", 1, b"", [], [], [], 0),
        ],
    )
    node.found(KnownTopic())
    found: list[tuple[list[KnownTopic], BaseException | None]] = []
    node.broker.led_replicas.followed("t", [0, NUMBER, 7], lambda *answer: found.append(answer))
    node.settle()
    assert found == [([KnownTopic(True, {"c": PAUSED}, {"c": Settings(max_attempts=2)})], None)]
