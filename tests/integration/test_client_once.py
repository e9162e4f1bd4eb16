"""Idempotent producers, both flavours, through a network and daemons that fail: nothing is lost, nothing stored twice.

What is in the log is compared with what the calls said: what was acknowledged is there once, what was refused is not,
what is unknown at most once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from tests.integration.daemons import PATIENCE_S, SOON_S, Daemons, Nsqd, wait_until
from tests.integration.flavours import POOL_COUNT, Flavour, PublishLoad, address_of, stats_of
from tests.integration.load import number_of
from tests.integration.proxy import Proxy
from tests.integration.test_once import stored

from flintmq import OptionError, Producer, PublishRefused, PublishUnknown, sync
from flintmq.client.core.once import POOL_SIZE_MAX


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Nsqd]]:
    daemons = Daemons(tmp_path_factory.mktemp("once"))
    try:
        yield [daemons.nsqd("--durability=os"), daemons.nsqd("--durability=os")]
    finally:
        daemons.close()


@pytest.fixture
def proxies(pair: list[Nsqd]) -> Iterator[list[Proxy]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Proxy(nsqd.tcp, seed=number)) for number, nsqd in enumerate(pair)]


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    name: str = request.node.name
    return "".join(c if c.isalnum() else "_" for c in name)[:60]


def check(load: PublishLoad, topic: str, nsqd: Sequence[Nsqd]) -> Counter[int]:
    """See that everything is there as its call said, and nothing twice."""
    load.stop()
    found = Counter(number_of(body) for each in nsqd for body in stored(each, topic))
    assert load.acked, "nothing was acknowledged, so nothing was tested"
    assert [number for number, count in found.items() if count > 1] == [], "stored twice"
    assert [number for number in load.acked if number not in found] == [], "acknowledged and lost"
    assert [number for number in load.refused if number in found] == [], "refused and stored"
    return found


@pytest.mark.parametrize("is_reset", [True, False], ids=["rst", "fin"])
def test_cuts_at_random_bytes(flavour: Flavour, pair: list[Nsqd], proxies: list[Proxy], topic: str, is_reset: bool):
    """Both directions of all connections, in the middle of commands and answers, again and again."""
    addresses = [address_of(proxy.address) for proxy in proxies]
    with flavour.producer(addresses, idempotent=True) as producer, PublishLoad(producer, topic) as load:
        load.wait_for(100)
        for proxy in proxies:
            for direction in (proxy.up, proxy.down):
                direction.cut_between, direction.is_reset = (1, 30_000), is_reset
        # not so many of each: all calls may come to wait for one nsqd, and then the other's connection is not used
        wait_until(lambda: sum(each.cut_count for each in proxies) >= 10, "10 cuts")
        wait_until(lambda: all(each.cut_count for each in proxies), "one of each")
        for proxy in proxies:
            proxy.heal()
        load.wait_for(100)
        check(load, topic, pair)
    assert not load.unknown and not load.refused, "there was time enough"
    retries = load._producer.call(lambda it: it.stats()).retries
    assert retries > 0, "no publish was caught by a cut, so nothing was tested"


def test_answers_that_never_come(flavour: Flavour, pair: list[Nsqd], proxies: list[Proxy], topic: str):
    """One nsqd stores everything and its answers are thrown away: it is asked again, by another connection."""
    proxy = proxies[0]
    with (
        flavour.producer(address_of(proxy.address), idempotent=True, timeout=6) as producer,
        PublishLoad(producer, topic, timeout_s=6) as load,
    ):
        load.wait_for(50)
        proxy.down.is_dropped = True
        wait_until(lambda: len(load.attempted) > len(load.acked) and len(stored(pair[0], topic)) > len(load.acked), "")
        wait_until(lambda: proxy.open_count == 0 or proxy.connection_count > 4, "connections are given up")
        proxy.heal()
        load.wait_for(50)
        found = check(load, topic, pair[:1])
    assert set(found) == set(load.attempted)
    assert not load.unknown and not load.refused


def test_a_killed_nsqd_is_waited_for(flavour: Flavour, daemons: Daemons, topic: str):
    """What it had not answered goes nowhere else; the rest goes on to the other one."""
    pair = [daemons.nsqd(), daemons.nsqd()]
    addresses = [address_of(nsqd.tcp) for nsqd in pair]
    with (
        flavour.producer(addresses, idempotent=True, timeout=4 * PATIENCE_S) as producer,
        PublishLoad(producer, topic, POOL_COUNT // 2, timeout_s=4 * PATIENCE_S) as load,
    ):
        for nsqd in (*pair, *pair):
            wait_until(lambda: stats_of(producer).connections >= 2, "connected to both")
            load.wait_for(100)
            nsqd.kill()
            wait_until(lambda: stats_of(producer).connections == 1, "it is known to be gone")
            with load.widened(POOL_COUNT // 2):  # all that was on its way may have been with this one
                load.wait_for(20)
                nsqd.start()
        load.wait_for(100)
        found = check(load, topic, pair)
    assert set(found) == set(load.attempted)
    assert not load.unknown and not load.refused


def test_an_nsqd_that_does_not_come_back(flavour: Flavour, daemons: Daemons, topic: str):
    """Nobody knows, and says so; what is published behind that has another identity."""
    nsqd = daemons.nsqd()
    with flavour.producer(address_of(nsqd.tcp), idempotent=True, timeout=0.5) as producer:
        producer.submit(topic, b"first", PATIENCE_S).result()
        nsqd.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(PublishUnknown):
            producer.submit(topic, b"unknown").result()
        assert 0.4 < time.monotonic() - begun < 0.5 + SOON_S
        nsqd.send_signal(signal.SIGCONT)
        for number in range(10):
            producer.submit(topic, b"%d" % number, PATIENCE_S).result()
        nsqd.kill()
        with pytest.raises((PublishUnknown, PublishRefused)):
            producer.submit(topic, b"later").result()
        nsqd.start()
        producer.submit(topic, b"last", PATIENCE_S).result()
    found = Counter(stored(nsqd, topic))
    assert found[b"unknown"] <= 1
    del found[b"unknown"], found[b"later"]
    assert found == Counter([b"first", b"last", *(b"%d" % number for number in range(10))])


def _mpub(producer: Any, topic: str, bodies: Sequence[bytes]) -> Any:
    return producer.mpub(topic, bodies, partition=1)


def _is_cut_again(proxy: Proxy, cuts: int) -> bool:
    return proxy.cut_count > cuts


def test_in_order_to_a_partition(flavour: Flavour, daemons: Daemons, topic: str):
    """Publishes that keep their order keep it through cuts, each once."""
    nsqd = daemons.nsqd()
    nsqd.post(f"/topic/create?topic={topic}&partition_num=2")
    with (
        Proxy(nsqd.tcp) as proxy,
        flavour.producer(address_of(proxy.address), idempotent=True, timeout=PATIENCE_S) as producer,
        ThreadPoolExecutor(1) as thread,
    ):
        for number in range(40):
            bodies = [b"%d.%d" % (number, index) for index in range(1 + number % 3)]
            if number % 13 == 5:
                proxy.down.cut_between = (1, 9)  # of an answer: it is stored already
            cuts = proxy.cut_count
            call = thread.submit(producer.call, partial(_mpub, topic=topic, bodies=bodies))
            if number % 13 == 5:
                wait_until(partial(_is_cut_again, proxy, cuts), "a cut")
                proxy.heal()
            call.result()
    assert stored(nsqd, topic) == [b"%d.%d" % (n, i) for n in range(40) for i in range(1 + n % 3)]


def test_concurrent_pubs_travel_together(pair: list[Nsqd], topic: str):
    """Of an asyncio producer: what waits for a writer is gathered."""

    async def publish() -> tuple[int, int]:
        async with Producer(address_of(pair[0].tcp), idempotent=True) as producer:
            await asyncio.gather(*(producer.pub(topic, b"%d" % number) for number in range(5000)))
            gathered = producer.stats().commands
            single = [asyncio.create_task(producer.mpub(topic, [b"a", b"b"])) for _ in range(100)]
            await asyncio.gather(*single)
            return gathered, producer.stats().commands

    gathered, commands = asyncio.run(publish())
    assert gathered < 60
    assert commands == gathered + 100
    found = Counter(stored(pair[0], topic))
    assert found.pop(b"a") == found.pop(b"b") == 100
    assert found == Counter(b"%d" % number for number in range(5000))


def test_a_bad_message_fails_alone(flavour: Flavour, daemons: Daemons, topic: str):
    nsqd = daemons.nsqd("--max-msg-size=1000")
    with flavour.producer(address_of(nsqd.tcp), idempotent=True) as producer:
        calls = [producer.submit(topic, b"x" * (2000 if number == 7 else 10)) for number in range(20)]
        errors = [call.exception() for call in calls]
        assert [number for number, error in enumerate(errors) if error is not None] == [7]
        assert isinstance(errors[7], PublishRefused)
        producer.submit(topic, b"after").result()
    assert Counter(stored(nsqd, topic)) == Counter({b"x" * 10: 19, b"after": 1})


def test_a_node_that_lost_its_memory(flavour: Flavour, daemons: Daemons, topic: str):
    """A producer whose sequence an nsqd does not expect goes on under another identity."""
    nsqd = daemons.nsqd()
    with flavour.producer(address_of(nsqd.tcp), idempotent=True) as producer:
        for number in range(3):
            producer.submit(topic, b"%d" % number).result()
        nsqd.post(f"/topic/delete?topic={topic}")
        producer.submit(topic, b"3").result()
        assert stored(nsqd, topic) == [b"3"]
        writers = producer.call(lambda it: it._writers)
        ((spot, free),) = writers._free.items()
        free[-1].sequence += 5  # as if it had been told OK and forgotten it
        producer.submit(topic, b"4").result()
        assert (spot.home.topic, [writer.sequence for writer in writers._free[spot]][-1]) == (topic, 2)
    assert stored(nsqd, topic) == [b"3", b"4"]


def test_draining_sends_to_another(flavour: Flavour, daemons: Daemons, topic: str):
    pair = [daemons.nsqd(), daemons.nsqd()]
    with (
        flavour.producer([address_of(nsqd.tcp) for nsqd in pair], idempotent=True) as producer,
        PublishLoad(producer, topic) as load,
    ):
        load.wait_for(50)
        pair[0].post("/drain?timeout=60s")
        load.wait_for(50)
        found = check(load, topic, pair)
    assert set(found) == set(load.attempted)
    assert not load.unknown and not load.refused


def test_children_have_identities_of_their_own(pair: list[Nsqd], topic: str):
    """Of a process that forks, all with the same state of chance."""
    with sync.Producer(address_of(pair[0].tcp), idempotent=True, producer_id="worker") as producer:
        producer.pub(topic, b"parent 0")
        children = []
        for number in range(3):
            pid = os.fork()
            if not pid:
                status = 1
                try:
                    for index in range(5):
                        producer.pub(topic, b"child %d.%d" % (number, index))
                    status = 0
                finally:
                    os._exit(status)
            children.append(pid)
        assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
        producer.pub(topic, b"parent 1")
    assert len(set(stored(pair[0], topic))) == 17


@pytest.mark.parametrize("producer_class", [Producer, sync.Producer])
def test_what_does_not_go_together(producer_class: type[Producer] | type[sync.Producer]):
    for name in ("a b", "x" * 25, "ä"):
        with pytest.raises(OptionError, match="producer_id"):
            producer_class("127.0.0.1:1", idempotent=True, producer_id=name)
    with pytest.raises(OptionError, match=r"trace.*give trace_id with those that are"):
        producer_class("127.0.0.1:1", idempotent=True, trace=["t"])
    with pytest.raises(OptionError, match="pool_size"):
        sync.Producer("127.0.0.1:1", idempotent=True, pool_size=POOL_SIZE_MAX + 1)


CARRYING: dict[str, Callable[[Any, str, bytes], Any]] = {
    "headers": lambda it, topic, body: it.pub(topic, body, headers={"n": "1"}, partition=0),
    "several with headers and trace ids": lambda it, topic, body: it.mpub(
        topic, [body], headers=[{"n": "2"}], trace_id=[7], partition=0
    ),
    "trace id": lambda it, topic, body: it.pub(topic, body, trace_id=8, partition=0),
    "delay": lambda it, topic, body: it.dpub(topic, body, 0.001),
    "several with a delay, in order": lambda it, topic, body: it.mpub(topic, [body], delay=3000, partition=0),
    "plain": lambda it, topic, body: it.pub(topic, body, partition=0),
}


def _published(publish: Callable[[Any, str, bytes], Any], topic: str, body: bytes, producer: Any) -> Any:
    return publish(producer, topic, body)


def test_headers_trace_ids_and_delays_through_lost_answers(flavour: Flavour, daemons: Daemons, topic: str):
    """Each is stored, its answer is lost, and it is sent again; one after the other, so they share identities."""
    nsqd = daemons.nsqd("--durability=os")
    nsqd.post(f"/topic/create?topic={topic}&partition_num=1&extend=true")
    places: dict[bytes, Any] = {}
    with (
        Proxy(nsqd.tcp) as proxy,
        flavour.producer(address_of(proxy.address), idempotent=True, timeout=PATIENCE_S) as producer,
        ThreadPoolExecutor(1) as thread,
    ):
        for number, (name, publish) in enumerate(CARRYING.items()):
            body, cuts = f"{name} {number}".encode(), proxy.cut_count
            proxy.down.cut_between = (1, 5)  # of an answer: it is stored already
            call = thread.submit(producer.call, partial(_published, publish, topic, body))
            wait_until(partial(_is_cut_again, proxy, cuts), "a cut")
            proxy.heal()
            places[body] = call.result()
            answered = f"{name} answered {number}".encode()
            places[answered] = producer.call(partial(_published, publish, topic, answered))
        assert stats_of(producer).retries >= len(CARRYING)
    found = stored(nsqd, topic)
    headers = {b"he": b'\x04\x00\x09{"n":"1"}', b"se": b'\x04\x00\x1a{"n":"2","##trace_id":"7"}'}
    fronts = {body: headers[body[:2]] if b"headers" in body else b"\0" for body in places}
    assert Counter(found) == Counter(fronts[body] + body for body in places), "each once, with what it carries"
    traced = {place.trace_id for body, place in places.items() if b"trace id" in body}
    assert traced == {7, 8} and not any(place for body, place in places.items() if b"trace id" not in body)
    (stats,) = nsqd.get(f"/stats?format=json&topic={topic}")["topics"]
    assert stats["message_count"] == len(places)


def test_headers_alone_on_a_topic_without_partitions(flavour: Flavour, pair: list[Nsqd], topic: str):
    pair[0].post(f"/topic/create?topic={topic}&extend=true")
    with flavour.producer(address_of(pair[0].tcp), idempotent=True) as producer:
        producer.call(lambda it: it.pub(topic, b"x", headers={"a": "b"}))
        producer.call(lambda it: it.mpub(topic, [b"y", b"z"], headers={}))
        producer.call(lambda it: it.pub(topic, b"plain"))
        with pytest.raises(OptionError, match=r"delay.*no delayed publish with it"):
            producer.call(lambda it: it.mpub(topic, [b"x"], delay=1, headers={}))
        with pytest.raises(OptionError, match=r"trace.*give trace_id with those that are"):
            producer.call(lambda it: it.trace(topic))
        with pytest.raises(PublishRefused, match="E_TOPIC_NOT_EXIST"):
            producer.call(lambda it: it.pub(f"{topic}-bare", b"x", headers={}))
    assert stored(pair[0], topic) == [b'\x04\x00\x09{"a":"b"}x', b"\x04\x00\x02{}y", b"\x04\x00\x02{}z", b"\0plain"]
