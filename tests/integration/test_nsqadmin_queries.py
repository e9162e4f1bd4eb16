"""Queries on Spark in nsqadmin: what their drivers report, compared with what nsqd has by now."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.integration.daemons import Answer, Daemons, Nsqadmin, Nsqd, wait_until

from flintmq.errors import OptionError
from flintmq.spark.offsets import PartitionKey
from flintmq.spark.report import QueryState, Reporter


def log_id(nsqd: Nsqd, topic: str, partition: int = 0) -> str:
    """The id of a log, as nsqd tells it."""
    (row,) = nsqd.get(f"/stats?format=json&topic={topic}&partition={partition}")["data"]["topics"]
    return str(row["log_id"])


def report(nsqadmin: Nsqadmin, *queries: dict[str, Any]) -> Answer:
    return nsqadmin.request("POST", "/api/v2/queries", json.dumps({"queries": queries}).encode())


@pytest.fixture(scope="module")
def deployment(shared: Daemons) -> Iterator[tuple[Nsqd, Nsqadmin]]:
    """An nsqd with 10 messages in t, and an nsqadmin that looks at it."""
    nsqd = shared.nsqd("--durability=os")
    nsqd.publish("t", *[b"%d" % number for number in range(10)])
    yield nsqd, shared.nsqadmin(f"--nsqd-http-address=127.0.0.1:{nsqd.http[1]}")


def row_of(nsqadmin: Nsqadmin, query: str) -> dict[str, Any]:
    rows = nsqadmin.whole("/api/v2/queries")["queries"]
    return next(row for row in rows if row["id"] == query)


def test_the_lag_is_what_nsqd_has_now(deployment: tuple[Nsqd, Nsqadmin]):
    nsqd, nsqadmin = deployment
    log = {"topic": "t", "partition": 0, "log_id": log_id(nsqd, "t"), "read": 11, "seconds": None}
    given = {"id": "a", "name": "rides", "state": "stopped", "batch": 3, "batch_age_s": 2.5, "row_count": 10}
    assert report(nsqadmin, {**given, "logs": [log]}).status == 200
    row = row_of(nsqadmin, "a")
    node = f"127.0.0.1:{nsqd.http[1]}"
    assert (row["messages"], row["seconds"], row["state"], row["batch"]) == (0, 0.0, "stopped", 3)
    assert row["logs"] == [{**log, "node": node, "end": 11, "messages": 0, "seconds": 0.0}]
    assert time.time() - row["batch_at_s"] >= 2.5
    before_s = time.time()
    nsqd.publish("t", b"later", b"and later")  # nobody reports of these any more
    row = wait_until(lambda: (found := row_of(nsqadmin, "a"))["messages"] and found, "it is behind")
    assert row["messages"] == 2 and row["logs"][0]["end"] == 13
    assert 0 < row["seconds"] <= time.time() - before_s + 1
    topic = nsqadmin.whole("/api/v2/topics/t")
    assert [query["name"] for query in topic["queries"]] == ["rides"]
    assert [query["name"] for query in nsqadmin.whole("/api/v2/top")["behind"]] == ["rides"]


def test_what_is_wrong_with_queries_is_a_problem(deployment: tuple[Nsqd, Nsqadmin]):
    nsqd, nsqadmin = deployment
    log = {"topic": "t", "partition": 0, "log_id": log_id(nsqd, "t"), "read": 1, "seconds": 4000.0}
    failed = {"id": "b", "name": "<b>bad</b>", "state": "failed", "error": "no space left", "logs": [log]}
    assert report(nsqadmin, failed).status == 200
    findings = nsqadmin.whole("/api/v2/problems")["findings"]
    found = [(row["level"], row["text"]) for row in findings if row["subject"] == "Spark query <b>bad</b>"]
    assert found[0] == ("problem", "it has failed: no space left")
    assert found[1][0] == "warning" and "messages are unread, the oldest for 4,0" in found[1][1]
    page = nsqadmin.request("GET", "/topics/t", None, {"Accept": "text/html"}).body
    assert b"&lt;b&gt;bad&lt;/b&gt;" in page and b"<b>bad" not in page


def test_a_log_that_nobody_has(deployment: tuple[Nsqd, Nsqadmin]):
    _, nsqadmin = deployment
    log = {"topic": "gone", "partition": 0, "log_id": "0" * 16, "read": 5}
    assert report(nsqadmin, {"id": "c", "logs": [log]}).status == 200
    row = row_of(nsqadmin, "c")
    assert (row["messages"], row["seconds"], row["name"]) == (None, None, "c")
    assert (row["logs"][0]["node"], row["logs"][0]["end"]) == ("", None)


@pytest.mark.parametrize(
    "query",
    [
        {}, {"id": ""}, {"id": "x" * 201}, {"id": "x", "state": "dead"}, {"id": "x", "row_count": -1},
        {"id": "x", "logs": 5},
        {"id": "x", "logs": [{"topic": "t", "partition": 0, "log_id": "../..", "read": 1}]},
        {"id": "x", "logs": [{"topic": "no/name", "partition": 0, "log_id": "0" * 16, "read": 1}]},
        {"id": "x", "logs": [{"topic": "t", "partition": 0, "log_id": "0" * 16, "read": 2**70}]},
    ],
)  # fmt: skip
def test_reports_that_cannot_be_are_refused(deployment: tuple[Nsqd, Nsqadmin], query: dict[str, Any]):
    _, nsqadmin = deployment
    answer = report(nsqadmin, query)
    assert answer.status == 400 and answer.json["message"].startswith(("INVALID_BODY", "INVALID_TOPIC"))
    assert nsqadmin.request("POST", "/api/v2/queries", b"{" * 100_000).status == 400
    assert nsqadmin.request("POST", "/api/v2/queries", b" " * (2 << 20)).status == 413


def test_there_is_a_bound(deployment: tuple[Nsqd, Nsqadmin]):
    _, nsqadmin = deployment
    for first in range(0, 600, 300):
        assert report(nsqadmin, *[{"id": f"many-{first + number}"} for number in range(300)]).status == 200
    ids = {row["id"] for row in nsqadmin.whole("/api/v2/queries")["queries"]}
    assert len(ids) == 500 and "many-599" in ids and "many-0" not in ids


def test_a_reporter(daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os")
    nsqd.publish("t", b"one", b"two")
    nsqadmin = daemons.nsqadmin(f"--nsqd-http-address=127.0.0.1:{nsqd.http[1]}")
    key = PartitionKey("t", 0, log_id(nsqd, "t"))
    state = QueryState("id", "rides", batch=0, batch_at_s=time.monotonic(), row_count=1, logs={key: (2, None)})
    reporter = Reporter(nsqadmin.url, "", "", lambda: [state])
    try:
        reporter.wake()
        row = wait_until(lambda: nsqadmin.whole("/api/v2/queries")["queries"], "it is reported")[0]
        assert (row["name"], row["state"], row["messages"], row["row_count"]) == ("rides", "running", 1, 1)
        state.state = "stopped"
        reporter.wake()
    finally:
        reporter.close()  # sends what was not sent yet
    assert row_of(nsqadmin, "id")["state"] == "stopped"


def test_a_reporter_whose_nsqadmin_is_not_there(caplog: pytest.LogCaptureFixture):
    reporter = Reporter("http://127.0.0.1:1", "", "", lambda: [QueryState("id")])
    reporter.wake()
    reporter.close()
    assert caplog.text.count("nsqadmin is not told about the queries of this driver: cannot connect") == 1


@pytest.mark.parametrize("url", ["127.0.0.1:4171", "ftp://a", "http://", "http://a:0", "http://a?b=c"])
def test_a_reporter_of_a_url_that_is_none(url: str):
    with pytest.raises(OptionError, match=r"a URL such as http://127\.0\.0\.1:4171"):
        Reporter(url, "", "", list)
