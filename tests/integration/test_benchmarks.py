"""The benchmarks of nsqd run and count right; how fast it is, they say themselves."""

import json

import pytest
from benchmarks import bench_deferred, bench_nsqadmin, bench_nsqd, bench_tools, bench_topics, harness


@pytest.mark.parametrize("case", ["mpub-os-pipelined", "deliver-fin-shuffled", "pub-10-connections", "latency-10k"])
def test_a_case_of_nsqd(case):
    result = bench_nsqd.main(quick=True, only=case)
    (row,) = result["rows"]
    assert row["case"] == case
    assert row["msg_per_s"] > 0
    assert 0 < row["cpu_s_per_M"] < 1000
    assert row["peak_MiB"] > 5
    assert (row["p50_ms"] is None) == (case != "latency-10k")
    (sample,) = result["details"][case]["samples"]
    assert sample.messages == result["details"][case]["messages"]
    assert json.dumps(result, default=str)


@pytest.mark.parametrize("case", ["MDPUB x 100, 20 min and more", "due at 50 k/s, 200 k"])
def test_a_case_of_deferred_messages(case, monkeypatch):
    monkeypatch.setattr(bench_deferred, "MESSAGES_QUICK", 20_000)
    monkeypatch.setattr(bench_deferred, "LEAD_S", 0.5)
    (row,) = bench_deferred.main(quick=True, only=case)["rows"]
    assert (row["case"], row["messages"]) == (case, 4000 if "due" in case else 20_000)
    assert row["msg/s"] > 0 and 5 < row["memory_mib"] < 500
    assert json.dumps(row)


def test_many_topics_and_none(monkeypatch):
    monkeypatch.setattr(bench_topics, "TOPICS_QUICK", 30)
    rows = bench_topics.main(quick=True)["rows"]
    found = {(row["case"], row["figure"]): row["median"] for row in rows}
    assert found["30 topics x 3 channels", "start_killed_cpu_s"] > 0.01
    assert found["30 topics x 3 channels", "stats_MB"] > 0.01
    assert found["30 topics x 3 channels", "stop_s"] > 0
    assert found["empty", "start_cpu_s"] > 0.01
    assert json.dumps(rows)


def test_nsqadmin():
    rows = bench_nsqadmin.main(quick=True)["rows"]
    found = {row["figure"]: row["value"] for row in rows}
    assert found["topics page, KiB"] > 5 and 20 < found["memory, MiB"] < 200
    assert found["topics page, ms"] > 0 and found["with a dead node, s"] > 0
    assert json.dumps(rows)


def test_a_load_that_fails_fails_the_benchmark():
    def refuse(ready):
        raise ValueError("no load today")

    with harness.floor() as server, pytest.raises(harness.BenchmarkError, match="no load today"):
        harness.measure(server, harness.Load(refuse))


def test_table_has_a_column_for_every_key():
    rows: list[dict[str, object]] = [
        {"case": "a", "msg_per_s": 1234567.8},
        {"case": "long name", "msg_per_s": None, "ok": True},
    ]
    assert harness.table(rows).splitlines() == [
        "case       msg_per_s   ok",
        "---------  ---------  ---",
        "a          1,234,568",
        "long name             yes",
    ]


@pytest.mark.parametrize("case", ["nsq_to_nsq", "to_nsq"])
def test_a_utility(case, monkeypatch):
    monkeypatch.setattr(bench_tools, "MESSAGES", 100_000)
    rows = bench_tools.main(quick=True, only=case)["rows"]
    assert {"nsq_to_nsq", "to_nsq"} >= {row["case"] for row in rows} >= {case}
    assert all(row["msg_per_s"] > 0 and row["cpu_us_per_msg"] >= 0 and row["messages"] == 10_000 for row in rows)
    assert json.dumps(rows)
