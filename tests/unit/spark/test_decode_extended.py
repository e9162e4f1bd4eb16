"""Decoding of topics with trace ids and headers: the columns trace_id, body and headers, and what is damaged."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.batch import EXTENDED, RAW_IDS, BatchError, encode_batch
from flintmq.errors import OptionError
from flintmq.message import TAG, extended_body, internal_id
from flintmq.spark.broker import PAD_BYTES
from flintmq.spark.decode import Decoder, locate
from flintmq.spark.headers import HeaderColumn
from flintmq.spark.options import SourceOptions
from flintmq.spark.schema import COLUMNS, TYPES, arrow_schema, columns_of, spark_schema

ALL = (*COLUMNS, "headers")
FIRST = internal_id(3, 7)


def rows(stored: bytes, columns=ALL, rows_max: int = 1000) -> list[dict]:
    padded = memoryview(bytearray(stored + b"\xa5" * PAD_BYTES))
    messages = locate(padded[: len(stored)], 7, 1000, 0)
    batches = list(Decoder(columns, "t", "host:1", 3, rows_max).record_batches(padded, messages))
    return pa.Table.from_batches(batches, arrow_schema(columns)).to_pylist()


def values(found: list[dict], *names: str) -> list[tuple]:
    return [tuple(row[name] for name in names) for row in found]


def traced(trace_id: int, body: bytes) -> bytes:
    return trace_id.to_bytes(8, "big") + body


def test_trace_ids():
    stored = encode_batch(FIRST, 0, 1, [traced(5, b"a"), traced(0, b"bb"), traced(2**64 - 1, b"ccc")], layout=RAW_IDS)
    found = rows(stored)
    assert values(found, "trace_id", "body", "headers") == [(5, b"a", None), (0, b"bb", None), (-1, b"ccc", None)]
    assert found[0]["id"] == FIRST.to_bytes(8, "big") + (5).to_bytes(8, "big")
    assert [row["internal_id"] for row in found] == [FIRST, FIRST + 1, FIRST + 2]


@pytest.mark.parametrize("layout", [EXTENDED, EXTENDED | RAW_IDS])
def test_headers(layout):
    headers = b'{"k":"v","n":18446744073709551999.50,"nothing":null,"list":[1, {"a": "b"}],"quoted":"\\"\\u00fc"}'
    bodies = [
        extended_body(headers, b"a body of more than twelve bytes"),
        extended_body(b"", b"b"),
        extended_body(b"tag-1", b"c", TAG),
        extended_body(b"{}", b""),
    ]
    if layout & RAW_IDS:
        bodies = [traced(number, body) for number, body in enumerate(bodies)]
    found = rows(encode_batch(FIRST, 0, 1, bodies, layout=layout))
    assert values(found, "body", "headers") == [
        (
            b"a body of more than twelve bytes",
            [
                ("k", "v"),
                ("n", "18446744073709551999.50"),
                ("nothing", None),
                ("list", '[1, {"a": "b"}]'),
                ("quoted", '"ü'),
            ],
        ),
        (b"b", []),
        (b"c", [("##client_dispatch_tag", "tag-1")]),
        (b"", []),
    ]
    assert [row["trace_id"] for row in found] == ([0, 1, 2, 3] if layout & RAW_IDS else [0] * 4)


def test_batches_of_every_kind_in_one_answer():
    """A topic may get headers during its life."""
    stored = encode_batch(FIRST, 0, 1, [b"plain"])
    stored += encode_batch(FIRST + 1, 0, 1, [traced(1, b"traced")], layout=RAW_IDS)
    stored += encode_batch(FIRST + 2, 0, 1, [extended_body(b'{"k":"v"}', b"x")], layout=EXTENDED)
    assert values(rows(stored, rows_max=2), "trace_id", "body", "headers") == [
        (0, b"plain", None),
        (1, b"traced", None),
        (0, b"x", [("k", "v")]),
    ]


@given(st.lists(st.tuples(st.sampled_from([b"", b"{}", b'{"a":"b"}', b'{"long":"%s"}' % (b"x" * 50)]), st.binary())))
def test_any_headers_in_front_of_any_body(messages):
    if not messages:
        return
    bodies = [traced(index, extended_body(headers, body)) for index, (headers, body) in enumerate(messages)]
    found = rows(encode_batch(FIRST, 0, 1, bodies, layout=EXTENDED | RAW_IDS), rows_max=3)
    assert [row["body"] for row in found] == [body for _, body in messages]
    assert [bool(row["headers"]) for row in found] == [len(headers) > 2 for headers, _ in messages]


def test_the_body_alone_needs_no_headers_taken_apart(monkeypatch):
    monkeypatch.setattr(HeaderColumn, "add", lambda *_: pytest.fail("nobody asked for headers"))
    stored = encode_batch(FIRST, 0, 1, [extended_body(b'{"k":"v"}', b"x")], layout=EXTENDED)
    assert rows(stored, ("body",)) == [{"body": b"x"}]


@pytest.mark.parametrize("layout", [EXTENDED, EXTENDED | RAW_IDS])
def test_headers_as_the_json_they_are(layout):
    headers = b' {"k":"v", "n":18446744073709551999.50,"n":null,"list":[1, {"a": "b"}],"quoted":"\\"\\u00fc\xc3\xbc"}'
    bodies = [
        extended_body(headers, b"a"),
        extended_body(b"", b"b"),
        extended_body(b'tag"1', b"c", TAG),
        extended_body(b"{}", b"d"),
        extended_body(headers, b"e"),
        extended_body(b"\xff{", b"f"),
    ]
    if layout & RAW_IDS:
        bodies = [traced(number, body) for number, body in enumerate(bodies)]
    found = rows(encode_batch(FIRST, 0, 1, bodies, layout=layout), ("headers_json", "body"))
    assert values(found, "headers_json", "body") == [
        (headers.decode(), b"a"),
        ("{}", b"b"),
        ('{"##client_dispatch_tag":"tag\\"1"}', b"c"),
        ("{}", b"d"),
        (headers.decode(), b"e"),
        ('{"":"\ufffd{"}', b"f"),
    ]
    assert values(rows(encode_batch(FIRST, 0, 1, [b"plain"]), ("headers_json", "body")), "headers_json") == [(None,)]


def test_headers_that_nsqd_never_takes_are_shown():
    stored = encode_batch(
        FIRST, 0, 1, [extended_body(b"\xff{", b"x"), extended_body(b'{"a":"\\ud800"}', b"y")], layout=EXTENDED
    )
    first, second = rows(stored, ("headers", "body"))
    assert first == {"headers": [("", "\ufffd{")], "body": b"x"}
    assert second["body"] == b"y"


@pytest.mark.parametrize("body", [b"", b"\x04", b"\x04\xff\xffx"])
def test_headers_longer_than_their_message(body):
    stored = encode_batch(FIRST, 0, 1, [body], layout=EXTENDED)
    for column in ("body", "headers"):
        with pytest.raises(BatchError, match="headers do not fit"):
            rows(stored, (column,))


def test_headers_are_a_column_for_those_who_want_them():
    def parsed(**options: str) -> tuple[str, ...]:
        return SourceOptions.parse({"nsqd": "a:1", "topic": "t", **options}).all_columns

    assert parsed() == COLUMNS == tuple(name for name in TYPES if name not in ("log_id", "headers", "headers_json"))
    assert parsed(includeHeaders="true") == ALL
    assert parsed(includeHeaders="true", columns="body") == ("body", "headers")
    assert parsed(includeHeaders="true", columns="headers,body") == ("headers", "body")
    assert parsed(columns="headers") == ("headers",)
    with pytest.raises(OptionError):
        parsed(includeHeaders="yes")


def test_its_type_is_the_one_spark_makes_of_its_own():
    types = pytest.importorskip("pyspark.sql.pandas.types")
    assert columns_of(spark_schema(ALL)) == ALL
    assert types.to_arrow_schema(spark_schema(ALL), timezone="UTC").types == arrow_schema(ALL).types
