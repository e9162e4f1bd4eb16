"""The log of a replica: what it is after a power loss is the beginning of its leader's, and at least what it synced."""

from __future__ import annotations

import random

import pytest
from tests.unit.storage.log_kit import CREATED_NS, DIRECTORY, PARTITION, Kit, fill, read_all, sync

from flintmq.batch import decode_header
from flintmq.storage.cache import ReadCache
from flintmq.storage.partition_log import LogPlace, PartitionLog

SEGMENT_BYTES = 400


def open_replica(kit: Kit, durable_end: int = 1, log_id: int = 7) -> PartitionLog:
    kit.disk.release()
    kit.reports.clear()
    place = LogPlace(DIRECTORY, PARTITION, durable_end=durable_end, committed_end=1, log_id=log_id, is_replica=True)
    (log,) = PartitionLog.open_all(
        kit.disk.attach(),
        [place],
        segment_bytes=SEGMENT_BYTES,
        cache=ReadCache(),
        report=kit._report,
        created_ns=CREATED_NS,
    )
    return log


def batches() -> list[bytes]:
    """Batches of a leader that has synced each of them before it sent it."""
    leader = Kit().open()
    found = []
    for number in range(40):
        first = leader.next_sequence
        fill(leader, 1, number)
        sync(leader)
        data, _ = leader.fetch_stored(first, 1)
        found.append(data)
    return found


BATCHES = batches()
ENDS = [decode_header(data).end_sequence for data in BATCHES]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_after_a_power_loss_it_is_a_beginning_of_its_leaders(seed):
    rng = random.Random(seed)
    kit = Kit()
    log = open_replica(kit)
    assert log.log_id == 7
    end = 1
    while end <= len(BATCHES):
        count = rng.randint(1, 12)
        for data in BATCHES[end - 1 : end - 1 + count]:
            log.append_batch(data)
        end += count
        if rng.random() < 0.4:
            sync(log)
        synced = log.synced_sequence
        kit.disk.crash(power_loss=True, rng=rng)
        log = open_replica(kit, durable_end=max(1, synced))
        kept = sum(each <= log.next_sequence for each in ENDS)
        assert log.next_sequence in (1, *ENDS) and synced <= log.next_sequence
        assert [log.fetch_stored(first, 1)[0] for first in [1, *ENDS][:kept]] == BATCHES[:kept]
        assert not any(report.end_sequence_lost > report.first_sequence_lost for report in kit.reports), kit.reports
        end = kept + 1
    assert max(read_all(log), default=0) == ENDS[-1] - 1


@pytest.mark.parametrize("count", [1, 5, 40])
def test_what_its_leader_had_synced_is_synced_here_before_it_is_called_so(count):
    kit = Kit()
    log = open_replica(kit)
    for data in BATCHES[:count]:
        log.append_batch(data)
    assert log.synced_sequence <= 1
    kit.disk.crash(power_loss=False, rng=random.Random(1))
    log = open_replica(kit)
    assert log.synced_sequence == log.next_sequence == ENDS[count - 1]
    kit.disk.crash(power_loss=True, rng=random.Random(count))
    assert open_replica(kit).next_sequence == ENDS[count - 1]


def test_a_segment_that_is_gone_ends_it():
    kit = Kit()
    log = open_replica(kit)
    for data in BATCHES:
        log.append_batch(data)
    firsts = [segment.first_sequence for segment in log.segments()]
    assert len(firsts) > 5
    kit.files().remove(kit.path(firsts[-3]))
    log = open_replica(kit)
    assert log.next_sequence == firsts[-3]
    for data in BATCHES:
        if decode_header(data).first_sequence >= log.next_sequence:
            log.append_batch(data)
    log = open_replica(kit)
    assert log.next_sequence == ENDS[-1] and not kit.lost()


def test_damage_in_what_was_synced_is_told_and_stepped_over():
    kit = Kit()
    log = open_replica(kit)
    for data in BATCHES:
        log.append_batch(data)
    sync(log)
    first = log.segments()[-1].first_sequence
    kit.disk.flip_bit(kit.path(first), 64 + 80)
    log = open_replica(kit, durable_end=log.next_sequence)
    read_all(log, first)
    assert kit.lost() and log.next_sequence == ENDS[-1]


def test_the_producers_of_what_is_missing_are_forgotten():
    kit = Kit()
    log = open_replica(kit)
    for number in range(1, 10):
        log.append([b"x"], 1, producer=(b"p", number))
    log.producers.is_snapshot_due = True
    sync(log)
    end = log.next_sequence
    log.close()
    kit.files()
    for path in kit.disk.paths():
        if path.endswith(".index"):
            kit.disk.cut(path, 0)
    firsts = sorted(path for path in kit.disk.paths() if path.endswith(".log"))
    kit.disk.cut(firsts[-1], 64)
    log = open_replica(kit, durable_end=end)
    assert kit.lost() and log.next_sequence < end
    assert log.producers.table.last(b"p") == log.next_sequence - 1
    assert open_replica(kit, durable_end=log.next_sequence).producers.table.last(b"p") == log.next_sequence - 1


def test_what_is_stored_is_fetched_whether_it_is_committed_or_not():
    log = open_replica(Kit())
    for data in BATCHES:
        log.append_batch(data)
    for _ in range(2):
        sequence, found = 1, []
        while sequence < log.next_sequence:
            data, sequence = log.fetch_stored(sequence, 500)
            found.append(data)
        assert b"".join(found) == b"".join(BATCHES)
        assert log.fetch_stored(sequence, 500) == (b"", sequence)
        assert log.fetch(1, 1 << 60, 500) == (b"", 1)
        log.drop_tail()
