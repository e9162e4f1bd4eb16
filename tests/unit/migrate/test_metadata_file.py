"""nsqd.dat: what is written, how often, and how ours is told from NSQ's."""

from __future__ import annotations

import asyncio
import errno
import random
import time

import pytest
from tests.sim.disk import CrashingDisk, DiskCrashed

from flintmq.broker.partition import Partition
from flintmq.broker.topic import Topic
from flintmq.env import Env
from flintmq.errors import StorageError
from flintmq.migrate import metadata_file
from flintmq.migrate.metadata_file import (
    MetadataFile,
    TopicEntry,
    describe,
    own_digest,
    parse,
    read_small,
    write_metadata,
)
from flintmq.storage import MemoryLog, replace_file
from flintmq.testing.files import MemoryDisk, MemoryFiles, Operation


def topic_of(name: str, paused: bool = False, **channels: bool) -> Topic:
    topic = Topic(name, {0: Partition(name, 0, MemoryLog(0, 10))}, paused)
    topic.channel_names = {channel.replace("_eph", "#ephemeral"): flag for channel, flag in channels.items()}
    return topic


def present(disk: MemoryDisk) -> bytes:
    return disk.content("nsqd.dat")


def test_the_bytes_are_nsqs():
    files = MemoryFiles()
    topics = [topic_of("t", c=False, d=True, e_eph=False), topic_of("none", True), topic_of("x#ephemeral", c=False)]
    write_metadata(files, describe(topics), "")
    assert present(files.disk) == (
        b'{"topics":[{"name":"t","paused":false,"channels":[{"name":"c","paused":false},{"name":"d","paused":true}]},'
        b'{"name":"none","paused":true,"channels":null}],"version":"1.3.0"}'
    )
    assert parse(present(files.disk)) == describe(topics)


def test_what_an_older_nsqd_or_a_script_wrote():
    found = parse(b' {"version":"1.0.0-compat", "extra":[1], "topics":[{"name":"t","channels":[{"name":"c"}]}]}\n')
    assert [(topic.name, topic.paused) for topic in found.topics or ()] == [("t", False)]


DEEP = b'{"more":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"


@pytest.mark.parametrize(
    "text", [b"", b"nonsense", b'{"topics":[{"name":1}]}', b'{"topics":{}}', b'{"topics":[]} x', DEEP]
)
def test_what_is_not_a_list(text: bytes):
    with pytest.raises(ValueError, match=r"."):
        parse(text)


def test_a_file_that_is_too_large_is_not_read():
    files = MemoryFiles()
    write_metadata(files, describe([topic_of("t")]), "")
    with pytest.raises(StorageError, match="no more than 10 are read"):
        read_small(files, "nsqd.dat", 10)


def test_ours_is_known_after_a_crash_at_every_operation():
    """Either the old one or the new one is there, whole, and known."""
    for power_loss in (False, True):
        for number in range(1, 40):
            disk = CrashingDisk()
            files = disk.attach()
            digest = write_metadata(files, describe([topic_of("before")]), "")
            digest = write_metadata(files, describe([topic_of("old")]), digest)
            files.sync_directory("")
            disk.crash_at(disk.operation_count + number, power_loss, random.Random(number))
            try:
                write_metadata(files, describe([topic_of("new")]), digest)
            except DiskCrashed:
                pass
            disk.heal()
            disk.release()
            assert own_digest(disk.attach(), present(disk)), (power_loss, number)
            assert parse(present(disk)) in (describe([topic_of("old")]), describe([topic_of("new")]))


def test_nobody_elses_is_ours():
    files = MemoryFiles()
    assert own_digest(files, b"anything") == ""
    write_metadata(files, describe([topic_of("t")]), "")
    assert own_digest(files, present(files.disk))
    assert own_digest(files, present(files.disk) + b"\n") == ""
    write_metadata(files, describe([topic_of("u")]), "")
    assert own_digest(files, metadata_file._encode(describe([topic_of("t")]))) == ""


class Written:
    """What is asked for and how often it is written."""

    def __init__(self, topics: list[Topic]) -> None:
        self.files = MemoryFiles()
        self.disk = self.files.disk
        self.count = 0
        self.disk.observers.append(self._observe)
        self.keeper = MetadataFile(Env(), self.files, lambda: topics)

    def _observe(self, operation: Operation) -> None:
        self.count += operation.kind == "rename" and operation.path == "nsqd.dat.tmp"

    async def until(self, count: int) -> None:
        async with asyncio.timeout(10):
            while self.count < count or self.keeper._is_due:
                await asyncio.sleep(0.001)

    def names(self) -> list[str]:
        topics: list[TopicEntry] = parse(present(self.disk)).topics or []
        return [topic.name for topic in topics]


@pytest.mark.slow
async def test_many_changes_are_few_writes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metadata_file, "WRITE_INTERVAL_S", 0.2)
    topics: list[Topic] = []
    written = Written(topics)
    began_s = time.monotonic()
    await written.keeper.start()
    assert written.count == 1
    for n in range(2000):
        topics.append(topic_of(f"t{n}"))
        written.keeper.changed()
        if n % 100 == 0:
            await asyncio.sleep(0)
    await written.until(2)
    count_max = 3 + (time.monotonic() - began_s) // 0.2  # one an interval, on a machine with a lot to do as well
    assert written.count <= count_max
    topics.append(topic_of("last"))
    written.keeper.changed()
    await written.keeper.close()
    assert len(written.names()) == 2001
    assert written.count <= count_max + 2
    written.keeper.changed()
    await asyncio.sleep(0)
    assert written.keeper._task is None, "nothing is begun after the end"


async def test_the_first_change_is_written_at_once():
    topics = [topic_of("t")]
    written = Written(topics)
    await written.keeper.start()
    topics.append(topic_of("u"))
    begun = asyncio.get_running_loop().time()
    written.keeper.changed()
    await written.until(2)
    assert asyncio.get_running_loop().time() - begun < 0.5
    assert written.names() == ["t", "u"]
    await written.keeper.close()
    assert asyncio.get_running_loop().time() - begun < 0.9, "close waits for no interval"


async def test_a_failed_write_is_told_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(metadata_file, "_RETRY_S", 0.01)
    topics = [topic_of("t")]
    written = Written(topics)
    written.disk.fail("sync", times=3, error=errno.ENOSPC, path="nsqd.dat")
    await written.keeper.start()
    await written.until(1)
    assert written.names() == ["t"]
    assert caplog.text.count("cannot write nsqd.dat") == 3
    await written.keeper.close()


async def test_a_write_that_fails_is_tried_ever_more_seldom(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metadata_file, "_RETRY_S", 0.001)
    monkeypatch.setattr(metadata_file, "_RETRY_S_MAX", 0.004)
    monkeypatch.setattr(metadata_file, "WRITE_INTERVAL_S", 0.002)
    pauses_s: list[float] = []
    timeout = asyncio.timeout

    def waited(delay_s: float) -> asyncio.Timeout:
        pauses_s.append(delay_s)
        return timeout(delay_s)

    topics = [topic_of("t")]
    written = Written(topics)
    written.disk.fail("sync", times=6, error=errno.ENOSPC, path="nsqd.dat")
    await written.keeper.start()
    monkeypatch.setattr(asyncio, "timeout", waited)
    while written.count < 1 or written.keeper._task is not None:
        await asyncio.sleep(0.001)
    assert pauses_s == [0.001, 0.002, 0.004, 0.004, 0.004, 0.002], pauses_s
    written.disk.fail("sync", times=1, error=errno.ENOSPC, path="nsqd.dat")
    topics.append(topic_of("u"))
    written.keeper.changed()
    while written.count < 2 or written.keeper._task is not None:
        await asyncio.sleep(0.001)
    assert pauses_s[6:] == [0.001, 0.002], "as it was when a write was good"
    await written.keeper.close()


async def test_an_older_one_of_ours_stays_known():
    """After a crash between digest and list, the one that is there must survive a second such crash."""
    disk = CrashingDisk()
    files = disk.attach()
    digest = write_metadata(files, describe([topic_of("old")]), "")
    old = present(disk)
    replace_file(files, metadata_file.DIGESTS_NAME, f"{'0' * 64}\n{digest}\n".encode())
    keeper = MetadataFile(Env(), files, list)
    disk.fail("rename", path="nsqd.dat.tmp", times=100)
    await keeper.start()
    await keeper.close()
    assert present(disk) == old
    assert own_digest(files, old) == digest
