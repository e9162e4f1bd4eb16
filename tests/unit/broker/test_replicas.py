"""Replicas of partitions: made, filled, cut, removed; found again by the next start; a crash at every operation."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from tests.sim.disk import CrashingDisk, DiskCrashed
from tests.unit.broker.world import BrokerWorld

from flintmq.batch import BatchError, decode_header, encode_batch
from flintmq.broker.delayed import DelayedNotes
from flintmq.broker.partition import Partition
from flintmq.broker.replica import Replica, found_history
from flintmq.broker.replicas import ReplicaConflict
from flintmq.broker.topic import Topic
from flintmq.errors import StorageError
from flintmq.message import internal_id
from flintmq.storage import MemoryLog, PartitionLog, create_logs
from flintmq.storage.records import PutChannel, PutProgress
from flintmq.topic_meta import PLAIN, TopicMeta, encode_meta

META = TopicMeta(partition_num=3)
NUMBER, TOPIC_NUMBER, LOG_ID = 1, 77, 4711
DIRECTORY = "topics/t-t/p-0001"


class World(BrokerWorld):
    """A node with replicas; what it reports as damaged or missing is kept."""

    def __init__(self, seed: int = 1) -> None:
        self.told: list[Any] = []
        self.done: list[BaseException | None] = []
        super().__init__(seed=seed)

    def open(self) -> None:
        super().open()
        self.broker.on_damage = self.told.append

    @property
    def replica(self) -> Replica:
        return self.broker.replicas["t", NUMBER]

    @property
    def log(self) -> PartitionLog:
        return self.replica.log

    def settle(self) -> None:
        """Write and make files until nobody waits."""
        for _ in range(20):
            if self.broker.has_creations:
                taken = self.broker.take_creations()
                create_logs([creation for new in taken for creation in new.creations], True)
                self.broker.creations_ended(taken)
            elif self.broker.has_metadata or self.broker.has_flush(self.due_clock_ns):
                self.flush()
            else:
                return
        raise AssertionError("it does not come to an end")

    def make(self, number: int = NUMBER, log_id: int = LOG_ID, meta: TopicMeta = META) -> Replica:
        replica = self.broker.replicas.create("t", number, TOPIC_NUMBER, log_id, meta, self.done.append)
        self.settle()
        return replica

    def note(self, epoch: int, begins: bool = False) -> None:
        self.replica.note_epoch(epoch, begins, self.done.append)
        self.settle()

    def sync(self) -> None:
        ticket = self.log.begin_sync()
        if ticket is not None:
            ticket.run()
            self.log.finish_sync(ticket, None)
            self.broker.note_synced()
        self.flush()


class Batches:
    """A leader's log, as far as a follower sees it."""

    def __init__(self, sequence: int = 1, offset_bytes: int = 0, number: int = NUMBER) -> None:
        self.number = number
        self.sequence = sequence
        self.offset_bytes = offset_bytes
        self.stored: dict[int, bytes] = {}

    def next(self, epoch: int, bodies: list[bytes], producer: tuple[bytes, int] | None = None, gap: int = 0) -> bytes:
        self.sequence += gap
        first = internal_id(self.number, self.sequence)
        # it has synced all of it, which says nothing about the follower
        data = encode_batch(
            first, self.offset_bytes, 1000, bodies, synced_before=self.sequence + 1, epoch=epoch, producer=producer
        )
        self.stored[self.sequence] = data
        self.sequence += len(bodies)
        prefix = 9 + len(producer[0]) if producer is not None else 0
        sizes = 0 if len({len(body) for body in bodies}) == 1 else 4 * len(bodies)
        self.offset_bytes += decode_header(data).payload_size - prefix - sizes
        return data


def stored_in(log: PartitionLog) -> dict[int, bytes]:
    found, sequence = {}, log.start_sequence
    while sequence < log.next_sequence:
        data, sequence = log.fetch_stored(sequence, 1)
        if data:
            found[decode_header(data).first_sequence] = data
    return found


def fill(world: World, epochs: tuple[int, ...] = (1, 1, 2, 4, 4)) -> Batches:
    """One batch of each epoch, of different sizes."""
    leader = Batches()
    for epoch in epochs:
        if epoch > world.replica.epoch:
            world.note(epoch)
        world.broker.followed_replicas.append(world.replica, leader.next(epoch, [b"x%d" % epoch] * (epoch + 1)))
    return leader


@pytest.fixture
def world() -> World:
    world = World()
    world.make()
    world.done.clear()
    return world


# -- made and found again


def test_it_has_the_identity_that_it_was_given(world):
    assert (world.log.log_id, world.log.next_sequence, world.log.committed_sequence) == (LOG_ID, 1, 1)
    assert world.broker.topics == {}
    for _ in range(2):
        replica = world.replica
        assert (replica.topic, replica.number, replica.topic_number, replica.log_id) == ("t", 1, TOPIC_NUMBER, LOG_ID)
        assert (replica.epoch, replica.history, replica.progress, replica.meta) == (0, [], (0, 0), META)
        assert list(world.broker.replicas) == [("t", 1)]
        assert [log.directory for log in world.broker.logs()] == [DIRECTORY]
        world.die(power_loss=True)
    assert world.broker.topics == {} and not world.told


def test_nothing_can_be_done_before_it_is_there():
    world = World()
    world.broker.replicas.create("t", NUMBER, TOPIC_NUMBER, LOG_ID, META, world.done.append)
    with pytest.raises(StorageError, match="being created"):
        world.broker.followed_replicas.append(world.replica, Batches().next(0, [b"x"]))
    with pytest.raises(StorageError, match="being created"):
        world.note(1)
    world.settle()
    assert world.done == [None]


def test_one_of_a_name_that_is_taken_is_refused(world):
    with pytest.raises(ReplicaConflict, match="already"):
        world.make()
    world.create("mine")
    with pytest.raises(ReplicaConflict, match="alone"):
        world.broker.replicas.create("mine", 0, 1, 2, PLAIN, world.done.append)


def test_one_that_cannot_be_written_down_is_not_there():
    world = World()
    world.broker.replicas.create("t", NUMBER, TOPIC_NUMBER, LOG_ID, META, world.done.append)
    world.end_flush(world.take_flush(), [], OSError("disk"))
    (error,) = world.done
    assert isinstance(error, StorageError) and not world.broker.replicas
    world.settle()
    world.die(power_loss=False)
    assert not world.broker.replicas
    world.make()
    assert world.done[1:] == [None]


def test_a_directory_in_its_way_is_left_alone():
    world = World()
    files = world.files
    log = PartitionLog.open(
        files, DIRECTORY, partition=NUMBER, segment_bytes=1000, cache=world.broker._cache, report=print, created_ns=5
    )
    log.append([b"x"], 1)
    log.close()
    world.make()
    (error,) = world.done
    assert "log 5" in str(error) and not world.broker.replicas
    assert any(path.startswith(DIRECTORY) for path in world.disk.paths())


def test_a_node_without_replicas_has_no_table_of_them():
    world = World()
    world.create("t")
    names = {name for (name,) in world.broker._store._database.query("SELECT name FROM sqlite_master", ())}
    assert not any("replica" in name for name in names)


def test_many_epochs_are_one_transaction(world):
    for number in (0, 2):
        world.make(number, log_id=number + 10)
    world.done.clear()
    commits = world.broker._store._commits
    for replica in world.broker.replicas.values():
        replica.note_epoch(5, False, world.done.append)
    assert world.done == []
    world.settle()
    assert world.done == [None] * 3 and world.broker._store._commits == commits + 1
    world.die(power_loss=True)
    assert {replica.epoch for replica in world.broker.replicas.values()} == {5}


def test_an_epoch_that_is_over_is_refused(world):
    world.note(5)
    with pytest.raises(ValueError, match="epoch 4 is over"):
        world.note(4)
    world.note(5)
    world.note(6, begins=True)
    assert world.replica.history == [(6, 1)]
    world.note(6, begins=True)  # again, because nobody knew whether it was written
    fill(world, (6,))
    with pytest.raises(ValueError, match="does not follow"):
        world.note(6, begins=True)


# -- batches


def test_batches_are_there_byte_for_byte(world):
    leader = Batches()
    world.note(3)
    data = b"".join(leader.next(epoch, [b"%d" % n for n in range(epoch)]) for epoch in (1, 1, 2, 3))
    assert world.broker.followed_replicas.append(world.replica, data) == leader.sequence
    assert stored_in(world.log) == leader.stored
    assert world.replica.history == [(1, 1), (2, 3), (3, 5)]
    assert world.log.committed_sequence == 1
    world.flush()
    world.die(power_loss=False)
    assert stored_in(world.log) == leader.stored
    assert world.replica.history == [(1, 1), (2, 3), (3, 5)]
    assert world.log.committed_sequence == 1, "nobody said that it is committed"
    assert not world.told


@pytest.mark.parametrize("change", ["damaged", "cut", "again", "gap", "older epoch", "epoch not noted"])
def test_what_may_not_come_is_refused_and_what_came_before_stays(change, world):
    world.note(2)
    leader = Batches()
    good = leader.next(2, [b"good"])
    wrong = leader.next({"older epoch": 1, "epoch not noted": 3}.get(change, 2), [b"wrong"], gap=int(change == "gap"))
    wrong = {"damaged": wrong[:-1] + b"?", "cut": wrong[:-1], "again": good}.get(change, wrong)
    with pytest.raises(BatchError if change in ("damaged", "cut") else ValueError):
        world.broker.followed_replicas.append(world.replica, good + wrong)
    assert world.log.next_sequence == 2 and world.replica.history == [(2, 1)]


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_gap_of_the_leader_is_one_here(is_empty, world):
    world.note(1)
    leader = Batches()
    writes, replica = world.broker.followed_replicas, world.replica
    if not is_empty:
        writes.append(replica, leader.next(1, [b"a", b"b"]))
    behind = leader.next(1, [b"c"], gap=10)
    with pytest.raises(ValueError):
        writes.append(replica, behind)
    end = writes.append(replica, behind + leader.next(1, [b"d"]), after_gap=True)
    assert end == leader.sequence == world.log.next_sequence
    assert stored_in(world.log) == leader.stored
    with pytest.raises(ValueError):
        writes.append(replica, leader.stored[max(leader.stored)], after_gap=True)
    world.die(power_loss=False)
    assert stored_in(world.log) == leader.stored and not world.told
    world.broker.followed_replicas.append(world.replica, leader.next(1, [b"e"]))
    assert stored_in(world.log) == leader.stored


def test_what_the_leader_synced_was_not_synced_here(world, capsys):
    """Its batches say that they survive a power loss; of the follower's log nobody has said that."""
    leader = fill(world)
    world.flush()
    assert world.log.synced_sequence <= 1
    capsys.readouterr()
    for path in [path for path in world.disk.paths() if path.startswith(DIRECTORY) and path.endswith(".log")]:
        world.disk.cut(path, 64)  # the power takes all that was not synced
    world.disk.boot_id = "another"
    world.die(power_loss=False)
    assert world.log.next_sequence == 1 and world.replica.history in ([], [(1, 1)])
    assert not capsys.readouterr().out and not world.told
    leader = fill(world, (4,))
    assert stored_in(world.log) == leader.stored


def test_what_was_synced_here_and_is_missing_is_told_and_comes_again(world, capsys):
    leader = fill(world)
    world.sync()
    (path,) = (path for path in world.disk.paths() if path.startswith(DIRECTORY) and path.endswith(".log"))
    keep = 64 + len(leader.stored[1])
    world.disk.cut(path, keep)
    for index in [path for path in world.disk.paths() if path.endswith(".index")]:
        world.disk.cut(index, 0)
    capsys.readouterr()
    world.die(power_loss=True)
    assert "are to come from another replica" in capsys.readouterr().out
    assert world.log.next_sequence == 3, "its end is lower, and there is no gap behind it"
    for first in sorted(leader.stored)[1:]:
        world.broker.followed_replicas.append(world.replica, leader.stored[first])
    assert stored_in(world.log) == leader.stored


@pytest.mark.parametrize("seed", range(6))
def test_power_losses_take_what_was_not_synced_and_nothing_is_called_lost(seed, capsys):
    world = World(seed)
    world.make()
    leader = fill(world, (1, 2))
    world.sync()
    synced = world.log.synced_sequence
    more = [leader.next(2, [b"y" * seed] * 3) for _ in range(4)]
    for data in more:
        world.broker.followed_replicas.append(world.replica, data)
    world.flush()
    capsys.readouterr()
    world.die(power_loss=True)
    assert synced <= world.log.next_sequence <= leader.sequence
    assert not world.told
    for first in sorted(leader.stored):
        if first >= world.log.next_sequence:
            world.broker.followed_replicas.append(world.replica, leader.stored[first])
    assert stored_in(world.log) == leader.stored


def damage(world: World, first: int) -> None:
    """Turn a bit of a stored batch, in a process that is not there."""
    (path,) = (path for path in world.disk.paths() if path.startswith(DIRECTORY) and path.endswith(".log"))
    file = world.files.open(path)
    at = file.read_at(0, file.size()).index(internal_id(NUMBER, first).to_bytes(8, "big"))
    file.close()
    world.disk.flip_bit(path, at)


@pytest.mark.parametrize("number", range(4))
def test_what_is_damaged_is_known_until_it_has_come_again(number, world, capsys):
    leader = fill(world)
    world.replica.log.advance_committed(leader.sequence)
    world.sync()
    first = sorted(leader.stored)[number]
    damage(world, first)
    for _ in range(2):
        world.die(power_loss=False)
        assert world.replica.is_damaged and world.replica.lost_from == first
        assert world.log.next_sequence == leader.sequence, "nobody may have what is behind it but this copy"
        with pytest.raises(StorageError, match="another replica has them"):
            world.log.read(first)
        with pytest.raises(StorageError, match="another replica has them"):
            world.log.fetch_stored(first, 1)
        assert world.log.read(sorted(leader.stored)[-1]) is not None
    assert "are to come from another replica" in capsys.readouterr().out
    settled: list[bool] = []
    world.replica.on_settled = settled.append
    world.done.clear()
    if number:
        world.broker.followed_replicas.cut_back(world.replica, first, world.done.append)
    else:
        world.broker.followed_replicas.start_over(world.replica, first, 0, world.done.append)
    world.settle()
    assert world.done == [None] and not world.replica.is_damaged and world.log.next_sequence == first
    assert settled == [False]
    world.die(power_loss=True)
    assert not world.replica.is_damaged
    for each in sorted(leader.stored)[number:]:
        world.broker.followed_replicas.append(world.replica, leader.stored[each])
    assert stored_in(world.log) == leader.stored


def test_damage_that_is_found_when_it_is_read_is_told_at_once(world):
    leader = fill(world)
    world.sync()
    told: list[Replica] = []
    world.broker.replicas.on_damaged = told.append
    settled: list[bool] = []
    world.replica.on_settled = settled.append
    first = sorted(leader.stored)[2]
    world.log._forget_all()
    damage(world, first)
    with pytest.raises(StorageError, match="another replica has them"):
        world.log.read(first)
    assert told == [world.replica] and world.replica.lost_from == first and not settled
    world.replica.accept_damage()
    assert settled == [True]
    batch = world.log.read(first)
    assert batch is not None and batch.first == sorted(leader.stored)[3], "nobody else has it: it is skipped"


def test_channels_of_which_something_is_lost_are_known_until_their_whole_state_comes(world):
    fill(world)
    channel = [PutChannel("t", NUMBER, "ch", False, False), PutProgress("t", NUMBER, "ch", 1, b"", [], [], [], 0)]
    world.broker.followed_replicas.apply(world.replica, (4, 1), channel, True, world.done.append)
    world.settle()
    (cursor,) = world.replica.rows.cursors.values()
    world.broker._store.run_transaction([("DELETE FROM cursor WHERE id = ?", [(cursor,)])], True)
    for _ in range(2):
        world.die(power_loss=False)
        assert world.replica.is_damaged and not world.replica.lost_from and world.replica.progress == (0, 0)
    world.broker.followed_replicas.apply(world.replica, (4, 2), channel, True, world.done.append)
    world.settle()
    world.die(power_loss=False)
    assert not world.replica.is_damaged


# -- history


def test_an_epoch_that_began_behind_the_last_flush_is_found_again(world):
    world.note(9)
    leader = Batches()
    for epoch in (1, 1, 3, 3, 3, 7, 9, 9):
        world.broker.followed_replicas.append(world.replica, leader.next(epoch, [b"x"] * (1 + epoch % 3)))
    wanted = list(world.replica.history)
    assert len(wanted) == 4
    world.die(power_loss=False)  # before anything of it was in the database
    assert world.replica.history == wanted
    assert found_history(world.log, [], 9) == wanted
    assert found_history(world.log, wanted[:2], 9) == wanted
    assert found_history(world.log, [*wanted, (10, 10**6)], 10) == wanted
    assert found_history(world.log, [wanted[0], (2, wanted[1][1])], 9) == wanted


def test_an_epoch_without_a_batch_is_remembered(world):
    leader = fill(world, (1, 2))
    world.note(5, begins=True)
    world.die(power_loss=True)
    assert world.replica.epoch == 5
    assert world.replica.history[-1] in [(5, leader.sequence), (2, 3), (1, 1)]


# -- cut back, start over


def test_a_follower_goes_on_as_its_leader_does(world):
    fill(world)
    world.replica.log.advance_committed(5)
    at = dict(world.replica.history)[4]
    with pytest.raises(ValueError, match="committed"):
        world.broker.followed_replicas.cut_back(world.replica, 3, world.done.append)
    world.done.clear()
    world.note(6)
    world.broker.followed_replicas.cut_back(world.replica, at, world.done.append)
    with pytest.raises(StorageError, match="being cut back"):
        world.broker.followed_replicas.append(world.replica, b"")
    world.settle()
    assert world.done == [None, None]
    assert world.log.next_sequence == at and world.replica.history == [(1, 1), (2, 5)]
    other = Batches(at, world.log.end_offset_bytes)
    world.broker.followed_replicas.append(world.replica, other.next(6, [b"other"] * 2))
    world.flush()
    world.die(power_loss=False)
    assert world.replica.history == [(1, 1), (2, 5), (6, at)]
    assert stored_in(world.log)[at] == other.stored[at] and not world.told


def test_cutting_at_the_end_is_done_at_once(world):
    leader = fill(world)
    world.done.clear()
    world.broker.followed_replicas.cut_back(world.replica, leader.sequence, world.done.append)
    assert world.done == [None]


@pytest.mark.parametrize("power_loss", [True, False])
def test_an_epoch_without_a_batch_goes_when_its_leader_has_older_ones_there(world, power_loss):
    leader = fill(world, (1, 1))
    end = leader.sequence
    world.note(2, begins=True)  # it was elected, wrote nothing, and who led before leads again
    world.note(3)
    world.sync()
    world.done.clear()
    world.broker.followed_replicas.cut_back(world.replica, end, world.done.append)
    assert not world.done, "it is not durable yet"
    with pytest.raises(StorageError, match="being cut back"):
        world.broker.followed_replicas.append(world.replica, b"")
    world.settle()
    assert world.done == [None] and world.replica.history == [(1, 1)]
    world.die(power_loss)
    assert world.replica.history == [(1, 1)]
    world.broker.followed_replicas.append(world.replica, leader.next(1, [b"older"]) + leader.next(3, [b"new"]))
    world.sync()
    assert world.replica.history == [(1, 1), (3, end + 1)]
    world.die(power_loss)
    assert world.replica.history == [(1, 1), (3, end + 1)] and stored_in(world.log) == leader.stored


def test_an_epoch_without_a_batch_stays_while_the_database_cannot_be_written(world):
    leader = fill(world, (1,))
    world.note(2, begins=True)
    world.done.clear()
    history = list(world.replica.history)
    world.broker.followed_replicas.cut_back(world.replica, leader.sequence, world.done.append)
    world.end_flush(world.take_flush(), [], OSError("disk"))
    assert [type(error) for error in world.done] == [OSError]
    assert world.replica.history == history and not world.replica.work
    world.broker.followed_replicas.cut_back(world.replica, leader.sequence, world.done.append)
    world.settle()
    assert world.done[1:] == [None] and world.replica.history == [(1, 1)]
    world.die(power_loss=True)
    assert world.replica.history == [(1, 1)]


@pytest.mark.parametrize("restarts", [True, False])
def test_an_epoch_without_a_batch_gives_way_to_the_next_that_begins_there(restarts, world):
    leader = fill(world, (1,))
    for epoch in (2, 3):
        world.note(epoch, begins=True)
        if restarts:
            world.die(power_loss=True)
    assert world.replica.history == [(1, 1), (3, leader.sequence)]


def test_a_log_that_starts_over_has_no_epoch_without_a_batch(world):
    leader = fill(world, (1,))
    world.note(2, begins=True)
    world.note(3)
    world.broker.followed_replicas.start_over(world.replica, leader.sequence, leader.offset_bytes, world.done.append)
    world.settle()
    world.die(power_loss=True)
    assert world.replica.history == []
    world.broker.followed_replicas.append(world.replica, leader.next(1, [b"older"]))
    assert world.replica.history == [(1, leader.sequence - 1)]


@pytest.mark.parametrize("sequence", [3, 500])
def test_a_log_that_starts_over_is_empty_and_begins_elsewhere(sequence, world):
    fill(world)
    world.sync()
    world.done.clear()
    world.broker.followed_replicas.start_over(world.replica, sequence, 12_345, world.done.append)
    world.settle()
    assert world.done == [None]
    log = world.log
    assert (log.start_sequence, log.next_sequence, log.committed_sequence) == (sequence,) * 3
    assert log.end_offset_bytes == 12_345 and world.replica.history == [] and world.replica.progress == (0, 0)
    leader = Batches(sequence, 12_345)
    world.broker.followed_replicas.append(world.replica, leader.next(4, [b"a"]) + leader.next(4, [b"b"]))
    world.sync()
    world.die(power_loss=True)
    assert stored_in(world.log) == leader.stored and world.replica.history == [(4, sequence)]
    assert not world.told


def test_while_the_database_cannot_be_written_nothing_is_changed(world):
    leader = fill(world)
    history = list(world.replica.history)
    world.done.clear()
    world.broker.followed_replicas.start_over(world.replica, 100, 5, world.done.append)
    world.end_flush(world.take_flush(), [], OSError("disk"))
    assert [type(error) for error in world.done] == [OSError]
    assert stored_in(world.log) == leader.stored and world.replica.history == history
    world.settle()
    world.die(power_loss=False)
    assert stored_in(world.log) == leader.stored and world.replica.history == history


def test_a_follower_lets_go_of_what_is_consumed_on_a_full_disk_and_goes_on_where_it_was(world):
    leader = fill(world)
    world.broker.followed_replicas.append(world.replica, leader.next(4, [b"x" * 5000]))
    world.sync()
    end, history = world.log.next_sequence, [*world.replica.history]
    assert world.broker.seal_consumed(1 << 40, world.due_clock_ns) == [], "a channel may need it"
    world.log.advance_committed(end)
    world.replica.rows.durable_floor = end
    world.replica.rows._backlog_start = end
    world.replica.work = "something"
    assert world.broker.seal_consumed(1 << 40, world.due_clock_ns) == [], "something is done with it"
    world.replica.work = ""
    assert world.broker.seal_consumed(1 << 40, world.due_clock_ns) == [world.log]
    world.sync()
    world.broker.retain_all(world.due_clock_ns)
    assert world.log.start_sequence == world.log.next_sequence == end
    world.sync()
    world.die(power_loss=True)
    assert (world.log.start_sequence, world.log.next_sequence) == (end, end)
    assert world.replica.history == history and world.told == []
    world.broker.followed_replicas.append(world.replica, leader.next(4, [b"y"]))
    assert world.log.next_sequence == end + 1


def test_many_logs_are_cut_behind_several_flushes_and_left_alone_meanwhile(world):
    for number in range(2, 20):
        world.make(number, log_id=number)
    world.done.clear()
    replicas = [each for key, each in world.broker.replicas.items() if key[1] != NUMBER]
    for replica in replicas:
        leader = Batches(number=replica.number)
        world.broker.followed_replicas.append(replica, leader.next(0, [b"a"] * 3) + leader.next(0, [b"b"]))
    for replica in replicas:
        world.broker.followed_replicas.cut_back(replica, 4, world.done.append)
    world.flush()
    told = []
    while len(world.done) < len(replicas):
        flush = world.take_flush()
        assert len(flush.questions) <= 8, "others wait for the flush"
        assert all(log.begin_sync() is None for log in (each.log for each in replicas if each.log._lent))
        answers = world.run_flush(flush)
        world.broker.retain_all(1)
        world.end_flush(flush, answers)
        told.append(len(world.done))
    assert told == [8, 16, 18] and world.done == [None] * 18
    assert {replica.log.next_sequence for replica in replicas} == {4}
    assert all(replica.log._cache is world.broker._cache for replica in replicas)
    for replica in replicas:
        leader = Batches(4, replica.log.end_offset_bytes, replica.number)
        world.broker.followed_replicas.append(replica, leader.next(0, [b"c"]))
        assert replica.log.read(4) is not None


def test_a_cut_whose_flush_fails_is_done_behind_the_next(world):
    fill(world)
    world.done.clear()
    world.broker.followed_replicas.cut_back(world.replica, 5, world.done.append)
    world.flush()
    world.end_flush(world.take_flush(), [], OSError("disk"))
    assert world.done == [] and world.log.next_sequence > 5
    world.settle()
    assert world.done == [None] and world.log.next_sequence == 5


@pytest.mark.parametrize("error", [5, 28], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("kind", ["write", "sync", "truncate", "rename", "remove"])
@pytest.mark.parametrize("action", ["cut_back", "start_over"])
def test_a_change_that_fails_is_told_and_the_next_start_knows(action, kind, error):
    world = World()
    world.make()
    leader = fill(world)
    world.sync()
    world.done.clear()
    where = (5,) if action == "cut_back" else (5, 400)
    getattr(world.broker.followed_replicas, action)(world.replica, *where, world.done.append)
    world.flush()
    flush = world.take_flush()
    world.disk.fail(kind, nth=1, error=error)
    answers = world.run_flush(flush)
    world.disk.heal()
    world.end_flush(flush, answers)
    world.settle()
    assert len(world.done) == 1
    world.die(power_loss=False)
    kept = {first: data for first, data in leader.stored.items() if first < 5}
    ends = [leader.stored, kept if action == "cut_back" else {}]
    assert stored_in(world.log) in (ends if world.done[0] is not None else ends[1:])
    assert not world.told


def test_a_database_that_is_gone_is_made_anew_with_the_replicas(world):
    leader = fill(world)
    world.flush()
    world.broker.close()
    world.files.close()
    files = world.disk.attach()
    for name in files.list(""):
        if name.startswith("channels.db"):
            files.remove(name)
    files.close()
    world.open()
    replica = world.replica
    assert (replica.epoch, replica.log_id, replica.progress) == (4, LOG_ID, (0, 0))
    assert replica.history == [(1, 1), (2, 5), (4, 8)] and stored_in(replica.log) == leader.stored
    world.note(5)
    world.die(power_loss=True)
    assert world.replica.epoch == 5


# -- gone


def test_one_that_is_removed_is_gone_with_all_that_it_has(world):
    fill(world)
    world.done.clear()
    world.broker.replicas.remove(world.replica, world.done.append)
    world.settle()
    assert world.done == [None] and not world.broker.replicas
    assert not [path for path in world.disk.paths() if path.endswith(".log")]
    world.die(power_loss=True)
    assert not world.broker.replicas and not world.broker.topics
    world.make(log_id=9)
    assert world.log.log_id == 9 and world.replica.epoch == 0


@pytest.mark.parametrize("how", ["remove", "set_aside"])
def test_the_directory_of_a_topic_goes_with_the_last_of_its_replicas(how, world):
    world.make(2, log_id=5)
    fill(world)
    for number, left in ((1, ["t-t"]), (2, [])):
        getattr(world.broker.replicas, how)(world.broker.replicas["t", number], world.done.append)
        world.settle()
        assert world.files.list("topics") == left
    world.make(2, log_id=6)
    assert world.files.list("topics/t-t") == ["p-0002"] and all(error is None for error in world.done)


def test_the_directory_of_a_topic_that_is_made_anew_meanwhile_stays(world):
    """The files of another replica are about to be made when the last one that was there goes."""
    seen: list[str] = []
    world.disk.observers.append(lambda operation: seen.append(f"{operation.kind} {operation.path}"))
    world.broker.replicas.remove(world.replica, world.done.append)
    world.broker.replicas.create("t", 2, TOPIC_NUMBER, 9, META, world.done.append)
    world.settle()
    assert world.files.list("topics/t-t") == ["p-0002"] and world.done == [None, None]
    assert "remove_directory topics/t-t" not in seen


def test_what_a_topic_left_of_its_directory_goes_at_the_next_start(world):
    world.files.make_directory("topics/t-empty")
    world.files.make_directory("topics/t-other")
    world.files.open("topics/t-other/of somebody else", create=True).close()
    world.die(power_loss=False)
    assert world.files.list("topics") == ["t-other", "t-t"] and not world.broker.topics


@pytest.mark.parametrize("nth", range(1, 9))
def test_a_kill_while_the_last_replica_is_removed_leaves_no_empty_directory(nth, world):
    world.disk.crash_at(world.disk.operation_count + nth, False, random.Random(nth))
    with suppress(DiskCrashed):
        world.broker.replicas.remove(world.replica, world.done.append)
        world.settle()
    if not world.done:
        world.open()
    assert world.files.list("topics") == (["t-t"] if world.broker.replicas else [])


def test_one_that_is_set_aside_can_be_looked_at(world):
    fill(world)
    size = sum(path.endswith(".log") for path in world.disk.paths())
    world.done.clear()
    world.broker.replicas.set_aside(world.replica, world.done.append)
    world.settle()
    assert world.done == [None] and not world.broker.replicas
    aside = [path for path in world.disk.paths() if path.startswith("set-aside/t-t.p-0001.1/")]
    assert sum(path.endswith(".log") for path in aside) == size
    world.make(log_id=9)
    fill(world)
    world.broker.replicas.set_aside(world.replica, world.done.append)
    world.settle()
    assert any(path.startswith("set-aside/t-t.p-0001.2/") for path in world.disk.paths())
    world.die(power_loss=True)
    assert not world.broker.replicas and not world.broker.topics


def test_one_that_could_not_be_moved_is_moved_when_it_is_asked_again(world, monkeypatch):
    fill(world)
    world.done.clear()
    move, tries = type(world.broker._logs).move_replica, 0

    def fail(*args, **kwargs):
        nonlocal tries
        tries += 1
        if tries == 1:
            raise StorageError("disk")
        return move(*args, **kwargs)

    monkeypatch.setattr(type(world.broker._logs), "move_replica", fail)
    for _ in range(2):
        world.broker.replicas.set_aside(world.replica, world.done.append)
        world.settle()
    assert [str(error) for error in world.done] == ["disk", "None"] and not world.broker.replicas
    world.make()
    assert world.done[2:] == [None]


def test_a_log_that_is_not_the_one_it_should_be_is_set_aside_at_the_start(world):
    fill(world)
    world.flush()
    world.broker.close()
    world.files.close()
    files = world.disk.attach()
    files.remove_directory(DIRECTORY)
    log = PartitionLog.open(
        files, DIRECTORY, partition=NUMBER, segment_bytes=1000, cache=world.broker._cache, report=print, created_ns=5
    )
    log.close()
    files.close()
    told: list[Any] = []
    world.told = told
    world.open()
    assert world.log.log_id == LOG_ID and world.log.next_sequence == 1
    assert (world.replica.history, world.replica.progress, world.replica.epoch) == ([], (0, 0), 4)
    assert any(path.startswith("set-aside/") for path in world.disk.paths())


@pytest.mark.parametrize("others", [True, False], ids=["beside another", "alone"])
@pytest.mark.parametrize("left", ["nothing", "half an identity", "an empty log"])
def test_what_a_failed_creation_left_is_no_topic_of_the_next_start(others, left):
    """A full disk while a replica was made, and a kill before it was tried again."""
    world = World()
    world.make()
    if not others:
        world.broker.replicas.remove(world.replica, world.done.append)
        world.settle()
    path = "topics/t-t/p-0002"
    if left == "an empty log":
        log = PartitionLog.open(
            world.files, path, partition=2, segment_bytes=1000, cache=world.broker._cache, report=print, created_ns=5
        )
        log.close()
    else:
        world.files.make_directory(path)
        if left == "half an identity":
            world.files.open(f"{path}/log.meta", create=True).close()
    world.die(power_loss=False)
    assert not world.broker.topics, "there is no topic of this node alone"
    world.done.clear()
    world.make(2, log_id=9)
    assert world.done == [None] and world.broker.replicas["t", 2].log.log_id == 9
    world.flush()
    assert not [each for each in world.disk.paths() if each.startswith("set-aside/")]


def test_a_log_without_a_row_beside_replicas_of_its_topic_is_set_aside(world):
    log = PartitionLog.open(
        world.files,
        "topics/t-t/p-0002",
        partition=2,
        segment_bytes=1000,
        cache=world.broker._cache,
        report=print,
        created_ns=5,
    )
    log.append([b"x"], 1)
    log.close()
    world.told.clear()
    told = world.told
    world.die(power_loss=False)
    world.told = told
    assert not world.broker.topics
    assert any(path.startswith("set-aside/t-t.p-0002.1/") for path in world.disk.paths())
    world.make(2, log_id=9)
    assert world.broker.replicas["t", 2].log.log_id == 9


@pytest.mark.parametrize("meta", [META, msgspec.structs.replace(META, extend_support=True)], ids=["plain", "headers"])
def test_what_was_told_of_another_topic_of_this_name_is_not_believed(meta):
    """That it has no partitions, which a leader said that had a topic of its own under this name."""
    world = World()
    replica = world.make(meta=meta)
    world.done.clear()
    replica.about = msgspec.structs.replace(replica.about, meta=encode_meta(PLAIN))
    assert replica.meta == PLAIN and PLAIN.rank > META.rank, "of equal versions"
    world.note(1, begins=True)
    world.broker.led_replicas.promote(replica, 1, meta, world.done.append)
    world.settle()
    topic = world.broker.topics["t"]
    assert topic.meta == meta and topic.partitions[NUMBER].meta == meta
    assert topic.partitions[NUMBER].headers_from == 0, "all of it has them, or nothing has"
    assert replica.meta == meta, "and its followers are told so"
    assert not world.broker.change_meta(topic, PLAIN) and topic.meta == meta


def test_a_record_from_before_a_topic_had_headers_takes_none_of_them():
    """A coordination store was put back, and counts further than the partition by now."""
    world = World()
    known = msgspec.structs.replace(META, extend_support=True, version=4)
    for number in (1, 2):
        replica = world.make(number, log_id=number + 10, meta=known)
        replica.note_epoch(1, True, world.done.append)
        world.settle()
        record = TopicMeta(partition_num=2, retention_days=3, version=4 + number)
        world.broker.led_replicas.promote(replica, 1, record, world.done.append)
        world.settle()
    assert all(error is None for error in world.done), world.done
    topic = world.broker.topics["t"]
    assert topic.meta == TopicMeta(partition_num=2, retention_days=3, version=6, extend_support=True)
    assert [each.headers_from for each in topic.partitions.values()] == [0, 0]


def test_none_becomes_a_partition_of_a_topic_of_this_node_alone(world):
    world.note(1, begins=True)
    world.broker.topics["t"] = Topic("t", {0: Partition("t", 0, MemoryLog(0, 10), DelayedNotes())})
    with pytest.raises(StorageError, match="there is a topic t on this node alone"):
        world.broker.led_replicas.promote(world.replica, 1, META, world.done.append)
    with pytest.raises(ReplicaConflict, match="on this node alone"):
        world.broker.replicas.create("t", 2, TOPIC_NUMBER, 9, META, world.done.append)


# -- crashes


def do_create(world: World) -> None:
    world.make(2, log_id=5)


def do_note(world: World) -> None:
    world.note(8, begins=True)


def do_append(world: World) -> None:
    leader = Batches(world.log.next_sequence, world.log.end_offset_bytes)
    world.broker.followed_replicas.append(world.replica, leader.next(4, [b"new"] * 3) + leader.next(4, [b"er"]))
    world.sync()


def do_append_behind_a_gap(world: World) -> None:
    leader = Batches(world.log.next_sequence, world.log.end_offset_bytes)
    world.broker.followed_replicas.append(world.replica, leader.next(4, [b"new"] * 3, gap=7), after_gap=True)
    world.sync()


def do_cut(world: World) -> None:
    world.broker.followed_replicas.cut_back(world.replica, 5, world.done.append)
    world.settle()


def do_start_over(world: World) -> None:
    world.broker.followed_replicas.start_over(world.replica, 5, 99, world.done.append)
    world.settle()


def do_remove(world: World) -> None:
    world.broker.replicas.remove(world.replica, world.done.append)
    world.settle()


def do_set_aside(world: World) -> None:
    world.broker.replicas.set_aside(world.replica, world.done.append)
    world.settle()


def picture(world: World) -> dict[tuple[str, int], Any]:
    return {
        key: (each.log_id, each.epoch, list(each.history), each.log.start_sequence, stored_in(each.log))
        for key, each in world.broker.replicas.items()
    }


def begin(seed: int) -> World:
    world = World(seed)
    world.make()
    fill(world)
    world.sync()
    world.done.clear()
    world.told.clear()
    return world


@pytest.mark.parametrize("power_loss", [False, True], ids=["kill", "power"])
@pytest.mark.parametrize(
    "action",
    [do_create, do_note, do_append, do_append_behind_a_gap, do_cut, do_start_over, do_remove, do_set_aside],
    ids=lambda each: each.__name__[3:],
)
def test_a_crash_at_every_operation_leaves_it_as_it_was_or_as_it_is_to_be(
    action: Callable[[World], None], power_loss: bool, capsys: Any
) -> None:
    before = picture(begin(1))
    whole = begin(1)
    action(whole)
    assert all(error is None for error in whole.done)
    whole.die(power_loss=power_loss)
    after = picture(whole)
    assert after != before
    nth, seen = 1, 0
    while True:
        world = begin(nth)
        capsys.readouterr()
        world.disk.crash_at(world.disk.operation_count + nth, power_loss, random.Random(nth))
        try:
            action(world)
        except DiskCrashed:
            world.told.clear()
            world.open()
        else:
            break
        world.settle()
        found = picture(world)
        is_partly_appended = action in (do_append, do_append_behind_a_gap) and all(
            before["t", 1][4].items() <= found["t", 1][4].items() <= after["t", 1][4].items() for _ in "x"
        )
        assert found in (before, after) or is_partly_appended or is_on_the_way(action, found, before, after)
        if world.done and all(error is None for error in world.done):
            assert found == after, "nothing that was promised is lost"
        assert not world.told and "messages from sequence" not in capsys.readouterr().out, "nothing is called lost"
        seen += found == after
        world.die(power_loss=True)
        world.settle()
        assert picture(world) == found or is_partly_appended
        nth += 1
    assert nth > 3


def is_on_the_way(action: Any, found: Any, before: Any, after: Any) -> bool:
    """The history may say already, or not yet, that an epoch which has nothing in the log has begun."""
    if action is do_create:
        return bool(found.keys() == after.keys() and found["t", 2][4] == {})
    return False


def test_the_disk_of_a_crash_is_the_kits():
    assert isinstance(World().disk, CrashingDisk)
