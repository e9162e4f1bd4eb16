"""Reads the range of one Spark task: fetch, verify, decode, and go on after failures.

Answers are short, as nsqd is quickest with what fits its cache, and several are gathered before they are decoded. One
request is always ahead: nsqd prepares and sends the next batches while this process receives or builds columns.

The rules of this file: what was yielded is never yielded again, whatever fails; before the first fetch of a connection
the identity of the log is checked, because numbers mean nothing in the log of a topic that was created anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import pyarrow as pa

from flintmq.batch import BatchError
from flintmq.errors import FlintError, RemoteProtocolError
from flintmq.spark.broker import FAILURES, POOL, BatchBuffer, ConnectionPool, NsqdConnection, is_final
from flintmq.spark.decode import Decoder, locate
from flintmq.spark.errors import DataLost
from flintmq.spark.options import SourceOptions
from flintmq.spark.plan import FetchRange
from flintmq.spark.retry import Retries

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
        self._decoder = Decoder(options.columns, wanted.topic, wanted.nsqd, wanted.partition, options.batch_rows)

    def record_batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the messages of the range in order.

        Raises:
            DataLost: some are gone, unless ``failOnDataLoss`` is false.
            FlintError: nsqd did not answer, or not properly, more often in a row than ``retries``.
        """
        while self._position < self._end:
            try:
                yield from self._read_on()
            except (*FAILURES, BatchError, _EndMissing) as error:
                if isinstance(error, FlintError) and is_final(error, self._wanted.nsqd, self._link):
                    raise
                self._try_again(error)

    def _try_again(self, error: Exception) -> None:
        try:
            self._retries.failed(error, f"reading {self._wanted.topic} {self._wanted.key.label}")
        except _EndMissing as missing:
            self._lose(missing.found_end, self._end, str(missing))
            self._end = max(self._position, missing.found_end)
            self._retries.succeeded()
        except BatchError as damaged:
            where = f"{self._wanted.topic} {self._wanted.key.label} from {self._position}"
            raise RemoteProtocolError("E_BAD_BATCH", f"damaged batches for {where}: {damaged}") from damaged

    def _read_on(self) -> Iterator[pa.RecordBatch]:
        options = self._options
        with self._pool.lend(
            self._wanted.nsqd, options.connect_timeout, options.fetch_timeout, self._link
        ) as connection:
            epoch = self._enter(connection)
            if self._position < self._end:
                yield from self._stream(connection, epoch)

    def _enter(self, connection: NsqdConnection) -> int:
        """Check that the log is the one that was planned and holds the range; return its epoch."""
        wanted = self._wanted
        logs = connection.offsets([wanted.topic])[0]
        found = next((entry for entry in logs if entry.partition == wanted.partition), None)
        if found is None or found.log_id != wanted.log_id:
            gone = "the topic no longer exists" if found is None else "the topic was deleted and created again"
            self._lose(self._position, self._end, gone)
            self._position = self._end
            return 0
        if found.start > self._position:
            kept_from = min(found.start, self._end)
            self._lose(self._position, kept_from, f"retention has removed everything below {found.start}")
            self._position = kept_from
        if found.end < self._end:
            # the end was durable when the range was planned: nsqd gets some time to find it again
            raise _EndMissing(found.end)
        return found.epoch

    def _stream(self, connection: NsqdConnection, epoch: int) -> Iterator[pa.RecordBatch]:
        self._request(connection, self._position, epoch)
        while self._position < self._end:
            reached = self._gather(connection, epoch)
            messages = locate(self._buffer.batches, self._position, self._end, reached)
            for start, end in messages.gaps:
                self._lose(start, end, "nsqd has set damaged parts of the log aside, its log file says which")
            yield from self._decoder.record_batches(self._buffer.padded, messages)
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
                raise RemoteProtocolError("E_INVALID", f"nsqd {self._wanted.nsqd} does not get beyond {reached}")
            reached = next_sequence
            if reached < self._end:
                self._request(connection, reached, epoch)
            connection.receive_batches(size, self._buffer)
        return reached

    def _request(self, connection: NsqdConnection, start: int, epoch: int) -> None:
        wanted = self._wanted
        connection.send_fetch(wanted.topic, wanted.partition, start, self._end, self._options.fetch_max_bytes, epoch)

    def _lose(self, start: int, end: int, reason: str) -> None:
        lost = DataLost(self._wanted.topic, self._wanted.key.label, start, end, reason)
        if self._options.fail_on_data_loss:
            raise lost
        log.warning("%s", lost)


class _EndMissing(Exception):
    """The log ends before the range does."""

    def __init__(self, found_end: int) -> None:
        super().__init__(found_end)
        self.found_end = found_end

    def __str__(self) -> str:
        return f"the log ends at {self.found_end}"
