"""statsd lines of nsqd, byte for byte, as they come at the other end of the UDP socket (NSQ's statsd)."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.conformance.conftest import is_ours, quick_flags
from tests.integration.daemons import PATIENCE_S, Daemons, Nsqd, a_few_times, wait_until

INTERVAL = "100ms" if is_ours("nsqd") else "1100ms"  # Go's ticker panics below a second
LINE = re.compile(rb"([^\n]*?):(-?\d+)\|([cg])\n")
REPORTS_MAX = 5000
TOPIC = [("message_count", "c"), ("message_bytes", "c"), ("depth", "g"), ("backend_depth", "g")]
CHANNEL = [
    ("message_count", "c"),
    ("depth", "g"),
    ("backend_depth", "g"),
    ("in_flight_count", "g"),
    ("deferred_count", "g"),
    ("requeue_count", "c"),
    ("timeout_count", "c"),
    ("clients", "g"),
]
MEMORY = [
    ("mem.heap_objects", "g"),
    ("mem.heap_idle_bytes", "g"),
    ("mem.heap_in_use_bytes", "g"),
    ("mem.heap_released_bytes", "g"),
    ("mem.gc_pause_usec_100", "g"),
    ("mem.gc_pause_usec_99", "g"),
    ("mem.gc_pause_usec_95", "g"),
    ("mem.next_gc_bytes", "g"),
    ("mem.gc_runs", "c"),
]
Report = list[tuple[str, int, str]]  # name, value, kind, in the order they came


Datagrams = list[tuple[float, bytes]]  # when they came, and what was in them


class StatsdServer:
    """Keeps every datagram and when it came.

    Args:
        last: what the last line of a report starts with, behind the prefix.
    """

    def __init__(self, last: str = "mem.gc_runs:") -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._last = last.encode()
        self.current: Datagrams = []
        self.reports: list[Datagrams] = []
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        while len(self.reports) < REPORTS_MAX and (data := self._socket.recv(65536)):
            with self._more:
                self.current.append((time.monotonic(), data))
                if self._last in data:
                    self.reports.append(self.current)
                    self.current = []
                    self._more.notify_all()

    def close(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
            host, _, port = self.address.partition(":")
            end.sendto(b"", (host, int(port)))
        self._thread.join()
        self._socket.close()

    def report(self, number: int) -> Datagrams:
        """A report by its number; it is waited for."""
        with self._more:
            assert self._more.wait_for(lambda: len(self.reports) > number, PATIENCE_S), "no report"
            return self.reports[number]

    def fresh(self) -> Datagrams:
        """A report that was made after this call began."""
        return self.report(len(self.reports) + 1)


def read(report: Datagrams) -> Report:
    """The lines of a report."""
    text = b"".join(data for _, data in report)
    found = [(name.decode(), int(value), kind.decode()) for name, value, kind in LINE.findall(text)]
    assert b"".join(b"%b:%d|%b\n" % (n.encode(), v, k.encode()) for n, v, k in found) == text, "not a line"
    return found


class Watched:
    """An nsqd that reports, and what it reports."""

    def __init__(self, nsqd: Nsqd, server: StatsdServer, prefix: str | None = None) -> None:
        self.nsqd = nsqd
        self.server = server
        self.prefix = f"nsq.127_0_0_1_{nsqd.http[1]}." if prefix is None else prefix

    def report(self) -> Report:
        """A fresh report, names without their prefix."""
        report = read(self.server.fresh())
        assert all(name.startswith(self.prefix) for name, _, _ in report), report[:3]
        return [(name.removeprefix(self.prefix), value, kind) for name, value, kind in report]

    def values(self) -> dict[str, int]:
        return {name: value for name, value, _ in self.report()}

    def sums(self) -> dict[str, int]:
        """Counters added up over all reports, a fresh one included."""
        self.server.fresh()
        sums: dict[str, int] = {}
        for report in list(self.server.reports):
            for name, value, kind in read(report):
                if kind == "c":
                    name = name.removeprefix(self.prefix)
                    sums[name] = sums.get(name, 0) + value
        return sums


@pytest.fixture(scope="module")
def watch(shared_daemons: Daemons) -> Iterator[Callable[..., Watched]]:
    """Starts an nsqd that reports, with further flags."""
    all_watched: list[Watched] = []

    def start(*flags: str, prefix: str | None = None, interval: str = INTERVAL, last: str = "mem.gc_runs:") -> Watched:
        server = StatsdServer(last)
        address = (f"--statsd-address={server.address}", f"--statsd-interval={interval}")
        all_watched.append(Watched(shared_daemons.nsqd(*quick_flags(), *address, *flags), server, prefix))
        return all_watched[-1]

    yield start
    for watched in all_watched:
        watched.nsqd.discard()  # it would go on reporting to whoever has the port next
        watched.server.close()


@pytest.fixture(scope="module")
def watched(watch: Callable[..., Watched]) -> Watched:
    """An nsqd with some traffic: 3 published, 1 finished, 1 deferred, 1 in flight, and a channel without consumers."""
    watched = watch("--mem-queue-size=0")
    nsqd = watched.nsqd
    nsqd.post("/topic/create?topic=t.with-points_")
    nsqd.post("/channel/create?topic=t.with-points_&channel=unread")
    nsqd.post("/topic/create?topic=short%23ephemeral")
    nsqd.post("/channel/create?topic=short%23ephemeral&channel=c%23ephemeral")
    nsqd.publish("waiting", b"1", b"22")
    consumer = nsqd.connect()
    consumer.subscribe("t.with-points_", "c", 3)
    nsqd.publish("t.with-points_", b"12345", b"12345", b"678")
    first, second, _ = consumer.messages(3)
    consumer.rdy(0)
    consumer.finish(first)
    consumer.send(b"REQ %s 60000\n" % second.id)
    consumer.settle("waiting")
    watched.consumer = consumer  # type: ignore[attr-defined]  # stays open as long as it is watched
    return watched


@pytest.fixture(scope="module")
def pair(watched: Watched) -> list[dict[str, int]]:
    """Two reports while nothing happens."""
    return [watched.values(), watched.values()]


@pytest.fixture(scope="module")
def sums(watched: Watched) -> dict[str, int]:
    """The counters, added up until nothing happens any more."""
    return watched.sums()


# -- names and kinds ---------------------------------------------------------------------------------------------------


def test_a_line_is_name_value_kind_newline(watched: Watched):
    for _, datagram in watched.server.fresh():
        assert re.fullmatch(rb"(nsq\.127_0_0_1_\d+\.[!-9;-~]+:-?\d+\|[cg]\n)+", datagram)


def test_a_report_has_these_lines_in_this_order(watched: Watched):
    expected: list[tuple[str, str]] = []
    for topic, channels in (("short#ephemeral", ["c#ephemeral"]), ("t.with-points_", ["c", "unread"]), ("waiting", [])):
        expected += [(f"topic.{topic}.{name}", kind) for name, kind in TOPIC]
        for channel in channels:
            expected += [(f"topic.{topic}.channel.{channel}.{name}", kind) for name, kind in CHANNEL]
    assert [(name, kind) for name, _, kind in watched.report()] == expected + MEMORY


def test_names_are_not_sanitised(watched: Watched):
    assert "topic.short#ephemeral.channel.c#ephemeral.depth" in watched.values()


def test_no_names_of_percentiles_without_percentiles(watched: Watched):
    assert not any("e2e" in name for name in watched.values())


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("topic.waiting.depth", 3),
        ("topic.waiting.backend_depth", 3),
        ("topic.t.with-points_.depth", 0),
        ("topic.t.with-points_.channel.c.depth", 0),
        ("topic.t.with-points_.channel.c.in_flight_count", 1),
        ("topic.t.with-points_.channel.c.deferred_count", 1),
        ("topic.t.with-points_.channel.c.clients", 1),
        ("topic.t.with-points_.channel.unread.depth", 3),
        ("topic.t.with-points_.channel.unread.backend_depth", 3),
        ("topic.t.with-points_.channel.unread.clients", 0),
    ],
)
def test_a_gauge_is_the_present_value_every_time(pair: list[dict[str, int]], name: str, value: int):
    assert [report[name] for report in pair] == [value, value]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("topic.waiting.message_count", 3),
        ("topic.waiting.message_bytes", 4),
        ("topic.t.with-points_.message_count", 3),
        ("topic.t.with-points_.message_bytes", 13),
        ("topic.t.with-points_.channel.c.message_count", 3),
        ("topic.t.with-points_.channel.c.requeue_count", 1),
        ("topic.t.with-points_.channel.c.timeout_count", 0),
        ("topic.t.with-points_.channel.unread.message_count", 3),
    ],
)
def test_counters_add_up_to_the_count(sums: dict[str, int], name: str, value: int):
    assert sums[name] == value


def test_a_counter_is_0_when_nothing_happened(watched: Watched):
    report = watched.report()
    assert {value for name, value, kind in report if kind == "c" and name.startswith("topic.")} == {0}


def test_a_counter_is_what_was_added_since_the_last_report(watched: Watched):
    before = watched.sums()["topic.waiting.message_count"]
    watched.nsqd.publish("waiting", b"1", b"2", b"3")
    assert watched.sums()["topic.waiting.message_count"] == before + 3
    watched.nsqd.post("/topic/empty?topic=waiting")
    assert watched.values()["topic.waiting.depth"] == 0
    watched.nsqd.publish("waiting", b"1", b"2", b"3")


def test_timeouts_are_counted(watched: Watched):
    with watched.nsqd.connect() as consumer:
        consumer.identify(msg_timeout=1000)
        consumer.subscribe("slow", "c", 1)
        watched.nsqd.publish("slow", b"x")
        consumer.message()
        consumer.rdy(0)
        wait_until(lambda: watched.nsqd.stats("slow", "c")["timeout_count"] == 1)
    assert watched.sums()["topic.slow.channel.c.timeout_count"] == 1
    watched.nsqd.post("/topic/delete?topic=slow")


def test_what_was_deleted_is_not_reported(watched: Watched):
    watched.nsqd.post("/topic/create?topic=gone")
    assert "topic.gone.depth" in watched.values()
    watched.nsqd.post("/topic/delete?topic=gone")
    assert "topic.gone.depth" not in watched.values()


@pytest.mark.parametrize("name", ["mem.heap_objects", "mem.heap_in_use_bytes"])
def test_memory_is_reported(pair: list[dict[str, int]], name: str):
    assert pair[0][name] > 1000


def test_the_first_report_has_the_whole_count(watch: Callable[..., Watched]):
    watched = watch(interval="1100ms")
    watched.nsqd.publish("t", b"x", b"y")
    first = {name.removeprefix(watched.prefix): value for name, value, _ in read(watched.server.report(0))}
    assert first["topic.t.message_count"] == 2
    watched.nsqd.discard()


# -- prefix ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "prefix"),
    [
        pytest.param(["--statsd-prefix=my.%s.nsqd"], "my.127_0_0_1_PORT.nsqd.", id="a point is added"),
        pytest.param(["--statsd-prefix=my.%s."], "my.127_0_0_1_PORT.", id="a point is not doubled"),
        pytest.param(["--statsd-prefix=plain"], "plain.", id="the host is not needed"),
        pytest.param(["--statsd-prefix="], "", id="nothing"),
        pytest.param(
            ["--broadcast-address=a.b.example", "--broadcast-http-port=80"], "nsq.a_b_example_80.", id="broadcast"
        ),
    ],
)
def test_prefix(watch: Callable[..., Watched], flags: list[str], prefix: str):
    watched = watch(*flags)
    watched.prefix = prefix.replace("PORT", str(watched.nsqd.http[1]))
    names = [name for name, _, _ in read(watched.server.report(0))]
    assert names == [watched.prefix + name for name, _ in MEMORY]
    watched.nsqd.discard()


# -- flags -------------------------------------------------------------------------------------------------------------


def test_without_memory_and_ephemeral_ones(watch: Callable[..., Watched]):
    watched = watch("--statsd-mem-stats=false", "--statsd-exclude-ephemeral", last="topic.z.backend_depth:")
    for query in ("topic=a%23ephemeral", "topic=b", "topic=z"):
        watched.nsqd.post(f"/topic/create?{query}")
    watched.nsqd.post("/channel/create?topic=b&channel=c%23ephemeral")
    watched.nsqd.post("/channel/create?topic=b&channel=d")
    names = [name for name, _, _ in watched.report()]
    channel = [f"topic.b.channel.d.{name}" for name, _ in CHANNEL]
    assert names == [f"topic.b.{name}" for name, _ in TOPIC] + channel + [f"topic.z.{name}" for name, _ in TOPIC]
    watched.nsqd.discard()


def percentile_names(watch: Callable[..., Watched], percentiles: str) -> list[str]:
    """What follows ``e2e_processing_latency`` in a report, in its order."""
    flags = (f"--e2e-processing-latency-percentile={percentiles}", "--statsd-mem-stats=false")
    watched = watch(*flags, last="topic.t.channel.c.e2e_processing_latency_50:")
    watched.nsqd.post("/topic/create?topic=t")
    watched.nsqd.post("/channel/create?topic=t&channel=c")
    lines = [line for line in watched.report() if "e2e" in line[0]]
    watched.nsqd.discard()
    assert {(value, kind) for _, value, kind in lines} == {(0, "g")}
    of_topic, of_channel = (
        [name.removeprefix(key) for name, _, _ in lines if name.startswith(key)]
        for key in ("topic.t.e2e_processing_latency", "topic.t.channel.c.e2e_processing_latency")
    )
    assert of_topic == of_channel
    return of_topic


def test_a_topic_without_channels_has_no_percentiles(watch: Callable[..., Watched]):
    flags = ("--e2e-processing-latency-percentile=0.99,0.5", "--statsd-mem-stats=false")
    watched = watch(*flags, last="topic.t.backend_depth:")
    watched.nsqd.post("/topic/create?topic=t")
    names = [name for name, _, _ in watched.report()]
    watched.nsqd.discard()
    assert sorted(names) == sorted(f"topic.t.{name}" for name, _ in TOPIC)


def test_percentiles_have_their_names(watch: Callable[..., Watched]):
    assert percentile_names(watch, "1.0,0.99,0.95,0.5") == ["_100", "_99", "_95", "_50"]


@pytest.mark.improvement
def test_percentiles_between_have_their_own_names(watch: Callable[..., Watched]):
    """Upstream rounds: 0.999 is _100 as 1.0 is (defect 7 of section 6)."""
    assert percentile_names(watch, "0.999,0.975,0.5") == ["_99_9", "_97_5", "_50"]


def test_percentiles_are_reported_for_topic_and_channel_in_ns(watch: Callable[..., Watched]):
    watched = watch("--e2e-processing-latency-percentile=0.5")
    with watched.nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 1)
        watched.nsqd.publish("t", b"x")
        message = consumer.message()
        time.sleep(0.1)
        consumer.finish(message)
        consumer.settle("other")
        values = watched.values()
    latency = values["topic.t.channel.c.e2e_processing_latency_50"]
    assert 100_000_000 <= latency < 10_000_000_000
    assert values["topic.t.e2e_processing_latency_50"] == latency
    names = list(values)
    assert names.index("topic.t.e2e_processing_latency_50") == names.index("topic.t.backend_depth") + 1
    clients_at = names.index("topic.t.channel.c.clients")
    assert names.index("topic.t.channel.c.e2e_processing_latency_50") == clients_at + 1
    watched.nsqd.discard()


# -- datagrams ---------------------------------------------------------------------------------------------------------


def test_datagrams_are_at_most_508_bytes_and_well_filled(watched: Watched):
    sizes = [len(data) for _, data in watched.server.fresh()]
    assert max(sizes) <= 508
    longest = max(len(line) for _, data in watched.server.fresh() for line in data.splitlines(keepends=True))
    assert all(size > 508 - longest for size in sizes[:-1])


def test_lines_are_not_split(watched: Watched):
    assert all(data.endswith(b"\n") for _, data in watched.server.fresh())


def test_the_size_of_datagrams_can_be_set_and_longer_lines_go_alone(watch: Callable[..., Watched]):
    watched = watch("--statsd-udp-packet-size=90")
    watched.nsqd.post(f"/topic/create?topic={'n' * 64}")
    report = watched.server.fresh()
    for _, data in report:
        assert data.endswith(b"\n")
        assert len(data) <= 90 or data.count(b"\n") == 1
    assert any(data.count(b"\n") > 1 for _, data in report)
    assert any(len(data) > 90 for _, data in report)
    watched.nsqd.discard()


def test_datagrams_are_spread_over_the_interval_less_a_second(watch: Callable[..., Watched]):
    watched = watch("--statsd-udp-packet-size=90", interval="1400ms")
    for number in range(4):
        watched.nsqd.post(f"/topic/create?topic={'t' * 30}{number}")

    def look(number: int) -> None:
        times = [at for at, _ in watched.server.report(number)]
        assert len(times) >= 10
        assert 0.2 < times[-1] - times[0] < 0.8

    a_few_times(look)
    watched.nsqd.discard()


def test_nothing_is_sent_before_the_first_interval_has_passed(watch: Callable[..., Watched]):
    watched = watch(interval="1h")
    watched.nsqd.publish("t", b"x")
    assert not watched.server.reports and not watched.server.current
    watched.nsqd.discard()
