"""Parquet files as a job reads them: which there are, what of them is wanted, and their rows with their places.

The files are those of an archive (:mod:`flintmq.pipeline.files`) or anybody's. Of an archive names tell topic,
partition, log and offsets, and directories the hour, so that files without a wanted row are not opened.

The rules of this file: files and their rows come in an order that follows from their names alone; a column that is not
there, or has another type, is an error that says what there is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from flintmq.errors import FlintError, OptionError
from flintmq.pipeline.files import FileName

BATCH_ROWS = 10_000
FILES_MAX = 100_000
_HOUR = re.compile(r"dt=(\d{4}-\d{2}-\d{2})/hour=(\d{2})")
ARGUMENT = "argument"


class FilesError(FlintError):
    """Files cannot be read, or a row of one cannot be used.

    Args:
        path: of the file or directory.
        reason: why, and what to do.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The rows that are wanted; what is None or empty bounds nothing.

    Attributes:
        since_ns, until_ns: of column ``timestamp``, the second exclusive.
        start_offset, end_offset: of column ``offset``, the second exclusive.
        topic: of column ``topic``.
        partitions: of column ``partition``.
        trace_ids: of column ``trace_id``, as unsigned numbers.
    """

    since_ns: int | None = None
    until_ns: int | None = None
    start_offset: int | None = None
    end_offset: int | None = None
    topic: str = ""
    partitions: tuple[int, ...] = ()
    trace_ids: tuple[int, ...] = ()

    @property
    def columns(self) -> list[str]:
        """The columns that tell whether a row is wanted."""
        needed = {
            "timestamp": self.since_ns is not None or self.until_ns is not None,
            "offset": self.start_offset is not None or self.end_offset is not None,
            "topic": bool(self.topic),
            "partition": bool(self.partitions),
            "trace_id": bool(self.trace_ids),
        }
        return [name for name, is_needed in needed.items() if is_needed]

    def may_be_in(self, path: Path) -> bool:
        """Whether a file can have a wanted row, as far as its name tells."""
        name = FileName.parse(path.name)
        if name is not None:
            if self.topic and name.key.topic != self.topic:
                return False
            if self.partitions and name.key.partition not in self.partitions:
                return False
            if self.start_offset is not None and name.end <= self.start_offset:
                return False
            if self.end_offset is not None and name.start >= self.end_offset:
                return False
            if hour := _HOUR.search(path.as_posix()):
                begin = datetime.fromisoformat(f"{hour[1]}T{hour[2]}:00:00").replace(tzinfo=UTC)
                if self.until_ns is not None and begin.timestamp() * 1e9 >= self.until_ns:
                    return False
                if self.since_ns is not None and (begin + timedelta(hours=1)).timestamp() * 1e9 <= self.since_ns:
                    return False
        return True

    def mask(self, rows: pa.RecordBatch) -> Any:
        """Return which rows are wanted; None for all."""
        tests = []
        if self.since_ns is not None or self.until_ns is not None:
            times = rows.column("timestamp").cast(pa.timestamp("us", tz="UTC"))
            for bound, compare in ((self.since_ns, pc.greater_equal), (self.until_ns, pc.less)):
                if bound is not None:  # a time in us is before one in ns exactly when it is before that rounded up
                    tests.append(compare(times, pa.scalar(-(-bound // 1000), pa.timestamp("us", tz="UTC"))))
        if self.start_offset is not None:
            tests.append(pc.greater_equal(rows.column("offset"), self.start_offset))
        if self.end_offset is not None:
            tests.append(pc.less(rows.column("offset"), self.end_offset))
        if self.topic:
            tests.append(pc.equal(rows.column("topic"), self.topic))
        if self.partitions:
            tests.append(pc.is_in(rows.column("partition").cast(pa.int64()), pa.array(self.partitions, pa.int64())))
        if self.trace_ids:
            signed = [each - (1 << 64) if each >= 1 << 63 else each for each in self.trace_ids]
            tests.append(pc.is_in(rows.column("trace_id").cast(pa.int64()), pa.array(signed, pa.int64())))
        if not tests:
            return None
        mask = tests[0]
        for test in tests[1:]:
            mask = pc.and_(mask, test)
        return pc.fill_null(mask, False)


@dataclass(slots=True)
class Rows:
    """Wanted rows of a file, and where they are in it.

    Attributes:
        numbers: of each row in its file, from 0.
    """

    path: Path
    batch: pa.RecordBatch
    numbers: Any = field(repr=False)

    def place(self, index: int) -> str:
        """Name a row for people: its topic, partition and offset, or its number in the file."""
        names = self.batch.schema.names
        known = [
            f"{name} {self.batch.column(name)[index].as_py()}"
            for name in ("topic", "partition", "offset")
            if name in names
        ]
        file = FileName.parse(self.path.name)
        if file is not None and "topic" not in names:
            known = [f"topic {file.key.topic}", f"partition {file.key.partition}", *known[-1:]]
        return f"{self.path}, row {self.numbers[index].as_py()}" + (f" ({', '.join(known)})" if known else "")


def find_files(path: Path, wanted: Wanted) -> list[Path]:
    """Return the Parquet files that can have wanted rows, by hour, topic, partition and offset, else by name.

    Raises:
        FilesError: there is none at all, or more than anybody means.
    """
    if path.is_file():
        return [path]
    found = []
    for each in path.glob("**/*.parquet"):
        if any(part.startswith((".", "_")) for part in each.relative_to(path).parts):
            continue  # staged, or bookkeeping
        found.append(each)
        if len(found) > FILES_MAX:
            raise FilesError(path, f"more than {FILES_MAX} files; name a directory below it")
    if not found:
        raise FilesError(path, "there are no Parquet files (*.parquet)")
    return [each for each in sorted(found) if wanted.may_be_in(each)]


def check_columns(path: Path, needed: Sequence[str]) -> pa.Schema:
    """Read the schema of a file.

    Raises:
        OptionError: a column is not there.
        FilesError: it is no Parquet.
    """
    try:
        schema: pa.Schema = pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        raise FilesError(path, f"it is no Parquet file: {error}") from error
    for name in needed:
        if name not in schema.names:
            raise OptionError("column", name, f"{path} has {', '.join(schema.names)}", ARGUMENT)
    return schema


def read_rows(path: Path, columns: Sequence[str], wanted: Wanted) -> Iterator[Rows]:
    """Read the wanted rows of a file, in its order.

    Args:
        columns: of the file; those that ``wanted`` needs are among the rows as well.

    Raises:
        FilesError: the file is damaged.
        OptionError: a column is not there.
    """
    needed = list(dict.fromkeys([*columns, *wanted.columns]))
    schema = check_columns(path, needed)
    if "timestamp" in wanted.columns and not pa.types.is_timestamp(schema.field("timestamp").type):
        kind = schema.field("timestamp").type
        raise OptionError("column", f"timestamp {kind}", f"{path}: it has to be a timestamp", ARGUMENT)
    try:
        with pq.ParquetFile(path) as file:
            first = 0
            for batch in file.iter_batches(BATCH_ROWS, columns=needed, use_threads=False):
                numbers = pa.array(range(first, first + batch.num_rows), pa.int64())
                first += batch.num_rows
                mask = wanted.mask(batch)
                if mask is not None:
                    batch, numbers = batch.filter(mask), numbers.filter(mask)
                if batch.num_rows:
                    yield Rows(path, batch, numbers)
    except (OSError, pa.ArrowException) as error:
        raise FilesError(path, f"it cannot be read: {error}") from error
