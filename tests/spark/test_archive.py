"""The archive: Parquet files in which everybody finds each message once, whenever it is killed."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.integration.daemons import PATIENCE_S
from tests.spark.fake_lookupd import FakeLookupd
from tests.spark.fake_nsqd import FakeLog, FakeNsqd
from tests.spark.processes import NsqdProcess, environment
from tests.spark.test_reader import numbered

from flintmq import cli
from flintmq.errors import NsqdError, OptionError, UsageError
from flintmq.pipeline import archive as module
from flintmq.pipeline import files, topics
from flintmq.pipeline.archive import KINDS, Archived, LogGone, archive
from flintmq.pipeline.file_sinks import SinkError
from flintmq.pipeline.files import ArchiveError, FileName
from flintmq.pipeline.runner import StoppedEarly
from flintmq.spark import retry, stopping
from flintmq.spark.broker import POOL
from flintmq.spark.errors import DataLost
from flintmq.spark.offsets import PartitionKey
from flintmq.spark.survey import Survey, Surveyor

HOUR_NS = 3_600_000_000_000
NOON_NS = 1_795_435_200_000_000_000  # 2026-11-23T12:00:00Z


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)


@pytest.fixture
def fake() -> Iterator[FakeNsqd]:
    with FakeNsqd() as nsqd:
        yield nsqd
    POOL._idle.clear()


def names(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.glob("**/*.parquet"))


def rows(directory: Path) -> list[tuple]:
    """What a reader finds that knows nothing of us: every Parquet file below the directory."""
    found = [pq.ParquetFile(path).read().to_pylist() for path in directory.glob("**/*.parquet")]
    return sorted((row["partition"], row["offset"], row["body"]) for some in found for row in some)


def test_files_by_hour_and_a_second_run(fake, tmp_path):
    log = fake.topic("flights")
    for hour, count in ((0, 30), (0, 20), (1, 10), (13, 5)):
        log.append(numbered(log.end, log.end + count), NOON_NS + hour * HOUR_NS)
    done = archive(tmp_path, nsqd=fake.address, topic="flights", rows_per_file=40)
    name = f"flights-p0000-{log.log_id}"
    assert names(tmp_path) == [
        f"dt=2026-11-23/hour=12/{name}-00000000000001-00000000000041.parquet",
        f"dt=2026-11-23/hour=12/{name}-00000000000041-00000000000051.parquet",
        f"dt=2026-11-23/hour=13/{name}-00000000000051-00000000000061.parquet",
        f"dt=2026-11-24/hour=01/{name}-00000000000061-00000000000066.parquet",
    ]
    assert (done.rows, done.files, done.lag) == (65, 4, 0)
    assert [each[1:] for each in rows(tmp_path)] == [(n, b"%d" % n) for n in range(1, 66)]
    table = pq.ParquetFile(tmp_path / names(tmp_path)[0]).read()
    assert table.schema.names == ["topic", "partition", "log_id", "offset", "timestamp", "trace_id", "body"]

    assert archive(tmp_path, nsqd=fake.address, topic="flights").rows == 0
    log.append(numbered(log.end, log.end + 3), NOON_NS + 13 * HOUR_NS)
    assert archive(tmp_path, nsqd=fake.address, topic="flights").rows == 3
    assert len(rows(tmp_path)) == 68
    assert FileName.parse(f"{name}-00000000000061-00000000000066.parquet") == FileName(
        PartitionKey("flights", 0, log.log_id), 61, 66
    )
    assert FileName.parse("part-00000-of-spark.parquet") is None


class Killed(BaseException):
    """The process ends here."""


def test_killed_at_any_step(fake, tmp_path, monkeypatch):
    logs = fake.logs["t"] = [FakeLog(partition=number) for number in range(2)]
    for log in logs:
        for hour in range(3):
            log.append(numbered(log.end, log.end + 25), NOON_NS + hour * HOUR_NS)
    expected = [(log.partition, n, b"%d" % n) for log in logs for n in range(1, 76)]
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

    monkeypatch.setattr(os, "replace", counted(os.replace))
    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    monkeypatch.setattr(pq.ParquetWriter, "write_table", counted(pq.ParquetWriter.write_table))
    given = {"nsqd": fake.address, "topic": "t", "channel": "archive"}
    at, kills = 1, 0
    while True:
        directory = tmp_path / str(at)
        for log in logs:
            log.channels.clear()
        steps[:] = [0, at]
        try:
            archive(directory, rows_per_file=20, **given)
            break
        except Killed:
            kills += 1
        found = rows(directory)
        assert len(set(found)) == len(found), f"killed at {at}"
        for log in logs:
            durable = {n for number, n, _ in found if number == log.partition}
            assert set(range(1, log.channels.get("archive", 1))) <= durable, "the channel is not ahead of the files"
        steps[1] = -1
        archive(directory, rows_per_file=33, **given)
        assert rows(directory) == expected, f"killed at {at}"
        at += 1 if at < 15 else 4
    assert kills > 20
    assert [log.channels["archive"] for log in logs] == [76, 76]


def test_one_at_a_time_and_nothing_left_behind(fake, tmp_path):
    fake.topic("t", numbered(1, 11))
    with files.Archive(tmp_path):
        (tmp_path / files.STAGED / "left").write_bytes(b"half a file")
        with pytest.raises(ArchiveError, match="another archive writes to it"):
            archive(tmp_path, nsqd=fake.address, topic="t")
    archive(tmp_path, nsqd=fake.address, topic="t")
    assert list((tmp_path / files.STAGED).iterdir()) == []
    (tmp_path / "a-file").write_bytes(b"")
    with pytest.raises(ArchiveError, match="cannot be written"):
        archive(tmp_path / "a-file", nsqd=fake.address, topic="t")


@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_where_another_kind_of_job_writes(fake, tmp_path, kind):
    """Whoever reads the directory would count both; refused at the same time, and one after the other."""
    fake.topic("t", numbered(1, 11))
    said = r"archive .*: dedupe writes to it \(\.writer in it says so\), .*: give each a directory of its own"
    with files.shared(tmp_path, "dedupe", SinkError):
        with files.shared(tmp_path, "dedupe", SinkError):
            pass
        with pytest.raises(SinkError, match="dedupe writes to it"), files.shared(tmp_path, "rollup", SinkError):
            pass
        with pytest.raises(ArchiveError, match=said):
            archive(tmp_path, nsqd=fake.address, topic="t", format=kind)
    with pytest.raises(ArchiveError, match=said):
        archive(tmp_path, nsqd=fake.address, topic="t", format=kind)
    assert not [*tmp_path.glob("**/*.parquet"), *tmp_path.glob("_delta_log")]
    of_archive = tmp_path / "archive"
    archive(of_archive, nsqd=fake.address, topic="t", format=kind)
    with pytest.raises(SinkError, match="archive writes to it"), files.shared(of_archive, "dedupe", SinkError):
        pass
    if kind == "parquet":
        (of_archive / files.WRITER).unlink()  # of a release before
        said = r"archive has written to it \(dt=.*/hour=.*\.parquet in it\), .*: give each a directory of its own"
        with pytest.raises(SinkError, match=said), files.shared(of_archive, "dedupe", SinkError):
            pass
    archive(of_archive, nsqd=fake.address, topic="t", format=kind)
    assert (of_archive / files.WRITER).read_text() == "archive\n"


@pytest.mark.parametrize("note", [None, "", "\0\0\0\0"])  # of a release before; of a kill; of a loss of power
@pytest.mark.parametrize(
    ("left", "jobs"),
    [
        ("dt=2026-11-23/hour=14/5f3a9c01d2e4b677-0000000012-0003.parquet", {"dedupe", "--bad-rows"}),
        (".staged/5f3a9c01d2e4b677-3/part.parquet", {"dedupe", "rollup", "--bad-rows"}),
        ("5f3a9c01d2e4b677-0000000012-0003.parquet", {"rollup"}),
        (f"dt=2026-11-23/hour=14/{FileName(PartitionKey('t', 0, '18eab4542c40c8c8'), 1, 9)}", {"archive"}),
    ],
)
def test_whose_a_directory_is_tell_its_files(fake, tmp_path, note, left, jobs):
    """Where it is not noted: who comes by mistake is refused, and the one whose it is goes on."""
    place = tmp_path / left
    place.parent.mkdir(parents=True, exist_ok=True)
    place.touch()
    if note is not None:
        (tmp_path / files.WRITER).write_text(note)
    before = sorted(tmp_path.rglob("*"))
    if "archive" not in jobs:
        fake.topic("t", numbered(1, 11))
        with pytest.raises(ArchiveError, match=r"has written to it \(.*parquet|.staged/.* in it\), .* of its own"):
            archive(tmp_path, nsqd=fake.address, topic="t")
        assert sorted(tmp_path.rglob("*")) == before
    for job in {"dedupe", "rollup", "--bad-rows"} - jobs:
        with pytest.raises(SinkError, match="has written to it"), files.shared(tmp_path, job, SinkError):
            pass
    if "archive" in jobs:
        with files.Archive(tmp_path) as begun:
            begun.begin()
    else:
        with files.shared(tmp_path, min(jobs), SinkError):
            pass
    assert (tmp_path / files.WRITER).read_text().rstrip("\0") == f"{min(jobs)}\n"


def test_an_archive_that_does_not_begin_leaves_a_directory_to_others(fake, tmp_path):
    with pytest.raises(NsqdError, match="nosuch"):
        archive(tmp_path, nsqd=fake.address, topic="nosuch")
    with files.shared(tmp_path, "dedupe", SinkError):
        pass


def test_a_kind_of_job_that_could_not_be_noted_is_noted_by_the_next_one(tmp_path, monkeypatch):
    """Of two kinds that share the lock one alone is noted, also where the note is there and empty."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(SinkError, match="No space left"), files.shared(tmp_path, "dedupe", SinkError):
            pass
    said = pytest.raises(SinkError, match="rollup writes to it")
    with files.shared(tmp_path, "rollup", SinkError), said, files.shared(tmp_path, "dedupe", SinkError):
        pass


def test_a_full_disk(fake, tmp_path, monkeypatch):
    fake.topic("t", numbered(1, 101))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(pq.ParquetWriter, "write_table", full)
        with pytest.raises(ArchiveError, match="No space left on device; what has its name stays"):
            archive(tmp_path, nsqd=fake.address, topic="t")
    assert names(tmp_path) == []
    assert archive(tmp_path, nsqd=fake.address, topic="t").rows == 100


def test_stopping_in_the_middle(fake, tmp_path):
    fake.topic("t", numbered(1, 501))
    stop = threading.Event()
    seen: list[int] = []

    def look(done: Archived) -> None:
        seen.append(done.rows)
        stop.set()

    given = {"nsqd": fake.address, "topic": "t", "batchRows": "100"}
    done = archive(tmp_path, follow=True, on_progress=look, stop=stop, **given)
    assert 0 < done.rows < 500 and seen
    assert [n for _, n, _ in rows(tmp_path)] == list(range(1, done.rows + 1)), "what was read is in files"
    archive(tmp_path, **given)
    assert [n for _, n, _ in rows(tmp_path)] == list(range(1, 501))


def test_what_is_gone(fake, tmp_path, caplog):
    log = fake.topic("t", numbered(1, 101))
    archive(tmp_path, nsqd=fake.address, topic="t")
    log.append(numbered(101, 201))
    log.append(numbered(201, 301))
    log.trim(201)
    with pytest.raises(DataLost, match="101 to 201"):
        archive(tmp_path, nsqd=fake.address, topic="t")
    assert archive(tmp_path, nsqd=fake.address, topic="t", failOnDataLoss="false").rows == 100
    fake.logs["t"] = [FakeLog()]
    fake.topic("t", numbered(1, 6))
    with pytest.raises(LogGone, match=r"up to 301.* another log in its place"):
        archive(tmp_path, nsqd=fake.address, topic="t")
    assert len(rows(tmp_path)) == 205, "created again it is another log, and is archived first"
    assert archive(tmp_path, nsqd=fake.address, topic="t", failOnDataLoss="false").rows == 0
    assert "is no more; it is archived up to 301" in caplog.text
    assert archive(tmp_path, nsqd=fake.address, topic="t").rows == 0
    assert [n for _, n, _ in rows(tmp_path)] == sorted([*range(1, 101), *range(201, 301), *range(1, 6)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_deleted_topic_is_an_error_until_it_is_let_go(fake, tmp_path, kind, capsys, caplog):
    """Nobody knows what it had in the end; the others are archived all the same, and one run lets it go."""
    flags = ["pipeline", "archive", f"--nsqd={fake.address}", "--topic=a,b", f"--to={tmp_path}", f"--format={kind}"]
    gone, other = fake.topic("a", numbered(1, 101)), fake.topic("b", numbered(1, 11))
    assert cli.main(flags) == 0
    del fake.logs["a"]
    other.append(numbered(11, 21))
    capsys.readouterr()
    assert cli.main(flags) == 1
    said = capsys.readouterr()
    assert f"topic 'a', partition 0, log {gone.log_id}: it is archived up to 101" in said.err
    assert "One run with failOnDataLoss=false lets it go" in said.err
    assert len(rows(tmp_path)) == 120
    assert cli.main(flags) == 1, "until somebody has said that it may go"
    assert cli.main([*flags, "--source-option=failOnDataLoss=false"]) == 0
    assert cli.main(flags) == 0
    fake.logs["a"] = [gone]
    gone.append(numbered(101, 111))
    assert cli.main(flags) == 0, "it has come back with more"
    del fake.logs["a"]
    assert cli.main(flags) == 1, "what it was let go with is not all it had"
    assert len(rows(tmp_path)) == 130
    pickled = pickle.loads(pickle.dumps(LogGone(PartitionKey("a", 0, gone.log_id), 111, "so it is")))
    assert "log " + gone.log_id in str(pickled) and pickled.start == 111


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_has_come_back_is_let_go_no_longer(fake, tmp_path, kind):
    """Also if it has nothing new, or only then gets what is lost with it."""
    given: dict[str, Any] = {"nsqd": fake.address, "topics": "a,b", "format": kind}
    log = fake.topic("a", numbered(1, 11))
    fake.topic("b", numbered(1, 11))
    archive(tmp_path, **given)
    del fake.logs["a"]
    archive(tmp_path, failOnDataLoss="false", **given)
    fake.logs["a"] = [log]
    assert archive(tmp_path, **given).rows == 0
    assert (tmp_path / ".logs").read_text() == f"a/0/{log.log_id} 0\n"
    del fake.logs["a"]
    for _ in range(2):
        with pytest.raises(LogGone, match="up to 11"):
            archive(tmp_path, **given)
    assert archive(tmp_path, failOnDataLoss="false", **given).rows == 0
    assert archive(tmp_path, **given).rows == 0


@pytest.mark.parametrize("kind", KINDS)
def test_without_what_is_remembered_logs_that_are_gone_are_told_again(fake, tmp_path, kind):
    given: dict[str, Any] = {"nsqd": fake.address, "topics": "a,b,c", "format": kind}
    for topic in ("a", "b", "c"):
        fake.topic(topic, numbered(1, 11))
    archive(tmp_path, **given)
    (tmp_path / ".logs").unlink(missing_ok=True)
    del fake.logs["a"]
    with pytest.raises(LogGone, match=r"topic 'a'.* up to 11"):
        archive(tmp_path, **given)
    archive(tmp_path, failOnDataLoss="false", **given)
    archive(tmp_path, **given)
    remembered = (tmp_path / ".logs").read_bytes()
    for garbage in (b"a/0/0123 7", b"\xff"):
        (tmp_path / ".logs").write_bytes(remembered + garbage)
        with pytest.raises(ArchiveError, match=r"\.logs in it cannot be read: .*; restore it, or remove it"):
            archive(tmp_path, **given)
    (tmp_path / ".logs").unlink()
    with pytest.raises(LogGone, match=r"topic 'a'.* up to 11"):
        archive(tmp_path, **given)


def test_one_that_is_away_is_not_let_go(fake, tmp_path, monkeypatch, caplog):
    """Who does not answer may have it; where nobody is known to be away, a run may let it go."""
    fake.topic("t", numbered(1, 11))
    with FakeLookupd() as lookupd:
        there = {"producers": [{"broadcast_address": "127.0.0.1", "tcp_port": fake.port}]}
        lookupd.answers |= {"/lookup?topic=t": there}
        given: dict[str, Any] = {"lookupd": lookupd.address, "topic": "t", "retries": "1"}
        assert archive(tmp_path, **given).rows == 10
        lookupd.answers |= {"/lookup?topic=t": {"producers": []}}
        look = Surveyor.look

        def look_and_miss(self: Surveyor, known: Any = (), **more: Any) -> Survey:
            found = look(self, known, **more)
            if known:  # it died behind the first look, which waits for everybody
                found.away["127.0.0.1:1"] = "it refused"
            return found

        with monkeypatch.context() as patched:
            patched.setattr(Surveyor, "look", look_and_miss)
            with pytest.raises(
                LogGone, match=r"nsqd 127\.0\.0\.1:1 is away \(it refused\)\. Start that one again"
            ) as raised:
                archive(tmp_path, **given)
            assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
            assert archive(tmp_path, failOnDataLoss="false", **given).rows == 0
        assert "is away; it is archived up to 11 (nsqd 127.0.0.1:1 is away (it refused))" in caplog.text
        with pytest.raises(LogGone, match="up to 11"):
            archive(tmp_path, **given)
        archive(tmp_path, failOnDataLoss="false", **given)
        assert archive(tmp_path, **given).rows == 0
        lookupd.answers |= {"/lookup?topic=t": there}
        archive(tmp_path, **given)
        lookupd.answers |= {"/lookup?topic=t": {"producers": []}}
        with pytest.raises(LogGone, match="up to 11"):
            archive(tmp_path, **given)


def test_an_ephemeral_topic_goes_by_itself(fake, tmp_path, caplog):
    fake.topic("t#ephemeral", numbered(1, 11))
    fake.topic("t", numbered(1, 11))
    given: dict[str, Any] = {"nsqd": fake.address, "topics": "t,t#ephemeral"}
    assert archive(tmp_path, **given).rows == 20
    del fake.logs["t#ephemeral"]
    assert archive(tmp_path, **given).rows == 0
    assert caplog.text.count("t#ephemeral 0/") == 1 and "is no more; it is archived up to 11" in caplog.text
    assert archive(tmp_path, **given).rows == 0
    assert caplog.text.count("is no more") == 1


def test_an_nsqd_that_is_listed_no_more(fake, tmp_path, monkeypatch, caplog):
    """nsqlookupd forgets one that stops: it may be starting again, and is waited for."""
    log = fake.topic("t", numbered(1, 11))
    with FakeLookupd() as lookupd:
        there = {"producers": [{"broadcast_address": "127.0.0.1", "tcp_port": fake.port}]}
        lookupd.answers |= {"/lookup?topic=t": there}
        given: dict[str, Any] = {"lookupd": lookupd.address, "topic": "t", "retries": "1"}
        assert archive(tmp_path, **given).rows == 10
        lookupd.answers |= {"/lookup?topic=t": {"producers": []}}
        with pytest.raises(LogGone, match=r"up to 11, .*: no nsqd has it\. One run"):
            archive(tmp_path, **given)
        log.append(numbered(11, 21))
        stop = threading.Event()

        def appear(done: Archived) -> None:
            if done.rows == 10:
                stop.set()
            lookupd.answers["/lookup?topic=t"] = there

        archive(tmp_path, follow=True, interval_s=0.001, on_progress=appear, stop=stop, **given)
        assert "waits at 11: no nsqd has it" in caplog.text
        assert len(rows(tmp_path)) == 20, "with follow it waits, and goes on"
        lookupd.answers |= {"/lookup?topic=t": {"producers": []}}
        monkeypatch.setattr(module, "AWAY_NS", 1)
        with pytest.raises(LogGone, match="up to 21"):
            archive(tmp_path, follow=True, interval_s=0.001, **given)


def test_files_beside_those_of_sparks_own_sink(fake, tmp_path, capsys):
    """Spark would read the files alone that its sink has listed."""
    (tmp_path / "_spark_metadata").mkdir()
    fake.topic("t", numbered(1, 11))
    assert cli.main(["pipeline", "archive", f"--to={tmp_path}", f"--nsqd={fake.address}", "--topic=t"]) == 1
    assert "_spark_metadata lists: name another one" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.parquet"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["ours://bucket/flights", "file:///tmp/x", "ours:/x", Path("ours://bucket/flights")])
def test_no_url_is_taken_for_a_directory(fake, tmp_path, monkeypatch, capsys, kind, place):
    """Nobody knows the scheme, so that no library that were handed it would ask somebody on a network."""
    monkeypatch.chdir(tmp_path)
    fake.topic("t", numbered(1, 11))
    for words in (
        ["archive", f"--to={place}", f"--nsqd={fake.address}", "--topic=t", f"--format={kind}"],
        ["compact", str(place)],
        ["replay", f"--path={place}", f"--nsqd={fake.address}", "--to-topic=again"],
    ):
        assert cli.main(["pipeline", *words]) == 2
        said = capsys.readouterr().err
        assert f"{place} is a URL, and files are read and written in local or mounted directories alone" in said
        assert said.count("\n") == 1
    with pytest.raises(UsageError, match="is a URL"):
        archive(place, nsqd=fake.address, topic="t", format=kind)
    assert list(tmp_path.iterdir()) == []


def test_one_that_cannot_be_read_holds_up_no_other(fake, tmp_path, caplog):
    logs = [fake.topic(name, numbered(1, 11)) for name in "abcdefgh"]
    given = {"nsqd": fake.address, "topics": "a,b,c,d,e,f,g,h"}
    assert archive(tmp_path, **given).rows == 80
    for log in logs:
        log.append(numbered(11, 21))
    logs[0].trim(15)
    with pytest.raises(DataLost, match=r"topic 'a'.*messages 11 to 15"):
        archive(tmp_path, **given)
    assert len(rows(tmp_path)) == 80 + 7 * 10, "the first one is left where it was"
    assert "the other logs are archived before this ends" in caplog.text
    assert archive(tmp_path, failOnDataLoss="false", **given).rows == 6


def test_wrong_words(tmp_path, capsys):
    for words, said in (
        ([], "give --to"),
        ([f"--to={tmp_path}"], "give --topic"),
        ([f"--to={tmp_path}", "--topic=t"], "give either --nsqd or --lookupd"),
        ([f"--to={tmp_path}", "--topic=t", "--nsqd=a:1", "--source-option=x"], "is not NAME=VALUE"),
    ):
        assert cli.main(["pipeline", "archive", *words]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(OptionError, match="timestamp has to be among them"):
        archive(tmp_path, nsqd="a:1", topic="t", columns="offset,body")
    with pytest.raises(OptionError, match="latest needs channel"):
        archive(tmp_path, nsqd="a:1", topic="t", startingOffsets="latest")
    words = ["pipeline", "archive", f"--to={tmp_path}", "--topic=t", "--nsqd=a:1"]
    for option in ("maxMessagesPerTrigger=10", "minPartitions=2", "spoolLocation=/s"):
        assert cli.main([*words, f"--source-option={option}"]) == 2
        said = capsys.readouterr().err
        assert option.partition("=")[0] in said and "an archive has no micro-batches and no tasks" in said
    for flag, said in (
        ("--source-option=endingTimestamp=2020-01-01",
         "endingTimestamp='1577836800000 ms since 1970' is not allowed; an archive takes what there is, so that"),
        ("--source-option=endingOffsets={\"t\": {\"0\": 5}}", "endingOffsets="),
        ("--columns=offset,timestamp,nope", "there is no nope; there is topic, partition, offset, timestamp, "),
        ("--columns=offset,body", "timestamp has to be among them"),
    ):  # fmt: skip
        assert cli.main([*words, flag]) == 2, flag
        assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "an archive that is not begun leaves nothing"


def test_a_topic_that_is_nowhere(fake, tmp_path, capsys):
    """Refused with those that are, or waited for; the same for every job, before Spark is started."""
    fake.topic("flights", numbered(0, 10))
    at = f"--nsqd={fake.address}"
    for job in (
        ["archive", f"--to={tmp_path}/files"],
        ["archive", f"--to={tmp_path}/files", "--follow"],
        ["dedupe", "--key=body", f"--to={tmp_path}/unique", f"--checkpoint={tmp_path}/c"],
        ["rollup", "--aggregate=count(*) AS n", f"--to={tmp_path}/windows", f"--checkpoint={tmp_path}/c"],
        ["mirror", "--prefix=copy-", f"--checkpoint={tmp_path}/c"],
        ["tail"],
        ["trace"],
    ):
        assert cli.main(["pipeline", *job, at, "--topic=flihgts"]) == 1, job
        said = capsys.readouterr().err
        assert f"no nsqd of {fake.address} has topic 'flihgts'. --wait-for-topic waits" in said, job
        assert list(tmp_path.iterdir()) == [], f"left behind by {job}"
    with FakeLookupd() as lookupd:
        producers = {"producers": [{"broadcast_address": "127.0.0.1", "tcp_port": fake.port}]}
        lookupd.answers |= {"/topics": {"topics": ["flights", "other"]}, "/lookup?topic=late": producers}
        words = ["pipeline", "archive", f"--lookupd={lookupd.address}", f"--to={tmp_path}/files"]
        assert cli.main([*words, "--topic=flihgts"]) == 1
        assert "has topic 'flihgts'; there is flights, other. --wait" in capsys.readouterr().err
        assert cli.main([*words, "--topic=late", "--wait-for-topic=10ms"]) == 1
        assert "has topic 'late' after 0.01 s; there is" in capsys.readouterr().err
        made = threading.Timer(0.3, fake.topic, ("late", numbered(0, 7)))
        made.start()
        assert cli.main([*words, "--topic=late", "--wait-for-topic=5m"]) == 0
        assert "7 messages in 1 files" in capsys.readouterr().out
        made.join()
    del fake.logs["late"]
    words = ["pipeline", "archive", at, "--topic=late", f"--to={tmp_path}/files"]
    assert cli.main(words) == 1, "of which it has files"
    assert "it is archived up to 8, and what it had" in capsys.readouterr().err
    assert cli.main([*words, "--source-option=failOnDataLoss=false"]) == 0
    assert "0 messages" in capsys.readouterr().out


def test_stopped_while_a_topic_is_waited_for(fake, tmp_path, capsys, monkeypatch):
    """It says so, and has begun nothing; the same for every job, before Spark is started."""
    fake.topic("flights", numbered(0, 10))
    stop = threading.Event()
    looks = topics._there

    def end(*given: Any) -> set[str]:
        found = looks(*given)
        stop.set()
        signal.raise_signal(signal.SIGTERM)
        return found

    monkeypatch.setattr(topics, "_there", end)
    plan = tmp_path / "plan.toml"
    plan.write_text(
        f'name = "p"\ncheckpoint = "{tmp_path}/c"\n[[source]]\nname = "s"\nformat = "nsq"\n'
        f'options = {{ nsqd = "{fake.address}", topic = "late" }}\n'
        f'[[sink]]\nname = "k"\nfrom = "s"\nformat = "parquet"\noptions = {{ path = "{tmp_path}/sink" }}\n'
    )
    given = [f"--nsqd={fake.address}", "--topic=late"]
    for job in (
        ["archive", f"--to={tmp_path}/files", *given],
        ["archive", f"--to={tmp_path}/files", "--format=delta", "--follow", *given],
        ["dedupe", "--key=body", f"--to={tmp_path}/unique", f"--checkpoint={tmp_path}/c", *given],
        ["rollup", f"--to={tmp_path}/windows", f"--checkpoint={tmp_path}/c", *given],
        ["mirror", "--prefix=copy-", f"--checkpoint={tmp_path}/c", *given],
        ["tail", *given],
        ["run", str(plan)],
    ):
        assert cli.main(["pipeline", *job, "--wait-for-topic=1h"]) == 0, job
        told = capsys.readouterr()
        assert told.out == ""
        said = "stopped while it waited for topic 'late', which has not come; nothing was begun"
        assert told.err == f"flintmq pipeline {job[0]}: {said}\n"
        assert list(tmp_path.iterdir()) == [plan], f"left behind by {job}"
    monkeypatch.setattr(signal, "raise_signal", lambda _: None)
    with pytest.raises(StoppedEarly, match="topic 'late', which has not come"):
        archive(tmp_path / "files", stop=stop, wait_for_topic_s=3600, nsqd=fake.address, topic="late")
    fake.topic("late", numbered(0, 7))
    assert archive(tmp_path / "files", stop=stop, wait_for_topic_s=3600, nsqd=fake.address, topic="late").files == 0
    stop = threading.Event()
    with pytest.raises(StoppedEarly):
        archive(tmp_path / "files", stop=stop, wait_for_topic_s=3600, nsqd=fake.address, topics="late,later")


@pytest.mark.parametrize("command", ["OFFSETS", "FETCH", "CURSOR"])
def test_an_nsqd_that_stands_still_is_left_when_it_is_to_stop(fake, tmp_path, monkeypatch, command):
    """Half an answer has come, and nothing more: what was read before is in files, and nobody tries again."""
    monkeypatch.setattr(stopping, "PATIENCE_S", 0.0)
    fake.topic("t", numbered(0, 5000), batch=100)
    stop = threading.Event()
    given = {"nsqd": fake.address, "topic": "t", "channel": "archive", "fetchTimeout": "1h", "retries": "100"}
    given |= {"batchRows": "100", "fetchMaxBytes": "4KiB"}

    def look(done: Archived) -> None:
        if command not in fake.failures:  # the first round is over, or a part of it
            fake.topic("t", numbered(5000, 5100))
            fake.fail(command, *["hang"] * 9)

    def end() -> None:
        fake.hangs.wait()
        stop.set()

    ending = threading.Thread(target=end, daemon=True)
    ending.start()
    done = archive(tmp_path, follow=True, interval_s=0.001, on_progress=look, stop=stop, **given)
    ending.join()
    assert fake.failures[command] == ["hang"] * 8
    assert 0 < done.rows == len(rows(tmp_path)) <= (4900 if command == "FETCH" else 5100)
    del fake.failures[command]
    archive(tmp_path, **given)
    assert [body for _, _, body in rows(tmp_path)] == [b"%d" % n for n in range(5100)]


def test_an_nsqd_that_stands_still_before_a_job_has_begun(fake, tmp_path, capsys, monkeypatch):
    """Told to stop, each job says that it has begun nothing, before Spark is started."""
    monkeypatch.setattr(stopping, "PATIENCE_S", 0.0)
    fake.topic("t", numbered(0, 10))
    plan = tmp_path / "plan.toml"
    plan.write_text(
        f'name = "p"\ncheckpoint = "{tmp_path}/c"\n[[source]]\nname = "s"\nformat = "nsq"\n'
        f'options = {{ nsqd = "{fake.address}", topic = "t", fetchTimeout = "1h" }}\n'
        f'[[sink]]\nname = "k"\nfrom = "s"\nformat = "parquet"\noptions = {{ path = "{tmp_path}/sink" }}\n'
    )
    given = [f"--nsqd={fake.address}", "--topic=t", "--source-option=fetchTimeout=1h"]
    for answers, job in (
        (0, ["archive", f"--to={tmp_path}/files", *given]),
        (0, ["mirror", "--prefix=copy-", f"--checkpoint={tmp_path}/c", *given]),
        (0, ["tail", *given]),
        (1, ["tail", *given]),
        (0, ["check", str(plan)]),
        (1, ["check", str(plan)]),
    ):
        fake.hangs.clear()
        fake.fail("OFFSETS", *["well"] * answers, "hang")

        def end() -> None:
            fake.hangs.wait()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

        ending = threading.Thread(target=end, daemon=True)
        ending.start()
        assert cli.main(["pipeline", *job]) == 0, job
        ending.join()
        said = f"stopped while it waited for nsqd {fake.address}; nothing was begun"
        assert capsys.readouterr().err == f"flintmq pipeline {job[0]}: {said}\n"
        assert list(tmp_path.iterdir()) == [plan], f"left behind by {job}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_as_a_command_until_a_signal(nsqd: NsqdProcess, topic: str, tmp_path: Path, number: signal.Signals):
    nsqd.publish(topic, numbered(0, 1000))
    flags = [f"--to={tmp_path}", f"--topic={topic}", f"--nsqd={nsqd.address}", "--channel=archive", "--progress=json"]
    command = [sys.executable, "-m", "flintmq", "pipeline", "archive", *flags]
    first = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment())
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("1000 messages in 1 files, ")
    assert json.loads(first.stderr.splitlines()[-1])["rows"] == 1000
    (stats,) = json.loads(nsqd.get(f"/stats?format=json&topic={topic}"))["topics"]
    assert stats["channels"][0]["depth"] == 0

    nsqd.publish(topic, numbered(1000, 1500))
    process = subprocess.Popen(
        [*command, "--follow", "--interval=50ms"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(),
    )  # fmt: skip
    try:
        assert process.stderr is not None
        next(line for line in process.stderr if json.loads(line)["rows"] >= 500)
        process.send_signal(number)
        output, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert output.startswith("500 messages in ")
    assert [body for _, _, body in rows(tmp_path)] == [b"%d" % n for n in range(1500)]
