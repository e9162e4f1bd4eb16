"""Topology-aware consumption with real processes: local consumers come and go, and nothing is lost or held up."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.integration.daemons import MESSAGE, Connection, Daemons, Message, Nsqd, message_of, wait_until

ZONE = {"topology_zone": "z1", "topology_region": "r1"}
REGION = {"topology_zone": "z2", "topology_region": "r1"}
FAR = {"topology_zone": "z3", "topology_region": "r2"}


@pytest.fixture
def placed(daemons: Daemons) -> Nsqd:
    """An nsqd in zone z1 of region r1."""
    return daemons.nsqd(
        "--durability=os",
        "--enable-experiment=topology-aware-consumption",
        "--topology-zone=z1",
        "--topology-region=r1",
    )


def consume(nsqd: Nsqd, place: dict[str, str], rdy_count: int) -> Connection:
    """A consumer of t/c that is ready when this returns."""
    connection = nsqd.connect()
    connection.identify(**place)
    connection.subscribe("t", "c", rdy_count)
    connection.settle()
    return connection


def message_at_hand(consumer: Connection) -> Message | None:
    """A message that has come; None when there is none now."""
    try:
        frame = consumer.any_frame(0.002)
    except TimeoutError:
        return None
    assert frame is not None and frame.kind == MESSAGE, frame
    return message_of(frame.data)


def deliveries(nsqd: Nsqd) -> dict[str, float]:
    """What Prometheus is told of t/c."""
    families = text_string_to_metric_families(nsqd.request("GET", "/metrics").text)
    return {
        sample.labels["locality"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "flintmq_nsqd_channel_deliveries_total" and sample.labels["topic"] == "t"
    }


def test_messages_follow_the_local_consumer_as_it_comes_and_goes(placed: Nsqd):
    with consume(placed, FAR, 10) as far:
        with consume(placed, ZONE, 1) as zone:
            placed.publish("t", b"first")
            first = zone.message()
            placed.publish("t", b"while it is busy")
            assert far.message().body == b"while it is busy"
            zone.finish(first)
            zone.settle()
            placed.publish("t", b"second")
            assert zone.message().body == b"second"
        again = far.message()  # what the one that left had in flight
        assert (again.body, again.attempts) == (b"second", 2)
        placed.publish("t", b"alone")
        assert far.message().body == b"alone"
        with consume(placed, ZONE, 1) as zone:
            placed.publish("t", b"back")
            assert zone.message().body == b"back"
            assert deliveries(placed) == {"zone": 3, "global": 3}


def test_under_load_the_local_ones_do_what_they_can_and_the_others_the_rest(placed: Nsqd):
    count = 600
    consumers = [
        consume(placed, FAR, 20),
        consume(placed, REGION, 5),
        consume(placed, ZONE, 5),
        consume(placed, ZONE, 5),
    ]
    for number in range(count // 20):
        placed.publish("t", *(b"%d" % (20 * number + index) for index in range(20)))
    bodies: list[bytes] = []
    got = [0 for _ in consumers]
    while len(bodies) < count:
        for index, consumer in enumerate(consumers):
            while (message := message_at_hand(consumer)) is not None:
                consumer.finish(message)
                bodies.append(message.body)
                got[index] += 1
    assert sorted(bodies) == sorted(b"%d" % number for number in range(count))
    wait_until(lambda: placed.unfinished("t", "c") == 0, "the last FIN")
    shown = deliveries(placed)
    assert shown == {"global": got[0], "region": got[1], "zone": got[2] + got[3]}
    assert shown["zone"] >= 10, "both were ready for five when the first twenty came"


def test_the_experiment_can_be_turned_on_in_a_file(daemons: Daemons, tmp_path: Path):
    path = tmp_path / "nsqd.cfg"
    path.write_text('enable_experiment = ["topology-aware-consumption"]\ntopology_zone = "z1"\n', encoding="utf-8")
    nsqd = daemons.nsqd("--durability=os", f"--config={path}")
    with consume(nsqd, FAR, 1), consume(nsqd, ZONE, 1) as zone:
        nsqd.publish("t", b"x")
        assert zone.message().body == b"x"
