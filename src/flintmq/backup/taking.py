"""Making a backup: what is new in a data directory is copied, what is there already is kept.

A log is copied segment by segment, batch by batch, each batch verified on the way. Of the segment that nsqd is writing,
what stood there when it was opened is copied; a batch that was being written then is waited for. A segment that grew
since the last backup is continued in the same file; one that was changed in any other way is stored anew.

Rules of this file: memory does not grow with the data; every file that is written is synced, and read back, before the
list names it; one of an earlier run is named again only if it is there at its length, and is read only if it is
continued; a run that fails leaves nothing of its own; nothing is written or removed before it is known that the backup
is of this data directory, and nothing at all outside the directories of runs, in which no link is followed; what is
damaged in the data directory is copied as it is, and told.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from stat import S_ISDIR, S_ISLNK

from flintmq.backup.live import LiveDirectory, LiveFile, identity_of
from flintmq.backup.manifest import (
    FORMAT,
    MANIFEST_NAME,
    MARK_NAME,
    README_NAME,
    README_TEXT,
    BackupError,
    HeldPartition,
    Manifest,
    StoredFile,
    check_file,
    is_empty,
    read_manifest,
    write_manifest,
)
from flintmq.broker.logs import TOPICS_DIRECTORY, log_directory
from flintmq.checksum import crc32
from flintmq.limits import SEQUENCE_BITS
from flintmq.names import topic_of_directory
from flintmq.storage import ChannelStore, File, Files, OsFiles, replace_file
from flintmq.storage.channel_list import LIST_NAME
from flintmq.storage.channel_store import DATABASE_NAME, StoredTopics
from flintmq.storage.cut import CUT_NAME
from flintmq.storage.identity import IDENTITY_NAME
from flintmq.storage.producers import SNAPSHOT_NAME
from flintmq.storage.scan import claim_at, walk, why_not
from flintmq.storage.segment import (
    INDEX_SUFFIX,
    LOG_SUFFIX,
    META_NAME,
    NO_STOP,
    SEGMENT_HEADER_BYTES,
    decode_segment_header,
    segment_name,
)
from flintmq.version import __version__

ROUNDS_MAX = 20
"""Times that everything is looked at again because topics came and went meanwhile, 0.25 s apart."""
LOOKS_MAX = 100
"""Times that a log is looked at again because segments went, or it is being cut, 0.05 s apart."""
ROUND_S, LOOK_S = 0.25, 0.05
_PIECE_BYTES = 4 * 1024 * 1024
_SMALL_BYTES_MAX = 256 * 1024 * 1024
_TAIL_LOOKS = 20
_SEGMENT_NAME = re.compile(r"([0-9]{20})\.log")
_PARTITION_NAME = re.compile(r"p-([0-9]{4,})")
_IDENTITY = re.compile(rb"([0-9a-f]{16}) ")
_DAMAGED = "it is damaged, and copied as it is; nsqd skips that, and tells of it, when it comes to read it"
_NO_HEADER = (
    "its first 64 bytes are no header, and copied as they are; no message is lost by that: nsqd writes the header of "
    "the newest file again at its start, and needs that of another one only where the index beside it is gone as well"
)
_RUN = "run-{:06d}"
_RUN_NAME = re.compile(r"run-([0-9]{6}|[1-9][0-9]{6,})")
_MARK_TMP = f"{MARK_NAME}.tmp"
_Key = tuple[str, int]


class _Moved(Exception):
    """Something went or changed while it was copied: look again."""


@dataclass(slots=True)
class Taken:
    """A backup that was made.

    Attributes:
        written_bytes: by this run; the rest was there.
        kept_count: files of earlier runs, which are there at their length; they were not read.
        replaced: files of earlier runs that were not there any more, too short or damaged, and were copied anew.
    """

    manifest: Manifest
    written_bytes: int
    kept_count: int
    replaced: list[str]


@dataclass(slots=True)
class _Round:
    """One attempt.

    Attributes:
        files: by path.
        partitions: by topic and number.
        notes: by path.
    """

    stored: StoredTopics
    identity: int
    files: dict[str, StoredFile] = field(default_factory=dict)
    partitions: dict[_Key, HeldPartition] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


class Taking:
    """One run of ``flintmq backup``. Blocks.

    Args:
        source: of which a backup is made.
        files: the directory of the backup, which is locked.
        wall_ns: returns the wall time.
        pause: waits for so many seconds.

    Raises:
        BackupError: the directory has something else in it, or its list cannot be read.
    """

    def __init__(
        self, source: LiveDirectory, files: OsFiles, wall_ns: Callable[[], int], pause: Callable[[float], None]
    ) -> None:
        self._source = source
        self._files = files
        self._wall_ns = wall_ns
        self._pause = pause
        self._written_bytes = 0
        self._is_ours = MARK_NAME in files.list("")
        if not self._is_ours and not is_empty(files.root, but=(_MARK_TMP,)):  # of a first run that was killed
            raise BackupError(
                f"{files.root} has something in it that is no backup: name a new or an empty directory, or one that "
                "flintmq backup has made"
            )
        self._before = read_manifest(files)
        # without a list nothing tells what the files of runs that are there are worth: they are not written over
        self._run = 1 + (max(self._runs(), default=0) if self._before is None else self._before.run)
        self._known: dict[str, StoredFile] = (
            {} if self._before is None else {file.path: file for file in self._before.files}
        )
        self._unsynced: dict[str, None] = {}
        self._continued: dict[str, int] = {}  # files of earlier runs that are written to, and the length before
        self._replaced: dict[str, None] = {}
        self._unlike: list[tuple[StoredFile, BackupError]] = []  # what was read back, and is not what was stored

    def take(self) -> Taken:
        """Make the backup; the one before is there until this one is, and as it was when this one fails.

        Raises:
            BackupError: it cannot be made, or there is one of another data directory, or a link in one.
            StorageError: the same, of the database.
            OSError: the same, of a file.
        """
        self._check_runs()
        self._mark(self._source.identity())
        try:
            return self._take()
        except BaseException:
            self._undo()
            raise

    def _take(self) -> Taken:
        begun_ns = self._wall_ns()
        self._remove_unlisted()
        if README_NAME not in self._files.list(""):
            replace_file(self._files, README_NAME, README_TEXT)
        found, unsynced = self._synced()
        while self._unlike:  # ends: a file of an earlier run is continued once, and no other one gets through
            for file, error in self._unlike:
                if file.stored not in self._continued:
                    raise error
                del self._known[file.path]
                self._replaced[file.stored] = None
            self._unlike.clear()
            found, unsynced = self._synced()
        manifest = Manifest(
            FORMAT, __version__, self._run, self._source.root, found.identity, self._node(), begun_ns,
            self._wall_ns(), [found.partitions[key] for key in sorted(found.partitions)],
            [found.files[path] for path in sorted(found.files)], list(found.notes.values()),
        )  # fmt: skip
        write_manifest(self._files, manifest)
        self._before = manifest
        self._remove_unlisted()
        kept_count = len(manifest.files) - len(unsynced)
        return Taken(manifest, self._written_bytes, kept_count, sorted(self._replaced))

    def _synced(self) -> tuple[_Round, list[StoredFile]]:
        """Copy everything; return it, and those of its files that this run has written, which were read back."""
        for _ in range(ROUNDS_MAX):
            try:
                found = self._round()
                break
            except _Moved as moved:
                reason = str(moved)
                self._pause(ROUND_S)
        else:
            raise BackupError(f"the data directory changes too quickly ({reason}): try again")
        unsynced = [file for file in found.files.values() if file.stored in self._unsynced]
        for error in self._files.run_all([partial(self._sync, file) for file in unsynced]):
            if error is not None:
                raise error
        return found, unsynced

    def _undo(self) -> None:
        """Remove what a failed run has written, unless its list is there: on a shared disk nsqd needs the room."""
        with contextlib.suppress(OSError, BackupError):
            listed = read_manifest(self._files)
            if listed is not None and listed.run >= self._run:
                return  # it was not known to be durable, and perhaps is: both lists may count after a power loss
            self._remove_unlisted()
            for stored, size in self._continued.items():
                file = self._files.open(stored)
                try:
                    file.truncate(size)
                finally:
                    file.close()

    # -- one round -----------------------------------------------------------------------------------------------------

    def _round(self) -> _Round:
        found = self._database()
        partitions = list(self._partitions())
        for topic, number in partitions:
            self._partition(found, topic, number)
        replicas = self._source.replica_rows()
        stored = found.stored
        for key in partitions:
            is_known = key[0] in stored.topics or key[0] in stored.metas or key in stored.replicas
            if not is_known and key in replicas:  # it came meanwhile, and nothing says here that it is a replica
                self._drop(found, key)
        for key, replica in stored.replicas.items():
            row = replicas.get(key)
            if row != (replica.topic_number, replica.log_id, replica.epoch, replica.history, replica.rows_end):
                raise _Moved(f"replica {key[0]}/{key[1]} was changed")
        for key, mark in stored.logs.items():
            held = found.partitions.get(key)
            if mark.written > 1 and (held is None or held.log_id != mark.log_id):
                raise _Moved(f"topic {key[0]} was deleted or made anew")
        return found

    def _partitions(self) -> Iterator[_Key]:
        for directory in self._source.names(TOPICS_DIRECTORY):
            try:
                topic = topic_of_directory(directory)
            except ValueError:
                continue
            for name in self._source.names(f"{TOPICS_DIRECTORY}/{directory}"):
                if match := _PARTITION_NAME.fullmatch(name):
                    yield topic, int(match[1])

    def _drop(self, found: _Round, key: _Key) -> None:
        found.partitions.pop(key, None)
        prefix = f"{log_directory(*key)}/"
        for path in [path for path in found.files if path.startswith(prefix)]:
            del found.files[path]

    # -- the database --------------------------------------------------------------------------------------------------

    def _database(self) -> _Round:
        """Copy the database; it is opened as a start does, which checks every row, and writes the list beside it."""
        files, directory = self._files, f"{_RUN.format(self._run)}/database"
        files.remove_directory(directory)
        files.make_directory(directory)
        root = os.path.join(files.root, *directory.split("/"))
        self._source.copy_database(os.path.join(root, DATABASE_NAME))
        copied = OsFiles(root)
        try:
            self._mark(self._identity_of(copied))  # another one may have been put there meanwhile
            store = ChannelStore(copied)
            try:
                stored, is_taken_over = store.load(), store.journal() is not None
                damages = [damage for damage in store.take_damages() if damage.path != LIST_NAME]
            finally:
                store.close()
            identity = self._identity_of(copied)
            left = [name for name in copied.list("") if name not in (DATABASE_NAME, LIST_NAME)]
            if left:
                raise BackupError(f"{root} should have no {', '.join(left)}: the database was not copied as a whole")
        finally:
            copied.close()
        if is_taken_over:
            raise BackupError("nsqd is taking over NSQ's files: wait until it listens, then try again")
        found = _Round(stored, identity)
        for damage in damages:
            found.notes[damage.path] = f"{damage.path}: {damage.reason}"
        for name in (DATABASE_NAME, LIST_NAME):
            self._small(found, name, f"{directory}/{name}", self._files.open(f"{directory}/{name}"))
        return found

    @staticmethod
    def _identity_of(copied: Files) -> int:
        database = copied.open_database(DATABASE_NAME)
        try:
            return identity_of(database.query)
        finally:
            database.close()

    def _mark(self, identity: int) -> None:
        """Write down of which data directory this is a backup, or see that it is of this one."""
        files, text = self._files, f"flintmq backup of data directory {identity:016x}\n".encode()
        if not self._is_ours:
            try:
                replace_file(files, MARK_NAME, text)
            except BaseException:
                files.remove(_MARK_TMP)
                raise
            files.sync_directory("")
            self._is_ours = True
        else:
            file = files.open(MARK_NAME)
            try:
                mark = file.read_at(0, 1024)
            finally:
                file.close()
            if mark != text:
                theirs = mark.decode("ascii", "replace").rpartition(" ")[2].strip()[:40]
                raise BackupError(
                    f"{files.root} has a backup of another data directory ({theirs}, this is {identity:016x}): "
                    "name another"
                )

    def _node(self) -> str:
        try:
            file = self._source.open(IDENTITY_NAME)
        except OSError:
            return ""  # it never was in a cluster
        try:
            match = _IDENTITY.match(file.read_at(0, 64))
        finally:
            file.close()
        return "" if match is None else match[1].decode()

    # -- logs ----------------------------------------------------------------------------------------------------------

    def _partition(self, found: _Round, topic: str, number: int) -> None:
        directory = log_directory(topic, number)
        reason = ""
        for _ in range(LOOKS_MAX):
            try:
                self._log(found, directory, topic, number)
                return
            except (_Moved, FileNotFoundError) as moved:
                self._drop(found, (topic, number))
                if not self._source.names(directory):
                    return  # it was deleted
                reason = str(moved)
                self._pause(LOOK_S)
        raise BackupError(f"{directory} changes too quickly ({reason}): try again")

    def _log(self, found: _Round, directory: str, topic: str, number: int) -> None:
        names = self._source.names(directory)
        if CUT_NAME in names:
            raise _Moved("its log is being cut back")
        firsts = [int(match[1]) for name in names if (match := _SEGMENT_NAME.fullmatch(name))]
        if not firsts:
            if META_NAME in names:
                raise _Moved("it is being made")
            return
        # as of before the segments: it must know of nothing that these do not have
        for name in (META_NAME, SNAPSHOT_NAME):
            if name in names:
                self._copy_small(found, f"{directory}/{name}")
        is_copy = (topic, number) in found.stored.replicas
        log_id = end = 0
        for first in firsts:
            segment, its_log_id = self._segment(found, f"{directory}/{segment_name(first)}", number, is_copy)
            log_id, end = its_log_id or log_id, segment.end
            index = segment_name(first).removesuffix(LOG_SUFFIX) + INDEX_SUFFIX
            if first != firsts[-1] and index in names:
                self._copy_small(found, f"{directory}/{index}")
        left = set(self._source.names(directory))
        if CUT_NAME in left or any(segment_name(first) not in left for first in firsts):
            raise _Moved("segments were removed")
        found.partitions[topic, number] = HeldPartition(topic, number, log_id, end, is_copy)

    def _copy_small(self, found: _Round, path: str) -> None:
        file = self._source.open(path)
        try:
            stat = file.stat()
            known = self._stored(path)
            if known is not None and (known.inode, known.mtime_ns, known.source_size) == stat:
                found.files[path] = known
                return
            data = file.read_at(0, _SMALL_BYTES_MAX)
        finally:
            file.close()
        target = self._new(path)
        try:
            target.write_at(0, data)
            target.truncate(len(data))
        finally:
            target.close()
        self._written_bytes += len(data)
        self._keep(found, StoredFile(path, self._place(path), len(data), crc32(data), 0, *stat))

    def _small(self, found: _Round, path: str, stored: str, file: File) -> None:
        """List a file that is in its place already."""
        position = crc = 0
        try:
            size = file.size()
            while position < size:
                data = file.read_at(position, min(_PIECE_BYTES, size - position))
                if not data:
                    raise BackupError(f"{stored} has become shorter while it was read")
                crc, position = crc32(data, crc), position + len(data)
        finally:
            file.close()
        self._written_bytes += size
        self._keep(found, StoredFile(path, stored, size, crc))

    def _segment(self, found: _Round, path: str, number: int, is_copy: bool) -> tuple[StoredFile, int]:
        """Copy what stands in a segment; return it, and the log's identity."""
        file = self._source.open(path)
        try:
            stat = file.stat()
            head = file.read_at(0, SEGMENT_HEADER_BYTES)
            header = decode_segment_header(head)
            if header is None and stat.size < SEGMENT_HEADER_BYTES:
                raise _Moved("a segment is being made")
            log_id = 0 if header is None else header.log_id
            known = self._stored(path)
            if known is not None and (known.inode, known.mtime_ns, known.source_size) == stat:
                found.files[path] = known
                if not known.end:
                    found.notes[path] = f"{path}: {_DAMAGED if header else _NO_HEADER}"
                return known, log_id
            is_same = known is not None and known.inode == stat.inode and known.end and known.size <= stat.size
            if known is not None and is_same and not is_copy and self._head(known) == head:
                target: File = self._files.open(known.stored)
                if known.stored not in self._unsynced:  # of an earlier run: a failed one gives it its length again
                    self._continued[known.stored] = known.size
                stored, position, end, crc = known.stored, known.size, known.end, known.crc
            else:
                first = int(path.rpartition("/")[2].removesuffix(LOG_SUFFIX))
                target, stored, position, end, crc = self._new(path), self._place(path), len(head), first, crc32(head)
                target.write_at(0, head)
            try:
                position, end, crc, note = self._batches(file, stat.size, target, position, end, crc, number)
                target.truncate(position)
            finally:
                target.close()
        finally:
            file.close()
        if note or header is None:
            found.notes[path] = f"{path} {note}: {_DAMAGED}" if note else f"{path}: {_NO_HEADER}"
            end = 0
        segment = StoredFile(path, stored, position, crc, end, *stat)
        self._keep(found, segment)
        return segment, log_id

    def _batches(
        self, file: LiveFile, size: int, target: File, position: int, end: int, crc: int, number: int
    ) -> tuple[int, int, int, str]:
        """Copy verified batches up to the one that is there at ``size``; then what is no batch, as it is."""
        base = number << SEQUENCE_BITS
        piece_bytes, looks = _PIECE_BYTES, 0
        while position < size:
            data = file.read_at(position, piece_bytes)
            run = walk(data, 0, base | end, NO_STOP)
            if run.positions:
                piece = memoryview(data)[: run.position]
                target.write_at(position, piece)
                crc, position, end = crc32(piece, crc), position + len(piece), run.next_id - base
                self._written_bytes += len(piece)
                piece_bytes, looks = _PIECE_BYTES, 0
                continue
            claim = claim_at(data, 0, position, base)
            is_larger = claim is not None and claim.first_id == base | end and claim.size > len(data)
            if claim is not None and is_larger and claim.end_position <= file.stat().size:
                piece_bytes = claim.size
                continue
            if looks < _TAIL_LOOKS and position + len(data) >= size:  # perhaps it is being written
                looks += 1
                self._pause(LOOK_S)
                continue
            note = f"at byte {position}: {why_not(data, base | end, base, size - position)}"
            while position < size:
                data = file.read_at(position, min(_PIECE_BYTES, size - position))
                if not data:
                    break
                target.write_at(position, data)
                crc, position = crc32(data, crc), position + len(data)
                self._written_bytes += len(data)
            return position, 0, crc, note
        return position, end, crc, ""

    def _stored(self, path: str) -> StoredFile | None:
        """Return a file as the backup has it; None when it has it not, or not as long as the list says.

        It may be longer: of a run that was killed.
        """
        known = self._known.get(path)
        if known is None:
            return None
        with contextlib.suppress(OSError):
            if os.stat(os.path.join(self._files.root, *known.stored.split("/"))).st_size >= known.size:
                return known
        del self._known[path]
        self._replaced[known.stored] = None
        return None

    def _head(self, known: StoredFile) -> bytes:
        file = self._files.open(known.stored)
        try:
            return file.read_at(0, SEGMENT_HEADER_BYTES)
        finally:
            file.close()

    # -- the directory of the backup -----------------------------------------------------------------------------------

    def _place(self, path: str) -> str:
        return f"{_RUN.format(self._run)}/{path}"

    def _new(self, path: str) -> File:
        stored = self._place(path)
        self._files.make_directory(stored.rpartition("/")[0])
        self._files.remove(stored)  # of an earlier round; it is not written over, because a round may be listed
        return self._files.open(stored, create=True)

    def _keep(self, found: _Round, file: StoredFile) -> None:
        found.files[file.path] = self._known[file.path] = file
        self._unsynced[file.stored] = None

    def _sync(self, file: StoredFile) -> None:
        """Have a file on the disk, and see that it is there; one that is not what it should be is noted."""
        opened = self._files.open(file.stored)
        try:
            opened.sync()
            opened.write_out()  # it is read from the disk then, not from memory
        finally:
            opened.close()
        self._files.sync_directory(file.stored.rpartition("/")[0])
        try:
            check_file(self._files, file, "the disk does not keep what is written: make the backup on another one")
        except BackupError as error:
            self._unlike.append((file, error))

    def _runs(self) -> Iterator[int]:
        """Yield the numbers of what has the name of a run."""
        for name in self._files.list(""):
            if match := _RUN_NAME.fullmatch(name):
                yield int(match[1])

    def _check_runs(self) -> None:
        """Refuse what would have files outside the backup written to, or removed."""
        for run in self._runs():
            self._check_below(_RUN.format(run))

    def _check_below(self, path: str) -> None:
        root = self._files.root
        mode = os.lstat(os.path.join(root, *path.split("/"))).st_mode
        if S_ISDIR(mode):
            for name in self._files.list(path):
                self._check_below(f"{path}/{name}")
        elif S_ISLNK(mode):
            raise BackupError(
                f"{root}/{path} is a link, and a backup is not written through links: put what it leads to in its "
                "place, or name another directory"
            )
        elif "/" not in path:
            raise BackupError(f"{root}/{path} is no directory: move it away, or name another directory")

    def _remove_unlisted(self) -> None:
        """Remove what no complete backup names; without one, only what this run has written."""
        listed = set() if self._before is None else {file.stored for file in self._before.files}
        for run in self._runs():
            if self._before is None and run != self._run:
                continue
            if self._is_directory(_RUN.format(run)):
                self._remove_below(_RUN.format(run), listed)
        for name in (MANIFEST_NAME, README_NAME):
            self._files.remove(f"{name}.tmp")

    def _remove_below(self, path: str, listed: set[str]) -> None:
        for name in self._files.list(path):
            child = f"{path}/{name}"
            if child in listed:
                continue
            if self._is_directory(child):
                self._remove_below(child, listed)
            else:
                self._files.remove(child)  # of a link that came meanwhile the link alone
        if not self._files.list(path):
            self._files.remove_directory(path)

    def _is_directory(self, path: str) -> bool:
        """Whether it is one itself, not a link to one."""
        return S_ISDIR(os.lstat(os.path.join(self._files.root, *path.split("/"))).st_mode)


def check(files: OsFiles) -> Manifest:
    """Read all files of a backup and compare them with its list. Blocks.

    Raises:
        BackupError: there is none, or it is not what was stored.
    """
    manifest = read_manifest(files)
    if manifest is None:
        raise BackupError(f"{files.root} has no complete backup: make one with flintmq backup")
    for file in manifest.files:
        check_file(files, file)
    return manifest
