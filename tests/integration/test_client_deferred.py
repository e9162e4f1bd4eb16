"""Several messages with one delay, ``mpub(..., delay=)``, with both clients: against our nsqd, and against another."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from operator import methodcaller
from typing import Any

import pytest
from tests.integration.daemons import PATIENCE_S, Nsqd, Nsqlookupd
from tests.integration.flavours import Flavour, address_of
from tests.unit.client.fake_nsqd import FakeNsqd

from flintmq import LocalProtocolError, OptionError, PublishRefused
from flintmq.sync import NsqdAdmin

DELAY_S = 0.4
ONLY_OURS = "E_INVALID invalid command MDPUB: only FlintMQ's nsqd knows this command"


@pytest.fixture(scope="module")
def nsqlookupd(shared_nsqlookupd: Nsqlookupd) -> Nsqlookupd:
    return shared_nsqlookupd


@pytest.fixture(scope="module")
def nsqd(shared_nsqd: Nsqd) -> Nsqd:
    return shared_nsqd


@contextmanager
def nsqd_of_others(answer: Callable[[str, list[bytes]], str], refuse_sub: str = "") -> Iterator[str]:
    """An nsqd that answers publishes and subscriptions as it is told; yields its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="another nsqd", daemon=True)
    thread.start()

    async def listen() -> tuple[FakeNsqd, str]:
        fake = FakeNsqd()
        fake.answer, fake.refuse_sub = answer, refuse_sub
        return fake, await fake.listen()

    async def stop(fake: FakeNsqd) -> None:
        fake.stop()

    try:
        fake, address = asyncio.run_coroutine_threadsafe(listen(), loop).result(PATIENCE_S)
        yield address
        asyncio.run_coroutine_threadsafe(stop(fake), loop).result(PATIENCE_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
        loop.close()


def admin_of(nsqd: Nsqd) -> NsqdAdmin:
    return NsqdAdmin(f"127.0.0.1:{nsqd.http[1]}")


def test_they_come_when_they_are_due(nsqd: Nsqd, flavour: Flavour):
    topic = f"due-{flavour.name}"
    with flavour.producer(address_of(nsqd), trace=[topic]) as producer, nsqd.connect() as consumer:
        began = time.monotonic()
        producer.call(lambda it: it.mpub(topic, [b"a", b"b", {"c": 3}], delay=DELAY_S))
        producer.call(lambda it: it.mpub(topic, [b"d"], delay=timedelta(seconds=DELAY_S)))
        producer.call(lambda it: it.mpub(topic, [b"at once", b"too"]))
        producer.call(lambda it: it.mpub(topic, [b"no", b"delay"], delay=0))
        consumer.subscribe(topic, "c", 10)
        now = [message.body for message in consumer.messages(4)]
        assert now == [b"at once", b"too", b"no", b"delay"]
        assert [message.body for message in consumer.messages(4)] == [b"a", b"b", b'{"c":3}', b"d"]
        assert time.monotonic() - began >= DELAY_S
        assert producer.call(lambda it: it.stats()).published == 8


def test_what_cannot_be_deferred(nsqd: Nsqd, flavour: Flavour):
    topic = f"refused-{flavour.name}"
    with flavour.producer(address_of(nsqd)) as producer:
        wrong: Any
        for wrong in (-1, "5", timedelta(days=366)):
            with pytest.raises(OptionError, match="delay"):
                producer.call(methodcaller("mpub", topic, [b"a", b"b"], delay=wrong))
        with pytest.raises(LocalProtocolError):
            producer.call(lambda it: it.mpub(topic, [b"a", b""], delay=1))
        for method, body, command in (("mpub", [b"a", b"b"], "MDPUB"), ("dpub", b"a", "DPUB")):
            with pytest.raises(PublishRefused, match=f"E_INVALID {command} timeout 7200000 out of range") as refused:
                producer.call(methodcaller(method, topic, body, delay=7200))
            assert not refused.value.retryable
        producer.call(lambda it: it.mpub(topic, [b"it", b"goes on"]))


def test_to_a_partition(nsqd: Nsqd, nsqlookupd: Nsqlookupd, flavour: Flavour):
    topic = f"parts-{flavour.name}"
    nsqlookupd.post(f"/topic/create?topic={topic}&partition_num=2&multipart=true")
    admin = admin_of(nsqd)
    admin.create_channel(topic, "c")
    with flavour.producer(nsqlookupd_http_addresses=f"http://127.0.0.1:{nsqlookupd.http[1]}") as producer:
        producer.call(lambda it: it.mpub(topic, [b"a", b"b"], delay=600, partition=1))
        producer.call(lambda it: it.mpub(topic, [b"c"], delay=700, partition=0))
        producer.call(lambda it: it.mpub(topic, [b"d", b"e"], delay=800, sharding_id=7))
    found = [(each.partition, each.body) for each in admin.peek(topic, "c", "deferred")]
    assert min(found) == (0, b"c")
    assert {(1, b"a"), (1, b"b")} < {*found}
    ((first,), (second,)) = ([part for part, body in found if body == wanted] for wanted in (b"d", b"e"))
    assert first == second


def test_another_nsqd_does_not_know_it(flavour: Flavour):
    """An nsqd of NSQ: the call says so at once, and other publishes go on."""
    commands: list[str] = []

    def answer(command: str, bodies: list[bytes]) -> str:
        commands.append(command)
        return f"E_INVALID invalid command {command}" if command == "MDPUB" else "OK"

    with nsqd_of_others(answer) as address, flavour.producer(address) as producer:
        with pytest.raises(PublishRefused) as caught:
            producer.call(lambda it: it.mpub("t", [b"a", b"b"], delay=5))
        assert str(caught.value) == f"{ONLY_OURS} (nsqd {address})"
        assert caught.value.retryable is False
        assert commands == ["MDPUB"], "it is not tried again"
        producer.call(lambda it: it.mpub("t", [b"a"], delay=5))
        producer.call(lambda it: it.mpub("t", [b"a", b"b"]))
        assert commands == ["MDPUB", "DPUB", "MPUB"]
