"""What every foreign client is put through.

Rules of this file: what a client says of itself is only half of the proof; the other half is what our daemons count and
what a raw connection then finds. A scenario uses a topic of its own and leaves nothing behind it.
"""

from __future__ import annotations

import random
import re
import time
from typing import Any

from tests.foreign.clients.task import shown
from tests.foreign.harness import Case, Run, Stage, until
from tests.foreign.servers import DEAD_ADDRESS, MSG_SIZE_MAX, MSG_TIMEOUT_MS, address, addresses
from tests.foreign.tap import Tap
from tests.integration.daemons import Message, Nsqd

CHANNEL = "channel"


# -- what the daemons know ---------------------------------------------------------------------------------------------


def see_drained(nsqd: Nsqd, topic: str) -> None:
    """Wait until the consumers are gone and the channel has nothing left."""
    names = ("client_count", "depth", "in_flight_count", "deferred_count")
    left: dict[str, int] = {}

    def is_drained() -> bool:
        row = nsqd.stats(topic, CHANNEL)
        left.update({name: row[name] for name in names})
        return not any(left.values())

    try:
        until(is_drained, "all finished")
    except AssertionError as error:
        raise AssertionError(f"{error}; left: {left}") from None


def producer_rows(nsqd: Nsqd, topic: str) -> list[dict[str, Any]]:
    """The rows of the connections that published to a topic and still stand."""
    rows: list[dict[str, Any]] = nsqd.get("/stats?format=json&include_mem=false")["producers"] or []
    return [row for row in rows if any(each["topic"] == topic for each in row["pub_counts"])]


def consumer_rows(nsqd: Nsqd, topic: str) -> list[dict[str, Any]]:
    """The rows of the connections that consume a topic."""
    rows: list[dict[str, Any]] = nsqd.stats(topic, CHANNEL)["clients"]
    return rows


def rest_of(nsqd: Nsqd, topic: str) -> list[Message]:
    """Finish what a channel still holds and return it."""
    count = nsqd.unfinished(topic, CHANNEL)
    with nsqd.connect() as connection:
        connection.subscribe(topic, CHANNEL, max(1, count))
        messages = connection.messages(count)
        connection.nothing_comes()
        connection.finish(*messages)
        connection.settle()
    return messages


# -- publishing --------------------------------------------------------------------------------------------------------


def publishes(stage: Stage) -> None:
    """PUB, MPUB and DPUB arrive byte for byte; the deferred message not before its time."""
    nsqd = stage.servers.nsqd()
    single = [b"one", b"two", "unicode: Grüße".encode(), b"\0\n\r", b"x" * 70_000]
    batch = [b"batch %d" % number for number in range(250)]
    with nsqd.connect() as consumer:
        consumer.subscribe(stage.topic, CHANNEL, 1000)
        run = stage.start("publish", nsqd=addresses([nsqd]))
        begun = time.monotonic()
        assert run.publish(single, batch, [b"deferred"], defer_ms=3000) == [True] * (len(single) + 2), run.described
        messages = consumer.messages(len(single) + len(batch))
        assert [message.body for message in messages] == single + batch
        assert nsqd.stats(stage.topic, CHANNEL)["deferred_count"] == 1
        deferred = consumer.message()
        assert (deferred.body, deferred.attempts) == (b"deferred", 1)
        assert time.monotonic() - begun >= 3
    run.end()
    until(lambda: not producer_rows(nsqd, stage.topic), "producer gone")


def bodies() -> list[bytes]:
    """From the smallest to the largest that nsqd takes, with every byte in them."""
    noise = random.Random(1)
    return [b"x", b"\n", b"\0", bytes(range(256)) * 4, noise.randbytes(MSG_SIZE_MAX - 1), noise.randbytes(MSG_SIZE_MAX)]


def publishes_bodies(stage: Stage) -> None:
    """Small, large and binary bodies arrive byte for byte; one byte too many is refused, and the client tells."""
    nsqd = stage.servers.nsqd()
    run = stage.start("publish", nsqd=addresses([nsqd]))
    assert run.publish(bodies()) == [True] * len(bodies()), run.described
    assert run.publish([bytes(MSG_SIZE_MAX + 1)]) == [False], run.described
    with nsqd.connect() as consumer:
        consumer.subscribe(stage.topic, CHANNEL, 100)
        messages = consumer.messages(len(bodies()))
        assert [message.body for message in messages] == bodies()
        consumer.nothing_comes()
    run.order("end")


def consumes_bodies(stage: Stage) -> None:
    """The same bodies, delivered."""
    nsqd = stage.servers.nsqd()
    for body in bodies():
        nsqd.publish(stage.topic, body)
    run = stage.start("consume", nsqd=addresses([nsqd]), finish_count=len(bodies()))
    run.wait_end()
    assert run.messages == [(shown(body), 1) for body in bodies()], run.described
    see_drained(nsqd, stage.topic)


# -- consuming ---------------------------------------------------------------------------------------------------------


def consumes(stage: Stage) -> None:
    """A few hundred messages, each delivered once and finished, and the connection said goodbye."""
    nsqd = stage.servers.nsqd()
    expected = [f"message {number}" for number in range(400)]
    nsqd.publish(stage.topic, *(body.encode() for body in expected))
    run = stage.start("consume", nsqd=addresses([nsqd]), max_in_flight=50, finish_count=400)
    run.wait_end()
    assert run.messages == [(body, 1) for body in expected], run.described
    see_drained(nsqd, stage.topic)
    stats = nsqd.stats(stage.topic, CHANNEL)
    assert (stats["requeue_count"], stats["timeout_count"]) == (0, 0), run.described


def consumes_partitions(stage: Stage) -> None:
    """A topic with partitions, of each more messages than there are ids that are text by chance."""
    nsqd = stage.servers.nsqd()
    nsqd.post(f"/topic/create?topic={stage.topic}&partition_num=2")
    expected = [f"message {number}" for number in range(600)]
    for first in range(0, len(expected), 30):
        nsqd.publish(stage.topic, *(body.encode() for body in expected[first : first + 30]))
    run = stage.start("consume", nsqd=addresses([nsqd]), max_in_flight=50, finish_count=600)
    run.wait_end()
    assert sorted(run.messages) == sorted((body, 1) for body in expected), run.described
    see_drained(nsqd, stage.topic)
    assert [row["message_count"] for row in nsqd.stats(stage.topic)["partitions"]] == [300, 300]


def requeues(stage: Stage) -> None:
    """A message given back comes again after its delay, with the attempts counted."""
    nsqd = stage.servers.nsqd()
    nsqd.publish(stage.topic, b"requeue me", b"finish me")
    run = stage.start("consume", nsqd=addresses([nsqd]), max_in_flight=10, finish_count=2, requeue_ms=3000)
    run.wait(lambda: run.messages, "first message")
    given_back_at = time.monotonic()
    until(lambda: nsqd.stats(stage.topic, CHANNEL)["deferred_count"] == 1, "deferred")
    run.wait_end()
    assert run.messages == [("requeue me", 1), ("finish me", 1), ("requeue me", 2)], run.described
    assert time.monotonic() - given_back_at >= 2.9
    stats = nsqd.stats(stage.topic, CHANNEL)
    assert (stats["requeue_count"], stats["timeout_count"]) == (1, 0)
    see_drained(nsqd, stage.topic)


def touches(stage: Stage) -> None:
    """A message touched for two and a half of its timeouts stays with its consumer; one that is not comes again."""
    nsqd = stage.servers.impatient_nsqd()
    nsqd.publish(stage.topic, b"slow", b"hold until it times out")
    run = stage.start(
        "consume",
        nsqd=addresses([nsqd]),
        max_in_flight=10,
        finish_count=2,
        msg_timeout_ms=MSG_TIMEOUT_MS,
        touch_s=0.25 * MSG_TIMEOUT_MS / 1000,
        touch_count=10,
    )
    run.wait_end()
    assert sorted(run.messages) == [("hold until it times out", 1), ("hold until it times out", 2), ("slow", 1)]
    see_drained(nsqd, stage.topic)
    stats = nsqd.stats(stage.topic, CHANNEL)
    assert (stats["timeout_count"], stats["requeue_count"]) == (1, 0)


def drains(stage: Stage) -> None:
    """A consumer that stops in the middle leaves exactly what it did not finish, also what it held."""
    nsqd = stage.servers.nsqd()
    expected = [f"message {number}" for number in range(100)]
    if stage.client.can_hold:
        expected[3] = "hold this"
    nsqd.publish(stage.topic, *(body.encode() for body in expected))
    run = stage.start("consume", nsqd=addresses([nsqd]), max_in_flight=20, finish_count=40)
    run.wait_end()
    assert run.of("closed"), run.described
    until(lambda: nsqd.stats(stage.topic, CHANNEL)["client_count"] == 0, "consumer gone")
    finished = [body for body in run.bodies if not body.startswith("hold")][:40]
    left = {message.body.decode(): message.attempts for message in rest_of(nsqd, stage.topic)}
    assert set(left) | set(run.bodies) == set(expected), "lost"
    assert not set(left) & set(finished), "finished before it said that it stops, and delivered again"
    assert left.get("hold this") == (2 if stage.client.can_hold else None)


def idles(stage: Stage) -> None:
    """With a heartbeat a second, an idle producer and an idle consumer keep their connections, and work afterwards."""
    nsqd = stage.servers.nsqd()
    producer = stage.start("publish", nsqd=addresses([nsqd]), heartbeat_s=1)
    assert producer.publish([b"before"]) == [True], producer.described
    consumer = stage.start("consume", nsqd=addresses([nsqd]), heartbeat_s=1)
    consumer.wait(lambda: consumer.bodies == ["before"], "first message")

    def rows() -> list[tuple[str, int]]:
        found = [*producer_rows(nsqd, stage.topic), *consumer_rows(nsqd, stage.topic)]
        return [(row["remote_address"], row["connect_ts"]) for row in found]

    connected = rows()
    assert len(connected) == 2
    time.sleep(3.2)  # nsqd closes what is silent for two heartbeats
    assert rows() == connected
    assert producer.publish([b"after"]) == [True], producer.described
    consumer.wait(lambda: consumer.bodies == ["before", "after"], "second message")
    producer.end()
    consumer.end()
    see_drained(nsqd, stage.topic)


def samples(stage: Stage) -> None:
    """A consumer that asks for 30 percent gets about so many, each once, and the others are gone for it."""
    nsqd = stage.servers.nsqd()
    count = 1000
    nsqd.publish(stage.topic, *(b"%d" % number for number in range(count)))
    run = stage.start("consume", nsqd=addresses([nsqd]), max_in_flight=50, sample_rate=30)
    run.wait(lambda: run.messages, "first message")
    assert consumer_rows(nsqd, stage.topic)[0]["sample_rate"] == 30
    until(lambda: nsqd.unfinished(stage.topic, CHANNEL) == 0, "the channel empty")
    run.end()
    assert len(set(run.bodies)) == len(run.bodies)
    assert 200 < len(run.bodies) < 400  # six standard deviations are 87


def changes_max_in_flight(stage: Stage) -> None:
    """What nsqd sends beyond what is finished follows the limit while the consumer runs."""
    nsqd = stage.servers.nsqd()
    expected = [f"hold {number}" for number in range(300)]
    nsqd.publish(stage.topic, *(body.encode() for body in expected))
    run = stage.start("consume", nsqd=addresses([nsqd]), max_in_flight=4)

    def reaches(limit: int) -> bool:
        channel = nsqd.stats(stage.topic, CHANNEL)
        if channel["in_flight_count"] == limit == channel["clients"][0]["ready_count"]:
            return True
        run.order("release")  # most clients change RDY with the next message
        return False

    run.wait(lambda: run.messages, "first message")
    until(lambda: reaches(4), "4 in flight")
    for limit in stage.client.max_in_flight_changes:
        run.order("max_in_flight", value=limit)
        until(lambda limit=limit: reaches(limit), f"{limit} in flight")  # type: ignore[misc]
        time.sleep(0.1)
        assert nsqd.stats(stage.topic, CHANNEL)["in_flight_count"] == limit
    run.end()
    until(lambda: nsqd.stats(stage.topic, CHANNEL)["client_count"] == 0, "consumer gone")
    left = {message.body.decode() for message in rest_of(nsqd, stage.topic)}
    assert left | set(run.bodies) == set(expected), "lost"


def backs_off(stage: Stage) -> None:
    """After a failure the client asks for nothing, then for one message, and after a success for all it takes."""
    nsqd = stage.servers.nsqd()
    nsqd.publish(stage.topic, b"fail first")
    with Tap(nsqd.tcp) as tap:
        run = stage.start(
            "consume", nsqd=[address(tap.address)], max_in_flight=5, requeue_ms=100, max_backoff_s=10, finish_count=6
        )
        run.wait(lambda: ("fail first", 2) in run.messages, "second attempt")
        until(lambda: rdy_counts(tap)[-1] == 5, "full RDY again")
        nsqd.publish(stage.topic, *(b"%d" % number for number in range(5)))
        run.wait_end()
        see_drained(nsqd, stage.topic)  # before the tap ends: it may still have something to pass on
    counts = rdy_counts(tap)
    assert counts[counts.index(0) :] == [0, 1, 5], counts
    assert run.messages == [("fail first", 1), ("fail first", 2), *((str(number), 1) for number in range(5))]


def rdy_counts(tap: Tap) -> list[int]:
    """What a client has asked for, one after the other, without repetitions."""
    counts = [int(count) for count in re.findall(rb"^RDY (\d+)\n", tap.sent, re.MULTILINE)]
    return [count for at, count in enumerate(counts) if at == 0 or counts[at - 1] != count]


# -- discovery ---------------------------------------------------------------------------------------------------------


def discovers(stage: Stage, nsqd_names: list[str], nsqlookupd_names: list[str], joins_late: bool = False) -> None:
    """Every nsqd that the nsqlookupds know for the topic is found.

    Args:
        nsqlookupd_names: ``dead`` is one that does not answer.
        joins_late: the last nsqd gets the topic only after the client has asked.
    """
    servers = stage.servers
    nsqds = [servers.registered_nsqd(name) for name in nsqd_names]
    names = {name for name in nsqlookupd_names if name != "dead"}

    def publish(number: int) -> None:
        nsqds[number].publish(stage.topic, f"from {nsqd_names[number]}".encode())
        port = nsqds[number].tcp[1]
        known_to = [servers.nsqlookupd(name) for name in names & set(nsqd_names[number])]
        until(lambda: all(port in each.producers(stage.topic) for each in known_to), "registered")

    for number in range(len(nsqds) - joins_late):
        publish(number)
    http = [DEAD_ADDRESS if name == "dead" else address(servers.nsqlookupd(name).http) for name in nsqlookupd_names]
    run = stage.start("consume", nsqlookupd=http, max_in_flight=10)
    if joins_late:
        run.wait(lambda: run.messages, "first message")
        publish(len(nsqds) - 1)
    run.wait(lambda: len(run.messages) == len(nsqds), "a message from each", stage.patience_s)
    run.end()
    assert sorted(run.messages) == sorted((f"from {name}", 1) for name in nsqd_names)
    for nsqd in nsqds:
        see_drained(nsqd, stage.topic)
    known_to = [servers.nsqlookupd(name) for name in names]
    until(lambda: all(each.channels(stage.topic) == [CHANNEL] for each in known_to), "the channel is registered")


# -- kill -9 -----------------------------------------------------------------------------------------------------------


def consumer_survives_a_kill(stage: Stage) -> None:
    """nsqd is killed with messages in flight; when it is back the client reconnects, and nothing is lost."""
    names = "a" if stage.client.reconnects_by_nsqlookupd else ""
    nsqd = stage.servers.mortal_nsqd(names)
    held_count = 20 if stage.client.can_hold else 1
    expected = [*(f"message {n}" for n in range(100)), *(f"hold {n}" for n in range(held_count)), "last before"]
    nsqd.publish(stage.topic, *(body.encode() for body in expected))
    if names:
        nsqlookupd = stage.servers.nsqlookupd(names)
        until(lambda: nsqlookupd.producers(stage.topic), "registered")
        run = stage.start("consume", nsqlookupd=[address(nsqlookupd.http)], max_in_flight=20)
    else:
        run = stage.start("consume", nsqd=addresses([nsqd]), max_in_flight=20, max_backoff_s=1)
    run.wait(lambda: len(run.messages) >= 100 + held_count, "messages in flight")
    nsqd.kill()
    nsqd.start()
    nsqd.publish(stage.topic, b"after")
    run.wait(lambda: "after" in run.bodies, "reconnected", stage.patience_s)
    until(lambda: nsqd.unfinished(stage.topic, CHANNEL) == 0, "all finished")
    run.end()
    assert set(run.bodies) == {*expected, "after"}, "lost"
    nsqd.stop()


def producer_survives_a_kill(stage: Stage) -> None:
    """nsqd is killed, something is published meanwhile; when it is back the client publishes again, and nothing that it
    saw acknowledged is lost.
    """
    nsqd = stage.servers.mortal_nsqd()
    run = stage.start("publish", nsqd=addresses([nsqd]))
    assert run.publish([b"before %d" % number for number in range(50)]) == [True] * 50, run.described
    nsqd.kill()
    meanwhile = run.begin_publishing([b"meanwhile"])
    nsqd.start()
    acknowledged = {f"before {number}" for number in range(50)}
    acknowledged |= {"meanwhile"} if run.answers(meanwhile) == [True] else set()
    acknowledged.add(_first_acknowledged(run, stage.patience_s))
    with nsqd.connect() as consumer:
        consumer.subscribe(stage.topic, CHANNEL, 1000)
        while acknowledged:  # what is lost does not come, and fails the test
            acknowledged.discard(consumer.message().body.decode())
    run.end()
    nsqd.stop()


def _first_acknowledged(run: Run, timeout_s: float) -> str:
    """Publish until something is acknowledged; return it."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        body = f"after {len(run.of('published'))}"
        if run.publish([body.encode()]) == [True]:
            return body
        time.sleep(0.1)
    raise AssertionError(f"nothing published after the restart; {run.described}")


CASES = [  # the slow ones first
    Case("touch", touches),
    Case("survive-consuming", consumer_survives_a_kill),
    Case("survive-publishing", producer_survives_a_kill),
    Case("discover-two", lambda stage: discovers(stage, ["a", "b"], ["a", "b"])),
    Case("discover-dead", lambda stage: discovers(stage, ["a"], ["dead", "a"])),
    Case("discover-late", lambda stage: discovers(stage, ["a", "ab"], ["a"], joins_late=True)),
    Case("discover", lambda stage: discovers(stage, ["a", "ab"], ["a"])),
    Case("idle", idles),
    Case("backoff", backs_off),
    Case("max-in-flight", changes_max_in_flight),
    Case("publish", publishes),
    Case("requeue", requeues),
    Case("sample", samples),
    Case("drain", drains),
    Case("consume", consumes),
    Case("consume-partitions", consumes_partitions),
    Case("publish-bodies", publishes_bodies),
    Case("consume-bodies", consumes_bodies),
]
