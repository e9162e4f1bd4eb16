"""The rows of ``format("nsq")``, in Spark's types and in Arrow's.

The rules of this file: both forms come from one table; importing it needs neither pyspark nor pyarrow.

Source: docs/decisions/0006. ``partition`` is an int, not a smallint: Iceberg has none. Arrow types must be the
very ones Spark derives from its own (``timestamp[us, UTC]``, ``binary``), or it refuses the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flintmq.errors import OptionError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

TYPES = {
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "attempts": "int",
    "id": "binary",
    "internal_id": "bigint",
    "trace_id": "bigint",
    "body": "binary",
    "nsqd": "string",
    "log_id": "string",
    "headers": "map<string,string>",
    "headers_json": "string",
}
COLUMNS = tuple(name for name in TYPES if name not in ("log_id", "headers", "headers_json"))
"""Without headers, which are taken apart one by one, and without the log: who wants them says so."""


def spark_schema(columns: Sequence[str]) -> StructType:
    """Return the schema Spark sees."""
    from pyspark.sql import types as spark

    types = {
        "string": spark.StringType(),
        "int": spark.IntegerType(),
        "bigint": spark.LongType(),
        "timestamp": spark.TimestampType(),
        "binary": spark.BinaryType(),
        "map<string,string>": spark.MapType(spark.StringType(), spark.StringType()),
    }
    return spark.StructType([spark.StructField(name, types[TYPES[name]]) for name in columns])


def arrow_schema(columns: Sequence[str]) -> pa.Schema:
    """Return the schema of the record batches."""
    import pyarrow as pa

    types = {
        "string": pa.string(),
        "int": pa.int32(),
        "bigint": pa.int64(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "binary": pa.binary(),
        "map<string,string>": pa.map_(pa.string(), pa.string()),
    }
    return pa.schema([(name, types[TYPES[name]]) for name in columns])


def columns_of(schema: StructType) -> tuple[str, ...]:
    """Return the columns a user asked for with ``.schema(...)``: any selection of ours, with our types.

    Raises:
        OptionError: a column we do not have, or with another type.
    """
    for field in schema.fields:
        if TYPES.get(field.name) != field.dataType.simpleString():
            given = f"{field.name} {field.dataType.simpleString()}"
            have = ", ".join(f"{name} {type_}" for name, type_ in TYPES.items())
            raise OptionError("schema", given, f"choose from: {have}", "schema of format nsq")
    return tuple(field.name for field in schema.fields)
