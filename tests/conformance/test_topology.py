"""Topology-aware consumption: who is local, who gets a message first, what is counted (NSQ since 1.3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.conformance.conftest import quick_flags
from tests.integration.daemons import Connection, Daemons, Nsqd, Nsqlookupd, pub, wait_until

EXPERIMENT = "--enable-experiment=topology-aware-consumption"
COUNTS = ("zone_local_msg_count", "region_local_msg_count", "global_msg_count")


@pytest.fixture(scope="module")
def placed(shared_daemons: Daemons) -> Nsqd:
    """An nsqd in zone z1 of region r1 with the experiment turned on."""
    return shared_daemons.nsqd(*quick_flags(), EXPERIMENT, "--topology-zone=z1", "--topology-region=r1")


@pytest.fixture(scope="module")
def placeless(shared_daemons: Daemons) -> Nsqd:
    """An nsqd with the experiment turned on that does not know where it is."""
    return shared_daemons.nsqd(*quick_flags(), EXPERIMENT)


class Consumers:
    """Consumers of one channel, from farthest to nearest, so that coming first is no advantage."""

    def __init__(self, nsqd: Nsqd, topic: str, stack: ExitStack) -> None:
        self._nsqd = nsqd
        self._topic = topic
        self._stack = stack

    def add(self, rdy_count: int = 1, **place: str) -> Connection:
        """A consumer that is ready when this returns."""
        connection = self._stack.enter_context(self._nsqd.connect())
        connection.identify(client_id="-".join(place.values()), **place)
        connection.subscribe(self._topic, "c", rdy_count)
        connection.settle()
        return connection

    def publish(self, *bodies: bytes) -> None:
        """Publish one by one, each when the one before it has been handed out."""
        with self._nsqd.connect() as producer:
            for body in bodies:
                producer.ok(pub(self._topic, body))

    def counts(self) -> dict[str, int]:
        """The counts by locality that the channel shows."""
        return counts_of(self._nsqd.stats(self._topic, "c"))

    def client(self, client_id: str) -> dict[str, int]:
        """The counts by locality that a consumer shows."""
        rows = self._nsqd.stats(self._topic, "c")["clients"]
        (row,) = [row for row in rows if row["client_id"] == client_id]
        return counts_of(row)


def counts_of(row: dict[str, Any]) -> dict[str, int]:
    return {name: row[name] for name in COUNTS if name in row}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def consumers(placed: Nsqd, topic: str, stack: ExitStack) -> Consumers:
    return Consumers(placed, topic, stack)


# -- who is where ------------------------------------------------------------------------------------------------------


def test_identify_answers_with_the_place_of_the_server(placed: Nsqd):
    with placed.connect() as connection:
        answer = connection.identify(topology_zone="z2", topology_region="r2")
        assert (answer["topology_zone"], answer["topology_region"]) == ("z1", "r1")


def test_info_tells_the_place(placed: Nsqd):
    info = placed.get("/info")
    assert (info["topology_zone"], info["topology_region"]) == ("z1", "r1")


def test_the_place_is_told_without_the_experiment(shared_daemons: Daemons):
    nsqd = shared_daemons.nsqd("--topology-zone=z9", "--topology-region=r9", *quick_flags())
    with nsqd.connect() as connection:
        answer = connection.identify()
        assert (answer["topology_zone"], answer["topology_region"]) == ("z9", "r9")


def test_stats_show_the_place_of_a_client(placed: Nsqd, consumers: Consumers, topic: str):
    consumers.add(topology_zone="z2", topology_region="r1")
    (row,) = placed.stats(topic, "c")["clients"]
    assert (row["topology_zone"], row["topology_region"]) == ("z2", "r1")


def test_nsqlookupd_tells_the_place_of_an_nsqd(shared_daemons: Daemons, nsqlookupd: Nsqlookupd, topic: str):
    address = f"--lookupd-tcp-address=127.0.0.1:{nsqlookupd.tcp[1]}"
    nsqd = shared_daemons.nsqd(address, "--topology-zone=z9", "--topology-region=r9", *quick_flags())
    nsqd.publish(topic, b"x")
    wait_until(lambda: nsqlookupd.producers(topic), "the registration")
    (producer,) = nsqlookupd.get(f"/lookup?topic={topic}")["producers"]
    (node,) = [node for node in nsqlookupd.get("/nodes")["producers"] if node["tcp_port"] == nsqd.tcp[1]]
    for row in (producer, node):
        assert (row["topology_zone"], row["topology_region"]) == ("z9", "r9")


# -- who gets it -------------------------------------------------------------------------------------------------------


def test_zone_before_region_before_the_others(consumers: Consumers):
    far = consumers.add(topology_zone="z3", topology_region="r2")
    region = consumers.add(topology_zone="z2", topology_region="r1")
    zone = consumers.add(topology_zone="z1", topology_region="r1")
    consumers.publish(b"1", b"2", b"3")
    assert (zone.message().body, region.message().body, far.message().body) == (b"1", b"2", b"3")
    assert consumers.counts() == {"zone_local_msg_count": 1, "region_local_msg_count": 1, "global_msg_count": 1}


def test_a_local_consumer_that_keeps_up_gets_everything(consumers: Consumers):
    far = consumers.add(100, topology_zone="z2", topology_region="r2")
    zone = consumers.add(1, topology_zone="z1", topology_region="r1")
    for number in range(20):
        consumers.publish(b"%d" % number)
        message = zone.message()
        assert message.body == b"%d" % number
        zone.finish(message)
        zone.settle()
    far.nothing_comes()
    assert consumers.counts() == {"zone_local_msg_count": 20}


@pytest.mark.parametrize("reason", ["has no RDY", "is full", "said CLS", "left"])
def test_nothing_waits_for_a_local_consumer_that_is_not_ready(consumers: Consumers, reason: str):
    far = consumers.add(5, topology_zone="z2", topology_region="r2")
    zone = consumers.add(0 if reason == "has no RDY" else 1, topology_zone="z1", topology_region="r1")
    if reason == "is full":
        consumers.publish(b"taken")
        assert zone.message().body == b"taken"
    elif reason == "said CLS":
        zone.send(b"CLS\n")
        assert zone.response() == b"CLOSE_WAIT"
    elif reason == "left":
        zone.send(b"RDY 0\n")
        zone.settle()
        zone.close()
    consumers.publish(b"1", b"2")
    assert [message.body for message in far.messages(2)] == [b"1", b"2"]


def test_a_backlog_goes_to_everybody_at_once(placed: Nsqd, consumers: Consumers, topic: str):
    far = consumers.add(0, topology_zone="z2", topology_region="r2")
    zone = consumers.add(0, topology_zone="z1", topology_region="r1")
    consumers.publish(*(b"%d" % number for number in range(10)))
    far.rdy(6)
    assert len(far.messages(6)) == 6
    zone.rdy(10)
    assert len(zone.messages(4)) == 4


def test_the_zone_counts_whatever_the_region(consumers: Consumers):
    region = consumers.add(topology_zone="z2", topology_region="r1")
    zone = consumers.add(topology_zone="z1", topology_region="r2")
    consumers.publish(b"1", b"2")
    assert (zone.message().body, region.message().body) == (b"1", b"2")


@pytest.mark.parametrize("place", [{"topology_zone": "Z1"}, {"topology_zone": "z1 "}, {"topology_region": "z1"}, {}])
def test_names_are_compared_as_they_are(consumers: Consumers, place: dict[str, str]):
    consumer = consumers.add(1, **place)
    consumers.publish(b"x")
    assert consumer.message().body == b"x"
    assert consumers.counts() == {"global_msg_count": 1}


# -- counts ------------------------------------------------------------------------------------------------------------


def test_counts_that_are_0_are_left_out(placed: Nsqd, consumers: Consumers, topic: str):
    consumers.add(topology_zone="z1")
    assert consumers.counts() == {}
    assert consumers.client("z1") == {}


def test_everything_is_global_without_the_experiment(nsqd: Nsqd, topic: str, stack: ExitStack):
    consumers = Consumers(nsqd, topic, stack)
    consumer = consumers.add(2, topology_zone="z1", topology_region="r1")
    consumers.publish(b"1", b"2")
    assert len(consumer.messages(2)) == 2
    assert consumers.counts() == {"global_msg_count": 2}


@pytest.mark.improvement
def test_every_delivery_counts(consumers: Consumers):
    consumer = consumers.add(1, topology_zone="z1")
    consumers.publish(b"x")
    for attempts in (1, 2, 3):
        message = consumer.message()
        assert message.attempts == attempts
        consumer.send(b"REQ %s 0\n" % message.id)
    consumer.message()
    assert consumers.counts() == {"zone_local_msg_count": 4}


@pytest.mark.improvement
def test_a_consumer_shows_its_own_count(consumers: Consumers):
    far = consumers.add(topology_zone="z3", topology_region="r2")
    region = consumers.add(topology_zone="z2", topology_region="r1")
    zone = consumers.add(topology_zone="z1", topology_region="r1")
    consumers.publish(b"1", b"2", b"3")
    for consumer in (zone, region, far):
        consumer.message()
    assert consumers.client("z1-r1") == {"zone_local_msg_count": 1}
    assert consumers.client("z2-r1") == {"region_local_msg_count": 1}
    assert consumers.client("z3-r2") == {"global_msg_count": 1}


@pytest.mark.improvement
def test_an_nsqd_without_a_place_has_no_local_consumers(placeless: Nsqd, topic: str, stack: ExitStack):
    consumers = Consumers(placeless, topic, stack)
    nowhere = consumers.add()
    somewhere = consumers.add(topology_zone="z1", topology_region="r1")
    consumers.publish(b"1", b"2")
    assert (nowhere.message().body, somewhere.message().body) == (b"1", b"2")
    assert consumers.counts() == {"global_msg_count": 2}
    assert "without --topology-zone and --topology-region no consumer is near" in placeless.log


# -- flags -------------------------------------------------------------------------------------------------------------


@pytest.mark.improvement
def test_an_unknown_experiment_is_refused_with_those_there_are(shared_daemons: Daemons):
    nsqd = shared_daemons.new_nsqd("--enable-experiment=warp-drive")
    nsqd.launch()
    assert nsqd.wait() == 2
    assert "warp-drive" in nsqd.log and "topology-aware-consumption" in nsqd.log


def test_config_tells_the_options(placed: Nsqd):
    assert placed.request("GET", "/config/topology_zone").text == "z1"
    assert placed.get("/config/enable_experiment") == ["topology-aware-consumption"]
