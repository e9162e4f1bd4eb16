"""nsqd's HTTP API over a real socket: status codes, texts, fields and their order (NSQ's HTTP API)."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.conformance.http_helpers import MEMORY
from tests.integration.daemons import PATIENCE_S, SOON_S, Daemons, Nsqd, mpub_body, pub, wait_until
from tests.integration.mounts import Mount, mounted_tmpfs, needs_root

INFO_FIELDS = [
    "version",
    "broadcast_address",
    "hostname",
    "http_port",
    "tcp_port",
    "start_time",
    "max_heartbeat_interval",
    "max_output_buffer_size",
    "max_output_buffer_timeout",
    "max_deflate_level",
    "topology_zone",
    "topology_region",
    "flintmq_version",
]
TOPIC_FIELDS = [
    "topic_name",
    "channels",
    "depth",
    "backend_depth",
    "message_count",
    "message_bytes",
    "paused",
    "e2e_processing_latency",
]
CHANNEL_FIELDS = [
    "channel_name",
    "depth",
    "backend_depth",
    "in_flight_count",
    "deferred_count",
    "message_count",
    "global_msg_count",
    "requeue_count",
    "timeout_count",
    "client_count",
    "clients",
    "paused",
    "e2e_processing_latency",
]
CLIENT_FIELDS = [
    "client_id",
    "hostname",
    "version",
    "remote_address",
    "state",
    "ready_count",
    "in_flight_count",
    "message_count",
    "global_msg_count",
    "finish_count",
    "requeue_count",
    "connect_ts",
    "sample_rate",
    "deflate",
    "snappy",
    "user_agent",
    "topology_zone",
    "topology_region",
    "pub_counts",
    "tls",
    "tls_cipher_suite",
    "tls_version",
    "tls_negotiated_protocol",
    "tls_negotiated_protocol_is_mutual",
]
NO_LATENCY = {"count": 0, "percentiles": None}
TOO_LONG = "n" * 65


@pytest.fixture(scope="module")
def shared_nsqd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nsqd]:
    """One nsqd with small limits, for tests that publish nothing."""
    daemons = Daemons(tmp_path_factory.mktemp("shared"))
    try:
        yield daemons.nsqd("--durability=os", "--max-msg-size=100", "--max-body-size=1000")
    finally:
        daemons.close()


def test_ping(nsqd: Nsqd):
    answer = nsqd.request("GET", "/ping")
    assert (answer.status, answer.body) == (200, b"OK")
    assert answer.headers["Content-Type"].startswith("text/plain")


def test_info(daemons: Daemons):
    nsqd = daemons.nsqd("--max-heartbeat-interval=45s", "--max-output-buffer-size=1024")
    answer = nsqd.request("GET", "/info")
    assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
    assert answer.headers["X-NSQ-Content-Type"] == "nsq; version=1.0"
    info = answer.json
    assert list(info) == INFO_FIELDS
    assert (info["tcp_port"], info["http_port"]) == (nsqd.tcp[1], nsqd.http[1])
    assert abs(info["start_time"] - time.time()) < 30
    assert (info["broadcast_address"], info["max_heartbeat_interval"]) == ("127.0.0.1", 45_000_000_000)
    assert (info["max_output_buffer_size"], info["max_output_buffer_timeout"]) == (1024, 30_000_000_000)
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", info["version"])


# -- publishing --------------------------------------------------------------------------------------------------------


def test_pub(nsqd: Nsqd):
    answer = nsqd.post("/pub?topic=t", b"one\ntwo")
    assert (answer.body, answer.headers["Content-Type"].split(";")[0]) == (b"OK", "text/plain")
    with nsqd.connect() as consumer:
        message = consumer.subscribe("t", "c", 1).message()
    assert (message.body, message.attempts) == (b"one\ntwo", 1)
    assert abs(message.timestamp_ns / 1e9 - time.time()) < 30


def test_pub_defer(nsqd: Nsqd):
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 10)
        begun = time.monotonic()
        nsqd.post("/pub?topic=t&defer=400", b"later")
        nsqd.post("/pub?topic=t&defer=60000", b"much later")
        nsqd.post("/pub?topic=t&defer=0", b"now")
        came = {message.body: time.monotonic() - begun for message in consumer.messages(2)}
        assert came.keys() == {b"now", b"later"} and came[b"later"] >= 0.4
        assert nsqd.stats("t", "c")["deferred_count"] == 1


@pytest.mark.parametrize(
    ("target", "body", "expected"),
    [
        ("/mpub?topic=t", b"1\n2\n\n3", [b"1", b"2", b"3"]),
        ("/mpub?topic=t", b"1\n", [b"1"]),
        ("/mpub?topic=t", b"", []),
        ("/mpub?topic=t", b"\n\n", []),
        ("/mpub?topic=t&binary=false", b"1\n2", [b"1", b"2"]),
        ("/mpub?topic=t&binary=0", b"1\n2", [b"1", b"2"]),
        ("/mpub?topic=t&binary=true", mpub_body([b"1\n2", b"3"]), [b"1\n2", b"3"]),
        ("/mpub?topic=t&binary=1", mpub_body([b"1"]), [b"1"]),
        ("/mpub?topic=t&binary=anything", mpub_body([b"1"]), [b"1"]),
        ("/mput?topic=t", b"1\n2", [b"1", b"2"]),
        ("/put?topic=t", b"1\n2", [b"1\n2"]),
    ],
)
def test_mpub(nsqd: Nsqd, target: str, body: bytes, expected: list[bytes]):
    assert nsqd.post(target, body).body == b"OK"
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 10)
        assert [message.body for message in consumer.messages(len(expected))] == expected
        consumer.nothing_comes()


@pytest.mark.parametrize(
    ("target", "body", "status", "text"),
    [
        ("/pub?topic=t", b"x" * 101, 413, "MSG_TOO_BIG"),
        ("/pub?topic=no!", b"x" * 101, 413, "MSG_TOO_BIG"),
        ("/pub?topic=t", b"", 400, "MSG_EMPTY"),
        ("/pub", b"", 400, "MSG_EMPTY"),
        ("/pub", b"x", 400, "MISSING_ARG_TOPIC"),
        ("/pub?topic=no!", b"x", 400, "INVALID_TOPIC"),
        (f"/pub?topic={TOO_LONG}", b"x", 400, "INVALID_TOPIC"),
        ("/pub?topic=", b"x", 400, "INVALID_TOPIC"),
        ("/pub?topic=t&defer=soon", b"x", 400, "INVALID_DEFER"),
        ("/pub?topic=t&defer=-1", b"x", 400, "INVALID_DEFER"),
        ("/pub?topic=t&defer=3600001", b"x", 400, "INVALID_DEFER"),
        ("/pub?topic=%zz", b"x", 400, "INVALID_REQUEST"),
        ("/mpub?topic=t", b"x" * 1001, 413, "BODY_TOO_BIG"),
        ("/mpub?topic=t", b"ok\n" + b"x" * 101, 413, "MSG_TOO_BIG"),
        ("/mpub", b"x", 400, "MISSING_ARG_TOPIC"),
        ("/mpub?topic=no!", b"x", 400, "INVALID_TOPIC"),
        ("/mpub?topic=t&binary=true", b"", 413, "BAD_BODY"),
        ("/mpub?topic=t&binary=true", b"\0\0\0\0", 413, "BAD_BODY"),
        ("/mpub?topic=t&binary=true", b"\xff\xff\xff\xff", 413, "BAD_BODY"),
        ("/mpub?topic=t&binary=true", b"\0\0\0\x01\0\0\0\x05ab", 413, "BAD_MESSAGE"),
        ("/mpub?topic=t&binary=true", b"\0\0\0\x01\0\0\0\0", 413, "BAD_MESSAGE"),
        ("/mpub?topic=t&binary=true", mpub_body([b"x" * 101]), 413, "BAD_MESSAGE"),
        ("/put?topic=t", b"x" * 101, 413, "MSG_TOO_BIG"),
        ("/mput?topic=t", b"x" * 1001, 413, "BODY_TOO_BIG"),
    ],
)
def test_what_publishing_refuses(shared_nsqd: Nsqd, target: str, body: bytes, status: int, text: str):
    answer = shared_nsqd.request("POST", target, body)
    assert answer.error == (status, text)
    assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
    assert answer.headers["X-NSQ-Content-Type"] == "nsq; version=1.0"
    topics = shared_nsqd.get("/stats?format=json")["topics"]
    assert sum(topic["message_count"] for topic in topics) == 0, "what was refused was stored"


def test_a_chunked_body_is_bounded_too(shared_nsqd: Nsqd):
    head = b"POST /%s?topic=t HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    for path, size, expected in ((b"pub", 60, b"413"), (b"mpub", 600, b"413"), (b"pub", 0, b"400")):
        chunk = b"%x\r\n" % size + b"x" * size + b"\r\n" if size else b""
        with socket.create_connection(shared_nsqd.http, 5) as raw:
            raw.sendall(head % path + chunk * 2 + b"0\r\n\r\n")
            assert raw.recv(4096).split()[1] == expected


# -- topics and channels -----------------------------------------------------------------------------------------------


def test_topics_and_channels_come_and_go(nsqd: Nsqd):
    for target in (
        "/topic/create?topic=t",
        "/topic/create?topic=t",  # again is fine
        "/channel/create?topic=t&channel=c",
        "/channel/create?topic=t&channel=c",
        "/channel/pause?topic=t&channel=c",
    ):
        answer = nsqd.post(target)
        assert answer.body == b"" and "Content-Type" not in answer.headers, target
    assert nsqd.stats("t", "c")["paused"] is True
    nsqd.post("/channel/unpause?topic=t&channel=c")
    nsqd.post("/topic/pause?topic=t")
    assert (nsqd.stats("t")["paused"], nsqd.stats("t", "c")["paused"]) == (True, False)
    nsqd.post("/topic/unpause?topic=t")
    nsqd.post("/channel/delete?topic=t&channel=c")
    assert nsqd.stats("t")["channels"] == []
    nsqd.post("/topic/delete?topic=t")
    assert nsqd.get("/stats?format=json")["topics"] == []


def test_empty(nsqd: Nsqd):
    nsqd.publish("t", *[b"x"] * 10)
    nsqd.post("/topic/empty?topic=t")
    assert nsqd.stats("t")["depth"] == 0
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 2)
        nsqd.publish("t", *[b"x"] * 10)
        held = consumer.messages(2)
        nsqd.post("/pub?topic=t&defer=60000", b"later")
        wait_until(lambda: nsqd.unfinished("t", "c") == 11)
        nsqd.post("/topic/empty?topic=t")
        assert nsqd.unfinished("t", "c") == 11, "/topic/empty leaves the channels alone"
        nsqd.post("/channel/empty?topic=t&channel=c")
        assert nsqd.unfinished("t", "c") == 0
        shown = held[0].id.decode()
        assert consumer.error(b"FIN " + held[0].id + b"\n") == f"E_FIN_FAILED FIN {shown} failed ID not in flight"
        nsqd.publish("t", b"fresh")
        assert consumer.message().body == b"fresh"


@pytest.mark.parametrize(
    ("target", "status", "text"),
    [
        ("/topic/create", 400, "MISSING_ARG_TOPIC"),
        ("/topic/create?topic=no!", 400, "INVALID_TOPIC"),
        ("/topic/delete", 400, "MISSING_ARG_TOPIC"),
        ("/topic/delete?topic=no!", 404, "TOPIC_NOT_FOUND"),
        ("/topic/delete?topic=unknown", 404, "TOPIC_NOT_FOUND"),
        ("/topic/empty", 400, "MISSING_ARG_TOPIC"),
        ("/topic/empty?topic=no!", 400, "INVALID_TOPIC"),
        ("/topic/empty?topic=unknown", 404, "TOPIC_NOT_FOUND"),
        ("/topic/pause", 400, "MISSING_ARG_TOPIC"),
        ("/topic/pause?topic=unknown", 404, "TOPIC_NOT_FOUND"),
        ("/topic/unpause?topic=unknown", 404, "TOPIC_NOT_FOUND"),
        *[
            (f"/channel/{action}{query}", status, text)
            for action in ("create", "delete", "empty", "pause", "unpause")
            for query, status, text in (
                ("", 400, "MISSING_ARG_TOPIC"),
                ("?topic=no!&channel=c", 400, "INVALID_ARG_TOPIC"),
                ("?topic=t", 400, "MISSING_ARG_CHANNEL"),
                ("?topic=t&channel=no!", 400, "INVALID_ARG_CHANNEL"),
                ("?topic=unknown&channel=c", 404, "TOPIC_NOT_FOUND"),
                *([] if action == "create" else [("?topic=t&channel=unknown", 404, "CHANNEL_NOT_FOUND")]),
            )
        ],
    ],
)
def test_what_topics_and_channels_refuse(shared_nsqd: Nsqd, target: str, status: int, text: str):
    shared_nsqd.post("/topic/create?topic=t")
    assert shared_nsqd.request("POST", target).error == (status, text)


@pytest.mark.parametrize(
    ("method", "target", "status", "text", "allow"),
    [
        ("GET", "/nothing", 404, "NOT_FOUND", None),
        ("POST", "/create_topic?topic=t", 404, "NOT_FOUND", None),
        ("GET", "/mput?topic=t", 405, "METHOD_NOT_ALLOWED", "OPTIONS, POST"),
        ("POST", "/config/log_level", 405, "METHOD_NOT_ALLOWED", "GET, OPTIONS, PUT"),
        ("GET", "/pub?topic=t", 405, "METHOD_NOT_ALLOWED", "OPTIONS, POST"),
        ("POST", "/info", 405, "METHOD_NOT_ALLOWED", "GET, OPTIONS"),
        ("DELETE", "/topic/delete?topic=t", 405, "METHOD_NOT_ALLOWED", "OPTIONS, POST"),
    ],
)
def test_other_paths_and_methods(
    shared_nsqd: Nsqd, method: str, target: str, status: int, text: str, allow: str | None
):
    answer = shared_nsqd.request(method, target)
    assert answer.error == (status, text)
    if allow is not None:
        assert ", ".join(sorted(answer.headers["Allow"].split(", "))) == allow


@pytest.mark.parametrize(
    ("method", "target", "status", "location"),
    [("GET", "/ping/", 301, "/ping"), ("POST", "/pub/?topic=t", 308, "/pub?topic=t"), ("GET", "/STATS", 301, "/stats")],
)
def test_almost_the_path(shared_nsqd: Nsqd, method: str, target: str, status: int, location: str):
    answer = shared_nsqd.request(method, target)
    assert (answer.status, answer.headers["Location"]) == (status, location)


# -- stats -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def busy(nsqd: Nsqd):
    """Two topics, two channels, a consumer that also publishes, and a producer."""
    with nsqd.connect() as consumer, nsqd.connect() as producer:
        consumer.identify(client_id="me", hostname="here", user_agent="test/1", sample_rate=0)
        consumer.subscribe("t", "c", 3)
        nsqd.post("/channel/create?topic=t&channel=b")
        producer.ok(pub("t", b"12345") * 5 + pub("other", b"1"), 6)
        first = consumer.messages(3)
        consumer.send(b"RDY 0\n")
        consumer.finish(first[0])
        consumer.send(b"REQ %s 0\n" % first[1].id)
        consumer.send(b"REQ %s 60000\n" % first[2].id)
        consumer.ok(pub("other", b"2"))
        yield nsqd


def test_stats_json(busy: Nsqd):
    stats = busy.get("/stats?format=json")
    names = [name for name in stats if name != "durability"]  # an addition of ours
    assert names == ["version", "health", "start_time", "topics", "memory", "producers"]
    assert (stats["health"], stats["start_time"]) == ("OK", busy.get("/info")["start_time"])
    assert tuple(stats["memory"]) == MEMORY
    assert all(isinstance(value, int) for value in stats["memory"].values())
    other, topic = stats["topics"]
    assert list(topic) == TOPIC_FIELDS
    assert (other["topic_name"], other["depth"], other["message_count"]) == ("other", 2, 2)
    assert other["channels"] == []
    assert (topic["topic_name"], topic["depth"], topic["message_count"], topic["message_bytes"]) == ("t", 0, 5, 25)
    assert topic["e2e_processing_latency"] == NO_LATENCY
    idle, channel = topic["channels"]
    assert list(channel) == CHANNEL_FIELDS
    assert (idle["channel_name"], idle["depth"], idle["clients"], idle["client_count"]) == ("b", 5, [], 0)
    counts = {name: channel[name] for name in CHANNEL_FIELDS if name.endswith("_count") or name == "depth"}
    assert counts == {
        "depth": 3,
        "in_flight_count": 0,
        "deferred_count": 1,
        "message_count": 5,
        "global_msg_count": 3,
        "requeue_count": 2,
        "timeout_count": 0,
        "client_count": 1,
    }
    (client,) = channel["clients"]
    assert list(client) == CLIENT_FIELDS
    assert {name: client[name] for name in ("client_id", "hostname", "user_agent", "version", "state")} == {
        "client_id": "me",
        "hostname": "here",
        "user_agent": "test/1",
        "version": "V2",
        "state": 3,
    }
    assert (client["ready_count"], client["in_flight_count"], client["message_count"]) == (0, 0, 3)
    assert (client["finish_count"], client["requeue_count"]) == (1, 2)
    assert client["pub_counts"] == [{"topic": "other", "count": 1}]
    assert abs(client["connect_ts"] - time.time()) < 30
    assert re.fullmatch(r"127\.0\.0\.1:\d+", client["remote_address"])
    producers = {row["client_id"]: row["pub_counts"] for row in stats["producers"]}
    assert producers == {
        "me": [{"topic": "other", "count": 1}],
        "127.0.0.1": [{"topic": "other", "count": 1}, {"topic": "t", "count": 5}],
    }


def test_stats_filters(busy: Nsqd):
    def shape(query: str) -> object:
        stats = busy.get(f"/stats?format=json&{query}")
        topics = stats["topics"]
        return topics and {topic["topic_name"]: [row["channel_name"] for row in topic["channels"]] for topic in topics}

    assert shape("topic=t") == {"t": ["b", "c"]}
    assert shape("topic=t&channel=c") == {"t": ["c"]}
    unknown = busy.get("/stats?format=json&topic=unknown")
    assert (unknown["topics"], unknown["producers"]) == (None, None)
    half = busy.get("/stats?format=json&topic=t&channel=unknown")
    assert half["topics"] == [] and len(half["producers"]) == 2
    for value in ("false", "0"):
        bare = busy.get(f"/stats?format=json&include_clients={value}&include_mem={value}")
        assert "memory" not in bare and bare["producers"] is None
        assert bare["topics"][1]["channels"][1]["clients"] is None
    assert "memory" in busy.get("/stats?format=json&include_mem=maybe")


def test_stats_text(busy: Nsqd):
    answer = busy.request("GET", "/stats")
    assert answer.headers["Content-Type"].startswith("text/plain")
    text = answer.text
    lines = text.splitlines()
    assert re.fullmatch(r"nsqd v\S+ \(built w/\S+\) FlintMQ v\S+", lines[0])
    assert re.fullmatch(r"start_time \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(Z|[+-]\d\d:\d\d)", lines[1])
    assert re.fullmatch(r"uptime [\d.hm]+s", lines[2])
    assert lines[3:6] == ["", "Health: OK", ""]
    assert lines[6] == "Memory:" and lines[7].startswith("   heap_objects             \t")
    assert "Topics:" in lines
    assert "   [t              ] depth: 0     be-depth: 0     msgs: 5        e2e%: " in lines
    pattern = (
        r"      \[c {24}\] depth: 3 {5}be-depth: \d+ +inflt: 0 {4}def: 1 {4}re-q: 2 {5}timeout: 0 {5}msgs: 5 {8}e2e%: "
    )
    assert re.search(pattern, text)
    client = (
        r"        \[V2 here:\d+ test/1 *\] state: 3 inflt: 0    rdy: 0    fin: 1        re-q: 2        msgs: 3        "
        r"connected: \S+s"
    )
    assert re.search(client, text)
    assert "Producers:" in lines
    assert re.search(r"   \[V2 127\.0\.0\.1:\d+ *\] msgs: 6        topics: other=1,t=5 connected: \S+s", text)


def test_stats_of_many_topics(nsqd: Nsqd):
    names = [f"t{number:03d}" for number in range(50)]
    for name in names:
        nsqd.post(f"/topic/create?topic={name}")
    nsqd.post("/channel/create?topic=t030&channel=c")
    assert [row["topic_name"] for row in nsqd.get("/stats?format=json")["topics"]] == names
    assert [row["topic_name"] for row in nsqd.get("/stats?format=json&channel=c")["topics"]] == ["t030"]
    old = nsqd.request("GET", "/stats?format=json", headers={"Accept": "application/vnd.nsq"}).json
    assert [row["topic_name"] for row in old["data"]["topics"]] == names
    lines = nsqd.request("GET", "/stats").text.splitlines()
    assert [line[4:8] for line in lines if line.startswith("   [t")] == names


def test_stats_text_of_nothing(shared_nsqd: Nsqd):
    text = shared_nsqd.request("GET", "/stats?topic=unknown").text
    assert "\nTopics: None\n" in text and "\nProducers: None\n" in text


def test_counts_start_again_with_the_process(nsqd: Nsqd):
    nsqd.publish("t", b"x")
    nsqd.post("/channel/create?topic=t&channel=c")
    nsqd.restart()
    topic = nsqd.stats("t")
    assert (topic["message_count"], topic["message_bytes"]) == (0, 0)
    channel = nsqd.stats("t", "c")
    assert (channel["depth"], channel["message_count"]) == (1, 0)


# -- latency -----------------------------------------------------------------------------------------------------------


def test_latency_percentiles(daemons: Daemons):
    nsqd = daemons.nsqd(
        "--durability=os", "--e2e-processing-latency-percentile=0.5", "--e2e-processing-latency-percentile=0.9,1.0"
    )
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 100)
        zeros = [{"quantile": quantile, "value": 0} for quantile in (1.0, 0.9, 0.5)]
        assert nsqd.stats("t", "c")["e2e_processing_latency"] == {"count": 0, "percentiles": zeros}
        nsqd.publish("t", *[b"x"] * 20)
        messages = consumer.messages(20)
        consumer.finish(*messages[:18])
        consumer.settle()
        time.sleep(0.4)
        consumer.finish(*messages[18:])
        consumer.settle()
    for row in (nsqd.stats("t"), nsqd.stats("t", "c")):
        latency = row["e2e_processing_latency"]
        assert latency["count"] == 20
        slowest, usual, half = (each["value"] for each in latency["percentiles"])
        assert 0.4e9 <= slowest < PATIENCE_S * 1e9
        assert half <= usual < slowest - 0.3e9
        assert all(isinstance(each["value"], int) for each in latency["percentiles"])
    text = nsqd.request("GET", "/stats").text
    found = re.findall(r"e2e%: ([\d.]+m?s), ([\d.]+)([mu]?s), ([\d.]+)([mu]?s)$", text, re.MULTILINE)
    assert len(found) == 2, text
    nsqd.restart()
    assert nsqd.stats("t", "c")["e2e_processing_latency"]["count"] == 0


def test_latency_looks_no_further_back_than_its_window(daemons: Daemons):
    nsqd = daemons.nsqd(
        "--durability=os", "--e2e-processing-latency-percentile=1", "--e2e-processing-latency-window-time=1s"
    )
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 1)
        nsqd.publish("t", b"x")
        consumer.finish(consumer.message())
        consumer.settle()
        assert nsqd.stats("t", "c")["e2e_processing_latency"]["count"] == 1
        wait_until(lambda: nsqd.stats("t", "c")["e2e_processing_latency"]["count"] == 0, "the window to pass", 5)


# -- config ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def configured_nsqd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nsqd]:
    """One nsqd with options of its own, for tests that change none."""
    daemons = Daemons(tmp_path_factory.mktemp("configured"))
    try:
        yield daemons.nsqd(
            "--durability=os", "--max-msg-size=100", "--statsd-prefix=x.%s", "--node-id=7", "--tls-min-version=tls1.3"
        )
    finally:
        daemons.close()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("max_msg_size", 100),
        ("id", 7),
        ("msg_timeout", 60_000_000_000),
        ("nsqlookupd_tcp_addresses", []),
        ("e2e_processing_latency_percentiles", []),
        ("log_level", 2),
        ("tls_required", 0),
        ("tls_min_version", 772),
        ("deflate", True),
        ("statsd_exclude_ephemeral", False),
        ("allow_config_from_cidr", ["127.0.0.1/8", "::1/128"]),
    ],
)
def test_config_values(configured_nsqd: Nsqd, name: str, expected: object):
    answer = configured_nsqd.request("GET", f"/config/{name}")
    assert (answer.status, answer.json) == (200, expected)
    assert answer.headers["Content-Type"] == "application/json; charset=utf-8"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("broadcast_address", "127.0.0.1"), ("tls_cert", ""), ("durability", "os"), ("statsd_prefix", "x.127_0_0_1_")],
)
def test_config_text_is_bare(configured_nsqd: Nsqd, name: str, expected: str):
    answer = configured_nsqd.request("GET", f"/config/{name}")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain")
    port = f"{configured_nsqd.http[1]}." if name == "statsd_prefix" else ""
    assert answer.text == expected + port


@pytest.mark.parametrize(
    ("method", "name", "body", "status", "text"),
    [
        ("GET", "nothing", b"", 400, "INVALID_OPTION"),
        ("GET", "verbose", b"", 400, "INVALID_OPTION"),
        ("GET", "lookupd_tcp_address", b"", 400, "INVALID_OPTION"),
        ("PUT", "log_level", b"", 413, "INVALID_VALUE"),
        ("PUT", "log_level", b"x" * 101, 413, "INVALID_VALUE"),
        ("PUT", "log_level", b"loud", 400, "INVALID_VALUE"),
        ("PUT", "log_level", b'"info"', 400, "INVALID_VALUE"),
        ("PUT", "log_level", b"\xff", 400, "INVALID_VALUE"),
        ("PUT", "nsqlookupd_tcp_addresses", b"127.0.0.1:1", 400, "INVALID_VALUE"),
        ("PUT", "nsqlookupd_tcp_addresses", b"[1]", 400, "INVALID_VALUE"),
        ("PUT", "nsqlookupd_tcp_addresses", b'["nowhere"]', 400, "INVALID_VALUE"),
        ("PUT", "max_msg_size", b"5", 400, "INVALID_OPTION"),
        ("PUT", "nothing", b"5", 400, "INVALID_OPTION"),
    ],
)
def test_what_config_refuses(configured_nsqd: Nsqd, method: str, name: str, body: bytes, status: int, text: str):
    assert configured_nsqd.request(method, f"/config/{name}", body).error == (status, text)
    assert configured_nsqd.get("/config/nsqlookupd_tcp_addresses") == []


def test_the_log_level_changes_at_run_time(nsqd: Nsqd):
    nsqd.get("/info")
    assert "GET /info" in nsqd.log
    assert nsqd.request("PUT", "/config/log_level", b"ERROR").json == 4
    before = nsqd.log.count("GET /info")
    nsqd.get("/info")
    assert nsqd.log.count("GET /info") == before
    assert nsqd.request("PUT", "/config/log_level", b"info").json == 2
    nsqd.get("/info")
    wait_until(lambda: nsqd.log.count("GET /info") == before + 1)


def test_nsqlookupds_change_at_run_time(daemons: Daemons):
    one, two = daemons.nsqlookupd(), daemons.nsqlookupd()
    addresses = [f"127.0.0.1:{lookupd.tcp[1]}" for lookupd in (one, two)]
    nsqd = daemons.nsqd("--durability=os", f"--lookupd-tcp-address={addresses[0]}")
    nsqd.post("/topic/create?topic=t")
    wait_until(lambda: one.producers("t") == [nsqd.tcp[1]])
    answer = nsqd.request("PUT", "/config/nsqlookupd_tcp_addresses", json.dumps(addresses[1:] * 2).encode())
    assert answer.json == addresses[1:]
    wait_until(lambda: two.producers("t") == [nsqd.tcp[1]] and one.producers("t") == [])
    assert nsqd.get("/config/nsqlookupd_tcp_addresses") == addresses[1:]
    nsqd.post("/channel/create?topic=t&channel=c")
    wait_until(lambda: two.channels("t") == ["c"])
    assert nsqd.request("PUT", "/config/nsqlookupd_tcp_addresses", b"[]").json == []
    wait_until(lambda: two.producers("t") == [])
    nsqd.post("/topic/create?topic=u")
    nsqd.stop()


def test_only_some_may_change_options_and_look_inside(daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os", "--allow-config-from-cidr=10.0.0.0/8")
    assert nsqd.request("PUT", "/config/log_level", b"debug").error == (403, "FORBIDDEN")
    assert nsqd.get("/config/log_level") == 2
    for method, target in (("GET", "/debug/"), ("GET", "/debug/pprof/heap"), ("POST", "/debug/freememory")):
        answer = nsqd.request(method, target)
        assert answer.status == 403 and answer.text.startswith("FORBIDDEN")
    for addresses in ("", "::/0,127.0.0.0/8"):
        nsqd.stop()
        nsqd.flags[-1] = f"--allow-config-from-cidr={addresses}"
        nsqd.start()
        assert nsqd.request("PUT", "/config/log_level", b"info").status == 200
        assert nsqd.request("GET", "/debug/").status == 200


# -- debug -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/debug/", r"GET  /debug/state  "),
        ("/debug/pprof/", r"GET  /debug/profile  "),
        (
            "/debug/tasks",
            r"(?s)^\d+ tasks\n.*task Task-\d+\n.*flintmq\.nsqd\.engine\.Engine\._flush_forever line \d+\n",
        ),
        ("/debug/threads", r"(?s)^\d+ threads\nthread MainThread.*server\.py"),
        ("/debug/pprof/goroutine", r"(?s) tasks\n.* threads\n"),
        ("/debug/pprof/threadcreate", r"thread MainThread"),
        ("/debug/memory", r"(?s)objects +own bytes  type\n.* +\d+ +\d+  builtins\.dict\n"),
        ("/debug/pprof/heap", r"builtins\.function"),
        ("/debug/pprof/block", r"no profile of blocking"),
        ("/debug/pprof/symbol", r"num_symbols: 0"),
        ("/debug/pprof/cmdline", r"\0--durability=os\0"),
    ],
)
def test_debug(configured_nsqd: Nsqd, target: str, expected: str):
    answer = configured_nsqd.request("GET", target)
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain")
    assert re.search(expected, answer.text), answer.text[:2000]


def test_debug_state(busy: Nsqd):
    text = busy.request("GET", "/debug/state").text
    assert re.search(r"^partition t/0 ", text, re.MULTILINE)
    assert re.search(r"^  channel c floor=\d+ ", text, re.MULTILINE)
    assert re.search(r"^session 127\.0\.0\.1:\d+ state=", text, re.MULTILINE)


def test_a_profile_shows_where_time_goes(nsqd: Nsqd):
    body = mpub_body([b"x" * 100] * 500)
    ended = threading.Event()

    def publish() -> None:
        while not ended.is_set():
            nsqd.post("/mpub?topic=t&binary=true", body)

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        begun = time.monotonic()
        answer = nsqd.request("GET", "/debug/pprof/profile?seconds=1")
        assert 0.9 < time.monotonic() - begun < PATIENCE_S
    finally:
        ended.set()
        publisher.join()
    assert answer.status == 200
    lines = answer.text.splitlines()
    assert all(re.fullmatch(r"\S+ \d+", line) for line in lines)
    main = [line for line in lines if line.startswith("MainThread;")]
    assert any(re.search(r"flintmq\.(batch|broker|net|nsqd|storage|wire)\.", line) for line in main), main


def test_one_profile_at_a_time_and_none_outlives_the_daemon(nsqd: Nsqd):
    for bad in ("0", "-1", "61", "x", "nan"):
        assert nsqd.request("GET", f"/debug/profile?seconds={bad}").status == 400
    answers: list[int] = []
    profile = threading.Thread(
        target=lambda: answers.append(nsqd.request("GET", "/debug/profile?seconds=60").status), daemon=True
    )
    profile.start()
    wait_until(lambda: "DebugApi._profile" in nsqd.request("GET", "/debug/tasks").text)
    assert nsqd.request("GET", "/debug/profile?seconds=0.01").status == 409
    begun = time.monotonic()
    nsqd.stop()
    assert time.monotonic() - begun < SOON_S
    profile.join(PATIENCE_S)
    assert answers == [200]


def test_set_block_rate_and_free_memory_answer_empty(nsqd: Nsqd):
    for method, target in (
        ("PUT", "/debug/setblockrate?rate=100"),
        ("PUT", "/debug/setblockrate?rate=-1"),
        ("POST", "/debug/freememory"),
    ):
        answer = nsqd.request(method, target)
        assert (answer.status, answer.body) == (200, b""), target
    for rate in ("", "?rate=", "?rate=x", "?rate=1.5", "?rate=99999999999999999999"):
        answer = nsqd.request("PUT", f"/debug/setblockrate{rate}")
        assert answer.status == 400
        assert answer.text.startswith("invalid block rate : strconv.Atoi: parsing ")


# -- the envelope before 1.0 -------------------------------------------------------------------------------------------


def test_the_old_envelope_is_there_for_who_asks(nsqd: Nsqd):
    old = {"Accept": "application/vnd.nsq; version=0"}
    answer = nsqd.request("GET", "/info", headers=old)
    assert answer.status == 200
    assert answer.json == {"status_code": 200, "status_txt": "OK", "data": nsqd.get("/info")}
    assert "X-NSQ-Content-Type" not in answer.headers
    stats = nsqd.request("GET", "/stats?format=json", headers=old).json
    assert stats["status_code"] == 200 and stats["data"]["health"] == "OK"
    assert nsqd.request("GET", "/stats", headers=old).text.startswith("nsqd v")
    assert nsqd.request("POST", "/put?topic=t", b"x", old).body == b"OK"
    error = nsqd.request("POST", "/pub", b"x", old)
    assert error.status == 500
    assert error.json == {"status_code": 500, "status_txt": "MISSING_ARG_TOPIC", "data": None}


@pytest.mark.parametrize("accept", ["application/vnd.nsq; version=1.0", "*/*", "application/json"])
def test_everybody_else_gets_plain_answers(shared_nsqd: Nsqd, accept: str):
    headers = {"Accept": accept}
    assert list(shared_nsqd.request("GET", "/info", headers=headers).json) == INFO_FIELDS
    assert shared_nsqd.request("POST", "/pub", b"x", headers).error == (400, "MISSING_ARG_TOPIC")


# -- Prometheus --------------------------------------------------------------------------------------------------------


def metrics_of(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Samples by name and the values of their labels, the topic first, the others by their names."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sorted(sample.labels.items(), key=lambda item: (item[0] != "topic", item[0]))
            found.setdefault(sample.name, {})[tuple(value for _, value in labels)] = sample.value
    return found


def test_metrics(busy: Nsqd):
    answer = busy.request("GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    metrics = metrics_of(answer.text)
    expected = {
        "flintmq_nsqd_healthy": {(): 1},
        "flintmq_nsqd_connections": {(): 2},
        "flintmq_nsqd_topics": {(): 2},
        "flintmq_nsqd_channels": {(): 2},
        "flintmq_nsqd_rows_left_out": {(): 0},
        "flintmq_nsqd_topic_depth": {("other",): 2, ("t",): 0},
        "flintmq_nsqd_topic_messages_total": {("other",): 2, ("t",): 5},
        "flintmq_nsqd_topic_message_bytes_total": {("other",): 2, ("t",): 25},
        "flintmq_nsqd_channel_depth": {("t", "b"): 5, ("t", "c"): 3},
        "flintmq_nsqd_channel_deferred": {("t", "b"): 0, ("t", "c"): 1},
        "flintmq_nsqd_channel_finished_total": {("t", "b"): 0, ("t", "c"): 1},
        "flintmq_nsqd_channel_requeued_total": {("t", "b"): 0, ("t", "c"): 2},
        "flintmq_nsqd_channel_clients": {("t", "b"): 0, ("t", "c"): 1},
        "flintmq_nsqd_topic_paused": {("other",): 0, ("t",): 0},
        "flintmq_nsqd_damaged_stretches_total": {(): 0},
    }
    assert {name: metrics[name] for name in expected} == expected
    version = busy.get("/info")["version"]
    assert metrics["flintmq_nsqd_build_info"] == {("os", version): 1}
    assert metrics["process_resident_memory_bytes"][()] > 1_000_000
    assert metrics["flintmq_nsqd_topic_log_bytes"][("t",)] > 25
    assert abs(metrics["flintmq_nsqd_start_time_seconds"][()] - time.time()) < 60
    assert not any("e2e" in name for name in metrics)


def test_metrics_of_latencies_and_nsqlookupds(daemons: Daemons):
    lookupd = daemons.nsqlookupd()
    up = f"127.0.0.1:{lookupd.tcp[1]}"
    nsqd = daemons.nsqd(
        "--durability=os",
        "--e2e-processing-latency-percentile=0.999",
        f"--lookupd-tcp-address={up},127.0.0.1:1",
    )
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 1)
        nsqd.publish("t", b"x")
        consumer.finish(consumer.message())
        consumer.settle()
        wait_until(
            lambda: lookupd.channels("t") == ["c"] and lookupd.get("/topics")["topics"] == ["settle#ephemeral", "t"]
        )
    metrics = metrics_of(nsqd.request("GET", "/metrics").text)
    (latency,) = metrics["flintmq_nsqd_channel_e2e_latency_seconds"].items()
    assert latency[0] == ("t", "c", "0.999") and 0 < latency[1] < 10
    assert metrics["flintmq_nsqd_topic_e2e_latency_seconds"][("t", "0.999")] == latency[1]
    assert metrics["flintmq_nsqd_nsqlookupd_connected"] == {(up,): 1, ("127.0.0.1:1",): 0}
    rows = [{"address": up, "connected": True}, {"address": "127.0.0.1:1", "connected": False}]
    assert nsqd.get("/stats?format=json")["nsqlookupds"] == rows
    assert "nsqlookupds" not in nsqd.get("/stats?format=json&topic=t"), "they are nothing of a topic"
    found = metrics_of(lookupd.request("GET", "/metrics").text)
    prefix = "flintmq_nsqlookupd_"
    names = ("topics", "channels", "nodes", "active_nodes", "tombstones")
    assert [found[prefix + name][()] for name in names] == [2, 1, 1, 1, 0]


def test_nsqlookupd_can_be_looked_into_as_well(daemons: Daemons):
    lookupd = daemons.nsqlookupd()
    assert "RegistrationDatabase nodes=0" in lookupd.request("GET", "/debug/state").text
    assert lookupd.get("/debug") == {}
    assert lookupd.request("GET", "/debug/pprof/goroutine").status == 200
    assert lookupd.request("POST", "/debug/freememory").body == b""


# -- health ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Mount]:
    """A disk that is nearly all reserve."""
    with mounted_tmpfs(tmp_path / "disk", 80 * 1024 * 1024) as mount:
        yield mount


@needs_root
def test_ping_tells_of_a_full_disk_while_it_is_full(daemons: Daemons, small_disk: Mount):
    nsqd = daemons.nsqd("--durability=os", data_path=small_disk.path)
    nsqd.publish("t", b"x")
    assert nsqd.request("GET", "/ping").status == 200, "nothing has failed yet"
    small_disk.fill()  # what is flushed now and then may fail from here on
    answer = nsqd.request("GET", "/ping")
    assert answer.status == 500 and answer.text.startswith(("NOK - disk full", "NOK - writing")), "before any publish"
    with nsqd.connect() as producer:
        assert producer.error(pub("t", b"x" * 300_000)).startswith("E_PUB_FAILED PUB failed disk full")
    answer = nsqd.request("GET", "/ping")
    assert answer.status == 500 and answer.text.startswith("NOK - ")
    assert nsqd.get("/stats?format=json")["health"].startswith("NOK - ")
    assert "\nHealth: NOK - " in nsqd.request("GET", "/stats").text
    small_disk.empty()
    wait_until(lambda: nsqd.request("GET", "/ping").body == b"OK", "space to be seen without a publish")
    nsqd.publish("t", b"x" * 300_000)


@needs_root
def test_ping_tells_of_a_disk_with_too_little_room_for_what_was_refused(daemons: Daemons, small_disk: Mount):
    nsqd = daemons.nsqd("--durability=os", data_path=small_disk.path)
    nsqd.publish("t", b"x")
    with (small_disk.path / "ballast").open("wb") as ballast:
        os.posix_fallocate(ballast.fileno(), 0, small_disk.free_bytes() - 64 * 1024 * 1024 - 500_000)
    for _ in range(4):
        assert nsqd.request("POST", "/pub?topic=t", b"x" * 900_000).error == (503, "EXITING")
        assert nsqd.request("GET", "/ping").text.startswith("NOK - disk full: ")
    assert "flintmq_nsqd_healthy 0" in nsqd.request("GET", "/metrics").text
    wait_until(lambda: "publishes are refused, the disk of " in nsqd.log, "it is told")
    small_disk.empty()
    wait_until(lambda: nsqd.request("GET", "/ping").body == b"OK", "space to be seen without a publish")
    nsqd.publish("t", b"x" * 900_000)


@needs_root
def test_ping_tells_of_a_write_error_until_the_next_good_write(daemons: Daemons, small_disk: Mount):
    nsqd = daemons.nsqd("--durability=os", data_path=small_disk.path)
    nsqd.publish("t", b"x")
    small_disk.fill()
    assert nsqd.request("POST", "/pub?topic=new", b"x").error == (503, "EXITING")
    answer = nsqd.request("GET", "/ping")
    assert answer.status == 500 and answer.text.startswith("NOK - ")
    small_disk.empty()
    nsqd.publish("t", b"x" * 300_000)
    wait_until(lambda: nsqd.request("GET", "/ping").body == b"OK", "the next good write")
