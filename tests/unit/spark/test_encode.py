"""MPUB bodies out of Arrow columns: the same bytes as message by message, cut within both limits."""

from __future__ import annotations

import json
from struct import pack

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.spark.encode import HeadersRefused, as_binary, body_sizes, encode_bodies, header_fronts, text_bytes


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


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.large_string(), pa.large_binary(), pa.string_view()])
def test_bytes_of_texts(kind):
    texts = pa.array(["ab", None, "", "cdé"], kind)
    assert [text_bytes(each) for each in (texts, texts.slice(1), texts.slice(1, 2), texts.slice(4))] == [6, 4, 0, 0]
    maps = pa.array([[("a", "bcd")], None, [], [("e", None), ("ff", "g")]], pa.map_(pa.string(), kind))
    assert [text_bytes(each) for each in (maps, maps.slice(1), maps.slice(0, 3), maps.slice(1, 2))] == [8, 4, 4, 0]
    assert text_bytes(pa.array([1, None], pa.int64())) == 0


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


MAP = pa.map_(pa.string(), pa.string())
ANY = (
    '{ "n" : 5,"b":true, "o":{"a":[1,2.50,-0.0]}, "none":null ,"big":18446744073709551999,"deep":[[[{}]]],"a":1,"a":2 }'
)


def fronts(
    maps: list[list[tuple[str, str | None]] | None], trace_ids: list[int | None] | None, texts: list[str | None]
) -> list[str]:
    ids = None if trace_ids is None else pa.array(trace_ids, pa.int64())
    found = header_fronts(pa.array(maps, MAP), ids, pa.array(texts, pa.string())).to_pylist()
    assert all(len(each) == 2 + int.from_bytes(each[:2], "big") for each in found)
    return [each[2:].decode() for each in found]


def test_headers_beside_json_leave_it_as_it_is():
    ours: list[tuple[str, str | None]] = [("source", "x")]
    found = fronts([ours] * 6, [None, 7, 7, None, None, None], [ANY, ANY, '{"##trace_id":"7"}', "{ }", None, ""])
    assert found == [
        f'{ANY[:-1]},"source":"x"}}',
        f'{ANY[:-1]},"source":"x","##trace_id":"7"}}',
        '{"##trace_id":"7","source":"x"}',
        '{ "source":"x"}',
        '{"source":"x"}',
        '{"source":"x"}',
    ]
    assert fronts([None, [], None], [None, 0, 7], [ANY, ANY, '{"##trace_id":"7","n":1.0}']) == [
        ANY, ANY, '{"##trace_id":"7","n":1.0}',
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ('{"source":1,"n":5}', '{"n":5,"source":"x"}'),
        ('{"n":5 , "\\u0073ource" : {"source":"}"} ,"o":{"source":1.0}}', '{"n":5 ,"o":{"source":1.0},"source":"x"}'),
        ('{"a":1,"source":"\\"","a":2,"source":[]}', '{"a":1,"a":2,"source":"x"}'),
        ('{ "source" : null }', '{"source":"x"}'),
        (f'{{"source":2,"n":{"9" * 4000},"d":{"[" * 60}{"]" * 60}}}',
         f'{{"n":{"9" * 4000},"d":{"[" * 60}{"]" * 60},"source":"x"}}'),
        ('{"source":"x","n":5}', '{"n":5,"source":"x"}'),
    ],
)  # fmt: skip
def test_a_header_that_is_there_already_is_taken_out_and_no_other(text: str, left: str):
    assert fronts([[("source", "x")]], None, [text]) == [left]


@given(st.dictionaries(st.text(max_size=5), st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3),
    max_leaves=8,
), max_size=5), st.integers(0, 3))  # fmt: skip
def test_any_json_says_the_same_beside_headers(theirs: dict[str, object], indent: int):
    text = json.dumps(theirs, ensure_ascii=indent % 2 == 0, indent=indent or None)
    name = next(iter(theirs), "source")
    (found,) = fronts([[(name, "x"), ("more", None)]], None, [text])
    assert json.loads(found) == {**theirs, name: "x", "more": None}


@pytest.mark.parametrize("wrong", ["{bad", "[1]", '{"a":1}}', "5"])
def test_json_that_is_no_object_takes_no_headers(wrong: str):
    with pytest.raises(HeadersRefused, match="are not a JSON object") as refused:
        fronts([[("a", "b")]] * 2, None, ["{}", wrong])
    assert refused.value.index == 1
