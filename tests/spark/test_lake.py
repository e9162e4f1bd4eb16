"""Tables of Delta and Iceberg: every reader finds each message once, whenever whoever writes is killed.

Rules of this file: their libraries are imported where they are used, because they take much memory, and every process
that runs tests imports this file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from tests.integration.daemons import PATIENCE_S
from tests.spark.fake_nsqd import FakeLog, FakeNsqd
from tests.spark.processes import environment
from tests.spark.test_archive import HOUR_NS, NOON_NS, Killed
from tests.spark.test_reader import numbered

from flintmq import cli
from flintmq.errors import OptionError
from flintmq.pipeline import files, table_files
from flintmq.pipeline.archive import archive
from flintmq.spark import retry
from flintmq.spark.broker import POOL
from flintmq.spark.lake.table import TABLE, DataFile, Mark, TableError

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from duckdb import DuckDBPyConnection
    from pyiceberg.catalog import Catalog

JOB = Path(__file__).with_name("lake_job.py")
FORMATS = ("delta", "iceberg")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)


@pytest.fixture
def fake() -> Iterator[FakeNsqd]:
    with FakeNsqd() as nsqd:
        yield nsqd
    POOL._idle.clear()


def delta_table(directory: Path) -> DeltaTable:
    from deltalake import DeltaTable

    return DeltaTable(str(directory))


def catalog_of(directory: Path) -> Catalog:
    from flintmq.spark.lake.iceberg import open_catalog

    return open_catalog(directory)


def read(kind: str, directory: Path) -> list[tuple]:
    """Read a table as somebody does who has its own library, and as SQL of DuckDB."""
    if kind == "delta":
        messages = delta_table(directory).to_pyarrow_dataset()
    else:
        messages = catalog_of(directory).load_table(TABLE).scan().to_arrow()
    connection = registered(messages=messages)
    found = connection.execute('SELECT topic, partition, "offset", body FROM messages ORDER BY ALL').fetchall()
    assert connection.execute("SELECT count(*) FROM messages").fetchall() == [(len(found),)]
    return found


def two_days(fake: FakeNsqd, partitions: int = 2) -> list[tuple]:
    """Fill a topic, and return what a table of it has to hold."""
    logs = fake.logs["t"] = [FakeLog(partition=number) for number in range(partitions)]
    for log in logs:
        for hour in (0, 1, 13):
            log.append(numbered(log.end, log.end + 20), NOON_NS + hour * HOUR_NS)
    return [("t", log.partition, n, b"%d" % n) for log in logs for n in range(1, 61)]


@pytest.mark.parametrize("kind", FORMATS)
def test_one_transaction_per_round(fake, tmp_path, kind):
    expected = two_days(fake)
    given: dict[str, Any] = {"nsqd": fake.address, "topic": "t", "channel": "lake", "format": kind}
    done = archive(tmp_path, **given)
    assert (done.rows, done.files) == (120, 4)
    assert read(kind, tmp_path) == expected
    assert [log.channels["lake"] for log in fake.logs["t"]] == [61, 61]
    versions = transactions(kind, tmp_path)
    assert archive(tmp_path, **given).rows == 0
    assert transactions(kind, tmp_path) == versions, "where nothing is new there is no transaction"
    fake.logs["t"][1].append(numbered(61, 64), NOON_NS + 14 * HOUR_NS)
    assert archive(tmp_path, **given).rows == 3
    assert transactions(kind, tmp_path) == versions + 1
    assert read(kind, tmp_path) == sorted([*expected, *(("t", 1, n, b"%d" % n) for n in range(61, 64))])
    assert skipped_by_day(kind, tmp_path) == 2 + 1


def transactions(kind: str, directory: Path) -> int:
    if kind == "delta":
        return delta_table(directory).version()
    return len(catalog_of(directory).load_table(TABLE).snapshots())


def skipped_by_day(kind: str, directory: Path) -> int:
    """Return how many files a reader opens who wants the second day alone."""
    if kind == "delta":
        table = delta_table(directory)
        wanted = (
            registered(actions=table.get_add_actions(flatten=True))
            .execute('SELECT count(*) FROM actions WHERE "partition.dt" = \'2026-11-24\' AND "min.offset" > 40')
            .fetchall()
        )
        return int(wanted[0][0])
    scan = catalog_of(directory).load_table(TABLE).scan(row_filter="timestamp >= '2026-11-24T00:00:00+00:00'")
    return len(list(scan.plan_files()))


def registered(**tables: object) -> DuckDBPyConnection:
    import duckdb

    connection = duckdb.connect()
    for name, table in tables.items():
        connection.register(name, table)
    return connection


@pytest.mark.parametrize("kind", FORMATS)
def test_killed_at_any_step(fake, tmp_path, monkeypatch, kind):
    expected = two_days(fake)
    steps = [0, -1]

    def counted(method):
        def call(*arguments, **more):
            steps[0] += 1
            if steps[0] == steps[1]:
                raise Killed
            result = method(*arguments, **more)
            steps[0] += 1
            if steps[0] == steps[1]:
                raise Killed
            return result

        return call

    monkeypatch.setattr(table_files, "move", counted(files.move))
    monkeypatch.setattr(table_files, "FILES_MAX", 2)
    if kind == "delta":
        from deltalake import DeltaTable

        monkeypatch.setattr(DeltaTable, "create_write_transaction", counted(DeltaTable.create_write_transaction))
    else:
        from pyiceberg.catalog.sql import SqlCatalog

        monkeypatch.setattr(SqlCatalog, "commit_table", counted(SqlCatalog.commit_table))
    given: dict[str, Any] = {"nsqd": fake.address, "topic": "t", "channel": "lake", "format": kind}
    at = kills = 0
    while True:
        at += 1
        directory = tmp_path / str(at)
        for log in fake.logs["t"]:
            log.channels.clear()
        steps[:] = [0, at]
        try:
            archive(directory, **given)
            break
        except Killed:
            kills += 1
        steps[1] = -1
        if kind == "delta" or catalog_of(directory).table_exists(TABLE):
            found = read(kind, directory)
            assert set(found) <= set(expected) and len(set(found)) == len(found), f"killed at {at}"
            for log in fake.logs["t"]:
                durable = {number for _, partition, number, _ in found if partition == log.partition}
                assert set(range(1, log.channels.get("lake", 1))) <= durable
        archive(directory, **given)
        assert read(kind, directory) == expected, f"killed at {at}"
    assert kills >= 12


@pytest.mark.parametrize(
    ("kind", "where"), [("delta", "before"), ("delta", "after"), ("iceberg", "before"), ("iceberg", "after")]
)
def test_kill_9_around_a_transaction(fake, tmp_path, kind, where):
    expected = two_days(fake, 1)
    process = subprocess.Popen(
        [sys.executable, str(JOB), str(tmp_path), fake.address, "t", kind, where],
        stdout=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)
    assert len(read(kind, tmp_path)) == (60 if where == "after" else 0)
    assert list(tmp_path.glob("data/**/*.parquet")), "the files were there"
    assert archive(tmp_path, nsqd=fake.address, topic="t", format=kind).rows == (0 if where == "after" else 60)
    assert read(kind, tmp_path) == expected


@pytest.mark.parametrize("kind", FORMATS)
def test_two_that_write_the_same(fake, tmp_path, monkeypatch, kind):
    """The lock is of one machine; what a table says holds over all of them."""
    expected = two_days(fake, 1)
    given: dict[str, Any] = {"nsqd": fake.address, "topic": "t", "format": kind}
    archive(tmp_path, **given)
    fake.logs["t"][0].append(numbered(61, 71), NOON_NS)
    taken = table_files.TableArchive.commit

    def late(self, *, is_due=True):
        if is_due and self._waiting:
            monkeypatch.undo()
            os.close(self._lock)
            archive(tmp_path, **given)
            self._lock = os.open(tmp_path / ".lock", os.O_RDONLY)
        return taken(self, is_due=is_due)

    monkeypatch.setattr(table_files.TableArchive, "commit", late)
    with pytest.raises(TableError, match="is at 71, not at 61: somebody else writes the same"):
        archive(tmp_path, **given)
    assert read(kind, tmp_path) == [*expected, *(("t", 0, n, b"%d" % n) for n in range(61, 71))]
    paths = {str(path) for path in tmp_path.glob("data/**/*.parquet")}
    assert sum(pq.read_metadata(path).num_rows for path in paths) == 70, "what the loser wrote is gone"


@pytest.mark.parametrize("kind", FORMATS)
def test_others_change_the_table_meanwhile(fake, tmp_path, monkeypatch, kind):
    two_days(fake, 1)
    given: dict[str, Any] = {"nsqd": fake.address, "topic": "t", "format": kind}
    archive(tmp_path, **given)
    fake.logs["t"][0].append(numbered(61, 71), NOON_NS)
    if kind == "delta":
        from deltalake import DeltaTable

        write = DeltaTable.create_write_transaction

        def first(self, *arguments, **more):
            monkeypatch.undo()
            delta_table(tmp_path).optimize.compact()
            return write(self, *arguments, **more)

        monkeypatch.setattr(DeltaTable, "create_write_transaction", first)
    else:
        from pyiceberg.table import Transaction

        from flintmq.spark.lake.iceberg import IcebergTable

        method = Transaction.add_files
        other = next(tmp_path.glob("data/**/*.parquet"))

        def second(self, *arguments, **more):
            monkeypatch.undo()
            path = other.with_name("other.parquet")
            pq.write_table(pq.ParquetFile(other).read().slice(0, 1), path)
            table = IcebergTable(tmp_path, catalog_of(tmp_path), TABLE)
            table.add([DataFile(str(path.relative_to(tmp_path)), {})], {"somebody": Mark(None, 1)})
            return method(self, *arguments, **more)

        monkeypatch.setattr(Transaction, "add_files", second)
    assert archive(tmp_path, **given).rows == 10
    more = [1] if kind == "iceberg" else []
    assert [n for _, _, n, _ in read(kind, tmp_path)] == sorted([*more, *range(1, 71)])


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_full_disk_at_a_transaction(fake, tmp_path, monkeypatch, capsys, when):
    """What Delta's library says of it is an error of the system; it may have written the transaction all the same."""
    from deltalake import DeltaTable

    expected = two_days(fake, 1)
    write = DeltaTable.create_write_transaction

    def full(self, *arguments, **more):
        if when == "after":
            write(self, *arguments, **more)
        raise OSError(
            "Generic LocalFileSystem error\n   \x1b[31m↳\x1b[0m Unable to copy\n    \x1b[31m↳\x1b[0m No space left\n"
        )

    flags = [f"--to={tmp_path}", f"--nsqd={fake.address}", "--topic=t", "--format=delta"]
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(DeltaTable, "create_write_transaction", full)
        assert cli.main(["pipeline", "archive", *flags]) == (1 if when == "before" else 0)
    told = capsys.readouterr().err
    if when == "before":
        assert told.endswith(
            f"table {tmp_path}: it cannot be written: Generic LocalFileSystem error: Unable to copy: No space left\n"
        )
        assert not list(tmp_path.glob("data/**/*.parquet"))
    assert archive(tmp_path, nsqd=fake.address, topic="t", format="delta").rows == (60 if when == "before" else 0)
    assert read("delta", tmp_path) == expected


def test_wrong_tables(fake, tmp_path, capsys):
    two_days(fake, 1)
    given: dict[str, Any] = {"nsqd": fake.address, "topic": "t"}
    for kind in FORMATS:
        archive(tmp_path / kind, format=kind, columns="offset,timestamp,body", **given)
        with pytest.raises(TableError, match="has no column"):
            archive(tmp_path / kind, format=kind, columns="offset,timestamp,topic", **given)
        with pytest.raises(TableError, match=f"has the format {kind}, not parquet"):
            archive(tmp_path / kind, **given)
    archive(tmp_path / "parquet", **given)
    with pytest.raises(TableError, match="has the format parquet, not delta"):
        archive(tmp_path / "parquet", format="delta", **given)
    with pytest.raises(OptionError, match="say parquet, delta, iceberg"):
        archive(tmp_path / "x", format="orc", **given)
    with pytest.raises(TableError, match="PyIceberg cannot open it"):
        archive(tmp_path / "x", format="iceberg", catalog="nowhere", **given)
    assert cli.main(["pipeline", "archive", f"--to={tmp_path}", "--format=delta", "--table=a.b"]) == 2
    assert "--table and --catalog are of --format=iceberg" in capsys.readouterr().err


@pytest.mark.parametrize("kind", FORMATS)
def test_stopping_leaves_what_was_read_in_the_table(fake, tmp_path, kind):
    fake.topic("t", numbered(1, 501))
    stop = threading.Event()
    given: dict[str, Any] = {"nsqd": fake.address, "topic": "t", "batchRows": "100", "format": kind}
    done = archive(tmp_path, follow=True, on_progress=lambda done: stop.set(), stop=stop, **given)
    assert 0 < done.rows < 500
    assert [n for _, _, n, _ in read(kind, tmp_path)] == list(range(1, done.rows + 1))
    archive(tmp_path, **given)
    assert [n for _, _, n, _ in read(kind, tmp_path)] == list(range(1, 501))
