"""Answers in the form of Youzan's NSQ: for requests that show it, and for all with --http-style=youzan.

Source: Youzan's HTTP API; statuses, envelopes and fields of v0.3.7-HA.1.13.0, run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.conformance.conftest import is_ours
from tests.conformance.protocol_helpers import consumer
from tests.conformance.redesigned_helpers import BARE, create, pub_to, sub_to
from tests.integration.daemons import Connection, Daemons, Nsqd, Nsqlookupd, pub, wait_until

pytestmark = [
    pytest.mark.improvement,
    pytest.mark.skipif(not is_ours("nsqd") or not is_ours("nsqlookupd"), reason="NSQ answers in one form"),
]

TOPIC_FIELDS = {
    "topic_name", "topic_full_name", "topic_partition", "channels", "channel_num", "depth", "backend_depth",
    "backend_start", "message_count", "is_leader", "hourly_pubsize", "client_pub_stats", "client_num", "msg_size_stats",
    "msg_write_latency_stats", "is_multi_ordered", "is_multi_part", "is_ext", "is_channel_auto_create_disabled",
    "statsd_name", "pub_failed_cnt", "e2e_processing_latency",
}  # fmt: skip
CHANNEL_FIELDS = {
    "channel_name", "backlogs", "depth", "depth_size", "depth_ts", "depth_ts_nano", "backend_depth", "in_flight_count",
    "deferred_count", "deferred_from_delay_count", "message_count", "requeue_count", "timeout_count", "clients",
    "client_num", "paused", "skipped", "zan_test_skipped", "delayed_queue_count", "delayed_queue_recent",
    "delayed_queue_recent_nano", "e2e_processing_latency", "msg_consume_latency_stats", "msg_delivery_latency_stats",
}  # fmt: skip
ALONE = ("partition=1", "leaderOnly=true", "needClients=false")


@pytest.fixture(scope="module")
def youzan(shared_daemons: Daemons) -> Iterator[Nsqd]:
    """An nsqd that answers everything as Youzan's."""
    yield shared_daemons.nsqd("--durability=os", "--http-style=youzan")


@pytest.fixture
def parted(nsqd: Nsqd, topic: str) -> str:
    return create(nsqd, topic, 3)


def rows(nsqd: Nsqd, query: str) -> list[dict[str, Any]]:
    """Topics of /stats, out of the envelope."""
    answer = nsqd.request("GET", f"/stats?format=json&{query}")
    assert (answer.status, answer.json["status_code"], answer.json["status_txt"]) == (200, 200, "OK")
    found = answer.json["data"]["topics"]
    assert nsqd.request("GET", f"/stats?format=json&{query}", headers=BARE).json["topics"] == found
    assert isinstance(found, list)
    return found


# -- /stats ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ALONE)
def test_a_parameter_of_youzans_alone_asks_for_its_form(nsqd: Nsqd, parted: str, word: str):
    nsqd.post(f"/channel/create?topic={parted}&channel=c")
    found = rows(nsqd, f"topic={parted}&{word}")
    wanted = ["1"] if word == "partition=1" else ["0", "1", "2"]
    assert [row["topic_partition"] for row in found] == wanted
    assert [row["topic_full_name"] for row in found] == [f"{parted}-{number}" for number in wanted]
    for row in found:
        assert set(row) >= TOPIC_FIELDS
        assert [set(channel) for channel in row["channels"]] == [CHANNEL_FIELDS]


def test_without_them_it_is_nsqs(nsqd: Nsqd, parted: str):
    answer = nsqd.get(f"/stats?format=json&topic={parted}")
    assert "status_code" not in answer
    assert [row["topic_name"] for row in answer["topics"]] == [parted]


def test_what_a_partition_and_its_channel_have(nsqd: Nsqd, connection: Connection, parted: str):
    nsqd.post(f"/channel/create?topic={parted}&channel=c")
    connection.ok(pub_to(parted, 1, b"hello") * 3, count=3)
    frame_bytes = 34 + 5  # as it is stored: size, type, timestamp, attempts, id, body
    with nsqd.connect() as waiting:
        waiting.ok(sub_to(parted, "c", 1))
        waiting.rdy(1)
        waiting.message()
        (row,) = rows(nsqd, f"topic={parted}&partition=1")
        names = ("depth", "backend_depth", "backend_start", "message_count", "channel_num", "client_num")
        assert [row[name] for name in names] == [3 * frame_bytes, 3 * frame_bytes, 0, 3, 1, 1]
        assert (row["is_leader"], row["is_multi_ordered"], row["is_multi_part"], row["is_ext"]) == (True, *[False] * 3)
        (publisher,) = row["client_pub_stats"]
        assert (publisher["pub_count"], publisher["protocol"]) == (3, "tcp")
        (channel,) = row["channels"]
        names = ("backlogs", "depth", "depth_size", "in_flight_count", "message_count", "client_num")
        assert [channel[name] for name in names] == [2, 3, 3 * frame_bytes, 1, 3, 1]
        assert channel["depth_ts_nano"] > 0 and channel["depth_ts"].endswith(" +0000 UTC")
        assert channel["clients"][0]["in_flight_count"] == 1
    assert [row["depth"] for row in rows(nsqd, f"topic={parted}&leaderOnly=true")] == [0, 3 * frame_bytes, 0]


def test_what_is_set_aside_is_in_the_delayed_queue(nsqd: Nsqd, connection: Connection, topic: str):
    with consumer(nsqd, topic, rdy_count=2) as waiting:
        connection.ok(pub(topic, b"a") + pub(topic, b"b"), count=2)
        held = waiting.messages(2)
        waiting.send(b"REQ %s 3600000\nREQ %s 20000\n" % (held[0].id, held[1].id))
        wait_until(lambda: nsqd.stats(topic, "c")["deferred_count"] == 2, "what is deferred")
    channel = rows(nsqd, f"topic={topic}&partition=0")[0]["channels"][0]
    assert channel["deferred_count"] + channel["delayed_queue_count"] == 2
    assert channel["delayed_queue_count"] >= 1
    assert channel["delayed_queue_recent_nano"] > 0


def test_clients_come_with_a_topic_or_when_asked_for(nsqd: Nsqd, parted: str):
    with consumer(nsqd, parted):
        for query, has_clients in (
            (f"topic={parted}&leaderOnly=true", True),
            ("leaderOnly=true", False),
            ("needClients=true", True),
            (f"topic={parted}&needClients=false", False),
        ):
            found = [row for row in rows_once(nsqd, query) if row["topic_name"] == parted]
            assert [bool(row["channels"][0]["clients"]) for row in found] == [has_clients] * 3, query


def rows_once(nsqd: Nsqd, query: str) -> list[dict[str, Any]]:
    found = nsqd.request("GET", f"/stats?format=json&{query}", headers=BARE).json["topics"]
    assert isinstance(found, list)
    return found


def test_a_plain_topic_is_partition_0(nsqd: Nsqd, topic: str):
    nsqd.publish(topic, b"x")
    (row,) = rows(nsqd, f"topic={topic}&partition=0")
    assert (row["topic_full_name"], row["message_count"]) == (f"{topic}-0", 1)
    assert rows(nsqd, f"topic={topic}&partition=7") == []
    assert rows(nsqd, "topic=no-such-topic&partition=0") == []


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("partition=x", "INVALID_ARG_PARTITION: partition=x, it must be the number of a partition"),
        ("leaderOnly=maybe", "INVALID_ARG_LEADERONLY: leaderOnly=maybe, it must be true or false"),
        ("needClients=2", "INVALID_ARG_NEEDCLIENTS: needClients=2, it must be true or false"),
    ],
)
def test_values_that_cannot_be(nsqd: Nsqd, query: str, text: str):
    answer = nsqd.request("GET", f"/stats?format=json&{query}")
    assert (answer.status, answer.json) == (500, {"status_code": 500, "status_txt": text, "data": None})
    assert nsqd.request("GET", f"/stats?format=json&{query}", headers=BARE).error == (400, text)


def test_as_text(nsqd: Nsqd, parted: str):
    text = nsqd.request("GET", f"/stats?topic={parted}&partition=2").text
    assert f"[{parted}-2" in text and f"[{parted}-1" not in text


# -- --http-style=youzan -----------------------------------------------------------------------------------------------


def test_the_style_of_youzan_is_for_everything_negotiated(youzan: Nsqd, topic: str):
    create(youzan, topic, 2)
    assert [row["topic_partition"] for row in rows(youzan, f"topic={topic}")] == ["0", "1"]
    for target in ("/info", "/stats?format=json"):
        assert youzan.request("GET", target).json["status_code"] == 200
        assert "status_code" not in youzan.request("GET", target, headers=BARE).json
    assert youzan.post(f"/pub?topic={topic}", b"x").body == b"OK"
    assert youzan.post(f"/mpub?topic={topic}", b"x\ny").body == b"OK"


@pytest.mark.parametrize("path", ["/pub", "/mpub"])
def test_errors_of_publishing_in_that_style(youzan: Nsqd, path: str):
    answer = youzan.request("POST", f"{path}?topic=no!", b"x")
    assert (answer.status, answer.json) == (500, {"status_code": 500, "status_txt": "INVALID_TOPIC", "data": None})
    assert youzan.request("POST", f"{path}?topic=no!", b"x", BARE).error == (400, "INVALID_TOPIC")


def test_administration_is_bare_in_that_style_as_well(youzan: Nsqd, topic: str):
    assert youzan.request("POST", f"/channel/pause?topic={topic}&channel=c").error == (404, "TOPIC_NOT_FOUND")
    assert youzan.post(f"/topic/create?topic={topic}").body == b""


def test_nsqlookupd_in_that_style(shared_daemons: Daemons):
    nsqlookupd: Nsqlookupd = shared_daemons.nsqlookupd("--http-style=youzan")
    nsqlookupd.post("/topic/create?topic=t")
    for target, data in (
        ("/topics", {"topics": ["t"]}),
        ("/channels?topic=t", {"channels": []}),
        ("/nodes", {"producers": []}),
        ("/lookup?topic=t", {"channels": [], "producers": []}),
        ("/lookup?topic=none", {"channels": [], "producers": []}),
    ):
        assert nsqlookupd.get(target) == {"status_code": 200, "status_txt": "OK", "data": data}
        bare = nsqlookupd.request("GET", target, headers=BARE)
        assert bare.json == data
    assert nsqlookupd.get("/info")["data"]["flintmq_version"]


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_server_stats(nsqd: Nsqd):
    answer = nsqd.get("/serverstats")
    assert set(answer) == {"version", "health", "start_time", "server_pub_failed"}
    assert (answer["health"], answer["server_pub_failed"]) == ("OK", 0)


def test_the_state_of_a_channel(nsqd: Nsqd, parted: str):
    nsqd.post(f"/channel/create?topic={parted}&channel=c")
    text = nsqd.request("GET", f"/message/stats?topic={parted}&channel=c").text
    assert [line.split()[:4] for line in text.splitlines()] == [
        ["topic", parted, "partition", str(n)] for n in range(3)
    ]
    text = nsqd.request("GET", f"/message/stats?topic={parted}&channel=c&partition=1").text
    assert text.startswith(f"topic {parted} partition 1 channel c floor=1 next=1 end=1 ")
    assert nsqd.request("GET", f"/message/stats?topic={parted}&channel=x").error == (404, "CHANNEL_NOT_FOUND")


def test_hourly_sizes(nsqd: Nsqd, parted: str):
    assert nsqd.get(f"/message/historystats?topic={parted}&partition=1") == {"hourly_pub_size": [0] * 22}
    assert nsqd.request("GET", f"/message/historystats?topic={parted}").error == (400, "MISSING_ARG_PARTITION")
    assert nsqd.request("GET", "/message/historystats?partition=1").error == (400, "MISSING_ARG_TOPIC")
    found = nsqd.get("/message/historystats")["node_hourly_pub_size_stats"]
    assert {"topic_name": parted, "topic_partition": "2", "hourly_pub_size": 0} in found


def test_clients_can_be_limited(nsqd: Nsqd, topic: str):
    nsqd.publish(topic, *(b"%d" % number for number in range(6)))
    target = f"/channel/setclientlimit?topic={topic}&channel=c"
    with nsqd.connect() as waiting:
        waiting.subscribe(topic, "c", 0)
        nsqd.post(f"{target}&ready=2&client_prefix=127.")
        waiting.rdy(5)
        held = waiting.messages(2)
        waiting.nothing_comes()
        nsqd.post(f"{target}&ready=1000&client_prefix=10.9.")
        waiting.nothing_comes()
        nsqd.post(f"{target}&ready=4")
        held += waiting.messages(2)
        nsqd.post(f"{target}&ready=0")
        waiting.finish(*held)
        waiting.nothing_comes()
        nsqd.post(f"{target}&ready=1000")
        assert len(waiting.messages(2)) == 2
    for word in ("", "x", "-1", "1.5"):
        status, message = nsqd.request("POST", f"{target}&ready={word}").error
        assert status == 400 and message.startswith("INVALID_OPTION: ")


@pytest.mark.parametrize("level", ["0", "1", "2", "3", "4", "info"])
def test_the_log_level(nsqd: Nsqd, nsqlookupd: Nsqlookupd, level: str):
    for daemon in (nsqd, nsqlookupd):
        assert daemon.post(f"/loglevel/set?loglevel={level}").body == b""
    assert nsqd.get("/config/log_level") == {"0": 4, "1": 3, "2": 2, "3": 1, "4": 1, "info": 2}[level]
    nsqd.post("/loglevel/set?loglevel=info")
    nsqlookupd.post("/loglevel/set?loglevel=info")


def test_log_levels_that_are_none(nsqd: Nsqd, nsqlookupd: Nsqlookupd):
    for daemon in (nsqd, nsqlookupd):
        assert daemon.request("POST", "/loglevel/set").error == (400, "MISSING_ARG_LEVEL")
        status, message = daemon.request("POST", "/loglevel/set?loglevel=9").error
        assert status == 400 and message.startswith("BAD_LEVEL_STRING: loglevel=9, it must be 0 (errors) to 4 ")


def test_the_log_level_is_not_for_everybody(shared_daemons: Daemons):
    nsqd = shared_daemons.nsqd("--durability=os", "--allow-config-from-cidr=10.9.8.7/32")
    assert nsqd.request("POST", "/loglevel/set?loglevel=0").error == (403, "FORBIDDEN")
