"""Making a data directory of a backup, as one of a single node that nobody knows.

What belonged to a cluster comes back as topics of this node alone, and the node gets an identity of its own: a cluster
that goes on has newer copies, which the restored ones must neither stand for nor replace. A node that is started in a
cluster then brings what it has, as every single node does: the cluster takes what it lacks, and refuses what it has.

Rules of this file: the database comes last, so that nsqd does not start on what was restored in part; every file is
compared with the list on the way; a restore that fails removes what it has made, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field

import msgspec

from flintmq.backup.manifest import BackupError, Manifest, StoredFile, is_empty, read_manifest
from flintmq.broker.adoption import clamp_cursor
from flintmq.broker.logs import TOPICS_DIRECTORY
from flintmq.checksum import crc32
from flintmq.settings import decode_settings
from flintmq.storage import ChannelStore, Files, OsFiles, packs
from flintmq.storage.channel_list import LIST_NAME
from flintmq.storage.channel_store import (
    DATABASE_NAME,
    UNKNOWN_COUNT,
    Statement,
    StoredTopics,
    delete_replica_row,
    put_cursor,
    put_settings,
    put_topic,
    put_topic_meta,
)
from flintmq.storage.integrity import RESTORING_DIRECTORY
from flintmq.topic_meta import decode_meta

MADE = (TOPICS_DIRECTORY, RESTORING_DIRECTORY, DATABASE_NAME, LIST_NAME)
"""All that a restore puts into its directory."""
_PIECE_BYTES = 4 * 1024 * 1024


@dataclass(slots=True)
class Restored:
    """A data directory that was made of a backup.

    Attributes:
        copies: topics that belonged to a cluster, and the partitions of each.
    """

    manifest: Manifest
    copies: dict[str, list[int]] = field(default_factory=dict)


def restore(source: OsFiles, target: OsFiles) -> Restored:
    """Make a data directory of a backup. Blocks.

    Args:
        source: the directory of the backup.
        target: a directory with nothing in it.

    Raises:
        BackupError: there is no backup, it is damaged, or the directory has something in it.
        StorageError: the database cannot be opened.
        OSError: something cannot be written.
    """
    if not is_empty(target.root):
        raise BackupError(f"{target.root} has something in it: name a new or an empty directory")
    manifest = read_manifest(source)
    if manifest is None:
        raise BackupError(f"{source.root} has no complete backup")
    try:
        return _restored(source, manifest, target)
    except BaseException:
        _clear(target)
        raise


def _restored(source: OsFiles, manifest: Manifest, target: OsFiles) -> Restored:
    names = (DATABASE_NAME, LIST_NAME)
    directories: dict[str, None] = {}
    for file in manifest.files:
        path = f"{RESTORING_DIRECTORY}/{file.path}" if file.path in names else file.path
        directory = path.rpartition("/")[0]
        if directory not in directories:
            target.make_directory(directory)
            directories[directory] = None
        _copy(source, file, target, path)
    for directory in directories:
        target.sync_directory(directory)
    restored = Restored(manifest)
    opened = OsFiles(f"{target.root}/{RESTORING_DIRECTORY}")
    try:
        store = ChannelStore(opened)
        try:
            stored = store.load()
            statements = _as_of_one_node(stored, restored.copies)
            store.run_transaction(statements, True)
        finally:
            store.close()
    finally:
        opened.close()
    for name in names:
        target.rename(f"{RESTORING_DIRECTORY}/{name}", name)
    target.remove_directory(RESTORING_DIRECTORY)
    target.sync_directory("")
    return restored


def _clear(target: OsFiles) -> None:
    """Remove what was restored into a directory that was empty, as far as that is possible."""
    for name in MADE:
        with contextlib.suppress(OSError):
            if os.path.isdir(os.path.join(target.root, name)):
                target.remove_directory(name)
            else:
                target.remove(name)


def _copy(source: Files, file: StoredFile, target: Files, path: str) -> None:
    position = crc = 0
    read, written = source.open(file.stored), target.open(path, create=True)
    try:
        while position < file.size:
            data = read.read_at(position, min(_PIECE_BYTES, file.size - position))
            if not data:
                break
            written.write_at(position, data)
            crc, position = crc32(data, crc), position + len(data)
        if (position, crc) != (file.size, file.crc):
            raise BackupError(f"{file.stored} of the backup is not what was stored: use another backup")
        written.sync()
    finally:
        written.close()
        read.close()


def _as_of_one_node(stored: StoredTopics, copies: dict[str, list[int]]) -> list[Statement]:
    """Return what makes partitions of replicas that this node has alone; fill in which these are."""
    statements: list[Statement] = []
    for topic, number in sorted(stored.replicas):
        copies.setdefault(topic, []).append(number)
        statements += delete_replica_row(topic, number)
        rows_end = stored.replicas[topic, number].rows_end
        for cursor in stored.cursors if rows_end else ():
            if (cursor.topic, cursor.partition) == (topic, number) and clamp_cursor(cursor, rows_end):
                statements += packs.clear_packs(cursor.id, rows_end)
                row = put_cursor(
                    cursor.id, topic, number, cursor.channel, cursor.row, cursor.window, UNKNOWN_COUNT
                )  # fmt: skip
                statements.append(row)
    for topic, numbers in copies.items():
        abouts = {number: stored.replicas[topic, number].about for number in numbers}
        about = max(abouts.values(), key=lambda each: decode_meta(each.meta).rank)
        meta = msgspec.structs.replace(decode_meta(about.meta), replica=1)
        headers_from = {number: each.headers_from for number, each in abouts.items() if each.headers_from}
        statements += [put_topic(topic, about.paused), put_topic_meta(topic, meta, numbers, headers_from)]
        for channel, settings in about.settings.items():
            statements += put_settings(topic, channel, decode_settings(settings))
    return statements
