"""Reading NSQ's queue files: what is unread, and what is wrong with a file."""

from __future__ import annotations

import struct

import pytest
from tests.nsq_files import Queued, bodies, meta, numbered, queue_files, write_files

from flintmq.migrate.diskqueue import CHUNK_BYTES, Fault, Meta, Queue, find_queues, parse_meta, read_records, unread
from flintmq.testing.files import MemoryFiles

MIB = 1024 * 1024


def read(content: bytes, position: int = 0, size_max: int = MIB) -> tuple[list[bytes], list[Fault]]:
    """The bodies of a file and what was reported about it."""
    files = MemoryFiles()
    write_files(files, {"q.diskqueue.000000.dat": content})
    faults: list[Fault] = []
    chunks = list(read_records(files, "q.diskqueue.000000.dat", position, size_max, faults.append))
    return [body for chunk in chunks for body in chunk.bodies], faults


def unexpected(fault: Fault) -> None:
    pytest.fail(str(fault))


def records(messages: list[Queued]) -> bytes:
    return b"".join(message.record for message in messages)


def test_the_record_is_nsqs():
    """The picture of the reference, spelled out by hand."""
    record = bytes.fromhex(
        "0000001d"  # 29 = 26 + 3
        "17979cfe362a0000"  # 1700000000000000000
        "0002" + b"0f5e9d1c2a400000".hex() + b"abc".hex()
    )
    assert Queued(b"abc", attempts=2, id=b"0f5e9d1c2a400000").record == record
    files = MemoryFiles()
    write_files(files, {"q": record})
    (chunk,) = read_records(files, "q", 0, MIB, unexpected)
    assert chunk.bodies == [b"abc"]
    assert chunk.stamps == [(1_700_000_000_000_000_000, 3)]  # the next delivery is the third
    assert chunk.size_bytes == len(record)


def test_a_file_larger_than_a_piece_and_messages_larger_than_a_piece():
    messages = [
        Queued(bytes([65 + n % 26]) * size)
        for n, size in enumerate([0, 1, 200, CHUNK_BYTES - 31, 5, 3 * CHUNK_BYTES, 7, CHUNK_BYTES, *range(3000, 3600)])
    ]
    found, faults = read(records(messages), size_max=4 * CHUNK_BYTES)
    assert found == bodies(messages)
    assert faults == []


def test_many_small_messages():
    messages = numbered("m", 40_000)
    assert read(records(messages)) == (bodies(messages), [])


def test_reading_begins_where_the_meta_file_says():
    messages = numbered("m", 10)
    assert read(records(messages), len(records(messages[:4])))[0] == bodies(messages[4:])


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5, 12, 29, 30, 31, 32])
def test_torn_last_record(cut: int):
    messages = numbered("m", 3)
    whole = records(messages[:2])
    found, faults = read(whole + messages[2].record[:cut])
    assert found == bodies(messages[:2])
    assert [(fault.path, fault.position) for fault in faults] == [("q.diskqueue.000000.dat", len(whole))]


@pytest.mark.parametrize("length", [-1, 0, 25, 2**31 - 1, -(2**31), 70 * MIB])
def test_bad_length_ends_the_file(length: int):
    messages = numbered("m", 6)
    good = records(messages[:3])
    found, faults = read(good + struct.pack(">i", length) + messages[3].record[4:] + records(messages[4:]))
    assert found == bodies(messages[:3])
    assert [fault.position for fault in faults] == [len(good)]
    assert str(length) in faults[0].reason


def test_only_zeros():
    found, faults = read(bytes(100))
    assert found == []
    assert [fault.position for fault in faults] == [0]


def test_a_message_that_is_too_large_is_left_out_and_reading_goes_on():
    messages = [Queued(b"a"), Queued(b"b" * 2000), Queued(b"c"), Queued(b"d" * 1000), Queued(b"e" * 1001)]
    found, faults = read(records(messages), size_max=1000)
    assert found == [b"a", b"c", b"d" * 1000]
    assert [fault.position for fault in faults] == [len(records(messages[:1])), len(records(messages[:4]))]
    assert "--max-msg-size=1000" in faults[0].reason


def test_a_length_that_is_too_large_and_leads_nowhere_is_damage():
    messages = numbered("m", 20, size=500)
    broken = struct.pack(">i", 1500 + 26) + messages[1].record[4:]
    found, faults = read(messages[0].record + broken + records(messages[2:]), size_max=1000)
    assert found == bodies(messages[:1])
    assert len(faults) == 1


def test_attempts_stay_at_65535():
    files = MemoryFiles()
    write_files(files, {"q": Queued(b"x", attempts=65535).record + Queued(b"y", attempts=65534).record})
    (chunk,) = read_records(files, "q", 0, MIB, unexpected)
    assert [attempts for _, attempts in chunk.stamps] == [65535, 65535]


# -- names and meta files --------------------------------------------------------------------------------------------


def test_queues_are_found_by_their_names():
    names = [
        "t.diskqueue.000000.dat",
        "t.diskqueue.000001.dat",
        "t.diskqueue.1000000.dat",
        "t.diskqueue.meta.dat",
        "t:c.diskqueue.000002.dat",
        "t:c.diskqueue.000001.dat.bad",
        "t:c.diskqueue.meta.dat.6334824724549167320.tmp",
        "win;c.diskqueue.000000.dat",
        "a.diskqueue.b.diskqueue.000000.dat",
        "nsqd.dat",
        "channels.db",
        "t.diskqueue.12.dat",
        "t.diskqueue.dat",
        ".diskqueue.000000.dat",
        "topics",
    ]
    found = {queue.name: queue for queue in find_queues(names)}
    assert list(found) == ["a.diskqueue.b", "t", "t:c", "win;c"]
    assert list(found["t"].numbers) == [0, 1, 1_000_000]
    assert (found["t"].topic, found["t"].channel, found["t"].meta) == ("t", None, "t.diskqueue.meta.dat")
    assert (found["t:c"].topic, found["t:c"].channel, found["t:c"].meta) == ("t", "c", "")
    assert found["t:c"].others == [names[5], names[6]]
    assert (found["win;c"].topic, found["win;c"].channel) == ("win", "c")


@pytest.mark.parametrize(
    "text", [b"", b"4\n", b"4\n0,0\n", b"4\n0,0\n0,x\n", b"4\n0 0\n0 1\n", b"4\n-1,0\n0,0\n", bytes(20)]
)
def test_what_is_not_a_meta_file(text: bytes):
    assert parse_meta(text) is None


def test_meta_file():
    assert parse_meta(b"4\n0,0\n0,124\n") == Meta(0, 0, 0, 124)
    assert parse_meta(b"-2\n3,7\n12,124\n") == Meta(3, 7, 12, 124)
    assert parse_meta(meta(4, (1, 2), (3, 4))) == Meta(1, 2, 3, 4)
    assert [found and found.depth for found in map(parse_meta, (meta(4, (1, 2), (3, 4)), b"-2\n3,7\n12,124\n"))] == [
        4,
        -2,
    ]


def queue_of(*numbers: int) -> Queue:
    return Queue("t", "t", None, {number: f"t.diskqueue.{number:06d}.dat" for number in numbers})


@pytest.mark.parametrize(
    ("numbers", "state", "expected", "is_believed"),
    [
        ((0,), Meta(0, 40, 0, 100), [(0, 40)], True),
        ((0, 1, 2), Meta(0, 40, 2, 100), [(0, 40), (1, 0), (2, 0)], True),
        ((1, 2), Meta(0, 40, 1, 50), [(1, 0), (2, 0)], True),  # file 0 was removed, file 2 begun, and then the kill
        ((0, 1), Meta(1, 20, 1, 100), [(1, 20)], True),  # file 0 was read and could not be removed
        ((), Meta(5, 0, 5, 0), [], True),
        ((3,), Meta(5, 0, 5, 0), [], True),  # the same, all was read
        ((0,), Meta(0, 100, 0, 100), [(0, 100)], True),
        ((0, 1), None, [(0, 0), (1, 0)], False),
        ((0, 1), Meta(1, 20, 0, 100), [(0, 0), (1, 0)], False),
        ((0, 1), Meta(0, 101, 1, 100), [(0, 0), (1, 0)], False),
        ((0, 1), Meta(7, 0, 7, 10), [(0, 0), (1, 0)], False),
    ],
)
def test_what_is_unread(
    numbers: tuple[int, ...], state: Meta | None, expected: list[tuple[int, int]], is_believed: bool
):
    found, doubt = unread(queue_of(*numbers), dict.fromkeys(numbers, 100), state)
    assert found == expected
    assert bool(doubt) is not is_believed


def test_the_writer_of_these_tests_rolls_files_as_nsqd_does():
    files = queue_files("t", numbered("m", 10, size=70), file_bytes_max=350, read_count=4)
    assert {name: len(data) for name, data in files.items()} == {
        "t.diskqueue.000001.dat": 300,
        "t.diskqueue.000002.dat": 300,
        "t.diskqueue.000003.dat": 100,
        "t.diskqueue.meta.dat": len(b"6\n1,100\n3,100\n"),
    }
    assert files["t.diskqueue.meta.dat"] == b"6\n1,100\n3,100\n"
