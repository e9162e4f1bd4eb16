"""Logs whose files are made later: what survives, what a failure leaves, and what it costs the disk."""

import errno
import random

import pytest
from tests.sim.disk import CrashingDisk

from flintmq.errors import DiskFull, StorageError
from flintmq.storage import Creation, create_logs
from flintmq.storage.cache import ReadCache
from flintmq.storage.partition_log import PartitionLog
from flintmq.testing import MemoryDisk


def arguments(number=0):
    return {"partition": number, "segment_bytes": 10_000, "cache": ReadCache(), "report": print, "created_ns": 7}


def directory(number):
    return f"topics/t-{number}/p-{number:04d}"


def new(files, number):
    return Creation(PartitionLog.new(files, directory(number), **arguments(number)))


def reopened(disk, number):
    return PartitionLog.open(disk.attach(), directory(number), **arguments(number))


def sync(log):
    ticket = log.begin_sync()
    ticket.run()
    log.finish_sync(ticket, None)


def test_before_its_files_it_is_an_empty_log():
    log = new(MemoryDisk().attach(), 1).log
    assert not log.is_created
    assert (log.start_sequence, log.next_sequence, log.committed_sequence) == (1, 1, 1)
    assert log.read(1) is None
    assert log.fetch(1, 5, 1000) == (b"", 1)
    assert log.sequence_at(0) == 1
    assert log.begin_sync() is None
    log.close()


def test_what_is_in_the_directory_already_is_recovered_and_not_begun_again():
    disk = CrashingDisk()
    log = PartitionLog.open(disk.attach(), directory(0), **arguments(0))
    log.append([b"a", b"b"], 1)
    sync(log)
    log.close()
    disk.release()
    creation = new(disk.attach(), 0)
    create_logs([creation], sync=True)
    assert creation.error is None
    creation.finish()
    assert (creation.log.next_sequence, creation.log.synced_sequence) == (3, 3)


@pytest.mark.parametrize("number", range(10))
def test_what_was_synced_survives_a_power_loss_at_once(number):
    disk = CrashingDisk()
    creations = [new(disk.attach(), 0)]
    creations += [new(creations[0].log.home.files, each) for each in (1, 2)]
    create_logs(creations, sync=True)
    disk.crash(power_loss=True, rng=random.Random(number))
    for each in range(3):
        told: list[object] = []
        log = PartitionLog.open(disk.attach(), directory(each), **{**arguments(each), "report": told.append})
        assert (log.log_id, log.next_sequence, log.failed, told) == (7, 1, None, [])
        log.close()
        disk.crash(power_loss=False, rng=random.Random(0))


@pytest.mark.parametrize("seed", range(20))
def test_what_was_not_synced_is_with_the_first_sync(seed):
    disk = CrashingDisk()
    creation = new(disk.attach(), 3)
    create_logs([creation], sync=False)
    creation.finish()
    creation.log.append([b"a"], 1)
    sync(creation.log)
    disk.crash(power_loss=True, rng=random.Random(seed))
    assert reopened(disk, 3).next_sequence == 2


@pytest.mark.parametrize("seed", range(40))
def test_a_kill_between_the_files_and_their_sync(seed):
    """The next process appends and syncs, then the power goes: its names must have been synced as well."""
    disk = CrashingDisk()
    create_logs([new(disk.attach(), 3)], sync=False)
    disk.crash(power_loss=False, rng=random.Random(seed))
    log = reopened(disk, 3)
    log.append([b"a"], 1)
    sync(log)
    disk.crash(power_loss=True, rng=random.Random(seed))
    assert reopened(disk, 3).next_sequence == 2


@pytest.mark.parametrize("kind", ["make_directory", "create", "write", "sync", "sync_directory"])
def test_a_failure_refuses_and_can_be_tried_again(kind):
    disk = CrashingDisk()
    files = disk.attach()
    disk.fail(kind, error=errno.ENOSPC)
    creation = new(files, 3)
    create_logs([creation], sync=True)
    assert isinstance(creation.error, DiskFull)
    disk.heal()
    again = new(files, 3)
    create_logs([again], sync=True)
    assert again.error is None
    again.finish()
    assert again.log.append([b"a"], 1) == 1


def test_a_failure_of_one_is_not_that_of_others():
    disk = CrashingDisk()
    files = disk.attach()
    creations = [new(files, number) for number in range(3)]
    disk.fail("sync", path=f"{directory(1)}/{1:020d}.log")
    create_logs(creations, sync=True)
    assert [isinstance(creation.error, StorageError) for creation in creations] == [False, True, False]


def test_a_name_that_cannot_be_synced_refuses_all_below_it(monkeypatch):
    files = MemoryDisk().attach()
    creations = [new(files, number) for number in range(3)]
    honest = files.sync_directory

    def sync_directory(path):
        if path == "topics":
            raise OSError(errno.EIO, "broken")
        honest(path)

    monkeypatch.setattr(files, "sync_directory", sync_directory)
    create_logs(creations, sync=True)
    assert all(isinstance(creation.error, StorageError) for creation in creations)


def test_shared_names_are_synced_once(monkeypatch):
    disk = CrashingDisk()
    files = disk.attach()
    synced = []
    honest = files.sync_directory

    def sync_directory(path):
        synced.append(path)
        honest(path)

    monkeypatch.setattr(files, "sync_directory", sync_directory)
    create_logs([new(files, number) for number in range(10)], sync=True)
    assert (synced.count("topics"), synced.count("")) == (1, 1)
    assert len(synced) == 10 + 10 + 2


def test_closed_before_it_was_made():
    disk = CrashingDisk()
    creation = new(disk.attach(), 3)
    create_logs([creation], sync=False)
    creation.log.close()
    creation.finish()
    assert creation.log.failed
