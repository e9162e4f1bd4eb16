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

A log that ends before what was read of it is behind. An nsqd shows no end before all its logs are open, none that is
not stored, and none that goes back. So messages of a log without copies were taken back, with its data directory, and
their numbers are given again: that is not forgotten when the log grows past them. The end of a partition of a cluster
goes back for a while when its leader changes, as the new one may not know yet how far all copies in sync are.

A log that grew past what was read of it before anybody looked is told by its times. What an offset says of them is at
least that of everything before it. Where something later stands before it, the last message included, messages were
taken back from the first later one on; not the last one alone is looked at, as that would not say from where on, nor
the first, as clocks are set back, so that what is later may stand in what was read. Each run asks for that once, and
again when nsqd may have been started again meanwhile. What cannot be told: messages that were given the numbers by a
clock that was behind the times of those they replace.

Source: docs/decisions/0006.
"""

# ruff: noqa: N802 - method names are Spark's

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from flintmq.spark.errors import (
    CREATED_AGAIN,
    GONE,
    NOT_CHOSEN,
    TAKEN_BACK,
    TAKEN_BACK_UNSEEN,
    UNCONFIRMED,
    DataLost,
    LogAway,
    line_first,
)
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
    times_of,
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
UNLIMITED = 1 << 50  # messages of a micro-batch

log = logging.getLogger("flintmq.spark")


@dataclass(slots=True)
class _Shortfall:
    """A log that was seen to end before what was read of it.

    Attributes:
        since_ns: when it was seen first.
        end: the lowest end that was seen; what stands there now was published after messages were taken back.
        is_certain: messages were taken back: a log without copies was seen so.
    """

    since_ns: int
    end: int
    is_certain: bool = False

    def see(self, entry: PartitionLog, sequence: int) -> None:
        if entry.end < sequence:
            self.end = min(self.end, entry.end)
            self.is_certain |= not entry.epoch


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
        self._shortfalls: dict[PartitionKey, _Shortfall] = {}
        self._missing_since_ns: dict[PartitionKey, int] = {}
        self._left_behind: dict[PartitionKey, int] = {}
        self._entered: set[PartitionKey] = set()  # since the survey: a channel may begin at an end that came after it
        self._told: dict[PartitionKey, int] = {}  # below these, that messages are lost was logged
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
            return ReadMaxRows(UNLIMITED)
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
        times = times_of(start)
        survey = self._survey(at, times, is_first)
        entering = self._entering(at, survey, is_first)
        self._entered = entering.keys() | (self._entered if self._target is not None else set())
        ends = at | entering
        backlogs: dict[PartitionKey, Backlog] = {}
        for key, sequence in list(ends.items()):
            entry = survey.logs.get(key)
            if entry is None:
                if self._is_lost(key, sequence, survey):
                    self._left_behind[key] = ends.pop(key)
                continue
            self._missing_since_ns.pop(key, None)
            if self._is_behind(key, sequence, entry):
                ends[key] = self._behind(key, sequence, entry, key in times)
            else:
                backlogs[key] = self._backlog(key, sequence, entry)
        ends |= self._admitted(backlogs, limit)
        self._read = ends
        if ends == at and is_current(start):
            return start
        return to_json(ends, entering, _later(times, at, ends, survey))

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
            ranges.append(FetchRange(key.topic, place, key.partition, first, last, key.log_id, self._told.get(key, 0)))
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

    def _survey(self, at: Offsets, times: Offsets, is_first: bool) -> Survey:
        """Return what there is; with availableNow what there was when this run began, and nothing that came later."""
        if self._target is None:
            timestamp_ns = self._options.starting_timestamp if is_first else None
            found = self._surveyor.look(at, timestamp_ns, is_waiting=is_first, times=times)
            self._compare(at, times, found)
            self._see_what_is_left_out(found)
            self._last_survey = found
            return found
        if self._last_survey is None:  # the first time: what was read before and is not seen now is looked for
            self._look_for(self._unseen(at, self._target), self._target)
            if times:
                is_lenient = not self._options.fail_on_data_loss
                self._compare(at, times, self._surveyor.look(at, is_waiting=True, is_lenient=is_lenient, times=times))
            self._look_for_ends(at, self._target)
        self._last_survey = self._target
        return self._target

    def _compare(self, at: Offsets, times: Offsets, survey: Survey) -> None:
        """See whether logs are those that were read, where it was asked for what is later than what was read."""
        for key, sequence in at.items():
            entry = survey.logs.get(key)
            if key not in times or entry is None or entry.at is None or entry.at >= min(sequence, entry.end):
                continue
            if not self._is_later(key, min(sequence, entry.end), times[key]):
                continue
            if key not in self._shortfalls:
                log.warning(
                    "%s %s has messages from %d on that were published after all that was read, up to %d: %s",
                    key.topic,
                    self._surveyor.label(key),
                    entry.at,
                    sequence,
                    TAKEN_BACK,
                )
            shortfall = self._shortfalls.setdefault(key, _Shortfall(self._clock.monotonic_ns(), entry.at))
            shortfall.end, shortfall.is_certain = min(shortfall.end, entry.at), True

    def _is_later(self, key: PartitionKey, end: int, time_ns: int) -> bool:
        """Whether the last message before ``end`` is later than a time that nothing is which was read of this log.

        Raises:
            FlintError: nsqd did not answer as often as the retries allow.
        """
        wanted = FetchRange(key.topic, self._surveyor.place(key), key.partition, end - 1, end, key.log_id)
        options = replace(self._options, columns=("timestamp",), include_headers=False, fail_on_data_loss=True)
        try:
            batches = [batch for task in make_tasks([wanted], options) for batch in read_task(task, options)]
        except DataLost:  # removed or damaged, which is told where it is to be read
            return False
        found = [moment for batch in batches for moment in batch.column("timestamp").cast("int64").to_pylist()]
        return bool(found) and found[-1] > time_ns // 1000  # in microseconds

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

    def _look_for_ends(self, at: Offsets, target: Survey) -> None:
        """Wait, as long as the retries last, for logs that end before what was read of them."""
        retries = Retries(self._options.retries)
        seen = target
        while True:
            behind = []
            for key, sequence in at.items():
                if (first := target.logs.get(key)) is None:
                    continue
                entry = seen.logs.get(key, first)
                if self._is_behind(key, sequence, entry):
                    shortfall = self._shortfall(key, sequence, entry)
                    if entry.end < sequence or (shortfall.is_certain and entry.end == sequence):
                        behind.append(key)
                elif first.end < sequence:  # its leader knows by now how far it was when this run began
                    target.logs[key] = entry
            if not behind:
                return
            key = behind[0]
            short = _EndsBefore(self._shortfalls[key].end, at[key])
            try:
                retries.failed(short, f"looking for the end of {key.topic} {self._surveyor.label(key)}")
            except _EndsBefore:
                return  # what becomes of them _behind says
            seen = self._surveyor.look(behind)

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
        if entry.start > max(sequence, self._told.get(key, 0)):
            self._lose(key, sequence, entry.start, f"retention has removed everything below {entry.start}")
            self._told[key] = entry.start
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

    def _is_behind(self, key: PartitionKey, sequence: int, entry: PartitionLog) -> bool:
        """Whether a log ends before what was read of it, or did, and is not known to lack nothing."""
        if key in self._entered:
            return False
        shortfall = self._shortfalls.get(key)
        if entry.end < sequence or (shortfall is not None and shortfall.is_certain):
            return True
        if shortfall is not None:
            label = self._surveyor.label(key)
            log.warning(
                "%s %s has ended at %d and is beyond %d again, which was read: its leader knew no more of its end, or "
                "an election has lost messages, which flintmq cluster status shows",
                key.topic, label, shortfall.end, sequence,
            )  # fmt: skip
            del self._shortfalls[key]
        return False

    def _shortfall(self, key: PartitionKey, sequence: int, entry: PartitionLog) -> _Shortfall:
        """Return what is known of a log that is behind, now that its end was seen; it is warned of the first time."""
        shortfall = self._shortfalls.get(key)
        if shortfall is None:
            shortfall = self._shortfalls[key] = _Shortfall(self._clock.monotonic_ns(), entry.end)
            log.warning(
                "%s %s ends at %d, and was read up to %d: %s",
                key.topic,
                self._surveyor.label(key),
                entry.end,
                sequence,
                UNCONFIRMED if entry.epoch else TAKEN_BACK,
            )
        shortfall.see(entry, sequence)
        return shortfall

    def _behind(self, key: PartitionKey, sequence: int, entry: PartitionLog, is_timed: bool) -> int:
        """Return where reading goes on in a log that is behind: where it is, or where the log had ended.

        Args:
            is_timed: by what the offset says of times, a later run sees as well what was taken back.

        Raises:
            DataLost: messages were taken back, or it has been behind for too long.
            LogAway: the leader of the partition does not say soon enough how far it is.
        """
        options, shortfall = self._options, self._shortfall(key, sequence, entry)
        is_now = self._target is not None  # then it was waited for already, and there is no later
        if is_now and not shortfall.is_certain:
            short = _EndsBefore(entry.end, sequence)
            away = LogAway(key.topic, self._surveyor.label(key), f"{short}: {UNCONFIRMED}")
            if options.fail_on_data_loss:
                raise away
            log.warning("%s; going on without it", away)
            return sequence
        waited_ns = self._clock.monotonic_ns() - shortfall.since_ns
        # who started nsqd with the wrong data directory may put that right, until something is stored in its place
        if not is_now and waited_ns <= options.nsqd_down_timeout * 1e9 and entry.end <= sequence:
            return sequence
        why = f"for {waited_ns / 1e9:.0f} s {UNCONFIRMED}"
        if shortfall.is_certain:
            why = TAKEN_BACK if is_timed else TAKEN_BACK_UNSEEN
        self._lose(key, shortfall.end, sequence, f"{why}; the log has ended at {shortfall.end}", at=shortfall.end)
        del self._shortfalls[key]
        return shortfall.end

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

    def _lose(self, key: PartitionKey, start: int, end: int | None, reason: str, at: int | None = None) -> None:
        lost = DataLost(key.topic, self._surveyor.label(key), start, end, reason)
        if self._options.fail_on_data_loss:
            raise lost
        log.warning("%s", lost.forgiven(at))


def _later(times: Offsets, at: Offsets, ends: Offsets, survey: Survey) -> Offsets:
    """Return times that nothing before ``ends`` is later than, from those that go with ``at``, and from a survey."""
    # an nsqd of a release before says nothing of what it has read since
    found = {key: time_ns for key, time_ns in times.items() if key in ends and ends[key] <= at.get(key, 0)}
    for key, end in ends.items():
        entry = survey.logs.get(key)
        # a channel may begin behind the end that was seen
        if entry is not None and entry.timestamp_max and end <= entry.end:
            found[key] = max(entry.timestamp_max, times.get(key, 0))
    return found


class _EndsBefore(Exception):
    """A log ends before what was read of it.

    Args:
        end: its end.
        sequence: up to where it was read.
    """

    def __init__(self, end: int, sequence: int) -> None:
        super().__init__(end, sequence)
        self.end = end
        self.sequence = sequence

    def __str__(self) -> str:
        return f"it ends at {self.end}, and was read up to {self.sequence}"
