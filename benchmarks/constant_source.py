"""The most that a source in Python can give to Spark: rows that stand ready in each task, and are handed over.

What our source takes longer than this one is for fetching, verifying and building columns. The rows are as wide as
those of ``bench_spark``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from flintmq.spark.options import SourceOptions
from flintmq.spark.schema import arrow_schema, columns_of, spark_schema

BODY_BYTES = 200
ROWS_PER_BATCH = 10_000


class Share(InputPartition):
    """What one task hands over: so many record batches."""

    def __init__(self, batches: int) -> None:
        super().__init__(batches)


class ConstantReader(DataSourceReader):
    """All rows, in one task for each partition."""

    def __init__(self, columns: tuple[str, ...], rows: int, partitions: int) -> None:
        self._columns = columns
        self._shares = [Share(rows // partitions // ROWS_PER_BATCH) for _ in range(partitions)]

    def partitions(self) -> list[InputPartition]:
        return list(self._shares)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        batch = record_batch(self._columns)
        for _ in range(partition.value):
            yield batch


class ConstantStreamReader(DataSourceStreamReader):
    """All rows in one micro-batch."""

    def __init__(self, reader: ConstantReader) -> None:
        self._reader = reader

    def initialOffset(self) -> dict[str, int]:
        return {"end": 0}

    def latestOffset(self, *_: object) -> dict[str, int]:
        return {"end": 1}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return self._reader.partitions()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._reader.read(partition)

    def commit(self, end: dict[str, int]) -> None:
        """Nothing is kept."""


class ConstantSource(DataSource):
    """``format("constant")``. Options: ``rows``, ``tasks`` and, if not all, ``columns``."""

    @classmethod
    def name(cls) -> str:
        return "constant"

    def schema(self) -> StructType:
        given = {"columns": self.options["columns"]} if "columns" in self.options else {}
        return spark_schema(SourceOptions.parse({"nsqd": "127.0.0.1:1", "topic": "t", **given}).all_columns)

    def reader(self, schema: StructType) -> ConstantReader:
        return ConstantReader(columns_of(schema), int(self.options["rows"]), int(self.options["tasks"]))

    def streamReader(self, schema: StructType) -> ConstantStreamReader:
        return ConstantStreamReader(self.reader(schema))


def record_batch(columns: tuple[str, ...]) -> pa.RecordBatch:
    """Rows as those of a topic of one partition."""
    random = os.urandom(ROWS_PER_BATCH * BODY_BYTES)
    made: dict[str, Callable[[], list[Any]]] = {
        "topic": lambda: ["bench-0"] * ROWS_PER_BATCH,
        "nsqd": lambda: ["127.0.0.1:41500"] * ROWS_PER_BATCH,
        "log_id": lambda: ["0123456789abcdef"] * ROWS_PER_BATCH,
        "id": lambda: [b"0123456789abcdef"] * ROWS_PER_BATCH,
        "body": lambda: [random[n : n + BODY_BYTES] for n in range(0, len(random), BODY_BYTES)],
    }
    schema = arrow_schema(columns)
    arrays = [
        pa.array(made[field.name](), field.type)
        if field.name in made
        else pa.array(range(ROWS_PER_BATCH), pa.int64()).cast(field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
