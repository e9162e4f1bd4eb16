"""nsqd as a process: how it starts and stops, what a restart keeps, when it closes connections.

What the commands answer one by one is the conformance suite's; HTTP and discovery have files of their own.
Source: NSQ's TCP protocol, NSQ's options, NSQ's data files.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import re
import signal
import socket
import threading
import time

import pytest
from tests.integration.daemons import (
    ERROR,
    HEARTBEAT,
    MESSAGE,
    PATIENCE_S,
    RESPONSE,
    SOON_S,
    Closed,
    Connection,
    Daemons,
    Message,
    Nsqd,
    dpub,
    fin,
    message_of,
    mpub,
    pub,
    req,
    sized,
    touch,
    wait_until,
)
from tests.integration.load import Numbers, Publisher, check, drain
from tests.ports import has_ipv6

LOG_LINE = re.compile(
    r"\[nsqd\] \d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6} (?:DEBUG|INFO|WARNING|ERROR|FATAL): \S.*", re.ASCII
)
BUSY = "Resource temporarily unavailable"


def bodies(messages: list[Message]) -> list[bytes]:
    return [message.body for message in messages]


# -- start and stop ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("durability", "promise"),
    [
        ("fsync", "OK means the message survives a power loss"),
        ("os", "OK means the message survives the end of this process, not a power loss"),
        ("interval", "OK means the message survives the end of this process; a power loss may take the last interval"),
    ],
)
def test_what_it_says_when_it_starts(daemons: Daemons, durability: str, promise: str):
    nsqd = daemons.nsqd(f"--durability={durability}")
    lines = nsqd.log.splitlines()
    assert [line for line in lines if not LOG_LINE.fullmatch(line)] == []
    texts = [line.split(": ", 1)[1] for line in lines]
    assert texts[0] == nsqd.request("GET", "/stats").text.splitlines()[0]
    assert re.fullmatch(r"nsqd v1\.3\.0 \(built w/python3\.\d+\.\d+\) FlintMQ v\d+\.\d+\.\d+\S*", texts[0])
    assert texts[1:] == [
        f"durability: {durability} - {promise}",
        f"TCP: listening on 127.0.0.1:{nsqd.tcp[1]}",
        f"HTTP: listening on 127.0.0.1:{nsqd.http[1]}",
    ]
    assert nsqd.get("/stats?format=json")["durability"] == durability


def test_durable_is_the_default(daemons: Daemons):
    assert "durability: fsync - " in daemons.nsqd().log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_0(nsqd: Nsqd, number: signal.Signals):
    with nsqd.connect() as idle, nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 10)
        nsqd.stop(number)
        assert idle.wait_closed() == []
        assert consumer.wait_closed() == []
    assert "INFO: stopping: " in nsqd.log


def test_it_ends_quickly_with_clients_that_do_nothing_about_it(nsqd: Nsqd):
    """Clients that neither read nor close must not keep nsqd from ending."""
    nsqd.publish("t", *[b"x" * 100_000] * 40)
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            connection = stack.enter_context(nsqd.connect(receive_buffer_bytes=4096))
            connection.subscribe("t", "c", 100)
        nsqd.stop(timeout_s=SOON_S)


def test_what_was_published_when_sigterm_came_is_answered_or_unknown(nsqd: Nsqd):
    numbers = Numbers()
    publishers = [Publisher(nsqd.tcp, "t", numbers, window=50) for _ in range(2)]
    for publisher in publishers:
        publisher.start()
    wait_until(lambda: all(publisher.acked_count > 2000 for publisher in publishers), "load")
    nsqd.stop()
    for publisher in publishers:
        publisher.finish()
        assert publisher.errors in ([], ["E_PUB_FAILED PUB failed exiting"])
    nsqd.start()
    result = check(publishers, drain(nsqd, "t", "c"))
    assert result.duplicate_count == 0


def test_a_second_nsqd_does_not_get_the_data_directory(daemons: Daemons, nsqd: Nsqd):
    second = daemons.new_nsqd(data_path=nsqd.data_path)
    second.launch()
    assert second.wait() == 1
    assert second.log.splitlines()[-1].endswith(
        f"FATAL: failed to instantiate nsqd - failed to lock data-path: cannot flock directory {nsqd.data_path} - "
        f"{BUSY} (possibly in use by another instance of nsqd)"
    )
    assert nsqd.request("GET", "/ping").body == b"OK"


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_the_lock_goes_with_the_process(daemons: Daemons, nsqd: Nsqd, end: str):
    second = daemons.new_nsqd(data_path=nsqd.data_path)
    getattr(nsqd, end)()
    second.start()
    assert second.request("GET", "/ping").body == b"OK"


def test_a_data_path_that_does_not_exist(daemons: Daemons):
    nsqd = daemons.new_nsqd()
    nsqd.data_path.rmdir()
    nsqd.launch()
    assert nsqd.wait() == 1
    line = nsqd.log.splitlines()[-1]
    assert "FATAL: failed to instantiate nsqd - " in line
    assert f"data-path {nsqd.data_path}: No such file or directory; create the directory first" in line


def test_a_port_that_is_taken(daemons: Daemons, nsqd: Nsqd):
    second = daemons.new_nsqd()
    second.tcp = nsqd.tcp
    second.launch()
    assert second.wait() == 1
    address = f"127.0.0.1:{nsqd.tcp[1]}"
    expected = f"FATAL: failed to instantiate nsqd - listen ({address}) failed - "
    assert expected in second.log.splitlines()[-1]
    assert "listening on" not in second.log


# -- restart -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("host", ["", "0.0.0.0", "[::]"])
def test_all_interfaces_are_those_of_either_family_for_every_daemon(daemons: Daemons, host: str):
    """As with NSQ, whose default address is that of IPv4's."""
    both = (f"--tcp-address={host}:0", f"--http-address={host}:0")
    nsqlookupd = daemons.nsqlookupd(*both)
    nsqd = daemons.nsqd(*both, f"--lookupd-tcp-address=[::1]:{nsqlookupd.tcp[1]}")
    nsqadmin = daemons.nsqadmin(both[1], f"--lookupd-http-address=[::1]:{nsqlookupd.http[1]}")
    for place in ("127.0.0.1", "::1"):
        for daemon in (nsqd, nsqlookupd, nsqadmin):
            connection = http.client.HTTPConnection(place, daemon.http[1], timeout=30)
            connection.request("GET", "/ping")
            assert connection.getresponse().read() == b"OK"
            connection.close()
        for port in (nsqd.tcp[1], nsqlookupd.tcp[1]):
            socket.create_connection((place, port), timeout=30).close()


def test_a_clean_restart_loses_and_repeats_nothing(daemons: Daemons):
    nsqd = daemons.nsqd()
    sent = [b"%d" % number for number in range(5000)]
    nsqd.publish("t", *sent)
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 2500)
        first = consumer.messages(2500)
        consumer.rdy(0)
        consumer.finish(*first[:2000])
        consumer.finish(*first[2100:2200])
        consumer.settle()
        before = nsqd.stats("t", "c")
        assert (before["in_flight_count"], before["depth"]) == (400, 2500)
    with nsqd.connect() as other:
        other.subscribe("t", "other")
        nsqd.publish("t", b"after")
    nsqd.restart()
    unfinished = bodies(first[2000:2100]) + bodies(first[2200:])
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 2500)
        rest = []
        for _ in range(len(unfinished) + 2500 + 1):
            message = consumer.message()
            rest.append(message)
            consumer.finish(message)
        consumer.nothing_comes()
    assert sorted(bodies(rest)) == sorted([*unfinished, *sent[2500:], b"after"])
    attempts = {message.body: message.attempts for message in rest}
    assert {attempts[body] for body in unfinished} == {2}
    assert attempts[b"after"] == 1
    nsqd.restart()
    assert (nsqd.unfinished("t", "c"), nsqd.unfinished("t", "other")) == (0, 1)


def test_attempts_ids_and_timestamps_survive_a_restart(nsqd: Nsqd):
    nsqd.publish("t", b"given back", b"held", b"touched")
    seen: dict[bytes, list[Message]] = {}
    for _ in range(4):
        with nsqd.connect() as consumer:
            consumer.subscribe("t", "c", 3)
            for message in consumer.messages(3):
                seen.setdefault(message.body, []).append(message)
                if message.body == b"touched":
                    consumer.send(touch(message.id))
            consumer.rdy(0)
            consumer.send(req(seen[b"given back"][-1].id, 0))
            consumer.settle()
            nsqd.restart()  # with the connection open: the messages are in flight
    for body, messages in seen.items():
        assert [message.attempts for message in messages] == [1, 2, 3, 4], body
        assert len({(message.id, message.timestamp_ns) for message in messages}) == 1, body


def test_a_message_that_was_only_delivered_counts_that_attempt_after_a_restart(nsqd: Nsqd):
    nsqd.publish("t", b"x")
    for attempts in (1, 2, 3):
        with nsqd.connect() as consumer:
            message = consumer.subscribe("t", "c", 1).message()
            assert message.attempts == attempts
            nsqd.write_progress()  # of everything before the delivery
        nsqd.restart()


def test_more_deferred_messages_than_fit_in_memory_keep_their_attempts(nsqd: Nsqd):
    """Some of them live in the database; a clean restart repeats none as if it were new, and finishes stay finished."""
    count = 5000
    numbers = Numbers()
    publisher = Publisher(nsqd.tcp, "t", numbers, defer_ms=500, count_max=count)
    nsqd.post("/topic/create?topic=t")
    nsqd.post("/channel/create?topic=t&channel=c")
    publisher.start()
    publisher.finish()
    for attempts in (1, 2):
        with nsqd.connect() as one, nsqd.connect() as two:
            one.subscribe("t", "c", count // 2)
            two.subscribe("t", "c", count // 2)
            messages = one.messages(count // 2) + two.messages(count // 2)
            assert {message.attempts for message in messages} == {attempts}
            assert len({message.body for message in messages}) == count
        nsqd.restart()
    consumer = drain(nsqd, "t", "c")
    check([publisher], consumer)
    assert {delivery.attempts for delivery in consumer.deliveries} == {3}
    assert len(consumer.deliveries) == count
    nsqd.restart()
    assert nsqd.unfinished("t", "c") == 0


def test_ids_go_up_over_restarts_of_any_kind(nsqd: Nsqd):
    ids = []
    for end in (nsqd.restart, nsqd.kill, nsqd.restart, nsqd.stop):
        nsqd.publish("t", b"x")
        end()
        if not nsqd.is_running:
            nsqd.start()
        with nsqd.connect() as consumer:
            consumer.subscribe("t", "c", 1)
            message = consumer.message()
            consumer.finish(message)
            consumer.settle()
            ids.append(message.id)
        nsqd.write_progress()  # so that the kill does not bring it back
    assert ids == sorted(set(ids))
    assert all(re.fullmatch(rb"[0-9a-f]{16}", message_id) for message_id in ids)


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_deferral_survives(nsqd: Nsqd, end: str):
    """DPUB and REQ with a delay are neither early nor lost, whether nsqd stopped or was killed."""
    delay_ms = 2000
    with nsqd.connect() as connection:
        connection.ok(pub("t", b"requeued"))
        connection.subscribe("t", "c", 1)
        message = connection.message()
        begun = time.time()
        connection.send(req(message.id, delay_ms))
        connection.ok(dpub("t", delay_ms, b"deferred"))
        connection.rdy(0)
        wait_until(lambda: nsqd.stats("t", "c")["deferred_count"] == 2, "both deferred")
        nsqd.write_progress()  # REQ has no answer
    getattr(nsqd, end)()
    nsqd.start()
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 10)
        arrived = {}
        for _ in range(2):
            message = consumer.message()
            arrived[message.body] = (time.time() - begun, message.attempts)
            consumer.finish(message)
    for body, attempts in ((b"requeued", 2), (b"deferred", 1)):
        after_s, seen_attempts = arrived[body]
        assert delay_ms / 1000 <= after_s + 0.001, arrived
        assert seen_attempts == attempts, arrived


def test_pauses_and_channels_survive(nsqd: Nsqd):
    for target in (
        "/topic/create?topic=bare",
        "/topic/create?topic=paused",
        "/channel/create?topic=paused&channel=one",
        "/topic/pause?topic=paused",
        "/topic/create?topic=t",
        "/channel/create?topic=t&channel=open",
        "/channel/create?topic=t&channel=shut",
        "/channel/pause?topic=t&channel=shut",
        "/channel/create?topic=t&channel=gone",
        "/channel/delete?topic=t&channel=gone",
        "/topic/create?topic=gone",
        "/topic/delete?topic=gone",
    ):
        nsqd.post(target)
    nsqd.publish("paused", b"1", b"2")
    nsqd.publish("t", b"3")

    def picture() -> dict[str, object]:
        topics = nsqd.get("/stats?format=json")["topics"]
        return {
            topic["topic_name"]: (
                topic["paused"],
                topic["depth"],
                {row["channel_name"]: (row["paused"], row["depth"]) for row in topic["channels"]},
            )
            for topic in topics
        }

    expected = {
        "bare": (False, 0, {}),
        "paused": (True, 2, {"one": (False, 0)}),
        "t": (False, 0, {"open": (False, 1), "shut": (True, 1)}),
    }
    assert picture() == expected
    nsqd.restart()
    assert picture() == expected
    nsqd.kill()
    nsqd.start()
    assert picture() == expected
    with nsqd.connect() as held_by_topic, nsqd.connect() as held_by_channel:
        held_by_topic.subscribe("paused", "one", 10)
        held_by_channel.subscribe("t", "shut", 10)
        held_by_topic.nothing_comes()
        held_by_channel.nothing_comes()
        nsqd.post("/topic/unpause?topic=paused")
        nsqd.post("/channel/unpause?topic=t&channel=shut")
        assert bodies(held_by_topic.messages(2)) == [b"1", b"2"]
        assert held_by_channel.message().body == b"3"


def test_the_first_channel_gets_the_backlog_also_after_a_restart(nsqd: Nsqd):
    nsqd.publish("t", b"1", b"2")
    nsqd.restart()
    nsqd.publish("t", b"3")
    with nsqd.connect() as first, nsqd.connect() as second:
        first.subscribe("t", "first", 10)
        second.subscribe("t", "second", 10)
        nsqd.publish("t", b"4")
        assert bodies(first.messages(4)) == [b"1", b"2", b"3", b"4"]
        assert second.message().body == b"4"
        second.nothing_comes()


# -- ephemeral ---------------------------------------------------------------------------------------------------------


def test_an_ephemeral_channel_goes_with_its_last_client(nsqd: Nsqd):
    with nsqd.connect() as one, nsqd.connect() as two:
        one.subscribe("t", "c#ephemeral")
        two.subscribe("t", "c#ephemeral")
        one.close()
        wait_until(lambda: nsqd.stats("t", "c#ephemeral")["client_count"] == 1)
    wait_until(lambda: nsqd.stats("t")["channels"] == [], "the channel gone")


def test_an_ephemeral_topic_goes_with_its_last_channel(nsqd: Nsqd):
    with nsqd.connect() as consumer:
        consumer.subscribe("t#ephemeral", "c#ephemeral", 1)
        nsqd.publish("t#ephemeral", b"x")
        consumer.finish(consumer.message())
        assert [row["topic_name"] for row in nsqd.get("/stats?format=json")["topics"]] == ["t#ephemeral"]
    wait_until(lambda: nsqd.get("/stats?format=json")["topics"] == [], "the topic gone")
    assert not list(nsqd.data_path.glob("topics/*/p-*")), "an ephemeral topic has no files"


def test_nothing_ephemeral_survives_a_restart(nsqd: Nsqd):
    nsqd.publish("t#ephemeral", b"x")
    nsqd.publish("t", b"y")
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c#ephemeral")
        nsqd.restart()
    (row,) = nsqd.get("/stats?format=json")["topics"]
    assert (row["topic_name"], row["channels"]) == ("t", [])


def test_an_ephemeral_channel_keeps_no_more_than_the_memory_queue(daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os", "--mem-queue-size=100")
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c#ephemeral")
        for _ in range(5):
            nsqd.publish("t", *[b"x"] * 60)
        assert nsqd.stats("t", "c#ephemeral")["depth"] == 100
        consumer.rdy(1000)
        consumer.finish(*consumer.messages(100))
        consumer.nothing_comes()


# -- connections -------------------------------------------------------------------------------------------------------


def test_heartbeats_come_as_asked_for_and_silence_is_cut_off(nsqd: Nsqd):
    """Two intervals without a sign of life close the connection, without a word."""
    with nsqd.connect() as silent, nsqd.connect() as lively:
        silent.identify(heartbeat_interval=1000)
        lively.identify(heartbeat_interval=1000)
        begun = time.monotonic()
        beats = closed_after_s = 0.0
        while not (closed_after_s and lively.heartbeat_count >= 3):
            assert time.monotonic() < begun + PATIENCE_S, (beats, closed_after_s, lively.heartbeat_count)
            lively.silence(0.1)
            lively.send(b"NOP\n")
            if not closed_after_s:
                with contextlib.suppress(TimeoutError):
                    frame = silent.any_frame(0.02)
                    assert frame in (None, (RESPONSE, HEARTBEAT))
                    beats += frame is not None
                    closed_after_s = time.monotonic() - begun if frame is None else 0.0
        assert 1.9 < closed_after_s < SOON_S
        assert beats in (1, 2)
        assert time.monotonic() - begun > 2.9, "three heartbeats take three seconds"
        lively.settle()


def test_a_message_in_flight_at_a_silent_client_comes_to_another_one(nsqd: Nsqd):
    nsqd.publish("t", b"x")
    with nsqd.connect() as silent, nsqd.connect() as other:
        silent.identify(heartbeat_interval=1000)
        silent.subscribe("t", "c", 1)
        assert silent.message().attempts == 1
        other.subscribe("t", "c", 1)
        message = other.message()
        assert (message.body, message.attempts) == (b"x", 2)


def test_a_client_without_heartbeats_may_publish_but_not_subscribe(nsqd: Nsqd):
    with nsqd.connect() as connection:
        connection.identify(heartbeat_interval=-1)
        connection.ok(pub("t", b"x"))
        assert connection.error(b"SUB t c\n") == "E_INVALID cannot SUB with heartbeats disabled"
        assert connection.wait_closed() == []


def test_a_lost_connection_gives_its_messages_back_at_once(nsqd: Nsqd):
    nsqd.publish("t", *[b"%d" % number for number in range(10)])
    with nsqd.connect() as lost:
        lost.subscribe("t", "c", 10)
        lost.messages(10)
    with nsqd.connect() as other:
        other.subscribe("t", "c", 10)
        again = other.messages(10)
        assert nsqd.stats("t", "c")["timeout_count"] == 0
    assert {message.attempts for message in again} == {2}


def test_timeout_touch_and_answers_that_come_too_late(daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os", "--max-msg-timeout=2500ms")
    nsqd.publish("t", b"x")
    with nsqd.connect() as consumer:
        consumer.identify(msg_timeout=2000)
        begun = time.monotonic()
        consumer.subscribe("t", "c", 1)
        first = consumer.message()
        frame = None
        while frame is None or frame.kind != MESSAGE:  # touched without end, which max-msg-timeout ends all the same
            consumer.send(touch(first.id))  # refused in the instant between timeout and delivery
            with contextlib.suppress(TimeoutError):
                frame = consumer.any_frame(0.3)
        again = message_of(frame.data)
        assert time.monotonic() - begun >= 2.5
        assert (again.id, again.attempts) == (first.id, 2)
        consumer.rdy(0)
        wait_until(lambda: nsqd.stats("t", "c")["timeout_count"] == 2, "the second timeout")
        stats = nsqd.stats("t", "c")
        assert (stats["timeout_count"], stats["depth"], stats["in_flight_count"]) == (2, 1, 0)
        shown = first.id.decode()
        for command, name in ((fin(first.id), "FIN"), (req(first.id, 0), "REQ"), (touch(first.id), "TOUCH")):
            assert consumer.error(command) == f"E_{name}_FAILED {name} {shown} failed ID not in flight"
        consumer.settle()


def test_rdy_is_a_level_and_cls_drains(nsqd: Nsqd):
    nsqd.publish("t", *[b"%d" % number for number in range(20)])
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 5)
        held = consumer.messages(5)
        consumer.nothing_comes()
        consumer.finish(held[0], held[1])
        held = held[2:] + consumer.messages(2)
        consumer.nothing_comes()
        assert nsqd.stats("t", "c")["in_flight_count"] == 5
        consumer.send(b"CLS\n")
        assert consumer.response() == b"CLOSE_WAIT"
        consumer.finish(*held)
        consumer.settle()
        stats = nsqd.stats("t", "c")
        assert (stats["in_flight_count"], stats["depth"], stats["clients"][0]["state"]) == (0, 13, 4)


def test_more_consumers_than_a_channel_has_slots_for(nsqd: Nsqd):
    """Beyond 250 consumers a channel keeps its books another way; nothing of it shows."""
    nsqd.publish("t", *[b"%d" % number for number in range(500)])
    with contextlib.ExitStack() as stack:
        consumers = [stack.enter_context(nsqd.connect()).subscribe("t", "c", 1) for _ in range(300)]
        held = [consumer.message() for consumer in consumers]
        assert len(set(bodies(held))) == 300
        for consumer, message in zip(consumers[:290], held, strict=False):
            consumer.finish(message)
        seen = set(bodies(held[:290]))
        for consumer in consumers[290:]:
            consumer.close()
        wait_until(lambda: nsqd.stats("t", "c")["client_count"] == 290, "ten gone")
        repeated = twice = 0
        while len(seen) < 500:
            for consumer in consumers[:290]:
                with contextlib.suppress(AssertionError):
                    message = consumer.message(timeout_s=0.01)
                    repeated += message.body in seen
                    twice += message.attempts == 2
                    seen.add(message.body)
                    consumer.finish(message)
        assert (repeated, twice) == (0, 10)
        wait_until(lambda: nsqd.unfinished("t", "c") == 0, "all finished")


def test_what_is_due_does_not_wait_behind_what_is_deferred(nsqd: Nsqd):
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 1)
        publisher = Publisher(nsqd.tcp, "t", Numbers(), defer_ms=60_000, count_max=30_000, window=500)
        publisher.start()
        publisher.finish()
        nsqd.publish("t", b"now")
        assert consumer.message().body == b"now"
        stats = nsqd.stats("t", "c")
        assert (stats["deferred_count"], stats["in_flight_count"], stats["depth"]) == (30_000, 1, 0)


def test_every_publish_is_answered_while_its_topic_is_deleted(nsqd: Nsqd):
    """OK, or an error and the end of the connection; never silence."""
    deleting = threading.Event()
    silent: list[str] = []
    answered = [0]

    def publish() -> None:
        while not deleting.is_set():
            with contextlib.suppress(Closed), nsqd.connect() as connection:
                connection.send(pub("t", b"x") * 20)
                for _ in range(20):
                    try:
                        kind, _ = connection.frame()
                    except Closed:
                        raise
                    except AssertionError as error:
                        silent.append(str(error))
                        return
                    answered[0] += 1
                    if kind == ERROR:
                        break

    threads = [threading.Thread(target=publish) for _ in range(3)]
    for thread in threads:
        thread.start()
    deleted = 0
    while deleted < 100:
        deleted += nsqd.request("POST", "/topic/delete?topic=t").status == 200
    deleting.set()
    for thread in threads:
        thread.join()
    assert not silent
    assert answered[0] > 1000


def test_too_many_consumers_of_a_channel(daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os", "--max-channel-consumers=2")
    with nsqd.connect() as one, nsqd.connect() as two, nsqd.connect() as three, nsqd.connect() as four:
        one.subscribe("t", "c")
        two.subscribe("t", "c")
        assert three.error(b"SUB t c\n") == "E_SUB_FAILED SUB failed consumers for t:c exceeds limit of 2"
        assert three.wait_closed() == []
        four.subscribe("t", "another")
        one.close()
        wait_until(lambda: nsqd.stats("t", "c")["client_count"] == 1)
        with nsqd.connect() as again:
            again.subscribe("t", "c")


def test_deleting_what_is_consumed_closes_the_consumers(nsqd: Nsqd):
    with nsqd.connect() as one, nsqd.connect() as two:
        one.subscribe("t", "one")
        two.subscribe("t", "two")
        nsqd.post("/channel/delete?topic=t&channel=one")
        assert one.wait_closed() == []
        two.settle()
        nsqd.post("/topic/delete?topic=t")
        assert two.wait_closed() == []
    assert [row["topic_name"] for row in nsqd.get("/stats?format=json")["topics"]] == ["settle#ephemeral"]


# -- unknown data ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("magic", [b"  V1", b"GET ", b"\0\0\0\0", b"  v2", b"PROX"])
def test_another_protocol(nsqd: Nsqd, magic: bytes):
    with nsqd.connect(magic) as connection:
        assert connection.error() == "E_BAD_PROTOCOL"
        assert connection.wait_closed() == []
    assert f": E_BAD_PROTOCOL bad protocol magic {repr(magic)[1:]}" in nsqd.log


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (b"HELLO\n", "E_INVALID invalid command HELLO"),
        (b"nop\n", "E_INVALID invalid command nop"),
        (b"\n", "E_INVALID invalid command "),
        (b"FIN 0123456789abcdef\n", "E_INVALID cannot FIN in current state"),
        (b"SUB  a b\n", 'E_BAD_TOPIC SUB topic name "" is not valid'),
        (b"PUB t\n\xff\xff\xff\xff", "E_BAD_MESSAGE PUB invalid message body size -1"),
        (b"PUB t\n\x7f\xff\xff\xff", "E_BAD_MESSAGE PUB message too big 2147483647 > 1048576"),
        (b"MPUB t\n\x7f\xff\xff\xff", "E_BAD_BODY MPUB body too big 2147483647 > 5242880"),
        (b"IDENTIFY\n" + sized(b"[]"), "E_BAD_BODY IDENTIFY failed to decode JSON body"),
    ],
)
def test_what_is_not_understood_is_answered_and_closed(nsqd: Nsqd, command: bytes, error: str):
    with nsqd.connect() as connection:
        assert connection.error(command) == error
        assert connection.wait_closed() == []


def test_a_line_without_an_end_closes_without_a_frame(nsqd: Nsqd):
    with nsqd.connect() as connection:
        with contextlib.suppress(ConnectionError):
            connection.send(b"A" * 20_000)
        assert connection.wait_closed() == []


def test_an_error_comes_behind_the_answers_before_it(nsqd: Nsqd):
    with nsqd.connect() as connection:
        connection.send(pub("t", b"1") + mpub("t", [b"2", b"3"]) + b"NONSENSE\n" + pub("t", b"never"))
        connection.ok(count=2)
        assert connection.error() == "E_INVALID invalid command NONSENSE"
        assert connection.wait_closed() == []
    assert nsqd.stats("t")["depth"] == 3


def test_a_client_that_breaks_off_in_the_middle_leaves_nothing(nsqd: Nsqd):
    for part in (b" ", b"  V", b"PUB", b"PUB t\n\0\0", b"PUB t\n\0\0\0\x05ab", b"MPUB t\n" + sized(b"\0\0\0\x02\0")):
        connection = socket.create_connection(nsqd.tcp)
        connection.sendall(part if part.startswith(b" ") else b"  V2" + part)
        connection.close()
    nsqd.publish("t", b"whole")
    assert nsqd.stats("t")["message_count"] == 1


def test_random_bytes_hurt_nobody(nsqd: Nsqd):
    chance = random.Random(20261120)
    words = [
        b"PUB t\n",
        b"SUB t c\n",
        b"FIN ",
        b"RDY 5\n",
        b"IDENTIFY\n",
        b"MPUB t\n",
        b"\0\0\0\x02",
        b"{}",
        b"\n",
        b" ",
    ]
    with nsqd.connect() as bystander:
        bystander.subscribe("quiet", "c", 1)
        for _ in range(150):
            parts = chance.choices(words, k=chance.randrange(1, 8))
            parts.insert(chance.randrange(len(parts)), chance.randbytes(chance.randrange(40)))
            with contextlib.closing(socket.create_connection(nsqd.tcp)) as connection:
                connection.sendall(b"  V2" + b"".join(parts))
                if chance.random() < 0.3:
                    connection.shutdown(socket.SHUT_WR)
        for _ in range(20):
            with contextlib.closing(socket.create_connection(nsqd.http)) as connection:
                connection.sendall(chance.randbytes(300) + b"\r\n\r\n")
        nsqd.publish("quiet", b"x")
        assert bystander.message().body == b"x"
    wait_until(lambda: len(os.listdir(f"/proc/{nsqd.pid}/fd")) < 40, "descriptors closed")
    assert nsqd.request("GET", "/ping").body == b"OK"


def test_protocol_v2_on_the_http_port(nsqd: Nsqd):
    with Connection(nsqd.http) as connection:
        connection.send(b"IDENTIFY\n\r\n\r\n")
        connection.socket.settimeout(5)
        assert connection.socket.recv(100).startswith(b"HTTP/1.1 400 ")


def test_errors_frame_kind(nsqd: Nsqd):
    with nsqd.connect() as connection:
        connection.send(b"X\n")
        assert connection.frame().kind == ERROR
