"""Small micro-batches that travel with their plan: read on the driver, so that Spark starts no Python task for them.

A Python task costs Spark 20 ms, also for a few hundred messages, and more when the machine is busy. Spark lets rows
come with the plan, but asks only a reader of one class for them, the one that it wraps ``SimpleDataSourceStreamReader``
in: ``partitions_func`` in ``pyspark/sql/streaming/python_streaming_source_runner.py``, the same in Spark 4.2 and 4.3.
So a reader that has rows for the plan that it just made says that it is of that class until it was asked for them.
Spark keeps them at the driver while the micro-batch runs, and reads by a task what is not there any more.

Rules of this file: this is never the only way: whatever fails here is read by a task, which tells what failed; and the
number of tasks stays as it was planned, so it is done for micro-batches of one task alone.

Source: docs/decisions/0039.
"""

# ruff: noqa: N802 - the method's name is Spark's

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql import datasource_internal
from pyspark.sql.datasource import InputPartition

from flintmq.spark.options import SourceOptions
from flintmq.spark.tasks import FetchTask, read_task

if TYPE_CHECKING:
    import pyarrow as pa

MESSAGES_MAX = 5_000
"""Of a micro-batch that is read on the driver; of more than these, rows cost more here than a task does."""

ROW_BYTES = 256
"""Of a row, beside its message: more than the other columns take."""

log = logging.getLogger("flintmq.spark")

_asked_for_rows = getattr(datasource_internal, "_SimpleStreamReaderWrapper", None)


class WithRows:
    """A stream reader some of whose plans have their rows with them."""

    _rows: list[pa.RecordBatch] | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Its class, or the one that Spark asks for rows while there are some."""
        return type(self) if self._rows is None else _asked_for_rows

    def getCache(self, start: dict[str, Any], end: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        """Hand over the rows of the plan that was made last; Spark's name for it, and its offsets, are not needed."""
        rows, self._rows = self._rows or [], None
        return iter(rows)

    def _read_ahead(self, tasks: Sequence[InputPartition], size_bytes: float, options: SourceOptions) -> None:
        """Read the messages of a plan now, if they are few.

        Args:
            size_bytes: of all of them, about.
        """
        self._rows = None
        limit = options.driver_read_max_bytes
        if _asked_for_rows is None or len(tasks) != 1 or not 0 < size_bytes <= limit:
            return
        task = tasks[0]
        count = sum(wanted.count for wanted in task.ranges) if isinstance(task, FetchTask) else 0
        if not 0 < count <= MESSAGES_MAX:
            return
        rows, left = [], limit + ROW_BYTES * count
        try:
            # a loss is not forgiven here, where nothing is tried twice: the task may find what is missing now
            for batch in read_task(task, replace(options, retries=0, fail_on_data_loss=True)):
                rows.append(batch)
                left -= batch.nbytes
                if left < 0:
                    return
        except Exception as error:  # noqa: BLE001 - the task meets the same, tries again, and tells
            log.debug("a micro-batch is read by a task, as it could not be read on the driver: %s", error)
            return
        self._rows = rows or None
