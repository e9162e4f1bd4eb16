"""Replay: rows of Parquet files are in a topic once, in order and in their place, whenever it is killed."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.integration.daemons import PATIENCE_S
from tests.spark.fake_nsqd import FakeNsqd
from tests.spark.processes import NsqdProcess, environment
from tests.spark.test_lake import FORMATS, catalog_of, delta_table
from tests.spark.test_sink_once import Crash, Killed, bodies, stored, task, write

from flintmq import cli
from flintmq.client.core.sharding import partition_of
from flintmq.errors import NsqdError, OptionError
from flintmq.pipeline import parquet
from flintmq.pipeline import replay as module
from flintmq.pipeline.archive import archive
from flintmq.pipeline.compact import compact
from flintmq.pipeline.parquet import FilesError, Wanted
from flintmq.pipeline.replay import Replayed, replay
from flintmq.pipeline.runner import Runner
from flintmq.spark import placing, retry
from flintmq.spark.broker import POOL
from flintmq.spark.errors import SetupError
from flintmq.spark.lake.table import CATALOG_FILE, TABLE, TableError

HOUR_NS = 3_600_000_000_000
NOON_NS = 1_795_435_200_000_000_000  # 2026-11-23T12:00:00Z


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(placing, "_others", {})
    yield
    POOL._idle.clear()


@pytest.fixture(scope="module")
def archived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of two logs: 0 to 299 in one, 1000 to 1299 in the other, 100 in each of three hours."""
    directory = tmp_path_factory.mktemp("archive")
    with FakeNsqd() as fake:
        for first, log in zip((0, 1000), (fake.topic("a"), fake.topic("b")), strict=True):
            for hour in range(3):
                log.append(bodies(first + 100 * hour, first + 100 * hour + 100), NOON_NS + hour * HOUR_NS)
        archive(directory, nsqd=fake.address, topics="a,b", rows_per_file=60)
    POOL._idle.clear()
    return directory


def table(path: Path, **columns) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_an_archive_hour_by_hour_and_again(nsqd: NsqdProcess, topic: str, archived: Path):
    given: dict[str, Any] = {"nsqd": nsqd.address, "topic": topic}
    plan = replay(archived, dry_run=True, **given)
    assert (plan.rows, plan.files, plan.sources.total()) == (600, 12, 600)
    first = replay(archived, **given)
    assert (first.rows, first.found, first.is_whole, first.is_once) == (600, 0, True, True)
    wanted = [
        n for hour in range(3) for first in (0, 1000) for n in range(first + hour * 100, first + hour * 100 + 100)
    ]
    assert [int(body) for _, body in stored(nsqd.address, topic)] == wanted
    again = replay(archived, **given)
    assert (again.rows, again.found) == (600, 600)
    assert len(stored(nsqd.address, topic)) == 600
    assert replay(archived, **given, writeId="once-more").found == 0
    assert len(stored(nsqd.address, topic)) == 1200


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Wanted(since_ns=NOON_NS + HOUR_NS, until_ns=NOON_NS + 2 * HOUR_NS), [*range(100, 200), *range(1100, 1200)]),
        (Wanted(start_offset=96, end_offset=103, topic="b"), range(1095, 1102)),
        (Wanted(start_offset=300), [299, 1299]),
        (Wanted(until_ns=NOON_NS + 1), [*range(100), *range(1000, 1100)]),
        (Wanted(until_ns=NOON_NS), []),
        (Wanted(partitions=(1,)), []),
    ],
)
def test_ranges(nsqd: NsqdProcess, topic: str, archived: Path, wanted: Wanted, expected):
    done = replay(archived, wanted=wanted, nsqd=nsqd.address, topic=topic)
    assert done.rows == len(expected)
    if expected:
        assert [int(body) for _, body in stored(nsqd.address, topic)] == list(expected)
    elif wanted.partitions or wanted.until_ns == NOON_NS:
        assert done.files == 0, "no file is opened that cannot have such rows"


def test_the_hour_of_a_file_is_that_of_its_own_directories(
    nsqd: NsqdProcess, topic: str, archived: Path, tmp_path: Path
):
    """Not one of another archive that it lies in."""
    above = tmp_path / "dt=2020-01-01" / "hour=00"
    shutil.copytree(archived, above / "archive")
    given: dict[str, Any] = {"nsqd": nsqd.address, "topic": topic}
    for path in (above / "archive", tmp_path, above / "archive" / "dt=2026-11-23" / "hour=13"):
        done = replay(
            path, wanted=Wanted(since_ns=NOON_NS + HOUR_NS, until_ns=NOON_NS + 2 * HOUR_NS), **given, dry_run=True
        )
        assert (done.rows, done.files, done.is_whole) == (200, 4, True), path
    assert replay(above / "archive", wanted=Wanted(until_ns=NOON_NS), **given).files == 0


def test_keys_trace_ids_and_order(nsqd: NsqdProcess, topic: str, tmp_path: Path):
    nsqd.post(f"/topic/create?topic={topic}&partition_num=3")
    count = 1000
    trace = [(1 << 64) - 1 if n == 7 else n for n in range(count)]
    path = table(
        tmp_path / "rows.parquet",
        at=pa.array([(n * 7919) % count for n in range(count)], pa.int64()),
        who=[f"user-{n % 13}" for n in range(count)],
        trace_id=pa.array([each - (1 << 64) if each >= 1 << 63 else each for each in trace], pa.int64()),
        payload=bodies(0, count),
    )
    given: dict[str, Any] = {"nsqd": nsqd.address, "topic": topic, "body": "payload", "key": "who", "order_by": ["at"]}
    plan = replay(path, keep=["trace_id"], dry_run=True, **given)
    assert plan.topic == "3 partitions" and plan.targets.total() == count
    assert replay(path, keep=["trace_id"], **given).rows == count
    found = stored(nsqd.address, topic, "partition,trace_id,body")
    assert Counter(partition for partition, _, _ in found) == plan.targets
    for partition, trace_id, body in found:
        assert partition == partition_of(f"user-{int(body) % 13}", 3, "murmur3")
        assert trace_id % (1 << 64) == trace[int(body)]
    for each in range(3):
        order = [(int(body) * 7919) % count for partition, _, body in found if partition == each]
        assert order == sorted(order)
    assert replay(path, keep=["trace_id"], **given).found == count
    only = Wanted(trace_ids=((1 << 64) - 1, 9))
    assert replay(path, keep=["trace_id"], wanted=only, **given).rows == 2


def test_columns_that_are_dictionaries(nsqd: NsqdProcess, topic: str, tmp_path: Path):
    """As pandas writes its categories."""
    count = 30
    who = [f"user-{n * 7 % 10}" for n in range(count)]
    path = table(
        tmp_path / "rows.parquet",
        who=pa.array(who).dictionary_encode(),
        payload=pa.array(bodies(0, count)).dictionary_encode(),
    )
    given: dict[str, Any] = {"nsqd": nsqd.address, "topic": topic, "body": "payload", "key": "who", "order_by": ["who"]}
    nsqd.post(f"/topic/create?topic={topic}&partition_num=1")
    assert replay(path, **given).rows == count
    found = [f"user-{int(body) * 7 % 10}" for _, body in stored(nsqd.address, topic)]
    assert found == sorted(who)


def test_files_that_differ_in_what_is_not_used_are_sorted_together(nsqd: NsqdProcess, topic: str, tmp_path: Path):
    for number, kind in enumerate((pa.int32(), pa.int64())):
        table(tmp_path / f"{number}.parquet", at=[3 - number], offset=pa.array([number], kind), body=[b"%d" % number])
    assert replay(tmp_path, nsqd=nsqd.address, topic=topic, order_by=["at"]).rows == 2
    assert [body for _, body in stored(nsqd.address, topic)] == [b"1", b"0"]


@pytest.mark.parametrize(
    "column",
    [
        pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"n":1}', '{"n":2}'])),
        pa.array(['{"n":1}', '{"n":2}'], pa.string_view()),
        pa.array([b'{"n":1}', b'{"n":2}'], pa.binary_view()),
    ],
    ids=["as DuckDB writes JSON", "text in views", "bytes in views"],
)
def test_forms_of_text_and_bytes(nsqd: NsqdProcess, topic: str, tmp_path: Path, column: pa.Array):
    nsqd.post(f"/topic/create?topic={topic}&partition_num=1")
    path = table(tmp_path / "rows.parquet", body=column, key=column)
    assert replay(path, nsqd=nsqd.address, topic=topic, key="key").rows == 2
    assert sorted(body for _, body in stored(nsqd.address, topic)) == [b'{"n":1}', b'{"n":2}']
    assert replay(path, nsqd=nsqd.address, topic=f"{topic}-2", order_by=["body"]).rows == 2


def test_text_of_several_programs_is_sorted_together(nsqd: NsqdProcess, topic: str, tmp_path: Path):
    """Pandas, Polars and DuckDB each have their own form of it."""
    for number, (text, kind) in enumerate(((pa.string(), pa.binary()), (pa.large_string(), pa.large_binary()))):
        names = pa.array(["b" if number else "a", "d" if number else "c"], text)
        table(tmp_path / f"{number}.parquet", at=names, body=pa.array([b"%d" % number] * 2, kind))
    table(tmp_path / "2.parquet", at=pa.array(["bb"]).dictionary_encode(), body=pa.array([b"2"]))
    assert replay(tmp_path, nsqd=nsqd.address, topic=topic, order_by=["at"]).rows == 5
    assert [body for _, body in stored(nsqd.address, topic)] == [b"0", b"1", b"2", b"0", b"1"]


def test_columns_that_cannot_be_sorted_or_told_apart(nsqd: NsqdProcess, topic: str, tmp_path: Path):
    given: dict[str, Any] = {"nsqd": nsqd.address, "topic": topic, "dry_run": True}
    listed = table(tmp_path / "listed.parquet", at=pa.array([[1], [2]]), body=bodies(0, 2))
    with pytest.raises(
        FilesError, match=r"listed\.parquet: its at is list<.*>, which has no order: name another column"
    ):
        replay(listed, order_by=["at"], **given)
    twice = pa.table([bodies(0, 2), bodies(0, 2)], names=["body", "body"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(FilesError, match=r"twice\.parquet: 2 of its columns are named body: rename one"):
        replay(tmp_path / "twice.parquet", **given)


@pytest.mark.parametrize("partitions", [0, 3])
def test_killed_between_any_two_calls(nsqd: NsqdProcess, topic: str, archived: Path, monkeypatch, partitions):
    monkeypatch.setattr(parquet, "BATCH_ROWS", 25)
    crash = Crash(monkeypatch)
    at = kills = 1
    while True:
        name = f"{topic}-{at}"
        nsqd.post(f"/topic/create?topic={name}" + (f"&partition_num={partitions}" if partitions else ""))
        given: dict[str, Any] = {
            "nsqd": nsqd.address,
            "topic": name,
            "batchMessages": "10",
            "key": "offset" if partitions else "",
        }
        crash.count, crash.at = 0, at
        try:
            replay(archived, wanted=Wanted(topic="a"), **given)
            break
        except Killed:
            kills += 1
        crash.at = -1
        POOL._idle.clear()
        done = replay(archived, wanted=Wanted(topic="a"), rate=1_000_000, **given)
        assert done.rows == 300
        assert Counter(body for _, body in stored(nsqd.address, name)) == Counter(bodies(0, 300)), f"killed at {at}"
        at += 1 if at < 8 else 23
    assert kills > 8


def test_as_a_command_at_a_rate_ended_by_a_signal(nsqd: NsqdProcess, topic: str, archived: Path):
    flags = [f"--path={archived}", f"--to-topic={topic}", f"--nsqd={nsqd.address}", "--progress=json"]
    command = [sys.executable, "-m", "flintmq", "pipeline", "replay", *flags]
    process = subprocess.Popen(
        [*command, "--rate=100"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    try:
        assert process.stderr is not None
        seen = [json.loads(next(line for line in process.stderr if json.loads(line)["rows"] >= 20))]
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert output.endswith("stopped, run it again to go on\n")
    assert {"rows", "found", "skipped", "files", "lag", "batch", "rows_per_s", "eta_s"} <= seen[0].keys()
    before = len(stored(nsqd.address, topic))
    assert 20 <= before < 600
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=PATIENCE_S, env=environment())
    row = json.loads(done.stdout)
    assert (row["rows"], row["found"], row["whole"], row["once"]) == (600, before, True, True)
    assert len(stored(nsqd.address, topic)) == 600


def test_a_rate_is_kept(nsqd: NsqdProcess, topic: str, archived: Path):
    began_s = time.monotonic()
    replay(archived, wanted=Wanted(start_offset=1, end_offset=21), rate=50, nsqd=nsqd.address, topic=topic)
    assert time.monotonic() - began_s >= 0.7, "40 messages, 50 a second"


def test_rows_that_cannot_be_published_are_named(nsqd: NsqdProcess, topic: str, tmp_path: Path):
    given: dict[str, Any] = {"nsqd": nsqd.address, "topic": topic, "maxMessageSize": "10"}
    for body, said in ((None, "is null"), (b"", "has 0 bytes, a message has 1 to 10"), (b"x" * 11, "has 11 bytes")):
        path = table(
            tmp_path / "bad.parquet",
            body=pa.array([b"a", body, b"c"], pa.binary()),
            topic=["t"] * 3,
            partition=[2] * 3,
            offset=[40, 41, 42],
        )
        with pytest.raises(
            FilesError, match=r"bad\.parquet, row 1 \(topic t, partition 2, offset 41\): its body"
        ) as told:
            replay(path, **given)
        assert said in str(told.value)
        done = replay(path, skip_bad_rows=True, **given, writeId=f"w{len(body or b'')}-{body is None}")
        assert (done.rows, done.skipped) == (2, 1)
    assert [body for _, body in stored(nsqd.address, topic)] == [b"a", b"c"] * 3


@pytest.mark.parametrize("more", [["--bad-rows=skip"], ["--to-option=oversize=drop"]])
def test_a_dry_run_says_what_would_be_skipped(nsqd: NsqdProcess, topic: str, tmp_path: Path, capsys, more: list[str]):
    path = table(tmp_path / "bad.parquet", body=[b"a", b"x" * 11, b"c"])
    words = ["pipeline", "replay", f"--path={path}", f"--nsqd={nsqd.address}", f"--to-topic={topic}", *more]
    words += ["--to-option=maxMessageSize=10"]
    assert cli.main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("), 1 would be skipped")
    assert cli.main([*words, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["skipped"] == 1
    assert cli.main(words) == 0
    assert capsys.readouterr().out == f"2 rows of 1 files are in {topic}, 0 of them were there already, 1 skipped\n"


def test_wrong_files_and_columns(tmp_path: Path):
    given: dict[str, Any] = {"nsqd": "127.0.0.1:1", "topic": "t"}
    with pytest.raises(FilesError, match="there are no Parquet files"):
        replay(tmp_path, **given)
    for missing in (tmp_path / "nowhere", tmp_path / "nowhere" / "x.parquet"):
        with pytest.raises(FilesError, match=f"^{missing}: it does not exist$"):
            replay(missing, **given)
    (tmp_path / "x.parquet").write_bytes(b"no such thing")
    with pytest.raises(FilesError, match="it is no Parquet file"):
        replay(tmp_path, **given)
    path = table(tmp_path / "x.parquet", body=["a"], when=[1.5])
    for more, said in (
        ({"body": "payload"}, r"column='payload' is not allowed; .*x.parquet has body, when"),
        ({"body": "when"}, "column='when double' is not allowed; .* it cannot be the body"),
        ({"key": "when"}, "it cannot be the key"),
        ({"wanted": Wanted(start_offset=1)}, "column='offset' is not allowed"),
        ({"keep": ["attempts"]}, "choose from partition, trace_id, headers"),
        ({"key": "body", "keep": ["partition"]}, "each says where a row goes"),
        ({"topic": ""}, "topic"),
    ):
        with pytest.raises(OptionError, match=said):
            replay(path, **{**given, **more})


def test_headers_of_an_archive_are_the_json_they_were_where_it_has_that(nsqd: NsqdProcess, topic: str, tmp_path: Path):
    texts = ['{"n":5,"o":{"a":[1, 2.0]}}', "{}", '{"n":"5"}']
    for name in ("", "-json", "-text"):
        nsqd.post(f"/topic/create?topic={topic}{name}&extend=true")
    given: dict[str, Any] = {"nsqd": nsqd.address}
    write(nsqd.address, topic, {"body": bodies(0, 3), "headers_json": texts}, task())
    columns = "topic,partition,log_id,offset,timestamp,body"
    both = f"{columns},headers,headers_json"
    archive(tmp_path / "both", **given, topic=topic, columns=both)
    archive(tmp_path / "text", **given, topic=topic, columns=f"{columns},headers")
    assert replay(tmp_path / "both", **given, topic=f"{topic}-json", keep=["headers"]).rows == 3
    assert [text for (text,) in stored(nsqd.address, f"{topic}-json", "headers_json")] == texts
    replay(tmp_path / "text", **given, topic=f"{topic}-text", keep=["headers"])
    assert [text for (text,) in stored(nsqd.address, f"{topic}-text", "headers_json")] == [
        '{"n":"5","o":"{\\"a\\":[1, 2.0]}"}', "{}", '{"n":"5"}',
    ]  # fmt: skip
    with pytest.raises(FilesError, match=r"that of .* is not read: sort them apart"):
        replay(tmp_path, **given, topic=f"{topic}-json", keep=["headers"], order_by=["offset"])


def test_a_dry_run_refuses_what_the_run_refuses(nsqd: NsqdProcess, topic: str, tmp_path: Path):
    """And nothing else: what it lets pass is published."""
    path = table(
        tmp_path / "x.parquet",
        body=["a", "b"],
        partition=pa.array([0, 1], pa.int32()),
        key=["k", None],
        trace_id=pa.array([1, 2], pa.int64()),
        headers=['{"a": "b"}', None],
    )
    worse = table(tmp_path / "worse.parquet", body=["a"], headers=["no JSON"], partition=pa.array([-1], pa.int32()))
    plain, parted, headed = (f"{topic}-{kind}" for kind in ("plain", "parted", "headed"))
    nsqd.post(f"/topic/create?topic={plain}")
    nsqd.post(f"/topic/create?topic={parted}&partition_num=2")
    nsqd.post(f"/topic/create?topic={headed}&extend=true")
    tried: list[tuple[str, Path, dict[str, Any], str]] = [
        (plain, path, {"keep": ["partition"]}, f"keep='partition' is not .*{plain} has no partitions"),
        (plain, path, {"key": "key"}, f"key='key' is not allowed; topic {plain} has no partitions"),
        (plain, path, {"keep": ["trace_id"]}, f"keep='trace_id' is not allowed; topic {plain} has no partitions"),
        (plain, path, {"keep": ["headers"]}, f"keep='headers' is not allowed; topic {plain} has no headers"),
        (parted, path, {"keep": ["headers"]}, f"topic {parted} has no headers"),
        (f"{topic}-none", path, {"keep": ["headers"]}, f"topic {topic}-none has no headers"),
        (headed, worse, {"keep": ["headers"]}, "keep='headers' is not allowed; .* row 0 of its batch"),
        (parted, worse, {"keep": ["partition"]}, "the files have partition -1, topic"),
        (plain, path, {}, ""),
        (parted, path, {"keep": ["partition", "trace_id"]}, ""),
        (parted, path, {"key": "key"}, ""),
        (headed, path, {"keep": ["headers", "trace_id"]}, ""),
    ]
    for number, (name, file, more, said) in enumerate(tried):
        given: dict[str, Any] = {"nsqd": nsqd.address, "topic": name, "write_id": f"w{number}", **more}
        if said:
            with pytest.raises((OptionError, FilesError), match=said):
                replay(file, dry_run=True, **given)
            with pytest.raises((OptionError, FilesError, NsqdError)):
                replay(file, **given)
        else:
            assert replay(file, dry_run=True, **given).rows == replay(file, **given).rows == 2, given


def test_a_dry_run_for_an_nsqd_of_somebody_else(tmp_path: Path):
    path = table(tmp_path / "x.parquet", body=["a"], key=["k"], trace_id=pa.array([1], pa.int64()))
    tried: list[tuple[dict[str, Any], str]] = [
        ({"key": "key"}, "key='key' is not allowed; only FlintMQ's nsqd"),
        ({"keep": ["trace_id"]}, "keep='trace_id' is not allowed; only FlintMQ's nsqd"),
        ({"delivery": "once"}, "delivery='once' is not allowed"),
    ]
    with FakeNsqd() as other:
        given: dict[str, Any] = {"nsqd": other.address, "topic": "t"}
        assert replay(path, dry_run=True, **given).topic == "of an nsqd that is not FlintMQ's"
        for more, said in tried:
            with pytest.raises(OptionError, match=said):
                replay(path, dry_run=True, **given, **more)
            with pytest.raises(OptionError):
                replay(path, **given, **more)


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_topic_that_no_file_has(nsqd: NsqdProcess, topic: str, archived: Path, tmp_path: Path, capsys, more):
    """It is no success with nothing; a topic that is there and has no row of that time is."""
    words = ["pipeline", "replay", f"--nsqd={nsqd.address}", f"--to-topic={topic}", *more]
    table(tmp_path / "x.parquet", body=["a", "b"], topic=["c", "d"])
    for path, said in ((archived, "there is a, b"), (tmp_path, "there is c, d")):
        assert cli.main([*words, f"--path={path}", "--from-topic=typo"]) == 1
        assert f"flintmq pipeline: {path}: no row is of topic 'typo'; {said}" in capsys.readouterr().err
    assert cli.main([*words, f"--path={archived}", "--from-topic=a", "--until=2020-01-01"]) == 0
    assert "0 rows" in capsys.readouterr().out


def test_files_of_one_name_and_size(nsqd: NsqdProcess, topic: str, tmp_path: Path):
    """Somebody's directories have files of the same name; what is in them tells them apart, and not their sizes."""
    given: dict[str, Any] = {"nsqd": nsqd.address, "topic": topic}
    sales = tmp_path / "sales"
    for country in ("DE", "FR"):
        (sales / f"country={country}").mkdir(parents=True)
        table(sales / f"country={country}" / "part-0.parquet", body=[f"{country}-{n:06d}" for n in range(100)])
    assert len({path.stat().st_size for path in sales.glob("*/*")}) == 1
    done = replay(sales, **given)
    assert (done.rows, done.files, done.found) == (200, 2, 0)
    expected = Counter(b"%s-%06d" % (country, n) for country in (b"DE", b"FR") for n in range(100))
    assert Counter(body for _, body in stored(nsqd.address, topic)) == expected
    assert replay(sales, **given).found == 200
    path = sales / "country=DE" / "part-0.parquet"
    size = path.stat().st_size
    table(path, body=[f"XX-{n:06d}" for n in range(100)])
    assert path.stat().st_size == size
    done = replay(sales, **given)
    assert (done.rows, done.found) == (200, 100)
    assert Counter(body for _, body in stored(nsqd.address, topic)) == expected + Counter(
        b"XX-%06d" % n for n in range(100)
    )


def test_moved_to_another_directory(nsqd: NsqdProcess, topic: str, archived: Path, tmp_path: Path):
    """An archive is the same wherever it lies, as its names have the ids of logs; two exports of somebody are not."""
    given: dict[str, Any] = {"nsqd": nsqd.address, "topic": topic}
    assert replay(archived, **given).found == 0
    shutil.copytree(archived, tmp_path / "archive")
    assert replay(tmp_path / "archive", **given).found == 600
    for day in ("monday", "tuesday"):
        (tmp_path / day).mkdir()
        table(tmp_path / day / "part-0.parquet", body=["nothing happened"])
        assert (replay(tmp_path / day, **given).found, replay(tmp_path / day, **given).found) == (0, 1)
    assert len(stored(nsqd.address, topic)) == 602
    for day, found in (("monday", 0), ("tuesday", 1)):
        assert replay(tmp_path / day, **given, writeId="moved").found == found


@pytest.mark.parametrize("kind", FORMATS)
def test_a_table_as_it_is_now(nsqd: NsqdProcess, topic: str, tmp_path: Path, monkeypatch, kind: str):
    """Files that no transaction names any more, or never did, are no part of it."""
    given: dict[str, Any] = {"nsqd": nsqd.address, "topic": topic}
    directory = tmp_path / "below" / "a table"
    with FakeNsqd() as fake:
        log = fake.topic("t")
        for first in range(0, 100, 20):
            log.append(bodies(first, first + 20), NOON_NS)
            archive(directory, nsqd=fake.address, topic="t", format=kind)
        assert compact(directory).before == 5
        log.append(bodies(100, 120), NOON_NS)
        archive(directory, nsqd=fake.address, topic="t", format=kind)
    left = sorted(directory.glob("data/**/t-*.parquet"))
    assert len(left) == 6, "what was compacted is still there"
    done = replay(directory, **given)
    assert (done.rows, done.files, done.found) == (120, 2, 0)
    assert Counter(body for _, body in stored(nsqd.address, topic)) == Counter(bodies(0, 120))
    assert [replay(path, dry_run=True, **given).rows for path in (left[-1], left[-1].parent)] == [20, 20]
    with pytest.raises(FilesError, match=f"the table of the format {kind} at .* has no files here, as it is now"):
        replay(left[0], **given)
    with pytest.raises(FilesError, match=f"a table is a table of the format {kind}: give it, and what is beside it"):
        replay(tmp_path, **given)
    if kind == "delta":
        shutil.copytree(directory, tmp_path / "moved")
        assert replay(tmp_path / "moved", **given).found == 120
        delta_table(directory).delete("offset <= 100")
    else:
        catalog_of(directory).load_table(TABLE).delete("offset <= 100")
    assert (replay(directory, **given).rows, len(stored(nsqd.address, topic))) == (20, 120)
    with monkeypatch.context() as meanwhile:
        meanwhile.setitem(sys.modules, {"delta": "deltalake", "iceberg": "pyiceberg"}[kind], None)
        with pytest.raises(
            SetupError, match=rf"a table is a table of the format {kind}, .*pip install 'flintmq\[{kind}"
        ):
            replay(directory, **given)


def test_tables_that_their_files_do_not_tell(tmp_path: Path):
    given: dict[str, Any] = {"nsqd": "127.0.0.1:1", "topic": "t"}
    with FakeNsqd() as fake:
        fake.topic("t").append(bodies(0, 20), NOON_NS)
        for kind in FORMATS:
            archive(tmp_path / kind, nsqd=fake.address, topic="t", format=kind)
    with catalog_of(tmp_path / "iceberg").load_table(TABLE).update_schema() as change:
        change.rename_column("body", "text")
    with pytest.raises(
        TableError, match=r"a column was renamed: body, text\): write its rows to Parquet files elsewhere"
    ):
        replay(tmp_path / "iceberg", **given)
    (tmp_path / "iceberg" / CATALOG_FILE).unlink()
    with pytest.raises(TableError, match="only the catalog of an Iceberg table knows its files, and it is not there"):
        replay(tmp_path / "iceberg", **given)
    first = min((tmp_path / "delta" / "_delta_log").glob("*.json"))
    plain = '"configuration":{}'
    assert plain in first.read_text()
    mapped = first.read_text().replace(plain, '"configuration":{"delta.columnMapping.mode":"name"}')
    first.write_text(mapped.replace('"minReaderVersion":1', '"minReaderVersion":2'))
    with pytest.raises(TableError, match="delta: "):
        replay(tmp_path / "delta", **given)


def test_nothing_is_published_before_every_file_was_looked_at(nsqd: NsqdProcess, topic: str, tmp_path: Path):
    given: dict[str, Any] = {"nsqd": nsqd.address, "topic": topic}
    first = table(tmp_path / "1.parquet", body=["a", "b"], offset=[1, 2], trace_id=[1, 2])
    bad = tmp_path / "2.parquet"
    only = {"wanted": Wanted(start_offset=1)}
    for columns, more, said in (
        ({"body": [1, 2]}, {}, r"column='body int64' is not allowed; .*2\.parquet: it cannot be the body"),
        ({"text": ["a"]}, {}, r"column='body' is not allowed; .*2\.parquet has text"),
        ({"body": ["c"], "trace_id": ["x"]}, {"keep": ["trace_id"]}, r"2\.parquet: it cannot be the trace_id"),
        ({"body": ["c"], "offset": ["x"]}, only, r"2\.parquet: it has to be whole numbers"),
        (
            {"body": ["c"], "offset": ["x"]},
            {"order_by": ["offset"]},
            r"2\.parquet: its offset is string, that of .*1\.p",
        ),
        ({"body": ["c"], "k": ["x"]}, {"key": "k"}, r"column='k' is not allowed; .*1\.parquet has body"),
    ):
        table(bad, **columns)
        with pytest.raises((FilesError, OptionError), match=said):
            replay(tmp_path, **given, **more)
    for content, said in ((b"", "it is no Parquet file"), (b"PAR1" + b"x" * 50 + b"PAR1", "it is no Parquet file")):
        bad.write_bytes(content)
        with pytest.raises(FilesError, match=rf"2\.parquet: {said}: .*; restore it, or move it away"):
            replay(tmp_path, **given)
    bad.unlink()
    assert replay(tmp_path, **given).found == 0
    damaged = table(bad, body=["c" * 1000] * 10, offset=range(10), trace_id=range(10))
    content = damaged.read_bytes()
    damaged.write_bytes(b"PAR1" + b"\xff" * 40 + content[44:])
    with pytest.raises(FilesError, match=r"2\.parquet: it cannot be read: .*; restore it, or move it away"):
        replay(tmp_path, **given)
    assert first.exists() and [body for _, body in stored(nsqd.address, topic)] == [b"a", b"b"]


def test_too_long_rows_are_dropped_where_the_option_says_so(nsqd: NsqdProcess, topic: str, tmp_path: Path):
    given: dict[str, Any] = {"nsqd": nsqd.address, "topic": topic, "maxMessageSize": "10", "oversize": "drop"}
    path = table(tmp_path / "x.parquet", body=["a", "x" * 11, "c"])
    for found in (0, 2):
        done = replay(path, **given)
        assert (done.rows, done.skipped, done.found) == (2, 1, found)
    assert [body for _, body in stored(nsqd.address, topic)] == [b"a", b"c"]
    table(path, body=["a", "x" * 11, None])
    with pytest.raises(FilesError, match=r"row 2: its body is null"):
        replay(path, **given)
    table(path, body=["a", "x" * 11, ""])
    assert replay(path, skip_bad_rows=True, **given).skipped == 2


def test_times_of_any_unit_and_trace_ids_without_a_sign(nsqd: NsqdProcess, topic: str, tmp_path: Path):
    nsqd.post(f"/topic/create?topic={topic}&partition_num=1")
    given: dict[str, Any] = {"nsqd": nsqd.address, "topic": topic}
    for unit, per in (("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000), ("ns", 1)):
        times = [NOON_NS // per + n for n in range(4)]
        path = table(tmp_path / f"{unit}.parquet", body=list("abcd"), timestamp=pa.array(times, pa.timestamp(unit)))
        between = Wanted(since_ns=NOON_NS + per, until_ns=NOON_NS + 3 * per)
        assert replay(path, wanted=between, **given).rows == 2, unit
        assert replay(path, wanted=Wanted(since_ns=1 << 80), **given).rows == 0, "later than the unit can say"
    ids = [(1 << 63) + 5, 1, (1 << 64) - 1]
    path = table(tmp_path / "ids.parquet", body=["x", "y", "z"], trace_id=pa.array(ids, pa.uint64()))
    done = replay(path, keep=["trace_id"], wanted=Wanted(trace_ids=(ids[0], ids[2])), **given)
    assert done.rows == 2
    found = stored(nsqd.address, topic, "trace_id,body")
    assert [(trace_id % (1 << 64), body) for trace_id, body in found[-2:]] == [(ids[0], b"x"), (ids[2], b"z")]


def test_too_much_at_once(nsqd: NsqdProcess, topic: str, archived: Path, monkeypatch):
    monkeypatch.setattr(module, "PIECES_MAX", 11)
    with pytest.raises(FilesError, match="12 files at once; nsqd remembers 11"):
        replay(archived, nsqd=nsqd.address, topic=topic)
    monkeypatch.setattr(module, "SORTED_BYTES_MAX", 1000)
    with pytest.raises(FilesError, match="to sort: replay less at a time"):
        replay(archived, order_by=["offset"], nsqd=nsqd.address, topic=topic)


def test_stopping_between_rows(nsqd: NsqdProcess, topic: str, archived: Path, monkeypatch):
    monkeypatch.setattr(parquet, "BATCH_ROWS", 7)
    stop = threading.Event()
    given: dict[str, Any] = {"nsqd": nsqd.address, "topic": topic}

    def look(work: Replayed) -> None:
        if work.rows > 100:
            stop.set()

    done = replay(archived, runner=Runner(look, stop), **given)
    assert 100 < done.rows < 600 and not done.is_whole
    assert replay(archived, **given).is_whole
    assert len(stored(nsqd.address, topic)) == 600


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_an_end_before_the_start(archived: Path, capsys, more):
    words = ["pipeline", "replay", f"--path={archived}", "--nsqd=127.0.0.1:1", "--to-topic=t", *more]
    for bounds, said in (
        (
            ["--since=2026-11-24", "--until=2026-11-23"],
            "until='1795392000000 ms since 1970' is not allowed; since is later, 1795478400000 ms",
        ),
        (["--start-offset=5", "--end-offset=4"], "end_offset=4 is not allowed; it has to be above start_offset, 5"),
        (["--start-offset=5", "--end-offset=5"], "end_offset=5 is not allowed; it has to be above start_offset, 5"),
    ):
        assert cli.main([*words, *bounds]) != 0
        assert said in capsys.readouterr().err


def test_wrong_words(capsys):
    for words, said in (
        ([], "give --path"),
        (["--path=x"], "give --to-topic"),
        (["--path=x", "--to-topic=t"], "give either --nsqd or --lookupd"),
        (["--path=x", "--to-topic=t", "--nsqd=a:1", "--since=noon"], "--since noon is no time"),
        (["--path=x", "--to-topic=t", "--nsqd=a:1", "--trace-id=-1"], "--trace-id -1 is not a whole number"),
        (["--path=s3://x/y", "--to-topic=t", "--nsqd=a:1"], "s3://x/y is a URL"),
        (["--path=x", "--to-topic=t", "--nsqd=a:1", "--keep=all"], "it must be one of: partition, trace_id, headers"),
    ):
        assert cli.main(["pipeline", "replay", *words]) == 2, words
        assert said in capsys.readouterr().err
