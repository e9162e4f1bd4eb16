"""The sink ``nsq``: ``df.write`` and ``df.writeStream`` publish rows.

A task gathers some megabytes of rows, a *segment*, finds the places where they go (:mod:`flintmq.spark.placing`) and
publishes what goes to each place under a name that follows from query, epoch, task and content
(:mod:`flintmq.spark.identity`). nsqd stores of that what it has not, so a task that is run again, an answer that was
lost and a micro-batch that is written again after a crash repeat nothing, as long as the rows come in the same order.
If they do not, they are stored again, and that is logged; nothing that Spark reports as written is ever missing.

With ``delivery=atLeastOnce``, and at nsqds that do not know producers, rows are published with plain commands.

The rules of this file: a writer holds plain data only, as it is pickled to the tasks; what a task dropped, published or
found stored already travels in its commit message; where a segment ends follows from the rows; an error about a row
says which, and of which topic.

Source: docs/decisions/0006, docs/decisions/0027.
"""

# ruff: noqa: N803 - argument names are Spark's

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from zlib import crc32

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from flintmq.client.core.sharding import partition_of
from flintmq.errors import NsqdError, OptionError, PublishRefused
from flintmq.names import is_valid_name
from flintmq.spark.errors import line_first
from flintmq.spark.garbage import spare_what_stays
from flintmq.spark.identity import EPOCH_PROPERTY, NAME_SIZE_MAX, QUERY_ID_PROPERTY, TaskIdentity, query_name
from flintmq.spark.input_end import whole
from flintmq.spark.options import AT_LEAST_ONCE, ONCE, SinkOptions
from flintmq.spark.placing import SINK, Begun, Layout, Place, Placing, begin
from flintmq.spark.publish import NotTaken, Publisher, Publishers
from flintmq.spark.retry import Retries
from flintmq.wire.commands import publish_row

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

SEGMENT_BYTES = 8 << 20  # of bodies, about: what a task gathers before it publishes
SEGMENT_ROWS = 200_000
SEGMENT_TEXT_BYTES = 64 << 20  # of keys, headers and topics, about; above what usual ones have in so many rows
ORDERED_BYTES_MAX = 1 << 30  # of a task's rows with orderBy, which are all in memory
ORDERED_BATCH_ROWS = 10_000

_WHOLE = ("tinyint", "smallint", "int", "bigint")
_TYPES = {
    "body": ("string", "binary"),
    "topic": ("string",),
    "partition": _WHOLE,
    "key": ("string", "binary", *_WHOLE),
    "trace_id": _WHOLE,
    "headers": ("map<string,string>", "string"),
    "headers_json": ("string",),
    "defer_ms": _WHOLE,
}
"""The columns of a row, and the types that each may have."""
_HEADERS = ("headers", "headers_json")
_NAMING = ("topic", "partition", "key", "trace_id")
_TEXTS = ("topic", "key", *_HEADERS)
"""Columns beside the body whose values may be long."""
_ROW = "#row"
"""A column of the task's own: the number of a row in the batch that Spark gave, for who may be refused later."""

log = logging.getLogger("flintmq.spark")


@dataclass
class Published(WriterCommitMessage):
    """The work of one task: messages per topic, bytes of their bodies, rows dropped for their length.

    Attributes:
        repeated: most messages that earlier tries of the task may have stored as well, because rows came in another
            order.
        found: messages that an earlier try had stored, known before they were published again; with ``is_numbered``.
        is_once: whether what is published again is not stored again.
    """

    messages: dict[str, int] = field(default_factory=dict)
    body_bytes: int = 0
    dropped: int = 0
    repeated: int = 0
    found: int = 0
    is_once: bool = True


def check_columns(options: SinkOptions, schema: StructType) -> None:
    """See that a row can be published as it is.

    Raises:
        OptionError: a column is missing, unknown, of another type, or does not go with another one.
    """
    types = {f.name: f.dataType.simpleString() for f in schema.fields}
    have = ", ".join(f"{name} {kind}" for name, kind in types.items())
    if types.get("body") not in _TYPES["body"]:
        raise OptionError("columns", have, "there must be a column body of type binary or string", SINK)
    unused = [name for name in types if name not in _TYPES and name not in options.order_by]
    if unused:
        raise OptionError(
            "columns",
            ", ".join(unused),
            f"a message is made of {', '.join(_TYPES)}, these would be lost: leave them out with select('body'), or "
            "put them into it with selectExpr('to_json(struct(*)) AS body')",
            SINK,
        )
    for name, kind in types.items():
        if name in _TYPES and kind not in _TYPES[name]:
            raise OptionError("columns", f"{name} {kind}", f"{name} has to be {' or '.join(_TYPES[name])}", SINK)
    if not options.topic and "topic" not in types:
        raise OptionError("topic", "", "give the option topic, or a column topic of type string", SINK)
    if "partition" in types and "key" in types:
        raise OptionError("columns", "partition, key", "give one of them, each says where a row goes", SINK)
    if "headers_json" in types and types.get("headers") == "string":
        allowed = "give one of them; beside headers_json, headers is a map<string,string> that is put over it"
        raise OptionError("columns", "headers string, headers_json", allowed, SINK)
    if "defer_ms" in types and not types.keys().isdisjoint({*_HEADERS, "trace_id"}):
        raise OptionError("columns", have, "nsqd keeps no headers or trace id with a delay: leave out defer_ms", SINK)
    if options.sharding == "java" and types.get("key") == "binary":
        raise OptionError("columns", "key binary", "sharding=java is for text and numbers", SINK)
    if options.sharding == "mod" and types.get("key") in ("string", "binary"):
        raise OptionError("columns", f"key {types['key']}", "sharding=mod is for numbers", SINK)
    for name in options.order_by:
        if types.get(name, "map").startswith(("map", "array", "struct")):
            raise OptionError("orderBy", name, f"name columns that can be sorted by; there is {have}", SINK)


class RowWriter:
    """Publishes the rows of one task.

    Args:
        schema: what Spark writes.
        is_numbered: the name of a task stands for its rows and their order, as that of a file does. Then they are
            numbered through, published as they come, and a task that is run again goes on where it was, also one that
            was given only the first of its rows.
        begun: what the driver knew of the nsqds.

    Raises:
        OptionError: the columns do not fit.
    """

    def __init__(
        self, options: SinkOptions, schema: StructType, is_numbered: bool = False, begun: Begun | None = None
    ) -> None:
        check_columns(options, schema)
        self._options = options
        self._is_numbered = is_numbered
        self._begun = begun

    def write(
        self, batches: Iterator[pa.RecordBatch], identity: TaskIdentity, done: Published | None = None
    ) -> Published:
        """Publish all rows.

        Args:
            done: counted in while it goes on, for those who look.

        Raises:
            PublishRefused: a row cannot be published, or nsqd refused one.
            FlintError: no nsqd took the messages.
        """
        spare_what_stays()
        task = _Task(self._options, identity, self._is_numbered, done, self._begun)
        try:
            batches = whole(batches)  # else what a cut left of them gets another name than all of them get
            for batch in self._ordered(batches) if self._options.order_by else batches:
                if batch.num_rows:
                    task.gather(batch)
            return task.finish()
        finally:
            task.close()

    def _ordered(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Sort all rows of the task, those that are equal by their bodies."""
        import pyarrow as pa

        rows, size = [], 0
        for batch in batches:
            rows.append(batch)
            size += batch.nbytes
            if size > ORDERED_BYTES_MAX:
                allowed = f"at most {ORDERED_BYTES_MAX >> 20} MiB of rows in a task: repartition into more tasks"
                raise OptionError("orderBy", ",".join(self._options.order_by), allowed, SINK)
        if rows:
            names = dict.fromkeys((*self._options.order_by, "body"))
            table = pa.Table.from_batches(rows).sort_by([(name, "ascending") for name in names])
            yield from table.combine_chunks().to_batches(max_chunksize=ORDERED_BATCH_ROWS)


class _Task:
    """One attempt of one task.

    Attributes:
        done: what it did.
    """

    def __init__(
        self,
        options: SinkOptions,
        identity: TaskIdentity,
        is_numbered: bool,
        done: Published | None,
        begun: Begun | None,
    ) -> None:
        self.done = done if done is not None else Published()
        self.done.is_once = options.delivery != AT_LEAST_ONCE
        self._is_numbered = is_numbered
        self._sequences: dict[Place, int] = {}
        self._options = options
        self._identity = identity
        self._placing = Placing(options, identity, begun=begun)
        self._publishers = Publishers(self._placing, options)
        self._plain: Publisher | None = None  # for nsqds of others
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_bytes = self._gathered_rows = self._gathered_text_bytes = 0
        self._segment = 0
        self._names: set[str] = set()

    def gather(self, batch: pa.RecordBatch) -> None:
        """Take rows, and publish when they are a segment."""
        from flintmq.spark.encode import text_bytes

        batch = self._checked(batch)
        if not batch.num_rows:
            return
        self._gathered.append(batch)
        self._gathered_rows += batch.num_rows
        # not into the bytes of bodies: what is published again after an upgrade has to end where it ended before
        texts = [batch.column(name) for name in batch.schema.names if name in _TEXTS]
        self._gathered_text_bytes += sum(map(text_bytes, texts))
        is_full = (
            self._gathered_bytes >= SEGMENT_BYTES
            or self._gathered_rows >= SEGMENT_ROWS
            or self._gathered_text_bytes >= SEGMENT_TEXT_BYTES
        )
        if is_full or self._is_numbered:
            self._publish()

    def finish(self) -> Published:
        """Publish the rest, and wait until all is stored."""
        if self._gathered:
            self._publish()
        self._publishers.drain()
        if self._plain is not None:
            self._plain.finish()
        done, options = self.done, self._options
        if done.dropped:
            log.warning("%d rows dropped: longer than maxMessageSize=%d", done.dropped, options.max_message_size)
        if not self._is_numbered:
            done.repeated = sum(last for name, last in self._placing.known.items() if name not in self._names)
        return done

    def close(self) -> None:
        self._publishers.close()
        if self._plain is not None:
            self._plain.close()

    def _checked(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows with bodies as bytes, without those that are dropped for their length."""
        import pyarrow as pa
        import pyarrow.compute as pc

        from flintmq.spark.encode import as_binary, body_sizes

        options = self._options
        columns = {name: batch.column(name) for name in batch.schema.names if name in _TYPES}
        bodies = columns["body"] = as_binary(columns["body"])
        if bodies.null_count:
            where = self._place(batch, pc.index(bodies.is_null(), pa.scalar(True)).as_py())
            raise PublishRefused(
                "E_BAD_MESSAGE", f"{bodies.null_count} rows have a null body, {where}; filter them out"
            )
        sizes = body_sizes(bodies)
        if not sizes.all():
            where = self._place(batch, int(sizes.argmin()))
            raise PublishRefused(
                "E_BAD_MESSAGE", f"a row has an empty body, which nsqd refuses, {where}; filter it out"
            )
        if "defer_ms" in columns:
            self._check_delays(batch)
        if options.topic:
            columns.pop("topic", None)
        else:
            self._check_topics(batch)
        if not columns.keys().isdisjoint(_HEADERS):
            # they are looked into when they are published, and a row is refused then
            columns[_ROW] = pa.array(range(batch.num_rows), pa.int32())
        rows = pa.RecordBatch.from_pydict(columns)
        limit = options.max_message_size
        if len(sizes) and int(sizes.max()) > limit:
            if options.oversize == "fail":
                raise PublishRefused(
                    "E_BAD_MESSAGE",
                    f"a body has {int(sizes.max())} bytes, maxMessageSize={limit} (nsqd's --max-msg-size), "
                    f"{self._place(batch, int(sizes.argmax()))}; "
                    "shorten it, raise both limits, or set oversize=drop",
                )
            rows = rows.filter(pc.less_equal(pc.binary_length(bodies), limit))
            self.done.dropped += batch.num_rows - rows.num_rows
            sizes = body_sizes(rows.column("body"))
        self._gathered_bytes += int(sizes.sum())
        self.done.body_bytes += int(sizes.sum())
        return rows

    def _check_delays(self, batch: pa.RecordBatch) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        delays = batch.column("defer_ms")
        is_bad = pc.fill_null(pc.less(delays, pa.scalar(0, delays.type)), True)
        first = pc.index(is_bad, pa.scalar(True)).as_py()
        if first >= 0:
            found = delays[first].as_py()
            what = f"defer_ms is {'null' if found is None else found} in a row, {self._place(batch, first)}"
            raise PublishRefused("E_INVALID", f"{what}; 0 is for at once")

    def _check_topics(self, batch: pa.RecordBatch) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        topics = batch.column("topic")
        for topic in pc.unique(topics).to_pylist():
            if topic is None or not is_valid_name(topic):
                is_bad = topics.is_null() if topic is None else pc.fill_null(pc.equal(topics, topic), False)
                where = self._place(batch, pc.index(is_bad, pa.scalar(True)).as_py())
                what = f"the column topic has {topic!r}, which is no topic name, {where}"
                raise PublishRefused("E_BAD_TOPIC", what)

    def _place(self, batch: pa.RecordBatch, index: int) -> str:
        """Name a row by the columns that say what it is, as far as it has some."""
        names = [name for name in batch.schema.names if name in _NAMING or name in self._options.order_by]
        told = ", ".join(f"{name} {str(batch.column(name)[index].as_py())[:80]}" for name in names)
        topic = f" for topic {self._options.topic!r}" if self._options.topic else ""
        row = batch.column(_ROW)[index].as_py() if _ROW in batch.schema.names else index
        return f"row {row} of its batch" + (f" ({told})" if told else "") + topic

    def _publish(self) -> None:
        """Publish what was gathered as one segment; the last of it may be answered later."""
        segments = _combined(self._gathered)
        self._gathered.clear()
        self._gathered_bytes = self._gathered_rows = self._gathered_text_bytes = 0
        for rows in segments:
            self._publish_segment(rows)

    def _publish_segment(self, rows: pa.RecordBatch) -> None:
        import pyarrow.compute as pc

        if self._options.topic:
            self._publish_topic(self._options.topic, rows)
        else:
            topics = rows.column("topic")
            for topic in sorted(pc.unique(topics).to_pylist()):
                self._publish_topic(topic, rows.filter(pc.equal(topics, topic)))
        self._segment += 1

    def _publish_topic(self, topic: str, rows: pa.RecordBatch) -> None:
        names = set(rows.schema.names) - {"topic", "body", _ROW}
        is_plain = self._options.delivery == AT_LEAST_ONCE and not names
        retries = Retries(self._options.retries)
        while True:
            layout = None if is_plain else self._placing.of(topic)
            try:
                if layout is None:
                    self._publish_plain(topic, rows, names, is_plain)
                else:
                    self._publish_to(layout, rows)
                break
            except NotTaken as failed:  # its partitions decide where rows go, and how their producers are called
                self._placing.forget(topic)
                retries.failed(failed.error, f"publishing to topic {topic}, which was not there,")
        self.done.messages[topic] = self.done.messages.get(topic, 0) + rows.num_rows

    def _publish_to(self, layout: Layout, rows: pa.RecordBatch) -> None:
        self.done.is_once &= layout.is_certain
        for place, address, share in self._shares(layout, rows):
            self._publish_share(layout, place, address, share)

    def _publish_plain(self, topic: str, rows: pa.RecordBatch, names: set[str], is_wanted: bool) -> None:
        from flintmq.spark.encode import encode_bodies

        options = self._options
        if not is_wanted:
            where = ",".join(options.nsqd or options.lookupd)
            if options.delivery == ONCE:
                allowed = f"an nsqd of {where} is not FlintMQ's, and would store again what is published again"
                raise OptionError("delivery", ONCE, allowed, SINK)
            if names:
                allowed = f"only FlintMQ's nsqd takes them, and one of {where} is another: leave them out"
                raise OptionError("columns", ", ".join(sorted(names)), allowed, SINK)
            if self.done.is_once:
                log.warning("an nsqd of %s is not FlintMQ's: rows are published at least once", where)
        self.done.is_once = False
        if self._plain is None:
            self._plain = Publisher(self._placing.addresses(topic), options)
        for count, messages in encode_bodies(rows.column("body")).slices(options.batch_messages, options.batch_bytes):
            self._plain.publish(topic, count, messages)

    def _shares(self, layout: Layout, rows: pa.RecordBatch) -> Iterator[tuple[Place, str, pa.RecordBatch]]:
        """Part rows by the places that they go to, each with its address."""
        import numpy as np
        import pyarrow as pa

        if layout.is_plain:
            for name in rows.schema.names:
                # partition 0 is all that there is; of a key's rows nobody could say that they come in order
                if (name == "partition" and any(rows.column(name).to_pylist())) or (
                    name == "key" and rows.column(name).null_count < rows.num_rows
                ):
                    what = (
                        f"topic {layout.topic} has no partitions: leave out the column {name}, or create it with some"
                    )
                    raise PublishRefused("E_BAD_PARTITION", what)
        if not layout.partition_count:
            yield Place(layout.topic, layout.log), layout.address, rows
            return
        chosen = self._partitions(layout, rows)
        for partition in np.unique(chosen).tolist():
            address = layout.leaders.get(partition)
            if address is None:
                what = f"the column partition has {partition}, topic {layout.topic} has 0 to {len(layout.leaders) - 1}"
                raise PublishRefused("E_BAD_PARTITION", what)
            mask = chosen == partition
            share = rows if mask.all() else rows.filter(pa.array(mask))
            yield Place(layout.topic, partition), address, share

    def _partitions(self, layout: Layout, rows: pa.RecordBatch) -> npt.NDArray[np.int64]:
        return partitions_of(rows, layout.partition_count, self._identity, self._options.sharding)

    def _publish_share(self, layout: Layout, place: Place, address: str, rows: pa.RecordBatch) -> None:
        from flintmq.spark.encode import HeadersRefused, encode_bodies, header_fronts, trace_fronts

        options = self._options
        sequence, producer_id = 1, None
        if self._is_numbered and options.delivery != AT_LEAST_ONCE:
            # in place of a segment: each partition counts for itself
            producer_id = self._identity.producer_id(layout.partition_count, place.partition or 0, ())
            sequence = self._sequences.get(place, 1)
            self._sequences[place] = sequence + rows.num_rows
            known = min(max(0, layout.known.get(producer_id, 0) + 1 - sequence), rows.num_rows)
            self.done.found += known
            rows, sequence = rows.slice(known), sequence + known
            if not rows.num_rows:
                return
        columns = {name: rows.column(name) for name in rows.schema.names}
        is_once = options.delivery != AT_LEAST_ONCE
        headers, texts, trace_ids, delays = (columns.get(name) for name in (*_HEADERS, "trace_id", "defer_ms"))
        if headers is None:
            headers, texts = texts, None
        fronts = None
        try:
            if headers is not None:
                fronts = header_fronts(headers, trace_ids, texts)
            elif trace_ids is not None:
                fronts = trace_fronts(trace_ids)
        except HeadersRefused as error:
            where = self._place(rows, error.index)
            raise PublishRefused("E_BAD_EXT", f"{error}, {where}") from error
        is_traced = headers is None and trace_ids is not None
        encoded = encode_bodies(columns["body"], fronts)
        row = publish_row(False, delays is not None, is_traced, headers is not None, is_once)
        if is_once and not self._is_numbered:
            said: list[bytes | memoryview] = [encoded.data]
            if delays is not None:
                said.append(repr(delays.to_pylist()).encode())
            producer_id = self._identity.producer_id(layout.partition_count, self._segment, said)
        if producer_id is not None:
            self._names.add(producer_id)
        for defer_ms, first, end in _runs(delays, rows.num_rows):
            part = encoded.part(first, end)
            for count, messages in part.slices(options.batch_messages, options.batch_bytes):
                values = row.line_values((place.topic, place.partition, defer_ms, producer_id, sequence))
                line = row.line(*values)
                if layout.is_new:
                    self._publish_first(layout, place, address, line, count, messages)
                else:
                    self._publishers.publish(place, address, line, count, messages)
                sequence += count

    def _publish_first(
        self, layout: Layout, place: Place, address: str, line: bytes, count: int, messages: memoryview
    ) -> None:
        try:
            self._publishers.publish_first(place, address, line, count, messages)
        except NotTaken:
            self._sequences.pop(place, None)  # the rows are counted anew, for each place that there is then
            raise
        layout.is_new = False


def partitions_of(rows: pa.RecordBatch, count: int, identity: TaskIdentity, sharding: str) -> npt.NDArray[np.int64]:
    """Return the partition of each row of a topic that has ``count`` of them."""
    import numpy as np
    import pyarrow.compute as pc

    own = identity.turn % count
    if "partition" in rows.schema.names:
        numbers = pc.fill_null(rows.column("partition").cast("int64"), own)
        return np.asarray(numbers.to_numpy(zero_copy_only=False), np.int64)
    if "key" in rows.schema.names:
        keys = rows.column("key").dictionary_encode(null_encoding="encode")
        found = [own if key is None else partition_of(key, count, sharding) for key in keys.dictionary.to_pylist()]
        places: npt.NDArray[np.int64] = np.asarray(found, np.int64)[keys.indices.to_numpy(zero_copy_only=False)]
        return places
    return np.full(rows.num_rows, own, np.int64)


def _combined(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Make one batch of several, or more where a column has more text than one array of Arrow takes, 2 GiB."""
    import pyarrow as pa

    found: list[pa.RecordBatch] = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return found


def _runs(delays: pa.Array | None, count: int) -> Iterator[tuple[int, int, int]]:
    """Cut rows where their delay changes: the delay, first row, end."""
    if delays is None:
        yield 0, 0, count
        return
    import numpy as np

    values = delays.to_numpy(zero_copy_only=False)
    cuts = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), count]
    for first, end in pairwise(cuts):
        yield int(values[first]), first, end


def _report(messages: list[WriterCommitMessage | None], what: str) -> None:
    done = [message for message in messages if isinstance(message, Published)]
    count = sum(sum(message.messages.values()) for message in done)
    dropped = sum(message.dropped for message in done)
    repeated = sum(message.repeated for message in done)
    how = "once" if all(message.is_once for message in done) else "at least once"
    size = sum(message.body_bytes for message in done)
    log.info("%s: %d messages, %d bytes published %s", what, count, size, how)
    if dropped:
        log.warning("%s: %d rows dropped for their length", what, dropped)
    if repeated:
        log.warning(
            "%s: at least once: up to %d messages of an earlier try are stored as well, because rows came in another "
            "order; set orderBy to columns that order them",
            what,
            repeated,
        )


def _task_number() -> int:
    context = TaskContext.get()
    return context.partitionId() if context is not None else 0


class NsqWriter(DataSourceArrowWriter):
    """``df.write.format("nsq").mode("append")``."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise OptionError("mode", "overwrite", "a topic can only be appended to", SINK)
        self._rows = RowWriter(options, schema, begun=begin(options, not options.write_id))
        # made on the driver, so that the attempts of a task have the same; another run has another
        self._name = options.write_id or os.urandom(NAME_SIZE_MAX // 2).hex()
        self._offset = crc32(self._name.encode())

    @line_first
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._rows.write(iterator, TaskIdentity(self._name, 0, _task_number(), self._offset))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        _report(messages, "write")


class NsqStreamWriter(DataSourceStreamArrowWriter):
    """``df.writeStream.format("nsq")``."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise OptionError("outputMode", "complete", "a topic can only be appended to", SINK)
        if options.write_id:
            raise OptionError("writeId", options.write_id, "it is for df.write; a stream's query has an id", SINK)
        # Spark makes a writer for each micro-batch; it may be that a driver before this one has begun with it
        self._rows = RowWriter(options, schema, begun=begin(options, False))

    @line_first
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context: Any = TaskContext.get()
        query_id, epoch = (context.getLocalProperty(name) for name in (QUERY_ID_PROPERTY, EPOCH_PROPERTY))
        if not query_id or not epoch:
            raise NsqdError("E_INVALID", "this Spark does not tell a task its query and micro-batch; 4.2 and 4.3 do")
        return self._rows.write(iterator, TaskIdentity(query_name(query_id), int(epoch), _task_number()))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        _report(messages, f"micro-batch {batchId}")
