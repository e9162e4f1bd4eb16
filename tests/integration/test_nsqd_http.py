"""nsqd's HTTP API over a real socket: status codes, texts, fields and their order (reference/nsq.md 2.0, 2.1)."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator

import pytest
from tests.integration.daemons import Daemons, Nsqd, mpub_body, pub, wait_until

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
MEMORY_FIELDS = [
    "heap_objects",
    "heap_idle_bytes",
    "heap_in_use_bytes",
    "heap_released_bytes",
    "gc_pause_usec_100",
    "gc_pause_usec_99",
    "gc_pause_usec_95",
    "next_gc_bytes",
    "gc_total_runs",
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
        nsqd.post("/pub?topic=t&defer=0", b"now")
        assert consumer.message(timeout_s=0.35).body == b"now"
        assert nsqd.stats("t", "c")["deferred_count"] == 1
        assert consumer.message().body == b"later"
        assert 0.4 <= time.monotonic() - begun < 0.8


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
    ],
)
def test_mpub(nsqd: Nsqd, target: str, body: bytes, expected: list[bytes]):
    assert nsqd.post(target, body).body == b"OK"
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 10)
        assert [message.body for message in consumer.messages(len(expected))] == expected
        consumer.silence(0.05)


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
    head = b"POST /%s?topic=t HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
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
        ("POST", "/nothing?topic=t", 404, "NOT_FOUND", None),
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
    assert list(stats["memory"]) == MEMORY_FIELDS
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
    assert re.fullmatch(r"nsqd v\S+ \(built w/\S+\)", lines[0])
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
