"""IDENTIFY: ranges, defaults and the negotiated answer (NSQ's TCP protocol)."""

import json

import pytest

from flintmq.errors import RemoteProtocolError
from flintmq.wire.identify import ServerFeatures, negotiate, parse_request

SERVER = ServerFeatures(version="1.3.0")


def test_of_what_a_client_says_of_itself_so_much_is_kept():
    long = dict.fromkeys(("client_id", "hostname", "user_agent", "topology_region", "topology_zone"), "x" * 2_000_000)
    found = parse_request(json.dumps(long).encode())
    for name in long:
        assert getattr(found, name) == "x" * 1023 + "…"
    assert parse_request(json.dumps(dict.fromkeys(long, "x" * 1024)).encode()).client_id == "x" * 1024


def identify(server=SERVER, **fields):
    return negotiate(parse_request(json.dumps(fields).encode()), server)


def test_without_negotiation_the_answer_is_ok_and_nothing_is_granted():
    negotiated = identify(tls_v1=True, deflate=True, heartbeat_interval=1000)
    assert negotiated.response is None
    assert not negotiated.upgrades
    assert negotiated.heartbeat_interval_ms == 1000


def test_the_answer_has_the_fields_in_nsqds_order():
    assert identify(feature_negotiation=True).response == (
        b'{"max_rdy_count":2500,"version":"1.3.0","max_msg_timeout":900000,"msg_timeout":60000,"tls_v1":false,'
        b'"deflate":false,"deflate_level":6,"max_deflate_level":6,"snappy":false,"sample_rate":0,'
        b'"auth_required":false,"output_buffer_size":16384,"output_buffer_timeout":250,"topology_region":"",'
        b'"topology_zone":""}'
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"heartbeat_interval": -1}, {"heartbeat_interval_ms": 0}),
        ({"heartbeat_interval": 60000}, {"heartbeat_interval_ms": 60000}),
        ({}, {"heartbeat_interval_ms": 30000, "msg_timeout_ms": 60000, "output_buffer_size": 16384}),
        ({"msg_timeout": 1000}, {"msg_timeout_ms": 1000}),
        ({"sample_rate": 99}, {"sample_rate": 99}),
        ({"output_buffer_size": -1}, {"output_buffer_size": 1, "output_buffer_timeout_ms": 0}),
        ({"output_buffer_timeout": -1}, {"output_buffer_timeout_ms": 0}),
        ({"Heartbeat_Interval": 5000}, {"heartbeat_interval_ms": 5000}),
        ({"msg_timeout": None, "unknown": [1]}, {"msg_timeout_ms": 60000}),
    ],
)
def test_values_in_range(fields, expected):
    negotiated = identify(**fields)
    assert {name: getattr(negotiated, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"heartbeat_interval": 999}, "IDENTIFY heartbeat interval (999) is invalid"),
        ({"heartbeat_interval": 60001}, "IDENTIFY heartbeat interval (60001) is invalid"),
        ({"output_buffer_timeout": 24}, "IDENTIFY output buffer timeout (24) is invalid"),
        ({"output_buffer_timeout": 30001}, "IDENTIFY output buffer timeout (30001) is invalid"),
        ({"output_buffer_size": 63}, "IDENTIFY output buffer size (63) is invalid"),
        ({"output_buffer_size": 65537}, "IDENTIFY output buffer size (65537) is invalid"),
        ({"sample_rate": 100}, "IDENTIFY sample rate (100) is invalid"),
        ({"sample_rate": -1}, "IDENTIFY sample rate (-1) is invalid"),
        ({"msg_timeout": 999}, "IDENTIFY msg timeout (999) is invalid"),
        ({"msg_timeout": 900001}, "IDENTIFY msg timeout (900001) is invalid"),
        ({"client_id": 5}, "IDENTIFY failed to decode JSON body"),
        ({"tls_v1": "yes"}, "IDENTIFY failed to decode JSON body"),
    ],
)
def test_values_out_of_range(fields, detail):
    with pytest.raises(RemoteProtocolError) as caught:
        identify(**fields)
    assert (caught.value.code, caught.value.detail) == ("E_BAD_BODY", detail)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff"])
def test_a_body_that_is_no_json_object(body):
    with pytest.raises(RemoteProtocolError, match="E_BAD_BODY IDENTIFY failed to decode JSON body"):
        parse_request(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}",
        b'{"heartbeat_interval": 9223372036854775808}',
        b'{"sample_rate": 2147483648}',
    ],
    ids=["too-deep", "beyond-64-bits", "beyond-32-bits"],
)
def test_a_body_that_no_nsqd_reads(body):
    with pytest.raises(RemoteProtocolError, match="E_BAD_BODY IDENTIFY failed to decode JSON body"):
        parse_request(body)


def test_names_that_are_not_utf_8():
    assert parse_request(b'{"hostname": "a\xffb"}').hostname == "a\ufffdb"


def test_the_level_of_a_compression_that_is_not_used():
    response = identify(ServerFeatures(version="1"), feature_negotiation=True, deflate_level=1).response
    assert response is not None
    assert b'"deflate":false,"deflate_level":6' in response


def test_features_are_granted_only_when_the_server_has_them():
    able = ServerFeatures(version="1", tls=True, deflate=True, snappy=True, max_deflate_level=5)
    wish = {"feature_negotiation": True, "tls_v1": True, "deflate": True, "deflate_level": 9}
    assert not identify(**wish).upgrades
    granted = identify(able, **wish)
    assert (granted.tls, granted.deflate_level, granted.snappy) == (True, 5, False)
    with pytest.raises(RemoteProtocolError, match="cannot enable both deflate and snappy"):
        identify(able, **wish, snappy=True)


@pytest.mark.parametrize("tag", ["", "a", "A-z_09", "x" * 100])
def test_a_desired_tag_is_echoed_only_when_it_is_set(tag):
    body = json.dumps({"feature_negotiation": True, "extend_support": True, "desired_tag": tag}).encode()
    negotiated = negotiate(parse_request(body), SERVER)
    assert (negotiated.request.extend_support, negotiated.request.desired_tag) == (True, tag)
    assert json.loads(negotiated.response or b"").get("desired_tag") == (tag or None)


@pytest.mark.parametrize("tag", ["x" * 101, "a b", "\u00fc", "a\n", "#"])
def test_a_desired_tag_that_is_none(tag):
    with pytest.raises(RemoteProtocolError, match="E_BAD_BODY IDENTIFY desired tag"):
        negotiate(parse_request(json.dumps({"desired_tag": tag}).encode()), SERVER)


def test_a_client_of_plain_nsq_asks_for_neither():
    request = parse_request(b"{}")
    assert (request.extend_support, request.desired_tag) == (False, "")
