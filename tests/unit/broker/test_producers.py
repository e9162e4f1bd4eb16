"""Idempotent publishing: every message once, in its order, whatever fails, whatever is sent again."""

from __future__ import annotations

import errno
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.unit.storage.log_kit import Kit, read_all, sync

from flintmq.broker.partition import Partition, PublishGroup
from flintmq.broker.producers import SequenceGap
from flintmq.errors import DiskFull, StorageError, WriteFailed
from flintmq.limits import PRODUCERS_MAX
from flintmq.storage import MemoryLog, PartitionLog
from flintmq.topic_meta import TopicMeta


@pytest.fixture
def partition():
    return Partition("t", 0, MemoryLog(0, 10**9))


def numbered(producer: str, first: int, count: int = 1) -> list[bytes]:
    return [b"%s %d" % (producer.encode(), n) for n in range(first, first + count)]


def send(partition: Partition, producer: str, first: int, count: int = 1) -> Any:
    """What ends when the messages are stored; None when they are."""
    group = partition.publish_once(producer.encode(), first, numbered(producer, first, count))
    return None if group.ended and group.error is None else group


def write(partition: Partition) -> list[PublishGroup]:
    groups = []
    while partition.has_pending:
        group = partition.write_pending(1)
        if group is not None:
            groups.append(group)
    return groups


def store(partition: Partition) -> None:
    for group in write(partition):
        partition.log.advance_committed(group.end_sequence)
        group.end(None)


def stored(partition: Partition) -> list[bytes]:
    log, found, sequence = partition.log, [], partition.log.start_sequence
    while (batch := log.read(sequence)) is not None:
        positions = batch.positions()
        found += [
            bytes(batch.data[batch.frames_at + start + 34 : batch.frames_at + end])
            for start, end in pairwise(positions)
        ]
        sequence = batch.end
    return found


def test_duplicates_are_not_stored_again(partition):
    first = send(partition, "p", 1, 3)
    assert first is not None
    assert send(partition, "p", 1, 3) is first, "it waits for the original"
    assert send(partition, "p", 2) is first
    store(partition)
    assert first.ended and first.error is None
    assert send(partition, "p", 1, 3) is None
    assert send(partition, "p", 3) is None
    assert stored(partition) == numbered("p", 1, 3)


def test_of_a_batch_that_overlaps_only_the_tail_is_stored(partition):
    send(partition, "p", 5, 3)
    assert send(partition, "p", 6, 5) is not None
    store(partition)
    send(partition, "p", 10, 2)
    store(partition)
    assert stored(partition) == numbered("p", 5, 7)


def test_a_gap_is_told(partition):
    send(partition, "p", 1)
    with pytest.raises(SequenceGap, match="producer p sequence 3, expected 2"):
        send(partition, "p", 3)
    assert send(partition, "q", 3) is not None, "whoever is not known may begin anywhere"
    store(partition)
    assert stored(partition) == [*numbered("p", 1), *numbered("q", 3)]


def test_it_shares_no_group_with_others(partition):
    plain = partition.publish((b"a",), 0)
    once = send(partition, "p", 1)
    other = partition.publish((b"b",), 0)
    assert len({id(plain), id(once), id(other)}) == 3
    assert partition.join(b"c") is other
    store(partition)
    assert stored(partition) == [b"a", b"p 1", b"b", b"c"]


def test_a_topic_with_partitions_stores_trace_ids():
    partition = Partition("t", 0, MemoryLog(0, 1000))
    partition.meta = TopicMeta(partition_num=1)
    send(partition, "p", 1, 2)
    store(partition)
    assert stored(partition) == numbered("p", 1, 2)


class FailingLog(MemoryLog):
    """Has no room for some appends."""

    def __init__(self):
        super().__init__(0, 10**9)
        self.fails_at: set[bytes] = set()

    def append(self, bodies, timestamp_ns, due_ns=0, producer=None):
        if self.fails_at & set(bodies):
            raise DiskFull("log", 0, 1)
        return super().append(bodies, timestamp_ns, due_ns, producer)


@pytest.fixture
def failing():
    return Partition("t", 0, FailingLog())


@pytest.mark.parametrize("known", [False, True])
def test_what_is_behind_a_failed_publish_fails_with_it(failing, known):
    if known:
        send(failing, "p", 1, 4)
        store(failing)
    failing.log.fails_at = {b"p 5"}
    groups = [send(failing, "p", 5, 2), send(failing, "p", 7), send(failing, "q", 1), send(failing, "p", 8)]
    duplicate = send(failing, "p", 7)
    assert duplicate is groups[1]
    store(failing)
    errors = [group.error for group in groups]
    assert isinstance(errors[0], DiskFull)
    assert [str(error) for error in errors[1::2]] == [f"producer p sequence {n}, expected 5" for n in (7, 8)]
    assert errors[2] is None
    with pytest.raises(SequenceGap, match="sequence 9, expected 5"):
        send(failing, "p", 9)
    failing.log.fails_at = set()
    again = send(failing, "p", 5, 4)
    store(failing)
    assert again.error is None
    assert [body for body in stored(failing) if body.startswith(b"p")] == numbered(
        "p", 1 if known else 5, 8 if known else 4
    )


def test_what_is_written_of_a_failed_publish_is_not_written_again(failing, monkeypatch):
    monkeypatch.setattr("flintmq.broker.partition._BATCH_BODIES_BYTES_MAX", 8)
    failing.log.fails_at = {b"p 5"}
    group = send(failing, "p", 1, 6)
    behind = send(failing, "p", 7)
    left = write(failing)
    assert isinstance(group.error, DiskFull)
    assert str(behind.error) == "producer p sequence 7, expected 5"
    assert len(left) == 1, "what is in the log is committed"
    duplicate = send(failing, "p", 1, 4)
    assert duplicate is left[0], "its durability is not known yet"
    failing.log.fails_at = set()
    rest = send(failing, "p", 1, 6)
    for each in left:
        each.end(None)
    assert send(failing, "p", 1, 4) is None
    store(failing)
    assert rest.error is None
    assert stored(failing) == numbered("p", 1, 6)


def test_nothing_is_said_of_a_log_that_failed(failing):
    send(failing, "p", 1)
    store(failing)
    failing.log.failed = "sync failed"
    for sequence in (1, 2):
        group = send(failing, "p", sequence)
        assert group.ended and isinstance(group.error, WriteFailed)


def test_many_producers_are_bounded(partition):
    for number in range(3 * PRODUCERS_MAX):
        send(partition, f"p{number}", 1)
    store(partition)
    assert len(partition.log.producers.table) == PRODUCERS_MAX
    assert send(partition, f"p{3 * PRODUCERS_MAX - 1}", 1) is None
    assert send(partition, "p0", 1) is not None, "it is forgotten"
    assert len(partition.producers._lines) == 1
    assert len(partition.producers._rolled_back) <= PRODUCERS_MAX


def test_a_hole_is_filled_once():
    log = MemoryLog(0, 1000)
    partition = Partition("t", 0, log)
    send(partition, "p", 4, 2)
    store(partition)
    log.producers.table.lack(b"p", 1, 4)
    fill = send(partition, "p", 1, 2)
    assert send(partition, "p", 1, 2) is fill
    rest = send(partition, "p", 1, 6)
    assert send(partition, "p", 2, 3) is rest
    store(partition)
    assert fill.error is rest.error is None
    assert stored(partition) == [*numbered("p", 4, 2), *numbered("p", 1, 3), *numbered("p", 6)]
    assert send(partition, "p", 1, 6) is None
    assert log.producers.table.last(b"p") == 6


class Publishing(RuleBasedStateMachine):
    """Producers that send what was not answered again and again, and a partition that fails, is killed, loses power."""

    def __init__(self) -> None:
        super().__init__()
        self.kit = Kit(segment_bytes=400)
        self.sent = {"p": 0, "q": 0}  # the last sequence sent
        self.answered = {"p": 0, "q": 0}  # all up to it have been answered OK
        self.acknowledged: set[bytes] = set()
        self.waiting: list[tuple[PublishGroup, str, int, int]] = []
        self.unsynced: list[PublishGroup] = []
        self.is_power_lost = False
        self._open()

    def _open(self) -> None:
        self.log: PartitionLog = self.kit.open()
        self.partition = Partition("t", 0, self.log)
        self.waiting.clear()
        self.unsynced.clear()
        self.sent = dict(self.answered)

    def _send(self, producer: str, first: int, count: int) -> None:
        group = send(self.partition, producer, first, count)
        if group is None:
            self.acknowledged.update(numbered(producer, first, count))
        else:
            self.waiting.append((group, producer, first, count))
        self._look()

    def _look(self) -> None:
        """Take answers; after a failure everything unanswered is sent again from there."""
        still = []
        for each in self.waiting:
            group, producer, first, count = each
            if not group.ended:
                still.append(each)
            elif group.error is None:
                self.acknowledged.update(numbered(producer, first, count))
            else:
                self.sent[producer] = min(self.sent[producer], first - 1)
        self.waiting = still
        for producer in self.answered:
            while b"%s %d" % (producer.encode(), self.answered[producer] + 1) in self.acknowledged:
                self.answered[producer] += 1

    @rule(producer=st.sampled_from("pq"), count=st.integers(1, 4))
    def publish(self, producer, count):
        first = self.sent[producer] + 1
        self.sent[producer] += count
        self._send(producer, first, count)

    @rule(producer=st.sampled_from("pq"), back=st.integers(0, 6), count=st.integers(1, 6))
    def publish_again(self, producer, back, count):
        first = max(1, self.sent[producer] + 1 - back)
        self.sent[producer] = max(self.sent[producer], first + count - 1)
        self._send(producer, first, count)

    @rule(producer=st.sampled_from("pq"), ahead=st.integers(2, 4))
    def leave_a_gap(self, producer, ahead):
        if self.partition.producers is None or self.partition.producers.last(producer.encode()) is None:
            return
        with pytest.raises(SequenceGap):
            send(self.partition, producer, self.partition.producers.last(producer.encode()) + ahead)

    @rule(count=st.integers(1, 3))
    def publish_plainly(self, count):
        self.partition.publish([b"plain"] * count, 0)

    @rule()
    def write(self):
        self.unsynced += write(self.partition)
        self._look()

    @rule()
    def write_to_a_full_disk(self):
        self.kit.disk.fail("write", nth=1, error=errno.ENOSPC)
        self.unsynced += write(self.partition)
        self.kit.disk.heal()
        self._look()

    @rule()
    def sync(self):
        sync(self.log)
        for group in self.unsynced:
            self.log.advance_committed(group.end_sequence)
            group.end(None)
        self.unsynced.clear()
        self._look()

    @precondition(lambda self: self.log.next_sequence > 1)
    @rule(is_due=st.booleans())
    def save(self, is_due):
        self.log.producers.is_snapshot_due |= is_due

    @rule(power_loss=st.booleans(), seed=st.integers(0, 1000))
    def crash(self, power_loss, seed):
        self.kit.disk.crash(power_loss=power_loss, rng=random.Random(seed))
        self.is_power_lost |= power_loss
        self._open()

    @rule(seed=st.integers(0, 1000), burst=st.integers(2, 6))
    def lose_much(self, seed, burst):
        """Batches that nobody was promised, of which the power loss may take any; then all of them again."""
        for number in range(burst):
            self.publish("pq"[number % 2], 1 + number % 3)
            self.write()
        self.crash(True, seed)
        for number in range(burst):
            self.publish("pq"[number % 2], 1 + number % 3)
        self.write()
        self.sync()

    @invariant()
    def everything_is_there_once(self):
        found = [body for body in read_all(self.log).values() if body != b"plain"]
        assert len(found) == len(set(found)), found
        assert self.acknowledged <= set(found)
        for producer in self.answered if not self.is_power_lost else ():
            mine = [body for body in found if body.startswith(producer.encode())]
            assert mine == numbered(producer, 1, len(mine)), "in order, none left out"


Publishing.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestPublishing = pytest.mark.slow(Publishing.TestCase)


def test_what_was_lost_with_the_first_segment_is_stored_when_it_is_sent_again():
    """A power loss took it, and left a later one; the producer has no answer to either."""
    kit = Kit(segment_bytes=400)
    partition = Partition("t", 0, kit.open())
    for number in range(1, 9):
        send(partition, "p", number)
        write(partition)
    first, second = kit.logs()[:2]
    files = kit.files()
    files.remove(first)
    files.remove(first.replace(".log", ".index"))
    partition = Partition("t", 0, kit.open())
    begin = partition.log.start_sequence
    assert 1 < begin < 8
    assert second == kit.path(begin)
    for number in range(1, 9):
        send(partition, "p", number)
    store(partition)
    assert sorted(stored(partition)) == numbered("p", 1, 8)


def test_a_write_error_is_told_to_all(partition):
    group, behind = send(partition, "p", 1), send(partition, "p", 2)
    partition.refuse(StorageError("no files"))
    assert str(group.error) == "no files"
    assert isinstance(behind.error, SequenceGap)
