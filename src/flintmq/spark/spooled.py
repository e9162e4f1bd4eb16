"""``spark.readStream`` of any nsqd: by offset where it can, else through a spool, as the option ``mode`` says.

A spool is read as nsqd is, by :class:`flintmq.spark.stream_reader.NsqStreamReader`, whose nsqd it is. Here stands what
differs:

- Offsets say with ``_mode`` that their logs are a spool's. What a checkpoint began with it goes on with.
- Messages of a spool in memory (``direct``) are not finished before Spark has committed their micro-batch. One that was
  planned before the driver ended reads nothing when it is repeated: its log is gone with the driver, and nsqd delivers
  its messages again, into another micro-batch.
- Spark asks for the latest offset with the end of the last committed micro-batch; so what lies below may be finished.
- With availableNow a micro-batch follows the other until the spool has taken what waited in nsqd when it was started:
  then what it has is the end. What keeps it from that for nsqdDownTimeout is an error.

Source: docs/decisions/0032.
"""

# ruff: noqa: N802 - method names are Spark's

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from flintmq.clock import Clock
from flintmq.errors import FlintError, OptionError
from flintmq.spark.broker import FAILURES, NotByOffset
from flintmq.spark.errors import NOT_THIS_SPOOL, SOURCE, DataLost, NotAllTaken, line_first
from flintmq.spark.link import with_spark_names
from flintmq.spark.offsets import LOG_KEY, MODE_KEY, PartitionKey, entries_of, from_json, to_json
from flintmq.spark.options import AUTO, DIRECT, OFFSET, SPOOL, SourceOptions
from flintmq.spark.prefetch import WithRows
from flintmq.spark.retry import Retries
from flintmq.spark.session_settings import warn_of_tasks
from flintmq.spark.spool import Spool, SpoolProcess
from flintmq.spark.stream_reader import UNLIMITED, NsqStreamReader
from flintmq.spark.survey import Survey, Surveyor
from flintmq.spark.tasks import FetchTask, SpoolPlace, at_spool, read_task

if TYPE_CHECKING:
    import pyarrow as pa

POLL_S = 0.05
WAITS_TOLD_S = 5.0
"""So long something keeps a spool from the end of availableNow before it is said."""

log = logging.getLogger("flintmq.spark")


class AnyStreamReader(WithRows, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads by offset, or through a spool."""

    def __init__(self, options: SourceOptions, clock: Clock | None = None) -> None:
        self._options = options
        self._found = options.mode  # auto until it is known
        self._by_offset = NsqStreamReader(options, clock)
        self._process: SpoolProcess | None = None
        self._place: SpoolPlace | None = None
        self._spooled: NsqStreamReader | None = None
        self._told: set[str] = set()
        """Topics of which it was said that messages come again."""
        self._waiting: set[str] = set()
        """Topics of which it was said that their end is waited for."""
        self._is_ending = False  # availableNow: what waits now is to be read, and no more
        self._has_end = False

    def getDefaultReadLimit(self) -> ReadLimit:
        warn_of_tasks(os.environ)  # here, as Spark asks it once per query, in the process that plans
        limit = self._by_offset.getDefaultReadLimit()
        # any limit but "all" tells latestOffset that this is not trigger(once=True), which always asks for all
        return ReadMaxRows(UNLIMITED) if isinstance(limit, ReadAllAvailable) else limit

    def initialOffset(self) -> dict[str, Any]:
        return {}

    @line_first
    def prepareForTriggerAvailableNow(self) -> None:
        self._is_ending = True
        if self._process is not None:
            self._process.close()  # it does not find out when all has been taken
            self._process = None
        if self._found in (AUTO, OFFSET):
            try:
                self._by_offset.prepareForTriggerAvailableNow()
            except NotByOffset as error:
                self._use_spool(error)
        if self._found not in (AUTO, OFFSET):
            self._run()

    @line_first
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        if self._mode_of(start) in (AUTO, OFFSET):
            try:
                return self._by_offset.latestOffset(start, limit)
            except NotByOffset as error:
                if start:
                    raise
                self._use_spool(error)
        if self._found == DIRECT and isinstance(limit, ReadAllAvailable):
            allowed = (
                "with mode=direct what a micro-batch has read is finished when the next one is asked for, and there is "
                "none: set availableNow=True, which reads what waits and ends as well"
            )
            raise OptionError("trigger", "once=True", allowed, SOURCE)
        at, found = self._patiently(start, limit)
        return start if found == at and LOG_KEY in start and at == _plain(start) else _marked(found, self._found)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        reader = self._by_offset if self._spooled is None else self._spooled
        return reader.reportLatestOffset()

    @line_first
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        if self._mode_of(end) in (AUTO, OFFSET):
            reader = self._by_offset
            tasks = reader.partitions(start, end)
        else:
            spool, reader = self._run()
            tasks = reader.partitions(self._ours(start, spool), self._ours(end, spool))
            tasks = [replace(task, spool=spool.place) if isinstance(task, FetchTask) else task for task in tasks]
        self._read_ahead(tasks, reader.size_of(tasks), self._options)
        return tasks

    @line_first
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from read_task(partition, self._options)

    def commit(self, end: dict[str, Any]) -> None:
        if MODE_KEY not in end:
            self._by_offset.commit(end)
        elif self._spooled is not None and self._process is not None:
            self._spooled.commit(self._ours(end, self._process.running()))

    # -- which way -----------------------------------------------------------------------------------------------------

    def _mode_of(self, offset: dict[str, Any]) -> str:
        """Return how to read what a checkpoint has, or a new query has to find out.

        Raises:
            OptionError: the options want it in another way.
        """
        if LOG_KEY not in offset:
            return self._found
        began = str(offset.get(MODE_KEY, OFFSET))
        if self._options.mode not in (AUTO, began):
            allowed = (
                f"this checkpoint was begun with mode={began}: go on with that, or choose another checkpointLocation"
            )
            raise OptionError("mode", self._options.mode, allowed, SOURCE)
        if began not in (OFFSET, self._found):
            self._options.check_spooled(began)
            self._found = began
        return began

    def _use_spool(self, error: NotByOffset) -> None:
        """Go on through a spool, because nsqd cannot be read by offset.

        Raises:
            NotByOffset: the options do not allow it.
            OptionError: one is missing for it.
        """
        if self._options.mode != AUTO:
            raise error
        log.warning("nsqd %s cannot be read by offset, so messages are spooled (mode=spool)", error.nsqd)
        self._options.check_spooled(SPOOL)
        self._found = SPOOL

    # -- the spool -----------------------------------------------------------------------------------------------------

    def _run(self) -> tuple[Spool, NsqStreamReader]:
        """Return the spool, started if it does not run, and the reader of what it serves."""
        if self._process is None:
            self._process = SpoolProcess(self._options, self._found, self._is_ending)
        spool = self._process.running()
        if self._spooled is None or self._place != spool.place:
            self._place = spool.place
            self._spooled = NsqStreamReader(self._once(spool))
            self._has_end = False
        return spool, self._spooled

    def _once(self, spool: Spool) -> SourceOptions:
        """Return the options with which a spool is asked once: what it means if it does not answer is judged here."""
        return replace(at_spool(self._options, spool.place), retries=0)

    def _patiently(self, start: dict[str, Any], limit: ReadLimit) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what an offset says of the spool, and the latest one.

        Raises:
            NotAllTaken: with availableNow the spool cannot have all that waits in nsqd.
            SpoolFailed: the spool has ended. Nothing is said of its address and its token then, which no user knows.
        """
        retries = Retries(self._options.retries)
        while True:
            spool, reader = self._run()
            at = self._ours(start, spool)
            try:
                return at, self._latest(reader, at, limit, spool)
            except NotAllTaken:
                raise
            except FlintError as error:
                failed = error
            assert self._process is not None
            self._process.check()
            if not isinstance(failed, FAILURES):
                raise failed
            if self._process.is_running:
                retries.failed(failed, "asking the spool for offsets")

    def _ours(self, offset: dict[str, Any], spool: Spool) -> dict[str, Any]:
        """Return what an offset says of the logs that the spool has.

        Raises:
            DataLost: it says something of others, and their messages come from nowhere.
        """
        plain = _plain(offset)
        if LOG_KEY not in plain:
            return plain
        ends, entries = from_json(plain), entries_of(plain)
        strange = [key for key in ends if spool.logs.get(key.topic) != key.log_id]
        for key in strange:
            self._leave(key, ends.pop(key))
            entries.pop(key, None)
        if not strange:
            return plain
        return to_json(ends, entries) if ends else {}

    def _leave(self, key: PartitionKey, sequence: int) -> None:
        if self._found == DIRECT:
            if key.topic not in self._told:
                self._told.add(key.topic)
                log.info("topic %s: what was read before and not finished in nsqd, if any, comes again", key.topic)
            return
        reason = NOT_THIS_SPOOL if self._options.reads(key.topic, key.partition) else "the options leave its topic out"
        lost = DataLost(key.topic, key.label, sequence, None, reason)
        if self._options.fail_on_data_loss:
            raise lost
        log.warning("%s", lost.forgiven())

    def _latest(self, reader: NsqStreamReader, at: dict[str, Any], limit: ReadLimit, spool: Spool) -> dict[str, Any]:
        """Return the latest offset; at the end of availableNow wait until there is one, or nothing waits in nsqd.

        Raises:
            NotAllTaken: something has kept the spool from that for nsqdDownTimeout.
        """
        if not self._is_ending or self._has_end:
            return reader.latestOffset(at, limit)
        surveyor = Surveyor(self._once(spool))
        while True:
            survey = surveyor.look(is_waiting=True)
            if all(entry.is_caught_up for entry in survey.logs.values()):
                self._has_end = True
                reader.end_at(survey)
                return reader.latestOffset(at, limit)
            if (error := self._what_keeps_it(survey)) is not None:
                if self._options.fail_on_data_loss:
                    raise error
                log.warning("%s; ending with what there is", error.reason_said)
                self._has_end = True
                reader.end_at(survey)
                return reader.latestOffset(at, limit)
            found = reader.latestOffset(at, limit)
            if found != at:
                return found
            time.sleep(POLL_S)
            self._run()  # it may have ended, which is to be said at once

    def _what_keeps_it(self, survey: Survey) -> NotAllTaken | None:
        """Return what has kept the spool from having all that waits in nsqd for too long, if anything has."""
        for key, entry in sorted(survey.logs.items()):
            if entry.waits_s >= WAITS_TOLD_S and key.topic not in self._waiting:
                self._waiting.add(key.topic)
                log.warning(
                    "topic %s: availableNow waits, at most for nsqdDownTimeout: %s",
                    key.topic, with_spark_names(entry.waits_for),
                )  # fmt: skip
            if entry.waits_for and entry.waits_s >= self._options.nsqd_down_timeout:
                return NotAllTaken(key.topic, with_spark_names(entry.waits_for), entry.waits_s)
        return None


def _plain(offset: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in offset.items() if key != MODE_KEY}


def _marked(offset: dict[str, Any], mode: str) -> dict[str, Any]:
    return dict(sorted({**offset, MODE_KEY: mode}.items()))
