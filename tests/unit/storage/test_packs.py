"""Packs of messages set aside: what is grouped, stored, read back and found, in a real database in memory."""

from itertools import islice, pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.errors import StorageError
from flintmq.storage import ChannelStore, packs
from flintmq.storage.aside_rows import pack_rows
from flintmq.storage.files import SqliteDatabase
from flintmq.storage.packs import NewPack, Piece, clear_packs, delete_packs, encode_pack, group, put_done, put_packs

SECOND = 1_000_000_000


def files(path: str = ":memory:") -> Any:
    """A data directory as far as its database is concerned."""
    return SimpleNamespace(open_database=lambda _name: SqliteDatabase(path))


@pytest.fixture
def store():
    store = ChannelStore(files())
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


@given(pieces_of, st.data())
def test_packs_come_back_as_they_were_but_for_what_is_done_or_forgotten(drawn, data):
    built = sorted(build(drawn), key=lambda p: p.due_ns)
    store = ChannelStore(files())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packs, "PACK_BYTES", 100)
        patch.setattr(packs, "SMALL_BYTES", data.draw(st.sampled_from([1, 130, 10_000])))
        new = [NewPack(number, pieces) for number, pieces in enumerate(group(built, 0), 1)]
        everything = {m[1]: (each.number, m) for each in new for m in messages(each.pieces)}
        done = data.draw(st.sets(st.sampled_from(sorted(everything))))
        by_pack: dict[int, list[int]] = {}
        for sequence in done:
            by_pack.setdefault(everything[sequence][0], []).append(sequence)
        store.commit([*put_packs(1, new, 0), *put_packs(2, [NewPack(900, built[:1])], 0), put_done(by_pack)], False)
        if by_pack:  # once more, as after a flush that failed behind its commit
            store.commit([*put_packs(1, new, 0), put_done(by_pack)], False)
        cut = data.draw(st.integers(1, max(everything) + 1))
        store.commit(clear_packs(1, cut), False)
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
        assert store.aside_count(1) == len(left)
        assert store.aside_count(2) == built[0].count
        wall_ns, count = data.draw(st.integers(0, 100_000 * SECOND)), data.draw(st.integers(1, 30))
        ahead = [m for m in left if m[0] > wall_ns][:count]
        looked = store.aside_after(1, wall_ns, count, 7)
        assert looked == [(s, due_ns, attempts, frame[:7], len(frame)) for due_ns, s, attempts, frame in ahead]
        for sequence in range(max(everything) + 2):
            expected = everything[sequence][0] if any(m[1] == sequence for m in left) else None
            assert store.find_aside(1, sequence) == expected
    store.close()


def test_only_what_is_due_until_then_is_read(store):
    new = [NewPack(n, [piece(n * SECOND, n, [20]), piece(n * SECOND + 5, 100 + n, [20])]) for n in range(1, 6)]
    store.commit(put_packs(1, new, 0), False)
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
    store.commit([*put_packs(1, new, 0), put_done({1: [1], 3: [3]})], False)
    store.commit([delete_packs([1, 2])], False)
    query = query_of(store)
    assert query("SELECT id FROM aside_pack") == query("SELECT id FROM aside_data") == [(3,)]
    assert query("SELECT pack FROM aside_done") == [(3,)]
    assert store.aside_count(1) == 1


def test_due_times_are_moved_with_the_clock(store):
    store.commit(put_packs(1, [NewPack(1, [piece(0, 1, [9]), piece(7 * SECOND, 2, [9])])], 3 * SECOND), False)
    store.commit([packs.shift_packs(-2 * SECOND)], False)
    ((first, second),) = [each.pieces for each in store.due(1, (-1, -1), 10 * SECOND, 1).packs]
    assert (first.due_ns, second.due_ns) == (SECOND, 8 * SECOND)
    assert [row[:2] for row in store.aside_after(1, 7 * SECOND, 9, 9)] == [(2, 8 * SECOND)]


def test_one_message_is_found_among_many_packs_and_in_one_with_a_long_head(store):
    scattered = [piece(n, 2 * n, [n % 30 + 5]) for n in range(1, 6000)]
    assert len(encode_pack(NewPack(1, scattered))) > packs._LOOK_BYTES
    many = [NewPack(n, [piece(5, 1, [9]), piece(5, 20_000 + n, [9])]) for n in range(2, 200)]
    store.commit(put_packs(1, [NewPack(1, scattered), *many], 0), False)
    assert store.find_aside(1, 11_998) == 1
    assert store.find_aside(1, 20_199) == 199
    assert store.find_aside(1, 11_997) is None
    assert store.find_aside(2, 20_199) is None


def test_rows_of_an_older_release_become_packs(tmp_path):
    path = str(tmp_path / "channels.db")
    database = SqliteDatabase(path)
    schema = (
        "CREATE TABLE aside(cursor INTEGER, sequence INTEGER, due_ns INTEGER NOT NULL, attempts INTEGER NOT NULL,"
        " frame BLOB NOT NULL, PRIMARY KEY(cursor, sequence)) WITHOUT ROWID"
    )
    rows = [(n % 2 + 1, n, (n * 7919 % 5000) * SECOND, n % 3, b"frame %d" % n) for n in range(1, 5001)]
    put = "INSERT INTO aside(cursor, sequence, due_ns, attempts, frame) VALUES(?, ?, ?, ?, ?)"
    database.commit([(schema, ((),)), (put, rows), ("PRAGMA user_version = 2", ((),))], True)
    database.close()
    store = ChannelStore(files(path))
    assert query_of(store)("PRAGMA user_version") == [(3,)]
    assert not query_of(store)("SELECT 1 FROM sqlite_master WHERE name = 'aside'")
    for cursor in (1, 2):
        read = store.due(cursor, (-1, -1), 10_000 * SECOND, 1 << 30)
        found = {s: (cursor, s, due, att, f) for each in read.packs for due, s, att, f in messages(each.pieces)}
        assert sorted(found.values()) == sorted(row for row in rows if row[0] == cursor)
        assert store.aside_count(cursor) == 2500
        assert len(read.packs) < 100
    store.close()


def test_packing_rows_that_fails_leaves_them_as_they_were(monkeypatch):
    database = SqliteDatabase(":memory:")
    schema = "CREATE TABLE aside(cursor INTEGER, sequence INTEGER, due_ns INTEGER, attempts INTEGER, frame BLOB)"
    rows = [(n % 2, n, n // 4, 0, b"frame %d" % n) for n in range(1, 41)]
    database.commit([(sql, ((),)) for sql in packs.SCHEMA], False)
    database.commit([(schema, ((),)), ("INSERT INTO aside VALUES(?, ?, ?, ?, ?)", rows)], False)
    monkeypatch.setattr("flintmq.storage.aside_rows._ROWS", 6)

    class Full:
        query = staticmethod(database.query)

        def commit(self, statements, sync):
            database.commit([*islice(statements, 7), ("INSERT INTO no_such_table VALUES(1)", ((),))], sync)

    with pytest.raises(StorageError):
        pack_rows(cast(Any, Full()))
    assert database.query("SELECT COUNT(*) FROM aside") == [(40,)]
    assert database.query("SELECT COUNT(*) FROM aside_pack") == [(0,)]
    pack_rows(database)
    for cursor in (0, 1):
        found = packs.packed_after(database.query, cursor, -1, 100)
        assert [(s, p.frame(s)) for s, p in found] == [(n, b"frame %d" % n) for n in range(2 - cursor, 41, 2)]
