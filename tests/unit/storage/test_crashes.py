"""A crash at every disk operation of a fixed workload, then a second one during recovery: nothing acknowledged is lost.

The workload appends, syncs, rolls, checkpoints, drops old segments, closes and opens again. What survived is checked
against what had been promised when the crash came: after a kill everything appended, after a power loss everything
synced.
"""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass, field

import pytest
from tests.sim.disk import DiskCrashed
from tests.unit.storage.log_kit import Kit, fetch_all, read_all, sync

from flintmq.errors import StorageError
from flintmq.storage.partition_log import PartitionLog

DROP_BELOW = 18


@dataclass
class Promises:
    """What a caller of the log was told."""

    attempted: dict[int, set[bytes]] = field(default_factory=dict)
    appended: dict[int, bytes] = field(default_factory=dict)
    durable: dict[int, bytes] = field(default_factory=dict)
    dropped_below: int = 1

    def append(self, log: PartitionLog, bodies: list[bytes], timestamp_ns: int) -> None:
        for sequence, body in enumerate(bodies, log.next_sequence):
            self.attempted.setdefault(sequence, set()).add(body)
        first = log.append(bodies, timestamp_ns)
        self.appended.update(enumerate(bodies, first))

    def sync(self, log: PartitionLog) -> None:
        sync(log)
        self.durable.update((n, body) for n, body in self.appended.items() if n < log.synced_sequence)


def work(kit: Kit, promises: Promises) -> None:
    log = kit.open()
    for number in range(14):
        promises.append(
            log, [b"%d of batch %d" % (i, number) + b"." * (number * 7) for i in range(1 + number % 3)], number
        )
        if number % 3 == 1:
            promises.sync(log)
        if number == 9:
            promises.dropped_below = DROP_BELOW
            log.drop_before(DROP_BELOW)
    promises.sync(log)
    log.close()
    log = kit.open()
    promises.append(log, [b"after a clean restart"], 100)
    promises.sync(log)
    log.close()


def check(kit: Kit, promises: Promises, power_loss: bool) -> None:
    log = kit.open()
    assert log.failed is None
    stored = read_all(log)
    assert fetch_all(log) == stored
    for sequence, body in stored.items():
        assert body in promises.attempted[sequence], "nothing is served that was not appended"
    promised = promises.durable if power_loss else promises.appended
    for sequence, body in promised.items():
        if sequence >= promises.dropped_below or sequence >= log.start_sequence:
            assert stored.get(sequence) == body, f"{sequence} was acknowledged; {kit.all_reports}"
    assert not {sequence for sequence in promised if sequence >= promises.dropped_below} & kit.lost()
    first = log.append([b"new"], 10**6)
    assert first > max(promised, default=0)
    assert log.committed_sequence == first
    sync(log)
    kit.disk.crash(power_loss=True, rng=random.Random(1))
    log = kit.open()
    assert read_all(log) == stored | {first: b"new"}


def operations_of(segment_bytes: int) -> int:
    kit = Kit(segment_bytes=segment_bytes)
    work(kit, Promises())
    return kit.disk.operation_count


SEGMENT_BYTES = 700
OPERATIONS = operations_of(SEGMENT_BYTES)


@pytest.fixture(autouse=True)
def often_checkpointed(monkeypatch):
    monkeypatch.setattr("flintmq.storage.partition_log.CHECKPOINT_BYTES", 200)
    monkeypatch.setattr("flintmq.storage.recovery.CHECKPOINT_BYTES", 100)


def crash(kit: Kit, promises: Promises, number: int, power_loss: bool, seed: int) -> None:
    kit.disk.crash_at(number, power_loss, random.Random(seed))
    with pytest.raises(DiskCrashed):
        work(kit, promises)


def test_the_workload_does_what_it_is_for():
    kit, promises = Kit(segment_bytes=SEGMENT_BYTES), Promises()
    kinds: set[str] = set()
    kit.disk.observers.append(lambda operation: kinds.add(f"{operation.kind} {operation.path[-6:]}"))
    work(kit, promises)
    assert {"remove 01.log", "sync_directory pics/t/3"[:21]} & {kind[:21] for kind in kinds}
    assert len(kit.logs()) >= 3
    assert promises.durable == promises.appended
    check(kit, promises, power_loss=True)


@pytest.mark.parametrize("power_loss", [False, True], ids=["kill", "power"])
@pytest.mark.parametrize("number", range(1, OPERATIONS + 1))
def test_crash_at_every_operation(number, power_loss):
    for seed in range(3 if power_loss else 1):
        kit, promises = Kit(segment_bytes=SEGMENT_BYTES), Promises()
        crash(kit, promises, number, power_loss, seed * 1000 + number)
        check(kit, promises, power_loss)


@pytest.mark.slow
@pytest.mark.parametrize("power_loss", [False, True], ids=["kill", "power"])
@pytest.mark.parametrize("number", range(1, OPERATIONS + 1))
def test_second_crash_during_recovery(number, power_loss):
    """Whatever operation of recovery the second crash hits, the third start finds the same."""
    nth = 1
    while True:
        kit, promises = Kit(segment_bytes=SEGMENT_BYTES), Promises()
        crash(kit, promises, number, power_loss, number)
        kit.disk.crash_at(kit.disk.operation_count + nth, power_loss, random.Random(nth))
        try:
            kit.open()
        except DiskCrashed:
            check(kit, promises, power_loss)
            nth += 1
            continue
        break
    assert nth <= 20, "recovery does not do much"


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("kind", ["write", "sync", "create", "truncate", "remove", "sync_directory"])
@pytest.mark.parametrize("nth", range(1, 13))
def test_an_error_at_every_operation(kind, nth, error):
    """A refused or failed append is never visible, and everything acknowledged survives a power loss."""
    kit, promises = Kit(segment_bytes=SEGMENT_BYTES), Promises()
    kit.disk.fail(kind, nth=nth, error=error)
    try:
        work(kit, promises)
    except StorageError:
        log_error = True
    except OSError:
        log_error = kind in ("write", "sync", "create", "truncate", "remove", "sync_directory")
        assert log_error
    kit.disk.heal()
    kit.disk.crash(power_loss=True, rng=random.Random(nth))
    check(kit, promises, power_loss=True)
