"""How far a query is behind, without Spark: in its progress, from its checkpoint, for Prometheus, as a channel."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.integration.daemons import PATIENCE_S
from tests.spark.fake_nsqd import FakeLog, FakeNsqd
from tests.spark.test_reader import ALL, ManualClock, first_end, label, numbered, options, text

from flintmq import cli
from flintmq.errors import OptionError
from flintmq.pipeline.doctor import checkpoint as doctor_of
from flintmq.pipeline.lag import lag
from flintmq.spark import retry
from flintmq.spark.broker import POOL
from flintmq.spark.errors import BadCheckpoint
from flintmq.spark.lag import NoCheckpoint
from flintmq.spark.options import SourceOptions
from flintmq.spark.stream_reader import NsqStreamReader
from flintmq.spark.watch import QueryWatch

STORED_NS = 1_700_000_000_000_000_000


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)


@pytest.fixture
def nsqd() -> Iterator[FakeNsqd]:
    with FakeNsqd() as fake:
        yield fake
    POOL._idle.clear()


def checkpoint(directory: Path, *micro_batches: list[dict | None], committed: int | None = None) -> Path:
    """Write what Spark writes: the ends of the sources of each micro-batch, and which of these are committed."""
    for name in ("offsets", "commits"):
        (directory / name).mkdir(parents=True)
    for number, sources in enumerate(micro_batches):
        lines = ["v1", '{"batchWatermarkMs":0}', *("-" if end is None else json.dumps(end) for end in sources)]
        (directory / "offsets" / str(number)).write_text("\n".join(lines))
        (directory / "offsets" / f".{number}.crc").write_bytes(b"crc")
        if committed is None or number <= committed:
            (directory / "commits" / str(number)).write_text('v1\n{"nextBatchWatermarkMs":0}')
    return directory


def test_in_the_progress(nsqd):
    log = nsqd.logs["t"] = [FakeLog(partition=number) for number in range(2)]
    log[0].append(numbered(0, 100), STORED_NS)
    log[0].append(numbered(0, 100), STORED_NS + 5_000_000_000)
    log[1].append(numbered(0, 10), STORED_NS)
    clock = ManualClock()
    clock.now_ns = STORED_NS + 60_000_000_000
    reader = NsqStreamReader(options(nsqd, maxMessagesPerTrigger="105", channel="c"), clock)
    assert reader.reportLatestOffset() is None
    names = [f"{one.partition}/{one.log_id}" for one in log]
    end = first_end(reader, reader.getDefaultReadLimit())
    assert end["t"] == {names[0]: 101, names[1]: 6}
    progress = reader.reportLatestOffset()
    assert progress is not None
    assert progress["t"] == {names[0]: 201, names[1]: 11} and progress["@channel"] == "c"
    assert progress["_lag"]["t"] == {
        names[0]: {"messages": 100, "seconds": 55.0},
        names[1]: {"messages": 5, "seconds": 60.0},
    }
    reader.latestOffset(end, ALL)
    assert reader.reportLatestOffset()["_lag"]["t"][names[0]] == {"messages": 0, "seconds": 0.0}  # type: ignore[index]
    pasted = SourceOptions.parse({"nsqd": nsqd.address, "topic": "t", "startingOffsets": text(progress)})
    assert first_end(NsqStreamReader(pasted))["_from"]["t"] == progress["t"]

    log[0].append(numbered(0, 7), STORED_NS)
    reader.latestOffset(end, ALL)
    nsqd.fail("FETCH", "E_FETCH_FAILED the disk", "close")
    reader._read = dict.fromkeys(reader._read, 1)
    lags = reader.reportLatestOffset()["_lag"]["t"]  # type: ignore[index]
    assert [lags[name] for name in names] == [{"messages": 207, "seconds": None}, {"messages": 10, "seconds": None}]


def test_the_channel_is_moved_when_the_next_micro_batch_is_asked_for(nsqd):
    log = nsqd.topic("t", numbered(0, 300))
    reader = NsqStreamReader(options(nsqd, channel="c", maxMessagesPerTrigger="100"))
    limit, start = reader.getDefaultReadLimit(), reader.initialOffset()
    seen = []
    for _ in range(5):
        start = reader.latestOffset(start, limit)
        seen.append(log.channels["c"])
    assert seen == [1, 101, 201, 301, 301], "at the latest when nothing more is new"
    asked = nsqd.count("CURSOR")
    reader.latestOffset(start, limit)
    reader.commit(start)
    assert nsqd.count("CURSOR") == asked, "where it is already it is not moved again"


def test_from_a_checkpoint(nsqd, tmp_path, capsys):
    log = nsqd.topic("t", numbered(0, 300))
    nsqd.topic("u", numbered(0, 40))
    nsqd.logs["t"].append(FakeLog(partition=1))
    nsqd.logs["t"][1].append(numbered(0, 9))
    ends = [{"_log": 2, "t": {label(nsqd): end}, "u": {label(nsqd, "u"): 41}} for end in (101, 201, 301)]
    place = checkpoint(tmp_path / "c", *([{"kafka": {"0": 5}}, None, end] for end in ends), committed=1)
    found = lag(place, nsqd=nsqd.address).partitions
    assert [(each.key.topic, each.key.partition, each.read, each.messages) for each in found] == [
        ("t", 0, 201, 100),
        ("t", 1, 1, 9),
        ("u", 0, 41, 0),
    ], "what is planned and not committed is not read; a partition that came since has nothing read"
    assert all(each.seconds is not None and each.seconds > 0 for each in found[:2]) and found[2].seconds == 0
    assert log.channels == {}

    words = ["pipeline", "lag", f"--checkpoint={place}", f"--nsqd={nsqd.address}"]
    assert cli.main([*words, "--json", "--update-channel=archive"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["topic"], row["nsqd"], row["messages"]) for row in rows] == [
        ("t", nsqd.address, 100),
        ("t", nsqd.address, 9),
        ("u", nsqd.address, 0),
    ]
    assert log.channels == {"archive": 201}
    assert cli.main(words) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["topic", "partition", "nsqd", "read", "end", "messages", "seconds"]
    assert table[1].split()[:6] == ["t", "0", nsqd.address, "201", "301", "100"]
    nsqd.logs["u"][0].log_id = "fffffffffffffff0"
    assert cli.main(words) == 1, "nobody serves what the query read"
    assert "(away)" in capsys.readouterr().out


def test_from_the_directory_of_a_job_or_a_pipeline(nsqd, tmp_path):
    nsqd.topic("t", numbered(0, 300))
    rows: list[dict | None] = [{"_log": 2, "t": {label(nsqd): 101}}]
    bad: list[dict | None] = [{"_log": 2, "t": {label(nsqd): 201}}]
    checkpoint(tmp_path / "job" / "rows", rows)
    checkpoint(tmp_path / "job" / "bad", bad)
    (tmp_path / "job" / "job.json").write_text("{}")
    (found,) = lag(tmp_path / "job", nsqd=nsqd.address).partitions
    assert found.read == 101, "that of the rows, not of those that do not fit"
    checkpoint(tmp_path / "plan" / "late", rows)
    assert [each.read for each in lag(tmp_path / "plan", nsqd=nsqd.address).partitions] == [101], "the only sink"
    checkpoint(tmp_path / "plan" / "out", bad)
    with pytest.raises(NoCheckpoint, match=f"several queries, name one: {tmp_path}/plan/late, {tmp_path}/plan/out"):
        lag(tmp_path / "plan", nsqd=nsqd.address)


def test_checkpoints_that_say_nothing(nsqd, tmp_path):
    for make, words in (
        (lambda place: None, "commits cannot be listed"),
        (lambda place: checkpoint(place, [{"_log": 2}], committed=-1), "no micro-batch is committed there"),
        (lambda place: checkpoint(place, [{"kafka": {"0": 5}}]), "reads nothing of format nsq"),
    ):
        place = tmp_path / words.replace(" ", "-")
        make(place)
        with pytest.raises(NoCheckpoint, match=words):
            lag(place, nsqd=nsqd.address)
    newer = checkpoint(tmp_path / "newer", [{"_log": 4, "t": {"0/00000000000000aa": 1}}])
    with pytest.raises(BadCheckpoint, match="form 4"):
        lag(newer, nsqd=nsqd.address)
    (newer / "offsets" / "0").write_text("v9\n{}\n")
    with pytest.raises(BadCheckpoint, match="v9"):
        lag(newer, nsqd=nsqd.address)


@pytest.mark.parametrize(
    ("left", "words"),
    [(0, "is empty. Restore it"), (1, "is cut off. Restore it"), (20, "cannot be read"), (-1, "cannot be read")],
)
@pytest.mark.parametrize("name", ["offsets", "commits"])
def test_a_checkpoint_that_lost_the_end_of_a_file(nsqd, tmp_path, name, left, words):
    place = checkpoint(
        tmp_path / "c", [{"_log": 2, "t": {"0/00000000000000aa": 1}}], [{"_log": 2, "t": {"0/00000000000000aa": 2}}]
    )
    (place / "metadata").write_text("{}")
    assert doctor_of(str(place)).state == "ok"
    path = place / name / "1"
    text = path.read_text()
    path.write_text(text[:left] if left != 1 else "v1\n")
    found = doctor_of(str(place))
    assert found.state == "problem" and str(path) in found.remedy and words in found.remedy
    if name == "offsets":
        with pytest.raises(NoCheckpoint, match=f"{path} {words}"):
            lag(place, nsqd=nsqd.address)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lag"], "give --checkpoint"),
        (["lag", "--checkpoint=x"], "give either --nsqd or --lookupd"),
        (["lag", "--checkpoint=x", "--nsqd=a:1", "--source-option=tls"], "--source-option tls is not NAME=VALUE"),
        (["lags"], "unknown job lags; there is archive, check, cluster, compact, "),
    ],
)
def test_wrong_words(words, said, capsys):
    assert cli.main(["pipeline", *words]) == 2
    assert said in capsys.readouterr().err


def test_help(capsys):
    assert cli.main(["pipeline"]) == 0
    assert "how far a query is behind" in capsys.readouterr().out
    assert cli.main(["pipeline", "lag", "--help"]) == 0
    assert "--update-channel" in capsys.readouterr().out


def progress(query: str, name: str | None, batch: int, end: object, latest: object) -> SimpleNamespace:
    source = SimpleNamespace(endOffset=end, latestOffset=latest)
    foreign = SimpleNamespace(endOffset="5", latestOffset=None)
    return SimpleNamespace(
        progress=SimpleNamespace(id=query, name=name, batchId=batch, numInputRows=7, sources=[foreign, source])
    )


def test_a_watch(nsqd, caplog):
    log = nsqd.topic("t", numbered(0, 100))
    watching = QueryWatch(options(nsqd, channel="c"), "127.0.0.1:0")

    def shown() -> list[str]:
        with urllib.request.urlopen(f"http://{watching.metrics_address}/metrics", timeout=PATIENCE_S) as answer:
            return [line for line in answer.read().decode().splitlines() if not line.startswith("#")]

    try:
        assert shown() == []
        end = text({"_log": 2, "t": {label(nsqd): 61}})
        latest = text(
            {
                "@channel": "c",
                "_log": 2,
                "t": {label(nsqd): 101},
                "_lag": {"t": {label(nsqd): {"messages": 40, "seconds": None}}},
            }
        )
        for batch in (3, 4):
            watching.onQueryProgress(progress("id-1", 'my "query"', batch, end, latest))
        assert log.channels == {"c": 61}
        name = 'query="my \\"query\\""'
        assert shown() == [
            f'flintmq_spark_lag_messages{{{name},topic="t",partition="0",log_id="{log.log_id}"}} 40',
            f"flintmq_spark_batch{{{name}}} 4",
            f"flintmq_spark_rows_total{{{name}}} 14",
        ]
        watching.onQueryProgress(progress("id-2", None, 1, '{"_log": 9, "t": {"x": 1}}', "{"))
        assert "the progress of a query is not understood" in caplog.text
        nsqd.close()
        watching.onQueryProgress(progress("id-1", None, 5, end.replace("61", "71"), latest))
        watching.onQueryTerminated(SimpleNamespace(id="id-1"))
        assert shown() == []
        with pytest.raises(OptionError, match="that can be listened on"):
            QueryWatch(None, watching.metrics_address)
    finally:
        watching.close()


def threads_of_watches() -> list[str]:
    return sorted(
        thread.name for thread in threading.enumerate() if thread.name in ("flintmq-metrics", "flintmq-report")
    )


def test_a_watch_that_is_refused_leaves_nothing_running():
    nsqadmin = "http://127.0.0.1:1"
    first = QueryWatch(None, "127.0.0.1:0", nsqadmin)
    try:
        running = threads_of_watches()
        said = (
            r"Address already in use; if an earlier watch\(\) of this driver listens there, call close\(\) on what it"
        )
        with pytest.raises(OptionError, match=said):
            QueryWatch(None, first.metrics_address, nsqadmin)
        assert threads_of_watches() == running
    finally:
        first.close()
    with pytest.raises(OptionError, match="a URL such as"):
        QueryWatch(None, first.metrics_address, "nsqadmin")
    assert len(threads_of_watches()) == len(running) - 2
    QueryWatch(None, first.metrics_address).close()  # which the refused one has not kept


def test_a_watch_follows_the_query_whose_channel_it_is(nsqd, caplog):
    """Another one that reads the topic moves nothing: retention would remove what the first has not read."""
    log = nsqd.topic("t", numbered(0, 100))
    watching = QueryWatch(options(nsqd, channel="c"))
    told: dict[str, dict] = {}
    watching._tell = lambda query, **what: told.update({query: what})  # type: ignore[method-assign]

    def reads(query: str, end: int, **latest: object) -> None:
        ends = text({"_log": 2, "t": {label(nsqd): end}})
        there = {"_log": 2, "t": {label(nsqd): 101}, "_lag": {}, **latest} if latest else None
        watching.onQueryProgress(progress(query, None, 1, ends, text(there) if there else None))

    reads("mine", 11, **{"@channel": "c"})
    for _ in range(2):
        reads("without", 101, _lag={})
        reads("its own", 101, **{"@channel": "d"})
    reads("repeats", 101)
    assert log.channels == {"c": 11}
    assert {query: what["channel"] for query, what in told.items() if what["channel"]} == {"mine": "c"}
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("query without reads t, and its source has no channel: channel c is moved only for")
    watching.close()
