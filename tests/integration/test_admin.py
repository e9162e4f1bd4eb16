"""``NsqdAdmin`` and ``LookupdAdmin`` of both flavours against real daemons: every method does what it says.

One nsqd serves most cases; each has a topic of its own.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import CLIENT_NAME, Certificates
from tests.integration.daemons import PATIENCE_S, Daemons, Nsqd, Nsqlookupd, dpub, pub, wait_until
from tests.integration.test_http_auth import write
from tests.integration.test_upgrades import https_address

import flintmq
from flintmq import ConnectionFailed, ConnectionOptions, HttpRefused, OptionError, RemoteProtocolError, Start, cli, sync

HOUR_MS = 3_600_000
FLAVOURS = ("asyncio", "blocking")


class InLoop:
    """An admin client of asyncio whose methods may be called without ``await``; each in an event loop of its own."""

    def __init__(self, kind: Any, *args: Any, **options: Any) -> None:
        self._make = lambda: kind(*args, **options)
        self._make()  # what is wrong with the arguments is told at once

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any, **options: Any) -> Any:
            async with self._make() as admin:
                return await getattr(admin, name)(*args, **options)

        return lambda *args, **options: asyncio.run(call(*args, **options))


def nsqd_admin(flavour: str, address: str, **options: Any) -> Any:
    return (
        sync.NsqdAdmin(address, **options) if flavour == "blocking" else InLoop(flintmq.NsqdAdmin, address, **options)
    )


def lookupd_admin(flavour: str, address: str, **options: Any) -> Any:
    if flavour == "blocking":
        return sync.LookupdAdmin(address, **options)
    return InLoop(flintmq.LookupdAdmin, address, **options)


def address_of(daemon: Nsqd | Nsqlookupd) -> str:
    host, port = daemon.http
    return f"{host}:{port}"


@pytest.fixture(scope="module")
def nsqlookupd(shared_nsqlookupd: Nsqlookupd) -> Nsqlookupd:
    return shared_nsqlookupd


@pytest.fixture(scope="module")
def nsqd(shared_nsqd: Nsqd) -> Nsqd:
    return shared_nsqd


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def admin(flavour: str, nsqd: Nsqd) -> Any:
    return nsqd_admin(flavour, address_of(nsqd))


@pytest.fixture
def lookup(flavour: str, nsqlookupd: Nsqlookupd) -> Any:
    return lookupd_admin(flavour, address_of(nsqlookupd))


def depth(admin: Any, topic: str, channel: str) -> int:
    row = admin.stats(topic, channel)["topics"][0]["channels"][0]
    assert isinstance(row["depth"], int)
    return row["depth"]


def wait_for_depth(admin: Any, topic: str, channel: str, count: int) -> None:
    """Wait for messages of a new topic, which hands out none before nsqlookupd was asked for its channels."""
    wait_until(lambda: depth(admin, topic, channel) == count, f"{count} messages in channel {channel}")


def bodies(messages: list[Any]) -> list[bytes]:
    return [message.body for message in messages]


# -- topics and channels -----------------------------------------------------------------------------------------------


def test_topics_and_channels(admin: Any, nsqd: Nsqd, flavour: str):
    topic = f"topics-{flavour}"
    assert admin.create_topic(topic) is None
    assert admin.create_topic(topic) is None, "once more is fine"
    admin.create_channel(topic, "c")
    nsqd.publish(topic, b"a", b"b")
    wait_for_depth(admin, topic, "c", 2)

    admin.pause_channel(topic, "c")
    assert nsqd.stats(topic, "c")["paused"] is True
    admin.unpause_channel(topic, "c")
    assert nsqd.stats(topic, "c")["paused"] is False
    admin.empty_channel(topic, "c")
    assert depth(admin, topic, "c") == 0

    admin.pause_topic(topic)
    assert nsqd.stats(topic)["paused"] is True
    nsqd.publish(topic, b"stays at the topic")
    admin.empty_topic(topic)
    admin.unpause_topic(topic)
    assert nsqd.stats(topic)["paused"] is False
    assert depth(admin, topic, "c") == 0

    admin.set_channel_order(topic, "c", True)
    with nsqd.connect() as consumer:
        assert consumer.error(b"SUB %s c\n" % topic.encode()).startswith("E_SUB_ORDER_IS_MUST")
    admin.set_channel_order(topic, "c", False)
    admin.delete_channel(topic, "c")
    assert nsqd.stats(topic)["channels"] == []
    admin.delete_topic(topic)
    assert admin.stats(topic)["topics"] in (None, [])


def test_a_topic_with_partitions(admin: Any, flavour: str):
    topic = f"parts-{flavour}"
    admin.create_topic(topic, partitions=2, multipart=True, retention_days=3, auto_channels=False)
    with pytest.raises(HttpRefused) as caught:
        admin.create_topic(topic, partitions=3)
    assert caught.value.status == 400
    admin.create_channel(topic, "c")
    assert len(admin.stats(topic)["topics"][0]["partitions"]) == 2
    (row,) = admin.stats(topic, partition=1)["topics"]
    assert row["topic_full_name"] == f"{topic}-1"
    admin.pause_channel(topic, "c", partition=1)
    found = [
        each["channels"][0]["paused"] for number in (0, 1) for each in admin.stats(topic, partition=number)["topics"]
    ]
    assert found == [False, True]
    admin.empty_deferred(topic, "c", partition=0)
    admin.delete_channel(topic, "c", partition=1)
    assert "partition 0 channel c" in admin.channel_state(topic, "c")
    admin.change_topic(topic, retention_days=5, auto_channels=True)
    changed = admin.stats(topic)["topics"][0]
    assert [changed[name] for name in ("retention_days", "meta_version", "extend_support")] == [5, 1, False]
    admin.change_topic(topic, headers=True)
    changed = admin.stats(topic)["topics"][0]
    assert [changed[name] for name in ("retention_days", "meta_version", "extend_support")] == [5, 2, True]
    assert admin.hourly_sizes(topic, partition=0) == {"hourly_pub_size": [0] * 22}
    assert admin.server_stats()["server_pub_failed"] == 0
    admin.limit_clients(topic, "c", 5)
    admin.set_log_level("info")


# -- replay ------------------------------------------------------------------------------------------------------------


def test_a_channel_goes_on_elsewhere(admin: Any, nsqd: Nsqd, flavour: str):
    topic = f"replay-{flavour}"
    admin.create_topic(topic)
    admin.create_channel(topic, "c")
    nsqd.publish(topic, b"a", b"b", b"c")
    wait_for_depth(admin, topic, "c", 3)

    def places(start: Any, **options: Any) -> list[bytes]:
        admin.set_offset(topic, "c", start, **options)
        return bodies(admin.peek(topic, "c"))

    assert places("end") == []
    assert places("beginning") == [b"a", b"b", b"c"]
    assert places(datetime.now(UTC) + timedelta(hours=1)) == []
    assert places(datetime.now(UTC) - timedelta(hours=1)) == [b"a", b"b", b"c"]
    assert places(timedelta(0), partition=0) in ([], [b"a", b"b", b"c"])  # the present second
    assert places(Start.count(2)) == [b"b", b"c"]
    second = admin.get_message(topic, count=2)
    assert places(Start.offset(second.offset)) == [b"b", b"c"]
    assert places(timedelta(hours=1)) == [b"a", b"b", b"c"]

    admin.skip_channel(topic, "c")
    wait_until(lambda: depth(admin, topic, "c") == 0, "all is skipped")
    assert nsqd.stats(topic, "c")["skipped"] is True
    admin.unskip_channel(topic, "c")
    nsqd.publish(topic, b"d")
    assert bodies(admin.peek(topic, "c")) == [b"d"]


# -- messages ----------------------------------------------------------------------------------------------------------


def test_messages(admin: Any, nsqd: Nsqd, flavour: str):
    topic = f"messages-{flavour}"
    admin.create_topic(topic)
    admin.create_channel(topic, "c")
    admin.create_channel(topic, "d")
    with nsqd.connect() as producer:
        producer.ok(dpub(topic, HOUR_MS, b"late"))
    nsqd.publish(topic, b"text", b"\xff\x00bytes", b"longer than that")
    wait_for_depth(admin, topic, "c", 3)

    late, first, binary = (admin.get_message(topic, count=number) for number in (1, 2, 3))
    assert (first.body, first.queue_cnt_index, late.offset, first.trace_id) == (b"text", 2, 0, 0)
    assert abs(first.timestamp_ns / 1e9 - datetime.now(UTC).timestamp()) < 60
    assert binary.body == b"\xff\x00bytes"
    for name in (first.id, first.message_id, first.message_id.encode()):
        assert admin.get_message(topic, name) == first
    assert admin.get_message(topic, offset=binary.offset) == binary

    with nsqd.connect() as consumer:
        consumer.identify(client_id="somebody")
        consumer.subscribe(topic, "c", 1)
        held = consumer.message()
        (in_flight,) = admin.peek(topic, "c", "in_flight")
        assert (in_flight.body, in_flight.attempts, in_flight.client.client_id) == (b"text", 1, "somebody")
        assert in_flight.message_id.encode() == held.id
        assert 0 < in_flight.timeout_in_ms <= 60_000
        waiting = admin.peek(topic, "c", count=2, max_body=6)
        assert [(each.body, each.body_size) for each in waiting] == [(b"\xff\x00byte", 7), (b"longer", 16)]
        (deferred,) = admin.peek(topic, "d", "deferred")
        assert (deferred.body, deferred.id, deferred.partition, deferred.attempts) == (b"late", late.id, 0, 0)
        assert 0 < deferred.due_in_ms <= HOUR_MS
        assert deferred.due_ns > first.timestamp_ns

        assert admin.finish_message(topic, "c", held.id) is None
        assert consumer.message().body == b"\xff\x00bytes"
        consumer.send(b"FIN " + held.id + b"\n")
        assert consumer.frame().data.startswith(b"E_FIN_FAILED")
    assert admin.cancel_message(topic, binary.id) == ["c", "d"]
    assert admin.cancel_message(topic, deferred.message_id) == ["c", "d"]
    with pytest.raises(HttpRefused, match="404 MESSAGE_NOT_FOUND"):
        admin.cancel_message(topic, deferred.message_id)
    wait_until(lambda: bodies(admin.peek(topic, "c")) == [b"longer than that"], "the connection is gone")
    assert bodies(admin.peek(topic, "d")) == [b"text", b"longer than that"]


def test_messages_of_partitions(admin: Any, nsqd: Nsqd, flavour: str):
    topic = f"message-parts-{flavour}"
    admin.create_topic(topic, partitions=2)
    admin.create_channel(topic, "c")
    with nsqd.connect() as producer:
        producer.ok(pub(f"{topic} 1", b"in one"))
    wait_for_depth(admin, topic, "c", 1)
    (waiting,) = admin.peek(topic, "c", partition=1)
    assert admin.peek(topic, "c", partition=0) == []
    assert (waiting.partition, waiting.body, len(waiting.message_id)) == (1, b"in one", 32)
    raw = bytes.fromhex(waiting.message_id)
    assert admin.get_message(topic, raw).body == b"in one"
    assert admin.get_message(topic, count=1, partition=1).id == waiting.id
    with pytest.raises(HttpRefused, match="MISSING_ARG_PARTITION"):
        admin.get_message(topic, count=1)
    admin.finish_message(topic, "c", raw)
    assert admin.peek(topic, "c") == []


# -- settings and trace ------------------------------------------------------------------------------------------------


def test_settings(admin: Any, flavour: str):
    topic = f"settings-{flavour}"
    admin.create_topic(topic)
    admin.create_channel(topic, "c")
    assert admin.topic_settings(topic).settings == {}
    changed = admin.change_topic_settings(topic, max_attempts=5, ttl=timedelta(hours=1), overflow="drop_oldest")
    assert changed.settings == {"max_attempts": 5, "ttl_ms": HOUR_MS, "overflow": "drop_oldest"}
    assert changed.effective["dead_letter_topic"] == f"{topic}.dead"
    assert admin.topic_settings(topic) == changed
    own = admin.change_channel_settings(topic, "c", ttl=0, max_messages=10, max_bytes=1 << 20)
    assert (own.channel, own.effective["ttl_ms"], own.effective["max_attempts"]) == ("c", 0, 5)
    assert admin.change_channel_settings(topic, "c", inherit="ttl_ms").effective["ttl_ms"] == HOUR_MS
    assert admin.channel_settings(topic, "c").settings == {"max_messages": 10, "max_bytes": 1 << 20}
    with pytest.raises(HttpRefused, match="400 INVALID_ARG_DEAD_LETTER_TOPIC"):
        admin.change_topic_settings(topic, dead_letter_topic="not a name")
    with pytest.raises(HttpRefused, match="400 INVALID_SETTING"):
        admin.change_topic_settings(topic, inherit="no_such_setting")


def test_a_trace(admin: Any, nsqd: Nsqd, flavour: str):
    topic = f"trace-{flavour}"
    admin.create_topic(topic)
    admin.enable_trace(topic)
    nsqd.publish(topic, b"a")
    with nsqd.connect() as consumer:
        consumer.subscribe(topic, "c", 1)
        consumer.finish(consumer.message())
        consumer.settle()
    trace = admin.find_trace(topic, 1)
    assert [event.action for event in trace.events] == ["PUB", "START", "FIN"]
    assert {event.msgid for event in trace.events} == {1}
    assert [event.channel for event in trace.events] == ["", "c", "c"]
    assert trace.complete and trace.events == admin.find_trace(topic, "0000000000000001", limit=5).events
    assert admin.find_trace(topic, trace_id=99).events == []
    admin.disable_trace(topic)
    nsqd.publish(topic, b"b")
    assert admin.find_trace(topic, 2).events == []
    admin.create_channel(topic, "c")
    admin.enable_trace(topic, "c", only_traced=True)
    admin.disable_trace(topic, "c")


# -- the node ----------------------------------------------------------------------------------------------------------


def test_the_node(admin: Any, nsqd: Nsqd):
    assert admin.ping() == "OK"
    assert admin.info()["tcp_port"] == nsqd.tcp[1]
    assert "flintmq" in admin.metrics()
    assert "memory" in admin.stats(memory=True) and "memory" not in admin.stats()
    assert admin.stats(clients=False)["producers"] is None

    assert admin.set_config("log_level", "debug") == admin.get_config("log_level") == "1"
    assert admin.set_config("log_level", "info") == "2"
    assert admin.get_config("broadcast_address") == "127.0.0.1"
    known = admin.get_config("nsqlookupd_tcp_addresses")
    assert admin.set_config("nsqlookupd_tcp_addresses", []) == "[]"
    with pytest.raises(HttpRefused, match="INVALID_VALUE"):
        admin.set_config("log_level", "loud")
    assert admin.set_config("nsqlookupd_tcp_addresses", [known.strip('[]"')]) == known


def test_draining(flavour: str, daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os")
    admin = nsqd_admin(flavour, address_of(nsqd))
    assert admin.drain_state().draining is False
    admin.create_topic("t")
    admin.create_channel("t", "c")
    nsqd.publish("t", b"left")
    state = admin.drain(timedelta(minutes=10))
    assert (state.draining, state.message_count, state.topic_count) == (True, 1, 1)
    assert 500 < state.seconds_left <= 600
    assert state.topics[0]["channels"][0]["depth"] == 1
    assert admin.drain(0).seconds_left is None
    assert admin.drain_state().since_s == state.since_s
    assert admin.info()["draining"] is True
    assert admin.stop_drain().draining is False
    admin.drain()
    admin.empty_channel("t", "c")
    assert nsqd.wait() == 0


# -- nsqlookupd --------------------------------------------------------------------------------------------------------


def test_nsqlookupd(lookup: Any, admin: Any, nsqd: Nsqd, nsqlookupd: Nsqlookupd, flavour: str):
    assert lookup.ping() == "OK"
    assert "flintmq_version" in lookup.info()
    assert "flintmq" in lookup.metrics()
    assert lookup.members() == (f"http://127.0.0.1:{nsqlookupd.http[1]}",)
    node = next(each for each in lookup.nodes() if each.tcp_port == nsqd.tcp[1])
    assert (node.address, node.http_port) == (f"127.0.0.1:{nsqd.tcp[1]}", nsqd.http[1])

    ahead = f"ahead-{flavour}"
    lookup.create_topic(ahead)
    lookup.create_channel(ahead, "c")
    assert ahead in lookup.topics()
    assert lookup.channels(ahead) == ["c"]
    found = lookup.lookup(ahead)
    assert (found.channels, found.producers, found.partitions, found.meta) == (["c"], [], {}, None)
    lookup.delete_channel(ahead, "c")
    assert lookup.channels(ahead) == []
    lookup.delete_topic(ahead)
    assert ahead not in lookup.topics()
    assert lookup.lookup(ahead).producers == []
    with pytest.raises(HttpRefused) as caught:
        lookup.lookup(ahead, writable=True)
    assert caught.value.status == 404

    plain = f"plain-{flavour}"
    admin.create_topic(plain)
    wait_until(lambda: lookup.lookup(plain).producers, "it is registered")
    (producer,) = lookup.lookup(plain, writable=True).producers
    assert producer.address == node.address
    lookup.tombstone(plain, f"127.0.0.1:{nsqd.http[1]}")
    listed = next(each for each in lookup.nodes() if each.tcp_port == nsqd.tcp[1])
    assert listed.tombstones[listed.topics.index(plain)] is True
    assert f"topic:{plain}:" in lookup.debug()


def test_nsqlookupd_places_partitions(lookup: Any, nsqd: Nsqd, flavour: str):
    topic = f"placed-{flavour}"
    lookup.create_topic(topic, partitions=2, ordered=True)
    found = lookup.lookup(topic)
    assert {number: node.tcp_port for number, node in found.partitions.items()} == {0: nsqd.tcp[1], 1: nsqd.tcp[1]}
    assert (found.meta.partition_num, found.meta.ordered) == (2, True)
    assert list(lookup.lookup(topic, partition=1).partitions) == [1]
    assert lookup.channels(topic, partition=1) == []
    lookup.delete_topic(topic, everywhere=True)
    assert nsqd.get(f"/stats?format=json&topic={topic}")["topics"] in (None, [])


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_refusals_say_what_and_where(admin: Any, nsqd: Nsqd):
    with pytest.raises(HttpRefused) as caught:
        admin.pause_topic("no-such-topic")
    refused = caught.value
    assert (refused.status, refused.text) == (404, "TOPIC_NOT_FOUND")
    assert str(refused) == (
        f"http://{address_of(nsqd)} refused POST /topic/pause?topic=no-such-topic: 404 TOPIC_NOT_FOUND"
    )
    with pytest.raises(HttpRefused, match="400 INVALID_TOPIC"):
        admin.create_topic("not a name&channel=x")
    with pytest.raises(HttpRefused, match="400 INVALID_OPTION"):
        admin.get_config("no_such_option")
    with pytest.raises(OptionError, match="one of message_id, offset and count"):
        admin.get_message("t")


def test_a_daemon_that_does_not_know_a_request(admin: Any, lookup: Any):
    with pytest.raises(HttpRefused, match=r"404 .*NSQ's own has fewer"):
        lookup.ask(flintmq_question("/stats"))
    assert admin.ask(flintmq_question("/info"))["version"]


def flintmq_question(target: str) -> Any:
    from flintmq.client.admin.question import fields, get

    return get(target, fields)


def test_nobody_answers(flavour: str):
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConnectionFailed, match=r"no answer within 0\.2 s"):
            nsqd_admin(flavour, address, timeout=0.2).ping()
    with pytest.raises(ConnectionFailed, match=address):
        nsqd_admin(flavour, address).ping()


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n[1,2]", RemoteProtocolError, "GET /info"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{}", ConnectionFailed, "http://127.0.0.1"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", HttpRefused, "302"),
        (b"HTTP/1.1 500 x\r\nContent-Length: 2\r\n\r\nno", HttpRefused, "500 no"),
        (b"\x00\x00\x00\x05E_BAD", ConnectionFailed, "http://127.0.0.1"),
    ],
    ids=["no object", "cut off", "moved", "text", "no HTTP"],
)
def test_answers_of_somebody_else(flavour: str, answer: bytes, error: type[Exception], text: str):
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(error, match=text):
            nsqd_admin(flavour, f"127.0.0.1:{listener.getsockname()[1]}", timeout=PATIENCE_S).info()
        thread.join()


# -- who may ask -------------------------------------------------------------------------------------------------------


def test_tokens_and_certificates(flavour: str, daemons: Daemons, tmp_path: Path):
    certificates = Certificates(tmp_path / "certificates")
    token = "an-admin-token-for-tests"
    rows: list[dict[str, object]] = [
        {"name": "boss", "token": token, "permissions": ["publish", "read", "admin"]},
        {"name": "cert", "common_name": CLIENT_NAME, "permissions": ["read"]},
    ]
    nsqd = daemons.nsqd(
        f"--http-auth-tokens-file={write(tmp_path / 'tokens.json', rows)}",
        "--http-auth-client-cert",
        f"--tls-cert={certificates.server.cert}",
        f"--tls-key={certificates.server.key}",
        f"--tls-root-ca-file={certificates.ca}",
        "--https-address=127.0.0.1:0",
        "--durability=os",
    )
    host, port = https_address(nsqd)
    address = f"https://{host}:{port}"
    trusting = ConnectionOptions(tls_ca_file=certificates.ca)

    nsqd_admin(flavour, address, token=token, options=trusting).create_topic("t")
    with pytest.raises(HttpRefused, match=r"401 UNAUTHORIZED .*show a token"):
        nsqd_admin(flavour, address, options=trusting).stats()
    mine = certificates.client("good")
    shown = ConnectionOptions(tls_ca_file=certificates.ca, tls_cert=mine.cert, tls_key=mine.key)
    by_certificate = nsqd_admin(flavour, address, options=shown)
    assert by_certificate.stats()["topics"][0]["topic_name"] == "t"
    with pytest.raises(HttpRefused, match="403 FORBIDDEN"):
        by_certificate.delete_topic("t")
    with pytest.raises(ConnectionFailed, match="set tls_ca_file"):
        nsqd_admin(flavour, address, token=token).ping()
    with pytest.raises(ConnectionFailed, match="does not speak TLS"):
        nsqd_admin(flavour, f"https://{address_of(nsqd)}", options=trusting).ping()


class Listener:
    """Listens where an nsqd might, over plain HTTP, and answers everything the same.

    Attributes:
        requests: that came, whole, as far as the end of the head.
    """

    def __init__(self, answer: str) -> None:
        self.requests: list[str] = []
        self._answer = f"HTTP/1.1 {answer}".encode()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # it was closed
            with connection, connection.makefile("rb") as lines:
                connection.settimeout(PATIENCE_S)
                self.requests.append("".join(line.decode() for line in iter(lines.readline, b"\r\n")))
                connection.sendall(self._answer)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


def wanting_tls(port: int) -> str:
    body = json.dumps({"message": "TLS_REQUIRED", "https_port": port})
    return f"403 Forbidden\r\nContent-Length: {len(body)}\r\n\r\n{body}"


WANTING_A_TOKEN = '401 Unauthorized\r\nContent-Length: 27\r\n\r\n{"message":"UNAUTHORIZED"}\n'


def test_an_nsqd_that_wants_tls_is_asked_over_it_and_has_the_token_there_only(
    flavour: str, daemons: Daemons, tmp_path: Path
):
    certificates = Certificates(tmp_path / "certificates")
    token = "an-admin-token-for-tests"
    rows: list[dict[str, object]] = [{"name": "boss", "token": token, "permissions": ["read", "admin"]}]
    nsqd = daemons.nsqd(
        f"--http-auth-tokens-file={write(tmp_path / 'tokens.json', rows)}", "--https-address=127.0.0.1:0",
        f"--tls-cert={certificates.server.cert}", f"--tls-key={certificates.server.key}", "--tls-required=true",
        "--durability=os",
    )  # fmt: skip
    trusting = ConnectionOptions(tls_ca_file=certificates.ca)
    admin = nsqd_admin(flavour, f"http://{address_of(nsqd)}", token=token, options=trusting)
    admin.create_topic("t")
    assert [row["topic_name"] for row in admin.stats()["topics"]] == ["t"]
    with pytest.raises(ConnectionFailed, match="set tls_ca_file"):
        nsqd_admin(flavour, address_of(nsqd), token=token).stats()
    named = ConnectionOptions(tls_ca_file=certificates.ca, tls_server_name="localhost")
    assert nsqd_admin(flavour, address_of(nsqd), token=token, options=named).ping() == "OK"
    named = ConnectionOptions(tls_ca_file=certificates.ca, tls_server_name="other.example")
    with pytest.raises(ConnectionFailed, match=r"not for 'other\.example'"):
        nsqd_admin(flavour, address_of(nsqd), token=token, options=named).ping()
    with closing(Listener(wanting_tls(https_address(nsqd)[1]))) as front:
        # one without a scheme, and one that is not shown the token in clear whatever its scheme
        for address, more in ((front.address, {}), (f"http://{front.address}", {"token_in_clear": False})):
            admin = nsqd_admin(flavour, address, token=token, options=trusting, **more)
            admin.create_channel("t", "c")
            admin.delete_channel("t", "c")
            requests = [request.partition(" HTTP")[0] for request in front.requests]
            assert requests[0] == "POST /channel/create?topic=t&channel=c" and requests.count(requests[0]) == 1
            assert not any("authorization" in request.lower() for request in front.requests)
            front.requests.clear()


def test_a_token_for_tls_only_is_not_shown_in_clear(flavour: str):
    with closing(Listener(WANTING_A_TOKEN)) as nsqd:
        admin = nsqd_admin(flavour, nsqd.address, token="an-admin-token-for-tests", token_in_clear=False)
        with pytest.raises(
            HttpRefused, match="asks for a token over plain HTTP, and it is shown over TLS only"
        ) as refused:
            admin.create_topic("t")
        assert (refused.value.status, len(nsqd.requests)) == (401, 1)
        assert "authorization" not in nsqd.requests[0].lower()
        with pytest.raises(HttpRefused, match="401 UNAUTHORIZED"):
            nsqd_admin(flavour, nsqd.address, token="an-admin-token-for-tests").ping()
        assert "Authorization: Bearer an-admin" in nsqd.requests[1] and len(nsqd.requests) == 2


def test_an_nsqd_that_wants_tls_and_has_none_over_http_says_so(flavour: str):
    with (
        closing(Listener(wanting_tls(0))) as nsqd,
        pytest.raises(HttpRefused, match=r"403 TLS_REQUIRED \(it names no HTTPS port: start it with --https-address\)"),
    ):
        nsqd_admin(flavour, nsqd.address).ping()


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command(nsqd: Nsqd, nsqlookupd: Nsqlookupd, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    there = f"--nsqd-http-address={address_of(nsqd)}"

    def run(*words: str, status: int = 0) -> str:
        assert cli.main(["admin", *words]) == status, capsys.readouterr().err
        captured = capsys.readouterr()
        assert bool(captured.err) == bool(status)
        return captured.err if status else captured.out

    assert run("create-topic", "by-hand", "--partitions=2", there) == ""
    assert run("create-channel", "by-hand", "c", there) == ""
    with nsqd.connect() as producer:
        producer.ok(pub("by-hand 1", b"hello"))
    wait_for_depth(sync.NsqdAdmin(address_of(nsqd)), "by-hand", "c", 1)
    (found,) = json.loads(run("peek", "by-hand", "c", "next", "--count", "5", "--partition", "1", there))
    assert (found["body"], found["partition"]) == ("hello", 1)
    assert json.loads(run("get-message", "by-hand", found["message_id"], there))["id"] == found["id"]
    assert json.loads(run("cancel-message", "by-hand", str(found["id"]), there)) == ["c"]
    assert run("set-offset", "by-hand", "c", "2h", there) == ""
    assert depth(sync.NsqdAdmin(address_of(nsqd)), "by-hand", "c") == 1
    assert run("set-offset", "by-hand", "c", "count:1", "--partition=1", there) == ""
    assert run("set-offset", "by-hand", "c", "2020-01-31T12:00+01:00", there) == ""
    assert run("set-channel-order", "by-hand", "c", "true", there) == ""
    assert json.loads(run("stats", "by-hand", "--no-clients", there))["topics"][0]["channels"][0]["depth"] == 1
    assert run("ping", there) == "OK\n"
    assert run("set-config", "log_level", "info", there) == "2\n"

    here = f"--lookupd-http-address=http://{address_of(nsqlookupd)}"
    assert list(json.loads(run("lookup", "by-hand", "--writable", here))["partitions"]) == ["0", "1"]
    assert "by-hand" in json.loads(run("topics", here))
    assert run("delete-topic", "by-hand", "--everywhere", here) == ""

    refused = run("peek", "by-hand", "c", there, status=1)
    assert refused.startswith("flintmq admin: ") and refused.endswith(" 404 TOPIC_NOT_FOUND\n")
    token = tmp_path / "token"
    token.write_text("a-token\n")
    assert run("ping", f"--token-file={token}", there) == "OK\n"
    assert "a file with one token" in run("ping", f"--token-file={token}.not", there, status=2)
    for text in ("", "a\nb", "a" * 5000):
        token.write_text(text)
        said = run("ping", f"--token-file={token}", there, status=2)
        assert "--token-file" in said and "1 to 4096 printable characters" in said
