"""``flintmq backup`` and ``flintmq restore``: what is typed, what is printed, exit codes.

Rules of this file: results go to stdout, everything else to stderr; exit code 0 only if the backup is complete; a text
says that something was read back only of what was.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

import msgspec

from flintmq.backup.live import LiveDirectory
from flintmq.backup.manifest import BackupError, Manifest, is_empty
from flintmq.backup.restoring import MADE, restore
from flintmq.backup.taking import Taken, Taking, check
from flintmq.clock import SystemClock
from flintmq.errors import DataPathLocked, UsageError
from flintmq.storage import OsFiles

_MIB = 1024 * 1024
_NOTES_MAX = 20


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; {self.prog} --help says more")


def parser_of_backup() -> argparse.ArgumentParser:
    """Return what reads the command line of ``flintmq backup``."""
    parser = _Parser(
        prog="flintmq backup",
        description="Copies the data directory of an nsqd, which may run, to DIR: topics, messages, channels and where "
        "they are. All that was acknowledged before it begins is there. With the backup of an earlier run in DIR only "
        "what is new is copied. What is written is read back; files of earlier runs are only looked for, and --check "
        "reads all.",
        allow_abbrev=False,
    )
    parser.add_argument("directory", metavar="DIR", help="new, empty, or with an earlier backup of the same nsqd")
    parser.add_argument("--data-path", metavar="PATH", help="the --data-path of the nsqd, on this machine")
    parser.add_argument("--check", action="store_true", help="only read what is in DIR, and compare it with its list")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def run_backup(arguments: Sequence[str]) -> int:
    """Run ``flintmq backup``; return its exit code.

    Raises:
        FlintError: the command line is wrong, or no backup could be made.
    """
    given = parser_of_backup().parse_args(list(arguments))
    if given.check == (given.data_path is not None):
        raise UsageError("give --data-path=PATH to make a backup, or --check to look at one")
    if given.check:
        manifest = _checked(given.directory)
        taken = Taken(manifest, 0, 0, [])
    else:
        taken = _taken(given.data_path, given.directory)
        manifest = taken.manifest
    if taken.replaced:
        sys.stderr.write(
            f"flintmq backup: {_counted(len(taken.replaced))} of earlier runs were not there any more, too short or "
            f"damaged, and were copied anew, such as {taken.replaced[0]}: nothing but flintmq backup should write to "
            f"{given.directory}; --check reads the others\n"
        )
    for note in manifest.notes[:_NOTES_MAX]:
        sys.stderr.write(f"flintmq backup: {note}\n")
    if len(manifest.notes) > _NOTES_MAX:
        sys.stderr.write(f"flintmq backup: and {len(manifest.notes) - _NOTES_MAX} more, see backup.json\n")
    figures = {
        "written_bytes": taken.written_bytes, "kept_files": taken.kept_count, "replaced_files": len(taken.replaced)
    }  # fmt: skip
    _print(_summary(manifest, given.directory) | figures, given.json, [_told(taken)])
    return 0


def _taken(data_path: str, directory: str) -> Taken:
    source = LiveDirectory(data_path)
    target = os.path.realpath(directory)
    common = os.path.commonpath((source.root, target))
    if common in (source.root, target):
        raise BackupError(f"{directory} and --data-path {data_path} are inside each other: name another directory")
    _make(directory)
    files = _opened(directory)
    try:
        return Taking(source, files, SystemClock().wall_ns, _pause).take()
    except OSError as error:
        raise BackupError(f"{_failed(directory, error)}; nothing of an earlier backup was changed") from error
    finally:
        files.close()


def _checked(directory: str) -> Manifest:
    files = _opened(directory)
    try:
        return check(files)
    except OSError as error:
        raise BackupError(_failed(directory, error)) from error
    finally:
        files.close()


def parser_of_restore() -> argparse.ArgumentParser:
    """Return what reads the command line of ``flintmq restore``."""
    parser = _Parser(
        prog="flintmq restore",
        description="Makes a data directory of a backup, for an nsqd to be started on. It is a node of its own: topics "
        "that belonged to a cluster come back as this node's alone.",
        allow_abbrev=False,
    )
    parser.add_argument("directory", metavar="DIR", help="a backup that flintmq backup has made")
    parser.add_argument("--data-path", metavar="PATH", required=True, help="a new or an empty directory")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def run_restore(arguments: Sequence[str]) -> int:
    """Run ``flintmq restore``; return its exit code.

    Raises:
        FlintError: the command line is wrong, or it could not be restored.
    """
    given = parser_of_restore().parse_args(list(arguments))
    source = _opened(given.directory)
    try:
        _make(given.data_path)
        target = _opened(given.data_path)
        try:
            restored = restore(source, target)
        except OSError as error:
            if is_empty(target.root):
                left = "is empty again"
            elif any(os.path.lexists(os.path.join(target.root, name)) for name in MADE):
                left = "has a part of it: remove that"
            else:
                left = "has nothing of it, but what others have put there meanwhile"
            raise BackupError(f"{_failed(given.data_path, error)}; {given.data_path} {left}") from error
        finally:
            target.close()
    finally:
        source.close()
    lines = [f"restored {len(restored.manifest.partitions)} partitions of {given.directory} to {given.data_path}"]
    if restored.copies:
        lines.append(
            "these belonged to a cluster and are this node's alone now: "
            + ", ".join(f"{topic} ({', '.join(map(str, numbers))})" for topic, numbers in restored.copies.items())
        )
        lines.append(
            "in a cluster that has them still they are refused; in one that has not, topics with partitions are given "
            "to it at the start, others by flintmq topic replicate"
        )
    summary = _summary(restored.manifest, given.directory) | {"copies": restored.copies}
    _print(summary, given.json, lines)
    return 0


def _make(directory: str) -> None:
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
    except OSError as error:
        raise BackupError(f"{directory} cannot be made: {error.strerror or error}") from error


def _opened(directory: str) -> OsFiles:
    if not os.path.isdir(directory):
        raise BackupError(f"{directory} is no directory")
    try:
        return OsFiles(directory)
    except DataPathLocked as error:
        raise BackupError(f"{directory} is in use by another backup, a restore or an nsqd") from error


def _failed(directory: str, error: OSError) -> str:
    where = error.filename or directory
    return f"{where}: {error.strerror or error}"


def _pause(duration_s: float) -> None:
    threading.Event().wait(duration_s)


def _summary(manifest: Manifest, directory: str) -> dict[str, object]:
    return {
        "directory": directory,
        "data_path": manifest.data_path,
        "node": manifest.node,
        "run": manifest.run,
        "begun_ns": manifest.begun_ns,
        "ended_ns": manifest.ended_ns,
        "size_bytes": manifest.size_bytes,
        "partitions": manifest.partitions,
        "notes": manifest.notes,
    }


def _told(taken: Taken) -> str:
    manifest = taken.manifest
    topics = {held.topic for held in manifest.partitions}
    size = f"{manifest.size_bytes / _MIB:.1f} MiB in {_counted(len(manifest.files))}"
    text = f"{len(topics)} topics, {len(manifest.partitions)} partitions, {size}: complete"
    if not taken.kept_count:
        return f"{text}, and read back"
    written = len(manifest.files) - taken.kept_count
    return (
        f"{text}; {_counted(written)} written now and read back, {_counted(taken.kept_count)} of earlier runs are "
        "there and were not read: --check does"
    )


def _counted(count: int) -> str:
    return f"{count} file{'s' if count != 1 else ''}"


def _print(summary: dict[str, object], is_json: bool, lines: Sequence[str]) -> None:
    if is_json:
        sys.stdout.write(msgspec.json.encode(summary).decode() + "\n")
    else:
        sys.stdout.write("".join(f"{line}\n" for line in lines))
