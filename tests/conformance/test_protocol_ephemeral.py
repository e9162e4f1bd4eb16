"""Topics and channels whose name ends with #ephemeral (NSQ's TCP protocol)."""

from __future__ import annotations

import pytest
from tests.conformance.conftest import quick_flags
from tests.conformance.protocol_helpers import channels, clients, consumer, counts, topics
from tests.integration.daemons import IS_OTHER_NSQD, Daemons, Nsqd, mpub, pub, wait_until

CHANNEL = "c#ephemeral"
MEM_QUEUE_SIZE = 5


@pytest.fixture
def brief(topic: str) -> str:
    """The name of an ephemeral topic of this case."""
    return f"{topic}#ephemeral"


@pytest.fixture(scope="module")
def small(shared_daemons: Daemons) -> Nsqd:
    """An nsqd with a small memory queue."""
    return shared_daemons.nsqd(*quick_flags(), f"--mem-queue-size={MEM_QUEUE_SIZE}")


# -- channels ----------------------------------------------------------------------------------------------------------


def test_channel_works_as_any_other(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic, CHANNEL) as connection:
        nsqd.publish(topic, b"x")
        message = connection.message()
        connection.finish(message)
        connection.settle()
        assert counts(nsqd, topic, CHANNEL) == (0, 0, 0)


def test_channel_goes_with_its_last_client(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic, CHANNEL), consumer(nsqd, topic):
        with consumer(nsqd, topic, CHANNEL):
            assert len(clients(nsqd, topic, CHANNEL)) == 2
        wait_until(lambda: len(clients(nsqd, topic, CHANNEL)) == 1, "one of two to be gone")
        assert channels(nsqd, topic) == ["c", CHANNEL]
    wait_until(lambda: channels(nsqd, topic) == ["c"], "the ephemeral channel to be gone")


def test_channel_goes_after_a_fatal_error_of_its_last_client(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic, CHANNEL) as connection:
        assert connection.error(b"FOO\n") == "E_INVALID invalid command FOO"
        connection.wait_closed()
    wait_until(lambda: channels(nsqd, topic) == [], "the channel to be gone")


def test_channel_made_again_starts_empty(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic), consumer(nsqd, topic, CHANNEL, rdy_count=0):
        nsqd.publish(topic, b"x")
        wait_until(lambda: counts(nsqd, topic, CHANNEL) == (1, 0, 0), "the message in the channel")
    wait_until(lambda: channels(nsqd, topic) == ["c"], "the channel to be gone")
    with consumer(nsqd, topic, CHANNEL) as connection:
        connection.nothing_comes()
        nsqd.publish(topic, b"y")
        assert connection.message().body == b"y"


def test_topic_stays_without_its_ephemeral_channel(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic, CHANNEL):
        pass
    wait_until(lambda: channels(nsqd, topic) == [], "the channel to be gone")
    assert topic in topics(nsqd)


def test_channel_has_nothing_on_disk(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic, CHANNEL, rdy_count=0):
        nsqd.publish(topic, b"x")
        wait_until(lambda: counts(nsqd, topic, CHANNEL) == (1, 0, 0), "the message in the channel")
        assert nsqd.stats(topic, CHANNEL)["backend_depth"] == 0


def test_channel_drops_what_does_not_fit_into_memory(small: Nsqd, topic: str):
    with consumer(small, topic, CHANNEL, rdy_count=0) as connection, small.connect() as producer:
        for number in range(3 * MEM_QUEUE_SIZE):
            producer.ok(pub(topic, b"%d" % number))
        wait_until(lambda: counts(small, topic, CHANNEL)[0] == MEM_QUEUE_SIZE, "a full memory queue")
        connection.rdy(100)
        assert [message.body for message in connection.messages(MEM_QUEUE_SIZE)] == [b"0", b"1", b"2", b"3", b"4"]
        connection.nothing_comes()


def test_what_a_channel_drops_is_counted(small: Nsqd, topic: str):
    """In message_count, as upstream; how many they were is upstream's secret."""
    with consumer(small, topic, CHANNEL, rdy_count=0):
        small.publish(topic, *[b"x"] * 12)
        wait_until(lambda: small.stats(topic, CHANNEL)["message_count"] == 12, "all to be counted")
        row = small.stats(topic, CHANNEL)
        assert row["depth"] == MEM_QUEUE_SIZE
        if IS_OTHER_NSQD:
            return
        assert row["dropped_count"] == 12 - MEM_QUEUE_SIZE
        lines = small.request("GET", "/metrics").text.splitlines()
        labels = f'{{topic="{topic}",channel="{CHANNEL}"}}'
        assert f"flintmq_nsqd_channel_dropped_total{labels} 7" in lines
        assert f"flintmq_nsqd_channel_messages_total{labels} 12" in lines


def test_other_channels_of_the_topic_keep_everything(small: Nsqd, topic: str):
    with consumer(small, topic, CHANNEL, rdy_count=0), consumer(small, topic, rdy_count=0):
        small.publish(topic, *[b"x"] * 50)
        wait_until(lambda: counts(small, topic) == (50, 0, 0), "everything in the other channel")


@pytest.mark.improvement
def test_channel_of_a_server_without_memory_queue_keeps_a_minimum(shared_daemons: Daemons, topic: str):
    """Upstream's queue is unbuffered then: everything is dropped although PUB says OK."""
    nsqd = shared_daemons.nsqd(*quick_flags(), "--mem-queue-size=0")
    with consumer(nsqd, topic, CHANNEL, rdy_count=0) as connection:
        nsqd.publish(topic, b"x")
        connection.rdy(1)
        assert connection.message().body == b"x"
    nsqd.stop()


# -- topics ------------------------------------------------------------------------------------------------------------


def test_topic_works_as_any_other(nsqd: Nsqd, brief: str):
    with consumer(nsqd, brief) as connection:
        nsqd.publish(brief, b"x")
        assert connection.message().body == b"x"


def test_topic_stays_while_it_has_no_channel_yet(nsqd: Nsqd, brief: str):
    nsqd.publish(brief, b"x")
    assert brief in topics(nsqd)
    with consumer(nsqd, brief) as connection:
        assert connection.message().body == b"x"


def test_topic_goes_with_its_last_ephemeral_channel(nsqd: Nsqd, brief: str):
    with consumer(nsqd, brief, CHANNEL):
        assert brief in topics(nsqd)
    wait_until(lambda: brief not in topics(nsqd), "the topic to be gone")


def test_topic_stays_while_it_has_another_channel(nsqd: Nsqd, brief: str):
    with consumer(nsqd, brief), consumer(nsqd, brief, CHANNEL):
        pass
    wait_until(lambda: channels(nsqd, brief) == ["c"], "the ephemeral channel to be gone")
    assert brief in topics(nsqd)


def test_topic_goes_when_its_last_channel_is_deleted(nsqd: Nsqd, brief: str):
    with consumer(nsqd, brief):
        pass
    wait_until(lambda: not clients(nsqd, brief), "the client to be gone")
    nsqd.post(f"/channel/delete?topic={brief.replace('#', '%23')}&channel=c")
    wait_until(lambda: brief not in topics(nsqd), "the topic to be gone")


def test_topic_has_nothing_on_disk(nsqd: Nsqd, brief: str):
    nsqd.publish(brief, b"x")
    assert nsqd.stats(brief.replace("#", "%23"))["backend_depth"] == 0


def test_topic_drops_what_does_not_fit_into_memory(small: Nsqd, brief: str):
    with small.connect() as producer:
        producer.ok(mpub(brief, [b"%d" % number for number in range(10 * MEM_QUEUE_SIZE)]))
    assert small.stats(brief.replace("#", "%23"))["depth"] <= 2 * MEM_QUEUE_SIZE
    with consumer(small, brief, rdy_count=100) as connection:
        assert connection.message().body == b"0"


def test_neither_survives_a_restart(shared_daemons: Daemons, topic: str, brief: str):
    nsqd = shared_daemons.nsqd(*quick_flags())
    nsqd.publish(topic, b"x")
    nsqd.publish(brief, b"x")
    with consumer(nsqd, topic, CHANNEL, rdy_count=0), consumer(nsqd, topic, rdy_count=0):
        nsqd.stop()
    nsqd.start()
    assert topics(nsqd) == {topic}
    assert channels(nsqd, topic) == ["c"]
    nsqd.stop()


def test_what_a_topic_drops_is_counted(small: Nsqd, brief: str):
    """In message_count, as upstream."""
    small.publish(brief, *[b"x"] * 12)
    row = small.stats(brief)
    assert (row["message_count"], row["depth"]) == (12, MEM_QUEUE_SIZE)
    assert IS_OTHER_NSQD or row["dropped_count"] == 12 - MEM_QUEUE_SIZE
