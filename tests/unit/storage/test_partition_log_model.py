"""The log against a model: any sequence of appends, reads, syncs, retention, clean restarts, kills and power losses.

The model is a dictionary from sequence to body. Caches, read-ahead, index interval and segments are tiny, so that every
path is taken within a few steps.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.sim.disk import DiskCrashed
from tests.unit.storage.log_kit import Kit, bodies_of, fetch_all, read_all, sync

from flintmq.errors import DiskFull
from flintmq.limits import DISK_RESERVE_BYTES
from flintmq.storage.cache import ReadCache
from flintmq.storage.partition_log import PartitionLog

BODIES = st.lists(st.binary(max_size=60), min_size=1, max_size=6) | st.integers(1, 9).map(lambda n: [b"same size"] * n)
SEEDS = st.integers(0, 2**32)


class LogModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.kit = Kit()
        self.model: dict[int, bytes] = {}
        self.timestamps: dict[int, int] = {}
        self.synced = 1
        self.committed = 1
        self.dropped_below = 1
        self.known_lost: set[int] = set()
        self.log: PartitionLog
        self.now_ns = 1000

    @initialize(segment_bytes=st.sampled_from([150, 400, 1000, 4000]))
    def begin(self, segment_bytes: int) -> None:
        self.kit.segment_bytes = segment_bytes
        self.open()

    def open(self) -> None:
        self.log = self.kit.open(cache=ReadCache(capacity_bytes=3000, tails_bytes=2000, files_max=2))
        assert self.log.failed is None

    def reopened(self, survives_from: int, survives_to: int) -> None:
        """Everything between the two must be there; what is there must be what was appended."""
        self.open()
        stored = read_all(self.log)
        assert stored.items() <= self.model.items()
        assert not [n for n in self.model if survives_from <= n < survives_to and n not in stored]
        self.model = stored
        self.timestamps = {n: self.timestamps[n] for n in stored}
        self.committed = self.synced = self.log.next_sequence
        self.dropped_below = max(self.dropped_below, self.log.start_sequence)
        assert self.log.committed_sequence == self.log.synced_sequence == self.log.next_sequence

    @rule(bodies=BODIES, step_ns=st.integers(-50, 100), due_ns=st.sampled_from([0, 10**18]))
    def append(self, bodies: list[bytes], step_ns: int, due_ns: int) -> None:
        self.now_ns = max(1, self.now_ns + step_ns)
        expected = self.log.next_sequence
        first = self.log.append(bodies, self.now_ns, due_ns)
        assert first == expected
        for sequence, body in enumerate(bodies, first):
            self.model[sequence] = body
            self.timestamps[sequence] = self.now_ns

    @rule(bodies=BODIES)
    def append_without_space(self, bodies: list[bytes]) -> None:
        before = self.log.describe()
        self.kit.disk.set_free_bytes(DISK_RESERVE_BYTES - 1)
        self.log._space_credit = 0
        with pytest.raises(DiskFull):
            self.log.append(bodies, self.now_ns)
        self.kit.disk.set_free_bytes(1 << 40)
        assert self.log.describe() == before

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        ends = sorted({self.log.committed_sequence, self.log.next_sequence})
        sequence = data.draw(st.sampled_from(ends))
        self.log.advance_committed(sequence)
        self.committed = max(self.committed, sequence)

    @rule()
    def sync(self) -> None:
        sync(self.log)
        self.synced = self.log.next_sequence
        assert self.log.synced_sequence == self.synced

    @rule(bodies=BODIES)
    def append_while_syncing(self, bodies: list[bytes]) -> None:
        ticket = self.log.begin_sync()
        end = self.log.next_sequence
        self.append(bodies, 1, 0)
        if ticket is not None:
            ticket.run()
            self.log.finish_sync(ticket, None)
            assert self.log.synced_sequence == ticket.end_sequence == end
            self.synced = end

    @rule()
    def roll(self) -> None:
        self.log.roll()

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        sequence = data.draw(st.integers(0, self.log.next_sequence))
        before = self.log.size_bytes
        freed = self.log.drop_before(sequence)
        assert before - freed == self.log.size_bytes
        self.dropped_below = max(self.dropped_below, self.log.start_sequence)
        assert not [n for n in self.model if sequence <= n < self.log.start_sequence]
        self.model = {n: body for n, body in self.model.items() if n >= self.log.start_sequence}

    @precondition(lambda self: self.committed < self.log.next_sequence)
    @rule(data=st.data(), crash=st.none() | st.integers(1, 30), power_loss=st.booleans(), seed=SEEDS)
    def cut_back(self, data: st.DataObject, crash: int | None, power_loss: bool, seed: int) -> None:
        firsts = {batch.first for n in self.model if n >= self.committed and (batch := self.log.read(n)) is not None}
        if not (firsts := {n for n in firsts if n >= self.committed and n in self.model}):
            return  # what is left of them is a gap
        sync(self.log)  # so that a crash takes nothing but what is cut
        self.synced = self.log.next_sequence
        self.resurrect_dropped()
        at = data.draw(st.sampled_from(sorted(firsts)))
        left = {n: body for n, body in self.model.items() if n < at}
        if crash is not None:
            self.kit.disk.crash_at(self.kit.disk.operation_count + crash, power_loss, random.Random(seed))
        try:
            self.log.cut_back_to(at)
        except DiskCrashed:
            self.open()
            assert read_all(self.log) in (left, self.model)
            self.committed = self.log.next_sequence
        else:
            self.kit.disk.heal()
            assert self.log.next_sequence == at
        if self.log.next_sequence == at:
            self.model = left
            self.known_lost = {n for n in self.known_lost if n < at}
        self.synced = self.log.next_sequence
        assert read_all(self.log) == self.model

    @rule()
    def forget_tail(self) -> None:
        self.log.drop_tail()
        self.log._cache.tail_dropped(self.log)

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        for sequence in data.draw(st.lists(st.integers(1, self.log.next_sequence), max_size=8)):
            batch = self.log.read(sequence)
            following = min((n for n in self.model if n >= sequence), default=None)
            if following is None:
                assert batch is None
            else:
                assert batch is not None
                assert batch.first <= following < batch.end
                assert bodies_of(batch.data).items() <= self.model.items()

    @rule(data=st.data(), bytes_max=st.integers(1, 2000))
    def fetch(self, data: st.DataObject, bytes_max: int) -> None:
        start = data.draw(st.integers(1, self.log.next_sequence))
        end = data.draw(st.integers(start, self.log.next_sequence + 3))
        fetched: dict[int, bytes] = {}
        limit = min(end, self.log.committed_sequence)
        while start < limit:
            raw, following = self.log.fetch(start, end, bytes_max)
            assert following > start
            found = bodies_of(raw)
            assert all(n < self.log.committed_sequence for n in found)
            fetched |= found
            start = following
        assert fetched.items() <= self.model.items()
        assert not [n for n in self.model if start <= n < limit and n not in fetched]

    @rule(timestamp_ns=st.integers(900, 2500))
    def find_by_time(self, timestamp_ns: int) -> None:
        late = [n for n in self.model if self.timestamps[n] >= timestamp_ns]
        assert self.log.sequence_at(timestamp_ns) == min(late, default=self.log.next_sequence)

    @rule()
    def restart_cleanly(self) -> None:
        sync(self.log)
        self.log.close()
        self.reopened(self.log.start_sequence, self.log.next_sequence)
        assert self.kit.lost() <= self.known_lost, "what is gone is told at each start, but nothing more is gone"

    @rule()
    def kill(self) -> None:
        end = self.log.next_sequence
        self.kit.disk.crash(power_loss=False, rng=random.Random(0))
        self.reopened(self.dropped_below, end)
        assert self.log.next_sequence == end
        assert self.kit.lost() <= self.known_lost

    @rule(seed=SEEDS)
    def lose_power(self, seed: int) -> None:
        self.resurrect_dropped()
        self.kit.disk.crash(power_loss=True, rng=random.Random(seed))
        self.reopened(self.dropped_below, self.synced)
        assert self.log.next_sequence >= self.synced
        self.known_lost |= self.kit.lost()

    def resurrect_dropped(self) -> None:
        """Deletions that were not synced may be undone by a power loss; make them durable, to keep the model simple."""
        self.kit.disk._tree.sync(self.kit.disk._tree.directory("topics/t/3"))

    @precondition(lambda self: hasattr(self, "log"))
    @invariant()
    def positions_agree(self) -> None:
        log = self.log
        assert log.start_sequence <= log.next_sequence
        assert log.committed_sequence == self.committed
        assert log.synced_sequence >= min(self.synced, log.next_sequence)
        assert log.size_bytes == sum(segment.size_bytes for segment in log.segments())
        assert log.size_bytes == sum(len(self.kit.disk.content(path)) for path in self.kit.logs())

    def teardown(self) -> None:
        if not hasattr(self, "log"):
            return
        self.log.advance_committed(self.log.next_sequence)
        assert read_all(self.log) == self.model
        assert fetch_all(self.log) == self.model


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    for name, value in {
        "partition_log.READ_AHEAD_BYTES": 500,
        "partition_log.TAIL_CACHE_BYTES": 3000,
        "partition_log.CHECKPOINT_BYTES": 300,
        "recovery.CHECKPOINT_BYTES": 100,
        "recovery.REWRITE_BYTES_MAX": 700,
        "segment.SCAN_WINDOW_BYTES": 600,
        "index.INDEX_INTERVAL_BYTES": 100,
        "index.INDEX_ENTRIES_MAX": 5,
        "scan._SEARCH_BYTES": 100,
        "scan._SEARCH_BYTES_FIRST": 50,
    }.items():
        monkeypatch.setattr(f"flintmq.storage.{name}", value)


LogModel.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


TestLogModel = pytest.mark.slow(LogModel.TestCase)
