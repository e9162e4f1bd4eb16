"""Decoding: the very columns, from batches of every shape; damage and gaps are seen."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.batch import BatchError, encode_batch
from flintmq.checksum import crc32
from flintmq.message import hex_id, internal_id
from flintmq.spark.broker import PAD_BYTES
from flintmq.spark.decode import Decoder, locate
from flintmq.spark.schema import COLUMNS, arrow_schema

STORED_NS = 1_700_000_000_123_456_789

# two batches of partition 3, sequences 7 and 8, bodies of one size and of two; written down once, never regenerated
UNIFORM_GOLDEN = bytes.fromhex(
    """
    464d5142010100000000004a00000002000c000000000007000000000000000017979cfe3d85cd1517979cfe3d85cd15
    00000000000000000000000000000000000000004505ed13000000210000000217979cfe3d85cd150001303030633030
    303030303030303030376f6e65000000210000000217979cfe3d85cd1500013030306330303030303030303030303874
    776f
    """
)
SIZES_GOLDEN = bytes.fromhex(
    """
    464d5142010000000000006d00000002000c000000000007000000000000000017979cfe3d85cd1517979cfe3d85cd15
    0000000000000000000000000000000000000000b602caa700000023000000420000001f0000000217979cfe3d85cd15
    000130303063303030303030303030303037610000003e0000000217979cfe3d85cd1500013030306330303030303030
    30303030386120626f6479206f66206d6f7265207468616e207477656c7665206279746573
    """
)


def decode(stored: bytes, start: int, end: int, next_sequence: int = 0, rows_max: int = 10_000, columns=COLUMNS):
    """All rows of an answer, and its gaps; what follows the batches is noise, as in a buffer used again."""
    padded = memoryview(bytearray(stored + b"\xa5" * PAD_BYTES))
    messages = locate(padded[: len(stored)], start, end, next_sequence)
    decoder = Decoder(columns, "t", "host:1", 3, rows_max)
    return list(decoder.record_batches(padded, messages)), messages.gaps


def rows(stored: bytes, start: int, end: int) -> list[dict]:
    batches, gaps = decode(stored, start, end)
    assert gaps == []
    return pa.Table.from_batches(batches, arrow_schema(COLUMNS)).to_pylist()


@pytest.mark.parametrize(
    ("stored", "bodies"),
    [(UNIFORM_GOLDEN, [b"one", b"two"]), (SIZES_GOLDEN, [b"a", b"a body of more than twelve bytes"])],
)
def test_golden(stored, bodies):
    assert rows(stored, 7, 9) == [
        {
            "topic": "t",
            "partition": 3,
            "offset": 7 + index,
            "timestamp": datetime(2023, 11, 14, 22, 13, 20, 123_456, UTC),
            "attempts": 1,
            "id": hex_id(internal_id(3, 7 + index)),
            "internal_id": 3 << 50 | 7 + index,
            "trace_id": 0,
            "body": body,
            "nsqd": "host:1",
        }
        for index, body in enumerate(bodies)
    ]
    assert encode_batch(internal_id(3, 7), 0, STORED_NS, bodies) == stored


@pytest.mark.slow
@given(
    st.lists(
        st.one_of(
            st.lists(st.binary(max_size=40), min_size=1, max_size=8),
            st.builds(lambda body, count: [body] * count, st.binary(max_size=40), st.integers(1, 8)),
        ),
        min_size=1,
        max_size=6,
    ),
    st.data(),
)
def test_any_batches_any_range(batches, data):
    bodies = [body for batch in batches for body in batch]
    stored, first = b"", 5
    for batch in batches:
        stored += encode_batch(internal_id(3, first), 0, STORED_NS + first * 1000, batch)
        first += len(batch)
    start = data.draw(st.integers(5, first - 1))
    end = data.draw(st.integers(start + 1, first))
    found, gaps = decode(stored, start, end, end, rows_max=data.draw(st.integers(1, 20)))
    table = pa.Table.from_batches(found, arrow_schema(COLUMNS))
    assert gaps == []
    assert table["body"].to_pylist() == bodies[start - 5 : end - 5]
    assert table["offset"].to_pylist() == list(range(start, end))
    assert table["internal_id"].to_pylist() == [internal_id(3, n) for n in range(start, end)]
    assert table["id"].to_pylist() == [hex_id(internal_id(3, n)) for n in range(start, end)]


def test_record_batches_are_of_about_one_length():
    stored = encode_batch(1, 0, STORED_NS, [b"x" * 50] * 25)
    found, _ = decode(stored, 1, 26, rows_max=10)
    assert [batch.num_rows for batch in found] == [9, 9, 7]
    assert all(batch.schema == arrow_schema(COLUMNS) for batch in found)


def test_only_the_columns_asked_for_in_their_order():
    found, _ = decode(SIZES_GOLDEN, 7, 9, columns=("body", "offset"))
    assert found[0].schema == arrow_schema(("body", "offset"))
    assert found[0].to_pylist()[0] == {"body": b"a", "offset": 7}


def test_nothing_returned_refers_to_the_answer():
    """The buffer of an answer is used again for the next one while Spark still writes out the rows of the first."""
    padded = bytearray(SIZES_GOLDEN + bytes(PAD_BYTES))
    view = memoryview(padded)
    messages = locate(view[: len(SIZES_GOLDEN)], 7, 9, 9)
    (found,) = Decoder(COLUMNS, "t", "host:1", 3, 10).record_batches(view, messages)
    before = found.to_pylist()
    view[:] = b"\xff" * len(view)
    assert found.to_pylist() == before


def test_an_answer_without_batches():
    assert decode(b"", 5, 9, 5) == ([], [])
    assert decode(b"", 5, 9, 7) == ([], [(5, 7)])
    assert decode(b"", 5, 9, 12) == ([], [(5, 9)])


def test_gaps_between_before_and_after_batches():
    stored = encode_batch(10, 0, STORED_NS, [b"a", b"b"]) + encode_batch(15, 0, STORED_NS, [b"c"])
    found, gaps = decode(stored, 8, 30, 20)
    assert gaps == [(8, 10), (12, 15), (16, 20)]
    assert [row["offset"] for row in found[0].to_pylist()] == [10, 11, 15]
    assert decode(stored, 10, 14, 15)[1] == [(12, 14)]
    assert decode(stored, 13, 14, 15)[1] == [(13, 14)]
    assert decode(stored, 11, 12, 12)[1] == []


def test_a_batch_before_the_range_is_left_out():
    stored = encode_batch(1, 0, STORED_NS, [b"a"]) + encode_batch(2, 0, STORED_NS, [b"b"])
    found, gaps = decode(stored, 2, 3, 3)
    assert ([row["body"] for row in found[0].to_pylist()], gaps) == ([b"b"], [])


def test_batches_out_of_order_are_refused():
    first, second = encode_batch(1, 0, STORED_NS, [b"a"]), encode_batch(2, 0, STORED_NS, [b"b"])
    for stored in (second + first, first + first):
        with pytest.raises(BatchError, match="follows"):
            decode(stored, 1, 3, 3)


def test_batches_that_overlap_are_refused():
    stored = encode_batch(1, 0, STORED_NS, [b"a", b"b"]) + encode_batch(2, 0, STORED_NS, [b"b", b"c"])
    with pytest.raises(BatchError, match="up to 4 follows one that ends at 3"):
        decode(stored, 1, 4, 4)


@pytest.mark.parametrize(
    ("stored", "position", "new", "said"),
    [
        (UNIFORM_GOLDEN, 0, b"FMQC", "magic"),
        (UNIFORM_GOLDEN, 4, b"\x02", "version 2"),
        (UNIFORM_GOLDEN, 5, b"\x21", "flags 0x21"),
        (UNIFORM_GOLDEN, 6, b"\x00\x0b", "prefix of 11"),
        (SIZES_GOLDEN, 5, b"\x10", "prefix of 0"),
        (UNIFORM_GOLDEN, 12, b"\x00\x00\x00\x00", "for 0 messages"),
        (UNIFORM_GOLDEN, 12, b"\x00\x00\x00\x03", "for 3 messages"),
        (UNIFORM_GOLDEN + b"x", 8, b"\x00\x00\x00\x4b", "do not fill"),
        (SIZES_GOLDEN, 72, b"\x00\x00\x00\x24", "table of sizes"),
        (SIZES_GOLDEN, 72, b"\x00\x00\x00\x1d\x00\x00\x00\x48", "table of sizes"),
    ],
)
def test_batches_that_nobody_writes_are_refused(stored, position, new, said):
    """Their CRC fits: somebody wrote them like that."""
    wrong = bytearray(stored)
    wrong[position : position + len(new)] = new
    wrong[68:72] = crc32(wrong[72:], crc32(wrong[:68])).to_bytes(4, "big")
    for before, place in ((b"", "the start"), (encode_batch(4, 0, STORED_NS, [b"sound"] * 3), "message 6")):
        with pytest.raises(BatchError, match=said) as caught:
            decode(before + bytes(wrong), 1, 9, 9)
        if position < 72 and said != "do not fill":
            assert str(caught.value).startswith(f"the batch behind {place}: ")


def test_what_is_wrong_is_said_of_the_first_batch_that_is():
    stored = bytearray(UNIFORM_GOLDEN + SIZES_GOLDEN)
    stored[len(UNIFORM_GOLDEN) - 1] ^= 1
    stored[len(UNIFORM_GOLDEN)] ^= 1
    with pytest.raises(BatchError, match="CRC"):
        decode(bytes(stored), 7, 11, 11)


@pytest.mark.parametrize("stored", [UNIFORM_GOLDEN, SIZES_GOLDEN], ids=["uniform", "sizes"])
def test_any_flipped_bit_is_found(stored):
    for position in range(len(stored)):
        damaged = bytearray(stored)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(BatchError):
            decode(bytes(damaged), 7, 9, 9)


def test_any_cut_is_found():
    stored = UNIFORM_GOLDEN + SIZES_GOLDEN
    for size in range(1, len(stored)):
        if size != len(UNIFORM_GOLDEN):
            with pytest.raises(BatchError):
                decode(stored[:size], 7, 11, 11)


def test_the_columns_agree_with_spark():
    from pyspark.sql.pandas.types import to_arrow_schema

    from flintmq.spark.schema import columns_of, spark_schema

    for columns in (COLUMNS, tuple(reversed(COLUMNS)), ("body",)):
        schema = spark_schema(columns)
        assert to_arrow_schema(schema, timezone="UTC") == arrow_schema(columns)
        assert columns_of(schema) == columns


@pytest.mark.parametrize("size", [0, 1, 12, 13, 200])
def test_bodies_of_one_size_in_batches_of_any_kind(size):
    bodies = [bytes([number]) * size for number in range(60)]
    stored = b"".join(encode_batch(1 + n, 0, STORED_NS, bodies[n : n + 1]) for n in range(20))
    stored += encode_batch(21, 0, STORED_NS, bodies[20:])
    found, _ = decode(stored, 1, 61, 61, rows_max=25)
    assert pa.Table.from_batches(found)["body"].to_pylist() == bodies


def test_many_small_batches_keep_their_order():
    bodies = [b"%d" % number * (number % 7) for number in range(300)]
    stored = b"".join(encode_batch(1 + n, 0, STORED_NS, [body]) for n, body in enumerate(bodies))
    found, gaps = decode(stored, 1, 301, 301)
    table = pa.Table.from_batches(found)
    assert gaps == []
    assert table["body"].to_pylist() == bodies
    assert all(b == a + 1 for a, b in pairwise(table["offset"].to_pylist()))
