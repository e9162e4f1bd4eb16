"""What one client does is not felt by the others: protocol errors, unread output, floods on every port.

No test here measures: what one client can hold others up for without these rules is far beyond PATIENCE_S, or for ever.
How long it takes is the business of benchmarks/bench_fairness.py.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from pathlib import Path

import pytest
from tests.integration.daemons import PATIENCE_S, Daemons, Nsqd, fin, pub, sized, wait_until

INNOCENT_COUNT = 10


@pytest.fixture(params=["uvloop", "asyncio"])
def loop(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The event loop of daemons that are started afterwards."""
    if request.param == "asyncio":
        (tmp_path / "uvloop.py").write_text("raise ImportError('hidden by the test')\n", encoding="utf-8")
    else:
        pytest.importorskip("uvloop")
    return str(request.param)


@pytest.fixture
def either(daemons: Daemons, loop: str) -> Nsqd:
    """An nsqd on each of the loops."""
    return daemons.nsqd("--durability=os")


@pytest.mark.parametrize("subscribes", ["one channel", "channels of their own"])
def test_a_protocol_error_holds_nobody_back(either: Nsqd, subscribes: str):
    """A subscriber sends nonsense and keeps its socket open; what comes next goes to the others at once."""
    names = ["c"] * 11 if subscribes == "one channel" else [f"c{number}" for number in range(11)]
    with either.connect() as bad:
        bad.subscribe("t", names[0], rdy_count=100)
        innocent = [either.connect().subscribe("t", name, rdy_count=100) for name in names[1:]]
        either.publish("t", b"held")
        holders = [bad.message()] if subscribes != "one channel" else []
        if not holders:
            wait_until(lambda: either.stats("t", "c")["in_flight_count"] == 1, "delivered")
        bad.send(b"BOGUS\n")
        wait_until(lambda: "invalid command BOGUS" in either.log, "the error")
        count = 3 * INNOCENT_COUNT
        either.publish("t", *[b"%d" % number for number in range(count)])
        if subscribes == "one channel":
            got = []
            for consumer in innocent:
                consumer.socket.settimeout(PATIENCE_S)
            wait_until(lambda: either.stats("t", "c")["in_flight_count"] == count + 1, "all of them in flight")
            got = [each for row in [either.stats("t", "c")] for each in row["clients"]]
            assert len(got) == INNOCENT_COUNT, "the subscription went with the error"
        else:
            for consumer in innocent:
                assert [each.body for each in consumer.messages(count + 1)][-1] == b"%d" % (count - 1)
        frames = bad.wait_closed()
        assert [kind for kind, _ in frames if kind == 1] == [1], "the error is the last frame"
        assert frames[-1].data == b"E_INVALID invalid command BOGUS"
        for consumer in innocent:
            consumer.close()


def test_what_a_client_with_an_error_held_goes_to_others_at_once(either: Nsqd):
    with either.connect() as bad, either.connect() as other:
        bad.subscribe("t", "c", rdy_count=1)
        either.publish("t", b"held")
        assert bad.message().attempts == 1
        other.subscribe("t", "c", rdy_count=1)
        bad.send(b"BOGUS\n")
        message = other.message()
        assert (message.body, message.attempts) == (b"held", 2)


# -- floods ------------------------------------------------------------------------------------------------------------


class Flood:
    """Sends the same again and again, as fast as it is taken, and reads the answers away, until it is closed."""

    def __init__(self, address: tuple[str, int], begin: bytes, again: bytes) -> None:
        self.sent_bytes = 0
        self._again = again
        self._socket = socket.create_connection(address, timeout=PATIENCE_S)
        self._is_over = False
        self._socket.sendall(begin)
        self._threads = [threading.Thread(target=self._send), threading.Thread(target=self._read)]
        for thread in self._threads:
            thread.start()

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            while not self._is_over:
                self.sent_bytes += self._socket.send(self._again)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while self._socket.recv(1024 * 1024):
                pass

    def __enter__(self) -> Flood:
        wait_until(lambda: self.sent_bytes > 4 * len(self._again), "the flood is on")
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._socket.close()


PING = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
PEER = b'{"broadcast_address":"there","tcp_port":1,"http_port":2,"version":"1"}'
FLOODS = {
    "PUB": ("tcp", b"  V2", pub("flood", b"x") * 20_000),
    "DPUB": ("tcp", b"  V2", (b"DPUB flood 60000\n" + sized(b"x")) * 10_000),
    "FIN of unknown ids": (
        "tcp",
        b"  V2SUB flood c\nRDY 1\n",
        b"".join(fin(b"%016x" % number) for number in range(1_000_000, 1_020_000)),
    ),
    "TOUCH of unknown ids": ("tcp", b"  V2SUB flood c\nRDY 1\n", b"TOUCH 00000000000f4240\n" * 20_000),
    "NOP": ("tcp", b"  V2", b"NOP\n" * 50_000),
    "GET /ping": ("http", b"", PING * 10_000),
}


def serves_others(nsqd: Nsqd, count: int = 50) -> None:
    """Publish, consume and ask, one after the other."""
    with nsqd.connect() as publisher, nsqd.connect() as consumer:
        consumer.subscribe("victim", "c", rdy_count=1)
        for number in range(count):
            publisher.ok(pub("victim", b"%d" % number))
            message = consumer.message()
            assert message.body == b"%d" % number
            consumer.finish(message)
    for _ in range(5):
        assert nsqd.request("GET", "/ping").body == b"OK"


@pytest.mark.parametrize("what", FLOODS)
def test_a_flood_keeps_nobody_waiting(either: Nsqd, what: str):
    port, begin, again = FLOODS[what]
    begun = time.monotonic()
    with Flood(getattr(either, port), begin, again) as flood:
        before = flood.sent_bytes
        serves_others(either)
        # 50 round trips of three: without turns each of them waits for seconds
        assert time.monotonic() - begun < 3 * PATIENCE_S
        wait_until(lambda: flood.sent_bytes > before, "the flood is served as well")


def test_a_flood_of_registrations_keeps_nobody_waiting(daemons: Daemons, loop: str):
    nsqlookupd = daemons.nsqlookupd()
    with Flood(nsqlookupd.tcp, b"  V1IDENTIFY\n" + sized(PEER), b"REGISTER t c\n" * 20_000):
        with socket.create_connection(nsqlookupd.tcp, timeout=PATIENCE_S) as other:
            other.sendall(b"  V1")
            for _ in range(50):
                other.sendall(b"PING\n")
                assert other.recv(100) == sized(b"OK")
        for _ in range(5):
            assert nsqlookupd.request("GET", "/ping").body == b"OK"


def test_everything_of_a_pipeline_is_answered_in_order(either: Nsqd):
    """What is cut into turns comes to the same: 30,000 small commands in one go, then the end of the stream."""
    with either.connect() as connection:
        connection.subscribe("t", "c", rdy_count=1)
        count = 3_000
        commands = [
            command
            for number in range(count)
            for command in (pub("other", b"%d" % number), b"NOP\n", fin(b"%016x" % (10**6 + number)))
        ]
        threading.Thread(target=connection.send, args=(b"".join(commands),)).start()
        frames = [connection.frame() for _ in range(2 * count)]
    assert frames[0::2] == [(0, b"OK")] * count
    assert [data.split()[2] for _, data in frames[1::2]] == [b"%016x" % (10**6 + number) for number in range(count)]
    assert either.stats("other")["message_count"] == count


def test_a_pipeline_of_requests_is_answered_in_order(either: Nsqd):
    count = 3_000
    requests = b"".join(b"GET /ping?%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % number for number in range(count))
    with socket.create_connection(either.http, timeout=PATIENCE_S) as connection:
        threading.Thread(target=connection.sendall, args=(requests + PING.replace(b"/ping", b"/nowhere"),)).start()
        received = b""
        while b"NOT_FOUND" not in received:
            fresh = connection.recv(1024 * 1024)
            assert fresh, received[-200:]
            received += fresh
    assert received.count(b"HTTP/1.1 200 OK") == count
    assert received.rindex(b"HTTP/1.1 404") > received.rindex(b"HTTP/1.1 200")


def test_a_scrape_waits_for_one_request_of_another_address_and_not_for_all(either: Nsqd):
    """200 connections of one address ask for all of 300 topics, each a little differently."""
    names = [f"t{number}" for number in range(300)]
    with either.connect() as publisher:
        publisher.ok(b"".join(pub(name, b"x") for name in names), count=len(names))
    with contextlib.ExitStack() as stack:
        asking = [
            stack.enter_context(socket.create_connection(either.http, PATIENCE_S, ("127.0.0.2", 0))) for _ in range(200)
        ]
        for number, each in enumerate(asking):
            each.sendall(b"GET /stats?format=json%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % (b"&" * number))
        assert asking[0].recv(15) == b"HTTP/1.1 200 OK"  # they stand in line
        assert b'flintmq_nsqd_topic_messages_total{topic="t299"}' in either.request("GET", "/metrics").body
        answered, _, _ = select.select(asking, [], [], 0)
        assert len(answered) < len(asking) // 2
