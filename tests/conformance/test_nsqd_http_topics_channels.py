"""/topic/... and /channel/... of nsqd, row by row (NSQ's HTTP API, NSQ's TCP protocol, NSQ's data files)."""

from __future__ import annotations

import pytest
from tests.conformance.conftest import quick_flags
from tests.conformance.http_helpers import assert_empty, assert_refused, bodies_of, topic_names
from tests.integration.daemons import Answer, Daemons, Nsqd, wait_until

TOPIC_ACTIONS = ("create", "delete", "empty", "pause", "unpause")
CHANNEL_ACTIONS = ("create", "delete", "empty", "pause", "unpause")
INVALID = {
    "empty": "",
    "65 bytes": "n" * 65,
    "only the suffix": "%23ephemeral",
    "another suffix": "x%23other",
    "space": "a%20b",
    "slash": "a/b",
    "not ASCII": "%C3%A4",
}


def topic_action(nsqd: Nsqd, action: str, query: str) -> Answer:
    return nsqd.request("POST", f"/topic/{action}?{query}")


def channel_action(nsqd: Nsqd, action: str, query: str) -> Answer:
    return nsqd.request("POST", f"/channel/{action}?{query}")


def create(nsqd: Nsqd, topic: str, channel: str = "") -> None:
    assert_empty(topic_action(nsqd, "create", f"topic={topic}"))
    if channel:
        assert_empty(channel_action(nsqd, "create", f"topic={topic}&channel={channel}"))


def channel_names(nsqd: Nsqd, topic: str) -> list[str]:
    return [row["channel_name"] for row in nsqd.stats(topic)["channels"]]


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", TOPIC_ACTIONS)
def test_topic_actions_answer_empty(nsqd: Nsqd, topic: str, action: str):
    create(nsqd, topic)
    assert_empty(topic_action(nsqd, action, f"topic={topic}"))


@pytest.mark.parametrize("action", CHANNEL_ACTIONS)
def test_channel_actions_answer_empty(nsqd: Nsqd, topic: str, action: str):
    create(nsqd, topic, "c")
    assert_empty(channel_action(nsqd, action, f"topic={topic}&channel=c"))


@pytest.mark.parametrize("action", ["create", "empty", "pause", "unpause"])
def test_topic_actions_can_be_repeated(nsqd: Nsqd, topic: str, action: str):
    create(nsqd, topic)
    for _ in range(2):
        assert_empty(topic_action(nsqd, action, f"topic={topic}"))


@pytest.mark.parametrize("action", ["create", "empty", "pause", "unpause"])
def test_channel_actions_can_be_repeated(nsqd: Nsqd, topic: str, action: str):
    create(nsqd, topic, "c")
    for _ in range(2):
        assert_empty(channel_action(nsqd, action, f"topic={topic}&channel=c"))


# -- what topic actions refuse -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", TOPIC_ACTIONS)
def test_topic_actions_need_a_topic(nsqd: Nsqd, action: str):
    assert_refused(topic_action(nsqd, action, ""), 400, "MISSING_ARG_TOPIC")


@pytest.mark.parametrize("action", ["create", "empty"])
@pytest.mark.parametrize("name", INVALID.values(), ids=INVALID)
def test_topic_create_and_empty_check_the_name(nsqd: Nsqd, action: str, name: str):
    assert_refused(topic_action(nsqd, action, f"topic={name}"), 400, "INVALID_TOPIC")


@pytest.mark.parametrize("action", ["delete", "pause", "unpause"])
@pytest.mark.parametrize("name", INVALID.values(), ids=INVALID)
def test_other_topic_actions_do_not_know_an_invalid_name(nsqd: Nsqd, action: str, name: str):
    assert_refused(topic_action(nsqd, action, f"topic={name}"), 404, "TOPIC_NOT_FOUND")


@pytest.mark.parametrize("action", ["delete", "empty", "pause", "unpause"])
def test_topic_actions_need_the_topic_to_exist(nsqd: Nsqd, topic: str, action: str):
    assert_refused(topic_action(nsqd, action, f"topic={topic}"), 404, "TOPIC_NOT_FOUND")
    assert topic not in topic_names(nsqd)


@pytest.mark.parametrize("action", TOPIC_ACTIONS)
def test_topic_actions_do_not_look_at_a_channel(nsqd: Nsqd, topic: str, action: str):
    create(nsqd, topic)
    assert_empty(topic_action(nsqd, action, f"topic={topic}&channel=no!"))


# -- what channel actions refuse ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", CHANNEL_ACTIONS)
@pytest.mark.parametrize(
    ("query", "status", "text"),
    [
        pytest.param("", 400, "MISSING_ARG_TOPIC", id="nothing"),
        pytest.param("channel=c", 400, "MISSING_ARG_TOPIC", id="no topic"),
        pytest.param("channel=no!", 400, "MISSING_ARG_TOPIC", id="no topic before invalid channel"),
        pytest.param("topic=no!", 400, "INVALID_ARG_TOPIC", id="invalid topic before no channel"),
        pytest.param("topic=no!&channel=no!", 400, "INVALID_ARG_TOPIC", id="invalid topic before invalid channel"),
        pytest.param("topic=unknown", 400, "MISSING_ARG_CHANNEL", id="no channel before unknown topic"),
        pytest.param("topic=unknown&channel=no!", 400, "INVALID_ARG_CHANNEL", id="invalid channel before unknown"),
        pytest.param("topic=unknown&channel=c", 404, "TOPIC_NOT_FOUND", id="unknown topic"),
    ],
)
def test_channel_actions_check_in_this_order(nsqd: Nsqd, action: str, query: str, status: int, text: str):
    assert_refused(channel_action(nsqd, action, query), status, text)


@pytest.mark.parametrize("name", INVALID.values(), ids=INVALID)
def test_channel_actions_check_the_topic(nsqd: Nsqd, name: str):
    assert_refused(channel_action(nsqd, "create", f"topic={name}&channel=c"), 400, "INVALID_ARG_TOPIC")


@pytest.mark.parametrize("name", INVALID.values(), ids=INVALID)
def test_channel_actions_check_the_channel(nsqd: Nsqd, topic: str, name: str):
    create(nsqd, topic)
    assert_refused(channel_action(nsqd, "create", f"topic={topic}&channel={name}"), 400, "INVALID_ARG_CHANNEL")


@pytest.mark.parametrize("action", ["delete", "empty", "pause", "unpause"])
def test_channel_actions_need_the_channel_to_exist(nsqd: Nsqd, topic: str, action: str):
    create(nsqd, topic)
    assert_refused(channel_action(nsqd, action, f"topic={topic}&channel=c"), 404, "CHANNEL_NOT_FOUND")
    assert channel_names(nsqd, topic) == []


def test_channel_create_does_not_create_the_topic(nsqd: Nsqd, topic: str):
    channel_action(nsqd, "create", f"topic={topic}&channel=c")
    assert topic not in topic_names(nsqd)


def test_the_first_channel_wins(nsqd: Nsqd, topic: str):
    create(nsqd, topic)
    assert_empty(channel_action(nsqd, "create", f"topic={topic}&channel=a&channel=b"))
    assert channel_names(nsqd, topic) == ["a"]


# -- create ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["n" * 64, "A.b_c-9", ".", "x%23ephemeral"])
def test_topic_create_takes_valid_names(nsqd: Nsqd, name: str):
    create(nsqd, name)
    assert name.replace("%23", "#") in topic_names(nsqd)


@pytest.mark.parametrize("name", ["n" * 64, "A.b_c-9", ".", "x%23ephemeral"])
def test_channel_create_takes_valid_names(nsqd: Nsqd, topic: str, name: str):
    create(nsqd, topic, name)
    assert channel_names(nsqd, topic) == [name.replace("%23", "#")]


def test_topic_create_leaves_an_existing_topic_alone(nsqd: Nsqd, topic: str):
    nsqd.publish(topic, b"kept")
    create(nsqd, topic)
    assert bodies_of(nsqd, topic, 1) == [b"kept"]


def test_the_first_channel_gets_what_the_topic_holds(nsqd: Nsqd, topic: str):
    nsqd.publish(topic, b"1", b"2")
    create(nsqd, topic, "first")
    wait_until(lambda: nsqd.stats(topic, "first")["depth"] == 2)
    assert nsqd.stats(topic)["depth"] == 0


def test_a_later_channel_begins_empty(nsqd: Nsqd, topic: str):
    create(nsqd, topic, "first")
    nsqd.publish(topic, b"1", b"2")
    wait_until(lambda: nsqd.stats(topic, "first")["depth"] == 2)
    create(nsqd, topic, "later")
    nsqd.publish(topic, b"3")
    wait_until(lambda: nsqd.stats(topic, "later")["depth"] == 1)
    assert nsqd.stats(topic, "first")["depth"] == 3


# -- delete ------------------------------------------------------------------------------------------------------------


def test_topic_delete_removes_topic_and_channels(nsqd: Nsqd, topic: str):
    create(nsqd, topic, "c")
    topic_action(nsqd, "delete", f"topic={topic}")
    assert topic not in topic_names(nsqd)
    create(nsqd, topic)
    assert channel_names(nsqd, topic) == []


def test_topic_delete_drops_the_messages(nsqd: Nsqd, topic: str):
    nsqd.publish(topic, b"gone")
    topic_action(nsqd, "delete", f"topic={topic}")
    nsqd.publish(topic, b"new")
    assert bodies_of(nsqd, topic, 1) == [b"new"]


def test_topic_delete_starts_the_counts_again(nsqd: Nsqd, topic: str):
    nsqd.publish(topic, b"gone")
    topic_action(nsqd, "delete", f"topic={topic}")
    create(nsqd, topic)
    assert (nsqd.stats(topic)["message_count"], nsqd.stats(topic)["message_bytes"]) == (0, 0)


def test_topic_delete_closes_the_consumers(nsqd: Nsqd, topic: str):
    with nsqd.connect() as consumer:
        consumer.subscribe(topic, "c")
        topic_action(nsqd, "delete", f"topic={topic}")
        assert consumer.wait_closed() == []


def test_topic_delete_leaves_producers_connected(nsqd: Nsqd, topic: str):
    with nsqd.connect() as producer:
        producer.settle(topic)
        topic_action(nsqd, "delete", f"topic={topic}")
        producer.settle(topic)


def test_channel_delete_removes_the_channel_only(nsqd: Nsqd, topic: str):
    create(nsqd, topic, "a")
    create(nsqd, topic, "b")
    nsqd.publish(topic, b"x")
    channel_action(nsqd, "delete", f"topic={topic}&channel=a")
    assert channel_names(nsqd, topic) == ["b"]
    wait_until(lambda: nsqd.stats(topic, "b")["depth"] == 1)


def test_channel_delete_closes_its_consumers_only(nsqd: Nsqd, topic: str):
    with nsqd.connect() as gone, nsqd.connect() as kept:
        gone.subscribe(topic, "a")
        kept.subscribe(topic, "b", 1)
        channel_action(nsqd, "delete", f"topic={topic}&channel=a")
        assert gone.wait_closed() == []
        nsqd.publish(topic, b"x")
        assert kept.message().body == b"x"


def test_a_channel_created_again_begins_empty(nsqd: Nsqd, topic: str):
    create(nsqd, topic, "c")
    create(nsqd, topic, "other")
    nsqd.publish(topic, b"x")
    wait_until(lambda: nsqd.stats(topic, "c")["depth"] == 1)
    channel_action(nsqd, "delete", f"topic={topic}&channel=c")
    create(nsqd, topic, "c")
    row = nsqd.stats(topic, "c")
    assert (row["depth"], row["message_count"]) == (0, 0)


def test_an_ephemeral_topic_goes_with_its_last_channel(nsqd: Nsqd, topic: str):
    name = f"{topic}%23ephemeral"
    create(nsqd, name, "c")
    channel_action(nsqd, "delete", f"topic={name}&channel=c")
    wait_until(lambda: f"{topic}#ephemeral" not in topic_names(nsqd))


def test_an_ephemeral_channel_goes_with_its_last_consumer(nsqd: Nsqd, topic: str):
    with nsqd.connect() as one, nsqd.connect() as two:
        one.subscribe(topic, "c#ephemeral")
        two.subscribe(topic, "c#ephemeral")
        one.close()
        wait_until(lambda: nsqd.stats(topic, "c#ephemeral")["client_count"] == 1)
    wait_until(lambda: channel_names(nsqd, topic) == [])


# -- empty -------------------------------------------------------------------------------------------------------------


def test_topic_empty_drops_what_waits_at_the_topic(nsqd: Nsqd, topic: str):
    nsqd.publish(topic, b"1", b"2")
    topic_action(nsqd, "empty", f"topic={topic}")
    assert nsqd.stats(topic)["depth"] == 0
    nsqd.publish(topic, b"3")
    assert bodies_of(nsqd, topic, 1) == [b"3"]


def test_topic_empty_leaves_the_channels_alone(nsqd: Nsqd, topic: str):
    create(nsqd, topic, "c")
    nsqd.publish(topic, b"1", b"2")
    wait_until(lambda: nsqd.stats(topic, "c")["depth"] == 2)
    topic_action(nsqd, "empty", f"topic={topic}")
    assert nsqd.stats(topic, "c")["depth"] == 2


def test_topic_empty_keeps_the_counts(nsqd: Nsqd, topic: str):
    nsqd.publish(topic, b"1", b"2")
    topic_action(nsqd, "empty", f"topic={topic}")
    assert nsqd.stats(topic)["message_count"] == 2


@pytest.fixture
def emptied(nsqd: Nsqd, topic: str):
    """A consumer that held one message of a channel when it was emptied: two more waited, one was deferred."""
    with nsqd.connect() as consumer:
        consumer.subscribe(topic, "c", 1)
        nsqd.post(f"/pub?topic={topic}&defer=60000", b"later")
        wait_until(lambda: nsqd.stats(topic, "c")["deferred_count"] == 1)
        nsqd.publish(topic, b"1", b"2", b"3")
        held = consumer.message()
        assert_empty(channel_action(nsqd, "empty", f"topic={topic}&channel=c"))
        yield consumer, held


@pytest.mark.parametrize("name", ["depth", "backend_depth", "in_flight_count", "deferred_count"])
def test_channel_empty_drops(nsqd: Nsqd, topic: str, emptied: object, name: str):
    assert nsqd.stats(topic, "c")[name] == 0


def test_channel_empty_resets_what_its_clients_hold(nsqd: Nsqd, topic: str, emptied: object):
    (client,) = nsqd.stats(topic, "c")["clients"]
    assert client["in_flight_count"] == 0


def test_channel_empty_keeps_its_consumers_and_their_rdy(nsqd: Nsqd, topic: str, emptied):
    consumer, _ = emptied
    nsqd.publish(topic, b"fresh")
    assert consumer.message().body == b"fresh"


@pytest.mark.parametrize("command", ["FIN", "TOUCH", "REQ"])
def test_what_was_held_when_the_channel_was_emptied_is_not_in_flight(emptied, command: str):
    consumer, held = emptied
    timeout = b" 0" if command == "REQ" else b""
    error = consumer.error(command.encode() + b" " + held.id + timeout + b"\n")
    assert error == f"E_{command}_FAILED {command} {held.id.decode()} failed ID not in flight"


def test_channel_empty_leaves_other_channels_alone(nsqd: Nsqd, topic: str):
    create(nsqd, topic, "a")
    create(nsqd, topic, "b")
    nsqd.publish(topic, b"x")
    wait_until(lambda: nsqd.stats(topic, "b")["depth"] == 1 and nsqd.stats(topic, "a")["depth"] == 1)
    channel_action(nsqd, "empty", f"topic={topic}&channel=a")
    assert (nsqd.stats(topic, "a")["depth"], nsqd.stats(topic, "b")["depth"]) == (0, 1)


# -- pause -------------------------------------------------------------------------------------------------------------


def test_topic_pause_shows_in_stats(nsqd: Nsqd, topic: str):
    create(nsqd, topic, "c")
    assert nsqd.stats(topic)["paused"] is False
    topic_action(nsqd, "pause", f"topic={topic}")
    assert (nsqd.stats(topic)["paused"], nsqd.stats(topic, "c")["paused"]) == (True, False)
    topic_action(nsqd, "unpause", f"topic={topic}")
    assert nsqd.stats(topic)["paused"] is False


def test_channel_pause_shows_in_stats(nsqd: Nsqd, topic: str):
    create(nsqd, topic, "c")
    assert nsqd.stats(topic, "c")["paused"] is False
    channel_action(nsqd, "pause", f"topic={topic}&channel=c")
    assert (nsqd.stats(topic)["paused"], nsqd.stats(topic, "c")["paused"]) == (False, True)
    channel_action(nsqd, "unpause", f"topic={topic}&channel=c")
    assert nsqd.stats(topic, "c")["paused"] is False


def test_a_paused_topic_keeps_its_messages_from_the_channels(nsqd: Nsqd, topic: str):
    create(nsqd, topic, "c")
    topic_action(nsqd, "pause", f"topic={topic}")
    nsqd.publish(topic, b"1", b"2")
    assert (nsqd.stats(topic)["depth"], nsqd.stats(topic, "c")["depth"]) == (2, 0)
    topic_action(nsqd, "unpause", f"topic={topic}")
    wait_until(lambda: nsqd.stats(topic, "c")["depth"] == 2)
    assert nsqd.stats(topic)["depth"] == 0


def test_channels_created_while_the_topic_is_paused_get_what_it_kept(nsqd: Nsqd, topic: str):
    create(nsqd, topic)
    topic_action(nsqd, "pause", f"topic={topic}")
    nsqd.publish(topic, b"1")
    create(nsqd, topic, "a")
    create(nsqd, topic, "b")
    topic_action(nsqd, "unpause", f"topic={topic}")
    wait_until(lambda: nsqd.stats(topic, "a")["depth"] == 1 and nsqd.stats(topic, "b")["depth"] == 1)


def test_a_paused_topic_does_not_hold_back_its_channels(nsqd: Nsqd, topic: str):
    create(nsqd, topic, "c")
    nsqd.publish(topic, b"before")
    wait_until(lambda: nsqd.stats(topic, "c")["depth"] == 1)
    topic_action(nsqd, "pause", f"topic={topic}")
    with nsqd.connect() as consumer:
        assert consumer.subscribe(topic, "c", 1).message().body == b"before"


def test_topic_empty_drops_what_a_paused_topic_kept(nsqd: Nsqd, topic: str):
    create(nsqd, topic, "c")
    topic_action(nsqd, "pause", f"topic={topic}")
    nsqd.publish(topic, b"gone")
    topic_action(nsqd, "empty", f"topic={topic}")
    topic_action(nsqd, "unpause", f"topic={topic}")
    nsqd.publish(topic, b"kept")
    wait_until(lambda: nsqd.stats(topic, "c")["depth"] == 1)
    assert bodies_of_channel(nsqd, topic) == [b"kept"]


def bodies_of_channel(nsqd: Nsqd, topic: str) -> list[bytes]:
    with nsqd.connect() as consumer:
        return [consumer.subscribe(topic, "c", 1).message().body]


def test_a_paused_channel_delivers_nothing(nsqd: Nsqd, topic: str):
    with nsqd.connect() as consumer:
        consumer.subscribe(topic, "c", 5)
        channel_action(nsqd, "pause", f"topic={topic}&channel=c")
        nsqd.publish(topic, b"x")
        consumer.nothing_comes()
        assert nsqd.stats(topic, "c")["depth"] == 1
        channel_action(nsqd, "unpause", f"topic={topic}&channel=c")
        assert consumer.message().body == b"x"


def test_a_paused_channel_does_not_hold_back_others(nsqd: Nsqd, topic: str):
    with nsqd.connect() as consumer:
        create(nsqd, topic, "paused")
        channel_action(nsqd, "pause", f"topic={topic}&channel=paused")
        consumer.subscribe(topic, "c", 1)
        nsqd.publish(topic, b"x")
        assert consumer.message().body == b"x"


@pytest.mark.parametrize("command", ["FIN", "REQ", "TOUCH"])
def test_a_paused_channel_lets_messages_be(nsqd: Nsqd, topic: str, command: str):
    with nsqd.connect() as consumer:
        consumer.subscribe(topic, "c", 1)
        nsqd.publish(topic, b"x")
        message = consumer.message()
        channel_action(nsqd, "pause", f"topic={topic}&channel=c")
        timeout = b" 0" if command == "REQ" else b""
        consumer.send(command.encode() + b" " + message.id + timeout + b"\n")
        consumer.settle()
        row = nsqd.stats(topic, "c")
    expected = {"FIN": (0, 0), "REQ": (0, 1), "TOUCH": (1, 0)}[command]
    assert (row["in_flight_count"], row["depth"]) == expected


# -- what stays --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def restarted(shared_daemons: Daemons) -> Nsqd:
    """An nsqd that was killed right after it had answered, and started again."""
    nsqd = shared_daemons.nsqd(*quick_flags())
    create(nsqd, "plain", "c")
    create(nsqd, "paused")
    create(nsqd, "unpaused", "paused")
    create(nsqd, "unpaused", "unpaused")
    create(nsqd, "short%23ephemeral", "c")
    create(nsqd, "plain", "short%23ephemeral")
    create(nsqd, "deleted", "c")
    create(nsqd, "plain", "deleted")
    topic_action(nsqd, "pause", "topic=unpaused")
    topic_action(nsqd, "unpause", "topic=unpaused")
    channel_action(nsqd, "pause", "topic=unpaused&channel=unpaused")
    channel_action(nsqd, "unpause", "topic=unpaused&channel=unpaused")
    channel_action(nsqd, "pause", "topic=unpaused&channel=paused")
    topic_action(nsqd, "delete", "topic=deleted")
    channel_action(nsqd, "delete", "topic=plain&channel=deleted")
    topic_action(nsqd, "pause", "topic=paused")
    nsqd.kill()
    nsqd.start()
    return nsqd


def test_topics_stay(restarted: Nsqd):
    assert topic_names(restarted) == ["paused", "plain", "unpaused"]


def test_channels_stay(restarted: Nsqd):
    assert channel_names(restarted, "plain") == ["c"]


@pytest.mark.parametrize(("topic_name", "paused"), [("plain", False), ("paused", True), ("unpaused", False)])
def test_a_topic_stays_paused(restarted: Nsqd, topic_name: str, paused: bool):
    assert restarted.stats(topic_name)["paused"] is paused


@pytest.mark.parametrize(("channel", "paused"), [("paused", True), ("unpaused", False)])
def test_a_channel_stays_paused(restarted: Nsqd, channel: str, paused: bool):
    assert restarted.stats("unpaused", channel)["paused"] is paused
