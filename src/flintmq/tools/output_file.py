"""The files that nsq_to_file writes: names, rotation, gzip, syncing, and moving into the output directory.

::

    <work-dir>/t.host-000001.2026-11-23_14.log.gz     bodies, a newline behind each, in gzip members
    |--member--|--member--|--member being written-|
               synced      ^ nothing in here is finished yet

Rules of this file: it blocks, and belongs into a thread, one call at a time; what was synced stays as it is, whatever
fails later; what was not is cut off again when it cannot be written as a whole; no file is ever overwritten, and no
message is put behind half of another one.

Source: NSQ 1.3, apps/nsq_to_file.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from flintmq.errors import OptionError, UsageError

log = logging.getLogger(__name__)

DIRECTORY_MODE = 0o770
FILE_MODE = 0o666
DIRECTIVES = "aAbBdFGHIjmMpsSTuUVwWyYzZ%"
"""Letters behind a % in ``--datetime-format``."""
_GZIP = 31  # zlib's number for its largest window, with gzip's header and trailer
_READ_BYTES = 1024 * 1024
_NEWLINE = b"\n"
_FLAG = "flag"


@dataclass(frozen=True, kw_only=True)
class FileSettings:
    """Everything that is told about files.

    Attributes:
        name_format: with ``<DATETIME>``, ``<PID>`` and, where there are revisions, ``<REV>`` in it.
        gzip_level: 1 to 9; 0: no gzip.
        rotate_size: bytes; 0: any.
        rotate_interval_s: 0: never.
        keeps_empty: whether a file is begun where there is no message for it.
    """

    output_dir: str
    work_dir: str
    name_format: str
    datetime_format: str
    gzip_level: int = 0
    rotate_size: int = 0
    rotate_interval_s: float = 0.0
    keeps_empty: bool = True

    @property
    def moves(self) -> bool:
        """Whether files are written elsewhere than where they end up."""
        return self.work_dir != self.output_dir

    def name_at(self, wall_s: float) -> str:
        """Return the name for a time, with ``<REV>`` still in it."""
        filled = self.name_format.replace("<PID>", str(os.getpid()))
        return filled.replace("<DATETIME>", time.strftime(self.datetime_format, time.localtime(wall_s)))


def check_datetime_format(text: str) -> None:
    """Refuse what only some systems know, or none.

    Raises:
        OptionError: there is such a thing in it.
    """
    for found in re.finditer(r"%(.?)", text, re.DOTALL):
        if not found[1] or found[1] not in DIRECTIVES:
            known = " ".join(DIRECTIVES)
            raise OptionError("--datetime-format", text, f"{found[0]} is none of %: {known}", _FLAG)


def name_format(format_: str, topic: str, host: str, has_revisions: bool, is_gzip: bool) -> str:
    """Fill in what is the same for the next run as well.

    Raises:
        UsageError: revisions are needed, and there is no place for them.
    """
    if has_revisions and "<REV>" not in format_:
        raise UsageError("missing <REV> in --filename-format when gzip, rotation, or work dir enabled")
    filled = format_ if has_revisions else format_.replace("<REV>", "")
    filled = filled.replace("<TOPIC>", topic).replace("<HOST>", host)
    return f"{filled}.gz" if is_gzip and not filled.endswith(".gz") else filled


class OutputFile:
    """The file of one topic, or none, and then the next one.

    Args:
        label: what its log lines begin with.
        now: seconds since the epoch.
        monotonic: seconds that never jump.

    Attributes:
        path: of the file that is written; empty: none is.
    """

    def __init__(
        self,
        settings: FileSettings,
        label: str,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = ""
        self._settings = settings
        self._label = label
        self._now = now
        self._monotonic = monotonic
        self._fd = -1
        self._compressor: zlib._Compress | None = None
        self._name = ""
        self._rev = 0
        self._opened_at = 0.0
        self._size = 0  # as rotation counts it: what is in the file, and what went into gzip since it was opened
        self._end = 0  # of the file
        self._synced = 0  # up to here it stays as it is
        self._is_torn = False

    # --- for whoever has messages ---

    def write(self, bodies: Sequence[bytes]) -> bool:
        """Write messages; return whether a file has ended meanwhile, in which all before are synced.

        Raises:
            OSError: not all of them are in a file; :meth:`cut_back` is to follow.
        """
        has_rotated = False
        limit = self._settings.rotate_size
        while bodies:
            if self._is_due():
                self._begin()
                has_rotated = True
            count = len(bodies)
            if limit:  # the one that exceeds it is the last one
                sizes = accumulate(len(body) + 1 for body in bodies)
                count = next((n for n, size in enumerate(sizes, 1) if self._size + size > limit), count)
            data = _NEWLINE.join(bodies[:count]) + _NEWLINE
            bodies = bodies[count:]
            self._size += len(data)
            if self._settings.gzip_level:
                if self._compressor is None:
                    self._compressor = zlib.compressobj(self._settings.gzip_level, zlib.DEFLATED, _GZIP)
                data = self._compressor.compress(data)
            elif self._is_torn:
                data = _NEWLINE + data
            self._write(data)
            self._is_torn = False
        return has_rotated

    def sync(self) -> None:
        """Have everything so far on disk.

        Raises:
            OSError: it is not; :meth:`cut_back` is to follow.
        """
        if self._fd < 0 or (self._synced == self._end and self._compressor is None):
            return
        if self._compressor is not None:  # the trailer has a sum, and shows which messages were finished
            rest = self._compressor.flush(zlib.Z_FINISH)
            self._compressor = None
            self._write(rest)
        os.fsync(self._fd)
        self._synced = self._end

    def tick(self) -> bool:
        """Look whether it is time for another file; return whether the present one has ended.

        Raises:
            OSError: as with :meth:`sync`.
        """
        if self._fd < 0 and not self._settings.keeps_empty:
            return False
        if not self._is_due():
            return False
        if self._settings.keeps_empty:
            self._begin()
        else:
            self.close()
        return True

    def close(self) -> None:
        """Sync, move the file to where it belongs, and let it go.

        Raises:
            OSError: as with :meth:`sync`; nothing has changed then.
        """
        if self._fd < 0:
            return
        if self._settings.gzip_level and not self._end and self._compressor is None:  # nothing would be no gzip file
            self._compressor = zlib.compressobj(self._settings.gzip_level, zlib.DEFLATED, _GZIP)
        self.sync()
        if self._settings.moves:
            self._move()
        os.close(self._fd)
        self._fd, self.path = -1, ""

    def cut_back(self) -> None:
        """Take off what is not synced.

        Raises:
            OSError: that does not work either.
        """
        self._compressor = None
        if self._fd < 0 or self._end == self._synced:
            return
        if os.fstat(self._fd).st_size == self._end:
            os.ftruncate(self._fd, self._synced)
        else:
            self._is_torn = True  # somebody else appends to it, too
        self._size = self._end = self._synced

    # --- files ---

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            count = os.write(self._fd, view)
            self._end += count
            view = view[count:]

    def _is_due(self) -> bool:
        settings = self._settings
        if self._fd < 0:
            return True
        name = settings.name_at(self._now())
        if name != self._name:
            log.info("%s new filename %s, rotating...", self._label, name)
            return True
        age_s = self._monotonic() - self._opened_at
        if settings.rotate_interval_s and age_s > settings.rotate_interval_s:
            log.info("%s %.3fs since last open, rotating...", self._label, age_s)
            return True
        if settings.rotate_size and self._size > settings.rotate_size:
            self._say_too_large(self.path, self._size)
            return True
        return False

    def _say_too_large(self, path: str, size: int) -> None:
        limit = self._settings.rotate_size
        log.info("%s %s currently %d bytes (> %d), rotating...", self._label, path, size, limit)

    def _begin(self) -> None:
        """Begin the next file, after the end of the present one."""
        self.close()
        settings = self._settings
        name = settings.name_at(self._now())
        rev = self._rev + 1 if name == self._name else 0
        taken = ""
        while True:
            relative = _with_rev(name, rev)
            path = os.path.join(settings.work_dir, relative)
            _make_directory(os.path.dirname(path))
            there = os.path.join(settings.output_dir, relative)
            if settings.moves:
                _make_directory(os.path.dirname(there))
            if settings.moves and os.path.lexists(there):
                taken, rev = there, rev + 1
            elif self._open(path):
                break
            else:
                taken, rev = path, rev + 1
        if taken:
            log.warning("%s file already exists: %s", self._label, taken)
        log.info("%s opening %s", self._label, path)
        self._name, self._rev, self._opened_at = name, rev, self._monotonic()

    def _open(self, path: str) -> bool:
        """Open a file, unless there is one that is not to be gone on with."""
        settings = self._settings
        is_new_only = bool(settings.gzip_level or settings.rotate_interval_s or settings.moves)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | (os.O_EXCL if is_new_only else 0)
        try:
            fd = os.open(path, flags, FILE_MODE)
        except FileExistsError:
            return False
        try:
            size = os.fstat(fd).st_size
            if settings.rotate_size and size > settings.rotate_size:
                self._say_too_large(path, size)
                os.close(fd)
                return False
            _sync_directory(os.path.dirname(path))
            self._is_torn = size > 0 and os.pread(fd, 1, size - 1) != _NEWLINE
        except BaseException:
            os.close(fd)
            raise
        self._fd, self.path, self._compressor = fd, path, None
        self._size = self._end = self._synced = size
        return True

    def _move(self) -> None:
        relative = os.path.relpath(self.path, self._settings.work_dir)
        move(self._settings, self._label, self.path, relative, self._name, self._rev)


def move(settings: FileSettings, label: str, path: str, relative: str, name: str, rev: int) -> None:
    """Move a file from the work directory to the output directory, under another revision where its name is taken.

    Args:
        relative: its name with its revision.
        name: with ``<REV>``.

    Raises:
        OSError: it stays where it is.
    """
    there = os.path.join(settings.output_dir, relative)
    log.info("%s moving finished file %s to %s", label, path, there)
    _make_directory(os.path.dirname(there))
    while True:
        try:
            os.link(path, there)
            break
        except FileExistsError:
            log.warning("%s destination file already exists: %s", label, there)
            rev += 1
            there = os.path.join(settings.output_dir, _with_rev(name, rev))
    _sync_directory(os.path.dirname(there))
    os.unlink(path)


def _with_rev(name: str, rev: int) -> str:
    return name.replace("<REV>", f"-{rev:06d}")


def _make_directory(path: str) -> None:
    """Make a directory and those above it, and have their names on disk."""
    if os.path.isdir(path):
        return
    above = os.path.dirname(path)
    if above and above != path:
        _make_directory(above)
    try:
        os.mkdir(path, DIRECTORY_MODE)
    except FileExistsError:
        return
    _sync_directory(above)


def _sync_directory(path: str) -> None:
    fd = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- of runs that were killed ---


def files_of_others(settings: FileSettings) -> list[str]:
    """List the files that a killed run may have left, of any topic, by their paths below the work directory.

    Raises:
        OSError: a directory cannot be read.
    """
    if not settings.moves and not settings.gzip_level:
        return []
    depth = settings.name_format.count("/") + settings.datetime_format.count("/")
    found: list[str] = []
    for directory, below, names in os.walk(settings.work_dir, onerror=_unreadable):
        relative = os.path.relpath(directory, settings.work_dir)
        level = 0 if relative == "." else relative.count("/") + 1
        if level >= depth:
            below.clear()  # no name is as long
        found += names if not level else [f"{relative}/{name}" for name in names]
    return found


def recover(settings: FileSettings, label: str, names: Sequence[str]) -> None:
    """Cut files of a killed run back to the last that is whole, and move them to where they belong.

    It looks into the work directory where there is one; else, of gzip files, at the newest alone: the output directory
    may hold those of years. A file that some process has open is left alone. SIGIO has to be ignored meanwhile: it
    comes when somebody opens a file that is looked at.

    Args:
        names: as :func:`files_of_others` lists them.

    Raises:
        OSError: a file cannot be read, or not be moved.
    """
    found = list(_left_behind(settings, names))
    if not settings.moves:
        found = sorted(found, key=lambda each: os.stat(each[0]).st_mtime_ns)[-1:]
    for path, name, rev in found:
        try:
            fd = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            continue  # another one has just moved it
        try:
            if not _is_open_elsewhere(fd):
                _recover_one(settings, label, fd, path, name, rev)
        finally:
            os.close(fd)


def _recover_one(settings: FileSettings, label: str, fd: int, path: str, name: str, rev: int) -> None:
    size = os.fstat(fd).st_size
    try:
        whole = _whole_gzip(fd) if path.endswith(".gz") else _whole_lines(fd, size)
    except zlib.error as error:
        log.error("%s %s is damaged, and left as it is: %s", label, path, error)
        whole = size
    if not whole:
        log.warning("%s %s has no whole message in its %d bytes: removed", label, path, size)
        os.unlink(path)
        return
    if whole < size:
        log.warning("%s %s ends in the middle: cut from %d to %d bytes", label, path, size, whole)
        os.ftruncate(fd, whole)
        os.fsync(fd)
    if settings.moves:
        move(settings, label, path, os.path.relpath(path, settings.work_dir), name, rev)


def _left_behind(settings: FileSettings, names: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    """Yield path, name with ``<REV>``, and revision of the files that have such names."""
    text = re.escape(settings.name_format).replace("<REV>", r"-(?P<rev>[0-9]{6,})", 1)
    text = text.replace("<REV>", r"-[0-9]{6,}").replace("<DATETIME>", ".+?").replace("<PID>", "[0-9]+")
    pattern = re.compile(text)
    for relative in names:
        match = pattern.fullmatch(relative)
        path = os.path.join(settings.work_dir, relative)
        if match is not None and os.path.isfile(path) and not os.path.islink(path):
            rev = match["rev"]
            yield path, relative.replace(f"-{rev}", "<REV>"), int(rev)


def _unreadable(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _is_open_elsewhere(fd: int) -> bool:
    """Whether another process has a file open, or may have: only who has it alone is given a lease."""
    lease = getattr(fcntl, "F_SETLEASE", None)
    if lease is None:
        return True
    try:
        fcntl.fcntl(fd, lease, fcntl.F_WRLCK)
        fcntl.fcntl(fd, lease, fcntl.F_UNLCK)
    except OSError:
        return True
    return False


def _whole_lines(fd: int, size: int) -> int:
    """Return where the last line ends that has a newline."""
    end = size
    while end:
        start = max(0, end - _READ_BYTES)
        place = os.pread(fd, end - start, start).rfind(_NEWLINE)
        if place >= 0:
            return start + place + 1
        end = start
    return 0


def _whole_gzip(fd: int) -> int:
    """Return where the last gzip member ends that is whole.

    Raises:
        zlib.error: one is damaged, not cut off.
    """
    whole = place = 0
    member = zlib.decompressobj(_GZIP)
    data, has_more = b"", False
    while True:
        if not data and not has_more:
            data = os.pread(fd, _READ_BYTES, place)
            if not data:
                return whole
            place += len(data)
        has_more = len(member.decompress(data, _READ_BYTES)) == _READ_BYTES
        data = member.unconsumed_tail
        if member.eof:
            data, has_more = member.unused_data, False
            whole = place - len(data)
            member = zlib.decompressobj(_GZIP)
