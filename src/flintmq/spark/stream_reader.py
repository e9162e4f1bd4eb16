"""``spark.readStream``: plans micro-batches on the driver, reads them on executors.

What Spark does, and what follows from it (all observed on 4.3, design/spark.md 0 to 3):

- It builds several readers in several processes and pickles them: ``__init__`` opens nothing and keeps plain data.
- It repeats a micro-batch that was planned and not committed, from the same two offsets: plan and data follow from
  these alone. Therefore the end of a micro-batch also says where the partitions start that enter in it, and names the
  log that each number belongs to.
- It does not record where a new query started, and asks for the initial offset again in every restart until the first
  micro-batch is committed: so the initial offset is always the same, empty, and all partitions enter in the first
  micro-batch. Only before that is planned can ``latest`` move on; a position that nsqd keeps (a channel) prevents it.
- It calls ``commit(end)`` one micro-batch late and never for the last one, and may repeat it: the cursor of the channel
  may only lag behind, and moving it is idempotent. Exactly-once rests on Spark's checkpoint, never on the cursor.
- It never calls ``stop()``: nothing depends on it.
- It compares offsets as text: their keys are sorted, and when nothing is new the text comes back as it was given.

Source: design/spark.md 2 and 10.
"""

# ruff: noqa: N802 - method names are Spark's

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from flintmq.clock import Clock, SystemClock
from flintmq.errors import FlintError
from flintmq.spark.broker import PartitionLog
from flintmq.spark.errors import DataLost, line_first
from flintmq.spark.offsets import LOG_KEY, Offsets, PartitionKey, Position, entries_of, from_json, to_json
from flintmq.spark.options import SourceOptions
from flintmq.spark.plan import Backlog, FetchRange, admit
from flintmq.spark.start import StartingPoints
from flintmq.spark.survey import Survey, Surveyor
from flintmq.spark.tasks import make_tasks, read_task

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("flintmq.spark")


class NsqStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches on the driver and reads them on executors."""

    def __init__(self, options: SourceOptions, clock: Clock | None = None) -> None:
        options.check_stream()
        self._options = options
        self._clock = clock or SystemClock()
        self._surveyor = Surveyor(options, self._clock)
        self._starting = StartingPoints(options, self._surveyor)
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
        return {}

    @line_first
    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._surveyor.look(timestamp_ns=self._options.starting_timestamp, is_waiting=True)

    @line_first
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        at = from_json(start)
        is_first = LOG_KEY not in start
        survey = self._survey(at, is_first)
        entering = self._entering(at, survey, is_first)
        ends = at | entering
        backlogs: dict[PartitionKey, Backlog] = {}
        for key, position in list(ends.items()):
            entry = survey.logs.get(key)
            if entry is None:
                self._absent(key, position, survey)
            elif entry.end < position.sequence:
                ends[key] = self._behind(key, position, entry)
            else:
                self._behind_since_ns.pop(key, None)
                backlogs[key] = self._backlog(key, position, entry)
        for key, sequence in self._admitted(backlogs, limit).items():
            ends[key] = Position(sequence, ends[key].log_id)
        if ends == at and not is_first:
            return start
        return to_json(ends, entering)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        if self._last_survey is None:
            return None
        return to_json({key: Position(entry.end, entry.log_id) for key, entry in self._last_survey.logs.items()})

    @line_first
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        starts, entries = from_json(start), entries_of(end)
        ranges = []
        for key, last in from_json(end).items():
            first = starts.get(key)
            if first is None or first.log_id != last.log_id:
                first = entries[key]
            ranges.append(FetchRange(*key, first.sequence, last.sequence, last.log_id))
        return make_tasks(ranges, self._options)

    @line_first
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from read_task(partition, self._options)

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

    def _survey(self, at: Offsets, is_first: bool) -> Survey:
        """Return what there is; with availableNow what there was when this run began, and nothing that came later."""
        if self._target is None:
            timestamp_ns = self._options.starting_timestamp if is_first else None
            self._last_survey = self._surveyor.look(at, timestamp_ns, is_waiting=is_first)
            return self._last_survey
        unseen = [key for key in at if key not in self._target.logs]
        if unseen and self._last_survey is None:  # on an nsqd that discovery no longer lists: ask it once
            more = self._surveyor.look(unseen, is_waiting=True)
            self._target.logs.update({key: more.logs[key] for key in unseen if key in more.logs})
        self._last_survey = self._target
        return self._target

    def _entering(self, at: Offsets, survey: Survey, is_first: bool) -> Offsets:
        """Return where reading starts in logs that the query has not read from."""
        if is_first:
            return self._starting.find(survey)
        entering: Offsets = {}
        for key, entry in survey.logs.items():
            if key not in at:
                entering[key] = self._starting.of_newcomer(key, entry)
            elif at[key].log_id != entry.log_id:
                self._lose(key, at[key].sequence, None, "the topic was deleted and created again")
                entering[key] = self._starting.of_newcomer(key, entry)
        return entering

    def _backlog(self, key: PartitionKey, position: Position, entry: PartitionLog) -> Backlog:
        if entry.start > position.sequence:
            self._lose(key, position.sequence, entry.start, f"retention has removed everything below {entry.start}")
        mean_bytes = entry.size_bytes / max(1, entry.end - entry.start)
        return Backlog(max(position.sequence, entry.start), entry.end, mean_bytes)

    def _absent(self, key: PartitionKey, position: Position, survey: Survey) -> None:
        """Leave a partition where it is, or fail: its nsqd does not answer, or no longer has the topic."""
        reason = survey.away.get(key.nsqd)
        if reason is None:
            self._lose(key, position.sequence, None, "the topic no longer exists there")
            return
        away_s = self._surveyor.away_s(key.nsqd)
        if away_s > self._options.nsqd_down_timeout and self._options.fail_on_data_loss:
            raise DataLost(key.topic, key.label, position.sequence, None, f"nsqd is away for {away_s:.0f} s ({reason})")

    def _behind(self, key: PartitionKey, position: Position, entry: PartitionLog) -> Position:
        """Wait for a log that ends before what was read, as a new leader may not know its end; then call it lost."""
        if self._target is not None:  # the channel was created at an end that came after the survey
            return position
        now_ns = self._clock.monotonic_ns()
        since_ns = self._behind_since_ns.setdefault(key, now_ns)
        if now_ns - since_ns <= self._options.nsqd_down_timeout * 1e9:
            if since_ns == now_ns:
                log.warning("%s %s ends at %d, read up to %d", key.topic, key.label, entry.end, position.sequence)
            return position
        self._lose(key, entry.end, position.sequence, f"the log ends at {entry.end}")
        return Position(entry.end, entry.log_id)

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
