"""JSON bodies as columns: what fits a schema, what does not and why, and fields that are named as columns are."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from typing import Any

import pytest
from tests.integration.daemons import SPARK_PATIENCE_S

from flintmq.errors import OptionError
from flintmq.pipeline.bodies import unused, with_columns

pytestmark = [pytest.mark.spark, pytest.mark.timeout(2 * SPARK_PATIENCE_S)]

DDL = (
    "id bigint, at struct<x: double, y: struct<z: int NOT NULL>>, price decimal(5,2), name string, day date, "
    "time timestamp, tags array<struct<f: float, n: tinyint NOT NULL>>, more map<string, bigint>, free variant, "
    "times map<string, array<timestamp>>, some struct<v: array<variant>, w: variant>"
)
FITS = [
    ' {"id": 1}\n',
    '{"id": null, "at": null, "price": null, "name": null, "day": null, "time": null, "tags": null, "free": null}',
    '{"at": {"x": 1, "y": null}, "price": 100, "name": "", "tags": [], "more": {}}',
    '{"at": {"x": 1.5e3}, "price": 1.50, "tags": [{"f": 1, "n": 127}, null, {"n": -1}], "free": [{"a > b": [1, "c"]}]}',
    '{"price": 999.99, "day": "2026-11-23", "time": "2026-11-23T12:00:00.5Z", "more": {"a: b, `c`": 1, "d": null}}',
    '{"free": [1e308, -1.7976931348623157e308, 1e-400, 12345678901234567890.5e0, "1e999", "\\" 1e999", {"1e999": 0}]}',
    f'{{"free": {"9" * 38}, "some": {{"v": [0.{"1" * 38}, -{"1" * 19}.{"5" * 19}], "w": "{"9" * 400}"}}}}',
    f'{{"free": "1e999", "at": {{"x": 0.{"1" * 60}}}, "name": "12:00"}}',
    '{"time": "2026-11-23", "times": {"a": ["2026-11-23T12:00", null], "b": null, "12:00": []}}',
    json.dumps({"more": {f"key {n}": n for n in range(5000)}}),
]
TAGS = "array<struct<f:float,n:tinyint>>"
BEYOND = (
    "the body is no JSON object, or has a number of more than 1000 digits or nests 1000 deep, "
    "which Spark does not read: "
)
DOES_NOT = {
    '{"id": 1}{"id": 2}': "the body is more than one JSON object: ",
    '{"id": 1} xyz': "the body is more than one JSON object: ",
    '{"id": 1}}': "the body is more than one JSON object: ",
    '{"id": 1}] xyz': "the body is more than one JSON object: ",
    '{"id": 1}, "id": 2': "the body is more than one JSON object: ",
    '{"id": 1}, 2': "the body is more than one JSON object: ",
    "{'id': 1}": "the body is no strict JSON, or has a name twice: ",
    '{"id": 1, "id": 2}': "the body is no strict JSON, or has a name twice: ",
    '{"at": {"x": 1, "x": 2}}': "the body is no strict JSON, or has a name twice: ",
    "{id: 1}": "the body is no JSON object: ",
    '{"at": {"x": NaN}}': "the body is no JSON object: ",
    '{"ID": 1}': "unknown fields: ID",
    '{"at": {"x": 1, "w": 2, "y": {"z": 1, "v v": 2}}, "q": 0}': "unknown fields: q, at.w, at.y.v v",
    '{"tags": [{"n": 1}, {"n": 1, "m": 2}]}': f"field tags is no {TAGS}: ",
    '{"id": "5"}': "field id is no bigint: 5",
    '{"id": 1.5}': "field id is no bigint: 1.5",
    '{"id": 1.0}': "field id is no bigint: 1, written with a point",
    '{"id": 1e2}': "field id is no bigint: 100.0",
    '{"at": {"y": {"z": 12.00}}}': "field at.y.z is no int: 12, written with a point",
    '{"id": true}': "field id is no bigint: true",
    '{"id": 9223372036854775808}': "field id is no bigint: 9223372036854775808",
    '{"at": {"x": "1.5"}}': "field at.x is no double: 1.5",
    '{"at": {"x": "NaN"}}': "field at.x is no double: NaN",
    '{"at": {"x": 1e400}}': "field at.x is no double: it is out of its range",
    '{"at": {"y": {}}}': "field at.y.z is missing, or null",
    '{"at": {"y": {"z": null}}}': "field at.y.z is missing, or null",
    '{"at": {"y": {"z": 3000000000}}}': "field at.y.z is no int: 3000000000",
    '{"at": {"y": 3}}': "field at.y is no struct<z:int>: 3",
    '{"price": 1.234}': "field price is no decimal(5,2): 1.234",
    '{"price": 1000.5}': "field price is no decimal(5,2): 1000.5",
    '{"price": 1e-3}': "field price is no decimal(5,2): 0.001",
    '{"price": "1.2"}': "field price is no decimal(5,2): 1.2",
    '{"name": 5}': "field name is no string: 5",
    '{"name": {"a": 1}}': 'field name is no string: {"a":1}',
    '{"time": 5}': "field time is no timestamp: 5",
    '{"time": "soon"}': "field time is no timestamp: soon",
    '{"time": "12:00"}': "field time is no timestamp: it has no date: 12:00",
    '{"time": "T05:06:07Z"}': "field time is no timestamp: it has no date: T05:06:07Z",
    '{"times": {"a": ["2026-11-23", "1:02"]}}': "field times is no map<string,array<timestamp>>: a tim",
    '{"free": 1e999}': "field free is no variant: it cannot hold the number 1e999",
    '{"free": {"a": [1, {"b": -1E+999}]}}': "field free is no variant: it cannot hold the number -1E+999",
    f'{{"free": [{"9" * 400}]}}': f"field free is no variant: it cannot hold the number {'9' * 80}",
    f'{{"free": -{"1" * 39}}}': f"field free is no variant: it cannot hold the number -{'1' * 39}",
    f'{{"free": {"1" * 38}.0}}': f"field free is no variant: it cannot hold the number {'1' * 38}.0",
    f'{{"free": 0.{"1" * 39}}}': f"field free is no variant: it cannot hold the number 0.{'1' * 39}",
    '{"some": {"v": ["1e998", 1e999]}}': "field some.v[] is no variant: it cannot hold the number 1e999",
    '{"some": {"w": 1e999}}': "field some.w is no variant: it cannot hold the number 1e999",
    f'{{"price": 0.{"0" * 1200}}}': f"{BEYOND}{{",
    f'{{"id": {"9" * 5000}}}': f"{BEYOND}{{",
    f'{{"free": {"[" * 5000}{"]" * 5000}}}': f"{BEYOND}{{",
    '{"day": "2026-13-01"}': "field day is no date: 2026-13-01",
    '{"day": "2026-11-23T12:00:00Z"}': "field day is no date: 2026-11-23T12:00:00Z",
    '{"day": "5"}': "field day is no date: 5",
    '{"tags": [{"f": 1}]}': "field tags[].n is missing, or null",
    '{"tags": [{"n": 1}, {"n": 128}]}': "field tags[].n is no tinyint: it is out of its range",
    '{"tags": [{"n": 99999}]}': "the body has a value out of the range of its type: ",
    '{"tags": [{"n": 1, "f": 1e300}]}': "field tags[].f is no float: it is out of its range",
    '{"more": {"a": 1, "b": "c"}}': "field more is no map<string,bigint>: ",
}


def frame_of(spark: Any, bodies: list[str]) -> Any:
    """A frame of messages of topic ``t``, the first with offset 0."""
    rows = [("t", offset, bytearray(body.encode())) for offset, body in enumerate(bodies)]
    return spark.createDataFrame(rows, "topic string, offset bigint, body binary").coalesce(1)


def test_a_body_fits_wholly_or_not_at_all(spark: Any):
    found = with_columns(frame_of(spark, [*FITS, *DOES_NOT]), DDL).drop("free", "some", "data").collect()
    said = {row.body.decode(): row["_reason"] for row in found}
    assert {body: said[body] for body in FITS} == dict.fromkeys(FITS)
    wrong = {body: said[body] for body, start in DOES_NOT.items() if not (said[body] or "").startswith(start)}
    assert not wrong
    third, fourth = found[3].asDict(recursive=True), found[4].asDict(recursive=True)
    assert (third["at"], third["price"]) == ({"x": 1500.0, "y": None}, Decimal("1.50"))
    assert third["tags"] == [{"f": 1.0, "n": 127}, None, {"f": None, "n": -1}]
    assert (fourth["day"], fourth["more"]) == (datetime.date(2026, 11, 23), {"a: b, `c`": 1, "d": None})


def test_fields_that_the_schema_lacks_are_left_out_where_that_is_wanted(spark: Any):
    bodies = [
        '{"id": 1, "q": {"a b": [1, {"c": "d"}]}, "at": {"x": 1, "w": [[]]}}',
        '{"id": "1", "q": 2}',
        '{"q": 1}{"q": 2}',
        '{"Id": 1, "at": {"x": "1", "X": 2}}',
    ]
    wide = with_columns(frame_of(spark, bodies), "id bigint, at struct<x: double>", drops_unknown=True)
    rows = [row.asDict(recursive=True) for row in wide.collect()]
    assert [row["_reason"] for row in rows] == [
        None,
        "field id is no bigint: 1",
        f"the body is more than one JSON object: {bodies[2]}",
        "field at.x is no double: 1",
    ]
    assert (rows[0]["id"], rows[0]["at"]) == (1, {"x": 1.0})


def test_no_field_takes_the_place_of_a_column(spark: Any):
    names = [
        "Offset", "TOPIC", "Data", "_reason", "_Text", "_whole", "_shape", "_corrupt", "user-id", "a.b", "c d", "e'f",
        'g"h', "q]", "größe", "t`k", "1a", "select", "back\\slash",
    ]  # fmt: skip
    ddl = ", ".join("`" + name.replace("`", "``") + "` int" for name in names)
    bad = {name: {name: "z"} for name in names}
    bodies = [json.dumps({name: number for number, name in enumerate(names)}), *map(json.dumps, bad.values())]
    wide = with_columns(frame_of(spark, bodies), ddl)
    assert wide.columns == ["topic", "offset", "body", "data", "_reason", *names[4:]]
    first, *others = [row.asDict(recursive=True) for row in wide.collect()]
    assert (first["topic"], first["offset"], first["_reason"]) == ("t", 0, None)
    assert first["data"] == {name: number for number, name in enumerate(names)}
    assert {name: first[name] for name in names[4:]} == {name: first["data"][name] for name in names[4:]}
    assert [row["_reason"] for row in others] == [f"field {name} is no int: z" for name in names]
    assert [row["offset"] for row in others] == list(range(1, len(names) + 1))
    nested = with_columns(frame_of(spark, ['{"data": {"x": 7}, "k": 1}']), "k int, data struct<x: int>")
    (row,) = nested.selectExpr("data.k", "data.data.x", "_reason").collect()
    assert tuple(row) == (1, 7, None)


def test_names_that_differ_only_in_case(spark: Any):
    for ddl in ("id bigint, Id bigint", "at struct<x: int, X: int>", "a array<struct<b: int, B: int>>"):
        with pytest.raises(OptionError, match="fields whose names differ in more than case"):
            with_columns(frame_of(spark, ["{}"]), ddl)
    assert unused("_at", ["_AT", "__at", "at"]) == "___at"
