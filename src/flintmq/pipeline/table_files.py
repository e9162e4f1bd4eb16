"""An archive in a table of Delta or Iceberg: files as elsewhere, which become part of the table many at a time.

::

    DIRECTORY/data/dt=2026-11-23/flights-p0000-18eab4542c40c8c8-00000000000001-00000000336777-5f0c7a92.parquet

The rules of this file: which logs there are, and how far each is, the table says alone, by its marks
``topic/partition/log``, which move with the files that bring it there. A file that no transaction names is no part of
the table; its name is never used again.

Source: docs/decisions/0034.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from flintmq.pipeline.files import HOUR_US, Archive, FileName, key_text, move, parse_key
from flintmq.spark.lake.table import DataFile, Mark, Table, TableError, check_history, told_back, unused
from flintmq.spark.offsets import FIRST_SEQUENCE, PartitionKey

FILES_MAX = 256  # of one transaction
BYTES_MAX = 2 << 30
DAY = "dt"
TOLD_MAX = 20  # logs of which it is said that they were taken back

log = logging.getLogger("flintmq.pipeline")


class TableArchive(Archive):
    """A table that is archived to; use as a context manager.

    Args:
        is_partitioned: by a column ``dt``, which is in no file.
    """

    period_us = 24 * HOUR_US
    is_committed_later = True

    def __init__(self, table: Table, *, is_partitioned: bool) -> None:
        super().__init__(table.directory)
        self._table = table
        self._is_partitioned = is_partitioned
        self._positions: dict[PartitionKey, int] = {}
        self._ends: dict[PartitionKey, int] = {}
        self._waiting: list[DataFile] = []
        self._waiting_bytes = 0
        self._is_unknown = False  # whether those that wait are of the table by now
        self._changing = threading.Lock()  # what waits: several threads publish

    def __exit__(self, *_: object) -> None:
        if not self._is_unknown:
            for file in self._waiting:
                (self.directory / file.path).unlink(missing_ok=True)
        super().__exit__()

    def positions(self) -> dict[PartitionKey, int]:
        """Return where each log goes on that the table has a mark of."""
        ends = self._table.all_marks()
        found = {key: ends[name] for name in ends if (key := parse_key(name)) is not None}
        self._positions |= found
        return found

    def positions_now(self, keys: Iterable[PartitionKey]) -> dict[PartitionKey, int]:
        """Return where those logs go on that the table has marks of by now; other machines may write to it."""
        marks = {key_text(key): key for key in keys}
        found = {marks[mark]: end for mark, end in self._table.marks(marks).items()}
        self._positions |= found
        return found

    def settled(self, keys: Iterable[PartitionKey], *, is_lenient: bool) -> dict[PartitionKey, int]:
        """Return where logs go on that the table has fewer rows of than its marks say: somebody took it back.

        Raises:
            TableError: there are some, unless ``is_lenient``.
        """
        wanted = {key_text(key): key for key in keys}
        marks = {name: self._positions[key] for name, key in wanted.items()}
        back = self._table.taken_back(marks) if marks else {}
        if not is_lenient:
            check_history(self.directory, marks, back)
        if not back:
            return {}
        moved: dict[str, Mark] = {}
        for number, (name, end) in enumerate(sorted(back.items())):
            goes_on = marks[name] if end is None else max(end, FIRST_SEQUENCE)
            moved[name] = Mark(marks[name], goes_on)
            if number < TOLD_MAX:
                what = told_back(name, marks[name], end)
                log.warning("table %s was taken back: %s; going on at %d", self.directory, what, goes_on)
        self._table.settle(moved)
        found = {wanted[name]: mark.after for name, mark in moved.items()}
        self._positions |= found
        return found

    def publish(self, staged: Path, name: FileName, moment: datetime) -> Path:
        """Give a staged file, which is durable, its name; it is of the table with the next :meth:`commit`."""
        day = f"{moment:%Y-%m-%d}"
        stem = str(name).removesuffix(".parquet").replace("#", ".")  # of an ephemeral topic; URLs end there
        path = self.directory / "data" / f"{DAY}={day}" / unused(stem)
        move(staged, path)
        partition = {DAY: day} if self._is_partitioned else {}
        with self._changing:
            self._waiting.append(DataFile(str(path.relative_to(self.directory)), partition))
            self._waiting_bytes += path.stat().st_size
            self._ends[name.key] = name.end
        return path

    def commit(self, *, is_due: bool = True) -> dict[PartitionKey, int]:
        """Add the files that wait in one transaction; return to where their logs are by that.

        Nothing more is added once it is not known what became of a transaction.

        Raises:
            TableError: the table cannot be written, or another archive of a topic writes to it.
        """
        with self._changing:
            is_much = len(self._waiting) >= FILES_MAX or self._waiting_bytes >= BYTES_MAX
            if self._is_unknown or not self._waiting or not (is_due or is_much):
                return {}
            ends, self._is_unknown = self._ends, True
            marks = {key_text(key): Mark(self._positions.get(key), end) for key, end in ends.items()}
            try:
                self._table.add(self._waiting, marks)
            except TableError as error:
                self._is_unknown = not error.is_unchanged
                raise
            self._is_unknown = False
            self._positions |= ends
            self._ends = {}
            self._waiting = []
            self._waiting_bytes = 0
            return ends
