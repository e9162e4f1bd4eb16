"""The nsqd for users' tests, used as they would: with asyncio, with threads, with a clock that is moved by hand."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from datetime import timedelta

import pytest

import flintmq.sync
from flintmq import Consumer, Message, Producer
from flintmq.errors import LocalProtocolError, OptionError, PublishUnknown, StorageError
from flintmq.testing import ManualClock, MemoryDisk, MemoryNsqd


@pytest.fixture
def nsqd() -> Iterator[MemoryNsqd]:
    with MemoryNsqd() as nsqd:
        yield nsqd


@pytest.fixture
def slow_nsqd() -> Iterator[MemoryNsqd]:
    with MemoryNsqd("--msg-timeout=60s", clock=ManualClock()) as nsqd:
        yield nsqd


async def test_what_a_service_consumes_and_publishes(nsqd: MemoryNsqd):
    """The test publishes, the service under test turns orders into invoices, the test looks at what it published."""
    nsqd.publish("orders", b"1", b"2", b"3")

    async def bill(message: Message) -> None:
        await producer.pub("invoices", b"invoice of " + message.body)

    async with (
        Producer(nsqd.tcp_address) as producer,
        Consumer("orders", "billing", nsqlookupd_http_addresses=nsqd.nsqlookupd_http_address, handler=bill),
    ):
        await nsqd.drained("orders", "billing")
    assert nsqd.published("invoices") == [b"invoice of 1", b"invoice of 2", b"invoice of 3"]
    assert nsqd.published("orders") == [b"1", b"2", b"3"]
    assert [message.id for message in nsqd.messages("orders")] == [b"%016x" % number for number in (1, 2, 3)]


def test_a_service_in_a_thread(nsqd: MemoryNsqd):
    nsqd.publish("t", *(b"%d" % number for number in range(1000)))
    seen: list[bytes] = []

    async def serve() -> None:
        async with Consumer("t", "c", nsqd_tcp_addresses=nsqd.tcp_address, max_in_flight=50) as consumer:
            async for message in consumer:
                seen.append(message.body)
                message.finish()
                if len(seen) == 1000:
                    return

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    nsqd.wait_drained("t", "c")
    thread.join()
    assert sorted(seen, key=int) == nsqd.published("t")


async def test_time_passes_when_the_test_says_so(slow_nsqd: MemoryNsqd):
    """A message that is not answered comes again after a minute that takes no time."""
    nsqd = slow_nsqd
    nsqd.publish("t", b"x")
    async with Consumer("t", "c", nsqd_tcp_addresses=nsqd.tcp_address) as consumer:
        messages = aiter(consumer)
        first = await anext(messages)
        nsqd.advance(59.9)
        assert nsqd.counts("t", "c").in_flight == 1 and nsqd.counts("t", "c").timed_out == 0
        nsqd.advance(0.2)
        again = await anext(messages)
        assert (again.id, again.attempts) == (first.id, 2)
        assert nsqd.counts("t", "c").timed_out == 1
        again.finish()
        await nsqd.drained("t", "c")


async def test_delays_pass_too(slow_nsqd: MemoryNsqd):
    nsqd = slow_nsqd
    nsqd.create("t", "c")
    nsqd.publish("t", b"later", delay=3600)
    assert nsqd.counts("t", "c") == (0, 0, 1, 0, 0, 0)
    async with Consumer("t", "c", nsqd_tcp_addresses=nsqd.tcp_address) as consumer:
        nsqd.advance(3599)
        assert nsqd.counts("t", "c").deferred == 1
        nsqd.advance(1.1)
        message = await anext(aiter(consumer))
        assert message.body == b"later"
        message.finish()


@pytest.mark.slow
async def test_a_restart_keeps_messages_and_addresses(nsqd: MemoryNsqd):
    address = nsqd.tcp_address
    async with Producer(address) as producer:
        await producer.pub("t", b"before")
        nsqd.restart()
        assert nsqd.tcp_address == address
        await producer.pub("t", b"after")
    assert nsqd.published("t") == [b"before", b"after"]


async def test_connections_are_cut(nsqd: MemoryNsqd):
    async with Consumer("t", "c", nsqd_tcp_addresses=nsqd.tcp_address) as consumer:
        nsqd.cut_connections()
        nsqd.publish("t", b"x")
        message = await anext(aiter(consumer))
        message.finish()
        await nsqd.drained("t", "c")


@pytest.mark.slow
async def test_a_disk_that_fails(nsqd: MemoryNsqd):
    """An application's own handling of a publish that failed can be tried."""
    nsqd.publish("t", b"x")
    nsqd.disk.fail("write", times=1000)
    with pytest.raises(StorageError):
        nsqd.publish("t", b"y")
    async with Producer(nsqd.tcp_address, timeout=0.3) as producer:
        with pytest.raises(PublishUnknown):
            await producer.pub("t", b"y")
    nsqd.disk.heal()
    assert nsqd.published("t") == [b"x"]


@pytest.mark.parametrize("how", ["full", "failing"])
def test_a_disk_that_the_test_broke_keeps_it_from_nothing(how: str, caplog: pytest.LogCaptureFixture):
    disk = MemoryDisk()
    with MemoryNsqd(disk=disk) as nsqd:
        nsqd.publish("t", b"x")
        if how == "full":
            disk.set_free_bytes(0)
        else:
            disk.fail("write", times=1000)
        with pytest.raises(StorageError):
            nsqd.publish("t", b"y")
        lookup = nsqd.nsqlookupd_http_address
    assert "the disk, which the test broke" in caplog.text
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{lookup}/ping", timeout=5)
    disk.heal()
    disk.set_free_bytes(1 << 30)
    with MemoryNsqd(disk=disk) as nsqd:
        assert nsqd.published("t") == [b"x"]


def test_a_disk_that_nobody_broke_is_told_of_and_nsqlookupd_ends_all_the_same(monkeypatch: pytest.MonkeyPatch):
    async def close(self: object) -> None:
        raise StorageError("channels.list: what is this?")

    monkeypatch.setattr("flintmq.nsqd.node.Node.close", close)
    nsqd = MemoryNsqd()
    nsqd.start()
    lookup = nsqd.nsqlookupd_http_address
    with pytest.raises(StorageError, match="what is this"):
        nsqd.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{lookup}/ping", timeout=5)
    nsqd.close()


def test_the_disk_outlives_it():
    disk = MemoryDisk()
    with MemoryNsqd(disk=disk) as nsqd:
        nsqd.publish("t", b"x")
    with MemoryNsqd(disk=disk) as nsqd:
        assert nsqd.published("t") == [b"x"]


def test_flags_and_http_are_nsqds_own():
    with (
        MemoryNsqd("--max-msg-size=10") as nsqd,
        urllib.request.urlopen(f"{nsqd.http_address}/info", timeout=5) as answer,
    ):
        assert json.load(answer)["tcp_port"] == int(nsqd.tcp_address.rpartition(":")[2])
    with pytest.raises(OptionError, match="msg-timeot"):
        MemoryNsqd("--msg-timeot=1s")


def test_waiting_ends_and_says_where_the_messages_are(nsqd: MemoryNsqd):
    nsqd.create("t", "c")
    nsqd.publish("t", b"x")
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=r"t/c not drained within 0.05 s: ChannelCounts\(depth=1, in_flight=0"):
        nsqd.wait_drained("t", "c", timeout=0.05)
    assert time.monotonic() - begun < 5
    assert not nsqd.is_drained("t", "unknown")


@pytest.mark.parametrize("state", ["drained", "delivered"])
async def test_waiting_for_what_is_not_there_says_what_there_is(nsqd: MemoryNsqd, state: str):
    """A mistyped name is not taken for a channel that has nothing more to do."""

    async def said(topic: str, channel: str) -> str:
        with pytest.raises(TimeoutError) as raised:
            await getattr(nsqd, state)(topic, channel, timeout=0)
        return str(raised.value).partition(" within 0 s: ")[2]

    assert await said("order", "billing") == "there is no topic order, and no other"
    nsqd.create("orders")
    assert await said("order", "billing") == "there is no topic order; there are: orders"
    assert await said("orders", "biling") == "topic orders has no channel biling, and no other"
    nsqd.publish("orders", b"x")
    only = "topic orders has no channel biling (1 message waits for the first channel), and no other"
    assert await said("orders", "biling") == only
    nsqd.create("orders", "billing")
    assert await said("orders", "biling") == "topic orders has no channel biling; it has: billing"
    for number in range(11):
        nsqd.create("orders", f"c{number:02d}")
        nsqd.create(f"t{number:02d}")
    nine = "c00, c01, c02, c03, c04, c05, c06, c07, c08"
    assert await said("orders", "biling") == f"topic orders has no channel biling; it has: billing, {nine} and 2 more"
    ten = "orders, t00, t01, t02, t03, t04, t05, t06, t07, t08"
    assert await said("order", "billing") == f"there is no topic order; there are: {ten} and 2 more"


def test_waiting_says_what_waits_in_a_paused_topic(nsqd: MemoryNsqd):
    nsqd.create("t", "c")
    with flintmq.sync.NsqdAdmin(nsqd.http_address) as admin:
        admin.pause_topic("t")
    nsqd.publish("t", b"x", b"y")
    with pytest.raises(TimeoutError, match=r"depth=0, .*\); 2 messages wait in the topic, which is paused$"):
        nsqd.wait_drained("t", "c", timeout=0)


def test_wrong_use_is_told(nsqd: MemoryNsqd):
    with pytest.raises(LocalProtocolError, match="topic name 'a b' is not valid"):
        nsqd.publish("a b", b"x")
    with pytest.raises(LocalProtocolError, match="topic name b't' is not valid: it is text, not bytes"):
        nsqd.publish(b"t", b"x")  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError, match="empty"):
        nsqd.publish("t", b"")
    with pytest.raises(LocalProtocolError, match="MPUB of no message; at least one is needed"):
        nsqd.publish("t")
    with pytest.raises(TypeError, match="a body is bytes or a value for JSON, not str; encode it first"):
        nsqd.publish("t", b"x", "text")
    for delay in (-1, "1", None, float("nan"), 1e12):
        with pytest.raises(
            OptionError, match=f"delay={delay!r} is not allowed; seconds or a timedelta".replace("+", ".")
        ):
            nsqd.publish("t", b"x", delay=delay)  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError, match="channel name"):
        nsqd.create("t", "?")
    with pytest.raises(RuntimeError, match="ManualClock"):
        nsqd.advance(1)
    with pytest.raises(RuntimeError, match="already"):
        nsqd.start()
    with pytest.raises(RuntimeError, match="start it first"):
        MemoryNsqd().publish("t", b"x")


def test_bodies_are_those_of_a_producer_and_delays_too():
    with MemoryNsqd(clock=ManualClock()) as nsqd:
        nsqd.publish("t", {"id": 1}, bytearray(b"x"), delay=timedelta(hours=2))
        nsqd.create("t", "c")
        assert nsqd.published("t") == [b'{"id":1}', b"x"]


def test_nothing_is_left_behind():
    before = set(threading.enumerate())
    with MemoryNsqd() as nsqd:
        nsqd.publish("t", b"x")
    nsqd.close()  # again: nothing happens
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive(), thread


def test_messages_with_headers_are_shown_without_them():
    with MemoryNsqd() as nsqd:
        path = "/topic/create?topic=orders&partition_num=2&extend=true"
        urllib.request.urlopen(nsqd.nsqlookupd_http_address + path, data=b"").close()  # nsqd is known from the start
        with flintmq.sync.Producer(nsqlookupd_http_addresses=nsqd.nsqlookupd_http_address) as producer:
            producer.pub("orders", b"x", headers={"shop": "7"}, trace_id=4711, partition=0)
            producer.pub("orders", b"plain", partition=1)
        first, second = nsqd.messages("orders")
        assert (first.body, second.body) == (b"x", b"plain")
        assert int(first.id[16:], 16) == 4711 and len(first.id) == 32


def test_waiting_until_a_handler_holds_a_message():
    with MemoryNsqd("--msg-timeout=60s", clock=ManualClock()) as nsqd:
        nsqd.publish("orders", b"1")
        with flintmq.sync.Consumer("orders", "billing", nsqd_tcp_addresses=nsqd.tcp_address) as consumer:
            message = next(iter(consumer))
            nsqd.wait_delivered("orders", "billing")
            nsqd.advance(60)
            assert nsqd.counts("orders", "billing").timed_out == 1
            with pytest.raises(TimeoutError, match=r"not holding 2 in flight within 0\.01 s: ChannelCounts"):
                nsqd.wait_delivered("orders", "billing", count=2, timeout=0.01)
            assert message.body == b"1"
