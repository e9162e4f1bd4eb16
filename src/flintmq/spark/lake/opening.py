"""Opens tables by the name of their format; the libraries are loaded only here.

Source: docs/decisions/0034.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from flintmq.spark.errors import SetupError
from flintmq.spark.lake.table import DELTA, ICEBERG, TABLE, Table, TableError, check_kind

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


def require(kind: str) -> None:
    """See that the library for a format is there.

    Raises:
        SetupError: it is not.
    """
    package = {DELTA: "deltalake", ICEBERG: "pyiceberg"}[kind]
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise SetupError(f"the Python package {package} is missing", f"pip install 'flintmq[{kind}]'") from error
