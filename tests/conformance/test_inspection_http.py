"""/message/... and /channel/setoffset, peek, skip of nsqd, parameter by parameter (Youzan's HTTP API)."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote

import pytest
from tests.conformance.http_helpers import assert_empty, assert_refused
from tests.integration.daemons import Connection, Nsqd, dpub, mpub_body, req, sized, wait_until

pytestmark = pytest.mark.improvement

GET = ("/message/get", "/channel/peek")
POST = ("/channel/setoffset", "/channel/skip", "/channel/unskip", "/message/finish", "/message/cancel")
OF_CHANNELS = ("/channel/peek", "/channel/setoffset", "/channel/skip", "/channel/unskip", "/message/finish")
PLACES = {"timestamp:0": 8, "virtual_queue:0": 8, "msgcount:0": 8, "msgcount:6": 3, "special:-1": 0}
NO_PLACES = ("", "timestamp", "timestamp:x", "timestamp:-5", "special:0", "offset:1", "msgcount:1:1", "msgcount: 1")


def method_of(path: str) -> str:
    return "GET" if path in GET else "POST"


def filled(nsqd: Nsqd, topic: str, *bodies: bytes, channel: str = "c") -> None:
    nsqd.post(f"/topic/create?topic={topic}")
    nsqd.post(f"/channel/create?topic={topic}&channel={channel}")
    if bodies:
        nsqd.publish(topic, *bodies)


def eight(nsqd: Nsqd, topic: str) -> None:
    filled(nsqd, topic, *(b"m%d" % number for number in range(1, 9)))


def create_partitions(nsqd: Nsqd, topic: str, count: int) -> None:
    nsqd.post(f"/topic/create?topic={topic}&partition_num={count}&replicator=1")
    nsqd.post(f"/channel/create?topic={topic}&channel=c")


def bodies_left(nsqd: Nsqd, topic: str, channel: str = "c") -> list[str]:
    return [row["body"] for row in nsqd.get(f"/channel/peek?topic={topic}&channel={channel}&count=100")["messages"]]


# -- what all of them refuse -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*GET, *POST])
def test_a_topic_is_needed(nsqd: Nsqd, path: str):
    assert_refused(nsqd.request(method_of(path), path), 400, "MISSING_ARG_TOPIC")


@pytest.mark.parametrize("path", [*GET, *POST])
def test_the_topic_must_be_a_name(nsqd: Nsqd, path: str):
    assert_refused(nsqd.request(method_of(path), f"{path}?topic=a%20b"), 400, "INVALID_ARG_TOPIC")


@pytest.mark.parametrize("path", [*GET, *POST])
def test_the_topic_must_be_there(nsqd: Nsqd, topic: str, path: str):
    channel = "&channel=c" if path in OF_CHANNELS else ""
    assert_refused(nsqd.request(method_of(path), f"{path}?topic={topic}{channel}"), 404, "TOPIC_NOT_FOUND")


@pytest.mark.parametrize("path", OF_CHANNELS)
def test_a_channel_is_needed_that_is_there(nsqd: Nsqd, topic: str, path: str):
    filled(nsqd, topic)
    target = f"{path}?topic={topic}"
    assert_refused(nsqd.request(method_of(path), target), 400, "MISSING_ARG_CHANNEL")
    assert_refused(nsqd.request(method_of(path), f"{target}&channel=a%20b"), 400, "INVALID_ARG_CHANNEL")
    assert_refused(nsqd.request(method_of(path), f"{target}&channel=other"), 404, "CHANNEL_NOT_FOUND")


@pytest.mark.parametrize(
    "target",
    [
        "/channel/setoffset?channel=c",
        "/channel/peek?channel=c",
        "/channel/skip?channel=c",
        "/channel/unskip?channel=c",
        "/message/get?search_mode=count&search_pos=1",
        "/message/finish?channel=c&msgid=1",
        "/message/cancel?msgid=1",
    ],
)
def test_a_partition_must_be_one_that_is_here(nsqd: Nsqd, topic: str, target: str):
    eight(nsqd, topic)
    method = method_of(target.partition("?")[0])
    for partition, status, text in (
        ("x", 400, "INVALID_ARG_PARTITION: partition=x, it must be the number of a partition"),
        ("1", 404, f"PARTITION_NOT_FOUND: topic {topic} has here partition 0, not 1"),
    ):
        answer = nsqd.request(method, f"{target}&topic={topic}&partition={partition}", b"msgcount:0")
        assert_refused(answer, status, text)
    assert nsqd.request(method, f"{target}&topic={topic}&partition=0", b"msgcount:0").status == 200


@pytest.mark.parametrize("path", GET)
def test_what_looks_is_a_get(nsqd: Nsqd, path: str):
    assert nsqd.request("POST", path).status == 405


@pytest.mark.parametrize("path", POST)
def test_what_changes_is_a_post(nsqd: Nsqd, path: str):
    assert nsqd.request("GET", path).status == 405


# -- /channel/setoffset ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "left"), PLACES.items(), ids=PLACES)
def test_setoffset_takes_every_kind_of_place(nsqd: Nsqd, topic: str, place: str, left: int):
    eight(nsqd, topic)
    assert_empty(nsqd.request("POST", f"/channel/setoffset?topic={topic}&channel=c", place.encode()))
    assert nsqd.stats(topic, "c")["depth"] == left


@pytest.mark.parametrize("place", NO_PLACES)
def test_setoffset_refuses_what_is_no_place(nsqd: Nsqd, topic: str, place: str):
    eight(nsqd, topic)
    answer = nsqd.request("POST", f"/channel/setoffset?topic={topic}&channel=c", place.encode())
    assert_refused(answer, 400, f"invalid consume offset:{place}")
    assert nsqd.stats(topic, "c")["depth"] == 8


def test_setoffset_refuses_a_long_body(nsqd: Nsqd, topic: str):
    eight(nsqd, topic)
    answer = nsqd.request("POST", f"/channel/setoffset?topic={topic}&channel=c", b"x" * 1000)
    assert_refused(answer, 413, "BODY_TOO_BIG")


def test_setoffset_by_an_offset_that_another_answer_told(nsqd: Nsqd, topic: str):
    eight(nsqd, topic)
    offset = nsqd.get(f"/message/get?topic={topic}&search_mode=id&search_pos=4")["offset"]
    nsqd.post(f"/channel/setoffset?topic={topic}&channel=c", b"virtual_queue:%d" % offset)
    assert bodies_left(nsqd, topic) == ["m4", "m5", "m6", "m7", "m8"]


def test_setoffset_by_a_count_goes_on_with_that_message(nsqd: Nsqd, topic: str):
    eight(nsqd, topic)
    index = nsqd.get(f"/message/get?topic={topic}&search_mode=id&search_pos=4")["queue_cnt_index"]
    nsqd.post(f"/channel/setoffset?topic={topic}&channel=c", b"msgcount:%d" % index)
    assert bodies_left(nsqd, topic) == ["m4", "m5", "m6", "m7", "m8"]


def test_setoffset_by_a_time_in_the_future_is_the_end(nsqd: Nsqd, topic: str):
    eight(nsqd, topic)
    nsqd.post(f"/channel/setoffset?topic={topic}&channel=c", b"timestamp:99999999999")
    assert bodies_left(nsqd, topic) == []


def test_setoffset_of_several_partitions(nsqd: Nsqd, topic: str):
    create_partitions(nsqd, topic, 2)
    for partition in (0, 1):
        with nsqd.connect() as producer:
            producer.ok(b"MPUB %s %d\n%s" % (topic.encode(), partition, sized(mpub_body([b"a", b"b"]))))
    target = f"/channel/setoffset?topic={topic}&channel=c"
    assert_refused(nsqd.request("POST", target, b"msgcount:1"), 400, "MISSING_ARG_PARTITION")
    nsqd.post(f"{target}&partition=1", b"msgcount:2")
    assert nsqd.stats(topic, "c")["depth"] == 3
    nsqd.post(target, b"special:-1")
    assert nsqd.stats(topic, "c")["depth"] == 0
    nsqd.post(target, b"timestamp:0")
    assert nsqd.stats(topic, "c")["depth"] == 4


def test_setoffset_ends_what_is_in_flight(nsqd: Nsqd, topic: str, connection: Connection):
    eight(nsqd, topic)
    connection.subscribe(topic, "c", 2)
    first, _second = connection.messages(2)
    connection.rdy(0)
    connection.settle()
    nsqd.post(f"/channel/setoffset?topic={topic}&channel=c", b"msgcount:0")
    wait_until(lambda: nsqd.stats(topic, "c")["in_flight_count"] == 0)
    connection.finish(first)
    assert connection.error() == f"E_FIN_FAILED FIN {first.id.decode()} failed ID not in flight"
    connection.rdy(8)
    again = connection.messages(8)
    assert [(message.body, message.attempts) for message in again] == [(b"m%d" % n, 1) for n in range(1, 9)]
    connection.finish(*again)
    connection.settle()
    assert nsqd.unfinished(topic, "c") == 0


def test_setoffset_in_memory(nsqd: Nsqd, topic: str, connection: Connection):
    """Of an ephemeral topic and channel with a consumer; another channel keeps what this one has finished."""
    name = f"{topic}#ephemeral"
    with nsqd.connect() as keeper:
        keeper.subscribe(name, "keeps#ephemeral", 0)
        keeper.settle()
        connection.subscribe(name, "c#ephemeral", 8)
        nsqd.publish(name, *(b"m%d" % number for number in range(1, 9)))
        connection.finish(*connection.messages(8))
        connection.settle()
        target = f"/channel/setoffset?topic={quote(name)}&channel=c%23ephemeral"
        offset = nsqd.get(f"/message/get?topic={quote(name)}&search_mode=count&search_pos=7")["offset"]
        for place, first in ((b"msgcount:6", b"m6"), (b"virtual_queue:%d" % offset, b"m7"), (b"timestamp:0", b"m1")):
            nsqd.post(target, place)
            messages = connection.messages(9 - int(first[1:]))
            assert messages[0].body == first
            connection.finish(*messages)
            connection.settle()


# -- /channel/skip -----------------------------------------------------------------------------------------------------


def test_skip_finishes_until_unskip(nsqd: Nsqd, topic: str, connection: Connection):
    eight(nsqd, topic)
    connection.subscribe(topic, "c")
    for _ in range(2):
        assert_empty(nsqd.request("POST", f"/channel/skip?topic={topic}&channel=c"))
    assert nsqd.stats(topic, "c")["skipped"] is True
    assert nsqd.unfinished(topic, "c") == 0
    connection.rdy(10)
    nsqd.publish(topic, b"lost")
    wait_until(lambda: nsqd.unfinished(topic, "c") == 0)
    for _ in range(2):
        assert_empty(nsqd.request("POST", f"/channel/unskip?topic={topic}&channel=c"))
    nsqd.publish(topic, b"found")
    assert connection.message().body == b"found"
    assert "skipped" not in nsqd.stats(topic, "c")


# -- /message/get ------------------------------------------------------------------------------------------------------


def test_message_get_answers_the_fields_of_the_redesigned_nsq(nsqd: Nsqd, topic: str):
    eight(nsqd, topic)
    row = nsqd.get(f"/message/get?topic={topic}&partition=0&search_mode=id&search_pos=3&needext=true")
    names = ["id", "trace_id", "body", "timestamp", "attempts", "offset", "queue_cnt_index", "ext"]
    assert list(row)[:8] == names
    assert (row["id"], row["trace_id"], row["body"], row["attempts"], row["ext"]) == (3, 0, "m3", 1, "")
    assert row["message_id"] == "0000000000000003"


@pytest.mark.parametrize("mode", ["id", "virtual_offset", "count"])
def test_message_get_finds_in_every_way(nsqd: Nsqd, topic: str, mode: str):
    eight(nsqd, topic)
    field = {"id": "id", "virtual_offset": "offset", "count": "queue_cnt_index"}[mode]
    for number in range(1, 9):
        row = nsqd.get(f"/message/get?topic={topic}&search_mode=id&search_pos={number}")
        again = nsqd.get(f"/message/get?topic={topic}&search_mode={mode}&search_pos={row[field]}")
        assert again == row
        assert again["body"] == f"m{number}"


@pytest.mark.parametrize("form", ["3", "0000000000000003", "00000000000000030000000000000000"])
def test_message_get_knows_ids_as_a_number_and_as_consumers_see_them(nsqd: Nsqd, topic: str, form: str):
    eight(nsqd, topic)
    assert nsqd.get(f"/message/get?topic={topic}&search_mode=id&search_pos={form}")["body"] == "m3"


@pytest.mark.parametrize(
    ("query", "status", "text"),
    [
        ("search_pos=1", 400, "MISSING_ARG_SEARCH_MODE"),
        ("search_mode=time&search_pos=1", 400, "INVALID_ARG_SEARCH_MODE"),
        ("search_mode=id", 400, "MISSING_ARG_SEARCH_POS"),
        ("search_mode=id&search_pos=", 400, "INVALID_ARG_SEARCH_POS"),
        ("search_mode=id&search_pos=-1", 400, "INVALID_ARG_SEARCH_POS"),
        ("search_mode=id&search_pos=12345678901234567890", 400, "INVALID_ARG_SEARCH_POS"),
        ("search_mode=count&search_pos=1e3", 400, "INVALID_ARG_SEARCH_POS"),
        ("search_mode=id&search_pos=9", 404, "MESSAGE_NOT_FOUND"),
        ("search_mode=id&search_pos=0", 404, "MESSAGE_NOT_FOUND"),
        ("search_mode=id&search_pos=1125899906842626", 404, "MESSAGE_NOT_FOUND"),
        ("search_mode=count&search_pos=9", 404, "MESSAGE_NOT_FOUND"),
        ("search_mode=virtual_offset&search_pos=1000000", 404, "MESSAGE_NOT_FOUND"),
    ],
)
def test_message_get_refuses(nsqd: Nsqd, topic: str, query: str, status: int, text: str):
    eight(nsqd, topic)
    assert_refused(nsqd.request("GET", f"/message/get?topic={topic}&{query}"), status, text)


def test_message_get_of_several_partitions(nsqd: Nsqd, topic: str):
    create_partitions(nsqd, topic, 2)
    with nsqd.connect() as producer:
        producer.ok(b"PUB %s 1\n%s" % (topic.encode(), sized(b"one")))
    target = f"/message/get?topic={topic}"
    assert_refused(nsqd.request("GET", f"{target}&search_mode=count&search_pos=1"), 400, "MISSING_ARG_PARTITION")
    row = nsqd.get(f"{target}&partition=1&search_mode=virtual_offset&search_pos=0")
    assert (row["body"], row["id"] >> 50) == ("one", 1)
    assert nsqd.get(f"{target}&search_mode=id&search_pos={row['id']}") == row, "an id says which partition"
    assert nsqd.get(f"{target}&search_mode=id&search_pos={row['message_id']}") == row
    answer = nsqd.request("GET", f"{target}&partition=0&search_mode=id&search_pos={row['id']}")
    assert_refused(answer, 404, "MESSAGE_NOT_FOUND")


def test_a_body_that_is_not_text_comes_in_base64_as_well(nsqd: Nsqd, topic: str):
    filled(nsqd, topic, b"\xff\x00\xfe", "ü".encode())
    row = nsqd.get(f"/message/get?topic={topic}&search_mode=id&search_pos=1")
    assert base64.b64decode(row["body_base64"]) == b"\xff\x00\xfe"
    assert row["body"] == "\ufffd\0\ufffd"
    row = nsqd.get(f"/message/get?topic={topic}&search_mode=id&search_pos=2")
    assert row["body"] == "ü" and "body_base64" not in row


# -- /channel/peek -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("what=all", "INVALID_ARG_WHAT"),
        ("count=0", "INVALID_ARG_COUNT"),
        ("count=101", "INVALID_ARG_COUNT"),
        ("count=x", "INVALID_ARG_COUNT"),
        ("max_body=-1", "INVALID_ARG_MAX_BODY"),
        ("max_body=1048577", "INVALID_ARG_MAX_BODY"),
    ],
)
def test_peek_refuses(nsqd: Nsqd, topic: str, query: str, text: str):
    eight(nsqd, topic)
    assert_refused(nsqd.request("GET", f"/channel/peek?topic={topic}&channel=c&{query}"), 400, text)


def test_peek_counts_and_cuts(nsqd: Nsqd, topic: str):
    filled(nsqd, topic, *["grün".encode()] * 12)
    messages = nsqd.get(f"/channel/peek?topic={topic}&channel=c&max_body=3")["messages"]
    assert [(row["body"], row["body_size"]) for row in messages] == [("gr", 5)] * 10
    assert all("body_base64" not in row for row in messages)
    assert len(nsqd.get(f"/channel/peek?topic={topic}&channel=c&count=100")["messages"]) == 12
    (row,) = nsqd.get(f"/channel/peek?topic={topic}&channel=c&count=1&max_body=0")["messages"]
    assert (row["body"], row["body_size"], row["attempts"]) == ("", 5, 0)


def test_peek_shows_every_state(nsqd: Nsqd, topic: str, connection: Connection):
    eight(nsqd, topic)
    connection.ok(dpub(topic, 3_600_000, b"much later"))
    connection.identify(client_id="me", hostname="here")
    connection.subscribe(topic, "c", 4)
    first, second, third, fourth = connection.messages(4)
    connection.rdy(0)
    connection.send(req(first.id, 0) + req(second.id, 30_000) + req(third.id, 120_000))
    connection.settle()
    before = nsqd.stats(topic, "c")

    def peek(what: str) -> list[dict[str, object]]:
        answer = nsqd.get(f"/channel/peek?topic={topic}&channel=c&what={what}")
        assert (answer["topic"], answer["channel"], answer["what"]) == (topic, "c", what)
        messages: list[dict[str, object]] = answer["messages"]
        return messages

    expected = [("m5", 0), ("m1", 1), ("m6", 0), ("m7", 0), ("m8", 0)]
    assert [(row["body"], row["attempts"]) for row in peek("next")] == expected
    (flying,) = peek("in_flight")
    assert (flying["body"], flying["attempts"], flying["message_id"]) == ("m4", 1, fourth.id.decode())
    assert 0 < int(str(flying["timeout_in_ms"])) <= 60_000
    client = flying["client"]
    assert isinstance(client, dict) and (client["client_id"], client["hostname"]) == ("me", "here")
    deferred = peek("deferred")
    assert [(row["body"], row["attempts"]) for row in deferred] == [("m2", 1), ("m3", 1)]
    assert 0 < int(str(deferred[0]["due_in_ms"])) <= 30_000 < int(str(deferred[1]["due_in_ms"])) <= 120_000
    after = nsqd.stats(topic, "c")
    assert json.dumps(after) == json.dumps(before), "nothing has changed"


def test_peek_of_several_partitions(nsqd: Nsqd, topic: str):
    create_partitions(nsqd, topic, 3)
    for partition in range(3):
        with nsqd.connect() as producer:
            producer.ok(b"PUB %s %d\n%s" % (topic.encode(), partition, sized(b"p%d" % partition)))
    assert bodies_left(nsqd, topic) == ["p0", "p1", "p2"]
    rows = nsqd.get(f"/channel/peek?topic={topic}&channel=c&partition=2")["messages"]
    assert [(row["partition"], row["id"] >> 50, row["queue_cnt_index"]) for row in rows] == [(2, 2, 1)]


# -- /message/finish and /message/cancel -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/message/finish", "/message/cancel"])
@pytest.mark.parametrize(
    ("query", "status", "text"),
    [
        ("", 400, "MISSING_ARG_MSGID"),
        ("&msgid=", 400, "INVALID_ARG_MSGID"),
        ("&msgid=x", 400, "INVALID_ARG_MSGID"),
        ("&msgid=-1", 400, "INVALID_ARG_MSGID"),
        ("&msgid=9", 404, "MESSAGE_NOT_FOUND"),
        ("&msgid=0", 404, "MESSAGE_NOT_FOUND"),
        ("&msgid=1125899906842626", 404, "MESSAGE_NOT_FOUND"),
    ],
)
def test_finish_and_cancel_refuse(nsqd: Nsqd, topic: str, path: str, query: str, status: int, text: str):
    eight(nsqd, topic)
    channel = "&channel=c" if path in OF_CHANNELS else ""
    assert_refused(nsqd.request("POST", f"{path}?topic={topic}{channel}{query}"), status, text)


@pytest.mark.parametrize("form", ["3", "0000000000000003"])
def test_finish_takes_one_message_away_once(nsqd: Nsqd, topic: str, form: str):
    eight(nsqd, topic)
    target = f"/message/finish?topic={topic}&channel=c&msgid={form}"
    assert_empty(nsqd.request("POST", target))
    assert bodies_left(nsqd, topic) == ["m1", "m2", "m4", "m5", "m6", "m7", "m8"]
    assert_refused(nsqd.request("POST", target), 404, "MESSAGE_NOT_FOUND")


def test_finish_ends_a_message_in_flight(nsqd: Nsqd, topic: str, connection: Connection):
    eight(nsqd, topic)
    message = connection.subscribe(topic, "c", 1).message()
    connection.rdy(0)
    connection.settle()
    nsqd.post(f"/message/finish?topic={topic}&channel=c&msgid={quote(message.id)}")
    assert nsqd.stats(topic, "c")["in_flight_count"] == 0
    connection.finish(message)
    assert connection.error().startswith("E_FIN_FAILED")


def test_cancel_takes_a_delayed_message_from_every_channel(nsqd: Nsqd, topic: str):
    filled(nsqd, topic)
    nsqd.post(f"/channel/create?topic={topic}&channel=d")
    nsqd.post(f"/pub?topic={topic}&defer=3600000", b"not today")
    wait_until(lambda: nsqd.stats(topic, "d")["deferred_count"] == 1)
    (row,) = nsqd.get(f"/channel/peek?topic={topic}&channel=c&what=deferred")["messages"]
    assert row["body"] == "not today"
    answer = nsqd.post(f"/message/cancel?topic={topic}&msgid={row['id']}")
    assert sorted(answer.json["channels"]) == ["c", "d"]
    assert nsqd.unfinished(topic, "c") == nsqd.unfinished(topic, "d") == 0
    assert_refused(nsqd.request("POST", f"/message/cancel?topic={topic}&msgid={row['id']}"), 404, "MESSAGE_NOT_FOUND")


def test_cancel_needs_a_channel(nsqd: Nsqd, topic: str):
    nsqd.post(f"/topic/create?topic={topic}")
    nsqd.publish(topic, b"x")
    assert_refused(nsqd.request("POST", f"/message/cancel?topic={topic}&msgid=1"), 409, "TOPIC_HAS_NO_CHANNEL")


# -- several messages with one delay -----------------------------------------------------------------------------------


def mdpub(topic: str, delay: bytes, *bodies: bytes) -> bytes:
    return b"MDPUB %s %s\n%s" % (topic.encode(), delay, sized(mpub_body(bodies)))


def test_mdpub_delays_all_of_its_messages(nsqd: Nsqd, topic: str, connection: Connection):
    filled(nsqd, topic)
    connection.ok(mdpub(topic, b"200", b"a", b"b"))
    wait_until(lambda: nsqd.stats(topic, "c")["deferred_count"] == 2)
    connection.subscribe(topic, "c", 5)
    assert sorted(message.body for message in connection.messages(2)) == [b"a", b"b"]


def test_mdpub_to_a_partition(nsqd: Nsqd, topic: str, connection: Connection):
    create_partitions(nsqd, topic, 2)
    connection.ok(mdpub(topic, b"3600000 1", b"a", b"b"))
    rows = nsqd.get(f"/channel/peek?topic={topic}&channel=c&what=deferred")["messages"]
    assert [(row["partition"], row["body"]) for row in rows] == [(1, "a"), (1, "b")]


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (b"MDPUB t\n", "E_INVALID MDPUB insufficient number of parameters"),
        (mdpub("t", b"x", b"a"), "E_INVALID MDPUB could not parse timeout x"),
        (mdpub("t", b"3600001", b"a"), "E_INVALID MDPUB timeout 3600001 out of range 0-3600000"),
        (mdpub("a$b", b"1", b"a"), 'E_BAD_TOPIC MDPUB topic name "a$b" is not valid'),
        (b"MDPUB t 1\n" + sized(b"\0\0\0\0"), "E_BAD_BODY MPUB invalid message count 0"),
    ],
)
def test_mdpub_refuses(connection: Connection, command: bytes, error: str):
    assert connection.error(command) == error
    connection.wait_closed()


def test_mdpub_over_http(nsqd: Nsqd, topic: str):
    filled(nsqd, topic)
    assert nsqd.post(f"/mdpub?topic={topic}&defer=3600000", b"a\nb\n").text == "OK"
    assert nsqd.post(f"/mdpub?topic={topic}&defer=3600000&binary=true", mpub_body([b"c"])).text == "OK"
    wait_until(lambda: nsqd.stats(topic, "c")["deferred_count"] == 3)
    assert_refused(nsqd.request("POST", f"/mdpub?topic={topic}", b"a"), 400, "MISSING_ARG_DEFER")
    for delay in ("", "x", "-1", "3600001"):
        assert_refused(nsqd.request("POST", f"/mdpub?topic={topic}&defer={delay}", b"a"), 400, "INVALID_DEFER")
    assert_refused(nsqd.request("POST", "/mdpub?defer=1", b"a"), 400, "MISSING_ARG_TOPIC")
