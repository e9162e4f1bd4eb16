"""statsd: the very lines, counters from report to report, and how lines are packed into datagrams."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.nsqd.figures.collection import ChannelFigures, TopicFigures
from flintmq.nsqd.figures.latencies import Latency
from flintmq.nsqd.figures.statsd import Lines, datagrams, percentile_name
from flintmq.nsqd.identity import prefix_of
from flintmq.topic_meta import PLAIN

MEMORY = {
    "heap_objects": 1,
    "heap_idle_bytes": 2,
    "heap_in_use_bytes": 3,
    "heap_released_bytes": 4,
    "gc_pause_usec_100": 5,
    "gc_pause_usec_99": 6,
    "gc_pause_usec_95": 7,
    "next_gc_bytes": 8,
    "gc_total_runs": 9,
}


def channel_figures(name="c", **changed):
    figures: dict[str, Any] = {
        "depth": 4,
        "backend_depth": 3,
        "in_flight_count": 2,
        "deferred_count": 1,
        "message_count": 10,
        "requeue_count": 5,
        "timeout_count": 6,
        "finish_count": 8,
        "filtered_count": 9,
        "deliveries": {},
        "limits": {},
        "paused": False,
        "skipped": False,
        "latency": Latency(),
        "clients": [None] * 7,
        "parts": [],
    }
    return ChannelFigures(name, **(figures | changed))


def topic_figures(name="t", *channels, **changed):
    figures: dict[str, Any] = {
        "depth": 2,
        "backend_depth": 1,
        "message_count": 20,
        "message_bytes": 400,
        "log_bytes": 500,
        "limits": {},
        "paused": False,
        "latency": Latency(),
        "meta": PLAIN,
        "partitions": [],
    }
    return TopicFigures(name, channels=channels, **(figures | changed))


def test_every_line():
    latency = Latency(1, [(0.999, 1_500), (0.5, 12)])
    topic = topic_figures("t", channel_figures("c", latency=latency), latency=latency)
    lines = Lines("nsq.h_4151.", False).report([topic], MEMORY)
    assert b"".join(lines).decode() == (
        "nsq.h_4151.topic.t.message_count:20|c\n"
        "nsq.h_4151.topic.t.message_bytes:400|c\n"
        "nsq.h_4151.topic.t.depth:2|g\n"
        "nsq.h_4151.topic.t.backend_depth:1|g\n"
        "nsq.h_4151.topic.t.e2e_processing_latency_99_9:1500|g\n"
        "nsq.h_4151.topic.t.e2e_processing_latency_50:12|g\n"
        "nsq.h_4151.topic.t.channel.c.message_count:10|c\n"
        "nsq.h_4151.topic.t.channel.c.depth:4|g\n"
        "nsq.h_4151.topic.t.channel.c.backend_depth:3|g\n"
        "nsq.h_4151.topic.t.channel.c.in_flight_count:2|g\n"
        "nsq.h_4151.topic.t.channel.c.deferred_count:1|g\n"
        "nsq.h_4151.topic.t.channel.c.requeue_count:5|c\n"
        "nsq.h_4151.topic.t.channel.c.timeout_count:6|c\n"
        "nsq.h_4151.topic.t.channel.c.clients:7|g\n"
        "nsq.h_4151.topic.t.channel.c.e2e_processing_latency_99_9:1500|g\n"
        "nsq.h_4151.topic.t.channel.c.e2e_processing_latency_50:12|g\n"
        "nsq.h_4151.mem.heap_objects:1|g\n"
        "nsq.h_4151.mem.heap_idle_bytes:2|g\n"
        "nsq.h_4151.mem.heap_in_use_bytes:3|g\n"
        "nsq.h_4151.mem.heap_released_bytes:4|g\n"
        "nsq.h_4151.mem.gc_pause_usec_100:5|g\n"
        "nsq.h_4151.mem.gc_pause_usec_99:6|g\n"
        "nsq.h_4151.mem.gc_pause_usec_95:7|g\n"
        "nsq.h_4151.mem.next_gc_bytes:8|g\n"
        "nsq.h_4151.mem.gc_runs:9|c\n"
    )


def test_counters_are_what_was_added_since_the_last_report():
    lines = Lines("", False)
    lines.report([topic_figures("t", channel_figures())], MEMORY)
    second = lines.report([topic_figures("t", channel_figures(message_count=11), message_count=25)], MEMORY)
    assert b"topic.t.message_count:5|c\n" in second
    assert b"topic.t.message_bytes:0|c\n" in second
    assert b"topic.t.channel.c.message_count:1|c\n" in second
    assert b"topic.t.depth:2|g\n" in second
    assert b"mem.gc_runs:0|c\n" in second
    fresh = lines.report([topic_figures(message_count=3)], None)  # deleted and made again
    assert b"topic.t.message_count:3|c\n" in fresh
    assert not any(b".channel." in line or b"mem." in line for line in fresh)
    lines.report([], None)
    assert b"topic.t.message_count:3|c\n" in lines.report([topic_figures(message_count=3)], None)


def test_ephemeral_names_pass_unless_they_are_left_out():
    rows = [
        topic_figures("t", channel_figures("c"), channel_figures("e#ephemeral")),
        topic_figures("f#ephemeral", channel_figures()),
    ]
    everything = b"".join(Lines("", False).report(rows, None))
    assert b"topic.t.channel.e#ephemeral.depth" in everything and b"topic.f#ephemeral.channel.c.depth" in everything
    assert b"ephemeral" not in b"".join(Lines("", True).report(rows, None))
    assert b"topic.t.channel.c.depth" in b"".join(Lines("", True).report(rows, None))


@pytest.mark.parametrize(
    ("template", "host", "port", "prefix"),
    [
        ("nsq.%s", "127.0.0.1", 4151, "nsq.127_0_0_1_4151."),
        ("nsq.%s.", "h.example.org", 80, "nsq.h_example_org_80."),
        ("%s/%s", "h", 1, "h_1/h_1."),
        ("plain", "h", 1, "plain."),
        ("", "h", 1, ""),
        ("%s", "::1", 4151, "[__1]_4151."),
    ],
)
def test_prefix(template, host, port, prefix):
    assert prefix_of(template, host, port) == prefix


@pytest.mark.parametrize(
    ("quantile", "name"),
    [(0.99, "99"), (0.95, "95"), (1.0, "100"), (0.5, "50"), (0.999, "99_9"), (0.9999, "99_99"), (0.07, "7")],
)
def test_percentile_names(quantile, name):
    assert percentile_name(quantile) == name


@given(st.lists(st.integers(1, 40)), st.integers(1, 60))
def test_datagrams_hold_whole_lines_in_order(sizes, size_max):
    lines = [b"x" * (size - 1) + b"\n" for size in sizes]
    packets = list(datagrams(lines, size_max))
    assert b"".join(packets) == b"".join(lines)
    assert all(len(packet) <= size_max or packet.count(b"\n") == 1 for packet in packets)
    assert all(packet.endswith(b"\n") for packet in packets)
    for packet, following in pairwise(packets):
        assert len(packet) + len(following.split(b"\n")[0]) + 1 > size_max, "a line that would have fitted"
