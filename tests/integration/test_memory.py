"""What clients can make nsqd keep in memory is bounded, whatever they do, and who reads gets everything meanwhile."""

from __future__ import annotations

import contextlib
import re
import socket
from functools import partial

import pytest
from tests.integration.daemons import Connection, Daemons, Nsqd, pub, wait_until

MEBIBYTE = 1024 * 1024
BUDGET_BYTES = 64 * MEBIBYTE
OUTPUT_BYTES = BUDGET_BYTES * 6 // 16
SLACK_BYTES = 64 * MEBIBYTE  # of Python and malloc beside it
BODY = bytes(1_000_000)
SUBSCRIBER_COUNT = 600
EACH_COUNT = 6  # more than the kernel keeps of a connection that is not read


def used(nsqd: Nsqd, share: str) -> int:
    """What /metrics says of a share of the budget."""
    text = nsqd.request("GET", "/metrics").text
    found = re.search(rf'^flintmq_nsqd_memory_used_bytes{{share="{share}"}} (\d+)', text, re.MULTILINE)
    assert found, text
    return int(found[1])


def is_done(nsqd: Nsqd, channel: str) -> bool:
    return nsqd.unfinished("t", channel) == 0


@pytest.fixture
def small(daemons: Daemons) -> Nsqd:
    return daemons.nsqd("--durability=os", f"--memory-budget={BUDGET_BYTES}")


def receive(reader: Connection, count: int) -> None:
    """Receive and finish the next messages of a topic, which are whole."""
    for _ in range(count):
        message = reader.message()
        assert message.body == BODY
        reader.finish(message)


def test_subscribers_that_do_not_read_use_no_more_than_the_budget(small: Nsqd):
    """600 subscribers that do not read, and four messages of 1 MB: a reader gets them all, and memory is bounded."""
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(small.connect())
        reader.subscribe("t", "reader", rdy_count=10)
        small.publish("t", BODY)
        receive(reader, 1)
        wait_until(lambda: small.unfinished("t", "reader") == 0, "finished")
        before = small.resident_bytes()
        for number in range(SUBSCRIBER_COUNT):
            subscriber = stack.enter_context(socket.socket())
            subscriber.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            subscriber.connect(small.tcp)
            subscriber.sendall(b"  V2SUB t c%d\nRDY 100\n" % number)
        wait_until(lambda: len(small.stats("t")["channels"]) == SUBSCRIBER_COUNT + 1, "subscribed")
        peak = 0
        for _ in range(4):
            small.publish("t", BODY)
            receive(reader, 1)
            peak = max(peak, small.resident_bytes())
            assert used(small, "output") <= OUTPUT_BYTES + 2 * len(BODY)
        wait_until(lambda: small.unfinished("t", "reader") == 0, "the reader has everything")
        assert peak - before < BUDGET_BYTES + SLACK_BYTES
        assert small.request("GET", "/ping").body == b"OK"


def test_nothing_is_lost_while_memory_is_short(small: Nsqd):
    """Who does not read waits; as soon as it reads, it gets everything from the log."""
    count = 40
    with contextlib.ExitStack() as stack:
        consumers = [stack.enter_context(small.connect(receive_buffer_bytes=4096)) for _ in range(count)]
        for number, consumer in enumerate(consumers):
            consumer.subscribe("t", f"c{number}", rdy_count=100)
        for _ in range(EACH_COUNT):
            small.publish("t", BODY)
        wait_until(lambda: used(small, "output") > OUTPUT_BYTES // 2, "memory is short")
        assert used(small, "output") <= OUTPUT_BYTES + 2 * len(BODY)
        for consumer in consumers:  # each at its own time, so that most wait for long
            try:
                receive(consumer, EACH_COUNT)
            except AssertionError:
                assert "others wait for memory" in small.log, "only for this reason a connection is closed"
    for number in range(count):
        with small.connect() as again:
            again.subscribe("t", f"c{number}", rdy_count=1)
            row = small.stats("t", f"c{number}")
            receive(again, int(row["depth"]) + int(row["in_flight_count"]))
            wait_until(partial(is_done, small, f"c{number}"), "everything arrived")
            assert small.stats("t", f"c{number}")["message_count"] == EACH_COUNT
    wait_until(lambda: used(small, "output") < OUTPUT_BYTES // 2, "memory is free again")


def test_who_does_not_read_is_closed_when_others_wait(small: Nsqd):
    """A consumer that comes when all memory is used up by those that do not read has its turn in the end."""
    with contextlib.ExitStack() as stack:
        for number in range(20):
            stuck = stack.enter_context(small.connect(receive_buffer_bytes=4096))
            stuck.subscribe("t", f"c{number}", rdy_count=100)
        for _ in range(8):
            small.publish("t", BODY)
        wait_until(lambda: used(small, "output") > OUTPUT_BYTES // 2, "memory is short")
        late = stack.enter_context(small.connect())
        late.subscribe("t", "c0", rdy_count=1)
        other = stack.enter_context(small.connect())
        other.subscribe("u", "c", rdy_count=1)
        small.publish("u", BODY)
        assert other.message(60.0).body == BODY
        assert "others wait for memory" in small.log
    assert "flintmq_nsqd_memory_closed_total 0" not in small.request("GET", "/metrics").text


def test_an_ephemeral_topic_is_bounded_in_bytes(small: Nsqd):
    """What it has no room for is dropped and counted, as beyond --mem-queue-size; others have room still."""
    before = small.resident_bytes()
    count = 60
    with small.connect() as publisher:
        for _ in range(count):
            publisher.ok(pub("greedy#ephemeral", BODY))
        publisher.ok(pub("modest#ephemeral", BODY))
    share = BUDGET_BYTES * 2 // 16
    assert used(small, "ephemeral") <= share
    row = small.stats("greedy#ephemeral")
    kept = count - row["dropped_count"]
    assert 0 < kept <= share // 2 // len(BODY)
    assert row["depth"] == kept
    assert "dropped_count" not in small.stats("modest#ephemeral")
    assert small.resident_bytes() - before < BUDGET_BYTES
    with small.connect() as consumer:
        consumer.subscribe("greedy#ephemeral", "c", rdy_count=1)
        receive(consumer, kept)
        wait_until(lambda: used(small, "ephemeral") < 2 * len(BODY), "what was finished is given back")
        small.publish("greedy#ephemeral", BODY)
        receive(consumer, 1)
    small.post("/topic/delete?topic=modest%23ephemeral")
    wait_until(lambda: used(small, "ephemeral") == 0, "and so is a deleted topic")


def test_a_budget_that_is_too_small_is_refused(daemons: Daemons):
    nsqd = daemons.new_nsqd("--memory-budget=1000")
    nsqd.launch()
    assert nsqd.wait() != 0
    assert "memory" in nsqd.log
    assert "67108864" in nsqd.log
