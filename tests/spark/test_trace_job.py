"""The trace job: lives of messages out of events, made up ones and those of a real nsqd."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.integration.daemons import PATIENCE_S, SPARK_PATIENCE_S
from tests.spark.processes import NsqdProcess
from tests.spark.test_sink_once import stored

from flintmq import sync
from flintmq.errors import FlintError, UsageError
from flintmq.options import resolve
from flintmq.pipeline import lives, trace
from flintmq.pipeline.parquet import FilesError
from flintmq.pipeline.runner import Runner

pytestmark = [pytest.mark.spark, pytest.mark.timeout(2 * SPARK_PATIENCE_S)]

START_NS = 1_795_435_200_000_000_000
MS = 1_000_000


@pytest.fixture
def job(spark: Any, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Runs the job in the session of the tests; returns its lines."""

    def run(*words: str) -> list[str]:
        capsys.readouterr()
        trace._run(resolve(trace.TraceOptions, words, {}).options, Runner(spark=spark))
        return capsys.readouterr().out.splitlines()

    return run


def event(at_ms: float, action: str, msgid: int, channel: str | None = "c", **more: object) -> dict[str, object]:
    given = {"topic": "orders", "msgid": msgid, "traceid": 0, "partition": 0, "message_id": f"{msgid:016x}"}
    row = {"timestamp": START_NS + int(at_ms * MS), "action": action, **given, "node": "n:4150", **more}
    return row | ({} if action == "PUB" or channel is None else {"channel": channel, "attempts": 1})


def events() -> Iterator[dict[str, object]]:
    yield event(0, "PUB", 1)
    yield event(2, "START", 1)
    yield event(5, "FIN", 1)
    yield event(10, "PUB", 2, traceid=(1 << 64) - 1)
    yield event(11, "START", 2, traceid=(1 << 64) - 1)
    yield event(12, "REQ", 2, traceid=(1 << 64) - 1)
    yield event(21, "START", 2, traceid=(1 << 64) - 1)
    yield event(41, "FIN", 2, traceid=(1 << 64) - 1)
    yield event(50, "PUB", 3)  # never sent, although what came after it was
    yield event(55, "PUB", 9, delay_ms=60_000)  # not due yet
    yield event(56, "PUB", 10, delay_ms=1_000)
    yield event(1055, "START", 10)  # its delay began before it was stored
    yield event(1060, "FIN", 10)
    yield event(60, "PUB", 4)
    yield event(61, "START", 4)  # and nothing more
    yield event(62, "PUB", 5)
    yield event(63, "START", 5)
    yield event(70, "TIMEOUT", 5)
    yield event(71, "DEAD_LETTER", 5)
    yield event(5000, "PUB", 6)
    yield event(5001, "START", 6)
    yield event(5002, "PUB", 7)  # not yet sent
    yield event(5003, "DROPPED", 0, None, count=4)
    yield event(9, "PUB", 1, node="other:4150")  # a plain topic's message 1 of another nsqd, on no channel there
    yield event(1, "PUB", 8, topic="lonely")


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    bodies = [json.dumps(each).encode() for each in events()] + [b"no event", b'{"timestamp": "yesterday"}', b"[]"]
    return archived(tmp_path_factory.mktemp("traced"), bodies)


def archived(directory: Path, bodies: list[bytes]) -> Path:
    pq.write_table(
        pa.table(
            {
                "topic": ["nsqd_trace"] * len(bodies),
                "partition": pa.array([0] * len(bodies), pa.int32()),
                "offset": pa.array(range(1, len(bodies) + 1), pa.int64()),
                "timestamp": pa.array([START_NS // 1000] * len(bodies), pa.timestamp("us", tz="UTC")),
                "body": pa.array(bodies, pa.binary()),
            }
        ),
        directory / "events.parquet",
    )
    return directory


def test_every_life_in_figures_as_files_and_as_a_report(job, traced: Path, tmp_path: Path):
    pytest.importorskip("matplotlib")
    lines = job(
        f"--path={traced}", "--format=json", "--stuck-after=1s", f"--to={tmp_path / 'lives'}",
        f"--report={tmp_path / 'report'}",
    )  # fmt: skip
    lonely, orders, bad, dropped = map(json.loads, lines)
    assert (lonely["topic"], lonely["channel"], lonely["messages"], lonely["waiting"]) == ("lonely", None, 1, 1)
    counts = {name: orders[name] for name in (*lives.STATES, "messages", "repeated", "requeued", "timed_out")}
    assert counts == {
        "finished": 3, "in_flight": 1, "waiting": 2, "deferred": 1, "stuck": 1, "lost": 1, "unknown": 0,
        "dead_letter": 1, "expired": 0, "messages": 10, "repeated": 1, "requeued": 1, "timed_out": 1,
    }  # fmt: skip
    assert orders["total_ms"]["max"] == 31 and orders["process_ms"]["max"] == 20 and orders["repeats_ms"]["p50"] == 10
    wait = orders["wait_ms"]
    assert wait["p50"] == 1 and wait["max"] == 2 and 1.9 < wait["p99"] < wait["p999"] < 2
    assert bad["note"].startswith("3 rows are no events of a trace, the first of them at topic nsqd_trace, partition 0")
    assert "offset 26" in bad["note"]
    assert dropped["note"].startswith("4 events were not recorded")

    by_id = {(row["msgid"], row["node"], row["channel"]): row for row in pq.read_table(tmp_path / "lives").to_pylist()}
    again = by_id[2, "n:4150", "c"]
    assert (again["wait_ms"], again["repeats_ms"], again["process_ms"], again["total_ms"]) == (1, 10, 20, 31)
    assert int(again["trace_id"]) == (1 << 64) - 1 and again["deliveries"] == 2 and again["last_action"] == "FIN"
    assert (by_id[10, "n:4150", "c"]["wait_ms"], by_id[10, "n:4150", "c"]["total_ms"]) == (0, 5)
    assert by_id[3, "n:4150", "c"]["state"] == "lost" and by_id[4, "n:4150", "c"]["state"] == "stuck"

    page = (tmp_path / "report" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3 and "http" not in page, "a file that needs no other one"
    assert "4 events were not recorded" in page and "0000000000000003" in page
    pictures = sorted(path.name for path in (tmp_path / "report").glob("*.png"))
    assert pictures == ["distribution.png", "latency.png", "over-time.png"]
    assert all((tmp_path / "report" / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    with pytest.raises(UsageError, match="is there already, and not empty"):
        job(f"--path={traced}", f"--report={tmp_path / 'report'}")


def test_what_was_left_out_and_what_was_put_off_is_neither_stuck_nor_lost(spark: Any, tmp_path: Path):
    def told() -> Iterator[dict[str, object]]:
        for node in ("n:4150", "m:4150"):  # of m nothing was left out
            more = {"node": node}
            yield event(0, "PUB", 1, **more)
            yield event(1, "START", 1, **more)  # its FIN may be among what was left out
            yield event(2, "PUB", 2, **more)  # and its START and FIN
            yield event(9_000, "PUB", 3, **more)
            yield event(9_001, "START", 3, **more)
            yield event(9_002, "REQ_DEFER", 3, delay_ms=60_000, **more)
            yield event(9_000, "PUB", 4, **more)
            yield event(9_001, "START", 4, **more)  # long after that, and nothing followed
            yield event(9_002, "REQ_DEFER", 4, delay_ms=500, **more)
            yield event(20_000, "PUB", 5, **more)
            yield event(20_001, "START", 5, **more)
        yield event(500, "DROPPED", 0, None, count=3)
        yield event(1_400, "DROPPED", 0, None, count=3)

    read = lives.read_events(spark, archived(tmp_path, [json.dumps(each).encode() for each in told()]))
    found = {(row.node, row.msgid): row.state for row in lives.lives(read, stuck_after_s=5).collect()}
    assert found == {
        ("n:4150", 1): "unknown", ("n:4150", 2): "unknown", ("m:4150", 1): "stuck", ("m:4150", 2): "lost",
        **{(node, 3): "deferred" for node in ("n:4150", "m:4150")},
        **{(node, 4): "stuck" for node in ("n:4150", "m:4150")},
        **{(node, 5): "in_flight" for node in ("n:4150", "m:4150")},
    }  # fmt: skip


def test_looking_up_one_message(job, traced: Path, capsys: pytest.CaptureFixture[str]):
    found = [json.loads(line) for line in job(f"--path={traced}", f"--trace-id={(1 << 64) - 1}", "--format=json")]
    assert [each["action"] for each in found[:-2]] == ["PUB", "START", "REQ", "START", "FIN"]
    bad, dropped = found[-2:]
    assert bad["note"].startswith("3 rows are no events") and dropped["note"].startswith("4 events were not recorded")
    lines = job(f"--path={traced}", f"--message-id={5:016x}")
    assert [line.split()[2] for line in lines] == ["PUB", "START", "TIMEOUT", "DEAD_LETTER"]
    assert lines[-1].split()[0] == "9.000"
    with pytest.raises(FlintError, match=r"no event of such a message.*\(4 events were not recorded"):
        job(f"--path={traced}", "--trace-id=5")


def test_what_a_look_up_leaves_out_is_said(spark: Any, traced: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    def said(*words: str) -> tuple[list[str], list[str]]:
        capsys.readouterr()
        options = resolve(trace.TraceOptions, [f"--path={traced}", f"--trace-id={(1 << 64) - 1}", *words], {}).options
        assert trace._run(options, Runner(spark=spark)) == 0
        captured = capsys.readouterr()
        return captured.out.splitlines(), captured.err.splitlines()

    out, err = said()
    assert len(out) == 5
    assert [line.split()[:2] for line in err] == [["3", "rows"], ["4", "events"]]
    for limit, is_cut_off in ((5, False), (4, True)):
        monkeypatch.setattr(lives, "EVENTS_SHOWN_MAX", limit)
        out, err = said()
        assert [line.split()[2] for line in out] == ["PUB", "START", "REQ", "START", "FIN"][:limit]
        assert [line for line in err if line.startswith("there are more events")] == (
            ["there are more events than these first 4: narrow them by --since, --until, --of-topic"] * is_cut_off
        )
        told = [json.loads(line) for line in said("--format=json")[0]]
        assert [each["action"] for each in told if "note" not in each] == ["PUB", "START", "REQ", "START", "FIN"][
            :limit
        ]
        assert [each.get("is_cut_off") for each in told if "note" in each] == [True] * is_cut_off + [None, None]


def test_an_id_as_clients_of_nsq_see_it_finds_the_message_of_a_topic_with_partitions(job, tmp_path: Path):
    ids = [f"{(1 << 50) + 5:016x}{7:016x}", f"{(1 << 50) + 5:016x}", f"{(1 << 50) + 6:016x}{7:016x}"]
    rows = [event(number, "PUB", 5, message_id=each) for number, each in enumerate(ids)]
    pq.write_table(pa.table({"body": [json.dumps(row).encode() for row in rows]}), tmp_path / "events.parquet")
    for wanted, expected in ((ids[1], ids[:2]), (ids[1].upper(), ids[:2]), (ids[0], ids[:1]), (ids[2][:16], ids[2:])):
        lines = job(f"--path={tmp_path}", f"--message-id={wanted}", "--format=json")
        assert [json.loads(line)["message_id"] for line in lines] == expected
    with pytest.raises(FlintError, match="no event of such a message"):
        job(f"--path={tmp_path}", f"--message-id={7:016x}")


def test_a_dry_run_and_a_part_of_the_time(job, traced: Path):
    lines = job(f"--path={traced}", "--dry-run")
    assert [line.split() for line in lines[:2]] == [["1", "events", "of", "lonely"], ["23", "events", "of", "orders"]]
    since = (START_NS + 4900 * MS) // MS
    lines = job(f"--path={traced}", "--dry-run", f"--until={since}")
    assert lines[1].split()[0] == "20"


def test_an_archive_in_a_table_is_read_as_it_is_now(job, traced: Path, tmp_path: Path):
    from deltalake import DeltaTable, write_deltalake

    rows = pq.read_table(traced / "events.parquet")
    for first in range(0, rows.num_rows, 5):
        write_deltalake(tmp_path / "trace", rows.slice(first, 5), mode="append")
    DeltaTable(str(tmp_path / "trace")).optimize.compact()
    assert len(list((tmp_path / "trace").glob("*.parquet"))) > 1, "what was compacted is still there"
    assert job(f"--path={tmp_path / 'trace'}", "--dry-run") == job(f"--path={traced}", "--dry-run")
    with pytest.raises(FilesError, match=r"trace is a table of the format delta: give it, and what is beside it"):
        job(f"--path={tmp_path}")


def test_wrong_words(job, tmp_path: Path):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "x.parquet")
    for words, kind, said in (
        ([], UsageError, "give either --nsqd or --lookupd"),
        (["--path=/nowhere"], UsageError, "--path /nowhere is not there"),
        (["--path=/", "--nsqd=a:1"], UsageError, "give either --path, or the topic"),
        (["--nsqd=a:1", "--trace-id=0"], UsageError, "--trace-id 0 is not a whole number"),
        (["--nsqd=a:1", "--message-id=xyz"], UsageError, "--message-id xyz is not 16 or 32 hex digits"),
        ([f"--path={tmp_path}"], FlintError, "has no column body, but x"),
    ):
        with pytest.raises(kind, match=said):
            job(*words)


def test_events_of_a_real_nsqd(job, nsqd: NsqdProcess, topic: str):
    nsqd.post(f"/topic/create?topic={topic}&partition_num=1")
    nsqd.post(f"/channel/create?topic={topic}&channel=c")
    nsqd.post("/topic/create?topic=nsqd_trace")  # else it is made with the first event, which may not be written yet
    nsqd.post(f"/message/trace/enable?topic={topic}")
    nsqd.publish(topic, [b"a", b"b", b"c"])
    with sync.Consumer(topic, "c", nsqd_tcp_addresses=[nsqd.address]) as consumer:
        for count, message in enumerate(consumer, 1):
            if message.body == b"b" and message.attempts == 1:
                message.requeue(0)
            else:
                message.finish()
            if count == 4:
                break
    deadline_s = time.monotonic() + PATIENCE_S
    while sum(b'"FIN"' in body and topic.encode() in body for _, body in stored(nsqd.address, "nsqd_trace")) < 3:
        assert time.monotonic() < deadline_s, "events are published up to 10 ms after they happened"
        time.sleep(0.05)
    lines = job(f"--nsqd={nsqd.address}", f"--of-topic={topic}")
    assert lines[:3] == [f"{topic}, channel c", "  3 messages: 3 finished", "  1 repeated, 1 requeued, 0 timed out"]
    stages = {line.split()[0]: line.split()[1:] for line in lines[4:8]}
    assert list(stages) == ["wait", "repeats", "process", "total"]
    assert 0 < float(stages["total"][0]) <= float(stages["total"][3])
