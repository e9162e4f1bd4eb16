"""PUB_ONCE and MPUB_ONCE: what the serialisers build is what the parser reads, however the network cuts it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.wire.built import mpub_once, pub_once

from flintmq.errors import LocalProtocolError, RemoteProtocolError
from flintmq.wire.client import ClientConnection, Refused, Reply, parse_features
from flintmq.wire.frames import error_frame, response_frame
from flintmq.wire.identify import IdentifyRequest, OnceIdentifyRequest, ServerFeatures, negotiate, parse_request
from flintmq.wire.params import is_producer_id, parse_sequence
from flintmq.wire.server import Publish, ServerConnection, ServerLimits, Violation

LIMITS = ServerLimits(max_msg_size=100, max_body_size=400)
ids = st.text("abcXYZ019._:-", min_size=1, max_size=64)
sequences = st.integers(1, 2**63 - 20)
bodies = st.binary(min_size=1, max_size=30)


def parse(data: bytes, step: int | None = None):
    parser = ServerConnection(LIMITS)
    parser.receive_data(b"  V2")
    pieces = [data] if step is None else [data[i : i + step] for i in range(0, len(data), step)]
    events = []
    for piece in pieces:
        events += parser.receive_data(piece)
        while parser.has_more:
            events += parser.more()
    return events


@given(ids, sequences, st.lists(bodies, min_size=1, max_size=8), st.none() | st.integers(0, 1023), st.integers(1, 40))
def test_what_is_built_is_what_is_read(producer_id, sequence, several, partition, step):
    data = mpub_once("t", partition, producer_id, sequence, several)
    (event,) = parse(data)
    raw_id = producer_id.encode()
    expected = Publish("MPUB_ONCE", "t", several, 1, 0, partition, producer_id=raw_id, sequence=sequence)
    assert (*event.bodies,) == (*several,)
    event.bodies = several
    assert event == expected
    (cut,) = parse(data, step)
    assert (cut.sequence, [*cut.bodies], cut.last) == (sequence, several, sequence + len(several) - 1)
    (single,) = parse(pub_once("t", partition, producer_id, sequence, several[0]))
    assert single == Publish("PUB_ONCE", "t", several[:1], 1, 0, partition, producer_id=raw_id, sequence=sequence)


def test_a_run_is_one_event_as_long_as_it_goes_on():
    data = b"".join(
        pub_once("t", None, producer, sequence, b"%d" % sequence)
        for producer, sequence in [("p", 1), ("p", 2), ("p", 3), ("p", 5), ("p", 5), ("q", 6), ("q", 7)]
    )
    found = [(event.producer_id, event.sequence, event.replies) for event in parse(data)]
    assert found == [(b"p", 1, 3), (b"p", 5, 1), (b"p", 5, 1), (b"q", 6, 2)]
    other = pub_once("t", None, "p", 1, b"x") + pub_once("u", None, "p", 2, b"x") + pub_once("u", 0, "p", 3, b"x")
    assert [event.replies for event in parse(other)] == [1, 1, 1]
    plain = pub_once("t", None, "p", 1, b"x") + b"PUB t\n\0\0\0\1a" + pub_once("t", None, "p", 2, b"x")
    assert [event.command for event in parse(plain)] == ["PUB_ONCE", "PUB", "PUB_ONCE"]
    many = b"".join(pub_once("t", None, "p", sequence, b"x") for sequence in range(1, 2501))
    assert [event.replies for event in parse(many)] == [512, 512, 512, 512, 452]


def test_bodies_are_bounded_as_those_of_others():
    (event,) = parse(b"PUB_ONCE t - p 1\n\0\0\0\x65")
    assert event == Violation("E_BAD_MESSAGE", "PUB_ONCE message too big 101 > 100")
    (event,) = parse(b"MPUB_ONCE t - p 1\n\0\0\1\x91")
    assert event == Violation("E_BAD_BODY", "MPUB body too big 401 > 400")
    (event,) = parse(b"MPUB_ONCE t - p 0\n")
    assert event.code == "E_INVALID", "before its bodies are gathered"


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        (b"1", 1, 1),
        (b"0", 1, None),
        (b"", 1, None),
        (b"-1", 1, None),
        (b"9223372036854775807", 1, 2**63 - 1),
        (b"9223372036854775807", 2, None),
        (b"9223372036854775808", 1, None),
        (b"10000000000000000000", 1, None),
        (b"0000000000000000001", 1, 1),
        ("²".encode(), 1, None),
    ],
)
def test_sequences(text, count, expected):
    assert parse_sequence(text, count) == expected


@pytest.mark.parametrize("producer_id", ["", "a b", "ä", "x" * 65, "a\n", "a/b"])
def test_nothing_illegal_is_sent(producer_id):
    assert not is_producer_id(producer_id.encode())
    with pytest.raises(LocalProtocolError, match="producer id"):
        pub_once("t", None, producer_id, 1, b"x")
    with pytest.raises(LocalProtocolError, match="sequence"):
        pub_once("t", None, "p", 0, b"x")
    with pytest.raises(LocalProtocolError, match="empty"):
        pub_once("t", None, "p", 1, b"")
    with pytest.raises(LocalProtocolError, match="none may be empty"):
        mpub_once("t", None, "p", 1, [])


def test_the_client_takes_its_answers():
    wire = ClientConnection()
    wire.publish("t", [b"x"], "one", producer_id="p", sequence=1)
    wire.publish("t", [b"x", b"y"], "two", producer_id="p", sequence=2)
    wire.publish("t", [b"x"], "three", producer_id="p", sequence=5)
    answers = (
        response_frame(b"OK") + error_frame("E_MPUB_ONCE_FAILED", "disk full") + error_frame("E_SEQUENCE_GAP", "p")
    )
    assert wire.receive(answers) == [
        Reply("PUB_ONCE", "one", b"OK"),
        Refused("MPUB_ONCE", "two", "E_MPUB_ONCE_FAILED", "disk full", False),
        Refused("PUB_ONCE", "three", "E_SEQUENCE_GAP", "p", False),
    ]


def answer(request: IdentifyRequest, features: ServerFeatures):
    response = negotiate(parse_request(msgspec.json.encode(request)), features).response
    assert response is not None
    return parse_features(response), response


def test_identify_answers_who_asks():
    asks = OnceIdentifyRequest(feature_negotiation=True)
    assert answer(asks, ServerFeatures("1"))[0].producer_sequences
    assert not answer(asks, ServerFeatures("1", producer_sequences=False))[0].producer_sequences
    features, response = answer(IdentifyRequest(feature_negotiation=True), ServerFeatures("1"))
    assert not features.producer_sequences and b"producer_sequences" not in response
    with pytest.raises(RemoteProtocolError):
        parse_request(b'{"producer_sequences": 1}')


def test_nsqd_says_who_it_is_to_whoever_asks():
    asks = IdentifyRequest(feature_negotiation=True, nsqd_run_id=True)
    assert answer(asks, ServerFeatures("1", run_id="x"))[0].nsqd_run_id == "x"
    for request, features in (
        (asks, ServerFeatures("1")),
        (IdentifyRequest(feature_negotiation=True), ServerFeatures("1", run_id="x")),
    ):
        found, response = answer(request, features)
        assert not found.nsqd_run_id and b"run_id" not in response
