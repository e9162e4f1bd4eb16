"""flintmq.sync and a redesigned NSQ over real sockets: an imitation of Youzan's daemons, and our own processes.

The scenarios are those of test_client_partitions.py, on blocking sockets. The imitation lives on a loop in a thread of
its own; what is changed or looked at in it is done there.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import pytest
from tests.integration.daemons import PATIENCE_S, wait_until
from tests.integration.test_client_partitions import Flintmq, Youzan, flintmq, youzan

from flintmq.client.core.sharding import partition_of
from flintmq.sync import (
    Consumer,
    DiscoveryError,
    Message,
    NsqdError,
    OptionError,
    Producer,
    PublishError,
    PublishRefused,
)

Found = TypeVar("Found")


class Imitation:
    """Youzan's daemons, to be used from the test's thread."""

    def __init__(self, peer: Youzan, loop: asyncio.AbstractEventLoop) -> None:
        self._peer = peer
        self._loop = loop
        self.lookups = peer.lookups

    def do(self, function: Callable[[Youzan], Found]) -> Found:
        """``function(peer)`` in the loop's thread."""

        async def call() -> Found:
            return function(self._peer)

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(PATIENCE_S)

    def create(self, topic: str, partitions: int, *, ordered: bool = False, extended: bool = False) -> None:
        self.do(lambda peer: peer.cluster.create(topic, partitions, is_ordered=ordered, is_extended=extended))

    def delivers_traces(self) -> bool:
        return True


class Ours:
    """Our own daemons."""

    def __init__(self, peer: Flintmq) -> None:
        self._peer = peer
        self.lookups = peer.lookups
        self.nsqds = peer.nsqds

    def create(self, topic: str, partitions: int, *, ordered: bool = False, extended: bool = False) -> None:
        asyncio.run(self._peer.create(topic, partitions, ordered=ordered, extended=extended))

    def delivers_traces(self) -> bool:
        return self._peer.delivers_traces()


@contextmanager
def imitation() -> Iterator[Imitation]:
    started: list[Imitation] = []
    ready = threading.Event()
    over: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def main() -> None:
        async with youzan() as peer:
            ended = asyncio.Event()
            loop = asyncio.get_running_loop()
            over.append((loop, ended))
            started.append(Imitation(peer, loop))
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        yield started[0]
    finally:
        for loop, ended in over:
            loop.call_soon_threadsafe(ended.set)
        thread.join(PATIENCE_S)


@pytest.fixture
def nsq():
    """The imitation, for what only it can do."""
    with imitation() as peer:
        yield peer


@pytest.fixture(params=["youzan", "flintmq"])
def peer(request):
    """Each in turn."""
    if request.param == "flintmq":
        yield Ours(flintmq(request.getfixturevalue("daemons")))
    else:
        with imitation() as found:
            yield found


def producer(peer: Any, **options: Any) -> Producer:
    return Producer(nsqlookupd_http_addresses=peer.lookups, **options)


def consumer(peer: Any, topic: str, **options: Any) -> Consumer[bytes]:
    return Consumer(topic, "ch", nsqlookupd_http_addresses=peer.lookups, **options)


def take(consumer: Consumer[bytes], count: int) -> list[Message[bytes]]:
    """The next messages, finished; the test's own timeout ends it."""
    taken: list[Message[bytes]] = []
    for message in consumer:
        with message:
            taken.append(message)
        if len(taken) == count:
            break
    return taken


# --- both ---


def test_partitions_take_turns_and_are_all_consumed(peer):
    peer.create("t", 3)
    with consumer(peer, "t", max_in_flight=100) as consuming, producer(peer) as producing:
        assert [*consuming.partitions] == [0, 1, 2]
        for number in range(100):
            producing.pub("t", b"%d" % number)
        producing.mpub("t", [b"%d" % number for number in range(100, 200)])
        seen = take(consuming, 200)
        assert sorted(int(message.body) for message in seen) == list(range(200))
        assert {message.partition for message in seen} == {0, 1, 2}
        for message in seen:
            assert message.internal_id is not None
            assert message.internal_id >> 50 == message.partition
            assert message.offset is None
        wait_until(lambda: consuming.stats().finished == 200)
        assert len(consuming.connections) == 2
        assert consuming.stats().connections == 3


def test_a_sharding_id_keeps_its_order_from_end_to_end(peer):
    peer.create("orders", 3, ordered=True)
    seen: dict[str, list[int]] = {}
    failed: set[bytes] = set()

    def handle(message: Message[bytes]) -> None:
        name, number = message.body.decode().split("/")
        if number == "7" and message.body not in failed:
            failed.add(message.body)
            raise ValueError("once")
        assert message.partition == partition_of(name, 3)
        assert message.offset is not None
        seen.setdefault(name, []).append(int(number))

    names = [f"customer-{number}" for number in range(12)]

    def publish(name: str) -> None:
        for number in range(20):
            producing.pub("orders", f"{name}/{number}".encode(), sharding_id=name)

    consuming = consumer(peer, "orders", handler=handle, ordered=True, backoff=0.01, max_backoff=0.02)
    with producer(peer) as producing:
        running = threading.Thread(target=consuming.run)
        running.start()
        with ThreadPoolExecutor(len(names)) as pool:
            assert [*pool.map(publish, names)] == [None] * len(names)
        wait_until(lambda: sum(map(len, seen.values())) == 240)
        assert consuming.stats().order_violations == 0
        assert consuming.stats().failed == len(failed) == len(names)
        consuming.stop()
        running.join(PATIENCE_S)
    assert seen == {name: list(range(20)) for name in names}


def test_a_topic_that_must_be_consumed_in_order(peer):
    peer.create("t", 2, ordered=True)
    with pytest.raises(NsqdError, match="E_SUB_ORDER_IS_MUST"), consumer(peer, "t") as consuming:
        take(consuming, 1)


def test_places_that_are_none(peer):
    peer.create("t", 2)
    with producer(peer, timeout=PATIENCE_S) as producing:
        producing.pub("t", b"x", partition=1)
        producing.mpub("t", [b"x", b"y"], partition=0)
        with pytest.raises(PublishRefused, match="partitions 0 to 1, not 2"):
            producing.pub("t", b"x", partition=2)
        with pytest.raises(PublishRefused, match="takes no headers") as refused:
            producing.pub("t", b"x", headers={"color": "red"})
        assert refused.value.code == "E_EXT_NOT_SUPPORT"
        with pytest.raises(OptionError, match="not both"):
            producing.pub("t", b"x", partition=1, sharding_id="x")
    with consumer(peer, "t") as consuming:
        assert Counter(message.partition for message in take(consuming, 3)) == {0: 2, 1: 1}


def test_trace_from_end_to_end(peer, caplog):
    if not peer.delivers_traces():
        pytest.skip("these daemons have no PUB_TRACE yet")
    caplog.set_level(logging.INFO, "flintmq.trace")
    peer.create("t", 1)
    with producer(peer) as producing:
        first = producing.pub("t", b"first", trace_id=12345, partition=0)
        producing.trace("t")
        assert producing.traced == ("t",)
        producing.pub("t", b"second")
        producing.trace("t", False)
        producing.mpub("t", [b"third", b"fourth"])
    with consumer(peer, "t", ordered=True, trace=True) as consuming:
        seen = take(consuming, 4)
    assert (seen[0].internal_id, seen[0].trace_id, seen[0].offset) == (first.internal_id, 12345, first.offset)
    assert [message.trace_id == 0 for message in seen] == [False, False, True, True]
    lines = [msgspec.json.decode(record.message) for record in caplog.records if record.name == "flintmq.trace"]
    assert [line["event"] for line in lines] == ["publish", *["receive"] * 4]
    published, received = lines[0], lines[2]
    for name in ("internal_id", "trace_id", "offset", "raw_size", "partition", "nsqd"):
        assert published[name] == received[name]
    assert received["local_ip"] == received["nsqd_ip"] == "127.0.0.1"


def test_headers_from_end_to_end(peer):
    if not peer.delivers_traces():
        pytest.skip("these daemons have no PUB_EXT yet")
    peer.create("t", 1, extended=True)
    with producer(peer) as producing:
        found = producing.pub("t", b"body", headers={"color": "red"}, trace_id=99)
        assert found.trace_id == 99
        producing.pub("t", b"plain")
    with consumer(peer, "t") as consuming:
        first, second = take(consuming, 2)
        assert (first.body, first.headers) == (b"body", {"color": "red", "##trace_id": "99"})
        assert (second.body, second.headers) == (b"plain", {})


# --- topics without partitions ---


def test_a_plain_topic_refuses_what_needs_partitions(daemons):
    peer = Ours(flintmq(daemons))
    peer.nsqds[0].publish("plain", b"x")
    wait_until(lambda: daemons_know(peer, "plain"))
    with producer(peer) as producing:
        for options in ({"sharding_id": 1}, {"partition": 0}, {"trace_id": 1}, {"headers": {"a": "b"}}):
            with pytest.raises(PublishRefused, match="has no partitions") as refused:
                producing.pub("plain", b"x", **options)
            assert (refused.value.code, refused.value.retryable) == ("NO_PARTITIONS", False)
        producing.trace("plain")
        producing.pub("plain", b"y")
    with pytest.raises(DiscoveryError, match="has no partitions"), consumer(peer, "plain", ordered=True) as consuming:
        take(consuming, 1)
    with consumer(peer, "plain") as consuming:
        assert sorted(message.body for message in take(consuming, 2)) == [b"x", b"y"]
        assert consuming.partitions == {}


def daemons_know(peer: Ours, topic: str) -> bool:
    import urllib.request

    with urllib.request.urlopen(f"{peer.lookups[0]}/topics") as answer:
        return topic in msgspec.json.decode(answer.read())["topics"]


def test_arguments_that_do_not_go_together():
    nsqd, lookup = "127.0.0.1:1", "http://127.0.0.1:1"
    with pytest.raises(OptionError, match="ordered"):
        Consumer("t", "c", nsqd_tcp_addresses=nsqd, ordered=True)
    with pytest.raises(OptionError, match="dead_letter"):
        Consumer("t", "c", nsqlookupd_http_addresses=lookup, ordered=True, dead_letter="dead")
    with pytest.raises(OptionError, match="desired_tag"):
        Consumer("t", "c", nsqd_tcp_addresses=nsqd, desired_tag="a b")
    with pytest.raises(OptionError, match="sharding"):
        Producer(nsqd, sharding="sha1")
    producing = Producer(nsqd)
    refused: list[dict[str, Any]] = [
        {"sharding_id": 1}, {"trace_id": 1}, {"headers": {}, "trace_id": 1}, {"partition": 1024},
    ]  # fmt: skip
    for options in refused:
        with pytest.raises(OptionError):
            producing.pub("t", b"x", **options)
    producing.close()


# --- the imitation: leaders move ---


def test_a_leader_moves_while_messages_flow(nsq):
    nsq.create("t", 2, ordered=True)
    seen: dict[int, list[int]] = {0: [], 1: []}

    def handle(message: Message[bytes]) -> None:
        assert message.partition is not None
        seen[message.partition].append(int(message.body))

    consuming = consumer(nsq, "t", handler=handle, ordered=True)
    running = threading.Thread(target=consuming.run)
    running.start()
    with producer(nsq, timeout=PATIENCE_S) as producing:

        def publish(partition: int) -> None:
            for number in range(150):
                if partition == 0 and number == 50:
                    nsq.do(lambda peer: peer.cluster.move("t", 0, "b"))
                if partition == 0 and number == 100:
                    nsq.do(lambda peer: peer.cluster.move("t", 0, "a", closes=False))
                producing.pub("t", b"%d" % number, partition=partition)

        with ThreadPoolExecutor(2) as pool:
            assert [*pool.map(publish, (0, 1))] == [None, None]
    wait_until(lambda: all(numbers and numbers[-1] == 149 for numbers in seen.values()))
    assert consuming.stats().order_violations == 0
    consuming.stop()
    running.join(PATIENCE_S)
    for partition, numbers in seen.items():
        assert list(dict.fromkeys(numbers)) == list(range(150))
        bodies = nsq.do(lambda peer, number=partition: peer.cluster.topics["t"].partitions[number].bodies)
        assert [int(body) for body in bodies] == list(range(150))


def test_what_youzans_daemons_see(nsq):
    """The command is SUB_ORDERED for them, at once, and they are told of nothing that they refuse."""
    nsq.create("t", 2, ordered=True)
    with consumer(nsq, "t", ordered=True) as consuming, producer(nsq) as producing:
        producing.pub("t", b"x", sharding_id="x")
        take(consuming, 1)
    nodes = nsq.do(lambda peer: peer.nodes)
    lines = sorted(line for node in nodes for line in node.subscribed)
    assert lines == ["SUB_ORDERED t ch 0", "SUB_ORDERED t ch 1"]
    assert [violation for node in nodes for violation in node.violations] == []
    assert all("extend_support" not in request for node in nodes for request in node.identified)


def test_a_tag_is_told_where_the_topic_has_headers(nsq):
    nsq.create("t", 1, extended=True)
    with consumer(nsq, "t", desired_tag="blue"):
        pass
    assert [request["desired_tag"] for node in nsq.do(lambda peer: peer.nodes) for request in node.identified] == [
        "blue"
    ]


def test_a_partition_without_a_leader_takes_nothing_and_no_other_does(nsq):
    nsq.create("t", 2)
    nsq.do(lambda peer: peer.cluster.move("t", 1, ""))
    with producer(nsq) as producing:
        producing.pub("t", b"x", partition=0)
        with pytest.raises(PublishRefused, match="partition 1 of 2") as refused:
            producing.pub("t", b"x", partition=1, timeout=1)
        assert (refused.value.code, refused.value.retryable) == ("PARTITION_UNAVAILABLE", True)
        assert producing.stats().failed == 1


def test_what_failed_is_not_overtaken_by_calls_of_other_threads(nsq):
    """They were made before the failure was told; those of another id may go on, once there is a leader."""
    nsq.create("t", 1)
    nsq.do(lambda peer: peer.cluster.move("t", 0, ""))
    outcomes: dict[str, str] = {}

    def publish(name: str, sharding_id: str, timeout: float) -> None:
        try:
            producing.pub("t", name.encode(), sharding_id=sharding_id, timeout=timeout)
        except PublishError as error:
            outcomes[name] = error.code
        else:
            outcomes[name] = "stored"

    with producer(nsq) as producing, ThreadPoolExecutor(3) as pool:
        first = pool.submit(publish, "first", "x", 5.0)  # so long the others have to stand behind it
        wait_until(lambda: len(producing._queues) == 1)
        others = [pool.submit(publish, name, key, PATIENCE_S) for name, key in (("second", "x"), ("other", "y"))]
        first.result(PATIENCE_S)
        nsq.do(lambda peer: peer.cluster.move("t", 0, "a"))
        for other in others:
            other.result(PATIENCE_S)
        assert outcomes == {"first": "PARTITION_UNAVAILABLE", "second": "E_ORDER", "other": "stored"}
        publish("again", "x", PATIENCE_S)
    assert outcomes["again"] == "stored"
    assert nsq.do(lambda peer: peer.cluster.topics["t"].partitions[0].bodies) == [b"other", b"again"]


# --- our daemons: restarts ---


def test_order_through_a_kill_of_nsqd(daemons):
    """What was acknowledged is there, in order, after kill -9 under load."""
    peer = Ours(flintmq(daemons))
    peer.create("t", 2)
    acknowledged: list[int] = []
    with producer(peer, timeout=PATIENCE_S) as producing:

        def publish() -> None:
            for number in range(400):
                producing.pub("t", b"%d" % number, sharding_id="x")
                acknowledged.append(number)

        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(publish)
            wait_until(lambda: len(acknowledged) > 100)
            for nsqd in peer.nsqds:
                nsqd.kill()
                nsqd.start()
            publishing.result(60)
    seen: list[int] = []
    with consumer(peer, "t", ordered=True) as consuming:
        for message in consuming:
            with message:
                seen.append(int(message.body))
            if seen[-1] == 399:
                break
        assert consuming.stats().order_violations == 0
    assert list(dict.fromkeys(seen)) == list(range(400))
