"""What flushes say by names: another node that writes it has every channel of a partition where it is."""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec
import pytest
from tests.unit.broker.world import SECOND, BrokerWorld

from flintmq.broker.progress import Flush
from flintmq.settings import Settings
from flintmq.storage import ChannelStore, PartitionLog
from flintmq.storage.records import (
    DeleteChannel,
    DeleteProgress,
    PutChannel,
    PutLog,
    PutProgress,
    PutSettings,
    PutSpilled,
    PutTopic,
    PutTopicMeta,
    Record,
    by_partition,
    decode_records,
    encode_records,
)
from flintmq.topic_meta import TopicMeta


class Leader(BrokerWorld):
    """A world that keeps what its flushes say."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        super().__init__(window_max=16)

    def end_flush(self, flush: Flush, answers: Any, error: BaseException | None = None) -> None:
        if error is None:
            self.records += flush.records
        super().end_flush(flush, answers, error)


class Replica:
    """Another node's database: it has numbers of its own for the channels and packs of others."""

    def __init__(self, world: BrokerWorld) -> None:
        self.world = world
        self.cursors: dict[tuple[str, int, str], int] = {}
        self.packs: dict[tuple[str, int, str, int], int] = {}
        self._next_cursor, self._next_pack = count(101), count(5001)

    def write(self, store: ChannelStore, records: list[Record]) -> None:
        statements = []
        for record in records:
            cursor = 0
            if isinstance(record, PutLog):
                continue  # of the leader's log alone
            if isinstance(record, PutChannel | DeleteChannel | PutProgress | DeleteProgress | PutSpilled):
                key = record.topic, record.partition, record.channel
                if key not in self.cursors:
                    self.cursors[key] = next(self._next_cursor)
                cursor = self.cursors[key]
                if isinstance(record, DeleteProgress):
                    del self.cursors[key]
                if isinstance(record, PutSpilled):
                    named = [*(each.number for each in record.packs), *record.done, *record.gone]
                    for number in named:
                        if (*key, number) not in self.packs:
                            self.packs[*key, number] = next(self._next_pack)
                    record = record.renumbered({number: self.packs[*key, number] for number in named})
            statements += record.statements(cursor)
        store.run_transaction(statements, True)


def copy_log(leader: BrokerWorld, replica: BrokerWorld, topic: str, number: int) -> None:
    theirs = leader.broker.topics[topic].partitions[number].log
    mine = replica.broker.topics[topic].partitions[number].log
    assert isinstance(mine, PartitionLog)
    sequence = theirs.start_sequence
    while sequence < theirs.next_sequence:
        data, sequence = theirs.fetch(sequence, sequence + 1, 1)
        mine.append_batch(data)


def state_of(world: BrokerWorld, topic: str, number: int) -> dict[str, tuple[Any, ...]]:
    """Where each channel is, and what it has spilled."""
    found = {}
    for name, channel in world.broker.topics[topic].partitions[number].channels.items():
        cursor = world.broker._channels.cursor(channel)
        packs = world.broker._store.due(cursor, (-1, -1), 1 << 62, 1 << 40).packs
        spilled = sorted(
            (sequence, piece.due_ns, piece.attempts, frame)
            for pack in packs
            for piece in pack.pieces
            for sequence, frame in piece.messages()
        )
        found[name] = (channel.state(), channel.paused, channel.skipped, channel.spilled.count, spilled)
    return found


def test_a_replica_that_writes_them_is_where_the_leader_is():
    leader, other = Leader(), BrokerWorld(window_max=16)
    meta = TopicMeta(partition_num=2)
    for world in (leader, other):
        world.create("t", meta)
    leader.create_channel("t", "c")
    leader.create_channel("t", "gone")
    leader.create_channel("t", "paused")
    for number in (0, 1):
        leader.publish("t", [b"%d" % n for n in range(40)], number)
        leader.publish("t", [b"late %d" % n for n in range(5)], number, 5000 * SECOND)
    consumer = leader.subscribe("t", "c", 1)
    consumer.ready(30)
    taken = consumer.received()
    leader.flush()
    consumer.finish([each.internal for each in taken[3:9]])
    consumer.requeue(taken[0].internal, 3000 * SECOND)
    consumer.requeue(taken[1].internal, 0)
    leader.flush()
    consumer.finish([each.internal for each in consumer.received()])
    topic = leader.broker.topics["t"]
    leader.broker.pause_channel(topic, "paused", True, 1)
    leader.broker.delete_channel(topic, "gone")
    leader.flush()
    leader.create_channel("t", "gone")  # another of that name
    for each in leader.consumers:
        each.detach()
    leader.consumers.clear()
    leader.pump()
    leader.flush()

    sent = {key: encode_records(records) for key, records in by_partition(leader.records).items()}
    assert sent.keys() == {("t", 0), ("t", 1)}
    for number in (0, 1):
        copy_log(leader, other, "t", number)
    other.flush()
    other.broker.close()
    other.files.close()
    files = other.disk.attach()
    store, replica = ChannelStore(files), Replica(other)
    for data in sent.values():
        replica.write(store, list(decode_records(data)))
    store.close()
    files.close()
    other.open()
    leader.restart()  # so that both are as a start finds them
    for number in (0, 1):
        mine, theirs = state_of(other, "t", number), state_of(leader, "t", number)
        assert mine == theirs
        assert set(mine) == {"c", "gone", "paused"}
    assert state_of(other, "t", 1)["c"][3] > 0, "some are spilled"
    assert {name: state[1] for name, state in state_of(other, "t", 1).items()}["paused"]


@pytest.mark.parametrize(
    "record",
    [
        PutTopic("t", True),
        PutTopicMeta.of("t", TopicMeta(partition_num=2, extend_support=True), [0, 1], {1: 7}),
        PutSettings.of("t", "", Settings(max_attempts=3)),
        PutSettings.of("t", "c", Settings()),
        PutProgress("t", 0, "c", 5, b"\1\0", [(6, 9)], [(6, 2)], [(8, 9)], 0),
        PutSpilled("t", 0, "c", None, [], {4: [1, 2]}, [3]),
        PutLog("t", 0, 1, 2, 3),
    ],
    ids=lambda record: type(record).__name__,
)
def test_records_come_as_they_were_sent(record):
    (found,) = decode_records(encode_records([record]))
    assert type(found) is type(record)
    assert found.statements(7) == record.statements(7)


@pytest.mark.parametrize("data", [b"", b"\x91\x90", b"\x91\x92\xa7Unknown\x01", b"\x91\x92\xa8PutTopic\xa1t"])
def test_what_is_no_record_is_refused(data):
    with pytest.raises(msgspec.DecodeError):
        decode_records(data)


def test_a_flush_that_failed_says_it_again():
    world = Leader()
    world.create("t")
    world.broker.channel(world.broker.topics["t"], "c")
    flush = world.take_flush()
    world.end_flush(flush, [], OSError("disk"))
    again = world.take_flush()
    assert by_partition(flush.records)["t", 0][:1] == [PutChannel("t", 0, "c", False, False)]
    assert by_partition(again.records) == by_partition(flush.records)
    world.end_flush(again, world.run_flush(again))
