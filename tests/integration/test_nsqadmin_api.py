"""The JSON API of NSQ's nsqadmin: each route with its fields, statuses and words, against real daemons.

What is expected is what NSQ's nsqadmin 1.3 answers; where it fails, what is answered instead.
"""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.integration.daemons import Daemons, Nsqadmin, Nsqd, Nsqlookupd, wait_until

TOPIC_FIELDS = [
    "node", "hostname", "topic_name", "depth", "memory_depth", "backend_depth", "message_count", "delivery_msg_count",
    "nodes", "channels", "paused", "e2e_processing_latency",
]  # fmt: skip
CHANNEL_FIELDS = [
    "node", "hostname", "topic_name", "channel_name", "depth", "memory_depth", "backend_depth", "in_flight_count",
    "deferred_count", "requeue_count", "timeout_count", "message_count", "client_count", "nodes", "clients", "paused",
    "e2e_processing_latency",
]  # fmt: skip
CLIENT_FIELDS = [
    "node", "remote_address", "version", "client_id", "hostname", "user_agent", "connect_ts", "connected",
    "in_flight_count", "ready_count", "finish_count", "requeue_count", "message_count", "sample_rate", "deflate",
    "snappy", "authed", "auth_identity", "auth_identity_url", "tls", "tls_cipher_suite", "tls_version",
    "tls_negotiated_protocol", "tls_negotiated_protocol_is_mutual",
]  # fmt: skip
DELIVERIES = ("delivery_msg_count", "zone_local_msg_count", "region_local_msg_count", "global_msg_count")
LATENCY_FIELDS = ["count", "percentiles", "topic", "channel", "host"]


class Listener:
    """Keeps what is POSTed to it."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        found = self.found

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                found.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/changes"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Deployment:
    """One nsqlookupd, two nsqd, and an nsqadmin for them."""

    def __init__(self, daemons: Daemons, listener: Listener) -> None:
        self.daemons = daemons
        self.listener = listener
        self.nsqlookupd: Nsqlookupd = daemons.nsqlookupd()
        self.lookupd = f"127.0.0.1:{self.nsqlookupd.http[1]}"
        flags = (
            "--durability=os",
            f"--lookupd-tcp-address=127.0.0.1:{self.nsqlookupd.tcp[1]}",
            "--e2e-processing-latency-percentile=0.99,0.5",
        )
        self.nsqds: list[Nsqd] = [daemons.nsqd(*flags), daemons.nsqd(*flags)]
        wait_until(lambda: len(self.nsqlookupd.get("/nodes")["producers"]) == 2, "both are registered")
        self.nsqadmin = self.admin(f"--notification-http-endpoint={listener.url}")

    def admin(self, *flags: str) -> Nsqadmin:
        return self.daemons.nsqadmin("--http-address=127.0.0.1:0", f"--lookupd-http-address={self.lookupd}", *flags)

    def topic(self, name: str, count: int = 2) -> str:
        """A topic with the channel c and one message, on the first nodes."""
        for number, nsqd in enumerate(self.nsqds[:count]):
            nsqd.post(f"/topic/create?topic={name}")
            nsqd.post(f"/channel/create?topic={name}&channel=c")
            nsqd.publish(name, b"message")
            nsqd.wait_given(name)
            wait_until(partial(self._has, nsqd, name), f"{name} of {number} is registered")
        return name

    def _has(self, nsqd: Nsqd, topic: str) -> bool:
        producers = self.nsqlookupd.get("/nodes")["producers"]
        return any(topic in each["topics"] for each in producers if each["http_port"] == nsqd.http[1])

    def address(self, number: int) -> str:
        return f"127.0.0.1:{self.nsqds[number].http[1]}"

    def notified(self, **expected: str) -> dict[str, Any]:
        def look() -> list[dict[str, Any]]:
            return [each for each in self.listener.found if expected.items() <= each.items()]

        return wait_until(look, lambda: f"{expected} among {self.listener.found}")[0]


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    daemons = Daemons(tmp_path_factory.mktemp("nsqadmin"))
    listener = Listener()
    try:
        yield Deployment(daemons, listener)
    finally:
        daemons.close()
        listener.close()


def send(
    nsqadmin: Nsqadmin, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """Status and JSON of the answer to a change."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = nsqadmin.request(method, path, data, headers)
    return answer.status, json.loads(answer.body)


DONE = (200, {"message": ""})


# -- looking -----------------------------------------------------------------------------------------------------------


def test_ping_and_headers(deployed: Deployment):
    answer = deployed.nsqadmin.request("GET", "/ping")
    assert (answer.status, answer.body) == (200, b"OK")
    answer = deployed.nsqadmin.request("GET", "/api/topics")
    assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
    assert answer.headers["X-NSQ-Content-Type"] == "nsq; version=1.0"


def test_topics(deployed: Deployment):
    deployed.topic("topics-b")
    deployed.topic("topics-a", 1)
    found = deployed.nsqadmin.whole("/api/topics")
    names = found["topics"]
    assert {"topics-a", "topics-b"} <= set(names)
    assert names == sorted(names)
    assert found == {"topics": names, "message": ""}


def test_inactive_topics_with_their_channels(deployed: Deployment):
    deployed.nsqlookupd.post("/channel/create?topic=inactive&channel=left")
    deployed.topic("active")
    found = deployed.nsqadmin.whole("/api/topics?inactive=true")
    assert found["topics"]["inactive"] == ["left"]
    assert "active" not in found["topics"]
    assert found["message"] == ""


def test_a_topic_of_two_nodes(deployed: Deployment):
    deployed.topic("two-nodes")
    found = deployed.nsqadmin.whole("/api/topics/two-nodes")
    assert list(found) == [*TOPIC_FIELDS, "message"]
    assert (found["node"], found["hostname"], found["topic_name"], found["message_count"]) == ("*", "", "two-nodes", 2)
    assert (found["depth"], found["paused"], found["message"]) == (0, False, "")
    assert list(found["e2e_processing_latency"]) == LATENCY_FIELDS
    assert found["e2e_processing_latency"]["host"] == "*"
    assert {each["node"] for each in found["nodes"]} == {deployed.address(0), deployed.address(1)}
    for each in found["nodes"]:
        assert list(each) == TOPIC_FIELDS
        assert each["nodes"] is None and each["message_count"] == 1
        assert [list(channel) for channel in each["channels"]] == [CHANNEL_FIELDS]
    (channel,) = found["channels"]
    assert list(channel) == CHANNEL_FIELDS
    assert (channel["node"], channel["depth"], channel["message_count"], channel["clients"]) == ("*", 2, 2, None)
    assert {each["node"]: each["depth"] for each in channel["nodes"]} == dict.fromkeys(
        (deployed.address(0), deployed.address(1)), 1
    )


def test_a_topic_of_one_node_has_its_channels_as_they_are(deployed: Deployment):
    deployed.topic("one-node", 1)
    (channel,) = deployed.nsqadmin.whole("/api/topics/one-node")["channels"]
    assert (channel["node"], channel["nodes"]) == (deployed.address(0), None)


def test_a_channel_with_its_consumers(deployed: Deployment):
    topic = deployed.topic("consumed")
    with deployed.nsqds[0].connect() as consumer:
        consumer.identify(client_id="me", hostname="here", user_agent="test/1")
        consumer.subscribe(topic, "c", 5)
        message = consumer.message()
        found = deployed.nsqadmin.whole("/api/topics/consumed/c")
        assert [name for name in found if name not in DELIVERIES] == [*CHANNEL_FIELDS, "message"]
        assert found["delivery_msg_count"] == found["global_msg_count"] == 1
        assert (found["node"], found["depth"], found["in_flight_count"], found["client_count"]) == ("*", 1, 1, 1)
        (client,) = found["clients"]
        assert list(client) == CLIENT_FIELDS
        assert (client["client_id"], client["hostname"], client["user_agent"]) == ("me", "here", "test/1")
        assert (client["node"], client["ready_count"], client["in_flight_count"]) == (deployed.address(0), 5, 1)
        assert client["connected"] >= 0 and client["connected"] % 1_000_000_000 == 0
        assert [each["node"] for each in found["nodes"] if each["clients"]] == [deployed.address(0)]
        consumer.finish(message)
        consumer.settle()
    latency = wait_until(
        lambda: deployed.nsqadmin.whole("/api/topics/consumed/c")["e2e_processing_latency"]["percentiles"]
    )
    assert [sorted(each) for each in latency] == [["average", "count", "max", "min", "quantile"]] * 2
    of_node = deployed.nsqadmin.whole("/api/topics/consumed/c")["nodes"]
    percentiles = [each["e2e_processing_latency"]["percentiles"] for each in of_node]
    assert ["average", "count", "max", "min", "quantile", "value"] in [sorted(each[0]) for each in percentiles if each]


def test_what_nobody_has_is_not_found(deployed: Deployment):
    deployed.topic("found")
    for path, word in (
        ("/api/topics/none", "TOPIC_NOT_FOUND"),
        ("/api/topics/none/c", "TOPIC_NOT_FOUND"),
        ("/api/topics/found/none", "CHANNEL_NOT_FOUND"),
        ("/api/topics/%3Cscript%3E", "TOPIC_NOT_FOUND"),
        ("/api/nodes/10.0.0.1:4151", "NODE_NOT_FOUND"),
        ("/api/none", "NOT_FOUND"),
    ):
        answer = deployed.nsqadmin.request("GET", path)
        assert (path, answer.status, answer.json) == (path, 404, {"message": word})


def test_another_method_is_not_allowed(deployed: Deployment):
    assert send(deployed.nsqadmin, "PUT", "/api/topics", {}) == (405, {"message": "METHOD_NOT_ALLOWED"})


def test_a_slash_too_many_leads_to_the_page(deployed: Deployment):
    answer = deployed.nsqadmin.request("GET", "/topics/a%20b/?t=24h", None, {"X-Forwarded-Proto": "https"})
    assert (answer.status, answer.headers["Location"]) == (301, "/topics/a%20b?t=24h")  # to whatever the visitor asked
    assert deployed.nsqadmin.request("GET", "//evil.example/").status == 404


def test_methods_that_a_path_takes_are_named(deployed: Deployment):
    answer = deployed.nsqadmin.request("OPTIONS", "/api/topics/t")
    assert (answer.status, answer.headers["Allow"]) == (200, "DELETE, GET, HEAD, OPTIONS, POST")
    answer = deployed.nsqadmin.request("PUT", "/api/topics/t", b"{}")
    assert (answer.status, answer.headers["Allow"]) == (405, "DELETE, GET, HEAD, OPTIONS, POST")


def test_without_nsqlookupd_nodes_say_their_names_and_topics_are_made(deployed: Deployment):
    addresses = [f"--nsqd-http-address={deployed.address(number)}" for number in (0, 1)]
    nsqadmin = deployed.daemons.nsqadmin("--http-address=127.0.0.1:0", *addresses)
    assert send(nsqadmin, "POST", "/api/topics", {"topic": "only-nsqd", "channel": "c"}) == DONE
    for path in ("/api/topics/only-nsqd", "/api/topics/only-nsqd/c"):
        assert {each["hostname"] for each in nsqadmin.get(path)["nodes"]} == {socket.gethostname()}


def test_nodes(deployed: Deployment):
    topic = deployed.topic("of-nodes")
    deployed.nsqlookupd.post(f"/topic/tombstone?topic={topic}&node={deployed.address(1)}")
    found = deployed.nsqadmin.whole("/api/nodes")
    assert found["message"] == ""
    rows = {f"127.0.0.1:{each['http_port']}": each for each in found["nodes"]}
    assert rows.keys() == {deployed.address(0), deployed.address(1)}
    for number in (0, 1):
        row = rows[deployed.address(number)]
        assert list(row) == [
            "remote_addresses", "remote_address", "hostname", "broadcast_address", "tcp_port", "http_port", "version",
            "topics", "out_of_date",
        ]  # fmt: skip
        assert row["remote_addresses"] == [f"{deployed.lookupd}/{row['remote_address']}"]
        assert (row["tcp_port"], row["out_of_date"]) == (deployed.nsqds[number].tcp[1], False)
        assert {"topic": topic, "tombstoned": number == 1} in row["topics"]


def test_a_node(deployed: Deployment):
    topic = deployed.topic("of-node", 1)
    with deployed.nsqds[0].connect() as consumer:
        consumer.subscribe(topic, "c", 0)
        found = deployed.nsqadmin.whole(f"/api/nodes/{deployed.address(0)}")
    assert list(found) == ["node", "topics", "total_messages", "total_clients", "message"]
    assert (found["node"], found["total_clients"], found["message"]) == (deployed.address(0), 1, "")
    (row,) = (each for each in found["topics"] if each["topic_name"] == topic)
    assert list(row) == TOPIC_FIELDS
    assert found["total_messages"] == sum(each["message_count"] for each in found["topics"])


def test_the_counter(deployed: Deployment):
    topic = deployed.topic("counted")
    key = f"{topic}:c:{deployed.address(0)}"
    row = wait_until(lambda: deployed.nsqadmin.whole("/api/counter")["stats"].get(key), "it is counted")
    assert row == {"node": deployed.address(0), "topic_name": topic, "channel_name": "c", "message_count": 1}
    found = deployed.nsqadmin.whole("/api/counter")
    assert list(found) == ["stats", "message"]
    assert found["message"] == ""


# -- changing ----------------------------------------------------------------------------------------------------------


def test_create_a_topic_and_a_channel(deployed: Deployment):
    nsqadmin = deployed.nsqadmin
    assert send(nsqadmin, "POST", "/api/topics", {"topic": "created"}) == DONE
    assert "created" in deployed.nsqlookupd.get("/topics")["topics"]
    deployed.topic("with-channel")
    assert send(nsqadmin, "POST", "/api/topics", {"topic": "with-channel", "channel": "new"}) == DONE
    assert "new" in deployed.nsqlookupd.channels("with-channel")
    for nsqd in deployed.nsqds:
        assert nsqd.stats("with-channel", "new")["depth"] == 0
    found = deployed.notified(action="create_channel", topic="with-channel", channel="new")
    assert found.keys() == {"action", "topic", "channel", "timestamp", "remote_ip", "user_agent", "url", "via"}
    assert found["url"] == f"http://127.0.0.1:{nsqadmin.http[1]}/api/topics"
    assert found["remote_ip"].startswith("127.0.0.1:")
    deployed.notified(action="create_topic", topic="with-channel")


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/api/topics", {"topic": "bad name"}, "INVALID_TOPIC"),
        ("/api/topics", {}, "INVALID_TOPIC"),
        ("/api/topics", {"topic": "t", "channel": "<b>"}, "INVALID_CHANNEL"),
        ("/api/topics", b"{", "INVALID_BODY"),
        ("/api/topics", {"topic": 7}, "INVALID_BODY: topic must be text"),
        ("/api/topics/t", {"action": "explode"}, "INVALID_ACTION"),
        ("/api/topics/t", {}, "INVALID_ACTION"),
        ("/api/topics/t/c", {"action": "explode"}, "INVALID_ACTION"),
    ],
)
def test_a_change_that_cannot_be_read_is_refused(deployed: Deployment, path: str, body: object, word: str):
    assert send(deployed.nsqadmin, "POST", path, body) == (400, {"message": word})


def test_a_body_is_read_as_by_nsq(deployed: Deployment):
    nsqadmin, topic = deployed.nsqadmin, deployed.topic("read-as-by-nsq")
    assert send(nsqadmin, "POST", "/api/topics", {"topic": "without", "channel": None}) == DONE
    assert "without" in deployed.nsqlookupd.get("/topics")["topics"]
    assert send(nsqadmin, "POST", "/api/topics", {"topic": None, "Topic": "either", "CHANNEL": None}) == DONE
    for body, is_paused in (
        (b'{"action":"pause"}{"action":"unpause"}', True),
        (b'\r\n\t {"action":"unpause"} garbage \xff', False),
        ('{"action":"pause","of":"ann\u00e9 \U0001f600"}\n'.encode(), True),
    ):
        assert send(nsqadmin, "POST", f"/api/topics/{topic}", body) == DONE
        assert [nsqd.stats(topic)["paused"] for nsqd in deployed.nsqds] == [is_paused] * 2
    for body in (
        b"", b"{", b'{"action":"pause"', b"garbage", b'x{"action":"pause"}', b'["pause"]', b'"pause"', b"7", b"NaN",
        b'{"action":"unpause","of":NaN}', b'{"action":"unpause\xff"}', b"[" * 50_000, b'{"a":' * 12_000,
        b"1" * 60_000,
    ):  # fmt: skip
        assert send(nsqadmin, "POST", f"/api/topics/{topic}", body) == (400, {"message": "INVALID_BODY"}), body[:30]
    assert deployed.nsqds[0].stats(topic)["paused"]


def test_the_user_of_a_notification_is_nobody_that_anybody_can_name(deployed: Deployment, tmp_path: Path):
    topic = deployed.topic("told-of-whom")
    path = f"/api/topics/{topic}"
    notifying = f"--notification-http-endpoint={deployed.listener.url}"
    (users := tmp_path / "users.toml").write_text('[[user]]\nname = "ann"\nrole = "admin"\nheader = true\n')
    ann, basic = {"X-Forwarded-User": "ann"}, {"Authorization": f"Basic {base64.b64encode(b'bob:x').decode()}"}

    def told(nsqadmin: Nsqadmin, action: str, headers: dict[str, str]) -> str | None:
        deployed.listener.found.clear()
        assert send(nsqadmin, "POST", path, {"action": action}, headers) == DONE
        user: str | None = deployed.notified(action=f"{action}_topic", topic=topic).get("user")
        return user

    assert told(deployed.nsqadmin, "pause", ann) is None
    assert told(deployed.nsqadmin, "unpause", ann | basic) == "bob"
    for flag in ("--admin-user=ann", f"--users-file={users}", "--acl-from-cidr=127.0.0.0/8"):
        nsqadmin = deployed.admin(notifying, flag)
        assert told(nsqadmin, "pause", ann) == "ann", flag
        assert told(nsqadmin, "unpause", ann | basic) == "bob", flag
        nsqadmin.stop()


def test_pause_and_unpause_a_topic_and_a_channel(deployed: Deployment):
    topic = deployed.topic("paused")
    for path, name in ((f"/api/topics/{topic}", ""), (f"/api/topics/{topic}/c", "c")):
        for action, is_paused in (("pause", True), ("unpause", False)):
            assert send(deployed.nsqadmin, "POST", path, {"action": action}) == DONE
            assert [nsqd.stats(topic, name)["paused"] for nsqd in deployed.nsqds] == [is_paused] * 2
            deployed.notified(action=f"{action}_{'channel' if name else 'topic'}", topic=topic)


def test_empty_a_channel_and_a_topic(deployed: Deployment):
    topic = deployed.topic("emptied")
    assert send(deployed.nsqadmin, "POST", f"/api/topics/{topic}/c", {"action": "empty"}) == DONE
    assert [nsqd.stats(topic, "c")["depth"] for nsqd in deployed.nsqds] == [0, 0]
    deployed.nsqds[0].post(f"/channel/delete?topic={topic}&channel=c")
    deployed.nsqds[0].publish(topic, b"waits for a channel")
    assert deployed.nsqds[0].stats(topic)["depth"] > 0
    assert send(deployed.nsqadmin, "POST", f"/api/topics/{topic}", {"action": "empty"}) == DONE
    assert deployed.nsqds[0].stats(topic)["depth"] == 0
    deployed.notified(action="empty_topic", topic=topic)


def test_delete_a_channel_and_a_topic(deployed: Deployment):
    topic = deployed.topic("deleted")
    assert send(deployed.nsqadmin, "DELETE", f"/api/topics/{topic}/c") == DONE
    assert "c" not in deployed.nsqlookupd.channels(topic)
    assert [nsqd.stats(topic)["channels"] for nsqd in deployed.nsqds] == [[], []]
    assert send(deployed.nsqadmin, "DELETE", f"/api/topics/{topic}") == DONE
    assert topic not in deployed.nsqlookupd.get("/topics")["topics"]
    for nsqd in deployed.nsqds:
        assert not nsqd.get(f"/stats?format=json&topic={topic}")["topics"]
    deployed.notified(action="delete_topic", topic=topic)


def test_a_change_of_what_is_not_there_is_not_found(deployed: Deployment):
    deployed.topic("there")
    assert send(deployed.nsqadmin, "POST", "/api/topics/none", {"action": "pause"})[0] == 404
    assert send(deployed.nsqadmin, "DELETE", "/api/topics/none") == (404, {"message": "TOPIC_NOT_FOUND"})
    assert send(deployed.nsqadmin, "POST", "/api/topics/there/none", {"action": "pause"}) == (
        404, {"message": "CHANNEL_NOT_FOUND"},
    )  # fmt: skip
    deployed.topic("told-after")
    assert send(deployed.nsqadmin, "POST", "/api/topics/told-after", {"action": "pause"}) == DONE
    deployed.notified(action="pause_topic", topic="told-after")
    assert not [
        each for each in deployed.listener.found if each.get("topic") == "none" or each.get("channel") == "none"
    ]


def test_tombstone(deployed: Deployment):
    topic = deployed.topic("tombstoned")
    assert send(deployed.nsqadmin, "DELETE", f"/api/nodes/{deployed.address(1)}", {"topic": topic}) == DONE
    assert deployed.nsqlookupd.producers(topic) == [deployed.nsqds[0].tcp[1]]
    assert not deployed.nsqds[1].get(f"/stats?format=json&topic={topic}")["topics"]
    deployed.notified(action="tombstone_topic_producer", topic=topic, node=deployed.address(1))
    for body, status, word in (
        ({"topic": "bad name"}, 400, "INVALID_TOPIC"),
        (b"nonsense", 400, "INVALID_BODY"),
    ):
        assert send(deployed.nsqadmin, "DELETE", f"/api/nodes/{deployed.address(1)}", body) == (
            status,
            {"message": word},
        )
    assert send(deployed.nsqadmin, "DELETE", "/api/nodes/10.0.0.1:4151", {"topic": topic})[0] == 404


# -- who may -----------------------------------------------------------------------------------------------------------


def test_the_acl_of_nsq_guards_changes_and_nothing_else(deployed: Deployment, tmp_path: Path):
    topic = deployed.topic("guarded")
    audit = tmp_path / "audit.log"
    nsqadmin = deployed.admin("--admin-user=ann", "--acl-http-header=X-Who", f"--audit-log={audit}", "--base-path=/nsq")
    assert nsqadmin.get(f"/nsq/api/topics/{topic}")["message_count"] == 2
    changes: list[tuple[str, str, object]] = [
        ("POST", "/nsq/api/topics", {"topic": "new"}),
        ("POST", f"/nsq/api/topics/{topic}", {"action": "pause"}),
        ("POST", f"/nsq/api/topics/{topic}/c", {"action": "empty"}),
        ("DELETE", f"/nsq/api/topics/{topic}", None),
        ("DELETE", f"/nsq/api/topics/{topic}/c", None),
        ("DELETE", f"/nsq/api/nodes/{deployed.address(0)}", {"topic": topic}),
    ]
    for method, path, body in changes:
        for headers in ({}, {"X-Who": "bob"}, {"X-Forwarded-User": "ann"}):
            assert send(nsqadmin, method, path, body, headers) == (403, {"message": "FORBIDDEN"})
    assert nsqadmin.request("GET", "/api/topics").status == 404  # not below the base path
    assert send(nsqadmin, "POST", f"/nsq/api/topics/{topic}", {"action": "pause"}, {"X-Who": "ann"}) == DONE
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [line["outcome"] for line in lines] == ["refused"] * 18 + ["done"]
    assert [line["action"] for line in lines[:18:3]] == [
        "create_topic", "pause_topic", "empty_channel", "delete_topic", "delete_channel", "tombstone_topic_producer",
    ]  # fmt: skip
    assert lines[-1].items() >= {"who": "ann", "role": "admin", "how": "header", "action": "pause_topic"}.items()
    assert lines[-1]["subject"] == topic


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "evil.example"},
    ],
)
def test_a_page_of_a_stranger_changes_and_reads_nothing(deployed: Deployment, headers: dict[str, str]):
    topic = deployed.topic("strangers", 1)
    for method, path in (("DELETE", f"/api/topics/{topic}"), ("GET", "/api/topics"), ("GET", "/topics")):
        answer = deployed.nsqadmin.request(method, path, None, headers)
        assert answer.status == 403, (method, path)
        assert b"FORBIDDEN_ORIGIN" in answer.body


# -- options and Graphite ----------------------------------------------------------------------------------------------


def test_config_is_read_and_changed_from_the_networks_that_may(deployed: Deployment):
    nsqadmin = deployed.admin()
    assert nsqadmin.get("/config/nsqlookupd_http_addresses") == [deployed.lookupd]
    assert nsqadmin.get("/config/http_client_request_timeout") == 5_000_000_000
    assert nsqadmin.request("GET", "/config/base_path").body == b"/"
    assert send(nsqadmin, "PUT", "/config/log_level", b"debug") == (200, 1)
    assert nsqadmin.get("/config/log_level") == 1
    assert send(nsqadmin, "PUT", "/config/nsqlookupd_http_addresses", ["127.0.0.1:1"]) == (200, ["127.0.0.1:1"])
    assert nsqadmin.request("GET", "/api/topics").status == 502
    for name, body, status, word in (
        ("log_level", b"loud", 400, "INVALID_VALUE"),
        ("log_level", b"", 413, "INVALID_VALUE"),
        ("log_level", b"x" * (1024 * 1024 + 1), 413, "INVALID_VALUE"),
        ("nsqlookupd_http_addresses", b"[7]", 400, "INVALID_VALUE"),
        ("nsqlookupd_http_addresses", b'["no address"]', 400, "INVALID_VALUE"),
        ("base_path", b"/x", 400, "INVALID_OPTION"),
    ):
        assert send(nsqadmin, "PUT", f"/config/{name}", body) == (status, {"message": word})
    assert nsqadmin.request("GET", "/config/nonsense").json == {"message": "INVALID_OPTION"}
    elsewhere = deployed.admin("--allow-config-from-cidr=10.0.0.0/8")
    answer = elsewhere.request("GET", "/config/log_level")
    assert (answer.status, answer.json) == (403, {"message": "FORBIDDEN"})


def test_graphite_is_asked_for_a_rate_and_fetched_for_browsers(deployed: Deployment):
    asked: list[str] = []

    class Graphite(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.path} {self.headers.get('Authorization', '')}")
            is_json = "format=json" in self.path
            value = -1 if "negative" in self.path else 120
            body = json.dumps([{"target": "x", "datapoints": [[value, 1]]}]).encode() if is_json else b"<svg onload=x>"
            self.send_response(200)
            self.send_header("Content-Type", "application/json" if is_json else "image/svg+xml")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Graphite)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://user:pass@127.0.0.1:{server.server_port}"
        nsqadmin = deployed.admin(f"--graphite-url={url}", "--proxy-graphite", "--statsd-interval=10s")
        assert nsqadmin.get("/api/graphite?metric=rate&target=sum(a)") == {"rate": "12.00"}
        assert asked[-1] == "/render?from=-20sec&until=-10sec&format=json&target=sum%28a%29 Basic dXNlcjpwYXNz"
        assert nsqadmin.get("/api/graphite?metric=rate&target=negative") == {"rate": "N/A"}
        for path, word in (("metric=depth&target=x", "INVALID_ARG_METRIC"), ("metric=rate", "INVALID_ARG_TARGET")):
            assert nsqadmin.request("GET", f"/api/graphite?{path}").json == {"message": word}
        answer = nsqadmin.request("GET", "/render?target=a&width=120")
        assert asked[-1].startswith("/render?target=a&width=120 ")
        links = {each["label"]: each for each in nsqadmin.get("/api/v2/graphite?series=channel&name=t/c%23ephemeral")}
        assert links["depth"]["target"] == "sumSeries(stats.gauges.nsq.*.topic.t.channel.cephemeral.depth)"
        counted = "sumSeries(stats.counters.nsq.*.topic.t.channel.cephemeral.message_count.count)"
        assert links["message count"]["target"] == counted
        assert links["depth"]["url"].startswith("/render?target=sumSeries")
        plain = deployed.admin(f"--graphite-url={url}", "--statsd-gauge-format=", "--statsd-prefix=q")
        (link, _) = plain.get("/api/v2/graphite?series=topic&name=t")
        assert link["target"] == "sumSeries(q.topic.t.depth)"
        assert link["url"].startswith(f"http://127.0.0.1:{server.server_port}/render?")  # without user and password
        assert answer.headers["Content-Type"] == "application/octet-stream"  # a picture that could run is none
    finally:
        server.shutdown()
        server.server_close()
    assert nsqadmin.request("GET", "/api/graphite?metric=rate&target=x").status == 500
    assert deployed.nsqadmin.request("GET", "/render?target=a").status == 404


def test_a_file_of_nsq_s_nsqadmin_is_read(deployed: Deployment, tmp_path: Path):
    path = tmp_path / "nsqadmin.cfg"
    path.write_text(
        'log_level = "info"\nlog_prefix = ""\nacl_http_header = "X_Forwarded_User"\nadmin_users = ["admin"]\n'
        'allow_config_from_cidr = ""\nbase_path = "/"\nhttp_client_connect_timeout = "2s"\n'
        "http_client_request_timeout = 3000\n"
        'http_client_tls_cert = ""\nhttp_client_tls_insecure_skip_verify = false\nhttp_client_tls_key = ""\n'
        'http_client_tls_root_ca_file = ""\nhttp_address = "127.0.0.1:0"\ngraphite_url = ""\nproxy_graphite = false\n'
        'statsd_prefix = "nsq.%s"\nstatsd_counter_format = "stats.counters.%s.count"\n'
        'statsd_gauge_format = "stats.gauges.%s"\nstatsd_interval = "60s"\nnotification_http_endpoint = ""\n'
        f'nsqlookupd_http_addresses = ["{deployed.lookupd}"]\nnsqd_http_addresses = []\nno_such_key = 1\n'
    )
    nsqadmin = deployed.daemons.nsqadmin(f"--config={path}")
    assert nsqadmin.get("/config/http_client_request_timeout") == 3_000_000_000
    assert nsqadmin.get("/config/statsd_interval") == 60_000_000_000
    assert nsqadmin.get("/config/admin_users") == ["admin"]
    change = ("POST", "/api/topics", {"topic": "by-file"})
    assert send(nsqadmin, *change) == (403, {"message": "FORBIDDEN"})
    assert send(nsqadmin, *change, headers={"X_Forwarded_User": "admin"}) == DONE
