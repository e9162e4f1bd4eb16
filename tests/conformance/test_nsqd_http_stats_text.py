"""/stats of nsqd as text, line by line with the width of every column (NSQ's HTTP API)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime

import pytest
from tests.conformance.conftest import quick_flags
from tests.conformance.http_helpers import MEMORY, assert_text
from tests.integration.daemons import Daemons, Nsqd, mpub, wait_until

TOPICS_AT = 17  # the line of "Topics:", behind the head and the memory
LONG = "n" * 64
HOST = "a-host-with-a-long-name.example.com"


def lines_of(nsqd: Nsqd, query: str = "") -> list[str]:
    answer = nsqd.request("GET", f"/stats?{query}")
    assert answer.status == 200
    return answer.text.split("\n")


class Scene:
    """An nsqd with a paused topic, names of all lengths, consumers and a producer, and its /stats."""

    def __init__(self, nsqd: Nsqd, consumer, plain, producer) -> None:
        self.nsqd = nsqd
        for topic, channel in (("paused", "other"), ("paused", "paused"), (LONG, LONG), ("t", "idle")):
            nsqd.post(f"/topic/create?topic={topic}")
            nsqd.post(f"/channel/create?topic={topic}&channel={channel}")
        consumer.identify(client_id="id", hostname="h", user_agent="ua/1")
        consumer.subscribe("t", "c", 3)
        producer.identify(client_id="p", hostname=HOST, user_agent="")
        producer.ok(mpub("t", [b"12345"] * 7))
        first, second, _ = consumer.messages(3)
        consumer.rdy(0)
        consumer.finish(first)
        consumer.send(b"REQ %s 60000\n" % second.id)
        consumer.settle("t")
        plain.subscribe("t", "idle")
        nsqd.post("/topic/pause?topic=paused")
        nsqd.post("/channel/pause?topic=paused&channel=paused")
        wait_until(lambda: nsqd.stats("t", "idle")["depth"] == 8)
        self.ports = [each.socket.getsockname()[1] for each in (consumer, plain, producer)]
        self.lines = lines_of(nsqd)


@pytest.fixture(scope="module")
def scene(shared_daemons: Daemons) -> Iterator[Scene]:
    nsqd = shared_daemons.nsqd(*quick_flags(), "--mem-queue-size=0")
    with nsqd.connect() as consumer, nsqd.connect() as plain, nsqd.connect() as producer:
        yield Scene(nsqd, consumer, plain, producer)


@pytest.fixture(scope="module")
def bare(shared_daemons: Daemons) -> Nsqd:
    """An nsqd without topics and clients."""
    return shared_daemons.nsqd(*quick_flags())


# -- head --------------------------------------------------------------------------------------------------------------


def test_it_is_text(bare: Nsqd):
    answer = bare.request("GET", "/stats")
    assert_text(answer, answer.text)


def test_line_1_is_name_version_and_language(scene: Scene):
    version = re.escape(scene.nsqd.get("/info")["version"])
    assert re.fullmatch(rf"nsqd v{version} \(built w/\S+\)( FlintMQ v\S+)?", scene.lines[0])


def test_line_2_is_the_start_time_as_rfc_3339(scene: Scene):
    assert re.fullmatch(r"start_time \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(Z|[+-]\d\d:\d\d)", scene.lines[1])
    started = datetime.fromisoformat(scene.lines[1].removeprefix("start_time "))
    assert started.timestamp() == scene.nsqd.get("/info")["start_time"]


def test_line_3_is_the_uptime_as_a_go_duration(scene: Scene):
    assert re.fullmatch(r"uptime (\d+h)?(\d+m)?\d+(\.\d+)?(ms|s)", scene.lines[2])


def test_lines_4_to_6_are_the_health(scene: Scene):
    assert scene.lines[3:6] == ["", "Health: OK", ""]


def test_line_7_begins_the_memory(scene: Scene):
    assert scene.lines[6] == "Memory:"


@pytest.mark.parametrize(("number", "name"), list(enumerate(MEMORY, 7)))
def test_a_line_of_the_memory(scene: Scene, number: int, name: str):
    assert re.fullmatch(rf"   {name:<25}\t\d+", scene.lines[number])


def test_a_blank_line_ends_the_memory(scene: Scene):
    assert scene.lines[TOPICS_AT - 1 : TOPICS_AT + 1] == ["", "Topics:"]


@pytest.mark.parametrize("value", ["false", "0"])
def test_include_mem_off_leaves_the_memory_out(scene: Scene, value: str):
    assert lines_of(scene.nsqd, f"include_mem={value}")[3:7] == ["", "Health: OK", "", "Topics:"]


# -- topics ------------------------------------------------------------------------------------------------------------


def line_of(scene: Scene, start: str) -> str:
    (line,) = [line for line in scene.lines if line.startswith(start)]
    return line


def test_the_first_topic_stands_right_below(scene: Scene):
    assert scene.lines[TOPICS_AT + 1].startswith(f"   [{LONG}] depth:")


def test_a_blank_line_stands_before_every_further_topic(scene: Scene):
    for start in ("*P [paused", "   [t "):
        assert scene.lines[scene.lines.index(line_of(scene, start)) - 1] == ""


def test_the_line_of_a_topic(scene: Scene):
    assert line_of(scene, "   [t ") == "   [t              ] depth: 0     be-depth: 0     msgs: 8        e2e%: "


def test_the_line_of_a_paused_topic(scene: Scene):
    assert line_of(scene, "*P ") == "*P [paused         ] depth: 0     be-depth: 0     msgs: 0        e2e%: "


def test_a_long_name_of_a_topic_is_not_cut(scene: Scene):
    assert line_of(scene, "   [nnn") == f"   [{LONG}] depth: 0     be-depth: 0     msgs: 0        e2e%: "


def test_the_depth_of_a_topic(nsqd: Nsqd, topic: str):
    nsqd.publish(topic, b"x", b"y")
    line = lines_of(nsqd, f"topic={topic}&include_mem=0")[7]
    assert re.fullmatch(rf"   \[{topic:<15}\] depth: 2     be-depth: [02]     msgs: 2        e2e%: ", line)


def test_topics_none(bare: Nsqd):
    assert lines_of(bare)[TOPICS_AT] == "Topics: None"


def test_topics_none_of_an_unknown_topic(scene: Scene):
    assert lines_of(scene.nsqd, "topic=unknown")[TOPICS_AT:] == ["Topics: None", "", "Producers: None", ""]


def test_topics_none_of_an_unknown_channel(scene: Scene):
    assert lines_of(scene.nsqd, "topic=t&channel=unknown")[TOPICS_AT : TOPICS_AT + 3] == [
        "Topics: None",
        "",
        "Producers:",
    ]


# -- channels ----------------------------------------------------------------------------------------------------------


def test_the_line_of_a_channel(scene: Scene):
    assert line_of(scene, "      [c ") == (
        "      [c                        ] depth: 5     be-depth: 5     inflt: 1    def: 1    re-q: 1     "
        "timeout: 0     msgs: 8        e2e%: "
    )


def test_the_line_of_a_paused_channel(scene: Scene):
    assert line_of(scene, "   *P ") == (
        "   *P [paused                   ] depth: 0     be-depth: 0     inflt: 0    def: 0    re-q: 0     "
        "timeout: 0     msgs: 0        e2e%: "
    )


def test_a_long_name_of_a_channel_is_not_cut(scene: Scene):
    assert line_of(scene, "      [nnn") == (
        f"      [{LONG}] depth: 0     be-depth: 0     inflt: 0    def: 0    re-q: 0     "
        "timeout: 0     msgs: 0        e2e%: "
    )


def test_channels_stand_below_their_topic_by_name(scene: Scene):
    start = scene.lines.index(line_of(scene, "   [t "))
    shown = [line for line in scene.lines[start + 1 : start + 5] if line.startswith("      [")]
    assert [line[7:13].strip() for line in shown] == ["c", "idle"]


# -- clients -----------------------------------------------------------------------------------------------------------


def test_the_line_of_a_consumer(scene: Scene):
    port = scene.ports[1]
    name = f"127.0.0.1:{port} "
    pattern = (
        rf"        \[V2 {re.escape(f'{name:<21}')}\] state: 3 inflt: 0    rdy: 0    fin: 0        re-q: 0        "
        r"msgs: 0        connected: \d+s"
    )
    assert re.fullmatch(pattern, line_of(scene, f"        [V2 127.0.0.1:{port}"))


def test_clients_stand_below_their_channel(scene: Scene):
    at = scene.lines.index(line_of(scene, "      [idle "))
    assert scene.lines[at + 1].startswith("        [V2 127.0.0.1:")


@pytest.mark.parametrize("value", ["false", "0"])
def test_include_clients_off_leaves_clients_and_producers_out(scene: Scene, value: str):
    lines = lines_of(scene.nsqd, f"include_clients={value}")
    assert not any("[V2 " in line for line in lines)
    assert lines[-3:] == ["", "Producers: None", ""]


# -- producers ---------------------------------------------------------------------------------------------------------


def test_the_line_of_a_producer(scene: Scene):
    port = scene.ports[2]
    pattern = rf"   \[V2 {re.escape(HOST)}:{port} \] msgs: 7        topics: t=7 connected: \d+s"
    assert re.fullmatch(pattern, line_of(scene, f"   [V2 {HOST}:{port}"))


def test_the_producers_come_last(scene: Scene):
    at = scene.lines.index("Producers:")
    assert scene.lines[at - 1] == ""
    assert all(line.startswith("   [V2 ") for line in scene.lines[at + 1 : -1])
    assert len(scene.lines[at + 1 : -1]) == 2 and scene.lines[-1] == ""


def test_producers_none(bare: Nsqd):
    assert lines_of(bare)[-3:] == ["", "Producers: None", ""]


@pytest.mark.improvement
def test_the_topics_of_a_producer_are_all_shown(nsqd: Nsqd, topic: str):
    """Upstream shows one topic per connection (defect 5 of section 6)."""
    with nsqd.connect() as producer:
        producer.identify(hostname=topic, user_agent="a b")
        producer.ok(mpub(f"{topic}-2", [b"x"] * 2) + mpub(f"{topic}-1", [b"x"]), 2)
        port = producer.socket.getsockname()[1]
        (line,) = [line for line in lines_of(nsqd) if line.startswith(f"   [V2 {topic}:")]
    name = f"{topic}:{port} a b"
    assert line.startswith(f"   [V2 {name:<21}] msgs: 3        topics: {topic}-1=1,{topic}-2=2 connected: ")


@pytest.mark.improvement
def test_a_consumer_that_publishes_is_shown_as_a_consumer_below_its_channel(scene: Scene):
    """Upstream shows it there as it shows producers."""
    pattern = (
        rf"        \[V2 {re.escape(f'h:{scene.ports[0]} ua/1'):<21}.*\] state: 3 inflt: 1    rdy: 0    fin: 1        "
        r"re-q: 1        msgs: 3        connected: \d+s"
    )
    assert re.fullmatch(pattern, line_of(scene, "        [V2 h:"))


# -- latency -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def timed(shared_daemons: Daemons) -> Nsqd:
    return shared_daemons.nsqd(*quick_flags(), "--e2e-processing-latency-percentile=0.99,0.5")


def test_latency_of_nothing_is_0_ns(timed: Nsqd, topic: str):
    timed.post(f"/topic/create?topic={topic}")
    timed.post(f"/channel/create?topic={topic}&channel=c")
    lines = lines_of(timed, f"topic={topic}&include_mem=0")
    assert [line.partition(" e2e%: ")[2] for line in lines[7:9]] == ["0.0ns, 0.0ns"] * 2


def test_latency_has_a_unit_and_one_digit(timed: Nsqd, topic: str):
    with timed.connect() as consumer:
        consumer.subscribe(topic, "c", 1)
        timed.publish(topic, b"x")
        consumer.finish(consumer.message())
        consumer.settle()
    for line in lines_of(timed, f"topic={topic}&include_mem=0")[7:9]:
        assert re.search(r" e2e%: \d{1,3}\.\d(ns|us|ms|s), \d{1,3}\.\d(ns|us|ms|s)$", line)
