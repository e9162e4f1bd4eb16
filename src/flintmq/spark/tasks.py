"""A Spark task: what it reads, and how.

The rules of this file: a task is plain data, pickled by Spark and sent to executors; reading it imports pyarrow only
there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from flintmq.spark.options import SourceOptions
from flintmq.spark.plan import FetchRange, plan_tasks

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class FetchTask(InputPartition):
    """Ranges that one Spark task reads one after the other."""

    ranges: tuple[FetchRange, ...]


def make_tasks(ranges: Iterable[FetchRange], options: SourceOptions) -> list[FetchTask]:
    """Pack ranges into tasks as the options want it."""
    return [FetchTask(task) for task in plan_tasks(ranges, options.min_partitions, options.max_messages_per_task)]


def read_task(task: InputPartition, options: SourceOptions) -> Iterator[pa.RecordBatch]:
    """Read a task on an executor."""
    from flintmq.spark.fetch import RangeReader

    if isinstance(task, FetchTask):  # Spark sends a plain InputPartition when there is nothing to read
        for wanted in task.ranges:
            yield from RangeReader(wanted, options).record_batches()
