"""``spark.read``: reads what there is between two positions, once.

The rules of this file: a batch read promises all there is, so an nsqd that stays away is an error; it leaves every
channel as it is. No filter is taken from Spark (``pushFilters``): it keeps one plan for all queries of a ``load()``, so
what one query's filter leaves out would be missing in the others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from flintmq.errors import NsqdError, OptionError
from flintmq.spark.broker import TOPIC_NOT_EXIST, NotByOffset, PartitionLog
from flintmq.spark.errors import SOURCE, DataLost, line_first
from flintmq.spark.offsets import (
    EARLIEST_SEQUENCE,
    FIRST_SEQUENCE,
    LATEST_SEQUENCE,
    PartitionKey,
    Place,
    parse_given,
    parse_times,
)
from flintmq.spark.options import EARLIEST, LATEST, NO_BATCH, SourceOptions, in_ms
from flintmq.spark.plan import FetchRange
from flintmq.spark.start import StartingPoints, at_times, places
from flintmq.spark.survey import Survey, Surveyor
from flintmq.spark.tasks import make_tasks, read_task

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("flintmq.spark")


class NsqReader(DataSourceReader):
    """Plans on the driver and reads on executors."""

    def __init__(self, options: SourceOptions) -> None:
        options.check_batch()
        # it is of a stream that has the same options: moved from here, nsqd would delete what the stream has not read
        self._options = replace(options, channel="")

    @line_first
    def partitions(self) -> Sequence[InputPartition]:
        return self.plan()

    def plan(self) -> Sequence[InputPartition]:
        """Return the tasks; what it raises is left to the caller to tell."""
        options = self._options
        surveyor = Surveyor(options)
        try:
            survey = surveyor.look(timestamp_ns=options.starting_timestamp, is_waiting=True, is_whole=True)
        except NotByOffset as error:
            raise error.instead(f"only FlintMQ's nsqd can, and spark.read {NO_BATCH}") from error
        for topic in options.named_topics:
            if not any(key.topic == topic for key in (*survey.logs, *survey.others)):
                where = ",".join(options.nsqd or options.lookupd)
                raise NsqdError(TOPIC_NOT_EXIST, f"no nsqd of {where} has topic {topic!r}")
        starts = StartingPoints(options, surveyor).find(survey)
        ends = self._ends(surveyor, survey)
        self._check_order(survey)
        ranges = [self._range(key, starts[key], ends[key], survey.logs[key]) for key in starts]
        return make_tasks(ranges, options)

    def _ends(self, surveyor: Surveyor, survey: Survey) -> dict[PartitionKey, int]:
        options = self._options
        if options.ending_timestamp is not None:
            late = surveyor.look(survey.logs, options.ending_timestamp, is_waiting=True)
            found = {key: late.logs.get(key, entry) for key, entry in survey.logs.items()}
            return {key: entry.end if entry.at is None else entry.at for key, entry in found.items()}
        ends = {key: entry.end for key, entry in survey.logs.items()}
        if options.ending_offsets_by_timestamp:
            text = options.ending_offsets_by_timestamp
            return ends | at_times("endingOffsetsByTimestamp", text, survey, surveyor)[1]
        if options.ending_offsets != LATEST:
            given = parse_given("endingOffsets", options.ending_offsets)
            given.check("endingOffsets", places(survey))
            for key, entry in survey.logs.items():
                wanted = given.sequence(key, entry.nsqd)
                if wanted == EARLIEST_SEQUENCE:
                    raise OptionError(
                        "endingOffsets", options.ending_offsets, "-2 is the beginning, not an end", SOURCE
                    )
                if wanted is None or wanted == LATEST_SEQUENCE:
                    continue
                if wanted > entry.end:
                    beyond = given.beyond("endingOffsets", key, wanted, Place(entry.nsqd, entry.start, entry.end))
                    if options.fail_on_data_loss:
                        raise beyond
                    log.warning("%s; ending there", beyond)
                ends[key] = min(wanted, entry.end)
        return ends

    def _check_order(self, survey: Survey) -> None:
        """Refuse an end that was given before the start that was given, which would read nothing and say nothing.

        A number is not compared with a time: what lies between them follows from what was published when.
        """
        options = self._options
        starts = _bound(
            "starting",
            options.starting_offsets,
            options.starting_timestamp,
            options.starting_offsets_by_timestamp,
            survey,
        )
        ends = _bound(
            "ending", options.ending_offsets, options.ending_timestamp, options.ending_offsets_by_timestamp, survey
        )
        if starts.is_time != ends.is_time:
            return
        for key in sorted(starts.at.keys() & ends.at.keys()):
            start, end = starts.at[key], ends.at[key]
            if end < start:
                label = f"{survey.logs[key].nsqd}/{key.partition}"
                allowed = f"topic {key.topic!r}, {label}: {starts.option} is behind it, {starts.shown(start)}"
                raise OptionError(ends.option, ends.shown(end), allowed, SOURCE)

    def _range(self, key: PartitionKey, start: int, end: int, entry: PartitionLog) -> FetchRange:
        wanted = FetchRange(key.topic, entry.nsqd, key.partition, max(start, entry.start), end, key.log_id)
        if start < min(wanted.start, end):
            reason = f"retention has removed everything below {entry.start}"
            lost = DataLost(key.topic, wanted.label, start, min(wanted.start, end), reason)
            if self._options.fail_on_data_loss:
                raise lost
            log.warning("%s", lost.forgiven())
        return replace(wanted, end=max(wanted.start, end))

    @line_first
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from read_task(partition, self._options)


@dataclass(frozen=True, slots=True)
class _Bound:
    """One side of the ranges, as a user gave it: a number, or a time in ns, for those logs that have one."""

    option: str
    at: Mapping[PartitionKey, int]
    is_time: bool

    def shown(self, value: int) -> str:
        return in_ms(value) if self.is_time else str(value)


def _bound(side: str, offsets: str, time_ns: int | None, times: str, survey: Survey) -> _Bound:
    if time_ns is not None:
        return _Bound(f"{side}Timestamp", dict.fromkeys(survey.logs, time_ns), True)
    option = f"{side}OffsetsByTimestamp" if times else f"{side}Offsets"
    if times:
        given = parse_times(option, times)
    elif offsets in (EARLIEST, LATEST):
        return _Bound(option, {}, False)
    else:
        given = parse_given(option, offsets)
    chosen = {key: given.sequence(key, entry.nsqd) for key, entry in survey.logs.items()}
    numbers = {key: number for key, number in chosen.items() if number is not None and number >= 0}
    if times:
        return _Bound(option, {key: time_ms * 1_000_000 for key, time_ms in numbers.items()}, True)
    return _Bound(option, {key: max(number, FIRST_SEQUENCE) for key, number in numbers.items()}, False)
