"""A SUB of a new channel is answered at once, at a real nsqd; what is acknowledged behind it is in the channel."""

from __future__ import annotations

import random
import threading
import time

import pytest
from tests.integration.daemons import PATIENCE_S, Closed, Connection, Daemons, Nsqd, pub

ROUNDS = 15


def start(daemons: Daemons, durability: str) -> Nsqd:
    nsqd = daemons.nsqd(f"--durability={durability}")
    nsqd.post("/topic/create?topic=t")
    nsqd.post("/channel/create?topic=t&channel=old")  # so that a new channel does not begin with the backlog
    return nsqd


def everything_of(nsqd: Nsqd, channel: str, count: int, topic: str = "t") -> list[bytes]:
    """So many messages of a channel, finished."""
    with nsqd.connect() as consumer:
        consumer.subscribe(topic, channel, 2500)
        bodies = []
        for _ in range(count):
            message = consumer.message()
            consumer.finish(message)
            bodies.append(message.body)
    return bodies


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_a_kill_9_behind_the_answer(daemons: Daemons, durability: str):
    """At any moment: the channel is there with all that was acknowledged, or nothing was."""
    nsqd = start(daemons, durability)
    chance = random.Random(8)
    for number in range(ROUNDS):
        channel = f"c{number}"
        answered: list[bytes] = []
        with nsqd.connect() as publisher, nsqd.connect() as consumer:
            consumer.ok(b"SUB t %s\n" % channel.encode())

            def publish(connection: Connection, answered: list[bytes], number: int) -> None:
                try:
                    for each in range(10_000):
                        body = b"%d-%d" % (number, each)
                        connection.ok(pub("t", body))
                        answered.append(body)
                except (Closed, OSError):
                    return

            thread = threading.Thread(target=publish, args=(publisher, answered, number))
            thread.start()
            time.sleep(chance.choice((0, 0, 0.001, 0.003, 0.01, 0.03)))
            nsqd.kill()
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        nsqd.start()
        names = [each["channel_name"] for each in nsqd.stats("t")["channels"]]
        assert channel in names or not answered
        if answered:
            assert everything_of(nsqd, channel, len(answered)) == answered


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_a_kill_9_behind_the_answer_to_the_first_channel(daemons: Daemons, durability: str):
    """What the topic had before it comes to it after all."""
    nsqd = daemons.nsqd(f"--durability={durability}")
    bodies = [b"%d" % number for number in range(20)]
    chance = random.Random(9)
    for number in range(ROUNDS):
        topic = f"first{number}"
        nsqd.publish(topic, *bodies)
        with nsqd.connect() as consumer:
            consumer.subscribe(topic, "c")
            time.sleep(chance.choice((0, 0, 0.001, 0.003, 0.01)))
            nsqd.kill()
        nsqd.start()
        assert everything_of(nsqd, "c", len(bodies), topic) == bodies


def test_new_channels_one_after_the_other_do_not_stop_publishers(daemons: Daemons):
    nsqd = start(daemons, "os")
    is_over = threading.Event()
    refused: list[BaseException] = []

    def subscribe() -> None:
        number = 0
        try:
            while not is_over.is_set():
                number += 1
                with nsqd.connect() as consumer:
                    consumer.ok(b"SUB t new%d\n" % number)
        except (Closed, OSError, AssertionError) as error:
            refused.append(error)

    thread = threading.Thread(target=subscribe)
    thread.start()
    bodies = [b"%d" % number for number in range(300)]
    with nsqd.connect() as publisher:
        for body in bodies:
            publisher.ok(pub("t", body))
    is_over.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and not refused
    assert everything_of(nsqd, "old", len(bodies)) == bodies


def test_ephemeral_channels_and_channels_of_topics_with_partitions(daemons: Daemons):
    nsqd = daemons.nsqd("--durability=fsync")
    nsqd.post("/topic/create?topic=t&partition_num=2")
    with nsqd.connect() as one, nsqd.connect() as other, nsqd.connect() as publisher:
        one.ok(b"SUB t c#ephemeral\n")
        other.ok(b"SUB t c\n")
        publisher.ok(pub("t", b"a") + pub("t", b"b"), count=2)
        for consumer in (one, other):
            consumer.rdy(10)
            assert sorted(message.body for message in consumer.messages(2)) == [b"a", b"b"]
