"""What is refused before a backup begins, and what is said of the database that is copied."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flintmq.backup.live import LiveDirectory
from flintmq.backup.manifest import BackupError
from flintmq.errors import DamagedDatabase


@pytest.fixture
def data_path(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.mkdir()
    with contextlib.closing(sqlite3.connect(path / "channels.db")) as database:
        database.execute("CREATE TABLE t(a)")
    return path


@pytest.mark.parametrize(
    ("missing", "flags", "words"),
    [
        (os.R_OK, os.ST_RDONLY, "cannot be read: run this as the user that nsqd runs as, or as root"),
        (os.W_OK, os.ST_RDONLY, "is mounted for reading only.*copy it to where you may write and name the copy"),
        (os.W_OK, 0, "cannot be written.*run this as the user that nsqd runs as, or as root"),
    ],
)
def test_a_directory_that_may_not_be_read_or_written_is_refused_with_what_to_do(
    data_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int, flags: int, words: str
):
    monkeypatch.setattr("flintmq.backup.live.os.access", lambda _path, mode: not mode & missing)
    monkeypatch.setattr("flintmq.backup.live.os.statvfs", lambda _path: SimpleNamespace(f_flag=flags))
    with pytest.raises(BackupError, match=words):
        LiveDirectory(str(data_path))


class Failing:
    """A database whose copying fails."""

    def __init__(self, code: int) -> None:
        self._error = sqlite3.OperationalError("database or disk is full")
        self._error.sqlite_errorcode = code

    def backup(self, _target: Any) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("code", "expected"),
    [(sqlite3.SQLITE_FULL, errno.ENOSPC), (sqlite3.SQLITE_IOERR_WRITE, errno.EIO), (sqlite3.SQLITE_CORRUPT, None)],
)
def test_an_error_of_the_copy_names_the_copy_and_one_of_the_database_the_database(
    data_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, expected: int | None
):
    source, target = LiveDirectory(str(data_path)), str(tmp_path / "copy.db")

    @contextlib.contextmanager
    def connected() -> Iterator[Failing]:
        yield Failing(code)

    monkeypatch.setattr(source, "_connected", connected)
    with pytest.raises(DamagedDatabase if expected is None else OSError) as raised:
        source.copy_database(target)
    if isinstance(raised.value, OSError):
        assert (raised.value.errno, raised.value.filename) == (expected, target)
    else:
        assert str(raised.value).startswith(f"{data_path}/channels.db: ")


def test_a_copy_that_cannot_be_made_is_an_error_that_names_it(data_path: Path, tmp_path: Path):
    target = str(tmp_path / "none" / "copy.db")
    with pytest.raises(OSError, match="unable to open") as raised:
        LiveDirectory(str(data_path)).copy_database(target)
    assert raised.value.filename == target
