"""Options: what is understood, what is refused, and that the documentation lists them all."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from flintmq.errors import OptionError
from flintmq.spark.offsets import parse_times
from flintmq.spark.options import PLAIN, LinkOptions, SinkOptions, SourceOptions, split_address
from flintmq.spark.schema import COLUMNS

BASE = {"nsqd": "127.0.0.1:4150", "topic": "t"}


def source(**more: str) -> SourceOptions:
    return SourceOptions.parse({**BASE, **more})


def test_defaults():
    options = source()
    assert options.nsqd == ("127.0.0.1:4150",)
    assert options.max_messages_per_trigger == 2_000_000
    assert options.fail_on_data_loss
    assert options.columns == COLUMNS
    options.check_batch()
    options.check_stream()


def test_values():
    options = SourceOptions.parse(
        {
            "LOOKUPD": "b:4161, a:4161",
            "topics": "y,x,x",
            "maxbytespertrigger": "512MiB",
            "maxTriggerDelay": "1.5m",
            "columns": "offset, BODY",
            "startingTimestamp": "2026-01-01T00:00:00",
            "failOnDataLoss": "False",
            "checkpointLocation": "anywhere",
        }
    )
    assert options.lookupd == ("a:4161", "b:4161")
    assert options.named_topics == ("x", "y")
    assert options.max_bytes_per_trigger == 512 << 20
    assert options.max_trigger_delay == 90.0
    assert options.columns == ("offset", "body")
    assert options.starting_timestamp == 1_767_225_600_000_000_000
    assert not options.fail_on_data_loss
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize("text", ["1767225600123", "2026-01-01T00:00:00.123Z", "2026-01-01T01:00:00.123+01:00"])
def test_timestamps(text):
    assert source(startingTimestamp=text).starting_timestamp == 1_767_225_600_123_000_000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nsqd", "localhost"),
        ("nsqd", "localhost:0"),
        ("nsqd", ","),
        ("topic", "no spaces"),
        ("topic", "_log"),
        ("topics", "a,_log"),
        ("topic", "_from"),
        ("topicPattern", "("),
        ("channel", ""),
        ("startingOffsets", "newest"),
        ("startingOffsets", "[1]"),
        ("startingOffsets", "cursor"),
        ("startingTimestamp", "yesterday"),
        ("startingTimestamp", "1969-12-31T23:59:59Z"),
        ("startingTimestamp", "1767225600000000"),
        ("endingTimestamp", "2999-01-01"),
        ("endingOffsets", "earliest"),
        ("maxMessagesPerTrigger", "-1"),
        ("maxBytesPerTrigger", "1 parsec"),
        ("maxTriggerDelay", "soon"),
        ("minPartitions", "0"),
        ("failOnDataLoss", "yes"),
        ("columns", "offset,offset"),
        ("columns", "offsets"),
        ("fetchMaxBytes", "1"),
        ("fetchMaxBytes", "1GiB"),
        ("retries", "many"),
    ],
)
def test_bad_values_say_which_and_what_is_allowed(name, value):
    given = {"nsqd": "a:1"} if name.startswith("topic") else BASE
    with pytest.raises(OptionError) as caught:
        SourceOptions.parse({**given, name: value})
    assert caught.value.option == ("topics" if name == "topics" else name)
    assert caught.value.allowed


def test_times_of_partitions_that_nsqd_cannot_be_asked_for():
    assert parse_times("startingOffsetsByTimestamp", '{"t": {"0": 9999999999999}}').sequences
    with pytest.raises(OptionError, match=r"startingOffsetsByTimestamp.* up to 9999999999999"):
        parse_times("startingOffsetsByTimestamp", '{"t": {"0": 1767225600000000}}')


@pytest.mark.parametrize(
    "given", [{}, {"nsqd": "a:1"}, {"topic": "t"}, {**BASE, "lookupd": "a:1"}, {**BASE, "topics": "u"}]
)
def test_exactly_one_place_and_one_choice_of_topics(given):
    with pytest.raises(OptionError, match=r"exactly one|either"):
        SourceOptions.parse(given)


def test_a_pattern_needs_nsqlookupd():
    assert SourceOptions.parse({"lookupd": "a:1", "topicPattern": "fl.*"}).topic_pattern == "fl.*"
    with pytest.raises(OptionError, match="lookupd"):
        SourceOptions.parse({"nsqd": "a:1", "topicPattern": "fl.*"})


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(OptionError, match="did you mean maxMessagesPerTrigger"):
        source(maxMessagePerTrigger="5")
    with pytest.raises(OptionError, match=r"docs/spark\.md"):
        source(zzz="5")


@pytest.mark.parametrize("start", ["latest", '{"t": {"0": -1}}'])
def test_latest_needs_a_position_that_nsqd_keeps(start):
    with pytest.raises(OptionError, match="allowUnsafeLatest"):
        source(startingOffsets=start).check_stream()
    source(startingOffsets=start, channel="c").check_stream()
    source(startingOffsets=start, allowUnsafeLatest="true").check_stream()


def test_a_timestamp_overrides_latest():
    source(startingOffsets="latest", startingTimestamp="5").check_stream()
    source(startingOffsets="latest", startingTimestamp="5").check_batch()


def test_batch_and_stream_refuse_what_makes_no_sense():
    with pytest.raises(OptionError):
        source(startingOffsets="latest").check_batch()
    with pytest.raises(OptionError):
        source(endingTimestamp="5").check_stream()
    with pytest.raises(OptionError):
        source(endingOffsets='{"t": {"0": 5}}').check_stream()


def test_sink_options():
    options = SinkOptions.parse({"nsqd": "b:1,a:1", "batchBytes": "64k", "oversize": "DROP"})
    assert (options.nsqd, options.batch_bytes, options.oversize) == (("a:1", "b:1"), 65_536, "drop")
    with pytest.raises(OptionError, match="maxBodySize"):
        SinkOptions.parse({"nsqd": "a:1", "batchBytes": "6MiB"})
    with pytest.raises(OptionError, match="either"):
        SinkOptions.parse({"topic": "t"})
    with pytest.raises(OptionError, match="oversize"):
        SinkOptions.parse({"nsqd": "a:1", "oversize": "shrink"})


def test_addresses():
    assert split_address("[::1]:4150") == ("::1", 4150)
    assert split_address("host.name:1") == ("host.name", 1)
    assert source(nsqd="nsqd-1:4150, [fe80::1%eth0]:4150").nsqd == ("[fe80::1%eth0]:4150", "nsqd-1:4150")


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:4150",
        "a:1;b:2",
        "a;b:2",
        "a:1 b:2",
        "a b:2",
        "a/b:2",
        "::1:4150",
        "[::1:4150",
        "::1]:4150",
        ":1",
    ],
)
def test_an_address_that_is_mistyped_is_refused_before_anybody_connects(text):
    for parse in (SourceOptions.parse, SinkOptions.parse):
        with pytest.raises(
            OptionError, match=r"host:port, such as .*, without http://; several separated by commas"
        ) as e:
            parse({"nsqd": text, "topic": "t"})
        assert (e.value.option, e.value.value) == ("nsqd", text)
    if not text.startswith("http"):
        with pytest.raises(OptionError, match="host:port or https") as e:
            SourceOptions.parse({"lookupd": text, "topic": "t"})
        assert e.value.option == "lookupd"


@pytest.mark.parametrize("options", [SourceOptions, SinkOptions, LinkOptions])
def test_the_documentation_lists_every_option(options):
    page = (Path(__file__).parents[3] / "docs" / "spark.md").read_text(encoding="utf-8")
    missing = [line for line in options.markdown().splitlines() if line not in page]
    assert missing == [], f"put {options.__name__}.markdown() into docs/spark.md"


# -- security ----------------------------------------------------------------------------------------------------------


def test_security():
    options = SinkOptions.parse(
        {
            "lookupd": "https://b:4163/,a:4161",
            "tls": "TRUE",
            "tlsCaFile": "/ca.pem",
            "compression": "Deflate",
            "deflateLevel": "9",
            "authSecret": "env:SECRET",
        }
    )
    assert options.lookupd == ("a:4161", "https://b:4163")
    assert options.link == LinkOptions(
        tls=True, tls_ca_file="/ca.pem", compression="deflate", deflate_level=9, auth_secret="env:SECRET"
    )
    assert hash(options.link) == hash(pickle.loads(pickle.dumps(options.link)))
    assert source().link == PLAIN


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("kafka.security.protocol", "SSL", "tls", True),
        ("security.protocol", "plaintext", "tls", False),
        ("tls_v1", "true", "tls", True),
        ("AUTH_SECRET", "file:///run/secret", "auth_secret", "file:///run/secret"),
    ],
)
def test_names_of_others(name, text, field, value):
    assert getattr(source(**{name: text}), field) == value


def test_two_names_of_one_thing():
    assert source(tls="true", tls_v1="true").tls
    with pytest.raises(OptionError, match="another name of tls, which says something else"):
        SourceOptions.parse({**BASE, "tls": "true", "security.protocol": "PLAINTEXT"})


@pytest.mark.parametrize("option", ["authSecret", "auth_secret", "nsqlookupdToken"])
@pytest.mark.parametrize("text", ["sesame", "env:", "env:NOT-A-NAME", "file:relative", "file:", "ENV:x=y"])
def test_a_secret_itself_is_refused_and_shown_nowhere(option, text):
    with pytest.raises(OptionError, match="Spark shows options in its pages") as caught:
        source(**{option: text})
    assert caught.value.option == option
    assert text not in f"{caught.value!r} {caught.value}".replace("env:NAME", "").replace("file:/path", "")
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"tlsCaFile": "/ca.pem"}, "tlsCaFile"),
        ({"tlsCert": "/cert.pem"}, "tlsCert"),
        ({"tlsMinVersion": "tls1.3"}, "tlsMinVersion"),
        ({"tlsVerify": "false"}, "tlsVerify"),
        ({"tls": "true", "tlsKey": "/key.pem"}, "tlsKey"),
        ({"tls": "true", "tlsVerify": "false", "tlsCaFile": "/ca.pem"}, "tlsVerify"),
        ({"tls": "true", "tlsVerify": "false", "tlsServerName": "nsqd"}, "tlsServerName"),
        ({"tlsServerName": "nsqd"}, "tlsServerName"),
        ({"tls": "true", "tlsMinVersion": "ssl3"}, "tlsMinVersion"),
        ({"deflateLevel": "3"}, "deflateLevel"),
        ({"compression": "snappy", "deflateLevel": "3"}, "deflateLevel"),
        ({"compression": "gzip"}, "compression"),
        ({"nsqlookupdToken": "env:TOKEN"}, "nsqlookupdToken"),
        ({"security.protocol": "SASL_SSL"}, "security.protocol"),
    ],
)
def test_what_does_not_go_together(given, option):
    for kind, base in ((SourceOptions, BASE), (SinkOptions, {"nsqd": "a:1"})):
        with pytest.raises(OptionError) as caught:
            kind.parse({**base, **given})
        assert caught.value.option == option
        assert caught.value.allowed


def test_nsqlookupd():
    base = {"topic": "t", "nsqlookupdToken": "env:TOKEN"}
    with pytest.raises(OptionError, match="a:4161 must be https"):
        SourceOptions.parse({**base, "lookupd": "a:4161,https://b:4163"})
    assert SourceOptions.parse({**base, "lookupd": "https://b:4163", "tlsCaFile": "/ca.pem"}).tls_ca_file == "/ca.pem"
    for wrong in ("https://user:word@b:4163", "ftp://b:4163", "b:4161/path", "https://b:nothing", "https://b"):
        with pytest.raises(OptionError):
            SourceOptions.parse({"topic": "t", "lookupd": wrong})


# -- names of Kafka ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("subscribe", "a,b", "topics", ("a", "b")),
        ("subscribePattern", "fl.*", "topic_pattern", "fl.*"),
        ("assign", '{"b": [2, 0], "a": [1]}', "assign", (("a", 1), ("b", 0), ("b", 2))),
        ("maxOffsetsPerTrigger", "5", "max_messages_per_trigger", 5),
        ("minOffsetsPerTrigger", "5", "min_messages_per_trigger", 5),
        ("maxRecordsPerPartition", "5", "max_messages_per_task", 5),
        ("fetchOffset.numRetries", "5", "retries", 5),
        ("startingOffsetsByTimestamp", '{"a": {"0": 5}}', "starting_offsets_by_timestamp", '{"a": {"0": 5}}'),
        ("endingOffsetsByTimestamp", '{"a": {"0": 5}}', "ending_offsets_by_timestamp", '{"a": {"0": 5}}'),
        ("startingOffsetsByTimestampStrategy", "ERROR", "starting_offsets_by_timestamp_strategy", "error"),
        ("includeHeaders", "true", "include_headers", True),
    ],
)
def test_options_that_kafka_has(name, text, field, value):
    chooses = name in ("subscribe", "subscribePattern", "assign")
    base = {"lookupd": "h:4161"} | ({} if chooses else {"topic": "t"})
    for spelling in (name, name.lower()):
        assert getattr(SourceOptions.parse({**base, spelling: text}), field) == value


@pytest.mark.parametrize("name", ["startingOffsetsByTimestamp", "endingOffsetsByTimestamp"])
@pytest.mark.parametrize("empty", ["{}", '{"t": {}}', " { } "])
def test_times_of_no_partition_are_refused_by_name(name: str, empty: str):
    with pytest.raises(OptionError, match=rf"{name}=.*of at least one partition") as caught:
        source(**{name: empty})
    assert caught.value.option == name


@pytest.mark.parametrize("strategy", ["error", "latest"])
def test_a_strategy_for_times_is_taken_without_times(strategy: str):
    source(startingOffsetsByTimestampStrategy=strategy).check_stream()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("kafka.bootstrap.servers", r"set nsqd=host:4150 .* or lookupd=host:4161"),
        ("kafka.group.id", "channel=NAME"),
        ("groupIdPrefix", "channel=NAME"),
        ("kafka.auto.offset.reset", "startingOffsets"),
        ("kafka.value.deserializer", "cast"),
        ("kafkaConsumer.pollTimeoutMs", "fetchTimeout"),
        ("kafka.sasl.jaas.config", "authSecret"),
        ("kafka.ssl.key.password", "tlsKey"),
    ],
)
def test_what_kafka_has_in_another_way_is_refused_with_ours(name, words):
    for kind, base in ((SourceOptions, BASE), (SinkOptions, {"nsqd": "a:1"})):
        with pytest.raises(OptionError, match=words) as caught:
            kind.parse({**base, name: "anything"})
        assert caught.value.option == name
        assert "anything" not in str(caught.value), "it may be a password"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"a": []}', '{"a": 1}', '{"a": [-1]}', '{"a": [true]}', '{"_log": [0]}']
)
def test_bad_assignments(text):
    with pytest.raises(OptionError) as caught:
        SourceOptions.parse({"nsqd": "a:1", "assign": text})
    assert caught.value.option == "assign"


def test_what_is_read():
    assigned = SourceOptions.parse({"nsqd": "a:1", "assign": '{"a": [1]}'})
    assert [assigned.reads(*each) for each in (("a", 1), ("a", 0), ("b", 1))] == [True, False, False]
    matched = SourceOptions.parse({"lookupd": "a:1", "subscribePattern": "a|_.*"})
    assert [matched.reads(topic, 0) for topic in ("a", "ab", "_log", "_x")] == [True, False, False, True]


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("endingOffsets", '{"t": {"0": 1}}', '{"t": {"0": 1}}'),
        ("endingTimestamp", "2020-01-01", "1577836800000 ms since 1970"),
        ("endingOffsetsByTimestamp", '{"t": {"0": 1}}', '{"t": {"0": 1}}'),
    ],
)
def test_an_end_is_refused_by_the_name_that_it_was_given(name, value, shown):
    with pytest.raises(OptionError, match="no end here") as caught:
        source(**{name: value}).check_stream("no end here")
    assert (caught.value.option, caught.value.value) == (name, shown)


def test_columns_that_are_not_there_are_named():
    with pytest.raises(OptionError, match=r"there is no nope, no; there is topic, .*, headers, headers_json$"):
        source(columns="offset,nope,no,nope")
    with pytest.raises(OptionError, match=r"distinct column names separated by commas$"):
        source(columns="offset,offset")


def test_times_one_by_one_have_no_place_in_a_streams_end():
    with pytest.raises(OptionError, match="a stream has no end"):
        source(endingOffsetsByTimestamp='{"t": {"0": 1}}').check_stream()
    source(startingOffsets="latest", startingOffsetsByTimestamp='{"t": {"0": 1}}').check_stream()


CHANNELLED = {**BASE, "channel": "c"}
SPOOLED = {**CHANNELLED, "mode": "spool", "spoolLocation": "/spool"}


@pytest.mark.parametrize(
    ("given", "option", "what"),
    [
        ({**BASE, "mode": "push"}, "mode", "auto, offset, spool or direct"),
        ({**BASE, "mode": "spool", "spoolLocation": "/spool"}, "channel", "nobody else consumes"),
        ({**CHANNELLED, "mode": "spool"}, "spoolLocation", "or mode=direct"),
        ({**CHANNELLED, "mode": "direct", "spoolLocation": "/spool"}, "spoolLocation", "nothing on disk"),
        ({**CHANNELLED, "mode": "direct", "spoolHost": "10.0.0.1"}, "spoolHost", "driver.s host alone"),
        ({**SPOOLED, "startingOffsets": "latest"}, "startingOffsets", "where the channel stands"),
        ({**SPOOLED, "startingTimestamp": "0"}, "startingOffsets", "where the channel stands"),
        ({**BASE, "pushdown": "true"}, "pushdown", "startingOffsets and endingOffsets"),
        ({"provider": "nsq", "option.nsqd": "a:1", "option.topic": "t", **BASE}, "provider", "CREATE TEMPORARY VIEW"),
        ({}, "nsqd", "CREATE TEMPORARY VIEW"),
        ({**SPOOLED, "msgTimeout": "10ms"}, "msgTimeout", "from 1s"),
        ({**SPOOLED, "maxInFlight": "0"}, "maxInFlight", "1 to"),
        ({"nsqd": "a:1", "assign": '{"t": [0]}', "channel": "c", "mode": "direct"}, "topic", "by name"),
        ({"lookupd": "a:1", "topicPattern": "t.*", "channel": "c", "mode": "direct"}, "topic", "by name"),
        ({**BASE, "mode": "offset", "spoolLocation": "/spool"}, "spoolLocation", "set mode=spool"),
        ({**BASE, "mode": "offset", "maxInFlight": "5"}, "maxInFlight", "set mode=spool"),
        ({**BASE, "deferred": "later"}, "deferred", "stored or due"),
        ({**BASE, "deferred": "due"}, "channel", "nobody else consumes"),
        ({**CHANNELLED, "deferred": "due"}, "spoolLocation", "or mode=direct"),
        ({**BASE, "mode": "offset", "deferred": "due"}, "deferred", "waits with all that is stored behind it"),
        ({**SPOOLED, "deferred": "stored"}, "deferred", "or set mode=offset"),
        ({**CHANNELLED, "mode": "direct", "minOffsetsPerTrigger": "2501"}, "minMessagesPerTrigger", "raise maxInFl"),
        ({**BASE, "minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"}, "minMessagesPerTrigger", "raise that"),
    ],
)
def test_what_a_mode_cannot_do_is_refused(given, option, what):
    with pytest.raises(OptionError, match=what) as caught:
        SourceOptions.parse(given)
    assert caught.value.option == option


def test_messages_when_they_are_due_come_through_a_spool():
    due = {**CHANNELLED, "deferred": "due"}
    assert SourceOptions.parse({**due, "spoolLocation": "/spool"}).mode == "spool"
    assert SourceOptions.parse({**due, "mode": "direct"}).mode == "direct"
    assert SourceOptions.parse({**BASE, "deferred": "stored"}).mode == "auto"


@pytest.mark.parametrize("mode", ["spool", "direct"])
def test_a_batch_read_never_finishes_a_message(mode):
    given = {**SPOOLED, "mode": mode}
    if mode == "direct":
        del given["spoolLocation"]
    with pytest.raises(OptionError, match="availableNow=True"):
        SourceOptions.parse(given).check_batch()
