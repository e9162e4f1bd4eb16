"""The identity that a data directory keeps."""

from __future__ import annotations

import random
import stat
from pathlib import Path

import pytest
from tests.sim.disk import CrashingDisk

from flintmq.errors import StorageError
from flintmq.storage import DamagedIdentity, OsFiles, node_id
from flintmq.storage.identity import IDENTITY_NAME
from flintmq.testing import MemoryDisk, MemoryFiles


def test_it_is_made_once_and_private(tmp_path: Path):
    files = OsFiles(str(tmp_path))
    identity = node_id(files)
    assert len(identity) == 16 and int(identity, 16) > 0
    assert node_id(files) == identity
    assert stat.S_IMODE((tmp_path / IDENTITY_NAME).stat().st_mode) == 0o600
    files.close()


def test_another_directory_has_another_one():
    assert node_id(MemoryFiles(MemoryDisk())) != node_id(MemoryFiles(MemoryDisk()))


@pytest.mark.parametrize("number", range(1, 8))
@pytest.mark.parametrize("power_loss", [False, True])
def test_what_was_told_survives_a_power_loss_and_a_crash_leaves_none_or_one(number: int, power_loss: bool):
    rng = random.Random(number)
    disk = CrashingDisk()
    disk.crash_at(number, power_loss, rng)
    told = None
    try:
        told = node_id(disk.attach(), rng.randbytes)
    except BaseException as error:  # noqa: BLE001 - the process is dead
        assert type(error).__name__ == "DiskCrashed"
    disk.heal()
    disk.crash(power_loss, rng)
    identity = node_id(disk.attach(), rng.randbytes)
    assert told in (None, identity)


def test_every_bit_of_it_is_checked():
    disk = CrashingDisk()
    identity = node_id(disk.attach())
    for position in range(len(disk.content(IDENTITY_NAME))):
        for bit in range(8):
            disk.flip_bit(IDENTITY_NAME, position, bit)
            disk.release()
            with pytest.raises(DamagedIdentity, match="Restore it from a backup"):
                node_id(disk.attach())
            disk.flip_bit(IDENTITY_NAME, position, bit)
    for size in (0, 1, 16, 25):
        shorter = CrashingDisk()
        node_id(shorter.attach())
        shorter.cut(IDENTITY_NAME, size)
        shorter.release()
        with pytest.raises(DamagedIdentity):
            node_id(shorter.attach())
    disk.release()
    assert node_id(disk.attach()) == identity


def test_one_that_cannot_be_written_is_not_told():
    disk = MemoryDisk()
    disk.fail("sync", times=2)
    files = disk.attach()
    for _ in range(2):
        with pytest.raises(StorageError, match=r"node\.id: Input/output error"):
            node_id(files)
    assert node_id(files) == node_id(files)
