"""The takeover of NSQ's data on a disk in memory: what comes of every case, and a crash at every operation."""

from __future__ import annotations

import errno
import random
import struct
from collections import Counter
from collections.abc import Callable
from typing import Literal

import pytest
from tests.nsq_files import START_NS, Queued, bodies, meta, nsqd_dat, numbered, queue_files, write_files
from tests.sim.disk import CrashingDisk, DiskCrashed

from flintmq.broker.broker import Broker, BrokerOptions
from flintmq.broker.channel import Channel
from flintmq.broker.subscription import Subscription
from flintmq.errors import StorageError
from flintmq.message import MESSAGE_HEADER
from flintmq.migrate import metadata_file, takeover
from flintmq.migrate.takeover import ARCHIVE_NAME, Settings, Takeover, TakeoverFailed, TakeoverStopped
from flintmq.storage import ChannelStore, PartitionLog, ReadCache
from flintmq.testing import ManualClock
from flintmq.testing.files import MemoryFiles

KIB = 1024
SETTINGS = Settings(segment_bytes=64 * KIB, message_size_max=100_000)
SECOND = 1_000_000_000

Delivered = list[tuple[bytes, int, int]]  # body, attempts, timestamp_ns


class World:
    """A data directory, and the nsqds that come and go."""

    def __init__(self, *contents: dict[str, bytes]) -> None:
        self.disk = CrashingDisk()
        self.clock = ManualClock()
        self.reports: list[object] = []
        files = self.disk.attach()
        self.put(files, *contents)
        self.disk.release()

    def put(self, files: MemoryFiles, *contents: dict[str, bytes]) -> None:
        for content in contents:
            write_files(files, content)
        files.sync_directory("")

    def takeover(
        self,
        files: MemoryFiles | None = None,
        settings: Settings = SETTINGS,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> Takeover:
        files = files or self.disk.attach()
        self.store = ChannelStore(files)
        return Takeover(files, self.store, settings, self.clock, "data", self.reports.append, is_stopping)

    def take_over(self, settings: Settings = SETTINGS) -> Broker:
        """As nsqd starts: take over if there is something, then open the broker."""
        files = self.disk.attach()
        attempt = self.takeover(files, settings)
        if attempt.is_due():
            attempt.run()
        broker = self.broker(files)
        metadata_file.write_metadata(files, metadata_file.describe(broker.topics.values()), "")
        return broker

    def broker(self, files: MemoryFiles) -> Broker:
        broker = Broker(files, self.store, BrokerOptions(64 * KIB), random.Random(1), self.reports.append)
        broker.open(self.clock.wall_ns())
        return broker

    def end(self, broker: Broker) -> None:
        """Stop cleanly."""
        files = self.disk._attached
        assert files is not None
        digest = metadata_file.own_digest(files, self.disk.content("nsqd.dat"))
        metadata_file.write_metadata(files, metadata_file.describe(broker.topics.values()), digest)
        flush(broker)
        sync_logs(broker)
        broker.close()
        self.disk.release()


def flush(broker: Broker) -> None:
    taken = broker.take_flush(0)
    broker.flush_ended(taken, broker.run_flush(taken, 0, True), None, 0)


def sync_logs(broker: Broker) -> None:
    for log in broker.logs():
        ticket = log.begin_sync()
        if ticket is not None:
            ticket.run()
            log.finish_sync(ticket, None)


def publish(broker: Broker, topic: str, *messages: bytes) -> None:
    broker.publish(broker.topic(topic, START_NS), messages)
    broker.commit_groups(broker.write_pending(START_NS))


def channel_of(broker: Broker, topic: str, name: str) -> Channel:
    return broker.topics[topic].first_partition.channels[name]


def consume(broker: Broker, topic: str, name: str, finish: bool = True, count: int = 1_000_000) -> Delivered:
    """Everything a channel hands out."""
    (channel,), _ = broker.channel(broker.topics[topic], name)
    consumer = Subscription([], 60 * SECOND, 900 * SECOND)
    channel.add(consumer)
    consumer.rdy_count = count
    consumer.is_open = True
    delivered: Delivered = []
    ids = []
    while True:
        consumer.room_bytes = 1 << 20
        channel.pump(0, 0)
        data = b"".join(map(bytes, consumer.out))
        consumer.out.clear()
        if not data:
            break
        position = 0
        while position < len(data):
            size, _, timestamp_ns, attempts, message_id = MESSAGE_HEADER.unpack_from(data, position)
            delivered.append((data[position + 34 : position + 4 + size], attempts, timestamp_ns))
            ids.append(int(message_id, 16))
            position += 4 + size
    if finish and ids:
        assert channel.finish(consumer, ids) == []
    channel.remove(consumer)
    return delivered


def only_bodies(delivered: Delivered) -> list[bytes]:
    return [body for body, _, _ in delivered]


def names(world: World, under: str = "") -> list[str]:
    """The files of a directory."""
    prefix = f"{under}/" if under else ""
    found = [path for path in world.disk.paths() if path.startswith(prefix)]
    return [path[len(prefix) :] for path in found if "/" not in path[len(prefix) :]]


def test_nothing_to_do_in_a_directory_of_ours():
    world = World()
    assert not world.takeover().is_due()
    world.disk.release()
    broker = world.take_over()
    publish(broker, "t", b"a")
    world.end(broker)
    assert not world.takeover().is_due(), "our own nsqd.dat"


def test_topics_channels_pauses_and_queues():
    topic, a, b = numbered("topic", 5), numbered("a", 50, attempts=3), numbered("b", 7, attempts=65534)
    world = World(
        {
            "nsqd.dat": nsqd_dat(
                {"t": (False, {"a": False, "b": True, "c": False}), "p": (True, {}), "q": (True, {"x": False})}
            )
        },
        queue_files("t", topic),
        queue_files("t:a", a, file_bytes_max=400, read_count=20),
        queue_files("t:b", b, unsynced_count=3),
        queue_files("p", numbered("p", 4)),
        queue_files("q", numbered("q", 4)),
        queue_files("q:x", numbered("x", 3)),
    )
    broker = world.take_over()
    assert {name: topic.paused for name, topic in broker.topics.items()} == {"t": False, "p": True, "q": True}
    assert broker.topics["t"].channel_names == {"a": False, "b": True, "c": False}
    assert broker.topics["p"].depth == 4
    assert broker.topics["q"].depth == 4

    found = consume(broker, "t", "a", finish=False)
    assert found == [(m.body, 4, m.timestamp_ns) for m in a[20:]] + [(m.body, 1, m.timestamp_ns) for m in topic]
    again = consume(broker, "t", "a")  # requeued, the first last
    assert found[1:] + found[:1] == [(body, attempts - 1, timestamp_ns) for body, attempts, timestamp_ns in again]
    assert channel_of(broker, "t", "b").depth == 12
    assert consume(broker, "t", "b") == []  # paused
    broker.pause_channel(broker.topics["t"], "b", False)
    assert [attempts for _, attempts, _ in consume(broker, "t", "b")] == [65535] * 7 + [1] * 5
    assert only_bodies(consume(broker, "t", "c")) == bodies(topic)

    # a paused topic goes on delivering what its channels had
    assert only_bodies(consume(broker, "q", "x")) == bodies(numbered("x", 3))
    broker.pause_topic(broker.topics["q"], False)
    assert only_bodies(consume(broker, "q", "x")) == bodies(numbered("q", 4))
    # and one without channels keeps its messages for the first one
    broker.pause_topic(broker.topics["p"], False)
    assert only_bodies(consume(broker, "p", "first")) == bodies(numbered("p", 4))
    assert consume(broker, "p", "second") == []

    world.end(broker)
    broker = world.take_over()
    assert [consume(broker, "t", name) for name in ("a", "b", "c")] == [[], [], []]
    assert consume(broker, "q", "x") == []
    assert world.reports == []


def test_old_files_are_kept_and_counted(caplog: pytest.LogCaptureFixture):
    content = {**queue_files("t:c", numbered("m", 5)), "nsqd.dat": nsqd_dat({"t": (False, {"c": False})})}
    content |= {"nsqd.dat.123.tmp": b"x", "t:c.diskqueue.meta.dat.77.tmp": b"", "t:c.diskqueue.000009.dat.bad": b"?"}
    world = World(content, {"notes.txt": b"mine"})
    with caplog.at_level("INFO"):
        world.end(world.take_over())
    assert names(world) == ["channels.db", "channels.list", "notes.txt", "nsqd.dat", "nsqd.dat.flintmq"]
    assert {name: world.disk.content(f"{ARCHIVE_NAME}/{name}") for name in names(world, ARCHIVE_NAME)} == content
    size = sum(len(message.record) for message in numbered("m", 5))
    assert f"1 topics, 1 channels, 5 messages, {size} bytes; no damage" in caplog.text
    assert f"data/{ARCHIVE_NAME}" in caplog.text


def test_without_nsqd_dat_the_queue_files_tell():
    """And a queue that is empty does not bring its channel back."""
    world = World(
        queue_files("t", numbered("t", 3)),
        queue_files("t:c", numbered("c", 2)),
        queue_files("t:empty", numbered("e", 2), read_count=2),
        queue_files("empty", []),
    )
    broker = world.take_over()
    assert {name: list(topic.channel_names) for name, topic in broker.topics.items()} == {"t": ["c"]}
    assert only_bodies(consume(broker, "t", "c")) == bodies(numbered("c", 2)) + bodies(numbered("t", 3))
    world.end(broker)
    assert names(world) == ["channels.db", "channels.list", "nsqd.dat", "nsqd.dat.flintmq"]


def test_missing_and_stale_meta_files(caplog: pytest.LogCaptureFixture):
    """Defect 16: everything there is read from its beginning."""
    missing = queue_files("a:c", numbered("a", 30), file_bytes_max=300)
    del missing["a:c.diskqueue.meta.dat"]
    stale = queue_files("b:c", numbered("b", 30), file_bytes_max=300)
    stale["b:c.diskqueue.meta.dat"] = meta(3, (0, 9999), (2, 10))
    garbled = queue_files("c:c", numbered("c", 30), file_bytes_max=300)
    garbled["c:c.diskqueue.meta.dat"] = bytes(30)
    world = World(missing, stale, garbled)
    broker = world.take_over()
    for topic in "abc":
        assert only_bodies(consume(broker, topic, "c")) == bodies(numbered(topic, 30))
    assert caplog.text.count("counts as not read") == 3


def test_damage_is_reported_and_kept(caplog: pytest.LogCaptureFixture):
    messages = numbered("m", 60, size=40)
    files = queue_files("t:c", messages, file_bytes_max=1400)  # 20 records a file
    second = bytearray(files["t:c.diskqueue.000001.dat"])
    second[5 * 70 : 5 * 70 + 4] = struct.pack(">i", -7)
    files["t:c.diskqueue.000001.dat"] = bytes(second)
    files["t:c.diskqueue.000002.dat"] = files["t:c.diskqueue.000002.dat"][:-3]
    world = World(files, queue_files("un valid:c", numbered("x", 3)), queue_files("e#ephemeral", numbered("y", 3)))
    broker = world.take_over()
    expected = bodies(messages[:25]) + bodies(messages[40:59])
    assert list(broker.topics) == ["t"]
    assert only_bodies(consume(broker, "t", "c")) == expected
    assert f"t:c.diskqueue.000001.dat at byte {5 * 70}" in caplog.text
    assert f"t:c.diskqueue.000002.dat at byte {19 * 70}" in caplog.text
    assert "un valid:c" in caplog.text
    bad = [name for name in names(world, ARCHIVE_NAME) if name.endswith(".bad")]
    assert bad == [
        "t:c.diskqueue.000001.dat.bad",
        "t:c.diskqueue.000002.dat.bad",
        "un valid:c.diskqueue.000000.dat.bad",
    ]


def test_queues_of_ephemeral_topics_are_left_out_and_no_damage(caplog: pytest.LogCaptureFixture):
    """NSQ's nsqd has ordinary channels of such a topic on disk, and reads them again when both are made again."""
    caplog.set_level("INFO")
    cut = queue_files("cut#ephemeral:c", numbered("m", 2))
    del cut["cut#ephemeral:c.diskqueue.meta.dat"]
    read = queue_files("read#ephemeral:c", numbered("m", 2), read_count=2)
    world = World(
        queue_files("e#ephemeral:c", numbered("m", 6), read_count=2),
        cut,
        read,
        queue_files("t:c#ephemeral", numbered("m", 1)),
        queue_files("t:c", numbered("kept", 1)),
    )
    broker = world.take_over()
    assert only_bodies(consume(broker, "t", "c")) == [b"kept-0"]
    assert list(broker.topics) == ["t"]
    assert "ERROR" not in [record.levelname for record in caplog.records]
    says = "which is not taken over"
    assert [record.getMessage() for record in caplog.records if says in record.getMessage()] == [
        f"queue cut#ephemeral:c belongs to an #ephemeral topic, {says} (66 bytes); its files are kept",
        f"queue e#ephemeral:c belongs to an #ephemeral topic, {says} (4 messages, 132 bytes); its files are kept",
        f"queue t:c#ephemeral belongs to an #ephemeral channel, {says} (1 messages, 33 bytes); its files are kept",
    ]
    assert "no damage; 3 queues that are #ephemeral are left out" in caplog.text
    kept = names(world, ARCHIVE_NAME)
    assert {*cut, *read, "e#ephemeral:c.diskqueue.000000.dat", "t:c#ephemeral.diskqueue.000000.dat"} <= set(kept)
    assert [name for name in kept if name.endswith(".bad")] == []


def test_too_large_messages_are_left_out_and_their_file_kept(caplog: pytest.LogCaptureFixture):
    world = World(queue_files("t:c", [Queued(b"a"), Queued(b"b" * 100_001), Queued(b"c" * 100_000)]))
    broker = world.take_over()
    assert only_bodies(consume(broker, "t", "c")) == [b"a", b"c" * 100_000]
    assert "100001 bytes is larger than --max-msg-size=100000" in caplog.text
    assert "t:c.diskqueue.000000.dat.bad" in names(world, ARCHIVE_NAME)


def test_names_that_are_not_valid_are_left_out(caplog: pytest.LogCaptureFixture):
    topics = {
        "ok": (False, {"c": False, "bad channel": False}),
        "": (False, {}),
        "e#ephemeral": (False, {}),
        "x" * 65: (False, {}),
    }
    world = World({"nsqd.dat": nsqd_dat(topics)})
    broker = world.take_over()
    assert {name: list(topic.channel_names) for name, topic in broker.topics.items()} == {"ok": ["c"]}
    assert caplog.text.count("left out") == 4
    assert caplog.text.count("is not a valid name, left out") == 3
    assert "topic 'e#ephemeral' is #ephemeral, which is not taken over, left out" in caplog.text


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"topics":[{"paused":true}]}', b'{"topics":[{"name":"\xff"}]}', b'{"topics":3}']
)
def test_a_list_that_cannot_be_read_stops_the_start(text: bytes):
    world = World({"nsqd.dat": text}, queue_files("t", numbered("m", 3)))
    before = {path: world.disk.content(path) for path in names(world)}
    with pytest.raises(TakeoverFailed, match=r"nsqd\.dat.*repair it, or move it away.*as they were"):
        world.takeover().run()
    world.disk.release()
    assert {path: world.disk.content(path) for path in before} == before
    assert [path for path in world.disk.paths() if path.startswith("topics")] == []


@pytest.mark.parametrize(
    "text", [b'{"topics":null,"version":"1.3.0"}', b"{}", b'{"version":"1.2.1","topics":[],"more":{"x":[1]}}']
)
def test_a_list_without_topics(text: bytes):
    world = World({"nsqd.dat": text})
    assert world.take_over().topics == {}
    assert names(world, ARCHIVE_NAME) == ["nsqd.dat"]


def test_no_space_stops_the_start():
    world = World(queue_files("t", numbered("m", 3)))
    world.disk.set_free_bytes(64 * KIB * KIB)
    with pytest.raises(TakeoverFailed, match=r"are free, and its messages need .*free space"):
        world.takeover().run()


def test_a_disk_that_becomes_full_stops_the_start_and_the_next_one_goes_on():
    messages = numbered("m", 3000, size=500)
    world = World(queue_files("t:c", messages), {"nsqd.dat": nsqd_dat({"t": (False, {"c": False})})})
    world.disk.fail("write", nth=3, error=errno.ENOSPC, path="topics/t-t/p-0000/0")
    with pytest.raises(TakeoverFailed, match=r"disk full.*free space"):
        world.takeover().run()
    world.disk.heal()
    world.disk.release()
    broker = world.take_over()
    assert only_bodies(consume(broker, "t", "c")) == bodies(messages)


def test_a_failing_sync_or_database_leaves_everything():
    messages = numbered("m", 10)
    kinds: tuple[Literal["sync", "commit"], ...] = ("sync", "commit")
    for kind in kinds:
        world = World(queue_files("t:c", messages))
        ChannelStore(files := world.disk.attach()).close()
        world.disk.fail(kind, nth=2, times=3, path="channels.db" if kind == "commit" else "topics/")
        with pytest.raises(TakeoverFailed, match="as they were"):
            world.takeover(files).run()
        world.disk.heal()
        world.disk.release()
        assert "t:c.diskqueue.000000.dat" in names(world)
        assert only_bodies(consume(world.take_over(), "t", "c")) == bodies(messages)


def test_stopping_in_the_middle_and_going_on():
    messages = numbered("m", 40_000)
    world = World(queue_files("t:c", messages))
    with pytest.raises(TakeoverStopped):
        world.takeover(is_stopping=lambda: True).run()
    world.disk.release()
    assert "t:c.diskqueue.000000.dat" in names(world)
    broker = world.take_over()
    assert only_bodies(consume(broker, "t", "c")) == bodies(messages)
    assert broker.topics["t"].first_partition.log.next_sequence == 40_001, "nothing is stored twice"


# -- merging -----------------------------------------------------------------------------------------------------------


def test_back_to_nsq_for_a_day_and_here_again():
    """NSQ's nsqd starts from our list, changes it and leaves queue files; what we had stays, its pauses count."""
    world = World({"nsqd.dat": nsqd_dat({"t": (False, {"a": False, "b": True}), "gone": (False, {})})})
    broker = world.take_over()
    publish(broker, "t", b"ours-1", b"ours-2", b"ours-3")
    consume(broker, "t", "a", count=1)
    publish(broker, "solo", b"solo-1")
    world.end(broker)

    files = world.disk.attach()
    listed = metadata_file.parse(world.disk.content("nsqd.dat"))
    assert sorted(topic.name for topic in listed.topics or ()) == ["gone", "solo", "t"]
    day = nsqd_dat(
        {"t": (True, {"a": True, "b": False, "new": False}), "solo": (False, {"s": False}), "n": (False, {"c": False})}
    )
    world.put(
        files,
        {"nsqd.dat": day},
        queue_files("t", numbered("t", 4)),
        queue_files("t:a", numbered("a", 3)),
        queue_files("t:b", numbered("b", 2)),
        queue_files("n:c", numbered("n", 2)),
        queue_files("solo:s", numbered("s", 2)),
    )
    world.disk.release()
    broker = world.take_over()
    assert sorted(broker.topics) == ["gone", "n", "solo", "t"]
    topic = broker.topics["t"]
    assert topic.paused
    assert topic.channel_names == {"a": True, "b": False, "new": False}
    assert channel_of(broker, "t", "a").depth == 2 + 3
    assert only_bodies(consume(broker, "t", "b")) == [b"ours-1", b"ours-2", b"ours-3", b"b-0", b"b-1"]
    assert consume(broker, "t", "new") == []
    broker.pause_topic(topic, False)
    broker.pause_channel(topic, "a", False)
    rest = bodies(numbered("t", 4))
    assert only_bodies(consume(broker, "t", "a")) == [b"ours-2", b"ours-3", *bodies(numbered("a", 3)), *rest]
    assert only_bodies(consume(broker, "t", "b")) == rest
    assert only_bodies(consume(broker, "t", "new")) == rest
    assert only_bodies(consume(broker, "n", "c")) == bodies(numbered("n", 2))
    assert only_bodies(consume(broker, "solo", "s")) == [b"solo-1", *bodies(numbered("s", 2))]
    world.end(broker)
    assert names(world, f"{ARCHIVE_NAME}-2")[0] == "n:c.diskqueue.000000.dat"
    assert not world.takeover().is_due()


def test_a_paused_topic_of_ours_keeps_its_place():
    world = World()
    broker = world.take_over()
    publish(broker, "t", b"handed-out")
    broker.channel(broker.topics["t"], "a")
    broker.pause_topic(broker.topics["t"], True)
    publish(broker, "t", b"held-back")
    world.end(broker)
    world.put(world.disk.attach(), queue_files("t:a", numbered("a", 1)), queue_files("t:b", numbered("b", 1)))
    world.disk.release()
    broker = world.take_over()
    topic = broker.topics["t"]
    assert topic.paused
    assert only_bodies(consume(broker, "t", "a")) == [b"handed-out"]
    broker.pause_topic(topic, False)
    assert only_bodies(consume(broker, "t", "a")) == [b"held-back", b"a-0"]
    assert only_bodies(consume(broker, "t", "b")) == [b"held-back", b"b-0"]


def test_unpaused_by_nsq():
    world = World({"nsqd.dat": nsqd_dat({"t": (True, {"a": False})})})
    broker = world.take_over()
    publish(broker, "t", b"held-back")
    assert consume(broker, "t", "a") == []
    world.end(broker)
    world.put(world.disk.attach(), {"nsqd.dat": nsqd_dat({"t": (False, {"a": False})})})
    world.disk.release()
    broker = world.take_over()
    assert not broker.topics["t"].paused
    assert only_bodies(consume(broker, "t", "a")) == [b"held-back"]


def test_a_topic_of_several_partitions():
    """NSQ's messages go to the first; what is new begins at the present end of the others."""
    world = World()
    broker = world.take_over()
    publish(broker, "t", b"p0")
    broker.channel(broker.topics["t"], "a")
    world.end(broker)
    files = world.disk.attach()
    second = PartitionLog.open(
        files,
        "topics/t-t/p-0001",
        partition=1,
        segment_bytes=64 * KIB,
        cache=ReadCache(),
        report=world.reports.append,
        created_ns=1,
    )
    second.append([b"p1-0", b"p1-1"], START_NS)
    second.close()
    topics = {"t": (True, {"a": False, "b": False})}
    world.put(files, {"nsqd.dat": nsqd_dat(topics)}, queue_files("t:a", numbered("a", 3)))
    world.disk.release()
    broker = world.take_over()
    first, second_part = broker.topics["t"].partitions.values()
    assert (first.paused_at, second_part.paused_at) == (5, 3)
    assert {name: channel.depth for name, channel in first.channels.items()} == {"a": 4, "b": 0}
    assert {name: channel.floor for name, channel in second_part.channels.items()} == {"a": 1, "b": 3}


def test_a_file_that_cannot_be_moved_is_moved_by_the_next_start():
    world = World(queue_files("t:c", numbered("m", 3)))
    world.disk.fail("rename", path="t:c.diskqueue.000000.dat", error=errno.EACCES)
    with pytest.raises(StorageError, match=r"is taken over, and t:c.diskqueue.000000.dat cannot be moved"):
        world.takeover().run()
    world.disk.heal()
    world.disk.release()
    assert only_bodies(consume(world.take_over(), "t", "c")) == bodies(numbered("m", 3))
    assert "t:c.diskqueue.000000.dat" in names(world, ARCHIVE_NAME)


def test_the_floor_is_not_held_by_what_is_for_others():
    """Or the log would stay as long as a channel without consumers exists."""
    world = World(
        {"nsqd.dat": nsqd_dat({"t": (False, {"a": False, "idle": False})})},
        queue_files("t:a", numbered("a", 500, size=900)),
    )
    broker = world.take_over()
    assert channel_of(broker, "t", "idle").floor == 501
    consume(broker, "t", "a")
    assert broker.topics["t"].first_partition.floor == 501


def test_a_list_that_a_script_changed_is_not_ours():
    world = World()
    broker = world.take_over()
    publish(broker, "t", b"a")
    world.end(broker)
    files = world.disk.attach()
    world.put(files, {"nsqd.dat": world.disk.content("nsqd.dat") + b"\n"})
    assert world.takeover(files).is_due()


# -- crashes -----------------------------------------------------------------------------------------------------------


def big_world() -> tuple[World, dict[str, list[Queued]]]:
    """Ours has a topic with a channel already; NSQ's files bring more for it, and a topic of their own."""
    world = World()
    broker = world.take_over()
    publish(broker, "old", b"ours")
    broker.channel(broker.topics["old"], "a")
    world.end(broker)
    queues = {
        "old": numbered("old", 30),
        "old:a": numbered("old-a", 50, size=3000),
        "old:b": numbered("old-b", 20),
        "new": numbered("new", 10),
        "new:a": numbered("new-a", 40, size=9000),
        "new:b": numbered("new-b", 10, attempts=1),
        "bare": numbered("bare", 10),
    }
    topics = {"old": (False, {"a": False, "b": False}), "new": (False, {"a": False, "b": False}), "bare": (False, {})}
    files = world.disk.attach()
    for name, messages in queues.items():
        world.put(files, queue_files(name, messages, file_bytes_max=50_000))
    world.put(files, {"nsqd.dat": nsqd_dat(topics)})
    world.disk.release()
    return world, queues


def expected_of(queues: dict[str, list[Queued]], topic: str, channel: str) -> list[bytes]:
    ours = [b"ours"] if (topic, channel) == ("old", "a") else []
    return ours + bodies(queues.get(f"{topic}:{channel}", [])) + bodies(queues[topic])


def check(world: World, queues: dict[str, list[Queued]], is_exact: bool) -> None:
    broker = world.take_over()
    for topic, channel in (("old", "a"), ("old", "b"), ("new", "a"), ("new", "b"), ("bare", "first")):
        found, expected = only_bodies(consume(broker, topic, channel)), expected_of(queues, topic, channel)
        if is_exact:
            assert found == expected, (topic, channel)
        else:
            assert not Counter(expected) - Counter(found), (topic, channel, "lost")
            assert set(found) == set(expected), (topic, channel, "not for this channel")
    world.end(broker)
    world.disk.crash(True, random.Random(1))
    assert not [name for name in names(world) if "diskqueue" in name]
    archived = [name for name in names(world, ARCHIVE_NAME) if name.endswith("0.dat")]
    assert len(archived) >= len(queues)
    assert not world.takeover().is_due()


def operations_of_a_takeover() -> tuple[int, int]:
    world, _ = big_world()
    first = world.disk.operation_count + 1
    world.takeover().run()
    return first, world.disk.operation_count


@pytest.mark.slow
@pytest.mark.parametrize("power_loss", [False, True], ids=["kill", "power-loss"])
def test_a_crash_at_every_operation(power_loss: bool):
    """Nothing is lost, and, after a kill, nothing comes twice; a second crash in the second attempt changes nothing."""
    first, last = operations_of_a_takeover()
    assert last - first > 40
    for number in range(first, last + 1):
        world, queues = big_world()
        rng = random.Random(number)
        world.disk.crash_at(number, power_loss, rng)
        with pytest.raises(DiskCrashed):
            world.takeover().run()
        world.disk.crash_at(world.disk.operation_count + rng.randrange(1, 40), power_loss, rng)
        try:
            attempt = world.takeover()
            if attempt.is_due():
                attempt.run()
        except DiskCrashed:
            pass
        world.disk.heal()
        world.disk.release()
        # what a topic without channels got twice could not be told apart; a power loss may do that, a kill not
        check(world, queues, is_exact=not power_loss)


def change_queues(world: World, queues: dict[str, list[Queued]]) -> None:
    """NSQ's nsqd ran: it consumed some and got more."""
    queues["new:a"] = numbered("later", 35, size=8000)
    queues["old:a"] = numbered("old-later", 5)
    queues["bare"] = numbered("bare-later", 8)
    files = world.disk.attach()
    for name in [name for name in names(world) if name.startswith(("new:a.", "old:a.", "bare."))]:
        files.remove(name)
    for name in ("new:a", "old:a", "bare"):
        world.put(files, queue_files(name, queues[name]))
    world.disk.release()


def operation_of(kind: str, path: str) -> int:
    """The first operation of a kind in the takeover of :func:`big_world`."""
    world, _ = big_world()
    found: list[int] = []
    world.disk.observers.append(lambda op: found.append(op.number) if (op.kind, op.path) == (kind, path) else None)
    world.takeover().run()
    return found[0]


@pytest.mark.slow
def test_files_that_changed_after_a_crash_are_taken_as_they_are_now():
    first, last = operations_of_a_takeover()[0], operation_of("make_directory", ARCHIVE_NAME) - 1
    for number in range(first, last + 1, 5):
        world, queues = big_world()
        world.disk.crash_at(number, False, random.Random(number))
        with pytest.raises(DiskCrashed):
            world.takeover().run()
        world.disk.release()
        if world.takeover()._load_journal().moves:
            continue  # it had been committed
        world.disk.release()
        change_queues(world, queues)
        check(world, queues, is_exact=True)


def test_files_that_changed_after_the_commit_are_taken_over_too():
    world, queues = big_world()
    before = dict(queues)
    world.disk.crash_at(operation_of("make_directory", ARCHIVE_NAME), False, random.Random(1))
    with pytest.raises(DiskCrashed):
        world.takeover().run()
    world.disk.release()
    change_queues(world, queues)
    broker = world.take_over()
    for topic, channel in (("old", "a"), ("old", "b"), ("new", "a"), ("new", "b"), ("bare", "first")):
        found = Counter(only_bodies(consume(broker, topic, channel)))
        assert found == Counter(expected_of(before, topic, channel)) | Counter(expected_of(queues, topic, channel))


def test_a_cursor_beyond_a_log_that_lost_its_end():
    """After a power loss: what comes from NSQ's files may not get sequences that count as finished."""
    segment = "topics/t-t/p-0000/00000000000000000001.log"
    lost_count = 0
    for seed in range(6):
        world = World()
        broker = world.take_over()
        publish(broker, "t", b"ours-1")
        sync_logs(broker)
        publish(broker, "t", b"ours-2", b"ours-3", b"ours-4")
        consume(broker, "t", "c")
        flush(broker)
        size = len(world.disk.content(segment))
        world.disk.crash(True, random.Random(seed))
        lost_count += len(world.disk.content(segment)) < size
        world.put(world.disk.attach(), queue_files("t:c", numbered("m", 10)), queue_files("t", numbered("t", 2)))
        world.disk.release()
        broker = world.take_over()
        assert broker.topics["t"].first_partition.log.next_sequence == 4 + 1 + 12
        assert only_bodies(consume(broker, "t", "c")) == bodies(numbered("m", 10)) + bodies(numbered("t", 2))
    assert lost_count, "no power loss cost anything"


def test_files_that_were_taken_away_after_a_crash_leave_no_trace():
    world, _ = big_world()
    world.disk.crash_at(
        operation_of("sync", "topics/t-new/p-0000/00000000000000000001.log") + 10, False, random.Random(1)
    )
    with pytest.raises(DiskCrashed):
        world.takeover().run()
    files = world.disk.attach()
    for name in [name for name in names(world) if "diskqueue" in name]:
        files.remove(name)
    write_files(files, {"nsqd.dat": nsqd_dat({"bare": (False, {})})})
    world.disk.release()
    broker = world.take_over()
    assert sorted(broker.topics) == ["bare", "old"]
    assert only_bodies(consume(broker, "old", "a")) == [b"ours"]
    assert broker.topics["bare"].depth == 0


def test_is_due_reports_an_unreadable_list():
    world = World({"nsqd.dat": bytes(10), metadata_file.DIGESTS_NAME: b"x"})
    files = world.disk.attach()
    files.remove("nsqd.dat")
    files.make_directory("nsqd.dat")
    with pytest.raises(TakeoverFailed, match="cannot be read"):
        world.takeover(files).is_due()


def test_progress_is_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(takeover, "_PROGRESS_NS", 0)
    world = World(queue_files("t:c", numbered("m", 20_000)))
    with caplog.at_level("INFO"):
        world.take_over()
    assert "MiB of 0.7 MiB, 20000 messages" in caplog.text
