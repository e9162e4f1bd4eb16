"""The data source ``nsq``: reads partition logs by sequence, in batches and as a stream.

What Spark does, and what follows from it (all observed on 4.3, design/spark.md 0 to 3):

- It builds several readers in several processes and pickles them: ``__init__`` opens nothing and keeps plain data.
- It asks for the initial offset twice in a fresh run, and again in every restart until the first micro-batch is
  committed: ``latest`` therefore needs a position that nsqd keeps (a channel), or it would skip messages.
- It repeats a micro-batch that was planned and not committed, from the same two offsets: plan and data follow from
  these alone, and the identity of each log is part of them.
- It calls ``commit(end)`` one micro-batch late and never for the last one, and may repeat it: the cursor of the channel
  may only lag behind, and moving it is idempotent. Exactly-once rests on Spark's checkpoint, never on the cursor.
- It never calls ``stop()``: nothing depends on it.
- It compares offsets as text: their keys are sorted.

Source: design/spark.md 2 and 10.
"""

# ruff: noqa: N802 - method names are Spark's

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from flintmq.clock import Clock, SystemClock
from flintmq.errors import FlintError, NsqdError
from flintmq.spark.broker import TOPIC_NOT_EXIST, PartitionLog
from flintmq.spark.errors import DataLost
from flintmq.spark.offsets import (
    EARLIEST_SEQUENCE,
    FIRST_SEQUENCE,
    LATEST_SEQUENCE,
    GivenOffsets,
    Offsets,
    PartitionKey,
    Position,
    from_json,
    parse_given,
    to_json,
)
from flintmq.spark.options import CURSOR, EARLIEST, LATEST, SinkOptions, SourceOptions
from flintmq.spark.plan import Backlog, FetchRange, admit, plan_tasks
from flintmq.spark.pushdown import Bounds, bounds_of
from flintmq.spark.schema import columns_of, spark_schema
from flintmq.spark.survey import Survey, Surveyor

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("flintmq.spark")


@dataclass(frozen=True)
class FetchTask(InputPartition):
    """What one Spark task reads."""

    ranges: tuple[FetchRange, ...]


def _read(task: InputPartition, options: SourceOptions) -> Iterator[pa.RecordBatch]:
    from flintmq.spark.fetch import RangeReader

    if isinstance(task, FetchTask):  # Spark sends a plain InputPartition when there is nothing to read
        for wanted in task.ranges:
            yield from RangeReader(wanted, options).record_batches()


def _tasks(ranges: Iterable[FetchRange], options: SourceOptions) -> list[FetchTask]:
    return [FetchTask(task) for task in plan_tasks(ranges, options.min_partitions, options.max_messages_per_task)]


class StartingPoints:
    """Where reading starts: the options, applied to what nsqd has."""

    def __init__(self, options: SourceOptions, surveyor: Surveyor) -> None:
        self._options = options
        self._surveyor = surveyor

    def find(self, survey: Survey) -> Offsets:
        """The starting position in every log of a survey that was asked for ``startingTimestamp``."""
        options = self._options
        given: GivenOffsets | None = None
        if options.starting_timestamp is None and options.starting_offsets not in (EARLIEST, LATEST, CURSOR):
            given = parse_given("startingOffsets", options.starting_offsets)
        return {
            key: Position(self._sequence(key, entry, given), entry.log_id) for key, entry in sorted(survey.logs.items())
        }

    def _sequence(self, key: PartitionKey, entry: PartitionLog, given: GivenOffsets | None) -> int:
        options = self._options
        if options.starting_timestamp is not None:
            return self._held(key, entry.end if entry.at is None else entry.at)
        if given is None:
            wanted = {EARLIEST: EARLIEST_SEQUENCE, LATEST: LATEST_SEQUENCE}.get(options.starting_offsets)
            if wanted is None:  # cursor; a channel that is new gets the whole log, as the first channel of NSQ does
                return self._surveyor.move_cursor(key, EARLIEST_SEQUENCE)
        else:
            wanted = given.sequence(key)
            log_id = given.log_id(key)
            if wanted is not None and log_id is not None and log_id != entry.log_id and wanted >= 0:
                if options.fail_on_data_loss:
                    raise DataLost(key.topic, key.label, wanted, None, "the topic was deleted and created again")
                wanted = EARLIEST_SEQUENCE
        if wanted is None or wanted == EARLIEST_SEQUENCE:
            if options.channel:
                self._surveyor.move_cursor(key, EARLIEST_SEQUENCE)
            return entry.start
        if wanted == LATEST_SEQUENCE:
            return self._surveyor.move_cursor(key, LATEST_SEQUENCE) if options.channel else entry.end
        return self._held(key, max(wanted, FIRST_SEQUENCE))

    def _held(self, key: PartitionKey, sequence: int) -> int:
        """Make the channel keep what is read from here on."""
        if self._options.channel:
            self._surveyor.move_cursor(key, sequence)
        return sequence


class NsqReader(DataSourceReader):
    """Reads what there is between two positions, once."""

    def __init__(self, options: SourceOptions) -> None:
        options.check_batch()
        self._options = options
        self._bounds = Bounds()

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        surveyor = Surveyor(options)
        survey = surveyor.look(timestamp_ns=options.starting_timestamp, is_waiting=True)
        for topic in options.named_topics:
            if not any(key.topic == topic for key in survey.logs):
                where = ",".join(options.nsqd or options.lookupd)
                raise NsqdError(TOPIC_NOT_EXIST, f"no nsqd of {where} has topic {topic!r}")
        starts = StartingPoints(options, surveyor).find(survey)
        ends = self._ends(surveyor, survey)
        ranges = [self._range(key, starts[key], ends[key], survey.logs[key]) for key in starts]
        return _tasks(self._within_bounds(ranges, surveyor), options)

    def _within_bounds(self, ranges: list[FetchRange], surveyor: Surveyor) -> Iterator[FetchRange]:
        bounds = self._bounds
        since: dict[PartitionKey, PartitionLog] = {}
        if bounds.timestamp_min_ns is not None:
            since = surveyor.look([r.key for r in ranges], bounds.timestamp_min_ns, is_waiting=True).logs
        for wanted in ranges:
            if bounds.admits(wanted.key):
                start, end = bounds.clip(wanted)
                at = since[wanted.key].at if wanted.key in since else None
                yield replace(wanted, start=max(start, at or start), end=end)

    def _ends(self, surveyor: Surveyor, survey: Survey) -> dict[PartitionKey, int]:
        options = self._options
        if options.ending_timestamp is not None:
            late = surveyor.look(survey.logs, options.ending_timestamp, is_waiting=True)
            found = {key: late.logs.get(key, entry) for key, entry in survey.logs.items()}
            return {key: entry.end if entry.at is None else entry.at for key, entry in found.items()}
        ends = {key: entry.end for key, entry in survey.logs.items()}
        if options.ending_offsets != LATEST:
            given = parse_given("endingOffsets", options.ending_offsets)
            for key in ends:
                wanted = given.sequence(key)
                if wanted is not None and wanted >= 0:
                    ends[key] = wanted
        return ends

    def _range(self, key: PartitionKey, start: Position, end: int, entry: PartitionLog) -> FetchRange:
        first, last = start.sequence, end
        if first < entry.start:
            self._lose(key, first, min(entry.start, last), f"retention has removed everything below {entry.start}")
            first = entry.start
        if last > entry.end:
            self._lose(key, max(first, entry.end), last, f"the log ends at {entry.end}")
            last = entry.end
        return FetchRange(*key, first, max(first, last), start.log_id)

    def _lose(self, key: PartitionKey, start: int, end: int, reason: str) -> None:
        if start >= end:
            return
        lost = DataLost(key.topic, key.label, start, end, reason)
        if self._options.fail_on_data_loss:
            raise lost
        log.warning("%s", lost)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(partition, self._options)


class NsqPushdownReader(NsqReader):
    """:class:`NsqReader` with option ``pushdown``; apart, as Spark refuses ``pushFilters`` where its setting is off."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._bounds = bounds_of(filters)
        return filters  # Spark applies them all again


class NsqStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches on the driver and reads them on executors."""

    def __init__(self, options: SourceOptions, clock: Clock | None = None, surveyor: Surveyor | None = None) -> None:
        options.check_stream()
        self._options = options
        self._clock = clock or SystemClock()
        self._surveyor = surveyor or Surveyor(options, self._clock)
        self._initial: Offsets | None = None
        self._target: Survey | None = None
        self._last_survey: Survey | None = None
        self._behind_since_ns: dict[PartitionKey, int] = {}
        self._committed: dict[PartitionKey, int] = {}
        self._waiting_since_ns = self._clock.monotonic_ns()

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.max_messages_per_trigger:
            return ReadMaxRows(self._options.max_messages_per_trigger)
        if self._options.max_bytes_per_trigger:
            return ReadMaxBytes(self._options.max_bytes_per_trigger)
        if self._options.min_messages_per_trigger:
            # any limit but "all" tells latestOffset that this trigger obeys the options
            return ReadMaxRows(1 << 50)
        return ReadAllAvailable()

    def initialOffset(self) -> dict[str, Any]:
        if self._initial is None:
            survey = self._surveyor.look(timestamp_ns=self._options.starting_timestamp, is_waiting=True)
            self._initial = StartingPoints(self._options, self._surveyor).find(survey)
        return to_json(self._initial)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._surveyor.look(is_waiting=True)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        at = from_json(start)
        survey = self._surveyor.look(at) if self._target is None else self._target
        self._last_survey = survey
        ends = dict(at)
        backlogs: dict[PartitionKey, Backlog] = {}
        for key, position in at.items():
            moved = self._continue(key, position, survey, backlogs)
            if moved is not None:
                ends[key] = moved
        for key, sequence in self._admitted(backlogs, limit).items():
            ends[key] = Position(sequence, at[key].log_id)
        for key, entry in survey.logs.items():
            if key not in at:
                ends[key] = self._enter(key, entry)
        return to_json(ends)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        if self._last_survey is None:
            return None
        return to_json({key: Position(entry.end, entry.log_id) for key, entry in self._last_survey.logs.items()})

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        starts = from_json(start)
        ranges = []
        for key, last in from_json(end).items():
            first = starts.get(key)
            if first is not None and first.log_id == last.log_id:
                ranges.append(FetchRange(*key, first.sequence, last.sequence, last.log_id))
        return _tasks(ranges, self._options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(partition, self._options)

    def commit(self, end: dict[str, Any]) -> None:
        if not self._options.channel:
            return
        for key, position in from_json(end).items():
            if self._committed.get(key) == position.sequence or self._surveyor.away_s(key.nsqd):
                continue
            try:
                self._surveyor.try_cursor(key, position.sequence)
                self._committed[key] = position.sequence
            except FlintError as error:  # only the lag shown is late; the next commit says it again
                log.warning("cursor of %s %s not moved to %d: %s", key.topic, key.label, position.sequence, error)

    def _continue(
        self, key: PartitionKey, position: Position, survey: Survey, backlogs: dict[PartitionKey, Backlog]
    ) -> Position | None:
        """Add what can be read of a known partition to ``backlogs``; a position where it starts anew, or None."""
        entry = survey.logs.get(key)
        if entry is None:
            self._absent(key, position, survey)
            return None
        if entry.log_id != position.log_id:
            self._lose(key, position.sequence, None, "the topic was deleted and created again")
            return Position(entry.start, entry.log_id)
        if entry.end < position.sequence:
            return None if self._target is not None else self._behind(key, position, entry)
        self._behind_since_ns.pop(key, None)
        if entry.start > position.sequence:
            self._lose(key, position.sequence, entry.start, f"retention has removed everything below {entry.start}")
        mean_bytes = entry.size_bytes / max(1, entry.end - entry.start)
        backlogs[key] = Backlog(max(position.sequence, entry.start), entry.end, mean_bytes)
        return None

    def _absent(self, key: PartitionKey, position: Position, survey: Survey) -> None:
        reason = survey.away.get(key.nsqd)
        if reason is None:
            # with availableNow a topic may be younger than the survey that says where this run ends
            if self._target is None or key not in (self._initial or {}):
                self._lose(key, position.sequence, None, "the topic no longer exists there")
            return
        away_s = self._surveyor.away_s(key.nsqd)
        if away_s > self._options.nsqd_down_timeout and self._options.fail_on_data_loss:
            raise DataLost(key.topic, key.label, position.sequence, None, f"nsqd is away for {away_s:.0f} s ({reason})")

    def _behind(self, key: PartitionKey, position: Position, entry: PartitionLog) -> Position | None:
        """The log ends before what was read: wait, as a new leader may not know its end yet; then call it lost."""
        now_ns = self._clock.monotonic_ns()
        since_ns = self._behind_since_ns.setdefault(key, now_ns)
        if now_ns - since_ns <= self._options.nsqd_down_timeout * 1e9:
            if since_ns == now_ns:
                log.warning("%s %s ends at %d, read up to %d", key.topic, key.label, entry.end, position.sequence)
            return None
        self._lose(key, entry.end, position.sequence, f"the log ends at {entry.end}")
        return Position(entry.end, entry.log_id)

    def _enter(self, key: PartitionKey, entry: PartitionLog) -> Position:
        """Where reading of a partition that appeared since starts: at its beginning, in the next micro-batch."""
        if self._options.channel:
            floor = self._surveyor.move_cursor(key, EARLIEST_SEQUENCE)
            if self._options.starting_offsets in (CURSOR, LATEST):
                return Position(floor, entry.log_id)
        return Position(entry.start, entry.log_id)

    def _admitted(self, backlogs: dict[PartitionKey, Backlog], limit: ReadLimit) -> dict[PartitionKey, int]:
        options = self._options
        messages_max = bytes_max = 0
        if not isinstance(limit, ReadAllAvailable):
            messages_max, bytes_max = options.max_messages_per_trigger, options.max_bytes_per_trigger
            if isinstance(limit, ReadMaxRows):
                messages_max = limit.max_rows
            elif isinstance(limit, ReadMaxBytes):
                bytes_max = limit.max_bytes
            if self._is_too_little(sum(b.count for b in backlogs.values())):
                return {}
        self._waiting_since_ns = self._clock.monotonic_ns()
        return admit(backlogs, messages_max, bytes_max)

    def _is_too_little(self, count: int) -> bool:
        """Whether to wait for ``minMessagesPerTrigger``; never with availableNow, where nothing more comes."""
        if self._target is not None or count >= self._options.min_messages_per_trigger:
            return False
        waited_ns = self._clock.monotonic_ns() - self._waiting_since_ns
        return waited_ns < self._options.max_trigger_delay * 1e9

    def _lose(self, key: PartitionKey, start: int, end: int | None, reason: str) -> None:
        lost = DataLost(key.topic, key.label, start, end, reason)
        if self._options.fail_on_data_loss:
            raise lost
        log.warning("%s", lost)


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

    def schema(self) -> StructType:
        return spark_schema(SourceOptions.parse(self.options).columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._source_options(schema)
        return NsqPushdownReader(options) if options.pushdown else NsqReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return NsqStreamReader(self._source_options(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        from flintmq.spark.sink import NsqWriter

        return NsqWriter(SinkOptions.parse(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        from flintmq.spark.sink import NsqStreamWriter

        return NsqStreamWriter(SinkOptions.parse(self.options), schema, overwrite)

    def _source_options(self, schema: StructType) -> SourceOptions:
        return replace(SourceOptions.parse(self.options), columns=columns_of(schema))
