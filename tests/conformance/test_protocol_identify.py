"""IDENTIFY: body, fields, ranges, the negotiated answer (NSQ's TCP protocol)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.conformance.conftest import quick_flags
from tests.conformance.protocol_helpers import after_eof, fatal, fatal_on, goes_on, identify, only_client, producer
from tests.integration.daemons import ERROR, Connection, Daemons, Frame, Nsqd, pub, sized

DEFAULT_ANSWER = (
    b'{"max_rdy_count":2500,"version":"1.3.0","max_msg_timeout":900000,"msg_timeout":60000,"tls_v1":false,'
    b'"deflate":false,"deflate_level":6,"max_deflate_level":6,"snappy":false,"sample_rate":0,"auth_required":false,'
    b'"output_buffer_size":16384,"output_buffer_timeout":250,"topology_region":"","topology_zone":""}'
)
BOTH = "E_IDENTIFY_FAILED cannot enable both deflate and snappy compression"
UNDECODABLE = "E_BAD_BODY IDENTIFY failed to decode JSON body"


# -- ranges ------------------------------------------------------------------------------------------------------------

NAMES = {
    "heartbeat_interval": "heartbeat interval",
    "output_buffer_size": "output buffer size",
    "output_buffer_timeout": "output buffer timeout",
    "sample_rate": "sample rate",
    "msg_timeout": "msg timeout",
}
BAD_VALUES = {
    "heartbeat_interval": (-2, 1, 999, 60_001, 2**31, 2**63 - 1, -(2**63)),
    "output_buffer_size": (-2, 1, 63, 65_537, 2**31),
    "output_buffer_timeout": (-2, 1, 24, 30_001, 2**31),
    "sample_rate": (-1, 100, 2**31 - 1),
    "msg_timeout": (-1, 1, 999, 900_001, 2**31),
}
GOOD_VALUES = {
    # the value asked for, and what the answer says
    "output_buffer_size": {-1: 1, 0: 16384, 64: 64, 65_536: 65_536},
    "output_buffer_timeout": {-1: 0, 0: 250, 25: 25, 30_000: 30_000},
    "sample_rate": {0: 0, 1: 1, 99: 99},
    "msg_timeout": {0: 60_000, 1000: 1000, 900_000: 900_000},
}


@pytest.mark.parametrize("negotiates", [True, False], ids=["negotiating", "not-negotiating"])
@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in BAD_VALUES.items() for value in values]
)
def test_out_of_range(nsqd: Nsqd, field: str, value: int, negotiates: bool):
    error = fatal(nsqd, identify(feature_negotiation=negotiates, **{field: value}))
    assert error == f"E_BAD_BODY IDENTIFY {NAMES[field]} ({value}) is invalid"


@pytest.mark.parametrize(
    ("field", "value", "answered"), [(f, v, a) for f, values in GOOD_VALUES.items() for v, a in values.items()]
)
def test_in_range_and_answered(connection: Connection, field: str, value: int, answered: int):
    assert connection.identify(**{field: value})[field] == answered
    goes_on(connection)


@pytest.mark.parametrize("interval_ms", [-1, 0, 1000, 1001, 60_000])
def test_heartbeat_interval_in_range(connection: Connection, interval_ms: int):
    assert "heartbeat_interval" not in connection.identify(heartbeat_interval=interval_ms)
    goes_on(connection)


def test_unbuffered_turns_the_timer_off(connection: Connection):
    answer = connection.identify(output_buffer_size=-1, output_buffer_timeout=1000)
    assert (answer["output_buffer_size"], answer["output_buffer_timeout"]) == (1, 0)


ORDER = ["heartbeat_interval", "output_buffer_timeout", "output_buffer_size", "sample_rate", "msg_timeout"]


@pytest.mark.parametrize("first", range(len(ORDER)), ids=ORDER)
def test_the_first_bad_field_in_this_order_is_said(nsqd: Nsqd, first: int):
    error = fatal(nsqd, identify(**dict.fromkeys(reversed(ORDER[first:]), -5)))
    assert error == f"E_BAD_BODY IDENTIFY {NAMES[ORDER[first]]} (-5) is invalid"


def test_a_bad_field_is_said_before_both_compressions(nsqd: Nsqd):
    error = fatal(nsqd, identify(feature_negotiation=True, deflate=True, snappy=True, msg_timeout=1))
    assert error == "E_BAD_BODY IDENTIFY msg timeout (1) is invalid"


@pytest.mark.parametrize(("asked", "level"), [(-1, 6), (0, 6), (1, 1), (5, 5), (6, 6), (7, 6), (9, 6), (100, 6)])
def test_deflate_level(connection: Connection, asked: int, level: int):
    answer = connection.identify(deflate=True, deflate_level=asked)
    assert (answer["deflate"], answer["deflate_level"], answer["max_deflate_level"]) == (True, level, 6)


def test_deflate_level_is_answered_without_deflate(connection: Connection):
    answer = connection.identify(deflate=False, deflate_level=1)
    assert (answer["deflate"], answer["deflate_level"]) == (False, 6)


# -- the answer --------------------------------------------------------------------------------------------------------


def answer_to(nsqd: Nsqd, **fields: Any) -> bytes:
    with nsqd.connect() as connection:
        connection.send(identify(**fields))
        return connection.response()


def test_the_answer_byte_for_byte(nsqd: Nsqd):
    assert answer_to(nsqd, feature_negotiation=True) == DEFAULT_ANSWER


@pytest.mark.parametrize("fields", [{}, {"feature_negotiation": False}], ids=["absent", "false"])
def test_without_feature_negotiation_the_answer_is_OK(nsqd: Nsqd, fields: dict[str, Any]):
    assert answer_to(nsqd, **fields) == b"OK"


def test_without_feature_negotiation_nothing_is_granted(nsqd: Nsqd, connection: Connection):
    connection.ok(identify(tls_v1=True, deflate=True, snappy=True))
    goes_on(connection)


def test_without_feature_negotiation_the_other_fields_count(nsqd: Nsqd, connection: Connection, topic: str):
    connection.ok(identify(sample_rate=42, client_id="me"))
    connection.subscribe(topic, "c")
    row = only_client(nsqd, topic)
    assert (row["sample_rate"], row["client_id"]) == (42, "me")


def test_topology_in_the_answer_is_the_server_s(connection: Connection):
    answer = connection.identify(topology_region="r", topology_zone="z")
    assert (answer["topology_region"], answer["topology_zone"]) == ("", "")


def test_tls_is_granted_only_with_a_certificate(connection: Connection):
    assert connection.identify(tls_v1=True)["tls_v1"] is False
    goes_on(connection)


def test_both_compressions_are_refused(nsqd: Nsqd):
    assert fatal(nsqd, identify(feature_negotiation=True, deflate=True, snappy=True)) == BOTH


@pytest.fixture(scope="module")
def other_nsqd(shared_daemons: Daemons) -> Nsqd:
    """An nsqd whose limits are not the default ones."""
    return shared_daemons.nsqd(
        *quick_flags(),
        "--max-rdy-count=10",
        "--msg-timeout=3s",
        "--max-msg-timeout=7s",
        "--max-heartbeat-interval=2s",
        "--max-output-buffer-size=128",
        "--min-output-buffer-timeout=50ms",
        "--max-output-buffer-timeout=60ms",
        "--output-buffer-timeout=55ms",
        "--max-deflate-level=3",
        "--snappy=false",
        "--topology-region=there",
        "--topology-zone=here",
    )


def test_no_client_may_choose_where_the_longest_is_less_than_the_shortest(shared_daemons: Daemons):
    nsqd = shared_daemons.nsqd(*quick_flags(), "--max-output-buffer-timeout=0")
    for timeout_ms in (1, 25, 250):
        assert "output buffer timeout" in fatal(nsqd, identify(output_buffer_timeout=timeout_ms))
    answer = json.loads(answer_to(nsqd, feature_negotiation=True, output_buffer_timeout=-1))
    assert answer["output_buffer_timeout"] == 0
    assert json.loads(answer_to(nsqd, feature_negotiation=True))["output_buffer_timeout"] == 250
    nsqd.stop()


def test_flags_show_in_the_answer(other_nsqd: Nsqd):
    answer = json.loads(answer_to(other_nsqd, feature_negotiation=True))
    expected = {
        "max_rdy_count": 10,
        "msg_timeout": 3000,
        "max_msg_timeout": 7000,
        "deflate_level": 3,
        "max_deflate_level": 3,
        "output_buffer_timeout": 55,
        "topology_region": "there",
        "topology_zone": "here",
    }
    assert {name: answer[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("field", "value", "is_good"),
    [
        ("heartbeat_interval", 2000, True),
        ("heartbeat_interval", 2001, False),
        ("output_buffer_size", 128, True),
        ("output_buffer_size", 129, False),
        ("output_buffer_timeout", 49, False),
        ("output_buffer_timeout", 50, True),
        ("output_buffer_timeout", 60, True),
        ("output_buffer_timeout", 61, False),
        ("msg_timeout", 7000, True),
        ("msg_timeout", 7001, False),
    ],
)
def test_flags_move_the_ranges(other_nsqd: Nsqd, field: str, value: int, is_good: bool):
    with other_nsqd.connect() as connection:
        connection.send(identify(**{field: value}))
        assert connection.any_frame() == (
            Frame(0, b"OK")
            if is_good
            else Frame(ERROR, f"E_BAD_BODY IDENTIFY {NAMES[field]} ({value}) is invalid".encode())
        )


def test_a_compression_that_the_server_denies_is_not_granted(other_nsqd: Nsqd):
    with other_nsqd.connect() as connection:
        assert connection.identify(snappy=True)["snappy"] is False
        goes_on(connection)


def test_both_compressions_of_which_the_server_denies_one(other_nsqd: Nsqd):
    answer = json.loads(answer_to(other_nsqd, feature_negotiation=True, deflate=True, snappy=True))
    assert (answer["deflate"], answer["snappy"]) == (True, False)


# -- JSON --------------------------------------------------------------------------------------------------------------

FINE = {
    "empty-object": b"{}",
    "white-space": b' \r\n\t{ "sample_rate" : 1 } \n',
    "unknown-fields": b'{"nobody": {"knows": [1, 2, {"this": null}]}, "short_id": 5, "long_id": []}',
    "null-is-absent": b'{"client_id": null, "heartbeat_interval": null, "tls_v1": null, "feature_negotiation": null}',
    "keys-in-other-case": b'{"Client_ID": "x", "HEARTBEAT_INTERVAL": 1000, "feature_Negotiation": false}',
    "escapes": rb'{"client_\u0069d": "\u00fc\n"}',
    "not-utf-8-in-a-string": b'{"client_id": "\xff\xfe"}',
    "half-a-character": rb'{"client_id": "\ud800", "hostname": "\udc00\ud83d\ude00\\ud800", "a\uDFFF": 1}',
    "minus-zero": b'{"heartbeat_interval": -0}',
}


@pytest.mark.parametrize("body", FINE.values(), ids=FINE)
def test_json_that_is_taken(connection: Connection, body: bytes):
    connection.ok(b"IDENTIFY\n" + sized(body))
    goes_on(connection)


MALFORMED = {
    "empty-text": b" ",
    "cut-short": b'{"client_id":',
    "escape-cut-short": rb'{"client_id": "\ud8"}"}',
    "not-json": b"hello",
    "array": b"[]",
    "string": b'"x"',
    "number": b"1",
    "true": b"true",
    "single-quotes": b"{'a': 1}",
    "trailing-comma": b'{"a": 1,}',
    "something-behind": b"{} x",
    "two-objects": b"{}{}",
    "comment": b"{} // x",
    "bare-key": b"{a: 1}",
    "binary": b"\x00\x01\x02",
    "deep-nesting": b'{"a":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}",
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_json_that_cannot_be_decoded(nsqd: Nsqd, body: bytes):
    assert fatal(nsqd, b"IDENTIFY\n" + sized(body)) == UNDECODABLE


STRINGS = ("client_id", "hostname", "user_agent", "topology_region", "topology_zone")
BOOLEANS = ("feature_negotiation", "tls_v1", "deflate", "snappy")
INTEGERS = (
    "heartbeat_interval",
    "output_buffer_size",
    "output_buffer_timeout",
    "deflate_level",
    "sample_rate",
    "msg_timeout",
)
WRONG_TYPES = [
    *((field, value) for field in STRINGS for value in ("1", "true", "[]")),
    *((field, value) for field in BOOLEANS for value in ("1", '"true"', "{}")),
    *((field, value) for field in INTEGERS for value in ('"1000"', "true", "1.5", "1000.0", "1e3", "9" * 20)),
    ("sample_rate", str(2**31)),
]


@pytest.mark.parametrize(("field", "value"), WRONG_TYPES)
def test_a_known_field_of_the_wrong_type(nsqd: Nsqd, field: str, value: str):
    assert fatal(nsqd, b"IDENTIFY\n" + sized(f'{{"{field}": {value}}}'.encode())) == UNDECODABLE


# -- body --------------------------------------------------------------------------------------------------------------

SIZES = {
    "zero": (0, "IDENTIFY invalid body size 0"),
    "minus-one": (-1, "IDENTIFY invalid body size -1"),
    "smallest": (-(2**31), "IDENTIFY invalid body size -2147483648"),
    "one-too-big": (5242881, "IDENTIFY body too big 5242881 > 5242880"),
    "biggest": (2**31 - 1, "IDENTIFY body too big 2147483647 > 5242880"),
}


@pytest.mark.parametrize(("size", "error"), SIZES.values(), ids=SIZES)
def test_body_size(nsqd: Nsqd, size: int, error: str):
    assert fatal(nsqd, b"IDENTIFY\n" + size.to_bytes(4, "big", signed=True)) == f"E_BAD_BODY {error}"


def test_the_biggest_body(connection: Connection):
    body = b'{"nobody": "' + b"x" * (5242880 - 14) + b'"}'
    assert len(body) == 5242880
    connection.ok(b"IDENTIFY\n" + sized(body))


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"", "IDENTIFY failed to read body size"),
        (b"\x00\x00\x00", "IDENTIFY failed to read body size"),
        (b"\x00\x00\x00\x02", "IDENTIFY failed to read body"),
        (b"\x00\x00\x00\x02{", "IDENTIFY failed to read body"),
    ],
    ids=["no-size", "half-a-size", "no-body", "half-a-body"],
)
def test_body_cut_short_by_the_end_of_the_stream(nsqd: Nsqd, sent: bytes, error: str):
    assert after_eof(nsqd, b"IDENTIFY\n" + sent) == [Frame(ERROR, f"E_BAD_BODY {error}".encode())]


# -- who it is ---------------------------------------------------------------------------------------------------------


def test_stats_show_what_the_client_said(nsqd: Nsqd, connection: Connection, topic: str):
    said = {"client_id": "me", "hostname": "my.host", "user_agent": "agent/1.0", "sample_rate": 7}
    connection.identify(**said)
    connection.subscribe(topic, "c")
    row = only_client(nsqd, topic)
    assert {name: row[name] for name in said} == said
    assert (row["tls"], row["deflate"], row["snappy"]) == (False, False, False)


def test_stats_show_nothing_of_a_client_that_said_nothing(nsqd: Nsqd, connection: Connection, topic: str):
    connection.ok(identify())
    connection.subscribe(topic, "c")
    row = only_client(nsqd, topic)
    assert (row["client_id"], row["hostname"], row["user_agent"]) == ("", "", "")


def test_stats_of_a_producer(nsqd: Nsqd, connection: Connection, topic: str):
    connection.ok(identify(client_id="p") + pub(topic, b"x"), count=2)
    assert producer(nsqd, topic)["client_id"] == "p"


# -- again -------------------------------------------------------------------------------------------------------------


def test_repeated_before_SUB(connection: Connection):
    for _ in range(3):
        assert connection.identify()["sample_rate"] == 0


def test_repeated_the_last_description_counts(nsqd: Nsqd, connection: Connection, topic: str):
    connection.ok(identify(client_id="one", hostname="h") + identify(client_id="two"), count=2)
    connection.subscribe(topic, "c")
    row = only_client(nsqd, topic)
    assert (row["client_id"], row["hostname"]) == ("two", "")


def test_repeated_with_an_error_is_fatal(connection: Connection):
    connection.ok(identify())
    assert fatal_on(connection, identify(sample_rate=100)) == "E_BAD_BODY IDENTIFY sample rate (100) is invalid"


@pytest.mark.improvement
def test_repeated_absent_fields_are_back_at_their_defaults(nsqd: Nsqd, connection: Connection):
    """Upstream keeps what an earlier IDENTIFY set, because a 0 leaves the setting as it is."""
    connection.identify(msg_timeout=5000, output_buffer_size=64)
    answer = connection.identify()
    assert (answer["msg_timeout"], answer["output_buffer_size"]) == (60_000, 16384)


@pytest.mark.improvement
def test_repeated_heartbeats_disabled_last_refuse_SUB(connection: Connection):
    """Upstream refuses SUB as well, but its pump goes on sending the heartbeats of the first IDENTIFY."""
    connection.ok(identify(heartbeat_interval=1000) + identify(heartbeat_interval=-1), count=2)
    connection.silence(1.2)
    assert fatal_on(connection, b"SUB t c\n") == "E_INVALID cannot SUB with heartbeats disabled"
    assert connection.heartbeat_count == 0
