"""The file with the floors of ordered channels: what is written is found again, and nothing else."""

import random

import pytest
from tests.sim.disk import CrashingDisk, DiskCrashed

from flintmq.errors import WriteFailed
from flintmq.storage.floors import FLOORS_NAME, RECORD_BYTES, FloorFile


@pytest.fixture
def disk():
    return CrashingDisk(rng=random.Random(1))


def reopened(disk, keep=None):
    disk.crash(False, random.Random(1))
    file = FloorFile(disk.attach())
    floors = file.load()
    file.begin({cursor: floor for cursor, floor in floors.items() if keep is None or cursor in keep})
    return file, floors


def test_there_is_no_file_without_a_floor(disk):
    file = FloorFile(disk.attach())
    assert file.load() == {}
    file.begin({})
    file.forget(7)
    assert FLOORS_NAME not in disk.paths()


def test_the_last_floor_of_each_survives_a_kill(disk):
    file = FloorFile(disk.attach())
    for cursor, floor in ((1, 5), (2, 9), (1, 6), (300, 1 << 49)):
        file.put(cursor, floor)
    assert len(disk.content(FLOORS_NAME)) <= 3 * 2 * RECORD_BYTES
    assert reopened(disk)[1] == {1: 6, 2: 9, 300: 1 << 49}


def test_what_is_forgotten_is_gone_and_its_place_is_used_again(disk):
    file = FloorFile(disk.attach())
    for cursor in (1, 2, 3):
        file.put(cursor, cursor)
    file.forget(2)
    file.put(4, 4)
    assert len(disk.content(FLOORS_NAME)) <= 3 * 2 * RECORD_BYTES
    assert reopened(disk)[1] == {1: 1, 4: 4, 3: 3}


def test_what_is_forgotten_is_gone_however_often_it_was_written(disk):
    file = FloorFile(disk.attach())
    for floor in range(1, 6):
        file.put(1, floor)
    file.forget(1)
    file.put(1, 2)
    assert reopened(disk)[1] == {1: 2}, "back is back"


@pytest.mark.parametrize("power_loss", [False, True])
def test_what_went_back_is_where_it_was_put_and_stays_there_once_it_is_synced(disk, power_loss):
    file = FloorFile(disk.attach())
    assert [file.put(1, floor) for floor in (8, 9, 3, 3, 4)] == [False, False, True, False, False]
    file.put(1, 9)
    assert file.put(1, 2)
    file.sync()
    file._files.sync_directory("")
    disk.crash(power_loss, random.Random(1))
    file = FloorFile(disk.attach())
    assert file.load() == {1: 2}
    file.begin({1: 2})
    assert file.put(1, 1), "also of what a process before wrote"
    assert file.forget(1) and not file.forget(1)


@pytest.mark.parametrize("seed", range(30))
def test_a_kill_in_the_middle_of_a_write_leaves_the_floor_before(disk, seed):
    file = FloorFile(disk.attach())
    for floor in range(1, 10):
        file.put(1, floor)
        file.put(2, 100 + floor)
    if seed % 2:
        file, _ = reopened(disk)
    disk.crash_at(disk.operation_count + 1, False, random.Random(seed))
    with pytest.raises(DiskCrashed):
        file.put(1, 10)
    floors = FloorFile(disk.attach()).load()
    assert floors[1] in (9, 10)
    assert floors[2] == 109


def test_a_start_keeps_the_living_alone(disk):
    file = FloorFile(disk.attach())
    for cursor in (1, 2, 3):
        file.put(cursor, cursor)
    file, _ = reopened(disk, keep=[3])
    file.put(3, 30)
    file.put(5, 5)
    assert reopened(disk)[1] == {3: 30, 5: 5}
    assert reopened(disk, keep=[])[1] == {3: 30, 5: 5}
    assert FLOORS_NAME not in disk.paths()


@pytest.mark.parametrize("position", range(0, RECORD_BYTES, 5))
def test_a_damaged_record_is_none(disk, position):
    file = FloorFile(disk.attach())
    file.put(1, 5)
    file.put(2, 9)
    file.close()
    disk.flip_bit(FLOORS_NAME, position)
    assert reopened(disk)[1] == {2: 9}


def test_half_a_record_at_the_end_is_none(disk):
    file = FloorFile(disk.attach())
    file.put(1, 5)
    file.put(2, 9)
    file.close()
    disk.cut(FLOORS_NAME, RECORD_BYTES + 10)
    assert reopened(disk)[1] == {1: 5}


def test_a_write_that_fails_is_told_and_the_next_one_tried_on_a_new_handle(disk):
    file = FloorFile(disk.attach())
    file.put(1, 5)
    disk.fail("write", path=FLOORS_NAME)
    with pytest.raises(WriteFailed, match=FLOORS_NAME):
        file.put(1, 6)
    file.put(1, 7)
    assert reopened(disk)[1] == {1: 7}
