"""statsd reports of a real nsqd, as the daemon at the other end of the UDP socket sees them (NSQ's statsd)."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator

import pytest
from tests.integration.daemons import PATIENCE_S, Daemons, Nsqd, wait_until

_LINE = re.compile(r"([^:\n]+):(-?\d+)\|([cg])")


class StatsdServer:
    """The other end: keeps datagrams and when they came."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.socket.getsockname()[1]}"
        self.datagrams: list[tuple[float, bytes]] = []

    def receive_until(self, mark: bytes, timeout_s: float = PATIENCE_S) -> list[bytes]:
        """The datagrams up to the one with ``mark`` in it."""
        deadline = time.monotonic() + timeout_s
        received = []
        while True:
            self.socket.settimeout(max(0.001, deadline - time.monotonic()))
            datagram = self.socket.recv(65536)
            self.datagrams.append((time.monotonic(), datagram))
            received.append(datagram)
            if mark in datagram:
                return received

    def report(self, timeout_s: float = PATIENCE_S) -> dict[str, tuple[int, str]]:
        """The metrics of one report, by name: value and kind; it ends with ``mem.gc_runs``."""
        text = b"".join(self.receive_until(b".mem.gc_runs:", timeout_s)).decode()
        metrics = {}
        for line in text.splitlines():
            found = _LINE.fullmatch(line)
            assert found, line
            metrics[found[1]] = (int(found[2]), found[3])
        return metrics


@pytest.fixture
def statsd() -> Iterator[StatsdServer]:
    """Named before ``daemons``, so that it ends behind them: they would report to whoever has the port next."""
    server = StatsdServer()
    yield server
    server.socket.close()


def start(daemons: Daemons, statsd: StatsdServer, *flags: str) -> Nsqd:
    return daemons.nsqd("--durability=os", f"--statsd-address={statsd.address}", "--statsd-interval=300ms", *flags)


def test_reports_have_every_metric_and_counters_are_deltas(statsd: StatsdServer, daemons: Daemons):
    nsqd = start(daemons, statsd, "--e2e-processing-latency-percentile=0.95,0.999")
    nsqd.publish("t", b"12345", b"678")
    prefix = f"nsq.127_0_0_1_{nsqd.http[1]}"
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 2)
        first, second = consumer.messages(2)
        consumer.send(b"RDY 0\n")
        consumer.send(b"REQ %s 0\n" % second.id)
        consumer.finish(first)
        consumer.settle("other")
        counted: dict[str, int] = {}

        def seen() -> bool:
            metrics = statsd.report()
            for name, (value, kind) in metrics.items():
                counted[name] = counted.get(name, 0) + value if kind == "c" else value
            return counted.get(f"{prefix}.topic.t.channel.c.requeue_count") == 1

        wait_until(seen, "the report after REQ")
    expected = {
        "topic.t.message_count": 2,
        "topic.t.message_bytes": 8,
        "topic.t.depth": 0,
        "topic.t.channel.c.message_count": 2,
        "topic.t.channel.c.depth": 1,
        "topic.t.channel.c.in_flight_count": 0,
        "topic.t.channel.c.deferred_count": 0,
        "topic.t.channel.c.requeue_count": 1,
        "topic.t.channel.c.timeout_count": 0,
        "topic.t.channel.c.clients": 1,
        "topic.other.message_count": 1,
        "topic.other.depth": 1,
    }
    assert {name: counted[f"{prefix}.{name}"] for name in expected} == expected
    for name in ("95", "99_9"):
        latency = counted[f"{prefix}.topic.t.channel.c.e2e_processing_latency_{name}"]
        assert 0 < latency < PATIENCE_S * 1e9
        assert counted[f"{prefix}.topic.t.e2e_processing_latency_{name}"] == latency
    assert counted[f"{prefix}.mem.heap_in_use_bytes"] > 1_000_000
    again = statsd.report()
    assert again[f"{prefix}.topic.t.message_count"] == (0, "c")
    assert {name for name, (_, kind) in again.items() if kind == "c"} == {
        name for name in again if name.endswith(("message_count", "message_bytes", "requeue_count", "timeout_count"))
    } | {f"{prefix}.mem.gc_runs"}


def test_flags_shape_the_report(statsd: StatsdServer, daemons: Daemons):
    nsqd = start(
        daemons,
        statsd,
        "--statsd-prefix=my/%s/",
        "--statsd-mem-stats=false",
        "--statsd-exclude-ephemeral",
        "--statsd-udp-packet-size=100",
    )
    for topic in ("a#ephemeral", "b", "z"):
        nsqd.post(f"/topic/create?topic={topic}")
    datagrams = statsd.receive_until(b"topic.z.backend_depth:") + statsd.receive_until(b"topic.z.backend_depth:")
    assert all(len(datagram) <= 100 and datagram.endswith(b"\n") for datagram in datagrams)
    text = b"".join(datagrams).decode()
    assert "ephemeral" not in text and "mem." not in text
    key = f"my/127_0_0_1_{nsqd.http[1]}/."
    assert f"{key}topic.b.message_count:0|c\n{key}topic.b.message_bytes:0|c\n{key}topic.b.depth:0|g\n" in text


def test_a_report_is_spread_over_the_interval_and_sent_whole_at_the_end(statsd: StatsdServer, daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os", f"--statsd-address={statsd.address}", "--statsd-interval=3s")
    for number in range(8):
        nsqd.post(f"/topic/create?topic={'t' * 50}{number}")
    spreads = []
    for _ in range(5):  # a busy machine draws some of them out
        statsd.datagrams.clear()
        statsd.report()
        times = [at for at, _ in statsd.datagrams]
        assert len(times) >= 4
        # of 3 s one is kept free; the last datagram has a pause behind it
        spreads.append(times[-1] - times[0] if len(times) >= 4 else 0.0)
        assert 2.0 * (len(times) - 1) / len(times) * 0.7 < spreads[-1], "not in one piece"
        if spreads[-1] < 2.5:
            break
    assert min(spreads) < 2.5, spreads
    statsd.receive_until(b"message_count")  # the next report has begun
    nsqd.stop()
    statsd.report(0.1)  # all of it was sent before the process ended


def test_a_daemon_that_is_not_there_hurts_nobody(daemons: Daemons):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.connect(taken.getsockname())  # nobody else has the port meanwhile, and nsqd's datagrams are refused
        closed = taken.getsockname()[1]
        nsqd = daemons.nsqd("--durability=os", f"--statsd-address=127.0.0.1:{closed}", "--statsd-interval=50ms")
        wait_until(lambda: "statsd 127.0.0.1" in nsqd.log, "the warning")
        time.sleep(0.3)
        nsqd.publish("t", b"x")
        assert nsqd.log.count("WARNING: statsd") == 1, "said once"
        nsqd.stop()


def test_a_name_that_cannot_be_looked_up_hurts_nobody(daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os", "--statsd-address=no.such.host.invalid:8125", "--statsd-interval=50ms")
    wait_until(lambda: "WARNING: statsd no.such.host.invalid:8125" in nsqd.log, "the warning")
    nsqd.publish("t", b"x")
    nsqd.stop()
