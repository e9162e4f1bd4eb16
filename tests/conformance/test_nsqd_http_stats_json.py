"""/stats?format=json of nsqd: every field with its name, type, place and a value of the test (NSQ's HTTP API)."""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Certificates
from tests.conformance.conftest import quick_flags
from tests.conformance.http_helpers import (
    ADDITIONS,
    JSON_TYPE,
    MEMORY,
    NSQ_TYPE,
    assert_fields,
    assert_refused,
    tls_flags,
)
from tests.integration.auth_server import AuthServer
from tests.integration.daemons import Connection, Daemons, Nsqd, dpub, mpub, pub, sized, wait_until
from tests.integration.upgraded import Upgraded

STATS = ("version", "health", "start_time", "topics", "memory", "producers")
TOPIC = (
    "topic_name",
    "channels",
    "depth",
    "backend_depth",
    "message_count",
    "message_bytes",
    "paused",
    "e2e_processing_latency",
)
LOCAL_COUNTS = ("zone_local_msg_count", "region_local_msg_count", "global_msg_count")
CHANNEL = (
    "channel_name",
    "depth",
    "backend_depth",
    "in_flight_count",
    "deferred_count",
    "message_count",
    *LOCAL_COUNTS,
    "requeue_count",
    "timeout_count",
    "client_count",
    "clients",
    "paused",
    "e2e_processing_latency",
)
AUTHORIZED = ("authed", "auth_identity", "auth_identity_url")
SINCE_1_3 = ("topology_zone", "topology_region")
CLIENT = (
    "client_id",
    "hostname",
    "version",
    "remote_address",
    "state",
    "ready_count",
    "in_flight_count",
    "message_count",
    *LOCAL_COUNTS,
    "finish_count",
    "requeue_count",
    "connect_ts",
    "sample_rate",
    "deflate",
    "snappy",
    "user_agent",
    *AUTHORIZED,
    *SINCE_1_3,
    "pub_counts",
    "tls",
    "tls_cipher_suite",
    "tls_version",
    "tls_negotiated_protocol",
    "tls_negotiated_protocol_is_mutual",
)
MAY_BE_ABSENT = (*LOCAL_COUNTS, *AUTHORIZED, *SINCE_1_3, "pub_counts")
NO_LATENCY = {"count": 0, "percentiles": None}


def get(nsqd: Nsqd, query: str = "") -> dict[str, Any]:
    stats: dict[str, Any] = nsqd.get(f"/stats?format=json&{query}")
    return stats


def row_of(rows: list[dict[str, Any]], key: str, value: str) -> dict[str, Any]:
    (row,) = [each for each in rows if each[key] == value]
    return row


# -- a daemon with something in every field ----------------------------------------------------------------------------


class Scene:
    """What was done to an nsqd, and what its /stats say then.

    Topic ``busy``: 7 messages of 5 bytes. Its channel ``read``: 1 finished, 1 deferred, 3 in flight, 2 waiting, 2
    requeues. Its channel ``unread`` has no consumer, ``slow`` had a timeout. Topic ``waiting``: 2 messages, no channel.
    Topic ``paused``: both it and its channel are.
    """

    def __init__(self, nsqd: Nsqd, consumer: Connection, producer: Connection) -> None:
        self.nsqd = nsqd
        self.begun_s = time.time()
        nsqd.post("/topic/create?topic=busy")
        nsqd.post("/channel/create?topic=busy&channel=unread")
        consumer.identify(
            client_id="the id",
            hostname="the host",
            user_agent="agent/1.0",
            sample_rate=0,
            msg_timeout=600_000,
            topology_zone="the zone",
            topology_region="the region",
        )
        consumer.subscribe("busy", "read", 4)
        slow = nsqd.connect()
        slow.identify(msg_timeout=1000)
        slow.subscribe("busy", "slow", 1)
        producer.ok(pub("busy", b"12345") * 2 + mpub("busy", [b"12345"] * 3) + dpub("busy", 0, b"12345") * 2, 5)
        producer.ok(mpub("waiting", [b"1", b"22"]))
        held = consumer.messages(4)
        slow.message()
        slow.rdy(0)
        consumer.rdy(0)
        consumer.finish(held[0])
        consumer.send(b"REQ %s 0\nREQ %s 600000\n" % (held[1].id, held[2].id))
        consumer.rdy(3)
        consumer.messages(2)
        consumer.rdy(1)
        for target in ("/topic/create?topic=paused", "/channel/create?topic=paused&channel=c"):
            nsqd.post(target)
        nsqd.post("/topic/pause?topic=paused")
        nsqd.post("/channel/pause?topic=paused&channel=c")
        wait_until(lambda: nsqd.stats("busy", "slow")["timeout_count"] == 1, "the timeout")
        slow.close()
        wait_until(lambda: nsqd.stats("busy", "slow")["client_count"] == 0, "the consumer to go")
        self.consumer_port, self.producer_port = (c.socket.getsockname()[1] for c in (consumer, producer))
        self.stats = get(nsqd)
        self.topics = {row["topic_name"]: row for row in self.stats["topics"]}
        self.channels = {row["channel_name"]: row for row in self.topics["busy"]["channels"]}
        (self.client,) = self.channels["read"]["clients"]
        (self.producer,) = self.stats["producers"]


@pytest.fixture(scope="module")
def scene(shared_daemons: Daemons) -> Iterator[Scene]:
    nsqd = shared_daemons.nsqd(*quick_flags(), "--mem-queue-size=0")
    with nsqd.connect() as consumer, nsqd.connect() as producer:
        yield Scene(nsqd, consumer, producer)


def test_its_type_is_json(nsqd: Nsqd):
    answer = nsqd.request("GET", "/stats?format=json")
    assert (answer.headers["Content-Type"], answer.headers["X-NSQ-Content-Type"]) == (JSON_TYPE, NSQ_TYPE)


# top


def test_the_fields_of_stats(scene: Scene):
    assert_fields(scene.stats, STATS)


def test_version_is_that_of_info(scene: Scene):
    assert scene.stats["version"] == scene.nsqd.get("/info")["version"]


def test_health_is_ok(scene: Scene):
    assert scene.stats["health"] == "OK"


def test_start_time_is_that_of_info(scene: Scene):
    assert scene.stats["start_time"] == scene.nsqd.get("/info")["start_time"]


@pytest.mark.improvement
def test_durability_is_shown(scene: Scene):
    """Upstream has one durability and does not show it."""
    assert scene.stats["durability"] == "os"


def test_topics_are_sorted_by_name(scene: Scene):
    assert [row["topic_name"] for row in scene.stats["topics"]] == ["busy", "paused", "waiting"]


def test_channels_are_sorted_by_name(scene: Scene):
    assert [row["channel_name"] for row in scene.topics["busy"]["channels"]] == ["read", "slow", "unread"]


# memory


def test_the_fields_of_memory(scene: Scene):
    assert_fields(scene.stats["memory"], MEMORY)


@pytest.mark.parametrize("name", MEMORY)
def test_memory_field_is_a_count(scene: Scene, name: str):
    value = scene.stats["memory"][name]
    assert type(value) is int and value >= 0


@pytest.mark.parametrize("name", ["heap_objects", "heap_in_use_bytes"])
def test_memory_field_is_not_0(scene: Scene, name: str):
    assert scene.stats["memory"][name] > 1000


# topics


def test_the_fields_of_a_topic(scene: Scene):
    assert_fields(scene.topics["busy"], TOPIC)


@pytest.mark.parametrize(
    ("topic", "name", "value"),
    [
        ("busy", "depth", 0),
        ("busy", "backend_depth", 0),
        ("busy", "message_count", 7),
        ("busy", "message_bytes", 35),
        ("busy", "paused", False),
        ("busy", "e2e_processing_latency", NO_LATENCY),
        ("waiting", "depth", 2),
        ("waiting", "backend_depth", 2),
        ("waiting", "message_count", 2),
        ("waiting", "message_bytes", 3),
        ("waiting", "channels", []),
        ("paused", "depth", 0),
        ("paused", "message_count", 0),
        ("paused", "paused", True),
    ],
)
def test_topic_field(scene: Scene, topic: str, name: str, value: object):
    found = scene.topics[topic][name]
    assert found == value and type(found) is type(value)


# channels


@pytest.mark.parametrize("channel", ["read", "slow", "unread"])
def test_the_fields_of_a_channel(scene: Scene, channel: str):
    assert_fields(scene.channels[channel], CHANNEL, optional=LOCAL_COUNTS)


@pytest.mark.parametrize(
    ("channel", "name", "value"),
    [
        ("read", "depth", 2),
        ("read", "backend_depth", 2),
        ("read", "in_flight_count", 3),
        ("read", "deferred_count", 1),
        ("read", "message_count", 7),
        ("read", "requeue_count", 2),
        ("read", "timeout_count", 0),
        ("read", "client_count", 1),
        ("read", "paused", False),
        ("read", "e2e_processing_latency", NO_LATENCY),
        ("slow", "depth", 7),
        ("slow", "in_flight_count", 0),
        ("slow", "requeue_count", 0),
        ("slow", "timeout_count", 1),
        ("slow", "client_count", 0),
        ("slow", "clients", []),
        ("unread", "depth", 7),
        ("unread", "backend_depth", 7),
        ("unread", "message_count", 7),
        ("unread", "clients", []),
        ("unread", "client_count", 0),
    ],
)
def test_channel_field(scene: Scene, channel: str, name: str, value: object):
    found = scene.channels[channel][name]
    assert found == value and type(found) is type(value)


def test_a_paused_channel_says_so(scene: Scene):
    assert scene.topics["paused"]["channels"][0]["paused"] is True


# clients


def test_the_fields_of_a_consumer(scene: Scene):
    assert_fields(scene.client, CLIENT, optional=MAY_BE_ABSENT)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("client_id", "the id"),
        ("hostname", "the host"),
        ("version", "V2"),
        ("state", 3),
        ("ready_count", 1),
        ("in_flight_count", 3),
        ("message_count", 6),
        ("finish_count", 1),
        ("requeue_count", 2),
        ("sample_rate", 0),
        ("deflate", False),
        ("snappy", False),
        ("user_agent", "agent/1.0"),
        ("topology_zone", "the zone"),
        ("topology_region", "the region"),
        ("tls", False),
        ("tls_cipher_suite", ""),
        ("tls_version", ""),
        ("tls_negotiated_protocol", ""),
        ("tls_negotiated_protocol_is_mutual", False),
    ],
)
def test_consumer_field(scene: Scene, name: str, value: object):
    found = scene.client.get(name, value if name in SINCE_1_3 else None)
    assert found == value and type(found) is type(value)


def test_remote_address_is_ip_and_port(scene: Scene):
    assert scene.client["remote_address"] == f"127.0.0.1:{scene.consumer_port}"


def test_connect_ts_is_in_seconds(scene: Scene):
    assert type(scene.client["connect_ts"]) is int and abs(scene.client["connect_ts"] - scene.begun_s) < 10


@pytest.mark.parametrize("name", [*AUTHORIZED, "pub_counts"])
def test_a_consumer_leaves_out_what_is_empty(scene: Scene, name: str):
    assert name not in scene.client


# producers


def test_the_fields_of_a_producer(scene: Scene):
    assert_fields(scene.producer, CLIENT, optional=MAY_BE_ABSENT)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("client_id", "127.0.0.1"),
        ("hostname", "127.0.0.1"),
        ("version", "V2"),
        ("state", 0),
        ("ready_count", 0),
        ("in_flight_count", 0),
        ("message_count", 0),
        ("finish_count", 0),
        ("requeue_count", 0),
        ("user_agent", ""),
    ],
)
def test_producer_field(scene: Scene, name: str, value: object):
    assert scene.producer[name] == value


def test_a_producer_has_its_own_address(scene: Scene):
    assert scene.producer["remote_address"] == f"127.0.0.1:{scene.producer_port}"


@pytest.mark.improvement
def test_pub_counts_lists_every_topic(scene: Scene):
    """Upstream shows one topic per connection (defect 5 of section 6)."""
    assert scene.producer["pub_counts"] == [{"topic": "busy", "count": 7}, {"topic": "waiting", "count": 2}]


def test_pub_counts_counts_messages_of_pub_mpub_and_dpub(nsqd: Nsqd, topic: str):
    with nsqd.connect() as producer:
        producer.ok(pub(topic, b"x") + mpub(topic, [b"x"] * 3) + dpub(topic, 1, b"x"), 3)
        port = producer.socket.getsockname()[1]
        row = row_of(get(nsqd)["producers"], "remote_address", f"127.0.0.1:{port}")
    assert row["pub_counts"] == [{"topic": topic, "count": 5}]
    assert list(row["pub_counts"][0]) == ["topic", "count"]


def test_a_connection_that_published_nothing_is_no_producer(nsqd: Nsqd):
    with nsqd.connect() as idle:
        idle.identify(client_id="idle")
        assert "idle" not in [row["client_id"] for row in get(nsqd)["producers"] or ()]


def test_a_consumer_that_publishes_is_in_both_lists(nsqd: Nsqd, topic: str):
    with nsqd.connect() as both:
        both.identify(client_id=f"both of {topic}")
        both.subscribe(topic, "c")
        both.ok(pub(topic, b"x"))
        (client,) = nsqd.stats(topic, "c")["clients"]
        producer = row_of(get(nsqd)["producers"], "client_id", f"both of {topic}")
    assert (client["remote_address"], producer["state"]) == (producer["remote_address"], 3)


def test_publishing_over_http_makes_no_producer(daemons: Daemons):
    nsqd = daemons.nsqd(*quick_flags())
    nsqd.post("/pub?topic=t", b"x")
    assert get(nsqd)["producers"] is None


def test_a_producer_goes_with_its_connection(nsqd: Nsqd, topic: str):
    with nsqd.connect() as producer:
        producer.identify(client_id=topic)
        producer.ok(pub(topic, b"x"))
    wait_until(lambda: topic not in [row["client_id"] for row in get(nsqd)["producers"] or ()])


# -- clients, what they negotiated -------------------------------------------------------------------------------------


def test_a_client_before_identify_is_called_by_its_ip(nsqd: Nsqd, topic: str):
    with nsqd.connect() as consumer:
        consumer.subscribe(topic, "c")
        (client,) = nsqd.stats(topic, "c")["clients"]
    assert (client["client_id"], client["hostname"], client["user_agent"]) == ("127.0.0.1", "127.0.0.1", "")


def test_what_identify_leaves_out_is_empty(nsqd: Nsqd, topic: str):
    with nsqd.connect() as consumer:
        consumer.identify()
        consumer.subscribe(topic, "c")
        (client,) = nsqd.stats(topic, "c")["clients"]
    assert (client["client_id"], client["hostname"], client["user_agent"]) == ("", "", "")


def test_state_is_4_after_cls(nsqd: Nsqd, topic: str):
    with nsqd.connect() as consumer:
        consumer.subscribe(topic, "c", 5)
        consumer.send(b"CLS\n")
        assert consumer.response() == b"CLOSE_WAIT"
        (client,) = nsqd.stats(topic, "c")["clients"]
    assert (client["state"], client["ready_count"]) == (4, 0)


def test_ready_count_is_the_last_rdy(nsqd: Nsqd, topic: str):
    with nsqd.connect() as consumer:
        consumer.subscribe(topic, "c", 2500)
        consumer.rdy(17)
        consumer.settle()
        assert nsqd.stats(topic, "c")["clients"][0]["ready_count"] == 17


def test_sample_rate_is_shown(nsqd: Nsqd, topic: str):
    with nsqd.connect() as consumer:
        consumer.identify(sample_rate=42)
        consumer.subscribe(topic, "c")
        assert nsqd.stats(topic, "c")["clients"][0]["sample_rate"] == 42


def test_every_client_of_a_channel_is_listed(nsqd: Nsqd, topic: str):
    with nsqd.connect() as one, nsqd.connect() as two:
        for consumer in (one, two):
            consumer.subscribe(topic, "c")
        row = nsqd.stats(topic, "c")
        ports = sorted(int(client["remote_address"].rpartition(":")[2]) for client in row["clients"])
        assert ports == sorted(each.socket.getsockname()[1] for each in (one, two))
        assert row["client_count"] == 2


def test_a_client_goes_with_its_connection(nsqd: Nsqd, topic: str):
    with nsqd.connect() as consumer:
        consumer.subscribe(topic, "c")
    wait_until(lambda: nsqd.stats(topic, "c")["clients"] == [])
    assert nsqd.stats(topic, "c")["client_count"] == 0


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(Path(tmp_path_factory.mktemp("certificates")))


@pytest.fixture(scope="module")
def secure(shared_daemons: Daemons, certificates: Certificates) -> Nsqd:
    return shared_daemons.nsqd(*quick_flags(), *tls_flags(certificates))


def upgraded_row(
    secure: Nsqd, topic: str, context: ssl.SSLContext | None = None, codec: str = "", **fields: object
) -> dict[str, Any]:
    """The row of a consumer with these layers."""
    with Upgraded(secure.tcp) as consumer:
        consumer.upgrade(context, codec, **fields)
        consumer.subscribe(topic, "c")
        (client,) = secure.stats(topic, "c")["clients"]
    assert isinstance(client, dict)
    return client


@pytest.mark.parametrize(
    ("codec", "shown"), [("", (False, False)), ("deflate", (True, False)), ("snappy", (False, True))]
)
@pytest.mark.parametrize("is_secure", [False, True], ids=["clear", "tls"])
def test_layers_are_shown(
    secure: Nsqd, certificates: Certificates, topic: str, codec: str, shown: tuple[bool, bool], is_secure: bool
):
    client = upgraded_row(secure, topic, certificates.client_context() if is_secure else None, codec)
    assert (client["tls"], client["deflate"], client["snappy"]) == (is_secure, *shown)


@pytest.mark.parametrize(("version", "shown"), [(ssl.TLSVersion.TLSv1_2, "TLS1.2"), (ssl.TLSVersion.TLSv1_3, "TLS1.3")])
def test_tls_version(secure: Nsqd, certificates: Certificates, topic: str, version: ssl.TLSVersion, shown: str):
    context = certificates.client_context()
    context.minimum_version = context.maximum_version = version
    assert upgraded_row(secure, topic, context)["tls_version"] == shown


@pytest.mark.parametrize(
    ("cipher", "shown"),
    [
        ("ECDHE-ECDSA-AES128-GCM-SHA256", "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"),
        ("ECDHE-ECDSA-AES256-GCM-SHA384", "Unknown 49196"),
        ("ECDHE-ECDSA-CHACHA20-POLY1305", "Unknown 52393"),
    ],
)
def test_tls_cipher_suite_of_tls_1_2(secure: Nsqd, certificates: Certificates, topic: str, cipher: str, shown: str):
    context = certificates.client_context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(cipher)
    assert upgraded_row(secure, topic, context)["tls_cipher_suite"] == shown


def test_tls_cipher_suite_of_tls_1_3_is_unknown(secure: Nsqd, certificates: Certificates, topic: str):
    context = certificates.client_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    assert re.fullmatch(r"Unknown 486[567]", upgraded_row(secure, topic, context)["tls_cipher_suite"])


def test_the_other_fields_of_tls(secure: Nsqd, certificates: Certificates, topic: str):
    client = upgraded_row(secure, topic, certificates.client_context())
    assert client["tls_negotiated_protocol"] == ""
    assert client["tls_negotiated_protocol_is_mutual"] is True
    assert_fields(client, CLIENT, optional=MAY_BE_ABSENT)


@pytest.fixture(scope="module")
def auth_server() -> Iterator[AuthServer]:
    with AuthServer() as server:
        yield server


@pytest.fixture(scope="module")
def guarded(shared_daemons: Daemons, auth_server: AuthServer) -> Nsqd:
    return shared_daemons.nsqd(*quick_flags(), f"--auth-http-address={auth_server.address}")


def authorized_row(guarded: Nsqd, topic: str) -> dict[str, Any]:
    with guarded.connect() as consumer:
        consumer.send(b"AUTH\n" + sized(b"secret"))
        consumer.response()
        consumer.subscribe(topic, "c")
        (client,) = guarded.stats(topic, "c")["clients"]
    assert isinstance(client, dict)
    return client


def test_an_authorized_client_shows_its_identity(guarded: Nsqd, topic: str):
    client = authorized_row(guarded, topic)
    assert [client[name] for name in AUTHORIZED] == [True, "me", "http://me"]
    assert_fields(client, CLIENT, optional=MAY_BE_ABSENT)


def test_an_empty_identity_is_left_out(guarded: Nsqd, auth_server: AuthServer, topic: str):
    auth_server.answer = {**auth_server.answer, "identity": "", "identity_url": ""}
    try:
        client = authorized_row(guarded, topic)
    finally:
        auth_server.reset()
    assert client["authed"] is True
    assert "auth_identity" not in client and "auth_identity_url" not in client


# -- filters -----------------------------------------------------------------------------------------------------------


def shape(stats: dict[str, Any]) -> dict[str, list[str]]:
    return {row["topic_name"]: [each["channel_name"] for each in row["channels"]] for row in stats["topics"]}


def test_topic_leaves_one_topic(scene: Scene):
    assert shape(get(scene.nsqd, "topic=busy")) == {"busy": ["read", "slow", "unread"]}


def test_topic_and_channel_leave_one_channel(scene: Scene):
    assert shape(get(scene.nsqd, "topic=busy&channel=read")) == {"busy": ["read"]}


def test_channel_alone_leaves_topics_that_have_it(scene: Scene):
    assert shape(get(scene.nsqd, "channel=read")) == {"busy": ["read"]}


def test_an_unknown_topic_has_null_topics_and_producers(scene: Scene):
    stats = get(scene.nsqd, "topic=unknown")
    assert (stats["topics"], stats["producers"]) == (None, None)
    assert_fields(stats, STATS)


def test_an_unknown_channel_of_a_known_topic_has_no_topics_but_producers(scene: Scene):
    stats = get(scene.nsqd, "topic=busy&channel=unknown")
    assert stats["topics"] == [] and len(stats["producers"]) == 1


def test_an_empty_topic_is_no_filter(scene: Scene):
    assert list(shape(get(scene.nsqd, "topic=&channel="))) == ["busy", "paused", "waiting"]


def test_an_invalid_topic_is_unknown(scene: Scene):
    assert get(scene.nsqd, "topic=no!")["topics"] is None


def test_the_first_topic_wins(scene: Scene):
    assert list(shape(get(scene.nsqd, "topic=busy&topic=waiting"))) == ["busy"]


def test_the_topic_does_not_filter_producers(scene: Scene):
    assert len(get(scene.nsqd, "topic=paused")["producers"]) == 1


def test_a_filter_changes_no_value(scene: Scene):
    (filtered,) = get(scene.nsqd, "topic=busy&channel=read")["topics"]
    whole = scene.topics["busy"]
    assert {**filtered, "channels": None} == {**whole, "channels": None}
    assert filtered["channels"] == [scene.channels["read"]]


@pytest.mark.parametrize("value", ["false", "0"])
def test_include_clients_off(scene: Scene, value: str):
    stats = get(scene.nsqd, f"include_clients={value}")
    channel = row_of(stats["topics"][0]["channels"], "channel_name", "read")
    assert (stats["producers"], channel["clients"], channel["client_count"]) == (None, None, 1)


@pytest.mark.parametrize("value", ["true", "1", "", "no", "FALSE", "2"])
def test_include_clients_on(scene: Scene, value: str):
    stats = get(scene.nsqd, f"include_clients={value}")
    channel = row_of(stats["topics"][0]["channels"], "channel_name", "read")
    assert len(stats["producers"]) == len(channel["clients"]) == 1


@pytest.mark.parametrize("value", ["false", "0"])
def test_include_mem_off(scene: Scene, value: str):
    assert_fields(get(scene.nsqd, f"include_mem={value}"), STATS, optional=["memory"])
    assert "memory" not in get(scene.nsqd, f"include_mem={value}")


@pytest.mark.parametrize("value", ["true", "1", "", "no", "FALSE", "2"])
def test_include_mem_on(scene: Scene, value: str):
    assert "memory" in get(scene.nsqd, f"include_mem={value}")


@pytest.mark.parametrize("value", ["", "JSON", "text", "xml"])
def test_another_format_is_text(scene: Scene, value: str):
    assert scene.nsqd.request("GET", f"/stats?format={value}").text.startswith("nsqd v")


def test_the_first_format_wins(scene: Scene):
    assert scene.nsqd.request("GET", "/stats?format=text&format=json").text.startswith("nsqd v")


def test_a_bad_query_is_400(scene: Scene):
    assert_refused(scene.nsqd.request("GET", "/stats?format=json;topic=busy"), 400, "INVALID_REQUEST")


# -- counts over time --------------------------------------------------------------------------------------------------


def test_an_nsqd_without_topics(daemons: Daemons):
    stats = get(daemons.nsqd(*quick_flags()))
    assert (stats["topics"], stats["producers"]) == ([], None)


def test_depth_leaves_out_what_is_in_flight(nsqd: Nsqd, topic: str):
    with nsqd.connect() as consumer:
        consumer.subscribe(topic, "c", 2)
        nsqd.publish(topic, *[b"x"] * 5)
        consumer.messages(2)
        row = nsqd.stats(topic, "c")
    assert (row["depth"], row["in_flight_count"]) == (3, 2)


def test_depth_leaves_out_what_is_deferred(nsqd: Nsqd, topic: str):
    nsqd.post(f"/topic/create?topic={topic}")
    nsqd.post(f"/channel/create?topic={topic}&channel=c")
    nsqd.post(f"/pub?topic={topic}&defer=60000", b"x")
    wait_until(lambda: nsqd.stats(topic, "c")["deferred_count"] == 1)
    assert nsqd.stats(topic, "c")["depth"] == 0


def test_depth_leaves_out_what_is_deferred_behind_what_waits(nsqd: Nsqd, topic: str):
    nsqd.post(f"/topic/create?topic={topic}")
    nsqd.post(f"/channel/create?topic={topic}&channel=c")
    nsqd.publish(topic, b"1", b"2")
    nsqd.post(f"/pub?topic={topic}&defer=60000", b"x")
    wait_until(lambda: nsqd.stats(topic, "c")["deferred_count"] == 1)
    assert nsqd.stats(topic, "c")["depth"] == 2


def test_message_count_of_a_channel_does_not_count_redeliveries(nsqd: Nsqd, topic: str):
    with nsqd.connect() as consumer:
        consumer.subscribe(topic, "c", 1)
        nsqd.publish(topic, b"x")
        for _ in range(3):
            consumer.send(b"REQ %s 0\n" % consumer.message().id)
        consumer.message()
        row = nsqd.stats(topic, "c")
    assert (row["message_count"], row["requeue_count"], row["clients"][0]["message_count"]) == (1, 3, 4)


def test_a_timeout_takes_the_message_from_the_client(nsqd: Nsqd, topic: str):
    with nsqd.connect() as consumer:
        consumer.identify(msg_timeout=1000)
        consumer.subscribe(topic, "c", 1)
        nsqd.publish(topic, b"x")
        consumer.message()
        consumer.rdy(0)
        wait_until(lambda: nsqd.stats(topic, "c")["timeout_count"] == 1)
        row = nsqd.stats(topic, "c")
    assert (row["in_flight_count"], row["clients"][0]["in_flight_count"], row["depth"]) == (0, 0, 1)


@pytest.mark.improvement
def test_in_flight_of_a_lost_connection_waits_again_at_once(nsqd: Nsqd, topic: str):
    """Upstream leaves it in flight until its timeout (defect 10 of section 6)."""
    with nsqd.connect() as consumer:
        consumer.subscribe(topic, "c", 1)
        nsqd.publish(topic, b"x")
        consumer.message()
    wait_until(lambda: nsqd.stats(topic, "c")["in_flight_count"] == 0)
    assert nsqd.stats(topic, "c")["depth"] == 1


def test_counters_begin_with_the_process_but_depth_stays(daemons: Daemons):
    nsqd = daemons.nsqd(*quick_flags())
    nsqd.publish("t", b"x", b"y")
    nsqd.post("/channel/create?topic=t&channel=c")
    nsqd.restart()
    topic, channel = nsqd.stats("t"), nsqd.stats("t", "c")
    assert (topic["message_count"], topic["message_bytes"]) == (0, 0)
    assert (channel["message_count"], channel["depth"]) == (0, 2)


def test_an_ephemeral_channel_has_no_backend(nsqd: Nsqd, topic: str):
    nsqd.post(f"/topic/create?topic={topic}")
    nsqd.post(f"/channel/create?topic={topic}&channel=c%23ephemeral")
    nsqd.publish(topic, b"x")
    wait_until(lambda: nsqd.stats(topic, "c#ephemeral")["depth"] == 1)
    assert nsqd.stats(topic, "c#ephemeral")["backend_depth"] == 0


def test_many_topics_are_all_shown(nsqd: Nsqd):
    names = [f"many-{number:03d}" for number in range(60)]
    for name in names:
        nsqd.post(f"/topic/create?topic={name}")
    assert [row["topic_name"] for row in get(nsqd)["topics"] if row["topic_name"].startswith("many-")] == names


def test_nothing_else_is_added(scene: Scene):
    assert set(scene.stats) - set(STATS) <= ADDITIONS
