"""nsq_to_nsq as a process: when it finishes messages, where they go, what is passed on, what is kept of a cluster's.

Source: NSQ 1.3, apps/nsq_to_nsq.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.integration.daemons import PATIENCE_S, Daemons, Nsqd, Nsqlookupd, running_cluster, wait_until
from tests.integration.flavours import address_of
from tests.integration.proxy import Proxy
from tests.integration.utilities import at, end, is_finished, lookup, started
from tests.ports import reserved_port

from flintmq import Consumer, Message, Producer

_topics = (f"forward{number}" for number in count())
CHANNEL = "nsq_to_nsq"
TO = "--destination-nsqd-tcp-address="


@pytest.fixture
def topic() -> str:
    return next(_topics)


@pytest.fixture(scope="module")
def there(shared: Daemons) -> Nsqd:
    return shared.nsqd("--durability=os", "--max-msg-size=100000")


@pytest.fixture(scope="module")
def second(shared: Daemons) -> Nsqd:
    return shared.nsqd("--durability=os")


def stored(nsqd: Nsqd, topic: str) -> int:
    found = nsqd.get(f"/stats?format=json&topic={topic}")["topics"]
    return int(found[0]["message_count"]) if found else 0


def bodies(nsqd: Nsqd, topic: str, number: int) -> list[bytes]:
    with nsqd.connect() as connection:
        connection.subscribe(topic, "look", number)
        found = [connection.message() for _ in range(number)]
        connection.finish(*found)
        return [message.body for message in found]


def wait_finished(nsqd: Nsqd, topic: str, number: int) -> None:
    wait_until(lambda: is_finished(nsqd, topic, CHANNEL, number), "all are finished")


def test_messages_go_to_a_topic_of_the_same_name_and_end_here(single_nsqd: Nsqd, there: Nsqd, topic: str):
    sent = [b"%d" % number for number in range(2000)] + [b"\xff\x00\n"]
    single_nsqd.publish(topic, *sent)
    arguments = (f"--topic={topic}", f"{TO}{address_of(there)}", "--status-every=100")
    with started("nsq_to_nsq", at(single_nsqd), *arguments) as process:
        wait_finished(single_nsqd, topic, len(sent))
        log = end(process)
    assert sorted(bodies(there, topic, len(sent))) == sorted(sent)
    assert stored(there, topic) == len(sent)
    assert "[aggregate]: finished " in log and "ms - avg: " in log


@pytest.mark.parametrize("is_looked_up", [False, True])
def test_what_comes_from_a_destination_ends_it(
    shared_nsqd: Nsqd, shared_nsqlookupd: Nsqlookupd, topic: str, is_looked_up: bool
):
    """The nsqd that is found while it runs; two ways to the same nsqlookupd are not seen to be it."""
    shared_nsqd.publish(topic, b"seed")
    wait_until(lambda: topic in shared_nsqlookupd.get("/topics")["topics"], "nsqlookupd knows it")
    with Proxy(shared_nsqlookupd.http) as proxy:
        to = f"{TO}localhost:{shared_nsqd.tcp[1]}"
        if is_looked_up:
            to = "--destination-lookupd-http-address={}:{}".format(*proxy.address)
        with started("nsq_to_nsq", lookup(shared_nsqlookupd), f"--topic={topic}", to) as process:
            _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert f"topic {topic}: nsqd 127.0.0.1:{shared_nsqd.tcp[1]}" in errors.decode()
    assert "would get again what is consumed from it, for ever; use --destination-topic" in errors.decode()
    assert stored(shared_nsqd, topic) <= 2


@pytest.mark.parametrize("way", ["through a proxy", "by a third topic"])
def test_a_destination_is_known_by_what_it_says_of_itself(shared_nsqd: Nsqd, topic: str, way: str):
    """No address tells that both ways lead to one nsqd."""
    shared_nsqd.publish(topic, b"seed")
    shared_nsqd.publish(f"{topic}-b", b"seed")
    topics = [f"--topic={topic}"]
    if way == "by a third topic":
        topics = [f"--topic={topic}:{topic}-b", f"--topic={topic}-b:{topic}"]
    with Proxy(shared_nsqd.tcp) as proxy:
        source = "--nsqd-tcp-address={}:{}".format(*proxy.address)
        with started("nsq_to_nsq", source, *topics, f"{TO}{address_of(shared_nsqd)}") as process:
            _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        named = "nsqd {}:{}, which is {},".format(*proxy.address, address_of(shared_nsqd))
    assert f"{named} would get again what is consumed from it, for ever" in errors.decode()
    assert stored(shared_nsqd, topic) <= 2


def test_topics_that_follow_one_another_end_within_one_nsqd(single_nsqd: Nsqd, topic: str):
    single_nsqd.publish(f"{topic}-a", b"a")
    single_nsqd.publish(f"{topic}-b", b"b")
    arguments = (f"--topic={topic}-a:{topic}-b", f"--topic={topic}-b:{topic}-c")
    with started("nsq_to_nsq", at(single_nsqd), f"{TO}{address_of(single_nsqd)}", *arguments) as process:
        wait_finished(single_nsqd, f"{topic}-b", 2)
        end(process)
    assert sorted(bodies(single_nsqd, f"{topic}-c", 2)) == [b"a", b"b"]


def test_several_topics_into_one(single_nsqd: Nsqd, there: Nsqd, topic: str):
    for each in (f"{topic}-a", f"{topic}-b"):
        single_nsqd.publish(each, each.encode())
    arguments = (f"--topic={topic}-a", f"--topic={topic}-b", f"--destination-topic={topic}")
    with started("nsq_to_nsq", at(single_nsqd), f"{TO}{address_of(there)}", *arguments) as process:
        wait_until(lambda: stored(there, topic) == 2, "both are there")
        end(process)
    assert sorted(bodies(there, topic, 2)) == [f"{topic}-a".encode(), f"{topic}-b".encode()]


def test_each_topic_has_a_name_of_its_own_there(single_nsqd: Nsqd, topic: str):
    """Within one nsqd too, where nothing comes back to what is consumed."""
    for each in (f"{topic}-a", f"{topic}-b"):
        single_nsqd.publish(each, each.encode())
    arguments = (f"--topic={topic}-a:{topic}-x", f"--topic={topic}-b:{topic}-y")
    with started("nsq_to_nsq", at(single_nsqd), f"{TO}{address_of(single_nsqd)}", *arguments) as process:
        for each in (f"{topic}-a", f"{topic}-b"):
            wait_finished(single_nsqd, each, 1)
        end(process)
    assert bodies(single_nsqd, f"{topic}-x", 1) == [f"{topic}-a".encode()]
    assert bodies(single_nsqd, f"{topic}-y", 1) == [f"{topic}-b".encode()]


@pytest.mark.parametrize("mode", ["round-robin", "hostpool", "epsilon-greedy"])
def test_destinations_share_the_messages(single_nsqd: Nsqd, there: Nsqd, second: Nsqd, topic: str, mode: str):
    single_nsqd.publish(topic, *[b"%d" % number for number in range(1000)])
    arguments = (f"--topic={topic}", f"--mode={mode}", "--max-in-flight=10")
    to = (f"{TO}{address_of(there)}", f"{TO}{address_of(second)}")
    with started("nsq_to_nsq", at(single_nsqd), *to, *arguments) as process:
        wait_finished(single_nsqd, topic, 1000)
        end(process)
    counts = stored(there, topic), stored(second, topic)
    assert sum(counts) == 1000
    assert min(counts) > (0 if mode == "epsilon-greedy" else 400), counts


def test_a_destination_that_is_down_is_left_out(single_nsqd: Nsqd, there: Nsqd, topic: str):
    with reserved_port() as reserved:
        port = reserved.getsockname()[1]
        single_nsqd.publish(topic, *[b"%d" % number for number in range(100)])
        arguments = (
            f"--topic={topic}", f"{TO}127.0.0.1:{port}", f"{TO}{address_of(there)}", "--max-in-flight=10",
            "--consumer-opt=default_requeue_delay,10ms", "--consumer-opt=backoff_multiplier,10ms",
        )  # fmt: skip
        with started("nsq_to_nsq", at(single_nsqd), *arguments) as process:
            wait_finished(single_nsqd, topic, 100)
            log = end(process)
    assert set(bodies(there, topic, 100)) == {b"%d" % number for number in range(100)}
    assert f"127.0.0.1:{port}: " in log and f"not published to {topic}" in log


@pytest.fixture
def stalled(second: Nsqd) -> Iterator[Proxy]:
    """A way to an nsqd on which no answer comes back any more."""
    with Proxy(second.tcp) as proxy:
        yield proxy


def test_nothing_is_finished_before_the_destination_has_said_so_and_others_go_on(
    single_nsqd: Nsqd, there: Nsqd, stalled: Proxy, topic: str
):
    arguments = (
        f"--topic={topic}", f"{TO}{stalled.address[0]}:{stalled.address[1]}", f"{TO}{address_of(there)}",
        "--mode=round-robin", "--max-in-flight=100",
    )  # fmt: skip
    with started("nsq_to_nsq", at(single_nsqd), *arguments) as process:
        single_nsqd.publish(topic, b"first", b"second")
        wait_finished(single_nsqd, topic, 2)
        stalled.down.is_dropped = True
        single_nsqd.publish(topic, *[b"%d" % number for number in range(20)])
        wait_until(lambda: stored(there, topic) >= 10, "half of them go elsewhere")
        wait_until(lambda: single_nsqd.unfinished(topic, CHANNEL) <= 10, "and are finished")
        process.kill()
        process.wait()
    left = wait_until(lambda: _waiting(single_nsqd, topic), "what had no answer comes again")
    assert left == 10


def _waiting(nsqd: Nsqd, topic: str) -> int:
    channel = nsqd.stats(topic, CHANNEL)
    return int(channel["depth"]) + int(channel["deferred_count"])


def test_nothing_is_lost_by_kills(single_nsqd: Nsqd, second: Nsqd, topic: str):
    sent = [b"%d" % number for number in range(4000)]
    single_nsqd.request("POST", f"/topic/create?topic={topic}")
    single_nsqd.request("POST", f"/channel/create?topic={topic}&channel={CHANNEL}")
    arguments = (f"--topic={topic}", f"{TO}{address_of(second)}", "--max-in-flight=50")
    for start in (0, 2000):
        with started("nsq_to_nsq", at(single_nsqd), *arguments) as process:
            before = stored(second, topic)
            single_nsqd.publish(topic, *sent[start : start + 2000])
            wait_until(partial(_has_more, second, topic, before), "it works")
            process.kill()
            process.wait()
    with started("nsq_to_nsq", at(single_nsqd), *arguments) as process:
        wait_finished(single_nsqd, topic, len(sent))
        end(process)
    found = bodies_of_all(second, topic)
    assert set(found) == set(sent)
    assert len(found) <= len(sent) + 2 * 50, "what was in flight may come twice"


def _has_more(nsqd: Nsqd, topic: str, count: int) -> bool:
    return stored(nsqd, topic) > count


def bodies_of_all(nsqd: Nsqd, topic: str) -> list[bytes]:
    number = stored(nsqd, topic)
    with nsqd.connect() as connection:
        connection.subscribe(topic, "look", 1000)
        found: list[bytes] = []
        while len(found) < number:
            message = connection.message()
            connection.finish(message)
            found.append(message.body)
        return found


def test_one_message_that_is_too_large_holds_up_no_other(single_nsqd: Nsqd, there: Nsqd, topic: str):
    small = [b"%d" % number for number in range(50)]
    single_nsqd.publish(topic, *small[:25], b"x" * 100_001, *small[25:])
    with started("nsq_to_nsq", at(single_nsqd), f"--topic={topic}", f"{TO}{address_of(there)}") as process:
        wait_until(lambda: stored(there, topic) == 50, "the others are there")
        wait_until(lambda: single_nsqd.unfinished(topic, CHANNEL) == 1, "and finished")
        log = end(process)
    assert sorted(bodies(there, topic, 50)) == sorted(small)
    assert "not published" in log and "E_BAD_MESSAGE" in log
    assert single_nsqd.unfinished(topic, CHANNEL) == 1, "it is kept"


def test_only_objects_with_the_field_pass_and_only_with_what_is_wanted(single_nsqd: Nsqd, there: Nsqd, topic: str):
    """NSQ's gives back what lacks the field when a value is required, until it is given up; and rounds 2**53 + 1."""
    single_nsqd.publish(
        topic, b'{"a": "5", "b": 1}', b'{"z": 9007199254740993, "b": [1, {}], "a": 5}', b'{"b": "no field"}',
        b'{"a": 6}', b'{"a": true}', b"null", b"[1]", b"no json",
    )  # fmt: skip
    arguments = (
        "--require-json-field=a",
        "--require-json-value=5",
        "--whitelist-json-field=z",
        "--whitelist-json-field=b",
    )
    with started("nsq_to_nsq", at(single_nsqd), f"--topic={topic}", f"{TO}{address_of(there)}", *arguments) as process:
        wait_finished(single_nsqd, topic, 8)
        log = end(process)
    assert stored(there, topic) == 2
    assert bodies(there, topic, 2) == [b'{"b":1}', b'{"b":[1, {}],"z":9007199254740993}']
    assert log.count("Unable to decode json: ") == 2


def test_a_delay_is_for_all(single_nsqd: Nsqd, there: Nsqd, topic: str):
    single_nsqd.publish(topic, b"1", b"2")
    there.request("POST", f"/topic/create?topic={topic}")
    there.request("POST", f"/channel/create?topic={topic}&channel=c")
    arguments = (f"--topic={topic}", f"{TO}{address_of(there)}", "--defer=10m")
    with started("nsq_to_nsq", at(single_nsqd), *arguments) as process:
        wait_finished(single_nsqd, topic, 2)
        end(process)
    wait_until(lambda: there.stats(topic, "c")["deferred_count"] == 2, "they wait")


def test_nothing_is_stored_twice_because_an_answer_was_lost(
    single_nsqd: Nsqd, second: Nsqd, stalled: Proxy, topic: str
):
    arguments = (f"--topic={topic}", f"{TO}{stalled.address[0]}:{stalled.address[1]}", "--idempotent")
    with started("nsq_to_nsq", at(single_nsqd), *arguments) as process:
        single_nsqd.publish(topic, b"0")
        wait_finished(single_nsqd, topic, 1)
        stalled.down.is_dropped = True
        single_nsqd.publish(topic, b"1")
        wait_until(lambda: stored(second, topic) == 2, "it is there, and nobody knows")
        stalled.down.is_dropped = False
        stalled.cut()
        wait_finished(single_nsqd, topic, 2)
        end(process)
    assert stored(second, topic) == 2
    assert bodies(second, topic, 2) == [b"0", b"1"]


def test_deferred_messages_are_stored_once_when_an_answer_was_lost(
    single_nsqd: Nsqd, second: Nsqd, stalled: Proxy, topic: str
):
    second.request("POST", f"/topic/create?topic={topic}")
    second.request("POST", f"/channel/create?topic={topic}&channel=c")
    to = f"{TO}{stalled.address[0]}:{stalled.address[1]}"
    with started("nsq_to_nsq", at(single_nsqd), f"--topic={topic}", to, "--idempotent", "--defer=10m") as process:
        single_nsqd.publish(topic, b"0", b"1")
        wait_finished(single_nsqd, topic, 2)
        stalled.down.is_dropped = True
        single_nsqd.publish(topic, b"2", b"3")
        wait_until(lambda: second.stats(topic, "c")["deferred_count"] == 4, "they are there, and nobody knows")
        stalled.down.is_dropped = False
        stalled.cut()
        wait_finished(single_nsqd, topic, 4)
        end(process)
    assert stored(second, topic) == second.stats(topic, "c")["deferred_count"] == 4


def test_one_deferred_message_that_is_too_large_repeats_no_other(single_nsqd: Nsqd, there: Nsqd, topic: str):
    small = [b"%d" % number for number in range(50)]
    single_nsqd.publish(topic, *small[:25], b"x" * 100_001, *small[25:])
    arguments = (f"--topic={topic}", f"{TO}{address_of(there)}", "--defer=1ms")
    with started("nsq_to_nsq", at(single_nsqd), *arguments) as process:
        wait_until(lambda: stored(there, topic) >= 50, "the others are there")
        wait_until(lambda: single_nsqd.unfinished(topic, CHANNEL) == 1, "and finished")
        end(process)
    assert stored(there, topic) == 50
    assert sorted(bodies(there, topic, 50)) == sorted(small)


def test_options_of_the_producer_are_obeyed(single_nsqd: Nsqd, there: Nsqd, topic: str):
    single_nsqd.publish(topic, b"kept")
    arguments = (f"--topic={topic}", f"{TO}{address_of(there)}", "--producer-opt=tls_v1")
    with started("nsq_to_nsq", at(single_nsqd), *arguments) as process:
        wait_until(lambda: single_nsqd.get(f"/stats?format=json&topic={topic}")["topics"][0]["channels"], "subscribed")
        wait_until(lambda: single_nsqd.stats(topic, CHANNEL)["requeue_count"], "it is given back")
        assert "TLS" in end(process)
    assert single_nsqd.unfinished(topic, CHANNEL) == 1


# --- clusters


def test_partition_order_trace_and_headers_are_kept(shared: Daemons, topic: str):
    here, there = _cluster(shared, topic), _cluster(shared, topic)
    asyncio.run(_publish(here, topic))
    to = "--destination-lookupd-http-address={}:{}".format(*there.http)
    with started("nsq_to_nsq", lookup(here), to, f"--topic={topic}", "--ordered") as process:
        found = asyncio.run(_consume(there, topic, 60))
        end(process)
    assert Counter(partition for partition, *_ in found) == {0: 20, 1: 20, 2: 20}
    for partition in range(3):
        mine = [each for each in found if each[0] == partition]
        assert mine == [
            (partition, b"%d" % number, {"number": number} if number % 2 else {}, 1000 + number if number % 3 else 0)
            for number in range(20)
        ]


@pytest.mark.parametrize("way", ["--ordered", "--keep-partition"])
def test_partitions_too_get_nothing_twice_because_an_answer_was_lost(shared: Daemons, topic: str, way: str):
    """With trace ids and headers: each kind of message is published by a command of its own."""
    is_ordered = way == "--ordered"
    source, here = _cluster_of_one(shared, topic, is_ordered)
    with Proxy(("127.0.0.1", 1)) as proxy:
        nsqd, there = _cluster_of_one(shared, topic, is_ordered, f"--broadcast-tcp-port={proxy.address[1]}")
        proxy.target = nsqd.tcp
        to = "--destination-lookupd-http-address={}:{}".format(*there.http)
        with started("nsq_to_nsq", lookup(here), to, f"--topic={topic}", way, "--idempotent") as process:
            asyncio.run(_publish(here, topic, 3, 0, 1))
            wait_finished(source, topic, 3)  # so that all that was asked has been answered
            proxy.down.is_dropped = True
            asyncio.run(_publish(here, topic, 3, 1, 3))
            wait_until(lambda: stored(nsqd, topic) >= 6, "some are there, and nobody knows")
            proxy.down.is_dropped = False
            proxy.cut()
            found = asyncio.run(_consume(there, topic, 12))
            end(process)
    assert stored(nsqd, topic) == 12
    for partition in range(3):
        expected = [
            (partition, b"%d" % number, {"number": number} if number % 2 else {}, 1000 + number if number % 3 else 0)
            for number in range(4)
        ]
        mine = [each for each in found if each[0] == partition]
        assert (mine if is_ordered else sorted(mine, key=_body)) == expected


def test_deferred_messages_keep_their_partition_and_headers_are_not_lost_in_silence(shared: Daemons, topic: str):
    here, there = _cluster(shared, topic, False), _cluster(shared, topic, False)
    asyncio.run(_publish(here, topic, 3, 0, 2))  # one without headers and one with them to each partition
    to = "--destination-lookupd-http-address={}:{}".format(*there.http)
    soon = ("--consumer-opt=default_requeue_delay,500ms", "--consumer-opt=backoff_multiplier,0s")
    arguments = (lookup(here), to, f"--topic={topic}", "--keep-partition", "--defer=1ms", *soon)
    with started("nsq_to_nsq", *arguments) as process:
        found = asyncio.run(_consume(there, topic, 3))
        log = end(process)
    assert sorted(found) == [(partition, b"0", {}, 0) for partition in range(3)]
    assert "is given back: it has headers, with which nsqd defers nothing; --drop-headers" in log
    with started("nsq_to_nsq", *arguments, "--drop-headers") as process:
        found = asyncio.run(_consume(there, topic, 3))
        end(process)
    assert sorted(found) == [(partition, b"1", {}, 0) for partition in range(3)]


@pytest.mark.slow
def test_order_is_kept_while_leaders_of_both_clusters_change(tmp_path: Path):
    """What was published on one side is there on the other, each partition in its order, while nodes are killed."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    with running_cluster(tmp_path / "here") as here, running_cluster(tmp_path / "there") as there:
        target = "/topic/create?topic=moved&partition_num=2&replicator=3&orderedmulti=true&extend=true"
        for each in (here, there):
            wait_until(partial(_is_created, each.nsqlookupd, target), "it is created")
            for partition in range(2):
                each.leader("moved", partition)
                each.wait_in_sync("moved", 3, partition)
        to = "--destination-lookupd-http-address={}:{}".format(*there.nsqlookupd.http)
        asyncio.run(_publish(here.nsqlookupd, "moved", 2))
        with started("nsq_to_nsq", lookup(here.nsqlookupd), to, "--topic=moved", "--ordered") as process:
            first = asyncio.run(_consume(there.nsqlookupd, "moved", 40))
            for each in (here, there):
                was = each.leader("moved")
                was.kill()
                each.leader("moved", but=was)
            asyncio.run(_publish(here.nsqlookupd, "moved", 2, 20))
            second = asyncio.run(_consume(there.nsqlookupd, "moved", 40))
            end(process)
    for partition in range(2):
        places = [int(body) for number, body, *_ in first + second if number == partition]
        assert [*dict.fromkeys(places)] == [*range(40)]
        assert places == sorted(places), "what comes again comes before the next"


def _is_created(nsqlookupd: Nsqlookupd, target: str) -> bool:
    return nsqlookupd.request("POST", target).status == 200


def _cluster(shared: Daemons, topic: str, is_ordered: bool = True) -> Nsqlookupd:
    """Makes one of a single nsqd, with a topic that has partitions, in order or not, and headers."""
    return _cluster_of_one(shared, topic, is_ordered)[1]


def _cluster_of_one(shared: Daemons, topic: str, is_ordered: bool, *flags: str) -> tuple[Nsqd, Nsqlookupd]:
    nsqlookupd = shared.nsqlookupd()
    nsqd = shared.nsqd("--durability=os", f"--lookupd-tcp-address=127.0.0.1:{nsqlookupd.tcp[1]}", *flags)
    wait_until(lambda: nsqlookupd.get("/nodes")["producers"], "nsqd is registered")
    order = "&orderedmulti=true" if is_ordered else ""
    made = nsqlookupd.post(f"/topic/create?topic={topic}&partition_num=3&replicator=1&extend=true{order}")
    assert made.status == 200, made
    return nsqd, nsqlookupd


def _address(nsqlookupd: Nsqlookupd) -> str:
    return "http://{}:{}".format(*nsqlookupd.http)


def _body(found: tuple[Any, ...]) -> bytes:
    body: bytes = found[1]
    return body


async def _publish(
    nsqlookupd: Nsqlookupd, topic: str, partitions: int = 3, start: int = 0, number_of_each: int = 20
) -> None:
    async with Producer(nsqlookupd_http_addresses=_address(nsqlookupd)) as producer:
        for number in range(start, start + number_of_each):
            for partition in range(partitions):
                more: dict[str, Any] = {"headers": {"number": number}} if number % 2 else {}
                if number % 3:
                    more["trace_id"] = 1000 + number
                await producer.pub(topic, b"%d" % number, partition=partition, **more)


async def _consume(nsqlookupd: Nsqlookupd, topic: str, number: int) -> list[tuple[Any, ...]]:
    """Consume until so many different ones have come."""
    found: list[tuple[Any, ...]] = []

    def take(message: Message[bytes]) -> None:
        headers = {name: value for name, value in message.headers.items() if not name.startswith("##")}
        found.append((message.partition, message.body, headers, message.trace_id))
        if len({each[:2] for each in found}) == number:
            consumer.stop()

    consumer: Consumer[bytes] = Consumer(
        topic, "c", nsqlookupd_http_addresses=_address(nsqlookupd), ordered=True, handler=take, inline=True
    )
    await consumer.run()
    return found
