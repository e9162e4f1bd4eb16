"""Order on real processes: over kills, restarts, lost connections and consumers that compete for a partition."""

from __future__ import annotations

import contextlib
import random
import threading

import pytest
from tests.integration.daemons import Closed, Connection, Daemons, Message, Nsqd, fin, mpub_body, sized

BODY_AT = 12  # behind offset and raw size


def create(nsqd: Nsqd, topic: str, partition_num: int = 1) -> None:
    nsqd.post(f"/topic/create?topic={topic}&partition_num={partition_num}&orderedmulti=true")
    nsqd.post(f"/channel/create?topic={topic}&channel=c")


def publish(nsqd: Nsqd, topic: str, first: int, count: int, partition: int = 0) -> None:
    bodies = [b"%d" % number for number in range(first, first + count)]
    with nsqd.connect() as connection:
        connection.ok(f"MPUB {topic} {partition}\n".encode() + sized(mpub_body(bodies)))


def in_order(nsqd: Nsqd, topic: str, partition: int = 0) -> Connection:
    connection = nsqd.connect()
    connection.ok(f"SUB_ORDER {topic} c {partition}\n".encode())
    connection.rdy(1)
    return connection


def finish_surely(consumer: Connection, message: Message) -> None:
    """Finish a message, see that it is, and have no other one on the way."""
    consumer.send(b"RDY 0\n" + fin(message.id))
    consumer.settle()


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_kill_9_repeats_at_most_what_was_not_finished(daemons: Daemons, durability: str):
    nsqd = daemons.nsqd(f"--durability={durability}")
    create(nsqd, "t")
    publish(nsqd, "t", 0, 600)
    rng = random.Random(1)
    finished = -1
    for _ in range(8):
        with in_order(nsqd, "t") as consumer:
            for number in range(rng.randrange(1, 60)):
                message = consumer.message()
                seen = int(message.body[BODY_AT:])
                # only of the last FIN before the kill it is not known whether it arrived
                expected = (finished, finished + 1) if not number else (finished + 1,)
                assert seen in expected
                consumer.finish(message)
                finished = seen
            nsqd.kill()
        nsqd.start()
    with in_order(nsqd, "t") as consumer:
        assert int(consumer.message().body[BODY_AT:]) in (finished, finished + 1)


def test_a_clean_restart_goes_on_behind_the_last(daemons: Daemons):
    nsqd = daemons.nsqd()
    create(nsqd, "t", 2)
    for partition in (0, 1):
        publish(nsqd, "t", 0, 10, partition)
    for expected in range(5):
        for partition in (0, 1):
            with in_order(nsqd, "t", partition) as consumer:
                message = consumer.message()
                assert int(message.body[BODY_AT:]) == expected
                finish_surely(consumer, message)
        nsqd.restart()


@pytest.mark.parametrize("topic", ["plain", "parted"])
def test_a_stray_order_command_is_over_with_the_first_plain_consumer(daemons: Daemons, topic: str):
    """Of a topic that need not be consumed in order: it stays in order over a kill, and refuses nobody."""
    nsqd = daemons.nsqd("--durability=os")
    nsqd.post(f"/topic/create?topic={topic}" + ("&partition_num=1" if topic == "parted" else ""))
    publish(nsqd, topic, 0, 3)
    settings = f"/channel/settings?topic={topic}&channel=c"
    with in_order(nsqd, topic) as consumer:
        finish_surely(consumer, consumer.message())
    nsqd.kill()
    nsqd.start()
    assert nsqd.get(settings)["settings"] == {"is_ordered": True}
    with nsqd.connect() as consumer:
        consumer.subscribe(topic, "c", 5)
        assert [message.body for message in consumer.messages(2)] == [b"1", b"2"]
        assert nsqd.get(settings)["settings"] == {}
        nsqd.kill()
    nsqd.start()
    assert nsqd.get(settings)["settings"] == {}


@pytest.mark.parametrize("topic", ["plain", "parted"])
def test_what_an_operator_made_ordered_stays_so(daemons: Daemons, topic: str):
    """Of a topic that need not be consumed in order; over kills and restarts, until somebody says otherwise."""
    nsqd = daemons.nsqd("--durability=os")
    nsqd.post(f"/topic/create?topic={topic}" + ("&partition_num=1" if topic == "parted" else ""))
    publish(nsqd, topic, 0, 3)
    nsqd.post(f"/channel/create?topic={topic}&channel=c")
    nsqd.post(f"/channel/setorder?topic={topic}&channel=c&order=true")
    for stop_and_start in (nsqd.kill, nsqd.stop):
        with in_order(nsqd, topic) as consumer:
            finish_surely(consumer, consumer.message())
        stop_and_start()
        nsqd.start()
        with nsqd.connect() as connection:
            assert connection.error(f"SUB {topic} c\n".encode()).startswith("E_SUB_ORDER_IS_MUST")
        own = nsqd.get(f"/channel/settings?topic={topic}&channel=c")["settings"]
        assert own == {"is_ordered": True, "is_order_must": True}
    nsqd.post(f"/channel/setorder?topic={topic}&channel=c&order=false")
    nsqd.kill()
    nsqd.start()
    with nsqd.connect() as consumer:
        consumer.subscribe(topic, "c", 5)
        assert consumer.message().body == b"2"


def test_a_delay_outlives_the_process_and_still_blocks(daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os")
    create(nsqd, "t")
    publish(nsqd, "t", 0, 2)
    with in_order(nsqd, "t") as consumer:
        message = consumer.message()
        consumer.send(b"REQ %s 1000\n" % message.id)
        consumer.settle()
    nsqd.restart()
    with in_order(nsqd, "t") as consumer:
        again = consumer.message()
        assert (again.id, again.attempts) == (message.id, 2)


def test_competing_consumers_that_fail_in_every_way(daemons: Daemons):
    """What is finished is finished in the order of the partition, each once, whoever does it."""
    nsqd = daemons.nsqd("--durability=os")
    create(nsqd, "t")
    count = 300
    publish(nsqd, "t", 0, count)
    lock = threading.Lock()
    finished: list[int] = []
    problems: list[str] = []

    def consume(seed: int) -> None:
        rng = random.Random(seed)
        while len(finished) < count and not problems:
            with in_order(nsqd, "t") as consumer, contextlib.suppress(Closed):
                for _ in range(rng.randrange(1, 30)):
                    try:
                        message = consumer.message(1)
                    except AssertionError:
                        break  # another one holds it, or there is none
                    number = int(message.body[BODY_AT:])
                    with lock:
                        if number != len(finished):
                            problems.append(f"{number} behind {len(finished) - 1}")
                    what = rng.random()
                    if what < 0.1:
                        break  # the connection is lost with it
                    if what < 0.3:
                        consumer.send(b"TOUCH %s\nREQ %s %d\n" % (message.id, message.id, rng.choice((0, 5))))
                        continue
                    with lock:
                        finished.append(number)
                    finish_surely(consumer, message)
                    consumer.rdy(1)

    threads = [threading.Thread(target=consume, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (problems, finished) == ([], list(range(count)))
