"""SUB_ADVANCED over TCP: where a channel begins, and messages with their place (Youzan's TCP protocol)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
from tests.conformance.conftest import is_ours, quick_flags
from tests.conformance.protocol_helpers import consumer, fatal, identify
from tests.conformance.redesigned_helpers import LOCATION, create, mpub_to, placed, pub_to
from tests.integration.daemons import Connection, Daemons, Nsqd

pytestmark = pytest.mark.skipif(not is_ours("nsqd"), reason="NSQ has no SUB_ADVANCED")

NO_PLACES = ("timestamp", "timestamp:x", "timestamp:-5", "special:0", "special:-2", "offset:1", "msgcount:1:1", "0", "")
BODIES = [b"m%d" % number for number in range(1, 9)]


def advanced(topic: str, channel: str = "c", *words: object) -> bytes:
    return " ".join(["SUB_ADVANCED", topic, channel, *map(str, words)]).encode() + b"\n"


@contextlib.contextmanager
def subscribed(nsqd: Nsqd, command: bytes, rdy_count: int = 100) -> Iterator[Connection]:
    with nsqd.connect() as connection:
        connection.ok(command)
        connection.rdy(rdy_count)
        yield connection


def bodies(connection: Connection, count: int) -> list[bytes]:
    """Finish so many messages and return their bodies; after that there are no more."""
    messages = connection.messages(count)
    for message in messages:
        connection.finish(message)
    connection.nothing_comes()
    return [message.body[LOCATION.size :] for message in messages]


@pytest.fixture
def parted(nsqd: Nsqd, topic: str) -> str:
    """A topic with two partitions; partition 1 has eight messages and a channel that is at their end."""
    create(nsqd, topic, 2)
    nsqd.post(f"/channel/create?topic={topic}&channel=c")
    with nsqd.connect() as connection:
        connection.ok(mpub_to(topic, 1, BODIES))
    nsqd.post(f"/channel/empty?topic={topic}&channel=c")
    return topic


# -- what it does as SUB does ------------------------------------------------------------------------------------------


def test_messages_come_with_their_place_and_as_many_as_rdy_says(nsqd: Nsqd, parted: str):
    with nsqd.connect() as publisher:
        publisher.ok(mpub_to(parted, 1, [b"a" * 6, b"b", b"c" * 100]))
    with subscribed(nsqd, advanced(parted, "c", 1)) as connection:
        found = [placed(message, True) for message in connection.messages(3)]
    assert [(each.partition, each.sequence, each.body) for each in found] == [
        (1, 9, b"a" * 6),
        (1, 10, b"b"),
        (1, 11, b"c" * 100),
    ]
    assert [each.raw_size for each in found] == [40, 35, 134], "4 size, 4 type, 26 header, the body"
    assert 0 < found[0].offset < found[1].offset < found[2].offset


def test_offset_and_size_are_where_the_next_one_begins(nsqd: Nsqd, parted: str):
    start = "virtual_queue:0"
    for number in range(3):
        with subscribed(nsqd, advanced(parted, f"c{number}", 1, start)) as connection:
            found = placed(connection.message(), True)
        assert (found.partition, found.sequence) == (1, number + 1)
        start = f"virtual_queue:{found.offset + found.raw_size}"


def test_what_comes_again_has_its_place_too(nsqd: Nsqd, parted: str):
    with nsqd.connect() as publisher:
        publisher.ok(pub_to(parted, 1, b"x"))
    with subscribed(nsqd, advanced(parted, "c", 1)) as connection:
        first = connection.message()
        connection.send(b"REQ %s 0\n" % first.id)
        again = placed(connection.message(), True)
        assert again == placed(first, True)._replace(attempts=2)
        connection.send(b"REQ %s 30\n" % first.id)
        assert placed(connection.message(), True) == again._replace(attempts=3)


def test_without_a_partition_it_is_all_that_are_here(nsqd: Nsqd, parted: str):
    with nsqd.connect() as publisher:
        publisher.ok(pub_to(parted, 0, b"zero") + pub_to(parted, 1, b"one"), count=2)
    with subscribed(nsqd, advanced(parted)) as connection:
        assert sorted(placed(message, True)[::4] for message in connection.messages(2)) == [(0, b"zero"), (1, b"one")]


def test_consumers_with_and_without_places_share_a_channel(nsqd: Nsqd, parted: str):
    with subscribed(nsqd, advanced(parted, "c", 1), 1) as located, consumer(nsqd, parted) as plain:
        with nsqd.connect() as publisher:
            publisher.ok(mpub_to(parted, 1, [b"x", b"x"]))
        assert located.message().body[LOCATION.size :] == plain.message().body == b"x"


def test_a_plain_topic(nsqd: Nsqd, topic: str):
    nsqd.publish(topic, b"a", b"b")
    for words in ((), (0,), (0, "timestamp:0")):
        with subscribed(nsqd, advanced(topic, "c", *words)) as connection:
            messages = sorted(
                connection.messages(2), key=lambda message: message.id
            )  # what a lost connection held longest comes last
            assert [message.body[LOCATION.size :] for message in messages] == [b"a", b"b"]
            assert [message.id for message in messages] == [b"%016x" % number for number in (1, 2)], "ids as text"


def test_a_topic_that_is_not_there_yet(nsqd: Nsqd, topic: str):
    with subscribed(nsqd, advanced(topic)) as connection:
        nsqd.publish(topic, b"a")
        assert bodies(connection, 1) == [b"a"]


def test_it_may_be_sampled(nsqd: Nsqd, parted: str):
    with nsqd.connect() as publisher:
        publisher.ok(mpub_to(parted, 1, [b"x"] * 200))
    with nsqd.connect() as connection:
        connection.identify(sample_rate=20)
        connection.ok(advanced(parted, "c", 1))
        connection.rdy(1000)
        connection.messages(5)


# -- where it begins ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("timestamp:0", BODIES),
        ("timestamp:99999999999", []),
        ("virtual_queue:0", BODIES),
        ("virtual_queue:1", BODIES),
        ("virtual_queue:40", BODIES[1:]),
        ("msgcount:0", BODIES),
        ("msgcount:6", BODIES[5:]),
        ("msgcount:500", []),
        ("special:-1", []),
    ],
)
def test_the_first_consumer_says_where(nsqd: Nsqd, parted: str, start: str, expected: list[bytes]):
    with subscribed(nsqd, advanced(parted, "c", 1, start)) as connection:
        assert bodies(connection, len(expected)) == expected


def test_an_offset_is_that_of_the_messages(nsqd: Nsqd, parted: str):
    with subscribed(nsqd, advanced(parted, "c", 1, "msgcount:0")) as connection:
        offsets = [placed(message, True).offset for message in connection.messages(8)]
    for number, offset in enumerate(offsets):
        with subscribed(nsqd, advanced(parted, "c", 1, f"virtual_queue:{offset}")) as connection:
            assert bodies(connection, 8 - number) == BODIES[number:]


def test_a_timestamp_is_in_seconds(nsqd: Nsqd, parted: str):
    with nsqd.connect() as publisher:
        second = int(time.time()) + 1
        while time.time() < second:
            time.sleep(0.05)
        publisher.ok(pub_to(parted, 1, b"later"))
    with subscribed(nsqd, advanced(parted, "c", 1, f"timestamp:{second}")) as connection:
        assert bodies(connection, 1) == [b"later"]


def test_a_new_channel_begins_there(nsqd: Nsqd, parted: str):
    with subscribed(nsqd, advanced(parted, "new", 1, "msgcount:7")) as connection:
        assert bodies(connection, 2) == BODIES[6:]


def test_only_the_first_consumer_says_where(nsqd: Nsqd, parted: str):
    with (
        subscribed(nsqd, advanced(parted, "c", 1, "msgcount:8"), 0),
        subscribed(nsqd, advanced(parted, "c", 1, "msgcount:0")) as second,
    ):
        assert bodies(second, 1) == BODIES[7:]
    with subscribed(nsqd, advanced(parted, "c", 1, "msgcount:8")) as alone:
        assert bodies(alone, 1) == BODIES[7:], "with nobody there any more it is the first again"


def test_a_consumer_of_another_channel_or_partition_is_none_of_this_one(nsqd: Nsqd, parted: str):
    with (
        consumer(nsqd, parted, "other"),
        subscribed(nsqd, advanced(parted, "c", 0)),
        subscribed(nsqd, advanced(parted, "c", 1, "msgcount:8")) as connection,
    ):
        assert bodies(connection, 1) == BODIES[7:]


def test_a_consumer_without_a_start_goes_on_where_the_channel_is(nsqd: Nsqd, parted: str):
    with subscribed(nsqd, advanced(parted, "c", 1, "msgcount:6"), 1) as connection:
        connection.finish(connection.message())
        connection.send(b"CLS\n")
        while connection.frame().data != b"CLOSE_WAIT":
            pass
    with subscribed(nsqd, advanced(parted, "c", 1)) as connection:
        # what the first one held comes when nsqd has seen it go: before or behind what waits
        assert sorted(bodies(connection, 2)) == BODIES[6:]


def test_where_it_begins_survives_a_kill(shared_daemons: Daemons, topic: str):
    nsqd = shared_daemons.nsqd(*quick_flags())
    create(nsqd, topic, 1)
    nsqd.post(f"/channel/create?topic={topic}&channel=c")
    with nsqd.connect() as connection:
        connection.ok(mpub_to(topic, 0, BODIES))
    with subscribed(nsqd, advanced(topic, "c", 0, "msgcount:7"), 0):
        nsqd.kill()
    nsqd.start()
    with subscribed(nsqd, advanced(topic, "c", 0)) as connection:
        assert bodies(connection, 2) == BODIES[6:]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", NO_PLACES)
def test_a_start_that_is_none(nsqd: Nsqd, parted: str, start: str):
    expected = f"E_INVALID SUB_ADVANCED invalid consume offset:{start}"
    assert fatal(nsqd, advanced(parted, "new", 1, start)) == expected
    assert "new" not in {row["channel_name"] for row in nsqd.stats(parted)["channels"]}, "nothing was created"


@pytest.mark.parametrize("word", ["x", "-2", "1x", "timestamp:0"])
def test_a_partition_that_is_no_number(nsqd: Nsqd, parted: str, topic: str, word: str):
    for name in (parted, f"{topic}-plain"):
        assert fatal(nsqd, advanced(name, "c", word)) == "E_BAD_PARTITION SUB_ADVANCED partition is not a number"


def test_a_start_that_is_in_one_of_several_partitions(nsqd: Nsqd, parted: str, topic: str):
    """Which one is to be said; where there is one only, it need not be."""
    why = f"topic {parted} has 2: a place to begin at is in one of them"
    expected = f"E_BAD_PARTITION SUB_ADVANCED partition is missing, and {why}"
    assert fatal(nsqd, advanced(parted, "new", -1, "timestamp:0")) == expected
    assert "new" not in {row["channel_name"] for row in nsqd.stats(parted)["channels"]}, "nothing was created"
    nsqd.publish(f"{topic}-plain", b"a")
    with subscribed(nsqd, advanced(f"{topic}-plain", "c", -1, "timestamp:0")) as connection:
        assert bodies(connection, 1) == [b"a"]


def test_a_partition_that_is_not_here(nsqd: Nsqd, parted: str):
    expected = f"E_TOPIC_NOT_EXIST SUB_ADVANCED topic {parted} partition 7 is not on this nsqd"
    assert fatal(nsqd, advanced(parted, "c", 7, "timestamp:0")) == expected


def test_bad_commands(nsqd: Nsqd):
    assert fatal(nsqd, b"SUB_ADVANCED t\n") == "E_INVALID SUB_ADVANCED insufficient number of parameters"
    assert fatal(nsqd, b"SUB_ADVANCED $ c\n") == 'E_BAD_TOPIC SUB_ADVANCED topic name "$" is not valid'
    assert fatal(nsqd, b"SUB_ADVANCED t $\n") == 'E_BAD_CHANNEL SUB_ADVANCED channel name "$" is not valid'
    with_heartbeats_off = identify(heartbeat_interval=-1) + b"SUB_ADVANCED t c\n"
    with nsqd.connect() as connection:
        connection.send(with_heartbeats_off)
        assert connection.response() == b"OK"
        assert connection.error() == "E_INVALID cannot SUB_ADVANCED with heartbeats disabled"


def test_an_ordered_topic_cannot_be_consumed_so(nsqd: Nsqd, topic: str):
    create(nsqd, topic, 2, orderedmulti="true")
    expected = f"E_SUB_ORDER_IS_MUST SUB_ADVANCED topic {topic} channel c can only be consumed with SUB_ORDER"
    assert fatal(nsqd, advanced(topic, "c", 0, "special:-1")) == expected


def test_not_twice(nsqd: Nsqd, parted: str):
    with subscribed(nsqd, advanced(parted, "c", 0)) as connection:
        assert connection.error(advanced(parted, "c", 0)) == "E_INVALID cannot SUB_ADVANCED in current state"
