"""Reading an nsqd that keeps no log: ``mode=spool`` and ``mode=direct``, driven as Spark does, and killed.

The nsqd is one that knows no more than NSQ's, or what ``SPARK_NSQD`` names.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from tests.integration.daemons import PATIENCE_S
from tests.spark.driven import Query
from tests.spark.processes import NsqdProcess, PlainNsqd, assert_each_once, numbered

from flintmq import cli
from flintmq.errors import OptionError
from flintmq.pipeline.archive import archive
from flintmq.spark import spooled
from flintmq.spark.batch_reader import NsqReader
from flintmq.spark.broker import NotByOffset
from flintmq.spark.errors import DataLost, NotAllTaken, SpoolFailed
from flintmq.spark.offsets import MODE_KEY
from flintmq.spark.options import SourceOptions
from flintmq.spark.spooled import AnyStreamReader

pytestmark = pytest.mark.slow
MSG_TIMEOUT_S = 1.0
COLUMNS = "topic,partition,offset,timestamp,attempts,id,body"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainNsqd]:
    process = PlainNsqd(tmp_path_factory.mktemp("plain"), "--max-msg-timeout=1m")
    yield process
    process.stop()


@pytest.fixture
def query(plain: PlainNsqd, topic: str, tmp_path: Path) -> Iterator[Callable[..., Query]]:
    """Makes queries of ``topic``; ``mode`` says of what kind."""
    made: list[Query] = []

    def make(mode: str = "spool", **options: object) -> Query:
        given: dict[str, object] = {"nsqd": plain.address, "topic": topic, "channel": "spark", "columns": COLUMNS}
        given |= {"mode": mode, "retries": 3, "msgTimeout": f"{MSG_TIMEOUT_S:g}s"}
        if mode != "direct":
            given["spoolLocation"] = tmp_path / "spool"
        made.append(Query(**(given | options)))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def in_time(is_so: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.02)


def until_rows(reading: Query, count: int) -> None:
    """Run micro-batches until there are so many rows."""
    in_time(lambda: reading.step() >= 0 and len(reading.rows) >= count)


@pytest.mark.parametrize("mode", ["auto", "spool", "direct"])
def test_all_that_waits_is_read_and_finished(plain: PlainNsqd, topic: str, query: Callable[..., Query], mode: str):
    plain.publish(topic, numbered(0, 2000))
    before_ns = time.time_ns()
    reading = query(mode, maxInFlight=500)
    reading.available_now()
    assert_each_once(reading.bodies, 2000)
    assert sorted(row["offset"] for row in reading.rows) == list(range(1, 2001))
    row = reading.rows[0]
    assert (row["topic"], row["partition"], row["attempts"]) == (topic, 0, 1)
    assert len(row["id"]) == 16 and int(row["id"], 16), "the id that nsqd gave it"
    assert row["timestamp"].timestamp() < before_ns / 1e9, "the time at which nsqd stored it, and not the spool"
    assert f'"{MODE_KEY}": "{"direct" if mode == "direct" else "spool"}"' in reading.planned[-1]
    in_time(lambda: plain.unfinished(topic, "spark") == 0)
    plain.publish(topic, numbered(2000, 2100))
    reading.stop()
    reading.available_now()
    assert_each_once(reading.bodies, 2100)


def test_a_spool_loses_nothing_and_repeats_nothing_when_everything_is_killed(
    plain: PlainNsqd, topic: str, query: Callable[..., Query]
):
    """Killed with a micro-batch planned, written, and committed; what was finished is in the files by then."""
    reading = query(maxMessagesPerTrigger=150)
    for first in range(0, 300, 100):
        plain.publish(topic, numbered(first, first + 100))
        in_time(reading.plan)
        if first % 300 == 0:
            reading.kill()
        reading.write()
        if first % 300 == 100:
            reading.kill()
            reading.write()
        reading.commit()
        if first % 300 == 200:
            reading.kill()
    reading.available_now()
    assert_each_once(reading.bodies, 300)
    in_time(lambda: plain.unfinished(topic, "spark") == 0)


def test_direct_finishes_nothing_before_it_is_committed_and_repeats_what_was_not(
    plain: PlainNsqd, topic: str, query: Callable[..., Query]
):
    plain.publish(topic, numbered(0, 300))
    reading = query("direct")
    until_rows(reading, 300)
    assert plain.channel(topic, "spark")["in_flight_count"] > 0, "the last micro-batch is not said to be committed yet"
    assert not reading.plan(), "this says it"
    in_time(lambda: plain.unfinished(topic, "spark") == 0)

    plain.publish(topic, numbered(300, 400))
    in_time(reading.plan)
    assert reading.write() > 0
    reading.kill()  # behind the sink, before the commit
    assert reading.write() == 0, "its messages are nsqd's again"
    reading.commit()
    in_time(lambda: reading.step() >= 0 and len(set(reading.bodies)) == 400)
    in_time(lambda: not reading.plan())
    in_time(lambda: plain.unfinished(topic, "spark") == 0)


def test_a_trigger_that_never_asks_again_is_refused_with_direct(plain: PlainNsqd, topic: str):
    """Spark asks for all with ``once=True``; nothing would ever be finished."""
    given = {"nsqd": plain.address, "topic": topic, "channel": "spark", "mode": "direct"}
    reader = AnyStreamReader(SourceOptions.parse(given))
    with pytest.raises(OptionError, match="availableNow=True"):
        reader.latestOffset({}, ReadAllAvailable())
    assert reader.getDefaultReadLimit() != ReadAllAvailable()


def test_what_waits_for_a_long_micro_batch_is_touched(
    plain: PlainNsqd, topic: str, query: Callable[..., Query], tmp_path: Path
):
    nsqd = PlainNsqd(tmp_path / "impatient", f"--msg-timeout={MSG_TIMEOUT_S:g}s", "--max-msg-timeout=1m")
    try:
        nsqd.publish(topic, numbered(0, 100))
        reading = query("direct", nsqd=nsqd.address)
        until_rows(reading, 100)
        time.sleep(2.5 * MSG_TIMEOUT_S)  # what a micro-batch may take
        assert nsqd.channel(topic, "spark")["timeout_count"] == 0
        assert not reading.plan()
        in_time(lambda: nsqd.unfinished(topic, "spark") == 0)
        assert_each_once(reading.bodies, 100)
        reading.stop()
    finally:
        nsqd.stop()


def test_an_nsqd_that_goes_away_and_comes_back_is_read_on(
    plain: PlainNsqd, topic: str, query: Callable[..., Query], tmp_path: Path
):
    nsqd = PlainNsqd(tmp_path / "other")
    try:
        nsqd.publish(topic, numbered(0, 200))
        plain.publish(topic, numbered(200, 300))
        reading = query(nsqd=f"{nsqd.address},{plain.address}")
        reading.available_now()
        assert_each_once(reading.bodies, 300)
        in_time(lambda: nsqd.unfinished(topic, "spark") == 0)
        nsqd.stop()
        plain.publish(topic, numbered(300, 400))
        reading.stop()
        until_rows(reading, 400)
        nsqd.start()
        nsqd.publish(topic, numbered(400, 500))
        until_rows(reading, 500)
        assert_each_once(reading.bodies, 500)
    finally:
        nsqd.stop()


@pytest.mark.parametrize("mode", ["spool", "direct"])
def test_an_nsqd_that_stands_still_has_not_delivered_everything(
    topic: str,
    query: Callable[..., Query],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
):
    """As on a machine that is suspended: availableNow waits until it goes on, and ends with all of it then."""
    monkeypatch.setattr(spooled, "WAITS_TOLD_S", 0.5)
    nsqd = PlainNsqd(tmp_path / "other")
    nsqd.publish(topic, numbered(0, 1000, 4096))
    reading = query(mode, nsqd=nsqd.address, spoolMaxBytes="1MiB", maxInFlight=50, msgTimeout="1m")
    reading.reader.prepareForTriggerAvailableNow()
    until_rows(reading, 1)
    os.kill(nsqd.process_id, signal.SIGSTOP)
    try:
        rest = threading.Thread(target=lambda: in_time(lambda: reading.step() == 0))
        rest.start()
        in_time(lambda: "does not answer" in caplog.text or not rest.is_alive())
        assert rest.is_alive(), "it has ended"
    finally:
        os.kill(nsqd.process_id, signal.SIGCONT)
    rest.join(PATIENCE_S)
    assert_each_once(reading.bodies, 1000)
    in_time(lambda: nsqd.unfinished(topic, "spark") == 0)
    reading.stop()
    nsqd.stop()


@pytest.mark.parametrize("mode", ["spool", "direct"])
def test_with_an_nsqd_away_available_now_fails_and_names_it(
    plain: PlainNsqd, topic: str, query: Callable[..., Query], tmp_path: Path, mode: str
):
    away = PlainNsqd(tmp_path / "away")
    away.publish(topic, numbered(100, 200))
    away.kill()
    plain.publish(topic, numbered(0, 100))
    reading = query(mode, nsqd=f"{plain.address},{away.address}", nsqdDownTimeout="1s")
    with pytest.raises(
        NotAllTaken, match=rf"may be more than was read: nsqd {away.address} is not connected \("
    ) as told:
        reading.available_now()
    assert "start the query again" in str(told.value)
    away.start()
    reading.stop()
    reading.raw["nsqdDownTimeout"] = "5m"
    reading.available_now()
    assert set(reading.bodies) == set(numbered(0, 200))
    away.kill()
    reading.stop()
    reading.raw |= {"nsqdDownTimeout": "1s", "failOnDataLoss": "false"}
    reading.stop()
    reading.available_now()
    away.start()
    away.stop()


def test_without_nsqlookupd_available_now_does_not_know_what_there_is(topic: str):
    given = {"lookupd": "127.0.0.1:1", "topic": topic, "channel": "spark", "mode": "direct", "nsqdDownTimeout": "1s"}
    reading = Query(**given)
    try:
        with pytest.raises(NotAllTaken, match="no nsqlookupd answers"):
            reading.available_now()
    finally:
        reading.stop()


def test_a_spool_that_is_full_leaves_the_rest_to_nsqd(plain: PlainNsqd, topic: str, query: Callable[..., Query]):
    plain.publish(topic, numbered(0, 1000, 4096))
    reading = query(spoolMaxBytes="1MiB", maxInFlight=50)
    in_time(reading.plan)
    in_time(lambda: plain.unfinished(topic, "spark") < 800)
    time.sleep(0.5)
    assert plain.unfinished(topic, "spark") > 500, "it takes what it has room for"
    reading.write()
    reading.commit()
    reading.available_now()
    assert_each_once(reading.bodies, 1000)


def test_a_spool_that_was_killed_is_started_again(plain: PlainNsqd, topic: str, query: Callable[..., Query]):
    plain.publish(topic, numbered(0, 100))
    reading = query()
    until_rows(reading, 100)
    before = reading.spool_process_id
    os.kill(before, signal.SIGKILL)
    plain.publish(topic, numbered(100, 200))
    until_rows(reading, 200)
    assert reading.spool_process_id != before
    assert_each_once(reading.bodies, 200)


def test_a_spool_that_is_killed_while_it_starts_is_started_again(
    plain: PlainNsqd, topic: str, query: Callable[..., Query], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mark = tmp_path / "killed"
    dies_once = f"test -e {mark} || {{ touch {mark}; kill -9 $$; }}; exec {sys.executable} -m flintmq.spool"
    monkeypatch.setattr("flintmq.spark.spool.COMMAND", ("sh", "-c", dies_once))
    plain.publish(topic, numbered(0, 100))
    reading = query(retries=1)
    until_rows(reading, 100)
    assert mark.exists()
    assert_each_once(reading.bodies, 100)


def test_a_spool_that_is_always_killed_while_it_starts_is_told(
    topic: str, query: Callable[..., Query], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("flintmq.spark.spool.COMMAND", ("sh", "-c", "kill -9 $$"))
    with pytest.raises(SpoolFailed, match=r"signal 9 ended it while it started\. .* start the query again"):
        query(retries=1).step()


@pytest.mark.parametrize("is_published", [False, True])
def test_a_spool_whose_directory_is_removed_ends_and_finishes_nothing(
    plain: PlainNsqd, topic: str, query: Callable[..., Query], tmp_path: Path, is_published: bool
):
    plain.publish(topic, numbered(0, 10))
    reading = query()
    until_rows(reading, 10)
    in_time(lambda: plain.unfinished(topic, "spark") == 0)
    shutil.rmtree(tmp_path / "spool")
    if is_published:
        plain.publish(topic, numbered(10, 110))
    with pytest.raises(SpoolFailed, match=r"spoolLocation .*/spool: .*No more messages are finished"):
        in_time(lambda: reading.step() < 0)
    assert plain.unfinished(topic, "spark") == (100 if is_published else 0)
    assert not (tmp_path / "spool").exists()


@pytest.mark.parametrize("what", ["t-{topic}", "t-{topic}/00000000000000000001.log"])
def test_a_spool_of_which_something_is_replaced_by_its_copy_finishes_nothing(
    plain: PlainNsqd, topic: str, query: Callable[..., Query], tmp_path: Path, what: str
):
    plain.publish(topic, numbered(0, 10))
    reading = query()
    until_rows(reading, 10)
    in_time(lambda: plain.unfinished(topic, "spark") == 0)
    place = tmp_path / "spool" / what.format(topic=topic)
    (shutil.copytree if place.is_dir() else shutil.copy)(place, tmp_path / "copy")
    place.rename(tmp_path / "away")
    (tmp_path / "copy").rename(place)
    plain.publish(topic, numbered(10, 110))
    with pytest.raises(SpoolFailed, match=r"is another one than the spool writes to: .*No more messages are finished"):
        in_time(lambda: reading.step() < 0)
    assert plain.unfinished(topic, "spark") == 100


def test_a_file_system_that_is_too_small_is_refused_with_the_number(
    topic: str, query: Callable[..., Query], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    small = (
        "import os, sys; from flintmq.spool import process; "
        "os.statvfs = lambda _path: os.statvfs_result((4096, 4096, 1500, 1500, 1500, 9, 9, 9, 0, 255)); "
        "sys.exit(process.main())"
    )
    monkeypatch.setattr("flintmq.spark.spool.COMMAND", (sys.executable, "-c", small))
    with pytest.raises(SpoolFailed, match="has 6144000 bytes in all, a spool needs at least 71303168, of which"):
        query().step()
    assert list((tmp_path / "spool").iterdir()) == []


def test_kills_leave_no_tokens_behind(
    plain: PlainNsqd, topic: str, query: Callable[..., Query], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    plain.publish(topic, numbered(0, 10))
    reading = query("direct")
    until_rows(reading, 10)
    before = set(tmp_path.iterdir())
    os.kill(reading.spool_process_id, signal.SIGKILL)
    plain.publish(topic, numbered(10, 20))
    in_time(lambda: reading.step() >= 0 and len(set(reading.bodies)) == 20)
    after = set(tmp_path.iterdir())
    assert len(before) == len(after) == 1 and before != after
    reading.stop()
    assert set(tmp_path.iterdir()) == set()


def test_a_spool_that_stood_still_stores_once_what_nsqd_has_sent_again(
    plain: PlainNsqd, topic: str, query: Callable[..., Query]
):
    """As on a machine that was suspended; its connection has each message several times by then."""
    plain.publish(topic, numbered(0, 50))
    reading = query()
    until_rows(reading, 50)
    process_id = reading.spool_process_id
    os.kill(process_id, signal.SIGSTOP)
    try:
        plain.publish(topic, numbered(50, 100))
        in_time(lambda: plain.channel(topic, "spark")["timeout_count"] >= 100)
    finally:
        os.kill(process_id, signal.SIGCONT)
    until_rows(reading, 100)
    in_time(lambda: plain.unfinished(topic, "spark") == 0)
    reading.stop()
    reading.available_now()
    assert_each_once(reading.bodies, 100)


def test_two_queries_cannot_have_one_spool(plain: PlainNsqd, topic: str, query: Callable[..., Query]):
    first = query()
    first.step()
    with pytest.raises(SpoolFailed, match="another process has it: each query needs a directory and a channel"):
        query(retries=1).step()
    first.stop()
    with pytest.raises(SpoolFailed, match="it is of channel 'spark', not 'other'"):
        query(channel="other").step()


def test_a_directory_that_is_no_spool_is_left_alone(query: Callable[..., Query], tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SpoolFailed, match=r"it is no spool and not empty: notes\.txt"):
        query(spoolLocation=tmp_path).step()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_checkpoint_without_its_spool_is_told(
    plain: PlainNsqd, topic: str, query: Callable[..., Query], tmp_path: Path
):
    plain.publish(topic, numbered(0, 100))
    reading = query()
    until_rows(reading, 100)
    reading.stop()
    reading.raw["spoolLocation"] = str(tmp_path / "empty")
    reading.stop()
    with pytest.raises(DataLost, match="they are not in this spoolLocation"):
        reading.step()
    reading.raw["failOnDataLoss"] = "false"
    reading.stop()
    plain.publish(topic, numbered(100, 200))
    until_rows(reading, 200)
    assert_each_once(reading.bodies, 200)


def test_what_is_missing_is_said_when_nsqd_is_known(plain: PlainNsqd, topic: str):
    given = {"nsqd": plain.address, "topic": topic}
    with pytest.raises(OptionError, match="mode=spool consumes a channel: set channel"):
        Query(**given).step()
    with pytest.raises(OptionError, match="set spoolLocation to a directory, or mode=direct"):
        Query(**given, channel="spark").step()
    with pytest.raises(NotByOffset, match="mode=spool and mode=direct read any other"):
        Query(**given, mode="offset").step()


def test_an_nsqd_with_offsets_is_read_by_them(nsqd: NsqdProcess, topic: str):
    nsqd.publish(topic, numbered(0, 100))
    reading = Query(nsqd=nsqd.address, topic=topic, columns=COLUMNS)
    reading.available_now()
    assert_each_once(reading.bodies, 100)
    assert MODE_KEY not in reading.planned[-1]
    reading.raw |= {"mode": "direct", "channel": "spark"}
    reading.stop()
    with pytest.raises(OptionError, match="this checkpoint was begun with mode=offset"):
        reading.step()


def test_ours_can_be_spooled_as_well(nsqd: NsqdProcess, topic: str, query: Callable[..., Query]):
    nsqd.publish(topic, numbered(0, 100))
    reading = query(nsqd=nsqd.address)
    reading.available_now()
    assert_each_once(reading.bodies, 100)


def test_the_lag_from_a_checkpoint_and_the_files(
    plain: PlainNsqd, topic: str, query: Callable[..., Query], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """While it runs and afterwards; nothing is started, and no nsqd is asked."""
    plain.publish(topic, numbered(0, 300))
    reading = query(maxMessagesPerTrigger=100)
    in_time(reading.plan)
    in_time(lambda: plain.unfinished(topic, "spark") == 0)
    reading.write()
    reading.commit()
    words = ["pipeline", "lag", "--json", f"--checkpoint={tmp_path}/checkpoint"]

    def lags(*more: str) -> list[tuple[str, int]]:
        for name in ("offsets", "commits"):
            (tmp_path / "checkpoint" / name).mkdir(parents=True, exist_ok=True)
            text = f"v1\n{{}}\n{reading.planned[-1]}\n" if name == "offsets" else "v1\n{}"
            (tmp_path / "checkpoint" / name / str(reading.committed)).write_text(text)
        assert cli.main([*words, f"--spool={tmp_path}/spool", *more]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert all(row["topic"] == topic and (row["seconds"] > 0) == (row["messages"] > 0) for row in rows)
        return [(row["nsqd"], row["messages"]) for row in rows]

    assert lags() == [("spool", 300 - len(reading.rows))]
    reading.available_now()
    assert lags() == [("spool", 0)]
    reading.stop()
    assert lags() == [("spool", 0)]
    for more, said in (
        ([f"--nsqd={plain.address}"], "give --spool, its spoolLocation"),
        ([f"--spool={tmp_path}"], "it is no spool"),
        ([f"--spool={tmp_path}/spool", "--update-channel=spark"], "leave --update-channel out"),
        ([f"--spool={tmp_path}/spool", f"--nsqd={plain.address}"], "leave out nsqd"),
    ):
        assert cli.main([*words, *more]) != 0
        assert said in capsys.readouterr().err
    (tmp_path / "spool" / f"t-{topic}").rename(tmp_path / "elsewhere")
    assert cli.main([*words, f"--spool={tmp_path}/spool"]) == 1
    assert json.loads(capsys.readouterr().out)["messages"] is None, "nobody tells"


def test_deferred_messages_when_they_are_due(nsqd: NsqdProcess, topic: str, query: Callable[..., Query]):
    """By offset they are read when they are stored; with ``deferred=due`` later ones are not held up by them."""
    nsqd.post(f"/topic/create?topic={topic}&partition_num=2")
    due_at = time.monotonic() + 2
    for number, delay_ms in enumerate((2_000, 3_000_000, 0, 0)):
        nsqd.post(f"/pub?topic={topic}&partition={number % 2}&defer={delay_ms}", b"%d" % number)
    given = {"nsqd": nsqd.address, "mode": "auto"}
    stored = Query(nsqd=nsqd.address, topic=topic, columns="body", deferred="stored")
    stored.available_now()
    assert sorted(stored.bodies) == [b"0", b"1", b"2", b"3"]
    reading = query(**given, deferred="due")
    in_time(lambda: reading.step() >= 0 and {b"2", b"3"} <= set(reading.bodies))
    assert b"0" not in reading.bodies or time.monotonic() > due_at
    reading.kill()
    until_rows(reading, 3)
    assert sorted(reading.bodies) == [b"0", b"2", b"3"], "as soon as it is due, and once; one waits for 50 minutes"
    assert f'"{MODE_KEY}": "spool"' in reading.planned[-1]
    stored.raw |= {"deferred": "due", "channel": "other", "spoolLocation": "/nowhere"}
    stored.stop()
    with pytest.raises(OptionError, match="this checkpoint was begun with mode=offset"):
        stored.step()


def headed(nsqd: NsqdProcess, topic: str, *numbers: int) -> None:
    """Publish messages whose headers are their numbers."""
    for number in numbers:
        ext = quote(json.dumps({"n": str(number)}))
        nsqd.post(f"/pub_ext?topic={topic}&ext={ext}", b"%d" % number)


def headers_of(reading: Query) -> list[tuple[bytes, dict[str, str]]]:
    return sorted((row["body"], dict(row["headers"] or ())) for row in reading.rows)


def with_numbers(*numbers: int) -> list[tuple[bytes, dict[str, str]]]:
    return [(b"%d" % number, {"n": str(number)}) for number in numbers]


@pytest.mark.parametrize("mode", ["spool", "direct", "due"])
@pytest.mark.parametrize("partitions", ["", "&partition_num=2"], ids=["plain", "partitions"])
def test_headers_come_without_nsqlookupd(
    nsqd: NsqdProcess, topic: str, query: Callable[..., Query], partitions: str, mode: str
):
    """The nsqd itself is asked, as nsqlookupd would tell: a plain topic would give the bodies alone, in silence."""
    nsqd.post(f"/topic/create?topic={topic}&extend=true{partitions}")
    headed(nsqd, topic, 0, 1, 2)
    how = {"mode": "auto", "deferred": "due"} if mode == "due" else {"mode": mode}
    reading = query(nsqd=nsqd.address, columns="body,headers", **how)
    reading.available_now()
    assert headers_of(reading) == with_numbers(0, 1, 2)


def test_a_topic_without_headers_stays_one(nsqd: NsqdProcess, topic: str, query: Callable[..., Query]):
    """One that is not there either: it is made as ever by who subscribes to it."""
    reading = query(nsqd=nsqd.address, columns="body,headers")
    in_time(lambda: reading.step() >= 0 and topic.encode() in nsqd.get("/stats?format=json"))
    (found,) = json.loads(nsqd.get(f"/stats?format=json&topic={topic}"))["topics"]
    assert "extend_support" not in found
    nsqd.publish(topic, [b"x"])
    until_rows(reading, 1)
    assert headers_of(reading) == [(b"x", {})]


def test_a_topic_that_is_given_headers_while_it_is_read(nsqd: NsqdProcess, topic: str, query: Callable[..., Query]):
    nsqd.post(f"/topic/create?topic={topic}&partition_num=1")
    nsqd.publish(topic, [b"before"])
    reading = query(nsqd=nsqd.address, columns="body,headers")
    until_rows(reading, 1)
    nsqd.post(f"/topic/meta/update?topic={topic}&upgradeext=true")
    headed(nsqd, topic, 1)
    until_rows(reading, 2)
    assert headers_of(reading) == [(b"1", {"n": "1"}), (b"before", {})]


@pytest.mark.parametrize("is_late", [False, True], ids=["both", "late"])
def test_nsqds_that_differ_in_headers_are_refused_by_name(
    nsqd: NsqdProcess, topic: str, query: Callable[..., Query], tmp_path: Path, is_late: bool
):
    """Also when the one with headers was away: what it has would be read without them, and nobody would know."""
    other = NsqdProcess(tmp_path / "other")
    try:
        other.post(f"/topic/create?topic={topic}&extend=true")
        nsqd.post(f"/topic/create?topic={topic}")
        if is_late:
            other.kill()
        reading = query(nsqd=f"{nsqd.address},{other.address}")
        if is_late:
            nsqd.publish(topic, [b"x"])
            until_rows(reading, 1)
            other.start()
        with pytest.raises(SpoolFailed, match="has headers on one of the nsqds that option nsqd names and none on"):
            in_time(lambda: reading.step() < 0)
    finally:
        other.stop()


@pytest.mark.parametrize("mode", ["spool", "direct"])
def test_an_nsqd_that_refuses_is_all_that_is_said(
    nsqd: NsqdProcess, topic: str, query: Callable[..., Query], caplog: pytest.LogCaptureFixture, mode: str
):
    """Not that the spool, at an address that no user knows, is no longer there, nor its token."""
    caplog.set_level(logging.WARNING)
    nsqd.post(f"/topic/create?topic={topic}&partition_num=1&orderedmulti=true")
    reading = query(mode, nsqd=nsqd.address)
    with pytest.raises(SpoolFailed, match="the spool does not run: E_SUB_ORDER_IS_MUST") as caught:
        reading.available_now()
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    assert reading.reader._place is not None
    assert reading.reader._place.address not in caplog.text
    assert "authSecret" not in caplog.text and "token" not in caplog.text
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert errors == [str(caught.value)], "one line, before Spark's traceback"


def test_spark_read_of_an_nsqd_without_offsets_says_what_to_use(plain: PlainNsqd, topic: str, tmp_path: Path):
    given = {"nsqd": plain.address, "topic": topic, "retries": "0"}
    for more in ({}, {"mode": "offset"}):
        with pytest.raises(
            NotByOffset, match=r"spark\.read never says .*use spark\.readStream with trigger\("
        ) as caught:
            NsqReader(SourceOptions.parse({**given, **more})).partitions()
        assert "\n" not in str(caught.value) and str(caught.value).count("mode=") == 0
    for more in ({"mode": "spool"}, {"deferred": "due"}):
        with pytest.raises(OptionError, match=r"spark\.read never says .*use spark\.readStream with trigger\("):
            NsqReader(SourceOptions.parse({**given, **more, "channel": "c", "spoolLocation": str(tmp_path / "s")}))
    with pytest.raises(NotByOffset, match="nsq_to_file writes what a channel delivers"):
        archive(tmp_path / "files", nsqd=plain.address, topic=topic)
    with pytest.raises(OptionError, match="nsq_to_file writes what a channel delivers"):
        archive(tmp_path / "files", mode="direct", channel="c", nsqd=plain.address, topic=topic)
