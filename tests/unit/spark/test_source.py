"""The data source as Spark builds it: which columns a reader has, from a schema and from options."""

from __future__ import annotations

import pytest
from pyspark.sql.types import BinaryType, LongType, MapType, StringType, StructField, StructType

from flintmq.errors import OptionError
from flintmq.spark.schema import COLUMNS
from flintmq.spark.source import NsqDataSource

TYPES = {"offset": LongType(), "body": BinaryType(), "headers": MapType(StringType(), StringType())}


def columns_read(schema: str, **options: str) -> tuple[str, ...]:
    """The columns of a batch reader that is given a schema; without one, as Spark does then, the source's own."""
    source = NsqDataSource({"nsqd": "127.0.0.1:4150", "topic": "t", **options})
    given = StructType([StructField(name, TYPES[name]) for name in schema.split(",")]) if schema else source.schema()
    source.streamReader(given)
    return source.reader(given)._options.columns  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("schema", "options", "columns"),
    [
        ("", {}, COLUMNS),
        ("", {"columns": "body,offset", "includeHeaders": "true"}, ("body", "offset", "headers")),
        ("offset,body", {}, ("offset", "body")),
        ("offset,headers", {}, ("offset", "headers")),
        ("offset,headers", {"includeHeaders": "true"}, ("offset", "headers")),
        ("offset,body", {"columns": "body,offset"}, ("offset", "body")),
        ("offset,headers", {"columns": "offset", "includeHeaders": "true"}, ("offset", "headers")),
    ],
)
def test_columns_come_from_the_schema(schema, options, columns):
    assert columns_read(schema, **options) == columns


@pytest.mark.parametrize(
    ("schema", "options", "option", "words"),
    [
        ("offset,body", {"includeHeaders": "true"}, "includeHeaders", "the schema has offset,body: add headers map<"),
        ("offset,body", {"columns": "topic"}, "columns", "'topic' is not allowed; the schema has offset,body: leave"),
        ("offset,body", {"columns": "offset"}, "columns", "the schema has offset,body"),
        ("offset", {"columns": ",".join(COLUMNS)}, "columns", "the schema has offset: leave columns out"),
    ],
)
def test_an_option_that_a_schema_contradicts_is_refused(schema, options, option, words):
    with pytest.raises(OptionError, match=words) as caught:
        columns_read(schema, **options)
    assert caught.value.option == option
