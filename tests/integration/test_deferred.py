"""Many deferred messages and a real nsqd: due in time, over kills, looked at, cancelled, from an older release."""

from __future__ import annotations

import sqlite3
import time
from struct import Struct
from typing import Any

import pytest
from tests.integration.daemons import (
    PATIENCE_S,
    Daemons,
    Message,
    Nsqd,
    mpub_body,
    req,
    sized,
    wait_until,
)
from tests.old_database import make_older

from flintmq.limits import WINDOW_DEFERRED_MAX

BATCH = 100
MANY = 2 * WINDOW_DEFERRED_MAX
HOUR_MS = 3_600_000
LATE_S = PATIENCE_S  # a slow machine has this long; how quick it is the benchmarks say
_BODY = Struct(">IQ")  # number, and the time before which it must not come


def mdpub(topic: str, delay_ms: int, numbers: range) -> bytes:
    due_ns = time.time_ns() + delay_ms * 1_000_000
    bodies = [_BODY.pack(number, due_ns).ljust(100, b".") for number in numbers]
    return b"MDPUB %s %d\n%s" % (topic.encode(), delay_ms, sized(mpub_body(bodies)))


def client(nsqd: Nsqd) -> dict[str, Any]:
    """What nsqd says of the one consumer."""
    (row,) = nsqd.stats("t", "c")["clients"]
    return dict(row)


def publish(nsqd: Nsqd, topic: str, delay_ms: int, count: int, first: int = 0) -> None:
    """Publish so many messages with one delay in MDPUBs and see them acknowledged."""
    with nsqd.connect() as connection:
        for start in range(first, first + count, BATCH):
            connection.send(mdpub(topic, delay_ms, range(start, min(start + BATCH, first + count))))
        connection.ok(count=-(-count // BATCH))


def number_of(message: Message) -> int:
    """Its number; it must not be early."""
    number, due_ns = _BODY.unpack_from(message.body)
    assert time.time_ns() >= due_ns, "early"
    return int(number)


def with_channel(nsqd: Nsqd, topic: str = "t") -> None:
    nsqd.post(f"/topic/create?topic={topic}")
    nsqd.post(f"/channel/create?topic={topic}&channel=c")


def aside_rows(nsqd: Nsqd) -> int:
    """Messages set aside, as the database has them."""
    database = sqlite3.connect(f"file:{nsqd.data_path}/channels.db?mode=ro", uri=True)
    try:
        return int(database.execute("SELECT COALESCE(SUM(count), 0) FROM aside_pack").fetchone()[0])
    finally:
        database.close()


def consume(nsqd: Nsqd, count: int, topic: str = "t") -> list[int]:
    """Finish what comes until so many have; their numbers."""
    with nsqd.connect() as consumer:
        consumer.subscribe(topic, "c", 2500)
        numbers: list[int] = []
        while len(numbers) < count:
            message = consumer.message()
            numbers.append(number_of(message))
            consumer.finish(message)
        consumer.settle()
    return numbers


def test_many_with_a_short_delay_come_in_time_and_once(daemons: Daemons):
    nsqd = daemons.nsqd("--msg-timeout=15m")
    with_channel(nsqd)
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 2500)
        publish(nsqd, "t", 2000, MANY)
        assert nsqd.stats("t", "c")["deferred_count"] == MANY
        due = time.monotonic() + 2.0
        numbers: list[int] = []
        while len(numbers) < MANY:
            message = consumer.message()
            assert message.attempts == 1
            numbers.append(number_of(message))
            consumer.finish(message)
        assert time.monotonic() < due + LATE_S
    assert sorted(numbers) == list(range(MANY))
    wait_until(lambda: nsqd.unfinished("t", "c") == 0)
    wait_until(lambda: aside_rows(nsqd) == 0)


@pytest.mark.parametrize("flags", [("--durability=os",), ("--durability=fsync",)], ids=["os", "fsync"])
def test_killed_in_the_middle_of_coming_due(daemons: Daemons, flags: tuple[str, ...]):
    nsqd = daemons.nsqd(*flags)
    with_channel(nsqd)
    publish(nsqd, "t", 1500, MANY)
    finished: set[int] = set()
    written: set[int] = set()  # of them, those whose FIN no kill forgets
    repeated: list[int] = []
    for killed_after in (500, 1000, 1500):
        with nsqd.connect() as consumer:
            consumer.subscribe("t", "c", 500)
            here: set[int] = set()
            for seen in range(1, killed_after + 1):
                message = consumer.message()
                number = number_of(message)
                assert number not in written, "what was finished long before came again"
                if number in finished or number in here:
                    repeated.append(number)
                if seen % 7:  # some of every pack stay in flight
                    consumer.finish(message)
                    here.add(number)
                if seen == 200:
                    wait_until(lambda here=here: client(nsqd)["finish_count"] == len(here))  # type: ignore[misc]
                    nsqd.write_progress()
                    written |= here
            finished |= here
            nsqd.kill()
        nsqd.start()
    left = set(range(MANY)) - written
    wait_until(lambda: nsqd.stats("t", "c")["deferred_count"] == 0)
    numbers = consume(nsqd, nsqd.unfinished("t", "c"))
    assert set(numbers) | finished == set(range(MANY)), "lost"
    assert set(numbers) <= left and len(set(numbers)) == len(numbers)
    assert len(repeated) < MANY // 4


def given_back(nsqd: Nsqd, delay_ms: int) -> dict[int, int]:
    """Give everything back until something comes again; the wall time before which each may not."""
    due: dict[int, int] = {}
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 2500)
        while len(due) < MANY and (message := consumer.message()).attempts == 1:
            due[number_of(message)] = time.time_ns() + delay_ms * 1_000_000
            consumer.send(req(message.id, delay_ms))
        wait_until(lambda: client(nsqd)["requeue_count"] == len(due))
    return due


def test_given_back_with_a_delay_by_the_thousand(daemons: Daemons):
    nsqd = daemons.nsqd("--msg-timeout=15m")
    with_channel(nsqd)
    publish(nsqd, "t", 0, MANY)
    for delay_ms in (2500, 10_000, 40_000):
        due = given_back(nsqd, delay_ms)
        if nsqd.stats("t", "c")["deferred_count"] == MANY:
            break
        nsqd.post("/channel/empty?topic=t&channel=c")  # this machine needs more time for so many
        publish(nsqd, "t", 0, MANY)
    assert len(due) == MANY
    wait_until(lambda: aside_rows(nsqd) == MANY - WINDOW_DEFERRED_MAX, "what is beyond the window's bound is on disk")
    nsqd.kill()
    nsqd.start()
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 2500)
        for _ in range(MANY):
            message = consumer.message()
            assert message.attempts == 2
            number = number_of(message)
            assert time.time_ns() >= due.pop(number), "early"
            consumer.finish(message)
    assert not due


def test_looked_at_cancelled_and_emptied(daemons: Daemons):
    nsqd = daemons.nsqd()
    with_channel(nsqd)
    publish(nsqd, "t", HOUR_MS - 1000, 900)
    publish(nsqd, "t", 100_000, 500, first=900)
    wait_until(lambda: aside_rows(nsqd) == 1400)
    peeked = nsqd.get("/channel/peek?topic=t&channel=c&what=deferred&count=100&max_body=4")["messages"]
    assert [row["queue_cnt_index"] for row in peeked] == list(range(901, 1001)), "the next one first"
    assert all(0 < row["due_in_ms"] <= 100_000 and row["attempts"] == 0 for row in peeked)
    found = nsqd.get("/message/get?topic=t&search_mode=count&search_pos=7")
    assert found["queue_cnt_index"] == 7
    cancelled = [3, 4, 899, *range(901, 911)]
    for number in cancelled:
        answer = nsqd.post(f"/message/cancel?topic=t&msgid={number}")
        assert (answer.status, answer.json) == (200, {"channels": ["c"]})
    for number in (3, 905):
        assert nsqd.request("POST", f"/message/cancel?topic=t&msgid={number}").status == 404, "it is gone"
    assert nsqd.stats("t", "c")["deferred_count"] == 1400 - len(cancelled)
    for _ in range(2):
        peeked = nsqd.get("/channel/peek?topic=t&channel=c&what=deferred&count=100&max_body=4")["messages"]
        assert [row["queue_cnt_index"] for row in peeked] == list(range(911, 1011))
        nsqd.kill()
        nsqd.start()
        assert nsqd.stats("t", "c")["deferred_count"] == 1400 - len(cancelled)
    nsqd.post("/channel/empty?topic=t&channel=c")
    assert nsqd.stats("t", "c")["deferred_count"] == 0
    publish(nsqd, "t", 200, 50, first=5000)
    wait_until(lambda: aside_rows(nsqd) == 0)
    nsqd.kill()
    nsqd.start()
    assert sorted(consume(nsqd, 50)) == list(range(5000, 5050))
    assert nsqd.unfinished("t", "c") == 0


def test_cancelled_while_coming_due(daemons: Daemons):
    nsqd = daemons.nsqd()
    with_channel(nsqd)
    publish(nsqd, "t", 1000, WINDOW_DEFERRED_MAX + 500)
    first, last = WINDOW_DEFERRED_MAX + 1, WINDOW_DEFERRED_MAX + 500
    assert nsqd.post(f"/message/cancel?topic=t&msgid={first}").status == 200
    wait_until(lambda: nsqd.stats("t", "c")["deferred_count"] == 0, "all of it is due")
    assert nsqd.post(f"/message/finish?topic=t&channel=c&msgid={last}").status == 200
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 2500)
        messages = consumer.messages(10)
        held = int(messages[-1].id, 16)
        assert nsqd.post(f"/message/finish?topic=t&channel=c&msgid={held}").status == 200
    numbers = consume(nsqd, WINDOW_DEFERRED_MAX + 500 - 3)
    expected = set(range(WINDOW_DEFERRED_MAX + 500)) - {first - 1, last - 1, held - 1}
    assert set(numbers) == expected


def test_a_data_directory_of_an_older_release(daemons: Daemons):
    """Rows of schema version 2 are delivered, with the attempts that they had."""
    nsqd = daemons.nsqd()
    with_channel(nsqd)
    publish(nsqd, "t", HOUR_MS - 1000, 300)
    wait_until(lambda: aside_rows(nsqd) == 300)
    nsqd.stop()
    make_older(nsqd.data_path, 2)
    soon_ns = time.time_ns() + 1_000_000_000
    database = sqlite3.connect(nsqd.data_path / "channels.db", isolation_level=None)
    database.execute("UPDATE aside SET due_ns = ?, attempts = sequence % 3", (soon_ns,))
    database.close()
    nsqd.start()
    assert nsqd.unfinished("t", "c") == 300
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 2500)
        messages = consumer.messages(300)
        assert time.time_ns() >= soon_ns, "early"
        assert {int(m.id, 16): m.attempts for m in messages} == {n: n % 3 + 1 for n in range(1, 301)}
        consumer.finish(*messages)
        consumer.settle()
    wait_until(lambda: nsqd.unfinished("t", "c") == 0)


def test_memory_does_not_grow_with_what_is_deferred(daemons: Daemons):
    nsqd = daemons.nsqd()
    with_channel(nsqd)
    publish(nsqd, "t", HOUR_MS - 1000, 10_000)
    wait_until(lambda: aside_rows(nsqd) == 10_000)
    before = nsqd.resident_bytes()
    publish(nsqd, "t", HOUR_MS - 1000, 100_000)
    wait_until(lambda: aside_rows(nsqd) == 110_000, timeout_s=3 * PATIENCE_S)
    assert nsqd.resident_bytes() - before < 30 * 1024 * 1024


def test_a_clean_restart_and_a_consumer_that_goes(daemons: Daemons):
    nsqd = daemons.nsqd()
    with_channel(nsqd)
    publish(nsqd, "t", 500, WINDOW_DEFERRED_MAX + 1000)
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 2500)
        consumer.messages(2500)
    wait_until(lambda: nsqd.stats("t", "c")["in_flight_count"] == 0)
    nsqd.stop()
    nsqd.start()
    numbers = []
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 2500)
        attempts = []
        for message in (consumer.message() for _ in range(WINDOW_DEFERRED_MAX + 1000)):
            numbers.append(number_of(message))
            attempts.append(message.attempts)
            consumer.finish(message)
    assert sorted(numbers) == list(range(WINDOW_DEFERRED_MAX + 1000))
    assert attempts.count(2) == 2500
