"""Tables of Delta and Iceberg: every reader finds each message once, whenever whoever writes is killed.

Rules of this file: their libraries are imported where they are used, because they take much memory, and every process
that runs tests imports this file.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
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
from flintmq.pipeline.archive import COLUMNS, LogGone, archive
from flintmq.spark import retry
from flintmq.spark.broker import POOL
from flintmq.spark.lake.table import TABLE, DataFile, Mark, Table, TableError, one_line

if TYPE_CHECKING:
    import pyarrow as pa
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
def test_the_table_itself_knows_its_logs(fake, tmp_path, kind):
    """Also when others have made checkpoints, deleted what these make needless, and set marks of their own."""
    given: dict[str, Any] = {"nsqd": fake.address, "topics": "a,b,c", "format": kind}
    logs = {}
    for topic in ("a", "b", "c"):
        logs[topic] = fake.topic(topic, numbered(1, 11))
        if topic != "c":
            archive(tmp_path, **given | {"topics": ",".join(logs)})
    archive(tmp_path, format=kind, nsqd=fake.address, topics="a,b")
    told = table(kind, tmp_path)
    told.add([], {"somebody": Mark(None, 7)})
    if kind == "delta":
        delta_table(tmp_path).create_checkpoint()
        log = tmp_path / "_delta_log"
        for path in sorted(log.glob("*.json"))[:-1]:
            path.unlink()
    archive(tmp_path, **given)
    logs["b"].append(numbered(11, 16))
    archive(tmp_path, **given)
    expected = {f"{topic}/0/{log.log_id}": log.end for topic, log in logs.items()} | {"somebody": 7}
    assert told.all_marks() == expected, "of the checkpoint, and of what came after it"
    if kind == "delta":
        last = (log / "_last_checkpoint").read_text()
        for hint in ("{}", "not JSON", '{"version": 0}'):
            (log / "_last_checkpoint").write_text(hint)
            assert told.all_marks() == expected, "without it all that is there is read"
        (log / "_last_checkpoint").write_text(last)
    del fake.logs["a"], fake.logs["c"]
    for _ in range(2):
        with pytest.raises(LogGone, match=r"topic 'a'.* up to 11"):
            archive(tmp_path, **given)
    archive(tmp_path, failOnDataLoss="false", **given)
    assert archive(tmp_path, **given).rows == 0


@pytest.mark.parametrize("kind", FORMATS)
def test_a_table_that_is_taken_back_to_an_earlier_version(fake, tmp_path, kind, caplog):
    """The marks stay where they were, so what the table lacks is told, and archived again when that is wanted."""
    logs = [fake.topic("a", numbered(1, 11))]
    given: dict[str, Any] = {"nsqd": fake.address, "topics": "a,b", "format": kind}
    archive(tmp_path, **given | {"topics": "a"})
    before = [version(kind, tmp_path)]
    logs.append(fake.topic("b", numbered(1, 6)))
    archive(tmp_path, **given)
    before.append(version(kind, tmp_path))
    logs[0].append(numbered(11, 21))
    archive(tmp_path, **given)
    changed_by_others(kind, tmp_path)
    for back, lost in ((before[1], {"a": 11}), (before[0], {"a": 11, "b": 0})):
        take_back(kind, tmp_path, back)
        logs[0].append(numbered(logs[0].end, logs[0].end + 5))
        is_there = read(kind, tmp_path)
        for _ in range(2):
            with pytest.raises(
                TableError, match=r"it was taken back to an earlier version: of a/0/.* the rows 11 to"
            ) as told:
                archive(tmp_path, **given)
            assert ("; 1 more like it" in str(told.value)) == (len(lost) > 1)
        assert read(kind, tmp_path) == is_there
        archive(tmp_path, failOnDataLoss="false", **given)
        ends = {topic: min(end for _, end in found) for topic, found in told_ends(caplog).items()}
        assert ends == {topic: max(end, 1) for topic, end in lost.items()}
        caplog.clear()
        assert archive(tmp_path, **given).rows == 0, "it was told once"
        expected = [("a", 0, n, b"%d" % n) for n in range(1, logs[0].end)] + [
            ("b", 0, n, b"%d" % n) for n in range(1, 6)
        ]
        assert read(kind, tmp_path) == expected
    del fake.logs["b"]
    with pytest.raises(LogGone, match=r"topic 'b'.* up to 6"):
        archive(tmp_path, **given)


def told_ends(caplog: pytest.LogCaptureFixture) -> dict[str, list[tuple[int, int]]]:
    """Return by topic from where to where rows were told to be missing, and where it goes on."""
    found: dict[str, list[tuple[int, int]]] = {}
    for record in caplog.records:
        if "was taken back" in record.message:
            words = re.search(r"of (\w)/0/\w+ the rows (\d+) to .*; going on at (\d+)", record.message)
            assert words is not None, record.message
            found.setdefault(words[1], []).append((int(words[2]), int(words[3])))
    return found


@pytest.mark.parametrize("kind", FORMATS)
def test_a_table_that_is_taken_back_while_it_is_written_to(fake, tmp_path, kind):
    log = fake.topic("t", numbered(1, 11))
    given: dict[str, Any] = {"nsqd": fake.address, "topic": "t", "format": kind}
    archive(tmp_path, **given)
    first = version(kind, tmp_path)
    log.append(numbered(11, 21))
    archive(tmp_path, **given)
    writing, name = table(kind, tmp_path), f"t/0/{log.log_id}"
    writing.add([], {name: Mark(21, 22)})
    take_back(kind, tmp_path, first)
    for _ in range(2):
        with pytest.raises(TableError, match=r"the rows 11 to 22 .* One run with failOnDataLoss=false") as told:
            writing.add([], {name: Mark(22, 30)})
        assert told.value.is_unchanged
    assert writing.all_marks() == {name: 22}
    writing.settle({name: Mark(22, 11)})
    writing.add([], {name: Mark(11, 30)})
    assert writing.all_marks() == {name: 30}


@pytest.mark.parametrize("kind", FORMATS)
def test_a_table_that_is_taken_back_and_lacks_nothing(fake, tmp_path, kind):
    """What somebody else had changed is undone, or a history is gone that would tell."""
    log = fake.topic("t", numbered(1, 11))
    given: dict[str, Any] = {"nsqd": fake.address, "topic": "t", "format": kind}
    archive(tmp_path, **given)
    first = version(kind, tmp_path)
    log.append(numbered(11, 21))
    archive(tmp_path, **given)
    second = version(kind, tmp_path)
    changed_by_others(kind, tmp_path)
    assert read(kind, tmp_path) == []
    take_back(kind, tmp_path, second)
    log.append(numbered(21, 31))
    assert archive(tmp_path, **given).rows == 10
    assert read(kind, tmp_path) == [("t", 0, n, b"%d" % n) for n in range(1, 31)]
    take_back(kind, tmp_path, first)
    forget_history(kind, tmp_path)
    told = table(kind, tmp_path)
    assert told.taken_back(told.all_marks()) == ({} if kind == "delta" else {f"t/0/{log.log_id}": 11})


def test_a_delta_table_that_is_taken_back_to_a_time_or_without_a_history(fake, tmp_path, caplog):
    """Where rows end that cannot be told apart is not guessed: nothing is doubled, and it is said."""
    log = fake.topic("t", numbered(1, 11))
    given: dict[str, Any] = {"nsqd": fake.address, "topic": "t", "format": "delta"}
    archive(tmp_path, **given)
    log.append(numbered(11, 21))
    archive(tmp_path, **given)
    take_back("delta", tmp_path, 1)
    by_a_time(tmp_path)
    with pytest.raises(TableError, match=r"below 21 are not in it any more, and from where on .* goes on behind that"):
        archive(tmp_path, **given)
    log.append(numbered(21, 26))
    assert archive(tmp_path, failOnDataLoss="false", **given).rows == 5
    assert "from where on its history does not say; going on at 21" in caplog.text
    assert archive(tmp_path, **given).rows == 0
    assert [n for _, _, n, _ in read("delta", tmp_path)] == [*range(1, 11), *range(21, 26)]


@pytest.mark.parametrize("change", ["delete", "compact", "set"])
def test_a_delta_table_whose_owner_undoes_a_change_by_a_time(fake, tmp_path, change):
    """Files that the archive added last are there again, or still: nothing of it was taken back."""
    log = fake.topic("t", numbered(1, 11))
    given: dict[str, Any] = {"nsqd": fake.address, "topic": "t", "format": "delta"}
    archive(tmp_path, **given)
    log.append(numbered(11, 21))
    archive(tmp_path, **given)
    before = version("delta", tmp_path)
    if change == "delete":
        delta_table(tmp_path).delete('"offset" > 15')
    elif change == "compact":
        delta_table(tmp_path).optimize.compact()
    else:
        delta_table(tmp_path).alter.set_table_properties({"delta.logRetentionDuration": "interval 40 days"})
    take_back("delta", tmp_path, before)
    by_a_time(tmp_path)
    log.append(numbered(21, 26))
    assert archive(tmp_path, **given).rows == 5
    assert [n for _, _, n, _ in read("delta", tmp_path)] == list(range(1, 26))


def by_a_time(directory: Path) -> None:
    """Make the last commit of a Delta table one that restored what there was at a time."""
    commit = sorted((directory / "_delta_log").glob("*.json"))[-1]
    text, count = re.subn(r'\{"version":"\d+"\}', '{"datetime":"1796056487277"}', commit.read_text())
    assert count == 1
    commit.write_text(text)


@pytest.mark.parametrize("how", ["tag", "branch", "nothing"])
def test_an_iceberg_table_whose_owner_keeps_an_old_snapshot_and_expires_others(fake, tmp_path, how):
    """The chain of parents ends where one has expired, which is not where the table begins: nothing was taken back."""
    logs = {topic: fake.topic(topic, numbered(1, 11)) for topic in "abc"}
    given: dict[str, Any] = {"nsqd": fake.address, "topics": "a,b,c", "format": "iceberg"}
    archive(tmp_path, **given)
    kept = version("iceberg", tmp_path)
    changes = catalog_of(tmp_path).load_table(TABLE).manage_snapshots()
    if how == "tag":
        changes.create_tag(kept, "audit").commit()
    elif how == "branch":
        changes.create_branch(kept, "dev").commit()
    writing, name = table("iceberg", tmp_path), f"a/0/{logs['a'].log_id}"
    for topic in "bc":
        catalog_of(tmp_path).load_table(TABLE).delete(f"topic = '{topic}'")
    heads = {each.snapshot_id for each in catalog_of(tmp_path).load_table(TABLE).refs().values()}
    expire(tmp_path, {each.snapshot_id for each in catalog_of(tmp_path).load_table(TABLE).snapshots()} - heads)
    marks = writing.all_marks()
    assert writing.taken_back(marks) == {}
    writing.add([], {name: Mark(11, 12)})  # as an archive with --follow does, which asks each time
    writing.settle({name: Mark(12, 11)})
    logs["a"].append(numbered(11, 14))
    assert archive(tmp_path, **given).rows == 3
    assert archive(tmp_path, failOnDataLoss="false", **given).rows == 0
    assert read("iceberg", tmp_path) == [("a", 0, n, b"%d" % n) for n in range(1, 14)]


def test_an_iceberg_table_that_is_taken_back_and_whose_older_snapshots_expired(fake, tmp_path, caplog):
    """That it was taken back is known, from where on is not: no row that is there is archived again."""
    log = fake.topic("t", numbered(1, 11))
    fake.topic("u", numbered(1, 6))
    given: dict[str, Any] = {"nsqd": fake.address, "topics": "t,u", "format": "iceberg"}
    archive(tmp_path, **given)
    catalog_of(tmp_path).load_table(TABLE).delete("topic = 'u'")
    now = version("iceberg", tmp_path)
    older = {each.snapshot_id for each in catalog_of(tmp_path).load_table(TABLE).snapshots()} - {now}
    log.append(numbered(11, 21))
    archive(tmp_path, **given)
    take_back("iceberg", tmp_path, now)
    expire(tmp_path, older)
    with pytest.raises(
        TableError, match=r"rows of t/0/.* below 21 are not in it any more, and from where on .* goes on behind that"
    ):
        archive(tmp_path, **given)
    log.append(numbered(21, 26))
    assert archive(tmp_path, failOnDataLoss="false", **given).rows == 5
    assert "from where on its history does not say; going on at 21" in caplog.text
    assert archive(tmp_path, **given).rows == 0
    assert [n for _, _, n, _ in read("iceberg", tmp_path)] == [*range(1, 11), *range(21, 26)]


@pytest.mark.parametrize("is_source_gone", [False, True])
def test_an_iceberg_table_that_is_taken_back_and_gets_the_archives_files_again(fake, tmp_path, is_source_gone):
    """As Spark's ``cherrypick_snapshot`` adds them, without the marks."""
    log = fake.topic("t", numbered(1, 11))
    given: dict[str, Any] = {"nsqd": fake.address, "topic": "t", "format": "iceberg"}
    archive(tmp_path, **given)
    first = version("iceberg", tmp_path)
    changed_by_others("iceberg", tmp_path)
    log.append(numbered(11, 21))
    archive(tmp_path, **given)
    source = version("iceberg", tmp_path)
    paths = [task.file.file_path for task in catalog_of(tmp_path).load_table(TABLE).scan().plan_files()]
    take_back("iceberg", tmp_path, first)
    catalog_of(tmp_path).load_table(TABLE).add_files(
        paths, snapshot_properties={"source-snapshot-id": str(source)}, check_duplicate_files=False
    )
    if is_source_gone:
        expire(tmp_path, {source})
    log.append(numbered(21, 26))
    assert archive(tmp_path, **given).rows == 5
    assert [n for _, _, n, _ in read("iceberg", tmp_path)] == list(range(1, 26))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_table_that_is_taken_back_and_then_forward(fake, tmp_path, kind):
    """Rows that were given up come back: they are not archived beside themselves."""
    log = fake.topic("t", numbered(1, 11))
    given: dict[str, Any] = {"nsqd": fake.address, "topic": "t", "format": kind}
    archive(tmp_path, **given)
    first = version(kind, tmp_path)
    log.append(numbered(11, 21))
    archive(tmp_path, **given)
    second = version(kind, tmp_path)
    take_back(kind, tmp_path, first)
    table(kind, tmp_path).settle({f"t/0/{log.log_id}": Mark(21, 11)})
    if kind == "delta":
        take_back(kind, tmp_path, second)
    else:
        catalog_of(tmp_path).load_table(TABLE).manage_snapshots().set_current_snapshot(second).commit()
    with pytest.raises(TableError, match=r"the rows 11 to 21 \(exclusive\) are in it again.* goes on behind that"):
        archive(tmp_path, **given)
    log.append(numbered(21, 26))
    assert archive(tmp_path, failOnDataLoss="false", **given).rows == 5
    assert [n for _, _, n, _ in read(kind, tmp_path)] == list(range(1, 26))


def test_a_delta_table_whose_owner_cleans_up_is_not_taken_back(fake, tmp_path):
    """A RESTORE of what was compacted, VACUUM, and commits that a checkpoint replaces leave all rows as they are."""
    log = fake.topic("t", numbered(1, 11))
    given: dict[str, Any] = {"nsqd": fake.address, "topic": "t", "format": "delta"}
    for upkeep in range(4):
        archive(tmp_path, **given)
        if upkeep == 1:
            before = version("delta", tmp_path)
            delta_table(tmp_path).optimize.compact()
            take_back("delta", tmp_path, before)
            delta_table(tmp_path).optimize.compact()
            delta_table(tmp_path).vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
        elif upkeep == 2:
            delta_table(tmp_path).create_checkpoint()
            for path in sorted((tmp_path / "_delta_log").glob("*.json"))[:-1]:
                path.unlink()
        log.append(numbered(log.end, log.end + 5))
        told = table("delta", tmp_path)
        assert told.taken_back(told.all_marks()) == {}
    assert archive(tmp_path, failOnDataLoss="false", **given).rows == 5
    assert [n for _, _, n, _ in read("delta", tmp_path)] == list(range(1, log.end))


def version(kind: str, directory: Path) -> int:
    """Return what :func:`take_back` takes a table back to."""
    if kind == "delta":
        return delta_table(directory).version()
    found = catalog_of(directory).load_table(TABLE).current_snapshot()
    assert found is not None
    return found.snapshot_id


def take_back(kind: str, directory: Path, to: int) -> None:
    """Take a table back to a version, as its owner does."""
    if kind == "delta":
        delta_table(directory).restore(to)
    else:
        catalog_of(directory).load_table(TABLE).manage_snapshots().rollback_to_snapshot(to).commit()


def changed_by_others(kind: str, directory: Path) -> None:
    """Delete all rows, with a commit that says nothing of marks."""
    if kind == "delta":
        delta_table(directory).delete()
    else:
        catalog_of(directory).load_table(TABLE).delete()


def forget_history(kind: str, directory: Path) -> None:
    """Remove what tells of versions before the current one, as the formats' own upkeep does."""
    if kind == "delta":
        delta_table(directory).create_checkpoint()
        for path in sorted((directory / "_delta_log").glob("*.json")):
            path.unlink()
        return
    found = catalog_of(directory).load_table(TABLE)
    expire(directory, {each.snapshot_id for each in found.snapshots()} - {found.metadata.current_snapshot_id})


def expire(directory: Path, snapshots: set[int]) -> None:
    """Remove snapshots of an Iceberg table, as its owner's upkeep does."""
    catalog_of(directory).load_table(TABLE).maintenance.expire_snapshots().by_ids(sorted(snapshots)).commit()


def table(kind: str, directory: Path) -> Table:
    if kind == "delta":
        from flintmq.spark.lake.delta import DeltaLakeTable

        return DeltaLakeTable.existing(directory)
    from flintmq.spark.lake.iceberg import IcebergTable

    return IcebergTable(directory, catalog_of(directory), TABLE)


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


def others_table(directory: Path, *more: Any, types: dict[str, Any] | None = None, **given: Any) -> DeltaTable:
    """Make a Delta table as somebody else has made it, with the columns of an archive and more."""
    import pyarrow as pa
    from deltalake import DeltaTable

    fields = [
        field.with_type((types or {}).get(field.name, field.type))
        for field in [*columns(), pa.field("dt", pa.date32())]
    ]
    return DeltaTable.create(str(directory), pa.schema([*fields, *more]), partition_by=["dt"], **given)


def columns() -> pa.Schema:
    from flintmq.spark.schema import arrow_schema

    return arrow_schema(COLUMNS.split(","))


MAPPED = {"delta.columnMapping.mode": "name", "delta.minReaderVersion": "2", "delta.minWriterVersion": "5"}


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("columnMapping", r"delta.columnMapping.mode is name\)"),
        ("not null", "the column mine, which is not written and must not be null"),
        ("constraint", "the constraint delta.constraints.few"),
        ("invariant", r"an invariant for mine \(delta.invariants\)"),
        ("generated", r"an expression that it is generated by for mine \(delta.generationExpression\)"),
        ("feature", "the feature rowTracking"),
    ],
)
def test_a_delta_table_that_asks_more_of_its_rows_is_left_as_it_is(fake, tmp_path, what, said):
    import pyarrow as pa

    two_days(fake, 1)
    mine = pa.field("mine", pa.int32())
    rule = {"invariant": "delta.invariants", "generated": "delta.generationExpression"}.get(what)
    if what == "columnMapping":
        others_table(tmp_path, configuration=MAPPED)
    elif what == "not null":
        others_table(tmp_path, mine.with_nullable(False))
    elif what == "constraint":
        others_table(tmp_path).alter.add_constraint({"few": '"offset" < 10'})
    elif rule:
        others_table(tmp_path, mine.with_metadata({rule: json.dumps({"expression": {"expression": "mine > 0"}})}))
    else:
        others_table(tmp_path)
        ask_for(tmp_path, "rowTracking")
    there = sorted(tmp_path.rglob("*.json"))
    with pytest.raises(TableError, match=f"{said}, which files that are added as they are may break: take that away"):
        archive(tmp_path, nsqd=fake.address, topic="t", format="delta")
    assert sorted(tmp_path.rglob("*.json")) == there and not list(tmp_path.rglob("*.parquet"))
    assert delta_table(tmp_path).version() == (1 if what in ("constraint", "feature") else 0)


def ask_for(directory: Path, feature: str) -> None:
    """Add a version to a table in which writers have to know a feature, as its own engine does."""
    path = directory / "_delta_log" / "00000000000000000001.json"
    protocol = {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": ["appendOnly", "invariants", feature]}
    path.write_text(json.dumps({"protocol": protocol}) + "\n")


def test_a_rule_that_a_delta_table_gets_meanwhile(fake, tmp_path, monkeypatch):
    two_days(fake, 1)
    given: dict[str, Any] = {"nsqd": fake.address, "topic": "t", "format": "delta"}
    archive(tmp_path, **given)
    fake.logs["t"][0].append(numbered(61, 71), NOON_NS)
    taken = table_files.TableArchive.commit

    def late(self, *, is_due=True):
        if is_due and self._waiting:
            monkeypatch.undo()
            delta_table(tmp_path).alter.add_constraint({"few": '"offset" < 65'})
        return taken(self, is_due=is_due)

    monkeypatch.setattr(table_files.TableArchive, "commit", late)
    with pytest.raises(TableError, match=r"the constraint delta\.constraints\.few"):
        archive(tmp_path, **given)
    paths = list(tmp_path.glob("data/**/*.parquet"))
    assert sum(pq.read_metadata(path).num_rows for path in paths) == 60 == len(read("delta", tmp_path))


def test_delta_tables_that_take_what_an_archive_writes(fake, tmp_path):
    """What asks nothing of whoever adds files is no reason to refuse a table."""
    import pyarrow as pa

    expected = two_days(fake, 1)
    for number, setting in enumerate(("delta.appendOnly", "delta.enableChangeDataFeed", "delta.enableDeletionVectors")):
        others_table(tmp_path / str(number), pa.field("mine", pa.int32()), configuration={setting: "true"})
        assert archive(tmp_path / str(number), nsqd=fake.address, topic="t", format="delta").rows == 60
        assert delta_table(tmp_path / str(number)).count() == len(expected)


def test_a_delta_table_whose_columns_have_other_types(fake, tmp_path):
    import pyarrow as pa

    two_days(fake, 1)
    given: dict[str, Any] = {"nsqd": fake.address, "topic": "t", "format": "delta"}
    others_table(tmp_path / "day", types={"dt": pa.string()})
    with pytest.raises(TableError, match=r"it has dt as string; it has to be date$"):
        archive(tmp_path / "day", **given)
    others_table(tmp_path / "body", types={"body": pa.string()})
    with pytest.raises(TableError, match=r"it has body as string; it has to be binary, or be left out of the columns$"):
        archive(tmp_path / "body", **given)


def test_a_delta_table_that_is_damaged_meanwhile(fake, tmp_path):
    from flintmq.spark.lake.delta import DeltaLakeTable

    two_days(fake, 1)
    archive(tmp_path, nsqd=fake.address, topic="t", format="delta")
    table = DeltaLakeTable(tmp_path, columns(), "dt")
    (tmp_path / "_delta_log" / "00000000000000000002.json").write_text('{"protocol":')
    with pytest.raises(TableError, match="it cannot be read: "):
        table.marks(["t"])
    (tmp_path / "_delta_log" / "00000000000000000002.json").write_text('{"txn":')
    with pytest.raises(TableError, match="its log cannot be read: "):
        table.all_marks()


def test_old_commits_of_a_delta_table_are_deleted_meanwhile(fake, tmp_path, monkeypatch):
    from flintmq.spark.lake import delta

    two_days(fake, 1)
    archive(tmp_path, nsqd=fake.address, topic="t", format="delta")
    told = table("delta", tmp_path)
    expected = told.all_marks()
    listed = os.listdir
    looks = []

    def list_and_more(path: Path) -> list[str]:
        looks.append(path)
        return listed(path) + ["00000000000000000000.checkpoint.parquet"] * (len(looks) < gone_at)

    monkeypatch.setattr(os, "listdir", list_and_more)
    gone_at = delta.LOOKS_MAX
    assert told.all_marks() == expected
    looks.clear()
    gone_at = delta.LOOKS_MAX + 1
    with pytest.raises(TableError, match="others change its log all the time"):
        told.all_marks()


@pytest.mark.parametrize(("kind", "name"), [("delta", "p%20q"), ("iceberg", "p%20q"), ("iceberg", "p%q")])
def test_a_directory_whose_name_its_library_takes_apart(fake, tmp_path, kind, name):
    two_days(fake, 1)
    with pytest.raises(TableError, match=r"cannot have .*% .*name of a directory"):
        archive(tmp_path / name, nsqd=fake.address, topic="t", format=kind)
    assert not list((tmp_path / name).iterdir()), "nothing was begun in it"


@pytest.mark.parametrize("kind", FORMATS)
def test_an_ephemeral_topic_in_a_table(fake, tmp_path, kind):
    fake.topic("t#ephemeral", numbered(1, 11))
    given: dict[str, Any] = {"nsqd": fake.address, "topic": "t#ephemeral", "format": kind}
    assert archive(tmp_path, **given).rows == 10
    fake.topic("t#ephemeral", numbered(11, 21))
    assert archive(tmp_path, **given).rows == 10
    assert read(kind, tmp_path) == [("t#ephemeral", 0, n, b"%d" % n) for n in range(1, 21)]


def test_a_catalog_that_cannot_be_used(fake, tmp_path, capsys, monkeypatch):
    """Each is a line; what SQLAlchemy adds to it, and PyIceberg's boxes, are not."""
    from sqlalchemy import create_engine
    from sqlalchemy.engine import Engine

    from flintmq.spark.lake import iceberg

    two_days(fake, 1)
    flags = [f"--nsqd={fake.address}", "--topic=t", "--format=iceberg"]
    (tmp_path / "no").mkdir()
    (tmp_path / "no" / "catalog.db").write_bytes(b"this is no database, and long enough to be one" * 100)
    assert cli.main(["pipeline", "archive", *flags, f"--to={tmp_path}/no"]) == 1
    said = capsys.readouterr().err
    assert (
        said.endswith("its catalog cannot be opened (catalog.db): file is not a database\n") and said.count("\n") == 1
    )
    archive(tmp_path / "table", nsqd=fake.address, topic="t", format="iceberg")
    fake.logs["t"][0].append(numbered(61, 71), NOON_NS)
    made: list[Engine] = []

    def impatient(directory: Path, name: str = "") -> Any:
        catalog: Any = open_catalog(directory, name)
        made.append(create_engine(f"sqlite:///{directory}/catalog.db", connect_args={"timeout": 0}))
        catalog.engine = made[-1]
        return catalog

    open_catalog = iceberg.open_catalog
    monkeypatch.setattr(iceberg, "open_catalog", impatient)
    lock = sqlite3.connect(tmp_path / "table" / "catalog.db")
    try:
        for statement, fails in (
            ("BEGIN IMMEDIATE", "it cannot be written"),
            ("BEGIN EXCLUSIVE", "opened (catalog.db)"),
        ):
            lock.execute(statement)
            assert cli.main(["pipeline", "archive", *flags, f"--to={tmp_path}/table"]) == 1
            lock.rollback()
            said = capsys.readouterr().err
            assert said.endswith(f"{fails}: database is locked\n") and said.count("\n") == 1
    finally:
        lock.close()
    table = iceberg.IcebergTable(tmp_path / "table", impatient(tmp_path / "table"), TABLE)
    (tmp_path / "table" / "catalog.db").write_bytes(b"this is no database" * 1000)
    made[-1].dispose()
    with pytest.raises(TableError, match=r"its catalog cannot be read: (file is not a database|.* malformed)$"):
        table.marks(["t"])


@pytest.mark.parametrize(
    ("column", "kind", "said"),
    [
        ("body", "StringType", "body is string, and binary would be written"),
        ("offset", "IntegerType", "offset is int, and long would be written"),
        ("timestamp", "TimestampType", "timestamp is timestamp, and timestamptz would be written"),
        ("mine", "IntegerType", "mine is required"),
        ("partition", "LongType", ""),
    ],
)
def test_an_iceberg_table_of_somebody_else(fake, tmp_path, capsys, column, kind, said):
    from pyiceberg import types
    from pyiceberg.schema import Schema

    expected = two_days(fake, 1)
    have: dict[str, Any] = {
        "topic": types.StringType(), "partition": types.IntegerType(), "log_id": types.StringType(),
        "offset": types.LongType(), "timestamp": types.TimestamptzType(), "trace_id": types.LongType(),
        "body": types.BinaryType(), column: getattr(types, kind)(),
    }  # fmt: skip
    fields = [
        types.NestedField(number, name, each, required=name == "mine")
        for number, (name, each) in enumerate(have.items(), 1)
    ]
    catalog = catalog_of(tmp_path)
    catalog.create_namespace("nsq")
    catalog.create_table(TABLE, Schema(*fields), location=f"file://{tmp_path}")
    words = ["pipeline", "archive", f"--to={tmp_path}", f"--nsqd={fake.address}", "--topic=t", "--format=iceberg"]
    assert cli.main(words) == (1 if said else 0)
    if said:
        told = capsys.readouterr().err
        assert f"its columns do not fit: {said}; take another directory\n" in told and told.count("\n") == 1
        assert not list(tmp_path.glob("data/**/*.parquet"))
    else:
        assert read("iceberg", tmp_path) == expected


def test_headers_in_an_iceberg_table(fake, tmp_path):
    two_days(fake, 1)
    given: dict[str, Any] = {"nsqd": fake.address, "topic": "t", "format": "iceberg"}
    archive(tmp_path, columns=f"{COLUMNS},headers", **given)
    assert archive(tmp_path, columns=f"{COLUMNS},headers", **given).rows == 0, "its own columns fit"


def test_words_of_a_library_are_one_line():
    drawn = "Mismatch in fields:\n\u250f\u2501\u2501\u2513\n\u2503 a \u2503\n\u2517\u2501\u2501\u251b"
    assert one_line(ValueError(drawn)) == "Mismatch in fields: a"
