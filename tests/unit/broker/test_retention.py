"""Which segments are old, by the times that clocks gave them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from tests.sim.disk import CrashingDisk
from tests.unit.broker.world import BrokerWorld

from flintmq.broker import broker as broker_module
from flintmq.broker.clock_steps import ClockSteps
from flintmq.broker.retention import Removed, Retaining, Retention, drop_consumed
from flintmq.storage import PartitionLog, ReadCache, SegmentInfo
from flintmq.topic_meta import PLAIN, TopicMeta

MINUTE = 60_000_000_000
HOUR_NS = 60 * MINUTE
NOW = 100_000 * MINUTE
KEPT = Retention(60 * MINUTE, 0)


def _fail(error: object) -> None:
    pytest.fail(str(error))


@dataclass
class Log:
    """Segments of one message and 10 bytes each; the last one is active."""

    times_ns: list[int]
    start_sequence: int = 1

    def segments(self) -> list[SegmentInfo]:
        count = len(self.times_ns)
        return [
            SegmentInfo(number, number + 1, 10, self.times_ns[number - 1], number < count)
            for number in range(self.start_sequence, count + 1)
        ]

    def drop_before(self, sequence: int) -> int:
        dropped, self.start_sequence = sequence - self.start_sequence, sequence
        return 10 * dropped


@dataclass
class Consumed:
    """A partition of which channels have passed everything below a sequence."""

    log: Any
    floor: int
    durable_floor: int = field(init=False)
    meta: Any = PLAIN

    def __post_init__(self) -> None:
        self.durable_floor = self.floor


@pytest.mark.parametrize(
    ("minutes", "start"),
    [
        ([-100, -90, -50, -10], 3),
        ([500, -90, -50, -10], 3),  # one that lies ahead counts as the next
        ([500, -50, -90, -10], 1),
        ([-90, 500, 500, -61, 0], 5),
        ([-90, 500, 500, -59, 0], 2),
        ([-90, 500, 500, 500], 2),  # all lie ahead: they count as stored now
        ([-50, -99_999, -40, 0], 1),  # one that lies behind makes none before it old
        ([-99_999, -50, -40, 0], 2),
    ],
)
def test_a_segment_is_old_by_its_own_time_or_by_the_next_where_its_own_lies_ahead(minutes, start):
    log = Log([NOW + each * MINUTE for each in minutes])
    removed, is_ahead = drop_consumed(Consumed(log, len(minutes)), KEPT, NOW)
    assert log.start_sequence == start
    assert removed == Removed(start - 1, start - 1, 10 * (start - 1))
    assert is_ahead == (500 in minutes[:start])


def test_what_a_channel_waits_for_stays():
    log = Log([NOW - 90 * MINUTE] * 5)
    drop_consumed(Consumed(log, 3), KEPT, NOW)
    assert log.start_sequence == 3


def test_what_goes_because_of_its_size_is_not_told_as_old():
    log = Log([NOW - 90 * MINUTE, NOW, NOW, NOW])
    removed, _ = drop_consumed(Consumed(log, 4), Retention(60 * MINUTE, 10), NOW)
    assert (log.start_sequence, removed.segments) == (3, 1)


@pytest.mark.parametrize("shift_minutes", [1000, -1000])
@pytest.mark.parametrize("is_copied", [False, True])
def test_steps_of_the_clock_make_nothing_old(shift_minutes, is_copied):
    steps = ClockSteps()
    steps.moved(shift_minutes * MINUTE, NOW)
    now = NOW + 50 * MINUTE
    own = [NOW - MINUTE, now + shift_minutes * MINUTE]
    log = Log(own if not is_copied else [NOW - MINUTE, now - MINUTE, now])  # the other node's clock is right
    retaining = Retaining(KEPT, steps, _fail)
    retaining.apply("t", Consumed(log, len(log.times_ns)), now, is_copied)
    assert log.start_sequence == 1
    if is_copied:
        retaining.apply("t", Consumed(log, 3), now + 20 * MINUTE, is_copied)
        assert log.start_sequence == (2 if shift_minutes > 0 else 1), "a step back keeps it for that much longer"


def test_each_topic_is_told_once_and_each_log_that_is_ahead():
    files = CrashingDisk().attach()
    told: list[Any] = []
    retaining = Retaining(KEPT, ClockSteps(), _fail)
    retaining.on_removed = lambda topic, removed: told.append((topic, removed))
    retaining.on_ahead = told.append
    logs = []
    for number in range(2):
        log = PartitionLog.open(
            files,
            f"t/{number}",
            partition=number,
            segment_bytes=200,
            cache=ReadCache(),
            report=_fail,
            created_ns=1,
        )
        for minutes in (-90, -80, 500, 0):
            log.append([b"x" * 150], NOW + minutes * MINUTE)
        logs.append(log)
    for _ in range(2):
        for log in logs:
            retaining.apply("t", SimpleNamespace(log=log, floor=5, durable_floor=5, meta=PLAIN), NOW)
        retaining.tell()
    assert [log.start_sequence for log in logs] == [3, 3]
    ((topic, removed), ahead) = told
    assert (topic, removed.segments, removed.messages, ahead) == ("t", 4, 4, ["t"])


# -- a disk that is full of what is consumed ---------------------------------------------------------------------------


def _consumed(world: BrokerWorld, name: str, size: int, meta: TopicMeta | None = None) -> None:
    """Publish to a new topic and finish it all; its log has one segment, which is written to."""
    world.create(name, meta)
    world.create_channel(name, "c")
    ids = world.publish(name, [b"x" * 1000] * (size // 1000))
    consumer = world.subscribe(name, "c")
    consumer.ready(len(ids))
    consumer.received()
    consumer.finish(ids)
    world.leave(consumer)
    world.flush()


def _log(world: BrokerWorld, name: str) -> PartitionLog:
    log = world.broker.topics[name].first_partition.log
    assert isinstance(log, PartitionLog)
    return log


def _sync(log: PartitionLog) -> None:
    ticket = log.begin_sync()
    assert ticket is not None
    ticket.run()
    log.finish_sync(ticket, None)


def _seal(world: BrokerWorld, wanted_bytes: int = 1 << 40) -> set[str]:
    """Seal what is consumed; return the topics."""
    sealed = world.broker.seal_consumed(wanted_bytes, world.due_clock_ns)
    return {name for name in world.broker.topics if _log(world, name) in sealed}


def test_what_is_consumed_goes_from_active_segments_the_largest_first(monkeypatch):
    world = BrokerWorld()
    for number, size in enumerate((20_000, 80_000, 40_000, 60_000)):
        _consumed(world, f"t{number}", size)
    _consumed(world, "small", 1000)  # the next segment takes as much
    _consumed(world, "unread", 90_000)
    world.publish("unread", [b"one"])
    world.flush()
    assert _seal(world, 100_000) == {"t1", "t3"}, "no more than is wanted"
    assert _log(world, "t1").start_sequence == 1, "not before the next segment is durable"
    for name in ("t1", "t3"):
        _sync(_log(world, name))
    world.broker.retain_all(world.due_clock_ns)
    assert _log(world, "t1").start_sequence == _log(world, "t1").next_sequence == 81
    assert _log(world, "t0").start_sequence == 1
    monkeypatch.setattr(broker_module, "_SEALED_MAX", 1)
    assert _seal(world) == {"t2"} and _seal(world) == {"t0"}
    assert _seal(world) == set(), "nothing else is consumed, or worth it"


@pytest.mark.parametrize("kept", ["in flight", "not flushed", "no channel", "days"])
def test_what_is_needed_of_an_active_segment_stays(kept: str):
    world = BrokerWorld()
    if kept == "no channel":
        world.create("t")
        world.publish("t", [b"x" * 1000] * 10)
    else:
        _consumed(world, "t", 10_000, TopicMeta(partition_num=1, retention_days=1) if kept == "days" else None)
    if kept != "no channel":
        ids = world.publish("t", [b"last"]) if kept != "days" else []
        consumer = world.subscribe("t", "c")
        consumer.ready(1)
        if kept == "not flushed":
            consumer.finish(ids)
        else:
            world.flush()
    assert _seal(world) == set()
    if kept == "not flushed":
        world.flush()
        assert _seal(world) == {"t"}
    if kept == "days":
        world.clock.advance(25 * HOUR_NS)
        assert _seal(world) == {"t"}


def test_delayed_messages_outlive_the_segment_that_they_came_in():
    world = BrokerWorld()
    _consumed(world, "t", 10_000)
    world.publish("t", [b"later"], delay_ns=HOUR_NS)
    consumer = world.subscribe("t", "c")
    consumer.ready(1)
    world.flush()
    if _seal(world):
        _sync(_log(world, "t"))
        world.broker.retain_all(world.due_clock_ns)
    world.die(True)
    consumer = world.subscribe("t", "c")
    consumer.ready(1)
    for _ in range(3):
        world.pass_time(HOUR_NS)
        world.flush()
    assert [each.body for each in consumer.received()][:1] == [b"later"]


@pytest.mark.parametrize("power_loss", [False, True])
@pytest.mark.parametrize("step", ["sealed", "synced", "dropped", "deletion synced"])
def test_a_log_that_was_emptied_goes_on_where_it_was_wherever_the_process_died(power_loss: bool, step: str):
    world = BrokerWorld()
    _consumed(world, "t", 20_000)
    log_id, end, offset = _log(world, "t").log_id, 21, _log(world, "t").end_offset_bytes
    assert _seal(world) == {"t"}
    if step != "sealed":
        _sync(_log(world, "t"))
    if step.startswith("d"):
        world.broker.retain_all(world.due_clock_ns)
        assert _log(world, "t").start_sequence == end
    if step == "deletion synced":
        _sync(_log(world, "t"))
    for _ in range(2):
        world.die(power_loss)
        log = _log(world, "t")
        assert (log.log_id, log.next_sequence, log.end_offset_bytes) == (log_id, end, offset)
        assert world.channel("t", "c").depth == 0
    ids = world.publish("t", [b"next"])
    consumer = world.subscribe("t", "c")
    consumer.ready(1)
    assert [(each.internal, each.attempts, each.body) for each in consumer.received()] == [(ids[0], 1, b"next")]
    assert ids[0] & ((1 << 40) - 1) == end and world.problems == []


def test_who_published_is_still_known_when_what_was_published_has_gone():
    world = BrokerWorld()
    _consumed(world, "t", 10_000)
    partition = world.broker.topics["t"].first_partition
    world.broker.publish_to(partition, [b"x"], producer=(b"me", 1))
    world.broker.commit_groups(world.broker.write_pending(1))
    consumer = world.subscribe("t", "c")
    consumer.ready(1)
    consumer.finish([each.internal for each in consumer.received()])
    world.leave(consumer)
    world.flush()
    assert _seal(world) == {"t"}
    _sync(_log(world, "t"))
    world.broker.retain_all(world.due_clock_ns)
    assert _log(world, "t").start_sequence == 12
    world.die(True)
    assert _log(world, "t").producers.table.last(b"me") == 1
