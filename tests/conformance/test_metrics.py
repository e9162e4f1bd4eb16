"""/metrics of nsqd for Prometheus: what /stats tells, under names with units. NSQ has none (nsqio/nsq#732)."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.conformance.conftest import quick_flags
from tests.conformance.http_helpers import assert_refused
from tests.integration.daemons import Daemons, Nsqd, pub, wait_until

pytestmark = pytest.mark.improvement  # upstream answers 404

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]
PREFIX = "flintmq_nsqd_"


def samples_of(text: str) -> Samples:
    """Values by name and labels."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def labels(**names: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(names.items()))


class Scene:
    """Topic ``t``, 5 messages: on ``c`` 1 finished, 1 deferred, 1 in flight, 2 waiting; ``idle`` is paused."""

    def __init__(self, nsqd: Nsqd, consumer, producer) -> None:
        self.nsqd = nsqd
        nsqd.post("/topic/create?topic=t")
        nsqd.post("/channel/create?topic=t&channel=idle")
        nsqd.post("/channel/pause?topic=t&channel=idle")
        consumer.subscribe("t", "c", 3)
        producer.ok(pub("t", b"12345") * 5, 5)
        first, second, _ = consumer.messages(3)
        consumer.rdy(0)
        consumer.finish(first)
        consumer.send(b"REQ %s 60000\n" % second.id)
        nsqd.publish("waiting", b"1", b"22")
        nsqd.post("/topic/create?topic=paused")
        nsqd.post("/topic/pause?topic=paused")
        wait_until(lambda: nsqd.stats("t", "c")["deferred_count"] == 1)
        self.answer = nsqd.request("GET", "/metrics")
        self.samples = samples_of(self.answer.text)


@pytest.fixture(scope="module")
def scene(shared_daemons: Daemons) -> Iterator[Scene]:
    nsqd = shared_daemons.nsqd(*quick_flags(), "--e2e-processing-latency-percentile=0.999,0.5")
    with nsqd.connect() as consumer, nsqd.connect() as producer:
        yield Scene(nsqd, consumer, producer)


def test_its_type_is_the_text_format(scene: Scene):
    assert scene.answer.status == 200
    assert scene.answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_every_metric_has_help_and_type_before_its_samples(scene: Scene):
    helped: set[str] = set()
    typed: dict[str, str] = {}
    for line in scene.answer.text.splitlines():
        words = line.split(" ")
        if words[:2] == ["#", "HELP"]:
            helped.add(words[2])
        elif words[:2] == ["#", "TYPE"]:
            assert words[3] in ("gauge", "counter", "summary")
            assert words[2].endswith("_total") == (words[3] == "counter")
            typed[words[2]] = words[3]
        else:
            name = words[0].partition("{")[0]
            assert name in helped and name in typed
            assert ('quantile="' in line) == (typed[name] == "summary"), "that label is for summaries alone"


def test_it_is_a_get(scene: Scene):
    answer = scene.nsqd.request("POST", "/metrics")
    assert_refused(answer, 405, "METHOD_NOT_ALLOWED")
    assert answer.headers["Allow"] == "GET, OPTIONS"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("healthy", 1),
        ("connections", 2),
        ("topics", 3),
        ("channels", 2),
        ("rows_left_out", 0),
        ("damaged_stretches_total", 0),
    ],
)
def test_the_daemon(scene: Scene, name: str, value: float):
    assert scene.samples[PREFIX + name] == {(): value}


def test_build_info_says_what_runs(scene: Scene):
    ((shown, value),) = scene.samples[f"{PREFIX}build_info"].items()
    assert value == 1 and {"version", "durability"} <= set(dict(shown))


def test_start_time_is_in_seconds(scene: Scene):
    assert abs(scene.samples[f"{PREFIX}start_time_seconds"][()] - time.time()) < 120


@pytest.mark.parametrize(
    ("name", "topic", "value"),
    [
        ("topic_depth", "t", 0),
        ("topic_depth", "waiting", 2),
        ("topic_messages_total", "t", 5),
        ("topic_messages_total", "waiting", 2),
        ("topic_message_bytes_total", "t", 25),
        ("topic_message_bytes_total", "waiting", 3),
        ("topic_paused", "t", 0),
        ("topic_paused", "paused", 1),
    ],
)
def test_a_topic(scene: Scene, name: str, topic: str, value: float):
    assert scene.samples[PREFIX + name][labels(topic=topic)] == value


def test_the_size_of_a_log_is_in_bytes(scene: Scene):
    sizes = scene.samples[f"{PREFIX}topic_log_bytes"]
    assert sizes[labels(topic="t")] > 25


@pytest.mark.parametrize(
    ("name", "channel", "value"),
    [
        ("channel_depth", "c", 2),
        ("channel_depth", "idle", 5),
        ("channel_in_flight", "c", 1),
        ("channel_deferred", "c", 1),
        ("channel_messages_total", "c", 5),
        ("channel_finished_total", "c", 1),
        ("channel_requeued_total", "c", 1),
        ("channel_timed_out_total", "c", 0),
        ("channel_clients", "c", 1),
        ("channel_clients", "idle", 0),
        ("channel_paused", "c", 0),
        ("channel_paused", "idle", 1),
    ],
)
def test_a_channel(scene: Scene, name: str, channel: str, value: float):
    assert scene.samples[PREFIX + name][labels(topic="t", channel=channel)] == value


@pytest.mark.parametrize("quantile", ["0.999", "0.5"])
def test_latency_is_in_seconds(scene: Scene, quantile: str):
    channel = scene.samples[f"{PREFIX}channel_e2e_latency_seconds"][labels(topic="t", channel="c", quantile=quantile)]
    assert 0 < channel < 60
    assert scene.samples[f"{PREFIX}topic_e2e_latency_seconds"][labels(topic="t", quantile=quantile)] == channel


def test_a_topic_without_channels_has_no_latency(scene: Scene, topic: str):
    scene.nsqd.publish(topic, b"x")
    samples = samples_of(scene.nsqd.request("GET", "/metrics").text)
    assert labels(topic=topic) in samples[f"{PREFIX}topic_depth"]
    assert labels(topic=topic, quantile="0.5") not in samples[f"{PREFIX}topic_e2e_latency_seconds"]


def test_without_percentiles_there_is_no_latency(nsqd: Nsqd, topic: str):
    nsqd.post(f"/topic/create?topic={topic}")
    assert "latency" not in nsqd.request("GET", "/metrics").text


@pytest.mark.parametrize(
    "name", ["process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds", "process_max_fds"]
)
def test_the_process(scene: Scene, name: str):
    assert scene.samples[name][()] > 0


def test_nsqlookupds_are_shown(shared_daemons: Daemons):
    lookupd = shared_daemons.nsqlookupd()
    up = f"127.0.0.1:{lookupd.tcp[1]}"
    nsqd = shared_daemons.nsqd(*quick_flags(), f"--lookupd-tcp-address={up},127.0.0.1:1")
    expected = {labels(address=up): 1.0, labels(address="127.0.0.1:1"): 0.0}

    def shown() -> dict[tuple[tuple[str, str], ...], float]:
        return samples_of(nsqd.request("GET", "/metrics").text)[f"{PREFIX}nsqlookupd_connected"]

    wait_until(lambda: shown() == expected)
    nsqd.discard()


def test_names_of_ephemeral_topics_are_labels_as_they_are(nsqd: Nsqd, topic: str):
    nsqd.post(f"/topic/create?topic={topic}%23ephemeral")
    assert f'{PREFIX}topic_depth{{topic="{topic}#ephemeral"}} 0\n' in nsqd.request("GET", "/metrics").text
