"""The default of the memory budget, and what is done while memory is short."""

import logging
import os
import random
from typing import Any

import pytest

from flintmq.broker.broker import Broker, BrokerOptions
from flintmq.budget import InputMeter, OutputMeter
from flintmq.limits import MEMORY_BUDGET_MAX, MEMORY_BUDGET_MIN
from flintmq.nsqd.memory import STALLED_S_MAX, UNREAD_S_MAX, MemoryWatch, default_budget_bytes, memory_bytes
from flintmq.storage import ChannelStore
from flintmq.testing import MemoryDisk

MEBIBYTE = 1024 * 1024
LIMIT_BYTES = 1600


def write(root, path, text):
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def test_without_a_control_group_it_is_the_machine_s(tmp_path):
    assert memory_bytes(str(tmp_path)) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/a/b", {"sys/fs/cgroup/a/b/memory.max": 300}, 300),
        ("0::/a/b", {"sys/fs/cgroup/a/memory.max": 200, "sys/fs/cgroup/a/b/memory.max": "max"}, 200),
        ("0::/", {"sys/fs/cgroup/memory.max": 100}, 100),
        # in a container the path is the host's, and what is seen is the group itself
        ("0::/../../host/path", {"sys/fs/cgroup/memory.max": 150}, 150),
        ("7:blkio:/x\n4:memory:/a", {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": 400}, 400),
        ("4:cpu,memory:/gone", {"sys/fs/cgroup/memory/memory.limit_in_bytes": 500}, 500),
    ],
)
def test_the_limit_of_the_control_group_counts(tmp_path, group, files, expected):
    write(tmp_path, "proc/self/cgroup", group + "\n")
    for path, number in files.items():
        write(tmp_path, path, f"{number * MEBIBYTE if isinstance(number, int) else number}\n")
    assert memory_bytes(str(tmp_path)) == expected * MEBIBYTE
    assert default_budget_bytes(str(tmp_path)) == max(MEMORY_BUDGET_MIN, expected * MEBIBYTE // 4)


def test_no_limit_in_the_files_is_none(tmp_path):
    write(tmp_path, "proc/self/cgroup", "0::/a\nnonsense\n4:memory\n")
    write(tmp_path, "sys/fs/cgroup/a/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert memory_bytes(str(tmp_path)) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert MEMORY_BUDGET_MIN <= default_budget_bytes(str(tmp_path)) <= MEMORY_BUDGET_MAX


class Loop:
    """A loop whose time the test sets."""

    def __init__(self):
        self.now_s = 0.0
        self.due: list[Any] = []

    def time(self):
        return self.now_s

    def call_later(self, delay, callback):
        self.due.append(callback)

    def run(self, seconds):
        self.now_s += seconds
        due, self.due = self.due, []
        for callback in due:
            callback()


class Connection:
    def __init__(self, budget, peer):
        self.meter = OutputMeter(budget, self)
        self.peer = peer
        self.is_aborted = False
        self.looked_at = 0
        self.asked = 0
        self.has_answered = self.has_finished = False
        self.unwritten = 0

    def fill(self, size):
        for _ in range(size):  # in pieces so small that none is written in part
            self.unwritten += 1
            self.meter.wrote(1, self.unwritten)

    def look_at_output(self, now_s):
        self.looked_at += 1
        self.meter.look(self.unwritten, now_s)

    def ask_whether_it_reads(self):
        self.asked += 1

    def abort(self):
        self.is_aborted = True
        self.meter.close()


class World:
    def __init__(self, limit_bytes=LIMIT_BYTES):
        files = MemoryDisk().attach()
        options = BrokerOptions(memory_budget_bytes=limit_bytes)
        self.broker = Broker(files, ChannelStore(files), options, random.Random(1), print)
        self.budget = self.broker.budget
        self.loop = Loop()
        self.scheduled = 0
        self.watch = MemoryWatch(self.budget, self.broker, self.loop, self._schedule)

    def _schedule(self):
        self.scheduled += 1

    def connections(self, *sizes):
        made = [Connection(self.budget, f"c{number}") for number, _ in enumerate(sizes)]
        for each, size in zip(made, sizes, strict=True):
            each.fill(size)
        return made


def test_it_runs_while_memory_is_short_and_no_longer():
    world = World()
    (one,) = world.connections(400)
    world.watch.begin()
    world.watch.begin()
    assert len(world.loop.due) == 1
    held_back = Connection(world.budget, "held back")
    world.budget.held_back[held_back] = None
    world.loop.run(0.02)
    assert (one.looked_at, held_back.looked_at, len(world.loop.due)) == (1, 0, 1)
    one.unwritten = 100  # read, which nobody was told
    world.loop.run(0.02)
    assert world.budget.output_bytes == 100
    assert held_back.looked_at == 1
    assert (world.loop.due, world.budget.held_back) == ([], {})


def test_channels_that_wait_go_on_when_there_is_room():
    world = World()
    topic = world.broker.topic("t", 0)
    ((channel,), _) = world.broker.channel(topic, "c")
    world.broker.pump(0, 0)
    (one,) = world.connections(600)
    gone = object()
    world.budget.waiting |= {channel: None, gone: None}
    world.watch.begin()
    world.loop.run(0)
    assert not world.broker.has_marked
    one.unwritten = 500
    world.loop.run(0.02)
    assert world.broker.has_marked
    assert (world.scheduled, world.budget.waiting) == (1, {})


@pytest.mark.parametrize("who", ["somebody new", "a channel"])
def test_who_does_not_read_is_closed_when_others_wait_the_largest_first(who, caplog):
    caplog.set_level(logging.WARNING)
    world = World()
    small, large, reads = world.connections(100, 300, 200)
    if who == "a channel":
        world.budget.waiting[world.broker] = None
    else:
        world.budget.newcomers[Connection(world.budget, "new, and reads")] = None
    world.watch.begin()
    world.loop.run(0)
    for _ in range(4):
        reads.fill(200)
        reads.unwritten -= 200
        world.loop.run(UNREAD_S_MAX / 4)
    assert large.is_aborted
    # of the whole share until half is left, of the part that is for everybody likewise
    assert small.is_aborted == (who == "somebody new")
    assert not reads.is_aborted
    assert world.budget.closed_count == (2 if who == "somebody new" else 1)
    assert "c1 has not read 300 bytes in 5 s, and others wait for memory" in caplog.records[0].message


def test_who_is_held_back_is_asked_once_whether_it_reads():
    world = World()
    world.connections(400)
    first, second = (Connection(world.budget, name) for name in ("first", "second"))
    for each in (first, second, first):
        assert not world.budget.gives(each, each)
    world.watch.begin()
    world.loop.run(0)
    assert not world.budget.gives(first, first)
    world.loop.run(0.02)
    assert (first.asked, second.asked) == (1, 1)
    world.budget.forget(second)
    second.has_answered = True
    assert world.budget.gives(second, second)
    world.budget.forget(second)
    second.has_answered = False  # it was worth one delivery
    assert not world.budget.gives(second, second)
    world.loop.run(0.02)
    assert (first.asked, second.asked) == (1, 2)


def test_who_has_answered_goes_on_when_there_is_room_for_newcomers():
    world = World()
    (one,) = world.connections(500)
    new = Connection(world.budget, "new")
    new.has_answered = True
    assert not world.budget.gives(new, new)
    world.watch.begin()
    world.loop.run(0)
    assert (new.looked_at, new.asked) == (0, 0)
    one.unwritten = 499
    world.loop.run(0.02)
    assert (new.looked_at, world.budget.newcomers) == (1, {})
    assert world.budget.gives(new, new)


def test_nobody_is_closed_while_nobody_waits_that_reads():
    world = World()
    connections = world.connections(250, 200)
    silent = Connection(world.budget, "never answers")
    assert not world.budget.gives(silent, silent)
    world.watch.begin()
    for _ in range(10):
        world.loop.run(UNREAD_S_MAX)
    assert not any(each.is_aborted for each in connections)


class Publisher:
    """A connection that has sent a part of a body."""

    peer = "p"
    has_published = False

    def __init__(self, budget, size):
        self.input_meter = InputMeter(budget, self)
        self.is_awaited = True
        self.reason = ""
        self.size = size

    def send(self):
        self.input_meter.hold(self.size)
        return self

    def pause_input(self):
        self.is_read = False

    def resume_input(self):
        self.is_read = True

    def refuse_input(self, reason):
        self.reason = reason
        self.input_meter.close()


def publishers(world, *sizes):
    return [Publisher(world.budget, size).send() for size in sizes]


def is_refused(*publishers):
    return [bool(each.reason) for each in publishers]


def test_who_stalls_while_others_wait_is_refused(caplog):
    caplog.set_level(logging.WARNING)
    world = World(16 * MEBIBYTE)
    large, busy = publishers(world, 900_000, 100_000)
    world.loop.run(STALLED_S_MAX)
    assert not world.loop.due, "nobody waits"
    goes_on, waits = publishers(world, 100_000, 1000)
    busy.is_awaited = False  # it waits for us
    world.loop.run(0)
    for _ in range(4):
        world.loop.run(STALLED_S_MAX / 4)
    assert is_refused(large, busy, goes_on, waits) == [True, False, False, False]
    assert "900000 bytes have come of a body that is not complete" in large.reason
    assert "--memory-budget" in large.reason
    assert world.budget.refused_count == 1
    assert "refused 1 connections that had sent 900000 bytes" in caplog.records[0].message
    assert waits.is_read
    world.loop.run(0.1)
    assert not world.loop.due


def test_who_sends_a_byte_now_and_then_is_refused_in_the_end():
    world = World(16 * MEBIBYTE)
    (slow,) = publishers(world, 2 * MEBIBYTE)
    world.loop.run(0)
    assert slow.is_read, "one always goes on"
    others = publishers(world, *[1000] * 3)
    for _ in range(40):
        slow.size += 1
        slow.send()
        world.loop.run(1.0)
    assert is_refused(slow, *others) == [True, False, False, False]


def test_far_too_much_is_refused_at_once():
    world = World(16 * MEBIBYTE)
    found = publishers(world, *[MEBIBYTE // 4] * 64)
    assert world.budget.receiving_bytes <= world.budget.receiving_full_bytes
    assert 0 < sum(is_refused(*found)) < 60
    assert world.budget.refused_count == sum(is_refused(*found))


def test_when_nobody_gets_on_those_with_the_largest_parts_are_refused():
    world = World(16 * MEBIBYTE)
    (favoured, *waiting) = publishers(world, *[MEBIBYTE // 4] * 12)
    last = publishers(world, 1000)
    world.loop.run(0)
    for _ in range(20):
        for each in (favoured, *waiting):
            if not each.input_meter.is_paused and not each.reason:
                each.size += 1
                each.send()  # it sends, and does not come to an end
        world.loop.run(STALLED_S_MAX / 10)
    assert sum(is_refused(favoured, *waiting)) >= 8
    assert is_refused(*last) == [False]
    assert world.budget.receiving_bytes <= world.budget.receiving_short_bytes
