"""Cutting a log back: the newest messages go, and their sequences are used again; or all go, and it begins elsewhere.

A replica does this whose newest messages are not those of its leader, or end before its leader's begin. It takes
several steps on the disk, so what is to be done is written down first, and done again by the next start if it was not
ended::

    the log is synced              what stays is durable
    producers.snapshot             the table as of the place of the cut; with what stands behind that it is today's
    log.cut                        from here on the log ends there, whatever happens
    newer segments are removed, the newest first; the one with the place is truncated and synced; the directory, too
    log.cut is removed, and that is synced, before anything is appended

A log that starts over needs none of the first two; all its segments go, and an empty one is made.

Byte picture of ``log.cut`` (big-endian)::

    0      4        6         8        16      24         32    36
    +------+--------+---------+--------+-------+----------+-----+
    | FMQC | 1      | reserved| log_id | first | position | crc |      it is cut back
    +------+--------+---------+--------+-------+----------+-----+
    | FMQC | 2      | reserved| log_id | first | offset   | crc |      it starts over
    +------+--------+---------+--------+-------+----------+-----+

- ``first``: of the segment in which the log is to end; ``position``: where in it, in bytes; ``offset``: virtual
  position of the first frame of an empty log.

Rules of this file: every step may be done again; nothing is appended before the last.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from struct import Struct

from flintmq.checksum import crc32
from flintmq.errors import StorageError
from flintmq.storage.files import Files, replace_file
from flintmq.storage.producers import SNAPSHOT_NAME
from flintmq.storage.segment import INDEX_SUFFIX, SEGMENT_HEADER_BYTES, Corruption, Home, Segment

CUT_NAME = "log.cut"
_MAGIC = b"FMQC"
_CUT_BACK, _START_OVER = 1, 2
_CUT = Struct(">4sHHQQQ")
_CRC = Struct(">I")
_FILE_NAME = re.compile(r"([0-9]{20})(\.log|\.index|\.log\.([0-9]+)\.bad)")


@dataclass(frozen=True, slots=True)
class Cut:
    """The place where a log is to end.

    Attributes:
        log_id: of the log.
        first: of the segment.
        position: in the segment, in bytes; behind its header.
        offset_bytes: of a log that starts over with that segment, the virtual position of its first frame; None for one
            that is cut back.
    """

    log_id: int
    first: int
    position: int
    offset_bytes: int | None = None


def write_cut(files: Files, directory: str, cut: Cut) -> None:
    """Write down, durably, that a log is to end somewhere. Blocks.

    Raises:
        OSError: nothing is known about whether the next start will cut it.
    """
    is_cut_back = cut.offset_bytes is None
    place = (_CUT_BACK, cut.position) if is_cut_back else (_START_OVER, cut.offset_bytes)
    data = _CUT.pack(_MAGIC, place[0], 0, cut.log_id, cut.first, place[1])
    replace_file(files, f"{directory}/{CUT_NAME}", data + _CRC.pack(crc32(data)))
    files.sync_directory(directory)


def finish_cut(home: Home, names: Sequence[str]) -> None:
    """Do what :func:`write_cut` has written down. Blocks.

    Args:
        home: of the log, whose identity is known.
        names: what there is in its directory.

    Raises:
        StorageError: it is of a newer release.
        OSError: it is not finished; it can be done again.
    """
    files, directory = home.files, home.directory
    path = f"{directory}/{CUT_NAME}"
    cut = _read(files, path)
    if cut is None or cut.log_id != home.log_id:
        home.report(Corruption(path, 0, 0, "damaged, or of another log; it is removed", 0, 0, "header"))
    elif cut.offset_bytes is None:
        _cut(home, cut, names)
    else:
        _start_over(home, cut, cut.offset_bytes, names)
    files.sync_directory(directory)
    files.remove(path)
    files.sync_directory(directory)


def _read(files: Files, path: str) -> Cut | None:
    file = files.open(path)
    try:
        data = file.read_at(0, _CUT.size + _CRC.size)
    finally:
        file.close()
    if len(data) < _CUT.size + _CRC.size or _CRC.unpack_from(data, _CUT.size)[0] != crc32(data[: _CUT.size]):
        return None
    magic, version, reserved, *fields = _CUT.unpack_from(data)
    if magic != _MAGIC:
        return None
    if version not in (_CUT_BACK, _START_OVER) or reserved:
        raise StorageError(f"{path}: version {version}; this release reads up to {_START_OVER}: use the newer release")
    log_id, first, place = fields
    return Cut(log_id, first, place) if version == _CUT_BACK else Cut(log_id, first, SEGMENT_HEADER_BYTES, place)


def _cut(home: Home, cut: Cut, names: Sequence[str]) -> None:
    files, directory = home.files, home.directory
    for name in sorted(names, reverse=True):  # the newest first
        found = _FILE_NAME.fullmatch(name)
        if found is None or int(found[1]) < cut.first:
            continue
        is_newer, is_index, is_copy = int(found[1]) > cut.first, found[2] == INDEX_SUFFIX, found[3] is not None
        if is_newer or is_index or (is_copy and int(found[3]) >= cut.position):
            files.remove(f"{directory}/{name}")
    with suppress(FileNotFoundError):  # then there is nothing to be cut
        file = files.open(Segment(home, cut.first).path)
        try:
            if file.size() > cut.position:
                file.truncate(cut.position)
            file.sync()
        finally:
            file.close()


def _start_over(home: Home, cut: Cut, offset_bytes: int, names: Sequence[str]) -> None:
    files, directory = home.files, home.directory
    for name in sorted(names, reverse=True):
        if _FILE_NAME.fullmatch(name) or name == SNAPSHOT_NAME:
            files.remove(f"{directory}/{name}")
    segment = Segment(home, cut.first)
    try:
        segment.create(cut.first, offset_bytes, cut.first)
        segment.file().sync()
    finally:
        segment.close()
