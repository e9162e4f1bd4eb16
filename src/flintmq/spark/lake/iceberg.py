"""Iceberg tables by PyIceberg: a mark is a property of the table, set by the transaction that adds the files.

The rules of this file: a transaction happens only upon the very snapshot whose marks were looked at. PyIceberg's own
retries, which would add files upon a snapshot that nobody has looked at, are off; they are made here, with a new look.

Source: docs/decisions/0034.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, TableAlreadyExistsError
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan, parquet_file_to_data_file, pyarrow_to_schema
from pyiceberg.manifest import FileFormat
from pyiceberg.schema import Schema
from pyiceberg.table import Table as CatalogTable
from pyiceberg.table import TableProperties
from pyiceberg.table.name_mapping import create_mapping_from_schema
from pyiceberg.transforms import DayTransform
from pyiceberg.types import IntegerType, LongType
from sqlalchemy.exc import SQLAlchemyError

from flintmq.spark.durable import sync
from flintmq.spark.lake.table import (
    CATALOG_FILE,
    Compacted,
    DataFile,
    Mark,
    TableError,
    check_history,
    check_marks,
    local_file,
    one_line,
    unused,
)

if TYPE_CHECKING:
    from pyiceberg.table import FileScanTask

MARK = "flintmq.mark."
PICKED = "source-snapshot-id"
"""Of a snapshot's summary: the one whose files it has as well (``cherrypick_snapshot``)."""
FIRST = 1  # sequence number; format 1 of Iceberg has none
DATA = "data"
ATTEMPTS = 20
FAILURES = (OSError, ValueError, SQLAlchemyError)
ROW_GROUP_ROWS = 250_000
ROWS_MAX = 1_000_000


def open_catalog(directory: Path, name: str = "") -> Catalog:
    """Open a catalog of PyIceberg's configuration, or the one in SQLite that lies in a directory.

    Raises:
        TableError: there is no such catalog, or it cannot be used.
    """
    _check_name(directory)
    if name:
        try:
            return load_catalog(name)
        except Exception as error:
            raise TableError(f"catalog {name}", f"PyIceberg cannot open it: {one_line(error)}") from error
    root = directory.resolve()
    try:
        return SqlCatalog("flintmq", uri=f"sqlite:///{root / CATALOG_FILE}", warehouse=f"file://{root}")
    except FAILURES as error:
        raise TableError(directory, f"its catalog cannot be opened ({CATALOG_FILE}): {one_line(error)}") from error


class IcebergTable:
    """An Iceberg table whose files lie in a directory."""

    def __init__(self, directory: Path, catalog: Catalog, name: str) -> None:
        self.directory = directory
        self._catalog = catalog
        self._name = name

    @classmethod
    def open(cls, directory: Path, catalog: Catalog, name: str, schema: pa.Schema, day_of: str = "") -> Self:
        """Open a table, or make it.

        Raises:
            TableError: it lies somewhere else, has other columns, or cannot be made.
        """
        _check_name(directory)
        table = cls(directory, catalog, name)
        try:
            table._make(schema, day_of)
        except FAILURES as error:
            raise TableError(directory, f"it cannot be made: {one_line(error)}") from error
        found = table.load().schema()
        missing = [field for field in schema.names if field not in found.column_names]
        if missing:
            raise TableError(directory, f"it has no column {', '.join(missing)}; leave them out, or add them to it")
        if others := list(_differing(found, schema)):
            raise TableError(directory, f"its columns do not fit: {'; '.join(others)}; take another directory")
        return table

    @classmethod
    def lying_in(cls, directory: Path, catalog: Catalog) -> Self:
        """Open the table of a catalog that lies in a directory, whatever its name is.

        Args:
            directory: without symbolic links.

        Raises:
            TableError: none does, or the catalog cannot be read.
        """
        try:
            for name in _names(catalog):
                if catalog.load_table(name).location().removeprefix("file://").rstrip("/") == str(directory):
                    return cls(directory, catalog, name)
        except FAILURES as error:
            raise TableError(directory, f"its catalog cannot be read: {one_line(error)}") from error
        raise TableError(directory, "no table of its catalog lies there; was the directory moved? Move it back")

    def _make(self, schema: pa.Schema, day_of: str) -> None:
        catalog, name = self._catalog, self._name
        if catalog.table_exists(name):
            return
        catalog.create_namespace_if_not_exists(name.rpartition(".")[0])
        location = _address(self.directory)
        try:
            with catalog.create_table_transaction(name, schema, location) as transaction:
                if day_of:
                    with transaction.update_spec() as spec:
                        spec.add_field(day_of, DayTransform(), "day")
        except TableAlreadyExistsError:
            return  # by somebody else, just now

    def load(self) -> CatalogTable:
        """Return the table as it is now.

        Raises:
            TableError: it is gone, or lies somewhere else, or its catalog cannot be read.
        """
        try:
            table = self._catalog.load_table(self._name)
        except NoSuchTableError as error:
            raise TableError(self.directory, f"{self._name} is not in the catalog any more") from error
        except FAILURES as error:
            raise TableError(self.directory, f"its catalog cannot be read: {one_line(error)}") from error
        if table.location().removeprefix("file://") != str(self.directory.resolve()):
            raise TableError(self.directory, f"{self._name} lies in {table.location()}; give that directory")
        table.metadata.properties[TableProperties.COMMIT_NUM_RETRIES] = "0"  # of this object alone
        return table

    def files(self) -> list[Path]:
        """Return the Parquet files of the current snapshot.

        Raises:
            TableError: it cannot be read, or needs more than its files' own rows and columns.
        """
        table = self.load()
        try:
            tasks = list(table.scan().plan_files())
            names: dict[int, set[str]] = {}
            for schema in table.schemas().values():
                for field in schema.fields:
                    names.setdefault(field.field_id, set()).add(field.name)
        except FAILURES as error:
            raise TableError(self.directory, f"it cannot be read: {one_line(error)}") from error
        needed = []
        if any(task.delete_files for task in tasks):
            needed.append("files have rows that were deleted")
        if any(task.file.file_format != FileFormat.PARQUET for task in tasks):
            needed.append("some are no Parquet files")
        needed += [f"a column was renamed: {', '.join(sorted(each))}" for each in names.values() if len(each) > 1]
        if needed:
            what = f"its files alone do not say what is in it ({', '.join(needed)})"
            raise TableError(self.directory, f"{what}: write its rows to Parquet files elsewhere, and give those")
        return [local_file(self.directory, task.file.file_path) for task in tasks]

    def marks(self, names: Iterable[str]) -> dict[str, int]:
        return _marks(self.load(), names)

    def all_marks(self) -> dict[str, int]:
        table = self.load()
        return _marks(table, [name.removeprefix(MARK) for name in table.properties if name.startswith(MARK)])

    def taken_back(self, marks: Mapping[str, int]) -> dict[str, int | None]:
        return _taken_back(self.load(), marks)

    def settle(self, marks: Mapping[str, Mark]) -> None:
        self._add([], marks, is_settling=True)

    def add(self, files: Sequence[DataFile], marks: Mapping[str, Mark]) -> None:
        self._add(files, marks)

    def _add(self, files: Sequence[DataFile], marks: Mapping[str, Mark], *, is_settling: bool = False) -> None:
        paths = [_address(self.directory / file.path) for file in files]
        properties = {MARK + name: str(mark.after) for name, mark in marks.items()}
        error: Exception | None = None
        for _ in range(ATTEMPTS):
            table = self.load()
            found = _marks(table, marks)
            if error is not None and all(found.get(name) == mark.after for name, mark in marks.items()):
                return  # it was said to have failed, and has not
            check_marks(self.directory, marks, found)
            if not is_settling:
                check_history(self.directory, found, _taken_back(table, found))
            try:
                with table.transaction() as transaction:
                    transaction.set_properties(properties)
                    transaction.add_files(paths, snapshot_properties=properties, check_duplicate_files=False)
                return
            except CommitFailedException as failed:
                error = failed
            except FAILURES as failed:
                found = self.marks(marks)
                if all(found.get(name) == mark.after for name, mark in marks.items()):
                    return
                reason = f"it cannot be written: {one_line(failed)}"
                raise TableError(self.directory, reason, is_unchanged=True) from failed
        raise TableError(self.directory, f"others change it all the time: {error}", is_unchanged=True) from error

    def compact(self, rows_max: int = ROWS_MAX) -> Compacted:
        """Make few files of small ones, one transaction for each new file.

        Args:
            rows_max: of a new file.

        Raises:
            TableError: the table cannot be written, or others change it all the time.
        """
        before = after = 0
        try:
            for group in self._small(rows_max):
                if self._rewrite(group):
                    before += len(group)
                    after += 1
        except (*FAILURES, pa.ArrowException) as error:
            reason = f"it cannot be compacted: {one_line(error)}; nothing is lost, run it again when that is mended"
            raise TableError(self.directory, reason) from error
        return Compacted(before, after)

    def _small(self, rows_max: int) -> list[list[FileScanTask]]:
        """Group the files of each partition so that none has more than ``rows_max`` rows."""
        table = self.load()
        partitions: dict[Any, list[FileScanTask]] = {}
        for task in _whole(table).values():
            if task.file.spec_id == table.metadata.default_spec_id and task.file.record_count < rows_max:
                partitions.setdefault(task.file.partition, []).append(task)
        groups: list[list[FileScanTask]] = []
        for tasks in partitions.values():
            rows = rows_max
            for task in sorted(tasks, key=lambda each: each.file.file_path):
                if rows + task.file.record_count > rows_max:
                    groups.append([])
                    rows = 0
                groups[-1].append(task)
                rows += task.file.record_count
        return [group for group in groups if len(group) > 1]

    def _rewrite(self, group: Sequence[FileScanTask]) -> bool:
        """Write one file for several; False when somebody else changed them meanwhile."""
        table = self.load()
        expected = sum(task.file.record_count for task in group)
        path = self.directory / DATA / unused("compacted")
        path.parent.mkdir(exist_ok=True)
        try:
            rows = self._write(table, group, path)
            if rows != expected:
                raise TableError(self.directory, f"{rows} rows were read of {expected}; nothing was changed")
            is_done = self._replace(group, path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        if not is_done:
            path.unlink()
        return is_done

    def _write(self, table: CatalogTable, group: Sequence[FileScanTask], path: Path) -> int:
        rows = 0
        # Iceberg's own types are the large ones; the file has those that the others have
        with self._reading(group[0]):
            schema = pq.read_schema(group[0].file.file_path.removeprefix("file://"))
        with pq.ParquetWriter(path, schema, compression="zstd", compression_level=1) as writer:
            for task in group:
                for batch in self._batches(table, task):
                    rows += batch.num_rows
                    found = pa.Table.from_batches([batch]).select(schema.names).cast(schema)
                    writer.write_table(found, row_group_size=ROW_GROUP_ROWS)
        sync(path)
        sync(path.parent)
        return rows

    def _batches(self, table: CatalogTable, task: FileScanTask) -> Iterator[pa.RecordBatch]:
        batches = ArrowScan(table.metadata, table.io, table.schema(), AlwaysTrue()).to_record_batches([task])
        while True:
            with self._reading(task):  # not around the yield: whoever takes it writes
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    @contextmanager
    def _reading(self, task: FileScanTask) -> Iterator[None]:
        try:
            yield
        except (*FAILURES, pa.ArrowException) as error:
            what = f"its file {task.file.file_path} cannot be read: {one_line(error)}"
            raise TableError(self.directory, f"{what}; nothing was changed, restore that file") from error

    def _replace(self, group: Sequence[FileScanTask], path: Path) -> bool:
        error: Exception | None = None
        for _ in range(ATTEMPTS):
            table = self.load()
            present = _whole(table)
            if any(task.file.file_path not in present for task in group):
                return False
            new = parquet_file_to_data_file(table.io, table.metadata, _address(path))
            try:
                with (
                    table.transaction() as transaction,
                    transaction.update_snapshot({"flintmq.compacted": str(len(group))}).overwrite() as change,
                ):
                    for task in group:
                        change.delete_data_file(task.file)
                    change.append_data_file(new)
                return True
            except CommitFailedException as failed:
                error = failed
            except FAILURES as failed:
                raise TableError(self.directory, f"it cannot be compacted: {one_line(failed)}") from failed
        raise TableError(self.directory, f"others change it all the time: {error}") from error


def _check_name(directory: Path) -> None:
    """See that PyIceberg finds a directory by its name, in which it takes some signs for those of a URL.

    Raises:
        TableError: it does not.
    """
    if any(sign in str(directory.resolve()) for sign in "?#%"):
        raise TableError(directory, "PyIceberg cannot have a ?, # or % in the name of a directory; take another one")


def _differing(found: Schema, schema: pa.Schema) -> Iterator[str]:
    """Say which columns of a table do not take what files of a schema have, by name and type."""
    names = create_mapping_from_schema(found)
    for field in schema:
        wanted = found.find_field(field.name).field_type
        try:
            have = pyarrow_to_schema(pa.schema([field]), names).fields[0].field_type
        except ValueError:  # a map or a list, where the table has something without parts
            yield f"{field.name} is {wanted}, and {field.type} would be written"
            continue
        if have != wanted and not (have == IntegerType() and wanted == LongType()):
            yield f"{field.name} is {wanted}, and {have} would be written"
    for column in found.fields:
        if column.required:  # Arrow's columns may all have nulls
            yield f"{column.name} is required"


def _address(path: Path) -> str:
    """Return the address of a file as PyIceberg reads it: nothing is escaped."""
    return f"file://{path.resolve()}"


def _names(catalog: Catalog) -> Iterator[str]:
    """Name the tables of a catalog."""
    spaces = list(catalog.list_namespaces())
    while spaces:
        space = spaces.pop()
        spaces += catalog.list_namespaces(space)
        for name in catalog.list_tables(space):
            yield ".".join(name)


def _marks(table: CatalogTable, names: Iterable[str]) -> dict[str, int]:
    return {name: int(table.properties[MARK + name]) for name in names if MARK + name in table.properties}


def _taken_back(table: CatalogTable, marks: Mapping[str, int]) -> dict[str, int | None]:
    """Compare marks with those in the summaries of the snapshots that the current one was made upon.

    A chain of parents that ends is no beginning: PyIceberg takes the parent away from a snapshot when that expires. So
    a mark that the chain does not show was taken back only if the snapshot that set it is younger than what is left of
    the chain; an older one may be of the same line, and kept by a tag or a branch.
    """
    snapshots = {snapshot.snapshot_id: snapshot for snapshot in table.snapshots()}
    told = {
        each: dict(found.summary.additional_properties) if found.summary else {} for each, found in snapshots.items()
    }
    line: set[int] = set()
    here: dict[str, int] = {}
    oldest = 0  # sequence number of the chain's end
    at = table.metadata.current_snapshot_id
    is_empty = at is None
    while at in snapshots and len(here) < len(marks):  # no longer: older ones were expired
        line.add(at)
        oldest = snapshots[at].sequence_number or 0
        here = {name: int(told[at][MARK + name]) for name in marks if MARK + name in told[at]} | here
        if PICKED in told[at]:
            source = next((found for each, found in told.items() if str(each) == told[at][PICKED]), {MARK: ""})
            if any(key.startswith(MARK) for key in source):
                break  # it has rows of an archive, or may have: marks do not say which
        at = snapshots[at].parent_snapshot_id
    back: dict[str, int | None] = {name: end for name, end in here.items() if end != marks[name]}
    # a mark that no snapshot has set was set by hand, or long ago
    for name in marks.keys() - here.keys():
        value = str(marks[name])
        set_by = [snapshots[each] for each in told.keys() - line if told[each].get(MARK + name) == value]
        if set_by and is_empty:
            back[name] = 0
        elif any((snapshot.sequence_number or 0) > oldest for snapshot in set_by):
            back[name] = 0 if oldest == FIRST else None
    return back


def _whole(table: CatalogTable) -> dict[str, FileScanTask]:
    """Return the files of the table of which no row was deleted, by path."""
    return {task.file.file_path: task for task in table.scan().plan_files() if not task.delete_files}
