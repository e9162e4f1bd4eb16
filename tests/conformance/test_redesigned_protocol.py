"""Partitions and order over TCP: PUB, MPUB, DPUB, SUB, SUB_ORDER with a partition (Youzan's TCP protocol)."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable

import pytest
from tests.conformance.conftest import is_ours
from tests.conformance.protocol_helpers import clients, consumer, counts, fatal, goes_on, topics, wait_for_counts
from tests.conformance.redesigned_helpers import (
    consumer_of_all,
    create,
    dpub_to,
    in_order,
    mpub_to,
    placed,
    pub_to,
    sub_to,
)
from tests.integration.daemons import ERROR, Connection, Daemons, Nsqd, dpub, fin, mpub, pub, req, touch, wait_until

pytestmark = pytest.mark.skipif(not is_ours("nsqd"), reason="NSQ has no partitions")

TO_A_PARTITION: dict[str, Callable[[str, object], bytes]] = {
    "PUB": lambda topic, partition: pub_to(topic, partition, b"x"),
    "MPUB": lambda topic, partition: mpub_to(topic, partition, [b"x"]),
    "DPUB": lambda topic, partition: dpub_to(topic, partition, 0, b"x"),
}
TO_NO_PARTITION: dict[str, Callable[[str], bytes]] = {
    "PUB": lambda topic: pub(topic, b"x"),
    "MPUB": lambda topic: mpub(topic, [b"x"]),
    "DPUB": lambda topic: dpub(topic, 0, b"x"),
}
ORDER_COMMANDS = ("SUB_ORDER", "SUB_ORDERED")


@pytest.fixture
def parted(nsqd: Nsqd, topic: str) -> str:
    """A topic with partitions 0 to 2, all of them here."""
    return create(nsqd, topic, 3)


@pytest.fixture
def ordered(nsqd: Nsqd, topic: str) -> str:
    """An ordered topic with partitions 0 and 1."""
    return create(nsqd, topic, 2, orderedmulti="true")


def depths(nsqd: Nsqd, topic: str) -> list[int]:
    """Messages published to each partition."""
    return [row["message_count"] for row in nsqd.stats(topic)["partitions"]]


# -- publishing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", TO_A_PARTITION)
def test_publish_to_a_partition(nsqd: Nsqd, connection: Connection, parted: str, command: str):
    connection.ok(TO_A_PARTITION[command](parted, 1))
    assert depths(nsqd, parted) == [0, 1, 0]


@pytest.mark.parametrize("command", TO_NO_PARTITION)
def test_publish_without_a_partition_goes_round(nsqd: Nsqd, connection: Connection, parted: str, command: str):
    for _ in range(6):
        connection.ok(TO_NO_PARTITION[command](parted))
    assert depths(nsqd, parted) == [2, 2, 2]


@pytest.mark.parametrize("command", ["MPUB", "DPUB"])
def test_publishes_go_round_behind_one_to_a_partition(nsqd: Nsqd, connection: Connection, parted: str, command: str):
    connection.ok(TO_NO_PARTITION["PUB"](parted))
    connection.ok(TO_A_PARTITION[command](parted, 1))
    before = depths(nsqd, parted)
    for _ in range(6):
        connection.ok(TO_NO_PARTITION["PUB"](parted))
    assert [after - first for after, first in zip(depths(nsqd, parted), before, strict=True)] == [2, 2, 2]


def test_publishes_of_one_read_go_where_each_says(nsqd: Nsqd, connection: Connection, parted: str):
    connection.ok(b"".join(pub_to(parted, number, b"x") for number in (0, 0, 2, 1, 2, 2)), count=6)
    assert depths(nsqd, parted) == [2, 1, 3]


def test_publishes_one_by_one_go_where_each_says(nsqd: Nsqd, connection: Connection, parted: str):
    for number in (0, 0, 2, 1, 2, 2, 1, 1):
        connection.ok(pub_to(parted, number, b"x"))
    assert depths(nsqd, parted) == [2, 3, 3]


@pytest.mark.parametrize("command", TO_A_PARTITION)
@pytest.mark.parametrize("partition", [3, 1023])
def test_a_partition_that_is_not_here_is_fatal(nsqd: Nsqd, parted: str, command: str, partition: int):
    expected = f"E_TOPIC_NOT_EXIST {command} topic {parted} partition {partition} is not on this nsqd"
    assert fatal(nsqd, TO_A_PARTITION[command](parted, partition)) == expected


@pytest.mark.parametrize("command", TO_A_PARTITION)
def test_a_partition_of_an_unknown_topic_is_fatal_and_creates_nothing(nsqd: Nsqd, topic: str, command: str):
    assert fatal(nsqd, TO_A_PARTITION[command](topic, 0)).startswith("E_TOPIC_NOT_EXIST ")
    assert topic not in topics(nsqd)


@pytest.mark.parametrize("command", TO_A_PARTITION)
@pytest.mark.parametrize("word", ["x", "-2", "1024", "1.5", "", "99999999999999999999"])
def test_a_partition_that_is_no_number_is_fatal(nsqd: Nsqd, parted: str, command: str, word: str):
    expected = f"E_BAD_PARTITION {command} partition is not a number"
    assert fatal(nsqd, TO_A_PARTITION[command](parted, word)) == expected


@pytest.mark.parametrize("command", TO_NO_PARTITION)
def test_an_ordered_topic_wants_a_partition(nsqd: Nsqd, ordered: str, command: str):
    expected = f"E_BAD_PARTITION {command} partition is missing, and topic {ordered} needs it"
    assert fatal(nsqd, TO_NO_PARTITION[command](ordered)) == expected
    assert fatal(nsqd, TO_A_PARTITION[command](ordered, -1)) == expected


@pytest.mark.parametrize("command", TO_NO_PARTITION)
def test_a_multipart_topic_takes_them_without_a_partition_or_with_minus_1(
    nsqd: Nsqd, connection: Connection, topic: str, command: str
):
    """They go to the first partition that is here."""
    create(nsqd, topic, 4, multipart="true", partitions="1,3")
    connection.ok(TO_NO_PARTITION[command](topic) + TO_A_PARTITION[command](topic, -1), count=2)
    connection.ok(TO_NO_PARTITION[command](topic))
    assert depths(nsqd, topic) == [3, 0]


@pytest.mark.parametrize("command", TO_NO_PARTITION)
def test_minus_1_is_no_partition(nsqd: Nsqd, connection: Connection, parted: str, topic: str, command: str):
    connection.ok(TO_A_PARTITION[command](parted, -1) * 3, count=3)
    assert sum(depths(nsqd, parted)) == 3
    connection.ok(TO_A_PARTITION[command](f"plain-{topic}", -1))
    with consumer(nsqd, parted, rdy_count=3) as waiting:
        assert len(waiting.messages(3)) == 3


def test_minus_1_consumes_all_partitions(nsqd: Nsqd, connection: Connection, parted: str):
    for number in range(3):
        connection.ok(pub_to(parted, number, b"x"))
    with nsqd.connect() as waiting:
        waiting.ok(sub_to(parted, "c", -1))
        waiting.rdy(3)
        assert sorted(placed(message).partition for message in waiting.messages(3)) == [0, 1, 2]


@pytest.mark.parametrize("command", TO_A_PARTITION)
def test_a_plain_topic_has_partition_0(nsqd: Nsqd, connection: Connection, topic: str, command: str):
    connection.ok(pub(topic, b"x") + TO_A_PARTITION[command](topic, 0), count=2)
    assert nsqd.stats(topic)["message_count"] == 2


@pytest.mark.parametrize("command", TO_A_PARTITION)
def test_a_plain_topic_has_no_other_partition(nsqd: Nsqd, topic: str, command: str):
    nsqd.publish(topic, b"x")
    assert fatal(nsqd, TO_A_PARTITION[command](topic, 1)).startswith("E_TOPIC_NOT_EXIST ")


@pytest.mark.parametrize("command", TO_A_PARTITION)
def test_a_word_that_is_no_number_is_ignored_on_a_plain_topic(connection: Connection, topic: str, command: str):
    """As NSQ ignores whatever stands there."""
    connection.ok(TO_A_PARTITION[command](topic, "word"))


def test_a_delayed_publish_to_a_partition(nsqd: Nsqd, connection: Connection, parted: str):
    with consumer_of_all(nsqd, parted) as waiting:
        begun = time.monotonic()
        connection.ok(dpub_to(parted, 2, 200, b"later"))
        assert placed(waiting.message())[:2] == (2, 1)
        assert time.monotonic() - begun >= 0.19


# -- ids ---------------------------------------------------------------------------------------------------------------


def test_an_id_is_partition_and_sequence_and_a_trace_id(nsqd: Nsqd, connection: Connection, parted: str):
    connection.ok(mpub_to(parted, 2, [b"a", b"b"]))
    with consumer_of_all(nsqd, parted, rdy_count=10) as waiting:
        assert [placed(each)[:5] for each in waiting.messages(2)] == [(2, 1, 0, 1, b"a"), (2, 2, 0, 1, b"b")]


def test_the_id_of_a_plain_topic_is_text_also_from_partition_0(nsqd: Nsqd, connection: Connection, topic: str):
    connection.ok(pub(topic, b"x"))
    connection.ok(sub_to(topic, "c", 0))
    connection.rdy(1)
    assert set(connection.message().id) <= set(b"0123456789abcdef")


def test_ids_may_hold_line_ends_and_spaces(nsqd: Nsqd, topic: str):
    """Internal id 10 ends with a line end, 13 with the other half of one, 32 with a space."""
    create(nsqd, topic, 1)
    nsqd.publish(topic, *[b"%d" % number for number in range(1, 41)])
    with consumer_of_all(nsqd, topic, rdy_count=100) as connection:
        messages = connection.messages(40)
        connection.send(b"".join(touch(message.id) for message in messages))
        connection.send(b"".join(req(message.id, 0) for message in messages))
        again = connection.messages(40)
        assert sorted(message.body for message in again) == sorted(message.body for message in messages)
        assert {message.attempts for message in again} == {2}
        for message in again:
            connection.send(fin(message.id))
        goes_on(connection)
    assert counts(nsqd, topic) == (0, 0, 0)


def test_ids_are_text_for_who_subscribes_as_with_nsq(nsqd: Nsqd, connection: Connection, parted: str):
    """Clients of NSQ that take them for text go on behind the first 128 messages of a partition."""
    for number in range(3):
        connection.ok(mpub_to(parted, number, [b"%d" % number] * 200))
    with consumer(nsqd, parted, rdy_count=600) as waiting:
        messages = waiting.messages(600)
        ids = {message.id: message.body for message in messages}
        assert len(ids) == 600
        assert all(int(each, 16) >> 50 == int(body) for each, body in ids.items())
        waiting.send(b"".join(touch(message.id) for message in messages))
        waiting.send(b"".join(req(message.id, 0) for message in messages[:200:2]))
        again = waiting.messages(100)
        assert {message.id for message in again} == {message.id for message in messages[:200:2]}
        assert {message.attempts for message in again} == {2}
        waiting.send(b"".join(fin(each) for each in ids))
        goes_on(waiting)
    wait_for_counts(nsqd, parted, (0, 0, 0))


@pytest.mark.parametrize("command", ["FIN", "REQ", "TOUCH"])
def test_an_id_of_who_subscribes_as_with_nsq_that_is_not_in_flight(nsqd: Nsqd, parted: str, command: str):
    unknown = b"%016x" % 5
    line = {"FIN": fin(unknown), "REQ": req(unknown, 0), "TOUCH": touch(unknown)}[command]
    with consumer(nsqd, parted) as waiting:
        assert waiting.error(line) == f"E_{command}_FAILED {command} {unknown.decode()} failed ID not in flight"
        goes_on(waiting)


@pytest.mark.parametrize("pieces", [1, 5, 21, 64])
def test_ids_may_come_in_pieces(nsqd: Nsqd, topic: str, pieces: int):
    create(nsqd, topic, 1)
    nsqd.publish(topic, *[b"x"] * 15)
    with consumer_of_all(nsqd, topic, rdy_count=100) as connection:
        data = b"".join(fin(message.id) for message in connection.messages(15))
        for start in range(0, len(data), pieces):
            connection.send(data[start : start + pieces])
        goes_on(connection)
    assert counts(nsqd, topic) == (0, 0, 0)


@pytest.mark.parametrize("command", ["FIN", "REQ", "TOUCH"])
def test_an_id_that_is_not_in_flight(nsqd: Nsqd, parted: str, command: str):
    line = {"FIN": fin(bytes(16)), "REQ": req(bytes(16), 0), "TOUCH": touch(bytes(16))}[command]
    with consumer_of_all(nsqd, parted) as connection:
        expected = f"E_{command}_FAILED {command} {bytes(16).hex()} failed ID not in flight"
        assert connection.error(line) == expected
        goes_on(connection)


def test_an_id_that_is_too_long(nsqd: Nsqd, parted: str):
    with consumer(nsqd, parted) as connection:
        assert connection.error(b"FIN " + bytes(17) + b"\n") == "E_INVALID invalid message ID"
        assert connection.wait_closed() == []


def test_a_message_of_another_consumer(nsqd: Nsqd, connection: Connection, parted: str):
    connection.ok(pub_to(parted, 0, b"x"))
    with consumer(nsqd, parted) as first, consumer(nsqd, parted) as second:
        message = first.message()
        assert second.error(fin(message.id)).endswith("failed client does not own message")


# -- consuming ---------------------------------------------------------------------------------------------------------


def test_one_partition(nsqd: Nsqd, connection: Connection, parted: str):
    for number in range(3):
        connection.ok(pub_to(parted, number, b"%d" % number))
    with nsqd.connect() as waiting:
        waiting.ok(sub_to(parted, "c", 1))
        waiting.rdy(10)
        assert waiting.message().body == b"1"
        waiting.nothing_comes()


def test_without_a_partition_it_is_all_that_are_here(nsqd: Nsqd, connection: Connection, parted: str):
    for number in range(3):
        connection.ok(mpub_to(parted, number, [b"%d" % number] * 2))
    with consumer(nsqd, parted, rdy_count=10) as waiting:
        messages = waiting.messages(6)
        assert sorted(message.body for message in messages) == [b"0", b"0", b"1", b"1", b"2", b"2"]
        waiting.finish(*messages)
        goes_on(waiting)
        (row,) = clients(nsqd, parted)
        assert (row["message_count"], row["finish_count"], row["ready_count"]) == (6, 6, 10)
    assert counts(nsqd, parted) == (0, 0, 0)


@pytest.mark.parametrize("rdy_count", [1, 2, 4])
def test_rdy_bounds_all_partitions_together(nsqd: Nsqd, connection: Connection, parted: str, rdy_count: int):
    for number in range(3):
        connection.ok(mpub_to(parted, number, [b"%d" % number] * 4))
    with consumer(nsqd, parted, rdy_count=rdy_count) as waiting:
        seen = []
        for _ in range(12 // rdy_count):
            messages = waiting.messages(rdy_count)
            waiting.nothing_comes()
            seen += [message.body for message in messages]
            waiting.finish(*messages)
        assert sorted(seen) == sorted([b"0", b"1", b"2"] * 4)


def test_what_a_lost_consumer_of_all_held_comes_again(nsqd: Nsqd, connection: Connection, parted: str):
    for number in range(3):
        connection.ok(pub_to(parted, number, b"%d" % number))
    with consumer(nsqd, parted, rdy_count=10) as waiting:
        waiting.messages(3)
    with consumer(nsqd, parted, rdy_count=10) as waiting:
        assert sorted((message.body, message.attempts) for message in waiting.messages(3)) == [
            (b"0", 2),
            (b"1", 2),
            (b"2", 2),
        ]


def test_consumers_of_all_and_of_one_share(nsqd: Nsqd, connection: Connection, parted: str):
    with consumer_of_all(nsqd, parted, rdy_count=100) as everything, nsqd.connect() as one:
        one.ok(sub_to(parted, "c", 1))
        one.rdy(100)
        connection.ok(mpub_to(parted, 1, [b"x"] * 40))
        wait_for_counts(nsqd, parted, (0, 40, 0))
        given = [row["message_count"] for row in clients(nsqd, parted)]
        assert sum(given) == 40
        assert min(given) >= 10
        assert {placed(everything.message()).partition, placed(one.message()).partition} == {1}


def test_an_ephemeral_channel_goes_with_its_last_consumer(nsqd: Nsqd, parted: str):
    with consumer(nsqd, parted, "c#ephemeral"), nsqd.connect() as one:
        one.ok(sub_to(parted, "c#ephemeral", 1))
    wait_until(lambda: nsqd.stats(parted)["channels"] == [], "the channel to go")


@pytest.mark.parametrize("partition", [3, 1023])
def test_subscribing_to_a_partition_that_is_not_here_is_fatal(nsqd: Nsqd, parted: str, partition: int):
    assert fatal(nsqd, sub_to(parted, "c", partition)).startswith("E_TOPIC_NOT_EXIST SUB ")


def test_subscribing_to_a_partition_of_an_unknown_topic_is_fatal_and_creates_nothing(nsqd: Nsqd, topic: str):
    assert fatal(nsqd, sub_to(topic, "c", 0)).startswith("E_TOPIC_NOT_EXIST SUB ")
    assert topic not in topics(nsqd)


def test_subscribing_to_no_number_is_fatal(nsqd: Nsqd, parted: str):
    assert fatal(nsqd, sub_to(parted, "c", "x")) == "E_BAD_PARTITION SUB partition is not a number"


def test_channels_that_have_to_be_created_before(nsqd: Nsqd, topic: str):
    create(nsqd, topic, 2, disable_channel_auto_create="true")
    for command in (b"SUB %s c\n" % topic.encode(), sub_to(topic, "c", 1)):
        assert fatal(nsqd, command).startswith("E_SUB_CHANNEL_NOT_REGISTERED SUB ")
    nsqd.post(f"/channel/create?topic={topic}&channel=c")
    with consumer(nsqd, topic) as connection:
        goes_on(connection)


# -- in order ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ORDER_COMMANDS)
def test_under_both_names(nsqd: Nsqd, connection: Connection, ordered: str, command: str):
    connection.ok(pub_to(ordered, 1, b"x"))
    with nsqd.connect() as waiting:
        waiting.ok(sub_to(ordered, "c", 1, command))
        waiting.rdy(1)
        assert placed(waiting.message(), True)[:5] == (1, 1, 0, 1, b"x")


def test_offset_and_size_stand_before_the_body(nsqd: Nsqd, connection: Connection, ordered: str):
    connection.ok(mpub_to(ordered, 0, [b"a" * 6, b"b", b"c" * 100]))
    connection.ok(pub_to(ordered, 0, b"d"))
    with in_order(nsqd, ordered) as waiting:
        found = []
        for _ in range(4):
            message = waiting.message()
            found.append(placed(message, True))
            waiting.finish(message)
    assert [each.body for each in found] == [b"a" * 6, b"b", b"c" * 100, b"d"]
    assert [each.raw_size for each in found] == [40, 35, 134, 35], "4 size, 4 type, 26 header, the body"
    assert found[0].offset == 0
    assert all(earlier.offset + earlier.raw_size == later.offset for earlier, later in itertools.pairwise(found))


def test_one_at_a_time_whatever_rdy_says(nsqd: Nsqd, connection: Connection, ordered: str):
    connection.ok(mpub_to(ordered, 0, [b"a", b"b"]))
    with in_order(nsqd, ordered, rdy_count=100) as waiting:
        first = waiting.message()
        waiting.nothing_comes()
        waiting.finish(first)
        assert placed(waiting.message(), True).body == b"b"


def test_one_at_a_time_over_all_consumers(nsqd: Nsqd, connection: Connection, ordered: str):
    connection.ok(mpub_to(ordered, 0, [b"a", b"b"]))
    with in_order(nsqd, ordered) as first, in_order(nsqd, ordered) as second:
        message = first.message()
        second.nothing_comes()
        first.finish(message)
        assert placed(second.message(), True).body == b"b"


def test_channels_and_partitions_do_not_wait_for_each_other(nsqd: Nsqd, connection: Connection, ordered: str):
    with contextlib.ExitStack() as stack:
        waiting = [
            (number, stack.enter_context(in_order(nsqd, ordered, number, channel)))
            for channel, number in (("c", 0), ("c", 1), ("d", 0))
        ]
        for number in (0, 1):
            connection.ok(pub_to(ordered, number, b"x"))
        for number, each in waiting:
            assert placed(each.message(), True).partition == number


def test_nothing_before_the_first_rdy(nsqd: Nsqd, connection: Connection, ordered: str):
    connection.ok(pub_to(ordered, 0, b"x"))
    with in_order(nsqd, ordered, rdy_count=0) as waiting:
        waiting.nothing_comes()
        waiting.rdy(1)
        waiting.message()


def test_rdy_0_pauses(nsqd: Nsqd, connection: Connection, ordered: str):
    connection.ok(mpub_to(ordered, 0, [b"a", b"b"]))
    with in_order(nsqd, ordered) as waiting:
        message = waiting.message()
        waiting.rdy(0)
        waiting.finish(message)
        waiting.nothing_comes()
        waiting.rdy(1)
        assert placed(waiting.message(), True).body == b"b"


def test_requeued_at_once_it_is_the_next(nsqd: Nsqd, connection: Connection, ordered: str):
    connection.ok(mpub_to(ordered, 0, [b"a", b"b"]))
    with in_order(nsqd, ordered) as waiting:
        for attempts in (1, 2, 3):
            message = waiting.message()
            assert placed(message, True)[3:5] == (attempts, b"a")
            waiting.send(req(message.id, 0))


def test_requeued_with_a_delay_it_is_the_next_when_it_is_due(nsqd: Nsqd, connection: Connection, ordered: str):
    """Youzan's nsqd ignores the delay: the message comes back when it times out."""
    connection.ok(mpub_to(ordered, 0, [b"a", b"b"]))
    with in_order(nsqd, ordered) as waiting:
        message = waiting.message()
        begun = time.monotonic()
        waiting.send(req(message.id, 200))
        assert placed(waiting.message(), True)[3:5] == (2, b"a")
        assert time.monotonic() - begun >= 0.2


def test_timed_out_it_is_the_next(nsqd: Nsqd, connection: Connection, ordered: str):
    connection.ok(mpub_to(ordered, 0, [b"a", b"b"]))
    with nsqd.connect() as waiting:
        waiting.identify(msg_timeout=1000)
        waiting.ok(sub_to(ordered, "c", 0, "SUB_ORDER"))
        waiting.rdy(1)
        waiting.message()
        assert placed(waiting.message(), True)[3:5] == (2, b"a")


def test_of_a_lost_connection_it_is_the_next(nsqd: Nsqd, connection: Connection, ordered: str):
    connection.ok(mpub_to(ordered, 0, [b"a", b"b"]))
    with in_order(nsqd, ordered) as waiting:
        waiting.message()
    with in_order(nsqd, ordered) as waiting:
        assert placed(waiting.message(), True)[3:5] == (2, b"a")


def test_a_delayed_publish_waits_at_its_place(nsqd: Nsqd, connection: Connection, ordered: str):
    connection.ok(dpub_to(ordered, 0, 200, b"a") + pub_to(ordered, 0, b"b"), count=2)
    with in_order(nsqd, ordered) as waiting:
        bodies = []
        for _ in range(2):
            message = waiting.message()
            bodies.append(placed(message, True).body)
            waiting.finish(message)
    assert bodies == [b"a", b"b"]


@pytest.mark.parametrize("line", ["SUB %s c\n", "SUB %s c 1\n"])
def test_an_ordered_topic_cannot_be_consumed_otherwise(nsqd: Nsqd, ordered: str, line: str):
    expected = f"E_SUB_ORDER_IS_MUST SUB topic {ordered} channel c can only be consumed with SUB_ORDER"
    assert fatal(nsqd, (line % ordered).encode()) == expected


@pytest.mark.parametrize("words", ["", " -1"])
@pytest.mark.parametrize("command", ORDER_COMMANDS)
def test_order_without_a_partition_is_the_first_that_is_here(
    nsqd: Nsqd, connection: Connection, topic: str, command: str, words: str
):
    create(nsqd, topic, 4, orderedmulti="true", partitions="1,3")
    connection.ok(pub_to(topic, 3, b"third") + mpub_to(topic, 1, [b"a", b"b"]), count=2)
    with nsqd.connect() as waiting:
        waiting.ok(f"{command} {topic} c{words}\n".encode())
        waiting.rdy(5)
        for body in (b"a", b"b"):
            message = waiting.message()
            found = placed(message, True)
            assert (found.partition, found.body) == (1, body)
            waiting.finish(message)
        waiting.nothing_comes()


@pytest.mark.parametrize("command", ORDER_COMMANDS)
def test_order_of_an_unknown_topic_creates_nothing(nsqd: Nsqd, topic: str, command: str):
    expected = f"E_TOPIC_NOT_EXIST {command} topic {topic} is not on this nsqd"
    assert fatal(nsqd, f"{command} {topic} c\n".encode()) == expected
    assert topic not in topics(nsqd)


@pytest.mark.parametrize("command", ORDER_COMMANDS)
def test_bad_partitions_of_order(nsqd: Nsqd, ordered: str, command: str):
    assert fatal(nsqd, sub_to(ordered, "c", "x", command)) == f"E_BAD_PARTITION {command} partition is not a number"
    assert fatal(nsqd, sub_to(ordered, "c", 7, command)).startswith(f"E_TOPIC_NOT_EXIST {command} ")


@pytest.mark.parametrize("command", ORDER_COMMANDS)
def test_bad_order_commands(nsqd: Nsqd, command: str):
    name = command.encode()
    start = f"E_INVALID {command} takes no place to begin at, which is timestamp:0: SUB_ADVANCED does"
    assert fatal(nsqd, name + b" t c 0 timestamp:0\n") == start
    assert fatal(nsqd, name + b" t\n") == f"E_INVALID {command} insufficient number of parameters"
    assert fatal(nsqd, name + b" $ c 0\n") == f'E_BAD_TOPIC {command} topic name "$" is not valid'
    assert fatal(nsqd, name + b" t $ 0\n") == f'E_BAD_CHANNEL {command} channel name "$" is not valid'


def test_order_cannot_be_sampled(nsqd: Nsqd, ordered: str):
    with nsqd.connect() as waiting:
        waiting.identify(sample_rate=50)
        assert waiting.error(sub_to(ordered, "c", 0, "SUB_ORDER")) == "E_INVALID SUB_ORDER cannot be sampled"
        assert waiting.wait_closed() == []


def test_a_stray_order_command_closes_a_channel_to_nobody(nsqd: Nsqd, connection: Connection, parted: str):
    """Of a topic that need not be consumed in order: when only a plain consumer is there, all flows again."""
    with in_order(nsqd, parted):
        pass
    connection.ok(mpub_to(parted, 0, [b"a", b"b", b"c"]))
    with consumer(nsqd, parted, rdy_count=5) as waiting:
        assert [placed(message).body for message in waiting.messages(3)] == [b"a", b"b", b"c"]


def test_a_plain_consumer_beside_one_in_order(nsqd: Nsqd, connection: Connection, parted: str):
    """It is taken, and shares the one message at a time, until nobody is left who asked for order."""
    connection.ok(mpub_to(parted, 0, [b"a", b"b", b"c"]))
    with in_order(nsqd, parted, rdy_count=0) as strict, consumer(nsqd, parted, rdy_count=5) as plain:
        first = plain.message()
        plain.nothing_comes()
        plain.finish(first)
        assert placed(plain.message()).body == b"b"
        plain.nothing_comes()
        strict.close()
        assert placed(plain.message()).body == b"c"


def test_what_an_operator_made_ordered_is_only_consumed_so(nsqd: Nsqd, parted: str):
    nsqd.post(f"/channel/create?topic={parted}&channel=c")
    for made_first in (False, True):
        with in_order(nsqd, parted) if made_first else contextlib.nullcontext():
            nsqd.post(f"/channel/setorder?topic={parted}&channel=c&order=true")
        assert fatal(nsqd, b"SUB %s c\n" % parted.encode()).startswith("E_SUB_ORDER_IS_MUST ")
        with in_order(nsqd, parted):
            pass
        assert fatal(nsqd, b"SUB %s c\n" % parted.encode()).startswith("E_SUB_ORDER_IS_MUST ")
        with consumer(nsqd, parted, "other"):
            pass
        nsqd.post(f"/channel/setorder?topic={parted}&channel=c&order=false")
        with consumer(nsqd, parted) as connection:
            goes_on(connection)


def test_a_plain_topic_in_order(nsqd: Nsqd, topic: str):
    nsqd.publish(topic, b"a", b"b")
    with in_order(nsqd, topic) as waiting:
        message = waiting.message()
        assert message.body[12:] == b"a"
        waiting.nothing_comes()
        waiting.finish(message)
        assert waiting.message().body[12:] == b"b"


def test_a_closing_consumer_may_finish_and_gets_no_more(nsqd: Nsqd, connection: Connection, ordered: str):
    connection.ok(mpub_to(ordered, 0, [b"a", b"b"]))
    with in_order(nsqd, ordered) as waiting:
        message = waiting.message()
        waiting.send(b"CLS\n")
        assert waiting.response() == b"CLOSE_WAIT"
        waiting.finish(message)
        waiting.nothing_comes()
    with in_order(nsqd, ordered) as waiting:
        assert placed(waiting.message(), True).body == b"b"


# -- what fails is told ------------------------------------------------------------------------------------------------


def test_a_partition_that_takes_no_messages_does_not_end_the_connection(shared_daemons: Daemons, topic: str):
    """The log that cannot be written is one partition's; the others go on over the same connection."""
    nsqd = shared_daemons.nsqd("--durability=os", "--max-bytes-per-file=10485760")
    create(nsqd, topic, 2)
    directory = nsqd.data_path / "topics" / f"t-{topic}" / "p-0000"
    with nsqd.connect() as connection:
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
        # the open segment is still there for the kernel; filling it makes nsqd begin another one, which it cannot
        connection.ok(pub_to(topic, 1, b"x"))
        frames = set()
        for _ in range(20):
            connection.send(pub_to(topic, 0, bytes(1024 * 1024)))
            kind, data = connection.frame()
            frames.add(data.split(b" ")[0] if kind == ERROR else data)
            if b"E_FAILED_ON_NOT_WRITABLE" in frames:
                break
        assert frames == {b"OK", b"E_PUB_FAILED", b"E_FAILED_ON_NOT_WRITABLE"}
        connection.ok(pub_to(topic, 1, b"x"))


# -- INTERNAL_CREATE_TOPIC ---------------------------------------------------------------------------------------------


def test_internal_create_topic_makes_one_partition_after_the_other(nsqd: Nsqd, topic: str):
    name = topic.encode()
    with nsqd.connect() as connection:
        for number in (0, 2, 1, 2):
            connection.ok(b"INTERNAL_CREATE_TOPIC %s %d false\n" % (name, number))
        for number in range(3):
            connection.ok(pub_to(topic, number, b"%d" % number))
    if is_ours("nsqd"):
        found = nsqd.get(f"/stats?format=json&topic={topic}")["topics"]
        assert [each["message_count"] for each in found] == [3]
    nsqd.restart()
    with nsqd.connect() as connection:
        connection.ok(pub_to(topic, 2, b"again"))
    assert fatal(nsqd, pub_to(topic, 3, b"x")).startswith("E_TOPIC_NOT_EXIST")


def test_internal_create_topic_makes_room_for_headers(nsqd: Nsqd, topic: str):
    with nsqd.connect() as connection:
        connection.ok(b"INTERNAL_CREATE_TOPIC %s 0 true\n" % topic.encode())
        connection.send(b"PUB_EXT %s 0\n\0\0\0\x0b\0\x08" % topic.encode() + b'{"a":"b"}'[:8] + b"x")
        assert connection.error().startswith("E_INVALID_JSON_HEADER")  # headers are read, and these are cut


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("NAME", "E_INVALID"),
        ("b@d 0", "E_BAD_TOPIC"),
        ("NAME x", "E_BAD_PARTITION"),
        ("NAME -1", "E_BAD_PARTITION"),
        ("NAME 0 maybe", "E_BAD_EXT"),
    ],
)
def test_internal_create_topic_with_words_that_cannot_be(nsqd: Nsqd, topic: str, words: str, code: str):
    command = f"INTERNAL_CREATE_TOPIC {words.replace('NAME', topic)}\n".encode()
    assert fatal(nsqd, command).startswith(f"{code} ")
    assert topics(nsqd).isdisjoint({topic})


def test_internal_create_topic_leaves_a_plain_topic_as_it_is(nsqd: Nsqd, topic: str):
    with nsqd.connect() as connection:
        connection.ok(pub(topic, b"x"))
        connection.ok(b"INTERNAL_CREATE_TOPIC %s 0\n" % topic.encode())
        if is_ours("nsqd"):
            assert connection.error(b"INTERNAL_CREATE_TOPIC %s 1\n" % topic.encode()).startswith(
                "E_CREATE_TOPIC_FAILED"
            )
        connection.ok(pub(topic, b"y"))
