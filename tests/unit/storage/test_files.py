"""The data directory on a real file system: who may read what is made there, and links that are not followed."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
from pathlib import Path

import pytest

from flintmq.errors import StorageError
from flintmq.storage.files import RESERVE_NAME, OsFiles, SqliteDatabase, replace_file


@pytest.fixture
def files(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    files = OsFiles(str(root))
    yield files
    files.close()


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(root: str) -> dict[str, int]:
    found = {}
    for directory, names, file_names in os.walk(root):
        for name in names + file_names:
            path = os.path.join(directory, name)
            found[os.path.relpath(path, root)] = stat.S_IMODE(os.lstat(path).st_mode)
    return found


def test_what_is_made_is_for_its_owner_alone(files, umask):
    files.make_directory("topics/t-a/p-0000")
    files.open("topics/t-a/p-0000/log.meta", create=True).close()
    replace_file(files, "nsqd.dat", b"{}")
    database = files.open_database("channels.db")
    database.run_transaction([("CREATE TABLE t (x)", ((),)), ("INSERT INTO t VALUES (?)", [(1,)])], True)
    found = modes(files.root)
    database.close()
    assert {"channels.db", "channels.db-wal", "channels.db-shm"} <= set(found)
    assert found == {path: 0o700 if Path(files.root, path).is_dir() else 0o600 for path in found}


def test_a_database_of_an_older_release_is_closed_to_others(files):
    path = Path(files.root, "channels.db")
    old = files.open_database("channels.db")
    old.run_transaction([("CREATE TABLE t (x)", ((),)), ("INSERT INTO t VALUES (?)", [(1,)])], True)
    for name in ("channels.db", "channels.db-wal", "channels.db-shm"):
        Path(files.root, name).chmod(0o644)
    database = files.open_database("channels.db")
    assert database.query("SELECT x FROM t") == [(1,)]
    assert set(modes(files.root).values()) == {0o600} and path.stat().st_size > 0
    database.close()
    old.close()


def test_a_link_is_removed_and_not_what_it_leads_to(files, tmp_path, caplog):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "p-0000").mkdir(parents=True)
    (elsewhere / "p-0000" / "kept").write_bytes(b"x")
    files.make_directory("topics/t-b")
    os.symlink(elsewhere, os.path.join(files.root, "topics/t-a"))
    os.symlink(elsewhere, os.path.join(files.root, "topics/t-b/inside"))
    os.symlink(tmp_path / "nowhere", os.path.join(files.root, "topics/t-c"))
    for topic in ("t-a", "t-b", "t-c", "t-d"):
        files.remove_directory(f"topics/{topic}")
    assert files.list("topics") == []
    assert (elsewhere / "p-0000" / "kept").read_bytes() == b"x"
    assert f"leads to {elsewhere}: the link is removed" in caplog.text


def test_a_link_is_followed_to_read_and_not_to_write(files, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"theirs")
    os.symlink("../elsewhere", os.path.join(files.root, "link"))
    file = files.open_to_read("link")
    assert (file.size(), file.read_at(2, 10)) == (6, b"eirs")
    with pytest.raises(OSError):
        file.write_at(0, b"ours")
    file.close()
    for create in (False, True):
        with pytest.raises(OSError):
            files.open("link", create)
    replace_file(files, "link", b"ours")
    assert elsewhere.read_bytes() == b"theirs"
    assert not Path(files.root, "link").is_symlink()


def test_only_files_are_opened_to_be_read(files):
    os.mkfifo(os.path.join(files.root, "pipe"))
    os.symlink("pipe", os.path.join(files.root, "to-pipe"))
    os.symlink("itself", os.path.join(files.root, "itself"))
    os.symlink("nowhere", os.path.join(files.root, "link"))
    files.make_directory("directory")
    for path in ("pipe", "to-pipe", "directory"):
        with pytest.raises(OSError, match="not a regular file"):
            files.open_to_read(path)
    with pytest.raises(OSError, match="symbolic links"):
        files.open_to_read("itself")
    for path in ("link", "missing"):
        with pytest.raises(FileNotFoundError):
            files.open_to_read(path)
    with pytest.raises(StorageError, match="leaves the data directory"):
        files.open_to_read("../elsewhere")


def swap(path: Path, how: str) -> None:
    """Let a path lead to another directory, which is empty."""
    other = path.parent / "other"
    other.mkdir()
    if how == "link":
        path.unlink()
        path.symlink_to(other)
    else:
        path.rename(path.parent / "elsewhere")
        other.rename(path)


@pytest.mark.parametrize("how", ["link", "moved"])
def test_all_goes_on_in_the_directory_of_the_start(tmp_path, how, caplog):
    path, real = tmp_path / "path", tmp_path / "real"
    real.mkdir()
    if how == "link":
        path.symlink_to(real)
    else:
        path.mkdir()
        real = tmp_path / "elsewhere"
    with contextlib.closing(OsFiles(str(path))) as files:
        files.make_directory("topics/t-a")
        files.open("topics/t-a/1.log", create=True).close()
        database = files.open_database("channels.db")
        database.run_transaction([("CREATE TABLE t (x)", ((),))], True)
        assert files.displaced() == ""
        swap(path, how)
        assert files.displaced().startswith(f"the data path {path} is another directory than at the start")
        file = files.open("topics/t-a/1.log")
        file.write_at(0, b"more")
        assert file.path == f"{path}/topics/t-a/1.log"
        files.open("topics/t-a/2.log", create=True).close()
        files.rename("topics/t-a/2.log", "topics/t-a/3.log")
        files.make_directory("topics/t-b")
        replace_file(files, "nsqd.dat", b"{}")
        files.sync_directory("topics")
        files.remove("topics/t-a/1.log")
        files.keep_reserve()
        assert files.list("topics/t-a") == ["3.log"]
        with pytest.raises(FileNotFoundError, match=f"'{path}/topics/missing'"):
            files.open("topics/missing")
        files.remove_directory("topics/t-a")
        database.run_transaction([("INSERT INTO t VALUES (?)", [(1,)])], True)
        if how == "link":
            snapshot = database.snapshot()  # SQLite was told where the link led at the start
            assert snapshot.query("SELECT x FROM t") == [(1,)]
            snapshot.close()
        else:
            for opens in (database.snapshot, lambda: files.open_database("other.db")):
                with pytest.raises(StorageError, match="is not the directory any more that it was at the start"):
                    opens()
        assert list(path.iterdir()) == []
        assert {each.name for each in real.iterdir()} >= {"topics", "nsqd.dat", "channels.db", RESERVE_NAME}
        assert [each.name for each in (real / "topics").iterdir()] == ["t-b"]
        database.close()


def test_a_data_path_that_is_gone_is_told(files):
    Path(files.root).rmdir()
    assert files.displaced().startswith(f"the data path {files.root} is not there any more (No such file or directory)")


def test_a_snapshot_is_as_the_database_was_whatever_is_written_since(files):
    database = files.open_database("channels.db")
    database.run_transaction([("CREATE TABLE t (x)", ((),)), ("INSERT INTO t VALUES (?)", [(1,)])], False)
    snapshot = database.snapshot()
    for number in range(2, 50):
        database.run_transaction([("INSERT INTO t VALUES (?)", [(number,)])], number % 2 == 0)
    database.run_transaction([("DELETE FROM t WHERE x = ?", [(1,)])], True)
    assert snapshot.query("SELECT x FROM t") == [(1,)]
    snapshot.close()
    assert len(database.query("SELECT x FROM t")) == 48
    database.close()


def test_a_path_that_is_too_long_for_a_database_is_told_with_the_limit(tmp_path):
    directory = tmp_path
    while len(str(directory)) < 500:
        directory /= "d" * 50
    directory.mkdir(parents=True)
    with pytest.raises(
        StorageError, match=r"its whole path has 5\d\d bytes, and SQLite .* at most 504: use a directory"
    ):
        SqliteDatabase(str(directory / "x.db"))


def test_an_error_of_a_database_whose_directory_is_gone_is_told_as_one(tmp_path):
    (tmp_path / "gone").mkdir()
    database = SqliteDatabase(str(tmp_path / "gone" / "x.db"))
    shutil.rmtree(tmp_path / "gone")
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR
    assert isinstance(database._failure(error), StorageError)
    database.close()
