"""MPUB bodies out of Arrow columns: the same bytes as message by message, cut within both limits."""

from __future__ import annotations

from struct import pack

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.spark.encode import as_binary, body_sizes, encode_bodies


def plainly(bodies: list[bytes]) -> bytes:
    return b"".join(pack(">I", len(body)) + body for body in bodies)


@given(st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=40), st.integers(1, 20), st.integers(1, 100))
def test_every_message_once_within_the_limits(bodies, messages_max, bytes_max):
    encoded = encode_bodies(pa.array(bodies, pa.binary()))
    slices = [(count, bytes(data)) for count, data in encoded.slices(messages_max, bytes_max)]
    assert b"".join(data for _, data in slices) == plainly(bodies)
    first = 0
    for count, data in slices:
        assert data == plainly(bodies[first : first + count])
        assert 1 <= count <= messages_max
        assert len(data) <= bytes_max or count == 1
        first += count
    assert first == len(bodies)


def test_slices_are_as_long_as_allowed():
    encoded = encode_bodies(pa.array([b"12345678"] * 10, pa.binary()))
    assert [count for count, _ in encoded.slices(4, 1000)] == [4, 4, 2]
    assert [count for count, _ in encoded.slices(100, 36)] == [3, 3, 3, 1]


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.large_string(), pa.large_binary(), pa.binary_view()])
def test_every_kind_of_column_and_slices_of_it(kind):
    column = pa.array(["zero", "one", "zwölf", "three"], kind)
    bodies = as_binary(column.slice(1, 2))
    assert body_sizes(bodies).tolist() == [3, 6]
    ((count, data),) = encode_bodies(bodies).slices(10, 1000)
    assert (count, bytes(data)) == (2, plainly([b"one", "zwölf".encode()]))


def test_after_a_filter():
    bodies = pa.array([b"a", b"bb", b"ccc"], pa.binary()).filter(pa.array([True, False, True]))
    ((_, data),) = encode_bodies(bodies).slices(10, 1000)
    assert bytes(data) == plainly([b"a", b"ccc"])
