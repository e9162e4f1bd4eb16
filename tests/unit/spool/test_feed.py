"""One topic of a spool on a disk in memory: what is finished and when, and what a full or broken disk does."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.spool.links import FakeLink, ids

from flintmq.batch import decode_batch
from flintmq.client.core.message import Delivery
from flintmq.env import Env
from flintmq.errors import FlintError, WriteFailed
from flintmq.limits import DISK_RESERVE_BYTES
from flintmq.message import MESSAGE_HEADER
from flintmq.spool import feed as module
from flintmq.spool.feed import Feed
from flintmq.storage import MemoryLog, PartitionLog, ReadCache
from flintmq.testing import MemoryDisk
from flintmq.wire.client import ClientConnection, Messages


class FakeConsumer:
    """A consumer that hands over what a test has; ``is_paused`` and the rest are as the real one's."""

    def __init__(self) -> None:
        self.is_paused = False
        self.is_starved = False
        self.links: tuple[Any, ...] = ()
        self.lacking = ""
        self.is_asking = True
        self.late = 0
        self.take: Callable[[Delivery], None] | None = None
        self.refused: Any = None

    def take_deliveries(self, take, refused, *, with_frames):
        assert with_frames, "they are stored as they came"
        self.take, self.refused = take, refused

    def may_deliver(self, link):
        return self.is_asking

    def pause(self):
        self.is_paused = True

    def unpause(self):
        self.is_paused = False

    def stats(self):
        return SimpleNamespace(late=self.late)

    def stop(self): ...

    async def close(self): ...


class World:
    """A feed, its disk and its nsqd."""

    def __init__(self, disk: MemoryDisk, is_kept: bool = True, bytes_max: int = 1 << 30) -> None:
        self.disk = disk
        self.consumer: Any = FakeConsumer()
        self.link: Any = FakeLink()
        self.consumer.links = (self.link,)
        self.failures: list[FlintError] = []
        self.damaged: list[Any] = []
        self.syncs = asyncio.Event()
        self.syncs.set()
        log: PartitionLog | MemoryLog = MemoryLog(0, 1, log_id=5)
        if is_kept:
            log = PartitionLog.open(
                disk.attach(), "t-x", partition=0, segment_bytes=bytes_max // 8, cache=ReadCache(),
                report=self.damaged.append, created_ns=5,
            )  # fmt: skip
        self.feed = Feed(
            "x", log, cast(Any, self.consumer), Env(run_blocking=self._run), is_kept=is_kept, bytes_max=bytes_max,
            in_flight_max=100, floor=1, quiet_s=0.0, is_ending=True, fail=self.failures.append,
        )  # fmt: skip

    async def _run(self, function, *arguments):
        await self.syncs.wait()
        return function(*arguments)

    def deliver(
        self, first: int, end: int, attempts: int = 1, size: int = 10, link: Any = None, at_ns: int = 0
    ) -> None:
        self.deliver_bodies(first, [b"b" * size] * (end - first), attempts, link, at_ns)

    def deliver_bodies(
        self, first: int, bodies: list[bytes], attempts: int = 1, link: Any = None, at_ns: int = 0
    ) -> None:
        """Deliver messages that were published ``at_ns``, long ago when it is 0."""
        end = first + len(bodies)
        stream = b"".join(
            MESSAGE_HEADER.pack(30 + len(body), 2, at_ns + number, attempts, message_id) + body
            for number, message_id, body in zip(range(first, end), ids(first, end), bodies, strict=True)
        )
        connection, owner = ClientConnection(), cast(Any, None)
        for event in connection.receive(stream):
            assert isinstance(event, Messages)
            delivery = Delivery(link or self.link, owner, 0.0, event.records)
            delivery.frames = event.frames
            self.feed.take(delivery)

    def stored(self) -> list[tuple[int, int, bytes, bytes]]:
        """Timestamp, attempts, id and body of all that is in the log."""
        log, found, data = self.feed.log, [], b""
        sequence = log.start_sequence
        while sequence < log.next_sequence:
            data, sequence = log.fetch(sequence, log.next_sequence, 1 << 20)
            position = 0
            while position < len(data):
                batch = decode_batch(data, position)
                for event in ClientConnection().receive(bytes(batch.frames(batch.first, batch.end))):
                    assert isinstance(event, Messages)
                    found += event.records
                position += batch.header.size
        return found

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.feed.tick()
            self.link.answer()

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


async def test_a_message_is_finished_when_it_is_synced_and_seen_then():
    world = World(MemoryDisk())
    world.syncs.clear()
    world.deliver(1, 11)
    await world.settle()
    assert world.link.finished == [] and world.feed.log.committed_sequence == 1
    world.syncs.set()
    await world.settle()
    assert world.link.finished == ids(1, 11) and world.feed.log.committed_sequence == 11
    await world.feed.close()


async def test_in_memory_it_is_finished_when_it_is_committed_and_given_back_at_the_end():
    world = World(MemoryDisk(), is_kept=False)
    world.deliver(1, 11)
    world.deliver(11, 21)
    await world.settle()
    assert world.feed.log.committed_sequence == 21 and world.link.finished == []
    world.feed.move(11)
    assert world.link.finished == ids(1, 11)
    await world.feed.close()
    assert world.link.requeued == ids(11, 21)


async def test_what_another_process_has_stored_is_not_stored_again():
    disk = MemoryDisk()
    world = World(disk)
    world.deliver(1, 11)
    await world.settle()
    disk.release()
    world = World(disk)
    world.deliver(6, 16, attempts=2)  # the first five come again: nsqd never had their FINs
    await world.settle()
    assert world.feed.log.next_sequence == 16
    assert world.link.finished == ids(6, 16)
    await world.feed.close()


async def test_of_messages_that_come_again_the_others_are_stored_as_they_came():
    disk = MemoryDisk()
    world = World(disk)
    world.deliver_bodies(1, [b"one", b"", b"three"])
    await world.settle()
    disk.release()
    world = World(disk)
    world.deliver_bodies(2, [b"", b"three", b"and four", b"five"], attempts=2)
    await world.settle()
    bodies = [b"one", b"", b"three", b"and four", b"five"]
    assert world.stored() == [
        (number, 1 if number < 4 else 2, message_id, body)
        for number, message_id, body in zip(range(1, 6), ids(1, 6), bodies, strict=True)
    ]
    assert world.link.finished == ids(2, 6)
    await world.feed.close()


async def test_one_read_of_very_many_messages_becomes_several_batches(monkeypatch):
    monkeypatch.setattr(module, "MESSAGES_MAX", 7)
    world = World(MemoryDisk())
    bodies = [b"b" * (number % 5) for number in range(30)]
    world.deliver_bodies(1, bodies)
    await world.settle()
    assert [body for *_, body in world.stored()] == bodies
    assert world.link.finished == ids(1, 31)
    await world.feed.close()


async def test_no_step_of_python_is_made_for_each_message():
    """Of one size; what grows with their number is done by loops of C, without which a spool is a third as fast."""

    def steps(world: World, first: int, count: int) -> int:
        made = 0

        def trace(_frame: object, event: str, _argument: object) -> Any:
            nonlocal made
            made += event == "line"
            return trace

        stream = b"".join(
            MESSAGE_HEADER.pack(230, 2, n, 1, b"%016x" % n) + b"b" * 200 for n in range(first, first + count)
        )
        connection = ClientConnection()
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            (event,) = connection.receive(stream)
            assert isinstance(event, Messages)
            delivery = Delivery(world.link, cast(Any, None), 0.0, event.records)
            delivery.frames = event.frames
            world.feed.take(delivery)
        finally:
            sys.settrace(before)
        return made

    world = World(MemoryDisk())
    steps(world, 1, 10)
    few = steps(world, 11, 100)
    many = steps(world, 111, 2000)
    assert many - few < (2000 - 100) / 4
    await world.settle()
    assert world.link.finished == ids(1, 2111)
    await world.feed.close()


async def test_what_comes_again_where_all_is_synced_is_finished():
    disk = MemoryDisk()
    for attempts in (1, 2, 3):
        world = World(disk)
        world.deliver(1, 11, attempts=attempts)
        await world.settle()
        assert world.link.finished == ids(1, 11) and world.feed.log.next_sequence == 11, attempts
        await world.feed.close()
        disk.release()


@pytest.mark.parametrize("is_kept", [True, False], ids=["spool", "direct"])
async def test_copies_that_waited_while_the_process_stood_still_are_not_stored_again(is_kept: bool):
    """The connection stands, and both copies are in what it brings; nsqd has given up waiting for the first."""
    world = World(MemoryDisk(), is_kept=is_kept)
    world.deliver(1, 11)
    await world.settle()
    world.deliver(11, 21)
    world.deliver(6, 26, attempts=2)  # some are finished, some wait for the disk, some are new
    await world.settle()
    assert [number for number, *_ in world.stored()] == list(range(1, 26))
    world.feed.move(26)
    assert sorted(world.link.finished) == sorted(ids(1, 11) + ids(11, 21) + ids(6, 26)), "each copy is finished"
    await world.feed.close()


async def test_both_copies_in_one_read_are_stored_once():
    world = World(MemoryDisk())
    stream = b"".join(
        MESSAGE_HEADER.pack(31, 2, number, attempts, b"%016x" % number) + b"b"
        for attempts in (1, 2)
        for number in range(1, 11)
    )
    (event,) = ClientConnection().receive(stream)
    assert isinstance(event, Messages)
    delivery = Delivery(world.link, cast(Any, None), 0.0, event.records)
    delivery.frames = event.frames
    world.feed.take(delivery)
    await world.settle()
    assert [(number, attempts) for number, attempts, *_ in world.stored()] == [(number, 1) for number in range(1, 11)]
    assert world.link.finished == ids(1, 11) * 2
    await world.feed.close()


async def test_what_was_synced_after_its_connection_broke_is_not_stored_again():
    world = World(MemoryDisk())
    world.syncs.clear()
    world.deliver(1, 11)
    world.link.is_lost = True
    world.syncs.set()
    await world.settle()
    link = FakeLink()
    world.deliver(1, 11, attempts=2, link=link)
    await world.settle()
    assert world.feed.log.next_sequence == 11 and link.finished == ids(1, 11)
    await world.feed.close()


async def test_a_message_whose_fin_came_too_late_is_known_behind_any_number_of_others(caplog):
    world = World(MemoryDisk())
    world.deliver(1, 11)
    await world.settle()
    for message_id in ids(1, 11):
        world.consumer.refused(world.link, message_id)
    world.consumer.late = 10
    for first in range(11, 3011, 100):
        world.deliver(first, first + 100)
        await world.settle()
    world.deliver(1, 11, attempts=2)
    await world.settle()
    assert world.feed.log.next_sequence == 3011, "those ten are not stored again"
    await world.feed.close()
    assert [each.message.partition("; ")[2] for each in caplog.records if "too late" in each.message] == [
        "those that are stored are not stored twice"
    ]


async def test_more_that_come_again_than_are_remembered_are_told_of(caplog):
    world = World(MemoryDisk())  # of its link 200 are remembered, of what comes again twice as many
    for first in range(1, 1001, 100):
        world.deliver(first, first + 100)
        await world.settle()
        for message_id in ids(first, first + 100):
            world.consumer.refused(world.link, message_id)
    world.consumer.late = 1000
    world.feed.tick()
    world.deliver(1, 1001, attempts=2)
    await world.settle()
    twice = world.feed.log.next_sequence - 1001
    assert f"are not stored twice, but for up to {twice}: so many" in caplog.text and 0 < twice <= 400
    await world.feed.close()


async def test_a_full_disk_gives_messages_back_and_is_tried_again(monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    world = World(MemoryDisk())
    world.disk.set_free_bytes(DISK_RESERVE_BYTES)
    world.deliver(1, 11)
    assert world.link.requeued == ids(1, 11) and world.consumer.is_paused
    world.tick(9)
    assert world.failures == [] and not world.feed.is_caught_up
    assert "the disk of the spool has no room (disk full: " in world.feed.waits[0]
    world.disk.set_free_bytes(1 << 40)
    async with asyncio.timeout(60):
        while world.consumer.is_paused:
            await asyncio.sleep(0.01)
    world.deliver(1, 11, attempts=2)
    await world.settle()
    assert world.link.finished == ids(1, 11)
    async with asyncio.timeout(60):
        while world.feed.waits[0]:
            world.tick()
            await asyncio.sleep(0.01)
    await world.feed.close()


@pytest.mark.parametrize("is_starved", [True, False])
async def test_what_was_published_later_and_is_finished_is_no_sign_of_more(monkeypatch, is_starved: bool):
    """Unless nsqd held something back for it: else a topic that is published to without pause would have no end."""
    monkeypatch.setattr(module, "PROBE_S", 0.0)
    world = World(MemoryDisk(), is_kept=False)
    world.deliver(1, 11)
    world.tick(2 * module.PROBES)
    assert world.feed.is_caught_up
    world.feed.move(11)
    assert not world.feed.is_caught_up, "what waited was finished, and nsqd may have held some back"
    world.tick(2 * module.PROBES)
    world.deliver(11, 21, at_ns=2**62)
    world.consumer.is_starved = is_starved
    world.feed.move(21)
    world.consumer.is_starved = False
    assert world.feed.is_caught_up == (not is_starved)
    await world.feed.close()


@pytest.mark.parametrize("back_s", [3600.0, 0.0])
async def test_silence_is_no_end_while_what_was_given_back_is_to_come_again(monkeypatch, back_s: float):
    for name, value in (("RETRY_S", 0.01), ("PROBE_S", 0.0), ("BACK_S", back_s)):
        monkeypatch.setattr(module, name, value)
    world = World(MemoryDisk())
    world.disk.set_free_bytes(DISK_RESERVE_BYTES)
    world.deliver(1, 11)
    world.disk.set_free_bytes(1 << 40)
    async with asyncio.timeout(60):
        while world.consumer.is_paused:
            await asyncio.sleep(0.01)
    world.tick(2 * module.PROBES)
    assert world.feed.is_caught_up == (not back_s)
    await world.feed.close()


async def test_silence_is_the_end_when_every_nsqd_has_answered_in_it_again_and_again(monkeypatch):
    monkeypatch.setattr(module, "PROBE_S", 0.0)
    world = World(MemoryDisk())
    other = FakeLink()
    world.consumer.links = (world.link, other)
    world.tick(9)
    assert not world.feed.is_caught_up and len(other.probes) == 1, "one stands still, and is asked once"
    assert world.feed.waits[0] == "nsqd nsqd:4150 does not answer"
    for _ in range(module.PROBES):
        other.answer()
        assert not world.feed.is_caught_up or _ == module.PROBES - 1
        world.tick()
    assert world.feed.is_caught_up and world.feed.waits == ("", 0.0)
    assert world.link.probes == other.probes == [], "nobody is asked any more"
    world.deliver(1, 11)
    await world.settle()
    assert not world.feed.is_caught_up, "something old has come"
    await world.feed.close()


async def test_an_nsqd_that_may_not_deliver_is_not_taken_for_one_that_has_nothing(monkeypatch):
    monkeypatch.setattr(module, "PROBE_S", 0.0)
    world = World(MemoryDisk())
    world.consumer.is_asking = False
    world.tick(9)
    assert not world.feed.is_caught_up
    world.consumer.is_asking = True
    world.tick(module.PROBES)
    assert world.feed.is_caught_up
    world.consumer.lacking = "nsqd other:4150 is not connected"
    world.tick()
    assert not world.feed.is_caught_up and world.feed.waits[0] == world.consumer.lacking
    await world.feed.close()


async def test_what_the_disk_has_not_got_yet_is_not_the_end(monkeypatch):
    monkeypatch.setattr(module, "PROBE_S", 0.0)
    world = World(MemoryDisk())
    world.syncs.clear()
    world.deliver(1, 11)
    world.tick(module.PROBES)
    assert not world.feed.is_caught_up
    world.syncs.set()
    await world.settle()
    assert world.feed.is_caught_up
    await world.feed.close()


async def test_a_disk_that_is_full_of_what_was_read_gets_room_again(monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    world = World(MemoryDisk())
    world.disk.set_free_bytes(DISK_RESERVE_BYTES + (1 << 20))
    count = 0
    while not world.consumer.is_paused:
        world.deliver(count + 1, count + 2, size=100 << 10)
        await world.settle()
        count += 1
    assert world.link.requeued == ids(count, count + 1) and world.link.finished == ids(1, count)
    world.feed.move(count - 1)
    await world.settle()
    assert world.feed.log.start_sequence == 1, "not all of it was read"
    world.feed.move(count)
    async with asyncio.timeout(60):
        while world.consumer.is_paused:
            await asyncio.sleep(0.01)
    assert world.feed.log.start_sequence == count
    world.deliver(count, count + 1, attempts=2, size=100 << 10)
    await world.settle()
    assert world.link.finished == ids(1, count + 1) and world.failures == []
    await world.feed.close()


async def test_what_is_synced_to_a_place_that_is_gone_is_not_finished():
    world = World(MemoryDisk())
    world.deliver(1, 11)
    await world.settle()
    looked: list[tuple[str, bool]] = []

    def gone(path: str, file: Any) -> str:
        looked.append((path, file is not None))
        return "spoolLocation is not there any more"

    world.feed._gone = gone
    world.deliver(11, 21)
    await world.settle()
    world.deliver(21, 31)
    await world.feed.close()
    assert world.link.finished == ids(1, 11) and world.link.requeued == [*ids(21, 31), *ids(11, 21)]
    assert looked == [("t-x/00000000000000000001.log", True)]
    assert "spoolLocation is not there any more" in str(world.failures[0])


@pytest.mark.parametrize("kind", ["write", "sync"])
async def test_a_disk_that_fails_ends_it_and_finishes_nothing(kind: Any):
    world = World(MemoryDisk())
    world.disk.fail(kind, times=100)
    world.deliver(1, 11)
    await world.settle()
    world.deliver(11, 21)
    await world.settle()
    assert world.link.finished == [] and isinstance(world.failures[0], WriteFailed)


async def test_no_more_is_asked_for_than_there_is_room_and_again_when_it_was_read():
    world = World(MemoryDisk(), bytes_max=1 << 20)
    for first in range(1, 31):
        world.deliver(first, first + 1, size=64 << 10)
        await world.settle()
    assert world.feed.is_full and world.consumer.is_paused
    world.feed.move(10)
    assert world.consumer.is_paused, "not enough was read"
    world.feed.move(30)
    assert not world.consumer.is_paused
    await world.feed.close()


async def test_one_message_that_is_larger_than_all_the_room_stops_nothing():
    world = World(MemoryDisk(), bytes_max=1 << 20)
    world.deliver(1, 2, size=3 << 20)
    await world.settle()
    assert world.consumer.is_paused
    world.feed.move(2)
    assert not world.consumer.is_paused
    await world.feed.close()


async def test_answers_that_came_too_late_are_told_of_in_one_line(caplog, monkeypatch):
    world = World(MemoryDisk())
    for world.consumer.late in (400, 700, 700):
        world.feed.tick()
    told = [record.message for record in caplog.records]
    assert len(told) == 1 and "topic x: 400 FIN, REQ or TOUCH came too late" in told[0]
    monkeypatch.setattr(module, "REFUSED_TOLD_S", 0.0)
    world.feed.tick()
    world.feed.tick()
    world.consumer.late = 703
    await world.feed.close()
    said = [record.message.split(" came")[0] for record in caplog.records]
    assert said[1:] == ["topic x: 300 FIN, REQ or TOUCH", "topic x: 3 FIN, REQ or TOUCH"], (
        "all of them, also at the end"
    )
