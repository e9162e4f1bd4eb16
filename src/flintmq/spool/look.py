"""The files of a spool, as somebody else looks at them: how far they go, and since when the first unread message waits.

It is told what to look at in one line of JSON on its standard input, and says in one line what it sees::

    {"directory": "/data/spool", "read": [["clicks", "187a...", 301]]}   ->   topic, id of the log, next message to read
    [[1201, 1763900000000000000]]                                        <-   end, time of the oldest unread in ns; null

The rules of this file: nothing is locked, changed or waited for, whether the spool runs or not; what is being written
at the end of a file is not counted; files that go meanwhile were read.

Source: docs/decisions/0032.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import msgspec

from flintmq.batch import HEADER_BYTES, BatchError, BatchHeader, decode_header
from flintmq.errors import UNREADABLE_JSON, FlintError
from flintmq.spool.process import SETTINGS_SIZE_MAX, STATE, NotThisSpool
from flintmq.storage.segment import LOG_SUFFIX, SEGMENT_HEADER_BYTES, decode_segment_header


class Wanted(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """All that it is told: a directory, and by log the next message to read."""

    directory: str
    read: list[tuple[str, str, int]]


def main() -> int:
    """Look once; return the exit code, and unless that is 0 the reason as the last line on standard error."""
    try:
        wanted = msgspec.json.decode(sys.stdin.buffer.readline(SETTINGS_SIZE_MAX), type=Wanted)
        directory = Path(wanted.directory)
        if not (directory / STATE).is_file():
            raise NotThisSpool(wanted.directory, f"it is no spool: it has no {STATE}")
        seen = [look(directory / f"t-{topic}", log_id, position) for topic, log_id, position in wanted.read]
    except (FlintError, OSError, *UNREADABLE_JSON) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(msgspec.json.encode(seen).decode() + "\n")
    return 0


def look(directory: Path, log_id: str, position: int) -> tuple[int | None, int | None]:
    """Look at one log.

    Args:
        log_id: of the log; 16 hex digits.
        position: the next message to read.

    Returns:
        Its end, None when it is not here; and when nsqd stored the oldest message that was not read, in ns, None when
        there is none.

    Raises:
        StorageError: a later release has written it.
    """
    end: int | None = None
    oldest_ns: int | None = None
    segments = sorted(directory.glob(f"*{LOG_SUFFIX}"))
    for path, following in zip_longest(segments, segments[1:]):
        if following is not None and int(following.stem) <= position:
            continue  # all of it was read
        for first, header in _batches(path, log_id):
            end = max(first if header is None else header.end_sequence, end or 0)
            if header is not None and oldest_ns is None and header.end_sequence > position:
                oldest_ns = header.timestamp_min
            if oldest_ns is not None and following is not None:
                break  # the end is that of the last file
    return end, oldest_ns


def _batches(path: Path, log_id: str) -> Iterator[tuple[int, BatchHeader | None]]:
    """Yield the first sequence of a segment of this log, and the headers of its batches; nothing of another log."""
    try:
        with path.open("rb") as file:
            segment = decode_segment_header(file.read(SEGMENT_HEADER_BYTES))
            if segment is None or f"{segment.log_id:016x}" != log_id:
                return
            yield segment.first, None
            size = os.fstat(file.fileno()).st_size
            while True:
                header = decode_header(file.read(HEADER_BYTES))
                if file.tell() + header.payload_size > size:
                    return  # it is being written
                yield segment.first, header
                file.seek(header.payload_size, os.SEEK_CUR)
    except BatchError:
        return  # its end, or damage that the spool tells of
    except FileNotFoundError:
        return
