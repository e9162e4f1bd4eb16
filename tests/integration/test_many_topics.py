"""Hundreds of topics on one real nsqd: all of it is there after kill -9 and after SIGTERM, and ``/stats`` tells it."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from tests.integration.daemons import Closed, Daemons, Nsqd, pub, wait_until

TOPICS = [f"topic_{number:03d}" for number in range(240)]
CHANNELS = ("a", "b", "c")
CONSUMED = TOPICS[::40]  # these finish their first message in channel a
CLIENTS = 16


@pytest.fixture(params=["fsync", "os", "interval"])
def nsqd(request: pytest.FixtureRequest, daemons: Daemons) -> Nsqd:
    """An nsqd with all the topics and two messages in each."""
    nsqd = daemons.nsqd(f"--durability={request.param}")
    with ThreadPoolExecutor(CLIENTS) as clients:
        for path in (
            [f"/topic/create?topic={topic}" for topic in TOPICS],
            [f"/channel/create?topic={topic}&channel={channel}" for topic in TOPICS for channel in CHANNELS],
        ):
            for answer in clients.map(nsqd.post, path):
                assert answer.status == 200
    publish(nsqd, 1)
    publish(nsqd, 2)
    nsqd.post(f"/channel/pause?topic={TOPICS[7]}&channel=b")
    for topic in CONSUMED:
        with nsqd.connect().subscribe(topic, "a", 1) as consumer:
            first = consumer.message()
            assert first.body == f"{topic} 1".encode()
            consumer.finish(first)
            consumer.message()  # behind it: the other is finished
    return nsqd


def publish(nsqd: Nsqd, number: int) -> None:
    with nsqd.connect() as connection:
        connection.ok(b"".join(pub(topic, f"{topic} {number}".encode()) for topic in TOPICS), count=len(TOPICS))


def rows(nsqd: Nsqd) -> dict[str, dict[str, Any]]:
    return {row["topic_name"]: row for row in nsqd.get("/stats?format=json")["topics"]}


def expected(message_count: int) -> dict[tuple[str, str], int]:
    return {
        (topic, channel): message_count - (channel == "a" and topic in CONSUMED)
        for topic in TOPICS
        for channel in CHANNELS
    }


def depths(nsqd: Nsqd) -> dict[tuple[str, str], int]:
    return {
        (topic, channel["channel_name"]): channel["depth"] + channel["in_flight_count"]
        for topic, row in rows(nsqd).items()
        for channel in row["channels"]
    }


def check_messages(nsqd: Nsqd, message_count: int) -> None:
    assert nsqd.request("GET", "/ping").body == b"OK"
    assert list(rows(nsqd)) == TOPICS
    wait_until(lambda: depths(nsqd) == expected(message_count), "depths are what was published less what was finished")
    assert [
        (topic, channel["channel_name"])
        for topic, row in rows(nsqd).items()
        for channel in row["channels"]
        if channel["paused"]
    ] == [(TOPICS[7], "b")]
    for topic in (*CONSUMED, TOPICS[1], TOPICS[-1]):
        numbers = range(2 if topic in CONSUMED else 1, message_count + 1)
        with nsqd.connect().subscribe(topic, "a", message_count) as consumer:
            # of what a lost connection held, the message held longest comes last
            found = sorted(message.body for message in consumer.messages(len(numbers)))
        assert found == [f"{topic} {number}".encode() for number in numbers]


def test_after_kill_9_and_after_sigterm_everything_is_there(nsqd: Nsqd):
    wait_until(lambda: depths(nsqd) == expected(2), "everything is counted")
    settle(nsqd)
    nsqd.kill()
    nsqd.start()
    check_messages(nsqd, 2)
    publish(nsqd, 3)
    nsqd.restart()
    check_messages(nsqd, 3)
    nsqd.restart()  # nothing was written in between
    check_messages(nsqd, 3)
    nsqd.kill()
    nsqd.start()
    check_messages(nsqd, 3)


def test_kill_9_while_all_topics_are_published_to(daemons: Daemons):
    """What is acknowledged was synced in rounds of many logs each."""
    nsqd = daemons.nsqd()
    topics = [topic for _ in range(40) for topic in TOPICS]
    with nsqd.connect() as connection:
        for number, topic in enumerate(topics):
            connection.send(pub(topic, b"%d" % number))
        connection.ok(count=len(topics) // 2)
        nsqd.kill()
        acked_count = len(topics) // 2
        with suppress(Closed, OSError):
            while connection.response() == b"OK":
                acked_count += 1
    nsqd.start()
    acked = Counter(topics[:acked_count])
    found = {topic: row["depth"] for topic, row in rows(nsqd).items()}
    assert all(found[topic] >= count for topic, count in acked.items())
    assert sum(found.values()) <= len(topics)


def settle(nsqd: Nsqd) -> None:
    """Wait until a flush was written that began after now: it holds every FIN so far."""
    nsqd.post("/topic/create?topic=last")
    nsqd.post("/channel/create?topic=last&channel=last")
    nsqd.post("/topic/delete?topic=last")


def test_stats_as_text_and_as_json_tell_the_same_of_many_topics(nsqd: Nsqd):
    text = nsqd.request("GET", "/stats").text
    told = text[text.index("Topics:") : text.index("Producers:")].rstrip("\n").split("\n")[1:]
    wanted = []
    for number, (topic, row) in enumerate(rows(nsqd).items()):
        wanted += [""] if number else []
        wanted.append(f"   [{topic:<15}] depth: {row['depth']:<5} be-depth: {row['backend_depth']:<5} ")
        wanted += [
            f"   {'*P ' if channel['paused'] else '   '}[{channel['channel_name']:<25}] depth: {channel['depth']:<5} "
            for channel in row["channels"]
        ]
    assert len(told) == len(wanted)
    for line, start in zip(told, wanted, strict=True):
        assert line.startswith(start)
        assert bool(line) == bool(start)
