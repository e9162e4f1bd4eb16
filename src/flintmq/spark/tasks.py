"""A Spark task: what it reads, and how.

The rules of this file: a task is plain data, pickled by Spark and sent to executors; reading it imports pyarrow only
there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from flintmq.spark.garbage import spare_what_stays
from flintmq.spark.options import CURSOR, OFFSET, PLAIN, LinkOptions, SourceOptions
from flintmq.spark.plan import FetchRange, plan_tasks

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class SpoolPlace:
    """A spool: the address that it serves its logs at, and the reference to its token."""

    address: str
    auth_secret: str


@dataclass(frozen=True)
class FetchTask(InputPartition):
    """Ranges that one Spark task reads one after the other; of nsqd if ``spool`` is None."""

    ranges: tuple[FetchRange, ...]
    spool: SpoolPlace | None = None


def make_tasks(ranges: Iterable[FetchRange], options: SourceOptions) -> list[FetchTask]:
    """Pack ranges into tasks as the options want it."""
    return [FetchTask(task) for task in plan_tasks(ranges, options.min_partitions, options.max_messages_per_task)]


def at_spool(options: SourceOptions, place: SpoolPlace) -> SourceOptions:
    """Return the options with which a spool is read as if it were an nsqd."""
    own = {field.name: getattr(PLAIN, field.name) for field in fields(LinkOptions)}
    own["auth_secret"] = place.auth_secret
    return replace(
        options,
        mode=OFFSET,
        nsqd=(place.address,),
        lookupd=(),
        starting_offsets=CURSOR,
        allow_unsafe_latest=False,
        **own,
    )


def read_task(task: InputPartition, options: SourceOptions) -> Iterator[pa.RecordBatch]:
    """Read a task on an executor."""
    from flintmq.spark.fetch import RangeReader

    spare_what_stays()
    if isinstance(task, FetchTask) and task.spool is not None:
        options = at_spool(options, task.spool)
    if isinstance(task, FetchTask):  # Spark sends a plain InputPartition when there is nothing to read
        for wanted in task.ranges:
            yield from RangeReader(wanted, options).record_batches()
