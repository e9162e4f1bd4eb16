"""Our clients against real daemons through a network that fails, both flavours in the same scenarios.

Every message has a number. What was acknowledged must be handled in the end; what was refused must never be; every call
ends within its deadline; what consumers hold is read off the wire (:mod:`tests.integration.ledger`).

Rules of this file: faults are switched while load runs, and each test sees that its fault happened; daemons that a test
does not kill are shared, each test has a topic of its own.

Without TLS nobody can notice a bit that flips inside a body: TCP's checksum is made anew by whoever flips it in
between, and NSQ has none. With TLS it must be noticed, and is.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Certificates
from tests.integration.daemons import PATIENCE_S, SOON_S, Daemons, Nsqd, wait_until
from tests.integration.flavours import (
    CONCURRENCY,
    FLAVOURS,
    Flavour,
    PublishLoad,
    Seen,
    address_of,
    connections_of,
    set_max_in_flight,
    stats_of,
)
from tests.integration.ledger import Ledger
from tests.integration.load import body_of
from tests.integration.proxy import Proxy
from tests.integration.test_client_security import tls_flags

from flintmq import ConnectionOptions, Message, Producer, PublishRefused, PublishUnknown

ROOT = Path(__file__).resolve().parents[2]
MAX_IN_FLIGHT = 50


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[list[Nsqd]]:
    """Two running nsqd, which also speak TLS."""
    daemons = Daemons(tmp_path_factory.mktemp("shared"))
    flags = (*tls_flags(certificates), "--durability=os")
    try:
        yield [daemons.nsqd(*flags), daemons.nsqd(*flags)]
    finally:
        daemons.close()


@pytest.fixture
def proxies(pair: list[Nsqd]) -> Iterator[list[Proxy]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Proxy(nsqd.tcp, seed=number)) for number, nsqd in enumerate(pair)]


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return f"t{zlib.crc32(request.node.name.encode()):08x}"


def addresses_of(proxies: Sequence[Proxy]) -> list[str]:
    return [address_of(proxy.address) for proxy in proxies]


def finish(load: PublishLoad, seen: Seen) -> None:
    """Let everything that was acknowledged be handled; nothing may be lost, refused ones not be handled."""
    load.stop()
    seen.wait_for(load.acked)
    seen.check(load)


# --- cuts, pieces, delays ---


@pytest.mark.parametrize("is_reset", [True, False], ids=["rst", "fin"])
def test_cuts_at_random_bytes(flavour: Flavour, proxies: list[Proxy], topic: str, is_reset: bool):
    """Both directions of all connections, in the middle of frames and commands, again and again."""
    ledger, seen = Ledger(*proxies), Seen()
    with (
        flavour.producer(addresses_of(proxies)) as producer,
        flavour.consumer(
            topic, "c", seen, nsqd_tcp_addresses=addresses_of(proxies), max_in_flight=MAX_IN_FLIGHT
        ) as consumer,
        PublishLoad(producer, topic) as load,
    ):
        load.wait_for(200)
        for proxy in proxies:
            for direction in (proxy.up, proxy.down):
                direction.cut_between, direction.is_reset = (1, 30_000), is_reset
        wait_until(lambda: all(proxy.cut_count >= 3 for proxy in proxies), "3 cuts of each")
        for proxy in proxies:
            proxy.heal()
        wait_until(lambda: len(connections_of(consumer)) == 2, "both connected again")
        load.wait_for(200)
        finish(load, seen)
    assert ledger.rdy_sum_max <= MAX_IN_FLIGHT


def test_small_pieces(flavour: Flavour, proxies: list[Proxy], topic: str):
    """Handshake, answers and messages come byte by byte."""
    seen = Seen()
    for proxy in proxies:
        proxy.up.piece_bytes_max = proxy.down.piece_bytes_max = 1
    with (
        flavour.producer(addresses_of(proxies)) as producer,
        flavour.consumer(topic, "c", seen, nsqd_tcp_addresses=addresses_of(proxies)),
        PublishLoad(producer, topic, window=5) as load,
    ):
        load.wait_for(60)
        finish(load, seen)
    assert all(proxy.down.byte_count > 1000 for proxy in proxies)


def test_a_long_way(flavour: Flavour, proxies: list[Proxy], topic: str):
    """60 ms each way: nothing is taken for dead, and many messages travel at a time."""
    seen = Seen()
    for proxy in proxies:
        proxy.up.delay_s = proxy.down.delay_s = 0.06
    with (
        flavour.producer(addresses_of(proxies)) as producer,
        flavour.consumer(topic, "c", seen, nsqd_tcp_addresses=addresses_of(proxies)),
        PublishLoad(producer, topic, window=8) as load,
    ):
        load.wait_for(40)
        made = [proxy.connection_count for proxy in proxies]
        load.wait_for(20)
        assert [proxy.connection_count for proxy in proxies] == made, "nothing is connected anew"
        finish(load, seen)
    assert 0.12 <= load.longest_s < SOON_S


def test_a_narrow_way(flavour: Flavour, proxies: list[Proxy], topic: str):
    """More is pushed than passes: who publishes waits, nobody takes the slow nsqd for a dead one."""
    seen = Seen()
    proxies[0].up.bytes_per_s = 100_000
    with (
        flavour.producer(addresses_of(proxies[:1]), timeout=6) as producer,
        flavour.consumer(topic, "c", seen, nsqd_tcp_addresses=addresses_of(proxies)),
        PublishLoad(producer, topic, window=8, size=10_000, timeout_s=6) as load,
    ):
        load.wait_for(12)
        proxies[0].heal()
        finish(load, seen)
    assert load.longest_s > 0.15, "it was too wide"
    assert not load.refused
    assert not load.unknown


async def test_short_deadlines_fill_no_memory(proxies: list[Proxy], topic: str):
    """What is given up is still on its way: it counts until it is gone, so that a stalled nsqd gets no more of it."""
    size_bytes, limit_bytes = 50_000, 1_000_000
    async with Producer(addresses_of(proxies[:1]), batch=False, max_bytes_in_flight=limit_bytes) as producer:
        await producer.pub(topic, b"x")
        proxies[0].up.is_stalled = proxies[0].down.is_stalled = True
        results: list[BaseException | None] = []
        for _ in range(100):
            results += await asyncio.gather(
                producer.pub(topic, bytes(size_bytes), timeout=0.02), return_exceptions=True
            )
        sent = [result for result in results if isinstance(result, PublishUnknown)]
        assert 0 < len(sent) * size_bytes <= limit_bytes
        assert {type(result) for result in results} == {PublishUnknown, PublishRefused}
        assert producer.stats().bytes_in_flight <= limit_bytes
        proxies[0].cut()
        proxies[0].heal()
        await producer.pub(topic, b"y")
        assert producer.stats().bytes_in_flight == 0


# --- silence ---


def test_a_stalled_nsqd_is_left_for_another(flavour: Flavour, proxies: list[Proxy], topic: str):
    """It takes connections and bytes and answers nothing: every call ends by its deadline, most by the other nsqd."""
    seen = Seen()
    with (
        flavour.producer(addresses_of(proxies), timeout=4) as producer,
        flavour.consumer(topic, "c", seen, nsqd_tcp_addresses=addresses_of(proxies), heartbeat_interval=1),
        PublishLoad(producer, topic, timeout_s=4) as load,
    ):
        load.wait_for(100)
        proxies[0].up.is_stalled = proxies[0].down.is_stalled = True
        load.wait_for(500)
        assert load.longest_s < 4 + SOON_S
        failed = len(load.refused) + len(load.unknown)
        proxies[0].heal()
        load.wait_for(100)
        finish(load, seen)
    assert failed <= 100, "with another nsqd at hand few calls may fail"


def test_an_nsqd_that_accepts_and_says_nothing(flavour: Flavour, proxies: list[Proxy], topic: str):
    """From the start: the client starts all the same, and has it when it wakes up."""
    seen = Seen()
    proxies[0].accepts_only = True
    options = ConnectionOptions(connect_timeout=2)
    began = time.monotonic()
    with (
        flavour.producer(addresses_of(proxies), options=options) as producer,
        flavour.consumer(topic, "c", seen, nsqd_tcp_addresses=addresses_of(proxies), options=options) as consumer,
        PublishLoad(producer, topic) as load,
    ):
        load.wait_for(50)
        assert time.monotonic() - began < SOON_S
        wait_until(lambda: connections_of(consumer) == (address_of(proxies[1].address),), "the other one")
        proxies[0].heal()
        wait_until(lambda: len(connections_of(consumer)) == 2, "connected when it answers")
        finish(load, seen)


def test_a_half_open_connection_is_noticed_within_two_heartbeats(flavour: Flavour, proxies: list[Proxy], topic: str):
    """A cable is pulled: no byte, no FIN, no RST. Both clients notice by the silence."""
    seen = Seen()
    lost = address_of(proxies[0].address)
    with (
        flavour.producer(addresses_of(proxies), timeout=4, heartbeat_interval=1) as producer,
        flavour.consumer(
            topic, "c", seen, nsqd_tcp_addresses=addresses_of(proxies), heartbeat_interval=1, msg_timeout=2
        ) as consumer,
        PublishLoad(producer, topic, timeout_s=4) as load,
    ):
        load.wait_for(100)
        proxies[0].up.is_dropped = proxies[0].down.is_dropped = True
        pulled = time.monotonic()
        proxies[0].refuse()
        wait_until(lambda: lost not in connections_of(consumer), "the consumer noticed")
        wait_until(lambda: stats_of(producer).connections == 1, "the producer noticed")
        assert time.monotonic() - pulled < SOON_S, "nothing else would have told it"
        proxies[0].cut()
        proxies[0].heal()
        wait_until(lambda: lost in connections_of(consumer), "back")
        load.wait_for(100)
        finish(load, seen)


# --- damage ---


def test_damage_under_tls_is_noticed(flavour: Flavour, proxies: list[Proxy], topic: str, certificates: Certificates):
    """One bit in each direction of each connection, in handshakes and behind them: no wrong body, nothing lost."""
    seen = Seen()
    options = ConnectionOptions(tls=True, tls_ca_file=certificates.ca)
    addresses = addresses_of(proxies)
    with (
        flavour.producer(addresses, options=options) as producer,
        flavour.consumer(topic, "c", seen, nsqd_tcp_addresses=addresses, options=options) as consumer,
        PublishLoad(producer, topic) as load,
    ):
        load.wait_for(100)
        for proxy in proxies:
            proxy.up.corrupt_between = proxy.down.corrupt_between = (0, 20_000)
        wait_until(
            lambda: all(min(proxy.up.corrupted_count, proxy.down.corrupted_count) >= 2 for proxy in proxies),
            "2 flips in each direction",
        )
        for proxy in proxies:
            proxy.heal()
        wait_until(lambda: len(connections_of(consumer)) == 2, "both connected again")
        load.wait_for(100)
        finish(load, seen)


def test_damage_without_tls_stays_where_it_is(flavour: Flavour, proxies: list[Proxy], pair: list[Nsqd], topic: str):
    """Frames that make no sense end the connection, and the client goes on; a bit in a body nobody can notice.

    Only the consumer's side is damaged. With every flip at most one body is wrong or goes unseen.
    """
    seen = Seen()
    addresses = addresses_of(proxies)
    options = ConnectionOptions(heartbeat_interval=1, msg_timeout=1, frame_size_max=1024, connect_timeout=2)
    with (
        flavour.producer([address_of(nsqd) for nsqd in pair]) as producer,
        flavour.consumer(
            topic, "c", seen, nsqd_tcp_addresses=addresses, options=options, max_in_flight=MAX_IN_FLIGHT, max_attempts=0
        ),
        PublishLoad(producer, topic, window=10) as load,
    ):
        load.wait_for(100)
        for proxy in proxies:
            proxy.down.corrupt_between = (0, 7)
            proxy.cut()
        wait_until(lambda: min(proxy.down.corrupted_count for proxy in proxies) >= 2, "flips in the first frame")
        for proxy in proxies:
            proxy.down.corrupt_between = (1000, 20_000)
        wait_until(lambda: min(proxy.down.corrupted_count for proxy in proxies) >= 3, "a flip between messages")
        for proxy in proxies:
            proxy.heal()
        load.wait_for(100)
        load.stop()
        flips = sum(proxy.down.corrupted_count for proxy in proxies)
        wait_until(lambda: len(set(load.acked) - set(seen.counts)) <= flips, "all but what was damaged")
    assert len(seen.damaged) <= flips
    assert len(set(seen.counts) - set(load.attempted)) <= flips


def test_a_length_that_was_damaged_makes_nobody_deaf(
    flavour: Flavour, proxies: list[Proxy], pair: list[Nsqd], topic: str
):
    """A frame that claims megabytes never ends; heartbeats inside it are not answered, and nsqd hangs up after two."""
    seen = Seen()
    with (
        flavour.producer(address_of(pair[0])) as producer,
        flavour.consumer(
            topic, "c", seen, nsqd_tcp_addresses=addresses_of(proxies[:1]), heartbeat_interval=1, msg_timeout=1
        ),
    ):
        proxies[0].down.corrupt_between = (1, 1)
        wait_until(lambda: proxies[0].down.corrupted_count == 1, "the length of a heartbeat was damaged")
        proxies[0].heal()
        producer.submit(topic, b"0 .").result(PATIENCE_S)
        wait_until(lambda: 0 in seen.counts, "connected anew")


def test_an_nsqd_that_registers_under_what_is_no_address_harms_nobody(flavour: Flavour, daemons: Daemons, topic: str):
    lookup = daemons.nsqlookupd()
    to = f"--lookupd-tcp-address={address_of(lookup.tcp)}"
    wrong = [daemons.nsqd(to, f"--broadcast-address={host}") for host in ("[", "x" * 64)]
    nsqds = [*wrong, daemons.nsqd(to)]
    for nsqd in nsqds:
        nsqd.post(f"/topic/create?topic={topic}")
    wait_until(lambda: len(lookup.producers(topic)) == len(nsqds), "all are registered")
    where: dict[str, Any] = {"nsqlookupd_http_addresses": f"http://{address_of(lookup.http)}", "lookup_interval": 0.5}
    seen = Seen()
    with flavour.producer(**where) as producer, flavour.consumer(topic, "c", seen, **where) as consumer:
        with PublishLoad(producer, topic) as load:
            load.wait_for(50)
        finish(load, seen)
        assert not load.refused and len(connections_of(consumer)) == 1


# --- restarts ---


def test_kills_of_everything_under_load(flavour: Flavour, daemons: Daemons, topic: str):
    """nsqlookupd and both nsqd are killed with -9 and started again, by turns, while messages flow."""
    lookup = daemons.nsqlookupd()
    flags = ("--durability=os", f"--lookupd-tcp-address={address_of(lookup.tcp)}")
    nsqds = [daemons.nsqd(*flags), daemons.nsqd(*flags)]
    for nsqd in nsqds:
        nsqd.post(f"/topic/create?topic={topic}")
    wait_until(lambda: len(lookup.producers(topic)) == 2)
    where: dict[str, Any] = {"nsqlookupd_http_addresses": f"http://{address_of(lookup.http)}", "lookup_interval": 0.5}
    seen = Seen()
    with (
        flavour.producer(**where) as producer,
        flavour.consumer(topic, "c", seen, **where) as consumer,
        PublishLoad(producer, topic) as load,
    ):
        load.wait_for(200)
        for daemon in (nsqds[0], lookup, nsqds[1]):
            daemon.kill()
            load.wait_for(150)
            daemon.start()
            load.wait_for(50)
        wait_until(lambda: len(connections_of(consumer)) == 2, "both found again")
        finish(load, seen)
        assert not load.refused
        assert not load.unknown


def test_a_single_nsqd_is_killed_under_load(flavour: Flavour, daemons: Daemons, topic: str):
    """Nobody else is there: calls wait for it and end well, because it is back within their deadline."""
    nsqd = daemons.nsqd("--durability=os")
    seen = Seen()
    with (
        flavour.producer(address_of(nsqd), timeout=PATIENCE_S) as producer,
        flavour.consumer(topic, "c", seen, nsqd_tcp_addresses=address_of(nsqd)) as consumer,
        PublishLoad(producer, topic) as load,
    ):
        for _ in range(2):
            load.wait_for(150)
            nsqd.kill()
            nsqd.start()
            began = time.monotonic()
            load.wait_for(50)
            wait_until(lambda: connections_of(consumer))
            assert time.monotonic() - began < SOON_S
        finish(load, seen)
        assert len(load.acked) == len(load.attempted)


def test_nsqlookupd_is_gone_for_long_and_comes_back_empty(flavour: Flavour, daemons: Daemons, topic: str):
    """Connections that are there stay, whatever it says; what it lists later is found."""
    lookup = daemons.nsqlookupd()
    with Proxy(lookup.tcp) as registering:
        flags = ("--durability=os", f"--lookupd-tcp-address={address_of(registering.address)}")
        nsqd = daemons.nsqd(*flags)
        nsqd.post(f"/topic/create?topic={topic}")
        wait_until(lambda: lookup.producers(topic))
        where: dict[str, Any] = {
            "nsqlookupd_http_addresses": f"http://{address_of(lookup.http)}",
            "lookup_interval": 0.2,
        }
        seen = Seen()
        with (
            flavour.producer(**where) as producer,
            flavour.consumer(topic, "c", seen, **where) as consumer,
            PublishLoad(producer, topic, timeout_s=SOON_S) as load,
        ):
            load.wait_for(100)
            lookup.kill()
            _for_polls(load, 3, 0.2)
            registering.refuse()
            registering.cut()
            lookup.start()
            assert lookup.producers(topic) == []
            _for_polls(load, 3, 0.2)
            assert connections_of(consumer) == (address_of(nsqd),)
            registering.listen()
            wait_until(lambda: lookup.producers(topic), "registered again")
            other = daemons.nsqd("--durability=os", f"--lookupd-tcp-address={address_of(lookup.tcp)}")
            other.post(f"/topic/create?topic={topic}")
            wait_until(lambda: len(connections_of(consumer)) == 2, "the new one is found")
            finish(load, seen)
            assert not load.refused, "nobody took the nsqd away"


def _for_polls(load: PublishLoad, count: int, interval_s: float) -> None:
    """Let so many polls go by, and see that messages flow all the while."""
    for _ in range(count):
        until = time.monotonic() + interval_s
        load.wait_for(20)
        time.sleep(max(0.0, until - time.monotonic()))


# --- bounds ---


def test_never_more_in_flight_than_allowed(flavour: Flavour, proxies: list[Proxy], pair: list[Nsqd], topic: str):
    """While the limit changes and connections come and go, read off the wire; there is always more to be had."""
    count, highest = 500, 20
    for number, nsqd in enumerate(pair):
        nsqd.publish(topic, *[body_of(2 * each + number) for each in range(count)])
    ledger, seen = Ledger(*proxies), Seen()

    def slow(message: Message) -> None:
        time.sleep(0.004 if flavour.name == "asyncio" else 0.001)  # four threads, and one
        seen(message)

    with flavour.consumer(
        topic, "c", slow, True, nsqd_tcp_addresses=addresses_of(proxies), max_in_flight=highest
    ) as consumer:
        for turn, limit in enumerate((highest, 7, 2, highest)):
            set_max_in_flight(consumer, limit)
            wait_until(lambda most=limit: sum(ledger.rdy_now) <= most, "the new level is told")  # type: ignore[misc]
            wait_until(lambda most=limit: ledger.held <= most, "what came before is answered")  # type: ignore[misc]
            for _ in range(20):
                assert ledger.held <= limit
                assert sum(ledger.rdy_now) <= limit
                time.sleep(0.005)
            proxies[turn % 2].cut()
            wait_until(lambda: len(connections_of(consumer)) == 2, "connected again")
        seen.wait_for(range(2 * count))
    assert not seen.damaged
    # A FIN and the RDY that it made room for travel over two connections: the RDY may be quicker. Each handler that
    # runs can add one; the exact bound is shown in the simulation.
    assert highest <= ledger.held_max <= highest + CONCURRENCY
    assert ledger.rdy_sum_max == highest


@pytest.mark.parametrize("name", FLAVOURS)
def test_memory_is_bounded_while_nsqd_is_away(name: str, daemons: Daemons):
    """The producer is pushed with 4 KiB bodies for as long as nsqd is away, far more than may be kept."""
    nsqd = daemons.nsqd("--durability=os")
    with subprocess.Popen(
        [sys.executable, "-c", _PUSHED[name], address_of(nsqd)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as pushing:
        try:
            assert pushing.stdout is not None and pushing.stdin is not None
            assert pushing.stdout.readline() == "up\n"
            nsqd.kill()
            assert pushing.stdout.readline() == "pushed\n"
            nsqd.start()
            out, _ = pushing.communicate("nsqd is back\n", timeout=PATIENCE_S * 2)
        finally:
            pushing.kill()
    begun, failed, ended, before_kib, peak_kib, again = (int(word) for word in out.split())
    assert begun == ended
    assert failed > 0
    assert begun * 4 > 40_000, "more KiB were pushed than may be kept"
    assert peak_kib - before_kib < 24_000, f"it grew by {peak_kib - before_kib} KiB"
    assert again == 1, "and it works again"


_ASYNCIO_PUSHED = """
import asyncio, resource, sys
from flintmq import Producer, PublishError
begun = failed = ended = 0
async def push(producer, until):
    global begun, failed, ended
    loop = asyncio.get_running_loop()
    while loop.time() < until or begun < 12_000:
        begun += 1
        try:
            await producer.pub("t", bytes(4096), timeout=0.3)
        except PublishError:
            failed += 1
        ended += 1
async def main():
    async with Producer(sys.argv[1], max_bytes_in_flight=4 * 1024 * 1024) as producer:
        await producer.pub("t", b"x")
        print("up", flush=True)
        while producer.stats().connections:
            await asyncio.sleep(0.01)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(push(producer, loop.time() + 1) for _ in range(2000)))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print("pushed", flush=True)
        sys.stdin.readline()
        await producer.pub("t", b"x", timeout=60)
        print(begun, failed, ended, before, peak, 1)
asyncio.run(main())
"""
_SYNC_PUSHED = """
import resource, sys, threading, time
from flintmq import PublishError
from flintmq.sync import Producer
lock = threading.Lock()
begun = failed = ended = 0
def push(producer, until):
    global begun, failed, ended
    while time.monotonic() < until or begun < 11_000:
        with lock:
            begun += 1
        try:
            producer.pub("t", bytes(4096), timeout=0.03)
        except PublishError:
            with lock:
                failed += 1
        with lock:
            ended += 1
with Producer(sys.argv[1]) as producer:
    producer.pub("t", b"x")
    print("up", flush=True)
    while producer.stats().connections:
        time.sleep(0.01)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    threads = [threading.Thread(target=push, args=(producer, time.monotonic() + 1)) for _ in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print("pushed", flush=True)
    sys.stdin.readline()
    producer.pub("t", b"x", timeout=60)
    print(begun, failed, ended, before, peak, 1)
"""
_PUSHED = {"asyncio": _ASYNCIO_PUSHED, "sync": _SYNC_PUSHED}
