"""A thousand worlds with a real nsqd in them, and proof that these worlds find planted bugs."""

import gc
import logging

import pytest
from tests.sim import nsqd_world
from tests.sim.loop import SimulationError, beginning_with, seeds, share

from flintmq.broker.broker import Broker
from flintmq.broker.channel import Channel, ChannelState
from flintmq.broker.spilled import Changes, SpilledStore
from flintmq.broker.window import Window
from flintmq.errors import StorageError
from flintmq.nsqd.engine import Engine
from flintmq.storage import PartitionLog, SyncTicket
from flintmq.testing.files import MemoryDisk, MemoryFile

CHUNKS = 8
SEEDS_PER_CHUNK = 125
MUTANT_SEEDS = 400


@pytest.fixture(autouse=True)
def quiet():
    """What nsqd logs about planted faults is not what is looked for."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(share(CHUNKS)))
def test_nothing_acknowledged_is_lost(chunk):
    for seed in seeds(SEEDS_PER_CHUNK, first=chunk * SEEDS_PER_CHUNK):
        assert nsqd_world.run(seed) == []


def test_a_seed_decides_everything():
    for seed in seeds(5, first=50):
        assert nsqd_world.trace_hash(seed) == nsqd_world.trace_hash(seed)


def test_a_world_that_is_over_leaves_nothing():
    """A few MB in each of thousands of worlds made a process of several GB."""

    def disks():
        gc.collect()
        return {id(each) for each in gc.get_objects() if isinstance(each, MemoryDisk)}

    nsqd_world.run(50)
    before = disks()
    for seed in range(51, 55):
        nsqd_world.run(seed)
    assert disks() <= before


def acknowledge_before_the_sync(monkeypatch):
    monkeypatch.setattr(Engine, "_sync_or_commit", lambda self, groups: self.broker.commit_groups(groups))


def do_not_sync(monkeypatch):
    monkeypatch.setattr(SyncTicket, "sync_files", lambda self: None)


def forget_what_is_in_flight(monkeypatch):
    honest = Channel.state

    def state(self):
        found = honest(self)
        return ChannelState(self.next, b"", found.deferred, found.attempts, found.holes)

    monkeypatch.setattr(Channel, "state", state)


def forget_due_times(monkeypatch):
    honest = Channel.state

    def state(self):
        found = honest(self)
        found.deferred = []
        return found

    monkeypatch.setattr(Channel, "state", state)


def never_time_out(monkeypatch):
    monkeypatch.setattr(Window, "_left_of", lambda self, run, subscription: iter(()))


def lose_what_a_lost_connection_held(monkeypatch):
    def requeue(self, message):
        self._leave_flight(message)
        self._mark_done(message.sequence)

    monkeypatch.setattr(Window, "requeue", requeue)


def never_write_progress(monkeypatch):
    monkeypatch.setattr(Broker, "has_flush", lambda self, wall_ns: False)
    honest = Broker.take_flush

    def take_flush(self, wall_ns):
        flush = honest(self, wall_ns)
        flush.statements = flush.statements[: len(flush.metadata.statements)]
        return flush

    monkeypatch.setattr(Broker, "take_flush", take_flush)


def forget_messages_set_aside(monkeypatch):
    monkeypatch.setattr("flintmq.broker.window.WINDOW_DEFERRED_MAX", 0)
    monkeypatch.setattr(SpilledStore, "take_changes", lambda self, *_: Changes())


def answer_a_failed_write_with_ok(monkeypatch):
    honest = PartitionLog.append

    def append(self, bodies, timestamp_ns, due_ns=0):
        try:
            return honest(self, bodies, timestamp_ns, due_ns)
        except StorageError:
            return self.next_sequence

    monkeypatch.setattr(PartitionLog, "append", append)


def write_one_byte_less(monkeypatch):
    honest = MemoryFile.write_at

    def write_at(self, position, data):
        honest(self, position, data[:-1] if len(data) > 1000 else data)

    monkeypatch.setattr(MemoryFile, "write_at", write_at)


MUTANTS = [
    acknowledge_before_the_sync,
    do_not_sync,
    forget_what_is_in_flight,
    forget_due_times,
    never_time_out,
    lose_what_a_lost_connection_held,
    never_write_progress,
    forget_messages_set_aside,
    answer_a_failed_write_with_ok,
    write_one_byte_less,
]
FOUND_BY = {forget_messages_set_aside: 5}
"""Where another than seed 0 finds it sooner, which waits in vain for 300 virtual seconds."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_planted_bugs_are_found(mutant, monkeypatch):
    mutant(monkeypatch)
    for seed in beginning_with(FOUND_BY.get(mutant, 0), range(MUTANT_SEEDS)):
        try:
            nsqd_world.run(seed)
        except (AssertionError, SimulationError):
            return
    pytest.fail(f"{mutant.__name__} was not found in {MUTANT_SEEDS} seeds")


def test_long_delays_and_overflow_go_through_the_database(monkeypatch):
    """The same worlds when nearly every deferred message is set aside."""
    monkeypatch.setattr("flintmq.broker.window.WINDOW_DEFERRED_MAX", 1)
    for seed in seeds(60, first=5000):
        assert nsqd_world.run(seed) == []


def test_a_tiny_window_spills_what_is_stuck(monkeypatch):
    monkeypatch.setattr("flintmq.broker.channel.CHANNEL_WINDOW_MAX", 8)
    monkeypatch.setattr(Channel.__init__, "__defaults__", (None, 8))
    for seed in seeds(60, first=6000):
        assert nsqd_world.run(seed) == []
