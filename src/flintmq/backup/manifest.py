"""The list of what a backup consists of: ``backup.json``, written last, as a whole, and with a checksum of itself.

::

    DIR/
      flintmq-backup          of which data directory this is a backup; there before anything else
      backup.json             the files of the last complete backup: from which path, where stored, how long, checksum
      README.txt              for people; no part of the backup
      run-000001/...          files that the first run stored
      run-000002/...          files that a later run stored; segments that had only grown are continued where they are

Rules of this file: a file of the list is never written to below its size, so that a backup that is not completed
leaves the one before as it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import msgspec

from flintmq.checksum import crc32
from flintmq.errors import FlintError
from flintmq.storage import Files, replace_file

MANIFEST_NAME = "backup.json"
MARK_NAME = "flintmq-backup"
README_NAME = "README.txt"
README_TEXT = b"""\
This directory as a whole is one backup of the data directory of an nsqd, as of the last run of flintmq backup.

run-000001 and its like are not backups: each has the files that one run stored, and the backup needs those of all runs
that are here. Remove, move or change none of them. What is needed no more the next run removes.

    flintmq backup DIR --check                  is all of it there, as it was stored?
    flintmq restore DIR --data-path=PATH        makes a data directory of it, in a new or an empty directory
"""
OF_FILE_SYSTEMS = frozenset({"lost+found"})
"""Names that a file system puts into an empty directory by itself."""
FORMAT = 1
_SIZE_MAX = 1 << 30
_PIECE_BYTES = 4 * 1024 * 1024


class BackupError(FlintError):
    """A backup cannot be made, read or restored; the text says why and what to do."""


class StoredFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file of a data directory, as a backup has it.

    Attributes:
        path: in the data directory.
        stored: in the backup's directory.
        size, crc: of the first so many bytes there, and their CRC-32.
        end: of a segment of a log, the sequence behind its last batch; 0: it is no segment, or not known to be whole.
        inode, mtime_ns, source_size: of the file that was read.
    """

    path: str
    stored: str
    size: int
    crc: int
    end: int = 0
    inode: int = 0
    mtime_ns: int = 0
    source_size: int = 0


class HeldPartition(msgspec.Struct, frozen=True, omit_defaults=True):
    """A partition, as a backup has it.

    Attributes:
        log_id: of its log.
        end: the sequence behind its last message; 0: the log is damaged at its end.
        is_copy: it is a copy that belongs to a cluster.
    """

    topic: str
    partition: int
    log_id: int
    end: int
    is_copy: bool = False


class Manifest(msgspec.Struct, frozen=True):
    """A complete backup.

    Attributes:
        run: its number, above that of each run before it.
        data_path: that was read; ``identity`` is the data directory's own, ``node`` the one that a cluster knows.
        begun_ns, ended_ns: wall time. Everything acknowledged before the first of them is there.
        notes: what is not as it should be in the data directory itself.
        crc: of everything else; 0 while it is computed.
    """

    format: int
    release: str
    run: int
    data_path: str
    identity: int
    node: str
    begun_ns: int
    ended_ns: int
    partitions: list[HeldPartition]
    files: list[StoredFile]
    notes: list[str]
    crc: int = 0

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.size for file in self.files)


def write_manifest(files: Files, manifest: Manifest) -> None:
    """Make a backup the one that is there. Blocks; durable when it returns.

    Raises:
        OSError: the one before is still there.
    """
    crc = crc32(msgspec.json.encode(msgspec.structs.replace(manifest, crc=0)))
    whole = msgspec.structs.replace(manifest, crc=crc)
    replace_file(files, MANIFEST_NAME, msgspec.json.format(msgspec.json.encode(whole), indent=1))
    files.sync_directory("")


def read_manifest(files: Files) -> Manifest | None:
    """Read the last complete backup; None: there is none.

    Raises:
        BackupError: it cannot be read, or is damaged.
    """
    try:
        file = files.open(MANIFEST_NAME)
    except FileNotFoundError:
        return None
    try:
        data = file.read_at(0, _SIZE_MAX)
    finally:
        file.close()
    try:
        head = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        if msgspec.json.decode(head.get("format", b"0")) != FORMAT:
            raise BackupError(
                f"{MANIFEST_NAME} has format {bytes(head.get('format', b'none')).decode()}, and this release knows "
                f"{FORMAT}: use the release that wrote it, or a newer one"
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BackupError(f"{MANIFEST_NAME} is damaged ({error}); use another backup") from None
    if crc32(msgspec.json.encode(msgspec.structs.replace(manifest, crc=0))) != manifest.crc:
        raise BackupError(f"{MANIFEST_NAME} is damaged: its checksum is not that of its contents; use another backup")
    return manifest


def check_file(files: Files, file: StoredFile, remedy: str = "use another backup") -> None:
    """Read a stored file and compare it with the list. Blocks.

    Args:
        remedy: what to do when it is not what was stored.

    Raises:
        BackupError: it is not what was stored.
    """
    position, crc = 0, 0
    try:
        opened = files.open(file.stored)
        try:
            while position < file.size:
                data = opened.read_at(position, min(_PIECE_BYTES, file.size - position))
                if not data:
                    break
                crc = crc32(data, crc)
                position += len(data)
        finally:
            opened.close()
    except OSError as error:
        raise BackupError(f"{file.stored}: {error.strerror or error}; make a new backup elsewhere") from error
    if (position, crc) != (file.size, file.crc):
        what = f"it has {position} of {file.size} bytes" if position < file.size else "its checksum differs"
        raise BackupError(f"{file.stored} is not what was stored: {what}; {remedy}")


def is_empty(root: str, but: Iterable[str] = ()) -> bool:
    """Whether nothing is in a directory but :data:`OF_FILE_SYSTEMS`, and perhaps what ``but`` names."""
    return not set(os.listdir(root)).difference(OF_FILE_SYSTEMS, but)
