"""What of a message is delivered to whom, and when (NSQ's TCP protocol)."""

from __future__ import annotations

import time

import pytest
from tests.conformance.conftest import quick_flags
from tests.conformance.protocol_helpers import (
    channels,
    consumer,
    counts,
    delivered,
    goes_on,
    only_client,
    topics,
    wait_for_counts,
)
from tests.integration.daemons import Connection, Daemons, Message, Nsqd, fin, mpub, pub, req, touch, wait_until

# -- a message ---------------------------------------------------------------------------------------------------------


def test_attempts_is_1_on_the_first_delivery(nsqd: Nsqd, topic: str):
    with delivered(nsqd, topic) as (_, message):
        assert message.attempts == 1


def test_attempts_is_counted_per_channel(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic, "a") as one, consumer(nsqd, topic, "b") as other:
        nsqd.publish(topic, b"x")
        message = one.message()
        one.send(req(message.id, 0))
        assert one.message().attempts == 2
        assert other.message().attempts == 1


def test_id_is_16_lower_case_hexadecimal_digits(nsqd: Nsqd, topic: str):
    nsqd.publish(topic, *[b"x"] * 100)
    with consumer(nsqd, topic, rdy_count=100) as connection:
        for message in connection.messages(100):
            assert len(message.id) == 16
            assert set(message.id) <= set(b"0123456789abcdef")


def test_ids_of_a_topic_are_different(nsqd: Nsqd, topic: str):
    for _ in range(3):
        nsqd.publish(topic, *[b"x"] * 500)
    with consumer(nsqd, topic, rdy_count=2500) as connection:
        assert len({message.id for message in connection.messages(1500)}) == 1500


def test_id_and_timestamp_are_the_same_in_every_channel(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic, "a", 5) as one, consumer(nsqd, topic, "b", 5) as other:
        nsqd.publish(topic, b"x", b"y", b"z")
        assert sorted(one.messages(3)) == sorted(other.messages(3))


def test_timestamp_is_the_time_of_acceptance(nsqd: Nsqd, topic: str):
    before_ns = time.time_ns()
    nsqd.publish(topic, b"x")
    after_ns = time.time_ns()
    time.sleep(0.05)
    with consumer(nsqd, topic) as connection:
        assert before_ns <= connection.message().timestamp_ns <= after_ns


def test_timestamps_do_not_go_back(nsqd: Nsqd, topic: str):
    with nsqd.connect() as producer:
        for number in range(20):
            producer.ok(pub(topic, b"%02d" % number))
    with consumer(nsqd, topic, rdy_count=20) as connection:
        received = sorted(connection.messages(20), key=lambda message: message.body)
    times = [message.timestamp_ns for message in received]
    assert times == sorted(times)


def test_messages_of_one_producer_come_in_their_order(nsqd: Nsqd, topic: str):
    bodies = [b"%03d" % number for number in range(300)]
    with nsqd.connect() as producer:
        for at in range(0, 300, 30):
            producer.ok(mpub(topic, bodies[at : at + 30]))
    with consumer(nsqd, topic, rdy_count=300) as connection:
        assert [message.body for message in connection.messages(300)] == bodies


# -- topics and channels -----------------------------------------------------------------------------------------------


def test_topic_without_channel_keeps_its_messages(nsqd: Nsqd, topic: str):
    nsqd.publish(topic, b"x", b"y")
    row = nsqd.stats(topic)
    assert (row["depth"], row["message_count"], row["channels"]) == (2, 2, [])


def test_first_channel_gets_the_backlog(nsqd: Nsqd, topic: str):
    nsqd.publish(topic, b"1", b"2")
    with consumer(nsqd, topic, rdy_count=5) as connection:
        assert {message.body for message in connection.messages(2)} == {b"1", b"2"}
        assert nsqd.stats(topic)["depth"] == 0


def test_later_channel_starts_at_now(nsqd: Nsqd, topic: str):
    nsqd.publish(topic, b"1")
    with consumer(nsqd, topic, "a", 5) as one:
        one.message()
        with consumer(nsqd, topic, "b", 5) as other:
            nsqd.publish(topic, b"2")
            assert other.message().body == b"2"
            assert one.message().body == b"2"


def test_channel_created_over_http_gets_what_is_published_then(nsqd: Nsqd, topic: str):
    nsqd.post(f"/topic/create?topic={topic}")
    nsqd.post(f"/channel/create?topic={topic}&channel=c")
    nsqd.publish(topic, b"x")
    wait_for_counts(nsqd, topic, (1, 0, 0))
    with consumer(nsqd, topic) as connection:
        assert connection.message().body == b"x"


def test_channel_without_consumers_keeps_its_messages(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic):
        pass
    nsqd.publish(topic, b"x")
    wait_for_counts(nsqd, topic, (1, 0, 0))
    with consumer(nsqd, topic) as connection:
        assert connection.message().body == b"x"


def test_topics_do_not_mix(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic) as connection:
        nsqd.publish(f"{topic}-other", b"x")
        connection.nothing_comes()


# -- pause -------------------------------------------------------------------------------------------------------------


def test_paused_channel_delivers_nothing(nsqd: Nsqd, connection: Connection, topic: str):
    connection.subscribe(topic, "c", 5)
    nsqd.post(f"/channel/pause?topic={topic}&channel=c")
    nsqd.publish(topic, b"x")
    connection.nothing_comes()
    assert counts(nsqd, topic) == (1, 0, 0)
    nsqd.post(f"/channel/unpause?topic={topic}&channel=c")
    assert connection.message().body == b"x"


def test_paused_channel_leaves_the_others(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic, "a") as paused, consumer(nsqd, topic, "b") as other:
        nsqd.post(f"/channel/pause?topic={topic}&channel=a")
        nsqd.publish(topic, b"x")
        assert other.message().body == b"x"
        paused.nothing_comes()


def test_paused_channel_takes_FIN_and_TOUCH_and_REQ(nsqd: Nsqd, connection: Connection, topic: str):
    nsqd.publish(topic, *[b"x"] * 3)
    one, two, three = connection.subscribe(topic, "c", 3).messages(3)
    nsqd.post(f"/channel/pause?topic={topic}&channel=c")
    goes_on(connection, fin(one.id) + touch(two.id) + req(three.id, 0))
    assert counts(nsqd, topic) == (1, 1, 0)
    connection.nothing_comes()


def test_paused_channel_takes_subscribers(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic):
        pass
    nsqd.publish(topic, b"x")
    nsqd.post(f"/channel/pause?topic={topic}&channel=c")
    with consumer(nsqd, topic) as connection:
        connection.nothing_comes()


def test_paused_channel_still_times_messages_out(shared_daemons: Daemons, topic: str):
    nsqd = shared_daemons.nsqd(*quick_flags(), "--msg-timeout=1s")
    with delivered(nsqd, topic) as (connection, _):
        nsqd.post(f"/channel/pause?topic={topic}&channel=c")
        wait_for_counts(nsqd, topic, (1, 0, 0))
        connection.nothing_comes()
        assert nsqd.stats(topic, "c")["timeout_count"] == 1
        nsqd.post(f"/channel/unpause?topic={topic}&channel=c")
        assert connection.message().attempts == 2
    nsqd.stop()


def test_paused_topic_hands_out_nothing(nsqd: Nsqd, connection: Connection, topic: str):
    connection.subscribe(topic, "c", 5)
    nsqd.post(f"/topic/pause?topic={topic}")
    nsqd.publish(topic, b"x")
    connection.nothing_comes()
    assert (nsqd.stats(topic)["depth"], counts(nsqd, topic)) == (1, (0, 0, 0))
    nsqd.post(f"/topic/unpause?topic={topic}")
    assert connection.message().body == b"x"


def test_paused_topic_lets_channels_drain(nsqd: Nsqd, connection: Connection, topic: str):
    nsqd.publish(topic, b"x", b"y")
    connection.subscribe(topic, "c")
    wait_for_counts(nsqd, topic, (2, 0, 0))
    nsqd.post(f"/topic/pause?topic={topic}")
    connection.rdy(2)
    assert {message.body for message in connection.messages(2)} == {b"x", b"y"}


def test_channel_created_while_the_topic_is_paused_gets_what_waits(nsqd: Nsqd, topic: str):
    with consumer(nsqd, topic, "a", 5) as one:
        nsqd.post(f"/topic/pause?topic={topic}")
        nsqd.publish(topic, b"x")
        with consumer(nsqd, topic, "b", 5) as other:
            nsqd.post(f"/topic/unpause?topic={topic}")
            assert one.message().body == b"x"
            assert other.message().body == b"x"


# -- sampling ----------------------------------------------------------------------------------------------------------

SAMPLED_COUNT = 2000


def sampled(nsqd: Nsqd, topic: str, rate: int) -> int:
    """How many of many messages a consumer with this sample rate gets."""
    for _ in range(4):
        nsqd.publish(topic, *[b"x"] * (SAMPLED_COUNT // 4))
    with consumer(nsqd, topic, rdy_count=2500, sample_rate=rate) as connection:
        wait_for_depth_0(nsqd, topic)
        in_flight = nsqd.stats(topic, "c")["in_flight_count"]
        assert only_client(nsqd, topic)["sample_rate"] == rate
        connection.finish(*connection.messages(in_flight))
        connection.nothing_comes()
    wait_for_counts(nsqd, topic, (0, 0, 0))
    return int(in_flight)


def wait_for_depth_0(nsqd: Nsqd, topic: str) -> None:
    wait_until(lambda: nsqd.stats(topic, "c")["depth"] == 0, "everything to be looked at")


def test_sample_rate_0_is_all(nsqd: Nsqd, topic: str):
    assert sampled(nsqd, topic, 0) == SAMPLED_COUNT


def test_sample_rate_is_about_its_percentage_and_the_rest_is_gone(nsqd: Nsqd, topic: str):
    """Within five standard deviations."""
    assert 0.5 * SAMPLED_COUNT - 115 < sampled(nsqd, topic, 50) < 0.51 * SAMPLED_COUNT + 115


@pytest.mark.improvement
def test_sample_rate_1_is_one_percent(nsqd: Nsqd, topic: str):
    """Upstream delivers one percent more than asked for: two of a hundred here."""
    received = sum(sampled(nsqd, f"{topic}-{number}", 1) for number in range(4))
    assert received < 0.01 * 4 * SAMPLED_COUNT + 45


@pytest.mark.improvement
def test_sample_rate_of_the_last_IDENTIFY_counts(nsqd: Nsqd, topic: str):
    """Upstream's pump keeps that of the first."""
    nsqd.publish(topic, *[b"x"] * 200)
    with nsqd.connect() as connection:
        connection.identify(sample_rate=1)
        connection.identify(sample_rate=0)
        connection.subscribe(topic, "c", 200)
        assert len(connection.messages(200)) == 200


# -- restart -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def restarted(shared_daemons: Daemons) -> tuple[Nsqd, Message, Message]:
    """An nsqd behind a clean restart: of three messages in ``kept`` one was finished, one was in flight."""
    nsqd = shared_daemons.nsqd(*quick_flags())
    nsqd.publish("kept", b"1", b"2", b"3")
    with consumer(nsqd, "kept", rdy_count=2) as connection:
        finished, held = connection.messages(2)
        goes_on(connection, b"RDY 0\n" + fin(finished.id))
    nsqd.post("/topic/create?topic=paused")
    nsqd.post("/channel/create?topic=paused&channel=c")
    nsqd.post("/channel/pause?topic=paused&channel=c")
    nsqd.post("/topic/pause?topic=paused")
    nsqd.restart()
    return nsqd, finished, held


def test_restart_keeps_topics_and_channels(restarted: tuple[Nsqd, Message, Message]):
    nsqd = restarted[0]
    assert {"kept", "paused"} <= topics(nsqd)
    assert channels(nsqd, "kept") == ["c"]


def test_restart_keeps_what_is_paused(restarted: tuple[Nsqd, Message, Message]):
    nsqd = restarted[0]
    assert nsqd.stats("paused")["paused"] is True
    assert nsqd.stats("paused", "c")["paused"] is True


def test_restart_keeps_messages_that_are_not_finished(restarted: tuple[Nsqd, Message, Message]):
    nsqd, finished, held = restarted
    with consumer(nsqd, "kept", rdy_count=5) as connection:
        left = {message.id: message for message in connection.messages(2)}
        connection.nothing_comes()
    assert {message.body for message in left.values()} == {b"1", b"2", b"3"} - {finished.body}
    assert left[held.id].timestamp_ns == held.timestamp_ns
