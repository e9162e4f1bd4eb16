"""Discovery: all nsqlookupds united, both forms of their JSON, and what the stream does with it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from tests.parameters import filled
from tests.spark.fake_lookupd import FakeLookupd
from tests.spark.fake_nsqd import FakeLog, FakeNsqd
from tests.spark.test_reader import ALL, ManualClock, at, numbered, offsets_read, text

from flintmq.errors import ConnectionFailed, DiscoveryError
from flintmq.spark import discovery, retry
from flintmq.spark.batch_reader import NsqReader
from flintmq.spark.discovery import (
    ASKED_AT_ONCE_MAX,
    BODY_SIZE_MAX,
    FAILING_PAUSE_MAX_S,
    Failing,
    TopicPlaces,
    all_nsqds,
    all_topics,
    listed_places,
    nsqds_of_topic,
    partition_count,
    places_of,
)
from flintmq.spark.errors import DataLost, LogAway
from flintmq.spark.offsets import PartitionKey, from_json
from flintmq.spark.options import SourceOptions
from flintmq.spark.stream_reader import NsqStreamReader


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)


@pytest.fixture
def lookupd() -> Iterator[FakeLookupd]:
    with FakeLookupd() as fake:
        yield fake


def producers(*nsqds: FakeNsqd) -> dict:
    return {"channels": [], "producers": [{"broadcast_address": "127.0.0.1", "tcp_port": one.port} for one in nsqds]}


def test_answers_are_united(lookupd):
    with FakeLookupd() as second:
        lookupd.answers["/lookup?topic=t"] = {"producers": [{"broadcast_address": "b", "tcp_port": 2}]}
        second.answers["/lookup?topic=t"] = {
            "status_code": 200,
            "data": {
                "producers": [
                    {"broadcast_address": "b", "tcp_port": 2},
                    {"broadcast_address": "::1", "tcp_port": 1},
                    {"broadcast_address": "", "tcp_port": 9},
                    {"hostname": "neither"},
                    5,
                ]
            },
        }
        both = (lookupd.address, second.address, "127.0.0.1:1")
        assert nsqds_of_topic(both, "t", 5) == ["[::1]:1", "b:2"]
        assert nsqds_of_topic(both, "unknown", 5) == []


def test_one_that_fails_is_asked_last(lookupd, monkeypatch):
    """A silent nsqlookupd would cost its timeout with every topic and every poll."""
    now = [0.0]
    monkeypatch.setattr(discovery, "FAILING", Failing(lambda: now[0]))
    with FakeLookupd() as broken:
        lookupd.answers["/nodes"] = broken.answers["/nodes"] = b"broken"
        both = (broken.address, lookupd.address)
        with pytest.raises(DiscoveryError):
            all_nsqds(both, 5)
        lookupd.answers["/nodes"] = {"producers": [{"broadcast_address": "a", "tcp_port": 1}]}
        assert all_nsqds(both, 5) == ["a:1"], "when all have failed all are asked"
        asked = len(broken.asked)
        assert asked == 2
        assert [all_nsqds(both, 5) for _ in range(5)] == [["a:1"]] * 5
        assert len(broken.asked) == asked, "another one answers"
        now[0] += 2.1
        assert all_nsqds(both, 5) == ["a:1"]
        assert len(broken.asked) == asked + 1
        broken.answers["/nodes"] = {"producers": [{"broadcast_address": "b", "tcp_port": 2}]}
        now[0] += FAILING_PAUSE_MAX_S
        assert all_nsqds(both, 5) == ["a:1", "b:2"]
        assert all_nsqds(both, 5) == ["a:1", "b:2"], "its first answer gives it its place back"


@pytest.mark.parametrize("answer", [b"not json", b"[]", BODY_SIZE_MAX + 1, {"producers": 5}])
def test_nonsense(lookupd, answer):
    lookupd.answers["/nodes"] = answer if isinstance(answer, dict) else filled(answer)
    if not isinstance(answer, dict):
        with pytest.raises(DiscoveryError, match="no nsqlookupd answers /nodes"):
            all_nsqds((lookupd.address,), 5)
    else:
        assert all_nsqds((lookupd.address,), 5) == []


@pytest.mark.parametrize(
    "meta", [{"partition_num": 1 << 30}, {"partition_num": -1}, {"partition_num": "8"}, {}, None, 5]
)
def test_a_count_of_partitions_that_cannot_be_counts_for_nothing(lookupd, meta):
    path = "/lookup?topic=t&access=r&metainfo=true"
    lookupd.answers[path] = {"producers": [], "meta": meta}
    assert partition_count((lookupd.address,), "t", 5) == 0
    with FakeLookupd() as other:
        other.answers[path] = {"producers": [], "meta": {"partition_num": 3}}
        assert partition_count((lookupd.address, other.address), "t", 5) == 3
    assert lookupd.asked == [path] * 2


def test_topics(lookupd):
    lookupd.answers["/topics"] = {"topics": ["b", "a", "no spaces", 5]}
    assert all_topics((lookupd.address,), 5) == ["a", "b"]


def test_a_pattern(lookupd):
    with FakeNsqd() as nsqd:
        for topic in ("flights", "flight_delays", "other", "_log"):
            nsqd.topic(topic, numbered(0, 5))
            lookupd.answers[f"/lookup?topic={topic}"] = producers(nsqd)
        lookupd.answers["/topics"] = {"topics": ["flights", "flight_delays", "other", "_log"]}
        options = SourceOptions.parse({"lookupd": lookupd.address, "topicPattern": "flight.*|_log"})
        reader = NsqReader(options)
        (task,) = reader.partitions()
        assert sorted({wanted.topic for wanted in task.ranges}) == ["flight_delays", "flights"]  # type: ignore[attr-defined]
        assert len(offsets_read(reader, [task])) == 10


LISTS = ["/cluster/status", "/nodes"]
"""Paths that tell where topics are, however many."""


def node(host: str, *topics: str, tombstoned: tuple[str, ...] = (), partitions: tuple[str, ...] = ()) -> dict:
    """An nsqd as /nodes has it."""
    row = {
        "broadcast_address": host,
        "tcp_port": 1,
        "topics": list(topics),
        "tombstones": [each in tombstoned for each in topics],
    }
    return {**row, "partitions": {each: [0] for each in partitions}} if partitions else row


def partition(number: int, address: str, is_ready: bool = True) -> dict:
    """A partition as /cluster/status has it."""
    return {"partition": number, "address": address, "is_ready": is_ready}


def test_a_pattern_takes_three_requests_for_any_number_of_topics(lookupd):
    topics = [f"t{number}" for number in range(200)]
    with FakeNsqd() as nsqd:
        for topic in topics:
            nsqd.topic(topic, numbered(0, 1))
        lookupd.answers["/topics"] = {"topics": [*topics, "other"]}
        lookupd.answers["/nodes"] = {"producers": [{**node("127.0.0.1", *topics, "other"), "tcp_port": nsqd.port}]}
        given = {"lookupd": lookupd.address, "topicPattern": "t.*"}
        reader = NsqReader(SourceOptions.parse(given))
        assert len(offsets_read(reader, reader.partitions())) == 200
        assert lookupd.asked == ["/topics", *LISTS], "of plain topics it is known that they have no partitions"

        clock = ManualClock()
        stream = NsqStreamReader(SourceOptions.parse(given), clock)
        end = stream.latestOffset(stream.initialOffset(), ALL)
        lookupd.on_ask = lambda _path: clock.advance(3)
        for _ in range(3):
            lookupd.asked.clear()
            clock.advance(10)
            end = stream.latestOffset(end, ALL)
            assert lookupd.asked == ["/topics", *LISTS]
            clock.advance(9)
            end = stream.latestOffset(end, ALL)
            assert len(lookupd.asked) == 3, "the time of a poll is none of the time until the next one"


def test_where_all_topics_are(lookupd):
    topics = ["plain", "hidden", "both", "nowhere", "parts", "unlisted"]
    lookupd.answers["/nodes"] = {
        "producers": [
            node(
                "a", "plain", "hidden", "both", "parts", "other", tombstoned=("hidden", "both"), partitions=("parts",)
            ),
            node("::1", "both"),
            {"broadcast_address": "old", "tcp_port": 1, "topics": ["plain"]},
            {"hostname": "neither", "topics": ["nowhere"]},
            {**node("b"), "topics": None, "partitions": None},
            5,
        ]
    }
    found = listed_places((lookupd.address,), topics, 5)
    assert found == {
        "plain": TopicPlaces(("a:1", "old:1"), 0),
        "hidden": TopicPlaces(()),
        "both": TopicPlaces(("[::1]:1",), 0),
        "nowhere": TopicPlaces(()),
        "parts": TopicPlaces(("a:1",)),
        "unlisted": TopicPlaces(()),
    }
    assert lookupd.asked == LISTS
    assert listed_places((lookupd.address,), [], 5) == {}


def test_where_the_topics_of_a_cluster_are(lookupd):
    """Its leaders have them, whoever else says so, and tombstones are for who publishes."""
    lookupd.answers["/cluster/status"] = {
        "topics": [
            {
                "topic": "parts",
                "partitions": [partition(0, "a:1"), partition(1, "::1:2"), partition(2, "c:1", is_ready=False)],
                "meta": {"partition_num": 3},
            },
            {"topic": "logs", "partitions": [partition(0, "a:1")], "partition_num": 1, "meta": {"partition_num": 0}},
            {"topic": "going", "partitions": [partition(0, "", is_ready=False)]},
        ],
        "unreadable": [],
    }
    lookupd.answers["/nodes"] = {
        "producers": [node("foreign", "logs", "parts"), node("a", "logs", "own#ephemeral", tombstoned=("logs",))]
    }
    topics = ["parts", "logs", "going", "own#ephemeral"]
    assert listed_places((lookupd.address,), topics, 5) == {
        "parts": TopicPlaces(("[::1]:2", "a:1"), 3),
        "logs": TopicPlaces(("a:1",), 0),
        "going": TopicPlaces(()),
        "own#ephemeral": TopicPlaces(("a:1",), 0),
    }
    assert lookupd.asked == LISTS


def test_lists_of_several_are_united(lookupd):
    with FakeLookupd() as second, FakeLookupd() as broken:
        lookupd.answers["/nodes"] = {"producers": [node("a", "one", "two", "three")]}
        second.answers["/nodes"] = {"producers": [node("b", "two", "three", tombstoned=("three",)), node("a", "one")]}
        second.answers["/cluster/status"] = {"topics": [{"topic": "four", "partitions": [], "meta": {}}]}
        for path in LISTS:
            broken.answers[path] = b"broken"
        broken.answers["/lookup?topic=one"] = b"broken"
        lookupds = (broken.address, lookupd.address, second.address, "127.0.0.1:1")
        assert listed_places(lookupds, ["one", "two", "three", "four"], 5) == {
            "one": TopicPlaces(("a:1",), 0),
            "two": TopicPlaces(("a:1", "b:1"), 0),
            "three": TopicPlaces(("a:1",)),
            "four": TopicPlaces(()),
        }
        with pytest.raises(DiscoveryError, match=r"no nsqlookupd answers where 2 topics are: .*; "):
            listed_places((broken.address, "127.0.0.1:1"), ["one", "two"], 5)


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/nodes", BODY_SIZE_MAX + 1),
        ("/nodes", {"nodes": []}),
        ("/cluster/status", b"broken"),
        ("/cluster/status", {"topics": [{"topic": "a"}]}),
        ("/cluster/status", {"topics": [{"topic": "a", "partitions": [partition(0, "nowhere")]}]}),
        ("/cluster/status", {"topics": [], "unreadable": [{"key": "k", "reason": "of a later release"}]}),
    ],
)
def test_topics_are_asked_about_where_lists_are_of_no_use(lookupd, path, answer):
    lookupd.answers["/nodes"] = {"producers": [node("wrong", "a", "b")]}
    lookupd.answers[path] = filled(answer) if isinstance(answer, int) else answer
    lookupd.answers["/lookup?topic=b"] = {"producers": [{"broadcast_address": "right", "tcp_port": 1}]}
    assert listed_places((lookupd.address,), ["a", "b"], 5) == {"a": TopicPlaces(()), "b": TopicPlaces(("right:1",))}


def test_partitions_are_asked_for_where_there_may_be_some(lookupd):
    with FakeNsqd() as nsqd:
        for topic in ("plain", "parts"):
            nsqd.topic(topic, numbered(0, 5))
        lookupd.answers["/topics"] = {"topics": ["plain", "parts", "dead"]}
        lookupd.answers["/nodes"] = {
            "producers": [{**node("127.0.0.1", "plain", "parts", partitions=("parts",)), "tcp_port": nsqd.port}]
        }
        counts = ["/lookup?topic=dead&access=r&metainfo=true", "/lookup?topic=parts&access=r&metainfo=true"]
        lookupd.answers[counts[1]] = {"producers": [], "meta": {"partition_num": 1}}
        given = {"lookupd": lookupd.address, "topicPattern": ".*", "retries": "1"}
        reader = NsqReader(SourceOptions.parse(given))
        assert len(offsets_read(reader, reader.partitions())) == 10
        assert lookupd.asked == ["/topics", *LISTS, *counts]
        lookupd.answers[counts[0]] = {"producers": [], "meta": {"partition_num": 2}}
        with pytest.raises(LogAway, match=r"topic 'dead', partition 0: .*the topic has 2 partitions"):
            NsqReader(SourceOptions.parse(given)).partitions()


def test_a_partition_of_a_cluster_that_nobody_has(lookupd):
    with FakeNsqd() as nsqd:
        nsqd.topic("t", numbered(0, 5))
        lookupd.answers["/topics"] = {"topics": ["t"]}
        lookupd.answers["/nodes"] = {"producers": []}
        partitions = [partition(0, f"127.0.0.1:{nsqd.port}"), partition(1, "", is_ready=False)]
        row = {"topic": "t", "partitions": partitions, "meta": {"partition_num": 2}}
        lookupd.answers["/cluster/status"] = {"topics": [row]}
        given = {"lookupd": lookupd.address, "topicPattern": ".*", "retries": "1"}
        with pytest.raises(LogAway, match="the topic has 2 partitions, and no nsqd that nsqlookupd lists has this one"):
            NsqReader(SourceOptions.parse(given)).partitions()
        assert set(lookupd.asked) == {"/topics", *LISTS}


def test_named_topics_are_asked_about_several_at_a_time(lookupd):
    """The first one alone, so that a nsqlookupd that is silent is found out once."""
    together, lock = threading.Barrier(ASKED_AT_ONCE_MAX, timeout=60), threading.Lock()
    going, most = 0, 0

    def on_ask(path: str) -> None:
        nonlocal going, most
        with lock:
            going += 1
            most = max(most, going)
        if path != "/lookup?topic=t0":
            together.wait()
        with lock:
            going -= 1

    lookupd.on_ask = on_ask
    topics = [f"t{number}" for number in range(1 + 3 * ASKED_AT_ONCE_MAX)]
    lookupd.answers["/lookup?topic=t5"] = {"producers": [{"broadcast_address": "a", "tcp_port": 1}]}
    found = places_of((lookupd.address,), topics, 120)
    assert list(found) == topics and found["t5"].nsqds == ("a:1",) and found["t6"].nsqds == ()
    assert lookupd.asked[0] == "/lookup?topic=t0" and sorted(lookupd.asked) == sorted(
        f"/lookup?topic={each}" for each in topics
    )
    assert most == ASKED_AT_ONCE_MAX


def test_a_silent_one_is_asked_about_the_first_topic_alone(lookupd):
    lookupd.answers["/lookup?topic=t0"] = b"broken"
    with pytest.raises(DiscoveryError):
        places_of((lookupd.address,), [f"t{number}" for number in range(20)], 5)
    assert lookupd.asked == ["/lookup?topic=t0"]


def test_an_nsqd_that_joins_and_one_that_leaves(lookupd):
    first, second = FakeNsqd(), FakeNsqd()
    first.topic("t", numbered(0, 10))
    second.topic("t", numbered(0, 20))
    lookupd.answers["/lookup?topic=t"] = producers(first)
    clock = ManualClock()
    reader = NsqStreamReader(SourceOptions.parse({"lookupd": lookupd.address, "topic": "t"}), clock)
    end = reader.latestOffset(reader.initialOffset(), ALL)
    assert at(end, first) == 11

    lookupd.answers["/lookup?topic=t"] = producers(second)
    asked = len(lookupd.asked)
    assert text(reader.latestOffset(end, ALL)) == text(end)
    assert len(lookupd.asked) == asked, "nsqlookupd is not asked for every micro-batch"

    clock.advance(11)
    first.topic("t", numbered(0, 5))
    end = reader.latestOffset(end, ALL)
    assert (at(end, first), at(end, second)) == (16, 21), "one that is not listed any more is read while it answers"
    first.close()
    second.topic("t", numbered(0, 5))
    end = reader.latestOffset(end, ALL)
    assert (at(end, first), at(end, second)) == (16, 26)
    second.close()


def test_a_data_directory_that_moves(lookupd):
    """Its nsqd is listed nowhere for a while, then with another address: nothing is read twice."""
    first, second = FakeNsqd(), FakeNsqd()
    first.topic("t", numbered(0, 10))
    lookupd.answers["/lookup?topic=t"] = producers(first)
    clock = ManualClock()
    given = {"lookupd": lookupd.address, "topic": "t", "retries": "2"}
    reader = NsqStreamReader(SourceOptions.parse(given), clock)
    here = reader.latestOffset(reader.initialOffset(), ALL)
    second.logs, first.logs = first.logs, {}
    first.close()
    lookupd.answers["/lookup?topic=t"] = producers()
    for _ in range(2):
        clock.advance(11)
        assert text(reader.latestOffset(here, ALL)) == text(here), "it may be starting somewhere"
    second.topic("t", numbered(0, 5))
    lookupd.answers["/lookup?topic=t"] = producers(second)
    clock.advance(2)  # nsqlookupd is asked more often while something is missing
    end = reader.latestOffset(here, ALL)
    assert offsets_read(reader, reader.partitions(here, end)) == list(range(11, 16))
    second.close()


def test_an_nsqd_that_nobody_lists_any_more(lookupd):
    with FakeNsqd() as nsqd, FakeNsqd() as gone:
        nsqd.topic("t", numbered(0, 10))
        gone.topic("t", numbered(0, 10))
        lookupd.answers["/lookup?topic=t"] = producers(nsqd, gone)
        given = {"lookupd": lookupd.address, "topic": "t", "retries": "2"}
        reader = NsqStreamReader(SourceOptions.parse(given))
        here = reader.latestOffset(reader.initialOffset(), ALL)
        lookupd.answers["/lookup?topic=t"] = producers(nsqd)
        for is_available_now in (True, False):
            clock = ManualClock()
            strict = NsqStreamReader(SourceOptions.parse(given), clock)
            lenient = NsqStreamReader(SourceOptions.parse({**given, "failOnDataLoss": "false"}), clock)
            for reader in (strict, lenient):
                if is_available_now:
                    reader.prepareForTriggerAvailableNow()
                else:
                    assert text(reader.latestOffset(here, ALL)) == text(here)
            clock.advance(301)
            with pytest.raises(DataLost, match="no nsqd has it"):
                strict.latestOffset(here, ALL)
            end = lenient.latestOffset(here, ALL)
            assert from_json(end) == {PartitionKey("t", 0, nsqd.logs["t"][0].log_id): 11}
            assert text(lenient.latestOffset(end, ALL)) == text(end)


def test_a_partition_whose_nsqd_is_dead(lookupd):
    """nsqlookupd lists a dead nsqd no more, but how many partitions the topic has every other one has told it."""
    with FakeNsqd() as nsqd, FakeNsqd() as other:
        log = FakeLog(partition=2)
        nsqd.logs["t"] = [FakeLog(partition=0), FakeLog(partition=1)]
        for each in (*nsqd.logs["t"], log):
            each.append(numbered(0, 10))
        lookupd.answers["/lookup?topic=t"] = producers(nsqd)
        told = {**producers(nsqd), "meta": {"partition_num": 3, "replica": 1}}
        lookupd.answers["/lookup?topic=t&access=r&metainfo=true"] = told
        given = {"lookupd": lookupd.address, "topic": "t", "retries": "2"}
        reader = NsqReader(SourceOptions.parse(given))
        missed = "partition 2: .*the topic has 3 partitions, and no nsqd that nsqlookupd lists has this one"
        with pytest.raises(LogAway, match=missed):
            reader.partitions()
        with pytest.raises(LogAway, match=missed):
            NsqStreamReader(SourceOptions.parse(given)).prepareForTriggerAvailableNow()

        lenient = NsqStreamReader(SourceOptions.parse({**given, "failOnDataLoss": "false"}))
        lenient.prepareForTriggerAvailableNow()
        end = lenient.latestOffset(lenient.initialOffset(), ALL)
        assert len(offsets_read(lenient, lenient.partitions({}, end))) == 20
        chosen = NsqReader(SourceOptions.parse({"lookupd": lookupd.address, "assign": '{"t": [1]}'}))
        assert len(offsets_read(chosen, chosen.partitions())) == 10, "what is not read is not missed"

        other.logs["t"] = [log]
        lookupd.answers["/lookup?topic=t"] = producers(nsqd, other)
        assert len(offsets_read(reader, reader.partitions())) == 30


def test_nsqlookupd_away_while_a_task_reads():
    """The nsqd is where it was: a connection that breaks is no reason to wait for nsqlookupd."""
    with FakeNsqd() as nsqd:
        nsqd.topic("t", numbered(0, 100), batch=10)
        with FakeLookupd() as lookupd:
            lookupd.answers["/lookup?topic=t"] = producers(nsqd)
            given = {"lookupd": lookupd.address, "topic": "t", "retries": "3", "fetchMaxBytes": "4KiB"}
            reader = NsqReader(SourceOptions.parse(given))
            tasks = reader.partitions()
        nsqd.fail("FETCH", "cut", "close")
        assert offsets_read(reader, tasks) == list(range(1, 101))
        again = reader.read(tasks[0])
        nsqd.close()
        with pytest.raises((ConnectionFailed, DiscoveryError)):
            list(again)


def test_nsqlookupd_away_for_a_while(lookupd):
    with FakeNsqd() as nsqd:
        nsqd.topic("t", numbered(0, 10))
        lookupd.answers["/lookup?topic=t"] = producers(nsqd)
        clock = ManualClock()
        reader = NsqStreamReader(SourceOptions.parse({"lookupd": lookupd.address, "topic": "t"}), clock)
        here = reader.latestOffset(reader.initialOffset(), ALL)
        lookupd.answers["/lookup?topic=t"] = b"broken"
        clock.advance(11)
        nsqd.topic("t", numbered(0, 5))
        assert at(reader.latestOffset(here, ALL), nsqd) == 16
