"""Partitions over HTTP of nsqd: creating, publishing, statistics, order of channels (Youzan's HTTP API)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.conformance.conftest import is_ours
from tests.conformance.protocol_helpers import consumer, fatal
from tests.conformance.redesigned_helpers import BARE, create, in_order, placed, pub_to, sub_to
from tests.integration.daemons import Connection, Nsqd, mpub_body, pub

pytestmark = pytest.mark.skipif(not is_ours("nsqd"), reason="NSQ has no partitions")


@pytest.fixture
def parted(nsqd: Nsqd, topic: str) -> str:
    """A topic with partitions 0 to 2."""
    return create(nsqd, topic, 3)


def refusal(nsqd: Nsqd, target: str, body: bytes = b"x") -> tuple[int, Any]:
    answer = nsqd.request("POST", target, body, BARE)
    return answer.status, answer.json["message"]


# -- creating ----------------------------------------------------------------------------------------------------------


def test_a_topic_says_what_it_was_created_with(nsqd: Nsqd, topic: str):
    more = {"orderedmulti": "true", "extend": "true", "retention": 3, "syncdisk": 1}
    row = nsqd.stats(create(nsqd, topic, 2, disable_channel_auto_create="true", multipart="true", **more))
    names = ("partition_num", "replica", "extend_support", "ordered", "multi_part", "disable_channel_auto_create")
    assert [row[name] for name in names] == [2, 1, True, True, True, True]
    assert [each["topic_full_name"] for each in row["partitions"]] == [f"{topic}-0", f"{topic}-1"]


def test_only_some_of_its_partitions(nsqd: Nsqd, topic: str):
    create(nsqd, topic, 5, partitions="3,1")
    assert [each["topic_partition"] for each in nsqd.stats(topic)["partitions"]] == ["1", "3"]
    create(nsqd, topic, 5, partitions="2")
    assert [each["topic_partition"] for each in nsqd.stats(topic)["partitions"]] == ["1", "2", "3"]


def test_again_is_fine(nsqd: Nsqd, parted: str):
    create(nsqd, parted, 3)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("partition_num=0", "INVALID_ARG_TOPIC_PARTITION_NUM"),
        ("partition_num=256", "INVALID_ARG_TOPIC_PARTITION_NUM"),
        ("partition_num=x", "INVALID_ARG_TOPIC_PARTITION_NUM"),
        ("partition_num=2&replicator=6", "INVALID_ARG_TOPIC_REPLICATOR"),
        ("partition_num=2&partitions=2", "INVALID_ARG_TOPIC_PARTITION"),
        ("partition_num=2&partitions=", "INVALID_ARG_TOPIC_PARTITION"),
        ("partition_num=2&retention=x", "INVALID_ARG_TOPIC_RETENTION_DAYS"),
        ("partition_num=2&syncdisk=x", "INVALID_ARG_TOPIC_SYNC_DISK"),
    ],
)
def test_bad_parameters(nsqd: Nsqd, topic: str, parameters: str, message: str):
    status, said = refusal(nsqd, f"/topic/create?topic={topic}&{parameters}")
    assert (status, said.split(":")[0]) == (400, message)
    assert message == "INVALID_ARG_TOPIC_PARTITION" or "it must be " in said


def test_what_is_there_and_different(nsqd: Nsqd, topic: str, parted: str):
    status, message = refusal(nsqd, f"/topic/create?topic={parted}&partition_num=4")
    assert (status, message) == (400, f"topic {parted} is there already, with other properties: delete it first, "
                                      "or take another name")  # fmt: skip
    nsqd.post("/topic/create?topic=quite-plain")
    assert refusal(nsqd, "/topic/create?topic=quite-plain&partition_num=1")[0] == 400


def test_an_ephemeral_topic_cannot_have_partitions(nsqd: Nsqd, topic: str):
    status, message = refusal(nsqd, f"/topic/create?topic={topic}%23ephemeral&partition_num=1")
    assert (status, "ephemeral" in message) == (400, True)


def test_without_its_parameters_it_is_a_plain_topic(nsqd: Nsqd, topic: str):
    nsqd.post(f"/topic/create?topic={topic}&other=1")
    assert "partitions" not in nsqd.stats(topic)


def test_deleted_with_all_partitions(nsqd: Nsqd, parted: str):
    nsqd.post(f"/topic/delete?topic={parted}")
    assert fatal(nsqd, pub_to(parted, 0, b"x")).startswith("E_TOPIC_NOT_EXIST ")
    nsqd.publish(parted, b"x")
    assert "partitions" not in nsqd.stats(parted), "it is a plain topic now"


# -- publishing --------------------------------------------------------------------------------------------------------


def test_pub_and_mpub_to_a_partition(nsqd: Nsqd, parted: str):
    assert nsqd.post(f"/pub?topic={parted}&partition=1", b"x").body == b"OK"
    assert nsqd.post(f"/mpub?topic={parted}&partition=2", b"a\nb").body == b"OK"
    assert nsqd.post(f"/mpub?topic={parted}&partition=2&binary=true", mpub_body([b"a", b"b"])).body == b"OK"
    assert [row["message_count"] for row in nsqd.stats(parted)["partitions"]] == [0, 1, 4]


def test_minus_1_names_no_partition(nsqd: Nsqd, parted: str):
    nsqd.post(f"/mpub?topic={parted}&partition=-1", b"a\nb")
    assert sum(row["message_count"] for row in nsqd.stats(parted)["partitions"]) == 2


def test_a_multipart_topic_takes_what_names_no_partition(nsqd: Nsqd, topic: str):
    create(nsqd, topic, 2, multipart="true")
    for query in ("", "&partition=-1"):
        nsqd.post(f"/pub?topic={topic}{query}", b"x")
    assert [row["message_count"] for row in nsqd.stats(topic)["partitions"]] == [2, 0]


def test_pub_without_a_partition_goes_round(nsqd: Nsqd, parted: str):
    for _ in range(3):
        nsqd.post(f"/pub?topic={parted}", b"x")
    assert [row["message_count"] for row in nsqd.stats(parted)["partitions"]] == [1, 1, 1]


@pytest.mark.parametrize("path", ["/pub", "/mpub"])
def test_publishing_to_what_is_not_here(nsqd: Nsqd, parted: str, topic: str, path: str):
    for query, status, text in (
        (f"topic={parted}&partition=3", 404, "E_TOPIC_NOT_EXIST"),
        ("topic=no-such-topic&partition=0", 404, "E_TOPIC_NOT_EXIST"),
        (f"topic={parted}&partition=x", 400, "E_BAD_PARTITION"),
    ):
        assert refusal(nsqd, f"{path}?{query}") == (status, text)
        in_envelope = nsqd.request("POST", f"{path}?{query}", b"x")
        assert in_envelope.json == {"status_code": 500, "status_txt": text, "data": None}
        assert in_envelope.status == 500


def test_publishing_to_an_ordered_topic_needs_a_partition(nsqd: Nsqd, topic: str):
    create(nsqd, topic, 2, orderedmulti="true")
    assert refusal(nsqd, f"/pub?topic={topic}") == (400, "E_BAD_PARTITION")


# -- statistics --------------------------------------------------------------------------------------------------------


def test_sums_and_partitions(nsqd: Nsqd, connection: Connection, parted: str):
    nsqd.post(f"/channel/create?topic={parted}&channel=c")
    for number in (0, 1, 1):
        connection.ok(pub_to(parted, number, b"xyz"))
    with consumer(nsqd, parted, rdy_count=2) as waiting:
        waiting.messages(2)
        row = nsqd.stats(parted)
    assert (row["message_count"], row["message_bytes"]) == (3, 9)
    channel = row["channels"][0]
    assert (channel["depth"], channel["in_flight_count"], channel["client_count"]) == (1, 2, 1)
    parts = [each["channels"][0] for each in row["partitions"]]
    assert sum(part["in_flight_count"] for part in parts) == 2
    assert [(part["depth"] + part["in_flight_count"], part["client_count"]) for part in parts] == [
        (1, 1),
        (2, 1),
        (0, 1),
    ]
    assert [each["message_bytes"] for each in row["partitions"]] == [3, 6, 0]
    assert {each["is_leader"] for each in row["partitions"]} == {True}


def test_the_row_of_a_plain_topic_is_nsqs(nsqd: Nsqd, connection: Connection, topic: str):
    connection.ok(pub(topic, b"x"))
    names = {"topic_name", "channels", "depth", "backend_depth", "message_count", "message_bytes", "paused"}
    assert set(nsqd.stats(topic)) == {*names, "e2e_processing_latency"}


# -- order of channels -------------------------------------------------------------------------------------------------


def test_setorder(nsqd: Nsqd, connection: Connection, parted: str):
    nsqd.post(f"/channel/create?topic={parted}&channel=c")
    connection.ok(pub_to(parted, 0, b"a") + pub_to(parted, 0, b"b"), count=2)
    nsqd.post(f"/channel/setorder?topic={parted}&channel=c&order=true")
    assert fatal(nsqd, sub_to(parted, "c", 0)).startswith("E_SUB_ORDER_IS_MUST ")
    with in_order(nsqd, parted, rdy_count=10) as waiting:
        assert placed(waiting.message(), True).body == b"a"
        waiting.nothing_comes()
        nsqd.post(f"/channel/setorder?topic={parted}&channel=c&order=false")
        assert placed(waiting.message(), True).body == b"b"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("channel=c", (400, "INVALID_ARG_ORDER")),
        ("channel=c&order=x", (400, "INVALID_ARG_ORDER")),
        ("order=true", (400, "MISSING_ARG_CHANNEL")),
        ("channel=none&order=true", (404, "CHANNEL_NOT_FOUND")),
    ],
)
def test_bad_setorder(nsqd: Nsqd, parted: str, query: str, expected: tuple[int, str]):
    assert refusal(nsqd, f"/channel/setorder?topic={parted}&{query}") == expected


def test_an_ordered_topic_stays_ordered(nsqd: Nsqd, topic: str):
    create(nsqd, topic, 1, orderedmulti="true")
    nsqd.post(f"/channel/create?topic={topic}&channel=c")
    nsqd.post(f"/channel/setorder?topic={topic}&channel=c&order=false")
    assert fatal(nsqd, sub_to(topic, "c", 0)).startswith("E_SUB_ORDER_IS_MUST ")


# -- what plain tools do with such a topic -----------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["pause", "unpause", "empty"])
def test_administration_is_for_all_partitions(nsqd: Nsqd, connection: Connection, parted: str, what: str):
    nsqd.post(f"/channel/create?topic={parted}&channel=c")
    for number in range(3):
        connection.ok(pub_to(parted, number, b"x"))
    nsqd.post(f"/channel/pause?topic={parted}&channel=c")
    nsqd.post(f"/channel/{what}?topic={parted}&channel=c")
    row = nsqd.stats(parted, "c")
    assert (row["paused"], row["depth"]) == {"pause": (True, 3), "unpause": (False, 3), "empty": (True, 0)}[what]
