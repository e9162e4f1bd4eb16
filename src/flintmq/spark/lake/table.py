"""A table that data files are added to: the files first, then one transaction that says they belong to it.

The rules of this file: with the files a transaction moves *marks*, numbers by name that say how far each source is in
the table; it happens only if every mark still stands where its writer believes. So there is no second place that says
how far a table is, whoever dies when: what a retry would write again is seen to be there.

Source: docs/decisions/0034.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from flintmq.errors import FlintError, UsageError

PARQUET, DELTA, ICEBERG = "parquet", "delta", "iceberg"
TABLE = "nsq.messages"
CATALOG_FILE = "catalog.db"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")  # one slash: a Path has no two


class TableError(FlintError):
    """A table cannot be used as it is.

    Args:
        place: of the table.
        reason: why, and what to do.
        is_unchanged: that it is as it was before is known.
    """

    def __init__(self, place: str | Path, reason: str, *, is_unchanged: bool = False) -> None:
        super().__init__(place, reason)
        self.place = place
        self.reason = reason
        self.is_unchanged = is_unchanged

    def __str__(self) -> str:
        return f"table {self.place}: {self.reason}"


class DataFile(NamedTuple):
    """A Parquet file that is complete and durable, and not yet of the table.

    Attributes:
        path: below the table's directory.
        partition: values of the columns that are in no file, as text.
    """

    path: str
    partition: Mapping[str, str]


class Mark(NamedTuple):
    """A mark of a transaction.

    Attributes:
        before: where it has to stand; None: nowhere yet.
        after: where it stands then.
    """

    before: int | None
    after: int


class Compacted(NamedTuple):
    """A compaction: so many files became so many."""

    before: int
    after: int


class Table(Protocol):
    """A table in a local or mounted directory."""

    directory: Path

    def marks(self, names: Iterable[str]) -> dict[str, int]:
        """Return where marks stand now, of those that do."""

    def all_marks(self) -> dict[str, int]:
        """Return where all marks stand, and perhaps what others have set for themselves.

        Raises:
            TableError: it cannot be read.
        """

    def taken_back(self, marks: Mapping[str, int]) -> dict[str, int | None]:
        """Return which marks say something else than the table has, since somebody took it back to another version.

        Marks do not go back with the rows. What a table has forgotten of its history is not found: where it may be
        that all rows are there, nothing is said.

        Args:
            marks: where they stand.

        Returns:
            Where each stood in the version that the table was taken back to: 0 where it is known that it did not stand
            yet, None where that cannot be known; more than where it stands when rows came back that were given up.

        Raises:
            TableError: it cannot be read.
        """

    def add(self, files: Sequence[DataFile], marks: Mapping[str, Mark]) -> None:
        """Add files and move marks, both or neither.

        Raises:
            TableError: a mark stands elsewhere, so somebody else writes the same; or says more than the table has; or
                the table cannot be written.
        """

    def settle(self, marks: Mapping[str, Mark]) -> None:
        """Say where marks stand from now on that say more than the table has.

        Raises:
            TableError: a mark stands elsewhere, or the table cannot be written.
        """


def kind_of(directory: Path) -> str | None:
    """Return which format a directory has; None when it is empty or absent."""
    if (directory / "_delta_log").is_dir():
        return DELTA
    if (directory / "metadata").is_dir() or (directory / CATALOG_FILE).exists():
        return ICEBERG
    return PARQUET if next(directory.glob("dt=*"), None) is not None else None


def table_around(path: Path) -> tuple[Path, str] | None:
    """Return the table of Delta or Iceberg that a path is, or lies in, and its format; None for any other path."""
    return next((table for directory in (path, *path.parents) if (table := table_at(directory)) is not None), None)


def table_at(directory: Path) -> tuple[Path, str] | None:
    """Return a directory with its format if it is a table of Delta or Iceberg."""
    if os.path.isdir(directory / "_delta_log"):  # of a parent that may not be looked into there is no error
        return directory, DELTA
    if next((directory / "metadata").glob("*.metadata.json"), None) is not None:
        return directory, ICEBERG
    return None


def check_kind(directory: Path, wanted: str) -> None:
    """See that a directory is not of another format.

    Raises:
        TableError: it is.
    """
    found = kind_of(directory)
    if found is not None and found != wanted:
        raise TableError(directory, f"it has the format {found}, not {wanted}; take another directory, or {found}")


def check_marks(place: Path, marks: Mapping[str, Mark], found: Mapping[str, int]) -> None:
    """See that marks stand where a transaction believes.

    Raises:
        TableError: one does not.
    """
    for name, mark in marks.items():
        if found.get(name) != mark.before:
            what = (
                f"{name} is at {found.get(name)}, not at {mark.before}: somebody else writes the same to it; stop one"
            )
            raise TableError(place, what, is_unchanged=True)


def check_history(place: Path, marks: Mapping[str, int], back: Mapping[str, int | None]) -> None:
    """See that the table has the rows that marks say.

    Args:
        marks: where they stand.
        back: what :meth:`Table.taken_back` returned for them.

    Raises:
        TableError: it was taken back to an earlier version, and has fewer.
    """
    if back:
        first = min(back)
        what = f"it was taken back to an earlier version: {told_back(first, marks[first], back[first])}"
        if len(back) > 1:
            what += f"; {len(back) - 1} more like it"
        if any(end is not None and end < marks[name] for name, end in back.items()):
            advice = "One run with failOnDataLoss=false archives that again, as far as nsqd still has it"
        else:
            advice = "One run with failOnDataLoss=false goes on behind that"
        raise TableError(place, f"{what}. {advice}", is_unchanged=True)


def told_back(name: str, mark: int, end: int | None) -> str:
    """Say what of a mark's rows a table lacks that was taken back, or has beyond its mark."""
    if end is None:
        return f"rows of {name} below {mark} are not in it any more, and from where on its history does not say"
    if end > mark:
        return f"of {name} the rows {mark} to {end} (exclusive) are in it again, and would be archived twice"
    return f"of {name} the rows {end} to {mark} (exclusive) are not in it any more"


def local_file(directory: Path, address: str) -> Path:
    """Return the place of a file by the address that a table has of it, in which nothing is escaped.

    Raises:
        TableError: it lies outside of the table's directory, or is not there.
    """
    path = Path(f"/{address.removeprefix('file:').lstrip('/')}" if address.startswith("file:") else address)
    if path.is_relative_to(directory) and path.is_file():
        return path
    raise TableError(directory, f"its file {address} is not in that directory: restore it")


def local_path(given: str | Path, what: str) -> Path:
    """Return an absolute path, which no library takes for the address of a store elsewhere.

    Args:
        what: the argument is, for the error: ``--to``.

    Raises:
        UsageError: it is a URL.
    """
    if _URL.match(str(given)):
        raise UsageError(
            f"{what}: {given} is a URL, and files are read and written in local or mounted directories alone; give the "
            "path where it is mounted"
        )
    return Path(given).absolute()


def one_line(error: Exception) -> str:
    """Return the words of a library's error.

    delta-rs paints its causes below each other, Arrow has several lines, PyIceberg draws boxes, and SQLAlchemy adds the
    statement to what the database says.
    """
    text = str(getattr(error, "orig", None) or error)
    text = re.sub(r"[\u2500-\u257f]+", " ", re.sub(r"\x1b\[[0-9;]*m", "", text))
    return " ".join(re.sub(r"\s*↳\s*", ": ", text).split())


def unused(stem: str) -> str:
    """Return a name for a Parquet file that there never was."""
    return f"{stem}-{os.urandom(6).hex()}.parquet"
