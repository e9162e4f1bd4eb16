"""A parameter is obeyed or refused: partition= of channels, and what somebody means who sends it where it does nothing.

Source: Youzan's nsqlookupd, Youzan's HTTP API; what NSQ ignores: NSQ's HTTP API.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.conformance.conftest import is_ours
from tests.conformance.http_helpers import assert_refused
from tests.conformance.protocol_helpers import consumer
from tests.conformance.redesigned_helpers import BARE, consumer_of_all, create, placed, pub_to, sub_to
from tests.integration.daemons import Connection, Nsqd, Nsqlookupd, dpub, wait_until

pytestmark = [
    pytest.mark.improvement,
    pytest.mark.skipif(not is_ours("nsqd") or not is_ours("nsqlookupd"), reason="NSQ has no partitions"),
]

OF_A_PART = ("create", "delete", "empty", "pause", "unpause", "skip", "unskip", "emptydelayed")


@pytest.fixture
def parted(nsqd: Nsqd, connection: Connection, topic: str) -> str:
    """A topic with partitions 0 to 3, a channel, and three messages in each."""
    create(nsqd, topic, 4)
    nsqd.post(f"/channel/create?topic={topic}&channel=c")
    for number in range(4):
        connection.ok(pub_to(topic, number, b"x") * 3, count=3)
    return topic


def parts(nsqd: Nsqd, topic: str) -> list[dict[str, Any]]:
    """The channel in each partition, as Youzan's /stats has it."""
    rows = nsqd.request("GET", f"/stats?format=json&topic={topic}&leaderOnly=true", headers=BARE).json["topics"]
    return [row["channels"][0] if row["channels"] else {} for row in rows]


# -- one partition of a channel ----------------------------------------------------------------------------------------


def test_pause_of_one_partition(nsqd: Nsqd, parted: str):
    nsqd.post(f"/channel/pause?topic={parted}&channel=c&partition=1")
    assert [part["paused"] for part in parts(nsqd, parted)] == [False, True, False, False]
    assert nsqd.stats(parted, "c")["paused"] is False
    with consumer_of_all(nsqd, parted, rdy_count=20) as waiting:
        assert {placed(message).partition for message in waiting.messages(9)} == {0, 2, 3}
        waiting.nothing_comes()
        nsqd.post(f"/channel/unpause?topic={parted}&channel=c&partition=1")
        assert {placed(message).partition for message in waiting.messages(3)} == {1}


def test_pause_without_a_partition_is_for_all(nsqd: Nsqd, parted: str):
    nsqd.post(f"/channel/pause?topic={parted}&channel=c&partition=1")
    nsqd.post(f"/channel/pause?topic={parted}&channel=c")
    assert [part["paused"] for part in parts(nsqd, parted)] == [True] * 4
    nsqd.post(f"/channel/unpause?topic={parted}&channel=c")
    assert [part["paused"] for part in parts(nsqd, parted)] == [False] * 4


def test_empty_of_one_partition(nsqd: Nsqd, parted: str):
    nsqd.post(f"/channel/empty?topic={parted}&channel=c&partition=1")
    assert [part["depth"] for part in parts(nsqd, parted)] == [3, 0, 3, 3]
    assert nsqd.stats(parted, "c")["depth"] == 9


def test_skip_of_one_partition(nsqd: Nsqd, connection: Connection, parted: str):
    nsqd.post(f"/channel/skip?topic={parted}&channel=c&partition=2")
    assert [part["skipped"] for part in parts(nsqd, parted)] == [False, False, True, False]
    wait_until(lambda: [part["depth"] for part in parts(nsqd, parted)] == [3, 3, 0, 3], "what is skipped")
    nsqd.post(f"/channel/unskip?topic={parted}&channel=c&partition=2")
    connection.ok(pub_to(parted, 2, b"x"))
    assert [part["depth"] for part in parts(nsqd, parted)] == [3, 3, 1, 3]


def test_delete_of_one_partition(nsqd: Nsqd, connection: Connection, parted: str):
    with nsqd.connect() as whole, nsqd.connect() as other:
        whole.ok(sub_to(parted, "c", 1))
        other.ok(sub_to(parted, "c", 2))
        nsqd.post(f"/channel/delete?topic={parted}&channel=c&partition=1")
        assert whole.wait_closed() == []
        other.rdy(1)
        assert placed(other.message()).partition == 2
    assert [part == {} for part in parts(nsqd, parted)] == [False, True, False, False]
    assert nsqd.stats(parted, "c")["depth"] == 9
    nsqd.post(f"/channel/create?topic={parted}&channel=c&partition=1")
    connection.ok(pub_to(parted, 1, b"x"))
    assert [part["depth"] for part in parts(nsqd, parted)] == [3, 1, 3, 3]
    for number in range(4):
        nsqd.post(f"/channel/delete?topic={parted}&channel=c&partition={number}")
    assert nsqd.stats(parted)["channels"] == []


def test_one_partition_over_a_restart(shared_daemons: Any, topic: str):
    nsqd = shared_daemons.nsqd("--durability=os")
    create(nsqd, topic, 3)
    nsqd.post(f"/channel/create?topic={topic}&channel=c")
    nsqd.post(f"/channel/pause?topic={topic}&channel=c&partition=0")
    nsqd.post(f"/channel/skip?topic={topic}&channel=c&partition=1")
    nsqd.post(f"/channel/delete?topic={topic}&channel=c&partition=2")
    nsqd.kill()
    nsqd.start()
    found = [(part.get("paused"), part.get("skipped")) for part in parts(nsqd, topic)]
    assert found == [(True, False), (False, True), (None, None)]


@pytest.mark.parametrize("action", OF_A_PART)
def test_a_partition_that_cannot_be(nsqd: Nsqd, parted: str, action: str):
    target = f"/channel/{action}?topic={parted}&channel=c&partition="
    missing = f"PARTITION_NOT_FOUND: topic {parted} has here partitions 0 to 3, not 9"
    assert_refused(nsqd.request("POST", target + "9"), 404, missing)
    for word in ("abc", "-1", "", "1.0", "1024"):
        text = f"INVALID_ARG_PARTITION: partition={word}, it must be the number of a partition"
        assert_refused(nsqd.request("POST", target + word), 400, text)
    assert [(part["depth"], part["paused"]) for part in parts(nsqd, parted)] == [(3, False)] * 4


def test_partitions_that_are_elsewhere_are_named(nsqd: Nsqd, topic: str):
    create(nsqd, topic, 5, partitions="1,4")
    nsqd.post(f"/channel/create?topic={topic}&channel=c")
    answer = nsqd.request("POST", f"/channel/pause?topic={topic}&channel=c&partition=2")
    assert_refused(answer, 404, f"PARTITION_NOT_FOUND: topic {topic} has here partitions 1, 4, not 2")


def test_a_plain_topic_has_partition_0(nsqd: Nsqd, topic: str):
    nsqd.publish(topic, b"x")
    nsqd.post(f"/channel/create?topic={topic}&channel=c&partition=0")
    nsqd.post(f"/channel/pause?topic={topic}&channel=c&partition=0")
    assert nsqd.stats(topic, "c")["paused"] is True
    answer = nsqd.request("POST", f"/channel/pause?topic={topic}&channel=c&partition=1")
    assert_refused(answer, 404, f"PARTITION_NOT_FOUND: topic {topic} has here partition 0, not 1")


# -- emptydelayed ------------------------------------------------------------------------------------------------------


def test_what_is_deferred_can_be_dropped(nsqd: Nsqd, connection: Connection, topic: str):
    """Short delays, which stay in memory, and long ones, which do not; what waits or is in flight stays."""
    with consumer(nsqd, topic, rdy_count=4) as waiting:
        connection.ok(b"".join(dpub(topic, delay_ms, b"later") for delay_ms in (60_000, 3_600_000, 900_000)), count=3)
        nsqd.publish(topic, b"now", b"soon", b"again")
        held = waiting.messages(3)
        waiting.send(b"REQ %s 50000\nREQ %s 3500000\n" % (held[1].id, held[2].id))
        wait_until(lambda: nsqd.stats(topic, "c")["deferred_count"] == 5, "what is deferred")
        nsqd.post(f"/channel/emptydelayed?topic={topic}&channel=c&partition=0")
        row = nsqd.stats(topic, "c")
        assert (row["deferred_count"], row["in_flight_count"], row["depth"]) == (0, 1, 0)
        waiting.finish(held[0])
        nsqd.publish(topic, b"next")
        assert waiting.message().body == b"next"


def test_what_was_dropped_does_not_come_back(shared_daemons: Any, topic: str):
    nsqd = shared_daemons.nsqd("--durability=os")
    with consumer(nsqd, topic, rdy_count=4) as waiting, nsqd.connect() as connection:
        connection.ok(dpub(topic, 3_600_000, b"far") + dpub(topic, 60_000, b"near"), count=2)
        wait_until(lambda: nsqd.stats(topic, "c")["deferred_count"] == 2, "what is deferred")
        nsqd.post(f"/channel/emptydelayed?topic={topic}&channel=c")
        waiting.nothing_comes()
    nsqd.kill()
    nsqd.start()
    row = nsqd.stats(topic, "c")
    assert (row["deferred_count"], row["depth"]) == (0, 0)


# -- what is not obeyed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "target", "name", "takes"),
    [
        ("POST", "/topic/pause?topic=t&partition=1", "partition", "topic"),
        ("POST", "/topic/delete?topic=t&partition=**", "partition", "topic"),
        ("POST", "/topic/empty?topic=t&partition=0", "partition", "topic"),
        ("POST", "/topic/delete?topic=t&dry_run=true", "dry_run", "topic"),
        ("POST", "/channel/empty?topic=t&channel=c&dry_run=true", "dry_run", "topic, channel, partition"),
        ("POST", "/channel/setorder?topic=t&channel=c&order=true&partition=1", "partition", "topic, channel, order"),
        ("POST", "/message/trace/enable?topic=t&slow=true", "slow", "topic, channel, only"),
        ("POST", "/message/cancel?topic=t&msgid=1&channel=c", "channel", "topic, partition, msgid"),
        ("GET", "/topic/settings?topic=t&channel=c", "channel", "topic"),
        ("POST", "/pubtrace?topic=t&trace_id=1&defer=5", "defer", "topic, partition, trace_id"),
        ("POST", "/pubtrace?topic=t&trace_id=1&ext={}", "ext", "topic, partition, trace_id"),
        ("POST", "/topic/meta/update?topic=t&partition_num=2", "partition_num",
         "topic, retention, syncdisk, upgradeext, disable_channel_auto_create, replicator, version"),
    ],
)  # fmt: skip
def test_what_nsqd_does_not_obey(nsqd: Nsqd, method: str, target: str, name: str, takes: str):
    what = f"{method} {target.partition('?')[0]}"
    text = f"INVALID_ARG_{name.upper()}: {what} does not take {name}; it takes {takes}"
    assert_refused(nsqd.request(method, target), 400, text)


@pytest.mark.parametrize("target", ["/drain?topic=t", "/metrics?topic=t", "/damage?topic=t"])
def test_what_takes_nothing(nsqd: Nsqd, target: str):
    status, message = nsqd.request("GET", target).error
    assert status == 400 and message.endswith("; it takes no parameters")


def test_a_publish_refuses_in_its_own_form(nsqd: Nsqd, topic: str):
    answer = nsqd.request("POST", f"/pub_ext?topic={topic}&ext={{}}&sequence=1", b"x")
    assert (answer.status, answer.json["status_code"]) == (500, 500)
    assert answer.json["status_txt"].startswith("INVALID_ARG_SEQUENCE: POST /pub_ext does not take sequence; ")
    answer = nsqd.request("POST", f"/pubtrace?topic={topic}&trace_id=1&sequence=1", b"x")
    assert answer.error[0] == 400 and answer.error[1].startswith("INVALID_ARG_SEQUENCE: ")
    assert topic not in [row["topic_name"] for row in nsqd.get("/stats?format=json")["topics"]]


_ELSEWHERE = "&".join(
    f"{word}=1"
    for word in (
        "timeout", "count", "limit", "ext", "trace_id", "needext", "access", "metainfo", "consistent", "metaInfo",
        "ready", "client_prefix", "slow", "loglevel", "upgradeext", "order", "force", "enable", "max_body", "what",
        "msgid", "only", "lagging", "search_mode", "topn", "node", "remove_node", "move_to", "restore",
    )
)  # fmt: skip
"""Parameters of other requests, all of them numbers that these other requests refuse or obey."""


@pytest.mark.parametrize(
    "target",
    ["POST /pub?topic=", "POST /mpub?topic=", "POST /topic/create?topic=", "POST /topic/pause?topic=",
     "POST /topic/unpause?topic=", "POST /channel/create?channel=c&topic=", "POST /channel/pause?channel=c&topic=",
     "POST /channel/empty?channel=c&topic=", "GET /stats?format=json&topic=", "GET /info?topic="],
)  # fmt: skip
def test_nsqd_ignores_the_parameters_of_other_requests_as_nsq_does(nsqd: Nsqd, topic: str, target: str):
    nsqd.post(f"/topic/create?topic={topic}")
    nsqd.post(f"/channel/create?topic={topic}&channel=c")
    method, _, path = target.partition(" ")
    answer = nsqd.request(method, f"{path}{topic}&{_ELSEWHERE}", b"x" if "pub" in path else b"")
    assert answer.status == 200, answer.body


def test_a_publish_with_what_only_other_publishes_take_is_stored_plain(nsqd: Nsqd, topic: str):
    """As by the redesigned NSQ: without headers and trace id, also where the topic has room for them."""
    create(nsqd, topic, 1, extend="true")
    nsqd.post(f"/pub?topic={topic}&trace_id=x&ext=%7B%22a%22:%221%22%7D", b"one")
    nsqd.post(f"/mpub?topic={topic}&trace_id=5&ext=%7B", b"two")
    for count, body in enumerate(("one", "two"), 1):
        row = nsqd.get(f"/message/get?topic={topic}&search_mode=count&search_pos={count}&needext=true")
        assert (row["body"], row["trace_id"], row.get("ext", "")) == (body, 0, "")


@pytest.mark.parametrize("more", ["ts=5", "_=1700000000", "other=1", "format=json", "channel=c", "PARTITION=9"])
def test_names_that_nobody_knows_are_ignored(nsqd: Nsqd, topic: str, more: str):
    """As by NSQ, and NSQ's own where NSQ ignores them."""
    nsqd.post(f"/topic/create?topic={topic}&{more}")
    nsqd.post(f"/pub?topic={topic}&{more}", b"x")
    assert nsqd.get(f"/info?{more}")["flintmq_version"]
    assert nsqd.request("GET", f"/ping?{more}&partition=1").body == b"OK"


@pytest.mark.parametrize(
    "parameter", ["orderedmulti=yes", "multipart=1", "extend=True", "disable_channel_auto_create=on"]
)
def test_switches_are_true_or_false(nsqd: Nsqd, nsqlookupd: Nsqlookupd, topic: str, parameter: str):
    name, _, value = parameter.partition("=")
    text = f"INVALID_ARG_TOPIC_{name.upper()}: {name}={value}, it must be true or false"
    for daemon in (nsqd, nsqlookupd):
        assert daemon.request("POST", f"/topic/create?topic={topic}&partition_num=1&{parameter}").error == (400, text)
    create(nsqd, topic, 1, **{name: "false"})


@pytest.mark.parametrize(
    ("method", "target", "name"),
    [
        ("POST", "/channel/delete?topic=t&channel=c&dry_run=true", "dry_run"),
        ("POST", "/topic/create?topic=t&min_in_sync=2", "min_in_sync"),
        ("POST", "/topic/delete?topic=t&force=true", "force"),
        ("POST", "/channel/create?topic=t&channel=c&partition=1", "partition"),
        ("POST", "/topic/tombstone?topic=t&node=a:1&partition=1", "partition"),
        ("POST", "/topic/meta/update?topic=t&partition_num=2", "partition_num"),
    ],
)
def test_what_nsqlookupd_does_not_obey(nsqlookupd: Nsqlookupd, method: str, target: str, name: str):
    status, message = nsqlookupd.request(method, target).error
    assert status == 400
    assert message.startswith(f"INVALID_ARG_{name.upper()}: {method} {target.partition('?')[0]} does not take {name}; ")


def test_nsqlookupd_ignores_what_nobody_knows(nsqlookupd: Nsqlookupd, topic: str):
    for target in (f"/topic/create?topic={topic}&channel=c&x=1", f"/topic/delete?topic={topic}&ts=2"):
        nsqlookupd.post(target)
    assert "topics" in nsqlookupd.get("/topics?topic=t&format=json&y=2")


@pytest.mark.parametrize(
    "target",
    ["GET /topics?topic=", "GET /channels?topic=", "GET /lookup?topic=", "GET /nodes?topic=", "GET /debug?topic=",
     "GET /info?topic=", "POST /topic/create?topic=", "POST /channel/create?channel=d&topic=",
     "POST /channel/delete?channel=c&topic=", "POST /topic/delete?topic="],
)  # fmt: skip
def test_nsqlookupd_ignores_the_parameters_of_other_requests_as_nsq_does(
    nsqlookupd: Nsqlookupd, topic: str, target: str
):
    nsqlookupd.post(f"/channel/create?topic={topic}&channel=c")
    words = "enable=1&loglevel=1&upgradeext=1&topn=1&move_to=1&remove_node=1&restore=1&node=1&type=1"
    method, _, path = target.partition(" ")
    answer = nsqlookupd.request(method, f"{path}{topic}&{words}")
    assert answer.status == 200, answer.body


def test_questions_of_nsqlookupd_ignore_a_partition_that_they_do_not_choose_by(nsqlookupd: Nsqlookupd):
    assert nsqlookupd.get("/nodes?partition=1&retention=3") == {"producers": []}
    assert nsqlookupd.get("/topics?access=w&partition=1") is not None
