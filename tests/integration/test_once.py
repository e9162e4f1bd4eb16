"""PUB_ONCE and MPUB_ONCE of a real nsqd: what is sent again is stored once, also over kill -9; the same over HTTP."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

import pytest
from tests.integration.auth_server import SECRET, AuthServer
from tests.integration.daemons import PATIENCE_S, Daemons, Nsqd, sized, wait_until
from tests.unit.wire.built import mpub_once, pub_once

from flintmq.batch import decode_batch, decode_header
from flintmq.errors import LocalProtocolError
from flintmq.message import FRAME_OVERHEAD_BYTES
from flintmq.wire.commands import COMMANDS, fetch, offsets, producers, publish


@pytest.fixture(scope="module")
def nsqd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nsqd]:
    daemons = Daemons(tmp_path_factory.mktemp("once"))
    try:
        yield daemons.nsqd("--max-bytes-per-file=65536")
    finally:
        daemons.close()


def once(topic: str, producer: str, first: int, count: int = 1) -> bytes:
    """``count`` PUB_ONCE in a row."""
    return b"".join(
        pub_once(topic, None, producer, n, b"%s %d" % (producer.encode(), n)) for n in range(first, first + count)
    )


def several(topic: str, producer: str, first: int, count: int) -> bytes:
    return mpub_once(
        topic, None, producer, first, [b"%s %d" % (producer.encode(), n) for n in range(first, first + count)]
    )


def stored(nsqd: Nsqd, topic: str) -> list[bytes]:
    """Every message in the log of a topic, in its order."""
    found: list[bytes] = []
    with nsqd.connect() as connection:
        connection.send(offsets(topic))
        for row in json.loads(connection.response())["partitions"]:
            start = row["start"]
            while start < row["end"]:
                connection.send(fetch(topic, row["partition"], start, row["end"], 1 << 20))
                answer = connection.response()
                (start,) = struct.unpack_from(">Q", answer)
                found += bodies_of(answer[8:])
    return found


def bodies_of(batches: bytes) -> list[bytes]:
    found: list[bytes] = []
    while batches:
        header = decode_header(batches)
        batch = decode_batch(batches[: header.size])
        frames = [batch.frames(n, n + 1) for n in range(batch.first, batch.end)]
        found += [bytes(frame[FRAME_OVERHEAD_BYTES:]) for frame in frames]
        batches = batches[header.size :]
    return found


def numbers(producer: str, first: int, count: int) -> list[bytes]:
    return [b"%s %d" % (producer.encode(), n) for n in range(first, first + count)]


def test_what_is_sent_again_is_stored_once(nsqd: Nsqd):
    with nsqd.connect() as connection:
        connection.ok(once("again", "p", 1, 3) + once("again", "p", 2, 3), 6)
        connection.ok(several("again", "p", 3, 5) + several("again", "p", 3, 5) + once("again", "p", 8), 3)
        connection.ok(once("again", "q:1", 77) + once("again", "q:1", 77), 2)
        with nsqd.connect() as other:
            other.ok(several("again", "p", 1, 8))
    assert stored(nsqd, "again") == [*numbers("p", 1, 8), b"q:1 77"]


def test_a_gap_does_not_close_and_stores_nothing(nsqd: Nsqd):
    """A pipeline whose third command was lost: nothing overtakes it."""
    with nsqd.connect() as connection:
        connection.send(
            once("gap", "p", 1, 2) + once("gap", "p", 4, 2) + several("gap", "p", 6, 2) + once("gap", "p", 3)
        )
        connection.ok(count=2)
        for sequence in (4, 5):
            assert connection.error() == f"E_SEQUENCE_GAP PUB_ONCE producer p sequence {sequence}, expected 3"
        assert connection.error() == "E_SEQUENCE_GAP MPUB_ONCE producer p sequence 6, expected 3"
        connection.ok()
        connection.ok(once("gap", "p", 4))
    assert stored(nsqd, "gap") == numbers("p", 1, 4)


def test_it_goes_with_other_publishes(nsqd: Nsqd):
    with nsqd.connect() as connection:
        connection.ok(b"PUB mix\n\0\0\0\1a" + once("mix", "p", 1) + b"PUB mix\n\0\0\0\1b" + once("mix", "p", 2) * 2, 5)
    assert stored(nsqd, "mix") == [b"a", b"p 1", b"b", b"p 2"]


def in_one(name: str, topic: str, first: int, bodies: list[bytes], fronts: list | None = None, defer_ms: int = 0):
    return publish(COMMANDS[name], topic, bodies, 0 if fronts else None, defer_ms, fronts, "p", first)


def test_headers_and_trace_ids_once(nsqd: Nsqd):
    nsqd.post("/topic/create?topic=both&partition_num=1&extend=true")
    headed = in_one("MPUB_EXT_ONCE", "both", 1, [b"a", b"b"], [b'{"n":1,"##trace_id":"77"}', b""])
    traced = in_one("MPUB_TRACE_ONCE", "both", 2, [b"b", b"c"], [8, 9])
    with nsqd.connect() as connection:
        connection.ok(headed + headed + traced + traced, 4)
    trace, none = b"\0" * 7 + b"\x4d", b"\0" * 8
    assert stored(nsqd, "both") == [
        b"\x04" + struct.pack(">H", 25) + b'{"n":1,"##trace_id":"77"}a',
        b"\0b",
        b"\0c",
    ], "of a batch that overlaps the tail alone"
    with nsqd.connect() as connection:
        connection.send(fetch("both", 0, 1, 4, 1 << 20))
        batches = connection.response()[8:]
        assert trace in batches and none in batches and (9).to_bytes(8, "big") in batches
        refused = in_one("MPUB_EXT_ONCE", "both", 4, [b"d"], [b"[]"])
        assert connection.error(refused).startswith("E_INVALID_JSON_HEADER MPUB_EXT_ONCE headers are not")
        connection.ok(in_one("MPUB_EXT_ONCE", "both", 4, [b"d"], [b"{}"]))
    with nsqd.connect() as connection:
        connection.ok(once("bare", "p", 1))
        for name, fronts in (("MPUB_EXT_ONCE", [b"{}"]), ("MPUB_TRACE_ONCE", [5])):
            assert connection.error(in_one(name, "bare", 2, [b"x"], fronts)).startswith(f"E_EXT_NOT_SUPPORT {name}")


def test_for_later_once(nsqd: Nsqd):
    nsqd.post("/topic/create?topic=later")
    nsqd.post("/channel/create?topic=later&channel=c")
    later = in_one("MDPUB_ONCE", "later", 1, [b"a", b"b"], defer_ms=3_000_000)
    with nsqd.connect() as connection:
        connection.ok(later + later, 2)
        connection.ok(in_one("MDPUB_ONCE", "later", 3, [b"now"], defer_ms=0))
    assert stored(nsqd, "later") == [b"a", b"b", b"now"]

    def counts() -> tuple[int, int]:
        (topic,) = nsqd.get("/stats?format=json&topic=later")["topics"]
        return topic["channels"][0]["deferred_count"], topic["message_count"]

    with nsqd.connect() as connection:
        connection.ok(b"SUB later c\n")
        connection.send(b"RDY 1\n")
        assert connection.message().body == b"now"
    wait_until(lambda: counts() == (2, 3), "the others wait", PATIENCE_S)


def test_asking_for_producers(nsqd: Nsqd):
    nsqd.post("/topic/create?topic=asked&partition_num=2")
    with nsqd.connect() as connection:
        connection.ok(mpub_once("asked", 0, "a:1", 1, [b"x", b"y"]) + mpub_once("asked", 1, "a:2", 5, [b"z"]), 2)
        connection.ok(mpub_once("asked", 1, "b", 1, [b"z"]) + several("asked-plain", "a:9", 4, 2), 2)
        connection.send(producers("asked", "a:"))
        answer = json.loads(connection.response())
        assert (answer["topic"], answer["partition_num"], answer["has_headers"]) == ("asked", 2, False)
        assert [(row["partition"], row["producers"]) for row in answer["partitions"]] == [
            (0, {"a:1": 2}),
            (1, {"a:2": 5}),
        ]
        connection.send(producers("asked-plain", "a"))
        answer = json.loads(connection.response())
        assert (answer["partition_num"], answer["partitions"][0]["producers"]) == (0, {"a:9": 5})
        assert connection.error(producers("nobody-has", "a")).startswith("E_TOPIC_NOT_EXIST PRODUCERS topic nobody-has")


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (b"PUB_ONCE t - p\n", "E_INVALID PUB_ONCE insufficient number of parameters"),
        (b"PUB_ONCE $ - p 1\n", "E_BAD_TOPIC PUB_ONCE topic name"),
        (b"PUB_ONCE t - p/q 1\n", "E_INVALID PUB_ONCE producer id p/q is not valid: 1 to 64 of [A-Za-z0-9._:-]"),
        (b"PUB_ONCE t - " + b"p" * 65 + b" 1\n", "E_INVALID PUB_ONCE producer id ppp"),
        (b"MPUB_ONCE t -  1\n", "E_INVALID MPUB_ONCE producer id  is not valid"),
        (b"PUB_ONCE t - p 0\n", "E_INVALID PUB_ONCE sequence 0 is not a number from 1 to 2^63-1"),
        (b"PUB_ONCE t - p 9223372036854775808\n", "E_INVALID PUB_ONCE sequence 9223372036854775808"),
        (b"PUB_ONCE t - p +1\n", "E_INVALID PUB_ONCE sequence +1"),
        (b"MPUB_ONCE t - p 1_0\n", "E_INVALID MPUB_ONCE sequence 1_0"),
        (
            mpub_once("t", None, "p", 2**63 - 1, [b"a"])[:-13] + struct.pack(">III", 14, 2, 1) + b"a\0\0\0\1b",
            "E_INVALID MPUB_ONCE sequence 9223372036854775807",
        ),
        (b"PUB_ONCE t x p 1\n\0\0\0\1a", "E_BAD_PARTITION PUB_ONCE partition is neither a number nor -"),
        (b"PUB_ONCE t 1 p 1\n\0\0\0\1a", "E_TOPIC_NOT_EXIST PUB_ONCE topic t partition 1 is not on this nsqd"),
        (b"PUB_ONCE t - p 1\n\0\0\0\0", "E_BAD_MESSAGE PUB_ONCE invalid message body size 0"),
        (b"MPUB_ONCE t - p 1\n\0\0\0\4\0\0\0\0", "E_BAD_BODY MPUB invalid message count 0"),
    ],
)
def test_what_makes_no_sense_is_refused(nsqd: Nsqd, command: bytes, error: str):
    with nsqd.connect() as connection:
        assert connection.error(command).startswith(error)
        assert connection.wait_closed() == []


def test_sequences_go_up_to_their_limit(nsqd: Nsqd):
    last = 2**63 - 1
    with nsqd.connect() as connection:
        connection.ok(once("limit", "p", last) + once("limit", "p", last - 1, 2), 3)
    assert stored(nsqd, "limit") == [b"p %d" % last]
    with pytest.raises(LocalProtocolError):
        several("limit", "p", last, 2)


def test_partitions_are_counted_each(nsqd: Nsqd):
    nsqd.post("/topic/create?topic=parts&partition_num=2")
    with nsqd.connect() as connection:
        for partition in (0, 1):
            connection.ok(pub_once("parts", partition, "p", 1, b"%d" % partition) * 2, 2)
        answer = connection.error(pub_once("parts", 1, "p", 3, b"x"))
        assert answer == "E_SEQUENCE_GAP PUB_ONCE producer p sequence 3, expected 2"
        answer = connection.error(pub_once("parts", None, "p", 2, b"x"))
        assert answer == "E_BAD_PARTITION PUB_ONCE partition is missing, and topic parts has several"
        assert connection.wait_closed() == []
    assert sorted(stored(nsqd, "parts")) == [b"0", b"1"]
    nsqd.post("/topic/create?topic=one&partition_num=1")
    with nsqd.connect() as connection:
        connection.ok(once("one", "p", 1) * 2, 2)
    assert stored(nsqd, "one") == [b"p 1"]


def test_an_ephemeral_topic_counts_as_well(nsqd: Nsqd):
    with nsqd.connect() as consumer, nsqd.connect() as connection:
        consumer.subscribe("now#ephemeral", "c#ephemeral", 10)
        connection.ok(once("now#ephemeral", "p", 1, 2) * 2, 4)
        assert [message.body for message in consumer.messages(2)] == numbers("p", 1, 2)
        consumer.nothing_comes()


def test_they_are_delivered_as_any_other(nsqd: Nsqd):
    with nsqd.connect() as connection, nsqd.connect() as consumer:
        connection.ok(several("deliver", "p", 1, 3) + once("deliver", "p", 4), 2)
        consumer.subscribe("deliver", "c", 10)
        messages = consumer.messages(4)
        assert [message.body for message in messages] == numbers("p", 1, 4)
        assert [message.attempts for message in messages] == [1] * 4
        consumer.finish(*messages)
        connection.ok(several("deliver", "p", 1, 4))
        consumer.nothing_comes()


@pytest.mark.parametrize("durability", ["fsync", "os", "interval"])
def test_everything_sent_again_after_a_kill(daemons: Daemons, durability: str):
    """kill -9 under a pipeline, again and again: whatever was answered or not, all of it is there once."""
    nsqd = daemons.nsqd("--max-bytes-per-file=16384", f"--durability={durability}")
    batches = [several("t", "p", 1 + 7 * n, 7) for n in range(300)]
    singles = [once("t", "q", 1 + n) for n in range(700)]
    for attempt in range(3):
        with nsqd.connect() as connection, nsqd.connect() as other:
            connection.send(b"".join(batches))
            other.send(b"".join(singles))
            for _ in range(40 * (attempt + 1)):
                connection.ok()
                other.ok()
            nsqd.kill()
        nsqd.start()
    with nsqd.connect() as connection, nsqd.connect() as other:
        connection.ok(b"".join(batches), len(batches))
        other.ok(b"".join(singles), len(singles))
    found = stored(nsqd, "t")
    assert [body for body in found if body.startswith(b"p")] == numbers("p", 1, 2100)
    assert [body for body in found if body.startswith(b"q")] == numbers("q", 1, 700)
    nsqd.restart()
    with nsqd.connect() as connection:
        connection.ok(b"".join(batches[-3:]) + singles[-1], 4)
        assert connection.error(once("t", "q", 702)) == "E_SEQUENCE_GAP PUB_ONCE producer q sequence 702, expected 701"
    assert len(stored(nsqd, "t")) == 2800


def test_producers_outlive_what_they_published(daemons: Daemons):
    """Consumed segments go, /topic/empty drops messages; only with the topic its producers are forgotten."""
    nsqd = daemons.nsqd("--max-bytes-per-file=4096")
    with nsqd.connect() as connection, nsqd.connect() as consumer:
        connection.ok(once("t", "early", 1))
        consumer.subscribe("t", "c", 100)
        connection.ok(b"".join(several("t", "late", 1 + 50 * n, 50) for n in range(20)), 20)
        for _ in range(1001):
            consumer.finish(consumer.message())
    assert len(nsqd.segment_paths("t")) > 0
    wait_until(lambda: len(nsqd.segment_paths("t")) <= 2, "consumed segments are dropped")
    nsqd.kill()
    nsqd.start()
    with nsqd.connect() as connection:
        connection.ok(once("t", "early", 1) + several("t", "late", 951, 50), 2)
        connection.ok(once("t", "early", 2))
        nsqd.post("/channel/delete?topic=t&channel=c")
        nsqd.post("/topic/empty?topic=t")
        connection.ok(once("t", "early", 1, 3), 3)
        assert stored(nsqd, "t")[-1] == b"early 3"
        nsqd.post("/topic/delete?topic=t")
        connection.ok(once("t", "early", 1))
        assert stored(nsqd, "t") == [b"early 1"]


def test_while_draining_duplicates_are_answered(daemons: Daemons):
    nsqd = daemons.nsqd()
    with nsqd.connect() as connection:
        connection.ok(once("t", "p", 1, 2), 2)
        nsqd.post("/drain?timeout=60s")
        connection.ok(once("t", "p", 2))
        assert connection.error(once("t", "p", 3)) == "E_PUB_ONCE_FAILED PUB_ONCE failed draining"
        assert nsqd.request("POST", "/pub?topic=t&producer_id=p&sequence=3", b"x").status == 503
        assert nsqd.post("/pub?topic=t&producer_id=p&sequence=2", b"x").status == 200
        connection.ok(once("t", "p", 1))


def test_over_http(nsqd: Nsqd):
    where = "topic=http&producer_id=p&sequence="
    for _ in range(2):
        assert nsqd.post(f"/pub?{where}1", b"p 1").text == "OK"
        assert nsqd.post(f"/mpub?{where}2", b"p 2\np 3\n").text == "OK"
        binary = struct.pack(">II", 2, 3) + b"p 3" + struct.pack(">I", 3) + b"p 4"
        assert nsqd.post(f"/mpub?{where}3&binary=true", binary).text == "OK"
    with nsqd.connect() as connection:
        connection.ok(once("http", "p", 4, 2), 2)
    assert stored(nsqd, "http") == numbers("p", 1, 5)
    answer = nsqd.request("POST", f"/pub?{where}7", b"x")
    assert answer.error == (409, "SEQUENCE_GAP: producer p sequence 7, expected 6")


@pytest.mark.parametrize("style", ["nsq", "youzan"])
def test_over_http_no_answer_is_in_an_envelope_whatever_else_a_request_says(daemons: Daemons, style: str):
    nsqd = daemons.nsqd(f"--http-style={style}")
    where = "topic=t&producer_id=p&partition=0&sequence="
    nsqd.post("/topic/create?topic=t&partition_num=1")
    assert nsqd.post(f"/pub?{where}1", b"1").text == "OK"
    for path in ("/pub", "/mpub"):
        answer = nsqd.request("POST", f"{path}?{where}7", b"x")
        assert answer.error == (409, "SEQUENCE_GAP: producer p sequence 7, expected 2")
    answer = nsqd.request("POST", "/pub?topic=t&partition=x", b"x")
    assert (answer.status, answer.json["status_txt"]) == (500, "E_BAD_PARTITION"), "who counts nothing is Youzan's"


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        ("producer_id=p", 400, "MISSING_ARG_SEQUENCE"),
        ("sequence=1", 400, "MISSING_ARG_PRODUCER_ID"),
        ("producer_id=p%2Fq&sequence=1", 400, "INVALID_ARG_PRODUCER_ID: 1 to 64 of [A-Za-z0-9._:-]"),
        ("producer_id=%C3%A4&sequence=1", 400, "INVALID_ARG_PRODUCER_ID: 1 to 64 of [A-Za-z0-9._:-]"),
        ("producer_id=p&sequence=0", 400, "INVALID_ARG_SEQUENCE: a number from 1 to 2^63-1"),
        ("producer_id=p&sequence=-1", 400, "INVALID_ARG_SEQUENCE: a number from 1 to 2^63-1"),
        ("producer_id=p&sequence=1&defer=5", 400, "INVALID_DEFER: a publish with a sequence cannot be deferred"),
        ("producer_id=p&sequence=1&partition=x", 400, "E_BAD_PARTITION"),
        ("producer_id=p&sequence=1&partition=3", 404, "E_TOPIC_NOT_EXIST"),
    ],
)
def test_http_says_what_is_wrong(nsqd: Nsqd, query: str, status: int, message: str):
    for headers in ({}, {"Accept": "application/vnd.nsq; version=1.0"}):
        assert nsqd.request("POST", f"/pub?topic=wrong&{query}", b"x", headers).error == (status, message)


def test_identify_says_that_sequences_are_known(nsqd: Nsqd):
    with nsqd.connect() as connection:
        assert connection.identify(feature_negotiation=True, producer_sequences=True)["producer_sequences"] is True
    with nsqd.connect() as connection:
        assert "producer_sequences" not in connection.identify(feature_negotiation=True)


def test_a_full_topic_takes_duplicates_and_nothing_new(daemons: Daemons):
    nsqd = daemons.nsqd()
    with nsqd.connect() as connection:
        connection.ok(once("t", "p", 1, 2), 2)
        nsqd.post("/topic/settings?topic=t", b'{"max_messages": 2, "overflow": "refuse"}')
        connection.ok(once("t", "p", 1, 2), 2)
        assert connection.error(once("t", "p", 3)).startswith("E_PUB_ONCE_FAILED topic t is full: 2 of max 2")
        assert nsqd.request("POST", "/pub?topic=t&producer_id=p&sequence=3", b"x").status == 429
        nsqd.post("/topic/settings?topic=t", b'{"max_messages": 3}')
        connection.ok(once("t", "p", 3))
    assert stored(nsqd, "t") == numbers("p", 1, 3)


def test_permission_to_publish_is_needed(daemons: Daemons):
    with AuthServer() as server:
        server.grant({"permissions": ["publish"], "topic": "^in$", "channels": [".*"]})
        nsqd = daemons.nsqd(f"--auth-http-address={server.address}")
        auth = b"AUTH\n" + sized(SECRET.encode())
        for command, name in (
            (once("out", "p", 1), "PUB_ONCE"),
            (several("out", "p", 1, 2), "MPUB_ONCE"),
            (
                producers("out", "p"),
                "PRODUCERS",
            ),
        ):
            with nsqd.connect() as connection:
                assert connection.error(command) == f"E_AUTH_FIRST AUTH required before {name}"
            with nsqd.connect() as connection:
                connection.send(auth)
                assert b"permission_count" in connection.response()
                assert connection.error(command) == f'E_UNAUTHORIZED AUTH failed for {name} on "out" ""'
        with nsqd.connect() as connection:
            connection.send(auth)
            assert b"permission_count" in connection.response()
            connection.ok(once("in", "p", 1) * 2 + several("in", "p", 1, 2), 3)
        assert [topic["topic_name"] for topic in nsqd.get("/stats?format=json")["topics"]] == ["in"]
