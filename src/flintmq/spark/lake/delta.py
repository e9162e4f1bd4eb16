"""Delta tables by delta-rs: a mark is an application transaction (``txn`` of the Delta protocol).

The rules of this file: the protocol lets one of two transactions with the same application fail, and keeps the last
version of each through checkpoints and compactions; so marks need nothing else.

Source: docs/decisions/0034.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction

from flintmq.spark.lake.table import Compacted, DataFile, Mark, TableError, check_marks, local_file, one_line

FAILURES = (DeltaError, OSError)
PLAIN_FEATURES = {"timestampNtz", "v2Checkpoint", "vacuumProtocolCheck", "deletionVectors", "columnMapping"}
STATISTICS_TEXT_MAX = 64  # characters; longer values would have to be cut, and rounded up


class DeltaLakeTable:
    """A Delta table in a directory."""

    def __init__(self, directory: Path, schema: pa.Schema, partition: str = "") -> None:
        self.directory = directory
        whole = schema.append(pa.field(partition, pa.date32())) if partition else schema
        try:
            self._table = DeltaTable.create(
                str(directory), whole, mode="ignore", partition_by=[partition] if partition else None
            )
        except FAILURES as error:
            raise TableError(directory, f"it cannot be made or opened: {one_line(error)}") from error
        have = {field.name: field.type for field in self._table.schema().fields}
        for field in Schema.from_arrow(whole).fields:
            if have.get(field.name) != field.type:
                is_there = f"{field.name} is {have[field.name]}" if field.name in have else f"no column {field.name}"
                raise TableError(directory, f"it has {is_there}, and {field.type} would be written; leave it out")
        if self._table.metadata().partition_columns != ([partition] if partition else []):
            found = ", ".join(self._table.metadata().partition_columns) or "nothing"
            raise TableError(directory, f"it is partitioned by {found}, not by {partition or 'nothing'}")

    @classmethod
    def existing(cls, directory: Path) -> Self:
        """Open a table that is there, whatever its columns are.

        Raises:
            TableError: it cannot be opened.
        """
        table = cls.__new__(cls)
        table.directory = directory
        try:
            table._table = DeltaTable(str(directory))
        except FAILURES as error:
            raise TableError(directory, f"it cannot be opened: {one_line(error)}") from error
        return table

    def marks(self, names: Iterable[str]) -> dict[str, int]:
        self._table.update_incremental()
        found = {name: self._table.transaction_version(name) for name in names}
        return {name: version for name, version in found.items() if version is not None}

    def files(self) -> list[Path]:
        """Return the Parquet files of the latest version.

        Raises:
            TableError: it cannot be read, or needs more than its files' own rows and columns.
        """
        table = self._table
        try:
            features = set(table.protocol().reader_features or ())
            has_deleted = "deletionVectors" in features and any(batch.num_rows for batch in table.deletion_vectors())
            mapping = table.metadata().configuration.get("delta.columnMapping.mode", "none")
            paths = pa.table(table.get_add_actions())["path"].to_pylist()
        except FAILURES as error:
            raise TableError(self.directory, f"it cannot be read: {one_line(error)}") from error
        needed = sorted(features - PLAIN_FEATURES)
        if has_deleted:
            needed.append("deletionVectors: files have rows that were deleted")
        if mapping != "none":
            needed.append("columnMapping: files have other names of columns")
        if needed:
            what = f"its files alone do not say what is in it ({', '.join(needed)})"
            raise TableError(self.directory, f"{what}: write its rows to Parquet files elsewhere, and give those")
        # the log has names below the directory, escaped, and those of files elsewhere as they are
        return [local_file(self.directory, p if ":/" in p else str(self.directory / unquote(p))) for p in paths]

    def add(self, files: Sequence[DataFile], marks: Mapping[str, Mark]) -> None:
        check_marks(self.directory, marks, self.marks(marks))
        moved = [Transaction(name, mark.after) for name, mark in marks.items()]
        try:
            self._table.create_write_transaction(
                [self._action(file) for file in files],
                "append",
                self._table.schema(),
                self._table.metadata().partition_columns,
                commit_properties=CommitProperties(app_transactions=moved),
            )
        except FAILURES as error:
            found = self.marks(marks)
            if all(found.get(name) == mark.after for name, mark in marks.items()):
                return  # it was said to have failed, and has not
            check_marks(self.directory, marks, found)
            raise TableError(self.directory, f"it cannot be written: {one_line(error)}", is_unchanged=True) from error

    def compact(self) -> Compacted:
        """Make few files of small ones, by size: 100 MiB, or what the table's ``delta.targetFileSize`` says.

        Raises:
            TableError: the table cannot be written, or others change it all the time.
        """
        try:
            self._table.update_incremental()
            done = self._table.optimize.compact()
        except FAILURES as error:
            raise TableError(self.directory, f"it cannot be compacted: {one_line(error)}") from error
        return Compacted(int(done["numFilesRemoved"]), int(done["numFilesAdded"]))

    def vacuum(self) -> int:
        """Delete files that neither the table nor a version of the last week needs; return how many.

        Raises:
            TableError: it cannot.
        """
        try:
            self._table.update_incremental()
            return len(self._table.vacuum(dry_run=False, full=True))
        except FAILURES as error:
            raise TableError(
                self.directory, f"what is no longer needed cannot be deleted: {one_line(error)}"
            ) from error

    def _action(self, file: DataFile) -> AddAction:
        path = self.directory / file.path
        now_ms = time.time_ns() // 1_000_000
        statistics = json.dumps(_statistics(pq.read_metadata(path)))
        return AddAction(file.path, path.stat().st_size, dict(file.partition), now_ms, True, statistics)


def _statistics(metadata: pq.FileMetaData) -> dict[str, Any]:
    """Return what readers skip files by, from the file's footer: numbers, times and short texts of plain columns."""
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    unknown: set[str] = set()
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            column = metadata.row_group(group).column(index)
            name, found = column.path_in_schema, column.statistics
            if found is None or not found.has_min_max or "." in name or not _is_plain(found.min, found.max):
                unknown.add(name)
                continue
            least[name] = min(least.get(name, found.min), found.min)
            most[name] = max(most.get(name, found.max), found.max)
            nulls[name] = nulls.get(name, 0) + (found.null_count or 0)
    return {
        "numRecords": metadata.num_rows,
        "minValues": {name: _json(value) for name, value in least.items() if name not in unknown},
        "maxValues": {name: _json(value) for name, value in most.items() if name not in unknown},
        "nullCount": {name: count for name, count in nulls.items() if name not in unknown},
    }


def _is_plain(*values: Any) -> bool:
    return all(
        (isinstance(value, (int, datetime)) and not isinstance(value, bool))
        or (isinstance(value, str) and len(value) <= STATISTICS_TEXT_MAX)
        for value in values
    )  # fmt: skip


def _json(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ") if value.tzinfo else value.isoformat()
    return value
