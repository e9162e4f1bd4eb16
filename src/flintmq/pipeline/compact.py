"""``flintmq pipeline compact``: few files in the place of many small ones, while others read and an archive writes.

Delta and Iceberg have transactions for that. Of an archive of plain files::

    flights/dt=2026-11-23/hour=14/              what readers see
        flights-p0000-...-01-41.parquet
        flights-p0000-...-41-51.parquet
    .flights.compacting/dt=2026-11-23-hour=14/  what is made, beside: few files, and links to those that stay
        flights-p0000-...-01-51.parquet

The rules of this file: the two directories are exchanged by one system call, so whoever lists sees either the one or
the other; the old one is deleted a while later, so that whoever was listing it has got all its names. Only files of one
log that follow each other without a gap become one, so names stay true; what an archive publishes meanwhile is linked
before the exchange, while names are held. Whatever is in the directory beside can be lost.

Source: docs/decisions/0034.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from flintmq.clock import SystemClock
from flintmq.errors import FlintError, UsageError
from flintmq.options import SECOND, Integer, Switch, Text, option
from flintmq.pipeline.files import (
    ROW_GROUP_BYTES,
    ROW_GROUP_ROWS,
    ArchiveError,
    FileName,
    changing_names,
    take,
)
from flintmq.pipeline.options import JobOptions, Work
from flintmq.pipeline.parquet import damaged, read_footer
from flintmq.pipeline.runner import Runner, run_command
from flintmq.spark.durable import sync
from flintmq.spark.lake.opening import require
from flintmq.spark.lake.table import DELTA, PARQUET, TABLE, kind_of, local_path

GRACE_S = 1.0
LOCK = ".compact-lock"
ROWS_MAX = 1_000_000
READ_ROWS = 65_536
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_UNABLE = (errno.EINVAL, errno.ENOSYS, errno.EXDEV, errno.EOPNOTSUPP)
_WHAT, _HOW = "What to compact", "How"


@dataclass(frozen=True, kw_only=True)
class CompactOptions(JobOptions):
    """The flags of flintmq pipeline compact."""

    program: ClassVar[str] = "flintmq pipeline compact"
    summary: ClassVar[str] = "flintmq pipeline compact makes few files of many small ones, in an archive or a table."

    directory: str = option(Text("DIRECTORY"), "", "of the archive, or the table", group=_WHAT)
    table: str = option(Text("NAME"), TABLE, "of Iceberg: its name in the catalog", group=_WHAT)
    catalog: str = option(
        Text("NAME"),
        "",
        "of Iceberg: a catalog of PyIceberg's configuration",
        group=_WHAT,
        default_text="SQLite, in the directory",
    )
    rows_per_file: int = option(
        Integer(0),
        0,
        "most messages of a new file; not for Delta, which goes by size",
        group=_HOW,
        default_text="1000000",
    )
    vacuum: bool = option(
        Switch(), False, "Delta: delete files that no version of the last week has; others keep none", group=_HOW
    )


@dataclass(slots=True)
class Compacted(Work):
    """The work so far; ``rows`` are in new files.

    Attributes:
        before: files that became fewer.
        after: what they became.
        deleted: old files that ``vacuum`` deleted.
    """

    before: int = 0
    after: int = 0
    deleted: int = 0

    def figures(self) -> dict[str, int]:
        return {"files before": self.before, "files after": self.after}


def compact(
    directory: str | Path,
    *,
    table: str = TABLE,
    catalog: str = "",
    rows_per_file: int = 0,
    vacuum: bool = False,
    on_progress: Callable[[Compacted], None] | None = None,
    stop: threading.Event | None = None,
) -> Compacted:
    """Make few files of many small ones in an archive or a table; its format is found.

    Args:
        table: of Iceberg, its name in the catalog.
        catalog: of Iceberg, by its name in PyIceberg's configuration; empty: the one in ``directory``.
        rows_per_file: at most; 0: a million. Delta goes by size, its ``delta.targetFileSize``.
        vacuum: of Delta: delete files that no version of the last week has.
        stop: ends it between two directories when set.

    Raises:
        UsageError: the directory is a URL, or something is given that the format has not.
        FlintError: there is nothing of ours, it cannot be written, or somebody else compacts it.
    """
    path = local_path(directory, "the directory")
    kind = kind_of(path)
    if kind is None:
        raise ArchiveError(path, "there is no archive and no table; give the directory that was archived to")
    if kind == DELTA and rows_per_file:
        raise UsageError("Delta goes by size, not by --rows-per-file: set the table's delta.targetFileSize")
    if kind != DELTA and vacuum:
        raise UsageError(f"--vacuum is for Delta; this is {kind}")
    runner = Runner(on_progress, stop)
    done = Compacted()
    if kind == PARQUET:
        Compactor(path, rows_per_file or ROWS_MAX, runner, done).run()
        return done
    require(kind)
    if kind == DELTA:
        from flintmq.spark.lake.delta import DeltaLakeTable

        delta = DeltaLakeTable.existing(path)
        done.before, done.after = delta.compact()
        if vacuum:
            done.deleted = delta.vacuum()
        return done
    from flintmq.spark.lake.iceberg import IcebergTable, open_catalog

    lock = take(path, LOCK, "another compaction works on it")
    try:
        done.before, done.after = IcebergTable(path, open_catalog(path, catalog), table).compact(
            rows_per_file or ROWS_MAX
        )
    finally:
        os.close(lock)
    return done


class Run(NamedTuple):
    """Files of one log that become one."""

    name: FileName
    paths: list[Path]


class Compactor:
    """Compacts an archive of plain files, a directory of an hour at a time."""

    def __init__(self, directory: Path, rows_max: int, runner: Runner, done: Compacted) -> None:
        self._directory = directory
        self._rows_max = rows_max
        self._runner = runner
        self._done = done
        self._clock = SystemClock()
        self._old: deque[tuple[int, Path]] = deque()  # since when, in ns

    def run(self) -> None:
        """Compact every hour.

        Raises:
            ArchiveError: it cannot be written, or somebody else compacts it.
        FilesError: a file is damaged; it is named, and its hour is as it was.
        """
        whole = self._directory.resolve()
        lock = take(whole, LOCK, "another compaction works on it")
        try:
            workshop = whole.parent / f".{whole.name}.compacting"
            shutil.rmtree(workshop, ignore_errors=True)  # of one that was killed
            workshop.mkdir()
            for hour in sorted(whole.glob("dt=*/hour=*/")):
                if self._runner.stop.is_set():
                    break
                self._compact(hour, workshop / f"{hour.parent.name}-{hour.name}")
                self._delete_old(GRACE_S)
            self._leave(workshop)
        except (OSError, FlintError) as error:
            with suppress(OSError):  # what happened first is told
                self._leave(workshop)
            if isinstance(error, FlintError):
                raise
            reason = f"{error}; nothing is lost, run it again when that is mended"
            raise ArchiveError(self._directory, reason) from error
        finally:
            os.close(lock)

    def _leave(self, workshop: Path) -> None:
        if self._old:
            threading.Event().wait(GRACE_S)
        self._delete_old(0)
        workshop.rmdir()

    def _delete_old(self, after_s: float) -> None:
        while self._old and self._clock.monotonic_ns() - self._old[0][0] >= after_s * SECOND:
            shutil.rmtree(self._old.popleft()[1])

    def _compact(self, hour: Path, place: Path) -> None:
        runs = list(self._runs(hour))
        if not runs:
            return
        replaced = {path.name for run in runs for path in run.paths}
        is_exchanged = False
        try:
            place.mkdir()
            shutil.copystat(hour, place)
            for run in runs:
                self._done.rows += _merge(run, place)
                self._runner.tell(self._done)
            with changing_names(self._directory):
                for path in hour.iterdir():
                    if path.name not in replaced:
                        os.link(path, place / path.name, follow_symlinks=False)
                sync(place)
                exchange(place, hour)
                is_exchanged = True
                sync(hour.parent)
                sync(place.parent)
        except (OSError, FlintError):
            if not is_exchanged:  # else it is the old one, and whether the new one is durable is not known
                shutil.rmtree(place, ignore_errors=True)
            raise
        self._old.append((self._clock.monotonic_ns(), place))
        self._done.before += len(replaced)
        self._done.after += len(runs)
        self._runner.tell(self._done)

    def _runs(self, hour: Path) -> Iterator[Run]:
        """Find files that follow each other, have the same columns and are not too many messages together."""
        entries = list(hour.iterdir())
        if any(entry.is_dir() for entry in entries):
            return  # somebody else's; a directory cannot be linked
        found = [(name, path) for path in entries if (name := FileName.parse(path.name)) is not None]
        last: Run | None = None
        last_rows = 0
        schema: pa.Schema | None = None
        for name, path in sorted(found):
            found_schema, count = read_footer(path)
            own = found_schema.remove_metadata()
            rows = last_rows + count
            if (
                last is not None
                and name.key == last.name.key
                and name.start == last.name.end
                and rows <= self._rows_max
                and own == schema
            ):
                last = Run(FileName(name.key, last.name.start, name.end), [*last.paths, path])
                last_rows = rows
                continue
            if last is not None and len(last.paths) > 1:
                yield last
            last, last_rows, schema = Run(name, [path]), count, own
        if last is not None and len(last.paths) > 1:
            yield last


def _merge(run: Run, place: Path) -> int:
    """Write the rows of files as one, durably; return how many there are."""
    footers = [read_footer(path) for path in run.paths]
    schema = footers[0][0]
    rows, expected = 0, sum(count for _, count in footers)
    path = place / str(run.name)
    with pq.ParquetWriter(path, schema, compression="zstd", compression_level=1) as writer:
        for table in _gathered(run.paths):
            rows += table.num_rows
            writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
    if rows != expected:
        raise ArchiveError(place, f"{rows} rows were read of {expected} for {run.name}; nothing was changed")
    sync(path)
    return rows


def _gathered(paths: Sequence[Path]) -> Iterator[pa.Table]:
    """Read files in row groups as large as an archive makes them."""
    gathered: list[pa.RecordBatch] = []
    size = rows = 0
    for path in paths:
        for batch in _batches(path):
            gathered.append(batch)
            size += batch.nbytes
            rows += batch.num_rows
            if size >= ROW_GROUP_BYTES or rows >= ROW_GROUP_ROWS:
                yield pa.Table.from_batches(gathered)
                gathered.clear()
                size = rows = 0
    if gathered:
        yield pa.Table.from_batches(gathered)


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Read a file.

    Raises:
        FilesError: it is damaged; it is named.
    """
    try:
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=READ_ROWS)
    except (OSError, pa.ArrowException) as error:
        raise damaged(path, "cannot be read", error) from error


def exchange(one: Path, other: Path) -> None:
    """Let two directories take each other's name, at once for whoever looks.

    Raises:
        ArchiveError: this system or file system cannot.
        OSError: it failed in another way.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise ArchiveError(other, "this system cannot exchange two directories (renameat2); compact on Linux")
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        if number in _UNABLE:
            systems = "ext4, xfs, btrfs, tmpfs"
            reason = f"it and the directory beside it need one file system that exchanges directories: {systems}"
            raise ArchiveError(other, reason)
        raise OSError(number, os.strerror(number), str(other))


def run(arguments: Sequence[str]) -> int:
    """Run ``flintmq pipeline compact``; a signal ends it behind the directory it is at."""
    if arguments and not arguments[0].startswith("-"):
        arguments = [f"--directory={arguments[0]}", *arguments[1:]]
    return run_command(CompactOptions, arguments, _run)


def _run(options: CompactOptions, runner: Runner) -> None:
    if not options.directory:
        raise UsageError("give the directory: flintmq pipeline compact DIRECTORY")
    done = compact(
        options.directory,
        table=options.table,
        catalog=options.catalog,
        rows_per_file=options.rows_per_file,
        vacuum=options.vacuum,
        on_progress=runner.tell,
        stop=runner.stop,
    )
    more = f", {done.deleted} old ones deleted" if options.vacuum else ""
    runner.say(f"{done.before} files became {done.after}{more}, in {options.directory}")


__all__ = ["CompactOptions", "Compacted", "compact", "run"]
