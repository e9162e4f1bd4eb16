"""What clients can make nsqd keep in memory is bounded, whatever they do, and who reads gets everything meanwhile."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import struct
from functools import partial

import pytest
from tests.integration.daemons import (
    ERROR,
    RESPONSE,
    Closed,
    Connection,
    Daemons,
    Nsqd,
    mpub,
    pub,
    wait_until,
)
from tests.integration.upgraded import Deflate

from flintmq.wire.commands import NOP, fetch, offsets
from flintmq.wire.frames import HEARTBEAT

pytestmark = pytest.mark.usefixtures("started_anew")

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


def is_short(nsqd: Nsqd) -> bool:
    """Whether who asks for stored batches is asked first whether it reads, and no answer is being taken any more."""
    looks = {used(nsqd, "output") for _ in range(5)}
    return len(looks) == 1 and min(looks) > OUTPUT_BYTES // 2


def closed_count(nsqd: Nsqd) -> int:
    """Connections closed because they did not read while others waited."""
    found = re.search(r"^flintmq_nsqd_memory_closed_total (\d+)", nsqd.request("GET", "/metrics").text, re.MULTILINE)
    assert found
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
            except (AssertionError, ConnectionError):
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
    """All memory is used up by those that read once and do so no more: who comes and reads has its turn in the end."""
    with contextlib.ExitStack() as stack:
        small.publish("t", b"first")
        for number in range(30):
            stuck = stack.enter_context(small.connect(receive_buffer_bytes=4096))
            small.post(f"/channel/create?topic=t&channel=c{number}")
            stuck.subscribe("t", f"c{number}", rdy_count=100)
            small.publish("t", b"next")
            stuck.finish(stuck.message())
        for _ in range(8):
            small.publish("t", BODY)
        wait_until(lambda: used(small, "output") > OUTPUT_BYTES * 5 // 6, "all memory for newcomers is used")
        new = stack.enter_context(small.connect())
        new.subscribe("u", "c", rdy_count=1)
        small.publish("u", BODY)
        assert new.message(60.0).body == BODY
        wait_until(lambda: "others wait for memory" in small.log, "somebody was closed for it", 60.0)
        assert closed_count(small) > 0


def test_who_reads_and_is_new_is_served_beside_hundreds_that_never_read(small: Nsqd):
    """300 never read, half of them through deflate, and 12 messages of 1 MB wait: a new reader gets all 12, by its own
    reading and not because others are closed for it."""
    bodies = [random.Random(number).randbytes(len(BODY)) for number in range(12)]  # deflate makes nothing of them
    small.post("/topic/create?topic=t")
    small.post("/channel/create?topic=t&channel=new")
    with contextlib.ExitStack() as stack:
        for number in range(300):
            stuck = stack.enter_context(small.connect(receive_buffer_bytes=4096))
            commands = b"SUB t c%d\nRDY 100\n" % number
            if number % 2:
                stuck.identify(deflate=True, deflate_level=1)
                commands = Deflate().compress(commands)
            stuck.send(commands)
        wait_until(lambda: len(small.stats("t")["channels"]) == 301, "subscribed")
        for body in bodies:
            small.publish("t", body)
        wait_until(lambda: used(small, "output") > OUTPUT_BYTES // 2, "memory is short")
        new = stack.enter_context(small.connect())
        new.subscribe("t", "new", rdy_count=1)
        for body in bodies:
            message = new.message(60.0)
            assert message.body == body
            new.finish(message)
            assert used(small, "output") <= OUTPUT_BYTES
        wait_until(lambda: small.unfinished("t", "new") == 0, "everything is finished")
        channels = small.stats("t")["channels"]
        assert sum(channel["client_count"] for channel in channels) == 301, "nobody was closed for it"
        assert closed_count(small) == 0


def test_who_asks_for_stored_batches_and_does_not_read_uses_no_more_than_the_budget(small: Nsqd):
    """200 connections ask for 16 MB each and read nothing: two that read get what they ask for, one of them new, and
    nobody is closed for it."""
    for _ in range(16):
        small.publish("t", BODY)
    with contextlib.ExitStack() as stack:
        reader, new = stack.enter_context(small.connect()), stack.enter_context(small.connect())
        ask, end, next_sequence = begin_to_fetch(reader)
        before = small.resident_bytes()
        for _ in range(200):
            stuck = stack.enter_context(small.connect(receive_buffer_bytes=4096))
            stuck.send(ask * 4)
        wait_until(lambda: used(small, "output") > OUTPUT_BYTES // 2, "memory is short")
        peak = 0
        new.send(ask * 2)
        for _ in range(2):
            assert new.response(60.0).count(BODY) >= 1
        while next_sequence < end:
            reader.send(fetch("t", 0, next_sequence, end, 4 * MEBIBYTE))
            answer = reader.response(60.0)
            assert answer.count(BODY) >= 1
            (next_sequence,) = struct.unpack_from(">Q", answer)
            peak = max(peak, small.resident_bytes())
            assert used(small, "output") <= OUTPUT_BYTES + 5 * MEBIBYTE
        assert closed_count(small) == 0
        assert peak - before < BUDGET_BYTES


def test_who_asks_for_stored_batches_says_that_it_reads_and_does_not_is_closed_for_who_does(small: Nsqd):
    """Connections do not read what they asked for, 8 of them say that they do: who reads has its turn in the end."""
    for _ in range(4):
        small.publish("t", BODY)
    with contextlib.ExitStack() as stack:
        reader, new = stack.enter_context(small.connect()), stack.enter_context(small.connect())
        ask, _end, _next = begin_to_fetch(reader)
        stuck = [stack.enter_context(small.connect(receive_buffer_bytes=4096)) for _ in range(24)]
        while not is_short(small):  # what the kernel takes of an answer is not counted, and it takes some for a while
            stuck.pop().send(ask)
        assert len(stuck) >= 8, "there are as many left as are to be asked"
        for each in stuck[:8]:
            each.send(ask)
            assert each.any_frame() == (RESPONSE, HEARTBEAT)
            each.send(NOP)
        new.send(ask)
        assert new.response(60.0).count(BODY) == 4
        assert closed_count(small) > 0


def test_who_peeks_and_does_not_read_uses_no_more_than_the_budget(small: Nsqd):
    """60 connections of one address ask for 4 MB of messages each and read nothing: who reads is answered."""
    small.post("/topic/create?topic=t")
    small.post("/channel/create?topic=t&channel=c")
    for _ in range(4):
        small.publish("t", b"x" * len(BODY))
    look = "/channel/peek?topic=t&channel=c&max_body=1048576"
    before = small.resident_bytes()
    with contextlib.ExitStack() as stack:
        for number in range(60):
            stuck = stack.enter_context(socket.socket())
            stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stuck.bind(("127.0.0.2", 0))
            stuck.connect(small.http)
            stuck.sendall(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % (look.encode() + b"&" * number))
        wait_until(lambda: used(small, "output") >= OUTPUT_BYTES, "all memory for output is used")
        assert len(small.get(look)["messages"]) == 4
        assert used(small, "output") < OUTPUT_BYTES + 2 * 5 * MEBIBYTE
        assert small.resident_bytes() - before < BUDGET_BYTES
        assert closed_count(small) > 0, "there was room for it when some were closed"


def begin_to_fetch(reader: Connection) -> tuple[bytes, int, int]:
    """Fetch the first 4 MiB of a topic: the command for it, where the log ends, and where to go on."""
    reader.send(offsets("t"))
    (row,) = json.loads(reader.response())["partitions"]
    ask = fetch("t", 0, row["start"], row["end"], 4 * MEBIBYTE)
    reader.send(ask)
    (next_sequence,) = struct.unpack_from(">Q", reader.response())
    return ask, row["end"], next_sequence


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


def begun(nsqd: Nsqd, kind: str) -> bytes:
    """A publish of 1 MB that lacks its last byte."""
    if kind == "HTTP":
        return b"POST /pub?topic=slow HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY[:-1]
    return b"  V2" + (mpub("slow", [BODY]) if kind == "MPUB" else pub("slow", BODY))[:-1]


def publish_large(nsqd: Nsqd) -> None:
    """Publish 1 MB on a connection of its own, again when it is refused."""
    for _ in range(20):
        with nsqd.connect() as connection:
            try:
                connection.send(pub("t", BODY))
                frame = connection.frame(60.0)
            except (ConnectionError, Closed):
                continue
            if frame == (RESPONSE, b"OK"):
                return
            assert frame.data.startswith(b"E_PUB_TOO_MUCH_WAITING"), frame
    raise AssertionError("it was refused each time")


@pytest.mark.parametrize("kind", ["PUB", "MPUB", "HTTP"])
def test_bodies_that_are_not_complete_use_no_more_than_the_budget(small: Nsqd, kind: str):
    """200 connections send 1 MB but for a byte and stop: memory is bounded, who publishes whole messages goes on."""
    with contextlib.ExitStack() as stack:
        publisher = stack.enter_context(small.connect())
        publisher.ok(pub("t", b"before"))
        before = peak = small.resident_bytes()
        data, address = memoryview(begun(small, kind)), small.http if kind == "HTTP" else small.tcp
        left = {stack.enter_context(socket.create_connection(address)): data for _ in range(200)}
        for each in left:
            each.setblocking(False)
        most = 0
        for _ in range(100):
            for each, rest in list(left.items()):
                with contextlib.suppress(BlockingIOError):
                    try:
                        left[each] = rest[each.send(rest) :]
                    except ConnectionError:
                        del left[each]
            publisher.ok(pub("t", b"meanwhile"))
            with small.connect() as new:
                new.ok(pub("t", b"and on a connection of its own"))
            peak = max(peak, small.resident_bytes())
            most = max(most, used(small, "receiving"))
        publisher.ok(pub("t", BODY))  # and so does one that has published before, whatever it sends now
        publish_large(small)
        assert most <= BUDGET_BYTES * 4 // 16 + len(BODY)
        assert most > BUDGET_BYTES // 16, "the test fills it"
        assert peak - before < BUDGET_BYTES


def test_who_is_refused_for_the_memory_is_told(small: Nsqd):
    """One sends a part of a body and stops while others wait: it gets an error that says what to do."""
    share = BUDGET_BYTES * 2 // 16
    body = bytes(1024 * 1024)
    with contextlib.ExitStack() as stack:
        stalled = [stack.enter_context(small.connect()) for _ in range(4)]
        for each in stalled:
            each.send(pub("t", body)[:-1])
        over_http = stack.enter_context(socket.create_connection(small.http, 60.0))
        over_http.sendall(
            b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:-1]
        )
        wait_until(lambda: used(small, "receiving") > share // 2, "memory for newcomers is used up")
        waits = stack.enter_context(small.connect())
        waits.send(pub("t", BODY))
        assert waits.response(60.0) == b"OK"
        kind, data = next(filter(None, (first_frame(each) for each in stalled)))
        assert kind == ERROR
        assert data.startswith(b"E_PUB_TOO_MUCH_WAITING 10485")
        assert b"--memory-budget" in data
        assert used(small, "receiving") <= share // 2
    wait_until(lambda: used(small, "receiving") == 0, "all of it is given back")
    assert "flintmq_nsqd_memory_refused_total 0" not in small.request("GET", "/metrics").text


def first_frame(connection: Connection) -> tuple[int, bytes] | None:
    """What a connection was sent; None when that is nothing yet."""
    try:
        return connection.any_frame(0.1)
    except TimeoutError:
        return None
