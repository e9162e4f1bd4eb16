"""A topic that is there gets headers while nsqd runs: ``/topic/meta/update?upgradeext=true`` (docs/headers.md)."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
from tests.conformance.redesigned_helpers import (
    LOCATION,
    Extended,
    extended,
    headed,
    one,
    placed,
    pub_to,
    several,
    stored,
    sub_to,
    traced,
)
from tests.integration.daemons import (
    PATIENCE_S,
    Closed,
    Connection,
    Daemons,
    Message,
    Nsqd,
    Nsqlookupd,
    dpub,
    mpub_body,
    pub,
    req,
    wait_until,
)
from tests.integration.flavours import Flavour

UPGRADE = "/topic/meta/update?topic=t&upgradeext=true"
LIKE_HEADERS = (
    b"\x02\x00\x01bdy"  # an old body that would be a tag and a body, were it taken for a message with headers
)
EMPTY = Extended(0, b"", b"")
LONG_MS = 15 * 60 * 1000


def lookup_flag(nsqlookupd: Nsqlookupd) -> str:
    return f"--lookupd-tcp-address=127.0.0.1:{nsqlookupd.tcp[1]}"


def knowing(nsqd: Nsqd, rdy_count: int = 100, channel: str = "c", **fields: Any) -> Connection:
    connection = nsqd.connect()
    connection.identify(extend_support=True, **fields)
    return connection.subscribe("t", channel, rdy_count)


def bodies_of(found: list[Message]) -> list[Extended]:
    return sorted((extended(each.body) for each in found), key=lambda each: each.body)


def peeked(nsqd: Nsqd, what: str) -> list[tuple[str, str, int]]:
    rows = nsqd.get(f"/channel/peek?topic=t&channel=c&what={what}&count=100")["messages"]
    return [(row["body"], row["ext"], row["body_size"]) for row in rows]


@pytest.mark.parametrize("partition_num", [0, 1])
def test_nothing_is_lost_over_kill_9(daemons: Daemons, partition_num: int):
    """What waits, is in flight, or is set aside for long keeps its body; what comes behind it has headers."""
    nsqd = daemons.nsqd("--durability=os", "--max-req-timeout=1h")
    nsqd.post(f"/topic/create?topic=t{f'&partition_num={partition_num}' if partition_num else ''}")
    nsqd.post("/channel/create?topic=t&channel=c")
    nsqd.publish("t", b"aside")
    old = nsqd.connect().subscribe("t", "c", 1)
    old.send(req(old.message().id, LONG_MS))  # goes to the database
    wait_until(lambda: nsqd.stats("t", "c")["deferred_count"] == 1)
    for number in range(3):
        nsqd.publish("t", b"flight%d" % number)
        old.message()
        old.rdy(number + 2)
    with nsqd.connect() as connection:
        connection.ok(dpub("t", 300, LIKE_HEADERS + b"later"))
        connection.ok(dpub("t", LONG_MS, LIKE_HEADERS + b"much later"))
    old.close()
    nsqd.publish("t", LIKE_HEADERS, b"waits")
    nsqd.post(UPGRADE)
    assert nsqd.stats("t")["extend_support"] is True
    with nsqd.connect() as connection:
        connection.ok(one("PUB_EXT", "t", 0, headed({"k": "new"}, b"new")))
        connection.ok(pub("t", b"new plain"))
    for _ in range(2):
        nsqd.kill()
        nsqd.start()
        assert nsqd.stats("t")["extend_support"] is True
        assert ("aside", "", 5) in peeked(nsqd, "deferred")
        with knowing(nsqd) as consumer:
            found = bodies_of(consumer.messages(8))
        assert found == sorted(
            [
                *(EMPTY._replace(body=body) for body in (b"flight0", b"flight1", b"flight2", b"waits", b"new plain")),
                *(EMPTY._replace(body=body) for body in (LIKE_HEADERS, LIKE_HEADERS + b"later")),
                Extended(4, b'{"k": "new"}', b"new"),
            ],
            key=lambda each: each.body,
        )
        wait_until(lambda: nsqd.stats("t", "c")["in_flight_count"] == 0)
    assert len(peeked(nsqd, "next")) == 8
    with knowing(nsqd) as consumer:
        consumer.finish(*consumer.messages(8))
        wait_until(lambda: nsqd.stats("t", "c")["depth"] == nsqd.stats("t", "c")["in_flight_count"] == 0)
    nsqd.restart()
    assert sorted(peeked(nsqd, "deferred")) == sorted(
        [("aside", "", 5), ((LIKE_HEADERS + b"much later").decode(), "", len(LIKE_HEADERS) + 10)]
    )


def test_set_aside_before_and_due_after(daemons: Daemons):
    """Of a pack in the database too, told by its sequence: what looks like a tag or headers in an old body is none."""
    nsqd = daemons.nsqd("--durability=os", "--max-req-timeout=1h")
    nsqd.post("/topic/create?topic=t")
    nsqd.post("/channel/create?topic=t&channel=c")
    nsqd.publish("t", LIKE_HEADERS)
    with nsqd.connect().subscribe("t", "c", 1) as old:
        old.send(req(old.message().id, LONG_MS))
        wait_until(lambda: nsqd.stats("t", "c")["deferred_count"] == 1)
    nsqd.post(UPGRADE)
    with nsqd.connect() as connection:
        connection.ok(one("PUB_EXT", "t", 0, headed({"##client_dispatch_tag": "b"}, b"tagged")))
    nsqd.kill()
    nsqd.start()
    assert [row[0] for row in peeked(nsqd, "deferred")] == [LIKE_HEADERS.decode()]
    with knowing(nsqd, desired_tag="b") as tagged:
        message = tagged.message()
        assert extended(message.body).body == b"tagged"
        tagged.finish(message)


def test_consumers_of_a_plain_topic_go_on(daemons: Daemons):
    """They are not closed, and get the bodies alone, of what comes again as well; ordered ones with their places."""
    nsqd = daemons.nsqd("--durability=os", "--max-req-timeout=1h")
    for channel in ("c", "ordered"):
        nsqd.post("/topic/create?topic=t")
        nsqd.post(f"/channel/create?topic=t&channel={channel}")
    with nsqd.connect().subscribe("t", "c", 10) as consumer, nsqd.connect() as ordered:
        ordered.ok(sub_to("t", "ordered", 0, "SUB_ORDER"))
        ordered.rdy(1)
        nsqd.publish("t", b"one", LIKE_HEADERS)
        assert [each.body for each in consumer.messages(2)] == [b"one", LIKE_HEADERS]
        first = ordered.message()
        nsqd.post(UPGRADE)
        with nsqd.connect() as publisher:
            publisher.ok(one("PUB_EXT", "t", 0, headed({"k": "v"}, b"three")))
            publisher.ok(pub("t", b"four"))
        more = consumer.messages(2)
        assert [each.body for each in more] == [b"three", b"four"]
        consumer.send(req(more[0].id, 0))
        again = consumer.message()
        assert (again.body, again.attempts) == (b"three", 2)
        places = []
        for body in (b"one", LIKE_HEADERS, b"three", b"four"):
            message = first if body == b"one" else ordered.message()
            assert message.body[LOCATION.size :] == body
            places.append(LOCATION.unpack_from(message.body))
            ordered.finish(message)
        for (offset, size), (following, _) in pairwise(places):
            assert following == offset + size
    with nsqd.connect() as late:
        late.identify(extend_support=True)
        nsqd.post("/channel/setoffset?topic=t&channel=ordered", b"virtual_queue:0")
        late.ok(sub_to("t", "ordered", 0, "SUB_ORDER"))
        late.rdy(1)
        for number, (body, headers) in enumerate(((b"one", b""), (LIKE_HEADERS, b""), (b"three", b'{"k": "v"}'))):
            message = late.message()
            front = b"\4" + headed(headers, b"") if headers else b"\0"
            assert message.body == front + LOCATION.pack(*places[number]) + body
            late.finish(message)


def test_consumers_of_partitions_are_told(daemons: Daemons):
    """They do not know headers: E_SUB_EXTEND_NEED, closed, and what they held goes to who does."""
    nsqd = daemons.nsqd("--durability=os")
    nsqd.post("/topic/create?topic=t&partition_num=2")
    nsqd.post("/channel/create?topic=t&channel=c")
    with nsqd.connect() as publisher:
        publisher.ok(pub_to("t", 0, b"a") + pub_to("t", 1, b"b"), count=2)
    with nsqd.connect().subscribe("t", "c", 10) as both, nsqd.connect() as ordered:
        ordered.ok(sub_to("t", "o", 1, "SUB_ORDER"))
        assert sorted(each.body for each in both.messages(2)) == [b"a", b"b"]
        nsqd.post(UPGRADE)
        for connection in (both, ordered):
            assert connection.error().startswith("E_SUB_EXTEND_NEED topic t: ")
            assert connection.wait_closed() == []
    with nsqd.connect() as unknowing:
        assert unknowing.error(b"SUB t c\n").startswith("E_SUB_EXTEND_NEED ")
    with nsqd.connect() as publisher:
        publisher.send(one("PUB_EXT", "t", 1, headed({"##trace_id": "7"}, b"c")))
        assert stored(publisher.response()).trace_id == 7
    with knowing(nsqd) as consumer:
        found = consumer.messages(3)
    assert bodies_of(found) == [
        EMPTY._replace(body=b"a"),
        EMPTY._replace(body=b"b"),
        Extended(4, b'{"##trace_id": "7"}', b"c"),
    ]
    assert sorted((extended(each.body).body, placed(each).trace_id, each.attempts) for each in found) == [
        (b"a", 0, 2),
        (b"b", 0, 2),
        (b"c", 7, 1),
    ]


def test_one_message_on_either_side(daemons: Daemons):
    """/message/get and /channel/peek."""
    nsqd = daemons.nsqd("--durability=os")
    nsqd.post("/topic/create?topic=t&partition_num=1")
    nsqd.post("/channel/create?topic=t&channel=c")
    nsqd.publish("t", LIKE_HEADERS)
    nsqd.post(UPGRADE)
    with nsqd.connect() as publisher:
        publisher.ok(one("PUB_EXT", "t", 0, headed({"k": "v"}, b"new")))
    nsqd.publish("t", b"bare")
    expected = [(LIKE_HEADERS.decode(), ""), ("new", '{"k": "v"}'), ("bare", "")]
    for sequence, (body, headers) in enumerate(expected, 1):
        row = nsqd.get(f"/message/get?topic=t&partition=0&search_mode=count&search_pos={sequence}&needext=true")
        assert (row["body"], row["ext"]) == (body, headers)
    assert [row[:2] for row in peeked(nsqd, "next")] == expected


def test_tags_from_then_on(daemons: Daemons):
    """A channel with a consumer that stays: tagged messages go to who desires the tag, old ones to who desires none."""
    nsqd = daemons.nsqd("--durability=os")
    nsqd.post("/topic/create?topic=t")
    with nsqd.connect().subscribe("t", "c", 1) as stays:
        nsqd.publish("t", b"first", LIKE_HEADERS, LIKE_HEADERS + b"2")
        first = stays.message()
        nsqd.post(UPGRADE)
        with knowing(nsqd, desired_tag="b") as tagged, nsqd.connect() as publisher:
            items = [
                headed({"##client_dispatch_tag": "b"} if number % 2 else {}, b"%d" % number) for number in range(6)
            ]
            publisher.ok(several("MPUB_EXT", "t", 0, items))
            found = tagged.messages(3)
            assert [extended(each.body).body for each in found] == [b"1", b"3", b"5"]
            tagged.finish(*found)
            stays.send(req(first.id, 0))
            left: list[Message] = []
            while len(left) < 6:
                left.append(stays.message())
                stays.finish(left[-1])
            assert sorted(each.body for each in left) == sorted(
                [b"first", LIKE_HEADERS, LIKE_HEADERS + b"2", b"0", b"2", b"4"]
            )
            wait_until(lambda: nsqd.unfinished("t", "c") == 0)


def test_dead_letters_of_both_kinds(daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os")
    nsqd.post("/topic/create?topic=t")
    nsqd.post("/channel/create?topic=t&channel=c")
    nsqd.post("/topic/settings?topic=t", b'{"max_attempts": 1}')
    nsqd.publish("t", LIKE_HEADERS)
    nsqd.post(UPGRADE)
    with nsqd.connect() as publisher:
        publisher.ok(one("PUB_EXT", "t", 0, headed({"k": "v"}, b"new")))
    with knowing(nsqd) as consumer:
        for message in consumer.messages(2):
            consumer.send(req(message.id, 0))
        with nsqd.connect() as dead:
            dead.identify(extend_support=True)
            dead.subscribe("t.dead", "c", 10)
            found = bodies_of(dead.messages(2))
    assert [each.body for each in found] == [LIKE_HEADERS, b"new"]
    assert [json.loads(each.headers).get("k") for each in found] == [None, "v"]


@pytest.mark.parametrize("partition_num", [0, 1])
def test_publishers_do_not_notice(daemons: Daemons, partition_num: int):
    """Under way at that moment: every publish is answered, and is there once; places are where the messages are."""
    nsqd = daemons.nsqd("--durability=os")
    nsqd.post(f"/topic/create?topic=t{f'&partition_num={partition_num}' if partition_num else ''}")
    nsqd.post("/channel/create?topic=t&channel=c")
    answers: list[Any] = []
    upgraded = threading.Event()

    def publish(connection: Connection) -> None:
        number = behind = 0
        while behind < 20:
            behind += upgraded.is_set()
            batch = [b"%d" % (number + each) for each in range(50)]
            number += len(batch)
            if partition_num:
                connection.send(b"".join(one("PUB_TRACE", "t", 0, traced(int(body) + 1, body)) for body in batch))
                answers.extend(stored(connection.response()) for _ in batch)
            else:
                connection.ok(b"".join(pub("t", body) for body in batch), count=len(batch))
                answers.extend(batch)

    with nsqd.connect() as connection:
        thread = threading.Thread(target=publish, args=(connection,))
        thread.start()
        wait_until(lambda: len(answers) > 200, "publishing goes on")
        nsqd.post(UPGRADE)
        upgraded.set()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    nsqd.kill()
    nsqd.start()
    with nsqd.connect() as consumer:
        consumer.identify(extend_support=True)
        consumer.ok(b"SUB_ADVANCED t c 0\n" if partition_num else b"SUB t c\n")
        consumer.rdy(2000)
        found = []
        for _ in answers:
            found.append(consumer.message())
            consumer.finish(found[-1])
        wait_until(lambda: nsqd.unfinished("t", "c") == 0)
    if not partition_num:
        assert [extended(each.body) for each in found] == [(0, b"", body) for body in answers]
        return
    for answer, message in zip(answers, found, strict=True):
        offset, raw_size = LOCATION.unpack_from(message.body, 1)
        assert message.body[0] == 0 and message.body[1 + LOCATION.size :] == b"%d" % (answer.trace_id - 1)
        assert (offset, raw_size) == (answer.offset, answer.raw_size)
        assert placed(message).trace_id == answer.trace_id


@pytest.mark.parametrize("after_ms", [0, 1, 3, 10, 30])
def test_a_kill_9_at_that_moment(daemons: Daemons, after_ms: int):
    """Before or after the database has it: whatever was answered is there, each with its own body, and no other."""
    nsqd = daemons.nsqd("--durability=os")
    nsqd.post("/topic/create?topic=t")
    nsqd.post("/channel/create?topic=t&channel=c")
    answered: list[bytes] = []
    sent: list[bytes] = []
    under_way = threading.Event()

    def publish() -> None:
        with contextlib.suppress(OSError, Closed), nsqd.connect() as connection:
            while True:
                sent.append(LIKE_HEADERS + b"%d" % len(sent))
                connection.ok(pub("t", sent[-1]))
                answered.append(sent[-1])
                if len(answered) > 50:
                    under_way.set()

    def upgrade() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            nsqd.request("POST", UPGRADE)

    threads = [threading.Thread(target=each) for each in (publish, upgrade)]
    threads[0].start()
    assert under_way.wait(PATIENCE_S)
    threads[1].start()
    time.sleep(after_ms / 1000)
    nsqd.kill()
    for thread in threads:
        thread.join(PATIENCE_S)
    nsqd.start()
    has_headers = nsqd.stats("t").get("extend_support", False)
    with nsqd.connect() as consumer:
        consumer.identify(extend_support=has_headers)
        count = nsqd.stats("t", "c")["depth"]
        consumer.subscribe("t", "c", 100)
        found = []
        for _ in range(count):
            message = consumer.message()
            found.append(message.body)
            consumer.finish(message)
        wait_until(lambda: nsqd.unfinished("t", "c") == 0)
    bodies = [extended(body).body for body in found] if has_headers else found
    assert set(answered) <= set(bodies) <= set(sent) and len(set(bodies)) == len(bodies)


# -- over several nodes ------------------------------------------------------------------------------------------------


def test_every_node_and_one_that_was_away(daemons: Daemons):
    nsqlookupd = daemons.nsqlookupd()
    here, away = [daemons.nsqd("--durability=os", lookup_flag(nsqlookupd)) for _ in range(2)]
    wait_until(lambda: len(nsqlookupd.get("/nodes")["producers"]) == 2, "both nodes")
    nsqlookupd.post("/topic/create?topic=t&partition_num=2")
    for nsqd in (here, away):
        nsqd.post("/channel/create?topic=t&channel=c")
        nsqd.publish("t", LIKE_HEADERS)
    away.stop()
    wait_until(lambda: len(nsqlookupd.get("/nodes")["producers"]) == 1, "one node is gone")
    nsqlookupd.post(UPGRADE)
    assert here.stats("t")["extend_support"] is True
    away.start()
    wait_until(lambda: away.stats("t").get("extend_support"), "the one that was away knows", PATIENCE_S)
    nsqlookupd.post(UPGRADE)  # answered when all have it on disk
    nsqlookupd.post("/topic/meta/update?topic=t&upgradeext=false")  # one way
    away.kill()
    away.start()
    for nsqd in (here, away):
        (number,) = (int(row["topic_partition"]) for row in nsqd.stats("t")["partitions"])
        with nsqd.connect() as publisher:
            publisher.ok(one("PUB_EXT", "t", number, headed({"k": "v"}, b"new")))
        with knowing(nsqd) as consumer:
            assert bodies_of(consumer.messages(2)) == [(0, b"", LIKE_HEADERS), (4, b'{"k": "v"}', b"new")]
    accept = {"Accept": "application/vnd.nsq; version=1.0"}
    found = nsqlookupd.request("GET", "/lookup?topic=t&metainfo=true", headers=accept)
    assert found.json["meta"]["extend_support"] is True


def test_a_plain_topic_through_nsqlookupd(daemons: Daemons):
    nsqlookupd = daemons.nsqlookupd()
    nsqds = [daemons.nsqd("--durability=os", lookup_flag(nsqlookupd)) for _ in range(2)]
    for nsqd in nsqds:
        nsqd.post("/mpub?topic=t&binary=true", mpub_body([b"old"]))
    wait_until(lambda: len(nsqlookupd.producers("t")) == 2, "the topic on both")
    nsqlookupd.post(UPGRADE)
    for nsqd in nsqds:
        with nsqd.connect() as publisher:
            publisher.ok(one("PUB_EXT", "t", None, headed({"k": "v"}, b"new")))
        with knowing(nsqd) as consumer:
            assert bodies_of(consumer.messages(2)) == [(4, b'{"k": "v"}', b"new"), (0, b"", b"old")]


def test_a_plain_topic_that_has_headers_on_one_node_only(daemons: Daemons):
    """It is left so, until it is changed: then nodes that have one version of it have one kind."""
    nsqlookupd = daemons.nsqlookupd()
    bare, with_headers = [daemons.nsqd("--durability=os", lookup_flag(nsqlookupd)) for _ in range(2)]
    bare.publish("t", b"old")
    with_headers.post("/topic/create?topic=t&extend=true")
    wait_until(lambda: len(nsqlookupd.producers("t")) == 2, "the topic on both")
    assert "extend_support" not in bare.stats("t")
    with_headers.post("/topic/meta/update?topic=t&retention=3")
    wait_until(lambda: bare.stats("t").get("extend_support"), "both have headers", PATIENCE_S)
    assert bare.stats("t")["retention_days"] == 3
    with knowing(bare) as consumer:
        assert bodies_of(consumer.messages(1)) == [(0, b"", b"old")]


@pytest.mark.parametrize("partition_num", [0, 2])
def test_our_consumer_goes_on(daemons: Daemons, flavour: Flavour, partition_num: int):
    """Partitions send it away, and it comes back knowing headers; a plain topic leaves it where it is."""
    nsqlookupd = daemons.nsqlookupd()
    nsqd = daemons.nsqd("--durability=os", lookup_flag(nsqlookupd))
    if partition_num:
        wait_until(lambda: nsqlookupd.get("/nodes")["producers"], "nsqd is registered")
        nsqlookupd.post(f"/topic/create?topic=t&partition_num={partition_num}")
    nsqd.publish("t", b"old")
    wait_until(lambda: nsqlookupd.producers("t"), "it is registered")
    seen: list[Any] = []
    where: dict[str, Any] = {"nsqlookupd_http_addresses": f"http://127.0.0.1:{nsqlookupd.http[1]}"}
    with flavour.consumer("t", "c", seen.append, **where):
        wait_until(lambda: len(seen) == 1, "the old one")
        nsqlookupd.post(UPGRADE)
        with nsqd.connect() as publisher:
            publisher.ok(one("PUB_EXT", "t", 0, headed({"k": "v"}, b"new")))
        wait_until(lambda: any(message.body == b"new" for message in seen), "the new one")
    (new,) = (message for message in seen if message.body == b"new")
    assert new.headers == ({"k": "v"} if partition_num else {})
