"""Limits of topics and channels of a real nsqd: attempts with dead letters, age, bounds; and kill -9 in the middle."""

from __future__ import annotations

import json
import struct
import threading
import time

import pytest
from tests.conformance.http_helpers import assert_refused
from tests.integration.daemons import (
    Connection,
    Daemons,
    Message,
    Nsqd,
    dpub,
    mpub,
    pub,
    req,
    wait_until,
)

pytestmark = pytest.mark.improvement


def created(nsqd: Nsqd, topic: str, channel: str = "c", **settings: object) -> None:
    nsqd.post(f"/topic/create?topic={topic}")
    if channel:
        nsqd.post(f"/channel/create?topic={topic}&channel={channel}")
    nsqd.post(f"/topic/settings?topic={topic}", json.dumps(settings).encode())


def consumer(nsqd: Nsqd, topic: str, rdy: int = 100, channel: str = "c", **identify: object) -> Connection:
    connection = nsqd.connect()
    if identify:
        connection.identify(**identify)
    return connection.subscribe(topic, channel, rdy)


def split(message: Message) -> tuple[dict[str, str], bytes]:
    """Headers and body as a client with extend_support gets them."""
    if message.body[:1] == b"\0":
        return {}, message.body[1:]
    version, size = struct.unpack_from(">BH", message.body)
    assert version == 4
    return json.loads(message.body[3 : 3 + size]), message.body[3 + size :]


def dead_letters(nsqd: Nsqd, topic: str, count: int) -> list[tuple[dict[str, str], bytes]]:
    """Consume so many dead letters with their headers, once they are there."""
    wait_until(lambda: dead_count(nsqd, f"{topic}.dead") >= count, f"{count} dead letters")
    with consumer(nsqd, f"{topic}.dead", rdy=2500, channel="look", extend_support=True) as connection:
        found = []
        for _ in range(count):
            message = connection.message()
            found.append(split(message))
            connection.finish(message)
        connection.settle()
        return found


# -- attempts ----------------------------------------------------------------------------------------------------------


def test_a_message_that_comes_back_too_often_is_a_dead_letter_with_the_reason(nsqd: Nsqd, topic: str):
    created(nsqd, topic, max_attempts=2)
    with consumer(nsqd, topic) as connection:
        local = "{}:{}".format(*connection.socket.getsockname())
        nsqd.publish(topic, b"bad", b"good")
        first, second = connection.messages(2)
        connection.finish(second)
        connection.send(req(first.id, 0))
        again = connection.message()
        assert (again.id, again.attempts) == (first.id, 2)
        connection.send(req(first.id, 60_000))  # why wait, it is not delivered again
        ((headers, body),) = dead_letters(nsqd, topic, 1)
        connection.nothing_comes()
    assert body == b"bad"
    assert headers == {
        "##dead_letter_reason": "max_attempts",
        "##dead_letter_topic": topic,
        "##dead_letter_channel": "c",
        "##dead_letter_attempts": "2",
        "##dead_letter_id": first.id.decode(),
        "##dead_letter_timestamp": str(first.timestamp_ns),
        "##dead_letter_client": local,
    }
    row = nsqd.stats(topic, "c")
    assert (row["depth"], row["in_flight_count"], row["deferred_count"]) == (0, 0, 0)
    assert (row["dead_letter_count"], row["requeue_count"]) == (1, 2)


def test_a_consumer_that_knows_no_headers_gets_the_body_alone(nsqd: Nsqd, topic: str):
    created(nsqd, topic, max_attempts=1)
    nsqd.publish(topic, b"bad")
    with consumer(nsqd, topic) as connection:
        connection.send(req(connection.message().id, 0))
        with consumer(nsqd, f"{topic}.dead") as plain:
            message = plain.message()
            assert (message.body, message.attempts) == (b"bad", 1)


def test_a_topic_that_was_there_without_headers_gets_the_body_alone(nsqd: Nsqd, topic: str):
    created(nsqd, topic, max_attempts=1, dead_letter_topic=f"{topic}-graves")
    nsqd.post(f"/topic/create?topic={topic}-graves")
    nsqd.publish(topic, b"bad")
    with consumer(nsqd, topic) as connection, consumer(nsqd, f"{topic}-graves") as graves:
        connection.send(req(connection.message().id, 0))
        assert graves.message().body == b"bad"


def test_who_disconnects_or_holds_a_message_too_long_uses_up_an_attempt(nsqd: Nsqd, topic: str):
    created(nsqd, topic, max_attempts=2)
    nsqd.publish(topic, b"bad")
    with consumer(nsqd, topic) as connection:
        assert connection.message().attempts == 1
    with consumer(nsqd, topic, msg_timeout=1000) as connection:
        assert connection.message().attempts == 2
        ((_, body),) = dead_letters(nsqd, topic, 1)
        connection.nothing_comes()
    assert body == b"bad"


def test_dead_letters_are_not_given_up_again(nsqd: Nsqd, topic: str):
    created(nsqd, topic, max_attempts=1)
    nsqd.publish(topic, b"bad")
    with consumer(nsqd, topic) as connection:
        connection.send(req(connection.message().id, 0))
        with consumer(nsqd, f"{topic}.dead") as graves:
            for attempt in range(1, 5):
                message = graves.message()
                assert message.attempts == attempt
                graves.send(req(message.id, 0))
            graves.finish(graves.message())
    assert f"{topic}.dead.dead" not in {row["topic_name"] for row in nsqd.get("/stats?format=json")["topics"]}
    assert nsqd.get(f"/topic/settings?topic={topic}.dead")["settings"] == {"dead_letters": True}


def test_the_node_s_limit_holds_for_every_topic_but_those_of_dead_letters(shared_daemons: Daemons):
    nsqd = shared_daemons.nsqd("--durability=os", "--max-attempts=1", "--dead-letter-topic=graves")
    for topic in ("a", "b"):
        nsqd.publish(topic, topic.encode())
        with consumer(nsqd, topic) as connection:
            connection.send(req(connection.message().id, 0))
            connection.settle()
    with consumer(nsqd, "graves", extend_support=True) as graves:
        messages = graves.messages(2)
        assert sorted(split(message)[0]["##dead_letter_topic"] for message in messages) == ["a", "b"]
        for message in messages:
            graves.send(req(message.id, 0))
        assert {message.attempts for message in graves.messages(2)} == {2}


# -- kill -9 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_kill_while_messages_are_given_up_loses_none(shared_daemons: Daemons, durability: str):
    nsqd = shared_daemons.nsqd(f"--durability={durability}", "--max-attempts=2")
    bodies = [b"%d" % number for number in range(3000)]
    nsqd.post("/topic/create?topic=t")
    nsqd.post("/channel/create?topic=t&channel=c")
    nsqd.publish("t", *bodies[:1000])
    finished: list[bytes] = []
    stopping = threading.Event()

    def consume() -> None:
        """Give two of three back, finish the others."""
        while not stopping.is_set():
            try:
                with consumer(nsqd, "t", 200) as connection:
                    while not stopping.is_set():
                        message = connection.message(0.5)
                        if int(message.body) % 3:
                            connection.send(req(message.id, 0))
                        else:
                            connection.finish(message)
                            finished.append(message.body)
            except (AssertionError, OSError):
                time.sleep(0.01)

    thread = threading.Thread(target=consume)
    thread.start()
    unwritten = 0
    try:
        for count, more in ((300, bodies[1000:2000]), (900, bodies[2000:])):
            wait_until(lambda count=count: dead_count(nsqd) >= count, f"{count} dead letters")  # type: ignore[misc]
            written = dead_count(nsqd)
            nsqd.write_progress()
            nsqd.publish(
                "t", *more
            )  # however fast the consumer is, what is given up after the writing is still to come
            wait_until(lambda written=written: dead_count(nsqd) > written, "more dead letters")  # type: ignore[misc]
            nsqd.kill()
            nsqd.start()
            unwritten += dead_count(nsqd) - written
        wait_until(lambda: nsqd.unfinished("t", "c") == 0, "everything is finished or dead")
    finally:
        stopping.set()
        thread.join()
    count = nsqd.stats("t.dead")["depth"]
    dead = dead_letters(nsqd, "t", count)
    assert {body for _, body in dead} | set(finished) == set(bodies)
    assert all(headers["##dead_letter_attempts"] in "23" for headers, _ in dead)
    repeated = len(dead) - len({body for _, body in dead})
    assert repeated <= unwritten, "only what was on its way at a kill may come twice"


def dead_count(nsqd: Nsqd, topic: str = "t.dead") -> int:
    topics = nsqd.get(f"/stats?format=json&topic={topic}")["topics"]
    return int(topics[0]["depth"]) if topics else 0


# -- age ---------------------------------------------------------------------------------------------------------------


def test_what_is_too_old_is_neither_delivered_nor_kept(nsqd: Nsqd, topic: str):
    created(nsqd, topic, ttl_ms=300)
    nsqd.publish(topic, b"old", b"older")
    assert nsqd.stats(topic, "c")["depth"] == 2
    wait_until(lambda: nsqd.stats(topic, "c")["depth"] == 0)
    assert nsqd.stats(topic, "c")["expired_count"] == 2
    with consumer(nsqd, topic) as connection:
        nsqd.publish(topic, b"new")
        message = connection.message()
        assert message.body == b"new"
        time.sleep(0.4)
        connection.send(req(message.id, 0))
        connection.nothing_comes()
    assert nsqd.stats(topic, "c")["expired_count"] == 3


def test_the_age_of_a_delayed_message_begins_when_it_is_due(nsqd: Nsqd, topic: str):
    created(nsqd, topic, ttl_ms=300)
    with consumer(nsqd, topic) as connection, nsqd.connect() as producer:
        producer.ok(dpub(topic, 600, b"later"))
        assert connection.message().body == b"later"


def test_a_topic_without_channels_forgets_what_is_too_old(nsqd: Nsqd, topic: str):
    created(nsqd, topic, channel="", ttl_ms=200)
    nsqd.publish(topic, b"old")
    wait_until(lambda: nsqd.stats(topic)["depth"] == 0)
    assert nsqd.stats(topic)["expired_count"] == 1


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_a_full_topic_refuses_and_closes_as_for_any_publish_that_fails(nsqd: Nsqd, topic: str):
    created(nsqd, topic, max_messages=2)
    with nsqd.connect() as connection:
        connection.ok(pub(topic, b"a"))
        connection.ok(pub(topic, b"b"))
        text = f"topic {topic} is full: channel c has 2 of max 2 messages; raise the limit or consume"
        assert connection.error(pub(topic, b"c")) == f"E_PUB_FAILED {text}"
        assert connection.wait_closed() == []
    with nsqd.connect() as connection:
        assert connection.error(mpub(topic, [b"c"])) == f"E_MPUB_FAILED {text}"
    with nsqd.connect() as connection:
        assert connection.error(dpub(topic, 100, b"c")) == f"E_DPUB_FAILED {text}"
    row = nsqd.stats(topic)
    assert (row["message_count"], row["refused_count"]) == (2, 3)


def test_of_publishes_that_come_at_once_those_are_stored_for_which_there_is_room(nsqd: Nsqd, topic: str):
    created(nsqd, topic, max_messages=5)
    with nsqd.connect() as connection:
        connection.send(b"".join(pub(topic, b"%d" % number) for number in range(8)))
        connection.ok(count=5)
        assert connection.error().startswith("E_PUB_FAILED ")
        assert connection.wait_closed() == []
    assert nsqd.stats(topic, "c")["depth"] == 5


def test_a_topic_with_partitions_refuses_and_the_connection_stays(nsqd: Nsqd, topic: str):
    nsqd.post(f"/topic/create?topic={topic}&partition_num=2&replicator=1")
    nsqd.post(f"/channel/create?topic={topic}&channel=c")
    nsqd.post(f"/topic/settings?topic={topic}", b'{"max_messages": 3}')
    with nsqd.connect() as connection:
        connection.send(b"".join(pub(topic, b"%d" % number) for number in range(5)))
        connection.ok(count=3)
        assert connection.error().startswith("E_PUB_FAILED topic ")
        assert connection.error().startswith("E_PUB_FAILED topic ")
        connection.ok(pub(f"{topic}-other", b"x"))


def test_http_publishes_are_answered_429(nsqd: Nsqd, topic: str):
    created(nsqd, topic, channel="", max_bytes=200)
    nsqd.post(f"/pub?topic={topic}", b"x" * 100)
    assert_refused(nsqd.request("POST", f"/pub?topic={topic}", b"x" * 100), 429, "TOPIC_FULL")
    assert_refused(nsqd.request("POST", f"/mpub?topic={topic}", b"x" * 60 + b"\n" + b"x" * 60), 429, "TOPIC_FULL")
    nsqd.post(f"/pub?topic={topic}", b"x" * 30)
    assert nsqd.stats(topic)["depth"] == 2


def test_room_that_a_consumer_makes_is_used_at_once(nsqd: Nsqd, topic: str):
    created(nsqd, topic, max_messages=1)
    with nsqd.connect() as publisher, consumer(nsqd, topic) as connection:
        for number in range(20):
            publisher.ok(pub(topic, b"%d" % number))
            message = connection.message()
            assert message.body == b"%d" % number
            connection.finish(message)
            connection.settle()


def test_the_oldest_are_dropped(nsqd: Nsqd, topic: str):
    created(nsqd, topic, max_messages=3, overflow="drop_oldest")
    nsqd.publish(topic, *(b"%d" % number for number in range(10)))
    wait_until(lambda: nsqd.stats(topic, "c")["depth"] == 3)
    assert nsqd.stats(topic, "c")["dropped_count"] == 7
    with consumer(nsqd, topic) as connection:
        assert [message.body for message in connection.messages(3)] == [b"7", b"8", b"9"]


def test_what_was_dropped_stays_so_after_a_kill(shared_daemons: Daemons):
    nsqd = shared_daemons.nsqd("--durability=os", "--topic-max-messages=4", "--overflow=drop_oldest")
    nsqd.publish("t", *(b"%d" % number for number in range(10)))
    nsqd.post("/topic/create?topic=other")  # is durable when what was flushed before is
    wait_until(lambda: nsqd.stats("t")["depth"] == 4)
    nsqd.write_progress()
    nsqd.kill()
    nsqd.start()
    assert nsqd.stats("t")["depth"] == 4
    with consumer(nsqd, "t") as connection:
        assert [message.body for message in connection.messages(4)] == [b"6", b"7", b"8", b"9"]


# -- what is said of it ------------------------------------------------------------------------------------------------


def test_metrics_tell_of_what_limits_did_and_of_nothing_else(nsqd: Nsqd, topic: str):
    created(nsqd, topic, max_messages=1, max_attempts=1)
    nsqd.publish(topic, b"x")
    assert_refused(nsqd.request("POST", f"/pub?topic={topic}", b"y"), 429, "TOPIC_FULL")
    with consumer(nsqd, topic) as connection:
        connection.send(req(connection.message().id, 0))
        connection.settle()
        wait_until(lambda: nsqd.stats(topic, "c").get("dead_letter_count") == 1)
    lines = nsqd.request("GET", "/metrics").text.splitlines()
    mine = {line.partition("{")[0]: line.rpartition(" ")[2] for line in lines if f'topic="{topic}"' in line}
    assert mine["flintmq_nsqd_topic_refused_total"] == "1"
    assert mine["flintmq_nsqd_channel_dead_letters_total"] == "1"
    assert not {"flintmq_nsqd_channel_expired_total", "flintmq_nsqd_channel_dropped_total"} & set(mine)


def test_a_plain_topic_s_rows_are_those_of_nsq(nsqd: Nsqd, topic: str):
    created(nsqd, topic)
    nsqd.publish(topic, b"x")
    fields = {"dead_letter_count", "giving_up_count", "expired_count", "dropped_count", "refused_count"}
    assert not fields & (set(nsqd.stats(topic)) | set(nsqd.stats(topic, "c")))
