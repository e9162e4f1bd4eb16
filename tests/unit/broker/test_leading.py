"""Leading a replicated partition: it begins as a start of the leader would, whatever its life was; and it ends."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from tests.sim.disk import DiskCrashed
from tests.unit.broker.test_replicas import LOG_ID, META, NUMBER, TOPIC_NUMBER, World
from tests.unit.broker.world import MSG_TIMEOUT_NS, SECOND, Consumer

from flintmq.broker.broker import TopicConflict, TopicNotFound
from flintmq.broker.channel import Channel
from flintmq.broker.led_replicas import Records, SpilledState
from flintmq.broker.metadata import Waiter
from flintmq.broker.partition import Partition, PublishGroup
from flintmq.broker.subscription import Subscription
from flintmq.errors import StorageError
from flintmq.settings import Settings
from flintmq.storage.records import (
    PutBacklog,
    PutChannel,
    PutProgress,
    PutSettings,
    PutSpilled,
    PutTopic,
    Record,
    decode_records,
    encode_records,
)
from flintmq.topic_meta import TopicMeta


class Node(World):
    """A node that leads a partition or follows it; what its flushes say is kept for others."""

    def __init__(self, seed: int = 1, meta: TopicMeta = META) -> None:
        self.meta = meta
        self.flushes: list[list[Record]] = []
        self.waiting: list[Waiter] = []
        self.is_waiting = False
        super().__init__(seed)
        self.window_max = 16
        self.make(meta=meta)

    def open(self) -> None:
        super().open()
        self.broker.led_replicas.on_records = self._hand_on

    def _hand_on(self, records: Records, done: Waiter) -> None:
        self.flushes.append(records["t", NUMBER])
        if self.is_waiting:
            self.waiting.append(done)
        else:
            done(None)

    def lead(self, epoch: int, meta: TopicMeta | None = None) -> None:
        self.done.clear()
        self.replica.note_epoch(epoch, True, self.done.append)
        self.broker.led_replicas.promote(self.replica, epoch, meta or self.meta, self.done.append)
        self.settle()
        assert self.done == [None, None]
        self._bound_windows(self.partition.channels.values())
        self.pump()

    def commit_all(self) -> None:
        self.broker.set_watermark(self.partition, self.log.next_sequence)
        self.pump()

    @property
    def partition(self) -> Partition:
        return self.broker.topics["t"].partitions[NUMBER]

    def store(self, bodies: list[bytes], due_ns: int = 0, producer: tuple[bytes, int] | None = None) -> PublishGroup:
        prefix = self.partition.prefix
        assert prefix is None or producer is None or prefix
        group = self.broker.publish_to(self.partition, bodies, due_ns, producer=producer)
        self.broker.commit_groups(self.broker.write_pending(self.clock.wall_ns()))
        return group

    def whole(self) -> list[Record]:
        """All that a new replica needs; what is spilled comes last."""
        found: list[Record] = []

        def done(records: list[Record], spilled: SpilledState | None, error: BaseException | None) -> None:
            assert error is None
            found.extend(records)
            if spilled is not None:
                read(spilled)

        def read(spilled: SpilledState) -> None:
            def took(records: list[Record], error: BaseException | None) -> None:
                assert error is None
                found.extend(records)
                if records:
                    read(spilled)
                else:
                    spilled.close()

            self.broker.led_replicas.read_spilled(spilled, took)

        self.broker.led_replicas.whole_state(self.replica, done)
        self.settle()
        return found

    def consume(self, channel: str) -> Consumer:
        return self.subscribe("t", channel, NUMBER)

    def apply(self, position: tuple[int, int], records: list[Record], is_whole: bool = False) -> None:
        sent = list(decode_records(encode_records(records)))
        if is_whole:
            self.stage([record for record in sent if isinstance(record, PutSpilled)])
            sent = [record for record in sent if not isinstance(record, PutSpilled)]
        self.done.clear()
        self.broker.followed_replicas.apply(self.replica, position, sent, is_whole, self.done.append)
        self.settle()
        assert self.done == [None] and self.replica.progress == position

    def stage(self, records: Sequence[Record]) -> None:
        self.done.clear()
        for record in records:
            self.broker.followed_replicas.stage(self.replica, [record], self.done.append)
            self.settle()
        assert self.done == [None] * len(records)

    def take_batches(self, leader: Node) -> None:
        end = self.log.next_sequence
        while end < leader.log.next_sequence:
            data, end = leader.log.fetch_stored(end, 300)
            self.broker.followed_replicas.append(self.replica, data)


def picture(node: Node) -> dict[str, Any]:
    """All that a partition and its topic are."""
    topic, partition, broker = node.broker.topics["t"], node.partition, node.broker
    found: dict[str, Any] = {
        "": (
            topic.paused,
            topic.is_starting,
            topic.meta,
            partition.backlog_start,
            partition.paused_at,
            partition.headers_from,
            partition.log.next_sequence,
            broker.own_settings("t"),
            dict(partition.log.producers.table.items()),
            topic.channel_names,
        )
    }
    for name, channel in partition.channels.items():
        packs = broker._store.due(broker._channels.cursor(channel), (-1, -1), 1 << 62, 1 << 40).packs
        spilled = sorted(
            (sequence, piece.due_ns, piece.attempts, frame)
            for pack in packs
            for piece in pack.pieces
            for sequence, frame in piece.messages()
        )
        found[name] = (
            channel.state(),
            channel.paused,
            channel.skipped,
            channel.limit,
            channel.spilled.count,
            channel.keep_floor is not None,
            broker.own_settings("t", name),
            spilled,
        )
        channel.check()
    return found


class Pair:
    """A leader and its follower, and what one does for the other."""

    def __init__(self, seed: int, meta: TopicMeta = META) -> None:
        self.random = random.Random(seed)
        self.leader, self.follower = Node(seed, meta), Node(seed + 1, meta)
        self.leader.lead(1)
        self.follower.note(1)
        self.leader.flushes.clear()
        self.n = 0
        self.consumers: dict[str, Consumer] = {}
        self.bring_whole()

    def bring_whole(self) -> None:
        self.leader.flush()
        records = self.leader.whole()
        self.n += len(self.leader.flushes)
        self.leader.flushes.clear()
        self.follower.apply((1, self.n), records, is_whole=True)

    def bring(self) -> None:
        """Let the follower have all that the leader's flushes said."""
        flushes, self.leader.flushes = self.leader.flushes, []
        if flushes and self.follower.replica.progress != (1, self.n):
            self.leader.flushes = flushes
            self.bring_whole()
            return
        for records in flushes:
            self.n += 1
            self.follower.apply((1, self.n), records)

    def live(self) -> None:
        """Something happens."""
        leader, rng = self.leader, self.random
        broker, topic, partition = leader.broker, leader.broker.topics["t"], leader.partition
        names = list(partition.channels)
        name = rng.choice(names) if names else "c0"
        choice = rng.randrange(20)
        if choice < 5:
            due_ns = leader.due_clock_ns + rng.choice([0, 0, 30, 5000, 90_000]) * SECOND if rng.random() < 0.4 else 0
            leader.store([b"%d" % rng.randrange(1000)] * rng.randint(1, 9), due_ns)
            leader.commit_all()
        elif choice == 5:
            last = leader.log.producers.table.last(b"p") or 0
            leader.store([b"once"] * 2, producer=(b"p", last + 1))
            leader.commit_all()
        elif choice == 6 or not names:
            broker.channel(topic, f"c{rng.randrange(4)}")
            leader._bound_windows(partition.channels.values())
            leader.flush()
        elif choice < 13:
            consumer = self.consumers.get(name)
            if consumer is None:
                consumer = self.consumers[name] = leader.consume(name)
            consumer.ready(rng.randint(1, 6))
            for each in consumer.received():
                action = rng.randrange(5)
                if action < 3:
                    consumer.finish([each.internal])
                elif action == 3:
                    consumer.requeue(each.internal, rng.choice([0, 10, 4000]) * SECOND)
        elif choice == 13:
            leader.pass_time(rng.choice([1, 100, 3000]) * SECOND)
        elif choice == 14:
            broker.pause_channel(topic, name, rng.random() < 0.5)
        elif choice == 15:
            broker.skip_channel(topic, name, rng.random() < 0.3)
        elif choice == 16:
            settings = rng.choice([Settings(), Settings(max_attempts=50), Settings(ttl_ms=10**9)])
            broker.change_settings(topic, rng.choice([None, name]), settings)
        elif choice == 17:
            if rng.random() < 0.4:
                self.leave(name)
                broker.delete_channel(topic, name)
            elif rng.random() < 0.5:
                broker.empty_channel(topic, name)
        elif choice == 18:
            broker.pause_topic(topic, rng.random() < 0.5)
            if rng.random() < 0.3 and not topic.meta.ordered and name not in self.consumers:
                broker.order_channel(topic, name, rng.random() < 0.5)
        else:
            leader.flush()
        leader.pump()

    def leave(self, name: str) -> None:
        if name in self.consumers:
            self.leader.leave(self.consumers.pop(name))

    def end(self) -> None:
        for name in list(self.consumers):
            self.leave(name)
        self.leader.settle()
        self.leader.flush()


@pytest.mark.parametrize("meta", [META, TopicMeta(partition_num=2, extend_support=True)], ids=["plain", "extended"])
@pytest.mark.parametrize("seed", range(12))
def test_it_begins_where_a_start_of_the_leader_would(seed, meta):
    pair = Pair(seed, meta)
    leader, follower, rng = pair.leader, pair.follower, pair.random
    for _ in range(150):
        pair.live()
        if rng.random() < 0.1:
            leader.flush()
        if rng.random() < 0.1:
            follower.take_batches(leader)
        if rng.random() < 0.15:
            pair.bring()
        if rng.random() < 0.02:
            follower.flush()
            follower.die(power_loss=False)
    pair.end()
    follower.take_batches(leader)
    pair.bring()
    assert follower.replica.progress == (1, pair.n)
    leader.die(power_loss=False)
    leader.lead(2)
    follower.clock.advance(leader.now_ns - follower.now_ns)
    follower.lead(2)
    assert picture(follower) == picture(leader)
    assert not leader.told and not follower.told
    leader.commit_all()
    follower.commit_all()
    for node in (leader, follower):  # it goes on living
        node.store([b"new"] * 3)
        node.commit_all()
        node.flush()
        node.die(power_loss=False)
        node.lead(3)
        node.commit_all()
    assert picture(follower) == picture(leader)


# -- what is not committed


def led(seed: int = 1) -> Node:
    node = Node(seed)
    node.lead(1)
    node.broker.channel(node.broker.topics["t"], "c")
    node.flush()
    return node


def follower_of(leader: Node) -> Node:
    node = Node(2)
    node.note(1)
    node.apply((1, 1), leader.whole(), is_whole=True)
    node.take_batches(leader)
    return node


def test_nothing_is_delivered_before_the_watermark_moves():
    leader = led()
    leader.store([b"a"] * 3)
    leader.commit_all()
    leader.store([b"b"] * 2)
    leader.flush()
    node = follower_of(leader)
    node.replica.log.advance_committed(3)
    node.lead(2)
    consumer = node.consume("c")
    consumer.ready(100)
    assert [each.sequence for each in consumer.received()] == [1, 2]
    mine = node.store([b"mine"])
    node.pump()
    assert not mine.ended and consumer.received() == []
    assert node.log.committed_sequence == 3 and node.partition.depth == 0
    assert node.log.fetch(1, 100, 1 << 20)[1] <= 4
    node.broker.set_watermark(node.partition, 6)
    node.pump()
    assert [each.sequence for each in consumer.received()] == [3, 4, 5] and not mine.ended
    node.broker.set_watermark(node.partition, 7)
    node.pump()
    assert mine.ended and mine.error is None
    assert [each.sequence for each in consumer.received()] == [6]


def test_a_duplicate_of_what_is_not_committed_waits_for_it():
    leader = led()
    leader.store([b"x"], producer=(b"p", 1))
    node = follower_of(leader)
    node.lead(2)
    again = node.store([b"x"], producer=(b"p", 1))
    behind = node.store([b"y"], producer=(b"p", 2))
    assert not again.ended and not behind.ended, "the first copy may yet be cut off"
    assert node.log.next_sequence == 3
    node.broker.set_watermark(node.partition, 2)
    assert again.ended and again.error is None and not behind.ended
    node.commit_all()
    assert behind.ended and behind.error is None
    late = node.store([b"x"], producer=(b"p", 1))
    assert late.ended and late.error is None and node.log.next_sequence == 3


def test_a_duplicate_is_told_when_it_is_led_no_longer():
    leader = led()
    leader.store([b"x"], producer=(b"p", 1))
    node = follower_of(leader)
    node.lead(2)
    again = node.store([b"x"], producer=(b"p", 1))
    error = StorageError("another leads")
    node.broker.led_replicas.demote(node.replica, error)
    assert again.error is error


def test_what_is_written_and_not_committed_may_be_ended_later():
    """That it is synced here, or that the topic is gone, does not say that it is stored."""
    node = led()
    node.store([b"x"])
    node.commit_all()
    written = node.store([b"y"])
    unwritten = node.broker.publish_to(node.partition, [b"z"])
    kept: list[PublishGroup] = []
    refused = StorageError("not taken")
    node.broker.led_replicas.demote(node.replica, StorageError("another leads"), refused, kept.extend)
    assert kept == [written] and not written.ended
    assert unwritten.error is refused
    node.broker.publishes.commit_groups(kept)
    assert not written.ended


def test_its_batches_carry_the_epoch():
    leader = led()
    leader.store([b"x"])
    node = follower_of(leader)
    node.lead(7)
    node.store([b"y"])
    assert node.replica.history == [(1, 1), (7, 2)]
    node.die(power_loss=False)
    assert node.replica.history == [(1, 1), (7, 2)] and node.replica.epoch == 7
    with pytest.raises(ValueError, match="epoch 6 was not noted"):
        node.broker.led_replicas.promote(node.replica, 6, META, node.done.append)


# -- leading ends


def test_what_it_had_is_there_again_when_it_leads_again():
    node = led()
    node.broker.channel(node.broker.topics["t"], "other#ephemeral")
    node.store([b"%d" % n for n in range(40)])
    node.store([b"late"] * 3, node.due_clock_ns + 9000 * SECOND)
    node.commit_all()
    node.broker.change_settings(node.broker.topics["t"], None, Settings(max_attempts=9))
    consumer = node.consume("c")
    consumer.ready(30)
    taken = consumer.received()
    consumer.finish([each.internal for each in taken[2:7]])
    consumer.requeue(taken[0].internal, 5000 * SECOND)
    consumer.requeue(taken[1].internal, 0)
    waiting = node.store([b"waiting"])
    error = StorageError("another leads")
    subscriptions = node.broker.led_replicas.demote(node.replica, error)
    assert subscriptions == [consumer.subscription] and waiting.error is error
    assert "t" not in node.broker.topics and node.replica.partition is None
    with pytest.raises(TopicConflict):
        node.broker.topic("t", 1)
    with pytest.raises(TopicNotFound):
        node.broker.delete_topic("t")
    node.consumers.clear()
    node.pump()
    node.settle()
    node.lead(2)
    first = picture(node)
    assert first["c"][0].window.count(1) >= 5 and first["c"][4] >= 1
    assert first[""][7] == Settings(max_attempts=9) and set(first) == {"", "c"}
    node.flush()
    node.die(power_loss=True)
    node.lead(3)
    assert picture(node) == first


class Released:
    """A listener of one channel that keeps who lost what; nothing else is told of a partition that is led no longer."""

    def __init__(self) -> None:
        self.told: list[tuple[Subscription, list[int]]] = []

    def released(self, subscription: Subscription, sequences: Iterable[int]) -> None:
        self.told.append((subscription, list(sequences)))


def test_what_consumers_hold_when_leading_ends_is_told_once():
    node = led()
    node.store([b"%d" % n for n in range(5)])
    node.commit_all()
    consumers = [node.consume("c"), node.consume("c"), node.consume("c")]
    for consumer, rdy_count in zip(consumers, (3, 2, 1), strict=True):
        consumer.ready(rdy_count)
    held = [sorted(each.sequence for each in consumer.received()) for consumer in consumers]
    assert sorted(sequence for its in held for sequence in its) == [1, 2, 3, 4, 5]
    listener: Any = Released()
    node.partition.channels["c"].events = listener
    subscriptions = node.broker.led_replicas.demote(node.replica, StorageError("another leads"))
    assert len(subscriptions) == 3
    expected = [(each.subscription, its) for each, its in zip(consumers, held, strict=True) if its]
    assert listener.told == expected
    node.consumers.clear()


def test_what_a_flush_that_fails_had_taken_is_not_forgotten():
    node = led()
    node.store([b"late"] * 3, node.due_clock_ns + 9000 * SECOND)
    node.store([b"x"] * 60)
    node.commit_all()
    consumer = node.consume("c")
    consumer.ready(60)
    taken = consumer.received()
    consumer.requeue(taken[0].internal, 8000 * SECOND)
    consumer.finish([each.internal for each in taken[1:]])
    flush = node.take_flush()
    assert flush.changes
    node.broker.led_replicas.demote(node.replica, StorageError("x"))
    node.consumers.clear()
    node.end_flush(flush, [], OSError("disk"))
    node.settle()
    node.lead(2)
    spilled = {sequence for sequence, *_ in picture(node)["c"][7]}
    assert taken[0].sequence in spilled
    node.commit_all()
    assert not node.broker._channels.changed.keys() - {*node.partition.channels.values()}


def test_what_a_flush_under_way_writes_is_written_again():
    node = led()
    node.store([b"x"] * 60)
    node.commit_all()
    consumer = node.consume("c")
    consumer.ready(60)
    taken = consumer.received()
    consumer.requeue(taken[0].internal, 8000 * SECOND)
    flush = node.take_flush()
    answers = node.run_flush(flush)
    consumer.requeue(taken[1].internal, 8000 * SECOND)
    node.broker.led_replicas.demote(node.replica, StorageError("x"))
    node.consumers.clear()
    node.end_flush(flush, answers)
    node.settle()
    node.lead(2)
    found = picture(node)["c"]
    assert sorted(sequence for sequence, *_ in found[7]) == [taken[0].sequence, taken[1].sequence]
    assert found[4] == 2


def test_a_leader_that_comes_back_follows():
    leader = led()
    leader.store([b"a"])
    leader.commit_all()
    node = follower_of(leader)
    leader.store([b"lost"])
    node.lead(2)
    node.commit_all()
    node.store([b"b"] * 2)
    node.commit_all()
    leader.broker.led_replicas.demote(leader.replica, StorageError("another leads"))
    leader.note(2)
    leader.done.clear()
    leader.broker.followed_replicas.cut_back(leader.replica, 2, leader.done.append)
    leader.settle()
    assert leader.done == [None]
    leader.take_batches(node)
    leader.apply((2, 1), node.whole(), is_whole=True)
    node.flush()
    leader.lead(3)
    node.die(power_loss=False)
    node.lead(3)
    assert picture(leader) == picture(node)


def test_what_rows_say_of_what_was_cut_off_is_not_believed():
    node = led()
    node.store([b"a"] * 4)
    node.broker.set_watermark(node.partition, 3)
    node.broker.channel(node.broker.topics["t"], "late")  # begins at the end, which is not committed
    node.settle()
    node.broker.led_replicas.demote(node.replica, StorageError("another leads"))
    node.note(2)
    with pytest.raises(ValueError):
        node.broker.followed_replicas.cut_back(node.replica, 2, node.done.append)
    node.done.clear()
    node.broker.followed_replicas.start_over(node.replica, 3, 90, node.done.append)
    node.settle()
    assert node.done == [None]
    for _ in range(2):
        node.die(power_loss=True)
    node.lead(3)
    assert node.partition.channels["late"].next == 3
    assert node.partition.channels["c"].floor == 3


# -- records


def test_those_who_wait_are_told_when_the_others_have_it():
    node = led()
    node.is_waiting = True
    told: list[Any] = []
    node.broker.channel(node.broker.topics["t"], "new")
    assert node.broker.when_metadata_durable(told.append)
    node.flush()
    assert told == [] and len(node.waiting) == 1
    # one who asks for the same afterwards is not told before
    assert node.broker.when_metadata_durable(told.append)
    epochs: list[Any] = []
    node.replica.note_epoch(2, False, epochs.append)
    node.flush()
    assert epochs == [None], "what concerns this node alone does not wait"
    node.waiting[0](None)
    node.waiting[0](None)
    assert told == [None, None]
    assert not node.broker.when_metadata_durable(told.append)


def test_what_the_others_do_not_get_is_told():
    node = led()
    node.is_waiting = True
    told: list[Any] = []
    node.broker.channel(node.broker.topics["t"], "new")
    node.broker.when_metadata_durable(told.append)
    node.flush()
    error = StorageError("nobody there")
    node.waiting[0](error)
    assert told == [error]


def test_nothing_is_handed_on_of_what_is_not_led():
    node = led()
    node.create("mine")
    node.flushes.clear()
    node.broker.channel(node.broker.topics["mine"], "c")
    node.broker.channel(node.broker.topics["t"], "e#ephemeral")
    node.flush()
    assert node.flushes == []


def test_progress_that_does_not_follow_is_refused():
    leader = led()
    node = follower_of(leader)
    for position, is_whole in (((1, 3), False), ((1, 1), False), ((2, 2), False), ((0, 2), True)):
        with pytest.raises(ValueError):
            node.broker.followed_replicas.apply(node.replica, position, [], is_whole, node.done.append)
    with pytest.raises(ValueError, match="PutBacklog is not of this partition"):
        records: list[Record] = [*leader.whole()[:1], PutBacklog("t", NUMBER + 1, 1, None)]
        node.broker.followed_replicas.apply(node.replica, (1, 2), records, False, node.done.append)
    node.apply((1, 2), [])
    node.note(2)
    with pytest.raises(ValueError):
        node.broker.followed_replicas.apply(node.replica, (1, 3), [], False, node.done.append)
    node.die(power_loss=False)
    assert node.replica.progress == (1, 2)


def test_a_clock_that_was_set_moves_what_is_led_alone():
    leader = led()
    leader.store([b"late"] * 2, leader.due_clock_ns + 9000 * SECOND)
    leader.commit_all()
    consumer = leader.consume("c")
    consumer.ready(5)
    leader.settle()
    leader.flushes.clear()
    before = picture(leader)["c"][7]
    assert before or leader.broker.topics
    node = follower_of(leader)
    node.broker.clock_moved(77 * SECOND, 0)
    node.settle()
    leader.broker.clock_moved(5 * SECOND, 0)
    leader.settle()
    for number, records in enumerate(leader.flushes, 2):
        node.apply((1, number), records)
    leader.leave(consumer)
    leader.die(power_loss=False)
    leader.lead(2)
    node.lead(2)
    mine, theirs = picture(node)["c"], picture(leader)["c"]
    assert mine[0] == theirs[0] and mine[7] == theirs[7]


@pytest.mark.parametrize("shift_ns", [-3600 * SECOND, 3600 * SECOND])
@pytest.mark.parametrize("delay_s", [20, 900])
def test_a_leader_whose_clock_was_set_delivers_when_messages_are_due(shift_ns, delay_s):
    leader = led()
    consumer = leader.consume("c")
    consumer.ready(5)
    leader.store([b"reached"], leader.due_clock_ns + delay_s * SECOND)
    leader.store([b"given back"])
    leader.commit_all()
    (given,) = consumer.received()
    consumer.requeue(given.internal, delay_s * SECOND)
    leader.flush()
    leader.leave(consumer)
    leader.store([b"in the log"], leader.due_clock_ns + (delay_s + 20) * SECOND)
    node = follower_of(leader)
    # its clock was behind or ahead at its start, and has been set since: only what it counts from is off
    node.clock.jump_wall(-shift_ns)
    node.broker.clock_moved(shift_ns, node.due_clock_ns)
    node.lead(2)
    node.commit_all()
    consumer = node.consume("c")
    consumer.ready(5)
    seen = []
    for passed_s in (delay_s - 5, 10, 10, 10):
        node.pass_time(passed_s * SECOND)
        node.settle()
        seen.append(sorted(each.body for each in consumer.received()))
    assert seen == [[], [b"given back", b"reached"], [], [b"in the log"]]


# -- crashes


def do_apply(node: Node, leader: Node) -> None:
    node.apply((1, 2), leader.flushes[-1])


def do_apply_whole(node: Node, leader: Node) -> None:
    node.apply((1, 9), leader.whole(), is_whole=True)


def do_promote(node: Node, leader: Node) -> None:
    node.lead(2)


def do_demote(node: Node, leader: Node) -> None:
    node.lead(2)
    node.broker.led_replicas.demote(node.replica, StorageError("x"))
    node.settle()


def begin(seed: int) -> tuple[Node, Node]:
    leader = led(seed)
    leader.store([b"x"] * 30)
    leader.store([b"late"] * 3, leader.due_clock_ns + 9000 * SECOND)
    leader.commit_all()
    leader.flush()
    node = follower_of(leader)
    leader.flushes.clear()
    consumer = leader.consume("c")
    consumer.ready(20)
    taken = consumer.received()
    consumer.finish([each.internal for each in taken[3:9]])
    consumer.requeue(taken[0].internal, 5000 * SECOND)
    leader.broker.channel(leader.broker.topics["t"], "new")
    leader.broker.pause_channel(leader.broker.topics["t"], "c", True)
    leader.flush()
    assert len(leader.flushes) == 1
    return leader, node


@pytest.mark.parametrize("power_loss", [False, True], ids=["kill", "power"])
@pytest.mark.parametrize(
    "action", [do_apply, do_apply_whole, do_promote, do_demote], ids=lambda each: each.__name__[3:]
)
def test_a_crash_at_every_operation_leaves_progress_as_it_was_or_as_it_is_to_be(action, power_loss):
    def end(node: Node) -> dict[str, Any]:
        node.lead(node.replica.epoch + 1)
        return picture(node)

    before = end(begin(1)[1])
    leader, node = begin(1)
    action(node, leader)
    if node.replica.partition is not None:
        node.broker.led_replicas.demote(node.replica, StorageError("x"))
        node.settle()
    after = end(node)
    nth = 1
    while True:
        leader, node = begin(nth)
        node.disk.crash_at(node.disk.operation_count + nth, power_loss, random.Random(nth))
        try:
            action(node, leader)
        except DiskCrashed:
            node.consumers.clear()
            node.open()
        else:
            break
        position = node.replica.progress
        found = end(node)
        found_end, wanted = found.pop(""), [dict(each) for each in (before, after)]
        for each in wanted:
            each.pop("")
        if power_loss:  # the log may have lost what was not synced, and channels stand no further than it
            assert found_end[6] <= before[""][6]
        else:
            assert found in wanted
            assert position in ((0, 0), (1, 1)) or found == wanted[1]
        node.settle()
        nth += 1
    assert nth > 2


def test_it_is_the_same_number_everywhere():
    assert (NUMBER, TOPIC_NUMBER, LOG_ID, MSG_TIMEOUT_NS) == (1, 77, 4711, 60 * SECOND)


# -- several partitions of a topic


class Both(Node):
    """A node with two partitions of a topic."""

    def __init__(self, meta: TopicMeta = META) -> None:
        super().__init__(1, meta)
        self.broker.replicas.create("t", 0, TOPIC_NUMBER, LOG_ID + 1, meta, self.done.append)
        self.settle()

    def _hand_on(self, records: Records, done: Waiter) -> None:
        for key in sorted(records):
            self.flushes.append(records[key])
        done(None)

    def lead_both(self, epoch: int, meta: TopicMeta | None = None) -> None:
        self.done.clear()
        for replica in self.broker.replicas.values():
            replica.note_epoch(epoch, True, self.done.append)
            self.broker.led_replicas.promote(replica, epoch, meta or self.meta, self.done.append)
        self.settle()
        assert self.done == [None] * 4

    def follow(self, number: int, records: list[Record]) -> None:
        replica = self.broker.replicas["t", number]
        self.done.clear()
        replica.note_epoch(3, False, self.done.append)
        self.broker.followed_replicas.apply(replica, (3, 1), records, True, self.done.append)
        self.settle()
        assert self.done == [None, None]


def test_what_is_said_of_a_topic_goes_with_each_of_its_partitions():
    node = Both()
    node.lead_both(1)
    topic = node.broker.topics["t"]
    assert list(topic.partitions) == [0, 1]
    node.flushes.clear()
    node.broker.channel(topic, "c")
    node.broker.pause_topic(topic, True)
    node.broker.change_settings(topic, "c", Settings(max_attempts=3))
    node.settle()
    assert len(node.flushes) == 2
    for number in (0, 1):
        kinds = [type(record).__name__ for record in node.flushes[number]]
        assert kinds.count("PutTopic") == kinds.count("PutSettings") == kinds.count("PutChannel") == 1
    stored = node.broker._store._database.query("SELECT name FROM topic", ())
    assert stored == [], "its rows are those of its replicas"
    for replica in list(node.broker.replicas.values()):
        node.broker.led_replicas.demote(replica, StorageError("x"))
    node.settle()
    assert node.broker.topics == {} and node.broker.own_settings("t", "c") == Settings()
    node.die(power_loss=True)
    node.lead_both(2)
    topic = node.broker.topics["t"]
    assert topic.paused and node.broker.own_settings("t", "c") == Settings(max_attempts=3)
    assert [partition.paused_at for partition in topic.partitions.values()] == [1, 1]
    node.create("mine")
    node.die(power_loss=False)
    assert list(node.broker.topics) == ["mine"]


@pytest.mark.parametrize("is_paused_here", [False, True])
def test_a_partition_that_comes_to_a_topic_takes_its_pause_and_leaves_it_its_settings(is_paused_here):
    node = Both()
    node.done.clear()
    node.note(1, begins=True)
    node.broker.led_replicas.promote(node.replica, 1, META, node.done.append)
    node.settle()
    topic = node.broker.topics["t"]
    node.broker.channel(topic, "here")
    node.broker.change_settings(topic, None, Settings(max_attempts=7))
    node.broker.pause_topic(topic, is_paused_here)
    node.settle()
    theirs: list[Record] = [
        PutTopic("t", not is_paused_here),
        PutSettings.of("t", "", Settings(max_attempts=9, ttl_ms=10**6)),
        PutChannel("t", 0, "there", False, False),
        PutProgress("t", 0, "there", 1, b"", [], [], [], 0),
    ]
    node.follow(0, theirs)
    assert not node.broker.topics["t"].paused or is_paused_here, "a replica that is followed changes nothing here"
    node.done.clear()
    node.broker.led_replicas.promote(node.broker.replicas["t", 0], 3, META, node.done.append)
    node.settle()
    assert node.done == [None]
    assert topic.paused and all(each.paused_at is not None for each in topic.partitions.values())
    assert set(topic.channel_names) == {"here", "there"}
    assert set(topic.partitions[0].channels) == {"there"} and set(topic.partitions[1].channels) == {"here"}
    assert node.broker.own_settings("t") == Settings(max_attempts=7, ttl_ms=10**6)
    node.broker.led_replicas.demote(node.replica, StorageError("x"))
    node.settle()
    assert set(topic.channel_names) == {"there"} and list(topic.partitions) == [0]
    node.die(power_loss=False)
    node.lead_both(4)
    assert node.broker.topics["t"].paused
    assert node.broker.own_settings("t") == Settings(max_attempts=7, ttl_ms=10**6)


def test_headers_that_the_topic_got_meanwhile_begin_behind_what_is_stored():
    leader = led()
    leader.store([bytes(8) + b"plain"])
    leader.commit_all()
    node = follower_of(leader)
    newer = TopicMeta(partition_num=3, extend_support=True, version=1)
    node.lead(2, newer)
    node.commit_all()
    assert node.partition.meta == newer and node.partition.headers_from == 2
    assert not node.partition.has_headers(1) and node.partition.has_headers(2)
    node.settle()
    node.die(power_loss=False)
    node.lead(3, META)  # what somebody says who has missed the change
    assert node.partition.meta == newer and node.partition.headers_from == 2
    node.commit_all()
    assert not isinstance(node.store([b"x"]).error, Exception)


def test_a_topic_of_replicas_is_nobodys_to_create_or_delete():
    node = Both()
    for _ in range(2):
        with pytest.raises(TopicConflict, match="replicated"):
            node.broker.topic("t", 1)
        with pytest.raises(TopicConflict, match="replicated"):
            node.broker.create_partitions("t", META, [2], 1)
        if not node.broker.topics:
            node.lead_both(1)
            assert node.broker.topic("t", 1) is node.broker.topics["t"]
            with pytest.raises(TopicConflict, match="replicated"):
                node.broker.delete_topic("t")
            node.broker.led_replicas.demote(node.replica, StorageError("x"))
            node.broker.led_replicas.demote(node.broker.replicas["t", 0], StorageError("x"))


# -- what is spilled of a whole state


def spilled_leader(count: int) -> Pair:
    """A pair whose leader has so many messages set aside, each in a pack of its own."""
    pair = Pair(3)
    pair.leader.create_channel("t", "c")
    for number in range(count):
        pair.leader.store([b"%d" % number], due_ns=pair.leader.clock.wall_ns() + (3600 + 600 * number) * SECOND)
        pair.leader.commit_all()
        pair.leader.flush()
    pair.follower.take_batches(pair.leader)
    return pair


def cursors_of(node: Node) -> set[int]:
    return {row[0] for row in node.broker._store._database.query("SELECT cursor FROM aside_pack")}


def test_what_is_spilled_is_read_in_pieces_as_of_one_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flintmq.broker.led_replicas.STATE_READ_BYTES", 1)
    pair = spilled_leader(5)
    found: list[Any] = []
    pair.leader.broker.led_replicas.whole_state(pair.leader.replica, lambda *what: found.extend(what))
    pair.leader.settle()
    records, spilled, error = found
    assert error is None and not any(isinstance(record, PutSpilled) for record in records)
    before = len(cursors_of(pair.leader))
    pair.leader.broker.empty_channel(pair.leader.broker.topics["t"], "c")
    pair.leader.flush()
    assert before == 1 and not cursors_of(pair.leader), "they are gone since"
    pieces: list[list[Record]] = []
    while not pieces or pieces[-1]:
        pair.leader.broker.led_replicas.read_spilled(spilled, lambda piece, error: pieces.append(piece))
        pair.leader.settle()
    spilled.close()
    assert [len(piece) for piece in pieces] == [1] * 5 + [0]


def test_nobody_finds_what_is_staged_before_it_is_whole() -> None:
    pair = spilled_leader(4)
    pair.leader.flush()
    whole = pair.leader.whole()
    spilled = [record for record in whole if isinstance(record, PutSpilled)]
    follower = pair.follower
    pair.bring_whole()
    before = cursors_of(follower)
    assert len(before) == 1 and min(before) > 0
    follower.stage(spilled)
    assert {cursor < 0 for cursor in cursors_of(follower)} == {False, True}
    follower.replica.rows.drop_staged()
    follower.settle()
    assert cursors_of(follower) == before


def test_what_was_staged_goes_with_a_restart() -> None:
    pair = spilled_leader(4)
    follower = pair.follower
    follower.stage([record for record in pair.leader.whole() if isinstance(record, PutSpilled)])
    assert len(cursors_of(follower)) == 1
    follower.restart()
    assert not cursors_of(follower) and not follower.told


def test_what_was_staged_is_no_part_of_what_is_led() -> None:
    pair = spilled_leader(4)
    follower = pair.follower
    pair.bring_whole()
    follower.stage([record for record in pair.leader.whole() if isinstance(record, PutSpilled)])
    follower.lead(2)
    follower.commit_all()
    assert min(cursors_of(follower)) > 0
    assert picture(follower)["c"][7] == picture(pair.leader)["c"][7]


def test_only_what_is_spilled_is_staged() -> None:
    pair = spilled_leader(1)
    follower, (record,) = pair.follower, [each for each in pair.leader.whole() if isinstance(each, PutSpilled)]
    for wrong in (
        PutTopic("t", False),
        PutSpilled("other", NUMBER, "c", None, record.packs, {}, []),
        PutSpilled("t", NUMBER, "c", 1, record.packs, {}, []),
        PutSpilled("t", NUMBER, "c", None, [], {}, [1]),
    ):
        with pytest.raises(ValueError, match="is no"):
            follower.broker.followed_replicas.stage(follower.replica, [wrong], follower.done.append)


# -- channels in order


def test_floors_that_a_leader_told_are_where_a_channel_begins_whatever_comes_between():
    leader = led()
    leader.store([b"a"] * 8)
    leader.commit_all()
    leader.flush()
    node = follower_of(leader)
    node.broker.followed_replicas.keep_floors(node.replica, [("c", 4), ("not here yet", 2)])
    node.apply((1, 2), leader.whole(), is_whole=True)  # of before, and it came later
    node.die(power_loss=False)
    node.restart()
    node.note(1)
    assert list(node.replica.rows.kept_floors.values()) == [4]
    node.broker.followed_replicas.keep_floors(node.replica, [("c", 6)])
    node.lead(2)
    node.commit_all()
    assert node.partition.channels["c"].floor == 6
    assert "not here yet" not in node.partition.channels


@pytest.mark.parametrize("is_whole", [False, True])
def test_of_what_a_leader_says_all_is_written_or_none_when_a_floor_cannot_be_kept(is_whole, monkeypatch):
    leader = led()
    leader.store([b"a"] * 8)
    leader.commit_all()
    leader.flush()
    node = follower_of(leader)
    node.apply((1, 2), leader.whole(), is_whole=True)
    node.broker.followed_replicas.keep_floors(node.replica, [("late", 5)])
    before = stored_rows(node)
    records: list[Record] = []
    for name in ("c", "late"):
        records += [PutChannel("t", NUMBER, name, True, False), PutProgress("t", NUMBER, name, 3, b"", [], [], [], 0)]

    def refuse(*_: Any) -> None:
        raise StorageError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(node.broker._channels, "keep_floor", refuse)
        with pytest.raises(StorageError, match="no room"):
            node.broker.followed_replicas.apply(node.replica, (1, 3), records, is_whole, node.done.append)
    assert stored_rows(node) == before and node.replica.progress == (1, 2)
    node.apply((1, 3), records, is_whole)
    assert stored_rows(node) != before and list(node.replica.rows.kept_floors.values()) == [5]


def stored_rows(node: Node) -> tuple[Any, ...]:
    """What the database has of the channels, behind a flush."""
    node.flush()
    stored = node.broker._store.load_partition("t", NUMBER)
    return {key: each.paused for key, each in stored.channels.items()}, [each.row.floor for each in stored.cursors]


def test_a_floor_that_is_not_so_any_more_is_forgotten():
    leader = led()
    leader.store([b"a"] * 8)
    leader.commit_all()
    leader.flush()
    node = follower_of(leader)
    node.broker.followed_replicas.keep_floors(node.replica, [("c", 6)])
    node.broker.followed_replicas.keep_floors(node.replica, [("c", 0)])
    node.broker.followed_replicas.keep_floors(node.replica, [("c", 3)])
    node.broker.followed_replicas.keep_floors(node.replica, [("c", 2)])
    node.die(power_loss=False)
    node.restart()
    assert list(node.replica.rows.kept_floors.values()) == [2]


@pytest.mark.parametrize("told", [[0], [2], [0, 2], [6, 2]])
@pytest.mark.parametrize("is_of_before", [False, True])
def test_a_floor_that_went_back_is_not_back_after_a_power_loss(told: list[int], is_of_before: bool) -> None:
    """An operator's OK: nobody passes over what is to be delivered again, not after a power loss either."""
    for seed in range(12):
        node = follower_in_order()
        node.flush()
        node.broker._channels.sync_floors()
        if is_of_before:  # it was written by a process before, or while this one led
            node.die(power_loss=False)
            node.restart()
            node.note(1)
        for floor in told:
            node.broker.followed_replicas.keep_floors(node.replica, [("c", floor)])
        node.apply((1, 2), [PutProgress("t", NUMBER, "c", 2, b"", [], [], [], 0)])
        node.random.seed(seed)
        node.die(power_loss=True)
        node.restart()
        node.lead(2)
        assert node.partition.channels["c"].floor <= 2


def test_a_floor_is_what_was_told_last_also_where_it_led_before() -> None:
    """What it wrote as the leader is in the same file, and the larger one of two records counts."""
    node = follower_in_order()
    node.lead(2)
    node.commit_all()
    assert node.partition.channels["c"].floor == 7
    topic = node.broker.topics["t"]
    node.broker.order_channel(topic, "c", True)
    consumer = node.consume("c")
    consumer.ready(1)
    node.pump()
    node.broker.led_replicas.demote(node.replica, StorageError("led elsewhere"))
    node.settle()
    node.note(3)
    node.broker.followed_replicas.keep_floors(node.replica, [("c", 3)])
    node.die(power_loss=False)
    node.restart()
    assert list(node.replica.rows.kept_floors.values()) == [3]


def follower_in_order() -> Node:
    """A follower that has 8 messages, of which its leader said that the first 6 are finished in order."""
    leader = led()
    for _ in range(2):
        leader.store([b"a"] * 4)
    leader.commit_all()
    leader.flush()
    node = follower_of(leader)
    node.broker.followed_replicas.keep_floors(node.replica, [("c", 7)])
    return node


def check_begins_at(node: Node, end: int) -> None:
    """It leads, gets other messages from ``end`` on, dies and leads again: nobody has finished these."""
    for epoch in (2, 3):
        node.lead(epoch)
        assert node.partition.channels["c"].floor == end
        node.store([b"b"] * 8)
        node.commit_all()
        node.die(power_loss=False)
        node.restart()
    assert max(node.replica.rows.kept_floors.values(), default=end) <= end


def test_a_log_that_lost_its_end_with_the_power_has_nothing_finished_behind_it():
    tried = 0
    for seed in range(12):
        node = follower_in_order()
        node.flush()
        node.broker._channels.sync_floors()
        node.random.seed(seed)
        node.die(power_loss=True)
        node.restart()
        end = node.replica.log.next_sequence
        if end < 7 and list(node.replica.rows.kept_floors.values()) == [7]:
            tried += 1
            check_begins_at(node, end)
    assert tried, "no log lost its end before the floor"


def test_a_log_that_is_cut_back_has_nothing_finished_behind_it():
    node = follower_in_order()
    node.note(2)
    node.broker.followed_replicas.cut_back(node.replica, 5, node.done.append)
    node.settle()
    assert node.done[-1] is None
    assert list(node.replica.rows.kept_floors.values()) == [5] == list(node.replica.rows._told_floors.values())
    node.restart()
    check_begins_at(node, 5)


def test_nothing_is_delivered_in_order_before_a_floor_is_kept_elsewhere():
    leader = led()
    kept: list[tuple[str, int]] = []

    class Keeper:
        def keep(self, partition: Partition, channel: Channel, floor: int) -> bool:
            kept.append((channel.name, floor))
            return False

        def forget(self, partition: Partition, channel: Channel) -> None:
            kept.append((channel.name, -1))

    leader.broker.led_replicas.keep_floors_by(Keeper())
    topic = leader.broker.topics["t"]
    leader.broker.order_channel(topic, "c", True)
    leader.store([b"a"] * 3)
    leader.commit_all()
    channel = leader.partition.channels["c"]
    consumer = leader.consume("c")
    consumer.ready(10)
    for expected in (1, 2, 3):
        assert consumer.received() == []
        assert kept[-1] == ("c", expected)
        channel.floor_is_kept(expected - 1)
        leader.broker.deliveries.mark(channel)
        leader.pump()
        assert consumer.received() == [], "another floor"
        channel.floor_is_kept(expected)
        leader.broker.deliveries.mark(channel)
        leader.pump()
        (delivery,) = consumer.received()
        assert delivery.sequence == expected
        consumer.finish([delivery.internal])
        leader.pump()
    leader.broker.delete_channel(topic, "c")
    assert kept[-1] == ("c", -1)
