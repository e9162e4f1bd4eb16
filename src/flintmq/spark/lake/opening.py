"""Opens tables by the name of their format; the libraries are loaded only here.

Source: docs/decisions/0034.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from flintmq.spark.errors import SetupError
from flintmq.spark.lake.table import CATALOG_FILE, DELTA, ICEBERG, TABLE, Table, TableError, check_kind

if TYPE_CHECKING:
    import pyarrow as pa


def open_table(
    kind: str,
    directory: Path,
    schema: pa.Schema,
    *,
    partition: str = "",
    day_of: str = "",
    name: str = TABLE,
    catalog: str = "",
) -> Table:
    """Open a table, or make it.

    Args:
        kind: ``delta`` or ``iceberg``.
        schema: of the files that will be added; a table that is there has to have these columns.
        partition: of a new Delta table: a column of dates that is in no file, beside those of ``schema``.
        day_of: of a new Iceberg table: the column by whose day it is partitioned.
        name: of an Iceberg table in its catalog, ``namespace.table``.
        catalog: of PyIceberg's configuration; empty: one in SQLite, in the directory.

    Raises:
        TableError: it has other columns, another place, or cannot be written.
        SetupError: the library for it is missing.
    """
    check_kind(directory, kind)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TableError(directory, f"it cannot be written: {error}") from error
    require(kind)
    if kind == DELTA:
        from flintmq.spark.lake.delta import DeltaLakeTable

        return DeltaLakeTable(directory, schema, partition)
    from flintmq.spark.lake.iceberg import IcebergTable, open_catalog

    return IcebergTable.open(directory, open_catalog(directory, catalog), name, schema, day_of)


def current_files(kind: str, directory: Path) -> list[Path]:
    """Return the Parquet files that have the rows of a table as it is now, all of them and no others.

    Args:
        directory: of the table, without symbolic links.

    Raises:
        TableError: it cannot be read, or its rows are not just those of its files.
        SetupError: the library for it is missing.
    """
    require(kind, directory)
    if kind == DELTA:
        from flintmq.spark.lake.delta import DeltaLakeTable

        return DeltaLakeTable.existing(directory).files()
    if not (directory / CATALOG_FILE).exists():
        raise TableError(
            directory,
            f"only the catalog of an Iceberg table knows its files, and it is not there ({CATALOG_FILE}): write the "
            "rows to Parquet files elsewhere, with Spark or PyIceberg, and give those",
        )
    from flintmq.spark.lake.iceberg import IcebergTable, open_catalog

    return IcebergTable.lying_in(directory, open_catalog(directory)).files()


def require(kind: str, directory: Path | None = None) -> None:
    """See that the library for a format is there.

    Args:
        directory: of the table that it is needed for, if the user has not named the format.

    Raises:
        SetupError: it is not.
    """
    package = {DELTA: "deltalake", ICEBERG: "pyiceberg"}[kind]
    try:
        importlib.import_module(package)
    except ImportError as error:
        why = f"{directory} is a table of the format {kind}, and " if directory else ""
        raise SetupError(f"{why}the Python package {package} is missing", f"pip install 'flintmq[{kind}]'") from error
