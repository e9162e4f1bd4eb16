"""Topics with partitions on real processes: several nsqds, restarts, kills, plain clients beside smart ones."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from tests.integration.daemons import Connection, Daemons, Nsqd, Nsqlookupd, mpub, mpub_body, pub, sized, wait_until
from tests.old_database import make_older

BARE = {"Accept": "application/vnd.nsq; version=1.0"}


def lookup(nsqlookupd: Nsqlookupd, topic: str, access: str = "w") -> dict[str, Any]:
    answer = nsqlookupd.request("GET", f"/lookup?topic={topic}&access={access}&metainfo=true", headers=BARE)
    found: dict[str, Any] = answer.json
    return found


def leaders(nsqlookupd: Nsqlookupd, topic: str) -> dict[int, int]:
    """Partition to TCP port."""
    rows = lookup(nsqlookupd, topic).get("partitions", {})
    return {int(number): row["tcp_port"] for number, row in rows.items()}


def flag_of(nsqlookupd: Nsqlookupd) -> str:
    return f"--lookupd-tcp-address=127.0.0.1:{nsqlookupd.tcp[1]}"


def mpub_to(topic: str, partition: int, bodies: list[bytes]) -> bytes:
    return f"MPUB {topic} {partition}\n".encode() + sized(mpub_body(bodies))


def drain(connection: Connection, count: int) -> dict[bytes, bytes]:
    """Body to id of the next messages, each finished."""
    found = {}
    for _ in range(count):
        message = connection.message()
        found[message.body] = message.id
        connection.finish(message)
    return found


def test_a_topic_on_two_nodes_from_its_creation_to_its_end(daemons: Daemons):
    nsqlookupd = daemons.nsqlookupd()
    nsqds = [daemons.nsqd(flag_of(nsqlookupd)) for _ in range(2)]
    wait_until(lambda: len(nsqlookupd.get("/nodes")["producers"]) == 2, "both nodes")
    nsqlookupd.post("/topic/create?topic=t&partition_num=4&replicator=1")
    found = leaders(nsqlookupd, "t")
    assert sorted(found) == [0, 1, 2, 3]
    by_port = {nsqd.tcp[1]: nsqd for nsqd in nsqds}

    # a smart client names partitions, each at its leader; a plain one does not
    for number, port in found.items():
        with by_port[port].connect() as connection:
            connection.ok(mpub_to("t", number, [b"smart-%d" % number]))
    for nsqd in nsqds:
        nsqd.post("/channel/create?topic=t&channel=c")
        nsqd.publish("t", b"plain-%d" % nsqd.tcp[1])

    # a plain consumer finds both nodes as NSQ's clients do, and gets everything of each
    assert nsqlookupd.producers("t") == sorted(by_port)
    bodies = set()
    for nsqd in nsqds:
        with nsqd.connect() as connection:
            connection.subscribe("t", "c", 10)
            bodies |= set(drain(connection, 3))
            connection.settle()
    assert bodies == {*(b"smart-%d" % number for number in found), *(b"plain-%d" % port for port in by_port)}

    # nsqlookupd has nothing but what it is told again
    nsqlookupd.kill()
    nsqlookupd.start()
    wait_until(lambda: leaders(nsqlookupd, "t") == found, "the same leaders")
    assert lookup(nsqlookupd, "t")["meta"]["partition_num"] == 4
    wait_until(lambda: nsqlookupd.channels("t") == ["c"], "the channel")

    # a node that goes takes its partitions with it, and brings them back
    nsqds[0].kill()
    wait_until(lambda: set(leaders(nsqlookupd, "t").values()) == {nsqds[1].tcp[1]}, "the other's alone")
    nsqds[0].start()
    wait_until(lambda: sorted(leaders(nsqlookupd, "t")) == [0, 1, 2, 3], "all of them")

    nsqlookupd.post("/topic/delete?topic=t&partition=**")
    for nsqd in nsqds:
        assert nsqd.get("/stats?format=json&topic=t")["topics"] is None


def test_kill_9_loses_nothing_of_any_partition(daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os")
    nsqd.post("/topic/create?topic=t&partition_num=3")
    nsqd.post("/channel/create?topic=t&channel=c")
    rng = random.Random(2)
    published: dict[bytes, int] = {}
    for life in range(4):
        with nsqd.connect() as connection:
            for number in range(30):
                partition = rng.randrange(3)
                bodies = [b"%d-%d-%d" % (life, number, each) for each in range(rng.randrange(1, 5))]
                connection.ok(mpub_to("t", partition, bodies))
                published |= dict.fromkeys(bodies, partition)
        nsqd.kill()
        nsqd.start()
    with nsqd.connect() as connection:
        connection.subscribe("t", "c", 100)
        found = drain(connection, len(published))
    internal = {body: int(message_id, 16) for body, message_id in found.items()}
    assert {body: each >> 50 for body, each in internal.items()} == published
    assert len(set(internal.values())) == len(published)


def test_a_clean_restart_neither_loses_nor_repeats(daemons: Daemons):
    nsqd = daemons.nsqd()
    nsqd.post("/topic/create?topic=t&partition_num=2&retention=1&syncdisk=1")
    nsqd.post("/channel/create?topic=t&channel=c")
    with nsqd.connect() as connection:
        for number in (0, 1):
            connection.ok(mpub_to("t", number, [b"%d-%d" % (number, each) for each in range(10)]))
    with nsqd.connect() as connection:
        connection.subscribe("t", "c", 7)
        before = drain(connection, 7)
        held = connection.messages(7)
        connection.settle()
        assert not set(before) & {message.body for message in held}
    nsqd.restart()
    row = nsqd.stats("t")
    assert (row["partition_num"], [each["next_sequence"] for each in row["partitions"]]) == (2, [11, 11])
    with nsqd.connect() as connection:
        connection.subscribe("t", "c", 100)
        after = drain(connection, 13)
    assert len({**before, **after}) == 20


def test_a_topic_may_be_synced_more_often_than_the_node(daemons: Daemons):
    """Each is answered, beside topics that wait for nothing."""
    for durability in ("os", "interval", "fsync"):
        nsqd = daemons.nsqd(f"--durability={durability}")
        nsqd.post("/topic/create?topic=each&partition_num=2&syncdisk=1")
        nsqd.post("/topic/create?topic=some&partition_num=2&syncdisk=5")
        with nsqd.connect() as connection:
            for number in range(20):
                connection.send(
                    mpub_to("each", number % 2, [b"x"]) + mpub_to("some", 1, [b"x"] * 3) + pub("plain", b"x")
                )
                connection.ok(count=3)
        assert [nsqd.stats(topic)["message_count"] for topic in ("each", "some", "plain")] == [20, 60, 20]
        nsqd.stop()


def test_delays_of_every_partition_survive(daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os")
    nsqd.post("/topic/create?topic=t&partition_num=2")
    nsqd.post("/channel/create?topic=t&channel=c")
    begun = time.monotonic()
    with nsqd.connect() as connection:
        for number in (0, 1):
            connection.ok(b"DPUB t 700 %d\n" % number + sized(b"%d" % number))
    nsqd.kill()
    nsqd.start()
    with nsqd.connect() as connection:
        connection.subscribe("t", "c", 10)
        assert set(drain(connection, 2)) == {b"0", b"1"}
        assert time.monotonic() - begun >= 0.7


def test_an_older_data_directory_gets_what_it_lacks(daemons: Daemons, tmp_path: Path):
    """A database of before there were partitions, as the release before this one wrote it."""
    nsqd = daemons.nsqd("--durability=os")
    nsqd.publish("t", b"x")
    nsqd.stop()
    make_older(nsqd.data_path, 1)
    nsqd.start()
    nsqd.post("/topic/create?topic=p&partition_num=2")
    nsqd.restart()
    with nsqd.connect() as connection:
        connection.subscribe("t", "c", 1)
        assert connection.message().body == b"x"
    assert nsqd.stats("p")["partition_num"] == 2


def test_publishers_of_many_kinds_at_once(daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os")
    nsqd.post("/topic/create?topic=t&partition_num=3")
    nsqd.post("/channel/create?topic=t&channel=c")
    with nsqd.connect() as smart, nsqd.connect() as plain:
        smart.send(b"".join(mpub_to("t", number % 3, [b"s%d" % number]) for number in range(60)))
        plain.send(
            b"".join(pub("t", b"p%d" % number) for number in range(30)) + mpub("t", [b"m%d" % n for n in range(30)])
        )
        smart.ok(count=60)
        plain.ok(count=31)
    with nsqd.connect() as connection:
        connection.subscribe("t", "c", 50)
        assert len(drain(connection, 120)) == 120
    assert_spread(nsqd)


def assert_spread(nsqd: Nsqd) -> None:
    assert all(row["message_count"] >= 20 for row in nsqd.stats("t")["partitions"])
