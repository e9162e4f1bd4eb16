"""The readers without Spark, against an nsqd that can misbehave: offsets, limits, replay, loss, retries."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from tests.spark.fake_nsqd import FakeLog, FakeNsqd

from flintmq.errors import ConnectionFailed, DiscoveryError, NsqdError, OptionError, RemoteProtocolError
from flintmq.spark import retry
from flintmq.spark.batch_reader import NsqReader
from flintmq.spark.broker import POOL, NsqdConnection
from flintmq.spark.errors import GONE, TAKEN_BACK_UNSEEN, BadCheckpoint, DataLost, LogAway, LogTwice
from flintmq.spark.offsets import PartitionKey
from flintmq.spark.options import SourceOptions
from flintmq.spark.stream_reader import NsqStreamReader
from flintmq.spark.survey import Surveyor

ALL = ReadAllAvailable()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(retry, "PAUSE_MAX_S", 0.01)


@pytest.fixture
def nsqd() -> Iterator[FakeNsqd]:
    with FakeNsqd() as fake:
        yield fake
    POOL._idle.clear()


class ManualClock:
    """Time that stands still until it is told."""

    def __init__(self) -> None:
        self.now_ns = 10**15

    def wall_ns(self) -> int:
        return self.now_ns

    def monotonic_ns(self) -> int:
        return self.now_ns

    boottime_ns = monotonic_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


def options(*nsqds: FakeNsqd, **more: str) -> SourceOptions:
    addresses = ",".join(one.address for one in nsqds)
    topic = {} if "topics" in more else {"topic": "t"}
    return SourceOptions.parse({"nsqd": addresses, **topic, **more})


def numbered(first: int, end: int, size: int = 0) -> list[bytes]:
    return [b"%d" % number + b"." * size for number in range(first, end)]


def offsets_read(reader: NsqReader | NsqStreamReader, tasks) -> list[int]:
    return [row for task in tasks for batch in reader.read(task) for row in batch.column("offset").to_pylist()]


def at(offset: dict, nsqd: FakeNsqd, topic: str = "t") -> int:
    return offset[topic][label(nsqd, topic)]


def label(nsqd: FakeNsqd, topic: str = "t") -> str:
    """What offsets call the log of a topic."""
    return f"0/{nsqd.logs[topic][0].log_id}"


def text(offset: dict) -> str:
    return json.dumps(offset)


# -- batches -----------------------------------------------------------------------------------------------------------


def test_a_batch_read_is_everything_in_order(nsqd):
    bodies = numbered(1, 25_001, 30)
    nsqd.topic("t", bodies, batch=700)
    reader = NsqReader(options(nsqd, fetchMaxBytes="8KiB", maxMessagesPerTask="9000"))
    tasks = reader.partitions()
    table = pa.Table.from_batches(batch for task in tasks for batch in reader.read(task))
    assert table["body"].to_pylist() == bodies
    assert table["offset"].to_pylist() == list(range(1, 25_001))
    assert len(tasks) == 3
    assert nsqd.count("FETCH") >= 36


def test_a_range_and_its_exclusive_end(nsqd):
    nsqd.topic("t", numbered(1, 101), batch=10)
    given = {"startingOffsets": '{"t": {"0": 13}}', "endingOffsets": json.dumps({"t": {f"{nsqd.address}/0": 57}})}
    reader = NsqReader(options(nsqd, **given))
    assert offsets_read(reader, reader.partitions()) == list(range(13, 57))
    # 0 is what users of other systems write for the beginning
    reader = NsqReader(options(nsqd, startingOffsets='{"t": {"0": 0}}', endingOffsets='{"t": {"0": 3}}'))
    assert offsets_read(reader, reader.partitions()) == [1, 2]


def test_times(nsqd):
    log = nsqd.topic("t")
    for second in range(10):
        log.append(numbered(0, 5), 1_700_000_000_000_000_000 + second * 10**9)
    given = {"startingTimestamp": "1700000003000", "endingTimestamp": "2023-11-14T22:13:26Z"}
    reader = NsqReader(options(nsqd, **given))
    assert offsets_read(reader, reader.partitions()) == list(range(16, 31))
    reader = NsqReader(options(nsqd, startingTimestamp="1700000100000"))
    assert reader.partitions() == []


def test_times_of_partitions_one_by_one(nsqd):
    """Kafka's options, with Kafka's meaning; partitions that are not named are read from beginning to end."""
    base = 1_700_000_000_000_000_000
    logs = nsqd.logs["t"] = [FakeLog(partition=number) for number in range(3)]
    for log in logs:
        for hour in range(3):
            log.append(numbered(0, 10), base + hour * 3_600_000_000_000)
    hours = [base // 10**6 + hour * 3_600_000 for hour in range(4)]
    given = {
        "startingOffsetsByTimestamp": json.dumps({"t": {"0": hours[1], "1": hours[3]}}),
        "endingOffsetsByTimestamp": json.dumps({"t": {"0": hours[2], "2": hours[2]}}),
    }
    tasks = NsqReader(options(nsqd, **given)).partitions()
    ranges = sorted((r.partition, r.start, r.end) for task in tasks for r in task.ranges)  # type: ignore[attr-defined]
    assert ranges == [(0, 11, 21), (2, 1, 21)], "partition 1 has nothing since"

    with pytest.raises(OptionError, match=r"t', 127.*/1, ends at 31 and has nothing stored at or after") as caught:
        NsqReader(options(nsqd, **given, startingOffsetsByTimestampStrategy="error")).partitions()
    assert caught.value.option == "startingOffsetsByTimestampStrategy"
    late = options(nsqd, startingTimestamp=str(hours[3]), startingOffsetsByTimestampStrategy="error")
    with pytest.raises(OptionError, match="latest starts at its end"):
        NsqReader(late).partitions()
    end = first_end(NsqStreamReader(options(nsqd, startingOffsetsByTimestamp=given["startingOffsetsByTimestamp"])))
    assert [end["_from"]["t"][f"{log.partition}/{log.log_id}"] for log in logs] == [11, 31, 1]


def test_assigned_partitions_alone(nsqd):
    logs = nsqd.logs["t"] = [FakeLog(partition=number) for number in range(3)]
    for log in logs:
        log.append(numbered(0, 10))
    nsqd.topic("u", numbered(0, 10))
    chosen = SourceOptions.parse({"nsqd": nsqd.address, "assign": '{"t": [0, 2]}'})
    (task,) = NsqReader(chosen).partitions()
    assert [(r.topic, r.partition) for r in task.ranges] == [("t", 0), ("t", 2)]  # type: ignore[attr-defined]
    reader = NsqStreamReader(chosen)
    end = first_end(reader)
    assert set(end["t"]) == {f"{log.partition}/{log.log_id}" for log in (logs[0], logs[2])}
    for read in (lambda options: NsqReader(options).partitions(), lambda options: first_end(NsqStreamReader(options))):
        with pytest.raises(OptionError, match=r"topic 't' has no partition 7; there is 127.*/0 \(1 to 11, exclusive\)"):
            read(SourceOptions.parse({"nsqd": nsqd.address, "assign": '{"t": [7]}'}))

    other = {"nsqd": nsqd.address, "assign": '{"t": [2], "u": [0]}'}
    for prepare in (True, False):
        strict = NsqStreamReader(SourceOptions.parse(other))
        lenient = NsqStreamReader(SourceOptions.parse({**other, "failOnDataLoss": "false"}))
        if prepare:
            strict.prepareForTriggerAvailableNow()
            lenient.prepareForTriggerAvailableNow()
        with pytest.raises(DataLost, match="the options leave it out"):
            strict.latestOffset(end, ALL)
        after = lenient.latestOffset(end, ALL)
        assert set(after) >= {"t", "u"} and set(after["t"]) == {f"2/{logs[2].log_id}"}


@pytest.mark.parametrize("is_available_now", [True, False])
def test_a_channel_and_only_some_partitions(nsqd, is_available_now, caplog):
    """The channel would count what is never read, and keep it for good."""
    logs = nsqd.logs["t"] = [FakeLog(partition=number) for number in range(3)]
    for log in logs:
        log.append(numbered(0, 10))

    def begin(partitions: str, **more: str) -> NsqStreamReader:
        given = {"nsqd": nsqd.address, "assign": f'{{"t": {partitions}}}', **more}
        reader = NsqStreamReader(SourceOptions.parse(given))
        if is_available_now:
            reader.prepareForTriggerAvailableNow()
        return reader

    end = first_end(begin("[0, 2]"))
    for start in ({}, end):
        with pytest.raises(OptionError, match=r"leaves out partition 1 of topic 't'.*: assign these as well") as caught:
            begin("[0, 2]", channel="c").latestOffset(start, ALL)
        assert caught.value.option == "channel"
    assert [log.channels for log in logs] == [{}, {}, {}]
    NsqReader(SourceOptions.parse({"nsqd": nsqd.address, "assign": '{"t": [0]}', "channel": "c"})).partitions()

    reader = begin("[0, 1, 2]", channel="c")
    end = first_end(reader)
    assert [log.channels for log in logs] == [{"c": 1}] * 3
    logs.append(FakeLog(partition=3))
    for _ in range(2):
        end = reader.latestOffset(end, ALL)
    told = [one.getMessage() for one in caplog.records if "assign leaves out partition 3" in one.getMessage()]
    assert len(told) == (0 if is_available_now else 1), "a query that runs goes on"


def test_several_nsqds_and_topics(nsqd):
    with FakeNsqd() as other:
        nsqd.topic("t", numbered(0, 10))
        nsqd.topic("u", numbered(0, 3))
        other.topic("t", numbered(0, 5))
        reader = NsqReader(options(nsqd, other, topics="t,u"))
        (task,) = reader.partitions()
        rows = [row for batch in reader.read(task) for row in batch.to_pylist()]
        found = {(row["topic"], row["nsqd"]): 0 for row in rows}
        for row in rows:
            found[row["topic"], row["nsqd"]] += 1
        assert found == {("t", nsqd.address): 10, ("t", other.address): 5, ("u", nsqd.address): 3}


def test_a_topic_nobody_has(nsqd):
    with pytest.raises(NsqdError, match=r"no nsqd of .* has topic 't'"):
        NsqReader(options(nsqd)).partitions()


def test_what_spark_sends_when_there_is_nothing(nsqd):
    nsqd.topic("t", numbered(0, 5))
    reader = NsqReader(options(nsqd, startingOffsets='{"t": {"0": 6}}'))
    assert reader.partitions() == []
    assert list(reader.read(InputPartition(None))) == []


def test_a_start_that_retention_removed(nsqd):
    nsqd.topic("t", numbered(1, 101), batch=10).trim(51)
    given = {"startingOffsets": '{"t": {"0": 13}}'}
    with pytest.raises(DataLost, match=r"messages 13 to 51 \(exclusive\).*retention.*failOnDataLoss=false"):
        NsqReader(options(nsqd, **given)).partitions()
    reader = NsqReader(options(nsqd, failOnDataLoss="false", **given))
    assert offsets_read(reader, reader.partitions()) == list(range(51, 101))


def test_numbers_beyond_the_end(nsqd):
    nsqd.topic("t", numbered(1, 101), batch=10).trim(51)
    there = rf"t {nsqd.address}/0 has no 200 yet; there is {nsqd.address}/0 \(51 to 101, exclusive\)"
    for option in ("startingOffsets", "endingOffsets"):
        with pytest.raises(OptionError, match=there) as caught:
            NsqReader(options(nsqd, **{option: '{"t": {"0": 200}}'})).partitions()
        assert caught.value.option == option
    with pytest.raises(OptionError, match=there):
        first_end(stream(nsqd, startingOffsets='{"t": {"0": 200}}'))
    lenient = {"failOnDataLoss": "false", "startingOffsets": '{"t": {"0": 95}}', "endingOffsets": '{"t": {"0": 200}}'}
    reader = NsqReader(options(nsqd, **lenient))
    assert offsets_read(reader, reader.partitions()) == list(range(95, 101))
    late = stream(nsqd, failOnDataLoss="false", startingOffsets='{"t": {"0": 200}}')
    assert at(first_end(late), nsqd) == 101
    with pytest.raises(OptionError, match="-2 is the beginning"):
        NsqReader(options(nsqd, endingOffsets='{"t": {"0": -2}}')).partitions()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"startingOffsets": '{"t": {"0": 91}}'},
        {"startingOffsets": '{"t": {"0": -1}}'},
        {"startingTimestamp": "1800000000000"},
        {"startingOffsetsByTimestamp": '{"t": {"0": 1800000000000}}'},
    ],
)
def test_a_batch_leaves_every_channel_as_it_is(nsqd, given):
    """The same options serve a stream: moved by a look at the end, its channel would let go what it has not read."""
    log = nsqd.topic("t", numbered(1, 101))
    log.channels["archive"] = 42
    for channel in ("archive", "nobody"):
        NsqReader(options(nsqd, channel=channel, **given)).partitions()
    assert log.channels == {"archive": 42}
    assert nsqd.count("CURSOR") == 0


def test_a_batch_cannot_begin_where_a_channel_stands(nsqd):
    nsqd.topic("t", numbered(1, 101)).channels["archive"] = 42
    with pytest.raises(OptionError, match=r"a batch read creates none: use spark\.readStream") as caught:
        NsqReader(options(nsqd, channel="archive", startingOffsets="cursor"))
    assert caught.value.option == "startingOffsets"
    since = options(nsqd, channel="archive", startingOffsets="cursor", startingTimestamp="0")
    reader = NsqReader(since)
    assert len(offsets_read(reader, reader.partitions())) == 100, "a time overrides it"


HOUR_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    ("given", "option", "words"),
    [
        (
            {"startingOffsets": '{"t": {"0": 1, "1": 9}}', "endingOffsets": '{"t": {"0": 3, "1": 3}}'},
            "endingOffsets",
            r"endingOffsets='3' is not allowed; topic 't', 127\.0\.0\.1:\d+/1: startingOffsets is behind it, 9$",
        ),
        (
            {
                "startingOffsetsByTimestamp": f'{{"t": {{"1": {HOUR_MS}}}}}',
                "endingOffsetsByTimestamp": f'{{"t": {{"1": {HOUR_MS - 1}}}}}',
            },
            "endingOffsetsByTimestamp",
            rf"{HOUR_MS - 1} ms since 1970.*'t', .*/1: startingOffsetsByTimestamp is behind it, {HOUR_MS} ms since",
        ),
        (
            {"startingTimestamp": str(HOUR_MS), "endingOffsetsByTimestamp": f'{{"t": {{"1": {HOUR_MS - 1}}}}}'},
            "endingOffsetsByTimestamp",
            rf"/1: startingTimestamp is behind it, {HOUR_MS} ms since 1970",
        ),
        (
            {"startingTimestamp": str(HOUR_MS), "endingTimestamp": "2023-11-14T22:13:19.999999Z"},
            "endingTimestamp",
            rf"'{HOUR_MS - 1}\.999 ms since 1970' is not allowed; startingTimestamp is later, {HOUR_MS} ms since 1970",
        ),
    ],
)
def test_an_end_before_its_start(nsqd, given, option, words):
    nsqd.logs["t"] = [FakeLog(partition=number) for number in range(2)]
    for log in nsqd.logs["t"]:
        log.append(numbered(0, 10), HOUR_MS * 1_000_000)
    with pytest.raises(OptionError, match=words) as caught:
        NsqReader(options(nsqd, **given)).partitions()
    assert caught.value.option == option


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ({"startingOffsets": '{"t": {"0": 60}}', "endingOffsets": '{"t": {"0": 60}}'}, []),
        ({"startingOffsets": '{"t": {"0": 1}}', "endingOffsets": '{"t": {"0": 0}}', "failOnDataLoss": "false"}, []),
        ({"endingOffsets": '{"t": {"0": 20}}'}, []),
        ({"startingOffsets": "earliest", "endingOffsets": '{"t": {"0": 53}}'}, [51, 52]),
        ({"startingOffsets": '{"t": {"0": -2}}', "endingOffsets": '{"t": {"0": 20}}'}, []),
        ({"startingOffsets": '{"t": {"0": 99}}', "endingOffsets": '{"t": {"0": -1}}'}, [99, 100]),
        ({"startingTimestamp": str(HOUR_MS), "endingTimestamp": str(HOUR_MS)}, []),
        ({"startingTimestamp": str(HOUR_MS + 1), "endingOffsets": '{"t": {"0": 60}}'}, []),
        ({"startingOffsets": '{"t": {"0": 99}}', "endingTimestamp": "1"}, []),
    ],
)
def test_ranges_that_are_empty_and_not_reversed(nsqd, given, rows):
    log = nsqd.topic("t")
    log.append(numbered(1, 51), HOUR_MS * 1_000_000)
    log.append(numbered(51, 101), HOUR_MS * 1_000_000)
    log.trim(51)
    reader = NsqReader(options(nsqd, **given))
    assert offsets_read(reader, reader.partitions()) == rows


@pytest.mark.parametrize("lenient", ["true", "false"])
@pytest.mark.parametrize("option", ["startingOffsets", "endingOffsets"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ('{"tt": {"0": 1}}', "there is no topic 'tt' to read from; there is t, u$"),
        ('{"t": {"1": 1}}', r"topic 't' has no '1'; there is 127.0.0.1:\d+/0 \(1 to 101, exclusive\)$"),
        (
            '{"u": {"elsewhere:4150/0": 1}}',
            r"topic 'u' has no 'elsewhere:4150/0'; there is .*/0 \(1 to 1, exclusive\)",
        ),
    ],
)
def test_offsets_of_what_does_not_exist(nsqd, given, words, option, lenient):
    """A typo must not read everything from the beginning, also where losses are forgiven."""
    nsqd.topic("t", numbered(1, 101))
    nsqd.topic("u")
    chosen = options(nsqd, topics="t,u", failOnDataLoss=lenient, **{option: given})
    with pytest.raises(OptionError, match=words):
        NsqReader(chosen).partitions()
    if option == "startingOffsets":
        reader = NsqStreamReader(chosen)
        with pytest.raises(OptionError, match=words):
            first_end(reader)
        reader.prepareForTriggerAvailableNow()
        with pytest.raises(OptionError, match=words):
            first_end(reader)


def test_an_end_by_time_while_publishing_goes_on(nsqd):
    """What came since the first survey is older than the end, and no message is missing."""
    log = nsqd.topic("t", numbered(1, 101))
    reader = NsqReader(options(nsqd, endingTimestamp="1900000000000"))
    look, looks = Surveyor.look, []

    def publish_in_between(self, *args, **kwargs):
        looks.append(1)
        if len(looks) == 2:
            log.append(numbered(101, 111))
        return look(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Surveyor, "look", publish_in_between)
        tasks = reader.partitions()
    assert offsets_read(reader, tasks) == list(range(1, 111))


def test_an_original_nsqd_is_named_as_such(nsqd):
    nsqd.fail("OFFSETS", "E_INVALID invalid command OFFSETS")
    with pytest.raises(NsqdError, match="only FlintMQ's nsqd can"):
        NsqReader(options(nsqd)).partitions()


# -- failures while reading --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", ["cut", "close", "flip", "heartbeat", "E_STALE_EPOCH 1", "E_OFFSET_OUT_OF_RANGE x", "E_FETCH_FAILED y"]
)
def test_reading_goes_on_after_a_failure_without_repeating(nsqd, how):
    nsqd.topic("t", numbered(1, 3001, 100), batch=100)
    nsqd.fail("FETCH", "", "", how, "", how, how)
    reader = NsqReader(options(nsqd, fetchMaxBytes="16KiB", batchRows="250"))
    assert offsets_read(reader, reader.partitions()) == list(range(1, 3001))


def test_an_nsqd_that_restarts_between_two_tasks(nsqd):
    nsqd.topic("t", numbered(1, 101))
    reader = NsqReader(options(nsqd))
    for _ in range(3):
        assert offsets_read(reader, reader.partitions()) == list(range(1, 101))
        nsqd.disconnect()


def test_connections_are_used_again(nsqd):
    nsqd.topic("t", numbered(1, 101))
    reader = NsqReader(options(nsqd))
    for _ in range(5):
        offsets_read(reader, reader.partitions())
    assert nsqd.connection_count == 1


def test_a_reader_that_is_left_early_leaves_no_answer_behind(nsqd):
    nsqd.topic("t", numbered(1, 10_001), batch=100)
    reader = NsqReader(options(nsqd, fetchMaxBytes="4KiB", batchRows="100"))
    (task,) = reader.partitions()
    batches = reader.read(task)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert offsets_read(reader, [task]) == list(range(1, 10_001))


def test_retries_end(nsqd):
    nsqd.topic("t", numbered(1, 101))
    reader = NsqReader(options(nsqd, retries="2"))
    tasks = reader.partitions()
    nsqd.fail("FETCH", *["close"] * 3)
    with pytest.raises(ConnectionFailed, match="closed by nsqd"):
        offsets_read(reader, tasks)
    nsqd.fail("FETCH", *["flip"] * 3)
    with pytest.raises(RemoteProtocolError, match=r"damaged batches for t .* from 1: the batch behind the start: CRC"):
        offsets_read(reader, tasks)


def test_an_error_that_will_not_go_away_is_not_retried(nsqd):
    nsqd.topic("t", numbered(1, 101))
    reader = NsqReader(options(nsqd))
    tasks = reader.partitions()
    nsqd.fail("FETCH", "E_UNAUTHORIZED no")
    before = nsqd.count("FETCH")
    with pytest.raises(NsqdError, match="E_UNAUTHORIZED"):
        offsets_read(reader, tasks)
    assert nsqd.count("FETCH") == before + 1


def test_a_log_that_does_not_move(nsqd):
    log = nsqd.topic("t", numbered(1, 101))
    reader = NsqReader(options(nsqd, retries="1"))
    tasks = reader.partitions()
    setattr(log, "fetch", lambda start, _end, _bytes_max: start.to_bytes(8, "big"))  # noqa: B010
    with pytest.raises(RemoteProtocolError, match="does not get beyond 1"):
        offsets_read(reader, tasks)


def test_damage_that_nsqd_set_aside(nsqd):
    log = nsqd.topic("t", numbered(1, 101), batch=10)
    del log.batches[3]
    reader = NsqReader(options(nsqd))
    with pytest.raises(DataLost, match=r"31 to 41 \(exclusive\).*damaged"):
        offsets_read(reader, reader.partitions())
    reader = NsqReader(options(nsqd, failOnDataLoss="false"))
    assert offsets_read(reader, reader.partitions()) == [*range(1, 31), *range(41, 101)]


def test_loss_between_planning_and_reading(nsqd):
    log = nsqd.topic("t", numbered(1, 101), batch=10)
    strict, lenient = (
        NsqReader(options(nsqd, retries="1")),
        NsqReader(options(nsqd, failOnDataLoss="false", retries="1")),
    )
    tasks = strict.partitions()

    log.trim(41)
    with pytest.raises(DataLost, match="1 to 41"):
        offsets_read(strict, tasks)
    assert offsets_read(lenient, tasks) == list(range(41, 101))

    log.batches.pop()
    log.end = 91
    with pytest.raises(DataLost, match="91 to 101"):
        log.trim(1)
        offsets_read(strict, tasks)
    log.trim(41)
    assert offsets_read(lenient, tasks) == list(range(41, 91))

    nsqd.logs["t"] = [FakeLog("00000000000000b2")]
    nsqd.topic("t", numbered(1, 500))
    with pytest.raises(DataLost, match="created again"):
        offsets_read(strict, tasks)
    assert offsets_read(lenient, tasks) == []

    del nsqd.logs["t"]
    with pytest.raises(DataLost, match="no longer exists"):
        offsets_read(strict, tasks)
    assert offsets_read(lenient, tasks) == []


# -- streams -----------------------------------------------------------------------------------------------------------


def stream(nsqd: FakeNsqd, **more: str) -> NsqStreamReader:
    return NsqStreamReader(options(nsqd, **more))


def test_readers_survive_pickling(nsqd):
    nsqd.topic("t", numbered(1, 101))
    for dumps in (pickle.dumps, cloudpickle.dumps):
        reader = pickle.loads(dumps(stream(nsqd)))
        start = reader.initialOffset()
        end = reader.latestOffset(start, ALL)
        again = pickle.loads(dumps(reader))
        assert offsets_read(again, again.partitions(start, end)) == list(range(1, 101))
    assert nsqd.connection_count > 0


def test_building_a_reader_opens_nothing():
    reader = NsqStreamReader(SourceOptions.parse({"nsqd": "192.0.2.1:4150", "topic": "t"}))
    assert isinstance(reader.getDefaultReadLimit(), ReadMaxRows)
    NsqReader(SourceOptions.parse({"lookupd": "192.0.2.1:4161", "topic": "t"}))


def test_a_stream_from_the_beginning(nsqd):
    nsqd.topic("t", numbered(1, 101))
    reader = stream(nsqd)
    start = reader.initialOffset()
    assert text(start) == text(reader.initialOffset()) == "{}"
    end = reader.latestOffset(start, ALL)
    assert at(end, nsqd) == 101
    assert offsets_read(reader, reader.partitions(start, end)) == list(range(1, 101))
    assert text(reader.latestOffset(end, ALL)) == text(end), "nothing new must be the very same text"
    assert reader.partitions(end, end) == []
    assert at(reader.reportLatestOffset() or {}, nsqd) == 101


def test_a_micro_batch_replayed_is_the_same(nsqd):
    nsqd.topic("t", numbered(1, 200_001), batch=5000)
    reader = stream(nsqd, maxMessagesPerTask="30000")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadMaxRows(123_456))
    tasks = reader.partitions(start, end)
    nsqd.topic("t", numbered(1, 5000))
    again = stream(nsqd, maxMessagesPerTask="30000")
    replayed = again.partitions(json.loads(text(start)), json.loads(text(end)))
    assert replayed == tasks
    assert offsets_read(again, replayed) == list(range(1, 123_457))


def test_limits(nsqd):
    nsqd.topic("t", numbered(10_000, 20_000, 66))
    reader = stream(nsqd, maxMessagesPerTrigger="300")
    start = reader.initialOffset()
    assert reader.getDefaultReadLimit() == ReadMaxRows(300)
    assert at(reader.latestOffset(start, ReadMaxRows(300)), nsqd) == 301
    assert at(reader.latestOffset(start, ALL), nsqd) == 10_001, "a trigger that wants all gets all"

    by_bytes = stream(nsqd, maxMessagesPerTrigger="0", maxBytesPerTrigger="10500")
    limit = by_bytes.getDefaultReadLimit()
    assert limit == ReadMaxBytes(10_500)
    taken = at(by_bytes.latestOffset(start, limit), nsqd) - 1
    assert 90 <= taken <= 105

    both = stream(nsqd, maxMessagesPerTrigger="50", maxBytesPerTrigger="10500")
    assert at(both.latestOffset(start, both.getDefaultReadLimit()), nsqd) == 51
    assert stream(nsqd, maxMessagesPerTrigger="0").getDefaultReadLimit() == ALL


def test_min_messages_and_their_delay(nsqd):
    nsqd.topic("t", numbered(1, 11))
    clock = ManualClock()
    given = options(nsqd, minMessagesPerTrigger="100", maxTriggerDelay="60s", maxMessagesPerTrigger="0")
    reader = NsqStreamReader(given, clock)
    limit = reader.getDefaultReadLimit()
    here = reader.latestOffset(reader.initialOffset(), limit)
    assert at(here, nsqd) == 1, "the first micro-batch records where the query starts, and takes nothing"
    clock.advance(59)
    assert text(reader.latestOffset(here, limit)) == text(here)
    clock.advance(2)
    end = reader.latestOffset(here, limit)
    assert at(end, nsqd) == 11
    nsqd.topic("t", numbered(1, 51))
    assert text(reader.latestOffset(end, limit)) == text(end), "the delay begins anew"
    nsqd.topic("t", numbered(1, 51))
    assert at(reader.latestOffset(end, limit), nsqd) == 111


def test_available_now_ends_where_the_log_ended(nsqd):
    nsqd.topic("t", numbered(1, 101))
    reader = stream(nsqd, maxMessagesPerTrigger="40", minMessagesPerTrigger="40")
    reader.prepareForTriggerAvailableNow()
    here, ends = reader.initialOffset(), []
    nsqd.topic("t", numbered(1, 1000))
    nsqd.topic("other", numbered(1, 10))
    for _ in range(5):
        here = reader.latestOffset(here, reader.getDefaultReadLimit())
        ends.append(at(here, nsqd))
    assert ends == [41, 81, 101, 101, 101]


def test_available_now_with_an_nsqd_that_is_away(nsqd):
    with FakeNsqd() as other:
        other.topic("t", numbered(1, 11))
        reader = NsqStreamReader(options(nsqd, other, retries="2"))
    with pytest.raises(ConnectionFailed):
        reader.prepareForTriggerAvailableNow()


def test_a_partition_that_appears_later(nsqd):
    reader = stream(nsqd, startingOffsets="latest", channel="c")
    begun = reader.latestOffset(reader.initialOffset(), ALL)
    assert text(begun) == '{"_log": 3}', "the checkpoint now says that the query has begun"
    assert text(reader.latestOffset(begun, ALL)) == text(begun)
    nsqd.topic("t", numbered(1, 101))
    end = stream(nsqd, startingOffsets="latest", channel="c").latestOffset(begun, ALL)
    assert end["_from"] == {"t": {label(nsqd): 1}}
    assert offsets_read(reader, reader.partitions(begun, end)) == list(range(1, 101))
    assert text(reader.latestOffset(end, ALL)) == text(end)
    nsqd.topic("t", numbered(1, 11))
    assert "_from" not in reader.latestOffset(end, ALL)


def test_available_now_reads_a_partition_that_appeared_since_the_last_run(nsqd):
    first = stream(nsqd)
    begun = first.latestOffset(first.initialOffset(), ALL)
    nsqd.topic("t", numbered(1, 101))
    reader = stream(nsqd, maxMessagesPerTrigger="60")
    reader.prepareForTriggerAvailableNow()
    ends = [begun]
    for _ in range(3):
        ends.append(reader.latestOffset(ends[-1], reader.getDefaultReadLimit()))
    assert [at(end, nsqd) for end in ends[1:]] == [61, 101, 101]


def test_a_log_whose_nsqd_is_asked_no_longer(nsqd):
    """It was taken away for good, and out of the options."""
    with FakeNsqd() as other:
        nsqd.topic("t", numbered(1, 11))
        other.topic("t", numbered(1, 11))
        before = NsqStreamReader(options(nsqd, other))
        here = first_end(before, ReadMaxRows(10))
        assert (at(here, nsqd), at(here, other)) == (6, 6)
    for is_available_now in (True, False):
        strict, lenient = stream(nsqd), stream(nsqd, failOnDataLoss="false")
        if is_available_now:
            strict.prepareForTriggerAvailableNow()
            lenient.prepareForTriggerAvailableNow()
        with pytest.raises(DataLost, match=rf"{other.logs['t'][0].log_id}: messages from 6 are lost"):
            strict.latestOffset(here, ALL)
        end = lenient.latestOffset(here, ALL)
        assert end["t"] == {label(nsqd): 11}, "what is gone for good leaves the offsets"
        assert offsets_read(lenient, lenient.partitions(here, end)) == [6, 7, 8, 9, 10]
        assert text(lenient.latestOffset(end, ALL)) == text(end)


def test_the_first_micro_batch_is_replayed_without_asking_where_it_started(nsqd):
    """Between two attempts retention moved, another partition came, and nsqlookupd forgot one."""
    log = nsqd.topic("t", numbered(1, 101), batch=10)
    given = {"startingOffsets": '{"t": {"0": 21}}'}
    reader = stream(nsqd, **given)
    end = reader.latestOffset(reader.initialOffset(), ReadMaxRows(30))
    tasks = reader.partitions({}, end)
    log.append(numbered(101, 201))
    asked = len(nsqd.asked)
    again = stream(nsqd)
    assert again.partitions(again.initialOffset(), json.loads(text(end))) == tasks
    assert len(nsqd.asked) == asked
    assert offsets_read(again, tasks) == list(range(21, 51))


# -- cursors -----------------------------------------------------------------------------------------------------------


def first_end(reader: NsqStreamReader, limit=ALL) -> dict:
    return reader.latestOffset(reader.initialOffset(), limit)


def entered(reader: NsqStreamReader, nsqd: FakeNsqd) -> int:
    return at(first_end(reader)["_from"], nsqd)


def test_latest_survives_a_crash_before_the_first_micro_batch(nsqd):
    """The query starts anew after the crash: what was published since must not be skipped."""
    log = nsqd.topic("t", numbered(1, 1001))
    given = {"startingOffsets": "latest", "channel": "archive"}
    assert entered(stream(nsqd, **given), nsqd) == 1001
    nsqd.topic("t", numbered(1, 501))
    end = first_end(stream(nsqd, **given))
    assert (at(end["_from"], nsqd), at(end, nsqd)) == (1001, 1501)
    assert log.channels == {"archive": 1001}


def test_latest_without_a_channel_is_refused(nsqd):
    with pytest.raises(OptionError, match="channel"):
        stream(nsqd, startingOffsets="latest")
    nsqd.topic("t", numbered(1, 11))
    assert entered(stream(nsqd, startingOffsets="latest", allowUnsafeLatest="true"), nsqd) == 11


def test_available_now_from_latest_while_publishing_goes_on(nsqd):
    nsqd.topic("t", numbered(1, 101))
    reader = stream(nsqd, startingOffsets="latest", channel="c")
    reader.prepareForTriggerAvailableNow()
    nsqd.topic("t", numbered(1, 11))
    end = first_end(reader)
    assert (at(end["_from"], nsqd), at(end, nsqd)) == (111, 111)
    assert text(reader.latestOffset(end, ALL)) == text(end)


def test_cursor_is_where_the_channel_stands(nsqd):
    log = nsqd.topic("t", numbered(1, 101))
    given = {"startingOffsets": "cursor", "channel": "archive"}
    assert entered(stream(nsqd, **given), nsqd) == 1
    log.channels["archive"] = 42
    assert entered(stream(nsqd, **given), nsqd) == 42


def test_other_starts_hold_the_channel_there(nsqd):
    log = nsqd.topic("t", numbered(1, 101))
    first_end(stream(nsqd, channel="a"))
    first_end(stream(nsqd, channel="b", startingOffsets='{"t": {"0": 33}}'))
    first_end(stream(nsqd, channel="c", startingTimestamp="1800000000000"))
    assert log.channels == {"a": 1, "b": 33, "c": 101}


def test_a_cursor_that_cannot_be_set_at_once(nsqd):
    log = nsqd.topic("t", numbered(1, 101))
    nsqd.fail("CURSOR", "close", "E_SUB_FAILED CURSOR failed", "cut")
    first_end(stream(nsqd, channel="a"))
    assert log.channels == {"a": 1}
    nsqd.fail("CURSOR", "E_BAD_CHANNEL no")
    with pytest.raises(NsqdError, match="E_BAD_CHANNEL"):
        first_end(stream(nsqd, channel="b"))


def test_commit_moves_the_cursor_and_may_repeat_and_fail(nsqd):
    log = nsqd.topic("t", numbered(1, 101))
    reader = stream(nsqd, channel="archive")
    end = first_end(reader, ReadMaxRows(60))
    reader.commit(end)
    assert log.channels == {"archive": 61}
    reader.commit(end)
    reader.commit(reader.initialOffset())
    assert log.channels == {"archive": 61}
    nsqd.fail("CURSOR", "close")
    last = reader.latestOffset(end, ALL)
    reader.commit(last)
    assert log.channels == {"archive": 61}, "a cursor that could not be moved is no reason to stop the query"
    reader.commit(last)
    assert log.channels == {"archive": 101}


def test_two_queries_with_one_channel(nsqd, caplog):
    log = nsqd.topic("t", numbered(1, 101))
    first, second = stream(nsqd, channel="archive"), stream(nsqd, channel="archive")
    ahead = first.latestOffset(first_end(first, ReadMaxRows(60)), ALL)
    first.commit(ahead)
    behind = first_end(second, ReadMaxRows(10))
    for _ in range(4):
        second.commit(behind)
        behind = second.latestOffset(behind, ReadMaxRows(10))
    assert log.channels == {"archive": 101}
    told = [record.message for record in caplog.records if "another query" in record.message]
    assert len(told) == 1 and "channel archive of t" in told[0] and "is at 101 and this query at 21" in told[0]
    caplog.clear()
    for _ in range(3):
        nsqd.topic("t", numbered(1, 11))
        ahead = first.latestOffset(ahead, ALL)
        first.commit(ahead)
    assert not caplog.records, "who is ahead has nothing to be told"


def test_without_a_channel_commit_asks_nothing(nsqd):
    nsqd.topic("t", numbered(1, 101))
    reader = stream(nsqd)
    reader.commit(reader.latestOffset(reader.initialOffset(), ALL))
    assert nsqd.count("CURSOR") == 0


# -- loss and absence in streams ---------------------------------------------------------------------------------------


def test_a_topic_created_anew_is_never_read_in_silence(nsqd):
    nsqd.topic("t", numbered(1, 101))
    strict, lenient = stream(nsqd), stream(nsqd, failOnDataLoss="false")
    here = strict.latestOffset(strict.initialOffset(), ALL)
    nsqd.logs["t"] = [FakeLog("00000000000000b2")]
    nsqd.topic("t", numbered(1, 501))
    with pytest.raises(DataLost, match="messages from 101 are lost: the topic was deleted and created again"):
        strict.latestOffset(here, ALL)
    end = lenient.latestOffset(here, ALL)
    assert offsets_read(lenient, lenient.partitions(here, end)) == list(range(1, 501))


def test_a_deleted_topic(nsqd):
    nsqd.topic("t", numbered(1, 101))
    strict, lenient = stream(nsqd), stream(nsqd, failOnDataLoss="false")
    here = strict.latestOffset(strict.initialOffset(), ALL)
    del nsqd.logs["t"]
    with pytest.raises(DataLost, match=r"no longer exists.*\. Nobody can tell any more .* Set failOnDataLoss=false"):
        strict.latestOffset(here, ALL)
    assert text(lenient.latestOffset(here, ALL)) == '{"_log": 3}', "what is gone for good leaves the offsets"
    now = stream(nsqd)
    now.prepareForTriggerAvailableNow()
    with pytest.raises(DataLost, match="no longer exists"):
        now.latestOffset(here, ALL)


def test_an_emptied_log_goes_on_behind_what_was_thrown_away(nsqd):
    """Its numbers go on, so nothing new is taken for what was there before."""
    log = nsqd.topic("t", numbered(1, 101))
    strict, lenient = stream(nsqd), stream(nsqd, failOnDataLoss="false")
    here = first_end(strict, ReadMaxRows(40))
    done = first_end(lenient)
    log.trim(101)
    assert text(lenient.latestOffset(done, ALL)) == text(done), "who has read everything loses nothing"
    nsqd.topic("t", numbered(101, 111))
    with pytest.raises(DataLost, match=r"41 to 101 \(exclusive\)"):
        strict.latestOffset(here, ALL)
    end = lenient.latestOffset(here, ALL)
    assert offsets_read(lenient, lenient.partitions({**here}, end)) == list(range(101, 111))


def test_clocks_that_step(nsqd):
    """Messages have the times that nsqd's clock showed: nothing but a start or end by time follows from them."""
    log = nsqd.topic("t")
    second_ns = 1_000_000_000
    times_ns = [1_800_000_000 * second_ns, 1_700_000_000 * second_ns, 4_000_000_000 * second_ns]
    for number, time_ns in enumerate(times_ns):
        log.append(numbered(10 * number, 10 * number + 10), time_ns)
    clock = ManualClock()
    reader = NsqStreamReader(options(nsqd), clock)
    end = first_end(reader, ReadMaxRows(25))
    assert offsets_read(reader, reader.partitions({}, end)) == list(range(1, 26))
    clock.now_ns -= 3600 * second_ns
    told = reader.reportLatestOffset()
    assert told is not None
    lag = told["_lag"]["t"][label(nsqd)]
    assert lag == {"messages": 5, "seconds": 0}, "what was stored in the future does not wait since a time to come"
    after = reader.latestOffset(end, ALL)
    assert offsets_read(reader, reader.partitions(end, after)) == list(range(26, 31))
    late = NsqReader(options(nsqd, startingTimestamp="1750000000000"))
    assert offsets_read(late, late.partitions()) == list(range(1, 31)), "all from the first message of that time on"


def test_retention_overtakes_a_slow_query(nsqd):
    log = nsqd.topic("t", numbered(1, 101), batch=10)
    strict, lenient = stream(nsqd), stream(nsqd, failOnDataLoss="false")
    here = strict.latestOffset(strict.initialOffset(), ReadMaxRows(20))
    log.trim(51)
    with pytest.raises(DataLost, match="21 to 51"):
        strict.latestOffset(here, ALL)
    end = lenient.latestOffset(here, ReadMaxRows(10))
    assert at(end, nsqd) == 61
    assert offsets_read(lenient, lenient.partitions(here, end)) == list(range(51, 61))


def test_a_loss_that_is_forgiven_is_told_once_and_where_it_goes_on(nsqd, caplog):
    """By the plan, or by the task that meets it; nobody is told to allow what is allowed."""
    log = nsqd.topic("t", numbered(1, 101), batch=10)
    clock = ManualClock()
    given = options(nsqd, failOnDataLoss="false", minMessagesPerTrigger="45", maxTriggerDelay="60s")
    reader = NsqStreamReader(given, clock)
    here = first_end(reader, ReadMaxRows(20))
    log.trim(61)
    for _ in range(2):
        assert text(reader.latestOffset(here, reader.getDefaultReadLimit())) == text(here), "it waits for more"
    clock.advance(61)
    end = reader.latestOffset(here, reader.getDefaultReadLimit())
    tasks = pickle.loads(pickle.dumps(reader.partitions(here, end)))
    log.trim(71)
    assert offsets_read(reader, tasks) == list(range(71, 101))
    told = [record.message for record in caplog.records if "are lost" in record.message]
    assert [re.sub(".*: messages ", "", each) for each in told] == [
        f"{start} to {end} (exclusive) are lost: retention has removed everything below {end}; going on at {end}"
        for start, end in ((21, 61), (61, 71))
    ]
    assert "failOnDataLoss" not in caplog.text


def test_words_of_a_loss_that_is_forgiven():
    away = DataLost("t", "n:1/0", 6, None, GONE)
    assert away.forgiven() == f"topic 't', n:1/0: messages from 6 are lost: {GONE}; going on without that log"
    unseen = DataLost("t", "n:1/0", 6, 11, f"{TAKEN_BACK_UNSEEN}; the log has ended at 6")
    assert unseen.forgiven(6).endswith(
        "going on at 6; a later run with this checkpointLocation may skip what is stored up to 11: begin with a new one"
    )


def test_an_end_that_went_back_is_waited_for(nsqd):
    log = nsqd.topic("t", numbered(1, 101), batch=10)
    clock = ManualClock()
    strict = NsqStreamReader(options(nsqd), clock)
    lenient = NsqStreamReader(options(nsqd, failOnDataLoss="false"), clock)
    here = strict.latestOffset(strict.initialOffset(), ALL)
    log.end, kept = 81, log.batches[:]
    del log.batches[8:]
    for reader in (strict, lenient):
        assert text(reader.latestOffset(here, ALL)) == text(here)
    log.end, log.batches = 101, kept
    assert text(strict.latestOffset(here, ALL)) == text(here)
    log.end = 81
    del log.batches[8:]
    assert text(strict.latestOffset(here, ALL)) == text(here)
    clock.advance(301)
    with pytest.raises(DataLost, match="81 to 101"):
        strict.latestOffset(here, ALL)
    back = lenient.latestOffset(here, ALL)
    assert at(back, nsqd) == 81
    assert lenient.partitions(here, back) == []


def taken_back(log: FakeLog, end: int, new: int) -> None:
    """Let a log have what a copy of before had, and ``new`` messages that were published since."""
    assert any(batch[1] == end for batch in log.batches)
    log.batches = [batch for batch in log.batches if batch[1] <= end]
    log.end = end
    if new:
        log.append(numbered(1, new + 1))


def read_on(reader: NsqStreamReader, here: dict) -> tuple[list[int], dict]:
    """What a query reads until there is nothing new, and where it is then."""
    found: list[int] = []
    while text(end := reader.latestOffset(here, reader.getDefaultReadLimit())) != text(here):
        found += offsets_read(reader, reader.partitions(here, end))
        here = end
    return found, here


def test_messages_that_were_taken_back_are_not_forgotten_when_their_numbers_are_given_again(nsqd, caplog):
    """The data directory was restored from a backup: what is published then is neither skipped nor taken for old."""
    log = nsqd.topic("t", numbered(1, 101), batch=10)
    strict, lenient = stream(nsqd), stream(nsqd, failOnDataLoss="false")
    here = first_end(strict)
    taken_back(log, 81, 5)
    for reader in (strict, lenient):
        assert text(reader.latestOffset(here, ALL)) == text(here)
    words = "t %s/0 ends at 86, and was read up to 101: messages were taken back (restored from a backup?)"
    assert sum(record.message.startswith(words % nsqd.address) for record in caplog.records) == 2
    nsqd.topic("t", numbered(1, 16))
    assert text(strict.latestOffset(here, ALL)) == text(here), "as far as it was, and there is nothing new to read"
    nsqd.topic("t", numbered(1, 11))
    for _ in range(2):
        with pytest.raises(DataLost, match=r"86 to 101 \(exclusive\) are lost: messages were taken back"):
            strict.latestOffset(here, ALL)
    found, end = read_on(lenient, here)
    assert found == list(range(86, 111)), "from where the log was seen to end"
    assert "the log has ended at 86; going on at 86" in caplog.text
    nsqd.topic("t", numbered(1, 6))
    assert read_on(lenient, end)[0] == list(range(111, 116))


@pytest.mark.parametrize("new", [0, 5, 20], ids=["nothing new", "less", "as much"])
def test_available_now_and_messages_that_were_taken_back(nsqd, new):
    log = nsqd.topic("t", numbered(1, 101), batch=10)
    here = first_end(stream(nsqd))
    taken_back(log, 71, new)
    strict, lenient = stream(nsqd, retries="2"), stream(nsqd, retries="2", failOnDataLoss="false")
    strict.prepareForTriggerAvailableNow()
    lenient.prepareForTriggerAvailableNow()
    asked = nsqd.count("OFFSETS")
    with pytest.raises(DataLost, match=rf"{71 + new} to 101 \(exclusive\) are lost: messages were taken back"):
        strict.latestOffset(here, strict.getDefaultReadLimit())
    assert nsqd.count("OFFSETS") == asked + 3, "for the times, and as often as the retries allow"
    found, here = read_on(lenient, here)
    assert found == []
    assert at(here, nsqd) == 71 + new
    nsqd.topic("t", numbered(1, 61))
    later = stream(nsqd)
    later.prepareForTriggerAvailableNow()
    assert read_on(later, here)[0] == list(range(71 + new, 131 + new)), "what is published next is read"


def test_available_now_and_a_log_that_grows_past_what_was_taken_back_while_it_is_looked_at(nsqd):
    log = nsqd.topic("t", numbered(1, 101), batch=10)
    here = first_end(stream(nsqd))
    taken_back(log, 71, 5)
    strict, lenient = stream(nsqd), stream(nsqd, failOnDataLoss="false")
    for reader in (strict, lenient):
        reader.prepareForTriggerAvailableNow()
    nsqd.topic("t", numbered(1, 101))
    with pytest.raises(DataLost, match=r"76 to 101"):
        strict.latestOffset(here, strict.getDefaultReadLimit())
    _, end = read_on(lenient, here)
    assert at(end, nsqd) == 76, "up to what there was when the run began"
    later = stream(nsqd)
    later.prepareForTriggerAvailableNow()
    assert read_on(later, end)[0] == list(range(76, 176))


def test_many_logs_that_were_taken_back_are_waited_for_together(nsqd):
    topics = [f"t{number}" for number in range(6)]
    given = {"topics": ",".join(topics), "retries": "3", "failOnDataLoss": "false"}
    for topic in topics:
        nsqd.topic(topic, numbered(1, 101), batch=10)
    here = first_end(stream(nsqd, **given))
    for topic in topics:
        taken_back(nsqd.logs[topic][0], 51, 0)
    reader = stream(nsqd, **given)
    reader.prepareForTriggerAvailableNow()
    asked = nsqd.count("OFFSETS")
    end = reader.latestOffset(here, reader.getDefaultReadLimit())
    assert {at(end, nsqd, topic) for topic in topics} == {51}
    assert nsqd.count("OFFSETS") == asked + 4 * len(topics)


def test_later_times_in_what_was_read_are_those_of_a_clock_that_was_set_back(nsqd):
    """A new leader has kept more of the log: messages from before the clock was set back are there again."""
    log = nsqd.topic("t", numbered(1, 11), batch=10)
    log.append(numbered(1, 11), 1_700_000_009_000_000_000)
    log.append(numbered(1, 11))
    before = log.batches[:]
    log.trim(21)
    here = first_end(stream(nsqd))
    assert here["_times"] == {"t": {label(nsqd): 1_700_000_000_000_000_000}}
    log.start, log.batches = 1, before
    for reader in (stream(nsqd), stream(nsqd)):
        assert text(reader.latestOffset(here, ALL)) == text(here)
    log.append(numbered(1, 6), 1_700_000_010_000_000_000)
    assert read_on(stream(nsqd), here)[0] == list(range(31, 36))


def test_a_look_that_is_dropped_has_compared_nothing(nsqd, monkeypatch):
    """A partition has no leader at first: nsqd is asked anew, and for the times as well."""
    log = nsqd.topic("t", numbered(1, 101), batch=10)
    nsqd.topic("u", numbered(1, 11))
    given = {"topics": "t,u", "retries": "5"}
    here = first_end(stream(nsqd, **given))
    taken_back(log, 81, 0)
    log.append(numbered(1, 41), 1_700_000_001_000_000_000)
    reader = stream(nsqd, **given)
    reader.prepareForTriggerAvailableNow()
    look_once = reader._surveyor._look_once
    dropped: list[object] = []

    def unled_at_first(*arguments):
        survey = look_once(*arguments)
        if not dropped:
            dropped.append(survey)
            survey.unled[PartitionKey("u", 1, "00000000000000aa")] = "no node leads it"
        return survey

    monkeypatch.setattr(reader._surveyor, "_look_once", unled_at_first)
    with pytest.raises(DataLost, match=r"81 to 101 \(exclusive\) are lost: messages were taken back"):
        reader.latestOffset(here, reader.getDefaultReadLimit())
    assert dropped


def test_an_nsqd_of_a_release_before_that_tells_no_times(nsqd):
    """What was read meanwhile is later than the last time that was told, and nothing was taken back."""
    log = nsqd.topic("t", numbered(1, 101), batch=10)
    here = first_end(stream(nsqd))
    nsqd.tells_max_timestamp = False
    assert text(stream(nsqd).latestOffset(here, ALL)) == text(here), "the time is of use as long as nothing is read"
    log.append(numbered(1, 11), 1_700_000_001_000_000_000)
    end = stream(nsqd).latestOffset(here, ALL)
    assert (at(end, nsqd), end.get("_times")) == (111, None)
    nsqd.tells_max_timestamp = True
    assert text(stream(nsqd).latestOffset(end, ALL)) == text(end)
    log.append(numbered(1, 11), 1_700_000_000_500_000_000)
    end = stream(nsqd).latestOffset(end, ALL)
    assert (at(end, nsqd), end["_times"]["t"][label(nsqd)]) == (121, 1_700_000_001_000_000_000), "the latest of all"


@pytest.mark.parametrize("trigger", ["stream", "availableNow"])
def test_a_log_that_has_grown_past_what_was_taken_back_before_anybody_looks(nsqd, trigger):
    log = nsqd.topic("t", numbered(1, 101), batch=10)
    here = first_end(stream(nsqd))
    taken_back(log, 81, 0)
    log.append(numbered(1, 41), 1_700_000_001_000_000_000)
    strict, lenient = stream(nsqd), stream(nsqd, failOnDataLoss="false")
    for reader in (strict, lenient) if trigger == "availableNow" else ():
        reader.prepareForTriggerAvailableNow()
    with pytest.raises(DataLost, match=r"81 to 101 \(exclusive\) are lost: messages were taken back"):
        strict.latestOffset(here, strict.getDefaultReadLimit())
    found, end = read_on(lenient, here)
    assert found == list(range(81, 121)), "each that was published since, once"
    assert read_on(stream(nsqd), end) == ([], end), "and nothing is told of it again"


def test_a_channel_that_begins_behind_the_end_that_was_seen(nsqd, monkeypatch):
    """Publishing goes on between asking where a log ends and creating a channel there: nothing was taken back."""
    log = nsqd.topic("t", numbered(1, 101))
    reader = stream(nsqd, startingOffsets="latest", channel="c", retries="0")
    ask, meanwhile = reader._surveyor.look, [numbered(1, 11)]

    def look(*arguments, **named):
        found = ask(*arguments, **named)
        while meanwhile:
            log.append(meanwhile.pop())
        return found

    monkeypatch.setattr(reader._surveyor, "look", look)
    here = first_end(reader)
    assert (at(here["_from"], nsqd), at(here, nsqd)) == (111, 111)
    nsqd.topic("t", numbered(1, 6))
    end = reader.latestOffset(here, ALL)
    assert offsets_read(reader, reader.partitions(here, end)) == list(range(111, 116))


def test_an_nsqd_that_is_away_does_not_hold_up_the_others(nsqd):
    other = FakeNsqd()
    nsqd.topic("t", numbered(1, 101))
    other.topic("t", numbered(1, 51))
    clock = ManualClock()
    reader = NsqStreamReader(options(nsqd, other), clock)
    start = first_end(reader, ReadMaxRows(30))
    other.close()
    end = reader.latestOffset(start, ALL)
    assert (at(end, nsqd), at(end, other)) == (101, at(start, other))
    clock.advance(299)
    reader.latestOffset(end, ALL)
    clock.advance(2)
    with pytest.raises(DataLost, match=r"nsqd 127\.0\.0\.1:\d+ is away"):
        reader.latestOffset(end, ALL)
    patient = NsqStreamReader(options(nsqd, other, failOnDataLoss="false"), clock)
    for _ in range(3):
        assert text(patient.latestOffset(end, ALL)) == text(end)
        clock.advance(1000)


def test_a_wrong_address_is_an_error_at_the_start():
    reader = NsqStreamReader(SourceOptions.parse({"nsqd": "127.0.0.1:1", "topic": "t", "retries": "2"}))
    with pytest.raises(ConnectionFailed, match=r"127\.0\.0\.1:1"):
        first_end(reader)
    lookup = NsqStreamReader(SourceOptions.parse({"lookupd": "127.0.0.1:1", "topic": "t", "retries": "2"}))
    with pytest.raises(DiscoveryError, match="no nsqlookupd answers"):
        first_end(lookup)


# -- who has a log -----------------------------------------------------------------------------------------------------


def moved(log_of: FakeNsqd, to: FakeNsqd) -> None:
    """Another nsqd starts with the data directory."""
    to.logs = log_of.logs
    log_of.logs = {}


def test_the_same_data_directory_at_another_address(nsqd):
    nsqd.topic("t", numbered(1, 101))
    reader = stream(nsqd, channel="c")
    here = first_end(reader, ReadMaxRows(60))
    tasks = reader.partitions({}, here)
    with FakeNsqd() as other:
        moved(nsqd, other)
        nsqd.close()
        # the micro-batch that was not committed is the same, and comes from the new address
        again = NsqStreamReader(options(other, channel="c"))
        assert again.partitions({}, json.loads(text(here))) == tasks
        rows = [row for task in tasks for batch in again.read(task) for row in batch.to_pylist()]
        assert [row["offset"] for row in rows] == list(range(1, 61))
        assert {row["nsqd"] for row in rows} == {other.address}
        end = again.latestOffset(here, ALL)
        assert "_from" not in end
        assert offsets_read(again, again.partitions(here, end)) == list(range(61, 101))
        again.commit(end)
        assert other.logs["t"][0].channels == {"c": 101}
        assert text(again.latestOffset(end, ALL)) == text(end)


def test_a_data_directory_that_moves_in_the_middle_of_a_task(nsqd):
    nsqd.topic("t", numbered(1, 3001, 100), batch=100)
    with FakeNsqd() as other:
        reader = NsqReader(options(nsqd, other, fetchMaxBytes="16KiB", batchRows="250"))
        (task,) = reader.partitions()
        batches = iter(reader.read(task))
        found = next(batches).column("offset").to_pylist()
        moved(nsqd, other)
        nsqd.disconnect()
        for batch in batches:
            found += batch.column("offset").to_pylist()
        assert found == list(range(1, 3001))


@pytest.mark.parametrize("is_batch", [True, False])
def test_two_nsqds_with_one_log(nsqd, is_batch):
    """A copied data directory, or one nsqd with two names: nobody can tell which is right, or it would come twice."""
    nsqd.topic("t", numbered(1, 101))
    with FakeNsqd() as other:
        other.logs = nsqd.logs
        first, second = sorted((nsqd.address, other.address))
        words = f"nsqd {first} and nsqd {second} both have log {nsqd.logs['t'][0].log_id}"
        reader = options(nsqd, other, failOnDataLoss="false")
        with pytest.raises(LogTwice, match=words):
            if is_batch:
                NsqReader(reader).partitions()
            else:
                first_end(NsqStreamReader(reader))


def test_a_checkpoint_of_before_goes_on_and_is_rewritten(nsqd):
    """Releases before named logs by the address of their nsqd; it has another one by now."""
    log = nsqd.topic("t", numbered(1, 101))

    def before(sequence: int) -> dict:
        return {"_log": {"t": {"gone:4150/0": log.log_id}}, "t": {"gone:4150/0": sequence}}

    planned = {"_from": {"t": {"gone:4150/0": 1}}, **before(41)}
    reader = stream(nsqd)
    assert offsets_read(reader, reader.partitions({}, planned)) == list(range(1, 41))
    assert offsets_read(reader, reader.partitions(planned, before(61))) == list(range(41, 61))
    end = reader.latestOffset(before(61), ALL)
    times = {"_times": {"t": {label(nsqd): 1_700_000_000_000_000_000}}}
    assert end == {"_log": 3, "t": {label(nsqd): 101}, **times}
    assert offsets_read(reader, reader.partitions(before(61), end)) == list(range(61, 101))
    assert reader.latestOffset(before(101), ALL) == end, "it is rewritten at once"
    assert reader.partitions(before(101), end) == []
    without_times = {"_log": 2, "t": {label(nsqd): 101}}
    assert stream(nsqd).latestOffset(without_times, ALL) == end


def test_a_checkpoint_of_a_later_release(nsqd):
    with pytest.raises(BadCheckpoint, match="form 4"):
        stream(nsqd).latestOffset({"_log": 4, "t": {"0/00000000000000a1": 5}}, ALL)


def test_an_nsqd_that_stays_away_is_left_behind_by_every_trigger_that_may(nsqd):
    """It does not answer, so it may come back: it keeps its place in the offsets."""
    with FakeNsqd() as other:
        nsqd.topic("t", numbered(1, 11))
        other.topic("t", numbered(1, 11))
        here = first_end(NsqStreamReader(options(nsqd, other)), ReadMaxRows(10))
    given = {"failOnDataLoss": "false", "retries": "1"}
    reader = NsqStreamReader(options(nsqd, other, **given))
    reader.prepareForTriggerAvailableNow()
    end = reader.latestOffset(here, ALL)
    assert (at(end, nsqd), at(end, other)) == (11, 6)
    assert text(reader.latestOffset(end, ALL)) == text(end), "and the run ends"


def test_a_cursor_is_not_moved_in_another_log(nsqd):
    """A number of the topic that was deleted would confirm messages of the new one that nobody has read."""
    nsqd.topic("t", numbered(1, 101))
    reader = stream(nsqd, channel="c")
    end = first_end(reader)
    nsqd.logs["t"] = [FakeLog()]
    log = nsqd.topic("t", numbered(1, 501))
    log.channels["c"] = 1
    reader.commit(end)
    assert log.channels == {"c": 1}


# -- a cluster ---------------------------------------------------------------------------------------------------------


class FakeCluster:
    """Some nsqds that lead the partitions of topic ``t`` together."""

    def __init__(self, *nodes: FakeNsqd) -> None:
        self.nodes = nodes
        self.logs: dict[int, FakeLog] = {}
        self.leaders: dict[int, FakeNsqd | None] = {}

    def lead(self, number: int, node: FakeNsqd | None) -> FakeLog:
        """Let a node lead a partition in the next epoch; None: nobody is ready."""
        log = self.logs.setdefault(number, FakeLog(partition=number))
        log.epoch += 1
        self.leaders[number] = node
        for each in self.nodes:
            led = [number for number, leader in self.leaders.items() if leader is each]
            each.logs = {"t": [self.logs[number] for number in led]}
            each.elsewhere["t"] = [
                {
                    "partition": number,
                    "log_id": self.logs[number].log_id,
                    "epoch": self.logs[number].epoch,
                    "nsqd": leader.address if leader else "",
                }
                for number, leader in self.leaders.items()
                if number not in led
            ]
        return log


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeNsqd() as first, FakeNsqd() as second, FakeNsqd() as third:
        fake = FakeCluster(first, second, third)
        for number, node in enumerate(fake.nodes):
            fake.lead(number, node).append(numbered(1, 101))
        yield fake
    POOL._idle.clear()


def test_one_node_tells_where_the_others_are(cluster):
    reader = NsqReader(options(cluster.nodes[0]))
    (task,) = reader.partitions()
    rows = [row for batch in reader.read(task) for row in batch.to_pylist()]
    assert {(row["partition"], row["nsqd"]) for row in rows} == {
        (number, node.address) for number, node in enumerate(cluster.nodes)
    }
    assert len(rows) == 300


def test_a_channel_and_partitions_that_another_node_leads(cluster):
    (address, *_) = (node.address for node in cluster.nodes)
    given = {"nsqd": address, "assign": '{"t": [0]}', "channel": "c"}
    with pytest.raises(OptionError, match="partition 1 of topic 't', partition 2 of topic 't'"):
        first_end(NsqStreamReader(SourceOptions.parse(given)))


def test_a_new_leader_goes_on_at_the_offset(cluster):
    reader = NsqStreamReader(options(cluster.nodes[0], channel="c"))
    here = first_end(reader)
    cluster.lead(1, None)
    waiting = reader.latestOffset(here, ALL)
    assert text(waiting) == text(here), "nothing is lost while nobody leads, and nothing enters anew"
    cluster.lead(1, cluster.nodes[2]).append(numbered(101, 151))
    end = reader.latestOffset(here, ALL)
    assert "_from" not in end
    assert offsets_read(reader, reader.partitions(here, end)) == list(range(101, 151))
    reader.commit(end)
    assert cluster.logs[1].channels == {"c": 151}


def test_a_leader_that_changes_in_the_middle_of_a_task(cluster):
    cluster.logs[1].append(numbered(101, 3001, 100))
    reader = NsqReader(options(*cluster.nodes, fetchMaxBytes="4KiB", batchRows="50", maxMessagesPerTask="100000"))
    (task,) = reader.partitions()
    found: list[int] = []
    for batch in reader.read(task):
        rows = batch.to_pylist()
        if rows[0]["partition"] == 1:
            found += [row["offset"] for row in rows]
            if len(found) == 100 and cluster.leaders[1] is cluster.nodes[1]:
                cluster.lead(1, cluster.nodes[0])  # the connection to the former leader stays
    assert found == list(range(1, 3001))


def test_who_leads_no_more_when_it_is_asked(cluster):
    cluster.logs[1].append(numbered(101, 3001, 100))
    reader = NsqReader(options(*cluster.nodes, fetchMaxBytes="4KiB", batchRows="50", maxMessagesPerTask="100000"))
    (task,) = reader.partitions()
    moved = "E_FAILED_ON_NOT_LEADER topic t partition 1 is led by another node"
    cluster.leaders[1].failures["FETCH"] = ["", moved]
    rows = [row for batch in reader.read(task) for row in batch.to_pylist()]
    assert [row["offset"] for row in rows if row["partition"] == 1] == list(range(1, 3001))
    assert not cluster.leaders[1].failures["FETCH"], "it was asked, and asked again"


def test_a_read_that_promises_everything_waits_for_leaders(cluster):
    log = cluster.lead(2, None)
    strict = NsqReader(options(*cluster.nodes, retries="2", failOnDataLoss="false"))
    with pytest.raises(LogAway, match=r"no node leads it \(epoch 2\)"):
        strict.partitions()
    now = NsqStreamReader(options(*cluster.nodes, retries="2"))
    with pytest.raises(LogAway):
        now.prepareForTriggerAvailableNow()
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        cluster.lead(2, cluster.nodes[0])

    survey = Surveyor(options(*cluster.nodes), sleep=sleep).look(is_waiting=True)
    assert len(survey.logs) == 3
    assert len(pauses) == 1
    assert survey.logs[PartitionKey("t", 2, log.log_id)].nsqd == cluster.nodes[0].address


def test_who_was_the_leader_and_does_not_know(cluster):
    """Two say that they serve a log: the later epoch is right."""
    cluster.logs[0].append(numbered(101, 111))
    late = FakeLog(cluster.logs[0].log_id, 0, 1)
    late.append(numbered(1, 51))
    cluster.lead(0, cluster.nodes[2])
    cluster.nodes[0].logs["t"].append(late)
    reader = NsqStreamReader(options(*cluster.nodes))
    assert first_end(reader)["t"][f"0/{late.log_id}"] == 111


def behind(cluster: FakeCluster, number: int) -> FakeLog:
    """Another node leads a partition and does not know yet that all its messages are confirmed."""
    log = cluster.lead(number, cluster.nodes[0])
    log.end -= 20
    return log


def test_a_leader_that_learns_later_how_far_it_is(cluster, caplog):
    reader = NsqStreamReader(options(*cluster.nodes))
    here = first_end(reader)
    log = behind(cluster, 1)
    assert text(reader.latestOffset(here, ALL)) == text(here)
    log.end += 20
    log.append(numbered(101, 111))
    end = reader.latestOffset(here, ALL)
    assert offsets_read(reader, reader.partitions(here, end)) == list(range(101, 111)), "none is lost or read twice"
    told = [record.message for record in caplog.records if "/1 " in record.message]
    assert len(told) == 2
    assert "ends at 81, and was read up to 101: the leader of its partition may not know yet" in told[0]
    assert "has ended at 81 and is beyond 101 again" in told[1] and "flintmq cluster status" in told[1]


def test_available_now_waits_for_a_leader_that_does_not_know_how_far_it_is(cluster, monkeypatch):
    here = first_end(NsqStreamReader(options(*cluster.nodes)))
    log = behind(cluster, 1)
    reader = NsqStreamReader(options(*cluster.nodes, retries="3"))
    reader.prepareForTriggerAvailableNow()
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            log.end += 20
            log.append(numbered(101, 111))

    monkeypatch.setattr(retry.Retries.__init__, "__defaults__", (sleep,))
    assert read_on(reader, here)[0] == list(range(101, 111))
    assert len(pauses) == 2


def test_available_now_and_a_leader_that_never_says_how_far_it_is(cluster):
    """It is an error, as of a partition without a leader, and not called a loss; where it is forgiven, it waits."""
    here = first_end(NsqStreamReader(options(*cluster.nodes)))
    log = behind(cluster, 1)
    strict = NsqStreamReader(options(*cluster.nodes, retries="2"))
    strict.prepareForTriggerAvailableNow()
    with pytest.raises(LogAway, match=r"it ends at 81, and was read up to 101: the leader of its partition may not"):
        strict.latestOffset(here, strict.getDefaultReadLimit())
    lenient = NsqStreamReader(options(*cluster.nodes, retries="2", failOnDataLoss="false"))
    lenient.prepareForTriggerAvailableNow()
    assert text(lenient.latestOffset(here, lenient.getDefaultReadLimit())) == text(here)
    log.end += 20
    log.append(numbered(101, 111))
    later = NsqStreamReader(options(*cluster.nodes))
    later.prepareForTriggerAvailableNow()
    assert read_on(later, here)[0] == list(range(101, 111))


def test_partitions_that_are_added_while_a_stream_runs(cluster):
    reader = NsqStreamReader(options(cluster.nodes[0]))
    here = first_end(reader)
    cluster.lead(3, cluster.nodes[1]).append(numbered(1, 21))
    end = reader.latestOffset(here, ALL)
    assert end["_from"] == {"t": {f"3/{cluster.logs[3].log_id}": 1}}
    assert offsets_read(reader, reader.partitions(here, end)) == list(range(1, 21))


def test_no_leader_for_too_long(cluster):
    clock = ManualClock()
    strict = NsqStreamReader(options(*cluster.nodes), clock)
    lenient = NsqStreamReader(options(*cluster.nodes, failOnDataLoss="false"), clock)
    here = first_end(strict)
    cluster.lead(1, None)
    for reader in (strict, lenient):
        assert text(reader.latestOffset(here, ALL)) == text(here)
    clock.advance(301)
    with pytest.raises(DataLost, match="no node leads it"):
        strict.latestOffset(here, ALL)
    assert text(lenient.latestOffset(here, ALL)) == text(here), "it waits: the cluster has it"


# -- the connection ----------------------------------------------------------------------------------------------------


def test_answers_out_of_all_bounds(nsqd):
    nsqd.topic("t", numbered(1, 101))
    connection = NsqdConnection(nsqd.address, 5, 5)
    connection.send_fetch("t", 0, 1, 101, 1000, 0)
    with pytest.raises(RemoteProtocolError, match="at most 100 were due"):
        connection.receive(100)
    connection = NsqdConnection(nsqd.address, 5, 5)
    connection.send(b"MPUB t\n\0\0\0\11\0\0\0\1\0\0\0\1x")
    with pytest.raises(RemoteProtocolError, match="2 bytes where batches were due"):
        connection.receive_fetch_head(1000)


def test_silence_ends(nsqd):
    connection = NsqdConnection(nsqd.address, 5, 0.1)
    with pytest.raises(ConnectionFailed, match=r"no answer within 0\.1 s"):
        connection.receive()


def test_heartbeats_are_answered(nsqd):
    nsqd.topic("t", numbered(1, 101))
    nsqd.fail("OFFSETS", "heartbeat")
    connection = NsqdConnection(nsqd.address, 5, 5)
    assert connection.offsets(["t"])[0].logs[0].end == 101
    assert nsqd.asked[-1] == "NOP" or connection.offsets(["t"])
    assert nsqd.count("NOP") == 1
    connection.close()
