"""A data directory that was damaged after a kill: every message that was not finished comes, or its loss is told of."""

import os
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from flintmq.broker.broker import Broker, BrokerOptions
from flintmq.errors import StorageError
from flintmq.settings import Settings
from flintmq.storage import ChannelStore, Corruption, Damage, OsFiles, create_logs
from flintmq.topic_meta import TopicMeta

FAR_NS = 4 * 10**18
DATABASE, WAL, LIST = "channels.db", "channels.db-wal", "channels.list"
SQLITE_PAGE_BYTES = 4096
FLIPS = 24  # of each file and seed


class Node:
    """A broker in a directory, and what it had to say."""

    def __init__(self, path, accept=False):
        self.corruptions: list[Corruption] = []
        self.damages: list[Damage] = []
        self.files = OsFiles(str(path))
        try:
            self.store = ChannelStore(self.files, 7, accept)
            try:
                options = BrokerOptions(segment_bytes=4096)
                self.broker = Broker(self.files, self.store, options, random.Random(1), self.corruptions.append)
                self.broker.on_damage = self.damages.append
                self.broker.open(1)
            except BaseException:
                self.store.close()
                raise
        except BaseException:
            self.files.close()
            raise

    def flush(self, sync=False, now_ns=1):
        flush = self.broker.take_flush(now_ns)
        self.broker.flush_ended(flush, self.broker.run_flush(flush, now_ns, sync), None, now_ns)

    def close(self):
        self.broker.close()
        self.files.close()

    def create(self, name, meta=None):
        if meta is None:
            topic = self.broker.topic(name, 1)
        else:
            topic = self.broker.create_partitions(name, meta, range(meta.partition_num), 1)
            self.flush()
            while created := self.broker.take_creations():
                create_logs([creation for new in created for creation in new.creations], True)
                self.broker.creations_ended(created)
        return topic

    def publish(self, topic, count, due_ns=0):
        for partition in topic.partitions.values():
            for _ in range(count // 10):
                self.broker.publish_to(partition, [b"x" * 20] * 10, due_ns)
                self.broker.commit_groups(self.broker.write_pending(1))

    def sync(self):
        for log in self.broker.logs():
            ticket = log.begin_sync()
            if ticket is not None:
                ticket.run()
                log.finish_sync(ticket, None)
        self.broker.note_synced()

    def unfinished(self):
        """Topic, partition, channel -> sequences that are still to be delivered, or can be."""
        found = {}
        for topic in self.broker.topics.values():
            for partition in topic.partitions.values():
                for name, channel in partition.channels.items():
                    found[topic.name, partition.number, name] = self._unfinished(channel)
        return found

    def _unfinished(self, channel):
        self.flush()
        identity, partition = self.broker._channels.cursor(channel), self.broker._channels.partition(channel)
        state = channel.state()
        sequences = {state.floor + at for at, is_done in enumerate(state.window) if not is_done}
        sequences |= set(range(channel.next, channel.log.committed_sequence))
        for first, end in state.holes:
            sequences -= set(range(first, end))
        due = self.store.due(identity, (-1, -1), 1 << 62, 1 << 40)
        sequences |= {s for pack in due.packs for piece in pack.pieces for s, _ in piece.messages()}
        return {s for s in sequences if s < partition.log.next_sequence}

    def told(self):
        return "\n".join(map(str, [*self.damages, *self.corruptions]))


def build(path):
    """Six topics of every kind, some of each consumed; left as a kill leaves them."""
    node = Node(path)
    broker = node.broker
    topics = {
        "plain": node.create("plain"),
        "two": node.create("two"),
        "deferred": node.create("deferred"),
        "limited": node.create("limited"),
        "parts": node.create("parts", TopicMeta(partition_num=3)),
        "ordered": node.create("ordered", TopicMeta(partition_num=2, ordered=True)),
    }
    for name, channels in CHANNELS.items():
        for channel in channels:
            broker.channel(topics[name], channel)
    broker.change_settings(topics["limited"], "l", Settings(max_attempts=9, max_messages=10_000))
    broker.pause_channel(topics["parts"], "p", True, 1)
    node.flush()
    for _ in range(4):
        for name, topic in topics.items():
            if name != "deferred":
                node.publish(topic, 50)
        node.flush()
    node.publish(topics["deferred"], 60, FAR_NS)
    for channel in topics["deferred"].channels("d"):
        channel.window.queue_new(61)
        for sequence in range(1, 61):
            channel.window._spill_until(sequence, FAR_NS)
        broker.was_changed(channel)
    for channel, sequence in ((topics["plain"].channels("c")[0], 120), (topics["two"].channels("a")[0], 33)):
        channel.confirm(sequence)
        broker.was_changed(channel)
    for channel in topics["ordered"].channels("o"):
        channel.confirm(40)
        broker.was_changed(channel)
        channel.keep_floor(40)
    broker.pause_topic(topics["limited"], True)
    node.sync()
    node.flush(sync=True)
    return node


CHANNELS = {"plain": "c", "two": "ab", "deferred": "d", "limited": "l", "parts": "p", "ordered": "o"}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """What a kill left: the newest in the write-ahead log."""
    base = tmp_path_factory.mktemp("damage")
    (base / "live").mkdir()
    node = build(base / "live")
    expected = node.unfinished()
    shutil.copytree(base / "live", base / "killed")
    node.close()
    shutil.copytree(base / "live", base / "stopped")
    return base, expected


@pytest.fixture
def damaged(killed, tmp_path):
    """Copies of the directory, to be damaged."""
    base, expected = killed
    made: list[Path] = []

    def copy(state="killed"):
        path = tmp_path / f"copy{len(made)}"
        shutil.copytree(base / state, path)
        made.append(path)
        return path

    return copy, expected


def flip(path, position, bit):
    with open(path, "r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))


def check(path, expected, must_tell=False):
    """Start on it: nothing is gone without a word, or it is refused with all that helps; what was told."""
    try:
        node = Node(path)
    except StorageError as error:
        text = str(error)
        assert "channels" in text and ("copy" in text or "move" in text or "start" in text), text
        return f"refused: {text}"
    try:
        node.flush(now_ns=FAR_NS)  # reads what was set aside
        found = node.unfinished()
        told = node.told()
        for key, sequences in expected.items():
            assert key in found, f"the channel {key} is gone: {told}"
            missing = sequences - found[key]
            told_of = sum(damage.lost for damage in node.damages)
            told_of += sum(each.end_sequence_lost - each.first_sequence_lost for each in node.corruptions)
            is_open = any(damage.is_more_possible for damage in node.damages)
            assert not missing or is_open or told_of >= len(missing), f"{key}: {sorted(missing)} are gone: {told}"
        assert not must_tell or told
        assert node.broker.topics["ordered"].meta.ordered, told
        assert node.broker.own_settings("limited", "l").max_attempts == 9, told
        assert [c.paused for c in node.broker.topics["parts"].channels("p")] == [False, True, False], told
        node.flush()
    finally:
        node.close()
    again = Node(path)
    try:
        assert not again.damages, f"it is whole after the first start: {again.told()}"
        assert again.unfinished().keys() == expected.keys()
    finally:
        again.close()
    return told


@pytest.mark.parametrize("state", ["killed", "stopped"])
def test_without_damage_nothing_is_told(damaged, state):
    copy, expected = damaged
    assert check(copy(state), expected) == ""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("state", "name"), [("killed", WAL), ("stopped", DATABASE), ("killed", LIST)])
def test_a_flipped_bit(damaged, state, name, seed):
    copy, expected = damaged
    random_source = random.Random(f"{seed} {name}")
    for _ in range(FLIPS):
        path = copy(state)
        position, bit = random_source.randrange(os.path.getsize(path / name)), random_source.randrange(8)
        flip(path / name, position, bit)
        try:
            check(path, expected)
        except Exception as error:
            raise AssertionError(f"{name} byte {position} bit {bit}: {error}") from error
        shutil.rmtree(path)


@pytest.mark.slow
@pytest.mark.parametrize(("state", "name"), [("killed", WAL), ("stopped", DATABASE), ("killed", LIST)])
def test_a_file_that_was_cut(damaged, state, name):
    copy, expected = damaged
    random_source = random.Random(name)
    sizes = [0, 1, 31, 4096]
    for size in [*sizes, *(None for _ in range(8))]:
        path = copy(state)
        whole = os.path.getsize(path / name)
        cut_to = random_source.randrange(whole) if size is None else min(size, whole - 1)
        if name == DATABASE:  # the last page is of an index without rows: a part of it may be cut that has nothing
            cut_to = min(cut_to, whole - SQLITE_PAGE_BYTES)
        os.truncate(path / name, cut_to)
        try:
            check(path, expected, must_tell=True)
        except Exception as error:
            raise AssertionError(f"{name} cut to {cut_to} of {whole}: {error}") from error
        shutil.rmtree(path)


@pytest.mark.parametrize(
    ("state", "names"),
    [
        ("killed", [WAL]),
        ("killed", [DATABASE]),
        ("killed", [DATABASE, WAL, f"{DATABASE}-shm"]),
        ("killed", [LIST]),
        ("stopped", [DATABASE]),
        ("stopped", [LIST]),
    ],
)
def test_files_that_are_gone(damaged, state, names):
    copy, expected = damaged
    path = copy(state)
    for name in names:
        (path / name).unlink()
    told = check(path, expected, must_tell=True)
    assert not told.startswith("refused")


def test_with_both_lists_gone_it_is_refused_and_can_be_insisted_on(damaged):
    copy, _ = damaged
    path = copy("stopped")
    (path / DATABASE).unlink()
    (path / LIST).unlink()
    with pytest.raises(StorageError, match=r"cannot tell which channels there were: .* --accept-lost-channels"):
        Node(path)
    node = Node(path, accept=True)
    assert sorted(node.broker.topics) == sorted(CHANNELS)
    assert not node.unfinished()
    assert "channels.db: it is missing, and so is channels.list; it is made anew without channels;" in node.told()
    assert not [*path.glob("*.bad")]
    node.close()
    Node(path).close()


def test_with_both_lists_damaged_it_is_refused_and_can_be_insisted_on(damaged):
    copy, expected = damaged
    path = copy("stopped")
    with sqlite3.connect(path / DATABASE) as database:
        database.execute("UPDATE channel SET name = 'z' WHERE topic = 'plain'")
    database.close()
    flip(path / LIST, os.path.getsize(path / LIST) - 5, 3)
    with pytest.raises(StorageError, match=r"1 of table channel; and channels\.list is damaged at byte"):
        Node(path)
    node = Node(path, accept=True)
    assert node.unfinished().keys() >= {key for key in expected if key[0] != "plain"}
    assert node.damages
    node.close()


def test_an_older_copy_of_the_database_is_recognised(damaged):
    copy, expected = damaged
    path = copy("stopped")
    old = (path / DATABASE).read_bytes()
    node = Node(path)
    topic = node.create("new")
    node.broker.channel(topic, "n")
    node.broker.delete_channel(node.broker.topics["two"], "b")
    node.publish(topic, 10)
    node.flush(sync=True)
    node.close()
    (path / DATABASE).write_bytes(old)
    again = Node(path)
    assert "older state of itself" in again.told()
    found = again.unfinished()
    assert len(found["new", 0, "n"]) == 10
    assert ("two", 0, "b") not in found, "what was deleted stays so"
    assert len(found["plain", 0, "c"]) >= len(expected["plain", 0, "c"])
    again.close()


def test_files_of_two_directories_are_told_apart(damaged, tmp_path):
    copy, _ = damaged
    path = copy("stopped")
    (tmp_path / "other").mkdir()
    ChannelStore(OsFiles(str(tmp_path / "other")), 8).close()
    shutil.copy(tmp_path / "other" / DATABASE, path / DATABASE)
    with pytest.raises(StorageError, match="two different data directories"):
        Node(path)


@pytest.mark.parametrize("table", ["topic", "topic_meta", "channel", "settings", "cursor", "log", "partition"])
def test_rows_that_went_come_back_or_are_told_of(damaged, table):
    """Also of an ordered topic, which would be a plain one without them, and not be consumed."""
    copy, expected = damaged
    for change in (f"DELETE FROM {table}", f"UPDATE {table} SET crc = crc + 1"):
        path = copy("stopped")
        with sqlite3.connect(path / DATABASE) as database:
            database.execute(change)
        database.close()
        if table in ("log", "partition") and change.startswith("DELETE"):
            check(path, expected)  # nothing depends on these, but what can be told of a log
        else:
            assert check(path, expected, must_tell=True)


@pytest.mark.parametrize("change", ["DELETE FROM aside_pack", "UPDATE aside_pack SET due_ns = due_ns + 1"])
def test_messages_set_aside_whose_rows_went_come_again_from_the_log(damaged, change):
    copy, expected = damaged
    path = copy("stopped")
    with sqlite3.connect(path / DATABASE) as database:
        database.execute("DROP TRIGGER aside_pack_gone")
        database.execute(change)
    database.close()
    assert "60 messages that were set aside are missing" in check(path, expected, must_tell=True)


def test_messages_set_aside_that_cannot_be_read_are_taken_from_the_log(damaged):
    copy, expected = damaged
    for position in (-3, 20):  # in a frame, and in what tells which messages they are
        path = copy("stopped")
        with sqlite3.connect(path / DATABASE) as database:
            for number, data in database.execute("SELECT id, data FROM aside_data").fetchall():
                broken = bytearray(data)
                broken[position] ^= 4
                database.execute("UPDATE aside_data SET data = ? WHERE id = ?", (bytes(broken), number))
        database.close()
        node = Node(path)
        try:
            assert not node.damages
            (channel,) = node.broker.topics["deferred"].channels("d")
            node.flush(now_ns=FAR_NS)
            (damage,) = node.damages
            assert "60 messages that were set aside cannot be read" in str(damage)
            assert damage.lost == 0
            assert node.unfinished()["deferred", 0, "d"] == expected["deferred", 0, "d"]
            assert channel.name == damage.channel
        finally:
            node.close()


def test_the_end_of_a_log_that_is_missing_is_told_of(damaged):
    copy, expected = damaged
    for change in ("cut", "emptied", "deleted", "in a batch"):
        path = copy("killed")
        directory = path / "topics" / "t-plain" / "p-0000"
        last = sorted(directory.glob("*.log"))[-1]
        size = last.stat().st_size
        if change == "deleted":
            last.unlink()
        else:
            os.truncate(last, {"cut": 64, "emptied": 0, "in a batch": size - 7}[change])
        node = Node(path)
        try:
            lost = [each for each in node.corruptions if each.end_sequence_lost > each.first_sequence_lost]
            (gap,) = lost
            end = max(expected["plain", 0, "c"]) + 1
            assert gap.end_sequence_lost == end, change
            assert gap.synced_before == end, "these were promised"
            topic = node.broker.topics["plain"]
            node.publish(topic, 10)
            assert topic.first_partition.log.next_sequence == end + 10, "sequences are not used again"
        finally:
            node.close()


def test_a_deleted_segment_that_channels_were_to_read_is_told_of(damaged):
    copy, _ = damaged
    path = copy("stopped")
    for file in (path / "topics" / "t-two" / "p-0000").glob("0*"):
        if int(file.name.partition(".")[0]) < 100:
            file.unlink()
    node = Node(path)
    try:
        told = {damage.channel: damage.lost for damage in node.damages}
        start = node.broker.topics["two"].first_partition.log.start_sequence
        assert start > 1
        assert told == {"a": start - 33, "b": start - 1} or node.corruptions
    finally:
        node.close()


def test_a_topic_whose_deletion_was_cut_short_is_gone(damaged):
    copy, expected = damaged
    path = copy("stopped")
    (path / "topics" / "t-plain").rename(path / "topics" / "deleted-3-t-plain")
    node = Node(path)
    assert "plain" not in node.broker.topics
    assert not node.told()
    node.flush()
    assert not (path / "topics" / "deleted-3-t-plain").exists()
    node.close()
    again = Node(path)
    assert "plain" not in again.broker.topics
    assert again.unfinished().keys() == {key for key in expected if key[0] != "plain"}
    again.close()


def test_what_was_never_synced_and_went_with_the_power_is_no_damage_at_any_later_start(damaged, monkeypatch):
    """Its gap stays in front of the log, and where the first channel begins may not have been written since."""
    copy, _ = damaged
    path = copy("killed")
    node = Node(path)
    node.publish(node.create("unsynced"), 50)
    node.flush()
    node.close()
    (segment,) = (path / "topics" / "t-unsynced" / "p-0000").glob("*.log")
    os.truncate(segment, 64)
    monkeypatch.setattr(OsFiles, "boot_id", lambda self: "after the power loss")
    for start in range(3):
        node = Node(path)
        assert not [damage for damage in node.damages if damage.topic == "unsynced"], f"start {start}: {node.told()}"
        gaps = [each for each in node.corruptions if "t-unsynced" in each.path]
        assert len(gaps) == (start == 0), "the log tells of it once"
        assert all(gap.first_sequence_lost >= gap.synced_before for gap in gaps), "nobody was promised these"
        assert node.broker.topics["unsynced"].first_partition.log.next_sequence == 51
        node.close()
