"""What is refused before a backup begins, what a run leaves alone, and what is said of the database that is copied."""

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

from flintmq.backup.command import run_restore
from flintmq.backup.live import LiveDirectory
from flintmq.backup.manifest import BackupError, Manifest
from flintmq.backup.taking import Taking
from flintmq.errors import DamagedDatabase, StorageError
from flintmq.storage import ChannelStore, OsFiles


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


class Backup:
    """The directory of a backup, and data directories that were never started.

    Attributes:
        path: of the directory.
        outside: a directory with a file, which is none of the backup's business.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.path, self.outside = root / "backup", root / "outside"
        self.path.mkdir()
        self.outside.mkdir()
        (self.outside / "precious").write_text("not ours")

    def data_path(self, identity: int) -> Path:
        path = self._root / f"data{identity}"
        if not path.exists():
            path.mkdir()
            with contextlib.closing(OsFiles(str(path))) as files:
                ChannelStore(files, identity).close()
        return path

    def take(self, identity: int = 1) -> Manifest:
        source = LiveDirectory(str(self.data_path(identity)))
        with contextlib.closing(OsFiles(str(self.path))) as files:
            return Taking(source, files, lambda: 1, lambda _: None).take().manifest

    def tree(self) -> dict[str, bytes | None]:
        """Everything in the directory, links not followed: files with what is in them, links with where they lead."""
        found: dict[str, bytes | None] = {}
        for path in self.path.rglob("*"):
            name = path.relative_to(self.path).as_posix()
            if path.is_symlink():
                found[name] = os.readlink(path).encode()
            else:
                found[name] = path.read_bytes() if path.is_file() else None
        return found

    def is_outside_whole(self) -> bool:
        return [path.read_text() for path in self.outside.iterdir()] == ["not ours"]


@pytest.fixture
def backup(tmp_path: Path) -> Backup:
    return Backup(tmp_path)


def test_what_is_not_of_a_run_is_left_alone(backup: Backup):
    """By a run that succeeds, and by one that is refused."""
    backup.take()
    path = backup.path
    (path / "run-latest").symlink_to(backup.outside)
    (path / "run-000001.bak").write_text("a copy")
    (path / "run-backup.sh").write_text("a script")
    for name in ("run-notes", "run-1", "run-0000001"):
        (path / name).mkdir()
        (path / name / "note").write_text("a note")
    mine = {name: data for name, data in backup.tree().items() if name.startswith("run-") and "run-000001/" not in name}
    before = backup.tree()
    with pytest.raises(BackupError, match="another data directory"):
        backup.take(identity=2)
    assert backup.tree() == before
    assert backup.take().run == 2
    assert mine.items() - {("run-000001", None)} <= backup.tree().items()
    assert backup.is_outside_whole()


@pytest.mark.parametrize("place", ["run-000001", "run-000002", "run-000001/database", "run-000002/topics/t-t"])
def test_no_link_is_followed_at_any_depth(backup: Backup, place: str):
    """One in the place of what a run made, or is going to make, is refused, and nothing is changed."""
    backup.take()
    link = backup.path / place
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.exists():
        link.rename(backup.outside.parent / "moved")
    link.symlink_to(backup.outside)
    before = backup.tree()
    with pytest.raises(BackupError, match=f"{place} is a link"):
        backup.take()
    assert backup.tree() == before
    assert backup.is_outside_whole()


def test_a_link_that_comes_while_a_run_works_is_removed_as_a_link(backup: Backup, monkeypatch: pytest.MonkeyPatch):
    def write(*_: Any) -> None:
        (backup.path / "run-000001" / "late").symlink_to(backup.outside)
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("flintmq.backup.taking.write_manifest", write)
    with pytest.raises(OSError, match="no space"):
        backup.take()
    assert backup.tree().keys() == {"flintmq-backup", "README.txt"}
    assert backup.is_outside_whole()


def test_a_file_with_the_name_of_a_run_is_refused(backup: Backup):
    (backup.path / "flintmq-backup.tmp").touch()  # of a first run that was killed: it goes on
    backup.take()
    (backup.path / "run-000002").write_text("mine")
    before = backup.tree()
    with pytest.raises(BackupError, match="run-000002 is no directory: move it away"):
        backup.take()
    assert backup.tree() == before


def test_without_its_list_what_was_stored_is_there_until_there_is_a_new_one(
    backup: Backup, monkeypatch: pytest.MonkeyPatch
):
    backup.take()
    (backup.path / "backup.json").unlink()
    before = backup.tree()
    with pytest.raises(BackupError, match="another data directory"):
        backup.take(identity=2)
    assert backup.tree() == before, "of another nsqd"
    during: list[dict[str, bytes | None]] = []

    def fail(*_: Any) -> None:
        during.append(backup.tree())
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="no space"):
        patched.setattr("flintmq.backup.taking.write_manifest", fail)
        backup.take()
    assert before.items() <= during[0].items() and "run-000002/database/channels.db" in during[0]
    assert backup.tree() == before, "a run that fails removes what it has written"
    assert backup.take().run == 2
    assert "run-000001" not in backup.tree()


def test_a_first_run_that_cannot_write_its_mark_leaves_the_directory_empty(
    backup: Backup, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    backup.data_path(1)
    with monkeypatch.context() as patched, pytest.raises(OSError, match="no space"):
        patched.setattr(OsFiles, "rename", fail)
        backup.take()
    assert backup.tree() == {}
    assert backup.take().run == 1


def test_what_a_run_wrote_and_does_not_read_back_is_not_put_down_to_an_earlier_one(
    backup: Backup, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("flintmq.backup.manifest.crc32", lambda _data, _crc: 0)
    with pytest.raises(BackupError, match="its checksum differs; the disk does not keep what is written"):
        backup.take()


def test_a_restore_that_fails_leaves_what_others_have_put_there(
    backup: Backup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    backup.take()
    target = tmp_path / "target"
    target.mkdir()
    (target / "lost+found").mkdir()

    def fail(*_: Any) -> None:
        assert (target / "restoring" / "channels.db").exists()
        (target / "notes").mkdir()
        (target / "notes" / "mine").write_text("written meanwhile")
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("flintmq.backup.restoring.ChannelStore", fail)
    with pytest.raises(BackupError, match=r"no space; .*target has nothing of it, but what others have put there"):
        run_restore([str(backup.path), f"--data-path={target}"])
    assert sorted(path.name for path in target.rglob("*")) == ["lost+found", "mine", "notes"]


@pytest.mark.parametrize("has_topics", [False, True])
def test_nsqd_does_not_start_where_a_restore_was_interrupted_and_says_so(tmp_path: Path, has_topics: bool):
    (tmp_path / "restoring").mkdir()
    if has_topics:
        log = tmp_path / "topics" / "t-t" / "p-0000" / "00000000000000000000.log"
        log.parent.mkdir(parents=True)
        log.touch()
    words = "flintmq restore was interrupted here: .*remove the whole data directory, and restore again$"
    with contextlib.closing(OsFiles(str(tmp_path))) as files, pytest.raises(StorageError, match=words):
        ChannelStore(files)
