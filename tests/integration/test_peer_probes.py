"""What other Python clients of NSQ fail at: one test for each probe, both flavours of ours.

Each test names in its docstring who fails and how (probed with the official nsqd 1.3). What another test shows already
is not repeated: :data:`ELSEWHERE` says where. Durations are short, daemons shared, each test has a topic of its own.

Source: docs/compatibility.md.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Certificates
from tests.integration.auth_server import SECRET, AuthServer
from tests.integration.daemons import PATIENCE_S, SOON_S, Daemons, Nsqd, Nsqlookupd, in_time, wait_until
from tests.integration.flavours import (
    Flavour,
    address_of,
    connections_of,
    set_max_in_flight,
    stats_of,
)
from tests.integration.ledger import Ledger
from tests.integration.proxy import Proxy
from tests.integration.test_client_security import tls_flags

from flintmq import ConnectionOptions, Consumer, Message, PublishRefused, Requeue
from flintmq.client.security import TlsRefused

ELSEWHERE = {
    "every pair of TLS, compression and AUTH, producer and consumer (gnsq, ansq, pynsq fail)":
        "tests/integration/test_combinations.py::test_publish_consume_requeue_touch",
    "TLS is verified: authority, name, date (asyncnsq never does)":
        "tests/integration/test_client_security.py::test_a_server_that_cannot_be_verified",
    "a secret that is a function (nobody has it)":
        "tests/integration/test_client_security.py::test_a_secret_that_is_renewed",
    "total in flight while connections come and go (nobody verifies it)":
        "tests/integration/test_client_faults.py::test_never_more_in_flight_than_allowed",
    "back-pressure of publishes (ansq, asyncnsq, nsq-py, pynsq: unbounded)":
        "tests/integration/test_client_faults.py::test_short_deadlines_fill_no_memory",
    "memory while nsqd is away (ansq, asyncnsq, nsq-py, pynsq: unbounded)":
        "tests/integration/test_client_faults.py::test_memory_is_bounded_while_nsqd_is_away",
    "E_FIN_FAILED after a timeout is told (nobody does)":
        "tests/integration/test_client.py::test_requeue_touch_and_timeouts",
    "async iteration, async def handlers, threads, batches (gnsq, go-nsq, nsqjs: not all)":
        "tests/integration/test_client.py::test_every_style_of_consuming_sees_every_message",
    "a blocking handler keeps its connection (pynsq#104, ansq#62)":
        "tests/integration/test_client.py::test_heartbeats_go_on_while_a_plain_function_blocks",
    "several nsqd in one producer, one of them dies (nsqjs, go-nsq: one address)":
        "tests/integration/test_consumers.py::test_two_nsqd_and_one_of_them_dies",
    "no hang when nsqd goes away (nsq-py spins for ever)":
        "tests/integration/test_client.py::test_a_publish_during_an_outage_ends_within_its_deadline",
    "dead letters (nobody has them)":
        "tests/integration/test_app.py::test_a_message_that_fails_too_often_is_a_dead_letter",
    "figures of a client (pynsq, gnsq, ansq, asyncnsq: none)":
        "tests/integration/test_client_prometheus.py::test_what_a_scrape_shows",
}  # fmt: skip
"""Probe: the test that shows it."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    daemons = Daemons(tmp_path_factory.mktemp("shared"))
    try:
        yield daemons
    finally:
        daemons.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def lookups(shared: Daemons) -> list[Nsqlookupd]:
    return [shared.nsqlookupd(), shared.nsqlookupd()]


@pytest.fixture(scope="module")
def nsqds(shared: Daemons, lookups: list[Nsqlookupd], certificates: Certificates) -> list[Nsqd]:
    """Two nsqd, each known to another nsqlookupd; with TLS for who wants it."""
    return [
        shared.nsqd(*tls_flags(certificates), "--durability=os", f"--lookupd-tcp-address={address_of(lookup.tcp)}")
        for lookup in lookups
    ]


@pytest.fixture
def proxies(nsqds: list[Nsqd]) -> Iterator[list[Proxy]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Proxy(nsqd.tcp)) for nsqd in nsqds]


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return f"t{zlib.crc32(request.node.name.encode()):08x}"


def urls_of(lookups: list[Nsqlookupd]) -> list[str]:
    return [f"http://{address_of(lookup.http)}" for lookup in lookups]


class Bodies(list[bytes]):
    """A handler that keeps the bodies."""

    def __call__(self, message: Any) -> None:
        self.append(message.body)

    def wait_for(self, count: int) -> None:
        wait_until(lambda: len(self) >= count, f"{count} messages")


# --- discovery ---


def test_discovery_subscribes_once_and_goes_on(
    flavour: Flavour, nsqds: list[Nsqd], lookups: list[Nsqlookupd], topic: str
):
    """asyncnsq 2.0.1 subscribes twice and is thrown out; 1.2.1 asks once and never again."""
    seen = Bodies()
    nsqds[0].publish(topic, b"1")
    wait_until(lambda: lookups[0].producers(topic))
    where: dict[str, Any] = {"nsqlookupd_http_addresses": urls_of(lookups), "lookup_interval": 0.2}
    with flavour.consumer(topic, "c", seen, **where) as consumer:
        seen.wait_for(1)
        nsqds[1].publish(topic, b"2")
        seen.wait_for(2)
        assert sorted(connections_of(consumer)) == sorted(map(address_of, nsqds))
        rows = [row for nsqd in nsqds for row in nsqd.stats(topic, "c")["clients"]]
        assert len(rows) == 2, "one subscription each, after several polls"


def test_all_nsqlookupd_are_united_in_one_poll(
    flavour: Flavour, nsqds: list[Nsqd], lookups: list[Nsqlookupd], topic: str
):
    """pynsq, gnsq, ansq and go-nsq ask one per poll, so the second nsqd is found a poll (60 s) later."""
    for nsqd, lookup in zip(nsqds, lookups, strict=True):
        nsqd.publish(topic, address_of(nsqd).encode())
        wait_until(partial(lookup.producers, topic))
    seen = Bodies()
    where: dict[str, Any] = {"nsqlookupd_http_addresses": urls_of(lookups), "lookup_interval": 3600}
    with flavour.consumer(topic, "c", seen, **where) as consumer:
        assert len(connections_of(consumer)) == 2, "when it has started"
        seen.wait_for(2)

    def counts() -> list[int]:
        return [nsqd.stats(topic)["message_count"] for nsqd in nsqds]

    with flavour.producer(**where) as producer:

        def both_are_used() -> bool:
            producer.submit(topic, b"x").result(PATIENCE_S)
            return min(counts()) > 1

        wait_until(both_are_used, "both nsqd are published to")
        before = counts()
        for _ in range(10):
            producer.submit(topic, b"x").result(PATIENCE_S)
    assert [after - each for after, each in zip(counts(), before, strict=True)] == [5, 5], "by turns"


def test_polls_are_spread(flavour: Flavour, nsqds: list[Nsqd], topic: str):
    """asyncnsq and nsq-py poll at fixed times, so a thousand consumers ask at the same moment."""
    asked: list[float] = []
    host, port = nsqds[0].tcp
    answer = json.dumps({"producers": [{"broadcast_address": host, "tcp_port": port}]}).encode()

    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            is_lookup = self.path.startswith("/lookup?")
            if is_lookup:
                asked.append(time.monotonic())
            self.send_response(200 if is_lookup else 404)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        options: dict[str, Any] = {"nsqlookupd_http_addresses": url, "lookup_interval": 0.15, "lookup_jitter": 0.5}
        with flavour.consumer(topic, "c", Bodies(), **options):
            wait_until(lambda: len(asked) >= 10)
    finally:
        server.shutdown()
        server.server_close()
    waits = [later - earlier for earlier, later in pairwise(asked)]
    assert min(waits) >= 0.07
    assert statistics.pstdev(waits) > 0.02, waits


# --- flow ---


def test_max_in_flight_is_used_and_divided(flavour: Flavour, nsqds: list[Nsqd], proxies: list[Proxy], topic: str):
    """ansq has RDY 1 for ever; nsq-py gives everything at once to the first connection."""
    ledger = Ledger(*proxies)
    is_held = threading.Event()

    def hold(message: Any) -> None:
        is_held.wait(PATIENCE_S)

    addresses = [address_of(proxy.address) for proxy in proxies]
    with flavour.consumer(topic, "c", hold, True, nsqd_tcp_addresses=addresses, max_in_flight=20) as consumer:
        wait_until(lambda: len(connections_of(consumer)) == 2)
        for nsqd in nsqds:
            nsqd.publish(topic, *[b"x"] * 30)
        wait_until(lambda: stats_of(consumer).in_flight == 20)
        assert ledger.held == 20
        assert sorted(ledger.rdy_now) == [10, 10]
        assert [nsqd.stats(topic, "c")["in_flight_count"] for nsqd in nsqds] == [10, 10]
        assert all(counts[0] == 1 for counts in ledger.rdy_counts.values()), "RDY starts at 1"
        is_held.set()
        wait_until(lambda: all(nsqd.unfinished(topic, "c") == 0 for nsqd in nsqds))
    assert ledger.held_max == 20


@in_time
def test_fewer_permits_than_nsqd(flavour: Flavour, nsqds: list[Nsqd], proxies: list[Proxy], topic: str):
    """nsq-py raises NotImplementedError, asyncnsq never starts its rotation, ansq cannot have less."""
    ledger, seen = Ledger(*proxies), Bodies()
    options: dict[str, Any] = {"max_in_flight": 1, "low_rdy_idle_timeout": 0.1, "low_rdy_timeout": 0.2}
    addresses = [address_of(proxy.address) for proxy in proxies]
    with flavour.consumer(topic, "c", seen, nsqd_tcp_addresses=addresses, **options):
        for round_number in range(2):
            for nsqd in nsqds:
                nsqd.publish(topic, b"x")
            seen.wait_for(2 * (round_number + 1))
    assert ledger.held_max == 1
    assert ledger.rdy_sum_max == 1


def test_max_rdy_count_of_nsqd(flavour: Flavour, daemons: Daemons, topic: str):
    """pynsq had it hard-coded (pynsq#131); a client that exceeds it is thrown out."""
    nsqd = daemons.nsqd("--durability=os", "--max-rdy-count=7")
    nsqd.publish(topic, *[b"x"] * 100)
    seen = Bodies()
    with Proxy(nsqd.tcp) as proxy:
        ledger = Ledger(proxy)
        with flavour.consumer(topic, "c", seen, nsqd_tcp_addresses=address_of(proxy.address), max_in_flight=500):
            seen.wait_for(100)
    assert ledger.rdy_sum_max == 7
    assert proxy.connection_count == 1


def test_max_in_flight_changes_while_running(flavour: Flavour, nsqds: list[Nsqd], proxies: list[Proxy], topic: str):
    """gnsq, ansq, asyncnsq and nsq-py cannot; nsqjs can only pause."""
    ledger = Ledger(*proxies)

    addresses = [address_of(proxy.address) for proxy in proxies]
    with flavour.consumer(topic, "c", Bodies(), nsqd_tcp_addresses=addresses, max_in_flight=10) as consumer:
        wait_until(lambda: sum(ledger.rdy_now) >= 2)
        for count in (2, 40, 6):
            set_max_in_flight(consumer, count)
            for nsqd in nsqds:
                nsqd.publish(topic, b"x")  # a connection gets its share with its first message
            wait_until(partial(_adds_up, ledger, count), f"levels that add up to {count}")
        consumer.call(lambda it: it.pause())
        wait_until(lambda: sum(ledger.rdy_now) == 0)
        consumer.call(lambda it: it.unpause())
        wait_until(lambda: sum(ledger.rdy_now) == 6)
    assert ledger.rdy_sum_max == 40


def _adds_up(ledger: Ledger, count: int) -> bool:
    return sum(ledger.rdy_now) == count


def test_is_starved(flavour: Flavour, nsqds: list[Nsqd], topic: str):
    """ansq, asyncnsq and nsq-py have no such thing; nsqjs keeps it to itself."""
    nsqds[0].publish(topic, *[b"x"] * 20)
    is_held = threading.Event()
    states: list[bool] = []

    def hold(message: Any) -> None:
        is_held.wait(PATIENCE_S)

    with flavour.consumer(
        topic, "c", hold, True, nsqd_tcp_addresses=address_of(nsqds[0]), max_in_flight=10
    ) as consumer:
        wait_until(lambda: stats_of(consumer).in_flight == 10)
        states.append(consumer.call(lambda it: it.is_starved))
        is_held.set()
        wait_until(lambda: nsqds[0].unfinished(topic, "c") == 0)
        wait_until(lambda: stats_of(consumer).in_flight == 0)
        states.append(consumer.call(lambda it: it.is_starved))
    assert states == [True, False]


def test_backoff_stops_and_probes(flavour: Flavour, proxies: list[Proxy], nsqds: list[Nsqd], topic: str):
    """ansq, asyncnsq and nsq-py have none: a downstream that fails is hammered."""
    ledger = Ledger(*proxies)
    call_count = 0
    is_broken = True
    stopped_at = 0
    granted: list[int] = []
    for nsqd in nsqds:
        nsqd.publish(topic, *[b"x"] * 20)

    def handle(message: Any) -> None:
        nonlocal call_count
        call_count += 1
        if is_broken and call_count > 5:
            raise RuntimeError("downstream is broken")
        if not is_broken:
            granted.append(max(ledger.rdy_sums[stopped_at:]))  # 0: nsqd sent it before it read RDY 0

    options: dict[str, Any] = {"backoff": 0.5, "max_backoff": 2, "requeue_delay": 0, "max_attempts": 0}
    options |= {"max_in_flight": 4}
    addresses = [address_of(proxy.address) for proxy in proxies]
    with flavour.consumer(topic, "c", handle, nsqd_tcp_addresses=addresses, **options) as consumer:
        wait_until(lambda: stats_of(consumer).backoff == "waiting" and sum(ledger.rdy_now) == 0, "RDY 0 to all")
        stopped_at = ledger.rdy_sums.index(0)
        wait_until(lambda: stats_of(consumer).in_flight == 0, "what came before RDY 0 has been handled")
        failed = stats_of(consumer).failed
        probe_count = sum(count > 0 for count in ledger.rdy_sums[stopped_at:])
        is_broken = False
        wait_until(lambda: stats_of(consumer).backoff == "normal", "the probe succeeds")
        wait_until(lambda: all(nsqd.unfinished(topic, "c") == 0 for nsqd in nsqds))
    assert failed <= 5 + probe_count, "what was in flight, and the probes since, and no more"
    assert next(filter(None, granted)) == 1, "from RDY 0 to all on, never more than a single probe over all nsqd"


# --- messages ---


def test_giving_up_is_told(flavour: Flavour, nsqds: list[Nsqd], topic: str):
    """ansq, asyncnsq and nsq-py have no maximum of attempts; nsqjs has it off."""
    nsqds[0].publish(topic, b"poison", b"fine")
    handled, given_up = Bodies(), []

    def handle(message: Any) -> None:
        handled(message)
        if message.body == b"poison":
            raise Requeue(0)

    options: dict[str, Any] = {
        "max_attempts": 3,
        "on_giving_up": lambda message: given_up.append((message.body, message.attempts)),
    }
    with flavour.consumer(topic, "c", handle, nsqd_tcp_addresses=address_of(nsqds[0]), **options):
        wait_until(lambda: given_up)
        wait_until(lambda: nsqds[0].unfinished(topic, "c") == 0, "it is finished")
    assert given_up == [(b"poison", 4)]
    assert sorted(handled) == [b"fine", b"poison", b"poison", b"poison"]


@pytest.mark.parametrize("delay", [0.1, timedelta(milliseconds=100)], ids=["seconds", "timedelta"])
def test_requeue_delay_grows_and_its_unit_is_right(
    flavour: Flavour, proxies: list[Proxy], nsqds: list[Nsqd], topic: str, delay: float | timedelta
):
    """asyncnsq's 10 and nsq-py's 60 are meant as seconds and sent as milliseconds; gnsq's does not grow."""
    ledger = Ledger(*proxies)
    came_at: list[float] = []
    nsqds[0].publish(topic, b"x")

    def handle(message: Any) -> None:
        came_at.append(time.monotonic())
        if message.attempts < 4:
            raise Requeue

    options: dict[str, Any] = {"requeue_delay": delay, "max_requeue_delay": 0.25}
    with flavour.consumer(topic, "c", handle, nsqd_tcp_addresses=address_of(proxies[0].address), **options):
        wait_until(lambda: len(came_at) == 4)
    assert ledger.requeue_ms == [100, 200, 250]
    waits = [later - earlier for earlier, later in pairwise(came_at)]
    assert all(wait > expected - 0.02 for wait, expected in zip(waits, (0.1, 0.2, 0.25), strict=True))


def test_dpub_waits(flavour: Flavour, nsqds: list[Nsqd], topic: str):
    """nsq-py has no DPUB."""
    came_at: list[float] = []
    with (
        flavour.producer(address_of(nsqds[0])) as producer,
        flavour.consumer(
            topic, "c", lambda message: came_at.append(time.monotonic()), nsqd_tcp_addresses=address_of(nsqds[0])
        ),
    ):
        producer.call(lambda it: it.dpub(f"{topic}-later", b"x", delay=timedelta(hours=1)))  # which waits for nothing
        began = time.monotonic()
        producer.call(lambda it: it.dpub(topic, b"x", delay=timedelta(seconds=0.3)))
        wait_until(lambda: came_at)
    assert came_at[0] - began >= 0.3


@in_time
def test_time_left_and_touch(flavour: Flavour, nsqds: list[Nsqd], topic: str):
    """Nobody else tells how much time a handler has."""
    nsqds[0].publish(topic, b"x")
    left: list[float] = []

    def handle(message: Any) -> None:
        left.append(message.time_left)
        time.sleep(1.6)
        message.touch()
        left.append(message.time_left)
        time.sleep(1.6)

    with flavour.consumer(topic, "c", handle, True, nsqd_tcp_addresses=address_of(nsqds[0]), msg_timeout=3) as consumer:
        wait_until(lambda: stats_of(consumer).finished == 1)
        assert stats_of(consumer).received == 1, "3.2 s in a timeout of 3 s"
    assert 0 < left[0] <= 3
    if flavour.name == "sync":
        assert 3 - 1.6 < left[1] <= 3, "touched"


def test_no_touch_is_sent_unasked(flavour: Flavour, proxies: list[Proxy], nsqds: list[Nsqd], topic: str):
    """NSQ's client guide forbids it: a handler that hangs must lose its message."""
    ledger = Ledger(proxies[0])
    nsqds[0].publish(topic, b"x")
    attempts: list[int] = []

    def handle(message: Any) -> None:
        attempts.append(message.attempts)
        time.sleep(1.2 if message.attempts == 1 else 0)

    address = address_of(proxies[0].address)
    with flavour.consumer(topic, "c", handle, True, nsqd_tcp_addresses=address, msg_timeout=1):
        wait_until(lambda: attempts == [1, 2])
        wait_until(lambda: nsqds[0].unfinished(topic, "c") == 0)
    assert ledger.commands[b"FIN"] >= 1
    assert ledger.commands[b"TOUCH"] == 0


def test_sample_rate(flavour: Flavour, nsqds: list[Nsqd], topic: str):
    """ansq sends the field and does not document that the rest is gone."""
    seen = Bodies()
    with flavour.consumer(topic, "c", seen, nsqd_tcp_addresses=address_of(nsqds[0]), sample_rate=50):
        nsqds[0].publish(topic, *[b"x"] * 1000)
        wait_until(lambda: nsqds[0].unfinished(topic, "c") == 0)
        wait_until(lambda: nsqds[0].stats(topic, "c")["in_flight_count"] == 0)
        seen.wait_for(300)
        assert 400 < len(seen) < 600


@pytest.mark.parametrize("name", ["a", "1", ".", "x" * 64, "b#ephemeral"])
def test_names(flavour: Flavour, nsqds: list[Nsqd], name: str):
    """ansq refuses names of one letter with an AssertionError."""
    seen = Bodies()
    with (
        flavour.producer(address_of(nsqds[0])) as producer,
        flavour.consumer(name, flavour.name, seen, nsqd_tcp_addresses=address_of(nsqds[0])),
    ):
        producer.submit(name, b"x").result(PATIENCE_S)
        seen.wait_for(1)


def test_bodies_are_bytes(flavour: Flavour, nsqds: list[Nsqd], topic: str):
    """Every byte, and what looks like the protocol; some clients decode or strip."""
    bodies = [
        bytes(range(256)),
        b"\n",
        b"\r\n",
        b"  V2",
        b"\x00\x00\x00\x06",
        b"FIN 0123456789abcdef\n",
        b"\xff" * 70_000,
    ]
    seen = Bodies()
    with (
        flavour.producer(address_of(nsqds[0])) as producer,
        flavour.consumer(topic, "c", seen, nsqd_tcp_addresses=address_of(nsqds[0])),
    ):
        producer.call(lambda it: it.mpub(topic, bodies))
        for body in bodies:
            producer.submit(topic, body).result(PATIENCE_S)
        seen.wait_for(2 * len(bodies))
    assert sorted(seen) == sorted(2 * bodies)


# --- publishing ---


def test_the_answer_to_a_publish_reaches_its_caller(flavour: Flavour, daemons: Daemons, topic: str):
    """pynsq resolves when it was written, ansq returns errors, nsq-py returns any answers it has read."""
    nsqd = daemons.nsqd("--durability=os", "--max-msg-size=100")
    with flavour.producer(address_of(nsqd), max_tries=1) as producer:
        futures = [producer.submit(topic, b"x" * (200 if number % 5 == 4 else 50)) for number in range(25)]
        for number, future in enumerate(futures):
            error = future.exception(PATIENCE_S)
            if number % 5 == 4:
                assert isinstance(error, PublishRefused)
                assert error.code == "E_BAD_MESSAGE"
            else:
                assert error is None
    assert nsqd.stats(topic)["message_count"] == 20


def test_auth_is_not_taken_for_the_answer_of_a_publish(flavour: Flavour, daemons: Daemons, topic: str):
    """nsq-py is off by one for ever after AUTH; every command of ansq raises after it."""
    with AuthServer() as server:
        server.grant({"permissions": ["publish", "subscribe"], "topic": f"^{topic}$", "channels": [".*"]})
        nsqd = daemons.nsqd(f"--auth-http-address={server.address}", "--durability=os")
        options = ConnectionOptions(auth_secret=SECRET)
        seen = Bodies()
        with (
            flavour.producer(address_of(nsqd), options=options) as producer,
            flavour.consumer(topic, "c", seen, nsqd_tcp_addresses=address_of(nsqd), options=options),
        ):
            for number in range(3):
                producer.submit(topic, b"%d" % number).result(PATIENCE_S)
                refused = producer.submit("forbidden", b"x").exception(PATIENCE_S)
                assert isinstance(refused, PublishRefused)
                assert refused.code == "E_UNAUTHORIZED"
            seen.wait_for(3)
        assert nsqd.stats(topic)["message_count"] == 3


@pytest.mark.parametrize("codec", ["snappy", "deflate"])
def test_compression_nine_times_out_of_nine(
    flavour: Flavour, nsqds: list[Nsqd], proxies: list[Proxy], topic: str, codec: str, certificates: Certificates
):
    """asyncnsq 2.0.1 fails 6 of 9 upgrades to snappy, pynsq all: what comes with the last answer in clear gets lost.

    In pieces, whole, and under TLS, three times each.
    """
    seen = Bodies()
    options = [ConnectionOptions(compression=codec)] * 2
    options.append(ConnectionOptions(compression=codec, tls=True, tls_ca_file=certificates.ca))
    address = address_of(proxies[0].address)
    for number in range(9):
        proxies[0].down.piece_bytes_max = (0, 3, 0)[number % 3]
        with (
            flavour.producer(address, options=options[number % 3]) as producer,
            flavour.consumer(topic, "c", seen, nsqd_tcp_addresses=address, options=options[number % 3]),
        ):
            producer.submit(topic, b"%d" % number * 300).result(PATIENCE_S)
            seen.wait_for(number + 1)
    assert proxies[0].connection_count == 18, "each at the first try"
    assert len(set(seen)) == 9


def test_tls_is_verified_by_default(flavour: Flavour, nsqds: list[Nsqd], topic: str):
    """asyncnsq never verifies: whoever sits between reads everything."""
    with (
        pytest.raises(TlsRefused, match="not from an authority that is trusted here"),
        flavour.consumer(
            topic, "c", Bodies(), nsqd_tcp_addresses=address_of(nsqds[0]), options=ConnectionOptions(tls=True)
        ),
    ):
        pass
    with flavour.producer(address_of(nsqds[0]), options=ConnectionOptions(tls=True)) as producer:
        error = producer.submit(topic, b"x").exception(PATIENCE_S)
    assert isinstance(error, PublishRefused)
    assert error.code == "TLS_REFUSED"


# --- connections ---


def test_back_after_kill_9(flavour: Flavour, daemons: Daemons, topic: str):
    """pynsq after 11.7 s, ansq's writer and asyncnsq's reader never, nsq-py hangs. Ours: first try within a second."""
    nsqd = daemons.nsqd("--durability=os")
    seen = Bodies()
    with (
        flavour.producer(address_of(nsqd), timeout=PATIENCE_S) as producer,
        flavour.consumer(topic, "c", seen, nsqd_tcp_addresses=address_of(nsqd)) as consumer,
    ):
        producer.submit(topic, b"before").result(PATIENCE_S)
        seen.wait_for(1)
        time.sleep(1.1)  # a connection that breaks sooner does not count as a good one
        nsqd.kill()
        futures = [producer.submit(topic, b"while it was down") for _ in range(5)]
        killed = time.monotonic()
        nsqd.start()
        started, down_s = time.monotonic(), time.monotonic() - killed
        wait_until(lambda: connections_of(consumer))
        for future in futures:
            future.result(PATIENCE_S)
        seen.wait_for(6)
        assert time.monotonic() - started < SOON_S + 2 * down_s, "the delay doubles while it is down"


@in_time
def test_long_handlers_and_idle_producers_keep_their_connections(flavour: Flavour, nsqds: list[Nsqd], topic: str):
    """pynsq#104, #151, ansq#62: a handler of three heartbeat intervals loses its connection, and its message.

    gnsq#12: an idle publisher loses its first message. In both nobody answers the heartbeats.
    """
    done: list[int] = []

    def handle(message: Any) -> None:
        time.sleep(3.3)
        done.append(message.attempts)

    with (
        Proxy(nsqds[0].tcp) as proxy,
        flavour.producer(address_of(proxy.address), heartbeat_interval=1) as producer,
        flavour.consumer(
            topic, "c", handle, True, nsqd_tcp_addresses=address_of(nsqds[0]), heartbeat_interval=1
        ) as consumer,
    ):
        producer.submit(topic, b"1").result(PATIENCE_S)
        count = proxy.connection_count
        wait_until(lambda: stats_of(consumer).finished == 1)
        assert stats_of(consumer).received == 1
        producer.submit(f"{topic}-idle", b"2").result(PATIENCE_S)
        assert proxy.connection_count == count, "the connection was kept"
        proxy.cut()
        producer.submit(f"{topic}-idle", b"3").result(PATIENCE_S)
    assert done == [1]
    row = nsqds[0].stats(topic, "c")
    assert (row["timeout_count"], row["requeue_count"]) == (0, 0)
    assert nsqds[0].stats(f"{topic}-idle")["message_count"] >= 2


@in_time
def test_a_coroutine_that_waits_long_keeps_its_connection(nsqds: list[Nsqd], topic: str):
    """The same for an ``async def`` handler, several at a time (gnsq, nsqjs have none)."""
    nsqds[0].publish(topic, *[b"x"] * 5)
    running = highest = 0

    async def handle(message: Message) -> None:
        nonlocal running, highest
        running += 1
        highest = max(highest, running)
        await asyncio.sleep(3.3)
        running -= 1

    async def main() -> None:
        options: dict[str, Any] = {"handler": handle, "concurrency": 5, "heartbeat_interval": 1}
        async with Consumer(topic, "c", nsqd_tcp_addresses=address_of(nsqds[0]), **options) as consumer:
            async with asyncio.timeout(PATIENCE_S):
                while consumer.stats().finished < 5:
                    await asyncio.sleep(0.02)
            assert consumer.stats().received == 5

    asyncio.run(main())
    assert highest == 5


def test_leaving_drains(flavour: Flavour, nsqds: list[Nsqd], topic: str):
    """pynsq and gnsq drop what runs, asyncnsq requeues everything, close() of nsq-py does nothing on Python 3."""
    nsqds[0].publish(topic, *[b"%d" % number for number in range(50)])
    handled = Bodies()

    def handle(message: Any) -> None:
        time.sleep(0.1)
        handled(message)

    with flavour.consumer(
        topic, "c", handle, True, nsqd_tcp_addresses=address_of(nsqds[0]), max_in_flight=20
    ) as consumer:
        wait_until(lambda: stats_of(consumer).in_flight >= 10)
        wait_until(lambda: handled)
    row = nsqds[0].left(topic, "c")
    assert row["in_flight_count"] == 0
    assert row["depth"] + row["deferred_count"] == 50 - len(handled), "what was begun is finished, the rest is back"
    assert row["timeout_count"] == 0


def test_a_reader_can_be_stopped(flavour: Flavour, nsqds: list[Nsqd], topic: str):
    """pynsq#196: a closed reader reconnects after 15 s."""
    with Proxy(nsqds[0].tcp) as proxy:
        with flavour.consumer(topic, "c", Bodies(), nsqd_tcp_addresses=address_of(proxy.address)) as consumer:
            wait_until(lambda: connections_of(consumer))
            consumer.call(lambda it: it.stop())
            proxy.cut()
        count = proxy.connection_count
        time.sleep(0.6)
        assert (proxy.connection_count, proxy.open_count) == (count, 0)


# --- the package ---


def test_types_are_shipped():
    """No other client but ansq has types; strictness is checked by mypy over tests and examples."""
    assert resources.files("flintmq").joinpath("py.typed").is_file()


def test_importing_configures_no_logging():
    """ansq calls basicConfig and nsq-py adds handlers when they are imported."""
    import logging

    import flintmq.client.aio.consumer
    import flintmq.client.aio.producer  # noqa: F401

    assert logging.getLogger("flintmq.client").handlers == []
    assert logging.getLogger("flintmq").handlers == []


def test_what_is_shown_elsewhere_exists():
    root = Path(__file__).resolve().parents[2]
    for probe, test in ELSEWHERE.items():
        path, _, name = test.partition("::")
        assert f"def {name}(" in (root / path).read_text(encoding="utf-8"), probe
