"""Draining a real nsqd: who publishes goes elsewhere, who consumes gets everything, and the process ends."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

import pytest
from tests.integration.daemons import Daemons, Nsqd, Nsqlookupd, dpub, fin, mpub, pub, wait_until
from tests.integration.load import Consumer, Numbers, Publisher, check

from flintmq import Consumer as Client
from flintmq import Message, Producer

DRAINING = 503, "DRAINING"


def begin(nsqd: Nsqd, query: str = "") -> dict[str, Any]:
    answer: dict[str, Any] = nsqd.post(f"/drain{query}").json
    assert answer["draining"] is True
    return answer


# -- who publishes -----------------------------------------------------------------------------------------------------


def test_publishes_are_refused_until_it_is_called_off(nsqd: Nsqd):
    nsqd.publish("t", b"kept")
    with nsqd.connect() as producer:
        producer.ok(pub("t", b"kept as well"))
        assert begin(nsqd)["message_count"] == 2
        assert producer.error(pub("t", b"x")) == "E_PUB_FAILED PUB failed draining"
        producer.wait_closed()
    for command, answer in (
        (pub("t", b"x"), "E_PUB_FAILED PUB failed draining"),
        (pub("new", b"x"), "E_PUB_FAILED PUB failed draining"),
        (mpub("t", [b"x", b"y"]), "E_MPUB_FAILED MPUB failed draining"),
        (dpub("t", 10, b"x"), "E_DPUB_FAILED DPUB failed draining"),
    ):
        with nsqd.connect() as producer:
            assert producer.error(command) == answer
            producer.wait_closed()
    for target in ("/pub?topic=t", "/pub?topic=t&defer=10", "/mpub?topic=t", "/pub?topic=new"):
        assert nsqd.request("POST", target, b"x").error == DRAINING
    assert nsqd.get("/info")["draining"] is True
    assert nsqd.request("GET", "/ping").text == "OK"

    assert nsqd.request("DELETE", "/drain").json == {"draining": False}
    nsqd.publish("t", b"third")
    assert nsqd.post("/pub?topic=t", b"fourth").text == "OK"
    assert "draining" not in nsqd.get("/info")
    with nsqd.connect() as consumer:
        bodies = {message.body for message in consumer.subscribe("t", "c", 10).messages(4)}
    assert bodies == {b"kept", b"kept as well", b"third", b"fourth"}
    assert [row["topic_name"] for row in nsqd.get("/stats?format=json")["topics"]] == ["t"]  # and no "new"


def test_a_topic_with_partitions(nsqd: Nsqd):
    """Its clients know an error that leaves the connection open."""
    assert nsqd.request("POST", "/topic/create?topic=p&partition_num=2&replicator=1", b"").status == 200
    with nsqd.connect() as producer:
        producer.ok(b"PUB p 0\n\0\0\0\1x")
        begin(nsqd)
        for command in (b"PUB p 0\n\0\0\0\1x", b"PUB p 1\n\0\0\0\1x"):
            assert producer.error(command) == "E_FAILED_ON_NOT_WRITABLE PUB topic p: draining"
        bare = {"Accept": "application/vnd.nsq; version=1.0"}
        assert nsqd.request("POST", "/pub?topic=p&partition=0", b"x", bare).error == DRAINING
        enveloped = nsqd.request("POST", "/pub?topic=p&partition=0", b"x")
        assert (enveloped.status, enveloped.json["status_txt"]) == (500, DRAINING[1])
        more = nsqd.request("POST", "/topic/create?topic=q&partition_num=2&replicator=1", b"")
        assert more.error == DRAINING
        nsqd.request("DELETE", "/drain")
        producer.ok(b"PUB p 1\n\0\0\0\1x")


def test_bad_requests(nsqd: Nsqd):
    for text in ("x", "-1s", ""):
        assert nsqd.request("POST", f"/drain?timeout={text}", b"").error == (400, "INVALID_TIMEOUT")
    assert nsqd.get("/drain") == {"draining": False}
    assert nsqd.request("DELETE", "/drain").json == {"draining": False}


# -- who consumes ------------------------------------------------------------------------------------------------------


def test_it_waits_for_everything(nsqd: Nsqd):
    """What is queued, held, deferred, and what no channel has; GET /drain says where it is."""
    with nsqd.connect() as connection:
        connection.subscribe("t", "c", 1)
        nsqd.publish("t", b"held", b"queued")
        held = connection.message()
        nsqd.post("/pub?topic=t&defer=400", b"deferred")
        nsqd.publish("lonely", b"nobody has a channel")
        nsqd.publish("none#ephemeral", b"nobody ever will")
        state = begin(nsqd)
        assert (state["message_count"], state["topic_count"], state["seconds_left"]) == (4, 2, None)
        lonely, t = state["topics"]
        assert (lonely["topic_name"], lonely["depth"], lonely["channels"]) == ("lonely", 1, [])
        (channel,) = t["channels"]
        assert {name: channel[name] for name in ("channel_name", "in_flight_count", "client_count", "paused")} == {
            "channel_name": "c",
            "in_flight_count": 1,
            "client_count": 1,
            "paused": False,
        }
        assert channel["depth"] + channel["deferred_count"] == 2

        with nsqd.connect() as late:  # comes while it drains, and is served
            late.finish(late.subscribe("lonely", "late", 1).message())
            wait_until(lambda: nsqd.unfinished("lonely", "late") == 0, "FIN")
        connection.send(fin(held.id))
        queued = connection.message()
        assert queued.body == b"queued"
        connection.send(fin(queued.id))
        last = connection.message()
        assert last.body == b"deferred"
        assert nsqd.get("/drain")["message_count"] == 1
        connection.send(fin(last.id))
        assert nsqd.wait() == 0
    assert "drained: every channel is empty" in nsqd.log
    nsqd.start()
    assert [nsqd.unfinished(*each) for each in (("t", "c"), ("lonely", "late"))] == [0, 0]


def test_a_paused_channel_keeps_it(nsqd: Nsqd):
    nsqd.post("/topic/create?topic=t")
    nsqd.post("/channel/create?topic=t&channel=c")
    nsqd.post("/channel/pause?topic=t&channel=c")
    nsqd.publish("t", b"x")
    (row,) = begin(nsqd)["topics"]
    assert row["channels"][0]["paused"] is True
    nsqd.post("/channel/empty?topic=t&channel=c")
    assert nsqd.wait() == 0


def test_an_empty_one_ends_at_once(nsqd: Nsqd):
    nsqd.send_signal(signal.SIGUSR1)
    assert nsqd.wait() == 0


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_nothing_is_lost_under_load(daemons: Daemons, durability: str):
    """PUB, MPUB and DPUB run when it begins; what was acknowledged is delivered before it ends."""
    nsqd = daemons.nsqd(f"--durability={durability}")
    numbers = Numbers()
    publishers = [
        Publisher(nsqd.tcp, "t", numbers),
        Publisher(nsqd.tcp, "t", numbers, batch=20, window=10),
        Publisher(nsqd.tcp, "t", numbers, defer_ms=200, window=20),
    ]
    consumers = [Consumer(nsqd.tcp, "t", "c", rdy_count).begin() for rdy_count in (1, 500)]
    for publisher in publishers:
        publisher.start()
    wait_until(lambda: all(publisher.acked_count > 300 for publisher in publishers), "load")
    nsqd.send_signal(signal.SIGUSR1)
    for publisher in publishers:
        publisher.finish()
        assert publisher.errors and all(error.endswith(" failed draining") for error in publisher.errors)
    assert nsqd.wait(30) == 0
    for consumer in consumers:
        consumer.stop()
    check(publishers, *consumers)
    # what was refused is not there: nothing but what was acknowledged was stored, and all of it is finished
    acked = sum(publisher.acked_count for publisher in publishers)
    delivered = {number for consumer in consumers for number in consumer.numbers}
    assert len(delivered) == acked
    nsqd.start()
    assert nsqd.unfinished("t", "c") == 0


# -- its end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["query", "option"])
def test_when_the_time_is_up_the_rest_is_kept(daemons: Daemons, how: str):
    nsqd = daemons.nsqd("--durability=os", *(["--drain-timeout=300ms"] if how == "option" else []))
    nsqd.publish("t", b"a", b"b")
    begun = time.monotonic()
    left = begin(nsqd, "?timeout=300ms" if how == "query" else "")["seconds_left"]
    assert 0 < left <= 0.3
    assert nsqd.wait() == 0
    assert time.monotonic() - begun >= 0.3
    assert "2 messages are left" in nsqd.log
    nsqd.start()
    with nsqd.connect() as connection:
        assert [message.body for message in connection.subscribe("t", "c", 2).messages(2)] == [b"a", b"b"]


def test_a_second_request_changes_the_time(nsqd: Nsqd):
    nsqd.publish("t", b"a")
    assert begin(nsqd)["seconds_left"] is None
    assert begin(nsqd, "?timeout=1h")["seconds_left"] > 3000
    begin(nsqd, "?timeout=10ms")
    assert nsqd.wait() == 0


def test_sigterm_drains_where_it_should(daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os", "--drain-on-sigterm")
    nsqd.publish("t", b"a")
    nsqd.send_signal(signal.SIGTERM)
    wait_until(lambda: nsqd.get("/drain")["draining"], "it drains")
    assert nsqd.request("POST", "/pub?topic=t", b"x").error == DRAINING
    with nsqd.connect() as connection:
        connection.subscribe("t", "c", 1)
        connection.finish(connection.message())
        assert nsqd.wait() == 0

    nsqd.start()
    nsqd.publish("t", b"b")
    nsqd.send_signal(signal.SIGTERM)
    wait_until(lambda: nsqd.get("/drain")["draining"], "it drains")
    nsqd.stop()  # the second one
    nsqd.start()
    assert nsqd.unfinished("t", "c") == 1


def test_sigterm_and_sigint_end_it_as_ever(nsqd: Nsqd):
    for number in (signal.SIGTERM, signal.SIGINT):
        nsqd.publish("t", b"a")
        begin(nsqd)
        nsqd.stop(number)
        nsqd.start()
    assert nsqd.get("/drain") == {"draining": False}  # a start takes messages
    nsqd.publish("t", b"a")


# -- with nsqlookupd ---------------------------------------------------------------------------------------------------


def ports(nsqlookupd: Nsqlookupd, topic: str, access: str = "") -> list[int]:
    """Who is listed for a topic: as NSQ's clients ask, or as the redesigned NSQ's do."""
    if not access:
        return nsqlookupd.producers(topic)
    answer = nsqlookupd.request("GET", f"/lookup?topic={topic}&access={access}").json["data"]
    return sorted(producer["tcp_port"] for producer in (answer or {}).get("producers") or [])


def test_consumers_are_told_of_it_and_producers_are_not(daemons: Daemons):
    nsqlookupd = daemons.nsqlookupd()
    flag = f"--lookupd-tcp-address=127.0.0.1:{nsqlookupd.tcp[1]}"
    first, second = daemons.nsqd("--durability=os", flag), daemons.nsqd("--durability=os", flag)
    for nsqd in (first, second):
        nsqd.publish("t", b"x")
    both = sorted((first.tcp[1], second.tcp[1]))
    wait_until(lambda: ports(nsqlookupd, "t") == both, "both are listed")
    begin(first)
    wait_until(lambda: ports(nsqlookupd, "t", "w") == [second.tcp[1]], "it is hidden from who publishes")
    wait_until(lambda: ports(nsqlookupd, "t", "r") == both, "and not from who consumes")
    assert ports(nsqlookupd, "t") == both
    assert nsqlookupd.channels("t") == []
    first.request("DELETE", "/drain")
    wait_until(lambda: ports(nsqlookupd, "t", "w") == both, "both again")


async def publish_all(producer: Producer, count: int, stop: asyncio.Event) -> set[bytes]:
    """Publish one after the other until told to stop, and then ``count`` more; each until it is acknowledged."""
    published: set[bytes] = set()
    while count:
        count -= stop.is_set()
        body = b"message %d" % len(published)
        await producer.pub("t", body)
        published.add(body)
    return published


@pytest.mark.parametrize("finds_by", ["nsqlookupd", "addresses"])
async def test_our_clients_go_elsewhere(daemons: Daemons, finds_by: str):
    """A producer goes on, whichever way it finds nsqd; a consumer that starts late gets what the node still has."""
    nsqlookupd = daemons.nsqlookupd()
    lookup = f"http://127.0.0.1:{nsqlookupd.http[1]}"
    flag = f"--lookupd-tcp-address=127.0.0.1:{nsqlookupd.tcp[1]}"
    first, second = daemons.nsqd("--durability=os", flag), daemons.nsqd("--durability=os", flag)
    for nsqd in (first, second):
        nsqd.publish("t", b"begin")
    wait_until(lambda: len(ports(nsqlookupd, "t", "w")) == 2, "both are listed")
    addresses = [f"127.0.0.1:{nsqd.tcp[1]}" for nsqd in (first, second)]
    where: dict[str, Any] = (
        {"nsqlookupd_http_addresses": lookup} if finds_by == "nsqlookupd" else {"nsqd_tcp_addresses": addresses}
    )
    got: set[bytes] = set()

    async def handle(message: Message) -> None:
        got.add(message.body)

    async with Producer(**where) as producer:
        drained = asyncio.Event()
        publishing = asyncio.create_task(publish_all(producer, 200, drained))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(begin, first)
        async with Client("t", "late", handler=handle, nsqlookupd_http_addresses=lookup):
            assert await asyncio.to_thread(first.wait) == 0
            drained.set()
            published = await publishing
            await asyncio.to_thread(wait_until, lambda: got >= published, "everything has come")
    assert len(published) > 300
