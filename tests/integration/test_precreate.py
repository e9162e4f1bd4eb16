"""A new topic gets the channels that nsqlookupd knows before it hands out its first message (NSQ's nsqlookupd)."""

from __future__ import annotations

import http.server
import json
import socketserver
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
from tests.integration.daemons import PATIENCE_S, SOON_S, Daemons, Nsqd, fin, pub, sized, wait_until
from tests.parameters import filled


class FakeLookupd:
    """A nsqlookupd that says what a test wants, when it wants.

    Attributes:
        answer: body of ``/channels``.
        status: of the answer.
        may_answer: ``/channels`` is answered while this is set.
        asked: topics that were asked for.
    """

    def __init__(self) -> None:
        self.answer = b'{"channels":[]}'
        self.status = 200
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.asked: list[str] = []
        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _HttpHandler)
        self.tcp = socketserver.ThreadingTCPServer(("127.0.0.1", 0), _TcpHandler)
        for server in (self.http, self.tcp):
            server.daemon_threads = True
            server.lookupd = self  # type: ignore[union-attr]
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.address = f"127.0.0.1:{self.tcp.server_address[1]}"

    def close(self) -> None:
        self.may_answer.set()
        for server in (self.http, self.tcp):
            server.shutdown()
            server.server_close()


class _HttpHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        lookupd: FakeLookupd = cast(Any, self.server).lookupd
        lookupd.asked.append(self.path.removeprefix("/channels?topic="))
        lookupd.may_answer.wait(PATIENCE_S)
        try:
            self.send_response(lookupd.status)
            self.send_header("Content-Length", str(len(lookupd.answer)))
            self.end_headers()
            self.wfile.write(lookupd.answer)
        except OSError:
            self.close_connection = True  # nsqd has given up

    def log_message(self, *args: Any) -> None:
        """Quiet."""


class _TcpHandler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        lookupd: FakeLookupd = cast(Any, self.server).lookupd
        info = {"broadcast_address": "127.0.0.1", "hostname": "h", "http_port": lookupd.http.server_address[1]}
        try:
            self.rfile.read(4)
            while line := self.rfile.readline():
                answer = b"OK"
                if line == b"IDENTIFY\n":
                    self.rfile.read(int.from_bytes(self.rfile.read(4), "big"))
                    answer = json.dumps(info | {"tcp_port": 1, "version": "1.3.0"}).encode()
                self.wfile.write(sized(answer))
        except OSError:
            return


@pytest.fixture
def lookupd() -> Iterator[FakeLookupd]:
    fake = FakeLookupd()
    yield fake
    fake.close()


def start(daemons: Daemons, lookupd: FakeLookupd, *flags: str) -> Nsqd:
    nsqd = daemons.nsqd("--durability=os", f"--lookupd-tcp-address={lookupd.address}", *flags)
    wait_until(lambda: "connected, version" in nsqd.log, "the connection to nsqlookupd")
    return nsqd


def channels_of(nsqd: Nsqd, topic: str) -> dict[str, int]:
    return {row["channel_name"]: row["depth"] for row in nsqd.stats(topic)["channels"]}


def test_channels_of_another_nsqd_get_the_first_message(daemons: Daemons):
    lookupd = daemons.nsqlookupd()
    flag = f"--lookupd-tcp-address=127.0.0.1:{lookupd.tcp[1]}"
    first, second = (daemons.nsqd("--durability=os", flag) for _ in range(2))
    first.post("/topic/create?topic=t")
    for channel in ("c", "d", "e%23ephemeral"):
        first.post(f"/channel/create?topic=t&channel={channel}")
    wait_until(lambda: len(lookupd.channels("t")) == 3, "the channels at nsqlookupd")
    second.publish("t", b"1", b"2")
    wait_until(lambda: channels_of(second, "t") == {"c": 2, "d": 2}, "the backlog in both channels")
    second.post("/channel/create?topic=t&channel=later")
    assert channels_of(second, "t")["later"] == 0, "a channel made afterwards starts at the present end"
    wait_until(lambda: lookupd.producers("t") == sorted([first.tcp[1], second.tcp[1]]))
    with second.connect() as consumer:
        consumer.subscribe("t", "c", 5)
        assert [message.body for message in consumer.messages(2)] == [b"1", b"2"]


def test_publishing_does_not_wait_and_nothing_is_handed_out_before_the_answer(daemons: Daemons, lookupd: FakeLookupd):
    lookupd.may_answer.clear()
    lookupd.answer = b'{"channels":["c","x"]}'
    nsqd = start(daemons, lookupd, f"--http-client-request-timeout={PATIENCE_S:g}s")
    with nsqd.connect() as producer, nsqd.connect() as consumer:
        begun = time.monotonic()
        producer.ok(pub("t", b"1"))
        consumer.subscribe("t", "x", 5)
        producer.ok(pub("t", b"2"))
        assert time.monotonic() - begun < SOON_S, "neither PUB nor SUB waits"
        wait_until(lambda: lookupd.asked == ["t"], "the question")
        for _ in range(2):  # a fence that makes no topic, about which nsqlookupd would be asked
            assert consumer.error(fin(b"0" * 16)).startswith("E_FIN_FAILED ")
        assert nsqd.stats("t")["depth"] == 2
        assert nsqd.stats("t")["paused"] is False
        lookupd.may_answer.set()
        assert [message.body for message in consumer.messages(2)] == [b"1", b"2"]
    wait_until(lambda: channels_of(nsqd, "t").get("c") == 2, "all messages in the channel that was created ahead")
    assert nsqd.stats("t")["depth"] == 0
    nsqd.publish("t", b"3")
    assert channels_of(nsqd, "t")["c"] == 3
    assert lookupd.asked == ["t"]


def test_a_kill_before_the_answer_loses_nothing_and_asks_again(daemons: Daemons, lookupd: FakeLookupd):
    lookupd.may_answer.clear()
    lookupd.answer = b'{"channels":["c"]}'
    nsqd = start(daemons, lookupd)
    nsqd.publish("t", b"1")
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "x", 5)
        nsqd.kill()
    lookupd.may_answer.set()
    nsqd.start()
    wait_until(lambda: channels_of(nsqd, "t") == {"c": 1, "x": 1}, "both channels with the message")
    nsqd.restart()
    assert channels_of(nsqd, "t") == {"c": 1, "x": 1}
    assert lookupd.asked == ["t", "t"], "a topic that has its channels is not asked for again"


def test_a_clean_stop_before_the_answer(daemons: Daemons, lookupd: FakeLookupd):
    lookupd.may_answer.clear()
    lookupd.answer = b'{"channels":["c"]}'
    nsqd = start(daemons, lookupd)
    nsqd.publish("t", b"1")
    nsqd.stop()
    lookupd.may_answer.set()
    nsqd.start()
    wait_until(lambda: channels_of(nsqd, "t") == {"c": 1}, "the channel with the message")


def test_pausing_emptying_and_deleting_while_nsqlookupd_is_asked(daemons: Daemons, lookupd: FakeLookupd):
    lookupd.may_answer.clear()
    lookupd.answer = b'{"channels":["c"]}'
    nsqd = start(daemons, lookupd)
    for topic in ("paused", "unpaused", "emptied", "deleted", "dropped"):
        nsqd.publish(topic, b"1", b"2")
    nsqd.post("/topic/pause?topic=paused")
    nsqd.post("/topic/pause?topic=unpaused")
    nsqd.post("/topic/unpause?topic=unpaused")
    nsqd.post("/topic/empty?topic=emptied")
    nsqd.post("/topic/delete?topic=deleted")
    nsqd.post("/channel/create?topic=dropped&channel=x")
    nsqd.post("/channel/delete?topic=dropped&channel=x")
    wait_until(lambda: len(lookupd.asked) == 5, "the questions")
    lookupd.may_answer.set()
    expected = {"unpaused": {"c": 2}, "emptied": {"c": 0}, "dropped": {"c": 2}, "paused": {"c": 0}}
    wait_until(lambda: {topic: channels_of(nsqd, topic) for topic in expected} == expected, "the channels")
    assert nsqd.get("/stats?format=json&topic=deleted")["topics"] is None
    assert (nsqd.stats("paused")["paused"], nsqd.stats("paused")["depth"]) == (True, 2)
    nsqd.post("/topic/unpause?topic=paused")
    wait_until(lambda: channels_of(nsqd, "paused") == {"c": 2}, "the messages of the topic that was paused")


def test_ephemeral_topics_ask_too(daemons: Daemons, lookupd: FakeLookupd):
    lookupd.answer = b'{"channels":["c"]}'
    nsqd = start(daemons, lookupd)
    nsqd.publish("t#ephemeral", b"1")
    wait_until(lambda: lookupd.asked == ["t%23ephemeral"], "the question")
    wait_until(lambda: channels_of(nsqd, "t%23ephemeral") == {"c": 1}, "the channel")


@pytest.mark.parametrize(
    ("answer", "status", "expected"),
    [
        (b'{"status_code":200,"status_txt":"OK","data":{"channels":["c"]}}', 200, ["c"]),
        (b'{"channels":["c","no!","e#ephemeral","c","' + b"n" * 65 + b'"]}', 200, ["c"]),
        (b'{"channels":null}', 200, []),
        (b'{"channels":["c"]}', 500, []),
        (b"not JSON", 200, []),
        (b'{"channels":"c"}', 200, []),
        (2_000_000, 200, []),
    ],
)
def test_answers_good_and_bad(
    daemons: Daemons, lookupd: FakeLookupd, answer: bytes | int, status: int, expected: list[str]
):
    body = answer if isinstance(answer, bytes) else b'{"channels":["%s"]}' % filled(answer)
    lookupd.answer, lookupd.status = body, status
    nsqd = start(daemons, lookupd)
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "x", 5)
        nsqd.publish("t", b"1")
        assert consumer.message().body == b"1"
    assert sorted(channels_of(nsqd, "t")) == sorted([*expected, "x"])
    assert bool(expected) or answer == b'{"channels":null}' or "does not say which channels topic t has" in nsqd.log


def test_a_nsqlookupd_that_never_answers_holds_a_topic_for_as_long_as_is_allowed(
    daemons: Daemons, lookupd: FakeLookupd
):
    lookupd.may_answer.clear()
    nsqd = start(daemons, lookupd, "--http-client-request-timeout=700ms")
    with nsqd.connect() as consumer:
        begun = time.monotonic()
        consumer.subscribe("t", "x", 5)
        nsqd.publish("t", b"1")
        assert consumer.message().body == b"1"
        assert time.monotonic() - begun > 0.6
    assert "no answer within 0.7 s" in nsqd.log


def test_a_nsqlookupd_that_is_away_holds_nothing(daemons: Daemons):
    lookupd = daemons.nsqlookupd()
    address = f"127.0.0.1:{lookupd.tcp[1]}"
    lookupd.stop()
    nsqd = daemons.nsqd("--durability=os", f"--lookupd-tcp-address={address}")
    wait_until(lambda: f"nsqlookupd {address}: " in nsqd.log, "the failed connection")
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "x", 5)
        nsqd.publish("t", b"1")
        assert consumer.message().body == b"1"
    assert "no available nsqlookupd to query for channels to pre-create for topic t" in nsqd.log
