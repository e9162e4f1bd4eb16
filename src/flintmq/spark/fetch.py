"""Reads the range of one Spark task: fetch, verify, decode, and go on after failures.

Answers are short, as nsqd is quickest with what fits its cache, and several are gathered before they are decoded. One
request is always ahead: nsqd prepares and sends the next batches while this process receives or builds columns.

nsqd does not verify what it sends, as that is done here. After a failure it is asked to, in case that was damage: it
then finds that itself, sets it aside and tells people of it, and its answer leaves it out.

The rules of this file: what was yielded is never yielded again, whatever fails; before the first fetch of a connection
the identity of the log is checked, because numbers mean nothing in another log; after a failure it is looked up anew
who has the log, because its partition may have another leader, or its data directory another address.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property

import pyarrow as pa

from flintmq.batch import BatchError
from flintmq.errors import DiscoveryError, FlintError, RemoteProtocolError
from flintmq.spark.broker import FAILURES, POOL, BatchBuffer, ConnectionPool, NsqdConnection, is_final
from flintmq.spark.decode import Decoder, locate
from flintmq.spark.discovery import LookupRefused
from flintmq.spark.errors import CREATED_AGAIN, GONE, DataLost, LogAway
from flintmq.spark.offsets import PartitionKey
from flintmq.spark.options import SourceOptions
from flintmq.spark.plan import FetchRange
from flintmq.spark.retry import Retries
from flintmq.spark.survey import Surveyor

PLACES_MAX = 10_000  # remembered in a process
DECODE_BYTES_MAX = 4 << 20  # gathered at most, give or take one answer, when messages are long

log = logging.getLogger("flintmq.spark")


class RangeReader:
    """Reads one range once.

    Args:
        pool: where connections come from and go to.
        sleep: how to pause between attempts; seconds.
    """

    def __init__(
        self,
        wanted: FetchRange,
        options: SourceOptions,
        pool: ConnectionPool = POOL,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._wanted = wanted
        self._options = options
        self._link = options.link
        self._pool = pool
        self._retries = Retries(options.retries, sleep)
        self._position = wanted.start
        self._end = wanted.end
        self._buffer = BatchBuffer(min(DECODE_BYTES_MAX + options.fetch_max_bytes, 8 << 20))
        self._address = self._was_at = wanted.nsqd or _places.get(wanted.key, "")
        self._decoder: Decoder | None = None
        self._decodes_of = ""
        self._has_failed = False
        self._sleep = sleep

    @cached_property
    def _surveyor(self) -> Surveyor:
        """Finds the log again; made when it is not where it was planned, as few tasks need it."""
        # nsqlookupd is asked once for each of our own attempts
        only = replace(self._options, topic=self._wanted.topic, topics=(), topic_pattern="", retries=0)
        return Surveyor(only, sleep=self._sleep, pool=self._pool)

    def record_batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the messages of the range in order.

        Raises:
            DataLost: some are gone, unless ``failOnDataLoss`` is false.
            FlintError: nsqd did not answer, or not properly, more often in a row than ``retries``.
        """
        while self._position < self._end:
            try:
                yield from self._read_on()
            except (*FAILURES, BatchError, LogAway, DiscoveryError, _EndMissing) as error:
                if isinstance(error, LookupRefused):
                    raise
                if isinstance(error, FlintError) and is_final(error, self._address, self._link):
                    raise
                if not isinstance(error, _Moved):
                    self._was_at, self._address = self._address, ""
                self._has_failed = True
                self._try_again(error)

    def _try_again(self, error: Exception) -> None:
        try:
            self._retries.failed(error, f"reading {self._wanted.topic} {self._wanted.label}")
        except _EndMissing as missing:
            self._lose(missing.found_end, self._end, str(missing))
            self._end = max(self._position, missing.found_end)
            self._retries.succeeded()
        except _Unlisted as nowhere:
            self._lose(self._position, self._end, nowhere.reason)
            self._position = self._end
        except BatchError as damaged:
            where = f"{self._wanted.topic} {self._wanted.label} from {self._position}"
            raise RemoteProtocolError("E_BAD_BATCH", f"damaged batches for {where}: {damaged}") from damaged

    def _read_on(self) -> Iterator[pa.RecordBatch]:
        options = self._options
        if not self._address and not self._find():
            return
        with self._pool.lend(self._address, options.connect_timeout, options.fetch_timeout, self._link) as connection:
            epoch = self._enter(connection)
            if epoch is not None and self._position < self._end:
                if self._decodes_of != self._address or self._decoder is None:
                    wanted, self._decodes_of = self._wanted, self._address
                    self._decoder = Decoder(
                        options.columns, wanted.topic, self._address, wanted.partition, options.batch_rows,
                        wanted.log_id,
                    )  # fmt: skip
                yield from self._stream(connection, self._decoder, epoch)

    def _find(self) -> bool:
        """Look up who has the log; False when it is gone, and that is forgiven.

        Raises:
            LogAway: nobody serves it now.
        """
        key = self._wanted.key
        try:
            survey = self._surveyor.look([key])
        except DiscoveryError as error:
            if isinstance(error, LookupRefused) or not self._was_at:
                raise
            log.warning("asking nsqd %s again, where %s was: %s", self._was_at, self._wanted.label, error)
            self._address, self._was_at = self._was_at, ""
            return True
        found = survey.logs.get(key)
        if found is not None:
            self._address = found.nsqd
            if len(_places) >= PLACES_MAX:
                _places.clear()
            _places[key] = found.nsqd
            return True
        if self._surveyor.is_gone(key, survey):
            is_again = any(other[:2] == key[:2] for other in survey.logs)
            self._lose(self._position, self._end, CREATED_AGAIN if is_again else GONE)
            self._position = self._end
            return False
        kind = LogAway if survey.away or key in survey.unled else _Unlisted
        raise kind(key.topic, self._wanted.label, survey.why_missing(key))

    def _enter(self, connection: NsqdConnection) -> int | None:
        """Check that the log is the one that was planned and holds the range; return its epoch, None if it is gone."""
        wanted = self._wanted
        logs = connection.offsets([wanted.topic])[0].logs
        found = next(
            (entry for entry in logs if PartitionKey(wanted.topic, entry.partition, entry.log_id) == wanted.key), None
        )
        if found is None:
            left, self._address = self._address, ""
            if not self._find():
                return None
            raise _Moved(wanted.topic, wanted.label, f"nsqd {left} no longer has it, nsqd {self._address} has")
        if found.start > self._position:
            kept_from = min(found.start, self._end)
            self._lose(self._position, kept_from, f"retention has removed everything below {found.start}")
            self._position = kept_from
        if found.end < self._end:
            # the end was durable when the range was planned: nsqd gets some time to find it again
            raise _EndMissing(found.end)
        return found.epoch

    def _stream(self, connection: NsqdConnection, decoder: Decoder, epoch: int) -> Iterator[pa.RecordBatch]:
        self._request(connection, self._position, epoch)
        while self._position < self._end:
            reached = self._gather(connection, epoch)
            messages = locate(self._buffer.batches, self._position, self._end, reached)
            for start, end in messages.gaps:
                self._lose(start, end, "nsqd has set damaged parts of the log aside, its log file says which")
            yield from decoder.record_batches(self._buffer.padded, messages)
            self._position = reached
            self._retries.succeeded()

    def _gather(self, connection: NsqdConnection, epoch: int) -> int:
        """Receive answers until there is enough to decode; the next request is on its way when this returns."""
        options = self._options
        reached = self._position
        self._buffer.clear()
        while (
            reached < self._end
            and reached - self._position < options.batch_rows
            and self._buffer.size < DECODE_BYTES_MAX
        ):
            next_sequence, size = connection.receive_fetch_head(options.fetch_max_bytes)
            if next_sequence <= reached:
                raise RemoteProtocolError("E_INVALID", f"nsqd {self._address} does not get beyond {reached}")
            reached = next_sequence
            if reached < self._end:
                self._request(connection, reached, epoch)
            connection.receive_batches(size, self._buffer)
        return reached

    def _request(self, connection: NsqdConnection, start: int, epoch: int) -> None:
        wanted = self._wanted
        bytes_max = self._options.fetch_max_bytes
        connection.send_fetch(
            wanted.topic, wanted.partition, start, self._end, bytes_max, epoch, is_verified=self._has_failed
        )

    def _lose(self, start: int, end: int, reason: str) -> None:
        wanted = self._wanted
        if self._options.fail_on_data_loss:
            raise DataLost(wanted.topic, wanted.label, start, end, reason)
        start = max(start, wanted.told_end)
        if start < end:
            log.warning("%s", DataLost(wanted.topic, wanted.label, start, end, reason).forgiven())


class _EndMissing(Exception):
    """The log ends before the range does."""

    def __init__(self, found_end: int) -> None:
        super().__init__(found_end)
        self.found_end = found_end

    def __str__(self) -> str:
        return f"the log ends at {self.found_end}"


class _Moved(LogAway):
    """Another nsqd has the log now, and is asked next."""


class _Unlisted(LogAway):
    """Every nsqd that is known answers, and none has the log: another may be starting with its data directory."""


_places: dict[PartitionKey, str] = {}
"""The nsqds where this process has found logs; whoever reads sees when it is no longer so."""
