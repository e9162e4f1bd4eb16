"""Compaction: readers find each message once before, while and after, whenever it is killed."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.integration.daemons import PATIENCE_S, wait_until
from tests.spark.fake_nsqd import FakeLog, FakeNsqd
from tests.spark.test_archive import HOUR_NS, NOON_NS, Killed, names, rows
from tests.spark.test_lake import FORMATS, read, transactions
from tests.spark.test_reader import numbered

from flintmq import cli
from flintmq.errors import UsageError
from flintmq.pipeline import compact as module
from flintmq.pipeline.archive import archive
from flintmq.pipeline.compact import Compacted, compact
from flintmq.pipeline.files import ArchiveError, take
from flintmq.spark.broker import POOL


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(module, "GRACE_S", 0.05)


@pytest.fixture
def fake() -> Iterator[FakeNsqd]:
    with FakeNsqd() as nsqd:
        yield nsqd
    POOL._idle.clear()


def small_files(fake: FakeNsqd, directory: Path, **given: Any) -> list[tuple]:
    """Archive two logs in small rounds; return what every reader has to find."""
    logs = fake.logs["t"] = [FakeLog(partition=number) for number in range(2)]
    for hour in (0, 0, 0, 1, 0):  # the clock stepped back at last
        for log in logs:
            log.append(numbered(log.end, log.end + 20), NOON_NS + hour * HOUR_NS)
        archive(directory, nsqd=fake.address, topic="t", **given)
    return [(log.partition, n, b"%d" % n) for log in logs for n in range(1, 101)]


def test_an_hour_becomes_few_files(fake, tmp_path):
    expected = small_files(fake, tmp_path)
    foreign = tmp_path / "dt=2026-11-23" / "hour=12" / "_SUCCESS"
    foreign.write_bytes(b"")
    assert len(names(tmp_path)) == 10
    told: list[int] = []
    done = compact(tmp_path, on_progress=lambda done: told.append(done.before))
    assert (done.rows, done.before, done.after) == (120, 6, 2) and told[-1] == 6
    stems = [f"t-p{log.partition:04d}-{log.log_id}" for log in fake.logs["t"]]
    spans = {
        12: ("00000000000001-00000000000061", "00000000000081-00000000000101"),
        13: ("00000000000061-00000000000081",),
    }
    assert names(tmp_path) == sorted(
        f"dt=2026-11-23/hour={hour}/{stem}-{span}.parquet" for stem in stems for hour in spans for span in spans[hour]
    ), "a gap in a name would be a lie"
    assert rows(tmp_path) == expected
    assert foreign.exists() and not (tmp_path.parent / f".{tmp_path.name}.compacting").exists()
    assert compact(tmp_path).before == 0
    assert archive(tmp_path, nsqd=fake.address, topic="t").rows == 0, "the names still say how far it is"


def test_what_does_not_belong_together(fake, tmp_path):
    small_files(fake, tmp_path)
    assert compact(tmp_path, rows_per_file=40).after == 2
    assert max(pq.read_metadata(tmp_path / name).num_rows for name in names(tmp_path)) == 40
    for log in fake.logs["t"]:
        log.append(numbered(101, 103), NOON_NS)
    archive(tmp_path, nsqd=fake.address, topic="t", columns="offset,timestamp,body,partition")
    before = names(tmp_path)
    assert compact(tmp_path, rows_per_file=22).before == 0
    assert names(tmp_path) == before, "other columns are other files"
    (tmp_path / "dt=2026-11-23" / "hour=12" / "of-somebody").mkdir()
    assert compact(tmp_path).before == 0


def test_readers_and_an_archive_meanwhile(fake, tmp_path, monkeypatch):
    """Publishing between the making and the exchange, and readers all the time, also with a list from before."""
    expected = small_files(fake, tmp_path)
    log = fake.logs["t"][0]
    over, found, gone = threading.Event(), [], []

    def look() -> None:
        while not over.is_set():
            try:
                found.append(rows(tmp_path))
            except FileNotFoundError as error:
                gone.append(error)

    merge = module._merge

    def slow(run, place):
        count = merge(run, place)
        log.append(numbered(log.end, log.end + 5), NOON_NS)
        archive(tmp_path, nsqd=fake.address, topic="t")
        looks = len(found)
        wait_until(lambda: len(found) > looks, "somebody who reads before the exchange")
        return count

    monkeypatch.setattr(module, "_merge", slow)
    reader = threading.Thread(target=look)
    reader.start()
    try:
        assert compact(tmp_path).after == 2
    finally:
        over.set()
        reader.join(PATIENCE_S)
    more = [(0, n, b"%d" % n) for n in range(101, 111)]
    assert rows(tmp_path) == sorted([*expected, *more])
    wanted = [sorted([*expected, *more[:count]]) for count in (0, 5, 10)]
    assert found and all(some in wanted for some in found)


def test_killed_at_any_step(fake, tmp_path, monkeypatch):
    expected = small_files(fake, tmp_path / "first")
    steps = [0, -1]

    def counted(method):
        def call(*arguments, **more):
            for when in (0, 1):
                if when:
                    result = method(*arguments, **more)
                steps[0] += 1
                if steps[0] == steps[1]:
                    raise Killed
            return result

        return call

    for target, name in ((module, "exchange"), (os, "link"), (os, "fsync"), (shutil, "rmtree")):
        monkeypatch.setattr(target, name, counted(getattr(target, name)))
    monkeypatch.setattr(pq.ParquetWriter, "write_table", counted(pq.ParquetWriter.write_table))
    kills = 0
    while True:
        directory = tmp_path / str(kills)
        steps[1] = -1
        shutil.copytree(tmp_path / "first", directory)
        steps[:] = [0, kills + 1]
        try:
            compact(directory)
            break
        except Killed:
            kills += 1
        steps[1] = -1
        assert rows(directory) == expected, f"killed at {kills}"
        done = compact(directory)
        assert rows(directory) == expected and done.before in (0, 6)
        assert len(names(directory)) == 6
    assert kills > 20


@pytest.mark.parametrize("kind", FORMATS)
def test_tables(fake, tmp_path, kind):
    bodies = [("t", *each) for each in small_files(fake, tmp_path, format=kind)]
    before = transactions(kind, tmp_path)
    done = compact(tmp_path)
    assert (done.before, done.after) == (10, 1)
    assert transactions(kind, tmp_path) == before + 1
    assert read(kind, tmp_path) == bodies
    assert compact(tmp_path).before == 0
    assert archive(tmp_path, nsqd=fake.address, topic="t", format=kind).rows == 0
    if kind == "iceberg":
        with pytest.raises(UsageError, match="--vacuum is for Delta"):
            compact(tmp_path, vacuum=True)
    else:
        assert compact(tmp_path, vacuum=True).deleted == 0, "a week has not passed"
        with pytest.raises(UsageError, match="Delta goes by size"):
            compact(tmp_path, rows_per_file=10)


def test_iceberg_changed_meanwhile(fake, tmp_path, monkeypatch):
    """Files that somebody else has compacted are not brought back."""
    from flintmq.spark.lake.iceberg import IcebergTable

    bodies = [("t", *each) for each in small_files(fake, tmp_path, format="iceberg")]
    write = IcebergTable._write

    def slow(self, table, group, path):
        monkeypatch.undo()
        assert self.compact().after == 1
        return write(self, table, group, path)

    monkeypatch.setattr(IcebergTable, "_write", slow)
    assert compact(tmp_path) == Compacted()
    assert read("iceberg", tmp_path) == bodies
    assert len(list(tmp_path.glob("data/**/compacted-*.parquet"))) == 1


@pytest.mark.parametrize("what", ["empty", "cut", "a page"])
def test_a_damaged_file_is_named(fake, tmp_path, capsys, what):
    directory = tmp_path / "archive"
    small_files(fake, directory)
    path = directory / next(name for name in names(directory) if "p0001" in name and "00021-" in name)
    content = path.read_bytes()
    damaged = {"empty": b"", "cut": content[:-10], "a page": b"PAR1" + b"\xff" * 60 + content[64:]}[what]
    path.write_bytes(damaged)
    before = names(directory)
    assert cli.main(["pipeline", "compact", str(directory)]) == 1
    told = capsys.readouterr().err.strip()
    assert str(path) in told and told.endswith("; restore it, or move it away") and "\n" not in told
    assert names(directory) == before and path.read_bytes() == damaged
    assert not (tmp_path / ".archive.compacting").exists()
    path.write_bytes(content)
    assert compact(directory).before == 6


def test_a_full_disk_leaves_nothing(fake, tmp_path, capsys, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for kind in ("parquet", "iceberg"):
        directory = tmp_path / kind
        small_files(fake, directory, format=kind)
        before = sorted(tmp_path.glob("**/*.parquet"))
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(pq.ParquetWriter, "write_table", full)
            assert cli.main(["pipeline", "compact", str(directory)]) == 1
        told = capsys.readouterr().err.strip()
        assert str(directory) in told and "No space left on device; nothing is lost, run it again" in told, kind
        assert sorted(tmp_path.glob("**/*.parquet")) == before, kind
        assert not (tmp_path / f".{kind}.compacting").exists()
        assert compact(directory).before > 0


def test_wrong_words(fake, tmp_path, capsys, monkeypatch):
    assert cli.main(["pipeline", "compact"]) == 2
    assert "give the directory" in capsys.readouterr().err
    assert cli.main(["pipeline", "compact", str(tmp_path)]) == 1
    assert "there is no archive and no table" in capsys.readouterr().err
    small_files(fake, tmp_path)
    lock = take(tmp_path, ".compact-lock", "")
    with pytest.raises(ArchiveError, match="another compaction works on it"):
        compact(tmp_path)
    os.close(lock)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(module, "_RENAME_EXCHANGE", 1 << 20)
        with pytest.raises(ArchiveError, match="one file system that exchanges directories"):
            compact(tmp_path)
    assert len(names(tmp_path)) == 10
    assert cli.main(["pipeline", "compact", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"6 files became 2, in {tmp_path}\n"
