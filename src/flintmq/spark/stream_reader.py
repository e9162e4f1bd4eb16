"""``spark.readStream``: plans micro-batches on the driver, reads them on executors.

What Spark does, and what follows from it (all observed on 4.3, docs/decisions/0006):

- It builds several readers in several processes and pickles them: ``__init__`` opens nothing and keeps plain data.
- It repeats a micro-batch that was planned and not committed, from the same two offsets: plan and data follow from
  these alone. Therefore the end of a micro-batch also says where the partitions start that enter in it, and names the
  log that each number belongs to.
- It does not record where a new query started, and asks for the initial offset again in every restart until the first
  micro-batch is committed: so the initial offset is always the same, empty, and all partitions enter in the first
  micro-batch. Only before that is planned can ``latest`` move on; a position that nsqd keeps (a channel) prevents it.
- It calls ``commit(end)`` one micro-batch late and never for the last one, and may repeat it: the cursor of the channel
  may only lag behind, and moving it is idempotent. Exactly-once rests on Spark's checkpoint, never on the cursor.
- It asks for the latest offset, from ``start``, once the micro-batch that ended there is committed, also when nothing
  is new, and once more at the end of availableNow: so the cursor is moved there already.
- It never calls ``stop()``: nothing depends on it.
- It compares offsets as text: their keys are sorted, and when nothing is new the text comes back as it was given,
  unless a release before wrote it, whose form is replaced with the next micro-batch.

A log that nobody serves is away or gone. Away is one whose nsqd does not answer, or whose partition has no leader: it
waits in the offsets while the others are read. Gone is one that everybody who could have it has not: its messages are
lost, and when that is forgiven it leaves the offsets.

Source: docs/decisions/0006.
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
from flintmq.spark.broker import PartitionLog
from flintmq.spark.errors import CREATED_AGAIN, GONE, NOT_CHOSEN, DataLost, LogAway, line_first
from flintmq.spark.lag import measure
from flintmq.spark.lag import to_json as lag_to_json
from flintmq.spark.offsets import (
    CHANNEL_KEY,
    LAG_KEY,
    LOG_KEY,
    Offsets,
    PartitionKey,
    entries_of,
    from_json,
    is_current,
    to_json,
)
from flintmq.spark.options import SourceOptions
from flintmq.spark.plan import Backlog, FetchRange, admit
from flintmq.spark.retry import Retries
from flintmq.spark.start import StartingPoints, check_channel, left_out
from flintmq.spark.survey import Survey, Surveyor
from flintmq.spark.tasks import FetchTask, make_tasks, read_task

if TYPE_CHECKING:
    import pyarrow as pa

AHEAD_TIMES = 2  # that the channel is seen ahead of the query before that is told of

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
        self._missing_since_ns: dict[PartitionKey, int] = {}
        self._left_behind: dict[PartitionKey, int] = {}
        self._committed: dict[PartitionKey, int] = {}
        self._times_ahead = 0
        self._has_told_what_is_left_out = False
        self._read: Offsets = {}
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
        options = self._options
        self._target = self._surveyor.look(
            timestamp_ns=options.starting_timestamp,
            is_waiting=True,
            is_lenient=not options.fail_on_data_loss,
            is_whole=True,
        )
        check_channel(options, self._target)

    def end_at(self, survey: Survey) -> None:
        """Read up to what a survey has found, and no further."""
        self._target = survey

    @line_first
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        at = from_json(start)
        self.commit(start)
        is_first = LOG_KEY not in start
        survey = self._survey(at, is_first)
        entering = self._entering(at, survey, is_first)
        ends = at | entering
        backlogs: dict[PartitionKey, Backlog] = {}
        for key, sequence in list(ends.items()):
            entry = survey.logs.get(key)
            if entry is None:
                if self._is_lost(key, sequence, survey):
                    self._left_behind[key] = ends.pop(key)
                continue
            self._missing_since_ns.pop(key, None)
            if entry.end < sequence:
                ends[key] = self._behind(key, sequence, entry)
            else:
                self._behind_since_ns.pop(key, None)
                backlogs[key] = self._backlog(key, sequence, entry)
        ends |= self._admitted(backlogs, limit)
        self._read = ends
        if ends == at and is_current(start):
            return start
        return to_json(ends, entering)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        if self._last_survey is None:
            return None
        ends = to_json({key: entry.end for key, entry in self._last_survey.logs.items()})
        lags = measure(self._read, self._last_survey, self._options, self._clock.wall_ns())
        channel = {CHANNEL_KEY: self._options.channel} if self._options.channel else {}
        return {**channel, **ends, LAG_KEY: lag_to_json(lags)}

    @line_first
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        starts, entries = from_json(start), entries_of(end)
        ranges = []
        for key, last in from_json(end).items():
            first = starts[key] if key in starts else entries[key]
            place = self._surveyor.place(key)
            ranges.append(FetchRange(key.topic, place, key.partition, first, last, key.log_id))
        return make_tasks(ranges, self._options)

    def size_of(self, tasks: Sequence[InputPartition]) -> float:
        """Estimate the bytes that tasks read, from the mean size of the messages of each log; 0: it is not known."""
        ranges = [wanted for task in tasks if isinstance(task, FetchTask) for wanted in task.ranges]
        logs = {} if self._last_survey is None else self._last_survey.logs
        if any(wanted.key not in logs for wanted in ranges):
            return 0.0
        return sum(wanted.count * logs[wanted.key].mean_bytes for wanted in ranges)

    @line_first
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from read_task(partition, self._options)

    def commit(self, end: dict[str, Any]) -> None:
        if not self._options.channel:
            return
        due = {key: sequence for key, sequence in from_json(end).items() if self._committed.get(key) != sequence}
        moved = self._surveyor.try_cursors(due)
        self._committed |= {key: due[key] for key in moved}
        ahead = [(key, floor) for key, floor in moved.items() if floor > due[key]]
        if ahead:
            self._seen_ahead(*ahead[0], due[ahead[0][0]])

    def _seen_ahead(self, key: PartitionKey, floor: int, here: int) -> None:
        """Warn, once, that somebody else moves the channel; once it may be because of a stretch that is damaged."""
        self._times_ahead += 1
        if self._times_ahead == AHEAD_TIMES:
            log.warning(
                "channel %s of %s %s is at %d and this query at %d: another query or a consumer uses it as well, or "
                "this checkpoint is older; its depth is not this query's lag, and retention does not wait for this "
                "query. Give each query a channel of its own",
                self._options.channel,
                key.topic,
                self._surveyor.label(key),
                floor,
                here,
            )

    def _survey(self, at: Offsets, is_first: bool) -> Survey:
        """Return what there is; with availableNow what there was when this run began, and nothing that came later."""
        if self._target is None:
            timestamp_ns = self._options.starting_timestamp if is_first else None
            found = self._surveyor.look(at, timestamp_ns, is_waiting=is_first)
            self._see_what_is_left_out(found)
            self._last_survey = found
            return found
        if self._last_survey is None:  # the first time: what was read before and is not seen now is looked for
            self._look_for(self._unseen(at, self._target), self._target)
        self._last_survey = self._target
        return self._target

    def _see_what_is_left_out(self, survey: Survey) -> None:
        """Refuse to begin with a channel that holds more than is read; warn, once, when it comes to that later."""
        if self._last_survey is None:
            check_channel(self._options, survey)
        elif self._options.channel and not self._has_told_what_is_left_out:
            if names := left_out(self._options, survey):
                log.warning(
                    "assign leaves out %s, whose messages channel %s keeps for good; this query does not begin again "
                    "before they are assigned as well, or channel is left out",
                    names,
                    self._options.channel,
                )
                self._has_told_what_is_left_out = True

    def _unseen(self, at: Offsets, target: Survey) -> list[PartitionKey]:
        return [key for key in at if key not in target.logs and self._options.reads(key.topic, key.partition)]

    def _look_for(self, unseen: list[PartitionKey], target: Survey) -> None:
        """Wait, as long as the retries last, for logs that may be on their way to another nsqd."""
        retries = Retries(self._options.retries)
        unseen = [key for key in unseen if not self._surveyor.is_gone(key, target)]
        while unseen and not target.away:  # who is away was waited for when the run began
            more = self._surveyor.look(unseen)
            target.logs |= {key: more.logs[key] for key in unseen if key in more.logs}
            unseen = [key for key in unseen if key not in more.logs and not self._surveyor.is_gone(key, more)]
            if not unseen:
                return
            key = unseen[0]
            away = LogAway(key.topic, self._surveyor.label(key), more.why_missing(key))
            try:
                retries.failed(away, "looking for logs that were read before")
            except LogAway:
                return  # what becomes of them _is_lost says

    def _entering(self, at: Offsets, survey: Survey, is_first: bool) -> Offsets:
        """Return where reading starts in logs that the query has not read from."""
        if is_first:
            return self._starting.find(survey)
        entering: Offsets = {}
        for key, entry in survey.logs.items():
            if key in at:
                continue
            if key in self._left_behind:  # it has come back while this process lives
                entering[key] = self._left_behind.pop(key)
            else:
                entering[key] = self._starting.of_newcomer(key, entry)
        return entering

    def _backlog(self, key: PartitionKey, sequence: int, entry: PartitionLog) -> Backlog:
        if entry.start > sequence:
            self._lose(key, sequence, entry.start, f"retention has removed everything below {entry.start}")
        return Backlog(max(sequence, entry.start), entry.end, entry.mean_bytes)

    def _is_lost(self, key: PartitionKey, sequence: int, survey: Survey) -> bool:
        """Whether a log that nobody serves is to leave the offsets; if not, it waits there.

        Raises:
            DataLost: it is gone, or has been away for too long.
        """
        options, now_ns = self._options, self._clock.monotonic_ns()
        if not options.reads(key.topic, key.partition):
            self._lose(key, sequence, None, NOT_CHOSEN)
            return True
        if self._surveyor.is_gone(key, survey):
            is_again = any(other[:2] == key[:2] for other in survey.logs)
            self._lose(key, sequence, None, CREATED_AGAIN if is_again else GONE)
            return True
        since_ns = self._missing_since_ns.setdefault(key, now_ns)
        reason = survey.why_missing(key)
        if since_ns == now_ns:
            log.warning("%s %s waits at %d: %s", key.topic, self._surveyor.label(key), sequence, reason)
        # availableNow has looked for it as long as the retries lasted, and there is no later
        waited_s = (now_ns - since_ns) / 1e9
        if self._target is None and waited_s <= options.nsqd_down_timeout:
            return False
        if survey.away or key in survey.unled:  # it may come back
            if options.fail_on_data_loss:
                raise DataLost(key.topic, self._surveyor.label(key), sequence, None, f"{reason}, for {waited_s:.0f} s")
            return False
        self._lose(key, sequence, None, f"{reason}, for {waited_s:.0f} s")
        return True

    def _behind(self, key: PartitionKey, sequence: int, entry: PartitionLog) -> int:
        """Wait for a log that ends before what was read, as a new leader may not know its end; then call it lost."""
        if self._target is not None:  # the channel was created at an end that came after the survey
            return sequence
        now_ns = self._clock.monotonic_ns()
        since_ns = self._behind_since_ns.setdefault(key, now_ns)
        if now_ns - since_ns <= self._options.nsqd_down_timeout * 1e9:
            if since_ns == now_ns:
                label = self._surveyor.label(key)
                log.warning("%s %s ends at %d, read up to %d", key.topic, label, entry.end, sequence)
            return sequence
        self._lose(key, entry.end, sequence, f"the log ends at {entry.end}")
        return entry.end

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
        lost = DataLost(key.topic, self._surveyor.label(key), start, end, reason)
        if self._options.fail_on_data_loss:
            raise lost
        log.warning("%s", lost)
