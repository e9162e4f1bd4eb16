"""The sink ``nsq``: ``df.write`` and ``df.writeStream`` publish rows with MPUB.

At least once: a task that fails is run again by Spark from its first row, an MPUB whose answer was lost is sent again,
and a micro-batch that was not committed is written again after a restart. Nothing that Spark reports as written is
missing. Rows of one task and topic keep their order as long as nothing fails.

The rules of this file: a writer holds plain data only, as it is pickled to the tasks; what a task dropped or published
travels in its commit message.

Source: docs/decisions/0006.
"""

# ruff: noqa: N803 - argument names are Spark's

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, StringType, StructType

from flintmq.errors import NoNsqd, OptionError, PublishRefused
from flintmq.names import is_valid_name
from flintmq.spark.discovery import all_nsqds
from flintmq.spark.errors import line_first
from flintmq.spark.options import SinkOptions
from flintmq.spark.publish import Publisher

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("flintmq.spark")


@dataclass
class Published(WriterCommitMessage):
    """The work of one task: messages per topic, bytes of their bodies, rows dropped for their length."""

    messages: dict[str, int] = field(default_factory=dict)
    body_bytes: int = 0
    dropped: int = 0


class RowWriter:
    """Publishes the rows of one task.

    Args:
        schema: what Spark writes; must have ``body``, and ``topic`` unless the option names one.

    Raises:
        OptionError: the columns do not fit.
    """

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        self._options = options
        types = {f.name: f.dataType for f in schema.fields}
        if not isinstance(types.get("body"), BinaryType | StringType):
            have = ", ".join(f"{f.name} {f.dataType.simpleString()}" for f in schema.fields)
            raise OptionError("columns", have, "there must be a column body of type binary or string", "sink nsq")
        unused = [name for name in types if name not in ("body", "topic")]
        if unused:
            raise OptionError(
                "columns",
                ", ".join(unused),
                "a message is made of body (and topic says where it goes), these would be lost: leave them out with "
                "select('body'), or put them into it with selectExpr('to_json(struct(*)) AS body')",
                "sink nsq",
            )
        if not options.topic and not isinstance(types.get("topic"), StringType):
            raise OptionError("topic", "", "give the option topic, or a column topic of type string", "sink nsq")

    def write(self, batches: Iterator[pa.RecordBatch]) -> Published:
        """Publish all rows.

        Raises:
            PublishRefused: a row cannot be published, or nsqd refused one.
            FlintError: no nsqd took the messages.
        """
        done = Published()
        publisher = Publisher(self._addresses(), self._options)
        try:
            for batch in batches:
                if batch.num_rows:
                    self._write_batch(batch, publisher, done)
            publisher.finish()
        finally:
            publisher.close()
        if done.dropped:
            log.warning("%d rows dropped: longer than maxMessageSize=%d", done.dropped, self._options.max_message_size)
        return done

    def _addresses(self) -> list[str]:
        """Return the nsqds, each task beginning with another one."""
        options = self._options
        addresses = list(options.nsqd) or all_nsqds(options.lookupd, options.connect_timeout, options.link)
        if not addresses:
            raise NoNsqd(options.topic, f"nsqlookupd {','.join(options.lookupd)} knows none")
        context = TaskContext.get()
        first = (context.partitionId() if context is not None else 0) % len(addresses)
        return addresses[first:] + addresses[:first]

    def _write_batch(self, batch: pa.RecordBatch, publisher: Publisher, done: Published) -> None:
        from flintmq.spark.encode import as_binary

        bodies = as_binary(batch.column("body"))
        if bodies.null_count:
            raise PublishRefused("E_BAD_MESSAGE", f"{bodies.null_count} rows have a null body; filter them out")
        if self._options.topic:
            self._write_topic(self._options.topic, bodies, publisher, done)
            return
        import pyarrow.compute as pc

        topics = batch.column("topic")
        for topic in pc.unique(topics).to_pylist():
            if topic is None or not is_valid_name(topic):
                raise PublishRefused("E_BAD_TOPIC", f"the column topic has {topic!r}, which is no topic name")
            self._write_topic(topic, bodies.filter(pc.equal(topics, topic)), publisher, done)

    def _write_topic(self, topic: str, bodies: pa.Array, publisher: Publisher, done: Published) -> None:
        from flintmq.spark.encode import body_sizes, encode_bodies

        options = self._options
        sizes = body_sizes(bodies)
        if not sizes.all():
            raise PublishRefused("E_BAD_MESSAGE", "a row has an empty body, which nsqd refuses; filter it out")
        if int(sizes.max()) > options.max_message_size:
            bodies = self._without_oversize(bodies, int(sizes.max()), done)
            if not len(bodies):
                return
            sizes = body_sizes(bodies)
        for count, messages in encode_bodies(bodies).slices(options.batch_messages, options.batch_bytes):
            publisher.publish(topic, count, messages)
        done.messages[topic] = done.messages.get(topic, 0) + len(bodies)
        done.body_bytes += int(sizes.sum())

    def _without_oversize(self, bodies: pa.Array, longest: int, done: Published) -> pa.Array:
        import pyarrow.compute as pc

        limit = self._options.max_message_size
        if self._options.oversize == "fail":
            raise PublishRefused(
                "E_BAD_MESSAGE",
                f"a body has {longest} bytes, maxMessageSize={limit} (nsqd's --max-msg-size); "
                "shorten it, raise both limits, or set oversize=drop",
            )
        kept = bodies.filter(pc.less_equal(pc.binary_length(bodies), limit))
        done.dropped += len(bodies) - len(kept)
        return kept


def _report(messages: list[WriterCommitMessage | None], what: str) -> None:
    done = [message for message in messages if isinstance(message, Published)]
    count = sum(sum(message.messages.values()) for message in done)
    dropped = sum(message.dropped for message in done)
    log.info("%s: %d messages, %d bytes published", what, count, sum(message.body_bytes for message in done))
    if dropped:
        log.warning("%s: %d rows dropped for their length", what, dropped)


class NsqWriter(DataSourceArrowWriter):
    """``df.write.format("nsq").mode("append")``."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise OptionError("mode", "overwrite", "a topic can only be appended to", "sink nsq")
        self._rows = RowWriter(options, schema)

    @line_first
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._rows.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        _report(messages, "write")


class NsqStreamWriter(DataSourceStreamArrowWriter):
    """``df.writeStream.format("nsq")``."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise OptionError("outputMode", "complete", "a topic can only be appended to", "sink nsq")
        self._rows = RowWriter(options, schema)

    @line_first
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._rows.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        _report(messages, f"micro-batch {batchId}")
