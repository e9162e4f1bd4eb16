"""The data source ``nsq``: hands out readers and writers.

The rules of this file: nothing is opened here; Spark builds the source in several processes and pickles it. What only
writes is imported to write: Spark starts a Python process for each stream that reads.

Source: docs/decisions/0006.
"""

# ruff: noqa: N802 - method names are Spark's

from __future__ import annotations

from dataclasses import replace

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
)
from pyspark.sql.types import StructType

from flintmq.errors import OptionError
from flintmq.spark.batch_reader import NsqReader
from flintmq.spark.errors import SOURCE, line_first
from flintmq.spark.garbage import spare_what_stays
from flintmq.spark.options import SinkOptions, SourceOptions
from flintmq.spark.schema import columns_of, spark_schema
from flintmq.spark.spooled import AnyStreamReader


class NsqDataSource(DataSource):
    """``format("nsq")``: topics of FlintMQ as tables and streams.

    Required options: ``nsqd`` or ``lookupd``; ``topic`` (or ``topics``, ``topicPattern``) for reading. All others:
    docs/spark.md. Examples::

        spark.read.format("nsq").option("nsqd", "127.0.0.1:4150").option("topic", "flights").load()
        df.write.format("nsq").option("nsqd", "127.0.0.1:4150").option("topic", "t").mode("append").save()
    """

    @classmethod
    def name(cls) -> str:
        return "nsq"

    @line_first
    def schema(self) -> StructType:
        spare_what_stays()
        return spark_schema(SourceOptions.parse(self.options).all_columns)

    @line_first
    def reader(self, schema: StructType) -> DataSourceReader:
        return NsqReader(self._source_options(schema))

    @line_first
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return AnyStreamReader(self._source_options(schema))

    @line_first
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        from flintmq.spark.sink import NsqWriter

        return NsqWriter(SinkOptions.parse(self.options), schema, overwrite)

    @line_first
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        from flintmq.spark.sink import NsqStreamWriter

        return NsqStreamWriter(SinkOptions.parse(self.options), schema, overwrite)

    def _source_options(self, schema: StructType) -> SourceOptions:
        """Return the options with the columns of a schema, which is a user's, or what :meth:`schema` returned."""
        spare_what_stays()
        options, columns = SourceOptions.parse(self.options), columns_of(schema)
        shown = ",".join(columns)
        if options.include_headers and "headers" not in columns:
            allowed = f"the schema has {shown}: add headers map<string,string> to it, or leave includeHeaders out"
            raise OptionError("includeHeaders", "true", allowed, SOURCE)
        names_columns = any(name.lower().removeprefix("kafka.") == "columns" for name in self.options)
        if names_columns and {*options.all_columns} != {*columns}:
            allowed = f"the schema has {shown}: leave columns out, or name the same"
            raise OptionError("columns", ",".join(options.columns), allowed, SOURCE)
        return replace(options, columns=columns)
