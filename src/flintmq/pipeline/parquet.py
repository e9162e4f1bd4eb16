"""Parquet files as a job reads them: which there are, what of them is wanted, and their rows with their places.

The files are those of an archive (:mod:`flintmq.pipeline.files`) or anybody's. Of an archive names tell topic,
partition, log and offsets, and directories the hour, so that files without a wanted row are not opened.

The rules of this file: files and their rows come in an order that follows from their names alone; a column that is not
there, or has another type, is an error that says what there is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from flintmq.errors import FlintError, OptionError
from flintmq.pipeline.files import FileName
from flintmq.spark.lake.opening import current_files
from flintmq.spark.lake.table import table_around, table_at

BATCH_ROWS = 10_000
FILES_MAX = 100_000
_HOUR = re.compile(r"dt=(\d{4}-\d{2}-\d{2})/hour=(\d{2})")  # the two directories of a file
_NS_PER = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
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


def damaged(path: Path, what: str, error: Exception) -> FilesError:
    """Return what to raise for a file in which Arrow finds an error; it tells of some in several lines."""
    return FilesError(path, f"it {what}: {' '.join(str(error).split())}; restore it, or move it away")


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
            # those further up are not of this archive: it may lie in a directory of another one
            if hour := _HOUR.fullmatch(f"{path.parent.parent.name}/{path.parent.name}"):
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
            column = rows.column("timestamp")
            times = column.cast(pa.int64())  # in the column's own unit, so that nothing is cut off or too large
            for bound, compare in ((self.since_ns, pc.greater_equal), (self.until_ns, pc.less)):
                if bound is not None:  # a time in us is before one in ns exactly when it is before that rounded up
                    least = -(-bound // _NS_PER[column.type.unit])
                    tests.append(compare(times, pa.scalar(min(max(least, -(1 << 63)), (1 << 63) - 1), pa.int64())))
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
            tests.append(pc.is_in(as_signed(rows.column("trace_id")), pa.array(signed, pa.int64())))
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

    Of a table of Delta or Iceberg they are those of its latest version, as far as they are in ``path``.

    Raises:
        FilesError: the path does not exist, there is none at all, or more than anybody means.
        TableError: it is in a table whose files cannot be told, or has tables below it.
        SetupError: the library for a table is missing.
    """
    try:
        path.stat()
    except OSError as error:
        is_missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        raise FilesError(path, "it does not exist" if is_missing else f"it cannot be read: {error.strerror}") from error
    whole = path.resolve()
    if (table := table_around(whole)) is not None:
        found = [path / each.relative_to(whole) for each in _files_of(*table) if each.is_relative_to(whole)]
        if not found:
            raise FilesError(path, f"the table of the format {table[1]} at {table[0]} has no files here, as it is now")
    elif path.is_file():
        return [path]
    else:
        found = []
        for each in path.glob("**/*.parquet"):
            if any(part.startswith((".", "_")) for part in each.relative_to(path).parts):
                continue  # staged, or bookkeeping
            found.append(each)
            if len(found) > FILES_MAX:
                raise FilesError(path, f"more than {FILES_MAX} files; name a directory below it")
        check_no_table_below(path, found)
    if not found:
        raise FilesError(path, "there are no Parquet files (*.parquet)")
    return [each for each in sorted(found) if wanted.may_be_in(each)]


def check_no_table_below(path: Path, files: Iterable[Path]) -> None:
    """See that no table of Delta or Iceberg lies below a directory: its files would be read whether they count or not.

    Raises:
        FilesError: one does, above one of these files.
    """
    for parent in {above for each in files for above in each.relative_to(path).parents}:
        if (below := table_at(path / parent)) is not None:
            reason = f"{below[0]} is a table of the format {below[1]}: give it, and what is beside it, one by one"
            raise FilesError(path, reason)


def _files_of(directory: Path, kind: str) -> list[Path]:
    files = current_files(kind, directory)
    if len(files) > FILES_MAX:
        raise FilesError(directory, f"more than {FILES_MAX} files; name a directory below it, or compact it")
    return files


def read_footer(path: Path) -> tuple[pa.Schema, int]:
    """Read the schema of a file, and how many rows it has.

    Raises:
        FilesError: it is no Parquet.
    """
    try:
        metadata = pq.read_metadata(path)
        return metadata.schema.to_arrow_schema(), metadata.num_rows
    except (OSError, pa.ArrowException) as error:
        raise damaged(path, "is no Parquet file", error) from error


def check_columns(path: Path, needed: Sequence[str]) -> pa.Schema:
    """Read the schema of a file.

    Raises:
        OptionError: a column is not there.
        FilesError: it is no Parquet.
    """
    schema, _ = read_footer(path)
    for name in needed:
        if name not in schema.names:
            raise OptionError("column", name, f"{path} has {', '.join(schema.names)}", ARGUMENT)
    return schema


def check_wanted(path: Path, schema: pa.Schema, wanted: Wanted) -> None:
    """See that a file can be asked which of its rows are wanted.

    Raises:
        OptionError: a column for that is not there, or of another type.
    """
    for name in wanted.columns:
        if name not in schema.names:
            raise OptionError("column", name, f"{path} has {', '.join(schema.names)}", ARGUMENT)
        kind = schema.field(name).type
        if name == "timestamp":
            allowed, is_allowed = "a timestamp", pa.types.is_timestamp(kind)
        elif name == "topic":
            inner = value_type(kind)
            allowed, is_allowed = "text", pa.types.is_string(inner) or pa.types.is_large_string(inner)
        else:
            allowed, is_allowed = "whole numbers", pa.types.is_integer(kind)
        if not is_allowed:
            raise OptionError("column", f"{name} {kind}", f"{path}: it has to be {allowed}", ARGUMENT)


def value_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values of a column, whatever form they have in the file.

    That is a dictionary, which pandas makes of its categories; a name for what text is, as DuckDB's JSON; a view.
    """
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_string_view(kind):
        return pa.string()
    return pa.binary() if pa.types.is_binary_view(kind) else kind


def as_signed(numbers: pa.Array) -> pa.Array:
    """Return trace ids as messages have them: the upper half of those without a sign is negative."""
    return numbers.view(pa.int64()) if pa.types.is_uint64(numbers.type) else numbers.cast(pa.int64())


def read_rows(path: Path, columns: Sequence[str], wanted: Wanted) -> Iterator[Rows]:
    """Read the wanted rows of a file, in its order.

    Args:
        columns: of the file; those that ``wanted`` needs are among the rows as well.

    Raises:
        FilesError: the file is damaged.
        OptionError: a column is not there.
    """
    needed = list(dict.fromkeys([*columns, *wanted.columns]))
    check_wanted(path, check_columns(path, needed), wanted)
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
        raise damaged(path, "cannot be read", error) from error
