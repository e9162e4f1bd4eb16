"""The Parquet files of an archive: their names say what is in them, and are all that remembers how far it is.

::

    DIRECTORY/dt=2026-11-23/hour=14/flights-p0000-18eab4542c40c8c8-00000000000001-00000000336777.parquet
                                    topic   |     log              first offset   end (exclusive)
                                            partition
    DIRECTORY/.staged/...             what is being written; nobody reads it, and a start removes it
    DIRECTORY/.lock                   held by the one archive, or the jobs of another kind, that may write here
    DIRECTORY/.writer                 the kind of job that writes here; empty, as after a kill: not known yet
    DIRECTORY/.names                  held while names change: when a file gets its own, or small ones become one
    DIRECTORY/.logs                   logs that are gone, and where each was let go; 0: it has come back

The rules of this file: a file gets its name by one rename, when all of it is durable; files of a log get theirs in the
order of its offsets; so whatever dies when, a reader sees each message once, and the end of the last name is where to
go on. Date and hour are those at which nsqd stored the messages, in UTC. ``.logs`` never says how far a log is.

Source: docs/decisions/0028.
"""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from flintmq.errors import FlintError
from flintmq.spark.durable import replace, sync
from flintmq.spark.offsets import PartitionKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

STAGED = ".staged"
LOCK = ".lock"
WRITER = ".writer"
NAMES = ".names"
LOGS = ".logs"
ARCHIVE, DEDUPE, ROLLUP, BAD_ROWS = "archive", "dedupe", "rollup", "--bad-rows"  # kinds of job, as .writer has them
ROW_GROUP_BYTES = 32 << 20  # gathered in memory
ROW_GROUP_ROWS = 250_000
HOUR_US = 3_600_000_000

_NAME = re.compile(r"(.+)-p(\d{4,})-([0-9a-f]{16})-(\d{14,})-(\d{14,})\.parquet")
_BATCH_NAME = re.compile(r"[0-9a-f]{16}-\d{10,}-\d{4,}\.parquet")  # of a micro-batch, see streams
_BATCH = re.compile(r"[0-9a-f]{16}-\d+")  # a directory with files that are to get such names
_LOG = re.compile(r"(.+)/(\d{1,9})/([0-9a-f]{16})")
_LET_GO = re.compile(rf"{_LOG.pattern} (\d{{1,19}})")


class DirectoryError(FlintError):
    """A directory that a job writes to cannot be used.

    Args:
        reason: why, and what to do.

    Attributes:
        kind: of directory, as the error says it.
    """

    kind: ClassVar[str]

    def __init__(self, directory: Path, reason: str) -> None:
        super().__init__(directory, reason)
        self.directory = directory
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.kind} {self.directory}: {self.reason}"


class ArchiveError(DirectoryError):
    """An archive cannot be written where it is."""

    kind = "archive"


class FileName(NamedTuple):
    """The content of a file: messages ``start`` to ``end`` (exclusive) of a log, as far as it has them."""

    key: PartitionKey
    start: int
    end: int

    def __str__(self) -> str:
        topic, partition, log_id = self.key
        return f"{topic}-p{partition:04d}-{log_id}-{self.start:014d}-{self.end:014d}.parquet"

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Return what a name says; None for a file of somebody else."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        return cls(PartitionKey(match[1], int(match[2]), match[3]), int(match[4]), int(match[5]))


class Finished(NamedTuple):
    """A file of a log that has its name.

    Attributes:
        end: of what is in the files of the log (exclusive).
    """

    path: Path
    end: int


class Archive:
    """A directory that is archived to; use as a context manager.

    Attributes:
        period_us: a file has messages of one period, which begin at multiples of it.
        is_committed_later: what is published is visible with the next :meth:`commit` only.

    Raises:
        ArchiveError: it cannot be made or written, or another archive, or a job of another kind, writes to it.
    """

    period_us = HOUR_US
    is_committed_later = False

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = -1

    def __enter__(self) -> Self:
        check_writer(self.directory, ARCHIVE)  # before anything is made in it
        try:
            (self.directory / STAGED).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArchiveError(self.directory, f"it cannot be written: {error}") from error
        self._lock = take(self.directory, LOCK, "another archive writes to it")
        try:
            for left in (self.directory / STAGED).iterdir():
                if left.is_dir() and not left.is_symlink():
                    what = f"{STAGED} in it has a directory, {left.name}, as jobs such as dedupe write them"
                    raise ArchiveError(self.directory, f"{what}: give each a directory of its own")
                left.unlink()
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, OSError):
                raise ArchiveError(self.directory, f"it cannot be written: {error}") from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def begin(self) -> None:
        """Note, before anything is written, that the directory is an archive's; as often as wanted.

        A start that fails before it has read anything leaves the directory to whom it belongs.

        Raises:
            ArchiveError: a job of another kind has come first, or it cannot be written.
        """
        note_writer(self.directory, ARCHIVE)

    def positions(self) -> dict[PartitionKey, int]:
        """Return where each log goes on of which there is something here."""
        found: dict[PartitionKey, int] = {}
        with changing_names(self.directory):
            for path in self.directory.glob("dt=*/hour=*/*.parquet"):
                name = FileName.parse(path.name)
                if name is not None:
                    found[name.key] = max(name.end, found.get(name.key, 0))
        return found

    def positions_now(self, keys: Iterable[PartitionKey]) -> dict[PartitionKey, int]:
        """Return where those logs go on that :meth:`positions` did not have, and others have archived since."""
        return {}  # nobody has: the lock is held

    def settled(self, keys: Iterable[PartitionKey], *, is_lenient: bool) -> dict[PartitionKey, int]:
        """Return where those logs go on of which less is here than was archived.

        Args:
            is_lenient: go on there, or behind what is missing where nobody knows what that is.

        Raises:
            FlintError: there are some, unless ``is_lenient``.
        """
        return {}  # the names say what is here

    def remembered(self) -> dict[PartitionKey, int]:
        """Return the logs that :meth:`remember` was told of, and where each was let go; 0: it has come back.

        Raises:
            ArchiveError: they cannot be read.
        """
        try:
            lines = (self.directory / LOGS).read_text(encoding="utf-8").split("\n")
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeError) as error:
            raise self._damaged(str(error)) from error
        logs: dict[PartitionKey, int] = {}
        for number, line in enumerate(lines, 1):
            match = _LET_GO.fullmatch(line)
            if match is not None:
                logs[PartitionKey(match[1], int(match[2]), match[3])] = int(match[4])
            elif line:
                raise self._damaged(f"line {number} is no log and the offset where it was let go")
        return logs

    def _damaged(self, why: str) -> ArchiveError:
        what = f"{LOGS} in it cannot be read: {why}"
        return ArchiveError(self.directory, f"{what}; restore it, or remove it: logs that are gone are told again")

    def remember(self, logs: Mapping[PartitionKey, int]) -> None:
        """Remember durably where logs were let go: nothing behind that is missed while they are gone; 0: it is.

        Raises:
            ArchiveError: it cannot be written.
        """
        whole = {**self.remembered(), **logs}
        staged = self.directory / STAGED / "logs"
        try:
            lines = (f"{key_text(key)} {end}\n" for key, end in sorted(whole.items()))
            staged.write_text("".join(lines), encoding="utf-8")
            replace(staged, self.directory / LOGS)
        except OSError as error:
            raise ArchiveError(self.directory, f"it cannot be written: {error}") from error

    def publish(self, staged: Path, name: FileName, moment: datetime) -> Path:
        """Give a staged file, which is durable, its name.

        Args:
            moment: at which the period of its messages begins.
        """
        place = self.directory / f"dt={moment:%Y-%m-%d}" / f"hour={moment:%H}"
        with changing_names(self.directory):
            move(staged, place / str(name))
        return place / str(name)

    def commit(self, *, is_due: bool = True) -> dict[PartitionKey, int]:
        """Make what was published visible; return to where logs are, of which that has changed since.

        Args:
            is_due: False: only when much is waiting.
        """
        return {}


class LogFiles:
    """Writes the messages of one log as files, one for each period, none with more than ``rows_max`` messages.

    Args:
        start: of the first file.
    """

    def __init__(self, archive: Archive, key: PartitionKey, start: int, rows_max: int) -> None:
        self._archive = archive
        self._key = key
        self._start = start
        self._rows_max = rows_max
        self._period = -1
        self._row_count = 0
        self._last = start
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_bytes = self._gathered_rows = 0
        self._writer: pq.ParquetWriter | None = None
        self._path = archive.directory / STAGED / f"{key.topic}-{key.partition}-{key.log_id}"

    def write(self, batch: pa.RecordBatch) -> Iterator[Finished]:
        """Take messages in their order; yields the files that are finished by that."""
        times = batch.column("timestamp").cast(pa.int64())
        periods = pc.divide(times, self._archive.period_us).to_numpy(zero_copy_only=False)
        first = 0
        while first < batch.num_rows:
            period = int(periods[first])
            if self._row_count and (period != self._period or self._row_count >= self._rows_max):
                yield from self.finish()
            others = (periods[first:] != period).nonzero()[0]
            end = first + int(others[0]) if len(others) else batch.num_rows
            end = min(end, first + self._rows_max - self._row_count)
            self._period = period
            self._gather(batch.slice(first, end - first))
            first = end

    def finish(self, end: int = 0) -> Iterator[Finished]:
        """End the present file, if there is one, and yield it.

        Args:
            end: up to where there is nothing more; 0 for right behind the last message.
        """
        if not self._row_count:
            return
        self._write_group()
        assert self._writer is not None
        self._writer.close()
        self._writer = None
        sync(self._path)
        end = max(end, self._last + 1)
        moment = datetime.fromtimestamp(self._period * self._archive.period_us / 1e6, UTC)
        path = self._archive.publish(self._path, FileName(self._key, self._start, end), moment)
        self._start, self._row_count = end, 0
        yield Finished(path, end)

    def abandon(self) -> None:
        """Forget what has no name yet."""
        if self._writer is not None:
            self._writer.close()
        self._path.unlink(missing_ok=True)

    def _gather(self, rows: pa.RecordBatch) -> None:
        self._gathered.append(rows)
        self._gathered_bytes += rows.nbytes
        self._gathered_rows += rows.num_rows
        self._row_count += rows.num_rows
        self._last = rows.column("offset")[-1].as_py()
        if self._gathered_bytes >= ROW_GROUP_BYTES or self._gathered_rows >= ROW_GROUP_ROWS:
            self._write_group()

    def _write_group(self) -> None:
        if not self._gathered:
            return
        table = pa.Table.from_batches(self._gathered)
        self._gathered.clear()
        self._gathered_bytes = self._gathered_rows = 0
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, table.schema, compression="zstd", compression_level=1)
        self._writer.write_table(table, row_group_size=ROW_GROUP_ROWS)


def key_text(key: PartitionKey) -> str:
    """Return a log as one word: ``topic/partition/log``."""
    return f"{key.topic}/{key.partition}/{key.log_id}"


def parse_key(text: str) -> PartitionKey | None:
    """Return the log that :func:`key_text` wrote; None for anything else."""
    match = _LOG.fullmatch(text)
    return None if match is None else PartitionKey(match[1], int(match[2]), match[3])


def move(staged: Path, path: Path) -> None:
    """Rename a file, durably, into a directory that may not be there yet."""
    missing = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync(each.parent)
    os.replace(staged, path)
    sync(path.parent)


def check_writer(directory: Path, job: str, kind: type[DirectoryError] = ArchiveError) -> None:
    """See that no job of another kind writes to a directory, or has: who reads it would count its rows as well.

    Where none is noted, the names of the files that are there tell whose they are.

    Args:
        job: the kind of job that is to write, in a word.
        kind: of error.

    Raises:
        DirectoryError: one does, or it cannot be read.
    """
    found = _noted(directory, kind)
    what = f"{found} writes to it ({WRITER} in it says so)" if found and found != job else ""
    if not found:
        for path, jobs in _traces(directory):
            if job not in jobs:
                what = f"{' or '.join(jobs)} has written to it ({path.relative_to(directory)} in it)"
                break
    if what:
        why = f"{what}, and who reads it would count what {job} writes as well"
        raise kind(directory, f"{why}: give each a directory of its own")


def note_writer(directory: Path, job: str, kind: type[DirectoryError] = ArchiveError) -> None:
    """Note the kind of job that writes to a directory, whose lock it has; as :func:`check_writer`.

    Those that share that lock may come at one time, so whoever notes holds the note meanwhile.

    Raises:
        DirectoryError: a job of another kind does, or has, or it cannot be written.
    """
    if _noted(directory, kind) == job:
        return
    try:
        note = os.open(directory / WRITER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(note, fcntl.LOCK_EX)
            check_writer(directory, job, kind)
            if not _noted(directory, kind):
                os.pwrite(note, f"{job}\n".encode(), 0)
        finally:
            os.close(note)
    except OSError as error:
        raise kind(directory, f"it cannot be written: {error}") from error


def _noted(directory: Path, kind: type[DirectoryError]) -> str:
    """Return the kind of job that is noted in a directory; empty: none, or it was not written to its end."""
    try:
        noted = (directory / WRITER).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return ""  # a file in the place of the directory: said when something is written
    except (OSError, UnicodeError) as error:
        raise kind(directory, f"{WRITER} in it cannot be read: {error}") from error
    return noted.strip("\0 \n")  # NUL: power was lost before it was on disk


def _traces(directory: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield what jobs have written, each with the kinds of job that write such names."""
    for path in directory.glob("*.parquet"):
        if _BATCH_NAME.fullmatch(path.name):
            yield path, (ROLLUP,)
    for path in directory.glob("dt=*/hour=*/*.parquet"):
        if _BATCH_NAME.fullmatch(path.name):
            yield path, (DEDUPE, BAD_ROWS)
        elif FileName.parse(path.name):
            yield path, (ARCHIVE,)
    for path in (directory / STAGED).glob("*-*"):
        if _BATCH.fullmatch(path.name) and path.is_dir():
            yield path, (DEDUPE, ROLLUP, BAD_ROWS)


def take(
    directory: Path, name: str, who: str, kind: type[DirectoryError] = ArchiveError, *, is_shared: bool = False
) -> int:
    """Take the lock of that name; it is held until the descriptor that is returned is closed.

    Args:
        who: has it otherwise, for the error.
        kind: of error.
        is_shared: with others that share it.

    Raises:
        DirectoryError: somebody has it, or it cannot be made.
    """
    try:
        lock = os.open(directory / name, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise kind(directory, f"it cannot be written: {error}") from error
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise kind(directory, f"{who}: give each a directory of its own, or stop that one") from error
    return lock


@contextmanager
def held(directory: Path, name: str, who: str, kind: type[DirectoryError]) -> Iterator[None]:
    """Have the lock of that name, as :func:`take`, in a directory that is made where it is missing."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise kind(directory, f"it cannot be written: {error}") from error
    lock = take(directory, name, who, kind)
    try:
        yield
    finally:
        os.close(lock)


@contextmanager
def shared(directory: Path, job: str, kind: type[DirectoryError]) -> Iterator[None]:
    """Write to a directory, which is made where it is missing, beside jobs of the same kind alone.

    Args:
        job: the kind of job, in a word.
        kind: of error.

    Raises:
        DirectoryError: a job of another kind writes there, or has, or it cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise kind(directory, f"it cannot be written: {error}") from error
    check_writer(directory, job, kind)
    lock = take(directory, LOCK, "an archive writes to it", kind, is_shared=True)
    try:
        note_writer(directory, job, kind)
        yield
    finally:
        os.close(lock)


@contextmanager
def changing_names(directory: Path) -> Iterator[None]:
    """Hold names as they are for others; whoever has this does nothing but look and rename."""
    lock = os.open(directory / NAMES, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
