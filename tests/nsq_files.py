"""The data directory of NSQ's nsqd, written byte for byte as nsqd writes it, for tests that take one over.

Nothing of FlintMQ's reader is used here.

Source: NSQ's data files.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

START_NS = 1_700_000_000_000_000_000


class Files(Protocol):
    """What of a data directory is needed here."""

    def open(self, path: str, create: bool = False): ...


@dataclass(frozen=True)
class Queued:
    """A message in a queue file; ``attempts`` so far."""

    body: bytes
    timestamp_ns: int = START_NS
    attempts: int = 0
    id: bytes = b"0123456789abcdef"

    @property
    def record(self) -> bytes:
        """int32 length, int64 timestamp, uint16 attempts, 16 bytes id, body."""
        data = struct.pack(">qH16s", self.timestamp_ns, self.attempts, self.id) + self.body
        return struct.pack(">i", len(data)) + data


def numbered(prefix: str, count: int, *, size: int = 0, attempts: int = 0) -> list[Queued]:
    """Messages ``prefix-0``, ``prefix-1``, ... padded to ``size`` bytes, a microsecond apart."""
    return [
        Queued(f"{prefix}-{n}".encode().ljust(size, b"."), START_NS + 1000 * n, attempts, b"%016x" % (0xABC000 + n))
        for n in range(count)
    ]


def meta(depth: int, read: tuple[int, int], write: tuple[int, int]) -> bytes:
    """A meta file."""
    return f"{depth}\n{read[0]},{read[1]}\n{write[0]},{write[1]}\n".encode()


def queue_files(
    name: str,
    messages: Sequence[Queued],
    *,
    file_bytes_max: int = 100 * 1024 * 1024,
    read_count: int = 0,
    first_file: int = 0,
    unsynced_count: int = 0,
) -> dict[str, bytes]:
    """The files of one queue after it was written and ``read_count`` messages were read.

    Args:
        name: ``topic`` or ``topic:channel``.
        file_bytes_max: nsqd's ``--max-bytes-per-file``: a file is left before it grows beyond that.
        unsynced_count: that many of the last messages are in the file and not in the meta file (kill -9).
    """
    files: dict[int, bytearray] = {first_file: bytearray()}
    number = first_file
    places: list[tuple[int, int]] = []
    for message in messages:
        record = message.record
        if files[number] and len(files[number]) + len(record) > file_bytes_max:
            number += 1
            files[number] = bytearray()
        places.append((number, len(files[number])))
        files[number] += record
    places.append((number, len(files[number])))
    written = len(messages) - unsynced_count
    content = meta(written - read_count, places[read_count], places[written])
    # what was read to its end is removed
    kept = {n: data for n, data in files.items() if data and n >= places[read_count][0]}
    return {
        **{f"{name}.diskqueue.{n:06d}.dat": bytes(data) for n, data in kept.items()},
        f"{name}.diskqueue.meta.dat": content,
    }


def nsqd_dat(topics: dict[str, tuple[bool, dict[str, bool]]], version: str = "1.3.0") -> bytes:
    """nsqd.dat of topic -> (paused, channel -> paused)."""
    rows = [
        {
            "name": topic,
            "paused": paused,
            "channels": [{"name": name, "paused": flag} for name, flag in channels.items()] or None,
        }
        for topic, (paused, channels) in topics.items()
    ]
    return json.dumps({"topics": rows, "version": version}, separators=(",", ":")).encode()


def write_path(directory: Path, files: dict[str, bytes]) -> None:
    """Put files into a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        path = directory / name
        path.write_bytes(data)
        path.chmod(0o600)


def write_files(files: Files, content: dict[str, bytes]) -> None:
    """Put files into a data directory that stands behind the door of ``flintmq.storage``."""
    for name, data in content.items():
        file = files.open(name, create=True)
        file.truncate(0)
        file.write_at(0, data)
        file.sync()
        file.close()


def bodies(messages: Iterable[Queued]) -> list[bytes]:
    """What they carry."""
    return [message.body for message in messages]
