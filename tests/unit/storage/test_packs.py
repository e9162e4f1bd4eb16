"""Packs of messages set aside: what is grouped, stored, read back and found, in a real database in memory."""

import sqlite3
from itertools import count, islice, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.old_database import make_older

from flintmq.errors import StorageError
from flintmq.settings import Settings
from flintmq.storage import ChannelStore, OsFiles, channel_store, old_schema, packs
from flintmq.storage.files import SqliteDatabase
from flintmq.storage.packs import NewPack, Piece, clear_packs, delete_packs, encode_pack, group, put_done, put_packs
from flintmq.storage.tables import META as META_TABLE
from flintmq.storage.tables import SETTINGS, TABLES, TOPIC
from flintmq.testing import MemoryDisk
from flintmq.topic_meta import TopicMeta

SECOND = 1_000_000_000
META = TopicMeta(partition_num=4)


@pytest.fixture
def store():
    store = ChannelStore(MemoryDisk().attach())
    yield store
    store.close()


def query_of(store):
    return store._database.query


def piece(due_ns, first, sizes, attempts=0):
    """Messages whose frames tell their sequence."""
    frames = [(b"%d." % (first + index)).ljust(size, b"x")[:size] for index, size in enumerate(sizes)]
    uniform = len(set(sizes)) == 1
    return Piece(due_ns, first, len(sizes), attempts, sizes[0] if uniform else list(sizes), b"".join(frames))


def messages(pieces):
    return [(each.due_ns, s, each.attempts, frame) for each in pieces for s, frame in each.messages()]


pieces_of = st.lists(
    st.tuples(
        st.integers(0, 100_000 * SECOND),
        st.lists(st.integers(5, 40), min_size=1, max_size=6),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=20,
)


def build(drawn):
    built, first = [], 1
    for due_ns, sizes, attempts in drawn:
        built.append(piece(due_ns, first, sizes, attempts))
        first += len(sizes) + attempts
    return built


@given(pieces_of, st.integers(0, 100_000 * SECOND), st.integers(60, 400))
def test_groups_hold_every_message_once_and_are_no_larger_than_they_may_be(drawn, now_ns, pack_bytes):
    built = build(drawn)
    before = sorted(messages(built))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packs, "PACK_BYTES", pack_bytes)
        patch.setattr(packs, "SMALL_BYTES", 30)
        groups = list(group(built, now_ns))
    assert sorted(message for each in groups for message in messages(each)) == before
    assert messages([p for each in groups for p in each]) == sorted(before, key=lambda m: m[:2])
    for each in groups:
        assert sum(p.size for p in each) <= pack_bytes


@given(st.integers(1, 1000), st.integers(1, 100_000))
def test_what_is_due_much_later_is_in_another_group(near_s, later_s):
    pair = [piece(near_s * SECOND, 1, [9000]), piece((near_s + later_s) * SECOND, 2, [9000])]
    together = len(list(group(pair, 0))) == 1
    if near_s + later_s <= 16:
        assert together
    elif near_s >= 16 and later_s >= near_s / 2:
        assert not together
    if together and near_s > 16:
        assert later_s <= near_s


def test_a_large_piece_is_cut():
    (whole,) = [piece(5, 1, [1000] * 400)]
    parts = [p for each in group([whole], 0) for p in each]
    assert [p.count for p in parts] == [131, 131, 131, 7]
    assert messages(parts) == messages([whole])
    assert (whole.first, whole.count) == (1, 400), "it is as before: whoever has it too may go on"


@given(st.lists(st.integers(5, 40), min_size=1, max_size=9), st.sets(st.integers(0, 12)))
def test_a_piece_without_some_of_its_messages(sizes, gone):
    whole = piece(7, 3, sizes, 2)
    left = whole.without(gone)
    assert messages(left) == [message for message in messages([whole]) if message[1] not in gone]
    for each in left:
        each.own()
        assert len(each.data) == each.size == sum(len(each.frame(s)) for s in range(each.first, each.end))


@pytest.mark.slow
@given(pieces_of, st.data())
def test_packs_come_back_as_they_were_but_for_what_is_done_or_forgotten(drawn, data):
    built = sorted(build(drawn), key=lambda p: p.due_ns)
    store = ChannelStore(MemoryDisk().attach())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packs, "PACK_BYTES", 100)
        patch.setattr(packs, "SMALL_BYTES", data.draw(st.sampled_from([1, 130, 10_000])))
        new = [NewPack(number, pieces) for number, pieces in enumerate(group(built, 0), 1)]
        everything = {m[1]: (each.number, m) for each in new for m in messages(each.pieces)}
        done = data.draw(st.sets(st.sampled_from(sorted(everything))))
        by_pack: dict[int, list[int]] = {}
        for sequence in done:
            by_pack.setdefault(everything[sequence][0], []).append(sequence)
        store.run_transaction(
            [*put_packs(1, new, 0), *put_packs(2, [NewPack(900, built[:1])], 0), put_done(by_pack)], False
        )
        if by_pack:  # once more, as after a flush that failed behind its commit
            store.run_transaction([*put_packs(1, new, 0), put_done(by_pack)], False)
        cut = data.draw(st.integers(1, max(everything) + 1))
        store.run_transaction(clear_packs(1, cut), False)
        left = sorted(m for s, (_, m) in everything.items() if s not in done and s < cut)
        found, after, bytes_max = [], (-1, -1), data.draw(st.sampled_from([1, 500, 1 << 20]))
        while True:
            read = store.due(1, after, 100_000 * SECOND, bytes_max)
            if not read.packs:
                break
            assert all(
                a.pieces[0].due_ns <= b.pieces[0].due_ns for a, b in pairwise(read.packs) if a.pieces and b.pieces
            )
            found += [m for each in read.packs for m in messages(each.pieces)]
            after = read.through
        assert read.next_due_ns is None
        assert sorted(found) == left
        assert store.spilled_count(1) == len(left)
        assert store.spilled_count(2) == built[0].count
        wall_ns, count = data.draw(st.integers(0, 100_000 * SECOND)), data.draw(st.integers(1, 30))
        ahead = [m for m in left if m[0] > wall_ns][:count]
        looked = store.spilled_after(1, wall_ns, count, 7)
        assert looked == [(s, due_ns, attempts, frame[:7], len(frame)) for due_ns, s, attempts, frame in ahead]
        for sequence in range(max(everything) + 2):
            expected = everything[sequence][0] if any(m[1] == sequence for m in left) else None
            assert store.find_spilled(1, sequence) == expected
    store.close()


def test_only_what_is_due_until_then_is_read(store):
    new = [NewPack(n, [piece(n * SECOND, n, [20]), piece(n * SECOND + 5, 100 + n, [20])]) for n in range(1, 6)]
    store.run_transaction(put_packs(1, new, 0), False)
    read = store.due(1, (-1, -1), 2 * SECOND, 1 << 20)
    assert ([each.number for each in read.packs], read.through, read.next_due_ns) == (
        [1, 2],
        (2 * SECOND, 2),
        3 * SECOND,
    )
    read = store.due(1, read.through, 2 * SECOND, 1 << 20)
    assert (read.packs, read.next_due_ns) == ([], 3 * SECOND)
    read.shift(SECOND)
    assert (read.through, read.next_due_ns) == ((3 * SECOND, 2), 4 * SECOND)


def test_a_pack_that_is_removed_leaves_nothing(store):
    new = [NewPack(n, [piece(n, n, [20, 20])]) for n in range(1, 4)]
    store.run_transaction([*put_packs(1, new, 0), put_done({1: [1], 3: [3]})], False)
    store.run_transaction([delete_packs([1, 2])], False)
    query = query_of(store)
    assert query("SELECT id FROM aside_pack") == query("SELECT id FROM aside_data") == [(3,)]
    assert query("SELECT pack FROM aside_done") == [(3,)]
    assert store.spilled_count(1) == 1


def test_due_times_are_moved_with_the_clock(store):
    store.run_transaction(put_packs(1, [NewPack(1, [piece(0, 1, [9]), piece(7 * SECOND, 2, [9])])], 3 * SECOND), False)
    store.run_transaction([packs.shift_packs(-2 * SECOND)], False)
    ((first, second),) = [each.pieces for each in store.due(1, (-1, -1), 10 * SECOND, 1).packs]
    assert (first.due_ns, second.due_ns) == (SECOND, 8 * SECOND)
    assert [row[:2] for row in store.spilled_after(1, 7 * SECOND, 9, 9)] == [(2, 8 * SECOND)]


def test_one_message_is_found_among_many_packs_and_in_one_with_a_long_head(store):
    scattered = [piece(n, 2 * n, [n % 30 + 5]) for n in range(1, 6000)]
    assert len(encode_pack(NewPack(1, scattered))) > packs._LOOK_BYTES
    many = [NewPack(n, [piece(5, 1, [9]), piece(5, 20_000 + n, [9])]) for n in range(2, 200)]
    store.run_transaction(put_packs(1, [NewPack(1, scattered), *many], 0), False)
    assert store.find_spilled(1, 11_998) == 1
    assert store.find_spilled(1, 20_199) == 199
    assert store.find_spilled(1, 11_997) is None
    assert store.find_spilled(2, 20_199) is None


_OLD_SCHEMA = (
    "CREATE TABLE aside(cursor INTEGER, sequence INTEGER, due_ns INTEGER NOT NULL, attempts INTEGER NOT NULL,"
    " frame BLOB NOT NULL, PRIMARY KEY(cursor, sequence)) WITHOUT ROWID",
    "CREATE TABLE cursor(id INTEGER PRIMARY KEY, topic TEXT NOT NULL, partition INTEGER NOT NULL,"
    " channel TEXT NOT NULL, state BLOB NOT NULL)",
    "CREATE TABLE channel(topic TEXT, name TEXT, paused INTEGER NOT NULL, PRIMARY KEY(topic, name)) WITHOUT ROWID",
)
_OLD_PUTS = (
    "INSERT INTO aside(cursor, sequence, due_ns, attempts, frame) VALUES(?, ?, ?, ?, ?)",
    "INSERT INTO cursor(id, topic, partition, channel, state) VALUES(?, 't', 0, ?, ?)",
    "INSERT INTO channel(topic, name, paused) VALUES('t', ?, 0)",
)


def write_rows(database, rows):
    """What a release before packs had of two channels."""
    cursors = [(number, f"c{number}", b"\x95\x01\xc4\x00\x90\x90\x90") for number in (1, 2)]
    names = [(name,) for _, name, _ in cursors]
    statements = [*((sql, ((),)) for sql in _OLD_SCHEMA), *zip(_OLD_PUTS, (rows, cursors, names), strict=True)]
    database.run_transaction([*statements, ("PRAGMA user_version = 2", ((),))], True)


def test_rows_of_an_older_release_become_packs(tmp_path):
    path = str(tmp_path / "channels.db")
    database = SqliteDatabase(path)
    rows = [(n % 2 + 1, n, (n * 7919 % 5000) * SECOND, n % 3, b"frame %d" % n) for n in range(1, 5001)]
    write_rows(database, rows)
    database.close()
    store = ChannelStore(OsFiles(str(tmp_path)))
    assert query_of(store)("PRAGMA user_version") == [(4,)]
    assert not query_of(store)("SELECT 1 FROM sqlite_master WHERE name = 'aside'")
    for cursor in (1, 2):
        read = store.due(cursor, (-1, -1), 10_000 * SECOND, 1 << 30)
        found = {s: (cursor, s, due, att, f) for each in read.packs for due, s, att, f in messages(each.pieces)}
        assert sorted(found.values()) == sorted(row for row in rows if row[0] == cursor)
        assert store.spilled_count(cursor) == 2500
        assert len(read.packs) < 100
    assert [cursor.spilled_count for cursor in store.load().cursors] == [2500, 2500]
    store.close()


def test_a_change_of_the_schema_that_fails_leaves_everything_as_it_was(monkeypatch):
    database = SqliteDatabase(":memory:")
    write_rows(database, [(n % 2 + 1, n, n // 4, 0, b"frame %d" % n) for n in range(1, 41)])
    monkeypatch.setattr("flintmq.storage.old_schema._ROWS", 6)
    taken: list[Any] = []

    def failing(after):
        """So many statements, and one that fails."""
        taken.clear()
        for statement in islice(old_schema.migration(database), after):
            taken.append(statement)
            yield statement
        yield "INSERT INTO no_such_table VALUES(1)", ((),)

    for fails_after in count():
        with pytest.raises(StorageError):
            database.run_transaction(failing(fails_after), False)
        assert database.query("SELECT COUNT(*) FROM aside") == [(40,)]
        assert database.query("PRAGMA user_version") == [(2,)]
        if len(taken) < fails_after:
            break
    assert len(taken) > 25
    database.run_transaction(old_schema.migration(database), True)
    for cursor in (1, 2):
        found = packs.packed_after(database.query, cursor, -1, 100)
        assert [(s, p.frame(s)) for s, p in found] == [(n, b"frame %d" % n) for n in range(3 - cursor, 41, 2)]


def test_a_database_of_version_3_keeps_what_it_has(tmp_path):
    files = OsFiles(str(tmp_path))
    store = ChannelStore(files)
    put = channel_store.put_channel
    row = channel_store.CursorRow(7, deferred=[(8, 9)])
    pack = NewPack(3, [piece(50 * SECOND, 1, [10, 20, 30]), piece(60 * SECOND, 9, [5] * 4, 2)])
    ephemeral = NewPack(4, [piece(50 * SECOND, 1, [10])])
    store.run_transaction(
        [
            channel_store.put_topic("t", True),
            put("t", 0, "c", channel_store.StoredChannel(1, False, True)),
            channel_store.put_topic("p", False),
            channel_store.put_topic_meta("p", META, [0, 2]),
            channel_store.put_partition("p", 2, 5, 6),
            *(put("p", number, "d", channel_store.StoredChannel(number + 2, True)) for number in (0, 2)),
            channel_store.put_cursor(1, "t", 0, "c", row, b"\0\1", 7),
            channel_store.put_cursor(4, "p", 2, "d", channel_store.CursorRow(1), b"", 0),
            *put_packs(1, [pack], 0),
            *put_packs(9, [ephemeral], 0),
            put_done({3: [2]}),
            *channel_store.put_settings("t", "c", Settings(max_attempts=3)),
        ],
        False,
    )
    before = messages(store.due(1, (-1, -1), 100 * SECOND, 1 << 30).packs[0].pieces)
    store.close()
    files.close()
    make_older(tmp_path, 3)
    again = ChannelStore(OsFiles(str(tmp_path)))
    stored = again.load()
    assert stored.topics == {"t": True, "p": False}
    assert stored.metas == {"p": (META, [0, 2])}
    assert stored.partitions == {("p", 2): (5, 6)}
    assert stored.channels == {
        ("t", 0, "c"): channel_store.StoredChannel(1, False, True),
        ("p", 0, "d"): channel_store.StoredChannel(0, True),
        ("p", 2, "d"): channel_store.StoredChannel(4, True),
    }
    assert stored.settings == {("t", "c"): Settings(max_attempts=3)}
    assert [(c.id, c.row.floor, c.window, c.spilled_count) for c in stored.cursors] == [
        (1, 7, b"\0\1", 6),
        (4, 1, b"", 0),
    ]
    assert messages(again.due(1, (-1, -1), 100 * SECOND, 1 << 30).packs[0].pieces) == before
    assert query_of(again)("SELECT id FROM aside_data") == [(3,)], "what ephemeral channels had is gone"
    for table in (*TABLES, packs.PACKS, packs.DONE):
        assert table.read(query_of(again))[1] == 0
    again.close()


def test_a_damaged_pack_is_told_from_one_that_is_whole(store):
    pieces = [piece(50 * SECOND, 1, [10, 20, 30]), piece(51 * SECOND, 9, [5] * 4, 2)]
    store.run_transaction(put_packs(1, [NewPack(n, pieces) for n in (3, 4, 5, 6, 7)], 0), False)
    store.run_transaction([put_done({4: [2, 9]})], False)
    ((data,),) = query_of(store)("SELECT data FROM aside_data WHERE id = 4")
    for number, position in ((4, len(data) - 1), (5, 20)):  # in a frame, and in the heads
        damaged = bytearray(query_of(store)("SELECT data FROM aside_data WHERE id = ?", (number,))[0][0])
        damaged[position] ^= 1
        store.run_transaction([(packs.PUT_DATA, ((number, bytes(damaged)),))], False)
    store.run_transaction([("DELETE FROM aside_data WHERE id = 6", ((),))], False)
    read = store.due(1, (-1, -1), 100 * SECOND, 1 << 30)
    assert [each.number for each in read.packs] == [3, 7]
    told = {each.number: [(p.due_ns, p.first, p.count, p.attempts) for p in each.pieces] for each in read.damaged}
    assert told == {4: [(50 * SECOND, 1, 1, 0), (50 * SECOND, 3, 1, 0), (51 * SECOND, 10, 3, 2)], 5: [], 6: []}


def test_rows_that_are_changed_where_they_are_stay_whole(store):
    store.run_transaction(put_packs(1, [NewPack(3, [piece(50 * SECOND, 1, [10, 20, 30])])], 0), False)
    store.run_transaction([packs.shift_packs(5), *clear_packs(1, 2)], False)
    rows, damaged = packs.PACKS.read(query_of(store))
    assert not damaged
    assert [row[:7] for row in rows] == [(3, 1, 50 * SECOND + 5, 50 * SECOND + 5, 1, 3, 2)]


@pytest.mark.parametrize(
    "change", ["name = 'u'", "paused = 1", "paused = NULL", "name = CAST(x'ff' AS TEXT)", "crc = crc + 1"]
)
def test_a_row_that_was_changed_is_noticed(store, change):
    store.run_transaction([("DROP TABLE topic", ((),)), (TOPIC.create.replace(" NOT NULL", ""), ((),))], False)
    store.run_transaction([channel_store.put_topic("t", False), channel_store.put_topic("whole", False)], False)
    store.run_transaction([(f"UPDATE topic SET {change} WHERE name = 't'", ((),))], False)
    assert TOPIC.read(query_of(store)) == ([("whole", 0)], 1)


def test_a_row_of_another_table_is_not_whole(store):
    whole = channel_store.put_settings("t", "c", Settings(max_attempts=3))[0][1][0]
    assert SETTINGS.is_whole(whole)
    assert not META_TABLE.is_whole(whole)


def test_from_where_on_a_topic_has_headers(tmp_path):
    """Beside its meta, which a release that does not know it reads as ever; what is older says nothing."""
    files = OsFiles(str(tmp_path))
    store = ChannelStore(files)
    headed = TopicMeta(partition_num=3, extend_support=True, version=2)
    rows = [
        channel_store.put_topic_meta("old", META, [0]),
        channel_store.put_topic_meta("t", headed, [0, 2], {0: 7, 2: 1}),
        channel_store.put_topic_meta("plain", TopicMeta(extend_support=True), [0], {0: 9}),
    ]
    store.run_transaction(rows, False)
    store.close()
    stored = ChannelStore(files).load()
    assert stored.metas == {"old": (META, [0]), "t": (headed, [0, 2]), "plain": (TopicMeta(extend_support=True), [0])}
    assert stored.headers_from == {("t", 0): 7, ("t", 2): 1, ("plain", 0): 9}


def aside_of(store, cursor):
    """Put twenty packs, and say of the channel's progress that they are there."""
    new = [NewPack(20 * cursor + n, [piece(n, 1 + n, [20])]) for n in range(20)]
    channel = channel_store.StoredChannel(cursor)
    progress = channel_store.put_cursor(cursor, "t", 0, f"c{cursor}", channel_store.CursorRow(30), b"", 20)
    store.run_transaction(
        [channel_store.put_channel("t", 0, f"c{cursor}", channel), progress, *put_packs(cursor, new, 0)], True
    )


@pytest.mark.parametrize("failing", [1, 2, 4])
@pytest.mark.parametrize("forget", [lambda: clear_packs(1, 0), lambda: channel_store.delete_cursor(1)])
def test_much_is_forgotten_a_little_at_a_time_and_an_end_in_between_is_no_damage(monkeypatch, forget, failing):
    monkeypatch.setattr(packs, "CLEARED_BYTES", 150)
    disk = MemoryDisk()
    store = ChannelStore(disk.attach())
    store.run_transaction([channel_store.put_topic("t", False)], True)
    for cursor in (1, 2):
        aside_of(store, cursor)
    disk.fail("commit", nth=failing)
    with pytest.raises(StorageError):
        store.run_transaction(forget(), True)
    disk.release()
    store = ChannelStore(disk.attach())
    stored = store.load()
    left, other = (next(each for each in stored.cursors if each.id == cursor) for cursor in (1, 2))
    assert (left.spilled_count, left.is_lost) == (store.spilled_count(1), False)
    assert left.spilled_count == 20 if failing == 1 else 0 < left.spilled_count < 20
    assert left.spilled_missing == other.spilled_missing == 0 and other.spilled_count == 20
    assert store.take_damages() == []

    store.run_transaction(forget(), True)
    assert (store.spilled_count(1), store.spilled_count(2)) == (0, 20)
    store.close()


def test_of_many_channels_that_go_at_once_the_packs_go_before(monkeypatch, store):
    monkeypatch.setattr(packs, "CLEARED_BYTES", 2500)
    for cursor in range(1, 9):
        aside_of(store, cursor)
    sizes = []
    run = store._database.run_transaction

    def noting(statements, sync):
        before = query_of(store)("SELECT COUNT(*) FROM aside_pack")[0][0]
        run(statements, sync)
        sizes.append(before - query_of(store)("SELECT COUNT(*) FROM aside_pack")[0][0])

    store._database.run_transaction = noting
    store.run_transaction([each for cursor in range(1, 9) for each in channel_store.delete_cursor(cursor)], False)
    assert sum(sizes) == 160 and max(sizes) < 100


def test_some_of_what_is_set_aside_is_forgotten_from_a_sequence_on_a_little_at_a_time(monkeypatch, store):
    monkeypatch.setattr(packs, "CLEARED_BYTES", 150)
    aside_of(store, 1)
    store.run_transaction(clear_packs(1, 5), False)
    assert query_of(store)("SELECT first FROM aside_pack ORDER BY first") == [(1,), (2,), (3,), (4,)]


@pytest.fixture
def large(tmp_path):
    """A real database of 12 MiB of packs; and what its files have."""
    files = OsFiles(str(tmp_path))
    store = ChannelStore(files)
    body = bytes(100_000)
    for start in range(0, 120, 20):
        new = [NewPack(n, [Piece(n, n, 1, 0, len(body), body)]) for n in range(start + 1, start + 21)]
        store.run_transaction(put_packs(1, new, 0), False)
    yield store, lambda suffix="": (tmp_path / f"channels.db{suffix}").stat().st_size
    store.close()
    files.close()


def test_what_is_forgotten_takes_no_room_and_is_given_back_when_it_is_much_or_the_disk_is_full(monkeypatch, large):
    store, size = large
    wal = size("-wal")
    store.run_transaction(clear_packs(1, 0), False)
    assert size("-wal") <= wal + 1_000_000
    assert not store.give_back() and store._database.size_bytes() > 11_000_000, "it is kept for what comes next"
    snapshot = store._database.snapshot()
    monkeypatch.setattr(store._files, "free_bytes", lambda: 0)
    store.run_transaction([channel_store.put_topic("t", False)], False)
    assert not store.give_back(), "somebody reads an older state"
    snapshot.close()
    monkeypatch.setattr(store._files, "free_bytes", lambda: 1 << 40)
    monkeypatch.setattr(channel_store, "_UNUSED_BYTES", 8_000_000)
    assert not store.give_back(is_busy=True) and size() > 10_000_000, "messages come due"
    assert store.give_back() and 1_000_000 < size() < 5_000_000
    monkeypatch.setattr(store._files, "free_bytes", lambda: 0)
    while store.give_back(is_busy=True):
        pass
    assert size() < 2_000_000 and size("-wal") <= wal + 1_000_000


def test_a_database_that_could_not_become_shorter_is_made_anew_at_a_start(tmp_path):
    files = OsFiles(str(tmp_path))
    ChannelStore(files).close()
    old = sqlite3.connect(tmp_path / "channels.db", isolation_level=None)
    old.execute("PRAGMA journal_mode=DELETE")
    old.execute("PRAGMA auto_vacuum=NONE")
    old.execute("VACUUM")
    assert old.execute("PRAGMA auto_vacuum").fetchone() == (0,)
    old.close()
    store = ChannelStore(files)
    assert query_of(store)("PRAGMA auto_vacuum") == [(2,)]
    assert store.take_damages() == []
    store.close()
    files.close()
